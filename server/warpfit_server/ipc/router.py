"""Routes requests to engines: each goes to the engine with the least outstanding estimated work.

The estimates are those of admission. What is outstanding in all front ends stands in the table of
quotas, which they share. An engine that lacks the data set counts as busy for as long as loading it
takes. Among engines that are about equally busy a batch goes to the same one each time, which may
have compiled kernels of it. A request of several milliseconds is split over idle engines.

A request on a sharded data set goes to one of the engines that have the rows, which asks the others
for their part (`warpfit_server.engine.peers`).
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from typing import Final, Protocol

import numpy as np

from warpfit.dataset import Layout
from warpfit.errors import ResourceExhaustedError, UnavailableError
from warpfit.ir import Batch
from warpfit.request import Precision
from warpfit_server.ipc.engine_connection import EngineConnection
from warpfit_server.ipc.in_flight_request import InFlightRequest, unavailable
from warpfit_server.ipc.segment_layout import MOST_PARTS
from warpfit_server.ipc.split_request import SplitRequest, end_parts
from warpfit_server.row_blocks import Shards
from warpfit_server.system.resources import available_cores
from warpfit_server.tenancy.quotas import QuotaTable

#: Bytes of a data set that an engine loads in a nanosecond.
_LOAD_BYTES: Final = 8.0
#: Engines whose outstanding work differs by less than this part of a request are equally busy.
_EQUAL_PART: Final = 0.5
#: Least estimated nanoseconds of a part of a request that is split: a part costs some 0.1 ms.
_LEAST_PART: Final = 2_000_000
#: An engine is idle for a request if its outstanding work is at most this part of the request.
_IDLE_PART: Final = 0.1
#: Calls poll for their answers while there are at least so many cores for each call in flight.
_CORES_A_CALL: Final = 8
_MASK, _MIXER = 2**32 - 1, 2654435761


class Leased(Protocol):
    """A leased data set, which engines load when a request needs it there."""

    @property
    def layout(self) -> Layout:
        """Layout of the data set."""

    @property
    def shards(self) -> Shards | None:
        """Its shards, each of which one engine loads; None if engines load all of it."""

    def has(self, engine: int) -> bool:
        """Return whether an engine has loaded it, as far as this process knows."""

    def load(self, engine: int) -> Future[None]:
        """Have an engine load it, unless it has.

        The future fails with ResourceExhaustedError if the device has no room, with
        FailedPreconditionError if engines have died of the data set, and with UnavailableError if
        one may have.
        """


class Router:
    """Sends the requests of one front end to engines."""

    def __init__(
        self, connections: Sequence[EngineConnection], labels: Sequence[str], table: QuotaTable
    ) -> None:
        self._connections = connections
        self._labels = labels
        self._table = table
        self._most_polling = available_cores() // _CORES_A_CALL
        for connection in connections:
            connection.may_poll = self._has_idle_cores
        self.serving: frozenset[str] = frozenset()
        """Labels of the devices that answer rightly; calls avoid the others where they can."""

    def start(
        self, request: InFlightRequest, data: Leased, nanoseconds: int
    ) -> InFlightRequest | SplitRequest:
        """Send a request to an engine, or its parts to idle engines; the caller must close it.

        ``nanoseconds`` is the estimated time of an engine.

        Raises:
            UnavailableError: if there is no engine.
            FailedPreconditionError: if engines have died of it, or of its data set.
            ResourceExhaustedError: if there is no memory for batch and results, or no device with
                room for the data set.
        """
        if data.shards is not None:
            return self._start_sharded(request, data, data.shards, nanoseconds)
        if len(self._connections) == 1:
            order = [0] if self._connections[0].is_open else []
            return self._start_whole(request, data, nanoseconds, order)
        waits = self._waits(data)
        order = self._order(request.evaluation.batch, waits, nanoseconds)
        engines = self._idle(order, waits, nanoseconds)
        batch = request.evaluation.batch
        count = min(len(engines), nanoseconds // _LEAST_PART, len(batch), MOST_PARTS)
        if count > 1 and self._may_split(request):
            return self._start_parts(request, data, nanoseconds, engines[:count])
        return self._start_whole(request, data, nanoseconds, order)

    def _start_whole(
        self, request: InFlightRequest, data: Leased, nanoseconds: int, order: Sequence[int]
    ) -> InFlightRequest:
        """Send a request to the first engine of some that takes it."""

        def submit(number: int) -> None:
            self._connections[number].submit(request)

        self._send(request, data, nanoseconds, order, submit)
        return request

    def _start_parts(
        self, request: InFlightRequest, data: Leased, nanoseconds: int, engines: Sequence[int]
    ) -> SplitRequest:
        """Send parts of a request to some engines, each to another one if its engine is lost."""
        batch = request.evaluation.batch
        bounds = equal_bounds(batch, len(engines))
        pool = self._connections[0].pool
        segment = pool.acquire(request.segment_layout.nbytes, request.tenant)
        sent: list[InFlightRequest] = []
        try:
            request.write(segment)
            for number, part in enumerate(request.split(bounds)):
                order = [*engines[number:], *engines[:number]]
                share = part.segment_layout.tokens / max(1, len(batch.codes))

                def send(engine: int, part: InFlightRequest = part) -> None:
                    self._connections[engine].send(part)

                self._send(part, data, int(share * nanoseconds), order, send)
                sent.append(part)
        except BaseException:
            if sent:
                end_parts(sent)
            else:
                pool.release(segment)
            raise
        return SplitRequest(request, sent)

    def _start_sharded(
        self, request: InFlightRequest, data: Leased, shards: Shards, nanoseconds: int
    ) -> InFlightRequest:
        """Send a request to the engine that leads it; all that have rows of it must be there."""
        evaluation = request.evaluation
        parts = shards.parts(evaluation.row_range(data.layout))
        outstanding = self._table.work()
        if self._connections[0].suspects.check(evaluation.dataset_id, request.digest):
            leader = min(parts)  # suspects that lead each other's peers would wait for each other
        else:
            leader = min(parts, key=lambda number: outstanding[number])
        for number in parts:
            if not self._connections[number].is_open:
                raise unavailable()
            if not data.has(number):
                data.load(number).result()
        request.device = ",".join(self._labels[number] for number in parts)
        share = nanoseconds // len(parts)
        charges = ExitStack()
        for number in parts:
            charges.callback(self._charge(number, share))
        request.on_end = charges.close
        try:
            self._connections[leader].submit(request)
        except BaseException:
            request.on_end()
            raise
        return request

    def _send(
        self,
        request: InFlightRequest,
        data: Leased,
        nanoseconds: int,
        order: Sequence[int],
        send: Callable[[int], None],
    ) -> None:
        """Send a request to the first engine that has or loads the data set, and is there."""
        refusal: ResourceExhaustedError | None = None
        for number in order:
            try:
                if not data.has(number):
                    data.load(number).result()
            except ResourceExhaustedError as error:
                refusal = refusal or error
                continue
            except UnavailableError:  # it may have crashed another engine
                continue
            request.device = self._labels[number]
            request.on_end = self._charge(number, nanoseconds)
            try:
                send(number)
            except UnavailableError:  # lost a moment ago
                request.on_end()
            except BaseException:
                request.on_end()
                raise
            else:
                return
        raise refusal or unavailable()

    def _waits(self, data: Leased) -> dict[int, float]:
        """Return the estimated nanoseconds after which each connected engine has time."""
        outstanding, load = self._table.work(), data.layout.nbytes / _LOAD_BYTES
        return {
            number: outstanding[number] + (0.0 if data.has(number) else load)
            for number, connection in enumerate(self._connections)
            if connection.is_open
        }

    def _order(self, batch: Batch, waits: Mapping[int, float], nanoseconds: int) -> list[int]:
        """Return the numbers of the connected engines, the best one for a batch first."""
        least = min(waits.values(), default=0.0) + _EQUAL_PART * nanoseconds
        name = zlib.crc32(batch.codes.data)

        def rank(number: int) -> tuple[bool, float, int]:
            preference = name * (2 * number + 1) * _MIXER & _MASK
            is_away = self._labels[number] not in self.serving
            return is_away, max(0.0, waits[number] - least), preference

        return sorted(waits, key=rank)

    def _idle(
        self, order: Sequence[int], waits: Mapping[int, float], nanoseconds: int
    ) -> list[int]:
        """Return the engines that could begin with a part of a request almost at once."""
        soon = _IDLE_PART * nanoseconds
        return [n for n in order if waits[n] <= soon and self._labels[n] in self.serving]

    def _may_split(self, request: InFlightRequest) -> bool:
        """Return whether parts of a request give its bits, and it is no suspect."""
        evaluation = request.evaluation
        if self._connections[0].suspects.check(evaluation.dataset_id, request.digest):
            return False
        # In fast mode one search that leaves the range of float32 has all computed precisely.
        return not (request.is_fit and evaluation.precision is Precision.FAST)

    def _has_idle_cores(self) -> bool:
        """Return whether so few calls are in flight that each may poll for its answer."""
        return self._table.in_flight().calls <= self._most_polling

    def _charge(self, number: int, nanoseconds: int) -> Callable[[], None]:
        """Count outstanding work of an engine; return what ends that."""
        self._table.add_work(number, nanoseconds)
        return partial(self._table.add_work, number, -nanoseconds)


def equal_bounds(batch: Batch, parts: int) -> list[int]:
    """Return the bounds of ranges of programs with about as many tokens each.

    Args:
        batch: of at least as many programs as parts.
        parts: number of ranges, none of which is empty.
    """
    starts, numbers = batch.starts, np.arange(1, parts)
    inner = np.searchsorted(starts, starts[-1] * numbers / parts)
    inner = numbers + np.maximum.accumulate(np.maximum(inner, numbers) - numbers)  # ascending
    return [0, *np.minimum(inner, len(batch) - parts + numbers).tolist(), len(batch)]
