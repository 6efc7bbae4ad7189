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
"""

import hashlib
import logging
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from warpfit.errors import InvalidArgumentError, PermissionDeniedError, UnauthenticatedError
from warpfit.server_info import Limits
from warpfit.transport.connection import TOKEN_METADATA_KEY, check_secret, token_digest
from warpfit_server.config import MOST_COUNT, parse_bytes
from warpfit_server.system.file_watcher import WatchedFiles

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
