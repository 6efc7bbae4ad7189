"""Clients that know several servers, which are killed and replaced under load."""

import asyncio

import numpy as np
import pytest

import warpfit
from support.load.load import Load
from support.load.several import Fleet

X = np.random.default_rng(2).normal(size=(100_000, 4))


@pytest.fixture(scope="module")
def fleet():
    with Fleet(2) as made:
        yield made


def test_every_server_gives_the_same_bits(fleet):
    texts = [f"sin(x1*p1) + exp(x{1 + n % 4})*{n}" for n in range(60)]
    starts = [[0.1 + n] for n in range(60)]
    options = {"loss": "mse", "gradient": True}

    async def of_all():
        async with warpfit.connect_async(fleet.address) as client:
            data = await client.upload(X, X[:, 0], dtype="float64")
            return await client.evaluate(data, texts, starts, **options)

    with (
        warpfit.connect(fleet.servers[0].address) as one,
        warpfit.connect(fleet.address) as all_of_them,
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
        for server in fleet.servers:
            with warpfit.connect(server.address) as client:
                assert client.info().engine == "cpu"


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
