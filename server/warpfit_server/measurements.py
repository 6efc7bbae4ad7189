"""What a process measures of its calls, and how the figures of several processes become one.

Every process that takes calls has a `Recorder`. Further doors send what they have recorded since
the last time to the front door, which adds it to its own: increments need no files, survive the
door that sent them, and cost a call a few dictionary updates.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType
from typing import Final

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
#: What was measured of a call: amounts for counters and seconds for histograms.
Measured = tuple[
    Sequence[tuple[str, tuple[str, ...], float]], Sequence[tuple[str, tuple[str, ...], float]]
]


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

    def observe(self, name: str, labels: tuple[str, ...], seconds: float) -> None:
        """Add an observation to a histogram."""
        row = self.buckets.get((name, labels))
        if row is None:
            row = self.buckets[name, labels] = [0.0] * (len(BOUNDS) + 2)
        row[bisect_left(BOUNDS, seconds)] += 1.0
        row[-1] += seconds

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
        self._running = 0
        self._running_elsewhere: dict[int, int] = {}

    def begin(self) -> None:
        """Note that a call has begun."""
        with self._lock:
            self._running += 1

    def end(self, measured: Measured) -> None:
        """Note that a call has ended, and what was measured of it."""
        counts, observations = measured
        with self._lock:
            self._running -= 1
            for name, labels, amount in counts:
                self._delta.count(name, labels, amount)
            for name, labels, seconds in observations:
                self._delta.observe(name, labels, seconds)

    def take(self) -> Delta:
        """Take what was recorded out, at most as much as fits into a message."""
        with self._lock:
            counts = self._delta.counts
            first = dict(islice(counts.items(), _MOST_SERIES))
            taken = Delta(first, self._delta.buckets, self._running)
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
            copy = Delta(in_flight=self._running + sum(self._running_elsewhere.values()))
            copy.merge(self._delta)
        return copy
