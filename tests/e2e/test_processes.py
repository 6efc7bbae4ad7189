"""Several processes on one port behave as one server, whichever of them dies or is stopped."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from contextlib import ExitStack
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest

import warpfit
from support.load.load import OwnConnection
from support.servers.long_calls import request
from support.servers.rpcs import SERVICE
from support.servers.server import ServerProcess, eventually

FRONT_ENDS = 3
CLIENTS = 12
X = np.random.default_rng(8).normal(size=(1000, 2))


@pytest.fixture(scope="module")
def server():
    with ServerProcess("--front-ends", str(FRONT_ENDS)) as process:
        yield process


@pytest.fixture
def clients(server):
    """So many clients that each process has some; the kernel deals them out by chance."""
    with ExitStack() as stack:
        connected: list[warpfit.Client] = []
        while len(connected) < CLIENTS or len(processes_with_connections(server)) < FRONT_ENDS:
            assert len(connected) < 20 * CLIENTS
            client = warpfit.connect(server.address, transport=OwnConnection())
            connected.append(stack.enter_context(client))
            client.info()
        yield connected


def processes_with_connections(server: ServerProcess) -> set[int]:
    port = int(server.address.rpartition(":")[2])
    return {
        process.pid
        for process in [psutil.Process(server.process.pid), *server.front_ends()]
        for connection in process.net_connections("tcp")
        if connection.laddr.port == port and connection.status == psutil.CONN_ESTABLISHED
    }


def assert_right(client: warpfit.Client, data: warpfit.Data, factor: float) -> None:
    got = client.evaluate(data, ["p1*x1 + x2"], parameters=[[factor]])
    np.testing.assert_array_equal(got[:, 0], factor * X[:, 0] + X[:, 1])


def test_data_and_errors_pass_through_every_process(server, clients):
    data = clients[0].upload(X, dtype="float64")
    for number, client in enumerate(clients):
        assert_right(client, data, float(number))
        with pytest.raises(warpfit.errors.ProgramError) as caught:
            client.evaluate(data, ["x1 + x9"])
        assert caught.value.reason == "VARIABLE_OUT_OF_RANGE"
        assert caught.value.expression == 0
    assert len(server.front_ends()) == FRONT_ENDS - 1


def test_every_process_sees_a_release_and_its_memory_comes_back(server, clients):
    wide = np.ones((200_000, 5))
    before = server.shared_memory()
    data = clients[0].upload(wide, dtype="float64")
    for client in clients:
        client.evaluate(data, ["x1"], rows=slice(0, 10))  # every process has a lease now
    # Connections may hold a little memory each for the next batch.
    much = before + wide.nbytes // 2
    assert server.shared_memory() > much
    clients[0].release(data)
    eventually(lambda: server.shared_memory() <= much)
    message = request(data, ["x1"])
    for _ in range(CLIENTS):
        options = OwnConnection().channel_options()
        with (
            grpc.insecure_channel(server.address, options) as channel,
            pytest.raises(grpc.RpcError) as caught,
        ):
            list(channel.unary_stream(SERVICE + "Evaluate")(message, timeout=10))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert clients[1].evaluate(data, ["x1"]).shape == (200_000, 1), "it is uploaded again"


def test_a_new_engine_serves_every_process(server, clients):
    data = clients[0].upload(X, dtype="float64")
    engine = server.engine()
    server.kill_engine()
    engine.wait(5)
    for number, client in enumerate(clients):
        assert_right(client, data, float(number))


def test_a_front_end_that_dies_is_replaced(server, clients):
    data = clients[0].upload(X, dtype="float64")
    old = {process.pid for process in server.front_ends()}
    os.kill(min(old), signal.SIGKILL)
    for number, client in enumerate(clients):
        assert_right(client, data, float(number))
    eventually(lambda: {process.pid for process in server.front_ends()} - old)


def test_a_port_in_use_is_not_shared(server):
    port = server.address.rpartition(":")[2]
    with pytest.raises(RuntimeError, match="did not start"):
        ServerProcess("--front-ends", "2", "--port", port)


def test_sigterm_lets_calls_finish_whichever_thread_gets_it():
    wide = np.random.default_rng(4).normal(size=(100_000, 4))
    long = "x1"
    for _ in range(20):
        long = f"sin({long} + x2)"
    with (
        ServerProcess("--threads", "1", "--front-ends", "2") as server,
        warpfit.connect(server.address) as client,
    ):
        data = client.upload(wide)
        answers = []
        thread = threading.Thread(
            target=lambda: answers.append(client.evaluate(data, [long] * 150))
        )
        engine, family = server.engine(), server.family().values()
        before = engine.cpu_times().user
        thread.start()
        eventually(lambda: engine.cpu_times().user > before + 0.02)
        assert not answers, "it is at work"
        pid = server.process.pid
        threads = {int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()}
        assert ctypes.CDLL(None).tgkill(pid, max(threads - {pid}), signal.SIGTERM) == 0
        assert server.process.wait(timeout=30) == 0
        thread.join()
        assert answers[0].shape == (100_000, 150)
        _, alive = psutil.wait_procs(family, 5)
        assert not alive
