"""The handle of an uploaded data set, which users pass to `evaluate` and `optimize`."""

from typing import Any, Final, Self

import numpy as np

from warpfit.dataset import ClientDataset, DatasetReference, Layout
from warpfit.dataset.float32_range import EXPRESSIONS, suspects_of, warn_of_range
from warpfit.errors import InvalidArgumentError
from warpfit.fitting import REASONS, FitResult, Reason
from warpfit.ir import Batch
from warpfit.losses import TargetStatistics
from warpfit.request import Result

#: Most expressions with results that are not finite that are looked at for a data set: each takes
#: 1 to 2 ms.
_MOST_LOOKS: Final = 100


class DatasetHandle:
    """Handle of an uploaded data set.

    Any client can use it with any server: where the data set is not resident, it is uploaded. For
    that the handle keeps the numbers, in the dtype and order in which they travel. It is pickled
    without them, as its client, layout and content id.
    """

    def __init__(self, dataset: ClientDataset, client: Any = None) -> None:
        self.dataset, self._client = dataset, client
        self._statistics: TargetStatistics | None = None
        #: Expressions with results that are not finite that are still looked at, for a warning.
        self._looks = _MOST_LOOKS

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

    def warn_of_range(self, batch: Batch, result: Result | FitResult) -> None:
        """Warn of an expression of a call that float32, the data's type, makes wrong.

        Numbers far from 1 are looked for in each call. Results that are not finite, and fits that
        cannot begin, are usual in a search: of them a data set is warned of once.
        """
        if self.layout.dtype.itemsize > 4:
            return
        suspects: list[int] = []
        if self._looks and isinstance(result, FitResult):
            not_finite = result.reasons == REASONS.index(Reason.NOT_FINITE) + 1
            suspects = np.flatnonzero(not_finite.any(axis=1)).tolist()
        elif self._looks and isinstance(result, Result):
            suspects = suspects_of(result.values, result.losses)
        suspects = suspects[: min(self._looks, EXPRESSIONS)]
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
