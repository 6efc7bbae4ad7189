"""Clients that evaluate again and again, check every answer and count."""

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

import warpfit
from support.load.processes import in_threads
from support.servers.server import eventually

ROWS = 500
#: Seconds between the calls of a client, which leave the cores to the servers.
_PAUSE = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnConnection(warpfit.TransportConfig):
    """A connection for each client, which a server of several processes deals out."""

    def channel_options(self) -> list[tuple[str, int]]:
        common = warpfit.TransportConfig.channel_options(self)
        return [*common, ("grpc.use_local_subchannel_pool", 1)]


@dataclass(slots=True)
class Tally:
    """What one client has seen."""

    right: int = 0
    wrong: int = 0
    failures: list[str] = field(default_factory=list)
    moments: list[float] = field(default_factory=list)
    """``time.monotonic()`` of each right answer."""
    longest: float = 0.0
    """Seconds of the longest call, its repetitions included."""


class Load:
    """Clients in threads; a context manager. The data sets are uploaded by the clients."""

    def __init__(self, address: str, clients: int, retry_seconds: float = 20.0) -> None:
        self._address = address
        self._retry = warpfit.RetryPolicy(total_seconds=retry_seconds, maximum_backoff=0.2)
        self._stop = threading.Event()
        self.tallies = [Tally() for _ in range(clients)]
        self._running = ExitStack()

    def __enter__(self):
        self._running.enter_context(in_threads(self._run, range(len(self.tallies))))
        eventually(lambda: all(tally.right or tally.failures for tally in self.tallies), 60)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._running.close()

    @property
    def right(self) -> int:
        return sum(tally.right for tally in self.tallies)

    @property
    def wrong(self) -> int:
        return sum(tally.wrong for tally in self.tallies)

    @property
    def failures(self) -> list[str]:
        return [failure for tally in self.tallies for failure in tally.failures]

    @property
    def longest_call(self) -> float:
        return max(tally.longest for tally in self.tallies)

    def gap(self, start: float, stop: float) -> float:
        """Longest time without any right answer between two moments."""
        moments = sorted(m for tally in self.tallies for m in tally.moments if start <= m <= stop)
        return max(b - a for a, b in pairwise([start, *moments, stop]))

    def gaps(self, start: float, stop: float) -> list[float]:
        """Longest time of each client without a right answer, among those between two moments."""
        answers = [[m for m in tally.moments if start <= m <= stop] for tally in self.tallies]
        longest = [
            max((b - a for a, b in pairwise([start, *each])), default=0.0) for each in answers
        ]
        return [gap or stop - start for gap in longest]

    def gaps_after(self, fault: Callable[[], object], times: int, answers: int = 3) -> list[float]:
        """Provoke a fault so often; the longest time without any right answer after each."""
        found = []
        for _ in range(times):
            self.wait_for_answers(answers)
            began = time.monotonic()
            fault()
            self.wait_for_answers(answers)
            found.append(self.gap(began, time.monotonic()))
        return found

    def wait_for_answers(self, count: int) -> None:
        """Wait until every client has had ``count`` more right answers."""
        wanted = [tally.right + count for tally in self.tallies]
        tallies = list(zip(self.tallies, wanted, strict=True))
        eventually(lambda: all(tally.right >= most for tally, most in tallies), 30)

    def _run(self, number: int) -> None:
        tally, factor = self.tallies[number], number * 1e6
        X = np.random.default_rng(number).normal(size=(ROWS, 3))
        policy, transport = self._retry, OwnConnection()
        with warpfit.connect(self._address, retry=policy, transport=transport) as client:
            data = client.upload(X, X[:, 0], dtype="float64")
            while not self._stop.is_set():
                factor += 1.0
                started, parameters = time.monotonic(), [[factor]] * 2
                try:
                    got = client.evaluate(data, ["p1*x1 + x2", "x3 - p1"], parameters)
                except Exception as error:  # whatever a caller would see
                    tally.failures.append(repr(error))
                    time.sleep(0.05)
                    continue
                expected = np.stack([factor * X[:, 0] + X[:, 1], X[:, 2] - factor], axis=1)
                if np.array_equal(got, expected):
                    tally.right += 1
                    tally.moments.append(time.monotonic())
                else:
                    tally.wrong += 1
                tally.longest = max(tally.longest, time.monotonic() - started)
                time.sleep(_PAUSE)
