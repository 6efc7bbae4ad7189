"""Measurements of requests and of GPUs, and spans."""

import math
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from warpfit.request import Timings
from warpfit_server import metrics
from warpfit_server.metrics import gpu_usages
from warpfit_server.observability.records import (
    BUCKET_BOUNDS,
    CallRecord,
    MetricsDelta,
    Recorder,
    SpanTracer,
    make_tracer,
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
    assert got.histograms.keys() == expected.histograms.keys()
    for series, histogram in expected.histograms.items():
        assert got.histograms[series].buckets == histogram.buckets
        assert got.histograms[series].seconds == pytest.approx(histogram.seconds)
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
    (histogram,) = delta.histograms.values()
    (index,) = np.flatnonzero(histogram.buckets)
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


# --------------------------------------------------------------------------------------------- GPUs


class NvmlError(Exception):
    pass


def fake_nvml():
    """As much of pynvml as is used, with two GPUs."""

    def by_index(index):
        if index > 1:
            raise NvmlError("no such GPU")
        return index

    return SimpleNamespace(
        NVMLError=NvmlError,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=by_index,
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


# -------------------------------------------------------------------------------------------- spans


def test_a_call_is_a_child_of_the_callers_span_and_has_its_stages_as_children():
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    now = time.monotonic_ns()
    record = CallRecord(
        *("Evaluate", "call-1", now - 9_000_000, "alice"),
        metadata={"traceparent": f"00-{trace}-{parent}-01"},
        timings=Timings(decode=1_000_000, queue=2_000_000, compute=3_000_000),
        finished=now - 1_000_000,
        encode=500_000,
        status="OK",
        ended=now,
    )
    SpanTracer(provider).record(record)
    *stages, call = exporter.get_finished_spans()
    assert call.name == "warpfit.v1.Evaluator/Evaluate"
    assert format(call.context.trace_id, "032x") == trace
    assert format(call.parent.span_id, "016x") == parent
    assert call.attributes["warpfit.request_id"] == "call-1"
    assert {"warpfit.tenant", "warpfit.programs", "warpfit.tokens"} <= set(call.attributes)
    assert call.end_time - call.start_time == 9_000_000
    assert [stage.name for stage in stages] == ["decode", "queue", "copy", "kernel", "encode"]
    for earlier, later in pairwise(stages):
        assert earlier.end_time == later.start_time
    assert all(stage.parent.span_id == call.context.span_id for stage in stages)
    assert all(call.start_time <= s.start_time <= s.end_time <= call.end_time for s in stages)


def test_tracing_is_off_by_default():
    assert make_tracer({}) is None
    assert make_tracer({"OTEL_TRACES_EXPORTER": "none"}) is None


def test_the_log_names_the_extra_that_is_missing(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    assert make_tracer({"OTEL_TRACES_EXPORTER": "otlp"}) is None
    assert "warpfit[tracing]" in caplog.text
