"""The handle of an uploaded data set, which users pass to `evaluate` and `optimize`."""

from __future__ import annotations

from warpfit.dataset import ClientDataset, Layout
from warpfit.losses import TargetStatistics


class DatasetHandle:
    """Handle of an uploaded data set.

    Any client can use it with any server: where the data set is not resident, it is uploaded. For
    that the handle keeps the numbers, in the dtype and order in which they travel.
    """

    def __init__(self, dataset: ClientDataset) -> None:
        self.dataset = dataset
        self._statistics: TargetStatistics | None = None

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

    def statistics(self, rows: tuple[int, int] | None = None) -> TargetStatistics:
        """Return statistics of the target, which there is, over a half-open range of the rows."""
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

    def __repr__(self) -> str:
        """Show the shape, not the numbers."""
        layout = self.layout
        extras = [name for name in ("target", "weights") if getattr(layout, f"has_{name}")]
        with_extras = f" with {' and '.join(extras)}" if extras else ""
        return (
            f"<{type(self).__name__} {self.content_id.hex()[:12]}: {layout.rows} rows x "
            f"{layout.variables} variables, {layout.dtype.name}{with_extras}>"
        )
