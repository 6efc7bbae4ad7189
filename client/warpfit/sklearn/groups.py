"""Groups of rows: one formula for all, and constants of their own for each group.

Each group's rows are a data set of their own, to which the same programs are fitted, and losses
are added. So a search needs no parameters by row: `GroupedClient` stands between it and the server,
with the methods of a client that a search calls. Where it returns one vector for a formula, that is
the largest group's, which is where the fits of its offspring begin.

A constant is one of each group unless it has a short form, such as 2 or 1/3: the simplification
finds out which constants may be common to all groups.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from warpfit.client import Client, UploadedDataset
from warpfit.display import Shown, TextTable
from warpfit.errors import InvalidArgumentError, did_you_mean
from warpfit.expressions.language import is_free
from warpfit.expressions.reference import evaluate_program
from warpfit.ir import Program
from warpfit.losses import Closing, Loss, LossFunction, as_function
from warpfit.ops import PARAMETER, VARIABLE
from warpfit.request import Reason
from warpfit.sklearn.genomes import Floats, Indices
from warpfit.sklearn.templates import seconds_until

#: Most groups, and fewest rows of each.
MOST_GROUPS: Final = 100
FEWEST_ROWS: Final = 5
#: Reasons of searches that could go on.
_UNFINISHED: Final = (Reason.ITERATIONS, Reason.DEADLINE)
#: Iterations of a fit where a search asks for the loss of formulas whose numbers it does not know.
_SCREENING: Final = 5


def encoded(X: Any, group: str | int, known: NDArray[Any] | None) -> tuple[Any, int, NDArray[Any]]:
    """Number the groups of rows.

    Args:
        X: a table or array, [rows, columns], that has the groups in one column.
        group: its name or number.
        known: the groups in ascending order if they are known.

    Returns:
        X with the numbers of the groups in that column, the column's number, and the groups.

    Raises:
        InvalidArgumentError: if there is no such column, or a group without a name, or one that is
            not known.

    """
    names = [str(name) for name in X.columns] if hasattr(X, "columns") else []
    table: Any = X if names else np.asarray(X)
    width = len(names) or (table.shape[1] if table.ndim == 2 else 0)
    place = names.index(group) if group in names else -1
    if isinstance(group, int | np.integer) and group < width:
        place = int(group)
    if place < 0:
        raise InvalidArgumentError(
            f"group is {group!r}",
            "BAD_SETTING",
            did_you_mean(
                group,
                names,
                f"Give a column of X: {', '.join(names)[:200] or f'0 to {width - 1}'}",
            ),
            "group",
        )
    column = table[table.columns[place]] if names else table[:, place]
    labels = np.asarray(column)
    missing: list[int] = []
    if labels.dtype == object:
        for row, label in enumerate(labels.tolist()):
            equals = label == label  # which is not True for NaN, NaT and pandas.NA
            if label is None or not (isinstance(equals, bool | np.bool_) and equals):
                missing.append(row)
        labels = labels.astype(str)
    elif labels.dtype.kind == "f":
        missing = np.flatnonzero(~np.isfinite(labels)).tolist()
    if missing:
        raise _bad_groups(f"row {missing[0]} has no group", "Leave such rows out")
    found = np.unique(labels)
    if known is not None and (unseen := np.setdiff1d(found, known)).size:
        raise _bad_groups(
            f"there was no group {', '.join(map(str, unseen[:10].tolist()))} in fit",
            f"Predict groups that were fitted: {', '.join(map(str, known[:10].tolist()))}"
            + ", ..." * (len(known) > 10),
        )
    known = found if known is None else known
    numbers = np.searchsorted(known, labels).astype(np.float64)
    if not names:
        rest = np.delete(table, place, axis=1).astype(np.float64)
        return np.insert(rest, place, numbers, axis=1), place, known
    name = table.columns[place]
    if hasattr(table, "assign"):
        return table.assign(**{str(name): numbers}), place, known
    return table.with_columns(table[name].__class__(name, numbers)), place, known


def check_sizes(labels: NDArray[Any], numbers: Indices) -> None:
    """Refuse one group, too many, and groups of few rows."""
    sizes = np.bincount(numbers, minlength=len(labels))
    if not 2 <= len(labels) <= MOST_GROUPS:
        raise _bad_groups(
            f"there are {len(labels)} groups", f"Give 2 to {MOST_GROUPS}, or group=None"
        )
    if sizes.min() < FEWEST_ROWS:
        small = [str(label) for label in labels[sizes < FEWEST_ROWS][:10].tolist()]
        raise _bad_groups(
            f"fewer than {FEWEST_ROWS} different rows are in group {', '.join(small)}",
            "Leave these groups out, or join them with others",
        )


def _bad_groups(what: str, remedy: str) -> InvalidArgumentError:
    return InvalidArgumentError(what, "BAD_GROUPS", remedy, "group")


def values_of(program: Program, constants: Floats, rows: Floats, numbers: Indices) -> Floats:
    """Evaluate a program with parameters on rows of groups.

    Args:
        program: the formula.
        constants: parameters of each group, [groups, parameters].
        rows: variables, [variables, rows].
        numbers: group of each row, [rows].

    """
    places = program.codes == PARAMETER
    codes = np.where(places, np.uint8(VARIABLE), program.codes)
    plain = Program(codes, program.values + len(rows) * places)
    return evaluate_program(plain, np.concatenate([rows, constants[numbers].T]))


def balanced(rng: np.random.Generator, rows: Indices, numbers: Indices) -> Indices:
    """Shuffle rows so that all groups have their share of the first ones, and of any others."""
    rows = rng.permutation(rows)
    own = numbers[rows]
    order = np.argsort(own, kind="stable")
    sizes = np.bincount(own)
    places = np.arange(len(rows)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    shares = np.empty(len(rows))
    shares[order] = (places + 0.5) / np.repeat(sizes, sizes)
    return rows[np.argsort(shares, kind="stable")]


class _Part(NamedTuple):
    """The rows of one group."""

    group: int
    data: UploadedDataset
    weight: float


@dataclass(frozen=True, slots=True)
class GroupedData:
    """Data sets of the groups, the largest first; a context manager that releases them."""

    parts: list[_Part]

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Release the data sets."""
        for part in self.parts:
            part.data.__exit__(*error)


@dataclass(frozen=True, slots=True)
class GroupedFit:
    """Result of a fit to all groups."""

    loss: Floats
    """Loss on all rows, [programs]."""
    parameters: list[Floats]
    """Parameters of the largest group; none of them has a short form."""
    reason: NDArray[Any]
    """Why the searches of a program ended: `Reason.ITERATIONS` if one of them did."""
    tables: list[Floats]
    """Parameters of each group, [groups, parameters], by program."""


@dataclass(frozen=True, slots=True)
class GroupedClient:
    """A client whose data sets are divided into groups, with the methods that a search calls."""

    client: Client
    groups: int

    def upload(
        self, X: ArrayLike, y: Floats, weights: Floats, groups: Indices, dtype: Any
    ) -> GroupedData:
        """Upload the rows of each group."""
        X = np.asarray(X)
        sizes = np.bincount(groups, minlength=self.groups)
        parts = []
        for group in np.argsort(-sizes, kind="stable")[: np.count_nonzero(sizes)].tolist():
            own = groups == group
            data = self.client.upload(X[own], y[own], weights[own], dtype=dtype)
            parts.append(_Part(group, data, float(weights[own].sum())))
        return GroupedData(parts)

    def evaluate(
        self,
        data: GroupedData,
        programs: Any,
        *,
        loss: Loss | LossFunction,
        linear_scaling: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Return losses, and slopes and intercepts of the largest group if they are asked for.

        Without linear scaling the parameters of a batch are fitted for a few iterations.
        """
        if not linear_scaling:
            return self.optimize(
                data, programs, loss=loss, max_iterations=_SCREENING, timeout=timeout
            ).loss
        ends = math.inf if timeout is None else time.monotonic() + timeout
        found = [
            self.client.evaluate(
                part.data, programs, loss=loss, linear_scaling=True, timeout=seconds_until(ends)
            )
            for part in data.parts
        ]
        return _total(data, loss, [losses for losses, _, _ in found]), *found[0][1:]

    def optimize(
        self,
        data: GroupedData,
        programs: Any,
        starts: Any = None,
        *,
        loss: Loss | LossFunction,
        max_iterations: int = 100,
        timeout: float | None = None,
        partial: bool = False,
    ) -> GroupedFit:
        """Fit programs to each group; arguments as those of `warpfit.Client.optimize`."""
        ends = math.inf if timeout is None else time.monotonic() + timeout
        fits = [
            self.client.optimize(
                part.data,
                programs,
                starts,
                loss=loss,
                max_iterations=max_iterations,
                timeout=seconds_until(ends),
                partial=partial,
            )
            for part in data.parts
        ]
        first = fits[0]
        tables = [np.tile(vector, (self.groups, 1)).copy() for vector in first.parameters]
        for part, fit in zip(data.parts, fits, strict=True):
            for table, vector in zip(tables, fit.parameters, strict=True):
                table[part.group] = vector
        unfinished = np.any([np.isin(fit.reason, _UNFINISHED) for fit in fits], axis=0)
        return GroupedFit(
            _total(data, loss, [fit.loss for fit in fits]),
            [freed(vector) for vector in first.parameters],
            np.where(unfinished, Reason.ITERATIONS, Reason.LOSS),
            tables,
        )


def _total(data: GroupedData, loss: Loss | LossFunction, losses: Sequence[Floats]) -> Floats:
    """Add up the losses of the groups, or average them."""
    weights = np.array([part.weight for part in data.parts])
    if as_function(loss).closing is not Closing.SUM:
        weights = weights / weights.sum()
    else:
        weights = np.ones(len(weights))
    return np.asarray(weights @ np.stack(losses))


def freed(numbers: Floats) -> Floats:
    """Return numbers of which none has a short form, changed in the last digit where needed."""
    return np.array([n if is_free(n) else np.nextafter(n, math.inf) for n in numbers.tolist()])


@dataclass(frozen=True, repr=False)
class GroupTable(Shown):
    """Constants of a formula by group; it prints as a table."""

    names: tuple[str, ...]
    """Names of the constants: p1, p2, ...."""
    groups: tuple[Any, ...]
    constants: tuple[tuple[float, ...], ...]
    """For each group its constants."""
    digits: int = 4

    def __getitem__(self, group: Any) -> dict[str, float]:
        """Return the constants of one group by name."""
        return dict(zip(self.names, self.constants[self.groups.index(group)], strict=True))

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame with a row for each group."""
        import pandas

        return pandas.DataFrame(self.constants, index=list(self.groups), columns=list(self.names))

    def _table(self) -> TextTable:
        return TextTable(
            ("group", *self.names),
            [
                (str(group), *(f"{value:.{self.digits}g}" for value in values))
                for group, values in zip(self.groups, self.constants, strict=True)
            ],
        )
