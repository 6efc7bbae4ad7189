"""How compiled work is shared out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cuda.bindings")

from warpfit.ops import OPERATORS
from warpfit_server.engine.cuda.jit.device_library import Mode
from warpfit_server.engine.cuda.jit.grid_layout import best_layout, shared_out


@given(st.integers(1, 5000), st.lists(st.floats(0.01, 100), min_size=1, max_size=300))
def test_shares_add_up_and_are_off_by_less_than_one(total, weights):
    shares = np.array(weights) / np.sum(weights)
    parts = shared_out(total, shares)
    assert parts.sum() == total
    assert np.all(np.abs(parts - total * shares) < 1 + 1e-9)


@pytest.mark.parametrize("mode", Mode)
def test_blocks_fit_a_multiprocessor(mode):
    for names in (("add", "mul"), ("add", "exp")):
        codes = np.array([OPERATORS[name].code for name in names], dtype=np.uint8)
        layout = best_layout(mode, codes)
        assert layout.threads % 32 == 0
        assert layout.threads <= 1024
        assert layout.threads >= layout.group_size  # each sum is stored by a thread of its own


def test_cheap_batches_take_more_rows_a_thread():
    cheap = best_layout(Mode.FAST, np.array([OPERATORS["mul"].code], dtype=np.uint8))
    costly = best_layout(Mode.FAST, np.array([OPERATORS["exp"].code], dtype=np.uint8))
    assert cheap.rows > costly.rows
