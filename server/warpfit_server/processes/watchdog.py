"""The health of the server: what serves, and which processes are replaced, is decided here.

A probe is a small evaluation with a known result. The main process and every front end have one for
each engine, and send it over the connection of their calls. In the main process a thread probes
each engine again and again. Another thread, that of `Watchdog`, only compares clocks: it ends
readiness of a device when a probe has waited longer than ``probe_timeout``, and has the engine
replaced when one has waited for ``hang_seconds``. So nothing that blocks a probe can hide that it
has no answer. The same thread has front ends replaced that are silent or that alone have no answer.

Two decisions cannot be made here: a process that has lost the main process decides for itself, and
so does an engine whose work does not stop (`warpfit_server.machine`).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import numpy as np

from warpfit.dataset import Dataset
from warpfit.errors import DatasetNotFoundError, ResourceExhaustedError, WarpfitError
from warpfit.expressions.reference import evaluate_program
from warpfit.ir import Batch
from warpfit.parse import parse
from warpfit.request import Evaluation, Tier
from warpfit.server_info import Limits
from warpfit_server.config import Config
from warpfit_server.dataset_store import DatasetStore, StoredDataset, Upload
from warpfit_server.ipc import messages
from warpfit_server.ipc.engine_connection import EngineConnection
from warpfit_server.ipc.segments import SegmentPool
from warpfit_server.logs import REPORT_SECONDS
from warpfit_server.processes.engines import Engines, EngineSupervisor
from warpfit_server.processes.front_ends import FrontEnds
from warpfit_server.processes.supervisor import State, Supervisor
from warpfit_server.tenants import PROBE, key_of

_LOG: Final = logging.getLogger("warpfit.watchdog")
#: Rows of the probe's data set, and the value of the expression's parameter.
_ROWS, _PARAMETER = 64, 1.5
#: Largest difference of a right answer; float32 is exact to 1e-7.
_TOLERANCE: Final = 1e-5
#: Seconds between two looks whether a new server is ready.
_POLL_SECONDS: Final = 0.01
#: Seconds between two looks at probes and processes that take too long.
TICK: Final = 0.1
#: Seconds between two looks after which this process itself was stopped, at most.
_STOPPED_SECONDS: Final = 2.0
#: Seconds after which front ends are told again which devices serve.
_REPEAT_SECONDS: Final = 1.0


class Probe:
    """Asks the engine for the values of one expression on a small data set of its own.

    The seed of its numbers is the same in all processes, and a secret, so that no client can name
    the data set by its content.
    """

    def __init__(self, engine: EngineConnection, seed: int) -> None:
        self._engine = engine
        numbers = np.random.default_rng(seed).uniform(0.5, 2.0, (_ROWS, 2))
        self._dataset = dataset = Dataset.of(numbers.astype(np.float32))
        program = parse("p1*x1 + sin(x2)")
        self._evaluation = Evaluation(
            key_of(PROBE, dataset.content_id),
            Batch.of([program], [[_PARAMETER]]),
            tier=Tier.INTERPRETER,
        )
        self._expected = evaluate_program(program, dataset.variables, [_PARAMETER])

    def make_resident(self, datasets: DatasetStore, pool: SegmentPool) -> bytes:
        """Upload the data set, once for all processes; return its key.

        Raises:
            ResourceExhaustedError: if there is no memory for it.
        """
        dataset = self._dataset
        # The limits of callers do not hold for the probe.
        own = dataset.layout, dataset.content_id, PROBE, Limits().resident_bytes
        with Upload(datasets, pool, *own) as upload:
            upload.add(dataset.matrix.data.cast("B"))
            return upload.commit().key

    def ask(self) -> bool:
        """Evaluate, however long it takes; return whether the values are right.

        Raises:
            WarpfitError: if the engine is gone, or refuses.
        """
        self._engine.renew()
        request = self._engine.start(self._evaluation, self._dataset.layout, PROBE)
        try:
            while not isinstance(request.next_reply(), messages.RequestFinished):
                pass
            values = request.array("values")
            assert values is not None  # they were requested
            return bool(np.abs(values[0, 0] - self._expected).max() <= _TOLERANCE)
        finally:
            request.close()


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


class EngineWatch:
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
        self.answering_since = math.inf
        """Moment since which probes of this process are answered, rightly and in time; infinite
        while they are not."""
        self.probe_seconds = 0.0
        """Time that the last answer took."""
        self._asked: float | None = None  # since when a probe waits for its answer
        self._failing: float | None = None  # since when each probe fails, though there is an engine
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
        self.answering_since = math.inf
        self._publish()

    @property
    def serves(self) -> bool:
        """Whether the engine's device serves."""
        return self.label in self._readiness.serving

    def _publish(self) -> None:
        answers = self.answering_since < math.inf
        self._readiness.set_device(self.label, answers and self._others_answer())

    def _probe_forever(self) -> None:
        while not self._stopping.is_set():
            self._wake.clear()
            started = self._asked = time.monotonic()
            try:
                is_right = self._probe.ask()
            except Exception as error:
                level = logging.DEBUG if isinstance(error, WarpfitError) else logging.ERROR
                _LOG.log(level, "the probe of %s failed: %s", self.label, error)
                # A new engine is no remedy if it is this process that lacks something.
                if not isinstance(error, ResourceExhaustedError):
                    self._failing = self._failing or started
                self.answering_since = math.inf
                if isinstance(error, DatasetNotFoundError):
                    self._load_again()
            else:
                now = time.monotonic()
                self.probe_seconds, self._failing = now - started, None
                self.answering_since = min(self.answering_since, now) if is_right else math.inf
                if not is_right:
                    self._supervisor.replace("wrong_answer")
            finally:
                self._asked = None
                self._publish()
            self._supervisor.ask_counters()
            self._wake.wait(self._config.probe_seconds)

    def look(self, now: float, awake: float = math.inf) -> None:
        """Act on probes, and on starts of the engine, that take too long at ``now``.

        This process has been ``awake`` for these seconds, and no more count.
        """
        asked, failing, starting = self._asked, self._failing, self._supervisor.starting_since
        config = self._config
        waits_for = 0.0 if asked is None else min(now - asked, awake)
        if waits_for > config.probe_timeout and self.answering_since < math.inf:
            _LOG.warning("%s has not answered for %.1f s: not ready", self.label, waits_for)
            self.answering_since = math.inf
        self._publish()
        if starting is not None:
            self._failing = None  # there is no engine that could answer
        if waits_for > config.hang_seconds:
            self._supervisor.replace("stopped" if self._supervisor.is_stopped else "hung")
        fails_for = 0.0 if failing is None else min(now - failing, awake)
        if starting is None and fails_for > config.hang_seconds:
            self._supervisor.replace("no_answer")
        if starting is not None:
            _replace_if_slow(self._supervisor, min(now - starting, awake), config)


def _replace_if_slow(supervisor: Supervisor, seconds: float, config: Config) -> None:
    """Replace a process that has been starting for too many seconds."""
    if seconds > config.start_seconds:
        supervisor.replace("slow_start")


class Watchdog:
    """Looks after engines and front ends, in a thread of the main process.

    Args:
        config: the server's configuration.
        engines: the engines, with the probe of each.
        probes: by the engine's number.
        probed: the data set of the probes.
        front_ends: the front ends, which are told what serves.
        chores: what else is to be done often.
    """

    def __init__(
        self,
        config: Config,
        engines: Engines,
        probes: Sequence[Probe],
        probed: StoredDataset,
        front_ends: FrontEnds,
        chores: Sequence[Callable[[], object]] = (),
    ) -> None:
        self._config, self._front_ends, self._chores = config, front_ends, chores
        self.readiness = Readiness(front_ends.announce_readiness)
        """The devices that serve."""
        self.engines = [
            EngineWatch(
                config,
                supervisor,
                probe,
                self.readiness,
                partial(self.all_answered_by, supervisor.number),
                partial(supervisor.load, probed),
            )
            for supervisor, probe in zip(engines.supervisors, probes, strict=True)
        ]
        """The watch over each engine, by its number."""
        self.resumed = 0.0
        """Moment at which this process ran again after it had been stopped, and heard nothing."""
        self._stopped = threading.Event()
        for supervisor, watch in zip(engines.supervisors, self.engines, strict=True):
            supervisor.on_loss = watch.engine_lost

    def start(self) -> None:
        """Begin to probe and to look, and wait until engines answer, or do not start in time."""
        for engine in self.engines:
            engine.start()
        threading.Thread(target=self.look_forever, name="watchdog", daemon=True).start()
        for engine in self.engines:
            engine.wait_ready()

    def stop(self) -> None:
        """Look no more."""
        self._stopped.set()
        for engine in self.engines:
            engine.stop()

    def all_answered_by(self, engine: int) -> bool:
        """Return whether an engine answered the last probe of every process, not too long ago."""
        limit = time.monotonic() - self._config.probe_seconds - self._config.probe_timeout
        probes = [front_end.probes[engine] for front_end in self._front_ends.present()]
        return bool(probes) and all(
            probe.answers and max(probe.ended, self.resumed) >= limit for probe in probes
        )

    def look_forever(self) -> None:
        """Look until the end.

        A main process that was stopped (SIGSTOP, a paused machine) has read no messages meanwhile.
        So it does not count that time against the others.
        """
        looked = time.monotonic()
        stopped_seconds = min(_STOPPED_SECONDS, self._config.probe_timeout)
        while not self._stopped.wait(TICK):
            now = time.monotonic()
            if now - looked > stopped_seconds:
                _LOG.warning("the main process did not run for %.1f s", now - looked)
                self.resumed = now
            looked = now
            looks: list[Callable[[], object]] = [
                partial(engine.look, now, now - self.resumed) for engine in self.engines
            ]
            looks += [partial(self.look_at_front_ends, now), *self._chores]
            for look in looks:
                try:
                    look()
                except Exception:  # whatever it is, the others are looked at, and it is tried again
                    _LOG.exception("the server could not look after its processes")

    def look_at_front_ends(self, now: float) -> None:
        """Replace front ends that hang, or do not start, and tell the others what serves.

        Since an engine answers the main process, a front end that has had no answer of it for long
        is broken. What a healthy process does at intervals may have been due when it was stopped,
        so that an interval more is waited for.
        """
        config, front_ends = self._config, self._front_ends
        # A front end that hears nothing is not ready.
        if now - front_ends.told_at >= min(_REPEAT_SECONDS, config.probe_seconds):
            front_ends.announce_readiness()
        limit, awake = now - config.hang_seconds, now - self.resumed
        for front_end in front_ends.supervisors:
            if front_end.state < State.SERVING:
                _replace_if_slow(front_end, min(now - front_end.since, awake), config)
            elif awake > config.hang_seconds:
                has_no_answer = any(
                    max(probe.answered, engine.answering_since) < limit - config.probe_seconds
                    for probe, engine in zip(front_end.probes, self.engines, strict=True)
                )
                if has_no_answer or front_end.last_message < limit - REPORT_SECONDS:
                    is_silent = front_end.last_message < limit
                    front_end.replace("silent" if is_silent else "no_answer")
