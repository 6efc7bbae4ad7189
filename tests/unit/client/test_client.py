"""Calls of both clients, in process and over gRPC: answers, uploads, failures and retries."""

import asyncio
import inspect
import random
import re
import signal
import sys
import threading
import time
from contextlib import nullcontext

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import warpfit
from support.refusals import refused
from support.servers.examples import EXPRESSIONS, PARAMETERS, QUICK, X, Y, expected_values
from support.servers.loopback import fail_calls, serve
from warpfit import aio, testing
from warpfit.transport import failover
from warpfit.transport.call import Deadline
from warpfit.transport.connection import RetryPolicy, TransportConfig
from warpfit.transport.failover import NOBODY_THERE, Retries


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_values_are_rows_by_expressions_without_a_copy(client, dtype):
    data, wanted = client.upload(X, dtype=dtype), expected_values(dtype)
    values = client.evaluate(data, EXPRESSIONS, PARAMETERS)
    assert values.dtype == dtype and values.T.flags.c_contiguous
    assert values.T.base is not None
    np.testing.assert_array_equal(values, wanted)
    for rows in ((3, 7), slice(3, 7), slice(None, 5), slice(-4, None), (0, 60), None):
        found = client.evaluate(data, EXPRESSIONS, PARAMETERS, rows=rows)
        of = slice(*rows) if isinstance(rows, tuple) else rows or slice(None)
        np.testing.assert_array_equal(found, wanted[of])


def test_a_single_expression_may_stand_alone(client):
    data, program = client.upload(X), warpfit.parse("x1*p1 - p2")
    for expressions, parameters in (
        *(("x1*p1 - p2", np.array([2.0, 1.0])), (program, (2.0, 1.0))),
        ([program], np.array([[2.0, 1.0]])),
        ([program], [[[2.0, 1.0]]]),  # one vector in two dimensions keeps its axis
    ):
        values = client.evaluate(data, expressions, parameters)
        assert values.shape == (1,) * (np.ndim(parameters) == 3) + (len(X), 1)
        np.testing.assert_allclose(values.reshape(-1), X[:, 0] * 2 - 1, rtol=1e-6)


def test_large_data_sets_are_read_again_and_must_not_have_changed(client, server, monkeypatch):
    monkeypatch.setattr(warpfit.dataset.canonical, "_COPIED_BYTES", 0)
    data = client.upload(own := X.copy(), Y)
    server.forget()
    np.testing.assert_array_equal(client.evaluate(data, "x2")[:, 0], own[:, 1])
    server.forget()
    own[3, 1] += 1
    refused("DATA_CHANGED", client.evaluate, data, "x2")


def test_progress_reports_every_chunk_and_resident_content_is_not_sent_again(server):
    seen, again = [], []
    transport = TransportConfig(chunk_bytes=100)
    with serve(server) as (address, _), warpfit.connect(address, transport=transport) as client:
        client.upload(X, progress=lambda *progress: seen.append(progress))
        client.upload(X.astype(np.float64), progress=lambda *progress: again.append(progress))
        assert server.calls.count("UploadVariables") == 1
        client.upload(X, dtype="float64")
        assert server.calls.count("UploadVariables") == 2
    assert seen == [(min(done, 720), 720) for done in range(0, 801, 100)]
    assert again == [(720, 720)]


@pytest.mark.parametrize("call", ["upload", "optimize", "propose", "search"])
@pytest.mark.parametrize(
    "error",
    [
        *(LookupError("no bar"), StopIteration("no bar is left")),
        grpc.RpcError("another service's"),
        warpfit.UnavailableError("another server is away", "CONNECTION_REFUSED"),
        warpfit.ResourceExhaustedError("another server is busy", "BUSY", retry_after=0.01),
        warpfit.DeadlineExceededError("another call is late", "DEADLINE_EXCEEDED"),
        SystemExit(3),
    ],
)
def test_what_a_progress_callback_raises_reaches_the_caller_at_once(client, server, error, call):
    told, cause = [], LookupError("why")

    def fail(*progress):
        told.append(progress)
        if call != "propose" or len(told) == 2:  # the first time no call is in flight
            raise error from cause

    data = client.upload(X, Y)
    calls = {
        "upload": lambda: client.upload(X + 1.0, progress=fail),
        "optimize": lambda: client.optimize(data, "p1 * x1", [1.0], progress=fail),
        "propose": lambda: client.propose(data, ["p1 * x1", "p1 + x1"], progress=fail),
        "search": lambda: client.search(data, generations=1, progress=fail),
    }
    sent = len(server.calls)
    with pytest.raises(type(error)) as caught:
        calls[call]()
    assert caught.value is error and caught.value.__cause__ is cause
    assert len(told) == 1 + (call == "propose"), "it is not called again"
    assert len(server.calls) - sent <= {"upload": 2, "optimize": 1}.get(call, 9)
    assert client.upload(X).layout.rows == 60


def test_progress_true_draws_a_bar(client, capsys, monkeypatch):
    client.upload(X, progress=True)
    assert "100%" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "tqdm", None)
    refused("pip install 'tqdm'", client.upload, X, progress=True)


def test_a_with_block_gives_back_and_the_owner_removes(client, server):
    with client.upload(X) as data:
        assert server.holds(data.content_id) and "60 rows x 3 variables" in repr(data)
    assert server.calls[-1] == "ReleaseVariables"
    assert server.holds(data.content_id), "others may use the same content"
    client.release(data, everywhere=True)
    assert not server.holds(data.content_id)
    for everywhere in (False, True):
        client.release(data, everywhere=everywhere)  # a second release is no error
    before = server.calls.count("ReleaseVariables")
    with client.upload(X):
        server.fail(1000)
    assert server.calls.count("ReleaseVariables") == before + 1, "it is not worth waiting for"


def test_a_data_set_that_is_evicted_again_and_again_is_uploaded_again(client, server, monkeypatch):
    data, pauses = client.upload(X), []
    monkeypatch.setattr(failover.Failover, "sleep", lambda _, seconds: pauses.append(seconds))
    evaluate, evictions = server._evaluate, iter(range(20))

    def evict(message):
        if next(evictions, None) is not None:
            server.forget()
        return evaluate(message)

    monkeypatch.setattr(server, "_evaluate", evict)
    np.testing.assert_array_equal(client.evaluate(data, "x1")[:, 0], X[:, 0])
    assert len(pauses) == 19, "between uploads"
    assert max(pauses) <= 1
    monkeypatch.setattr(failover, "_MOST_UPLOADS", 5)
    evictions = iter(range(10**6))
    with pytest.raises(warpfit.DatasetNotFoundError):
        client.evaluate(data, "x1")
    monkeypatch.setattr(failover, "_MOST_UPLOADS", 10**6)
    with pytest.raises(warpfit.DeadlineExceededError, match="had to be uploaded"):
        client.evaluate(data, "x1", timeout=0.3)


@pytest.mark.parametrize("made", [warpfit.connect, warpfit.connect_async])
def test_a_call_continues_the_callers_span(server, made):
    trace = pytest.importorskip("opentelemetry.trace")
    span = trace.SpanContext(0x4BF9, 0x00F0, is_remote=False, trace_flags=trace.TraceFlags(1))
    sent = []

    async def body(address, servicer):
        client = made(address)

        async def call(method, *arguments, **options):
            found = getattr(client, method)(*arguments, **options)
            found = await found if inspect.isawaitable(found) else found
            sent.append(servicer.metadata.get("traceparent"))
            return found

        data = await call("upload", X, Y)
        await call("evaluate", data, "x1", loss="mse")
        with trace.use_span(trace.NonRecordingSpan(span)):
            for options in ({"loss": "mse"}, {}):
                await call("evaluate", data, "x1", **options)
            await call("optimize", data, "p1*x1", [1.0])
            await call("info")
        await call("evaluate", data, "x1", loss="mse")
        await call("close")

    with serve(server) as (address, servicer):
        asyncio.run(body(address, servicer))
    parent = f"00-{0x4BF9:032x}-{0x00F0:016x}-01"
    assert sent[:-1] == [None, None, *[parent] * 4, None]


LINE = X[:, 0] - X[:, 1]


@pytest.fixture
def run(server):
    def run(test):
        async def body(address, servicer):
            async with warpfit.connect_async(address, retry=QUICK) as client:
                return await test(client, servicer)

        with serve(server) as served:
            return asyncio.run(body(*served))

    return run


def test_values_and_losses_also_after_failures(run, server):
    async def body(client, _):
        async with await client.upload(X, LINE, names=["a", "b", "c"]) as data:
            server.forget()
            fail_calls(server, "Evaluate", None, None)
            values = await client.evaluate(data, ["a + p1", "b"], [[1.0], []])
            losses = await client.evaluate(data, "a - b", loss="mse")
            both = await client.run(data, "a", loss="sse", values=True, rows=slice(0, 3))
            return values, losses, both

    values, losses, both = run(body)
    np.testing.assert_array_equal(values, np.stack([X[:, 0] + np.float32(1), X[:, 1]], axis=1))
    np.testing.assert_allclose(losses, [0.0], atol=1e-12)
    assert both.values.shape == (3, 1) and both.losses.shape == (1,)
    assert server.calls.count("Evaluate") == 6
    assert server.calls.count("UploadVariables") == 2


def test_preparing_an_upload_leaves_the_event_loop_free(run, monkeypatch):
    threads, build = [], warpfit.calls.arguments.build_dataset

    def recorded(*arguments, **options):
        threads.append(threading.current_thread())
        return build(*arguments, **options)

    monkeypatch.setattr(warpfit.calls.arguments, "build_dataset", recorded)
    run(lambda client, _: client.upload(X))
    assert threads != [threading.main_thread()]


def test_more_calls_than_threads_are_answered_and_no_event_loop_is_kept(server):
    client = testing.async_client(server)

    async def body():
        data = await client.upload(X, LINE)
        calls = (client.evaluate(data, "x1 - x2", loss="sse") for _ in range(300))
        return np.concatenate(await asyncio.gather(*calls))

    np.testing.assert_allclose(asyncio.run(body()), np.zeros(300), atol=1e-10)
    assert asyncio.run(client.info()) == asyncio.run(client.info())
    asyncio.run(client.close())


def test_waiting_for_a_thread_counts_against_the_timeout(run, monkeypatch):
    monkeypatch.setattr(aio, "_MOST_CALLS", 1)

    async def body(client, servicer):
        data = await client.upload(X)
        servicer.hang = True
        # The first one hangs; while it has the only thread the others' time passes.
        calls = [client.evaluate(data, "x1", timeout=seconds) for seconds in (0.5, 0.2, 0.2)]
        return await asyncio.gather(*calls, return_exceptions=True)

    assert {*map(type, run(body))} == {warpfit.errors.DeadlineExceededError}


def test_cancelling_a_task_cancels_the_call_on_the_server(run):
    async def body(client, servicer):
        data = await client.upload(X)
        servicer.hang = True
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.evaluate(data, "x1"), 0.3)
        assert await asyncio.to_thread(servicer.cancelled.wait, 10)

    run(body)


def test_a_closed_client_says_so(server):
    with serve(server) as (address, _):
        client = warpfit.connect(address)
        client.close()
        refused("closed", client.info)


@pytest.mark.parametrize(
    ("limit", "message_bytes", "arguments"),
    [(2000, 4 << 20, [" + ".join(["x1"] * 300)]), (4 << 20, 2000, [["p1*x1"], [np.ones((30, 1))]])],
    ids=["of the server", "of the client"],
)
def test_a_message_over_a_limit_names_both_sizes(limit, message_bytes, arguments):
    server = testing.InProcessServer(chunk_bytes=5000)
    transport = TransportConfig(message_bytes=message_bytes, chunk_bytes=1000)
    with serve(server, limit) as (address, _):
        client = warpfit.connect(address, transport=transport)
        with client, pytest.raises(warpfit.ResourceExhaustedError) as caught:
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


def test_every_method_is_retried(client, server):
    data = client.upload(X)
    for call, ask in (
        *(("GetVariables", lambda: client.upload(X)), ("GetServerInfo", client.info)),
        ("ReleaseVariables", lambda: client.release(data, everywhere=True)),
    ):
        before = server.calls.count(call)
        fail_calls(server, call, None, None)
        ask()
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
        warpfit.UnauthenticatedError("who?", "NO_CREDENTIALS"),
        warpfit.PermissionDeniedError("no", "NOT_ALLOWED"),
        *(warpfit.CancelledError("stopped", "CANCELLED"), warpfit.InternalError("bug", "INTERNAL")),
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


def test_every_call_that_waits_has_a_deadline(client, server):
    data = client.upload(X)
    server.fail(calls=1000)
    calls = (client.upload, [X]), (client.open, ["a.parquet"]), (client.evaluate, [data, "x1"])
    for call, arguments in calls:
        with pytest.raises(warpfit.DeadlineExceededError, match="engine is restarting") as caught:
            call(*arguments, timeout=0.15)
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


BUSY = warpfit.ResourceExhaustedError("busy", "QUEUE_FULL", retry_after=0.15)


@pytest.mark.parametrize(
    ("policy", "error", "attempts"),
    [
        (RetryPolicy(initial_backoff=0.001, jitter=0.0), BUSY, 3),
        *((RetryPolicy(total_seconds=0.1), BUSY, 1), (RetryPolicy(total_seconds=0), BUSY, 1)),
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
        with nullcontext() if attempts > 1 else pytest.raises(warpfit.ResourceExhaustedError):
            client.evaluate(data, "x1")
        assert attempts == 1 or time.monotonic() - started >= 0.3
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


@given(st.integers(1, 9_999), st.floats(0, 0.999), st.floats(0.001, 1), st.floats(0, 1))
def test_pauses_grow_within_bounds(failures, draw, initial, jitter):
    policy = RetryPolicy(initial_backoff=initial, maximum_backoff=2.0, jitter=jitter)
    pause = policy.pause(failures, draw)
    assert 0 <= pause <= 2.0 and pause >= initial * (1 - jitter) - 1e-12
    assert policy.pause(failures + 1, draw) >= pause
