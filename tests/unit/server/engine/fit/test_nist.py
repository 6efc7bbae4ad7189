"""NIST's certified nonlinear regressions, beside SciPy's Levenberg-Marquardt (MINPACK)."""

from __future__ import annotations

import numpy as np
import pytest

from support.engines import nist
from support.engines.fits import fit
from warpfit.fitting import Accuracy, Tolerances
from warpfit_server.engine.cpu.engine import CpuEngine

least_squares = pytest.importorskip("scipy.optimize").least_squares

PROBLEMS = {name: nist.load(name) for name in nist.FORMULAS}
CASES = [(name, start) for name in PROBLEMS for start in (1, 2)]


@pytest.fixture(scope="module")
def engine():
    """An engine with all problems loaded."""
    compiled = CpuEngine(threads=1)
    for problem in PROBLEMS.values():
        compiled.load(problem.dataset)
    yield compiled
    compiled.close()


@pytest.fixture(scope="module")
def outcomes(engine):
    """Digits of parameters, of the sum of squares, iterations, digits of standard errors."""
    return {(name, start): nist.outcome(engine, PROBLEMS[name], start) for name, start in CASES}


@pytest.mark.parametrize(("name", "start"), CASES)
def test_six_certified_digits(outcomes, name, start):
    parameters, squares, _, errors = outcomes[name, start]
    assert parameters.min() >= 6, parameters
    assert squares >= (2 if name in nist.ROUNDED_AWAY else 6)
    assert errors.min() >= (2 if name in nist.ROUNDED_AWAY else 6), errors


def test_iterations_are_few_from_every_start(outcomes):
    """MINPACK needs 295 for MGH10 and 763 for Bennett5, and does not find BoxBOD from its first."""
    assert max(iterations for _, _, iterations, _ in outcomes.values()) <= 600  # MGH10
    assert outcomes["Bennett5", 1][2] <= 100
    assert outcomes["BoxBOD", 1][2] <= 60


@pytest.mark.parametrize(("name", "start"), CASES)
def test_final_accuracy_reaches_six_certified_digits(engine, name, start):
    problem, final = PROBLEMS[name], Tolerances.of(np.dtype("float64"), Accuracy.FINAL)
    found = fit(
        problem.dataset,
        [problem.formula],
        [problem.starts[start - 1]],
        engine=engine,
        max_iterations=Accuracy.FINAL.max_iterations,
        gradient_tolerance=final.gradient,
        step_tolerance=final.step,
        loss_tolerance=final.loss,
    )
    assert found.success[0]
    assert nist.ordered_digits(problem, found.parameters[0], problem.certified).min() >= 6
