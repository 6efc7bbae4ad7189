"""Lowered programs: the instructions that the interpreters run, as arrays for compiled code.

A *location* says where a value lives: ``index << 2 | kind``, a kind being one of

* ``INPUT``: the rows of a variable, in the data set;
* ``SLOT``: the rows of an intermediate result; slots are reused as registers are;
* ``INVARIANT``: a number that no row changes;
* ``RESULT``: the rows of the program's result.

The instructions of a program are its *prologue*, on invariants, which runs once for each parameter
vector, and its body, which runs on each block of rows.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from warpfit.ops import VARIABLE
from warpfit_server.engine.native.arguments import reader, words
from warpfit_server.engine.native.intrinsics import inlined

INPUT, SLOT, INVARIANT, RESULT = range(4)
NONE: Final = -1
#: Code of the instruction that copies its operand; no operator has a leaf's code.
COPY_CODE: Final = VARIABLE


def _words(*names: str) -> list[tuple[str, type[np.int64]]]:
    return [(name, np.int64) for name in names]


#: Code; locations of the result and of the operands; a bit set of the operands that are invariants.
INSTRUCTION: Final = np.dtype(
    [("code", np.int64), ("target", np.int64), ("operands", np.int64, 3), ("broadcast", np.int64)]
)
#: What there is of a program. ``loss`` and ``loss_derivative`` are the locations of the row loss
#: and of its derivative by the result, NONE for what was not requested.
HEADER: Final = np.dtype(
    _words(
        *("start", "prologue_end", "end", "invariants", "slots", "first_load", "loads"),
        *("first_column", "columns", "first_entry", "entries", "loss", "loss_derivative"),
    )
)
#: An invariant to fill before the prologue runs, with a parameter or, if that is NONE, a value.
LOAD: Final = np.dtype([("invariant", np.int64), ("parameter", np.int64), ("value", np.float64)])
#: A column; a parameter, or -1 - a variable; an invariant, or NONE for 1. See `differentiate`.
ENTRY: Final = np.dtype(_words("column", "leaf", "factor"))


class Lowered(NamedTuple):
    """Programs of a batch; compiled code reads the fields by the same names."""

    headers: Any
    """HEADER of each program."""
    instructions: Any
    """INSTRUCTION records."""
    loads: Any
    """LOAD records."""
    columns: Any
    """Locations, int64; empty without derivatives, like the next."""
    entries: Any
    """ENTRY records."""

    def part(self, first: int, stop: int) -> Lowered:
        """Return a range of programs that lie one behind the other, without their numbers.

        Parts are equal to the byte if programs differ only in constants, or in which parameter is
        where.
        """
        headers = self.headers[first:stop].copy()
        last = headers[-1]
        begins = ("start", "first_load", "first_column", "first_entry")
        counts = (last["end"] - last["start"], *(last[n] for n in ("loads", "columns", "entries")))
        arrays = []
        for array, begin, count in zip(self[1:], begins, counts, strict=True):
            start = int(headers[begin][0])
            arrays.append(array[start : int(last[begin] + count)].copy())
            moved = ("start", "prologue_end", "end") if begin == "start" else (begin,)
            for name in moved:
                headers[name] -= start
        loads = arrays[1]
        loads["parameter"], loads["value"] = NONE, 0.0
        return Lowered(headers, *arrays)


@inlined
def allocate(programs: int, instructions: int, loads: int, tokens: int = 0) -> Lowered:
    """Allocate arrays for so many programs, instructions and loads, and derivatives of tokens."""
    return Lowered(
        np.empty(programs, dtype=HEADER),
        np.empty(instructions, dtype=INSTRUCTION),
        np.empty(loads, dtype=LOAD),
        np.empty(tokens, dtype=np.int64),
        np.empty(2 * tokens, dtype=ENTRY),
    )


_headers, _instructions, _loads, _entries = (
    reader(kind) for kind in (HEADER, INSTRUCTION, LOAD, ENTRY)
)


@inlined
def lowered_of(block: int, index: int) -> Any:
    """Return the arrays of `Lowered` in an argument block, from number ``index``."""
    return Lowered(
        _headers(block, index),
        _instructions(block, index + 1),
        _loads(block, index + 2),
        words(block, index + 3),
        _entries(block, index + 4),
    )
