"""Levenberg-Marquardt: what happens to every search between two passes of the engine.

After Madsen, Nielsen and Tingleff, "Methods for non-linear least squares problems" (2nd edition,
IMM, Technical University of Denmark, 2004), algorithm 3.16, with Marquardt's scaling (SIAM J. Appl.
Math. 11, 1963) by the greatest diagonal seen so far (Moré, Lecture Notes in Mathematics 630, 1978).
The simple form, for F = half the weighted sum of squares, its gradient g and A = J^T W J:

    h = -(A + damping * scale)^-1 g
    gain = (F(x) - F(x + h)) / (predicted decrease of the linear model)
    if F(x + h) < F(x):  x = x + h,  damping *= max(1/10, 1 - (2 gain - 1)^3), growth = 2
    else:                damping *= growth,  growth *= 2

The book's least factor is 1/3; 1/10 and a first damping of 0.1 reach lower losses within 10 and
within 50 iterations on random expressions, and more digits on NIST's problems.

Loss, gradient and curvature at x + h come from one pass, so that an accepted step needs no second
one. Parameters at a bound whose gradient points outwards take no part in a step, and a step is cut
off at the bounds; the predicted decrease is that of the step that was taken.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from warpfit_server.fit.bounds import find_moving, within
from warpfit_server.fit.jit import jitable
from warpfit_server.fit.searches import (
    DAMPING,
    EVALUATIONS,
    GRADIENT,
    GROWTH,
    INITIAL,
    ITERATIONS,
    ITERATIONS_USED,
    LOSS,
    LOSS_CHANGE,
    NOT_FINITE,
    PAIRS,
    PARAMETERS,
    REASON,
    RUNNING,
    SCALE,
    SLOPE,
    STEP,
    TRIAL,
    Floats,
    Integers,
    Limits,
    X,
)
from warpfit_server.fit.triangles import all_finite, dot, factorise, quadratic, solve

#: First damping, relative to the diagonal of the curvature.
_FIRST_DAMPING: Final = 0.1
#: Least factor by which an accepted step lowers the damping.
_FASTEST_DECREASE: Final = 0.1
#: How often a system that is not positive definite is damped more.
_ATTEMPTS: Final = 100


def advance(
    edges: Integers,
    vectors: Floats,
    numbers: Floats,
    counters: Integers,
    curvatures: Floats,
    new_sums: Floats,
    new_gradients: Floats,
    new_curvatures: Floats,
    limits: Limits,
) -> None:
    """Judge the evaluated trials of all searches, and propose the next ones.

    Args:
        edges: of `searches.Searches`, as the next four.
        vectors: row TRIAL is what was evaluated, and then what is to be evaluated.
        numbers: state.
        counters: state.
        curvatures: state.
        new_sums: sum of squares at the trials, [S].
        new_gradients: its gradient, [P].
        new_curvatures: J^T W J, [T].
        limits: when to stop.

    """
    for s in range(len(numbers)):
        number, counter = numbers[s], counters[s]
        if counter[REASON] != RUNNING:
            continue
        begin, end = edges[s, PARAMETERS], edges[s + 1, PARAMETERS]
        vector, gradient = vectors[:, begin:end], new_gradients[begin:end]
        begin, end = edges[s, PAIRS], edges[s + 1, PAIRS]
        old, new = curvatures[begin:end], new_curvatures[begin:end]
        finite = math.isfinite(new_sums[s]) and all_finite(gradient) and all_finite(new)
        counter[EVALUATIONS] += 1
        if counter[EVALUATIONS] == 1:
            number[INITIAL], number[DAMPING], number[GROWTH] = new_sums[s], _FIRST_DAMPING, 2.0
            accepted = True
            if not finite:
                counter[REASON] = NOT_FINITE
        else:
            accepted = _judge(vector, number, counter, old, new_sums[s], finite, limits)
        if accepted:
            number[LOSS] = new_sums[s]
            vector[X, :] = vector[TRIAL]
            vector[SLOPE, :] = gradient
            old[:] = new
            for i in range(len(gradient)):
                diagonal = new[i * (i + 1) // 2 + i]
                vector[SCALE, i] = max(vector[SCALE, i], diagonal)
        if counter[REASON] == RUNNING:
            _propose(vector, number, counter, old, limits)


@jitable
def _judge(
    vector: Floats,
    number: Floats,
    counter: Integers,
    curvature: Floats,
    loss: float,
    finite: bool,
    limits: Limits,
) -> bool:
    """Decide whether the trial becomes the current point, and whether the loss has converged."""
    h = vector[TRIAL] - vector[X]
    # Twice the decreases of F, because the loss is twice F.
    predicted = -dot(vector[SLOPE], h) - quadratic(curvature, h)
    actual = number[LOSS] - loss
    accepted = finite and actual > 0.0
    if accepted:
        if predicted > 0.0:
            surprise = 2.0 * actual / predicted - 1.0
            number[DAMPING] *= max(_FASTEST_DECREASE, 1.0 - surprise**3)
        number[GROWTH] = 2.0
    else:
        _damp(number)
    small = limits.loss * number[LOSS]
    if finite and max(abs(actual), abs(predicted)) <= small and actual <= 2.0 * predicted:
        counter[REASON] = LOSS_CHANGE
    return accepted


@jitable
def _damp(number: Floats) -> None:
    number[DAMPING] *= number[GROWTH]
    number[GROWTH] *= 2.0


@jitable
def _propose(
    vector: Floats, number: Floats, counter: Integers, curvature: Floats, limits: Limits
) -> None:
    """Compute the next trial, or find that the search has ended."""
    moving = find_moving(vector)
    if _steepest(vector, curvature, moving, number[LOSS]) <= limits.gradient:
        counter[REASON] = GRADIENT
        return
    if counter[ITERATIONS] >= limits.iterations:
        counter[REASON] = ITERATIONS_USED
        return
    scale = np.sqrt(vector[SCALE])
    for i in range(len(scale)):
        if scale[i] == 0.0:
            scale[i] = 1.0
    h = _step(curvature, vector[SLOPE], scale, moving, number)
    length, size = 0.0, 0.0
    for i in range(len(h)):
        trial = within(vector, i, vector[X, i] + h[i], limits.single) if moving[i] else vector[X, i]
        vector[TRIAL, i] = trial
        length += (scale[i] * (trial - vector[X, i])) ** 2
        size += (scale[i] * vector[X, i]) ** 2
    # Written so that a step that is NaN ends the search, too.
    if not (math.sqrt(length) > limits.step * (math.sqrt(size) + limits.step) and length > 0.0):
        counter[REASON] = STEP
        return
    counter[ITERATIONS] += 1


@jitable
def _steepest(vector: Floats, curvature: Floats, moving: Any, loss: float) -> float:
    """Greatest cosine of the angle between the residuals and a column of their Jacobian."""
    steepest = 0.0
    for i in range(len(moving)):
        diagonal = curvature[i * (i + 1) // 2 + i]
        if moving[i] and diagonal > 0.0 and loss > 0.0:
            cosine = 0.5 * abs(vector[SLOPE, i]) / math.sqrt(diagonal) / math.sqrt(loss)
            steepest = max(steepest, cosine)
    return steepest


@jitable
def _step(
    curvature: Floats, gradient: Floats, scale: Floats, moving: Any, number: Floats
) -> Floats:
    """Solve the damped normal equations, scaled to a unit diagonal; 0 for what does not move."""
    n = len(scale)
    system = np.empty(n * (n + 1) // 2)
    for _ in range(_ATTEMPTS):
        for i in range(n):
            row = i * (i + 1) // 2
            for j in range(i):
                both = moving[i] and moving[j]
                system[row + j] = curvature[row + j] / (scale[i] * scale[j]) if both else 0.0
            diagonal = curvature[row + i] / (scale[i] * scale[i])
            system[row + i] = diagonal + number[DAMPING] if moving[i] else 1.0
        if factorise(system, n):
            break
        _damp(number)
    h = np.zeros(n)
    for i in range(n):
        if moving[i]:
            h[i] = -0.5 * gradient[i] / scale[i]
    solve(system, h)
    return h / scale
