"""The report: what is computed from results, and the page that is made of it."""

import json
import math
import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from support.repository.bench_results import COMPILE_SECONDS, MODEL, document, write
from warpfit.bench.command import main
from warpfit.bench.report import findings, plots
from warpfit.bench.report.answers import answers, compact
from warpfit.bench.report.page import write_report
from warpfit.errors import InvalidArgumentError

RESULTS = Path(__file__).resolve().parents[3] / "bench" / "results"


@pytest.fixture(scope="module")
def both():
    return findings.systems([document("cuda", "cpu")])


def test_the_crossover_is_where_the_model_has_it(both):
    (pair,) = findings.comparisons(both)
    (launch, rate), (slow_launch, slow_rate) = (
        MODEL[engine, "interpreter"] for engine in ("cuda", "cpu")
    )
    exact = (launch - slow_launch) / (300 * (1 / slow_rate - 1 / rate))  # 10 expressions
    assert pair.crossover(10, pair.wall) == pytest.approx(
        exact, rel=0.35
    )  # interpolated between decades
    assert pair.crossover(10, pair.kernel) == 1000
    assert pair.wall[1_000_000, 5000] == pytest.approx(slow_rate**-1 / rate**-1, rel=0.1)


def test_repeats_until_compiling_has_paid(both):
    found = {(r.rows, r.expressions): r for r in findings.repeats(both[0])}
    r = found[1_000_000, 300]
    saved = r.interpreted - r.compiled
    assert r.compiling == pytest.approx(300 * COMPILE_SECONDS)
    assert r.break_even == pytest.approx(1 + 300 * COMPILE_SECONDS / saved)
    calls = round(r.break_even)
    assert r.gain(1) == 1.0
    assert r.gain(calls) == pytest.approx(1.0, abs=0.02)
    assert r.gain(100 * calls) > 1.5


def test_what_is_within_the_noise_never_pays():
    made = document("cuda")
    for cell in made["cells"]:
        if "kernel" in cell:
            cell["wall"]["low"], cell["wall"]["high"] = 0.0, 1.0
    found = findings.systems([made])
    assert all(math.isinf(r.break_even) for r in findings.repeats(found[0]))
    assert "has paid, end to end, never at 1,000 rows" in " ".join(list(answers(found).values())[1])


def test_the_questions_are_answered(both):
    first, second, third = answers(both).values()
    text = " ".join(first)
    assert "With 10 expressions a call the GPU answers sooner from about 16,000 rows on" in text
    assert "at every size measured (1,000 rows and more)" in text
    assert "NumPy at 100,000 rows" in text
    assert "interpreting was faster at 12 of 12 sizes" in " ".join(second)
    assert "times (5,000 expressions, 1,000,000 rows) with 10,000" in " ".join(third)
    several = [s for s in third if "16 parameter" in s and "made-up CPU" in s][-1]
    launch, rate = MODEL["cpu", "interpreter"]
    kernel = 300 * 30 * 100_000 / rate
    ratio = 16 * (launch + kernel) / (launch + 16 * kernel)
    assert f"take {compact(ratio)} times as long" in several


@pytest.mark.parametrize(("engine", "missing"), [("cpu", "GPU"), ("cuda", "CPU")])
def test_what_is_missing_is_said(engine, missing):
    first, second, third = answers(findings.systems([document(engine)])).values()
    assert f"hold no {missing}" in first[0]
    assert second[0].startswith("Not answered") == (engine == "cpu")
    assert "Optimize" in " ".join(third)


# ----------------------------------------------------------------------------------------- page


@pytest.fixture
def quick(monkeypatch):
    """Leave out drawing, which takes most of the time of a page."""
    monkeypatch.setattr(Figure, "savefig", lambda _, target, **__: target.write(b"PNG"))


def test_the_page_stands_by_itself(tmp_path, capsys):
    path = write(tmp_path / "a.json", "cuda", "cpu")
    assert main(["report", str(path), "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out.split()
    names = {Path(line).name for line in printed}
    assert names == {"report.html", *(f"{name}.png" for _, name, _ in plots.PLOTS)}
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("data:image/png;base64,") == len(plots.PLOTS)
    assert not re.findall(r"(?:src|href)='?(?!data:)[\w/]", page)
    assert "made up &lt;by a model&gt;" in page
    assert "it is not installed" in page
    tables = [table.split("</tr>")[:-1] for table in re.findall(r"<table>(.*?)</table>", page)]
    assert len(tables) >= 5
    for head, *rows in tables:
        assert rows
        assert {row.count("<td") for row in rows} == {head.count("<th>")}


def test_results_of_an_interrupted_run_make_a_page(tmp_path, quick):
    made = document("cuda", "cpu")
    path = tmp_path / "a.json"
    for cells in (made["cells"][:1], []):
        path.write_text(json.dumps({**made, "complete": False, "cells": cells}))
        page = write_report([path], tmp_path / "out")[0].read_text()
        assert "not finished" in page
        assert "Nothing was measured" in page


def test_without_matplotlib_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(InvalidArgumentError, match="matplotlib") as raised:
        write_report([write(tmp_path / "a.json", "cpu")], tmp_path / "out")
    assert "warpfit[bench]" in raised.value.remedy


@pytest.mark.parametrize("path", sorted(RESULTS.glob("bench_*.json")), ids=lambda path: path.stem)
def test_the_committed_results_make_a_page(tmp_path, path, quick):
    page = write_report([path], tmp_path)[0].read_text()
    assert json.loads(path.read_text())["machine"]["cpu"] in page
