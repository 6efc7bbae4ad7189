"""The colony of a search on a GPU; `colony.cu` has its kernels, in the order of their launches.

    for each chunk of the children: breed, screen
    for each chunk: keep; then note the best of each size
    now and then: fit the children that came closest to their places, and keep those

Formulas are run token by token where they are bred, a warp each, first on a part of the rows, as
those of the CPU's colony are. The host sends a few numbers with each launch, and gets formulas only
when it asks for the best of each size. A chunk is a step of the engine's loop.

Pairs of formulas on a GPU: matrix products by cuBLAS, and a kernel that notes what is best.

The simple form, for tiles of right formulas (`engine.search.library`):

    products = the matrix products of all left formulas with the tile
    note the pairs whose errors may be below the bound, the largest error of the best so far
    the host fits these in float64, and keeps the best

The next tile is computed while the host fits. If more pairs pass than there is room for, the best
of those that were noted give a lower bound, and the tile is computed again. Where that does not
help, because many pairs are equal, parts of the tile are looked at. Products are taken in float64
where the device has the units, else in float32 with the tolerances of the CPU. The host fits as the
CPU engine does, so that the pairs of both are the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import Any, Final, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from warpfit.errors import CancelledError
from warpfit.ops import CONSTANT, OPERATORS, VARIABLE
from warpfit.searching import SearchRequest
from warpfit_server.engine.cpu import pairs as cpu_pairs
from warpfit_server.engine.cpu.pairs import MISS, PRODUCT_ROUNDING, ROUNDING, Best
from warpfit_server.engine.cuda.interpreter.launches import (
    Variant,
    is_costly,
    operator_functions,
    variant_source,
)
from warpfit_server.engine.cuda.runtime.compiler import CudaSource
from warpfit_server.engine.cuda.runtime.datasets import ResidentDataset
from warpfit_server.engine.cuda.runtime.device import (
    DRIVER,
    CudaDevice,
    argument_struct,
    launch,
    wait_while_held,
)
from warpfit_server.engine.cuda.runtime.translation import operator_source
from warpfit_server.engine.interface import Steps, offload
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
from warpfit_server.engine.search.library import (
    LEAST_REST,
    LEAST_VARIATION,
    Fit,
    Floats,
    Indices,
    Singles,
)

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
    return CudaSource(variant_source(variant, numbers, template, parts), variant.options)


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


_PAIR_TEMPLATE: Final = resources.files(__package__).joinpath("pairs.cu").read_text()
#: Arguments of the kernels.
PAIRS: Final = argument_struct(_PAIR_TEMPLATE, "Pairs")
PAIR_KERNELS: Final = ("prepare_left", "prepare_right", "weigh_pairs")
#: Compute capabilities that multiply matrices in float64 at half the rate of float32 or more.
_HAVE_DOUBLES: Final = frozenset({(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)})
#: The same relative errors as in engine/cpu/pairs.py, of float64.
_DOUBLE_ROUNDING: Final = 1e-12
#: Formulas of a tile: left and right. On an H200 a tile takes about a millisecond.
_LEFT_TILE: Final = 2_048
_RIGHT_TILE: Final = 4_096
#: Pairs of a tile that the host fits, at most; at least a row of the tile.
_CAPACITY: Final = 4_096
_BLOCKS: Final = 4_096
_MOST_ROWS: Final = 1_024
#: Most orthonormal rows that are known, and matrix products of a fit.
_KNOWN: Final = 2
_TERMS: Final = 2 + _KNOWN


def pairs_source(is_double: bool) -> CudaSource:
    """Return the kernels for products in float64 or float32."""
    numbers = {
        "THREADS": _THREADS, "MOST_ROWS": _MOST_ROWS, "LEAST_VARIATION": LEAST_VARIATION,
        "LEAST_REST": LEAST_REST, "MISS": MISS,
    }  # fmt: skip
    head = "".join(f"#define {name} {number!r}\n" for name, number in numbers.items())
    real = "double" if is_double else "float"
    return CudaSource(f"{head}typedef {real} real;\n{_PAIR_TEMPLATE}", ("--std=c++17",))


def load_pairs(device: CudaDevice) -> None:
    """Load the compiled functions of the host, and have the kernels compiled for a device."""
    cpu_pairs.load()
    source = pairs_source(device.compute_capability in _HAVE_DOUBLES)
    source.cached(device.architecture, device.cache_directory)
    device.use()
    number = device.cupy.ndarray((1, 1), np.dtype(np.float32), memptr=device.allocate(4))
    device.cupy.matmul(number, number.T, out=number)  # which loads cuBLAS


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """Formulas on the device and on the host."""

    values: Singles
    memory: Any
    """CuPy's pointer to the same numbers."""

    def __len__(self) -> int:
        """Count the formulas."""
        return len(self.values)


class _Tile(NamedTuple):
    """Some right formulas."""

    held: _Held
    first: int
    """In ``held``."""
    rights: int
    place: int
    """Of the first one among all right formulas."""


class CudaWeigher:
    """Weighs pairs on a GPU; implements `Weigher`.

    `load_pairs` has been called before, so that nobody waits for a compiler.

    Args:
        device: the device.
    """

    block = _LEFT_TILE
    kept = 600
    rows = 512

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._is_double = device.compute_capability in _HAVE_DOUBLES
        self._real = np.dtype(np.float64 if self._is_double else np.float32)
        module = pairs_source(self._is_double).load(device)
        self._functions = {name: module.get_function(name) for name in PAIR_KERNELS}
        self._context = device.new_stream(urgent=False)
        self._memory: dict[str, Any] = {}

    def close(self) -> None:
        """Free the memory."""
        self._context.stream.synchronize()
        self._memory.clear()
        self._context.release()

    def bytes_needed(self, rows: int, count: int) -> int:
        """Return the bytes of the device, and of the host, that are needed beside the arguments."""
        sizes = self._sizes(rows)
        return sum(sizes.values()) + 4 * count * rows * 16

    def _sizes(self, rows: int) -> dict[str, int]:
        """Return the bytes of each array on the device."""
        real, left, right = self._real.itemsize, _LEFT_TILE, _RIGHT_TILE
        return {
            "left": 4 * left * rows, "roots": 8 * rows, "known": 8 * _KNOWN * rows,
            "target": 8 * rows, "factors": real * _TERMS * left * rows,
            "squared": real * left * rows, "rest": 8 * left, "values": real * right * rows,
            "squares": real * right * rows, "products": real * _TERMS * left * right,
            "f_squares": real * left * right, "others": real * _KNOWN * right,
            "known_factors": real * _KNOWN * rows, "root_squares": real * rows,
            "found0": 4 + 8 * _CAPACITY, "found1": 4 + 8 * _CAPACITY,
        }  # fmt: skip

    def prepared(self, values: Singles) -> _Held:
        """Copy formulas to the device; they stay there as long as the result is kept."""
        values = np.ascontiguousarray(values, np.float32)
        self._device.use()
        memory = self._device.allocate(max(values.nbytes, 1))
        self._upload(memory, values)
        return _Held(values, memory)

    def best(
        self, fit: Fit, left: Singles, right: Sequence[_Held], count: int
    ) -> Steps[tuple[Floats, Indices, Indices]]:
        """Implement `Weigher`; a step is one tile."""
        self._device.use()
        left = np.ascontiguousarray(left, np.float32)
        # The factors of the left formulas are made first.
        sizes, own = self._sizes(len(fit.roots)), np.zeros(1, PAIRS)
        for name, size in sizes.items():
            if name not in self._memory or self._memory[name].mem.size < size:
                self._context.stream.synchronize()
                self._memory[name] = self._device.allocate(size)
        for name in {*sizes} & {*(PAIRS.names or ())}:
            own[name] = int(self._memory[name].ptr)
        given: dict[str, NDArray[Any]] = {
            "left": left, "roots": fit.roots, "known": fit.known, "target": fit.target,
            "known_factors": (fit.known * fit.roots).astype(self._real),
            "root_squares": np.square(fit.roots).astype(self._real),
        }  # fmt: skip
        for name, array in given.items():
            self._upload(self._memory[name], array)
        beside = fit.beside or not fit.is_product
        own["rows"], own["lefts"], own["known_count"] = len(fit.roots), len(left), len(fit.known)
        own["terms"] = 1 + beside + fit.is_product * len(fit.known)
        own["is_product"], own["beside"], own["capacity"] = fit.is_product, beside, _CAPACITY
        own["rounding"] = _DOUBLE_ROUNDING if self._is_double else ROUNDING
        own["product_rounding"] = _DOUBLE_ROUNDING if self._is_double else PRODUCT_ROUNDING
        self._launch("prepare_left", own, len(left))
        total, tiles = 0, list[_Tile]()
        for held in right:
            for first in range(0, len(held.values), _RIGHT_TILE):
                rights = min(_RIGHT_TILE, len(held.values) - first)
                tiles.append(_Tile(held, first, rights, total + first))
            total += len(held.values)
        best = Best(fit, left, total, count)
        waiting: tuple[int, _Tile] | None = None
        for number, tile in enumerate([*tiles, None]):
            slot = number % 2
            if tile is not None:
                self._multiply(own, fit, tile)
                self._weigh(own, slot, best.bound, 0, len(left))
            if waiting is not None:
                yield from self._collected(own, fit, *waiting, best)
            waiting = None if tile is None else (slot, tile)
            yield None
        return best.sorted()

    def _multiply(self, own: NDArray[np.void], fit: Fit, tile: _Tile) -> None:
        """Have the matrix products of a tile computed."""
        rows, lefts, terms = (int(own[name][0]) for name in ("rows", "lefts", "terms"))
        own["right"] = int(tile.held.memory.ptr) + 4 * tile.first * rows
        own["rights"] = tile.rights
        self._launch("prepare_right", own, _BLOCKS)
        values, squares = (self._array(name, tile.rights, rows) for name in ("values", "squares"))
        self._product("products", self._array("factors", terms * lefts, rows), values)
        if fit.is_product:
            self._product("f_squares", self._array("squared", lefts, rows), squares)
        else:
            self._product("f_squares", self._array("root_squares", 1, rows), squares)
            known = self._array("known_factors", len(fit.known), rows)
            self._product("others", known, values)

    def _weigh(self, own: NDArray[np.void], slot: int, bound: float, first: int, stop: int) -> None:
        """Have the pairs noted that may be within a bound, and copied to the host."""
        memory, size = self._memory[f"found{slot}"], 4 + 8 * _CAPACITY
        own["count"], own["places"] = int(memory.ptr), int(memory.ptr) + 4
        own["errors"] = int(memory.ptr) + 4 + 4 * _CAPACITY
        own["bound"], own["first"], own["stop"] = min(bound, 1e300), first, stop
        self._context.clear(int(memory.ptr), 4)
        self._launch("weigh_pairs", own, _BLOCKS)
        staging = self._context.pinned(f"found{slot}", size)
        self._context.download_rows(staging.reshape(1, -1), int(memory.ptr), size)
        self._context.mark(f"found{slot}")

    def _collected(
        self, own: NDArray[np.void], fit: Fit, slot: int, tile: _Tile, best: Best
    ) -> Steps[None]:
        """Fit the pairs that were noted of a tile, which is computed again if they are too many."""
        values = tile.held.values[tile.first : tile.first + tile.rights]
        pair_bytes = 2 * values.itemsize * values.shape[1]

        def add(places: Indices) -> Steps[None]:
            pairs = tile.place, *np.divmod(places, tile.rights)
            yield from offload(pair_bytes * len(places), partial(best.add, values, *pairs))

        count, places, errors = yield from self._found(slot)
        if count <= _CAPACITY:
            yield from add(places)
            return
        bound = best.bound
        self._multiply(own, fit, tile)
        ranges = [(0, int(own["lefts"][0]))]
        while ranges:
            first, stop = ranges.pop()
            while count > _CAPACITY:
                chosen = np.sort(places[np.argsort(errors, kind="stable")[: len(best)]])
                lower = min(bound, best.bound_of(values, *np.divmod(chosen, tile.rights)))
                yield None
                if not lower < bound * (1.0 - MISS):
                    middle = (first + stop) // 2
                    ranges.append((middle, stop))
                    stop = middle
                bound = lower
                self._weigh(own, slot, bound, first, stop)
                count, places, errors = yield from self._found(slot)
            yield from add(places)
            bound = min(bound, best.bound)
            if ranges:
                self._weigh(own, slot, bound, *ranges[-1])
                count, places, errors = yield from self._found(slot)

    def _found(self, slot: int) -> Steps[tuple[int, Indices, NDArray[np.float32]]]:
        """Return the number of pairs that passed; places and errors of those that were noted."""
        yield from self._context.reach(f"found{slot}")
        staging = self._context.pinned(f"found{slot}", 4 + 8 * _CAPACITY)
        count = int(staging[:4].view(np.int32)[0])
        noted = min(count, _CAPACITY)
        places = staging[4 : 4 + 4 * noted].view(np.int32).astype(np.int64)
        errors = staging[4 + 4 * _CAPACITY :].view(np.float32)[:noted].copy()
        order = np.argsort(places)
        return count, places[order], errors[order]

    def _array(self, name: str, *shape: int) -> Any:
        return self._device.cupy.ndarray(shape, self._real, memptr=self._memory[name])

    def _product(self, name: str, left: Any, right: Any) -> None:
        """Multiply [n, rows] by the transpose of [m, rows]."""
        result = self._array(name, left.shape[0], right.shape[0])
        wait_while_held(self._context.functions)
        with self._context.stream:
            self._device.cupy.matmul(left, right.T, out=result)

    def _launch(self, name: str, own: NDArray[np.void], blocks: int) -> None:
        wait_while_held(self._context.functions)
        grid, threads = (blocks, 1, 1), (_THREADS, 1, 1)
        self._functions[name](grid, threads, (own,), stream=self._context.stream)

    def _upload(self, memory: Any, array: NDArray[Any]) -> None:
        """Copy an array to the device after earlier copies have arrived."""
        self._context.stream.synchronize()
        staging = self._context.pinned("upload", array.nbytes)
        staging[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._context.upload(int(memory.ptr), staging)
