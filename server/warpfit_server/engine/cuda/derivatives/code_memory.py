"""Memory of a batch that is being lowered: one block, which compiled code lays out and describes.

The argument block, see `arguments`, lists the arrays in that memory, and those of the batch and of
the operator table. What the kernels read is uploaded from there.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
from numba import carray, from_dtype, types
from numpy.typing import NDArray

from warpfit_server.engine.autodiff.differentiate import (
    AFTER_SOURCE,
    ARITIES,
    CODES,
    ENDS,
    LOSS_CODES,
    LOSS_VALUES,
    REQUESTED,
    RULES,
    STARTS,
    VALUES,
    node_capacity,
    tables,
)
from warpfit_server.engine.cuda.derivatives.encoding import (
    INPUTS,
    PROGRAM,
    EncodedArrays,
    count_sums,
    fill_starts,
)
from warpfit_server.engine.cuda.derivatives.source import labels
from warpfit_server.engine.native import numba_cache
from warpfit_server.engine.native.arguments import OWN_ARRAYS, array_address, reader, words
from warpfit_server.engine.native.intrinsics import inlined, pointer_to

#: Programs of a chunk.
CHUNK: Final = 5
RECORD_WORDS: Final = PROGRAM.itemsize // 4
#: Bytes of a cache line; arrays that different threads write to begin with one.
_LINE: Final = 64
# Arrays of an argument block before those of `source_of`: the largest index of an operand in
# each chunk, or -1 - the first invalid program; whether values are kept, and the number of
# variables; the case labels. Behind them: the numbers of parameters, and what is encoded.
LARGEST, OPTIONS, LABELS = range(OWN_ARRAYS)
COUNTS: Final = AFTER_SOURCE
ENCODED: Final = AFTER_SOURCE + 1
#: Index in `INPUTS` of each of `EncodedArrays`.
_CODE_PIECES: Final = tuple(map(INPUTS.index, EncodedArrays._fields))
_compiled = numba_cache.njit(nogil=True)
_unsigned: Final = reader(types.uint32)
_pointer_to_lengths: Final = pointer_to(types.uint32)


def list_tables() -> NDArray[np.int64]:
    """Return an argument block that lists the tables, which are the same for all batches."""
    block = np.zeros(2 * (ENCODED + len(EncodedArrays._fields)), dtype=np.int64)
    for index, table in zip((LABELS, ARITIES, RULES), _tables(), strict=True):
        block[2 * index : 2 * index + 2] = array_address(table), table.size
    return block


@cache
def _tables() -> tuple[NDArray[Any], ...]:
    """Return the tables, which live as long as this process."""
    return labels(), *tables()


def load() -> None:
    """Load the compiled functions below, or compile them."""
    word, block, pieces = types.int64, types.int64[::1], types.int64[:, ::1]
    records = types.Array(from_dtype(PROGRAM), 1, "C")
    lay_out.compile((word, word, word))
    describe.compile((block, block))
    largest_index.compile((block, word, word))
    complete.compile((block, records, types.boolean, word, block, pieces))


# ------------------------------------------------------------------------------ compiled by Numba


class CodeLayout(NamedTuple):
    """Byte offsets of the arrays in the memory of a batch that is being lowered."""

    largest: int
    """Largest index of an operand in each chunk, or -1 - the first invalid program."""
    options: int
    """Three words: the bits of the requested derivatives; whether values are kept; and the number
    of variables."""
    ends: int
    starts: int
    """Index of each program's first token, and the total."""
    instructions: int
    """The first of the arrays of `EncodedArrays`."""
    programs: int
    columns: int
    entries: int
    loads: int
    constants: int
    end: int


@_compiled  # type: ignore[untyped-decorator]
def lay_out(tokens: int, programs: int, loss_tokens: int) -> CodeLayout:
    """Lay out the memory of a batch; pages that are never written take none."""
    capacity = node_capacity(tokens, programs, loss_tokens)
    options = _aligned(8 * -(-programs // CHUNK))
    ends = options + _aligned(8 * 3)
    starts = ends + _aligned(8 * 4)
    instructions = starts + _aligned(8 * (programs + 1))
    records = instructions + _aligned(16 * (capacity + 1))
    columns = records + _aligned(4 * RECORD_WORDS * programs)
    entries = columns + _aligned(4 * tokens)
    loads = entries + _aligned(12 * 2 * tokens)
    constants = loads + _aligned(8 * capacity)
    end = constants + _aligned(8 * capacity)
    return CodeLayout(
        *(0, options, ends, starts, instructions, records),
        *(columns, entries, loads, constants, end),
    )


@inlined
def _aligned(size: int) -> int:
    return -(-size // _LINE) * _LINE


@_compiled  # type: ignore[untyped-decorator]
def describe(given: NDArray[np.int64], block: NDArray[np.int64]) -> None:
    """List the arrays of a batch in its argument block, and initialise those in its memory.

    ``given`` are the addresses of tokens, lengths, numbers of parameters, the row loss and the
    memory; the numbers of tokens, programs and tokens of the row loss; then the options.
    """
    memory, tokens, programs, loss_tokens = given[6], given[7], given[8], given[9]
    layout, chunks = lay_out(tokens, programs, loss_tokens), -(-programs // CHUNK)
    capacity = node_capacity(tokens, programs, loss_tokens)
    _list(block, CODES, given[0], tokens)
    _list(block, VALUES, given[1], tokens)
    _list(block, COUNTS, given[3], programs)
    _list(block, LOSS_CODES, given[4], loss_tokens)
    _list(block, LOSS_VALUES, given[5], loss_tokens)
    _list(block, LARGEST, memory + layout.largest, chunks)
    _list(block, REQUESTED, memory + layout.options, 1)
    _list(block, OPTIONS, memory + layout.options + 8, 2)
    _list(block, ENDS, memory + layout.ends, 4)
    _list(block, STARTS, memory + layout.starts, programs + 1)
    _list(block, ENCODED, memory + layout.instructions, 4 * (capacity + 1))
    _list(block, ENCODED + 1, memory + layout.programs, RECORD_WORDS * programs)
    _list(block, ENCODED + 2, memory + layout.columns, tokens)
    _list(block, ENCODED + 3, memory + layout.entries, 3 * 2 * tokens)
    _list(block, ENCODED + 4, memory + layout.loads, 2 * capacity)
    _list(block, ENCODED + 5, memory + layout.constants, capacity)
    address = np.int64(block.ctypes.data)
    largest, ends, options = (
        words(address, LARGEST),
        words(address, ENDS),
        words(address, OPTIONS),
    )
    for chunk in range(chunks):
        largest[chunk] = 0
    for index in range(4):
        ends[index] = 0
    words(address, REQUESTED)[0] = given[10]
    options[0], options[1] = given[11], given[12]
    lengths, starts = carray(_pointer_to_lengths(given[2]), programs), words(address, STARTS)
    starts[0] = 0
    for program in range(programs):
        starts[program + 1] = starts[program] + np.int64(lengths[program])


@inlined
def _list(block: Any, index: int, address: int, size: int) -> None:
    block[2 * index], block[2 * index + 1] = address, size


@_compiled  # type: ignore[untyped-decorator]
def largest_index(block: NDArray[np.int64], first: int, stop: int) -> int:
    """Return the largest index in some chunks that have run, or -1 - the first invalid program."""
    largest, found = words(np.int64(block.ctypes.data), LARGEST), np.int64(0)
    for chunk in range(first, stop):
        if largest[chunk] < 0:
            return int(largest[chunk])
        found = max(found, largest[chunk])
    return int(found)


@_compiled  # type: ignore[untyped-decorator]
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
    for index in range(len(_CODE_PIECES)):
        piece = _CODE_PIECES[index]
        pieces[piece, 0], pieces[piece, 1] = block[2 * (ENCODED + index)], sizes[index]
