"""Evaluation in NumPy float64, against which every engine is tested."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from warpfit.ir import Program
from warpfit.ops import CONSTANT, VARIABLE, Operator

Floats = NDArray[np.float64]


def evaluate_program(program: Program, variables: ArrayLike, parameters: ArrayLike = ()) -> Floats:
    """Evaluate one program on [variables, rows] and [parameters]; return float64 [rows]."""
    columns = np.asarray(variables, dtype=np.float64)
    vector = np.asarray(parameters, dtype=np.float64)

    def leaf(code: int, value: float) -> Floats:
        if code == VARIABLE:
            return np.asarray(columns[int(value)])
        return np.asarray(value if code == CONSTANT else vector[int(value)], dtype=np.float64)

    def operator(op: Operator, operands: list[Floats]) -> Floats:
        return np.asarray(op.numpy(*operands), dtype=np.float64)

    with np.errstate(all="ignore"):
        result = program.fold(leaf, operator)
    return np.broadcast_to(result, columns.shape[1:]).copy()


def evaluate(
    programs: Sequence[Program], variables: ArrayLike, parameters: Sequence[ArrayLike] | None = None
) -> Floats:
    """Evaluate programs with one parameter vector each; return float64 [programs, rows]."""
    vectors = [()] * len(programs) if parameters is None else parameters
    return np.stack(
        [evaluate_program(p, variables, v) for p, v in zip(programs, vectors, strict=True)]
    )
