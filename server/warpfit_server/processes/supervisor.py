"""Supervision of the server's child processes: engines and front ends.

A supervisor has a thread that runs one process after the other: it starts a process, handles its
messages until the process closes its channel, cleans up, and starts the next one.
"""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import Final

from warpfit.errors import WarpfitError
from warpfit_server.ipc import messages
from warpfit_server.ipc.messages import Channel, ChannelClosedError
from warpfit_server.machine import DescriptorReserve
from warpfit_server.processes.engine_start import kill_group

_LOG: Final = logging.getLogger("warpfit.supervisor")
#: Pause in seconds after a process could not even be spawned.
_SPAWN_PAUSE: Final = 1.0
#: Longest pause in seconds before a process is started that failed to start before.
_LONGEST_PAUSE: Final = 30.0
#: Failed starts after which there are pauses.
_QUICK_STARTS: Final = 2
#: Seconds that a process has to log why it ends, after it has closed its channel.
_EXIT_SECONDS: Final = 2.0
#: Descriptors that are kept for starting a process and connecting to it.
_RESERVED_FILES: Final = 12


class State(IntEnum):
    """How far a process has come; each state includes the states before it."""

    GONE = 0
    STARTING = 1
    """The process runs, and has sent no message yet."""
    LOADING = 2
    """The process is ready; an engine is being sent its data sets."""
    CONNECTABLE = 3
    """An engine has been sent all data sets, so that front ends may be connected to it."""
    SERVING = 4


class Supervisor(ABC):
    """Owns a child process and the channel to it.

    Args:
        name: name of the process in log lines.
        stop_seconds: seconds that the process has to end when the server stops.
    """

    def __init__(self, name: str, stop_seconds: float) -> None:
        self.name = name
        self.state = State.GONE
        self.since = 0.0
        """``time.monotonic()`` at which the process was started, or the last one was lost."""
        self.process: subprocess.Popen[bytes] | None = None
        """The present process, or the last one."""
        self.channel: Channel | None = None
        """Channel to a process that has said that it is ready."""
        self.failure: WarpfitError | None = None
        """Why the present process, or the last one, cannot serve, as it has said itself."""
        self.cause = ""
        """Why the present process, or the last one, was killed here; empty if it was not."""
        self.stopping = threading.Event()
        self.settled = threading.Event()
        """Set once the first process serves or has failed."""
        self.reserve = DescriptorReserve(_RESERVED_FILES)
        self.lock = threading.RLock()
        """Guards the state, the process and the channel."""
        self._stop_seconds = stop_seconds
        self._stop_by = 0.0  # moment at which the process should have ended when the server stops
        self._thread = threading.Thread(target=self._run_forever, name=name, daemon=True)

    # ------------------------------------------------------------------- what a kind of process is

    @abstractmethod
    def spawn(self) -> tuple[subprocess.Popen[bytes], Channel]:
        """Start a process; return it with the channel to it.

        Raises:
            OSError: if there is no process or no memory left for it.
            ResourceExhaustedError: if this process can open no more files.
        """

    @abstractmethod
    def handle(self, channel: Channel, message: messages.Message, descriptor: int | None) -> None:
        """Act on a message of the process."""

    @abstractmethod
    def lost(self) -> None:
        """Clean up after a process that has closed its channel."""

    @abstractmethod
    def ended(self, code: int) -> None:
        """Take note of the exit status of a process; the server may be ``stopping``."""

    # ------------------------------------------------------------------- what all have

    @property
    def process_id(self) -> int | None:
        """Process id of the present process, or the last one."""
        return None if self.process is None else self.process.pid

    @property
    def is_stopped(self) -> bool:
        """Whether a signal, or a debugger, keeps the process from running."""
        try:
            status = Path(f"/proc/{self.process_id}/stat").read_text()
        except OSError:  # it is gone, or was never there
            return False
        return status.rpartition(") ")[2][:1] in "Tt"  # its name, in brackets, may hold anything

    def start(self) -> None:
        """Start the first process; returns at once."""
        self._thread.start()

    def ready(self, channel: Channel) -> None:
        """Take note that the process can read messages."""
        with self.lock:
            self.channel, self.state, self.failure = channel, State.LOADING, None

    def serves(self) -> None:
        """Take note that the process serves."""
        self.state = State.SERVING
        self.settled.set()

    def tell(self, message: messages.Message, descriptor: int | None = None) -> bool:
        """Send a message to the process if it is ready; return whether it was sent.

        A process that is gone need not get it.
        """
        channel = self.channel
        if channel is None:
            return False
        try:
            channel.send(message, descriptor)
        except ChannelClosedError:
            _LOG.debug("%s is gone", self.name)
        except WarpfitError as error:
            _LOG.error("%s was not sent %s: %s", self.name, type(message).__name__, error)
        else:
            return True
        return False

    def replace(self, cause: str) -> None:
        """Kill the process, because it does not do its work; a new one starts.

        A process is killed once, since it may take a while to end. This takes no lock: a thread
        that holds it may be the one that waits for the process.
        """
        process = self.process
        if process is None or self.state is State.GONE or self.cause:
            return
        self.cause = cause
        _LOG.error("%s, process %d, is replaced: %s", self.name, process.pid, cause)
        process.kill()

    def begin_stop(self) -> None:
        """Tell the process to end, or kill it if it is not ready."""
        if not self.stopping.is_set():
            self._stop_by = time.monotonic() + self._stop_seconds
        self.stopping.set()
        with self.lock:
            if self.channel is not None:
                self.tell(messages.Stop())
            elif self.process is not None:
                kill_group(self.process)

    def stop(self) -> None:
        """End the process and wait until it has; one that hangs is killed.

        Its time begins with `begin_stop`, so that several that hang take no longer than one.
        """
        if not self.stopping.is_set():
            self.begin_stop()
        if self._thread.is_alive():
            self._thread.join(max(0.0, self._stop_by - time.monotonic()))
        if self._thread.is_alive() and self.process is not None:
            kill_group(self.process)
            self._thread.join(self._stop_seconds)

    def _run_forever(self) -> None:
        """Run one process after the other until the server stops."""
        failures = 0
        while not self.stopping.is_set():
            try:
                code, reached = self._run()
            except Exception as error:  # whatever it is, another process must come
                is_shortage = isinstance(error, (OSError, WarpfitError))
                _LOG.error("%s could not be run: %s", self.name, error, exc_info=not is_shortage)
                self.settled.set()
                self.stopping.wait(_SPAWN_PAUSE)
                continue
            if self.stopping.is_set():
                return
            if self.failure is None:
                _LOG.error("%s ended: exit code %s", self.name, code)
            elif self.settled.is_set():  # else it is what the start of the server ends with
                _LOG.error("%s ended: exit code %s: %s", self.name, code, self.failure)
            # After one that was ready, the next one starts at once: clients wait. If the very
            # first one has failed, another one is not likely to start.
            if reached > State.STARTING:
                failures = 0
            else:
                failures = failures + 1 if self.settled.is_set() else _QUICK_STARTS
            self.settled.set()
            quick = failures <= _QUICK_STARTS
            self.stopping.wait(0.0 if quick else min(_LONGEST_PAUSE, 0.25 * 2**failures))

    def _run(self) -> tuple[int, State]:
        """Run a process to its end; return its exit status, and the state that it had reached."""
        with self.reserve.lent():  # also a server whose descriptors are all in use replaces it
            process, channel = self.spawn()
        with self.lock:
            self.process, self.since, self.state = process, time.monotonic(), State.STARTING
            self.cause = ""
            if self.stopping.is_set():  # `begin_stop` has seen another process, or none
                kill_group(process)
        try:
            while True:
                self.handle(channel, *channel.receive())
        except ChannelClosedError:
            pass
        finally:
            with self.lock:
                reached, self.state = self.state, State.GONE
                self.channel, self.since = None, time.monotonic()
            self.lost()
            channel.close()
            with suppress(subprocess.TimeoutExpired):  # it may have to log why it ends
                process.wait(self._stop_seconds if self.stopping.is_set() else _EXIT_SECONDS)
            if self.stopping.is_set():  # else the next one waits for what is being compiled
                kill_group(process)
            process.kill()
            code = process.wait()
            self.ended(code)
        return code, reached
