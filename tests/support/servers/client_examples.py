"""Data and expressions for tests of clients, and their values."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

import warpfit
from warpfit.expressions import reference
from warpfit.transport.connection import RetryPolicy

_rng = np.random.default_rng(5)
X = _rng.normal(size=(60, 3)).astype(np.float32)
Y = _rng.normal(size=60).astype(np.float32)
WEIGHTS = _rng.uniform(size=60).astype(np.float32)
EXPRESSIONS = ["x1 + p1*x2", "sin(x3) - 2", "p2/(p1 + x1^2)"]
PARAMETERS = [[0.5], [], [1.5, -2.0]]
QUICK = RetryPolicy(total_seconds=10, initial_backoff=0.001, maximum_backoff=0.01)


def expected_values(
    dtype: Any = np.float32, expressions: Any = EXPRESSIONS, parameters: Any = PARAMETERS
) -> NDArray[Any]:
    """Values of the reference, [rows, expressions]."""
    programs = [warpfit.parse(text) for text in expressions]
    return reference.evaluate_programs(programs, X.T, parameters).T.astype(dtype)
