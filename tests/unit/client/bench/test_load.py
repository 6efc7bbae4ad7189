"""The load generator against a server on loopback, above all that nothing hides its stalls."""

from __future__ import annotations

import json
import threading
import time

import numpy as np
import pytest

from support.servers.loopback import serve
from warpfit import testing
from warpfit.bench import load as loads
from warpfit.bench.calls import Callers, Outcome, of_kind
from warpfit.bench.command import main
from warpfit.bench.load import Load, Objective, meets, perform, search, summarise_calls
from warpfit.bench.scenarios import Kind, Scenario
from warpfit.errors import InvalidArgumentError

SCENARIO = Scenario(engine="remote", rows=20, expressions=2)


class InThisProcess:
    """Performs tasks without starting processes."""

    count = 1

    def perform(self, tasks, seconds):
        return [task.perform(time.monotonic) for task in tasks]


class Stalling(testing.InProcessServer):
    """Answers no evaluation for a while, once, from its ``begin``-th evaluation on."""

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
        super().answer(call)


def load(address, **changes):
    usual = {"scenario": SCENARIO, "mix": {"losses": 1.0}, "rate": 100.0, "seconds": 1.0}
    usual["timeout"] = 60.0
    return Load(address=address, **{**usual, "clients": 2, "arrivals": "even", **changes})


def test_a_stall_shows_in_the_percentiles():
    """While the server stalls for 0.5 s, half of the calls of a second become due and must wait."""
    with serve(Stalling(begin=20, seconds=0.5)) as (address, _):
        asked = load(address)
        outcomes = perform(asked, InThisProcess())
    found = summarise_calls(outcomes, asked)
    assert found["calls"] == 100
    assert found["failed"] == {}
    # A quarter of all calls were due more than 0.25 s before the stall ended, but only those in
    # flight, one for each client, took that long from sending.
    waited = sum(outcome.done - outcome.due > 0.25 for outcome in outcomes)
    served = sum(outcome.done - outcome.sent > 0.25 for outcome in outcomes)
    assert waited >= 24
    assert served < waited / 2
    assert found["latency"]["p90"] > 0.25
    assert found["latency"]["greatest"] >= 0.45
    assert found["late"] > 0.2


def test_clients_without_a_timetable_hide_the_same_stall():
    with serve(Stalling(begin=20, seconds=0.5)) as (address, _):
        asked = load(address, rate=None)
        outcomes = perform(asked, InThisProcess())
    assert len(outcomes) > 20
    assert sum(outcome.done - outcome.due > 0.25 for outcome in outcomes) < 0.24 * len(outcomes)
    assert summarise_calls(outcomes, asked)["rate"] is None


def test_what_could_not_be_sent_counts_as_slow_and_failed():
    with serve(Stalling(begin=5, seconds=1.6)) as (address, _):
        asked = load(address, seconds=0.5, timeout=0.5, clients=1)
        outcomes = perform(asked, InThisProcess())
    found = summarise_calls(outcomes, asked)
    assert found["calls"] == 50
    assert found["failed"]["NOT_SENT"] > 30
    assert found["latency"]["p50"] > 0.4
    assert not meets(outcomes, asked, Objective(50, 10.0))


def test_calls_of_the_ramp_are_not_counted():
    with serve(testing.InProcessServer()) as (address, _):
        asked = load(address, ramp=0.4, seconds=0.2)
        outcomes = perform(asked, InThisProcess())
    assert len(outcomes) == 40
    assert summarise_calls(outcomes, asked)["calls"] == 20


def test_a_mix_has_its_shares():
    with serve(testing.InProcessServer()) as (address, _):
        mix = {"losses": 3.0, "values": 1.0, "fits": 1.0, "gradients": 1.0}
        asked = load(address, mix=mix, rate=60.0, seconds=0.3, clients=4)
        assert not any(outcome.error for outcome in perform(asked, InThisProcess()))
        kinds = asked.tasks(1)[0]._kinds()
    assert kinds.count("losses") / len(kinds) == pytest.approx(0.5, abs=0.06)
    assert of_kind(SCENARIO, "fits").kind is Kind.OPTIMIZE
    assert of_kind(SCENARIO, "values").output == "values"


def test_the_timetable_is_dealt_out_to_processes():
    asked = load("127.0.0.1:1", clients=5)
    tasks = asked.tasks(3)
    assert [task.clients for task in tasks] == [2, 2, 1]
    due = np.sort(np.concatenate([task.due for task in tasks]))
    assert np.array_equal(due, load("127.0.0.1:1").tasks(1)[0].due)
    assert all(isinstance(task, Callers) for task in tasks)


# --------------------------------------------------------------------------------------- search


class Modelled:
    """Calls take 1 ms up to a rate of 100 a second, and 50 ms beyond."""

    count = 1

    def perform(self, tasks, seconds):
        (task,) = tasks
        if task.due is None:
            return [[Outcome(t, t, t + 0.001, "") for t in np.arange(0.0, 1.0, 1 / 300)]]
        rate = len(task.due) / 1.0
        took = 0.001 if rate <= 100 else 0.05
        return [[Outcome(t, t, t + took, "") for t in task.due.tolist()]]


def test_the_search_finds_the_rate():
    said = []
    found = search(load("x:1", ramp=0.0), Modelled(), Objective(99, 0.02), said.append)
    assert found["highest_rate"] == pytest.approx(100, rel=0.07)
    assert found["without_a_pause"] == pytest.approx(300, rel=0.01)
    assert {trial["met"] for trial in found["trials"]} == {True, False}
    assert len(said) == len(found["trials"]) + 1


def test_a_search_ends_where_no_rate_is_slow_enough():
    found = search(load("x:1", ramp=0.0), Modelled(), Objective(99, 0.0001), lambda text: None)
    assert found["highest_rate"] == 0.0


@pytest.mark.parametrize(
    ("text", "expected"), [("p99=20ms", (99.0, 0.02)), ("p99.9=0.5s", (99.9, 0.5))]
)
def test_objectives_are_read(text, expected):
    found = Objective.parse(text)
    assert (found.percent, found.seconds) == pytest.approx(expected)


# -------------------------------------------------------------------------------------- command


def test_the_command_prints_percentiles_and_writes_them(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(loads, "processes", lambda count: _Entered())
    with serve(testing.InProcessServer()) as (address, _):
        words = ["load", address, "--rate", "200", "--seconds", "0.5", "--ramp", "0"]
        words += ["--rows", "20", "--expressions", "2", "--out", str(tmp_path / "load.json")]
        assert main(words) == 0
    out = capsys.readouterr().out
    assert "200 calls/s asked" in out
    assert "as due" in out
    assert json.loads((tmp_path / "load.json").read_text())["latency"]["p50"] > 0


class _Entered:
    def __enter__(self):
        return InThisProcess()

    def __exit__(self, *_):
        return None


@pytest.mark.parametrize(
    "words",
    [
        ["--slo", "p99"],
        ["--slo", "p100=1s"],
        ["--mix", "losses=x"],
        ["--mix", "else=1"],
        ["--rate", "1", "--concurrency", "2"],
    ],
)
def test_flags_that_make_no_sense_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        main(["load", "127.0.0.1:1", *words])
    assert "usage" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["--rate", "-1"], ["--rate", "5", "--clients", "0"]])
def test_a_load_must_be_positive(words):
    with pytest.raises(InvalidArgumentError):
        main(["load", "127.0.0.1:1", *words])
