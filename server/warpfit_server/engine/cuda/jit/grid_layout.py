"""How compiled kernels are laid out on the device."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from warpfit.ops import OPERATORS
from warpfit_server.engine.cuda.jit.device_library import Mode


@dataclass(frozen=True, slots=True)
class GridLayout:
    """How the rows and expressions of a batch are laid out on the device."""

    group_size: int
    """Expressions of a fused kernel."""
    threads: int
    """Threads of a block. Many, because blocks of different kernels on one multiprocessor drive
    each other's instructions out of its cache: with 128 threads the fast kernels run at half, the
    precise ones at a quarter of the rate."""
    blocks: int
    """Blocks of all kernels for each multiprocessor, shared out by the kernels' work."""
    rows: int = 1
    """Rows a thread works on at a time: 1, 2 or 4, at most 2 in float64."""


#: Layouts for fused kernels, the measured best on one H200.
_LAYOUTS: Final = {
    Mode.FAST: GridLayout(group_size=20, threads=512, blocks=3),
    Mode.PRECISE: GridLayout(group_size=10, threads=1024, blocks=6),
    Mode.DOUBLE: GridLayout(group_size=10, threads=512, blocks=12),
}
#: For batches of nothing but short instructions, such as ``+ - *``: bound by reading variables.
_CHEAP_LAYOUT: Final = GridLayout(group_size=20, threads=512, blocks=2, rows=4)


#: Token-rows that each multiprocessor is given at a time: some 2 ms of an H200's.
_AT_ONCE: Final = {Mode.FAST: 180_000_000, Mode.PRECISE: 90_000_000, Mode.DOUBLE: 45_000_000}


def token_rows_at_once(mode: Mode, multiprocessors: int) -> int:
    """Token-rows of one launch of compiled kernels; the interpreter is about half as fast.

    A device runs what it was given in the order in which it came. So large work is given to it in
    pieces, between which that of others gets its turn. Their size depends on the device alone,
    because sums depend on it in their last bits.
    """
    return _AT_ONCE[mode] * multiprocessors


def _cheap_codes() -> NDArray[np.bool_]:
    """Mark the codes that take no division and no function but abs; bool [256]."""
    cheap = np.ones(256, dtype=np.bool_)
    for operator in OPERATORS.values():
        called = set(re.findall(r"(\w+)\(", operator.kernel)) - {"abs", "select"}
        cheap[operator.code] = not called and "/" not in operator.kernel
    return cheap


_CHEAP: Final = _cheap_codes()


#: Layout for kernels that sum up gradients: many accumulators leave registers for few threads.
_GRADIENT_LAYOUT: Final = GridLayout(group_size=10, threads=512, blocks=4)


def best_layout(mode: Mode, codes: NDArray[np.uint8], *, gradient: bool = False) -> GridLayout:
    """Choose the layout of fused kernels for expressions of these tokens."""
    if gradient:
        return _GRADIENT_LAYOUT
    cheap = mode is not Mode.DOUBLE and bool(_CHEAP[codes].all())
    return _CHEAP_LAYOUT if cheap else _LAYOUTS[mode]


def shared_out(total: int, shares: NDArray[np.float64]) -> NDArray[np.int64]:
    """Cut ``total`` into whole numbers in proportion to ``shares``, by the largest remainders."""
    exact = total * shares
    parts = np.floor(exact).astype(np.int64)
    parts[np.argsort(parts - exact, kind="stable")[: total - int(parts.sum())]] += 1
    return parts
