"""An evaluation on the CPU, cut into pieces that threads take one after the other.

A piece is a range of cells (program and parameter vector) over a span of rows. Spans depend on the
number of rows alone, and what is summed for a cell is added up over its spans in their order, so
the results do not depend on the number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Dataset, Layout
from warpfit.ir import Batch
from warpfit.request import Evaluation, Precision
from warpfit_server.engine.autodiff import differentiate
from warpfit_server.engine.cpu import interpreter
from warpfit_server.engine.cpu.codegen.kernels import Flavour
from warpfit_server.engine.lowering import lower as cpu_lower
from warpfit_server.engine.lowering.schedule import SCALARS
from warpfit_server.engine.native.records import record_of

#: Blocks in a span of rows, and how many spans there are at most.
_SPAN_BLOCKS: Final = 4
_MOST_SPANS: Final = 64
#: Token-rows of a piece: some 0.2 ms, after which a thread can turn to another tenant's work.
_LEAST_PIECE: Final = 500_000
_LARGEST_PIECE: Final = 1_000_000
#: Pieces to cut at least before they grow.
_MANY_PIECES: Final = 128
#: Cells of a piece at least, up to so many token-rows: all of them run over a block of rows that is
#: read from memory once. With two, a million rows take 17 % longer.
_CELLS_A_PIECE: Final = 8
_MOST_FOR_CELLS: Final = 4_000_000
#: Tokens that a thread lowers at a time, and token-rows that take about as long as lowering one,
#: without and with derivatives.
_TOKENS_A_PIECE: Final = 1000
_COST_OF_LOWERING: Final = 500
_COST_OF_DERIVATIVES: Final = 1500
#: Scalars of the cells of a piece (64 bytes each): they share the second-level cache with the rows.
_PIECE_SCALARS: Final = 4096


@dataclass(slots=True, eq=False)
class Work:
    """One evaluation cut into pieces: every range of cells over every span of rows."""

    function: int
    """Address of what runs a piece; see `warpfit_server.engine.native.records`."""
    arrays: tuple[NDArray[Any], ...]
    """Of its record."""
    cells: NDArray[np.int64]
    """Start and stop of each range of cells, [ranges, 2]."""
    spans: NDArray[np.int64]
    """Start and stop of each span of rows, [spans, 2]."""
    vectors: int
    cost: int
    """Token-rows of all pieces."""
    cancelled: NDArray[np.uint8]
    """[1]; not 0 once nobody wants the results any more."""
    record: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.record = record_of(self.arrays)

    @property
    def pieces(self) -> int:
        """How many there are; piece i is range i // spans over span i % spans."""
        return len(self.cells) * len(self.spans)

    def programs_finished(self, pieces: int) -> int:
        """Count the programs, from the first, that are finished once the first pieces are."""
        groups = pieces // len(self.spans)
        return int(self.cells[groups - 1, 1]) // self.vectors if groups else 0


def span_rows(rows: tuple[int, int], block: int) -> int:
    """Rows of a span where the rows are cut into as many as there may be: the spans of losses."""
    blocks = -(-(rows[1] - rows[0]) // block)
    return max(_SPAN_BLOCKS, -(-blocks // _MOST_SPANS)) * block


def sum_spans(parts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Add up sums of spans, [spans, sums], each in an order that the others do not change."""
    with np.errstate(all="ignore"):
        return np.asarray(np.ascontiguousarray(parts.T).sum(axis=1))


def cut_rows(rows: tuple[int, int], block: int, most: int = _MOST_SPANS) -> NDArray[np.int64]:
    """Cut the rows into at most ``most`` spans of whole blocks; return their edges, [spans, 2].

    Fewer spans than there may be are each made of several whole ones.
    """
    start, stop = rows
    blocks = -(-(stop - start) // block)
    shortest = span_rows(rows, block)
    length = -(-blocks * block // (shortest * min(most, _MOST_SPANS))) * shortest
    edges = np.arange(start, stop + length, length, dtype=np.int64)
    edges[-1] = stop
    return _ranges(edges)


def _ranges(edges: NDArray[np.int64]) -> NDArray[np.int64]:
    """Pair each edge with the next, [ranges, 2]."""
    ranges = np.empty((len(edges) - 1, 2), dtype=np.int64)
    ranges[:, 0], ranges[:, 1] = edges[:-1], edges[1:]
    return ranges


def cut_cells(
    tokens: NDArray[np.int64],
    scalars: NDArray[np.int64],
    vectors: int,
    rows: tuple[int, int],
    spans: NDArray[np.int64],
) -> tuple[NDArray[np.int64], int]:
    """Cut the cells into ranges of about equal work; return their edges and all token-rows."""
    tokens, scalars = np.repeat(tokens, vectors), np.repeat(scalars, vectors)
    total = int(tokens.sum()) * (rows[1] - rows[0])
    span = int(spans[0, 1] - spans[0, 0])
    mean = int(tokens.sum()) // max(1, len(tokens))
    few_cells = min(_CELLS_A_PIECE * mean * span, _MOST_FOR_CELLS)
    piece = max(min(total // _MANY_PIECES, _LARGEST_PIECE), _LEAST_PIECE)
    if total > _MANY_PIECES * few_cells:
        piece = max(piece, few_cells)
    share = tokens * (span / piece) + scalars / _PIECE_SCALARS
    group = np.cumsum(share).astype(np.int64)
    edges = np.concatenate([[0], np.flatnonzero(np.diff(group)) + 1, [len(tokens)]])
    return _ranges(edges), total


class Cut(NamedTuple):
    """How the work of an evaluation is cut; see `Work`."""

    spans: NDArray[np.int64]
    cells: NDArray[np.int64]
    cost: int


class Programs:
    """Lowered programs, and how their work was cut last: it mostly comes again the same."""

    def __init__(self, lowered: cpu_lower.Lowered) -> None:
        self.lowered = lowered
        self._last: tuple[tuple[int, tuple[int, int], int], Cut] | None = None

    def cut(self, vectors: int, rows: tuple[int, int], block: int) -> Cut:
        """Cut the work for so many parameter vectors over a range of rows, in blocks of rows."""
        asked, last = (vectors, rows, block), self._last
        if last is None or last[0] != asked:
            lengths = np.diff(self.lowered.starts)
            spans = cut_rows(rows, block)
            scalars = self.lowered.summaries[:, SCALARS]
            last = asked, Cut(spans, *cut_cells(lengths, scalars, vectors, rows, spans))
            self._last = last
        return last[1]


def lowering(
    function: int, batch: Batch, cancelled: NDArray[np.uint8]
) -> tuple[Work, cpu_lower.Lowered]:
    """Cut the lowering of a checked batch into pieces; see `lower`.

    Args:
        function: address of `lower.lower_piece`.
        batch: to lower.
        cancelled: see `Work`.

    Returns:
        The work, and what it fills.

    """
    tokens, cells = len(batch.codes), _cut_programs(batch.starts)
    lowered = cpu_lower.empty(tokens, batch.starts)
    span = np.array([[0, 1]])
    given = np.ascontiguousarray(batch.codes), np.ascontiguousarray(batch.values)
    arrays = (cells, span, *given, *cpu_lower.TABLES, *lowered)
    return Work(function, arrays, cells, span, 1, tokens * _COST_OF_LOWERING, cancelled), lowered


def differentiating(
    function: int,
    batch: Batch,
    row_loss: differentiate.RowLoss,
    wishes: int,
    cancelled: NDArray[np.uint8],
) -> tuple[Work, differentiate.Differentiated]:
    """Cut the lowering of a checked batch with its derivatives into pieces; see `differentiate`.

    Args:
        function: address of `differentiate.differentiate_piece`.
        batch: to lower.
        row_loss: that is lowered beside each program.
        wishes: see `sweep`.
        cancelled: see `Work`.

    Returns:
        The work, and what it fills.

    """
    tokens, cells = len(batch.codes), _cut_programs(batch.starts)
    lowered = differentiate.empty(tokens, len(batch), len(row_loss.codes))
    arrays = differentiate.arrays_of(batch, row_loss, wishes, cells, lowered)
    cost = tokens * _COST_OF_DERIVATIVES
    return Work(function, arrays, cells, np.array([[0, 1]]), 1, cost, cancelled), lowered


def _cut_programs(starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Cut programs into ranges of about equal length."""
    groups = starts[:-1] // _TOKENS_A_PIECE
    return _ranges(np.concatenate([[0], np.flatnonzero(np.diff(groups)) + 1, [len(starts) - 1]]))


def flavour_of(layout: Layout, precision: Precision) -> Flavour:
    """Choose the kernels for a data set and precision."""
    single = layout.dtype.itemsize == 4
    return Flavour(single, single and precision is Precision.FAST)


def fill_job(
    job: NDArray[np.int64],
    dataset: Dataset,
    evaluation: Evaluation,
    values: NDArray[Any] | None,
    block: int,
) -> None:
    """Fill in the entries of `interpreter` that are the same whatever is wanted."""
    layout = dataset.layout
    job[interpreter.ITEMSIZE] = layout.dtype.itemsize
    job[interpreter.VARIABLES] = dataset.matrix.ctypes.data
    job[interpreter.VARIABLE_PITCH] = layout.rows * layout.dtype.itemsize
    job[interpreter.VECTORS] = evaluation.batch.vectors
    rows = evaluation.row_range(layout)
    job[interpreter.ROW_START], job[interpreter.ROW_STOP] = rows
    job[interpreter.BLOCK] = block
    for entry, column in (
        (interpreter.VALUES, values),
        (interpreter.TARGET_ROWS, dataset.target),
        (interpreter.WEIGHT_ROWS, dataset.weights),
    ):
        job[entry] = 0 if column is None else column.ctypes.data
