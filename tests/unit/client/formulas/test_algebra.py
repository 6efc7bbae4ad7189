"""Algebra by SymPy in a child process."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import sympy

from support.random_programs import random_program
from warpfit import InvalidArgumentError, parse
from warpfit.formulas import algebra


def test_algebra_finds_what_the_rules_do_not(monkeypatch):
    monkeypatch.setattr(algebra, "SECONDS", 100.0)
    program = parse("x1 + sin(x2)^2 + cos(x2)^2")
    assert program.simplify(algebra=True) == parse("x1 + 1").simplify()


def test_what_sympy_finds_has_to_agree(monkeypatch):
    program = parse("(x1^2 - x2^2)/(x1 - x2)")
    monkeypatch.setattr(algebra, "_answers", lambda text: ["x1 + x2", "x1", "x1*x2"])
    assert program.simplify(algebra=True) == program.simplify()
    assert program.simplify(algebra=True, assume_defined=True) == parse("x1 + x2")


def test_sympy_has_a_time_limit_and_what_it_found_by_then_counts(monkeypatch, tmp_path):
    script = (
        "import sys, time\nprint('x1', flush=True)\nprint('x', end='', flush=True)\ntime.sleep(60)"
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {algebra.sys.executable} -c "{script}"\n')
    python.chmod(0o700)
    monkeypatch.setattr(algebra, "SECONDS", 1.5)
    monkeypatch.setattr(algebra.sys, "executable", str(python))
    assert algebra._answers("x1") == ["x1"]


def test_what_sympy_makes_too_long_is_dropped(monkeypatch):
    """The expansion takes longer than SymPy is given here."""
    monkeypatch.setattr(algebra, "SECONDS", 2.0)
    operators = ("add", "sub", "mul", "div", "square", "exp")
    program = random_program(np.random.default_rng(290), 290, variables=3, operators=operators)
    found = program.simplify(algebra=True)
    assert len(found) <= len(program.simplify())


@pytest.mark.parametrize(
    "script", ["import os; os.abort()", "raise MemoryError", "print('x1')\nraise RecursionError"]
)
def test_a_child_that_fails_is_no_error(monkeypatch, tmp_path, script):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {algebra.sys.executable} -c "{script}"\n')
    python.chmod(0o700)
    monkeypatch.setattr(algebra.sys, "executable", str(python))
    program = parse("x1*x2 + x1*x3")
    assert program.simplify(algebra=True) == program.simplify()


def test_every_kind_of_failure_of_sympy_costs_one_candidate(monkeypatch):
    def fails(expression):
        raise RecursionError

    for name in ("simplify", "expand", "cancel"):
        monkeypatch.setattr(sympy, name, fails)
    assert "x1 * (x2 + x3)" in list(algebra._candidates("x1*x2 + x1*x3"))


@pytest.mark.parametrize("call", [lambda p: p.simplify(algebra=True), lambda p: p.sympy()])
def test_a_missing_sympy_is_named(monkeypatch, call):
    monkeypatch.setitem(sys.modules, "sympy", None)
    with pytest.raises(InvalidArgumentError, match=r"pip install .*\[sympy\]"):
        call(parse("x1*x2 + x1"))
