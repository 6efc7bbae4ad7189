"""The interpreter of programs with derivatives, compiled by Numba.

The simple form, for one cell (program and parameter vector):

    run the prologue once, on scalars
    for each block of rows:
        run the instructions: result, slope s = dl/df of the row loss, columns c1, c2, ...
        loss += row losses of the result (`row_loss`)
        sums[k] += sum(w s ck);  products[i, j] += sum(w ci cj)
    for each entry (column k, parameter p, factor d):
        gradient[p] += d sums[k]
    for each two entries:
        curvature[p, q] += d1 d2 products[k1, k2]

All sums are float64: over the lanes of a block, then over the blocks of a span, then over spans.
The loss has spans of its own, the same whatever else is summed, so that its bits are the same, too.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import carray, types

from warpfit_server.engine.autodiff.backward_sweep import (
    COLUMNS_START,
    ENTRY_COLUMN,
    ENTRY_FACTOR,
    ENTRY_LEAF,
)
from warpfit_server.engine.autodiff.differentiate import (
    COLUMNS_END,
    ENTRIES_END,
    ENTRIES_START,
    SLOPE_PLACE,
    Differentiated,
    differentiated_of,
)
from warpfit_server.engine.cpu.codegen.dot_products import LARGEST_TILE
from warpfit_server.engine.cpu.interpreter import (
    BLOCK,
    CANCEL_FLAG,
    CELLS,
    INSTRUCTION_TABLE,
    ITEMSIZE,
    JOB,
    JOB_ENTRIES,
    KERNELS,
    PARAMETER_STARTS,
    PARAMETERS,
    ROW_START,
    ROW_STOP,
    SCALAR_WIDTH,
    SPANS,
    TARGET_ROWS,
    VARIABLE_PITCH,
    VARIABLES,
    VECTORS,
    WEIGHT_ROWS,
    measure,
    prologue,
    result_address,
    run_instructions,
)
from warpfit_server.engine.cpu.row_loss import (
    ROW_LOSS_ARRAYS,
    begin_block,
    begin_row_loss,
    block_loss,
    row_loss_bytes,
    row_loss_of,
)
from warpfit_server.engine.cpu.statistics import (
    MOMENTS,
    REDUCTIONS,
    add_moments,
    add_reductions,
    merge_spans,
)
from warpfit_server.engine.lowering.schedule import (
    INSTRUCTIONS_END,
    PROLOGUE_END,
    inlined,
)
from warpfit_server.engine.native.intrinsics import compiled_intrinsic
from warpfit_server.engine.native.records import (
    CANCELLED,
    FAILED,
    FINISHED,
    numbers,
    octets,
    part,
    pointer32,
    pointer64,
    table,
    words,
)

#: More entries of the ``job`` array: what is wanted, and where it goes.
WANTS_LOSS: Final = JOB_ENTRIES
WANTS_SLOPES: Final = JOB_ENTRIES + 1
WANTS_PRODUCTS: Final = JOB_ENTRIES + 2
IS_SQUARES: Final = JOB_ENTRIES + 3
"""The slope's place holds half of the slope of a square."""
WEIGHS_LOSS: Final = JOB_ENTRIES + 4
"""Each row loss counts w times."""
JACOBIAN: Final = JOB_ENTRIES + 5
WANTS_REDUCTIONS: Final = JOB_ENTRIES + 6
WANTS_MOMENTS: Final = JOB_ENTRIES + 7
LOSS_SPAN: Final = JOB_ENTRIES + 8
"""Rows of a span of the loss."""
LOSS_CELLS: Final = JOB_ENTRIES + 9
"""Cells of the batch."""
LONG_JOB_ENTRIES: Final = JOB_ENTRIES + 10


@compiled_intrinsic
def _call_dots(
    typing_context: Any, address: Any, sums: Any, pitch: Any, left: Any, right: Any, w: Any, n: Any
) -> Any:
    """Call the kernel at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 6)
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), generate


#: Arrays of a record after those of `Differentiated`, in order.
_DOTS: Final = INSTRUCTION_TABLE + len(Differentiated._fields)
_STARTS, _SUMS, _REDUCTIONS, _MOMENTS = _DOTS + 1, _DOTS + 2, _DOTS + 3, _DOTS + 4
_ROW_LOSS: Final = _DOTS + 5
_LOSSES: Final = _ROW_LOSS + ROW_LOSS_ARRAYS


def linearise_piece(record: int, piece: int) -> int:
    """Run a piece; see `records`.

    The first arrays of a record are as for `interpreter.interpret_piece`, in ``Lowered``'s place
    `Differentiated`. Sums, reductions and moments have one more dimension, the first, for spans;
    they are as for `_linearise` otherwise, as the others.
    """
    cells, rows, span = part(table(record, CELLS, 2), table(record, SPANS, 2), piece)
    spans = len(table(record, SPANS, 2))
    try:
        finished = _linearise(
            words(record, JOB), words(record, KERNELS), words(record, _DOTS),
            differentiated_of(record, INSTRUCTION_TABLE), numbers(record, PARAMETERS),
            words(record, PARAMETER_STARTS), cells, rows,
            octets(record, CANCEL_FLAG), words(record, _STARTS),
            _of_span(numbers(record, _SUMS), spans, span),
            _rows_of_span(numbers(record, _REDUCTIONS), spans, span, REDUCTIONS),
            _rows_of_span(numbers(record, _MOMENTS), spans, span, MOMENTS),
            row_loss_of(record, _ROW_LOSS), numbers(record, _LOSSES),
        )  # fmt: skip
    except Exception:  # compiled code tells exceptions apart no further: there is no memory
        return FAILED
    return FINISHED if finished else CANCELLED


@inlined
def _of_span(values: Any, spans: int, span: int) -> Any:
    count = len(values) // spans
    return values[span * count : (span + 1) * count]


@inlined
def _rows_of_span(values: Any, spans: int, span: int, columns: int) -> Any:
    own = _of_span(values, spans, span)
    return own.reshape((len(own) // columns, columns))


@inlined
def _linearise(
    job: Any, kernels: Any, dots: Any, lowered: Any, parameters: Any, parameter_starts: Any,
    cells: Any, rows: Any, cancelled: Any, starts: Any, sums: Any, reductions: Any, moments: Any,
    row_loss: Any, losses: Any,
) -> bool:  # fmt: skip
    """Run cells over rows; return whether they were finished.

    ``job``, ``parameters``, ``cells``, ``rows`` and ``cancelled`` are as for
    `interpreter._interpret`, ``job`` with LONG_JOB_ENTRIES. ``kernels`` are addresses by code of
    instruction, ``dots`` by `DOT_SHAPES`. ``lowered`` is `Differentiated`. To ``sums``, from
    ``starts[cell]``, are added a sum for each column and, if wanted, the products of all columns,
    [columns, columns], of which the lower triangle is valid. ``reductions`` and ``moments`` are
    [cells, REDUCTIONS] and [cells, MOMENTS]. ``row_loss`` is as `row_loss_of` gives it; to
    ``losses``, [spans of the loss, cells], are added the losses.
    """
    scalar_starts, slots = measure(lowered.summaries, cells[0], cells[1], job[VECTORS])
    slot_bytes = job[BLOCK] * job[ITEMSIZE]
    scalar_bytes = (scalar_starts[-1] + 1) * SCALAR_WIDTH
    loss_bytes = row_loss_bytes(job, row_loss) + SCALAR_WIDTH
    memory = np.empty(scalar_bytes + (slots + 1) * slot_bytes + loss_bytes, dtype=np.uint8)
    scalars = (memory.ctypes.data + SCALAR_WIDTH - 1) // SCALAR_WIDTH * SCALAR_WIDTH
    slot_memory = scalars + scalar_starts[-1] * SCALAR_WIDTH
    spare = slot_memory + slots * slot_bytes
    places = (scalars, slot_memory, spare, spare + slot_bytes)
    finished = _run_cells(
        job, kernels, dots, lowered, parameters, parameter_starts, cells, rows, cancelled, starts,
        sums, reductions, moments, row_loss, losses, scalar_starts, places, slot_bytes,
    )  # fmt: skip
    # Compiled code frees an array after its last use, and addresses do not count as one.
    return finished and memory.size > 0


@inlined
def _run_cells(
    job: Any, kernels: Any, dots: Any, lowered: Any, parameters: Any, parameter_starts: Any,
    cells: Any, rows: Any, cancelled: Any, starts: Any, sums: Any, reductions: Any, moments: Any,
    row_loss: Any, losses: Any, scalar_starts: Any, places: Any, slot_bytes: int,
) -> bool:  # fmt: skip
    """Run cells over rows with memory at ``places``: scalars, slots, a spare slot, row losses."""
    scalars, slot_memory, spare, loss_memory = places
    begin_row_loss(job, row_loss, loss_memory)
    most = 1
    for cell in range(cells[0], cells[1]):
        base = scalars + scalar_starts[cell - cells[0]] * SCALAR_WIDTH
        prologue(job, kernels, lowered, parameters, parameter_starts, cell, base)
        summary = lowered.summaries[cell // job[VECTORS]]
        most = max(most, summary[COLUMNS_END] - summary[COLUMNS_START])
    addresses = np.empty(most + 2, dtype=np.int64)
    pitches = (job[VARIABLE_PITCH], slot_bytes, SCALAR_WIDTH, 0)
    for block_start in range(rows[0], rows[1], job[BLOCK]):
        count = min(job[BLOCK], rows[1] - block_start)
        offset = block_start * job[ITEMSIZE]
        loss_start = (block_start - job[ROW_START]) // job[LOSS_SPAN] * job[LOSS_CELLS]
        begin_block(job, row_loss, loss_memory, offset, count)
        for cell in range(cells[0], cells[1]):
            if cancelled[0]:
                return False
            program = cell // job[VECTORS]
            base = scalars + scalar_starts[cell - cells[0]] * SCALAR_WIDTH
            result = result_address(job, cell, block_start, spare)
            bases = (job[VARIABLES] + offset, slot_memory, base, result)
            summary = lowered.summaries[program]
            run_instructions(
                lowered.instructions, summary[PROLOGUE_END], summary[INSTRUCTIONS_END], kernels,
                bases, pitches, count,
            )  # fmt: skip
            columns = summary[COLUMNS_END] - summary[COLUMNS_START]
            for k in range(columns):
                place = lowered.columns[summary[COLUMNS_START] + k]
                addresses[k] = bases[place & 3] + (place >> 2) * pitches[place & 3]
            weight = job[WEIGHT_ROWS] + offset if job[WEIGHT_ROWS] else 0
            if job[WANTS_LOSS]:
                losses[loss_start + cell] += block_loss(
                    job, row_loss, loss_memory, result, offset, count
                )
            slope = max(summary[SLOPE_PLACE], 0)
            _add_sums(
                job, dots, sums[starts[cell] : starts[cell + 1]], addresses, columns,
                bases[slope & 3] + (slope >> 2) * pitches[slope & 3], weight, count,
            )  # fmt: skip
            if job[JACOBIAN]:
                _store_jacobian(
                    job, lowered, summary, parameter_starts, cell, base, addresses, block_start,
                    count,
                )  # fmt: skip
            if job[WANTS_REDUCTIONS]:
                add_reductions(
                    result, job[ITEMSIZE], count, reductions[cell], block_start == rows[0]
                )
            if job[WANTS_MOMENTS]:
                add_moments(
                    result, job[TARGET_ROWS] + offset, weight, job[ITEMSIZE], count,
                    moments[cell], block_start == rows[0],
                )  # fmt: skip
    return True


@inlined
def _add_sums(
    job: Any, dots: Any, sums: Any, addresses: Any, columns: int, slope: int, weight: int,
    count: int,
) -> None:  # fmt: skip
    """Add a block's sums over columns and products of columns."""
    left = np.empty(1, dtype=np.int64)
    left[0] = slope
    if job[WANTS_SLOPES]:
        own = weight if job[WEIGHS_LOSS] else 0
        for k in range(0, columns, LARGEST_TILE):
            width = min(columns - k, LARGEST_TILE)
            _dot(dots, sums, k, 1, left, 0, 1, addresses, k, width, own, count)
    if job[WANTS_PRODUCTS]:
        for i in range(0, columns, LARGEST_TILE):
            height = min(columns - i, LARGEST_TILE)
            for j in range(0, i + 1, LARGEST_TILE):
                width = min(columns - j, LARGEST_TILE)
                _dot(
                    dots, sums, columns + i * columns + j, columns, addresses, i, height,
                    addresses, j, width, weight, count,
                )  # fmt: skip
    left[0] = addresses[0]  # both arrays live until here


@inlined
def _dot(
    dots: Any, sums: Any, first: int, pitch: int, left: Any, i: int, height: int, right: Any,
    j: int, width: int, weight: int, count: int,
) -> None:  # fmt: skip
    """Add products of ``height`` columns from ``left[i]`` and ``width`` from ``right[j]``."""
    shape = (height - 1) * LARGEST_TILE + width - 1
    if weight:
        shape += LARGEST_TILE * LARGEST_TILE
    _call_dots(
        dots[shape], sums.ctypes.data + 8 * first, pitch, left.ctypes.data + 8 * i,
        right.ctypes.data + 8 * j, weight, count,
    )  # fmt: skip


@inlined
def _store_jacobian(
    job: Any, lowered: Any, summary: Any, parameter_starts: Any, cell: int, base: int,
    addresses: Any, row: int, count: int,
) -> None:  # fmt: skip
    """Store a block of the derivatives by each parameter."""
    program, vector = cell // job[VECTORS], cell % job[VECTORS]
    start = parameter_starts[program]
    length = (parameter_starts[program + 1] - start) // job[VECTORS]
    pitch = (job[ROW_STOP] - job[ROW_START]) * job[ITEMSIZE]
    first = job[JACOBIAN] + (start + vector * length) * pitch
    first += (row - job[ROW_START]) * job[ITEMSIZE]
    for parameter in range(length):
        if job[ITEMSIZE] == 4:
            carray(pointer32(first + parameter * pitch), count)[:] = np.float32(0.0)
        else:
            carray(pointer64(first + parameter * pitch), count)[:] = 0.0
    for index in range(summary[ENTRIES_START], summary[ENTRIES_END]):
        entry = lowered.entries[index]
        factor = entry_factor(entry[ENTRY_FACTOR], base, job[ITEMSIZE])
        if entry[ENTRY_LEAF] < 0 or factor == 0.0:
            continue
        target, source = first + entry[ENTRY_LEAF] * pitch, addresses[entry[ENTRY_COLUMN]]
        if job[ITEMSIZE] == 4:
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
def entry_factor(index: int, base: int, itemsize: int) -> float:
    """Read the factor of an entry from a cell's scalars at ``base``."""
    if index < 0:
        return 1.0
    if itemsize == 4:
        return np.float64(carray(pointer32(base + index * SCALAR_WIDTH), 1)[0])
    return float(carray(pointer64(base + index * SCALAR_WIDTH), 1)[0])


def combine(
    job: Any, kernels: Any, lowered: Any, parameters: Any, parameter_starts: Any, starts: Any,
    sums: Any, gradients: Any, variable_gradients: Any, curvatures: Any, moments: Any,
) -> None:  # fmt: skip
    """Turn the sums of all rows into gradients and curvatures; merge the moments of all spans.

    ``gradients`` and ``curvatures`` are as in `interface.Linearisation` or empty,
    ``variable_gradients`` is [cells, variables] or [0, variables]. All are added to. ``moments`` is
    as in `statistics.merge_spans`.
    """
    merge_spans(moments)
    cells = len(starts) - 1
    scalar_starts, _ = measure(lowered.summaries, 0, cells, job[VECTORS])
    most = 1
    for cell in range(cells):
        most = max(most, scalar_starts[cell + 1] - scalar_starts[cell])
    memory = np.empty((most + 1) * SCALAR_WIDTH, dtype=np.uint8)
    base = (memory.ctypes.data + SCALAR_WIDTH - 1) // SCALAR_WIDTH * SCALAR_WIDTH
    triangle = 0
    for cell in range(cells):
        program, vector = cell // job[VECTORS], cell % job[VECTORS]
        length = (parameter_starts[program + 1] - parameter_starts[program]) // job[VECTORS]
        first = parameter_starts[program] + vector * length
        prologue(job, kernels, lowered, parameters, parameter_starts, cell, base)
        summary = lowered.summaries[program]
        entries = lowered.entries[summary[ENTRIES_START] : summary[ENTRIES_END]]
        columns = summary[COLUMNS_END] - summary[COLUMNS_START]
        own = sums[starts[cell] : starts[cell + 1]]
        if job[WANTS_SLOPES]:
            _add_gradient(job, entries, base, own, first, cell, gradients, variable_gradients)
        if job[WANTS_PRODUCTS]:
            size = length * (length + 1) // 2
            _add_curvature(
                job, entries, base, own[columns:], columns,
                curvatures[triangle : triangle + size],
            )  # fmt: skip
            triangle += size
    memory[0] = 0  # it lives until here


@inlined
def _add_gradient(
    job: Any, entries: Any, base: int, own: Any, first: int, cell: int, gradients: Any,
    variable_gradients: Any,
) -> None:  # fmt: skip
    scale = 2.0 if job[IS_SQUARES] else 1.0
    for index in range(len(entries)):
        leaf = entries[index, ENTRY_LEAF]
        factor = entry_factor(entries[index, ENTRY_FACTOR], base, job[ITEMSIZE])
        total = own[entries[index, ENTRY_COLUMN]]
        if factor == 0.0 or total == 0.0:
            continue
        term = scale * factor * total
        if leaf >= 0 and len(gradients):
            gradients[first + leaf] += term
        elif leaf < 0 and len(variable_gradients):
            variable_gradients[cell, -1 - leaf] += term


@inlined
def _add_curvature(
    job: Any, entries: Any, base: int, products: Any, columns: int, triangle: Any
) -> None:
    for first in range(len(entries)):
        p = entries[first, ENTRY_LEAF]
        a = entry_factor(entries[first, ENTRY_FACTOR], base, job[ITEMSIZE])
        if p < 0 or a == 0.0:
            continue
        for second in range(len(entries)):
            q = entries[second, ENTRY_LEAF]
            if q < 0 or q > p:
                continue
            b = entry_factor(entries[second, ENTRY_FACTOR], base, job[ITEMSIZE])
            i, j = entries[first, ENTRY_COLUMN], entries[second, ENTRY_COLUMN]
            product = products[max(i, j) * columns + min(i, j)]
            if b != 0.0 and product != 0.0:
                triangle[p * (p + 1) // 2 + q] += a * b * product
