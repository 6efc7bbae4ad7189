"""NIST's certified nonlinear regressions, beside SciPy's Levenberg-Marquardt (MINPACK)."""

from __future__ import annotations

import numpy as np
import pytest

from support import nist
from support.fits import fit
from support.numpy_engine import NumpyEngine
from warpfit import parse
from warpfit.derivatives import differentiate

least_squares = pytest.importorskip("scipy.optimize").least_squares

#: As tight as float64 allows: only a step that changes nothing ends a search.
TIGHT = {
    "gradient_tolerance": 0.0,
    "step_tolerance": 1e-14,
    "loss_tolerance": 0.0,
    "max_iterations": 2000,
}
#: Its certified sum of squares, 1.4e-25, comes from residuals of 8e-14 of values up to 2.5: what
#: float64 rounds away from the values (1e-16 of them) leaves two to three digits of the sum, and
#: of the standard errors that follow from it.
ROUNDED_AWAY = {"Lanczos1"}


@pytest.fixture(scope="module")
def outcomes():
    """Digits of parameters and sum of squares, by problem and start, of both solvers."""
    return {
        (name, start): (ours(problem, start), scipys(problem, start))
        for name in nist.FORMULAS
        for problem in [nist.load(name)]
        for start in (1, 2)
    }


def ours(problem, start):
    found = fit(
        problem.dataset,
        [problem.formula],
        [problem.starts[start - 1]],
        engine=NumpyEngine(problem.dataset),
        standard_errors=True,
        **TIGHT,
    )
    return (
        nist.digits(found.parameters[0], problem.certified),
        nist.digits(found.loss[0], problem.squares),
        int(found.iterations[0]),
        nist.digits(found.standard_errors[0], problem.deviations),
    )


def scipys(problem, start):
    program, variables = parse(problem.formula), problem.dataset.variables
    target = problem.dataset.target
    with np.errstate(all="ignore"):
        found = least_squares(
            lambda p: differentiate(program, variables, p)[0] - target,
            problem.starts[start - 1],
            jac=lambda p: differentiate(program, variables, p)[1].T,
            method="lm",
            x_scale="jac",
            **dict.fromkeys(("ftol", "xtol", "gtol"), 1e-15),
            max_nfev=2000,
        )
    return (
        nist.digits(found.x, problem.certified),
        nist.digits(2 * found.cost, problem.squares),
        found.nfev,
    )


@pytest.mark.parametrize("name", nist.FORMULAS)
@pytest.mark.parametrize("start", [1, 2])
def test_six_certified_digits(outcomes, name, start):
    parameters, squares, _, errors = outcomes[name, start][0]
    assert parameters.min() >= 6, parameters
    assert squares >= (2 if name in ROUNDED_AWAY else 6)
    assert errors.min() >= (2 if name in ROUNDED_AWAY else 6), errors


def test_at_least_as_good_as_scipy_in_total(outcomes):
    print(f"\n{table(outcomes)}")
    totals = [
        sum(digits.min() + squares for digits, squares, *_ in (pair[which] for pair in results))
        for which in (0, 1)
        for results in [outcomes.values()]
    ]
    assert totals[0] >= totals[1]


def table(outcomes) -> str:
    """Least log relative error of the parameters, that of the sum of squares, and iterations."""
    lines = ["problem   start | warpfit: digits, of RSS, iterations | SciPy: digits, of RSS, nfev"]
    for (name, start), (mine, theirs) in outcomes.items():
        cells = [f"{r[0].min():7.1f} {float(r[1]):6.1f} {r[2]:6d}" for r in (mine, theirs)]
        lines.append(f"{name:9} {start}     | {cells[0]:35} | {cells[1]}")
    return "\n".join(lines)
