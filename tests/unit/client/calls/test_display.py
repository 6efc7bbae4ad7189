"""Results in a terminal and a notebook, and errors that point into programs."""

from __future__ import annotations

import pickle
import re

import numpy as np
import pytest

import warpfit.testing
from warpfit import ProgramError, parse
from warpfit.calls.display import TextTable, numbers
from warpfit.request import Tier, Timings

X = np.arange(1.0, 21.0).reshape(10, 2)


@pytest.fixture
def client():
    with warpfit.testing.client() as connected:
        yield connected


def test_programs_show_as_latex():
    shown = parse("sqrt(x1)/p1")._repr_latex_()
    assert shown.startswith("$")
    assert r"\sqrt" in shown


def test_fits_show_as_tables(client):
    data = client.upload(X, 2 * X[:, 0] + 1, dtype="float64")
    fit = client.optimize(data, ["p1*x1 + p2", "p1", "x1"], [[1.0, 0.0], [0.0], []])
    lines = str(fit).splitlines()
    assert len(lines) == 4
    assert lines[0].split() == [
        *("expression", "parameters", "initial", "loss", "loss", "iterations", "reason")
    ]
    assert re.match(r" +0 +2, 1 +\S+ +\S+ +\d+ +(gradient|step|loss)$", lines[1])
    assert len({len(line) for line in lines}) == 1
    html = fit._repr_html_()
    assert html.count("<tr>") == 4
    assert "<td>2, 1</td>" in html


def test_fits_of_all_starts_show_each_start(client):
    data = client.upload(X, 2 * X[:, 0], dtype="float64")
    fit = client.optimize(data, ["p1*x1", "p1"], [[[1.0], [3.0]], [[0.0], [5.0]]], all_starts=True)
    cells = [line.split()[:3] for line in str(fit).splitlines()[1:]]
    mean = f"{2 * X[:, 0].mean():.5g}"
    assert cells == [["0", "0", "2"], ["1", "0", mean], ["0", "1", "2"], ["1", "1", mean]]


def test_timings_show_as_a_table():
    timings = Timings(decode=1500, compute=2_000_000, tier=Tier.COMPILED, cache_hits=3)
    lines = str(timings).splitlines()
    assert lines[0].split() == ["stage", "microseconds"]
    assert ["decode", "1.5"] in [line.split() for line in lines]
    assert ["compute", "2000.0"] in [line.split() for line in lines]
    assert lines[-1] == "tier compiled, cache hits 3"
    assert "<td>2000.0</td>" in timings._repr_html_()


def test_long_tables_are_cut_and_cells_are_escaped():
    table = TextTable(("a",), [("<b>",)] * 25)
    assert table.text().splitlines()[-1] == "... and 5 more rows"
    assert table.html().count("&lt;b&gt;") == 20
    assert "<b>" not in table.html()
    assert numbers([1.0, 2.123456789]) == "1, 2.1235"
    assert numbers(range(9)) == "0, 1, 2, 3, 4, 5, ..."


@pytest.mark.parametrize("call", ["evaluate", "optimize"])
def test_errors_of_the_server_point_into_the_expression(client, call):
    data = client.upload(X, X[:, 0], names=("age", "dose"))
    with pytest.raises(ProgramError) as caught:
        getattr(client, call)(data, ["age", "sin(age) + 2*p2"], [[], [1.0]], loss="mse")
    assert caught.value.reason == "PARAMETER_OUT_OF_RANGE"
    *_, text, caret = str(caught.value).splitlines()
    assert text.strip() == "sin(age) + 2 * p2"
    assert text.index("p2") == caret.index("^")
    with pytest.raises(ProgramError, match=r"x3\n +\^") as caught:
        getattr(client, call)(data, "age * x3", [], loss="mse")
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
