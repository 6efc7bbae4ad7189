"""Calls of Evaluate that carry several requests."""

import os
import re
import subprocess
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

import grpc
import numpy as np
import pytest

import warpfit
from support.servers.network import Proxy, Spoil
from support.servers.rpcs import OWN_CONNECTION, SERVICE, Caller, explained
from support.servers.server import ServerProcess, eventually
from warpfit import codec
from warpfit.dataset import Dataset
from warpfit.fitting import FitRequest, FitSettings
from warpfit.ir import Batch
from warpfit.parse import parse
from warpfit.request import Evaluation, Loss
from warpfit.transport import channel as transport

X = np.random.default_rng(3).normal(size=(50, 2))
DATA = Dataset.of(X, X[:, 0], dtype="float64")
#: Places for calls, bytes in flight, and the longest message that follows from them.
PLACES, PENDING, MESSAGE = 4, 64 << 20, 8 << 20
FLAGS = ("--front-ends", "1", "--threads", "1", "--max-requests", str(PLACES))


@pytest.fixture(scope="module")
def server():
    with ServerProcess(*FLAGS, "--max-pending-bytes", str(PENDING)) as process:
        with warpfit.connect(process.address) as client:
            assert client.info().limits.message_bytes == MESSAGE
            client.upload(X, X[:, 0], dtype="float64")
        yield process


@pytest.fixture
def channel(server):
    with grpc.insecure_channel(server.address, OWN_CONNECTION) as made:
        yield made


def request(text, **options):
    """Ask for the loss of an expression, and whatever else, in a call that goes on."""
    asked = Evaluation(
        DATA.content_id, Batch.of([parse(text)]), loss=Loss.MSE, **{"values": False, **options}
    )
    return codec.evaluation_to_bytes(asked, pieces=True)


class RawCall:
    """A call whose requests are sent one by one."""

    def __init__(self, channel, name="Evaluate", parse=codec.answer_from_bytes, last="timings"):
        self._requests, self._last = SimpleQueue(), last
        method = channel.stream_stream(SERVICE + name, None, parse)
        self.rpc = method(iter(self._requests.get, None), timeout=20)

    def ask(self, text, **options):
        """Return the messages of an answer."""
        return self.send(request(text, **options))

    def send(self, message):
        """Send a request, and return the messages of its answer."""
        self._requests.put(message)
        messages = [next(self.rpc)]
        while not messages[-1].HasField(self._last):
            messages.append(next(self.rpc))
        return messages

    def loss(self, text):
        (message,) = self.ask(text)
        return np.frombuffer(message.losses)[0]

    def end(self):
        """Send no more, and return the status."""
        self._requests.put(None)
        assert not list(self.rpc)
        return self.rpc.code()


def ended(call):
    """Wait for the end of a call that is sent no more; return its status."""
    with suppress(grpc.RpcError):
        assert not list(call.rpc)
    return call.rpc.code()


def waits(channel):
    """Return whether the server waits for another request of a call."""
    call = RawCall(channel)
    call.loss("x1")
    return ended(call) is grpc.StatusCode.CANCELLED


def test_each_request_gets_the_answer_of_a_call_of_its_own(channel):
    call = RawCall(channel)
    for shift in range(5):
        assert call.loss(f"x1 + {shift}") == pytest.approx(shift**2)
    many = Batch.of([parse("x1")] * 6000)
    messages = call.send(codec.evaluation_to_bytes(Evaluation(DATA.content_id, many), pieces=True))
    assert len(messages) > 2, "values come in pieces"
    values = b"".join(message.values for message in messages)
    np.testing.assert_array_equal(np.frombuffer(values), np.tile(X[:, 0], 6000))
    assert call.loss("x1 + 7") == pytest.approx(49)
    assert call.end() is grpc.StatusCode.OK


@pytest.mark.parametrize("progress", [False, True])
def test_fits_follow_one_another_in_a_call(channel, progress):
    call = RawCall(channel, "Optimize", codec.fit_answer_from_bytes, "result")
    for shift in (1.0, 2.0):
        problem = Evaluation(
            DATA.content_id,
            Batch.of([parse(f"p1 * x1 + p2 - {shift}")], [[0.5, 0.0]]),
            loss=Loss.MSE,
            values=False,
        )
        fit = FitRequest(problem, FitSettings(progress=progress))
        *_, last = call.send(codec.fit_to_message(fit).SerializeToString())
        found = np.frombuffer(last.result.parameters)
        np.testing.assert_allclose(found, [1, shift], rtol=1e-6)
    assert call.end() is grpc.StatusCode.OK


def test_a_client_fits_and_evaluates_in_two_calls(server, monkeypatch):
    made, make = [], transport._OpenCall
    monkeypatch.setattr(transport, "_OpenCall", lambda *given: made.append(given) or make(*given))
    with warpfit.connect(server.address) as client:
        data = client.upload(X, X[:, 0], dtype="float64")
        for shift in range(1, 6):
            fit = client.optimize(data, [f"p1 * x1 - {shift} * p2"], [[0.5, 1.0]])
            np.testing.assert_allclose(fit.parameters[0], [1, 0], atol=1e-6)
            assert client.evaluate(data, [f"x1 + {shift}"], loss="mse")[0] == pytest.approx(
                shift**2
            )
    assert len(made) < 6  # two, unless the machine pauses


def test_one_request_alone_is_answered_without_waiting(channel):
    method = channel.unary_unary(SERVICE + "Evaluate", None, codec.answer_from_bytes)
    message = method(request("x1 + 2"), timeout=20)
    assert np.frombuffer(message.losses)[0] == pytest.approx(4)


def test_an_error_ends_the_call_and_says_why(channel):
    call = RawCall(channel)
    call.loss("x1 + 1")
    with pytest.raises(grpc.RpcError) as caught:
        call.ask("x9")
    status, reason, _ = explained(caught.value)
    assert (status, reason) == ("INVALID_ARGUMENT", "VARIABLE_OUT_OF_RANGE")


def test_a_call_waits_for_the_next_request_for_some_time_only(channel):
    call = RawCall(channel)
    call.loss("x1")
    assert ended(call) is grpc.StatusCode.CANCELLED


def test_calls_that_wait_take_no_places_and_at_most_half_of_the_memory(server, channel):
    calls = []
    for _ in range(2 * PLACES - 2):
        calls.append(RawCall(channel))
        calls[-1].loss("x1")
    assert Caller(channel).send("GetServerInfo", b"")  # there is room for others
    ends = [ended(call) for call in calls]
    kept = PENDING // 2 // MESSAGE
    cancelled, ok = grpc.StatusCode.CANCELLED, grpc.StatusCode.OK
    assert ends == [cancelled] * kept + [ok] * (len(ends) - kept)
    call = RawCall(channel)
    call.loss("x1")
    assert ended(call) is cancelled  # it has waited: the memory has come back


def test_a_call_that_is_cancelled_while_it_waits_gives_everything_back(channel):
    for _ in range(3 * PENDING // MESSAGE):
        call = RawCall(channel)
        call.loss("x1")
        call.rpc.cancel()
    call = RawCall(channel)
    eventually(lambda: call.loss("x1") == 0.0)
    eventually(lambda: waits(channel))


def test_a_client_goes_on_after_a_pause_of_any_length(server):
    with warpfit.connect(server.address, retry=warpfit.RetryPolicy(total_seconds=0)) as client:
        data = client.upload(X, X[:, 0], dtype="float64")
        for pause in (0.0, 0.2, 0.39, 0.45, 0.6, 0.8):
            time.sleep(pause)
            assert client.evaluate(data, ["x1 + 1"], loss="mse")[0] == pytest.approx(1)


def test_short_and_long_requests_take_turns(server):
    with warpfit.connect(server.address) as client:
        data = client.upload(X, X[:, 0], dtype="float64")
        for _ in range(3):
            assert client.evaluate(data, ["x1 + 2"], loss="mse")[0] == pytest.approx(4)
            losses = client.evaluate(data, ["x1 + 1"] * 20_000, loss="mse")  # 600 KB
            np.testing.assert_allclose(losses, 1)


@pytest.mark.thorough
def test_a_slow_network_carries_one_long_request_twice(server):
    batch = Batch.of([parse("x1 + 1.5")] * 30_000)
    length = len(codec.evaluation_to_bytes(Evaluation(DATA.content_id, batch, loss=Loss.MSE)))
    assert length > 1 << 19
    slow = Spoil(piece=1 << 14, pause=0.022)  # 0.8 s for that
    with Proxy(server.address, up=slow) as proxy, warpfit.connect(proxy.address) as client:
        data = client.upload(X, X[:, 0], dtype="float64")
        sent = []
        for _ in range(3):
            before = proxy.sent
            losses = client.evaluate(data, batch, loss="mse")
            np.testing.assert_allclose(losses, 2.25)
            sent.append((proxy.sent - before) / length)
    assert sent == pytest.approx([1, sent[1], 1], abs=0.1)
    assert 1.2 < sent[1] < 2.1  # the server has not waited for the second one


def test_threads_of_a_client_get_their_own_answers(server):
    with warpfit.connect(server.address) as client, ThreadPoolExecutor(PLACES) as pool:
        data = client.upload(X, X[:, 0], dtype="float64")

        def ask(shift):
            return client.evaluate(data, [f"x1 + {shift}"], loss="mse")[0]

        np.testing.assert_allclose(list(pool.map(ask, range(100))), np.arange(100.0) ** 2)


def test_a_client_closes_at_once_and_a_program_ends_without_closing_it(server):
    with warpfit.connect(server.address) as client:
        data = client.upload(X, X[:, 0], dtype="float64")
        client.evaluate(data, ["x1"], loss="mse")
    program = (
        "import numpy, sys, warpfit\n"
        "client = warpfit.connect(sys.argv[1])\n"
        "data = client.upload(numpy.ones((9, 1)), numpy.ones(9))\n"
        "print(client.evaluate(data, ['x1 + 1'], loss='mse')[0])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, server.address], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "1.0", "")


def test_a_server_that_stops_ends_calls_that_wait(server, channel):
    """The last test of this server."""
    call = RawCall(channel)
    call.loss("x1")
    server.process.terminate()
    # Whichever the client hears of first: its end, or that of the connection.
    assert ended(call) in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)
    assert server.stop() == 0


# ----------------------------------------------------------------------- the oldest release of gRPC


ROOT = Path(__file__).resolve().parents[2]
#: Packages of one release.
PACKAGES = ("grpcio", "grpcio-health-checking", "grpcio-status")
#: Calls through the client and by hand, with uploads and with answers of one and of many messages.
CORE = "gets_the_answer or error_ends or take_turns or closes_at_once"


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_the_oldest_release_serves_and_calls(tmp_path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (bound,) = (need for need in project["dependencies"] if need.startswith("grpcio"))
    oldest = re.search(r">=([\d.]+)", bound)[1]
    install = ["pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", str(tmp_path)]
    packages = [f"{name}=={oldest}.0" for name in PACKAGES]
    got = subprocess.run(
        [sys.executable, "-m", *install, *packages], capture_output=True, text=True
    )
    if got.returncode:
        pytest.skip(f"there is no such release here: {got.stderr.strip()[-200:]}")
    paths = [str(tmp_path), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    environment.pop("PYTEST_XDIST_WORKER", None)
    code = "import grpc; print(grpc.__version__)"
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == f"{oldest}.0"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    tests = [__file__, "-k", CORE]
    ended = subprocess.run(
        [*command, *tests], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout[-3000:]
