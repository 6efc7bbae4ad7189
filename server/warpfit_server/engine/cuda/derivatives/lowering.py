"""Lowers programs with their derivatives to the code of derivatives.cu, on a few threads.

The simple form, of the calling thread and of each helper:

    while (programs := next few that nobody has taken) is not empty:
        for each: differentiate it, encode it behind all that is there

Compiled code does all that without Python's lock. A thread takes a few programs at a time, since
they differ in length.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
from numba import carray, types
from numpy.typing import NDArray

from warpfit.errors import ResourceExhaustedError
from warpfit.ir import Batch
from warpfit_server.engine.autodiff.backward_sweep import ENTRY_COLUMNS
from warpfit_server.engine.autodiff.differentiate import (
    AFTER_GIVEN,
    RowLoss,
    differentiate_program,
    given_arrays,
    given_of,
    room_for_nodes,
    scratch_for,
)
from warpfit_server.engine.cpu.codegen import parts
from warpfit_server.engine.cuda.derivatives import encoding
from warpfit_server.engine.cuda.derivatives.encoding import (
    PROGRAM,
    DerivativeCode,
    Encoded,
    encode_program,
)
from warpfit_server.engine.cuda.derivatives.source import labels
from warpfit_server.engine.lowering.schedule import inlined
from warpfit_server.engine.native.calls import add_atomically
from warpfit_server.engine.native.records import (
    numbers,
    pointer_to,
    pointer_to_words,
    record_of,
    words,
)

#: Programs that a thread takes at a time.
_TAKEN: Final = 16
#: Tokens that are lowered in the time that it takes to wake a thread, about ten times.
_TOKENS_A_THREAD: Final = 1500
#: Largest index in 16 bits.
_INDEX_LIMIT: Final = 1 << 16
_FAILED: Final = -1
_RECORD_WORDS: Final = PROGRAM.itemsize // 4
# Arrays of a record before those of `given_arrays`: the next program, and whether values are kept.
_NEXT, _KEEPS_VALUES = 0, 1
_ENCODED: Final = AFTER_GIVEN
_LABELS: Final = AFTER_GIVEN + len(Encoded._fields)


class DerivativeLowering:
    """Lowers batches with their derivatives; safe to use from several threads.

    Args:
        directory: where compiled code is kept.
        threads: that lower one batch, the calling one included.

    """

    def __init__(self, directory: Path, threads: int) -> None:
        self._lower = _load(directory)
        self._helpers = threads - 1
        self._pool = ThreadPoolExecutor(max(1, self._helpers), "lower")

    def lower(
        self,
        batch: Batch,
        row_loss: RowLoss,
        wishes: int,
        *,
        keeps_values: bool,
        products: bool,
    ) -> DerivativeCode:
        """Lower a checked batch.

        Args:
            batch: the programs; the parameters are not looked at.
            row_loss: that is lowered beside each program.
            wishes: see `sweep`.
            keeps_values: whether the values are looked for when a program has run.
            products: whether products of columns are summed.

        Raises:
            MemoryError: if there was none.
            ResourceExhaustedError: if a program is too large to encode.

        """
        given = given_arrays(batch, row_loss, wishes)
        out = _empty(len(batch.codes), len(batch), len(row_loss.codes))
        options = np.zeros(1, dtype=np.int64), np.array([keeps_values], dtype=np.int64)
        _check_index(self._run((*options, *given, *out, labels()), len(batch.codes)))
        instructions, loads, columns, entries = given[-1][1:].tolist()
        out.instructions[instructions] = 0
        records = out.programs.view(PROGRAM).reshape(-1)
        sums = _sum_counts(records, products=products)
        _fill_starts(records, sums, batch)
        return DerivativeCode(
            records,
            sums,
            out.instructions[: instructions + 1],
            out.columns[:columns],
            out.entries[:entries],
            out.loads[:loads],
            out.constants[:loads],
        )

    def _run(self, arrays: tuple[NDArray[Any], ...], tokens: int) -> int:
        """Lower on as many threads as pays; return the largest index."""
        record = record_of(arrays)
        share = min(self._helpers, tokens // _TOKENS_A_THREAD)
        helpers = [self._pool.submit(self._help, record, arrays) for _ in range(share)]
        found = [self._help(record, arrays)]
        found += [helper.result() for helper in helpers if not helper.cancel()]
        if _FAILED in found:
            raise MemoryError("no memory to lower a batch with its derivatives")
        return max(found)

    def _help(self, record: NDArray[np.int64], _held: tuple[NDArray[Any], ...]) -> int:
        """Lower what is left; the record tells where the arrays are, but does not hold them."""
        return int(self._lower(record.ctypes.data))


def _load(directory: Path) -> Any:
    """Load `lower_programs`, or compile it (some 15 s) and try to store it."""
    digest = hashlib.sha256(parts.fingerprint().encode())
    for file in (encoding.__file__, __file__):
        digest.update(Path(file).read_bytes())
    with parts.cached_in(directory / f"derivatives-{digest.hexdigest()[:32]}") as jit:
        return jit(types.int64(types.int64), lower_programs)


def _empty(tokens: int, programs: int, loss_tokens: int) -> Encoded:
    """Make room for a batch; what is not written takes no memory."""
    capacity = room_for_nodes(tokens, programs, loss_tokens)
    return Encoded(
        np.empty((capacity + 1, 4), dtype=np.uint32),
        np.empty((programs, _RECORD_WORDS), dtype=np.uint32),
        np.empty(tokens, dtype=np.uint32),
        np.empty((2 * tokens, ENTRY_COLUMNS), dtype=np.int32),
        np.empty((capacity, 2), dtype=np.int32),
        np.empty(capacity, dtype=np.float64),
    )


def _sum_counts(records: NDArray[np.void], *, products: bool) -> NDArray[np.int64]:
    columns = records["columns"].astype(np.int64)
    return 1 + columns + (columns * (columns + 1) // 2 if products else 0)


def _fill_starts(records: NDArray[np.void], sums: NDArray[np.int64], batch: Batch) -> None:
    """Fill in the fields that depend on the programs before."""
    counts = batch.parameter_counts.astype(np.int64)
    sizes = {
        "scalar": records["scalars"].astype(np.int64),
        "parameter": counts,
        "sum": sums,
        "triangle": counts * (counts + 1) // 2,
    }
    for name, size in sizes.items():
        records[name] = (np.cumsum(size) - size) * batch.vectors
    records["parameters"] = counts


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

_pointer_to_unsigned: Final = pointer_to(types.uint32)
_pointer_to_signed: Final = pointer_to(types.int32)


@inlined
def _unsigned(record: int, index: int, columns: int) -> Any:
    """Array number ``index`` of a record: uint32 [rows, columns]."""
    entry = carray(pointer_to_words(record + 16 * index), 2)
    return carray(_pointer_to_unsigned(entry[0]), (entry[1] // columns, columns))


@inlined
def _signed(record: int, index: int, columns: int) -> Any:
    """Array number ``index`` of a record: int32 [rows, columns]."""
    entry = carray(pointer_to_words(record + 16 * index), 2)
    return carray(_pointer_to_signed(entry[0]), (entry[1] // columns, columns))


def lower_programs(record: int) -> Any:
    """Lower programs until all are taken; return the largest index of an operand, or _FAILED."""
    given = given_of(record)
    out = Encoded(
        _unsigned(record, _ENCODED, 4),
        _unsigned(record, _ENCODED + 1, _RECORD_WORDS),
        _unsigned(record, _ENCODED + 2, 1)[:, 0],
        _signed(record, _ENCODED + 3, ENTRY_COLUMNS),
        _signed(record, _ENCODED + 4, 2),
        numbers(record, _ENCODED + 5),
    )
    taken, keeps_values = words(record, _NEXT), words(record, _KEEPS_VALUES)[0] != 0
    case_labels, programs = words(record, _LABELS), len(given.starts) - 1
    largest: Any = np.int64(0)
    try:
        while True:
            first = add_atomically(np.int64(taken.ctypes.data), np.int64(_TAKEN))
            if first >= programs:
                return largest
            stop = min(first + _TAKEN, programs)
            scratch = scratch_for(given, first, stop)
            awaited = np.empty(len(scratch.nodes) + 1, dtype=np.bool_)
            for program in range(first, stop):
                differentiate_program(given, scratch, program)
                index = encode_program(
                    given, scratch, program, case_labels, keeps_values, awaited, out
                )
                largest = max(largest, index)
    except Exception:  # compiled code tells exceptions apart no further: there is no memory
        return np.int64(_FAILED)
