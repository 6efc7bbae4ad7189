"""The operator table: codes, kernel language and conventions of the derivatives.

`expressions/test_derivatives.py` compares all derivatives with differences, and the engines' tests
the kernels with NumPy.
"""

import numpy as np
import pytest

from warpfit.expressions import special
from warpfit.ops import FIRST_OPERATOR, KERNEL_FUNCTIONS, OPERATORS

#: Codes are a contract with every client ever built: a line here never changes.
CODES = {
    **{"add": 16, "sub": 17, "mul": 18, "div": 19, "pow": 20, "neg": 21, "abs": 22, "log": 23},
    **{"exp": 24, "sqrt": 25, "inv": 26, "square": 27, "cube": 28, "cbrt": 29, "min": 30},
    **{"max": 31, "sin": 32, "cos": 33, "tan": 34, "asin": 35, "acos": 36, "atan": 37},
    **{"atan2": 38, "sinh": 39, "cosh": 40, "tanh": 41, "log1p": 42, "expm1": 43, "log2": 44},
    **{"log10": 45, "floor": 46, "ceil": 47, "sign": 48, "lt": 49, "le": 50, "gt": 51, "ge": 52},
    **{"eq": 53, "ne": 54, "and": 55, "or": 56, "not": 57, "where": 58, "fma": 59, "aq": 60},
    **{"logabs": 61, "sqrtabs": 62, "powabs": 63, "logistic": 64, "erf": 65, "relu": 66},
    **{"pdiv": 67, "plog": 68, "pinv": 69, "zdiv": 70, "gamma": 71, "lgamma": 72},
    **{"mod": 73, "round": 74, "erfc": 75},
}

KERNEL_NAMESPACE = {
    **{name: getattr(np, name) for name in KERNEL_FUNCTIONS & set(dir(np))},
    **{name: getattr(special, name) for name in ("erf", "erfc", "tgamma", "lgamma", "digamma")},
    **{"pow": special.power, "select": np.where},
    **{"asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "atan2": np.arctan2},
}


def kernel(text, **operands):
    with np.errstate(all="ignore"):
        return np.asarray(eval(text, {**KERNEL_NAMESPACE, **operands}), dtype=np.float64)


def test_codes_are_frozen():
    assert {name: row.code for name, row in OPERATORS.items()} == CODES
    assert len(set(CODES.values())) == len(CODES)
    assert all(FIRST_OPERATOR <= code < 256 for code in CODES.values())


@pytest.mark.parametrize(
    ("name", "point", "gradient"),
    [
        ("abs", (0.0,), (0,)),
        ("relu", (0.0,), (0,)),
        ("sign", (0.0,), (0,)),
        ("floor", (2.0,), (0,)),
        ("sqrtabs", (0.0,), (0,)),
        ("min", (1.5, 1.5), (1, 0)),
        ("max", (1.5, 1.5), (1, 0)),
        ("pow", (0.0, 0.0), (0, 0)),
        ("pow", (0.0, 1.0), (1, 0)),
        ("pow", (-2.0, 0.0), (0, np.nan)),
        ("powabs", (0.0, 2.0), (0, 0)),
        ("powabs", (-2.0, 3.0), (-12, 8 * np.log(2))),
        ("pdiv", (3.0, 0.0), (0, 0)),
        ("zdiv", (3.0, 0.0), (0, 0)),
        ("plog", (0.0,), (0,)),
        ("pinv", (0.001,), (0,)),
        ("where", (0.0, 5.0, 6.0), (0, 0, 1)),
        ("where", (np.nan, 5.0, 6.0), (0, 1, 0)),
        ("logistic", (1000.0,), (0,)),
        ("tanh", (1000.0,), (0,)),
        ("gamma", (0.0,), (-np.inf,)),
        ("gamma", (-1.0,), (np.nan,)),
        ("lgamma", (-1.0,), (0,)),
        ("lgamma", (0.0,), (-np.inf,)),
        ("lgamma", (np.inf,), (np.inf,)),
        ("mod", (6.0, 3.0), (1, -2)),
        ("mod", (-1e300, 7.0), (1, 1e300 / 7)),
        ("mod", (1.0, 0.1), (1, -9)),
        ("mod", (5.0, np.inf), (1, 0)),
        ("round", (2.5,), (0,)),
    ],
)
def test_derivative_at_kinks_and_limits(name, point, gradient):
    row = OPERATORS[name]
    operands = dict(zip(row.operands, map(np.float64, point), strict=True))
    r = kernel(row.kernel, **operands)
    got = [kernel(text, **operands, r=r) for text in row.derivative]
    np.testing.assert_allclose(got, gradient, rtol=1e-15)
