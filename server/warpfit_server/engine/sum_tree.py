"""The order in which sums over rows are added up: a tree that depends on nothing but the dtype.

The leaves are the float64 sums of blocks of rows, of which block i holds the rows from i times
`block_rows` of the data set on. Each node is the sum of two neighbours on the level
below; blocks that are not among the rows count as 0. So every range of rows from a multiple of its
length on is a node if that length is a power of two and no shorter than a block.

So the bits of a sum over rows do not depend on threads, on chunks, or on other programs of the
batch. Sums of nodes that were computed apart are put together by `sum_nodes`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Layout
from warpfit_server.engine.interface import Steps
from warpfit_server.engine.native.intrinsics import inlined

#: Bytes of a column that a block has: what keeps a few columns in the first-level cache. Half of
#: that takes the CPU engine 5 % longer on 100,000 rows, because kernels are called twice as often.
BLOCK_BYTES: Final = 8192
#: Sums of nodes that are added up without a pause, which takes a few milliseconds.
_SUMS_AT_ONCE: Final = 1 << 20
#: Levels from any node to the root, at least.
_ALL_LEVELS: Final = 62


def block_rows(layout: Layout) -> int:
    """Return the rows of a block."""
    return BLOCK_BYTES // layout.dtype.itemsize


def node_rows(layout: Layout, level: int) -> int:
    """Return the rows of a node; blocks have level 0."""
    return block_rows(layout) << level


def levels_between(few: int, many: int | None) -> int:
    """Return how far nodes of ``many`` rows are above those of ``few``; with None, the root is."""
    return _ALL_LEVELS if many is None else (many // few).bit_length() - 1


def nodes_of(rows: tuple[int, int], length: int) -> range:
    """Return the numbers of the nodes of ``length`` rows that have some of the rows."""
    return range(rows[0] // length, -(-rows[1] // length))


def add_nodes(nodes: NDArray[np.float64], first: int, totals: NDArray[np.float64]) -> Steps[None]:
    """Fill ``totals``, [sums], as `sum_nodes` adds nodes up, some sums at a time."""
    count = max(1, _SUMS_AT_ONCE // max(1, len(nodes)))
    for start in range(0, len(totals), count):
        if start:
            yield None
        some = slice(start, start + count)
        totals[some] = sum_nodes(nodes[:, some], first)


def sum_nodes(nodes: NDArray[np.float64], first: int) -> NDArray[np.float64]:
    """Add up sums of neighbouring nodes of one level, [nodes, sums], as the tree says.

    Args:
        nodes: the sums of each node; those of some rows only count as nodes, too.
        first: number of the first node on its level.

    Returns:
        The sums of the rows, [sums]; a view of a single node.
    """
    with np.errstate(all="ignore"):
        while len(nodes) > 1:
            pairs = np.pad(nodes, ((first % 2, (first + len(nodes)) % 2), (0, 0)))
            nodes = pairs[::2] + pairs[1::2]
            first //= 2
    # Which of two NaNs a sum keeps, with its sign, is up to NumPy.
    is_nan = np.isnan(nodes[0])
    return np.where(is_nan, np.nan, nodes[0]) if is_nan.any() else nodes[0]


def tree_of(move_up: Callable[[Any, int], None]) -> tuple[Any, Any]:
    """Return two functions of compiled code, which add up blocks that come in their order.

    Of each level there is one node, the one that is not complete.

    Args:
        move_up: called with ``nodes``, [levels, ...], and a level; it adds the node of that level
            to the one above and empties it.

    Returns:
        ``carry(nodes, blocks)``, which moves up what is complete before block number ``blocks``,
        and ``top(nodes)``, which returns the node on the highest level, whether or not it is
        complete.
    """

    @inlined
    def carry(nodes: Any, blocks: int) -> None:
        level = 0
        while blocks % 2 == 0 and level + 1 < len(nodes):
            move_up(nodes, level)
            blocks //= 2
            level += 1

    @inlined
    def top(nodes: Any) -> Any:
        for level in range(len(nodes) - 1):
            move_up(nodes, level)
        return nodes[len(nodes) - 1]

    return carry, top


@inlined
def _add(sums: Any, level: int) -> None:
    for index in range(sums.shape[1]):
        sums[level + 1, index] += sums[level, index]
        sums[level, index] = 0.0


#: For sums, [levels, sums].
carry, node_sums = tree_of(_add)
