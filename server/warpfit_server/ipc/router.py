"""Routes requests to engines: each goes to the engine with the least outstanding estimated work.

The estimates are those of admission. What is outstanding in all front ends stands in the table of
quotas, which they share. An engine that lacks the data set counts as busy for as long as loading it
takes. Among engines that are about equally busy a batch goes to the same one each time, which may
have compiled kernels of it. A request of several milliseconds is split over idle engines, also over
one that loads the data set in less than half of the request's time: all parts lie in one segment,
where each engine writes into its slice of the results.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

import numpy as np

from warpfit.calls.splitting import even_bounds
from warpfit.errors import ResourceExhaustedError, UnavailableError, WarpfitError
from warpfit.fitting import FitProgress
from warpfit.request import STAGES, Timings
from warpfit_server.ipc import messages
from warpfit_server.ipc.engine_connection import EngineConnection, InFlightRequest, unavailable
from warpfit_server.ipc.quarantine import KnownSuspects
from warpfit_server.ipc.registry import KnownDataset
from warpfit_server.ipc.segments import MOST_PARTS
from warpfit_server.tenancy.quotas import QuotaTable

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
        suspects: KnownSuspects,
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
        self, request: InFlightRequest, data: KnownDataset, nanoseconds: int
    ) -> InFlightRequest | SplitRequest:
        """Send a request to an engine, or its parts to idle engines; the caller must close it.

        ``nanoseconds`` is the estimated time of an engine.

        Raises:
            UnavailableError: if there is no engine.
            DatasetNotFoundError: if the data set is gone.
            FailedPreconditionError: if engines have died of it, or of its data set.
            ResourceExhaustedError: if there is no memory for batch and results, or no device with
                room for the data set.
        """
        batch, pool = request.evaluation.batch, self._connections[0].pool
        request.alone = self._suspects.check(request.evaluation.dataset_id, request.digest)
        segment = pool.acquire(request.segment_layout.nbytes, request.tenant)
        sent: list[InFlightRequest] = []
        try:
            request.write(segment)
            for part, order in self._parts(request, data, nanoseconds):
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
            pool = self._connections[number].pool
            request.alone = self._suspects.check(request.evaluation.dataset_id, request.digest)
            try:
                segment = pool.acquire(request.segment_layout.nbytes, request.tenant)
                try:
                    request.write(segment)
                    self._send(request, data, nanoseconds, [number])
                except BaseException:
                    pool.release(segment)
                    raise
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
