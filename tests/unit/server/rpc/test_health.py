"""Health checks, and certificates."""

import threading
import time
from contextlib import ExitStack

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from support.servers.health import check
from support.servers.network import RawConnection
from warpfit.errors import InvalidArgumentError
from warpfit_server.config import Config
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


# ------------------------------------------------------------------------------------- certificates


TENANTS = {"token_file": "tokens"}
PUBLIC = {"metrics_port": "0.0.0.0:9464"}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_addresses_need_no_tls(host):
    Config(host=host).check_exposure()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_other_addresses_need_tls_or_consent(host, monkeypatch):
    monkeypatch.setattr("socket.getaddrinfo", lambda *_: [])  # no machine need know the name
    with pytest.raises(InvalidArgumentError) as caught:
        Config(host=host).check_exposure()
    assert caught.value.reason == "INSECURE"
    Config(host=host, insecure=True).check_exposure()
    Config(host=host, tls_cert="a", tls_key="b").check_exposure()


@pytest.mark.parametrize("settings", [{"tls_cert": "a"}, {"tls_key": "b"}, {"tls_client_ca": "c"}])
def test_half_configured_tls_is_refused(settings):
    with pytest.raises(InvalidArgumentError) as caught:
        Config(insecure=True, **settings).check_exposure()
    assert caught.value.reason == "INCOMPLETE_CERTIFICATE"


def test_metrics_and_health_listen_on_loopback_by_default():
    flags = ["--host", "0.0.0.0", "--insecure", "--metrics-port", "0", "--health-port=7"]
    config = Config.from_arguments(flags, {})
    assert (config.metrics_port, config.health_port) == ("127.0.0.1:0", "127.0.0.1:7")


@pytest.mark.parametrize(
    "settings",
    [
        TENANTS | PUBLIC,
        {"tls_cert": "x", "tls_key": "x", "tls_client_ca": "x"} | PUBLIC,
        TENANTS | PUBLIC | {"insecure": True},
        TENANTS | {"metrics_port": "[::]:9464"},
    ],
)
def test_metrics_that_name_tenants_need_consent_on_a_network(settings):
    with pytest.raises(InvalidArgumentError) as caught:
        Config(**settings).check_exposure()
    assert caught.value.reason == "TENANTS_EXPOSED"
    assert "--metrics-port 127.0.0.1:9464" in str(caught.value)
    Config(**settings, expose_tenants=True).check_exposure()


@pytest.mark.parametrize(
    "settings",
    [TENANTS, PUBLIC, TENANTS | {"metrics_port": "127.0.0.1:9464"}],
)
def test_other_metrics_need_no_consent(settings):
    Config(**settings).check_exposure()
