"""The choice of a server for each call, in time that the tests make pass."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warpfit.errors import DeadlineExceededError, ResourceExhaustedError, UnavailableError
from warpfit.transport.call import Deadline
from warpfit.transport.connection import RetryPolicy
from warpfit.transport.failover import SMALL_BYTES, Retries, Servers

LARGE = SMALL_BYTES + 1
GONE = UnavailableError("gone", "CONNECTION_REFUSED")
LATE = DeadlineExceededError("late", "DEADLINE_EXCEEDED")
BUSY = ResourceExhaustedError("busy", "QUEUE_FULL", retry_after=2.0)
addresses = st.lists(
    st.integers(1, 65_535).map("h:{}".format), min_size=2, max_size=12, unique=True
)
contents = st.binary(min_size=32, max_size=32)


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def made(names, seed=0, **options):
    clock = Clock()
    servers = Servers(names, clock=clock, draw=random.Random(seed).random, **options)
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
    counts = Counter(
        home.address for number in range(2000) for home in servers.homes(number.to_bytes(32), LARGE)
    )
    assert len(counts) == 5
    assert max(counts.values()) < 1.2 * min(counts.values())
    assert len(servers.homes(b"x" * 32, SMALL_BYTES)) == 5


@given(
    addresses,
    st.lists(st.tuples(st.sampled_from(["gone", "busy", "fine"]), st.floats(0, 3)), max_size=60),
    st.booleans(),
)
def test_a_call_gets_every_server_that_may_answer_before_it_pauses(names, events, is_large):
    """Whatever has happened before: none twice, one at first, no attempt is counted for ever."""
    servers, clock = made(names)
    place = (b"c" * 32, LARGE if is_large else 1)
    for what, seconds in events:
        clock.now += seconds
        server = servers.acquire((), *place)
        if what == "fine":
            servers.succeeded(server)
        else:
            servers.failed(server, GONE if what == "gone" else BUSY, clock.now)
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
    assert wanted <= asked
    assert asked - {tried[0].address} <= up


@pytest.mark.parametrize("error", [GONE, LATE])
def test_a_server_that_fails_is_left_alone_for_longer_and_longer(error):
    servers, clock = made(["a:1", "b:1"])
    server = next(iter(servers))
    pauses = []
    for _ in range(9):
        servers.failed(server, error, clock.now)
        servers.failed(server, error, clock.now - 0.001)  # was in flight together with the first
        assert not server.is_trusted
        pauses.append(server.down_until - clock.now)
        clock.now = server.down_until
    assert pauses[0] < 0.2
    assert pauses[5] > 10 * pauses[0]
    assert max(pauses) < 7
    servers.succeeded(server)
    assert server.is_trusted
    assert server.failures == 0


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
    assert not servers.must_resolve()
    servers.update([])
    assert len(list(servers)) == 2
    server = servers.acquire()
    servers.failed(server, GONE, clock.now)
    clock.now += 1.1
    assert servers.must_resolve()
    assert not servers.must_resolve()
    clock.now += 10.1
    assert servers.must_resolve()


def test_a_connection_is_closed_once_its_calls_have_ended():
    servers, _ = made(["a:1", "b:1"], is_fixed=False)
    server = servers.acquire()
    servers.update(["c:1"])
    other = {"a:1": "b:1", "b:1": "a:1"}[server.address]
    assert servers.forgotten() == [other]
    servers.release(server)
    assert servers.forgotten() == [server.address]
    assert servers.forgotten() == []


def test_the_generator_of_the_caller_is_left_alone():
    """The seed of a search gives the same formulas, whatever its calls have met."""
    (only,) = alone = Servers(["a:1"])
    assert (alone.acquire(), alone.acquire([only])) == (only, None)
    state = random.getstate()
    servers = Servers(["a:1", "b:2", "c:3"])
    for _ in range(20):
        server = servers.acquire()
        servers.succeeded(server)
        servers.failed(server, GONE, 0.0)
        servers.release(server)
    Retries(RetryPolicy(), Deadline(None)).pause_after(GONE, 20.0)
    assert random.getstate() == state
