"""Pairs of formulas on a GPU: matrix products by cuBLAS, and a kernel that notes what is best.

The simple form, for tiles of right formulas (`engine.search.weighing`):

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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit_server.engine.cpu import pairs as cpu_pairs
from warpfit_server.engine.cpu.pairs import MISS, PRODUCT_ROUNDING, ROUNDING, Best
from warpfit_server.engine.cuda.runtime.compiler import CudaSource
from warpfit_server.engine.cuda.runtime.device import CudaDevice
from warpfit_server.engine.cuda.runtime.driver_calls import argument_struct, wait_while_held
from warpfit_server.engine.interface import Steps, offload
from warpfit_server.engine.search.weighing import (
    LEAST_REST,
    LEAST_VARIATION,
    Fit,
    Floats,
    Indices,
    Singles,
)

_TEMPLATE: Final = resources.files(__package__).joinpath("pairs.cu").read_text()
#: Arguments of the kernels.
PAIRS: Final = argument_struct(_TEMPLATE, "Pairs")
KERNELS: Final = ("prepare_left", "prepare_right", "weigh_pairs")
#: Compute capabilities that multiply matrices in float64 at half the rate of float32 or more.
_HAVE_DOUBLES: Final = frozenset({(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)})
#: The same relative errors as in engine/cpu/pairs.py, of float64.
_DOUBLE_ROUNDING: Final = 1e-12
#: Formulas of a tile: left and right. On an H200 a tile takes about a millisecond.
_LEFT_TILE: Final = 2_048
_RIGHT_TILE: Final = 4_096
#: Pairs of a tile that the host fits, at most; at least a row of the tile.
_CAPACITY: Final = 4_096
_THREADS: Final = 128
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
    return CudaSource(f"{head}typedef {real} real;\n{_TEMPLATE}", ("--std=c++17",))


def load(device: CudaDevice) -> None:
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

    `load` has been called before, so that nobody waits for a compiler.

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
        self._functions = {name: module.get_function(name) for name in KERNELS}
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
        own = self._prepared_fit(fit, left)
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

    def _prepared_fit(self, fit: Fit, left: Singles) -> NDArray[np.void]:
        """Have the factors of the left formulas made; return the record of `PAIRS`."""
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
        return own

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
