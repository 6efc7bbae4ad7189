"""Cost of a call in a client of three servers, against a client of one of them.

``python tests/bench/servers.py`` writes results/servers.json: 300 programs of the random mix, their
losses as the answer, from processes on loopback that compute nothing (`call_cost.py`). The cases
take turns; the time of the caller's thread is compared, and the time that passes. ``three_clients``
are clients of one server each that are called in turn: what three connections and three server
processes on two cores cost by themselves. ``choice`` is the part that chooses a server and learns
from the answer. The status is 1 if three servers cost the thread more than 0.1 ms.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import call_cost
import numpy as np
from harness import SEED, save

import warpfit
from support.servers.bare_grpc import bare_server
from warpfit.calls.dataset_handle import DatasetHandle
from warpfit.dataset import Dataset
from warpfit.expressions.workload import thesis_mix
from warpfit.transport.servers import Servers

ROUNDS, CALLS = 60, 40


def cost(actions: dict[str, Callable[[int], object]]) -> dict[str, dict[str, float]]:
    """Return microseconds of a call, thread time and passed time, of rounds in turns.

    What is returned is the 10th percentile, because other load on the machine only adds.
    """
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in actions}
    for _ in range(ROUNDS):
        for name, action in actions.items():
            thread, clock = time.thread_time_ns(), time.perf_counter_ns()
            for turn in range(CALLS):
                action(turn)
            spent = time.thread_time_ns() - thread, time.perf_counter_ns() - clock
            found[name].append((spent[0] / CALLS / 1e3, spent[1] / CALLS / 1e3))
    kinds = ("thread_us", "passed_us")
    return {
        name: {
            kind: round(float(np.percentile(times, 10)), 1)
            for kind, times in zip(kinds, zip(*series, strict=True), strict=True)
        }
        for name, series in found.items()
    }


def choose(servers: Servers, content_id: bytes) -> None:
    """Choose a server and note its answer, as a call does."""
    server = servers.acquire((), content_id, 1000)
    assert server is not None
    servers.succeeded(server, "Evaluate", 1000, 0.001)
    servers.release(server)


def main() -> None:
    # So few rows that the batch is not split over the servers.
    data = DatasetHandle(Dataset.of(np.ones((1000, 10), dtype=np.float32), np.ones(1000)))
    batches = [thesis_mix(SEED + turn) for turn in range(CALLS)]

    def calls(client: warpfit.Client) -> Callable[[int], Any]:
        return lambda turn: client.run(data, *batches[turn], **call_cost.OPTIONS)

    with ExitStack() as stack:
        script = call_cost.__file__
        addresses = [stack.enter_context(bare_server(script, "serve")) for _ in range(3)]
        single = [stack.enter_context(warpfit.connect(address)) for address in addresses]
        three = stack.enter_context(warpfit.connect(addresses))
        known = Servers(addresses)
        for client in (*single, three):
            for turn in range(10):
                calls(client)(turn)
        seen = cost(
            {
                "one_server": calls(single[0]),
                "three_clients": lambda turn: calls(single[turn % 3])(turn),
                "three_servers": calls(three),
                "choice": lambda _: choose(known, data.content_id),
            }
        )
    more = {
        f"three_more_than_{other}": {
            kind: round(seen["three_servers"][kind] - seen[other][kind], 1)
            for kind in ("thread_us", "passed_us")
        }
        for other in ("one_server", "three_clients")
    }
    save("servers", {"seed": SEED, "calls": ROUNDS * CALLS, **seen, **more})
    sys.exit(0 if more["three_more_than_one_server"]["thread_us"] <= 100.0 else 1)


if __name__ == "__main__":
    main()
