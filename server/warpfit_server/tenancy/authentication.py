"""Authentication: the tenant of a call, from a bearer token or a client certificate.

A token file has one line for each token, which holds the token's digest only::

    # tenant   SHA-256 of the token, hexadecimal    valid until (UTC, optional)
    alice      2bd806c97f0e00af...                  2027-01-31T00:00:00Z

``warpfit token alice --days 90`` makes a token and its line. The file is read again when it
changes, so a token is withdrawn by removing its line. A tenant may have several tokens.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from warpfit.errors import InvalidArgumentError, UnauthenticatedError
from warpfit.transport.connection import TOKEN_METADATA_KEY, check_secret, token_digest
from warpfit_server.system.file_watcher import WatchedFiles
from warpfit_server.tenancy.tenants import ANONYMOUS

_LOG: Final = logging.getLogger("warpfit.auth")
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
        self._tokens = WatchedFiles([self._path], self._read, _LOG)
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
                digest, token = self._parse(number, words)
                if digest in found:
                    raise self._wrong(f"line {number} of {self._path} has another line's token")
                found[digest] = token
        return found

    def _parse(self, number: int, words: Sequence[str]) -> tuple[bytes, _BearerToken]:
        """Read the words of a line: a token's digest, and whose it is."""
        try:
            tenant, digest = words[0], bytes.fromhex(words[1].removeprefix("sha256:"))
            until = datetime.fromisoformat(words[2]) if len(words) > 2 else None
            if len(digest) != 32 or len(words) > 3 or len(tenant.encode()) > _NAME_BYTES:
                raise ValueError
            if not tenant.isprintable() or digest == token_digest(""):
                raise ValueError
        except (ValueError, IndexError):
            raise self._wrong(f"line {number} of the token file {self._path} is wrong") from None
        if until is not None and until.tzinfo is None:
            until = until.replace(tzinfo=UTC)
        return digest, _BearerToken(tenant, until)

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
            return _common_name(context) if self.certificates else ANONYMOUS
        value = metadata.get(TOKEN_METADATA_KEY, "")
        if not value.lower().startswith(_SCHEME):
            raise _refused("the call carries no token", "TOKEN_MISSING")
        return self.tokens.tenant(str(value[len(_SCHEME) :].strip()))


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
    if not name.isprintable():
        raise _refused(
            "the common name of the client certificate has control characters",
            "CERTIFICATE_NAME_UNPRINTABLE",
        )
    return name


def _refused(message: str, reason: str) -> UnauthenticatedError:
    return UnauthenticatedError(
        message,
        reason,
        "Give a valid token (token=, WARPFIT_TOKEN, --token-file) or client certificate",
    )
