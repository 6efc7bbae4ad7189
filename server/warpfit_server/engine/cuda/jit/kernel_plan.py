"""The kernels of a batch: how it is cut into them, cached for when the batch comes again."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Hashable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.ir import Batch
from warpfit.ops import OPERATORS
from warpfit.request import Evaluation, Loss
from warpfit_server.engine.autodiff import BY_PARAMETERS, lower_batch
from warpfit_server.engine.cuda.jit.kernel_store import KernelKey, KernelStore
from warpfit_server.engine.cuda.jit.renderer import Output
from warpfit_server.engine.cuda.runtime.datasets import ResidentDataset
from warpfit_server.engine.interface import Arithmetic
from warpfit_server.engine.lowering import NONE, Lowered, check_tokens
from warpfit_server.shared_batch import BatchSummary, contents

#: Most accumulators of a fused kernel, unless one program alone needs more.
_MAX_SUMS: Final = 24
#: Most programs of a batch that get a kernel each.
_MAX_SINGLE: Final = 4
#: Most tokens of a fused kernel, for each program that it may hold.
_GROUP_TOKENS: Final = 40
#: Captured graphs, and kernel plans, that are kept.
MAX_GRAPHS: Final = 64


@dataclass(frozen=True, slots=True)
class GridLayout:
    """Layout of the rows and programs of a batch on the device."""

    group_size: int
    """Most programs of a fused kernel."""
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
    Arithmetic.FAST: GridLayout(group_size=20, threads=512, blocks=3),
    Arithmetic.PRECISE: GridLayout(group_size=10, threads=1024, blocks=6),
    Arithmetic.DOUBLE: GridLayout(group_size=10, threads=512, blocks=12),
}
#: For batches of cheap operators only, such as ``+ - *``, which are bound by reading variables.
_CHEAP_LAYOUT: Final = GridLayout(group_size=20, threads=512, blocks=2, rows=4)
#: For kernels that sum up gradients: with many accumulators, registers suffice for few threads.
_GRADIENT_LAYOUT: Final = GridLayout(group_size=10, threads=512, blocks=4)


#: Whether a token needs no division and no function but abs, by code; bool [256].
_CHEAP: Final = np.ones(256, dtype=np.bool_)
_CHEAP[
    [
        operator.code
        for operator in OPERATORS.values()
        if "/" in operator.kernel or {*re.findall(r"(\w+)\(", operator.kernel)} - {"abs", "select"}
    ]
] = False


def best_layout(
    arithmetic: Arithmetic, codes: NDArray[np.uint8], *, gradient: bool = False
) -> GridLayout:
    """Choose the layout of fused kernels for programs with these tokens."""
    if gradient:
        return _GRADIENT_LAYOUT
    cheap = arithmetic is not Arithmetic.DOUBLE and bool(_CHEAP[codes].all())
    return _CHEAP_LAYOUT if cheap else _LAYOUTS[arithmetic]


@dataclass(frozen=True, slots=True, eq=False)
class KernelInputs:
    """Numbers that the kernels of a batch read for each parameter vector.

    They are taken from `Batch.parameters`, [K * parameters], followed by the constants. Vector v
    has input i at ``numbers[i] + (K - 1) * firsts[i] + v * steps[i]``.
    """

    starts: NDArray[np.int64]
    """Index of each program's first input, and the total; [programs + 1]."""
    constants: NDArray[np.float64]
    """[inputs], of which those that are constants are read."""
    numbers: NDArray[np.int64]
    firsts: NDArray[np.int64]
    steps: NDArray[np.int64]

    @classmethod
    def of(cls, lowered: Lowered, batch: Batch) -> KernelInputs:
        """Return the inputs that the programs of a batch load."""
        loads, counts = lowered.loads, lowered.headers["loads"]
        sizes = batch.parameter_counts.astype(np.int64)
        program = np.repeat(np.arange(len(batch)), counts)
        is_constant = loads["parameter"] == NONE
        firsts = np.where(is_constant, sizes.sum(), (np.cumsum(sizes) - sizes)[program])
        index = np.where(is_constant, np.arange(len(loads)), loads["parameter"])
        return cls(
            starts=np.concatenate([[0], np.cumsum(counts)]),
            constants=loads["value"].copy(),
            numbers=firsts + index,
            firsts=firsts,
            steps=np.where(is_constant, 0, sizes[program]),
        )

    def fill(self, batch: Batch, inputs: NDArray[Any]) -> None:
        """Fill inputs, [K, inputs], with the numbers of this batch or one of the same tokens."""
        places = self.numbers
        if batch.vectors > 1:
            vectors = np.arange(batch.vectors)[:, np.newaxis]
            places = places + (batch.vectors - 1) * self.firsts + vectors * self.steps
        inputs[:] = np.concatenate([batch.parameters, self.constants])[places]


@dataclass(frozen=True, slots=True, eq=False)
class KernelPlan:
    """The kernels of a batch, and where each puts its sums."""

    content: tuple[bytes, ...]
    """Tokens of the batch that was planned, from `contents`."""
    inputs: KernelInputs
    derivatives: NDArray[np.int64]
    """Program and parameter of each derivative that is summed; [derivatives, 2]."""
    arithmetic: Arithmetic
    output: Output
    layout: GridLayout
    keys: tuple[KernelKey, ...]
    firsts: tuple[int, ...]
    """Index of each kernel's first program."""
    sum_starts: NDArray[np.int64]
    """Index of each program's first sum, that of its loss, and the total; [programs + 1]."""
    shares: NDArray[np.float64]
    """Share of each kernel in the work of a row; [kernels]."""
    name: bytes
    """Hash of the keys."""

    def is_for(self, batch: Batch) -> bool:
        """Return whether a batch has the same tokens; its parameters may differ."""
        return self.content == contents(batch)

    def blocks(self, vectors: int, most: int, total: int) -> tuple[int, ...]:
        """Return the blocks of each kernel, at most ``most``, by its share of the work.

        ``total`` are those of all kernels and vectors that the device should have.
        """
        shared = np.rint(max(1, total // vectors) * self.shares)
        return tuple(np.minimum(np.maximum(shared, 1), most).astype(int).tolist())


def make_plan(
    kernels: KernelStore, resident: ResidentDataset, evaluation: Evaluation
) -> KernelPlan:
    """Cut an evaluation into kernels of several programs, or of one each.

    The few programs of a small batch get a kernel each, which other batches share. For many
    programs, single kernels never pay: capturing their graph (2 ms for 300) costs more than
    interpreting, and fused kernels are 2 to 5 times faster once a batch repeats.

    Raises:
        ProgramError: for the first bad token.
    """
    layout, batch = resident.dataset.layout, evaluation.batch
    check_tokens(batch, layout.variables)
    arithmetic = Arithmetic.of(layout.dtype, evaluation.precision)
    grid = best_layout(arithmetic, batch.codes, gradient=evaluation.gradient)
    output = Output(
        values=evaluation.values,
        loss={None: "", Loss.MAE: "absolute"}.get(evaluation.loss, "squares"),
        weighted=evaluation.loss is not None and layout.has_weights,
        gradient=evaluation.gradient,
        threads=grid.threads,
        rows=min(grid.rows, 16 // arithmetic.dtype.itemsize),
    )
    grid = grid if len(batch) > _MAX_SINGLE else replace(grid, group_size=1)
    lowered = lower_batch(batch, BY_PARAMETERS * output.gradient)
    headers = lowered.headers
    owners = np.repeat(np.arange(len(batch)), headers["entries"])
    derivatives = np.unique(np.stack([owners, lowered.entries["leaf"]], axis=1), axis=0)
    sums = np.bincount(derivatives[:, 0], minlength=len(batch)) + bool(output.loss)
    firsts = _cut_groups(batch.lengths.tolist(), sums.tolist(), grid.group_size)
    groups = [lowered.part(first, stop) for first, stop in pairwise((*firsts, len(batch)))]
    keys = tuple(kernels.key(arithmetic, output, group) for group in groups)
    lengths = kernels.instruction_lengths(arithmetic, output)
    before = np.concatenate([[0.0], np.cumsum(lengths[lowered.instructions["code"]])])
    work = np.add.reduceat(before[headers["end"]] - before[headers["prologue_end"]], firsts)
    name = hashlib.blake2b("\0".join(key.text for key in keys).encode(), digest_size=16)
    return KernelPlan(
        content=contents(batch),
        inputs=KernelInputs.of(lowered, batch),
        derivatives=derivatives,
        arithmetic=arithmetic,
        output=output,
        layout=grid,
        keys=keys,
        firsts=tuple(firsts),
        sum_starts=np.concatenate([[0], np.cumsum(sums)]),
        shares=work / work.sum(),
        name=name.digest(),
    )


def _cut_groups(lengths: list[int], sums: list[int], size: int) -> list[int]:
    """Cut consecutive programs into groups, bounded in number, tokens and sums."""
    firsts, group_tokens, group_sums = [0], 0, 0
    for index, (tokens, count) in enumerate(zip(lengths, sums, strict=True)):
        full = index - firsts[-1] >= size or group_sums + count > max(_MAX_SUMS, size)
        if index > firsts[-1] and (full or group_tokens + tokens > _GROUP_TOKENS * size):
            firsts.append(index)
            group_tokens = group_sums = 0
        group_tokens += tokens
        group_sums += count
    return firsts


def plan_key(resident: ResidentDataset, evaluation: Evaluation) -> Hashable:
    """Return what a plan depends on; batches of the same `BatchSummary.identity` may differ."""
    layout, identity = resident.dataset.layout, BatchSummary.of(evaluation.batch).identity
    wanted = (evaluation.precision, evaluation.values, evaluation.loss, evaluation.gradient)
    columns = (layout.dtype.str, layout.variables, layout.has_weights)
    return (identity, *columns, *wanted)
