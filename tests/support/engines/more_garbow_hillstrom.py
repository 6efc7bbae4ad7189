"""Least-squares problems of Moré, Garbow and Hillstrom as warpfit text.

"Testing unconstrained optimization software", ACM Transactions on Mathematical Software 7, 1981.
A residual function whose rows differ is one formula with columns that are 1 in some of the rows.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_OSBORNE_1 = """.844 .908 .932 .936 .925 .908 .881 .850 .818 .784 .751 .718 .685 .658 .628 .603
.580 .558 .538 .522 .506 .490 .478 .467 .457 .448 .438 .431 .424 .420 .414 .411 .406"""


@dataclass(frozen=True)
class Problem:
    """Residuals ``formula - target`` of a problem."""

    name: str
    formula: str
    columns: Floats
    """[rows, variables]."""
    target: Floats
    start: Floats


def problems() -> list[Problem]:
    """Return nine of the problems: badly scaled ones, with residuals, with parallel columns."""
    ten = range(1, 11)
    shared = " - ".join(["10", *(f"cos(p{j})" for j in ten)])
    own = " + ".join(f"x{j}*({j}*(1 - cos(p{j})) - sin(p{j}))" for j in ten)
    linear = " + ".join([*(f"x{j}*p{j}" for j in range(1, 10)), *(f"p{j}" for j in ten)])
    product = "*".join(f"p{j}" for j in ten)
    almost = f"(1 - x10)*({linear} - 11) + x10*({product} - 1)"
    freudenstein = ["-13 + p1 + ((5 - p2)*p2 - 2)*p2", "-29 + p1 + ((p2 + 1)*p2 - 14)*p2"]
    powell = ["p1 + 10*p2", "sqrt(5)*(p3 - p4)", "(p2 - 2*p3)^2", "sqrt(10)*(p1 - p4)^2"]
    dennis = "(p1 + x1*p2 - exp(x1))^2 + (p3 + p4*sin(x1) - cos(x1))^2"
    osborne, measured = "p1 + p2*exp(-x1*p4) + p3*exp(-x1*p5)", np.array(_OSBORNE_1.split(), float)
    sums = 2.0 + 2.0 * np.arange(1.0, 11.0)
    return [
        _rows("Freudenstein-Roth", freudenstein, 0.5, -2.0),
        _rows("Powell badly scaled", ["1e4*p1*p2 - 1", "exp(-p1) + exp(-p2) - 1.0001"], 0.0, 1.0),
        _rows("Brown badly scaled", ["p1 - 1e6", "p2 - 2e-6", "p1*p2 - 2"], 1.0, 1.0),
        _rows("Powell singular", powell, 3.0, -1.0, 0.0, 1.0),
        _of("Jennrich-Sampson", "exp(x1*p1) + exp(x1*p2)", _counted(10), sums, 0.3, 0.4),
        _of("Brown-Dennis", dennis, _counted(20) / 5.0, np.zeros(20), 25.0, 5.0, -5.0, -1.0),
        _of("Osborne 1", osborne, 10 * (_counted(33) - 1), measured, 0.5, 1.5, -1.0, 0.01, 0.02),
        _of("Trigonometric", f"{shared} + {own}", np.eye(10), np.zeros(10), *[0.1] * 10),
        _of("Brown almost linear", almost, np.eye(10), np.zeros(10), *[0.5] * 10),
    ]


def _counted(rows: int) -> Floats:
    """Return the column 1, 2, ..., rows."""
    return np.arange(1.0, rows + 1.0)[:, None]


def _of(name: str, formula: str, columns: Floats, target: Floats, *start: float) -> Problem:
    return Problem(name, formula, columns, target, np.array(start))


def _rows(name: str, residuals: list[str], *start: float) -> Problem:
    """Make a problem whose residuals are different formulas."""
    formula = " + ".join(f"x{i}*({text})" for i, text in enumerate(residuals, start=1))
    return _of(name, formula, np.eye(len(residuals)), np.zeros(len(residuals)), *start)
