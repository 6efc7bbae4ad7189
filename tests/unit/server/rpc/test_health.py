"""Health checks, also of clients that flood the port, send nothing or do not read."""

import threading
import time
from contextlib import ExitStack

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from support.servers.health import check
from support.servers.network import RawConnection
from warpfit_server.rpc.health import LIVENESS, READINESS, Health, HealthPort, _CallLimit
from warpfit_server.system.sockets import reserve_port

CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
Status = health_pb2.HealthCheckResponse


@pytest.fixture
def health():
    return Health("service", ["cpu:0", "cpu:1"])


@pytest.fixture
def address(health):
    with reserve_port("0.0.0.0", 0, "--health-port") as reserved:
        number = reserved.getsockname()[1]
        port = HealthPort(health, "0.0.0.0", number)
        yield f"127.0.0.1:{number}"
        port.stop()


@pytest.fixture
def stub(address):
    with grpc.insecure_channel(address) as channel:
        yield health_pb2_grpc.HealthStub(channel)


def request(service=READINESS):
    return health_pb2.HealthCheckRequest(service=service)


def test_readiness_has_three_names_and_unknown_ones_are_refused(health, stub):
    for name in (READINESS, "", "service"):
        assert stub.Check(request(name)).status == Status.NOT_SERVING
    assert stub.Check(request(LIVENESS)).status == Status.SERVING
    health.set_serving(frozenset(["cpu:1"]))
    assert stub.Check(request()).status == Status.SERVING
    assert stub.Check(request("cpu:1")).status == Status.SERVING
    assert stub.Check(request("cpu:0")).status == Status.NOT_SERVING
    with pytest.raises(grpc.RpcError) as caught:
        stub.Check(request("x" * 1000))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert next(iter(stub.Watch(request("what")))).status == Status.SERVICE_UNKNOWN


def test_watch_reports_every_change(health, stub):
    heard = stub.Watch(request(), timeout=20)
    for ready in (False, True, False):
        health.set_serving(frozenset(["cpu:0"] * ready))
        assert next(heard).status == (Status.SERVING if ready else Status.NOT_SERVING)
    heard.cancel()


def test_calls_without_a_message_end_and_keep_no_other_address_out(address):
    with ExitStack() as stack:
        connections = [
            stack.enter_context(RawConnection(address, source="127.0.0.2")) for _ in range(4)
        ]
        silent = [(c, c.begin(method)) for c in connections for method in [CHECK, WATCH] * 8]
        time.sleep(0.3)
        assert check(address) == "NOT_SERVING"
        for connection, stream in silent:
            assert connection.has_ended(stream, timeout=5)
        assert check(address) == "NOT_SERVING"


def test_a_client_that_does_not_read_delays_nobody(health, address, stub):
    with RawConnection(address, source="127.0.0.2", reads=False) as deaf:
        message = b"\0\0\0\0\x0b\x0a\x09readiness"
        for method in (CHECK, WATCH, WATCH):
            deaf.send(deaf.begin(method), message, 5)
        time.sleep(0.3)
        heard = stub.Watch(request(), timeout=20)
        assert next(heard).status == Status.NOT_SERVING
        change = threading.Thread(
            target=health.set_serving, args=(frozenset(["cpu:0"]),), daemon=True
        )
        change.start()
        change.join(5)
        assert not change.is_alive(), "it waits for a client"
        assert next(heard).status == Status.SERVING
        assert check(address) == "SERVING"
        heard.cancel()


def test_the_address_with_most_calls_makes_room():
    class Context:
        def __init__(self, address):
            self.cancelled, self._address = False, address

        def peer(self):
            return f"ipv4:{self._address}:1"

        def cancel(self):
            self.cancelled = True

    calls = _CallLimit(3)
    greedy = [Context("1.1.1.1") for _ in range(4)]
    assert [calls.enter(call) for call in greedy] == [True, True, True, False]
    modest = [Context("2.2.2.2"), Context("3.3.3.3"), Context("2.2.2.2")]
    assert [calls.enter(call) for call in modest] == [True, True, False]
    assert [call.cancelled for call in greedy] == [True, True, False, False]
    for call in (*greedy, *modest):
        calls.leave(call)
    assert [calls.enter(call) for call in greedy] == [True, True, True, False]


def test_draining_is_final(health):
    health.set_serving(frozenset(["cpu:0"]))
    health.drain()
    health.set_serving(frozenset(["cpu:1"]))
    assert not health.ready
