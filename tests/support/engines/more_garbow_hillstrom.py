"""Least-squares problems of Moré, Garbow and Hillstrom as warpfit text.

"Testing unconstrained optimization software", ACM Transactions on Mathematical Software 7, 1981.
A residual function whose rows differ is one formula with columns that are 1 in some of the rows.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_BARD = ".14 .18 .22 .25 .29 .32 .35 .39 .37 .58 .73 .96 1.34 2.10 4.39"
_GAUSSIAN = ".0009 .0044 .0175 .0540 .1295 .2420 .3521 .3989"
_MEYER = "34780 28610 23650 19630 16370 13720 11540 9744 8261 7030 6005 5147 4427 3820 3307 2872"
_KOWALIK = ".1957 .1947 .1735 .1600 .0844 .0627 .0456 .0342 .0323 .0235 .0246"
_KOWALIK_U = "4 2 1 .5 .25 .167 .125 .1 .0833 .0714 .0625"
_OSBORNE_1 = """.844 .908 .932 .936 .925 .908 .881 .850 .818 .784 .751 .718 .685 .658 .628 .603
.580 .558 .538 .522 .506 .490 .478 .467 .457 .448 .438 .431 .424 .420 .414 .411 .406"""
_OSBORNE_2 = """1.366 1.191 1.112 1.013 .991 .885 .831 .847 .786 .725 .746 .679 .608 .655 .616
.606 .602 .626 .651 .724 .649 .649 .694 .644 .624 .661 .612 .558 .533 .495 .500 .423 .395 .375 .372
.391 .396 .405 .428 .429 .523 .562 .607 .653 .672 .708 .633 .668 .645 .632 .591 .559 .597 .625 .739
.710 .729 .720 .636 .581 .428 .292 .162 .098 .054"""


@dataclass(frozen=True)
class Problem:
    """Residuals ``formula - target`` of a problem."""

    name: str
    formula: str
    columns: Floats
    """[rows, variables]."""
    target: Floats
    start: Floats
    minimum: float
    """Least sum of squares, as published, or of a minimum known in closed form."""

    @property
    def starts(self) -> dict[str, Floats]:
        """The standard start, and 10 and 100 times it where it is not 0."""
        return {
            f"x{factor}": factor * self.start
            for factor in (1, 10, 100)
            if factor == 1 or self.start.any()
        }


def problems() -> list[Problem]:
    """Return the 25 problems."""
    return [
        _rows("Rosenbrock", ["10*(p2 - p1^2)", "1 - p1"], [-1.2, 1.0], 0.0),
        _rows(
            "Freudenstein-Roth",
            ["-13 + p1 + ((5 - p2)*p2 - 2)*p2", "-29 + p1 + ((p2 + 1)*p2 - 14)*p2"],
            [0.5, -2.0],
            0.0,
        ),
        _rows(
            "Powell badly scaled",
            ["10000*p1*p2 - 1", "exp(-p1) + exp(-p2) - 1.0001"],
            [0.0, 1.0],
            0.0,
        ),
        _rows(
            "Brown badly scaled", ["p1 - 1000000", "p2 - 0.000002", "p1*p2 - 2"], [1.0, 1.0], 0.0
        ),
        Problem(
            "Beale",
            "p1*(1 - p2^x1)",
            np.array([[1.0], [2.0], [3.0]]),
            np.array([1.5, 2.25, 2.625]),
            np.array([1.0, 1.0]),
            0.0,
        ),
        Problem(
            "Jennrich-Sampson",
            "exp(x1*p1) + exp(x1*p2)",
            _counted(10),
            2.0 + 2.0 * np.arange(1.0, 11.0),
            np.array([0.3, 0.4]),
            124.36218235561,
        ),
        _rows(
            "Helical valley",
            [
                "10*(p3 - 10*(atan(p2/p1)/(2*pi) + 0.25*(1 - sign(p1))))",
                "10*(sqrt(p1^2 + p2^2) - 1)",
                "p3",
            ],
            [-1.0, 0.0, 0.0],
            0.0,
        ),
        _bard(),
        _gaussian(),
        Problem(
            "Meyer",
            "p1*exp(p2/(x1 + p3))",
            45.0 + 5.0 * _counted(16),
            _numbers(_MEYER),
            np.array([0.02, 4000.0, 250.0]),
            87.945855170,
        ),
        _gulf(),
        _box(),
        _rows(
            "Powell singular",
            ["p1 + 10*p2", "sqrt(5)*(p3 - p4)", "(p2 - 2*p3)^2", "sqrt(10)*(p1 - p4)^2"],
            [3.0, -1.0, 0.0, 1.0],
            0.0,
        ),
        _rows(
            "Wood",
            [
                "10*(p2 - p1^2)",
                "1 - p1",
                "sqrt(90)*(p4 - p3^2)",
                "1 - p3",
                "sqrt(10)*(p2 + p4 - 2)",
                "(p2 - p4)/sqrt(10)",
            ],
            [-3.0, -1.0, -3.0, -1.0],
            0.0,
        ),
        Problem(
            "Kowalik-Osborne",
            "p1*(x1^2 + x1*p2)/(x1^2 + x1*p3 + p4)",
            _numbers(_KOWALIK_U)[:, None],
            _numbers(_KOWALIK),
            np.array([0.25, 0.39, 0.415, 0.39]),
            3.0750560385e-4,
        ),
        Problem(
            "Brown-Dennis",
            "(p1 + x1*p2 - exp(x1))^2 + (p3 + p4*sin(x1) - cos(x1))^2",
            _counted(20) / 5.0,
            np.zeros(20),
            np.array([25.0, 5.0, -5.0, -1.0]),
            85822.201626356,
        ),
        Problem(
            "Osborne 1",
            "p1 + p2*exp(-x1*p4) + p3*exp(-x1*p5)",
            10.0 * (_counted(33) - 1.0),
            _numbers(_OSBORNE_1),
            np.array([0.5, 1.5, -1.0, 0.01, 0.02]),
            5.4648946975e-5,
        ),
        _biggs(),
        Problem(
            "Osborne 2",
            "p1*exp(-x1*p5) + p2*exp(-(x1 - p9)^2*p6) + p3*exp(-(x1 - p10)^2*p7)"
            " + p4*exp(-(x1 - p11)^2*p8)",
            (_counted(65) - 1.0) / 10.0,
            _numbers(_OSBORNE_2),
            np.array([1.3, 0.65, 0.65, 0.7, 0.6, 3.0, 5.0, 7.0, 2.0, 4.5, 5.5]),
            0.040137736294,
        ),
        _watson(6),
        _rows(
            "Variably dimensioned",
            [
                *(f"p{i} - 1" for i in range(1, 11)),
                (weighted := " + ".join(f"{i}*(p{i} - 1)" for i in range(1, 11))),
                f"({weighted})^2",
            ],
            [1.0 - i / 10.0 for i in range(1, 11)],
            0.0,
        ),
        _trigonometric(10),
        _brown_almost_linear(10),
        _rows(
            "Broyden tridiagonal",
            [
                f"(3 - 2*p{i})*p{i} + 1"
                + (f" - p{i - 1}" if i > 1 else "")
                + (f" - 2*p{i + 1}" if i < 10 else "")
                for i in range(1, 11)
            ],
            [-1.0] * 10,
            0.0,
        ),
        _chebyquad(8),
    ]


def _numbers(text: str) -> Floats:
    return np.array([float(word) for word in text.split()])


def _counted(rows: int) -> Floats:
    """Return the column 1, 2, ..., rows."""
    return np.arange(1.0, rows + 1.0)[:, None]


def _rows(name: str, residuals: list[str], start: list[float], minimum: float) -> Problem:
    """Make a problem whose residuals are different formulas."""
    formula = " + ".join(f"x{i}*({text})" for i, text in enumerate(residuals, start=1))
    m = len(residuals)
    return Problem(name, formula, np.eye(m), np.zeros(m), np.array(start), minimum)


def _bard() -> Problem:
    u = _counted(15)
    v = 16.0 - u
    columns = np.hstack([u, v, np.minimum(u, v)])
    formula, start = "p1 + x1/(x2*p2 + x3*p3)", np.ones(3)
    return Problem("Bard", formula, columns, _numbers(_BARD), start, 8.2148773065e-3)


def _gaussian() -> Problem:
    half = _numbers(_GAUSSIAN)
    target, columns = np.concatenate([half, half[-2::-1]]), (8.0 - _counted(15)) / 2.0
    formula, start = "p1*exp(-p2*(x1 - p3)^2/2)", np.array([0.4, 1.0, 0.0])
    return Problem("Gaussian", formula, columns, target, start, 1.1279327696e-8)


def _gulf() -> Problem:
    t = _counted(99) / 100.0
    columns = np.hstack([t, 25.0 + (-50.0 * np.log(t)) ** (2.0 / 3.0)])
    formula, start = "exp(-abs(x2 - p2)^p3/p1)", np.array([5.0, 2.5, 0.15])
    return Problem("Gulf", formula, columns, t[:, 0], start, 0.0)


def _box() -> Problem:
    t = _counted(10) / 10.0
    columns = np.hstack([t, np.exp(-t) - np.exp(-10.0 * t)])
    formula, start = "exp(-x1*p1) - exp(-x1*p2) - p3*x2", np.array([0.0, 10.0, 20.0])
    return Problem("Box 3d", formula, columns, np.zeros(10), start, 0.0)


def _biggs() -> Problem:
    t = _counted(13) / 10.0
    target = (np.exp(-t) - 5.0 * np.exp(-10.0 * t) + 3.0 * np.exp(-4.0 * t))[:, 0]
    formula = "p3*exp(-x1*p1) - p4*exp(-x1*p2) + p6*exp(-x1*p5)"
    start = np.array([1.0, 2.0, 1.0, 1.0, 1.0, 1.0])
    return Problem("Biggs EXP6", formula, t, target, start, 0.0)


def _watson(n: int) -> Problem:
    t = np.append(np.arange(1, 30) / 29.0, [0.0, 0.0])
    inner = (np.arange(31) < 29).astype(float)
    last = np.eye(31)[:, 29:]
    slope = " + ".join(f"{j - 1}*p{j}*x1^{j - 2}" for j in range(2, n + 1))
    value = " + ".join(f"p{j}*x1^{j - 1}" for j in range(1, n + 1))
    formula = f"x2*({slope} - ({value})^2 - 1) + x3*p1 + x4*(p2 - p1^2 - 1)"
    columns = np.column_stack([t, inner, last])
    return Problem("Watson", formula, columns, np.zeros(31), np.zeros(n), 2.2876700536e-3)


def _trigonometric(n: int) -> Problem:
    shared = " - ".join([str(n), *(f"cos(p{j})" for j in range(1, n + 1))])
    own = " + ".join(f"x{j}*({j}*(1 - cos(p{j})) - sin(p{j}))" for j in range(1, n + 1))
    zeros, start = np.zeros(n), np.full(n, 1.0 / n)
    return Problem("Trigonometric", f"{shared} + {own}", np.eye(n), zeros, start, 0.0)


def _brown_almost_linear(n: int) -> Problem:
    own = " + ".join(f"x{j}*p{j}" for j in range(1, n))
    total, product = (sign.join(f"p{j}" for j in range(1, n + 1)) for sign in (" + ", "*"))
    formula = f"(1 - x{n})*({own} + {total} - {n + 1}) + x{n}*({product} - 1)"
    zeros, start = np.zeros(n), np.full(n, 0.5)
    return Problem("Brown almost linear", formula, np.eye(n), zeros, start, 0.0)


def _chebyquad(n: int) -> Problem:
    """Make rows of coefficients of Chebyshev polynomials, which Horner's rule evaluates."""
    orders = np.arange(1, n + 1)
    columns = np.zeros((n, n + 1))
    for i in orders.tolist():
        columns[i - 1, : i + 1] = np.polynomial.chebyshev.cheb2poly(np.eye(n + 1)[i])[: i + 1]
    terms = []
    for j in range(1, n + 1):
        text = f"x{n + 1}"
        for k in range(n, 0, -1):
            text = f"x{k} + (2*p{j} - 1)*({text})"
        terms.append(f"({text})")
    integrals = np.where(
        orders % 2, 0.0, -1.0 / (np.square(orders, dtype=float) - 1.0 + orders % 2)
    )
    formula, start = f"({' + '.join(terms)})/{n}", orders / (n + 1.0)
    return Problem("Chebyquad", formula, columns, integrals, start, 3.5168737257e-3)
