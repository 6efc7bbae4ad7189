"""A mixed load on a server for a long time, and whether its memory grows."""

import threading
import time
from contextlib import suppress
from typing import Any

import numpy as np

import warpfit
from support.load.faults import injected
from support.load.load import OwnConnection
from support.load.processes import in_threads
from support.random_programs import thesis_mix
from support.servers.server import ServerProcess
from warpfit.cli.top import scrape
from warpfit.errors import DeadlineExceededError, WarpfitError

#: Growth from which on a soak has failed.
LIMIT_BYTES = 50 << 20
#: Share of the time after which caches and pools are full, and share at each end that is compared.
_WARM_UP, _WINDOW = 0.25, 0.1


def soak(seconds: float, clients=4, front_ends=2, leak: int = 0, devices="cpu") -> dict[str, Any]:
    """Run the load; return what the server took, and whether it passed.

    The front ends keep ``leak`` bytes of each answered call: a planted leak.
    """
    environment = injected(f"leak={leak}") if leak else {}
    flags = f"--front-ends {front_ends} --metrics-port 0 --max-resident-bytes 32MiB".split()
    stop = threading.Event()
    counts: dict[str, int] = {}
    batches = [thesis_mix(seed, 300) for seed in range(2 if seconds < 60 else 12)]
    with ServerProcess(*flags, devices=devices, **environment) as server:
        given = server.address, batches, stop, counts
        samples, end = [], time.monotonic() + seconds
        with in_threads(lambda number: _client(number, *given), range(clients)):
            while time.monotonic() < end:
                samples.append(_sample(server))
                time.sleep(min(2.0, max(0.1, seconds / 50)))
            stop.set()
        time.sleep(1.0)  # further front ends send their figures twice a second
        page = scrape(server.facts["metrics"])
    seen = {**judged(samples), "calls": dict(sorted(counts.items()))}
    seen["in_flight_at_the_end"] = page.total("warpfit_requests_in_flight")
    seen["internal_errors"] = page.total("warpfit_requests_total", status="INTERNAL")
    names = ("engine_restarts", "evictions")
    return seen | {name: page.total(f"warpfit_{name}_total") for name in names}


def _sample(server: ServerProcess) -> dict[str, float]:
    """Memory of the server's processes, each page counted once, and what else may pile up."""
    family = server.family()
    memory = {f"{role}_bytes": p.memory_full_info().pss for role, p in family.items()}
    gpus = scrape(server.facts["metrics"]).total("warpfit_gpu_memory_used_bytes")
    threads = sum(process.num_threads() for process in family.values())
    files = sum(process.num_fds() for process in family.values())
    found = {"memory_bytes": sum(memory.values()), **memory, "descriptors": files}
    return found | {"threads": threads, "gpu_bytes": gpus}


def judged(samples: list[dict[str, float]]) -> dict[str, Any]:
    """Compare memory after the warm-up with memory at the end."""
    count = len(samples)
    width = max(1, round(count * _WINDOW))
    early, late = samples[round(count * _WARM_UP) :][:width], samples[-width:]
    middle = lambda name, window: int(np.median([sample[name] for sample in window]))  # noqa: E731
    ends = {name: [middle(name, window) for window in (early, late)] for name in samples[0]}
    growth = {name: after - before for name, (before, after) in ends.items()}
    passed = max(growth["memory_bytes"], growth["gpu_bytes"]) < LIMIT_BYTES
    tenths = [samples[count * part // 10]["memory_bytes"] >> 20 for part in range(10)]
    found = {"samples": count, "memory_mib_at_each_tenth": tenths, "warm_and_end": ends}
    return {**found, "growth": growth, "passed": passed}


def _client(number: int, address: str, batches, stop: threading.Event, counts: dict[str, int]):
    with warpfit.connect(address, transport=OwnConnection()) as client:
        actions = _actions(client, np.random.default_rng(number), batches)
        while not stop.is_set():
            for name in TURN:
                outcome = name
                try:
                    actions[name]()
                except WarpfitError as error:
                    outcome = f"{name}: {type(error).__name__}"
                counts[outcome] = counts.get(outcome, 0) + 1


#: What a client does in a turn.
TURN = (
    *("losses", "values", "gradient", "losses", "fit", "impatience", "losses", "mistake"),
    *("upload", "losses", "values", "upload_and_release"),
)


def _actions(client: warpfit.Client, rng: np.random.Generator, batches: list[Any]):
    X = rng.uniform(0.5, 2.0, size=(2_000, 10))
    data, program = client.upload(X, X[:, 0]), warpfit.parse("p1*x1 + sin(x2)")
    one, few = ([program], [[0.5]]), {"rows": slice(0, 10)}

    def losses(**options: Any) -> None:
        batch = batches[int(rng.integers(len(batches)))]
        client.evaluate(data, *batch, loss="mse", **options)

    def values() -> None:
        count = int(rng.integers(1, 200))
        client.evaluate(data, [program] * count, [[0.5]] * count)

    def upload() -> None:
        """A data set that is never released: the server evicts it."""
        client.evaluate(client.upload(rng.normal(size=(20_000, 10))), *one, **few)

    def upload_and_release() -> None:
        with client.upload(rng.normal(size=(5_000, 4))) as fresh:
            client.evaluate(fresh, *one, **few)

    def impatience() -> None:
        with suppress(DeadlineExceededError):
            losses(timeout=0.004)

    return {
        **{"losses": losses, "values": values, "upload": upload, "impatience": impatience},
        "upload_and_release": upload_and_release,
        "gradient": lambda: client.evaluate(data, *one, loss="mse", gradient=True),
        "fit": lambda: client.optimize(data, [program], [rng.normal(size=1)], max_iterations=5),
        "mistake": lambda: client.evaluate(data, ["x1 + x99"]),
    }
