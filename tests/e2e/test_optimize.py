"""Derivatives, reductions, fits and weights through a real server, compared with NumPy."""

import numpy as np
import pytest

import warpfit
import warpfit.testing
from support.random_programs import thesis_mix
from warpfit import Reason, parse
from warpfit.dataset import Dataset
from warpfit.expressions import reference
from warpfit.ir import Batch
from warpfit.losses import Loss, as_loss
from warpfit.request import Evaluation

rng = np.random.default_rng(12)
X = rng.uniform(0.5, 2.0, size=(1025, 2))
Y = 3.0 * np.exp(-0.7 * X[:, 0]) + 0.5 * X[:, 1]
WEIGHTS = rng.uniform(0.5, 2.0, size=1025)
TEXTS = ["p1*exp(p2*x1) + p3*x2", "x1", "p1*x1 + p2"]
STARTS = [[1.0, -0.1, 1.0], [], [0.5, 0.25]]


def expected(dtype, parameters, rows, loss, **wishes):
    dataset = Dataset.of(X, Y, WEIGHTS, dtype=dtype)
    batch, found = Batch.of([parse(text) for text in TEXTS], parameters), as_loss(loss)
    wishes = {"values": False, "rows": rows} | wishes
    wishes["loss" if isinstance(found, Loss) else "custom_loss"] = found
    return reference.evaluate(Evaluation(dataset.content_id, batch, **wishes), dataset)


@pytest.mark.parametrize("loss", ["r2", "huber", "abs(d)^1.5"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-4), ("float64", 1e-9)])
def test_losses_and_gradients(client, loss, dtype, tolerance):
    data = client.upload(X, Y, WEIGHTS, dtype=dtype)
    losses, gradients = client.evaluate(data, TEXTS, STARTS, loss=loss, gradient=True)
    wanted = expected(dtype, STARTS, None, loss, gradient=True)
    np.testing.assert_allclose(losses, wanted.losses[:, 0], rtol=tolerance)
    assert [gradient.shape for gradient in gradients] == [(3,), (0,), (2,)]
    close = {"rtol": tolerance, "atol": tolerance * np.abs(wanted.gradients).max()}
    np.testing.assert_allclose(np.concatenate(gradients), wanted.gradients, **close)


def test_several_vectors_rows_and_everything_at_once(client):
    vectors = [rng.normal(size=(4, len(start))) for start in STARTS]
    names = ["values", "gradient", "jacobian", "variable_gradient", "reductions", "correlation"]
    wishes = dict.fromkeys(names, True)
    wanted = expected("float64", vectors, (7, 900), "mse", **wishes)
    data = client.upload(X, Y, WEIGHTS, dtype="float64")
    answer = client.run(data, TEXTS, vectors, loss="mse", rows=slice(7, 900), **wishes)
    close = {"rtol": 1e-9, "atol": 1e-9}
    np.testing.assert_allclose(answer.values, wanted.values.transpose(1, 2, 0), **close)
    np.testing.assert_allclose(answer.losses, wanted.losses.T, **close)
    gradients = np.concatenate([gradient.ravel() for gradient in answer.gradients])
    np.testing.assert_allclose(gradients, wanted.gradients, **close)
    assert [jacobian.shape for jacobian in answer.jacobians] == [(4, 893, n) for n in (3, 0, 2)]
    flat = [jacobian.swapaxes(1, 2).reshape(-1, 893) for jacobian in answer.jacobians]
    np.testing.assert_allclose(np.concatenate(flat), wanted.jacobian, **close)
    variables = wanted.variable_gradients.swapaxes(0, 1)
    np.testing.assert_allclose(answer.variable_gradients, variables, **close)
    np.testing.assert_allclose(answer.correlations, wanted.correlations.T, **close)
    for index, name in enumerate(("sum", "mean", "min", "max", "non_finite")):
        got = getattr(answer.reductions, name)
        np.testing.assert_allclose(got, wanted.reductions[..., index].T, **close)


@pytest.mark.parametrize(
    ("dtype", "tolerance", "loss"), [("float32", 1e-2, "huber"), ("float64", 1e-6, "mse")]
)
def test_a_fit(client, dtype, tolerance, loss):
    data = client.upload(X, Y, WEIGHTS, dtype=dtype)
    asked = {"loss": loss, "max_iterations": 100}
    fit, again = (client.optimize(data, TEXTS, STARTS, **asked) for _ in range(2))
    before = client.evaluate(data, TEXTS, STARTS, loss=loss)
    after = client.evaluate(data, TEXTS, fit.parameters, loss=loss)
    np.testing.assert_allclose(fit.parameters[0], [3.0, -0.7, 0.5], rtol=tolerance)
    np.testing.assert_allclose(fit.initial_loss, before, rtol=1e-6)
    np.testing.assert_allclose(fit.loss, after, rtol=1e-4, atol=1e-12)
    assert fit.success.all()
    assert fit.iterations[1] == 0
    for one, two in zip(fit.parameters, again.parameters, strict=True):
        assert one.tobytes() == two.tobytes()


def test_options_reach_the_driver(client):
    starts = [[[1.0, -0.1, 1.0], [2.0, -2.0, 0.0]], np.empty((2, 0)), [[0.5, 0.25], [9.0, 9.0]]]
    asked = {"loss": "rmse", "method": "lm", "rows": (10, 700), "all_starts": True}
    asked |= {"fixed": [None, None, [False, True]], "standard_errors": True, "covariance": True}
    asked["bounds"] = ([[None, -0.5, None], None, None], 5.0)
    fit = client.optimize(client.upload(X, Y, dtype="float64"), TEXTS, starts, **asked)
    assert fit.loss.shape == (2, 3)
    assert (fit.parameters[0][:, 1] == -0.5).all()
    assert fit.parameters[2][0, 1] == 0.25
    assert [c.shape for c in fit.covariance] == [(2, 3, 3), (2, 0, 0), (2, 2, 2)]
    errors = np.sqrt(np.diag(fit.covariance[0][0]))
    np.testing.assert_allclose(fit.standard_errors[0][0], errors, rtol=1e-12)


ENDLESS = {"gradient_tolerance": 0, "step_tolerance": 0, "loss_tolerance": 0}
ENDLESS["max_iterations"] = 100_000


def test_progress_partial_results_and_deadlines(client):
    programs, starts = thesis_mix(5, 200, variables=2)
    seen = []
    with client.upload(np.repeat(X, 50, axis=0), np.repeat(Y, 50)) as data:
        client.optimize(data, programs, starts, max_iterations=1)  # everything is compiled
        asked = {"partial": True, "timeout": 1.5, "progress": seen.append}
        fit = client.optimize(data, programs, starts, **asked, **ENDLESS)
        with pytest.raises(warpfit.DeadlineExceededError):
            client.optimize(data, programs, starts, timeout=0.3, **ENDLESS)
    assert Reason.DEADLINE in fit.reason
    finite = fit.reason != Reason.NOT_FINITE
    assert (fit.loss[finite] <= fit.initial_loss[finite]).all()
    assert seen
    assert seen[0].searches == 200


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"loss": "mae", "method": "lm"}, "METHOD_UNSUITABLE"),
        ({"loss": "mae", "covariance": True}, "COVARIANCE_UNDEFINED"),
        ({"bounds": (1.0, 0.0)}, "BAD_BOUNDS"),
    ],
)
def test_bad_fits_are_refused(client, options, reason):
    with pytest.raises(warpfit.InvalidArgumentError) as caught:
        client.optimize(client.upload(X, Y), TEXTS, STARTS, **options)
    assert caught.value.reason == reason


# ---------------------------------------------------------- a row of weight 0, whatever is in it
ROWS = 5_000
rng = np.random.default_rng(3)
TABLE = rng.uniform(0.5, 2.0, size=(ROWS, 2))
TARGET = 2.0 * TABLE[:, 0] + 0.3 * np.log(TABLE[:, 1]) + 0.01 * rng.normal(size=ROWS)
ROW_WEIGHTS = rng.uniform(0.5, 2.0, size=ROWS)
PROGRAMS = ["p1*x1 + p2*log(x2)", "x1/x2", "2*x1", "p1*sqrt(x2)"]
FIRST = [[0.5, 0.5], [], [], [1.0]]
#: Places of rows without a weight: the first one, a whole block and more, some, all but a few.
PLACES = {"first": np.arange(1), "first block": np.arange(2_500), "some": np.arange(3, ROWS, 7)}
PLACES["most"] = np.setdiff1d(np.arange(ROWS), [17, 1800, 1801, 4000, 4999, 4998])
#: What is there in the variables and the target; 0 is a pole of the programs.
JUNK = {"nan": np.nan, "inf": -np.inf, "zero": 0.0, "fill value": 9.96921e36}


@pytest.fixture(params=["server", "reference"])
def either(request, client):
    """A client of a server, and one of `warpfit.testing`."""
    return client if request.param == "server" else warpfit.testing.client()


def spoilt(place, junk):
    x, y, w = TABLE.copy(), TARGET.copy(), ROW_WEIGHTS.copy()
    x[PLACES[place]], y[PLACES[place]], w[PLACES[place]] = JUNK[junk], JUNK[junk], 0.0
    return x, y, w


@pytest.mark.parametrize(("place", "missing"), [("first block", "refuse"), ("most", "drop")])
def test_the_evidence_is_that_of_the_rows_with_a_weight(either, place, missing):
    """A row of weight 0 counts as one that is not there, also where a formula has no value."""
    x, y, w = spoilt(place, "nan")
    kept = w > 0
    rows = (x, y, w), (x[kept], y[kept], w[kept])
    sets = [either.upload(*each, dtype="float64") for each in rows]
    asked = {"evidence": True, "missing": missing}
    found, wanted = (either.optimize(data, PROGRAMS, FIRST, **asked) for data in sets)
    names = ("rows", "log_likelihood", "bic", "description_length", "variance", "freedom")
    for name in (*names, "standard_errors"):
        assert_same(getattr(found.evidence, name), getattr(wanted.evidence, name))
    assert_same(found.loss, wanted.loss)
    assert_same(found.parameters, wanted.parameters)
    assert found.evidence.warnings == wanted.evidence.warnings


def assert_same(found, wanted):
    """Compare arrays, or lists of arrays."""
    lists = (found, wanted) if isinstance(found, list) else ([found], [wanted])
    for got, want in zip(*lists, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("place", "junk", "dtype"),
    [
        *(("first", "nan", "float64"), ("first block", "inf", "float32")),
        *(("some", "zero", "float64"), ("most", "fill value", "float32")),
    ],
)
def test_all_sums_are_those_of_the_other_rows(either, place, junk, dtype):
    x, y, w = spoilt(place, junk)
    data = either.upload(x, y, w, dtype=dtype)
    kept = w > 0
    other = either.upload(x[kept], y[kept], w[kept], dtype=dtype)
    for loss in ("mse", "r2", "nmse", "mae", "gaussian", "w*abs(d)^1.5"):
        for options in ({}, {"gradient": True, "variable_gradient": True}):
            got = either.run(data, PROGRAMS, FIRST, loss=loss, **options)
            want = either.run(other, PROGRAMS, FIRST, loss=loss, **options)
            assert np.isfinite(got.losses).all()
            for name in ("losses", *(["variable_gradients", "gradients"] if options else [])):
                assert_same(getattr(got, name), getattr(want, name))
    options = {"loss": "mse", "linear_scaling": True, "correlation": True}
    got, want = (either.run(one, PROGRAMS, FIRST, **options) for one in (data, other))
    for name in ("losses", "slopes", "intercepts", "correlations"):
        assert_same(getattr(got, name), getattr(want, name))
