"""`warpfit.local`: a server for the time of a block, which other processes may use."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest

import warpfit

X = np.random.default_rng(5).normal(size=(100, 2))


def test_a_local_server_serves_this_process_and_others_and_stops():
    with warpfit.local("--devices", "cpu", "--threads", "1") as client:
        data = client.upload(X, X[:, 0], dtype="auto")
        population = data_population()
        here = client.evaluate(data, population, loss="mse")
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            there = pool.submit(client.evaluate, data, population, loss="mse").result()
        np.testing.assert_array_equal(here, there)
        assert here[0] == 0.0
    with pytest.raises(warpfit.WarpfitError):
        client.evaluate(data, ["x1"])


def data_population():
    return warpfit.Population.of([warpfit.parse(text) for text in ("x1", "asinh(x2)", "x1*x2")])
