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
from typing import Any, Final, TypeVar

import numpy as np
from numba import types
from numpy.typing import NDArray

from warpfit.errors import ResourceExhaustedError
from warpfit.ir import INDEX_LIMIT, Batch
from warpfit_server.engine.autodiff.differentiate import (
    RowLossTokens,
    differentiate_program,
    new_workspace,
    source_arrays,
    source_of,
)
from warpfit_server.engine.cuda.derivatives import device_calls, encoding, launch_plan
from warpfit_server.engine.cuda.derivatives.encoding import (
    COUNTS,
    ENCODED,
    INPUTS,
    LABELS,
    LARGEST,
    PARAMETERS,
    PROGRAM,
    RECORD_WORDS,
    DerivativeCode,
    EncodedArrays,
    allocate,
    complete,
    encode_program,
    largest_index,
    new_pieces,
)
from warpfit_server.engine.cuda.derivatives.source import labels
from warpfit_server.engine.cuda.interpreter.device_lowering import raise_invalid_program
from warpfit_server.engine.interface import Steps
from warpfit_server.engine.lowering.validate import program_is_valid
from warpfit_server.engine.native import numba_cache, parallel_loop
from warpfit_server.engine.native.arguments import (
    FAILED,
    FINISHED,
    argument_block,
    floats,
    reader,
    words,
)
from warpfit_server.engine.native.numba_cache import address_of
from warpfit_server.engine.native.parallel_loop import ParallelLoop, ParallelTask

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
Made = TypeVar("Made")


class DerivativeLowering:
    """Checks batches and lowers them with their derivatives; safe to use from several threads.

    Args:
        threads: that lower one batch, the calling one included.
    """

    def __init__(self, threads: int) -> None:
        load()
        self._address = address_of(lower_chunk)
        self._loop = ParallelLoop(threads)
        self._threads = threads

    def expect(self, batch: Batch) -> None:
        """Wake the helpers for a small batch that is about to be lowered."""
        tokens = len(batch.codes)
        if tokens <= _TOKENS_AT_ONCE:
            self._loop.expect(tokens // _TOKENS_A_THREAD)

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
            requested: bits of `differentiate`.
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
        tokens, programs = len(batch.codes), len(batch)
        chunk_count = -(-programs // _CHUNK)
        encoded = allocate(tokens, programs, len(row_loss.codes))
        arrays = (  # in the order of `encoding` and `source_arrays`; the block needs them alive
            np.zeros(chunk_count, np.int64),
            np.ascontiguousarray(batch.parameter_counts),
            labels(),
            *source_arrays(batch, row_loss, requested, keeps_values, min(variables, INDEX_LIMIT)),
            *encoded,
        )
        block = argument_block(arrays)
        largest = 0
        for chunks in self._cut(tokens, chunk_count):
            if chunks[0]:
                yield None
            task = self._begin(block, chunks, tokens)
            try:
                if chunks[0] == 0:  # the helpers need as long to wake up
                    made = meanwhile()
                    records = encoded.programs.view(PROGRAM)
                    sums, pieces = np.empty(programs, np.int64), new_pieces()
                if tokens > _TOKENS_AT_ONCE:
                    yield task
            finally:
                task.result()  # before the arrays are freed
            found = largest_index(block, *chunks)
            if found < 0:
                raise_invalid_program(batch, -1 - found, variables)
            largest = max(largest, found)
        _check_index(largest)
        complete(block, records, products, batch.vectors, sums, pieces)
        uploaded = pieces, encoded, np.zeros(len(INPUTS), np.int64)
        return DerivativeCode(records, sums, batch.vectors, *uploaded), made

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


def load() -> None:
    """Load the compiled code from disk, or compile it (about 15 s) and store it."""
    for module in (encoding, launch_plan, device_calls, parallel_loop):
        module.load()
    numba_cache.load_chunk_function(lower_chunk)


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

_unsigned: Final = reader(types.uint32)
_signed: Final = reader(types.int32)


@numba_cache.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def lower_chunk(block: int, chunk: int) -> Any:
    """Lower the programs of a chunk; see `arguments`."""
    source = source_of(block)
    out = EncodedArrays(
        _unsigned(block, ENCODED).reshape((-1, 4)),
        _unsigned(block, ENCODED + 1).reshape((-1, RECORD_WORDS)),
        _unsigned(block, ENCODED + 2),
        _signed(block, ENCODED + 3).reshape((-1, 3)),
        _signed(block, ENCODED + 4).reshape((-1, 2)),
        floats(block, ENCODED + 5),
    )
    case_labels, counts = words(block, LABELS), _unsigned(block, COUNTS)
    keeps_values, variables = source.requested[1] != 0, source.requested[2]
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
    words(block, LARGEST)[chunk] = largest
    return FINISHED
