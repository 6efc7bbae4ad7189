"""A server as a child process, which runs for the time of a ``with`` block."""

import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from queue import Empty, SimpleQueue
from typing import IO, Final

from warpfit.errors import InvalidArgumentError, UnavailableError

#: Longest start in seconds. The first start on a machine compiles the engine, for minutes on a busy
#: one; the server itself gives up after this time.
START_SECONDS: Final = 600.0
_STOP_SECONDS: Final = 15.0
#: Characters of the end of the log that an error quotes; its message has at most 480 bytes.
_QUOTED_CHARACTERS: Final = 360
#: The line that a server prints when it is ready, with its address.
READY: Final = re.compile(r"warpfit listening on (\S+:\d+)")


@contextmanager
def embedded_server(
    arguments: Sequence[str] = (), *, start_seconds: float = START_SECONDS
) -> Iterator[str]:
    """Start a server on a free port, yield its address HOST:PORT, and stop it after the block.

    Args:
        arguments: further flags of ``warpfit serve``.
        start_seconds: longest time that the start may take.

    Raises:
        InvalidArgumentError: if the server is not installed.
        UnavailableError: if it does not start; the message quotes the end of its log.
    """
    require_server()
    command = [sys.executable, "-m", "warpfit_server", "--host", "127.0.0.1", "--port", "0"]
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log,
        subprocess.Popen(
            [*command, *arguments], stdout=subprocess.PIPE, stderr=log, text=True
        ) as process,
    ):
        try:
            yield _wait_for_address(process, log, start_seconds)
        finally:
            _stop(process)


@contextmanager
def server_at(address: str | None, arguments: Sequence[str] = ()) -> Iterator[str]:
    """Yield ``address``; if it is None, WARPFIT_ADDRESS, or the address of an `embedded_server`."""
    address = address or os.environ.get("WARPFIT_ADDRESS")
    if address is not None:
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


def _wait_for_address(process: subprocess.Popen[str], log: IO[str], seconds: float) -> str:
    found: SimpleQueue[str | None] = SimpleQueue()
    threading.Thread(target=_read, args=(process, found), daemon=True).start()
    try:
        address = found.get(timeout=seconds)
    except Empty:
        address = None
    if address is None:
        raise _start_error(process, log)
    return address


def _read(process: subprocess.Popen[str], found: SimpleQueue[str | None]) -> None:
    """Report the address, then drain the pipe, so that the server never blocks on it."""
    assert process.stdout is not None
    for line in process.stdout:
        match = READY.search(line)
        if match:
            found.put(match[1])
    found.put(None)


def _start_error(process: subprocess.Popen[str], log: IO[str]) -> UnavailableError:
    log.seek(0)
    tail = "\n".join(log.read().splitlines()[-10:])[-_QUOTED_CHARACTERS:]
    status = process.poll()
    what = "did not get ready in time" if status is None else f"ended with status {status}"
    return UnavailableError(
        f"the embedded server {what}" + (f"; its log ends with:\n{tail}" if tail else ""),
        "SERVER_NOT_STARTED",
        "Run `warpfit serve` by itself to see why",
    )


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
