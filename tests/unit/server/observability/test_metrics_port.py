"""The HTTP port of the metrics: what it answers, and what it costs when many connect."""

import http.client
import socket
import threading
import time

import pytest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from warpfit.errors import UnavailableError
from warpfit_server import metrics
from warpfit_server.metrics import MetricsPort

SERIES = 10_000


class Page(Collector):
    """Many numbers, or an error."""

    def __init__(self):
        self.is_broken = False
        self.is_ready = True

    def collect(self):
        if self.is_broken:
            raise RuntimeError("no metrics")
        family = GaugeMetricFamily("warpfit_ready", "Whether it is", labels=("number",))
        for number in range(SERIES):
            family.add_metric((str(number),), 1.0)
        yield family


@pytest.fixture
def page():
    return Page()


@pytest.fixture
def port(page):
    made = MetricsPort(page, "127.0.0.1", 0)
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


def is_whole(answer):
    status, content = answer
    return status == 200 and content.count(b"\nwarpfit_ready{") == SERIES


def test_the_page(port, page):
    assert is_whole(request(port))
    assert is_whole(request(port, path="/metrics?time=1"))
    assert request(port, "POST")[0] == 405
    page.is_broken = True
    assert request(port)[0] == 500
    page.is_broken = False
    assert is_whole(request(port))


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
    assert is_whole(request(port))


def test_many_silent_connections_cost_few_threads_and_keep_nobody_out(port):
    before = threading.active_count()
    clients = []
    try:
        clients.extend(connect(port) for _ in range(100))
        assert is_whole(request(port))
        deadline = time.monotonic() + 10
        while threading.active_count() > before + metrics._MOST_CONNECTIONS:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        oldest = clients[0]
        assert oldest.recv(1) == b""  # it made room
    except ConnectionResetError:
        pass
    finally:
        for client in clients:
            client.close()


def test_a_silent_client_and_one_that_takes_no_answer_are_cut_off(port, monkeypatch):
    monkeypatch.setattr(metrics._Handler, "timeout", 0.3)
    before = threading.active_count()
    with connect(port) as silent, connect(port) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.sendall(b"GET /metrics HTTP/1.1\r\n\r\n" * 100)
        assert silent.recv(1) == b""
        deadline = time.monotonic() + 10
        while threading.active_count() > before and time.monotonic() < deadline:
            time.sleep(0.05)
        assert threading.active_count() == before


def test_a_taken_port_is_an_error(port):
    with pytest.raises(UnavailableError, match="--metrics-port"):
        MetricsPort(Page(), "127.0.0.1", port)


@pytest.mark.parametrize("host", ["nohost.invalid", "a b", "x" * 300, "a..b", "203.0.113.1"])
def test_a_host_that_is_none_of_this_machine_is_an_error(host):
    with pytest.raises(UnavailableError, match="--metrics-port"):
        MetricsPort(Page(), host, 0)


def test_a_closed_port_answers_nobody():
    made = MetricsPort(Page(), "127.0.0.1", 0)
    silent = connect(made.port)
    made.stop()
    with pytest.raises(OSError, match="refused"):
        connect(made.port)
    silent.close()
