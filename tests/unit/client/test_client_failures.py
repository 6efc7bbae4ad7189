"""Invalid arguments of the blocking client, and failures over gRPC."""

import math
import signal
import threading

import numpy as np
import pytest

import warpfit
from support.servers.client_examples import X
from support.servers.loopback import serve
from warpfit import testing
from warpfit.transport.connection import RetryPolicy, TransportConfig


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"loss": "mape"}, "BAD_ENUM"),
        ({"loss": "mse"}, "TARGET_MISSING"),
        ({"correlation": True}, "TARGET_MISSING"),
        ({"precision": "sloppy"}, "BAD_ENUM"),
        ({"tier": "gpu"}, "BAD_ENUM"),
        ({"rows": slice(0, 10, 2)}, "BAD_ROWS"),
        ({"rows": slice(5, 5)}, "ROWS_OUT_OF_RANGE"),
        ({"rows": (0, 61)}, "ROWS_OUT_OF_RANGE"),
        ({"timeout": 0}, "BAD_TIMEOUT"),
        ({"timeout": math.nan}, "BAD_TIMEOUT"),
    ],
)
def test_bad_options_are_refused_before_anything_is_sent(client, server, options, reason):
    data = client.upload(X)
    sent = len(server.calls)
    with pytest.raises(warpfit.InvalidArgumentError) as caught:
        client.evaluate(data, "x1", **options)
    assert caught.value.reason == reason
    assert caught.value.remedy
    assert len(server.calls) == sent


# --------------------------------------------------------------------------------------- over gRPC


def test_a_port_without_a_server_is_unavailable():
    with (
        warpfit.connect("127.0.0.1:1", retry=RetryPolicy(total_seconds=0)) as client,
        pytest.raises(warpfit.UnavailableError, match="nothing listens at"),
    ):
        client.info()


def test_a_closed_client_says_so(server):
    with serve(server) as (address, _):
        client = warpfit.connect(address)
        client.close()
        with pytest.raises(warpfit.InvalidArgumentError, match="closed"):
            client.info()


def test_a_message_over_the_servers_limit_names_both_sizes(server):
    with serve(server, message_bytes=2000) as (address, _), warpfit.connect(address) as client:
        data = client.upload(X)
        with pytest.raises(warpfit.ResourceExhaustedError) as caught:
            client.evaluate(data, " + ".join(["x1"] * 300))
    assert caught.value.reason == "MESSAGE_TOO_LARGE"
    assert caught.value.needed > caught.value.available == 2000


def test_a_message_over_the_clients_limit_names_both_sizes():
    transport = TransportConfig(message_bytes=2000, chunk_bytes=1000)
    server = testing.InProcessServer(chunk_bytes=5000)
    with serve(server) as (address, _), warpfit.connect(address, transport=transport) as client:
        data = client.upload(X)
        with pytest.raises(warpfit.ResourceExhaustedError) as caught:
            client.evaluate(data, ["p1*x1"], [np.ones((30, 1))])
    assert caught.value.available == 2000


def test_a_deadline_ends_a_call_that_hangs(server):
    with serve(server) as (address, servicer), warpfit.connect(address) as client:
        data = client.upload(X)
        servicer.hang = True
        with pytest.raises(warpfit.DeadlineExceededError):
            client.evaluate(data, "x1", timeout=0.2)
        assert servicer.cancelled.wait(10)


def test_an_interrupt_cancels_the_call_on_the_server(server):
    with serve(server) as (address, servicer), warpfit.connect(address) as client:
        data = client.upload(X)
        servicer.hang = True
        main = threading.main_thread().ident
        timer = threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            client.evaluate(data, "x1")
        timer.join()
        assert servicer.cancelled.wait(10)
