"""Encoding of differentiated programs as instructions of derivatives.cu.

The code that differentiates, schedules and allocates levels is shared with the CPU engine. The
encoding adds two things to each instruction: whether an operand is the result of the instruction
before, which is still in registers, and whether its own result is read from a level later. Only one
operand of at most two can be in registers; it becomes the first one.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_uint8
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
from numba import from_dtype, types
from numpy.typing import NDArray

from warpfit_server.engine.autodiff.differentiate import (
    AFTER_SOURCE,
    ENDS,
    LoweringWorkspace,
    Source,
    node_capacity,
    reserve,
)
from warpfit_server.engine.lowering.lowered import COPY_CODE, INPUT, INVARIANT, NONE, RESULT
from warpfit_server.engine.native import numba_cache
from warpfit_server.engine.native.arguments import OWN_ARRAYS, array_address, reader, words
from warpfit_server.engine.native.intrinsics import uncounted

#: Kinds of a place, in the two lowest bits; an operand that is nowhere is in registers.
_NOWHERE: Final = 0
_LEVEL: Final = 1
_COLUMN: Final = 2
_INVARIANT: Final = 3
_KIND_BITS: Final = 2
#: First bit of the operands' kinds in an instruction, and the bit of a result that is stored.
_KINDS: Final = 10
_STORE: Final = 1 << 16
#: The struct Program of derivatives.cu, field by field; compiled code uses the fields' indices.
_FIELDS: Final = (
    *("first", "count", "prologue", "prologue_count", "load", "loads", "invariant", "invariants"),
    *("column", "columns", "entry", "entries", "loss", "slope", "levels", "parameter"),
    *("parameters", "result"),
)
_WIDE_FIELDS: Final = ("sum", "triangle")
PROGRAM: Final = np.dtype(
    [*((name, np.uint32) for name in _FIELDS), *((name, np.uint64) for name in _WIDE_FIELDS)]
)
_FIRST, _COUNT, _PROLOGUE, _PROLOGUE_COUNT, _LOAD, _LOADS, _, _INVARIANTS = range(8)
_COLUMNS_FIRST, _COLUMNS, _ENTRY, _ENTRIES, _LOSS, _SLOPE, _LEVELS = range(8, 15)
PARAMETERS, _RESULT = 16, 17
RECORD_WORDS: Final = PROGRAM.itemsize // 4
# Arrays of an argument block before those of `source_of`: the largest index of an operand in
# each chunk, or -1 - the first invalid program; the numbers of parameters; the case labels.
# Behind those of `source_of`: `EncodedArrays`.
LARGEST, COUNTS, LABELS = range(OWN_ARRAYS)
ENCODED: Final = AFTER_SOURCE

#: Arrays that are uploaded, by the fields with which the struct Arguments of derivatives.cu begins.
INPUTS: Final = (
    *("instructions", "programs", "order", "columns", "entries", "loads", "constants"),
    "parameters",
)


_NO_OCTETS: Final = np.empty(0, np.uint8)
#: Fields of `PROGRAM` that are places in an array, by its name, and the bytes of an element there.
_PLACES_OF: Final = {
    "instructions": (("first", "prologue"), 16),
    "columns": (("column",), 4),
    "entries": (("entry",), 12),
    "loads": (("load",), 8),
}


@dataclass(frozen=True, slots=True, eq=False)
class DerivativeCode:
    """A lowered batch without its parameters, as the kernels of derivatives.cu read it.

    What belongs to one program is contiguous; the programs are in any order.
    """

    programs: NDArray[np.void]
    """Records of the struct Program, [programs]."""
    sums: NDArray[np.int64]
    """Number of sums over the rows for each job of a program, [programs]."""
    vectors: int
    """Parameter vectors of each program."""
    pieces: NDArray[np.int64]
    """Arrays that are uploaded with the parameters, see `new_pieces`:

    * ``instructions``: uint32 [instructions + 1, 4]; the kernel prefetches the last one, padding;
    * ``columns``: place of each column, uint32;
    * ``entries``: column, parameter or -1 - variable, and invariant, int32 [entries, 3];
    * ``loads``: invariant, and parameter or -1, int32 [loads, 2];
    * ``constants``: value of each load of a constant, float64.
    """
    memory: Any
    """What the pieces (on the host) or the addresses (on the device) name: kept alive."""
    addresses: NDArray[np.int64]
    """Addresses of the arrays of `INPUTS` on the device; 0 for those that are uploaded."""

    @classmethod
    def joining(cls, codes: Sequence[DerivativeCode]) -> DerivativeCode:
        """Return the code of several batches on the host, in turn, in memory of its own."""
        places, arrays = dict.fromkeys(_PLACES_OF, 0), []
        records = np.concatenate([code.programs for code in codes])
        sums, first, pieces = np.concatenate([code.sums for code in codes]), 0, new_pieces()
        for code in codes:
            own = records[first : first + len(code.programs)]
            first += len(own)
            for name, (fields, size) in _PLACES_OF.items():
                for field in fields:
                    own[field] += np.uint32(places[name])
                places[name] += int(code.pieces[INPUTS.index(name), 1]) // size
        fill_starts(records, sums, codes[0].vectors)
        place_piece(pieces, "programs", records)
        for name in (*_PLACES_OF, "constants"):
            parts = [octets_at(*code.pieces[INPUTS.index(name)].tolist()) for code in codes]
            arrays.append(np.concatenate(parts))
            place_piece(pieces, name, arrays[-1])
        addresses = np.zeros(len(INPUTS), np.int64)
        return cls(records, sums, codes[0].vectors, pieces, (records, arrays), addresses)

    @property
    def jobs(self) -> int:
        """Programs times parameter vectors."""
        return len(self.programs) * self.vectors

    def select(self, programs: NDArray[np.int64]) -> DerivativeCode:
        """Return the code, which is on the device, of some programs with one vector each."""
        records, sums, pieces = self.programs[programs], self.sums[programs], new_pieces()
        fill_starts(records, sums, 1)
        place_piece(pieces, "programs", records)
        return replace(self, programs=records, sums=sums, vectors=1, pieces=pieces)


def octets_at(address: int, size: int) -> NDArray[np.uint8]:
    """View memory, which must outlive the array, as bytes; [size]."""
    return np.ctypeslib.as_array((c_uint8 * size).from_address(address)) if size else _NO_OCTETS


def new_pieces() -> NDArray[np.int64]:
    """Return a table with an address and a number of bytes for each array of `INPUTS`, all 0."""
    return np.zeros((len(INPUTS), 2), dtype=np.int64)


def place_piece(pieces: NDArray[np.int64], name: str, array: NDArray[Any]) -> None:
    """Note where a contiguous array is, which must outlive the pieces."""
    pieces[INPUTS.index(name)] = array_address(array), array.nbytes


def allocate(tokens: int, programs: int, loss_tokens: int) -> EncodedArrays:
    """Make room for the code of a batch; pages that nobody writes take none."""
    capacity = node_capacity(tokens, programs, loss_tokens)
    return EncodedArrays(
        np.empty((capacity + 1, 4), np.uint32),
        np.empty(programs * RECORD_WORDS, np.uint32),
        np.empty(tokens, np.uint32),
        np.empty((2 * tokens, 3), np.int32),
        np.empty((capacity, 2), np.int32),
        np.empty(capacity),
    )


@numba_cache.njit(nogil=True)  # type: ignore[untyped-decorator]
def count_sums(records: NDArray[np.void], products: bool, sums: NDArray[np.int64]) -> None:
    """Count the sums over the rows for each job of a program."""
    for index in range(len(records)):
        columns = np.int64(records[index].columns)
        sums[index] = 1 + columns + (columns * (columns + 1) // 2 if products else 0)


@numba_cache.njit(nogil=True)  # type: ignore[untyped-decorator]
def fill_starts(records: NDArray[np.void], sums: NDArray[np.int64], vectors: int) -> None:
    """Fill in the fields that depend on the programs before each one."""
    invariant = parameter = first_sum = triangle = np.int64(0)
    for index in range(len(records)):
        record, count = records[index], np.int64(records[index].parameters)
        record.invariant, record.parameter = np.uint32(invariant), np.uint32(parameter)
        record.sum, record.triangle = np.uint64(first_sum), np.uint64(triangle)
        invariant += vectors * np.int64(record.invariants)
        parameter += vectors * count
        first_sum += vectors * sums[index]
        triangle += vectors * (count * (count + 1) // 2)


def load() -> None:
    """Load the compiled functions above, or compile them."""
    records, numbers = types.Array(from_dtype(PROGRAM), 1, "C"), types.int64[::1]
    count_sums.compile((records, types.boolean, numbers))
    fill_starts.compile((records, numbers, types.int64))
    largest_index.compile((numbers, types.int64, types.int64))
    pieces = types.int64[:, ::1]
    complete.compile((numbers, records, types.boolean, types.int64, numbers, pieces))


# ------------------------------------------------------------------------------ compiled by Numba


class EncodedArrays(NamedTuple):
    """Arrays of a `DerivativeCode` with room for all programs, as compiled code takes them."""

    instructions: Any
    programs: Any
    """Words of the records, uint32 [programs, words]."""
    columns: Any
    entries: Any
    loads: Any
    constants: Any


_unsigned: Final = reader(types.uint32)
#: Index in `INPUTS` of each of `EncodedArrays`.
_PIECES: Final = tuple(map(INPUTS.index, EncodedArrays._fields))


@numba_cache.njit(nogil=True)  # type: ignore[untyped-decorator]
def largest_index(block: NDArray[np.int64], first: int, stop: int) -> int:
    """Return the largest index in some chunks that have run, or -1 - the first invalid program."""
    largest, found = words(np.int64(block.ctypes.data), LARGEST), np.int64(0)
    for chunk in range(first, stop):
        if largest[chunk] < 0:
            return int(largest[chunk])
        found = max(found, largest[chunk])
    return int(found)


@numba_cache.njit(nogil=True)  # type: ignore[untyped-decorator]
def complete(
    block: NDArray[np.int64],
    records: NDArray[np.void],
    products: bool,
    vectors: int,
    sums: NDArray[np.int64],
    pieces: NDArray[np.int64],
) -> None:
    """Finish the code of a batch once all chunks have run, and list the pieces to upload.

    Args:
        block: the argument block.
        records: of the programs; receives where each begins.
        products: whether products of derivatives are summed.
        vectors: parameter vectors of each program.
        sums: receives the number of sums of each program.
        pieces: receives address and bytes of each array of the code.
    """
    address = np.int64(block.ctypes.data)
    instructions, ends = _unsigned(address, ENCODED), words(address, ENDS)
    for index in range(4 * ends[0], 4 * (ends[0] + 1)):
        instructions[index] = 0
    count_sums(records, products, sums)
    fill_starts(records, sums, vectors)
    sizes = (
        16 * (ends[0] + 1), len(records) * records.itemsize, 4 * ends[2], 12 * ends[3],
        8 * ends[1], 8 * ends[1],
    )  # fmt: skip
    for index in range(len(_PIECES)):
        piece = _PIECES[index]
        pieces[piece, 0], pieces[piece, 1] = block[2 * (ENCODED + index)], sizes[index]


@uncounted
def encode_program(
    source: Source, workspace: LoweringWorkspace, program: int, labels: Any, keeps_values: bool,
    is_read: Any, out: EncodedArrays,
) -> Any:  # fmt: skip
    """Append the code of a program that `differentiate_program` has differentiated.

    Fields of the record that depend on the programs before this one are not filled in. ``is_read``
    is scratch memory, bool [slots + 1]. Returns the largest index that has to fit in 16 bits.
    """
    record = out.programs[program]
    _copy_lists(source, workspace, record, out)
    lowered = workspace.program
    header, made = lowered.headers[0], lowered.instructions
    slots = header.slots
    for level in range(slots):
        is_read[level] = False
    is_read[slots] = keeps_values
    record[_RESULT] = slots << _KIND_BITS | _LEVEL
    for k in range(header.columns):
        place = _read_at_end(lowered.columns[k], slots, is_read)
        out.columns[np.int64(record[_COLUMNS_FIRST]) + k] = place
    record[_LOSS] = record[_SLOPE] = 0
    if header.loss != NONE:
        record[_LOSS] = _read_at_end(header.loss, slots, is_read)
    if header.loss_derivative != NONE:
        record[_SLOPE] = _read_at_end(header.loss_derivative, slots, is_read)
    first, prologue_end = np.int64(record[_PROLOGUE]), header.prologue_end
    arities = source.arities
    for number in range(prologue_end):
        _encode_invariant(made[number], arities, labels, out.instructions[first + number])
    largest: Any = header.invariants
    used: Any = np.int64(0)
    for number in range(header.end - 1, prologue_end - 1, -1):
        before: Any = np.int64(-1)
        if number > prologue_end:
            before = _level(made[number - 1].target, slots)
        level = _level(made[number].target, slots)
        stores = is_read[level]
        is_read[level] = False
        if stores:
            used = max(used, level + 1)
        third = _encode_rows(
            made[number], arities, labels, level, stores, before, slots, is_read,
            out.instructions[first + number],
        )  # fmt: skip
        largest = max(largest, third)
    record[_LEVELS] = used
    return max(largest, used)


@uncounted
def _copy_lists(
    source: Source, workspace: LoweringWorkspace, record: Any, out: EncodedArrays
) -> None:
    """Reserve room for a program's code, record where it is, and copy what needs no encoding."""
    lowered = workspace.program
    header = lowered.headers[0]
    first, load, column, entry = reserve(source, header)
    record[_PROLOGUE], record[_PROLOGUE_COUNT] = first, header.prologue_end
    record[_FIRST], record[_COUNT] = first + header.prologue_end, header.end - header.prologue_end
    record[_LOAD], record[_LOADS], record[_INVARIANTS] = load, header.loads, header.invariants
    record[_COLUMNS_FIRST], record[_COLUMNS] = column, header.columns
    record[_ENTRY], record[_ENTRIES] = entry, header.entries
    for index in range(header.loads):
        made = lowered.loads[index]
        out.loads[load + index, 0], out.loads[load + index, 1] = made.invariant, made.parameter
        out.constants[load + index] = made.value
    for index in range(header.entries):
        one, target = lowered.entries[index], out.entries[entry + index]
        target[0], target[1], target[2] = one.column, one.leaf, one.factor


@uncounted
def _level(place: int, slots: int) -> Any:
    """Return the level of a place with a value a row; the result's level is the last one."""
    return slots if place & 3 == RESULT else place >> 2


@uncounted
def _read_at_end(place: int, slots: int, is_read: Any) -> Any:
    """Translate a place that is read after the program has run, and note that its level is read."""
    found = _place(place, slots)
    if found & 3 == _LEVEL:
        is_read[found >> _KIND_BITS] = True
    return found


@uncounted
def _operands(code: int, arities: Any) -> Any:
    return 1 if code == COPY_CODE else arities[code]


@uncounted
def _encode_invariant(instruction: Any, arities: Any, labels: Any, out: Any) -> None:
    arity, operands = _operands(instruction.code, arities), instruction.operands
    out[0] = labels[instruction.code]
    out[1] = operands[0] >> 2
    out[2] = operands[1] >> 2 if arity > 1 else 0
    third = operands[2] >> 2 if arity > 2 else 0
    out[3] = instruction.target >> 2 | third << 16


@uncounted
def _encode_rows(
    instruction: Any, arities: Any, labels: Any, level: int, stores: bool, before: int,
    slots: int, is_read: Any, out: Any,
) -> Any:  # fmt: skip
    """Encode an instruction on rows; return the index of a third operand."""
    arity, operands = _operands(instruction.code, arities), instruction.operands
    label = labels[instruction.code]
    first, second = _place(operands[0], slots), np.int64(0)
    third = _place(operands[2], slots) if arity > 2 else np.int64(0)
    if arity > 1:
        second = _place(operands[1], slots)
    in_registers = before << _KIND_BITS | _LEVEL
    if arity == 2:
        if second == in_registers != first:
            label, first, second = label + 1, second, first
        label += 2 * ((second & 3) - _LEVEL)
    if first == in_registers:
        first = np.int64(_NOWHERE)
    word = label | (_STORE if stores else 0)
    for k, place in enumerate((first, second, third)):
        kind = place & 3
        word |= kind << (_KINDS + _KIND_BITS * k)
        if kind == _LEVEL:
            is_read[place >> _KIND_BITS] = True
    out[0], out[1], out[2] = word, first >> _KIND_BITS, second >> _KIND_BITS
    out[3] = level | third >> _KIND_BITS << 16
    return third >> _KIND_BITS


@uncounted
def _place(operand: int, slots: int) -> Any:
    """Return the place of an operand of an instruction on rows."""
    kind, index = operand & 3, operand >> 2
    if kind == INVARIANT:
        return index << _KIND_BITS | _INVARIANT
    if kind == INPUT:
        return index << _KIND_BITS | _COLUMN
    return _level(operand, slots) << _KIND_BITS | _LEVEL
