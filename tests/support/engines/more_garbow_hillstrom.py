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
    """Return eight of the problems: badly scaled ones, with residuals, with parallel columns."""
    return [
        _rows(
            "Freudenstein-Roth",
            ["-13 + p1 + ((5 - p2)*p2 - 2)*p2", "-29 + p1 + ((p2 + 1)*p2 - 14)*p2"],
            [0.5, -2.0],
        ),
        _rows("Powell badly scaled", ["1e4*p1*p2 - 1", "exp(-p1) + exp(-p2) - 1.0001"], [0.0, 1.0]),
        _rows("Brown badly scaled", ["p1 - 1e6", "p2 - 2e-6", "p1*p2 - 2"], [1.0, 1.0]),
        _rows(
            "Powell singular",
            ["p1 + 10*p2", "sqrt(5)*(p3 - p4)", "(p2 - 2*p3)^2", "sqrt(10)*(p1 - p4)^2"],
            [3.0, -1.0, 0.0, 1.0],
        ),
        Problem(
            *("Jennrich-Sampson", "exp(x1*p1) + exp(x1*p2)", _counted(10)),
            *(2.0 + 2.0 * np.arange(1.0, 11.0), np.array([0.3, 0.4])),
        ),
        Problem(
            *("Brown-Dennis", "(p1 + x1*p2 - exp(x1))^2 + (p3 + p4*sin(x1) - cos(x1))^2"),
            *(_counted(20) / 5.0, np.zeros(20), np.array([25.0, 5.0, -5.0, -1.0])),
        ),
        Problem(
            *("Osborne 1", "p1 + p2*exp(-x1*p4) + p3*exp(-x1*p5)"),
            *(10.0 * (_counted(33) - 1.0), np.array(_OSBORNE_1.split(), float)),
            np.array([0.5, 1.5, -1.0, 0.01, 0.02]),
        ),
        _trigonometric(10),
        _brown_almost_linear(10),
    ]


def _counted(rows: int) -> Floats:
    """Return the column 1, 2, ..., rows."""
    return np.arange(1.0, rows + 1.0)[:, None]


def _rows(name: str, residuals: list[str], start: list[float]) -> Problem:
    """Make a problem whose residuals are different formulas."""
    formula = " + ".join(f"x{i}*({text})" for i, text in enumerate(residuals, start=1))
    m = len(residuals)
    return Problem(name, formula, np.eye(m), np.zeros(m), np.array(start))


def _trigonometric(n: int) -> Problem:
    shared = " - ".join([str(n), *(f"cos(p{j})" for j in range(1, n + 1))])
    own = " + ".join(f"x{j}*({j}*(1 - cos(p{j})) - sin(p{j}))" for j in range(1, n + 1))
    zeros, start = np.zeros(n), np.full(n, 1.0 / n)
    return Problem("Trigonometric", f"{shared} + {own}", np.eye(n), zeros, start)


def _brown_almost_linear(n: int) -> Problem:
    own = " + ".join(f"x{j}*p{j}" for j in range(1, n))
    total, product = (sign.join(f"p{j}" for j in range(1, n + 1)) for sign in (" + ", "*"))
    formula = f"(1 - x{n})*({own} + {total} - {n + 1}) + x{n}*({product} - 1)"
    zeros, start = np.zeros(n), np.full(n, 0.5)
    return Problem("Brown almost linear", formula, np.eye(n), zeros, start)
