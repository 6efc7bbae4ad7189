"""Searches that run on a device from pass to pass do what the host makes of the same passes.

The kernels run on this machine's CPU, without contraction, so that both have the same bits.
"""

import time
from unittest.mock import Mock

import numpy as np
import pytest

from support.engines.fits import prepared
from support.suites.small_fits import TEXTS, assert_same, both, make_dataset, starts_of
from warpfit.errors import CancelledError, ProgramError
from warpfit.request import Precision
from warpfit_server.engine.cuda.derivatives import tier
from warpfit_server.engine.cuda.derivatives.tier import FIT_BLOCKS, group_searches
from warpfit_server.engine.fit.driver import optimize
from warpfit_server.engine.fit.searches import DEADLINE, GRADIENT, LOSS_CHANGE, NOT_FINITE
from warpfit_server.engine.interface import run_to_end


@pytest.mark.parametrize("weights", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_fits_have_the_bits_of_the_hosts(engine, weights):
    asked = {"all_starts": True, "standard_errors": True, "curvature": True}
    own, other, passes = both(engine, make_dataset(weights=weights), restarts=2, **asked)
    assert_same(own, other)
    assert {*own.reasons.ravel().tolist()} >= {GRADIENT, LOSS_CHANGE, NOT_FINITE}
    # What wants an orthogonal factor goes on by the host's passes, and nothing else.
    assert passes
    assert max(passes) < len(TEXTS)


def test_bounds_and_fixed_parameters_are_kept(engine):
    texts = ["p1 * exp(p2 * x1) + p3 * x2", "p1 + p2 * x1"]
    starts = [np.array([1.0, -0.1, 0.2]), np.array([0.3, 0.4])]
    bounds = {
        "lower": [[0.0, -0.5, -1.0], [-1.0, -1.0]],
        "upper": [[1.5, 0.0, 1.0], [1.0, 0.1]],
        "fixed": [[0.0, 0.0, 0.0], [1.0, 0.0]],
    }
    own, other, passes = both(engine, make_dataset(), texts, starts, **bounds)
    assert_same(own, other)
    assert not passes
    assert own.parameters[3:].tolist() == [0.3, 0.1]


@pytest.mark.parametrize("ticks", [pytest.param(1, marks=pytest.mark.thorough), 40])
def test_a_search_goes_on_where_a_launch_has_stopped(engine, monkeypatch, ticks):
    launch = Mock(side_effect=tier.run)
    monkeypatch.setattr(tier, "run", launch)
    monkeypatch.setattr(tier, "_TICKS", ticks)
    own, other, _ = both(engine, make_dataset())
    assert_same(own, other)
    assert launch.call_count > 2


@pytest.mark.thorough
def test_many_searches_run_in_parts(engine, monkeypatch):
    """Each with state that the device has room for."""
    monkeypatch.setattr(tier, "_MOST_STATE", 1_000)
    assert_same(*both(engine, make_dataset(), restarts=1, all_starts=True)[:2])


def test_what_is_not_small_goes_the_other_way(engine):
    texts = [" + ".join(f"p{k} * x1 ^ {k % 4} / {k}" for k in range(1, 18)), "p1 + p2 * x1"]
    own, other, passes = both(engine, make_dataset(), texts)
    assert_same(own, other)
    assert set(passes) == {1}
    _, _, passes = both(engine, make_dataset(5_000), texts[1:])
    assert passes, "rows of several blocks are summed by the host's passes"


@pytest.fixture
def begin(engine, monkeypatch):
    """Return a function that prepares a fit of which each launch makes one step."""
    monkeypatch.setattr(tier, "_TICKS", 1)
    dataset = make_dataset()
    engine.load(dataset)
    yield lambda **given: prepared(dataset, TEXTS, starts_of(TEXTS), engine=engine, **given)
    engine.unload(dataset.content_id)


def test_a_deadline_leaves_each_search_evaluated(begin):
    found = run_to_end(optimize(*begin(deadline=time.monotonic())))
    assert np.isfinite(found.losses[found.reasons == DEADLINE]).all()
    assert (found.evaluations >= 1).all()
    assert (found.reasons != 0).all()


def test_a_cancelled_fit_ends_between_launches(begin):
    report = Mock(side_effect=lambda _: context.cancelled.fill(1))
    request, context = begin(report=report)
    with pytest.raises(CancelledError):
        run_to_end(optimize(request, context))
    (seen,) = report.call_args.args
    assert 0 < seen.active <= seen.searches == len(TEXTS)
    report.assert_called_once()


def test_an_invalid_program_is_named(engine):
    with pytest.raises(ProgramError) as caught:
        both(engine, make_dataset(), ["p1", "x9 + p1"], [[1.0], [1.0]])
    assert caught.value.expression == 1


@pytest.mark.thorough
@pytest.mark.parametrize("precision", list(Precision))
def test_float32(engine, precision):
    own, other, passes = both(engine, make_dataset(dtype="float32"), precision=precision)
    assert_same(own, other)
    assert not passes


def test_groups_hold_all_searches_and_leave_no_multiprocessor_idle():
    rooms = {blocks: 1000 // blocks for blocks in FIT_BLOCKS}
    rng = np.random.default_rng(2)
    need = np.concatenate([rng.integers(1, 63, 500), rng.integers(63, 126, 50), [900, 300]])
    groups = group_searches(need, rooms, multiprocessors=4)
    assert sorted(np.concatenate([group.order for group in groups]).tolist()) == list(range(552))
    for group in groups:
        assert need[group.order].max() == group.shared_bytes <= rooms[group.blocks]
    # The few that need much would leave the device idle by themselves.
    assert [len(group.order) for group in groups] == [2, 550] or len(groups) <= 3
