"""Failures of calls: mistakes of callers, errors of servers, and what is tried again."""

import random
import re
import signal
import threading
import time

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import warpfit
from support.refusals import refused
from support.servers.examples import EXPRESSIONS, PARAMETERS, QUICK, X, expected_values
from support.servers.loopback import fail_calls, serve
from warpfit import testing
from warpfit.transport.call import Deadline
from warpfit.transport.connection import RetryPolicy, TransportConfig
from warpfit.transport.failover import NOBODY_THERE, Retries

# --------------------------------------------------------------------------------------- over gRPC


def test_a_closed_client_says_so(server):
    with serve(server) as (address, _):
        client = warpfit.connect(address)
        client.close()
        refused("closed", client.info)


@pytest.mark.parametrize(
    ("limit", "message_bytes", "arguments"),
    [
        (2000, 4 << 20, [" + ".join(["x1"] * 300)]),
        (4 << 20, 2000, [["p1*x1"], [np.ones((30, 1))]]),
    ],
    ids=["of the server", "of the client"],
)
def test_a_message_over_a_limit_names_both_sizes(limit, message_bytes, arguments):
    server = testing.InProcessServer(chunk_bytes=5000)
    transport = TransportConfig(message_bytes=message_bytes, chunk_bytes=1000)
    with (
        serve(server, limit) as (address, _),
        warpfit.connect(address, transport=transport) as client,
        pytest.raises(warpfit.ResourceExhaustedError) as caught,
    ):
        client.evaluate(client.upload(X), *arguments)
    assert (caught.value.reason, caught.value.available) == ("MESSAGE_TOO_LARGE", 2000)
    assert caught.value.needed is None or caught.value.needed > 2000


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


@pytest.mark.parametrize("timeout", [None, 20.0], ids=["open call", "call of its own"])
def test_interrupts_at_any_moment_leave_a_client_that_works(server, timeout):
    """An interrupt once left a condition of gRPC locked, in one of 15 trials."""

    class Interrupt(BaseException):
        pass

    def interrupt(*_):
        raise Interrupt

    moments, main, number = random.Random(5), threading.main_thread().ident, signal.SIGUSR1
    before = signal.signal(number, interrupt)
    with serve(server) as (address, _), warpfit.connect(address) as client:
        data, interrupted = client.upload(X), 0
        for _ in range(80):
            delay = 0.002 + 0.015 * moments.random()
            timer = threading.Timer(delay, signal.pthread_kill, (main, number))
            try:
                timer.start()
                while timer.is_alive():
                    client.evaluate(data, "x1", timeout=timeout)
                timer.join()
            except Interrupt:
                interrupted += 1
        assert signal.getsignal(number) is interrupt
        assert interrupted > 70, "Python ignores what is raised in a __del__"
        signal.signal(number, before)
        values = []
        later = threading.Thread(
            target=lambda: values.append(client.evaluate(data, "x1")), daemon=True
        )
        later.start()
        later.join(20)
        assert values, "the call hangs"
        np.testing.assert_array_equal(client.evaluate(data, "x1"), values[0])


# ------------------------------------------------------------------------------ what is tried again


@pytest.mark.parametrize(
    ("method", "call"),
    [("upload", "GetVariables"), ("info", "GetServerInfo"), ("release", "ReleaseVariables")],
)
def test_every_method_is_retried(client, server, method, call):
    data = client.upload(X)
    before = server.calls.count(call)
    fail_calls(server, call, None, None)
    arguments = {"upload": [X], "info": [], "release": [data]}[method]
    getattr(client, method)(*arguments, **({"everywhere": True} if method == "release" else {}))
    assert server.calls.count(call) == before + 3
    server.fail(calls=3)  # also when what fails is the question whether the server is back
    np.testing.assert_array_equal(client.evaluate(data, EXPRESSIONS, PARAMETERS), expected_values())


def test_a_server_that_is_gone_is_waited_for_with_a_word(server, caplog):
    with serve(server) as (address, _):
        client = warpfit.connect(address)
        client.info()
    main = threading.main_thread().ident
    timer = threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT))
    with client:
        with pytest.raises(warpfit.UnavailableError) as caught:
            client.info(timeout=0.3)
        assert caught.value.reason in NOBODY_THERE
        (line,) = caplog.messages
        assert re.search(r"waiting for a server, for up to 0\.[0-3] s", line)
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            client.info()
        assert len(caplog.messages) == 1, "once for all calls of some seconds"
    timer.join()


def test_retries_end_and_wait_ready_outlasts_them(connect, server):
    with connect(retry=RetryPolicy(total_seconds=0.05, initial_backoff=0.01)) as client:
        server.fail(calls=5)
        assert client.wait_ready(10).engine == "reference"
        server.fail(calls=100_000)
        calls = len(server.calls)
        with pytest.raises(warpfit.UnavailableError) as caught:
            client.info()
        assert caught.value.reason == "ENGINE_RESTARTING"
        assert len(server.calls) > calls + 1
        with pytest.raises(warpfit.DeadlineExceededError):
            client.wait_ready(0.05)


@pytest.mark.parametrize(
    "error",
    [
        warpfit.ResourceExhaustedError("too many", "TOO_MANY_REQUESTS", needed=5, available=4),
        warpfit.InvalidArgumentError("wrong", "BAD_ENUM", "Do better", "loss"),
        warpfit.ProgramError("wrong token", "BAD_INDEX", expression=3, token=0),
        warpfit.DeadlineExceededError("too late", "DEADLINE_EXCEEDED"),
        warpfit.CancelledError("stopped", "CANCELLED"),
        warpfit.UnauthenticatedError("who?", "NO_CREDENTIALS"),
        warpfit.PermissionDeniedError("no", "NOT_ALLOWED"),
        warpfit.InternalError("bug", "INTERNAL"),
    ],
)
def test_other_errors_keep_all_fields_and_are_not_retried(client, server, error):
    server.fail(error=error)
    with pytest.raises(type(error)) as caught:
        client.info()
    assert vars(caught.value) == vars(error)
    assert not isinstance(caught.value, grpc.RpcError)
    assert caught.value.__cause__ is None, "a traceback shows our error alone"
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert len(server.calls) == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.upload(X, timeout=0.15),
        lambda client: client.open("a.parquet", timeout=0.15),
        lambda client: client.info(timeout=0.15),
        lambda client: client.evaluate(testing.client().upload(X), "x1", timeout=0.15),
    ],
    ids=["upload", "open", "info", "evaluate"],
)
def test_every_call_that_waits_has_a_deadline(client, server, call):
    server.fail(calls=1000)
    with pytest.raises(warpfit.DeadlineExceededError, match="engine is restarting") as caught:
        call(client)
    assert caught.value.__cause__ is None


def test_a_late_attempt_says_why_the_ones_before_failed(client, server):
    data = client.upload(X)
    late = warpfit.DeadlineExceededError("too late", "DEADLINE_EXCEEDED", "Wait")
    fail_calls(server, "Evaluate", None, late)
    with pytest.raises(warpfit.DeadlineExceededError) as caught:
        client.evaluate(data, "x1")
    message = "too late; an attempt before failed: the engine is restarting"
    assert vars(caught.value) == {**vars(late), "message": message}
    assert caught.value.__cause__ is None

    server.forget()
    server.fail(error=warpfit.DatasetNotFoundError("gone", "DATASET_NOT_FOUND"))
    answer = server.answer

    def hang_after_upload(call):
        if server.calls[-1] == "UploadVariables":
            server.fail(error=late)
        return answer(call)

    server.answer = hang_after_upload
    with pytest.raises(warpfit.DeadlineExceededError, match="had to be uploaded 1 time"):
        client.evaluate(data, "x1")


BUSY = warpfit.ResourceExhaustedError("busy", "QUEUE_FULL", retry_after=0.15)


@pytest.mark.parametrize(
    ("policy", "error", "attempts"),
    [
        (RetryPolicy(initial_backoff=0.001, jitter=0.0), BUSY, 3),
        (RetryPolicy(total_seconds=0.1), BUSY, 1),
        (RetryPolicy(total_seconds=0), BUSY, 1),
        (QUICK, warpfit.ResourceExhaustedError("over a limit", "TOO_MANY_PROGRAMS"), 1),
    ],
)
def test_a_busy_servers_retry_time_is_kept_where_a_call_can_succeed(
    connect, server, policy, error, attempts
):
    with connect(retry=policy) as client:
        data = client.upload(X)
        server.fail(calls=2, error=error)
        started = time.monotonic()
        if attempts > 1:
            client.evaluate(data, "x1")
            assert time.monotonic() - started >= 0.3
        else:
            with pytest.raises(warpfit.ResourceExhaustedError) as caught:
                client.evaluate(data, "x1")
            assert caught.value is error or vars(caught.value) == vars(error)
        assert server.calls.count("Evaluate") == attempts


@pytest.mark.parametrize("timeout", [0.5, 5.0, 15.0])
def test_attempts_go_on_until_the_deadline(timeout):
    """A pause of up to a second was once taken for a reason to give up a second before."""
    policy = RetryPolicy(initial_backoff=30.0, maximum_backoff=30.0, jitter=0.0)
    away = warpfit.UnavailableError("nobody", "CONNECTION_REFUSED")
    pause = Retries(policy, Deadline(timeout)).pause_after(away, 20.0)
    assert timeout - 0.3 < pause <= timeout - 0.1
    busy = warpfit.ResourceExhaustedError("busy", "BUSY", retry_after=timeout)
    with pytest.raises(warpfit.DeadlineExceededError, match="busy"):
        Retries(policy, Deadline(timeout)).pause_after(busy, 20.0)
    with pytest.raises(warpfit.UnavailableError, match="nobody"):
        Retries(policy, Deadline(0.01)).pause_after(away, 20.0)


@given(
    st.integers(1, 10_000), st.floats(0, 1, exclude_max=True), st.floats(0.001, 1), st.floats(0, 1)
)
def test_pauses_grow_within_bounds(failures, draw, initial, jitter):
    policy = RetryPolicy(initial_backoff=initial, maximum_backoff=2.0, jitter=jitter)
    pause = policy.pause(failures, draw)
    assert 0 <= pause <= 2.0
    assert pause >= initial * (1 - jitter) - 1e-12
    assert policy.pause(failures + 1, draw) >= pause
