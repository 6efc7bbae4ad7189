"""The choice of a server for each call, without input or output.

Where a data set lives is decided by rendezvous hashing (Thaler and Ravishankar 1998): each client
ranks the servers by a hash of content id and address, and the first ones are the data set's homes.
So all clients agree without asking, and a server that goes moves its own data sets only.

Among the homes that are up, a call takes one with the fewest calls of this client in flight.
"""

import hashlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from warpfit.errors import DeadlineExceededError, UnavailableError, WarpfitError
from warpfit.transport.forks import RENEWED_IN_CHILD

#: Reasons of errors that say that there is no server, rather than one that is in trouble.
NOBODY_THERE: Final = frozenset(
    {"CONNECTION_REFUSED", "CANNOT_CONNECT", "NAME_NOT_RESOLVED", "NO_SERVERS"}
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
            chosen = self._choose(tried, content_id, nbytes)
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

    def _choose(self, tried: Sequence[Server], content_id: bytes, nbytes: int) -> Server | None:
        now = self.clock()
        homes = self.homes(content_id, nbytes)
        alive = [server for server in homes if server.refusals.get(content_id, 0.0) <= now]
        if not alive and not tried:
            self._forgive(content_id, now)
        up = [server for server in alive if server.down_until <= now and server not in tried]
        if up:
            # First those whose turn it is to be asked whether they are there.
            return min(up, key=lambda one: (one.is_trusted, one.outstanding, self._draw()))
        if not any(server.is_trusted for server in alive):
            # No home is merely busy: the next in rank takes over, and will be sent the data set.
            for server in self._ranked(content_id)[len(homes) :]:
                is_asked = server.down_until <= now and server not in tried
                if is_asked and server.refusals.get(content_id, 0.0) <= now:
                    return server
        return None if tried or not homes else min(homes, key=lambda one: one.down_until)

    def _forgive(self, content_id: bytes, now: float) -> None:
        """Ask all servers again about a data set that all have refused."""
        ranked = self._ranked(content_id)
        if all(server.refusals.get(content_id, 0.0) > now for server in ranked):
            for server in ranked:
                del server.refusals[content_id]

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
        self.has_answered |= not is_late and error.reason not in NOBODY_THERE
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
