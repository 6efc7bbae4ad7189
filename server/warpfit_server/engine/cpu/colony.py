"""The colony of a search on the CPU: compiled loops over its formulas, on all threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from warpfit.ir import Batch
from warpfit.request import Evaluation, Precision, Timings
from warpfit.searching import SearchRequest
from warpfit_server.engine.cpu.interpreter import ONE_SPAN, ChunkedWork, Cut
from warpfit_server.engine.interface import Outputs, Steps
from warpfit_server.engine.native import numba_cache
from warpfit_server.engine.native.arguments import (
    FAILED,
    FINISHED,
    OWN_ARRAYS,
    RANGE,
    chunk_ranges,
    floats,
    octets,
    reader,
    words,
)
from warpfit_server.engine.native.intrinsics import inlined
from warpfit_server.engine.native.numba_cache import address_of
from warpfit_server.engine.search.colony import (
    LEAST_SPREAD,
    LOSS_FLOOR,
    REGISTERS,
    SPREADS,
    ColonySettings,
    Genomes,
    Scored,
    Screening,
    estimate_distinct,
)
from warpfit_server.engine.search.genome import (
    MAX_SIZE,
    WIDTH,
    breed,
    copy_tokens,
    first_formula,
    size_of,
    start_random,
    structure_hash,
    tried_mark,
)

#: Formulas of a colony and of an island, where a request does not say.
_FORMULAS: Final = 8192
_ISLAND: Final = 512
#: Generations between two rounds of fits, pairs for each formula, and pairs that take as long as
#: what else a step for pairs does: generations, fits and pairs take about a third of the time each.
_SCHEDULE: Final = (4, 200, 3_000_000)
#: Formulas that are evaluated at a time, so that their values stay in the cache, and in a chunk.
_EVALUATED: Final = 2048
_IN_CHUNK: Final = 64
#: Token-rows that take about as long as breeding or scoring a formula.
_COST_OF_A_FORMULA: Final = 4_000
#: Places of the table of structures that were tried; a power of 2.
_TABLE: Final = 1 << 20
#: What does not vary between the formulas of a generation.
_STATE: Final = np.dtype(
    [
        ("seed", np.uint64),
        ("generation", np.uint64),
        ("formulas", np.int64),
        ("island", np.int64),  # formulas of an island
        ("rows", np.int64),
        ("floor", np.float64),
        ("least_spread", np.float64),
        ("spread", np.float64),  # variance of the target
        ("mean", np.float64),  # mean of the target
        ("fitted", np.int64),  # numbers around f: 2 for slope and intercept, 1 for a slope
        ("itemsize", np.int64),  # bytes of a value
    ],
    align=True,
)
#: Arrays of the argument blocks: grammar and state; the population; children, whose places in the
#: population ``_PLACES`` has; what was tried; the best of each size; and the screening rows.
(
    _GRAMMAR, _UNITS, _OWN_STATE, _CODES, _VALUES, _LENGTHS, _LOSSES, _SCORES, _IS_NEW,
    _CHILD_CODES, _CHILD_VALUES, _CHILD_LENGTHS, _CHILD_LOSSES, _HASHES, _PLACES,
    _TRIED, _REGISTERS, _BEST_CODES, _BEST_VALUES, _BEST_LENGTHS, _BEST_LOSSES, _PARSIMONY,
    _NUMBERS, _TARGET, _WEIGHTS,
) = range(OWN_ARRAYS, OWN_ARRAYS + 25)  # fmt: skip
_states = reader(_STATE)
_singles = reader(types.float32)
_integers = reader(types.int32)
_unsigned = reader(types.uint64)
#: Improvement of a loss in float32 that is more than rounding.
_BETTER: Final = 1.0 - 1e-6
_compiled = numba_cache.njit(nogil=True, error_model="numpy")


@_compiled  # type: ignore[untyped-decorator]
def populate_chunk(block: int, chunk: int) -> int:
    """Write random formulas as the children of a range of formulas."""
    formulas, _, _ = chunk_ranges(block, chunk)
    grammar, state = _integers(block, _GRAMMAR), _states(block, _OWN_STATE)[0]
    units = _integers(block, _UNITS)
    codes, values = octets(block, _CHILD_CODES), _singles(block, _CHILD_VALUES)
    lengths, hashes = _integers(block, _CHILD_LENGTHS), _unsigned(block, _HASHES)
    width = np.int64(grammar[WIDTH])
    random, work = np.zeros(1, np.uint64), np.zeros(width, np.int32)
    scratch = np.zeros(width, np.uint64)
    for formula in range(formulas.start, formulas.stop):
        start_random(random, state.seed, state.generation, np.uint64(formula))
        place = formula * width
        length = first_formula(grammar, units, random, codes, values, place, work)
        lengths[formula] = length
        if length > 0:
            hashes[formula] = structure_hash(grammar, codes, values, place, length, scratch)
    return FINISHED if len(scratch) > 0 else FAILED


@_compiled  # type: ignore[untyped-decorator]
def breed_chunk(block: int, chunk: int) -> int:
    """Breed the children of a range of formulas."""
    formulas, _, _ = chunk_ranges(block, chunk)
    grammar, state = _integers(block, _GRAMMAR), _states(block, _OWN_STATE)[0]
    codes, values = octets(block, _CODES), _singles(block, _VALUES)
    lengths, scores = _integers(block, _LENGTHS), _singles(block, _SCORES)
    child_codes, child_values = octets(block, _CHILD_CODES), _singles(block, _CHILD_VALUES)
    child_lengths, hashes = _integers(block, _CHILD_LENGTHS), _unsigned(block, _HASHES)
    tried, units = _unsigned(block, _TRIED), _integers(block, _UNITS)
    width = np.int64(grammar[WIDTH])
    random, work = np.zeros(1, np.uint64), np.zeros(width, np.int32)
    scratch = np.zeros(width, np.uint64)
    for formula in range(formulas.start, formulas.stop):
        start_random(random, state.seed, state.generation, np.uint64(formula))
        length = breed(
            grammar, units, random, codes, values, lengths, scores, state.formulas,
            state.island, formula, child_codes, child_values, tried, np.uint64(len(tried) - 1),
            work, scratch,
        )  # fmt: skip
        child_lengths[formula] = length
        if length > 0:
            hashes[formula] = structure_hash(
                grammar, child_codes, child_values, formula * width, np.int64(length), scratch
            )
    return FINISHED if len(scratch) > 0 else FAILED


@_compiled  # type: ignore[untyped-decorator]
def score_chunk(block: int, chunk: int) -> int:
    """Find the losses of a range of children by their values, relative to the best constant."""
    children, _, _ = chunk_ranges(block, chunk)
    state, losses = _states(block, _OWN_STATE)[0], _singles(block, _CHILD_LOSSES)
    target, weights = floats(block, _TARGET), floats(block, _WEIGHTS)
    for child in range(children.start, children.stop):
        first, stop = child * state.rows, (child + 1) * state.rows
        if state.itemsize == 4:
            losses[child] = _loss(_singles(block, _NUMBERS)[first:stop], target, weights, state)
        else:
            losses[child] = _loss(floats(block, _NUMBERS)[first:stop], target, weights, state)
    return FINISHED if len(losses) > 0 else FAILED


@inlined
def _loss(values: Any, target: Any, weights: Any, state: Any) -> Any:
    """Return the loss of values, relative to that of the best constant; infinity if they have none.

    Values that hardly vary, or are so large or small that their squares are no numbers, have none:
    their slope would be made of rounding errors.
    """
    fitted = state.fitted
    own_mean, mean = 0.0, 0.0
    if fitted == 2:
        mean = state.mean
        for row in range(len(target)):
            own_mean += weights[row] * values[row]
    squares, products, errors = 0.0, 0.0, 0.0
    for row in range(len(target)):
        d, y = values[row] - own_mean, target[row] - mean
        squares += weights[row] * d * d
        products += weights[row] * d * y
        errors += weights[row] * (y - d) * (y - d)
    if fitted > 0:
        deviation = np.sqrt(squares)
        if not (SPREADS[0] < deviation < SPREADS[1]):
            return np.inf
        if not deviation > state.least_spread * abs(own_mean):
            return np.inf
        slope, errors = products / squares, 0.0
        for row in range(len(target)):
            error = target[row] - mean - slope * (values[row] - own_mean)
            errors += weights[row] * error * error
    return errors / state.spread if errors >= 0.0 else np.inf


@_compiled  # type: ignore[untyped-decorator]
def keep_chunk(block: int, chunk: int) -> int:
    """Let children take the places of worse formulas; note their structures, and the best by size.

    It is one chunk, so that the order of the children decides what is noted.
    """
    grammar, state = _integers(block, _GRAMMAR), _states(block, _OWN_STATE)[0]
    codes, values = octets(block, _CHILD_CODES), _singles(block, _CHILD_VALUES)
    lengths, losses = _integers(block, _CHILD_LENGTHS), _singles(block, _CHILD_LOSSES)
    hashes, places = _unsigned(block, _HASHES), words(block, _PLACES)
    own_lengths, own_losses = _integers(block, _LENGTHS), _singles(block, _LOSSES)
    own_codes, own_values = octets(block, _CODES), _singles(block, _VALUES)
    scores, is_new = _singles(block, _SCORES), octets(block, _IS_NEW)
    tried, registers = _unsigned(block, _TRIED), _integers(block, _REGISTERS)
    best_codes, best_values = octets(block, _BEST_CODES), _singles(block, _BEST_VALUES)
    best_lengths, best_losses = _integers(block, _BEST_LENGTHS), _singles(block, _BEST_LOSSES)
    parsimony, width = _singles(block, _PARSIMONY), np.int64(grammar[WIDTH])
    for child in range(len(lengths)):
        length, first = np.int64(lengths[child]), child * width
        if length == 0:
            continue
        word = hashes[child]
        slot = np.int64(word & np.uint64(len(tried) - 1))
        tried[slot] = max(tried[slot], tried_mark(word, state.generation))
        register = np.int64(word >> np.uint64(52))
        registers[register] = max(registers[register], rank_of(word))
        size, loss, place = (
            size_of(grammar, codes, first, first + length),
            losses[child],
            places[child],
        )
        score = max(loss, state.floor) * (1.0 + parsimony[place // state.island] * size)
        if score < scores[place] * _BETTER or own_lengths[place] == 0:
            copy_tokens(codes, values, first, first + length, own_codes, own_values, place * width)
            own_lengths[place], own_losses[place] = length, loss
            scores[place], is_new[place] = score, 1
        if size < len(best_losses) and loss < best_losses[size] * _BETTER:
            copy_tokens(codes, values, first, first + length, best_codes, best_values, size * width)
            best_lengths[size], best_losses[size] = length, loss
    return FINISHED if width > 0 else FAILED


@inlined
def rank_of(word: Any) -> int:
    """Return the leading zeros of the last 52 bits of a hash, and 1."""
    zeros, rest = 1, word << np.uint64(12)
    while zeros < 52 and rest >> np.uint64(63) == 0:
        zeros, rest = zeros + 1, rest << np.uint64(1)
    return zeros


def load() -> None:
    """Load the compiled functions, or compile them."""
    for function in (populate_chunk, breed_chunk, score_chunk, keep_chunk):
        numba_cache.load_chunk_function(function)


def colony_settings(request: SearchRequest) -> ColonySettings:
    """Return the size of the colony that a request asks for, or that suits a CPU."""
    formulas = request.population or _FORMULAS
    islands = min(request.islands or max(1, formulas // _ISLAND), formulas)
    return ColonySettings(islands, formulas // islands, request.seed, *_SCHEDULE)


class _Children(NamedTuple):
    """Formulas that compete for places of the population."""

    codes: NDArray[np.uint8]
    values: NDArray[np.float32]
    lengths: NDArray[np.int32]
    losses: NDArray[np.float32]
    hashes: NDArray[np.uint64]
    """Of their structures."""
    places: NDArray[np.int64]

    @classmethod
    def of(cls, genomes: Genomes, places: NDArray[np.int64]) -> _Children:
        """Return formulas for some places, without losses."""
        losses = np.full(len(places), np.inf, np.float32)
        return cls(*genomes, losses, np.zeros(len(places), np.uint64), places)

    def some(self, index: Any) -> _Children:
        """Return some of them; a slice shares their memory."""
        return _Children._make(array[index] for array in self)


class CpuColony:
    """The colony of a CPU engine; implements `warpfit_server.engine.search.colony.Colony`.

    Args:
        evaluate: `interface.Engine.evaluate` of the engine.
        run: runs the chunks of work in steps.
        cancelled: as in `interface.Outputs`.
        grammar: from `genome.new_grammar`.
        units: from `genome.new_units`.
        screening: the rows.
        settings: islands and seed.
    """

    def __init__(
        self,
        evaluate: Callable[[Evaluation, Outputs], Steps[Timings]],
        run: Callable[[ChunkedWork], Steps[None]],
        cancelled: NDArray[np.uint8],
        grammar: NDArray[np.int32],
        units: NDArray[np.int32],
        screening: Screening,
        settings: ColonySettings,
    ) -> None:
        self._evaluate, self._run = evaluate, run
        self._grammar, self._units = grammar, units
        self._screening, self._settings = screening, settings
        self._cancelled = cancelled
        self.width, count = int(grammar[WIDTH]), settings.formulas
        self.formulas = 0
        self.island_scores = np.full(settings.islands, np.inf, np.float32)
        sizes = int(grammar[MAX_SIZE]) + 1

        def genomes(number: int) -> Genomes:
            codes = np.zeros((number, self.width), np.uint8)
            return Genomes(codes, np.zeros(codes.shape, np.float32), np.zeros(number, np.int32))

        self._own, self._best = genomes(count), genomes(sizes)
        self._losses = np.full(count, np.inf, np.float32)
        self._scores = np.full(count, np.inf, np.float32)
        self._is_new = np.zeros(count, np.uint8)
        self._best_losses = np.full(sizes, np.inf, np.float32)
        self._children = _Children.of(genomes(count), np.arange(count))
        self._tried, self._registers = np.zeros(_TABLE, np.uint64), np.zeros(REGISTERS, np.int32)
        self._parsimony = settings.parsimony()
        rows, real = len(screening.target), np.dtype(f"f{screening.itemsize}")
        self._values = np.zeros((_EVALUATED, rows), real)
        self._state = np.zeros(1, _STATE)
        one = self._state[0]
        one["seed"], one["formulas"], one["island"] = settings.seed, count, settings.island
        one["rows"], one["itemsize"] = rows, screening.itemsize
        one["fitted"] = screening.fitted
        one["floor"] = LOSS_FLOOR[screening.itemsize]
        one["least_spread"] = LEAST_SPREAD[screening.itemsize]
        one["spread"], one["mean"] = screening.spread, screening.mean

    def populate(self) -> Steps[None]:
        """Fill all islands with random formulas."""
        yield from self._renew(slice(0, self._settings.formulas))

    def restart(self, island: int) -> Steps[None]:
        """Fill an island with random formulas."""
        own = slice(island * self._settings.island, (island + 1) * self._settings.island)
        self._own.lengths[own] = 0
        yield from self._renew(own)

    def advance(self) -> Steps[None]:
        """Run a generation."""
        self._state["generation"] += np.uint64(1)
        yield from self._run(self._work(breed_chunk, self._children))
        yield from self._compete(self._children)

    def insert(self, genomes: Genomes, places: NDArray[np.int64]) -> Steps[NDArray[np.float32]]:
        """Score formulas, which take the given places where they are better; return losses."""
        own = Genomes(genomes.codes, genomes.values.astype(np.float32), genomes.lengths)
        children = _Children.of(own.widened(self.width), places)
        yield from self._compete(children)
        return children.losses

    def champions(self, count: int) -> Steps[Scored]:
        """Return the best formulas of each island that have not been returned."""
        island = self._settings.island
        scores = np.where(self._is_new == 1, self._scores, np.inf)
        chosen = np.argsort(scores.reshape(-1, island), axis=1, kind="stable")[:, :count]
        places = (chosen + np.arange(len(chosen))[:, None] * island).reshape(-1)
        places = places[np.isfinite(scores[places])]
        self._is_new[places] = 0
        self.island_scores = self._scores.reshape(-1, island).min(axis=1)
        yield None
        return Scored(self._own.take(places), self._losses[places], places)

    def best(self) -> Steps[Scored]:
        """Return the best formula of each size."""
        yield None
        sizes = np.flatnonzero(np.isfinite(self._best_losses))
        losses = self._best_losses[sizes]
        return Scored(self._best.take(sizes), losses, np.full(len(sizes), -1))

    def distinct(self) -> int:
        """Estimate how many different structures have been tried."""
        return estimate_distinct(self._registers)

    def close(self) -> None:
        """Do nothing: memory goes with the arrays."""

    def _renew(self, some: slice) -> Steps[None]:
        self._state["generation"] += np.uint64(1)
        yield from self._run(self._work(populate_chunk, self._children, some))
        yield from self._compete(self._children.some(some))

    def _compete(self, children: _Children) -> Steps[None]:
        """Score children, which take their places where they are better."""
        yield from self._score(children)
        yield from self._run(self._work(keep_chunk, children, slice(0, 1)))
        self.formulas += int(np.count_nonzero(children.lengths))

    def _score(self, children: _Children) -> Steps[None]:
        """Evaluate children on the screening rows, and fill in their losses."""
        written = np.flatnonzero(children.lengths)
        for first in range(0, len(written), _EVALUATED):
            some = written[first : first + _EVALUATED]
            part = children.some(some)
            programs = Genomes(*part[:3]).population()
            batch = Batch(
                *(programs.codes, programs.values, programs.lengths),
                parameter_counts=np.zeros(len(some), np.uint32), parameters=np.empty(0),
            )  # fmt: skip
            dataset_id, values = self._screening.dataset_id, self._values[: len(some)]
            evaluation = Evaluation(dataset_id, batch, precision=Precision.FAST, values=True)
            outputs = Outputs(values[:, None], None, self._cancelled, lambda programs: None)
            yield from self._evaluate(evaluation, outputs)
            yield from self._run(self._work(score_chunk, part, None, values))
            children.losses[some] = part.losses

    def _work(
        self, function: Any, children: _Children, some: slice | None = None, *numbers: Any
    ) -> ChunkedWork:
        """Return the work of a function on children, or on some of them."""
        first, stop = (0, len(children.places)) if some is None else (some.start, some.stop)
        edges = np.append(np.arange(first, stop, _IN_CHUNK), stop)
        ranges = np.zeros(len(edges) - 1, RANGE)
        ranges["start"], ranges["stop"] = edges[:-1], edges[1:]
        cut = Cut(ranges, ONE_SPAN, len(children.places) * _COST_OF_A_FORMULA)
        arrays = (
            self._grammar, self._units, self._state, *self._own, self._losses, self._scores,
            self._is_new, *children, self._tried, self._registers, *self._best, self._best_losses,
            self._parsimony, *(numbers or [np.empty(0)]), self._screening.target,
            self._screening.weights,
        )  # fmt: skip
        return ChunkedWork(address_of(function), arrays, cut, self._cancelled)
