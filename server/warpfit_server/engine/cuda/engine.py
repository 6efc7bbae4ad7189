"""The CUDA engine: resident data sets, and the tiers that evaluate batches on them.

Values and the built-in losses, with their gradients, are interpreted or compiled. Other
derivatives, user-defined losses and statistics are always interpreted.

The device's colony of a search scores genomes that are whole formulas. Where they call functions
(templates, functions of the caller), or have to rise and fall with variables, the CPU's engine
searches, on the threads of the host (`HostSearches`).
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Dataset
from warpfit.errors import DatasetNotFoundError
from warpfit.ir import Batch, Program
from warpfit.parse import parse
from warpfit.request import Evaluation, Loss, Precision, Tier, Timings
from warpfit.searching import SearchProgress, SearchRequest
from warpfit.server_info import Device
from warpfit_server.engine.cuda import parts
from warpfit_server.engine.cuda.derivatives.tier import DerivativeTier
from warpfit_server.engine.cuda.interpreter.source import Variant
from warpfit_server.engine.cuda.interpreter.tier import InterpreterTier
from warpfit_server.engine.cuda.jit.kernel_store import KernelStore
from warpfit_server.engine.cuda.jit.tier import CompiledTier, CompiledWork
from warpfit_server.engine.cuda.runtime.datasets import (
    ResidentDataset,
    StreamedDataset,
    WindowBuffers,
    must_stream,
    upload,
)
from warpfit_server.engine.cuda.runtime.device import (
    LAUNCH_WORK,
    CudaDevice,
    PageLocks,
)
from warpfit_server.engine.cuda.tier_chooser import Decision, TierChooser, WorkKind
from warpfit_server.engine.evaluation import LoadedDatasets
from warpfit_server.engine.interface import (
    Arithmetic,
    EngineBrokenError,
    Linearisation,
    Outputs,
    Passes,
    Selection,
    SmallFits,
    Steps,
    run_to_end,
    timed,
)
from warpfit_server.engine.native.compile_processes import BACKGROUND, WANTED
from warpfit_server.ipc.segments import Segment
from warpfit_server.shared_batch import BatchSummary
from warpfit_server.system.machine import available_cores

if TYPE_CHECKING:
    from warpfit_server.engine.cpu.engine import CpuEngine
    from warpfit_server.engine.search.colony import Colony

_LOG: Final = logging.getLogger("warpfit.engine")
#: Steps in flight: one computes while another is copied in, or its losses are sent.
_STEPS_IN_FLIGHT: Final = 2
#: Bytes at the beginning of a segment that are page-locked: batches lie there, and results behind.
_MOST_LOCKED: Final = 64 << 20


class CudaEngine:
    """Evaluates batches on the first visible CUDA device; safe to call from several threads.

    Args:
        memory_limit: bytes of device memory to use; None for 90% of the engine's share.
        memory_share: part of the device's memory that is for this engine.
        cache_directory: where compiled code is kept; None for the user's cache directory.
        threads: threads that lower derivatives and factorise Jacobians, and cores of which a
            quarter compiles kernels; None for all cores.

    Raises:
        UnavailableError: if CuPy is not installed or the device does not answer.
    """

    steps_in_flight = _STEPS_IN_FLIGHT
    step_threads = 1
    steps_share_cores = False

    def __init__(
        self,
        memory_limit: int | None = None,
        cache_directory: Path | None = None,
        threads: int | None = None,
        memory_share: float = 1.0,
    ) -> None:
        self.threads = threads or available_cores()
        self._device = CudaDevice(memory_limit, cache_directory, memory_share)
        self._page_locks = PageLocks(self._device)
        # Requests are merged only as far as one launch of the interpreter computes them.
        each = LAUNCH_WORK[Arithmetic.FAST].interpreted
        self.step_size = each * self._device.multiprocessors
        started = time.perf_counter()
        where = self._device.cache_directory, self._device.architecture
        parts.begin_compiling(*where, self.threads)
        parts.compile_group("values", *where, self.threads)
        self._interpreter = InterpreterTier(self._device)
        _LOG.info("interpreter ready after %.2f s", time.perf_counter() - started)
        kernels = KernelStore(self._device, self.threads)
        self._planner = ThreadPoolExecutor(1, "plan")
        self._compiled = CompiledTier(self._device, kernels, self._planner)
        self._chooser = TierChooser(kernels.compile_queue.processes)
        self._residents: dict[bytes, ResidentDataset] = {}
        self._lock = threading.Lock()
        _warm_up(self, Tier.INTERPRETER)
        # Beside that, the following would delay the start.
        self._derivatives = self._load_derivatives()
        # Kernels are planned by code that is compiled with that of derivatives.
        self._planner.submit(self._derivatives.result)
        self._warming = BACKGROUND.submit(self._warm_up_compiled)
        self._search_code: Future[None] | None = None
        self._host = HostSearches(self.threads)
        self._pairs_code: Future[None] | None = None

    def device(self) -> Device:
        """Describe the device."""
        major, minor = self._device.compute_capability
        return Device(
            name=self._device.name,
            memory=self._device.memory,
            compute_capability=f"{major}.{minor}",
            driver=self._device.driver,
            tiers=(Tier.INTERPRETER, Tier.COMPILED),
        )

    def load(self, dataset: Dataset) -> None:
        """Copy a data set to the device, or stream a large one; see `interface.Engine`."""
        with self._lock:
            if dataset.content_id in self._residents:
                return
            others = list(self._residents.values())
        if must_stream(dataset.layout, self._device.memory_limit):
            shared = [other.buffers for other in others if isinstance(other, StreamedDataset)]
            buffers = shared[0] if shared else WindowBuffers(self._device)
            resident: ResidentDataset = StreamedDataset(self._device, dataset, buffers)
        else:
            resident = upload(self._device, dataset)
        with self._lock:
            self._residents[dataset.content_id] = resident

    def unload(self, dataset_id: bytes) -> None:
        """Forget a data set; its memory is freed once the evaluations that use it have ended."""
        with self._lock:
            self._residents.pop(dataset_id, None)

    def others_wait(self, wait: bool) -> None:
        """Do nothing: launches are short whether or not requests wait."""

    def map_segment(self, segment: Segment) -> None:
        """Have a segment page-locked, so that batches are copied from it at the full rate."""
        self._page_locks.lock(segment, segment.array("u1", (min(segment.size, _MOST_LOCKED),)))

    def should_merge(self, dataset_id: bytes) -> bool:
        """Return whether a data set is resident: other steps must not wait for streamed rows."""
        with self._lock:
            resident = self._residents.get(dataset_id)
        return resident is not None and not resident.is_streamed

    def merge_from(
        self,
        dataset_id: bytes,
        precision: Precision,
        *,
        tokens: int,
        token_rows: int,
        gradient: bool,
    ) -> int:
        """Return with how many requests merging costs less than compiled kernels do."""
        with self._lock:
            resident = self._residents.get(dataset_id)
        if resident is None:
            return 0
        kind = WorkKind(Arithmetic.of(resident.dataset.layout.dtype, precision), gradient)
        return self._chooser.merge_from(kind, token_rows)

    def evaluate(self, evaluation: Evaluation, outputs: Outputs) -> Steps[Timings]:
        """Evaluate a batch into ``outputs``.

        Raises:
            ProgramError: for the first bad token.
            CancelledError: if ``outputs.cancelled`` became 1; the outputs are then undefined.
            DatasetNotFoundError: if the data set is not loaded.
            ResourceExhaustedError: if device memory is short, or the compiled tier was asked for
                and cannot take the batch; the next evaluation works.
            EngineBrokenError: if the device reports an error, after which it answers no more.
        """
        resident = self._resident(evaluation.dataset_id)
        self._device.use()
        # Only values, or a built-in loss with its gradient, have other tiers.
        needs_derivatives = (
            evaluation.jacobian
            or evaluation.variable_gradient
            or evaluation.reductions
            or evaluation.needs_moments
            or evaluation.custom_loss is not None
            or (evaluation.gradient and evaluation.values)
        )
        try:
            if needs_derivatives:
                derivatives = yield from self._derivative_tier()
                return (yield from derivatives.evaluate(resident, evaluation, outputs))
            tier, compiled = evaluation.tier, None
            if tier is Tier.AUTO:
                compiled = self._choose(resident, evaluation)
                tier = Tier.INTERPRETER if compiled is None else Tier.COMPILED
            work = resident, evaluation, outputs
            if tier is Tier.COMPILED:
                steps = self._compiled.evaluate(*work, compiled)
            elif evaluation.gradient:
                steps = (yield from self._derivative_tier()).evaluate(*work)
            else:
                steps = self._interpreter.evaluate(*work)
            timings, host_time = yield from timed(steps)
            # Evaluations that waited for a compiler, or for rows, tell no rates of the tiers. Only
            # batches that it chooses for need the chooser: new ones are many, and always
            # interpreted.
            is_known = tier is Tier.INTERPRETER or timings.cache_hits
            if evaluation.tier is Tier.AUTO and not resident.is_streamed and is_known:
                # Other requests have their steps in between, whose time is none of the tier's.
                seconds = 1e-9 * (host_time + timings.compute)
                self._chooser.observe(tier, *_work(resident, evaluation), seconds)
            return timings
        except self._device.errors as error:
            raise self._translate(error) from error

    def linearise(
        self,
        evaluation: Evaluation,
        row_loss: Program,
        *,
        curvature: bool,
        cancelled: NDArray[np.uint8],
        selection: Selection | None = None,
    ) -> Steps[Linearisation]:
        """Compute losses, gradients and curvatures in one pass; see `interface.Engine`."""
        resident = self._resident(evaluation.dataset_id)
        self._device.use()
        try:
            tier = yield from self._derivative_tier()
            given = row_loss, curvature, cancelled, selection
            return (yield from tier.linearise(resident, evaluation, *given))
        except self._device.errors as error:
            raise self._translate(error) from error

    def small_fits(
        self,
        evaluation: Evaluation,
        row_loss: Program,
        *,
        cancelled: NDArray[np.uint8],
        selection: Selection,
    ) -> Steps[SmallFits | None]:
        """Prepare to run searches without the host; see `interface.Engine`."""
        resident = self._resident(evaluation.dataset_id)
        self._device.use()
        try:
            tier = yield from self._derivative_tier()
            given = row_loss, cancelled, selection
            return (yield from tier.small_fits(resident, evaluation, *given))
        except self._device.errors as error:
            raise self._translate(error) from error

    def search(
        self,
        request: SearchRequest,
        datasets: Passes,
        *,
        cancelled: NDArray[np.uint8],
        report: Callable[[SearchProgress], None],
    ) -> Steps[SearchProgress]:
        """Search for formulas; see `interface.Engine`."""
        # Imported on first use, because importing it delays the start of the server.
        from warpfit_server.engine.cuda.search import colony, pairs
        from warpfit_server.engine.search.driver import search

        if HostSearches.are_needed(request):
            given = request, datasets
            return (yield from self._host.search(*given, cancelled=cancelled, report=report))

        self._device.use()
        variants = {4: Variant.of(Arithmetic.FAST, 64), 8: Variant.of(Arithmetic.DOUBLE, 32)}
        if self._search_code is None:
            self._search_code = WANTED.submit(colony.load)
            self._pairs_code = WANTED.submit(pairs.load, self._device)
        yield self._search_code
        yield self._pairs_code

        def new_colony(*given: Any) -> Steps[Colony]:
            *known, _ = given  # genomes are whole formulas
            grammar, _, screening, _ = known
            variant = variants[screening.itemsize]
            kernels = WANTED.submit(colony.load_kernels, self._device, variant, grammar)
            yield kernels
            resident = self._resident(screening.dataset_id)
            return colony.CudaColony(self._device, kernels.result(), resident, cancelled, *known)

        def new_weigher() -> pairs.CudaWeigher:
            return pairs.CudaWeigher(self._device)

        try:
            return (
                yield from search(
                    self, datasets, request, new_colony, new_weigher,
                    settings=colony.colony_settings(request), cancelled=cancelled, report=report,
                )
            )  # fmt: skip
        except self._device.errors as error:
            raise self._translate(error) from error

    def counters(self) -> Mapping[str, float]:
        """Return the figures of the caches of compiled kernels; see `interface.COUNTERS`."""
        return self._compiled.counters()

    def close(self) -> None:
        """Stop the compiler and free all device memory."""
        self._host.close()
        if not self._warming.cancel():
            self._warming.result()
        if not self._derivatives.cancel() and self._derivatives.exception() is None:
            self._derivatives.result().forget()
        self._planner.shutdown(cancel_futures=True)
        self._compiled.close()
        with self._lock:
            self._residents.clear()
        self._page_locks.close()
        self._device.close()

    def _load_derivatives(self) -> Future[DerivativeTier]:
        """Load the tier of derivatives, and the code of fits, while the engine serves.

        The first time on a machine they are compiled.
        """

        def load() -> DerivativeTier:
            started = time.perf_counter()
            # Importing the driver of fits takes longer than a step.
            importlib.import_module("warpfit_server.engine.fit.driver")
            where = self._device.cache_directory, self._device.architecture
            given = *where, self.threads
            parts.compile_group("derivatives", *given)
            self._device.use()
            compile_spilling = partial(parts.compile_group, "spilling", *given)
            parts.load_host_code("derivatives")
            tier = DerivativeTier(self._device, self.threads, compile_spilling)
            tier.prepare_all()
            _LOG.info("derivatives ready after %.2f s", time.perf_counter() - started)
            return tier

        return BACKGROUND.submit(load)

    def _warm_up_compiled(self) -> None:
        """Warm the compiled tier up while the engine serves."""
        try:
            _warm_up(self, Tier.COMPILED)
        except Exception as error:  # memory may be short, and a request that needs it is told
            _LOG.warning("the compiled tier was not warmed up: %s", error)

    def _derivative_tier(self) -> Steps[DerivativeTier]:
        """Return the tier of derivatives once it is loaded."""
        loading = self._derivatives
        if loading.done() and loading.exception() is not None:  # memory may have been short
            loading = self._derivatives = self._load_derivatives()
        if not loading.done():
            yield loading
            self._device.use()
        return loading.result()

    def _resident(self, dataset_id: bytes) -> ResidentDataset:
        with self._lock:
            resident = self._residents.get(dataset_id)
        if resident is None:
            raise DatasetNotFoundError
        return resident

    def _translate(self, error: Exception) -> Exception:
        """Translate an error of the device: a lack of memory, or one after which it is unusable."""
        if self._device.is_out_of_memory(error):
            return self._device.no_room()
        return EngineBrokenError(str(error))

    def _choose(self, resident: ResidentDataset, evaluation: Evaluation) -> CompiledWork | None:
        """Return the work of compiled kernels if they are loaded and faster; None to interpret."""
        loaded = self._compiled.loaded(resident, evaluation)
        # A collision of identities only compiles a batch early or late.
        wanted = (evaluation.values, evaluation.loss, evaluation.gradient, evaluation.precision)
        identity = BatchSummary.of(evaluation.batch).identity
        key = (identity, evaluation.dataset_id, evaluation.rows, *wanted)
        work = *_work(resident, evaluation), len(evaluation.batch)
        decision = self._chooser.choose(key, *work, loaded=loaded is not None)
        is_due = decision is Decision.INTERPRET_AND_COMPILE
        if is_due and self._compiled.supports(evaluation):
            # The memory of the batch's parameters is reused after the answer.
            detached = replace(evaluation, batch=evaluation.batch.without_parameters())
            self._planner.submit(self._request_compile, resident, detached)
        return loaded if decision is Decision.COMPILED else None

    def _request_compile(self, resident: ResidentDataset, evaluation: Evaluation) -> None:
        """Have kernels compiled; runs in the background, where no caller sees an error."""
        try:
            self._compiled.request_compile(resident, evaluation)
        except Exception as error:
            _LOG.warning("a batch was not compiled: %s", error)


def _work(resident: ResidentDataset, evaluation: Evaluation) -> tuple[WorkKind, int]:
    """Return the kind of work of an evaluation, and its token-rows."""
    layout = resident.dataset.layout
    arithmetic = Arithmetic.of(layout.dtype, evaluation.precision)
    return WorkKind(arithmetic, evaluation.gradient), evaluation.token_rows(layout)


def _warm_up(engine: CudaEngine, tier: Tier) -> None:
    """Have Numba load or compile the functions of a tier, which takes a part of a second.

    Numba compiles a function at the first call with arguments of some types. So a program of each
    data type is evaluated, twice because a repeated batch takes another path.
    """
    for dtype in (np.float32, np.float64):
        dataset = Dataset.of(np.ones((1, 1)), np.ones(1), dtype=dtype)
        engine.load(dataset)
        # A copy, because the arrays of a request are writable.
        batch = Batch.of([parse("x1 + p1")], [np.ones(1)]).copy()
        evaluation = Evaluation(dataset.content_id, batch, loss=Loss.MSE, values=False, tier=tier)
        outputs = Outputs(None, np.zeros((1, 1)), np.zeros(1, np.uint8), lambda _: None)
        for _ in range(2):
            run_to_end(engine.evaluate(evaluation, outputs))
        engine.unload(dataset.content_id)


# ----------------------------------------------------------------------------- searches on the host


class HostSearches:
    """The CPU's engine beside a GPU's, which begins with the first search that needs it.

    Args:
        threads: threads that it may use.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._engine: Future[CpuEngine] | None = None

    @staticmethod
    def are_needed(request: SearchRequest) -> bool:
        """Return whether a search is one that the device does not know."""
        is_composed = request.template is not None or bool(request.definitions)
        return is_composed or bool(request.monotonic)

    def search(
        self,
        request: SearchRequest,
        datasets: Passes,
        *,
        cancelled: NDArray[np.uint8],
        report: Callable[[SearchProgress], None],
    ) -> Steps[SearchProgress]:
        """Search for formulas; see `warpfit_server.engine.interface.Engine.search`."""
        if self._engine is None:
            self._engine = WANTED.submit(self._begin)
        yield self._engine
        engine, given = self._engine.result(), datasets.whole(request.dataset_id)
        # Another search may have the same data.
        own = Dataset.resident(given.layout, given.matrix, os.urandom(32))
        loaded = LoadedDatasets(engine)
        loaded.load(own)
        try:
            asked = replace(request, dataset_id=own.content_id)
            return (yield from engine.search(asked, loaded, cancelled=cancelled, report=report))
        finally:
            loaded.unload(own.content_id)

    def close(self) -> None:
        """Stop the threads."""
        engine = self._engine
        if engine is not None and not engine.cancel() and engine.exception() is None:
            engine.result().close()

    def _begin(self) -> CpuEngine:
        # Imported on first use, because importing it delays the start of the server.
        from warpfit_server.engine.cpu.engine import CpuEngine

        return CpuEngine(self._threads)
