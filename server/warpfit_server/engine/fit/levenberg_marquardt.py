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

Parameters c that the program is linear in (`mark_linear`) are not damped, and the scale of the
others is the diagonal of the Schur complement of c in A: a step equals that of variable projection
with Kaufman's Jacobian (Golub and Pereyra, SIAM J. Numer. Anal. 10, 1973; Kaufman, BIT 15,
1975). At any evaluated point the best c and the loss there are known exactly. So a trial is judged
by that loss, and where it is much better than the trial's own, the next pass evaluates the point
with the best c. Starts are corrected like this, too. Where the residuals at a start are so huge
that their rounding errors hide the target, c is 0 first: a polynomial far from 0 has residuals of
1e36, from which no step finds those of 1e-2 if its columns are nearly parallel.

The scale is the greatest of all points (Moré, Lecture Notes in Mathematics 630, 1978).

Loss, gradient and curvature at x + h come from one pass, so that an accepted step needs no second
one. Steps minimise the damped model inside the bounds (`linear_model`); the decrease is predicted
for the step as rounded. Every test compares numbers of the same unit, so that the units of data and
parameters do not matter.

A test of convergence that fires is believed only where `linear_model.is_minimum` holds. Else the
search goes on with no more than the first damping and a new scale. If it gets no further, the steps
that were refused since then say whether the loss has a minimum there; else the search has stalled.
Where that would leave it at a saddle or on a plateau, it is perturbed first (`starts`).

Normal equations square the condition of J. Where they are ill-conditioned and a search is slow, or
a test has fired, it asks for the orthogonal factor of J (`reflect`), which its steps come from
until it ends. Where parameters have the same effect the factor is no better, and is not asked for
at every step. Columns of float32 differ by rounding errors that the curvature resolves, so that a
factor would tell no more of them.
"""

from __future__ import annotations

import math
from typing import Any, Final

from warpfit_server.engine.fit import linear_model
from warpfit_server.engine.fit.linear_model import (
    ILL_CONDITIONED,
    MOVES,
    RIDGE,
    RIDGE_OF_FACTOR,
    STAYS,
    Model,
    Workspace,
    are_usable,
    damp,
    find_roles,
    is_exact,
    is_minimum,
    promised_decrease,
    solve_step,
    steepest_cosine,
)
from warpfit_server.engine.fit.searches import (
    ASKED,
    BEFORE,
    CORRECTING,
    DAMPING,
    EVALUATIONS,
    FACTOR,
    FIRED,
    GRADIENT,
    GROWTH,
    INITIAL,
    ITERATIONS,
    ITERATIONS_USED,
    LINEAR,
    LOSS,
    LOSS_CHANGE,
    NO_FACTOR,
    NO_PLATEAU,
    NOT_FINITE,
    PAIRS,
    PLATEAU,
    PREDICTED,
    PROBING,
    PROMISE,
    READY,
    REASON,
    REFUSED,
    RESTARTED,
    RUNNING,
    SCALE,
    SEEN,
    SLOPE,
    SQUARES,
    STALLED,
    STEP,
    TRIAL,
    USELESS,
    WANTED,
    Floats,
    Integers,
    SearchLimits,
    X,
    parts_of,
    within,
)
from warpfit_server.engine.fit.starts import begin_probe, leads_on, nudge
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
#: Squares of residuals at a start, relative to those of the target, which is too far away.
_FAR: Final = 1e12
#: Values of the counter CORRECTING: the trial is that with the best linear parameters, or with 0.
_BEST_LINEAR: Final = 1
_NO_LINEAR: Final = 2
#: Least share of the predicted decrease that must remain for a worse trial to be corrected, and
#: that a step must reach if the curvature's rounding errors are not to be suspected.
_LEAST_GAIN: Final = 0.25
#: Iterations after which a search with an ill-conditioned curvature tries the factor.
_MANY_ITERATIONS: Final = 2
#: Least share of the decrease by the factor's step with which that of the curvature is as good.
_HARDLY_WORSE: Final = 0.9
#: Attempts to make a trial a new one by more damping. The factors grow, so that a few of them lead
#: from the least damping to more than the curvature.
_ATTEMPTS: Final = 100


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
        if resumes:  # it has got an orthogonal factor
            counter[FACTOR] = READY
            flat = counter[FIRED] == LOSS_CHANGE
            if counter[FIRED] == RUNNING and counter[ASKED] == 0:
                _compare(vector, number, counter, old, factor, space)
            counter[ASKED], counter[FIRED] = 1, RUNNING
            _propose(vector, number, counter, old, factor, flat, False, limits, space)
            _probe(vector, number, counter, old, factor, limits)
        else:
            advance_one(
                vector, number, counter, gradient, new, old, factor, new_sums[s], limits, space
            )


@inlined
def advance_one(
    vector: Floats,
    number: Floats,
    counter: Integers,
    gradient: Floats,
    new: Floats,
    old: Floats,
    factor: Floats,
    loss: float,
    limits: SearchLimits,
    space: Workspace,
) -> None:
    """Judge the evaluated trial of one search, and propose the next one, or end the search.

    ``gradient``, ``new`` and ``loss`` are those of the trial, ``old`` is the curvature at X.
    """
    flat = disappoints = False
    usable = are_usable(vector, TRIAL, loss, abs(loss), gradient, new)
    counter[EVALUATIONS] += 1
    if counter[EVALUATIONS] == 1:
        number[INITIAL] = loss
        _forget(vector, number, counter)
    if number[LOSS] == math.inf and not usable:
        if not (math.isfinite(number[INITIAL]) and nudge(vector, counter, limits)):
            number[LOSS] = number[INITIAL]
            counter[REASON] = NOT_FINITE
        return
    if counter[PROBING]:
        if leads_on(vector, number, counter, gradient, new, loss, loss, loss, limits, space):
            _forget(vector, number, counter)
        elif counter[PROBING]:
            return
        else:
            counter[REASON], counter[FIRED] = counter[FIRED], RUNNING
            _probe(vector, number, counter, old, factor, limits)
            return
    if not counter[CORRECTING]:
        number[BEFORE] = number[LOSS]
    if usable and loss < number[LOSS]:
        number[LOSS] = loss
        linear_model.copy(vector[TRIAL], vector[X])
        linear_model.copy(gradient, vector[SLOPE])
        linear_model.copy(new, old)
        if counter[FACTOR] == READY:
            counter[FACTOR] = WANTED
    corrects = usable and counter[CORRECTING] != _BEST_LINEAR
    corrects = corrects and counter[FACTOR] != WANTED and counter[FACTOR] != READY
    counter[CORRECTING] = 0
    if corrects and _correct(vector, number, counter, gradient, new, loss, limits, space):
        return
    if number[BEFORE] < math.inf:
        flat, disappoints = _judge(vector, number, counter, loss, usable, limits)
    if counter[FACTOR] == WANTED:
        counter[FIRED] = LOSS_CHANGE if flat else RUNNING
        return
    _propose(vector, number, counter, old, factor, flat, disappoints, limits, space)
    _probe(vector, number, counter, old, factor, limits)


@inlined
def _forget(vector: Floats, number: Floats, counter: Integers) -> None:
    """Set a search up that begins at its next point, or does so again."""
    number[LOSS], number[RESTARTED] = math.inf, math.inf
    number[DAMPING], number[GROWTH] = _FIRST_DAMPING, 2.0
    counter[REFUSED], counter[CORRECTING], counter[FIRED] = 0, 0, RUNNING
    counter[PLATEAU] = NO_PLATEAU
    for i in range(vector.shape[1]):
        vector[SCALE, i] = 0.0


@inlined
def _probe(
    vector: Floats,
    number: Floats,
    counter: Integers,
    curvature: Floats,
    factor: Floats,
    limits: SearchLimits,
) -> None:
    """Let a search that would end go on from a perturbed point, see `starts`."""
    reason = counter[REASON]
    if reason in (GRADIENT, STEP, LOSS_CHANGE, STALLED):
        model = Model(
            X,
            vector[SLOPE],
            curvature,
            factor,
            counter[FACTOR] == READY,
            number[LOSS],
            number[LOSS],
        )
        if begin_probe(vector, number, counter, model, limits):
            counter[REASON] = RUNNING
            counter[FIRED] = reason
        elif counter[PLATEAU] == SEEN:
            counter[REASON] = STALLED


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
    """Make the best linear parameters the next trial; False if that promises too little.

    Where a start is too far away for that, 0 is the next trial of each.
    """
    n, some = vector.shape[1], False
    best, h = space.best[:n], space.step[:n]
    model = Model(TRIAL, gradient, curvature, space.columns, False, loss, loss)
    find_roles(vector, model, space)
    for i in range(n):
        if vector[LINEAR, i] == 0.0:
            space.role[i] = STAYS
        some = some or space.role[i] == MOVES
    if counter[ITERATIONS] >= limits.iterations or not some:
        return False
    if counter[EVALUATIONS] == 1 and limits.target > 0.0 and loss > _FAR * limits.target:
        for i in range(n):
            if space.role[i] != STAYS:
                vector[TRIAL, i] = within(vector, i, 0.0, limits)
        counter[CORRECTING] = _NO_LINEAR
        counter[ITERATIONS] += 1
        return True
    solve_step(vector, number, counter, model, number[DAMPING], RIDGE, space)
    for i in range(n):
        trial = vector[TRIAL, i]
        best[i] = within(vector, i, trial + h[i], limits) if space.role[i] != STAYS else trial
    linear_model.difference(best, vector[TRIAL], h)
    decrease = promised_decrease(vector, model, h)
    reached, before = loss - decrease, number[BEFORE]
    if not (decrease > _LEAST_CORRECTION * loss and reached < number[LOSS]):
        return False
    if before < math.inf:
        promises = loss < before or before - reached > _LEAST_GAIN * number[PREDICTED]
        if not (promises and decrease > _WORTH_CORRECTING * (before - reached)):
            return False
    linear_model.copy(best, vector[TRIAL])
    counter[CORRECTING] = _BEST_LINEAR
    counter[ITERATIONS] += 1
    return True


@inlined
def _judge(
    vector: Floats,
    number: Floats,
    counter: Integers,
    loss: float,
    usable: bool,
    limits: SearchLimits,
) -> Any:
    """Choose the next damping, and note what a refused step says of the loss along it.

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
        damp(number)
        counter[REFUSED] += 1
        slope = 0.0
        for i in range(vector.shape[1]):
            slope += vector[SLOPE, i] * (vector[TRIAL, i] - vector[X, i])
        # The descent of the parabola that has the loss and slope at X, and the loss at the trial.
        bend = loss - number[LOSS] - slope
        promise = slope * slope / (4.0 * bend) if usable and bend > 0.0 else abs(slope)
        number[PROMISE] = max(number[PROMISE], promise)
    small = limits.loss * number[LOSS]
    flat = usable and max(abs(actual), abs(predicted)) <= small and actual <= 2.0 * predicted
    return flat, not better or actual < _LEAST_GAIN * predicted


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
    model = Model(
        X, vector[SLOPE], curvature, factor, counter[FACTOR] == READY, number[LOSS], number[LOSS]
    )
    ridge = RIDGE_OF_FACTOR if model.factored else RIDGE
    find_roles(vector, model, space)
    if is_exact(vector, number, model, limits):
        counter[REASON] = LOSS_CHANGE
        return
    reason = RUNNING
    if steepest_cosine(vector, model, space) <= limits.gradient:
        reason = GRADIENT
    elif flat:
        reason = LOSS_CHANGE
    for attempt in range(3):
        if reason != RUNNING:
            believed, doubtful = is_minimum(vector, number, counter, model, False, limits, space)
            if space.cancelled[0]:
                return
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
                    believed, doubtful = is_minimum(
                        vector, number, counter, model, True, limits, space
                    )
                    counter[REASON] = reason if believed else STALLED
                    return
                number[RESTARTED], number[PROMISE] = number[LOSS], 0.0
                number[DAMPING] = min(number[DAMPING], _FIRST_DAMPING)
                number[GROWTH], counter[REFUSED] = 2.0, 0
                linear_model.copy(vector[X], vector[TRIAL])  # what no later trial may equal
                for i in range(n):
                    vector[SCALE, i] = 0.0
        if counter[ITERATIONS] >= limits.iterations:
            break
        length, size, is_new, pivot = 0.0, 0.0, False, 1.0
        for _ in range(_ATTEMPTS):
            find_roles(vector, model, space)
            pivot = solve_step(vector, number, counter, model, number[DAMPING], ridge, space)
            length, size, is_new = 0.0, 0.0, False
            for i in range(n):
                trial = vector[X, i]
                if space.role[i] != STAYS:
                    trial = within(vector, i, trial + h[i], limits)
                    # The square of a tiny step would be 0.
                    column = math.sqrt(curvature[i * (i + 1) // 2 + i])
                    length += (column * (trial - vector[X, i])) ** 2
                    size += (column * vector[X, i]) ** 2
                is_new = is_new or trial != vector[TRIAL, i]
                vector[TRIAL, i] = trial
            # Many good steps leave so little damping that twice as much gives the refused trial
            # again.
            if space.cancelled[0] or is_new or not length > 0.0 or number[DAMPING] > 1.0:
                break
            damp(number)
        if space.cancelled[0]:
            return
        # A short step is taken where its test is not believed. Written so that one of NaN is none.
        if is_new and (math.sqrt(length) > limits.step * math.sqrt(size) or attempt > 0):
            slow = disappoints or counter[ITERATIONS] >= _MANY_ITERATIONS
            doubtful = pivot < ILL_CONDITIONED and counter[FACTOR] == NO_FACTOR
            if slow and doubtful and not limits.single:
                counter[FACTOR] = WANTED
                return
            linear_model.difference(vector[TRIAL], vector[X], h)
            number[PREDICTED] = promised_decrease(vector, model, h)
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
    model = Model(X, vector[SLOPE], curvature, factor, True, number[LOSS], number[LOSS])
    plain = Model(X, vector[SLOPE], curvature, factor, False, number[LOSS], number[LOSS])
    find_roles(vector, model, space)
    solve_step(vector, number, counter, plain, number[DAMPING], RIDGE, space)
    own = promised_decrease(vector, model, h)
    find_roles(vector, model, space)
    solve_step(vector, number, counter, model, number[DAMPING], RIDGE_OF_FACTOR, space)
    if own >= _HARDLY_WORSE * promised_decrease(vector, model, h):
        counter[FACTOR] = USELESS
