"""The evidence for formulas, compared with SciPy's distributions and with NumPy's own algebra."""

import math
import time
from itertools import pairwise

import numpy as np
import pytest
from scipy import optimize, stats

import warpfit.testing
from support.refusals import refused
from warpfit import evidence, parse

rng = np.random.default_rng(11)
x = rng.uniform(0.5, 3.0, 40)
W = rng.uniform(0.5, 2.0, 40)
LINE = 2.0 * x - 0.7 + rng.normal(scale=0.3, size=40) / np.sqrt(W)
DECAY = 3.0 * np.exp(-0.8 * x) + rng.normal(scale=0.05, size=40)
TEXTS = ["p1*x1 + p2", "p1*exp(-p2*x1)", "p1*p2*x1", "2.5*x1^3 - 17"]
A = np.column_stack([x, np.ones(40)])


@pytest.fixture(scope="module")
def client():
    with warpfit.testing.client() as found:
        yield found


@pytest.fixture(scope="module")
def lines(client):
    data = client.upload(x[:, None], LINE, W, dtype="float64")
    options = {"evidence": True, "terms": True, "accuracy": "final", "restarts": 8}
    return data, client.optimize(data, TEXTS, loss="rmse", **options)


def squares_of(fit, index):
    return fit.loss[index] ** 2 * W.sum()


def test_likelihoods_description_lengths_and_bayes_factors_follow_their_formulas(lines):
    _, fit = lines
    slope, offset = fit.parameters[0]
    s = math.sqrt(squares_of(fit, 0) / 40)
    wanted = stats.norm.logpdf(LINE, slope * x + offset, s / np.sqrt(W)).sum()
    found = fit.evidence
    assert found.log_likelihood[0] == pytest.approx(wanted, rel=1e-10)
    assert found.aic[0] == pytest.approx(2 * 3 - 2 * wanted)
    assert found.bic[0] == pytest.approx(3 * math.log(40) - 2 * wanted)
    assert found.parameters.tolist() == [2, 2, 2, 0] and found.rows == 40
    assert int(found.bic.argmin()) == 0 and int(found.description_length.argmin()) == 0
    assert int(found.bayes_factor.argmax()) == 0
    # Five tokens and two constants of many digits.
    wanted = -found.log_likelihood[0] + 0.5 * (5 + 2) * math.log(40)
    assert found.description_length[0] == pytest.approx(wanted, rel=1e-12)
    b = 40**-0.5
    factor = (1 - b) * found.log_likelihood[0] + math.log(b) - 5 * math.log(4)
    assert found.bayes_factor[0] == pytest.approx(factor, rel=1e-12)
    assert evidence.code_length(parse("p1*x1 + p2")) == pytest.approx(5 * math.log(4))
    constants = math.log(100) + math.log(17)  # 2.5 has two digits; the cube is an operator
    assert evidence.code_length(parse(TEXTS[3])) == pytest.approx(6 * math.log(5) + constants)
    assert evidence.price_of(parse("1.2345678*x1 + 2.3456789*x1")) == 2.0
    assert 0.0 < evidence.price_of(parse("2*x1")) < 1.0


def test_a_formula_has_one_description_length_however_its_constants_are_given(client):
    """As parameters that are fitted, as constants, and on rows that a proposal holds out."""
    data = client.upload(x[:, None], LINE, W, dtype="float64")
    fit = client.optimize(data, "p1*x1 + p2", evidence=True, accuracy="final")
    literal = client.optimize(data, fit.formula(), evidence=True)
    assert literal.evidence.description_length[0] == fit.evidence.description_length[0]
    for held_out in (0.0, 0.2, 0.5):
        proposed = client.propose(data, [fit.formula()], held_out=held_out)[0]
        wanted = pytest.approx(fit.evidence.description_length[0], rel=1e-9)
        assert proposed.description_length == wanted


def test_errors_and_warnings(lines):
    _, fit = lines
    wanted = np.linalg.inv(A.T @ (W[:, None] * A)) * squares_of(fit, 0) / 38
    np.testing.assert_allclose(fit.evidence.covariances[0], wanted, rtol=1e-6)
    np.testing.assert_allclose(fit.evidence.standard_errors[0], np.sqrt(np.diag(wanted)), rtol=1e-6)
    assert fit.evidence.undetermined[2].all()
    assert fit.evidence.warnings[2] == ["p1, p2 are not determined by the data"]
    assert fit.evidence.warnings[0] == []
    assert fit.evidence.freedom.tolist() == [38, 38, 39, 40]
    assert "are not determined" in str(fit.evidence)


def test_gaps_in_the_numbers_of_parameters_cost_nothing(client):
    data = client.upload(x[:, None], LINE, dtype="float64")
    texts = ["p1*x1 + p2", "p2*x1 + p4"]
    fit = client.optimize(data, texts, evidence=True, covariance=True)
    found, bands = fit.evidence, [fit.band(x[:, None], place) for place in range(2)]
    np.testing.assert_allclose(bands[1].low, bands[0].low, rtol=1e-6)
    assert fit.freedom.tolist() == found.freedom.tolist() == [38, 38]
    for name in ("parameters", "aic", "bic", "description_length", "bayes_factor"):
        one, other = getattr(found, name)
        assert one == pytest.approx(other), name
    assert found.warnings == [[], ["p1, p3 do not occur: number parameters without gaps"]]


def test_few_rows_and_small_parameters_are_warned_of(client):
    data = client.upload(x[:2, None], LINE[:2], dtype="float64")
    found = client.optimize(data, "p1*x1 + p2", evidence=True).evidence
    assert found.warnings == [["2 parameters are fitted to 2 rows"]]
    assert np.isnan(found.standard_errors[0]).all()
    flat = client.upload(x[:, None], x - x.mean(), dtype="float64")
    found = client.optimize(flat, "p1 + 0*p2", evidence=True, fixed=[False, True])
    assert "may as well be 0" in found.evidence.warnings[0][0]
    assert found.evidence.standard_errors[0][1] == 0.0


def test_odd_fits_say_what_they_are(client):
    """Perfect ones, those of few rows, at bounds, without a finite loss, without a weight."""

    def fitted(y, texts, weights=None, **options):
        data = client.upload(x[: len(y), None] - 0.05, y, weights, dtype="float64")
        return client.optimize(data, texts, intervals=0.95, terms=True, **options)

    found = fitted(x - 0.05, ["p1*x1", "p1*x1^2"]).evidence
    assert found.bic[0] == -math.inf
    # A sum of squares that is rounding counts as such, so that perfect fits can be compared.
    assert found.description_length[0] < -700 < found.description_length[1]
    assert found.bayes_factor[0] == math.inf
    found = fitted(LINE[:3], ["p1*x1^2 + p2*x1 + p3", "p1"]).evidence
    assert found.bic[0] == found.description_length[0] == math.inf
    assert [int(found.bic.argmin()), int(found.bayes_factor.argmax())] == [1, 1]
    fit = fitted(LINE, ["p1*x1 + p2"], bounds=([[-1.0, -9.0]], [[1.5, 9.0]]))
    assert fit.evidence.warnings == [["p1 = 1.5 is at its bound"]]
    assert fit.evidence.intervals[0][0, 0] < 1.5 == fit.evidence.intervals[0][0, 1]
    for odd in (fitted(LINE, ["p1*sqrt(-x1 - 1)"]), fitted(LINE, ["p1*x1"], 0.0 * x)):
        assert odd.evidence.warnings == [["the loss is not finite"]]
        assert np.isnan(odd.evidence.bic).all()
        assert np.isnan(odd.evidence.intervals[0]).all()
    with np.errstate(all="raise"):
        fitted(LINE * 1e-150, ["p1*x1*1e200 + p2"])


def test_terms_are_judged_by_fits_without_them(lines):
    _, fit = lines
    slope, offset = fit.evidence.terms[0]
    assert [str(term.program) for term in (slope, offset)] == ["p1 * x1", "p2"]
    assert [term.kept for term in (slope, offset)] == [(1,), (0,)]
    mean = np.average(LINE, weights=W)
    alone = np.sum(W * (LINE - mean) ** 2)
    assert slope.loss == pytest.approx(math.sqrt(alone / W.sum()), rel=1e-8)
    assert slope.contribution == pytest.approx(1 - squares_of(fit, 0) / alone, rel=1e-6)
    assert fit.evidence.terms[1] == []
    signs = evidence.terms_of(parse("x1 - (p1 - -(x2 + p2*x3))"))
    assert [str(term.program) for term in signs] == ["x1", "-p1", "-x2", "-(p2 * x3)"]
    assert str(signs[0].rest) == "-p1 - x2 - p2 * x3"


@pytest.mark.parametrize("further", [{"terms": True}, {"intervals": 0.9}])
def test_further_fits_end_with_the_time_of_the_call(client, monkeypatch, further):
    """Each gets what is left; what there is no time for is an error, or NaN with a warning."""
    data = client.upload(x[:, None], LINE, W, dtype="float64")
    given, optimize, passed = [], client.optimize, [0.0]

    def fit(*arguments, timeout, **options):
        given.append(timeout)
        if timeout <= 0.5:
            raise warpfit.DeadlineExceededError("no time", "DEADLINE_EXCEEDED")
        passed[0] += 7.0
        return optimize(*arguments, timeout=timeout, **options)

    monkeypatch.setattr(client, "optimize", fit)
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + passed[0])
    found = optimize(data, TEXTS[:1], evidence=True, timeout=10.0, partial=True, **further)
    assert given[0] <= 10.0
    assert all(after <= max(1e-3, before - 7.0) for before, after in pairwise(given))
    own = found.evidence
    late = [term.loss for term in own.terms[0]] if "terms" in further else own.intervals[0]
    is_over = given[-1] <= 0.5
    assert np.isnan(late).all() == is_over
    assert any("no time" in text for text in found.evidence.warnings[0]) == is_over
    passed[0] += 10.0
    with pytest.raises(warpfit.DeadlineExceededError):
        optimize(data, TEXTS[:1], evidence=True, timeout=0.4, **further)


def test_intervals_of_a_decay_are_roots_of_its_profile(client):
    data = client.upload(x[:, None], DECAY, dtype="float64")
    fit = client.optimize(data, TEXTS[1], [2.0, 0.5], intervals=0.95, accuracy="final")
    best = fit.loss[0] * 40
    limit = best * (1 + stats.t.ppf(0.975, 38) ** 2 / 38)

    def profile(rate):
        shape = np.exp(-rate * x)
        return np.sum((shape * (shape @ DECAY) / (shape @ shape) - DECAY) ** 2) - limit

    rate = fit.parameters[0][1]
    wanted = [optimize.brentq(profile, *sorted([rate, rate + side])) for side in (-0.5, 0.5)]
    np.testing.assert_allclose(fit.evidence.intervals[0][1], wanted, rtol=1e-4)
    bounded = client.optimize(data, "p1*x1^2*p2", [1.0, 1.0], intervals=0.95)
    assert not np.isfinite(bounded.evidence.intervals[0]).all()


def test_bands_are_those_of_linear_regression(client, lines):
    data, fit = lines
    s2, inverse = squares_of(fit, 0) / 38, np.linalg.inv(A.T @ (W[:, None] * A))
    spread = s2 * np.einsum("ri,ij,rj->r", A, inverse, A)
    quantile = stats.t.ppf(0.975, 38)
    for prediction, variance in ((False, 0.0), (True, s2)):
        band = fit.band(x[:, None], 0, prediction=prediction)
        half = quantile * np.sqrt(variance + spread)
        np.testing.assert_allclose(band.high - band.values, half, rtol=1e-6)
    assert np.isnan(fit.band(x[:, None], 2).high).all()
    sure = client.optimize(data, TEXTS[0], evidence=True, covariance=True, absolute_sigma=True)
    band = sure.band(x[:, None], prediction=True)
    half = stats.norm.ppf(0.975) * np.sqrt(1.0 + spread / s2)
    np.testing.assert_allclose(band.high - band.values, half, rtol=1e-6)
    without = client.optimize(data, TEXTS[0], covariance=True)
    refused("evidence=True", without.band, x[:, None], prediction=True)
