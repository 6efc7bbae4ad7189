"""The server survives what happens to engines and clients."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import grpc
import numpy as np
import pytest

import warpfit
from support.servers.server import ServerProcess
from warpfit import codec
from warpfit.client import UploadedDataset
from warpfit.dataset import Dataset
from warpfit.v1 import evaluator_pb2 as pb


def test_a_client_that_dies_in_mid_upload_leaves_nothing():
    rng = np.random.default_rng(0)
    context = multiprocessing.get_context("spawn")
    with ServerProcess() as server:
        with warpfit.connect(server.address) as client:
            client.upload(np.ones((3, 2)))
        before = server.shared_memory(), server.descriptors()
        for seed in range(5):
            X = rng.normal(size=(200_000, 5)) + seed
            process = context.Process(target=_upload_half, args=(server.address, X))
            process.start()
            process.join(30)
            assert process.exitcode == -signal.SIGKILL
        _wait_until(lambda: server.shared_memory() <= before[0])
        _wait_until(lambda: server.descriptors() <= before[1])


def _upload_half(address: str, X: np.ndarray) -> None:
    messages = codec.upload_messages(Dataset.of(X), 1 << 18)

    def half():
        for _ in range(8):
            yield next(messages)
        os.kill(os.getpid(), signal.SIGKILL)

    with grpc.insecure_channel(address) as channel:
        method = channel.stream_unary("/warpfit.v1.Evaluator/UploadVariables")
        method(half(), timeout=10)


def _wait_until(condition, timeout: float = 10.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "did not come back to the baseline"
        time.sleep(0.05)


def test_released_data_sets_come_back():
    X = np.arange(6.0).reshape(3, 2)
    with ServerProcess() as server, warpfit.connect(server.address) as client:
        data = client.upload(X)
        with warpfit.connect(server.address) as other:
            other.release(other.upload(X))
        np.testing.assert_array_equal(client.evaluate(data, ["x1 + x2"])[:, 0], X.sum(axis=1))


def test_least_recently_used_data_set_is_evicted():
    X = np.random.default_rng(1).normal(size=(100_000, 2))
    with (
        ServerProcess("--max-resident-bytes", "1MiB") as server,
        warpfit.connect(server.address) as client,
    ):
        first = client.upload(X)
        second = client.upload(X + 1)
        assert server.shared_memory() < 1_000_000
        with grpc.insecure_channel(server.address) as channel:
            get = channel.unary_unary("/warpfit.v1.Evaluator/GetVariables")
            get(pb.GetVariablesRequest(content_id=second.content_id).SerializeToString())
            with pytest.raises(grpc.RpcError) as caught:
                get(pb.GetVariablesRequest(content_id=first.content_id).SerializeToString())
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        with pytest.raises(warpfit.errors.ResourceExhaustedError, match="1600000 more bytes"):
            client.upload(np.ones((100_000, 4)))


def test_cancelled_calls_stop_the_engine_and_free_their_place():
    X = np.random.default_rng(2).normal(size=(100_000, 4))
    long = "+".join(f"sin(x1*{k})" for k in range(1, 400))
    with (
        ServerProcess("--threads", "1", "--max-requests", "3") as server,
        warpfit.connect(server.address) as client,
    ):
        data = client.upload(X, X[:, 0])
        for _ in range(4):  # more than there are places
            with pytest.raises(warpfit.errors.DeadlineExceededError):
                client.evaluate(data, [long] * 200, loss="mse", timeout=0.3)
        started = time.monotonic()
        client.evaluate(data, ["x1"], loss="mse", timeout=20)
        cancelled_work = time.monotonic() - started
        assert cancelled_work < 10, "cancelled work was executed"


def test_sigterm_stops_the_server_whichever_thread_the_system_gives_it_to():
    with ServerProcess("--threads", "1") as server:
        pid = server.process.pid
        threads = {int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()}
        assert ctypes.CDLL(None).tgkill(pid, max(threads - {pid}), signal.SIGTERM) == 0
        assert server.process.wait(timeout=20) == 0


def test_over_the_number_of_calls_in_flight():
    X = np.random.default_rng(3).normal(size=(100_000, 4))
    long = "+".join(f"sin(x1*{k})" for k in range(1, 400))
    program = warpfit.parse(long)  # parsing it 200 times takes longer than the wait below
    policy = warpfit.RetryPolicy(total_seconds=0)
    with (
        ServerProcess("--threads", "1", "--max-requests", "1") as server,
        warpfit.connect(server.address, retry=policy) as client,
    ):
        data = client.upload(X, X[:, 0])

        def occupy():
            with pytest.raises(warpfit.errors.DeadlineExceededError):
                while True:  # until the looks below leave it the place
                    with contextlib.suppress(warpfit.errors.ResourceExhaustedError):
                        client.evaluate(data, [program] * 200, loss="mse", timeout=5)

        thread = threading.Thread(target=occupy)
        thread.start()
        _wait_until(lambda: not _accepted(client, data))
        with pytest.raises(warpfit.errors.ResourceExhaustedError, match="--max-requests"):
            client.evaluate(data, ["x1"], loss="mse")
        thread.join()
        _wait_until(lambda: _accepted(client, data))


def _accepted(client: warpfit.Client, data: UploadedDataset) -> bool:
    try:
        client.evaluate(data, ["x1"], loss="mse")
    except warpfit.errors.ResourceExhaustedError:
        return False
    return True


def test_sigterm_lets_calls_finish():
    X = np.random.default_rng(4).normal(size=(100_000, 4))
    with ServerProcess("--threads", "1") as server, warpfit.connect(server.address) as client:
        data = client.upload(X)
        answers, long = [], "x1"
        for _ in range(20):
            long = f"sin({long} + x2)"
        thread = threading.Thread(
            target=lambda: answers.append(client.evaluate(data, [long] * 150))
        )
        engine = server.engine()
        before = engine.cpu_times().user
        thread.start()
        _wait_until(lambda: engine.cpu_times().user > before + 0.02)
        assert not answers, "it is at work"
        assert server.stop() == 0
        thread.join()
        assert answers[0].shape == (100_000, 150)
        engine.wait(5)


def test_the_engine_ends_with_the_front_door():
    server = ServerProcess()
    engine = server.engine()
    server.process.kill()
    server.process.wait()
    engine.wait(5)
    server.stop()


def test_peak_memory_of_an_upload():
    X = np.random.default_rng(5).normal(size=(1_000_000, 50)).astype(np.float32)
    with ServerProcess() as server, warpfit.connect(server.address) as client:
        base = _peak(server)
        client.upload(X)
        messages_on_their_way = 48 << 20
        assert _peak(server) - base < X.nbytes + messages_on_their_way


def _peak(server: ServerProcess) -> int:
    """High-water mark of the front door's resident memory, shared memory included."""
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["VmHWM"].split()[0]) * 1024
