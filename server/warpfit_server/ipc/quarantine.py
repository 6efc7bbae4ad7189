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
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from operator import attrgetter
from typing import Any, Final, NamedTuple

import numpy as np
from cachetools import TTLCache

from warpfit.errors import FailedPreconditionError
from warpfit.searching import SearchRequest
from warpfit_server.ipc.segments import ALONE, BEGUN, QUEUED

#: Strikes with which a batch or a data set is refused, and seconds that a suspect may run alone.
_STRIKES, _ALONE_SECONDS = 2, 2.0
#: What may be refused, the field of a call that names it, and what its caller can do.
_REFUSED: Final = (
    ("data set", "content_id", "Change the data, or release the data set"),
    ("batch", "programs", "Leave expressions out to find the one to blame"),
)
#: Seconds after which a strike is forgotten, and after which the quarantine ends; most of each.
_SUSPECT_SECONDS, _QUARANTINE_SECONDS, _MOST = 600.0, 3600.0, 2048
#: What may differ between searches for the same: a client goes on from the formulas that were found
#: before the engine died, with what is left of its budget.
_OF_ONE_RUN: Final = (
    *("guesses", "seed", "target_loss"),
    *("max_seconds", "max_generations", "max_formulas", "idle_generations"),
)


def digest(*inputs: Any) -> bytes:
    """Return the SHA-256 of what a request is made of, arrays and dataclasses among it."""
    found = hashlib.sha256()
    for part in inputs:
        if is_dataclass(part):
            left_out = _OF_ONE_RUN if isinstance(part, SearchRequest) else ()
            names = [each.name for each in fields(part) if each.name not in left_out]
            data = digest(*[getattr(part, name) for name in names])
        elif isinstance(part, tuple | list):  # NumPy shortens large arrays within a text
            data = digest(*part)
        elif isinstance(part, Mapping):
            data = digest(*part.items())
        else:
            data = part.tobytes() if isinstance(part, np.ndarray) else repr(part).encode()
        found.update(b"%d:%b" % (len(data), data))
    return found.digest()


class BatchOutcome(NamedTuple):
    """The end of a batch that an engine had begun: lost with its engine, or cleared."""

    dataset: bytes
    batch: bytes
    """Its `digest`; the key of the data set if the engine was loading that."""
    process: int = 0
    """Number of the engine process, from 1; no two processes of any engine have the same."""
    state: int = QUEUED
    """`PROVEN`, `BEGUN` or `ALONE` of `warpfit_server.ipc.segments`, the more suspect the higher,
    when the connection to the engine was lost; `QUEUED` if it was a suspect and has ended."""


@dataclass(slots=True)
class Suspects:
    """The strikes as one process knows them; `Quarantine` sends new ones to all front ends."""

    version: int = 0
    strikes: Mapping[bytes, int] = field(default_factory=dict)
    """Number of strikes of each suspect, by the digest of a batch or the key of a data set; 0 for a
    data set that has none itself, on which batches have strikes."""

    def update(self, new: "Suspects") -> None:
        """Take the strikes of a message, unless newer ones have come before."""
        if new.version > self.version:
            self.version, self.strikes = new.version, new.strikes

    def check(self, *names: bytes) -> float:
        """Return for how many seconds a batch on a data set must run alone; 0 if it is no suspect.

        Args:
            names: the key of the data set, and the digest of the batch if one is meant.

        Raises:
            FailedPreconditionError: if the batch or the data set is in quarantine.
        """
        strikes = self.strikes
        for name, (what, field_name, remedy) in zip(names, _REFUSED, strict=False):
            if strikes.get(name, 0) >= _STRIKES:
                raise FailedPreconditionError(
                    f"the engine has died of this {what} more than once, so the server does not "
                    "run it again",
                    f"{what.upper().replace(' ', '')}_QUARANTINED",
                    f"{remedy}, and report it with the server's log; the server forgets it after "
                    "an hour",
                    field_name,
                )
        return _ALONE_SECONDS if strikes.keys() & names else 0.0


class Quarantine:
    """Counts the strikes, in the main process; any thread may call it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.suspects = Suspects()
        self.on_change: Callable[[Suspects], None] = lambda suspects: None
        """Called with the strikes when they have changed."""
        self._lock = threading.Lock()
        self._died: TTLCache[int, None, float] = TTLCache(_MOST, _SUSPECT_SECONDS, clock)
        """Engine processes that have died of what they ran."""
        self._interrupted: TTLCache[Any, None, float] = TTLCache(_MOST, _SUSPECT_SECONDS, clock)
        """Outcomes of batches that engines had begun."""
        self._refused: TTLCache[bytes, None, float] = TTLCache(_MOST, _QUARANTINE_SECONDS, clock)

    def report(self, outcome: BatchOutcome) -> None:
        """Take in what became of a batch, before or after its engine's death is known."""
        with self._lock:
            if outcome.state != QUEUED:
                self._interrupted[outcome] = None
            else:
                for known in list(self._interrupted):
                    if known.batch in (outcome.batch, outcome.dataset):
                        self._interrupted.pop(known, None)
        self.count()

    def engine_died(self, process: int, loading: bytes | None) -> None:
        """Take in that an engine process died of what it ran or of the data set that it loaded."""
        with self._lock:
            self._died[process] = None
            if loading is not None:
                self._interrupted[BatchOutcome(loading, loading, process, BEGUN)] = None
        self.count()

    def count(self) -> None:
        """Count the strikes, also when time has passed, and publish them if they have changed."""
        with self._lock:
            begun = [one for one in self._interrupted if one.process in self._died]
            begun.sort(key=attrgetter("state"))
            highest = {one.process: one.state for one in begun}
            causes: dict[bytes, set[Any]] = defaultdict(set)
            """Processes that died of each batch; for a data set also batches that died alone."""
            for one in begun:
                if one.state == highest[one.process]:
                    causes[one.batch].add(one.process)
                    causes[one.dataset].update([one.batch] if one.state == ALONE else [])
            strikes = {name: len(found) for name, found in causes.items()}
            for name, count in strikes.items():
                if count >= _STRIKES:
                    self._refused.setdefault(name, None)
            strikes |= dict.fromkeys(self._refused, _STRIKES)
            if strikes == self.suspects.strikes:
                return
            new = self.suspects = Suspects(self.suspects.version + 1, strikes)
        self.on_change(new)
