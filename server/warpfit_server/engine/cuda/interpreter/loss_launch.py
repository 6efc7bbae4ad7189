"""The losses of one evaluation, packed and launched by one function of compiled code.

The device needs about 0.1 ms for a batch of usual size; Python code would take several times that.
"""

from __future__ import annotations

import time
from typing import Any, Final, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from warpfit.ir import Batch, Program
from warpfit.request import Evaluation, Timings
from warpfit_server.engine.cuda.interpreter.device_lowering import (
    ALL_VALID,
    LOWER_THREADS,
    LOWERING_ARGUMENTS,
    ORDER_ARGUMENTS,
    ORDER_BYTES,
    ORDER_THREADS,
    check_length,
    fill_lowering_arguments,
    fill_order_arguments,
    raise_invalid_program,
)
from warpfit_server.engine.cuda.interpreter.kernel_arguments import (
    INTERPRETER_ARGUMENTS,
    MAX_LAUNCHES,
    SLOT_ARGUMENTS,
    SLOT_THREADS,
    SUM_THREADS,
    DeviceAddresses,
    InterpreterGeometry,
    InterpreterKernels,
    LaunchConfig,
    configure_launch,
    fill_interpreter_arguments,
    fill_slot_arguments,
    jobs_per_launch,
)
from warpfit_server.engine.cuda.runtime.batch_layout import (
    BatchBounds,
    BatchLayout,
    TokenArrays,
    bound_batch,
    max_slots,
    pack,
)
from warpfit_server.engine.cuda.runtime.command_list import (
    COMMAND_WIDTH,
    LAUNCH,
    RECORD,
    UPLOAD,
    execute,
)
from warpfit_server.engine.cuda.runtime.command_list import append_command as _add
from warpfit_server.engine.cuda.runtime.resident_data import ResidentDataset
from warpfit_server.engine.cuda.runtime.streams import StreamContext
from warpfit_server.engine.interface import Outputs, Steps
from warpfit_server.engine.native import numba_cache

_MAX_COMMANDS: Final = 7 + MAX_LAUNCHES

#: Index in `LaunchBuffers.pointers` of the first pointer of each kernel's arguments.
_LOWER, _ORDER, _SLOTS, _SUMS, _INTERPRETER = 0, 1, 2, 3, 8


class LaunchHandles(NamedTuple):
    """The driver's handles of kernels, stream and events; integers."""

    lower_programs: int
    order_programs: int
    interpret: int
    evaluate_slots: int
    sum_partials: int
    stream: int
    started: int
    computed: int

    @classmethod
    def of(cls, context: StreamContext, kernels: InterpreterKernels) -> LaunchHandles:
        """Look up the handles."""
        return cls(
            lower_programs=kernels.lowering.lower_programs.ptr,
            order_programs=kernels.lowering.order_programs.ptr,
            interpret=kernels.interpret.ptr,
            evaluate_slots=kernels.evaluate_slots.ptr,
            sum_partials=kernels.sum_partials.ptr,
            stream=context.handle,
            started=context.event("started").ptr,
            computed=context.event("computed").ptr,
        )


class LaunchBuffers(NamedTuple):
    """Host memory for kernel arguments, commands and times, which a stream uses again and again."""

    interpreter_arguments: NDArray[np.void]
    """One for each launch of the interpreter."""
    lowering_arguments: NDArray[np.void]
    order_arguments: NDArray[np.void]
    slot_arguments: NDArray[np.void]
    sum_arguments: NDArray[np.int64]
    """Arguments of ``sum_partials``."""
    pointers: NDArray[np.int64]
    """Addresses of the arguments above, in the form that the driver takes; see `_LOWER`."""
    commands: NDArray[np.int64]

    @classmethod
    def allocate(cls) -> LaunchBuffers:
        """Allocate the memory."""
        interpreter = np.zeros(MAX_LAUNCHES, dtype=INTERPRETER_ARGUMENTS)
        lowering = np.zeros(1, dtype=LOWERING_ARGUMENTS)
        order = np.zeros(1, dtype=ORDER_ARGUMENTS)
        slots = np.zeros(1, dtype=SLOT_ARGUMENTS)
        sums = np.zeros(5, dtype=np.int64)
        arguments = [lowering, order, slots, *(sums[index:] for index in range(5))]
        arguments += [interpreter[index:] for index in range(MAX_LAUNCHES)]
        return cls(
            interpreter,
            lowering,
            order,
            slots,
            sums,
            np.array([each.ctypes.data for each in arguments], dtype=np.int64),
            np.zeros((_MAX_COMMANDS, COMMAND_WIDTH), dtype=np.int64),
        )


class LossLaunch(NamedTuple):
    """Everything that the commands of an evaluation depend on."""

    handles: LaunchHandles
    buffers: LaunchBuffers
    geometry: InterpreterGeometry
    addresses: DeviceAddresses
    layout: BatchLayout
    tokens: TokenArrays
    variables: int
    longest: int
    """Tokens of the longest program."""
    flags: NDArray[np.uint8]
    """Flags of each operator, see `source.operator_flags`."""
    staging: NDArray[np.uint8]
    """Page-locked memory for what is uploaded of the batch."""
    first_invalid: NDArray[np.uint32]
    """Page-locked memory for the first invalid program of each group; [programs]."""
    sums: NDArray[np.float64]
    """Page-locked memory for the sums of each job; [jobs]."""


def interpret_losses(
    context: StreamContext,
    kernels: InterpreterKernels,
    geometry: InterpreterGeometry,
    evaluation: Evaluation,
    resident: ResidentDataset,
    outputs: Outputs,
    started: int,
) -> Steps[Timings]:
    """Compute the sums of the row losses of a batch; nothing else uses the stream meanwhile.

    ``started`` is ``time.perf_counter_ns()`` of the evaluation's beginning.

    Raises:
        ProgramError: for the first bad token.
        ResourceExhaustedError: if the batch is too large to encode, or the device has no room.
        CUDADriverError: if the device reports an error.
    """
    assert outputs.losses is not None
    assert evaluation.loss is not None
    batch, layout = evaluation.batch, resident.dataset.layout
    longest, jobs = check_length(batch), len(batch) * batch.vectors
    batch_layout = BatchLayout.of(batch)
    slot_bytes = max_slots(len(batch.codes), len(batch)) * kernels.variant.dtype.itemsize
    addresses = DeviceAddresses(
        batch=context.buffer("batch", batch_layout.end),
        slots=context.buffer("slots", slot_bytes * batch.vectors),
        values=0,
        partials=context.buffer("partials", 8 * jobs * geometry.tiles),
    )
    launch = LossLaunch(
        LaunchHandles.of(context, kernels),
        context.keep(LaunchBuffers.allocate),
        geometry,
        addresses,
        batch_layout,
        TokenArrays.of(batch),
        layout.variables,
        longest,
        kernels.flags,
        staging=context.pinned("batch", batch_layout.uploaded),
        first_invalid=context.pinned("first invalid", 4 * len(batch)).view(np.uint32),
        sums=context.pinned("sums", 8 * jobs).view(np.float64),
    )
    status, groups = launch_losses(context.functions, launch)
    launched = time.perf_counter_ns()
    context.check_executed(status)
    yield from context.reach("computed")
    invalid = int(launch.first_invalid[:groups].min())
    if invalid != ALL_VALID:
        raise_invalid_program(batch, invalid, layout.variables)
    outputs.losses.reshape(-1)[:] = launch.sums
    compute = context.nanoseconds("started", "computed")
    copy_out = max(0, time.perf_counter_ns() - launched - compute)
    return Timings(copy_in=launched - started, compute=compute, copy_out=copy_out)


# ------------------------------------------------------------------------------ compiled by Numba


def load() -> None:
    """Load the compiled functions, or compile them, for the arrays of requests."""
    kinds = (LaunchHandles, InterpreterGeometry, DeviceAddresses, BatchLayout)
    handles, *numbers = [kind(*[0] * len(kind._fields)) for kind in kinds]
    batch = Batch.of([Program.variable(0)])
    BatchLayout.of(batch)
    max_slots(1, 1)
    some_bytes, sums = np.zeros(1, dtype=np.uint8), np.zeros(1)
    fields: Any = (
        *(handles, LaunchBuffers.allocate(), *numbers, TokenArrays.of(batch), 0, 0),
        *(some_bytes, some_bytes, np.zeros(1, dtype=np.uint32), sums),
    )
    launch = LossLaunch(*fields)
    given = np.zeros(1, dtype=np.int64), launch
    launch_losses.compile(tuple(map(numba.typeof, given)))


@numba_cache.njit(nogil=True)  # type: ignore[untyped-decorator]
def launch_losses(functions: NDArray[np.int64], launch: LossLaunch) -> tuple[int, int]:
    """Return the driver's status, and the number of groups in which programs are checked."""
    tokens, geometry, vectors = launch.tokens, launch.geometry, launch.tokens.vectors
    bounds, jobs = bound_batch(tokens, launch.flags), len(launch.sums)
    most = jobs_per_launch(geometry, len(tokens.codes) * vectors, jobs, vectors)
    config = configure_launch(geometry, bounds, most, len(tokens.lengths), vectors)
    pack(tokens, launch.layout, launch.staging)
    count, groups = _add_lowering(launch, config)
    count = _add_interpreter(launch, bounds, config, count)
    count = _add_sums(launch, count)
    return execute(functions, launch.buffers.commands[:count]), groups


@numba_cache.njit(nogil=True)  # type: ignore[untyped-decorator]
def _add_lowering(launch: LossLaunch, config: LaunchConfig) -> tuple[int, int]:
    """Write the commands that upload and lower a batch.

    Returns:
        The number of commands, and of groups of programs.
    """
    buffers, handles, layout = launch.buffers, launch.handles, launch.layout
    commands, stream, batch = buffers.commands, handles.stream, launch.addresses.batch
    pointers, source = np.int64(buffers.pointers.ctypes.data), launch.staging.ctypes.data
    count = _add(commands, 0, (UPLOAD, batch, np.int64(source), layout.uploaded, stream))
    count = _add(commands, count, (RECORD, handles.started, stream))
    programs, vectors = len(launch.tokens.lengths), launch.tokens.vectors
    blocks, shared = fill_lowering_arguments(
        *(buffers.lowering_arguments, batch, layout, programs, vectors),
        *(launch.variables, launch.longest, launch.geometry.lowering_blocks),
    )
    block = (LOWER_THREADS, 1, 1, shared, stream, pointers + 8 * _LOWER)
    count = _add(commands, count, (LAUNCH, handles.lower_programs, blocks, 1, 1, *block))
    levels, address = config.levels - config.scratch, np.int64(launch.first_invalid.ctypes.data)
    groups = fill_order_arguments(
        *(buffers.order_arguments, batch, layout, programs, config.group, levels, address)
    )
    block = (ORDER_THREADS, 1, 1, ORDER_BYTES, stream, pointers + 8 * _ORDER)
    count = _add(commands, count, (LAUNCH, handles.order_programs, groups, 1, 1, *block))
    return count, groups


@numba_cache.njit(nogil=True)  # type: ignore[untyped-decorator]
def _add_interpreter(
    launch: LossLaunch, bounds: BatchBounds, config: LaunchConfig, count: int
) -> int:
    """Write the commands that interpret a lowered batch after ``count`` others."""
    buffers, handles, geometry = launch.buffers, launch.handles, launch.geometry
    addresses, layout, vectors = launch.addresses, launch.layout, launch.tokens.vectors
    stream, pointers = handles.stream, np.int64(buffers.pointers.ctypes.data)
    programs, jobs = len(launch.tokens.lengths), len(launch.sums)
    grid = fill_slot_arguments(buffers.slot_arguments, addresses, layout, bounds, programs, vectors)
    block = (SLOT_THREADS[0], SLOT_THREADS[1], 1, 0, stream, pointers + 8 * _SLOTS)
    count = _add(buffers.commands, count, (LAUNCH, handles.evaluate_slots, *grid, 1, *block))
    for number, first in enumerate(range(0, jobs, config.jobs)):
        part = (first, min(config.jobs, jobs - first))
        partials = addresses.partials + 8 * first * geometry.tiles
        own = DeviceAddresses(addresses.batch, addresses.slots, 0, partials)
        blocks, shared = fill_interpreter_arguments(
            *(buffers.interpreter_arguments[number:], geometry, own, layout, bounds, config),
            *(vectors, part),
        )
        threads = (32 * config.warps, 1, 1, shared, stream, pointers + 8 * (_INTERPRETER + number))
        command = (LAUNCH, handles.interpret, geometry.tiles, blocks, 1, *threads)
        count = _add(buffers.commands, count, command)
    return count


@numba_cache.njit(nogil=True)  # type: ignore[untyped-decorator]
def _add_sums(launch: LossLaunch, count: int) -> int:
    """Write the commands that add up partial sums after others."""
    buffers, handles, geometry = launch.buffers, launch.handles, launch.geometry
    numbers, commands, stream = buffers.sum_arguments, buffers.commands, handles.stream
    numbers[0], numbers[1] = launch.addresses.partials, launch.sums.ctypes.data
    numbers[2], numbers[3] = geometry.tiles, geometry.first_tile
    numbers[4] = geometry.node_levels
    pointer = np.int64(buffers.pointers.ctypes.data) + 8 * _SUMS
    block = (SUM_THREADS, 1, 1, 0, stream, pointer)
    count = _add(commands, count, (LAUNCH, handles.sum_partials, len(launch.sums), 1, 1, *block))
    return _add(commands, count, (RECORD, handles.computed, stream))  # type: ignore[no-any-return]
