"""Runs requests on the engine: evaluations, several evaluations merged into one, and fits."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Dataset
from warpfit.errors import ProgramError
from warpfit.fitting import FitProgress, FitRequest, FitSettings
from warpfit.request import STAGES, Evaluation, Timings
from warpfit_server.engine.finalize import Finalizer, reduce_to_sums
from warpfit_server.engine.interface import (
    Engine,
    Outputs,
    Steps,
    offload,
)
from warpfit_server.engine.loaded_datasets import LoadedDatasets
from warpfit_server.engine.merging import Merger, hand_out, join
from warpfit_server.engine.parts import FitPasses, parts_of
from warpfit_server.engine.request import Request
from warpfit_server.ipc import messages
from warpfit_server.ipc.segment_layout import FIT_SETTING_ARRAYS

#: Least seconds between two progress messages of a fit.
_PROGRESS_SECONDS: Final = 0.1
#: Results that are made of moments, which are no outputs of an engine.
_SCALED: Final = frozenset({"scaling", "correlations"})


class RequestRunner:
    """Makes the steps of requests, and runs merged evaluations.

    Args:
        engine: that computes.
        datasets: that the engine has loaded.
        chunk_bytes: least size of final values that is worth a progress message.
    """

    def __init__(
        self,
        engine: Engine,
        datasets: LoadedDatasets,
        chunk_bytes: int,
    ) -> None:
        self._datasets = datasets
        self._chunk_bytes = chunk_bytes
        self._finalizer = Finalizer()
        self._merger = Merger(engine)

    def begin(self, request: Request) -> Steps[Timings]:
        """Return the steps of a request; after the last one its results are in its segment."""
        if request.problem.fit is not None:
            return self._optimize(request, *request.problem.fit)
        return self._evaluate(request)

    def plan_merging(self, request: Request) -> None:
        """Set what the scheduler needs to merge a new request with others."""
        self._merger.plan(request)

    def begin_merged(self, requests: Sequence[Request]) -> Steps[Timings]:
        """Evaluate requests with the same `merge_key` as one batch; fill in the results of each."""
        merged, outputs = join(requests)
        timings = yield from self._datasets.evaluate(merged, outputs)
        dataset = self._datasets.whole(merged.dataset_id)
        yield from self._finalizer.finalize(merged, dataset, outputs)
        hand_out(outputs, requests)
        return timings

    def _evaluate(self, request: Request) -> Steps[Timings]:
        """Evaluate one part of the batch after the other."""
        evaluation = request.evaluation
        dataset = self._datasets.whole(evaluation.dataset_id)
        results = request.problem.segment_layout.results(request.segment)
        outputs = _outputs(request, results, self._value_progress(request))
        parts, sums = parts_of(evaluation, dataset.layout), Timings()
        for part in parts:
            own, into, taken = evaluation, outputs, results
            if len(parts) > 1:
                own = replace(evaluation, batch=part.batch(evaluation.batch))
                into = part.outputs(outputs)
                taken = {name: part.of(name, results[name]) for name in _SCALED & results.keys()}
            try:
                timings = yield from self._evaluate_part(own, dataset, into, taken)
            except ProgramError as error:
                error.expression = part.programs.start + (error.expression or 0)
                raise
            if len(parts) == 1:
                return timings
            added = {n: getattr(sums, n) + getattr(timings, n) for n in (*STAGES, "cache_hits")}
            sums = replace(timings, **added)
            yield None
        return sums

    def _evaluate_part(
        self,
        evaluation: Evaluation,
        dataset: Dataset,
        outputs: Outputs,
        results: Mapping[str, NDArray[Any]],
    ) -> Steps[Timings]:
        of_sums, sums = reduce_to_sums(evaluation, outputs)
        timings = yield from self._datasets.evaluate(of_sums, sums)
        scaled = results.get("scaling"), results.get("correlations")
        yield from self._finalizer.finalize(evaluation, dataset, outputs, sums.moments, *scaled)
        return timings

    def _optimize(
        self, request: Request, settings: FitSettings, deadline: float | None
    ) -> Steps[Timings]:
        # Imported on first use, because importing it delays the start of the server.
        from warpfit_server.engine.fit.driver import FitContext, optimize

        problem, segment = request.problem, request.segment
        layout = problem.segment_layout
        bounds: Any = {name: layout.array(name, segment) for name in FIT_SETTING_ARRAYS}
        # Engines keep the lowered programs as long as these arrays live: not in a shared segment.
        evaluation = replace(request.evaluation, batch=request.evaluation.batch.copy())
        fit = FitRequest(evaluation, replace(settings, **bounds))
        dataset = self._datasets.whole(problem.dataset_id)
        context = FitContext(
            linearise=FitPasses(self._datasets.linearise).linearise,
            evaluate=self._datasets.evaluate,
            dataset=dataset,
            cancelled=request.cancelled,
            deadline=deadline,
            report=_fit_progress(request) if settings.progress else None,
        )
        result = yield from optimize(fit, context)
        for name, array in layout.results(segment).items():
            yield from offload(array.nbytes, partial(np.copyto, array, getattr(result, name)))
        return result.timings

    def _value_progress(self, request: Request) -> Callable[[int], None]:
        """Return what sends a message whenever another chunk of values is final."""
        layout = request.problem.segment_layout
        step = max(1, self._chunk_bytes // max(1, layout.program_bytes))
        reported = 0

        def ready(programs: int) -> None:
            nonlocal reported
            if request.evaluation.values and programs - reported >= step:
                reported = programs
                request.connection.send(messages.ValuesReady(request.number, programs))

        return ready


def _outputs(
    request: Request, results: Mapping[str, NDArray[Any]], ready: Callable[[int], None]
) -> Outputs:
    names = ("values", "losses", "gradients", "jacobian", "variable_gradients", "reductions")
    arrays: dict[str, Any] = {name: results.get(name) for name in names}
    return Outputs(cancelled=request.cancelled, ready=ready, **arrays)


def _fit_progress(request: Request) -> Callable[[FitProgress], None]:
    """Return what sends progress messages at intervals."""
    reported = time.monotonic()

    def report(progress: FitProgress) -> None:
        nonlocal reported
        if time.monotonic() - reported >= _PROGRESS_SECONDS:
            reported = time.monotonic()
            request.connection.send(messages.FitProgressed(request.number, progress))

    return report
