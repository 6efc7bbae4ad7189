"""The kernels of a batch: how it is cut into them, cached for when the batch comes again."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from warpfit.ir import Batch
from warpfit.ops import OPERATORS
from warpfit.request import Evaluation, Loss
from warpfit_server.engine.cuda.jit.kernel_interface import Output, sum_count
from warpfit_server.engine.cuda.jit.kernel_store import KernelKey, KernelStore
from warpfit_server.engine.cuda.jit.shapes import BatchShapes, Shape, shapes_of_batch
from warpfit_server.engine.cuda.math.modes import Mode
from warpfit_server.engine.cuda.runtime.resident_data import ResidentDataset
from warpfit_server.engine.lowering.validate import check_tokens
from warpfit_server.engine.lowering_cache import content_of
from warpfit_server.engine.native import numba_cache

#: Most accumulators of a fused kernel, unless one expression alone needs more.
_MAX_SUMS: Final = 24
#: Most expressions of a batch that get a kernel each.
_MAX_SINGLE: Final = 4
#: Most tokens of a fused kernel, for each expression that it may hold.
_GROUP_TOKENS: Final = 40
#: Captured graphs, and kernel plans, that are kept.
MAX_GRAPHS: Final = 64


@dataclass(frozen=True, slots=True)
class GridLayout:
    """Layout of the rows and expressions of a batch on the device."""

    group_size: int
    """Most expressions of a fused kernel."""
    threads: int
    """Threads of a block. Many, because blocks of different kernels on one multiprocessor evict
    each other's instructions from its cache: with 128 threads, fast kernels run at half and precise
    ones at a quarter of the rate."""
    blocks: int
    """Blocks of all kernels for each multiprocessor, divided by the kernels' work."""
    rows: int = 1
    """Rows a thread works on at a time: 1, 2 or 4, at most 2 in float64."""


#: Layouts for fused kernels, the measured best on one H200.
_LAYOUTS: Final = {
    Mode.FAST: GridLayout(group_size=20, threads=512, blocks=3),
    Mode.PRECISE: GridLayout(group_size=10, threads=1024, blocks=6),
    Mode.DOUBLE: GridLayout(group_size=10, threads=512, blocks=12),
}
#: For batches of cheap operators only, such as ``+ - *``, which are bound by reading variables.
_CHEAP_LAYOUT: Final = GridLayout(group_size=20, threads=512, blocks=2, rows=4)
#: For kernels that sum up gradients: with many accumulators, registers suffice for few threads.
_GRADIENT_LAYOUT: Final = GridLayout(group_size=10, threads=512, blocks=4)


def _cheap_codes() -> NDArray[np.bool_]:
    """Return whether a token needs no division and no function but abs, by code; bool [256]."""
    cheap = np.ones(256, dtype=np.bool_)
    for operator in OPERATORS.values():
        called = set(re.findall(r"(\w+)\(", operator.kernel)) - {"abs", "select"}
        cheap[operator.code] = not called and "/" not in operator.kernel
    return cheap


_CHEAP: Final = _cheap_codes()


def best_layout(mode: Mode, codes: NDArray[np.uint8], *, gradient: bool = False) -> GridLayout:
    """Choose the layout of fused kernels for expressions with these tokens."""
    if gradient:
        return _GRADIENT_LAYOUT
    cheap = mode is not Mode.DOUBLE and bool(_CHEAP[codes].all())
    return _CHEAP_LAYOUT if cheap else _LAYOUTS[mode]


@dataclass(frozen=True, slots=True, eq=False)
class KernelPlan:
    """The kernels of a batch, and where each puts its sums."""

    content: tuple[bytes, ...]
    """Tokens of the batch that was planned, from `content_of`."""
    shapes: BatchShapes
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

    def is_for(self, batch: Batch) -> bool:
        """Return whether a batch has the same tokens; its parameters may differ."""
        return self.content == content_of(batch)

    def blocks(self, vectors: int, most: int, total: int) -> tuple[int, ...]:
        """Return the blocks of each kernel, at most ``most``, by its share of the work.

        ``total`` are those of all kernels and vectors that the device should have.
        """
        shared = np.rint(max(1, total // vectors) * self.shares)
        return tuple(np.minimum(np.maximum(shared, 1), most).astype(int).tolist())


def make_plan(
    kernels: KernelStore, resident: ResidentDataset, evaluation: Evaluation
) -> KernelPlan:
    """Cut an evaluation into kernels of several expressions, or of one each.

    The few expressions of a small batch get a kernel each, which other batches share. For many
    expressions, single kernels never pay: capturing their graph (2 ms for 300) costs more than
    interpreting, and fused kernels are 2 to 5 times faster once a batch repeats.

    Raises:
        ProgramError: for the first bad token.
    """
    layout, batch = resident.dataset.layout, evaluation.batch
    check_tokens(batch, layout.variables)
    mode = Mode.of(layout.dtype, evaluation.precision)
    grid = best_layout(mode, batch.codes, gradient=evaluation.gradient)
    output = Output(
        values=evaluation.values,
        loss=_sum_kind(evaluation.loss),
        weighted=evaluation.loss is not None and layout.has_weights,
        gradient=evaluation.gradient,
        threads=grid.threads,
        rows=min(grid.rows, 16 // mode.dtype.itemsize),
    )
    grid = grid if len(batch) > _MAX_SINGLE else replace(grid, group_size=1)
    batch_shapes = shapes_of_batch(batch)
    batch_shapes = batch_shapes.with_derivatives() if output.gradient else batch_shapes
    shapes = batch_shapes.shapes
    counts = [sum_count(output, shape) for shape in shapes]
    firsts = tuple(_cut_groups(shapes, counts, grid.group_size))
    groups = [shapes[first:stop] for first, stop in pairwise((*firsts, len(shapes)))]
    keys = tuple(kernels.key(mode, output, group) for group in groups)
    work = np.add.reduceat(kernels.work(mode, output, shapes), firsts)
    name = hashlib.blake2b("\0".join(key.text for key in keys).encode(), digest_size=16)
    return KernelPlan(
        content=content_of(batch),
        shapes=batch_shapes,
        mode=mode,
        output=output,
        layout=grid,
        keys=keys,
        firsts=firsts,
        sum_starts=np.concatenate([[0], np.cumsum(counts)]),
        shares=work / work.sum(),
        name=name.digest(),
    )


def _cut_groups(shapes: Sequence[Shape], counts: Sequence[int], size: int) -> list[int]:
    """Cut consecutive expressions into groups, bounded in number, tokens and sums."""
    firsts, tokens, sums = [0], 0, 0
    for index, (shape, count) in enumerate(zip(shapes, counts, strict=True)):
        full = index - firsts[-1] >= size or sums + count > max(_MAX_SUMS, size)
        if index > firsts[-1] and (full or tokens + len(shape.codes) > _GROUP_TOKENS * size):
            firsts.append(index)
            tokens = sums = 0
        tokens += len(shape.codes)
        sums += count
    return firsts


def plan_key(resident: ResidentDataset, evaluation: Evaluation, token_hash: int) -> Hashable:
    """Return what a plan depends on; batches with equal keys may still differ."""
    layout = resident.dataset.layout
    wanted = (evaluation.precision, evaluation.values, evaluation.loss, evaluation.gradient)
    columns = (layout.dtype.str, layout.variables, layout.has_weights)
    return (token_hash, *columns, *wanted)


def _sum_kind(loss: Loss | None) -> str:
    if loss is None:
        return ""
    return "absolute" if loss is Loss.MAE else "squares"


def fingerprint(batch: Batch) -> int:
    """Hash the tokens of a batch, not its parameters.

    Equal hashes mean that a batch has probably been seen before, which is enough to choose a tier;
    a `KernelPlan` compares the tokens themselves.
    """
    return int(_hash_tokens(batch.codes, batch.values.view(np.uint64)) >> np.uint64(1))


@numba_cache.njit()  # type: ignore[untyped-decorator]
def _hash_tokens(codes: NDArray[np.uint8], words: NDArray[np.uint64]) -> np.uint64:
    """Sum a hash of each token and its index, by multiplication with odd constants.

    The first constant is that of Steele et al. 2014, "Fast splittable pseudorandom number
    generators". No step waits for the one before, so 10,000 tokens take 3 microseconds: too short
    to release Python's lock. ``words`` are the bits of the tokens' values.
    """
    total = np.uint64(0)
    for index in range(len(codes)):
        token = np.uint64(index) * np.uint64(256) + np.uint64(codes[index])
        word = words[index] + token * np.uint64(0x9E3779B97F4A7C15)
        word = (word ^ (word >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
        total += word ^ (word >> np.uint64(32))
    return total
