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


def soak(
    seconds: float, clients: int = 4, front_ends: int = 2, leak: int = 0, devices: str = "cpu"
) -> dict[str, Any]:
    """Run the load, and return the server's memory, descriptors, threads, and whether it passed.

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
    return {
        **judged(samples),
        "calls": dict(sorted(counts.items())),
        "in_flight_at_the_end": page.total("warpfit_requests_in_flight"),
        "engine_restarts": page.total("warpfit_engine_restarts_total"),
        "evictions": page.total("warpfit_evictions_total"),
        "internal_errors": page.total("warpfit_requests_total", status="INTERNAL"),
    }


def _sample(server: ServerProcess) -> dict[str, float]:
    """Memory of the server's processes, each page counted once, and what else may pile up."""
    family = server.family()
    memory = {f"{role}_bytes": p.memory_full_info().pss for role, p in family.items()}
    gpus = scrape(server.facts["metrics"]).total("warpfit_gpu_memory_used_bytes")
    return {
        "memory_bytes": sum(memory.values()),
        **memory,
        "descriptors": sum(process.num_fds() for process in family.values()),
        "threads": sum(process.num_threads() for process in family.values()),
        "gpu_bytes": gpus,
    }


def judged(samples: list[dict[str, float]]) -> dict[str, Any]:
    """Compare memory after the warm-up with memory at the end."""
    count = len(samples)
    width = max(1, round(count * _WINDOW))
    early, late = samples[round(count * _WARM_UP) :][:width], samples[-width:]
    ends = {
        name: [int(np.median([sample[name] for sample in window])) for window in (early, late)]
        for name in samples[0]
    }
    growth = {name: after - before for name, (before, after) in ends.items()}
    passed = max(growth["memory_bytes"], growth["gpu_bytes"]) < LIMIT_BYTES
    tenths = [samples[count * part // 10]["memory_bytes"] >> 20 for part in range(10)]
    found = {"samples": count, "memory_mib_at_each_tenth": tenths, "warm_and_end": ends}
    return {**found, "growth": growth, "passed": passed}


def _client(
    number: int, address: str, batches: list[Any], stop: threading.Event, counts: dict[str, int]
) -> None:
    with warpfit.connect(address, transport=OwnConnection()) as client:
        worker = Worker(client, number, batches)
        while not stop.is_set():
            for name in ACTIONS:
                outcome = name
                try:
                    getattr(worker, name)()
                except WarpfitError as error:
                    outcome = f"{name}: {type(error).__name__}"
                counts[outcome] = counts.get(outcome, 0) + 1


class Worker:
    """What one client does, in turns."""

    def __init__(self, client: warpfit.Client, number: int, batches: list[Any]) -> None:
        self._client = client
        self._rng = np.random.default_rng(number)
        X = self._rng.uniform(0.5, 2.0, size=(2_000, 10))
        self._data = client.upload(X, X[:, 0])
        self._batches = batches
        self._program = warpfit.parse("p1*x1 + sin(x2)")

    def _batch(self) -> Any:
        return self._batches[int(self._rng.integers(len(self._batches)))]

    def losses(self) -> None:
        self._client.evaluate(self._data, *self._batch(), loss="mse")

    def values(self) -> None:
        count = int(self._rng.integers(1, 200))
        self._client.evaluate(self._data, [self._program] * count, [[0.5]] * count)

    def gradient(self) -> None:
        self._client.evaluate(self._data, [self._program], [[0.5]], loss="mse", gradient=True)

    def fit(self) -> None:
        start = [self._rng.normal(size=1)]
        self._client.optimize(self._data, [self._program], start, max_iterations=5)

    def upload(self) -> None:
        """A data set that is never released: the server evicts it."""
        fresh = self._client.upload(self._rng.normal(size=(20_000, 10)))
        self._client.evaluate(fresh, [self._program], [[0.5]], rows=slice(0, 10))

    def upload_and_release(self) -> None:
        with self._client.upload(self._rng.normal(size=(5_000, 4))) as fresh:
            self._client.evaluate(fresh, [self._program], [[0.5]], rows=slice(0, 10))

    def mistake(self) -> None:
        self._client.evaluate(self._data, ["x1 + x99"])

    def impatience(self) -> None:
        with suppress(DeadlineExceededError):
            self._client.evaluate(self._data, *self._batch(), loss="mse", timeout=0.004)


#: In the order of a turn, those with many calls several times.
ACTIONS = (
    *("losses", "values", "gradient", "losses", "fit", "impatience", "losses", "mistake"),
    *("upload", "losses", "values", "upload_and_release"),
)
