"""Measure whether probabilities mean what they say: false discoveries, and coverage of intervals.

* False discoveries: `warpfit.sklearn.chance` on ``--targets`` that are noise, with a small search.
  Of those with p <= 0.05 there should be 5%, within the binomial interval of 95%.
* Coverage: ``--sets`` of y = 2 exp(-0.7 x) + noise are simulated, and p1*exp(p2*x) is fitted to all
  of them in one call. Intervals of Student's t and standard errors, and those of profile
  likelihood, of 68% and 95% should hold the true p2 as often.
"""

import math
from typing import Any

import numpy as np
from harness import SEED, arguments, connected, save

import warpfit
from warpfit.evidence import student_t
from warpfit.sklearn import SymbolicRegressor
from warpfit.sklearn.chance import chance_of
from warpfit.sklearn.estimator import TrainingData

ROWS, VARIABLES, POINTS, NOISE = 60, 2, 30, 0.05
TRUE = (2.0, -0.7)
LEVEL = 0.05
INTERVALS = (0.68, 0.95)


def binomial_interval(count: int, share: float) -> list[int]:
    """Return least and greatest numbers of successes that 95% of draws lie between."""
    rest, ks = 1 - share, range(count + 1)
    below = np.cumsum([math.comb(count, k) * share**k * rest ** (count - k) for k in ks])
    return np.searchsorted(below, (0.025, 0.975)).tolist()


def false_discoveries(client: warpfit.Client, targets: int, shuffles: int) -> dict[str, Any]:
    """Return how many noise targets have p <= 5%."""
    rng = np.random.default_rng(SEED)
    sizes = {"population": 20, "generations": 1, "max_size": 7, "simplify": False}
    model = SymbolicRegressor(**sizes, random_state=0, operators=("+", "*", "sin", "exp"))
    found = []
    for seed in range(targets):
        X, y = rng.normal(size=(ROWS, VARIABLES)), rng.normal(size=ROWS)
        training = TrainingData(X, y, np.ones(ROWS))
        with np.errstate(all="ignore"):
            found.append(chance_of(model, training, (), shuffles, seed, client).probability)
    return {
        **{"targets": targets, "shuffles": shuffles, "discoveries": sum(p <= LEVEL for p in found)},
        "interval": binomial_interval(targets, LEVEL),
        "mean_probability": round(float(np.mean(found)), 4),
    }


def coverage(client: warpfit.Client, sets: int) -> dict[str, Any]:
    """Return the share of simulated sets whose intervals hold the true parameter.

    The targets are variables of one data set: p1*exp(p2*x) - t is fitted to 0.
    """
    rng = np.random.default_rng(SEED)
    x = np.linspace(0.0, 3.0, POINTS)
    targets = TRUE[0] * np.exp(TRUE[1] * x) + rng.normal(0.0, NOISE, (sets, POINTS))
    data = client.upload(np.column_stack([x, *targets]), np.zeros(POINTS), dtype="float64")
    programs = [warpfit.parse(f"p1*exp(p2*x1) - x{i + 2}") for i in range(sets)]
    starts, found = [list(TRUE)] * sets, {}
    for level in INTERVALS:
        asked = {"evidence": True, "intervals": level, "accuracy": "final"}
        fit = client.optimize(data, programs, starts, **asked)
        values = np.array([vector[1] for vector in fit.parameters])
        errors = np.array([vector[1] for vector in fit.evidence.standard_errors])
        half = student_t(level, POINTS - 2) * errors
        ends = np.array([each[1] for each in fit.evidence.intervals])
        found[f"{level:.0%}"] = {
            "student": float(np.mean(np.abs(values - TRUE[1]) <= half)),
            "profile": float(np.mean((ends[:, 0] <= TRUE[1]) & (TRUE[1] <= ends[:, 1]))),
            "interval": [round(k / sets, 3) for k in binomial_interval(sets, level)],
        }
    return {"sets": sets, "rows": POINTS, **found}


def main() -> None:
    options = arguments(__doc__, "calibration", targets=200, shuffles=199, sets=1000)
    with connected() as (_, client):
        found = {"seed": SEED, "coverage": coverage(client, options.sets)}
        wrong = false_discoveries(client, options.targets, options.shuffles)
        found["false_discoveries"] = wrong
    save(options.name, found, options.folder)
