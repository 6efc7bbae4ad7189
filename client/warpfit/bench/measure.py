"""Measuring one scenario against one server."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.bench import roofline
from warpfit.bench.hardware import Peaks
from warpfit.bench.scenarios import Kind, Scenario
from warpfit.bench.statistics import summarise
from warpfit.bench.work import Batch, Expressions, Table, moved, several, table, token_count
from warpfit.calls.dataset_handle import DatasetHandle
from warpfit.client import Client
from warpfit.expressions import reference
from warpfit.ir import Program
from warpfit.request import Timings

STAGES: Final = ("decode", "queue", "copy_in", "compute", "copy_out")
#: Iterations of a fit: what a local search in a GP run would spend.
FIT_ITERATIONS: Final = 10
#: Share of all values that must agree with the float64 reference. The others come from expressions
#: that overflow float32 or magnify its rounding errors.
AGREEMENT: Final = 0.95
#: Rows on which answers are compared with the reference.
CHECKED_ROWS: Final = 200
_USUAL_CALLS: Final = 3
_MOST_CALLS: Final = 2_000
_WARM_UP_CALLS: Final = 2


@dataclass
class Session:
    """A client with the data that scenarios need."""

    client: Client
    expressions: Expressions
    peaks: Peaks | None = None
    _tables: dict[tuple[int, str], tuple[Table, DatasetHandle]] = field(default_factory=dict)

    def data(self, scenario: Scenario) -> tuple[Table, DatasetHandle]:
        """Draw and upload the data of a scenario; only the last is kept."""
        dtype = "float64" if scenario.precision == "float64" else "float32"
        known = self._tables.get((scenario.rows, dtype))
        if known is None:
            for _, data in self._tables.values():
                self.client.release(data)
            drawn = table(scenario.rows, self.expressions.seed, dtype)
            known = drawn, self.client.upload(drawn.X, drawn.y, dtype=dtype)
            self._tables = {(scenario.rows, dtype): known}
        return known

    def batches(self, scenario: Scenario) -> Iterator[Batch]:
        """Yield what each call evaluates."""
        programs, parameters = self.expressions.fresh(scenario.expressions, scenario.tokens)
        rng = np.random.default_rng(self.expressions.seed)
        while True:
            yield programs, several(parameters, scenario.vectors, rng)
            if scenario.reuse == "repeated":
                parameters = moved(parameters, rng)
            else:
                fresh = self.expressions.fresh(scenario.expressions, scenario.tokens)
                programs, parameters = fresh


@dataclass(frozen=True, slots=True)
class Call:
    """One call, in nanoseconds."""

    wall: int
    timings: Timings

    @property
    def engine(self) -> int:
        """In the engine: kernels, and what it copies and prepares for them."""
        timings = self.timings
        return timings.copy_in + timings.compute + timings.copy_out

    @property
    def rest(self) -> int:
        """Neither in the engine nor waiting for it: client, wire, front door."""
        return max(0, self.wall - self.engine - self.timings.decode - self.timings.queue)

    def to_json(self) -> dict[str, float]:
        """Return seconds of the call as a whole and by stage."""
        stages = {name: getattr(self.timings, name) / 1e9 for name in STAGES}
        return {"wall": self.wall / 1e9, **stages, "rest": self.rest / 1e9}


def call(client: Client, data: DatasetHandle, scenario: Scenario, batch: Batch) -> Call:
    """Perform one call as the scenario says."""
    programs, parameters = batch
    precision = "precise" if scenario.precision == "float64" else scenario.precision
    started = time.perf_counter_ns()
    if scenario.kind is Kind.OPTIMIZE:
        timings = client.optimize(
            data, programs, parameters, max_iterations=FIT_ITERATIONS, precision=precision
        ).timings
    else:
        timings = client.run(
            data,
            programs,
            parameters,
            values=scenario.output == "values",
            loss=None if scenario.output == "values" else "mse",
            gradient=scenario.output == "gradients",
            precision=precision,
            tier=scenario.tier,
        ).timings
    return Call(time.perf_counter_ns() - started, timings)


def measure(session: Session, scenario: Scenario, seconds: float, least: int) -> dict[str, Any]:
    """Measure one client's calls for about ``seconds``.

    The first call is told apart: it pays for compiling, and for bringing data to the device. Up to
    two more warm up. At least three are timed, but only ``least`` where that takes twice as long.
    """
    _, data = session.data(scenario)
    batches = session.batches(scenario)
    programs, parameters = next(batches)
    first = call(session.client, data, scenario, (programs, parameters))
    timed = _timed(partial(call, session.client, data, scenario), batches, seconds, least)
    cell = {
        "scenario": scenario.to_json(),
        "tokens": token_count(programs),
        "first": first.to_json(),
        **summary(timed),
    }
    if scenario.kind is Kind.OPTIMIZE:
        cell["searches"] = sum(len(vector) > 0 for vector in parameters)
    elif session.peaks is not None and scenario.output != "gradients":
        cell["roofline"] = _roofline(scenario, programs, session.peaks, cell)
    return {**cell, **_rates(cell, scenario)}


def summary(calls: list[Call]) -> dict[str, Any]:
    """Summarise calls: end to end, kernel and engine, and the median of each stage."""
    stages = [call.to_json() for call in calls]
    return {
        "wall": summarise([c.wall / 1e9 for c in calls]).to_json(),
        "engine": summarise([c.engine / 1e9 for c in calls]).to_json(),
        "kernel": summarise([c.timings.compute / 1e9 for c in calls]).to_json(),
        "stages": {name: statistics.median(s[name] for s in stages) for name in stages[0]},
        "tier": calls[-1].timings.tier.value,
        "cache_hits": statistics.median(c.timings.cache_hits for c in calls),
    }


def agreement(values: NDArray[Any], expected: NDArray[np.float64]) -> float:
    """Share of values within 1% of the reference rounded to their type, or special alike."""
    with np.errstate(all="ignore"):
        rounded = expected.astype(values.dtype)
        close = np.isclose(values, rounded, rtol=0.01, atol=1e-30, equal_nan=True)
    return float(close.mean())


def expected_values(programs: list[Program], given: Table, parameters: Any) -> NDArray[np.float64]:
    """Values of the first rows by the float64 reference, [programs, rows]."""
    return reference.evaluate(programs, given.X[:CHECKED_ROWS].T, parameters)


def _timed(
    perform: Callable[[Batch], Call], batches: Iterator[Batch], seconds: float, least: int
) -> list[Call]:
    calls: list[Call] = []
    started = time.perf_counter()
    warm_up = 0
    while len(calls) < _MOST_CALLS:
        made = perform(next(batches))
        elapsed = time.perf_counter() - started
        if warm_up < _WARM_UP_CALLS and elapsed < seconds / 4:
            warm_up += 1
            continue
        calls.append(made)
        enough = _USUAL_CALLS if elapsed < 2 * seconds else least
        if elapsed > seconds and len(calls) >= enough:
            break
    return calls


def _roofline(
    scenario: Scenario, programs: list[Program], peaks: Peaks, cell: dict[str, Any]
) -> dict[str, Any]:
    least = roofline.bound(scenario, programs, peaks)
    kernel = cell["kernel"]["median"]
    return {**least, "fraction": least["seconds"] / kernel if kernel else None}


def _rates(cell: dict[str, Any], scenario: Scenario) -> dict[str, Any]:
    if scenario.kind is Kind.OPTIMIZE:
        return {"fits_per_second": cell["searches"] / cell["wall"]["median"]}
    work = cell["tokens"] * scenario.rows * scenario.vectors
    seconds = {name: cell[name]["median"] for name in ("kernel", "engine", "wall")}
    # An engine may not tell its times.
    return {"token_rows_per_second": {name: work / s for name, s in seconds.items() if s}}
