"""Searches that run on the device from pass to pass reach what the host's passes do."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from support.engines import nist
from support.random_programs import random_program
from support.suites.small_fits import assert_same, both, make_dataset
from warpfit.request import Precision
from warpfit_server.engine.cuda.derivatives import tier

FLAVOURS = [("float32", each) for each in Precision] + [("float64", Precision.PRECISE)]


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize(("dtype", "precision"), FLAVOURS)
def test_fits_reach_the_losses_of_the_hosts(engine, dtype, precision, weights):
    """To rounding errors, because elementary functions of host and device differ in them."""
    data = make_dataset(500, dtype, weights=weights)
    own, other, _ = both(engine, data, precision=precision, restarts=2, all_starts=True)
    finite = np.isfinite(other.losses)
    np.testing.assert_array_equal(np.isfinite(own.losses), finite)
    same = own.losses[finite] <= other.losses[finite] * (1.0 + 1e-6) + 1e-12
    assert same.mean() > 0.9


def test_the_first_pass_has_the_bits_of_the_hosts(engine):
    own, other, _ = both(engine, make_dataset(500), max_iterations=1)
    np.testing.assert_array_equal(own.initial_losses, other.initial_losses)


def test_a_search_goes_on_where_a_launch_has_stopped(engine, monkeypatch):
    """To the last bit, wherever that is."""
    call = partial(both, engine, make_dataset(2_000), restarts=20, all_starts=True)
    whole, _, _ = call()
    monkeypatch.setattr(tier, "_TICKS", 1)
    assert_same(call()[0], whole)


def test_random_programs(engine):
    rng = np.random.default_rng(4)
    programs = [random_program(rng, int(rng.integers(5, 30)), variables=2) for _ in range(2_000)]
    some = [each for each in programs if 0 < each.parameters <= 8]
    starts = [rng.uniform(0.5, 2.0, size=each.parameters) for each in some]
    own, other, _ = both(engine, make_dataset(500), some, starts)
    finite = np.isfinite(other.losses)
    np.testing.assert_array_equal(np.isfinite(own.losses), finite)
    ratio = own.losses[finite] / np.maximum(other.losses[finite], 1e-300)
    assert (np.abs(ratio - 1.0) < 1e-6).mean() > 0.98


@pytest.mark.parametrize("name", sorted(nist.FORMULAS))
def test_nist_problems(engine, name):
    problem = nist.load(name)
    given = problem.dataset, [problem.formula], [problem.starts[1]]
    own, other, _ = both(engine, *given, max_iterations=500)
    np.testing.assert_allclose(own.losses, other.losses, rtol=1e-6)
