"""Pairs of formulas on the CPU: matrix products in float32, and fits of what is close to the best.

The simple form, for tiles of left and right formulas (`engine.search.library`):

    products = the matrix products of the tile, by BLAS
    for each pair of the tile:
        if products say that its error may be below the largest one of the best so far, the bound:
            fit it in float64, and keep it if it is one of the best

Products in float32 take half the time of those in float64. The comparison allows for their
rounding, so that the result is that of float64, whatever the threads do; few pairs are fitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
from numba import types

from warpfit_server.engine.interface import Steps
from warpfit_server.engine.native import numba_cache
from warpfit_server.engine.search.library import (
    LEAST_REST,
    LEAST_VARIATION,
    Fit,
    Floats,
    Indices,
    Singles,
)

#: Relative rounding errors of f.f and f.r in float32, for vectors of length 1; and the part of the
#: bound by which pairs may miss it, so that the second one hardly matters.
ROUNDING: Final = 4e-6
PRODUCT_ROUNDING: Final = 2e-6
MISS: Final = 1e-3
#: Formulas of a tile: left and right.
_LEFT_TILE: Final = 256
_RIGHT_TILE: Final = 512
#: Pairs that are compared with the bound before one of them is looked at.
_LOOK: Final = 64

# ------------------------------------------------------------------------------ compiled by Numba

_compiled = numba_cache.njit(nogil=True, error_model="numpy", fastmath={"reassoc", "contract"})


@_compiled  # type: ignore[untyped-decorator]
def fitted_error(
    u: Any, v: Any, is_product: bool, roots: Any, known: Any, own: Any, target: Any, f: Any
) -> float:
    """Return the error of one pair in float64, infinite if the pair hardly varies.

    Args:
        u: values of the left formula, float32 [rows].
        v: values of the right formula.
        is_product: as in `Fit`.
        roots: as in `Fit`.
        known: as in `Fit`.
        own: its row of `Sides`.
        target: its row of `Sides`.
        f: memory of a row.
    """
    rows = len(roots)
    before = 0.0
    for row in range(rows):
        f[row] = roots[row] * v[row]
        if is_product:
            f[row] *= u[row]
        before += f[row] * f[row]
    for place in range(len(known) + 1):
        basis = own if place == len(known) else known[place]
        part = 0.0
        for row in range(rows):
            part += f[row] * basis[row]
        for row in range(rows):
            f[row] -= part * basis[row]
    variance, along = 0.0, 0.0
    for row in range(rows):
        variance += f[row] * f[row]
        along += f[row] * target[row]
    if not variance > LEAST_VARIATION * before:
        return np.inf
    slope, error = along / variance, 0.0
    for row in range(rows):
        left = target[row] - slope * f[row]
        error += left * left
    return error


@_compiled  # type: ignore[untyped-decorator]
def _push(errors: Any, ids: Any, error: float, name: int) -> None:
    """Replace the worst of the best, at the root of a heap, by a pair that is better."""
    if error > errors[0] or (error == errors[0] and name > ids[0]):
        return
    place, count = 0, len(errors)
    while True:
        child = 2 * place + 1
        if child >= count:
            break
        other = child + 1
        if other < count and (
            errors[other] > errors[child]
            or (errors[other] == errors[child] and ids[other] > ids[child])
        ):
            child = other
        if error > errors[child] or (error == errors[child] and name > ids[child]):
            break
        errors[place], ids[place] = errors[child], ids[child]
        place = child
    errors[place], ids[place] = error, name


@numba_cache.njit(nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "nnan", "nsz"})  # type: ignore[untyped-decorator]
def _closest(
    products: Any,
    squares: Any,
    spreads: Any,
    i: int,
    side: int,
    first: int,
    stop: int,
    rest: float,
    bound: float,
) -> float:
    """Return by how much the best of some pairs of a row are within the bound; negative: none.

    That is the largest (f.r)^2 - (rest - bound) f.f, and what float32 may have taken from it.
    """
    closest, smallest = np.float32(-1.0), np.float32(LEAST_VARIATION / 2)
    need, miss = max(rest - bound, 0.0), rest * PRODUCT_ROUNDING**2 / MISS
    needed, tolerance = np.float32(need * (1.0 - MISS)), np.float32(need * ROUNDING + miss)
    for j in range(first, stop):
        variance = spreads[side, j]
        for k in range(1, len(products)):
            variance -= products[k, i, j] * products[k, i, j]
        found = products[0, i, j] * products[0, i, j] - needed * variance
        found += tolerance * squares[side, j]
        closest = max(closest, found if variance > smallest * squares[side, j] else closest)
    return float(closest)


@_compiled  # type: ignore[untyped-decorator]
def weigh_tile(
    products: Any,
    squares: Any,
    spreads: Any,
    rest: Any,
    is_product: bool,
    left: Any,
    right: Any,
    roots: Any,
    known: Any,
    own: Any,
    targets: Any,
    place: Any,
    bound: Any,
    errors: Any,
    ids: Any,
    f: Any,
) -> None:
    """Keep the best pairs of a tile.

    Args:
        products: f.r and projections of f, float32 [products, left, right of the tile].
        squares: mean squares of f, float32 [left or 1, right of the tile].
        spreads: the same without projections that are not among the products.
        rest: as in `Sides`.
        is_product: as in `Fit`.
        left: values of all left formulas, float32 [left, rows].
        right: values of the right formulas of the tile.
        roots: as in `Fit`.
        known: as in `Fit`.
        own: as in `Sides`.
        targets: as in `Sides`.
        place: number of the tile's first right formula, and the number of all; [2].
        bound: least of the bounds of all threads; float64 [1].
        errors: the best errors so far, a heap with the largest first; [count].
        ids: left x number of right formulas + right, [count].
        f: memory of a row.
    """
    width = products.shape[2]
    for i in range(products.shape[1]):
        side = min(i, len(squares) - 1)
        if not rest[i] > LEAST_REST:
            continue
        for first in range(0, width, _LOOK):
            stop, least = min(first + _LOOK, width), min(errors[0], bound[0])
            if _closest(products, squares, spreads, i, side, first, stop, rest[i], least) < 0.0:
                continue
            for j in range(first, stop):
                least = min(errors[0], bound[0])
                if _closest(products, squares, spreads, i, side, j, j + 1, rest[i], least) < 0.0:
                    continue
                error = fitted_error(
                    left[i], right[j], is_product, roots, known, own[i], targets[i], f
                )
                if error < np.inf:
                    _push(errors, ids, error, i * place[1] + place[0] + j)
        bound[0] = min(bound[0], errors[0])


@_compiled  # type: ignore[untyped-decorator]
def keep_pairs(
    left: Any,
    right: Any,
    is_product: bool,
    beside: bool,
    roots: Any,
    known: Any,
    target: Any,
    ones: Any,
    others: Any,
    names: Any,
    errors: Any,
    ids: Any,
    memory: Any,
) -> None:
    """Fit some pairs, and keep the best.

    Args:
        left: values of left formulas, float32 [left, rows].
        right: values of right formulas.
        is_product: as in `Fit`.
        beside: as in `Fit`.
        roots: as in `Fit`.
        known: as in `Fit`.
        target: as in `Fit`.
        ones: the left formula of each pair, [pairs]; pairs of one follow one another.
        others: the right formula of each pair.
        names: numbers of the pairs, as in `weigh_tile`.
        errors: as in `weigh_tile`.
        ids: as in `weigh_tile`.
        memory: of three rows.
    """
    f, own, rest = memory[0], memory[1], memory[2]
    rows = len(roots)
    for pair in range(len(ones)):
        i = ones[pair]
        if pair == 0 or i != ones[pair - 1]:
            before, after, along = 0.0, 0.0, 0.0
            for row in range(rows):
                own[row] = left[i, row] * roots[row]
                before += own[row] * own[row]
            for k in range(2 * len(known)):
                part, basis = 0.0, known[k % len(known)]
                for row in range(rows):
                    part += own[row] * basis[row]
                for row in range(rows):
                    own[row] -= part * basis[row]
            for row in range(rows):
                after += own[row] * own[row]
            sound = (beside or not is_product) and after > LEAST_VARIATION * before
            for row in range(rows):
                own[row] = own[row] / np.sqrt(after) if sound else 0.0
                along += own[row] * target[row]
            for row in range(rows):
                rest[row] = target[row] - along * own[row]
        error = fitted_error(left[i], right[others[pair]], is_product, roots, known, own, rest, f)
        if error < np.inf:
            _push(errors, ids, error, names[pair])


def load() -> None:
    """Load the compiled functions, or compile them."""
    double, single, flat = types.float64[:, ::1], types.float32[:, ::1], types.float64[::1]
    numba_cache.load(
        weigh_tile,
        types.void(
            *(types.float32[:, :, ::1], single, single, flat, types.boolean, single, single),
            *(flat, double, double, double, types.int64[::1], flat, flat, types.int64[::1], flat),
        ),
    )
    numbers = types.int64[::1]
    numba_cache.load(
        keep_pairs,
        types.void(
            *(single, single, types.boolean, types.boolean, flat, double, flat),
            *(numbers, numbers, numbers, flat, numbers, double),
        ),
    )


class Best:
    """The best of the pairs that are added to it.

    Args:
        fit: what pairs are fitted to.
        left: values of the left formulas, float32 [left, rows].
        total: number of right formulas.
        count: of pairs to keep.
    """

    def __init__(self, fit: Fit, left: Singles, total: int, count: int) -> None:
        self._fit, self._left, self._total = fit, left, total
        self._errors, self._ids = np.full(count, np.inf), np.full(count, -1)

    def __len__(self) -> int:
        """Return how many pairs are kept."""
        return len(self._errors)

    @property
    def bound(self) -> float:
        """The largest error of a pair that is kept; infinite as long as there is room for more."""
        return float(self._errors[0])

    def add(self, right: Singles, first: int, ones: Indices, others: Indices) -> None:
        """Fit pairs and keep the best.

        Args:
            right: values of some right formulas, which follow one another.
            first: number of the first of these.
            ones: the left formula of each pair; pairs of one follow one another.
            others: the right formula of each pair, a place in ``right``.
        """
        self._keep(
            right, ones, others, ones * self._total + first + others, self._errors, self._ids
        )

    def bound_of(self, right: Singles, ones: Indices, others: Indices) -> float:
        """Return an upper limit of the bound after adding pairs; none is added."""
        errors, ids = np.full(len(self), np.inf), np.full(len(self), -1)
        self._keep(right, ones, others, np.arange(len(ones)), errors, ids)
        return float(errors[0])

    def sorted(self) -> tuple[Floats, Indices, Indices]:
        """Return the result of `Weigher.best`."""
        return sorted_pairs(self._errors, self._ids, len(self), self._total)

    def _keep(
        self,
        right: Singles,
        ones: Indices,
        others: Indices,
        names: Indices,
        errors: Floats,
        ids: Indices,
    ) -> None:
        fit, memory = self._fit, np.empty((3, len(self._fit.roots)))
        keep_pairs(
            *(self._left, right, fit.is_product, fit.beside, fit.roots, fit.known, fit.target),
            *(ones, others, names, errors, ids, memory),
        )


def sorted_pairs(
    errors: Floats, ids: Indices, count: int, total: int
) -> tuple[Floats, Indices, Indices]:
    """Return the least errors in ascending order, and the places of their pairs."""
    order = np.lexsort((ids, errors))[:count]
    order = order[np.isfinite(errors[order])]
    return (errors[order], *np.divmod(ids[order], max(total, 1)))


# ------------------------------------------------------------------------------------- on the CPU


class CpuWeigher:
    """Weighs pairs on threads of the CPU, each of which calls BLAS; implements `Weigher`.

    Args:
        threads: that compute at the same time. BLAS should not start threads of its own.
    """

    block = _LEFT_TILE
    kept = 150
    rows = 128

    def __init__(self, threads: int) -> None:
        load()
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "pairs")

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def bytes_needed(self, rows: int, count: int) -> int:
        """Implement `Weigher`."""
        sides = _LEFT_TILE * rows * (8 * 12 + 4 * 12)
        tile = _RIGHT_TILE * (_LEFT_TILE * 4 * 7 + rows * 4 * 2)
        return sides + self._threads * (tile + 16 * count + 8 * rows)

    def prepared(self, values: Singles) -> Singles:
        """Implement `Weigher`."""
        return np.ascontiguousarray(values, np.float32)

    def best(
        self, fit: Fit, left: Singles, right: Sequence[Singles], count: int
    ) -> Steps[tuple[Floats, Indices, Indices]]:
        """Implement `Weigher`; a step is one tile for each thread."""
        rows, left, product = len(fit.roots), self.prepared(left), fit.is_product
        sides = fit.sides(left)
        factors = sides.factors(fit).astype(np.float32)
        squared = np.square(left * fit.roots if product else fit.roots[None]).astype(np.float32)
        known = (fit.known * fit.roots).astype(np.float32)
        yield None
        bound = np.full(1, np.inf)
        tops = [(np.full(count, np.inf), np.full(count, -1)) for _ in range(self._threads)]
        total = sum(map(len, right))
        tiles, first = list[tuple[int, Singles]](), 0
        for part in right:
            starts = range(0, len(part), _RIGHT_TILE)
            tiles += [(first + start, part[start : start + _RIGHT_TILE]) for start in starts]
            first += len(part)

        def weigh(thread: int, numbered: tuple[int, Singles]) -> None:
            start, tile = numbered
            products = (factors.reshape(-1, rows) @ tile.T).reshape(len(factors), len(left), -1)
            squares = spreads = squared @ np.square(tile).T
            if not product:
                spreads = squares - np.square(known @ tile.T).sum(axis=0)
            weigh_tile(
                *(products, squares, spreads, sides.rest, product, left, tile),
                *(fit.roots, fit.known, sides.own, sides.targets),
                *(np.array([start, total]), bound, *tops[thread], np.empty(rows)),
            )

        for start in range(0, len(tiles), self._threads):
            wave = tiles[start : start + self._threads]
            for _ in self._pool.map(weigh, range(len(wave)), wave):
                pass
            yield None
        errors, ids = (np.concatenate(arrays) for arrays in zip(*tops, strict=True))
        return sorted_pairs(errors, ids, count, total)
