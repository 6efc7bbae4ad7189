"""Several processes on one port behave as one server."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from dataclasses import dataclass

import grpc
import numpy as np
import psutil
import pytest

import warpfit
from support.servers.server import ServerProcess
from warpfit import codec
from warpfit.calls.arguments import build_evaluation
from warpfit.client import UploadedDataset

DOORS = 3
CLIENTS = 16
X = np.random.default_rng(8).normal(size=(1000, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnConnection(warpfit.TransportConfig):
    """Each client gets a connection of its own, which the kernel deals to one of the processes."""

    def channel_options(self) -> list[tuple[str, int]]:
        return [
            *warpfit.TransportConfig.channel_options(self),
            ("grpc.use_local_subchannel_pool", 1),
        ]


@pytest.fixture(scope="module")
def server():
    with ServerProcess("--front-doors", str(DOORS)) as process:
        yield process


@pytest.fixture
def clients(server):
    """So many clients that each process has some; the kernel deals them out by chance."""
    with ExitStack() as stack:
        connected: list[warpfit.Client] = []
        while len(connected) < CLIENTS or len(processes_with_connections(server)) < DOORS:
            assert len(connected) < 20 * CLIENTS
            client = warpfit.connect(server.address, transport=OwnConnection())
            connected.append(stack.enter_context(client))
            client.info()
        yield connected


def processes_with_connections(server: ServerProcess) -> set[int]:
    port = int(server.address.rpartition(":")[2])
    return {
        process.pid
        for process in [psutil.Process(server.process.pid), *server.doors()]
        for connection in process.net_connections("tcp")
        if connection.laddr.port == port and connection.status == psutil.CONN_ESTABLISHED
    }


def assert_right(client: warpfit.Client, data: UploadedDataset, factor: float) -> None:
    got = client.evaluate(data, ["p1*x1 + x2"], parameters=[[factor]])
    np.testing.assert_array_equal(got[:, 0], factor * X[:, 0] + X[:, 1])


def test_what_one_process_took_in_all_processes_evaluate(server, clients):
    data = clients[0].upload(X, dtype="float64")
    for number, client in enumerate(clients):
        assert_right(client, data, float(number))
    assert len(server.doors()) == DOORS - 1
    assert len(processes_with_connections(server)) == DOORS


def test_errors_pass_through_every_process(clients):
    data = clients[0].upload(X, dtype="float64")
    for client in clients:
        with pytest.raises(warpfit.errors.ProgramError) as caught:
            client.evaluate(data, ["x1 + x9"])
        assert caught.value.reason == "VARIABLE_OUT_OF_RANGE"
        assert caught.value.expression == 0


def test_a_release_is_seen_by_every_process(server, clients):
    data = clients[0].upload(X + 1, dtype="float64")
    for client in clients:
        client.evaluate(data, ["x1"])  # every process holds a lease now
    clients[0].release(data)
    evaluation, _ = build_evaluation(data, ["x1"], None, True, {})
    request = codec.evaluation_to_message(evaluation).SerializeToString()
    for _ in range(CLIENTS):
        options = OwnConnection().channel_options()
        with grpc.insecure_channel(server.address, options) as channel:
            evaluate = channel.unary_stream("/warpfit.v1.Evaluator/Evaluate")
            with pytest.raises(grpc.RpcError) as caught:
                list(evaluate(request, timeout=10))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_released_memory_comes_back(server, clients):
    matrix = np.ones((200_000, 5))
    before = server.shared_memory()
    data = clients[0].upload(matrix, dtype="float64")
    for client in clients:
        client.evaluate(data, ["x1"], loss=None, rows=slice(0, 10))
    # Lanes may hold a little memory each for the next batch.
    much = before + matrix.nbytes // 2
    assert server.shared_memory() > much
    clients[0].release(data)
    deadline = time.monotonic() + 10
    while server.shared_memory() > much:
        assert time.monotonic() < deadline, "the data set is still there"
        time.sleep(0.05)


def test_a_new_engine_serves_every_process(server, clients):
    data = clients[0].upload(X, dtype="float64")
    for _ in range(2):
        engine = server.engine()
        server.kill_engine()
        engine.wait(5)
        for number, client in enumerate(clients):
            assert_right(client, data, float(number))


def test_a_process_that_dies_is_replaced(server, clients):
    data = clients[0].upload(X, dtype="float64")
    old = {door.pid for door in server.doors()}
    os.kill(min(old), signal.SIGKILL)
    for number, client in enumerate(clients):
        assert_right(client, data, float(number))
    deadline = time.monotonic() + 20
    while len({door.pid for door in server.doors()} - old) < 1:
        assert time.monotonic() < deadline, "no new process"
        time.sleep(0.05)


def test_cancelled_calls_stop_the_engine(server, clients):
    wide = np.random.default_rng(2).normal(size=(100_000, 2))
    data = clients[0].upload(wide, wide[:, 0])
    long = "+".join(f"sin(x1*{k})" for k in range(1, 400))
    for client in clients[:4]:
        with pytest.raises(warpfit.errors.DeadlineExceededError):
            client.evaluate(data, [long] * 400, loss="mse", timeout=0.3)
    started = time.monotonic()
    clients[5].evaluate(data, ["x1"], loss="mse", timeout=30)
    assert time.monotonic() - started < 10, "cancelled work was executed"


def test_everything_ends_with_the_server():
    with ServerProcess("--front-doors", "2") as server:
        family = [server.engine(), *server.doors()]
        assert len(family) == 2
        assert server.stop() == 0
        _, alive = psutil.wait_procs(family, 5)
        assert not alive


def test_the_doors_end_when_the_front_door_is_killed():
    server = ServerProcess("--front-doors", "2")
    family = [server.engine(), *server.doors()]
    server.process.kill()
    server.process.wait()
    _, alive = psutil.wait_procs(family, 5)
    assert not alive
    server.stop()


def test_a_port_in_use_is_not_shared(server):
    port = server.address.rpartition(":")[2]
    with pytest.raises(RuntimeError, match="did not start"):
        ServerProcess("--front-doors", "2", "--port", port)
