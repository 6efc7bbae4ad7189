"""Lowering: postfix tokens to the instructions that the CPU interpreter runs, compiled by Numba.

The simple form turns each operator token into one instruction that pops its operands from a stack
and pushes its result. What is clever happens in one pass over the tokens and one over the nodes:

* A subexpression that occurs again is the same node of a graph and is computed once (`graph`).
* A power with the constant exponent -2, -1, 1, 2, 3 or 4 becomes products or a quotient.
* What is made of parameters and constants alone is a scalar, computed in the prologue: once for
  each parameter vector instead of once for each block of rows.
* Variables, scalars and results are operands in place; there are no loads and no stores.
* Instructions are ordered so that few slots are needed (`schedule`).

Each program has its own part of the results, so threads lower ranges of programs.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.ir import Batch
from warpfit.ops import ARITIES
from warpfit_server.engine.lowering.graph import clear, new_graph, number_tokens
from warpfit_server.engine.lowering.lowered import NONE, Lowered, lowered_of
from warpfit_server.engine.lowering.schedule import emit_prologue, emit_result, new_scratch
from warpfit_server.engine.native import numba_cache
from warpfit_server.engine.native.arguments import (
    FAILED,
    FINISHED,
    OWN_ARRAYS,
    chunk_ranges,
    floats,
    octets,
    words,
)
from warpfit_server.engine.native.intrinsics import inlined

_WIDE_ARITIES: Final = ARITIES.astype(np.int64)
#: Arrays of an argument block, in the order of `lowering_arrays`.
_CODES, _VALUES, _STARTS, _ARITIES, _LOWERED = range(OWN_ARRAYS, OWN_ARRAYS + 5)


def lowering_arrays(batch: Batch, out: Lowered) -> tuple[NDArray[Any], ...]:
    """Return the own arrays of an argument block for `lower_chunk`.

    Args:
        batch: checked programs.
        out: is filled; with room for an instruction for each token and each program, and for a
            load for each token.
    """
    tokens = np.ascontiguousarray(batch.codes), np.ascontiguousarray(batch.values)
    return (*tokens, batch.starts, _WIDE_ARITIES, *out)


@numba_cache.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def lower_chunk(block: int, chunk: int) -> int:
    """Lower a range of programs; see `arguments`."""
    programs, _, _ = chunk_ranges(block, chunk)
    try:
        _lower(
            octets(block, _CODES), floats(block, _VALUES), words(block, _STARTS),
            words(block, _ARITIES), lowered_of(block, _LOWERED), programs,
        )  # fmt: skip
    except Exception:  # compiled code tells exceptions apart no further: memory is short
        return FAILED
    return FINISHED


@inlined
def _lower(codes: Any, values: Any, starts: Any, arities: Any, out: Lowered, programs: Any) -> None:
    longest = longest_program(starts, programs.start, programs.stop)
    graph, scratch = new_graph(_nodes(longest), longest, arities), new_scratch(_nodes(longest))
    for program in range(programs.start, programs.stop):
        start, stop = starts[program], starts[program + 1]
        clear(graph, _nodes(stop - start))
        root = number_tokens(graph, codes[start:stop], values[start:stop], np.int64(NONE))
        header = out.headers[program]
        header.start, header.first_load = start + program, start
        emit_prologue(graph, scratch, out, header)
        emit_result(graph, scratch, out, header, root)


@inlined
def _nodes(tokens: int) -> int:
    """Return how many nodes tokens have at most: those of a power and its exponent have three."""
    return tokens + tokens // 2


@inlined
def longest_program(starts: Any, start: int, stop: int) -> int:
    """Return the tokens of the longest of a range of programs."""
    longest = 1
    for program in range(start, stop):
        longest = max(longest, starts[program + 1] - starts[program])
    return longest
