"""The tier of derivatives: everything beyond values and the built-in losses.

One launch runs all programs with their derivatives, a second turns sums over columns into losses,
gradients and curvatures, and a third takes statistics of values that stay on the device. Fits
evaluate the same programs again with other parameters, so their code is kept on the device.

Small searches of a fit run on the device alone, from pass to pass; see fit.cu. The state of the
searches goes to the device, some launches of a step's length each run all of them on, and the state
comes back when every search has ended or wants an orthogonal factor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from ctypes import Structure, addressof
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from itertools import pairwise, starmap
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit.errors import ProgramError
from warpfit.ir import Batch, Program
from warpfit.losses import DIFFERENCE
from warpfit.request import Evaluation, Precision, Tier, Timings
from warpfit_server.engine.autodiff import (
    RequestedOutputs,
    linearisation_outputs,
    no_row_loss,
    requested_outputs,
    row_loss_tokens,
)
from warpfit_server.engine.cuda.derivatives.launches import (
    VARIANT_OF,
    DerivativeGeometry,
    DerivativeKernels,
    DerivativeLaunch,
    KernelLaunch,
    LaunchDraft,
    LaunchPlan,
    RowNodes,
    draft_launches,
    plan_launches,
    run,
    squares_slope,
    stores_values,
    upload_arrays,
)
from warpfit_server.engine.cuda.derivatives.lowering import (
    BLOCKS,
    INVARIANT_BYTES,
    DerivativeCode,
    DerivativeLowering,
    Made,
    derivative_source,
    template,
)
from warpfit_server.engine.cuda.interpreter.launches import Variant
from warpfit_server.engine.cuda.runtime.datasets import (
    ResidentDataset,
    Span,
    cut_rows,
    longest,
)
from warpfit_server.engine.cuda.runtime.device import (
    CudaDevice,
    StreamContext,
    argument_struct,
    argument_type,
)
from warpfit_server.engine.fit.searches import COUNTERS, NUMBERS, VECTORS, Searches, SearchLimits
from warpfit_server.engine.interface import (
    Arithmetic,
    FitTurn,
    Linearisation,
    Outputs,
    Selection,
    Steps,
    edges_of,
    offload,
)
from warpfit_server.engine.lowering import LoweringCache
from warpfit_server.engine.native.numba_cache import BACKGROUND
from warpfit_server.shared_batch import SharedBatch

#: Most rows of which values are on the device at a time, a power of two.
_MOST_VALUES: Final = 1 << 24
#: Most tokens, and jobs, of a part of a batch, unless one program has more: the engine's thread has
#: some milliseconds of work for it. Each part is lowered, planned and uploaded at a time.
_MOST_WORK: Final = 1 << 15
#: Tokens of all batches whose code is kept on the host, about 100 bytes each.
_KEPT_TOKENS: Final = 1_000_000
#: Variants of the kernels for programs that do not spill.
VARIANTS: Final = tuple(VARIANT_OF.values())
#: Most parameters of a search that a warp runs: its first thread solves the equations.
MOST_PARAMETERS: Final = 16
#: Blocks of a multiprocessor, each of one warp, by whose shared memory searches are grouped. The
#: registers allow for no more than the last number.
FIT_BLOCKS: Final = (1, 2, 4, 8, 16)
#: Cycles after which a warp stops: about a millisecond. What it evaluates then is finished.
_TICKS: Final = 2_000_000
#: Most bytes of the state of searches that are on the device at the same time, unless one has more;
#: as much is page-locked for the copies.
_MOST_STATE: Final = 1 << 25
FIT_ARGUMENTS: Final = argument_struct(template("fit.cu"), "FitArguments")
#: Fields of that struct that are fields of `SearchLimits`, too.
_LIMITS: Final = ("gradient", "step", "loss", "flat", "target", "variation", "iterations")
_FitArguments: Final = argument_type(FIT_ARGUMENTS)
#: Numbers of the status, by their places; see fit.cu.
_TAKEN, _UNFINISHED, _ITERATIONS = range(3)
_STATUS: Final = 8


@dataclass(slots=True, eq=False)
class _KeptCode:
    """The code of a fit on the device, and the plan of the programs that were selected last."""

    code: DerivativeCode
    last: tuple[NDArray[np.int64], LaunchPlan] | None = None


class DerivativeTier:
    """Evaluates batches with derivatives, user-defined losses and statistics.

    Args:
        device: to evaluate on.
        threads: that lower one batch.
        compile_spilling: compiles the kernels for programs that spill into the cache, by other
            processes; returns at once if that has been done.
    """

    def __init__(
        self, device: CudaDevice, threads: int, compile_spilling: Callable[[], None]
    ) -> None:
        self._device = device
        self._compile_spilling = compile_spilling
        self._kernels: dict[Variant, DerivativeKernels] = {}
        self._spilling: dict[Variant, Future[DerivativeKernels]] = {}
        self._kept: LoweringCache[_KeptCode] = LoweringCache()
        """Code of fits, which stays on the device from pass to pass."""
        self._codes: LoweringCache[DerivativeCode] = LoweringCache(_KEPT_TOKENS)
        """Code of batches that come again, on the host."""
        self._lowering = DerivativeLowering(threads)

    @cached_property
    def _shared(self) -> tuple[int, int]:
        """Bytes of shared memory of a block, usually and at most."""
        return self._device.shared_bytes(BLOCKS), self._device.shared_bytes(1)

    @cached_property
    def _rooms(self) -> dict[int, int]:
        """Bytes of shared memory of a block by how many blocks share a multiprocessor."""
        return {blocks: self._device.shared_bytes(blocks) for blocks in FIT_BLOCKS}

    def prepare_all(self) -> None:
        """Load the variants that do not spill; hardly any program needs another one."""
        self._kernels = {variant: self._load(variant, spills=False) for variant in VARIANTS}

    def evaluate(
        self, resident: ResidentDataset, evaluation: Evaluation, outputs: Outputs
    ) -> Steps[Timings]:
        """Evaluate as `warpfit_server.engine.interface.Engine.evaluate` does."""
        started, computed = time.perf_counter_ns(), 0
        wanted, batch = requested_outputs(evaluation, outputs), evaluation.batch
        edges = [0, len(batch)]
        if not resident.is_streamed:
            edges = edges_of(np.maximum(batch.lengths.astype(np.int64), batch.vectors), _MOST_WORK)
        for programs in starmap(slice, pairwise(edges)):
            if programs.start:
                yield None
            part, own = evaluation, wanted
            if len(edges) > 2:
                part = replace(evaluation, batch=batch[programs])
                own = wanted.of_programs(programs, batch.parameter_starts)
            try:
                computed += yield from self._run(resident, part, own)
            except ProgramError as error:
                error.expression = programs.start + (error.expression or 0)
                raise
        host_time = time.perf_counter_ns() - started - computed
        return Timings(copy_in=max(0, host_time), compute=computed, tier=Tier.INTERPRETER)

    def linearise(
        self,
        resident: ResidentDataset,
        evaluation: Evaluation,
        row_loss: Program,
        curvature: bool,
        cancelled: NDArray[np.uint8],
        selection: Selection | None,
    ) -> Steps[Linearisation]:
        """Linearise as `warpfit_server.engine.interface.Engine.linearise` does."""
        found, wanted = linearisation_outputs(
            evaluation.batch, row_loss, curvature=curvature, cancelled=cancelled
        )
        yield from self._run(resident, evaluation, wanted, selection)
        return found

    def small_fits(
        self,
        resident: ResidentDataset,
        evaluation: Evaluation,
        row_loss: Program,
        cancelled: NDArray[np.uint8],
        selection: Selection,
    ) -> Steps[DeviceFits | None]:
        """Prepare a fit as `warpfit_server.engine.interface.Engine.small_fits` does."""
        rows, precision = evaluation.row_range(resident.dataset.layout), evaluation.precision
        variant = VARIANT_OF[Arithmetic.of(resident.dataset.layout.dtype, precision)]
        geometry = DerivativeGeometry.of(variant, rows)
        if resident.is_streamed or geometry.blocks > 1:
            return None
        _, wanted = linearisation_outputs(
            evaluation.batch, row_loss, curvature=True, cancelled=cancelled
        )
        kept = yield from self._kept_code(resident, precision, rows, wanted, selection.batch)
        draft = draft_launches(resident, precision, rows, wanted)
        code, programs = kept.code, selection.programs
        if code.vectors > 1 or not np.array_equal(programs, np.arange(len(code.programs))):
            code = code.select(programs)
        given = resident, draft, code, self._kernels[variant], geometry
        return DeviceFits.of(self._device, self._rooms, *given)

    def forget(self) -> None:
        """Free the code that is kept on the device."""
        self._kept.clear()
        self._codes.clear()

    def _run(
        self,
        resident: ResidentDataset,
        evaluation: Evaluation,
        wanted: RequestedOutputs,
        selection: Selection | None = None,
    ) -> Steps[int]:
        """Evaluate on all rows, or on nodes of them in turn; return the device's nanoseconds."""
        most = resident.window_rows
        if wanted.jacobian is not None or stores_values(wanted):
            most = min(most, _MOST_VALUES)
        rows = evaluation.row_range(resident.dataset.layout)
        spans = cut_rows(rows, most)
        if selection is None:
            plan = yield from self._plan(resident, evaluation, longest(spans), wanted)
        else:
            precision, programs = evaluation.precision, selection.programs
            given = resident, precision, longest(spans), wanted
            kept = yield from self._kept_code(*given, selection.batch)
            if kept.last is None or kept.last[0] is not programs:
                code = kept.code.select(programs)
                plan = plan_launches(self._device, self._shared, draft_launches(*given), code)
                kept.last = programs, plan
            plan = kept.last[1]
        kernels = yield from self._prepare(plan)
        with self._device.stream() as context:
            nodes = None
            if len(spans) > 1:
                nodes = RowNodes.allocate(context, wanted, plan.code, rows, most)
            parameters = evaluation.batch.parameters
            launch = DerivativeLaunch.begin(
                context, resident, parameters, wanted, plan, kernels, nodes
            )
            return (yield from launch.run(self._device, spans))

    def _plan(
        self,
        resident: ResidentDataset,
        evaluation: Evaluation,
        rows: Span,
        wanted: RequestedOutputs,
    ) -> Steps[LaunchPlan]:
        """Plan an evaluation whose code is uploaded together with its parameters.

        The code of batches that come again is kept, of each request for itself, so that it does not
        matter which requests are merged.
        """
        precision, batch = evaluation.precision, evaluation.batch
        draft = partial(draft_launches, resident, precision, rows, wanted)
        lower = partial(self._lower, resident, precision, wanted=wanted)
        parts = batch.alone() if isinstance(batch, SharedBatch) else []
        outputs = wanted.row_loss, wanted.is_squares, wanted.deviation, wanted.lowering_flags
        others = stores_values(wanted), wanted.curvatures is not None, batch.vectors
        needs = (precision, resident.dataset.layout, *outputs, *others)
        have_come = [self._codes.has_come(part, needs) for part in parts]
        if not any(have_come):
            self._lowering.expect(batch)
            code, drafted = yield from lower(batch, meanwhile=draft)
            return plan_launches(self._device, self._shared, drafted, code)

        def make(part: Batch) -> Steps[DerivativeCode]:
            self._lowering.expect(part)
            code, _ = yield from lower(part, meanwhile=lambda: None)
            return DerivativeCode.joining([code])  # without the room that it was made in

        codes = []
        for part, has_come in zip(parts, have_come, strict=True):
            made = self._codes.keep(part, needs, make) if has_come else make(part)
            codes.append((yield from made))
        code = codes[0] if len(codes) == 1 else DerivativeCode.joining(codes)
        return plan_launches(self._device, self._shared, draft(), code)

    def _kept_code(
        self,
        resident: ResidentDataset,
        precision: Precision,
        rows: Span,
        wanted: RequestedOutputs,
        batch: Batch,
    ) -> Steps[_KeptCode]:
        """Return the code of a batch of a fit, which is on the device, or lower it."""

        def make(batch: Batch) -> Steps[_KeptCode]:
            code, _ = yield from self._lower(
                resident, precision, batch, wanted=wanted, meanwhile=lambda: None
            )
            # Everything but the records, which are selected, is copied to memory of its own.
            arrays = {name: array for name, array in code.arrays.items() if name != "programs"}
            memory = None

            def allocate(size: int) -> int:
                nonlocal memory
                memory = self._device.allocate(size)
                return int(memory.ptr)

            with self._device.stream() as context:
                addresses = upload_arrays(context, arrays, allocate)
            return _KeptCode(replace(code, arrays={}, addresses=addresses, memory=memory))

        outputs = (wanted.row_loss, wanted.curvatures is not None)
        needs = (rows, precision, *outputs, resident.dataset.layout)
        return (yield from self._kept.by_batch(batch, needs, make))

    def _lower(
        self,
        resident: ResidentDataset,
        precision: Precision,
        batch: Batch,
        *,
        wanted: RequestedOutputs,
        meanwhile: Callable[[], Made],
    ) -> Steps[tuple[DerivativeCode, Made]]:
        """Lower a batch; see `DerivativeLowering.lower`."""
        row_loss, layout = no_row_loss(), resident.dataset.layout
        if wanted.row_loss is not None:
            program = DIFFERENCE if wanted.is_squares else wanted.row_loss
            row_loss = row_loss_tokens(program, layout.variables, weighted=layout.has_weights)
        needs_values = not squares_slope(Arithmetic.of(layout.dtype, precision), wanted)
        return self._lowering.lower(
            batch,
            layout.variables,
            row_loss,
            wanted.lowering_flags,
            keeps_values=stores_values(wanted) or (bool(wanted.deviation) and needs_values),
            products=wanted.curvatures is not None,
            meanwhile=meanwhile,
        )

    def _prepare(self, plan: LaunchPlan) -> Steps[DerivativeKernels]:
        """Return the kernels of an evaluation; variants that spill are loaded when first needed."""
        variant = plan.variant
        if not plan.spills:
            return self._kernels[variant]
        loading = self._spilling.get(variant)
        if loading is None or (loading.done() and loading.exception() is not None):

            def load() -> DerivativeKernels:
                self._compile_spilling()
                return self._load(variant, spills=True)

            loading = self._spilling[variant] = BACKGROUND.submit(load)
        if not loading.done():
            yield loading
        return loading.result()

    def _load(self, variant: Variant, *, spills: bool) -> DerivativeKernels:
        module = derivative_source(variant, spills=spills).load(self._device)
        names = [field.name for field in fields(DerivativeKernels)]
        if spills:
            names.remove("fit")
        kernels = DerivativeKernels(**{name: module.get_function(name) for name in names})
        if not spills:
            for kernel in (kernels.linearise, kernels.fit):
                self._device.allow_shared(kernel, self._shared[1])
        return kernels


# ---------------------------------------------------------------------------------- small searches


def bytes_of_searches(
    records: NDArray[np.void], sums: NDArray[np.int64], level_bytes: int
) -> NDArray[np.int64]:
    """Return the shared memory of a warp for each search, as fit.cu lays it out.

    Args:
        records: of `PROGRAM`, for each search.
        sums: over the rows, for each search.
        level_bytes: of a warp's tile.
    """
    n = records["parameters"].astype(np.int64)
    triangle = n * (n + 1) // 2
    numbers = sums + (VECTORS + 8) * n + NUMBERS + COUNTERS + 3 * triangle
    state = -(-8 * numbers // 16) * 16 + INVARIANT_BYTES * records["invariants"].astype(np.int64)
    return np.asarray(state + level_bytes * records["levels"].astype(np.int64) + 8 * sums)


class _Group(NamedTuple):
    """Searches that are launched together."""

    order: NDArray[np.uint32]
    blocks: int
    """Most blocks of a multiprocessor at the same time."""
    shared_bytes: int


def group_searches(
    need: NDArray[np.int64], rooms: Mapping[int, int], multiprocessors: int
) -> list[_Group]:
    """Group searches by their shared memory, about the most work first.

    A group that leaves the device idle joins the one before, of searches that need more.

    Args:
        need: bytes of each search.
        rooms: shared memory of a block by how many share a multiprocessor, for `FIT_BLOCKS`.
        multiprocessors: of the device.
    """
    chosen = np.argsort(-need, kind="stable")
    groups: list[_Group] = []
    for blocks in FIT_BLOCKS:
        end = len(chosen)
        if 2 * blocks in rooms:
            end = int((need[chosen] > rooms[2 * blocks]).sum())
        own, chosen = chosen[:end].astype(np.uint32), chosen[end:]
        before = groups[-1] if groups else _Group(own[:0], 0, 0)
        if not len(own):
            continue
        if len(before.order) + len(own) <= before.blocks * multiprocessors:
            groups[-1] = before._replace(order=np.concatenate([before.order, own]))
        else:
            groups.append(_Group(own, blocks, int(need[own[0]])))
    return groups


@dataclass(frozen=True, slots=True, eq=False)
class DeviceFits:
    """Searches of one fit that may run on the device; implements `interface.SmallFits`."""

    device: CudaDevice
    rooms: Mapping[int, int]
    """See `group_searches`."""
    resident: ResidentDataset
    draft: LaunchDraft
    code: DerivativeCode
    """Of the programs of the searches, which is on the device but for its records."""
    kernels: DerivativeKernels
    geometry: DerivativeGeometry
    need: NDArray[np.int64]
    """Bytes of shared memory of each search, [searches]."""
    runs: NDArray[np.bool_]
    """Which searches may run, [searches]."""

    @classmethod
    def of(
        cls,
        device: CudaDevice,
        rooms: Mapping[int, int],
        resident: ResidentDataset,
        draft: LaunchDraft,
        code: DerivativeCode,
        kernels: DerivativeKernels,
        geometry: DerivativeGeometry,
    ) -> DeviceFits:
        """Find the searches that have few parameters and little state."""
        level_bytes = draft.variant.tile * draft.variant.dtype.itemsize
        need = bytes_of_searches(code.programs, code.sums, level_bytes)
        runs = (code.programs["parameters"] <= MOST_PARAMETERS) & (need <= rooms[1])
        return cls(device, rooms, resident, draft, code, kernels, geometry, need, np.asarray(runs))

    def run(
        self, searches: Searches, limits: SearchLimits, small: float, turn: FitTurn
    ) -> Steps[None]:
        """Run searches until they have ended or want a factor; see `interface.SmallFits`."""
        chosen, counts = np.flatnonzero(self.runs), searches.counts
        sizes = 8 * (NUMBERS + COUNTERS + VECTORS * counts + counts * (counts + 1) // 2)
        edges = edges_of(sizes, _MOST_STATE)
        for first, stop in pairwise(edges):
            own, code = searches, self.code
            places = np.arange(first, stop)
            if len(edges) > 2:
                mask = np.zeros(len(searches), dtype=bool)
                mask[first:stop] = True
                own = searches.only(mask)
            if stop - first < len(self.runs):
                code = code.select(chosen[first:stop])
            need, later = self.need[chosen[first:stop]], edges[-1] - first
            with self.device.stream() as context:
                # By the fields of the kernel's argument.
                state: dict[str, NDArray[Any]] = {
                    "vectors": own.vectors,
                    "numbers": own.numbers,
                    "counters": own.counters,
                    "curvatures": own.curvature,
                }
                size = sum(array.nbytes for array in state.values())
                prepare = partial(self._upload, context, code, state)
                arguments, fits, addresses = yield from offload(size, prepare)
                for name in _LIMITS:
                    setattr(fits, name, getattr(limits, name))
                fits.parameters, fits.small, fits.ticks = own.vectors.shape[1], small, _TICKS
                for group in group_searches(need, self.rooms, self.device.multiprocessors):
                    later -= len(group.order)
                    given = arguments, fits, turn, later
                    yield from self._run_group(context, group, *given)
                yield from offload(size, partial(_download, context, addresses, state))
            if own is not searches:
                searches.store(places, own)
                yield None
                self.device.use()

    def _upload(
        self, context: StreamContext, code: DerivativeCode, state: Mapping[str, NDArray[Any]]
    ) -> tuple[Structure, Structure, Mapping[str, int]]:
        """Copy the state and the records; return both arguments, and the addresses."""
        arguments = type(self.draft.arguments).from_buffer_copy(self.draft.arguments)
        fits, rows = _FitArguments(), self.geometry.rows
        arrays = {**state, "programs": code.programs}

        def allocate(size: int) -> int:
            room = context.buffer("fits", size + 8 * _STATUS)
            fits.status = room + size
            return room

        addresses = upload_arrays(context, arrays, allocate)
        for name, address in {**code.addresses, "programs": addresses["programs"]}.items():
            setattr(arguments, name, address)
        for name in state:
            setattr(fits, name, addresses.get(name, 0))
        arguments.vectors = 1
        arguments.variables = self.resident.address(0, rows.aligned)
        arguments.weights = self.resident.weights_address(rows.aligned)
        arguments.first_row, arguments.end_row = rows.first_row, rows.end_row
        arguments.first_tile, arguments.tiles, arguments.blocks = rows.first_tile, rows.tiles, 1
        return arguments, fits, addresses

    def _run_group(
        self,
        context: StreamContext,
        group: _Group,
        arguments: Structure,
        fits: Structure,
        turn: FitTurn,
        later: int,
    ) -> Steps[None]:
        """Launch a group again and again until its searches have left; others ``later`` wait."""
        count = len(group.order)
        addresses = upload_arrays(
            context, {"order": group.order}, lambda size: context.buffer("fit order", size)
        )
        fits.order, fits.searches, fits.begins = addresses["order"], count, 0
        grid = min(count, group.blocks * self.device.multiprocessors)
        places = addressof(fits), group.shared_bytes, addressof(arguments)
        launch = KernelLaunch(self.kernels.fit.ptr, grid, 1, 32, *places)
        status = context.pinned("fit status", 4 * _STATUS).reshape(1, -1)
        while True:
            context.clear(fits.status, 4 * _STATUS)
            run(context, launch)
            context.download_rows(status, fits.status, status.nbytes)
            context.mark("fits")
            yield from context.reach("fits")
            found = status.view(np.uint32)[0].astype(np.int64)
            if found[_TAKEN] >= count and (fits.begins or not found[_UNFINISHED]):
                return
            waiting = later + max(0, count - int(found[_TAKEN]))
            is_over = turn(int(found[_ITERATIONS]), int(found[_UNFINISHED]) + waiting)
            fits.begins = int(is_over)
            yield None
            self.device.use()


def _download(
    context: StreamContext, places: Mapping[str, int], state: Mapping[str, NDArray[Any]]
) -> None:
    """Copy the state back to its arrays, which lie before the records."""
    start = places["numbers"] if "vectors" not in places else places["vectors"]
    room = context.pinned("fits", places["programs"] - start)
    context.download_rows(room.reshape(1, -1), start, len(room))
    context.mark("fits")
    context.wait("fits")
    for name, array in state.items():
        if array.nbytes:
            first = places[name] - start
            own = room[first : first + array.nbytes].view(array.dtype)
            np.copyto(array, own.reshape(array.shape))
