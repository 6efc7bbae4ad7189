"""Strings as PySR and SymbolicRegression.jl write them."""

import contextlib
import inspect
import time

import numpy as np
import pytest

from support.refusals import refused
from warpfit.errors import ParseError
from warpfit.expressions import reference
from warpfit.frontends.pysr import FUNCTIONS, from_pysr


def test_names_numbers_and_dialects():
    assert str(from_pysr("x0 - x2")) == "x1 - x3"
    assert str(from_pysr("x1 - x3", first=1)) == "x1 - x3"
    assert str(from_pysr("x₁ * x₃", first=1)) == "x1 * x3"
    assert str(from_pysr("cos(age) + x0", ("x0", "age"))) == "cos(x2) + x1"
    assert str(from_pysr("2.5f-1 * x0 + 1.0f0")) == "0.25 * x1 + 1"
    assert str(from_pysr("-x0 ^ 2.0 + -0.5")) == "-x1 ^ 2.0 - 0.5"
    assert str(from_pysr("cond(cond(x0, x1), x2)")) == ("where(where(x1 > 0, x2, 0) > 0, x3, 0)")


#: What the functions compute that mean something else here, or are called otherwise.
PRINTED = {
    "cond": lambda a, b: np.where(a > 0, b, 0),
    "logical_or": lambda a, b: (a > 0) | (b > 0),
    "logical_and": lambda a, b: (a > 0) & (b > 0),
    "sinc": np.sinc,
    "atanh_clip": lambda a: np.arctanh(np.mod(a + 1, 2) - 1),
    "mult": np.multiply,
    "plus": np.add,
    "less": np.less,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "less_equal": np.less_equal,
    "muladd": lambda a, b, c: a * b + c,
    # Base.clamp, also where the lower bound is above the upper one.
    "clamp": lambda a, b, c: np.where(a > c, c, np.where(a < b, b, a)),
    "abs2": np.square,
    "sqrt_abs": lambda a: np.sqrt(np.abs(a)),
    "pow_abs": lambda a, b: np.abs(a) ** b,
    "log_abs": lambda a: np.log(np.abs(a)),
    "log2_abs": lambda a: np.log2(np.abs(a)),
    "log10_abs": lambda a: np.log10(np.abs(a)),
    "log1p_abs": lambda a: np.log1p(np.abs(a)),
    "acosh_abs": lambda a: np.arccosh(np.abs(a) + 1),
    "safe_pow": np.power,
    "safe_log": np.log,
    "safe_sqrt": np.sqrt,
    "safe_acosh": np.arccosh,
    "rem": np.fmod,
    "mod1": lambda a, b: np.where(np.mod(a, b) == 0, b, np.mod(a, b)),
    "fld": np.floor_divide,
    "cld": lambda a, b: -np.floor_divide(-a, b),
    "flipsign": lambda a, b: np.where(np.signbit(b), -a, a),
    "identity": lambda a: a,
    "fourthroot": lambda a: np.sqrt(np.sqrt(a)),
    "tanpi": lambda a: np.tan(np.pi * np.fmod(a, 1)),
    "sind": lambda a: np.sin(np.deg2rad(a)),
    "cosd": lambda a: np.cos(np.deg2rad(a)),
    "tand": lambda a: np.tan(np.deg2rad(a)),
    "asind": lambda a: np.rad2deg(np.arcsin(a)),
    "acosd": lambda a: np.rad2deg(np.arccos(a)),
    "atand": lambda a: np.rad2deg(np.arctan(a)),
}


def test_every_function_of_its_own_is_tried():
    assert PRINTED.keys() >= FUNCTIONS.keys()


@pytest.mark.parametrize("name", PRINTED)
def test_printed_functions_are_what_julia_computes(name):
    function = PRINTED[name]
    operands = getattr(function, "nin", 0) or len(inspect.signature(function).parameters)
    rng = np.random.default_rng(operands)
    ordinary = rng.uniform(-3, 3, (operands, 400))
    edges = rng.choice([0.5, 1.0, -1.5, 2.5, -2.0, 0.1, -0.3, 7.0, 1e9, 123.456], (operands, 400))
    columns = np.concatenate([ordinary, edges], axis=1)
    text = f"{name}({', '.join(f'x{k}' for k in range(operands))})"
    with np.errstate(all="ignore"):
        wanted = np.asarray(function(*columns), dtype=float)
    got = reference.evaluate_program(from_pysr(text), columns)
    kept = np.abs(wanted) < 1e12  # but at poles that rounded multiples of pi miss
    assert kept.mean() > 0.1
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))
    far = {"sind": 1e-6, "cosd": 1e-6, "tand": 1e-6, "tanpi": 1e-12}.get(name, 1e-13)
    np.testing.assert_allclose(got[kept], wanted[kept], rtol=far, atol=max(far, 1e-14))


def test_zeros_of_functions_of_multiples_of_pi():
    whole = np.array([[1.0, -2.0, 12345.0, 1e15]])
    for text in ("sinpi(x0)", "cospi(x0 + 0.5)", "tanpi(x0)", "sinc(x0)"):
        np.testing.assert_array_equal(reference.evaluate_program(from_pysr(text), whole), 0.0)


def test_a_condition_never_passes_nan_of_the_other_branch():
    rows = np.array([[1.0, -1.0, 0.0], [-1.0] * 3])
    got = reference.evaluate_program(from_pysr("cond(x0, log(x1))"), rows)
    assert np.isnan(got).tolist() == [True, False, False]


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
    assert "^" in str(refused(reason, from_pysr, text))


@pytest.mark.parametrize("text", ["1" * 100_000, "1." + "1" * 100_000, "x" + "1" * 100_000])
def test_long_runs_of_digits_take_no_time_and_end_in_no_error_of_python(text):
    began = time.monotonic()
    with contextlib.suppress(ParseError):
        from_pysr(text)
    assert time.monotonic() - began < 5
