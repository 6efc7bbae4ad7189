"""Finds engines that hang, compute wrongly or do not start, and has them replaced.

A thread probes each engine again and again. Another one, of the server, only compares clocks: it
ends readiness of a device when a probe has waited longer than ``probe_timeout``, and has the engine
replaced when one has waited for ``hang_seconds``. So nothing that blocks a probe can hide that it
has no answer.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from warpfit.errors import DatasetNotFoundError, ResourceExhaustedError, WarpfitError
from warpfit_server.config import Config
from warpfit_server.processes.engine_supervisor import EngineSupervisor
from warpfit_server.processes.probe import Probe
from warpfit_server.processes.supervisor import State

_LOG: Final = logging.getLogger("warpfit.watchdog")
#: Seconds between two looks whether a new server is ready.
_POLL_SECONDS: Final = 0.01


class Readiness:
    """The devices that serve, as far as the main process knows.

    ``on_change`` is called after each change, in the order of the changes.
    """

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self._on_change = on_change
        self._lock = threading.RLock()
        self._is_draining = False
        self.serving: frozenset[str] = frozenset()
        """Labels of the devices that answer calls."""

    def set_device(self, label: str, serves: bool) -> None:
        """Set whether a device serves; after `drain` none does."""
        with self._lock:
            serving = self.serving | {label} if serves else self.serving - {label}
            self._set(frozenset() if self._is_draining else serving)

    def drain(self) -> None:
        """Let no device serve for good; the process stays alive."""
        with self._lock:
            self._is_draining = True
            self._set(frozenset())

    def _set(self, serving: frozenset[str]) -> None:
        if serving != self.serving:
            self.serving = serving
            self._on_change()


class Watchdog:
    """Keeps readiness true to what one engine does, as long as `look` is called often.

    ``others_answer`` tells whether the engine answers all front ends, too; ``load_again``
    has the engine load the probe's data set, for which it may have had no room as it started.
    """

    def __init__(
        self,
        config: Config,
        supervisor: EngineSupervisor,
        probe: Probe,
        readiness: Readiness,
        others_answer: Callable[[], bool] = lambda: True,
        load_again: Callable[[], object] = lambda: None,
    ) -> None:
        self._config = config
        self._supervisor = supervisor
        self._probe = probe
        self._readiness = readiness
        self._others_answer = others_answer
        self._load_again = load_again
        self.label = supervisor.device.label
        """Names the engine's device."""
        self.answers = False
        """Whether the last probe of this process was answered rightly."""
        self.probe_seconds = 0.0
        """Time that the last answer took."""
        self.resumed = 0.0
        """Moment at which this process ran again after it had been stopped; see `look`."""
        self._asked: float | None = None  # since when a probe waits for its answer
        self._failing: float | None = None  # since when each probe fails, though there is an engine
        self._replaced: float | None = None  # the moment in one of these that led to a replacement
        self._stopping = threading.Event()
        self._wake = threading.Event()

    def start(self) -> None:
        """Begin to probe."""
        threading.Thread(target=self._probe_forever, name="probe", daemon=True).start()

    def wait_ready(self) -> None:
        """Wait until the engine answers all processes, does not start, or it is too late."""
        end = time.monotonic() + self._config.probe_timeout
        while (
            not self.serves and self._supervisor.state > State.STARTING and time.monotonic() < end
        ):
            time.sleep(_POLL_SECONDS)
            self._publish()

    def stop(self) -> None:
        """Stop probing."""
        self._stopping.set()
        self._wake.set()

    def engine_ready(self) -> None:
        """Probe a new engine at once."""
        self._failing = None
        self._wake.set()

    def engine_lost(self) -> None:
        """End readiness: there is no engine."""
        self.answers = False
        self._publish()

    @property
    def serves(self) -> bool:
        """Whether the engine's device serves."""
        return self.label in self._readiness.serving

    def _publish(self) -> None:
        self._readiness.set_device(self.label, self.answers and self._others_answer())

    def _probe_forever(self) -> None:
        while not self._stopping.is_set():
            self._wake.clear()
            self._ask()
            self._supervisor.ask_counters()
            self._wake.wait(self._config.probe_seconds)

    def _ask(self) -> None:
        started = self._asked = time.monotonic()
        try:
            self.answers = self._probe.ask()
        except Exception as error:
            level = logging.DEBUG if isinstance(error, WarpfitError) else logging.ERROR
            _LOG.log(level, "the probe of %s failed: %s", self.label, error)
            # A new engine is no remedy if it is this process that lacks something.
            if not isinstance(error, ResourceExhaustedError):
                self._failing = self._failing or started
            self.answers = False
            if isinstance(error, DatasetNotFoundError):
                self._load_again()
        else:
            self.probe_seconds = time.monotonic() - started
            self._failing = None
            if not self.answers:
                self._supervisor.replace("wrong_answer")
        finally:
            self._asked = None
            self._publish()

    def look(self, now: float) -> None:
        """Act on probes, and on starts of the engine, that take too long at ``now``.

        Time before this process has ``resumed`` does not count.
        """
        asked, failing, starting = self._asked, self._failing, self._supervisor.starting_since
        awake, config = now - self.resumed, self._config
        if asked is not None and min(now - asked, awake) > config.probe_timeout and self.serves:
            _LOG.warning("%s has not answered for %.1f s: not ready", self.label, now - asked)
            self.answers = False
        self._publish()
        if starting is not None:
            self._failing = None  # there is no engine that could answer
        if asked is not None and min(now - asked, awake) > config.hang_seconds:
            self._replace_once(asked, "hung")
        fails_for = 0.0 if failing is None else min(now - failing, awake)
        if failing is not None and starting is None and fails_for > config.hang_seconds:
            self._replace_once(failing, "no_answer")
        if starting is not None and min(now - starting, awake) > config.start_seconds:
            self._replace_once(starting, "slow_start")

    def _replace_once(self, since: float, cause: str) -> None:
        if self._replaced != since:
            self._replaced = since
            self._supervisor.replace(cause)
