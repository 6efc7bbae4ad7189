"""Data sets and evaluations from the arguments of `upload`, `evaluate` and `run`."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Final, TypeAlias, TypedDict, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from warpfit.calls.batches import Parameters, PopulationCache, build_batch
from warpfit.calls.dataset_handle import DatasetHandle
from warpfit.calls.progress import Progress
from warpfit.dataset import Dataset
from warpfit.errors import InvalidArgumentError
from warpfit.losses import LossFunction, as_loss
from warpfit.request import Evaluation, Loss, Precision, Tier

E = TypeVar("E", bound=StrEnum)
Rows: TypeAlias = slice | tuple[int, int] | None


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


#: Options that ask for a further output, which is a field of `Evaluation` by the same name.
_OUTPUTS: Final = (
    *("gradient", "jacobian", "variable_gradient"),
    *("reductions", "linear_scaling", "correlation"),
)


def build_dataset(
    X: Any,
    y: Any = None,
    weights: Any = None,
    *,
    names: Sequence[str] | None = None,
    dtype: DTypeLike = "float32",
) -> Dataset:
    """Turn anything array-like into a data set.

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
    # pandas numbers the columns of a DataFrame that was made without names.
    return columns if all(isinstance(column, str) for column in columns) else ()


def _numbers(data: Any, name: str) -> NDArray[Any]:
    """Return an array of real numbers; copy only what is not one already."""
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
    data: DatasetHandle,
    expressions: Any,
    parameters: Parameters,
    values: bool | None,
    options: EvaluateOptions,
    cache: PopulationCache | None = None,
) -> tuple[Evaluation, bool]:
    """Turn a caller's arguments into an evaluation; the server checks its tokens.

    Args:
        data: the data set.
        expressions: one expression or several.
        parameters: as for `warpfit.Client.evaluate`.
        values: whether to return values; None returns them if nothing else is asked for.
        options: the caller's further options.
        cache: the client's last batches, or None.

    Returns:
        The evaluation, and whether the answer has a leading axis for parameter vectors.

    Raises:
        InvalidArgumentError: for arguments that do not fit together or do not fit the data set.
        ParseError: for the text of an expression.

    """
    batch, leading_axis = build_batch(
        expressions, parameters, data.names, cache or PopulationCache()
    )
    given = options.get("loss")
    loss = None if given is None else as_loss(given)
    outputs = {name: bool(options.get(name)) for name in _OUTPUTS}
    if values is None:
        values = loss is None and not any(outputs.values())
    evaluation = Evaluation(
        dataset_id=data.content_id,
        batch=batch,
        rows=_row_range(options.get("rows"), data.layout.rows),
        precision=as_member(Precision, options.get("precision", Precision.PRECISE), "precision"),
        loss=loss if isinstance(loss, Loss) else None,
        values=values,
        tier=as_member(Tier, options.get("tier", Tier.AUTO), "tier"),
        custom_loss=loss if isinstance(loss, LossFunction) else None,
        **outputs,
    )
    evaluation.check_options(data.layout)
    return evaluation, leading_axis


def _row_range(rows: Rows, count: int) -> tuple[int, int] | None:
    """Return the half-open row range of a slice or pair; None for all rows."""
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
    """Return the member of an enumeration with this value.

    Raises:
        InvalidArgumentError: if there is none.

    """
    try:
        return kind(value)
    except ValueError:
        raise InvalidArgumentError(
            f"{field} {value!r} is not known",
            "BAD_ENUM",
            f"Use one of: {', '.join(kind)}",
            field,
        ) from None
