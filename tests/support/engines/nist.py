"""NIST's nonlinear regression problems with certified results; formulas as warpfit text."""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from support.engines.fits import fit
from warpfit.dataset import Dataset

DIRECTORY = Path(__file__).resolve().parents[2] / "data" / "nist_strd"

_GAUSS = "p1*exp(-p2*x1) + p3*exp(-((x1-p4)^2)/p5^2) + p6*exp(-((x1-p7)^2)/p8^2)"
_LANCZOS = "p1*exp(-p2*x1) + p3*exp(-p4*x1) + p5*exp(-p6*x1)"
_LOWER = {
    "Misra1a": "p1*(1 - exp(-p2*x1))",
    "Chwirut2": "exp(-p1*x1)/(p2 + p3*x1)",
    "Chwirut1": "exp(-p1*x1)/(p2 + p3*x1)",
    "Lanczos3": _LANCZOS,
    "Gauss1": _GAUSS,
    "Gauss2": _GAUSS,
    "DanWood": "p1*x1^p2",
    "Misra1b": "p1*(1 - (1 + p2*x1/2)^(-2))",
}
_AVERAGE = {
    "Kirby2": "(p1 + p2*x1 + p3*x1^2)/(1 + p4*x1 + p5*x1^2)",
    "Hahn1": "(p1 + p2*x1 + p3*x1^2 + p4*x1^3)/(1 + p5*x1 + p6*x1^2 + p7*x1^3)",
    "Nelson": "p1 - p2*x1*exp(-p3*x2)",
    "MGH17": "p1 + p2*exp(-x1*p4) + p3*exp(-x1*p5)",
    "Lanczos1": _LANCZOS,
    "Lanczos2": _LANCZOS,
    "Gauss3": _GAUSS,
    "Misra1c": "p1*(1 - (1 + 2*p2*x1)^(-0.5))",
    "Misra1d": "p1*p2*x1*(1 + p2*x1)^(-1)",
    "Roszman1": "p1 - p2*x1 - atan(p3/(x1 - p4))/pi",
    "ENSO": "p1 + p2*cos(2*pi*x1/12) + p3*sin(2*pi*x1/12) + p5*cos(2*pi*x1/p4)"
    " + p6*sin(2*pi*x1/p4) + p8*cos(2*pi*x1/p7) + p9*sin(2*pi*x1/p7)",
}
_HIGHER = {
    "MGH09": "p1*(x1^2 + x1*p2)/(x1^2 + x1*p3 + p4)",
    "Thurber": "(p1 + p2*x1 + p3*x1^2 + p4*x1^3)/(1 + p5*x1 + p6*x1^2 + p7*x1^3)",
    "BoxBOD": "p1*(1 - exp(-p2*x1))",
    "Rat42": "p1/(1 + exp(p2 - p3*x1))",
    "MGH10": "p1*exp(p2/(x1 + p3))",
    "Eckerle4": "p1/p2*exp(-0.5*((x1 - p3)/p2)^2)",
    "Rat43": "p1/(1 + exp(p2 - p3*x1))^(1/p4)",
    "Bennett5": "p1*(p2 + x1)^(-1/p3)",
}
FORMULAS = _LOWER | _AVERAGE | _HIGHER


@dataclass(frozen=True)
class Problem:
    name: str
    formula: str
    starts: np.ndarray
    """[2, parameters]."""
    certified: np.ndarray
    deviations: np.ndarray
    squares: float
    """Certified residual sum of squares."""
    dataset: Dataset
    """float64."""


def load(name: str) -> Problem:
    """Read a problem from its file; of Nelson the logarithm of y is fitted, as certified."""
    lines = (DIRECTORY / f"{name}.dat").read_text().splitlines()
    rows = [re.split(r"[=\s]+", line.strip()) for line in lines]
    table = np.array(
        [[float(cell) for cell in row[1:]] for row in rows if re.fullmatch(r"b\d", row[0])]
    )
    (squares,) = (float(line.split()[-1]) for line in lines if line.startswith("Residual Sum of"))
    first = max(index for index, line in enumerate(lines) if line.startswith("Data:")) + 1
    data = np.array([[float(cell) for cell in line.split()] for line in lines[first:] if line])
    y = np.log(data[:, 0]) if name == "Nelson" else data[:, 0]
    dataset = Dataset.of(data[:, 1:], y, dtype="float64")
    return Problem(name, FORMULAS[name], table[:, :2].T, table[:, 2], table[:, 3], squares, dataset)


def digits(got: np.ndarray | float, certified: np.ndarray | float) -> np.ndarray:
    """Log relative error: correct significant digits, at most the 11 that NIST certifies."""
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.abs(np.asarray(got) - certified) / np.abs(certified)
        return np.nan_to_num(np.clip(-np.log10(error), 0.0, 11.0), nan=0.0)


def ordered_digits(problem: Problem, got: np.ndarray, certified: np.ndarray) -> np.ndarray:
    """Digits of a number for each parameter; MGH17's exponentials may come in the other order."""
    found = digits(got, certified)
    if problem.name != "MGH17":
        return found
    return max(found, digits(np.asarray(got)[[0, 2, 1, 4, 3]], certified), key=np.min)


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


def outcome(engine, problem, start):
    """Digits of parameters and sum of squares, iterations, digits of standard errors."""
    found = fit(
        problem.dataset,
        [problem.formula],
        [problem.starts[start - 1]],
        engine=engine,
        standard_errors=True,
        **TIGHT,
    )
    return (
        ordered_digits(problem, found.parameters[0], problem.certified),
        digits(found.loss[0], problem.squares),
        int(found.iterations[0]),
        ordered_digits(problem, found.standard_errors[0], problem.deviations),
    )
