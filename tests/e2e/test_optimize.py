"""Derivatives, reductions and fits through a real server process, compared with NumPy."""

import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import warpfit
from support.load.faults import injected
from support.random_programs import thesis_mix
from support.servers.server import ServerProcess
from warpfit import Reason, parse
from warpfit.dataset import Dataset
from warpfit.expressions import reference
from warpfit.ir import Batch
from warpfit.losses import BY_NAME, Loss, as_loss
from warpfit.request import Evaluation
from warpfit_server.engine.cpu.codegen import parts
from warpfit_server.system.compile_cache import default_cache_directory, numba_directory
from warpfit_server.system.machine import available_cores

rng = np.random.default_rng(12)
X = rng.uniform(0.5, 2.0, size=(1025, 2))
Y = 3.0 * np.exp(-0.7 * X[:, 0]) + 0.5 * X[:, 1]
WEIGHTS = rng.uniform(0.5, 2.0, size=1025)
TEXTS = ["p1*exp(p2*x1) + p3*x2", "x1", "p1*x1 + p2"]
STARTS = [[1.0, -0.1, 1.0], [], [0.5, 0.25]]
LOSSES = [*Loss, *BY_NAME, "abs(d)^1.5", "w*square(d)"]


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
        answer = client.run(
            data,
            TEXTS,
            vectors,
            values=True,
            loss="mse",
            rows=slice(7, 900),
            **dict.fromkeys(wishes, True),
        )
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


@pytest.mark.parametrize("loss", ["sse", "r2"])
def test_linear_scaling(client, loss):
    with client.upload(X, Y, WEIGHTS, dtype="float64") as data:
        losses, slopes, intercepts = client.evaluate(
            data, TEXTS, STARTS, loss=loss, linear_scaling=True
        )
    wanted = expected("float64", loss=loss, linear_scaling=True)
    np.testing.assert_allclose(losses, wanted.losses[:, 0], rtol=1e-8)
    np.testing.assert_allclose(slopes, wanted.scaling[:, 0, 0], rtol=1e-9)
    np.testing.assert_allclose(intercepts, wanted.scaling[:, 0, 1], rtol=1e-9)


def test_reductions_need_no_target(client):
    with client.upload([[1.0], [2.0], [np.inf]]) as data:
        found = client.evaluate(data, ["x1", "1/x1", "x1 - x1"], reductions=True)
    assert found.max.tolist()[:2] == [np.inf, 1.0]
    assert found.min.tolist()[:2] == [1.0, 0.0]
    assert np.isnan(found.mean[2])
    assert found.non_finite.tolist() == [1, 0, 1]


# ---------------------------------------------------------------------------------------- fits


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-2), ("float64", 1e-6)])
@pytest.mark.parametrize("loss", ["mse", "huber"])
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
    with client.upload(np.repeat(X, 100, axis=0), np.repeat(Y, 100)) as data:
        client.optimize(data, programs, starts, max_iterations=1)  # everything is compiled
        fit = client.optimize(
            data, programs, starts, partial=True, timeout=3.0, progress=seen.append, **ENDLESS
        )
        with pytest.raises(warpfit.DeadlineExceededError):
            client.optimize(data, programs, starts, timeout=0.3, **ENDLESS)
    assert Reason.DEADLINE in fit.reason
    finite = fit.reason != Reason.NOT_FINITE
    assert (fit.loss[finite] <= fit.initial_loss[finite]).all()
    assert seen
    assert seen[0].searches == 200


@pytest.mark.thorough
def test_evaluations_do_not_wait_while_the_fit_code_is_compiled(tmp_path):
    """The first fits on a machine, as many as evaluations run at a time."""
    cache, compiling = tmp_path / "cache", tmp_path / "compiling"
    cache.mkdir(mode=0o700)
    warm = default_cache_directory()
    parts.precompile(available_cores())
    kept = cache / numba_directory(warm).name
    shutil.copytree(numba_directory(warm), kept)
    for marker in kept.glob("derivatives-*.complete"):
        marker.unlink()
    compiling.touch()
    environment = {"WARPFIT_CACHE_DIR": str(cache), **injected(f"compiling={compiling}")}
    with (
        ServerProcess(**environment) as server,
        warpfit.connect(server.address) as client,
        client.upload(X, Y) as data,
        ThreadPoolExecutor(available_cores()) as pool,
    ):
        fits = [pool.submit(client.optimize, data, TEXTS, STARTS) for _ in range(available_cores())]
        losses = [client.evaluate(data, TEXTS, STARTS, loss="mse") for _ in range(20)]
        assert not any(fit.done() for fit in fits)
        compiling.unlink()
        for fit in fits:
            np.testing.assert_allclose(fit.result().initial_loss, losses[0], rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"loss": "mae", "method": "lm"}, "METHOD_UNSUITABLE"),
        ({"loss": "mae", "covariance": True}, "COVARIANCE_UNDEFINED"),
        ({"loss": "p1*d"}, "BAD_LOSS"),
        ({"bounds": (1.0, 0.0)}, "BAD_BOUNDS"),
        ({"bounds": ([[1.0, 2.0], None, None], None)}, "LENGTH_MISMATCH"),
        ({"fixed": [[True]]}, "LENGTH_MISMATCH"),
        ({"max_iterations": -1}, "BAD_SETTING"),
        ({"step_tolerance": float("nan")}, "BAD_SETTING"),
        ({"method": "magic"}, "BAD_ENUM"),
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


@pytest.mark.thorough
def test_a_fit_survives_the_death_of_the_engine(server: ServerProcess, client):
    programs, starts = thesis_mix(6, 100, variables=2)
    with (
        client.upload(np.repeat(X, 40, axis=0), np.repeat(Y, 40), dtype="float64") as data,
        ThreadPoolExecutor(1) as pool,
    ):
        client.optimize(data, TEXTS, STARTS, max_iterations=1)  # everything is compiled
        fit = pool.submit(client.optimize, data, programs, starts)
        time.sleep(0.2)
        assert not fit.done()
        server.kill_engine()
        found = fit.result(100)
    finite = found.reason != Reason.NOT_FINITE
    assert (found.loss[finite] <= found.initial_loss[finite]).all()


def test_a_fit_that_cannot_begin_says_what_float32_cannot_hold(client):
    x = 1e8 * np.linspace(1.0, 3.0, 50)[:, None]
    with client.upload(x, x[:, 0], dtype="float32") as data:
        with pytest.warns(warpfit.PrecisionWarning, match=r"x1 \^ 5") as caught:
            fit = client.optimize(data, ["p1*x1^5/x1^4"], [[1.0]])
        assert fit.reason == [Reason.NOT_FINITE]
        assert len(caught) == 1
    with client.upload(x, x[:, 0], dtype="float32") as data:
        with pytest.warns(warpfit.PrecisionWarning, match=r"x1 \^ 5") as caught:
            client.optimize(data, ["p1*(1e30*x1^5)/(1e30*x1^4)"], [[1.0]])
        assert len(caught) == 1
    with client.upload(x / 1e8, x[:, 0], dtype="float32") as data:
        text = "exp(100*x1)/exp(100*x1)"
        with pytest.warns(warpfit.PrecisionWarning, match=r"exp\(100 \* x1\)") as caught:
            assert np.isnan(client.evaluate(data, text, loss="mse"))
            assert np.isnan(client.evaluate(data, text)).any()
        assert len(caught) == 1
    with client.upload(1e3 * x, x[:, 0]) as data:
        fit = client.optimize(data, ["p1*x1^5/x1^4"], [[1.0]])
    np.testing.assert_allclose(fit.parameters[0], [1e-3])


# ----------------------------------------------------------------- large results and special values


def test_a_large_result_arrives_whole(client):
    X = np.random.default_rng(5).normal(size=(200_003, 2)).astype(np.float32)
    with client.upload(X) as data:
        values = client.evaluate(data, ["x1", "x2", "x1 + x2", "neg(x1)", "x1"])
    for column, expected in enumerate([X[:, 0], X[:, 1], X[:, 0] + X[:, 1], -X[:, 0], X[:, 0]]):
        np.testing.assert_array_equal(values[:, column], expected)


def test_special_values_travel_unchanged(client):
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3e38, -2.0])
    with client.upload(special.astype(np.float32)[:, None], dtype="float32") as data:
        values = client.evaluate(data, ["x1", "inf * 1", "nan + x1"])
    np.testing.assert_array_equal(
        values[:, 0].view(np.uint32), special.astype(np.float32).view(np.uint32)
    )
    assert np.isposinf(values[:, 1]).all()
    assert np.isnan(values[:, 2]).all()
