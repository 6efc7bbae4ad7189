"""Addresses as callers write them, and the resolvers that find the servers behind them."""

from __future__ import annotations

import contextlib
import glob
import ipaddress
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Final, TypeAlias

from warpfit.errors import InvalidArgumentError, UnavailableError

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
    "dns": "warpfit.transport.addresses:dns_target",
    "file": "warpfit.transport.addresses:file_target",
    "ray": "warpfit.ray:ray_target",
}
#: A name of a host; its labels have up to 63 characters.
_HOST: Final = re.compile(r"(?=.{1,253}\.?$)[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?")
#: Most bytes of a path of a socket: what Linux has room for.
_SOCKET_PATH_BYTES: Final = 107
#: Most characters of an address in a file.
_LONGEST: Final = 300
_EXAMPLE: Final = "Give HOST:PORT, such as 127.0.0.1:50551, or several of them separated by commas"


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
    if address is None:
        address = environment.get("WARPFIT_ADDRESS") or DEFAULT_ADDRESS
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
