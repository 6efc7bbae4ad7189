"""Targets that are nothing but noise: how often a search takes a formula for a law.

They are normal, lognormal or Student's t with two degrees of freedom, in turn, of 100 or 1,000
rows; five columns are normal. A fit is wrong that chooses anything but a constant.
"""

import itertools
import time
import warnings
from functools import partial
from typing import Any

import numpy as np
from harness import SEED, ServerProcess, arguments, save

from warpfit.sklearn import SymbolicRegressor

KINDS = tuple(itertools.product(("normal", "lognormal", "t2"), (100, 1000)))
COLUMNS = 5


def searched(address: str, number: int, seconds: float) -> dict[str, Any]:
    kind, rows = KINDS[number % len(KINDS)]
    rng = np.random.default_rng([SEED, number])
    X = rng.normal(size=(rows, COLUMNS))
    draws = {"normal": rng.normal, "lognormal": rng.lognormal, "t2": partial(rng.standard_t, 2)}
    y = draws[kind](size=rows)
    given = {"address": address, "generations": 10**6, "max_seconds": seconds}
    model = SymbolicRegressor(**given, random_state=number)
    begun = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(X, y)
    return {
        "target": number,
        "kind": f"{kind}, {rows} rows",
        "seconds": round(time.perf_counter() - begun, 2),
        "is_wrong": model.program_.variables > 0,
        "expression": model.expression_,
        "r2": round(float(model.score(X, y)), 4),
    }


def main() -> None:
    options = arguments(__doc__, "", devices="cpu", seconds=10.0, targets=48)
    runs: list[dict[str, Any]] = []
    with ServerProcess(devices=options.devices) as server:
        searched(server.address, 0, 1.0)  # compiles what a search needs
        for number in range(options.targets):
            runs.append(searched(server.address, number, options.seconds))
            print(runs[-1], flush=True)
    kinds = {run["kind"] for run in runs}
    wrong = {kind: sum(r["is_wrong"] for r in runs if r["kind"] == kind) for kind in sorted(kinds)}
    found = {"targets": len(runs), "wrong": sum(wrong.values()), "wrong_by_kind": wrong}
    device = "cpu" if options.devices == "cpu" else "gpu"
    name = options.name or f"search_noise_{device}"
    save(name, {"seconds": options.seconds, **found, "runs": runs}, options.folder)
