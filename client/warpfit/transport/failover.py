"""Requests that reach a server although some are away, busy, or without the data set.

`Failover` wraps a transport. A request goes to the server that `Servers` chooses, to the next one
if that fails, and to all of them again after a pause, as long as the retry policy and the caller's
deadline allow. Every request may be repeated at any server.

Where a data set lives is decided by rendezvous hashing (Thaler and Ravishankar 1998): each client
ranks the servers by a hash of content id and address, and the first ones are the data set's homes.
So all clients agree without asking, and a server that goes moves its own data sets only. Among the
homes that are up, a call takes one with the fewest calls of this client in flight.
"""

from __future__ import annotations

import hashlib
import logging
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

from warpfit import codec, errors
from warpfit.dataset import DatasetReference, changed_data
from warpfit.errors import DeadlineExceededError, UnavailableError, WarpfitError
from warpfit.transport.call import (
    RENEWED_IN_CHILD,
    Cancellation,
    Deadline,
    Request,
    Transport,
    UploadStream,
)
from warpfit.transport.connection import Connection, RetryPolicy

# --------------------------------------------------------------------------- the choice of a server

#: Reasons of errors that say that there is no server, rather than one that is in trouble.
NOBODY_THERE: Final = frozenset(
    {"CONNECTION_REFUSED", "CANNOT_CONNECT", "NAME_NOT_RESOLVED", "NO_SERVERS"}
)
#: Reasons of errors that repeating a first call cannot help: the two sides differ about TLS.
TLS_MISTAKES: Final = frozenset(
    {
        *("WRONG_SERVER_NAME", "NO_TLS", "CERTIFICATE_NOT_VALID", "UNTRUSTED_CERTIFICATE"),
        *("TLS_WANTED", "CLIENT_CERTIFICATE_WANTED", "CLIENT_CERTIFICATE_REFUSED"),
    }
)
#: Data sets of at most this size live on every server, up to a number of them.
SMALL_BYTES: Final = 16 << 20
_SMALL_REPLICAS: Final = 16
#: Longest time in seconds that a server may take to answer a small question before it gets a call.
PROBE_SECONDS: Final = 0.5
#: First and longest time in seconds that a server which has failed is left alone.
_PAUSES: Final = (0.1, 5.0)
#: Seconds between two questions for the addresses, usually and after a failure.
_RESOLVE_SECONDS: Final = (10.0, 1.0)
#: Seconds for which a server that had no room for a data set is not asked again to take it.
_REFUSAL_SECONDS: Final = 30.0
_MOST_RANKINGS: Final = 256
#: Seconds between two lines of the log about calls that wait.
_TELL_SECONDS: Final = 10.0
#: Not the module's own functions, whose seed decides the searches of callers.
_RANDOM: Final = random.SystemRandom()


@dataclass(slots=True, eq=False)
class Server:
    """State of one server as a client sees it."""

    address: str
    outstanding: int = 0
    """Calls of this client that are in flight there."""
    failures: int = 0
    failed_at: float = 0.0
    down_until: float = 0.0
    """Moment until which it is left alone after a failure."""
    is_trusted: bool = False
    """Whether it has answered since its last failure; otherwise it is asked something small first,
    because a call to a machine that is gone would wait for a long time."""
    refusals: dict[bytes, float] = field(default_factory=dict)
    """Content ids of data sets that it has no room for, and until when that is believed."""


class Servers:
    """Chooses the server for each attempt of a call; threads may share it.

    A data set that is not small has ``replicas`` homes. Where addresses are not fixed, `update`
    brings them.
    """

    def __init__(
        self,
        addresses: Sequence[str] = (),
        *,
        replicas: int = 2,
        is_fixed: bool = True,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = _RANDOM.random,
    ) -> None:
        self.has_answered = False
        """Whether any server has ever answered."""
        self._replicas = replicas
        self._is_fixed = is_fixed
        self.clock, self._draw = clock, draw
        self._lock = threading.Lock()
        self._servers: dict[str, Server] = {}
        self._dropped: list[Server] = []
        self._rankings: dict[bytes, list[Server]] = {}
        self._resolve_at = 0.0
        self._told_at = -math.inf
        self.is_several = not is_fixed or len(addresses) > 1
        """Whether there may be more than one server; if not, nothing is chosen."""
        self.update(addresses)
        RENEWED_IN_CHILD.add(self)

    def after_fork(self) -> None:
        """Begin anew in a child, which has none of the parent's calls in flight."""
        self._lock = threading.Lock()
        for server in self:
            server.outstanding = 0

    def __iter__(self) -> Iterator[Server]:
        """Iterate over the servers that there are now."""
        return iter(list(self._servers.values()))

    # --------------------------------------------------------------------------------- addresses

    def must_resolve(self) -> bool:
        """Return whether it is time to ask for the addresses; true once for each time."""
        if self._is_fixed:
            return False
        now = self.clock()
        with self._lock:
            if self._servers and now < self._resolve_at:
                return False
            self._resolve_at = now + _RESOLVE_SECONDS[0]
            return True

    def update(self, addresses: Sequence[str]) -> None:
        """Take the addresses of the servers that there are now; none are taken for an error."""
        with self._lock:
            if not addresses:
                return
            kept = {one: self._servers.get(one) or Server(one) for one in addresses}
            self._dropped += [s for s in self._servers.values() if s.address not in kept]
            self._servers, self._rankings = kept, {}

    def forgotten(self) -> list[str]:
        """Return the addresses of servers that are gone and have no call in flight, once."""
        if not self._dropped:
            return []
        with self._lock:
            idle = [server for server in self._dropped if not server.outstanding]
            self._dropped = [server for server in self._dropped if server.outstanding]
            return [server.address for server in idle if server.address not in self._servers]

    def must_tell(self) -> bool:
        """Return whether users want to read again that calls wait; true every few seconds."""
        now = self.clock()
        with self._lock:
            if now < self._told_at + _TELL_SECONDS:
                return False
            self._told_at = now
            return True

    # ------------------------------------------------------------------------------------ choice

    def acquire(
        self, tried: Sequence[Server] = (), content_id: bytes = b"", nbytes: int = 0
    ) -> Server | None:
        """Return the server for the next attempt, and count the attempt as in flight there.

        The result is None if the call has failed at all servers that could answer now. A call that
        has not failed yet gets one even if all have failed others, as long as there are any.
        """
        if not self.is_several:
            (only,) = self._servers.values()
            return None if tried else only
        with self._lock:
            now = self.clock()
            homes = self.homes(content_id, nbytes)
            alive = [server for server in homes if server.refusals.get(content_id, 0.0) <= now]
            if not alive and not tried:
                ranked = self._ranked(content_id)
                if all(server.refusals.get(content_id, 0.0) > now for server in ranked):
                    for server in ranked:  # all have refused the data set, so all are asked again
                        del server.refusals[content_id]
            up = [server for server in alive if server.down_until <= now and server not in tried]
            chosen: Server | None = None
            if up:
                # First those whose turn it is to be asked whether they are there.
                chosen = min(up, key=lambda one: (one.is_trusted, one.outstanding, self._draw()))
            elif not any(server.is_trusted for server in alive):
                # No home is merely busy: the next in rank takes over, and is sent the data set.
                for server in self._ranked(content_id)[len(homes) :]:
                    is_asked = server.down_until <= now and server not in tried
                    if is_asked and server.refusals.get(content_id, 0.0) <= now:
                        chosen = server
                        break
            if chosen is None and homes and not tried:
                chosen = min(homes, key=lambda one: one.down_until)
            if chosen is not None:
                chosen.outstanding += 1
                if not chosen.is_trusted:  # others keep away until this attempt has an outcome
                    chosen.down_until = self.clock() + PROBE_SECONDS
            return chosen

    def release(self, server: Server) -> None:
        """Count an attempt as over."""
        if self.is_several:
            with self._lock:
                server.outstanding -= 1

    def homes(self, content_id: bytes, nbytes: int) -> list[Server]:
        """Return the servers on which a data set lives, in the order of their ranks."""
        count = self._replicas
        if nbytes <= SMALL_BYTES:
            count = max(count, _SMALL_REPLICAS)
        return self._ranked(content_id)[:count]

    def probe_seconds(self, server: Server) -> float:
        """Return how long to wait for a server's first answer: longer if there is no other one."""
        has_others = any(other.is_trusted for other in self)
        return PROBE_SECONDS * (1 if has_others else 2 ** min(server.failures, 4))

    def _ranked(self, content_id: bytes) -> list[Server]:
        ranking = self._rankings.get(content_id)
        if ranking is None:

            def score(server: Server) -> bytes:
                key = content_id + server.address.encode()
                return hashlib.blake2b(key, digest_size=8).digest()

            ranking = sorted(self._servers.values(), key=score)
            if len(self._rankings) >= _MOST_RANKINGS:
                self._rankings.clear()
            self._rankings[content_id] = ranking
        return ranking

    # ---------------------------------------------------------------------------------- outcomes

    def succeeded(self, server: Server) -> None:
        """Take note of an answer."""
        self.has_answered = True
        if self.is_several:
            with self._lock:
                server.failures, server.down_until, server.is_trusted = 0, 0.0, True

    def failed(self, server: Server, error: WarpfitError, started: float) -> None:
        """Take note of a failure that another server may not have.

        A busy server is left alone for as long as it asked for. One that is away, or has not
        answered in time, is left alone for longer and longer, and its address is soon asked for
        again. Attempts that were under way together count as one failure, which is why the start of
        the attempt is needed.
        """
        is_late = isinstance(error, DeadlineExceededError)
        self.has_answered |= not is_late and error.reason not in NOBODY_THERE | TLS_MISTAKES
        if not self.is_several:
            return
        now = self.clock()
        with self._lock:
            pause = error.retry_after or 0.0
            if is_late or isinstance(error, UnavailableError):
                self._resolve_at = min(self._resolve_at, now + _RESOLVE_SECONDS[1])
                server.is_trusted = False
                if started >= server.failed_at:
                    server.failures += 1
                    server.failed_at = now
                first, longest = _PAUSES
                growing = min(longest, first * 2.0 ** min(server.failures - 1, 16))
                pause = max(pause, growing * (0.75 + 0.5 * self._draw()))
            server.down_until = max(server.down_until, now + pause)

    def refused(self, server: Server, content_id: bytes) -> None:
        """Take note that a server has no room for a data set."""
        now = self.clock()
        with self._lock:
            server.refusals = {one: end for one, end in server.refusals.items() if end > now}
            server.refusals[content_id] = now + _REFUSAL_SECONDS


# --------------------------------------------------------------------------------------- repetition

#: Most uploads of a data set for one request, which a server evicts each time before the request
#: comes: some minutes of many callers that share too little memory.
_MOST_UPLOADS: Final = 300
#: Longest pause in seconds before another one; each is random, so that one of the callers that take
#: the memory from each other comes through.
_UPLOAD_PAUSE: Final = 1.0
#: Least seconds before the deadline in which another attempt begins: one that the deadline cuts off
#: would hide what is known of the failure.
_ATTEMPT_SECONDS: Final = 0.01
#: A pause that would last beyond the deadline ends so many seconds before it, for an attempt.
_LAST_SECONDS: Final = 0.1
#: Seconds for which a first request waits where nobody listens, unless the caller says otherwise.
_FIRST_CONTACT_SECONDS: Final = 1.5
#: Errors that another server may not have.
_ELSEWHERE: Final = (
    errors.UnavailableError,
    errors.ResourceExhaustedError,
    errors.DatasetNotFoundError,
)
_log = logging.getLogger("warpfit")


@dataclass(slots=True)
class Retries:
    """Counts the failures of one request at all servers, and decides whether it is repeated."""

    policy: RetryPolicy
    deadline: Deadline
    failures: int = 0
    first_failure: float = 0.0

    def restart(self) -> None:
        """Count from the beginning, because something has been achieved."""
        self.failures = 0

    def pause_after(self, error: errors.WarpfitError, total_seconds: float) -> float:
        """Return the policy's pause, or the time that the server asked for if it is longer.

        Raises:
            WarpfitError: ``error``, once ``total_seconds`` after the first failure have passed, or
                if the server asks for more, or if there is no server as the caller's deadline
                comes.
            DeadlineExceededError: if the caller's deadline comes before the next attempt otherwise.
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
        if remaining is not None:  # attempts follow one another faster and faster before the end
            pause = max(asked, min(pause, max(remaining - _LAST_SECONDS, 0.5 * remaining)))
        if remaining is not None and pause + _ATTEMPT_SECONDS >= remaining:
            if error.reason in NOBODY_THERE:
                raise error
            raise errors.DeadlineExceededError(
                f"no answer within {self.deadline.timeout:g} s; the last of {self.failures} "
                f"attempts failed: {error.message}",
                "DEADLINE_EXCEEDED",
                "Raise timeout=, and look at the server's log",
            )
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
        """Return a copy whose requests ``token`` cancels."""
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
                try:
                    if servers.must_resolve():
                        if any(servers):
                            threading.Thread(target=self._resolve, daemon=True).start()
                        else:
                            servers.update(self.connection.target.find())
                    for address in servers.forgotten():
                        self.transport.forget(address)
                except errors.UnavailableError as unknown:  # no address is known
                    error = unknown
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
                is_refused = dataset is not None and dataset.content_id in server.refusals
                if _is_final(failure) and not is_refused:
                    raise
                is_away = isinstance(failure, errors.UnavailableError)
                if servers.is_several and server.is_trusted and is_away:
                    _log.warning(
                        "%s: %s; calls go to other servers", server.address, failure.message
                    )
                servers.failed(server, failure, started)
                if request.has_gone_on:
                    request.has_gone_on = False
                    retries.restart()
                    tried.clear()
                if tried and error:  # the least of the failures at several servers is waited for
                    failures = (error, failure)
                    error = min(failures, key=lambda e: (_is_final(e), e.retry_after or 0.0))
                else:
                    error = failure
                tried.append(server)
            except errors.DeadlineExceededError as late:
                if error is None:
                    raise
                raise replace(
                    late, message=f"{late.message}; an attempt before failed: {error.message}"
                ) from None
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
            # Something small is asked, because a call to a machine that is gone would wait long.
            left, seconds = request.deadline.remaining(), self.servers.probe_seconds(server)
            seconds = seconds if left is None else min(left, seconds)
            probe = Request("GetServerInfo", codec.info_request(), deadline=Deadline(seconds))
            try:
                self.call_one(server, probe)
            except errors.DeadlineExceededError as error:
                raise errors.UnavailableError(
                    f"{server.address} has not answered within {seconds:g} s",
                    "NO_ANSWER",
                    "Check that the server runs and that the network lets its port pass",
                ) from error
            except errors.UnavailableError:
                raise
            except errors.WarpfitError:
                pass  # the server is there; what it refuses is not what the request is about
        uploads = 0
        try:
            while True:
                try:
                    return self.call_one(server, request)
                except errors.DatasetNotFoundError:
                    if request.dataset is None or uploads >= _MOST_UPLOADS:
                        raise
                if uploads:
                    pause = min(_UPLOAD_PAUSE, 0.01 * 2.0 ** min(uploads, 16)) * _RANDOM.random()
                    left = request.deadline.remaining()
                    if left is not None and left < _ATTEMPT_SECONDS:
                        what = f"no answer within {request.deadline.timeout:g} s"
                        raise errors.DeadlineExceededError(what, "DEADLINE_EXCEEDED")
                    self.sleep(pause if left is None else min(pause, 0.5 * left))
                uploads += 1
                answer = self.upload(server, request)
                retries.restart()
                if request.method == "GetVariables":
                    return answer  # it says what was asked
        except errors.DeadlineExceededError as late:
            if not uploads:
                raise
            message = f"{late.message}; the data set had to be uploaded {uploads} time"
            message += "s" * (uploads > 1)
            remedy = late.remedy
            if uploads > 1:  # others take its memory
                remedy = "Raise timeout=, or start the server with a higher --max-resident-bytes"
            raise replace(late, message=message, remedy=remedy) from None

    def call_one(self, server: Server, request: Request) -> Any:
        """Send a request to one server once; return the result of ``request.read``."""
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
        except _ELSEWHERE as error:
            if request.go_on is not None and (message := request.go_on(error)) is not None:
                request.message, request.has_gone_on = message, True
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

    def _pause(self, retries: Retries, error: errors.WarpfitError) -> float:
        """Return the seconds to wait; raise ``error`` if it cannot help or has taken too long."""
        if (ended := self.connection.target.find_end()) is not None:
            raise ended from error
        is_mistake = error.reason in TLS_MISTAKES and not self.servers.has_answered
        if _is_final(error) or is_mistake:
            raise error
        # Where a server has answered before it is restarting; otherwise the address may be wrong.
        patience = self.connection.retry.total_seconds
        if not self.servers.has_answered:
            if self.connection.wait is not None:
                patience = self.connection.wait
            elif error.reason in NOBODY_THERE:
                patience = min(patience, _FIRST_CONTACT_SECONDS)
        pause = retries.pause_after(error, patience)
        is_away = error.reason in NOBODY_THERE or not self.servers.has_answered
        if is_away and self.servers.must_tell():
            left = retries.deadline.remaining()
            longest = round(patience if left is None else min(patience, left), 1)
            _log.warning("%s; waiting for a server, for up to %g s", error.message, longest)
        return pause

    def _resolve(self) -> None:
        try:
            self.servers.update(self.connection.target.find())
        except Exception:  # whatever a resolver raises; the servers that are known stay
            text = self.connection.target.text
            _log.warning("the addresses of %s cannot be found", text, exc_info=True)


def _is_final(error: errors.WarpfitError) -> bool:
    """Return whether the server would fail again: the call is over a limit, or lacks its data."""
    return error.retry_after is None and not isinstance(error, errors.UnavailableError)
