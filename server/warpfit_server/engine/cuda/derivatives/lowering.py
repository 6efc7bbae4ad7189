"""Lowering of programs with their derivatives to the code of derivatives.cu, on a few threads.

The helpers of a `ParallelLoop` run, without Python's lock::

    while (chunk := next few programs that nobody has taken) is not None:
        for program in chunk: check it; differentiate it; append its code

A chunk is small, because programs differ in length. The calling thread helps with a small batch. A
large one is lowered in steps, and the helpers' work is waited for like that of a device, so that
the engine goes on with other requests.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numba import carray, from_dtype, types
from numpy.typing import NDArray

from warpfit import ops
from warpfit.errors import ResourceExhaustedError
from warpfit.expressions import token_checks
from warpfit.expressions.token_checks import INDEX_LIMIT
from warpfit.ir import Batch
from warpfit_server.engine import validate
from warpfit_server.engine.autodiff import backward_pass, differentiate, rules
from warpfit_server.engine.autodiff.differentiate import (
    AFTER_SOURCE,
    ARITIES,
    CODES,
    ENDS,
    LOSS_CODES,
    LOSS_VALUES,
    REQUESTED,
    REWRITES,
    RULES,
    STARTS,
    VALUES,
    RowLossTokens,
    differentiate_program,
    new_workspace,
    node_capacity,
    source_of,
    tables,
)
from warpfit_server.engine.cuda.derivatives import device_calls, encoding, launch_plan
from warpfit_server.engine.cuda.derivatives.device_calls import new_pieces
from warpfit_server.engine.cuda.derivatives.encoding import (
    INPUTS,
    PARAMETERS,
    PROGRAM,
    DerivativeCode,
    EncodedArrays,
    count_sums,
    encode_program,
    fill_starts,
)
from warpfit_server.engine.cuda.derivatives.source import labels
from warpfit_server.engine.cuda.interpreter.device_lowering import raise_invalid_program
from warpfit_server.engine.interface import Steps
from warpfit_server.engine.lowering import graph, lower, lowered, schedule
from warpfit_server.engine.native import (
    arguments,
    intrinsics,
    numba_cache,
    parallel_loop,
)
from warpfit_server.engine.native.arguments import (
    FAILED,
    FINISHED,
    OWN_ARRAYS,
    array_address,
    floats,
    reader,
    words,
)
from warpfit_server.engine.native.intrinsics import inlined, pointer_to
from warpfit_server.engine.native.numba_cache import address_of
from warpfit_server.engine.native.threads import ParallelCode, ParallelLoop, ParallelTask
from warpfit_server.engine.validate import program_is_valid
from warpfit_server.system import compile_cache

#: Programs of a chunk.
_CHUNK: Final = 5
#: Tokens for each helper, which take about as long as waking it.
_TOKENS_A_THREAD: Final = 500
#: Tokens of a batch up to which the calling thread helps and waits: 0.2 ms on 16 cores. With more
#: it serves others meanwhile.
_TOKENS_AT_ONCE: Final = 16_000
#: Tokens for each thread of a step, some 2 ms.
_TOKENS_A_STEP: Final = 20_000
#: Largest index in 16 bits.
_INDEX_LIMIT: Final = 1 << 16
#: Modules that the compiled code depends on.
_SOURCES: Final = (
    *(ops, compile_cache, intrinsics, arguments, parallel_loop, graph, lowered),
    *(schedule, lower, rules, backward_pass, differentiate, token_checks, validate),
)
_RECORD_WORDS: Final = PROGRAM.itemsize // 4
#: Bytes of a cache line; arrays that different threads write to begin with one.
_LINE: Final = 64
# Arrays of an argument block before those of `source_of`: the largest index of an operand in
# each chunk, or -1 - the first invalid program; whether values are kept, and the number of
# variables; the case labels. Behind them: the numbers of parameters, and what is encoded.
_LARGEST, _OPTIONS, _LABELS = range(OWN_ARRAYS)
_COUNTS: Final = AFTER_SOURCE
_ENCODED: Final = AFTER_SOURCE + 1
#: Index in `INPUTS` of each of `EncodedArrays`.
_CODE_PIECES: Final = tuple(map(INPUTS.index, EncodedArrays._fields))


Made = TypeVar("Made")


class DerivativeLowering:
    """Checks batches and lowers them with their derivatives; safe to use from several threads.

    Args:
        directory: where compiled code is kept.
        threads: that lower one batch, the calling one included.
    """

    def __init__(self, directory: Path, threads: int) -> None:
        self._lower, parallel = load(directory)
        self._address = address_of(self._lower)
        self._held = labels(), *tables()
        self._tables = np.zeros(2 * (_ENCODED + len(EncodedArrays._fields)), dtype=np.int64)
        """Argument block of every batch, in which only the tables are listed."""
        for index, table in zip((_LABELS, ARITIES, REWRITES, RULES), self._held, strict=True):
            self._tables[2 * index : 2 * index + 2] = array_address(table), table.size
        self._loop = ParallelLoop(threads, parallel)
        self._threads = threads

    def lower(
        self,
        batch: Batch,
        variables: int,
        row_loss: RowLossTokens,
        requested: int,
        *,
        keeps_values: bool,
        products: bool,
        meanwhile: Callable[[], Made],
    ) -> Steps[tuple[DerivativeCode, Made]]:
        """Lower a batch, whose parameters are not read, with a row loss.

        Args:
            batch: the programs.
            variables: of the data set.
            row_loss: its tokens.
            requested: bits of `backward_pass`.
            keeps_values: whether the values are read after a program has run.
            products: whether products of derivatives are summed.
            meanwhile: what the calling thread does once it has woken the helpers.

        Returns:
            The code, and what ``meanwhile`` has returned.

        Raises:
            ProgramError: for the first bad token.
            MemoryError: if there is not enough.
            ResourceExhaustedError: if a program is too large to encode.
        """
        tokens, programs, loss_tokens = len(batch.codes), len(batch), len(row_loss.codes)
        arrays = batch.codes, batch.values, batch.lengths, batch.parameter_counts, *row_loss
        held = tuple(map(np.ascontiguousarray, arrays))
        places = lay_out(tokens, programs, loss_tokens)
        memory = np.empty(places.end, dtype=np.uint8)
        addresses = map(array_address, (*held, memory))
        options = requested, keeps_values, min(variables, INDEX_LIMIT)
        given = *addresses, tokens, programs, loss_tokens, *options
        block = self._tables.copy()
        describe(np.array(given, dtype=np.int64), block)
        largest = 0
        for chunks in self._cut(tokens, -(-programs // _CHUNK)):
            if chunks[0]:
                yield None
            task = self._begin(block, chunks, tokens)
            try:
                if chunks[0] == 0:
                    made = meanwhile()
                if tokens > _TOKENS_AT_ONCE:
                    yield task
            finally:
                task.result()  # before the arrays are freed
            found = largest_index(block, *chunks)
            if found < 0:
                raise_invalid_program(batch, -1 - found, variables)
            largest = max(largest, found)
        _check_index(largest)
        size = programs * PROGRAM.itemsize
        records = memory[places.programs : places.programs + size].view(PROGRAM)
        sums, pieces = np.empty(programs, dtype=np.int64), new_pieces()
        complete(block, records, products, batch.vectors, sums, pieces)
        return DerivativeCode(records, sums, pieces, memory), made

    def _cut(self, tokens: int, chunks: int) -> list[tuple[int, int]]:
        """Cut the chunks into steps, each of which has some for every thread."""
        length = max(self._threads, _TOKENS_A_STEP * self._threads * chunks // max(1, tokens))
        return [(first, min(first + length, chunks)) for first in range(0, chunks, length)]

    def _begin(
        self, block: NDArray[np.int64], chunks: tuple[int, int], tokens: int
    ) -> ParallelTask:
        """Let helpers begin with some chunks of a batch with so many tokens."""
        helpers = tokens // _TOKENS_A_THREAD
        if tokens > _TOKENS_AT_ONCE:  # the processes that answer others need cores, too
            helpers = min(helpers, max(1, self._threads // 2))
        return self._loop.begin(self._address, block, *chunks, helpers)


def directory_name() -> str:
    """Return the name of the directory, in that of all compiled code, for these sources."""
    return f"derivatives-{numba_cache.fingerprint(_SOURCES, encoding.__file__, __file__)}"


def load(directory: Path) -> tuple[Any, ParallelCode]:
    """Load the compiled code from disk, or compile it (about 15 s) and store it."""
    for module in (encoding, launch_plan, device_calls):
        module.load()
    word, block, pieces = types.int64, types.int64[::1], types.int64[:, ::1]
    records = types.Array(from_dtype(PROGRAM), 1, "C")
    lay_out.compile((word, word, word))
    describe.compile((block, block))
    largest_index.compile((block, word, word))
    complete.compile((block, records, types.boolean, word, block, pieces))
    place = directory / directory_name()
    parallel = ParallelCode.load(place)
    with numba_cache.cached_in(place) as jit:
        return jit(types.int64(types.int64, types.int64), lower_chunk), parallel


def _check_index(largest: int) -> None:
    if largest >= _INDEX_LIMIT:
        raise ResourceExhaustedError(
            f"derivatives of a program need index {largest}, more than the interpreter encodes",
            "PROGRAM_TOO_LONG",
            "Split the program, or ask for values and losses only",
            needed=largest,
            available=_INDEX_LIMIT - 1,
        )


# ------------------------------------------------------------------------------ compiled by Numba

_compiled = numba_cache.njit(nogil=True)
_unsigned: Final = reader(types.uint32)
_signed: Final = reader(types.int32)
_pointer_to_lengths: Final = pointer_to(types.uint32)


class CodeLayout(NamedTuple):
    """Byte offsets of the arrays in the memory of a batch that is being lowered."""

    largest: int
    """Largest index of an operand in each chunk, or -1 - the first invalid program."""
    options: int
    """What is requested, whether values are kept, and the number of variables."""
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
    options = _aligned(8 * -(-programs // _CHUNK))
    ends = options + _aligned(8 * 3)
    starts = ends + _aligned(8 * 4)
    instructions = starts + _aligned(8 * (programs + 1))
    records = instructions + _aligned(16 * (capacity + 1))
    columns = records + _aligned(4 * _RECORD_WORDS * programs)
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
    layout, chunks = lay_out(tokens, programs, loss_tokens), -(-programs // _CHUNK)
    capacity = node_capacity(tokens, programs, loss_tokens)
    _list(block, CODES, given[0], tokens)
    _list(block, VALUES, given[1], tokens)
    _list(block, _COUNTS, given[3], programs)
    _list(block, LOSS_CODES, given[4], loss_tokens)
    _list(block, LOSS_VALUES, given[5], loss_tokens)
    _list(block, _LARGEST, memory + layout.largest, chunks)
    _list(block, REQUESTED, memory + layout.options, 1)
    _list(block, _OPTIONS, memory + layout.options + 8, 2)
    _list(block, ENDS, memory + layout.ends, 4)
    _list(block, STARTS, memory + layout.starts, programs + 1)
    _list(block, _ENCODED, memory + layout.instructions, 4 * (capacity + 1))
    _list(block, _ENCODED + 1, memory + layout.programs, _RECORD_WORDS * programs)
    _list(block, _ENCODED + 2, memory + layout.columns, tokens)
    _list(block, _ENCODED + 3, memory + layout.entries, 3 * 2 * tokens)
    _list(block, _ENCODED + 4, memory + layout.loads, 2 * capacity)
    _list(block, _ENCODED + 5, memory + layout.constants, capacity)
    address = np.int64(block.ctypes.data)
    largest, ends, options = (
        words(address, _LARGEST),
        words(address, ENDS),
        words(address, _OPTIONS),
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
    largest, found = words(np.int64(block.ctypes.data), _LARGEST), np.int64(0)
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
    """Fill in what depends on all programs of a batch, once its chunks have run."""
    address = np.int64(block.ctypes.data)
    instructions, ends = _unsigned(address, _ENCODED), words(address, ENDS)
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
        pieces[piece, 0], pieces[piece, 1] = block[2 * (_ENCODED + index)], sizes[index]


def lower_chunk(block: int, chunk: int) -> Any:
    """Lower the programs of a chunk; see `arguments`."""
    source = source_of(block)
    out = EncodedArrays(
        _unsigned(block, _ENCODED).reshape((-1, 4)),
        _unsigned(block, _ENCODED + 1).reshape((-1, _RECORD_WORDS)),
        _unsigned(block, _ENCODED + 2),
        _signed(block, _ENCODED + 3).reshape((-1, 3)),
        _signed(block, _ENCODED + 4).reshape((-1, 2)),
        floats(block, _ENCODED + 5),
    )
    options, case_labels = words(block, _OPTIONS), words(block, _LABELS)
    keeps_values, variables, counts = options[0] != 0, options[1], _unsigned(block, _COUNTS)
    first = chunk * _CHUNK
    stop = min(first + _CHUNK, len(source.starts) - 1)
    largest: Any = np.int64(0)
    try:
        workspace = new_workspace(source, first, stop)
        is_read = np.empty(len(workspace.state.graph.nodes) + 1, dtype=np.bool_)
        for program in range(first, stop):
            if not program_is_valid(
                source.codes, source.values, source.starts[program], source.starts[program + 1],
                counts[program], float(variables),
            ):  # fmt: skip
                largest = -1 - program
                break
            differentiate_program(source, workspace, program)
            index = encode_program(
                source, workspace, program, case_labels, keeps_values, is_read, out
            )
            out.programs[program, PARAMETERS] = counts[program]
            largest = max(largest, index)
    except Exception:  # the only one that compiled code raises here is for lack of memory
        return FAILED
    words(block, _LARGEST)[chunk] = largest
    return FINISHED
