"""The quarantine: batches and data sets that have crashed engines twice are refused for an hour.

When an engine dies, what it had begun gets a strike. If a request was alone in the engine, the
strike is its own; else each of them gets one and becomes a *suspect*. A suspect that is sent again
runs alone for some seconds (`warpfit_server.engine.scheduler`), and is cleared if it ends. One that
goes on beside others after these seconds, such as a search, is *proven*: it gets a strike only if
nothing else may be to blame. What has two strikes is in *quarantine*.

A data set gets a strike when an engine dies while it loads that, and for each batch on it that died
alone. Batches on a suspect data set run alone, too.
"""

import hashlib
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.errors import FailedPreconditionError
from warpfit.fitting import FitSettings
from warpfit.request import Evaluation
from warpfit.searching import SearchRequest
from warpfit_server.shared_batch import BatchSummary

#: Strikes with which a batch or a data set is refused.
_STRIKES: Final = 2
#: Seconds after which a strike is forgotten, and after which the quarantine ends.
_SUSPECT_SECONDS: Final = 600.0
_QUARANTINE_SECONDS: Final = 3600.0
#: Seconds that a suspect may run alone, and keep others waiting.
_ALONE_SECONDS: Final = 2.0
#: A request that was lost so many seconds before its engine died has nothing to do with that.
_TOGETHER_SECONDS: Final = 5.0
#: What may differ between two searches that look for the same.
_LEFT_OUT: Final = (
    *("guesses", "seed", "target_loss"),
    *("max_seconds", "max_generations", "max_formulas", "idle_generations"),
)
#: Most deaths that are remembered, most requests of each, and most names in quarantine.
_MOST_DEATHS, _MOST_BATCHES, _MOST_REFUSED = 32, 64, 256


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
    is_proven: bool = False
    """Whether it had run alone before for as long as suspects do, and the engine had lived."""


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


@dataclass(slots=True, eq=False)
class _Death:
    """An engine process that has died, or to which front ends have lost their connections."""

    is_blamed: bool | None = None
    """Whether what it ran may be the cause; None while its death is not known."""
    at: float = 0.0
    """Moment of its death."""
    loading: bytes | None = None
    """Key of the data set that it was loading."""
    batches: list[tuple[float, InterruptedBatch]] = field(default_factory=list)
    """Requests that it had begun, with the moments of the reports."""

    def strikes(self) -> Iterator[tuple[bytes, InterruptedBatch | None]]:
        """Yield the name of each batch or data set with a strike, and the batch if it is one."""
        if not self.is_blamed:
            return
        if self.loading is not None:
            yield self.loading, None
        begun = [batch for at, batch in self.batches if self.at - at < _TOGETHER_SECONDS]
        alone = [batch for batch in begun if batch.alone]
        others = [batch for batch in begun if not batch.is_proven]
        for batch in alone or others or begun:
            yield batch.batch, batch


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
        self._deaths: dict[int, _Death] = {}
        self._refused: dict[bytes, float] = {}
        """When what is in quarantine came there."""

    def report(self, outcome: InterruptedBatch | ClearedSuspect) -> None:
        """Take in what became of a batch, before or after its engine's death is known."""
        with self._lock:
            if isinstance(outcome, InterruptedBatch):
                batches = self._death(outcome.process).batches
                batches.append((self._clock(), outcome))
                del batches[:-_MOST_BATCHES]
            else:
                names = outcome.batch, outcome.dataset
                for death in self._deaths.values():
                    death.batches = [b for b in death.batches if b[1].batch not in names]
                    death.loading = None if death.loading in names else death.loading
        self._judge()

    def engine_died(
        self, process: int, *, is_blamed: bool, loading: bytes | None, at_start: bool
    ) -> None:
        """Take in the death of an engine process.

        It ``is_blamed`` if what it ran may be the cause. ``loading`` is the key of the data set
        that it was loading, if any, and ``at_start`` tells whether it did so as it started, when it
        did nothing else.
        """
        with self._lock:
            death = self._death(process)
            death.is_blamed, death.at, death.loading = is_blamed, self._clock(), loading
            if at_start:
                death.batches.clear()
        self._judge()

    def expire(self) -> None:
        """Forget what has not crashed an engine for long."""
        if self._deaths or self._refused:
            self._judge()

    def _death(self, process: int) -> _Death:
        found = self._deaths.setdefault(process, _Death(at=self._clock()))
        while len(self._deaths) > _MOST_DEATHS:
            del self._deaths[next(iter(self._deaths))]
        return found

    def _judge(self) -> None:
        """Count the strikes, and publish a new list if anything has changed."""
        with self._lock:
            now = self._clock()
            for process, death in list(self._deaths.items()):
                if now - death.at > _SUSPECT_SECONDS:
                    del self._deaths[process]
            strikes: Counter[bytes] = Counter()
            alone: dict[bytes, set[bytes]] = defaultdict(set)
            """Batches that died alone, by data set."""
            suspects: set[bytes] = set()
            for death in self._deaths.values():
                for name, batch in death.strikes():
                    strikes[name] += 1
                    if batch is not None:
                        suspects.add(batch.dataset)
                        if batch.alone:
                            alone[batch.dataset].add(name)
            strikes.update({dataset: len(batches) for dataset, batches in alone.items()})
            for name, count in strikes.items():
                if count >= _STRIKES:
                    self._refused.setdefault(name, now)
            kept = [(n, at) for n, at in self._refused.items() if now - at <= _QUARANTINE_SECONDS]
            self._refused = dict(kept[-_MOST_REFUSED:])
            refused = frozenset(self._refused)
            others = frozenset(suspects | set(strikes)) - refused
            if (others, refused) == (self.current.suspects, self.current.quarantined):
                return
            known = self.current = SuspectList(self.current.version + 1, others, refused)
        self.suspects.update(known)
        self.on_change(known)
