"""A whole run of `warpfit bench`: servers, scenarios in order, and the time that each one gets."""

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from warpfit.bench import hardware, measure, peers, results
from warpfit.bench.batches import Expressions
from warpfit.bench.scenarios import Kind, Profile, Scenario
from warpfit.client import connect
from warpfit.embedded import server_at
from warpfit.errors import UnavailableError, WarpfitError
from warpfit.request import Tier
from warpfit.server_info import ServerInfo


@dataclass
class Run:
    """One run; its document is written after every scenario, whatever ends the run."""

    profile: Profile
    engines: tuple[str, ...]
    path: Path
    seed: int
    address: str | None = None
    """Address of a running server; None starts one for each engine."""
    notes: Sequence[str] = ()
    with_peers: bool = True
    """Whether to measure other libraries, too; never beside a server at an address, because it may
    be another machine's."""
    report: Callable[[str], None] = print
    """Called with a line about each scenario."""
    document: dict[str, Any] = field(init=False)
    _speeds: dict[tuple[str, ...], float] = field(default_factory=dict)
    """Greatest token-rows a second by engine, tier, precision and output."""
    _started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        """Begin the document."""
        self.document = {
            "benchmark": results.BENCHMARK,
            "schema": results.SCHEMA,
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "profile": self.profile.name,
            "seed": self.seed,
            "machine": hardware.machine(),
            "versions": hardware.versions(),
            "load_average": {"start": _load_average()},
            "address": self.address,
            "notes": list(self.notes),
            "complete": False,
            **{"servers": {}, "peaks": {}, "skipped": [], "cells": []},
        }

    def perform(self) -> None:
        """Measure everything; an UnavailableError says that there is nothing to measure."""
        for engine in self.engines:
            try:
                self._measure_engine(engine)
            except UnavailableError as error:
                if len(self.engines) == 1:
                    raise
                self._skip(f"engine/{engine}", str(error).splitlines()[0])
        self.document["complete"] = True
        self._save()

    def _measure_engine(self, engine: str) -> None:
        if not self.address:
            self.report(f"starting a server with the {engine} engine (the first start compiles)")
        started = time.perf_counter()
        flags = ["--devices", "0" if engine == "cuda" else engine, "--log-level", "warning"]
        with server_at(self.address, flags) as address, connect(address) as client:
            info = client.wait_ready()
            device = info.devices[0]
            self.document["servers"][info.engine] = {
                "version": info.version,
                "device": {**asdict(device), "tiers": [tier.value for tier in device.tiers]},
                "start_seconds": None if self.address else round(time.perf_counter() - started, 3),
            }
            find_peaks = hardware.gpu_peaks if info.engine == "cuda" else hardware.cpu_peaks
            peaks = None if self.address else find_peaks()
            if peaks is not None:
                self.document["peaks"][info.engine] = asdict(peaks)
            session = measure.Session(client, Expressions(self.seed), peaks)
            self._measure_all(session, address, self._wanted(info))

    def _wanted(self, info: ServerInfo) -> list[Scenario]:
        tiers = [tier.value for tier in info.devices[0].tiers]
        names: list[str] = []
        if self.with_peers and not self.address:
            names, missing = peers.installed(info.engine)
            for name in missing:
                self._skip(f"peer/{name}", "it is not installed")
        wanted = self.profile.scenarios(info.engine, tiers, names)
        # So many expressions take seconds to compile.
        return sorted(wanted, key=lambda s: s.tier == Tier.COMPILED and s.expressions >= 1_000)

    def _measure_all(self, session: measure.Session, address: str, wanted: list[Scenario]) -> None:
        end = time.monotonic() + self.profile.total_seconds
        for number, scenario in enumerate(wanted, 1):
            seconds = scenario.token_rows / self._speeds.get(_similar(scenario), math.inf)
            if time.monotonic() > end:
                self._skip(scenario.key, "the time was used up")
            elif seconds > self.profile.longest_call:
                self._skip(scenario.key, f"a call would take about {seconds:.0f} s")
            else:
                outcome = self._measure(session, address, scenario)
                self.report(f"[{number}/{len(wanted)}] {scenario.key}: {outcome}")

    def _measure(self, session: measure.Session, address: str, scenario: Scenario) -> str:
        """Measure one scenario and keep the outcome; return a few words about it."""
        seconds = self.profile.slice_seconds
        try:
            if scenario.kind is Kind.PEER:
                cell = measure.compare(session, scenario, seconds)
            elif scenario.kind is Kind.WORKERS:
                cell = measure.measure_workers(session, address, scenario, seconds)
            else:
                cell = measure.measure(session, scenario, seconds)
        except Exception as error:
            # Another library may fail in any way; the run goes on without it.
            if scenario.kind is not Kind.PEER and not isinstance(error, WarpfitError):
                raise
            why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            self._skip(scenario.key, why)
            return "failed"
        self.document["cells"].append({"key": scenario.key, **cell})
        self._save()
        if scenario.kind is Kind.EVALUATE:
            similar, speed = _similar(scenario), cell["token_rows_per_second"]["wall"]
            self._speeds[similar] = max(speed, self._speeds.get(similar, 0.0))
        ratio = f", {cell['times_warpfit']:.2g} times warpfit's time" if "peer" in cell else ""
        return f"{1e3 * cell['wall']['median']:.4g} ms{ratio}"

    def _skip(self, key: str, why: str) -> None:
        self.document["skipped"].append({"key": key, "why": why})
        self.report(f"{key}: not measured, {why}")

    def _save(self) -> None:
        self.document["seconds"] = round(time.monotonic() - self._started, 1)
        self.document["load_average"]["end"] = _load_average()
        results.write(self.path, self.document)


def _load_average() -> float:
    """Return how many processes wanted a core during the last minute."""
    return round(os.getloadavg()[0], 1)


def _similar(scenario: Scenario) -> tuple[str, ...]:
    return scenario.engine, scenario.tier, scenario.precision, scenario.output
