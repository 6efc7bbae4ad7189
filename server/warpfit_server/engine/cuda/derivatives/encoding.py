"""Programs with derivatives as the instructions of derivatives.cu; no device needed.

The programs are differentiated, scheduled and given levels by the same code as for the CPU engine.
Here each instruction is told whether an operand is the result of the instruction before, which is
still in registers, and whether anybody will look for its own result in a level.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit_server.engine.autodiff.differentiate import LoweringWorkspace, Source, reserve
from warpfit_server.engine.lowering.lowered import COPY_CODE, INPUT, NONE, RESULT, SCALAR
from warpfit_server.engine.native.intrinsics import uncounted

#: Where an operand comes from, and kinds of a place.
_LEVEL: Final = 1
_COLUMN: Final = 2
_SCALAR: Final = 3
_BEFORE: Final = 4
_STORE: Final = 1 << 19
_PLACE_SHIFT: Final = 3
#: Field by field the struct Program of derivatives.cu; the compiled code knows them by number.
_FIELDS: Final = (
    *("first", "count", "prologue", "prologue_count", "load", "loads", "scalar", "scalars"),
    *("column", "columns", "entry", "entries", "loss", "slope", "levels", "parameter"),
    *("parameters", "result"),
)
_WIDE_FIELDS: Final = ("sum", "triangle")
PROGRAM: Final = np.dtype(
    [*((name, np.uint32) for name in _FIELDS), *((name, np.uint64) for name in _WIDE_FIELDS)]
)
_FIRST, _COUNT, _PROLOGUE, _PROLOGUE_COUNT, _LOAD, _LOADS, _, _SCALARS = range(8)
_COLUMNS_FIRST, _COLUMNS, _ENTRY, _ENTRIES, _LOSS, _SLOPE, _LEVELS, _, _, _RESULT = range(8, 18)


@dataclass(frozen=True, slots=True, eq=False)
class ProgramRecords:
    """Sizes and places of a lowered batch, which the host needs to launch it."""

    programs: NDArray[np.void]
    """Records of the struct Program, [programs]."""
    sums: NDArray[np.int64]
    """Sums of each job of a program, [programs]."""

    @property
    def work(self) -> NDArray[np.int64]:
        """Instructions of each program, and a fourth of its sums, [programs]."""
        return self.programs["count"].astype(np.int64) + self.sums // 4


@dataclass(frozen=True, slots=True, eq=False)
class DerivativeCode(ProgramRecords):
    """A lowered batch without its parameters, as the kernels of derivatives.cu read it.

    The parts of a program lie together; programs lie in any order.
    """

    instructions: NDArray[np.uint32]
    """[instructions + 1, 4]; the last one pads the kernel's read ahead."""
    columns: NDArray[np.uint32]
    """Place of each column."""
    entries: NDArray[np.int32]
    """Column, parameter or -1 - variable, and scalar, [entries, 3]."""
    loads: NDArray[np.int32]
    """Scalar, and parameter or -1, [loads, 2]."""
    constants: NDArray[np.float64]
    """Value of each load of a constant."""

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """What goes to the device, by the name of the kernel's argument."""
        names = ("instructions", "programs", "columns", "entries", "loads", "constants")
        return {name: getattr(self, name) for name in names}


# ------------------------------------------------------------------------------ compiled by Numba


class Encoded(NamedTuple):
    """Where the code of all programs goes, in compiled code; see `DerivativeCode`."""

    instructions: Any
    programs: Any
    """Words of the records, uint32 [programs, words]."""
    columns: Any
    entries: Any
    loads: Any
    constants: Any


@uncounted
def encode_program(
    source: Source, workspace: LoweringWorkspace, program: int, labels: Any, keeps_values: bool,
    awaited: Any, out: Encoded,
) -> Any:  # fmt: skip
    """Encode what `differentiate_program` has made, behind all that is there.

    Args:
        source: of the batch, with how much is there.
        workspace: with the lowered program.
        program: its number in the batch.
        labels: case label of each instruction by code.
        keeps_values: whether the values are looked for when the program has run.
        awaited: memory, bool [slots + 1].
        out: is filled; but for fields of the record that depend on programs before this one.

    Returns:
        The largest index that has to fit in 16 bits.

    """
    record = out.programs[program]
    _copy_lists(source, workspace, record, out)
    lowered = workspace.program
    header, made = lowered.headers[0], lowered.instructions
    slots = header.slots
    for level in range(slots):
        awaited[level] = False
    awaited[slots] = keeps_values
    record[_RESULT] = slots << _PLACE_SHIFT | _LEVEL
    for k in range(header.columns):
        place = _await(lowered.columns[k], slots, awaited)
        out.columns[np.int64(record[_COLUMNS_FIRST]) + k] = place
    record[_LOSS] = record[_SLOPE] = 0
    if header.loss != NONE:
        record[_LOSS] = _await(header.loss, slots, awaited)
    if header.loss_derivative != NONE:
        record[_SLOPE] = _await(header.loss_derivative, slots, awaited)
    first, prologue_end = np.int64(record[_PROLOGUE]), header.prologue_end
    arities = source.arities
    for number in range(prologue_end):
        _encode_scalar(made[number], arities, labels, out.instructions[first + number])
    largest: Any = header.scalars
    used: Any = np.int64(0)
    for number in range(header.end - 1, prologue_end - 1, -1):
        before: Any = np.int64(-1)
        if number > prologue_end:
            before = _level(made[number - 1].target, slots)
        level = _level(made[number].target, slots)
        stores = awaited[level]
        awaited[level] = False
        if stores:
            used = max(used, level + 1)
        third = _encode_rows(
            made[number], arities, labels, level, stores, before, slots, awaited,
            out.instructions[first + number],
        )  # fmt: skip
        largest = max(largest, third)
    record[_LEVELS] = used
    return max(largest, used)


@uncounted
def _copy_lists(source: Source, workspace: LoweringWorkspace, record: Any, out: Encoded) -> None:
    """Take room for a program's code, note where it is, and copy what stays as it is."""
    lowered = workspace.program
    header = lowered.headers[0]
    first, load, column, entry = reserve(source, header)
    record[_PROLOGUE], record[_PROLOGUE_COUNT] = first, header.prologue_end
    record[_FIRST], record[_COUNT] = first + header.prologue_end, header.end - header.prologue_end
    record[_LOAD], record[_LOADS], record[_SCALARS] = load, header.loads, header.scalars
    record[_COLUMNS_FIRST], record[_COLUMNS] = column, header.columns
    record[_ENTRY], record[_ENTRIES] = entry, header.entries
    for index in range(header.loads):
        made = lowered.loads[index]
        out.loads[load + index, 0], out.loads[load + index, 1] = made.scalar, made.parameter
        out.constants[load + index] = made.value
    for index in range(header.entries):
        one, target = lowered.entries[index], out.entries[entry + index]
        target[0], target[1], target[2] = one.column, one.leaf, one.factor


@uncounted
def _level(place: int, slots: int) -> Any:
    """Level of a place that holds rows; the result's comes after those of the slots."""
    return slots if place & 3 == RESULT else place >> 2


@uncounted
def _await(place: int, slots: int, awaited: Any) -> Any:
    """Translate a place that is looked at when the program has run."""
    if place & 3 == INPUT:
        return place >> 2 << _PLACE_SHIFT | _COLUMN
    level = _level(place, slots)
    awaited[level] = True
    return level << _PLACE_SHIFT | _LEVEL


@uncounted
def _operands(code: int, arities: Any) -> Any:
    return 1 if code == COPY_CODE else arities[code]


@uncounted
def _encode_scalar(instruction: Any, arities: Any, labels: Any, out: Any) -> None:
    arity, operands = _operands(instruction.code, arities), instruction.operands
    out[0] = labels[instruction.code]
    out[1] = operands[0] >> 2
    out[2] = operands[1] >> 2 if arity > 1 else 0
    third = operands[2] >> 2 if arity > 2 else 0
    out[3] = instruction.target >> 2 | third << 16


@uncounted
def _encode_rows(
    instruction: Any, arities: Any, labels: Any, level: int, stores: bool, before: int,
    slots: int, awaited: Any, out: Any,
) -> Any:  # fmt: skip
    """Encode an instruction on rows; return the index of a third operand."""
    code = instruction.code
    word, third = labels[code] | (_STORE if stores else 0), np.int64(0)
    out[1] = out[2] = 0
    for k in range(_operands(code, arities)):
        place = instruction.operands[k]
        kind = place & 3
        index, source = place >> 2, _COLUMN
        if kind == SCALAR:
            source = _SCALAR
        elif kind != INPUT:
            index, source = _level(place, slots), _LEVEL
            if index == before:
                index, source = np.int64(0), _BEFORE
            else:
                awaited[index] = True
        word |= source << (10 + 3 * k)
        if k < 2:
            out[1 + k] = index
        else:
            third = index
    out[0] = word
    out[3] = level | third << 16
    return third
