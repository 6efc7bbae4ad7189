"""The batched driver of fits: all searches advance together, one engine pass for each step.

The simple form:

    while searches run and there is time:
        evaluate loss, gradient and curvature of all trial points in one pass of the engine
        judge each trial and propose the next one (`levenberg_marquardt`, `bfgs`)

Searches that have ended drop out of the batch, so that they cost no more. Engines compile and load
the code of the methods with that of derivatives (`load`), for which the first pass waits.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Final, TypeVar

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

from warpfit.dataset import Dataset
from warpfit.errors import CancelledError
from warpfit.evidence import covariance_of
from warpfit.ir import Program
from warpfit.losses import SQUARES as SQUARED_DIFFERENCES
from warpfit.losses import TargetStatistics, close_losses, mentions_weight
from warpfit.request import (
    Evaluation,
    FitProgress,
    FitRequest,
    FitResult,
    Method,
    Missing,
    Precision,
    Timings,
    even_bounds,
)
from warpfit_server.engine.fit import bfgs, levenberg_marquardt, linear_model, starts
from warpfit_server.engine.fit.bfgs import has_kinks, squared_slope
from warpfit_server.engine.fit.linear_model import COLUMNS, mark_linear, operator_table
from warpfit_server.engine.fit.searches import (
    BEGINS,
    ENDING,
    EVALUATIONS,
    FACTOR,
    FREE,
    INITIAL,
    ITERATIONS,
    LEAVES_FLOAT32,
    LINEAR,
    LOSS,
    LOSS_CHANGE,
    NOT_FINITE,
    PAIRS,
    PARAMETERS,
    PULL,
    REASON,
    RIGHT,
    RUNNING,
    SQUARES,
    STIFFNESS,
    TOKENS,
    TRIAL,
    WANTED,
    Floats,
    Integers,
    Searches,
    SearchLimits,
    X,
    diagonals,
    one_vector_each,
    spread,
)
from warpfit_server.engine.fit.starts import Scales, VariableSizes, with_restarts, without_missing
from warpfit_server.engine.interface import (
    Linearisation,
    Outputs,
    Selection,
    SmallFits,
    Steps,
    timed,
)
from warpfit_server.engine.native import numba_cache
from warpfit_server.engine.native.numba_cache import NICE
from warpfit_server.limits import JACOBIAN_NUMBERS, fit_memory
from warpfit_server.machine import available_cores, give_back_memory

#: The batch shrinks when at least this share of its searches has ended: each selection costs the
#: engine some preparation, each search that stays costs its evaluation.
_SHRINK_SHARE: Final = 1 / 8
#: Share of the batch that must wait for being inspected, which takes passes with more to compute.
_INSPECTED_SHARE: Final = 1 / 2
#: Mean of squares below which fast mode is given up: float32 reaches down to 1e-38, and a fit makes
#: residuals smaller than they are at its start.
_SMALL_IN_FLOAT32: Final = 1e-28
#: Square of the largest target below which squares of residuals lose digits in float64.
_SMALL_IN_FLOAT64: Final = 1e-304
#: Relative difference of two sums over all rows by rounding.
_ROUNDING: Final = 1e-6
#: Bytes of a fit after which the allocator returns free memory to the system.
_LARGE_FIT: Final = 2**25
#: Work between passes that takes longer than this many microseconds is done by another thread. It
#: is cut into pieces of `_PIECE` microseconds, so that other fits get their turn and a cancelled
#: fit ends soon.
_MUCH_WORK: Final = 2_000.0
_PIECE: Final = 100_000.0
#: Such work takes about a microsecond for each search, and as much for so many cubes of parameters,
#: or tokens.
_CUBES: Final = 500.0
_TOKENS: Final = 10.0
_THREAD: Final = ThreadPoolExecutor(1, "fit", os.nice, (NICE,))  # on Linux, of it alone
#: Factors of different searches are computed at the same time.
_FACTOR_THREADS: Final = ThreadPoolExecutor(available_cores(), "factor", os.nice, (NICE,))
#: Multiplications and additions of a factor in a microsecond.
_FACTOR_RATE: Final = 500.0
Result = TypeVar("Result")
#: Some searches, and the estimated microseconds in which the next step of each is found.
Piece = tuple[slice, float]
_NUMBERS, _ROWS, _COUNTS = types.float64[::1], types.float64[:, ::1], types.int64[:, ::1]
_LIMITS: Final = numba.typeof(SearchLimits(0.0, 0.0, 0.0, 0, False, 0.0, 0.0, 0.0, True, False))
_SPACE: Final = numba.typeof(linear_model.workspace(1, np.zeros(1, dtype=np.uint8)))
#: Arguments of both compiled methods: the state of the searches, and the results of a pass.
_STATE: Final = _COUNTS, _ROWS, _ROWS, _COUNTS, *[_NUMBERS] * 4
#: Value of ``cancelled`` when the time is up; whoever cancels the call writes 1.
_TIME_IS_UP: Final = 2


@dataclass(frozen=True, slots=True, eq=False)
class FitContext:
    """The surroundings of a fit: engine, data set, cancellation, deadline, progress."""

    linearise: Callable[..., Steps[Linearisation]]
    """`warpfit_server.engine.interface.Engine.linearise` of what evaluates its passes."""
    evaluate: Callable[..., Steps[Timings]]
    """`warpfit_server.engine.interface.Engine.evaluate` of the same."""
    dataset: Dataset
    cancelled: NDArray[np.uint8]
    """[1]; becomes 1 when the call is cancelled."""
    statistics: TargetStatistics | None = None
    """Statistics of the target over the rows of the fit; None if they have to be computed."""
    deadline: float | None = None
    """``time.monotonic()`` at which to stop with the best parameters so far; None for never."""
    report: Callable[[FitProgress], None] | None = None
    """Called between passes."""
    threads: int = 1
    """Most threads that compute at the same time for a fit beside the engine's passes."""
    small_fits: Callable[..., Steps[SmallFits | None]] | None = None
    """`warpfit_server.engine.interface.Engine.small_fits` of the same; None for none."""


def optimize(request: FitRequest, context: FitContext) -> Steps[FitResult]:
    """Fit the parameters of a checked request; each step is one step of an engine pass.

    Raises:
        CancelledError: if ``context.cancelled`` became 1.
        WarpfitError: as the engine's `linearise`.
    """
    result, compute = yield from timed(_optimize(request, context))
    return replace(result, timings=Timings(compute=compute))


def _optimize(request: FitRequest, context: FitContext) -> Steps[FitResult]:
    try:
        batch, dataset = request.problem.batch, context.dataset
        rows = slice(*request.problem.row_range(dataset.layout))
        statistics = context.statistics or TargetStatistics.of_rows(dataset, rows)
        yield from statistics.divisor_steps(request.loss.closing)
        yield from statistics.steps("rows")
        if request.loss.is_squares:
            yield from statistics.steps("squares", "variation")
        if request.settings.missing is Missing.DROP:
            yield from statistics.steps("mean")
        searches = len(batch) * (batch.vectors + request.settings.restarts)
        work = float(searches) + len(batch.codes) / _TOKENS
        work = work if starts.is_loaded() else math.inf
        sizes = yield from _on_fit_thread(work, partial(VariableSizes, batch, dataset, rows))
        yield from sizes.steps()
        make = partial(_Driver, request, context, statistics, sizes)
        # Nothing refers to the driver, which has the memory, when that is given back below.
        steps = (yield from _on_fit_thread(work, make)).run()
        del make, sizes
        result = yield from steps
        if fit_memory(request, context.dataset.layout) > _LARGE_FIT:
            yield None  # giving memory back takes as long as a step
        return result
    finally:
        if fit_memory(request, context.dataset.layout) > _LARGE_FIT:
            give_back_memory()
            _THREAD.submit(give_back_memory)


def _on_fit_thread(microseconds: float, do: Callable[[], Result]) -> Steps[Result]:
    """Do some work; if it takes long, the engine's thread does other things meanwhile."""
    if microseconds < _MUCH_WORK:
        return do()
    # A thread refers to what it has been given for a moment longer than to what it has taken.
    given = [do]
    del do
    done = _THREAD.submit(lambda: given.pop()())
    yield done
    return done.result()


def _wait_for(work: Sequence[Future[None]]) -> Steps[None]:
    for done in work:
        yield done
        done.result()


class _Driver:
    """The state of one fit."""

    def __init__(
        self,
        request: FitRequest,
        context: FitContext,
        statistics: TargetStatistics,
        sizes: VariableSizes,
    ) -> None:
        self._request = request
        self._context = context
        self._loss = request.loss
        self._is_lm = request.method == Method.LM
        dtype = context.dataset.layout.dtype
        self._rows = slice(*request.problem.row_range(context.dataset.layout))
        self._statistics = statistics
        scales = Scales(request.problem.batch, sizes, context.threads)
        self._request = request = with_restarts(request, scales)
        tolerances, is_squares = request.settings.tolerances(dtype), self._loss.is_squares
        self._limits = SearchLimits(
            gradient=float(tolerances.gradient),
            step=float(tolerances.step),
            loss=float(tolerances.loss),
            iterations=request.settings.max_iterations,
            single=dtype.itemsize == 4,
            # Its square is the share of the loss that the linear model may promise to take off. It
            # follows the tolerance of the loss, from 1e-2 down to 1e-6.
            flat=max(min(max(math.sqrt(tolerances.loss), 1e-6), 1e-2), float(tolerances.gradient)),
            target=statistics.squares if is_squares else 0.0,
            variation=statistics.variation if is_squares else 0.0,
            squares=is_squares,
            kinks=not is_squares and has_kinks(self._loss.row),
        )
        self._problem = request.problem
        if request.settings.missing is Missing.DROP:
            batch = without_missing(request.problem.batch, self._statistics.mean)
            self._problem = replace(request.problem, batch=batch)
        self._batch = one_vector_each(self._problem.batch)
        """The program of each search."""
        self._all = Searches.begin(request, self._batch, scales.natural, dtype)
        self._select(np.arange(len(self._all)), self._all)
        self._is_marked = False
        """Whether the parameters that programs are linear in are known."""
        self._starts = self._all.vectors[X].copy()
        self._pass_seconds = 0.0

    def run(self) -> Steps[FitResult]:
        """Run all searches; return the result.

        What leaves the range of float32 in fast mode runs precisely after the others. So the mode
        of a search depends on itself alone.
        """
        yield from self._run_selected()
        leaving = self._all.counters[:, REASON] == LEAVES_FLOAT32
        if leaving.any():
            self._problem = replace(self._problem, precision=Precision.PRECISE)
            self._all.counters[leaving, REASON] = RUNNING
            self._select(np.flatnonzero(leaving), self._all.only(leaving))
            yield from self._run_selected()
        return (yield from self._result())

    def _run_selected(self) -> Steps[None]:
        """Advance until every selected search has ended or the time is used up.

        Small searches go to their end at once if the engine can do that.
        """
        small = None
        if self._is_lm and self._loss.is_squares and self._context.small_fits:
            small = yield from self._context.small_fits(
                replace(self._problem, batch=self._active_batch),
                self._loss.row,
                cancelled=self._context.cancelled,
                selection=self._selection,
            )
        if small is not None and small.runs.any():
            yield from self._on_fit_thread(self._mark_linear)
            own = self._active if small.runs.all() else self._active.only(small.runs)
            yield from small.run(own, self._limits, self._small_squares, self._turn)
            if own is not self._all:
                self._all.store(self._places[small.runs], own)
            running = self._all.running
            if running.any():
                self._select(np.flatnonzero(running), self._all.only(running))
            del own
        del small  # with what the engine holds for it
        if self._active.running.any():
            yield from self._evaluate_first()
        if (yield from self._is_undefined()):
            self._all.counters[:, REASON] = NOT_FINITE
        with self._interrupted_at_deadline():
            deadline, report = self._context.deadline, self._context.report
            while (yield from self._on_fit_thread(self._drop_finished)):
                if report is not None:
                    running = self._active.running
                    done = int(self._active.counters[running, ITERATIONS].max())
                    report(FitProgress(done, int(running.sum()), len(self._all)))
                # One more pass like the last would end after the deadline.
                if deadline is not None and time.monotonic() + self._pass_seconds >= deadline:
                    self._active.interrupt()
                    continue
                yield None
                new = yield from self._evaluate_trials()
                yield from self._in_pieces(self._pieces, partial(self._advance, new))
                yield from self._factorise(new)

    def _on_fit_thread(self, do: Callable[[], Result]) -> Steps[Result]:
        return _on_fit_thread(sum(microseconds for _, microseconds in self._pieces), do)

    def _in_pieces(self, pieces: Sequence[Piece], do: Callable[[slice], None]) -> Steps[None]:
        """Advance the searches piece by piece: ``do`` solves systems of equations."""
        for some, microseconds in pieces:
            if some.start:
                self._check_cancelled()
            yield from _on_fit_thread(microseconds, partial(do, some))

    def _check_cancelled(self) -> None:
        if self._context.cancelled[0]:
            raise CancelledError("the fit was cancelled", "CANCELLED")

    def _turn(self, iterations: int, running: int) -> bool:
        """Report and check for an end between steps; see `interface.FitTurn`."""
        self._check_cancelled()
        if self._context.report is not None:
            self._context.report(FitProgress(iterations, running, len(self._all)))
        deadline = self._context.deadline
        return deadline is not None and time.monotonic() >= deadline

    def _evaluate_first(self) -> Steps[None]:
        """Evaluate the active searches for the first time."""
        active, first = self._active, (yield from self._linearise(curvature=True))
        # Squares of searches that begin may leave float32, in which fast mode computes.
        if small := self._small_squares:
            sums = first.losses.reshape(-1)
            leaves = ~np.isfinite(sums) | (sums < small)
            assert first.curvatures is not None
            columns, slopes = first.curvatures[diagonals(active.counts)], first.gradients
            columns_leave = ~np.isfinite(columns) | ((columns < small) & (slopes != 0.0))
            owner = np.repeat(np.arange(len(active)), active.counts)
            leaves[owner[columns_leave | ~np.isfinite(slopes)]] = True
            leaves &= active.counters[:, EVALUATIONS] == 0
            active.counters[leaves, REASON] = LEAVES_FLOAT32
        if self._is_lm:
            yield from self._on_fit_thread(self._mark_linear)
        else:
            active.make_room_for_inverse()
            active.counters[:, ENDING] = BEGINS
            assert first.curvatures is not None
            copy = partial(np.copyto, active.curvature, first.curvatures)
            yield from self._on_fit_thread(copy)
            active.numbers[:, STIFFNESS] = 2.0
            if not self._loss.is_squares:
                # The second derivative of the row loss by its residual is estimated. A row loss of
                # s d^2 / 2 has the gradient s J^T W d, where d is prediction minus target.
                squares = yield from self._linearise(curvature=False, row_loss=SQUARED_DIFFERENCES)
                diagonal = active.curvature[diagonals(active.counts)]
                place = np.repeat(np.arange(len(active)), active.counts)
                with np.errstate(all="ignore"):
                    lengths = [
                        np.sqrt(np.bincount(place, np.square(g) / diagonal, len(active)))
                        for g in (first.gradients, squares.gradients)
                    ]
                    stiffness = 2.0 * lengths[0] / lengths[1]
                is_known = np.isfinite(stiffness) & (stiffness > 0.0)
                active.numbers[:, STIFFNESS] = np.where(is_known, stiffness, 1.0)
        yield from self._in_pieces(self._pieces, partial(self._advance, first))
        yield from self._factorise(first)

    @property
    def _small_squares(self) -> float:
        """Sum of squares below which fast mode is given up; 0 in the precise one."""
        is_fast = self._problem.precision is Precision.FAST
        return _SMALL_IN_FLOAT32 * (self._rows.stop - self._rows.start) if is_fast else 0.0

    def _is_undefined(self) -> Steps[bool]:
        """Whether the loss has no value for any parameters, or the target's squares vanish."""
        statistics = self._statistics
        weightless = not statistics.rows and not mentions_weight(self._loss.row)
        if weightless or not np.isfinite(self._finalize(np.zeros(1))).all():
            return True
        # The largest square is no less than the mean of all, which has been computed already.
        if not self._loss.is_squares or self._limits.target > statistics.weight * _SMALL_IN_FLOAT64:
            return False
        yield from statistics.steps("largest")  # whose square may overflow
        return 0.0 < statistics.largest < math.sqrt(_SMALL_IN_FLOAT64)

    def _mark_linear(self) -> None:
        """Find the parameters that programs are linear in; the engine has checked the tokens.

        What leaves rows out does not change that, but for jumps.
        """
        if self._is_marked:
            return
        self._is_marked = True
        batch = one_vector_each(self._request.problem.batch)
        longest, linear = int(batch.lengths.max(initial=1)), self._all.vectors[LINEAR]
        linear[:] = 1.0
        tokens = np.ascontiguousarray(batch.codes), np.ascontiguousarray(batch.values)
        places = np.ascontiguousarray(self._all.edges[:, PARAMETERS])

        def mark(programs: slice) -> None:
            own = slice(programs.start, programs.stop + 1)
            nodes = np.empty((longest, COLUMNS), dtype=np.int64)
            starts = batch.starts[own], places[own]
            mark_linear(*tokens, *starts, operator_table(), nodes, linear)

        spread(batch.lengths / TOKENS, self._context.threads, mark)

    def _evaluate_trials(self) -> Steps[Linearisation]:
        """Evaluate the trials, with the curvature for Levenberg-Marquardt and where BFGS ends.

        For losses other than squares, ends need a number that takes a pass of its own, over them.
        """
        active = self._active
        running = active.running
        waiting = running & (active.counters[:, ENDING] != 0)
        count = int(waiting.sum())
        # Half of the batch is inspected together, or all that are left.
        enough = count >= _INSPECTED_SHARE * len(waiting) or count == int(running.sum())
        if self._is_lm or not count or not enough:
            return (yield from self._linearise(curvature=self._is_lm))
        if not self._loss.is_squares:
            places, columns = self._places[waiting], np.repeat(waiting, active.counts)
            batch = replace(self._batch[places], parameters=active.vectors[TRIAL, columns])
            squares = yield from self._context.linearise(
                replace(self._problem, batch=batch),
                squared_slope(self._loss.row),
                curvature=False,
                cancelled=self._context.cancelled,
                selection=Selection(self._problem.batch, places // self._problem.batch.vectors),
            )
            active.numbers[waiting, PULL] = squares.losses.reshape(-1)
        new = yield from self._linearise(curvature=True)
        assert new.curvatures is not None
        np.copyto(active.curvature, new.curvatures)
        return new

    def _linearise(
        self, *, curvature: bool, row_loss: Program | None = None
    ) -> Steps[Linearisation]:
        """Evaluate the trials of the active searches in one pass of the engine."""
        self._check_cancelled()
        started = time.monotonic()
        batch = replace(self._active_batch, parameters=self._active.vectors[TRIAL])
        linearisation = yield from self._context.linearise(
            replace(self._problem, batch=batch),
            row_loss or self._loss.row,
            curvature=curvature,
            cancelled=self._context.cancelled,
            selection=self._selection,
        )
        self._pass_seconds = time.monotonic() - started
        return linearisation

    def _factorise(self, new: Linearisation) -> Steps[None]:
        """Factorise the Jacobians of the searches that want it, and let these go on.

        The engine computes the Jacobians, a block of rows of some searches at a time.
        """
        active = self._active
        wanted = active.counters[:, FACTOR] == WANTED
        if not wanted.any():
            return
        wanted &= active.running
        if not len(active.inverse):
            active.make_room_for_inverse()
        counts = active.counts
        group_of = np.cumsum(np.where(wanted, counts + 1, 0)) // (JACOBIAN_NUMBERS // 2048)
        for group in np.unique(group_of[wanted]).tolist():
            mask = wanted & (group_of == group)
            columns, squares = np.repeat(mask, counts), np.repeat(mask, counts * counts)
            batch = self._active_batch[np.flatnonzero(mask)]
            batch = replace(batch, parameters=active.vectors[X, columns])
            factors, rights = np.zeros(int(squares.sum())), np.zeros(int(columns.sum()))
            numbers = len(rights) + len(batch)
            step = max(
                linear_model.BLOCK,
                JACOBIAN_NUMBERS // 2 // numbers & -linear_model.BLOCK,
            )
            step = min(step, self._rows.stop - self._rows.start)
            # While some rows are worked into the factors, the engine computes the next ones.
            rooms, absorbing = np.empty((2, numbers * step)), list[Future[None]]()
            for turn, start in enumerate(range(self._rows.start, self._rows.stop, step)):
                yield None
                self._check_cancelled()
                rows = start, min(start + step, self._rows.stop)
                both = rooms[turn % 2, : numbers * (rows[1] - rows[0])].reshape(numbers, -1)
                jacobian, values = both[: len(rights)], both[len(rights) :]
                outputs = Outputs(
                    values.reshape(len(batch), 1, -1),
                    None,
                    self._context.cancelled,
                    lambda programs: None,
                    jacobian=jacobian,
                )
                evaluation = Evaluation(
                    self._problem.dataset_id, batch, rows, tier=self._problem.tier, jacobian=True
                )
                yield from self._context.evaluate(evaluation, outputs)
                yield from _wait_for(absorbing)
                absorbing = self._absorb(jacobian, values, rows, counts[mask], factors, rights)
            yield from _wait_for(absorbing)
            active.inverse[squares], active.vectors[RIGHT, columns] = factors, rights
        active.counters[wanted, EVALUATIONS] += 1
        yield from self._in_pieces(self._pieces, lambda some: self._advance(new, some, True))

    def _absorb(
        self,
        jacobian: Floats,
        values: Floats,
        rows: tuple[int, int],
        counts: Integers,
        factors: Floats,
        rights: Floats,
    ) -> list[Future[None]]:
        """Begin to work rows into the factors of some searches; return what is to be waited for.

        As many threads do that as it gains from, or this one if there is little to do.
        """
        dataset, part = self._context.dataset, slice(*rows)
        assert dataset.target is not None
        weights = np.empty(0) if dataset.weights is None else dataset.weights[part]
        work = np.square(counts + 1.0) * (rows[1] - rows[0]) / _FACTOR_RATE
        threads = min(self._context.threads, int(work.sum() / _MUCH_WORK))
        bounds = even_bounds(work, threads) if threads > 1 else [0, len(counts)]
        columns, squares = (np.concatenate([[0], np.cumsum(n)]) for n in (counts, counts * counts))
        absorbing = []
        for first, stop in pairwise(bounds):
            own = slice(columns[first], columns[stop])
            scratch = np.empty((int(counts[first:stop].max()) + 2, linear_model.BLOCK))
            absorb = partial(
                linear_model.absorb,
                *(jacobian[own], values[first:stop], dataset.target[part], weights),
                *(counts[first:stop], scratch, factors[squares[first] : squares[stop]]),
                *(rights[own], self._context.cancelled),
            )
            if threads:
                absorbing.append(_FACTOR_THREADS.submit(absorb))
            else:
                absorb()
        return absorbing

    def _advance(self, new: Linearisation, some: slice, resumes: bool = False) -> None:
        """Judge the trials of some searches, and propose the next ones.

        If it ``resumes``, only those go on that have got an orthogonal factor.
        """
        active = self._active
        sums = np.ascontiguousarray(new.losses).reshape(-1)

        def advance(part: slice) -> None:
            own = slice(some.start + part.start, some.start + part.stop)
            edges, longest = active.edges[own.start : own.stop + 1], int(active.counts[own].max())
            of_each = edges, active.vectors, active.numbers[own], active.counters[own]
            state = *of_each, active.curvature, active.inverse, sums[own], new.gradients
            limits = self._limits, linear_model.workspace(longest, self._context.cancelled)
            if self._is_lm:
                levenberg_marquardt.advance(*state, new.curvatures, resumes, *limits)
            else:
                bfgs.advance(*state, new.curvatures is not None, resumes, *limits)

        spread(self._work[some], self._context.threads, advance)

    def _drop_finished(self) -> bool:
        """Keep the outcomes of ended searches, shrink the batch if it pays; False if all ended."""
        active, vectors = self._active, self._problem.batch.vectors
        # Where a start has led to rounding errors, the others of its program end.
        if vectors > 1 and not self._request.settings.all_starts and self._limits.target > 0.0:
            rounding = linear_model.ROUNDINGS * (2.0**-24 if self._limits.single else 2.0**-53)
            exact = active.numbers[:, LOSS] <= rounding * rounding * self._limits.target
            if exact.any():
                programs = self._places // vectors
                beside = active.running & np.isin(programs, programs[exact])
                active.counters[beside, REASON] = LOSS_CHANGE
        running = active.running
        ended = len(running) - int(running.sum())
        if not ended or (ended < len(running) and ended < _SHRINK_SHARE * len(running)):
            return True
        if active is not self._all:
            self._all.store(self._places[~running], active.only(~running))
        if ended == len(running):
            return False
        self._select(self._places[running], active.only(running))
        return True

    def _select(self, places: Integers, searches: Searches) -> None:
        """Go on with some of the searches, given their indices in ``_all``."""
        batch = self._problem.batch
        self._places, self._active, self._work = places, searches, _work_of(searches)
        self._pieces = _pieces(self._work)
        self._active_batch = self._batch if len(places) == len(self._batch) else self._batch[places]
        self._selection = Selection(batch, places // batch.vectors)

    @contextmanager
    def _interrupted_at_deadline(self) -> Iterator[None]:
        """Cancel the pass that is running at the deadline, and end the searches."""
        deadline, cancelled = self._context.deadline, self._context.cancelled
        if deadline is None:
            yield
            return

        def cancel_pass() -> None:
            cancelled[0] = cancelled[0] or _TIME_IS_UP

        timer = threading.Timer(max(0.0, deadline - time.monotonic()), cancel_pass)
        timer.daemon = True
        timer.start()
        try:
            yield
        except CancelledError:
            if cancelled[0] != _TIME_IS_UP:
                raise
            self._active.interrupt()
            self._drop_finished()
        finally:
            timer.cancel()
            timer.join()
            if cancelled[0] == _TIME_IS_UP:
                cancelled[0] = 0  # covariances at the final parameters may still be requested

    def _result(self) -> Steps[FitResult]:
        """Collect the outcomes: the best start of each program, or all starts."""
        problem, settings = self._request.problem, self._request.settings
        vectors = problem.batch.vectors
        chosen = np.arange(len(self._all))
        if vectors > 1 and not settings.all_starts:
            sums = self._all.numbers[:, LOSS].reshape(-1, vectors)
            best = np.where(np.isfinite(sums), sums, np.inf).argmin(axis=1)
            chosen = np.arange(len(sums)) * vectors + best
        mask = np.zeros(len(self._all), dtype=bool)
        mask[chosen] = True
        self._restore_better_starts()
        if len(self._all) > _MUCH_WORK:
            yield None
        outcome = self._all
        if len(chosen) < len(self._all):
            outcome = yield from self._on_fit_thread(partial(self._all.only, mask))
        covariance = errors = None
        needs = settings.covariance or settings.standard_errors or settings.curvature
        if needs and not self._is_lm:  # BFGS does not keep the curvature at X
            self._select(chosen, outcome)
            self._problem = replace(self._problem, precision=Precision.PRECISE)
            outcome.vectors[TRIAL] = outcome.vectors[X]
            final = yield from self._linearise(curvature=True)
            assert final.curvatures is not None
            outcome.curvature = final.curvatures
        if settings.covariance or settings.standard_errors:
            covariance = np.empty(int(outcome.edges[-1, SQUARES]))
            rows = None if settings.absolute_sigma else self._statistics.rows
            estimate = partial(estimate_covariances, outcome, rows, covariance)
            yield from self._in_pieces(_pieces(_work_of(outcome)), estimate)
            if settings.standard_errors:
                find = partial(standard_errors, outcome, covariance)
                errors = yield from self._on_fit_thread(find)
        shape = (len(problem.batch), len(chosen) // len(problem.batch))
        losses, initial = self._finalize(outcome.numbers[:, (LOSS, INITIAL)].T)
        counters = outcome.counters
        return FitResult(
            parameters=outcome.vectors[X],
            losses=losses.reshape(shape),
            initial_losses=initial.reshape(shape),
            iterations=counters[:, ITERATIONS].astype(np.uint32).reshape(shape),
            evaluations=counters[:, EVALUATIONS].astype(np.uint32).reshape(shape),
            reasons=counters[:, REASON].astype(np.uint8).reshape(shape),
            starts=(chosen % vectors).astype(np.uint32).reshape(shape),
            standard_errors=errors,
            covariances=covariance if settings.covariance else None,
            curvatures=full_curvatures(outcome) if settings.curvature else None,
        )

    def _restore_better_starts(self) -> None:
        """Go back to a start that was left because of an infinite derivative, if it is better.

        What no row has a value of has been fitted to nothing.
        """
        searches = self._all
        worse = searches.numbers[:, LOSS] > searches.numbers[:, INITIAL]
        if self._request.settings.missing is Missing.DROP and self._loss.is_squares:
            idle = np.ones(len(searches), dtype=bool)
            owner = np.repeat(np.arange(len(searches)), searches.counts)
            idle[owner[searches.curvature[diagonals(searches.counts)] > 0.0]] = False
            with np.errstate(all="ignore"):
                share = np.abs(searches.numbers[:, LOSS] / self._limits.variation - 1.0)
            worse |= idle & (share < _ROUNDING)
        columns = np.repeat(worse, searches.counts)
        searches.vectors[X, columns] = self._starts[columns]
        searches.numbers[worse, LOSS] = searches.numbers[worse, INITIAL]
        searches.counters[worse, REASON] = NOT_FINITE

    def _finalize(self, sums: Floats) -> Floats:
        return close_losses(self._loss.closing, sums, self._statistics)


def _work_of(searches: Searches) -> Floats:
    """Estimate the microseconds in which the next step of each search is found."""
    return np.asarray(1.0 + searches.counts.astype(np.float64) ** 3 / _CUBES)


def _pieces(work: Floats) -> list[Piece]:
    """Cut searches, given the microseconds of each, into pieces of about `_PIECE`."""
    places = (np.cumsum(work) / _PIECE).astype(np.int64)
    edges = [0, *(np.flatnonzero(np.diff(places)) + 1).tolist(), len(work)]
    return [(slice(*edge), float(work[slice(*edge)].sum())) for edge in pairwise(edges)]


# -------------------------------------------------------------------------------------- covariances


def estimate_covariances(searches: Searches, rows: int | None, result: Floats, some: slice) -> None:
    """Estimate the covariance of the parameters of some searches.

    It is `warpfit.evidence.covariance_of`; bounds are ignored.

    Args:
        searches: with the loss and the curvature at the final parameters.
        rows: number of rows whose weight is not 0; None if weights are inverse variances, so that
            s^2 is 1.
        result: the matrices [n, n] of all searches, one after the other; flat.
        some: the searches whose matrices are filled in.
    """
    counts = searches.counts[some]
    for n in np.unique(counts[counts > 0]).tolist():
        chosen = some.start + np.flatnonzero(counts == n)
        matrices = _matrices(searches, chosen, n)
        columns = searches.edges[chosen, PARAMETERS][:, None] + np.arange(n)
        free = searches.vectors[FREE][columns] != 0.0
        places = searches.edges[chosen, SQUARES][:, None] + np.arange(n * n)
        estimate, _ = covariance_of(matrices, free, searches.numbers[chosen, LOSS], rows)
        result[places] = estimate.reshape(len(chosen), n * n)


def full_curvatures(searches: Searches) -> Floats:
    """Return the curvatures of all searches as full matrices, one after the other; flat."""
    result = np.empty(int(searches.edges[-1, SQUARES]))
    counts = searches.counts
    for n in np.unique(counts[counts > 0]).tolist():
        chosen = np.flatnonzero(counts == n)
        places = searches.edges[chosen, SQUARES][:, None] + np.arange(n * n)
        result[places] = _matrices(searches, chosen, n).reshape(len(chosen), n * n)
    return result


def standard_errors(searches: Searches, covariance: Floats) -> Floats:
    """Return the square roots of the diagonals, [P]."""
    counts = searches.counts
    first = np.repeat(searches.edges[:-1, SQUARES], counts)
    index = np.arange(len(first)) - np.repeat(searches.edges[:-1, PARAMETERS], counts)
    return np.sqrt(covariance[first + index * (np.repeat(counts, counts) + 1)])


def _matrices(searches: Searches, chosen: NDArray[np.int64], n: int) -> Floats:
    """Return the symmetric curvatures of searches with n parameters each, [chosen, n, n]."""
    row, column = np.tril_indices(n)
    packed = searches.curvature[
        searches.edges[chosen, PAIRS][:, None] + np.arange(n * (n + 1) // 2)
    ]
    matrices = np.empty((len(chosen), n, n))
    matrices[:, row, column] = packed
    matrices[:, column, row] = packed
    return matrices


# ------------------------------------------------------------------------------ compiled by Numba


def load() -> None:
    """Load the code of all methods, or compile it."""
    numba_cache.load(
        levenberg_marquardt.advance, types.void(*_STATE, _NUMBERS, types.boolean, _LIMITS, _SPACE)
    )
    codes = types.Array(types.uint8, 1, "C", readonly=True)
    values = types.Array(types.float64, 1, "C", readonly=True)
    flag = types.uint8[::1]
    found = _ROWS, _ROWS, values, values, types.int64[::1], _ROWS, _NUMBERS, _NUMBERS
    numba_cache.load(linear_model.absorb, types.void(*found, flag))
    places = types.int64[::1]
    mark_linear = types.void(codes, values, places, places, _COUNTS, _COUNTS, _NUMBERS)
    numba_cache.load(linear_model.mark_linear, mark_linear)
    starts.load()
    flags = types.boolean, types.boolean
    numba_cache.load(bfgs.advance, types.void(*_STATE, *flags, _LIMITS, _SPACE))


#: What other processes compile: seconds that it takes, and what loads it. The methods share most
#: functions, which one process types and lowers once.
PARTS: Final[dict[str, tuple[float, Callable[[], None]]]] = {"fits": (7.0, load)}
