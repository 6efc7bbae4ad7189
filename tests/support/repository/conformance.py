"""Read ``proto/conformance.json`` and compare numbers by its rules."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

PROTO = Path(__file__).resolve().parents[3] / "proto"
VECTORS: dict[str, Any] = json.loads((PROTO / "conformance.json").read_text())
DATASETS: dict[str, Any] = {dataset["name"]: dataset for dataset in VECTORS["datasets"]}


def array(nested: Any) -> NDArray[np.float64]:
    """Numbers and the strings nan, inf and -inf."""
    return np.array(nested, dtype=np.float64)


def assert_met(got: ArrayLike, expected: Any, tolerance: float) -> None:
    """Finite numbers within tolerance times the larger of 1 and their size, others exactly."""
    wanted = array(expected)
    values = np.asarray(got, dtype=np.float64)
    assert values.shape == wanted.shape
    finite = np.isfinite(wanted)
    np.testing.assert_array_equal(values[~finite], wanted[~finite])
    error = np.abs(values[finite] - wanted[finite]) / np.maximum(1.0, np.abs(wanted[finite]))
    assert error.size == 0 or error.max() <= tolerance
