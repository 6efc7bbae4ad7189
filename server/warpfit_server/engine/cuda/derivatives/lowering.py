"""Lowering of programs with their derivatives to the code of derivatives.cu, on a few threads.

The helpers of a `ParallelLoop` run, without Python's lock::

    while (chunk := next few programs that nobody has taken) is not None:
        for program in chunk: check it; differentiate it; append its code

A chunk is small, because programs differ in length. The calling thread helps with a small batch. A
large one is lowered in steps, and the helpers' work is waited for like that of a device, so that
the engine goes on with other requests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
from numba import types
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
    RowLossTokens,
    differentiate_program,
    new_workspace,
    node_capacity,
    source_arrays,
    source_of,
)
from warpfit_server.engine.cuda.derivatives import device_calls, encoding, launch_plan
from warpfit_server.engine.cuda.derivatives.encoding import (
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
    argument_block,
    floats,
    reader,
    words,
)
from warpfit_server.engine.native.numba_cache import address_of
from warpfit_server.engine.native.threads import ParallelCode, ParallelLoop
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
# Arrays of an argument block before those of `source_arrays`: the largest index of an operand in
# each chunk, or -1 - the first invalid program; whether values are kept, and the number of
# variables; the case labels. Behind them: the numbers of parameters, and what is encoded.
_LARGEST, _OPTIONS, _LABELS = range(OWN_ARRAYS)
_COUNTS: Final = AFTER_SOURCE
_ENCODED: Final = AFTER_SOURCE + 1


class DerivativeLowering:
    """Checks batches and lowers them with their derivatives; safe to use from several threads.

    Args:
        directory: where compiled code is kept.
        threads: that lower one batch, the calling one included.
    """

    def __init__(self, directory: Path, threads: int) -> None:
        self._lower, parallel = load(directory)
        self._address = address_of(self._lower)
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
    ) -> Steps[DerivativeCode]:
        """Lower a batch, whose parameters are not read, with a row loss.

        ``requested`` are bits of `backward_pass`; the values are kept if they are read after a
        program has run.

        Raises:
            ProgramError: for the first bad token.
            MemoryError: if there is not enough.
            ResourceExhaustedError: if a program is too large to encode.
        """
        source = source_arrays(batch, row_loss, requested)
        counts = np.ascontiguousarray(batch.parameter_counts)
        out = _empty(len(batch.codes), len(batch), len(row_loss.codes))
        largest = np.zeros(-(-len(batch) // _CHUNK), dtype=np.int64)
        options = np.array([keeps_values, min(variables, INDEX_LIMIT)], dtype=np.int64)
        arrays = (largest, options, labels(), *source, counts, *out)  # as long as they are read
        block = argument_block(arrays)
        for chunks in self._cut(len(batch.codes), len(largest)):
            yield from self._run(block, chunks, len(batch.codes))
            worst = largest[slice(*chunks)].tolist()
            if min(worst) < 0:
                raise_invalid_program(batch, -1 - next(n for n in worst if n < 0), variables)
        _check_index(max(largest.tolist(), default=0))
        instructions, loads, columns, entries = source[-1].tolist()
        out.instructions[instructions] = 0
        records = out.programs.view(PROGRAM).reshape(-1)
        sums = np.empty(len(records), dtype=np.int64)
        count_sums(records, products, sums)
        fill_starts(records, sums, batch.vectors)
        return DerivativeCode(
            records,
            sums,
            out.instructions[: instructions + 1],
            out.columns[:columns],
            out.entries[:entries],
            out.loads[:loads],
            out.constants[:loads],
        )

    def _cut(self, tokens: int, chunks: int) -> list[tuple[int, int]]:
        """Cut the chunks into steps, each of which has some for every thread."""
        length = max(self._threads, _TOKENS_A_STEP * self._threads * chunks // max(1, tokens))
        return [(first, min(first + length, chunks)) for first in range(0, chunks, length)]

    def _run(self, block: NDArray[np.int64], chunks: tuple[int, int], tokens: int) -> Steps[None]:
        """Lower some chunks of a batch with so many tokens."""
        helpers = tokens // _TOKENS_A_THREAD
        if tokens <= _TOKENS_AT_ONCE:
            self._loop.begin(self._address, block, *chunks, helpers).result()
            return
        if chunks[0]:
            yield None
        half = max(1, self._threads // 2)  # the processes that answer others need cores, too
        task = self._loop.begin(self._address, block, *chunks, min(helpers, half))
        try:
            yield task
        finally:
            task.result()  # before the arrays are freed


def directory_name() -> str:
    """Return the name of the directory, in that of all compiled code, for these sources."""
    return f"derivatives-{numba_cache.fingerprint(_SOURCES, encoding.__file__, __file__)}"


def load(directory: Path) -> tuple[Any, ParallelCode]:
    """Load the compiled code from disk, or compile it (about 15 s) and store it."""
    for module in (encoding, launch_plan, device_calls):
        module.load()
    place = directory / directory_name()
    parallel = ParallelCode.load(place)
    with numba_cache.cached_in(place) as jit:
        return jit(types.int64(types.int64, types.int64), lower_chunk), parallel


def _empty(tokens: int, programs: int, loss_tokens: int) -> EncodedArrays:
    """Allocate room for a batch; pages that are never written take no memory."""
    capacity = node_capacity(tokens, programs, loss_tokens)
    return EncodedArrays(
        np.empty((capacity + 1, 4), dtype=np.uint32),
        np.empty((programs, _RECORD_WORDS), dtype=np.uint32),
        np.empty(tokens, dtype=np.uint32),
        np.empty((2 * tokens, 3), dtype=np.int32),
        np.empty((capacity, 2), dtype=np.int32),
        np.empty(capacity, dtype=np.float64),
    )


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
