"""The attempts of a call: at which server, when again, and how often."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from warpfit import codec, errors
from warpfit.calls.progress import Progress, silent
from warpfit.calls.retries import Deadline, Retries
from warpfit.dataset import ClientDataset, DatasetReference, changed_data
from warpfit.transport.call import Call, Cancellation, Transport, UploadStream
from warpfit.transport.connection import Connection
from warpfit.transport.servers import NOBODY_THERE, Server, Servers

#: Most uploads of a data set for one call, which a server evicts each time before the call comes:
#: some minutes of many callers that share too little memory.
_MOST_UPLOADS: Final = 300
#: Longest pause in seconds before another one; each is random, so that one of the callers that take
#: the memory from each other comes through.
_UPLOAD_PAUSE: Final = 1.0
#: Seconds for which a first call waits where nobody listens, unless the caller says otherwise.
_FIRST_CONTACT_SECONDS: Final = 1.5
#: Errors that another server may not have.
_ELSEWHERE: Final = (
    errors.UnavailableError,
    errors.ResourceExhaustedError,
    errors.DatasetNotFoundError,
)
#: Not the module's own functions, whose seed decides the searches of callers.
_RANDOM: Final = random.SystemRandom()
_log = logging.getLogger("warpfit")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Attempts:
    """Carries out calls at the servers of a client; every call may be repeated at any of them."""

    transport: Transport
    connection: Connection
    servers: Servers
    cancellation: Cancellation | None = None
    """Ends what these attempts do; None if nothing but an interrupt does."""

    def anywhere(
        self, act: Callable[[Server], T], retries: Retries, dataset: ClientDataset | None = None
    ) -> T:
        """Act at one server after the other, and again after a pause, until it succeeds."""
        place: tuple[bytes, int] | tuple[()] = ()
        if dataset is not None and self.servers.is_several:
            place = dataset.content_id, dataset.layout.nbytes
        tried: list[Server] = []
        error: errors.WarpfitError | None = None
        while True:
            if self.servers.is_several:
                error = self._find_servers() or error
            server = self.servers.acquire(tried, *place)
            if server is None:
                assert error is not None, "a call without a failure gets a server"
                self.sleep(self._pause(retries, error))
                tried.clear()
                continue
            started = self.servers.clock()
            try:
                return self._at(server, act, retries.deadline)
            except _ELSEWHERE as failure:
                self._note(server, failure, started, dataset)
                error = min(error, failure, key=_severity) if tried and error else failure
                tried.append(server)
            finally:
                self.servers.release(server)

    def at_each(
        self, servers: Sequence[Server], act: Callable[[Server], Any], deadline: Deadline
    ) -> None:
        """Act at one server after the other; pass over those that do not answer now."""
        for server in servers:
            started = self.servers.clock()
            try:
                if not server.failures:
                    self._at(server, act, deadline)
            except (*_ELSEWHERE, errors.DeadlineExceededError) as error:
                self.servers.failed(server, error, started)

    def call(self, server: Server, call: Call, seconds: float | None, work: int = 0) -> Any:
        """Make one attempt at one server, and return what is read of the answer."""
        started = self.servers.clock()
        try:
            if self.cancellation is not None:
                self.cancellation.check()
            found = self.transport.call(call, server.address, seconds, self.cancellation)
        except errors.DeadlineExceededError:
            server.is_trusted = False  # it may hang: the next call asks first
            raise
        self.servers.succeeded(server, call.method, work, self.servers.clock() - started)
        return found

    def sleep(self, seconds: float) -> None:
        """Wait, at most until the attempts are cancelled."""
        (time.sleep if self.cancellation is None else self.cancellation.sleep)(seconds)

    def on_data(
        self, server: Server, call: Call, retries: Retries, dataset: ClientDataset, work: int
    ) -> Any:
        """Call a method that needs a data set, and upload the data set if it is not resident.

        That is repeated while uploads succeed: others may evict or remove the data set each time.
        """
        uploads = 0
        while True:
            left = retries.deadline.remaining()
            seconds = left if left is None else self.servers.share(call.method, work, left)
            try:
                return self.call(server, call, seconds, work)
            except errors.DeadlineExceededError as error:
                if seconds == left or seconds is None:
                    raise
                raise _no_answer(server, seconds) from error
            except errors.DatasetNotFoundError:
                if uploads:
                    pause = min(_UPLOAD_PAUSE, 0.01 * 2.0 ** min(uploads, 16)) * _RANDOM.random()
                    left = retries.deadline.remaining()
                    if uploads >= _MOST_UPLOADS:
                        raise
                    if left is not None and pause >= left:
                        raise _evicted_too_soon(uploads, retries.deadline) from None
                    self.sleep(pause)
                self.send(server, dataset, retries, silent)
                uploads += 1

    def send(
        self, server: Server, dataset: ClientDataset, retries: Retries, report: Progress
    ) -> None:
        """Upload a data set to a server, or have the server read its file."""
        if isinstance(dataset, DatasetReference) and dataset.file is not None:
            question = Call("OpenDataset", codec.open_message(dataset.file))
            answer = self.call(server, question, retries.deadline.remaining())
            if answer.content_id != dataset.content_id:
                raise changed_data()
            retries.restart()
            return
        stream = UploadStream(dataset, self.connection.transport.chunk_bytes, report)
        try:
            upload = Call("UploadVariables", stream)
            codec.check_dataset(dataset, self.call(server, upload, retries.deadline.remaining()))
        except (errors.ResourceExhaustedError, errors.DatasetNotFoundError) as error:
            if error.retry_after is None:  # no room there, or no numbers here
                self.servers.refused(server, dataset.content_id)
            raise
        except errors.InvalidArgumentError as error:
            if error.reason != "BAD_DIGEST":
                raise
            raise changed_data() from error
        retries.restart()

    def _at(self, server: Server, act: Callable[[Server], T], deadline: Deadline) -> T:
        if self.servers.is_several and not server.is_trusted:
            self._probe(server, deadline)
        return act(server)

    def _probe(self, server: Server, deadline: Deadline) -> None:
        """Ask something small, because a call to a machine that is gone would wait long."""
        left, seconds = deadline.remaining(), self.servers.probe_seconds(server)
        seconds = seconds if left is None else min(left, seconds)
        try:
            self.call(server, Call("GetServerInfo", codec.info_request()), seconds)
        except errors.DeadlineExceededError as error:
            raise _no_answer(server, seconds) from error
        except errors.UnavailableError:
            raise
        except errors.WarpfitError:
            return  # the server is there; what it refuses is not what the call is about

    def _note(
        self,
        server: Server,
        failure: errors.WarpfitError,
        started: float,
        dataset: ClientDataset | None,
    ) -> None:
        """Take note of a failure; raise it if no server would answer otherwise."""
        is_refused = dataset is not None and dataset.content_id in server.refusals
        if _is_final(failure) and not is_refused:
            raise failure
        if (
            self.servers.is_several
            and server.is_trusted
            and isinstance(failure, errors.UnavailableError)
        ):
            _log.warning("%s: %s; calls go to other servers", server.address, failure.message)
        self.servers.failed(server, failure, started)

    def _pause(self, retries: Retries, error: errors.WarpfitError) -> float:
        """Return the seconds to wait; raise ``error`` if it cannot help or has taken too long."""
        if _is_final(error):
            raise error
        patience = self._patience(error)
        pause = retries.pause_after(error, patience)
        if not self.servers.has_answered and retries.must_tell():
            _log.warning("%s; waiting for a server, for up to %g s", error.message, patience)
        return pause

    def _patience(self, error: errors.WarpfitError) -> float:
        """Return for how many seconds a call is repeated after its first failure."""
        total = self.connection.retry.total_seconds
        if self.servers.has_answered:
            return total
        if self.connection.wait is not None:
            return self.connection.wait
        # Where a server has answered before it is restarting; otherwise the address may be wrong.
        return min(total, _FIRST_CONTACT_SECONDS) if error.reason in NOBODY_THERE else total

    def _find_servers(self) -> errors.UnavailableError | None:
        """Ask for the servers' addresses when it is time; return why none is known, if so."""
        try:
            if self.servers.must_resolve():
                if any(self.servers):
                    threading.Thread(target=self._resolve, daemon=True).start()
                else:
                    self.servers.update(self.connection.target.find())
        except errors.UnavailableError as error:
            return error
        for address in self.servers.forgotten():
            self.transport.forget(address)
        return None

    def _resolve(self) -> None:
        try:
            self.servers.update(self.connection.target.find())
        except Exception:  # whatever a resolver raises; the servers that are known stay
            text = self.connection.target.text
            _log.warning("the addresses of %s cannot be found", text, exc_info=True)


def _no_answer(server: Server, seconds: float) -> errors.UnavailableError:
    return errors.UnavailableError(
        f"{server.address} has not answered within {seconds:g} s",
        "NO_ANSWER",
        "Check that the server runs and that the network lets its port pass",
    )


def _evicted_too_soon(uploads: int, deadline: Deadline) -> errors.DeadlineExceededError:
    return errors.DeadlineExceededError(
        f"no answer within {deadline.timeout:g} s; the data set was uploaded {uploads} times, and "
        "evicted each time before the call came",
        "DEADLINE_EXCEEDED",
        "Raise timeout=, or start the server with a higher --max-resident-bytes",
    )


def _severity(error: errors.WarpfitError) -> tuple[bool, float]:
    """Return what the failures at several servers are compared by: the least is waited for."""
    return _is_final(error), error.retry_after or 0.0


def _is_final(error: errors.WarpfitError) -> bool:
    """Return whether the server would fail again: the call is over a limit, or lacks its data."""
    return error.retry_after is None and not isinstance(error, errors.UnavailableError)
