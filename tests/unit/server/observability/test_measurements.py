"""Counters and histograms of calls, and adding up those of several processes."""

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from warpfit.request import Timings
from warpfit_server.observability.records import (
    BUCKET_BOUNDS,
    CallRecord,
    MetricsDelta,
    Recorder,
)

SECONDS = st.floats(0, 1000, allow_nan=False)
LABELS = ("Evaluate", "OK", "a")
TIMINGS = Timings(1, 2, 1, 4, 2, tier="cpu", cache_hits=1)


def ended(tenant="a", seconds=0.1, **measured):
    return CallRecord("Evaluate", "", 0, tenant, status="OK", ended=int(1e9 * seconds), **measured)


@given(st.lists(st.tuples(st.sampled_from("ab"), SECONDS, st.booleans())), st.integers(0, 5))
def test_nothing_is_lost_or_doubled_on_the_way_to_the_main_process(observed, cut):
    single, main, front_end = Recorder(), Recorder(), Recorder()
    for number, (tenant, seconds, answered) in enumerate(observed):
        measured = {"programs": 2, "tokens": 3, "token_rows": 4} if answered else {}
        received, timings = 10 * (number % 3), TIMINGS if answered else None
        call = ended(tenant, seconds, received_bytes=received, timings=timings, **measured)
        for recorder in (single, main if number % 2 else front_end):
            recorder.begin(call)
            recorder.end(call)
        if number % 6 == cut:
            main.add(7, front_end.take())
    main.add(7, front_end.take())
    expected, got = single.totals(), main.totals()
    assert got.counts == expected.counts
    assert got.buckets.keys() == expected.buckets.keys()
    for series, row in expected.buckets.items():
        assert got.buckets[series] == pytest.approx(row)
    calls = expected.counts.get(("requests", LABELS), 0)
    assert calls == sum(tenant == "a" for tenant, _, _ in observed)
    assert got.in_flight == 0


def test_calls_that_end_in_many_threads_are_all_counted():
    recorder = Recorder()

    def work(_):
        for _ in range(2000):
            call = ended()
            recorder.begin(call)
            recorder.end(call)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    totals = recorder.totals()
    assert totals.counts == {("requests", LABELS): 8000.0}
    assert totals.in_flight == 0


@given(SECONDS)
def test_an_observation_falls_into_the_bucket_that_bounds_it(seconds):
    delta = MetricsDelta()
    delta.observe("time", (), [seconds])
    (row,) = delta.buckets.values()
    (index,) = np.flatnonzero(row[:-1])
    assert seconds <= (*BUCKET_BOUNDS, math.inf)[index]
    assert index == 0 or seconds > BUCKET_BOUNDS[index - 1]


def test_calls_of_a_process_that_died_are_not_in_flight():
    recorder = Recorder()
    recorder.begin(ended())
    recorder.add(7, MetricsDelta(in_flight=3))
    recorder.add(8, MetricsDelta(in_flight=1))
    assert recorder.totals().in_flight == 5
    recorder.forget(7)
    assert recorder.totals().in_flight == 2
