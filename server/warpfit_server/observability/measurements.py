"""What a process measures of its calls, and how the figures of several processes become one.

Every process that takes calls has a `Recorder`. Further doors send what they have recorded since
the last time to the front door, which adds it to its own: increments need no files, and survive the
door that sent them. A call leaves one tuple behind; many of them are added up at a time.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np

#: Upper bounds of the buckets of every histogram, in seconds.
BOUNDS: Final = (
    *(round(step * 10.0**power, 9) for power in range(-5, 2) for step in (1.0, 2.5, 5.0)),
    100.0,
)


@dataclass(frozen=True, slots=True)
class Family:
    """A metric: what it means and what its labels are called."""

    text: str
    labels: tuple[str, ...]


COUNTERS: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "requests": Family("Calls that have ended", ("method", "status", "tenant")),
        "programs": Family("Programs evaluated or fitted", ("tenant",)),
        "tokens": Family("Tokens of the programs evaluated or fitted", ("tenant",)),
        "token_rows": Family("Tokens times rows evaluated, one pass each", ("tenant",)),
        "evaluations": Family("Batches evaluated, by the tier that ran them", ("tier",)),
        "compiled_programs": Family("Programs served by kernels that were compiled already", ()),
        "received_bytes": Family("Payload of the data sets that were uploaded", ("tenant",)),
    }
)
HISTOGRAMS: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "request_seconds": Family("Time of a call from its arrival to its end", ("method",)),
        "stage_seconds": Family(
            "Time of an answered call in one stage: decode, queue, copy, kernel, encode", ("stage",)
        ),
    }
)

#: Most counters in a message to the front door; its length is limited.
_MOST_SERIES: Final = 500
#: Name of a metric and the values of its labels.
Series = tuple[str, tuple[str, ...]]
#: Stages of an answered call.
STAGES: Final = ("decode", "queue", "copy", "kernel", "encode")
#: Calls whose figures are kept before they are added up.
_MOST_SAMPLES: Final = 256


class Sample(NamedTuple):
    """What was measured of a call that has ended."""

    labels: tuple[str, str, str]
    """Method, status, tenant."""
    seconds: float
    received: int = 0
    """Bytes uploaded."""
    programs: int = 0
    tokens: int = 0
    token_rows: int = 0
    tier: str | None = None
    """That answered; None if the engine did not."""
    compiled: int = 0
    """Programs served by kernels that were compiled already."""
    stages: tuple[int, ...] = ()
    """Nanoseconds of each stage, if the engine answered."""


#: Names of the counters of a tenant's amounts, in the order of `Sample`.
_AMOUNTS: Final = ("received_bytes", "programs", "tokens", "token_rows")


@dataclass(slots=True, eq=False)
class Delta:
    """Increments of counters and histograms."""

    counts: dict[Series, float] = field(default_factory=dict)
    buckets: dict[Series, list[float]] = field(default_factory=dict)
    """For each bucket the observations in it alone, one more for +Inf, then their sum."""
    in_flight: int = 0
    """Calls that run at this moment; not an increment."""

    def count(self, name: str, labels: tuple[str, ...], amount: float = 1.0) -> None:
        """Add to a counter."""
        series = (name, labels)
        self.counts[series] = self.counts.get(series, 0.0) + amount

    def observe(self, name: str, labels: tuple[str, ...], seconds: Sequence[float]) -> None:
        """Add observations to a histogram."""
        row = self.buckets.get((name, labels))
        if row is None:
            row = self.buckets[name, labels] = [0.0] * (len(BOUNDS) + 2)
        for bucket in np.searchsorted(BOUNDS, seconds).tolist():
            row[bucket] += 1.0
        row[-1] += float(np.sum(seconds))

    def add(self, samples: Sequence[Sample]) -> None:
        """Add what was measured of calls."""
        answered = [sample for sample in samples if sample.tier is not None]
        for labels, count in Counter([sample.labels for sample in samples]).items():
            self.count("requests", labels, count)
        self._add_amounts(samples)
        for tier, count in Counter([sample.tier for sample in answered]).items():
            self.count("evaluations", (str(tier),), count)
        if answered:
            compiled = sum([sample.compiled for sample in answered])
            self.count("compiled_programs", (), compiled)
            for stage, seconds in zip(STAGES, _stage_seconds(answered), strict=True):
                self.observe("stage_seconds", (stage,), seconds)
        methods: dict[str, list[float]] = {}
        for sample in samples:
            methods.setdefault(sample.labels[0], []).append(sample.seconds)
        for method, times in methods.items():
            self.observe("request_seconds", (method,), times)

    def _add_amounts(self, samples: Sequence[Sample]) -> None:
        """Add what is counted of each tenant."""
        sums: dict[Series, float] = {}
        for sample in samples:
            tenant = sample.labels[2:]
            for name, amount in zip(_AMOUNTS, sample[2:6], strict=True):
                if amount:
                    sums[name, tenant] = sums.get((name, tenant), 0.0) + amount
        for (name, labels), total in sums.items():
            self.count(name, labels, total)

    def merge(self, other: Delta) -> None:
        """Add the increments of another."""
        for (name, labels), amount in other.counts.items():
            self.count(name, labels, amount)
        for series, row in other.buckets.items():
            mine = self.buckets.setdefault(series, [0.0] * len(row))
            self.buckets[series] = [a + b for a, b in zip(mine, row, strict=True)]


class Recorder:
    """Figures of the calls of this process and, in the front door, of the others too."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._delta = Delta()
        self._samples: deque[Sample] = deque()
        self._running: set[object] = set()
        self._running_elsewhere: dict[int, int] = {}

    def begin(self, call: object) -> None:
        """Note that a call has begun."""
        self._running.add(call)

    def end(self, call: object, sample: Sample) -> None:
        """Note that a call has ended, begun or not, and what was measured of it."""
        self._running.discard(call)
        self._samples.append(sample)
        if len(self._samples) >= _MOST_SAMPLES:
            with self._lock:
                self._add_up()

    def take(self) -> Delta:
        """Take what was recorded out, at most as much as fits into a message."""
        with self._lock:
            self._add_up()
            counts = self._delta.counts
            first = dict(islice(counts.items(), _MOST_SERIES))
            taken = Delta(first, self._delta.buckets, len(self._running))
            left = {series: counts[series] for series in counts.keys() - first.keys()}
            self._delta = Delta(left)
        return taken

    def add(self, source: int, delta: Delta) -> None:
        """Take in what another process has recorded."""
        with self._lock:
            self._running_elsewhere[source] = delta.in_flight
            self._delta.merge(delta)

    def forget(self, source: int) -> None:
        """Note that another process, and the calls that it had, are gone."""
        with self._lock:
            self._running_elsewhere.pop(source, None)

    def totals(self) -> Delta:
        """Return everything recorded so far."""
        with self._lock:
            self._add_up()
            elsewhere = sum(self._running_elsewhere.values())
            copy = Delta(in_flight=len(self._running) + elsewhere)
            copy.merge(self._delta)
        return copy

    def _add_up(self) -> None:
        """Add up the calls that have ended; the lock is held, but calls go on ending."""
        count = len(self._samples)
        if count:
            self._delta.add([self._samples.popleft() for _ in range(count)])


def _stage_seconds(answered: Sequence[Sample]) -> list[list[float]]:
    """Seconds of each stage, one list a stage."""
    matrix = np.array([sample.stages for sample in answered], np.float64) / 1e9
    seconds: list[list[float]] = matrix.T.tolist()
    return seconds
