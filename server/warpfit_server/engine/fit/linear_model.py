"""The sum of squares near a point as a function of the step: its minimum, and what it promises.

Near a point x the residuals r change by J h with the step h. The model |r + J h|^2 is minimised
inside the bounds (`solve_step`), with a damping for Levenberg-Marquardt, and without one where a
search asks whether it has converged (`is_minimum`). That is one idea for both methods:

    the minimum of the undamped model inside the bounds promises to take off no more of the loss
    than the square of `SearchLimits.flat`, or than rounding errors explain

The share of the loss that the model promises is the square of the cosine between r and its
projection on the span of the columns of the parameters that may move. It depends neither on units
nor on constants in the loss. For a row loss l other than squares, r is half of the derivative of
l by the prediction, divided by the weight.

At a minimum with residuals the columns may be parallel, as those of `exp(p1*x) + exp(p2*x)` are
where p1 = p2. There the second derivatives of the residuals make the minimum, and the model knows
nothing of them: it promises much by a long step along which the loss rises. A search that is stuck
there believes the steps that were refused. Of each the loss at both ends and the slope at x are
known, and so the parabola through them. If no parabola descends by more than rounding errors, and
no single column lowers the loss, it is a minimum. More than that may lead along a curved valley.

The curvature J^T W J, of the normal equations, squares the condition of the Jacobian J: where its
columns are nearly parallel, as those of polynomials far from 0, it does not hold the digits that
tell them apart. There the answer of `is_minimum` is doubtful, and a search asks for an orthogonal
factor of J (`absorb`). The factorisation W^1/2 J = Q R does hold them. Householder's reflections
work R up block of rows by block of rows (Golub and Van Loan, "Matrix Computations", 4th edition,
2013, section 5.2), always in the order of the rows, so that the bits depend neither on threads nor
on how many rows are given at a time.

Parameters that a program is linear in are damped only where steps have been refused for long;
`mark_linear` finds them from the operators' derivatives. An operator is linear in an operand if the
derivative by it mentions neither that operand nor the result: the table says ``b`` for the first
operand of ``a * b``, and ``1 / b`` for that of ``a / b``. Where the derivative by one operand
mentions another one with parameters, as in ``p1 * p2``, the program is linear in either but not in
both, and the operand with more linear parameters is chosen. So a program is linear in all marked
parameters together.

Matrices are small, and mostly packed lower triangles: element (i, j), j <= i, stands at
``i (i + 1) / 2 + j``.
"""

from __future__ import annotations

import ast
import math
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit.ops import FIRST_OPERATOR, OPERATORS, PARAMETER
from warpfit_server.engine.fit.searches import (
    DAMPING,
    FREE,
    GROWTH,
    INITIAL,
    LINEAR,
    LOWER,
    NATURAL,
    PIVOT,
    PROMISE,
    REFUSED,
    RIGHT,
    SCALE,
    UPPER,
    Floats,
    Integers,
    SearchLimits,
)
from warpfit_server.engine.native import numba_cache
from warpfit_server.engine.native.intrinsics import inlined, uncounted

#: Rows that are worked into a factor at a time.
BLOCK: Final = 64
#: Relative increase of the curvature's diagonal, for parameters with the same effect, above the
#: rounding errors of the sums, which would else make long steps of no direction; in a test
#: whether columns of float32, whose own rounding errors differ, can lower the loss; and with the
#: orthogonal factor, whose columns are rounded to float64: usually, and so much that only what is
#: well above these rounding errors counts.
RIDGE: Final = 1e-13
_RIDGE_IN_FLOAT32: Final = 1e-11
RIDGE_OF_FACTOR: Final = 1e-30
_RIDGE_ABOVE_NOISE: Final = 1e-26
#: Squared sine of the angle between a column and those before it, below which the curvature holds
#: too few digits of it.
ILL_CONDITIONED: Final = 1e-11
#: Part of a column outside the span of others that may be no more than rounding errors: some units
#: in the last place.
_ROUNDING_OF_COLUMN: Final = 2.0**-48
#: Least relative part of a column outside the span of the linear parameters' columns.
_INDEPENDENT: Final = 1e-13
#: Least cosine between residuals and a column for which a parameter leaves its bound.
_LEAST_RELEASE: Final = 1e-13
#: Steps refused in a row after which linear parameters are damped, too.
_PATIENCE: Final = 12
#: Most of the target's variation that rounding errors of the parameters may hide.
_HIDDEN: Final = 1e-2
_HIDDEN_IN_FLOAT64: Final = 1e-6
#: Roundings of residuals that are no more than noise.
ROUNDINGS: Final = 64.0
#: Roundings of each parameter that values inherit.
_PARAMETER_ROUNDINGS: Final = 8.0
#: Least move of the values, relative to the residuals, by which a parameter has an effect: that by
#: a change of the parameter by itself or its natural scale, whichever is larger.
_LEAST_EFFECT: Final = 1e-9
#: Relative part of a column outside the span of others below which nothing is known of it, and the
#: squared sine of another one below which a lost one may be no sum of others.
_LOST: Final = 2.0**-44
_NEARLY_DEPENDENT: Final = 1e-12
#: Attempts to make a system positive definite by more damping.
_ATTEMPTS: Final = 100

# Roles of a parameter in a step.
STAYS: Final = 0  # fixed, or without effect
MOVES: Final = 1
_AT_LOWER: Final = 2
_AT_UPPER: Final = 3

#: Columns of `operator_table`: arity, then for each operand the operands that its derivative reads.
_ARITY: Final = 0
_READS: Final = 1
#: A bit for each operand that a derivative reads; all bits if the operator is not linear in it.
_EVERYTHING: Final = 7
#: Operators with the derivative of a linear one, but for jumps.
_JUMPING: Final = frozenset({"mod"})
#: Columns of a node: tokens of its subtree; parameters below that it is linear in; a bit that says
#: whether there are any parameters below, then a bit for each chosen operand, in which it is taken
#: for linear; whether the program is linear in the node; the nodes of the operands.
_SIZE: Final = 0
_LINEAR: Final = 1
_CHOSEN: Final = 2
_PASSES: Final = 3
_ROOTS: Final = 4
COLUMNS: Final = 7

# ---------------------------------------------------------------- linear algebra of small matrices


@inlined
def factorise(a: Floats, first: int, stop: int, n: int, cancelled: NDArray[np.uint8]) -> bool:
    """Replace columns of a symmetric matrix by those of its Cholesky factor.

    The rest, from column ``stop`` on, becomes the Schur complement of the columns before it.

    Args:
        a: [n (n + 1) / 2]; the columns before ``first`` have been replaced.
        first: first column to replace.
        stop: end of the columns to replace.
        n: size of the matrix.
        cancelled: [1]; another number than 0 ends the factorisation.

    Returns:
        False if the matrix is not positive definite, or it was cancelled; what ``a`` holds is then
        undefined.
    """
    for j in range(first, stop):
        pivot = a[j * (j + 1) // 2 + j]
        if cancelled[0] or not (pivot > 0.0 and math.isfinite(pivot)):
            return False
        root = math.sqrt(pivot)
        a[j * (j + 1) // 2 + j] = root
        for i in range(j + 1, n):
            row = i * (i + 1) // 2
            a[row + j] /= root
            for k in range(j + 1, i + 1):
                a[row + k] -= a[row + j] * a[k * (k + 1) // 2 + j]
    return True


@inlined
def solve(factor: Floats, b: Floats) -> None:
    """Replace ``b`` by the solution of the system whose Cholesky factor is given."""
    n = len(b)
    for i in range(n):
        row = i * (i + 1) // 2
        rest = b[i]
        for k in range(i):
            rest -= factor[row + k] * b[k]
        b[i] = rest / factor[row + i]
    for reverse in range(n):
        i = n - 1 - reverse
        rest = b[i]
        for k in range(i + 1, n):
            rest -= factor[k * (k + 1) // 2 + i] * b[k]
        b[i] = rest / factor[i * (i + 1) // 2 + i]


@inlined
def element(a: Floats, i: int, j: int) -> float:
    """Return element (i, j) of a symmetric matrix."""
    value: float = a[i * (i + 1) // 2 + j] if i >= j else a[j * (j + 1) // 2 + i]
    return value


@inlined
def reflect(columns: Floats, rows: int, j: int, count: int) -> None:
    """Make a column zero below row ``j`` by a reflection of all columns from it on (Householder).

    Args:
        columns: [count rows], column by column.
        rows: length of each.
        j: the column.
        count: number of columns.
    """
    first = j * rows
    below = 0.0
    for row in range(j + 1, rows):
        below += columns[first + row] ** 2
    if below == 0.0:
        return
    head = columns[first + j]
    length = math.copysign(math.sqrt(head * head + below), head)
    pivot = head + length
    scale = 2.0 / (pivot * pivot + below)
    for k in range(j + 1, count):
        other = k * rows
        share = pivot * columns[other + j]
        for row in range(j + 1, rows):
            share += columns[first + row] * columns[other + row]
        share *= scale
        columns[other + j] -= share * pivot
        for row in range(j + 1, rows):
            columns[other + row] -= share * columns[first + row]
    columns[first + j] = -length


@inlined
def quadratic(a: Floats, h: Floats) -> float:
    """Return h^T A h."""
    total = 0.0
    for i in range(len(h)):
        row = i * (i + 1) // 2
        line = 0.0
        for j in range(i):
            line += a[row + j] * h[j]
        total += h[i] * (2.0 * line + a[row + i] * h[i])
    return total


@inlined
def all_finite(values: Floats) -> bool:
    """Return whether no element is NaN or infinite."""
    finite = True
    for i in range(len(values)):
        finite = finite and math.isfinite(values[i])
    return finite


@inlined
def dot(a: Floats, b: Floats) -> float:
    """Return the sum of products."""
    total = 0.0
    for i in range(len(a)):
        total += a[i] * b[i]
    return total


@inlined
def difference(a: Floats, b: Floats, out: Floats) -> None:
    """Fill ``out`` with a - b."""
    for i in range(len(out)):
        out[i] = a[i] - b[i]


@inlined
def copy(source: Floats, target: Floats) -> None:
    """Copy all numbers, without the memory that an assignment to a slice may allocate."""
    for i in range(len(source)):
        target[i] = source[i]


# ------------------------------------------------------------------------------- orthogonal factors


# It allocates nothing, so that references need not be counted.
@numba_cache.njit(nogil=True, error_model="numpy", _nrt=False)  # type: ignore[untyped-decorator]
def absorb(
    jacobian: Floats,
    values: Floats,
    target: Floats,
    weights: Floats,
    counts: Integers,
    scratch: Floats,
    factors: Floats,
    rights: Floats,
    cancelled: NDArray[np.uint8],
) -> None:
    """Work rows into the factors of some searches.

    Args:
        jacobian: derivatives by the parameters of all searches, [P, rows].
        values: [searches, rows].
        target: [rows].
        weights: [rows], or empty for 1 everywhere.
        counts: parameters of each search, [searches].
        scratch: memory, [most parameters of a search + 2, BLOCK].
        factors: R of each search, [n, n], row by row; flat. Of no rows it is 0.
        rights: Q^T W^1/2 times the residuals, [P]. Of no rows it is 0.
        cancelled: [1]; another thread writes another number than 0 to end this early.
    """
    column = square = 0
    for s in range(len(counts)):
        n = counts[s]
        factor, right = factors[square : square + n * n], rights[column : column + n]
        block, roots = scratch[: n + 1], scratch[n + 1]
        for first in range(0, len(target), BLOCK):
            if cancelled[0]:
                return
            rows = min(BLOCK, len(target) - first)
            own = slice(first, first + rows)
            for j in range(n):
                copy(jacobian[column + j, own], block[j])
            difference(values[s, own], target[own], block[n, :rows])
            for row in range(rows):
                roots[row] = math.sqrt(weights[first + row]) if len(weights) else 1.0
            for j in range(n + 1):
                elements = block[j]
                for row in range(rows):
                    # Where a row has no weight, its values need not be finite.
                    weighted = roots[row] * elements[row]
                    elements[row] = weighted if roots[row] > 0.0 else 0.0
                for row in range(rows, BLOCK):
                    elements[row] = 0.0
            _absorb_block(factor, right, block)
        column, square = column + n, square + n * n


@uncounted
def _absorb_block(factor: Any, right: Any, block: Any) -> None:
    """Make a block zero by reflections with the rows of the factor."""
    n = len(right)
    for j in range(n):
        own = block[j]
        below = _product(own, own)
        if below == 0.0:
            continue
        head = factor[j * n + j]
        length = math.copysign(math.sqrt(head * head + below), head)
        pivot = head + length
        scale = 2.0 / (pivot * pivot + below)
        factor[j * n + j] = -length
        for k in range(j + 1, n + 1):
            other = block[k]
            above = factor[j * n + k] if k < n else right[j]
            share = scale * (pivot * above + _product(own, other))
            if k < n:
                factor[j * n + k] -= share * pivot
            else:
                right[j] -= share * pivot
            for row in range(BLOCK):
                other[row] -= share * own[row]


@uncounted
def _product(a: Any, b: Any) -> float:
    """Return the product of two columns, as four sums, because each addition waits for another."""
    first = second = third = fourth = 0.0
    for row in range(0, BLOCK, 4):
        first += a[row] * b[row]
        second += a[row + 1] * b[row + 1]
        third += a[row + 2] * b[row + 2]
        fourth += a[row + 3] * b[row + 3]
    return float((first + second) + (third + fourth))


# ------------------------------------------------------------------------------- linear parameters


@cache
def operator_table() -> NDArray[np.int64]:
    """Return the arity and the operands that each derivative reads, by operator code; [256, 4]."""
    table = np.zeros((256, _READS + 3), dtype=np.int64)
    for operator in OPERATORS.values():
        table[operator.code, _ARITY] = operator.arity
        for operand, text in enumerate(operator.derivative):
            tree = ast.parse(text, mode="eval")
            names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
            bends = operator.name in _JUMPING or text.strip() == "0"
            reads = sum(1 << place for place, name in enumerate("abc") if name in names)
            if bends or "r" in names or "abc"[operand] in names:
                reads = _EVERYTHING
            table[operator.code, _READS + operand] = reads
    return table


# It allocates nothing, so that references need not be counted.
@numba_cache.njit(nogil=True, error_model="numpy", _nrt=False)  # type: ignore[untyped-decorator]
def mark_linear(
    codes: NDArray[np.uint8],
    values: Floats,
    starts: NDArray[np.int64],
    parameter_starts: NDArray[np.int64],
    table: NDArray[np.int64],
    nodes: NDArray[np.int64],
    linear: Floats,
) -> None:
    """Set ``linear`` to 0 for the parameters that their checked programs are not linear in.

    The starts of programs and of parameters end with the total; ``table`` is `operator_table`,
    ``nodes`` is scratch memory, [tokens of the longest program, COLUMNS].
    """
    for program in range(len(starts) - 1):
        first, last = starts[program], starts[program + 1] - 1
        for token in range(first, last + 1):
            _count(codes, first, token, table, nodes)
        nodes[last - first, _PASSES] = 1
        for token in range(last, first - 1, -1):
            node = nodes[token - first]
            if codes[token] >= FIRST_OPERATOR:
                place = token - first - 1
                for operand in range(table[codes[token], _ARITY] - 1, -1, -1):
                    nodes[place, _PASSES] = node[_PASSES] & (node[_CHOSEN] >> (1 + operand) & 1)
                    place -= nodes[place, _SIZE]
            elif codes[token] == PARAMETER and node[_PASSES] == 0:
                linear[parameter_starts[program] + np.int64(values[token])] = 0.0


@uncounted
def _count(codes: Any, first: int, token: int, table: Any, nodes: Any) -> None:
    """Choose the operands that a node is treated as linear in, and count their parameters."""
    node, code = nodes[token - first], codes[token]
    if code < FIRST_OPERATOR:
        node[_SIZE], node[_LINEAR] = 1, code == PARAMETER
        node[_CHOSEN] = code == PARAMETER
        return
    arity, place = table[code, _ARITY], token - first - 1
    roots = node[_ROOTS:COLUMNS]
    node[_SIZE], node[_LINEAR], node[_CHOSEN] = 1, 0, 0
    parametric = 0
    for operand in range(arity - 1, -1, -1):
        roots[operand] = place
        node[_SIZE] += nodes[place, _SIZE]
        parametric |= (nodes[place, _CHOSEN] & 1) << operand
        place -= nodes[place, _SIZE]
    chosen, tried = 0, 0
    for _ in range(arity):
        best = -1
        for operand in range(arity):
            more = best < 0 or nodes[roots[operand], _LINEAR] > nodes[roots[best], _LINEAR]
            if not tried >> operand & 1 and more:
                best = operand
        tried |= 1 << best
        reads = table[code, _READS + best]
        clash = reads & (1 << best | chosen)
        for operand in range(arity):
            clash = clash or (chosen >> operand & 1 and table[code, _READS + operand] >> best & 1)
        if nodes[roots[best], _LINEAR] and not clash:
            chosen |= 1 << best
            node[_LINEAR] += nodes[roots[best], _LINEAR]
    node[_CHOSEN] = (parametric != 0) | chosen << 1


# --------------------------------------------------------------------------------------- the model


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
    """Its gradient there, [n]."""
    curvature: Any
    """J^T W J, [n (n + 1) / 2]."""
    factor: Any
    """R of the orthogonal factorisation of W^1/2 J, [n n] row by row, if ``factored``; row RIGHT of
    the search's vectors then has Q^T W^1/2 times the residuals."""
    factored: bool
    loss: float
    """Sum of squares at the point, of the row losses' halved derivatives."""
    values: float
    """Sum of squares in the units of the values, which is another one only of other losses."""


@inlined
def has_effect(
    vector: Floats, point: int, i: int, column: float, slope: float, loss: float, values: float
) -> bool:
    """Whether a parameter moves the values near a point.

    One that does not is left out of steps, which would be quotients by next to nothing, unless the
    program is linear in it, and takes part again by a perturbation (`starts`).

    Args:
        vector: `Searches.vectors` of one search.
        point: row of the point.
        i: the parameter.
        column: length of its column of the Jacobian, 0 where its squares vanish.
        slope: derivative of the loss by it.
        loss: see `Model`.
        values: see `Model`.
    """
    reach = max(abs(vector[point, i]), vector[NATURAL, i])
    # No column is shorter than what explains the slope.
    least = 0.5 * abs(slope) / math.sqrt(loss) if loss > 0.0 else 0.0
    return bool(max(column, least) * reach > _LEAST_EFFECT * math.sqrt(values))


@inlined
def are_usable(
    vector: Floats,
    point: int,
    loss: float,
    values: float,
    gradient: Floats,
    curvature: Floats,
) -> bool:
    """Whether all numbers are finite, and no square of a column that matters has vanished."""
    finite = math.isfinite(loss) and all_finite(gradient)
    if not (finite and all_finite(curvature)):
        return False
    for i in range(len(gradient)):
        vanished = curvature[i * (i + 1) // 2 + i] == 0.0 and gradient[i] != 0.0
        if vanished and has_effect(vector, point, i, 0.0, gradient[i], abs(loss), values):
            return False
    return True


@inlined
def damp(number: Floats) -> None:
    """Raise the damping, the next time by more."""
    number[DAMPING] *= number[GROWTH]
    number[GROWTH] *= 2.0


@inlined
def find_roles(vector: Floats, model: Model, space: Workspace) -> None:
    """Classify each parameter at the beginning of a step: it stays, moves, or is at a bound."""
    for i in range(vector.shape[1]):
        x, slope = vector[model.point, i], model.gradient[i]
        column = math.sqrt(model.curvature[i * (i + 1) // 2 + i])
        moves = vector[FREE, i] != 0.0 and column > 0.0
        is_linear = vector[LINEAR, i] != 0.0
        effect = has_effect(vector, model.point, i, column, slope, model.loss, model.values)
        moves = moves and (is_linear or effect)
        space.role[i] = STAYS
        if moves and vector[LOWER, i] < vector[UPPER, i]:
            space.role[i] = MOVES
            if x <= vector[LOWER, i] and slope > 0.0:
                space.role[i] = _AT_LOWER
            elif x >= vector[UPPER, i] and slope < 0.0:
                space.role[i] = _AT_UPPER


@inlined
def steepest_cosine(vector: Floats, model: Model, space: Workspace) -> float:
    """Return the greatest cosine between the residuals and the column of a parameter that moves."""
    steepest = 0.0
    for i in range(vector.shape[1]):
        if space.role[i] == MOVES and model.loss > 0.0:
            diagonal = model.curvature[i * (i + 1) // 2 + i]
            cosine = 0.5 * abs(model.gradient[i]) / math.sqrt(diagonal) / math.sqrt(model.loss)
            steepest = max(steepest, cosine)
    return steepest


@inlined
def is_exact(vector: Floats, number: Floats, model: Model, limits: SearchLimits) -> bool:
    """Whether the residuals are no more than rounding errors of the target.

    If that is 0, they are compared with the residuals at the start, and their squares with those of
    the parameters' contributions to the values, because a start may be as far away as it likes.
    """
    epsilon = ROUNDINGS * (2.0**-24 if limits.single else 2.0**-53)
    scale = limits.target
    if not scale > 0.0:
        for i in range(vector.shape[1]):
            scale += _contribution(vector, model, i)
        scale = min(scale / epsilon, number[INITIAL])
    return bool(model.loss <= epsilon * epsilon * scale)


@inlined
def _contribution(vector: Floats, model: Model, i: int) -> float:
    """Return the square of what a parameter contributes to the values, roughly."""
    length = math.sqrt(model.curvature[i * (i + 1) // 2 + i])
    return float((length * vector[model.point, i]) ** 2)


@inlined
def is_minimum(
    vector: Floats,
    number: Floats,
    counter: Integers,
    model: Model,
    is_stuck: bool,
    limits: SearchLimits,
    space: Workspace,
) -> Any:
    """Whether a search may say that it has converged, see above.

    Where the search ``is_stuck``, a decrease that is lost in the rounding errors of the loss is
    none, and neither is one that the rounding errors of the factor's columns may promise, or that
    the steps refused until then deny. In float32 these may be refused for rounding errors alone.

    Returns:
        Whether it is a minimum, and whether that is doubtful because the curvature holds too few
        digits. The columns of float32 have no more digits than it.
    """
    n, ridge = vector.shape[1], RIDGE
    if model.factored:
        ridge = _RIDGE_ABOVE_NOISE if is_stuck else RIDGE_OF_FACTOR
    if limits.single:
        ridge = max(ridge, _RIDGE_IN_FLOAT32)
    find_roles(vector, model, space)
    asks = is_stuck and not limits.single and number[PROMISE] > 0.0
    asks = asks and steepest_cosine(vector, model, space) <= limits.flat
    # A search that is stuck has just asked without the ridge, which would hide a lost column.
    is_lost = is_stuck and model.factored and number[PIVOT] == 0.0
    pivot = solve_step(vector, number, counter, model, 0.0, ridge, space)
    number[PIVOT] = 0.0 if is_lost else pivot
    is_lost = model.factored and number[PIVOT] == 0.0
    rounding = 2.0**-24 if limits.single else 2.0**-53
    noise = 0.0
    for i in range(n):
        if space.role[i] != STAYS:
            noise += _contribution(vector, model, i)
    noise *= (_PARAMETER_ROUNDINGS * rounding) ** 2
    # The loss is in the units of the row losses' slopes, which are those of the values for squares.
    if model.values > 0.0:
        noise *= model.loss / model.values
    hidden = _HIDDEN * limits.variation
    if not limits.single:
        hidden = max(_HIDDEN_IN_FLOAT64 * limits.variation, _HIDDEN * model.loss)
    if noise > hidden:
        noise = 0.0
    noise += (ROUNDINGS * rounding) ** 2 * limits.target
    allowed = max(limits.flat * limits.flat * model.loss, noise)
    if is_stuck:
        allowed = max(allowed, 2.0 * rounding * math.sqrt(model.loss * limits.target))
    doubtful = pivot < ILL_CONDITIONED and not model.factored and not limits.single
    believed = promised_decrease(vector, model, space.step[:n]) <= allowed
    believed = believed or (asks and number[PROMISE] <= ROUNDINGS * rounding * model.loss)
    return bool(believed and not is_lost), bool(doubtful)


@inlined
def promised_decrease(vector: Floats, model: Model, h: Floats) -> float:
    """Return the decrease of the loss that the model predicts."""
    n = len(h)
    if not model.factored:
        # The gradient is 2 J^T W r.
        return -dot(model.gradient, h) - quadratic(model.curvature, h)
    decrease = 0.0
    for i in range(n):
        turned = 0.0
        for j in range(i, n):
            turned += model.factor[i * n + j] * h[j]
        decrease -= turned * (2.0 * vector[RIGHT, i] + turned)
    return decrease


@inlined
def solve_step(
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
        The least pivot of the systems, relative to the diagonal; with the orthogonal factor see
        `_minimise_by_factor`.
    """
    n, least, pivot = vector.shape[1], 1.0, 1.0
    h, target, role = space.step[:n], space.target[:n], space.role[:n]
    for i in range(n):
        h[i] = 0.0
    for _ in range(4 * n + 4):
        if space.cancelled[0]:
            break
        order = _order(vector[LINEAR], role, space.order)
        if model.factored:
            pivot = _minimise_by_factor(vector, counter, model, order, damping, ridge, space)
        else:
            pivot = _minimise(vector, number, counter, model, order, damping, ridge, space)
        least = min(least, pivot)
        share, stopped, at = 1.0, -1, _AT_LOWER
        for i in range(n):
            if role[i] == MOVES:
                x = vector[model.point, i]
                lowest, highest = vector[LOWER, i] - x, vector[UPPER, i] - x
                if target[i] < lowest and (lowest - h[i]) / (target[i] - h[i]) < share:
                    share, stopped, at = (lowest - h[i]) / (target[i] - h[i]), i, _AT_LOWER
                elif target[i] > highest and (highest - h[i]) / (target[i] - h[i]) < share:
                    share, stopped, at = (highest - h[i]) / (target[i] - h[i]), i, _AT_UPPER
        for i in range(n):
            if role[i] == MOVES:
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
                pull /= math.sqrt(model.curvature[i * (i + 1) // 2 + i] * model.loss)
                if pull > strongest:
                    strongest, released = pull, i
        if released < 0:
            break
        role[released] = MOVES
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
        slope += element(model.curvature, i, j) * h[j]
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
            if role[j] != MOVES and h[j] != 0.0:
                b[i] -= element(curvature, place, j) * h[j]
        b[i] /= unit[i]
    system = space.system[: n * (n + 1) // 2]
    damps = _damps_linear(counter, n, linear)
    for _ in range(_ATTEMPTS):
        if space.cancelled[0]:
            return 1.0
        for i in range(n):
            row = i * (i + 1) // 2
            for j in range(i + 1):
                entry = element(curvature, order[i], order[j])
                system[row + j] = entry / unit[i] / unit[j]
            system[row + i] += ridge
            if i < linear and damps:
                system[row + i] += damping
        if not factorise(system, 0, linear, n, space.cancelled):
            ridge *= 10.0
            continue
        for i in range(linear, n):
            place, row = order[i], i * (i + 1) // 2
            own = max(system[row + i], _INDEPENDENT) * unit[i] * unit[i]
            if damping > 0.0:
                vector[SCALE, place] = max(vector[SCALE, place], own)
            system[row + i] += damping * vector[SCALE, place] / unit[i] / unit[i]
        if factorise(system, linear, n, n, space.cancelled):
            break
        if damping > 0.0:
            damp(number)
            damping = number[DAMPING]
        else:
            ridge *= 10.0
    solve(system, b)
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
) -> float:
    """Do what `_minimise` does by Householder's reflections of the factor and the damping.

    The columns' condition is not squared. Each moving parameter has a row of its own for damping
    and ridge, below the factor. A parameter whose column lies in the span of those before it, up to
    rounding errors, stays where it is: its step would be a quotient of rounding errors. A linear
    one that is not damped goes to 0, so that the values are not the differences of huge terms.

    Returns:
        0 if a column was lost in rounding errors beside others that are nearly dependent, as the
        high powers of a column far from 0 are: it may be no sum of theirs, and what it would take
        off the loss is not known. Else 1.
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
            if role[j] != MOVES:
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
    least, lost = 1.0, False
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
        if outside < _LOST * _LOST:
            lost = True
        else:
            least = min(least, outside)
        if outside < _ROUNDING_OF_COLUMN * _ROUNDING_OF_COLUMN:
            for row in range(j, rows):
                columns[j * rows + row] = 0.0
            columns[j * rows + parameters + j], columns[n * rows + parameters + j] = 1.0, 0.0
            if j < linear and damping > 0.0 and not damps:
                columns[n * rows + parameters + j] = -unit[j] * vector[model.point, order[j]]
        reflect(columns, rows, j, n + 1)
    for reverse in range(n):
        i = n - 1 - reverse
        rest = columns[n * rows + i]
        for j in range(i + 1, n):
            rest -= columns[j * rows + i] * columns[n * rows + j]
        columns[n * rows + i] = rest / columns[i * rows + i]
    for i in range(n):
        space.target[order[i]] = columns[n * rows + i] / unit[i]
    return 0.0 if lost and least < _NEARLY_DEPENDENT else 1.0


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
            if role[i] == MOVES and (linear[i] == 0.0) == nonlinear:
                order[n] = i
                n += 1
        if not nonlinear:
            count = n
    return n, count
