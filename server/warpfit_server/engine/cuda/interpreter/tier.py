"""The interpreter tier: any number of fresh expressions in one launch, nothing compiled."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit.errors import CancelledError
from warpfit.ir import Batch
from warpfit.request import Evaluation, Precision, Tier, Timings
from warpfit_server.engine.cuda.interpreter.bytecode import CASES
from warpfit_server.engine.cuda.interpreter.jump_table import with_jump_table
from warpfit_server.engine.cuda.interpreter.launch import losses_in_one_launch
from warpfit_server.engine.cuda.interpreter.launch_arguments import (
    ARGUMENTS,
    SLOT_ARGUMENTS,
    SLOT_THREADS,
    SUM_THREADS,
    Addresses,
    Kernels,
    Piece,
    Shares,
    Work,
    share_out,
    tell_interpreter,
    tell_slots,
    tiles_of,
    token_rows_of_a_launch,
)
from warpfit_server.engine.cuda.interpreter.lowering import (
    NONE,
    LoweringKernels,
    check_length,
    launch_lowering,
    launch_order,
    load_lowering,
    refuse,
)
from warpfit_server.engine.cuda.interpreter.source import (
    Variant,
    interpreter_source,
    operator_flags,
)
from warpfit_server.engine.cuda.runtime import nvrtc
from warpfit_server.engine.cuda.runtime.batch_layout import Extent, Parts, pack, survey
from warpfit_server.engine.cuda.runtime.device import CudaDevice
from warpfit_server.engine.cuda.runtime.nvjitlink import link
from warpfit_server.engine.cuda.runtime.nvjitlink import version as link_version
from warpfit_server.engine.cuda.runtime.resident_data import ResidentDataset
from warpfit_server.engine.cuda.runtime.streams import StreamContext
from warpfit_server.engine.cuda.runtime.tokens import Tokens
from warpfit_server.engine.interface import Outputs, Steps

#: Bytes of rows that a thread works on at a time: few for little work, more for much.
_LEAST_BYTES: Final = 16
_MOST_BYTES: Final = 32
_MOST_BYTES_FAST: Final = 64
#: Threads that fill a multiprocessor.
_FULL_THREADS: Final = 32 * 32
#: Most jobs of one launch.
_MOST_JOBS: Final = 1 << 18


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
class Flight:
    """A launched piece: the event that ends it, and where its results arrive."""

    piece: Piece
    event: str
    values: NDArray[Any] | None = None
    sums: NDArray[np.float64] | None = None


class Outcome(NamedTuple):
    """What pieces have brought."""

    sums: NDArray[np.float64]
    """Sum of the loss terms of each job, [jobs]."""
    launched: int
    """``time.perf_counter_ns()`` when the first piece could be launched."""
    computed: int
    """Nanoseconds of the device."""


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """What all launches of one evaluation share."""

    kernels: Kernels
    batch: Batch
    parts: Parts
    extent: Extent
    shares: Shares
    addresses: Addresses
    unsound: NDArray[np.uint32]
    """First unsound program of each group that is lowered together, once the device was there."""

    def check(self, variables: int) -> None:
        """Check, once the device was there, that the batch could be lowered.

        Raises:
            ProgramError: for the first bad token.
            ResourceExhaustedError: if a variable's index is too large to encode.

        """
        bad = int(self.unsound.min())
        if bad != NONE:
            refuse(self.batch, bad, variables)


class Interpreter:
    """Evaluates batches by one kernel that reads instructions.

    A job is one program with one parameter vector; jobs are numbered in wire order,
    ``program * K + vector``. The kernel is compiled for the data type, the precision and the rows
    a thread when one is first needed, and kept on disk.
    """

    def __init__(self, device: CudaDevice, tuning: Tuning | None = None) -> None:
        self._device = device
        self._tuning = tuning or Tuning()
        self._kernels: dict[Variant, Kernels] = {}
        self._lowering_kernels: LoweringKernels | None = None
        self._lock = threading.Lock()

    def evaluate(
        self, resident: ResidentDataset, evaluation: Evaluation, outputs: Outputs
    ) -> Steps[Timings]:
        """Evaluate as `warpfit_server.engine.interface.Engine.evaluate` does."""
        started = time.perf_counter_ns()
        if outputs.cancelled[0]:
            raise CancelledError("the evaluation was cancelled", "CANCELLED")
        variant = self.variant(resident, evaluation)
        pieces = list(self._pieces(resident, evaluation, variant))
        if len(pieces) == 1 and not evaluation.values and outputs.losses is not None:
            work = self.work(resident, evaluation, pieces[0])
            kernels = self.prepare(variant)
            with self._device.stream() as context:
                return losses_in_one_launch(
                    context, kernels, work, evaluation, resident, outputs, started
                )
        outcome = yield from self._in_pieces(resident, evaluation, pieces, outputs)
        if outputs.losses is not None and evaluation.loss is not None:
            outputs.losses[...] = outcome.sums.reshape(outputs.losses.shape)
        return Timings(
            copy_in=outcome.launched - started,
            compute=outcome.computed,
            copy_out=max(0, time.perf_counter_ns() - outcome.launched - outcome.computed),
            tier=Tier.INTERPRETER,
        )

    def variant(self, resident: ResidentDataset, evaluation: Evaluation) -> Variant:
        """Choose the kernel for an evaluation."""
        layout = resident.dataset.layout
        fast = evaluation.precision is Precision.FAST and layout.dtype == np.float32
        precision = Precision.FAST if fast else Precision.PRECISE
        programs, vectors, _ = evaluation.shape(layout)
        sizes = _least_rows(layout.dtype), _most_rows(layout.dtype, fast)
        is_much = programs * vectors >= self._enough_jobs(resident, evaluation, sizes[1])
        return Variant(layout.dtype, precision, self._tuning.rows or sizes[is_much])

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
        with ThreadPoolExecutor(len(variants) + 1, "interpreter") as threads:
            lowering = threads.submit(load_lowering, self._device)
            list(threads.map(self._load, variants))  # into the cache on disk, side by side
            lowering.result()
        for variant in variants:
            self.prepare(variant)

    def prepare(self, variant: Variant) -> Kernels:
        """Compile and load the kernels of a variant unless that has been done."""
        with self._lock:
            if variant not in self._kernels:
                module = self._load(variant)
                self._kernels[variant] = Kernels(
                    variant=variant,
                    interpret=module.get_function("interpret"),
                    evaluate_slots=module.get_function("evaluate_slots"),
                    sum_partials=module.get_function("sum_partials"),
                    lowering=self._lowering(),
                    flags=operator_flags(variant),
                )
            return self._kernels[variant]

    def _lowering(self) -> LoweringKernels:
        """Load the kernels that all variants share; under the lock."""
        if self._lowering_kernels is None:
            self._lowering_kernels = load_lowering(self._device)
        return self._lowering_kernels

    def _load(self, variant: Variant) -> Any:
        architecture = self._device.architecture
        key = [nvrtc.version(), link_version(), str(architecture), *variant.options]
        key.append(interpreter_source(variant))
        return self._device.load(key, lambda: interpreter_cubin(variant, architecture))

    def _enough_jobs(
        self, resident: ResidentDataset, evaluation: Evaluation, rows_per_thread: int
    ) -> int:
        """Jobs from which on the device is full with so many rows a thread.

        More rows a thread share more decoding, but leave fewer warps to fill the device.
        """
        start, stop = evaluation.row_range(resident.dataset.layout)
        threads = _FULL_THREADS * self._device.multiprocessors
        return -(-rows_per_thread * threads // max(1, stop - start))

    def _pieces(
        self, resident: ResidentDataset, evaluation: Evaluation, variant: Variant
    ) -> Iterator[Piece]:
        """Cut the evaluation so that the results of one launch stay within the chunk size.

        If that takes several launches, none of them keeps other evaluations waiting for long, as in
        `warpfit_server.engine.cuda.interpreter.launch`.
        """
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
        jobs = min(programs * vectors, max(1, self._tuning.chunk_bytes // job_bytes), _MOST_JOBS)
        if jobs < programs * vectors:
            at_once = token_rows_of_a_launch(variant, self._device.multiprocessors)
            work = len(evaluation.batch.codes) * (stop - start)
            jobs = min(jobs, max(1, at_once * programs // work))
        jobs -= jobs % vectors if jobs > vectors else 0
        for first_job in range(0, programs * vectors, jobs):
            for row in range(start, stop, rows):
                yield Piece(
                    first_job,
                    min(jobs, programs * vectors - first_job),
                    row,
                    min(row + rows, stop),
                )

    def work(
        self, resident: ResidentDataset, evaluation: Evaluation, piece: Piece | None = None
    ) -> Work:
        """Describe the work of one launch, which may be for all rows."""
        variant = self.variant(resident, evaluation)
        warps = self._tuning.warps or (2 if variant.fast else 1)
        shares = (warps, self._tuning.jobs_per_warp, self._device.multiprocessors)
        rows = evaluation.row_range(resident.dataset.layout)
        if piece is not None:
            rows = piece.start, piece.stop
        return Work.of(resident, rows, evaluation.loss, variant, shares)

    def _in_pieces(
        self,
        resident: ResidentDataset,
        evaluation: Evaluation,
        pieces: list[Piece],
        outputs: Outputs,
    ) -> Steps[Outcome]:
        """Launch piece after piece, taking one piece's results in while the next is computed."""
        programs, vectors, _ = evaluation.shape(resident.dataset.layout)
        sums = np.zeros(programs * vectors)
        with self._device.stream() as context:
            launch = self.begin(context, resident, evaluation, pieces[0].jobs)
            landing = Landing(resident, evaluation, outputs, sums, launch)
            context.mark("start")
            self.evaluate_slots(context, launch, vectors)
            launched = time.perf_counter_ns()
            flying: Flight | None = None
            for number, piece in enumerate(pieces):
                if outputs.cancelled[0]:
                    raise CancelledError("the evaluation was cancelled", "CANCELLED")
                flight = self.start(context, launch, resident, evaluation, piece, number % 2)
                if flying is not None:
                    landing.take(context, flying)
                    yield None
                    self._device.use()
                flying = flight
            if flying is not None:
                landing.take(context, flying)
            computed = context.nanoseconds("start", "computed")
            return Outcome(sums, launched, computed)

    def begin(
        self,
        context: StreamContext,
        resident: ResidentDataset,
        evaluation: Evaluation,
        chunk: int,
    ) -> Launch:
        """Upload a batch and launch its lowering, for launches of ``chunk`` jobs each.

        Raises:
            ResourceExhaustedError: if a program is too long, or the device has no room.

        """
        batch, variant = evaluation.batch, self.variant(resident, evaluation)
        check_length(batch)
        kernels, tokens, parts = self.prepare(variant), Tokens.of(batch), Parts.of(batch)
        extent, work = survey(tokens, kernels.flags), self.work(resident, evaluation)
        shares = share_out(work, extent, chunk, len(batch), batch.vectors)
        memory = context.pinned("batch", parts.uploaded)
        pack(tokens, parts, memory)
        address = context.buffer("batch", parts.end)
        size = extent.slots * batch.vectors * variant.dtype.itemsize
        slots = context.buffer("slots", max(1, size))
        context.upload(address, memory)
        where = (context, kernels.lowering, batch, address)
        launch_lowering(*where, resident.dataset.layout.variables, work.lowering_blocks)
        unsound = launch_order(*where, shares.group, shares.levels - shares.scratch)
        addresses = Addresses(address, slots, 0, 0)
        return Launch(kernels, batch, parts, extent, shares, addresses, unsound)

    def evaluate_slots(self, context: StreamContext, launch: Launch, vectors: int) -> None:
        """Compute the row-invariant subtrees of all programs."""
        told = np.zeros(1, dtype=SLOT_ARGUMENTS)
        sizes = (launch.extent, len(launch.batch), vectors)
        grid = tell_slots(told, launch.addresses, launch.parts, *sizes)
        context.launch(launch.kernels.evaluate_slots, (*grid, 1), (*SLOT_THREADS, 1), [told[0]])

    def start(
        self,
        context: StreamContext,
        launch: Launch,
        resident: ResidentDataset,
        evaluation: Evaluation,
        piece: Piece,
        side: int,
    ) -> Flight:
        """Launch one piece and the copies of its results; the two sides alternate."""
        dtype = launch.kernels.variant.dtype
        work = self.work(resident, evaluation, piece)
        pitch = work.tiles * launch.kernels.variant.tile * dtype.itemsize
        partials = values = 0
        if evaluation.loss is not None:
            partials = context.buffer(f"partials {side}", piece.jobs * work.tiles * 8)
        if evaluation.values:
            values = context.buffer(f"values {side}", piece.jobs * pitch)
        addresses = launch.addresses._replace(values=values, partials=partials)
        interpret(context, launch, work, addresses, evaluation.batch.vectors, piece)
        flight = Flight(piece, f"piece {side}")
        if partials:
            flight.sums = _add_up(context, launch, work, addresses, piece, side)
        context.mark("computed")
        if values:
            flight.values = _staged(context, f"values {side}", piece, dtype)
            skipped = work.first_row * dtype.itemsize
            context.download_rows(flight.values, values + skipped, pitch)
        context.mark(flight.event)
        return flight


def _least_rows(dtype: np.dtype[Any]) -> int:
    return _LEAST_BYTES // dtype.itemsize


def _most_rows(dtype: np.dtype[Any], fast: bool) -> int:
    return (_MOST_BYTES_FAST if fast else _MOST_BYTES) // dtype.itemsize


def interpret(
    context: StreamContext,
    launch: Launch,
    work: Work,
    addresses: Addresses,
    vectors: int,
    piece: Piece,
) -> None:
    """Launch the interpreter: a block for each tile of rows and group of jobs."""
    told = np.zeros(1, dtype=ARGUMENTS)
    groups, shared = tell_interpreter(
        *(told, work, addresses, launch.parts, launch.extent, launch.shares, vectors),
        (piece.first_job, piece.jobs),
    )
    threads = (32 * launch.shares.warps, 1, 1)
    context.launch(launch.kernels.interpret, (work.tiles, groups, 1), threads, [told[0]], shared)


def _add_up(
    context: StreamContext,
    launch: Launch,
    work: Work,
    addresses: Addresses,
    piece: Piece,
    side: int,
) -> NDArray[np.float64]:
    """Add the partial sums of each job up; return where the sums will arrive."""
    sums = context.pinned(f"sums {side}", piece.jobs * 8).view(np.float64)
    numbers = (addresses.partials, sums.ctypes.data, work.tiles)
    arguments = [np.array(number, dtype=np.int64) for number in numbers]
    context.launch(launch.kernels.sum_partials, (piece.jobs, 1, 1), (SUM_THREADS, 1, 1), arguments)
    return sums


def interpreter_cubin(variant: Variant, architecture: int) -> bytes:
    """Compile one variant for compute capability ``architecture``; needs no GPU."""
    ptx = nvrtc.to_ptx(interpreter_source(variant), architecture, variant.options)
    return link(with_jump_table(ptx, CASES), architecture)


@dataclass(frozen=True, slots=True, eq=False)
class Landing:
    """Takes the results of pieces to where they belong."""

    resident: ResidentDataset
    evaluation: Evaluation
    outputs: Outputs
    sums: NDArray[np.float64]
    launch: Launch

    def take(self, context: StreamContext, flight: Flight) -> None:
        """Wait for a piece and take its results."""
        context.wait(flight.event)
        self.launch.check(self.resident.dataset.layout.variables)
        piece, outputs = flight.piece, self.outputs
        jobs = slice(piece.first_job, piece.first_job + piece.jobs)
        if flight.sums is not None:
            self.sums[jobs] += flight.sums
        if flight.values is not None and outputs.values is not None:
            first, stop = self.evaluation.row_range(self.resident.dataset.layout)
            rows = slice(piece.start - first, piece.stop - first)
            outputs.values.reshape(len(self.sums), -1)[jobs, rows] = flight.values
            if piece.stop == stop:
                outputs.ready(jobs.stop // self.evaluation.batch.vectors)


def _staged(context: StreamContext, name: str, piece: Piece, dtype: np.dtype[Any]) -> NDArray[Any]:
    shape = (piece.jobs, piece.stop - piece.start)
    staging = context.pinned(name, shape[0] * shape[1] * dtype.itemsize)
    return staging.view(dtype).reshape(shape)
