"""Batches and data sets that engines die of, beside others that do nothing wrong."""

import time

import numpy as np
import pytest

import warpfit
from support.load.faults import FATAL
from support.load.load import Load
from support.servers import health
from warpfit.cli.top import scrape


@pytest.fixture
def server(harmed):
    return harmed


def restarts(server):
    return scrape(server.facts["metrics"]).total("warpfit_engine_restarts_total")


def test_a_batch_is_refused_after_its_second_crash_and_others_are_answered(server):
    X = np.random.default_rng(0).normal(size=(100, 2))
    with Load(server.address, 3) as load, warpfit.connect(server.address) as client:
        load.wait_for_answers(3)
        data = client.upload(X, X[:, 0])
        before = restarts(server)
        for _ in range(2):  # the second time it is known
            with pytest.raises(warpfit.FailedPreconditionError) as caught:
                client.evaluate(data, [f"x1 + {FATAL}", "x1 * 2"], loss="mse")
            assert caught.value.reason == "BATCH_QUARANTINED"
            assert client.evaluate(data, ["x1"], loss="mse")[0] == 0.0  # the data set is fine
            load.wait_for_answers(3)
            assert restarts(server) - before == 2
    assert not load.failures
    assert load.wrong == 0
    health.wait_for(server.facts["health"], "SERVING")


@pytest.mark.thorough
def test_a_data_set_of_which_every_batch_kills_is_refused(server):
    X = np.random.default_rng(2).normal(size=(100, 2))
    with warpfit.connect(server.address) as client:
        data = client.upload(X, X[:, 0])
        before, reasons = restarts(server), []
        for number in range(3):
            with pytest.raises(warpfit.FailedPreconditionError) as caught:
                client.evaluate(data, [f"x1 + {FATAL}", f"x1 * {number + 2}"], loss="mse")
            reasons.append(caught.value.reason)
        assert reasons == ["BATCH_QUARANTINED", *["DATASET_QUARANTINED"] * 2]
        assert restarts(server) - before == 3
        assert client.evaluate(client.upload(X + 1, X[:, 0] + 1), ["x1"], loss="mse")[0] == 0.0


@pytest.mark.thorough
def test_a_data_set_is_loaded_by_no_third_engine(server):
    X = np.random.default_rng(1).normal(size=(100, 13))
    with warpfit.connect(server.address) as client:
        fine = client.upload(X[:, :2], X[:, 0])
        before = restarts(server)
        with pytest.raises(warpfit.FailedPreconditionError) as caught:
            client.evaluate(client.upload(X, X[:, 0]), ["x1"], loss="mse")
        assert caught.value.reason == "DATASET_QUARANTINED"
        with pytest.raises(warpfit.FailedPreconditionError):
            client.upload(X, X[:, 0], dtype="float32")
        assert client.evaluate(fine, ["x1"], loss="mse")[0] == 0.0
        time.sleep(0.5)
        assert restarts(server) - before == 2
    health.wait_for(server.facts["health"], "SERVING")
