"""Lowering of a batch on the device: the source, arguments and launches of its kernels.

`lower_programs` checks raw postfix tokens and writes the interpreter's instructions;
`order_programs` sorts the programs for the launches of the interpreter, and reports the first
invalid program. The interpreter is launched at once after them: what its launch depends on is
bounded by `batch_layout.bound_batch`, so that the host does not wait in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.errors import InternalError, ProgramError, ResourceExhaustedError
from warpfit.ir import Batch
from warpfit.ops import ARITIES, PARAMETER, VARIABLE
from warpfit_server.engine.cuda.interpreter import bytecode
from warpfit_server.engine.cuda.interpreter.bytecode import INDEX_LIMIT, labels
from warpfit_server.engine.cuda.interpreter.compile import CudaSource
from warpfit_server.engine.cuda.runtime.batch_layout import BatchLayout
from warpfit_server.engine.cuda.runtime.device import CudaDevice
from warpfit_server.engine.cuda.runtime.streams import StreamContext
from warpfit_server.engine.native import numba_cache

#: Most tokens of a program. A longer one may need more stack levels than fit the shared memory
#: that every device grants.
MAX_PROGRAM_TOKENS: Final = 1 << 18
#: What ``order_programs`` reports for a group without an invalid program.
ALL_VALID: Final = 0xFFFFFFFF
#: The structs LowerArguments and OrderArguments of lowering.cu, field by field.
LOWERING_ARGUMENTS: Final = np.dtype(
    [
        *((name, np.uint64) for name in ("codes", "values", "starts", "parameter_starts")),
        *((name, np.uint64) for name in ("instructions", "programs", "slots", "scratch")),
        *((name, np.uint32) for name in ("variables", "vectors")),
        *((name, np.int32) for name in ("count", "share", "room", "padding")),
    ]
)
ORDER_ARGUMENTS: Final = np.dtype(
    [
        *((name, np.uint64) for name in ("programs", "order", "unsound")),
        *((name, np.int32) for name in ("count", "group", "levels", "padding")),
    ]
)
#: Threads of a block of each kernel.
LOWER_THREADS: Final = 32
ORDER_THREADS: Final = 1024
#: Shared memory of a block of ``order_programs``, in bytes.
ORDER_BYTES: Final = 8 * 1024 + 8
#: Most tokens that a block of ``lower_programs`` keeps in shared memory, and the bytes of each.
MAX_SHARED_TOKENS: Final = 4096
NODE_BYTES: Final = 8
#: Blocks of ``lower_programs`` for each multiprocessor among which a small batch is divided: the
#: fewer programs a warp has, the fewer different branches it takes.
BLOCKS_A_MULTIPROCESSOR: Final = 8
#: Bits of a row of the operator table, next to the label.
_ARITY_SHIFT: Final = 10
_IS_KNOWN, _IS_VARIABLE, _IS_PARAMETER = 1 << 12, 1 << 13, 1 << 14
#: Most operands whose code is still to be written: one for each stack level.
_MOST_PENDING: Final = 32
#: Constants of bytecode.py that lowering.cu uses under the same names.
_SHARED_NAMES: Final = (
    *("LOAD_VARIABLE", "LOAD_SLOT", "PUSH", "INDEX_SHIFT", "SLOT_LEVELS"),
    *("FROM_VARIABLE", "FROM_SLOT", "FROM_STACK", "NEED_SHIFT", "NEED_MASK"),
    *("UNSOUND", "DEEP", "SKIPPED"),
)
_compiled = numba_cache.njit(nogil=True)


@dataclass(frozen=True, slots=True)
class LoweringKernels:
    """The loaded kernels of the lowering, which all variants share."""

    lower_programs: Any
    order_programs: Any


def lowering_source() -> CudaSource:
    """Return the source of the lowering kernels."""
    text = resources.files(__package__).joinpath("lowering.cu").read_text()
    numbers = {name: getattr(bytecode, name) for name in _SHARED_NAMES}
    numbers |= {"LABEL_MASK": (1 << bytecode.LABEL_BITS) - 1, "END_LABEL": bytecode.END}
    numbers |= {"ARITY_SHIFT": _ARITY_SHIFT, "IS_KNOWN": _IS_KNOWN}
    numbers |= {"IS_VARIABLE": _IS_VARIABLE, "IS_PARAMETER": _IS_PARAMETER, "NONE": ALL_VALID}
    numbers |= {"LOWER_THREADS": LOWER_THREADS, "ORDER_THREADS": ORDER_THREADS}
    numbers |= {"MOST_PENDING": _MOST_PENDING}
    defines = [f"#define {name} {number}u\n" for name, number in numbers.items()]
    rows = ", ".join(f"{row}u" for row in _operator_table().tolist())
    table = f"__device__ const unsigned OPERATOR_TABLE[256] = {{{rows}}};\n"
    return CudaSource("".join(defines) + table + text, ("--std=c++17",))


def _operator_table() -> NDArray[np.uint32]:
    """Return label, arity and flags by token code; uint32 [256], 0 for other codes."""
    table = np.zeros(256, dtype=np.uint32)
    known = ARITIES >= 0
    table[known] = _IS_KNOWN | ARITIES[known].astype(np.uint32) << _ARITY_SHIFT
    table |= labels().astype(np.uint32)
    table[VARIABLE] |= _IS_VARIABLE
    table[PARAMETER] |= _IS_PARAMETER
    return table


def check_length(batch: Batch) -> int:
    """Return the length of the longest program.

    Raises:
        ResourceExhaustedError: if it is too long for the interpreter.
    """
    longest = int(batch.lengths.max())
    if longest > MAX_PROGRAM_TOKENS:
        raise ResourceExhaustedError(
            f"a program of {longest} tokens is longer than the interpreter can encode",
            "PROGRAM_TOO_LONG",
            "Split the program",
            needed=longest,
            available=MAX_PROGRAM_TOKENS,
        )
    return longest


def raise_invalid_program(batch: Batch, program: int, variables: int) -> None:
    """Raise the error of a program that the device found invalid.

    Raises:
        ProgramError: for the first bad token.
        ResourceExhaustedError: if a variable's index is too large.
    """
    start, stop = batch.starts[program : program + 2]
    one = Batch(
        batch.codes[start:stop],
        batch.values[start:stop],
        batch.lengths[program : program + 1],
        parameter_counts=batch.parameter_counts[program : program + 1],
        parameters=batch.program_parameters(program).reshape(-1),
        vectors=batch.vectors,
    )
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


@_compiled  # type: ignore[untyped-decorator]
def fill_lowering_arguments(
    arguments: NDArray[np.void],
    batch: int,
    layout: BatchLayout,
    programs: int,
    vectors: int,
    variables: int,
    longest: int,
    blocks: int,
) -> tuple[int, int]:
    """Fill in `LOWERING_ARGUMENTS` [1]; return the kernel's blocks and bytes of shared memory.

    ``batch`` is the batch's device address, ``longest`` are the tokens of its longest program, and
    ``blocks`` the blocks among which a small batch is divided.
    """
    share = min(LOWER_THREADS, -(-programs // blocks))
    room = min(MAX_SHARED_TOKENS, share * longest)
    one = arguments[0]
    one.codes = batch + layout.codes
    one.values = batch + layout.values
    one.starts = batch + layout.starts
    one.parameter_starts = batch + layout.parameter_starts
    one.instructions = batch + layout.instructions
    one.programs = batch + layout.programs
    one.slots = batch + layout.slots
    one.scratch = batch + layout.scratch
    one.variables = min(variables, INDEX_LIMIT)
    one.vectors = vectors
    one.count = programs
    one.share = share
    one.room = room
    return -(-programs // share), NODE_BYTES * room


@_compiled  # type: ignore[untyped-decorator]
def fill_order_arguments(
    arguments: NDArray[np.void],
    batch: int,
    layout: BatchLayout,
    programs: int,
    group: int,
    levels: int,
    first_invalid: int,
) -> int:
    """Fill in `ORDER_ARGUMENTS` [1]; return the kernel's blocks, one for each group of programs.

    ``levels`` are the stack levels that each warp of the interpreter has, and ``first_invalid`` is
    the address of page-locked host memory, uint32 [groups].
    """
    one = arguments[0]
    one.programs = batch + layout.programs
    one.order = batch + layout.order
    one.unsound = first_invalid
    one.count = programs
    one.group = group
    one.levels = levels
    return -(-programs // group)


def load_lowering(device: CudaDevice) -> LoweringKernels:
    """Load the kernels; the first start on a machine compiles them."""
    module = lowering_source().load(device)
    return LoweringKernels(
        module.get_function("lower_programs"), module.get_function("order_programs")
    )


def launch_lowering(
    context: StreamContext,
    kernels: LoweringKernels,
    batch: Batch,
    address: int,
    variables: int,
    blocks: int,
) -> None:
    """Launch the lowering of a batch that has been uploaded to ``address`` in its `BatchLayout`.

    A small batch is divided among ``blocks`` blocks.
    """
    arguments = np.zeros(1, dtype=LOWERING_ARGUMENTS)
    sizes = (len(batch), batch.vectors, variables, int(batch.lengths.max()))
    where = (address, BatchLayout.of(batch))
    count, shared = fill_lowering_arguments(arguments, *where, *sizes, blocks)
    grid, threads = (count, 1, 1), (LOWER_THREADS, 1, 1)
    context.launch(kernels.lower_programs, grid, threads, [arguments[0]], shared)


def launch_order(
    context: StreamContext,
    kernels: LoweringKernels,
    batch: Batch,
    address: int,
    group: int,
    levels: int,
) -> NDArray[np.uint32]:
    """Launch the sorting of groups of programs of a lowered batch at an address.

    Returns page-locked memory to which the device writes the first invalid program of each group,
    or `ALL_VALID`; uint32 [groups]. ``levels`` are the stack levels of each warp of the
    interpreter.
    """
    groups = -(-len(batch) // group)
    first_invalid = context.pinned("first invalid", 4 * groups).view(np.uint32)
    arguments = np.zeros(1, dtype=ORDER_ARGUMENTS)
    where = (address, BatchLayout.of(batch), len(batch), group, levels)
    blocks = fill_order_arguments(arguments, *where, first_invalid.ctypes.data)
    grid, threads = (blocks, 1, 1), (ORDER_THREADS, 1, 1)
    context.launch(kernels.order_programs, grid, threads, [arguments[0]], ORDER_BYTES)
    return first_invalid
