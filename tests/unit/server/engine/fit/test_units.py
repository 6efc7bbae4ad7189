"""Fits do not depend on units: powers of two change no bit where no square leaves float64."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.engines.fits import fit
from warpfit.dataset import Dataset
from warpfit.losses import Loss
from warpfit.request import Precision
from warpfit_server.engine.cpu.engine import CpuEngine

rng = np.random.default_rng(11)
X = rng.uniform([0.5, 0.1], [4.0, 10.0], size=(80, 2))
Y = 0.02 * rng.normal(size=80) + 3.0 * np.exp(-0.7 * X[:, 0]) + 0.5 * X[:, 1] / (1.3 + X[:, 1])
#: p1 and p3 have the unit of y, p2 that of 1 / x1, p4 that of x2.
MODEL = "p1*exp(p2*x1) + p3*x2/(p4 + x2)"
START = np.array([1.0, -0.2, 1.0, 1.0])
METHODS = ("lm", "bfgs")


def outcome(method, loss, y=1.0, x1=1.0, x2=1.0):
    """Fit in other units; return the parameters' units, and the parameters in the first ones."""
    data = Dataset.of(X * [x1, x2], y * Y, dtype="float64")
    units = np.array([y, 1 / x1, y, x2])
    options = {"method": method, "max_iterations": 300, "standard_errors": loss == "mse"}
    found = fit(data, [MODEL], [START * units], loss=Loss(loss), **options)
    return found, units, found.parameters[0] / units


exponents = st.integers(-100, 100)  # 1e-30 to 1e30


@pytest.mark.parametrize(("method", "loss"), [("lm", "mse"), ("bfgs", "mae")])
@settings(max_examples=5, deadline=None)
@given(exponents, exponents, exponents)
@example(44, 0, 0)
@example(100, -100, 100)
def test_powers_of_two_change_no_bit(method, loss, y, x1, x2):
    first, _, parameters = outcome(method, loss)
    second, units, scaled = outcome(method, loss, 2.0**y, 2.0**x1, 2.0**x2)
    for name in ("iterations", "evaluations", "reason"):
        assert getattr(first, name).tolist() == getattr(second, name).tolist(), name
    np.testing.assert_array_equal(parameters, scaled)
    assert first.iterations[0] > 3
    if loss == "mse":
        assert second.loss[0] == first.loss[0] * 4.0**y
        errors = second.standard_errors[0] / units
        np.testing.assert_allclose(errors, first.standard_errors[0], rtol=1e-12)
        assert np.isfinite(errors).all()


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
