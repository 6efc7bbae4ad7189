"""Random programs and data with edge values, and an engine's results beside the reference's."""

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numba.core.dispatcher import Dispatcher
from numpy.typing import DTypeLike, NDArray

from support.engines.accuracy import BOUNDS, error_limit, ulps
from support.random_programs import random_program
from warpfit.dataset import Dataset
from warpfit.ir import Program
from warpfit.ops import BY_CODE, CONSTANT, FIRST_OPERATOR, OPERATORS, PARAMETER, VARIABLE


def edge_values(dtype: DTypeLike = np.float64) -> list[float]:
    """Values at which operators change their behaviour, all exact in ``dtype``."""
    info = np.finfo(np.dtype(dtype).type)
    third = np.dtype(dtype).type(0.001)
    special = [0.0, 1.0, 0.5, 2.0, 3.0, 0.75, 10.0, 88.0, 710.0, np.pi, float(np.inf)]
    special += [info.tiny, info.smallest_subnormal, info.max, info.eps, third]
    special += [np.nextafter(third, info.dtype.type(1)), np.nextafter(third, info.dtype.type(0))]
    exact = [float(info.dtype.type(value)) for value in special]
    return [*exact, *(-value for value in exact), float("nan")]


def numbers(dtype: DTypeLike = np.float64) -> st.SearchStrategy[float]:
    """Floats exact in ``dtype``: ordinary ones, and edge values."""
    width = 32 if np.dtype(dtype).itemsize == 4 else 64
    ordinary = st.floats(-1e3, 1e3, width=width, allow_subnormal=False)
    return ordinary | st.sampled_from(edge_values(dtype))


def leaves(variables, parameters, constants):
    """Tokens for one leaf: a variable, a parameter (if there are any) or a constant."""
    kinds = [constants.map(lambda value: (CONSTANT, value))]
    for code, count in ((VARIABLE, variables), (PARAMETER, parameters)):
        if count:
            indices = st.integers(0, count - 1)
            kinds.append(indices.map(lambda index, code=code: (code, float(index))))
    return st.one_of(*reversed(kinds))


@st.composite
def programs(
    draw, max_tokens=40, variables=3, parameters=2, operators=tuple(OPERATORS), constants=None
):
    """Draw well-formed programs over any part of the operator table.

    They have ``max_tokens`` at most, or one or two more if no operator is binary.
    """
    leaf = leaves(variables, parameters, numbers() if constants is None else constants)
    arities = {OPERATORS[name].code: OPERATORS[name].arity for name in operators}
    operator = st.sampled_from([(code, 0.0) for code in arities]) if arities else leaf
    joins = sorted({arity for arity in arities.values() if arity > 1})
    tokens: list[tuple[int, float]] = []
    height = 0
    for token in draw(st.lists(leaf | operator, min_size=1, max_size=max(1, max_tokens // 2))):
        arity = arities.get(token[0], 0)
        if token[0] >= FIRST_OPERATOR and arity > height:
            continue
        if arity == 0 and height and not joins:
            continue
        tokens.append(token)
        height += 1 - arity
    while height != 1:
        fitting = [(code, 0.0) for code, arity in arities.items() if 1 < arity <= height]
        token = draw(st.sampled_from(fitting) if height and fitting else leaf)
        tokens.append(token)
        height += 1 - arities.get(token[0], 0)
    return Program(*zip(*tokens, strict=True))


def vectors(count: int, dtype: DTypeLike = np.float64) -> st.SearchStrategy[NDArray[Any]]:
    """Parameter vectors, [count]."""
    return hnp.arrays(dtype, count, elements=numbers(dtype))


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


def compiled() -> set[tuple[str, str]]:
    """Names of the server's functions that have machine code, each with types of arguments."""
    return {
        (function.__qualname__, str(types))
        for name, module in list(sys.modules.items())
        if name.startswith("warpfit_server")
        for function in vars(module).values()
        if isinstance(function, Dispatcher)
        for types in function.overloads
    }
