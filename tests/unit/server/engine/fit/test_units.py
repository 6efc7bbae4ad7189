"""Fits do not depend on the units of data and parameters.

A problem whose target, variables and parameters are multiplied by powers of two is the same
problem bit by bit, as long as no square leaves the range of float64; by other factors it is nearly
the same.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.engines.fits import fit
from warpfit.dataset import Dataset
from warpfit.losses import Loss, LossFunction
from warpfit.request import Precision
from warpfit_server.engine.cpu.engine import CpuEngine

rng = np.random.default_rng(11)
X = rng.uniform([0.5, 0.1], [4.0, 10.0], size=(80, 2))
NOISE = rng.normal(scale=0.02, size=80)
Y = 3.0 * np.exp(-0.7 * X[:, 0]) + 0.5 * X[:, 1] / (1.3 + X[:, 1]) + NOISE
#: p1 and p3 have the unit of y, p2 that of 1 / x1, p4 that of x2.
MODEL = "p1*exp(p2*x1) + p3*x2/(p4 + x2)"
START = np.array([1.0, -0.2, 1.0, 1.0])
METHODS = ("lm", "bfgs")
LOSSES = {"lm": ["mse"], "bfgs": ["mae", "abs(d)^1.5"]}
CASES = [(method, loss) for method in METHODS for loss in LOSSES[method]]
#: A power of 1.5 is not exact.
EXACT_CASES = [case for case in CASES if case[1] in ("mse", "mae")]


def outcome(method, loss, y=1.0, x1=1.0, x2=1.0, **options):
    """Fit in other units; return the parameters' units, and the parameters in the first ones."""
    data = Dataset.of(X * [x1, x2], y * Y, dtype="float64")
    chosen = Loss(loss) if loss in list(Loss) else LossFunction.parse(loss)
    units = np.array([y, 1 / x1, y, x2])
    options = {"method": method, "max_iterations": 300} | options
    found = fit(data, [MODEL], [START * units], loss=chosen, **options)
    return found, units, found.parameters[0] / units


#: A fit in the first units.
usual = cache(outcome)


exponents = st.integers(-100, 100)  # 1e-30 to 1e30


@pytest.mark.parametrize(("method", "loss"), EXACT_CASES)
@settings(max_examples=5, deadline=None)
@given(exponents, exponents, exponents)
@example(44, 0, 0)
@example(100, -100, 100)
def test_powers_of_two_change_no_bit(method, loss, y, x1, x2):
    asked = {"standard_errors": loss == "mse"}
    first, _, parameters = usual(method, loss, **asked)
    second, units, scaled = outcome(method, loss, 2.0**y, 2.0**x1, 2.0**x2, **asked)
    for name in ("iterations", "evaluations", "reason"):
        assert getattr(first, name).tolist() == getattr(second, name).tolist(), name
    np.testing.assert_array_equal(parameters, scaled)
    assert first.iterations[0] > 3
    if loss == "mse":
        assert second.loss[0] == first.loss[0] * 4.0**y
        errors = second.standard_errors[0] / units
        np.testing.assert_allclose(errors, first.standard_errors[0], rtol=1e-12)
        assert np.isfinite(errors).all()


@pytest.mark.parametrize(("method", "loss"), CASES)
@settings(max_examples=4, deadline=None)
@given(*[st.floats(-30, 30).map(lambda power: 10.0**power)] * 3)
def test_other_factors_change_rounding_errors_only(method, loss, y, x1, x2):
    first, _, parameters = usual(method, loss)
    second, _, scaled = outcome(method, loss, y, x1, x2)
    assert second.success[0]
    if loss == "mse":
        np.testing.assert_allclose(parameters, scaled, rtol=1e-3)
    power = {"mse": 2.0, "mae": 1.0}.get(loss, 1.5)
    np.testing.assert_allclose(second.loss[0] / y**power, first.loss[0], rtol=1e-2)


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=10, deadline=None)
@given(st.floats(-150.0, 150.0), st.floats(-150.0, 150.0))
@example(np.log10(2e-150), 0.0)
@example(-150.0, 150.0)
@example(150.0, -150.0)
def test_a_law_is_found_in_any_units(method, y, x):
    """Squares of 1e-150 and 1e150 are in the range of float64."""
    column = np.array([1.0, 2.0, 3.0])
    data = Dataset.of(10.0**x * column[:, None], 10.0**y * column, dtype="float64")
    found = fit(data, ["p1*x1"], [[0.3 * 10.0 ** (y - x)]], method=method, max_iterations=100)
    assert found.success[0]
    np.testing.assert_allclose(found.parameters[0] / 10.0 ** (y - x), [1.0], rtol=1e-6)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_plancks_constant_from_the_photoelectric_effect(engine, method, dtype):
    """The units of physics: J, Hz and Js."""
    frequency = np.linspace(5.5e14, 1.2e15, 40)
    h, work = 6.62607015e-34, 3.4e-19
    energy = h * frequency - work + 1e-21 * rng.normal(size=40)
    data = Dataset.of(frequency[:, None], energy, dtype=dtype)
    engine.load(data)
    found = fit(data, ["p1*x1 - p2"], [[1e-33, 1e-19]], method=method, engine=engine)
    slope, intercept = np.polyfit(frequency, energy, 1)
    assert found.iterations[0] > 0
    assert found.success[0]
    np.testing.assert_allclose(found.parameters[0], [slope, -intercept], rtol=1e-3)


def test_what_leaves_float32_is_fitted_precisely_and_nothing_else_is():
    """On a GPU fast mode multiplies in float32."""
    seen = []

    class Noting(CpuEngine):
        def linearise(self, evaluation, *arguments, **options):
            seen.append((evaluation.precision, len(evaluation.batch)))
            return super().linearise(evaluation, *arguments, **options)

    engine, data = Noting(threads=1), Dataset.of(X, X[:, 0] + 0.3, dtype="float32")
    engine.load(data)
    texts = ["exp(p1*x1) + p2", "p1*x1 + 1e-20*p2", "p1*x1 + log(p2)*x1"]
    starts = [[0.1, 0.2], [1.0, 1.0], [1.0, -1.0]]
    for method in METHODS:
        options = {"method": method, "engine": engine, "precision": Precision.FAST}
        alone = fit(data, texts[:1], starts[:1], **options)
        assert {precision for precision, _ in seen} == {Precision.FAST}
        seen.clear()
        found = fit(data, texts, starts, **options)
        counts = [count for precision, count in seen if precision is Precision.PRECISE]
        assert max(counts) == 2
        assert seen[0] == (Precision.FAST, 3)
        assert found.parameters[0].tolist() == alone.parameters[0].tolist()
        assert found.loss[0] == alone.loss[0]
        options["precision"] = Precision.PRECISE
        precise = fit(data, texts[1:], starts[1:], **options)
        for place in range(2):
            np.testing.assert_array_equal(found.parameters[place + 1], precise.parameters[place])
        assert [str(reason) for reason in found.reason[1:]] == [str(r) for r in precise.reason]
        assert str(found.reason[2]) == "not_finite"
        seen.clear()
    engine.close()
