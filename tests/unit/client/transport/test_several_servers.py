"""The choice of a server for each call, fail-over, uploads, and addresses that change."""

import asyncio
import inspect
import random
import socket
import threading
import time
from collections import Counter
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import warpfit
from support.servers.examples import EXPRESSIONS, PARAMETERS, QUICK, X, expected_values
from support.servers.loopback import fail_calls, serve
from warpfit import testing
from warpfit.calls.dataset_handle import DatasetHandle
from warpfit.dataset import DatasetReference
from warpfit.errors import DeadlineExceededError, ResourceExhaustedError, UnavailableError
from warpfit.transport import failover
from warpfit.transport.call import Deadline
from warpfit.transport.connection import RetryPolicy
from warpfit.transport.failover import SMALL_BYTES, Retries, Servers

LARGE = SMALL_BYTES + 1
GONE = UnavailableError("gone", "CONNECTION_REFUSED")
LATE = DeadlineExceededError("late", "DEADLINE_EXCEEDED")
BUSY_LONG = ResourceExhaustedError("busy", "QUEUE_FULL", retry_after=2.0)
addresses = st.lists(
    st.integers(1, 65_535).map("h:{}".format), min_size=2, max_size=12, unique=True
)
contents = st.binary(min_size=32, max_size=32)


def made(names, **options):
    """Return servers that have answered, and a clock whose ``now`` can be set."""
    clock = SimpleNamespace(now=100.0)
    servers = Servers(names, clock=lambda: clock.now, draw=random.Random(0).random, **options)
    for server in servers:
        servers.succeeded(server)
    return servers, clock


@given(addresses, contents, st.integers(1, 4), st.data())
def test_a_server_that_goes_moves_its_own_data_sets_only(names, content, replicas, data):
    servers, _ = made(names, replicas=replicas)
    before = [server.address for server in servers.homes(content, LARGE)]
    gone = data.draw(st.sampled_from(names))
    servers.update([name for name in names if name != gone])
    after = [server.address for server in servers.homes(content, LARGE)]
    assert [name for name in before if name != gone] == after[: len(before) - (gone in before)]
    servers.update(random.sample(names, len(names)))
    assert [server.address for server in servers.homes(content, LARGE)] == before


def test_data_sets_are_spread_and_small_ones_live_everywhere():
    servers, _ = made([f"h:{n}" for n in range(1, 6)])
    homes = (servers.homes(number.to_bytes(32), LARGE) for number in range(2000))
    counts = Counter(home.address for each in homes for home in each)
    assert len(counts) == 5 and max(counts.values()) < 1.2 * min(counts.values())
    assert len(servers.homes(b"x" * 32, SMALL_BYTES)) == 5


EVENTS = st.tuples(st.sampled_from([GONE, BUSY_LONG, None]), st.floats(0, 3))


@given(addresses, st.lists(EVENTS, max_size=60), st.booleans())
def test_a_call_gets_every_server_that_may_answer_before_it_pauses(names, events, is_large):
    """No server is tried twice, one is tried at first, and no attempt is counted for ever."""
    servers, clock = made(names)
    place = (b"c" * 32, LARGE if is_large else 1)
    for error, seconds in events:
        clock.now += seconds
        server = servers.acquire((), *place)
        if error is None:
            servers.succeeded(server)
        else:
            servers.failed(server, error, clock.now)
        servers.release(server)
    assert [server.outstanding for server in servers] == [0] * len(names)
    homes = servers.homes(*place)
    up = {server.address for server in servers if server.down_until <= clock.now}
    are_busy = any(server.is_trusted and server.down_until > clock.now for server in homes)
    tried = []
    while (server := servers.acquire(tried, *place)) is not None:
        servers.failed(server, GONE, clock.now)
        servers.release(server)
        tried.append(server)
    asked = {server.address for server in tried}
    assert len(asked) == len(tried) > 0
    wanted = up & {server.address for server in homes} if are_busy else up
    assert wanted <= asked and asked - {tried[0].address} <= up


@pytest.mark.parametrize("error", [GONE, LATE])
def test_a_server_that_fails_is_left_alone_for_longer_and_longer(error):
    servers, clock = made(["a:1", "b:1"])
    server, pauses = next(iter(servers)), []
    for _ in range(9):
        servers.failed(server, error, clock.now)
        servers.failed(server, error, clock.now - 0.001)  # was in flight together with the first
        assert not server.is_trusted
        pauses.append(server.down_until - clock.now)
        clock.now = server.down_until
    assert pauses[0] < 0.2 and pauses[5] > 10 * pauses[0] and max(pauses) < 7
    servers.succeeded(server)
    assert server.is_trusted and server.failures == 0


def test_one_call_at_a_time_asks_whether_a_server_is_back():
    servers, clock = made(["a:1", "b:1"])
    gone = next(iter(servers))
    servers.failed(gone, GONE, clock.now)
    clock.now += 1
    assert servers.acquire() is gone
    assert {servers.acquire().address for _ in range(20)} == {"b:1"}


def test_a_slow_server_gets_few_of_many_calls():
    """Its calls are in flight for longer, and a call takes the server that has the fewest."""
    servers, _ = made(["fast:1", "fast:2", "slow:1"])
    in_flight, counts = [], Counter()
    for now in range(3000):
        for end, server in list(in_flight):
            if end <= now:
                servers.succeeded(server)
                servers.release(server)
                in_flight.remove((end, server))
        server = servers.acquire()
        in_flight.append((now + (100 if server.address == "slow:1" else 5), server))
        counts[server.address] += 1
    assert 10 < counts["slow:1"] < 0.12 * 3000
    assert counts["fast:1"] > 0.35 * 3000 < counts["fast:2"]


def test_a_server_without_room_is_not_asked_again_for_a_while():
    servers, clock = made(["a:1", "b:1", "c:1"])
    content = b"c" * 32
    first = servers.homes(content, LARGE)[0]
    servers.refused(first, content)
    for seconds, is_asked in ((0, False), (31, True)):
        clock.now += seconds
        asked = [servers.acquire((), content, LARGE) for _ in range(30)]
        assert (first in asked) == is_asked


def test_addresses_are_asked_for_regularly_and_soon_after_a_failure():
    servers, clock = made([], is_fixed=False)
    assert servers.must_resolve()
    servers.update(["a:1", "b:1"])
    servers.update([])
    assert not servers.must_resolve() and len(list(servers)) == 2
    server = servers.acquire()
    servers.failed(server, GONE, clock.now)
    clock.now += 1.1
    assert servers.must_resolve() and not servers.must_resolve()
    clock.now += 10.1
    assert servers.must_resolve()


def test_a_connection_is_closed_once_its_calls_have_ended():
    servers, _ = made(["a:1", "b:1"], is_fixed=False)
    server = servers.acquire()
    servers.update(["c:1"])
    other = {"a:1": "b:1", "b:1": "a:1"}[server.address]
    assert servers.forgotten() == [other]
    servers.release(server)
    assert servers.forgotten() == [server.address] and servers.forgotten() == []


def test_the_generator_of_the_caller_is_left_alone():
    """The seed of a search gives the same formulas, whatever its calls have met."""
    (only,) = alone = Servers(["a:1"])
    assert (alone.acquire(), alone.acquire([only])) == (only, None)
    state, servers = random.getstate(), Servers(["a:1", "b:2", "c:3"])
    for _ in range(20):
        server = servers.acquire()
        servers.succeeded(server)
        servers.failed(server, GONE, 0.0)
        servers.release(server)
    Retries(RetryPolicy(), Deadline(None)).pause_after(GONE, 20.0)
    assert random.getstate() == state


BUSY = warpfit.ResourceExhaustedError("busy", "QUEUE_FULL", retry_after=0.2)
NO_ROOM = warpfit.ResourceExhaustedError("no room", "NO_ROOM", needed=5, available=4)
RESTARTING = warpfit.UnavailableError("gone", "ENGINE_RESTARTING")


@pytest.fixture
def fleet():
    return {f"server:{n}": testing.InProcessServer() for n in range(1, 4)}


@pytest.fixture
def client(fleet):
    with testing.client(fleet) as made:
        yield made


@pytest.fixture
def even_servers(monkeypatch):
    choose = partial(failover.Servers, draw=random.Random(1).random)
    monkeypatch.setattr(failover, "Servers", choose)


@pytest.fixture
def over_grpc():
    with ExitStack() as stack:
        served = [stack.enter_context(serve(testing.InProcessServer())) for _ in range(2)]
        client = stack.enter_context(warpfit.connect([address for address, _ in served]))
        yield client, *(servicer for _, servicer in served)


async def done(answer):
    return await answer if inspect.isawaitable(answer) else answer


def counts(fleet, method="Evaluate"):
    return sorted(server.calls.count(method) for server in fleet.values())


@pytest.mark.usefixtures("even_servers")
def test_calls_are_spread_and_each_server_is_sent_the_data_once(fleet, client):
    data = client.upload(X)
    assert counts(fleet, "UploadVariables") == [1, 1, 1]
    for _ in range(60):
        got = client.evaluate(data, EXPRESSIONS, PARAMETERS)
        np.testing.assert_array_equal(got, expected_values())
    assert counts(fleet, "UploadVariables") == [1, 1, 1] and counts(fleet)[0] > 12
    client.release(data, everywhere=True)
    assert not any(server.holds(data.content_id) for server in fleet.values())


@pytest.mark.parametrize("error", [RESTARTING, BUSY])
def test_a_call_that_fails_goes_to_another_server_at_once(fleet, client, error, monkeypatch):
    pauses = []
    monkeypatch.setattr(failover.Failover, "sleep", lambda _, seconds: pauses.append(seconds))
    data = client.upload(X)
    for _ in range(6):
        client.evaluate(data, "x1")
    first, second, _ = fleet.values()
    first.fail(1000, error)
    second.fail(1000, error)
    for _ in range(6):
        np.testing.assert_array_equal(client.evaluate(data, "x1")[:, 0], X[:, 0])
    assert not pauses


def test_data_go_to_a_server_that_has_room(fleet, client, monkeypatch):
    full = list(fleet.values())[:2]
    for server in full:
        fail_calls(server, "UploadVariables", *[NO_ROOM] * 10)
    data = client.upload(X)
    for _ in range(10):
        np.testing.assert_array_equal(client.evaluate(data, "x1")[:, 0], X[:, 0])
    assert [server.calls.count("UploadVariables") for server in full] == [1, 1]


def test_large_data_live_on_as_many_servers_as_asked(fleet, client, monkeypatch):
    monkeypatch.setattr(failover, "SMALL_BYTES", 1)
    data = client.upload(X)
    for _ in range(20):
        client.evaluate(data, "x1")
    assert counts(fleet, "UploadVariables") == [0, 1, 1]
    for server in fleet.values():
        if server.holds(data.content_id):
            server.fail(1000, RESTARTING)
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


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


@pytest.mark.parametrize(
    ("address", "reasons"),
    [
        *(("127.0.0.1:{}", failover.NOBODY_THERE), ("nosuch.invalid:{}", failover.NOBODY_THERE)),
        (list, ["NO_SERVERS"]),  # there is no server yet
    ],
)
def test_a_wrong_address_fails_soon_and_says_what_to_do(monkeypatch, caplog, address, reasons):
    assert failover._FIRST_CONTACT_SECONDS < 5
    monkeypatch.setattr(failover, "_FIRST_CONTACT_SECONDS", 0.2)
    started = time.monotonic()
    client = warpfit.connect(list if address is list else address.format(free_port()))
    with client, pytest.raises(warpfit.UnavailableError) as caught:
        client.info()
    assert time.monotonic() - started < 15  # on a busy machine
    assert caught.value.reason in reasons and "wait=SECONDS" in caught.value.remedy
    assert "waiting for a server" in caplog.text


def test_a_server_that_is_starting_is_waited_for(monkeypatch):
    monkeypatch.setattr(failover, "_FIRST_CONTACT_SECONDS", 0.05)
    port = free_port()
    with ExitStack() as stack, warpfit.connect(f"127.0.0.1:{port}", wait=20) as client:
        later = serve(testing.InProcessServer(), port=port)
        start = threading.Timer(0.5, stack.enter_context, (later,))
        start.start()
        assert client.info().engine == "reference"
        start.join()
