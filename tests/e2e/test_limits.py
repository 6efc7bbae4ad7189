"""Limits and their retry delays, over all doors; data sets that come and go; the clients obey."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from contextlib import ExitStack, contextmanager

import grpc
import numpy as np
import psutil
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

import warpfit
from support.servers.rpcs import OWN_CONNECTION, SERVICE, Caller, X, bearer, evaluate_request
from support.servers.secret_files import write_secret
from support.servers.server import ServerProcess
from warpfit import codec
from warpfit.calls.arguments import build_evaluation
from warpfit.cli.prometheus_reader import scrape
from warpfit.dataset import Dataset
from warpfit.transport.security import new_token
from warpfit.v1 import evaluator_pb2 as pb

NO_RETRY = warpfit.RetryPolicy(total_seconds=0)
LONG = "+".join(f"sin(x1*{k})" for k in range(1, 300))
WIDE = np.random.default_rng(2).normal(size=(100_000, 2))


@contextmanager
def callers(server, count):
    """Connections of their own, so that each door gets some."""
    with ExitStack() as stack:
        yield [
            Caller(stack.enter_context(grpc.insecure_channel(server.address, OWN_CONNECTION)))
            for _ in range(count)
        ]


def long_call(data, programs=400):
    """Serialize a request that computes for many seconds."""
    evaluation, _ = build_evaluation(data, [LONG] * programs, None, None, {"loss": "mse"})
    return codec.evaluation_to_message(evaluation).SerializeToString()


def start(caller, request):
    """Start an evaluation; return the call and wait until it is on its way."""
    return caller.channel.unary_stream(SERVICE + "Evaluate")(request, timeout=60)


def detail_of(error, kind):
    """The detail of a kind in google.rpc.Status."""
    for detail in rpc_status.from_call(error).details:
        if detail.Is(kind.DESCRIPTOR):
            message = kind()
            detail.Unpack(message)
            return message
    return None


def eventually(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class TestRate:
    RATE = 25

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls):
        flags = ("--max-rate", str(cls.RATE), "--front-doors", "2", "--threads", "2")
        flags += ("--metrics-port", "0")
        with ServerProcess(*flags) as process:
            yield process

    def test_it_holds_for_all_doors_together_and_says_when_to_come_back(self, server):
        time.sleep(1.1)  # the full burst is there
        refused = []
        with callers(server, 6) as connected:
            started = time.monotonic()
            for turn in range(3 * self.RATE):
                try:
                    connected[turn % 6].call("GetServerInfo")
                except grpc.RpcError as error:
                    refused.append(error)
            seconds = time.monotonic() - started
        taken = 3 * self.RATE - len(refused)
        assert self.RATE <= taken <= self.RATE * (1 + seconds) + 1
        assert {error.code() for error in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        retry = detail_of(refused[0], error_details_pb2.RetryInfo).retry_delay
        assert 0 < retry.ToNanoseconds() <= 1.1e9
        assert detail_of(refused[0], error_details_pb2.ErrorInfo).reason == "RATE_LIMITED"

    def test_every_call_is_counted_once_whichever_door_refuses_it(self, server):
        statuses = Counter()
        time.sleep(1.1)  # the full burst is there, and what was before has been counted
        before = scrape(server.facts["metrics"])
        with callers(server, 8) as connected:
            for turn in range(4 * self.RATE):
                try:
                    connected[turn % 8].call("GetServerInfo")
                    statuses["OK"] += 1
                except grpc.RpcError as error:
                    statuses[error.code().name] += 1
        assert statuses["OK"]
        assert statuses["RESOURCE_EXHAUSTED"]
        time.sleep(0.8)  # the further door has sent what it has counted
        after, name = scrape(server.facts["metrics"]), "warpfit_requests_total"
        for status, count in statuses.items():
            labels = {"method": "GetServerInfo", "status": status}
            assert after.total(name, **labels) - before.total(name, **labels) == count
        assert after.total("warpfit_requests_in_flight") == 0

    def test_the_client_waits_as_it_is_told(self, server):
        with warpfit.connect(server.address) as client:
            started = time.monotonic()
            for _ in range(2 * self.RATE):
                client.info()
            assert time.monotonic() - started > 0.5
        with warpfit.connect(server.address, retry=NO_RETRY) as client:
            with pytest.raises(warpfit.ResourceExhaustedError) as caught:
                for _ in range(2 * self.RATE):
                    client.info()
            assert caught.value.reason == "RATE_LIMITED"
            assert 0 < caught.value.retry_after < 2


class TestPlaces:
    @pytest.fixture(scope="class")
    @classmethod
    def server(cls):
        flags = ("--max-requests", "2", "--front-doors", "2", "--threads", "1")
        with ServerProcess(*flags) as process:
            yield process

    @pytest.fixture
    def data(self, server):
        with warpfit.connect(server.address) as client:
            yield client.upload(WIDE, WIDE[:, 0])

    def test_they_are_counted_over_all_doors_and_come_back(self, server, data):
        request = long_call(data)
        with callers(server, 8) as connected:
            for _ in range(3):
                running = _occupied(connected[:2], request)
                for caller in connected[2:]:  # whichever door it is at
                    began = time.monotonic()
                    status, reason, _ = caller.refused("Evaluate", data.dataset)
                    assert (status, reason) == ("RESOURCE_EXHAUSTED", "TOO_MANY_REQUESTS")
                    assert time.monotonic() - began < 5, "it waited in a queue"
                for call in running:
                    call.cancel()
                eventually(lambda: not _is_full(connected[3], data))
        with warpfit.connect(server.address) as client:
            client.evaluate(data, ["x1"], loss="mse", timeout=20)

    def test_a_door_that_dies_gives_its_places_back(self, server, data):
        request = long_call(data)
        (door,) = server.doors()
        port = int(server.address.rpartition(":")[2])
        for _ in range(40):
            with callers(server, 2) as connected:
                running = [start(caller, request) for caller in connected]
                time.sleep(0.2)
                if _connections(door, port) == 2:
                    os.kill(door.pid, signal.SIGKILL)
                    break
                for call in running:
                    call.cancel()
        else:
            pytest.fail("the kernel gave the door no two connections")
        with callers(server, 1) as (caller,):
            eventually(lambda: not _is_full(caller, data))
        with warpfit.connect(server.address) as client:  # nor does anybody compute for it
            client.evaluate(data, ["x1"], loss="mse", timeout=20)

    def test_the_client_waits_for_a_place(self, server, data):
        request = long_call(data)
        with callers(server, 2) as connected:
            running = [start(caller, request) for caller in connected]
            time.sleep(0.3)
            threading.Timer(1.0, lambda: [call.cancel() for call in running]).start()
            with warpfit.connect(server.address) as client:
                assert client.evaluate(data, ["x1"], loss="mse").shape == (1,)


def _occupied(connected, request):
    """Take a place for each connection, waiting until there is one."""
    running = [start(caller, request) for caller in connected]
    quiet = 0
    while quiet < 10:
        time.sleep(0.05)
        quiet += 1
        for index, call in enumerate(running):
            if call.done():  # refused
                running[index], quiet = start(connected[index], request), 0
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


def test_a_full_queue_refuses_at_once_and_the_client_comes_back():
    with (
        ServerProcess("--max-queue-seconds", "0.5", "--threads", "1") as server,
        warpfit.connect(server.address, retry=NO_RETRY) as impatient,
        warpfit.connect(server.address) as patient,
    ):
        data = patient.upload(WIDE, WIDE[:, 0])
        with callers(server, 1) as (caller,):
            # However long they are, each has half of the queue.
            calls = [start(caller, long_call(data)) for _ in range(2)]
            time.sleep(0.5)
            with pytest.raises(warpfit.ResourceExhaustedError) as caught:
                impatient.evaluate(data, [LONG] * 100, loss="mse")
            assert caught.value.reason == "QUEUE_FULL"
            assert caught.value.retry_after > 0
            assert "--max-queue-seconds" in caught.value.remedy
            for call in calls:
                threading.Timer(1.0, call.cancel).start()
            assert patient.evaluate(data, [LONG], loss="mse").shape == (1,)


def test_memory_of_answers_in_flight():
    with (
        ServerProcess("--max-pending-bytes", "1MiB", "--threads", "1") as server,
        warpfit.connect(server.address, retry=NO_RETRY) as client,
    ):
        data = client.upload(WIDE)
        assert client.evaluate(data, ["x1"] * 4).nbytes > 1 << 20, "alone it may"
        with callers(server, 1) as (caller,):
            call = start(caller, long_call(client.upload(WIDE, WIDE[:, 0]), 200))
            time.sleep(0.5)
            with pytest.raises(warpfit.ResourceExhaustedError) as caught:
                client.evaluate(data, ["x1"] * 4)
            assert caught.value.reason == "QUEUE_FULL"
            call.cancel()


def test_rows_and_messages_have_limits():
    with (
        ServerProcess("--max-rows", "40", "--max-message-bytes", "10kB") as server,
        warpfit.connect(server.address) as client,
    ):
        with pytest.raises(warpfit.ResourceExhaustedError, match="--max-rows") as caught:
            client.upload(X)
        assert (caught.value.needed, caught.value.available) == (50, 40)
        data = client.upload(X[:40])
        with pytest.raises(warpfit.ResourceExhaustedError) as caught:
            client.evaluate(data, ["+".join(["x1"] * 1000)])
        assert caught.value.reason == "MESSAGE_TOO_LARGE"


def test_data_sets_that_push_each_other_out_come_back_unseen():
    with (
        ServerProcess("--max-resident-bytes", "2MB", "--threads", "1") as server,
        warpfit.connect(server.address) as client,
    ):
        sets = [WIDE + number for number in range(3)]
        handles = [client.upload(X, dtype="float64") for X in sets]  # one at a time has room
        for _ in range(2):
            for data, content in zip(handles, sets, strict=True):
                got = client.evaluate(data, ["x1 + x2"], rows=slice(0, 5))
                np.testing.assert_array_equal(got[:, 0], content[:5].sum(axis=1))
        fit = client.optimize(client.upload(WIDE, WIDE[:, 0]), ["p1*x1"], [[0.5]], loss="mse")
        assert fit.parameters[0][0] == pytest.approx(1.0)


def test_a_lease_runs_out_without_use_and_use_renews_it():
    with (
        ServerProcess("--lease-seconds", "1", "--front-doors", "2", "--threads", "1") as server,
        warpfit.connect(server.address) as client,
    ):
        base = server.shared_memory()
        used, unused = client.upload(X), client.upload(WIDE)
        for _ in range(8):
            client.evaluate(used, ["x1"])
            time.sleep(0.3)
        assert server.shared_memory() - base < WIDE.nbytes // 2
        with callers(server, 1) as (caller,):
            assert caller.call("GetVariables", used.dataset)
            assert caller.refused("GetVariables", unused.dataset)[0] == "NOT_FOUND"
        assert client.evaluate(unused, ["x1"]).shape == (100_000, 1)


def test_errors_have_google_rpc_details(server):
    with callers(server, 1) as (caller,):
        caller.call("UploadVariables")
        request = evaluate_request(Dataset.of(X, X[:, 0], dtype="float64").content_id)
        request.programs.codes = bytes([1, 2, 200])
        with pytest.raises(grpc.RpcError) as caught:
            caller.send("Evaluate", request)
    violation = detail_of(caught.value, error_details_pb2.BadRequest).field_violations[0]
    assert violation.field == "programs[0].tokens[2]"
    info = detail_of(caught.value, error_details_pb2.ErrorInfo)
    assert (info.reason, info.domain) == ("UNKNOWN_OPERATOR", "warpfit")


def test_uploads_cut_in_the_middle_leave_nothing():
    cuts = 1000
    dataset = Dataset.of(np.ones((50_000, 4), np.float32))
    with ServerProcess("--front-doors", "1", "--threads", "1") as server:
        with warpfit.connect(server.address) as client:
            client.evaluate(client.upload(X), ["x1"])
        _cut(server, dataset, 50)  # warm
        base = server.shared_memory(), server.descriptors(), _private(server)
        _cut(server, dataset, cuts)
        eventually(lambda: server.shared_memory() <= base[0])
        eventually(lambda: server.descriptors() <= base[1])
        assert _private(server) - base[2] < 8 << 20
        engine = server.engine()
        assert server.doors() == []
        assert engine.is_running()


def _cut(server, dataset, count):
    """Begin uploads and end them: cancelled, past their deadline, or with their connection."""
    messages = [
        m if isinstance(m, bytes) else m.SerializeToString()
        for m in codec.upload_messages(dataset, 100_000)
    ]
    for block in range(0, count, 100):
        with callers(server, 1) as (caller,):
            method = caller.channel.stream_unary(SERVICE + "UploadVariables")
            for turn in range(100 if count - block > 100 else count - block):
                gone = threading.Event()
                call = method.future(_stalling(messages[: 2 + turn % 4], gone), timeout=5)
                if turn % 10 == 0:
                    time.sleep(0.02)  # let it arrive
                if turn % 3:
                    call.cancel()
                gone.set() if turn % 3 else threading.Timer(0.5, gone.set).start()


def _stalling(messages, gone):
    yield from messages
    gone.wait(5)


def _private(server):
    memory = psutil.Process(server.process.pid).memory_info()
    return memory.rss - memory.shared


def test_limits_are_told(server):
    with callers(server, 1) as (caller,):
        limits = pb.ServerInfo.FromString(caller.call("GetServerInfo")[0]).limits
    assert (limits.requests, limits.rate, limits.rows) == (64, 0, 1 << 40)


def test_a_greedy_tenant_does_not_keep_another_waiting(tmp_path):
    tokens = {name: new_token(name) for name in ("greedy", "modest")}
    path = tmp_path / "tokens"
    write_secret(path, "\n".join(line for _, line in tokens.values()))
    flags = ("--token-file", str(path), "--threads", "2", "--max-queue-seconds", "10000")
    with ServerProcess(*flags) as server, ExitStack() as stack:
        greedy, modest = (
            stack.enter_context(warpfit.connect(server.address, token=tokens[name][0]))
            for name in ("greedy", "modest")
        )
        theirs, ours = greedy.upload(WIDE, WIDE[:, 0]), modest.upload(WIDE, WIDE[:, 0])
        channel = stack.enter_context(grpc.insecure_channel(server.address, OWN_CONNECTION))
        method = channel.unary_stream(SERVICE + "Evaluate")
        request = long_call(theirs)  # each takes longer than all of the modest tenant's
        metadata = bearer(tokens["greedy"][0])
        running = [method(request, timeout=100, metadata=metadata) for _ in range(8)]
        time.sleep(1)
        for _ in range(10):
            assert modest.evaluate(ours, [LONG] * 4, loss="mse", timeout=60).shape == (4,)
        assert not [call.code() for call in running if call.done()], "they are all at work"
        for call in running:
            call.cancel()
