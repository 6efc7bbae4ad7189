"""Traces of calls."""

import sys
import time
from itertools import pairwise

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from warpfit.errors import UnavailableError
from warpfit.request import Timings
from warpfit_server.config import Config
from warpfit_server.observability.records import CallRecord, SpanTracer, make_tracer


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
    assert make_tracer(Config().tracing) is None


def test_the_error_names_the_extra_that_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(UnavailableError, match=r"warpfit\[tracing\]"):
        make_tracer("otlp")
