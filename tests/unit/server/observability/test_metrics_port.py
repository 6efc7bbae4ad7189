"""The HTTP port of the metrics: what it answers, and what it costs when many connect."""

import http.client
import socket
import threading
import time

import pytest

from warpfit.errors import UnavailableError
from warpfit_server import metrics
from warpfit_server.metrics import MetricsPort

TEXT = b"warpfit_ready 1.0\n" * 10_000


def render(accept):
    if accept == "broken":
        raise RuntimeError("no metrics")
    return "text/plain; version=0.0.4", TEXT


@pytest.fixture
def port():
    made = MetricsPort(render, "127.0.0.1", 0)
    yield made.port
    made.stop()


def request(port, method="GET", path="/metrics", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def connect(port):
    return socket.create_connection(("127.0.0.1", port), timeout=10)


@pytest.mark.parametrize("path", ["/metrics", "/metrics?name[]=x"])
def test_the_page(port, path):
    assert request(port, path=path) == (200, TEXT)
    assert request(port, "HEAD", path) == (200, b"")


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/", {}, 404),
        ("GET", "/metrics/", {}, 404),
        ("POST", "/metrics", {}, 405),
        ("GET", "/metrics", {"Accept": "broken"}, 500),
    ],
)
def test_what_is_refused(port, method, path, headers, status):
    assert request(port, method, path, **headers)[0] == status
    assert request(port) == (200, TEXT)


@pytest.mark.parametrize(
    "sent", [b"", b"\r\n\r\n", b"\x00" * 100 + b"\r\n\r\n", b"GET /metrics", b"x" * (1 << 20)]
)
def test_whatever_is_sent_the_port_lives_on(port, sent):
    with connect(port) as client:
        try:
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
            client.recv(1 << 16)
        except OSError:
            pass  # it has closed the connection
    assert request(port) == (200, TEXT)


def test_many_silent_connections_cost_no_threads_and_keep_nobody_out(port, monkeypatch):
    monkeypatch.setattr(metrics, "_SECONDS", 600)  # none is closed because it is slow
    before = threading.active_count()
    clients = []
    try:
        clients.extend(connect(port) for _ in range(100))
        assert request(port) == (200, TEXT)
        assert threading.active_count() == before
        oldest = clients[0]
        assert oldest.recv(1) == b""  # it made room
    except ConnectionResetError:
        pass
    finally:
        for client in clients:
            client.close()


def test_a_slow_client_is_cut_off(port, monkeypatch):
    monkeypatch.setattr(metrics, "_SECONDS", 0.5)
    with connect(port) as client:
        started = time.monotonic()
        with pytest.raises(OSError, match=r"reset|pipe"):
            while time.monotonic() < started + 10:
                client.sendall(b"x")
                time.sleep(0.05)
        assert time.monotonic() - started < 5


def test_a_client_that_takes_no_answer_is_cut_off(monkeypatch):
    monkeypatch.setattr(metrics, "_SECONDS", 0.5)

    made = MetricsPort(lambda accept: ("text/plain", bytes(64 << 20)), "127.0.0.1", 0)
    try:
        with connect(made.port) as client:
            client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            deadline = time.monotonic() + 5
            while made._open and time.monotonic() < deadline:
                time.sleep(0.05)
            assert not made._open
    finally:
        made.stop()


def test_a_taken_port_is_an_error(port):
    with pytest.raises(UnavailableError, match="--metrics-port"):
        MetricsPort(render, "127.0.0.1", port)


@pytest.mark.parametrize("host", ["nohost.invalid", "a b", "x" * 300, "a..b", "203.0.113.1"])
def test_a_host_that_is_none_of_this_machine_is_an_error(host):
    with pytest.raises(UnavailableError, match="--metrics-port"):
        MetricsPort(render, host, 0)


def test_a_closed_port_answers_nobody():
    made = MetricsPort(render, "127.0.0.1", 0)
    silent = connect(made.port)
    made.stop()
    with pytest.raises(OSError, match="refused"):
        connect(made.port)
    silent.close()
