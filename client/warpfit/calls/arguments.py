"""Data sets and evaluations from the arguments of `upload`, `evaluate` and `run`."""

from collections.abc import Sequence
from operator import index
from typing import Any, TypeAlias, TypedDict

from numpy.typing import DTypeLike

from warpfit.calls.batches import Parameters, PopulationCache, build_batch
from warpfit.calls.checks import member
from warpfit.calls.dataset_handle import DatasetHandle, checked_handle
from warpfit.calls.progress import Progress
from warpfit.dataset import ClientDataset, ServerFile, client_dataset, open_table
from warpfit.dataset.float32_range import warn_of_range
from warpfit.dataset.layout import canonical_dtype
from warpfit.dataset.sources import ColumnNames
from warpfit.errors import InvalidArgumentError
from warpfit.losses import LossFunction, as_loss
from warpfit.request import OUTPUTS, Evaluation, Loss, Precision, Tier

Rows: TypeAlias = slice | tuple[int, int] | None


class UploadOptions(TypedDict, total=False):
    """Keywords of `upload`."""

    x: Sequence[str] | str | None
    """Columns of a table that are variables; by default all but ``y`` and ``weights``."""
    names: Sequence[str] | None
    """One name for each variable; by default the column names of a table, or none."""
    dtype: DTypeLike
    """Type of the data on the server: "float32", "float64", or "auto" (default). "auto" is float64
    where float32 loses digits that matter, or where numbers above 1e9 or below 1e-9 may have powers
    beyond its range, and float32 elsewhere."""
    progress: Progress | bool | None
    """Callable(bytes_done, bytes_total), or True for a tqdm bar."""


class CommonOptions(TypedDict, total=False):
    """Keywords of every call that computes."""

    rows: Rows
    """slice or (start, stop) of consecutive rows; None for all."""
    precision: Precision | str
    """``"precise"`` (default) or ``"fast"``."""
    tier: Tier | str
    """Evaluator of a CUDA engine: ``"auto"`` (default), ``"interpreter"`` or ``"compiled"``."""
    timeout: float | None
    """Seconds for the whole call, retries and a repeated upload included; None for no limit."""


class OpenOptions(TypedDict, total=False):
    """Keywords of `open`."""

    x: Sequence[str] | str | None
    """Columns that are variables; by default all but ``y`` and ``weights``."""
    y: str | None
    """Column that is the target."""
    weights: str | None
    """Column of the rows' weights."""
    dtype: DTypeLike
    """As for `upload`: "float32", "float64", or "auto" (default), by which the server chooses."""


class SharedOptions(CommonOptions, total=False):
    """Keywords of `evaluate` and `run` that do not ask for further outputs."""

    loss: Loss | LossFunction | str | None
    """Ask for this loss of each expression; None for none. A name, a `warpfit.LossFunction`, or
    the text of a loss over ``f``, ``y``, ``w`` and ``d`` = f - y, which is averaged."""


class EvaluateOptions(SharedOptions, total=False):
    """Keywords of `evaluate` and `run`."""

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


def common(options: CommonOptions) -> Any:
    """Return the common keywords for a call inside of another; it has a timeout of its own."""
    return {name: value for name, value in options.items() if name in ("rows", "precision", "tier")}


def build_dataset(X: Any, y: Any, weights: Any, options: UploadOptions) -> ClientDataset:
    """Turn a table into a data set; arguments and errors as for `warpfit.Client.upload`."""
    return client_dataset(
        open_table(X, y, weights, options.get("x")),
        names=options.get("names"),
        dtype=options.get("dtype", "auto"),
    )


def build_file(name: str, options: OpenOptions) -> ServerFile:
    """Turn the arguments of `open` into a file of a server; errors as there."""
    dtype = options.get("dtype", "auto")
    return ServerFile(
        name=str(name),
        x=tuple(ColumnNames.of(options.get("x")).x or ()),
        y=options.get("y") or "",
        weights=options.get("weights") or "",
        dtype=None if isinstance(dtype, str) and dtype == "auto" else canonical_dtype(dtype),
    )


def build_evaluation(
    data: DatasetHandle,
    expressions: Any,
    parameters: Parameters,
    values: bool | None,
    options: EvaluateOptions,
    cache: PopulationCache | None = None,
) -> tuple[Evaluation, bool]:
    """Turn the arguments of `warpfit.Client.run` into an evaluation; the server checks its tokens.

    ``values=None`` asks for values if nothing else is asked for. Also returned is whether the
    answer has a leading axis for parameter vectors.
    """
    data = checked_handle(data)
    batch, leading_axis = build_batch(
        expressions, parameters, data.names, cache or PopulationCache()
    )
    given = options.get("loss")
    loss = None if given is None else as_loss(given)
    outputs = {name: bool(options.get(name)) for name in OUTPUTS}
    if values is None:
        values = loss is None and not any(outputs.values())
    evaluation = Evaluation(
        dataset_id=data.content_id,
        batch=batch,
        rows=_row_range(options.get("rows"), data.layout.rows),
        precision=member(Precision, options.get("precision", Precision.PRECISE), "precision"),
        loss=loss if isinstance(loss, Loss) else None,
        values=values,
        tier=member(Tier, options.get("tier", Tier.AUTO), "tier"),
        custom_loss=loss if isinstance(loss, LossFunction) else None,
        **outputs,
    )
    evaluation.check_options(data.layout)
    warn_of_range(batch, data.dataset)
    return evaluation, leading_axis


def _row_range(rows: Any, count: int) -> tuple[int, int] | None:
    """Return the half-open row range of a slice or pair; None for all rows."""
    if rows is None:
        return None
    try:
        start, stop, step = rows.indices(count) if isinstance(rows, slice) else (*rows, 1)
        if step == 1:
            return index(start), index(stop)
    except (TypeError, ValueError):
        pass
    raise InvalidArgumentError(
        f"rows is {rows!r}",
        "BAD_ROWS",
        "Give a slice of consecutive rows or (start, stop), or upload the rows as a data set",
        "rows",
    )
