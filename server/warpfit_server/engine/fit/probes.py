"""Perturbs searches that would end, so that none ends at a saddle or on a plateau.

    at a point that a search would end at:
        if no step has been taken, or parameters have no effect there, or the same effect:
            evaluate a perturbed point
            if its loss is less, or if the step that its model proposes makes the loss less: go on
        else, or if none of some perturbations leads on: end

Elsewhere the columns of the Jacobian are independent, and steps have led there. Then no symmetry
holds the search: of the points where the gradient vanishes those that are no minima push the steps
of a descent method away from them (Lee, Simchowitz, Jordan and Recht, COLT 2016). So nothing is
perturbed there, and most searches pay nothing.

Parameters without effect are perturbed alone: to about their scale (`starts`), because plateaus are
left by large steps; first to about a tenth of it where they are 0, because saddles are left by
small ones. Where they have an effect at a perturbed point, and yet no perturbation leads on, the
search has stalled: on a plateau no test of convergence says anything of them. The others move as
far as changes the values by a tenth of the residuals. What is pseudo-random about it depends on the
number of the parameter and of the perturbation, so that searches repeat.
"""

from __future__ import annotations

import math
from typing import Final

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
    TRIAL,
    UPPER,
    Floats,
    Integers,
    SearchLimits,
    X,
    within,
)
from warpfit_server.engine.native.intrinsics import inlined

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
            trial = _between(vector, i, place - math.floor(place))
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
    """Move a perturbed parameter into its box, wherever that is; see `starts` on draws."""
    lower, upper = vector[LOWER, i], vector[UPPER, i]
    if lower <= value <= upper:
        return value
    if lower <= -value <= upper:
        return -value
    return _between(vector, i, share) if upper - lower < math.inf else value


@inlined
def _between(vector: Floats, i: int, share: float) -> float:
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
