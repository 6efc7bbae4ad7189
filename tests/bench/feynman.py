"""How many of 20 Feynman equations does `SymbolicRegressor` find in gplearn's time?

    python tests/bench/feynman.py [--rows 1000] [--seed 1] [--equations I.6.2a ...]

The equations are the first 20 of the database, in its order (`tests/data/feynman`). Each is drawn
without noise, on 1,000 rows for training and as many for testing. gplearn runs first, with its
defaults. Its wall time is then the time of warpfit's `SymbolicRegressor`, with its own defaults but
for the number of generations, on a CPU engine with one thread, as gplearn uses one. An equation is
*recovered* if SymPy finds the formula equivalent to the true one by SRBench's rule, whatever shape
it is written in (`support.repository.symbolic`: numbers are rounded to three decimals, difference
or ratio is a constant; what SymPy cannot decide in a minute is not recovered), and *accurate* if
the error on the test rows is below 1e-16 of the target's variance, which an approximation may
reach, too. The server runs for the whole benchmark; its start is not counted and is reported apart.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gplearn.genetic import SymbolicRegressor as Gplearn
from harness import save
from numpy.typing import NDArray

from support.repository.symbolic import is_solution
from warpfit import parse
from warpfit.embedded import embedded_server
from warpfit.expressions import reference
from warpfit.expressions.printing import to_text
from warpfit.frontends.gplearn import from_gplearn
from warpfit.sklearn import SymbolicRegressor

EQUATIONS = Path(__file__).resolve().parents[1] / "data" / "feynman" / "equations.json"
#: Part of the target's variance below which an error is rounding.
ACCURATE = 1e-16
#: Part of gplearn's time that the search may use; the rest is for what comes before and after.
SHARE = 0.95
SIDES = ("gplearn", "warpfit")
#: gplearn divides by 1 where the divisor is near 0, which a formula does not mean.
PEERS_OPERATORS = {"div": "div"}
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Problem:
    """Training and test rows of one equation."""

    X: Floats
    y: Floats
    X_test: Floats
    y_test: Floats

    @classmethod
    def draw(cls, equation: dict[str, Any], rows: int, seed: int) -> Problem:
        """Draw the variables uniformly from their ranges."""
        rng = np.random.default_rng(seed)
        ranges = equation["ranges"]
        program = parse(equation["formula"], tuple(ranges))
        tables = [
            np.column_stack([rng.uniform(low, high, rows) for low, high in ranges.values()])
            for _ in range(2)
        ]
        targets = [reference.evaluate_program(program, table.T) for table in tables]
        return cls(tables[0], targets[0], tables[1], targets[1])

    def judge(self, model: Any) -> dict[str, Any]:
        """Time of the fit, and error on rows that the model has not seen."""
        started = time.perf_counter()
        model.fit(self.X, self.y)
        seconds = time.perf_counter() - started
        difference = model.predict(self.X_test) - self.y_test
        error = float(np.mean(np.square(difference)) / np.var(self.y_test))
        return {
            "seconds": round(seconds, 2),
            "relative_error": float(f"{error:.3g}"),
            "accurate": bool(error < ACCURATE),
        }


def compare(equation: dict[str, Any], address: str, rows: int, seed: int) -> dict[str, Any]:
    """Run both on one equation."""
    problem = Problem.draw(equation, rows, seed)
    peer = Gplearn(random_state=seed)
    peers = problem.judge(peer)
    ours = SymbolicRegressor(
        address=address,
        generations=10**6,
        max_seconds=SHARE * peers["seconds"],
        random_state=seed,
    )
    found = problem.judge(ours)
    case = {
        "name": equation["name"],
        "formula": equation["formula"],
        "gplearn": {**peers, "expression": to_text(from_gplearn(peer._program, PEERS_OPERATORS))},
        "warpfit": {**found, "generations": ours.n_iter_, "expression": ours.expression_},
    }
    return judged(case, equation)


def judged(case: dict[str, Any], equation: dict[str, Any]) -> dict[str, Any]:
    """Note for each side whether its formula is the equation."""
    names = tuple(equation["ranges"])
    for side in SIDES:
        found = case[side].pop("expression")
        case[side]["recovered"] = is_solution(found, equation["formula"], names)
        case[side]["expression"] = found
    return case


def total(cases: list[dict[str, Any]], what: str) -> dict[str, Any]:
    """Add up what the sides have."""
    return {side: sum(case[side][what] for case in cases) for side in SIDES}


def main() -> None:
    """Run all equations and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--equations", nargs="*", help="names (default: all)")
    options = parser.parse_args()
    equations = json.loads(EQUATIONS.read_text())[:20]
    wanted = options.equations or [equation["name"] for equation in equations]
    started = time.perf_counter()
    with embedded_server(["--devices", "cpu", "--threads", "1"]) as address:
        start_seconds = time.perf_counter() - started
        cases = []
        for equation in equations:
            if equation["name"] not in wanted:
                continue
            cases.append(compare(equation, address, options.rows, options.seed))
            print(json.dumps(cases[-1], indent=1), flush=True)
    recovered, accurate = total(cases, "recovered"), total(cases, "accurate")
    seconds = {side: round(seconds, 1) for side, seconds in total(cases, "seconds").items()}
    print(recovered, accurate, seconds)
    if not options.equations:
        content = {
            "rows": options.rows,
            "seed": options.seed,
            "server_start_seconds": round(start_seconds, 2),
            "recovered": recovered,
            "accurate": accurate,
            "seconds": seconds,
            "equations": cases,
        }
        save("feynman", content)


if __name__ == "__main__":
    main()
