"""The quarantine: batches and data sets that have crashed engines twice are refused for an hour.

Each batch that an engine had begun when it died gets a strike and is a *suspect*: sent again, it
runs alone for some seconds (`warpfit_server.engine.scheduler`), and is cleared if it ends. Of the
batches of one death only the most suspect ones get a strike: one that was alone, else those that
ran beside others, else those that have run alone for their seconds before, such as long searches.

A data set gets a strike when an engine dies while it loads that, and for each batch on it that died
alone. Batches on a suspect data set run alone, too.
"""

import hashlib
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.errors import FailedPreconditionError
from warpfit.request import Evaluation, FitSettings
from warpfit.searching import SearchRequest
from warpfit_server.ipc.segments import ALONE, BEGUN
from warpfit_server.shared_batch import BatchSummary

#: Strikes with which a batch or a data set is refused.
_STRIKES: Final = 2
#: Seconds after which a strike is forgotten, and after which the quarantine ends.
_SUSPECT_SECONDS, _QUARANTINE_SECONDS = 600.0, 3600.0
#: Seconds that a suspect may run alone, and keep others waiting.
_ALONE_SECONDS: Final = 2.0
#: Most deaths and most interrupted batches that are remembered, and most names in quarantine.
_MOST_DEATHS, _MOST_BATCHES, _MOST_REFUSED = 32, 2048, 256
#: What may differ between two searches that look for the same.
_LEFT_OUT: Final = (
    *("guesses", "seed", "target_loss"),
    *("max_seconds", "max_generations", "max_formulas", "idle_generations"),
)


@dataclass(frozen=True, slots=True)
class InterruptedBatch:
    """A batch that an engine had begun when the connection to the engine was lost."""

    process: int
    """Number of the engine process, from 1; no two processes of any engine have the same."""
    dataset: bytes
    batch: bytes
    """Its digest, see `digest`; the key of the data set if the engine was loading that."""
    state: int
    """How suspect it is: `PROVEN`, `BEGUN` or `ALONE` of `warpfit_server.ipc.segments`."""


@dataclass(frozen=True, slots=True)
class ClearedSuspect:
    """A suspect that has ended, while the engine lives."""

    dataset: bytes
    batch: bytes


@dataclass(frozen=True, slots=True)
class SuspectList:
    """The suspects and the quarantined, as `Quarantine` sends them to all front-end processes."""

    version: int = 0
    suspects: frozenset[bytes] = frozenset()
    """Digests of batches and keys of data sets that run alone."""
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
        return _ALONE_SECONDS if known.suspects & {dataset, name} else 0.0

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
    """Return the SHA-256 of a whole request, of which programs count by their identity."""
    custom, batch = evaluation.custom_loss, evaluation.batch
    identity = BatchSummary.of(batch).identity
    options = [
        getattr(evaluation, name)
        for name in evaluation.__dataclass_fields__
        if name not in ("batch", "custom_loss")
    ]
    others = custom and custom.closing, settings, sorted(arrays)
    found = hashlib.sha256(repr((options, identity, batch.vectors, *others)).encode())
    parts = [batch.parameters, *(arrays[name] for name in sorted(arrays))]
    if custom is not None:
        parts += [custom.row.codes, custom.row.values]
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(np.ascontiguousarray(part).data)
    return found.digest()


def search_digest(request: SearchRequest) -> bytes:
    """Return the SHA-256 of what a search looks for, and on which data.

    Budget, seed and formulas to begin with do not count: a client goes on from the formulas that
    were found before the engine died, with what is left of its budget.
    """
    usual = SearchRequest(request.dataset_id)
    left_out: Any = {name: getattr(usual, name) for name in _LEFT_OUT}
    return hashlib.sha256(repr(replace(request, **left_out)).encode()).digest()


class Quarantine:
    """Decides what is suspect and what is in quarantine; in the main process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.suspects = KnownSuspects()
        """The list as this process knows it."""
        self.on_change: Callable[[SuspectList], None] = lambda known: None
        """Called with every new list."""
        self.current = SuspectList()
        """The list as it is now."""
        self._clock = clock
        self._lock = threading.Lock()
        self._died: dict[int, float] = {}
        """When engine processes died of what they ran, by number."""
        self._interrupted: deque[InterruptedBatch] = deque(maxlen=_MOST_BATCHES)
        self._refused: dict[bytes, float] = {}
        """When what is in quarantine came there."""

    def report(self, outcome: InterruptedBatch | ClearedSuspect) -> None:
        """Take in what became of a batch, before or after its engine's death is known."""
        with self._lock:
            if isinstance(outcome, InterruptedBatch):
                self._interrupted.append(outcome)
                is_counted = outcome.process in self._died
            else:
                names = outcome.batch, outcome.dataset
                kept = [batch for batch in self._interrupted if batch.batch not in names]
                is_counted = len(kept) < len(self._interrupted)
                self._interrupted = deque(kept, _MOST_BATCHES)
        if is_counted:
            self._judge()

    def engine_died(self, process: int, loading: bytes | None) -> None:
        """Take in that an engine process died of what it ran or of the data set that it loaded."""
        with self._lock:
            self._died[process] = self._clock()
            if loading is not None:
                self._interrupted.append(InterruptedBatch(process, loading, loading, BEGUN))
        self._judge()

    def expire(self) -> None:
        """Forget what has not crashed an engine for long."""
        if self._died or self._refused:
            self._judge()

    def _judge(self) -> None:
        """Count the strikes, and publish a new list if anything has changed."""
        with self._lock:
            now = self._clock()
            recent = [(p, at) for p, at in self._died.items() if now - at <= _SUSPECT_SECONDS]
            self._died = dict(recent[-_MOST_DEATHS:])
            begun = [one for one in self._interrupted if one.process in self._died]
            most_suspect: dict[int, int] = defaultdict(int)
            for one in begun:
                most_suspect[one.process] = max(most_suspect[one.process], one.state)
            strikes: dict[bytes, set[Any]] = defaultdict(set)
            """Processes that died of each batch; for a data set also batches that died alone."""
            for one in begun:
                if one.state == most_suspect[one.process]:
                    strikes[one.batch].add(one.process)
                    strikes[one.dataset] |= {one.batch} if one.state == ALONE else set()
            for name, causes in strikes.items():
                if len(causes) >= _STRIKES:
                    self._refused.setdefault(name, now)
            kept = [(n, at) for n, at in self._refused.items() if now - at <= _QUARANTINE_SECONDS]
            self._refused = dict(kept[-_MOST_REFUSED:])
            refused = frozenset(self._refused)
            suspects = frozenset(strikes) - refused
            if (suspects, refused) == (self.current.suspects, self.current.quarantined):
                return
            known = self.current = SuspectList(self.current.version + 1, suspects, refused)
        self.suspects.update(known)
        self.on_change(known)
