"""Finds the parameters that a program is linear in, from the operators' derivatives.

An operator is linear in an operand if the derivative by it mentions neither that operand nor the
result: the table says ``b`` for the first operand of ``a * b``, and ``1 / b`` for that of
``a / b``. Where the derivative by one operand mentions another one with parameters, as in
``p1 * p2``, the program is linear in either but not in both, and the operand with more linear
parameters is chosen. So a program is linear in all marked parameters together.
"""

from __future__ import annotations

import ast
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.ops import FIRST_OPERATOR, OPERATORS, PARAMETER
from warpfit_server.engine.native import numba_cache
from warpfit_server.engine.native.intrinsics import uncounted

Floats = NDArray[np.float64]
#: Columns of `operator_table`: arity, then for each operand the operands that its derivative reads.
_ARITY: Final = 0
_READS: Final = 1
#: A bit for each operand that a derivative reads; all bits if the operator is not linear in it.
_EVERYTHING: Final = 7
#: Operators with the derivative of a linear one, but for jumps.
_JUMPING: Final = frozenset({"mod"})
#: Columns of a node: tokens of its subtree; parameters below that it is linear in; a bit that says
#: whether there are any parameters below, then a bit for each chosen operand, in which it is taken
#: for linear; whether the program is linear in the node; the nodes of the operands.
_SIZE: Final = 0
_LINEAR: Final = 1
_CHOSEN: Final = 2
_PASSES: Final = 3
_ROOTS: Final = 4
COLUMNS: Final = 7


@cache
def operator_table() -> NDArray[np.int64]:
    """Return the arity and the operands that each derivative reads, by operator code; [256, 4]."""
    table = np.zeros((256, _READS + 3), dtype=np.int64)
    for operator in OPERATORS.values():
        table[operator.code, _ARITY] = operator.arity
        for operand, text in enumerate(operator.derivative):
            tree = ast.parse(text, mode="eval")
            names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
            bends = operator.name in _JUMPING or text.strip() == "0"
            reads = sum(1 << place for place, name in enumerate("abc") if name in names)
            if bends or "r" in names or "abc"[operand] in names:
                reads = _EVERYTHING
            table[operator.code, _READS + operand] = reads
    return table


# It allocates nothing, so that references need not be counted.
@numba_cache.njit(nogil=True, error_model="numpy", _nrt=False)  # type: ignore[untyped-decorator]
def mark_linear(
    codes: NDArray[np.uint8],
    values: Floats,
    starts: NDArray[np.int64],
    parameter_starts: NDArray[np.int64],
    table: NDArray[np.int64],
    nodes: NDArray[np.int64],
    linear: Floats,
) -> None:
    """Set ``linear`` to 0 for the parameters that their checked programs are not linear in.

    The starts of programs and of parameters end with the total; ``table`` is `operator_table`,
    ``nodes`` is scratch memory, [tokens of the longest program, COLUMNS].
    """
    for program in range(len(starts) - 1):
        first, last = starts[program], starts[program + 1] - 1
        for token in range(first, last + 1):
            _count(codes, first, token, table, nodes)
        nodes[last - first, _PASSES] = 1
        for token in range(last, first - 1, -1):
            node = nodes[token - first]
            if codes[token] >= FIRST_OPERATOR:
                place = token - first - 1
                for operand in range(table[codes[token], _ARITY] - 1, -1, -1):
                    nodes[place, _PASSES] = node[_PASSES] & (node[_CHOSEN] >> (1 + operand) & 1)
                    place -= nodes[place, _SIZE]
            elif codes[token] == PARAMETER and node[_PASSES] == 0:
                linear[parameter_starts[program] + np.int64(values[token])] = 0.0


@uncounted
def _count(codes: Any, first: int, token: int, table: Any, nodes: Any) -> None:
    """Choose the operands that a node is treated as linear in, and count their parameters."""
    node, code = nodes[token - first], codes[token]
    if code < FIRST_OPERATOR:
        node[_SIZE], node[_LINEAR] = 1, code == PARAMETER
        node[_CHOSEN] = code == PARAMETER
        return
    arity, place = table[code, _ARITY], token - first - 1
    roots = node[_ROOTS:COLUMNS]
    node[_SIZE], node[_LINEAR], node[_CHOSEN] = 1, 0, 0
    parametric = 0
    for operand in range(arity - 1, -1, -1):
        roots[operand] = place
        node[_SIZE] += nodes[place, _SIZE]
        parametric |= (nodes[place, _CHOSEN] & 1) << operand
        place -= nodes[place, _SIZE]
    chosen, tried = 0, 0
    for _ in range(arity):
        best = -1
        for operand in range(arity):
            more = best < 0 or nodes[roots[operand], _LINEAR] > nodes[roots[best], _LINEAR]
            if not tried >> operand & 1 and more:
                best = operand
        tried |= 1 << best
        reads = table[code, _READS + best]
        clash = reads & (1 << best | chosen)
        for operand in range(arity):
            clash = clash or (chosen >> operand & 1 and table[code, _READS + operand] >> best & 1)
        if nodes[roots[best], _LINEAR] and not clash:
            chosen |= 1 << best
            node[_LINEAR] += nodes[roots[best], _LINEAR]
    node[_CHOSEN] = (parametric != 0) | chosen << 1
