"""Shorter equal programs by SymPy's algebra.

SymPy may take any time and memory, so it works in a child process, which is ended after `SECONDS`;
what it has found by then is used. What it cannot do, or makes too long, is a candidate less and
never an error. Nothing is believed: a candidate has to agree with the original on random
rows, some of them with zeros and equal numbers, where divisions fail.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.child_processes import python_child
from warpfit.errors import require
from warpfit.expressions.reference import evaluate_program
from warpfit.formulas.rules import simplified
from warpfit.formulas.snapping import finite_median
from warpfit.ir import Program
from warpfit.parse import parse

SECONDS: Final = 10.0
#: Most memory of the child process, in bytes.
_MEMORY: Final = 4 << 30
#: Longest program that SymPy is given, and that is taken from it, in tokens.
_MOST_TOKENS: Final = 300
#: Most variables and parameters by which terms are collected.
_MOST_SYMBOLS: Final = 8
_ROWS: Final = 200
_TOLERANCE: Final = 1e-8
#: Functions of SymPy that are tried in turn, on the program and on what `sympy.simplify` returns.
_FUNCTIONS: Final = (
    *("expand", "factor_terms", "factor", "cancel", "together"),
    *("powsimp", "logcombine", "trigsimp"),
)


def algebraic(program: Program, assume_defined: bool) -> Program:
    """Return the shortest equal program that the exact rules and SymPy find.

    Raises:
        InvalidArgumentError: if SymPy is not installed.

    """
    require("sympy", "warpfit[sympy]", "algebra")
    best = simplified(program, assume_defined)
    if len(best) > _MOST_TOKENS:
        return best
    original = best
    for text in _answers(str(best)):
        candidate = simplified(parse(text), assume_defined)
        if len(candidate) < len(best) and _agrees(original, candidate, assume_defined):
            best = candidate
    return best


def _answers(text: str) -> list[str]:
    """Return the texts that a child process finds in time."""
    child = python_child("-m", "warpfit.formulas.algebra")
    try:
        done = subprocess.run(**child, input=text.encode(), capture_output=True, timeout=SECONDS)
        printed = done.stdout
    except subprocess.TimeoutExpired as late:
        printed = late.stdout or b""
    complete, _, _ = printed.decode().rpartition("\n")  # it may have been ended within a line
    return complete.splitlines()


def _agrees(program: Program, candidate: Program, assume_defined: bool) -> bool:
    """Compare on random rows; where formulas may be assumed defined, on those that are finite."""
    rng = np.random.default_rng(0)
    variables = max(program.variables, candidate.variables, 1)
    parameters = rng.normal(size=max(program.parameters, candidate.parameters))
    rows = np.concatenate(
        [rng.normal(scale=scale, size=(variables, _ROWS)) for scale in (0.1, 1.0, 10.0)]
        + [rng.integers(-2, 3, size=(variables, _ROWS)), rng.uniform(size=(variables, _ROWS))],
        axis=1,
    )
    a, b = (evaluate_program(each, rows, parameters) for each in (program, candidate))
    if not assume_defined:
        return _same(a, b)
    both = np.isfinite(a) & np.isfinite(b)
    return int(both.sum()) >= _ROWS // 2 and _same(a[both], b[both])


def _same(a: NDArray[np.float64], b: NDArray[np.float64]) -> bool:
    size = finite_median(np.abs(a))
    return bool(np.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE * size, equal_nan=True))


def _candidates(text: str) -> Iterator[str]:
    """Yield equal programs that SymPy finds over real variables."""
    import sympy

    from warpfit.frontends.sympy import from_sympy, to_sympy

    expression = to_sympy(parse(text))
    real = {symbol: sympy.Symbol(symbol.name, real=True) for symbol in expression.free_symbols}
    expression = expression.xreplace(real)
    symbols = sorted(real.values(), key=str)[:_MOST_SYMBOLS]
    functions = [
        lambda given: given,
        *(getattr(sympy, name) for name in _FUNCTIONS),
        *(lambda given, by=by: sympy.collect(sympy.expand(given), by) for by in symbols),
    ]
    for first in (lambda given: given, sympy.simplify):
        start = _attempt(first, expression)
        for function in functions if start is not None else ():
            found = _attempt(from_sympy, _attempt(function, start))
            if found is not None and len(found) <= _MOST_TOKENS:
                yield str(found)


def _attempt(function: Callable[[Any], Any], given: Any) -> Any:
    """Apply a function of SymPy to an expression; None if SymPy fails."""
    try:
        return function(given)
    except Exception:  # of any kind: its algorithms fail in many ways, with RecursionError too
        return None


if __name__ == "__main__":
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    for answer in _candidates(sys.stdin.read()):
        print(answer, flush=True)
