"""Log lines of calls, the port of the metrics, and what is measured."""

import http.client
import json
import logging
import math
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from support.servers.server import eventually
from warpfit.errors import UnavailableError
from warpfit.request import Timings
from warpfit_server import logs, metrics
from warpfit_server.metrics import MetricsPort, gpu_usages

PAUSES = st.lists(st.floats(0, 5, allow_nan=False), min_size=1, max_size=300)


@given(st.integers(1, 20), st.sampled_from([0.5, 1.0, 8.0]), PAUSES)
def test_lines_keep_to_the_rate_and_left_out_ones_are_counted(burst, rate, pauses):
    limiter, now, written, counted, left_out = logs.LogRateLimiter(burst, rate), 1000.0, [], 0, 0
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


def test_the_next_line_says_how_many_were_left_out(caplog, monkeypatch):
    caplog.set_level(logging.INFO, "warpfit.requests")
    observer, now = logs.Observer(SimpleNamespace(begin=None, end=lambda call: None)), 0
    monkeypatch.setattr("time.monotonic_ns", lambda: now)
    for number in range(138):
        now = 1_500_000_000 * (number // 137)
        observer.end(logs.CallRecord("Evaluate", "id", 0, "alice"), "INVALID_ARGUMENT")
    last = caplog.records[-1]
    told = "after 1.500 s, after 37 failed calls of tenant alice without a line"
    assert last.getMessage().endswith(told)
    assert last.fields["left_out"] == 37
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


@pytest.mark.parametrize("style", ["text", "json"])
@given(
    st.text(st.sampled_from("\n\r\x0b\x0c\x1b\x85\u2028\u202e\ud800\x00\x7f\x9ba "), max_size=20)
    | st.text(max_size=20)
)
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


SERIES = 10_000


class Page(Collector):
    is_broken = False

    def collect(self):
        if self.is_broken:
            raise RuntimeError("no metrics")
        family = GaugeMetricFamily("warpfit_ready", "Whether it is", labels=("number",))
        for number in range(SERIES):
            family.add_metric((str(number),), 1.0)
        yield family


@pytest.fixture(scope="module")
def port():
    made = MetricsPort(Page(), "127.0.0.1", 0)
    yield made.port
    made.stop()


def request(port, method="GET", path="/metrics"):
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read()


def is_whole(answer):
    return answer[0] == 200 and answer[1].count(b"\nwarpfit_ready{") == SERIES


def connect(port):
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def test_the_page(port, monkeypatch):
    assert is_whole(request(port, path="/metrics?time=1"))
    assert request(port, "POST")[0] == 405
    monkeypatch.setattr(Page, "is_broken", True)
    assert request(port)[0] == 500
    monkeypatch.undo()
    assert is_whole(request(port))


@pytest.mark.parametrize("sent", [b"", b"\0" * 100 + b"\r\n\r\n", b"GET /metrics", b"x" * 2**20])
def test_whatever_is_sent_the_port_lives_on(port, sent):
    with connect(port) as client, suppress(OSError):  # it closes the connection
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        client.recv(1 << 16)
    assert is_whole(request(port))


@pytest.mark.thorough
def test_many_silent_connections_cost_few_threads_and_keep_nobody_out(port):
    before = threading.active_count()
    with ExitStack() as stack, suppress(ConnectionResetError):
        clients = [stack.enter_context(connect(port)) for _ in range(100)]
        assert is_whole(request(port))
        eventually(lambda: threading.active_count() <= before + metrics._MOST_CONNECTIONS, 10)
        assert clients[0].recv(1) == b""  # it made room


def test_a_silent_client_and_one_that_takes_no_answer_are_cut_off(port, monkeypatch):
    monkeypatch.setattr(metrics._Handler, "timeout", 0.3)
    before = threading.active_count()
    with connect(port) as silent, connect(port) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.sendall(b"GET /metrics HTTP/1.1\r\n\r\n" * 100)
        assert silent.recv(1) == b""
        eventually(lambda: threading.active_count() <= before, 10)


@pytest.mark.parametrize("host", ["nohost.invalid", "x" * 300, "203.0.113.1"])
def test_a_host_that_is_none_of_this_machine_is_an_error(host):
    with pytest.raises(UnavailableError, match="--metrics-port"):
        MetricsPort(Page(), host, 0)


SECONDS = st.floats(0, 1000, allow_nan=False)
LABELS = ("Evaluate", "OK", "a")
TIMINGS = Timings(1, 2, 1, 4, 2, tier="cpu", cache_hits=1)


def ended(tenant="a", seconds=0.1, **measured):
    own = {"status": "OK", "ended": int(1e9 * seconds)}
    return logs.CallRecord("Evaluate", "", 0, tenant, **own, **measured)


@given(st.lists(st.tuples(st.sampled_from("ab"), SECONDS, st.booleans())), st.integers(0, 5))
def test_nothing_is_lost_or_doubled_on_the_way_to_the_main_process(observed, cut):
    single, main, front_end = logs.Recorder(), logs.Recorder(), logs.Recorder()
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
    assert got.histograms.keys() == expected.histograms.keys()
    for series, histogram in expected.histograms.items():
        assert got.histograms[series].buckets == histogram.buckets
        assert got.histograms[series].seconds == pytest.approx(histogram.seconds)
    calls = expected.counts.get(("requests", LABELS), 0)
    assert calls == sum(tenant == "a" for tenant, _, _ in observed)
    assert got.in_flight == 0


def test_calls_that_end_in_many_threads_are_all_counted():
    recorder, call = logs.Recorder(), ended()

    def work(_):
        for _ in range(2000):
            recorder.begin(call)
            recorder.end(call)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    totals = recorder.totals()
    assert (totals.counts, totals.in_flight) == ({("requests", LABELS): 8000.0}, 0)


def test_calls_of_a_process_that_died_are_not_in_flight():
    recorder = logs.Recorder()
    recorder.begin(ended())
    for process, count in ((7, 3), (8, 1)):
        recorder.add(process, logs.MetricsDelta(in_flight=count))
    assert recorder.totals().in_flight == 5
    recorder.forget(7)
    assert recorder.totals().in_flight == 2


def fake_nvml():
    return SimpleNamespace(
        NVMLError=LookupError,  # of what is not there
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=[0, 1].__getitem__,
        nvmlDeviceGetHandleByUUID={"GPU-a": 0, "GPU-b": 1}.__getitem__,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=100 + handle, total=1000),
        nvmlDeviceGetIndex=lambda handle: handle,
        nvmlDeviceGetName=lambda handle: "GPU",
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=25),
    )


@pytest.mark.parametrize(
    ("visible", "gpus"), [(None, "01"), ("1", "1"), ("GPU-b, 0", "10"), ("", ""), ("5", "")]
)
def test_only_visible_gpus_are_read(monkeypatch, visible, gpus):
    monkeypatch.setattr(metrics, "_library", fake_nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    usages = gpu_usages()
    assert [usage.gpu for usage in usages] == list(gpus)
    assert all(usage.memory_used == 100 + int(usage.gpu) for usage in usages)
    assert all(usage.utilisation == 0.25 for usage in usages)


def test_a_call_is_a_child_of_the_callers_span_and_has_its_stages_as_children():
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    now = time.monotonic_ns()
    record = logs.CallRecord(
        *("Evaluate", "call-1", now - 9_000_000, "alice"),
        metadata={"traceparent": f"00-{trace}-{parent}-01"},
        timings=Timings(decode=1_000_000, queue=2_000_000, compute=3_000_000),
        finished=now - 1_000_000,
        encode=500_000,
        status="OK",
        ended=now,
    )
    logs.SpanTracer(provider).record(record)
    *stages, call = exporter.get_finished_spans()
    assert call.name == "warpfit.v1.Evaluator/Evaluate"
    assert (call.context.trace_id, call.parent.span_id) == (int(trace, 16), int(parent, 16))
    assert call.attributes["warpfit.request_id"] == "call-1"
    assert {"warpfit.tenant", "warpfit.programs", "warpfit.tokens"} <= set(call.attributes)
    assert call.end_time - call.start_time == 9_000_000
    assert [stage.name for stage in stages] == ["decode", "queue", "copy", "kernel", "encode"]
    for earlier, later in pairwise(stages):
        assert earlier.end_time == later.start_time
    assert all(stage.parent.span_id == call.context.span_id for stage in stages)
    assert all(call.start_time <= s.start_time <= s.end_time <= call.end_time for s in stages)


def test_the_log_names_the_extra_that_is_missing(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    assert logs.make_tracer({"OTEL_TRACES_EXPORTER": "otlp"}) is None
    assert "warpfit[tracing]" in caplog.text


def test_headers_that_are_no_text_cause_no_line_and_no_work(written):
    lines = written()
    logger = logging.getLogger("grpc.inner")
    assert not logger.isEnabledFor(logging.ERROR), "it would make a traceback for each header"
    logger.error("Invalid encoding on metadata")
    assert lines() == []


@given(SECONDS)
def test_an_observation_falls_into_the_bucket_that_bounds_it(seconds):
    delta = logs.MetricsDelta()
    delta.observe("time", (), [seconds])
    (histogram,) = delta.histograms.values()
    (index,) = np.flatnonzero(histogram.buckets)
    assert seconds <= (*logs.BUCKET_BOUNDS, math.inf)[index]
    assert index == 0 or seconds > logs.BUCKET_BOUNDS[index - 1]
