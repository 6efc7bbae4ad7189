"""Error bounds, published expressions and protocols of the benchmarks."""

import gzip
import runpy
from pathlib import Path

import numpy as np
import pytest
from sklearn.linear_model import LinearRegression

from support.engines.accuracy import Bound, excess
from support.random_programs import thesis_mix
from warpfit.expressions import reference
from warpfit.parse import parse

BENCH = Path(__file__).resolve().parents[2] / "bench"


def test_excess_is_the_share_of_the_bound():
    one = np.ones(1, np.float32)
    ulp = float(np.spacing(one)[0])
    assert excess(Bound("2"), [one], one + np.float32(ulp), one)[0] == 0.5
    assert excess(Bound("2"), [one], one + np.float32(4 * ulp), one)[0] == 2.0
    assert excess(Bound("2", "0.0009765625"), [one], one + np.float32(2**-11), one)[0] == 0.5
    assert excess(Bound("0"), [one], one + np.float32(ulp), one)[0] == np.inf
    assert excess(Bound("2", where="a < 1"), [one], one + 1, one)[0] == 0.0


@pytest.mark.parametrize(
    ("got", "exact"),
    [(np.nan, 1.0), (1.0, np.nan), (np.inf, 1.0), (3e38, -np.inf), (-np.inf, np.inf)],
)
def test_special_values_of_one_alone_exceed_any_bound(got, exact):
    column = [np.ones(1, np.float32)]
    pair = np.array([got], np.float32), np.array([exact])
    assert excess(Bound("1000"), column, *pair)[0] > 1


def test_an_overflow_on_one_side_only_is_no_error():
    largest = np.finfo(np.float32).max
    got = np.array([np.inf, largest], np.float32)
    exact = np.array([largest, np.inf], np.float64)
    assert (excess(Bound("2"), [np.ones(2, np.float32)], got, exact) <= 1).all()


def test_the_published_expressions_are_those_of_the_benchmarks():
    program = runpy.run_path(str(BENCH / "expressions.py"))
    published = program["FILE"].read_text().splitlines()
    assert published == program["lines"]()
    X = np.random.default_rng(0).uniform(0.1, 5.0, (40, 10)).T
    with np.errstate(all="ignore"):
        for text, drawn, parameters in zip(published, *thesis_mix(1), strict=True):
            found = reference.evaluate_program(parse(text), X)
            bound = reference.evaluate_program(drawn.bind(parameters), X)
            np.testing.assert_allclose(found, bound, rtol=1e-12)


def test_each_table_of_srbench_is_judged_by_its_protocol(tmp_path):
    program = runpy.run_path(str(BENCH / "srbench_2025.py"))
    assert len({*program["PUBLISHED"], *program["BLACK_BOX"]}) == 24
    rng = np.random.default_rng(0)
    table = np.column_stack([rng.normal(3.0, 2.0, 40), rng.normal(0.0, 1.0, 40)])
    rows = "\n".join(f"{a!r}\t{3 * a - 2 * b!r}\t{b!r}" for a, b in table.tolist())
    path = tmp_path / "192_vineyard.tsv.gz"
    path.write_bytes(gzip.compress(f"a\ttarget\tb\n{rows}\n".encode()))
    X, y, names = program["read"](path)
    assert names == ["a", "b"]
    np.testing.assert_allclose(X, table)
    np.testing.assert_allclose(y, 3 * table[:, 0] - 2 * table[:, 1])
    method = {"est": Line(), "model": lambda est: "3*x_0 - 2*x_1"}
    run = program["one_run"](method, path, 1, 7.0)
    assert run["data"] == "192_vineyard"
    assert (run["rows"], run["size"], run["formula"]) == (40, 7, "3*x_0 - 2*x_1")
    assert run["r2_test"] == pytest.approx(1.0)


class Line(LinearRegression):
    """A method of SRBench that has its settings."""

    def __init__(self, max_time=None, random_state=None):
        super().__init__()
        self.max_time, self.random_state = max_time, random_state

    def fit(self, X, y):
        """Fit, as far as the harness has given a time and standard units."""
        assert self.max_time == 7.0
        assert self.random_state == 1
        np.testing.assert_allclose([X.mean(axis=0), X.std(axis=0)], [[0, 0], [1, 1]], atol=1e-12)
        assert (abs(y.mean()) < 1e-12) and abs(y.std() - 1) < 1e-12
        return super().fit(X, y)
