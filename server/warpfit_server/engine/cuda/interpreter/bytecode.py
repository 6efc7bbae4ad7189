"""Encoding of the interpreter's instructions, which lowering.cu writes and interpreter.cu reads.

Both sources begin with these numbers and with batch.cu, which declares a batch on the device.
"""

from __future__ import annotations

from importlib import resources
from typing import Final

import numpy as np
from numpy.typing import NDArray

from warpfit.ops import OPERATORS

#: Word 0 of an instruction: case label, flags, and the index of a leaf to load before the case.
LABEL_BITS: Final = 10
LABEL_MASK: Final = (1 << LABEL_BITS) - 1
LOAD_VARIABLE: Final = 1 << 10
LOAD_SLOT: Final = 1 << 11
PUSH: Final = 1 << 12
INDEX_SHIFT: Final = 13
#: Largest index of a leaf that word 0 can carry.
INDEX_LIMIT: Final = 1 << (32 - INDEX_SHIFT)

#: Cases of a binary operator, added to its label, by the source of the operand that is not on top
#: of the stack. The odd number after each is the case in which it is the first operand.
FROM_VARIABLE: Final = 0
FROM_SLOT: Final = 2
FROM_STACK: Final = 4

#: Stack height of ``evaluate_slots``; a row-invariant subtree that needs more is hoisted in parts.
SLOT_LEVELS: Final = 16

#: Traits of a lowered program: its number of slots (row-invariant subtrees), the stack levels that
#: it needs below the top, and whether it is invalid.
SLOTS_MASK: Final = (1 << 20) - 1
NEED_SHIFT: Final = 20
NEED_MASK: Final = 31
INVALID: Final = 1 << 31
#: Flag in the order of programs: this one needs more stack levels than a warp has.
DEEP: Final = 1 << 31
#: Flag in the order of programs: some program of the launch is invalid, so none is interpreted.
SKIPPED: Final = 1 << 30

_CASES: Final = {1: 1, 2: 6, 3: 1}
#: Case label of the instruction that ends a program; label 0 does nothing.
END_LABEL: Final = 1 + sum(_CASES[row.arity] for row in OPERATORS.values())
#: Number of case labels.
CASES: Final = END_LABEL + 1
#: Declarations of a batch on the device.
BATCH_SOURCE: Final = resources.files(__package__).joinpath("batch.cu").read_text()


def header() -> str:
    """Return the numbers of this module as definitions of the same names, and `BATCH_SOURCE`."""
    numbers = {k: v for k, v in globals().items() if k.isupper() and isinstance(v, int)}
    definitions = [f"#define {name} {number}u\n" for name, number in numbers.items()]
    return "".join(definitions) + BATCH_SOURCE


def labels() -> NDArray[np.int64]:
    """Return the first case label of each operator by wire code; int64 [256], 0 for other codes."""
    if CASES > 1 << LABEL_BITS:
        raise ValueError(f"{CASES} case labels do not fit {LABEL_BITS} bits")
    table = np.zeros(256, dtype=np.int64)
    label = 1
    for row in OPERATORS.values():
        table[row.code] = label
        label += _CASES[row.arity]
    return table
