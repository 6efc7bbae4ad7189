"""Algebra by SymPy in a child process."""

from __future__ import annotations

import sys

import pytest

from warpfit import InvalidArgumentError, parse
from warpfit.formulas import algebra


def test_algebra_finds_what_the_rules_do_not():
    program = parse("x1*x2 + x1*x3*p1 + sin(x2)^2 + cos(x2)^2")
    assert program.simplify(algebra=True) == parse("x1*(x2 + x3*p1) + 1").simplify()


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


@pytest.mark.parametrize(
    "call", [lambda p: p.simplify(algebra=True), lambda p: p.sympy(), lambda p: p.code("r")]
)
def test_a_missing_sympy_is_named(monkeypatch, call):
    monkeypatch.setitem(sys.modules, "sympy", None)
    with pytest.raises(InvalidArgumentError, match=r"warpfit\[sympy\]"):
        call(parse("x1*x2 + x1"))
