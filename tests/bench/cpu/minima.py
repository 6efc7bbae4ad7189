"""Whether fits reach the minimum and say truly why they end, beside SciPy in the same run.

    python tests/bench/run.py cpu/minima [--sections mgh wild bounded polynomials] [--wild 2000]
        [--bounded 600] [--seed 1] [--name minima]

Every section runs Levenberg-Marquardt and BFGS in float64 with both accuracies, in this process.

mgh: 25 problems of Moré, Garbow and Hillstrom from their starts and from 10 and 100 times those,
beside SciPy's `least_squares` with `lm` and `trf` (exact Jacobians, tolerances of 1e-15, 2,000
evaluations). A minimum is found where the sum of squares is at most 1 + 1e-4 times the published
one or 1e-10 of that at the standard start.

wild: classic models and random formulas from wild starts. A search that says it has converged does
so falsely if the cosine between the residuals and a column of their Jacobian, by NumPy and
complex steps, is above 1e-2 (screening) or 1e-6 (final) and what the rounding of the values
explains, or if a second fit from its end, with the accuracy `final`, lowers the loss by 1%.

bounded: linear least squares of 2 to 6 parameters with bounds of which some are active at the
solution, beside `lsq_linear` (bvls). A result is wrong if its sum of squares is more than 1 + 1e-6
(final) or 1 + 1e-3 (screening) times that of bvls.

polynomials: degrees 1 to 6 on [1000, 1010], the years 1980 to 2020 and [1e6, 1e6 + 1], beside
`np.polyfit` of the same numbers. A result is wrong if its sum of squares is more than 1.01 times
that of `np.polyfit`.
"""

import argparse
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from harness import save
from numpy.typing import NDArray
from scipy.optimize import least_squares, lsq_linear

from support.engines.fits import fit
from support.engines.gradients import Formula, steepest_cosine
from support.engines.more_garbow_hillstrom import Problem, problems
from support.random_programs import random_program
from warpfit import Reason
from warpfit.calls.results import Fit
from warpfit.dataset import Dataset
from warpfit.expressions.language import to_text
from warpfit.fitting import Accuracy, Tolerances
from warpfit_server.engine.cpu.engine import CpuEngine

Floats = NDArray[np.float64]
METHODS: Final = ("lm", "bfgs")
#: Largest cosine at the end of a search that has converged.
COSINES: Final = {Accuracy.SCREENING: 1e-2, Accuracy.FINAL: 1e-6}
#: Residuals below this many roundings of their values have no direction.
NOISE: Final = 100.0 * np.finfo(float).eps


def run_fits(
    data: Dataset, texts: list[str], starts: Any, method: str, accuracy: Accuracy, **settings: Any
) -> Fit:
    """Fit on the CPU engine by the service's driver, with the tolerances of an accuracy."""
    usual = Tolerances.of(data.layout.dtype, accuracy)
    engine = CpuEngine(1)
    engine.load(data)
    try:
        return fit(
            data,
            texts,
            starts,
            engine=engine,
            method=method,
            gradient_tolerance=usual.gradient,
            step_tolerance=usual.step,
            loss_tolerance=usual.loss,
            **({"max_iterations": accuracy.max_iterations} | settings),
        )
    finally:
        engine.close()


def reasons_of(found: list[Reason]) -> dict[str, int]:
    """Count the reasons."""
    return {str(reason): count for reason, count in Counter(found).most_common()}


# ------------------------------------------------------------- Moré, Garbow and Hillstrom


def is_minimum(problem: Problem, loss: float, first: float) -> bool:
    """Whether a sum of squares is the published minimum, see above."""
    return bool(loss <= max(problem.minimum * (1.0 + 1e-4), 1e-10 * first))


def more_garbow_hillstrom() -> dict[str, Any]:
    """Count the minima that each solver finds, and list where they differ."""
    found: dict[str, dict[str, tuple[float, str, int]]] = {}
    minima: dict[str, dict[str, bool]] = {}
    for problem in problems():
        starts = problem.starts
        names = [f"{problem.name} {start}" for start in starts]
        formula = Formula(problem.formula, problem.columns)
        first = float(np.square(formula.values(problem.start) - problem.target).sum())
        for name in names:
            found[name] = {}
        data = Dataset.of(problem.columns, problem.target, dtype="float64")
        for method in METHODS:
            for accuracy in Accuracy:
                texts = [problem.formula] * len(starts)
                result = run_fits(data, texts, list(starts.values()), method, accuracy)
                for i, name in enumerate(names):
                    outcome = result.loss[i], str(result.reason[i]), result.evaluations[i]
                    loss, reason, evaluations = outcome
                    key = f"{method} {accuracy.value}"
                    found[name][key] = float(loss), reason, int(evaluations)
        for method in ("lm", "trf"):
            for name, start in zip(names, starts.values(), strict=True):
                found[name][f"scipy {method}"] = _scipy(problem, formula, start, method)
        for name in names:
            minima[name] = {
                solver: is_minimum(problem, outcome[0], first)
                for solver, outcome in found[name].items()
            }
    solvers = list(next(iter(found.values())))
    rows = {}
    for name, outcomes in found.items():
        reached = minima[name]
        false = [
            solver
            for solver in solvers
            if outcomes[solver][1] in ("gradient", "step", "loss") and not reached[solver]
        ]
        if len(set(reached.values())) > 1 or false:
            rows[name] = {
                solver: f"{outcomes[solver][0]:.6g} {outcomes[solver][1]} {outcomes[solver][2]}"
                + ("" if reached[solver] else " *")
                for solver in solvers
            }
    return {
        "starts": len(found),
        "minima": {s: sum(of[s] for of in minima.values()) for s in solvers},
        "lm or bfgs, final": sum(of["lm final"] or of["bfgs final"] for of in minima.values()),
        "scipy lm or trf": sum(of["scipy lm"] or of["scipy trf"] for of in minima.values()),
        "evaluations, median": {
            s: float(np.median([of[s][2] for of in found.values()])) for s in solvers
        },
        "where they differ (* is no minimum)": rows,
    }


def _scipy(
    problem: Problem, formula: Formula, start: Floats, method: str
) -> tuple[float, str, int]:
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            found = least_squares(
                lambda p: formula.values(p) - problem.target,
                start,
                formula.jacobian,
                method=method,
                xtol=1e-15,
                ftol=1e-15,
                gtol=1e-15,
                max_nfev=2000,
            )
    except (ValueError, np.linalg.LinAlgError):
        return np.nan, "error", 0
    return 2.0 * float(found.cost), f"status {found.status}", int(found.nfev)


# --------------------------------------------------------------------------- wild starts

#: Models of three variables in [0.1, 5], with the parameters that made the target.
CLASSIC: Final[dict[str, tuple[float, ...]]] = {
    "p1*exp(-p2*x1)": (3.0, 0.7),
    "p1*exp(-p2*x1) + p3": (3.0, 0.9, 1.0),
    "p1*exp(-p2*x1) + p3*exp(-p4*x1)": (2.0, 0.4, 3.0, 2.5),
    "p1*x1/(p2 + x1)": (4.0, 1.5),
    "p1/(1 + exp(-p2*(x1 - p3)))": (5.0, 2.0, 2.5),
    "p1*tanh(p2*x1 + p3)": (2.0, 0.8, -1.0),
    "p1*x1^p2": (1.5, 1.7),
    "p1 + p2*x1^p3": (1.0, 2.0, 0.6),
    "x1^p1": (2.0,),
    "p1*exp(-((x1 - p2)/p3)^2)": (3.0, 2.0, 0.7),
    "p1*sin(p2*x1 + p3)": (2.0, 2.3, 0.4),
    "p1*exp(-p2*x1)*cos(p3*x1 + p4)": (3.0, 0.3, 3.0, 0.2),
    "(p1 + p2*x1)/(1 + p3*x1 + p4*x1^2)": (1.0, 2.0, 0.5, 0.3),
    "p1*(1 - exp(-p2*x1))": (4.0, 0.9),
    "p1*exp(p2/(x1 + p3))": (0.5, 4.0, 1.5),
    "p1/(x1 + p2)^2": (8.0, 1.0),
    "p1*log(p2*x1 + 1)": (2.0, 3.0),
    "p1*x1/(p2 + x1 + x1^2/p3)": (5.0, 1.0, 2.0),
    "p1*x1^p2*x2^p3": (1.2, 0.7, -0.4),
    "p1*exp(p2*x1) + p3*x2 + p4": (0.5, 0.6, 2.0, -1.0),
    "p1 + p2*x1 + p3*x2 + p4*x3": (1.0, -2.0, 0.5, 3.0),
    "p1*x1*exp(-p2*x2) + p3*sqrt(x3)": (2.0, 0.5, 1.5),
    "p1*atan(p2*(x1 - p3)) + p4": (2.0, 3.0, 2.0, 1.0),
    "sqrt(p1 + p2*x1^2)": (2.0, 3.0),
    "p1*exp(-exp(p2 - p3*x1))": (4.0, 2.0, 1.2),
}


@dataclass(frozen=True)
class Family:
    """Formulas with wild starts on one data set."""

    data: Dataset
    texts: list[str]
    starts: list[Floats]
    columns: Floats
    target: Floats


def families(count: int, seed: int) -> Iterator[Family]:
    """Draw ``count`` fits, half of classic models, half of random formulas."""
    rng = np.random.default_rng(seed)
    columns = rng.uniform(0.1, 5.0, (100, 3))
    each = count // 2 // len(CLASSIC)
    for text, truth in CLASSIC.items():
        exact = Formula(text, columns).values(np.array(truth))
        target = exact + 0.01 * np.std(exact) * rng.normal(size=100)
        sizes = np.abs(truth) * 10.0 ** rng.uniform(-1.5, 1.5, (each, len(truth)))
        starts = list(sizes * rng.choice([-1.0, 1.0], sizes.shape))
        data = Dataset.of(columns, target, dtype="float64")
        yield Family(data, [text] * each, starts, columns, target)
    x = columns.T
    target = 2.0 * x[0] * np.exp(-0.5 * x[1]) + 1.5 * np.sqrt(x[2]) + 0.1 * rng.normal(size=100)
    texts, starts = [], []
    while len(texts) < count - each * len(CLASSIC):
        program = random_program(rng, int(rng.integers(5, 31)), variables=3)
        start = rng.normal(size=program.parameters) * 10.0 ** rng.uniform(-1.0, 2.0)
        if (
            program.parameters
            and np.isfinite(Formula(to_text(program), columns).values(start)).all()
        ):
            texts.append(to_text(program))
            starts.append(start)
    yield Family(Dataset.of(columns, target, dtype="float64"), texts, starts, columns, target)


def wild_starts(count: int, seed: int) -> dict[str, Any]:
    """Count false words of convergence, for both methods and accuracies."""
    drawn = list(families(count, seed))
    outcomes: dict[str, Any] = {}
    for method in METHODS:
        for accuracy in Accuracy:
            reasons: list[Reason] = []
            logarithms: list[Floats] = []
            iterations: list[Any] = []
            steep, improved = [], []
            for family in drawn:
                found = run_fits(family.data, family.texts, family.starts, method, accuracy)
                again = run_fits(
                    family.data, family.texts, found.parameters, method, Accuracy.FINAL
                )
                reasons += found.reason.tolist()
                iterations.append(found.iterations)
                with np.errstate(divide="ignore", invalid="ignore"):
                    relative = found.loss / np.square(family.target).sum()
                logarithms.append(np.log10(np.clip(np.nan_to_num(relative, nan=1e9), 1e-9, 1e9)))
                for i in np.flatnonzero(found.success).tolist():
                    text, end = family.texts[i], found.parameters[i]
                    case = {
                        "formula": text,
                        "start": family.starts[i].tolist(),
                        "end": end.tolist(),
                        "reason": str(found.reason[i]),
                        "loss": float(found.loss[i]),
                        "loss of a second fit": float(again.loss[i]),
                        "cosine": _cosine(family, text, end),
                    }
                    if case["cosine"] > COSINES[accuracy]:
                        steep.append(case)
                    elif again.loss[i] < 0.99 * found.loss[i] and not _is_exact(family, text, end):
                        improved.append(case)
            total = len(reasons)
            false = len(steep) + len(improved)
            outcomes[f"{method} {accuracy.value}"] = {
                "fits": total,
                "false converged": false,
                "false converged, percent": round(100.0 * false / total, 2),
                "steep": len(steep),
                "improved by a second fit": len(improved),
                "reasons": reasons_of(reasons),
                "mean decimal logarithm of loss": round(
                    float(np.concatenate(logarithms).mean()), 4
                ),
                "mean iterations": round(float(np.concatenate(iterations).mean()), 2),
                "examples": [*steep[:4], *improved[:4]],
            }
    return outcomes


def _cosine(family: Family, text: str, end: Floats) -> float:
    """Return the largest cosine at an end, or 0 if rounding explains it or it has no value."""
    formula = Formula(text, family.columns)
    if _is_exact(family, text, end):
        return 0.0
    with np.errstate(all="ignore"):
        jacobian, other = formula.jacobian(end), formula.jacobian(end, 1e-120)
        residuals = formula.values(end) - family.target
    # At a singular point, such as that of the square root at 0, derivatives depend on the step.
    known = (np.isfinite(jacobian) & np.isclose(jacobian, other, 1e-6, 0.0)).all(axis=0)
    cosine = steepest_cosine(np.where(known, jacobian, 0.0), residuals, known)
    sizes = np.abs(formula.values(end)) + np.abs(family.target)
    noise = NOISE * float(np.linalg.norm(sizes) / np.linalg.norm(residuals))
    return cosine if cosine > noise else 0.0


def _is_exact(family: Family, text: str, end: Floats) -> bool:
    """Whether the residuals are no more than the rounding of the values."""
    values = Formula(text, family.columns).values(end)
    sizes = np.abs(values) + np.abs(family.target)
    return bool(np.linalg.norm(values - family.target) <= NOISE * np.linalg.norm(sizes))


# ------------------------------------------------------------------- bounded convex problems


def bounded_convex(count: int, seed: int) -> dict[str, Any]:
    """Compare linear least squares with bounds with bvls."""
    rng = np.random.default_rng(seed)
    outcomes: dict[str, Any] = {}
    cases = []
    for index in range(count // 10):
        n = 2 + index % 5
        rows = int(rng.integers(n + 5, 40))
        if index % 2:
            matrix = rng.normal(size=(rows, n)) @ (np.eye(n) + 0.7 * rng.normal(size=(n, n)))
            columns, text = matrix, " + ".join(f"p{i}*x{i}" for i in range(1, n + 1))
        else:
            columns = np.sort(rng.uniform(0.1, 4.0, (rows, 1)), axis=0)
            matrix = columns ** np.arange(n)
            text = " + ".join(f"p{i + 1}*x1^{i}" if i else "p1" for i in range(n))
        target = matrix @ rng.normal(size=n) + rng.normal(size=rows)
        best = np.linalg.lstsq(matrix, target)[0]
        width = np.abs(best) + 0.1
        lower = best + width * rng.uniform(-1.5, 0.3, (10, n))
        upper = lower + width * rng.uniform(0.1, 2.0, (10, n))
        lower[rng.random((10, n)) < 0.3] = -np.inf
        upper[rng.random((10, n)) < 0.3] = np.inf
        with np.errstate(invalid="ignore"):
            starts = np.clip(rng.normal(size=(10, n)), lower, upper)
        exact = [
            lsq_linear(matrix, target, b, "bvls", 1e-15, max_iter=500)
            for b in zip(lower, upper, strict=True)
        ]
        cases.append(
            (Dataset.of(columns, target, dtype="float64"), text, starts, lower, upper, exact)
        )
    for method in METHODS:
        for accuracy in Accuracy:
            limit = 1e-6 if accuracy is Accuracy.FINAL else 1e-3
            ratios, reasons, converged, evaluations = [], [], [], []
            for data, text, starts, lower, upper, exact in cases:
                bounds = {"lower": list(lower), "upper": list(upper)}
                found = run_fits(data, [text] * 10, list(starts), method, accuracy, **bounds)
                ratios += (found.loss / [2.0 * each.cost for each in exact]).tolist()
                reasons += found.reason.tolist()
                converged += found.success.tolist()
                evaluations += found.evaluations.tolist()
            wrong = ~(np.array(ratios) <= 1.0 + limit)
            outcomes[f"{method} {accuracy.value}"] = {
                "problems": len(ratios),
                "wrong": int(wrong.sum()),
                "wrong and called converged": int((wrong & np.array(converged)).sum()),
                "largest ratio": float(np.max(ratios)),
                "reasons": reasons_of(reasons),
                "evaluations": dict(
                    zip(
                        ("median", "95th percentile", "most"),
                        np.percentile(evaluations, [50, 95, 100]).tolist(),
                        strict=True,
                    )
                ),
            }
    return outcomes


# ------------------------------------------------------------------------------ polynomials


def polynomials(seed: int) -> dict[str, Any]:
    """Compare fits of polynomials far from 0 with `np.polyfit`."""
    rng = np.random.default_rng(seed)
    ranges = {
        "[1000, 1010]": np.linspace(1000.0, 1010.0, 82),
        "1980 to 2020": np.arange(1980.0, 2021.0),
        "[1e6, 1e6 + 1]": np.linspace(1e6, 1e6 + 1.0, 60),
    }
    outcomes: dict[str, Any] = {}
    for place, x in ranges.items():
        z = (x - x.mean()) / (np.ptp(x) / 2.0)
        for degree in range(1, 7):
            y = np.polyval(rng.uniform(-1.0, 1.0, degree + 1), z) + 0.01 * rng.normal(size=len(x))
            text = " + ".join(f"p{i + 1}*x1^{i}" if i else "p1" for i in range(degree + 1))
            data = Dataset.of(x[:, None], y, dtype="float64")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exact = float(np.square(np.polyval(np.polyfit(x, y, degree), x) - y).sum())
            entry: dict[str, Any] = {"polyfit": exact}
            for method in METHODS:
                for accuracy in Accuracy:
                    start = [np.ones(degree + 1)]
                    found = run_fits(data, [text], start, method, accuracy)
                    entry[f"{method} {accuracy.value}"] = {
                        "times polyfit": round(float(found.loss[0]) / exact, 6),
                        "reason": str(found.reason[0]),
                        "iterations": int(found.iterations[0]),
                    }
            outcomes[f"{place}, degree {degree}"] = entry
    kinds = [f"{method} {accuracy.value}" for method in METHODS for accuracy in Accuracy]
    right = {
        kind: sum(of[kind]["times polyfit"] <= 1.01 for of in outcomes.values()) for kind in kinds
    }
    false = {
        kind: sum(
            of[kind]["times polyfit"] > 1.01 and Reason(of[kind]["reason"]).converged
            for of in outcomes.values()
        )
        for kind in kinds
    }
    return {"problems": len(outcomes), "right": right, "false converged": false, "each": outcomes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sections = ("mgh", "wild", "bounded", "polynomials")
    parser.add_argument("--sections", nargs="+", choices=sections, default=sections)
    parser.add_argument("--wild", type=int, default=2000)
    parser.add_argument("--bounded", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--name", default="minima")
    parser.add_argument("--directory", type=Path)
    arguments = parser.parse_args()
    run = {
        "mgh": more_garbow_hillstrom,
        "wild": lambda: wild_starts(arguments.wild, arguments.seed),
        "bounded": lambda: bounded_convex(arguments.bounded, arguments.seed),
        "polynomials": lambda: polynomials(arguments.seed),
    }
    content: dict[str, Any] = {"seed": arguments.seed}
    for section in arguments.sections:
        started = time.perf_counter()
        content[section] = run[section]()
        content[section]["seconds"] = round(time.perf_counter() - started, 1)
    save(arguments.name, content, arguments.directory)


if __name__ == "__main__":
    main()
