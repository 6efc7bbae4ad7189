"""Data sets on a device: what is refused before anything is allocated, how sums become losses."""

from __future__ import annotations

import numpy as np
import pytest

from warpfit.dataset import Dataset, Layout
from warpfit.errors import ResourceExhaustedError
from warpfit.losses import BUILT_IN, Loss, TargetStatistics, close_losses
from warpfit_server.engine.cuda.runtime.resident_data import ResidentDataset, close, upload


@pytest.mark.parametrize(("dtype", "rows"), [("<f4", 1 << 30), ("<f8", 1 << 29)])
def test_a_column_over_the_strides_of_the_kernels_is_refused(dtype, rows):
    layout = Layout(np.dtype(dtype), variables=1, rows=rows)
    matrix = np.broadcast_to(np.zeros(1, dtype), (1, rows))  # no memory behind it
    with pytest.raises(ResourceExhaustedError, match="several data sets") as refused:
        upload(None, Dataset.resident(layout, matrix, bytes(32)))
    assert refused.value.needed > refused.value.available


@pytest.mark.parametrize("loss", Loss)
@pytest.mark.parametrize("weights", [None, np.array([1.0, 0.5, 2.0, 3.0])])
def test_sums_become_losses_as_numpy_would_make_them(loss, weights):
    dataset = Dataset.of(np.ones((4, 2)), np.array([0.0, 1.0, 2.0, 5.0]), weights)
    resident, sums = ResidentDataset(dataset, None), np.arange(50.0)
    statistics = TargetStatistics.of_rows(dataset, slice(1, 4))
    expected = close_losses(BUILT_IN[loss].closing, sums, statistics)
    losses = np.empty(50)
    close(sums, resident.closing(loss, 1, 4), losses)
    np.testing.assert_allclose(losses, expected, rtol=1e-15)
    assert losses.tobytes() == resident.losses(loss, sums, 1, 4).tobytes()
