"""Matrices in shared memory: as over the network, and nothing of it is left over."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

import warpfit
from support.shared_memory import (
    CLIENTS,
    EverythingInWindows,
    X,
    eventually,
)
from support.windows import client_windows

EXPRESSIONS = ["x1", "p1*x2 + x3", "exp(x1) - p1", "p1*sin(p2*x3)"]
STARTS = [[], [2.0], [0.5], [1.5, -0.5]]


def assert_same(one: warpfit.data.Answer, other: warpfit.data.Answer) -> None:
    for name in ("values", "losses"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    if one.jacobians is None:
        assert other.jacobians is None
    else:
        for ours, theirs in zip(one.jacobians, other.jacobians, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_answers_are_those_of_the_network(baseline, network, clients, dtype):
    data = network.upload(X, X[:, 0], dtype=dtype)
    vectors = [np.array([start, start]) * [[1.0], [3.0]] for start in STARTS]
    for parameters, options in (
        (STARTS, {}),
        (vectors, {}),
        (STARTS, {"rows": slice(7, 5_008)}),
        (STARTS, {"loss": "mse", "values": True, "jacobian": True}),
        (vectors, {"jacobian": True}),
    ):
        expected = network.run(data, EXPRESSIONS, parameters, **options)
        for client in clients:
            assert_same(client.run(data, EXPRESSIONS, parameters, **options), expected)
    assert client_windows() >= CLIENTS, "they did cross in windows"


def test_uploads_are_those_of_the_network(baseline, network, clients):
    for number, client in enumerate(clients[:3]):
        fresh = np.random.default_rng(number).normal(size=(300_000, 4))
        steps: list[tuple[int, int]] = []
        report = steps.append
        data = client.upload(fresh, fresh[:, 1], progress=lambda *at, report=report: report(at))
        assert steps == sorted(steps)
        assert steps[-1] == (data.layout.nbytes, data.layout.nbytes)
        assert client_windows() >= 1
        got = network.evaluate(data, ["x1 + x4"])
        np.testing.assert_array_equal(got[:, 0], np.float32(fresh[:, 0]) + np.float32(fresh[:, 3]))
        network.release(data)


def test_an_answer_is_the_callers_own(network, clients):
    data = network.upload(X, dtype="float64")
    first = clients[0].evaluate(data, ["x1"])
    kept = first.copy()
    first[0] = 5.0
    clients[0].evaluate(data, ["x2"])
    clients[0].close()
    assert first[0] == 5.0
    np.testing.assert_array_equal(first[1:], kept[1:])


def test_threads_share_a_client(network, clients):
    data = network.upload(X, dtype="float64")
    client, failures = clients[0], []

    def work(factor: float) -> None:
        for turn in range(10):
            got = client.evaluate(data, ["p1*x1"], [[factor + turn]])
            if not np.array_equal(got[:, 0], (factor + turn) * X[:, 0]):
                failures.append(factor)

    threads = [threading.Thread(target=work, args=(100.0 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_the_asyncio_client(server, network):
    async def work() -> list[np.ndarray]:
        transport = EverythingInWindows()
        async with warpfit.connect_async(
            server.address, transport=transport, shared_memory=True
        ) as client:
            data = await client.upload(X + 3, dtype="float64")
            calls = [client.evaluate(data, ["p1*x1"], [[float(n)]]) for n in range(4)]
            answers = await asyncio.gather(*calls)
            assert client_windows() >= 2
            await client.release(data)
            return answers

    for factor, got in enumerate(asyncio.run(work())):
        np.testing.assert_array_equal(got[:, 0], factor * (X[:, 0] + 3))
    eventually(lambda: not client_windows())


def test_a_new_engine(server, network, clients):
    data = network.upload(X, dtype="float64")
    server.kill_engine()
    for client in clients[:2]:
        np.testing.assert_array_equal(client.evaluate(data, ["x3"])[:, 0], X[:, 2])


def test_data_that_were_lost_are_uploaded_again(network, clients):
    data = clients[0].upload(X + 1, dtype="float64")
    for client in clients:
        network.release(data)
        np.testing.assert_array_equal(client.evaluate(data, ["x1"])[:, 0], X[:, 0] + 1)


def test_a_call_that_is_cut_off_gives_its_window_up(baseline, network, clients):
    data = network.upload(np.random.default_rng(6).normal(size=(200_000, 2)))
    long = "+".join(f"sin(x1*{k})" for k in range(1, 200))
    client = clients[0]
    for _ in range(3):
        with pytest.raises(warpfit.errors.DeadlineExceededError):
            client.evaluate(data, ["x2"] * 10 + [long] * 60, timeout=0.2)
        eventually(lambda: not client_windows())
    got = client.evaluate(data, ["x2"], timeout=30)
    np.testing.assert_array_equal(got[:, 0], data.dataset.variables[1])
