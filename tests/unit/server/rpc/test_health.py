"""Health checks, exposed addresses, threads of a port, and statuses of errors."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from unittest.mock import Mock
from urllib.parse import quote

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc import StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc

from support.refusals import refused
from support.servers.health import check
from support.servers.network import RawConnection
from support.servers.server import eventually
from warpfit import errors
from warpfit.codec import ERROR_METADATA_KEY
from warpfit_server.config import Config
from warpfit_server.machine import reserve_port
from warpfit_server.rpc import health as health_module
from warpfit_server.rpc import servicer
from warpfit_server.rpc.calls import fail_call
from warpfit_server.rpc.health import LIVENESS, READINESS, Health, HealthPort
from warpfit_server.rpc.servicer import CallThreads

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
    assert "what" not in health._servicer._send_response_callbacks, "names are not kept"


def test_watch_reports_every_change(health, stub):
    heard = stub.Watch(request(), timeout=20)
    for ready in (False, True, False):
        health.set_serving(frozenset(["cpu:0"] * ready))
        assert next(heard).status == (Status.SERVING if ready else Status.NOT_SERVING)
    assert stub.Check(request()).status == Status.NOT_SERVING
    health.drain()
    assert all(answer.status == Status.NOT_SERVING for answer in heard), "it is told, and ends"
    health.set_serving(frozenset(["cpu:1"]))
    assert not health.ready, "draining is final"


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


def test_the_address_with_most_calls_loses_its_oldest_one():
    limit, peers = health_module._CallLimit(4), ("b:1", "a:2", "a:3", "a:4", "c:5")
    calls = [Mock(**{"peer.return_value": f"ipv4:{peer}"}) for peer in peers]
    assert all(map(limit.enter, calls))
    assert [call.cancel.called for call in calls] == [False, True, False, False, False]
    assert not limit.enter(calls[1])
    limit.leave(calls[4])
    assert limit.enter(calls[1])


def test_a_client_that_does_not_read_delays_nobody(health, address, stub):
    with RawConnection(address, source="127.0.0.2", reads=False) as deaf:
        message = b"\0\0\0\0\x0b\x0a\x09readiness"
        for method in (CHECK, WATCH, WATCH):
            deaf.send(deaf.begin(method), message, 5)
        time.sleep(0.3)
        heard = stub.Watch(request(), timeout=20)
        assert next(heard).status == Status.NOT_SERVING
        serving = {"target": health.set_serving, "args": (frozenset(["cpu:0"]),)}
        change = threading.Thread(**serving, daemon=True)
        change.start()
        change.join(5)
        assert not change.is_alive(), "it waits for a client"
        assert next(heard).status == Status.SERVING
        assert check(address) == "SERVING"
        heard.cancel()


TENANTS, OPEN = {"token_file": "tokens"}, {"insecure": True}
PUBLIC = {"metrics_port": "0.0.0.0:9464"}
TLS = {"tls_cert": "a", "tls_key": "b"}
EXPOSING = (
    *(TENANTS | PUBLIC, TLS | {"tls_client_ca": "x"} | PUBLIC, TENANTS | PUBLIC | OPEN),
    TENANTS | {"metrics_port": "[::]:9464"},
)


@pytest.mark.parametrize(
    ("settings", "reason", "consent"),
    [
        *(({"host": host}, "INSECURE", OPEN) for host in ("0.0.0.0", "10.0.0.1", "example.org")),
        ({"host": "::"}, "INSECURE", TLS),
        ({"tls_cert": "a"} | OPEN, "INCOMPLETE_CERTIFICATE", {"tls_key": "b"}),
        ({"tls_key": "b"} | OPEN, "INCOMPLETE_CERTIFICATE", {"tls_cert": "a"}),
        ({"tls_client_ca": "c"} | OPEN, "INCOMPLETE_CERTIFICATE", TLS),
        # Metrics name tenants.
        *((settings, "TENANTS_EXPOSED", {"expose_tenants": True}) for settings in EXPOSING),
    ],
)
def test_what_others_could_read_needs_tls_or_consent(settings, reason, consent, monkeypatch):
    monkeypatch.setattr("socket.getaddrinfo", lambda *_: [])  # no machine need know the name
    place = ".*--metrics-port 127.0.0.1:9464" if reason == "TENANTS_EXPOSED" else ""
    refused(reason + place, Config(**settings).check_exposure)
    Config(**(settings | consent)).check_exposure()


def count(name):
    return sum(thread.name.startswith(name) for thread in threading.enumerate())


def test_there_are_no_more_threads_than_calls_at_a_time(monkeypatch):
    """However often callers come, and in whatever moment; idle threads end after a while."""
    monkeypatch.setattr(servicer, "_IDLE_SECONDS", 0.5)
    threads = CallThreads(100, "served")

    def call(_):
        for number in range(1_000):
            assert threads.submit(pow, number, exp=2).result(10) == number**2
        return count("served")

    with ThreadPoolExecutor(3) as callers:
        # The thread of a call may not be idle yet when the caller sends the next one.
        assert max(callers.map(call, range(3))) <= 2 * 3
    eventually(lambda: count("served") == threads._count == 0)
    assert threads.submit(abs, -1).result(10) == 1


def test_calls_wait_where_all_threads_are_busy_or_the_system_has_no_more(monkeypatch, caplog):
    threads, go = CallThreads(2, "busy"), threading.Event()
    waiting = [threads.submit(go.wait, 10) for _ in range(2)]
    later = [threads.submit(abs, number) for number in range(3)]
    assert count("busy") == 2
    assert not any(future.done() for future in later)
    go.set()
    assert [future.result(10) for future in later] == [0, 1, 2]
    assert all(future.result(10) for future in waiting)
    with pytest.raises(ZeroDivisionError):
        threads.submit(divmod, 1, 0).result(10)

    few, go = CallThreads(2, "few"), threading.Event()
    first = few.submit(go.wait, 10)
    refuse = Mock(side_effect=RuntimeError("can't start new thread"))
    monkeypatch.setattr(threading.Thread, "start", refuse)
    second = few.submit(abs, -2)
    go.set()
    assert first.result(10)
    assert second.result(10) == 2
    assert "no new thread for calls" in caplog.text
    monkeypatch.undo()
    both, used = threading.Barrier(2), set()
    assert sorted(f.result(10) for f in [few.submit(both.wait, 10) for _ in range(2)]) == [0, 1]
    for _ in range(3):
        eventually(lambda: len(few._idle) == 2)
        used.add(few.submit(threading.get_ident).result(10))
    assert len(used) == 1, "so that others end"


def sent_status(error):
    context = Mock(**{"code.return_value": None})
    fail_call(context, error, (("x-request-id", "1"),))
    (metadata,) = context.set_trailing_metadata.call_args.args
    assert [key for key, _ in metadata] == ["x-request-id", ERROR_METADATA_KEY]
    return metadata[1][1]


def unpack(error, kind):
    status = status_pb2.Status.FromString(sent_status(error))
    assert (status.code, status.message) == (StatusCode[error.status].value[0], str(error))
    for detail in status.details:
        if detail.Is(kind.DESCRIPTOR):
            message = kind()
            detail.Unpack(message)
            return message
    return None


def test_a_wrong_token_is_a_field_violation_with_its_place():
    error = errors.ProgramError("what", "STACK_UNDERFLOW", "mend", "programs", 3, 4)
    violation = unpack(error, error_details_pb2.BadRequest).field_violations[0]
    assert (violation.field, violation.description) == ("programs[3].tokens[4]", "what")
    info = unpack(error, error_details_pb2.ErrorInfo)
    assert (info.reason, info.domain) == ("STACK_UNDERFLOW", "warpfit")
    assert (info.metadata["remedy"], info.metadata["token"]) == ("mend", "4")


def test_an_exceeded_limit_is_a_quota_failure_with_a_retry_delay():
    facts = {"needed": 5, "available": 3, "retry_after": 1.5}
    error = errors.ResourceExhaustedError("what", "QUEUE_FULL", **facts)
    delay = unpack(error, error_details_pb2.RetryInfo).retry_delay
    assert delay.ToNanoseconds() == 1_500_000_000
    assert unpack(error, error_details_pb2.QuotaFailure).violations[0].subject == "QUEUE_FULL"
    assert unpack(error, error_details_pb2.ErrorInfo).metadata["needed"] == "5"
    assert unpack(error, error_details_pb2.BadRequest) is None


@pytest.mark.parametrize("character", ["x", "\u20ac", "\n"])
def test_an_error_that_quotes_much_fits_the_metadata_of_a_call(character):
    much = character * 100_000
    error = errors.InvalidArgumentError(much, much, much, much, 1 << 70, 1 << 70, 1 << 70, 1 << 70)
    printable = "".join(chr(c) for c in range(32, 127) if chr(c) != "%")
    message = quote(str(error), safe=printable)  # as gRPC encodes the message of a status
    encoded = 4 * -(-len(sent_status(error)) // 3)
    assert len(message) + encoded < 7_500
    assert error.message.endswith("...")


@pytest.mark.parametrize(("remaining", "status"), [(0.0, "DEADLINE_EXCEEDED"), (1.0, "CANCELLED")])
def test_a_call_whose_deadline_has_passed_is_not_called_cancelled(remaining, status):
    context = Mock(**{"code.return_value": None, "time_remaining.return_value": remaining})
    fail_call(context, errors.CancelledError("the call has ended", "CANCELLED"), ())
    context.set_code.assert_called_once_with(grpc.StatusCode[status])
