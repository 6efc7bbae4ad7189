"""The fixed blocks of rows that sums are made of, and the shards of rows that they allow.

Sums over rows are float64 sums of blocks, added up in a tree of two children a node. A shard ends
where a node ends. So the nodes of one shard need no rows of another, and whoever has the sums
of the nodes of all shards makes the same sums of them as if one device had had all rows.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final, NamedTuple

from warpfit.dataset import Layout

#: Bytes of a column that a block has: what keeps a few columns in the first-level cache. Half of
#: that takes the CPU engine 5 % longer on 100,000 rows, because kernels are called twice as often.
BLOCK_BYTES: Final = 8192
#: Least level of the nodes that shards are made of: that of the blocks of CUDA engines.
LEAST_LEVEL: Final = 1
#: Levels from any node to the root, at least.
_ALL_LEVELS: Final = 62
#: Nodes of a shard at least, if there are as many rows: no shard is larger by more than 1/16.
_NODES_A_SHARD: Final = 16


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


class Shards(NamedTuple):
    """The shards of a data set, each on a device of its own."""

    engines: tuple[int, ...]
    """Number of the engine of each shard."""
    bounds: tuple[int, ...]
    """First row of each shard, and the number of rows."""
    level: int
    """Level of the nodes that bounds are between."""

    @classmethod
    def of(cls, layout: Layout, engines: tuple[int, ...]) -> Shards | None:
        """Divide the rows evenly among engines, or the first of them if there are few rows.

        Returns:
            The shards; None if there are rows for one only.
        """
        level = LEAST_LEVEL
        while layout.rows >= _NODES_A_SHARD * len(engines) * node_rows(layout, level + 1):
            level += 1
        size = node_rows(layout, level)
        nodes = -(-layout.rows // size)
        count = min(nodes, len(engines))
        bounds = (min(layout.rows, round(i * nodes / count) * size) for i in range(count + 1))
        return cls(engines[:count], tuple(bounds), level) if count > 1 else None

    def parts(self, rows: tuple[int, int]) -> dict[int, tuple[int, int]]:
        """Return which of the given rows each engine has, by its number, in ascending order."""
        start, stop = rows
        return {
            engine: (max(start, first), min(stop, end))
            for engine, (first, end) in zip(self.engines, pairwise(self.bounds), strict=True)
            if max(start, first) < min(stop, end)
        }

    def nodes(self, rows: tuple[int, int], layout: Layout) -> int:
        """Return how many nodes there are that have some of the rows."""
        return len(nodes_of(rows, node_rows(layout, self.level)))
