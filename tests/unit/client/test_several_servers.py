"""Clients of several servers: fail-over, uploads, addresses that change."""

import asyncio
import inspect
import logging
import random
import socket
import threading
import time
from contextlib import ExitStack
from functools import partial

import numpy as np
import pytest

import warpfit
from support.servers.examples import EXPRESSIONS, PARAMETERS, QUICK, X, expected_values
from support.servers.loopback import serve
from warpfit import testing
from warpfit.calls.dataset_handle import DatasetHandle
from warpfit.dataset import DatasetReference
from warpfit.transport import failover

BUSY = warpfit.ResourceExhaustedError("busy", "QUEUE_FULL", retry_after=0.2)
NO_ROOM = warpfit.ResourceExhaustedError("no room", "NO_ROOM", needed=5, available=4)
GONE = warpfit.UnavailableError("gone", "ENGINE_RESTARTING")


@pytest.fixture
def fleet():
    return {f"server:{n}": testing.InProcessServer() for n in range(1, 4)}


@pytest.fixture
def even_servers(monkeypatch):
    """Draw the same servers in each run."""
    choose = partial(failover.Servers, draw=random.Random(1).random)
    monkeypatch.setattr(failover, "Servers", choose)


@pytest.fixture
def over_grpc():
    """Servicers of two servers on loopback, and a client of both."""
    with ExitStack() as stack:
        served = [stack.enter_context(serve(testing.InProcessServer())) for _ in range(2)]
        client = stack.enter_context(warpfit.connect([address for address, _ in served]))
        yield client, *(servicer for _, servicer in served)


async def done(answer):
    """Return the answer of the blocking client, or await that of the asyncio client."""
    return await answer if inspect.isawaitable(answer) else answer


def counts(fleet, method="Evaluate"):
    return sorted(server.calls.count(method) for server in fleet.values())


@pytest.mark.usefixtures("even_servers")
def test_calls_are_spread_and_each_server_is_sent_the_data_once(fleet):
    with testing.client(fleet) as client:
        data = client.upload(X)
        assert counts(fleet, "UploadVariables") == [1, 1, 1]
        for _ in range(60):
            got = client.evaluate(data, EXPRESSIONS, PARAMETERS)
            np.testing.assert_array_equal(got, expected_values())
        assert counts(fleet, "UploadVariables") == [1, 1, 1]
        assert counts(fleet)[0] > 12
        client.release(data, everywhere=True)
    assert not any(server.holds(data.content_id) for server in fleet.values())


@pytest.mark.parametrize("error", [GONE, BUSY])
def test_a_call_that_fails_goes_to_another_server_at_once(fleet, error, monkeypatch):
    pauses = []
    monkeypatch.setattr(failover.Failover, "sleep", lambda _, seconds: pauses.append(seconds))
    with testing.client(fleet) as client:
        data = client.upload(X)
        for _ in range(6):
            client.evaluate(data, "x1")
        first, second, _ = fleet.values()
        first.fail(1000, error)
        second.fail(1000, error)
        for _ in range(6):
            np.testing.assert_array_equal(client.evaluate(data, "x1")[:, 0], X[:, 0])
    assert not pauses


def test_data_go_to_a_server_that_has_room(fleet, monkeypatch):
    def refuse(_messages):
        raise NO_ROOM

    full = list(fleet.values())[:2]
    for server in full:
        monkeypatch.setitem(server._methods, "UploadVariables", refuse)
    with testing.client(fleet) as client:
        data = client.upload(X)
        for _ in range(10):
            np.testing.assert_array_equal(client.evaluate(data, "x1")[:, 0], X[:, 0])
    assert [server.calls.count("UploadVariables") for server in full] == [1, 1]


def test_large_data_live_on_as_many_servers_as_asked(fleet, monkeypatch):
    monkeypatch.setattr(failover, "SMALL_BYTES", 1)
    with testing.client(fleet) as client:
        data = client.upload(X)
        for _ in range(20):
            client.evaluate(data, "x1")
        assert counts(fleet, "UploadVariables") == [0, 1, 1]
        for server in fleet.values():
            if server.holds(data.content_id):
                server.fail(1000, GONE)
        np.testing.assert_array_equal(client.evaluate(data, "x1")[:, 0], X[:, 0])
        assert counts(fleet, "UploadVariables") == [1, 1, 1]


def test_a_handle_without_numbers_finds_a_server_that_has_the_data(fleet):
    with testing.client() as other:
        whole = other.upload(X)
    handle = DatasetHandle(DatasetReference(whole.layout, whole.content_id))
    for server in fleet.values():
        for one in fleet.values():
            one.forget()
        server._datasets[whole.content_id] = whole.dataset
        with testing.client(fleet) as client:
            for _ in range(5):
                np.testing.assert_array_equal(client.evaluate(handle, "x1")[:, 0], X[:, 0])
            server.forget()
            for _ in range(2):
                with pytest.raises(warpfit.DatasetNotFoundError, match="in another process"):
                    client.evaluate(handle, "x1")
            server._datasets[whole.content_id] = whole.dataset
            np.testing.assert_array_equal(client.evaluate(handle, "x1")[:, 0], X[:, 0])


# --------------------------------------------------------------------------------------- addresses


@pytest.mark.parametrize("connect", [warpfit.connect, warpfit.connect_async])
def test_servers_come_and_go(monkeypatch, connect):
    monkeypatch.setattr(failover, "_RESOLVE_SECONDS", (0.0, 0.0))
    servers = [testing.InProcessServer() for _ in range(3)]
    present: list[str] = []

    def resolve():
        if present == ["broken"]:
            raise ConnectionError("no names today")
        return present

    async def body(addresses):
        client = connect(resolve, retry=QUICK)
        present[:] = addresses[:1]
        data = await done(client.upload(X))
        for now in (addresses[:2], ["broken"], addresses[1:], [], addresses[2:]):
            present[:] = now
            for _ in range(10):
                got = await done(client.evaluate(data, "x1"))
                np.testing.assert_array_equal(got[:, 0], X[:, 0])
                await asyncio.sleep(0.005)
        blocking = getattr(client, "_client", client)
        assert list(blocking._failover.transport._open) == addresses[2:]
        await done(client.close())

    with ExitStack() as stack:
        asyncio.run(body([stack.enter_context(serve(server))[0] for server in servers]))
    assert all("Evaluate" in server.calls for server in servers)


def test_a_server_that_has_not_answered_in_time_is_left_alone(over_grpc):
    client, hanging, _ = over_grpc
    data = client.upload(X)
    hanging.hang = True
    late = 0
    for _ in range(30):
        try:
            np.testing.assert_array_equal(client.evaluate(data, "x1", timeout=0.5)[:, 0], X[:, 0])
        except warpfit.DeadlineExceededError:
            late += 1
    assert 1 <= late <= 3, "it is asked again after a while only"
    assert hanging.cancelled.wait(10)


# ----------------------------------------------------------------------------------- first contact


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


@pytest.mark.parametrize("address", ["127.0.0.1:{}", "nosuch.invalid:{}"])
def test_a_wrong_address_fails_soon_and_says_what_to_do(address, caplog):
    started = time.monotonic()
    with (
        warpfit.connect(address.format(free_port())) as client,
        caplog.at_level(logging.WARNING, "warpfit"),
        pytest.raises(warpfit.UnavailableError) as caught,
    ):
        client.info()
    assert time.monotonic() - started < 15  # on a busy machine
    assert caught.value.reason in failover.NOBODY_THERE
    assert "wait=SECONDS" in caught.value.remedy
    assert "waiting for a server" in caplog.text


def test_no_server_yet_is_a_wrong_address_too(monkeypatch):
    monkeypatch.setattr(failover, "_FIRST_CONTACT_SECONDS", 0.05)
    with (
        warpfit.connect(list) as client,
        pytest.raises(warpfit.UnavailableError, match="there is no server") as caught,
    ):
        client.info()
    assert caught.value.reason == "NO_SERVERS"


def test_a_server_that_is_starting_is_waited_for(monkeypatch):
    monkeypatch.setattr(failover, "_FIRST_CONTACT_SECONDS", 0.05)
    port = free_port()
    with ExitStack() as stack:
        start = threading.Timer(0.5, _serve_at, (stack, port))
        start.start()
        with warpfit.connect(f"127.0.0.1:{port}", wait=20) as client:
            assert client.info().engine == "reference"
        start.join()


def _serve_at(stack, port):
    stack.enter_context(serve(testing.InProcessServer(), port=port))
