"""Runs of `warpfit bench` without a real server: results, resuming, time, failures, progress."""

from __future__ import annotations

import io
import itertools
import json
import math
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from support.servers.loopback import serve
from warpfit import codec, testing
from warpfit.bench import measure, peers, report, results, runner
from warpfit.bench.command import main
from warpfit.bench.progress import Pace, PlainProgress, progress
from warpfit.bench.results import Results
from warpfit.bench.runner import Clock, Plan, Run
from warpfit.bench.scenarios import TINY, Kind, Scenario
from warpfit.errors import InvalidArgumentError, UnavailableError
from warpfit.request import Tier, Timings
from warpfit.server_info import Device, Limits, ServerInfo

#: As little as a run can be.
SMALL = replace(
    TINY,
    rows=(20,),
    expressions=(2, 3),
    usual=4,
    mode_rows=(),
    output_rows=(20,),
    workers=(),
    peer_rows=(30,),
    slice_seconds=0.02,
    least_calls=3,
)
MACHINE = {"cpu": "made-up CPU", "cores": 1, "memory_gib": 1.0}
HEAD = {"schema": 1, "profile": "small", "seed": 5, "machine": MACHINE, "versions": {}}
HEAD |= {"servers": {}}
HEAD |= {"benchmark": results.BENCHMARK, "date": "2026-01-01", "address": None, "notes": []}


@pytest.fixture
def server(monkeypatch):
    """Every server that a run starts is one in this process."""

    @contextmanager
    def started(_address, arguments):
        if "cuda" in arguments:
            raise UnavailableError("no device here", "NO_CUDA")
        with serve(testing.InProcessServer()) as (address, _):
            yield address

    monkeypatch.setattr(runner, "server_at", started)
    monkeypatch.setattr(peers, "installed", lambda engine: (["NumPy"], {"other": "missing"}))


def run(path, profile=SMALL, engines=("cpu",), afresh=False, **others):
    found = Results.begin(path, {**HEAD, **others}, afresh=afresh)
    shown = io.StringIO()
    with progress(shown) as told:
        Run(Plan(profile=profile, engines=engines), found, told).perform()
    return json.loads(path.read_text()), shown.getvalue()


def test_a_run_measures_everything_and_says_so(tmp_path, server):
    document, shown = run(tmp_path / "a.json")
    kinds = [cell["scenario"]["kind"] for cell in document["cells"]]
    assert sorted(kinds) == ["evaluate"] * 5 + ["optimize", "peer"]
    assert document["complete"]
    assert [entry["key"] for entry in document["skipped"]] == ["peer/other"]
    assert set(document["load_average"]) == {"start", "end"}
    assert "[7/7, about 0 s left]" in shown
    (peer,) = [cell for cell in document["cells"] if "peer" in cell]
    assert peer["agreement"]["peer"] > 0.5
    assert peer["times_warpfit"] > 0


def test_cells_tell_stages_first_call_and_rates(tmp_path, server):
    document, _ = run(tmp_path / "a.json")
    cell = document["cells"][0]
    assert cell["first"]["wall"] > 0
    assert cell["stages"]["wall"] == pytest.approx(cell["wall"]["median"], rel=1e-3)
    assert cell["wall"]["n"] >= 3
    work = cell["tokens"] * cell["scenario"]["rows"]
    rate = cell["token_rows_per_second"]["wall"]
    assert rate == pytest.approx(work / cell["wall"]["median"], rel=1e-3)
    assert cell["roofline"]["operations"] > 0


def test_an_interrupted_run_keeps_what_is_done_and_continues(tmp_path, server, monkeypatch):
    path = tmp_path / "a.json"
    real, calls = runner.measure.measure, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(runner.measure, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(path)
    document = json.loads(path.read_text())
    assert len(document["cells"]) == 1
    assert not document["complete"]
    monkeypatch.setattr(runner.measure, "measure", real)
    continued, shown = run(path)
    assert "/6," in shown, "only what is missing is measured"
    assert continued["complete"]
    assert continued["runs"] == 2
    assert continued["cells"][:1] == document["cells"]
    assert len(continued["cells"]) == 7


def test_results_of_something_else_are_not_continued(tmp_path, server):
    path = tmp_path / "a.json"
    run(path)
    with pytest.raises(InvalidArgumentError, match="another seed and machine"):
        run(path, seed=6, machine={"cpu": "other"})
    document, _ = run(path, seed=6, afresh=True)
    assert document["seed"] == 6
    assert document["runs"] == 1


def test_a_missing_engine_is_named_and_the_other_measured(tmp_path, server):
    document, shown = run(tmp_path / "a.json", engines=("cuda", "cpu"))
    assert {"key": "engine/cuda", "why": "no device here"} in document["skipped"]
    assert "cuda: not measured" in shown
    assert {cell["scenario"]["engine"] for cell in document["cells"]} == {"reference"}


def test_the_only_engine_that_is_missing_is_an_error(tmp_path, server):
    with pytest.raises(UnavailableError):
        run(tmp_path / "a.json", engines=("cuda",))


def test_a_peer_that_fails_or_disagrees_does_not_stop_the_run(tmp_path, server, monkeypatch):
    class Wrong:
        output, notes = "losses", ""

        def prepare(self, programs, parameters):
            return peers.Job(lambda: None, lambda rows: np.full((len(programs), rows), 12.345))

    class Broken(Wrong):
        def prepare(self, programs, parameters):
            raise MemoryError("of the peer")

    def create(name, table, threads):
        return {"Wrong": Wrong, "Broken": Broken}[name]()

    monkeypatch.setattr(peers, "installed", lambda engine: (["Wrong", "Broken"], {}))
    wrong = peers.Entry("cpu", "numpy", "")
    monkeypatch.setattr(peers, "PEERS", {"Wrong": wrong, "Broken": wrong})
    monkeypatch.setattr(peers, "create", create)
    document, _ = run(tmp_path / "a.json")
    reasons = {entry["key"].split("/")[1]: entry["why"] for entry in document["skipped"]}
    assert "agree with the reference" in reasons["Wrong"]
    assert reasons["Broken"] == "MemoryError: of the peer"
    assert not any("peer" in cell for cell in document["cells"])


def test_what_does_not_fit_into_the_time_is_named(tmp_path, server):
    document, _ = run(tmp_path / "a.json", replace(SMALL, total_seconds=-1.0))
    assert not document["cells"]
    assert {entry["why"] for entry in document["skipped"]} == {"the time was used up", "missing"}


def test_calls_that_would_take_too_long_are_left_out(tmp_path, server):
    profile = replace(SMALL, rows=(20, 10**9), expressions=(2,))
    document, _ = run(tmp_path / "a.json", profile)
    (why,) = [e["why"] for e in document["skipped"] if "1000000000x2" in e["key"]]
    assert why.startswith("a call would take about")


def test_slices_get_shorter_towards_the_end():
    clock = Clock(replace(SMALL, slice_seconds=100.0), end=runner.time.monotonic() + 10, left=5)
    usual, peer = Scenario(engine="cpu"), Scenario(engine="cpu", kind=Kind.PEER, peer="NumPy")
    first = clock.slice(usual)
    assert 0.5 < first < 2
    assert clock.slice(peer) == pytest.approx(1.25 * first, rel=0.01)
    assert clock.left == 0, "a peer counts for several"
    clock.end = runner.time.monotonic() + 0.1
    assert clock.slice(usual) < first


def test_scenarios_that_take_the_time_of_several_come_last(tmp_path):
    dear, cheap = Scenario(engine="cpu", rows=100_000), Scenario(engine="cpu", rows=100)
    other = Scenario(engine="cpu", rows=100_000, precision="precise")
    with progress(io.StringIO()) as told:
        plan = Plan(profile=SMALL)
        measured = Run(plan, Results.begin(tmp_path / "a.json", HEAD), told)
    clock = Clock(SMALL, end=runner.time.monotonic() + 30.0, left=3)
    assert list(measured._in_time([dear, cheap, other], clock)) == [dear, cheap, other]
    measured._speeds["cpu", "interpreter", "fast"] = dear.token_rows / 20.0
    assert list(measured._in_time([dear, cheap, other], clock)) == [cheap, other, dear]
    clock.end = math.inf
    assert list(measured._in_time([dear, cheap, other], clock)) == [dear, cheap, other]


def test_scenarios_that_compile_for_long_come_last(tmp_path):
    few, many = (
        Scenario(engine="cuda", tier="compiled", reuse="repeated", expressions=count)
        for count in (300, 5_000)
    )
    with progress(io.StringIO()) as told:
        measured = Run(Plan(profile=SMALL), Results.begin(tmp_path / "a.json", HEAD), told)
    clock = Clock(SMALL, end=runner.time.monotonic() + 3.0, left=3)
    rate = {"token_rows_per_second": {"wall": 1e12}}
    measured._learn(few, {"first": {"wall": 0.3}, **rate})
    assert list(measured._in_time([many, few], clock)) == [many, few]
    measured._learn(many, {"first": {"wall": 4.0}, **rate})
    assert list(measured._in_time([many, few], clock)) == [few, many]
    interpreted = replace(many, tier="interpreter")
    assert list(measured._in_time([interpreted, few], clock)) == [interpreted, few]


@pytest.mark.parametrize(
    ("call_seconds", "least", "timed"),
    [(0.1, 1, 9), (0.4, 3, 3), (0.9, 1, 3), (1.9, 1, 2), (3.0, 1, 1), (3.0, 2, 2)],
)
def test_long_calls_are_timed_less_often(monkeypatch, call_seconds, least, timed):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock.now)

    def perform(batch):
        clock.now += call_seconds
        return measure.Call(1, Timings())

    assert len(measure._timed(perform, itertools.repeat(([], [])), 1.0, least)) == timed


def test_the_file_is_never_half_written(tmp_path):
    found = Results.begin(tmp_path / "a.json", HEAD)
    found.add("x", {"scenario": {}})
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert results.read(tmp_path / "a.json")["cells"] == [{"key": "x", "scenario": {}}]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"benchmark": "warpfit bench"}'])
def test_a_file_that_is_no_result_is_refused(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(InvalidArgumentError):
        results.read(path)


class CudaLike(testing.InProcessServer):
    """Says that it is a GPU."""

    def _info(self, message):
        device = Device("made-up GPU", tiers=(Tier.AUTO, Tier.INTERPRETER, Tier.COMPILED))
        limits, operators = Limits(), codec.operator_infos()
        yield codec.info_to_message(ServerInfo("0", "cuda", (device,), limits, operators))


def test_both_tiers_of_a_gpu_are_measured_and_reported(tmp_path, server, monkeypatch):
    @contextmanager
    def started(_address, arguments):
        made = CudaLike() if "cuda" in arguments else testing.InProcessServer()
        with serve(made) as (address, _):
            yield address

    monkeypatch.setattr(runner, "server_at", started)
    monkeypatch.setattr(runner, "gpu_peaks", lambda: None)
    profile = replace(SMALL, rows=(20, 40), expressions=(2,), output_rows=(), peer_rows=())
    document, _ = run(tmp_path / "a.json", profile, engines=("cuda", "cpu"))
    ways = {
        (cell["scenario"]["tier"], cell["scenario"]["reuse"])
        for cell in document["cells"]
        if cell["scenario"]["engine"] == "cuda"
    }
    assert ways == {("interpreter", "fresh"), ("interpreter", "repeated"), ("compiled", "repeated")}
    written = report.write_report([tmp_path / "a.json"], tmp_path / "out")
    assert "tiers.png" in {path.name for path in written}
    assert "made-up GPU" in written[0].read_text()


# ------------------------------------------------------------------------------------- progress


def test_the_time_left_follows_from_the_pace(monkeypatch):
    clock = iter([0.0, 0.0, 2.0, 2.0, 6.0])
    monkeypatch.setattr("warpfit.bench.progress.time.monotonic", lambda: next(clock))
    pace = Pace()
    pace.total = 5
    assert pace.seconds_left is None
    for _ in range(2):
        pace.begin()
        pace.end()
    assert pace.seconds_left == pytest.approx(3 * 3.0)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_a_bar(capsys):
    pytest.importorskip("rich")
    with progress(Terminal()) as shown:
        assert not isinstance(shown, PlainProgress)
        shown.expect(1)
        shown.start("[a] title")
        shown.done("done")
    assert "[a] title: done" in capsys.readouterr().err


def test_without_rich_a_terminal_gets_lines(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "rich.console", None)
    with progress(Terminal()) as shown:
        assert isinstance(shown, PlainProgress)


# -------------------------------------------------------------------------------------- command


def test_the_seed_of_a_run_that_continues_is_that_of_the_file(tmp_path, server, monkeypatch):
    monkeypatch.setattr("warpfit.bench.command.PROFILES", {"tiny": SMALL})
    words = ["--profile", "tiny", "--engine", "cpu", "--out", str(tmp_path / "a.json")]
    assert main(words) == 0
    first = results.read(tmp_path / "a.json")
    assert main(words) == 0
    assert results.read(tmp_path / "a.json")["cells"] == first["cells"]


def test_a_directory_that_does_not_exist_is_refused_before_measuring(tmp_path):
    with pytest.raises(InvalidArgumentError, match="no directory"):
        main(["--out", str(tmp_path / "missing" / "a.json")])
