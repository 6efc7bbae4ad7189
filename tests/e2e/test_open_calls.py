"""Connections, how many and from where, and calls of Evaluate that carry several requests."""

import os
import re
import socket
import subprocess
import sys
import time
import tomllib
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

import grpc
import numpy as np
import pytest

import warpfit
from support.servers import health
from support.servers.rpcs import SERVICE
from support.servers.server import ServerProcess, eventually
from warpfit import codec
from warpfit.dataset import Dataset
from warpfit.ir import Batch
from warpfit.parse import parse
from warpfit.request import Evaluation, Loss

X = np.random.default_rng(3).normal(size=(50, 2))
DATA = Dataset.of(X, X[:, 0], dtype="float64")
#: Places for calls, bytes in flight, and the longest message that follows from them.
PLACES, PENDING, MESSAGE = 4, 64 << 20, 8 << 20
FLAGS = ("--front-ends", "1", "--threads", "1", "--max-requests", str(PLACES))
FLAGS += ("--host", "0.0.0.0", "--insecure", "--health-port", "0")
#: Open files of each process, and the connections that a front end has of these.
FILES, MOST = 256, 102


@pytest.fixture(scope="module")
def server():
    with ServerProcess(*FLAGS, "--max-pending-bytes", str(PENDING), files=FILES) as process:
        with warpfit.connect(process.address) as client:
            assert client.info().limits.message_bytes == MESSAGE
            client.upload(X, X[:, 0], dtype="float64")
        yield process


def is_closed(client) -> bool:
    client.settimeout(2)
    try:
        while client.recv(4096):
            pass
    except TimeoutError:
        return False
    except ConnectionResetError:
        pass
    return True


def test_further_connections_are_closed_and_places_come_back(server):
    port = int(server.address.rpartition(":")[2])
    clients = [socket.create_connection(("127.0.0.2", port), 10) for _ in range(2 * MOST)]
    try:
        # The connection of the client that made the data set may have had a place yet.
        assert sum(is_closed(client) for client in clients[MOST:]) in (MOST, MOST - 1)
        assert health.check(server.facts["health"]) == "SERVING"
    finally:
        for client in clients:
            client.close()

    def is_served():
        with suppress(warpfit.WarpfitError), warpfit.connect(f"127.0.0.2:{port}") as client:
            return client.info().engine == "cpu"

    eventually(is_served)


class RawCall:
    """A call whose requests are sent one by one."""

    def __init__(self, caller):
        self._requests = SimpleQueue()
        method = caller.channel.stream_stream(SERVICE + "Evaluate", None, codec.answer_from_bytes)
        self.rpc = method(iter(self._requests.get, None), timeout=20)

    def send(self, message):
        """Send a request, and return the messages of its answer."""
        self._requests.put(message)
        messages = [next(self.rpc)]
        while not messages[-1].HasField("timings"):
            messages.append(next(self.rpc))
        return messages

    def loss(self, text):
        asked = Evaluation(DATA.content_id, Batch.of([parse(text)]), loss=Loss.MSE, values=False)
        (message,) = self.send(codec.evaluation_to_bytes(asked, pieces=True))
        return np.frombuffer(message.losses)[0]

    def end(self):
        """Send no more, and return the status."""
        self._requests.put(None)
        assert not list(self.rpc)
        return self.rpc.code()


def test_each_request_gets_the_answer_of_a_call_of_its_own(caller):
    call = RawCall(caller)
    for shift in range(5):
        assert call.loss(f"x1 + {shift}") == pytest.approx(shift**2)
    many = Batch.of([parse("x1")] * 6000)
    messages = call.send(codec.evaluation_to_bytes(Evaluation(DATA.content_id, many), pieces=True))
    assert len(messages) > 2, "values come in pieces"
    values = b"".join(message.values for message in messages)
    np.testing.assert_array_equal(np.frombuffer(values), np.tile(X[:, 0], 6000))
    assert call.loss("x1 + 7") == pytest.approx(49)
    assert call.end() is grpc.StatusCode.OK


def test_short_and_long_requests_take_turns_and_pauses_of_any_length(server):
    with warpfit.connect(server.address, retry=warpfit.RetryPolicy(total_seconds=0)) as client:
        data = client.upload(X, X[:, 0], dtype="float64")
        for pause in (0.0, 0.39, 0.45):
            time.sleep(pause)
            assert client.evaluate(data, ["x1 + 1"], loss="mse")[0] == pytest.approx(1)
            losses = client.evaluate(data, ["x1 + 2"] * 20_000, loss="mse")  # 600 KB
            np.testing.assert_allclose(losses, 4)


def test_a_client_closes_at_once_and_a_program_ends_without_closing_it(server, client):
    data = client.upload(X, X[:, 0], dtype="float64")
    client.evaluate(data, ["x1"], loss="mse")
    client.close()
    program = "import sys, warpfit; client = warpfit.connect(sys.argv[1]); "
    program += "print(client.evaluate(client.upload([[1.0]], [1.0]), ['x1 + 1'], loss='mse')[0])"
    done = python("-c", program, server.address, timeout=60)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "1.0", "")


def test_a_server_that_stops_ends_calls_that_wait(server, caller):
    """The last test of this server."""
    call = RawCall(caller)
    call.loss("x1")
    server.process.terminate()
    with suppress(grpc.RpcError):
        assert not list(call.rpc)
    # Whichever the client hears of first: its end, or that of the connection.
    assert call.rpc.code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)
    assert server.stop() == 0


# ----------------------------------------------------------------------- the oldest release of gRPC
ROOT = Path(__file__).resolve().parents[2]
#: Calls through the client and by hand, with uploads and with answers of one and of many messages.
CORE = "gets_the_answer or take_turns or closes_at_once"


def python(*words, **options):
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, **options)


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_the_oldest_release_serves_and_calls(tmp_path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (bound,) = (need for need in project["dependencies"] if need.startswith("grpcio"))
    oldest = re.search(r">=([\d.]+)", bound)[1]
    install = ["pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", str(tmp_path)]
    packages = ("grpcio", "grpcio-health-checking", "grpcio-status")
    got = python("-m", *install, *(f"{name}=={oldest}.0" for name in packages))
    if got.returncode:
        pytest.skip(f"there is no such release here: {got.stderr.strip()[-200:]}")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    environment.pop("PYTEST_XDIST_WORKER", None)
    found = python("-c", "import grpc; print(grpc.__version__)", env=environment)
    assert found.stdout.strip() == f"{oldest}.0"
    plain = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    ended = python("-m", "pytest", *plain, __file__, "-k", CORE, env=environment, cwd=ROOT)
    assert ended.returncode == 0, ended.stdout[-3000:]
