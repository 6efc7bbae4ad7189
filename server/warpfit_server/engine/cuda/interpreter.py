"""The interpreter tier: any number of fresh expressions in one launch, nothing compiled."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.errors import CancelledError
from warpfit.request import Evaluation, Loss, Precision, Tier, Timings
from warpfit_server.engine.base import Outputs
from warpfit_server.engine.cuda import nvrtc
from warpfit_server.engine.cuda.bytecode import CASES
from warpfit_server.engine.cuda.compile import link
from warpfit_server.engine.cuda.compile import version as link_version
from warpfit_server.engine.cuda.device import CudaDevice, Elapsed, StreamContext
from warpfit_server.engine.cuda.gather import Gather
from warpfit_server.engine.cuda.jump_table import with_jump_table
from warpfit_server.engine.cuda.launch import (
    SLOT_ARGUMENTS,
    Kernels,
    Launch,
    Piece,
    kernel_arguments,
    tiles_of,
)
from warpfit_server.engine.cuda.lower import Lowered, ThreadMemory, lower
from warpfit_server.engine.cuda.resident import ROW_MULTIPLE, ResidentDataset
from warpfit_server.engine.cuda.source import (
    SCRATCH_LEVELS,
    Variant,
    costly_codes,
    interpreter_source,
)
from warpfit_server.engine.cuda.staging import stage

#: Bytes of rows that a thread works on at a time: few for little work, more for much.
_LEAST_BYTES: Final = 16
_MOST_BYTES: Final = 32
_MOST_BYTES_FAST: Final = 64
#: Shared memory of a block that every device grants without asking, less the job counter.
_SHARED_BYTES: Final = 48 * 1024 - 16
#: Most evaluations of one launch, and most bytes of partial sums of one that shares a launch.
_MOST_TOGETHER: Final = 8
_MOST_SHARED_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Tuning:
    """How work is laid out on the device; the defaults are the measured best."""

    rows: int | None = None
    """Rows a thread; None to choose by the size of the evaluation."""
    warps: int | None = None
    """Warps a block, each with a program of its own on the block's rows, at most 8; None for 2 in
    fast mode, and else 1: exact functions are long, and two programs need more of them at a time
    than the cache of instructions holds."""
    jobs_per_warp: int = 2
    """Programs that a warp runs one after the other when there are plenty."""
    chunk_bytes: int = 32 << 20
    """Most bytes of values, or of partial sums, that one launch leaves on the device."""


@dataclass(slots=True)
class _Flight:
    """A launched piece: the event that ends it, and where its results arrive."""

    piece: Piece
    event: str
    values: NDArray[Any] | None = None
    sums: NDArray[np.float64] | None = None


@dataclass(slots=True, eq=False)
class Share:
    """One evaluation of a launch, and what comes of it."""

    resident: ResidentDataset
    evaluation: Evaluation
    lowered: Lowered
    cancelled: NDArray[np.uint8]
    sums: NDArray[np.float64] | None = None
    """Sums of the loss terms of each job, unless the evaluation was cancelled."""
    launched: int = 0
    """``time.perf_counter_ns()`` when the launch had been made."""
    computed: int = 0
    """Nanoseconds of the launch on the device."""


class Interpreter:
    """Evaluates batches by one kernel that reads instructions.

    Losses of small batches that wait at the same time are computed by one launch (see `Gather`).

    A job is one program with one parameter vector; jobs are numbered in wire order,
    ``program * K + vector``. The kernel is compiled for the data type, the precision and the rows
    a thread when one is first needed, and kept on disk.
    """

    def __init__(self, device: CudaDevice, tuning: Tuning | None = None) -> None:
        self._device = device
        self._tuning = tuning or Tuning()
        self._kernels: dict[Variant, Kernels] = {}
        self._lock = threading.Lock()
        self._memory = ThreadMemory()
        self._gather = Gather(self._together, _MOST_TOGETHER)

    def evaluate(
        self, resident: ResidentDataset, evaluation: Evaluation, outputs: Outputs
    ) -> Timings:
        """Evaluate as `warpfit_server.engine.base.Engine.evaluate` does."""
        started = time.perf_counter_ns()
        share = Share(
            resident, evaluation, lower(evaluation.batch, self._memory), outputs.cancelled
        )
        variant = self.variant(resident, evaluation)
        pieces = list(self._pieces(resident, evaluation, variant))
        if len(pieces) == 1 and not evaluation.values:
            self._gather.run(_company(share, variant, pieces[0]), share)
        else:
            self._alone(share, pieces, outputs)
        if share.sums is None:
            raise CancelledError("the evaluation was cancelled", "CANCELLED")
        if outputs.losses is not None and evaluation.loss is not None:
            start, stop = evaluation.row_range(resident.dataset.layout)
            outputs.losses[...] = resident.losses(
                evaluation.loss, share.sums.reshape(outputs.losses.shape), start, stop
            )
        return Timings(
            copy_in=share.launched - started,
            compute=share.computed,
            copy_out=max(0, time.perf_counter_ns() - share.launched - share.computed),
            tier=Tier.INTERPRETER,
        )

    def begin(self, context: StreamContext, shares: Sequence[Share], chunk: int) -> Launch:
        """Upload lowered batches as one, for launches of ``chunk`` jobs each."""
        first = shares[0]
        variant = self.variant(first.resident, first.evaluation)
        kernels = self.prepare(variant)
        batches = [share.evaluation.batch for share in shares]
        costly = any(bool(kernels.costly[batch.codes].any()) for batch in batches)
        levels = max(share.lowered.levels for share in shares)
        lowered = [share.lowered for share in shares]
        slots = sum(len(one.slots) for one in lowered)
        addresses = stage(context, batches, lowered, chunk)
        size = max(1, slots * batches[0].vectors) * variant.dtype.itemsize
        addresses["slots"] = addresses["slot_results"] = context.buffer("slots", size)
        return Launch(
            first.resident,
            first.evaluation,
            variant,
            kernels,
            slots,
            addresses,
            levels + (SCRATCH_LEVELS if costly else 0),
        )

    def variant(self, resident: ResidentDataset, evaluation: Evaluation) -> Variant:
        """Choose the kernel for an evaluation."""
        layout = resident.dataset.layout
        fast = evaluation.precision is Precision.FAST and layout.dtype == np.float32
        precision = Precision.FAST if fast else Precision.PRECISE
        rows = self._tuning.rows or self._rows(
            evaluation, resident, _MOST_BYTES_FAST if fast else _MOST_BYTES
        )
        return Variant(layout.dtype, precision, rows)

    def prepare_all(self) -> None:
        """Load every variant that `variant` chooses; the first start on a machine compiles them."""
        variants = [
            Variant(np.dtype(dtype), precision, size // np.dtype(dtype).itemsize)
            for dtype, precision, sizes in (
                (np.float32, Precision.FAST, (_LEAST_BYTES, _MOST_BYTES_FAST)),
                (np.float32, Precision.PRECISE, (_LEAST_BYTES, _MOST_BYTES)),
                (np.float64, Precision.PRECISE, (_LEAST_BYTES, _MOST_BYTES)),
            )
            for size in sizes
        ]
        with ThreadPoolExecutor(len(variants), "interpreter") as threads:
            list(threads.map(self._load, variants))  # into the cache on disk, side by side
        for variant in variants:
            self.prepare(variant)

    def prepare(self, variant: Variant) -> Kernels:
        """Compile and load the kernels of a variant unless that has been done."""
        with self._lock:
            if variant not in self._kernels:
                module = self._load(variant)
                self._kernels[variant] = Kernels(
                    interpret=module.get_function("interpret"),
                    evaluate_slots=module.get_function("evaluate_slots"),
                    sum_partials=module.get_function("sum_partials"),
                    costly=costly_codes(variant),
                )
            return self._kernels[variant]

    def _load(self, variant: Variant) -> Any:
        architecture = self._device.architecture
        key = [nvrtc.version(), link_version(), str(architecture), *variant.options]
        key.append(interpreter_source(variant))
        return self._device.load(key, lambda: interpreter_cubin(variant, architecture))

    def _rows(self, evaluation: Evaluation, resident: ResidentDataset, most_bytes: int) -> int:
        """More rows a thread share more decoding, but leave fewer warps to fill the device."""
        layout = resident.dataset.layout
        programs, vectors, rows = evaluation.shape(layout)
        per_thread = programs * vectors * rows / (32 * 32 * self._device.multiprocessors)
        most = most_bytes // layout.dtype.itemsize
        return most if per_thread >= most else _LEAST_BYTES // layout.dtype.itemsize

    def _pieces(
        self, resident: ResidentDataset, evaluation: Evaluation, variant: Variant
    ) -> Iterator[Piece]:
        """Cut the evaluation so that the results of one launch stay within the chunk size."""
        programs, vectors, _ = evaluation.shape(resident.dataset.layout)
        start, stop = evaluation.row_range(resident.dataset.layout)
        tiles = tiles_of(start, stop, variant)
        job_bytes = 8 * tiles
        rows = stop - start
        if evaluation.values:
            job_bytes = max(job_bytes, tiles * variant.tile * variant.dtype.itemsize)
            rows = (
                self._tuning.chunk_bytes // (variant.tile * variant.dtype.itemsize) * variant.tile
            )
        jobs = min(programs * vectors, max(1, self._tuning.chunk_bytes // job_bytes), 1 << 18)
        for first_job in range(0, programs * vectors, jobs):
            for row in range(start, stop, rows):
                yield Piece(
                    first_job,
                    min(jobs, programs * vectors - first_job),
                    row,
                    min(row + rows, stop),
                )

    def evaluate_slots(self, context: StreamContext, launch: Launch) -> None:
        """Compute the row-invariant subtrees of all programs."""
        count, vectors = launch.slots, launch.evaluation.batch.vectors
        if not count:
            return
        arguments = np.zeros((), dtype=SLOT_ARGUMENTS)
        for name in ("codes", "values", "parameters", "slots", "results"):
            arguments[name] = launch.addresses[f"slot_{name}"]
        arguments["count"], arguments["vectors"] = count, vectors
        grid = (-(-count // 4), -(-vectors // 32), 1)
        context.launch(launch.kernels.evaluate_slots, grid, (32, 4, 1), [arguments])

    def _together(self, shares: Sequence[Share]) -> None:
        """Compute the losses of one or more evaluations, of the same company, by one launch."""
        shares = [share for share in shares if not share.cancelled[0]]
        if not shares:
            return
        jobs = [len(share.evaluation.batch) * share.evaluation.batch.vectors for share in shares]
        start, stop = shares[0].evaluation.row_range(shares[0].resident.dataset.layout)
        elapsed = Elapsed("start", "computed")
        with self._device.stream() as context:
            with context.in_one_go(elapsed):
                launch = self.begin(context, shares, sum(jobs))
                context.mark("start")
                self.evaluate_slots(context, launch)
                flight = self.start(context, launch, Piece(0, sum(jobs), start, stop), 0)
                launched = time.perf_counter_ns()
            assert flight.sums is not None  # a company asks for losses
            sums = np.split(flight.sums.copy(), np.cumsum(jobs)[:-1])
        for share, part in zip(shares, sums, strict=True):
            share.sums, share.launched, share.computed = part, launched, elapsed.nanoseconds

    def _alone(self, share: Share, pieces: list[Piece], outputs: Outputs) -> None:
        """Launch piece after piece, taking one piece's results in while the next is computed."""
        programs, vectors, _ = share.evaluation.shape(share.resident.dataset.layout)
        sums = np.zeros(programs * vectors)
        with self._device.stream() as context:
            launch = self.begin(context, [share], pieces[0].jobs)
            context.mark("start")
            self.evaluate_slots(context, launch)
            share.launched = time.perf_counter_ns()
            flying: _Flight | None = None
            for number, piece in enumerate(pieces):
                if outputs.cancelled[0]:
                    return
                flight = self.start(context, launch, piece, number % 2)
                if flying is not None:
                    _land(context, launch, flying, outputs, sums)
                flying = flight
            if flying is not None:
                _land(context, launch, flying, outputs, sums)
            share.sums, share.computed = sums, context.nanoseconds("start", "computed")

    def start(self, context: StreamContext, launch: Launch, piece: Piece, side: int) -> _Flight:
        """Launch one piece and the copies of its results; the two sides alternate."""
        dtype = launch.variant.dtype
        aligned = piece.start // ROW_MULTIPLE * ROW_MULTIPLE
        tiles = tiles_of(piece.start, piece.stop, launch.variant)
        pitch = tiles * launch.variant.tile * dtype.itemsize
        arguments = kernel_arguments(launch, piece, aligned, tiles)
        partials = values = 0
        if launch.evaluation.loss is not None:
            partials = context.buffer(f"partials {side}", piece.jobs * tiles * 8)
            arguments["partials"] = partials
        if launch.evaluation.values:
            values = context.buffer(f"values {side}", piece.jobs * pitch)
            arguments["values"] = values
        self.interpret(context, launch, arguments)
        flight = _Flight(piece, f"piece {side}")
        if partials:
            flight.sums = self._sum(context, launch, piece.jobs, tiles, side)
        context.mark("computed")
        if values:
            skipped = (piece.start - aligned) * dtype.itemsize
            flight.values = _staged(context, f"values {side}", piece, dtype)
            context.download_rows(flight.values, values + skipped, pitch)
        context.mark(flight.event)
        return flight

    def interpret(
        self, context: StreamContext, launch: Launch, arguments: NDArray[np.void]
    ) -> None:
        """Launch the interpreter: a block for each tile of rows and group of jobs."""
        level_bytes = launch.variant.tile * launch.variant.dtype.itemsize
        levels = launch.levels
        wanted = self._tuning.warps or (2 if launch.variant.fast else 1)
        warps = min(wanted, _SHARED_BYTES // max(1, levels * level_bytes))
        jobs, tiles = int(arguments["jobs"]), int(arguments["tiles"])
        resident_warps = 32 * self._device.multiprocessors
        rounds = min(self._tuning.jobs_per_warp, max(1, jobs * tiles // resident_warps))
        group = max(warps * rounds, -(-jobs // 0xFFFF))
        arguments["jobs_per_block"] = group
        context.launch(
            launch.kernels.interpret,
            (tiles, -(-jobs // group), 1),
            (32 * warps, 1, 1),
            [arguments],
            16 + warps * levels * level_bytes,
        )

    def _sum(
        self, context: StreamContext, launch: Launch, jobs: int, tiles: int, side: int
    ) -> NDArray[np.float64]:
        """Add the partial sums of each job up; return where the sums will arrive."""
        partials = context.buffer(f"partials {side}", jobs * tiles * 8)
        sums = context.buffer(f"sums {side}", jobs * 8)
        arguments = [np.array(partials, "u8"), np.array(sums, "u8"), np.array(tiles, "i4")]
        context.launch(launch.kernels.sum_partials, (jobs, 1, 1), (128, 1, 1), arguments)
        staged = context.pinned(f"sums {side}", jobs * 8).view(np.float64)
        context.download(staged, sums)
        return staged


def interpreter_cubin(variant: Variant, architecture: int) -> bytes:
    """Compile one variant for compute capability ``architecture``; needs no GPU."""
    ptx = nvrtc.to_ptx(interpreter_source(variant), architecture, variant.options)
    return link(with_jump_table(ptx, CASES), architecture)


def _land(
    context: StreamContext,
    launch: Launch,
    flight: _Flight,
    outputs: Outputs,
    sums: NDArray[np.float64],
) -> None:
    """Wait for a piece and take its results to where they belong."""
    context.wait(flight.event)
    piece = flight.piece
    jobs = slice(piece.first_job, piece.first_job + piece.jobs)
    if flight.sums is not None:
        sums[jobs] += flight.sums
    if flight.values is not None and outputs.values is not None:
        first, stop = launch.evaluation.row_range(launch.resident.dataset.layout)
        rows = slice(piece.start - first, piece.stop - first)
        outputs.values.reshape(len(sums), -1)[jobs, rows] = flight.values
        if piece.stop == stop:
            outputs.ready(jobs.stop // launch.evaluation.batch.vectors)


def _staged(context: StreamContext, name: str, piece: Piece, dtype: np.dtype[Any]) -> NDArray[Any]:
    shape = (piece.jobs, piece.stop - piece.start)
    staging = context.pinned(name, shape[0] * shape[1] * dtype.itemsize)
    return staging.view(dtype).reshape(shape)


def _company(share: Share, variant: Variant, piece: Piece) -> Hashable:
    """Tell evaluations that one launch can compute; one that is large goes alone."""
    evaluation = share.evaluation
    if piece.jobs * tiles_of(piece.start, piece.stop, variant) * 8 > _MOST_SHARED_BYTES:
        return share  # equal to no other
    absolute = evaluation.loss is Loss.MAE
    return (
        *(evaluation.dataset_id, id(share.resident), variant, absolute),
        *(evaluation.batch.vectors, piece.start, piece.stop),
    )
