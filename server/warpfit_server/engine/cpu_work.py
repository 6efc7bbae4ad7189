"""An evaluation on the CPU, cut into pieces that threads take one after the other.

A piece is a range of cells (program and parameter vector) over a span of rows. Spans depend on the
number of rows alone, and what is summed for a cell is added up over its spans in their order, so
the results do not depend on the number of threads.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Dataset, Layout
from warpfit.request import Evaluation, Precision
from warpfit_server.engine import cpu_interpret
from warpfit_server.engine.cpu_kernels import Flavour
from warpfit_server.fairness import Turn, current_turn

#: Blocks in a span of rows, and how many spans there are at most.
_SPAN_BLOCKS: Final = 16
_MOST_SPANS: Final = 64
#: Token-rows of a piece, a fraction of a millisecond for little work and half a millisecond or two
#: for much: threads take pieces under Python's lock, for which many of them wait. So many threads
#: take larger ones, up to `_LARGEST_GROWTH` times as large.
_LEAST_PIECE: Final = 1_000_000
_LARGEST_PIECE: Final = 4_000_000
_FEW_THREADS: Final = 4
_LARGEST_GROWTH: Final = 2
#: Pieces to cut at least before they grow.
_MANY_PIECES: Final = 64
#: Scalars of the cells of a piece (64 bytes each): they share the second-level cache with the rows.
_PIECE_SCALARS: Final = 4096


@dataclass(slots=True, eq=False)
class Work:
    """One evaluation cut into pieces, which threads take one after the other."""

    run_piece: Callable[[tuple[int, int], int], bool]
    """Run a range of cells over the span of this index; False if it was cancelled."""
    pieces: list[tuple[int, int]]
    """Cell ranges; piece i is cell range i // spans over span i % spans."""
    spans: list[tuple[int, int]]
    vectors: int
    cost: int
    reported: int = 0
    """Programs that were announced as ready, by the calling thread alone."""
    turn: Turn = field(default_factory=current_turn)
    """Of the evaluation that this is part of."""
    wanted: int = 0
    """Threads that may help; see `warpfit_server.engine.cpu_helpers`, likewise the next."""
    helping: int = 0
    failure: BaseException | None = None
    """What a helping thread raised."""
    _next: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _done: set[int] = field(default_factory=set)
    _finished: int = 0

    @property
    def remaining(self) -> int:
        """Pieces that nobody has taken."""
        return self._pieces - self._next

    def lead(self, ready: Any = None) -> None:
        """Take pieces until none is left, on the calling thread, which reports what is ready.

        While another tenant should go first the thread pauses, as its helpers go to help others.
        """
        while (piece := self._take()) is not None:
            programs = self._run(piece)
            if ready is not None and programs > self.reported:
                self.reported = programs
                ready(programs)
            if self.remaining and self.turn.must_pause():
                self.turn.pause()

    def help(self) -> None:
        """Take pieces until none is left or another tenant should go first."""
        try:
            while not self.turn.must_pause() and (piece := self._take()) is not None:
                self._run(piece)
        except BaseException as error:
            self.failure = error
            self.stop()

    def _run(self, piece: int) -> int:
        """Run a piece; return how many programs are finished, from the first."""
        started = time.perf_counter()
        group, span = divmod(piece, len(self.spans))
        if not self.run_piece(self.pieces[group], span):
            self.stop()
            return 0
        self.turn.charge(time.perf_counter() - started)
        return self._finish(piece)

    def stop(self) -> None:
        """Give out no more pieces."""
        with self._lock:
            self._next = self._pieces

    @property
    def _pieces(self) -> int:
        return len(self.pieces) * len(self.spans)

    def _take(self) -> int | None:
        with self._lock:
            if self._next >= self._pieces:
                return None
            self._next += 1
            return self._next - 1

    def _finish(self, piece: int) -> int:
        """Note that a piece is finished; return how many programs are, from the first."""
        with self._lock:
            self._done.add(piece)
            while self._finished in self._done:
                self._done.remove(self._finished)
                self._finished += 1
            groups = self._finished // len(self.spans)
            return self.pieces[groups - 1][1] // self.vectors if groups else 0


def cut_rows(rows: tuple[int, int], block: int, most: int = _MOST_SPANS) -> list[tuple[int, int]]:
    """Cut the rows into at most ``most`` spans of whole blocks, whatever the threads."""
    start, stop = rows
    blocks = -(-(stop - start) // block)
    length = max(_SPAN_BLOCKS, -(-blocks // min(most, _MOST_SPANS))) * block
    return [(first, min(first + length, stop)) for first in range(start, stop, length)]


def cut_cells(
    tokens: NDArray[np.int64],
    scalars: NDArray[np.int64],
    vectors: int,
    rows: tuple[int, int],
    spans: list[tuple[int, int]],
    threads: int,
) -> tuple[list[tuple[int, int]], int]:
    """Cut the cells into ranges of about equal work; return them and the total of token-rows."""
    largest = _LARGEST_PIECE * min(max(threads // _FEW_THREADS, 1), _LARGEST_GROWTH)
    tokens, scalars = np.repeat(tokens, vectors), np.repeat(scalars, vectors)
    total = int(tokens.sum()) * (rows[1] - rows[0])
    piece = min(max(total // _MANY_PIECES, _LEAST_PIECE), largest)
    share = tokens * ((spans[0][1] - spans[0][0]) / piece) + scalars / _PIECE_SCALARS
    group = np.cumsum(share).astype(np.int64)
    edges = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), len(tokens)]
    return list(itertools.pairwise(edges)), total


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
    """Fill in the entries of `cpu_interpret` that are the same whatever is wanted."""
    layout = dataset.layout
    job[cpu_interpret.ITEMSIZE] = layout.dtype.itemsize
    job[cpu_interpret.VARIABLES] = dataset.matrix.ctypes.data
    job[cpu_interpret.VARIABLE_PITCH] = layout.rows * layout.dtype.itemsize
    job[cpu_interpret.VECTORS] = evaluation.batch.vectors
    rows = evaluation.row_range(layout)
    job[cpu_interpret.ROW_START], job[cpu_interpret.ROW_STOP] = rows
    job[cpu_interpret.BLOCK] = block
    for entry, column in (
        (cpu_interpret.VALUES, values),
        (cpu_interpret.TARGET_ROWS, dataset.target),
        (cpu_interpret.WEIGHT_ROWS, dataset.weights),
    ):
        job[entry] = 0 if column is None else column.ctypes.data
