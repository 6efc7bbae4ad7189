"""Calibration of the tier chooser: what the tiers cost on this device.

It is measured once, when nothing else uses the device, and kept on disk.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np

from warpfit.dataset import Dataset
from warpfit.expressions.workload import thesis_mix
from warpfit.ir import Batch
from warpfit.request import Evaluation, Loss, Tier
from warpfit_server.engine.cuda.math.modes import Mode
from warpfit_server.engine.cuda.runtime.compile_queue import CompileCounters
from warpfit_server.engine.cuda.runtime.device import CudaDevice
from warpfit_server.engine.cuda.runtime.resident_data import EvaluationTier, ResidentDataset, upload
from warpfit_server.engine.cuda.tier_chooser import DEFAULT_COSTS, CostTable, TierChooser, TierCost
from warpfit_server.engine.interface import Outputs, run_to_end
from warpfit_server.system import compile_cache

_LOG: Final = logging.getLogger("warpfit.engine")
#: Version of the method: results of another version are measured again.
_VERSION: Final = 4
_PROGRAMS: Final = 100
_VARIABLES: Final = 10
#: The fixed cost follows from few rows, the rate from many: enough to keep a device busy for much
#: longer than host times vary (0.9 ms of an H200, with compiled kernels in precise mode).
_ROWS: Final = (1_000, 2_000_000)
_REPEATS: Final = 5
_SEED: Final = 20_261_121


@dataclass(frozen=True, slots=True)
class Calibration:
    """Measures all tiers in every mode with a batch of random programs."""

    device: CudaDevice
    tiers: Mapping[Tier, EvaluationTier]
    compiler: CompileCounters
    """Counters of the queue in which the compiled tier compiles."""

    def known(self) -> CostTable | None:
        """Return the costs of this device and version from disk; None if they are not there."""
        return from_file(self._path())

    def measure(self, goes_on: Callable[[], bool]) -> CostTable | None:
        """Measure the costs and store them; None if ``goes_on`` said that they no longer count.

        Raises:
            ResourceExhaustedError: if the device has no room for the test data.
        """
        started = time.perf_counter()
        try:
            costs = self._measure(goes_on)
        except _DisturbedError:
            return None
        compile_cache.write_plain(self._path(), to_json(costs))
        _LOG.info("measured the tiers' costs in %.2f s", time.perf_counter() - started)
        return costs

    def _path(self) -> Path:
        return self.device.cache_directory / "calibration" / f"{self._name()}.json"

    def _name(self) -> str:
        device = self.device
        parts = (
            device.name,
            device.multiprocessors,
            device.driver,
            version("warpfit"),
            _VERSION,
        )
        return "-".join(str(part) for part in parts).replace(" ", "_").replace("/", "_")

    def _measure(self, goes_on: Callable[[], bool]) -> CostTable:
        batch = _batch(_SEED)
        work = [len(batch.codes) * rows for rows in _ROWS]
        costs: dict[tuple[Tier, str], TierCost] = {}
        compile_seconds: dict[str, float] = {}
        for mode in Mode:
            residents = [upload(self.device, _data(rows, mode.dtype)) for rows in _ROWS]
            for tier in self.tiers:
                times = [self._seconds(tier, mode, one, batch, goes_on) for one in residents]
                costs[tier, mode.label] = fit_cost(work, times)
            compile_seconds[mode.label] = self._compile_seconds(mode, residents[0], goes_on)
        return CostTable(costs, compile_seconds)

    def _compile_seconds(
        self, mode: Mode, resident: ResidentDataset, goes_on: Callable[[], bool]
    ) -> float:
        """Return the CPU seconds that the compiler takes for one expression.

        The time of an evaluation would not do: the first one of a mode compiles the device library
        too, and few kernels do not keep all threads busy. The programs differ from call to call, so
        that their kernels are not on disk yet.
        """
        before = self.compiler.seconds
        batch = _batch(time.time_ns() % (1 << 32))
        self._seconds(Tier.COMPILED, mode, resident, batch, goes_on)
        return (self.compiler.seconds - before) / _PROGRAMS

    def _seconds(
        self,
        tier: Tier,
        mode: Mode,
        resident: ResidentDataset,
        batch: Batch,
        goes_on: Callable[[], bool],
    ) -> float:
        """Return the seconds of an evaluation whose kernels are loaded."""
        evaluation = Evaluation(
            resident.dataset.content_id,
            batch,
            precision=mode.precision,
            loss=Loss.MSE,
            values=False,
            tier=tier,
        )
        outputs = Outputs(
            None, np.empty((_PROGRAMS, 1)), np.zeros(1, dtype=np.uint8), lambda _: None
        )
        seconds = []
        for _ in range(1 + _REPEATS):
            started = time.perf_counter()
            run_to_end(self.tiers[tier].evaluate(resident, evaluation, outputs))
            seconds.append(time.perf_counter() - started)
            if not goes_on():
                raise _DisturbedError
        return min(seconds[1:])  # the least disturbed by other programs on the machine


class _DisturbedError(Exception):
    """Something else used the device during a measurement."""


class Activity:
    """Counts the evaluations that use an engine."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._begun = 0

    @contextmanager
    def count(self) -> Iterator[None]:
        """Count one evaluation, which lasts as long as the block."""
        with self._lock:
            self._running += 1
            self._begun += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1

    def idle_since(self) -> int | None:
        """Return a number that changes once an evaluation begins; None if one is running."""
        with self._lock:
            return None if self._running else self._begun


class IdleCalibrator:
    """A thread that calibrates a tier chooser once the device is idle, unless that has been done.

    Args:
        calibration: measures.
        chooser: starts again from the outcome.
        activity: of the engine.
        pause: seconds for which nothing may have used the engine.
    """

    def __init__(
        self, calibration: Calibration, chooser: TierChooser, activity: Activity, pause: float = 1.0
    ) -> None:
        self._calibration = calibration
        self._chooser = chooser
        self._activity = activity
        self._pause = pause
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="calibrate", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop measuring, and wait until it has stopped."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            if self._calibration.known() is None:
                self._calibrate()
        except Exception as error:  # the tier chooser works with the costs that it has
            _LOG.warning("the tier chooser keeps the costs of an H200: %s", error)

    def _calibrate(self) -> None:
        latest = self._activity.idle_since()
        while not self._closed.wait(self._pause):
            before, latest = latest, self._activity.idle_since()
            if latest is None or latest != before:
                continue
            costs = self._calibration.measure(self._goes_on(latest))
            if costs is not None:
                self._chooser.restart(costs)
                return

    def _goes_on(self, idle_since: int) -> Callable[[], bool]:
        return lambda: not self._closed.is_set() and self._activity.idle_since() == idle_since


def _batch(seed: int) -> Batch:
    return Batch.of(*thesis_mix(seed, _PROGRAMS, variables=_VARIABLES))


def fit_cost(work: list[int], seconds: list[float]) -> TierCost:
    """Fit a cost to the times of two numbers of token-rows, the smaller first.

    Each term is at least a hundredth of what they allow.
    """
    rate = (work[1] - work[0]) / max(seconds[1] - seconds[0], seconds[1] / 100)
    return TierCost(max(seconds[0] - work[0] / rate, seconds[0] / 100), rate)


def to_json(costs: CostTable) -> bytes:
    """Return the content of a file of costs."""
    rows = [
        {"tier": tier.value, "mode": mode, **asdict(cost)}
        for (tier, mode), cost in costs.tiers.items()
    ]
    return json.dumps({"costs": rows, "compile_seconds": costs.compile_seconds}, indent=1).encode()


def from_file(path: Path) -> CostTable | None:
    """Read a file of costs; None if it is missing or invalid."""
    try:
        content = json.loads(path.read_bytes())
        costs = CostTable(
            {
                (Tier(row["tier"]), row["mode"]): TierCost(row["launch"], row["rate"])
                for row in content["costs"]
            },
            content["compile_seconds"],
        )
        complete = set(costs.tiers) == set(DEFAULT_COSTS.tiers)
        complete &= set(costs.compile_seconds) == set(DEFAULT_COSTS.compile_seconds)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return costs if complete else None


def _data(rows: int, dtype: np.dtype[Any]) -> Dataset:
    rng = np.random.default_rng(_SEED)
    columns = rng.uniform(0.5, 2.0, (rows, _VARIABLES))
    return Dataset.of(columns, rng.normal(size=rows), dtype=dtype)
