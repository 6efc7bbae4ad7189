"""Size limits of requests, checked before anything is allocated for them.

Every check raises ResourceExhaustedError, which names the limit and what
increases it, if anything does; of an answer that its caller cannot read, InvalidArgumentError.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from warpfit.dataset import Layout
from warpfit.errors import InvalidArgumentError, ResourceExhaustedError, UnimplementedError
from warpfit.ir import Batch
from warpfit.request import MOST_WHOLE_BYTES, Evaluation, FitRequest, Method, Missing
from warpfit.searching import SearchRequest
from warpfit.server_info import Limits

#: Bytes of memory that an engine takes for each token of lowered programs.
_LOWERED_BYTES: Final = 110
#: Bytes that cutting an evaluation takes for each program and parameter vector, and that copies of
#: sums other than losses take.
_CELL_BYTES: Final = 32
_COPIES_BYTES: Final = 16
#: Bytes of memory that a fit takes for each token, search and parameter of all starts: the programs
#: of all searches and of those that still run, and the state of the searches.
_TOKEN_BYTES: Final = 18
_SEARCH_BYTES: Final = 650
_PARAMETER_BYTES: Final = 225
#: Sums of a CPU engine of which linear scaling and correlations are made, and for reductions.
_OWN_MOMENTS: Final = 9
_REDUCTIONS: Final = 5
#: Matrices that are alive during a pass. Levenberg-Marquardt has triangles of all searches, of
#: those that still run, and of what the pass returns, and the square factors of those that run;
#: BFGS has squares of the first two, which factors take the place of.
_TRIANGLES: Final = 3
_FACTORS: Final = 1
_SQUARES: Final = 2
#: Most numbers of Jacobians that a fit holds at a time while it factorises them.
JACOBIAN_NUMBERS: Final = 2**21
#: Most sums of an evaluation for which the CPU engine keeps those of several blocks of rows apart
#: (256 MiB), the least rows of such a block, and the most blocks.
MOST_SUMS: Final = 2**25
_BLOCK_ROWS: Final = 2048
MOST_BLOCKS: Final = 64
#: Token-rows of a program over rows that are computed without a pause: a millisecond of a thread,
#: and some 50 of the dearest operators. The rows of longer work are cut into more blocks.
_LONG_SPAN: Final = 1_000_000
#: Products of pairs of parameters over the least block of rows of a fit, for the limit of its rows.
_PRODUCTS_OF_A_BLOCK: Final = 1_000_000_000
#: Most variables of a data set for derivatives by them: those of one program are 8 MiB.
_DERIVED_VARIABLES: Final = 1 << 20
#: Bytes of an upload's header without names, and of each name beside its characters, at most.
_HEADER_BYTES: Final = 128
_NAME_FRAME_BYTES: Final = 6
#: Most parameters of a program that is fitted. A step of its search takes the cube of their number:
#: about a second for so many, in which it cannot be cancelled.
_FITTED_PARAMETERS: Final = 500
#: Most short formulas of which a search makes pairs, about; formulas of it that are evaluated at a
#: time; most pairs that an engine keeps; and bytes in which its threads weigh pairs.
LIBRARY_SIZE: Final = 12_000
PAIRS_EVALUATED: Final = 512
#: Rows on which pairs are searched, of more screening rows; and most screening rows.
PAIR_ROWS: Final = 512
MOST_SCREENING_ROWS: Final = 1 << 20
MOST_PAIRS: Final = 600
WEIGHER_BYTES: Final = 16 << 20
#: Formulas of a search that says no number, most of those that fit a GPU.
_USUAL_POPULATION: Final = 1 << 17
#: Most tokens of the formulas that a search begins with, which go to the engine in one message.
_GUESSED_TOKENS: Final = 1 << 19
#: Bytes of a search for each token of a formula of its population, and for each formula beside.
_SEARCH_TOKEN_BYTES: Final = 9
_SEARCH_FORMULA_BYTES: Final = 256
#: Bytes of a search whatever its population is: short formulas, front, what comes and goes.
_SEARCH_BYTES_AT_LEAST: Final = 16 << 20
_FEWER_NAMES: Final = ("Send fewer or shorter names, or none", "layout.names")
_USUAL: Final = ("Send smaller batches", "")
#: For each limit the reason of a refusal and the words for what is too much; where they are not
#: `_USUAL`, the advice and the field, too.
_REFUSALS: Final[Mapping[str, tuple[str, ...]]] = {
    "program_tokens": ("PROGRAM_TOO_LONG", "tokens in a program"),
    "programs": ("TOO_MANY_PROGRAMS", "programs in the batch"),
    "vectors": ("TOO_MANY_VECTORS", "parameter vectors"),
    "tokens": ("TOO_MANY_TOKENS", "tokens in the batch"),
    "loss_tokens": (
        *("LOSS_TOO_LONG", "tokens in the loss function"),
        *("Write a shorter loss", "loss_function"),
    ),
    "names": ("TOO_MANY_NAMES", "variable names", *_FEWER_NAMES),
    "name_bytes": ("NAMES_TOO_LONG", "bytes of variable names", *_FEWER_NAMES),
    "dataset_bytes": (
        *("DATASET_TOO_LARGE", "bytes in the data set"),
        *("Use float32 or fewer rows", "layout"),
    ),
    "rows": ("TOO_MANY_ROWS", "rows in the data set", "Use fewer rows", "layout.rows"),
    "result_bytes": ("RESULT_TOO_LARGE", "bytes of results"),
}
#: Flags of the server that raise a limit; others are in the tenants file alone.
_FLAGS: Final = {
    "dataset_bytes": "--max-resident-bytes",
    "result_bytes": "--max-result-bytes",
}
_FILE: Final = "the server's --tenants-file (%s)"


def spans_of_long_programs(tokens: int, rows: int) -> int:
    """Return the least number of blocks of rows over which the longest program is no long work."""
    return max(1, -(-tokens * rows // _LONG_SPAN))


def check_limits(limits: Limits, what: str = "", **needed: int) -> None:
    """Refuse a request that needs more of something than the limit of that name allows.

    ``what`` are words for it, if other than usual.
    """
    for name, count in needed.items():
        if count <= (allowed := getattr(limits, name)):
            continue
        reason, usual, advice, field = (*_REFUSALS[name], *_USUAL)[:4]
        flag = _FLAGS.get(name)
        raised = (
            f"start the server with a higher {flag}" if flag else f"allow more in {_FILE % name}"
        )
        raise ResourceExhaustedError(
            f"{count} {what or usual}, the limit is {allowed}",
            reason,
            f"{advice}, or {raised}",
            field,
            needed=count,
            available=allowed,
        )


def check_batch(batch: Batch, limits: Limits) -> None:
    """Refuse a batch that is too large, before its tokens are looked at."""
    longest = int(np.maximum.reduce(batch.lengths, initial=0))
    programs = len(batch.lengths)
    check_limits(limits, program_tokens=longest, programs=programs, vectors=batch.vectors)


def check_header(message: bytes, limits: Limits) -> None:
    """Refuse the first message of an upload if it is longer than names within the limits make it.

    It is not parsed before: an empty name has two bytes there and takes protobuf thirty.
    """
    rest = len(message) - _HEADER_BYTES - _NAME_FRAME_BYTES * limits.names
    check_limits(limits, "bytes of names in the upload's first message", name_bytes=rest)


def check_names(names: Sequence[str], limits: Limits) -> None:
    """Refuse too many or too long names of variables, before they are copied."""
    check_limits(limits, names=len(names), name_bytes=len("".join(names).encode()))


def check_result(
    evaluation: Evaluation, layout: Layout, limits: Limits, *, pieces: bool = True
) -> int:
    """Refuse an answer that is too large.

    Args:
        evaluation: whose rows have been checked.
        layout: of its data set.
        limits: of the tenant.
        pieces: whether the caller reads an answer of several messages. Whether a call is a unary
            one, which hangs after the first message, nothing else tells a server.

    Returns:
        Bytes of the answer.
    """
    if evaluation.variable_gradient and layout.variables > _DERIVED_VARIABLES:
        raise ResourceExhaustedError(
            f"derivatives by {layout.variables} variables, the limit is {_DERIVED_VARIABLES}",
            "TOO_MANY_VARIABLES",
            "Upload a data set with the variables that the expressions use",
            "variable_gradient",
            needed=layout.variables,
            available=_DERIVED_VARIABLES,
        )
    needed = 0
    for output, shape in evaluation.outputs(layout).items():
        needed += math.prod(shape) * (layout.dtype.itemsize if output.is_of_data else 8)
    check_limits(limits, result_bytes=needed)
    if needed > MOST_WHOLE_BYTES and not pieces:
        raise InvalidArgumentError(
            f"the answer has {needed} bytes, and one message takes {MOST_WHOLE_BYTES}",
            "ANSWER_TOO_LONG",
            "Set `pieces` and read the answer as a stream, or ask for less in a call",
            "pieces",
            needed=needed,
            available=MOST_WHOLE_BYTES,
        )
    return needed


def evaluation_memory(evaluation: Evaluation, layout: Layout) -> int:
    """Estimate the memory that an engine takes for an evaluation beside its answer, in bytes.

    It has lowered programs, and sums of what is asked for, some of them for blocks of rows.
    """
    programs, vectors, rows = evaluation.shape(layout)
    cells, batch = programs * vectors, evaluation.batch
    variables = layout.variables * evaluation.variable_gradient
    statistics = _REDUCTIONS * evaluation.reductions + _OWN_MOMENTS * evaluation.needs_moments
    others = cells * (variables + statistics) + evaluation.gradient * len(batch.parameters)
    return (
        _LOWERED_BYTES * len(batch.codes)
        + _CELL_BYTES * cells
        + _COPIES_BYTES * others
        + _bytes_of_sums(cells + others, rows, int(np.maximum.reduce(batch.lengths, initial=0)))
    )


def check_fit(request: FitRequest, layout: Layout, limits: Limits) -> int:
    """Refuse a fit whose searches are too large, alone or together; return its `fit_memory`."""
    check_limits(limits, "starts of a program, given and drawn", vectors=request.starts)
    most = int(request.problem.batch.parameter_counts.max(initial=0))
    if most > _FITTED_PARAMETERS:
        raise ResourceExhaustedError(
            f"{most} parameters in a program to be fitted, the limit is {_FITTED_PARAMETERS}",
            "TOO_MANY_PARAMETERS",
            "Fit programs with fewer parameters",
            "problem.programs.parameter_counts",
            needed=most,
            available=_FITTED_PARAMETERS,
        )
    # The products of all pairs of parameters, over a block of rows as small as sums allow.
    start, stop = request.problem.row_range(layout)
    of_block = max(2 * _BLOCK_ROWS, _PRODUCTS_OF_A_BLOCK // max(1, most * most))
    allowed = of_block * (MOST_SUMS // (2 + most + most * most))
    if stop - start > allowed:
        raise ResourceExhaustedError(
            f"a program with {most} parameters is fitted on {stop - start} rows, the limit for so"
            f" many parameters is {allowed}",
            "TOO_MANY_PARAMETERS",
            "Fit programs with fewer parameters, or on fewer rows",
            "problem.programs.parameter_counts",
            needed=stop - start,
            available=allowed,
        )
    needed = fit_memory(request, layout)
    check_limits(limits, "bytes of searches", result_bytes=needed)
    return needed


def fit_memory(request: FitRequest, layout: Layout) -> int:
    """Estimate the memory of a fit at its peak, in bytes.

    A search is a program with one start. It has tokens, a few vectors and matrices of its own, and
    the engine computes a sum over the rows for each pair of its parameters. Any search of squares
    of float64 data may want an orthogonal factor of its Jacobian.
    """
    batch, starts = request.problem.batch, request.starts
    counts = batch.parameter_counts.astype(np.float64)
    squares = starts * float(np.square(counts).sum())
    parameters = starts * float(counts.sum())
    searches = starts * len(batch)
    copies = 2 if request.settings.missing is Missing.DROP else 1  # see `without_missing`
    sums = searches + parameters + squares
    start, stop = request.problem.row_range(layout)
    triangles = _TRIANGLES * (squares + parameters) / 2
    matrices = _SQUARES * squares if request.method == Method.BFGS else triangles
    if request.loss.is_squares and layout.dtype.itemsize == 8:
        matrices += _FACTORS * squares * (request.method == Method.LM)
        matrices += min(JACOBIAN_NUMBERS, (searches + parameters) * (stop - start))
    return int(
        (_LOWERED_BYTES + _TOKEN_BYTES * starts) * copies * len(batch.codes)
        + _SEARCH_BYTES * searches
        + _PARAMETER_BYTES * parameters
        + 8 * matrices
        + _bytes_of_sums(sums, stop - start, int(np.square(counts).max(initial=0.0)) // 2)
    )


def check_search(request: SearchRequest, layout: Layout, limits: Limits, available: int) -> int:
    """Check a search, and refuse one that is too large; return its `search_bytes`.

    Args:
        request: the request, which is checked.
        layout: of its data set.
        limits: of the tenant.
        available: bytes that the tenant may have in flight.

    Raises:
        InvalidArgumentError: as `SearchRequest.check`.
        UnimplementedError: for groups, which engines do not know yet.
    """
    if request.guesses is not None:
        check_batch(request.guesses, limits)
        tokens = len(request.guesses.codes)
        if tokens > _GUESSED_TOKENS:
            raise ResourceExhaustedError(
                f"{tokens} tokens in the guesses, the limit is {_GUESSED_TOKENS}",
                "TOO_MANY_TOKENS",
                "Begin with fewer or shorter formulas",
                "guesses",
                needed=tokens,
                available=_GUESSED_TOKENS,
            )
    request.check(layout)
    if request.group is not None:
        raise UnimplementedError(
            "this server's engines search for no formulas with a group",
            "SEARCH_NOT_SUPPORTED",
            "Leave the group out; warpfit.sklearn.SymbolicRegressor has it",
            "group",
        )
    start, stop = request.row_range(layout)
    if (rows := min(request.screening_rows, stop - start)) > MOST_SCREENING_ROWS:
        raise InvalidArgumentError(
            f"formulas are scored on {rows} rows, the limit is {MOST_SCREENING_ROWS}",
            "TOO_MANY_ROWS",
            "Ask for fewer screening rows: the best formulas are fitted on all rows anyway",
            "screening_rows",
            needed=rows,
            available=MOST_SCREENING_ROWS,
        )
    needed = search_bytes(request, layout)
    if needed > available:
        raise ResourceExhaustedError(
            f"a search with a population of {request.population or _USUAL_POPULATION} takes "
            f"{needed} bytes of memory, there are {available}",
            "SEARCH_TOO_LARGE",
            "Ask for a smaller population or size, or start the server with a higher "
            "--max-pending-bytes",
            "population",
            needed=needed,
            available=available,
        )
    return needed


def search_bytes(request: SearchRequest, layout: Layout) -> int:
    """Estimate the memory that an engine takes for a search, in bytes."""
    start, stop = request.row_range(layout)
    population = request.population or _USUAL_POPULATION
    rows = min(request.screening_rows, stop - start)
    formula = _SEARCH_FORMULA_BYTES + _SEARCH_TOKEN_BYTES * 2 * request.rules.max_size
    # In float64, and in float32 for the scores; and again with each column moved that has a sign.
    columns = 12 * rows * (layout.variables + 2) * (1 + len(request.monotonic))
    guesses = 0 if request.guesses is None else _LOWERED_BYTES * len(request.guesses.codes)
    pairs = (
        pair_search_bytes(min(rows, PAIR_ROWS)) if request.pairs and request.template is None else 0
    )
    return _SEARCH_BYTES_AT_LEAST + population * formula + columns + guesses + pairs


def pair_search_bytes(rows: int, size: int = LIBRARY_SIZE) -> int:
    """Return the bytes of this host that pairs of a library of a size need at most."""
    # The library and its reciprocals, copied twice, beside the one before; or f(c u).
    tables = 10 * size * rows * 4 + 400 * size
    pairs = (8 * PAIRS_EVALUATED + 24 * MOST_PAIRS) * rows * 8
    return tables + pairs + WEIGHER_BYTES


def _bytes_of_sums(sums: float, rows: int, longest: int) -> int:
    """Return the bytes that an engine takes to sum up numbers of each row and then blocks.

    ``longest`` are the tokens of the longest program.
    """
    blocks = max(MOST_BLOCKS, spans_of_long_programs(longest, rows))
    blocks = min(blocks, -(-rows // _BLOCK_ROWS), max(1, MOST_SUMS // max(1, int(sums))))
    return int(8 * sums * (blocks + (blocks > 1)))
