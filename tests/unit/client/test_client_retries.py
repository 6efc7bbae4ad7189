"""Retries of the blocking client."""

import time

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import warpfit
from support.servers.client_examples import EXPRESSIONS, PARAMETERS, QUICK, X, Y, expected_values
from warpfit import testing
from warpfit.transport.connection import RetryPolicy


def test_unavailable_is_retried(client, server):
    data = client.upload(X)
    server.fail(calls=3)
    np.testing.assert_array_equal(client.evaluate(data, EXPRESSIONS, PARAMETERS), expected_values())
    assert server.calls.count("Evaluate") == 4


@pytest.mark.parametrize("method", ["upload", "info", "release"])
def test_every_method_is_retried(client, server, method):
    data = client.upload(X)
    server.fail(calls=2)
    arguments = {"upload": [X], "info": [], "release": [data]}[method]
    getattr(client, method)(*arguments, **({"everywhere": True} if method == "release" else {}))
    assert len(server.calls) == 2 + 3


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


def test_the_deadline_covers_all_attempts(connect, server):
    with connect(retry=RetryPolicy(initial_backoff=0.02)) as client:
        data = client.upload(X)
        server.fail(calls=1000)
        with pytest.raises(warpfit.DeadlineExceededError, match="engine is restarting") as caught:
            client.evaluate(data, "x1", timeout=0.2)
    assert caught.value.__cause__ is None


def test_lost_data_are_uploaded_again(client, server):
    data = client.upload(X, Y)
    server.forget()
    np.testing.assert_array_equal(client.evaluate(data, EXPRESSIONS, PARAMETERS), expected_values())
    assert server.calls[-3:] == ["Evaluate", "UploadVariables", "Evaluate"]


def test_a_handle_works_with_another_client_and_server(client):
    data = client.upload(X)
    with testing.client() as other:
        np.testing.assert_array_equal(other.evaluate(data, "x2")[:, 0], X[:, 1])


def test_data_that_are_lost_each_time_are_uploaded_again_until_the_deadline(client, server):
    data = client.upload(X)
    lost = warpfit.DatasetNotFoundError("gone", "DATASET_NOT_FOUND")
    server.forget()
    answer = server.answer

    def forgetful(call):
        if call.method == "Evaluate":
            server.fail(error=lost)
        return answer(call)

    server.answer = forgetful
    with pytest.raises(warpfit.DeadlineExceededError, match=r"evicted|Deadline Exceeded"):
        client.evaluate(data, "x1", timeout=1.0)
    assert server.calls.count("UploadVariables") > 1 + 3


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


def test_a_deadline_before_the_servers_retry_time(connect, server):
    with connect() as client:
        data = client.upload(X)
        server.fail(error=BUSY)
        with pytest.raises(warpfit.DeadlineExceededError, match="busy"):
            client.evaluate(data, "x1", timeout=0.1)


def test_wait_ready_outlasts_the_retry_policy(connect, server):
    with connect(retry=RetryPolicy(total_seconds=0, initial_backoff=0.001)) as client:
        server.fail(calls=5)
        assert client.wait_ready(10).engine == "reference"
        server.fail(calls=100_000)
        with pytest.raises(warpfit.DeadlineExceededError):
            client.wait_ready(0.05)


@given(
    st.integers(1, 10_000), st.floats(0, 1, exclude_max=True), st.floats(0.001, 1), st.floats(0, 1)
)
def test_pauses_grow_within_bounds(failures, draw, initial, jitter):
    policy = RetryPolicy(initial_backoff=initial, maximum_backoff=2.0, jitter=jitter)
    pause = policy.pause(failures, draw)
    assert 0 <= pause <= 2.0
    assert pause >= initial * (1 - jitter) - 1e-12
    assert policy.pause(failures + 1, draw) >= pause
