"""An evaluation of the compiled tier, cut into kernels and kept for its repetitions."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Final

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

from warpfit.ir import Batch
from warpfit.request import Evaluation, Loss
from warpfit_server.engine.cuda.jit.device_library import Mode
from warpfit_server.engine.cuda.jit.grid_layout import GridLayout, best_layout, shared_out
from warpfit_server.engine.cuda.jit.kernel_store import KernelKey, KernelStore
from warpfit_server.engine.cuda.jit.ptx import Output, sum_count
from warpfit_server.engine.cuda.jit.shapes import LiftedBatch, Shape, lift
from warpfit_server.engine.cuda.runtime.resident_data import ResidentDataset
from warpfit_server.engine.native import numba_cache
from warpfit_server.engine.validate import check_sound

#: Most accumulators of a fused kernel, unless one expression alone needs more.
_MOST_SUMS: Final = 24
#: Most expressions of a batch that get a kernel each.
_SINGLE: Final = 4
#: Layouts of a batch's blocks that are remembered.
_REMEMBERED_BLOCKS: Final = 64


@dataclass(frozen=True, slots=True)
class CompiledTuning:
    """Limits of compiled work, and its layout."""

    layout: GridLayout | None = None
    """Layout of every batch; None for the measured best of its mode."""
    group_tokens: int = 40
    """Most tokens of a fused kernel for each expression that it may hold."""
    chunk_bytes: int = 256 << 20
    """Most bytes of values that one launch leaves on the device."""
    replays: int = 64
    """Captured graphs that are kept."""


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
            len(own) == len(batch)
            and len(own.codes) == len(batch.codes)
            and not differ(own.lengths, batch.lengths)
            and not differ(own.parameter_counts, batch.parameter_counts)
            and not differ(own.codes, batch.codes)
            and not differ(own.values.view(np.uint64), batch.values.view(np.uint64))
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


class Preparer:
    """Cuts evaluations into kernels and keeps them; safe to call from several threads.

    Args:
        kernels: where kernels come from.
        tuning: layout of the work.

    """

    def __init__(self, kernels: KernelStore, tuning: CompiledTuning) -> None:
        self._kernels = kernels
        self._tuning = tuning
        self._lock = threading.Lock()
        self._prepared: LRUCache[Hashable, Prepared] = LRUCache(tuning.replays)

    def known(
        self, resident: ResidentDataset, evaluation: Evaluation, mark: int
    ) -> Prepared | None:
        """Find what was prepared for the same evaluation, parameters and rows aside.

        Args:
            resident: the data set.
            evaluation: what is wanted.
            mark: `fingerprint` of its batch.

        """
        with self._lock:
            found = self._prepared.get(_identity(resident, evaluation, mark))
        return found if found is not None and found.is_of(evaluation.batch) else None

    def prepare(self, resident: ResidentDataset, evaluation: Evaluation, mark: int) -> Prepared:
        """Cut an evaluation into kernels: groups of several expressions, or one for each.

        A batch of few expressions gets a kernel for each, which other batches share. For many, a
        fresh set of single kernels never pays: capturing their graph (2 ms for 300) costs more
        than interpreting, and fused kernels are 2 to 5 times faster once a batch repeats.

        Args:
            resident: the data set.
            evaluation: what is wanted.
            mark: `fingerprint` of its batch.

        Raises:
            ProgramError: for the first bad token.

        """
        prepared = self._cut_evaluation(resident, evaluation)
        with self._lock:
            self._prepared[_identity(resident, evaluation, mark)] = prepared
        return prepared

    def _cut_evaluation(self, resident: ResidentDataset, evaluation: Evaluation) -> Prepared:
        layout, batch = resident.dataset.layout, evaluation.batch
        check_sound(batch, layout.variables)
        mode = Mode.of(layout.dtype, evaluation.precision)
        grid = self._tuning.layout or best_layout(mode, batch.codes, gradient=evaluation.gradient)
        output = Output(
            values=evaluation.values,
            loss=_sum_kind(evaluation.loss),
            weighted=evaluation.loss is not None and layout.has_weights,
            gradient=evaluation.gradient,
            threads=grid.threads,
            rows=min(grid.rows, 16 // mode.dtype.itemsize),
        )
        grid = grid if len(batch) > _SINGLE else replace(grid, group_size=1)
        lifted = lift(batch)
        lifted = lifted.with_derivatives() if output.gradient else lifted
        return self._cut(batch, lifted, mode, output, grid)

    def _cut(
        self, batch: Batch, lifted: LiftedBatch, mode: Mode, output: Output, grid: GridLayout
    ) -> Prepared:
        counts = [sum_count(output, shape) for shape in lifted.shapes]
        firsts = tuple(self._firsts(lifted.shapes, counts, grid.group_size))
        bounds = (*firsts, len(lifted.shapes))
        keys = tuple(
            self._kernels.key(mode, output, lifted.shapes[first:stop])
            for first, stop in pairwise(bounds)
        )
        work = np.add.reduceat(self._kernels.work(mode, lifted.shapes), firsts)
        starts = np.concatenate([[0], np.cumsum(counts)])
        name = hashlib.blake2b("\0".join(key.text for key in keys).encode(), digest_size=16)
        return Prepared(
            batch=batch.without_parameters(),
            lifted=lifted,
            mode=mode,
            output=output,
            layout=grid,
            keys=keys,
            firsts=firsts,
            sum_starts=starts,
            shares=work / work.sum(),
            name=name.digest(),
        )

    def _firsts(self, shapes: Sequence[Shape], counts: Sequence[int], size: int) -> list[int]:
        """Cut consecutive expressions into groups, bounded in number, tokens and sums."""
        firsts, tokens, sums = [0], 0, 0
        for index, (shape, count) in enumerate(zip(shapes, counts, strict=True)):
            full = index - firsts[-1] >= size or sums + count > max(_MOST_SUMS, size)
            if index > firsts[-1] and (
                full or tokens + len(shape.codes) > self._tuning.group_tokens * size
            ):
                firsts.append(index)
                tokens = sums = 0
            tokens += len(shape.codes)
            sums += count
        return firsts


def _identity(resident: ResidentDataset, evaluation: Evaluation, mark: int) -> Hashable:
    """Tell what kernels depend on; batches that share it may still differ, see `is_of`."""
    layout = resident.dataset.layout
    wanted = (evaluation.precision, evaluation.values, evaluation.loss, evaluation.gradient)
    columns = (layout.dtype.str, layout.variables, layout.has_weights)
    return (mark, *columns, *wanted)


def _sum_kind(loss: Loss | None) -> str:
    if loss is None:
        return ""
    return "absolute" if loss is Loss.MAE else "squares"


@numba_cache.njit()  # type: ignore[untyped-decorator]
def differ(ours: NDArray[Any], others: NDArray[Any]) -> bool:
    """Compare arrays of integers, as long as each other.

    It keeps the interpreter lock: to get that back may take longer than to compare.
    """
    difference = ours.dtype.type(0)
    for index in range(len(ours)):
        difference |= ours[index] ^ others[index]
    return bool(difference != 0)
