"""The rule by which a benchmark counts a formula as found."""

import pytest

pytest.importorskip("sympy")

from support.repository.symbolic import is_solution

NAMES = ("sigma", "theta")


@pytest.mark.parametrize(
    ("found", "true", "expected"),
    [
        ("0.3333333*x1 + 2.00001*x2", "sigma/3 + 2*theta", True),
        ("x1*x2 + 3.7", "sigma*theta", True),
        ("2.5*x1*x2", "sigma*theta", True),
        ("sqrt(square(x1))*x2 - 1e-9/x1", "sigma*theta", True),
        ("sqrt(2/(1 - x2/x1) - 1)", "(1 + theta/sigma)/sqrt(1 - theta^2/sigma^2)", True),
        ("x1 + x2", "sigma*theta", False),
        ("3.0", "sigma*theta", False),
        ("x1*x2 + 0.001*x1", "sigma*theta", False),
    ],
)
def test_a_formula_is_found_if_difference_or_ratio_is_constant(found, true, expected):
    assert is_solution(found, true, NAMES) is expected


def test_what_takes_too_long_is_not_found():
    assert not is_solution("x1", "sigma", NAMES, seconds=0.0)
