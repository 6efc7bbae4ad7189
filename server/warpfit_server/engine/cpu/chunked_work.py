"""Work on the CPU, cut into chunks that threads take one after the other.

A chunk is a range of instances (program and parameter vector) over a span of rows. A span is a node
of the tree of `sum_tree`, so that results do not depend on the threads or on how work is cut.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Dataset, Layout
from warpfit.ir import Batch
from warpfit.request import Evaluation
from warpfit_server.engine.autodiff import differentiate
from warpfit_server.engine.cpu.interpreter import CONTEXT
from warpfit_server.engine.lowering import lower
from warpfit_server.engine.lowering.lowered import Lowered, allocate
from warpfit_server.engine.native.arguments import RANGE, argument_block
from warpfit_server.engine.sum_tree import block_rows, node_rows
from warpfit_server.limits import MOST_BLOCKS, MOST_SUMS, spans_of_long_programs

#: Token-rows of a chunk: some 0.2 ms, after which a thread can turn to another tenant's work.
_LEAST_CHUNK: Final = 500_000
_LARGEST_CHUNK: Final = 1_000_000
#: Chunks to cut at least before they grow.
_MANY_CHUNKS: Final = 128
#: Instances of a chunk at least, up to so many token-rows: all of them run over a block of rows
#: that is read from memory once. With two, a million rows take 17 % longer.
_INSTANCES_A_CHUNK: Final = 8
_MOST_FOR_INSTANCES: Final = 4_000_000
#: Tokens that a thread lowers at a time, and token-rows that take about as long as lowering one
#: token, without and with derivatives.
_TOKENS_A_CHUNK: Final = 1000
_COST_OF_LOWERING: Final = 500
_COST_OF_DERIVATIVES: Final = 1500
#: Token-rows that take about as long as making derivatives of a sum over rows.
_COST_OF_A_SUM: Final = 500
#: Token-rows for which waking one more thread takes as long as computing them.
_COST_OF_A_THREAD: Final = 300_000
#: Invariants of a chunk (64 bytes each): they share the second-level cache with the rows.
_CHUNK_INVARIANTS: Final = 4096
#: The spans of work that has no rows.
_ONE_SPAN: Final = np.zeros(1, dtype=RANGE)


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
        """Return the cut of work on so many sums of the same instances, whatever their rows."""
        return Cut(self.ranges, _ONE_SPAN, sums * _COST_OF_A_SUM)


@dataclass(slots=True, eq=False)
class ChunkedWork:
    """Work that threads can share."""

    function: int
    """Address of what runs a chunk; see `warpfit_server.engine.native.arguments`."""
    arrays: tuple[NDArray[Any], ...]
    """Own arrays of its argument block."""
    cut: Cut
    cancelled: NDArray[np.uint8]
    """[1]; not 0 once nobody wants the results any more."""
    block: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.block = argument_block((*self.cut[:2], self.cancelled, *self.arrays))

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return len(self.cut.ranges) * len(self.cut.spans)

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


def cut_instances(
    tokens: NDArray[np.int64],
    invariants: NDArray[np.int64],
    vectors: int,
    rows: tuple[int, int],
    layout: Layout,
    level: int,
) -> Cut:
    """Cut rows into nodes of a level, and the instances of programs into ranges of equal cost."""
    spans = cut_rows(rows, layout, level)
    tokens, invariants = np.repeat(tokens, vectors), np.repeat(invariants, vectors)
    total = int(tokens.sum()) * (rows[1] - rows[0])
    span = int(spans["stop"][0] - spans["start"][0])
    mean = int(tokens.sum()) // max(1, len(tokens))
    few_instances = min(_INSTANCES_A_CHUNK * mean * span, _MOST_FOR_INSTANCES)
    chunk = max(min(total // _MANY_CHUNKS, _LARGEST_CHUNK), _LEAST_CHUNK)
    if total > _MANY_CHUNKS * few_instances:
        chunk = max(chunk, few_instances)
    share = tokens * (span / chunk) + invariants / _CHUNK_INVARIANTS
    return Cut(_grouped(np.cumsum(share).astype(np.int64)), spans, total, level)


def _grouped(groups: NDArray[np.int64]) -> NDArray[np.void]:
    """Return the ranges of equal numbers."""
    return _between(np.concatenate([[0], np.flatnonzero(np.diff(groups)) + 1, [len(groups)]]))


def lowering_work(
    function: int, batch: Batch, cancelled: NDArray[np.uint8]
) -> tuple[ChunkedWork, Lowered]:
    """Return the work of lowering a checked batch by `lower.lower_chunk`, and what it fills."""
    tokens = len(batch.codes)
    lowered = allocate(len(batch), tokens + len(batch), tokens)
    cut = Cut(_cut_programs(batch), _ONE_SPAN, tokens * _COST_OF_LOWERING)
    return ChunkedWork(function, lower.lowering_arrays(batch, lowered), cut, cancelled), lowered


def differentiation_work(
    function: int,
    batch: Batch,
    row_loss: differentiate.RowLossTokens,
    requested: int,
    cancelled: NDArray[np.uint8],
) -> tuple[ChunkedWork, Lowered]:
    """Return the work of `differentiate.differentiate_chunk` on a checked batch, and what it fills.

    ``requested`` are bits of `differentiate`; the row loss is lowered beside each program.
    """
    lowered = differentiate.allocate_differentiated(batch, row_loss)
    arrays = (*differentiate.source_arrays(batch, row_loss, requested), *lowered)
    cut = Cut(_cut_programs(batch), _ONE_SPAN, len(batch.codes) * _COST_OF_DERIVATIVES)
    return ChunkedWork(function, arrays, cut, cancelled), lowered


def _cut_programs(batch: Batch) -> NDArray[np.void]:
    """Cut programs into ranges of about equal length."""
    return _grouped(batch.starts[:-1] // _TOKENS_A_CHUNK)


def new_context(
    dataset: Dataset, evaluation: Evaluation, values: NDArray[Any] | None, level: int
) -> NDArray[np.void]:
    """Return the CONTEXT of an evaluation, without losses and derivatives."""
    layout, batch = dataset.layout, evaluation.batch
    context = np.zeros(1, dtype=CONTEXT)
    context["item_bytes"] = layout.dtype.itemsize
    context["variables"] = dataset.matrix.ctypes.data
    context["variable_pitch"] = layout.rows * layout.dtype.itemsize
    context["vectors"], context["instances"] = batch.vectors, len(batch) * batch.vectors
    context["row_start"], context["row_stop"] = evaluation.row_range(layout)
    context["block_rows"], context["levels"] = block_rows(layout), level + 1
    columns = {"values": values, "target": dataset.target, "weights": dataset.weights}
    for name, column in columns.items():
        context[name] = 0 if column is None else column.ctypes.data
    return context
