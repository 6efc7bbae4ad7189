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
ULP = 2.0**-23
LARGEST = np.finfo(np.float32).max


@pytest.mark.parametrize(
    ("bound", "got", "exact", "share"),
    [
        *((Bound("2"), 1 + 4 * ULP, 1.0, 2.0), (Bound("0"), 1 + ULP, 1.0, np.inf)),
        *(
            (Bound("2", "0.0009765625"), 1 + 2**-11, 1.0, 0.5),
            (Bound("2", where="a < 1"), 2.0, 1.0, 0.0),
        ),
        # Special values of one alone exceed any bound, but for an overflow.
        *((Bound("1000"), np.nan, 1.0, np.inf), (Bound("1000"), 3e38, -np.inf, np.inf)),
        (Bound("2"), LARGEST, np.inf, 0.0),
    ],
)
def test_excess_is_the_share_of_the_bound(bound, got, exact, share):
    pair = np.array([got], np.float32), np.array([exact])
    found = excess(bound, [np.ones(1, np.float32)], *pair)[0]
    assert found == share if np.isfinite(share) else found > 1


def test_the_published_expressions_are_those_of_the_benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    program = runpy.run_path(str(BENCH / "expressions.py"))
    published = program["FILE"].read_text().splitlines()
    assert published == program["lines"]()
    X = np.random.default_rng(0).uniform(0.1, 5.0, (40, 10)).T
    with np.errstate(all="ignore"):
        for text, drawn, parameters in zip(published, *thesis_mix(1), strict=True):
            found = reference.evaluate_program(parse(text), X)
            bound = reference.evaluate_program(drawn.bind(parameters), X)
            np.testing.assert_allclose(found, bound, rtol=1e-12)
