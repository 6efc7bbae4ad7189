"""What a launch of the interpreter's kernels is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.request import Evaluation, Loss
from warpfit_server.engine.cuda.resident import ROW_MULTIPLE, ResidentDataset
from warpfit_server.engine.cuda.source import Variant

#: Field by field the structs of interpreter.cu.
_ARGUMENTS: Final = np.dtype(
    [
        *((name, np.uint64) for name in ("instructions", "programs", "order", "slots")),
        *((name, np.uint64) for name in ("variables", "target", "weights", "values", "partials")),
        ("slot_count", np.int64),
        ("stride", np.uint32),
        *((name, np.int32) for name in ("first_row", "end_row", "tiles", "jobs", "first_job")),
        *((name, np.int32) for name in ("jobs_per_block", "vectors", "levels", "absolute")),
    ]
)
SLOT_ARGUMENTS: Final = np.dtype(
    [
        *((name, np.uint64) for name in ("codes", "values", "parameters", "slots", "results")),
        *((name, np.int32) for name in ("count", "vectors")),
    ]
)


@dataclass(frozen=True, slots=True)
class Kernels:
    """The loaded kernels of one variant."""

    interpret: Any
    evaluate_slots: Any
    sum_partials: Any
    costly: NDArray[np.bool_]
    """Whether an operator needs scratch levels, by wire code."""


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """Everything that the launches of one evaluation share."""

    resident: ResidentDataset
    evaluation: Evaluation
    variant: Variant
    kernels: Kernels
    slots: int
    """Row-invariant subtrees."""
    addresses: dict[str, int]
    """Device address of each array that the kernels read."""
    levels: int
    """Stack levels that a warp needs, with scratch if any operator asks for it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Jobs and rows that one launch covers."""

    first_job: int
    jobs: int
    start: int
    stop: int


def tiles_of(start: int, stop: int, variant: Variant) -> int:
    """Tiles that cover a range of rows, from an aligned row on."""
    return -(-(stop - start // ROW_MULTIPLE * ROW_MULTIPLE) // variant.tile)


def kernel_arguments(launch: Launch, piece: Piece, aligned: int, tiles: int) -> NDArray[np.void]:
    """Arguments of `Interpreter.interpret` for one piece, without where results go."""
    resident = launch.resident
    arguments = np.zeros((), dtype=_ARGUMENTS)
    for name in ("instructions", "programs", "order", "slots"):
        arguments[name] = launch.addresses[name]
    arguments["variables"] = resident.address(0, aligned)
    if launch.evaluation.loss is not None:
        arguments["target"] = resident.target_address(aligned)
        arguments["weights"] = resident.weights_address(aligned)
        arguments["absolute"] = launch.evaluation.loss is Loss.MAE
    arguments["stride"] = resident.stride * launch.variant.dtype.itemsize
    arguments["slot_count"] = launch.slots
    arguments["first_row"] = piece.start - aligned
    arguments["end_row"] = piece.stop - aligned
    arguments["tiles"], arguments["jobs"] = tiles, piece.jobs
    arguments["first_job"] = piece.first_job
    arguments["vectors"] = launch.evaluation.batch.vectors
    arguments["levels"] = launch.levels
    return arguments
