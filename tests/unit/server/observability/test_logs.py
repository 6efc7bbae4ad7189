"""Log lines of calls, and the limit on their number."""

import logging
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warpfit_server.observability import logs
from warpfit_server.observability.calls import Observer
from warpfit_server.observability.logs import LogRateLimiter
from warpfit_server.observability.measurements import CallRecord

PAUSES = st.lists(st.floats(0, 5, allow_nan=False), min_size=1, max_size=300)


@given(st.integers(1, 20), st.sampled_from([0.5, 1.0, 8.0]), PAUSES)
def test_lines_keep_to_the_rate_and_left_out_ones_are_counted(burst, rate, pauses):
    limiter, now, written, counted, left_out = LogRateLimiter(burst, rate), 1000.0, [], 0, 0
    for pause in pauses:
        now += pause
        found = limiter.take("one", now)
        if found is None:
            left_out += 1
            assert any(moment > now - burst / rate for moment in written), "left out for a reason"
        else:
            written.append(now)
            counted += found
            assert counted == left_out
    for index, begin in enumerate(written):
        for count, end in enumerate(written[index:], 1):
            assert count <= burst + rate * (end - begin) + 1e-6


def test_names_take_a_bounded_amount_of_memory(monkeypatch):
    monkeypatch.setattr(logs, "_MOST_NAMES", 10)
    limiter = LogRateLimiter(1, 1.0)
    for number in range(35):
        assert limiter.take(str(number), 0.0) == 0
        assert len(limiter._used) <= 10


@pytest.fixture
def end(caplog):
    """A function that ends a call and returns all lines so far."""
    observer = Observer(SimpleNamespace(begin=None, end=lambda call: None))

    def end(status, tenant="alice"):
        observer.end(CallRecord("Evaluate", "id", 0, tenant), status)
        return [record.getMessage() for record in caplog.records]

    return end


def test_a_client_that_repeats_a_mistake_gets_few_lines(caplog, end):
    caplog.set_level(logging.INFO, "warpfit.requests")
    for _ in range(5000):
        lines = end("INVALID_ARGUMENT")
    assert 100 <= len(lines) < 1000
    assert lines[0].startswith("Evaluate ended INVALID_ARGUMENT after ")
    assert len(end("INTERNAL", "bob")) == len(lines) + 1
    assert end("OK", "bob")[-1] == end("NOT_FOUND", "bob")[-1], "clients expect these"


def test_the_next_line_says_how_many_were_left_out(caplog, end, monkeypatch):
    caplog.set_level(logging.INFO, "warpfit.requests")
    now = 0
    monkeypatch.setattr("time.monotonic_ns", lambda: now)
    for _ in range(137):
        end("INVALID_ARGUMENT")
    now = 1_500_000_000
    line = end("INVALID_ARGUMENT")[-1]
    assert line.endswith("after 1.500 s, after 37 failed calls of tenant alice without a line")
    assert caplog.records[-1].fields["left_out"] == 37
    assert len(caplog.records) == 101
