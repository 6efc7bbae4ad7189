"""Algebra by SymPy in a child process."""

from __future__ import annotations

import sys

import pytest
import sympy

from support.refusals import refused
from warpfit import parse
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


SLOW = "import sys, time\nprint('x1', flush=True)\nprint('x', end='', flush=True)\ntime.sleep(60)"


@pytest.mark.parametrize(
    ("script", "answers"),
    [
        ("import os; os.abort()", []),
        ("raise MemoryError", []),
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
