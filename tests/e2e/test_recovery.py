"""The server survives what happens to engines and clients."""

from __future__ import annotations

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
from support.server import ServerProcess
from warpfit import codec
from warpfit.dataset import Dataset
from warpfit.v1 import evaluator_pb2 as pb

KILLS = 5


def _load(address: str, seed: int, stop: object) -> tuple[int, int]:
    """Evaluate until told to stop; count right and wrong answers."""
    rng = np.random.default_rng(11)
    X = rng.normal(size=(5000, 3))
    right = wrong = turn = 0
    with warpfit.connect(address) as client:
        data = client.upload(X, X[:, 0], dtype="float64")
        while not stop.is_set():
            turn += 1
            factor = float(seed * 1_000_000 + turn)
            values = client.evaluate(data, ["p1*x1 + x2", "x3 - p1"], parameters=[[factor]] * 2)
            expected = np.stack([factor * X[:, 0] + X[:, 1], X[:, 2] - factor], axis=1)
            if np.array_equal(values, expected):
                right += 1
            else:
                wrong += 1
    return right, wrong


def test_sigkill_of_the_engine_under_load():
    context = multiprocessing.get_context("spawn")
    with ServerProcess("--threads", "2") as server, context.Manager() as manager:
        stop = manager.Event()
        with context.Pool(2) as pool:
            running = [pool.apply_async(_load, (server.address, seed, stop)) for seed in (1, 2)]
            seen = set()
            for _ in range(KILLS):
                time.sleep(1.5)
                engine = server.engine()
                seen.add(engine.pid)
                engine.send_signal(signal.SIGKILL)
                engine.wait(5)
            time.sleep(3)
            stop.set()
            counts = [result.get(60) for result in running]
        assert len(seen) == KILLS
        assert all(wrong == 0 for _, wrong in counts)
        assert all(right > KILLS for right, _ in counts)


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
        with pytest.raises(warpfit.errors.ResourceExhaustedError, match="needs 1600000 bytes"):
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
                client.evaluate(data, [program] * 200, loss="mse", timeout=2)

        thread = threading.Thread(target=occupy)
        thread.start()
        time.sleep(0.5)
        with pytest.raises(warpfit.errors.ResourceExhaustedError, match="--max-requests"):
            client.evaluate(data, ["x1"], loss="mse")
        thread.join()
        _wait_until(lambda: _accepted(client, data))


def _accepted(client: warpfit.Client, data: warpfit.Data) -> bool:
    try:
        client.evaluate(data, ["x1"], loss="mse")
    except warpfit.errors.ResourceExhaustedError:
        return False
    return True


def test_sigterm_lets_calls_finish():
    X = np.random.default_rng(4).normal(size=(100_000, 4))
    with ServerProcess("--threads", "1") as server, warpfit.connect(server.address) as client:
        data = client.upload(X)
        answers = []
        thread = threading.Thread(
            target=lambda: answers.append(client.evaluate(data, ["sin(x1)*exp(x2)"] * 150))
        )
        thread.start()
        time.sleep(0.2)
        engine = server.engine()
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
