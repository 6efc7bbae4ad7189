"""What was under way when an engine died, so that it does not kill one engine after the other.

An engine that dies takes all its work along, and a piece of it may be to blame. So everything that
was under way becomes a *suspect*. A suspect that comes again runs alone for a while, one after the
other (`warpfit_server.engine.isolation`): if it ends, it is cleared; if the engine dies while it is
all that runs, and not for the first time with it, it is *quarantined* and refused. Whoever merely
had a batch beside the one to blame is therefore never refused, however often both come again.

A data set is a suspect when it was being loaded, or batches on it were under way. It is
quarantined when a second engine dies as it is loaded, this time one that did nothing else, or when
two different batches on it were each all that ran when an engine died.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.errors import FailedPreconditionError
from warpfit.fitting import FitSettings
from warpfit.request import Evaluation

#: Most data sets and batches that are kept in mind; the oldest is forgotten first.
_MOST_RECORDS: Final = 256
#: Seconds after its last crash until a suspect, and a thing in quarantine, is forgotten.
_SUSPECT_SECONDS: Final = 600.0
_QUARANTINE_SECONDS: Final = 3600.0
#: Seconds that a suspect runs alone after one crash; four times as long after each further one, so
#: that what kills slowly is found, too, and what is found at once holds nobody up for long.
_ALONE_SECONDS: Final = 2.0
_LONGEST_ALONE: Final = 120.0
#: Crashes of which more would change nothing.
_MOST_COUNTED: Final = 8
#: A connection that was lost so many seconds before an engine died has nothing to do with that.
_TOGETHER_SECONDS: Final = 5.0
#: Engines whose ends are remembered, for reports that come late.
_MOST_DEATHS: Final = 8
#: Arrays of a batch.
_ARRAYS: Final = ("codes", "values", "lengths", "parameter_counts", "parameters")


@dataclass(frozen=True, slots=True)
class InterruptedBatch:
    """A batch was under way on a connection to an engine that was lost."""

    engine: int
    """Number of the engine process, from 1."""
    dataset: bytes
    batch: bytes
    """Its digest, see `digest`."""
    alone: bool
    """Whether nothing else ran in the engine."""


@dataclass(frozen=True, slots=True)
class ClearedSuspect:
    """A suspect has ended, and the engine lives."""

    dataset: bytes
    batch: bytes


@dataclass(frozen=True, slots=True)
class SuspectList:
    """Names of batches and data sets, as all front-end processes know them."""

    version: int = 0
    suspects: Mapping[bytes, float] = field(default_factory=dict)
    """Seconds for which each must run alone."""
    quarantined: frozenset[bytes] = frozenset()


class KnownSuspects:
    """The suspects as one front-end process knows them."""

    def __init__(self) -> None:
        self._known = SuspectList()
        self._lock = threading.Lock()

    def update(self, new: SuspectList) -> None:
        """Take a new list, unless a newer one has come before."""
        with self._lock:
            if new.version > self._known.version:
                self._known = new

    def check(self, dataset: bytes, batch: Callable[[], bytes]) -> float:
        """Return for how many seconds a batch must run alone; 0 if it is no suspect.

        Args:
            dataset: key of its data set.
            batch: computes its digest, which is only done when there are suspects.

        Raises:
            FailedPreconditionError: if batch or data set is in quarantine.

        """
        known = self._known
        if not (known.suspects or known.quarantined):
            return 0.0
        self.check_dataset(dataset)
        name = batch()
        if name in known.quarantined:
            raise _refused("batch", "programs", "Leave expressions out to find the one to blame")
        return max(known.suspects.get(dataset, 0.0), known.suspects.get(name, 0.0))

    def check_dataset(self, dataset: bytes) -> None:
        """Refuse a data set that is in quarantine.

        Raises:
            FailedPreconditionError: if it is.

        """
        if dataset in self._known.quarantined:
            raise _refused("data set", "content_id", "Change the data, or release the data set")


def _refused(what: str, field_name: str, remedy: str) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"the engine has died of this {what} more than once, so the server does not run it again",
        f"{what.upper().replace(' ', '')}_QUARANTINED",
        f"{remedy}, and report it with the server's log; the server forgets it after an hour",
        field_name,
    )


def digest(
    evaluation: Evaluation,
    arrays: Mapping[str, NDArray[Any]] = MappingProxyType({}),
    settings: FitSettings | None = None,
) -> bytes:
    """Return SHA-256 of all that is asked for.

    Args:
        evaluation: the batch, its data set and what is wanted of it.
        arrays: of a fit, by name.
        settings: of a fit, without arrays.

    """
    custom, batch = evaluation.custom_loss, evaluation.batch
    wanted = [
        getattr(evaluation, name)
        for name in evaluation.__dataclass_fields__
        if name not in ("batch", "custom_loss")
    ]
    text = repr((wanted, batch.vectors, custom and custom.closing, settings, sorted(arrays)))
    found = hashlib.sha256(text.encode())
    parts = [getattr(batch, name) for name in _ARRAYS]
    parts += [arrays[name] for name in sorted(arrays)]
    if custom is not None:
        parts += [custom.row.codes, custom.row.values]
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(np.ascontiguousarray(part).data)
    return found.digest()


@dataclass(slots=True, eq=False)
class _Record:
    """What is known of a batch or a data set."""

    is_dataset: bool
    last: float = 0.0
    """``time.monotonic()`` of the last crash."""
    engines: set[int] = field(default_factory=set)
    """Numbers of the engines that died while it was under way, the first few."""
    alone: set[bytes] = field(default_factory=set)
    """What was all that ran when an engine died: batches, or the data set, being loaded."""

    def accuse(self, engine: int, alone: bytes | None) -> None:
        """Note that it was under way when an engine died.

        Args:
            engine: its number.
            alone: what was all that ran, if that is known.

        """
        if len(self.engines) < _MOST_COUNTED:
            self.engines.add(engine)
        if alone is not None and len(self.alone) < _MOST_COUNTED:
            self.alone.add(alone)

    def is_guilty(self, name: bytes) -> bool:
        """Tell whether it belongs into quarantine."""
        if self.is_dataset and len(self.alone - {name}) >= 2:
            return True
        return len(self.engines) >= 2 and name in self.alone

    @property
    def seconds(self) -> float:
        """For how long it must run alone."""
        return float(min(_LONGEST_ALONE, _ALONE_SECONDS * 4.0 ** (len(self.engines) - 1)))


class Quarantine:
    """Judges what was under way when engines died; in the first front-end process.

    Args:
        clock: tells seconds.

    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.suspects = KnownSuspects()
        """As this process knows them."""
        self.on_change: Callable[[SuspectList], None] = lambda known: None
        """Told every new list."""
        self._clock = clock
        self._lock = threading.Lock()
        self._records: dict[bytes, _Record] = {}
        self._waiting: list[tuple[float, InterruptedBatch]] = []  # for the end of their engine
        self._deaths: dict[int, bool] = {}  # whether the work of an engine is to blame
        self._current = SuspectList()

    @property
    def current(self) -> SuspectList:
        """The list as it is now."""
        return self._current

    def report(self, outcome: InterruptedBatch | ClearedSuspect) -> None:
        """Take in what became of a batch."""
        with self._lock:
            if isinstance(outcome, ClearedSuspect):
                self._clear(outcome)
            elif outcome.engine not in self._deaths:
                self._waiting = [*self._waiting, (self._clock(), outcome)][-_MOST_RECORDS:]
                return
            elif self._deaths[outcome.engine]:
                self._accuse(outcome)
            known = self._judge()
        self._publish(known)

    def engine_died(
        self, engine: int, *, is_blamed: bool, loading: bytes | None, at_start: bool
    ) -> None:
        """Take notice of an engine's end.

        Args:
            engine: its number.
            is_blamed: whether its work may be the cause.
            loading: the data set that it was loading, if any.
            at_start: whether that was as it started, when it did nothing else.

        """
        with self._lock:
            now = self._clock()
            self._deaths[engine] = is_blamed and not (loading and at_start)
            self._deaths = dict(list(self._deaths.items())[-_MOST_DEATHS:])
            waiting, self._waiting = self._waiting, []
            if is_blamed and loading:
                record = self._record(loading, is_dataset=True)
                record.accuse(engine, loading if at_start else None)
            for since, casualty in waiting:
                is_fresh = casualty.engine == engine and now - since < _TOGETHER_SECONDS
                if is_fresh and self._deaths[engine]:
                    self._accuse(casualty)
            known = self._judge()
        self._publish(known)

    def expire(self) -> None:
        """Forget what has not been under way at a crash for long."""
        if not self._records:
            return
        with self._lock:
            now = self._clock()
            for name, record in list(self._records.items()):
                is_guilty = record.is_guilty(name)
                if now - record.last > (_QUARANTINE_SECONDS if is_guilty else _SUSPECT_SECONDS):
                    del self._records[name]
            known = self._judge()
        self._publish(known)

    def _accuse(self, casualty: InterruptedBatch) -> None:
        for name, is_dataset in ((casualty.dataset, True), (casualty.batch, False)):
            record = self._record(name, is_dataset=is_dataset)
            record.accuse(casualty.engine, casualty.batch if casualty.alone else None)

    def _clear(self, survivor: ClearedSuspect) -> None:
        for name in (survivor.batch, survivor.dataset):
            record = self._records.get(name)
            if record is not None and not record.is_guilty(name):
                del self._records[name]

    def _record(self, name: bytes, *, is_dataset: bool) -> _Record:
        """Find or make a record; it is the newest now."""
        record = self._records.pop(name, None) or _Record(is_dataset)
        record.last = self._clock()
        self._records[name] = record
        while len(self._records) > _MOST_RECORDS:
            del self._records[next(iter(self._records))]
        return record

    def _judge(self) -> SuspectList | None:
        """Make a new list; None if nothing has changed."""
        guilty = {name for name, record in self._records.items() if record.is_guilty(name)}
        suspects = {n: record.seconds for n, record in self._records.items() if n not in guilty}
        now = self._current
        if suspects == now.suspects and guilty == now.quarantined:
            return None
        self._current = SuspectList(now.version + 1, suspects, frozenset(guilty))
        return self._current

    def _publish(self, known: SuspectList | None) -> None:
        if known is not None:
            self.suspects.update(known)
            self.on_change(known)
