"""Routes requests to engines: each goes to the engine with the least outstanding estimated work.

The estimates are those of admission. What is outstanding in all front ends stands in the table of
quotas, which they share. An engine that lacks the data set counts as busy for as long as loading it
takes. Among engines that are about equally busy a batch goes to the same one each time, which may
have compiled kernels of it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final, Protocol

from warpfit.dataset import Layout
from warpfit.errors import ResourceExhaustedError, UnavailableError
from warpfit.ir import Batch
from warpfit_server.ipc.engine_connection import EngineConnection
from warpfit_server.ipc.in_flight_request import InFlightRequest, unavailable
from warpfit_server.tenancy.quotas import QuotaTable

#: Bytes of a data set that an engine loads in a nanosecond.
_LOAD_BYTES: Final = 8.0
#: Engines whose outstanding work differs by less than this part of a request are equally busy.
_EQUAL_PART: Final = 0.5
_MASK, _MIXER = 2**32 - 1, 2654435761


class Leased(Protocol):
    """A leased data set, which engines load when a request needs it there."""

    @property
    def layout(self) -> Layout:
        """Layout of the data set."""

    def has(self, engine: int) -> bool:
        """Return whether an engine has loaded it, as far as this process knows."""

    def load(self, engine: int) -> Future[None]:
        """Have an engine load it, unless it has.

        The future fails with ResourceExhaustedError if the device has no room, and with
        FailedPreconditionError if engines have died of the data set.
        """


class Router:
    """Sends the requests of one front end to engines.

    Args:
        connections: to the engines, by number.
        labels: of their devices.
        table: of the outstanding work, shared by all front ends.

    """

    def __init__(
        self, connections: Sequence[EngineConnection], labels: Sequence[str], table: QuotaTable
    ) -> None:
        self._connections = connections
        self._labels = labels
        self._table = table
        self.serving: frozenset[str] = frozenset()
        """Labels of the devices that answer rightly; calls avoid the others where they can."""

    def start(self, request: InFlightRequest, data: Leased, nanoseconds: int) -> InFlightRequest:
        """Send a request to an engine; the caller must close it.

        Args:
            request: a checked evaluation or fit.
            data: its data set.
            nanoseconds: estimated time of an engine.

        Raises:
            UnavailableError: if there is no engine.
            FailedPreconditionError: if engines have died of it, or of its data set.
            ResourceExhaustedError: if there is no memory for batch and results, or no device with
                room for the data set.

        """
        refusal: ResourceExhaustedError | None = None
        for number in self.order(request.evaluation.batch, data, nanoseconds):
            try:
                if not data.has(number):
                    data.load(number).result()
            except ResourceExhaustedError as error:
                refusal = refusal or error
                continue
            request.device = self._labels[number]
            request.on_end = self._charge(number, nanoseconds)
            try:
                return self._connections[number].submit(request)
            except UnavailableError:  # lost a moment ago
                request.on_end()
            except BaseException:
                request.on_end()
                raise
        raise refusal or unavailable()

    def order(self, batch: Batch, data: Leased, nanoseconds: int) -> list[int]:
        """Return the numbers of the connected engines, the best one for a batch first."""
        connected = [n for n, connection in enumerate(self._connections) if connection.is_open]
        if len(connected) <= 1:
            return connected
        outstanding, load = self._table.work(), data.layout.nbytes / _LOAD_BYTES
        waits = {n: outstanding[n] + (0.0 if data.has(n) else load) for n in connected}
        least = min(waits.values()) + _EQUAL_PART * nanoseconds
        name = zlib.crc32(batch.codes.data)

        def rank(number: int) -> tuple[bool, float, int]:
            preference = name * (2 * number + 1) * _MIXER & _MASK
            is_away = self._labels[number] not in self.serving
            return is_away, max(0.0, waits[number] - least), preference

        return sorted(connected, key=rank)

    def _charge(self, number: int, nanoseconds: int) -> Callable[[], None]:
        """Count outstanding work of an engine; return what ends that."""
        self._table.add_work(number, nanoseconds)
        return lambda: self._table.add_work(number, -nanoseconds)
