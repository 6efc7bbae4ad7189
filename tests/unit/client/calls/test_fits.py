"""Fits: their outputs, and how they and other results are shown."""

import dataclasses
import html
import pickle
import re
from itertools import product

import numpy as np
import pandas as pd
import pytest
import scipy.optimize
import scipy.stats

import warpfit.testing
from support.refusals import refused
from warpfit import Reason
from warpfit.calls.arguments import build_fit
from warpfit.calls.dataset_handle import DatasetHandle
from warpfit.calls.results import student_t
from warpfit.dataset import Dataset
from warpfit.display import TextTable, numbers
from warpfit.request import Tier, Timings

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
    options = {"loss": "rmse", "covariance": True, "progress": seen.append}
    fit = client.optimize(data, TEXTS, STARTS, **options)
    np.testing.assert_allclose(fit.parameters[0], [2.0, -0.5], rtol=1e-6)
    assert [p.shape for p in fit.parameters] == [(2,), (0,)]
    assert [c.shape for c in fit.covariance] == [(2, 2), (0, 0)]
    for name in ("loss", "initial_loss", "iterations", "evaluations", "reason", "start"):
        assert getattr(fit, name).shape == (2,)
    assert fit.reason[1] is Reason.GRADIENT
    assert (fit.x, fit.fun) == (fit.parameters, fit.loss)  # SciPy's names
    assert (fit.nit, fit.nfev) == (fit.iterations, fit.evaluations)
    assert fit.success.tolist() == [True, True] and seen
    assert {progress.searches for progress in seen} == {2}


def test_parameters_start_at_1_or_inside_their_bounds(client, data):
    fit = client.optimize(data, [*TEXTS, "p1*x1 + p2*x2"])
    np.testing.assert_allclose(fit.parameters[2], [2.0, -0.5], rtol=1e-6)
    kept = client.optimize(data, TEXTS, bounds=(-3.0, -2.0), max_iterations=0)
    assert kept.parameters[0].tolist() == [-2.0, -2.0]
    bounded = client.optimize(data, TEXTS[0], [0.0, 0.0], bounds=([None, 0.0], None))
    assert bounded.parameters[0][1] == 0.0
    starts, bounds = [[1.0], [1.0, 1.0]], ([None, [0.0, 5.0]], [None, [1.0, 4.0]])
    error = refused("p2000000000 is used", client.optimize, data, "p2000000000*x1")
    assert error.expression == 0
    given = data, ["p1*x1", TEXTS[0]], starts
    assert refused("p2 has a lower bound", client.optimize, *given, bounds=bounds).expression == 1
    refused("a fit needs a loss", client.optimize, data, TEXTS, STARTS, loss=None)


def test_bands_and_correlations_of_a_line_are_those_of_least_squares(client):
    x = rng.uniform(size=12)
    y = 2.0 * x + 1.0 + 0.1 * rng.normal(size=12)
    data = client.upload(pd.DataFrame({"a": x, "b": x**2}), y, dtype="float64")
    fit = client.optimize(data, "p1*a + p2", covariance=True)
    _, covariance = np.polyfit(x, y, 1, cov=True)
    at = np.column_stack([[-1.0, 0.3, 4.0], np.ones(3)])
    error = np.sqrt(np.einsum("ri,ij,rj->r", at, covariance, at))
    half = scipy.stats.t.ppf(0.95, 10) * error
    frame = pd.DataFrame({"b": np.zeros(3), "a": at[:, 0]})
    for X in (frame, frame[["a", "b"]].to_numpy()):
        band = fit.band(X, level=0.9)
        np.testing.assert_allclose(band.values, at @ fit.parameters[0])
        np.testing.assert_allclose(band.high - band.values, half, rtol=1e-6)
        np.testing.assert_allclose(band.values - band.low, half, rtol=1e-6)
    wanted = covariance[0, 1] / np.sqrt(covariance[0, 0] * covariance[1, 1])
    np.testing.assert_allclose(fit.correlation[0], [[1, wanted], [wanted, 1]])
    assert re.search(rf"\n +p2 +{wanted:.2f} +1\.00$", repr(fit))
    assert "<th>correlation</th>" in fit._repr_html_()
    refused("covariance=True", lambda: client.optimize(data, "p1*a").band(frame))
    fit = client.optimize(data, "p1*b", covariance=True)
    refused("X has 1 columns", fit.band, frame[["a"]].to_numpy())


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


def test_quantiles_of_students_distribution():
    degrees, levels = (1, 2, 3, 9, 100, 101, 1_000, 1_001), (0.5, 0.9, 0.999999, 1.0 - 1e-8)
    for freedom, level in product(degrees, levels):
        wanted = scipy.stats.t.isf((1 - level) / 2, freedom)
        assert student_t(level, freedom) == pytest.approx(wanted, rel=1e-7)
    assert np.isnan(student_t(0.9, 0))


def test_accuracy_chooses_the_defaults():
    for dtype, options, expected in (
        ("float64", {}, (50, 1e-8, 1e-8, 1e-8)),
        ("float32", {"accuracy": "screening"}, (50, 1e-6, 1e-6, 1e-6)),
        ("float32", {"accuracy": "final"}, (2000, 1e-7, 1e-7, 1e-10)),
        ("float64", {"accuracy": "final", "step_tolerance": 0.0}, (2000, 1e-12, 0.0, 1e-16)),
    ):
        request = build_fit(DatasetHandle(Dataset.of(X, Y, dtype=dtype)), TEXTS, STARTS, options)
        names = "max_iterations", "gradient_tolerance", "step_tolerance", "loss_tolerance"
        assert tuple(getattr(request.settings, name) for name in names) == expected


def test_a_formula_of_several_is_named(client, data):
    """The first one would be that of another formula, silently."""
    fit = client.optimize(data, TEXTS, STARTS, covariance=True)
    for ask in (fit.formula, lambda *place: fit.band(X, *place)):
        for place in ((), (None,), (2,), (-3,), (0.0,), (0, 1)):
            refused(r"Give (a whole number from 0 to 1|0,)", ask, *place)
    assert fit.formula(-1) == fit.formula(1)
    assert fit.texts == [str(fit.formula(0)), str(fit.formula(1))]
    np.testing.assert_array_equal(fit.band(X, 1).values, X[:, 0])
    starts = client.optimize(data, "p1*x1", [[0.0], [5.0]], all_starts=True, covariance=True)
    refused("start is None", starts.band, X)
    np.testing.assert_allclose(starts.band(X, start=1).values, starts.parameters[0][1] * X[:, 0])


def test_a_search_that_could_not_begin_says_what_to_do(client, data):
    fit = client.optimize(data, ["log(-x1)*p1", "p1*x1"])
    assert fit.reason[0] is Reason.NOT_FINITE
    assert fit.hint.startswith("1 search could not begin") and fit.hint in repr(fit)
    assert 'restarts=8, missing="drop", or other units' in fit.hint
    fit = client.optimize(data, "log(-x1)*p1", missing="drop", restarts=1)
    assert fit.hint.endswith("finite in all rows, or other units")  # not what is given already
    holed = np.where(np.arange(50) == 3, np.nan, X[:, 0])
    for weights, is_said in ((None, True), (np.arange(50) != 3, False)):
        fit = client.optimize(client.upload(X, holed, weights), "p1*x1", missing="drop")
        assert ("the target has rows that are NaN or infinite" in fit.hint) == is_said
    gap = client.optimize(data, ["p1*x1", "p1*x1 + p3"])
    assert str(gap).endswith("expression 1 has no p2: number parameters without gaps")
    assert client.optimize(data, ["p2*x1 + p1"]).hint == ""
    constant = client.upload(X, np.full(50, 3.0), dtype="float64")
    assert np.isnan(client.optimize(constant, "p1 + p2*x1", loss="rmse").r2).all()


def test_parameters_that_are_not_determined_or_at_a_bound_are_told(client):
    for text, options, hint in (
        ("p1*exp(x1 + p2)", {}, "p1, p2 are not determined by the data"),
        ("p1*x1 + p2", {"bounds": (-9.0, [0.5, 9.0])}, "p1 ends at a bound, where"),
        ("p1*x1 + p2", {"bounds": (-9.0, 0.5), "method": "bfgs"}, "p1, p2 end at a bound"),
        ("p1*x1 + p2", {"bounds": (-9.0, 1.0), "fixed": [[True, False]]}, ""),
        (["p1*x1", "p1 + p2 + x1"], {}, "p1, p2 of expression 1 are not determined by the data"),
    ):
        data = client.upload(X, X[:, 0], dtype="float64")
        found = client.optimize(data, text, **options).hint
        assert found.startswith(hint) and bool(found) == bool(hint)


ROWS = np.arange(1.0, 21.0).reshape(10, 2)


def test_fits_show_formulas_r2_and_standard_errors(client):
    data = client.upload(ROWS, 2 * ROWS[:, 0] + 1 + 0.1 * (-1) ** np.arange(10), dtype="float64")
    fit = client.optimize(data, ["p1*x1 + p2", "p1", "x1"], [[1.0, 0.0], [0.0], []])
    lines = str(fit).splitlines()
    assert len(lines) == 4
    header = "expression formula parameters R2 initial loss loss iterations reason"
    assert " ".join(lines[0].split()) == header
    _, covariance = np.polyfit(ROWS[:, 0], data.dataset.target, 1, cov=True)
    slope, intercept = (f"± {error:.2g}" for error in np.sqrt(np.diag(covariance)))
    formula = r" +0 +(\S+) \* x1 \+ (\S+) +"
    numbers = rf"\1 {re.escape(slope)}, \2 {re.escape(intercept)} +0\.9999\d+ +\S+ +\S+ +1 +\w+$"
    assert re.match(formula + numbers, lines[1])
    assert len({len(line) for line in lines}) == 1
    residuals = data.dataset.target - client.evaluate(data, fit.formula(0))[:, 0]
    np.testing.assert_allclose(fit.r2[0], 1 - residuals.var() / data.dataset.target.var())
    page = fit._repr_html_()
    assert page.count("<tr>") == 4
    assert re.search(r"<td>\$\S+ \\cdot x_\{1\} \+ \S+\$</td>", page)


def test_fits_that_stalled_say_what_helps(client):
    for dtype, remedy, stalled, what in (
        ("float32", 'upload with dtype="float64"', 1, "1 search has"),
        *(("float64", "other starts", 3, "3 searches have"), ("float64", "", 0, "")),
    ):
        data = client.upload(ROWS, 2 * ROWS[:, 0], dtype=dtype)
        fit = client.optimize(data, ["p1*x1"] * 4, [[1.0]] * 4)
        reasons = np.array([Reason.STALLED] * stalled + [Reason.STEP] * (4 - stalled), object)
        fit = dataclasses.replace(fit, reason=reasons)
        assert fit.hint == "" if not stalled else what in fit.hint and remedy in fit.hint
        assert fit.success.tolist() == [False] * stalled + [True] * (4 - stalled)
        assert str(fit).endswith(fit.hint) and len(str(fit).splitlines()) == 5 + bool(stalled)
        assert not stalled or f"<p>{html.escape(fit.hint)}</p>" in fit._repr_html_()


def test_fits_of_all_starts_show_each_start(client):
    data = client.upload(ROWS, 2 * ROWS[:, 0], dtype="float64", names=("a", "b"))
    starts = [[[1.0], [3.0]], [[0.0], [5.0]]]
    fit = client.optimize(data, ["p1*a", "p1"], starts, all_starts=True, standard_errors=False)
    cells = [line.split()[:6] for line in str(fit).splitlines()[1:]]
    mean = f"{2 * ROWS[:, 0].mean():.5g}"
    assert cells[0] == ["0", "0", "2", "*", "a", "2"]
    assert [row[:4] for row in cells[1:]] == [
        *(["1", "0", mean, mean], ["0", "1", "2", "*"], ["1", "1", mean, mean])
    ]
    assert fit.formula(1, 1).values[0] == fit.parameters[1][1][0]


@pytest.mark.parametrize("loss", ["sse", "mse", "rmse", "r2", "nmse"])
def test_r2_follows_from_every_loss_of_squares(client, loss):
    weights = np.arange(1.0, 11.0)
    data = client.upload(ROWS, np.sqrt(ROWS[:, 0]), weights, dtype="float64")
    fit = client.optimize(data, ["p1*x1"], [[1.0]], loss=loss, rows=(2, 9))
    np.testing.assert_allclose(fit.r2, client.evaluate(data, fit.formula(), loss="r2", rows=(2, 9)))
    assert client.optimize(data, ["p1*x1"], [[1.0]], loss="huber").r2 is None


def test_many_expressions_come_without_standard_errors_unless_asked_for(client):
    data = client.upload(ROWS, ROWS[:, 0], dtype="float64")
    assert client.optimize(data, ["p1"] * 21, [[1.0]] * 21).standard_errors is None
    fit = client.optimize(data, ["p1"] * 21, [[1.0]] * 21, standard_errors=True)
    assert len(fit.standard_errors) == 21 and str(fit).endswith("... and 1 more row")
    table = TextTable(("a",), [("<b>",)] * 25).html()
    assert (table.count("&lt;b&gt;"), table.count("<b>")) == (20, 0)
    assert numbers([1.0, 2.123456789]) == "1, 2.1235"
    assert numbers(range(9)) == "0, 1, 2, 3, 4, 5, ..."


@pytest.mark.parametrize("call", ["evaluate", "optimize"])
def test_errors_of_the_server_point_into_the_expression(client, call):
    data = client.upload(ROWS, ROWS[:, 0], names=("age", "dose"))
    ask, texts = getattr(client, call), ["age", "sin(age) + 2*p2"]
    error = refused("PARAMETER_OUT_OF_RANGE", ask, data, texts, [[], [1.0]], loss="mse")
    *_, text, caret = str(error).splitlines()
    assert text.strip() == "sin(age) + 2*p2" and text.index("p2") == caret.index("^")
    error = refused(r"x3\n +\^", ask, data, "age * x3", [], loss="mse")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_whatever_calls_return_prints_as_a_small_table(client):
    data = client.upload(np.tile(ROWS, (50, 1)), np.tile(ROWS[:, 0], 50))
    outputs = dict.fromkeys(("values", "gradient", "jacobian", "reductions", "correlation"), True)
    answer = client.run(data, ["p1*x1", "x2"] * 40, [[1.0], []] * 40, loss="mse", **outputs)
    fit = client.optimize(data, ["p1*x1", "x2"] * 40, [[1.0], []] * 40)
    for shown in (answer, answer.reductions, fit, client.info(), answer.timings):
        assert repr(shown) == str(shown) and len(repr(shown)) < 4_000
        assert repr(shown).count("\n") <= 23 and shown._repr_html_().startswith("<table>")
    assert re.search(r"losses +80 +float64 +0, 1, ", repr(answer))
    assert "80 of 500 x 1" in repr(answer) and "NumPy reference" in repr(client.info())
    timings = Timings(decode=1500, compute=2_000_000, tier=Tier.COMPILED, cache_hits=3)
    assert re.search(r"\n *compute +2000\.0\n[\s\S]*tier compiled, cache hits 3$", str(timings))


def test_clients_show_their_address_and_no_token_and_are_not_made_of_it():
    with warpfit.connect("127.0.0.1:1", token="secret", tls=True) as client:
        assert repr(client) == "<Client of 127.0.0.1:1 with TLS>"
    client = warpfit.AsyncClient(warpfit.connect(["a:1", "b:2"], token="secret", tls=False))
    assert repr(client) == "<AsyncClient of a:1, b:2>"
    for kind in (warpfit.Client, warpfit.AsyncClient):
        error = refused(r"Use warpfit\.connect", kind, "127.0.0.1:50871")
        assert ("_async" in error.remedy) == (kind is warpfit.AsyncClient)
        assert "127.0.0.1:50871" in error.remedy
        refused(r"Use warpfit\.connect", kind, None)
