"""The blocking client, over the in-process transport and over real gRPC."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time

import grpc
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import warpfit
from support.loopback import serve
from warpfit import Program, reference, testing
from warpfit.config import RetryPolicy, TransportConfig

rng = np.random.default_rng(5)
X = rng.normal(size=(60, 3)).astype(np.float32)
Y = rng.normal(size=60).astype(np.float32)
WEIGHTS = rng.uniform(size=60).astype(np.float32)
EXPRESSIONS = ["x1 + p1*x2", "sin(x3) - 2", "p2/(p1 + x1^2)"]
PARAMETERS = [[0.5], [], [1.5, -2.0]]
QUICK = RetryPolicy(total_seconds=10, initial_backoff=0.001, maximum_backoff=0.01)


@pytest.fixture
def server():
    return testing.InProcessServer(chunk_bytes=256)


@pytest.fixture(params=["in process", "grpc"])
def connect(request, server):
    """Makes clients of ``server``."""
    if request.param == "in process":
        yield lambda **options: testing.client(server, **options)
        return
    with serve(server) as (address, _):
        yield lambda retry=QUICK, **options: warpfit.connect(address, retry=retry, **options)


@pytest.fixture
def client(connect):
    with connect() as made:
        yield made


def expected_values(dtype=np.float32, expressions=EXPRESSIONS, parameters=PARAMETERS):
    programs = [warpfit.parse(text) for text in expressions]
    return reference.evaluate(programs, X.T, parameters).T.astype(dtype)


# -------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_values_are_rows_by_expressions_and_share_the_wire_order(client, dtype):
    data = client.upload(X, dtype=dtype)
    values = client.evaluate(data, EXPRESSIONS, PARAMETERS)
    assert values.dtype == dtype
    assert values.T.flags.c_contiguous
    assert values.T.base is not None
    np.testing.assert_array_equal(values, expected_values(dtype))


@pytest.mark.parametrize("loss", list(warpfit.Loss))
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_losses_are_one_number_an_expression(client, loss, weights):
    data = client.upload(X, Y, weights)
    losses = client.evaluate(data, EXPRESSIONS, PARAMETERS, loss=loss.value)
    assert losses.dtype == np.float64
    expected = reference.loss(loss, expected_values().T, Y, weights)
    np.testing.assert_allclose(losses, expected, rtol=1e-12)


def test_parameter_vectors_give_a_leading_axis(client):
    data = client.upload(X, Y)
    vectors = [[[0.5], [1.0]], np.zeros((2, 0)), [[1.5, -2.0], [2.5, 0.0]]]
    answer = client.run(data, EXPRESSIONS, vectors, loss="sse", values=True)
    assert answer.values.shape == (2, len(X), 3)
    assert answer.losses.shape == (2, 3)
    second = expected_values(parameters=[entry[1] for entry in vectors])
    np.testing.assert_array_equal(answer.values[1], second)
    np.testing.assert_allclose(answer.losses[1], np.sum((second.T - Y) ** 2.0, axis=1), rtol=1e-5)


def test_one_vector_in_two_dimensions_keeps_the_axis(client):
    data = client.upload(X)
    assert client.evaluate(data, ["x1*p1"], [[[2.0]]]).shape == (1, len(X), 1)
    assert client.evaluate(data, ["x1*p1"], [[2.0]]).shape == (len(X), 1)


@pytest.mark.parametrize(
    ("expressions", "parameters"),
    [
        ("x1*p1 - p2", [2.0, 1.0]),
        ("x1*p1 - p2", np.array([2.0, 1.0])),
        (["x1*p1 - p2"], [2.0, 1.0]),
        (["x1*p1 - p2"], [[2.0, 1.0]]),
        (warpfit.parse("x1*p1 - p2"), (2.0, 1.0)),
        ([warpfit.parse("x1*p1 - p2")], np.array([[2.0, 1.0]])),
    ],
)
def test_a_single_expression_may_stand_alone(client, expressions, parameters):
    values = client.evaluate(client.upload(X), expressions, parameters)
    assert values.shape == (len(X), 1)
    np.testing.assert_allclose(values[:, 0], X[:, 0] * 2 - 1, rtol=1e-6)


def test_a_single_expression_with_several_vectors(client):
    values = client.evaluate(client.upload(X), "x1*p1", [[2.0], [3.0], [4.0]])
    assert values.shape == (3, len(X), 1)
    np.testing.assert_allclose(values[2, :, 0], X[:, 0] * 4, rtol=1e-6)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (slice(3, 7), (3, 7)),
        (slice(None, 5), (0, 5)),
        (slice(-4, None), (56, 60)),
        ((10, 20), (10, 20)),
        (None, (0, 60)),
    ],
)
def test_a_row_range_selects_rows(client, rows, expected):
    values = client.evaluate(client.upload(X), EXPRESSIONS, PARAMETERS, rows=rows)
    np.testing.assert_array_equal(values, expected_values()[slice(*expected)])


def test_run_returns_only_what_is_asked_for(client):
    data = client.upload(X, Y)
    assert client.run(data, "x1").losses is None
    assert client.run(data, "x1", loss="mse").values is None
    both = client.run(data, "x1", loss="mse", values=True)
    assert both.values.shape == (60, 1)
    assert both.losses.shape == (1,)
    assert both.timings.tier is warpfit.Tier.INTERPRETER


# --------------------------------------------------------------------------------------- upload


def test_a_data_frame_names_the_variables(client):
    frame = pd.DataFrame(X, columns=["bmi", "age", "blood pressure"])
    data = client.upload(frame, pd.Series(Y))
    assert data.names == ("bmi", "age", "blood pressure")
    np.testing.assert_array_equal(client.evaluate(data, "age")[:, 0], X[:, 1])
    assert client.upload(pd.DataFrame(X)).names == ()


def test_lists_and_integers_are_array_like(client):
    data = client.upload([[1, 2], [3, 4]], [1, 2], names=["a", "b"])
    np.testing.assert_array_equal(client.evaluate(data, "a*b")[:, 0], [2, 12])


@pytest.mark.parametrize(
    "bad",
    [
        [["a", "b"]],
        [[1, 2], [3]],
        pd.DataFrame({"a": [1.0], "b": ["text"]}),
        np.array([[1 + 2j]]),
        pd.DataFrame({"when": pd.to_datetime(["2020-01-01"])}),
    ],
)
def test_cells_that_are_no_numbers_are_refused(client, bad):
    with pytest.raises(warpfit.InvalidArgumentError) as caught:
        client.upload(bad)
    assert caught.value.reason == "NOT_NUMBERS"


def test_resident_content_is_not_sent_again(client, server):
    client.upload(X, Y)
    client.upload(X.astype(np.float64), Y)
    assert server.calls.count("UploadVariables") == 1
    client.upload(X, Y, dtype="float64")
    assert server.calls.count("UploadVariables") == 2


def test_progress_reports_every_chunk(server):
    with serve(server) as (address, _):
        transport = TransportConfig(chunk_bytes=100)
        seen = []
        with warpfit.connect(address, transport=transport) as client:
            client.upload(X, progress=lambda done, total: seen.append((done, total)))
            again = []
            client.upload(X, progress=lambda done, total: again.append((done, total)))
    assert seen == [(min(done, 720), 720) for done in range(0, 801, 100)]
    assert again == [(720, 720)]


def test_a_failing_progress_callback_reaches_the_caller(client, server):
    def fail(done, total):
        raise LookupError("no bar")

    with pytest.raises(LookupError, match="no bar"):
        client.upload(X, progress=fail)
    assert client.upload(X).layout.rows == 60


def test_progress_true_draws_a_bar(client, capsys):
    client.upload(X, progress=True)
    assert "100%" in capsys.readouterr().err


def test_progress_true_without_tqdm_says_so(client, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(warpfit.InvalidArgumentError, match="pip install tqdm"):
        client.upload(X, progress=True)


def test_a_handle_gives_its_data_back(client, server):
    with client.upload(X) as data:
        assert server.holds(data.content_id)
        assert "60 rows x 3 variables" in repr(data)
    assert not server.holds(data.content_id)
    client.release(data)  # a second release is no error


# --------------------------------------------------------------------------------------- retries


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
    getattr(client, method)(*arguments)
    assert len(server.calls) == 2 + 3


def test_retries_end(connect, server):
    with connect(retry=RetryPolicy(total_seconds=0.05, initial_backoff=0.01)) as client:
        server.fail(calls=1000)
        with pytest.raises(warpfit.UnavailableError) as caught:
            client.info()
    assert caught.value.reason == "ENGINE_RESTARTING"
    assert len(server.calls) > 1


def test_no_retries_when_the_policy_says_so(connect, server):
    with connect(retry=RetryPolicy(total_seconds=0)) as client:
        server.fail()
        with pytest.raises(warpfit.UnavailableError):
            client.info()
    assert server.calls == ["GetServerInfo"]


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
def test_other_errors_arrive_whole_and_at_once(client, server, error):
    server.fail(error=error)
    with pytest.raises(type(error)) as caught:
        client.info()
    assert vars(caught.value) == vars(error)
    assert not isinstance(caught.value, grpc.RpcError)
    assert caught.value.__cause__ is not None
    assert len(server.calls) == 1


def test_the_deadline_covers_all_attempts(connect, server):
    with connect(retry=RetryPolicy(initial_backoff=0.02)) as client:
        data = client.upload(X)
        server.fail(calls=1000)
        with pytest.raises(warpfit.DeadlineExceededError, match="engine is restarting") as caught:
            client.evaluate(data, "x1", timeout=0.2)
    assert isinstance(caught.value.__cause__, warpfit.UnavailableError)


def test_lost_data_are_uploaded_again(client, server):
    data = client.upload(X, Y)
    server.forget()
    np.testing.assert_array_equal(client.evaluate(data, EXPRESSIONS, PARAMETERS), expected_values())
    assert server.calls[-3:] == ["Evaluate", "UploadVariables", "Evaluate"]


def test_a_handle_works_with_another_client_and_server(client):
    data = client.upload(X)
    with testing.client() as other:
        np.testing.assert_array_equal(other.evaluate(data, "x2")[:, 0], X[:, 1])


def test_data_are_uploaded_again_only_a_few_times(client, server):
    data = client.upload(X)
    lost = warpfit.DatasetNotFoundError("gone", "DATASET_NOT_FOUND")
    server.forget()
    answer = server.answer

    def forgetful(call):
        if call.method == "Evaluate":
            server.fail(error=lost)
        answer(call)

    server.answer = forgetful
    with pytest.raises(warpfit.DatasetNotFoundError):
        client.evaluate(data, "x1")
    assert server.calls.count("UploadVariables") == 1 + 3


BUSY = warpfit.ResourceExhaustedError("busy", "QUEUE_FULL", retry_after=0.15)


def test_a_busy_server_is_asked_again_when_it_wants_to_be(connect, server):
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
def test_what_cannot_help_is_not_repeated(connect, server, policy, error):
    with connect(retry=policy) as client:
        data = client.upload(X)
        server.fail(error=error)
        with pytest.raises(warpfit.ResourceExhaustedError) as caught:
            client.evaluate(data, "x1")
        assert (caught.value.reason, caught.value.retry_after) == (error.reason, error.retry_after)
        assert server.calls.count("Evaluate") == 1


def test_a_deadline_comes_before_a_busy_server(connect, server):
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
    st.integers(1, 10_000),
    st.floats(0, 1, exclude_max=True),
    st.floats(0.001, 1),
    st.floats(0, 1),
)
def test_pauses_grow_within_bounds(failures, draw, initial, jitter):
    policy = RetryPolicy(initial_backoff=initial, maximum_backoff=2.0, jitter=jitter)
    pause = policy.pause(failures, draw)
    assert 0 <= pause <= 2.0
    assert pause >= initial * (1 - jitter) - 1e-12
    assert policy.pause(failures + 1, draw) >= pause


# ------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"loss": "mape"}, "BAD_ENUM"),
        ({"loss": "mse"}, "TARGET_MISSING"),
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


@pytest.mark.parametrize(
    ("expressions", "parameters", "reason"),
    [
        ([], None, "EMPTY_BATCH"),
        (["x1", "x4"], None, "VARIABLE_OUT_OF_RANGE"),
        (["x1", "p1"], None, "PARAMETER_OUT_OF_RANGE"),
        (["x1", "x2"], [[1.0]], "LENGTH_MISMATCH"),
        (["p1", "p1"], [[[1.0], [2.0]], [[1.0], [2.0], [3.0]]], "VECTOR_MISMATCH"),
        ([Program.variable(3)], None, "VARIABLE_OUT_OF_RANGE"),
        (["x1", 3.5], None, "UNKNOWN_EXPRESSION_TYPE"),
    ],
)
def test_bad_expressions_are_refused(client, expressions, parameters, reason):
    data = client.upload(X, names=["x1", "x2", "x3"])
    with pytest.raises(warpfit.InvalidArgumentError) as caught:
        client.evaluate(data, expressions, parameters)
    assert caught.value.reason == reason


@pytest.mark.parametrize("address", ["localhost", "", "127.0.0.1:http"])
def test_an_address_needs_a_port(address):
    with pytest.raises(warpfit.InvalidArgumentError, match="HOST:PORT"):
        warpfit.connect(address)


# ----------------------------------------------------------------------------------- over gRPC


def test_nobody_listening_is_unavailable():
    with (
        warpfit.connect("127.0.0.1:1", retry=RetryPolicy(total_seconds=0)) as client,
        pytest.raises(warpfit.UnavailableError, match="Check that the server runs"),
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
            client.evaluate(data, ["x1 + x2 + x3"] * 100)
    assert caught.value.reason == "MESSAGE_TOO_LARGE"
    assert caught.value.needed > caught.value.available == 2000


def test_a_message_over_the_clients_limit_names_both_sizes():
    transport = TransportConfig(message_bytes=2000, chunk_bytes=1000)
    server = testing.InProcessServer(chunk_bytes=5000)
    with serve(server) as (address, _), warpfit.connect(address, transport=transport) as client:
        data = client.upload(X)
        with pytest.raises(warpfit.ResourceExhaustedError) as caught:
            client.evaluate(data, ["x1"] * 30)
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


def test_threads_share_a_client(client):
    data = client.upload(X)
    results = {}

    def work(factor):
        results[factor] = client.evaluate(data, "x1*p1", [factor])[:, 0]

    threads = [threading.Thread(target=work, args=(float(n),)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for factor, values in results.items():
        np.testing.assert_allclose(values, X[:, 0] * factor, rtol=1e-6)
    assert len(results) == 8


def test_import_is_light():
    heavy = ("grpc", "pandas", "sympy", "deap", "tqdm", "asyncio", "google.protobuf")
    code = f"import sys, warpfit; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_parse_stays_a_function():
    code = "import warpfit, warpfit.testing, warpfit.parse; assert callable(warpfit.parse)"
    subprocess.run([sys.executable, "-c", f"{code}; warpfit.parse('x1')"], check=True)


@pytest.mark.parametrize("name", warpfit.__all__)
def test_every_exported_name_exists(name):
    assert getattr(warpfit, name) is not None


@pytest.mark.parametrize(("given", "expected"), [(None, "-event_engine_client"), ("x", "x")])
def test_grpcs_poller_is_chosen_before_it_is_imported(given, expected):
    environment = {k: v for k, v in os.environ.items() if k != "GRPC_EXPERIMENTS"}
    if given is not None:
        environment["GRPC_EXPERIMENTS"] = given
    code = "import os, sys, warpfit; print(os.environ['GRPC_EXPERIMENTS'], 'grpc' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    experiments, is_imported = ran.stdout.split()
    assert experiments.split(",")[0] == expected
    assert is_imported == "False"
