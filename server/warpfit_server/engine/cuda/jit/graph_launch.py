"""The losses of a repeated batch by one function of compiled code: fill inputs, launch, wait.

As in `interpreter.loss_launch`, Python's lock is released once, before the inputs are filled, and
taken back when the losses are there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from warpfit.ir import Batch, Program
from warpfit_server.engine.cuda.jit.graph import CapturedGraph, GraphBuffers
from warpfit_server.engine.cuda.jit.shapes import InputSources, fill_inputs
from warpfit_server.engine.cuda.runtime import command_list
from warpfit_server.engine.cuda.runtime.batch_layout import TokenArrays
from warpfit_server.engine.cuda.runtime.streams import StreamContext
from warpfit_server.engine.native import numba_cache


class GraphHandles(NamedTuple):
    """The driver's handles of graph, stream and events; integers."""

    graph: int
    stream: int
    started: int
    computed: int

    @classmethod
    def of(cls, context: StreamContext, graph: CapturedGraph) -> GraphHandles:
        """Look up the handles."""
        started, computed = context.event("started"), context.event("computed")
        return cls(graph.handle, context.handle, started.ptr, computed.ptr)


def replay_losses(
    context: StreamContext,
    graph: CapturedGraph,
    sources: InputSources,
    batch: Batch,
    arguments: Mapping[str, int],
    losses: NDArray[np.float64],
    started: int,
) -> tuple[int, int, int]:
    """Compute the sums of the row losses of a batch; other sums are left in ``graph.sums``.

    Nothing else uses stream and graph meanwhile. Returns the nanoseconds of the copy in, of the
    device, and of the copy out; ``started`` is ``time.perf_counter_ns()`` of the beginning.

    Raises:
        CUDADriverError: if the device reports an error.
    """
    graph.set_arguments(arguments)
    graph.place_partials(context, arguments["block_count"])
    status = launch_losses(
        *(context.functions, GraphHandles.of(context, graph), graph.buffers),
        *(TokenArrays.of(batch), sources, graph.inputs, graph.sums, losses),
    )
    context.check_executed(status)
    return command_list.stage_times(started, graph.buffers.clock, graph.buffers.elapsed)


# ------------------------------------------------------------------------------ compiled by Numba


def load() -> None:
    """Load the compiled functions, or compile them, for the arrays of requests."""
    indices, numbers = np.zeros(1, dtype=np.int64), np.zeros(1)
    batch = Batch.of([Program.variable(0)])
    sources = InputSources(indices, indices, np.zeros(1, dtype=np.bool_))
    for dtype in (np.float32, np.float64):
        given = (
            *(indices, GraphHandles(0, 0, 0, 0), GraphBuffers.allocate(indices)),
            *(TokenArrays.of(batch), sources, np.zeros((1, 1), dtype), numbers, numbers),
        )
        launch_losses.compile(tuple(map(numba.typeof, given)))


@numba_cache.njit(nogil=True)  # type: ignore[untyped-decorator]
def launch_losses(
    functions: NDArray[np.int64],
    handles: GraphHandles,
    buffers: GraphBuffers,
    tokens: TokenArrays,
    sources: InputSources,
    inputs: NDArray[Any],
    sums: NDArray[np.float64],
    losses: NDArray[np.float64],
) -> int:
    """Fill the inputs, launch the graph and copy the losses; return the driver's status."""
    fill_inputs(tokens.values, tokens.parameter_counts, tokens.parameters, sources, inputs)
    status = command_list.execute(functions, buffers.commands[: _write_commands(handles, buffers)])
    if status != 0:
        return int(status)
    for program in range(len(buffers.sum_starts) - 1):
        for vector in range(tokens.vectors):
            place = buffers.sum_starts[program] * tokens.vectors + vector
            losses[program * tokens.vectors + vector] = sums[place]
    return int(status)


@numba_cache.njit(nogil=True)  # type: ignore[untyped-decorator]
def _write_commands(handles: GraphHandles, buffers: GraphBuffers) -> int:
    """Write the commands that launch the graph and wait for it; return how many there are."""
    commands, clock, stream = buffers.commands, np.int64(buffers.clock.ctypes.data), handles.stream
    events = (handles.started, handles.computed)
    elapsed = np.int64(buffers.elapsed.ctypes.data)
    count = command_list.append_command(commands, 0, (command_list.RECORD, handles.started, stream))
    count = command_list.append_command(
        commands, count, (command_list.LAUNCH_GRAPH, handles.graph, stream)
    )
    count = command_list.append_command(
        commands, count, (command_list.RECORD, handles.computed, stream)
    )
    count = command_list.append_command(commands, count, (command_list.NOW, clock))
    count = command_list.append_command(commands, count, (command_list.SYNCHRONIZE, stream))
    count = command_list.append_command(commands, count, (command_list.ELAPSED, elapsed, *events))
    return int(command_list.append_command(commands, count, (command_list.NOW, clock + 16)))
