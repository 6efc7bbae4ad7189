"""NIST's nonlinear regression problems with certified results; formulas as warpfit text."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from support.engines.fits import fit
from warpfit.dataset import Dataset

DIRECTORY = Path(__file__).resolve().parents[2] / "data" / "nist_strd"

FORMULAS: dict[str, str] = json.loads((DIRECTORY / "formulas.json").read_text())


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
TIGHT = {"gradient_tolerance": 0.0, "step_tolerance": 1e-14, "loss_tolerance": 0.0}
#: Its certified sum of squares, 1.4e-25, comes from residuals of 8e-14 of values up to 2.5: what
#: float64 rounds away from the values (1e-16 of them) leaves two to three digits of the sum, and
#: of the standard errors that follow from it.
ROUNDED_AWAY = {"Lanczos1"}


def outcome(engine, problem, start):
    """Digits of parameters and sum of squares, iterations, digits of standard errors."""
    given = problem.dataset, [problem.formula], [problem.starts[start - 1]]
    found = fit(*given, engine=engine, standard_errors=True, max_iterations=2000, **TIGHT)
    return (
        ordered_digits(problem, found.parameters[0], problem.certified),
        digits(found.loss[0], problem.squares),
        int(found.iterations[0]),
        ordered_digits(problem, found.standard_errors[0], problem.deviations),
    )
