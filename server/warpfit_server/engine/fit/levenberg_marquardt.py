"""Levenberg-Marquardt: judges the trials of an engine pass and proposes the next ones.

After Madsen, Nielsen and Tingleff, "Methods for non-linear least squares problems" (2nd edition,
IMM, Technical University of Denmark, 2004), algorithm 3.16, with Marquardt's scaling (SIAM J. Appl.
Math. 11, 1963). The simple form, for F = half the weighted sum of squares, its gradient g and
A = J^T W J:

    h = -(A + damping * scale)^-1 g
    gain = (F(x) - F(x + h)) / (predicted decrease of the linear model)
    if F(x + h) < F(x):  x = x + h,  damping *= max(1/10, 1 - (2 gain - 1)^3), growth = 2
    else:                damping *= growth,  growth *= 2

The book's least factor is 1/3; 1/10 and a first damping of 0.1 reach lower losses within 10 and
within 50 iterations on random expressions, and more digits on NIST's problems.

Parameters c that the program is linear in (`separable`) are not damped, and the scale of the others
is the diagonal of the Schur complement of c in A: a step equals that of variable projection with
Kaufman's Jacobian (Golub and Pereyra, SIAM J. Numer. Anal. 10, 1973; Kaufman, BIT 15,
1975). At any evaluated point the best c and the loss there are known exactly. So a trial is judged
by that loss, and where it is much better than the trial's own, the next pass evaluates the point
with the best c. Starts are corrected like this, too.

The scale is the greatest of all points, where earlier ones count a tenth less with every step. The
greatest without that decay (Moré, Lecture Notes in Mathematics 630, 1978) is usually reached far
from the solution, and then damps too much.

Loss, gradient and curvature at x + h come from one pass, so that an accepted step needs no second
one. Parameters at a bound whose gradient points outwards take no part in a step, and steps are cut
off at the bounds; the decrease is predicted for the step as cut. Every test compares numbers of the
same unit, so that the units of data and parameters do not matter.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit_server.engine.fit import triangles
from warpfit_server.engine.fit.searches import (
    BEFORE,
    CORRECTING,
    DAMPING,
    EVALUATIONS,
    GROWTH,
    INITIAL,
    ITERATIONS,
    LINEAR,
    LOSS,
    LOSS_CHANGE,
    NOT_FINITE,
    PAIRS,
    PREDICTED,
    REASON,
    RUNNING,
    SCALE,
    SLOPE,
    STEP,
    TRIAL,
    Floats,
    Integers,
    SearchLimits,
    X,
    ends,
    find_moving,
    parts_of,
    within,
)
from warpfit_server.engine.native import numba_cache
from warpfit_server.engine.native.intrinsics import inlined

#: First damping, relative to the diagonal of the curvature.
_FIRST_DAMPING: Final = 0.1
#: Least factor by which an accepted step lowers the damping.
_FASTEST_DECREASE: Final = 0.1
#: Least damping. Without it hundreds of good steps make the damping 0, and 0 stays 0 however many
#: refused steps multiply it.
_LEAST_DAMPING: Final = 1e-18
#: Decay of an earlier scale with every step.
_SCALE_DECAY: Final = 0.9
#: Least share of a step's decrease that a correction of linear parameters must promise.
_WORTH_CORRECTING: Final = 0.1
#: Least decrease by a correction, relative to the loss.
_LEAST_CORRECTION: Final = 1e-10
#: Least share of the predicted decrease that must remain for a worse trial to be corrected.
_LEAST_GAIN: Final = 0.25
#: Relative increase of the curvature's diagonal, for parameters with the same effect.
_RIDGE: Final = 1e-14
#: Least relative part of a column outside the span of the linear parameters' columns.
_INDEPENDENT: Final = 1e-13
#: Attempts to make a system positive definite, or a trial a new one, by more damping. The factors
#: grow, so that a few of them lead from the least damping to more than the curvature.
_ATTEMPTS: Final = 100


class Workspace(NamedTuple):
    """Scratch memory for one search at a time; allocating it in `advance` costs a third more."""

    moving: NDArray[np.bool_]
    """Whether a parameter takes part in the step, [n]."""
    order: Integers
    """Indices of those that do, the linear ones first, [n]."""
    step: Floats
    """[n]."""
    best: Floats
    """Parameters, [n]."""
    unit: Floats
    """Square roots of the curvature's diagonal, [n]."""
    right: Floats
    """Right-hand side of the normal equations, then their solution, [n]."""
    system: Floats
    """Matrix of the normal equations, then its factor, [n (n + 1) / 2]."""
    cancelled: NDArray[np.uint8]
    """[1]; another thread writes another number than 0 to end what is being computed."""


def workspace(longest: int, cancelled: NDArray[np.uint8]) -> Workspace:
    """Allocate scratch memory for searches of at most ``longest`` parameters."""
    return Workspace(
        np.empty(longest, dtype=np.bool_),
        np.empty(longest, dtype=np.int64),
        np.empty(longest),
        np.empty(longest),
        np.empty(longest),
        np.empty(longest),
        np.empty(longest * (longest + 1) // 2),
        cancelled,
    )


# It allocates nothing, so that references need not be counted.
@numba_cache.njit(nogil=True, error_model="numpy", _nrt=False)  # type: ignore[untyped-decorator]
def advance(
    edges: Integers,
    vectors: Floats,
    numbers: Floats,
    counters: Integers,
    curvatures: Floats,
    new_sums: Floats,
    new_gradients: Floats,
    new_curvatures: Floats,
    limits: SearchLimits,
    space: Workspace,
) -> None:
    """Judge the evaluated trials of all searches, and propose the next ones; see `Searches`.

    Where ``space.cancelled`` ends this early, the best parameters so far are kept.

    Row TRIAL of ``vectors`` holds the evaluated trials, with their sums of squares [S], gradients
    [P] and J^T W J [T], and then the next ones.
    """
    for s in range(len(numbers)):
        if space.cancelled[0]:
            return
        if counters[s, REASON] != RUNNING:
            continue
        state = (edges, vectors, numbers, counters)
        vector, number, counter, gradient = parts_of(s, *state, new_gradients)
        begin, end = edges[s, PAIRS], edges[s + 1, PAIRS]
        old, new = curvatures[begin:end], new_curvatures[begin:end]
        usable = triangles.are_usable(new_sums[s], gradient, new)
        counter[EVALUATIONS] += 1
        if counter[EVALUATIONS] == 1:
            number[INITIAL] = new_sums[s]
            number[LOSS], number[DAMPING], number[GROWTH] = math.inf, _FIRST_DAMPING, 2.0
            if not usable:
                number[LOSS] = new_sums[s]
                counter[REASON] = NOT_FINITE
                continue
        if not counter[CORRECTING]:
            h = space.step[: vector.shape[1]]
            triangles.difference(vector[TRIAL], vector[X], h)
            # Twice the decreases of F, because the loss is twice F.
            number[PREDICTED] = -triangles.dot(vector[SLOPE], h) - triangles.quadratic(old, h)
            number[BEFORE] = number[LOSS]
        if usable and new_sums[s] < number[LOSS]:
            number[LOSS] = new_sums[s]
            _keep(vector, gradient, old, new)
        corrects, loss = usable and not counter[CORRECTING], new_sums[s]
        counter[CORRECTING] = 0
        if corrects and _correct(vector, number, counter, gradient, new, loss, limits, space):
            continue
        if number[BEFORE] < math.inf:
            _judge(number, counter, new_sums[s], usable, limits)
        if counter[REASON] == RUNNING:
            _propose(vector, number, counter, old, limits, space)


@inlined
def _keep(vector: Floats, gradient: Floats, curvature: Floats, new_curvature: Floats) -> None:
    """Let the trial be the best parameters so far."""
    triangles.copy(vector[TRIAL], vector[X])
    triangles.copy(gradient, vector[SLOPE])
    triangles.copy(new_curvature, curvature)


@inlined
def _correct(
    vector: Floats,
    number: Floats,
    counter: Integers,
    gradient: Floats,
    curvature: Floats,
    loss: float,
    limits: SearchLimits,
    space: Workspace,
) -> bool:
    """Make the best linear parameters the next trial; False if that promises too little."""
    n, some = vector.shape[1], False
    moving, best, h = space.moving[:n], space.best[:n], space.step[:n]
    find_moving(vector, TRIAL, gradient, moving)
    for i in range(n):
        moving[i] = moving[i] and vector[LINEAR, i] != 0.0
        some = some or moving[i]
    if counter[ITERATIONS] >= limits.iterations or not some:
        return False
    _step(curvature, gradient, vector, number, space)
    for i in range(n):
        trial = vector[TRIAL, i]
        best[i] = within(vector, i, trial + h[i], limits) if moving[i] else trial
    triangles.difference(best, vector[TRIAL], h)
    decrease = -triangles.dot(gradient, h) - triangles.quadratic(curvature, h)
    reached, before = loss - decrease, number[BEFORE]
    if not (decrease > _LEAST_CORRECTION * loss and reached < number[LOSS]):
        return False
    if before < math.inf:
        promises = loss < before or before - reached > _LEAST_GAIN * number[PREDICTED]
        if not (promises and decrease > _WORTH_CORRECTING * (before - reached)):
            return False
    triangles.copy(best, vector[TRIAL])
    counter[CORRECTING] = 1
    counter[ITERATIONS] += 1
    return True


@inlined
def _judge(
    number: Floats, counter: Integers, loss: float, usable: bool, limits: SearchLimits
) -> None:
    """Choose the next damping, and end the search if the loss has converged."""
    predicted, better = number[PREDICTED], number[LOSS] < number[BEFORE]
    actual = number[BEFORE] - (number[LOSS] if better else loss)
    if better:
        if predicted > 0.0:
            surprise = 2.0 * actual / predicted - 1.0
            factor = max(_FASTEST_DECREASE, 1.0 - surprise**3)
            number[DAMPING] = max(factor * number[DAMPING], _LEAST_DAMPING)
        number[GROWTH] = 2.0
    else:
        _damp(number)
    small = limits.loss * number[LOSS]
    if usable and max(abs(actual), abs(predicted)) <= small and actual <= 2.0 * predicted:
        counter[REASON] = LOSS_CHANGE


@inlined
def _damp(number: Floats) -> None:
    number[DAMPING] *= number[GROWTH]
    number[GROWTH] *= 2.0


@inlined
def _propose(
    vector: Floats,
    number: Floats,
    counter: Integers,
    curvature: Floats,
    limits: SearchLimits,
    space: Workspace,
) -> None:
    """Compute the next trial, or end the search."""
    n = vector.shape[1]
    moving, h = space.moving[:n], space.step[:n]
    find_moving(vector, X, vector[SLOPE], moving)
    steepest = _steepest(vector, curvature, moving, number[LOSS])
    if ends(counter, steepest, limits.gradient, limits):
        return
    for i in range(n):
        vector[SCALE, i] *= _SCALE_DECAY
    length, size, is_new = 0.0, 0.0, False
    for _ in range(_ATTEMPTS):
        _step(curvature, vector[SLOPE], vector, number, space)
        length, size, is_new = 0.0, 0.0, False
        for i in range(n):
            trial = within(vector, i, vector[X, i] + h[i], limits) if moving[i] else vector[X, i]
            is_new = is_new or trial != vector[TRIAL, i]
            vector[TRIAL, i] = trial
            diagonal = curvature[i * (i + 1) // 2 + i]
            length += diagonal * (trial - vector[X, i]) ** 2
            size += diagonal * vector[X, i] ** 2
        # Many good steps leave so little damping that twice as much gives the refused trial again.
        if space.cancelled[0] or is_new or not length > 0.0 or number[DAMPING] > 1.0:
            break
        _damp(number)
    if space.cancelled[0]:
        return
    # Written so that a step of NaN ends the search, too.
    if not (math.sqrt(length) > limits.step * math.sqrt(size) and is_new):
        counter[REASON] = STEP
        return
    counter[ITERATIONS] += 1


@inlined
def _steepest(vector: Floats, curvature: Floats, moving: Any, loss: float) -> float:
    """Return the greatest cosine between the residuals and a column of their Jacobian."""
    steepest = 0.0
    for i in range(len(moving)):
        diagonal = curvature[i * (i + 1) // 2 + i]
        if moving[i] and diagonal > 0.0 and loss > 0.0:
            cosine = 0.5 * abs(vector[SLOPE, i]) / math.sqrt(diagonal) / math.sqrt(loss)
            steepest = max(steepest, cosine)
    return steepest


@inlined
def _step(
    curvature: Floats, gradient: Floats, vector: Floats, number: Floats, space: Workspace
) -> None:
    """Solve the normal equations, in which only nonlinear parameters are damped.

    The step is 0 for parameters that do not move. Reads ``space.moving``, writes ``space.step``.
    """
    parameters = vector.shape[1]
    n, linear = _order(curvature, vector[LINEAR], space.moving[:parameters], space.order)
    order, unit, b = space.order[:n], space.unit[:n], space.right[:n]
    for i in range(n):
        place = order[i]
        unit[i] = math.sqrt(curvature[place * (place + 1) // 2 + place])
        b[i] = -0.5 * gradient[place] / unit[i]
    system = space.system[: n * (n + 1) // 2]
    ridge = _RIDGE
    for _ in range(_ATTEMPTS):
        if space.cancelled[0]:
            return
        _fill(system, curvature, order, unit, ridge)
        if not triangles.factorise(system, 0, linear, n, space.cancelled):
            ridge *= 10.0
            continue
        for i in range(linear, n):
            place, row = order[i], i * (i + 1) // 2
            own = max(system[row + i], _INDEPENDENT) * unit[i] * unit[i]
            vector[SCALE, place] = max(vector[SCALE, place], own)
            system[row + i] += number[DAMPING] * vector[SCALE, place] / unit[i] / unit[i]
        if triangles.factorise(system, linear, n, n, space.cancelled):
            break
        _damp(number)
    triangles.solve(system, b)
    for i in range(parameters):
        space.step[i] = 0.0
    for i in range(n):
        space.step[order[i]] = b[i] / unit[i]


@inlined
def _order(curvature: Floats, linear: Floats, moving: Any, order: Integers) -> Any:
    """Fill in the parameters that move and have a column, the linear ones first.

    Returns:
        How many they are, and how many of them are linear.
    """
    n = count = 0
    for nonlinear in (False, True):
        for i in range(len(moving)):
            takes_part = moving[i] and curvature[i * (i + 1) // 2 + i] > 0.0
            if takes_part and (linear[i] == 0.0) == nonlinear:
                order[n] = i
                n += 1
        if not nonlinear:
            count = n
    return n, count


@inlined
def _fill(system: Floats, curvature: Floats, order: Integers, unit: Floats, ridge: float) -> None:
    """Copy the rows and columns in ``order``, scaled to a unit diagonal, with a ridge."""
    for i in range(len(order)):
        row = i * (i + 1) // 2
        for j in range(i + 1):
            high, low = max(order[i], order[j]), min(order[i], order[j])
            system[row + j] = curvature[high * (high + 1) // 2 + low] / unit[i] / unit[j]
        system[row + i] += ridge
