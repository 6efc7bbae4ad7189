"""Evaluations with derivatives, custom losses or statistics.

`lower_derivatives` lowers programs with their derivatives, `LoweredDerivatives` plans and cuts the
work, and a `DerivativeRun` has `linearise_chunk` run it and `combine_chunk` make derivatives of the
sums. Both are compiled by Numba. The simple form, for one instance (program and parameter vector):

    run the prologue once, on invariants
    for each block of rows:
        run the instructions: result, derivative s = dl/df of the row loss, columns c1, c2, ...
        loss += row losses of the result
        sums[k] += sum(w s ck);  products[i, j] += sum(w ci cj)
    for each entry (column k, parameter p, factor d):
        gradient[p] += d sums[k]
    for each two entries:
        curvature[p, q] += d1 d2 products[k1, k2]

All sums are float64: over the lanes of a block, then over blocks in the order of `sum_tree`.
The bits of the loss do not depend on what else is summed, because the tree of sums is fixed.

Losses of a block of rows are computed in float64, whatever the data's type:

    if the row loss is (f - y)^2 or |f - y|:
        loss += loss kernel of the data's type(f, y, w)      # as without derivatives: the same bits
    else:
        f, y, w = float64 copies of the block's values, target and weights
        run the row loss's instructions with the float64 kernels
        loss += sum(w l)

Values are rounded to the data's type before, as they are when they are returned.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numba import carray
from numpy.typing import NDArray

from warpfit.dataset import Dataset, Layout
from warpfit.ir import Batch
from warpfit.losses import DIFFERENCE, mentions_weight
from warpfit.request import Evaluation
from warpfit_server.engine.autodiff import (
    LOSS,
    RequestedOutputs,
    RowLossTokens,
    allocate_differentiated,
    differentiate_chunk,
    no_row_loss,
    row_loss_tokens,
    source_arrays,
)
from warpfit_server.engine.cpu import interpreter
from warpfit_server.engine.cpu.codegen.kernels import LARGEST_TILE, Kernels
from warpfit_server.engine.cpu.interpreter import (
    CONTEXT,
    INPUT_ARRAYS,
    INVARIANT_WIDTH,
    MOMENTS,
    ONE_SPAN,
    REDUCTIONS,
    ChunkedWork,
    Cut,
    Inputs,
    Memory,
    address_of,
    aligned,
    cut_instances,
    cut_programs,
    first_node,
    from_zero,
    inputs_of,
    invariants_of,
    lowering_work,
    merge_reductions,
    new_context,
    new_memory,
    run_body,
    run_instructions,
    run_prologue,
    span_level,
    weights_of,
)
from warpfit_server.engine.interface import Arithmetic, Steps, edges_of
from warpfit_server.engine.lowering import NONE, Lowered, allocate, lower_chunk
from warpfit_server.engine.native import numba_cache
from warpfit_server.engine.native.intrinsics import (
    CANCEL_FLAG,
    CANCELLED,
    FAILED,
    FINISHED,
    OWN_ARRAYS,
    SPANS,
    call_kernel,
    call_sum,
    chunk_ranges,
    floats,
    inlined,
    octets,
    pointer32,
    pointer64,
    ranges,
    words,
)
from warpfit_server.engine.sum_tree import add_nodes, carry, node_sums

#: What row losses are computed with.
_WIDE: Final = Arithmetic.DOUBLE
#: Token-rows that take about as long as lowering one token with its derivatives.
_COST_OF_DERIVATIVES: Final = 1500
#: Instructions that take about as long as one of a row loss, which is computed in float64, and as
#: the reductions and the moments of a block of values.
_COST_OF_WIDE: Final = 2
_COST_OF_REDUCTIONS: Final = 4
_COST_OF_MOMENTS: Final = 16
#: Tokens that are weighed without a pause.
_TOKENS_A_STEP: Final = 1 << 20
#: Reductions and moments of nodes that are merged without a pause.
_FINISHED_AT_ONCE: Final = 1 << 17
# Arrays of an argument block after the inputs.
_ROW_LOSS: Final = OWN_ARRAYS + INPUT_ARRAYS
_DOTS: Final = _ROW_LOSS + INPUT_ARRAYS
_STARTS, _NODES, _NODE_RANGE, _TOTALS = range(_DOTS + 1, _DOTS + 5)
_GRADIENTS, _VARIABLE_GRADIENTS, _CURVATURES, _TRIANGLES = range(_TOTALS + 1, _TOTALS + 5)
#: Sums that each instance begins with: of the row losses and of the values.
LOSS_SUM, VALUE_SUM, COLUMN_SUMS = range(3)
#: Columns that a row loss reads: values, target and weights; then comes its result.
_COLUMNS: Final = 3
_DOUBLE: Final = 8


# ------------------------------------------------------------------------- plans and evaluations


@dataclass(frozen=True, slots=True, eq=False)
class DerivativePlan:
    """The part of an evaluation that does not depend on the parameters."""

    lowered: Lowered
    row_loss: Lowered
    """Instructions of the row loss; no program for losses that have kernels of their own."""
    cut: Cut
    sizes: NDArray[np.int64]
    """Sums of each instance."""
    weighs_loss: bool
    """Whether each row loss counts w times."""


class LoweredDerivatives:
    """Programs lowered with their derivatives, and the plan of the last selection of them."""

    def __init__(
        self, lowered: Lowered, row_loss: Lowered, weights: NDArray[np.float64], loss_weight: float
    ) -> None:
        self._lowered = lowered
        self._weights, self._loss_weight = weights, loss_weight
        self._row_loss = row_loss
        self._last: tuple[NDArray[np.int64] | None, DerivativePlan] | None = None

    def plan(
        self,
        dataset: Dataset,
        evaluation: Evaluation,
        requested: RequestedOutputs,
        programs: NDArray[np.int64] | None,
    ) -> DerivativePlan:
        """Cut the work of an evaluation of all programs, or of those with some indices."""
        last = self._last  # another thread may replace it
        if last is not None and last[0] is programs:
            return last[1]
        lowered, layout = self._lowered, dataset.layout
        if programs is not None:
            lowered = lowered._replace(headers=lowered.headers[programs])
        headers, vectors = lowered.headers, evaluation.batch.vectors
        columns = headers["columns"]
        products = columns * columns * (requested.curvatures is not None)
        sizes = np.repeat(COLUMN_SUMS + columns + products, vectors)
        rows = evaluation.row_range(layout)
        reductions = REDUCTIONS * (requested.reductions is not None)
        moments = MOMENTS * (requested.moments is not None)
        sums = int(sizes.sum()) + len(sizes) * (reductions + moments)
        # The product of two columns costs about as much as an instruction, and so do the sum over
        # a column and a row of a Jacobian. A row loss is computed for each program.
        others = products // 2 + columns + headers["entries"] * (requested.jacobian is not None)
        others = others + _COST_OF_REDUCTIONS * (requested.reductions is not None)
        others = others + _COST_OF_MOMENTS * (requested.moments is not None)
        own = headers["end"] - headers["start"]
        loss_tokens = _COST_OF_WIDE * int(np.sum(self._row_loss.headers["end"]))
        costs = own + others + loss_tokens
        weights = self._weights if programs is None else self._weights[programs]
        weights = (own * weights + others + loss_tokens * self._loss_weight) / costs
        level = span_level(rows, layout, sums, int(costs.max()))
        invariants = headers["invariants"]
        cut = cut_instances(costs, weights, invariants, vectors, rows, layout, level)
        loss = requested.row_loss
        weighs_loss = loss is not None and not mentions_weight(loss)
        plan = DerivativePlan(lowered, self._row_loss, cut, sizes, weighs_loss)
        self._last = programs, plan
        return plan


def lower_derivatives(
    run: Callable[[ChunkedWork], Steps[None]],
    layout: Layout,
    batch: Batch,
    requested: RequestedOutputs,
) -> Steps[LoweredDerivatives]:
    """Lower checked programs with their derivatives; ``run`` runs all chunks of such work."""
    tokens, loss = no_row_loss(), requested.row_loss
    if loss is not None and requested.needs_loss_derivative:
        program = DIFFERENCE if requested.is_squares else loss
        tokens = row_loss_tokens(program, layout.variables, weighted=layout.has_weights)
    # The losses themselves are computed apart, in float64.
    flags = requested.lowering_flags & ~LOSS
    work, lowered = differentiation_work(
        numba_cache.address_of(differentiate_chunk), batch, tokens, flags, requested.cancelled
    )
    yield from run(work)
    row_loss, loss_weight = allocate(0, 0, 0), 1.0
    if loss is not None and not requested.deviation:
        given = Batch.of([loss])
        loss_weight = float(weights_of(given)[0])
        function = numba_cache.address_of(lower_chunk)
        work, row_loss = lowering_work(function, given, requested.cancelled)
        yield from run(work)
    weights = np.empty(len(batch))
    for first, stop in pairwise(edges_of(batch.lengths.astype(np.int64), _TOKENS_A_STEP)):
        if first:
            yield None
        weights[first:stop] = weights_of(batch[first:stop])
    return LoweredDerivatives(lowered, row_loss, weights, loss_weight)


def differentiation_work(
    function: int,
    batch: Batch,
    row_loss: RowLossTokens,
    requested: int,
    cancelled: NDArray[np.uint8],
) -> tuple[ChunkedWork, Lowered]:
    """Return the work of `differentiate_chunk` on a checked batch, and the arrays that it fills.

    ``requested`` are bits of `differentiate`; the row loss is lowered beside each program.
    """
    lowered = allocate_differentiated(batch, row_loss)
    arrays = (*source_arrays(batch, row_loss, requested), *lowered)
    cut = Cut(cut_programs(batch), ONE_SPAN, len(batch.codes) * _COST_OF_DERIVATIVES)
    return ChunkedWork(function, arrays, cut, cancelled), lowered


def lowering_key(
    dataset: Dataset, evaluation: Evaluation, requested: RequestedOutputs
) -> tuple[Hashable, ...]:
    """Return the key of lowered derivatives and their plans, without the programs."""
    arrays = requested.curvatures, requested.reductions, requested.moments
    flags = requested.row_loss, requested.lowering_flags, *(array is not None for array in arrays)
    return (evaluation.batch.vectors, evaluation.rows, dataset.layout, *flags)


class DerivativeRun:
    """One evaluation by a plan: its work, what that adds up, and how outputs are made of it."""

    def __init__(
        self,
        kernels: Kernels,
        plan: DerivativePlan,
        dataset: Dataset,
        evaluation: Evaluation,
        requested: RequestedOutputs,
    ) -> None:
        batch, layout, spans = evaluation.batch, dataset.layout, len(plan.cut.spans)
        self._requested = requested
        self._cut, self._layout = plan.cut, layout
        self._rows = evaluation.row_range(layout)
        starts = np.concatenate([[0], np.cumsum(plan.sizes)])
        self._starts, self._totals = starts[:-1], np.empty(int(starts[-1]))
        reductions = len(plan.sizes) * REDUCTIONS * (requested.reductions is not None)
        moments = len(plan.sizes) * MOMENTS * (requested.moments is not None)
        self._first_moment = len(self._totals) + reductions
        self.nodes = np.zeros((spans, self._first_moment + moments))
        """What has been summed up of each node of the rows: sums, reductions and moments."""

        own, wide = kernels[Arithmetic.of(layout.dtype, evaluation.precision)], kernels[_WIDE]
        counts = np.repeat(batch.parameter_counts.astype(np.int64), batch.vectors)
        triangles = counts * (counts + 1) // 2
        self._triangles = np.cumsum(triangles) - triangles
        """Index of each instance's first number in `Linearisation.curvatures`."""
        suffix = "_weighted" if layout.has_weights and plan.weighs_loss else ""
        context = new_context(dataset, evaluation, requested.values, plan.cut.level)
        context["wants_losses"] = requested.row_loss is not None
        context["wants_gradients"] = requested.needs_loss_derivative
        context["wants_curvatures"] = requested.curvatures is not None
        context["is_squares"] = requested.is_squares
        context["wants_reductions"] = requested.reductions is not None
        context["wants_moments"] = requested.moments is not None
        if requested.jacobian is not None:
            context["jacobian"] = requested.jacobian.ctypes.data
        context["weighs_loss"] = plan.weighs_loss
        if requested.deviation:
            context["loss_kernel"] = own.losses[requested.deviation + suffix]
        parameters = np.ascontiguousarray(batch.parameters), batch.parameter_starts
        inputs = Inputs(context, own.addresses, *parameters, plan.lowered)
        sum_kernel = wide.losses["given" + suffix] if len(plan.row_loss.headers) else 0
        row_loss = row_loss_inputs(wide.addresses, sum_kernel, plan.row_loss)
        self._inputs = (*inputs.arrays(), *row_loss.arrays(), own.dots, starts)

    def summing(self) -> ChunkedWork:
        """Return the work that runs the programs over the rows and adds up."""
        return self._work(numba_cache.address_of(linearise_chunk), self._cut)

    def add_up(self) -> Steps[None]:
        """Add the sums of all nodes up, once `summing` has run."""
        sums = self.nodes[:, : len(self._totals)]
        yield from add_nodes(sums, self._first_node, self._totals)

    def combining(self) -> ChunkedWork:
        """Return the work that makes derivatives and moments of the sums over all rows."""
        for array in self._gradients:
            array.fill(0.0)
        return self._work(
            numba_cache.address_of(combine_chunk), self._cut.without_rows(len(self._totals))
        )

    def _work(self, function: int, cut: Cut) -> ChunkedWork:
        node_range = np.array([self._first_node, len(self.nodes)])
        sums = self.nodes, node_range, self._totals
        arguments = (*self._inputs, *sums, *self._gradients, self._triangles)
        return ChunkedWork(function, arguments, cut, self._requested.cancelled)

    @property
    def _gradients(self) -> list[NDArray[np.float64]]:
        requested = self._requested
        arrays = requested.gradients, requested.variable_gradients, requested.curvatures
        return [np.empty(0) if array is None else array for array in arrays]

    @property
    def _first_node(self) -> int:
        return first_node(self._rows, self._layout, self._cut.level)

    def finish(self) -> Steps[None]:
        """Fill the other outputs, once `combining` has run."""
        requested, (start, stop) = self._requested, self._rows
        if requested.losses is not None:
            requested.losses.reshape(-1)[:] = self._totals[self._starts + LOSS_SUM]
        if requested.reductions is None and requested.moments is None:
            return
        count, parts = len(self._starts), self.nodes[:, len(self._totals) : self._first_moment]
        parts = parts.reshape(len(parts), -1, REDUCTIONS)
        moments = self.nodes[0, self._first_moment :].reshape(-1, MOMENTS)
        step = max(1, _FINISHED_AT_ONCE // len(self.nodes))
        for some in (slice(first, first + step) for first in range(0, count, step)):
            if some.start:
                yield None
            if requested.reductions is not None:
                totals = self._totals[self._starts[some] + VALUE_SUM]
                merged = merge_reductions(totals, parts[:, some], stop - start)
                requested.reductions.reshape(count, -1)[some] = merged
            if requested.moments is not None:
                requested.moments.reshape(count, -1)[some] = from_zero(moments[some])


# ------------------------------------------------------------- programs with derivatives, compiled


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
    """Run a range of instances over a span of rows; see `argument_block`.

    The nodes of an argument block, [spans, numbers], are the sums of all instances, their
    reductions and their moments.
    """
    instances, rows, span = chunk_ranges(block, chunk)
    inputs, starts = inputs_of(block, OWN_ARRAYS), words(block, _STARTS)
    context = inputs.context[0]
    node = floats(block, _NODES).reshape((len(ranges(block, SPANS)), -1))[span]
    first_moment = _first_moment(context, starts)
    found = node[starts[instances.start] : starts[instances.stop]]
    found_moments = node[first_moment:].reshape((-1, interpreter.MOMENTS))
    try:
        count = (instances.stop - instances.start) * (context.wants_moments != 0)
        sums = ChunkSums(
            words(block, _DOTS), starts, np.zeros((context.levels, len(found))),
            node[starts[-1] : first_moment].reshape((-1, interpreter.REDUCTIONS)),
            np.zeros((context.levels, count, interpreter.MOMENTS)),
        )  # fmt: skip
        row_loss = inputs_of(block, _ROW_LOSS)
        memory = new_memory(inputs, instances, row_loss_bytes(context, row_loss))
        cancelled = octets(block, CANCEL_FLAG)
        finished = _run(inputs, row_loss, sums, memory, instances, rows, cancelled)
        found[:] = node_sums(sums.sums)
        if count:
            found_moments[instances.start : instances.stop] = interpreter.node_moments(sums.moments)
    except Exception:  # compiled code tells exceptions apart no further: memory is short
        return FAILED
    return FINISHED if finished else CANCELLED


@inlined
def _first_moment(context: Any, starts: Any) -> int:
    """Return the index of the first moment among the numbers of a node."""
    reductions = context.instances if context.wants_reductions else 0
    return int(starts[-1] + reductions * interpreter.REDUCTIONS)


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
        interpreter.carry_moments(sums.moments, block + 1)
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
        total = interpreter.add_reductions(result, context.item_bytes, count, own, is_first)
    if context.wants_moments:
        interpreter.add_moments(
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
    start, stop = interpreter.MOMENTS * instances.start, interpreter.MOMENTS * instances.stop
    interpreter.merge_spans(moments[:, start:stop], node_range[0])
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
        if context.wants_gradients:  # the sums over columns, times the factors of the entries
            scale = 2.0 if context.is_squares else 1.0
            for entry in entries:
                factor = _read_factor(entry.factor, invariants, context.item_bytes)
                total = own[entry.column]
                if factor == 0.0 or total == 0.0:
                    continue
                term = scale * factor * total
                if entry.leaf >= 0 and len(gradients):
                    gradients[first + entry.leaf] += term
                elif entry.leaf < 0 and len(variable_gradients):
                    variable_gradients[instance * variables - 1 - entry.leaf] += term
        if context.wants_curvatures:  # products of columns, times the factors of two entries each
            products, triangle = own[header.columns :], curvatures[triangles[instance] :]
            for one in entries:
                p = one.leaf
                a = _read_factor(one.factor, invariants, context.item_bytes)
                if p < 0 or a == 0.0:
                    continue
                for other in entries:
                    q = other.leaf
                    if q < 0 or q > p:
                        continue
                    b = _read_factor(other.factor, invariants, context.item_bytes)
                    i, j = one.column, other.column
                    product = products[max(i, j) * header.columns + min(i, j)]
                    if b != 0.0 and product != 0.0:
                        triangle[p * (p + 1) // 2 + q] += a * b * product
    array[0] = 0  # it lives until here


# -------------------------------------------------------------------------- custom losses, compiled


def row_loss_inputs(kernels: NDArray[np.int64], sum_kernel: int, lowered: Lowered) -> Inputs:
    """Return the inputs of the interpreter for a custom row loss.

    Args:
        kernels: addresses of the float64 kernels by code of instruction.
        sum_kernel: address of the float64 loss kernel that adds its first operand up; 0 if the
            loss kernel of the evaluation's own context does it all.
        lowered: the row loss, a batch of one program over values, target and weights.
    """
    context = np.zeros(1, dtype=CONTEXT)
    context["item_bytes"], context["vectors"], context["loss_kernel"] = _DOUBLE, 1, sum_kernel
    return Inputs(context, kernels, np.empty(0), np.zeros(2, dtype=np.int64), lowered)


@inlined
def row_loss_bytes(context: Any, row_loss: Inputs) -> int:
    """Return the bytes of memory that a thread needs for a row loss."""
    if not row_loss.context[0].loss_kernel:
        return 0
    header = row_loss.lowered.headers[0]
    columns = _COLUMNS + 1 + header.slots
    return int(columns * context.block_rows * _DOUBLE + header.invariants * INVARIANT_WIDTH)


@inlined
def begin_row_loss(context: Any, row_loss: Inputs, memory: int) -> None:
    """Compute the invariants of a row loss, and a weight of 1 for each row where there is none."""
    if not row_loss.context[0].loss_kernel:
        return
    run_prologue(row_loss, 0, _bases(context, row_loss, memory)[2])
    carray(pointer64(memory + 2 * context.block_rows * _DOUBLE), context.block_rows)[:] = 1.0


@inlined
def begin_block(context: Any, row_loss: Inputs, memory: int, offset: int, count: int) -> None:
    """Widen target and weights of a block of rows that begins ``offset`` bytes into a column."""
    if not row_loss.context[0].loss_kernel:
        return
    pitch = context.block_rows * _DOUBLE
    _widen(context.target + offset, context.item_bytes, memory + pitch, count)
    if context.weights:
        _widen(context.weights + offset, context.item_bytes, memory + 2 * pitch, count)


@inlined
def block_loss(
    context: Any, row_loss: Inputs, memory: int, result: int, offset: int, count: int
) -> float:
    """Sum the row losses of an instance's values at address ``result``."""
    sum_kernel = row_loss.context[0].loss_kernel
    if not sum_kernel:
        operands = result, context.target + offset, context.weights + offset, count
        return float(call_sum(context.loss_kernel, operands))
    _widen(result, context.item_bytes, memory, count)
    pitch = context.block_rows * _DOUBLE
    bases = _bases(context, row_loss, memory)
    header = row_loss.lowered.headers[0]
    pitches = (pitch, pitch, INVARIANT_WIDTH, 0)
    run_instructions(row_loss, header.prologue_end, header.end, bases, pitches, count)
    return float(call_sum(sum_kernel, (bases[3], bases[3], memory + 2 * pitch, count)))


@inlined
def _bases(context: Any, row_loss: Inputs, memory: int) -> Any:
    """Return the bases of locations: columns, slots, invariants, result."""
    pitch = context.block_rows * _DOUBLE
    result = memory + _COLUMNS * pitch
    slots = result + pitch
    return memory, slots, slots + row_loss.lowered.headers[0].slots * pitch, result


@inlined
def _widen(source: int, item_bytes: int, target: int, count: int) -> None:
    """Copy numbers as float64."""
    wide = carray(pointer64(target), count)
    if item_bytes == 4:
        interpreter.copy(carray(pointer32(source), count), wide)
    else:
        interpreter.copy(carray(pointer64(source), count), wide)
