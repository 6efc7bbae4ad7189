"""The CUDA engine through the wire: latency of one client, throughput of many.

``python tests/bench/gpu_service.py`` starts a server with the CUDA engine on loopback and writes
results/gpu_service.json. All calls ask for losses of 300 thesis-mix expressions of 10 to 50 tokens
over 10 variables and 100,000 rows, float32, fast mode.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import warpfit
from support.results import write_result
from support.server import ServerProcess
from warpfit.workload import thesis_mix

SEED = 20261121
ROWS = 100_000
WORKERS = 16
SECONDS = 10.0


def table() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(SEED)
    X = rng.uniform(0.5, 2.0, size=(ROWS, 10)).astype(np.float32)
    return X, X[:, 0].copy()


def percentiles(nanoseconds: list[int]) -> dict[str, float]:
    ordered = np.array(nanoseconds) / 1e6
    return {f"p{q}_ms": round(float(np.percentile(ordered, q)), 3) for q in (50, 90, 99)}


def fresh(client: warpfit.Client, data: Any, calls: int = 300) -> dict[str, Any]:
    """Every call has expressions that the server has not seen."""
    work = [thesis_mix(SEED + turn) for turn in range(calls)]
    walls, answers = [], []
    for programs, parameters in work:
        started = time.perf_counter_ns()
        answers.append(client.run(data, programs, parameters, loss="mse", precision="fast"))
        walls.append(time.perf_counter_ns() - started)
    return {**percentiles(walls[20:]), **server_side(answers[20:])}


def repeated(client: warpfit.Client, data: Any, tier: str, calls: int = 500) -> dict[str, Any]:
    """Every call has the same expressions and new parameters."""
    programs, parameters = thesis_mix(SEED)
    rng = np.random.default_rng(SEED)
    walls, answers = [], []
    for turn in range(calls + 1):
        moved = [vector * rng.uniform(0.9, 1.1, size=vector.shape) for vector in parameters]
        started = time.perf_counter_ns()
        answers.append(client.run(data, programs, moved, loss="mse", precision="fast", tier=tier))
        if turn:  # the first call compiles
            walls.append(time.perf_counter_ns() - started)
    return {**percentiles(walls[20:]), **server_side(answers[20:])}


def server_side(answers: list[Any]) -> dict[str, float]:
    """Median microseconds of each stage as the server reports them."""
    return {
        f"{stage}_us": round(statistics.median(getattr(a.timings, stage) for a in answers) / 1e3, 1)
        for stage in ("decode", "queue", "copy_in", "compute", "copy_out")
    }


def worker(address: str, number: int, barrier: Barrier, results: Any) -> None:
    X, y = table()
    work = [thesis_mix(SEED + 1000 * number + turn) for turn in range(60)]
    tokens = [sum(map(len, programs)) for programs, _ in work]
    with warpfit.connect(address) as client:
        data = client.upload(X, y)
        barrier.wait()
        started = time.perf_counter()
        done, turn = 0, 0
        while time.perf_counter() - started < SECONDS:
            programs, parameters = work[turn % len(work)]
            client.evaluate(
                data, programs, parameters=parameters, loss="mse", precision="fast",
                tier="interpreter",
            )  # fmt: skip
            done += tokens[turn % len(work)]
            turn += 1
        results.put((done, turn, time.perf_counter() - started))


def sustained(address: str) -> dict[str, float]:
    """Token-rows a second of many worker processes, each call with other expressions."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(WORKERS), context.Queue()
    workers = [
        context.Process(target=worker, args=(address, number, barrier, results))
        for number in range(WORKERS)
    ]
    for process in workers:
        process.start()
    rows = [results.get(timeout=120) for _ in workers]
    for process in workers:
        process.join(30)
    return {
        "workers": WORKERS,
        "calls_per_second": sum(turns / seconds for _, turns, seconds in rows),
        "token_rows_per_second": sum(ROWS * done / seconds for done, _, seconds in rows),
    }


def start_up() -> float:
    times = []
    for _ in range(3):
        started = time.perf_counter()
        server = ServerProcess(engine="cuda")
        times.append(time.perf_counter() - started)
        server.stop()
    return statistics.median(times)


def main() -> None:
    with ServerProcess(engine="cuda") as server, warpfit.connect(server.address) as client:
        X, y = table()
        data = client.upload(X, y)
        (device,) = client.info().devices
        content: dict[str, Any] = {
            "seed": SEED,
            "device": {"name": device.name, "driver": device.driver, "memory": device.memory},
            "fresh": fresh(client, data),
            "repeated_compiled": repeated(client, data, "compiled"),
            "repeated_interpreter": repeated(client, data, "interpreter"),
            "repeated_auto": repeated(client, data, "auto", 2000),
        }
        content["sustained"] = sustained(server.address)
    content["start_up_seconds"] = start_up()
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    path = write_result("gpu_service", content, *([directory] if directory else []))
    print(path.read_text())


if __name__ == "__main__":
    main()
