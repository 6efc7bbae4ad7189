"""Addresses as callers write them, and the resolvers that find the servers behind them."""

from __future__ import annotations

import contextlib
import glob
import os
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
    """Check that an address has a port; raise InvalidArgumentError if it has none."""
    if not isinstance(address, str):
        raise InvalidArgumentError(
            f"an address cannot be of type {type(address).__name__}",
            "BAD_ADDRESS",
            _EXAMPLE,
            "address",
        )
    host, _, port = address.rpartition(":")
    if "://" in address or "unix:" in address:
        return  # gRPC's own schemes
    if not (host and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
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
    return InvalidArgumentError(f"{address!r} is not an address", "BAD_ADDRESS", remedy, "address")
