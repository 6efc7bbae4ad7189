"""The report: what is computed from committed results, and the page that is made of it."""

import json
import math
import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from warpfit.bench.command import main
from warpfit.bench.report import findings, plots
from warpfit.bench.report.answers import answers
from warpfit.bench.report.page import write_report
from warpfit.errors import InvalidArgumentError

RESULTS = Path(__file__).resolve().parents[3] / "bench" / "results"
GPU, CPU = (RESULTS / f"bench_{engine}.json" for engine in ("gpu", "cpu"))


def systems(*paths):
    return findings.systems([json.loads(path.read_text()) for path in paths])


def test_the_gpu_of_one_file_is_compared_with_the_cpu_of_another():
    pairs = findings.comparisons(systems(GPU, CPU))
    assert pairs
    assert {(pair.gpu.engine, pair.cpu.engine) for pair in pairs} == {("cuda", "cpu")}


def test_compiling_has_paid_after_the_repeats_that_are_named():
    found = [r for system in systems(GPU) for r in findings.repeats(system)]
    paid = [r for r in found if math.isfinite(r.break_even)]
    assert paid
    for r in paid:
        saved = r.interpreted - r.compiled
        assert r.break_even == pytest.approx(1 + r.compiling / saved)
        assert r.gain(1) == 1.0
        assert r.gain(100 * round(r.break_even)) > 1.0


def test_the_questions_are_answered():
    first, second, third = answers(systems(GPU, CPU)).values()
    assert "the GPU answers sooner at every size measured" in " ".join(first)
    assert "interpreting was faster at" in " ".join(second)
    assert "Optimize" in " ".join(third)
    (alone, *_), (not_compiled, *_), _ = answers(systems(CPU)).values()
    assert "hold no GPU" in alone
    assert not_compiled.startswith("Not answered")


@pytest.fixture
def quick(monkeypatch):
    """Leave out drawing, which takes most of the time of a page."""
    monkeypatch.setattr(Figure, "savefig", lambda _, target, **__: target.write(b"PNG"))


def test_the_page_stands_by_itself(tmp_path, capsys, quick):
    noted = json.loads(GPU.read_text()) | {"notes": ["made <by> us"]}
    (tmp_path / "a.json").write_text(json.dumps(noted))
    assert main(["report", str(tmp_path / "a.json"), "--out", str(tmp_path / "out")]) == 0
    names = {Path(line).name for line in capsys.readouterr().out.split()}
    assert names == {"report.html", *(f"{name}.png" for _, name, _ in plots.PLOTS)}
    page = (tmp_path / "out" / "report.html").read_text()
    assert noted["machine"]["cpu"] in page
    assert page.count("data:image/png;base64,") == len(plots.PLOTS)
    assert not re.findall(r"(?:src|href)='?(?!data:)[\w/]", page)
    assert "made &lt;by&gt; us" in page
    tables = [table.split("</tr>")[:-1] for table in re.findall(r"<table>(.*?)</table>", page)]
    assert len(tables) >= 5
    for head, *rows in tables:
        assert {row.count("<td") for row in rows} == {head.count("<th>")}


def test_results_of_an_interrupted_run_make_a_page(tmp_path, quick):
    made = json.loads(CPU.read_text())
    path = tmp_path / "a.json"
    for cells in (made["cells"][:1], []):
        path.write_text(json.dumps({**made, "complete": False, "cells": cells}))
        page = write_report([path], tmp_path / "out")[0].read_text()
        assert "not finished" in page
        assert "Nothing was measured" in page


def test_without_matplotlib_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(InvalidArgumentError, match="matplotlib") as raised:
        write_report([CPU], tmp_path / "out")
    assert "warpfit[bench]" in raised.value.remedy
