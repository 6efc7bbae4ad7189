"""Fits, gradients and other outputs of the client, in process and over gRPC."""

import re
from itertools import product

import numpy as np
import pandas as pd
import pytest
import scipy.optimize
import scipy.stats

import warpfit
from warpfit import InvalidArgumentError, Reason
from warpfit.calls.arguments import build_fit
from warpfit.calls.dataset_handle import DatasetHandle
from warpfit.calls.results import student_t
from warpfit.dataset import Dataset

rng = np.random.default_rng(6)
X = rng.uniform(0.5, 2.0, size=(50, 2))
Y = 2.0 * X[:, 0] - 0.5 * X[:, 1]
TEXTS = ["p1*x1 + p2*x2", "x1"]
STARTS = [[0.0, 0.0], []]


@pytest.fixture
def data(client):
    return client.upload(X, Y, dtype="float64")


def test_a_fit_has_the_shapes_and_names_that_it_promises(client, data):
    seen = []
    fit = client.optimize(
        data,
        TEXTS,
        STARTS,
        loss="rmse",
        standard_errors=True,
        covariance=True,
        progress=seen.append,
    )
    np.testing.assert_allclose(fit.parameters[0], [2.0, -0.5], rtol=1e-6)
    assert [p.shape for p in fit.parameters] == [(2,), (0,)]
    assert [c.shape for c in fit.covariance] == [(2, 2), (0, 0)]
    for name in ("loss", "initial_loss", "iterations", "evaluations", "reason", "start"):
        assert getattr(fit, name).shape == (2,)
    assert fit.reason[1] is Reason.GRADIENT
    assert (fit.x, fit.fun) == (fit.parameters, fit.loss)  # SciPy's names
    assert (fit.nit, fit.nfev) == (fit.iterations, fit.evaluations)
    assert fit.success.tolist() == [True, True]
    assert seen
    assert {progress.searches for progress in seen} == {2}


def test_parameters_start_at_1_or_inside_their_bounds(client, data):
    fit = client.optimize(data, [*TEXTS, "p1*x1 + p2*x2"])
    np.testing.assert_allclose(fit.parameters[2], [2.0, -0.5], rtol=1e-6)
    kept = client.optimize(data, TEXTS, bounds=(-3.0, -2.0), max_iterations=0)
    assert kept.parameters[0].tolist() == [-2.0, -2.0]
    bounded = client.optimize(
        data, "p1*x1 + p2*x2", [0.0, 0.0], bounds=([None, 0.0], None), fixed=[False, False]
    )
    assert bounded.parameters[0][1] == 0.0
    starts, bounds = [[1.0], [1.0, 1.0]], ([None, [0.0, 5.0]], [None, [1.0, 4.0]])
    for ask, message, place in (
        (lambda: client.optimize(data, "p2000000000*x1"), "p2000000000 is used", 0),
        (
            lambda: client.optimize(data, ["p1*x1", TEXTS[0]], starts, bounds=bounds),
            "p2 has a lower bound",
            1,
        ),
        (lambda: client.optimize(data, TEXTS, STARTS, loss=None), "a fit needs a loss", None),
    ):
        with pytest.raises(InvalidArgumentError, match=message) as caught:
            ask()
        assert getattr(caught.value, "expression", None) == place


def test_bands_and_correlations_of_a_line_are_those_of_least_squares(client):
    x = rng.uniform(size=12)
    y = 2.0 * x + 1.0 + 0.1 * rng.normal(size=12)
    data = client.upload(pd.DataFrame({"a": x, "b": x**2}), y, dtype="float64")
    fit = client.optimize(data, "p1*a + p2", covariance=True)
    design = np.column_stack([x, np.ones(12)])
    inverse = np.linalg.inv(design.T @ design)
    residuals = y - design @ np.linalg.lstsq(design, y)[0]
    at = np.column_stack([[-1.0, 0.3, 4.0], np.ones(3)])
    error = np.sqrt(residuals @ residuals / 10 * np.einsum("ri,ij,rj->r", at, inverse, at))
    half = scipy.stats.t.ppf(0.95, 10) * error
    frame = pd.DataFrame({"b": np.zeros(3), "a": at[:, 0]})
    for X in (frame, frame[["a", "b"]].to_numpy()):
        band = fit.band(X, level=0.9)
        np.testing.assert_allclose(band.values, at @ fit.parameters[0])
        np.testing.assert_allclose(band.high - band.values, half, rtol=1e-6)
        np.testing.assert_allclose(band.values - band.low, half, rtol=1e-6)
    wanted = inverse[0, 1] / np.sqrt(inverse[0, 0] * inverse[1, 1])
    np.testing.assert_allclose(fit.correlation[0], [[1, wanted], [wanted, 1]])
    assert re.search(rf"\n +p2 +{wanted:.2f} +1\.00$", repr(fit))
    assert "<th>correlation</th>" in fit._repr_html_()
    with pytest.raises(InvalidArgumentError, match="covariance=True"):
        client.optimize(data, "p1*a").band(frame)
    with pytest.raises(InvalidArgumentError, match="X has 1 columns"):
        client.optimize(data, "p1*b", covariance=True).band(frame[["a"]].to_numpy())


def test_weights_that_are_inverse_variances_scale_the_covariance(client):
    x, sigma = rng.uniform(size=12), rng.uniform(0.5, 2.0, size=12)
    y = 2.0 * x + 1.0 + sigma * rng.normal(size=12)
    data = client.upload(x[:, None], y, weights=sigma**-2, dtype="float64")
    fit = client.optimize(data, "p1*x1 + p2", covariance=True, absolute_sigma=True)
    wanted, covariance = scipy.optimize.curve_fit(
        lambda x, a, b: a * x + b, x, y, sigma=sigma, absolute_sigma=True
    )
    np.testing.assert_allclose(fit.parameters[0], wanted, rtol=1e-5)
    np.testing.assert_allclose(fit.covariance[0], covariance, rtol=1e-5)
    np.testing.assert_allclose(fit.standard_errors[0] ** 2, np.diag(covariance), rtol=1e-5)
    slopes = np.array([[0.3, 1.0]])
    half = 1.959963984540054 * np.sqrt(slopes @ covariance @ slopes.T)
    band = fit.band([[0.3]])
    np.testing.assert_allclose(band.high - band.values, half[0], rtol=1e-5)


def test_quantiles_of_students_distribution():
    degrees, levels = (1, 2, 3, 9, 100, 101, 1_000, 1_001), (0.5, 0.9, 0.999999, 1.0 - 1e-8)
    for freedom, level in product(degrees, levels):
        wanted = scipy.stats.t.isf((1 - level) / 2, freedom)
        assert student_t(level, freedom) == pytest.approx(wanted, rel=1e-7)
    assert np.isnan(student_t(0.9, 0))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"gradient": True}, "LOSS_MISSING"),
        ({"linear_scaling": True}, "LOSS_MISSING"),
        ({"loss": "huber", "linear_scaling": True}, "SCALING_UNDEFINED"),
        ({"loss": "mse", "linear_scaling": True, "gradient": True}, "CONFLICTING_OUTPUTS"),
        ({"loss": "abs("}, "EXPECTED_OPERAND"),
    ],
)
def test_outputs_that_exclude_each_other(client, data, options, reason):
    with pytest.raises(warpfit.InvalidArgumentError) as caught:
        client.evaluate(data, TEXTS, STARTS, **options)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("dtype", "options", "expected"),
    [
        ("float64", {}, (50, 1e-8, 1e-8, 1e-8)),
        ("float32", {"accuracy": "screening"}, (50, 1e-6, 1e-6, 1e-6)),
        ("float64", {"accuracy": "final"}, (2000, 1e-12, 1e-12, 1e-16)),
        ("float32", {"accuracy": "final"}, (2000, 1e-7, 1e-7, 1e-10)),
        (
            "float64",
            {"accuracy": "final", "max_iterations": 7, "step_tolerance": 0.0},
            (7, 1e-12, 0.0, 1e-16),
        ),
    ],
)
def test_accuracy_chooses_the_defaults(dtype, options, expected):
    request = build_fit(DatasetHandle(Dataset.of(X, Y, dtype=dtype)), TEXTS, STARTS, options)
    settings = request.settings
    found = (settings.max_iterations, settings.gradient_tolerance)
    assert (*found, settings.step_tolerance, settings.loss_tolerance) == expected


def test_a_formula_of_several_is_named(client, data):
    """The first one would be that of another formula, silently."""
    fit = client.optimize(data, TEXTS, STARTS, covariance=True)
    for ask in (fit.formula, lambda *place: fit.band(X, *place)):
        for place in ((), (None,), (2,), (-3,), (0.0,), (0, 1)):
            with pytest.raises(InvalidArgumentError, match=r"Give (a whole number from 0 to 1|0,)"):
                ask(*place)
    assert fit.formula(-1) == fit.formula(1)
    assert fit.texts == [str(fit.formula(0)), str(fit.formula(1))]
    np.testing.assert_array_equal(fit.band(X, 1).values, X[:, 0])
    starts = client.optimize(data, "p1*x1", [[0.0], [5.0]], all_starts=True, covariance=True)
    with pytest.raises(InvalidArgumentError, match="start is None"):
        starts.band(X)
    np.testing.assert_allclose(starts.band(X, start=1).values, starts.parameters[0][1] * X[:, 0])


@pytest.mark.parametrize(
    ("text", "options", "hint"),
    [
        ("p1*exp(x1 + p2)", {}, "p1, p2 are not determined by the data"),
        ("p1*x1 + p2", {"bounds": (-9.0, [0.5, 9.0])}, "p1 ends at a bound, where"),
        ("p1*x1 + p2", {"bounds": (-9.0, 0.5), "method": "bfgs"}, "p1, p2 end at a bound"),
        ("p1*x1 + p2", {"bounds": (-9.0, 1.0), "fixed": [[True, False]]}, ""),
        ("p1*x1 + p2", {}, ""),
        (["p1*x1", "p1 + p2 + x1"], {}, "p1, p2 of expression 1 are not determined by the data"),
    ],
)
def test_parameters_that_are_not_determined_or_at_a_bound_are_told(client, text, options, hint):
    data = client.upload(X, X[:, 0], dtype="float64")
    assert client.optimize(data, text, **options).hint.startswith(hint or "")
    assert bool(client.optimize(data, text, **options).hint) == bool(hint)


def test_a_search_that_could_not_begin_says_what_to_do(client, data):
    fit = client.optimize(data, ["log(-x1)*p1", "p1*x1"])
    assert fit.reason[0] is Reason.NOT_FINITE
    assert fit.hint.startswith("1 search could not begin")
    assert fit.hint in repr(fit)
    assert 'restarts=8, missing="drop", or other units' in fit.hint
    fit = client.optimize(data, "log(-x1)*p1", missing="drop", restarts=1)
    assert fit.hint.endswith("finite in all rows, or other units")  # not what is given already
    holed = np.where(np.arange(50) == 3, np.nan, X[:, 0])
    for weights, is_said in ((None, True), (np.arange(50) != 3, False)):
        fit = client.optimize(client.upload(X, holed, weights), "p1*x1", missing="drop")
        assert ("the target has rows that are NaN or infinite" in fit.hint) == is_said
    constant = client.upload(X, np.full(50, 3.0), dtype="float64")
    assert np.isnan(client.optimize(constant, "p1 + p2*x1", loss="rmse").r2).all()
