"""An evaluation of the compiled tier, cut into kernels and kept for its repetitions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

from warpfit.ir import Batch
from warpfit_server.engine.cuda.kernels import KernelKey
from warpfit_server.engine.cuda.layout import GridLayout, shared_out
from warpfit_server.engine.cuda.library import Mode
from warpfit_server.engine.cuda.ptx import Output
from warpfit_server.engine.cuda.shapes import LiftedBatch

#: Layouts of a batch's blocks that are remembered.
_REMEMBERED_BLOCKS: Final = 64


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """An evaluation cut into kernels."""

    batch: Batch
    """The batch that it was made for, without its parameters."""
    lifted: LiftedBatch
    mode: Mode
    output: Output
    layout: GridLayout
    keys: tuple[KernelKey, ...]
    firsts: tuple[int, ...]
    """Index of each kernel's first expression."""
    sum_starts: NDArray[np.int64]
    """Index of each expression's first sum, and the total; [programs + 1]."""
    shares: NDArray[np.float64]
    """Share of each kernel in the work of a row; [kernels]."""
    name: bytes
    """Hash of the keys."""
    _blocks: LRUCache[tuple[int, int], tuple[int, ...]] = field(
        default_factory=lambda: LRUCache(_REMEMBERED_BLOCKS)
    )

    def is_of(self, batch: Batch) -> bool:
        """Tell whether a batch is the same, parameters aside."""
        own = self.batch
        return (
            np.array_equal(own.lengths, batch.lengths)
            and np.array_equal(own.parameter_counts, batch.parameter_counts)
            and np.array_equal(own.codes, batch.codes)
            and np.array_equal(own.values.view(np.uint64), batch.values.view(np.uint64))
        )

    def blocks(self, vectors: int, most: int, total: int) -> tuple[int, ...]:
        """Blocks of each kernel: by its share of the work; called by one thread at a time.

        Args:
            vectors: parameter vectors.
            most: most blocks of a kernel.
            total: blocks of all kernels and vectors that the device should have.

        """
        known = self._blocks.get((vectors, most))
        if known is None:
            shared = shared_out(max(1, total // vectors), self.shares)
            known = self._blocks[vectors, most] = tuple(np.clip(shared, 1, most).tolist())
        return known
