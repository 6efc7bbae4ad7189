"""Whole calls through a real server process, compared with the reference."""

import numpy as np
import pytest

import warpfit
from support.engines.reference_losses import reference_loss
from support.servers.server import ServerProcess
from warpfit.expressions import reference
from warpfit.expressions.workload import thesis_mix
from warpfit.request import Loss

ROWS = 1025


def _data(seed=0, rows=ROWS, variables=10, dtype=np.float32):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows, variables)).astype(dtype)
    return X, rng.normal(size=rows).astype(dtype)


def _reference(programs, X, parameters):
    return reference.evaluate(programs, X.T, parameters).T


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-3), ("float64", 1e-10)])
def test_values_and_losses_agree_with_the_reference(client, dtype, tolerance):
    X, y = _data(dtype=dtype)
    programs, parameters = thesis_mix(1, 40, operators=("add", "sub", "mul", "sqrtabs", "sin"))
    with client.upload(X, y, dtype=dtype) as data:
        values = client.evaluate(data, programs, parameters=parameters)
        losses = client.evaluate(data, programs, parameters=parameters, loss="mse")
    assert values.shape == (ROWS, 40)
    assert values.dtype == dtype
    expected = _reference(programs, X, parameters)
    np.testing.assert_allclose(values, expected, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(
        losses, reference_loss(Loss.MSE, values.T.astype(float), y), rtol=1e-10
    )


def test_a_large_result_arrives_whole(client):
    X, _ = _data(5, rows=200_003, variables=2)
    with client.upload(X) as data:
        values = client.evaluate(data, ["x1", "x2", "x1 + x2", "neg(x1)", "x1"])
    for column, expected in enumerate([X[:, 0], X[:, 1], X[:, 0] + X[:, 1], -X[:, 0], X[:, 0]]):
        np.testing.assert_array_equal(values[:, column], expected)


def test_special_values_travel_unchanged(client):
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3e38, -2.0])
    with client.upload(special.astype(np.float32)[:, None]) as data:
        values = client.evaluate(data, ["x1", "inf * 1", "nan + x1"])
    np.testing.assert_array_equal(
        values[:, 0].view(np.uint32), special.astype(np.float32).view(np.uint32)
    )
    assert np.isposinf(values[:, 1]).all()
    assert np.isnan(values[:, 2]).all()


def test_a_second_client_finds_the_data_resident(server: ServerProcess):
    X, y = _data(6)
    with warpfit.connect(server.address) as first, warpfit.connect(server.address) as second:
        data = first.upload(X, y)
        growth = []
        for _ in range(3):  # the probe of readiness may take a segment of its own meanwhile, once
            before = server.shared_memory()
            again = second.upload(X, y)
            assert again.content_id == data.content_id
            growth.append(server.shared_memory() - before)
        assert min(growth) <= 0
        np.testing.assert_array_equal(
            first.evaluate(data, ["x1 * x2"]), second.evaluate(again, ["x1 * x2"])
        )
