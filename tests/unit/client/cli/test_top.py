"""Rates and quantiles between two scrapes."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from warpfit.cli.top import Change, Scrape
from warpfit_server.observability.records import BUCKET_BOUNDS, MetricsDelta


@pytest.mark.parametrize(("after", "rate"), [(110.0, 5.0), (8.0, 4.0)], ids=["same", "restarted"])
def test_rates_survive_a_restart_of_the_server(after, rate):
    calls = ("calls", frozenset())
    change = Change(Scrape(10.0, {calls: 100.0}), Scrape(12.0, {calls: after}))
    assert change.rate("calls") == rate


@given(st.lists(st.floats(1e-5, 90), min_size=1, max_size=200), st.floats(0.01, 1))
def test_quantiles_are_in_the_right_bucket(values, share):
    delta = MetricsDelta()
    delta.observe("time", (), values)
    (histogram,) = delta.histograms.values()
    labels = [*map(str, BUCKET_BOUNDS), "+Inf"]
    after = {
        ("time_bucket", frozenset({("le", le)})): count
        for le, count in zip(labels, np.cumsum(histogram.buckets), strict=True)
    }
    before = dict.fromkeys(after, 0.0)
    got = Change(Scrape(0.0, before), Scrape(1.0, after)).quantile(share, "time")
    exact = sorted(values)[math.ceil(share * len(values)) - 1]
    index = np.searchsorted(BUCKET_BOUNDS, exact)
    assert (BUCKET_BOUNDS[index - 1] if index else 0) <= got <= BUCKET_BOUNDS[index]


def test_without_observations_there_is_no_quantile():
    nothing = Scrape(0.0, {})
    assert Change(nothing, nothing).quantile(0.5, "time") is None
    assert Change(nothing, nothing).mean("time") is None
