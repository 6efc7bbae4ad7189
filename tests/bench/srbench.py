"""SRBench's tracks for `SymbolicRegressor`, pyoperon and gplearn, in the same time.

    python tests/bench/srbench.py --track feynman --noise 0 --seconds 30 --out runs.jsonl
    python tests/bench/srbench.py --summary runs.jsonl more.jsonl

Ground truth: the 100 Feynman equations (`tests/data/feynman`) and the 14 Strogatz equations, which
are simulated here: two-variable systems from four starts, 100 points each, with the derivative as
the target (W. La Cava et al., "Inference of compact nonlinear dynamic models by epigenetic local
search", 2016). Noise is normal with standard deviation ``noise`` times the target's root mean
square, on the training part alone; 75% of the rows are for training. A formula is a *symbolic
solution* by SRBench's rule (`support.repository.symbolic`) and an *accuracy solution* if R2 > 0.999
on the test part. Black-box: regression sets that ship with scikit-learn, judged by R2 and size.

Each finished run is a line of the file, so a run that was interrupted goes on where it stopped;
runs are seeded. ``--shard 0/4`` takes each fourth problem. The summary judges the formulas, which
takes SymPy up to a minute each. With ``--slow 10`` a call of the client takes ten times as long,
which tells what the service's speed is worth.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from harness import save
from numpy.typing import NDArray

from support.repository.symbolic import is_solution
from warpfit import Client, parse
from warpfit.embedded import embedded_server
from warpfit.expressions import reference
from warpfit.expressions.printing import to_text

Floats = NDArray[np.float64]
EQUATIONS = Path(__file__).resolve().parents[1] / "data" / "feynman" / "equations.json"
#: Functions that SRBench's ground truth is made of, as the three name them.
OURS = (*("add", "sub", "mul", "div", "square", "sqrt", "exp", "log"),
        *("sin", "cos", "asin", "acos", "tanh"))  # fmt: skip
OPERONS = "add,sub,mul,div,square,sqrt,exp,log,sin,cos,asin,acos,tanh,constant,variable"
GPLEARNS = ("add", "sub", "mul", "div", "sqrt", "log", "sin", "cos")
TRUE_R2 = 0.999
#: Systems over x and y with their ranges of starts.
STROGATZ = {
    "bacres1": ("20 - x - x*y/(1 + 0.5*x^2)", "bacres"),
    "bacres2": ("10 - x*y/(1 + 0.5*x^2)", "bacres"),
    "barmag1": ("0.5*sin(x - y) - sin(x)", "barmag"),
    "barmag2": ("0.5*sin(y - x) - sin(y)", "barmag"),
    "glider1": ("-0.05*x^2 - sin(y)", "glider"),
    "glider2": ("x - cos(y)/x", "glider"),
    "lv1": ("3*x - 2*x*y - x^2", "lv"),
    "lv2": ("2*y - x*y - y^2", "lv"),
    "predprey1": ("x*(4 - x - y/(1 + x))", "predprey"),
    "predprey2": ("y*(x/(1 + x) - 0.075*y)", "predprey"),
    "shearflow1": ("cos(y)/sin(y)*cos(x)", "shearflow"),
    "shearflow2": ("(cos(y)^2 + 0.1*sin(y)^2)*sin(x)", "shearflow"),
    "vdp1": ("10*(y - (x^3 - x)/3)", "vdp"),
    "vdp2": ("-x/10", "vdp"),
}
STARTS = {
    "bacres": ((2, 10), (2, 10)), "barmag": ((0, 6), (0, 6)), "glider": ((2, 8), (-3, 3)),
    "lv": ((1, 8), (1, 8)), "predprey": ((1, 8), (1, 15)), "shearflow": ((-3, 3), (0.3, 2.8)),
    "vdp": ((-2, 2), (-2, 2)),
}  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """Rows of a problem, and its formula where there is one."""

    track: str
    name: str
    X: Floats
    y: Floats
    formula: str | None = None
    names: tuple[str, ...] = ()


def feynman(rows: int, seed: int) -> Iterator[Problem]:
    """Draw the variables of each equation uniformly from their ranges."""
    for place, equation in enumerate(json.loads(EQUATIONS.read_text())):
        rng = np.random.default_rng([seed, place])
        ranges = equation["ranges"]
        X = np.column_stack([rng.uniform(low, high, 2 * rows) for low, high in ranges.values()])
        with np.errstate(all="ignore"):
            y = reference.evaluate_program(parse(equation["formula"], tuple(ranges)), X.T)
        sound = np.flatnonzero(np.isfinite(y))[:rows]
        yield Problem(
            "feynman", equation["name"], X[sound], y[sound], equation["formula"], tuple(ranges)
        )


def strogatz(rows: int, seed: int) -> Iterator[Problem]:
    """Simulate each system from four starts; ``rows`` is not used, 400 are usual."""
    from scipy.integrate import solve_ivp

    programs = {name: parse(text, ("x", "y")) for name, (text, _) in STROGATZ.items()}
    for name, (text, system) in STROGATZ.items():
        rng = np.random.default_rng([seed, sorted(STARTS).index(system)])
        pair = [program for other, program in programs.items() if STROGATZ[other][1] == system]

        def slope(_: float, state: Floats, pair: list[Any] = pair) -> list[float]:
            return [float(reference.evaluate_program(p, state[:, None])[0]) for p in pair]

        runs = []
        for _ in range(4):
            start = [rng.uniform(*limits) for limits in STARTS[system]]
            times = np.linspace(0, 10, 100)
            runs.append(solve_ivp(slope, (0, 10), start, t_eval=times, rtol=1e-6).y.T)
        X = np.concatenate(runs)
        y = reference.evaluate_program(programs[name], X.T)
        yield Problem("strogatz", name, X, y, text, ("x", "y"))


def blackbox(rows: int, seed: int) -> Iterator[Problem]:
    """Take the sets of scikit-learn; each column of a table without a numeric target is one."""
    from sklearn import datasets

    diabetes = datasets.load_diabetes()
    yield Problem("blackbox", "diabetes", diabetes.data, diabetes.target)
    linnerud = datasets.load_linnerud()
    for place, name in enumerate(linnerud.target_names):
        yield Problem("blackbox", f"linnerud {name}", linnerud.data, linnerud.target[:, place])
    for title, columns in (("iris", range(4)), ("wine", (0, 5, 9, 12)), ("breast_cancer", (0, 4))):
        table = getattr(datasets, f"load_{title}")()
        for place in columns:
            rest = np.delete(table.data, place, axis=1)
            name = f"{title} {table.feature_names[place]}"
            yield Problem("blackbox", name, rest, table.data[:, place].astype(float))


@dataclass(frozen=True)
class Server:
    """Where warpfit computes, and the threads that it and pyoperon have."""

    address: str
    threads: int


TRACKS = {"feynman": feynman, "strogatz": strogatz, "blackbox": blackbox}


def fit_warpfit(X: Floats, y: Floats, seconds: float, seed: int, server: Server) -> Any:
    """Return predictor, text and size."""
    from warpfit.sklearn import SymbolicRegressor

    model = SymbolicRegressor(
        address=server.address,
        operators=OURS,
        generations=10**6,
        max_seconds=seconds,
        random_state=seed,
    ).fit(X, y)
    return model.predict, to_text(model.program_), len(model.program_)


def fit_pyoperon(X: Floats, y: Floats, seconds: float, seed: int, server: Server) -> Any:
    """Return predictor, text and size."""
    from pyoperon.sklearn import SymbolicRegressor

    model = SymbolicRegressor(
        allowed_symbols=OPERONS, optimizer_iterations=5, max_length=40, generations=10**6,
        max_evaluations=10**9, max_time=max(1, round(seconds)), n_threads=server.threads,
        random_state=seed,
    ).fit(X, y)  # fmt: skip
    text = model.get_model_string(model.model_, 12)
    return model.predict, text.replace("X", "x").replace("**", "^"), model.model_.Length


def fit_gplearn(X: Floats, y: Floats, seconds: float, seed: int, server: Server) -> Any:
    """Evolve generation by generation until the time is over."""
    from gplearn.genetic import SymbolicRegressor

    from warpfit.frontends.gplearn import from_gplearn

    ends = time.perf_counter() + seconds
    model = SymbolicRegressor(
        generations=1, warm_start=True, function_set=GPLEARNS, random_state=seed
    ).fit(X, y)
    while time.perf_counter() < ends and model.run_details_["best_fitness"][-1] > 1e-12:
        model.set_params(generations=model.generations + 1).fit(X, y)
    plain = {name: name for name in ("div", "sqrt", "log")}
    program = from_gplearn(model._program, plain)
    return model.predict, to_text(program), len(program)


METHODS: dict[str, Callable[..., Any]] = {
    "warpfit": fit_warpfit,
    "pyoperon": fit_pyoperon,
    "gplearn": fit_gplearn,
}


def run(
    problem: Problem, method: str, options: argparse.Namespace, server: Server
) -> dict[str, Any]:
    """Fit one problem with one method."""
    rng = np.random.default_rng([options.seed, len(problem.name)])
    order = rng.permutation(len(problem.y))
    train, test = np.split(order, [int(0.75 * len(order))])
    scale = options.noise * np.sqrt(np.mean(np.square(problem.y[train])))
    heard = problem.y[train] + rng.normal(0.0, 1.0, len(train)) * scale
    started = time.perf_counter()
    predict, text, size = METHODS[method](
        problem.X[train], heard, options.seconds, options.seed, server
    )
    seconds = time.perf_counter() - started
    with np.errstate(all="ignore"):
        errors = np.square(predict(problem.X[test]) - problem.y[test])
        r2 = float(1.0 - np.mean(errors) / np.var(problem.y[test]))
    case = {
        "seconds": round(seconds, 2),
        "r2": r2 if np.isfinite(r2) else -1e9,
        "size": int(size),
        "expression": text,
    }
    if problem.formula is not None:
        case["accurate"] = case["r2"] > TRUE_R2
        case["formula"], case["names"] = problem.formula, problem.names
    return case


def slowed(factor: float) -> None:
    """Make every call of the client last ``factor`` times as long."""
    perform = Client._perform

    def slow(self: Client, *arguments: Any) -> Any:
        started = time.perf_counter()
        try:
            return perform(self, *arguments)
        finally:
            time.sleep((factor - 1.0) * (time.perf_counter() - started))

    Client._perform = slow  # type: ignore[method-assign]


def judged(case: dict[str, Any]) -> dict[str, Any]:
    """Return a run with the judgement whether its formula is the true one."""
    if "formula" not in case:
        return case
    texts = (case["expression"], case["formula"], case["names"])
    return case | {"solved": case["r2"] > 0.9 and is_solution(*texts)}


def summary(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Count solutions, or take medians, by track, noise, time and method."""
    keys = ("track", "noise", "seconds_allowed", "slow", "method")
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in lines:
        groups.setdefault(tuple(line[key] for key in keys), []).append(line)
    found = []
    for key, cases in sorted(groups.items()):
        row = dict(zip(keys, key, strict=True)) | {"runs": len(cases)}
        for count in ("solved", "accurate"):
            if count in cases[0]:
                row[count] = sum(case[count] for case in cases)
        for middle in ("r2", "size", "seconds"):
            row[f"median_{middle}"] = statistics.median(case[middle] for case in cases)
        found.append(row)
    return found


def main() -> None:
    """Run what is missing in the file, or summarise it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--track", choices=TRACKS, default="feynman")
    add("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    add("--noise", type=float, default=0.0)
    add("--seconds", type=float, default=30.0)
    add("--rows", type=int, default=1000)
    add("--seed", type=int, default=1)
    add("--shard", default="0/1", metavar="K/N")
    add("--problems", nargs="*", help="names (default: all)")
    add("--slow", type=float, default=1.0, metavar="FACTOR")
    add("--out", type=Path, default=Path("srbench.jsonl"))
    add("--address", help="of a running server (default: one is started, on the CPU)")
    add("--threads", type=int, default=2, help="of the server that is started, and of pyoperon")
    add("--summary", type=Path, nargs="+", metavar="FILE", help="judge and count the runs of files")
    add("--directory", type=Path, help="where the summary is written (default: the results)")
    options = parser.parse_args()
    if options.summary:
        texts = [line for path in options.summary for line in path.read_text().splitlines()]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            lines = list(pool.map(judged, map(json.loads, texts)))
        save("srbench", {"summary": summary(lines), "runs": lines}, options.directory)
        return
    if options.slow > 1.0:
        slowed(options.slow)
    keys = ("track", "problem", "method", "noise", "seconds_allowed", "seed", "slow", "rows")
    written = options.out.read_text().splitlines() if options.out.exists() else []
    done = {tuple(json.loads(line)[key] for key in keys) for line in written}
    part, parts = map(int, options.shard.split("/"))
    problems = list(TRACKS[options.track](options.rows, options.seed))[part::parts]
    flags = ["--devices", "cpu", "--threads", str(options.threads), "--front-ends", "1"]
    started = nullcontext(options.address) if options.address else embedded_server(flags)
    with started as address, options.out.open("a") as out:
        server = Server(address, options.threads)
        # A server compiles its fits beside the first calls.
        fit_warpfit(np.random.default_rng(0).normal(size=(99, 2)), np.arange(99.0), 3, 0, server)
        for problem in problems:
            for method in options.methods:
                values = (options.track, problem.name, method, options.noise, options.seconds)
                key = (*values, options.seed, options.slow, options.rows)
                if key in done or (options.problems and problem.name not in options.problems):
                    continue
                case = dict(zip(keys, key, strict=True)) | run(problem, method, options, server)
                out.write(json.dumps(case) + "\n")
                out.flush()
                print(json.dumps(case), flush=True)


if __name__ == "__main__":
    main()
