"""Comparison of an engine's results with the reference, operator by operator."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from support.engines.accuracy import ulps
from support.engines.error_bounds import BOUNDS, error_limit
from support.engines.strategies import edge_values
from warpfit.dataset import Dataset
from warpfit.expressions.workload import random_program
from warpfit.ir import Program
from warpfit.ops import BY_CODE, OPERATORS

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
    own = BOUNDS[name].precise_cuda
    bound = float(own.ulp) + REFERENCE_ULPS[dtype]
    with np.errstate(over="ignore"):
        is_bound = np.isfinite(error_limit(own, operands, expected.astype(dtype)))
    if name == "lgamma":  # next to its zeros, Python's own has only an absolute accuracy
        is_bound &= ~(np.abs(expected) < 1.0)
    distance = np.where(is_bound, ulps(got, expected), 0.0)
    worst = int(np.argmax(distance))
    assert distance[worst] <= bound, (
        f"{name}: {distance[worst]:.1f} ulp at {[float(o[worst]) for o in operands]}: "
        f"got {got[worst]!r}, expected {expected[worst]!r}"
    )


def subprograms(program: Program) -> list[tuple[Program, list[int]]]:
    """Every node of a program as a program, with the positions of its operands in the list."""
    nodes: list[tuple[Program, list[int]]] = []

    def add(node: Program, operands: list[int]) -> int:
        nodes.append((node, operands))
        return len(nodes) - 1

    program.fold(
        lambda code, value: add(Program([code], [value]), []),
        lambda op, at: add(Program.apply(op, *(nodes[k][0] for k in at)), list(at)),
    )
    return nodes


def node_results(run, columns: np.ndarray, roots, vectors) -> Iterator[tuple[Any, list[Any], Any]]:
    """Yield the operator of each node, an engine's results for its operands, and for itself."""
    nodes, parameters = [], []
    for root, vector in zip(roots, vectors, strict=True):
        first = len(nodes)
        for node, operands in subprograms(root):
            nodes.append((node, [first + k for k in operands]))
            parameters.append(vector[: node.parameters])
    data = Dataset.of(columns.T, dtype=columns.dtype)
    got = run(data, [node for node, _ in nodes], parameters).values[:, 0]
    for position, (node, operands) in enumerate(nodes):
        operator = BY_CODE.get(int(node.codes[-1]))
        if operator is not None:
            yield operator, [got[k] for k in operands], got[position]


def check_node_by_node(run, dtype, *, roots: int, tokens: int) -> None:
    """Each node's result is NumPy's operator on the engine's own results for the operands."""
    rng = np.random.default_rng(7)
    columns = rng.normal(size=(3, 701)).astype(dtype)
    sizes = rng.integers(2, tokens, size=roots).tolist()
    drawn = [random_program(rng, n, variables=3, operators=tuple(OPERATORS)) for n in sizes]
    vectors = [rng.uniform(-2, 2, size=root.parameters) for root in drawn]
    for operator, inputs, got in node_results(run, columns, drawn, vectors):
        assert_close(operator.name, got, expected_of(operator, inputs, dtype), inputs)
