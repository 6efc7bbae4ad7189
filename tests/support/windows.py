"""Windows made by hand, right and wrong, and who has them open."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from typing import Any

from warpfit import codec
from warpfit.v1 import evaluator_pb2 as pb
from warpfit.windows import NAME
from warpfit_server.windows import WindowLimits

_BY_HAND = f"by-hand-{NAME}"
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
PAGE = 4096
#: Of a small table.
LIMITS = WindowLimits(windows=4, nbytes=10 * PAGE, tenant_windows=3, tenant_nbytes=8 * PAGE)


def memory_file(size: int, seals: int = SEALS) -> int:
    """A memory file without memory yet; return its descriptor."""
    descriptor = os.memfd_create(_BY_HAND, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(descriptor, size)
    if seals:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


class RawWindow:
    """A window as a worker in another language would open it."""

    def __init__(self, path: str, ticket: bytes, descriptors: list[int]) -> None:
        self.descriptors = descriptors
        self.connection = connected(path)
        socket.send_fds(
            self.connection, [pb.OpenWindow(ticket=ticket).SerializeToString()], descriptors
        )
        self.answer = pb.WindowOpened.FromString(self.connection.recv(codec.WINDOW_PACKET_BYTES))

    @classmethod
    def of(cls, local: Any, size: int) -> RawWindow:
        """One as it must be; ``local`` is what GetServerInfo says."""
        return cls(local.socket, local.ticket, [memory_file(size)])

    @property
    def identifier(self) -> bytes:
        """Its id, if it was opened."""
        assert not self.answer.HasField("error"), self.answer.error
        return self.answer.id

    @property
    def reason(self) -> str:
        """Why it was refused."""
        assert not self.answer.id
        return self.answer.error.reason

    def close(self) -> None:
        """Close connection and files."""
        self.connection.close()
        for descriptor in self.descriptors:
            os.close(descriptor)

    def __enter__(self) -> RawWindow:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connected(path: str) -> socket.socket:
    """A connection to a server's socket."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(10)
    connection.connect(path)
    return connection


def client_windows() -> int:
    """How many descriptors of its own windows this process has; a mapped one has two."""
    return open_windows(name=f":{NAME}")


def open_windows(process: int | None = None, name: str = NAME) -> int:
    """How many descriptors of windows a process, by default this one, has."""
    folder = Path(f"/proc/{process or os.getpid()}/fd")
    found = 0
    for entry in folder.iterdir():
        try:
            found += name in str(entry.readlink())
        except FileNotFoundError:
            continue  # closed meanwhile
    return found
