"""What the estimators share: their server, their data, and their predictions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.utils.validation import (
    _check_sample_weight,
    validate_data,
)

from warpfit import reference
from warpfit.client import Client, connect
from warpfit.embedded import embedded_server
from warpfit.ir import Program


@contextmanager
def connected(address: str | None) -> Iterator[Client]:
    """Connect to a server, or to one that is started here on the CPU for as long as the block."""
    if address is not None:
        with connect(address) as client:
            yield client
        return
    with embedded_server(["--engine", "cpu"]) as started, connect(started) as client:
        yield client


def training_data(
    estimator: Any, X: Any, y: Any, sample_weight: Any
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Check what was given to ``fit``, and add up the weights of rows that are equal.

    So a weight means repetition to the last bit, and the order of the rows does not matter.

    Returns:
        Rows [rows, variables] in ascending order, their targets [rows] and weights [rows].

    Raises:
        ValueError: as scikit-learn does, for data that are not finite numbers of fitting shapes.

    """
    X, y = validate_data(estimator, X, y, dtype=np.float64, y_numeric=True)
    weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
    table = np.column_stack([X, y])[weights > 0]
    rows, place = np.unique(table, axis=0, return_inverse=True)
    totals = np.zeros(len(rows))
    np.add.at(totals, place.ravel(), weights[weights > 0])
    return rows[:, :-1], rows[:, -1], totals


def predictions(estimator: Any, program: Program, X: Any) -> NDArray[np.float64]:
    """Evaluate the fitted program here, without a server; [rows]."""
    X = validate_data(estimator, X, dtype=np.float64, reset=False)
    return reference.evaluate_program(program, X.T)
