"""Size limits of requests, checked before anything is allocated for them.

Every check raises ResourceExhaustedError, which names the limit and the flag that raises it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from warpfit.dataset import Layout
from warpfit.errors import ResourceExhaustedError
from warpfit.fitting import FitRequest, Method
from warpfit.ir import Batch
from warpfit.request import Evaluation
from warpfit.server_info import Limits

#: Bytes of memory that a fit takes for each token of its lowered programs; and for each token,
#: search and parameter of all starts: the programs of all searches and of those that still run, and
#: the state of the searches.
_LOWERED_BYTES: Final = 100
_TOKEN_BYTES: Final = 18
_SEARCH_BYTES: Final = 600
_PARAMETER_BYTES: Final = 200
#: Sums of which linear scaling and correlations are made.
_MOMENTS: Final = 7
#: Matrices that are alive during a pass. Levenberg-Marquardt has triangles of all searches, of
#: those that still run, and of what the pass returns; BFGS has squares of the first two.
_TRIANGLES: Final = 3
_SQUARES: Final = 2
#: Most numbers for which the CPU engine keeps separate sums for each block of rows, the rows of a
#: block, and the most blocks.
_MOST_SUMS: Final = 2**25
_BLOCK_ROWS: Final = 2048
_MOST_BLOCKS: Final = 64


def check_batch(batch: Batch, limits: Limits) -> None:
    """Refuse a batch that is too large, before its tokens are looked at."""
    longest = int(batch.lengths.max(initial=0))
    tokens = ("tokens in a program", longest, limits.program_tokens, "program-tokens")
    _check("PROGRAM_TOO_LONG", *tokens)
    _check("TOO_MANY_PROGRAMS", "programs in the batch", len(batch), limits.programs, "programs")
    _check("TOO_MANY_VECTORS", "parameter vectors", batch.vectors, limits.vectors, "vectors")


def check_token_count(tokens: int, limits: Limits) -> None:
    """Refuse a batch of too many tokens, before their values are unpacked."""
    _check("TOO_MANY_TOKENS", "tokens in the batch", tokens, limits.tokens, "tokens")


def check_loss(tokens: int, limits: Limits) -> None:
    """Refuse a loss function of the caller's own that is too long, before it is decoded."""
    what = "tokens in the loss function"
    place = ("Write a shorter loss", "loss_function")
    _check("LOSS_TOO_LONG", what, tokens, limits.loss_tokens, "loss-tokens", *place)


def check_names(names: Sequence[str], limits: Limits) -> None:
    """Refuse too many or too long names of variables, before they are copied."""
    place = ("Send fewer or shorter names, or none", "layout.names")
    _check("TOO_MANY_NAMES", "variable names", len(names), limits.names, "names", *place)
    size = sum(len(name.encode()) for name in names)
    what = "bytes of variable names"
    _check("NAMES_TOO_LONG", what, size, limits.name_bytes, "name-bytes", *place)


def check_dataset(layout: Layout, limits: Limits) -> None:
    """Refuse a data set that is too large."""
    place = ("Use float32 or fewer rows", "layout")
    what = "bytes in the data set"
    _check("DATASET_TOO_LARGE", what, layout.nbytes, limits.dataset_bytes, "dataset-bytes", *place)
    place = ("Use fewer rows", "layout.rows")
    _check("TOO_MANY_ROWS", "rows in the data set", layout.rows, limits.rows, "rows", *place)


def check_result(evaluation: Evaluation, layout: Layout, limits: Limits, nodes: int = 0) -> int:
    """Refuse an answer that is too large.

    Args:
        evaluation: whose rows have been checked.
        layout: of its data set.
        limits: of the tenant.
        nodes: of the rows, if engines that share them sum up each one.

    Returns:
        Bytes of the answer; with nodes those of their sums, too, and both twice, because the
        engines' parts are copied together.

    """
    programs, vectors, rows = evaluation.shape(layout)
    cells, parameters = programs * vectors, len(evaluation.batch.parameters)
    numbers = evaluation.values * cells + evaluation.jacobian * parameters
    variables = layout.variables * evaluation.variable_gradient
    small = cells * (1 + 5 * evaluation.reductions + variables) + evaluation.gradient * parameters
    needed = 8 * small + numbers * rows * layout.dtype.itemsize
    _check("RESULT_TOO_LARGE", "bytes of results", needed, limits.result_bytes, "result-bytes")
    sums = small + _MOMENTS * cells * evaluation.needs_moments
    return 2 * (needed + 8 * nodes * sums) if nodes else needed


def check_fit(request: FitRequest, layout: Layout, limits: Limits, nodes: int = 0) -> int:
    """Refuse a fit whose searches together are too large; return its `fit_memory`."""
    needed = fit_memory(request, layout, nodes)
    _check("RESULT_TOO_LARGE", "bytes of searches", needed, limits.result_bytes, "result-bytes")
    return needed


def fit_memory(request: FitRequest, layout: Layout, nodes: int = 0) -> int:
    """Estimate the memory of a fit at its peak, in bytes; ``nodes`` as in `check_result`.

    A search is a program with one start. It has tokens, a few vectors and matrices of its own, and
    the engine computes a sum over the rows for each pair of its parameters.
    """
    batch = request.problem.batch
    counts = batch.parameter_counts.astype(np.float64)
    squares = batch.vectors * float(np.square(counts).sum())
    parameters = batch.vectors * float(counts.sum())
    searches = batch.vectors * len(batch)
    sums = searches + parameters + squares
    start, stop = request.problem.row_range(layout)
    blocks = min(_MOST_BLOCKS, -(-(stop - start) // _BLOCK_ROWS), max(1.0, _MOST_SUMS // sums))
    triangles = _TRIANGLES * (squares + parameters) / 2
    matrices = _SQUARES * squares if request.method == Method.BFGS else triangles
    return int(
        (_LOWERED_BYTES + _TOKEN_BYTES * batch.vectors) * len(batch.codes)
        + _SEARCH_BYTES * searches
        + _PARAMETER_BYTES * parameters
        + 8 * (matrices + sums * (blocks + (blocks > 1) + 2 * nodes))
    )


def _check(
    reason: str,
    what: str,
    needed: int,
    allowed: int,
    flag: str,
    advice: str = "Send smaller batches",
    field: str = "",
) -> None:
    if needed > allowed:
        raise ResourceExhaustedError(
            f"{needed} {what}, the limit is {allowed}",
            reason,
            f"{advice}, or start the server with a higher --max-{flag}",
            field,
            needed=needed,
            available=allowed,
        )
