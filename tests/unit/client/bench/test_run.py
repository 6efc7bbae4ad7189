"""Runs of `warpfit bench` without a real server: results, time and failures."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.figure import Figure

from support.servers.loopback import serve
from warpfit import codec, testing
from warpfit.bench import callers, measure, peers, results, runner
from warpfit.bench.callers import Outcome
from warpfit.bench.command import main
from warpfit.bench.report.page import write_report
from warpfit.bench.runner import Run
from warpfit.bench.scenarios import TINY
from warpfit.errors import InvalidArgumentError, UnavailableError
from warpfit.request import Tier
from warpfit.server_info import Device, Limits, ServerInfo

#: As little as a run can be.
SMALL = replace(
    TINY, rows=(20,), expressions=(2, 3), other_rows=(30,), usual=4, workers=(), slice_seconds=0.02
)


class CudaLike(testing.InProcessServer):
    """Says that it is a GPU."""

    def _info(self, message):
        device = Device("made-up GPU", tiers=(Tier.AUTO, Tier.INTERPRETER, Tier.COMPILED))
        limits, operators = Limits(), codec.operator_infos()
        yield codec.info_to_message(ServerInfo("0", "cuda", (device,), limits, operators))


@pytest.fixture(autouse=True)
def servers(monkeypatch):
    """Every server that a run starts is one in this process; a list switches CUDA on."""
    gpus = []

    @contextmanager
    def started(_address, arguments):
        if "0" in arguments and not gpus:
            raise UnavailableError("no device here", "NO_CUDA")
        made = CudaLike() if "0" in arguments else testing.InProcessServer()
        with serve(made) as (address, _):
            yield address

    monkeypatch.setattr(runner, "server_at", started)
    monkeypatch.setattr(runner.hardware, "gpu_peaks", lambda: None)
    monkeypatch.setattr(peers, "installed", lambda engine: (["NumPy"], ["other"]))
    return gpus


def run(path, profile=SMALL, engines=("cpu",)):
    lines = []
    Run(profile=profile, engines=engines, path=path, seed=5, report=lines.append).perform()
    return json.loads(path.read_text()), lines


def test_a_run_measures_everything_and_says_so(tmp_path):
    document, lines = run(tmp_path / "a.json")
    kinds = [cell["scenario"]["kind"] for cell in document["cells"]]
    assert sorted(kinds) == ["evaluate"] * 13 + ["optimize", "peer"]
    assert document["complete"]
    assert [entry["key"] for entry in document["skipped"]] == ["peer/other"]
    assert set(document["load_average"]) == {"start", "end"}
    assert lines[-1].startswith("[15/15] peer/NumPy/")
    assert document["cells"][-1]["agreement"]["peer"] > 0.5
    assert document["cells"][-1]["times_warpfit"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    cell = document["cells"][0]
    assert cell["first"]["wall"] > 0
    assert cell["stages"]["wall"] == pytest.approx(cell["wall"]["median"], rel=1e-3)
    assert cell["wall"]["n"] >= 3
    assert 0 < cell["executed"] <= cell["operators"] < cell["tokens"]
    nominal = cell["tokens"] * cell["scenario"]["rows"]
    rate = cell["token_rows_per_second"]["wall"]
    assert rate == pytest.approx(nominal / cell["wall"]["median"], rel=1e-3)
    assert cell["roofline"]["operations"] > 0


def test_a_missing_engine_is_named_and_the_other_measured(tmp_path):
    document, _ = run(tmp_path / "a.json", engines=("cuda", "cpu"))
    assert {"key": "engine/cuda", "why": "no device here"} in document["skipped"]
    assert {cell["scenario"]["engine"] for cell in document["cells"]} == {"reference"}


def test_the_only_engine_that_is_missing_is_an_error(tmp_path):
    with pytest.raises(UnavailableError):
        run(tmp_path / "a.json", engines=("cuda",))


def test_a_peer_that_fails_or_disagrees_does_not_stop_the_run(tmp_path, monkeypatch):
    class Wrong:
        output, notes = "losses", ""

        def __init__(self, table, threads):
            pass

        def prepare(self, programs):
            return peers.Job(lambda: None, lambda rows: np.full((len(programs), rows), 12.345))

    class Broken(Wrong):
        def prepare(self, programs):
            raise MemoryError("of the peer")

    monkeypatch.setattr(peers, "installed", lambda engine: (["Wrong", "Broken"], []))
    monkeypatch.setattr(measure, "PEERS", {"Wrong": Wrong, "Broken": Broken})
    document, _ = run(tmp_path / "a.json")
    reasons = {entry["key"].split("/")[1]: entry["why"] for entry in document["skipped"]}
    assert "agree with the reference" in reasons["Wrong"]
    assert reasons["Broken"] == "MemoryError: of the peer"
    assert not any("peer" in cell for cell in document["cells"])


@pytest.mark.parametrize("failed", [False, True])
def test_workers_are_counted_together(tmp_path, monkeypatch, failed):
    made = [Outcome(0.1 * n, 0.1 * n, 0.1 * (n + 1), "BUSY" * failed) for n in range(20)]
    monkeypatch.setattr(callers.Load, "perform", lambda load: made)
    profile = replace(SMALL, expressions=(), workers=(3,))
    document, _ = run(tmp_path / "a.json", profile)
    cells = [cell for cell in document["cells"] if cell["scenario"]["kind"] == "workers"]
    if failed:
        assert not cells
        assert any("BUSY" in entry["why"] for entry in document["skipped"])
    else:
        assert cells[0]["calls_per_second"] == pytest.approx(10)
        assert cells[0]["wall"]["median"] == pytest.approx(0.1)


def test_calls_that_would_take_too_long_are_left_out(tmp_path):
    profile = replace(SMALL, rows=(20, 10**9), expressions=(2,))
    document, _ = run(tmp_path / "a.json", profile)
    (why,) = [e["why"] for e in document["skipped"] if "1000000000x2" in e["key"]]
    assert why.startswith("a call would take about")


def test_both_tiers_of_a_gpu_are_measured_and_reported(tmp_path, servers, monkeypatch):
    monkeypatch.setattr(Figure, "savefig", lambda _, target, **__: target.write(b"PNG"))
    servers.append("GPU")
    profile = replace(SMALL, rows=(20,), expressions=(2, 1_000), other_rows=(20,))
    document, _ = run(tmp_path / "a.json", profile, engines=("cuda",))
    scenarios = [c["scenario"] for c in document["cells"] if c["scenario"]["engine"] == "cuda"]
    ways = {(scenario["tier"], scenario["reuse"]) for scenario in scenarios}
    assert ways == {("interpreter", "fresh"), ("interpreter", "repeated"), ("compiled", "repeated")}
    assert (scenarios[-1]["tier"], scenarios[-1]["expressions"]) == ("compiled", 1_000)
    written = write_report([tmp_path / "a.json"], tmp_path / "out")
    assert "tiers.png" in {path.name for path in written}
    page = written[0].read_text()
    assert "made-up GPU" in page
    assert page.count("DEAP generation 25") >= 3


@pytest.mark.parametrize("content", ["", "[]", "{}"])
def test_a_file_that_is_no_result_is_refused(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(InvalidArgumentError):
        results.read(path)


def test_a_result_is_replaced_only_when_asked(tmp_path, monkeypatch):
    profile = replace(SMALL, expressions=(2,), other_rows=())
    monkeypatch.setattr("warpfit.bench.command.PROFILES", {"tiny": profile})
    words = ["--profile", "tiny", "--engine", "cpu", "--out", str(tmp_path / "a.json")]
    assert main(words) == 0
    first = results.read(tmp_path / "a.json")
    with pytest.raises(InvalidArgumentError, match="exists"):
        main(words)
    assert main([*words, "--afresh", "--seed", "7"]) == 0
    assert results.read(tmp_path / "a.json")["seed"] == 7 != first["seed"]


def test_a_directory_that_does_not_exist_is_refused_before_measuring(tmp_path):
    with pytest.raises(InvalidArgumentError, match="no directory"):
        main(["--out", str(tmp_path / "missing" / "a.json")])
