"""Faults in small; `tests/bench/service/faults.py` has many of each."""

import asyncio

import numpy as np
import pytest

import warpfit
from support.load import faults
from support.load.killed_uploads import is_clean, killed_uploads
from support.load.load import Load
from support.load.several import Fleet
from support.load.soak import soak


def assert_unharmed(seen: dict) -> None:
    assert seen["wrong_answers"] == 0
    assert seen["failures_after_retry"] == 0, seen["first_failures"]
    assert seen["right_answers"] > 0


@pytest.mark.thorough  # as the next one, but that the operating system stops the engine
def test_sigstop_of_the_engine():
    assert_unharmed(faults.engine_sigstop(1, clients=2))


def test_work_that_does_not_stop():
    seen = faults.endless_work("deaf")
    assert seen["client_gave_up_after_seconds"] < seen["engine_gone_after_seconds"]


@pytest.mark.thorough
def test_sigterm_of_the_server():
    seen = faults.sigterm(1, clients=2, front_ends=2)
    assert_unharmed(seen)
    assert seen["answers_while_unready"]


@pytest.mark.thorough
def test_bad_networks():
    seen = faults.bad_network(1)
    assert_unharmed(seen["others"])
    assert all(seen["cut_answers"])
    assert all(seen["cut_uploads"])


@pytest.mark.thorough
def test_clients_that_are_killed_in_the_middle_of_an_upload():
    seen = killed_uploads(4, together=4)
    assert is_clean(seen), seen


@pytest.mark.thorough
def test_a_server_does_not_grow():
    seen = soak(1.5, clients=2, front_ends=1)
    assert seen["passed"], seen
    assert seen["in_flight_at_the_end"] == seen["engine_restarts"] == seen["internal_errors"] == 0


# ---------------------------------------------------------------------------------- several servers


X = np.random.default_rng(2).normal(size=(100_000, 4))


@pytest.fixture(scope="module")
def fleet():
    with Fleet(2) as made:
        yield made


def test_every_server_gives_the_same_bits(server, family):
    servers = [server.address, family.address]
    texts = [f"sin(x1*p1) + exp(x{1 + n % 4})*{n}" for n in range(60)]
    starts = [[0.1 + n] for n in range(60)]
    options = {"loss": "mse", "gradient": True}

    async def of_all():
        async with warpfit.connect_async(servers) as client:
            data = await client.upload(X, X[:, 0], dtype="float64")
            return await client.evaluate(data, texts, starts, **options)

    with (
        warpfit.connect(servers[0]) as one,
        warpfit.connect(servers) as all_of_them,
    ):
        data = one.upload(X, X[:, 0], dtype="float64")
        losses, gradients = one.evaluate(data, texts, starts, **options)
        fit = one.optimize(data, texts, starts, max_iterations=3)
        for found in (all_of_them.evaluate(data, texts, starts, **options), asyncio.run(of_all())):
            np.testing.assert_array_equal(found[0], losses)
            np.testing.assert_array_equal(np.concatenate(found[1]), np.concatenate(gradients))
        again = all_of_them.optimize(data, texts, starts, max_iterations=3)
        np.testing.assert_array_equal(again.parameters, fit.parameters)
        with pytest.raises(warpfit.ProgramError, match="expression 59, token 0") as caught:
            all_of_them.evaluate(data, [*texts[:59], "x9 + x1"], [*starts[:59], []])
        assert "x9" in str(caught.value)
        all_of_them.release(data, everywhere=True)
        for address in servers:
            with warpfit.connect(address) as client:
                assert client.info().engine == "cpu"


@pytest.mark.thorough
def test_sigstop_and_sigkill_of_one_and_a_rolling_restart(fleet):
    with Load(fleet.address, clients=2) as load:
        load.wait_for_answers(10)
        with fleet.frozen(1):
            load.wait_for_answers(10)
        fleet.kill(0)
        load.wait_for_answers(10)
        for index in range(2):  # the one that was killed, and one that runs
            fleet.replace(index)
            load.wait_for_answers(10)
    assert (load.wrong, load.failures) == (0, [])
