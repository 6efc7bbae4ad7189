"""Hypothesis strategies for random programs, parameter vectors and data with edge values."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import DTypeLike, NDArray

from warpfit.ir import Program
from warpfit.ops import CONSTANT, FIRST_OPERATOR, OPERATORS, PARAMETER, VARIABLE

Token = tuple[int, float]


def edge_values(dtype: DTypeLike = np.float64) -> list[float]:
    """Values at which operators change their behaviour, all exact in ``dtype``."""
    info = np.finfo(np.dtype(dtype).type)
    third = np.dtype(dtype).type(0.001)
    special = [0.0, 1.0, 0.5, 2.0, 3.0, 0.75, 10.0, 88.0, 710.0, np.pi, float(np.inf)]
    special += [info.tiny, info.smallest_subnormal, info.max, info.eps, third]
    special += [np.nextafter(third, info.dtype.type(1)), np.nextafter(third, info.dtype.type(0))]
    exact = [float(info.dtype.type(value)) for value in special]
    return [*exact, *(-value for value in exact), float("nan")]


def numbers(dtype: DTypeLike = np.float64, *, edges: bool = True) -> st.SearchStrategy[float]:
    """Floats exact in ``dtype``: ordinary ones, and edge values unless ``edges`` is false."""
    width = 32 if np.dtype(dtype).itemsize == 4 else 64
    ordinary = st.floats(-1e3, 1e3, width=width, allow_subnormal=False)
    return ordinary | st.sampled_from(edge_values(dtype)) if edges else ordinary


def leaves(
    variables: int, parameters: int, constants: st.SearchStrategy[float]
) -> st.SearchStrategy[Token]:
    """Tokens for one leaf: a variable, a parameter (if there are any) or a constant."""
    kinds = [constants.map(lambda value: (CONSTANT, value))]
    for code, count in ((VARIABLE, variables), (PARAMETER, parameters)):
        if count:
            indices = st.integers(0, count - 1)
            kinds.append(indices.map(lambda index, code=code: (code, float(index))))
    return st.one_of(*reversed(kinds))


@st.composite
def programs(
    draw: st.DrawFn,
    max_tokens: int = 40,
    variables: int = 3,
    parameters: int = 2,
    operators: Sequence[str] = tuple(OPERATORS),
    constants: st.SearchStrategy[float] | None = None,
) -> Program:
    """Draw well-formed programs over any part of the operator table.

    They have ``max_tokens`` at most, or one or two more if no operator is binary.
    """
    leaf = leaves(variables, parameters, numbers() if constants is None else constants)
    arities = {OPERATORS[name].code: OPERATORS[name].arity for name in operators}
    operator = st.sampled_from([(code, 0.0) for code in arities]) if arities else leaf
    joins = sorted({arity for arity in arities.values() if arity > 1})
    tokens: list[Token] = []
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


@st.composite
def matrices(
    draw: st.DrawFn,
    variables: int = 3,
    max_rows: int = 40,
    dtype: DTypeLike = np.float64,
    edges: bool = True,
) -> NDArray[Any]:
    """Draw variable matrices, [variables, rows] with 1 to ``max_rows`` rows."""
    rows = draw(st.integers(1, max_rows))
    return draw(hnp.arrays(dtype, (variables, rows), elements=numbers(dtype, edges=edges)))
