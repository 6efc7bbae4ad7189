"""A search on several engines at once, each with a seed of its own.

The engines exchange nothing. The front of all has the best formula of each size, as far as larger
ones are better, and the search ends for all where one engine meets the target loss. An engine that
is lost takes what it had not reported yet with it; the others go on. When the time of one is over,
an engine that had to load code, and so has begun late, is not waited for: if it is the one that was
asked first, from its first report on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.errors import UnavailableError
from warpfit.ir import Batch
from warpfit.request import STAGES, Timings
from warpfit.searching import Front, SearchProgress, SearchReason, SearchRequest
from warpfit_server.ipc import messages
from warpfit_server.ipc.engine_connection import InFlightRequest

#: Between the seeds of two engines; odd, so that no two of them are equal.
_SEED_STEP: Final = 0x9E3779B97F4A7C15
#: An engine has begun late that begins more seconds after another one.
_LATE: Final = 1.0


def seeded(search: SearchRequest, count: int) -> list[SearchRequest]:
    """Return a search for each of so many engines, the first one as it is.

    One whose end depends on generations or formulas stays alone, because a seed gives it again, and
    so do those whose formulas have parts.
    """
    is_repeatable = search.max_generations or search.max_formulas or search.idle_generations
    if is_repeatable or search.template is not None or search.definitions:
        return [search]
    seeds = [(search.seed + number * _SEED_STEP) % 2**64 for number in range(count)]
    return [replace(search, seed=seed) for seed in seeds]


def merged(fronts: Sequence[Front], *, is_score: bool) -> Front:
    """Return the best formula of each size, simplest first, as far as larger ones are better.

    Args:
        fronts: at least one.
        is_score: whether the greatest loss is the best one.
    """
    filled = [front for front in fronts if len(front.sizes)]
    if len(filled) < 2:
        return filled[0] if filled else fronts[0]
    sizes = np.concatenate([front.sizes for front in filled])
    losses = np.concatenate([front.losses for front in filled])

    def joined(name: str) -> NDArray[Any]:
        return np.concatenate([getattr(front.batch, name) for front in filled])

    batch = Batch(
        joined("codes"),
        joined("values"),
        joined("lengths"),
        parameter_counts=joined("parameter_counts"),
        parameters=joined("parameters"),
    )
    badness = -losses if is_score else losses
    badness = np.where(np.isnan(badness), np.inf, badness)
    order = np.lexsort((badness, sizes))
    least = np.minimum.accumulate(badness[order])
    kept = order[np.append(True, least[1:] < least[:-1])]
    return Front(batch[kept], sizes[kept], losses[kept])


class ParallelSearch:
    """Searches of several engines, used like one `InFlightRequest`.

    Args:
        parts: requests that have been sent, at least one.
        is_score: as of `merged`.
    """

    def __init__(self, parts: Sequence[InFlightRequest], *, is_score: bool) -> None:
        self._parts, self._is_score = parts, is_score
        self._running = list(parts)
        self._latest: dict[InFlightRequest, SearchProgress] = {}
        self._begun: dict[InFlightRequest, float] = {}
        """When each engine that has reported began, on the clock of ``time.monotonic()``."""
        self._end: messages.RequestFinished | None = None
        self.device = ",".join(part.device for part in parts)
        """Labels of the devices."""
        self.timings: Timings | None = None
        """The longest time of each stage, once all have finished."""

    def next_reply(self) -> messages.Reply:
        """Wait for progress of the engine that was asked first, or for the end of all.

        Raises:
            WarpfitError: if the search failed, or all engines were lost.
            CancelledError: if it was cancelled.
        """
        if self._end is not None:
            return self._end
        while self._running:
            is_progress = self._take(self._running[0])
            for part in self._running[1:]:
                if part.replies is not None:
                    part.replies.receive_now()
                while part in self._running and not part.queue.empty():
                    self._take(part)
            if is_progress and self._running:
                return messages.SearchProgressed(self._parts[0].number, self._progress(None))
        return self._ended()

    def _take(self, part: InFlightRequest) -> bool:
        """Note the next reply of an engine, or that it was lost; return whether it is progress."""
        try:
            reply = part.next_reply()
        except UnavailableError:
            self._running.remove(part)
            if not self._running and not self._latest:
                raise
            return False
        if isinstance(reply, messages.RequestFinished):
            self._running.remove(part)
        elif isinstance(reply, messages.SearchProgressed):
            self._latest[part], now = reply.progress, time.monotonic()
            begun = self._begun[part] = now - reply.progress.seconds
            reason = reply.progress.reason
            for other in list(self._running):
                is_late = self._begun.get(other, now) > begun + _LATE
                is_met = reason is SearchReason.TARGET_LOSS
                if other is not part and (is_met or (reason is SearchReason.TIME and is_late)):
                    other.cancel()
                    self._running.remove(other)
            return True
        return False

    def _ended(self) -> messages.Reply:
        """Return the last progress; the end comes next."""
        each = [part.timings for part in self._parts if part.timings is not None]
        if not each:
            raise UnavailableError(
                "all engines of the search were lost", "ENGINE_RESTARTING",
                "Repeat the call after a short wait",
            )  # fmt: skip
        longest = {stage: max(getattr(t, stage) for t in each) for stage in STAGES}
        self.timings = Timings(**longest, tier=each[0].tier)
        self._end = messages.RequestFinished(self._parts[0].number)
        reasons = [one.reason for one in self._latest.values() if one.reason is not None]
        met = SearchReason.TARGET_LOSS
        reason = met if met in reasons else reasons[0]
        return messages.SearchProgressed(self._parts[0].number, self._progress(reason))

    def _progress(self, reason: SearchReason | None) -> SearchProgress:
        """Return the progress of all engines."""
        known = list(self._latest.values())
        total = {
            name: sum(getattr(one, name) for one in known)
            for name in ("formulas", "distinct", "fits", "pairs", "restarts")
        }
        return SearchProgress(
            merged([one.front for one in known], is_score=self._is_score),
            seconds=max(one.seconds for one in known),
            generations=max(one.generations for one in known),
            reason=reason,
            **total,
        )

    def cancel(self) -> None:
        """Stop the work, because nobody waits for its result any more."""
        for part in self._parts:
            part.cancel()

    def close(self) -> None:
        """Wait until all engines are done, then give the segments back."""
        for part in self._parts:
            part.close()
