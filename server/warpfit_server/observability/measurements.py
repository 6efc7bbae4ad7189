"""Counters and histograms of calls, and how those of several processes become one.

Every front end has a `Recorder`. Front-end processes send what they have recorded since the last
time to the main process, which adds it to its own: increments need no files, and survive the
process that sent them. The records of many calls are added up at a time.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from warpfit.errors import REQUEST_ID_KEY
from warpfit.request import Timings

#: Upper bounds of the buckets of every histogram, in seconds.
BUCKET_BOUNDS: Final = (
    *(round(step * 10.0**power, 9) for power in range(-5, 2) for step in (1.0, 2.5, 5.0)),
    100.0,
)


class Family(NamedTuple):
    """A metric family: its documentation and the names of its labels."""

    text: str
    labels: tuple[str, ...]


CALL_COUNTERS: Final[Mapping[str, Family]] = {
    "requests": Family("Calls that have ended", ("method", "status", "tenant")),
    "programs": Family("Programs evaluated or fitted", ("tenant",)),
    "tokens": Family("Tokens of the programs evaluated or fitted", ("tenant",)),
    "token_rows": Family("Tokens times rows evaluated, one pass each", ("tenant",)),
    "evaluations": Family(
        "Batches evaluated, by the tier and the device that ran them", ("tier", "device")
    ),
    "compiled_programs": Family("Programs served by kernels that were compiled already", ()),
    "received_bytes": Family("Payload of the data sets that were uploaded", ("tenant",)),
}
HISTOGRAMS: Final[Mapping[str, Family]] = {
    "request_seconds": Family("Time of a call from its arrival to its end", ("method",)),
    "stage_seconds": Family(
        "Time of an answered call in one stage: decode, queue, copy, kernel, encode", ("stage",)
    ),
}
#: Stages of an answered call.
CALL_STAGES: Final = ("decode", "queue", "copy", "kernel", "encode")
#: Calls whose measurements are kept before they are added up.
_MOST_CALLS: Final = 256
#: Metadata entries of W3C Trace Context.
TRACE_KEYS: Final = ("traceparent", "tracestate")
#: Longest value of a trace entry that is passed on; the standard asks for at least 512 characters.
TRACE_CHARACTERS: Final = 512
#: Name of a family and the values of its labels.
Series = tuple[str, tuple[str, ...]]


@dataclass(slots=True, eq=False)
class CallRecord:
    """The record of one call. All moments are ``time.monotonic_ns()``."""

    method: str
    request_id: str
    started: int
    tenant: str
    """Owner of the call; the anonymous tenant until the credentials have been checked."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    received_bytes: int = 0
    """Payload uploaded."""
    programs: int = 0
    tokens: int = 0
    token_rows: int = 0
    decode: int = 0
    """Nanoseconds until its batch was decoded and checked."""
    timings: Timings | None = None
    """Timings of the engine, once it has finished."""
    finished: int = 0
    """Moment at which the engine had finished; 0 before."""
    suspended: int = 0
    """Nanoseconds since `finished` spent waiting for the client or the network."""
    encode: int = 0
    """Nanoseconds from `finished` to the last message, without `suspended`."""
    status: str = ""
    """Name of the status with which it has ended."""
    ended: int = 0

    @property
    def seconds(self) -> float:
        """Time that the call took."""
        return (self.ended - self.started) / 1e9

    def stages(self, timings: Timings) -> tuple[int, ...]:
        """Return the nanoseconds of each of `CALL_STAGES` of an answered call."""
        copy = timings.copy_in + timings.copy_out
        return timings.decode, timings.queue, copy, timings.compute, self.encode

    @property
    def trace(self) -> dict[str, str]:
        """Trace Context of the caller."""
        return {
            key: str(self.metadata[key])
            for key in TRACE_KEYS
            if len(self.metadata.get(key, ())) in range(1, TRACE_CHARACTERS + 1)
        }

    @property
    def trailing(self) -> tuple[tuple[str, str], ...]:
        """Metadata that every answer carries."""
        return ((REQUEST_ID_KEY, self.request_id),)


#: Counters of a tenant's amounts, which are fields of a record.
_AMOUNTS: Final = ("received_bytes", "programs", "tokens", "token_rows")


@dataclass(slots=True, eq=False)
class MetricsDelta:
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
            row = self.buckets[name, labels] = [0.0] * (len(BUCKET_BOUNDS) + 2)
        for bucket in np.searchsorted(BUCKET_BOUNDS, seconds).tolist():
            row[bucket] += 1.0
        row[-1] += float(np.sum(seconds))

    def add(self, calls: Sequence[CallRecord]) -> None:
        """Add what was measured of calls that have ended; programs count if they were answered."""
        times: dict[str, list[float]] = {}
        amounts: Counter[Series] = Counter()
        for call in calls:
            amounts["requests", (call.method, call.status, call.tenant)] += 1
            times.setdefault(call.method, []).append(call.seconds)
            for name in _AMOUNTS[: None if call.timings else 1]:
                if amount := getattr(call, name):
                    amounts[name, (call.tenant,)] += amount
        for method, seconds in times.items():
            self.observe("request_seconds", (method,), seconds)
        for (name, labels), total in amounts.items():
            self.count(name, labels, total)
        answered = [(call, call.timings) for call in calls if call.timings is not None]
        if answered:
            self._add_answered(answered)

    def _add_answered(self, answered: Sequence[tuple[CallRecord, Timings]]) -> None:
        ran = Counter([(timings.tier, timings.device) for _, timings in answered])
        for (tier, devices), count in ran.items():
            for device in devices.split(","):
                self.count("evaluations", (str(tier), device), count)
        self.count("compiled_programs", (), sum([timings.cache_hits for _, timings in answered]))
        stages = np.array([call.stages(timings) for call, timings in answered], np.float64).T / 1e9
        for stage, seconds in zip(CALL_STAGES, stages.tolist(), strict=True):
            self.observe("stage_seconds", (stage,), seconds)

    def merge(self, other: MetricsDelta) -> None:
        """Add the increments of another one."""
        for (name, labels), amount in other.counts.items():
            self.count(name, labels, amount)
        for series, row in other.buckets.items():
            mine = self.buckets.setdefault(series, [0.0] * len(row))
            self.buckets[series] = [a + b for a, b in zip(mine, row, strict=True)]


class Recorder:
    """Counters and histograms of this process and, in the main process, of the others too."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._delta = MetricsDelta()
        self._ended: deque[CallRecord] = deque()
        self._running: set[CallRecord] = set()
        self._running_elsewhere: dict[int, int] = {}

    def begin(self, call: CallRecord) -> None:
        """Count a call as running."""
        self._running.add(call)

    def end(self, call: CallRecord) -> None:
        """Record a call that has ended, whether or not it was counted as running."""
        self._running.discard(call)
        self._ended.append(call)
        if len(self._ended) >= _MOST_CALLS:
            with self._lock:
                self._add_up()

    def take(self) -> MetricsDelta:
        """Take out what was recorded since the last time."""
        with self._lock:
            self._add_up()
            taken, self._delta = self._delta, MetricsDelta()
        taken.in_flight = len(self._running)
        return taken

    def add(self, process: int, delta: MetricsDelta) -> None:
        """Add what another process has recorded."""
        with self._lock:
            self._running_elsewhere[process] = delta.in_flight
            self._delta.merge(delta)

    def forget(self, process: int) -> None:
        """Take notice that another process, with the calls that it had, is gone."""
        with self._lock:
            self._running_elsewhere.pop(process, None)

    def totals(self) -> MetricsDelta:
        """Return everything recorded so far."""
        with self._lock:
            self._add_up()
            elsewhere = sum(self._running_elsewhere.values())
            copy = MetricsDelta(in_flight=len(self._running) + elsewhere)
            copy.merge(self._delta)
        return copy

    def _add_up(self) -> None:
        """Add up the calls that have ended; the lock is held, but calls go on ending."""
        count = len(self._ended)
        if count:
            self._delta.add([self._ended.popleft() for _ in range(count)])
