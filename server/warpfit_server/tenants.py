"""Tenants: on whose behalf a call comes, how their data sets are named, what each may use.

A tenants file sets limits, for all tenants or for some::

    [default]
    requests = 16
    rate = 200

    [tenants.alice]
    resident_bytes = "8GiB"
    requests = 32

    [tenants.mallory]
    suspended = true

The keys are the names of `warpfit.server_info.Limits`. The file narrows those that the server's
settings or its memory bound (`BOUNDED`); of the others its number holds. A tenant with a section of
its own has that section's limits, and the default's where it names none. The file is read again
when it changes.

The tenant of a call is found from a bearer token or a client certificate. A token file has one line
for each token, which holds the token's digest only::

    # tenant   SHA-256 of the token, hexadecimal    valid until (UTC, optional)
    alice      2bd806c97f0e00af...                  2027-01-31T00:00:00Z

``warpfit token alice --days 90`` makes a token and its line. The file is read again when it
changes, so a token is withdrawn by removing its line. A tenant may have several tokens.

Quotas count calls, memory and engine time in flight of each tenant, over all front-end processes,
which share one small table. Asking the main process instead would cost a call ten times as
much, and dividing the limits among the processes would be wrong, because a connection stays with
the process that accepted it.

Every tenant has an entry with a column for each process. A process writes only its own column, so
an ordinary lock among its own threads suffices; what is in flight is the sum of the columns. A
process first adds what a call takes, then compares with the limits, and subtracts it again if one
is exceeded: two processes that take the last place in the same microsecond may both refuse it, but
never exceed a limit. Rates have no columns: two processes that count a call in the same microsecond
may count it once. When a process has died, its column is cleared.

The table also has, with a column for each process, the estimated work that each engine has not
finished, by which requests are routed, and for each data set the calls that use it and the moment
of the last use, by which the main process decides what to evict.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import math
import mmap
import os
import stat
import threading
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np

from warpfit.errors import InvalidArgumentError, PermissionDeniedError, UnauthenticatedError
from warpfit.server_info import Limits
from warpfit.transport.connection import TOKEN_METADATA_KEY, check_secret, token_digest
from warpfit_server.config import MOST_COUNT, parse_bytes

_LOG: Final = logging.getLogger("warpfit.tenants")
#: Tenant of all calls where the server asks for no credentials.
ANONYMOUS: Final = "default"
#: Tenant of the health probe; no caller's tenant has this name.
PROBE: Final = ""
#: Share of what the others leave of the server's places and bytes in flight that one of several
#: tenants may take, and its share of the bytes of resident data sets.
_SHARE, _RESIDENT_SHARE = 0.5, 0.75
#: Tenants without a section whose limits are remembered, and keys of data sets.
_MOST_REMEMBERED: Final = 1000
_NAMES: Final = frozenset(limit.name for limit in fields(Limits))
#: Limits of the whole server, which no tenant's may exceed.
BOUNDED: Final = frozenset(
    ("message_bytes", "dataset_bytes", "resident_bytes", "result_bytes", "requests", "searches")
)


@lru_cache(_MOST_REMEMBERED)
def key_of(tenant: str, content_id: bytes) -> bytes:
    """Return the key of a tenant's data set in this server.

    Two tenants with the same content have two data sets, so that neither an answer nor its time
    tells one whether the other has it.
    """
    name = tenant.encode()
    return hashlib.sha256(len(name).to_bytes(8, "little") + name + content_id).digest()


@dataclass(frozen=True, slots=True)
class _Section:
    """Limits of one section of the tenants file."""

    limits: Mapping[str, float] = field(default_factory=dict)
    suspended: bool = False


@dataclass(frozen=True, slots=True)
class _Sections:
    """Content of the tenants file."""

    default: _Section = field(default_factory=_Section)
    tenants: Mapping[str, _Section] = field(default_factory=dict)
    computed: dict[str, Limits] = field(default_factory=dict)
    """Limits of tenants that were asked for."""


class TenantLimits:
    """The limits of each tenant: by the tenants file, if there is one, within those of the server.

    If the server is ``shared`` by several tenants, none of them may take all places.
    """

    def __init__(self, server: Limits, path: str | Path | None, *, shared: bool) -> None:
        self.server = server
        self.is_shared = shared
        """Whether there may be several tenants."""
        self.share = _SHARE if shared else 1.0
        """Share that a tenant may take of what all others leave."""
        file = [Path(path)] if path else []
        self._sections = WatchedFiles(file, lambda: _read(file[0]) if file else _Sections(), _LOG)

    def limits(self, tenant: str) -> Limits:
        """Return a tenant's limits.

        Raises:
            PermissionDeniedError: if the tenant is suspended.
        """
        sections = self._sections.get()
        computed = sections.computed
        limits = computed.get(tenant)
        if limits is None:
            if len(computed) > len(sections.tenants) + _MOST_REMEMBERED:
                computed.clear()
            section = sections.tenants.get(tenant, sections.default)
            if section.suspended:
                raise PermissionDeniedError(
                    f"tenant {tenant} is suspended", "TENANT_SUSPENDED", "Ask the server's operator"
                )
            shared = {"requests": max(1, int(self.share * self.server.requests))}
            shared["searches"] = math.ceil(self.share * self.server.searches)
            part = _RESIDENT_SHARE if self.is_shared else 1.0
            resident = int(part * self.server.resident_bytes)
            own: dict[str, Any] = {**shared, "resident_bytes": resident}
            for name, value in {**sections.default.limits, **section.limits}.items():
                most = shared.get(name, getattr(self.server, name))
                own[name] = min(value, most) if name in BOUNDED else value
            limits = computed[tenant] = replace(self.server, **own)
        return limits


def _read(path: Path) -> _Sections:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        default = _section(content.pop("default", {}))
        tables = content.pop("tenants", {})
        if not isinstance(tables, dict):
            raise ValueError("tenants is no section")
        tenants = {name: _section(table) for name, table in tables.items()}
        if content:
            raise ValueError(f"unknown section {next(iter(content))}")
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(
            f"the tenants file {path} cannot be used: {error}",
            "BAD_TENANTS_FILE",
            "Write [default] and [tenants.NAME] with names of the server's limits",
        ) from error
    return _Sections(default, tenants)


def _section(table: Any) -> _Section:
    if not isinstance(table, dict):
        raise ValueError(f"{table!r} is no section")
    suspended = table.pop("suspended", False)
    if not isinstance(suspended, bool):
        raise ValueError("suspended is neither true nor false")
    limits: dict[str, float] = {}
    for name, value in table.items():
        if name not in _NAMES:
            raise ValueError(f"{name} is no limit; there are {', '.join(sorted(_NAMES))}")
        number = parse_bytes(value) if isinstance(value, str) else value
        kinds = int | float if name == "rate" else int
        is_number = isinstance(number, kinds) and not isinstance(number, bool)
        if not (is_number and 0 <= number <= MOST_COUNT):
            wanted = "a number" if name == "rate" else "a whole number"
            raise ValueError(f"{name} is {value!r}, not {wanted} from 0 to {MOST_COUNT}")
        limits[name] = number
    return _Section(limits, suspended)


# ---------------------------------------------------------- files that are replaced while it runs

T = TypeVar("T")
#: Seconds without a change after which a file is complete.
_SETTLE_SECONDS: Final = 0.5


class WatchedFiles(Generic[T]):
    """A value that is read again when one of its files has changed.

    Files that cannot be used leave the old value in force, and a log line says why. They are read
    again at each look until they can be used, because not all that matters is a property of the
    files themselves: a folder above them may be closed, or a disk full. A file that has changed a
    moment ago may be half of one that is being written, so that it is read a moment later.

    Args:
        paths: the files; symbolic links are followed, because mounted secrets are such links.
        read: reads the value; raises InvalidArgumentError if the files cannot be used.
        log: where changes are logged.
        seconds: shortest time between two looks at the files.

    Raises:
        InvalidArgumentError: if one of them is a pipe or the like, or as ``read``.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        read: Callable[[], T],
        log: logging.Logger,
        seconds: float = 1.0,
    ) -> None:
        self._paths = paths
        self._read_files = read
        self._log = log
        self._seconds = seconds
        self._next = time.monotonic() + seconds
        self._lock = threading.Lock()
        self._stamps = self._stamp_files()
        self._failed = ""
        """Why the files could not be used when they were read last; "" if they could."""
        self._value = self._read()

    def get(self) -> T:
        """Return the value, a new object after a change; cheap when nothing has changed."""
        if time.monotonic() >= self._next:
            with self._lock:
                stamps = self._stamp_files()
                is_same = stamps == self._stamps
                # A file that has changed in the last moment may not be whole. A clock that was set
                # back counts as a change long ago.
                wall, moment = time.time_ns(), _SETTLE_SECONDS * 1e9
                is_new = any(stamp and 0 <= wall - stamp[0] < moment for stamp in stamps)
                is_settled = is_same or not is_new
                pause = self._seconds if is_settled else min(self._seconds, _SETTLE_SECONDS)
                self._next = time.monotonic() + pause
                if not is_settled or (is_same and not self._failed):
                    return self._value
                names = ", ".join(map(str, self._paths))
                try:
                    value = self._read()
                    if self._stamp_files() != stamps:  # while it was read
                        return self._value
                    self._stamps, self._value = stamps, value
                except InvalidArgumentError as error:
                    self._stamps = stamps
                    if str(error) != self._failed:
                        text = "%s changed, the old version stays in force: %s"
                        self._log.error(text, names, error)
                    self._failed = str(error)
                else:
                    self._failed = ""
                    self._log.info("%s changed and was read again", names)
        return self._value

    def _read(self) -> T:
        """Read the value, but of no pipe, for whose other end all calls would wait."""
        for path in self._paths:
            with suppress(OSError):  # `read` says what is wrong
                if not stat.S_ISREG(path.stat().st_mode):
                    raise InvalidArgumentError(
                        f"{path} is not a regular file",
                        "NO_REGULAR_FILE",
                        "Give the path of a file, which is read again when it changes",
                    )
        return self._read_files()

    def _stamp_files(self) -> list[tuple[int, ...]]:
        """Return a stamp of each file, which is other after every change; () of a missing one.

        The time of change (ctime) follows every change, of mode and owner, too. The time of
        modification can be set by all who may write.
        """
        stamps: list[tuple[int, ...]] = []
        for path in self._paths:
            try:
                found = path.stat()
            except OSError:  # between one version and the next, or gone
                stamps.append(())
                continue
            times = found.st_ctime_ns, found.st_mtime_ns
            place = found.st_dev, found.st_ino, found.st_size, found.st_mode
            stamps.append((*times, *place))
        return stamps


# ---------------------------------------------------------------------------------------- who calls

_AUTHENTICATION_LOG: Final = logging.getLogger("warpfit.auth")
_SCHEME: Final = "bearer "
#: Most bytes of a tenant's name: it stands in every message about its calls, and in the metrics.
_NAME_BYTES: Final = 128


@dataclass(frozen=True, slots=True)
class _BearerToken:
    tenant: str
    until: datetime | None


class TokenFile:
    """The tokens of a file.

    They are found by their SHA-256, so the time of a look-up tells nothing about a token.

    Raises:
        InvalidArgumentError: if the file cannot be used, or has no token.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._tokens = WatchedFiles([self._path], self._read, _AUTHENTICATION_LOG)
        if not self._tokens.get():  # later it withdraws all tokens
            raise self._wrong(f"the token file {self._path} has no token")

    def tenant(self, token: str) -> str:
        """Return the tenant to whom a token belongs.

        Raises:
            UnauthenticatedError: if it is unknown or has expired.
        """
        found = self._tokens.get().get(token_digest(token))
        if found is None:
            raise _refused("the token is not known to this server", "TOKEN_UNKNOWN")
        if found.until is not None and datetime.now(UTC) >= found.until:
            raise _refused(f"the token was valid until {found.until.isoformat()}", "TOKEN_EXPIRED")
        return found.tenant

    def _read(self) -> dict[bytes, _BearerToken]:
        try:
            check_secret(self._path)
            lines = self._path.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgumentError(
                f"the token file {self._path} cannot be read: {error}",
                "BAD_TOKEN_FILE",
                "Check path, permissions and encoding",
            ) from error
        found: dict[bytes, _BearerToken] = {}
        for number, line in enumerate(lines, 1):
            if words := line.split("#")[0].split():
                try:
                    tenant, digest = words[0], bytes.fromhex(words[1].removeprefix("sha256:"))
                    until = datetime.fromisoformat(words[2]) if len(words) > 2 else None
                    if len(digest) != 32 or len(words) > 3 or len(tenant.encode()) > _NAME_BYTES:
                        raise ValueError
                    if not tenant.isprintable() or digest == token_digest(""):
                        raise ValueError
                except (ValueError, IndexError):
                    place = f"line {number} of the token file {self._path}"
                    raise self._wrong(f"{place} is wrong") from None
                if until is not None and until.tzinfo is None:
                    until = until.replace(tzinfo=UTC)
                if digest in found:
                    raise self._wrong(f"line {number} of {self._path} has another line's token")
                found[digest] = _BearerToken(tenant, until)
        return found

    @staticmethod
    def _wrong(problem: str) -> InvalidArgumentError:
        return InvalidArgumentError(
            problem,
            "BAD_TOKEN_FILE",
            "Write TENANT SHA256 [UNTIL]; `warpfit token TENANT` makes such a line",
        )


@dataclass(frozen=True, slots=True)
class Authenticator:
    """Finds the tenant of a call."""

    tokens: TokenFile | None
    """The known tokens; None if callers need no token."""
    certificates: bool
    """Whether the port demands client certificates, whose common name is the tenant where no token
    is needed."""

    def authenticate(self, context: Any, metadata: Mapping[str, Any]) -> str:
        """Return the tenant of a call with these metadata.

        Raises:
            UnauthenticatedError: without valid credentials.
        """
        if self.tokens is None:
            if not self.certificates:
                return ANONYMOUS
            names = context.auth_context().get("x509_common_name", ())
            if not names or not names[0]:
                raise _refused(
                    "the client certificate has no common name", "CERTIFICATE_WITHOUT_NAME"
                )
            name = str(names[0].decode("utf-8", errors="backslashreplace"))
            if len(name.encode()) > _NAME_BYTES:
                raise _refused(
                    f"the common name of the client certificate has more than {_NAME_BYTES} bytes",
                    "CERTIFICATE_NAME_TOO_LONG",
                )
            if not name.isprintable():
                raise _refused(
                    "the common name of the client certificate has control characters",
                    "CERTIFICATE_NAME_UNPRINTABLE",
                )
            return name
        value = metadata.get(TOKEN_METADATA_KEY, "")
        if not value.lower().startswith(_SCHEME):
            raise _refused("the call carries no token", "TOKEN_MISSING")
        return self.tokens.tenant(str(value[len(_SCHEME) :].strip()))


def _refused(message: str, reason: str) -> UnauthenticatedError:
    return UnauthenticatedError(
        message,
        reason,
        "Give a valid token (token=, WARPFIT_TOKEN, --token-file) or client certificate",
    )


# ------------------------------------------------------------------------------------------- quotas

#: Tenants that have an entry of their own; any more share these.
_ENTRIES: Final = 2048
#: Data sets that the table has room for.
DATASET_SLOTS: Final = 4096
_WORD: Final = 8
#: Words of an entry: key, two moments (`QuotaTable.count_call`, `QuotaTable.retry_delay`), then the
#: columns: the calls of each process, then its bytes, its engine time and its searches.
_KEY, _RATE_UNTIL, _RETRY_AT, _COLUMNS = 0, 1, 2, 3
#: Refused calls are asked back within this many seconds after the first of them.
_RETRY_SPREAD: Final = 1.0
#: Quantities of which a call alone may have more than the limit: bytes and engine time.
_OF_ONE_CALL: Final = (1, 2)
#: Offset of the entry with the totals of all tenants.
_SERVER: Final = 0


class Amounts(NamedTuple):
    """Amounts of each quantity that is counted."""

    calls: int = 0
    nbytes: int = 0
    """Bytes of messages that arrive, and of batches and answers."""
    engine_ns: int = 0
    """Estimated time of the engine, in nanoseconds."""
    searches: int = 0
    """Searches, each of which is one of the calls, too."""


class Exceeded(NamedTuple):
    """A limit that a call would exceed."""

    quantity: str
    """Name of the field of `Amounts`."""
    of_tenant: bool
    """Whether it is the tenant's limit, not the server's."""
    used: int
    limit: int


class DatasetUses(NamedTuple):
    """Which calls use the data sets, by the slots of these."""

    calls: list[int]
    """Calls that use it now."""
    moments: list[float]
    """When one has begun or ended last, on the clock of ``time.monotonic()``, which all processes
    of a machine share."""


class QuotaTable:
    """One process's access to the table; the processes that share it have numbers from 0."""

    def __init__(self, descriptor: int, processes: int, process: int, engines: int = 1) -> None:
        self.descriptor = descriptor
        """Descriptor of the shared memory, which this object owns, to pass to other processes."""
        self._processes = processes
        self._process = process
        self._columns = tuple(_COLUMNS + processes * i for i in range(len(Amounts._fields)))
        self._own_columns = tuple(column + process for column in self._columns)
        self._entry_words = _COLUMNS + len(Amounts._fields) * processes
        self._map = mmap.mmap(descriptor, _table_bytes(processes, engines))
        end = (_ENTRIES + 1) * self._entry_words
        self._work = [end + processes * engine for engine in range(engines)]
        self._uses = end + processes * engines
        self._used_at = self._uses + processes * DATASET_SLOTS
        self._words = memoryview(self._map).cast("q")
        self._numbers = memoryview(self._map).cast("d")
        self._lock = threading.Lock()
        self._offsets: dict[str, int] = {}

    @classmethod
    def create(cls, processes: int, engines: int = 1) -> QuotaTable:
        """Make an empty table and return the access of process 0, or of one that only reads."""
        descriptor = os.memfd_create("warpfit-quotas", os.MFD_CLOEXEC)
        os.truncate(descriptor, _table_bytes(processes, engines))
        return cls(descriptor, processes, 0, engines)

    def acquire(
        self,
        tenant: str,
        amount: Sequence[int],
        own: Sequence[int],
        server: Sequence[int],
        *,
        share: float = 1.0,
        held: int = 0,
    ) -> Exceeded | None:
        """Add an amount unless a limit would be exceeded; return that limit, or None.

        The amounts are `Amounts`, or plain tuples, which are made in half the time; what these
        leave out is 0.

        A tenant may have its ``share`` of what the other tenants leave, and one call in any case:
        so none gets all, and the more tenants want much, the less each of them gets (dynamic
        thresholds: Choudhury and Hahne, IEEE/ACM Transactions on Networking 6(2), 1998).

        A call may exceed the limits of bytes and engine time if it is alone in flight, and for it
        only the ``held`` bytes are counted already.
        """
        words, processes = self._words, self._processes
        offset = self._offsets.get(tenant) or self._offset(tenant)
        alone = [*amount]
        alone[1] += held
        with self._lock:
            self._add(offset, amount, 1)
            for index, more in enumerate(amount):
                if more <= 0:
                    continue
                column = self._columns[index]
                used = sum(words[column : column + processes])
                mine = sum(words[offset + column : offset + column + processes])
                most, of_tenant = server[index], own[index]
                may_exceed = alone[index] if index in _OF_ONE_CALL else 0  # a call alone
                is_own = mine > of_tenant and mine > may_exceed
                is_unfair = mine > share * (most - used + mine) and mine > alone[index]
                if is_own or is_unfair or (used > most and used > may_exceed):
                    self._add(offset, amount, -1)
                    before, limit = (mine, of_tenant) if is_own else (used, most)
                    return Exceeded(Amounts._fields[index], is_own, before - more, limit)
        return None

    def release(self, tenant: str, amount: Sequence[int]) -> None:
        """Subtract what `acquire` has added."""
        offset = self._offset(tenant)
        with self._lock:
            self._add(offset, amount, -1)

    def _add(self, offset: int, amount: Sequence[int], sign: int) -> None:
        words = self._words
        for more, column in zip(amount, self._own_columns, strict=False):
            if more:
                words[_SERVER + column] += sign * more
                words[offset + column] += sign * more

    def _sum(self, start: int) -> int:
        return sum(self._words[start : start + self._processes])

    def count_call(self, tenant: str, now: float, rate: float) -> float:
        """Count a call against a rate; return 0, or the seconds after which it may come again.

        An entry remembers the moment until which its calls have used its rate up; a call is allowed
        while that is less than a second ahead (the generic cell rate algorithm of ITU-T I.371).
        Refused calls are asked back one after the other, as the rate allows. It is a number of
        calls a second; ``now`` is ``time.monotonic()``, which all processes of a machine share.
        """
        offset, numbers = self._offset(tenant), self._numbers
        with self._lock:
            until = max(numbers[offset + _RATE_UNTIL], now) + 1 / rate
            delay = until - now - max(1.0, 1.0 / rate) - 1e-9
            if delay > 0:
                return self._retry_delay(offset, now, delay, 1 / rate)
            numbers[offset + _RATE_UNTIL] = until
        return 0.0

    def retry_delay(self, now: float, first: float, step: float) -> float:
        """Return how many seconds a refused call should wait, so that not all come at once.

        The ``first`` of them waits so long, each further one a ``step`` more than the one before;
        after a second it begins anew.
        """
        with self._lock:
            return self._retry_delay(_SERVER, now, first, step)

    def _retry_delay(self, offset: int, now: float, first: float, step: float) -> float:
        at = offset + _RETRY_AT
        earliest = now + first
        moment = max(earliest, self._numbers[at] + step)
        if moment > earliest + _RETRY_SPREAD:
            moment = earliest
        self._numbers[at] = moment
        return moment - now

    def calls_in_flight(self) -> int:
        """Return the calls in flight of all tenants."""
        return self._sum(_SERVER + self._columns[0])

    def in_flight(self, tenant: str | None = None) -> Amounts:
        """Return the amounts in flight of a tenant, or of the whole server."""
        offset = _SERVER if tenant is None else self._offset(tenant)
        return Amounts(*(self._sum(offset + column) for column in self._columns))

    def add_work(self, engine: int, nanoseconds: int) -> None:
        """Add to the work that an engine has not finished, or subtract from it."""
        with self._lock:
            self._words[self._work[engine] + self._process] += nanoseconds

    def work(self) -> list[int]:
        """Return the estimated nanoseconds of work that each engine has not finished."""
        return [self._sum(start) for start in self._work]

    def use_dataset(self, slot: int, change: int) -> None:
        """Count one more call (1) or one less (-1) that uses the data set of a slot, at this time.

        A front end may still hold the slot of a data set that is gone. Another data set that has it
        then is kept a little longer, which does no harm.
        """
        at = self._processes * slot + self._process
        with self._lock:
            self._words[self._uses + at] += change
            self._numbers[self._used_at + at] = time.monotonic()

    def dataset_uses(self) -> DatasetUses:
        """Return the uses of all data sets at this moment."""
        shape, count = (DATASET_SLOTS, self._processes), DATASET_SLOTS * self._processes
        uses, used_at = self._uses * _WORD, self._used_at * _WORD
        calls = np.frombuffer(self._map, np.int64, count, uses).reshape(shape)
        moments = np.frombuffer(self._map, np.float64, count, used_at).reshape(shape)
        return DatasetUses(calls.sum(axis=1).tolist(), moments.max(axis=1).tolist())

    def clear_process(self, process: int) -> None:
        """Subtract all that a process had in flight which has ended."""
        for slot in range(DATASET_SLOTS):
            self._words[self._uses + self._processes * slot + process] = 0
        for offset in range(0, (_ENTRIES + 1) * self._entry_words, self._entry_words):
            for column in self._columns:
                if self._words[offset + column + process]:
                    self._words[offset + column + process] = 0
        for start in self._work:
            self._words[start + process] = 0

    def close(self) -> None:
        """Unmap the memory; no thread may use the table any more."""
        self._words.release()
        self._numbers.release()
        self._map.close()
        os.close(self.descriptor)

    def _offset(self, tenant: str) -> int:
        """Return where a tenant's entry begins, making one if there is none; it never moves."""
        offset = self._offsets.get(tenant)
        if offset is None:
            # Its own entry, else a free one, else one that is shared; linear probing.
            digest = hashlib.sha256(tenant.encode()).digest()
            key = int.from_bytes(digest[:7], "little") | 1  # never 0, the key of a free entry
            with self._lock:
                fcntl.lockf(self.descriptor, fcntl.LOCK_EX)  # excludes the other processes
                try:
                    for step in range(_ENTRIES):
                        offset = (1 + (key + step) % _ENTRIES) * self._entry_words
                        if self._words[offset + _KEY] in (key, 0):
                            self._words[offset + _KEY] = key
                            break
                    else:
                        offset = (1 + key % _ENTRIES) * self._entry_words
                finally:
                    fcntl.lockf(self.descriptor, fcntl.LOCK_UN)
            self._offsets[tenant] = offset
            if len(self._offsets) > _ENTRIES:
                self._offsets.clear()
        return offset


def _table_bytes(processes: int, engines: int) -> int:
    entries = (_ENTRIES + 1) * (_COLUMNS + len(Amounts._fields) * processes)
    return _WORD * (entries + processes * (engines + 2 * DATASET_SLOTS))
