"""Fits that a deadline or their caller ends, and searches that other threads advance."""

from __future__ import annotations

import threading
import time

import numba
import numpy as np
import pytest

from support.engines.fits import fit, tight
from support.engines.references import NumpyEngine
from warpfit import CancelledError, Reason
from warpfit.dataset import Dataset
from warpfit.fitting import Accuracy
from warpfit_server.engine.fit import driver, triangles
from warpfit_server.engine.fit.searches import EVALUATIONS

X = np.random.default_rng(3).uniform(0.5, 2.0, size=(60, 2))
EXACT = Dataset.of(X, 3.0 * np.exp(-0.7 * X[:, 0]) + 0.5 * X[:, 1], dtype="float64")
MODEL = "p1*exp(p2*x1) + p3*x2"
START = [1.0, -0.1, 1.0]
METHODS = ("lm", "bfgs")


@pytest.mark.parametrize("method", METHODS)
def test_a_deadline_that_has_passed_returns_what_there_is(method):
    found = fit(EXACT, [MODEL, "x1"], [START, []], method=method, deadline=time.monotonic() - 1)
    assert found.reason.tolist() == [Reason.DEADLINE, Reason.GRADIENT]
    assert found.loss[0] <= found.initial_loss[0]


class StuckEngine(NumpyEngine):
    """Hangs after some passes until it is cancelled."""

    def __init__(self, dataset, passes):
        super().__init__(dataset)
        self.left = passes

    def linearise(self, evaluation, row_loss, *, cancelled, **options):
        self.left -= 1
        while self.left < 0:
            if cancelled[0]:
                self.left = 1
                raise CancelledError("the evaluation was cancelled", "CANCELLED")
            time.sleep(0.001)
        return (yield from super().linearise(evaluation, row_loss, cancelled=cancelled, **options))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("passes", [1, 4])
def test_a_pass_is_cancelled_at_the_deadline_of_its_fit(method, passes):
    fit(EXACT, [MODEL], [START], method=method)  # loads the code
    started = time.monotonic()
    found = fit(
        EXACT,
        [MODEL, "x1"],
        [START, []],
        method=method,
        engine=StuckEngine(EXACT, passes),
        deadline=started + 0.3,
        covariance=True,
    )
    assert 0.25 < time.monotonic() - started < 30
    assert found.reason.tolist() == [Reason.DEADLINE, Reason.GRADIENT]
    assert found.loss[0] <= found.initial_loss[0]
    assert np.isfinite(found.loss).all()
    (again,) = fit(EXACT, [MODEL], found.parameters[:1], max_iterations=0).loss
    assert again == found.loss[0], "loss and parameters belong together"
    assert np.isfinite(found.covariance[0]).all(), "computed in spite of what was cut off"


LARGE = "+".join(f"p{i + 1}*sin({i + 1}*x1)" for i in range(110))


@pytest.mark.parametrize(
    ("method", "much"), [("lm", "searches"), ("bfgs", "searches"), ("lm", "parameters")]
)
def test_much_work_beside_passes_is_done_by_another_thread(monkeypatch, method, much):
    """So that the engine's thread goes on with other requests."""
    problem, options = (EXACT, [MODEL, "x1"], [START, []]), {"method": method, "covariance": True}
    if much == "parameters":
        problem = EXACT, [LARGE, LARGE], [np.ones(110), np.full(110, 0.5)]
        options["max_iterations"] = 2  # until they converge they take a minute
    expected, threads = fit(*problem, **options), set()

    def watched(function):
        def call(*arguments):
            threads.add(threading.get_ident())
            return function(*arguments)

        return call

    if much == "searches":
        monkeypatch.setattr(driver, "_MUCH_WORK", 1.0)
        monkeypatch.setattr(driver, "_PIECE", 0.5)
    for name in ("_advance", "_drop_finished"):
        monkeypatch.setattr(driver._Driver, name, watched(getattr(driver._Driver, name)))
    monkeypatch.setattr(driver, "estimate_covariances", watched(driver.estimate_covariances))
    found = fit(*problem, **options)
    assert threads
    assert threading.get_ident() not in threads
    for name in ("loss", "iterations", "reason"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    np.testing.assert_array_equal(found.parameters[0], expected.parameters[0])


@pytest.mark.parametrize("accuracy", Accuracy)
@pytest.mark.parametrize("degree", [1, 4, 6])
def test_a_linear_fit_that_gets_no_better_ends(accuracy, degree):
    """Hundreds of good steps once made the damping 0, and a loop that doubled it had no end."""
    x = np.linspace(500, 505, 80)
    z = (x - 502.5) / 2.5
    y = 1 + z - z**2 / 2 + 0.3 * z**3 - 0.2 * z**4 + 0.01 * np.sin(50 * x)
    data = Dataset.of(x[:, None], y, dtype="float64")
    text = " + ".join(["p1", *(f"p{k + 1}*x1^{k}" for k in range(1, degree + 1))])
    found = fit(data, [text], [np.ones(degree + 1)], **tight(accuracy))
    assert found.iterations[0] <= accuracy.max_iterations


@pytest.mark.parametrize("method", METHODS)
def test_compiled_steps_look_at_the_flag_of_cancellation(monkeypatch, method):
    """A flag that is set while a step is computed leaves searches as they were."""
    advance = driver._Driver._advance

    def cancelled_meanwhile(self, new, some):
        if counters := self._active.counters[some, EVALUATIONS].max():
            self._context.cancelled[0] = 1
        before = self._active.vectors.copy()
        advance(self, new, some)
        assert bool(counters) == np.array_equal(before, self._active.vectors)

    monkeypatch.setattr(driver._Driver, "_advance", cancelled_meanwhile)
    with pytest.raises(CancelledError):
        fit(EXACT, [MODEL] * 3, [START] * 3, method=method)


def test_a_factorisation_looks_at_the_flag_of_cancellation():
    matrix = np.array([2.0, 1.0, 2.0])
    factorise = numba.njit(triangles.factorise)
    assert factorise(matrix.copy(), 0, 2, 2, np.zeros(1, dtype=np.uint8))
    assert not factorise(matrix.copy(), 0, 2, 2, np.ones(1, dtype=np.uint8))


def test_a_fit_with_a_deadline_can_be_cancelled():
    class Cancelling(NumpyEngine):
        def linearise(self, *arguments, cancelled, **options):
            cancelled[0] = len(self.sizes) > 1
            return (yield from super().linearise(*arguments, cancelled=cancelled, **options))

    engine = Cancelling(EXACT)
    with pytest.raises(CancelledError):
        fit(EXACT, [MODEL], [START], engine=engine, deadline=time.monotonic() + 60)
    assert len(engine.sizes) == 3


def test_cancellation_is_noticed_between_passes():
    with pytest.raises(CancelledError):
        fit(EXACT, [MODEL], [START], cancelled=True)


@pytest.mark.parametrize("method", METHODS)
def test_cancellation_is_noticed_between_searches(monkeypatch, method):
    advanced = []
    advance = driver._Driver._advance

    def cancel(self, new, some):
        advance(self, new, some)
        advanced.append(some)
        self._context.cancelled[0] = 1

    monkeypatch.setattr(driver, "_PIECE", 0.5)
    monkeypatch.setattr(driver._Driver, "_advance", cancel)
    with pytest.raises(CancelledError):
        fit(EXACT, [MODEL] * 3, [START] * 3, method=method)
    assert advanced == [slice(0, 1)]
