"""Worker processes that call a server as fast as they can, all of them at the same time."""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Callable
from functools import lru_cache, partial
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple

import grpc
import numpy as np
import psutil

import warpfit
from support.servers.rpcs import SERVICE
from warpfit import codec
from warpfit.calls.arguments import EvaluateOptions, build_evaluation
from warpfit.errors import WarpfitError
from warpfit.expressions.workload import thesis_mix
from warpfit.ir import Batch

SEED: Final = 20261121
VARIABLES: Final = 10
#: Programs that fresh batches are drawn from.
POOL: Final = 6_000


@lru_cache(maxsize=1)
def table(rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(SEED)
    X = rng.uniform(0.5, 2.0, size=(rows, VARIABLES)).astype(np.float32)
    y = 1.5 * X[:, 0] * np.exp(-0.5 * X[:, 1]) + np.log(X[:, 2])
    return X, y.astype(np.float32)


class Pool:
    """Programs as flat arrays, to draw batches from; each time others in another order."""

    def __init__(self, seed: int, size: int = POOL) -> None:
        self.batch = Batch.of(*thesis_mix(seed, size, variables=VARIABLES))
        self.random = np.random.default_rng(seed)

    def draw(self, count: int) -> Batch:
        chosen = self.random.choice(len(self.batch), count, replace=count > len(self.batch))
        return self.batch[chosen]


def work(number: int, orders: Connection) -> None:
    """Serve the orders of the main process: connect, then call until the time is up."""
    pool = Pool(SEED + 1 + number % 16, 2_000)
    pool.random = np.random.default_rng(SEED + number)
    while True:
        order = orders.recv()
        if order is None:
            return
        address, programs, rows, seconds, fresh = order
        with warpfit.connect(address) as client, grpc.insecure_channel(address) as channel:
            data = client.upload(*table(rows))
            if fresh:
                send = sender(channel, data, [pool.draw(programs) for _ in range(fresh)])
            else:
                send = partial(repeat, client, data, Pool(SEED, programs).batch)
            send()
            orders.send(None)
            orders.recv()  # all workers are ready
            orders.send(call(send, seconds))


class Answer(NamedTuple):
    """What a worker keeps of an answer."""

    tokens: int
    devices: str
    losses: bytes


def repeat(client: warpfit.Client, data: Any, batch: Batch) -> Answer:
    """Evaluate a batch that was evaluated before."""
    answer = client.run(data, batch, loss="mse", precision="fast", tier="interpreter")
    return Answer(len(batch.codes), answer.timings.device, answer.losses.tobytes())


def sender(channel: grpc.Channel, data: Any, batches: list[Batch]) -> Callable[[], Answer]:
    """Return what sends one batch after the other; they are encoded now, as by another machine."""
    options: EvaluateOptions = {"loss": "mse", "precision": "fast"}
    evaluations = [build_evaluation(data, batch, None, None, options)[0] for batch in batches]
    requests = itertools.cycle(
        [(len(each.batch.codes), codec.evaluation_to_bytes(each)) for each in evaluations]
    )
    method = channel.unary_unary(SERVICE + "Evaluate")

    def send() -> Answer:
        tokens, request = next(requests)
        return Answer(tokens, codec.answer_from_bytes(method(request)).timings.device, b"")

    return send


def call(send: Callable[[], Answer], seconds: float) -> dict[str, Any]:
    """Call until the time is up: moments and durations of all calls, and what went wrong."""
    tokens, failed, ended, walls = 0, 0, [], []
    losses: set[bytes] = set()
    devices: dict[str, int] = {}
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        before = time.perf_counter()
        try:
            answer = send()
        except (WarpfitError, grpc.RpcError):
            failed += 1
            continue
        ended.append(time.time())
        walls.append(time.perf_counter() - before)
        tokens += answer.tokens
        for device in answer.devices.split(","):
            devices[device] = devices.get(device, 0) + 1
        losses.add(answer.losses)
    taken = time.perf_counter() - started
    found = {"tokens": tokens, "failed": failed, "ended": ended, "walls": walls, "taken": taken}
    return {**found, "devices": devices, "losses": losses}


class Workers:
    """Worker processes that wait for orders."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._ends, self._processes = [], []
        for number in range(count):
            ours, theirs = context.Pipe()
            self._ends.append(ours)
            self._processes.append(context.Process(target=work, args=(number, theirs)))
            self._processes[-1].start()

    def run(
        self, count: int, order: tuple[Any, ...], meanwhile: Callable[[], None] = lambda: None
    ) -> list[dict[str, Any]]:
        """Have some workers call at the same time; return what each has found."""
        ends = self._ends[:count]
        for end in ends:
            end.send(order)
        for end in ends:
            end.recv()
        for end in ends:
            end.send(None)
        meanwhile()
        return [end.recv() for end in ends]

    def processes(self) -> list[psutil.Process]:
        return [psutil.Process(process.pid) for process in self._processes]

    def close(self) -> None:
        for end in self._ends:
            end.send(None)
        for process in self._processes:
            process.join(30)
