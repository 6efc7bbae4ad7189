"""Large results and special values through a real server process."""

import numpy as np


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
