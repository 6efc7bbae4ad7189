"""Authentication and encryption of a client: bearer tokens, TLS, client certificates."""

from __future__ import annotations

import argparse
import hashlib
import ipaddress
import os
import re
import secrets
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from warpfit.errors import InvalidArgumentError, bad_setting
from warpfit.transport.addresses import Target

if TYPE_CHECKING:
    import grpc

#: Name of the metadata entry with the token.
TOKEN_METADATA_KEY: Final = "authorization"
_TOKEN_BYTES: Final = 32
_MOST_DAYS: Final = 36_500
_TOKEN: Final = re.compile("[!-~]+")
#: Permissions that a file with a secret must not give.
_OPEN_TO_OTHERS: Final = stat.S_IRWXO | stat.S_IWGRP
#: Names of tenants, which appear in token files, certificates, metrics and logs.
_TENANT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,62}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """TLS settings: certificates to trust, and the client's own. All files are PEM."""

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
            InvalidArgumentError: if a file cannot be read, if other users can read the key, or if
                only one of certificate and key is given.
        """
        if (self.certificate is None) != (self.key is None):
            raise InvalidArgumentError(
                "only one of client certificate and key is given",
                "INCOMPLETE_CERTIFICATE",
                "Give both files",
                "tls",
            )
        import grpc  # loaded late, because the command line imports this module for its help

        return grpc.ssl_channel_credentials(
            root_certificates=_read(self.ca),
            private_key=_read(self.key, secret=True),
            certificate_chain=_read(self.certificate),
        )


@dataclass(frozen=True, slots=True)
class Security:
    """Credentials of a connection; without TLS it is in plain text."""

    token: str | None = field(default=None, repr=False)
    tls: TlsConfig | None = None

    @classmethod
    def of(
        cls,
        target: Target,
        token: str | None,
        tls: TlsConfig | bool | None,
        environment: Mapping[str, str] = os.environ,
    ) -> Security:
        """Take what is None from the environment; see `warpfit.connect`."""
        if token is None:
            token = environment.get("WARPFIT_TOKEN")
        if token and not (isinstance(token, str) and _TOKEN.fullmatch(token.strip())):
            raise InvalidArgumentError(
                "the token is no text of visible ASCII characters",
                "BAD_TOKEN",
                "Give what `warpfit token` has printed",
                "token",
            )
        if not isinstance(tls, TlsConfig | bool | None):
            raise bad_setting("tls", tls, "True, False or a warpfit.TlsConfig")
        plain_is_fine = tls is False or all(map(is_local, target.addresses or [target.text]))
        if tls is None:
            tls = _tls_from(environment)
        elif isinstance(tls, bool):
            tls = TlsConfig() if tls else None
        if token and tls is None and not plain_is_fine:
            raise InvalidArgumentError(
                f"the token would go to {target.text} in plain text",
                "PLAIN_TOKEN",
                "Give tls=True or a TlsConfig, or tls=False if the network is safe",
                "tls",
            )
        if tls is not None and tls.server_name is None:
            tls = replace(tls, server_name=target.server_name)
        return cls(token.strip() if token else None, tls)

    def channel(self, address: str, options: list[Any], proxy: str | None = None) -> grpc.Channel:
        """Open a channel to a server; ``proxy`` is not used for one on this machine."""
        import grpc  # loaded late, because the command line imports this module for its help

        # gRPC would take the proxy of the environment, which is meant for the Web.
        if proxy is None or is_local(address):
            options = [*options, ("grpc.enable_http_proxy", 0)]
        else:
            options = [*options, ("grpc.http_proxy", proxy)]
        if self.tls is None:
            return grpc.insecure_channel(address, options)
        if self.tls.server_name:
            options = [*options, ("grpc.ssl_target_name_override", self.tls.server_name)]
        return grpc.secure_channel(address, self.tls.credentials(), options)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of every call."""
        return ((TOKEN_METADATA_KEY, f"Bearer {self.token}"),) if self.token else ()


def is_local(address: str) -> bool:
    """Return whether an address, or ``dns:///HOST:PORT``, is on this machine."""
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    host = address.removeprefix("dns://").removeprefix("/").rpartition(":")[0]
    return is_loopback(host.removeprefix("ipv4:").removeprefix("ipv6:").strip("[]"))


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is a loopback address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def new_token(tenant: str, days: float | None = None) -> tuple[str, str]:
    """Make a token.

    Args:
        tenant: name of the tenant.
        days: days for which the token is valid; None for ever.

    Returns:
        The token, and the line for the server's token file, which contains its hash alone.

    Raises:
        InvalidArgumentError: for an invalid name of a tenant or an invalid number of days.
    """
    if _TENANT.fullmatch(tenant) is None:
        raise InvalidArgumentError(
            f"{tenant[:80]!r} is no name of a tenant",
            "BAD_TENANT",
            "Use up to 63 letters, digits, '.', '_', '@' and '-', a letter or digit first",
            "tenant",
        )
    if days is not None and not 0 < days <= _MOST_DAYS:
        raise InvalidArgumentError(
            f"a token cannot be valid for {days:g} days",
            "BAD_DAYS",
            f"Give days above 0, up to {_MOST_DAYS}, or none for a token without an end",
            "days",
        )
    token = secrets.token_urlsafe(_TOKEN_BYTES)
    line = f"{tenant} {token_digest(token).hex()}"
    if days is not None:
        line += f" {datetime.now(UTC) + timedelta(days=days):%Y-%m-%dT%H:%M:%SZ}"
    return token, line


def token_digest(token: str) -> bytes:
    """Return the SHA-256 of a token; tokens are random and need no slower hash."""
    return hashlib.sha256(token.encode()).digest()


def check_secret(path: str | Path) -> None:
    """Check that other users of this machine cannot read a file with a key or tokens.

    Its group may read it, because Kubernetes and systemd give secrets that way to a service that
    runs as another user than their owner.

    Raises:
        InvalidArgumentError: if others can read it, or others or its group can write to it.
        OSError: if there is no such file.
    """
    status = Path(path).stat()
    if stat.S_ISREG(status.st_mode) and status.st_mode & _OPEN_TO_OTHERS:
        raise InvalidArgumentError(
            f"other users can read or change {path} (mode {stat.S_IMODE(status.st_mode):o}), which "
            "must be kept secret",
            "FILE_NOT_SECRET",
            f"chmod 600 {path}, or 640 for a service that reads it as its group",
        )


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
    """Turn the flags into arguments of `warpfit.connect`."""
    token = _read(options.token_file, secret=True)
    names = (options.ca, options.cert, options.key, options.server_name)
    return {
        "token": token.decode().strip() if token is not None else None,
        "tls": _tls_of(names, wanted=options.tls),
    }


def _tls_from(environment: Mapping[str, str]) -> TlsConfig | None:
    variables = ("CA", "CLIENT_CERT", "CLIENT_KEY", "SERVER_NAME")
    wanted = environment.get("WARPFIT_TLS", "").lower() in ("1", "true", "yes", "on")
    return _tls_of([environment.get(f"WARPFIT_{name}") for name in variables], wanted=wanted)


def _tls_of(names: Sequence[str | None], *, wanted: bool) -> TlsConfig | None:
    """Return the settings with CA, certificate, key and name; None if TLS is not asked for."""
    ca, certificate, key, server_name = names
    if not (wanted or any(names)):
        return None
    return TlsConfig(ca=ca, certificate=certificate, key=key, server_name=server_name)


def _read(path: str | Path | None, *, secret: bool = False) -> bytes | None:
    if path is None:
        return None
    try:
        if secret:
            check_secret(path)
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgumentError(
            f"cannot read {path}: {error.strerror}", "FILE_UNREADABLE", "Check path and permissions"
        ) from error
