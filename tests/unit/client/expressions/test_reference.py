"""The NumPy reference, against values worked out by hand and scikit-learn's metrics."""

import math

import mpmath
import numpy as np
import pytest

from support.engines.operators import edge_values
from warpfit.expressions import reference, special
from warpfit.ir import Program
from warpfit.ops import OPERATORS

INF, NAN = math.inf, math.nan

#: Operands and result, worked out without the table; NaN and infinities where NumPy has them.
EXAMPLES = {
    "add": [((1.5, 2.0), 3.5), ((INF, -INF), NAN)],
    "sub": [((1.5, 2.0), -0.5)],
    "mul": [((1.5, 2.0), 3.0), ((0.0, INF), NAN)],
    "div": [((3.0, 2.0), 1.5), ((1.0, 0.0), INF), ((-1.0, 0.0), -INF), ((0.0, 0.0), NAN)],
    "pow": [
        *[((-2.0, 3.0), -8.0), ((-2.0, 0.5), NAN), ((NAN, 0.0), 1.0), ((-2.0, -1.0), -0.5)],
        *[((-INF, 0.5), INF), ((-INF, 3.0), -INF), ((-INF, -0.5), 0.0)],
    ],
    "neg": [((2.0,), -2.0)],
    "abs": [((-2.0,), 2.0)],
    "log": [((math.e,), 1.0), ((0.0,), -INF), ((-1.0,), NAN)],
    "exp": [((1.0,), math.e), ((1000.0,), INF)],
    "sqrt": [((9.0,), 3.0), ((-1.0,), NAN)],
    "inv": [((4.0,), 0.25), ((0.0,), INF), ((-0.0,), -INF)],
    "square": [((-3.0,), 9.0)],
    "cube": [((-2.0,), -8.0)],
    "cbrt": [((-8.0,), -2.0)],
    "min": [((1.0, 2.0), 1.0), ((NAN, 1.0), NAN), ((1.0, NAN), NAN)],
    "max": [((1.0, 2.0), 2.0), ((NAN, 1.0), NAN), ((1.0, NAN), NAN)],
    "sin": [((math.pi / 6,), 0.5), ((INF,), NAN)],
    "cos": [((math.pi / 3,), 0.5), ((INF,), NAN)],
    "tan": [((math.pi / 4,), 1.0), ((INF,), NAN)],
    "asin": [((0.5,), math.pi / 6), ((2.0,), NAN)],
    "acos": [((0.5,), math.pi / 3), ((2.0,), NAN)],
    "atan": [((1.0,), math.pi / 4), ((INF,), math.pi / 2)],
    "atan2": [((1.0, -1.0), 3 * math.pi / 4), ((0.0, -1.0), math.pi), ((-0.0, -1.0), -math.pi)],
    "sinh": [((math.log(2),), 0.75)],
    "cosh": [((math.log(2),), 1.25)],
    "tanh": [((math.log(2),), 0.6), ((INF,), 1.0)],
    "log1p": [((1e-20,), 1e-20), ((-1.0,), -INF), ((-2.0,), NAN)],
    "expm1": [((1e-20,), 1e-20), ((-INF,), -1.0)],
    "log2": [((8.0,), 3.0)],
    "log10": [((1000.0,), 3.0)],
    "floor": [((-1.5,), -2.0)],
    "ceil": [((-1.5,), -1.0)],
    "sign": [((-3.0,), -1.0), ((0.0,), 0.0), ((NAN,), NAN)],
    "lt": [((1.0, 2.0), 1.0), ((2.0, 2.0), 0.0), ((NAN, 2.0), 0.0)],
    "le": [((2.0, 2.0), 1.0), ((3.0, 2.0), 0.0), ((NAN, NAN), 0.0)],
    "gt": [((2.0, 1.0), 1.0), ((2.0, 2.0), 0.0), ((NAN, 2.0), 0.0)],
    "ge": [((2.0, 2.0), 1.0), ((1.0, 2.0), 0.0), ((NAN, NAN), 0.0)],
    "eq": [((2.0, 2.0), 1.0), ((0.0, -0.0), 1.0), ((NAN, NAN), 0.0)],
    "ne": [((2.0, 2.0), 0.0), ((NAN, NAN), 1.0)],
    "and": [((2.0, -1.0), 1.0), ((2.0, 0.0), 0.0), ((NAN, 1.0), 1.0)],
    "or": [((0.0, 0.5), 1.0), ((0.0, -0.0), 0.0), ((NAN, 0.0), 1.0)],
    "not": [((0.0,), 1.0), ((0.5,), 0.0), ((NAN,), 0.0)],
    "where": [((2.0, 5.0, 6.0), 5.0), ((0.0, 5.0, 6.0), 6.0), ((NAN, 5.0, 6.0), 5.0)],
    "fma": [((2.0, 3.0, 4.0), 10.0)],
    "aq": [((6.0, math.sqrt(3)), 3.0), ((5.0, 0.0), 5.0), ((1.0, 1e200), 1e-200)],
    "logabs": [((-math.e,), 1.0), ((0.0,), -INF)],
    "sqrtabs": [((-9.0,), 3.0)],
    "powabs": [((-4.0, 0.5), 2.0)],
    "logistic": [((0.0,), 0.5), ((-1000.0,), 0.0), ((1000.0,), 1.0), ((math.log(3),), 0.75)],
    "erf": [((0.5,), 0.5204998778130465), ((INF,), 1.0), ((NAN,), NAN)],
    "relu": [((-2.0,), 0.0), ((3.0,), 3.0), ((NAN,), NAN)],
    "pdiv": [((6.0, 2.0), 3.0), ((6.0, 0.001), 1.0), ((6.0, -0.0005), 1.0)],
    "plog": [((-math.e,), 1.0), ((0.001,), 0.0)],
    "pinv": [((-4.0,), -0.25), ((0.001,), 0.0)],
    "zdiv": [((6.0, 2.0), 3.0), ((6.0, 0.0), 1.0), ((0.0, 0.0), 1.0)],
    "gamma": [
        ((5.0,), 24.0),
        ((-0.5,), -2 * math.sqrt(math.pi)),
        ((171.7,), INF),
        ((0.0,), INF),
        ((-0.0,), -INF),
        ((-2.0,), NAN),
        ((-INF,), NAN),
        ((5e-324,), INF),
        ((-500.5,), 0.0),
    ],
    "lgamma": [
        ((5.0,), math.log(24)),
        ((-0.5,), math.log(4 * math.pi) / 2),
        ((-2.0,), INF),
        ((0.0,), INF),
        ((-INF,), INF),
        ((1e306,), INF),
        ((NAN,), NAN),
    ],
    "mod": [
        ((5.0, 0.1), 0.09999999999999973),
        ((1e300, 7.0), float(int(1e300) % 7)),
        ((-1.0, 3.0), 2.0),
        ((1.0, -3.0), -2.0),
        ((-5.0, INF), INF),
        ((5.0, INF), 5.0),
        ((1.0, 0.0), NAN),
        ((INF, 1.0), NAN),
    ],
    "round": [((2.5,), 2.0), ((-1.5,), -2.0), ((0.5,), 0.0), ((INF,), INF), ((NAN,), NAN)],
    "erfc": [((0.0,), 1.0), ((10.0,), 2.088487583762545e-45), ((-INF,), 2.0)],
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_by_hand(name):
    for operands, wanted in EXAMPLES[name]:
        program = Program.apply(name, *(Program.variable(i) for i in range(len(operands))))
        got = reference.evaluate_program(program, np.array(operands)[:, np.newaxis])
        np.testing.assert_allclose(got, [wanted], rtol=4e-16, atol=0, err_msg=str(operands))


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


# -------------------------------------------------------------------------------- special functions


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
        error = np.abs(special.digamma(a) - exact) / np.maximum(np.abs(exact), 0.1)
    assert error.max() < 1e-13


def test_digamma_at_poles_and_limits():
    a = np.array([0.0, -0.0, -1.0, -7.0, -1e300, -np.inf, np.inf, np.nan, 5e-324, 1e308])
    wanted = [-np.inf, np.inf, 0.0, 0.0, 0.0, 0.0, np.inf, np.nan, -np.inf, np.log(1e308)]
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(special.digamma(a), wanted, rtol=1e-15)
