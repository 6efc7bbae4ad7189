"""Handles of data sets, and warnings of expressions that float32 data cannot be evaluated with.

A constant such as 1e39 is infinite in float32, Planck's constant to the fourth power is 0, and
``exp(100*x1)/exp(99*x1)`` is NaN at 1. They are looked for in expressions that a person wrote and
where they are likely: in those with numbers far from 1, and in those whose results are not finite
or whose fit could not begin. Such an expression is evaluated here on a few rows in both types. In a
population, whose expressions nobody wrote, one that overflows is an ordinary bad one.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import ClientDataset, Dataset, DatasetReference, Layout
from warpfit.dataset.tables import PrecisionWarning, caller_level
from warpfit.errors import InvalidArgumentError, no_attribute
from warpfit.expressions.language import to_text
from warpfit.ir import Batch, Program
from warpfit.losses import TargetStatistics
from warpfit.ops import CONSTANT, PARAMETER, VARIABLE, Operator
from warpfit.request import REASONS, FitResult, Reason, Result

# ------------------------------------------------------------- expressions that float32 cannot hold

#: Numbers above this size, or below its inverse, are worth a look.
_FAR: Final = 1e10
#: Most expressions that a person writes for a call, all of which are looked at, and most rows.
EXPRESSIONS: Final = 10
_ROWS: Final = 200
#: Relative error that other roundings of float32 do not reach where nothing cancels.
_WRONG: Final = 1e-2
_LARGEST: Final = float(np.finfo(np.float32).max)
_LEAST: Final = float(np.finfo(np.float32).tiny)


def is_written(expressions: Any) -> bool:
    """Return whether a person may have written expressions: a few texts, or SymPy's expressions."""
    listed = expressions if isinstance(expressions, list | tuple) else [expressions]
    return len(listed) <= EXPRESSIONS and all(
        issubclass(kind, str) or kind.__module__.partition(".")[0] == "sympy"
        for kind in set(map(type, listed))
    )


def suspects_of(values: NDArray[Any] | None, losses: NDArray[np.float64] | None) -> list[int]:
    """Return the indices of expressions with a loss, or a value among a few, that is not finite.

    Args:
        values: [programs, vectors, rows], or None.
        losses: [programs, vectors], or None.
    """
    odd: Any = False
    # Most often all are finite, which one pass over them shows.
    if losses is not None and np.count_nonzero(finite := np.isfinite(losses)) < losses.size:
        odd = ~finite.all(axis=1)
    if values is not None:
        step = -(-values.shape[2] // _ROWS)
        odd = odd | ~np.isfinite(values[:, :, ::step]).all(axis=(1, 2))
    return [] if odd is False else np.flatnonzero(odd).tolist()


def warn_of_range(batch: Batch, dataset: ClientDataset, suspects: Sequence[int] = ()) -> bool:
    """Warn of the first expression whose results are wrong because numbers leave float32's range.

    Those with a number far from 1 are looked at, and the suspects.

    Args:
        batch: of a call.
        dataset: one of float64 is passed over.
        suspects: indices of expressions.

    Returns:
        Whether there was such an expression.
    """
    layout = dataset.layout
    if layout.dtype.itemsize > 4:
        return False
    far: set[int] = set()
    for numbers, starts in ((batch.values, "starts"), (batch.parameters, "parameter_starts")):
        sizes = np.abs(numbers)
        is_far = (sizes > _FAR) | ((sizes < 1.0 / _FAR) & (sizes > 0.0))
        if np.count_nonzero(is_far):  # none usually: indices, which are values too, are near
            is_far &= sizes < np.inf
            if numbers is batch.values:
                is_far &= batch.codes == CONSTANT
            (places,) = is_far.nonzero()
            far |= set((np.searchsorted(getattr(batch, starts), places, "right") - 1).tolist())
    looked = list(dict.fromkeys([*sorted(far), *suspects]))[:EXPRESSIONS]
    if not looked:
        return False
    rows = np.zeros((layout.variables, 0))
    if isinstance(dataset, Dataset):  # of others a few rows take a pass over all
        step = -(-layout.rows // _ROWS)
        rows = dataset.every(step)[: layout.variables].astype(np.float64)
    for index in looked:
        for vector in batch.program_parameters(index)[:1]:
            found = _first_lost(batch.program(index), vector, rows)
            if found is not None:
                part, size = found
                warnings.warn(
                    f"float32 cannot hold {to_text(part, layout.names)} of expression {index}, "
                    f"which reaches {size:.3g}: its results are wrong. Upload with "
                    'dtype="float64", or choose other units',
                    PrecisionWarning,
                    stacklevel=caller_level(),
                )
                return True
    return False


def _first_lost(
    program: Program, parameters: NDArray[np.float64], rows: NDArray[np.float64]
) -> tuple[Program, float] | None:
    """Return the first part of a program that float32 cannot hold, and its size.

    It is None unless the program's result is wrong for it, in a row where it has a value.
    """
    count = max(1, rows.shape[1])
    lost: list[tuple[Program, NDArray[np.bool_], NDArray[np.float64]]] = []

    def note(part: Program, exact: Any, single: Any) -> Any:
        exact = np.broadcast_to(np.asarray(exact, np.float64), (count,))
        sizes = np.abs(exact)
        beyond = np.isfinite(exact) & ((sizes > _LARGEST) | ((sizes < _LEAST) & (sizes > 0.0)))
        if beyond.any():
            lost.append((part, beyond, sizes))
        return part, exact, np.broadcast_to(np.asarray(single, np.float32), (count,))

    def leaf(code: int, value: float) -> Any:
        part = Program([code], [value])
        if code == VARIABLE:
            if not rows.shape[1]:  # no row is known, and constants alone are looked at
                return note(part, np.nan, np.nan)
            return note(part, rows[int(value)], rows[int(value)])
        number = parameters[int(value)] if code == PARAMETER else value
        return note(part, number, number)

    def operator(row: Operator, operands: list[Any]) -> Any:
        parts, exact, single = zip(*operands, strict=True)
        return note(Program.apply(row, *parts), row.numpy(*exact), row.numpy(*single))

    with np.errstate(all="ignore"):
        _, exact, single = program.fold(leaf, operator)
        error = np.abs(single.astype(np.float64) - exact)
        is_wrong = np.isfinite(exact) & ~(error <= _WRONG * np.abs(exact))
    if not rows.shape[1]:
        is_wrong = np.ones(count, np.bool_)
    for part, beyond, sizes in lost:
        if (beyond & is_wrong).any():
            return part, float(sizes[beyond & is_wrong][0])
    return None


# ------------------------------------------------------------------------------------------ handles

#: Most expressions that are looked at for a data set, each of which takes 1 to 2 ms: a program may
#: send texts, too, whose results are not finite again and again.
_MOST_LOOKS: Final = 30
#: Calls with expressions that a person wrote after which no other one is looked at.
_MOST_CALLS: Final = 100


#: What to use instead of attributes of tables and files.
_OF_TABLES: Final = {
    **dict.fromkeys(("shape", "rows", "dtype", "ndim", "size", "nbytes"), "layout"),
    **dict.fromkeys(("columns", "feature_names"), "names"),
    **dict.fromkeys(("close", "delete", "free", "remove"), "client.release(data)"),
    **dict.fromkeys(("X", "y", "values", "weights"), "the arrays that were uploaded"),
}


class DatasetHandle:
    """Handle of an uploaded data set.

    Any client can use it with any server: where the data set is not resident, it is uploaded. For
    that the handle keeps the numbers, in the dtype and order in which they travel. It is pickled
    without them, as its client, layout and content id.
    """

    def __init__(self, dataset: ClientDataset, client: Any = None) -> None:
        self.dataset, self._client = dataset, client
        self._statistics: TargetStatistics | None = None
        #: Expressions, and calls, that are still looked at, for a warning.
        self._looks, self._calls = _MOST_LOOKS, _MOST_CALLS

    if not TYPE_CHECKING:  # checkers are to refuse attributes that there are not

        def __getattr__(self, name: str) -> NoReturn:
            """Raise AttributeError with what is meant."""
            raise no_attribute(type(self).__name__, name, dir(type(self)), _OF_TABLES)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the numbers."""
        own = self.dataset
        is_reference = isinstance(own, DatasetReference)
        reference = own if is_reference else DatasetReference(self.layout, self.content_id)
        return type(self), (reference, self._client)

    def __deepcopy__(self, _: Any) -> Self:
        """Return the handle itself, which never changes."""
        return self

    @property
    def content_id(self) -> bytes:
        """SHA-256 that identifies the content on every server, 32 bytes."""
        return self.dataset.content_id

    @property
    def layout(self) -> Layout:
        """Dtype, number of variables and rows, and whether there are a target and weights."""
        return self.dataset.layout

    @property
    def names(self) -> tuple[str, ...]:
        """Variable names, or empty."""
        return self.layout.names

    @property
    def has_numbers(self) -> bool:
        """Whether the numbers are in this process; a handle from a pickle has none."""
        return not isinstance(self.dataset, DatasetReference)

    def statistics(self, rows: tuple[int, int] | None = None) -> TargetStatistics:
        """Return statistics of the target, which is here, over a half-open range of the rows."""
        if self._statistics is None:
            target, weights = self.dataset.target, self.dataset.weights
            assert target is not None  # the request was checked
            self._statistics = TargetStatistics(target, weights)
        whole = self._statistics
        if rows is None:
            return whole
        part = slice(*rows)
        weights = None if whole.weights is None else whole.weights[part]
        return TargetStatistics(whole.target[part], weights)

    def warn_of_range(self, expressions: Any, batch: Batch, result: Result | FitResult) -> None:
        """Warn of an expression of a call that float32, the data's type, makes wrong.

        Args:
            expressions: as the caller gave them; only those that `is_written` takes are looked at.
            batch: what became of them.
            result: the answer. For results that are not finite a data set is warned of once.
        """
        if self.layout.dtype.itemsize > 4 or not (self._looks and self._calls):
            return
        if not is_written(expressions):
            return
        self._calls -= 1
        if isinstance(result, FitResult):
            not_finite = result.reasons == REASONS.index(Reason.NOT_FINITE) + 1
            suspects = np.flatnonzero(not_finite.any(axis=1)).tolist()
        else:
            suspects = suspects_of(result.values, result.losses)
        suspects = suspects[: self._looks]
        if warn_of_range(batch, self.dataset, suspects) and suspects:
            self._looks = 0
        self._looks = max(0, self._looks - len(suspects))

    def __repr__(self) -> str:
        """Show the shape, not the numbers."""
        layout = self.layout
        extras = [name for name in ("target", "weights") if getattr(layout, f"has_{name}")]
        with_extras = f" with {' and '.join(extras)}" if extras else ""
        return (
            f"<{type(self).__name__} {self.content_id.hex()[:12]}: {layout.rows} rows x "
            f"{layout.variables} variables, {layout.dtype.name}{with_extras}>"
        )


def checked_handle(data: object) -> DatasetHandle:
    """Check that a caller passed a handle; raise InvalidArgumentError if not."""
    if isinstance(data, DatasetHandle):
        return data
    raise InvalidArgumentError(
        f"data is of type {type(data).__name__}, not the handle of an uploaded data set",
        "BAD_DATA",
        "Pass what client.upload(X, y) returned",
        "data",
    )
