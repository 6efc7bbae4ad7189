"""Many workers at once, each with calls of its own and without a pause between them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

from warpfit.bench.measure import call
from warpfit.bench.processes import Processes
from warpfit.bench.scenarios import Scenario
from warpfit.bench.statistics import summarise
from warpfit.bench.work import Expressions, table, token_count
from warpfit.client import connect

#: Batches that a process prepares and goes through again and again: drawing them meanwhile would
#: take the processor from server and clients. The interpreter keeps nothing of a batch.
_BATCHES: Final = 16


@dataclass(frozen=True, slots=True)
class Workers:
    """What one process does: ``threads`` clients that call for ``seconds``."""

    address: str
    scenario: Scenario
    seed: int
    process: int
    threads: int
    seconds: float

    def perform(self, begin: Callable[[], float]) -> tuple[list[float], int, float]:
        """Return the seconds of each call, the tokens of all, and how long it took."""
        scenario = self.scenario
        given = table(scenario.rows, self.seed)
        drawn = Expressions(self.seed, (self.process, scenario.workers))
        batches = [drawn.fresh(scenario.expressions, scenario.tokens) for _ in range(_BATCHES)]
        with ExitStack() as stack:
            clients = [stack.enter_context(connect(self.address)) for _ in range(self.threads)]
            uploaded = [client.upload(given.X, given.y) for client in clients]
            call(clients[0], uploaded[0], scenario, batches[0])
            start = begin()

            def loop(number: int) -> list[tuple[float, int]]:
                done, turn = [], number
                while time.monotonic() < start + self.seconds:
                    batch = batches[turn % _BATCHES]
                    made = call(clients[number], uploaded[number], scenario, batch)
                    done.append((made.wall / 1e9, token_count(batch[0])))
                    turn += 1
                return done

            with ThreadPoolExecutor(self.threads) as pool:
                calls = [one for done in pool.map(loop, range(self.threads)) for one in done]
            span = time.monotonic() - start
        return [wall for wall, _ in calls], sum(tokens for _, tokens in calls), span


def measure(
    pool: Processes, address: str, scenario: Scenario, seconds: float, seed: int
) -> dict[str, Any]:
    """Let ``scenario.workers`` clients call at once; return what they did together."""
    shares = _shares(scenario.workers, pool.count)
    tasks = [
        Workers(address, scenario, seed, number, threads, seconds)
        for number, threads in enumerate(shares)
    ]
    found = pool.perform(tasks, seconds)
    walls = [wall for walls, _, _ in found for wall in walls]
    span = max(duration for _, _, duration in found)
    return {
        "scenario": scenario.to_json(),
        "processes": len(shares),
        "wall": summarise(walls).to_json(),
        "calls_per_second": len(walls) / span,
        "token_rows_per_second": {
            "wall": sum(tokens for _, tokens, _ in found) * scenario.rows / span
        },
    }


def processes_for(workers: int) -> int:
    """Processes for so many clients: at most two for each core, with threads in them."""
    return min(workers, 2 * len(os.sched_getaffinity(0)))


def _shares(workers: int, processes: int) -> Sequence[int]:
    """Threads of each process that is needed."""
    used = min(workers, processes)
    return [workers // used + (number < workers % used) for number in range(used)]
