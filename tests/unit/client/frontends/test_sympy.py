"""SymPy expressions there and back."""

import operator
import random

import numpy as np
import pytest
import sympy

from support.refusals import refused
from warpfit.errors import ResourceExhaustedError
from warpfit.expressions.reference import evaluate_program
from warpfit.frontends import as_program
from warpfit.frontends.sympy import from_sympy, to_sympy
from warpfit.ir import Program
from warpfit.ops import OPERATORS
from warpfit.parse import parse

x1, x2, x3, p1 = sympy.symbols("x1 x2 x3 p1")
S = sympy


def data():
    columns = np.random.default_rng(8).uniform(-3, 3, size=(3, 60))
    columns[:, :6] = np.array([0.0, 1.0, -1.0, 2.0, 0.5, -0.5])
    return columns


def test_from_sympy():
    for expression, text in (
        (x1**-2 + x2 ** S.Rational(-5, 2), "inv(square(x1)) + x2 ^ (-2.5)"),
        *((-x1 - x2, "-(x1 + x2)"), (S.true, "1")),
        (S.E * x1 + S.pi, "2.718281828459045 * x1 + 3.141592653589793"),
        (S.Piecewise((x1, x2 > 0), (-x1, True)), "where(x2 > 0, x1, -x1)"),
        (
            S.Piecewise((1, x1 < x2), (x3, S.Ne(x1, 0))),
            "where(x1 < x2, 1, where(x1 != 0, x3, nan))",
        ),
        (S.Not(S.Or(x1 > 0, S.Eq(x2, 0))), "not (x1 > 0 or x2 == 0)"),
        (S.ITE(x1 > 0, x2 > 0, x3 > 0), "where(x1 > 0, x2 > 0, x3 > 0)"),
        (S.re(x1) + S.conjugate(x2) * S.im(x3), "x1 + x2 * 0"),
        *((-S.oo, "-inf"), (S.nan, "nan"), (S.zoo, "nan"), (S.Float(0.1), "0.1")),
    ):
        got = as_program(expression)
        # SymPy decides the order of terms and factors.
        assert sorted(got.codes) == sorted(parse(text).codes)
        values = (evaluate_program(each, data(), [0.7]) for each in (got, parse(text)))
        np.testing.assert_allclose(*values, rtol=1e-14)


def test_symbols_of_the_data_set():
    age, bmi = S.symbols("age bmi")
    assert str(from_sympy(age - bmi, ["bmi", "age"])) == "x2 - x1"
    assert from_sympy(x1, ["x2", "x1"]) == Program.variable(1)
    refused("UNKNOWN_NAME: .*'age'", from_sympy, age)
    assert to_sympy(parse("x1 - x2 + x3 + p1"), ["bmi", "age"]) == bmi - age + x3 + p1


def test_what_is_unknown_is_refused():
    matrices = S.Matrix([x1]), S.MatrixSymbol("x1", 2, 2)
    for expression in (S.zeta(x1), S.Function("f")(x1), x1 + S.I, S.Symbol("x0"), *matrices):
        refused("", from_sympy, expression)


@pytest.mark.parametrize("row", OPERATORS.values(), ids=list(OPERATORS))
def test_every_operator_there_and_back(row):
    program = Program.apply(row, *(Program.variable(index) for index in range(row.arity)))
    again = from_sympy(to_sympy(program))
    values = (evaluate_program(each, data()) for each in (again, program))
    np.testing.assert_allclose(*values, rtol=1e-12, atol=1e-15)
    # Numbers in SymPy's own arithmetic, independent of the conversion back.
    function = eval(f"lambda {', '.join(row.operands)}: {row.sympy}", dict(vars(sympy)))
    for operands in np.random.default_rng(row.code).uniform(0.1, 0.9, size=(8, row.arity)):
        got = float(function(*map(sympy.Float, operands)))
        np.testing.assert_allclose(got, row.numpy(*operands), rtol=1e-12)


#: What SymPy's own compiler to NumPy knows, kept from complex numbers and overflow.
UNARY = (
    *(S.sin, S.cos, S.tan, S.tanh, S.atan, S.Abs, S.sign, S.floor, S.ceiling, S.erf),
    *(S.gamma, lambda e: S.loggamma(S.Abs(e))),
    *(lambda e: S.exp(S.tanh(e)), lambda e: S.log(S.Abs(e) + 1), lambda e: S.sqrt(S.Abs(e))),
    *(lambda e: e**2, lambda e: e**-3, lambda e: 2 ** S.tanh(e), lambda e: S.Abs(e) ** 0.3),
)
BINARY = (
    *(operator.add, operator.sub, operator.mul, operator.truediv, S.Max, S.Min, S.atan2),
    *(lambda a, b: S.Piecewise((a, a < b), (b, True)), lambda a, b: S.Mul(a, b, x1)),
    lambda a, b: S.Add(a, -b, p1),
)


def random_expression(rng, depth):
    """One of SymPy's own, which it may rewrite as it is made."""
    if depth == 0 or rng.random() < 0.15:
        number = rng.choice([S.Integer(2), S.Rational(1, 3), S.Float(round(rng.uniform(-2, 2), 3))])
        return rng.choice([x1, x2, x3, p1, number])
    if rng.random() < 0.5:
        return rng.choice(UNARY)(random_expression(rng, depth - 1))
    operands = [random_expression(rng, depth - 1) for _ in range(2)]
    return rng.choice(BINARY)(*operands)


@pytest.mark.parametrize("seed", range(40))
def test_random_expressions_as_sympy_evaluates_them(seed):
    expression, rng = S.zoo, random.Random(seed)
    while expression.has(S.zoo, S.nan, S.ITE):  # which its compiler to NumPy cannot do
        expression = random_expression(rng, 3)
    columns = data()
    ours = evaluate_program(from_sympy(expression), columns, [0.7])
    compiled = S.lambdify([x1, x2, x3, p1], expression, ["scipy", "numpy"])
    with np.errstate(all="ignore"):
        theirs = np.broadcast_to(compiled(*columns, 0.7), ours.shape)
    np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9, err_msg=str(expression))


def test_constants_stay_real_and_small():
    for text, wanted in (
        *(("sqrt(-2) * x1", S.nan), ("inf - inf", S.nan), ("7 ^ 1e9 ^ 3", S.oo)),
        *(("nan < x1", S.Integer(0)), ("-1 / 0", -S.oo)),
        ("min(1 / 0, x1)", x1),
    ):
        assert to_sympy(parse(text)) == wanted


def test_numbers_and_lgamma_keep_their_precision_and_towers_do_not_explode():
    assert from_sympy(to_sympy(parse("x1 ^ 0.1"))) == parse("x1 ^ 0.1")
    tower = "x1 * " + " * ".join(["(9 ^ 9 ^ 9)"] * 3) + " + (2 * x1) ^ 1e9"
    assert to_sympy(parse(tower)) is not None
    expression = to_sympy(parse("lgamma(x1)"))
    assert float(S.N(expression.subs(x1, -2.3))) == pytest.approx(0.36956666345500805, rel=1e-14)
    assert from_sympy(expression) == parse("lgamma(x1)")


@pytest.mark.parametrize(
    ("names", "text"),
    [
        *((["p1"], "p1*p01 + p02"), (["x2", "b"], "x2 - b"), (["x2"], "x2 - x02")),
        (["p01"], "p01 - p1"),
        # SymPy's own numbers have exponents of any size, and must not leave the range of float64.
        *(((), text) for text in ("3e-266*(2e-266 + p1)", "1e-200*(x1*1e-200 + x2)/3")),
        ((), "3e-266*(3e-266 + (p1 < p1))"),
    ],
)
def test_columns_like_parameters_or_variables_and_small_numbers_come_back(names, text):
    program = parse(text, names)
    expression = to_sympy(program, names)
    assert len(expression.free_symbols) >= 2 or not names
    columns, vector = np.array([[1.5, 2.0], [-0.5, 3.0]]), [0.7, 0.2]
    again = from_sympy(expression, names)
    np.testing.assert_allclose(*(evaluate_program(p, columns, vector) for p in (again, program)))


@pytest.mark.parametrize(
    "text", ["x1/-(x1 > 5)", "(x1 > 5)^-2", "x1/(x1 > 5)/(x1 < 7)", "x1/where(x1 > 5, x1, 0)"]
)
def test_a_quotient_by_a_false_comparison_is_infinite(text):
    program, rows = parse(text), np.array([[-2.0, 0.0, 3.0, 6.0, 8.0]])
    expression = to_sympy(program)
    found = [float(expression.subs(x1, S.Rational(x))) for x in rows[0].tolist()]
    wanted, again = (evaluate_program(p, rows) for p in (program, from_sympy(expression)))
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(again, wanted)


def test_huge_rational_numbers():
    for numerator, value in ((10**400, 10.0), (-7 * 10**90, -7e-309)):
        program = from_sympy(S.Rational(numerator, 10**399 + 7) * x1)
        assert evaluate_program(program, [[1.0]]).tolist() == [value]


def test_deep_programs_are_converted_or_refused():
    """What is returned can be printed, too."""
    for text in (
        *("sin(" * 400 + "x1" + ")" * 400, "mod(x1, x2 > 0)"),
        *("round(mod(x1 > x2, x2 > x3))", "exp(-x1^" * 50 + "2.5" + ")" * 50),
        "sin(" * 90 + "x1" + ")" * 90,
    ):
        try:
            assert str(parse(text).sympy())
        except ResourceExhaustedError as error:
            assert error.reason == "TOO_DEEP"
