"""Fits by the driver, without a server."""

import numpy as np

from support.engines.references import NumpyEngine
from warpfit import parse
from warpfit.calls.results import Fit
from warpfit.dataset import Dataset
from warpfit.ir import Batch
from warpfit.losses import Loss, LossFunction
from warpfit.request import (
    Accuracy,
    Evaluation,
    FitRequest,
    FitSettings,
    Method,
    Precision,
    Tolerances,
)
from warpfit_server.engine.fit import driver
from warpfit_server.engine.fit.driver import FitContext, optimize
from warpfit_server.engine.interface import run_to_end


def fit(dataset: Dataset, texts, starts, **options) -> Fit:
    """Fit texts from starts, with the options of `prepared`."""
    request, context = prepared(dataset, texts, starts, **options)
    result = run_to_end(optimize(request, context))
    return Fit.of(result, request)


def tight(accuracy: Accuracy, dtype="float64") -> dict[str, float]:
    """Return the settings that an accuracy stands for."""
    limits = Tolerances.of(np.dtype(dtype), accuracy)
    return {
        "gradient_tolerance": limits.gradient,
        "step_tolerance": limits.step,
        "loss_tolerance": limits.loss,
        "max_iterations": accuracy.max_iterations,
    }


def prepared(
    dataset: Dataset,
    texts,
    starts,
    *,
    loss=Loss.SSE,
    rows=None,
    engine=None,
    deadline=None,
    report=None,
    cancelled=False,
    precision=Precision.PRECISE,
    threads=1,
    **settings,
) -> tuple[FitRequest, FitContext]:
    """Make a request of texts, or programs, and starts, with the settings of `FitSettings`."""
    driver.load()  # as an engine does before its first pass ends
    programs = [parse(text) if isinstance(text, str) else text for text in texts]
    batch = Batch.of(programs, starts)
    problem = Evaluation(
        dataset.content_id,
        batch,
        rows=rows,
        loss=loss if isinstance(loss, Loss) else None,
        custom_loss=loss if isinstance(loss, LossFunction) else None,
        values=False,
        precision=precision,
    )
    for name in ("lower", "upper", "fixed"):
        if name in settings:
            settings[name] = np.concatenate([np.ravel(entry) for entry in settings[name]])
    settings["method"] = Method(settings.get("method", "auto"))
    request = FitRequest(problem, FitSettings(**settings))
    request.check(dataset.layout)
    engine = engine or NumpyEngine(dataset)
    context = FitContext(
        linearise=engine.linearise,
        evaluate=engine.evaluate,
        dataset=dataset,
        cancelled=np.full(1, cancelled, dtype=np.uint8),
        deadline=deadline,
        report=report,
        threads=threads,
        small_fits=getattr(engine, "small_fits", None),
    )
    return request, context
