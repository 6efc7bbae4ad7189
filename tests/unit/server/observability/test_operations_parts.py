"""Measurements, watchdog, overseer, traces, GPU figures and scrapes, without processes."""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from warpfit.cli.prometheus_reader import Change, Scrape
from warpfit.errors import ResourceExhaustedError, UnavailableError
from warpfit.request import Timings
from warpfit_server.config import Config
from warpfit_server.data.dataset_store import StoreUsage
from warpfit_server.engine.hang_detector import EXIT_STUCK
from warpfit_server.engine.interface import COUNTERS as ENGINE_COUNTERS
from warpfit_server.ipc.quarantine import Quarantine
from warpfit_server.metrics import ServerCollector
from warpfit_server.observability import gpu_monitor
from warpfit_server.observability.calls import CallRecord
from warpfit_server.observability.gpu_monitor import GpuMonitor, GpuUsage
from warpfit_server.observability.measurements import (
    BUCKET_BOUNDS,
    CallMeasurement,
    MetricsDelta,
    Recorder,
)
from warpfit_server.observability.tracing import SpanTracer, make_tracer
from warpfit_server.processes.engine_supervisor import cause_of_death
from warpfit_server.processes.front_end_supervisor import FrontEndSupervisor, _FrontEnd
from warpfit_server.processes.watchdog import Watchdog
from warpfit_server.rpc.health import Health

SECONDS = st.floats(0, 1000, allow_nan=False)


class TestMeasurements:
    @given(st.lists(st.tuples(st.sampled_from("ab"), SECONDS, st.booleans())), st.integers(0, 5))
    def test_parts_add_up_to_the_whole(self, observed, cut):
        """Whatever is taken out in between and added elsewhere, nothing is lost or doubled."""
        one, front, door = Recorder(), Recorder(), Recorder()
        for number, (tenant, seconds, answered) in enumerate(observed):
            engine = (2, 3, 4, "cpu", 1, (1, 2, 3, 4, 5)) if answered else ()
            sample = CallMeasurement(
                ("Evaluate", "OK", tenant), seconds, 10 * (number % 3), *engine
            )
            for recorder in (one, front if number % 2 else door):
                recorder.begin(number)
                recorder.end(number, sample)
            if number % 6 == cut:
                front.add(7, door.take())
        front.add(7, door.take())
        expected, got = one.totals(), front.totals()
        assert got.counts == expected.counts
        assert got.buckets.keys() == expected.buckets.keys()
        for series, row in expected.buckets.items():
            assert got.buckets[series] == pytest.approx(row)
        calls = expected.counts.get(("requests", ("Evaluate", "OK", "a")), 0)
        assert calls == sum(tenant == "a" for tenant, _, _ in observed)
        assert got.in_flight == 0

    def test_calls_that_end_in_many_threads_are_all_counted(self):
        recorder = Recorder()

        def work(thread):
            for number in range(2000):
                recorder.begin((thread, number))
                recorder.end((thread, number), CallMeasurement(("Evaluate", "OK", "a"), 0.1))

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        totals = recorder.totals()
        assert totals.counts == {("requests", ("Evaluate", "OK", "a")): 8000.0}
        assert totals.in_flight == 0

    @given(SECONDS)
    def test_an_observation_falls_into_the_bucket_that_bounds_it(self, seconds):
        delta = MetricsDelta()
        delta.observe("time", (), [seconds])
        (row,) = delta.buckets.values()
        (index,) = np.flatnonzero(row[:-1])
        bounds = (*BUCKET_BOUNDS, math.inf)
        assert seconds <= bounds[index]
        assert index == 0 or seconds > bounds[index - 1]

    def test_a_message_is_bounded_and_what_is_left_comes_later(self):
        recorder = Recorder()
        for number in range(1200):
            recorder.end(number, CallMeasurement(("Evaluate", "OK", str(number)), 0.0))
        sizes = []
        while counts := recorder.take().counts:
            sizes.append(len(counts))
        assert sum(sizes) == 1200
        assert max(sizes) <= 500

    def test_calls_of_a_process_that_died_are_not_in_flight(self):
        recorder = Recorder()
        recorder.begin("call")
        recorder.add(7, MetricsDelta(in_flight=3))
        recorder.add(8, MetricsDelta(in_flight=1))
        assert recorder.totals().in_flight == 5
        recorder.forget(7)
        assert recorder.totals().in_flight == 2


class TestTracing:
    def test_a_call_is_a_span_with_its_stages_below_the_callers(self):
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
        )
        SpanTracer(provider).record(record, "OK", now)
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

    def test_it_is_off_by_default(self):
        assert make_tracer(Config().tracing) is None

    def test_it_says_what_is_missing(self, monkeypatch):
        monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
        with pytest.raises(UnavailableError, match=r"warpfit\[tracing\]"):
            make_tracer("otlp")


def test_nothing_is_left_of_a_lease_that_ended():
    door, ended = _FrontEnd(None, None), []
    for number in (1, 2):
        lease = ExitStack()
        lease.callback(ended.append, number)
        door.leases.setdefault(b"data", []).append(lease)
    door.end_lease(b"data")
    assert len(ended) == 1
    door.end_lease(b"data")
    assert len(ended) == 2
    assert not door.leases


class TestHealth:
    def test_changes_are_told_once_and_draining_is_final(self):
        told = []
        health = Health("service", told.append)
        for ready in (False, True, True, False, True):
            health.set_ready(ready)
        assert told == [True, False, True]
        health.drain()
        health.set_ready(True)
        assert told == [True, False, True, False]
        assert not health.ready


class TestWatchdog:
    """The thread that looks at the clock, with a clock of our own."""

    def make(self, starting_since=None):
        replaced = []
        supervisor = SimpleNamespace(starting_since=starting_since, replace=replaced.append)
        health = Health("service")
        health.set_ready(True)
        config = Config(probe_timeout=3.0, hang_seconds=10.0, start_seconds=60.0)
        self.others_answer = True
        watchdog = Watchdog(config, supervisor, None, health, lambda: self.others_answer)
        watchdog.answers = True
        return watchdog, health, replaced

    def test_a_question_without_an_answer(self):
        watchdog, health, replaced = self.make()
        watchdog._asked = 100.0
        watchdog.look(102.9)
        assert health.ready
        watchdog.look(103.1)
        assert not health.ready
        assert not replaced
        for now in (110.1, 110.2, 120.0):
            watchdog.look(now)
        assert replaced == ["hung"]  # once

    def test_a_start_that_takes_too_long(self):
        watchdog, _, replaced = self.make(starting_since=100.0)
        watchdog.look(159.0)
        assert not replaced
        watchdog.look(161.0)
        watchdog.look(162.0)
        assert replaced == ["slow_start"]

    def test_a_wrong_answer(self):
        watchdog, health, replaced = self.make()
        watchdog._probe = SimpleNamespace(ask=lambda: False)
        watchdog._ask()
        assert not health.ready
        assert replaced == ["wrong_answer"]

    def test_no_answer_and_then_one(self):
        watchdog, health, replaced = self.make()

        def refuse():
            raise UnavailableError("the engine is restarting")

        watchdog._probe = SimpleNamespace(ask=refuse)
        watchdog._ask()
        assert not health.ready
        watchdog._probe = SimpleNamespace(ask=lambda: True)
        watchdog._ask()
        assert health.ready
        assert not replaced

    def test_probes_that_fail_at_once_for_long_although_there_is_an_engine(self):
        watchdog, health, replaced = self.make()

        def fail():
            raise UnavailableError("the connection was lost")

        watchdog._probe = SimpleNamespace(ask=fail)
        watchdog._ask()
        failing = watchdog._failing
        watchdog._ask()
        watchdog.look(failing + 9.0)
        assert not replaced
        watchdog.look(failing + 10.1)
        watchdog.look(failing + 10.2)
        assert replaced == ["no_answer"]
        assert not health.ready
        watchdog.engine_ready()
        assert watchdog._failing is None

    @pytest.mark.parametrize("error", [ResourceExhaustedError("no files"), OSError("no files")])
    def test_a_process_that_lacks_something_does_not_kill_the_engine_for_it(self, error):
        watchdog, health, replaced = self.make()

        def fail():
            raise error

        watchdog._probe = SimpleNamespace(ask=fail)
        watchdog._ask()
        watchdog.look(1e12)
        assert not health.ready
        assert replaced == ([] if isinstance(error, ResourceExhaustedError) else ["no_answer"])

    def test_it_is_ready_only_when_every_process_answers(self):
        watchdog, health, _ = self.make()
        watchdog._probe = SimpleNamespace(ask=lambda: True)
        self.others_answer = False
        watchdog._ask()
        assert not health.ready
        self.others_answer = True
        watchdog.look(0.0)
        assert health.ready


class TestFrontEndSupervisor:
    def make(self):
        config = Config(probe_seconds=2.0, probe_timeout=3.0, hang_seconds=10.0)
        supervisor = SimpleNamespace(quarantine=Quarantine())
        doors, killed = FrontEndSupervisor(config, supervisor, None, None, None), []
        process = SimpleNamespace(pid=7, kill=lambda: killed.append(True))
        door = _FrontEnd(process, None)
        door.serving.set()
        doors._front_ends.append(door)
        return doors, door, killed

    def test_a_door_answers_from_its_first_right_probe_until_it_has_none_for_long(self):
        doors, door, _ = self.make()
        assert not doors.answer()
        door.answers, door.probed = True, time.monotonic()
        assert doors.answer()
        door.probed -= 6.0
        assert not doors.answer()

    def test_a_door_that_does_not_reach_an_engine_that_answers_others_is_replaced(self):
        doors, door, killed = self.make()
        door.answered -= 11.0
        doors.kill_silent(engine_answers=False)
        assert not killed
        doors.kill_silent(engine_answers=True)
        assert killed


@pytest.mark.parametrize(
    ("code", "cause"),
    [(-9, "SIGKILL"), (-11, "SIGSEGV"), (EXIT_STUCK, "stuck"), (4, "broken"), (1, "exit 1")],
)
def test_cause_of_death(code, cause):
    assert cause_of_death(code) == cause


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
def test_gpus_that_are_visible(monkeypatch, visible, gpus):
    monkeypatch.setattr(gpu_monitor, "_library", fake_nvml)
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    usages = GpuMonitor(environment).usage()
    assert [usage.gpu for usage in usages] == list(gpus)
    assert all(usage.memory_used == 100 + int(usage.gpu) for usage in usages)
    assert all(usage.utilisation == 0.25 for usage in usages)


def page(counters, usages=()):
    """The metrics of a server that has done nothing, as text."""
    collector = ServerCollector(
        recorder=Recorder(),
        supervisor=SimpleNamespace(engine="cuda", restarts={"hung": 2}, counters=counters),
        datasets=SimpleNamespace(usage=lambda: StoreUsage(1, 100, 3)),
        health=Health("service"),
        resident_limit=1000,
        processes=lambda: {"engine": 2**22 + 1},  # no such process
        probe_seconds=lambda: 0.5,
        gpus=SimpleNamespace(usage=lambda: list(usages)),
    )
    return collector.render("")[1].decode()


def test_figures_of_a_gpu_engine_become_metrics():
    counters = {name: float(number) for number, name in enumerate(ENGINE_COUNTERS)}
    text = page(counters, [GpuUsage("0", "H200", 7, 9, 0.5)])
    assert 'warpfit_gpu_memory_used_bytes{gpu="0",name="H200"} 7.0' in text
    assert 'warpfit_engine_restarts_total{cause="hung"} 2.0' in text
    for cache in ("module", "disk"):
        for event in ("hits", "misses", "evictions", "damaged"):
            value = counters[f"{cache}_cache_{event}"]
            assert f'warpfit_cache_{event}_total{{cache="{cache}"}} {value}' in text
        assert f'warpfit_cache_bytes{{cache="{cache}"}}' in text


def test_figures_of_the_kernel_store(tmp_path):
    kernels = pytest.importorskip("warpfit_server.engine.cuda.jit.kernel_store")
    store = kernels.KernelStore(SimpleNamespace(cache_directory=tmp_path), threads=1)
    try:
        assert store.lease([object()]) is None
        assert store.disk.get("00ff") is None
        figures = store.counters()
    finally:
        store.close()
    assert set(figures) <= set(ENGINE_COUNTERS)
    assert figures["module_cache_misses"] == figures["disk_cache_misses"] == 1


class TestScrape:
    def make(self, moment, **samples):
        known = {(name, frozenset()): value for name, value in samples.items()}
        return Scrape(moment, known)

    def test_rates_survive_a_restart_of_the_server(self):
        change = Change(self.make(10.0, calls=100.0), self.make(12.0, calls=110.0))
        assert change.rate("calls") == 5.0
        change = Change(self.make(10.0, calls=100.0), self.make(12.0, calls=8.0))
        assert change.rate("calls") == 4.0

    @given(st.lists(st.floats(1e-5, 90), min_size=1, max_size=200), st.floats(0.01, 1))
    def test_quantiles_are_in_the_right_bucket(self, values, share):
        recorder = Recorder()
        for value in values:
            recorder.end(value, CallMeasurement(("Evaluate", "OK", "a"), value))
        (row,) = recorder.totals().buckets.values()
        cumulative = np.cumsum(row[:-1])
        labels = [str(bound) for bound in BUCKET_BOUNDS] + ["+Inf"]
        after = {
            ("time_bucket", frozenset({("le", le)})): count
            for le, count in zip(labels, cumulative, strict=True)
        }
        empty = dict.fromkeys(after, 0.0)
        got = Change(Scrape(0.0, empty), Scrape(1.0, after)).quantile(share, "time")
        exact = sorted(values)[math.ceil(share * len(values)) - 1]
        index = np.searchsorted(BUCKET_BOUNDS, exact)
        assert (BUCKET_BOUNDS[index - 1] if index else 0) <= got <= BUCKET_BOUNDS[index]

    def test_without_observations_there_is_no_quantile(self):
        nothing = Scrape(0.0, {})
        assert Change(nothing, nothing).quantile(0.5, "time") is None
        assert Change(nothing, nothing).mean("time") is None
