"""The colony of a search on a GPU; `colony.cu` has its kernels, in the order of their launches.

    for each chunk of the children: breed, find starts, pack, lower, interpret, score
    for each chunk: keep; then note the best of each size

The host sends a few numbers with each launch, and gets formulas only when it asks for champions or
for the best of each size. A chunk is a step of the engine's loop.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from warpfit.errors import CancelledError
from warpfit.ops import OPERATORS, VARIABLE
from warpfit.searching import SearchRequest
from warpfit_server.engine.cuda.interpreter.launches import (
    BatchBounds,
    as_jobs,
    configure_launch,
    cut_tiles,
    lay_out,
    lower_resident,
    max_levels,
    max_slots,
    new_batch,
    run_jobs,
)
from warpfit_server.engine.cuda.interpreter.source import Variant, operator_functions, source_of
from warpfit_server.engine.cuda.interpreter.tier import InterpreterKernels
from warpfit_server.engine.cuda.runtime.compiler import CudaSource
from warpfit_server.engine.cuda.runtime.datasets import ResidentDataset
from warpfit_server.engine.cuda.runtime.device import CudaDevice
from warpfit_server.engine.cuda.runtime.driver_calls import DRIVER, argument_struct, launch
from warpfit_server.engine.interface import Steps
from warpfit_server.engine.native import numba_cache
from warpfit_server.engine.native.arguments import array_address
from warpfit_server.engine.search import genome
from warpfit_server.engine.search.colony import (
    LEAST_SPREAD,
    LOSS_FLOOR,
    REGISTERS,
    SPREADS,
    ColonySettings,
    Genomes,
    Scored,
    Screening,
    estimate_distinct,
)
from warpfit_server.engine.search.kernel_language import cuda_source

_TEMPLATE: Final = resources.files(__package__).joinpath("colony.cu").read_text()
#: As `colony.cu` has it.
COLONY: Final = argument_struct(_TEMPLATE, "Colony")
#: Widths of genomes for which kernels are compiled: they hold so many numbers for each thread.
_WIDTHS: Final = (64, 128, genome.MOST_TOKENS)
#: Formulas of a colony and of an island, where a request does not say.
_FORMULAS: Final = 1 << 17
_ISLAND: Final = 512
#: Generations between two rounds of fits, formulas of an island that are fitted then, pairs for
#: each formula, and pairs that take as long as what else a step for pairs does, for which the
#: device waits.
_SCHEDULE: Final = (8, 1, 24, 1 << 30)
#: Formulas of a chunk, which takes less than a millisecond.
_CHUNK: Final = 1 << 16
#: Formulas whose work is given to the device before the host waits for it: some 2 ms.
_AT_ONCE: Final = 1 << 17
#: Places of the table of structures that were tried; a power of 2.
_TRIED: Final = 1 << 25
_THREADS: Final = 128
#: Programs that one block sorts by length before they are interpreted.
_SORTED: Final = 4096
_SCAN_THREADS: Final = 1024
#: Names of the kernels.
KERNELS: Final = (
    *(
        "populate",
        "breed_children",
        "sum_lengths",
        "find_starts",
        "pack_programs",
        "score_children",
    ),
    *("keep_children", "note_best", "choose_champions", "gather", "empty_places"),
)
_compiled = numba_cache.njit(nogil=True)


def colony_source(variant: Variant, width: int) -> CudaSource:
    """Return the kernels for an arithmetic and for genomes of at most ``width`` tokens."""
    numbers: dict[str, int | str] = {
        "MOST_WIDTH": width,
        "WIDTH": genome.WIDTH,
        "VARIABLE_CODE": VARIABLE,
        "SCAN_THREADS": _SCAN_THREADS,
        "LEAST_DEVIATION": SPREADS[0],  # type: ignore[dict-item]
        "MOST_DEVIATION": SPREADS[1],  # type: ignore[dict-item]
        "BETTER": "(1.0 - 1e-6)",
    }
    scalars = [
        f"    case {row.code}: return (float)op_{row.name}({', '.join(row.operands)});"
        for row in OPERATORS.values()
    ]
    portable = cuda_source(
        genome.first_formula, genome.breed, genome.structure_hash, genome.tried_mark,
        genome.start_random,
    )  # fmt: skip
    template = "\n".join(operator_functions(variant.arithmetic)) + _TEMPLATE
    text = source_of(variant, numbers, template, {"SCALARS": scalars, "GENOME": [portable]})
    return CudaSource(text, variant.options)


def colony_settings(request: SearchRequest) -> ColonySettings:
    """Return the size of the colony that a request asks for, or that suits a GPU."""
    formulas = request.population or _FORMULAS
    islands = min(request.islands or max(1, formulas // _ISLAND), formulas)
    return ColonySettings(islands, formulas // islands, request.seed, *_SCHEDULE)


@_compiled  # type: ignore[untyped-decorator]
def launch_colony(
    driver: NDArray[np.void], stream: int, kernel: int, blocks: int, threads: int, own: Any
) -> int:
    """Launch a kernel on a record of `COLONY`; return the driver's status."""
    return launch(driver, stream, kernel, (blocks, 1), (threads, 1), 0, own)


def load() -> None:
    """Load the compiled function, or compile it."""
    given = np.zeros(1, DRIVER), 0, 0, 0, 0, np.zeros(1, COLONY)
    launch_colony.compile(tuple(map(numba.typeof, given)))
    genome.load()


class CudaColony:
    """The colony of a CUDA engine; implements `warpfit_server.engine.search.colony.Colony`.

    Args:
        device: the device.
        kernels: of the interpreter, for the arithmetic of the screening rows.
        resident: the screening rows on the device.
        cancelled: as in `interface.Outputs`.
        grammar: from `genome.new_grammar`.
        units: from `genome.new_units`.
        screening: the rows.
        settings: islands and seed.

    Raises:
        ResourceExhaustedError: if the device has no room for the colony.
    """

    def __init__(
        self,
        device: CudaDevice,
        kernels: InterpreterKernels,
        resident: ResidentDataset,
        cancelled: NDArray[np.uint8],
        grammar: NDArray[np.int32],
        units: NDArray[np.int32],
        screening: Screening,
        settings: ColonySettings,
    ) -> None:
        self._device, self._kernels, self._resident = device, kernels, resident
        self._settings, self._screening, self._cancelled = settings, screening, cancelled
        self.width, self.formulas, self.fits = int(grammar[genome.WIDTH]), 0, 0
        self.island_scores = np.full(settings.islands, np.inf, np.float32)
        self._sizes = int(grammar[genome.MAX_SIZE]) + 1
        width = next(most for most in _WIDTHS if most >= self.width)
        module = colony_source(kernels.variant, width).load(device)
        # No program needs more levels than others have, for which it would have to come first.
        levels = max_levels(self.width, bool(grammar[genome.HAS_ARITY + 3]))
        allowed = np.flatnonzero(grammar[genome.ALLOWED : genome.ALLOWED + 256])
        costly = any(kernels.costly >> int(code) & 1 for code in allowed)
        self._bounds = BatchBounds(levels, levels, costly)
        self._functions = {name: module.get_function(name) for name in KERNELS}
        self._context = device.new_stream()
        self._memory: list[Any] = []
        self._scored = 0
        self._own = self._record(grammar, units)

    def _record(self, grammar: NDArray[np.int32], units: NDArray[np.int32]) -> NDArray[Any]:
        """Allocate the colony, and return the record of `COLONY` that describes it."""
        settings, screening = self._settings, self._screening
        count, sizes, width = settings.formulas, self._sizes, self.width
        self._tiles = cut_tiles(
            self._resident, (0, len(screening.target)), None, self._kernels.variant
        )
        pitch = int(self._tiles["count"][0]) * self._kernels.variant.tile
        chunk = min(_CHUNK, count)
        own = np.zeros(1, COLONY)
        for name, size in {
            "codes": count * width, "values": 4 * count * width, "lengths": 4 * count,
            "losses": 4 * count, "scores": 4 * count, "is_new": count,
            "child_codes": count * width, "child_values": 4 * count * width,
            "child_lengths": 4 * count, "child_losses": 4 * count, "hashes": 8 * count,
            "tried": 8 * _TRIED, "registers": 4 * REGISTERS, "best_codes": sizes * width,
            "best_values": 4 * sizes * width, "best_lengths": 4 * sizes,
            "numbers": chunk * pitch * self._kernels.variant.dtype.itemsize,
            "chosen": 4 * max(settings.islands, sizes),
            "out_codes": settings.islands * width, "out_values": 4 * settings.islands * width,
            "out_lengths": 4 * settings.islands, "out_losses": 4 * settings.islands,
            "island_scores": 4 * settings.islands,
            "block_lengths": 4 * _SCAN_THREADS,
        }.items():  # fmt: skip
            own[name] = self._allocate(size)
        given: dict[str, NDArray[Any]] = {
            "grammar": grammar,
            "units": units,
            "best_keys": np.full(sizes, 2**64 - 1, np.uint64),
            "best_losses": np.full(sizes, np.inf, np.float32),
            "parsimony": settings.parsimony(),
            "target": screening.target,
            "weights": screening.weights,
        }
        for name, array in given.items():
            own[name] = self._allocate(array.nbytes)
            self._upload(int(own[name][0]), array)
        layout = lay_out(chunk * width, chunk, 0)
        batch = self._allocate(layout.end)
        slots = max_slots(chunk * width, chunk) * self._kernels.variant.dtype.itemsize
        self._batch_address, self._slots_address = batch, self._allocate(slots)
        own["starts"], own["packed_codes"] = batch + layout.starts, batch + layout.codes
        own["packed_values"] = batch + layout.values
        self._context.clear(batch + layout.parameter_starts, 4 * (chunk + 1))
        own["seed"], own["mask"], own["formulas"] = settings.seed, _TRIED - 1, count
        own["island"], own["islands"], own["sizes"] = settings.island, settings.islands, sizes
        own["rows"], own["pitch"] = len(screening.target), pitch
        own["fitted"] = screening.fitted
        own["mean"], own["spread"] = screening.mean, screening.spread
        own["floor"] = LOSS_FLOOR[screening.itemsize]
        own["least_spread"] = LEAST_SPREAD[screening.itemsize]
        self._first_invalid = self._context.pinned("first invalid", 4 * chunk)
        self._chunk = chunk
        self._places = self._allocate(4 * chunk)
        return own

    def populate(self) -> Steps[None]:
        """Fill all islands with random formulas."""
        yield from self._renew(0, self._settings.formulas)

    def restart(self, island: int) -> Steps[None]:
        """Fill an island with random formulas."""
        yield from self._renew(island * self._settings.island, self._settings.island)

    def advance(self) -> Steps[None]:
        """Run a generation."""
        yield from self._generation("breed_children", 0, self._settings.formulas)

    def _renew(self, first: int, count: int) -> Steps[None]:
        self._launch("empty_places", first, count, count)
        yield from self._generation("populate", first, count)

    def _generation(self, kernel: str, first: int, count: int) -> Steps[None]:
        """Have a kernel write children, which take the places of worse formulas."""
        self._own["generation"] += np.uint64(1)
        for start in range(first, first + count, self._chunk):
            size = min(self._chunk, first + count - start)
            self._launch(kernel, start, size, size)
            yield from self._score(start, size)
        for start in range(first, first + count, self._chunk):
            size = min(self._chunk, first + count - start)
            self._launch("keep_children", start, size, 32 * size)
        self._launch("note_best", 0, self._sizes, 32 * self._sizes, 32)
        yield from self._done()
        self.formulas += count

    def insert(self, genomes: Genomes, places: NDArray[np.int64]) -> Steps[NDArray[np.float32]]:
        """Score formulas, which take the given places where they are better; return losses."""
        losses = np.full(len(genomes), np.inf, np.float32)
        for first in range(0, len(genomes), self._chunk):
            part = slice(first, first + self._chunk)
            some, own = genomes.take(part), self._own
            count, wide = len(some), some.widened(self.width)
            self._upload(int(own["child_codes"][0]), wide.codes)
            self._upload(int(own["child_values"][0]), wide.values.astype(np.float32))
            self._upload(int(own["child_lengths"][0]), some.lengths)
            self._upload(int(own["hashes"][0]), np.zeros(count, np.uint64))
            self._upload(self._places, places[part].astype(np.int32))
            yield from self._score(0, count)
            own["places"] = self._places
            self._launch("keep_children", 0, count, 32 * count)
            own["places"] = 0
            self._launch("note_best", 0, self._sizes, 32 * self._sizes, 32)
            losses[part] = yield from self._download(int(own["child_losses"][0]), count, np.float32)
            self.formulas += count
        return losses

    def champions(self, count: int) -> Steps[Scored]:
        """Return the best formula of each island that has not been returned."""
        islands, own = self._settings.islands, self._own
        self._launch("choose_champions", 0, islands, _THREADS * islands)
        self._launch("gather", 0, islands, 32 * islands, 32)
        read = self._download
        self.island_scores = yield from read(int(own["island_scores"][0]), islands, np.float32)
        places = yield from read(int(own["chosen"][0]), islands, np.int32)
        codes = yield from read(int(own["out_codes"][0]), islands * self.width, np.uint8)
        values = yield from read(int(own["out_values"][0]), islands * self.width, np.float32)
        lengths = yield from read(int(own["out_lengths"][0]), islands, np.int32)
        losses = yield from read(int(own["out_losses"][0]), islands, np.float32)
        found = np.flatnonzero(places >= 0)
        matrix = codes.reshape(islands, -1), values.reshape(islands, -1)
        genomes = Genomes(matrix[0][found], matrix[1][found], lengths[found])
        return Scored(genomes, losses[found], places[found].astype(np.int64))

    def improve(self, count: int, fit: Callable[[Scored], Steps[None]]) -> Steps[None]:
        """Have the best new formula of each island fitted; see `Colony`."""
        yield from fit((yield from self.champions(count)))

    def best(self) -> Steps[Scored]:
        """Return the best formula of each size."""
        sizes, own, read = self._sizes, self._own, self._download
        codes = yield from read(int(own["best_codes"][0]), sizes * self.width, np.uint8)
        values = yield from read(int(own["best_values"][0]), sizes * self.width, np.float32)
        lengths = yield from read(int(own["best_lengths"][0]), sizes, np.int32)
        losses = yield from read(int(own["best_losses"][0]), sizes, np.float32)
        found = np.flatnonzero(np.isfinite(losses))
        matrix = codes.reshape(sizes, -1), values.reshape(sizes, -1)
        genomes = Genomes(matrix[0][found], matrix[1][found], lengths[found])
        return Scored(genomes, losses[found], np.full(len(found), -1))

    def distinct(self) -> int:
        """Estimate how many different structures have been tried."""
        context, own = self._context, self._own
        memory = context.pinned("registers", 4 * REGISTERS)
        context.download_rows(memory.reshape(1, -1), int(own["registers"][0]), 4 * REGISTERS)
        context.stream.synchronize()
        return estimate_distinct(memory.view(np.int32))

    def close(self) -> None:
        """Free the memory."""
        self._context.stream.synchronize()
        self._memory.clear()
        self._context.release()

    def _score(self, first: int, count: int) -> Steps[None]:
        """Evaluate children on the screening rows, and fill in their losses."""
        for kernel in ("sum_lengths", "find_starts"):
            self._launch(kernel, first, count, count, _SCAN_THREADS)
        self._launch("pack_programs", first, count, 32 * count)
        self._interpret(count)
        self._launch("score_children", first, count, 32 * count)
        self._scored += count
        if self._scored >= _AT_ONCE:
            self._scored = 0
            yield from self._done()
        if self._cancelled[0]:
            raise CancelledError("the search was cancelled", "CANCELLED")

    def _interpret(self, count: int) -> None:
        """Lower the packed programs, and compute their values."""
        context, kernels = self._context, self._kernels
        variables = self._resident.dataset.layout.variables
        batch = new_batch(
            (self._chunk * self.width, self._chunk, 0, 1), variables, self._batch_address,
            self._slots_address, array_address(self._first_invalid.view(np.uint32)),
        )  # fmt: skip
        batch["count"] = count
        configure_launch(batch, kernels.record, self.width, *self._bounds, _SORTED)
        driver = context.functions, context.handle
        context.check_executed(lower_resident(*driver, kernels.record, batch))
        jobs = as_jobs((0, count), int(self._own["numbers"][0]), 0)
        event = context.event("interpreted").ptr
        context.check_executed(
            run_jobs(*driver, kernels.record, batch, self._tiles, jobs, 0, event)
        )

    def _launch(
        self, name: str, first: int, count: int, threads: int, block: int = _THREADS
    ) -> None:
        """Launch a kernel on ``count`` children, or other things, from ``first`` on."""
        self._own["first"], self._own["count"] = first, count
        context, kernel = self._context, self._functions[name].ptr
        blocks = -(-threads // block)
        given = context.functions, context.handle, kernel, blocks, block, self._own
        context.check_executed(launch_colony(*given))

    def _done(self) -> Steps[None]:
        """Wait until the stream has finished; the engine takes other steps meanwhile."""
        self._context.mark("colony")
        yield from self._context.reach("colony")
        yield None

    def _allocate(self, size: int) -> int:
        """Return the address of memory of the colony, which is zero."""
        memory = self._device.allocate(max(size, 1))
        self._memory.append(memory)
        self._context.clear(int(memory.ptr), max(size, 1))
        return int(memory.ptr)

    def _upload(self, address: int, array: NDArray[Any]) -> None:
        """Copy an array to the device after earlier copies have arrived."""
        self._context.stream.synchronize()
        staging = self._context.pinned("upload", array.nbytes)
        staging[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._context.upload(address, staging)

    def _download(self, address: int, count: int, dtype: type) -> Steps[NDArray[Any]]:
        """Return numbers of the device."""
        size = count * np.dtype(dtype).itemsize
        staging = self._context.pinned("download", size)
        self._context.download_rows(staging.reshape(1, -1), address, size)
        self._context.mark("downloaded")
        yield from self._context.reach("downloaded")
        return staging.view(dtype).copy()
