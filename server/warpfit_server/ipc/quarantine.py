"""The quarantine: batches and data sets that have crashed engines are not run again.

When an engine dies, one of the requests that it had begun may be to blame, so all of them become
*suspects*. A suspect that is sent again runs alone (`warpfit_server.engine.scheduler`). If it ends,
it is cleared. If the engine dies while nothing else runs, and is not the first one that died with
it, the suspect goes into *quarantine* and is refused. So a batch that merely ran beside the one to
blame is never refused, however often both are sent again.

A data set is a suspect if it was being loaded, or if batches on it had begun. It goes into
quarantine when a second engine dies while it loads the data set and does nothing else, or when two
different batches on it were each all that ran when an engine died.
"""

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
from warpfit_server.joined_batch import BATCH_ARRAYS

#: Most data sets and batches with a record; the oldest record is dropped first, of suspects before
#: those in quarantine.
_MOST_RECORDS: Final = 256
#: Seconds after its last crash until a suspect is forgotten, and something in quarantine.
_SUSPECT_SECONDS: Final = 600.0
_QUARANTINE_SECONDS: Final = 3600.0
#: Seconds that a suspect may run alone after one crash; four times as long after each further one.
#: So a batch that crashes the engine at once keeps others waiting only briefly, and one that takes
#: long to do so is found in the end.
_ALONE_SECONDS: Final = 2.0
_LONGEST_ALONE: Final = 120.0
#: Most crashes that are counted of one batch or data set; more would change nothing.
_MOST_COUNTED: Final = 8
#: A request that was lost so many seconds before its engine died has nothing to do with that.
_TOGETHER_SECONDS: Final = 5.0
#: Engines whose deaths are remembered, for reports that come late.
_MOST_DEATHS: Final = 64


@dataclass(frozen=True, slots=True)
class InterruptedBatch:
    """A batch that an engine had begun when the connection to the engine was lost."""

    process: int
    """Number of the engine process, from 1; no two processes of any engine have the same."""
    dataset: bytes
    batch: bytes
    """Its digest, see `digest`."""
    alone: bool
    """Whether nothing else ran in the engine."""


@dataclass(frozen=True, slots=True)
class ClearedSuspect:
    """A suspect that has ended, while the engine lives."""

    dataset: bytes
    batch: bytes


@dataclass(frozen=True, slots=True)
class SuspectList:
    """The suspects and the quarantined, as `Quarantine` sends them to all front-end processes."""

    version: int = 0
    suspects: Mapping[bytes, float] = field(default_factory=dict)
    """Seconds for which each must run alone, by digest of a batch or key of a data set."""
    quarantined: frozenset[bytes] = frozenset()
    """Digests of batches and keys of data sets."""


class KnownSuspects:
    """The latest `SuspectList` of one front-end process."""

    def __init__(self) -> None:
        self._known = SuspectList()
        self._lock = threading.Lock()

    def update(self, new: SuspectList) -> None:
        """Take a list, unless a newer one has come before."""
        with self._lock:
            if new.version > self._known.version:
                self._known = new

    def check(self, dataset: bytes, batch: Callable[[], bytes]) -> float:
        """Return for how many seconds a batch must run alone; 0 if it is no suspect.

        Its digest is computed only when there are suspects.

        Raises:
            FailedPreconditionError: if the batch or its data set is in quarantine.
        """
        known = self._known
        if not (known.suspects or known.quarantined):
            return 0.0
        self.check_dataset(dataset)
        name = batch()
        if name in known.quarantined:
            raise _refusal("batch", "programs", "Leave expressions out to find the one to blame")
        return max(known.suspects.get(dataset, 0.0), known.suspects.get(name, 0.0))

    def is_suspect(self, dataset: bytes) -> bool:
        """Return whether engines may have died of a data set, or of batches on it."""
        return dataset in self._known.suspects

    def check_dataset(self, dataset: bytes) -> None:
        """Check that a data set is not in quarantine.

        Raises:
            FailedPreconditionError: if it is.
        """
        if dataset in self._known.quarantined:
            raise _refusal("data set", "content_id", "Change the data, or release the data set")


def _refusal(what: str, field_name: str, remedy: str) -> FailedPreconditionError:
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
    """Return the SHA-256 of a whole request."""
    custom, batch = evaluation.custom_loss, evaluation.batch
    options = [
        getattr(evaluation, name)
        for name in evaluation.__dataclass_fields__
        if name not in ("batch", "custom_loss")
    ]
    text = repr((options, batch.vectors, custom and custom.closing, settings, sorted(arrays)))
    found = hashlib.sha256(text.encode())
    parts = [getattr(batch, name) for name in BATCH_ARRAYS]
    parts += [arrays[name] for name in sorted(arrays)]
    if custom is not None:
        parts += [custom.row.codes, custom.row.values]
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(np.ascontiguousarray(part).data)
    return found.digest()


@dataclass(slots=True, eq=False)
class _Record:
    """The crashes with which a batch or a data set had to do."""

    is_dataset: bool
    last: float = 0.0
    """``time.monotonic()`` of the last crash."""
    processes: set[int] = field(default_factory=set)
    """Numbers of the first few engine processes that died while it ran."""
    alone: set[bytes] = field(default_factory=set)
    """Batches that were all that ran when an engine died; also the data set itself, if an engine
    that did nothing else died of loading it."""

    def accuse(self, process: int, alone: bytes | None) -> None:
        """Add a crash.

        ``alone`` is what was all that ran, if that is known.
        """
        if len(self.processes) < _MOST_COUNTED:
            self.processes.add(process)
        if alone is not None and len(self.alone) < _MOST_COUNTED:
            self.alone.add(alone)

    def is_guilty(self, name: bytes) -> bool:
        """Return whether it belongs into quarantine."""
        if self.is_dataset and len(self.alone - {name}) >= 2:
            return True
        return len(self.processes) >= 2 and name in self.alone

    @property
    def seconds(self) -> float:
        """Seconds that it may run alone."""
        return float(min(_LONGEST_ALONE, _ALONE_SECONDS * 4.0 ** (len(self.processes) - 1)))


class Quarantine:
    """Decides what is suspect and what is in quarantine; in the main process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.suspects = KnownSuspects()
        """The list as this process knows it."""
        self.on_change: Callable[[SuspectList], None] = lambda known: None
        """Called with every new list."""
        self._clock = clock
        self._lock = threading.Lock()
        self._records: dict[bytes, _Record] = {}
        self._waiting: list[tuple[float, InterruptedBatch]] = []  # for the death of their engine
        self._deaths: dict[int, bool] = {}  # whether what the engine ran is to blame
        self.current = SuspectList()
        """The list as it is now."""

    def report(self, outcome: InterruptedBatch | ClearedSuspect) -> None:
        """Take in what became of a batch, before or after its engine's death is known."""
        with self._lock:
            if isinstance(outcome, ClearedSuspect):
                self._clear(outcome)
            elif outcome.process not in self._deaths:
                self._waiting = [*self._waiting, (self._clock(), outcome)][-_MOST_RECORDS:]
                return
            elif self._deaths[outcome.process]:
                self._accuse(outcome)
        self._publish()

    def engine_died(
        self, process: int, *, is_blamed: bool, loading: bytes | None, at_start: bool
    ) -> None:
        """Take in the death of an engine process.

        It ``is_blamed`` if what it ran may be the cause. ``loading`` is the key of the data set
        that it was loading, if any, and ``at_start`` tells whether it did so as it started, when it
        did nothing else.
        """
        with self._lock:
            now = self._clock()
            self._deaths[process] = is_blamed and not (loading and at_start)
            self._deaths = dict(list(self._deaths.items())[-_MOST_DEATHS:])
            waiting = [entry for entry in self._waiting if entry[1].process == process]
            self._waiting = [entry for entry in self._waiting if entry[1].process != process]
            if is_blamed and loading:
                record = self._record(loading, is_dataset=True)
                record.accuse(process, loading if at_start else None)
            for since, batch in waiting:
                if now - since < _TOGETHER_SECONDS and self._deaths[process]:
                    self._accuse(batch)
        self._publish()

    def expire(self) -> None:
        """Drop the records of what has not crashed an engine for long."""
        if not self._records:
            return
        with self._lock:
            now = self._clock()
            for name, record in list(self._records.items()):
                is_guilty = record.is_guilty(name)
                if now - record.last > (_QUARANTINE_SECONDS if is_guilty else _SUSPECT_SECONDS):
                    del self._records[name]
        self._publish()

    def _accuse(self, batch: InterruptedBatch) -> None:
        for name, is_dataset in ((batch.dataset, True), (batch.batch, False)):
            record = self._record(name, is_dataset=is_dataset)
            record.accuse(batch.process, batch.batch if batch.alone else None)

    def _clear(self, suspect: ClearedSuspect) -> None:
        for name in (suspect.batch, suspect.dataset):
            record = self._records.get(name)
            if record is not None and not record.is_guilty(name):
                del self._records[name]

    def _record(self, name: bytes, *, is_dataset: bool) -> _Record:
        """Find or make a record, which becomes the newest."""
        record = self._records.pop(name, None) or _Record(is_dataset)
        record.last = self._clock()
        self._records[name] = record
        while len(self._records) > _MOST_RECORDS:
            suspects = (n for n, old in self._records.items() if not old.is_guilty(n))
            oldest = next(suspects, name)
            del self._records[next(iter(self._records)) if oldest == name else oldest]
        return record

    def _publish(self) -> None:
        """Make a new list, and publish it if anything has changed."""
        with self._lock:
            guilty = {name for name, record in self._records.items() if record.is_guilty(name)}
            suspects = {n: record.seconds for n, record in self._records.items() if n not in guilty}
            now = self.current
            if suspects == now.suspects and guilty == now.quarantined:
                return
            known = self.current = SuspectList(now.version + 1, suspects, frozenset(guilty))
        self.suspects.update(known)
        self.on_change(known)
