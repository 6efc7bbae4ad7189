"""Rules and bounds of the benchmarks."""

import numpy as np
import pytest

from support.engines.accuracy import Bound, excess
from support.repository.symbolic import is_solution

NAMES = ("sigma", "theta")


@pytest.mark.parametrize(
    ("found", "true", "expected"),
    [
        ("0.3333333*x1 + 2.00001*x2", "sigma/3 + 2*theta", True),
        ("2.5*x1*x2", "sigma*theta", True),
        ("sqrt(2/(1 - x2/x1) - 1)", "(1 + theta/sigma)/sqrt(1 - theta^2/sigma^2)", True),
        ("x1*x2 + 0.001*x1", "sigma*theta", False),
    ],
)
def test_a_formula_is_found_if_difference_or_ratio_is_constant(found, true, expected):
    assert is_solution(found, true, NAMES) is expected


def test_what_takes_too_long_is_not_found():
    assert not is_solution("x1", "sigma", NAMES, seconds=0.0)


# ------------------------------------------------------------------------------------- error bounds


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
