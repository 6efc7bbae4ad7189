"""Measuring a peer beside warpfit: checked first, then timed call by call in turns."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from warpfit.bench import peers
from warpfit.bench.measure import (
    AGREEMENT,
    CHECKED_ROWS,
    Call,
    Session,
    agreement,
    call,
    expected_values,
    summary,
)
from warpfit.bench.scenarios import Kind, Scenario
from warpfit.bench.statistics import summarise
from warpfit.bench.work import Batch, Table, token_count
from warpfit.calls.dataset_handle import DatasetHandle

_USUAL_TURNS: Final = 3
_MOST_TURNS: Final = 500


class DisagreementError(Exception):
    """A peer's answers are not those of the reference, so its time would mean nothing."""


def measure(session: Session, scenario: Scenario, seconds: float, least: int) -> dict[str, Any]:
    """Measure a peer and warpfit on the same work in turns, for about ``seconds``.

    Other load on the machine meets both alike. The peer is checked against the float64 reference
    before anything is timed, and so is warpfit. At least three turns are timed, but only ``least``
    where that takes twice as long.

    Raises:
        DisagreementError: if the peer's values are wrong.

    """
    table, data = session.data(scenario)
    threads = len(os.sched_getaffinity(0))
    peer = peers.create(scenario.peer, table, threads)
    batch = session.expressions.fresh(scenario.expressions, scenario.tokens)
    started = time.perf_counter()
    job = peer.prepare(*batch)
    prepared = time.perf_counter() - started
    ours = replace(scenario, kind=Kind.EVALUATE, peer="")
    first = call(session.client, data, ours, batch)
    shares = _checked(session, scenario, table, data, batch, job)
    our_run = partial(call, session.client, data, ours, batch)
    times, calls = _turns(job.run, our_run, seconds, least)
    wall = summarise(times)
    return {
        "scenario": scenario.to_json(),
        "peer": scenario.peer,
        "output": peer.output,
        "notes": peer.notes,
        "threads": threads,
        "tokens": token_count(batch[0]),
        "agreement": shares,
        "prepare": prepared,
        "wall": wall.to_json(),
        "warpfit": {"first": first.to_json(), **summary(calls)},
        "times_warpfit": wall.median / summarise([c.wall / 1e9 for c in calls]).median,
    }


def _checked(
    session: Session,
    scenario: Scenario,
    table: Table,
    data: DatasetHandle,
    batch: Batch,
    job: peers.Job,
) -> dict[str, float]:
    """Shares of values that agree with the reference, the peer's and warpfit's."""
    programs, parameters = batch
    rows = min(CHECKED_ROWS, scenario.rows)
    expected = expected_values(programs, table, parameters)
    theirs = agreement(np.asarray(job.values(rows)), expected)
    # In a small batch a single expression that overflows float32 may be more than that share.
    if theirs < min(AGREEMENT, 1 - 1.5 / len(programs)):
        raise DisagreementError(
            f"only {theirs:.1%} of its values agree with the reference to 1%; not timed"
        )
    answer = session.client.evaluate(
        data,
        programs,
        parameters,
        rows=(0, rows),
        precision=scenario.precision,
        tier=scenario.tier,
    )
    return {"peer": theirs, "warpfit": agreement(answer.T, expected)}


def _turns(
    theirs: Callable[[], object], ours: Callable[[], Call], seconds: float, least: int
) -> tuple[list[float], list[Call]]:
    theirs(), ours()  # warm up
    times: list[float] = []
    calls: list[Call] = []
    begun = time.perf_counter()
    while len(times) < _MOST_TURNS:
        started = time.perf_counter()
        theirs()
        times.append(time.perf_counter() - started)
        calls.append(ours())
        elapsed = time.perf_counter() - begun
        enough = _USUAL_TURNS if elapsed < 2 * seconds else least
        if elapsed > seconds and len(times) >= enough:
            break
    return times, calls
