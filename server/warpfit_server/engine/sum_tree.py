"""The order in which sums over rows are added up: a tree that depends on nothing but the dtype.

The leaves are the float64 sums of blocks of rows, of which block i holds the rows from i times
`row_blocks.block_rows` of the data set on. Each node is the sum of two neighbours on the level
below; blocks that are not among the rows count as 0. So every range of rows from a multiple of its
length on is a node if that length is a power of two and no shorter than a block.

So the bits of a sum over rows do not depend on threads, on chunks, or on other programs of the
batch. Sums of nodes that were computed apart are put together by `sum_nodes`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from warpfit_server.engine.native.intrinsics import inlined
from warpfit_server.row_blocks import RADIX


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
            before, behind = first % RADIX, -(first + len(nodes)) % RADIX
            groups = np.pad(nodes, ((before, behind), (0, 0)))
            nodes, *others = (groups[child::RADIX] for child in range(RADIX))
            for other in others:
                nodes = nodes + other
            first //= RADIX
    # Which of two NaNs a sum keeps, with its sign, is up to NumPy.
    is_nan = np.isnan(nodes[0])
    return np.where(is_nan, np.nan, nodes[0]) if is_nan.any() else nodes[0]


def parent_nodes(nodes: NDArray[np.float64], first: int, levels: int) -> NDArray[np.float64]:
    """Add up sums of nodes, as `sum_nodes`, to those of the nodes so many levels above."""
    numbers = first + np.arange(len(nodes))
    edges = np.flatnonzero(np.diff(numbers >> levels)) + 1
    groups = zip(np.split(nodes, edges), numbers[[0, *edges]], strict=True)
    return np.stack([sum_nodes(group, int(number)) for group, number in groups])


@inlined
def carry(sums: Any, blocks: int) -> None:
    """Add the sums of nodes that are complete to those of the level above.

    Args:
        sums: sums of the node of each level that is not complete, [levels, sums].
        blocks: number of the next block.
    """
    level = 0
    while blocks % RADIX == 0 and level + 1 < len(sums):
        for index in range(sums.shape[1]):
            sums[level + 1, index] += sums[level, index]
            sums[level, index] = 0.0
        blocks //= RADIX
        level += 1


@inlined
def node_sums(sums: Any) -> Any:
    """Return the sums of the node on the highest level, whether or not it is complete."""
    for level in range(len(sums) - 1):
        for index in range(sums.shape[1]):
            sums[level + 1, index] += sums[level, index]
    return sums[len(sums) - 1]
