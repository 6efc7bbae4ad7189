"""What `warpfit.connect` takes: settings, addresses, tokens, TLS; and their sum, a `Connection`.

Servers use the tokens, too. gRPC is not loaded before a channel is opened.

An environment variable whose name begins with WARPFIT_ and is none of those here is a mistake. It
would be left out in silence, and a server would run without its tokens or limits. So a server
refuses to start with one, and a client warns.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import glob
import hashlib
import ipaddress
import math
import os
import re
import secrets
import socket
import stat
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from importlib import import_module
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias, TypeVar

from warpfit.errors import InvalidArgumentError, UnavailableError, bad_setting

if TYPE_CHECKING:
    import grpc


# ----------------------------------------------------------------------------------------- settings

#: gRPC's event engine keeps a thread for each core and wakes one of them at every step of a call.
#: On 16 cores a small call takes 0.4 to 0.8 ms with it, and 0.2 ms with the older poller, where the
#: waiting thread does the work itself (measured with grpcio 1.85.1). Servers have the event engine:
#: in the older poller one connection that sends frames without a pause, which takes no credentials,
#: kept the thread that serves all others for as long as it liked.
_EXPERIMENTS: Final = "-event_engine_client"

#: Form of a proxy's address; gRPC reaches servers by the method CONNECT of HTTP.
_PROXY: Final = re.compile(r"http://(?:[^\s/@]+@)?[^\s/@]+:\d+/?")

#: Between calls nobody waits in the older poller, so that a connection that is being made only
#: progresses when gRPC polls by itself: every 5,000 ms by default. After a restart of the server
#: clients were cut off for 3 to 18 s; with this interval it is 0.1 to 0.9 s.
_POLL_MILLISECONDS: Final = "100"


def configure_grpc() -> None:
    """Choose gRPC's poller, its interval, its care for forks and its silence by the environment.

    What gRPC would print, such as a line for each failed handshake, errors of calls say.

    gRPC reads them on import. Variables that are set already stay, and so does everything if gRPC
    is imported already.
    """
    if "grpc" not in sys.modules:
        os.environ.setdefault("GRPC_EXPERIMENTS", _EXPERIMENTS)
        os.environ.setdefault("GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS", _POLL_MILLISECONDS)
        os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "1")
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Rules for repeating calls that the server could not take; all calls are idempotent.

    A call is repeated if it failed with UNAVAILABLE, or with RESOURCE_EXHAUSTED and a time to wait.
    That time is then the shortest pause.
    """

    total_seconds: float = 20.0
    """Give up this long after a call failed for the first time; 0 never repeats. An engine that
    restarts is back within a few seconds. A first call where nobody listens gives up earlier; see
    ``wait`` of `warpfit.connect`."""
    initial_backoff: float = 0.05
    """Seconds before the first repetition."""
    maximum_backoff: float = 1.0
    """Upper bound of the growing pauses, in seconds."""
    multiplier: float = 2.0
    """Factor by which each pause is longer than the one before."""
    jitter: float = 0.5
    """Share of each pause that is random, so that many workers do not return all at once."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        _check_numbers(self, 0.0)

    def pause(self, failures: int, random: float) -> float:
        """Return the seconds to wait after failed attempts; ``random`` is from [0, 1)."""
        growth = self.multiplier ** min(failures - 1, 64)
        full = min(self.initial_backoff * growth, self.maximum_backoff)
        return full * (1.0 - self.jitter * random)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportConfig:
    """Settings of the gRPC channel. Nothing is compressed, because numbers hardly compress."""

    chunk_bytes: int = 1 << 20
    """Size of the pieces in which a data set is uploaded."""
    message_bytes: int = 128 << 20
    """Largest message to send or to accept; a larger matrix always comes in pieces."""
    keepalive_seconds: float | None = None
    """Time between keepalive pings while a call is in flight; None for 30 with one server, for 1
    with several, where another one can take over the calls of one that hangs."""
    keepalive_timeout_seconds: float | None = None
    """A connection is closed when a ping stays unanswered this long; None for 10 with one server,
    and for 2 with several."""
    reconnect_seconds: tuple[float, float] = (0.1, 1.0)
    """First and longest pause between attempts to connect again."""
    connect_seconds: float = 5.0
    """Shortest time limit of one attempt to connect; a busy machine needs some time to answer."""
    proxy: str | None = field(
        default_factory=lambda: os.environ.get("WARPFIT_PROXY") or None, repr=False
    )
    """HTTP proxy ``http://[USER:PASSWORD@]HOST:PORT`` through which servers on other machines are
    reached; by default WARPFIT_PROXY, and none without it. Variables such as ``http_proxy`` are
    meant for other programs and are not read."""

    def __post_init__(self) -> None:
        """Check the settings."""
        _check_numbers(self, 1e-3)
        proxy = self.proxy
        if proxy is not None and not (isinstance(proxy, str) and _PROXY.fullmatch(proxy)):
            raise bad_setting("proxy", proxy, "http://HOST:PORT (WARPFIT_PROXY, if none is given)")

    def for_several(self) -> Self:
        """Return the settings for a channel to one of several servers."""
        return replace(
            self,
            keepalive_seconds=self.keepalive_seconds or 1.0,
            keepalive_timeout_seconds=self.keepalive_timeout_seconds or 2.0,
        )

    def channel_options(self) -> list[tuple[str, int]]:
        """Return the same settings, but for the proxy, as gRPC channel arguments."""
        first, longest = (round(1000 * seconds) for seconds in self.reconnect_seconds)
        timeout = round(1000 * (self.keepalive_timeout_seconds or 10.0))
        return [
            ("grpc.max_send_message_length", self.message_bytes),
            ("grpc.max_receive_message_length", self.message_bytes),
            ("grpc.keepalive_time_ms", round(1000 * (self.keepalive_seconds or 30.0))),
            ("grpc.keepalive_timeout_ms", timeout),
            # A keepalive ping waits for the longer of the two times (grpcio 1.85): a minute.
            ("grpc.http2.ping_timeout_ms", timeout),
            ("grpc.initial_reconnect_backoff_ms", first),
            ("grpc.min_reconnect_backoff_ms", round(1000 * self.connect_seconds)),
            ("grpc.max_reconnect_backoff_ms", longest),
            # warpfit retries by itself, because it knows the caller's deadline.
            ("grpc.enable_retries", 0),
        ]


def _check_numbers(settings: RetryPolicy | TransportConfig, least: float) -> None:
    for name in settings.__slots__:
        value = getattr(settings, name)
        if name == "proxy":
            continue
        numbers = value if isinstance(value, tuple) else (least if value is None else value,)
        most, wanted = math.inf, f"a number from {least:g}"
        if name == "jitter":
            most, wanted = 1.0, "a share from 0 to 1"
        elif name.endswith("_bytes"):  # gRPC counts bytes and milliseconds in 31 bits
            most, wanted = 2.0**31 - 1.0, "a whole number of bytes from 1, below 2^31"
        elif isinstance(settings, TransportConfig):
            most, wanted = 2e6, f"seconds from {least:g} to 2e6"
        kind = Integral if name.endswith("_bytes") else Real
        if not all(isinstance(each, kind) and least <= float(each) <= most for each in numbers):
            raise bad_setting(name, value, wanted)


# ---------------------------------------------------------------------------------------- addresses

#: Finds servers: returns the address HOST:PORT of each one that is there now, in any order. A
#: client calls it before its first call, and in a background thread every ten seconds and soon
#: after a server has failed, so it may block. It raises UnavailableError if it cannot know the
#: servers now, and then, or if it returns none, a client keeps those that it knows already.
Resolver: TypeAlias = Callable[[], Sequence[str]]
#: What `warpfit.connect` takes.
Address: TypeAlias = str | Sequence[str] | Resolver | None

#: Where a server listens that was given no other port.
DEFAULT_ADDRESS: Final = "127.0.0.1:50551"
#: Functions that make the target of an address SCHEME://..., as ``module:function``. They are
#: imported when a scheme is first used, so that a package that they need can be an extra.
SCHEMES: Final[Mapping[str, str]] = {
    "dns": "warpfit.transport.connection:dns_target",
    "file": "warpfit.transport.connection:file_target",
    "ray": "warpfit.ray:ray_target",
}
#: A name of a host; its labels have up to 63 characters.
_HOST: Final = re.compile(r"(?=.{1,253}\.?$)[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?")
#: Most bytes of a path of a socket: what Linux has room for.
_SOCKET_PATH_BYTES: Final = 107
#: Most characters of an address in a file.
_LONGEST: Final = 300
_EXAMPLE: Final = "Give HOST:PORT, such as 127.0.0.1:50551, or several of them separated by commas"


class OwnAddress(str):
    """Address of a server that this process has started, and which nothing starts again."""

    find_end: Callable[[], UnavailableError | None]
    """Returns why the server has ended; None while it runs."""

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """Pickle as a text: other processes cannot know the end of the server."""
        return str, (str(self),)


@dataclass(frozen=True, slots=True)
class Target:
    """The servers that a client may call."""

    resolve: Resolver
    addresses: tuple[str, ...] = ()
    """All servers, where they are known and never change; empty where ``resolve`` must be asked."""
    text: str = "the resolver's servers"
    """The address as the caller wrote it, for errors."""
    server_name: str | None = None
    """Name in the servers' certificates, where it is not the address."""
    find_end: Callable[[], UnavailableError | None] = lambda: None
    """Returns why there will be no server any more; None while there may be one."""

    def find(self) -> tuple[str, ...]:
        """Ask for the addresses of the servers; raise UnavailableError if there are none now."""
        found = self.resolve()
        if not found:
            raise UnavailableError(
                f"there is no server at {self.text}",
                "NO_SERVERS",
                "Start one, or wait for one that is starting with connect(..., wait=SECONDS)",
            )
        return _checked([found] if isinstance(found, str) else found)


def target_of(address: Address, environment: Mapping[str, str] = os.environ) -> Target:
    """Return the target of an address; None stands for WARPFIT_ADDRESS or `DEFAULT_ADDRESS`.

    Raises:
        InvalidArgumentError: if it is no address.
    """
    if address is None and (named := environment.get("WARPFIT_ADDRESS")):
        try:
            return target_of(named)
        except InvalidArgumentError as error:
            raise replace(error, message=f"WARPFIT_ADDRESS: {error.message}") from None
    if address is None:
        address = DEFAULT_ADDRESS
    if isinstance(address, OwnAddress):
        return replace(_listed([str(address)]), find_end=address.find_end)
    if callable(address):
        return Target(address)
    if isinstance(address, str):
        scheme, mark, _ = address.partition("://")
        if mark and scheme in SCHEMES:
            module, _, function = SCHEMES[scheme].partition(":")
            made: Target = getattr(import_module(module), function)(address)
            return made
        return _listed([one.strip() for one in address.split(",")])
    if isinstance(address, (list, tuple)):
        return _listed(address)
    raise InvalidArgumentError(
        f"an address cannot be of type {type(address).__name__}",
        "BAD_ADDRESS",
        f"{_EXAMPLE}; or a callable that returns a list of them",
        "address",
    )


def dns_target(address: str) -> Target:
    """Return the target of ``dns:///NAME:PORT``: all addresses that the name resolves to.

    Where a name has IPv4 and IPv6 addresses, they are taken to be the same servers, and the first
    ones are used.
    """
    name = address.removeprefix("dns://").removeprefix("/")
    check_address(name)
    host, _, port = name.rpartition(":")
    if "/" in host or "," in host:
        raise _bad(address, "Give dns:///NAME:PORT, one name without a name server")

    def resolve() -> Sequence[str]:
        try:
            found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        except OSError as error:
            raise UnavailableError(
                f"the name {host} cannot be resolved: {error.strerror or error}",
                "NAME_NOT_RESOLVED",
                "Check the name in the address, and that this machine's resolver knows it",
            ) from error
        places = {(family, str(place[0])) for family, *_, place in found}
        family = min(family for family, _ in places)  # AF_INET is the least
        hosts = sorted(host for one, host in places if one == family)
        return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]

    return Target(resolve, text=address, server_name=host)


def file_target(address: str) -> Target:
    """Return the target of ``file://PATH``: the addresses in all files named PATH.HOST-PORT.

    Servers write them that run with ``--address-file PATH``, and remove them when they end.
    """
    path = Path(address.removeprefix("file://")).absolute()
    if not path.name or path.is_dir():
        raise _bad(address, "Give file://PATH, where PATH is what --address-file says")

    def resolve() -> Sequence[str]:
        found = []
        for file in sorted(path.parent.glob(f"{glob.escape(path.name)}.*")):
            with contextlib.suppress(FileNotFoundError), file.open() as opened:  # one that ends
                found.append(opened.read(_LONGEST).strip())
        return found

    return Target(resolve, text=address)


def check_address(address: str) -> None:
    """Check an address of one server.

    It is ``HOST:PORT``, where HOST is a name, an IPv4 address or an IPv6 address in brackets; one
    of these with ``ipv4:`` or ``ipv6:`` before it; or a socket of this machine, ``unix:PATH`` or
    ``unix-abstract:NAME``.

    Raises:
        InvalidArgumentError: if it is none of these, so that no server can be there.
    """
    if not isinstance(address, str):
        raise InvalidArgumentError(
            f"an address cannot be of type {type(address).__name__}",
            "BAD_ADDRESS",
            _EXAMPLE,
            "address",
        )
    scheme, mark, path = address.partition(":")
    if mark and scheme in ("unix", "unix-abstract"):
        path = path.removeprefix("//") if path.startswith("///") else path
        size = len(path.encode(errors="replace"))
        is_file = not path.startswith("//") and not path.endswith("/") and path.isprintable()
        if not (is_file and 0 < size <= _SOCKET_PATH_BYTES):
            most = f"of at most {_SOCKET_PATH_BYTES} bytes"
            raise _bad(address, f"Give {scheme}:PATH, a path {most}; or HOST:PORT")
        return
    host, _, port = address.rpartition(":")
    kind = scheme if scheme in ("ipv4", "ipv6") and host.startswith(f"{scheme}:") else ""
    host = host.removeprefix(f"{kind}:")
    is_bracketed = host.startswith("[") and host.endswith("]")
    try:
        version = ipaddress.ip_address(host[1:-1] if is_bracketed else host).version
        is_host = is_bracketed == (version == 6) and kind in ("", f"ipv{version}")
    except ValueError:  # a name; names do not end in a number, as IPv4 addresses do
        last = host.rstrip(".").rpartition(".")[2]
        is_host = not kind and _HOST.fullmatch(host) is not None and not last.isdigit()
    # A longer number is none of a port, and Python refuses to read one of thousands of digits.
    is_port = port.isascii() and port.isdigit() and len(port) < 6 and 0 < int(port) < 1 << 16
    if not (is_host and is_port):
        raise _bad(address, _EXAMPLE)


def _listed(addresses: Sequence[str]) -> Target:
    found = _checked(addresses)
    return Target(lambda: found, found, ", ".join(found))


def _checked(addresses: Sequence[str]) -> tuple[str, ...]:
    for address in addresses:
        check_address(address)
    if not addresses:
        raise _bad("", _EXAMPLE)
    return tuple(dict.fromkeys(addresses))


def _bad(address: str, remedy: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{address[:_LONGEST]!r} is not an address", "BAD_ADDRESS", remedy, "address"
    )


# ----------------------------------------------------------------------------------- tokens and TLS

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
        """Fill in settings that are None from the environment; see `warpfit.connect`."""
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
            wanted = environment.get("WARPFIT_TLS", "").lower() in ("1", "true", "yes", "on")
            variables = ("CA", "CLIENT_CERT", "CLIENT_KEY", "SERVER_NAME")
            given = [environment.get(f"WARPFIT_{name}") for name in variables]
            tls = _tls_of(given, wanted=wanted)
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

    def handshake_failure(self, address: str) -> UnavailableError | None:
        """Return why a server ends connections: it alone speaks TLS, or wants another certificate.

        gRPC does not say it, so a connection is opened by Python's own TLS, for a second at most.
        None is returned if that has another outcome, or if the address is no HOST:PORT.
        """
        import ssl  # loaded late, because few need it

        place = address.removeprefix("ipv4:").removeprefix("ipv6:")
        host, _, port = place.rpartition(":")
        if not port.isdecimal():
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is sent
        context.set_alpn_protocols(["h2"])
        certificate = self.tls.certificate if self.tls is not None else None
        try:
            if self.tls is not None and certificate is not None:
                context.load_cert_chain(certificate, self.tls.key)
            with (
                socket.create_connection((host.strip("[]"), int(port)), 1.0) as plain,
                context.wrap_socket(plain, server_hostname=host.strip("[]")) as encrypted,
            ):
                # A server of HTTP/2 begins with its settings, unless it misses a certificate.
                is_refused = self.tls is not None and not encrypted.recv(1)
        except ssl.SSLError as error:
            if "ALERT" not in str(error.reason):
                return None
            is_refused = True
        except OSError:
            return None
        if self.tls is None:
            return UnavailableError(
                f"the server at {address} speaks TLS, and this client does not",
                "TLS_WANTED",
                "Connect with tls=True or a warpfit.TlsConfig, set WARPFIT_TLS or WARPFIT_CA, or "
                "give a command --tls or --ca",
            )
        if not is_refused:
            return None
        if certificate is None:
            return UnavailableError(
                f"the server at {address} asks for a client certificate",
                "CLIENT_CERTIFICATE_WANTED",
                "Give certificate and key: TlsConfig(certificate=..., key=...), or "
                "WARPFIT_CLIENT_CERT and WARPFIT_CLIENT_KEY",
            )
        return UnavailableError(
            f"the server at {address} refuses this client's certificate",
            "CLIENT_CERTIFICATE_REFUSED",
            "Give one that is valid, from an authority that the server trusts (--tls-client-ca)",
        )

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
    runs as another user than their owner. The owner is this user, or root.

    Raises:
        InvalidArgumentError: if others can read it, if others or its group can write to it, or if
            it belongs to another user.
        OSError: if there is no such file.
    """
    status = Path(path).stat()
    if hasattr(os, "geteuid") and status.st_uid not in (0, os.geteuid()):  # not on Windows
        raise InvalidArgumentError(
            f"{path} belongs to another user (id {status.st_uid}), who can read and change it",
            "FILE_NOT_SECRET",
            f"chown {os.geteuid()} {path}, or give it to root",
        )
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


# ------------------------------------------------------------------------------------- a connection

T = TypeVar("T")


@dataclass(frozen=True, slots=True, repr=False)  # a token should not appear in logs
class Connection:
    """The arguments of `warpfit.connect`, checked, with the environment's where none are given."""

    target: Target = field(compare=False)
    retry: RetryPolicy = RetryPolicy()
    transport: TransportConfig = TransportConfig()
    security: Security = Security()
    wait: float | None = None
    """Seconds for which the first call waits for a server; None as `warpfit.connect` says."""
    replicas: int = 2
    """Number of servers on which a data set lives."""
    arguments: tuple[Any, ...] | None = None
    """As they were given, but for the address, which a copy elsewhere must not take from there;
    None without a server."""

    @classmethod
    def of(
        cls,
        address: Address,
        token: str | None,
        tls: TlsConfig | bool | None,
        retry: RetryPolicy | None,
        transport: TransportConfig | None,
        wait: float | None,
        replicas: int,
    ) -> Connection:
        """Check the arguments; errors as `warpfit.connect`."""
        warn_of_unknown_variables(os.environ)
        target = target_of(address)
        if not isinstance(replicas, Integral) or isinstance(replicas, bool) or replicas < 1:
            raise bad_setting("replicas", replicas, "a number of servers for each data set, from 1")
        if wait is not None and not (isinstance(wait, Real) and wait >= 0):
            raise bad_setting("wait", wait, "seconds from 0, or None")
        found = list(target.addresses) or address or target.text
        return cls(
            target,
            _checked_settings(retry, RetryPolicy, "retry"),
            _checked_settings(transport, TransportConfig, "transport"),
            Security.of(target, token, tls),
            None if wait is None else float(wait),
            int(replicas),
            (found, token, tls, retry, transport, wait, replicas),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments, a token among them; a copy connects anew."""
        if self.arguments is None:
            raise InvalidArgumentError(
                "a client without a server cannot be pickled",
                "NOT_CONNECTED",
                "Make one in each process",
            )
        return Connection.of, self.arguments


def _checked_settings(given: T | None, kind: type[T], name: str) -> T:
    """Return settings of a kind, by default new ones."""
    if given is None or isinstance(given, kind):
        return given or kind()
    raise bad_setting(name, given, f"a warpfit.{kind.__name__}")


# ---------------------------------------------------------------------------- environment variables

#: Read by clients.
_OF_CLIENTS: Final = "ADDRESS CA CLIENT_CERT CLIENT_KEY PROXY SERVER_NAME TLS TOKEN"
#: Settings of the server, for whom a client may share its environment; `Config` has their meaning.
_OF_SERVERS: Final = """
    ADDRESS_FILE CACHE_DIR DATA_ROOT DEVICES DEVICE_MEMORY EXPOSE_TENANTS FRONT_ENDS GRACE
    HANG_SECONDS HEALTH_PORT HOST INSECURE LEASE_SECONDS LOG_FORMAT LOG_LEVEL MAX_PENDING_BYTES
    MAX_QUEUE_SECONDS MAX_REQUESTS MAX_RESIDENT_BYTES MAX_RESULT_BYTES MAX_SEARCHES
    MESSAGE_SECONDS METRICS_PORT NOTICE PARENT PORT TENANTS_FILE THREADS TLS_CERT TLS_CLIENT_CA
    TLS_KEY TOKEN_FILE
"""
CLIENT_VARIABLES: Final = frozenset(f"WARPFIT_{name}" for name in _OF_CLIENTS.split())
SERVER_VARIABLES: Final = frozenset(f"WARPFIT_{name}" for name in _OF_SERVERS.split())
#: What Kubernetes and Docker set in containers beside a service whose name begins with "warpfit".
_SERVICE: Final = re.compile(
    r"WARPFIT_(\w+_)?(SERVICE_(HOST|PORT\w*)|PORT_\d+_(TCP|UDP)\w*)=.*"
    r"|WARPFIT_\w+_PORT=(tcp|udp)://.*"
)


def unknown_variables(environment: Mapping[str, str], known: Iterable[str]) -> list[str]:
    """Return a sentence about each variable of warpfit whose name is not known.

    Args:
        environment: all variables.
        known: names that are, beside those of an orchestrator.
    """
    names = set(known)
    found = []
    for name in sorted({one for one in environment if one.startswith("WARPFIT_")} - names):
        if not _SERVICE.fullmatch(f"{name}={environment[name]}"):
            similar = difflib.get_close_matches(name, sorted(names), 1, 0.8)
            meant = f"; is {similar[0]} meant?" if similar else ""
            found.append(f"the environment variable {name} is not known{meant}")
    return found


def warn_of_unknown_variables(environment: Mapping[str, str]) -> None:
    """Warn of variables that neither client nor server knows; each one once a process."""
    for sentence in unknown_variables(environment, CLIENT_VARIABLES | SERVER_VARIABLES):
        warnings.warn(f"warpfit: {sentence}", UserWarning, stacklevel=2)
