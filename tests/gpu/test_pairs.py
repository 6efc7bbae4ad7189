"""Pairs of formulas on a device: those of least squares, and those of the CPU engine."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from support.suites.pairs import *  # noqa: F403
from support.suites.pairs import drawn, standardised
from warpfit_server.engine.cpu.pairs import CpuWeigher
from warpfit_server.engine.cuda import colony
from warpfit_server.engine.cuda.colony import CudaWeigher
from warpfit_server.engine.interface import run_to_end
from warpfit_server.engine.search.library import Fit


@pytest.fixture(scope="module", params=[True, False], ids=["float64", "float32"])
def weigher(request, engine):
    with pytest.MonkeyPatch.context() as patch:
        have = frozenset({engine._device.compute_capability} if request.param else ())
        patch.setattr(colony, "_HAVE_DOUBLES", have)
        weigher = CudaWeigher(engine._device)
        yield weigher
        weigher.close()


@pytest.mark.parametrize("is_product", [True, False])
@pytest.mark.parametrize("noise", [0.0, 0.1, 10.0])
def test_many_pairs_are_those_of_the_cpu_engine(weigher, is_product, noise):
    left, right, rng = drawn(1, 1_000, 9_000, 500, 0.5)
    weights = np.full(500, 1 / 500)
    law = left[700] * right[8_500].astype(float) + noise * rng.normal(size=500)
    fit = Fit.of(standardised(law, weights), weights, rng.normal(size=(1, 500)), is_product)
    held = [weigher.prepared(right[:5_000]), weigher.prepared(right[5_000:])]
    found = run_to_end(weigher.best(fit, left, held, 600))
    with closing(CpuWeigher(4)) as cpu:
        want = run_to_end(cpu.best(fit, left, [right], 600))
    np.testing.assert_allclose(found[0], want[0], rtol=1e-9, atol=1e-14)
    assert np.mean((found[1] == want[1]) & (found[2] == want[2])) > 0.99
