"""What a request may ask for at most; every refusal names the limit and its flag."""

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

#: Bytes of memory that a fit takes for each token, search and parameter: the batch and what is
#: left of it when searches have ended, what the engine has made of it, and the searches' state.
_TOKEN_BYTES: Final = 64
_SEARCH_BYTES: Final = 600
_PARAMETER_BYTES: Final = 200
#: Matrices that are alive during a pass. Levenberg-Marquardt has triangles of all searches, of
#: those that still run, and of what the pass returns; BFGS has squares of the first two.
_TRIANGLES: Final = 3
_SQUARES: Final = 2
#: Numbers that the CPU engine adds up for spans of rows apart, and the rows of a span.
_MOST_SUMS: Final = 2**25
_SPAN_ROWS: Final = 2048
_MOST_SPANS: Final = 64


def check_batch(batch: Batch, limits: Limits) -> None:
    """Refuse a batch that is too large, before its tokens are looked at.

    Raises:
        ResourceExhaustedError: naming the limit and the flag that raises it.

    """
    longest = int(batch.lengths.max(initial=0))
    for reason, what, needed, allowed, flag in (
        (
            "PROGRAM_TOO_LONG",
            "tokens in a program",
            longest,
            limits.program_tokens,
            "program-tokens",
        ),
        ("TOO_MANY_PROGRAMS", "programs in the batch", len(batch), limits.programs, "programs"),
        ("TOO_MANY_TOKENS", "tokens in the batch", len(batch.codes), limits.tokens, "tokens"),
        ("TOO_MANY_VECTORS", "parameter vectors", batch.vectors, limits.vectors, "vectors"),
    ):
        _refuse_over(reason, what, needed, allowed, flag)


def check_loss(tokens: int, limits: Limits) -> None:
    """Refuse a loss function of the caller's own that is too long, before it is decoded.

    Raises:
        ResourceExhaustedError: naming the limit and the flag that raises it.

    """
    _refuse_over(
        "LOSS_TOO_LONG",
        "tokens in the loss function",
        tokens,
        limits.loss_tokens,
        "loss-tokens",
        "Write a shorter loss",
        "loss_function",
    )


def check_names(names: Sequence[str], limits: Limits) -> None:
    """Refuse too many or too long names of variables, before they are copied.

    Raises:
        ResourceExhaustedError: naming the limit and the flag that raises it.

    """
    place = ("Send fewer or shorter names, or none", "layout.names")
    _refuse_over("TOO_MANY_NAMES", "variable names", len(names), limits.names, "names", *place)
    size = sum(len(name.encode()) for name in names)
    what = "bytes of variable names"
    _refuse_over("NAMES_TOO_LONG", what, size, limits.name_bytes, "name-bytes", *place)


def check_result(evaluation: Evaluation, layout: Layout, limits: Limits) -> int:
    """Refuse an answer that is too large, before it is allocated; the rows have been checked.

    Returns:
        Its size in bytes.

    Raises:
        ResourceExhaustedError: naming the limit and the flag that raises it.

    """
    programs, vectors, rows = evaluation.shape(layout)
    cells, parameters = programs * vectors, len(evaluation.batch.parameters)
    numbers = evaluation.values * cells + evaluation.jacobian * parameters
    variables = layout.variables * evaluation.variable_gradient
    small = cells * (1 + 5 * evaluation.reductions + variables) + evaluation.gradient * parameters
    needed = 8 * small + numbers * rows * layout.dtype.itemsize
    _refuse_over(
        "RESULT_TOO_LARGE", "bytes of results", needed, limits.result_bytes, "result-bytes"
    )
    return needed


def check_fit(request: FitRequest, layout: Layout, limits: Limits) -> int:
    """Refuse a fit whose searches are too large together, before anything is allocated.

    Returns:
        The size of `fit_memory`.

    Raises:
        ResourceExhaustedError: naming the limit and the flag that raises it.

    """
    needed = fit_memory(request, layout)
    _refuse_over(
        "RESULT_TOO_LARGE", "bytes of searches", needed, limits.result_bytes, "result-bytes"
    )
    return needed


def fit_memory(request: FitRequest, layout: Layout) -> int:
    """Estimate the memory of a fit at its peak, in bytes.

    A search is a program with one start: it has tokens, a few vectors and matrices of its own, and
    the engine adds up a sum for each two of its parameters.
    """
    batch = request.problem.batch
    counts = batch.parameter_counts.astype(np.float64)
    squares = batch.vectors * float(np.square(counts).sum())
    parameters = batch.vectors * float(counts.sum())
    searches = batch.vectors * len(batch)
    sums = searches + parameters + squares
    start, stop = request.problem.row_range(layout)
    spans = min(_MOST_SPANS, -(-(stop - start) // _SPAN_ROWS), max(1.0, _MOST_SUMS // sums))
    triangles = _TRIANGLES * (squares + parameters) / 2
    matrices = _SQUARES * squares if request.method == Method.BFGS else triangles
    return int(
        _TOKEN_BYTES * batch.vectors * len(batch.codes)
        + _SEARCH_BYTES * searches
        + _PARAMETER_BYTES * parameters
        + 8 * (matrices + sums * (spans + (spans > 1)))
    )


def _refuse_over(
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


def check_dataset(layout: Layout, limits: Limits) -> None:
    """Refuse a data set that is too large, before anything is allocated for it.

    Raises:
        ResourceExhaustedError: naming the limit and the flag that raises it.

    """
    if layout.nbytes > limits.dataset_bytes:
        raise ResourceExhaustedError(
            f"the data set has {layout.nbytes} bytes, the limit is {limits.dataset_bytes}",
            "DATASET_TOO_LARGE",
            "Use float32 or fewer rows, or start the server with a higher --max-dataset-bytes",
            "layout",
            needed=layout.nbytes,
            available=limits.dataset_bytes,
        )
    if layout.rows > limits.rows:
        raise ResourceExhaustedError(
            f"the data set has {layout.rows} rows, the limit is {limits.rows}",
            "TOO_MANY_ROWS",
            "Use fewer rows, or start the server with a higher --max-rows",
            "layout.rows",
            needed=layout.rows,
            available=limits.rows,
        )
