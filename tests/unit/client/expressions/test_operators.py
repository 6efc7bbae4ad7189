"""The operators: their codes, values worked out by hand, and derivatives."""

import math
from functools import partial

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.engines.operators import edge_values, programs
from warpfit import ops
from warpfit.expressions import reference
from warpfit.expressions.reference import differentiate, evaluate_program
from warpfit.ir import Program
from warpfit.ops import KERNEL_FUNCTIONS, OPERATORS, VARIABLE, Operator

#: Operands and result, worked out without the table; NaN and infinities where NumPy has them.
EXAMPLES = """
add: 1.5 2 = 3.5, inf -inf = nan; sub: 1.5 2 = -0.5; mul: 1.5 2 = 3, 0 inf = nan;
div: 3 2 = 1.5, 1 0 = inf, -1 0 = -inf, 0 0 = nan;
pow: -2 3 = -8, -2 0.5 = nan, nan 0 = 1, -2 -1 = -0.5, -inf 0.5 = inf, -inf 3 = -inf, -inf -0.5 = 0;
neg: 2 = -2; abs: -2 = 2; log: e = 1, 0 = -inf, -1 = nan; exp: 1 = e, 1000 = inf;
sqrt: 9 = 3, -1 = nan; inv: 4 = 0.25, 0 = inf, -0 = -inf; square: -3 = 9; cube: -2 = -8;
cbrt: -8 = -2; min: 1 2 = 1, nan 1 = nan, 1 nan = nan; max: 1 2 = 2, nan 1 = nan, 1 nan = nan;
sin: pi/6 = 0.5, inf = nan; cos: pi/3 = 0.5, inf = nan; tan: pi/4 = 1, inf = nan;
asin: 0.5 = pi/6, 2 = nan; acos: 0.5 = pi/3, 2 = nan; atan: 1 = pi/4, inf = pi/2;
atan2: 1 -1 = 3*pi/4, 0 -1 = pi, -0 -1 = -pi; sinh: log(2) = 0.75; cosh: log(2) = 1.25;
tanh: log(2) = 0.6, inf = 1; log1p: 1e-20 = 1e-20, -1 = -inf, -2 = nan;
expm1: 1e-20 = 1e-20, -inf = -1; log2: 8 = 3; log10: 1000 = 3; floor: -1.5 = -2; ceil: -1.5 = -1;
sign: -3 = -1, 0 = 0, nan = nan; lt: 1 2 = 1, 2 2 = 0, nan 2 = 0; le: 2 2 = 1, 3 2 = 0, nan nan = 0;
gt: 2 1 = 1, 2 2 = 0, nan 2 = 0; ge: 2 2 = 1, 1 2 = 0, nan nan = 0;
eq: 2 2 = 1, 0 -0 = 1, nan nan = 0; ne: 2 2 = 0, nan nan = 1; and: 2 -1 = 1, 2 0 = 0, nan 1 = 1;
or: 0 0.5 = 1, 0 -0 = 0, nan 0 = 1; not: 0 = 1, 0.5 = 0, nan = 0;
where: 2 5 6 = 5, 0 5 6 = 6, nan 5 6 = 5; fma: 2 3 4 = 10;
aq: 6 sqrt(3) = 3, 5 0 = 5, 1 1e200 = 1e-200; logabs: -e = 1, 0 = -inf; sqrtabs: -9 = 3;
powabs: -4 0.5 = 2; logistic: 0 = 0.5, -1000 = 0, 1000 = 1, log(3) = 0.75;
erf: 0.5 = 0.5204998778130465, inf = 1, nan = nan; relu: -2 = 0, 3 = 3, nan = nan;
pdiv: 6 2 = 3, 6 0.001 = 1, 6 -0.0005 = 1; plog: -e = 1, 0.001 = 0; pinv: -4 = -0.25, 0.001 = 0;
zdiv: 6 2 = 3, 6 0 = 1, 0 0 = 1;
gamma: 5 = 24, -0.5 = -2*sqrt(pi), 171.7 = inf, 0 = inf, -0 = -inf, -2 = nan,
-inf = nan, 5e-324 = inf, -500.5 = 0;
lgamma: 5 = log(24), -0.5 = log(4*pi)/2, -2 = inf, 0 = inf, -inf = inf, 1e306 = inf, nan = nan;
mod: 5 0.1 = 0.09999999999999973, 1e300 7 = 1, -1 3 = 2, 1 -3 = -2, -5 inf = inf, 5 inf = 5,
1 0 = nan, inf 1 = nan;
round: 2.5 = 2, -1.5 = -2, 0.5 = 0, inf = inf, nan = nan;
erfc: 0 = 1, 10 = 2.088487583762545e-45, -inf = 2
"""


def number(text):
    try:
        return float(text)
    except ValueError:
        return eval(text, dict(vars(math)))


def test_operators_by_hand():
    examples = dict(each.split(":") for each in EXAMPLES.strip().replace("\n", " ").split("; "))
    assert examples.keys() == OPERATORS.keys()
    for name, text in examples.items():
        for example in text.split(","):
            *operands, wanted = map(number, example.replace("=", " ").split())
            program = Program.apply(name, *(Program.variable(i) for i in range(len(operands))))
            got = reference.evaluate_program(program, np.array(operands)[:, np.newaxis])
            np.testing.assert_allclose(got, [wanted], rtol=4e-16, err_msg=f"{name}: {example}")


@pytest.mark.parametrize("name", [row.name for row in OPERATORS.values() if row.arity == 2])
def test_numbers_count_as_columns(name):
    """NumPy has other functions for a number than for columns: the square root for x^0.5."""
    x1, x2, edges = Program.variable(0), Program.variable(1), np.array(edge_values())

    def assert_same(got, expected):
        np.testing.assert_allclose(got, expected, rtol=1e-15)
        is_number = ~np.isnan(expected)
        np.testing.assert_array_equal(np.signbit(got)[is_number], np.signbit(expected)[is_number])

    for number in edges[::2]:
        column, fixed = np.full_like(edges, number), Program.constant(number)
        for pair, columns in (((x1, fixed), [edges, column]), ((fixed, x1), [column, edges])):
            expected = reference.evaluate_program(Program.apply(name, x1, x2), columns)
            one = Program.apply(name, *pair)
            assert_same(reference.evaluate_program(one, [edges]), expected)
            rows = [reference.evaluate_program(one, [edges[i : i + 1]])[0] for i in range(2)]
            assert_same(np.array(rows), expected[:2])
            with np.errstate(all="ignore"):
                assert_same(one.to_numpy()(edges[:, None]), expected)


def test_digamma_has_thirteen_digits():
    """But for its zeros, next to which the error is absolute."""
    rng = np.random.default_rng(0)
    near_poles = -rng.integers(0, 20, 300) + rng.choice([-1, 1], 300) * 10 ** rng.uniform(
        -9, -1, 300
    )
    sizes = 10.0 ** rng.uniform(-300, 300, 300)
    a = np.concatenate(
        [rng.uniform(-30, 30, 1000), near_poles, sizes, -(10 ** rng.uniform(0, 6, 99))]
    )
    exact = np.array([float(mpmath.digamma(x)) for x in a.tolist()])
    with np.errstate(all="ignore"):
        error = np.abs(ops.digamma(a) - exact) / np.maximum(np.abs(exact), 0.1)
    assert error.max() < 1e-13
    a = np.array([0.0, -0.0, -1.0, -7.0, -1e300, -np.inf, np.inf, np.nan, 5e-324, 1e308])
    wanted = [-np.inf, np.inf, 0.0, 0.0, 0.0, 0.0, np.inf, np.nan, -np.inf, np.log(1e308)]
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(ops.digamma(a), wanted, rtol=1e-15)


KERNEL_NAMESPACE = {
    **{name: getattr(np, name) for name in KERNEL_FUNCTIONS & set(dir(np))},
    **{name: getattr(ops, name) for name in ("erf", "erfc", "tgamma", "lgamma", "digamma")},
    **{"pow": ops.power, "select": np.where},
    **{"asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "atan2": np.arctan2},
}


def kernel(text, **operands):
    with np.errstate(all="ignore"):
        return np.asarray(eval(text, {**KERNEL_NAMESPACE, **operands}), dtype=np.float64)


def test_derivative_at_kinks_and_limits():
    for name, point, gradient in (
        *(("abs", (0.0,), (0,)), ("floor", (2.0,), (0,)), ("sqrtabs", (0.0,), (0,))),
        *(("min", (1.5, 1.5), (1, 0)), ("pow", (0.0, 0.0), (0, 0)), ("pow", (0.0, 1.0), (1, 0))),
        *(("pow", (-2.0, 0.0), (0, np.nan)), ("powabs", (0.0, 2.0), (0, 0))),
        *(("powabs", (-2.0, 3.0), (-12, 8 * np.log(2))), ("pdiv", (3.0, 0.0), (0, 0))),
        *(("zdiv", (3.0, 0.0), (0, 0)), ("pinv", (0.001,), (0,))),
        *(("where", (0.0, 5.0, 6.0), (0, 0, 1)), ("where", (np.nan, 5.0, 6.0), (0, 1, 0))),
        *(("gamma", (0.0,), (-np.inf,)), ("gamma", (-1.0,), (np.nan,)), ("lgamma", (-1.0,), (0,))),
        *(("lgamma", (0.0,), (-np.inf,)), ("lgamma", (np.inf,), (np.inf,))),
        *(("mod", (6.0, 3.0), (1, -2)), ("mod", (-1e300, 7.0), (1, 1e300 / 7))),
        *(("mod", (1.0, 0.1), (1, -9)), ("mod", (5.0, np.inf), (1, 0)), ("round", (2.5,), (0,))),
        *(("relu", (0.0,), (0,)), ("sign", (0.0,), (0,)), ("max", (1.5, 1.5), (1, 0))),
        *(("plog", (0.0,), (0,)), ("logistic", (1000.0,), (0,)), ("tanh", (1000.0,), (0,))),
    ):
        row = OPERATORS[name]
        operands = dict(zip(row.operands, map(np.float64, point), strict=True))
        r = kernel(row.kernel, **operands)
        got = [kernel(text, **operands, r=r) for text in row.derivative]
        np.testing.assert_allclose(got, gradient, rtol=1e-15)


def points(row: Operator) -> np.ndarray:
    """Operands at a distance from every kink and pole, where the operator is defined."""
    drawn = np.random.default_rng(row.code).uniform(-3, 3, size=(row.arity, 4000))
    kinks = drawn - 0.5 if row.name == "round" else drawn
    clear = (np.abs(kinks - np.round(kinks)) > 0.2).all(axis=0)
    if row.arity > 1:
        clear &= (np.abs(drawn[0] - drawn[1]) > 0.1) & (np.abs(drawn[1]) > 0.1)
    if row.name == "mod":
        quotient = drawn[0] / drawn[1]
        clear &= np.abs(quotient - np.round(quotient)) > 0.03 * (1 + abs(quotient)) / abs(drawn[1])
    if row.name == "tan":
        clear &= np.abs(np.cos(drawn[0])) > 0.3
    with np.errstate(all="ignore"):
        clear &= np.isfinite(row.numpy(*drawn)) & (np.abs(row.numpy(*drawn)) < 1e3)
    chosen = drawn[:, clear]
    assert chosen.shape[1] > 50
    return chosen


def applied(name: str) -> Program:
    return Program.apply(name, *(Program.variable(k) for k in range(OPERATORS[name].arity)))


def difference(function, at: np.ndarray, index: int, step: float) -> np.ndarray:
    """Central difference of order eight by ``at[index]``."""
    total = 0.0
    for distance, weight in ((1, 672), (2, -168), (3, 32), (4, -3)):
        for sign in (1, -1):
            shifted = at.copy()
            shifted[index] += sign * distance * step
            total = total + sign * weight * function(shifted)
    return total / (840 * step)


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_against_differences(name):
    row = OPERATORS[name]
    at, program = points(row), applied(name)
    _, slopes = differentiate(program, at, by=VARIABLE)
    for index in range(row.arity):
        want = difference(partial(evaluate_program, program), at, index, 0.004)
        defined = np.isfinite(want) & np.isfinite(slopes[index])
        assert defined.mean() > 0.4
        np.testing.assert_allclose(slopes[index][defined], want[defined], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", OPERATORS)
def test_finite_values_have_derivatives_that_are_numbers(name):
    """But for powers of negative numbers by their exponent."""
    arity = OPERATORS[name].arity
    indices = np.indices([6] * arity).reshape(arity, -1)
    columns = np.array([0.0, -0.0, 1.0, -1.0, 0.5, -2.0])[indices]
    values, slopes = differentiate(applied(name), columns, by=VARIABLE)
    if name == "pow":
        slopes[1, columns[0] < 0] = 0.0
    assert not np.isnan(slopes[:, np.isfinite(values)]).any()


SMOOTH = ("add", "sub", "mul", "neg", "sin", "cos", "atan", "tanh", "square", "aq", "logistic")


@given(programs(20, variables=2, parameters=2, operators=SMOOTH, constants=st.floats(-2, 2)))
def test_random_programs_against_differences(program):
    x = np.array([[0.3, -1.2, 0.7], [1.1, 0.4, -0.6]])
    p = np.array([0.8, -0.5])
    values, slopes = differentiate(program, x, p)
    np.testing.assert_array_equal(values, evaluate_program(program, x, p))
    assert slopes.shape == (2, 3)
    for index in range(2):
        want = difference(partial(evaluate_program, program, x), p, index, 1e-3)
        scale = 1 + np.abs(want)
        np.testing.assert_allclose(slopes[index] / scale, want / scale, rtol=1e-8, atol=1e-8)
