"""Fits by the driver, without a server."""

import numpy as np

from support.engines.references import NumpyEngine
from warpfit import parse
from warpfit.calls.results import Fit
from warpfit.dataset import Dataset
from warpfit.ir import Batch
from warpfit.losses import Loss
from warpfit.request import Accuracy, Evaluation, FitRequest, FitSettings, Method, Tolerances
from warpfit_server.engine.fit import driver
from warpfit_server.engine.fit.driver import FitContext, optimize
from warpfit_server.engine.interface import run_to_end


def fit(dataset: Dataset, texts, starts, **options) -> Fit:
    """Fit texts from starts, with the options of `prepared`."""
    request, context = prepared(dataset, texts, starts, **options)
    return Fit.of(run_to_end(optimize(request, context)), request)


def tight(accuracy: Accuracy, dtype="float64") -> dict[str, float]:
    """Return the settings that an accuracy stands for."""
    limits = Tolerances.of(np.dtype(dtype), accuracy)
    given = {f"{name}_tolerance": getattr(limits, name) for name in ("gradient", "step", "loss")}
    return given | {"max_iterations": accuracy.max_iterations}


def prepared(dataset, texts, starts, *, loss=Loss.SSE, engine=None, cancelled=False, **options):
    """Make a request of texts, or programs, and starts.

    Options are those of `FitSettings`, of `FitContext`, and rows and precision of the problem.
    """
    driver.load()  # as an engine does before its first pass ends
    own, context = (
        {name: options.pop(name) for name in names if name in options}
        for names in (("rows", "precision"), ("deadline", "report", "threads"))
    )
    programs = [parse(text) if isinstance(text, str) else text for text in texts]
    own["loss" if isinstance(loss, Loss) else "custom_loss"] = loss
    batch = Batch.of(programs, starts)
    problem = Evaluation(dataset.content_id, batch, values=False, **own)
    for name in {"lower", "upper", "fixed"} & options.keys():
        options[name] = np.concatenate([np.ravel(entry) for entry in options[name]])
    options["method"] = Method(options.get("method", "auto"))
    request = FitRequest(problem, FitSettings(**options))
    request.check(dataset.layout)
    engine, flag = engine or NumpyEngine(dataset), np.full(1, cancelled, dtype=np.uint8)
    context["small_fits"] = getattr(engine, "small_fits", None)
    given = engine.linearise, engine.evaluate, dataset, flag
    return request, FitContext(*given, **context)
