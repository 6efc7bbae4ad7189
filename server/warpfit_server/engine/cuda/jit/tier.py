"""The compiled tier: expressions as machine code of their own, launched as one CUDA graph."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

from warpfit.errors import CancelledError, ResourceExhaustedError
from warpfit.request import Evaluation, Loss, Tier, Timings
from warpfit_server.engine.cuda.jit import graph_launch
from warpfit_server.engine.cuda.jit.graph import Capturer, Identity, Replay, Work, request
from warpfit_server.engine.cuda.jit.grid_layout import token_rows_at_once
from warpfit_server.engine.cuda.jit.kernel_store import Kernel, KernelKey, KernelStore
from warpfit_server.engine.cuda.jit.prepare import CompiledTuning, Prepared, Preparer
from warpfit_server.engine.cuda.planner import fingerprint
from warpfit_server.engine.cuda.runtime.device import CudaDevice
from warpfit_server.engine.cuda.runtime.resident_data import ROW_MULTIPLE, ResidentDataset
from warpfit_server.engine.cuda.runtime.streams import StreamContext
from warpfit_server.engine.interface import Outputs, Steps

#: Most parameter vectors of one launch: the limit of a grid's second dimension.
MAX_VECTORS: Final = 65_535
#: Most rows of one launch; a multiple of `ROW_MULTIPLE`.
MAX_ROWS: Final = 1 << 30
#: Longest expression that is compiled; the compiler's time grows faster than the length.
MAX_TOKENS: Final = 2_000
#: Most parameters of an expression that is compiled with its gradient: each takes an accumulator.
MAX_PARAMETERS: Final = 64
#: Rows from which on the rows may be cut, so that kernels have enough of them.
_LEAST_ROWS: Final = 1 << 16
#: Times that missing kernels are made before the cache is called too small for them.
_ATTEMPTS: Final = 3


class CompiledTier:
    """Evaluates batches by kernels compiled for their expressions.

    `loaded` tells whether all kernels of an evaluation are there, `request_compile` has the
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
        self._capturer = Capturer(device)
        self._lock = threading.Lock()
        self._replays: LRUCache[object, list[Replay]] = LRUCache(self._tuning.replays)
        self._preparer = Preparer(kernels, self._tuning)

    def supports(self, evaluation: Evaluation) -> bool:
        """Tell whether this tier can take the evaluation at all."""
        batch = evaluation.batch
        if evaluation.gradient and int(batch.parameter_counts.max()) > MAX_PARAMETERS:
            return False
        return batch.vectors <= MAX_VECTORS and int(batch.lengths.max()) <= MAX_TOKENS

    def loaded(
        self, resident: ResidentDataset, evaluation: Evaluation, mark: int
    ) -> Prepared | None:
        """Return what `evaluate` answers at once with, if the batch has been here before.

        Args:
            resident: the data set.
            evaluation: what is wanted.
            mark: `fingerprint` of its batch.

        Returns:
            None unless the batch has been prepared and all its kernels are loaded.

        """
        known = self._preparer.known(resident, evaluation, mark)
        if known is None:
            return None
        identity = self._identity(known, resident, evaluation)
        with self._lock:
            if self._replays.get(identity):  # which holds its kernels
                return known
        return known if all(key in self._kernels.cache for key in known.keys) else None

    def prepare(self, resident: ResidentDataset, evaluation: Evaluation) -> Prepared:
        """Cut an evaluation into kernels, unless that has been done."""
        mark = fingerprint(evaluation.batch)
        known = self._preparer.known(resident, evaluation, mark)
        return known or self._preparer.prepare(resident, evaluation, mark)

    def request_compile(self, resident: ResidentDataset, evaluation: Evaluation) -> None:
        """Have the missing kernels made in the background; returns at once."""
        self._kernels.request(self.prepare(resident, evaluation).keys)

    def evaluate(
        self,
        resident: ResidentDataset,
        evaluation: Evaluation,
        outputs: Outputs,
        prepared: Prepared | None = None,
    ) -> Steps[Timings]:
        """Evaluate as `warpfit_server.engine.interface.Engine.evaluate` does.

        Args:
            resident: the data set.
            evaluation: what is wanted.
            outputs: to fill.
            prepared: what `loaded` returned for it, if it was asked.

        Raises:
            ResourceExhaustedError: if `supports` is false, or device memory is short.

        """
        started = time.perf_counter_ns()
        if outputs.cancelled[0]:
            raise CancelledError("the evaluation was cancelled", "CANCELLED")
        if prepared is None:
            self._check_supported(evaluation)
            prepared = self.prepare(resident, evaluation)
        identity = self._identity(prepared, resident, evaluation)
        replay = self._idle(identity)
        is_hit = replay is not None or all(key in self._kernels.cache for key in prepared.keys)
        hits = len(evaluation.batch) * is_hit
        replay = replay or (yield from self._capture(identity, prepared))
        work = (replay, prepared, resident, evaluation, outputs, started, hits)
        try:
            if _fits_one_launch(resident, evaluation):
                return self._run_once(*work)
            return (yield from self._run(*work))
        finally:
            self._give(replay)

    def counters(self) -> Mapping[str, float]:
        """Return the figures of the caches; see `interface.COUNTERS`."""
        return self._kernels.counters()

    def close(self) -> None:
        """Free the captured graphs and unload the kernels."""
        self._drop_idle()
        self._kernels.close()

    def _check_supported(self, evaluation: Evaluation) -> None:
        if not self.supports(evaluation):
            raise ResourceExhaustedError(
                f"the compiled tier takes at most {MAX_VECTORS} parameter vectors and expressions "
                f"of at most {MAX_TOKENS} tokens, for gradients with {MAX_PARAMETERS} parameters",
                "NOT_COMPILABLE",
                "Ask for the interpreter",
                "tier",
            )

    def _identity(
        self, prepared: Prepared, resident: ResidentDataset, evaluation: Evaluation
    ) -> Identity:
        start, stop = evaluation.row_range(resident.dataset.layout)
        rows = min(self._rows_at_once(prepared, resident, evaluation), stop - start)
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

    def _capture(self, identity: Identity, prepared: Prepared) -> Steps[Replay]:
        """Capture a graph, for which its kernels may have to be made."""
        _, vectors, blocks = identity
        kernels = yield from self._leased(prepared.keys)
        self._device.use()
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
            return Replay(self._device, identity, prepared.keys, kernels, self._capturer, work)
        except BaseException:
            self._kernels.release(prepared.keys)
            raise

    def _leased(self, keys: Sequence[KernelKey]) -> Steps[list[Kernel]]:
        """Take all kernels into use, made first where they are missing.

        Raises:
            ResourceExhaustedError: if they do not fit beside those of other evaluations.

        """
        for _ in range(_ATTEMPTS):
            kernels = self._kernels.lease(keys)
            if kernels is not None:
                return kernels
            made = self._kernels.request(keys, priority=0)
            yield made
            made.result()
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

    def _run_once(
        self,
        replay: Replay,
        prepared: Prepared,
        resident: ResidentDataset,
        evaluation: Evaluation,
        outputs: Outputs,
        started: int,
        cache_hits: int,
    ) -> Timings:
        """Compute losses, and gradients if they are wanted, in one compiled step."""
        with self._device.stream() as context:
            sources = prepared.lifted.sources
            rows = self._rows_at_once(prepared, resident, evaluation)
            step = graph_launch.prepare(
                context, replay, sources, resident, evaluation, rows, outputs
            )
            status = graph_launch.replay_losses(*step)
            timings = graph_launch.finish(context, replay, status, started, cache_hits)
        if outputs.gradients is not None:
            sums = replay.sums.reshape(-1, evaluation.batch.vectors)
            _fill_gradients(prepared, evaluation, sums, outputs.gradients)
        outputs.ready(len(evaluation.batch))
        return timings

    def _run(
        self,
        replay: Replay,
        prepared: Prepared,
        resident: ResidentDataset,
        evaluation: Evaluation,
        outputs: Outputs,
        started: int,
        cache_hits: int,
    ) -> Steps[Timings]:
        """Launch for one chunk of rows after the other."""
        programs, vectors, _ = evaluation.shape(resident.dataset.layout)
        start, stop = evaluation.row_range(resident.dataset.layout)
        chunk = self._rows_at_once(prepared, resident, evaluation)
        prepared.lifted.fill(evaluation.batch, replay.slots)
        sums = np.zeros(int(prepared.sum_starts[-1]) * vectors)
        launched, computed = time.perf_counter_ns(), 0
        with self._device.stream() as context:
            for first in range(start, stop, chunk):
                if outputs.cancelled[0]:
                    raise CancelledError("the evaluation was cancelled", "CANCELLED")
                last = min(first + chunk, stop)
                words = request(resident, first, last)
                pitch = _pitch(first, last, prepared.mode.dtype.itemsize)
                if evaluation.values:
                    words["pitch"] = pitch
                    words["values"] = (
                        context.buffer("compiled values", programs * vectors * pitch)
                        + first % ROW_MULTIPLE * prepared.mode.dtype.itemsize
                    )
                replay.tell(words)
                context.mark("start")
                replay.launch(context)
                context.mark("computed")
                if outputs.values is not None:
                    part = outputs.values.reshape(programs * vectors, -1)
                    _land(context, words, part[:, first - start : last - start])
                context.stream.synchronize()
                computed += context.nanoseconds("start", "computed")
                sums += replay.sums
                if last < stop:
                    yield None
                    self._device.use()
        if outputs.losses is not None and evaluation.loss is not None:
            shaped = sums.reshape(-1, vectors)
            outputs.losses[...] = shaped[prepared.sum_starts[:-1]]
            if outputs.gradients is not None:
                _fill_gradients(prepared, evaluation, shaped, outputs.gradients)
        outputs.ready(programs)
        return Timings(
            copy_in=launched - started,
            compute=computed,
            copy_out=max(0, time.perf_counter_ns() - launched - computed),
            tier=Tier.COMPILED,
            cache_hits=cache_hits,
        )

    def _rows_at_once(
        self, prepared: Prepared, resident: ResidentDataset, evaluation: Evaluation
    ) -> int:
        """Rows of one launch: a multiple of `ROW_MULTIPLE`."""
        batch, mode = evaluation.batch, prepared.mode
        if evaluation.values:
            rows = self._tuning.chunk_bytes // (len(batch) * batch.vectors * mode.dtype.itemsize)
            return max(rows // ROW_MULTIPLE, 1) * ROW_MULTIPLE
        start, stop = evaluation.row_range(resident.dataset.layout)
        token_rows = evaluation.token_rows(resident.dataset.layout)
        pieces = token_rows // token_rows_at_once(mode, self._device.multiprocessors)
        most = max(1, (stop - start) // _LEAST_ROWS)
        rows = -(-(stop - start) // min(max(1, pieces), most)) + ROW_MULTIPLE - 1
        return min(-(-rows // ROW_MULTIPLE) * ROW_MULTIPLE, MAX_ROWS)


def _fits_one_launch(resident: ResidentDataset, evaluation: Evaluation) -> bool:
    """Whether an evaluation asks for no more than sums over rows that one graph can count."""
    start, stop = evaluation.row_range(resident.dataset.layout)
    return evaluation.loss is not None and not evaluation.values and stop - start <= MAX_ROWS


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
