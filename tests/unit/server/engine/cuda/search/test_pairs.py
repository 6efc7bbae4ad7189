"""The weigher of a GPU on this machine's CPU finds the pairs that the CPU engine's finds."""

from __future__ import annotations

import numpy as np
import pytest

from support.emulators.host_device import install
from support.suites.pairs import (  # noqa: F401
    drawn,
    standardised,
    test_equal_pairs_are_kept_in_their_order,
    test_neither_tiny_nor_huge_values_win,
    test_places_count_through_all_parts_and_tiles,
    test_the_best_pairs_are_those_of_least_squares_one_by_one,
)
from warpfit_server.engine.cpu.pairs import CpuWeigher
from warpfit_server.engine.cuda.runtime.device import CudaDevice
from warpfit_server.engine.cuda.search import pairs
from warpfit_server.engine.cuda.search.pairs import CudaWeigher
from warpfit_server.engine.interface import run_to_end
from warpfit_server.engine.search.weighing import Fit


@pytest.fixture(scope="module", params=[True, False], ids=["float64", "float32"])
def weigher(request):
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        for name, size in {"_LEFT_TILE": 64, "_RIGHT_TILE": 96, "_CAPACITY": 96}.items():
            patch.setattr(pairs, name, size)
        patch.setattr(pairs, "_BLOCKS", 3)
        if not request.param:
            patch.setattr(pairs, "_HAVE_DOUBLES", frozenset())
        weigher = CudaWeigher(CudaDevice())
        yield weigher
        weigher.close()


@pytest.mark.parametrize("is_product", [True, False])
@pytest.mark.parametrize("copies", [1, 200])
def test_more_pairs_than_there_is_room_for_change_nothing(weigher, is_product, copies):
    """Many pairs are equal if there are copies of a formula."""
    left, right, rng = drawn(6, 40, 230, 64, 0.5)
    right[:copies] = right[0]
    weights = np.full(64, 1 / 64)
    law = left[30] * right[0].astype(float) + 0.1 * rng.normal(size=64)
    fit = Fit.of(standardised(law, weights), weights, np.empty((0, 64)), is_product)
    errors, one, other = run_to_end(weigher.best(fit, left, [weigher.prepared(right)], 90))
    cpu = CpuWeigher(1)
    try:
        want = run_to_end(cpu.best(fit, left, [right], 90))
    finally:
        cpu.close()
    np.testing.assert_allclose(errors, want[0], rtol=1e-9)
    if copies == 1:
        np.testing.assert_array_equal(one, want[1])
        np.testing.assert_array_equal(other, want[2])


def test_memory_is_what_was_said(weigher):
    left, right, rng = drawn(7, 64, 300, 96)
    weights = np.full(96, 1 / 96)
    fit = Fit.of(standardised(rng.normal(size=96), weights), weights, np.empty((0, 96)), True)
    held = weigher.prepared(right)
    run_to_end(weigher.best(fit, left, [held], 50))
    own = sum(memory.mem.size for memory in weigher._memory.values())
    assert own <= weigher.bytes_needed(96, 50) + 512 * len(weigher._memory)


def test_what_is_prepared_has_the_length_that_pairs_are_counted_by(weigher):
    assert len(weigher.prepared(np.ones((7, 5), np.float32))) == 7
