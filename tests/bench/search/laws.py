"""Laws of four to seven variables among ten: how many a search finds, and how fast.

Each law has 1,000 rows of ten columns, uniform in [0.3, 3], and noise of 2% of its spread. A law is
found if the best formula of the front has an R2 above 0.9999 to the noiseless law on 2,000 new
rows. The client is real, and sends one call of ``Search``. ``--peer`` searches with pyoperon in
turns, on all cores, with the same operators, length and time. ``--own`` takes eight further laws,
to which nothing was tuned.
"""

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from harness import arguments, connected, save
from numpy.typing import NDArray
from peers import operon_search

import warpfit
from warpfit.calls.search import SearchResult
from warpfit.expressions.reference import evaluate_program

Floats = NDArray[np.float64]
ROWS, NEW_ROWS, COLUMNS, NOISE, MAX_SIZE = 1_000, 2_000, 10, 0.02, 40
FOUND = 0.9999
OPERONS = "add,sub,mul,div,square,sqrt,exp,log,sin,cos,constant,variable"

LAWS: dict[str, Callable[[Floats], Floats]] = {
    "planck": lambda x: x[0] ** 3 / (np.exp(x[0] / x[1]) - 1) * (1 + 0.3 * np.sin(x[2] * x[3])),
    "damped": lambda x: (
        x[4] * np.exp(-x[0] * x[1]) * np.cos(2 * x[2] * x[0] + x[3]) + 0.5 * x[5] / (1 + x[6] ** 2)
    ),
    "inhibition": lambda x: x[0] * x[1] / (0.7 * (1 + x[2] / 0.9) + x[1]) * np.exp(-0.3 * x[3]),
    "lens": lambda x: 1 / ((x[0] + 0.5) * (1 / x[1] + 1 / x[2])) + 0.2 * x[3] * x[4],
    "arrhenius": lambda x: 3 * x[0] ** 2 * np.exp(-2 * x[1] / x[2]) + x[3] / (1 + x[4]),
    "manning": lambda x: x[0] * x[1] ** (2 / 3) * np.sqrt(x[2]) / x[3] + 0.1 * x[4] ** 2,
    "pendulum": lambda x: (
        2 * np.pi * np.sqrt(x[0] / x[1]) * (1 + x[2] ** 2 / 16) + 0.5 * np.sin(x[3] * x[4])
    ),
    "energy": lambda x: x[0] / np.sqrt(1 - (x[1] / 4) ** 2) + 0.5 * x[2] * x[3] ** 2 - x[4] / x[5],
    "beat": lambda x: np.sin(2 * x[0]) * np.cos(x[1] * x[2]) * np.exp(-0.5 * x[3]),
    "friction": lambda x: x[0] * np.tanh(x[1] * x[2]) + 0.4 * x[3] * np.log(1 + x[4]),
}
OWN: dict[str, Callable[[Floats], Floats]] = {
    "barometer": lambda x: x[0] * np.exp(-x[1] * x[2] / (0.8 * x[3])) + 0.3 * x[4],
    "doppler": lambda x: x[0] * np.sqrt((4 + x[1]) / (4 - x[1])) * (1 + 0.2 * x[2] * x[3]),
    "gaussian": lambda x: np.exp(-((x[0] - x[1]) ** 2) / (2 * x[2] ** 2)) * x[3] / x[2],
    "michaelis": lambda x: x[0] * x[1] / (x[2] + x[1]) + x[3] * np.sqrt(x[4]),
    "orbit": lambda x: x[0] * (1 - x[1] ** 2 / 16) / (1 + x[1] / 4 * np.cos(x[2])) - 0.2 * x[3],
    "shock": lambda x: np.log(1 + x[0] * x[1]) * x[2] + np.sin(x[3] + x[4]),
    "triangle": lambda x: np.sqrt(x[0] ** 2 + x[1] ** 2 - x[0] * x[1] * np.cos(x[2])) * x[3],
    "wave": lambda x: x[0] * np.sin(x[1] * x[2] - 2 * x[3]) + x[4] ** 2 / x[5],
}


def data(law: Callable[[Floats], Floats], seed: int) -> tuple[Floats, Floats, Floats]:
    """Return X [rows + new rows, columns], the noiseless law there, and the target with noise."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(0.3, 3, (ROWS + NEW_ROWS, COLUMNS))
    values = law(X.T)
    return X, values, values + NOISE * values.std() * rng.normal(size=len(values))


def r2(predicted: Floats, values: Floats) -> float:
    """Return R2 to the law; minus infinity where a prediction is not finite."""
    with np.errstate(all="ignore"):
        left = np.square(predicted - values).mean() / values.var()
    return float(1 - left) if np.isfinite(left) else -np.inf


def best_r2(found: SearchResult, X: Floats, values: Floats) -> float:
    with np.errstate(all="ignore"):
        predicted = [evaluate_program(found.formula(i), X.T) for i in range(len(found))]
    return max(r2(np.broadcast_to(each, len(X)), values) for each in predicted)


def search(
    client: warpfit.Client, law: Callable[[Floats], Floats], seconds: float, seed: int
) -> dict[str, Any]:
    X, values, y = data(law, 7 + seed)
    new = X[ROWS:], values[ROWS:]
    course: list[tuple[float, float]] = []

    def progress(found: SearchResult) -> None:
        course.append((found.seconds, best_r2(found, *new)))

    given = {"seconds": seconds, "max_size": MAX_SIZE, "seed": seed}
    with client.upload(X[:ROWS], y[:ROWS], dtype="float64") as table:
        started = time.perf_counter()
        found = client.search(table, progress=progress, **given)
        wall = time.perf_counter() - started
    score = best_r2(found, *new)
    when = [second for second, reached in [*course, (found.seconds, score)] if reached > FOUND]
    return {
        "r2": score, "found_after": when[0] if when else None, "wall_seconds": wall,
        "formulas": found.tried, "formulas_per_second": found.tried / found.seconds,
        "distinct": found.distinct / max(1, found.tried), "fits": found.fits,
        "pairs": found.pairs, "restarts": found.restarts, "generations": found.generations,
        "course": [[round(second, 1), round(reached, 6)] for second, reached in course[::2]],
    }  # fmt: skip


def peer(law: Callable[[Floats], Floats], seconds: float, seed: int) -> dict[str, Any]:
    X, values, y = data(law, 7 + seed)
    given = (seconds, seed, len(os.sched_getaffinity(0)), MAX_SIZE)
    model = operon_search(OPERONS, *given).fit(X[:ROWS], y[:ROWS])
    return {"r2": r2(np.asarray(model.predict(X[ROWS:])), values[ROWS:])}


def main() -> None:
    flags = {"devices": "cpu", "seconds": 20.0, "seeds": (0, 1), "laws": ()}
    given = arguments(__doc__, "", **flags, peer=False, own=False)
    known = OWN if given.own else LAWS
    laws = {name: law for name, law in known.items() if not given.laws or name in given.laws}
    rows = []
    with connected(devices=given.devices) as (_, client):
        with client.upload(np.arange(9.0)[:, None], np.arange(9.0)) as table:
            client.search(table, generations=2)  # so that no law waits for a compiler
        for seed in given.seeds:
            for name, law in laws.items():
                found = search(client, law, given.seconds, seed)
                row = {"law": name, "seed": seed, "warpfit": found}
                if given.peer:
                    row["pyoperon"] = peer(law, given.seconds, seed)
                rows.append(row)
                print(name, seed, found["r2"], flush=True)
    when = [row["warpfit"]["found_after"] for row in rows]
    rates = [row["warpfit"]["formulas_per_second"] for row in rows]
    content: dict[str, Any] = {
        "seconds": given.seconds, "max_size": MAX_SIZE, "rows": ROWS, "noise": NOISE,
        "searches": len(rows), "found": len(when) - when.count(None),
        "median_seconds_until_found": statistics.median(1e9 if t is None else t for t in when),
        "formulas_per_second": statistics.median(rates), "laws": rows,
    }  # fmt: skip
    if given.peer:
        content["found_by_pyoperon"] = sum(row["pyoperon"]["r2"] > FOUND for row in rows)
    device = "cpu" if given.devices.startswith("cpu") else "gpu"
    name = given.name or f"search_laws_{device}{'_own' if given.own else ''}"
    save(name, content, given.folder)
