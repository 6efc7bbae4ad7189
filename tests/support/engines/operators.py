"""Comparison of a CUDA engine's results with the reference, operator by operator."""

import numpy as np

from support.engines.accuracy import ulps
from support.engines.error_bounds import BOUNDS
from support.engines.strategies import edge_values
from warpfit.ir import Program

#: NumPy's own float64 functions err by up to 4 ulp.
REFERENCE_ULPS = {np.float32: 0.5, np.float64: 4.0}


def operand_rows(arity: int, dtype, seed: int = 0) -> np.ndarray:
    """Every combination of edge values (a sample of them for three operands), and random rows."""
    rng = np.random.default_rng(seed)
    edges = np.array(edge_values(dtype), dtype=dtype)
    if arity < 3:
        first, second = (axis.ravel() for axis in np.meshgrid(edges, edges))
        combined = np.stack([first, second, first])
    else:
        combined = rng.choice(edges, size=(3, 4000))
    wide = rng.normal(size=(3, 2000)) * 10.0 ** rng.uniform(-6, 6, size=(3, 2000))
    near = rng.uniform(-2, 2, size=(3, 2000))
    return np.concatenate([combined, wide, near], axis=1).astype(dtype)


def expected_of(operator, operands: list[np.ndarray], dtype) -> np.ndarray:
    """NumPy's float64 result.

    The thresholds of the protected operators are the data type's, which random operands meet only
    at that very value.
    """
    at_threshold = np.any([np.abs(operand) == dtype(0.001) for operand in operands])
    guarded = operator.name in ("pdiv", "plog", "pinv") and at_threshold
    kind = dtype if guarded else np.float64
    with np.errstate(all="ignore"):
        return np.asarray(operator.numpy(*[o.astype(kind) for o in operands]), dtype=np.float64)


def assert_close(name: str, got: np.ndarray, expected: np.ndarray, operands) -> None:
    dtype = got.dtype.type
    bound = float(BOUNDS[name].precise_cuda.ulp) + REFERENCE_ULPS[dtype]
    distance = ulps(got, expected)
    worst = int(np.argmax(distance))
    assert distance[worst] <= bound, (
        f"{name}: {distance[worst]:.1f} ulp at {[float(o[worst]) for o in operands]}: "
        f"got {got[worst]!r}, expected {expected[worst]!r}"
    )


def subprograms(program: Program) -> list[tuple[Program, list[Program]]]:
    """Every operator node as a program, with its operands as programs."""
    nodes: list[tuple[Program, list[Program]]] = []

    def leaf(code, value):
        return Program([code], [value])

    def operator(row, operands):
        nodes.append((Program.apply(row, *operands), operands))
        return nodes[-1][0]

    program.fold(leaf, operator)
    return nodes
