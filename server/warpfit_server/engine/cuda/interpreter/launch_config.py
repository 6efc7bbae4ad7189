"""How launches of the interpreter divide their work among blocks and warps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit.request import Evaluation, Loss
from warpfit_server.engine.cuda.interpreter import device_lowering
from warpfit_server.engine.cuda.interpreter.source import SCRATCH_LEVELS, Variant
from warpfit_server.engine.cuda.math.modes import max_token_rows
from warpfit_server.engine.cuda.runtime.batch_layout import BatchBounds
from warpfit_server.engine.cuda.runtime.resident_data import ResidentDataset
from warpfit_server.row_blocks import levels_between, node_rows, nodes_of

#: Shared memory of a block that every device grants without asking, less the job counter.
COUNTER_BYTES: Final = 16
_SHARED_BYTES: Final = 48 * 1024 - COUNTER_BYTES
#: Most launches of one evaluation in one command list.
_MAX_LAUNCHES: Final = 64
#: Warps that a multiprocessor runs at a time.
_RESIDENT_WARPS: Final = 32


@dataclass(frozen=True, slots=True)
class InterpreterKernels:
    """The loaded kernels of one variant."""

    variant: Variant
    interpret: Any
    evaluate_slots: Any
    sum_partials: Any
    lowering: device_lowering.LoweringKernels
    flags: NDArray[np.uint8]
    """Flags of each operator, see `source.operator_flags`."""


class InterpreterGeometry(NamedTuple):
    """Rows of a data set, and how the device divides the work on them; integers."""

    variables: int
    """Address of the first variable, at the first row of the first tile."""
    target: int
    """Likewise of the target; 0: no losses."""
    weights: int
    """Likewise of the weights; 0: all are 1."""
    stride: int
    """Bytes between variables."""
    first_row: int
    """Rows of the first tile to leave out."""
    end_row: int
    """End of the rows, counted from the first row of the first tile."""
    tiles: int
    first_tile: int
    """Number of the first tile, counted from the data set's first row."""
    node_levels: int
    """Levels of the tree of sums above tiles to add up."""
    nodes: int
    """Nodes that have some of the rows at the last of them."""
    absolute: int
    """1 for losses of |f - y|, 0 for (f - y)^2."""
    level_bytes: int
    """Shared memory of one stack level of a warp."""
    max_warps: int
    """Most warps of a block."""
    programs_per_warp: int
    """Most programs that a warp runs one after the other."""
    resident_warps: int
    """Warps that the device runs at a time."""
    max_token_rows: int
    """Most token-rows of a launch that has more than one job."""
    lowering_blocks: int
    """Blocks among which the lowering of a small batch is divided."""

    @classmethod
    def of(
        cls,
        resident: ResidentDataset,
        evaluation: Evaluation,
        variant: Variant,
        max_warps: int,
        programs_per_warp: int,
        multiprocessors: int,
        level: int | None,
    ) -> InterpreterGeometry:
        """Describe the work; losses are summed up of each node of a level, or of all rows."""
        rows, loss = evaluation.row_range(resident.dataset.layout), evaluation.loss
        start, stop = rows
        length = None if level is None else node_rows(resident.dataset.layout, level)
        aligned = start // variant.tile * variant.tile
        itemsize = variant.dtype.itemsize
        return cls(
            variables=resident.address(0, aligned),
            target=0 if loss is None else resident.target_address(aligned),
            weights=0 if loss is None else resident.weights_address(aligned),
            stride=resident.stride * itemsize,
            first_row=start - aligned,
            end_row=stop - aligned,
            tiles=-(-(stop - aligned) // variant.tile),
            first_tile=aligned // variant.tile,
            node_levels=levels_between(variant.tile, length),
            nodes=1 if length is None else len(nodes_of(rows, length)),
            absolute=int(loss is Loss.MAE),
            level_bytes=variant.tile * itemsize,
            max_warps=max_warps,
            programs_per_warp=programs_per_warp,
            resident_warps=_RESIDENT_WARPS * multiprocessors,
            max_token_rows=max_interpreted_token_rows(variant, multiprocessors),
            lowering_blocks=device_lowering.BLOCKS_A_MULTIPROCESSOR * multiprocessors,
        )


def max_interpreted_token_rows(variant: Variant, multiprocessors: int) -> int:
    """Return the most token-rows of a launch; the interpreter runs at half the compiled rate."""
    return max_token_rows(variant.mode, multiprocessors) // 2


class LaunchConfig(NamedTuple):
    """Division of jobs and shared memory among blocks and warps, in integers."""

    jobs: int
    """Jobs of each launch."""
    group: int
    """Programs that are sorted together: all of a launch, or one if a launch has part of one."""
    warps: int
    """Warps of a block."""
    levels: int
    """Stack levels of each warp, scratch levels included."""
    scratch: int
    """Scratch levels."""


def configure_launch(
    geometry: InterpreterGeometry, bounds: BatchBounds, max_jobs: int, programs: int, vectors: int
) -> LaunchConfig:
    """Choose the configuration of a batch's launches, of at most so many jobs.

    The shared memory of a block is large enough for one warp to run any program. Where several
    warps share it, each has the levels that most programs need; the programs that need more are
    sorted to the front and run by one warp, which has all of the block's levels.
    """
    scratch = SCRATCH_LEVELS if bounds.costly else 0
    most, group, jobs = bounds.levels + scratch, 1, max_jobs
    levels = most
    if jobs >= vectors:
        group = min(jobs // vectors, programs)
        jobs = group * vectors
        levels = min(bounds.typical_levels, bounds.levels) + scratch
    warps = max(1, min(geometry.max_warps, _SHARED_BYTES // max(1, levels * geometry.level_bytes)))
    levels = max(levels, -(-most // warps))
    if warps * levels * geometry.level_bytes > _SHARED_BYTES:
        warps, levels = 1, most
    return LaunchConfig(jobs, group, warps, levels, scratch)


def jobs_per_launch(geometry: InterpreterGeometry, tokens: int, jobs: int, vectors: int) -> int:
    """Return the jobs of one launch, so that it does not delay other evaluations for long.

    They are whole programs, of ``vectors`` jobs each, or part of one; the tokens are of all jobs.
    """
    token_rows = tokens * (geometry.end_row - geometry.first_row)
    launches = min(max(1, token_rows // geometry.max_token_rows), jobs, _MAX_LAUNCHES)
    share = -(-jobs // launches)
    return share if share < vectors else -(-share // vectors) * vectors
