"""The CUDA engine: resident data sets, and the tiers that evaluate batches on them.

Values and the built-in losses, with their gradients, are interpreted or compiled. Other
derivatives, user-defined losses and statistics are always interpreted.

The device's colony of a search scores genomes that are whole formulas. Where they call functions
(templates, functions of the caller), or have to rise and fall with variables, the CPU's engine
searches, on the threads of the host (`HostSearches`).

The tier chooser: chooses the tier that evaluates a batch, by a cost model that learns.

Fresh expressions are interpreted, because an answer must not wait for a compiler. Compiled kernels
would answer a repeated batch faster, once they have been compiled. How often it will be repeated is
unknown, so the rule is that of the ski rental problem (Karlin et al. 1988, "Competitive snoopy
caching"): each interpreted repetition adds the time that compiled kernels would have saved, and
once the sum reaches the price of compiling, the batch is compiled in the background. The total cost
is then at most twice that of a chooser that knows the future. Kernels that are loaded already have
no price.

::

    seconds = launch + token_rows / rate        for each tier and each kind of work
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from cachetools import LRUCache
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
from warpfit_server.engine.cuda.interpreter.launches import Variant
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
from warpfit_server.engine.native.numba_cache import BACKGROUND, WANTED
from warpfit_server.ipc.segments import Segment
from warpfit_server.machine import available_cores
from warpfit_server.shared_batch import BatchSummary

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
        from warpfit_server.engine.cuda import colony
        from warpfit_server.engine.search.driver import search

        if HostSearches.are_needed(request):
            given = request, datasets
            return (yield from self._host.search(*given, cancelled=cancelled, report=report))

        self._device.use()
        variants = {4: Variant.of(Arithmetic.FAST, 64), 8: Variant.of(Arithmetic.DOUBLE, 32)}
        if self._search_code is None:
            self._search_code = WANTED.submit(colony.load)
            self._pairs_code = WANTED.submit(colony.load_pairs, self._device)
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

        def new_weigher() -> colony.CudaWeigher:
            return colony.CudaWeigher(self._device)

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


#: Batches whose savings are remembered.
_REMEMBERED: Final = 4096
#: Weight of a new observation.
_GAIN: Final = 0.2
#: By how much of the way the cost of a tier that is not observed returns with each observation of
#: the other one, so that a tier which looked slow during a disturbance is tried again.
_FORGETTING: Final = 0.002


class WorkKind(NamedTuple):
    """Properties of an evaluation on which the cost of a token-row depends."""

    arithmetic: Arithmetic
    gradient: bool = False
    """Whether the loss comes with its gradient."""


@dataclass(frozen=True, slots=True)
class TierCost:
    """Cost of one tier for one kind of work."""

    launch: float
    """Seconds of a minimal evaluation: of the engine's thread and of the device."""
    rate: float
    """Token-rows a second."""

    def seconds(self, token_rows: int) -> float:
        """Predict the time of an evaluation."""
        return self.launch + token_rows / self.rate

    def corrected(self, token_rows: int, surprise: float) -> TierCost:
        """Return the cost after an observation, which took ``surprise`` times the predicted time.

        Each term is corrected by its share.
        """
        share = self.launch / self.seconds(token_rows)
        return TierCost(
            launch=self.launch * surprise ** (_GAIN * share),
            rate=self.rate / surprise ** (_GAIN * (1 - share)),
        )


#: Costs at the start, by tier and arithmetic, measured on one H200 with 16 host cores.
COSTS: Final = MappingProxyType(
    {
        (Tier.INTERPRETER, Arithmetic.FAST): TierCost(0.6e-3, 6.4e12),
        (Tier.INTERPRETER, Arithmetic.PRECISE): TierCost(0.6e-3, 2.0e12),
        (Tier.INTERPRETER, Arithmetic.DOUBLE): TierCost(0.6e-3, 0.8e12),
        (Tier.COMPILED, Arithmetic.FAST): TierCost(0.4e-3, 17e12),
        (Tier.COMPILED, Arithmetic.PRECISE): TierCost(0.4e-3, 4.5e12),
        (Tier.COMPILED, Arithmetic.DOUBLE): TierCost(0.4e-3, 1.5e12),
    }
)
#: Seconds of one process to compile one expression as part of a fused group, measured there, too.
COMPILE_SECONDS: Final = MappingProxyType(
    {Arithmetic.FAST: 0.012, Arithmetic.PRECISE: 0.06, Arithmetic.DOUBLE: 0.07}
)
#: Rate, and compile time, of losses with gradients relative to losses alone: where the model
#: starts, measured on one H200.
_GRADIENT_RATE: Final = MappingProxyType({Tier.INTERPRETER: 1 / 3, Tier.COMPILED: 1 / 3})
_GRADIENT_COMPILE: Final = 4.0


class Decision(Enum):
    """The tier chooser's choice for a batch."""

    INTERPRET = auto()
    INTERPRET_AND_COMPILE = auto()
    """Interpret it, and compile its kernels in the background."""
    COMPILED = auto()


@dataclass
class TierChooser:
    """Chooses tiers; safe to use from several threads.

    Args:
        compilers: processes that compile at the same time.
        start: costs of losses at the start, by tier and arithmetic; the costs of losses with
            gradients are derived.
    """

    compilers: int
    start: Mapping[tuple[Tier, Arithmetic], TierCost] = field(default_factory=lambda: COSTS)
    costs: dict[tuple[Tier, WorkKind], TierCost] = field(init=False)
    """As observations have corrected them."""
    _start: dict[tuple[Tier, WorkKind], TierCost] = field(init=False)
    _compiled: set[WorkKind] = field(default_factory=set)
    """Kinds of work for which compiled kernels have been observed."""
    _forgone: LRUCache[Hashable, float] = field(default_factory=lambda: LRUCache(_REMEMBERED))
    """Seconds that compiled kernels would have saved each batch, since they were last requested."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        """Derive the costs of gradients."""
        self._start = {}
        for (tier, arithmetic), cost in self.start.items():
            self._start[tier, WorkKind(arithmetic)] = cost
            with_gradient = replace(cost, rate=cost.rate * _GRADIENT_RATE[tier])
            self._start[tier, WorkKind(arithmetic, gradient=True)] = with_gradient
        self.costs = dict(self._start)

    def choose(
        self, batch: Hashable, kind: WorkKind, token_rows: int, programs: int, *, loaded: bool
    ) -> Decision:
        """Choose for one evaluation.

        Args:
            batch: identifies the batch and everything else that its kernels depend on.
            kind: of its work.
            token_rows: tokens x parameter vectors x rows.
            programs: expressions of the batch.
            loaded: whether its kernels are there.
        """
        with self._lock:
            interpreted = self.costs[Tier.INTERPRETER, kind].seconds(token_rows)
            compiled = self.costs[Tier.COMPILED, kind].seconds(token_rows)
            if compiled >= interpreted:
                return Decision.INTERPRET
            if loaded:
                return Decision.COMPILED
            compiling = COMPILE_SECONDS[kind.arithmetic]
            compiling *= _GRADIENT_COMPILE if kind.gradient else 1.0
            forgone = self._forgone.get(batch, 0.0) + interpreted - compiled
            pays = forgone >= programs * compiling / self.compilers
            # Kernels that are evicted before they are used have to pay again.
            self._forgone[batch] = 0.0 if pays else forgone
            return Decision.INTERPRET_AND_COMPILE if pays else Decision.INTERPRET

    def merge_from(self, kind: WorkKind, token_rows: int) -> int:
        """Return with how many requests merging them costs each less than compiled kernels do.

        Of n requests that are interpreted as one, each pays one n-th of the fixed cost of an
        evaluation.

        Returns:
            1 if compiled kernels do not even pay for a lone request; 0 if they pay whatever the
            number.
        """
        with self._lock:
            interpreted = self.costs[Tier.INTERPRETER, kind]
            compiled = self.costs[Tier.COMPILED, kind].seconds(token_rows)
        launch = compiled - token_rows / interpreted.rate
        return 0 if launch <= 0.0 else math.ceil(interpreted.launch / launch)

    def observe(self, tier: Tier, kind: WorkKind, token_rows: int, seconds: float) -> None:
        """Correct the cost of a tier by a finished evaluation.

        ``seconds`` is the time of the engine's thread plus that of the device, without waiting.
        """
        with self._lock:
            if tier is Tier.COMPILED:
                self._compiled.add(kind)
            surprise = seconds / self.costs[tier, kind].seconds(token_rows)
            # A device that interprets more slowly runs compiled kernels more slowly, too.
            for one in {tier} if kind in self._compiled else {tier, Tier.COMPILED}:
                self.costs[one, kind] = self.costs[one, kind].corrected(token_rows, surprise)
            if kind not in self._compiled:
                return
            # The other tier's cost returns a little to its ratio to this one's at the start.
            other = Tier.INTERPRETER if tier is Tier.COMPILED else Tier.COMPILED
            cost, known = self.costs[other, kind], self.costs[tier, kind]
            start, start_known = self._start[other, kind], self._start[tier, kind]
            launch = start.launch * known.launch / start_known.launch
            rate = start.rate * known.rate / start_known.rate
            self.costs[other, kind] = TierCost(
                launch=cost.launch * (launch / cost.launch) ** _FORGETTING,
                rate=cost.rate * (rate / cost.rate) ** _FORGETTING,
            )
