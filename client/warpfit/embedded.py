"""A server as a child process, which runs for the time of a ``with`` block."""

import logging
import os
import platform
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import IO, Any, Final
from weakref import WeakSet

from warpfit.child_processes import python_child
from warpfit.errors import InvalidArgumentError, UnavailableError, list_of_texts
from warpfit.transport.connection import OwnAddress

_LOG: Final = logging.getLogger("warpfit")
#: Longest start in seconds. The first start on a machine compiles the engine, for minutes on a busy
#: one; the server itself gives up after this time.
START_SECONDS: Final = 600.0
_STOP_SECONDS: Final = 15.0
#: Seconds that calls of other processes may take to finish when the server ends.
_GRACE_SECONDS: Final = 2.0
_POLL_SECONDS: Final = 0.02
#: What a server's log says where it compiles its code.
_COMPILING: Final = "(first start only)"
#: Most bytes of the end of the log that are read.
_MOST_READ: Final = 1 << 16
#: Characters of the end of the log that an error quotes; its message has at most 480 bytes.
_QUOTED_CHARACTERS: Final = 360
#: The line that a server prints when it is ready, with its address.
READY: Final = re.compile(r"warpfit listening on (\S+:\d+)")
#: Pipes to the servers of this process, which tell them its end. A child that is forked closes
#: them, because it may live longer.
_PIPES: Final[WeakSet[IO[bytes]]] = WeakSet()
#: What this process has said, which it says once.
_SAID: Final[set[str]] = set()


if hasattr(os, "register_at_fork"):  # which Windows has not
    os.register_at_fork(after_in_child=lambda: [pipe.close() for pipe in list(_PIPES)])


@contextmanager
def embedded_server(
    arguments: Sequence[str] = (), *, start_seconds: float = START_SECONDS
) -> Iterator[str]:
    """Start a server on a free port, yield its address HOST:PORT, and stop it after the block.

    The server also ends with this process, however that ends: killed, by ``os._exit``, or as it
    becomes another program. Children of this process may live longer.

    Args:
        arguments: further flags of ``warpfit serve``.
        start_seconds: longest time that the start may take.

    Raises:
        InvalidArgumentError: if the server is not installed, this is not Linux, or ``arguments``
            is one text.
        UnavailableError: if it does not start; the message quotes the end of its log.
    """
    arguments = list_of_texts(arguments, "arguments")
    if platform.system() != "Linux":
        raise InvalidArgumentError(
            f"a server runs on Linux, and this is {platform.system()}",
            "NEEDS_LINUX",
            "Give the address= of a server on a Linux machine, or in a container of this one, or "
            "set WARPFIT_ADDRESS",
            "address",
        )
    require_server()
    flags = ["--host", "127.0.0.1", "--port", "0", "--parent", str(os.getpid())]
    flags += ["--grace", str(_GRACE_SECONDS), *arguments]
    child = python_child("-m", "warpfit_server", *flags)
    streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(**child, stdout=log, **streams) as process,
    ):
        assert process.stdin is not None
        _PIPES.add(process.stdin)
        try:
            begun = time.monotonic()
            while process.poll() is None and time.monotonic() < begun + start_seconds:
                written = _written(log)
                if _COMPILING in written and _COMPILING not in _SAID:
                    _SAID.add(_COMPILING)
                    _LOG.warning(
                        "warpfit: the first server on this machine compiles its code for up to a "
                        "minute, for which a first fit waits; later starts take seconds. `warpfit "
                        "precompile` does so beforehand"
                    )
                if ready := READY.search(written):
                    address = OwnAddress(ready[1])
                    break
                time.sleep(_POLL_SECONDS)
            else:
                status = process.poll()
                what = "did not get ready in time"
                what = what if status is None else f"ended with status {status}"
                remedy = "Run `warpfit serve` by itself to see why"
                raise UnavailableError(_with_log(what, log), "SERVER_NOT_STARTED", remedy)
            address.find_end = partial(_find_end, process, log, os.getpid())
            yield address
        finally:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def server_at(address: str | None, arguments: Sequence[str] = ()) -> Iterator[str]:
    """Yield ``address``; if it is None, WARPFIT_ADDRESS, or the address of an `embedded_server`."""
    address = address or os.environ.get("WARPFIT_ADDRESS")
    if address:
        yield address
        return
    with embedded_server(arguments) as started:
        yield started


def require_server() -> None:
    """Check that the server's package is installed; raise InvalidArgumentError if it is not."""
    if find_spec("warpfit_server") is None or find_spec("numba") is None:
        raise InvalidArgumentError(
            "the server is not installed here",
            "MISSING_PACKAGE",
            "Install it (pip install 'warpfit[server]'), or name a running server's address",
        )


def _find_end(
    process: subprocess.Popen[bytes], log: IO[bytes], owner: int
) -> UnavailableError | None:
    """Return why a server has ended, which only the process that has started it can know."""
    if os.getpid() != owner or process.poll() is None:
        return None
    what = f"has ended with status {process.poll()}"
    return UnavailableError(_with_log(what, log), "SERVER_ENDED", "Start another one")


def _with_log(what: str, log: IO[bytes]) -> str:
    """Return a sentence about the server, with the end of its log."""
    lines = [] if log.closed else _written(log).splitlines()  # it is closed after the block
    tail = "\n".join(lines[-10:])[-_QUOTED_CHARACTERS:]
    return f"the embedded server {what}" + (f"; its log ends with:\n{tail}" if tail else "")


def _written(log: IO[bytes]) -> str:
    """Return the end of what the server has written, without moving the place where it writes."""
    start = max(0, os.fstat(log.fileno()).st_size - _MOST_READ)
    return os.pread(log.fileno(), _MOST_READ, start).decode(errors="replace")
