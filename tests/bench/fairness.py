"""Fair sharing of sixteen cores, whatever this machine has: pieces of work that sleep.

``python tests/bench/fairness.py`` writes results/fairness.json. A modest tenant sends evaluation
after evaluation, a greedy one floods the engine; a piece holds one of sixteen places for 1.2 ms and
needs no processor, so what is measured is how places are given, and what that costs in Python.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.pieces import helpers_on, run, work_in_python
from support.results import write_result
from warpfit_server.fairness import FairGate
from warpfit_server.workers import take_short_turns

CORES = 16
PIECE_SECONDS = 0.0012
#: Pieces of an evaluation of the modest tenant, and its pause between two.
PIECES = 40
PAUSE_SECONDS = 0.0055
ALONE_SECONDS, BESIDE_SECONDS = 5.0, 10.0
#: Clients of the greedy tenant, and pieces of each of their evaluations.
GREEDY = {"the same evaluations": (16, PIECES), "ten times larger": (8, 10 * PIECES)}


class Engine:
    """Places, helping threads and cores that only sleep."""

    def __init__(self) -> None:
        self.gate = FairGate(CORES)
        self._helpers = helpers_on(CORES)
        self._cores = threading.Semaphore(CORES)

    def evaluate(self, tenant: str, pieces: int) -> float:
        """Run one evaluation; return its seconds."""
        started = time.perf_counter()
        with self.gate.turn(tenant):
            run(self._helpers, work_in_python(self._piece, pieces))
        return time.perf_counter() - started

    def _piece(self, number: int) -> None:
        with self._cores:
            time.sleep(PIECE_SECONDS)


def modest(engine: Engine, seconds: float) -> list[float]:
    """Milliseconds of one evaluation after the other."""
    times, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        times.append(1e3 * engine.evaluate("modest", PIECES))
        time.sleep(PAUSE_SECONDS)
    return times


def beside(engine: Engine, clients: int, pieces: int) -> tuple[list[float], float]:
    """Times of the modest tenant beside the greedy one, and the greedy one's pieces a second."""
    stop, done = threading.Event(), [0] * clients

    def flood(number: int) -> None:
        while not stop.is_set():
            engine.evaluate("greedy", pieces)
            done[number] += pieces

    threads = [threading.Thread(target=flood, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    before, started = sum(done), time.monotonic()
    times = modest(engine, BESIDE_SECONDS)
    rate = (sum(done) - before) / (time.monotonic() - started)
    stop.set()
    for thread in threads:
        thread.join()
    return times, rate


def percentiles(times: list[float]) -> dict[str, float]:
    """Of milliseconds."""
    return {f"p{level}_ms": round(float(np.percentile(times, level)), 2) for level in (50, 99)}


def main() -> None:
    take_short_turns()
    engine = Engine()
    measured: dict[str, Any] = {}
    for name, (clients, pieces) in GREEDY.items():
        alone = modest(engine, ALONE_SECONDS)
        times, rate = beside(engine, clients, pieces)
        measured[f"{clients} greedy clients, {name}"] = {
            "alone": percentiles(alone),
            "beside": percentiles(times),
            "p99_ratio": round(percentiles(times)["p99_ms"] / percentiles(alone)["p99_ms"], 2),
            "share_of_places": {
                "modest": round(len(times) * PIECES * PIECE_SECONDS / BESIDE_SECONDS / CORES, 3),
                "greedy": round(rate * PIECE_SECONDS / CORES, 3),
            },
        }
    content = {"places": CORES, "piece_seconds": PIECE_SECONDS, "tenants": measured}
    print(write_result("fairness", content).read_text())


if __name__ == "__main__":
    main()
