"""Who a client is and how it hides what it says: bearer tokens, TLS, client certificates."""

from __future__ import annotations

import argparse
import hashlib
import ipaddress
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from warpfit.errors import InvalidArgumentError

if TYPE_CHECKING:
    import grpc

#: Metadata entry of the token.
TOKEN_METADATA_KEY: Final = "authorization"
_TOKEN_BYTES: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """How to check the server's certificate, and the client's own. All files are PEM."""

    ca: str | Path | None = None
    """File with the certificates to trust; None for those of the system."""
    certificate: str | Path | None = None
    """File with the client's certificate chain, where the server asks for one."""
    key: str | Path | None = None
    """File with the key of ``certificate``."""
    server_name: str | None = None
    """Name to expect in the server's certificate, where it is not the address."""

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files.

        Raises:
            InvalidArgumentError: if one cannot be read, or of certificate and key one is missing.

        """
        if (self.certificate is None) != (self.key is None):
            raise InvalidArgumentError(
                "of client certificate and key only one is given",
                "INCOMPLETE_CERTIFICATE",
                "Give both files",
                "tls",
            )
        import grpc  # not needed for plain text, nor for the command's help

        return grpc.ssl_channel_credentials(
            root_certificates=_read(self.ca),
            private_key=_read(self.key),
            certificate_chain=_read(self.certificate),
        )


@dataclass(frozen=True, slots=True)
class Security:
    """What every connection of a client uses."""

    token: str | None = None
    tls: TlsConfig | None = None

    @classmethod
    def of(
        cls,
        address: str,
        token: str | None,
        tls: TlsConfig | bool | None,
        environment: Mapping[str, str] = os.environ,
    ) -> Security:
        """Fill in what was not given from the environment; see `warpfit.connect`.

        Raises:
            InvalidArgumentError: if a token would cross a network in plain text.

        """
        if token is None:
            token = environment.get("WARPFIT_TOKEN")
        plain_is_fine = tls is False or is_local(address)
        if tls is None:
            tls = _tls_from(environment)
        elif isinstance(tls, bool):
            tls = TlsConfig() if tls else None
        if token and tls is None and not plain_is_fine:
            raise InvalidArgumentError(
                f"the token would go to {address} in plain text",
                "PLAIN_TOKEN",
                "Give tls=True or a TlsConfig, or tls=False if the network is safe",
                "tls",
            )
        return cls(token.strip() if token else None, tls)

    def channel(self, module: Any, address: str, options: list[Any]) -> Any:
        """Open a channel with ``grpc`` or ``grpc.aio``."""
        if self.tls is None:
            return module.insecure_channel(address, options)
        if self.tls.server_name:
            options = [*options, ("grpc.ssl_target_name_override", self.tls.server_name)]
        return module.secure_channel(address, self.tls.credentials(), options)

    def metadata(self) -> tuple[tuple[str, str], ...] | None:
        """Metadata of every call."""
        return ((TOKEN_METADATA_KEY, f"Bearer {self.token}"),) if self.token else None


def is_local(address: str) -> bool:
    """Tell whether the address ``HOST:PORT`` of a server never leaves this machine."""
    host = address.rpartition(":")[0].rpartition("/")[2]
    return address.startswith("unix:") or is_loopback(host.strip("[]"))


def is_loopback(host: str) -> bool:
    """Tell whether a host name or address is this machine's own."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def new_token(tenant: str, days: float | None = None) -> tuple[str, str]:
    """Make a token.

    Args:
        tenant: whose calls carry it.
        days: how long it is valid; None for ever.

    Returns:
        The token, and the line for the server's token file, which only holds its hash.

    """
    token = secrets.token_urlsafe(_TOKEN_BYTES)
    line = f"{tenant} {token_digest(token).hex()}"
    if days is not None:
        line += f" {datetime.now(UTC) + timedelta(days=days):%Y-%m-%dT%H:%M:%SZ}"
    return token, line


def token_digest(token: str) -> bytes:
    """SHA-256 of a token. Tokens are random, so that no slower hash is needed."""
    return hashlib.sha256(token.encode()).digest()


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a command that connects to a server."""
    group = parser.add_argument_group("connection", "the token is read from WARPFIT_TOKEN")
    group.add_argument("--token-file", metavar="FILE", help="file with the token, instead")
    group.add_argument("--tls", action="store_true", help="use TLS with the system's certificates")
    group.add_argument("--ca", metavar="FILE", help="certificates to trust; switches TLS on")
    group.add_argument("--cert", metavar="FILE", help="client certificate; switches TLS on")
    group.add_argument("--key", metavar="FILE", help="key of --cert")
    group.add_argument("--server-name", metavar="NAME", help="name in the server's certificate")


def from_flags(options: argparse.Namespace) -> dict[str, Any]:
    """Turn the flags into arguments of `warpfit.connect`.

    Raises:
        InvalidArgumentError: if the token's file cannot be read.

    """
    token = _read(options.token_file)
    named = {
        "ca": options.ca,
        "certificate": options.cert,
        "key": options.key,
        "server_name": options.server_name,
    }
    wants_tls = options.tls or any(named.values())
    return {
        "token": token.decode().strip() if token is not None else None,
        "tls": TlsConfig(**named) if wants_tls else None,
    }


def _tls_from(environment: Mapping[str, str]) -> TlsConfig | None:
    named = {
        "ca": environment.get("WARPFIT_CA"),
        "certificate": environment.get("WARPFIT_CLIENT_CERT"),
        "key": environment.get("WARPFIT_CLIENT_KEY"),
        "server_name": environment.get("WARPFIT_SERVER_NAME"),
    }
    wanted = environment.get("WARPFIT_TLS", "").lower() in ("1", "true", "yes", "on")
    return TlsConfig(**named) if wanted or any(named.values()) else None


def _read(path: str | Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgumentError(
            f"cannot read {path}: {error.strerror}", "FILE_UNREADABLE", "Check path and permissions"
        ) from error
