"""Derivative rules of the operators, read from the operator table.

The chain rule multiplies the derivative of the result by a node, its *adjoint*, by the derivative
of the operator by one operand, the *partial* derivative. For each operator and operand the text of
the table is one of

* ``0``: the derivative is 0 everywhere;
* ``1`` or ``-1``: the adjoint passes, or its negative;
* the name of an operand, or ``r`` for the result: the partial derivative is there already, and one
  product is needed;
* anything else: a kernel computes the partial derivative, alone or, if it reads at most two
  operands, together with the product.

In every product a factor of 0 makes 0 of the other one, be it infinite or NaN: a branch that was
not taken must not show in derivatives.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from warpfit.ops import ARITIES, OPERATORS

#: Kinds of rule.
NOTHING, PASSES, NEGATES, OPERAND_IS_PARTIAL, COMPUTES = range(5)
#: Columns of a rule: kind; code of the kernel of the partial derivative alone and of its product
#: with the adjoint (0 if there is none); how many operands it reads, and which (3 is the result).
KIND, ALONE, SCALED, READS, FIRST_READ = range(5)
RULE_COLUMNS: Final = 7
#: Operands that an instruction can have.
_MOST: Final = 3
#: Codes of instructions that are no operators.
_ALONE_CODES: Final = 256
_SCALED_CODES: Final = _ALONE_CODES + 256 * _MOST
PRODUCT_CODE: Final = _SCALED_CODES + 256 * _MOST
CODES: Final = PRODUCT_CODE + 1
_NAMES: Final = "abcr"


@dataclass(frozen=True, slots=True)
class PartialKernel:
    """A kernel that computes a partial derivative."""

    code: int
    source: str
    """In the kernel language; a, b and c are the instruction's operands in their order."""
    arity: int
    """Operands of ``source``."""
    scaled: bool
    """Whether an adjoint comes before the operands, to multiply the result by."""

    @property
    def name(self) -> str:
        """Name in the object file."""
        return f"partial_{self.code}"


@cache
def partial_kernels() -> tuple[PartialKernel, ...]:
    """Return all kernels that the rules need."""
    kernels = []
    for row in OPERATORS.values():
        for index, text in enumerate(row.derivative):
            reads = _reads(text)
            if _kind(text) != COMPUTES:
                continue
            source = _renamed(text, reads)
            place = row.code * _MOST + index
            kernels.append(PartialKernel(_ALONE_CODES + place, source, len(reads), False))
            if len(reads) < _MOST:
                kernels.append(PartialKernel(_SCALED_CODES + place, source, len(reads), True))
    return tuple(kernels)


def rules() -> NDArray[np.int64]:
    """Return the rule of operand k of an operator in row 3 * code + k, [256 * 3, RULE_COLUMNS]."""
    table = np.zeros((256 * _MOST, RULE_COLUMNS), dtype=np.int64)
    for row in OPERATORS.values():
        for index, text in enumerate(row.derivative):
            reads = _reads(text)
            place = row.code * _MOST + index
            rule = table[place]
            rule[KIND] = _kind(text)
            rule[READS] = len(reads)
            rule[FIRST_READ : FIRST_READ + len(reads)] = [_NAMES.index(name) for name in reads]
            if rule[KIND] == COMPUTES:
                rule[ALONE] = _ALONE_CODES + place
                rule[SCALED] = _SCALED_CODES + place if len(reads) < _MOST else 0
    return table


def arities() -> NDArray[np.int8]:
    """Return the number of operands of every instruction by code, int8 [CODES]."""
    table = np.zeros(CODES, dtype=np.int8)
    table[: len(ARITIES)] = ARITIES
    for kernel in partial_kernels():
        table[kernel.code] = kernel.arity + kernel.scaled
    table[PRODUCT_CODE] = 2
    return table


def _kind(text: str) -> int:
    fixed = {"0": NOTHING, "1": PASSES, "-1": NEGATES}
    return fixed.get(text, OPERAND_IS_PARTIAL if text in _NAMES else COMPUTES)


def _reads(text: str) -> list[str]:
    """Return the operands that a derivative reads, and r if it reads the result."""
    names = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    found = [name for name in _NAMES if name in names]
    if len(found) > _MOST:
        raise ValueError(f"the derivative {text} reads more than {_MOST} operands")
    return found


def _renamed(text: str, reads: list[str]) -> str:
    """Rename the operands that are read to a, b, c."""
    tree = ast.parse(text, mode="eval")
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in reads:
            node.id = _NAMES[reads.index(node.id)]
    return ast.unparse(tree)
