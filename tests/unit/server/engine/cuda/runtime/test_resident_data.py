"""Data sets on a device: what is refused before anything is allocated."""

from __future__ import annotations

import numpy as np
import pytest

from warpfit.dataset import Dataset, Layout
from warpfit.errors import ResourceExhaustedError
from warpfit_server.engine.cuda.runtime.resident_data import upload


@pytest.mark.parametrize(("dtype", "rows"), [("<f4", 1 << 30), ("<f8", 1 << 29)])
def test_a_column_longer_than_the_kernels_strides_is_refused(dtype, rows):
    layout = Layout(np.dtype(dtype), variables=1, rows=rows)
    matrix = np.broadcast_to(np.zeros(1, dtype), (1, rows))  # no memory behind it
    with pytest.raises(ResourceExhaustedError, match="several data sets") as refused:
        upload(None, Dataset.resident(layout, matrix, bytes(32)))
    assert refused.value.needed > refused.value.available
