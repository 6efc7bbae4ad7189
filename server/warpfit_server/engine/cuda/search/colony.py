"""The colony of a search on a GPU; `colony.cu` has its kernels, in the order of their launches.

    for each chunk of the children: breed, screen
    for each chunk: keep; then note the best of each size
    now and then: fit the children that came closest to their places, and keep those

Formulas are run token by token where they are bred, a warp each, first on a part of the rows, as
those of the CPU's colony are. The host sends a few numbers with each launch, and gets formulas only
when it asks for the best of each size. A chunk is a step of the engine's loop.
"""

from __future__ import annotations

import math
from importlib import resources
from typing import Any, Final, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from warpfit.errors import CancelledError
from warpfit.ops import CONSTANT, OPERATORS, VARIABLE
from warpfit.searching import SearchRequest
from warpfit_server.engine.cuda.interpreter.source import (
    Variant,
    is_costly,
    operator_functions,
    source_of,
)
from warpfit_server.engine.cuda.math.prelude import operator_source
from warpfit_server.engine.cuda.runtime.compiler import CudaSource
from warpfit_server.engine.cuda.runtime.datasets import ResidentDataset
from warpfit_server.engine.cuda.runtime.device import CudaDevice
from warpfit_server.engine.cuda.runtime.driver_calls import DRIVER, argument_struct, launch
from warpfit_server.engine.interface import Steps
from warpfit_server.engine.native import numba_cache
from warpfit_server.engine.search import genome
from warpfit_server.engine.search.colony import (
    CLOSE,
    DIFFERENCE,
    FIRST_DAMPING,
    FIT_ITERATIONS,
    FIT_TRIALS,
    LEAST_SIZE,
    LEAST_SPREAD,
    LOSS_FLOOR,
    MOST_CONSTANTS,
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
#: Times that a structure with constants is tried, because fits find its numbers; generations
#: between two rounds of fits, formulas of an island that are fitted then, generations between two
#: rounds of all else, pairs for each formula, and pairs that take as long as what else a step for
#: pairs does, for which the device waits.
_SCHEDULE: Final = (1, 1, 64, 8, 24, 1 << 30)
#: Formulas of a chunk, which takes about a millisecond, and rows of all of them.
_CHUNK: Final = 1 << 16
_ROWS_IN_CHUNK: Final = 1 << 26
#: Formulas and rows whose work is given to the device before the host waits for it: some 2 ms.
_ROWS_AT_ONCE: Final = 1 << 27
#: Places of the table of structures that were tried; a power of 2.
_TRIED: Final = 1 << 25
_THREADS: Final = 128
#: Rows that a fit looks at, which lie in shared memory, and bytes of a row's values in a block.
_FIT_ROWS: Final = 128
_FIT_BYTES: Final = 256
#: Formulas of a chunk for each that is fitted at once. Kernels of others wait for those of a
#: search, which therefore take a millisecond at most.
_FITTED_FOR: Final = 16
#: Names of the kernels.
KERNELS: Final = (
    *("populate", "breed_children", "screen_children", "keep_children", "fit_children"),
    *("note_best", "score_islands", "empty_places"),
)
_compiled = numba_cache.njit(nogil=True)


class Kernels(NamedTuple):
    """The kernels of a colony on a device."""

    variant: Variant
    functions: dict[str, Any]
    """By name."""


def colony_source(variant: Variant, width: int) -> CudaSource:
    """Return the kernels for an arithmetic and for genomes of at most ``width`` tokens."""
    numbers: dict[str, int | str] = {
        "MOST_WIDTH": width,
        "WIDTH": genome.WIDTH,
        "COMPLEXITY": genome.COMPLEXITY,
        "CONSTANT_CODE": CONSTANT,
        "VARIABLE_CODE": VARIABLE,
        "LEAST_DEVIATION": repr(SPREADS[0]),
        "MOST_DEVIATION": repr(SPREADS[1]),
        "BETTER": "(1.0 - 1e-6)",
        "FIT_ROWS": _FIT_ROWS,
        "FIT_THREADS": _FIT_BYTES // variant.dtype.itemsize,
        "FIT_TRIALS": FIT_TRIALS,
        "MOST_CONSTANTS": MOST_CONSTANTS,
        "FIRST_DAMPING": repr(FIRST_DAMPING),
        "DIFFERENCE": f"{DIFFERENCE!r}f",
        "LEAST_SIZE": f"{LEAST_SIZE!r}f",
        "LARGEST_CONSTANT": repr(genome.LARGEST),
    }
    called, scalars, cases = [], [], []
    for row in OPERATORS.values():
        name, given = f"op_{row.name}", ", ".join(row.operands)
        if is_costly(operator_source(row, variant.arithmetic), variant):
            # Once, because it would be written for each use and each row of a thread.
            parameters = ", ".join(f"real {operand}" for operand in row.operands)
            call = f"{{ return op_{row.name}({given}); }}"
            name = f"long_{row.name}"
            called.append(f"__device__ __noinline__ real {name}({parameters}) {call}")
        scalars.append(f"    case {row.code}: return (float){name}({given});")
        shape = ("UNARY", "BINARY", "TERNARY")[row.arity - 1]
        cases.append(f"      case {row.code}: {shape}({name})")
    portable = cuda_source(
        genome.first_formula, genome.breed, genome.structure_hash, genome.tried_mark,
        genome.start_random,
    )  # fmt: skip
    template = "\n".join(operator_functions(variant.arithmetic)) + _TEMPLATE
    parts = {"CALLED": called, "SCALARS": scalars, "CASES": cases, "GENOME": [portable]}
    return CudaSource(source_of(variant, numbers, template, parts), variant.options)


def colony_settings(request: SearchRequest) -> ColonySettings:
    """Return the size of the colony that a request asks for, or that suits a GPU."""
    formulas = request.population or _FORMULAS
    islands = min(request.islands or max(1, formulas // _ISLAND), formulas)
    iterations = request.fit_iterations
    return ColonySettings(islands, formulas // islands, request.seed, iterations, *_SCHEDULE)


def load_kernels(device: CudaDevice, variant: Variant, grammar: NDArray[np.int32]) -> Kernels:
    """Load the kernels for an arithmetic and for the genomes of a grammar, or compile them."""
    width = next(most for most in _WIDTHS if most >= grammar[genome.WIDTH])
    module = colony_source(variant, width).load(device)
    return Kernels(variant, {name: module.get_function(name) for name in KERNELS})


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
        kernels: for the arithmetic of the screening rows.
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
        kernels: Kernels,
        resident: ResidentDataset,
        cancelled: NDArray[np.uint8],
        grammar: NDArray[np.int32],
        units: NDArray[np.int32],
        screening: Screening,
        settings: ColonySettings,
    ) -> None:
        self._device, self._settings, self._cancelled = device, settings, cancelled
        self._kernels, self._resident = kernels, resident
        self.width = int(grammar[genome.WIDTH])
        self.formulas = self.fits = 0
        self.island_scores = np.full(settings.islands, np.inf, np.float32)
        self._sizes = int(grammar[genome.MAX_SIZE]) + 1
        rows = len(screening.target)
        self._chunk = max(_THREADS, min(_CHUNK, settings.formulas, _ROWS_IN_CHUNK // rows))
        self._context = device.new_stream(urgent=False)
        self._memory: list[Any] = []
        self._scored = 0
        self._own = self._record(grammar, units, screening)

    def _record(
        self, grammar: NDArray[np.int32], units: NDArray[np.int32], screening: Screening
    ) -> NDArray[Any]:
        """Allocate the colony, and return the record of `COLONY` that describes it."""
        settings = self._settings
        count, sizes, width = settings.formulas, self._sizes, self.width
        own = np.zeros(1, COLONY)
        for name, size in {
            "codes": count * width, "values": 4 * count * width, "lengths": 4 * count,
            "scores": 4 * count, "early_scores": 4 * count,
            "child_codes": count * width, "child_values": 4 * count * width,
            "child_lengths": 4 * count, "child_losses": 4 * count, "child_early": 4 * count,
            "ratios": 4 * count, "hashes": 8 * count, "tried": 8 * _TRIED,
            "registers": 4 * REGISTERS, "fits": 8, "best_codes": sizes * width,
            "best_values": 4 * sizes * width, "best_lengths": 4 * sizes,
            "island_scores": 4 * settings.islands,
        }.items():  # fmt: skip
            own[name] = self._allocate(size)
        target = screening.target - (screening.mean if screening.fitted == 2 else 0.0)
        given: dict[str, NDArray[Any]] = {
            "grammar": grammar,
            "units": units,
            "best_keys": np.full(sizes, 2**64 - 1, np.uint64),
            "best_losses": np.full(sizes, np.inf, np.float32),
            "best_early": np.full(sizes, np.inf, np.float32),
            "parsimony": settings.parsimony(),
            "target": target,
            "weights": screening.weights,
        }
        for name, array in given.items():
            own[name] = self._allocate(array.nbytes)
            self._upload(int(own[name][0]), array)
        own["seed"], own["mask"], own["formulas"] = settings.seed, _TRIED - 1, count
        own["island"], own["sizes"] = settings.island, sizes
        own["matrix"], own["pitch"] = self._resident.columns.data.ptr, self._resident.stride
        own["rows"], own["first_rows"] = len(target), screening.first_rows
        own["fitted"], own["spread"] = screening.fitted, screening.spread
        own["floor"] = LOSS_FLOOR[screening.itemsize]
        own["least_spread"] = LEAST_SPREAD[screening.itemsize]
        weights, target = (array[: screening.first_rows] for array in (screening.weights, target))
        own["first_weight"], own["first_target"] = weights.sum(), weights @ target
        own["first_squares"] = weights @ np.square(target)
        own["iterations"] = min(FIT_ITERATIONS, settings.iterations)
        own["tries"] = settings.tries
        self._places = self._allocate(4 * self._chunk)
        return own

    def populate(self) -> Steps[None]:
        """Fill all islands with random formulas."""
        yield from self._renew(0, self._settings.formulas)

    def restart(self, island: int) -> Steps[None]:
        """Fill an island with random formulas."""
        yield from self._renew(island * self._settings.island, self._settings.island)

    def advance(self) -> Steps[None]:
        """Run a generation."""
        yield from self._generation("breed_children", 0, self._settings.formulas, CLOSE)

    def _renew(self, first: int, count: int) -> Steps[None]:
        self._launch("empty_places", first, count, count)
        yield from self._generation("populate", first, count, math.inf)

    def _generation(self, kernel: str, first: int, count: int, close: float) -> Steps[None]:
        """Have a kernel write children, which take the places of worse formulas."""
        self._own["generation"] += np.uint64(1)
        for start in range(first, first + count, self._chunk):
            size = min(self._chunk, first + count - start)
            self._launch(kernel, start, size, size)
            yield from self._screen(start, size, close)
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
            own["places"] = self._places
            yield from self._screen(0, count, math.inf)
            self._launch("keep_children", 0, count, 32 * count)
            own["places"] = 0
            self._launch("note_best", 0, self._sizes, 32 * self._sizes, 32)
            losses[part] = yield from self._download(int(own["child_losses"][0]), count, np.float32)
            self.formulas += count
        return losses

    def improve(self, count: int) -> Steps[None]:
        """Fit children of the last generation that came close to their places; see `Colony`."""
        own, islands, island = self._own, self._settings.islands, self._settings.island
        if count and own["iterations"]:
            own["group"] = group = max(1, island // count)
            groups, most = islands * -(-island // group), max(1, self._chunk // _FITTED_FOR)
            threads = _FIT_BYTES // self._kernels.variant.dtype.itemsize
            for first in range(0, groups, most):
                some = min(most, groups - first)
                self._launch("fit_children", first, some, 32 * some, threads)
                yield from self._done()
            self._launch("note_best", 0, self._sizes, 32 * self._sizes, 32)
        self._launch("score_islands", 0, islands, _THREADS * islands)
        read = self._download
        self.island_scores = yield from read(int(own["island_scores"][0]), islands, np.float32)
        fits = int((yield from read(int(own["fits"][0]), 1, np.uint64))[0])
        self.formulas, self.fits = self.formulas + fits - self.fits, fits

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

    def _screen(self, first: int, count: int, close: float) -> Steps[None]:
        """Find the losses of children; those that are not close to their places have none."""
        self._own["close"] = close
        self._launch("screen_children", first, count, 32 * count)
        self._scored += count * int(self._own["rows"][0])
        if self._scored >= _ROWS_AT_ONCE:
            self._scored = 0
            yield from self._done()
        if self._cancelled[0]:
            raise CancelledError("the search was cancelled", "CANCELLED")

    def _launch(
        self, name: str, first: int, count: int, threads: int, block: int = _THREADS
    ) -> None:
        """Launch a kernel on ``count`` children, or other things, from ``first`` on."""
        self._own["first"], self._own["count"] = first, count
        context, kernel = self._context, self._kernels.functions[name].ptr
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
