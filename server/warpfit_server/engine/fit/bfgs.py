"""BFGS: judges the trials of an engine pass and proposes the next ones.

The update is that of Broyden, Fletcher, Goldfarb and Shanno (Nocedal and Wright, "Numerical
Optimization", 2nd edition, 2006, section 6.1), the line search is the one that Lewis and Overton
("Nonsmooth optimization via quasi-Newton methods", Mathematical Programming 141, 2013, algorithm
2.6) show to suit losses with kinks too. Each pass of the engine tries one step length t:

    if f(x + t p) > f(x) + 1e-4 t p.g:       t is too long:  high = t
    elif p.g(x + t p) < 0.9 p.g:             t is too short: low = t
    else:                                    x = x + t p, update the inverse, new direction p = -H g
    t = (low + high) / 2 if high is known, else 2 low

The first inverse is that of the slightly damped curvature J^T W J times the *stiffness*, the second
derivative of the row loss, roughly: 2 for squares; for others the gradient of the loss divided by
J^T W d, as if the row loss were a square with that factor. Parameters at a bound whose gradient
points outwards take no part, and steps are cut off at the bounds.

Every test compares numbers of the same unit: parameters are measured in the lengths of their
columns of the Jacobian at the start (WIDTH), steps relative to the parameters.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit_server.engine.fit.searches import (
    BEST,
    BEST_LOSS,
    BEST_SLOPE,
    DIRECTION,
    EVALUATIONS,
    FIRST_STEEPNESS,
    HIGH,
    INITIAL,
    ITERATIONS,
    LENGTH,
    LOSS,
    LOSS_CHANGE,
    LOW,
    LOWER,
    NOT_FINITE,
    PAIRS,
    REASON,
    RUNNING,
    SLOPE,
    SQUARES,
    STEP,
    STIFFNESS,
    TRIAL,
    TRIALS,
    UPDATES,
    UPPER,
    WIDTH,
    Floats,
    Integers,
    SearchLimits,
    X,
    ends,
    find_moving,
    parts_of,
    within,
)
from warpfit_server.engine.fit.triangles import all_finite, are_usable, dot, factorise, solve
from warpfit_server.engine.native import numba_cache
from warpfit_server.engine.native.intrinsics import inlined

#: Constants of the weak Wolfe conditions.
_DECREASE: Final = 1e-4
_FLATTER: Final = 0.9
#: Most step lengths along one direction.
_TRIALS: Final = 60
#: Damping of the curvature that gives the first inverse.
_RIDGE: Final = 1e-3
#: Least cosine between step and change of the gradient for an update.
_CURVED: Final = 1e-10


@numba_cache.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def advance(
    edges: Integers,
    vectors: Floats,
    numbers: Floats,
    counters: Integers,
    curvatures: Floats,
    inverses: Floats,
    new_sums: Floats,
    new_gradients: Floats,
    limits: SearchLimits,
    cancelled: NDArray[np.uint8],
) -> None:
    """Judge the evaluated trials of all searches, and propose the next ones; see `Searches`.

    Row TRIAL of ``vectors`` holds the evaluated trials, with their sums of row losses [S] and
    gradients [P], and then the next ones. The first call reads the curvatures at the starts, and
    the column STIFFNESS of ``numbers``. Another thread that writes another number than 0 to
    ``cancelled`` [1] ends this early.
    """
    for s in range(len(numbers)):
        if cancelled[0]:
            return
        if counters[s, REASON] != RUNNING:
            continue
        state = (edges, vectors, numbers, counters)
        vector, number, counter, gradient = parts_of(s, *state, new_gradients)
        inverse = inverses[edges[s, SQUARES] : edges[s + 1, SQUARES]]
        counter[EVALUATIONS] += 1
        if counter[EVALUATIONS] == 1:
            number[INITIAL] = number[LOSS] = new_sums[s]
            vector[SLOPE, :] = gradient
            curvature = curvatures[edges[s, PAIRS] : edges[s + 1, PAIRS]]
            turning = are_usable(new_sums[s], gradient, curvature)
            if turning:
                _begin_inverse(vector, number, counter, curvature, inverse, cancelled)
            else:
                counter[REASON] = NOT_FINITE
        else:
            finite = math.isfinite(new_sums[s]) and all_finite(gradient)
            turning = _judge(
                vector, number, counter, inverse, gradient, new_sums[s], finite, limits
            )
        if turning:
            _turn(vector, number, counter, inverse, limits)


@inlined
def _judge(
    vector: Floats,
    number: Floats,
    counter: Integers,
    inverse: Floats,
    gradient: Floats,
    loss: float,
    finite: bool,
    limits: SearchLimits,
) -> bool:
    """Judge the trial and choose another length; True if another direction is needed."""
    expected = dot(vector[SLOPE], vector[TRIAL] - vector[X])
    counter[TRIALS] += 1
    # Where bounds cut a step off, the slope along it can be positive.
    if finite and loss < number[LOSS] and loss < number[LOSS] + _DECREASE * expected:
        if loss < number[BEST_LOSS]:
            number[BEST_LOSS] = loss
            vector[BEST, :] = vector[TRIAL]
            vector[BEST_SLOPE, :] = gradient
        steep = dot(gradient, vector[DIRECTION]) < _FLATTER * dot(vector[SLOPE], vector[DIRECTION])
        if _is_cut_off(vector) or not steep:
            _accept(vector, number, counter, inverse, limits)
            return bool(counter[REASON] == RUNNING)
        number[LOW] = number[LENGTH]
    else:
        number[HIGH] = number[LENGTH]
    bracketed = number[HIGH] < math.inf
    number[LENGTH] = 0.5 * (number[LOW] + number[HIGH]) if bracketed else 2.0 * number[LOW]
    if _place_trial(vector, number[LENGTH], limits) and counter[TRIALS] < _TRIALS:
        return False
    if number[BEST_LOSS] < math.inf:
        _accept(vector, number, counter, inverse, limits)
    elif counter[UPDATES] > 0:  # the inverse may be bad: restart without it
        _reset_inverse(vector, number, counter, inverse)
    else:
        counter[REASON] = STEP
    return bool(counter[REASON] == RUNNING)


@inlined
def _is_cut_off(vector: Floats) -> bool:
    """Whether the trial is at a bound, where slopes along the direction mean little."""
    for i in range(vector.shape[1]):
        trial = vector[TRIAL, i]
        if trial != vector[X, i] and (trial == vector[LOWER, i] or trial == vector[UPPER, i]):
            return True
    return False


@inlined
def _accept(
    vector: Floats, number: Floats, counter: Integers, inverse: Floats, limits: SearchLimits
) -> None:
    """Move to the best point along the direction, and end a search that has converged."""
    step = vector[BEST] - vector[X]
    change = vector[BEST_SLOPE] - vector[SLOPE]
    decrease = number[LOSS] - number[BEST_LOSS]
    length, size = vector[WIDTH] * step, vector[WIDTH] * vector[X]
    _update_inverse(vector[WIDTH], counter, inverse, step, change)
    number[LOSS] = number[BEST_LOSS]
    vector[X, :] = vector[BEST]
    vector[SLOPE, :] = vector[BEST_SLOPE]
    _add_columns(vector, number, inverse)
    if decrease <= limits.loss * abs(number[LOSS]):
        counter[REASON] = LOSS_CHANGE
    elif math.sqrt(dot(length, length)) <= limits.step * math.sqrt(dot(size, size)):
        counter[REASON] = STEP


@inlined
def _turn(
    vector: Floats, number: Floats, counter: Integers, inverse: Floats, limits: SearchLimits
) -> None:
    """Choose a direction and its first trial, or end the search."""
    moving = np.empty(vector.shape[1], dtype=np.bool_)
    find_moving(vector, X, vector[SLOPE], moving)
    steepest = 0.0
    for i in range(len(moving)):
        if moving[i] and vector[WIDTH, i] > 0.0:
            steepest = max(steepest, abs(vector[SLOPE, i]) / vector[WIDTH, i])
    if counter[ITERATIONS] == 0:
        number[FIRST_STEEPNESS] = steepest
    if ends(counter, steepest, limits.gradient * number[FIRST_STEEPNESS], limits):
        return
    if not _direct(vector, inverse, moving):
        _reset_inverse(vector, number, counter, inverse)
        _direct(vector, inverse, moving)
    number[LENGTH], number[LOW], number[HIGH], number[BEST_LOSS] = 1.0, 0.0, math.inf, math.inf
    counter[TRIALS] = 0
    counter[ITERATIONS] += 1
    if not _place_trial(vector, number[LENGTH], limits):
        counter[REASON] = STEP


@inlined
def _direct(vector: Floats, inverse: Floats, moving: Any) -> bool:
    """Set the direction to -H g for moving parameters; False unless the loss falls along it."""
    n = len(moving)
    for i in range(n):
        vector[DIRECTION, i] = 0.0
        if moving[i]:
            for j in range(n):
                if moving[j]:
                    vector[DIRECTION, i] -= inverse[i * n + j] * vector[SLOPE, j]
    return bool(dot(vector[SLOPE], vector[DIRECTION]) < 0.0 and all_finite(vector[DIRECTION]))


@inlined
def _place_trial(vector: Floats, length: float, limits: SearchLimits) -> bool:
    """Place the trial at a length, inside the bounds; False if it equals the current point."""
    differs = False
    for i in range(vector.shape[1]):
        trial = vector[X, i]
        if vector[DIRECTION, i] != 0.0:
            trial = within(vector, i, trial + length * vector[DIRECTION, i], limits)
        differs = differs or trial != vector[X, i]
        vector[TRIAL, i] = trial
    return differs


@inlined
def _begin_inverse(
    vector: Floats,
    number: Floats,
    counter: Integers,
    curvature: Floats,
    inverse: Floats,
    cancelled: NDArray[np.uint8],
) -> None:
    """Invert the damped curvature at the start, scaled to a unit diagonal."""
    n = vector.shape[1]
    width, scale = vector[WIDTH], np.ones(n)
    system = np.empty(n * (n + 1) // 2)
    for i in range(n):
        row = i * (i + 1) // 2
        width[i] = math.sqrt(curvature[row + i])
        if width[i] > 0.0:
            scale[i] = width[i]
        for j in range(i):
            system[row + j] = curvature[row + j] / (scale[i] * scale[j])
        system[row + i] = 1.0 + _RIDGE
    if not factorise(system, 0, n, n, cancelled):
        _reset_inverse(vector, number, counter, inverse)
        return
    column = np.empty(n)
    for j in range(n):
        column[:] = 0.0
        column[j] = 1.0
        solve(system, column)
        for i in range(n):
            known = width[i] > 0.0 and width[j] > 0.0
            element = column[i] / (scale[i] * scale[j]) / number[STIFFNESS]
            inverse[i * n + j] = element if known else 0.0
    counter[UPDATES] = 1  # so that a failing search falls back to steepest descent


@inlined
def _add_columns(vector: Floats, number: Floats, inverse: Floats) -> None:
    """Let parameters take part whose column was 0 so far.

    Their WIDTH becomes the least one that explains the gradient if the row losses are squares.
    """
    n = vector.shape[1]
    for i in range(n):
        if vector[WIDTH, i] == 0.0 and vector[SLOPE, i] != 0.0 and number[LOSS] != 0.0:
            squares = 2.0 * abs(number[LOSS]) / number[STIFFNESS]
            width = abs(vector[SLOPE, i]) / number[STIFFNESS] / math.sqrt(squares)
            vector[WIDTH, i] = width
            inverse[i * n + i] = 1.0 / (number[STIFFNESS] * n) / (width * width)


@inlined
def _reset_inverse(vector: Floats, number: Floats, counter: Integers, inverse: Floats) -> None:
    """Make the next direction that of steepest descent, in units of the columns' lengths.

    No eigenvalue of a curvature with a unit diagonal exceeds the number of parameters.
    """
    n = vector.shape[1]
    inverse[:] = 0.0
    for i in range(n):
        width = vector[WIDTH, i]
        if width > 0.0:
            inverse[i * n + i] = 1.0 / (number[STIFFNESS] * n) / (width * width)
    counter[UPDATES] = 0


@inlined
def _update_inverse(
    width: Floats, counter: Integers, inverse: Floats, step: Floats, change: Floats
) -> None:
    """Update the inverse so that it maps the change of the gradient to the step."""
    n = len(step)
    curved, length, turned = dot(step, change), 0.0, 0.0
    for i in range(n):
        if width[i] > 0.0:
            length += (width[i] * step[i]) ** 2
            turned += (change[i] / width[i]) ** 2
    if not curved > _CURVED * math.sqrt(length) * math.sqrt(turned):
        return
    mapped = np.zeros(n)
    for i in range(n):
        for j in range(n):
            mapped[i] += inverse[i * n + j] * change[j]
    stretched = dot(change, mapped)
    if counter[UPDATES] < 2 and stretched > 0.0:
        # The first inverse knows the shape but not the size (Nocedal and Wright, equation 6.20).
        factor = curved / stretched
        inverse[:] = inverse * factor
        mapped *= factor
        stretched = curved
    ratio = (1.0 + stretched / curved) / curved
    for i in range(n):
        for j in range(n):
            inverse[i * n + j] += ratio * step[i] * step[j]
            inverse[i * n + j] -= (mapped[i] * step[j] + step[i] * mapped[j]) / curved
    counter[UPDATES] += 1
