"""Derivatives, reductions and fits through a real server process, compared with NumPy."""

import numpy as np
import pytest

import warpfit
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
LOSSES = ["mse", "r2", "huber", "abs(d)^1.5"]


def expected(dtype, parameters=STARTS, rows=None, loss=None, **wishes):
    dataset = Dataset.of(X, Y, WEIGHTS, dtype=dtype)
    found = None if loss is None else as_loss(loss)
    evaluation = Evaluation(
        dataset.content_id,
        Batch.of([parse(text) for text in TEXTS], parameters),
        rows=rows,
        loss=found if isinstance(found, Loss) else None,
        custom_loss=None if isinstance(found, Loss) else found,
        **{"values": False} | wishes,
    )
    return reference.evaluate(evaluation, dataset)


# ------------------------------------------------------------------------------- one evaluation


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-4), ("float64", 1e-9)])
def test_losses_and_gradients(client, loss, dtype, tolerance):
    with client.upload(X, Y, WEIGHTS, dtype=dtype) as data:
        losses, gradients = client.evaluate(data, TEXTS, STARTS, loss=loss, gradient=True)
    wanted = expected(dtype, loss=loss, gradient=True)
    np.testing.assert_allclose(losses, wanted.losses[:, 0], rtol=tolerance)
    assert [gradient.shape for gradient in gradients] == [(3,), (0,), (2,)]
    scale = np.abs(wanted.gradients).max()
    np.testing.assert_allclose(
        np.concatenate(gradients), wanted.gradients, rtol=tolerance, atol=tolerance * scale
    )


def test_several_vectors_rows_and_everything_at_once(client):
    vectors = [rng.normal(size=(4, len(start))) for start in STARTS]
    wishes = ("gradient", "jacobian", "variable_gradient", "reductions", "correlation")
    wanted = expected(
        "float64", vectors, (7, 900), "mse", **dict.fromkeys(("values", *wishes), True)
    )
    with client.upload(X, Y, WEIGHTS, dtype="float64") as data:
        given = {"values": True, "loss": "mse", "rows": slice(7, 900)}
        answer = client.run(data, TEXTS, vectors, **given, **dict.fromkeys(wishes, True))
    close = {"rtol": 1e-9, "atol": 1e-9}
    np.testing.assert_allclose(answer.values, wanted.values.transpose(1, 2, 0), **close)
    np.testing.assert_allclose(answer.losses, wanted.losses.T, **close)
    np.testing.assert_allclose(
        np.concatenate([g.ravel() for g in answer.gradients]), wanted.gradients, **close
    )
    assert [jacobian.shape for jacobian in answer.jacobians] == [(4, 893, n) for n in (3, 0, 2)]
    flat = [jacobian.swapaxes(1, 2).reshape(-1, 893) for jacobian in answer.jacobians]
    np.testing.assert_allclose(np.concatenate(flat), wanted.jacobian, **close)
    np.testing.assert_allclose(
        answer.variable_gradients, wanted.variable_gradients.swapaxes(0, 1), **close
    )
    np.testing.assert_allclose(answer.correlations, wanted.correlations.T, **close)
    for index, name in enumerate(("sum", "mean", "min", "max", "non_finite")):
        got = getattr(answer.reductions, name)
        np.testing.assert_allclose(got, wanted.reductions[..., index].T, **close)


def test_linear_scaling(client, loss="r2"):
    with client.upload(X, Y, WEIGHTS, dtype="float64") as data:
        losses, slopes, intercepts = client.evaluate(
            data, TEXTS, STARTS, loss=loss, linear_scaling=True
        )
    wanted = expected("float64", loss=loss, linear_scaling=True)
    np.testing.assert_allclose(losses, wanted.losses[:, 0], rtol=1e-8)
    np.testing.assert_allclose(slopes, wanted.scaling[:, 0, 0], rtol=1e-9)
    np.testing.assert_allclose(intercepts, wanted.scaling[:, 0, 1], rtol=1e-9)


# ---------------------------------------------------------------------------------------- fits


@pytest.mark.parametrize(
    ("dtype", "tolerance", "loss"), [("float32", 1e-2, "huber"), ("float64", 1e-6, "mse")]
)
def test_a_fit(client, dtype, tolerance, loss):
    with client.upload(X, Y, WEIGHTS, dtype=dtype) as data:
        fit = client.optimize(data, TEXTS, STARTS, loss=loss, max_iterations=100)
        again = client.optimize(data, TEXTS, STARTS, loss=loss, max_iterations=100)
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
    with client.upload(X, Y, dtype="float64") as data:
        fit = client.optimize(
            data,
            TEXTS,
            [[[1.0, -0.1, 1.0], [2.0, -2.0, 0.0]], np.empty((2, 0)), [[0.5, 0.25], [9.0, 9.0]]],
            loss="rmse",
            method="lm",
            bounds=([[None, -0.5, None], None, None], 5.0),
            fixed=[None, None, [False, True]],
            all_starts=True,
            standard_errors=True,
            covariance=True,
            rows=(10, 700),
        )
    assert fit.loss.shape == (2, 3)
    assert (fit.parameters[0][:, 1] == -0.5).all()
    assert fit.parameters[2][0, 1] == 0.25
    assert [c.shape for c in fit.covariance] == [(2, 3, 3), (2, 0, 0), (2, 2, 2)]
    np.testing.assert_allclose(
        fit.standard_errors[0][0], np.sqrt(np.diag(fit.covariance[0][0])), rtol=1e-12
    )


ENDLESS = {
    "max_iterations": 100_000,
    "gradient_tolerance": 0,
    "step_tolerance": 0,
    "loss_tolerance": 0,
}


def test_progress_partial_results_and_deadlines(client):
    programs, starts = thesis_mix(5, 200, variables=2)
    seen = []
    with client.upload(np.repeat(X, 50, axis=0), np.repeat(Y, 50)) as data:
        client.optimize(data, programs, starts, max_iterations=1)  # everything is compiled
        fit = client.optimize(
            data, programs, starts, partial=True, timeout=1.5, progress=seen.append, **ENDLESS
        )
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
        ({"rows": (5, 5)}, "ROWS_OUT_OF_RANGE"),
    ],
)
def test_bad_fits_are_refused(client, options, reason):
    with client.upload(X, Y) as data, pytest.raises(warpfit.InvalidArgumentError) as caught:
        client.optimize(data, TEXTS, STARTS, **options)
    assert caught.value.reason == reason


def test_a_missing_parameter_is_found_by_the_server(client):
    with client.upload(X, Y) as data, pytest.raises(warpfit.ProgramError) as caught:
        client.optimize(data, TEXTS, [[1.0], [], [1.0, 1.0]])
    assert (caught.value.reason, caught.value.expression) == ("PARAMETER_OUT_OF_RANGE", 0)


def test_a_fit_that_cannot_begin_says_what_float32_cannot_hold(client):
    x = 1e8 * np.linspace(1.0, 3.0, 50)[:, None]
    with client.upload(x, x[:, 0], dtype="float32") as data:
        with pytest.warns(warpfit.PrecisionWarning, match=r"x1 \^ 5") as caught:
            fit = client.optimize(data, ["p1*x1^5/x1^4"], [[1.0]])
        assert fit.reason == [Reason.NOT_FINITE]
        assert len(caught) == 1
    with client.upload(x / 1e8, x[:, 0], dtype="float32") as data:
        text = "exp(100*x1)/exp(100*x1)"
        with pytest.warns(warpfit.PrecisionWarning, match=r"exp\(100 \* x1\)") as caught:
            assert np.isnan(client.evaluate(data, text, loss="mse"))
            assert np.isnan(client.evaluate(data, text)).any()
        assert len(caught) == 1


# ----------------------------------------------------------------- large results and special values
