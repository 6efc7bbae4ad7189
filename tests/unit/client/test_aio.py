"""The asyncio client; test_client*.py test what it shares with the blocking client."""

import asyncio
import threading

import numpy as np
import pytest

import warpfit
from support.servers.examples import QUICK
from support.servers.loopback import fail_calls, serve
from warpfit import aio, testing

X = np.random.default_rng(6).normal(size=(40, 2)).astype(np.float32)
Y = X[:, 0] - X[:, 1]


@pytest.fixture
def run(server):
    """Runs ``test(client)`` in an event loop, over gRPC."""

    def run(test):
        async def body(address):
            async with warpfit.connect_async(address, retry=QUICK) as client:
                return await test(client)

        with serve(server) as (address, _):
            return asyncio.run(body(address))

    return run


def test_values_and_losses(run):
    async def body(client):
        async with await client.upload(X, Y, names=["a", "b"]) as data:
            values = await client.evaluate(data, ["a + p1", "b"], [[1.0], []])
            losses = await client.evaluate(data, "a - b", loss="mse")
            both = await client.run(data, "a", loss="sse", values=True, rows=slice(0, 3))
            return values, losses, both

    values, losses, both = run(body)
    np.testing.assert_array_equal(values, np.stack([X[:, 0] + np.float32(1), X[:, 1]], axis=1))
    np.testing.assert_allclose(losses, [0.0], atol=1e-12)
    assert both.values.shape == (3, 1)
    assert both.losses.shape == (1,)


def test_calls_are_retried_and_lost_data_uploaded_again(run, server):
    async def body(client):
        data = await client.upload(X)
        server.forget()
        fail_calls(server, "Evaluate", None, None)
        return await client.evaluate(data, "x2")

    np.testing.assert_array_equal(run(body)[:, 0], X[:, 1])
    assert server.calls.count("Evaluate") == 4
    assert server.calls.count("UploadVariables") == 2


def test_preparing_an_upload_leaves_the_event_loop_free(server, monkeypatch):
    threads = []
    build = warpfit.calls.arguments.build_dataset

    def recorded(*arguments, **options):
        threads.append(threading.current_thread())
        return build(*arguments, **options)

    monkeypatch.setattr(warpfit.calls.arguments, "build_dataset", recorded)

    async def body():
        async with testing.async_client(server) as client:
            await client.upload(X)

    asyncio.run(body())
    assert threads != [threading.main_thread()]


def test_a_client_belongs_to_no_event_loop(server):
    client = testing.async_client(server)
    assert asyncio.run(client.info()) == asyncio.run(client.info())


def test_more_calls_than_threads_are_answered(server):
    async def body():
        async with testing.async_client(server) as client:
            data = await client.upload(X, Y)
            calls = (client.evaluate(data, "x1 - x2", loss="sse") for _ in range(300))
            return np.concatenate(await asyncio.gather(*calls))

    np.testing.assert_allclose(asyncio.run(body()), np.zeros(300), atol=1e-12)


def test_waiting_for_a_thread_counts_against_the_timeout(server, monkeypatch):
    monkeypatch.setattr(aio, "_MOST_CALLS", 1)

    async def body(address, servicer):
        async with warpfit.connect_async(address) as client:
            data = await client.upload(X)
            servicer.hang = True
            # The first one hangs; while it has the only thread the others' time passes.
            calls = [client.evaluate(data, "x1", timeout=seconds) for seconds in (0.8, 0.2, 0.2)]
            return await asyncio.gather(*calls, return_exceptions=True)

    with serve(server) as (address, servicer):
        errors = asyncio.run(body(address, servicer))
    assert set(map(type, errors)) == {warpfit.errors.DeadlineExceededError}


def test_cancelling_a_task_cancels_the_call_on_the_server(server):
    async def body(address, servicer):
        async with warpfit.connect_async(address) as client:
            data = await client.upload(X)
            servicer.hang = True
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(client.evaluate(data, "x1"), 0.3)
            assert await asyncio.to_thread(servicer.cancelled.wait, 10)

    with serve(server) as (address, servicer):
        asyncio.run(body(address, servicer))
