"""Shorter formulas that fit data hardly worse: snapped constants, dropped terms.

Each round tries everything that makes a formula cheaper in one place: a constant becomes a number
that is shorter to write, a term 0, a factor 1, any subexpression a constant. All candidates of all
formulas are fitted in one batch, and of those whose loss is allowed the cheapest is taken
(greedily, as in backward elimination; the minimum description length of Rissanen 1978 is what the
cost imitates). At the end the constants that are left are rounded as far as the loss allows.

The module decides and computes no loss: `snap` is a generator that yields batches and is sent their
fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from warpfit.expressions.language import cost, is_free, rounded, shorter_numbers
from warpfit.expressions.reference import evaluate_program
from warpfit.formulas.intervals import DefinedRegion
from warpfit.formulas.rules import Rules, simplified
from warpfit.ir import Program
from warpfit.ops import ARITIES, BY_CODE, CONSTANT, OPERATORS, PARAMETER

Floats = NDArray[np.float64]

#: Most candidates of one formula in one round; the cheapest are tried first.
_MOST_CANDIDATES: Final = 256
#: Longest formula, in tokens, of which subexpressions are replaced.
_MOST_TOKENS: Final = 150
#: Part of its loss by which a simpler formula has to be better than the one that was given, to be
#: much better: a fit that had ended in a wrong valley goes on when a term is dropped.
_MUCH_BETTER: Final = 0.5
#: Digits to which constants are rounded at the end.
_DIGITS: Final = range(5, 12)
_TERMS: Final = frozenset({"add", "sub"})
_FACTORS: Final = frozenset({"mul", "div"})
_ABS, _NEG = OPERATORS["abs"].code, OPERATORS["neg"].code

#: Programs whose parameters are to be fitted, from these starts.
Trials: TypeAlias = tuple[list[Program], list[Floats]]
#: Their losses, lower is better, and fitted parameters.
Outcomes: TypeAlias = tuple[Floats, Sequence[Floats]]


@dataclass(frozen=True, slots=True)
class Snapped:
    """One simplified formula."""

    program: Program
    loss: float
    initial_loss: float
    """Loss of the formula that was given, with its constants fitted."""


@dataclass(frozen=True, slots=True, eq=False)
class SnapSettings:
    """Settings and data that all formulas of a call share."""

    tolerance: float
    """Part of its loss by which a formula may become worse."""
    rounding: float
    """Loss that is nothing but rounding errors, as part of the loss of the best constant."""
    assume_defined: bool
    sample: Floats
    """Some rows of the data, [variables, rows], for the medians of subexpressions."""
    low: Floats
    high: Floats
    """Least and greatest value of each variable, [variables]: between them no formula that was
    defined becomes undefined."""
    middle: float
    """Start of the fit of the best constant."""
    numbers: str = "constants"
    """Forms that constants are rounded to: "constants" for all short forms, "numbers" for the forms
    without pi and e, "" for none."""
    allows: Callable[[Program], bool] = lambda _: True
    """Tells of a program whether a formula may become it. What it refuses is passed over, and the
    next shorter form is taken."""


@dataclass(slots=True)
class _Search:
    """The state of one formula."""

    program: Program
    """With its constants; those that are not short are fitted again in each round."""
    region: DefinedRegion
    """Where the formula that was given is defined."""
    loss: float = math.nan
    initial_loss: float = math.nan
    allowed: float = math.nan
    """Highest loss of a simpler formula; NaN, which allows none, if the given one has no loss. It
    falls if a simpler formula fits much better."""
    floor: float = 0.0
    """A loss that is nothing but rounding errors, which is as good as any other one."""
    done: bool = False
    tried: set[Program] = field(default_factory=set)
    history: list[Program] = field(default_factory=list)

    def allow(self, loss: float, tolerance: float) -> None:
        """Allow what is worse than this loss by a part of it, unless less is allowed already."""
        worse = max(loss + tolerance * abs(loss), self.floor)
        self.allowed = worse if math.isnan(self.allowed) else min(self.allowed, worse)


def snap(
    programs: Sequence[Program], settings: SnapSettings
) -> Generator[Trials, Outcomes, list[Snapped]]:
    """Simplify formulas with constants and no parameters; none gets a loss that is not allowed.

    Yields:
        Trials; sent are their outcomes.

    Returns:
        A result for each program.

    """
    searches = []
    for program in programs:
        own = simplified(program, settings.assume_defined)
        if not settings.assume_defined:
            # In x2/x1*relu(x3) the exact rules multiply before they divide, which may leave the
            # range of float64: they are not applied where that moves an overflow to other rows.
            given, now = (np.isfinite(evaluate_program(p, settings.sample)) for p in (program, own))
            own = own if np.array_equal(given, now) else program
        region = DefinedRegion(program, settings.low, settings.high, settings.sample)
        searches.append(_Search(own, region))
    yield from _begin(searches, programs, settings)
    while active := [search for search in searches if not search.done]:
        trials = [
            (search, candidate) for search in active for candidate in _candidates(search, settings)
        ]
        for search in active:
            search.done = True
        if not trials:
            break
        lifted = [lift(candidate) for _, candidate in trials]
        losses, fitted = yield [program for program, _ in lifted], [start for _, start in lifted]
        found: dict[int, list[tuple[float, float, Program]]] = {}
        for (search, candidate), loss, vector in zip(trials, losses, fitted, strict=True):
            if loss <= search.allowed:
                bound = lift(candidate)[0].bind(vector)
                found.setdefault(id(search), []).append((_cost(candidate), float(loss), bound))
        # The cheapest candidate is taken whose loss is low enough and that is defined wherever the
        # formula that was given is, also between the rows: a constant that was fitted again may
        # have brought a pole there.
        for search in active:
            for _, loss, program in sorted(found.get(id(search), []), key=lambda each: each[:2]):
                shorter = Rules(settings.assume_defined).applied_once(program)
                if search.region.keeps(shorter) and settings.allows(shorter):
                    search.loss, search.program, search.done = loss, shorter, False
                    # What fits much better than the formula that was given is not spoilt again.
                    if loss < search.initial_loss - _MUCH_BETTER * abs(search.initial_loss):
                        search.allow(loss, settings.tolerance)
                    search.history.append(shorter)
                    break
    return (yield from _finish(searches, settings))


def _begin(
    searches: list[_Search], programs: Sequence[Program], settings: SnapSettings
) -> Generator[Trials, Outcomes, None]:
    """Fit the constants, and measure what is allowed."""

    def is_fraction(value: float) -> bool:
        return math.isfinite(value) and not value.is_integer()

    pairs = [lift(search.program, is_fraction) for search in searches]
    lifted, starts = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    constant = Program.parameter(0), np.array([settings.middle])
    losses, fitted = yield [*lifted, constant[0]], [*starts, constant[1]]
    floor = settings.rounding * abs(losses[-1])
    refitted = [p.bind(vector) for p, vector in zip(lifted, fitted[:-1], strict=True)]
    # Of equal losses the first is taken.
    choices = [[search.program for search in searches], refitted, [*programs]]
    losses, _ = yield _unfitted([program for choice in choices for program in choice])
    table = np.reshape(losses, (len(choices), -1))
    for place, search in enumerate(searches):
        column = np.where(np.isnan(table[:, place]), math.inf, table[:, place])
        if not search.region.keeps(refitted[place]):
            column[1] = math.inf
        for row, choice in enumerate(choices[:2]):
            if column[row] < math.inf and not settings.allows(choice[place]):
                column[row], choices[row][place] = math.inf, programs[place]
        is_moved = math.isfinite(column[0]) and not math.isfinite(column[2])
        if is_moved and not settings.assume_defined:  # an overflow, in rows beyond the sample
            column[0], choices[0][place] = math.inf, programs[place]
        best = int(np.argmin(column))
        search.program = choices[best][place]
        search.initial_loss = search.loss = float(table[best, place])
        search.history = [search.program]
        search.done = not math.isfinite(search.loss)
        if not search.done:
            search.floor = floor if math.isfinite(floor) else 0.0
            search.allow(search.loss, settings.tolerance)


def _finish(
    searches: list[_Search], settings: SnapSettings
) -> Generator[Trials, Outcomes, list[Snapped]]:
    """Round the other constants; return for each formula its last state with an allowed loss.

    The losses are measured anew with all numbers as constants.
    """

    def short(program: Program, digits: int) -> Program:
        values = [
            rounded(value, digits) if code == CONSTANT else value
            for code, value in zip(program.codes.tolist(), program.values.tolist(), strict=True)
        ]
        return Program(program.codes, values)

    digits_tried = _DIGITS if settings.numbers else range(0)
    states = [
        [*(short(search.program, digits) for digits in digits_tried), *search.history[::-1]]
        for search in searches
    ]
    losses, _ = yield _unfitted([program for choice in states for program in choice])
    results, start = [], 0
    for search, choice in zip(searches, states, strict=True):
        measured = losses[start : start + len(choice)]
        start += len(choice)
        place = next(
            (
                place
                for place, loss in enumerate(measured)
                if loss <= search.allowed
                and search.region.keeps(choice[place])
                and settings.allows(choice[place])
            ),
            len(choice) - 1,
        )
        results.append(Snapped(choice[place], float(measured[place]), search.initial_loss))
    return results


# ----------------------------------------------------------------------------------- candidates


def _candidates(search: _Search, settings: SnapSettings) -> list[Program]:
    """Return the programs that are cheaper in one place and were not tried yet."""
    own = _cost(search.program)
    rules = Rules(settings.assume_defined)
    program = search.program
    found = set(_with_less(program, rules, settings))
    numbers = np.flatnonzero(program.codes == CONSTANT).tolist() if settings.numbers else []
    for place in numbers:
        units = settings.numbers == "constants"
        for value in shorter_numbers(float(program.values[place]), units=units):
            values = program.values.copy()
            values[place] = value
            changed = Program(program.codes, values)
            found.add(rules.applied_once(changed) if (2.0 * value).is_integer() else changed)
    cheaper = [(_cost(program), program) for program in found - search.tried]
    cheaper.sort(key=lambda pair: (pair[0], pair[1].codes.tobytes(), pair[1].values.tobytes()))
    chosen = [program for price, program in cheaper if price < own][:_MOST_CANDIDATES]
    search.tried.update(chosen)
    return chosen


def finite_median(numbers: NDArray[np.float64]) -> float:
    """Return the median of the finite ones of some numbers, or 0 if there are none."""
    finite = numbers[np.isfinite(numbers)]
    # Of halves, because the sum of the two in the middle may overflow.
    return 2.0 * float(np.median(0.5 * finite)) if finite.size else 0.0


def _with_less(program: Program, rules: Rules, settings: SnapSettings) -> Iterator[Program]:
    """Replace each subexpression: terms by 0, factors by 1, all by their median.

    A function f(u), such as |u|, becomes u or, for another function u of v, v.
    """
    if len(program) > _MOST_TOKENS:
        return
    codes, values = program.codes.tobytes(), program.values.tobytes()
    # Where the subexpression of each token starts, and the operator that takes it.
    starts: list[int] = []
    parents: list[str | None] = [None] * len(codes)
    stack: list[int] = []
    for place, code in enumerate(codes):
        arity = int(ARITIES[code])
        operands = stack[len(stack) - arity :]
        del stack[len(stack) - arity :]
        for operand in operands:
            parents[operand] = BY_CODE[code].name
        starts.append(starts[operands[0]] if operands else place)
        stack.append(place)
    for end, start in enumerate(starts):
        replacements = [0.0] * (parents[end] in _TERMS) + [1.0] * (parents[end] in _FACTORS)
        if end > start:
            part = Program._unchecked(codes[start : end + 1], values[8 * start : 8 * end + 8])
            results = evaluate_program(part, settings.sample)
            replacements += [finite_median(results)] if np.isfinite(results).any() else []
        parts = [(bytes([CONSTANT]), np.float64(value).tobytes()) for value in replacements]
        for stop in range(end, start, -1):
            if ARITIES[codes[stop]] != 1 or stop < end - 1:
                break
            parts.append((codes[start:stop], values[8 * start : 8 * stop]))
        if codes[end] == _ABS:
            parts.append((parts[-1][0] + bytes([_NEG]), parts[-1][1] + bytes(8)))
        for new_codes, new_values in parts:
            changed = Program._unchecked(
                codes[:start] + new_codes + codes[end + 1 :],
                values[: 8 * start] + new_values + values[8 * end + 8 :],
            )
            yield rules.applied_once(changed)


def _cost(program: Program) -> float:
    numbers = program.values[program.codes == CONSTANT].tolist()
    return len(program) + sum(map(cost, numbers))


def lift(program: Program, chosen: Callable[[float], bool] = is_free) -> tuple[Program, Floats]:
    """Make the chosen constants parameters, by default those that have no short form."""
    free = [
        code == CONSTANT and chosen(value)
        for code, value in zip(program.codes.tolist(), program.values.tolist(), strict=True)
    ]
    values = program.values.copy()
    values[free] = np.arange(sum(free))
    return Program(np.where(free, np.uint8(PARAMETER), program.codes), values), program.values[free]


def _unfitted(programs: list[Program]) -> Trials:
    return programs, [np.empty(0)] * len(programs)
