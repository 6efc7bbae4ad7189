"""Error bounds, published expressions and protocols of the benchmarks."""

import runpy
from pathlib import Path

import numpy as np
import pytest

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
