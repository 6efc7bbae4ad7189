"""The table of equations that a search writes while it runs."""

import csv
from pathlib import Path

import numpy as np
import pytest

from support.servers.server import ServerProcess
from warpfit.errors import InvalidArgumentError
from warpfit.sklearn import SearchWarning, SymbolicRegressor
from warpfit.sklearn.equations import COLUMNS

X = np.random.default_rng(0).uniform(1.0, 3.0, (60, 2))


@pytest.fixture
def search(server: ServerProcess):
    def make(**changes):
        short = {"population": 30, "generations": 2, "operators": ("+", "*"), "random_state": 0}
        return SymbolicRegressor(address=server.address, **{**short, **changes})

    return make


def test_the_front_is_in_a_file_while_the_search_runs(search, tmp_path):
    file, seen = tmp_path / "front.csv", []

    def look(*_):
        seen.append(list(csv.DictReader(file.open())))

    noise = np.random.default_rng(1).normal(0.0, 0.1, len(X))
    model = search(output=file, callback=look).fit(X, np.exp(X[:, 0]) * X[:, 1] + noise)
    assert seen
    assert all(list(row) == list(COLUMNS) for rows in seen for row in rows)
    assert all(float(row["loss"]) >= 0 and row["equation"] for rows in seen for row in rows)
    assert file.read_text() == model.equations_.to_csv()
    assert [row["equation"] for row in csv.DictReader(file.open())] == [
        each.equation for each in model.equations_
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["front.csv"]


@pytest.mark.thorough
def test_each_target_has_a_file(search, tmp_path):
    y = np.column_stack([X[:, 0] * X[:, 1], X[:, 0] + X[:, 1]])
    model = search(output=str(tmp_path / "front.csv"), generations=1).fit(X, y)
    for name, table in zip(("front.csv", "front.1.csv"), model.equations_, strict=True):
        assert (tmp_path / name).read_text() == table.to_csv()


def test_a_search_does_not_end_because_its_table_cannot_be_written(search, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.warns(SearchWarning, match=r"table .*No space left"):
        model = search(output=tmp_path / "front.csv").fit(X, X[:, 0] * X[:, 1])
    assert model.front_


def test_where_no_file_can_be_is_refused_before_the_search(search, tmp_path):
    for place in (tmp_path, tmp_path / "none" / "front.csv", 3):
        with pytest.raises(InvalidArgumentError, match="output is"):
            search(output=place).fit(X, X[:, 0])
