"""The interpreter of programs with derivatives, compiled by Numba.

The simple form, for one instance (program and parameter vector):

    run the prologue once, on invariants
    for each block of rows:
        run the instructions: result, derivative s = dl/df of the row loss, columns c1, c2, ...
        loss += row losses of the result (`row_loss`)
        sums[k] += sum(w s ck);  products[i, j] += sum(w ci cj)
    for each entry (column k, parameter p, factor d):
        gradient[p] += d sums[k]
    for each two entries:
        curvature[p, q] += d1 d2 products[k1, k2]

All sums are float64: over the lanes of a block, then over blocks in the order of `sum_tree`.
The bits of the loss do not depend on what else is summed, because the tree of sums is fixed.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numba import carray

from warpfit_server.engine.cpu import statistics
from warpfit_server.engine.cpu.codegen.kernels import LARGEST_TILE
from warpfit_server.engine.cpu.interpreter import (
    INPUT_ARRAYS,
    INVARIANT_WIDTH,
    Inputs,
    Memory,
    address_of,
    aligned,
    inputs_of,
    invariants_of,
    new_memory,
    run_body,
    run_prologue,
)
from warpfit_server.engine.cpu.row_loss import (
    begin_block,
    begin_row_loss,
    block_loss,
    row_loss_bytes,
)
from warpfit_server.engine.lowering.lowered import NONE
from warpfit_server.engine.native import numba_cache
from warpfit_server.engine.native.arguments import (
    CANCEL_FLAG,
    CANCELLED,
    FAILED,
    FINISHED,
    OWN_ARRAYS,
    SPANS,
    chunk_ranges,
    floats,
    octets,
    pointer32,
    pointer64,
    ranges,
    words,
)
from warpfit_server.engine.native.intrinsics import call_kernel, inlined
from warpfit_server.engine.sum_tree import carry, node_sums

# Arrays of an argument block after the inputs.
_ROW_LOSS: Final = OWN_ARRAYS + INPUT_ARRAYS
_DOTS: Final = _ROW_LOSS + INPUT_ARRAYS
_STARTS, _NODES, _NODE_RANGE, _TOTALS = range(_DOTS + 1, _DOTS + 5)
_GRADIENTS, _VARIABLE_GRADIENTS, _CURVATURES, _TRIANGLES = range(_TOTALS + 1, _TOTALS + 5)
#: Sums that each instance begins with: of the row losses and of the values.
LOSS_SUM, VALUE_SUM, COLUMN_SUMS = range(3)


class ChunkSums(NamedTuple):
    """Sums of one chunk, in compiled code; `interpreter` says what an instance is."""

    dots: Any
    """Addresses of kernels, in the order of `kernels.DOT_SHAPES`."""
    starts: Any
    """First sum of each instance of the batch, and the end of the last one's."""
    sums: Any
    """[levels, sums of the chunk]; of each instance those of losses and values, one for each
    column and, if requested, products of all columns, [columns, columns], of which the lower
    triangle is valid."""
    reductions: Any
    """[instances of the batch, REDUCTIONS]."""
    moments: Any
    """[levels, instances of the chunk, MOMENTS]."""


@numba_cache.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def linearise_chunk(block: int, chunk: int) -> int:
    """Run a range of instances over a span of rows; see `arguments`.

    The nodes of an argument block, [spans, numbers], are the sums of all instances, their
    reductions and their moments.
    """
    instances, rows, span = chunk_ranges(block, chunk)
    inputs, starts = inputs_of(block, OWN_ARRAYS), words(block, _STARTS)
    context = inputs.context[0]
    node = floats(block, _NODES).reshape((len(ranges(block, SPANS)), -1))[span]
    first_moment = _first_moment(context, starts)
    found = node[starts[instances.start] : starts[instances.stop]]
    found_moments = node[first_moment:].reshape((-1, statistics.MOMENTS))
    try:
        count = (instances.stop - instances.start) * (context.wants_moments != 0)
        sums = ChunkSums(
            words(block, _DOTS), starts, np.zeros((context.levels, len(found))),
            node[starts[-1] : first_moment].reshape((-1, statistics.REDUCTIONS)),
            np.zeros((context.levels, count, statistics.MOMENTS)),
        )  # fmt: skip
        row_loss = inputs_of(block, _ROW_LOSS)
        memory = new_memory(inputs, instances, row_loss_bytes(context, row_loss))
        cancelled = octets(block, CANCEL_FLAG)
        finished = _run(inputs, row_loss, sums, memory, instances, rows, cancelled)
        found[:] = node_sums(sums.sums)
        if count:
            found_moments[instances.start : instances.stop] = statistics.node_moments(sums.moments)
    except Exception:  # compiled code tells exceptions apart no further: memory is short
        return FAILED
    return FINISHED if finished else CANCELLED


@inlined
def _first_moment(context: Any, starts: Any) -> int:
    """Return the index of the first moment among the numbers of a node."""
    reductions = context.instances if context.wants_reductions else 0
    return int(starts[-1] + reductions * statistics.REDUCTIONS)


@inlined
def _run(
    inputs: Inputs, row_loss: Inputs, sums: ChunkSums, memory: Memory, instances: Any, rows: Any,
    cancelled: Any,
) -> bool:  # fmt: skip
    """Run instances over rows; return whether they were finished."""
    context, loss_memory = inputs.context[0], memory.spare + memory.slot_bytes
    begin_row_loss(context, row_loss, loss_memory)
    columns = 1
    for instance in range(instances.start, instances.stop):
        run_prologue(inputs, instance, invariants_of(memory, instance))
        columns = max(columns, inputs.lowered.headers[instance // context.vectors].columns)
    addresses = np.empty(columns, dtype=np.int64)
    row = rows.start
    while row < rows.stop:
        block = row // context.block_rows
        count = min((block + 1) * context.block_rows, rows.stop) - row
        offset = row * context.item_bytes
        begin_block(context, row_loss, loss_memory, offset, count)
        for instance in range(instances.start, instances.stop):
            if cancelled[0]:
                return False
            bases, pitches = run_body(inputs, memory, instance, row, count)
            header = inputs.lowered.headers[instance // context.vectors]
            for k in range(header.columns):
                location = inputs.lowered.columns[header.first_column + k]
                addresses[k] = address_of(location, bases, pitches)
            derivative = address_of(max(header.loss_derivative, 0), bases, pitches)
            first = sums.starts[instance] - sums.starts[instances.start]
            own = sums.sums[0, first : first + sums.starts[instance + 1] - sums.starts[instance]]
            if context.wants_losses:
                own[LOSS_SUM] += block_loss(context, row_loss, loss_memory, bases[3], offset, count)
            _add_sums(
                inputs, sums.dots, own[COLUMN_SUMS:], instance, addresses, derivative, offset, count
            )
            if context.jacobian:
                invariants = invariants_of(memory, instance)
                _store_jacobian(inputs, instance, invariants, addresses, row, count)
            # A call costs a microsecond, also if it finds nothing to do.
            if context.wants_reductions or context.wants_moments:
                is_first = row == rows.start
                place = instance - instances.start
                own[VALUE_SUM] += _add_statistics(
                    context, sums, instance, place, bases[3], row, count, is_first
                )
        carry(sums.sums, block + 1)
        statistics.carry_moments(sums.moments, block + 1)
        row += count
    return True


@inlined
def _add_statistics(
    context: Any, sums: ChunkSums, instance: int, place: int, result: int, row: int, count: int,
    is_first: bool,
) -> float:  # fmt: skip
    """Add a block of values to the reductions and moments that are requested; return their sum."""
    offset = row * context.item_bytes
    weights = context.weights + offset if context.weights else 0
    total = 0.0
    if context.wants_reductions:
        own = sums.reductions[instance]
        total = statistics.add_reductions(result, context.item_bytes, count, own, is_first)
    if context.wants_moments:
        statistics.add_moments(
            result, context.target + offset, weights, context.item_bytes, count,
            sums.moments[0, place],
        )  # fmt: skip
    return total


@inlined
def _add_sums(
    inputs: Inputs, dots: Any, own: Any, instance: int, addresses: Any, derivative: int,
    offset: int, count: int,
) -> None:  # fmt: skip
    """Add a block's sums over columns and products of columns."""
    context = inputs.context[0]
    columns = inputs.lowered.headers[instance // context.vectors].columns
    weights = context.weights + offset if context.weights else 0
    left = np.empty(1, dtype=np.int64)
    left[0] = derivative
    if context.wants_gradients:
        loss_weights = weights if context.weighs_loss else 0
        for k in range(0, columns, LARGEST_TILE):
            width = min(columns - k, LARGEST_TILE)
            _add_tile(dots, own, k, 1, left, 0, 1, addresses, k, width, loss_weights, count)
    if context.wants_curvatures:
        for i in range(0, columns, LARGEST_TILE):
            height = min(columns - i, LARGEST_TILE)
            for j in range(0, i + 1, LARGEST_TILE):
                width = min(columns - j, LARGEST_TILE)
                first = columns + i * columns + j
                _add_tile(
                    dots, own, first, columns, addresses, i, height, addresses, j, width,
                    weights, count,
                )  # fmt: skip
    left[0] = addresses[0]  # both arrays live until here


@inlined
def _add_tile(
    dots: Any, own: Any, first: int, pitch: int, left: Any, i: int, height: int, right: Any,
    j: int, width: int, weights: int, count: int,
) -> None:  # fmt: skip
    """Add products of ``height`` columns from ``left[i]`` and ``width`` from ``right[j]``."""
    shape = (height - 1) * LARGEST_TILE + width - 1
    if weights:
        shape += LARGEST_TILE * LARGEST_TILE
    arguments = (
        int(own.ctypes.data + 8 * first), pitch, int(left.ctypes.data + 8 * i),
        int(right.ctypes.data + 8 * j), weights, count,
    )  # fmt: skip
    call_kernel(dots[shape], arguments)


@inlined
def _store_jacobian(
    inputs: Inputs, instance: int, invariants: int, addresses: Any, row: int, count: int
) -> None:
    """Store a block of the derivatives by each parameter."""
    context, lowered = inputs.context[0], inputs.lowered
    program, vector = instance // context.vectors, instance % context.vectors
    start = inputs.parameter_starts[program]
    length = (inputs.parameter_starts[program + 1] - start) // context.vectors
    pitch = (context.row_stop - context.row_start) * context.item_bytes
    first = context.jacobian + (start + vector * length) * pitch
    first += (row - context.row_start) * context.item_bytes
    for parameter in range(length):
        if context.item_bytes == 4:
            carray(pointer32(first + parameter * pitch), count)[:] = np.float32(0.0)
        else:
            carray(pointer64(first + parameter * pitch), count)[:] = 0.0
    header = lowered.headers[program]
    for index in range(header.first_entry, header.first_entry + header.entries):
        entry = lowered.entries[index]
        factor = _read_factor(entry.factor, invariants, context.item_bytes)
        if entry.leaf < 0 or factor == 0.0:
            continue
        target, source = first + entry.leaf * pitch, addresses[entry.column]
        if context.item_bytes == 4:
            _add_scaled(
                carray(pointer32(target), count), carray(pointer32(source), count),
                np.float32(factor),
            )  # fmt: skip
        else:
            _add_scaled(carray(pointer64(target), count), carray(pointer64(source), count), factor)


@inlined
def _add_scaled(target: Any, source: Any, factor: Any) -> None:
    for row in range(len(target)):
        if source[row] != 0:
            target[row] += factor * source[row]


@inlined
def _read_factor(invariant: int, invariants: int, item_bytes: int) -> float:
    """Return the factor of an entry from an instance's invariants at an address."""
    if invariant == NONE:
        return 1.0
    if item_bytes == 4:
        return np.float64(carray(pointer32(invariants + invariant * INVARIANT_WIDTH), 1)[0])
    return float(carray(pointer64(invariants + invariant * INVARIANT_WIDTH), 1)[0])


@numba_cache.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def combine_chunk(block: int, chunk: int) -> int:
    """Turn what `linearise_chunk` has summed up of a range of instances into what is requested.

    Gradients, variable gradients, [instances, variables], and curvatures are as in `Outputs` and
    `Linearisation`, and are added to; each may be empty. The moments of all nodes are merged into
    those of the first one.
    """
    instances, _, _ = chunk_ranges(block, chunk)
    inputs, starts = inputs_of(block, OWN_ARRAYS), words(block, _STARTS)
    node_range = words(block, _NODE_RANGE)
    moments = floats(block, _NODES).reshape((node_range[1], -1))
    moments = moments[:, _first_moment(inputs.context[0], starts) :]
    start, stop = statistics.MOMENTS * instances.start, statistics.MOMENTS * instances.stop
    statistics.merge_spans(moments[:, start:stop], node_range[0])
    try:
        _combine(
            inputs, instances, starts, floats(block, _TOTALS),
            floats(block, _GRADIENTS), floats(block, _VARIABLE_GRADIENTS),
            floats(block, _CURVATURES), words(block, _TRIANGLES),
        )  # fmt: skip
    except Exception:  # compiled code tells exceptions apart no further: memory is short
        return FAILED
    return FINISHED


@inlined
def _combine(
    inputs: Inputs, instances: Any, starts: Any, totals: Any, gradients: Any,
    variable_gradients: Any, curvatures: Any, triangles: Any,
) -> None:  # fmt: skip
    context, lowered = inputs.context[0], inputs.lowered
    most = 0
    for instance in range(instances.start, instances.stop):
        most = max(most, lowered.headers[instance // context.vectors].invariants)
    array = np.empty((most + 1) * INVARIANT_WIDTH, dtype=np.uint8)
    invariants = aligned(array)
    variables = len(variable_gradients) // context.instances
    for instance in range(instances.start, instances.stop):
        program, vector = instance // context.vectors, instance % context.vectors
        first = inputs.parameter_starts[program]
        length = (inputs.parameter_starts[program + 1] - first) // context.vectors
        first += vector * length
        run_prologue(inputs, instance, invariants)
        header = lowered.headers[program]
        entries = lowered.entries[header.first_entry : header.first_entry + header.entries]
        own = totals[starts[instance] + COLUMN_SUMS : starts[instance + 1]]
        if context.wants_gradients:
            mine = variable_gradients[instance * variables : (instance + 1) * variables]
            _add_gradient(context, entries, invariants, own, gradients[first:], mine)
        if context.wants_curvatures:
            products, triangle = own[header.columns :], curvatures[triangles[instance] :]
            _add_curvature(context, entries, invariants, products, header.columns, triangle)
    array[0] = 0  # it lives until here


@inlined
def _add_gradient(
    context: Any, entries: Any, invariants: int, own: Any, gradients: Any, variable_gradients: Any
) -> None:
    """Add an instance's sums over columns, times the factors of its entries."""
    scale = 2.0 if context.is_squares else 1.0
    for entry in entries:
        factor = _read_factor(entry.factor, invariants, context.item_bytes)
        total = own[entry.column]
        if factor == 0.0 or total == 0.0:
            continue
        term = scale * factor * total
        if entry.leaf >= 0 and len(gradients):
            gradients[entry.leaf] += term
        elif entry.leaf < 0 and len(variable_gradients):
            variable_gradients[-1 - entry.leaf] += term


@inlined
def _add_curvature(
    context: Any, entries: Any, invariants: int, products: Any, columns: int, triangle: Any
) -> None:
    """Add an instance's products of columns, times the factors of two entries each."""
    for first in entries:
        p = first.leaf
        a = _read_factor(first.factor, invariants, context.item_bytes)
        if p < 0 or a == 0.0:
            continue
        for second in entries:
            q = second.leaf
            if q < 0 or q > p:
                continue
            b = _read_factor(second.factor, invariants, context.item_bytes)
            i, j = first.column, second.column
            product = products[max(i, j) * columns + min(i, j)]
            if b != 0.0 and product != 0.0:
                triangle[p * (p + 1) // 2 + q] += a * b * product
