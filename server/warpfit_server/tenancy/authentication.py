"""Who calls: bearer tokens, client certificates, and what another door of this server says.

A token file has a line for each token, and no token itself::

    # tenant   SHA-256 of the token, hexadecimal    valid until (UTC, may be left out)
    alice      2bd806c97f0e00af...                  2027-01-31T00:00:00Z

``warpfit token alice --days 90`` makes a token and its line. The file is read again when it
changes, so a token is withdrawn by removing its line. A tenant may have several tokens.
"""

from __future__ import annotations

import hmac
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from warpfit.errors import InvalidArgumentError, UnauthenticatedError
from warpfit.transport.security import TOKEN_METADATA_KEY, check_secret, token_digest
from warpfit_server.system.file_watcher import Watch
from warpfit_server.tenancy.tenants import ANONYMOUS

_LOG: Final = logging.getLogger("warpfit.auth")
#: Metadata entry in which a further door names the tenant of a call that it passes on.
FORWARDED_METADATA_KEY: Final = "warpfit-tenant-bin"
_SCHEME: Final = "bearer "
_NO_MATCH: Final = -1
#: Most bytes of a tenant's name: it stands in every message about its calls, and in the metrics.
_NAME_BYTES: Final = 128


@dataclass(frozen=True, slots=True)
class _Entry:
    tenant: str
    digest: bytes
    until: datetime | None


class TokenFile:
    """The tokens of a file.

    A token that was right before is found by its digest; whatever is new is compared with all
    entries, so that the time which that takes says nothing of how near a wrong one comes.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._watch = Watch([self._path])
        self._lock = threading.Lock()
        self._entries = self._read()
        self._known: dict[bytes, _Entry] = {}

    def tenant(self, token: str) -> str:
        """Return whose token it is.

        Raises:
            UnauthenticatedError: if it is unknown or has expired.

        """
        if self._watch.changed():
            self._read_again()
        known, digest = self._known, token_digest(token)
        entry = known.get(digest)
        if entry is None:
            entry = known[digest] = self._find(digest)
        if entry.until is not None and datetime.now(UTC) >= entry.until:
            raise _refused(f"the token was valid until {entry.until.isoformat()}", "TOKEN_EXPIRED")
        return entry.tenant

    def _find(self, digest: bytes) -> _Entry:
        found = _NO_MATCH
        entries = self._entries
        for index, entry in enumerate(entries):  # all of them, whichever matches
            found = index if hmac.compare_digest(entry.digest, digest) else found
        if found == _NO_MATCH:
            raise _refused("the token is not known to this server", "TOKEN_UNKNOWN")
        return entries[found]

    def _read_again(self) -> None:
        with self._lock:
            try:
                self._entries = self._read()
            except InvalidArgumentError as error:
                _LOG.error("the old tokens stay valid: %s", error)
            else:
                self._known = {}  # after the entries: what a call adds late goes with the old one
                _LOG.info("%d tokens were read again", len(self._entries))

    def _read(self) -> list[_Entry]:
        try:
            check_secret(self._path)
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgumentError(
                f"the token file {self._path} cannot be read: {error}",
                "BAD_TOKEN_FILE",
                "Check path, permissions and encoding",
            ) from error
        words = ((number, line.split("#")[0].split()) for number, line in enumerate(lines, 1))
        return [self._entry(number, line) for number, line in words if line]

    def _entry(self, number: int, words: Sequence[str]) -> _Entry:
        try:
            tenant, digest = words[0], bytes.fromhex(words[1].removeprefix("sha256:"))
            until = datetime.fromisoformat(words[2]) if len(words) > 2 else None
            if len(digest) != 32 or len(words) > 3 or len(tenant.encode()) > _NAME_BYTES:
                raise ValueError
        except (ValueError, IndexError):
            raise InvalidArgumentError(
                f"line {number} of the token file {self._path} is wrong",
                "BAD_TOKEN_FILE",
                "Write TENANT SHA256 [UNTIL]; `warpfit token TENANT` makes such a line",
            ) from None
        if until is not None and until.tzinfo is None:
            until = until.replace(tzinfo=UTC)
        return _Entry(tenant, digest, until)


class Authenticator:
    """Names the tenant of a call.

    Args:
        tokens: asked for a token's tenant; None if callers need no token.
        certificates: whether the port demands client certificates, whose common name is the tenant
            where no token is needed.
        trusts_doors: whether calls over the local socket come from the server's own doors, which
            have done the checking.

    """

    def __init__(
        self, tokens: TokenFile | None, *, certificates: bool, trusts_doors: bool = False
    ) -> None:
        self._tokens = tokens
        self._certificates = certificates
        self._trusts_doors = trusts_doors

    def caller(self, context: Any, metadata: Mapping[str, Any]) -> tuple[str, bool]:
        """Return the tenant of a call, and whether one of the server's doors passes it on.

        Args:
            context: of the call.
            metadata: that came with it, by name.

        Raises:
            UnauthenticatedError: without valid credentials.

        """
        if self._trusts_doors:
            tenant = metadata.get(FORWARDED_METADATA_KEY)
            if tenant is not None and context.peer().startswith("unix:"):
                return tenant.decode(), True
        if self._tokens is not None:
            return self._tokens.tenant(_bearer(metadata)), False
        if self._certificates:
            return _common_name(context), False
        return ANONYMOUS, False


def _bearer(metadata: Mapping[str, Any]) -> str:
    value = metadata.get(TOKEN_METADATA_KEY, "")
    if not value.lower().startswith(_SCHEME):
        raise _refused("the call carries no token", "TOKEN_MISSING")
    return str(value[len(_SCHEME) :].strip())


def _common_name(context: Any) -> str:
    names = context.auth_context().get("x509_common_name", ())
    if not names or not names[0]:
        raise _refused("the client certificate has no common name", "CERTIFICATE_WITHOUT_NAME")
    name = str(names[0].decode("utf-8", errors="backslashreplace"))
    if len(name.encode()) > _NAME_BYTES:
        raise _refused(
            f"the common name of the client certificate has more than {_NAME_BYTES} bytes",
            "CERTIFICATE_NAME_TOO_LONG",
        )
    return name


def _refused(message: str, reason: str) -> UnauthenticatedError:
    return UnauthenticatedError(
        message, reason, "Give a valid token (token=, or WARPFIT_TOKEN) or client certificate"
    )
