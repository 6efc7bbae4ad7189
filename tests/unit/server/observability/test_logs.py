"""Log lines of calls, and the limit on their number."""

import json
import logging
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from warpfit_server.observability import logs
from warpfit_server.observability.logs import LogRateLimiter
from warpfit_server.observability.records import CallRecord, Observer, call_id

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


@pytest.fixture
def written(capsys):
    """Configure the server's logs, in a given form; return a function that returns the lines."""
    root, grpcs = logging.getLogger(), logging.getLogger("grpc")
    before = root.handlers[:], root.level, grpcs.level

    def configure(style="text"):
        logs.configure_logging("info", style)
        logs.LOGGED_REQUEST_ID.set("")
        return lambda: capsys.readouterr().err.splitlines()

    yield configure
    root.handlers[:], root.level = before[0], before[1]
    grpcs.setLevel(before[2])


ENDS = "\n\r\x0b\x0c\x1b\x85\u2028\u202e\ud800\x00\x7f\x9b"


@pytest.mark.parametrize("style", ["text", "json"])
@given(st.text(st.sampled_from(ENDS + "a "), max_size=20) | st.text(max_size=20))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
def test_what_a_caller_chooses_is_one_printable_line(written, style, text):
    lines = written(style)
    logging.getLogger("some").info("tenant %s came", text)
    (line,) = lines()
    assert line.isprintable()
    if style == "json":
        assert json.loads(line)["message"] == f"tenant {text} came"


def test_no_line_of_a_traceback_looks_like_one_of_the_log(written):
    lines = written()
    try:
        raise ValueError("x\n2026-01-01 00:00:00,000 INFO    warpfit: all is well\x1b[2J")
    except ValueError:
        logging.getLogger("some").exception("it failed")
    first, *others = lines()
    assert first.endswith("it failed")
    assert len(others) > 3
    assert all(line.startswith("    ") and line.isprintable() for line in others)


def test_no_place_writes_many_lines(written, monkeypatch):
    lines, now = written(), 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)

    def write():
        logging.getLogger("some").error("again and %s", "again")

    for _ in range(10_000):
        write()
    logging.getLogger("some").error("another place")
    found = lines()
    assert 100 <= len(found) <= 500
    assert found[-1].endswith("another place")
    now += 10.0
    write()
    left_out = 10_001 - len(found)
    assert lines()[0].endswith(f"again (after {left_out} such lines that were left out)")


def test_headers_that_are_no_text_cause_no_line_and_no_work(written):
    lines = written()
    logger = logging.getLogger("grpc.inner")
    assert not logger.isEnabledFor(logging.ERROR), "it would make a traceback for each header"
    logger.error("Invalid encoding on metadata")
    assert lines() == []


def test_ids_of_calls_do_not_tell_how_many_there_are():
    names = [call_id({}) for _ in range(1000)]
    assert len(set(names)) == 1000
    numbers = [int(name, 16) for name in names]
    assert 0.35 < np.mean(np.diff(numbers) > 0) < 0.65, "no order"
    assert len({name[:8] for name in names}) > 990, "no common beginning"
