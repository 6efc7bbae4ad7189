"""A whole run: servers, scenarios in order, time, interruptions."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final

from warpfit.bench import crowd, measure, peers, rival
from warpfit.bench.hardware import Peaks, cpu_peaks, gpu_peaks
from warpfit.bench.processes import Processes, processes
from warpfit.bench.progress import Progress
from warpfit.bench.results import Results
from warpfit.bench.scenarios import Kind, Profile, Scenario
from warpfit.bench.work import Expressions
from warpfit.client import connect
from warpfit.embedded import server_at
from warpfit.errors import UnavailableError, WarpfitError
from warpfit.request import Tier
from warpfit.server_info import ServerInfo

_SHORTEST_SLICE: Final = 0.08
#: Of a scenario's time; data, expressions, first call and warm-up take the rest.
_MEASURED_SHARE: Final = 0.6
#: Calls of a scenario that is cut as short as can be: the first one, and one that is timed.
_FEWEST_CALLS: Final = 2
#: A scenario that would take more than this many others' time is put off.
_DEAR: Final = 3.0
#: Scenarios that one with a peer counts for: many peers prepare, or compile, for each expression.
_PEER_WEIGHT: Final = 4
#: Of the whole time, for the GPU where there is one: its scenarios are more.
_FIRST_ENGINE_SHARE: Final = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run is asked to do."""

    profile: Profile
    engines: tuple[str, ...] = ("cuda", "cpu")
    address: str | None = None
    """Of a running server; None to start one for each engine."""
    with_peers: bool = True
    """Whether to measure other libraries, too; they run in this process, so never beside a server
    at an address, which may be another machine's."""


@dataclass
class Clock:
    """Shares the time of one engine out among its scenarios."""

    profile: Profile
    end: float
    """When this engine's time is used up, `time.monotonic`; infinite without a limit."""
    left: int
    """Scenarios still to measure, by their weights."""

    @property
    def over(self) -> bool:
        """Whether the time is used up."""
        return time.monotonic() > self.end

    @property
    def share(self) -> float:
        """Seconds that each of the scenarios still to measure may take."""
        return (self.end - time.monotonic()) / max(1, self.left)

    def slice(self, scenario: Scenario) -> float:
        """Seconds for calls of the next scenario."""
        share = self.share
        self.left -= _weight(scenario)
        return min(self.profile.slice_seconds, max(_SHORTEST_SLICE, share * _MEASURED_SHARE))


class Run:
    """Measures what a plan asks for and is not in the results yet."""

    def __init__(self, plan: Plan, results: Results, progress: Progress) -> None:
        self._plan = plan
        self._results = results
        self._progress = progress
        self._speeds: dict[tuple[str, str, str], float] = {}
        #: Seconds of the last first call that compiled, by the number of expressions.
        self._compiling: dict[int, float] = {}
        total = plan.profile.total_seconds
        #: Seconds left for measuring; starting a server, which may have to compile, is not counted.
        self._left = math.inf if total is None else total
        self._started = time.monotonic()
        self._before = float(results.head["seconds"])

    def perform(self) -> None:
        """Measure everything that the results lack.

        The file of results holds everything up to the last scenario, whatever ends the run.
        """
        engines = ("remote",) if self._plan.address else self._plan.engines
        self._results.head.setdefault("load_average", {})["start"] = _load_average()
        try:
            for number, engine in enumerate(engines):
                last = number == len(engines) - 1
                self._engine_if_there(engine, 1.0 if last else _FIRST_ENGINE_SHARE)
            self._results.head["complete"] = True
        finally:
            self._save()

    def _engine_if_there(self, engine: str, share: float) -> None:
        try:
            self._engine(engine, share)
        except UnavailableError as error:
            if len(self._plan.engines) == 1 or self._plan.address:
                raise
            self._results.skip(f"engine/{engine}", str(error).splitlines()[0])
            self._progress.say(f"{engine}: not measured, {error}")

    def _engine(self, engine: str, share: float) -> None:
        started = time.perf_counter()
        with self._server(engine) as address, connect(address) as client:
            info = client.wait_ready()
            self._note_server(info, time.perf_counter() - started)
            session = measure.Session(client, self._expressions(), self._peaks(info))
            self._scenarios(session, address, self._wanted(info), share)

    @contextmanager
    def _server(self, engine: str) -> Iterator[str]:
        if not self._plan.address:
            self._progress.say(
                f"starting a server with the {engine} engine (the very first start takes longer)"
            )
        flags = ["--engine", engine, "--log-level", "warning"]
        with server_at(self._plan.address, flags) as address:
            yield address

    def _note_server(self, info: ServerInfo, seconds: float) -> None:
        device = info.devices[0]
        self._results.head["servers"][info.engine] = {
            "version": info.version,
            "device": {**asdict(device), "tiers": [tier.value for tier in device.tiers]},
            "start_seconds": None if self._plan.address else round(seconds, 3),
        }

    def _peaks(self, info: ServerInfo) -> Peaks | None:
        """Peaks of the server's device, if it is in this machine."""
        if self._plan.address:
            return None
        peaks = gpu_peaks() if info.engine == "cuda" else cpu_peaks()
        if peaks is not None:
            self._results.head.setdefault("peaks", {})[info.engine] = asdict(peaks)
        return peaks

    def _expressions(self) -> Expressions:
        head = self._results.head
        return Expressions(head["seed"], (1_000_000 + head["runs"],))

    def _wanted(self, info: ServerInfo) -> list[Scenario]:
        profile, engine = self._plan.profile, info.engine
        tiers = [tier.value for tier in info.devices[0].tiers]
        if Tier.COMPILED.value not in tiers:
            tiers = [Tier.INTERPRETER.value]
        wanted = list(profile.scenarios(engine, tiers))
        if self._plan.with_peers and not self._plan.address:
            names, missing = peers.installed(engine)
            for name, why in missing.items():
                self._results.skip(f"peer/{name}", why)
            wanted += profile.peers(engine, peers.offers(names))
        return [scenario for scenario in wanted if scenario.key not in self._results.cells]

    def _scenarios(
        self, session: measure.Session, address: str, wanted: list[Scenario], share: float
    ) -> None:
        begun = time.monotonic()
        end = begun + share * self._left
        clock = Clock(self._plan.profile, end, sum(map(_weight, wanted)))
        self._progress.expect(len(wanted))
        most = max((s.workers for s in wanted), default=1)
        with processes(crowd.processes_for(most)) as pool:
            for scenario in self._in_time(wanted, clock):
                self._progress.start(scenario.title)
                why_not = self._obstacle(scenario, clock)
                seconds = clock.slice(scenario)
                if why_not:
                    self._results.skip(scenario.key, why_not)
                    self._progress.done(f"left out, {why_not}")
                else:
                    words = self._scenario(session, address, scenario, pool, seconds)
                    self._progress.done(words)
        self._left -= time.monotonic() - begun

    def _in_time(self, wanted: list[Scenario], clock: Clock) -> Iterator[Scenario]:
        """Yield all scenarios, those last that would take the time of several others."""
        dear = []
        for scenario in wanted:
            if self._least_seconds(scenario) > _DEAR * clock.share:
                dear.append(scenario)
            else:
                yield scenario
        yield from dear

    def _scenario(
        self,
        session: measure.Session,
        address: str,
        scenario: Scenario,
        pool: Processes,
        seconds: float,
    ) -> str:
        """Measure one scenario and keep the outcome; return a few words about it."""
        try:
            cell = self._measured(session, address, scenario, pool, seconds)
        except (WarpfitError, rival.DisagreementError) as error:
            return self._failed(scenario, error)
        except Exception as error:  # another library's; the run goes on without it
            if scenario.kind is not Kind.PEER:
                raise
            return self._failed(scenario, error)
        self._learn(scenario, cell)
        self._results.head["seconds"] = self._seconds()
        self._results.add(scenario.key, cell)
        return _words(cell)

    def _measured(
        self,
        session: measure.Session,
        address: str,
        scenario: Scenario,
        pool: Processes,
        seconds: float,
    ) -> dict[str, Any]:
        least = self._plan.profile.least_calls
        if scenario.kind is Kind.PEER:
            return rival.measure(session, scenario, seconds, least)
        if scenario.kind is Kind.WORKERS:
            seconds = max(seconds, self._plan.profile.slice_seconds)
            return crowd.measure(pool, address, scenario, seconds, session.expressions.seed)
        return measure.measure(session, scenario, seconds, least)

    def _failed(self, scenario: Scenario, error: Exception) -> str:
        why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        self._results.skip(scenario.key, why)
        return f"failed, {why}"

    def _obstacle(self, scenario: Scenario, clock: Clock) -> str:
        """Why a scenario is left out before it is tried; empty if it is not."""
        if clock.over:
            return "the time was used up"
        seconds = self._predicted(scenario)
        if seconds > self._plan.profile.longest_call:
            return f"a call would take about {seconds:.0f} s"
        return ""

    def _predicted(self, scenario: Scenario) -> float:
        """Seconds of one call, from the fastest that was seen at anything similar."""
        speed = self._speeds.get(_similar(scenario), 0.0)
        return scenario.token_rows / speed if speed else 0.0

    def _least_seconds(self, scenario: Scenario) -> float:
        """Seconds that a scenario takes however short it is cut: it may have to compile first.

        What compiling takes was seen at as many expressions, or at fewer.
        """
        compiling = 0.0
        if scenario.tier == Tier.COMPILED.value:
            seen = [n for n in self._compiling if n <= scenario.expressions]
            compiling = self._compiling[max(seen)] if seen else 0.0
        return compiling + _FEWEST_CALLS * self._predicted(scenario)

    def _learn(self, scenario: Scenario, cell: dict[str, Any]) -> None:
        if scenario.kind is Kind.EVALUATE and scenario.output == "losses":
            speed = cell["token_rows_per_second"]["wall"]
            similar = _similar(scenario)
            self._speeds[similar] = max(speed, self._speeds.get(similar, 0.0))
            if scenario.tier == Tier.COMPILED.value:
                self._compiling[scenario.expressions] = cell["first"]["wall"]

    def _seconds(self) -> float:
        """Seconds of this run and those before it that it continues."""
        return round(self._before + time.monotonic() - self._started, 1)

    def _save(self) -> None:
        self._results.head["seconds"] = self._seconds()
        self._results.head["load_average"]["end"] = _load_average()
        self._results.write()


def _load_average() -> float:
    """Processes that wanted a core during the last minute: before the run, those of others."""
    return round(os.getloadavg()[0], 1)


def _weight(scenario: Scenario) -> int:
    return _PEER_WEIGHT if scenario.kind is Kind.PEER else 1


def _similar(scenario: Scenario) -> tuple[str, str, str]:
    return scenario.engine, scenario.tier, scenario.precision


def _words(cell: dict[str, Any]) -> str:
    median = cell["wall"]["median"]
    text = f"{1e3 * median:.3g} ms" if median < 1 else f"{median:.3g} s"
    if "peer" in cell:
        return f"{text}, {cell['times_warpfit']:.2g} times warpfit's time"
    if "fits_per_second" in cell:
        return f"{text}, {cell['fits_per_second']:.4g} fits/s"
    return f"{text}, {cell['token_rows_per_second']['wall'] / 1e9:.3g} Gtok/s end to end"
