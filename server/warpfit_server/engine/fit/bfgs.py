"""BFGS: judges the trials of an engine pass and proposes the next ones.

The update is that of Broyden, Fletcher, Goldfarb and Shanno (Nocedal and Wright, "Numerical
Optimization", 2nd edition, 2006, section 6.1), the line search is the one that Lewis and Overton
("Nonsmooth optimization via quasi-Newton methods", Mathematical Programming 141, 2013, algorithm
2.6) show to suit losses with kinks too. Each pass of the engine tries one step length t:

    if f(x + t p) > f(x) + 1e-4 t p.g:       t is too long:  high = t
    elif p.g(x + t p) < 0.9 p.g:             t is too short: low = t
    else:                                    x = x + t p, update the inverse, new direction p
    t = (low + high) / 2 if high is known, else 2 low

While no t has been too short, the next t is the minimum of the parabola through f(x), p.g and
f(x + t p), but at least a tenth and at most a half of t.

The direction p is the minimum of g.p + p.B p / 2 inside the bounds, where H, the inverse of B, is
what the update keeps. Without bounds it is -H g. Where bounds hold p_i for i in a set A, the
multipliers solve H_AA lambda = -(H g)_A - p_A, and p = -H (g + lambda); the set is the one of the
primal-dual active set method (Hintermüller, Ito and Kunisch, SIAM J. Optim. 13, 2002).

The first inverse is that of the slightly damped curvature J^T W J times the *stiffness*, the second
derivative of the row loss, roughly: 2 for squares; for others the gradient of the loss divided by
J^T W d, as if the row loss were a square with that factor.

Parameters are measured in the lengths of their columns of the Jacobian (WIDTH). These are known
where a search begins, and may be wrong by any factor elsewhere. So a search that would end is
*inspected* first: the driver evaluates the curvature at its point, and the search ends if
`linear_model.is_minimum` holds there. Where that is doubtful and the loss is of squares, the driver
factorises the Jacobian first (`reflect`); for other losses the curvature has to do. If the
condition does not hold, the search restarts from that point with the new widths and a new inverse.
If the restart has not made the loss less, the search has stalled; with a row loss that has kinks,
at which gradients do not vanish, it ends as one whose steps are too small. What would end at a
saddle or on a plateau is perturbed first (`starts`).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final

from warpfit.ir import Program
from warpfit.losses import PREDICTION, TARGET, WEIGHT, mentions_weight
from warpfit.ops import VARIABLE, Operator
from warpfit_server.engine.fit.linear_model import (
    Model,
    Workspace,
    all_finite,
    are_usable,
    copy,
    difference,
    dot,
    factorise,
    has_effect,
    is_minimum,
    solve,
)
from warpfit_server.engine.fit.searches import (
    BEGINS,
    BEST,
    BEST_LOSS,
    BEST_SLOPE,
    DIRECTION,
    ENDING,
    EVALUATIONS,
    FACTOR,
    FREE,
    GRADIENT,
    HIGH,
    INITIAL,
    ITERATIONS,
    ITERATIONS_USED,
    LENGTH,
    LOSS,
    LOSS_CHANGE,
    LOW,
    LOWER,
    NO_FACTOR,
    NO_PLATEAU,
    NOT_FINITE,
    PAIRS,
    PLATEAU,
    PROBES,
    PROBING,
    PULL,
    READY,
    REASON,
    RESTART_LOSS,
    RESTARTS,
    RUNNING,
    SEEN,
    SLOPE,
    SQUARES,
    STALLED,
    STEP,
    STIFFNESS,
    TRIAL,
    TRIALS,
    UPDATES,
    UPPER,
    WANTED,
    WIDTH,
    Floats,
    Integers,
    SearchLimits,
    X,
    find_moving,
    parts_of,
    within,
)
from warpfit_server.engine.fit.starts import MOST_PROBES, begin_probe, leads_on, nudge
from warpfit_server.engine.native import numba_cache
from warpfit_server.engine.native.intrinsics import inlined

#: Constants of the weak Wolfe conditions.
_DECREASE: Final = 1e-4
_FLATTER: Final = 0.9
#: Most step lengths along one direction.
_TRIALS: Final = 60
#: Most evaluations for each iteration that is allowed, in the mean; a search takes one to two.
_EVALUATIONS: Final = 4
#: Damping of the curvature that gives the first inverse, and that of a restart, which is for
#: columns that are nearly dependent.
_RIDGE: Final = 1e-3
_RESTART_RIDGE: Final = 1e-9
#: Least cosine between step and change of the gradient for an update.
_CURVED: Final = 1e-10
#: Share of the tolerance of the loss below which a decrease is not worth a pass.
_NOT_WORTH: Final = 0.1
#: Least decrease of the loss, relative to it, after which a search may restart once more.
_PROGRESS: Final = 1e-3
#: Most relative change of a parameter by the first step of a restart: where a function is saturated
#: in a parameter, its tiny column asks for a step that is larger by as much.
_BOX: Final = 1.0
#: Most sets of bounds that are tried for a direction; usually one to four are needed.
_SETS: Final = 30


@lru_cache(64)
def squared_slope(row_loss: Program) -> Program:
    """Return the row loss whose sum is that of w (dl/df)^2, by a difference quotient.

    The quotient only scales the first-order condition, for which a millionth of the prediction and
    the target is a step that is small enough.
    """
    f, y, w = (Program.variable(index) for index in (PREDICTION, TARGET, WEIGHT))
    size = Program.apply("add", Program.apply("abs", f), Program.apply("abs", y))
    step = Program.apply("fma", size, Program.constant(1e-6), Program.constant(1e-150))
    moved = row_loss.fold(
        lambda code, value: (
            Program.apply("add", f, step)
            if code == VARIABLE and value == PREDICTION
            else Program([code], [value])
        ),
        lambda operator, operands: Program.apply(operator, *operands),
    )
    quotient = Program.apply("div", Program.apply("sub", moved, row_loss), step)
    square = Program.apply("square", quotient)
    if not mentions_weight(row_loss):
        return square
    return Program.apply("where", w, Program.apply("div", square, w), Program.constant(0.0))


def has_kinks(row_loss: Program) -> bool:
    """Return whether a row loss may have kinks: whether the prediction decides among cases.

    An equality is no case: it holds at single predictions, as that of the Poisson loss does at 0.
    """

    def operator(row: Operator, operands: list[tuple[bool, bool]]) -> tuple[bool, bool]:
        varies = [operand_varies for operand_varies, _ in operands]
        decides = varies[0] if row.name == "where" else any(varies)
        is_kink = decides and any("select" in text for text in row.derivative)
        return (
            any(varies) and row.name not in ("eq", "ne"),
            is_kink or any(has_kink for _, has_kink in operands),
        )

    return row_loss.fold(
        lambda code, value: (code == VARIABLE and value == PREDICTION, False), operator
    )[1]


# It allocates nothing, so that references need not be counted.
@numba_cache.njit(nogil=True, error_model="numpy", _nrt=False)  # type: ignore[untyped-decorator]
def advance(
    edges: Integers,
    vectors: Floats,
    numbers: Floats,
    counters: Integers,
    curvatures: Floats,
    inverses: Floats,
    new_sums: Floats,
    new_gradients: Floats,
    inspects: bool,
    resumes: bool,
    limits: SearchLimits,
    space: Workspace,
) -> None:
    """Judge the evaluated trials of all searches, and propose the next ones; see `Searches`.

    Row TRIAL of ``vectors`` holds the evaluated trials, with their sums of row losses [S] and
    gradients [P], and then the next ones. Where ``space.cancelled`` ends this early, the best
    parameters so far are kept.

    With ``inspects`` searches that begin or would end are inspected, given the curvatures at X and
    the columns STIFFNESS and PULL of ``numbers``; without, they go on waiting. Searches that want
    an orthogonal factor get it in place of the inverse, and a call that ``resumes`` inspects them
    again, and no other ones.
    """
    for s in range(len(numbers)):
        if space.cancelled[0]:
            return
        waits = counters[s, ENDING] != RUNNING
        if counters[s, REASON] != RUNNING or (waits and not inspects):
            continue
        if (counters[s, FACTOR] == WANTED) != resumes:
            continue
        state = (edges, vectors, numbers, counters)
        vector, number, counter, gradient = parts_of(s, *state, new_gradients)
        inverse = inverses[edges[s, SQUARES] : edges[s + 1, SQUARES]]
        if resumes:
            counter[FACTOR] = READY
        else:
            counter[EVALUATIONS] += 1
        if waits:
            curvature = curvatures[edges[s, PAIRS] : edges[s + 1, PAIRS]]
            own = gradient, curvature, inverse, new_sums[s]
            turning = _go_on(vector, number, counter, *own, resumes, limits, space)
        else:
            turning = _judge(vector, number, counter, inverse, gradient, new_sums[s], limits, space)
        if turning:
            _turn(vector, number, counter, inverse, limits, waits, space)


@inlined
def _go_on(
    vector: Floats,
    number: Floats,
    counter: Integers,
    gradient: Floats,
    curvature: Floats,
    inverse: Floats,
    loss: float,
    resumes: bool,
    limits: SearchLimits,
    space: Workspace,
) -> bool:
    """Let a search that waits begin, go on or end; True if it needs a direction."""
    if counter[EVALUATIONS] == 1:
        number[INITIAL] = loss
    # Half of the derivatives of the row losses are the residuals of squares.
    squares = loss if limits.squares else 0.25 * number[PULL]
    values = _values(loss, number, limits)
    if counter[PROBING]:
        _mark_nonlinear(vector)
        if leads_on(
            *(vector, number, counter, gradient, curvature, loss, squares, values),
            *(limits, space),
        ):
            counter[ENDING], counter[RESTARTS] = BEGINS, 0
            counter[PLATEAU] = NO_PLATEAU
        elif counter[PROBING]:
            return False
        else:
            # No perturbation leads on; a search with idle parameters may get another one.
            copy(vector[X], vector[TRIAL])
            has_idle = False
            for i in range(vector.shape[1]):
                idle = vector[WIDTH, i] == 0.0 and vector[FREE, i] != 0.0
                has_idle = has_idle or (idle and vector[LOWER, i] < vector[UPPER, i])
            if not has_idle or counter[PROBES] >= MOST_PROBES:
                counter[REASON] = STALLED if counter[PLATEAU] == SEEN else counter[ENDING]
            return False
    if counter[ENDING] == BEGINS and not resumes:
        if not are_usable(vector, TRIAL, squares, values, gradient, curvature):
            if not (math.isfinite(number[INITIAL]) and nudge(vector, counter, limits)):
                number[LOSS] = number[INITIAL]
                counter[REASON] = NOT_FINITE
            return False
        number[LOSS] = loss
        copy(gradient, vector[SLOPE])
        copy(vector[TRIAL], vector[X])
    return _inspect(vector, number, counter, curvature, inverse, limits, space)


@inlined
def _mark_nonlinear(vector: Floats) -> None:
    """Say that the program is linear in no parameter."""
    for i in range(vector.shape[1]):
        vector[BEST, i] = 0.0


@inlined
def _inspect(
    vector: Floats,
    number: Floats,
    counter: Integers,
    curvature: Floats,
    inverse: Floats,
    limits: SearchLimits,
    space: Workspace,
) -> bool:
    """Begin a search, or end it where it may say that it has converged; True if it goes on.

    Where that is doubtful, the search asks for an orthogonal factor.
    """
    n, ending = vector.shape[1], counter[ENDING]
    _mark_nonlinear(vector)
    # Half of the derivatives of the row losses are the residuals, where these are squares.
    squares = 0.25 * _pull(number, limits)
    values = _values(number[LOSS], number, limits)
    if not are_usable(vector, X, squares, values, vector[SLOPE], curvature):
        counter[REASON] = NOT_FINITE if ending == BEGINS else STALLED
        return False
    for i in range(n):
        column = math.sqrt(curvature[i * (i + 1) // 2 + i])
        moves = vector[FREE, i] != 0.0 and vector[LOWER, i] < vector[UPPER, i]
        moves = moves and has_effect(vector, X, i, column, vector[SLOPE, i], squares, values)
        vector[WIDTH, i] = column if moves else 0.0
    steepest = _steepest(vector, number, limits, space)
    factored = counter[FACTOR] == READY
    counter[FACTOR] = NO_FACTOR
    model = Model(X, vector[SLOPE], curvature, inverse, factored, squares, values)
    ends, reason = steepest == 0.0, RUNNING
    if not ends and (ending != BEGINS or steepest <= limits.gradient):
        # These rows are those that Levenberg-Marquardt's damping uses, and a test has none.
        for i in range(n):
            vector[DIRECTION, i] = 0.0
        ends, doubtful = is_minimum(vector, number, counter, model, False, limits, space)
        if doubtful and limits.squares and not space.cancelled[0]:
            counter[FACTOR] = WANTED
            return False
    if ends:
        reason = GRADIENT if ending == BEGINS else ending
    elif counter[ITERATIONS] >= limits.iterations:
        counter[REASON] = ITERATIONS_USED
        return False
    elif ending != BEGINS:
        least = number[RESTART_LOSS] - _PROGRESS * abs(number[RESTART_LOSS])
        if counter[RESTARTS] > 0 and not number[LOSS] < least:
            reason = STEP if limits.kinks else STALLED
        else:
            counter[RESTARTS] += 1
            number[RESTART_LOSS] = number[LOSS]
    if reason != RUNNING:
        # It ends, or waits for a perturbed point.
        if begin_probe(vector, number, counter, model, limits):
            counter[ENDING] = reason
        else:
            counter[REASON] = STALLED if counter[PLATEAU] == SEEN else reason
        return False
    counter[ENDING] = RUNNING
    ridge = _RIDGE if counter[RESTARTS] == 0 else _RESTART_RIDGE
    _begin_inverse(vector, number, counter, curvature, inverse, ridge, space)
    return True


@inlined
def _pull(number: Floats, limits: SearchLimits) -> float:
    """Return the sum of w (dl/df)^2, for losses other than squares where it was last known."""
    return float(4.0 * number[LOSS] if limits.squares else number[PULL])


@inlined
def _values(loss: float, number: Floats, limits: SearchLimits) -> float:
    """Return the sum of squares in the units of the values, as if row losses were squares."""
    return float(abs(loss if limits.squares else 2.0 * loss / number[STIFFNESS]))


@inlined
def _steepest(vector: Floats, number: Floats, limits: SearchLimits, space: Workspace) -> float:
    """Return the greatest cosine between the derivatives of the row losses and one column."""
    steepest, moving = 0.0, space.role[: vector.shape[1]]
    find_moving(vector, X, vector[SLOPE], moving)
    for i in range(len(moving)):
        if moving[i] != 0 and vector[WIDTH, i] > 0.0:
            steepest = max(steepest, abs(vector[SLOPE, i]) / vector[WIDTH, i])
    if steepest > 0.0:
        steepest /= math.sqrt(_pull(number, limits))
    return steepest


@inlined
def _judge(
    vector: Floats,
    number: Floats,
    counter: Integers,
    inverse: Floats,
    gradient: Floats,
    loss: float,
    limits: SearchLimits,
    space: Workspace,
) -> bool:
    """Judge the trial and choose another length; True if another direction is needed."""
    step = space.step[: vector.shape[1]]
    finite = math.isfinite(loss) and all_finite(gradient)
    difference(vector[TRIAL], vector[X], step)
    expected = dot(vector[SLOPE], step)
    slope = dot(vector[SLOPE], vector[DIRECTION])
    counter[TRIALS] += 1
    # Where bounds cut a step off, the slope along it can be positive.
    if finite and loss < number[LOSS] and loss < number[LOSS] + _DECREASE * expected:
        if loss < number[BEST_LOSS]:
            number[BEST_LOSS] = loss
            copy(vector[TRIAL], vector[BEST])
            copy(gradient, vector[BEST_SLOPE])
        steep = dot(gradient, vector[DIRECTION]) < _FLATTER * slope
        for i in range(vector.shape[1]):
            # At a bound slopes along the direction mean little.
            trial = vector[TRIAL, i]
            if trial != vector[X, i] and (trial == vector[LOWER, i] or trial == vector[UPPER, i]):
                steep = False
        if not steep:
            _accept(vector, number, counter, inverse, limits, space)
            return bool(counter[ENDING] == RUNNING)
        number[LOW] = number[LENGTH]
    else:
        number[HIGH] = number[LENGTH]
    length = number[LENGTH]
    if number[HIGH] == math.inf:
        number[LENGTH] = 2.0 * number[LOW]
    elif number[LOW] > 0.0:
        number[LENGTH] = 0.5 * (number[LOW] + number[HIGH])
    else:
        share = 0.1
        if finite and expected < 0.0 and loss - number[LOSS] > expected:
            share = min(0.5, max(0.1, -0.5 * expected / (loss - number[LOSS] - expected)))
        number[LENGTH] = share * length
    promised = -slope * (number[LENGTH] - number[LOW])
    worth = promised > _NOT_WORTH * limits.loss * abs(number[LOSS])
    differs = worth and _place_trial(vector, number[LENGTH], limits)
    if differs and counter[TRIALS] < _TRIALS:
        return False
    if number[BEST_LOSS] < math.inf:
        _accept(vector, number, counter, inverse, limits, space)
    else:
        _end(vector, counter, STEP)
    return bool(counter[ENDING] == RUNNING)


@inlined
def _end(vector: Floats, counter: Integers, reason: int) -> None:
    """Let a search wait for being inspected."""
    counter[ENDING] = reason
    copy(vector[X], vector[TRIAL])


@inlined
def _accept(
    vector: Floats,
    number: Floats,
    counter: Integers,
    inverse: Floats,
    limits: SearchLimits,
    space: Workspace,
) -> None:
    """Move to the best point along the direction, and end a search that has converged."""
    n, length, size = vector.shape[1], 0.0, 0.0
    step, change = space.step[:n], space.target[:n]
    difference(vector[BEST], vector[X], step)
    difference(vector[BEST_SLOPE], vector[SLOPE], change)
    decrease = number[LOSS] - number[BEST_LOSS]
    for i in range(n):
        length += (vector[WIDTH, i] * step[i]) ** 2
        size += (vector[WIDTH, i] * vector[X, i]) ** 2
    _update_inverse(vector[WIDTH], counter, inverse, step, change, space.right[:n])
    number[LOSS] = number[BEST_LOSS]
    number[BEST_LOSS] = math.inf
    copy(vector[BEST], vector[X])
    copy(vector[BEST_SLOPE], vector[SLOPE])
    for i in range(n):
        # Parameters take part from now on whose column was 0 so far. Their WIDTH becomes the least
        # one that explains the gradient if the row losses are squares.
        free = vector[FREE, i] != 0.0 and vector[LOWER, i] < vector[UPPER, i]
        if free and vector[WIDTH, i] == 0.0 and vector[SLOPE, i] != 0.0 and number[LOSS] != 0.0:
            squares = _values(number[LOSS], number, limits)
            width = abs(vector[SLOPE, i]) / number[STIFFNESS] / math.sqrt(squares)
            if has_effect(vector, X, i, width, 0.0, squares, squares):
                vector[WIDTH, i] = width
                inverse[i * n + i] = 1.0 / (number[STIFFNESS] * n) / (width * width)
    if decrease <= limits.loss * abs(number[LOSS]):
        _end(vector, counter, LOSS_CHANGE)
    elif math.sqrt(length) <= limits.step * math.sqrt(size):
        _end(vector, counter, STEP)


@inlined
def _turn(
    vector: Floats,
    number: Floats,
    counter: Integers,
    inverse: Floats,
    limits: SearchLimits,
    begins: bool,
    space: Workspace,
) -> None:
    """Choose a direction and its first trial, or end the search; one that begins goes on."""
    if not begins and _steepest(vector, number, limits, space) <= limits.gradient:
        _end(vector, counter, GRADIENT)
        return
    used_up = counter[EVALUATIONS] >= _EVALUATIONS * limits.iterations + _TRIALS
    if used_up or counter[ITERATIONS] >= limits.iterations:
        counter[REASON] = ITERATIONS_USED
        return
    box = _BOX if begins and counter[RESTARTS] > 0 else math.inf
    for _ in range(2):
        if _direct(vector, inverse, box, space):
            break
        _reset_inverse(vector, number, counter, inverse)
    promised = -0.5 * dot(vector[SLOPE], vector[DIRECTION])
    if not begins and promised <= _NOT_WORTH * limits.loss * abs(number[LOSS]):
        _end(vector, counter, LOSS_CHANGE)
        return
    number[LENGTH], number[LOW], number[HIGH], number[BEST_LOSS] = 1.0, 0.0, math.inf, math.inf
    counter[TRIALS] = 0
    counter[ITERATIONS] += 1
    if not _place_trial(vector, number[LENGTH], limits):
        _end(vector, counter, STEP)


@inlined
def _direct(vector: Floats, inverse: Floats, box: float, space: Workspace) -> bool:
    """Set the direction, see above; False unless the loss falls along it.

    No parameter but 0 changes by more than ``box`` times itself.
    """
    n, p = vector.shape[1], vector[DIRECTION]
    pull, target, held, order = space.best[:n], space.unit[:n], space.role[:n], space.order[:n]
    find_moving(vector, X, vector[SLOPE], held)
    for i in range(n):
        # An element of 0 on the diagonal stands for a parameter that takes no part.
        held[i] = held[i] == 0 and inverse[i * n + i] > 0.0
        target[i] = 0.0
    for _ in range(_SETS):
        copy(vector[SLOPE], pull)
        count = 0
        for i in range(n):
            if held[i] != 0:
                order[count] = i
                count += 1
        if count > 0:
            system, b = space.system[: count * (count + 1) // 2], space.right[:count]
            for row in range(count):
                i = order[row]
                b[row] = -target[i]
                for j in range(n):
                    b[row] -= inverse[i * n + j] * vector[SLOPE, j]
                b[row] /= math.sqrt(inverse[i * n + i])
                for column in range(row + 1):
                    j = order[column]
                    unit = math.sqrt(inverse[i * n + i]) * math.sqrt(inverse[j * n + j])
                    system[row * (row + 1) // 2 + column] = inverse[i * n + j] / unit
            if not factorise(system, 0, count, count, space.cancelled):
                return False
            solve(system, b)
            for row in range(count):
                pull[order[row]] += b[row] / math.sqrt(inverse[order[row] * n + order[row]])
        for i in range(n):
            p[i] = 0.0
            for j in range(n):
                p[i] -= inverse[i * n + j] * pull[j]
        changed = False
        for i in range(n):
            down, up = vector[LOWER, i] - vector[X, i], vector[UPPER, i] - vector[X, i]
            before = held[i]
            if vector[X, i] != 0.0:
                down, up = max(down, -box * abs(vector[X, i])), min(up, box * abs(vector[X, i]))
            if before != 0:
                p[i] = target[i]
                force = pull[i] - vector[SLOPE, i]
                # The bound holds the parameter back if the force points inwards.
                held[i] = force <= 0.0 if target[i] <= down else force >= 0.0
            elif p[i] < down or p[i] > up:
                held[i], target[i] = inverse[i * n + i] > 0.0, down if p[i] < down else up
            changed = changed or held[i] != before
        if not changed or space.cancelled[0]:
            break
    return bool(dot(vector[SLOPE], p) < 0.0 and all_finite(p))


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
    ridge: float,
    space: Workspace,
) -> None:
    """Invert the damped curvature, scaled to a unit diagonal."""
    n, width = vector.shape[1], vector[WIDTH]
    system, column = space.system[: n * (n + 1) // 2], space.right[:n]
    for i in range(n):
        row = i * (i + 1) // 2
        for j in range(i):
            known = width[i] > 0.0 and width[j] > 0.0
            system[row + j] = curvature[row + j] / (width[i] * width[j]) if known else 0.0
        system[row + i] = 1.0 + ridge
    if not factorise(system, 0, n, n, space.cancelled):
        _reset_inverse(vector, number, counter, inverse)
        return
    for j in range(n):
        for i in range(n):
            column[i] = 0.0
        column[j] = 1.0
        solve(system, column)
        for i in range(n):
            known = width[i] > 0.0 and width[j] > 0.0
            unit = width[i] * width[j] if known else 1.0
            inverse[i * n + j] = column[i] / unit / number[STIFFNESS] if known else 0.0
    counter[UPDATES] = 0


@inlined
def _reset_inverse(vector: Floats, number: Floats, counter: Integers, inverse: Floats) -> None:
    """Make the next direction that of steepest descent, in units of the columns' lengths.

    No eigenvalue of a curvature with a unit diagonal exceeds the number of parameters.
    """
    n = vector.shape[1]
    for i in range(n * n):
        inverse[i] = 0.0
    for i in range(n):
        width = vector[WIDTH, i]
        if width > 0.0:
            inverse[i * n + i] = 1.0 / (number[STIFFNESS] * n) / (width * width)
    counter[UPDATES] = 0


@inlined
def _update_inverse(
    width: Floats,
    counter: Integers,
    inverse: Floats,
    step: Floats,
    change: Floats,
    mapped: Floats,
) -> None:
    """Update the inverse so that it maps the change of the gradient to the step.

    ``mapped`` is memory for what it maps the change to.
    """
    n = len(step)
    curved, length, turned = dot(step, change), 0.0, 0.0
    for i in range(n):
        if width[i] > 0.0:
            length += (width[i] * step[i]) ** 2
            turned += (change[i] / width[i]) ** 2
    if not curved > _CURVED * math.sqrt(length) * math.sqrt(turned):
        return
    for i in range(n):
        mapped[i] = 0.0
        for j in range(n):
            mapped[i] += inverse[i * n + j] * change[j]
    stretched = dot(change, mapped)
    if counter[UPDATES] == 0 and stretched > 0.0:
        # The first inverse knows the shape but not the size (Nocedal and Wright, equation 6.20).
        factor = curved / stretched
        for i in range(n * n):
            inverse[i] *= factor
        for i in range(n):
            mapped[i] *= factor
        stretched = curved
    ratio = (1.0 + stretched / curved) / curved
    for i in range(n):
        for j in range(n):
            inverse[i * n + j] += ratio * step[i] * step[j]
            inverse[i * n + j] -= (mapped[i] * step[j] + step[i] * mapped[j]) / curved
    counter[UPDATES] += 1
