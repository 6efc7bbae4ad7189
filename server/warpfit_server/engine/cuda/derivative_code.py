"""Programs with derivatives as the instructions of derivatives.cu; no device needed.

The programs are differentiated, scheduled and given levels by the same code as for the CPU engine.
Here each instruction is told whether an operand is the result of the instruction before, which is
still in registers, and whether anybody will look for its own result in a level.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.errors import ResourceExhaustedError
from warpfit.ir import Batch
from warpfit_server.engine import numba_cache
from warpfit_server.engine.cuda.derivative_source import labels
from warpfit_server.engine.differentiate import (
    COLUMNS_END,
    ENTRIES_END,
    ENTRIES_START,
    LOSS_PLACE,
    SLOPE_PLACE,
    Differentiated,
)
from warpfit_server.engine.rules import arities
from warpfit_server.engine.schedule import (
    CODE,
    COPY_CODE,
    FIRST,
    INSTRUCTIONS_END,
    INSTRUCTIONS_START,
    PROLOGUE_END,
    RESULT,
    ROWS,
    SCALAR,
    SCALARS,
    SLOTS,
    TARGET,
)
from warpfit_server.engine.sweep import COLUMNS_START, NONE

#: Where an operand comes from, and kinds of a place.
_LEVEL: Final = 1
_COLUMN: Final = 2
_SCALAR: Final = 3
_BEFORE: Final = 4
_STORE: Final = 1 << 19
_PLACE_SHIFT: Final = 3
#: Largest index in 16 bits.
_INDEX_LIMIT: Final = 1 << 16
#: Field by field the struct Program of derivatives.cu.
_PROGRAM: Final = np.dtype(
    [
        *((name, np.uint32) for name in ("first", "count", "prologue", "prologue_count")),
        *((name, np.uint32) for name in ("load", "loads", "scalar", "scalars")),
        *((name, np.uint32) for name in ("column", "columns", "entry", "entries")),
        *((name, np.uint32) for name in ("loss", "slope", "levels", "parameter")),
        *((name, np.uint32) for name in ("parameters", "result")),
        *((name, np.uint64) for name in ("sum", "triangle")),
    ]
)


@dataclass(frozen=True, slots=True, eq=False)
class DerivativeCode:
    """What the kernels of derivatives.cu read of a batch, whatever its parameters."""

    instructions: NDArray[np.uint32]
    """[instructions + 1, 4]; the last one pads the kernel's read ahead."""
    programs: NDArray[np.void]
    """Records of the struct Program, [programs]."""
    columns: NDArray[np.uint32]
    """Place of each column."""
    entries: NDArray[np.int32]
    """Column, parameter or -1 - variable, and scalar, [entries, 3]."""
    loads: NDArray[np.int32]
    """Scalar, and parameter or -1, [loads, 2]."""
    constants: NDArray[np.float64]
    """Value of each load of a constant."""
    sums: NDArray[np.int64]
    """Sums of each job of a program, [programs]."""

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """What goes to the device, by the name of the kernel's argument."""
        names = ("instructions", "programs", "columns", "entries", "loads", "constants")
        return {name: getattr(self, name) for name in names}

    @property
    def work(self) -> NDArray[np.int64]:
        """Instructions of each program, and a fourth of its sums, [programs]."""
        return self.programs["count"].astype(np.int64) + self.sums // 4


def encode(
    lowered: Differentiated, batch: Batch, *, keeps_values: bool, products: bool
) -> DerivativeCode:
    """Encode a batch.

    Args:
        lowered: the batch with its derivatives.
        batch: the programs; the parameters are not looked at.
        keeps_values: whether the values are looked for when a program has run.
        products: whether products of columns are summed.

    Raises:
        ResourceExhaustedError: if a program is too large to encode.

    """
    summaries = lowered.summaries
    total = int(summaries[-1, INSTRUCTIONS_END])
    columns = lowered.columns[: summaries[-1, COLUMNS_END]]
    instructions = np.zeros((total + 1, 4), dtype=np.uint32)
    places = np.zeros(len(columns), dtype=np.uint32)
    programs = _records(summaries, batch, lowered.starts, products=products)
    largest = _encode(
        lowered.instructions, summaries, columns, _arities(), labels(), keeps_values,
        instructions, places, programs["loss"], programs["slope"], programs["levels"],
        programs["result"],
    )  # fmt: skip
    _check_index(max(int(largest), int(summaries[:, SCALARS].max())))
    loads = int(lowered.starts[-1])
    return DerivativeCode(
        instructions,
        programs,
        places,
        lowered.entries[: summaries[-1, ENTRIES_END]].astype(np.int32),
        lowered.loads[:loads].astype(np.int32),
        lowered.constants[:loads].copy(),
        _sum_counts(summaries, products=products),
    )


def _records(
    summaries: NDArray[np.int64], batch: Batch, loads: NDArray[np.int64], *, products: bool
) -> NDArray[np.void]:
    """Records of all programs, but for what `_encode` finds out."""
    records = np.zeros(len(summaries), dtype=_PROGRAM)
    ranges = {
        ("first", "count"): (summaries[:, PROLOGUE_END], summaries[:, INSTRUCTIONS_END]),
        ("prologue", "prologue_count"): (
            summaries[:, INSTRUCTIONS_START],
            summaries[:, PROLOGUE_END],
        ),
        ("load", "loads"): (loads[:-1], loads[1:]),
        ("column", "columns"): (summaries[:, COLUMNS_START], summaries[:, COLUMNS_END]),
        ("entry", "entries"): (summaries[:, ENTRIES_START], summaries[:, ENTRIES_END]),
    }
    for (first, count), (start, end) in ranges.items():
        records[first], records[count] = start, end - start
    counts = batch.parameter_counts.astype(np.int64)
    sizes = {
        "scalar": summaries[:, SCALARS],
        "parameter": counts,
        "sum": _sum_counts(summaries, products=products),
        "triangle": counts * (counts + 1) // 2,
    }
    for name, size in sizes.items():
        records[name] = (np.cumsum(size) - size) * batch.vectors
    records["scalars"], records["parameters"] = summaries[:, SCALARS], counts
    return records


def _sum_counts(summaries: NDArray[np.int64], *, products: bool) -> NDArray[np.int64]:
    columns = summaries[:, COLUMNS_END] - summaries[:, COLUMNS_START]
    return 1 + columns + (columns * (columns + 1) // 2 if products else 0)


def _arities() -> NDArray[np.int8]:
    table = arities()
    table[COPY_CODE] = 1
    return table


def _check_index(largest: int) -> None:
    if largest >= _INDEX_LIMIT:
        raise ResourceExhaustedError(
            f"derivatives of a program need index {largest}, more than the interpreter encodes",
            "PROGRAM_TOO_LONG",
            "Split the program, or ask for values and losses only",
            needed=largest,
            available=_INDEX_LIMIT - 1,
        )


@numba_cache.njit(nogil=True)  # type: ignore[untyped-decorator]
def _encode(
    lowered: Any, summaries: Any, columns: Any, operands: Any, case_labels: Any,
    keeps_values: bool, out: Any, places: Any, losses: Any, slopes: Any,
    levels: Any, results: Any,
) -> int:  # fmt: skip
    """Fill the outputs; return the largest index that has to fit in 16 bits."""
    most = 1
    for program in range(len(summaries)):
        most = max(most, summaries[program, SLOTS] + 1)
    awaited = np.zeros(most, dtype=np.bool_)
    largest = 0
    for program in range(len(summaries)):
        summary = summaries[program]
        slots = summary[SLOTS]
        awaited[: slots + 1] = False
        awaited[slots] = keeps_values
        results[program] = slots << _PLACE_SHIFT | _LEVEL
        for k in range(summary[COLUMNS_START], summary[COLUMNS_END]):
            places[k] = _await(columns[k], slots, awaited)
        if summary[LOSS_PLACE] != NONE:
            losses[program] = _await(summary[LOSS_PLACE], slots, awaited)
        if summary[SLOPE_PLACE] != NONE:
            slopes[program] = _await(summary[SLOPE_PLACE], slots, awaited)
        for number in range(summary[INSTRUCTIONS_START], summary[PROLOGUE_END]):
            _encode_scalar(lowered[number], operands, case_labels, out[number])
        used = 0
        for number in range(summary[INSTRUCTIONS_END] - 1, summary[PROLOGUE_END] - 1, -1):
            before = -1
            if number > summary[PROLOGUE_END]:
                before = _level(lowered[number - 1, TARGET], slots)
            level = _level(lowered[number, TARGET], slots)
            stores = awaited[level]
            awaited[level] = False
            if stores:
                used = max(used, level + 1)
            largest = max(
                largest,
                _encode_rows(
                    lowered[number], operands, case_labels, level, stores, before, slots, awaited,
                    out[number],
                ),
            )  # fmt: skip
        levels[program] = used
        largest = max(largest, used)
    return int(largest)


@numba_cache.njit(nogil=True)  # type: ignore[untyped-decorator]
def _level(place: int, slots: int) -> int:
    """Level of a place that holds rows; the result's comes after those of the slots."""
    return int(slots if place & 3 == RESULT else place >> 2)


@numba_cache.njit(nogil=True)  # type: ignore[untyped-decorator]
def _await(place: int, slots: int, awaited: Any) -> int:
    """Translate a place that is looked at when the program has run."""
    if place & 3 == ROWS:
        return int(place >> 2 << _PLACE_SHIFT | _COLUMN)
    level = _level(place, slots)
    awaited[level] = True
    return int(level << _PLACE_SHIFT | _LEVEL)


@numba_cache.njit(nogil=True)  # type: ignore[untyped-decorator]
def _encode_scalar(instruction: Any, operands: Any, case_labels: Any, out: Any) -> None:
    arity = operands[instruction[CODE]]
    out[0] = case_labels[instruction[CODE]]
    out[1] = instruction[FIRST] >> 2
    out[2] = instruction[FIRST + 1] >> 2 if arity > 1 else 0
    third = instruction[FIRST + 2] >> 2 if arity > 2 else 0
    out[3] = instruction[TARGET] >> 2 | third << 16


@numba_cache.njit(nogil=True)  # type: ignore[untyped-decorator]
def _encode_rows(
    instruction: Any, operands: Any, case_labels: Any, level: int, stores: bool, before: int,
    slots: int, awaited: Any, out: Any,
) -> int:  # fmt: skip
    """Encode an instruction on rows; return the index of a third operand."""
    word = case_labels[instruction[CODE]] | (_STORE if stores else 0)
    third = 0
    for k in range(operands[instruction[CODE]]):
        place = instruction[FIRST + k]
        kind = place & 3
        index, source = place >> 2, _COLUMN
        if kind == SCALAR:
            source = _SCALAR
        elif kind != ROWS:
            index = _level(place, slots)
            source = _LEVEL
            if index == before:
                index, source = 0, _BEFORE
            else:
                awaited[index] = True
        word |= source << (10 + 3 * k)
        if k < 2:
            out[1 + k] = index
        else:
            third = index
    out[0] = word
    out[3] = level | third << 16
    return int(third)
