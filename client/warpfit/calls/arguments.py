"""From what callers pass to what travels: data sets and evaluations, checked before sending."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any, Final, TypeAlias, TypedDict, TypeVar

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from warpfit.calls.data import Data
from warpfit.calls.progress import Progress
from warpfit.calls.token_cache import RecentTokens
from warpfit.dataset import Dataset
from warpfit.errors import InvalidArgumentError
from warpfit.expressions.vectors import Vectors
from warpfit.ir import Batch, Program
from warpfit.losses import LossFunction, as_loss
from warpfit.request import Evaluation, Loss, Precision, Tier

E = TypeVar("E", bound=StrEnum)
Rows: TypeAlias = slice | tuple[int, int] | None
Parameters: TypeAlias = Sequence[ArrayLike] | ArrayLike | None


class UploadOptions(TypedDict, total=False):
    """Keywords of `upload`."""

    names: Sequence[str] | None
    """One name for each variable; by default a DataFrame's column names, or none."""
    dtype: DTypeLike
    """float32 (default) or float64: what the server computes in."""
    progress: Progress | bool | None
    """Callable(bytes_done, bytes_total), or True for a tqdm bar."""


class EvaluateOptions(TypedDict, total=False):
    """Keywords of `evaluate` and `run`."""

    loss: Loss | LossFunction | str | None
    """Ask for this loss of each expression; None for none. A name, a `warpfit.LossFunction`, or
    the text of a loss over ``f``, ``y``, ``w`` and ``d`` = f - y, which is averaged."""
    rows: Rows
    """slice or (start, stop) of consecutive rows; None for all."""
    precision: Precision | str
    """``"precise"`` (default) or ``"fast"``."""
    tier: Tier | str
    """Evaluator of a CUDA engine: ``"auto"`` (default), ``"interpreter"`` or ``"compiled"``."""
    timeout: float | None
    """Seconds for the whole call, retries and a repeated upload included; None for no limit."""
    gradient: bool
    """Ask for the derivatives of each loss by the parameters."""
    jacobian: bool
    """Ask for the derivatives of all values by the parameters."""
    variable_gradient: bool
    """Ask for the derivatives of each loss by a shift of each variable."""
    reductions: bool
    """Ask for sum, mean, least, greatest and count of non-finite values."""
    linear_scaling: bool
    """Score the best a + b f instead of f (Keijzer 2003), and ask for b and a."""
    correlation: bool
    """Ask for Pearson's correlation of values and target."""


#: Options that are wishes of an evaluation by the same name.
_WISHES: Final = (
    *("gradient", "jacobian", "variable_gradient"),
    *("reductions", "linear_scaling", "correlation"),
)


def canonical(
    X: Any,
    y: Any = None,
    weights: Any = None,
    *,
    names: Sequence[str] | None = None,
    dtype: DTypeLike = "float32",
) -> Dataset:
    """Bring anything array-like into canonical form.

    Args:
        X: [rows, variables]: an array, nested sequences, or a pandas DataFrame, whose column names
            become the variables' names.
        y: target [rows], or None.
        weights: non-negative weight of each row [rows], or None.
        names: one name for each variable; None takes a DataFrame's column names.
        dtype: float32 or float64.

    Raises:
        InvalidArgumentError: if a cell is no number, or as `Dataset.of`.

    Warns:
        PrecisionWarning: as `Dataset.of`.

    """
    if names is None:
        names = _column_names(X)
    columns = [
        None if column is None else _numbers(column, name)
        for column, name in ((y, "y"), (weights, "weights"))
    ]
    return Dataset.of(_numbers(X, "X"), *columns, names=names, dtype=dtype)


def _column_names(X: Any) -> tuple[str, ...]:
    columns = tuple(getattr(X, "columns", ()))
    # A DataFrame that was made without names numbers its columns; those are no names.
    return columns if all(isinstance(column, str) for column in columns) else ()


def _numbers(data: Any, name: str) -> NDArray[Any]:
    """Return an array of real numbers; copies only what is not one already."""
    try:
        array = np.asarray(data)
        if array.dtype.kind not in "biufO":
            raise TypeError(f"its dtype is {array.dtype}")
        return array.astype(np.float64) if array.dtype.kind == "O" else array
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"{name} is no table of numbers: {error}",
            "NOT_NUMBERS",
            f"Convert text, dates and ragged lists in {name} to numbers first",
            name,
        ) from error


def build_evaluation(
    data: Data,
    expressions: Any,
    parameters: Parameters,
    values: bool | None,
    options: EvaluateOptions,
    recent: RecentTokens | None = None,
) -> tuple[Evaluation, bool]:
    """Turn a caller's arguments into an evaluation; the server checks its tokens.

    Args:
        data: the data set.
        expressions: one expression or a batch of them.
        parameters: see `warpfit.Client.run`.
        values: whether values are wanted; None wants them where no loss is asked for.
        options: what else the caller asked for.
        recent: the caller's last batches, if it keeps them.

    Returns:
        The evaluation, and whether the answer has a leading axis for parameter vectors.

    Raises:
        InvalidArgumentError: for arguments that do not fit together or do not fit the data set.
        ParseError: for the text of an expression.

    """
    batch, leading_axis = build_batch(expressions, parameters, data.names, recent)
    given = options.get("loss")
    loss = None if given is None else as_loss(given)
    wishes = {wish: bool(options.get(wish)) for wish in _WISHES}
    if values is None:
        values = loss is None and not any(wishes.values())
    evaluation = Evaluation(
        dataset_id=data.content_id,
        batch=batch,
        rows=as_row_range(options.get("rows"), data.layout.rows),
        precision=as_member(Precision, options.get("precision", Precision.PRECISE), "precision"),
        loss=loss if isinstance(loss, Loss) else None,
        values=values,
        tier=as_member(Tier, options.get("tier", Tier.AUTO), "tier"),
        custom_loss=loss if isinstance(loss, LossFunction) else None,
        **wishes,
    )
    evaluation.check_options(data.layout)
    return evaluation, leading_axis


def build_batch(
    expressions: Any,
    parameters: Parameters,
    names: tuple[str, ...],
    recent: RecentTokens | None = None,
) -> tuple[Batch, bool]:
    """Turn expressions and parameters into a batch.

    Args:
        expressions: one expression, several, or a `Batch`, which has its parameters with it.
        parameters: see `warpfit.Client.run`.
        names: of the variables.
        recent: the caller's last batches, if it keeps them.

    Returns:
        The batch, and whether answers have a leading axis for parameter vectors.

    """
    if isinstance(expressions, Batch):
        if parameters is not None:
            raise InvalidArgumentError(
                "a Batch has its parameters with it",
                "BAD_PARAMETERS",
                "Leave parameters= out, or give a list of Programs",
                "parameters",
            )
        expressions.check_shapes()
        return expressions, expressions.vectors > 1
    programs = as_batch(expressions, names)
    tokens = (recent or RecentTokens()).of(programs)
    entries = as_entries(parameters, is_single(expressions), len(programs))
    vectors = Vectors.of(len(programs), entries)
    return Batch.joined(tokens, vectors), vectors.tables


def is_single(expressions: Any) -> bool:
    """Tell one expression from a batch; a DEAP tree is a list, but of a class of its own."""
    if isinstance(expressions, str) or not hasattr(expressions, "__iter__"):
        return True
    return isinstance(expressions, list) and type(expressions) is not list


def as_batch(expressions: Any, names: tuple[str, ...]) -> list[Program]:
    """Convert one expression or several."""
    batch = [expressions] if is_single(expressions) else list(expressions)
    if set(map(type, batch)) == {Program}:
        return batch
    from warpfit.frontends import as_programs

    return list(as_programs(batch, names))


def as_entries(parameters: Parameters, single: bool, programs: int) -> Sequence[ArrayLike] | None:
    """One entry for each program; a single expression's vector may stand alone."""
    if parameters is None:
        return None
    entries: Any = list(parameters) if isinstance(parameters, Iterable) else [parameters]
    bare = programs == 1 and all(np.ndim(entry) == 0 for entry in entries)
    whole: list[Any] = [parameters]
    return whole if single or bare else entries


def as_row_range(rows: Rows, count: int) -> tuple[int, int] | None:
    """Half-open row range of a slice or pair; None for all rows."""
    if not isinstance(rows, slice):
        return None if rows is None else (int(rows[0]), int(rows[1]))
    start, stop, step = rows.indices(count)
    if step != 1:
        raise InvalidArgumentError(
            f"row step {step} is not supported",
            "BAD_ROWS",
            "Give a slice of consecutive rows, or upload the rows that you want as a data set",
            "rows",
        )
    return start, stop


def as_member(kind: type[E], value: str, field: str) -> E:
    """Member of an enumeration by its name."""
    try:
        return kind(value)
    except ValueError:
        raise InvalidArgumentError(
            f"{field} {value!r} is not known",
            "BAD_ENUM",
            f"Use one of: {', '.join(kind)}",
            field,
        ) from None
