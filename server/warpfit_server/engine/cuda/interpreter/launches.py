"""A batch on the device: its memory, and the launches of its kernels by compiled code.

A batch is copied to the device from where it lies. There `join_parts` copies the programs of
several requests together, `lower_programs` checks raw postfix tokens and writes the interpreter's
instructions, `order_programs` sorts the programs for the launches of the interpreter and reports
the first invalid program, and `evaluate_slots` computes the row-invariant subtrees. `interpret` is
launched at once after them, and `sum_partials` adds up each job's sums over tiles: the needs of
these launches are bounded by `BatchBounds`, so that the host does not wait in between.

The CUDA C++ source of the kernels is generated from the operator table. lowering.cu writes the
instructions that interpreter.cu reads. Both sources begin with the numbers of their encoding, and
with batch.cu, which declares a batch on the device.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any, Final, NamedTuple

import numba
import numpy as np
from numba import carray, types
from numpy.typing import NDArray

from warpfit.errors import InternalError, ProgramError, ResourceExhaustedError
from warpfit.ir import Batch
from warpfit.ops import ARITIES, OPERATORS, PARAMETER, VARIABLE
from warpfit.request import Loss
from warpfit_server.engine.cuda.runtime.compiler import CudaSource
from warpfit_server.engine.cuda.runtime.datasets import ResidentDataset, Span, TiledRows
from warpfit_server.engine.cuda.runtime.device import (
    DRIVER,
    argument_struct,
    as_record,
    launch,
    launch_at,
    record,
    upload,
)
from warpfit_server.engine.cuda.runtime.translation import (
    compiler_options,
    operator_source,
    packs,
    prelude,
)
from warpfit_server.engine.interface import Arithmetic
from warpfit_server.engine.native import numba_cache
from warpfit_server.engine.native.intrinsics import aligned, inlined, pointer_to
from warpfit_server.engine.sum_tree import levels_between
from warpfit_server.shared_batch import (
    CODES,
    PARAMETER_STARTS,
    PARAMETERS,
    STARTS,
    BatchSummary,
)

# --------------------------------------------------------------------------------------- encoding

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
#: The numbers above, as definitions of the same names.
_ENCODING: Final = "".join(
    f"#define {name} {globals()[name]}u\n"
    for name in __annotations__
    if isinstance(globals()[name], int)
)

#: Declarations of a batch on the device, and the kernels, with places for the generated code.
BATCH_SOURCE: Final = resources.files(__package__).joinpath("batch.cu").read_text()
TEMPLATE: Final = resources.files(__package__).joinpath("interpreter.cu").read_text()
_LOWERING: Final = resources.files(__package__).joinpath("lowering.cu").read_text()
#: Types of the kernels' arguments.
BATCH: Final = argument_struct(BATCH_SOURCE, "Batch")
PART: Final = argument_struct(BATCH_SOURCE, "Part")
TILES: Final = argument_struct(TEMPLATE, "Tiles")
JOBS: Final = argument_struct(TEMPLATE, "Jobs")
#: Most tokens of a program. A longer one may need more stack levels than fit the shared memory
#: that every device grants.
MAX_PROGRAM_TOKENS: Final = 1 << 18
#: Alignment of the arrays of a batch, in bytes.
_ALIGNMENT: Final = 64
#: Instructions after the last one that the interpreter prefetches and does not run.
_READ_AHEAD: Final = 1
#: Operators with three operands, as `BatchSummary.operators` has them.
_TERNARY: Final = sum(1 << row.code for row in OPERATORS.values() if row.arity == 3)
#: Most blocks of ``join_parts`` for a part, and tokens of each thread.
_JOIN_BLOCKS: Final = 64
_JOIN_TOKENS: Final = 2
#: Resident warps for each block of ``lower_programs`` among which a small batch is divided: the
#: fewer programs a block has, the fewer different branches its warp takes.
_WARPS_A_BLOCK: Final = 4
#: Most tokens that a block of ``lower_programs`` keeps in shared memory, and the bytes of each.
MAX_SHARED_TOKENS: Final = 4096
_NODE_BYTES: Final = 8
#: Shared memory of a block of ``order_programs``, in bytes.
_ORDER_BYTES: Final = 8 * 1024 + 8
#: Threads of a block of ``evaluate_slots`` and of ``sum_partials``.
_SLOT_THREADS: Final = (32, 4)
_SUM_THREADS: Final = 128
#: Most programs that a warp runs one after the other.
_PROGRAMS_A_WARP: Final = 2
#: Most blocks in the second dimension of a grid.
_MAX_GRID_Y: Final = 0xFFFF
#: Shared memory of a block that every device grants without asking, less the job counter.
_COUNTER_BYTES: Final = 16
_SHARED_BYTES: Final = 48 * 1024 - _COUNTER_BYTES
_integers = pointer_to(types.uint32)
_compiled = numba_cache.njit(nogil=True)
#: What ``order_programs`` reports for a group without an invalid program.
ALL_VALID: Final = 0xFFFFFFFF
#: Threads of a block of each kernel.
JOIN_THREADS: Final = 256
LOWER_THREADS: Final = 32
ORDER_THREADS: Final = 1024
#: Bits of a row of the operator table, next to the label.
_ARITY_SHIFT: Final = 10
_IS_KNOWN, _IS_VARIABLE, _IS_PARAMETER = 1 << 12, 1 << 13, 1 << 14
#: Most operands whose code is still to be written: one for each stack level.
_MOST_PENDING: Final = 32
_CALL: Final = re.compile(r"\b(\w+)\(")
#: Calls short enough to be unrolled over all rows; an operator that calls anything else loops.
_SHORT: Final = frozenset(
    {
        *("select", "float", "double", "abs", "floor", "ceil", "rint", "sqrt", "rsqrtf"),
        *("quotient", "root", "exponential", "logarithm", "product_sum"),
        *("fast_pow", "fast_pow_positive", "fast_sqrt", "fast_tanh"),
        *("__fdividef", "__logf", "__log2f", "__log10f", "__expf", "__fmaf_rn"),
    }
)
#: The same for float32 alone, where these are 10 to 20 instructions.
_SHORT_FLOAT: Final = _SHORT | {"exp", "log"}
#: Calls in binary operators that get a body for each source of an operand; an exact division does
#: not.
_DIRECT: Final = frozenset({"__fdividef"})
#: Stack levels above the top that the operands of a costly operator use.
SCRATCH_LEVELS: Final = 2


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


# ----------------------------------------------------------------------------------------- sources


def lowering_source() -> CudaSource:
    """Return the source of the lowering kernels."""
    numbers = {"ARITY_SHIFT": _ARITY_SHIFT, "IS_KNOWN": _IS_KNOWN}
    numbers |= {"IS_VARIABLE": _IS_VARIABLE, "IS_PARAMETER": _IS_PARAMETER, "NONE": ALL_VALID}
    numbers |= {"LOWER_THREADS": LOWER_THREADS, "ORDER_THREADS": ORDER_THREADS}
    numbers |= {"MOST_PENDING": _MOST_PENDING, "JOIN_THREADS": JOIN_THREADS}
    defines = [f"#define {name} {number}u\n" for name, number in numbers.items()]
    table = np.zeros(256, dtype=np.uint32)  # label, arity and flags by token code
    known = ARITIES >= 0
    table[known] = _IS_KNOWN | ARITIES[known].astype(np.uint32) << _ARITY_SHIFT
    table |= labels().astype(np.uint32)
    table[VARIABLE] |= _IS_VARIABLE
    table[PARAMETER] |= _IS_PARAMETER
    rows = ", ".join(f"{row}u" for row in table.tolist())
    declared = f"__device__ const unsigned OPERATOR_TABLE[256] = {{{rows}}};\n"
    text = "".join([_ENCODING, BATCH_SOURCE, *defines, declared, _LOWERING])
    return CudaSource(text, ("--std=c++17",))


@dataclass(frozen=True, slots=True)
class Variant:
    """Arithmetic and rows a thread of one compiled form of the interpreter."""

    arithmetic: Arithmetic
    rows: int
    """Rows a thread: a multiple of 4 (float32) or 2 (float64)."""

    @classmethod
    def of(cls, arithmetic: Arithmetic, row_bytes: int) -> Variant:
        """Return the variant whose threads work on ``row_bytes`` of rows at a time."""
        return cls(arithmetic, row_bytes // arithmetic.dtype.itemsize)

    @property
    def dtype(self) -> np.dtype[Any]:
        """float32 or float64."""
        return self.arithmetic.dtype

    @property
    def tile(self) -> int:
        """Rows of a tile, on which a warp works."""
        return 32 * self.rows

    @property
    def options(self) -> tuple[str, ...]:
        """NVRTC options, without the architecture."""
        return ("--std=c++17", *compiler_options(self.arithmetic))


def variant_source(
    variant: Variant, definitions: dict[str, int | str], template: str, parts: dict[str, list[str]]
) -> str:
    """Return a complete CUDA C++ source: definitions, prelude, and a template with its parts."""
    numbers = {"REAL_BYTES": variant.dtype.itemsize, "ROWS": variant.rows}
    numbers |= {"FAST": int(variant.arithmetic.is_fast)}
    defines = [f"#define {name} {number}\n" for name, number in (numbers | definitions).items()]
    for name, lines in parts.items():
        template = template.replace(f"@{name}@", "\n".join(lines))
    start = f"typedef {variant.arithmetic.real} real;\n{''.join(defines)}"
    return start + prelude(variant.arithmetic) + packs() + template


def operator_functions(arithmetic: Arithmetic) -> list[str]:
    """Return the definition of a device function for each operator."""
    return [
        device_function(f"op_{row.name}", row.operands, operator_source(row, arithmetic))
        for row in OPERATORS.values()
    ]


def device_function(name: str, operands: Iterable[str], expression: str) -> str:
    """Return the definition of a device function of numbers."""
    parameters = ", ".join(f"real {operand}" for operand in operands)
    return f"__device__ __forceinline__ real {name}({parameters}) {{ return {expression}; }}"


def interpreter_source(variant: Variant) -> CudaSource:
    """Return the kernels of one variant."""
    table, rows = labels(), OPERATORS.values()
    # The least blocks of 256 threads a multiprocessor bound the registers.
    blocks = 4 if variant.rows * variant.dtype.itemsize <= 64 else 2
    cases: list[str] = []
    called: list[str] = []
    unary: list[str] = []
    invariant: list[str] = []
    for row in rows:
        arity = row.arity
        operands = ", ".join(f"stack[height - {arity - i}]" for i in range(arity))
        invariant.append(
            f"      case {row.code}: stack[height - {arity}] = op_{row.name}({operands}); "
            f"height -= {arity - 1}; break;"
        )
        # The macro in the template that writes the cases of the operator.
        expression = operator_source(row, variant.arithmetic)
        macro = ("UNARY", "BINARY", "TERNARY")[arity - 1]
        if arity < 3 and is_costly(expression, variant):
            macro = f"{'CALLED' if variant.arithmetic.is_fast else 'COSTLY'}_{macro}"
        elif arity == 2 and not is_direct(expression):
            macro = "MERGED_BINARY"
        given = f"(op_{row.name}, {table[row.code]})"
        if not macro.startswith("CALLED"):
            cases.append(f"        {macro}{given}")
            continue
        called.append(f"    {macro.replace('CALLED', 'STEPS_OF')}{given}")
        if arity == 1:
            unary.append(f"        case {table[row.code]}:")
        else:
            cases.append(f"        {macro}{given}")
    if unary:
        cases += [*unary, "        CALLED_UNARY"]
    parts = {
        "OPERATORS": operator_functions(variant.arithmetic),
        "CASES": cases,
        "CALLED": called,
        "INVARIANT_CASES": invariant,
    }
    template = _ENCODING + BATCH_SOURCE + TEMPLATE
    text = variant_source(variant, {"BLOCKS_AT_LEAST": blocks}, template, parts)
    return CudaSource(text, variant.options, CASES)


def costly_operators(variant: Variant) -> int:
    """Return the operators that need scratch levels, as `BatchSummary.operators` has them."""
    return sum(
        1 << row.code
        for row in OPERATORS.values()
        if row.arity == 3 or is_costly(operator_source(row, variant.arithmetic), variant)
    )


def is_costly(expression: str, variant: Variant) -> bool:
    """Return whether a rendered expression is too long to be unrolled over a thread's rows."""
    short = _SHORT_FLOAT if variant.dtype == np.float32 else _SHORT
    return not set(_CALL.findall(expression)) <= short


def is_direct(expression: str) -> bool:
    """Return whether a rendered expression is so short that each form of it has its own code."""
    return set(_CALL.findall(expression)) <= _DIRECT and "/" not in expression


# ------------------------------------------------------------------------------------------ memory


class BatchLayout(NamedTuple):
    """Byte offsets of a batch's arrays in one block of device memory.

    The host uploads everything before ``uploaded``, laid out as in a segment; kernels write the
    rest.
    """

    starts: int
    """Index of each program's first token, and the total; uint32 [programs + 1]."""
    parameter_starts: int
    """Likewise for parameters, counting one vector of each program."""
    values: int
    parameters: int
    codes: int
    uploaded: int
    programs: int
    """Records of the struct Program in batch.cu; 16 bytes each."""
    order: int
    """Programs in the order in which they are interpreted; uint32 [programs]."""
    slots: int
    """Row-invariant subtrees, 16 bytes each; [`max_slots`]."""
    instructions: int
    """Instructions, 8 bytes each; program p has them from index starts[p] + p on."""
    scratch: int
    """8 bytes for each token."""
    end: int


@_compiled  # type: ignore[untyped-decorator]
def max_slots(tokens: int, programs: int) -> int:
    """Bound the row-invariant subtrees by the leaves, if all operators were ternary."""
    return int((2 * tokens + programs) // 3)


@_compiled  # type: ignore[untyped-decorator]
def lay_out(tokens: int, programs: int, parameters: int) -> BatchLayout:
    """Lay out a batch by its number of tokens, programs, and parameters in all vectors."""
    parameter_starts = aligned(4 * (programs + 1), _ALIGNMENT)
    values = 2 * parameter_starts
    numbers = values + aligned(8 * tokens, _ALIGNMENT)
    codes = numbers + aligned(8 * parameters, _ALIGNMENT)
    records = codes + aligned(tokens, _ALIGNMENT)
    order = records + aligned(16 * programs, _ALIGNMENT)
    slots = order + aligned(4 * programs, _ALIGNMENT)
    instructions = slots + aligned(16 * max_slots(tokens, programs), _ALIGNMENT)
    scratch = instructions + aligned(8 * (tokens + programs + _READ_AHEAD), _ALIGNMENT)
    end = scratch + aligned(8 * tokens, _ALIGNMENT)
    return BatchLayout(
        *(0, parameter_starts, values, numbers, codes, records),
        *(records, order, slots, instructions, scratch, end),
    )


class BatchBounds(NamedTuple):
    """Upper bounds of what a batch needs, which the host knows before the device lowers it."""

    levels: int
    """Stack levels below the top that any program needs."""
    typical_levels: int
    """Stack levels that are enough for most programs."""
    costly: bool
    """Whether an operator needs scratch levels."""

    @classmethod
    def of(cls, summary: BatchSummary, costly: int) -> BatchBounds:
        """Bound the needs of a batch; ``costly`` has the operators that need scratch levels.

        Raises:
            ResourceExhaustedError: if a program is too long for the interpreter.
        """
        if summary.longest > MAX_PROGRAM_TOKENS:
            raise ResourceExhaustedError(
                f"a program of {summary.longest} tokens is longer than the interpreter can encode",
                "PROGRAM_TOO_LONG",
                "Split the program",
                needed=summary.longest,
                available=MAX_PROGRAM_TOKENS,
            )
        has_ternary = bool(summary.operators & _TERNARY)
        levels = max_levels(summary.longest, has_ternary)
        typical = max_levels(summary.typical, has_ternary)
        return cls(levels, typical, bool(summary.operators & costly))


@lru_cache(1 << 12)
def max_levels(tokens: int, has_ternary: bool) -> int:
    """Bound the stack levels below the top that a program needs, by its number of tokens.

    A binary operator needs one level more than its operands if both need equally many; an operand
    on the stack has at least two tokens. A ternary operator evaluates all three operands, leaves
    included, so the third finds two levels in use.
    """
    if not has_ternary:
        levels, least = 0, 5  # fewest tokens of a program that needs one level more
        while least <= tokens:
            levels, least = levels + 1, 2 * least + 1
        return levels
    levels, before, least = 0, 1, 4
    while least <= tokens:
        levels += 1
        before, least = least, min(3 * before + 1, 2 * least + 1)
    return levels


# ----------------------------------------------------------------------------------- configuration


class LaunchLimits(NamedTuple):
    """Kernels of one variant and limits of their launches on a device, in integers."""

    interpret: int
    """The driver's handle, as the following ones."""
    evaluate_slots: int
    sum_partials: int
    join_parts: int
    lower_programs: int
    order_programs: int
    level_bytes: int
    """Shared memory of one stack level of a warp."""
    max_warps: int
    """Most warps of a block."""
    resident_warps: int
    """Warps that the device runs at a time."""


def new_batch(
    counts: tuple[int, int, int, int], variables: int, address: int, results: int, invalid: int
) -> NDArray[Any]:
    """Return a record of `BATCH`, in which `configure_launch` notes the rest.

    Args:
        counts: tokens, programs, parameters in all vectors, and vectors.
        variables: of the data set.
        address: of the batch in its `BatchLayout`.
        results: address of the values of row-invariant subtrees.
        invalid: address of page-locked memory for the first invalid program of each group.
    """
    batch = np.zeros(1, BATCH)
    _describe(batch, *counts, variables, address, results, invalid)
    return batch


@_compiled  # type: ignore[untyped-decorator]
def _describe(
    batch: NDArray[Any],
    tokens: int,
    programs: int,
    parameters: int,
    vectors: int,
    variables: int,
    address: int,
    results: int,
    invalid: int,
) -> None:
    layout, one = lay_out(tokens, programs, parameters), batch[0]
    one.starts = address + layout.starts
    one.parameter_starts = address + layout.parameter_starts
    one.values = address + layout.values
    one.parameters = address + layout.parameters
    one.codes = address + layout.codes
    one.programs = address + layout.programs
    one.order = address + layout.order
    one.slots = address + layout.slots
    one.instructions = address + layout.instructions
    one.scratch = address + layout.scratch
    one.results, one.invalid = results, invalid
    one.slot_count = max_slots(tokens, programs)
    one.variables = min(variables, INDEX_LIMIT)
    one.count, one.vectors = programs, vectors


@_compiled  # type: ignore[untyped-decorator]
def configure_launch(
    batch: NDArray[Any],
    kernels: Any,
    longest: int,
    levels: int,
    typical_levels: int,
    costly: bool,
    max_jobs: int,
) -> None:
    """Choose, and note, the configuration of the launches of a batch.

    The shared memory of a block is large enough for one warp to run any program. Where several
    warps share it, each has the levels that most programs need; the programs that need more are
    sorted to the front and run by one warp, which has all of the block's levels.

    Args:
        batch: record of `BATCH`, from `new_batch`.
        kernels: record of `LaunchLimits`.
        longest: tokens of the longest program.
        levels: of `BatchBounds`.
        typical_levels: of `BatchBounds`.
        costly: of `BatchBounds`.
        max_jobs: most jobs of a launch.
    """
    one, limits = batch[0], kernels[0]
    scratch = SCRATCH_LEVELS if costly else 0
    most, group = levels + scratch, 1
    own = most
    if max_jobs >= one.vectors:
        group = min(max_jobs // one.vectors, one.count)
        own = min(typical_levels, levels) + scratch
    warps = max(1, min(limits.max_warps, _SHARED_BYTES // max(1, own * limits.level_bytes)))
    own = max(own, -(-most // warps))
    if warps * own * limits.level_bytes > _SHARED_BYTES:
        warps, own = 1, most
    one.longest, one.group, one.warps = longest, group, warps
    one.levels, one.scratch_levels = own, scratch


# ---------------------------------------------------------------------------------------- lowering


@_compiled  # type: ignore[untyped-decorator]
def lower(
    driver: NDArray[np.void],
    stream: int,
    places: NDArray[np.int64],
    apart: int,
    parts: NDArray[Any],
    kernels: Any,
    batch: NDArray[Any],
    started: int,
) -> int:
    """Copy a batch to the device, lower it, and compute its row-invariant subtrees.

    Args:
        driver: record of `DRIVER`.
        stream: the driver's handle.
        places: of the batch, see `SharedBatch`.
        apart: address of device memory for the parts of a batch, if it `SharedBatch.is_apart`; else
            0, and the batch is copied to where it is lowered.
        parts: records of `PART` for them in page-locked memory.
        kernels: record of `LaunchLimits`.
        batch: record of `BATCH`.
        started: event that is recorded behind the copies.

    Returns:
        The driver's first status but 0, else 0.
    """
    kernel, one = kernels[0], batch[0]
    if apart == 0:
        targets = one.starts, one.parameter_starts, one.values, one.parameters, one.codes
        status = _upload_part(driver, stream, places[0], targets)
    else:
        status = _upload_parts(driver, stream, places, apart, parts)
    status = status or record(driver, stream, started)
    if apart != 0:
        status = status or _join_parts(driver, stream, kernel, batch, parts[: len(places)])
    status = status or launch_lowering(driver, stream, kernel, batch)
    status = status or launch_order(driver, stream, kernel, batch)
    width, height = _SLOT_THREADS
    grid = -(-one.count // height), min(-(-one.vectors // width), _MAX_GRID_Y)
    slots = kernel.evaluate_slots
    return status or launch(driver, stream, slots, grid, (width, height), 0, batch)


@inlined
def _upload_part(driver: Any, stream: int, places: Any, targets: Any) -> int:
    """Copy the arrays of a part, together if they have the same distances on both sides."""
    ends = np.array(targets, np.uint64).astype(np.int64)
    first = 0
    while first < len(ends):
        source, target = places[first, 0], ends[first]
        size, stop = places[first, 1], first + 1
        while stop < len(ends) and places[stop, 0] - source == ends[stop] - target:
            size = places[stop, 0] + places[stop, 1] - source
            stop += 1
        if size > 0:
            status = upload(driver, stream, target, source, size)
            if status != 0:
                return status
        first = stop
    return 0


@inlined
def _upload_parts(driver: Any, stream: int, places: Any, apart: int, parts: Any) -> int:
    """Copy parts one after the other, and note where they are and begin in the whole batch."""
    address, token, program, number = apart, 0, 0, 0
    parameter: Any = np.int64(0)
    for index in range(len(places)):
        place, part = places[index], parts[index]
        tokens, programs = place[CODES, 1], place[STARTS, 1] // 4 - 1
        numbers = place[PARAMETERS, 1] // 8
        layout = lay_out(tokens, programs, numbers)
        part.starts, part.parameter_starts = address, address + layout.parameter_starts
        part.values, part.codes = address + layout.values, address + layout.codes
        part.parameters = address + layout.parameters
        part.token, part.program, part.parameter, part.number = token, program, parameter, number
        part.tokens, part.programs, part.numbers = tokens, programs, numbers
        targets = part.starts, part.parameter_starts, part.values, part.parameters, part.codes
        status = _upload_part(driver, stream, place, targets)
        if status != 0:
            return status
        ends = carray(_integers(place[PARAMETER_STARTS, 0]), programs + 1)
        parameter += np.int64(ends[programs]) - np.int64(ends[0])
        token, program, number = token + tokens, program + programs, number + numbers
        address += layout.uploaded
    return 0


@inlined
def _join_parts(driver: Any, stream: int, kernels: Any, batch: Any, parts: Any) -> int:
    """Launch the kernel that copies uploaded parts together."""
    most = np.int64(0)
    for index in range(len(parts)):
        most = max(most, np.int64(parts[index].tokens))
    blocks = min(_JOIN_BLOCKS, -(-most // (_JOIN_TOKENS * JOIN_THREADS)))
    batch[0].parts = parts.ctypes.data
    grid, threads = (max(1, blocks), len(parts)), (JOIN_THREADS, 1)
    return launch(driver, stream, kernels.join_parts, grid, threads, 0, batch)


@inlined
def launch_lowering(driver: Any, stream: int, kernels: Any, batch: Any) -> int:
    """Launch the lowering of a batch that has been uploaded; return the driver's status.

    A small batch is divided among more blocks than it needs. ``batch`` is a record of `BATCH`.
    """
    one, blocks = batch[0], kernels.resident_warps // _WARPS_A_BLOCK
    share = min(LOWER_THREADS, -(-one.count // blocks))
    room = min(MAX_SHARED_TOKENS, share * one.longest)
    one.share, one.room = share, room
    grid, threads = (-(-one.count // share), 1), (LOWER_THREADS, 1)
    kernel, shared = kernels.lower_programs, _NODE_BYTES * room
    return launch(driver, stream, kernel, grid, threads, shared, batch)


@inlined
def launch_order(driver: Any, stream: int, kernels: Any, batch: Any) -> int:
    """Launch the sorting of the programs of a lowered batch in groups; return the status.

    It writes the first invalid program of each group, or `ALL_VALID`, to page-locked memory.
    """
    one, kernel = batch[0], kernels.order_programs
    grid, threads = (-(-one.count // one.group), 1), (ORDER_THREADS, 1)
    return launch(driver, stream, kernel, grid, threads, _ORDER_BYTES, batch)


def raise_invalid_program(batch: Batch, program: int, variables: int) -> None:
    """Raise the error of a program that the device found invalid.

    Raises:
        ProgramError: for the first bad token.
        ResourceExhaustedError: if a variable's index is too large.
    """
    one = batch[program : program + 1]
    try:
        one.check(variables)
    except ProgramError as error:
        error.expression = program
        raise
    if one.values[one.codes == VARIABLE].max(initial=0) >= INDEX_LIMIT:
        raise ResourceExhaustedError(
            "a variable's index is larger than the interpreter can encode",
            "VARIABLE_TOO_FAR",
            f"Use the first {INDEX_LIMIT} variables",
            available=INDEX_LIMIT,
        )
    raise InternalError(
        "host and device disagree on whether a program is valid",
        "ENGINE_FAILURE",
        "Report it as a bug",
    )


# -------------------------------------------------------------------------------------------- jobs


def cut_tiles(
    resident: ResidentDataset, rows: Span, loss: Loss | None, variant: Variant
) -> NDArray[Any]:
    """Cut rows of a data set into tiles; return a record of `TILES`."""
    cut = TiledRows.cut(rows, variant.tile)
    tiles = {
        "variables": resident.address(0, cut.aligned),
        "target": 0 if loss is None else resident.target_address(cut.aligned),
        "weights": 0 if loss is None else resident.weights_address(cut.aligned),
        "stride": resident.stride * variant.dtype.itemsize,
        "first_tile": cut.first_tile,
        "first_row": cut.first_row,
        "end_row": cut.end_row,
        "count": cut.tiles,
        "node_levels": levels_between(variant.tile, None),
        "nodes": 1,
        "absolute": int(loss is Loss.MAE),
    }
    return np.array([tuple(tiles[name] for name in TILES.names or ())], TILES)


def as_jobs(jobs: tuple[int, int], values: int, partials: int) -> NDArray[Any]:
    """Return a record of `JOBS`, of which the first and their number are given."""
    return np.array([(values, partials, *jobs, 0)], JOBS)


@_compiled  # type: ignore[untyped-decorator]
def run_jobs(
    driver: NDArray[np.void],
    stream: int,
    kernels: Any,
    batch: NDArray[Any],
    rows: NDArray[Any],
    jobs: NDArray[Any],
    sums: int,
    computed: int,
) -> int:
    """Interpret some jobs, a block for each tile of rows and group of jobs, and add up their sums.

    Args:
        driver: record of `DRIVER`.
        stream: the driver's handle.
        kernels: record of `LaunchLimits`.
        batch: record of `BATCH`.
        rows: record of `TILES`.
        jobs: record of `JOBS`, but for ``per_block``; without ``partials`` no losses are wanted.
        sums: address for the sums of nodes, in page-locked memory [nodes, jobs].
        computed: event that is recorded behind the kernels.

    Returns:
        The driver's first status but 0, else 0.
    """
    kernel, tiles, job = kernels[0], rows[0], jobs[0]
    status = launch_interpreter(driver, stream, kernel, batch, rows, jobs)
    if job.partials != 0 and status == 0:
        partials = np.int64(job.partials)
        arguments = np.array(
            (partials, sums, tiles.count, tiles.first_tile, tiles.node_levels), np.int64
        )
        grid, threads = (job.count, 1), (_SUM_THREADS, 1)
        status = launch(driver, stream, kernel.sum_partials, grid, threads, 0, arguments)
    return status or record(driver, stream, computed)


@inlined
def launch_interpreter(
    driver: Any, stream: int, kernels: Any, batch: Any, rows: Any, jobs: Any
) -> int:
    """Launch the interpreter for some jobs, as `run_jobs`; return the driver's status."""
    one, tiles, job = batch[0], rows[0], jobs[0]
    rounds = max(1, job.count * tiles.count // kernels.resident_warps)
    rounds = min(_PROGRAMS_A_WARP, rounds)
    group = max(one.warps * rounds, -(-job.count // _MAX_GRID_Y))
    job.per_block = group
    places = np.array((batch.ctypes.data, rows.ctypes.data, jobs.ctypes.data), np.int64)
    grid, threads = (tiles.count, -(-job.count // group)), (32 * one.warps, 1)
    shared = _COUNTER_BYTES + one.warps * one.levels * kernels.level_bytes
    return launch_at(driver, stream, kernels.interpret, grid, threads, shared, places)


def load() -> None:
    """Load the compiled functions, or compile them, for the arrays of requests."""
    limits = as_record(LaunchLimits(*[1] * len(LaunchLimits._fields)))
    batch, tiles, jobs = new_batch((1, 1, 0, 1), 1, 0, 0, 0), np.zeros(1, TILES), np.zeros(1, JOBS)
    configure_launch(batch, limits, 1, 0, 0, False, 1)
    driver, places = np.zeros(1, DRIVER), np.zeros((1, 5, 2), np.int64)
    # They are compiled and not called: there may be no device.
    for function, given in (
        (lower, (driver, 0, places, 0, np.zeros(1, PART), limits, batch, 0)),
        (run_jobs, (driver, 0, limits, batch, tiles, jobs, 0, 0)),
        (lay_out, (0, 0, 0)),
    ):
        function.compile(tuple(map(numba.typeof, given)))
