"""Requests that reach a server although some are away, busy, or without the data set.

`Failover` wraps a transport. A request goes to the server that `Servers` chooses, to the next one
if that fails, and to all of them again after a pause, as long as the retry policy and the caller's
deadline allow. Every request may be repeated at any server.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from warpfit import codec, errors
from warpfit.dataset import DatasetReference, changed_data
from warpfit.transport.call import Cancellation, Deadline, Request, Transport, UploadStream
from warpfit.transport.connection import Connection
from warpfit.transport.servers import NOBODY_THERE, Server, Servers
from warpfit.transport.settings import RetryPolicy

#: Most uploads of a data set for one request, which a server evicts each time before the request
#: comes: some minutes of many callers that share too little memory.
_MOST_UPLOADS: Final = 300
#: Longest pause in seconds before another one; each is random, so that one of the callers that take
#: the memory from each other comes through.
_UPLOAD_PAUSE: Final = 1.0
#: Seconds for which a first request waits where nobody listens, unless the caller says otherwise.
_FIRST_CONTACT_SECONDS: Final = 1.5
#: Seconds between two lines of the log about a request that waits.
_TELL_SECONDS: Final = 10.0
#: Errors that another server may not have.
_ELSEWHERE: Final = (
    errors.UnavailableError,
    errors.ResourceExhaustedError,
    errors.DatasetNotFoundError,
)
#: Not the module's own functions, whose seed decides the searches of callers.
_RANDOM: Final = random.SystemRandom()
_log = logging.getLogger("warpfit")


@dataclass(slots=True)
class Retries:
    """Counts the failures of one request at all servers, and decides whether it is repeated."""

    policy: RetryPolicy
    deadline: Deadline
    failures: int = 0
    first_failure: float = 0.0
    told_at: float = -math.inf

    def restart(self) -> None:
        """Count from the beginning, because something has been achieved."""
        self.failures = 0

    def must_tell(self) -> bool:
        """Return whether users want to read again that the call waits; true every few seconds."""
        now = time.monotonic()
        if now < self.told_at + _TELL_SECONDS:
            return False
        self.told_at = now
        return True

    def pause_after(self, error: errors.WarpfitError, total_seconds: float) -> float:
        """Return the policy's pause, or the time that the server asked for if it is longer.

        Raises:
            WarpfitError: ``error``, once ``total_seconds`` after the first failure have passed, or
                if the server asks for more.
            DeadlineExceededError: if the caller's deadline comes before the next attempt.
        """
        now = time.monotonic()
        self.first_failure = self.first_failure if self.failures else now
        self.failures += 1
        time_left = self.first_failure + total_seconds - now
        # The time that the server asks for is spread, so that workers do not return all at once.
        asked = (error.retry_after or 0.0) * (1.0 + self.policy.jitter * _RANDOM.random())
        if time_left <= 0 or asked > time_left:
            raise error
        pause = max(asked, min(time_left, self.policy.pause(self.failures, _RANDOM.random())))
        remaining = self.deadline.remaining()
        if remaining is not None and pause >= remaining:
            raise errors.DeadlineExceededError(
                f"no answer within {self.deadline.timeout:g} s; the last of {self.failures} "
                f"attempts failed: {error.message}",
                "DEADLINE_EXCEEDED",
                "Raise timeout=, and look at the server's log",
            ) from error
        return float(pause)


@dataclass(frozen=True, slots=True)
class Failover:
    """Sends requests to the servers of a connection through a transport; threads may share it."""

    transport: Transport
    connection: Connection
    servers: Servers
    cancellation: Cancellation | None = None
    """Ends what is sent; None if nothing but an interrupt does."""

    @classmethod
    def of(cls, transport: Transport, connection: Connection) -> Self:
        """Wrap the transport of a new client."""
        addresses, replicas = connection.target.addresses, connection.replicas
        servers = Servers(addresses, replicas=replicas, is_fixed=bool(addresses))
        return cls(transport, connection, servers)

    def with_cancellation(self, token: Cancellation) -> Self:
        """Return the same, but that ``token`` ends what it sends."""
        return replace(self, cancellation=token)

    def with_patience(self) -> Self:
        """Return the same, but that requests are repeated until their deadline."""
        policy = replace(self.connection.retry, total_seconds=math.inf)
        return replace(self, connection=replace(self.connection, retry=policy, wait=math.inf))

    def call_with_failover(self, request: Request) -> Any:
        """Send a request to one server after the other, and again after a pause; return its answer.

        Raises:
            WarpfitError: what another server would answer, too; otherwise the failure at all of
                them, once the retry policy gives up or the deadline passes.
        """
        servers, dataset = self.servers, request.dataset
        retries = Retries(self.connection.retry, request.deadline)
        if not servers.is_several:
            place: tuple[bytes, int] | tuple[()] = ()
        else:
            place = () if dataset is None else (dataset.content_id, dataset.layout.nbytes)
        tried: list[Server] = []
        error: errors.WarpfitError | None = None
        while True:
            if servers.is_several:
                error = self._find_servers() or error
            server = servers.acquire(tried, *place)
            if server is None:
                assert error is not None, "a request without a failure gets a server"
                self.sleep(self._pause(retries, error))
                tried.clear()
                continue
            started = servers.clock()
            try:
                return self.call_uploading_if_missing(server, request, retries)
            except _ELSEWHERE as failure:
                self._note(server, failure, started, request)
                error = min(error, failure, key=_severity) if tried and error else failure
                tried.append(server)
            finally:
                servers.release(server)

    def call_if_up(self, server: Server, request: Request) -> None:
        """Send a request to one server for its own sake; pass over one that does not answer now."""
        started = self.servers.clock()
        try:
            if not server.failures:
                retries = Retries(self.connection.retry, request.deadline)
                self.call_uploading_if_missing(server, request, retries)
        except (*_ELSEWHERE, errors.DeadlineExceededError) as error:
            self.servers.failed(server, error, started)

    def call_uploading_if_missing(self, server: Server, request: Request, retries: Retries) -> Any:
        """Send a request to one server, and its data set before if that is not resident there.

        That is repeated while uploads succeed: others may evict or remove the data set each time.
        """
        if self.servers.is_several and not server.is_trusted:
            self._probe(server, request.deadline)
        uploads = 0
        while True:
            try:
                return self.call_one(server, request)
            except errors.DatasetNotFoundError:
                if request.dataset is None:
                    raise
                if uploads:
                    pause = min(_UPLOAD_PAUSE, 0.01 * 2.0 ** min(uploads, 16)) * _RANDOM.random()
                    left = request.deadline.remaining()
                    if uploads >= _MOST_UPLOADS:
                        raise
                    if left is not None and pause >= left:
                        raise _evicted_too_soon(uploads, request.deadline) from None
                    self.sleep(pause)
                answer = self.upload(server, request)
                retries.restart()
                if request.method == "GetVariables":
                    return answer  # it says what was asked
                uploads += 1

    def call_one(self, server: Server, request: Request) -> Any:
        """Send a request to one server once, and return what is read of the answer."""
        started = self.servers.clock()
        request.server, request.seconds = server.address, request.deadline.remaining()
        request.cancellation = self.cancellation
        try:
            if self.cancellation is not None:
                self.cancellation.check()
            answer = self.transport.call(request)
        except errors.DeadlineExceededError as error:
            self.servers.failed(server, error, started)  # it may hang: others are asked first
            raise
        self.servers.succeeded(server)
        return answer

    def upload(self, server: Server, request: Request) -> Any:
        """Send the data set of a request to a server, or have the server read its file."""
        dataset = request.dataset
        assert dataset is not None, "the request has a data set"
        if isinstance(dataset, DatasetReference) and dataset.file is not None:
            message = codec.open_message(dataset.file)
            answer = self.call_one(
                server, Request("OpenDataset", message, deadline=request.deadline)
            )
            if answer.content_id != dataset.content_id:
                raise changed_data()
            return answer
        stream = UploadStream(dataset, self.connection.transport.chunk_bytes, request.report)
        try:
            answer = self.call_one(
                server, Request("UploadVariables", stream, deadline=request.deadline)
            )
            codec.check_dataset(dataset, answer)
        except (errors.ResourceExhaustedError, errors.DatasetNotFoundError) as error:
            if error.retry_after is None:  # no room there, or no numbers here
                self.servers.refused(server, dataset.content_id)
            raise
        except errors.InvalidArgumentError as error:
            if error.reason != "BAD_DIGEST":
                raise
            raise changed_data() from error
        return answer

    def sleep(self, seconds: float) -> None:
        """Wait, at most until the requests are cancelled."""
        (time.sleep if self.cancellation is None else self.cancellation.sleep)(seconds)

    def _probe(self, server: Server, deadline: Deadline) -> None:
        """Ask something small, because a call to a machine that is gone would wait long."""
        left, seconds = deadline.remaining(), self.servers.probe_seconds(server)
        seconds = seconds if left is None else min(left, seconds)
        try:
            self.call_one(
                server, Request("GetServerInfo", codec.info_request(), deadline=Deadline(seconds))
            )
        except errors.DeadlineExceededError as error:
            raise errors.UnavailableError(
                f"{server.address} has not answered within {seconds:g} s",
                "NO_ANSWER",
                "Check that the server runs and that the network lets its port pass",
            ) from error
        except errors.UnavailableError:
            raise
        except errors.WarpfitError:
            return  # the server is there; what it refuses is not what the request is about

    def _note(
        self, server: Server, failure: errors.WarpfitError, started: float, request: Request
    ) -> None:
        """Take note of a failure; raise it if no server would answer otherwise."""
        dataset = request.dataset
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
        # Where a server has answered before it is restarting; otherwise the address may be wrong.
        patience = self.connection.retry.total_seconds
        if not self.servers.has_answered:
            if self.connection.wait is not None:
                patience = self.connection.wait
            elif error.reason in NOBODY_THERE:
                patience = min(patience, _FIRST_CONTACT_SECONDS)
        pause = retries.pause_after(error, patience)
        if not self.servers.has_answered and retries.must_tell():
            _log.warning("%s; waiting for a server, for up to %g s", error.message, patience)
        return pause

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
