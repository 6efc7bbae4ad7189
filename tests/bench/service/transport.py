"""What moving matrices costs between processes of one machine, and the bounds of that.

``run.py service/transport`` starts a server on loopback and writes results/transport.json: a
value matrix of 120 MB (with an engine that computes nothing, then with the CPU engine, which takes
the same processors) and an upload of 400 MB. Beside them stand the bounds of the machine in the
same run: copying memory and SHA-256. The best round says what the machine can do, the median what
other programs on it have left.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil
from harness import SEED, ServerProcess, save, seconds_of

import warpfit
from support.load.faults import injected
from warpfit.dataset import Dataset
from warpfit.transport.call import Request

ROUNDS = 9
ROWS, PROGRAMS = 100_000, 300
UPLOAD_ROWS, UPLOAD_VARIABLES = 1_000_000, 100


def rates(size: int, seconds: list[float]) -> dict[str, float]:
    """GB/s of the median and of the best round."""
    median, best = statistics.median(seconds), min(seconds)
    return {"gb_s": size / median / 1e9, "best_gb_s": size / best / 1e9}


# ------------------------------------------------------------------------------------- bounds


def memory_bounds(size: int) -> dict[str, Any]:
    """Copying memory that is in use already, and hashing it."""
    source = np.random.default_rng(SEED).bytes(size)
    target = np.zeros(size, np.uint8)
    view = np.frombuffer(source, np.uint8)
    return {
        "memory_copy": rates(size, seconds_of(lambda: np.copyto(target, view), ROUNDS)),
        "sha256": rates(size, seconds_of(lambda: hashlib.sha256(source).digest(), 3)),
    }


# ------------------------------------------------------------------------------------- warpfit


@contextmanager
def client_and_front_end(**environment: str) -> Iterator[tuple[warpfit.Client, psutil.Process]]:
    """A client of a server with one front end, and its process."""
    with (
        ServerProcess("--front-ends", "1", **environment) as server,
        warpfit.connect(server.address) as client,
    ):
        yield client, server.front_ends()[0]


def answers(client: warpfit.Client, front_end: psutil.Process, *, idle: bool) -> dict[str, Any]:
    """A value matrix, again and again; an idle engine computes nothing, so that it only moves."""
    X = np.random.default_rng(SEED).normal(size=(ROWS, 10)).astype(np.float32)
    expressions = [warpfit.parse(f"x{n % 10 + 1}") for n in range(PROGRAMS)]
    data = client.upload(X)
    expected = np.tile(X, PROGRAMS // 10)
    first = client.run(data, expressions)  # makes segments
    if not (idle or np.array_equal(first.values, expected)):
        raise SystemExit("wrong values")
    del first
    seconds, work, engine = [], [], []
    for _ in range(ROUNDS):
        cpu, started = cpu_seconds(front_end), time.perf_counter()
        answer = client.run(data, expressions)
        seconds.append(time.perf_counter() - started)
        work.append(cpu_seconds(front_end) - cpu)
        engine.append(answer.timings.compute / 1e9)
        del answer
    size = expected.nbytes
    return {
        "bytes": size,
        **({} if idle else {"engine_seconds": statistics.median(engine)}),
        **described(size, seconds, work),
    }


def uploads(client: warpfit.Client, front_end: psutil.Process) -> dict[str, Any]:
    """Fresh content each time: making it ready (transposed, hashed), and sending."""
    X = np.random.default_rng(SEED).normal(size=(UPLOAD_ROWS, UPLOAD_VARIABLES)).astype(np.float32)
    ready, seconds, work = [], [], []
    failover = client._failover
    for turn in range(5):
        X[0, 0] = turn
        started = time.perf_counter()
        dataset = Dataset.of(X)
        ready.append(time.perf_counter() - started)
        cpu, started = cpu_seconds(front_end), time.perf_counter()
        failover.upload(
            next(iter(failover.servers)), Request("GetVariables", None, dataset=dataset)
        )
        seconds.append(time.perf_counter() - started)
        work.append(cpu_seconds(front_end) - cpu)
        handle = warpfit.calls.dataset_handle.DatasetHandle(dataset)
        client.release(handle, everywhere=True)
    size = X.nbytes
    found = {"bytes": size, "ready": rates(size, ready), **described(size, seconds, work)}
    for figure, choose in (("gb_s", statistics.median), ("best_gb_s", min)):
        found[f"with_ready_{figure}"] = size / (choose(ready) + choose(seconds)) / 1e9
    return found


def described(size: int, seconds: list[float], work: list[float]) -> dict[str, float]:
    """Rates, and processor time of client and front end for each GB."""
    return {**rates(size, seconds), "cpu_seconds_a_gb": statistics.median(work) / size * 1e9}


def cpu_seconds(front_end: psutil.Process) -> float:
    """Processor time of this process and the server's front end."""
    times = front_end.cpu_times()
    return time.process_time() + times.user + times.system


def main() -> None:
    bounds = memory_bounds(ROWS * PROGRAMS * 4)
    with client_and_front_end(**injected("idle=1")) as (client, front_end):
        moved = answers(client, front_end, idle=True)
    with client_and_front_end() as (client, front_end):
        found = {
            "answer": moved,
            "answer_with_cpu_engine": answers(client, front_end, idle=False),
            "upload": uploads(client, front_end),
        }
    save("transport", {"seed": SEED, "bounds": bounds, **found})


if __name__ == "__main__":
    main()
