"""Failures of calls: mistakes of callers, errors of servers, and what is tried again."""

import random
import re
import signal
import threading
import time
from functools import partial

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import warpfit
from support.servers.examples import EXPRESSIONS, PARAMETERS, QUICK, X, expected_values
from support.servers.loopback import fail_calls, serve
from warpfit import Batch, LossFunction, Population, Program, WarpfitError, testing
from warpfit.transport.call import Deadline
from warpfit.transport.connection import RetryPolicy, TransportConfig
from warpfit.transport.failover import NOBODY_THERE, Retries


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"loss": "mape"}, "BAD_ENUM"),
        ({"loss": "mse"}, "TARGET_MISSING"),
        ({"correlation": True}, "TARGET_MISSING"),
        ({"precision": "sloppy"}, "BAD_ENUM"),
        ({"rows": slice(0, 10, 2)}, "BAD_ROWS"),
        ({"rows": (0, 61)}, "ROWS_OUT_OF_RANGE"),
        ({"timeout": 0}, "BAD_TIMEOUT"),
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


def test_a_closed_client_says_so(server):
    with serve(server) as (address, _):
        client = warpfit.connect(address)
        client.close()
        with pytest.raises(warpfit.InvalidArgumentError, match="closed"):
            client.info()


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


def test_retries_end(connect, server):
    with connect(retry=RetryPolicy(total_seconds=0.05, initial_backoff=0.01)) as client:
        server.fail(calls=1000)
        with pytest.raises(warpfit.UnavailableError) as caught:
            client.info()
    assert caught.value.reason == "ENGINE_RESTARTING"
    assert len(server.calls) > 1


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


def test_a_busy_servers_retry_time_is_kept(connect, server):
    with connect(retry=RetryPolicy(initial_backoff=0.001, jitter=0.0)) as client:
        data = client.upload(X)
        server.fail(calls=2, error=BUSY)
        started = time.monotonic()
        client.evaluate(data, "x1")
        assert time.monotonic() - started >= 0.3
        assert server.calls.count("Evaluate") == 3


@pytest.mark.parametrize(
    ("policy", "error"),
    [
        (RetryPolicy(total_seconds=0.1), BUSY),
        (RetryPolicy(total_seconds=0), BUSY),
        (QUICK, warpfit.ResourceExhaustedError("over a limit", "TOO_MANY_PROGRAMS")),
    ],
)
def test_calls_that_cannot_succeed_are_not_retried(connect, server, policy, error):
    with connect(retry=policy) as client:
        data = client.upload(X)
        server.fail(error=error)
        with pytest.raises(warpfit.ResourceExhaustedError) as caught:
            client.evaluate(data, "x1")
        assert (caught.value.reason, caught.value.retry_after) == (error.reason, error.retry_after)
        assert server.calls.count("Evaluate") == 1


def test_wait_ready_outlasts_the_retry_policy(connect, server):
    with connect(retry=RetryPolicy(total_seconds=0, initial_backoff=0.001)) as client:
        server.fail(calls=5)
        assert client.wait_ready(10).engine == "reference"
        server.fail(calls=100_000)
        with pytest.raises(warpfit.DeadlineExceededError):
            client.wait_ready(0.05)


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


# ------------------------------------------------------------------------------ mistakes of callers


ROWS = np.random.default_rng(2).normal(size=(20, 2))
U1, F8, U4 = np.uint8, np.float64, np.uint32
BOTH = Program.parameter(0), Program.parameter(1)


@pytest.fixture(scope="module")
def bound():
    with testing.client() as client:
        yield client, client.upload(ROWS, ROWS[:, 0])


def fit(**options):
    return lambda c, d: c.optimize(d, ["p1*x1 + p2"], [[1.0, 0.0]], **options)


def evaluate(*arguments, **options):
    return lambda c, d: c.evaluate(d, *(arguments or (["x1"],)), **options)


CASES = {
    "no keyword 'los'. Did you mean loss": evaluate(los="mse"),
    "Did you mean max_iterations": fit(max_iter=5),
    "Did you mean tolerance": lambda c, d: c.simplify(d, ["x1"], tolerence=0.1),
    "Did you mean names": lambda c, d: c.upload(ROWS, name=("a", "b")),
    "no keyword 'columns'": lambda c, d: c.open("a.parquet", columns=["a"]),
    "rows is '0:5'": evaluate(rows="0:5"),
    "rows is array": evaluate(rows=np.arange(5)),
    r"rows is array\(\[ True[^\n]{,60}\.\.\. Give": evaluate(rows=np.ones(60, bool)),
    r"rows is \(0.0, 5": evaluate(rows=(0.0, 5.5)),
    "timeout is '5'": evaluate(timeout="5"),
    "no vector of numbers: 1.0": evaluate(list(BOTH), [1.0, 2.0]),
    "no vector of numbers: 2.0": evaluate("p1", 2.0),
    "codes .* of dtype int64": evaluate(Population(np.array([1]), np.zeros(1), np.ones(1, U4))),
    "values .* of dtype float32": evaluate(
        Batch(*(np.ones(1, kind) for kind in (U1, "f4", U4)), np.zeros(1, U4), np.empty(0))
    ),
    r"bounds is \[\(0, 2\), \(0, 3\)\]. Give a tuple": fit(bounds=[(0, 2), (0, 3)]),
    r"bounds is \(0,\)": fit(bounds=(0,)),
    r"fixed is \[\[2\]\]. Give a truth value": fit(fixed=[[2]]),
    "fixed is 'p1'. Give a truth value": fit(fixed="p1"),
    "expressions is a set. Give a list": evaluate({"x1"}),
    "y has 0 dimensions. Give one number for each row": lambda c, d: c.upload(ROWS, 1.0),
    "weights has 0 dimensions. Give one number": lambda c, d: c.upload(ROWS, ROWS[:, 0], 2.0),
    "name 'e1'. Variables are e, b": lambda c, d: warpfit.parse("e1", ("e", "b")),
    "progress is True": fit(progress=True),
    r"p2 has a bound that is not a number": fit(bounds=([[0.0, np.nan]], np.inf)),
    "p1 has bounds between which no number": fit(bounds=(np.inf, np.inf)),
    "p1 has a lower bound above its upper": fit(bounds=(1.0, 0.0)),
    "data is of type int": lambda c, d: c.release(5),
    "names is 'ab'": lambda c, d: c.upload(ROWS, names="ab"),
    r"names is \(1, 2\)": lambda c, d: c.upload(ROWS, names=(1, 2)),
    "no numbers": lambda c, d: Program(["a"], [0.0]),
    "no whole number from 0 to 255": lambda c, d: Program([1.5], [0.0]),
    "whole number from 0": lambda c, d: Program([300], [0.0]),
    "'plus1' is no operator": lambda c, d: Program.apply("plus1", *BOTH),
    "an operand of sin is no Program": lambda c, d: Program.apply("sin", "x1"),
    "cannot be of type NoneType": lambda c, d: warpfit.parse(None),
    "there is text in it": lambda c, d: BOTH[0].bind(["a"]),
    "defined by two texts": lambda c, d: warpfit.define("mine", 3),
    "a row loss is a Program": lambda c, d: LossFunction("d"),
    "tls is 'ca.pem'": lambda c, d: warpfit.connect("a:1", tls="ca.pem"),
    "visible ASCII": lambda c, d: warpfit.connect("localhost:1", token="a\nb"),
    "retry is 3": lambda c, d: warpfit.connect("a:1", retry=3),
    "transport is {}": lambda c, d: warpfit.connect("a:1", transport={}),
}


@pytest.mark.parametrize("message", CASES)
def test_a_mistake_is_told(bound, message):
    with pytest.raises(WarpfitError, match=message) as raised:
        CASES[message](*bound)
    assert raised.value.reason


def fitted(c, d, **number):
    return fit(**number)(c, d)


def made(kind):
    return lambda c, d, **number: kind(**number)


#: By the name of a number: a call that has it, and values that it does not take.
NUMBERS = {
    **dict.fromkeys(("max_iterations", "restarts", "seed"), (fitted, np.inf, 5.5)),
    **dict.fromkeys(("gradient_tolerance", "loss_tolerance", "step_tolerance"), (fitted, np.inf)),
    "intervals": (fitted, 1.0),
    "held_out": (lambda c, d, **number: c.propose(d, ["p1*x1"], **number), 1.0),
    "restarts ": (lambda c, d, **number: c.propose(d, ["p1*x1"], **number), np.inf, 1.5),
    "tolerance": (lambda c, d, **number: c.simplify(d, ["x1"], **number),),
    "level": (lambda c, d, level: c.optimize(d, "p1*x1", covariance=True).band(ROWS, level=level),),
    "sigma": (made(warpfit.losses.gaussian), 0),
    "delta": (made(warpfit.losses.huber), 0),
    "q": (made(warpfit.losses.quantile), 1.0),
    "wait": (made(partial(warpfit.connect, "a:1")),),
    "replicas": (made(partial(warpfit.connect, "a:1")), 0, 1.5),
    **dict.fromkeys(("jitter", "total_seconds"), (made(RetryPolicy),)),
    "keepalive_seconds": (made(TransportConfig), np.inf),
    **dict.fromkeys(("message_bytes", "chunk_bytes"), (made(TransportConfig), 0, 1000.5)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_what_is_no_number_in_its_range_is_told(bound, name):
    call, *further = NUMBERS[name]
    for value in (np.nan, -1, "a", *further):
        with pytest.raises(WarpfitError, match=f"{name.strip()} is {value!r}") as raised:
            call(*bound, **{name.strip(): value})
        assert raised.value.reason


def test_numbers_of_numpy_are_numbers(bound):
    client, data = bound
    rows = np.int64(0), np.int64(5)
    assert client.evaluate(data, ["x1"], rows=rows, timeout=np.float32(5)).shape == (5, 1)
    assert client.evaluate(data, ["x1"], timeout=np.inf).shape == (20, 1)
    assert Deadline(1e10).remaining() is None
    one = np.int64(1)
    assert client.optimize(data, ["p1*x1"], [[one]], max_iterations=one).iterations[0] <= 1
    warpfit.connect("127.0.0.1:1", replicas=np.int64(2), wait=np.float32(1.0)).close()
