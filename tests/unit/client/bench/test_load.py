"""The load generator against a server on loopback: above all nothing hides its stalls."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from support.servers.loopback import serve
from warpfit import testing
from warpfit.bench import callers
from warpfit.bench.callers import Load, arrivals, run_clients
from warpfit.bench.command import main
from warpfit.bench.load import summarise_calls
from warpfit.bench.scenarios import Scenario
from warpfit.errors import InvalidArgumentError

SCENARIO = Scenario(engine="remote", rows=20, expressions=2)


class Stalling(testing.InProcessServer):
    """Answers nothing for a while, once, from its ``begin``-th evaluation on."""

    def __init__(self, begin, seconds):
        super().__init__()
        self._begin, self._seconds = begin, seconds
        self._count = 0
        self._lock = threading.Lock()

    def answer(self, call):
        with self._lock:
            self._count += call.method == "Evaluate"
            if call.method == "Evaluate" and self._count == self._begin:
                time.sleep(self._seconds)
        return super().answer(call)


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    """Run clients in this process."""

    class Pool:
        def __init__(self, count, context, initializer, arguments):
            initializer(*arguments)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def map(self, function, tasks, timeout):
            return [run_clients(task, threading.Barrier(1)) for task in tasks]

    monkeypatch.setattr(callers, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(callers, "_keep_barrier", lambda barrier: None)


def load(address, **changes):
    usual = {"scenario": SCENARIO, "rate": 100.0, "seconds": 1.0, "timeout": 60.0, "clients": 2}
    return Load(address=address, **{**usual, "processes": 1, **changes})


def test_a_stall_shows_in_the_percentiles():
    """While the server stalls for 0.5 s, half of the calls of a second become due and must wait."""
    with serve(Stalling(begin=20, seconds=0.5)) as (address, _):
        asked = load(address)
        outcomes = asked.perform()
    found = summarise_calls(outcomes, asked)
    assert found["calls"] == len(arrivals(100.0, 1.0, 0.0, 1))
    assert found["failed"] == {}
    # A quarter of all calls were due more than 0.25 s before the stall ended, but only those in
    # flight, one for each client, took that long from sending.
    waited = sum(outcome.done - outcome.due > 0.25 for outcome in outcomes)
    served = sum(outcome.done - outcome.sent > 0.25 for outcome in outcomes)
    assert waited >= 15
    assert served < waited / 2
    assert found["latency"]["p90"] > 0.2
    assert found["latency"]["greatest"] >= 0.4
    assert found["late"] > 0.2


def test_what_could_not_be_sent_counts_as_slow_and_failed():
    with serve(Stalling(begin=5, seconds=1.6)) as (address, _):
        asked = load(address, seconds=0.5, timeout=0.5, clients=1)
        found = summarise_calls(asked.perform(), asked)
    assert found["failed"]["NOT_SENT"] > 20
    assert found["latency"]["p50"] > 0.4


def test_calls_of_the_ramp_are_not_counted():
    with serve(testing.InProcessServer()) as (address, _):
        asked = load(address, ramp=0.4, seconds=0.2)
        outcomes = asked.perform()
    assert 0 < summarise_calls(outcomes, asked)["calls"] < len(outcomes)


@pytest.mark.parametrize("calls", ["losses", "values", "gradients", "fits"])
def test_all_kinds_of_calls_are_answered(calls, capsys):
    with serve(testing.InProcessServer()) as (address, _):
        words = ["--concurrency", "2", "--seconds", "0.1", "--rows", "20", "--expressions", "2"]
        assert main(["load", address, "--calls", calls, *words]) == 0
    assert "failed" not in capsys.readouterr().out


@pytest.mark.parametrize(("rate", "seconds", "ramp"), [(1000, 1.0, 1.0), (50, 3.0, 0.0)])
def test_the_rate_of_arrivals_grows_during_the_ramp(rate, seconds, ramp):
    moments = arrivals(rate, seconds, ramp, seed=1)
    assert np.all(np.diff(moments) >= 0)
    steady = (moments >= ramp).sum()
    assert steady == pytest.approx(rate * seconds, abs=4 * np.sqrt(rate * seconds))
    early, late = (moments < ramp / 2).sum(), ((moments >= ramp / 2) & (moments < ramp)).sum()
    assert late == pytest.approx(3 * early, abs=4 * np.sqrt(rate * ramp))
    assert moments[-1] <= ramp + seconds


@pytest.mark.parametrize("words", [["--rate", "-1"], ["--rate", "5", "--clients", "0"]])
def test_a_load_must_be_positive(words):
    with pytest.raises(InvalidArgumentError):
        main(["load", "127.0.0.1:1", *words])
