"""Lowering of a batch on the device: the kernels' source, what they are told, and bounds.

`lower_programs` takes raw postfix tokens, checks them, and writes the interpreter's instructions;
`order_programs` sorts the programs for the launches of the interpreter, and says which program is
unsound. What a launch of the interpreter must know before they have run is bounded here, so that
nobody has to wait in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit.errors import InternalError, ProgramError, ResourceExhaustedError
from warpfit.ir import Batch
from warpfit.ops import ARITIES, PARAMETER, VARIABLE
from warpfit_server.engine.cuda.interpreter import bytecode
from warpfit_server.engine.cuda.interpreter.bytecode import INDEX_LIMIT, labels
from warpfit_server.engine.cuda.runtime import nvrtc
from warpfit_server.engine.cuda.runtime.batch_layout import Parts
from warpfit_server.engine.cuda.runtime.device import CudaDevice
from warpfit_server.engine.cuda.runtime.streams import StreamContext
from warpfit_server.engine.native import numba_cache

#: Most tokens of a program. The stack levels that more of them may need do not fit the shared
#: memory that every device grants.
LONGEST: Final = 1 << 18
#: What ``order_programs`` says if every program of a group is sound.
NONE: Final = 0xFFFFFFFF
#: Field by field the structs of lowering.cu.
LOWER_ARGUMENTS: Final = np.dtype(
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
#: Most tokens that a block of ``lower_programs`` keeps in shared memory, and their size.
MOST_ROOM: Final = 4096
NODE_BYTES: Final = 8
#: Blocks of ``lower_programs`` that are worth sharing a small batch out to: the fewer programs a
#: warp has, the fewer different branches it takes.
BLOCKS_A_MULTIPROCESSOR: Final = 8
#: Bits of a row of the operator table, beside the label.
_ARITY_SHIFT: Final = 10
_IS_KNOWN, _IS_VARIABLE, _IS_PARAMETER = 1 << 12, 1 << 13, 1 << 14
#: Operands that wait for their code to be written: at most one for each stack level.
_MOST_PENDING: Final = 32
_OPTIONS: Final = ("--std=c++17",)
#: Numbers of bytecode.py that lowering.cu knows by the same names.
_SHARED_NAMES: Final = (
    *("LOAD_VARIABLE", "LOAD_SLOT", "PUSH", "INDEX_SHIFT", "SLOT_LEVELS"),
    *("FROM_VARIABLE", "FROM_SLOT", "FROM_STACK", "NEED_SHIFT", "NEED_MASK"),
    *("UNSOUND", "DEEP", "SKIPPED"),
)
_compiled = numba_cache.njit(nogil=True)


@dataclass(frozen=True, slots=True)
class LoweringKernels:
    """The loaded kernels."""

    lower_programs: Any
    order_programs: Any


def lowering_source() -> str:
    """Complete CUDA C++ source of the lowering kernels."""
    text = resources.files(__package__).joinpath("lowering.cu").read_text()
    numbers = {name: getattr(bytecode, name) for name in _SHARED_NAMES}
    numbers |= {"LABEL_MASK": (1 << bytecode.LABEL_BITS) - 1, "END_LABEL": bytecode.END}
    numbers |= {"ARITY_SHIFT": _ARITY_SHIFT, "IS_KNOWN": _IS_KNOWN}
    numbers |= {"IS_VARIABLE": _IS_VARIABLE, "IS_PARAMETER": _IS_PARAMETER, "NONE": NONE}
    numbers |= {"LOWER_THREADS": LOWER_THREADS, "ORDER_THREADS": ORDER_THREADS}
    numbers |= {"MOST_PENDING": _MOST_PENDING}
    defines = [f"#define {name} {number}u\n" for name, number in numbers.items()]
    rows = ", ".join(f"{row}u" for row in _operator_table().tolist())
    table = f"__device__ const unsigned OPERATOR_TABLE[256] = {{{rows}}};\n"
    return "".join(defines) + table + text


def lowering_cubin(architecture: int) -> bytes:
    """Compile for compute capability ``architecture``; needs no GPU."""
    return nvrtc.to_cubin(lowering_source(), architecture, _OPTIONS)


def lowering_key(architecture: int) -> list[str]:
    """Everything that shapes the machine code."""
    return [nvrtc.version(), str(architecture), *_OPTIONS, lowering_source()]


def _operator_table() -> NDArray[np.uint32]:
    """Label, arity and flags by token code; uint32 [256], 0 for what is no token code."""
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
    if longest > LONGEST:
        raise ResourceExhaustedError(
            f"a program of {longest} tokens is longer than the interpreter can encode",
            "PROGRAM_TOO_LONG",
            "Split the program",
            needed=longest,
            available=LONGEST,
        )
    return longest


def refuse(batch: Batch, program: int, variables: int) -> None:
    """Say what is wrong with a program that the device found unsound.

    Args:
        batch: that was lowered.
        program: index of the program.
        variables: of the data set.

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
    raise InternalError("two checks of a batch disagree", "ENGINE_FAILURE", "Report it as a bug")


class Launch(NamedTuple):
    """Grid and shared memory of a launch of ``lower_programs``; integers."""

    blocks: int
    shared: int
    """Bytes."""


@_compiled  # type: ignore[untyped-decorator]
def tell_lower(
    told: NDArray[np.void],
    batch: int,
    parts: Parts,
    programs: int,
    vectors: int,
    variables: int,
    longest: int,
    blocks: int,
) -> Launch:
    """Write the arguments of ``lower_programs``; return its launch.

    Args:
        told: to fill; `LOWER_ARGUMENTS` [1].
        batch: device address of the batch.
        parts: where its parts are.
        programs: how many.
        vectors: parameter vectors.
        variables: of the data set.
        longest: tokens of the longest program.
        blocks: that a small batch is shared out to.

    """
    share = min(LOWER_THREADS, -(-programs // blocks))
    room = min(MOST_ROOM, share * longest)
    one = told[0]
    one.codes = batch + parts.codes
    one.values = batch + parts.values
    one.starts = batch + parts.starts
    one.parameter_starts = batch + parts.parameter_starts
    one.instructions = batch + parts.instructions
    one.programs = batch + parts.programs
    one.slots = batch + parts.slots
    one.scratch = batch + parts.scratch
    one.variables = min(variables, INDEX_LIMIT)
    one.vectors = vectors
    one.count = programs
    one.share = share
    one.room = room
    return Launch(-(-programs // share), NODE_BYTES * room)


@_compiled  # type: ignore[untyped-decorator]
def tell_order(
    told: NDArray[np.void],
    batch: int,
    parts: Parts,
    programs: int,
    group: int,
    levels: int,
    unsound: int,
) -> int:
    """Write the arguments of ``order_programs``; return its blocks, one for each group.

    Args:
        told: to fill; `ORDER_ARGUMENTS` [1].
        batch: device address of the batch.
        parts: where its parts are.
        programs: how many.
        group: programs that are sorted together.
        levels: stack levels that a warp of the interpreter has.
        unsound: address of page-locked host memory; uint32 [groups].

    """
    one = told[0]
    one.programs = batch + parts.programs
    one.order = batch + parts.order
    one.unsound = unsound
    one.count = programs
    one.group = group
    one.levels = levels
    return -(-programs // group)


def load_lowering(device: CudaDevice) -> LoweringKernels:
    """Load the kernels; the first start on a machine compiles them."""
    architecture = device.architecture
    module = device.load(lowering_key(architecture), lambda: lowering_cubin(architecture))
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
    """Launch the lowering of a batch that lies on the device.

    Args:
        context: the stream.
        kernels: of the device.
        batch: that was uploaded.
        address: where to, laid out as `Parts.of` the batch.
        variables: of the data set.
        blocks: that a small batch is shared out to.

    """
    told = np.zeros(1, dtype=LOWER_ARGUMENTS)
    sizes = (len(batch), batch.vectors, variables, int(batch.lengths.max()))
    launch = tell_lower(told, address, Parts.of(batch), *sizes, blocks)
    context.launch(
        kernels.lower_programs,
        (launch.blocks, 1, 1),
        (LOWER_THREADS, 1, 1),
        [told[0]],
        launch.shared,
    )


def launch_order(
    context: StreamContext,
    kernels: LoweringKernels,
    batch: Batch,
    address: int,
    group: int,
    levels: int,
) -> NDArray[np.uint32]:
    """Launch the sorting of a lowered batch.

    Args:
        context: the stream.
        kernels: of the device.
        batch: that is being lowered.
        address: where it lies on the device.
        group: programs that are sorted together.
        levels: stack levels that a warp of the interpreter has.

    Returns:
        Where the first unsound program of each group will be written, or `NONE`; uint32 [groups].

    """
    groups = -(-len(batch) // group)
    unsound = context.pinned("unsound", 4 * groups).view(np.uint32)
    told = np.zeros(1, dtype=ORDER_ARGUMENTS)
    where = (address, Parts.of(batch), len(batch), group, levels, unsound.ctypes.data)
    blocks = tell_order(told, *where)
    grid, block = (blocks, 1, 1), (ORDER_THREADS, 1, 1)
    context.launch(kernels.order_programs, grid, block, [told[0]], ORDER_BYTES)
    return unsound
