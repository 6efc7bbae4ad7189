"""Exact simplification: known cases, random programs against the reference, and SymPy's algebra."""

import math
import sys

import numpy as np
import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from support.engines.operators import numbers, programs
from support.refusals import refused
from warpfit import Program, ResourceExhaustedError, parse
from warpfit.expressions.reference import evaluate_program
from warpfit.formulas import algebra
from warpfit.formulas.rules import MOST_TOKENS
from warpfit.ops import CONSTANT, VARIABLE

#: A formula, what becomes of it, and what if it is assumed to be defined, where that differs.
CASES = """
x1 - x1 -> 0; x1/x1 -> x1 / x1 | 1; exp(x1) - exp(x1) -> exp(x1) - exp(x1) | 0;
(x1^2 + 1)/(1 + x1^2) -> 1; 0*x1 -> 0; 0*log(x1) -> 0 * log(x1) | 0;
2*log(x1) - 3*log(x1) -> 2 * log(x1) - 3 * log(x1) | -log(x1); 0.1*x1 + 0.2*x1 - 0.3*x1 -> 0;
2*(x1 + 3) + 4 -> 2 * x1 + 10; 2*x1 + 2*x2 -> 2 * (x1 + x2);
(x1*1e200)*1e200 -> 1e+200 * (1e+200 * x1); sqrt(4*x1^2) -> 2 * abs(x1);
sqrt(x1)^2 -> square(sqrt(x1)) | x1; sqrt(x1^-1) -> sqrt(inv(x1)) | inv(sqrt(x1));
(x1^2)^3 -> x1 ^ 6; x1*x1*x2*x2 -> square(x1 * x2); x1^3/x1 -> cube(x1) / x1 | square(x1);
x1^0 -> 1; 1/(1/x1) -> x1; x1/(x2/x3) -> x1 * x3 / x2; abs(x1^2*x2) -> abs(x2) * square(x1);
(x1 - x2)^2 - (x2 - x1)^2 -> 0; exp(log(x1)) -> exp(log(x1)) | x1; exp(log(x1^2)) -> square(x1);
exp(0.5*log(x1) + 0) -> sqrt(x1);
exp(2*log(x1) - 6000/x2) -> exp(2 * log(x1) - 6000 / x2) | exp(-6000 / x2) * square(x1);
exp(x1)*exp(x2) -> exp(x1) * exp(x2) | exp(x1 + x2); 200*x2 > 900 -> x2 > 4.5;
-2*x1 >= 4 -> x1 <= -2; x1*3 == 6 -> 6 == 3 * x1; log(exp(x1)) -> log(exp(x1)) | x1;
log(abs(x1)) -> logabs(x1); cos(-x1) + cos(x1) -> 2 * cos(x1);
cos(2*x1 - pi) + sin(x2 + pi/2) -> cos(x2) - cos(2 * x1);
sqrt(x1^2/(1 - x2)) -> sqrt(square(x1) / (1 - x2)) | abs(x1) / sqrt(1 - x2);
sin(2)*3 + floor(2.5) -> 4.727892280477045; fma(x1, 2, x1) -> 3 * x1; inf - inf + x1 -> x1 + nan;
1^x1 -> 1; 900 > 200*x2 -> x2 < 4.5; sin(-x1) + sin(x1) -> 0; exp(0.75*log(x1)) -> x1 ^ 0.75;
abs(x1 - x2) + abs(x2 - x1) -> 2 * abs(x1 - x2); (x1^0.5)^3 -> cube(sqrt(x1)) | x1 ^ 1.5;
sign(ceil(x1)) -> sign(ceil(x1)); 0 - x1 -> -x1; atan2(0 - x1, x2) -> atan2(-x1, x2)
"""


@pytest.mark.parametrize("case", CASES.strip().replace("\n", " ").split("; "))
def test_known_cases(case):
    text, _, short = case.partition(" -> ")
    usual, *defined = short.split(" | ")
    assert parse(text).simplify() == parse(usual)
    assert parse(text).simplify(assume_defined=True) == parse(*defined or [usual])


def test_parameters_become_constants_if_they_are_given():
    program = parse("p1*x1 + p2*x1*p1")
    assert program.simplify() == parse("x1*p1 + x1*p1*p2").simplify()
    assert program.simplify([2.0, 0.5]) == parse("3*x1")
    assert program.bind([2, 0.5]) == parse("2*x1 + 0.5*x1*2")
    refused("2 parameters", program.simplify, [2.0])


def test_long_and_deep_programs_are_simplified_up_to_a_limit():
    half = MOST_TOKENS // 2
    chain = [(VARIABLE, 0.0), *[(VARIABLE, 1.0), (16, 0.0)] * (half - 1)]
    assert Program(*zip(*chain, strict=True)).simplify() == parse(f"x1 + {half - 1}*x2")
    nested = Program([VARIABLE, *[32] * (half - 1)], [0.0] * half)
    assert nested.simplify() == nested
    with pytest.raises(ResourceExhaustedError, match="1001 tokens"):
        Program([VARIABLE, *[32] * MOST_TOKENS], [0.0] * (MOST_TOKENS + 1)).simplify()


def perturbed(program, columns, parameters, rng, ulp=4, zero=None):
    """Evaluate with errors of up to ``ulp`` after each operator, and zeros of any or a given sign.

    Returns:
        The values, and whether all numbers stay far from overflow and underflow, [rows].

    """
    in_range = np.ones(columns.shape[1], bool)

    def leaf(code, value):
        if code == VARIABLE:
            return columns[int(value)]
        return np.full(columns.shape[1], value if code == CONSTANT else parameters[int(value)])

    def operator(row, operands):
        result = np.asarray(row.numpy(*operands), float)
        size = np.abs(result)
        with_zero = row.name in ("div", "inv", "pow", "log", "logabs", "log2", "log10", "log1p")
        overflow = np.isinf(result) & np.all([np.isfinite(o) for o in operands], axis=0)
        in_range[(overflow & (not with_zero)) | ((size > 1e200) & np.isfinite(size))] = False
        in_range[(size < 1e-200) & (size > 0)] = False
        noise = ulp * np.finfo(float).eps * rng.uniform(-1, 1, result.shape)
        largest = np.max([np.abs(o) for o in operands], axis=0)
        result = result + np.where(np.isfinite(largest) & np.isfinite(size), noise * size, 0.0)
        signs = rng.uniform(-1, 1, size.shape) if zero is None else zero
        return np.where(result == 0, np.copysign(0.0, signs), result)

    with np.errstate(all="ignore"):
        return program.fold(leaf, operator), in_range


def assert_agrees(program, simplified, columns, parameters, seed):
    """Compare where small errors change little, and numbers stay in range."""
    rng = np.random.default_rng(seed)
    # Random signs alone may be the same in all runs, and so would infinities that depend on them.
    kinds = (0, 1.0), (4, -1.0), *[(4, None)] * 6
    runs = [perturbed(program, columns, parameters, rng, *kind) for kind in kinds]
    found = evaluate_program(simplified, columns, parameters)
    usable = np.all([run[1] for run in runs], axis=0)
    usable &= perturbed(simplified, columns, parameters, rng)[1]
    values = np.array([run[0] for run in runs])
    finite, nan = np.isfinite(values), np.isnan(values)
    infinite = np.isinf(values).all(axis=0) & (np.ptp(np.sign(values), axis=0) == 0)
    with np.errstate(all="ignore"):
        middle, spread = values.mean(axis=0), np.ptp(values, axis=0)
        far = np.abs(found - middle) > 100 * spread + 1e-11 * np.abs(middle) + 1e-300
    wrong = finite.all(axis=0) & (spread < 1e-6 * np.abs(middle)) & (far | ~np.isfinite(found))
    wrong |= nan.all(axis=0) & ~np.isnan(found)
    wrong |= infinite & (found != values[0])
    row = int(np.argmax(wrong & usable))
    case = str(simplified), columns[:, row], values[:, row], found[row]
    assert not (wrong & usable).any(), case


ordinary = numbers(np.float32).filter(math.isfinite)
columns = st.lists(st.tuples(ordinary, ordinary, ordinary), min_size=1, max_size=30)
drawn = programs(30, constants=st.integers(-3, 3).map(float) | ordinary | st.just(0.5))


@given(drawn, columns, st.tuples(ordinary, ordinary), st.integers(0, 2**32))
def test_simplified_programs_agree_with_the_reference(program, rows, parameters, seed):
    simplified = program.simplify()
    assert len(simplified) <= len(program) and simplified.simplify() == simplified
    assert_agrees(program, simplified, np.array(rows).T, np.array(parameters), seed)
    defined = program.simplify(assume_defined=True)
    assert len(defined) <= len(simplified)
    assert defined.simplify(assume_defined=True) == defined


@given(programs(30), st.randoms(use_true_random=False))
def test_the_order_of_operands_makes_no_difference(program, random):
    def operator(row, operands):
        is_swapped = row.name in ("add", "mul", "min", "max", "eq") and random.random() < 0.5
        return Program.apply(row, *operands[:: -1 if is_swapped else 1])

    swapped = program.fold(lambda code, value: Program([code], [value]), operator)
    assert swapped.simplify() == program.simplify()


def test_algebra_finds_what_the_rules_do_not_and_has_to_agree(monkeypatch):
    monkeypatch.setattr(algebra, "SECONDS", 100.0)
    program = parse("x1 + sin(x2)^2 + cos(x2)^2")
    assert program.simplify(algebra=True) == parse("x1 + 1").simplify()
    program = parse("(x1^2 - x2^2)/(x1 - x2)")
    monkeypatch.setattr(algebra, "_answers", lambda text: ["x1 + x2", "x1", "x1*x2"])
    assert program.simplify(algebra=True) == program.simplify()
    assert program.simplify(algebra=True, assume_defined=True) == parse("x1 + x2")


SLOW = "import sys, time\nprint('x1', flush=True)\nprint('x', end='', flush=True)\ntime.sleep(60)"


@pytest.mark.parametrize(
    ("script", "answers"),
    [
        *(("import os; os.abort()", []), ("raise MemoryError", [])),
        ("print('x1')\nraise RecursionError", ["x1"]),
        (SLOW, ["x1"]),  # what was found by the end of the time counts
    ],
)
def test_a_child_that_fails_or_takes_long_is_no_error(monkeypatch, tmp_path, script, answers):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{script}"\n')
    python.chmod(0o700)
    monkeypatch.setattr(algebra, "SECONDS", 1.5)
    monkeypatch.setattr(algebra.sys, "executable", str(python))
    assert algebra._answers("x1") == answers
    program = parse("x1*x2 + x1*x3")
    assert script == SLOW or program.simplify(algebra=True) == program.simplify()


def test_every_kind_of_failure_of_sympy_costs_one_candidate(monkeypatch):
    def fails(expression):
        raise RecursionError

    for name in ("simplify", "expand", "cancel"):
        monkeypatch.setattr(sympy, name, fails)
    assert "x1 * (x2 + x3)" in list(algebra._candidates("x1*x2 + x1*x3"))


@pytest.mark.parametrize("call", [lambda p: p.simplify(algebra=True), lambda p: p.sympy()])
def test_a_missing_sympy_is_named(monkeypatch, call):
    monkeypatch.setitem(sys.modules, "sympy", None)
    refused(r"pip install .*\[sympy\]", lambda: call(parse("x1*x2 + x1")))
