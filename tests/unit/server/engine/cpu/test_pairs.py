"""The best pairs of the CPU's weigher are those of least squares one by one, whatever it skips."""

from __future__ import annotations

import numpy as np
import pytest

from support.suites.pairs import *  # noqa: F403
from support.suites.pairs import drawn, standardised
from warpfit_server.engine.cpu import pairs
from warpfit_server.engine.cpu.pairs import CpuWeigher
from warpfit_server.engine.interface import run_to_end
from warpfit_server.engine.search.weighing import Fit


@pytest.fixture(scope="module")
def weigher():
    weigher = CpuWeigher(2)
    yield weigher
    weigher.close()


@pytest.mark.parametrize("noise", [0.0, 0.03, 1.0])
@pytest.mark.parametrize("is_product", [True, False])
def test_results_depend_neither_on_threads_nor_on_tiles(weigher, monkeypatch, noise, is_product):
    left, right, rng = drawn(1, 256, 2_000, 160, 0.5)
    weights = np.full(160, 1 / 160)
    law = left[3] * right[1_800].astype(float) + noise * rng.normal(size=160)
    fit = Fit.of(standardised(law, weights), weights, np.empty((0, 160)), is_product)
    usual = run_to_end(weigher.best(fit, left, [right], 100))
    monkeypatch.setattr(pairs, "_RIGHT_TILE", 300)
    single = CpuWeigher(1)
    try:
        other = run_to_end(single.best(fit, left, [right], 100))
    finally:
        single.close()
    for one, two in zip(usual, other, strict=True):
        np.testing.assert_array_equal(one, two)
