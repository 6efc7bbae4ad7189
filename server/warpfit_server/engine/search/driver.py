"""One search: the screening rows, the colony, fits of its best formulas, the front, the budget.

The simple form:

    draw the screening rows; fit the guesses; fill the colony
    pair short formulas, and put the best pairs and sums into the islands
    until the budget is used up:
        run some generations
        have the colony fit the constants of promising formulas quickly
        now and then fit the best formula of each size on all screening rows, for the archive
        begin an island anew that makes no progress
        pair the best formulas with short ones, now and then
        report the front once a second
    fit the archive on all rows, and return its front

What is done when depends on generations alone, but for the end of a search with a budget of time,
so that a seed gives the same search. A loss that is no sum of squares has no closed form for slope
and intercept: structures are then proposed by least squares, and the archive compares their fits by
the loss.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Dataset, Layout
from warpfit.errors import CancelledError, InvalidArgumentError
from warpfit.ir import Batch, Population
from warpfit.losses import LossFunction, TargetStatistics
from warpfit.ops import CONSTANT, FIRST_OPERATOR, OPERATORS, PARAMETER
from warpfit.request import Evaluation, FitRequest, FitResult, FitSettings
from warpfit.searching import FIRST_CALL, Front, SearchProgress, SearchReason, SearchRequest
from warpfit_server.engine.interface import Engine, Outputs, Passes, Steps
from warpfit_server.engine.search.colony import (
    ROUNDING,
    Colony,
    ColonySettings,
    Genomes,
    Scored,
    Screening,
    moved,
)
from warpfit_server.engine.search.composition import Composer
from warpfit_server.engine.search.genome import (
    ALLOWED,
    COMPLEXITY,
    FUNCTIONS,
    HAS_UNITS,
    LARGEST,
    MOST_COLUMNS,
    WIDTH,
    are_allowed,
    fitted_numbers,
    new_grammar,
    new_units,
    part_lengths,
)
from warpfit_server.engine.search.library import Weigher, joined
from warpfit_server.engine.search.pairs import PairSearch
from warpfit_server.limits import PAIR_ROWS

Floats = NDArray[np.float64]
#: Least seconds between two reports, and part of the time that they take where rows are many.
_REPORT_SECONDS: Final = 1.0
_REPORT_SHARE: Final = 0.05
#: Rounds after which the best formula of each size is fitted on all screening rows.
_LOOK_EVERY: Final = 4
#: Pairs of a step that are fitted.
_PAIRED: Final = 40
#: Steps of the search for pairs after which sums are built, too.
_SUM_EVERY: Final = 8
#: Generations after which an island begins anew whose best score did not fall by a tenth.
_PATIENCE: Final = 200
_PROGRESS: Final = 0.9
#: Part of a budget of time that is kept for fits on all rows, if there are many more of them than
#: screening rows.
_FINAL_SHARE: Final = 0.1
_MANY_ROWS: Final = 4
#: Numbers beyond which, or whose relative spread below which, float32 loses digits that matter.
_SINGLE_RANGE: Final = (1e-12, 1e12)
_SINGLE_SPREAD: Final = 1e-3
#: Variances of a target between which those of its errors keep their digits.
_TARGET_RANGE: Final = (1e-280, 1e280)
#: Numbers of a pass over rows or columns, formulas of a fit, and rows of a permutation, between two
#: looks at the queue.
_ROWS_AT_ONCE: Final = 1 << 18
_FITTED_AT_ONCE: Final = 1_024
_PERMUTED_AT_ONCE: Final = 1 << 16
#: Rows by which the ranks of columns are compared.
_RANKED_ROWS: Final = 4_096
_DOUBLE: Final = np.dtype(np.float64)
#: Improvement of a loss that counts.
_BETTER: Final = 1.0 - 1e-9
_MUL, _ADD = OPERATORS["mul"].code, OPERATORS["add"].code


def search(
    engine: Engine,
    datasets: Passes,
    request: SearchRequest,
    new_colony: Callable[..., Steps[Colony]],
    new_weigher: Callable[[], Weigher],
    *,
    settings: ColonySettings,
    cancelled: NDArray[np.uint8],
    report: Callable[[SearchProgress], None],
) -> Steps[SearchProgress]:
    """Search for formulas; see `warpfit_server.engine.interface.Engine.search`.

    Args:
        engine: says how many threads a fit may use.
        datasets: has the data set that the request names.
        request: a checked request.
        new_colony: makes the engine's colony of grammar, units, screening rows and settings, once
            its code has been compiled.
        new_weigher: makes what weighs pairs on the engine's device.
        settings: size of the colony.
        cancelled: [1]; another process sets it to 1 to cancel the search.
        report: called with the progress about once a second.
    """
    run = _Search(engine, datasets, request, cancelled, report)
    try:
        return (yield from run.run(new_colony, new_weigher, settings))
    finally:
        run.close()


@dataclass(slots=True)
class _Entry:
    """A fitted formula of the archive."""

    codes: NDArray[np.uint8]
    """Tokens of a whole formula, slope and intercept included, with parameters."""
    values: Floats
    parameters: Floats
    loss: float
    """Loss on the screening rows."""
    parts: Genomes | None = None
    """The genome, its constants as parameters, if it is not the whole formula."""


@dataclass(slots=True)
class _Archive:
    """The best fitted formula of each size."""

    entries: dict[int, _Entry] = field(default_factory=dict)
    improved: int = 0
    """How often the front has become better."""

    def wants(self, size: int, loss: float) -> bool:
        """Return whether a formula is better than what there is of its size."""
        known = self.entries.get(size)
        return math.isfinite(loss) and (known is None or loss < known.loss * _BETTER)

    def add(self, size: int, entry: _Entry) -> None:
        """Keep a formula if it is better than what there is of its size."""
        if not self.wants(size, entry.loss):
            return
        if entry.loss < self.best() * 0.999:
            self.improved += 1
        self.entries[size] = entry

    def best(self) -> float:
        """Return the least loss."""
        return min((entry.loss for entry in self.entries.values()), default=math.inf)

    def front(self) -> list[tuple[int, _Entry]]:
        """Return sizes and formulas that no smaller one is as good as, simplest first."""
        found: list[tuple[int, _Entry]] = []
        least = math.inf
        for size, entry in sorted(self.entries.items()):
            if entry.loss < least:
                least = entry.loss
                found.append((size, entry))
        return found


class _Search:
    """The state of one search."""

    def __init__(
        self,
        engine: Engine,
        datasets: Passes,
        request: SearchRequest,
        cancelled: NDArray[np.uint8],
        report: Callable[[SearchProgress], None],
    ) -> None:
        self._engine, self._datasets, self._request = engine, datasets, request
        self._dataset = datasets.whole(request.dataset_id)
        self._cancelled, self._report = cancelled, report
        self._began = time.monotonic()
        self._rng = np.random.default_rng(request.seed)
        self._loss: LossFunction = request.loss_function
        self._archive = _Archive()
        # A score that is not asked for is minus infinity, too.
        none = request.target_loss == -math.inf
        self._asked = -math.inf if none else float(self._signed(request.target_loss))
        self._target = self._asked
        """Loss on the screening rows at which all rows are asked."""
        self._constant = self._constant_of(0.0, math.inf)
        """What the front is as long as the archive is empty; fitted on all rows."""
        self._whole: _Archive | None = None
        """The front as it was last fitted on all rows, if these are not the screening rows."""
        self._loaded: list[bytes] = []
        self._moved: list[tuple[Dataset, int]] = []
        """The screening rows with a column moved, and the direction of formulas then."""
        self._colony: Colony | None = None
        self._pairing: PairSearch | None = None
        self._generations = self._idle = self._fits = self._restarts = self._pair_steps = 0

    def close(self) -> None:
        """Free what the engine holds for the search."""
        if self._colony is not None:
            self._colony.close()
        if self._pairing is not None:
            self._pairing.weigher.close()
        for key in self._loaded:
            self._datasets.unload(key)

    def run(
        self,
        new_colony: Callable[..., Steps[Colony]],
        new_weigher: Callable[[], Weigher],
        settings: ColonySettings,
    ) -> Steps[SearchProgress]:
        """Run the search to its end."""
        request, self._settings = self._request, settings
        rows = yield from self._draw_rows()
        columns = yield from self._choose_columns(rows)
        yield None
        functions, template = [columns], request.template
        if template is not None:  # whose numbers have no variables
            functions = [[*range(arity)] for arity in template.arities] + [[]] * template.parameters
        self._grammar = new_grammar(request, functions)
        self._composer = Composer(request, self._grammar)
        self._units = new_units(request, self._dataset.layout.variables)
        self._rows = yield from self._load_rows(rows, _DOUBLE)
        self._screening = yield from self._screen(rows, columns)
        self._statistics = TargetStatistics.of_rows(self._rows, slice(0, len(rows)))
        for column, sign in request.monotonic.items():
            self._moved.append(((yield from self._load_rows(rows, _DOUBLE, column)), sign))
        spread = self._check_spread()
        try:
            start = self._constant_of(self._screening.mean, 0.0)
            result = yield from self._optimize(
                self._dataset if self._has_more_rows else self._rows,
                self._batch_of([(1, start)]),
                request.fit_iterations,
            )
            loss = float(self._signed(result.losses.reshape(-1))[0])
            self._constant = self._constant_of(float(result.parameters[0]), loss)
            if spread == 0.0:  # nothing gets better on these rows
                is_met = self._is_constant_allowed and self._constant.loss <= self._asked
                return self._progress(SearchReason.TARGET_LOSS if is_met else SearchReason.IDLE)
            given = self._grammar, self._units, self._screening, settings, self._composer
            waits = time.monotonic()
            colony = self._colony = yield from new_colony(*given)
            self._began += time.monotonic() - waits  # time begins when code has been compiled
            reason = yield from self._within_time(self._search(colony, columns, new_weigher))
            if reason is not SearchReason.TARGET_LOSS or not self._has_more_rows:
                yield from self._fit((yield from colony.best()))
                yield from self._fit_all_rows(request.fit_iterations)
        except CancelledError:
            return self._progress(SearchReason.CANCELLED)
        return self._progress(reason)

    def _search(
        self, colony: Colony, columns: list[int], new_weigher: Callable[[], Weigher]
    ) -> Steps[SearchReason]:
        """Search from the first formulas to the end; return why it ends."""
        settings = self._settings
        yield from colony.populate()
        yield from self._insert_guesses(settings)
        yield from self._fit((yield from colony.best()))
        if not self._has_many_rows:  # whose fit would delay the search
            yield from self._fit_all_rows(1)
        self._report(self._progress(None))
        if self._request.pairs and self._request.template is None:
            rows, first = self._rows, slice(0, PAIR_ROWS)
            target = self._screening.target[first]
            self._pairing = PairSearch(
                operators={
                    name: weight
                    for name, weight in self._request.operators.items()
                    if name in OPERATORS
                },
                columns=columns,
                X=rows.variables[:, first],
                target=target,
                weights=None if rows.weights is None else self._screening.weights[first],
                values=partial(self._evaluated, dataset=rows, rows=len(target)),
                admissible=self._allowed,
                weigher=new_weigher(),
                width=int(self._grammar[WIDTH]),
                form=self._request.form,
            )
            yield from self._pair(settings)
        while True:
            reason = yield from self._evolve(colony, settings)
            if reason is not SearchReason.TARGET_LOSS or not self._has_more_rows:
                return reason
            yield from self._fit_all_rows(self._request.fit_iterations)
            if self._whole is not None and self._whole.best() <= self._asked:
                return reason
            # No formula has the loss that was asked for on all rows of the request: the search goes
            # on until the screening rows have a much better one. What is exact on those cannot get
            # better there: all rows are asked no more.
            best = self._archive.best()
            self._target = 0.1 * best if best > 0.0 else -math.inf

    def _within_time(self, steps: Steps[SearchReason]) -> Steps[SearchReason]:
        """Run steps until the time is over or the search is cancelled, whatever they do then."""
        try:
            while True:
                try:
                    waits_for = next(steps)
                except StopIteration as end:
                    reason: SearchReason = end.value
                    return reason
                yield waits_for
                if self._cancelled[0]:
                    raise CancelledError("the search was cancelled", "CANCELLED")
                if self._time_is_over():
                    return SearchReason.TIME
        finally:
            steps.close()

    def _time_is_over(self) -> bool:
        limit = self._request.max_seconds * (1.0 - _FINAL_SHARE * self._has_many_rows)
        return limit > 0 and time.monotonic() - self._began >= limit

    def _evolve(self, colony: Colony, settings: ColonySettings) -> Steps[SearchReason]:
        """Run generations and fits until the search ends; return why."""
        milestones = np.full(settings.islands, math.inf)
        begun = np.zeros(settings.islands, np.int64)
        reported, pause, improved, rounds = self._began, _REPORT_SECONDS, 0, 0
        while (reason := self._ended()) is None:
            yield from colony.advance()
            self._generations += 1
            self._idle = self._idle + 1 if self._archive.improved == improved else 0
            improved = self._archive.improved
            if self._generations % settings.fit_every == 0:
                yield from colony.improve(settings.fits)
            if self._generations % settings.round_every == 0:
                rounds += 1
                if rounds % _LOOK_EVERY == 0:
                    yield from self._fit((yield from colony.best()))
                # The island that has made no progress for longest, unless it is the best.
                scores = colony.island_scores.astype(np.float64)
                progress = scores < milestones * _PROGRESS
                milestones[progress], begun[progress] = scores[progress], self._generations
                waits = self._generations - begun
                waits[np.argmin(scores)] = 0
                island = int(np.argmax(waits))
                if waits[island] >= _PATIENCE:
                    self._restarts += 1
                    milestones[island], begun[island] = math.inf, self._generations
                    yield from colony.restart(island)
                yield from self._pair(settings)
            if (now := time.monotonic()) - reported >= pause:
                yield from self._fit_all_rows(1)
                self._report(self._progress(None))
                reported = time.monotonic()
                pause = max(_REPORT_SECONDS, (reported - now) / _REPORT_SHARE)
            yield None
        return reason

    def _ended(self) -> SearchReason | None:
        """Return why the search ends now, or None."""
        request, colony = self._request, self._colony
        assert colony is not None
        if self._cancelled[0]:
            return SearchReason.CANCELLED
        if self._archive.best() <= self._target:
            return SearchReason.TARGET_LOSS
        if self._time_is_over():
            return SearchReason.TIME
        for reason, limit, reached in (
            (SearchReason.GENERATIONS, request.max_generations, self._generations),
            (SearchReason.FORMULAS, request.max_formulas, colony.formulas),
            (SearchReason.IDLE, request.idle_generations, self._idle),
        ):
            if limit and reached >= limit:
                return reason
        return None

    def _signed(self, loss: Any) -> Any:
        """Return a loss as a number that is less if it is better, or the other way round."""
        return 1.0 - loss if self._loss.is_score else loss

    @property
    def _all_rows(self) -> int:
        start, stop = self._request.row_range(self._dataset.layout)
        return stop - start

    @property
    def _has_more_rows(self) -> bool:
        return self._all_rows > len(self._screening.target)

    @property
    def _has_many_rows(self) -> bool:
        return self._all_rows > _MANY_ROWS * self._request.screening_rows

    def _pair(self, settings: ColonySettings) -> Steps[None]:
        """Pair the best formulas with short ones, if pairs have not had their share of the time.

        The best pairs are fitted and put into islands.
        """
        pairing, colony = self._pairing, self._colony
        if pairing is None or colony is None or self._ended() is not None:
            return
        spent = pairing.pairs + self._pair_steps * settings.pair_step
        if spent > settings.pairs_per_formula * colony.formulas:
            return
        best = yield from colony.best()
        others = best.genomes.population()
        calls = (
            np.maximum.reduceat(others.codes, others.starts[:-1]) if len(others) else others.codes
        )
        others = others[calls < FIRST_CALL]  # which pairs do not know
        found = yield from pairing.step(others)
        if self._pair_steps % _SUM_EVERY == 0:
            sums = yield from pairing.sums(others)
            found = joined([*(one.formula for one in sums), found])
        self._pair_steps += 1
        if not len(found):
            return
        found = found[self._allowed(found)][:_PAIRED]
        if not len(found):
            return
        genomes = Genomes.of(found, int(self._grammar[WIDTH]))
        yield from self._fit(
            Scored(genomes, np.zeros(len(found)), self._spread(len(found), settings))
        )

    def _spread(self, count: int, settings: ColonySettings) -> NDArray[np.int64]:
        """Return places for formulas in all islands in turn, drawn within each."""
        islands = np.arange(count) % settings.islands
        own = self._rng.integers(settings.island, size=count)
        return islands * settings.island + own

    def _evaluated(self, formulas: Population, dataset: Dataset, rows: int) -> Steps[Floats]:
        """Evaluate formulas on the first rows of a data set, [formulas, rows].

        They have parameters only if they are a batch.
        """
        batch = formulas if isinstance(formulas, Batch) else _plain(formulas)
        values = np.empty((len(batch), 1, rows))
        outputs = Outputs(values, None, self._cancelled, lambda programs: None)
        problem = Evaluation(dataset.content_id, batch, (0, rows))
        yield from self._engine.evaluate(problem, outputs)
        return values[:, 0]

    def _allowed(self, formulas: Population) -> NDArray[np.bool_]:
        """Return which formulas keep to the rules and units."""
        width = max(int(self._grammar[WIDTH]), int(formulas.lengths.max(initial=1)))
        genomes = Genomes.of(formulas, width)
        allowed = np.zeros(len(genomes), np.uint8)
        with np.errstate(over="ignore"):  # rules ask for no number
            values = genomes.values.astype(np.float32).reshape(-1)
        grammar = self._grammar.copy()
        if grammar[HAS_UNITS] > 2:  # these formulas call nothing
            grammar[HAS_UNITS] -= 2
        given = grammar, self._units, genomes.codes.reshape(-1), values, genomes.lengths
        are_allowed(*given, allowed)
        return allowed.astype(bool)

    def _insert_guesses(self, settings: ColonySettings) -> Steps[None]:
        """Fit the formulas that the search begins with; those that are allowed join the islands."""
        guesses = self._request.guesses
        if guesses is None:
            return
        starts, width = guesses.parameter_starts, int(self._grammar[WIDTH])
        codes, values = guesses.codes.copy(), guesses.values.copy()
        own = np.repeat(starts[:-1], guesses.lengths)
        is_parameter = codes == PARAMETER
        places = own[is_parameter] + values[is_parameter].astype(np.int64)
        codes[is_parameter], values[is_parameter] = CONSTANT, guesses.parameters[places]
        # The functions of a template follow one another.
        lengths = guesses.lengths.reshape(-1, int(self._grammar[FUNCTIONS])).sum(axis=1)
        fits = np.flatnonzero(lengths <= width)
        if not len(fits):
            return
        whole = Population(codes, values, lengths.astype(np.uint32))
        genomes = Genomes.of(whole[fits], width)
        places = self._spread(len(fits), settings)
        yield from self._fit(Scored(genomes, np.zeros(len(fits)), places))

    def _fit_all_rows(self, iterations: int) -> Steps[None]:
        """Fit the front on all rows of the request, as well as the time allows."""
        found = self._archive.front()
        if not self._has_more_rows or not found:
            return
        batch, deadline = self._batch_of(found), None
        if self._request.max_seconds:
            deadline = self._began + self._request.max_seconds
        result = yield from self._optimize(self._dataset, batch, iterations, deadline)
        losses, edges = self._signed(result.losses.reshape(-1)), batch.parameter_starts
        whole = _Archive()
        for place, (size, entry) in enumerate(found):
            parameters = result.parameters[edges[place] : edges[place + 1]]
            whole.add(size, replace(entry, parameters=parameters, loss=float(losses[place])))
        self._whole = whole

    def _screen(self, rows: NDArray[np.int64], columns: list[int]) -> Steps[Screening]:
        """Load the screening rows in the type in which formulas are scored.

        It is float32 if that tells the numbers of the columns apart, and their powers.
        """
        least, most = _SINGLE_RANGE
        some = max(1, _ROWS_AT_ONCE // self._rows.layout.rows)
        for first in range(0, len(columns), some):
            numbers = np.abs(self._rows.variables[columns[first : first + some]])
            sound = numbers[np.isfinite(numbers) & (numbers > 0)]
            if len(sound) and not (least < sound.min() and sound.max() < most):
                scoring = self._rows
                break
            spread, size = numbers.std(axis=1), numbers.max(axis=1)
            if not ((spread == 0) | (spread > _SINGLE_SPREAD * size)).all():
                scoring = self._rows
                break
            yield None
        else:
            scoring = yield from self._load_rows(rows, np.dtype(np.float32))
        target, weights = self._rows.target, self._rows.weights
        assert target is not None
        own = np.ones(len(rows)) if weights is None else weights.astype(np.float64)
        return Screening(
            scoring.content_id,
            np.ascontiguousarray(target, np.float64),
            own / own.sum(),
            scoring.layout.dtype.itemsize,
            fitted_numbers(self._request),
        )

    def _progress(self, reason: SearchReason | None) -> SearchProgress:
        """Return how far the search is.

        Its front is that on all rows, or the best constant if there is none.
        """
        archive, colony = self._whole if self._has_more_rows else self._archive, self._colony
        found = [] if archive is None else archive.front()
        if not found and self._is_constant_allowed:
            found = [(1, self._constant)]
        template = self._request.template
        numbers = 0 if template is None else template.parameters
        sizes = np.array([size - numbers for size, _ in found], np.int64)
        losses = self._signed(np.array([entry.loss for _, entry in found]))
        parts = None
        if self._composer.is_needed:  # the functions and numbers of formulas, with their constants
            constant = Population(
                np.array([PARAMETER], np.uint8), np.zeros(1), np.ones(1, np.uint32)
            )
            codes, values, lengths = [np.empty(0, np.uint8)], [np.empty(0)], list[int]()
            for _, entry in found:
                own = constant if entry.parts is None else entry.parts.population()
                is_number = own.codes == PARAMETER
                filled = own.values.copy()
                filled[is_number] = entry.parameters[own.values[is_number].astype(np.int64)]
                codes.append(np.where(is_number, np.uint8(CONSTANT), own.codes))
                values.append(filled)
                lengths += part_lengths(self._grammar, own.codes)
            tokens = np.concatenate(codes), np.concatenate(values)
            parts = _plain(Population(*tokens, np.array(lengths, np.uint32)))
        return SearchProgress(
            front=Front(self._batch_of(found), sizes, losses, parts),
            seconds=time.monotonic() - self._began,
            generations=self._generations,
            formulas=0 if colony is None else colony.formulas,
            distinct=0 if colony is None else colony.distinct(),
            fits=self._fits + (0 if colony is None else colony.fits),
            pairs=0 if self._pairing is None else self._pairing.pairs,
            restarts=self._restarts,
            reason=reason,
        )

    @property
    def _is_constant_allowed(self) -> bool:
        """Whether a constant has the unit of the target, and is no template."""
        units = self._request.units
        if self._request.template is not None:
            return False
        is_plain = units is not None and units.dimensionless_constants
        return not (is_plain and int(self._units[0]) > 0)

    @staticmethod
    def _batch_of(found: Sequence[tuple[int, _Entry]]) -> Batch:
        """Return formulas of an archive, each with its parameters."""
        entries = [entry for _, entry in found]
        return Batch(
            np.concatenate([np.empty(0, np.uint8), *(entry.codes for entry in entries)]),
            np.concatenate([np.empty(0), *(entry.values for entry in entries)]),
            np.array([len(entry.codes) for entry in entries], np.uint32),
            parameter_counts=np.array([len(entry.parameters) for entry in entries], np.uint32),
            parameters=np.concatenate([np.empty(0), *(entry.parameters for entry in entries)]),
        )

    # --------------------------------------------------------------------------------------- rows

    def _draw_rows(self) -> Steps[NDArray[np.int64]]:
        """Draw the screening rows among those of the request that have a weight.

        They are in random order, so that the first ones stand for all.
        """
        start, stop = self._request.row_range(self._dataset.layout)
        weights, most = self._dataset.weights, self._request.screening_rows
        blocks = [slice(first, min(stop, first + _ROWS_AT_ONCE))
                  for first in range(start, stop, _ROWS_AT_ONCE)]  # fmt: skip
        total, counts = stop - start, [0]
        if weights is not None:
            for block in blocks:
                counts.append(int(np.count_nonzero(weights[block])))
                yield None
            total = sum(counts)
        if not total:
            raise InvalidArgumentError(
                f"none of the rows {start} to {stop - 1} has a weight",
                "NO_ROWS",
                "Give a weight above 0 to some of them",
                "rows",
            )
        drawn = np.arange(min(total, most))
        if total > most:
            drawn = np.sort(self._rng.choice(total, most, replace=False, shuffle=False))
        rows = start + drawn
        if weights is not None:
            parts, ends = [], np.cumsum(counts)
            for block, before, behind in zip(blocks, ends, ends[1:], strict=False):
                own = drawn[slice(*np.searchsorted(drawn, (before, behind)))] - before
                if len(own):
                    parts.append(block.start + np.flatnonzero(weights[block])[own])
                    yield None
            rows = np.concatenate(parts)
        # Many rows are drawn into parts, each of which is permuted.
        count = 1 + len(rows) // _PERMUTED_AT_ONCE
        parts, owners = [], self._rng.integers(count, size=len(rows)) if count > 1 else None
        for number in range(count):
            own = rows if owners is None else rows[owners == number]
            parts.append(self._rng.permutation(own))
            yield None
        return np.concatenate(parts)

    def _choose_columns(self, rows: NDArray[np.int64]) -> Steps[list[int]]:
        """Return the columns that formulas may use: at most as many as a grammar holds.

        Of more than that those whose ranks correlate best with those of the target.
        """
        columns = [*self._request.columns(self._dataset.layout)]
        if len(columns) <= MOST_COLUMNS:
            return columns
        target = self._dataset.target
        assert target is not None
        rows = rows[:_RANKED_ROWS]
        ranks = np.argsort(np.argsort(target[rows])) - (len(rows) - 1) / 2
        scores = []
        for column in columns:
            own = np.argsort(np.argsort(self._dataset.variables[column][rows]))
            scores.append(abs(float((own - (len(rows) - 1) / 2) @ ranks)))
            if len(scores) % max(1, _ROWS_AT_ONCE // (4 * len(rows))) == 0:  # sorting is dear
                yield None
        chosen = np.argsort(scores)[::-1][:MOST_COLUMNS]
        return sorted(columns[place] for place in chosen.tolist())

    def _load_rows(
        self,
        rows: NDArray[np.int64],
        dtype: np.dtype[np.floating],
        column: int | None = None,
    ) -> Steps[Dataset]:
        """Have the engine load some rows as a data set of their own, with a column `moved`."""
        layout: Layout = replace(self._dataset.layout, rows=len(rows), dtype=dtype)
        matrix = np.empty((len(self._dataset.matrix), len(rows)), dtype)
        for first in range(0, len(matrix), max(1, _ROWS_AT_ONCE // len(rows))):
            some = slice(first, first + max(1, _ROWS_AT_ONCE // len(rows)))
            with np.errstate(over="ignore"):  # of what formulas do not use
                matrix[some] = self._dataset.matrix[some, rows]
            yield None
        if column is not None:
            matrix = moved(matrix, column, matrix.itemsize)
        loaded = Dataset.resident(layout, matrix, os.urandom(32))
        self._datasets.load(loaded)
        self._loaded.append(loaded.content_id)
        return loaded

    def _check_spread(self) -> float:
        """Return the variance of the target on the screening rows.

        Raises:
            InvalidArgumentError: if it is not finite, or loses its digits.
        """
        target = self._screening.target
        if not np.isfinite(target).all():
            raise InvalidArgumentError(
                "the target has rows that are NaN or infinite",
                "TARGET_NOT_FINITE",
                "Leave these rows out, or give them the weight 0",
                "target",
            )
        if np.ptp(target) == 0.0:
            return 0.0
        with np.errstate(over="ignore", under="ignore"):
            spread = self._screening.spread
        least, most = _TARGET_RANGE
        if not least < spread < most:
            raise InvalidArgumentError(
                f"the variance of the target is {spread:.1e}, so squares of its errors leave the "
                "range of float64",
                "TARGET_OUT_OF_RANGE",
                "Multiply the target by a power of 10 that takes it close to 1",
                "target",
            )
        return spread

    # --------------------------------------------------------------------------------------- fits

    def _fit(self, found: Scored) -> Steps[None]:
        """Fit formulas on all screening rows, and put them into the archive and their places."""
        for first in range(0, len(found.genomes), _FITTED_AT_ONCE):
            some = slice(first, first + _FITTED_AT_ONCE)
            genomes, places = found.genomes.take(some), found.places[some]
            if self._composer.is_needed:
                # Without those whose last numbers are in no formula, or that are too long.
                lifted = self._lifted(genomes)
                given, whole = lifted.population(), self._composer.composed(lifted)
                kept = given.needed_parameters() == whole.needed_parameters()
                genomes, places = genomes.take(kept), places[kept]
                if not len(genomes):
                    continue
            batch = self._with_parameters(genomes)
            yield None
            result = yield from self._optimize(self._rows, batch, self._request.fit_iterations)
            yield None
            self._fits += len(batch)
            losses = self._signed(result.losses.reshape(-1))
            inside = np.arange(genomes.codes.shape[1]) < genomes.lengths[:, None]
            codes = genomes.codes.astype(np.int64)
            sizes = np.where(inside, self._grammar[COMPLEXITY + codes], 0).sum(axis=1)
            starts = batch.parameter_starts
            wanted = [
                row
                for row in range(len(batch))
                if self._archive.wants(int(sizes[row]), float(losses[row]))
            ]
            fitted_batch = replace(batch, parameters=result.parameters)
            for row in (yield from self._monotonic(fitted_batch, wanted)):
                if self._archive.wants(int(sizes[row]), float(losses[row])):
                    own = batch[row : row + 1]
                    numbers = result.parameters[starts[row] : starts[row + 1]].copy()
                    parts = self._lifted(genomes.take([row])) if self._composer.is_needed else None
                    entry = _Entry(own.codes, own.values, numbers, float(losses[row]), parts)
                    self._archive.add(int(sizes[row]), entry)
            is_number = inside & (codes == CONSTANT)
            is_inner = np.ones(len(result.parameters), bool)
            for behind in range(1, self._screening.fitted + 1):
                is_inner[starts[1:] - behind] = False
            fitted = genomes.values.astype(np.float64)
            fitted[is_number] = result.parameters[is_inner]
            is_small = (np.abs(np.where(is_number, fitted, 0.0)) <= LARGEST).all(axis=1)
            # A colony has no room for what other operators than its own need.
            known = (self._grammar[ALLOWED + codes] == 1) | (codes < FIRST_OPERATOR) | ~inside
            is_back = (places >= 0) & np.isfinite(losses) & is_small & known.all(axis=1)
            back = np.flatnonzero(is_back)
            if len(back):
                assert self._colony is not None
                better = Genomes(genomes.codes, fitted, genomes.lengths).take(back)
                yield from self._colony.insert(better, places[back])

    def _monotonic(self, batch: Batch, wanted: list[int]) -> Steps[list[int]]:
        """Return those of some formulas that rise and fall as they have to on screening rows."""
        if not wanted or not self._moved:
            return wanted
        some = batch[np.array(wanted)]
        values = yield from self._evaluated(some, self._rows, len(self._screening.target))
        kept = np.ones(len(wanted), bool)
        for dataset, sign in self._moved:
            ahead = yield from self._evaluated(some, dataset, len(self._screening.target))
            with np.errstate(invalid="ignore"):
                steps = sign * (ahead - values) >= -ROUNDING[8] * np.abs(values)
            kept &= steps.all(axis=1)
        return [row for row, is_kept in zip(wanted, kept.tolist(), strict=True) if is_kept]

    @staticmethod
    def _constant_of(number: float, loss: float) -> _Entry:
        """Return a constant as a formula of the archive."""
        return _Entry(np.array([PARAMETER], np.uint8), np.zeros(1), np.array([number]), loss)

    def _with_parameters(self, genomes: Genomes) -> Batch:
        """Return whole formulas, with parameters for their constants, slope and intercept."""
        lifted, fitted = self._lifted(genomes), self._screening.fitted
        own = lifted.population()
        numbers = np.bincount(
            np.repeat(np.arange(len(genomes)), genomes.lengths)[own.codes == PARAMETER],
            minlength=len(genomes),
        )
        inner = self._composer.composed(lifted) if self._composer.is_needed else own
        owner = np.repeat(np.arange(len(genomes)), inner.lengths)
        tail = np.array([PARAMETER, _MUL, PARAMETER, _ADD], np.uint8)[: 2 * fitted]
        lengths, counts = inner.lengths.astype(np.int64) + len(tail), numbers + fitted
        ends, codes = np.cumsum(lengths), np.zeros(lengths.sum(), np.uint8)
        whole, parameters = np.zeros(len(codes)), np.ones(counts.sum())
        places = np.arange(len(owner)) + owner * len(tail)
        codes[places], whole[places] = inner.codes, inner.values
        is_number = own.codes == PARAMETER
        owners = np.repeat(np.arange(len(genomes)), numbers)
        parameters[np.arange(len(owners)) + owners * fitted] = genomes.population().values[
            is_number
        ]
        for place, code in enumerate(tail):
            codes[ends - len(tail) + place] = code
        for place in range(fitted):
            whole[ends - len(tail) + 2 * place] = numbers + place
        if fitted == 2:
            parameters[np.cumsum(counts) - 1] = 0.0
        return Batch(
            codes,
            whole,
            lengths.astype(np.uint32),
            parameter_counts=counts.astype(np.uint32),
            parameters=parameters,
        )

    @staticmethod
    def _lifted(genomes: Genomes) -> Genomes:
        """Return genomes whose constants are parameters, numbered in each genome."""
        inside = np.arange(genomes.codes.shape[1]) < genomes.lengths[:, None]
        is_number = (genomes.codes == CONSTANT) & inside
        codes = np.where(is_number, np.uint8(PARAMETER), genomes.codes)
        values = np.where(is_number, is_number.cumsum(axis=1) - 1.0, genomes.values)
        return Genomes(codes, values, genomes.lengths)

    def _optimize(
        self, rows: Dataset, batch: Batch, iterations: int, deadline: float | None = None
    ) -> Steps[FitResult]:
        """Fit a batch on the screening rows, or on those of the whole data set."""
        # Imported on first use, because importing it delays the start of the server.
        from warpfit_server.engine.fit.driver import FitContext, optimize

        is_whole = rows is self._dataset
        problem = Evaluation(
            rows.content_id, batch, self._request.rows if is_whole else None, values=False,
            loss=self._request.loss, custom_loss=self._request.custom_loss,
        )  # fmt: skip
        settings = FitSettings(max_iterations=max(1, iterations), partial=deadline is not None)
        context = FitContext(
            linearise=self._datasets.linearise,
            small_fits=self._datasets.small_fits,
            evaluate=self._datasets.evaluate,
            dataset=rows,
            cancelled=self._cancelled,
            statistics=self._statistics if rows is self._rows else None,
            deadline=deadline,
            threads=self._engine.threads,
        )
        return (yield from optimize(FitRequest(problem, settings), context))


def _plain(formulas: Population) -> Batch:
    """Return formulas without parameters as a batch."""
    counts, tokens = np.zeros(len(formulas), np.uint32), (formulas.codes, formulas.values)
    return Batch(*tokens, formulas.lengths, parameter_counts=counts, parameters=np.empty(0))
