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

The scale is the greatest of all points (Moré, Lecture Notes in Mathematics 630, 1978).

Loss, gradient and curvature at x + h come from one pass, so that an accepted step needs no second
one. Steps minimise the damped model inside the bounds (`_solve`); the decrease is predicted for the
step as rounded. Every test compares numbers of the same unit, so that the units of data and
parameters do not matter.

A test of convergence that fires is believed only where an undamped step inside the bounds promises
to turn the residuals by no more than `SearchLimits.flat`, or than rounding errors explain. Else the
search goes on with the damping forgotten, and if it gets no further it has stalled.

Normal equations square the condition of J. Where they are ill-conditioned and a search is slow, or
a test has fired, it asks for the orthogonal factor of J (`orthogonal`), which its steps come from
until it ends. Where parameters have the same effect the factor is no better, and is not asked for
at every step. Columns of float32 differ by rounding errors that the curvature resolves, so that a
factor would tell no more of them.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit_server.engine.fit import triangles
from warpfit_server.engine.fit.searches import (
    ASKED,
    BEFORE,
    CORRECTING,
    DAMPING,
    EVALUATIONS,
    FACTOR,
    FIRED,
    FREE,
    GRADIENT,
    GROWTH,
    INITIAL,
    ITERATIONS,
    ITERATIONS_USED,
    LINEAR,
    LOSS,
    LOSS_CHANGE,
    LOWER,
    NO_FACTOR,
    NOT_FINITE,
    PAIRS,
    PREDICTED,
    READY,
    REASON,
    REFUSED,
    RESTARTED,
    RIGHT,
    RUNNING,
    SCALE,
    SLOPE,
    SQUARES,
    STALLED,
    STEP,
    TRIAL,
    UPPER,
    USELESS,
    WANTED,
    Floats,
    Integers,
    SearchLimits,
    X,
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
#: Least share of a step's decrease that a correction of linear parameters must promise.
_WORTH_CORRECTING: Final = 0.1
#: Least decrease by a correction, relative to the loss.
_LEAST_CORRECTION: Final = 1e-10
#: Least share of the predicted decrease that must remain for a worse trial to be corrected, and
#: that a step must reach if the curvature's rounding errors are not to be suspected.
_LEAST_GAIN: Final = 0.25
#: Relative increase of the curvature's diagonal, for parameters with the same effect, above the
#: rounding errors of the sums, which would else make long steps of no direction; in a test
#: whether columns of float32, whose own rounding errors differ, can lower the loss; and with the
#: orthogonal factor, whose columns are rounded to float64: usually, and so much that only what is
#: well above these rounding errors counts.
_RIDGE: Final = 1e-13
_RIDGE_IN_FLOAT32: Final = 1e-11
_RIDGE_OF_FACTOR: Final = 1e-30
_RIDGE_ABOVE_NOISE: Final = 1e-18
#: Squared sine of the angle between a column and those before it, below which the curvature holds
#: too few digits of it.
_ILL_CONDITIONED: Final = 1e-11
#: Part of a column outside the span of others that may be no more than rounding errors: some units
#: in the last place.
_ROUNDING_OF_COLUMN: Final = 2.0**-48
#: Least relative part of a column outside the span of the linear parameters' columns.
_INDEPENDENT: Final = 1e-13
#: Least cosine between residuals and a column for which a parameter leaves its bound.
_LEAST_RELEASE: Final = 1e-13
#: Steps refused in a row after which linear parameters are damped, too.
_PATIENCE: Final = 12
#: Iterations after which a search with an ill-conditioned curvature tries the factor.
_MANY_ITERATIONS: Final = 2
#: Least share of the decrease by the factor's step with which that of the curvature is as good.
_HARDLY_WORSE: Final = 0.9
#: Most of the target's variation that rounding errors of the parameters may hide.
_HIDDEN: Final = 1e-2
#: Roundings of residuals that are no more than noise.
_ROUNDINGS: Final = 64.0
#: Roundings of each parameter that values inherit.
_PARAMETER_ROUNDINGS: Final = 8.0
#: Attempts to make a system positive definite, or a trial a new one, by more damping. The factors
#: grow, so that a few of them lead from the least damping to more than the curvature.
_ATTEMPTS: Final = 100

# What a parameter does in a step.
_STAYS: Final = 0  # fixed, or without effect
_MOVES: Final = 1
_AT_LOWER: Final = 2
_AT_UPPER: Final = 3


class Workspace(NamedTuple):
    """Scratch memory for one search at a time; allocating it in `advance` costs a third more."""

    role: Integers
    """Role of each parameter in a step, [n]: it stays, moves, or is at a bound."""
    order: Integers
    """Indices of those that move, the linear ones first, [n]."""
    step: Floats
    """[n]."""
    target: Floats
    """Step that minimises the model where the bounds are ignored, [n]."""
    best: Floats
    """Parameters, [n]."""
    unit: Floats
    """Square roots of the curvature's diagonal, [n]."""
    right: Floats
    """Right-hand side of the normal equations, then their solution, [n]."""
    system: Floats
    """Matrix of the normal equations, then its factor, [n (n + 1) / 2]."""
    columns: Floats
    """Columns of the orthogonal factor with rows of damping, and the right-hand side,
    [(n + 1) 2 n]."""
    cancelled: NDArray[np.uint8]
    """[1]; another thread writes another number than 0 to end what is being computed."""


def workspace(longest: int, cancelled: NDArray[np.uint8]) -> Workspace:
    """Allocate scratch memory for searches of at most ``longest`` parameters."""
    return Workspace(
        np.empty(longest, dtype=np.int64),
        np.empty(longest, dtype=np.int64),
        np.empty(longest),
        np.empty(longest),
        np.empty(longest),
        np.empty(longest),
        np.empty(longest),
        np.empty(longest * (longest + 1) // 2),
        np.empty(2 * longest * (longest + 1)),
        cancelled,
    )


class Model(NamedTuple):
    """The sum of squares near one point, as a function of the step; in compiled code."""

    point: int
    """Row of the vectors with the parameters."""
    gradient: Any
    """[n]."""
    curvature: Any
    """J^T W J, [n (n + 1) / 2]."""
    factor: Any
    """R of the orthogonal factorisation of W^1/2 J, [n n] row by row, if ``factored``."""
    factored: bool


# It allocates nothing, so that references need not be counted.
@numba_cache.njit(nogil=True, error_model="numpy", _nrt=False)  # type: ignore[untyped-decorator]
def advance(
    edges: Integers,
    vectors: Floats,
    numbers: Floats,
    counters: Integers,
    curvatures: Floats,
    factors: Floats,
    new_sums: Floats,
    new_gradients: Floats,
    new_curvatures: Floats,
    resumes: bool,
    limits: SearchLimits,
    space: Workspace,
) -> None:
    """Judge the evaluated trials of all searches, and propose the next ones; see `Searches`.

    Where ``space.cancelled`` ends this early, the best parameters so far are kept.

    Row TRIAL of ``vectors`` holds the evaluated trials, with their sums of squares [S], gradients
    [P] and J^T W J [T], and then the next ones. Searches that want an orthogonal factor propose
    nothing; once they have one, a call that ``resumes`` makes them go on, and no other ones.
    """
    for s in range(len(numbers)):
        if space.cancelled[0]:
            return
        if counters[s, REASON] != RUNNING or (counters[s, FACTOR] == WANTED) != resumes:
            continue
        state = (edges, vectors, numbers, counters)
        vector, number, counter, gradient = parts_of(s, *state, new_gradients)
        begin, end = edges[s, PAIRS], edges[s + 1, PAIRS]
        old, new = curvatures[begin:end], new_curvatures[begin:end]
        factor = factors[edges[s, SQUARES] : edges[s + 1, SQUARES]]
        if resumes:
            counter[FACTOR] = READY
            flat = counter[FIRED] == LOSS_CHANGE
            if counter[FIRED] == RUNNING and counter[ASKED] == 0:
                _compare(vector, number, counter, old, factor, space)
            counter[ASKED] = 1
            counter[FIRED] = RUNNING
            _propose(vector, number, counter, old, factor, flat, False, limits, space)
            continue
        usable = triangles.are_usable(new_sums[s], gradient, new)
        counter[EVALUATIONS] += 1
        if counter[EVALUATIONS] == 1:
            number[INITIAL] = new_sums[s]
            number[LOSS], number[RESTARTED] = math.inf, math.inf
            number[DAMPING], number[GROWTH] = _FIRST_DAMPING, 2.0
            if not usable:
                number[LOSS] = new_sums[s]
                counter[REASON] = NOT_FINITE
                continue
        if not counter[CORRECTING]:
            number[BEFORE] = number[LOSS]
        if usable and new_sums[s] < number[LOSS]:
            number[LOSS] = new_sums[s]
            triangles.copy(vector[TRIAL], vector[X])
            triangles.copy(gradient, vector[SLOPE])
            triangles.copy(new, old)
            if counter[FACTOR] == READY:
                counter[FACTOR] = WANTED
        corrects = usable and not counter[CORRECTING] and counter[FACTOR] != WANTED
        corrects = corrects and counter[FACTOR] != READY
        loss = new_sums[s]
        counter[CORRECTING] = 0
        if corrects and _correct(vector, number, counter, gradient, new, loss, limits, space):
            continue
        flat = disappoints = False
        if number[BEFORE] < math.inf:
            flat, disappoints = _judge(number, counter, new_sums[s], usable, limits)
        if counter[FACTOR] == WANTED:
            counter[FIRED] = LOSS_CHANGE if flat else RUNNING
        else:
            _propose(vector, number, counter, old, factor, flat, disappoints, limits, space)


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
    best, h = space.best[:n], space.step[:n]
    model = Model(TRIAL, gradient, curvature, space.columns, False)
    _find_roles(vector, model, space)
    for i in range(n):
        if vector[LINEAR, i] == 0.0:
            space.role[i] = _STAYS
        some = some or space.role[i] == _MOVES
    if counter[ITERATIONS] >= limits.iterations or not some:
        return False
    _solve(vector, number, counter, model, number[DAMPING], _RIDGE, space)
    for i in range(n):
        trial = vector[TRIAL, i]
        best[i] = within(vector, i, trial + h[i], limits) if space.role[i] != _STAYS else trial
    triangles.difference(best, vector[TRIAL], h)
    decrease = _decrease(vector, model, h)
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
) -> Any:
    """Choose the next damping.

    Returns:
        Whether the loss has converged, and whether the step was much worse than predicted.
    """
    predicted, better = number[PREDICTED], number[LOSS] < number[BEFORE]
    actual = number[BEFORE] - (number[LOSS] if better else loss)
    if better:
        if predicted > 0.0:
            surprise = 2.0 * actual / predicted - 1.0
            factor = max(_FASTEST_DECREASE, 1.0 - surprise**3)
            number[DAMPING] = max(factor * number[DAMPING], _LEAST_DAMPING)
        number[GROWTH] = 2.0
        counter[REFUSED] = 0
    else:
        _damp(number)
        counter[REFUSED] += 1
    small = limits.loss * number[LOSS]
    flat = usable and max(abs(actual), abs(predicted)) <= small and actual <= 2.0 * predicted
    return flat, not better or actual < _LEAST_GAIN * predicted


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
    factor: Floats,
    flat: bool,
    disappoints: bool,
    limits: SearchLimits,
    space: Workspace,
) -> None:
    """Compute the next trial, or end the search, or ask for the orthogonal factor.

    A test of convergence that fires is believed where all columns together promise little, too.
    """
    n = vector.shape[1]
    h = space.step[:n]
    model = Model(X, vector[SLOPE], curvature, factor, counter[FACTOR] == READY)
    ridge = _RIDGE_OF_FACTOR if model.factored else _RIDGE
    _find_roles(vector, model, space)
    if _is_exact(vector, number, model, limits):
        counter[REASON] = LOSS_CHANGE
        return
    reason = RUNNING
    if _steepest(vector, model, number[LOSS], space) <= limits.gradient:
        reason = GRADIENT
    elif flat:
        reason = LOSS_CHANGE
    for attempt in range(3):
        if reason != RUNNING:
            believed, pivot = _is_minimum(
                vector, number, counter, model, ridge, False, limits, space
            )
            if space.cancelled[0]:
                return
            doubtful = pivot < _ILL_CONDITIONED and not model.factored and not limits.single
            if believed and not doubtful:
                counter[REASON] = reason
                return
            if counter[ITERATIONS] >= limits.iterations:
                break
            if doubtful:
                counter[FACTOR], counter[FIRED] = WANTED, reason
                return
            if reason != GRADIENT or attempt > 0:
                least = number[RESTARTED] * (1.0 - limits.flat * limits.flat)
                if attempt > 1 or not number[LOSS] < least:
                    # What remains may be no more than the rounding errors of the columns.
                    rest = _RIDGE_ABOVE_NOISE if model.factored else ridge
                    believed, pivot = _is_minimum(
                        vector, number, counter, model, rest, True, limits, space
                    )
                    counter[REASON] = reason if believed else STALLED
                    return
                number[RESTARTED] = number[LOSS]
                number[DAMPING] = min(number[DAMPING], _FIRST_DAMPING)
                number[GROWTH], counter[REFUSED] = 2.0, 0
                triangles.copy(vector[X], vector[TRIAL])  # what no later trial may equal
                for i in range(n):
                    vector[SCALE, i] = 0.0
        if counter[ITERATIONS] >= limits.iterations:
            break
        length, size, is_new, pivot = 0.0, 0.0, False, 1.0
        for _ in range(_ATTEMPTS):
            _find_roles(vector, model, space)
            pivot = _solve(vector, number, counter, model, number[DAMPING], ridge, space)
            length, size, is_new = 0.0, 0.0, False
            for i in range(n):
                trial = vector[X, i]
                if space.role[i] != _STAYS:
                    trial = within(vector, i, trial + h[i], limits)
                    diagonal = curvature[i * (i + 1) // 2 + i]
                    length += diagonal * (trial - vector[X, i]) ** 2
                    size += diagonal * vector[X, i] ** 2
                is_new = is_new or trial != vector[TRIAL, i]
                vector[TRIAL, i] = trial
            # Many good steps leave so little damping that twice as much gives the refused trial
            # again.
            if space.cancelled[0] or is_new or not length > 0.0 or number[DAMPING] > 1.0:
                break
            _damp(number)
        if space.cancelled[0]:
            return
        # A short step is taken where its test is not believed. Written so that one of NaN is none.
        if is_new and (math.sqrt(length) > limits.step * math.sqrt(size) or attempt > 0):
            slow = disappoints or counter[ITERATIONS] >= _MANY_ITERATIONS
            doubtful = pivot < _ILL_CONDITIONED and counter[FACTOR] == NO_FACTOR
            if slow and doubtful and not limits.single:
                counter[FACTOR] = WANTED
                return
            triangles.difference(vector[TRIAL], vector[X], h)
            number[PREDICTED] = _decrease(vector, model, h)
            counter[ITERATIONS] += 1
            return
        reason = STEP
    counter[REASON] = ITERATIONS_USED


@inlined
def _compare(
    vector: Floats,
    number: Floats,
    counter: Integers,
    curvature: Floats,
    factor: Floats,
    space: Workspace,
) -> None:
    """Go back to the curvature if its step is hardly worse than that of the factor.

    So it is where parameters have exactly the same effect.
    """
    h = space.step[: vector.shape[1]]
    model = Model(X, vector[SLOPE], curvature, factor, True)
    plain = Model(X, vector[SLOPE], curvature, factor, False)
    _find_roles(vector, model, space)
    _solve(vector, number, counter, plain, number[DAMPING], _RIDGE, space)
    own = _decrease(vector, model, h)
    _find_roles(vector, model, space)
    _solve(vector, number, counter, model, number[DAMPING], _RIDGE_OF_FACTOR, space)
    if own >= _HARDLY_WORSE * _decrease(vector, model, h):
        counter[FACTOR] = USELESS


@inlined
def _find_roles(vector: Floats, model: Model, space: Workspace) -> None:
    """Find what each parameter does at the beginning of a step."""
    for i in range(vector.shape[1]):
        x, slope = vector[model.point, i], model.gradient[i]
        moves = vector[FREE, i] != 0.0 and model.curvature[i * (i + 1) // 2 + i] > 0.0
        space.role[i] = _STAYS
        if moves and vector[LOWER, i] < vector[UPPER, i]:
            space.role[i] = _MOVES
            if x <= vector[LOWER, i] and slope > 0.0:
                space.role[i] = _AT_LOWER
            elif x >= vector[UPPER, i] and slope < 0.0:
                space.role[i] = _AT_UPPER


@inlined
def _steepest(vector: Floats, model: Model, loss: float, space: Workspace) -> float:
    """Return the greatest cosine between the residuals and the column of a parameter that moves."""
    steepest = 0.0
    for i in range(vector.shape[1]):
        if space.role[i] == _MOVES and loss > 0.0:
            diagonal = model.curvature[i * (i + 1) // 2 + i]
            cosine = 0.5 * abs(model.gradient[i]) / math.sqrt(diagonal) / math.sqrt(loss)
            steepest = max(steepest, cosine)
    return steepest


@inlined
def _is_exact(vector: Floats, number: Floats, model: Model, limits: SearchLimits) -> bool:
    """Whether the residuals are no more than rounding errors of the target.

    If that is 0, they are compared with the parameters' contributions to the values, and with the
    residuals at the start.
    """
    epsilon = 2.0**-24 if limits.single else 2.0**-53
    scale = limits.target
    if not scale > 0.0:
        for i in range(vector.shape[1]):
            scale += model.curvature[i * (i + 1) // 2 + i] * vector[model.point, i] ** 2
        scale = min(scale, number[INITIAL])
    return bool(number[LOSS] <= (_ROUNDINGS * epsilon) ** 2 * scale)


@inlined
def _is_minimum(
    vector: Floats,
    number: Floats,
    counter: Integers,
    model: Model,
    ridge: float,
    is_stuck: bool,
    limits: SearchLimits,
    space: Workspace,
) -> Any:
    """Whether no step inside the bounds promises to turn the residuals, and the least pivot.

    The sine of the angle by which they turn is at most that of `SearchLimits.flat`, or what the
    rounding errors of values and parameters explain. Where the search ``is_stuck``, a decrease
    that is lost in the rounding errors of the loss is none, either.
    """
    n = vector.shape[1]
    _find_roles(vector, model, space)
    if limits.single:
        ridge = max(ridge, _RIDGE_IN_FLOAT32)
    pivot = _solve(vector, number, counter, model, 0.0, ridge, space)
    noise = 0.0
    for i in range(n):
        if space.role[i] != _STAYS:
            noise += model.curvature[i * (i + 1) // 2 + i] * vector[X, i] ** 2
    rounding = 2.0**-24 if limits.single else 2.0**-53
    epsilon = _ROUNDINGS * rounding
    noise *= (_PARAMETER_ROUNDINGS * rounding) ** 2
    if noise > _HIDDEN * limits.variation:
        noise = 0.0
    noise += epsilon * epsilon * limits.target
    allowed = max(limits.flat * limits.flat * number[LOSS], noise)
    if is_stuck:
        allowed = max(allowed, 2.0 * rounding * math.sqrt(number[LOSS] * limits.target))
    return bool(_decrease(vector, model, space.step[:n]) <= allowed), pivot


@inlined
def _decrease(vector: Floats, model: Model, h: Floats) -> float:
    """Return the decrease of the loss that the model predicts."""
    n = len(h)
    if not model.factored:
        # The loss is twice the F of the module's docstring.
        return -triangles.dot(model.gradient, h) - triangles.quadratic(model.curvature, h)
    decrease = 0.0
    for i in range(n):
        turned = 0.0
        for j in range(i, n):
            turned += model.factor[i * n + j] * h[j]
        decrease -= turned * (2.0 * vector[RIGHT, i] + turned)
    return decrease


@inlined
def _solve(
    vector: Floats,
    number: Floats,
    counter: Integers,
    model: Model,
    damping: float,
    ridge: float,
    space: Workspace,
) -> float:
    """Minimise the damped model inside the bounds, from the roles in ``space.role``.

    An active set method for convex quadratic functions (Nocedal and Wright, "Numerical
    Optimization", 2nd edition, 2006, section 16.5): where the minimum over the moving parameters is
    outside the bounds, the step goes up to the first bound and that parameter stops; where it is
    inside, the parameter that pulls most from its bound moves again.

    Returns:
        The least pivot of the systems, relative to the diagonal.
    """
    n, least = vector.shape[1], 1.0
    h, target, role = space.step[:n], space.target[:n], space.role[:n]
    for i in range(n):
        h[i] = 0.0
    for _ in range(4 * n + 4):
        if space.cancelled[0]:
            break
        order = _order(vector[LINEAR], role, space.order)
        if model.factored:
            _minimise_by_factor(vector, counter, model, order, damping, ridge, space)
        else:
            pivot = _minimise(vector, number, counter, model, order, damping, ridge, space)
            least = min(least, pivot)
        share, stopped, at = 1.0, -1, _AT_LOWER
        for i in range(n):
            if role[i] == _MOVES:
                x = vector[model.point, i]
                lowest, highest = vector[LOWER, i] - x, vector[UPPER, i] - x
                if target[i] < lowest and (lowest - h[i]) / (target[i] - h[i]) < share:
                    share, stopped, at = (lowest - h[i]) / (target[i] - h[i]), i, _AT_LOWER
                elif target[i] > highest and (highest - h[i]) / (target[i] - h[i]) < share:
                    share, stopped, at = (highest - h[i]) / (target[i] - h[i]), i, _AT_UPPER
        for i in range(n):
            if role[i] == _MOVES:
                h[i] = h[i] + share * (target[i] - h[i]) if stopped >= 0 else target[i]
        if stopped >= 0:
            bound = vector[LOWER, stopped] if at == _AT_LOWER else vector[UPPER, stopped]
            h[stopped] = bound - vector[model.point, stopped]
            role[stopped] = at
            continue
        strongest, released = _LEAST_RELEASE, -1
        for i in range(n):
            if role[i] == _AT_LOWER or role[i] == _AT_UPPER:
                slope = _slope(vector, model, h, i)
                if vector[LINEAR, i] == 0.0:
                    slope += damping * vector[SCALE, i] * h[i]
                pull = -slope if role[i] == _AT_LOWER else slope
                pull /= math.sqrt(model.curvature[i * (i + 1) // 2 + i] * number[LOSS])
                if pull > strongest:
                    strongest, released = pull, i
        if released < 0:
            break
        role[released] = _MOVES
    return least


@inlined
def _slope(vector: Floats, model: Model, h: Floats, i: int) -> float:
    """Return half the derivative of the model by parameter ``i`` after a step."""
    n = len(h)
    slope: float = 0.0
    if model.factored:
        for row in range(i + 1):
            residual = vector[RIGHT, row]
            for j in range(row, n):
                residual += model.factor[row * n + j] * h[j]
            slope += model.factor[row * n + i] * residual
        return slope
    for j in range(n):
        slope += triangles.element(model.curvature, i, j) * h[j]
    return slope + float(0.5 * model.gradient[i])


@inlined
def _minimise(
    vector: Floats,
    number: Floats,
    counter: Integers,
    model: Model,
    moving: Any,
    damping: float,
    ridge: float,
    space: Workspace,
) -> float:
    """Minimise over the moving parameters by the normal equations; return the least pivot.

    Reads ``space.step`` of the others, writes ``space.target``. Damps the nonlinear parameters,
    and the linear ones after refused steps that this could not mend.
    """
    parameters = vector.shape[1]
    n, linear = moving
    order, unit, b = space.order[:n], space.unit[:n], space.right[:n]
    h, role, curvature = space.step[:parameters], space.role[:parameters], model.curvature
    for i in range(n):
        place = order[i]
        unit[i] = math.sqrt(curvature[place * (place + 1) // 2 + place])
        b[i] = -0.5 * model.gradient[place]
        for j in range(parameters):
            if role[j] != _MOVES and h[j] != 0.0:
                b[i] -= triangles.element(curvature, place, j) * h[j]
        b[i] /= unit[i]
    system = space.system[: n * (n + 1) // 2]
    damps = _damps_linear(counter, n, linear)
    for _ in range(_ATTEMPTS):
        if space.cancelled[0]:
            return 1.0
        for i in range(n):
            row = i * (i + 1) // 2
            for j in range(i + 1):
                element = triangles.element(curvature, order[i], order[j])
                system[row + j] = element / unit[i] / unit[j]
            system[row + i] += ridge
            if i < linear and damps:
                system[row + i] += damping
        if not triangles.factorise(system, 0, linear, n, space.cancelled):
            ridge *= 10.0
            continue
        for i in range(linear, n):
            place, row = order[i], i * (i + 1) // 2
            own = max(system[row + i], _INDEPENDENT) * unit[i] * unit[i]
            if damping > 0.0:
                vector[SCALE, place] = max(vector[SCALE, place], own)
            system[row + i] += damping * vector[SCALE, place] / unit[i] / unit[i]
        if triangles.factorise(system, linear, n, n, space.cancelled):
            break
        if damping > 0.0:
            _damp(number)
            damping = number[DAMPING]
        else:
            ridge *= 10.0
    triangles.solve(system, b)
    least = 1.0
    for i in range(n):
        space.target[order[i]] = b[i] / unit[i]
        least = min(least, system[i * (i + 1) // 2 + i] ** 2)
    return least


@inlined
def _minimise_by_factor(
    vector: Floats,
    counter: Integers,
    model: Model,
    moving: Any,
    damping: float,
    ridge: float,
    space: Workspace,
) -> None:
    """Do what `_minimise` does by Householder's reflections of the factor and the damping.

    The columns' condition is not squared. Each moving parameter has a row of its own for damping
    and ridge, below the factor. A parameter whose column lies in the span of those before it, up to
    rounding errors, stays where it is: its step would be a quotient of rounding errors. A linear
    one that is not damped goes to 0, so that the values are not the differences of huge terms.
    """
    parameters = vector.shape[1]
    n, linear = moving
    order, unit, columns = space.order[:n], space.unit[:n], space.columns
    h, role, factor = space.step[:parameters], space.role[:parameters], model.factor
    rows = parameters + n
    damps = _damps_linear(counter, n, linear)
    for j in range(n + 1):
        for row in range(rows):
            columns[j * rows + row] = 0.0
    for j in range(n):
        place = order[j]
        unit[j] = math.sqrt(model.curvature[place * (place + 1) // 2 + place])
        for row in range(place + 1):
            columns[j * rows + row] = factor[row * parameters + place] / unit[j]
        columns[j * rows + parameters + j] = math.sqrt(ridge)
    for row in range(parameters):
        right = -vector[RIGHT, row]
        for j in range(row, parameters):
            if role[j] != _MOVES:
                right -= factor[row * parameters + j] * h[j]
        columns[n * rows + row] = right
    for j in range(linear):
        # Where the columns leave a linear parameter open, it goes towards 0, so that the values
        # are not the differences of huge terms.
        # A damped one stays where it is, and a test (no damping) asks what the residuals alone say.
        at = unit[j] * vector[model.point, order[j]]
        own = damping if damps else 0.0
        columns[j * rows + parameters + j] = math.sqrt(ridge + own)
        if damping > 0.0:
            columns[n * rows + parameters + j] = -ridge / math.sqrt(ridge + own) * at
    for j in range(n):
        if j == linear and damping > 0.0:
            for i in range(linear, n):
                own, place = _INDEPENDENT, order[i]
                for row in range(linear, rows):
                    own += columns[i * rows + row] ** 2
                own *= unit[i] * unit[i]
                vector[SCALE, place] = max(vector[SCALE, place], own)
                damped = damping * vector[SCALE, place] / unit[i] / unit[i]
                columns[i * rows + parameters + i] = math.sqrt(ridge + damped)
        outside = 0.0
        for row in range(j, rows):
            outside += columns[j * rows + row] ** 2
        if outside < _ROUNDING_OF_COLUMN * _ROUNDING_OF_COLUMN:
            for row in range(j, rows):
                columns[j * rows + row] = 0.0
            columns[j * rows + parameters + j], columns[n * rows + parameters + j] = 1.0, 0.0
            if j < linear and damping > 0.0 and not damps:
                columns[n * rows + parameters + j] = -unit[j] * vector[model.point, order[j]]
        triangles.reflect(columns, rows, j, n + 1)
    for reverse in range(n):
        i = n - 1 - reverse
        rest = columns[n * rows + i]
        for j in range(i + 1, n):
            rest -= columns[j * rows + i] * columns[n * rows + j]
        columns[n * rows + i] = rest / columns[i * rows + i]
    for i in range(n):
        space.target[order[i]] = columns[n * rows + i] / unit[i]


@inlined
def _damps_linear(counter: Integers, n: int, linear: int) -> bool:
    """Whether steps were refused that less nonlinear movement cannot make better."""
    return bool(counter[REFUSED] > (0 if linear == n else _PATIENCE))


@inlined
def _order(linear: Floats, role: Integers, order: Integers) -> Any:
    """Fill in the parameters that move, the linear ones first.

    Returns:
        How many they are, and how many of them are linear.
    """
    n = count = 0
    for nonlinear in (False, True):
        for i in range(len(role)):
            if role[i] == _MOVES and (linear[i] == 0.0) == nonlinear:
                order[n] = i
                n += 1
        if not nonlinear:
            count = n
    return n, count
