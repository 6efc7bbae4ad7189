"""Routes requests to engines: each goes to the engine with the least outstanding estimated work.

The estimates are those of admission. What is outstanding in all front ends stands in the table of
quotas, which they share. An engine that lacks the data set counts as busy for as long as loading it
takes. Among engines that are about equally busy a batch goes to the same one each time, which may
have compiled kernels of it. A request of several milliseconds is split over idle engines, also over
one that loads the data set in less than half of the request's time: all parts lie in one segment,
where each engine writes into its slice of the results.

The registry is what a front end knows of the resident data sets, which the main process owns. The
main process announces and withdraws data sets, and tells which engines hold them. A front end asks
it for a data set that it does not know, so that NOT_FOUND is only said where the main process says
so. That it knows one does not keep it resident: what keeps it are the calls that use it, which
stand in the shared table of `warpfit_server.tenants`.

A search by time alone runs on several engines at once, each with a seed of its own. The engines
exchange nothing. The front of all has the best formula of each size, as far as larger ones are
better, and the search ends for all where one engine meets the target loss. An engine that is lost
takes what it had not reported yet with it; the others go on. When the time of one is over, an
engine that had to load code, and so has begun late, is not waited for: if it is the one that was
asked first, from its first report on.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from warpfit.errors import ResourceExhaustedError, UnavailableError, WarpfitError
from warpfit.ir import Batch
from warpfit.request import STAGES, FitProgress, Timings, even_bounds
from warpfit.searching import Front, SearchProgress, SearchReason, SearchRequest
from warpfit_server.ipc import messages
from warpfit_server.ipc.engine_connection import EngineConnection, InFlightRequest, unavailable
from warpfit_server.ipc.messages import FoundDataset
from warpfit_server.ipc.quarantine import Suspects
from warpfit_server.ipc.segments import MOST_PARTS
from warpfit_server.tenants import QuotaTable

# --------------------------------------------------------------------- the data sets that are known


class KnownDataset:
    """A data set as a front end knows it; as a context manager it stays resident inside the block.

    Args:
        table: of uses.
        found: what the main process says of it.
        load: asks the main process to have an engine, by its number, load a data set.
    """

    __slots__ = (
        *("_load", "_loading", "_lock", "_on_withdrawal", "_table"),
        *("engines", "is_withdrawn", "key", "layout", "slot"),
    )

    def __init__(
        self, table: QuotaTable, found: FoundDataset, load: Callable[[int, bytes], Future[None]]
    ) -> None:
        self._table = table
        self.key, self.slot = found.key, found.slot
        self.layout = found.layout
        self.engines = frozenset(found.engines)
        """Numbers of the engines that hold it, as far as this process knows."""
        self._load = load
        self._loading: dict[int, Future[None]] = {}
        self._lock = threading.Lock()
        self._on_withdrawal: set[Callable[[], None]] = set()
        self.is_withdrawn = False
        """Whether it was removed for all callers, so that what may last long has to end."""

    def __enter__(self) -> Self:
        self._table.use_dataset(self.slot, 1)
        return self

    def __exit__(self, *_: object) -> None:
        self._table.use_dataset(self.slot, -1)

    def call_on_withdrawal(self, callback: Callable[[], None]) -> None:
        """Have a function called, by any thread, when the data set is removed for all callers."""
        with self._lock:
            self._on_withdrawal.add(callback)
        if self.is_withdrawn:
            callback()

    def call_no_more(self, callback: Callable[[], None]) -> None:
        """Forget what `call_on_withdrawal` was given."""
        with self._lock:
            self._on_withdrawal.discard(callback)

    def withdraw(self) -> None:
        """Take note that no new call may use it."""
        self.is_withdrawn = True
        with self._lock:
            callbacks = list(self._on_withdrawal)
        for callback in callbacks:
            callback()

    def load(self, engine: int) -> Future[None]:
        """Have an engine load it, unless that is under way.

        The future fails with ResourceExhaustedError if the device has no room, with
        FailedPreconditionError if engines have died of the data set, and with UnavailableError if
        one may have.
        """
        with self._lock:
            future = self._loading.get(engine)
            if future is None:
                future = self._loading[engine] = self._load(engine, self.key)
                # The next call asks again if it has failed; if not, `Registry.held` comes first.
                future.add_done_callback(lambda _: self._loading.pop(engine, None))
        return future


class Registry:
    """The data sets that this front end knows.

    Args:
        table: of uses.
        find: asks the main process for a data set; raises DatasetNotFoundError.
        load: see `KnownDataset`.
    """

    def __init__(
        self,
        table: QuotaTable,
        find: Callable[[bytes], FoundDataset],
        load: Callable[[int, bytes], Future[None]],
    ) -> None:
        self._table = table
        self._find = find
        self._load = load
        self._known: dict[bytes, KnownDataset] = {}

    def use(self, key: bytes) -> KnownDataset:
        """Return a data set, to use it in a ``with`` block.

        Raises:
            DatasetNotFoundError: if it is not resident.
        """
        return self._known.get(key) or self.add(self._find(key))

    def add(self, found: FoundDataset) -> KnownDataset:
        """Know a data set that the main process has found or announced."""
        known = self._known.get(found.key)
        if known is None or known.slot != found.slot:
            known = self._known[found.key] = KnownDataset(self._table, found, self._load)
        return known

    def forget(self, key: bytes) -> None:
        """Ask again for a data set that an engine does not know."""
        self._known.pop(key, None)

    def withdrawn(self, key: bytes) -> None:
        """Take note that the main process removes a data set."""
        if (known := self._known.pop(key, None)) is not None:
            known.withdraw()

    def held(self, key: bytes, engine: int) -> None:
        """Take note that an engine holds a data set."""
        if (known := self._known.get(key)) is not None:
            known.engines |= {engine}

    def unloaded(self, key: bytes) -> None:
        """Take note that no engine holds a data set any more."""
        if (known := self._known.get(key)) is not None:
            known.engines = frozenset()

    def engine_started(self, engine: int) -> None:
        """Ask again whether an engine holds data sets: a new process may have had no room."""
        for known in list(self._known.values()):
            known.engines -= {engine}

    def loads(self, engine: int) -> int:
        """Return the number of data sets that an engine holds, as far as this process knows."""
        return sum(engine in known.engines for known in list(self._known.values()))


# ---------------------------------------------------------------------- requests of several engines

#: Least seconds between two reports of the progress of a fit.
_PROGRESS_SECONDS: Final = 0.1


class SplitRequest:
    """Requests for parts of a batch, used like one `InFlightRequest` for all of it.

    The parts are waited for in their order; the replies of later ones wait in the meantime.

    The whole request has the segment, and is not sent.
    """

    def __init__(self, whole: InFlightRequest, parts: Sequence[InFlightRequest]) -> None:
        self.segment = whole.segment
        self.segment_layout = whole.segment_layout
        self.timings: Timings | None = None
        """The longest time of each stage among the parts, once all have finished."""
        self.device = ",".join(dict.fromkeys(part.device for part in parts))
        """Labels of the devices."""
        self._parts = parts
        self._finished = 0
        self._programs = 0  # in the parts that have finished
        self._reported = time.monotonic()

    def shares(self) -> Iterator[tuple[float, Timings]]:
        """Yield the share of the tokens and the timings of each part that has finished."""
        for part in self._parts:
            if part.timings is not None:
                share = part.segment_layout.tokens / max(1, self.segment_layout.tokens)
                yield share, part.timings

    def next_reply(self) -> messages.Reply:
        """Wait for the engines; see `InFlightRequest.next_reply`.

        An error names the index of a program in the whole batch.
        """
        while True:
            part = self._parts[self._finished]
            try:
                reply = part.next_reply()
            except WarpfitError as error:
                if error.expression is not None:
                    error.expression += self._programs
                raise
            if isinstance(reply, messages.ValuesReady):
                return messages.ValuesReady(reply.request, self._programs + reply.programs)
            if isinstance(reply, messages.RequestFinished):
                self._finished += 1
                self._programs += part.segment_layout.programs
                if self._finished == len(self._parts):
                    each = [timings for _, timings in self.shares()]
                    longest = {stage: max(getattr(t, stage) for t in each) for stage in STAGES}
                    hits = sum(timings.cache_hits for timings in each)
                    self.timings = Timings(**longest, tier=each[0].tier, cache_hits=hits)
                    return reply
                return messages.ValuesReady(reply.request, self._programs)
            if time.monotonic() - self._reported >= _PROGRESS_SECONDS:
                self._reported = time.monotonic()
                return messages.FitProgressed(reply.request, self._progress())

    def _progress(self) -> FitProgress:
        """Return the progress of all parts of a fit."""
        iterations = active = searches = 0
        for number, part in enumerate(self._parts):
            if part.replies is not None:
                part.replies.receive_now()
            layout, progress = part.segment_layout, part.progress
            own = layout.programs * layout.vectors
            searches += own
            if number >= self._finished:
                active += own if progress is None else progress.active
                iterations = max(iterations, 0 if progress is None else progress.iterations)
        return FitProgress(iterations, active, searches)

    def cancel(self) -> None:
        """Stop the work, because nobody waits for its result any more."""
        for part in self._parts:
            part.cancel()

    def close(self) -> None:
        """Wait until all engines are done, then give the segment back."""
        end_parts(self._parts)


def end_parts(parts: Sequence[InFlightRequest]) -> None:
    """Cancel parts that have not finished, wait for them, and give their segment back."""
    for part in parts:
        if part.timings is None:
            part.cancel()
    are_clean = [part.end() for part in parts]
    parts[0].connection.pool.release(parts[0].segment, is_clean=all(are_clean))


# ---------------------------------------------------------------------------- the choice of engines

#: Bytes of a data set that an engine loads in a nanosecond.
_LOAD_BYTES: Final = 8.0
#: Engines whose outstanding work differs by less than this part of a request are equally busy.
_EQUAL_PART: Final = 0.5
#: Least estimated nanoseconds of a part of a request that is split: a part costs some 0.1 ms.
_LEAST_PART: Final = 2_000_000
#: An engine is idle for a request if its outstanding work is at most this part of the request.
_IDLE_PART: Final = 0.1
_MASK, _MIXER = 2**32 - 1, 2654435761


class Router:
    """Sends the requests of one front end to engines."""

    def __init__(
        self,
        connections: Sequence[EngineConnection],
        labels: Sequence[str],
        table: QuotaTable,
        suspects: Suspects,
    ) -> None:
        self._connections = connections
        self.engines = len(connections)
        """Number of engines."""
        self._suspects = suspects
        self._labels = labels
        self._table = table
        self.serving: frozenset[str] = frozenset()
        """Labels of the devices that answer rightly; calls avoid the others where they can."""

    def start(
        self,
        request: InFlightRequest,
        data: KnownDataset,
        nanoseconds: int,
        engine: int | None = None,
    ) -> InFlightRequest | SplitRequest:
        """Send a request to an engine, or its parts to idle engines; the caller must close it.

        ``nanoseconds`` is the estimated time of an engine, and ``engine`` the number of the only
        one that it may go to.

        Raises:
            UnavailableError: if there is no engine.
            DatasetNotFoundError: if the data set is gone.
            FailedPreconditionError: if engines have died of it, or of its data set.
            ResourceExhaustedError: if there is no memory for batch and results, or no device with
                room for the data set.
        """
        batch, pool = request.evaluation.batch, self._connections[0].pool
        if self._suspects.strikes:  # else a digest would be made for nothing
            request.alone = self._suspects.check(request.evaluation.dataset_id, request.digest())
        segment = pool.acquire(request.segment_layout.nbytes, request.tenant)
        sent: list[InFlightRequest] = []
        try:
            request.write(segment)
            parts = [(request, [engine])] if engine is not None else []
            for part, order in parts or self._parts(request, data, nanoseconds):
                share = part.segment_layout.tokens / max(1, len(batch.codes))
                self._send(part, data, int(share * nanoseconds), order)
                sent.append(part)
        except BaseException:
            if sent:
                end_parts(sent)
            else:
                pool.release(segment)
            raise
        return request if sent[0] is request else SplitRequest(request, sent)

    def free_engines(self, nanoseconds: int) -> list[int]:
        """Return the engines that serve and have less outstanding work than this."""
        outstanding = self._table.work()
        return [
            number
            for number, connection in enumerate(self._connections)
            if connection.is_open
            and self._labels[number] in self.serving
            and outstanding[number] < nanoseconds
        ]

    def start_search(
        self, requests: Sequence[InFlightRequest], data: KnownDataset, nanoseconds: int
    ) -> list[InFlightRequest]:
        """Send a search to an engine, and others to engines that are free, as far as there are any.

        Returns what was sent, which the caller must close. Raises as `start` does, for the first.
        """
        first = self.start(requests[0], data, nanoseconds)
        assert isinstance(first, InFlightRequest)  # it is one program
        sent, others = [first], requests[1:]
        free = [n for n in self.free_engines(nanoseconds) if self._labels[n] != first.device]
        for request, number in zip(others, free, strict=False):
            try:
                self.start(request, data, nanoseconds, number)
            except (ResourceExhaustedError, UnavailableError):  # the search goes on without it
                continue
            except BaseException:
                for each in sent:
                    each.close()
                raise
            sent.append(request)
        return sent

    def place(self, data: KnownDataset, loads: Callable[[int], int]) -> None:
        """Have one engine load a new data set, where that has room for it.

        Engines come first that serve, are connected, and have few data sets, as ``loads`` says.

        Raises:
            ResourceExhaustedError: if none has room.
            FailedPreconditionError: if engines have died of the data set.
        """
        if data.engines:
            return None

        def rank(number: int) -> tuple[bool, bool, int]:
            serves = self._labels[number] in self.serving
            return not serves, not self._connections[number].is_open, loads(number)

        refusal: ResourceExhaustedError | None = None
        for number in sorted(range(len(self._connections)), key=rank):
            try:
                return data.load(number).result()
            except ResourceExhaustedError as error:
                refusal = refusal or error
        assert refusal is not None  # there is an engine at least
        raise refusal

    def _parts(
        self, request: InFlightRequest, data: KnownDataset, nanoseconds: int
    ) -> list[tuple[InFlightRequest, list[int]]]:
        """Return the parts of a request, or all of it, with the engines to try for each in turn."""
        if len(self._connections) == 1:
            return [(request, [0] if self._connections[0].is_open else [])]
        outstanding, load = self._table.work(), data.layout.nbytes / _LOAD_BYTES
        loads = {  # estimated nanoseconds until each connected engine has the data set
            number: 0.0 if number in data.engines else load
            for number, connection in enumerate(self._connections)
            if connection.is_open
        }
        waits = {number: outstanding[number] + loads[number] for number in loads}
        batch = request.evaluation.batch
        name = zlib.crc32(batch.codes.data)
        least = min(waits.values(), default=0.0) + _EQUAL_PART * nanoseconds

        def rank(number: int) -> tuple[bool, float, int]:
            preference = name * (2 * number + 1) * _MIXER & _MASK
            is_away = self._labels[number] not in self.serving
            return is_away, max(0.0, waits[number] - least), preference

        order = sorted(waits, key=rank)
        soon, much = _IDLE_PART * nanoseconds, _EQUAL_PART * nanoseconds
        free = [n for n in order if outstanding[n] <= soon and loads[n] <= much]
        idle = [n for n in free if self._labels[n] in self.serving]
        count = min(len(idle), nanoseconds // _LEAST_PART, MOST_PARTS)
        if count < 2 or request.alone:
            return [(request, order)]
        bounds = even_bounds(batch.lengths.astype(np.float64), count)
        if len(bounds) == 2:
            return [(request, order)]
        idle = idle[: len(bounds) - 1]
        parts = enumerate(request.split(bounds))
        return [(part, [*idle[number:], *idle[:number]]) for number, part in parts]

    def _send(
        self, request: InFlightRequest, data: KnownDataset, nanoseconds: int, order: Sequence[int]
    ) -> None:
        """Send a request to the first engine that has or loads the data set, and is there."""
        refusal: ResourceExhaustedError | None = None
        for number in order:
            try:
                if number not in data.engines:
                    data.load(number).result()
            except ResourceExhaustedError as error:
                refusal = refusal or error
                continue
            except UnavailableError:  # it may have crashed another engine
                continue
            request.device = self._labels[number]
            self._table.add_work(number, nanoseconds)  # which is outstanding until it has ended
            request.on_end = partial(self._table.add_work, number, -nanoseconds)
            try:
                self._connections[number].send(request)
            except UnavailableError:  # lost a moment ago
                request.on_end()
            except BaseException:
                request.on_end()
                raise
            else:
                return
        raise refusal or unavailable()


# ---------------------------------------------------------------------- searches on several engines

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
        # The last progress; the end comes next.
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
