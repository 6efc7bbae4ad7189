"""Programs as they are read: other forms, equal values."""

import numpy as np
import pytest
from hypothesis import given

from support.engines.operators import programs
from warpfit.expressions.language import DIGITS, readable, to_latex, to_text
from warpfit.expressions.reference import evaluate_program
from warpfit.ir import Program
from warpfit.parse import parse

NAMES = ("R", "T", "x1")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("inv(R)", "1 / R"),
        ("inv(-R)", "-1 / R"),
        ("inv(R)*T", "1 / R * T"),
        ("T/inv(R + 1)", "T / (1 / (R + 1))"),
        ("exp(T / -3)", "exp(-T / 3)"),
        ("T / -3", "-T / 3"),
        ("-2 / -T", "2 / T"),
        ("T*-3", "-3 * T"),
        ("sin(-2*T)", "-sin(2 * T)"),
        ("3 + R*sin(-2*T)", "3 - R * sin(2 * T)"),
        ("cos(-2*T) + abs(T/-3)", "cos(2 * T) + abs(T / 3)"),
        ("(-2*T)^3 + (-2*T)^2", "-(2 * T) ^ 3 + (2 * T) ^ 2"),
        ("T ^ 2 * exp(-(0))", "T ^ 2"),
        ("exp(-(2))", "exp(-2)"),
        ("0.399 / sqrt(exp(x1 ^ 2))", "0.399 * exp(-x1 ^ 2 / 2)"),
        ("1 / exp(-T)", "exp(T)"),
        ("T / exp(R + 1)", "T * exp(-(R + 1))"),
        ("sqrt(exp(-T / 3))", "exp(-T / 3 / 2)"),
        ("tanh(-T) / -erf(R)", "tanh(T) / erf(R)"),
        ("R - T / -3", "R + T / 3"),
    ],
)
def test_odd_forms_are_written_as_a_person_would(text, wanted):
    program = parse(text, NAMES)
    assert to_text(program, NAMES, DIGITS) == wanted
    shown = readable(program)
    assert readable(shown) == shown
    assert to_text(parse(to_text(shown, NAMES), NAMES), NAMES) == to_text(shown, NAMES)
    exact = to_text(program, NAMES)  # which is the program's own with all digits
    assert to_text(parse(exact, NAMES), NAMES) == exact
    assert "{inv}" not in to_latex(program, NAMES, DIGITS)
    if "-3" in text and wanted.count("-") == 0:
        assert "-" not in to_latex(program, NAMES, DIGITS)


@given(programs())
def test_values_are_those_of_the_program(program):
    rows = np.random.default_rng(0).normal(size=(max(1, program.variables), 50))
    program = program.bind(np.full(program.parameters, 1.5))
    with np.errstate(all="ignore"):
        wanted, found = (evaluate_program(each, rows) for each in (program, readable(program)))
    close = np.isclose(found, wanted, rtol=1e-9, atol=1e-300, equal_nan=True)
    assert (close | ~np.isfinite(wanted) | is_ill_conditioned(program, rows)).all(), str(program)


def is_ill_conditioned(program: Program, rows) -> np.ndarray:
    """Tell where a relative change of 1e-12 of the rows changes values, as in sin(1e20*x)."""
    with np.errstate(all="ignore"):
        values = [evaluate_program(program, rows * (1.0 + e)) for e in (0.0, 1e-12, -1e-12, 3e-13)]
    return ~np.isclose(values[1:], values[0], rtol=1e-10, atol=0.0).all(axis=0)


def test_long_programs_stay_as_they_are():
    program = parse("+".join(["inv(T)"] * 600), NAMES)
    assert readable(program) is program
