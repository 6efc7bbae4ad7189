"""No tenant and no caller without credentials keeps another tenant's calls from being answered."""

import threading
import time
from contextlib import ExitStack, suppress
from types import SimpleNamespace

import grpc
import numpy as np
import pytest

import warpfit
from support.load.processes import in_threads
from support.servers.network import RawConnection, part_of_message
from support.servers.rpcs import LONG, SERVICE, WIDE, bearer, explained, long_request, start
from support.servers.server import ServerProcess, token_file

NO_RETRY = warpfit.RetryPolicy(total_seconds=0)
PENDING, RESIDENT = 64 << 20, 32 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    path, tokens = token_file(folder, "greedy", "second", "modest")
    flags = ("--token-file", path, "--threads", "1", "--front-ends", "2")
    flags += ("--max-pending-bytes", str(PENDING), "--max-resident-bytes", str(RESIDENT))
    flags += ("--max-queue-seconds", "1", "--message-seconds", "1.5")
    log = folder / "log"
    with ServerProcess(*flags, log=log) as process:
        yield SimpleNamespace(process=process, address=process.address, tokens=tokens)
    assert "Traceback" not in log.read_text(), "no caller makes the server write one"


@pytest.fixture
def modest(server):
    """The modest tenant's client, which repeats nothing."""
    token = server.tokens["modest"]
    with warpfit.connect(server.address, token=token, retry=NO_RETRY) as client:
        yield client


@pytest.fixture
def greedy(server):
    """Makes connections of the greedy tenant or another one, closed at the end."""

    def connect(tenant="greedy", **options):
        made = RawConnection(server.address, server.tokens[tenant], **options)
        return stack.enter_context(made)

    with ExitStack() as stack:
        yield connect


def works(client):
    """Make calls that go to either front end; an error fails the test."""
    data = client.upload(np.ones((6, 1)), np.ones(6))
    assert client.evaluate(data, ["x1 + x1"], loss="mse", timeout=20) == [1.0]
    for _ in range(3):
        client.info()


def test_calls_without_a_message(server, modest, greedy):
    """Two tenants take all open calls and all bytes in flight that they can."""
    connections = [greedy(("greedy", "second")[number % 2]) for number in range(8)]
    streams = [(c, c.begin(SERVICE + "Evaluate")) for c in connections for _ in range(40)]
    time.sleep(0.3)
    works(modest)
    for connection, stream in streams:
        assert connection.has_ended(stream, timeout=15), "refused, or ended after its time"
    works(modest)


def test_unfinished_messages_are_accounted(server, modest, greedy):
    """As many as fit what may be in flight are received, ten times as much is sent."""
    front_ends = server.process.front_ends()
    most = PENDING // 8

    def resident():
        return sum(process.memory_info().rss for process in front_ends)

    def send(connection):
        for _ in range(20):
            stream = connection.begin(SERVICE + "Evaluate")
            connection.send(stream, part_of_message(most, most - 1000), 2)

    before, counted, grown = resident(), [], []
    with in_threads(send, [greedy() for _ in range(4)]) as threads:
        while any(thread.is_alive() for thread in threads):
            counted.append(server.process.in_flight().nbytes)
            grown.append(resident() - before)
            works(modest)
    # A process adds what arrives before it compares that with the limit.
    assert 2 * most <= max(counted) <= PENDING + len(front_ends) * most
    # Calls that have ended may leave as much in the heaps as those after them take.
    assert max(grown) < 4 * PENDING


def test_a_call_of_many_hours_keeps_no_other_tenant_out(server, modest, caller):
    token = server.tokens["greedy"]
    impatient = warpfit.connect(server.address, token=token, retry=NO_RETRY)
    with impatient, warpfit.connect(server.address, token=token) as patient:
        data = patient.upload(WIDE, WIDE[:, 0])
        message = long_request(data, 60)
        # However long they are, each has half of its tenant's queue.
        calls = [start(caller.channel, message, metadata=bearer(token)) for _ in range(2)]
        time.sleep(0.5)
        for _ in range(3):
            works(modest)
        with pytest.raises(warpfit.ResourceExhaustedError) as caught:
            impatient.evaluate(data, [LONG] * 20, loss="mse")
        assert caught.value.reason == "QUEUE_FULL"
        assert caught.value.retry_after > 0
        assert "--max-queue-seconds" in caught.value.remedy
        assert not any(call.done() for call in calls), "they are at work"
        for call in calls:
            threading.Timer(0.5, call.cancel).start()
        assert patient.evaluate(data, [LONG], loss="mse").shape == (1,)


def test_compressed_messages_are_refused_as_they_are(server, caller):
    own = bearer(server.tokens["greedy"])
    call = caller.channel.unary_unary(SERVICE + "GetServerInfo")
    with pytest.raises(grpc.RpcError) as caught:
        call(bytes(1 << 20), metadata=own, compression=grpc.Compression.Gzip)
    found = explained(caught.value)[:2]
    assert found == ("INVALID_ARGUMENT", "MALFORMED_MESSAGE"), "not too long"


def test_calls_that_are_taken_back_at_once(server, modest):
    stop = threading.Event()

    def reset(_):
        while not stop.is_set():
            with RawConnection(server.address) as connection, suppress(OSError):
                while not stop.is_set() and connection.is_open:
                    connection.begin_and_reset(SERVICE + "GetServerInfo", 200)

    with in_threads(reset, range(3)):
        try:
            for _ in range(2):
                works(modest)
        finally:
            stop.set()
