"""Measuring one scenario against one server."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from warpfit.bench.batches import Batch, Expressions, Table, near, operations, table
from warpfit.bench.callers import Call, Load, call
from warpfit.bench.hardware import Peaks
from warpfit.bench.peers import PEERS, Job
from warpfit.bench.scenarios import Kind, Scenario
from warpfit.bench.statistics import summarise
from warpfit.calls.dataset_handle import DatasetHandle
from warpfit.client import Client
from warpfit.errors import InternalError
from warpfit.expressions import reference

#: Share of all values that must agree with the float64 reference. The others come from expressions
#: that overflow float32 or magnify its rounding errors.
AGREEMENT: Final = 0.95
_MOST_CALLS: Final = 2_000
T = TypeVar("T")


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

    def draw(self, scenario: Scenario) -> Batch:
        """Draw another batch."""
        return self.expressions.draw(scenario.expressions, scenario.workload)

    def batches(self, scenario: Scenario) -> Iterator[Batch]:
        """Yield what each call evaluates."""
        rng = np.random.default_rng(self.expressions.seed)
        count = (scenario.vectors,) if scenario.vectors > 1 else ()
        programs, parameters = self.draw(scenario)
        while True:
            yield programs, near(parameters, rng, *count)
            if scenario.reuse == "fresh":
                programs, parameters = self.draw(scenario)


def measure(session: Session, scenario: Scenario, seconds: float) -> dict[str, Any]:
    """Measure one client's calls for about ``seconds``.

    The first call is reported apart: it pays for compiling, and for bringing data to the device.
    """
    _, data = session.data(scenario)
    batches = session.batches(scenario)
    programs, parameters = next(batches)
    first = call(session.client, data, scenario, (programs, parameters))
    timed = repeat(lambda: call(session.client, data, scenario, next(batches)), seconds)
    tokens, operators, executed = operations(programs)
    cell = {
        "scenario": asdict(scenario),
        "tokens": tokens,
        "operators": operators,
        "executed": executed,
        "first": first.to_json(),
        **_summary(timed),
    }
    if scenario.kind is Kind.OPTIMIZE:
        searches = sum(len(vector) > 0 for vector in parameters)
        return {**cell, "searches": searches, "fits_per_second": searches / cell["wall"]["median"]}
    kernel = cell["kernel"]["median"]
    if session.peaks is not None and scenario.output != "gradients":
        bound = session.peaks.bound(scenario, programs)
        cell["roofline"] = {**bound, "fraction": bound["seconds"] / kernel if kernel else None}
    work = tokens * scenario.rows * scenario.vectors
    medians = {name: cell[name]["median"] for name in ("kernel", "engine", "wall")}
    # An engine may not tell its times.
    return {**cell, "token_rows_per_second": {name: work / s for name, s in medians.items() if s}}


def measure_workers(
    session: Session, address: str, scenario: Scenario, seconds: float
) -> dict[str, Any]:
    """Let ``scenario.workers`` clients call without a pause; a call that fails is an error."""
    load = Load(
        address=address,
        scenario=scenario,
        seconds=seconds,
        clients=scenario.workers,
        # At most two processes for each core, with threads in them.
        processes=min(scenario.workers, 2 * len(os.sched_getaffinity(0))),
        timeout=60.0,
        retries=True,
        seed=session.expressions.seed,
    )
    outcomes = load.perform()
    errors = {outcome.error for outcome in outcomes if outcome.error}
    if errors:
        raise InternalError(f"calls of workers failed: {', '.join(sorted(errors))}", "LOAD_FAILED")
    # All batches of a seed have the same lengths.
    tokens = sum(map(len, session.draw(scenario)[0]))
    rate = len(outcomes) / max(outcome.done for outcome in outcomes)
    return {
        "scenario": asdict(scenario),
        "processes": load.processes,
        "wall": summarise([outcome.done - outcome.sent for outcome in outcomes]),
        "calls_per_second": rate,
        "token_rows_per_second": {"wall": rate * tokens * scenario.rows},
    }


def compare(session: Session, scenario: Scenario, seconds: float) -> dict[str, Any]:
    """Measure a peer and warpfit on the same batch in turns, for about ``seconds``.

    Other load on the machine meets both alike. Before anything is timed, both are checked against
    the float64 reference; where the peer is wrong, a ValueError says so.
    """
    given, data = session.data(scenario)
    threads = len(os.sched_getaffinity(0))
    peer = PEERS[scenario.peer](given, threads)
    batch = session.draw(scenario)
    bound = [program.bind(vector) for program, vector in zip(*batch, strict=True)]
    started = time.perf_counter()
    job = peer.prepare(bound)
    prepared = time.perf_counter() - started
    ours = replace(scenario, kind=Kind.EVALUATE, peer="")
    first = call(session.client, data, ours, batch)
    shares = _agreements(session, scenario, batch, job)

    def turn() -> tuple[float, Call]:
        started = time.perf_counter()
        job.run()
        theirs = time.perf_counter() - started
        return theirs, call(session.client, data, ours, batch)

    turns = repeat(turn, seconds)
    wall, own = summarise([theirs for theirs, _ in turns]), _summary([own for _, own in turns])
    return {
        "scenario": asdict(scenario),
        "peer": scenario.peer,
        "output": peer.output,
        "notes": peer.notes,
        "threads": threads,
        "tokens": sum(map(len, batch[0])),
        "agreement": shares,
        "prepare": prepared,
        "wall": wall,
        "warpfit": {"first": first.to_json(), **own},
        "times_warpfit": wall["median"] / own["wall"]["median"],
    }


def repeat(perform: Callable[[], T], seconds: float) -> list[T]:
    """Perform something again and again for about ``seconds``; return the outcomes.

    Up to two calls more warm up. Three are counted at least, but one where three would take twice
    as long.
    """
    outcomes: list[T] = []
    started = time.perf_counter()
    warm_up = 0
    while len(outcomes) < _MOST_CALLS:
        outcome = perform()
        elapsed = time.perf_counter() - started
        if warm_up < 2 and elapsed < seconds / 4:
            warm_up += 1
            continue
        outcomes.append(outcome)
        if elapsed > seconds and (len(outcomes) >= 3 or elapsed >= 2 * seconds):
            break
    return outcomes


def agreement(values: NDArray[Any], expected: NDArray[np.float64]) -> float:
    """Return the share of values within 1% of the reference in their type, or special alike."""
    with np.errstate(all="ignore"):
        rounded = expected.astype(values.dtype)
        close = np.isclose(values, rounded, rtol=0.01, atol=1e-30, equal_nan=True)
    return float(close.mean())


def _agreements(session: Session, scenario: Scenario, batch: Batch, job: Job) -> dict[str, float]:
    """Return the shares of values that agree with the reference, the peer's and warpfit's."""
    given, data = session.data(scenario)
    rows = min(200, scenario.rows)
    expected = reference.evaluate(batch[0], given.X[:rows].T, batch[1])
    theirs = agreement(np.asarray(job.values(rows)), expected)
    # In a small batch a single expression that overflows float32 may be more than that share.
    if theirs < min(AGREEMENT, 1 - 1.5 / len(batch[0])):
        raise ValueError(f"only {theirs:.1%} of its values agree with the reference to 1%")
    answer = session.client.evaluate(
        data, *batch, rows=(0, rows), precision=scenario.precision, tier=scenario.tier
    )
    return {"peer": theirs, "warpfit": agreement(answer.T, expected)}


def _summary(calls: list[Call]) -> dict[str, Any]:
    """Summarise calls: end to end, kernel and engine, and the median of each stage."""
    stages = [call.to_json() for call in calls]
    return {
        "wall": summarise([c.wall / 1e9 for c in calls]),
        "engine": summarise([c.engine / 1e9 for c in calls]),
        "kernel": summarise([c.timings.compute / 1e9 for c in calls]),
        "stages": {name: statistics.median(s[name] for s in stages) for name in stages[0]},
    }
