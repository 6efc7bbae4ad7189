"""Subtrees of many programs at once."""

import numpy as np
from numpy.typing import NDArray


def subtree_starts(operands: NDArray[np.int64], longest: int = 1_000) -> NDArray[np.int64]:
    """Return the first token of the subtree that ends at each token; int64 [tokens].

    It is the last leaf so far that left the stack as high as the subtree does.

    Args:
        operands: number of operands of each token of programs in postfix order, one after the
            other; [tokens].
        longest: at least the number of tokens of the longest program.

    """
    # NumPy sorts 16-bit integers by radix. That they overflow from program to program does no harm.
    kind = np.uint16 if longest < 2**16 else np.int64
    order = np.argsort(np.cumsum(1 - operands).astype(kind), kind="stable")
    leaves = np.flatnonzero(operands.take(order) == 0)
    starts = np.empty_like(order)
    starts[order] = np.repeat(order.take(leaves), np.diff(leaves, append=len(order)))
    return starts
