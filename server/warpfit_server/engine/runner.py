"""Runs requests on the engine: evaluations, also several merged into one, fits and searches.

An engine cuts its work over rows into steps, but the work for a batch as a whole is one step:
planning, adding up sums, filling arrays. So that no step is long, a large batch is computed in
parts:

    for each range of programs, or of the parameter vectors of one program:
        evaluate it into its slices of the outputs, and finalise these

A result does not depend on the other programs of its batch, so its bits are the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Layout
from warpfit.errors import DatasetNotFoundError, ProgramError
from warpfit.ir import Batch, Program
from warpfit.request import (
    OUTPUTS,
    STAGES,
    Evaluation,
    FitProgress,
    FitRequest,
    FitSettings,
    Timings,
)
from warpfit.searching import SearchProgress, SearchRequest
from warpfit_server.engine.evaluation import Finalizer, LoadedDatasets, reduce_to_sums
from warpfit_server.engine.interface import (
    Engine,
    Linearisation,
    Outputs,
    Selection,
    Steps,
    edges_of,
)
from warpfit_server.engine.scheduler import Merger, Request
from warpfit_server.ipc import messages
from warpfit_server.ipc.segments import FIT_SETTING_ARRAYS
from warpfit_server.limits import MOST_SUMS, spans_of_long_programs

#: Least seconds between two progress messages of a fit.
_PROGRESS_SECONDS: Final = 0.1
#: Least seconds between two progress messages of a search, and of a search that has a deadline.
_SEARCH_PROGRESS_SECONDS, _LEAST_SEARCH_SECONDS = 0.5, 0.001
#: Results that are arrays of an engine's outputs.
_OUTPUTS: Final = tuple([output.name for output in OUTPUTS if output.made_of == "engine"])
#: Results that are made of moments, which are no outputs of an engine.
_SCALED: Final = frozenset({output.name for output in OUTPUTS if output.made_of == "moments"})
#: Numbers of a part of an evaluation, unless one program with one vector has more: sums, results
#: other than values, and tokens.
MOST_NUMBERS: Final = 1 << 20
#: Sums of a part of a fit's pass, unless one search has more.
MOST_FIT_SUMS: Final = 1 << 22
#: Most programs of a part of a fit's pass: planning more would hold the engine's thread.
_MOST_FIT_PROGRAMS: Final = 1 << 15
#: Numbers that each program and vector has beside derivatives: sums, reductions, moments.
_OF_A_CELL: Final = 16
#: Arrays of a batch, and numbers that are copied without a pause, which takes a millisecond.
_BATCH_ARRAYS: Final = ("codes", "values", "lengths", "parameter_counts", "parameters")
_COPIED_AT_ONCE: Final = 1 << 18
#: Outputs that have the numbers of `Batch.parameters` on their first axis, not the programs.
_BY_PARAMETERS: Final = frozenset(
    {output.name for output in OUTPUTS if output.axes[0] == "parameters"}
)


class RequestRunner:
    """Makes the steps of requests.

    Args:
        engine: says which requests gain from being merged, and how many threads a fit may use.
        datasets: the engine's data sets, and its passes over them.
        chunk_bytes: least size of final values that is worth a progress message.
    """

    def __init__(
        self,
        engine: Engine,
        datasets: LoadedDatasets,
        chunk_bytes: int,
    ) -> None:
        self._engine = engine
        self._datasets = datasets
        self._chunk_bytes = chunk_bytes
        self._finalizer = Finalizer()
        self.merger = Merger(engine, datasets, self._finalizer)
        """Runs small requests as one batch."""

    def begin(self, request: Request) -> Steps[Timings]:
        """Run a request, part by part; after the last step its results are in its segment."""
        if request.problem.fit is not None:
            return (yield from self._optimize(request, *request.problem.fit))
        if request.problem.search is not None:
            return (yield from self._search(request, *request.problem.search))
        evaluation = request.evaluation
        dataset = self._datasets.whole(evaluation.dataset_id)
        results = request.problem.segment_layout.results(request.segment)
        arrays: dict[str, Any] = {name: results.get(name) for name in _OUTPUTS}
        least = max(1, self._chunk_bytes // max(1, request.problem.segment_layout.program_bytes))
        reported = 0

        def ready(programs: int) -> None:
            """Tell the front end whenever another chunk of values is final."""
            nonlocal reported
            if evaluation.values and programs - reported >= least:
                reported = programs
                request.connection.send(messages.ValuesReady(request.number, programs))

        outputs = Outputs(cancelled=request.cancelled, ready=ready, **arrays)
        parts, sums = parts_of(evaluation, dataset.layout), Timings()
        for part in parts:
            own, into, taken = evaluation, outputs, results
            if len(parts) > 1:
                own = replace(evaluation, batch=part.batch(evaluation.batch))
                into = part.outputs(outputs)
                taken = {name: part.of(name, results[name]) for name in _SCALED & results.keys()}
            try:
                of_sums, summed = reduce_to_sums(own, into)
                timings = yield from self._datasets.evaluate(of_sums, summed)
                scaled = taken.get("scaling"), taken.get("correlations")
                made = own, dataset, into, summed.moments, *scaled
                yield from self._finalizer.finalize(*made)
            except ProgramError as error:
                error.expression = part.programs.start + (error.expression or 0)
                raise
            if len(parts) == 1:
                return timings
            added = {n: getattr(sums, n) + getattr(timings, n) for n in (*STAGES, "cache_hits")}
            sums = replace(timings, **added)
            yield None
        return sums

    def _optimize(
        self, request: Request, settings: FitSettings, deadline: float | None
    ) -> Steps[Timings]:
        # Imported on first use, because importing it delays the start of the server.
        from warpfit_server.engine.fit.driver import FitContext, optimize

        problem, segment = request.problem, request.segment
        layout = problem.segment_layout
        bounds: Any = {name: layout.array(name, segment) for name in FIT_SETTING_ARRAYS}
        # Engines keep the lowered programs as long as these arrays live: not in a shared segment.
        given, copies = request.evaluation, dict[str, Any]()
        for name in _BATCH_ARRAYS:
            array = getattr(given.batch, name)
            copies[name] = np.empty_like(array)
            yield from _copy(array, copies[name])
        evaluation = replace(given, batch=Batch(**copies, vectors=given.batch.vectors))
        fit = FitRequest(evaluation, replace(settings, **bounds))
        dataset = self._datasets.whole(problem.dataset_id)
        reported = time.monotonic()

        def report(progress: FitProgress) -> None:
            """Tell the front end how far the fit is, now and then."""
            nonlocal reported
            if time.monotonic() - reported >= _PROGRESS_SECONDS:
                reported = time.monotonic()
                request.connection.send(messages.FitProgressed(request.number, progress))

        context = FitContext(
            linearise=FitPasses(self._datasets.linearise).linearise,
            small_fits=self._datasets.small_fits,
            evaluate=self._datasets.evaluate,
            dataset=dataset,
            cancelled=request.cancelled,
            statistics=self._finalizer.statistics(dataset, evaluation.row_range(dataset.layout)),
            deadline=deadline,
            report=report if settings.progress else None,
            threads=self._engine.threads,
        )
        result = yield from optimize(fit, context)
        for name, array in layout.results(segment).items():
            yield from _copy(getattr(result, name), array)
        return result.timings

    def _search(
        self, request: Request, search: SearchRequest, deadline: float | None
    ) -> Steps[Timings]:
        """Search until a limit of the request is reached, and send progress to the front end."""
        key, begun = request.problem.dataset_id, time.monotonic()
        dataset = self._datasets.whole(key)
        if deadline is not None:
            left = max(_LEAST_SEARCH_SECONDS, deadline - begun)
            search = replace(search, max_seconds=min(search.max_seconds or left, left))
        reported = -math.inf

        def report(progress: SearchProgress) -> None:
            """Tell the front end how far the search is, at once and now and then."""
            nonlocal reported
            if time.monotonic() - reported >= _SEARCH_PROGRESS_SECONDS:
                reported = time.monotonic()
                send(progress)

        def send(progress: SearchProgress) -> None:
            request.connection.send(messages.SearchProgressed(request.number, progress))

        steps = self._engine.search(
            search, self._datasets, cancelled=request.cancelled, report=report
        )
        computed = 0
        try:
            while True:
                started = time.perf_counter_ns()
                try:
                    waits_for = next(steps)
                except StopIteration as end:
                    send(end.value)
                    computed += time.perf_counter_ns() - started
                    return Timings(compute=computed)
                computed += time.perf_counter_ns() - started
                yield waits_for
                if self._datasets.whole(key) is not dataset:  # it was removed, and came again
                    raise DatasetNotFoundError
        finally:
            steps.close()


def _copy(source: NDArray[Any], target: NDArray[Any]) -> Steps[None]:
    """Copy an array of any shape, in C order, some numbers at a time."""
    given, taken = source.reshape(-1), target.reshape(-1)
    for start in range(0, len(given), _COPIED_AT_ONCE):
        if start:
            yield None
        part = slice(start, start + _COPIED_AT_ONCE)
        taken[part] = given[part]


class Part(NamedTuple):
    """Some programs of a batch with all parameter vectors, or one program with some of them."""

    programs: slice
    vectors: slice
    parameters: slice
    """Their numbers of `Batch.parameters`."""
    is_last: bool
    """Whether no more vectors of its last program follow."""

    def batch(self, batch: Batch) -> Batch:
        """Return the part of the batch."""
        own = batch[self.programs]
        vectors = self.vectors.stop - self.vectors.start
        return replace(own, parameters=batch.parameters[self.parameters], vectors=vectors)

    def outputs(self, outputs: Outputs) -> Outputs:
        """Return the slices of outputs that the part fills."""
        arrays = {each.name: getattr(outputs, each.name) for each in fields(outputs)}
        own = {
            name: self.of(name, array)
            for name, array in arrays.items()
            if isinstance(array, np.ndarray) and name != "cancelled"
        }
        first, is_last = int(self.programs.start), self.is_last

        def ready(programs: int) -> None:
            if is_last:
                outputs.ready(first + programs)

        return replace(outputs, **own, ready=ready)

    def of(self, name: str, array: NDArray[Any]) -> NDArray[Any]:
        """Return the slice of an output that belongs to the part."""
        if name in _BY_PARAMETERS:
            return array[self.parameters]
        return array[self.programs, self.vectors]


def parts_of(evaluation: Evaluation, layout: Layout) -> list[Part]:
    """Cut an evaluation into parts of not too many numbers; most have one."""
    batch, (programs, vectors, rows) = evaluation.batch, evaluation.shape(layout)
    # Columns of derivatives are no more than tokens.
    derives = evaluation.gradient or evaluation.variable_gradient or evaluation.jacobian
    of_cell = _OF_A_CELL + layout.variables * evaluation.variable_gradient
    tokens = len(batch.codes)
    numbers = tokens * (1 + vectors * derives) + programs * vectors * of_cell
    if numbers * spans_of_long_programs(tokens, rows) <= MOST_NUMBERS:  # without a look at each
        whole = slice(0, programs), slice(0, vectors), slice(0, len(batch.parameters))
        return [Part(*whole, is_last=True)]
    lengths, starts = batch.lengths.astype(np.int64), batch.parameter_starts
    spans = spans_of_long_programs(int(lengths.max()), rows)
    most = max(1, min(MOST_NUMBERS, MOST_SUMS // spans))
    of_vector = of_cell + lengths * derives
    parts = []
    for first, stop in pairwise(edges_of(lengths + vectors * of_vector, most)):
        step = vectors
        if stop == first + 1:
            step = max(1, most // int(lengths[first] + of_vector[first]))
        count = (int(starts[stop]) - int(starts[first])) // vectors
        for vector in range(0, vectors, step):
            end = min(vector + step, vectors)
            begin = int(starts[first])
            parameters = slice(begin + vector * count, begin + end * count)
            own = slice(first, stop), slice(vector, end), parameters
            parts.append(Part(*own, is_last=end == vectors))
    return parts


class FitPasses:
    """The passes of one fit, each of them in parts that have not too many sums.

    Args:
        linearise: `interface.Engine.linearise`.
    """

    def __init__(self, linearise: Callable[..., Steps[Linearisation]]) -> None:
        self._linearise = linearise
        self._last: tuple[NDArray[np.int64], list[tuple[slice, NDArray[np.int64]]]] | None = None
        """The selected programs of the last pass, in parts; most passes select the same ones."""

    def linearise(
        self,
        evaluation: Evaluation,
        row_loss: Program,
        *,
        curvature: bool,
        cancelled: NDArray[np.uint8],
        selection: Selection,
    ) -> Steps[Linearisation]:
        """Linearise a batch with one vector for each program; see `interface.Engine`."""
        batch, options = evaluation.batch, {"curvature": curvature, "cancelled": cancelled}
        counts = batch.parameter_counts.astype(np.int64)
        if self._last is None or self._last[0] is not selection.programs:
            sums = np.maximum(2 + counts + counts * counts, MOST_FIT_SUMS // _MOST_FIT_PROGRAMS)
            edges = edges_of(sums, MOST_FIT_SUMS)
            ranges = [slice(*edge) for edge in pairwise(edges)]
            chosen = [(some, selection.programs[some]) for some in ranges]
            self._last = selection.programs, chosen
        _, parts = self._last
        if len(parts) == 1:
            found = yield from self._linearise(evaluation, row_loss, **options, selection=selection)
            return found
        numbers = batch.parameter_starts
        triangles = np.concatenate([[0], np.cumsum(counts * (counts + 1) // 2)])
        whole = Linearisation(
            losses=np.empty((len(batch), 1)),
            gradients=np.empty(int(numbers[-1])),
            curvatures=np.empty(int(triangles[-1])) if curvature else None,
        )
        for some, programs in parts:
            own = replace(evaluation, batch=batch[some])
            part = Selection(selection.batch, programs)
            found = yield from self._linearise(own, row_loss, **options, selection=part)
            whole.losses[some] = found.losses
            whole.gradients[numbers[some.start] : numbers[some.stop]] = found.gradients
            if whole.curvatures is not None:
                place = slice(triangles[some.start], triangles[some.stop])
                whole.curvatures[place] = found.curvatures
            yield None
        return whole
