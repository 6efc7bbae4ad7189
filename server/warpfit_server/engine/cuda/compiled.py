"""The compiled tier: expressions as machine code of their own, launched as one CUDA graph."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

from warpfit.errors import CancelledError, ResourceExhaustedError
from warpfit.ir import Batch
from warpfit.request import Evaluation, Loss, Tier, Timings
from warpfit_server.engine.base import Outputs
from warpfit_server.engine.cuda.device import CudaDevice, StreamContext
from warpfit_server.engine.cuda.kernels import Kernel, KernelKey, KernelStore
from warpfit_server.engine.cuda.layout import GridLayout, best_layout
from warpfit_server.engine.cuda.library import Mode
from warpfit_server.engine.cuda.plan import fingerprint
from warpfit_server.engine.cuda.prepared import Prepared
from warpfit_server.engine.cuda.ptx import Output, sum_count
from warpfit_server.engine.cuda.replay import Identity, Replay, Work, load_sum_module
from warpfit_server.engine.cuda.resident import ROW_MULTIPLE, ResidentDataset
from warpfit_server.engine.cuda.shapes import LiftedBatch, Shape, lift
from warpfit_server.engine.sound import check_sound

#: Most parameter vectors of one launch: the limit of a grid's second dimension.
MAX_VECTORS: Final = 65_535
#: Most rows of one launch; a multiple of `ROW_MULTIPLE`.
MAX_ROWS: Final = 1 << 30
#: Longest expression that is compiled; the compiler's time grows faster than the length.
MAX_TOKENS: Final = 2_000
#: Most parameters of an expression that is compiled with its gradient: each takes an accumulator.
MAX_PARAMETERS: Final = 64
#: Most accumulators of a fused kernel, unless one expression alone needs more.
_MOST_SUMS: Final = 24
#: Most expressions of a batch that get a kernel each.
_SINGLE: Final = 4
#: Times that missing kernels are made before the cache is called too small for them.
_ATTEMPTS: Final = 3


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


class CompiledTier:
    """Evaluates batches by kernels compiled for their expressions.

    `ready` tells whether all kernels of an evaluation are loaded, `request_compile` has the
    missing ones made in the background; `evaluate` waits for them if it must.

    Args:
        device: the device.
        kernels: where kernels come from.
        tuning: layout of the work.

    """

    def __init__(
        self, device: CudaDevice, kernels: KernelStore, tuning: CompiledTuning | None = None
    ) -> None:
        self._device = device
        self._kernels = kernels
        self._tuning = tuning or CompiledTuning()
        self._sum_module = load_sum_module(device)
        self._lock = threading.Lock()
        self._replays: LRUCache[object, list[Replay]] = LRUCache(self._tuning.replays)
        self._prepared: LRUCache[object, Prepared] = LRUCache(self._tuning.replays)

    def supports(self, evaluation: Evaluation) -> bool:
        """Tell whether this tier can take the evaluation at all."""
        batch = evaluation.batch
        if evaluation.gradient and int(batch.parameter_counts.max()) > MAX_PARAMETERS:
            return False
        return batch.vectors <= MAX_VECTORS and int(batch.lengths.max()) <= MAX_TOKENS

    def ready(self, resident: ResidentDataset, evaluation: Evaluation) -> bool:
        """Tell whether every kernel is loaded, so that `evaluate` answers at once."""
        prepared = self.prepare(resident, evaluation)
        identity = self._identity(prepared, resident, evaluation)
        with self._lock:
            if self._replays.get(identity):  # which holds its kernels
                return True
        return all(key in self._kernels.cache for key in prepared.keys)

    def request_compile(self, resident: ResidentDataset, evaluation: Evaluation) -> None:
        """Have the missing kernels made in the background; returns at once."""
        self._kernels.request(self.prepare(resident, evaluation).keys)

    def evaluate(
        self, resident: ResidentDataset, evaluation: Evaluation, outputs: Outputs
    ) -> Timings:
        """Evaluate as `warpfit_server.engine.base.Engine.evaluate` does.

        Raises:
            ResourceExhaustedError: if `supports` is false, or device memory is short.

        """
        if not self.supports(evaluation):
            raise ResourceExhaustedError(
                f"the compiled tier takes at most {MAX_VECTORS} parameter vectors and expressions "
                f"of at most {MAX_TOKENS} tokens, for gradients with {MAX_PARAMETERS} parameters",
                "NOT_COMPILABLE",
                "Ask for the interpreter",
                "tier",
            )
        started = time.perf_counter_ns()
        prepared = self.prepare(resident, evaluation)
        identity = self._identity(prepared, resident, evaluation)
        replay = self._idle(identity)
        hits = replay is not None or all(key in self._kernels.cache for key in prepared.keys)
        replay = replay or self._capture(identity, prepared)
        try:
            queued = time.perf_counter_ns()
            computed = self._run(replay, prepared, resident, evaluation, outputs)
        finally:
            self._give(replay)
        return Timings(
            queue=queued - started,
            compute=computed,
            copy_out=max(0, time.perf_counter_ns() - queued - computed),
            tier=Tier.COMPILED,
            cache_hits=len(prepared.lifted.shapes) if hits else 0,
        )

    def counters(self) -> Mapping[str, float]:
        """Return the figures of the caches; see `base.COUNTERS`."""
        return self._kernels.counters()

    def close(self) -> None:
        """Free the captured graphs and unload the kernels."""
        self._drop_idle()
        self._kernels.close()

    def prepare(self, resident: ResidentDataset, evaluation: Evaluation) -> Prepared:
        """Cut an evaluation into kernels: groups of several expressions, or one for each.

        A batch of few expressions gets a kernel for each, which other batches share. For many, a
        fresh set of single kernels never pays: capturing their graph (2 ms for 300) costs more
        than interpreting, and fused kernels are 2 to 5 times faster once a batch repeats.
        """
        identity = _identity(resident, evaluation)
        with self._lock:
            known = self._prepared.get(identity)
        if known is None or not known.is_of(evaluation.batch):
            known = self._cut_evaluation(resident, evaluation)
            with self._lock:
                self._prepared[identity] = known
        return known

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

    def _identity(
        self, prepared: Prepared, resident: ResidentDataset, evaluation: Evaluation
    ) -> Identity:
        start, stop = evaluation.row_range(resident.dataset.layout)
        rows = min(self._chunk(prepared, evaluation), stop - start)
        # A kernel has at most one block a tile of rows.
        most = -(-(rows + ROW_MULTIPLE) // (prepared.output.threads * prepared.output.rows))
        total = prepared.layout.blocks * self._device.multiprocessors
        vectors = evaluation.batch.vectors
        with self._lock:
            blocks = prepared.blocks(vectors, most, total)
        return prepared.name, vectors, blocks

    def _idle(self, identity: Identity) -> Replay | None:
        """Take an idle captured graph."""
        with self._lock:
            idle = self._replays.get(identity)
            return idle.pop() if idle else None

    def _capture(self, identity: Identity, prepared: Prepared) -> Replay:
        """Capture a graph, for which its kernels may have to be made."""
        _, vectors, blocks = identity
        kernels = self._leased(prepared.keys)
        work = Work(
            firsts=prepared.firsts,
            slot_starts=prepared.lifted.slot_starts,
            sum_starts=prepared.sum_starts,
            vectors=vectors,
            dtype=prepared.mode.dtype,
            blocks=blocks,
            threads=prepared.output.threads,
        )
        try:
            return Replay(self._device, identity, prepared.keys, kernels, self._sum_module, work)
        except BaseException:
            self._kernels.release(prepared.keys)
            raise

    def _leased(self, keys: Sequence[KernelKey]) -> list[Kernel]:
        """Take all kernels into use, made first where they are missing.

        Raises:
            ResourceExhaustedError: if they do not fit beside those of other evaluations.

        """
        for _ in range(_ATTEMPTS):
            kernels = self._kernels.lease(keys)
            if kernels is not None:
                return kernels
            futures = self._kernels.request(keys, priority=0)
            wait(futures)
            for future in futures:
                future.result()
            # What is in use counts against the caps: idle graphs must not push these kernels out.
            if not all(key in self._kernels.cache for key in keys):
                self._drop_idle()
        raise ResourceExhaustedError(
            f"{len(keys)} kernels do not fit into the cache of compiled kernels",
            "KERNEL_CACHE_FULL",
            "Ask for the interpreter, or send smaller batches",
            "tier",
            needed=len(keys),
        )

    def _drop_idle(self) -> None:
        with self._lock:
            replays = [replay for held in self._replays.values() for replay in held]
            self._replays.clear()
        for replay in replays:
            self._drop(replay)

    def _give(self, replay: Replay) -> None:
        """Keep a captured graph for the next evaluation of its kind."""
        dropped: list[Replay] = []
        with self._lock:
            idle = self._replays.get(replay.identity)
            if idle is None:
                while len(self._replays) >= self._tuning.replays:
                    dropped += self._replays.popitem()[1]
                idle = self._replays[replay.identity] = []
            idle.append(replay)
        for old in dropped:
            self._drop(old)

    def _drop(self, replay: Replay) -> None:
        self._kernels.release(replay.keys)

    def _run(
        self,
        replay: Replay,
        prepared: Prepared,
        resident: ResidentDataset,
        evaluation: Evaluation,
        outputs: Outputs,
    ) -> int:
        """Launch for one chunk of rows after the other; return the nanoseconds of device time."""
        programs, vectors, _ = evaluation.shape(resident.dataset.layout)
        start, stop = evaluation.row_range(resident.dataset.layout)
        chunk = self._chunk(prepared, evaluation)
        slots = prepared.lifted.slot_values(evaluation.batch)
        sums = np.zeros(int(prepared.sum_starts[-1]) * vectors)
        computed = 0
        with self._device.stream() as context:
            for first in range(start, stop, chunk):
                if outputs.cancelled[0]:
                    raise CancelledError("the evaluation was cancelled", "CANCELLED")
                last = min(first + chunk, stop)
                request = _request(resident, first, last)
                pitch = _pitch(first, last, prepared.mode.dtype.itemsize)
                if evaluation.values:
                    request["pitch"] = pitch
                    request["values"] = (
                        context.buffer("compiled values", programs * vectors * pitch)
                        + first % ROW_MULTIPLE * prepared.mode.dtype.itemsize
                    )
                context.mark("start")
                replay.launch(context, slots, request)
                context.mark("computed")
                if outputs.values is not None:
                    part = outputs.values.reshape(programs * vectors, -1)
                    _land(context, request, part[:, first - start : last - start])
                context.stream.synchronize()
                computed += context.nanoseconds("start", "computed")
                sums += replay.sums
        if outputs.losses is not None and evaluation.loss is not None:
            shaped = sums.reshape(-1, vectors)
            losses = shaped[prepared.sum_starts[:-1]]
            outputs.losses[...] = resident.losses(evaluation.loss, losses, start, stop)
            if outputs.gradients is not None:
                _fill_gradients(prepared, evaluation, shaped, outputs.gradients)
        outputs.ready(programs)
        return computed

    def _chunk(self, prepared: Prepared, evaluation: Evaluation) -> int:
        """Rows of one launch."""
        if not evaluation.values:
            return MAX_ROWS
        row_bytes = len(evaluation.batch) * evaluation.batch.vectors * prepared.mode.dtype.itemsize
        rows = self._tuning.chunk_bytes // row_bytes // ROW_MULTIPLE * ROW_MULTIPLE
        return max(rows, ROW_MULTIPLE)


def _fill_gradients(
    prepared: Prepared,
    evaluation: Evaluation,
    sums: NDArray[np.float64],
    gradients: NDArray[np.float64],
) -> None:
    """Bring sums of derivatives, [sums, K], into the order of `Batch.parameters`."""
    batch = evaluation.batch
    programs, parameters = prepared.lifted.parameter_places(batch)
    counts = batch.parameter_counts.astype(np.int64)[programs]
    firsts = batch.parameter_starts[:-1][programs] + parameters
    places = firsts[:, np.newaxis] + counts[:, np.newaxis] * np.arange(batch.vectors)
    gradients[:] = 0.0  # of parameters that the expression does not mention
    scale = 1.0 if evaluation.loss is Loss.MAE else 2.0
    gradients[places] = scale * np.delete(sums, prepared.sum_starts[:-1], axis=0)


def _identity(resident: ResidentDataset, evaluation: Evaluation) -> Hashable:
    """Tell what kernels depend on; batches that share it may still differ, see `is_of`."""
    layout = resident.dataset.layout
    wanted = (evaluation.precision, evaluation.values, evaluation.loss, evaluation.gradient)
    columns = (layout.dtype.str, layout.variables, layout.has_weights)
    return (fingerprint(evaluation.batch), *columns, *wanted)


def _sum_kind(loss: Loss | None) -> str:
    if loss is None:
        return ""
    return "absolute" if loss is Loss.MAE else "squares"


def _request(resident: ResidentDataset, first: int, last: int) -> dict[str, int]:
    """Words of a request for the rows ``first`` to ``last``; `ptx.REQUEST` lists them all."""
    layout = resident.dataset.layout
    aligned = first // ROW_MULTIPLE * ROW_MULTIPLE
    return {
        "variables": resident.address(0, aligned),
        "stride": resident.stride * layout.dtype.itemsize,
        "target": resident.target_address(aligned) if layout.has_target else 0,
        "weights": resident.weights_address(aligned),
        "head": first - aligned,
        "stop": last - aligned,
    }


def _pitch(first: int, last: int, word: int) -> int:
    """Bytes of one row of values: whole memory lines, with room for the rows before the first."""
    rows = first % ROW_MULTIPLE + last - first
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE * word


def _land(context: StreamContext, request: dict[str, int], target: NDArray[Any]) -> None:
    """Copy values [programs * K, rows] from the device to their place."""
    staging = context.pinned("compiled values", target.size * target.itemsize)
    landed = staging.view(target.dtype).reshape(target.shape)
    context.download_rows(landed, request["values"], request["pitch"])
    context.stream.synchronize()
    target[...] = landed
