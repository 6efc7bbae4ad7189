"""Draws starts for the searches of a fit, and finds the scales of parameters that they need.

A start is worth something only where its program computes values of about the target's size from
arguments of about 1. So the scale of each parameter is found from the data first, by rules that
units follow, too:

    the program as a whole is as large as the target
    a sum is as large as those of its terms that have no parameters, and a parameter next to them
    a factor or divisor with parameters makes up for the other one
    the argument of exp, sin, log, ... is about 1, if parameters can make it so

Other units of the data change the scales by the same factors, and so the drawn starts. A draw is
log-uniform around the scale, with a random sign, but for parameters whose place tells more: a
frequency (below sin, cos, tan), an exponent, a shift of a variable. Half of the draws of these take
uniform numbers from a range instead, and all of a phase do, from one turn. The range is cut to the
bounds first, and a turn is taken from the middle of its box, so that the place of a box does not
matter. What is still drawn outside of two bounds becomes uniform between them.

All draws of a call come from one table of a Latin hypercube (McKay, Beckman and Conover,
Technometrics 21, 1979), whose row i belongs to parameter i of every program. So a program gets the
same starts in every batch, and in every part of one.

Searches that would end are perturbed by the same scales, so that none ends at a saddle or on a
plateau:

    at a point that a search would end at:
        if no step has been taken, or parameters have no effect there, or the same effect:
            evaluate a perturbed point
            if its loss is less, or if the step that its model proposes makes the loss less: go on
        else, or if none of some perturbations leads on: end

Elsewhere the columns of the Jacobian are independent, and steps have led there. Then no symmetry
holds the search: of the points where the gradient vanishes those that are no minima push the steps
of a descent method away from them (Lee, Simchowitz, Jordan and Recht, COLT 2016). So nothing is
perturbed there, and most searches pay nothing.

Parameters without effect are perturbed alone: to about their scale, because plateaus are
left by large steps; first to about a tenth of it where they are 0, because saddles are left by
small ones. Where they have an effect at a perturbed point, and yet no perturbation leads on, the
search has stalled: on a plateau no test of convergence says anything of them. The others move as
far as changes the values by a tenth of the residuals. What is pseudo-random about it depends on the
number of the parameter and of the perturbation, so that searches repeat.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import replace
from functools import cache
from typing import Any, Final

import numpy as np
from numba import types
from numpy.typing import NDArray

from warpfit.dataset import Dataset
from warpfit.ir import Batch
from warpfit.ops import CONSTANT, FIRST_OPERATOR, OPERATORS, PARAMETER, VARIABLE
from warpfit.request import FitRequest
from warpfit_server.engine.fit.linear_model import (
    ILL_CONDITIONED,
    RIDGE,
    Model,
    Workspace,
    are_usable,
    find_roles,
    has_effect,
    is_exact,
    promised_decrease,
    solve_step,
)
from warpfit_server.engine.fit.searches import (
    DAMPING,
    EVALUATIONS,
    FREE,
    GROWTH,
    ITERATIONS,
    LEAVING,
    LINEAR,
    LOSS,
    LOWER,
    NATURAL,
    NO_PLATEAU,
    PIVOT,
    PLATEAU,
    PROBES,
    PROBING,
    SCALE,
    SEEN,
    STIFFNESS,
    TOKENS,
    TRIAL,
    UPPER,
    Floats,
    Integers,
    SearchLimits,
    X,
    spread,
    within,
)
from warpfit_server.engine.native import numba_cache
from warpfit_server.engine.native.intrinsics import inlined, uncounted

#: Rows of which the sizes of variables are taken, spread evenly.
_ROWS: Final = 1024
#: Columns whose sizes are taken without a pause, which takes about a millisecond.
_COLUMNS_AT_ONCE: Final = 16
#: Decades around a parameter's scale, for one draw after the other.
_DECADES: Final = (0.5, 1.0, 1.5, 2.0)
#: Largest product of a frequency and the standard deviation of what it belongs to, of a uniform
#: draw; and the largest exponent.
_TURNS: Final = 25.0
_EXPONENT: Final = 4.0
#: Share of a variable's range by which a shift may leave it.
_MARGIN: Final = 0.25
#: Logarithms of scales are kept in this range, so that sums of them stay finite.
_LARGEST: Final = 150.0

# Columns of `_OPERATORS`, which describes how each operator changes sizes.
_RULE: Final = 0
_POWER: Final = 1
# Values of _RULE.
_FUNCTION, _TURNING, _SUM, _PRODUCT, _QUOTIENT, _ROOT, _RAISED, _PRODUCT_SUM = range(8)
_ADD: Final = OPERATORS["add"].code
_RULES: Final = {
    **dict.fromkeys(("sin", "cos", "tan"), _TURNING),
    **dict.fromkeys(("add", "sub", "min", "max", "where", "lt", "le", "gt", "ge", "mod"), _SUM),
    **{"mul": _PRODUCT, "div": _QUOTIENT, "fma": _PRODUCT_SUM},
    **dict.fromkeys(("pow", "powabs"), _RAISED),
}
_POWERS: Final = {
    **{"neg": 1.0, "abs": 1.0, "square": 2.0, "cube": 3.0, "inv": -1.0},
    **{"sqrt": 0.5, "sqrtabs": 0.5, "cbrt": 1.0 / 3.0},
}

#: Rule, power and arity by operator code; [256, 3].
_OPERATORS: Final = np.zeros((256, 3))
_OPERATORS[[row.code for row in OPERATORS.values()]] = [
    (_ROOT if name in _POWERS else _RULES.get(name, _FUNCTION), _POWERS.get(name, 1.0), row.arity)
    for name, row in OPERATORS.items()
]

# Columns of a node: tokens of its subtree, 1 if parameters can give it any size, what a parameter
# here is to the program, the nodes of the operands.
_SIZE, _FREE, _KIND, _ROOTS = range(4)
_COLUMNS: Final = _ROOTS + 3
# Kinds of parameters. From _SHIFT on: 2 for each variable, the second one for a shift of the other
# sign.
_SCALE, _FREQUENCY, _PHASE, _POWER_OF, _SHIFT = range(5)


#: Perturbations of a search whose parameters have some effect, and of others.
_PROBES: Final = 1
MOST_PROBES: Final = 3
#: Steps from a perturbed point, and the damping of each.
_MOST_STEPS: Final = 3
_DAMPING: Final = 1e-2
#: Attempts to find finite derivatives near a start.
_MOST_NUDGES: Final = 4
#: Part of its natural scale below which a parameter is as good as 0.
_TINY: Final = 1e-9
#: Most natural scales between two bounds of a parameter that is perturbed to any place there.
_NARROW: Final = 20.0
#: A small perturbation, relative to a parameter or to the residuals.
_SMALL: Final = 0.1
#: Steps of the additive recurrences that stand for random numbers: the golden ratio and the plastic
#: number, inverted.
_GOLDEN: Final = 0.6180339887498949
_PLASTIC: Final = 0.7548776662466927

# --------------------------------------------------------------------------- scales of parameters


# It allocates nothing, so that references need not be counted.
@numba_cache.njit(nogil=True, error_model="numpy", _nrt=False)  # type: ignore[untyped-decorator]
def find_scales(
    codes: NDArray[np.uint8],
    values: Floats,
    starts: Integers,
    parameter_starts: Integers,
    table: Floats,
    sizes: Floats,
    target: float,
    is_first: bool,
    nodes: Integers,
    goals: Floats,
    scales: Floats,
    kinds: Integers,
) -> None:
    """Fill in the decimal logarithm of the scale of each parameter, and its kind.

    Args:
        codes: of checked programs.
        values: of their tokens.
        starts: of the programs, with the total.
        parameter_starts: of one vector for each program, with the total.
        table: `_OPERATORS`.
        sizes: decimal logarithm of the size of each variable.
        target: that of the target.
        is_first: whether the first place of a parameter that has several counts, not the last one.
        nodes: scratch memory, [tokens of the longest program, _COLUMNS].
        goals: likewise, [2, tokens of the longest program].
        scales: the results, one for each parameter; NaN before, and where it stands nowhere.
        kinds: likewise; `_SCALE` before.
    """
    size, wanted = goals[0], goals[1]
    for program in range(len(starts) - 1):
        first, last = starts[program], starts[program + 1] - 1
        for token in range(first, last + 1):
            _measure(codes, values, first, token, table, sizes, nodes, size)
        nodes[last - first, _KIND] = _SCALE
        wanted[last - first] = target
        for token in range(last, first - 1, -1):
            place = token - first
            if codes[token] >= FIRST_OPERATOR:
                _want(codes, values, token, first, table, nodes, size, wanted)
            elif codes[token] == PARAMETER:
                index = parameter_starts[program] + np.int64(values[token])
                # Places come from the last one on.
                if not is_first and not math.isnan(scales[index]):
                    continue
                scales[index] = min(max(wanted[place], -_LARGEST), _LARGEST)
                kinds[index] = nodes[place, _KIND]


@uncounted
def _measure(
    codes: Any, values: Any, first: int, token: int, table: Any, sizes: Any, nodes: Any, size: Any
) -> None:
    """Find the size of a node, as if it were 1 where parameters decide, and whether they do."""
    place, code, value = token - first, codes[token], values[token]
    node = nodes[place]
    node[_SIZE], node[_FREE], size[place] = 1, code == PARAMETER, 0.0
    if code == VARIABLE:
        size[place] = sizes[np.int64(value)]
    elif code == CONSTANT and value != 0.0 and math.isfinite(value):
        size[place] = math.log10(abs(value))
    if code < FIRST_OPERATOR:
        return
    rule, arity, below = table[code, _RULE], int(table[code, 2]), place - 1
    for operand in range(arity - 1, -1, -1):
        node[_ROOTS + operand] = below
        node[_SIZE] += nodes[below, _SIZE]
        below -= nodes[below, _SIZE]
    a, b = node[_ROOTS], node[_ROOTS + min(1, arity - 1)]
    if rule == _SUM:
        # A sum is as large as its largest term without parameters, if there is one.
        most, takes_any = size[a], nodes[a, _FREE] != 0
        for operand in range(1, arity):
            below = node[_ROOTS + operand]
            if (nodes[below, _FREE] != 0) == takes_any:
                most = max(most, size[below])
            elif takes_any:
                most, takes_any = size[below], False
        size[place], node[_FREE] = most, takes_any
    elif rule in (_PRODUCT, _PRODUCT_SUM):
        product, free = size[a] + size[b], nodes[a, _FREE] | nodes[b, _FREE]
        size[place], node[_FREE] = product, free
        if rule == _PRODUCT_SUM:
            c = node[_ROOTS + 2]
            if nodes[c, _FREE] == free:
                size[place] = max(product, size[c])
            elif free:
                size[place], node[_FREE] = size[c], 0
    elif rule == _QUOTIENT:
        size[place], node[_FREE] = size[a] - size[b], nodes[a, _FREE] | nodes[b, _FREE]
    elif rule == _ROOT:
        size[place], node[_FREE] = table[code, _POWER] * size[a], nodes[a, _FREE]
    elif rule == _RAISED:
        exponent = values[first + b] if codes[first + b] == CONSTANT else 1.0
        size[place], node[_FREE] = exponent * size[a], nodes[a, _FREE]
    size[place] = min(max(size[place], -_LARGEST), _LARGEST)


@uncounted
def _want(
    codes: Any, values: Any, token: int, first: int, table: Any, nodes: Any, size: Any, wanted: Any
) -> None:
    """Say how large the operands of a node should be, and what a parameter there is."""
    place = token - first
    node, code, goal, kind = nodes[place], codes[token], wanted[place], nodes[place, _KIND]
    rule, arity = table[code, _RULE], int(table[code, 2])
    roots = node[_ROOTS : _ROOTS + arity]
    for operand in range(arity):
        below = roots[operand]
        wanted[below] = size[below]
        nodes[below, _KIND] = _FREQUENCY if rule == _TURNING else _SCALE
        if nodes[below, _FREE] and (rule in (_FUNCTION, _TURNING)):
            wanted[below] = 0.0
    a, b = roots[0], roots[min(1, arity - 1)]
    if rule in (_SUM, _PRODUCT_SUM):
        terms = roots if rule == _SUM else roots[2:]
        level = goal if node[_FREE] else max(goal, size[place])
        for below in terms:
            if nodes[below, _FREE]:
                wanted[below] = level
                nodes[below, _KIND] = kind
                if codes[first + below] == PARAMETER:
                    nodes[below, _KIND] = _PHASE if kind == _FREQUENCY else _SCALE
        if rule == _SUM and arity == 2:
            for own, other in ((a, b), (b, a)):
                is_shift = codes[first + own] == PARAMETER and codes[first + other] == VARIABLE
                if is_shift and kind != _FREQUENCY:
                    sign = codes[token] == _ADD
                    variable = np.int64(values[first + other])
                    nodes[own, _KIND] = _SHIFT + 2 * variable + (1 if sign else 0)
        goal = level
    if rule in (_PRODUCT, _PRODUCT_SUM, _QUOTIENT):
        # Of two factors with parameters the shorter one makes up for the other.
        takes_a = nodes[a, _FREE] != 0
        if takes_a and nodes[b, _FREE]:
            takes_a = nodes[a, _SIZE] <= nodes[b, _SIZE]
        if takes_a:
            wanted[a] = goal + size[b] if rule == _QUOTIENT else goal - size[b]
            nodes[a, _KIND] = kind
        elif nodes[b, _FREE]:
            wanted[b] = size[a] - goal if rule == _QUOTIENT else goal - size[a]
            nodes[b, _KIND] = kind if rule != _QUOTIENT else _SCALE
    elif rule == _ROOT and nodes[a, _FREE]:
        wanted[a] = goal / table[code, _POWER]
        nodes[a, _KIND] = kind
    elif rule == _RAISED:
        if nodes[a, _FREE]:
            is_known = codes[first + b] == CONSTANT and values[first + b] != 0.0
            wanted[a] = goal / values[first + b] if is_known else goal
        if nodes[b, _FREE]:
            wanted[b] = 0.0
            nodes[b, _KIND] = _POWER_OF


@cache
def load() -> None:
    """Load the code of `find_scales`, or compile it; a fit needs it before its first pass."""
    codes = types.Array(types.uint8, 1, "C", readonly=True)
    values = types.Array(types.float64, 1, "C", readonly=True)
    numbers, places = types.float64[::1], types.int64[::1]
    table, scalars = types.float64[:, ::1], (types.float64, types.boolean)
    scratch = types.int64[:, ::1], table
    arguments = codes, values, places, places, table, numbers, *scalars, *scratch, numbers, places
    numba_cache.load(find_scales, types.void(*arguments))


def is_loaded() -> bool:
    """Return whether `load` takes no time."""
    return bool(load.cache_info().currsize)


class VariableSizes:
    """Sizes of the variables that programs use, and of the target, on some rows of a data set.

    Rows and memory follow from the variables that are used, but for a number for each variable of
    the data set. They are measured some at a time by `steps`, so that neither takes long.

    Args:
        batch: programs whose tokens have been checked.
        dataset: the data set, which has a target.
        rows: the rows of the fit.
    """

    def __init__(self, batch: Batch, dataset: Dataset, rows: slice) -> None:
        named = batch.values[batch.codes == VARIABLE].astype(np.int64)
        self.used = np.flatnonzero(np.bincount(named))
        """The variables that are used, ascending."""
        self._dataset, self._rows = dataset, rows
        count = len(self.used) + 1
        self.means, self.deviations, self.least, self.most = np.empty((4, count))
        """Decimal logarithms of root mean squares and of standard deviations; the least and the
        greatest number. One of each for each used variable, and for the target, the last one."""

    def steps(self) -> Generator[None, None, None]:
        """Measure all columns, with a pause after some of them."""
        for first in range(0, len(self.means), _COLUMNS_AT_ONCE):
            if first:
                yield
            self._measure(slice(first, min(first + _COLUMNS_AT_ONCE, len(self.means))))

    def _measure(self, some: slice) -> None:
        dataset, rows = self._dataset, self._rows
        columns = np.append(self.used, dataset.layout.variables)[some]
        step = max(1, (rows.stop - rows.start) // _ROWS)
        taken = np.arange(rows.start, rows.stop, step)
        if dataset.weights is not None:
            taken = taken[dataset.weights[taken] > 0.0]
        numbers = dataset.matrix[columns[:, None], taken].astype(np.float64)
        known = np.isfinite(numbers)
        number = np.maximum(known.sum(axis=1), 1)
        filled = np.where(known, numbers, 0.0)
        peaks = np.maximum(np.abs(filled).max(axis=1, initial=0.0), np.finfo(float).tiny)
        unit = filled / peaks[:, None]

        def sizes(unit: Floats) -> Floats:
            with np.errstate(divide="ignore"):
                squares = np.square(unit).sum(axis=1)
                return np.asarray(np.log10(np.sqrt(squares / number)) + np.log10(peaks))

        self.means[some] = means = sizes(unit)
        middle = unit.sum(axis=1) / number
        deviations = sizes(np.where(known, unit - middle[:, None], 0.0))
        constant = np.where(peaks > 1e-300, means, 0.0)
        self.deviations[some] = np.where(np.isfinite(deviations), deviations, constant)
        self.least[some] = np.where(known, numbers, np.inf).min(axis=1, initial=np.inf)
        self.most[some] = np.where(known, numbers, -np.inf).max(axis=1, initial=-np.inf)


# ------------------------------------------------------------------------------------------ draws


class Scales:
    """The scales of the parameters of each program on some rows of a data set.

    Sizes of variables are measured in two ways, as root mean squares and as standard deviations:
    what matters of a year is how far it is from others, if it is the argument of a sine. So are the
    places of a parameter that has several: the first one and the last one count.

    Args:
        batch: programs whose tokens have been checked.
        sizes: of the variables that the programs use, all measured.
        threads: most threads that find the scales.
    """

    def __init__(self, batch: Batch, sizes: VariableSizes, threads: int = 1) -> None:
        load()
        self._threads = threads
        places = np.zeros(int(sizes.used.max(initial=0)) + 1)
        places[sizes.used] = np.arange(len(sizes.used))
        values, is_variable = batch.values.copy(), batch.codes == VARIABLE
        values[is_variable] = places[values[is_variable].astype(np.int64)]
        self._batch, self._variables = replace(batch, values=values), sizes
        means = np.where(np.isfinite(sizes.means), sizes.means, 0.0)
        self._target = float(means[-1])
        self.kinds = np.zeros(int(batch.parameter_counts.sum(dtype=np.int64)), dtype=np.int64)
        self._first = self._logarithms(means[:-1], is_first=True)

    @classmethod
    def of(cls, batch: Batch, dataset: Dataset, rows: slice) -> Scales:
        """Measure the variables without a pause, and return the scales."""
        sizes = VariableSizes(batch, dataset, rows)
        for _ in sizes.steps():
            pass
        return cls(batch, sizes)

    def _logarithms(self, sizes: Floats, *, is_first: bool) -> Floats:
        """Find the decimal logarithms of the scales from sizes of variables, and the kinds.

        The result has an element for each parameter of all programs.
        """
        batch, longest = self._batch, int(self._batch.lengths.max(initial=1))
        found = np.full(len(self.kinds), np.nan)
        self.kinds.fill(_SCALE)
        tokens = np.ascontiguousarray(batch.codes), np.ascontiguousarray(batch.values)
        places = np.concatenate([[0], np.cumsum(batch.parameter_counts, dtype=np.int64)])
        given = _OPERATORS, np.ascontiguousarray(sizes), self._target, is_first

        def find(programs: slice) -> None:
            own = slice(programs.start, programs.stop + 1)
            scratch = np.empty((longest, _COLUMNS), np.int64), np.empty((2, longest))
            starts = batch.starts[own], places[own]
            find_scales(*tokens, *starts, *given, *scratch, found, self.kinds)

        spread(batch.lengths / TOKENS, self._threads, find)
        found[np.isnan(found)] = 0.0  # parameters that stand nowhere
        return found

    @property
    def natural(self) -> Floats:
        """Scale of each parameter of each program, [parameters of all programs]."""
        return np.asarray(10.0**self._first)

    def draw(
        self, counts: Integers, number: int, seed: int, lower: Floats, upper: Floats
    ) -> Floats:
        """Draw starts between bounds, [number, parameters of all programs].

        ``counts`` are the parameters of each program, the bounds [parameters of all programs].
        """
        generator = np.random.Generator(np.random.PCG64(seed))
        longest = int(counts.max(initial=0))
        table = np.empty((3, longest, number))
        for parameter in range(longest):
            for row in table[:, parameter]:
                row[:] = (generator.permutation(number) + generator.random(number)) / number
        index = np.arange(len(self.kinds)) - np.repeat(np.cumsum(counts) - counts, counts)
        how, sign, size = table[:, index].swapaxes(1, 2)  # [number, parameters] each
        order = np.arange(number)
        decades = np.array(_DECADES)[order % len(_DECADES), None]
        deviations = self._variables.deviations
        sizes = np.where(np.isfinite(deviations), deviations, 0.0)
        second = self._logarithms(sizes[:-1], is_first=False)
        near = np.stack([self._first, second])[(order // len(_DECADES)) % 2]
        signs = np.where(sign < 0.5, -1.0, 1.0)
        drawn = signs * 10.0 ** (near + decades * (2.0 * size - 1.0))
        kinds = self.kinds
        is_turning = kinds == _PHASE
        high = np.where(kinds == _FREQUENCY, 10.0**second * _TURNS, _EXPONENT)
        high = np.where(is_turning, np.pi, high)
        low = -high
        shifts = np.flatnonzero(kinds >= _SHIFT)
        if len(shifts):
            variable, opposite = np.divmod(kinds[shifts] - _SHIFT, 2)
            least, most = self._variables.least[variable], self._variables.most[variable]
            margin = _MARGIN * (most - least)
            least, most = least - margin, most + margin
            low[shifts] = np.where(opposite == 1, -most, least)
            high[shifts] = np.where(opposite == 1, -least, most)
        # The ranges of uniform draws are cut to the bounds. One outside of them becomes the whole
        # box, or begins at the only bound. The width of a turn alone means something, and it is
        # moved to the middle of the box first.
        width, is_box = high - low, np.isfinite(lower) & np.isfinite(upper)
        with np.errstate(invalid="ignore"):
            shift = np.where(is_turning & is_box, 0.5 * lower + 0.5 * upper, 0.0)
        low, high = low + shift, high + shift
        is_above, is_below = low > upper, high < lower
        low = np.where(is_above, np.where(is_box, lower, upper - width), low)
        high = np.where(is_below, np.where(is_box, upper, lower + width), high)
        low, high = np.clip(low, lower, upper), np.clip(high, lower, upper)
        uniform = _between(low, high, size)
        # A draw around a scale that is outside takes the other sign if that is inside. Else it is
        # uniform between two bounds, or as far from a single bound as it was from 0.
        is_outside = (drawn < lower) | (drawn > upper)
        is_lost = is_outside & ((-drawn < lower) | (-drawn > upper))
        beside = np.where(np.isfinite(lower), lower + np.abs(drawn), upper - np.abs(drawn))
        with np.errstate(invalid="ignore"):
            moved = np.where(is_box, _between(lower, upper, size), beside)
        drawn = np.where(is_lost, moved, np.where(is_outside, -drawn, drawn))
        is_uniform = is_turning | ((how < 0.5) & (kinds != _SCALE))
        return np.where(is_uniform, uniform, drawn)


def _between(low: Floats, high: Floats, share: Floats) -> Floats:
    return np.asarray(low * (1.0 - share) + high * share)  # high - low may overflow


def with_restarts(request: FitRequest, scales: Scales) -> FitRequest:
    """Return the request with drawn starts after the given ones; fixed parameters keep theirs."""
    settings, batch = request.settings, request.problem.batch
    if not settings.restarts:
        return request
    counts = batch.parameter_counts.astype(np.int64)
    total, given = int(counts.sum()), batch.vectors
    lower = np.full(total, -np.inf) if settings.lower is None else settings.lower
    upper = np.full(total, np.inf) if settings.upper is None else settings.upper
    drawn = scales.draw(counts, settings.restarts, settings.seed, lower, upper)
    # Where the first parameter of each program is, and the own index of each parameter.
    first = np.repeat(np.cumsum(counts) - counts, counts)
    own = np.arange(total) - first
    width = np.repeat(counts, counts)
    kept = batch.parameters[given * first + own]
    if settings.fixed is not None:
        drawn = np.where(settings.fixed, kept, drawn)
    vectors = given + settings.restarts
    parameters = np.empty(vectors * total)
    place = vectors * first + own
    for number in range(given):
        parameters[place + number * width] = batch.parameters[given * first + number * width + own]
    for number, row in enumerate(drawn):
        parameters[place + (given + number) * width] = row
    whole = replace(batch, parameters=parameters, vectors=vectors)
    return replace(request, problem=replace(request.problem, batch=whole))


def without_missing(batch: Batch, mean: float) -> Batch:
    """Return programs with the target's ``mean`` as their value where their own is not finite.

    The program f becomes where(abs(f) < inf, f, mean), which has no derivatives where f is NaN or
    infinite. So a row that is left out is penalised as if it were predicted by the mean.
    """
    before = np.array([OPERATORS["abs"].code, CONSTANT, OPERATORS["lt"].code], np.uint8)
    after = np.array([CONSTANT, OPERATORS["where"].code], np.uint8)
    own = batch.lengths.astype(np.int64)
    lengths = 2 * own + len(before) + len(after)
    starts = np.cumsum(lengths) - lengths
    codes, values = np.empty(int(lengths.sum()), np.uint8), np.zeros(int(lengths.sum()))
    first = np.arange(len(batch.codes)) + np.repeat(starts - batch.starts[:-1], own)
    second = first + np.repeat(own + len(before), own)
    for places in (first, second):
        codes[places], values[places] = batch.codes, batch.values
    for number, code in enumerate(before):
        codes[starts + own + number] = code
    for number, code in enumerate(after):
        codes[starts + 2 * own + len(before) + number] = code
    values[starts + own + 1], values[starts + 2 * own + len(before)] = np.inf, mean
    return replace(batch, codes=codes, values=values, lengths=lengths.astype(np.uint32))


# ----------------------------------------------------------------------------------- perturbations


@inlined
def begin_probe(
    vector: Floats,
    number: Floats,
    counter: Integers,
    model: Model,
    limits: SearchLimits,
) -> bool:
    """Make a perturbed point the next trial of a search that would end; False if it may end.

    ``model`` is that at X, which `is_minimum` has just been asked about.
    """
    n, dead, free = vector.shape[1], 0, 0
    for i in range(n):
        if vector[FREE, i] != 0.0 and vector[LOWER, i] < vector[UPPER, i]:
            free += 1
            dead += not _moves_values(vector, i, model)
    most = MOST_PROBES if dead > 0 else _PROBES
    if free == 0 or counter[PROBES] >= most or counter[ITERATIONS] >= limits.iterations:
        return False
    if limits.squares and is_exact(vector, number, model, limits):
        return False
    is_steep = not model.factored and not number[PIVOT] < ILL_CONDITIONED
    if dead == 0 and counter[EVALUATIONS] > 1 and is_steep:
        return False
    for i in range(n):
        x, column = vector[X, i], math.sqrt(model.curvature[i * (i + 1) // 2 + i])
        trial, scale = x, vector[NATURAL, i]
        share = (i + 1) * _GOLDEN + counter[PROBES] * _PLASTIC
        share -= math.floor(share)
        # Bits of the number of the perturbation, so that all signs of two parameters come.
        sign = 1.0 if ((counter[PROBES] * (i + 1)) ^ (i >> 1)) & 1 == 0 else -1.0
        if vector[FREE, i] == 0.0 or (dead > 0 and _moves_values(vector, i, model)):
            pass
        elif dead == 0:
            trial += sign * (0.3 + share) * _SMALL * math.sqrt(model.values / free) / column
        elif abs(x) <= _TINY * scale and counter[PROBES] < 2:
            trial = _in_box(vector, i, sign * (0.5 + share) * _SMALL * scale, share)
        elif vector[UPPER, i] - vector[LOWER, i] <= _NARROW * scale:
            place = share + (x - vector[LOWER, i]) / (vector[UPPER, i] - vector[LOWER, i])
            trial = _at_share(vector, i, place - math.floor(place))
        else:
            trial = _in_box(vector, i, sign * scale * 10.0 ** (2.0 * share - 1.0), share)
        vector[TRIAL, i] = within(vector, i, trial, limits)
    if dead > 0 and counter[PLATEAU] == NO_PLATEAU:
        counter[PLATEAU] = LEAVING
    counter[PROBING] = 1
    counter[PROBES] += 1
    counter[ITERATIONS] += 1
    return True


@inlined
def _moves_values(vector: Floats, i: int, model: Model) -> bool:
    """Whether a parameter has an effect at X; one that the model gives no column has none."""
    column = math.sqrt(model.curvature[i * (i + 1) // 2 + i])
    effect = has_effect(vector, X, i, column, model.gradient[i], model.loss, model.values)
    return column > 0.0 and (vector[LINEAR, i] != 0.0 or effect)


@inlined
def _in_box(vector: Floats, i: int, value: float, share: float) -> float:
    """Move a perturbed parameter into its box, wherever that is."""
    lower, upper = vector[LOWER, i], vector[UPPER, i]
    if lower <= value <= upper:
        return value
    if lower <= -value <= upper:
        return -value
    return _at_share(vector, i, share) if upper - lower < math.inf else value


@inlined
def _at_share(vector: Floats, i: int, share: float) -> float:
    return float(vector[LOWER, i] * (1.0 - share) + vector[UPPER, i] * share)


@inlined
def leads_on(
    vector: Floats,
    number: Floats,
    counter: Integers,
    gradient: Floats,
    curvature: Floats,
    loss: float,
    squares: float,
    values: float,
    limits: SearchLimits,
    space: Workspace,
) -> bool:
    """Judge the trial of a perturbed search; True if it is better than X, so that it goes on.

    Where the trial's model promises that, PROBING stays above 0 and the trial becomes what the
    model proposes; else PROBING is 0 and the search may end. Rows of ``vector`` are those of
    Levenberg-Marquardt's damping. Gradient, curvature and loss are those at the trial, and
    ``squares`` and ``values`` are the two sums of squares of its `Model`.
    """
    least = number[LOSS] - limits.flat * limits.flat * abs(number[LOSS])
    n = vector.shape[1]
    usable = are_usable(vector, TRIAL, squares, values, gradient, curvature)
    for i in range(n if usable and counter[PLATEAU] == LEAVING else 0):
        column = math.sqrt(curvature[i * (i + 1) // 2 + i])
        moves = vector[TRIAL, i] != vector[X, i]
        if moves and has_effect(vector, TRIAL, i, column, gradient[i], squares, values):
            counter[PLATEAU] = SEEN
    if usable and loss < least:
        counter[PROBING] = 0
        return True
    steps = counter[PROBING]
    counter[PROBING] = 0
    if not usable or steps > _MOST_STEPS or not squares > 0.0:
        return False
    if counter[ITERATIONS] >= limits.iterations:
        return False
    model = Model(TRIAL, gradient, curvature, space.columns, False, squares, values)
    find_roles(vector, model, space)
    for i in range(n):
        vector[SCALE, i] = 0.0
    damping, growth = number[DAMPING], number[GROWTH]
    number[DAMPING], number[GROWTH] = _DAMPING, 2.0
    solve_step(vector, number, counter, model, _DAMPING, RIDGE, space)
    number[DAMPING], number[GROWTH] = damping, growth
    h = space.step[:n]
    # A row loss with the second derivative s has the model of squares times 2 / s.
    share = 1.0 if limits.squares else 2.0 / number[STIFFNESS]
    if not loss - share * promised_decrease(vector, model, h) < least:
        return False
    for i in range(n):
        vector[TRIAL, i] = within(vector, i, vector[TRIAL, i] + share * h[i], limits)
    counter[PROBING] = steps + 1
    counter[ITERATIONS] += 1
    return False


@inlined
def nudge(vector: Floats, counter: Integers, limits: SearchLimits) -> bool:
    """Make a point near the start the next trial, where a derivative at the start is infinite."""
    if counter[PROBES] >= _MOST_NUDGES or counter[ITERATIONS] >= limits.iterations:
        return False
    counter[PROBES] += 1
    counter[ITERATIONS] += 1
    for i in range(vector.shape[1]):
        x, scale = vector[X, i], vector[NATURAL, i]
        sign = 1.0 if counter[PROBES] & 1 else -1.0
        size = _SMALL**2 * (abs(x) if x != 0.0 else scale) * (1 + (counter[PROBES] > 2) * 9)
        trial = x + sign * size * (1.0 + _SMALL * math.sin(i + 1.0))
        if vector[FREE, i] != 0.0:
            vector[TRIAL, i] = within(vector, i, trial, limits)
    return True
