"""Data sets on the device, and what an evaluation tier does with them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Dataset
from warpfit.errors import ResourceExhaustedError
from warpfit.losses import TargetStatistics
from warpfit.request import Evaluation, Loss, Timings
from warpfit_server.engine.cuda.runtime.device import CudaDevice, device_array
from warpfit_server.engine.cuda.runtime.streams import StreamContext
from warpfit_server.engine.interface import Outputs, Steps
from warpfit_server.engine.native import numba_cache

#: Rows of the variables are padded to whole 128-byte lines, the unit of device memory traffic.
ROW_MULTIPLE: Final = 32
#: Rows that a kernel may read (never use) behind the last column.
SLACK_ROWS: Final = 512
#: Most bytes of one column.
_MAX_COLUMN: Final = (1 << 32) - 1
#: Bytes that are copied to the device at a time.
_PIECE: Final = 8 << 20
#: Row ranges for which a data set remembers its totals.
_REMEMBERED: Final = 256

Floats = NDArray[np.float64]
#: A number that describes a row range of a data set.
Total = Callable[[Dataset, int, int], np.float64]


class Closing(NamedTuple):
    """How a sum s of loss terms becomes a loss."""

    total: float
    """What it is divided by."""
    root: bool
    """Whether the square root follows."""
    complement: bool
    """Whether it is subtracted from 1 then."""


@dataclass(eq=False)
class ResidentDataset:
    """One data set on the device; its memory is freed with the last reference."""

    dataset: Dataset
    columns: Any
    """CuPy array [columns, stride]: variables, then target, then weights; padding is 0."""
    _totals: dict[tuple[Total, int, int], np.float64] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def variables(self) -> Any:
        """CuPy array [variables, stride]; rows beyond the data set's are padding."""
        return self.columns[: self.dataset.layout.variables]

    @property
    def stride(self) -> int:
        """Elements from one variable to the next, a multiple of `ROW_MULTIPLE`."""
        return int(self.columns.shape[1])

    def address(self, column: int, row: int) -> int:
        """Device address of one element."""
        size = self.dataset.layout.dtype.itemsize
        return int(self.columns.data.ptr) + (column * self.stride + row) * size

    def target_address(self, row: int) -> int:
        """Device address of the target at ``row``."""
        return self.address(self.dataset.layout.variables, row)

    def weights_address(self, row: int) -> int:
        """Device address of the weights at ``row``, 0 without weights."""
        layout = self.dataset.layout
        return self.address(layout.columns - 1, row) if layout.has_weights else 0

    def closing(self, kind: Loss, start: int, stop: int) -> Closing:
        """Say how sums of w (f - y)^2, for MAE of w |f - y|, over a row range become losses."""
        if kind is Loss.SSE:
            return Closing(1.0, root=False, complement=False)
        if kind in (Loss.R2, Loss.NMSE):
            total = self._total(_variation, start, stop)
            return Closing(float(total), root=False, complement=kind is Loss.R2)
        total = self._total(_weight, start, stop)
        return Closing(float(total), root=kind is Loss.RMSE, complement=False)

    def losses(self, kind: Loss, sums: Floats, start: int, stop: int) -> Floats:
        """Turn sums into losses as `closing` says."""
        closing = self.closing(kind, start, stop)
        with np.errstate(all="ignore"):
            shares = sums / closing.total
            shares = np.sqrt(shares) if closing.root else shares
            return 1.0 - shares if closing.complement else shares

    def _total(self, total: Total, start: int, stop: int) -> np.float64:
        key = (total, start, stop)
        with self._lock:
            known = self._totals.pop(key, None)
        value = total(self.dataset, start, stop) if known is None else known
        with self._lock:
            self._totals[key] = value
            if len(self._totals) > _REMEMBERED:
                del self._totals[next(iter(self._totals))]
        return value


@numba_cache.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def close(sums: NDArray[np.float64], closing: Closing, losses: NDArray[np.float64]) -> None:
    """Turn sums into losses, as `ResidentDataset.losses` does; both may be the same array."""
    for job in range(len(sums)):
        loss = sums[job] / closing.total
        if closing.root:
            loss = np.sqrt(loss)
        losses[job] = 1.0 - loss if closing.complement else loss


class EvaluationTier(Protocol):
    """One way to evaluate a batch on a resident data set."""

    def evaluate(
        self, resident: ResidentDataset, evaluation: Evaluation, outputs: Outputs
    ) -> Steps[Timings]:
        """Evaluate as `warpfit_server.engine.interface.Engine.evaluate` does."""


def upload(device: CudaDevice, dataset: Dataset) -> ResidentDataset:
    """Copy a data set to the device.

    Raises:
        ResourceExhaustedError: if the device has no room for it.

    """
    layout = dataset.layout
    stride = -(-layout.rows // ROW_MULTIPLE) * ROW_MULTIPLE
    _check_column(stride * layout.dtype.itemsize)
    size = (layout.columns * stride + SLACK_ROWS) * layout.dtype.itemsize
    with device.stream() as context:
        memory = device.allocate(size)
        context.clear(memory.ptr, size)
        columns = device_array(device, memory, (layout.columns, stride), layout.dtype)
        resident = ResidentDataset(dataset, columns)
        for column in range(layout.columns):
            _upload_column(context, dataset.matrix[column], resident.address(column, 0))
    return resident


def _check_column(size: int) -> None:
    """Refuse columns whose size in bytes the kernels' 32-bit strides cannot hold."""
    if size > _MAX_COLUMN:
        raise ResourceExhaustedError(
            f"a column of {size} bytes is larger than a CUDA kernel can step over",
            "COLUMN_TOO_LONG",
            "Upload the rows as several data sets and add their losses up",
            "layout.rows",
            needed=size,
            available=_MAX_COLUMN,
        )


def _upload_column(context: StreamContext, column: Any, address: int) -> None:
    source = column.view(np.uint8)
    for number, start in enumerate(range(0, len(source), _PIECE)):
        piece = source[start : start + _PIECE]
        name = f"piece {number % 2}"
        staging = context.pinned(name, _PIECE)[: len(piece)]
        context.wait(name)
        staging[:] = piece
        context.upload(address + start, staging)
        context.mark(name)


def _weight(dataset: Dataset, start: int, stop: int) -> np.float64:
    """Sum of the weights."""
    return np.float64(TargetStatistics.of_rows(dataset, slice(start, stop)).weight)


def _variation(dataset: Dataset, start: int, stop: int) -> np.float64:
    """Sum of w (y - m)^2 around the weighted mean m of the target."""
    return np.float64(TargetStatistics.of_rows(dataset, slice(start, stop)).variation)
