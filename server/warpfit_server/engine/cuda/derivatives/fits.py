"""Small searches of a fit that run on the device alone, from pass to pass; see fit.cu.

The state of the searches goes to the device, some launches of a step's length each run all of them
on, and the state comes back when every search has ended or wants an orthogonal factor.
"""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import Structure, addressof
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit_server.engine.cuda.derivatives.launches import (
    DerivativeGeometry,
    DerivativeKernels,
    KernelLaunch,
    LaunchDraft,
    run,
    upload_arrays,
)
from warpfit_server.engine.cuda.derivatives.lowering import DerivativeCode
from warpfit_server.engine.cuda.derivatives.source import INVARIANT_BYTES, template
from warpfit_server.engine.cuda.runtime.datasets import ResidentDataset
from warpfit_server.engine.cuda.runtime.device import CudaDevice, StreamContext
from warpfit_server.engine.cuda.runtime.driver_calls import argument_struct, argument_type
from warpfit_server.engine.fit.searches import COUNTERS, NUMBERS, VECTORS, Searches, SearchLimits
from warpfit_server.engine.interface import FitTurn, Steps, edges_of, offload

#: Most parameters of a search that a warp runs: its first thread solves the equations.
MOST_PARAMETERS: Final = 16
#: Blocks of a multiprocessor, each of one warp, by whose shared memory searches are grouped. The
#: registers allow for no more than the last number.
BLOCKS: Final = (1, 2, 4, 8, 16)
#: Cycles after which a warp stops: about a millisecond. What it evaluates then is finished.
_TICKS: Final = 2_000_000
#: Most bytes of the state of searches that are on the device at the same time, unless one has more;
#: as much is page-locked for the copies.
_MOST_STATE: Final = 1 << 25
FIT_ARGUMENTS: Final = argument_struct(template("fit.cu"), "FitArguments")
_FitArguments: Final = argument_type(FIT_ARGUMENTS)
#: Numbers of the status, by their places; see fit.cu.
_TAKEN, _UNFINISHED, _ITERATIONS = range(3)
_STATUS: Final = 8


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
        rooms: shared memory of a block by how many share a multiprocessor, for `BLOCKS`.
        multiprocessors: of the device.
    """
    chosen = np.argsort(-need, kind="stable")
    groups: list[_Group] = []
    for blocks in BLOCKS:
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
            need = self.need[chosen[first:stop]]
            given = limits, small, partial(_turn_of_all, turn, edges[-1] - stop)
            yield from self._run_some(own, code, need, *given)
            if own is not searches:
                searches.store(places, own)
                yield None
                self.device.use()

    def _run_some(
        self,
        searches: Searches,
        code: DerivativeCode,
        need: NDArray[np.int64],
        limits: SearchLimits,
        small: float,
        turn: FitTurn,
    ) -> Steps[None]:
        """Run searches whose state is on the device at the same time."""
        with self.device.stream() as context:
            # By the fields of the kernel's argument.
            state: dict[str, NDArray[Any]] = {
                "vectors": searches.vectors,
                "numbers": searches.numbers,
                "counters": searches.counters,
                "curvatures": searches.curvature,
            }
            size = sum(array.nbytes for array in state.values())
            prepare = partial(self._upload, context, code, state)
            arguments, fits, places = yield from offload(size, prepare)
            for name in ("gradient", "step", "loss", "flat", "target", "variation", "iterations"):
                setattr(fits, name, getattr(limits, name))
            fits.parameters, fits.small, fits.ticks = searches.vectors.shape[1], small, _TICKS
            later = len(need)
            for group in group_searches(need, self.rooms, self.device.multiprocessors):
                later -= len(group.order)
                given = arguments, fits, partial(_turn_of_all, turn, later)
                yield from self._run_group(context, group, *given)
            yield from offload(size, partial(_download, context, places, state))

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
    ) -> Steps[None]:
        """Launch a group again and again until its searches have left."""
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
            waiting = max(0, count - int(found[_TAKEN]))
            is_over = turn(int(found[_ITERATIONS]), int(found[_UNFINISHED]) + waiting)
            fits.begins = int(is_over)
            yield None
            self.device.use()


def _turn_of_all(turn: FitTurn, later: int, iterations: int, running: int) -> bool:
    """Take a turn while other searches still wait for being run."""
    return turn(iterations, running + later)


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
