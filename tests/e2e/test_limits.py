"""Limits and the delays they ask for, over all front ends; data sets that come and go."""

import os
import signal
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

import warpfit
from support.servers.rpcs import LONG, OWN_CONNECTION, WIDE, Caller, X, long_request, start
from support.servers.server import ServerProcess, eventually
from warpfit.cli.top import scrape

NO_RETRY = warpfit.RetryPolicy(total_seconds=0)


@contextmanager
def callers(server, count):
    """Connections of their own, so that each front end gets some."""
    with ExitStack() as stack:
        yield [
            Caller(stack.enter_context(grpc.insecure_channel(server.address, OWN_CONNECTION)))
            for _ in range(count)
        ]


def detail_of(error, kind):
    """The detail of a kind in google.rpc.Status."""
    for detail in rpc_status.from_call(error).details:
        if detail.Is(kind.DESCRIPTOR):
            message = kind()
            detail.Unpack(message)
            return message
    return None


class TestRatesAndLeases:
    RATE = 25

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, tmp_path_factory):
        limits = tmp_path_factory.mktemp("rates") / "tenants.toml"
        limits.write_text(f"[default]\nrate = {cls.RATE}\n")
        flags = ("--tenants-file", str(limits), "--front-ends", "2", "--threads", "2")
        flags += ("--metrics-port", "0", "--lease-seconds", "1")
        with ServerProcess(*flags) as process:
            yield process

    def test_the_rate_holds_for_all_front_ends_and_every_call_is_counted_once(self, server):
        time.sleep(1.1)  # the full burst is there
        before = scrape(server.facts["metrics"])
        statuses, refused = Counter(), []
        with callers(server, 8) as connected:
            started = time.monotonic()
            for turn in range(3 * self.RATE):
                try:
                    connected[turn % 8].call("GetServerInfo")
                    statuses["OK"] += 1
                except grpc.RpcError as error:
                    refused.append(error)
                    statuses[error.code().name] += 1
            seconds = time.monotonic() - started
        assert self.RATE <= statuses["OK"] <= self.RATE * (1 + seconds) + 1
        assert statuses.keys() == {"OK", "RESOURCE_EXHAUSTED"}
        retry = detail_of(refused[0], error_details_pb2.RetryInfo).retry_delay
        assert 0 < retry.ToNanoseconds() <= 1.1e9
        assert detail_of(refused[0], error_details_pb2.ErrorInfo).reason == "RATE_LIMITED"
        time.sleep(0.8)  # the further front end has sent what it has counted
        after, name = scrape(server.facts["metrics"]), "warpfit_requests_total"
        for status, count in statuses.items():
            labels = {"method": "GetServerInfo", "status": status}
            assert after.total(name, **labels) - before.total(name, **labels) == count
        assert after.total("warpfit_requests_in_flight") == 0

    def test_a_lease_runs_out_without_use_and_use_renews_it(self, server):
        with warpfit.connect(server.address) as client:
            base = server.shared_memory()
            used, unused = client.upload(X), client.upload(WIDE)
            for _ in range(6):
                client.evaluate(used, ["x1"])
                time.sleep(0.3)
            assert server.shared_memory() - base < WIDE.nbytes // 4
            with callers(server, 1) as (caller,):
                assert caller.call("GetVariables", used.dataset)
                assert caller.refused("GetVariables", unused.dataset)[0] == "NOT_FOUND"
            assert client.evaluate(unused, ["x1"]).shape == (100_000, 1)


class TestCallsInFlight:
    @pytest.fixture(scope="class")
    @classmethod
    def server(cls):
        flags = ("--max-requests", "2", "--front-ends", "2", "--threads", "1")
        with ServerProcess(*flags) as process:
            yield process

    @pytest.fixture
    def data(self, server):
        with warpfit.connect(server.address) as client:
            yield client.upload(WIDE, WIDE[:, 0])

    def test_they_are_counted_over_all_front_ends_and_come_back(self, server, data):
        request = long_request(data)
        with callers(server, 8) as connected:
            for _ in range(2):
                running = _occupied(connected[:2], request)
                for caller in connected[2:]:  # whichever front end has it
                    began = time.monotonic()
                    status, reason, _ = caller.refused("Evaluate", data.dataset)
                    assert (status, reason) == ("RESOURCE_EXHAUSTED", "TOO_MANY_REQUESTS")
                    assert time.monotonic() - began < 15, "it waited in a queue"
                for call in running:
                    call.cancel()
                eventually(lambda: not _is_full(connected[3], data))
        with warpfit.connect(server.address) as client:  # the engine has stopped, too
            client.evaluate(data, ["x1"], loss="mse", timeout=10)

    def test_those_of_a_front_end_that_dies_come_back(self, server, data):
        request = long_request(data)
        front_end = server.front_ends()[0]
        port = int(server.address.rpartition(":")[2])
        for _ in range(40):
            with callers(server, 2) as connected:
                running = [start(caller.channel, request) for caller in connected]
                time.sleep(0.2)
                if _connections(front_end, port) == 2:
                    os.kill(front_end.pid, signal.SIGKILL)
                    break
                for call in running:
                    call.cancel()
        else:
            pytest.fail("the kernel gave the front end no two connections")
        with callers(server, 1) as (caller,):
            eventually(lambda: not _is_full(caller, data))
        with warpfit.connect(server.address) as client:  # nor does anybody compute for it
            client.evaluate(data, ["x1"], loss="mse", timeout=10)


def _occupied(connected, request):
    """Start a call on each connection, again where it is refused; return them."""
    running = [start(caller.channel, request) for caller in connected]
    quiet = 0
    while quiet < 6:
        time.sleep(0.05)
        quiet += 1
        for index, call in enumerate(running):
            if call.done():  # refused
                running[index], quiet = start(connected[index].channel, request), 0
    return running


def _is_full(caller, data):
    """Tell whether a small call is refused; one that is taken may wait behind others."""
    try:
        caller.call("Evaluate", data.dataset, 1.0)
    except grpc.RpcError as error:
        return error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
    return False


def _connections(process, port):
    return sum(
        connection.laddr.port == port and connection.status == psutil.CONN_ESTABLISHED
        for connection in process.net_connections("tcp")
    )


class TestMemory:
    ROWS = len(WIDE)

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, tmp_path_factory):
        limits = tmp_path_factory.mktemp("rows") / "tenants.toml"
        limits.write_text(f"[default]\nrows = {cls.ROWS}\n")
        flags = ("--max-pending-bytes", "1MiB", "--max-resident-bytes", "2MB", "--threads", "1")
        flags += ("--tenants-file", str(limits), "--front-ends", "1")
        with ServerProcess(*flags) as process:
            yield process

    def test_answers_in_flight(self, server):
        with warpfit.connect(server.address, retry=NO_RETRY) as client:
            data = client.upload(WIDE, WIDE[:, 0])
            assert client.evaluate(data, ["x1"] * 4).nbytes > 1 << 20, "alone it may"
            with callers(server, 1) as (caller,):
                call = start(caller.channel, long_request(data, 100))
                time.sleep(0.5)
                with pytest.raises(warpfit.ResourceExhaustedError) as caught:
                    client.evaluate(data, ["x1"] * 4)
                assert caught.value.reason == "QUEUE_FULL"
                call.cancel()

    def test_rows_and_messages(self, server):
        with warpfit.connect(server.address) as client:
            with pytest.raises(warpfit.ResourceExhaustedError) as caught:
                client.upload(np.zeros((self.ROWS + 1, 1)))
            assert "--tenants-file (rows)" in caught.value.remedy
            assert (caught.value.needed, caught.value.available) == (self.ROWS + 1, self.ROWS)
            data = client.upload(X)
            # The client sends such a batch in parts; one program is a part that is too large.
            assert client.evaluate(data, [LONG] * 300).shape == (len(X), 300)
            with pytest.raises(warpfit.ResourceExhaustedError) as caught:
                client.evaluate(data, ["p1*x1"], [np.ones((600_000, 1))])
            assert caught.value.reason == "MESSAGE_TOO_LARGE"

    def test_the_least_recently_used_data_set_goes_and_comes_back_unseen(self, server):
        sets = [WIDE + number for number in range(3)]
        with warpfit.connect(server.address) as client:
            handles = [client.upload(X, dtype="float64") for X in sets]  # one at a time has room
            with callers(server, 1) as (caller,):
                assert caller.call("GetVariables", handles[2].dataset)
                assert caller.refused("GetVariables", handles[0].dataset)[0] == "NOT_FOUND"
            for _ in range(2):
                for data, content in zip(handles, sets, strict=True):
                    got = client.evaluate(data, ["x1 + x2"], rows=slice(0, 5))
                    np.testing.assert_array_equal(got[:, 0], content[:5].sum(axis=1))
            fit = client.optimize(client.upload(WIDE, WIDE[:, 0]), ["p1*x1"], [[0.5]], loss="mse")
            assert fit.parameters[0][0] == pytest.approx(1.0)
            with pytest.raises(warpfit.ResourceExhaustedError, match="more bytes"):
                client.upload(np.ones((self.ROWS, 6)))


def test_an_upload_takes_no_more_memory_than_its_data_and_the_messages_on_their_way(server, client):
    X = np.random.default_rng(5).random((400_000, 50), dtype=np.float32)
    messages_on_their_way = 48 << 20
    folder = Path(f"/proc/{server.process.pid}")
    (folder / "clear_refs").write_text("5")  # forgets the high-water mark
    before = _peak(folder)
    client.release(client.upload(X), everywhere=True)
    assert _peak(folder) - before < X.nbytes + messages_on_their_way


def _peak(folder: Path) -> int:
    """High-water mark of a process's resident memory, shared memory included."""
    fields = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024
