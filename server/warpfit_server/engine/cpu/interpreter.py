"""The interpreter, compiled by Numba: it walks rows in blocks and calls one kernel an instruction.

The simple form, for one program and parameter vector:

    run the prologue once, on invariants
    for each block of rows:
        for each instruction:
            kernel[code](result, a, b, c)          # over the rows of the block
        add the block's loss to the tree of sums (`sum_tree`)

An *instance* is a program with one of its parameter vectors, numbered in wire order. One call runs
a range of instances over a span of rows, blocks outside and instances inside, so that a block's
variables are read from memory once and then stay in cache. All data is addressed by byte, so the
same compiled code serves both floating types; kernels (`kernels`) differ.

Work is cut into chunks that threads take one after the other. A chunk is a range of instances over
a span of rows. A span is a node of the tree of `sum_tree`, so that results do not depend on the
threads or on how work is cut.

Reductions and moments of values are computed block by block and merged over spans, too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from numba import carray
from numpy.typing import NDArray

from warpfit.dataset import Dataset, Layout
from warpfit.ir import Batch
from warpfit.ops import KERNEL_FUNCTIONS, OPERATORS
from warpfit.request import Evaluation
from warpfit_server.engine.lowering import NONE, Lowered, allocate, lowered_of, lowering_arrays
from warpfit_server.engine.native import numba_cache
from warpfit_server.engine.native.intrinsics import (
    CANCEL_FLAG,
    CANCELLED,
    FAILED,
    FINISHED,
    OWN_ARRAYS,
    RANGE,
    SPANS,
    argument_block,
    call_kernel,
    call_sum,
    chunk_ranges,
    floats,
    inlined,
    octets,
    pointer32,
    pointer64,
    ranges,
    reader,
    words,
)
from warpfit_server.engine.sum_tree import block_rows, carry, node_rows, node_sums, tree_of
from warpfit_server.limits import MOST_BLOCKS, MOST_SUMS, spans_of_long_programs

Floats = NDArray[np.float64]
#: Bytes of one stored invariant: as wide as a kernel's step.
INVARIANT_WIDTH: Final = 64
#: What is the same for all instances of an evaluation: int64 numbers and addresses, 0 for None.
CONTEXT: Final = np.dtype(
    [
        (name, np.int64)
        for name in (
            *("item_bytes", "variables", "variable_pitch", "target", "weights", "values"),
            *(
                "loss_kernel",
                "instances",
                "vectors",
                "row_start",
                "row_stop",
                "block_rows",
                "levels",
            ),
            # for `derivatives` alone:
            *("wants_losses", "wants_gradients", "wants_curvatures", "jacobian"),
            *("wants_reductions", "wants_moments", "is_squares", "weighs_loss"),
        )
    ]
)
#: Token-rows of a chunk: some 0.2 ms, after which a thread can turn to another tenant's work.
_LEAST_CHUNK: Final = 500_000
_LARGEST_CHUNK: Final = 1_000_000
#: Chunks to cut at least before they grow.
_MANY_CHUNKS: Final = 128
#: Instances of a chunk at least, up to so many token-rows: all of them run over a block of rows
#: that is read from memory once. With two, a million rows take 17 % longer.
_INSTANCES_A_CHUNK: Final = 8
_MOST_FOR_INSTANCES: Final = 4_000_000
#: Tokens that a thread lowers at a time, and token-rows that take about as long as lowering one.
_TOKENS_A_CHUNK: Final = 1000
_COST_OF_LOWERING: Final = 500
#: Token-rows that take about as long as making derivatives of a sum over rows.
_COST_OF_A_SUM: Final = 500
#: Token-rows for which waking one more thread takes as long as computing them.
_COST_OF_A_THREAD: Final = 300_000
#: Invariants of a chunk (64 bytes each): they share the second-level cache with the rows.
_CHUNK_INVARIANTS: Final = 4096
#: Times as long as an addition that vectorised and other functions take, and which are neither.
_DEAR, _DEAREST = 32.0, 128.0
_CHEAP: Final = frozenset({"abs", "sqrt", "floor", "ceil", "rint"})
_SCALAR: Final = frozenset({"tgamma", "lgamma", "digamma", "cbrt", "tan", "pow"})
#: The spans of work that has no rows.
ONE_SPAN: Final = np.zeros(1, dtype=RANGE)


# ------------------------------------------------------------------------------- the interpreter


class Inputs(NamedTuple):
    """Arrays of an evaluation that the interpreter reads."""

    context: Any
    """CONTEXT, [1]."""
    kernels: NDArray[np.int64]
    """Addresses by code of instruction."""
    parameters: NDArray[np.float64]
    parameter_starts: NDArray[np.int64]
    lowered: Lowered

    def arrays(self) -> tuple[NDArray[Any], ...]:
        """Return the arrays of an argument block for `inputs_of`."""
        return (*self[:-1], *self.lowered)


INPUT_ARRAYS: Final = len(Inputs._fields) - 1 + len(Lowered._fields)
#: Array of an argument block after the inputs: sums of losses, [spans, instances of the batch].
_LOSSES: Final = OWN_ARRAYS + INPUT_ARRAYS
_contexts: Final = reader(CONTEXT)


@inlined
def inputs_of(block: int, index: int) -> Any:
    """Return the inputs in an argument block, from array number ``index``."""
    return Inputs(
        _contexts(block, index), words(block, index + 1), floats(block, index + 2),
        words(block, index + 3), lowered_of(block, index + 4),
    )  # fmt: skip


class Memory(NamedTuple):
    """Working memory for a range of instances, in compiled code: an array, and addresses in it.

    Compiled code frees an array after its last use, and addresses do not count as one: they are
    valid as long as a caller has the tuple.
    """

    array: Any
    first: int
    """The first instance."""
    invariants: int
    invariant_starts: Any
    """First invariant of each instance, and the end of the last one's, int64."""
    slots: int
    slot_bytes: int
    spare: int
    """A slot for results that nobody wants; then comes memory of the caller's own."""


@numba_cache.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def interpret_chunk(block: int, chunk: int) -> int:
    """Run a range of instances over a span of rows; see `argument_block`."""
    instances, rows, span = chunk_ranges(block, chunk)
    losses = floats(block, _LOSSES)
    count = len(losses) // len(ranges(block, SPANS))
    try:
        inputs = inputs_of(block, OWN_ARRAYS)
        finished = _run(
            inputs, new_memory(inputs, instances, 0), instances, rows, octets(block, CANCEL_FLAG),
            losses[span * count : (span + 1) * count],
        )  # fmt: skip
    except Exception:  # compiled code tells exceptions apart no further: memory is short
        return FAILED
    return FINISHED if finished else CANCELLED


@inlined
def _run(
    inputs: Inputs, memory: Memory, instances: Any, rows: Any, cancelled: Any, losses: Any
) -> bool:
    """Run a range of instances over a range of rows; return whether they were finished.

    ``cancelled``, uint8 [1], is polled between blocks; ``losses`` gets each instance's sum of loss
    terms, float64 [instances of the batch].
    """
    context = inputs.context[0]
    first = instances.start
    sums = np.zeros((context.levels, instances.stop - first))
    for instance in range(first, instances.stop):
        run_prologue(inputs, instance, invariants_of(memory, instance))
    row = rows.start
    while row < rows.stop:
        block = row // context.block_rows
        count = min((block + 1) * context.block_rows, rows.stop) - row
        offset = row * context.item_bytes
        for instance in range(instances.start, instances.stop):
            if cancelled[0]:
                return False
            bases, _ = run_body(inputs, memory, instance, row, count)
            if context.loss_kernel:
                operands = bases[3], context.target + offset, context.weights + offset, count
                sums[0, instance - first] += call_sum(context.loss_kernel, operands)
        carry(sums, block + 1)
        row += count
    losses[first : instances.stop] = node_sums(sums)
    return True


@inlined
def new_memory(inputs: Inputs, instances: Any, more: int) -> Memory:
    """Allocate memory for a range of instances, and ``more`` bytes of the caller's own."""
    context, first = inputs.context[0], instances.start
    starts = np.zeros(instances.stop - first + 1, dtype=np.int64)
    most_slots = 0
    for index in range(instances.stop - first):
        header = inputs.lowered.headers[(first + index) // context.vectors]
        starts[index + 1] = starts[index] + header.invariants
        most_slots = max(most_slots, header.slots)
    invariant_bytes, slot_bytes = (
        starts[-1] * INVARIANT_WIDTH,
        context.block_rows * context.item_bytes,
    )
    size = INVARIANT_WIDTH + invariant_bytes + (most_slots + 1) * slot_bytes + more
    array = np.empty(size, dtype=np.uint8)
    invariants = aligned(array)
    slots = invariants + invariant_bytes
    spare = slots + most_slots * slot_bytes
    return Memory(array, first, invariants, starts, slots, slot_bytes, spare)


@inlined
def aligned(array: Any) -> int:
    """Return the first address in an array at which invariants may lie."""
    return int((array.ctypes.data + INVARIANT_WIDTH - 1) // INVARIANT_WIDTH * INVARIANT_WIDTH)


@inlined
def invariants_of(memory: Memory, instance: int) -> int:
    """Return the address of an instance's invariants."""
    return int(
        memory.invariants + memory.invariant_starts[instance - memory.first] * INVARIANT_WIDTH
    )


@inlined
def run_prologue(inputs: Inputs, instance: int, invariants: int) -> None:
    """Compute an instance's invariants at an address."""
    context, lowered = inputs.context[0], inputs.lowered
    program, vector = instance // context.vectors, instance % context.vectors
    start = inputs.parameter_starts[program]
    count = (inputs.parameter_starts[program + 1] - start) // context.vectors
    header = lowered.headers[program]
    for index in range(header.first_load, header.first_load + header.loads):
        load = lowered.loads[index]
        value = load.value
        if load.parameter != NONE:
            value = inputs.parameters[start + vector * count + load.parameter]
        # As wide as a kernel's step.
        address = invariants + load.invariant * INVARIANT_WIDTH
        if context.item_bytes == 4:
            carray(pointer32(address), INVARIANT_WIDTH // 4)[:] = np.float32(value)
        else:
            carray(pointer64(address), INVARIANT_WIDTH // 8)[:] = value
    bases = (invariants, invariants, invariants, invariants)
    pitches = (INVARIANT_WIDTH, INVARIANT_WIDTH, INVARIANT_WIDTH, INVARIANT_WIDTH)
    width = INVARIANT_WIDTH // context.item_bytes
    run_instructions(inputs, header.start, header.prologue_end, bases, pitches, width)


@inlined
def run_body(inputs: Inputs, memory: Memory, instance: int, row: int, count: int) -> Any:
    """Run an instance's instructions on a block of rows.

    Returns:
        Bases and pitches, for `address_of`. The base of RESULT is the address of the result.
    """
    context = inputs.context[0]
    header = inputs.lowered.headers[instance // context.vectors]
    result = memory.spare
    if context.values:
        index = instance * (context.row_stop - context.row_start) + row - context.row_start
        result = context.values + index * context.item_bytes
    rows = context.variables + row * context.item_bytes
    bases = (rows, memory.slots, invariants_of(memory, instance), result)
    pitches = (context.variable_pitch, memory.slot_bytes, INVARIANT_WIDTH, 0)
    run_instructions(inputs, header.prologue_end, header.end, bases, pitches, count)
    return bases, pitches


@inlined
def run_instructions(
    inputs: Inputs, start: int, stop: int, bases: Any, pitches: Any, rows: int
) -> None:
    """Run a range of instructions on rows."""
    for index in range(start, stop):
        instruction = inputs.lowered.instructions[index]
        operands = instruction.operands
        arguments = (
            address_of(instruction.target, bases, pitches),
            address_of(operands[0], bases, pitches),
            address_of(operands[1], bases, pitches),
            address_of(operands[2], bases, pitches),
            instruction.broadcast,
            rows,
        )
        call_kernel(inputs.kernels[instruction.code], arguments)


@inlined
def address_of(location: int, bases: Any, pitches: Any) -> int:
    """Return the address of a location; bases and pitches are by its kind."""
    return int(bases[location & 3] + (location >> 2) * pitches[location & 3])


# ------------------------------------------------------------------------ work, cut into chunks


class Cut(NamedTuple):
    """A partition of work into chunks: chunk i is range i // spans over span i % spans."""

    ranges: NDArray[np.void]
    """RANGE of instances, or of programs, for each row of chunks."""
    spans: NDArray[np.void]
    """RANGE of rows for each column of chunks."""
    cost: int
    """Token-rows of all chunks."""
    level: int = 0
    """Level of the nodes that spans are; blocks have level 0."""

    def without_rows(self, sums: int) -> Cut:
        """Return the same ranges of instances with a single span, costed by the number of sums."""
        return Cut(self.ranges, ONE_SPAN, sums * _COST_OF_A_SUM)


@dataclass(slots=True, eq=False)
class ChunkedWork:
    """Work that threads can share."""

    function: int
    """Address of what runs a chunk; see `warpfit_server.engine.native.intrinsics`."""
    arrays: tuple[NDArray[Any], ...]
    """Own arrays of its argument block."""
    cut: Cut
    cancelled: NDArray[np.uint8]
    """[1]; not 0 once nobody wants the results any more."""
    block: NDArray[np.int64] = field(init=False)
    chunks: int = field(init=False)
    """Number of chunks."""

    def __post_init__(self) -> None:
        self.block = argument_block((*self.cut[:2], self.cancelled, *self.arrays))
        self.chunks = len(self.cut.ranges) * len(self.cut.spans)

    def helpers(self, first: int, stop: int) -> int:
        """Return how many threads gain from helping with some of the chunks."""
        cost = self.cut.cost * (stop - first) // self.chunks
        return min(cost // _COST_OF_A_THREAD, stop - first - 1)

    def instances_finished(self, chunks: int) -> int:
        """Return how many instances, from the first, are finished once the first chunks are."""
        finished = chunks // len(self.cut.spans)
        return int(self.cut.ranges["stop"][finished - 1]) if finished else 0


def span_level(rows: tuple[int, int], layout: Layout, sums: int, longest: int) -> int:
    """Return the least level, from 1 on, of which not too many nodes have the rows.

    ``sums`` are the numbers that are summed up for each node, ``longest`` the tokens of the longest
    program, which may need more nodes.
    """
    (start, stop), level = rows, 1
    wanted = max(MOST_BLOCKS, spans_of_long_programs(longest, stop - start))
    length, most = node_rows(layout, level), min(wanted, max(1, MOST_SUMS // max(1, sums)))
    while -(-stop // length) - start // length > most:
        level, length = level + 1, 2 * length
    return level


def cut_rows(rows: tuple[int, int], layout: Layout, level: int) -> NDArray[np.void]:
    """Cut rows into spans, each of which is a node of a level, or what the rows have of it."""
    (start, stop), length = rows, node_rows(layout, level)
    edges = np.arange(start // length * length, stop + length, length, dtype=np.int64)
    return _between(edges.clip(start, stop))


def first_node(rows: tuple[int, int], layout: Layout, level: int) -> int:
    """Return the number on its level of the first node that has some of the rows."""
    return rows[0] // node_rows(layout, level)


def _between(edges: NDArray[np.int64]) -> NDArray[np.void]:
    """Return the ranges from each edge to the next."""
    ranges = np.empty(len(edges) - 1, dtype=RANGE)
    ranges["start"], ranges["stop"] = edges[:-1], edges[1:]
    return ranges


_WEIGHTS: Final = np.ones(256)
for _row in OPERATORS.values():
    _called = {name for name in KERNEL_FUNCTIONS if re.search(rf"\b{name}\(", _row.kernel)}
    if not _called <= _CHEAP:
        _WEIGHTS[_row.code] = _DEAREST if _called & _SCALAR else _DEAR


def weights_of(batch: Batch) -> NDArray[np.float64]:
    """Estimate how many times as long a token of each program takes as an addition does."""
    return np.asarray(np.add.reduceat(_WEIGHTS[batch.codes], batch.starts[:-1]) / batch.lengths)


def cut_instances(
    tokens: NDArray[np.int64],
    weights: NDArray[np.float64],
    invariants: NDArray[np.int64],
    vectors: int,
    rows: tuple[int, int],
    layout: Layout,
    level: int,
) -> Cut:
    """Cut rows into nodes of a level, and the instances of programs into ranges of equal time.

    The time of a program's tokens follows from their number and from their ``weights``. The cost of
    the cut counts the tokens alone, of which engines measure how many they compute in a second.
    """
    spans = cut_rows(rows, layout, level)
    times = np.repeat(tokens * weights, vectors)
    tokens, invariants = np.repeat(tokens, vectors), np.repeat(invariants, vectors)
    total = int(tokens.sum()) * (rows[1] - rows[0])
    span = int(spans["stop"][0] - spans["start"][0])
    mean = int(tokens.sum()) // max(1, len(tokens))
    few_instances = min(_INSTANCES_A_CHUNK * mean * span, _MOST_FOR_INSTANCES)
    chunk = max(min(total // _MANY_CHUNKS, _LARGEST_CHUNK), _LEAST_CHUNK)
    if total > _MANY_CHUNKS * few_instances:
        chunk = max(chunk, few_instances)
    share = times * (span / chunk) + invariants / _CHUNK_INVARIANTS
    return Cut(_grouped(np.cumsum(share).astype(np.int64)), spans, total, level)


def _grouped(groups: NDArray[np.int64]) -> NDArray[np.void]:
    """Return the ranges of equal numbers."""
    return _between(np.concatenate([[0], np.flatnonzero(np.diff(groups)) + 1, [len(groups)]]))


def lowering_work(
    function: int, batch: Batch, cancelled: NDArray[np.uint8]
) -> tuple[ChunkedWork, Lowered]:
    """Return the work of lowering a checked batch by `lower_chunk`, and what it fills."""
    tokens = len(batch.codes)
    lowered = allocate(len(batch), tokens + len(batch), tokens)
    cut = Cut(cut_programs(batch), ONE_SPAN, tokens * _COST_OF_LOWERING)
    return ChunkedWork(function, lowering_arrays(batch, lowered), cut, cancelled), lowered


def cut_programs(batch: Batch) -> NDArray[np.void]:
    """Cut programs into ranges of about equal length."""
    return _grouped(batch.starts[:-1] // _TOKENS_A_CHUNK)


def new_context(
    dataset: Dataset, evaluation: Evaluation, values: NDArray[Any] | None, level: int
) -> NDArray[np.void]:
    """Return the CONTEXT of an evaluation, without losses and derivatives."""
    layout, batch = dataset.layout, evaluation.batch
    context = np.zeros(1, dtype=CONTEXT)
    context["item_bytes"] = layout.dtype.itemsize
    first, pitch = dataset.matrix.ctypes.data, layout.rows * layout.dtype.itemsize
    context["variables"], context["variable_pitch"] = first, pitch
    # Target and weights are the columns behind the variables.
    context["target"] = first + layout.variables * pitch if layout.has_target else 0
    context["weights"] = first + (len(dataset.matrix) - 1) * pitch if layout.has_weights else 0
    context["values"] = 0 if values is None else values.ctypes.data
    context["vectors"], context["instances"] = batch.vectors, len(batch) * batch.vectors
    context["row_start"], context["row_stop"] = evaluation.row_range(layout)
    context["block_rows"], context["levels"] = block_rows(layout), level + 1
    return context


# ---------------------------------------------------------------------- reductions and moments

#: Sums that are added side by side, so that one addition need not wait for the other.
_LANES: Final = 4
#: Numbers of an instance's reductions: least, greatest, number of non-finite values.
REDUCTIONS: Final = 3
#: Numbers of an instance's moments: sum of weights; means of values and target; sums of squares of
#: both and of products; what the best line leaves of the target's squares; and the first row's
#: value and target, from which the means are counted, so that a large mean costs no digits.
MOMENTS: Final = 9
_TOTAL, _MEAN_F, _MEAN_Y, _SQUARES_F, _SQUARES_Y, _PRODUCTS, _RESIDUAL = range(7)
_FIRST_F, _FIRST_Y = 7, 8


@inlined
def add_reductions(address: int, item_bytes: int, count: int, found: Any, is_first: bool) -> float:
    """Add a block of values to an instance's reductions and return their sum."""
    if is_first:
        found[0], found[1], found[2] = np.inf, -np.inf, 0.0
    if item_bytes == 4:
        return float(_reduce(carray(pointer32(address), count), found))
    return float(_reduce(carray(pointer64(address), count), found))


@inlined
def _reduce(values: Any, found: Any) -> float:
    total = np.zeros(_LANES)
    least, greatest, strange = found[0], found[1], 0
    for row in range(len(values)):
        value = np.float64(values[row])
        total[row % _LANES] += value
        least = value if value < least or value != value else least
        greatest = value if value > greatest or value != value else greatest
        if not np.isfinite(value):
            strange += 1
    found[0], found[1] = least, greatest
    found[2] += strange
    return float((total[0] + total[1]) + (total[2] + total[3]))


def merge_reductions(total: Floats, parts: Floats, rows: int) -> Floats:
    """Turn sums, [instances], and reductions of spans into those of `Outputs`, [instances, 5]."""
    with np.errstate(all="ignore"):
        least, greatest = parts[:, :, 0].min(axis=0), parts[:, :, 1].max(axis=0)
        strange = parts[:, :, 2].sum(axis=0)
        found = np.stack([total, total / rows, least, greatest, strange], axis=1)
    # Which NaN or zero of several is the least, with its sign, is up to NumPy.
    return np.where(np.isnan(found), np.nan, found + 0.0)


@inlined
def add_moments(f: int, y: int, w: int, item_bytes: int, count: int, moments: Any) -> None:
    """Add a block of values, target and weights (none at address 0) to an instance's moments."""
    block = np.zeros(MOMENTS)
    if item_bytes == 4:
        _measure(
            carray(pointer32(f), count), carray(pointer32(y), count),
            carray(pointer32(w if w else y), count), w != 0, block,
        )  # fmt: skip
    else:
        _measure(
            carray(pointer64(f), count), carray(pointer64(y), count),
            carray(pointer64(w if w else y), count), w != 0, block,
        )  # fmt: skip
    _merge(moments, block)


@inlined
def copy(source: Any, target: Any) -> None:
    """Copy numbers one by one; to assign to a slice, compiled code may make another copy."""
    for index in range(len(source)):
        target[index] = np.float64(source[index])


@inlined
def _measure(f: Any, y: Any, w: Any, weighted: bool, block: Any) -> None:
    """Compute the moments of a block in three passes, counted from its first row."""
    first_f, first_y = np.float64(f[0]), np.float64(y[0])
    total = sum_f = sum_y = 0.0
    for row in range(len(f)):
        weight = np.float64(w[row]) if weighted else 1.0
        total += weight
        sum_f += weight * (np.float64(f[row]) - first_f)
        sum_y += weight * (np.float64(y[row]) - first_y)
    if total == 0.0 and sum_f == 0.0:
        return
    mean_f, mean_y = sum_f / total, sum_y / total
    squares_f = squares_y = products = 0.0
    for row in range(len(f)):
        weight = np.float64(w[row]) if weighted else 1.0
        df, dy = np.float64(f[row]) - first_f - mean_f, np.float64(y[row]) - first_y - mean_y
        squares_f += weight * df * df
        squares_y += weight * dy * dy
        products += weight * df * dy
    slope = products / squares_f if squares_f != 0.0 else 0.0
    residual = 0.0
    for row in range(len(f)):
        weight = np.float64(w[row]) if weighted else 1.0
        df, dy = np.float64(f[row]) - first_f - mean_f, np.float64(y[row]) - first_y - mean_y
        left = dy - slope * df
        residual += weight * left * left
    block[_TOTAL], block[_MEAN_F], block[_MEAN_Y] = total, mean_f, mean_y
    block[_SQUARES_F], block[_SQUARES_Y], block[_PRODUCTS] = squares_f, squares_y, products
    block[_RESIDUAL], block[_FIRST_F], block[_FIRST_Y] = residual, first_f, first_y


@inlined
def _is_empty(moments: Any) -> bool:
    """Whether no row has weight; a mean that is not a number must not be lost."""
    return bool(moments[_TOTAL] == 0.0 and moments[_MEAN_F] == 0.0)


@inlined
def _merge(moments: Any, block: Any) -> None:
    """Merge two sets of moments (Chan, Golub and LeVeque, American Statistician 37, 1983).

    The sum of squares that the best line leaves is merged likewise: it grows by what the best line
    through three points leaves, weighted by the squares and by ``common``; the points stand for the
    two lines and for the step between the two means. By Lagrange's identity that is a sum of
    squares, so that nothing cancels where all points are on one line.
    """
    if _is_empty(moments):
        copy(block, moments)
        return
    if _is_empty(block):
        return
    total = moments[_TOTAL] + block[_TOTAL]
    df = (block[_FIRST_F] - moments[_FIRST_F]) + (block[_MEAN_F] - moments[_MEAN_F])
    dy = (block[_FIRST_Y] - moments[_FIRST_Y]) + (block[_MEAN_Y] - moments[_MEAN_Y])
    share = block[_TOTAL] / total
    common = moments[_TOTAL] * share
    squares, other = moments[_SQUARES_F], block[_SQUARES_F]
    slope = moments[_PRODUCTS] / squares if squares != 0.0 else 0.0
    other_slope = block[_PRODUCTS] / other if other != 0.0 else 0.0
    step = df * df * common
    left, other_left = dy - slope * df, dy - other_slope * df
    turn = slope - other_slope
    whole = squares + other + step
    moments[_RESIDUAL] += block[_RESIDUAL]
    if whole != 0.0:
        moments[_RESIDUAL] += (
            other * (squares / whole) * turn * turn
            + common * (squares / whole) * left * left
            + common * (other / whole) * other_left * other_left
        )
    else:
        moments[_RESIDUAL] += common * dy * dy
    moments[_TOTAL] = total
    moments[_MEAN_F] += df * share
    moments[_MEAN_Y] += dy * share
    moments[_SQUARES_F] = whole
    moments[_SQUARES_Y] += block[_SQUARES_Y] + dy * dy * common
    moments[_PRODUCTS] += block[_PRODUCTS] + df * dy * common


@inlined
def _merge_up(moments: Any, level: int) -> None:
    for instance in range(moments.shape[1]):
        _merge(moments[level + 1, instance], moments[level, instance])
        moments[level, instance] = 0.0


#: For moments, [levels, instances, MOMENTS].
carry_moments, node_moments = tree_of(_merge_up)


@inlined
def merge_spans(moments: Any, first: int) -> None:
    """Merge moments of spans, [spans, instances * MOMENTS], into the first's by the tree of sums.

    ``first`` is the number of the first span on its level.
    """
    last = first + len(moments) - 1
    width = 1
    # Two neighbours may have no ancestor in common but the root.
    while first // width != last // width:
        for index in range(1, len(moments)):
            parent = (first + index) // (2 * width) * (2 * width)
            into = max(parent - first, 0)
            if (first + index) % width == 0 and into < index:
                for begin in range(0, moments.shape[1], MOMENTS):
                    end = begin + MOMENTS
                    _merge(moments[into, begin:end], moments[index, begin:end])
        width *= 2


def from_zero(moments: Floats) -> Floats:
    """Turn moments, [instances, MOMENTS], into those of `Outputs`, [instances, 7]."""
    found = moments[:, : _RESIDUAL + 1].copy()
    with np.errstate(all="ignore"):
        found[:, [_MEAN_F, _MEAN_Y]] += moments[:, [_FIRST_F, _FIRST_Y]]
    # Which of two NaNs a sum keeps, with its sign, is up to the compiled code.
    return np.where(np.isnan(found), np.nan, found)
