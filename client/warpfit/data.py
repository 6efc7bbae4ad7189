"""What users hold in their hands: the handle of an uploaded data set, and answers as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Dataset, Layout
from warpfit.request import Result, Timings


class Data:
    """Handle of an uploaded data set.

    Any client can use it with any server: where the data set is not resident, it is uploaded. For
    that the handle keeps the numbers, in the dtype and order in which they travel.
    """

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    @property
    def content_id(self) -> bytes:
        """SHA-256 that identifies the content on every server, 32 bytes."""
        return self.dataset.content_id

    @property
    def layout(self) -> Layout:
        """Dtype, numbers of variables and rows, and what else the data set has."""
        return self.dataset.layout

    @property
    def names(self) -> tuple[str, ...]:
        """Variable names, or empty."""
        return self.layout.names

    def __repr__(self) -> str:
        """Show the shape, not the numbers."""
        layout = self.layout
        extras = [name for name in ("target", "weights") if getattr(layout, f"has_{name}")]
        with_extras = f" with {' and '.join(extras)}" if extras else ""
        return (
            f"<{type(self).__name__} {self.content_id.hex()[:12]}: {layout.rows} rows x "
            f"{layout.variables} variables, {layout.dtype.name}{with_extras}>"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """Everything that one evaluation returned.

    With K parameter vectors for each expression, both arrays have a leading axis of length K.
    """

    values: NDArray[Any] | None
    """[rows, expressions] or [K, rows, expressions], the data set's dtype; None if not wanted."""
    losses: NDArray[np.float64] | None
    """[expressions] or [K, expressions]; None if not wanted."""
    timings: Timings
    """Where the server spent its time."""

    @classmethod
    def of(cls, result: Result, *, leading_axis: bool) -> Answer:
        """View a result, which is in the memory order of the wire, the way users think of it."""
        values = None if result.values is None else result.values.transpose(1, 2, 0)
        losses = None if result.losses is None else result.losses.T
        if not leading_axis:
            values = None if values is None else values[0]
            losses = None if losses is None else losses[0]
        return cls(values, losses, result.timings)

    @property
    def array(self) -> NDArray[Any]:
        """The one array that was asked for."""
        return self.losses if self.values is None else self.values  # type: ignore[return-value]
