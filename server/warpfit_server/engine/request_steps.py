"""The steps of a request: what the engine computes, and what is finished from its sums."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from warpfit.dataset import Dataset
from warpfit.errors import DatasetNotFoundError
from warpfit.fitting import FitProgress, FitRequest
from warpfit.request import Timings
from warpfit_server.engine.finalize import engine_share, finish
from warpfit_server.engine.interface import Engine, Outputs, Steps
from warpfit_server.engine.request import Request
from warpfit_server.ipc import messages
from warpfit_server.ipc.segment_layout import FIT_SETTING_ARRAYS

#: Least time between two messages of progress, in seconds.
_PROGRESS_SECONDS: Final = 0.1


class Worker:
    """Makes the steps of requests.

    Args:
        engine: what computes.
        datasets: those that the engine has, by their keys.
        chunk_bytes: of values that are worth a message that they are final.
        cache_directory: where compiled code of fits is kept.

    """

    def __init__(
        self,
        engine: Engine,
        datasets: Mapping[bytes, Dataset],
        chunk_bytes: int,
        cache_directory: Path | None = None,
    ) -> None:
        self._engine = engine
        self._datasets = datasets
        self._chunk_bytes = chunk_bytes
        self._cache_directory = cache_directory

    def begin(self, request: Request) -> Steps[Timings]:
        """Make the steps of a request; its results are in its segment after the last one."""
        if isinstance(request.order, messages.SubmitFit):
            return self._optimize(request, request.order)
        return self._evaluate(request)

    def _evaluate(self, request: Request) -> Steps[Timings]:
        asked = request.evaluation
        dataset = self._dataset(asked.dataset_id)
        results = request.problem.segment_layout.results(request.segment)
        outputs = Outputs(
            values=results.get("values"),
            losses=results.get("losses"),
            cancelled=request.cancelled,
            ready=self._progress(request),
            gradients=results.get("gradients"),
            jacobian=results.get("jacobian"),
            variable_gradients=results.get("variable_gradients"),
            reductions=results.get("reductions"),
        )
        evaluation, share = engine_share(asked, outputs)
        timings = yield from self._engine.evaluate(evaluation, share)
        finish(
            asked,
            dataset,
            outputs,
            share.moments,
            results.get("scaling"),
            results.get("correlations"),
        )
        return timings

    def _optimize(self, request: Request, message: messages.SubmitFit) -> Steps[Timings]:
        # Imported on first use, because importing it costs a start of the server some time.
        from warpfit_server.engine.fit.driver import Surroundings, optimize

        problem, segment = message.problem, request.segment
        layout = problem.segment_layout
        bounds: Any = {name: layout.array(name, segment) for name in FIT_SETTING_ARRAYS}
        # An engine keeps what it has made of these arrays, and with it their memory.
        evaluation = replace(request.evaluation, batch=request.evaluation.batch.copy())
        fit = FitRequest(evaluation, replace(message.settings, **bounds))
        result = yield from optimize(
            fit,
            Surroundings(
                engine=self._engine,
                dataset=self._dataset(problem.dataset_id),
                cancelled=request.cancelled,
                deadline=message.deadline,
                report=_fit_progress(request, message),
                cache_directory=self._cache_directory,
            ),
        )
        for name, array in layout.results(segment).items():
            np.copyto(array, getattr(result, name))
        return result.timings

    def _dataset(self, content_id: bytes) -> Dataset:
        dataset = self._datasets.get(content_id)
        if dataset is None:
            raise DatasetNotFoundError
        return dataset

    def _progress(self, request: Request) -> Callable[[int], None]:
        """Report progress when it frees at least one chunk of values for sending."""
        layout = request.problem.segment_layout
        step = max(1, self._chunk_bytes // max(1, layout.program_bytes))
        reported = 0

        def ready(programs: int) -> None:
            nonlocal reported
            if request.evaluation.values and programs - reported >= step:
                reported = programs
                request.connection.send(messages.ValuesReady(request.number, programs))

        return ready


def _fit_progress(
    request: Request, message: messages.SubmitFit
) -> Callable[[FitProgress], None] | None:
    """Report progress a few times a second, if it is asked for."""
    if not message.settings.progress:
        return None
    reported = time.monotonic()

    def report(progress: FitProgress) -> None:
        nonlocal reported
        if time.monotonic() - reported >= _PROGRESS_SECONDS:
            reported = time.monotonic()
            request.connection.send(messages.FitProgressed(request.number, progress))

    return report
