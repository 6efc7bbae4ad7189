"""Strings as PySR and SymbolicRegression.jl write them, against SymPy's evaluation of the same."""

import random

import numpy as np
import pytest

from warpfit.errors import ParseError
from warpfit.expressions import reference
from warpfit.frontends.pysr import from_pysr

sympy = pytest.importorskip("sympy")

COLUMNS = np.random.default_rng(3).uniform(0.3, 2.5, (3, 50))
BINARY = ("+", "-", "*", "/", "^")
CALLS = {
    **dict.fromkeys(("sin", "cos", "exp", "log", "sqrt", "abs", "tanh", "square", "cube"), 1),
    **dict.fromkeys(("neg", "inv", "log1p", "log2", "log10", "relu", "erf", "erfc", "sign"), 1),
    **dict.fromkeys(
        ("safe_log", "safe_sqrt", "exp2", "abs2", "asinh", "acosh", "floor", "gamma"), 1
    ),
    **dict.fromkeys(("max", "min", "greater", "cond", "logical_or", "logical_and", "mod"), 2),
}


def indicator(condition):
    return sympy.Piecewise((1, condition), (0, True))


#: What the functions mean in SymbolicRegression.jl.
MEANINGS = {
    "square": lambda a: a**2,
    "abs2": lambda a: a**2,
    "cube": lambda a: a**3,
    "neg": lambda a: -a,
    "inv": lambda a: 1 / a,
    "abs": sympy.Abs,
    "safe_log": sympy.log,
    "safe_sqrt": sympy.sqrt,
    "log1p": lambda a: sympy.log(1 + a),
    "log2": lambda a: sympy.log(a, 2),
    "log10": lambda a: sympy.log(a, 10),
    "exp2": lambda a: 2**a,
    "relu": lambda a: sympy.Max(0, a),
    "max": sympy.Max,
    "min": sympy.Min,
    "mod": sympy.Mod,
    "greater": lambda a, b: indicator(a > b),
    "cond": lambda a, b: sympy.Piecewise((b, a > 0), (0, True)),
    "logical_or": lambda a, b: indicator(sympy.Or(a > 0, b > 0)),
    "logical_and": lambda a, b: indicator(sympy.And(a > 0, b > 0)),
}


def random_text(rng, depth, first=0):
    if depth == 0 or rng.random() < 0.2:
        if rng.random() < 0.35:
            return rng.choice([f"{rng.uniform(-2, 2):.6g}", "2.0", "0.5", "1.5e-1"])
        return f"x{rng.randrange(3) + first}"
    if rng.random() < 0.55:
        symbol = rng.choice(BINARY)
        right = "2.0" if symbol == "^" else random_text(rng, depth - 1, first)
        return f"({random_text(rng, depth - 1, first)} {symbol} {right})"
    name = rng.choice(list(CALLS))
    operands = [random_text(rng, depth - 1, first) for _ in range(CALLS[name])]
    return f"{name}({', '.join(operands)})"


def by_sympy(text, columns):
    symbols = sympy.symbols(f"x0:{len(columns)}", real=True)
    names = {**MEANINGS, **{symbol.name: symbol for symbol in symbols}}
    expression = sympy.parse_expr(text.replace("^", "**"), local_dict=names)
    with np.errstate(all="ignore"):
        values = sympy.lambdify(symbols, expression, ["scipy", "numpy"])(*columns.astype(complex))
    values = np.broadcast_to(np.asarray(values, dtype=complex), columns.shape[1:])
    return np.where(np.abs(values.imag) < 1e-12, values.real, np.nan)


@pytest.mark.parametrize("seed", range(60))
def test_random_strings_agree_with_sympy(seed):
    text = random_text(random.Random(seed), 3)
    got = reference.evaluate_program(from_pysr(text), COLUMNS)
    try:
        wanted = by_sympy(text, COLUMNS)
    except (TypeError, ValueError, KeyError):
        pytest.skip("SymPy neither orders what is not real nor prints a complex infinity")
    both = np.isfinite(got) & np.isfinite(wanted)
    assert (np.isfinite(got) == both).all() or not np.isfinite(wanted).all()
    np.testing.assert_allclose(got[both], wanted[both], rtol=1e-7, atol=1e-9)


def test_names_numbers_and_dialects():
    assert str(from_pysr("x0 - x2")) == "x1 - x3"
    assert str(from_pysr("x1 - x3", first=1)) == "x1 - x3"
    assert str(from_pysr("x₁ * x₃", first=1)) == "x1 * x3"
    assert str(from_pysr("cos(age) + x0", ("x0", "age"))) == "cos(x2) + x1"
    assert str(from_pysr("2.5f-1 * x0 + 1.0f0")) == "0.25 * x1 + 1"
    assert str(from_pysr("-x0 ^ 2.0 + -0.5")) == "-x1 ^ 2 + -0.5"
    assert str(from_pysr("cond(cond(x0, x1), x2)")) == ("where(where(x1 > 0, x2, 0) > 0, x3, 0)")


@pytest.mark.parametrize("value", [1.0, -1.0, 0.0])
def test_a_condition_never_passes_nan_of_the_other_branch(value):
    rows = np.array([[value], [-1.0]])
    got = reference.evaluate_program(from_pysr("cond(x0, log(x1))"), rows)
    assert np.isnan(got[0]) == (value > 0)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("cond(x0)", "WRONG_ARITY"),
        ("erfc(x0, x1)", "WRONG_ARITY"),
        ("cond(x0, x1", "UNBALANCED"),
        ("besselj(x0)", "UNKNOWN_FUNCTION"),
        ("x0 +", "EXPECTED_OPERAND"),
    ],
)
def test_errors_point_into_the_text(text, reason):
    with pytest.raises(ParseError) as caught:
        from_pysr(text)
    assert caught.value.reason == reason
    assert "^" in str(caught.value)
