r"""Share of true skeletons whose constants a fit finds in a second, beside SciPy and pyoperon.

    python tests/bench/run.py skeletons [--starts 128] [--every 1] [--processes 1]

Every n-th skeleton is taken. One is a true formula with a parameter in place of each constant,
but for whole exponents: the 100 Feynman equations (`tests/data/feynman`), the 14 Strogatz
equations, NIST's 27 nonlinear models, and 60 equations of physics, chemistry and biology. One
without constants gets a factor. Constants are drawn from [-10, 10] until all of 1,000 rows have
finite values that are not all the same, and no row has a tenth of the variation, as next to a pole
(``usual``); after each 500 draws the range is ten times smaller, down to 1e-4. The result names
what has no constants even so. In ``si`` every variable and the target have a random unit between
1e-12 and 1e12 on top of that, so that formulas need constants of such sizes: the parameter q of a
variable x, in q*x wherever x stands, is there if the other parameters cannot make up for it (the
Jacobian tells).

Each method gets the same number of starts: 1 for every parameter, the others drawn by the server
(warpfit), or uniformly from [-10, 10]. It stops when the normalised mean square error is below
1e-10 (1e-3 with noise of 1%, measured without the noise), or after 2 s of processor time, that is
1 s of two cores; the time of warpfit's one call counts as a whole. SciPy gets exact Jacobians and
gradients. pyoperon fits float32 trees; skeletons that it cannot express count as not found. It is
left out where it is not installed.

``--processes`` of them share the skeletons. Each keeps to two cores of its own and takes all
methods in turn on a skeleton, so that all meet the same load. More processes than pairs of cores
would share cores, and are refused.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from cpu.fits import Peer, Problem
from harness import arguments, precompile, save, worker_pool
from numpy.typing import NDArray
from peers import Table
from scipy import optimize as scipy_optimize
from srbench import feynman, strogatz

from support.engines import nist
from warpfit import parse
from warpfit.dataset import Dataset
from warpfit.errors import WarpfitError
from warpfit.expressions import reference
from warpfit.ir import Batch, Program
from warpfit.ops import CONSTANT, OPERATORS, PARAMETER, VARIABLE
from warpfit.request import Evaluation, FitRequest, FitSettings, Loss
from warpfit_server.engine.cpu.engine import CpuEngine
from warpfit_server.engine.fit.driver import FitContext, optimize
from warpfit_server.engine.interface import run_to_end

Floats = NDArray[np.float64]
ROWS = 1000
SEED = 1
SETS = ("feynman", "strogatz", "nist", "own")
SECONDS = 2.0
EXACT, NOISY = 1e-10, 1e-3
NOISE = 0.01
#: Draws of constants from each of six ranges.
DRAWS = 500
#: Largest share of one row in the target's variation: next to a pole one row is all that counts.
MOST_OF_ONE_ROW = 0.1
UNITS = 12.0
#: Equations of physics, chemistry and biology over x1, x2, ... with parameters, and their ranges.
OWN = json.loads((Path(__file__).resolve().parents[1] / "data" / "laws.json").read_text())


@dataclass(frozen=True)
class Task:
    """A skeleton with data whose target it can have."""

    name: str
    program: Program
    X: Floats
    """[rows, variables]."""
    clean: Floats
    y: Floats

    def error(self, parameters: Floats) -> float:
        """Normalised mean square error against the target without noise."""
        with np.errstate(all="ignore"):
            values = reference.evaluate_program(self.program, self.X.T, parameters)
            found = float(np.mean(np.square(values - self.clean)) / np.var(self.clean))
        return found if np.isfinite(found) else np.inf


def lifted(program: Program) -> Program:
    """Return a program with a parameter for each constant, but for whole exponents."""
    fresh = map(Program.parameter, itertools.count(program.parameters))

    def constant(part: Program) -> float | None:
        return float(part.values[0]) if len(part) == 1 and part.codes[0] == CONSTANT else None

    def operator(row: Any, operands: Any) -> Program:
        numbers = [constant(operand) for operand in operands]
        if None not in numbers:
            return Program.constant(float(row.numpy(*map(np.float64, numbers))))
        parts = []
        for place, (operand, number) in enumerate(zip(operands, numbers, strict=True)):
            is_exponent = row is OPERATORS["pow"] and place == 1
            is_kept = number is None or (is_exponent and number % 1 == 0)
            parts.append(operand if is_kept else next(fresh))
        return Program.apply(row, *parts)

    whole = program.fold(lambda code, value: Program([code], [value]), operator)
    if not whole.parameters:
        whole = Program.apply("mul", Program.parameter(0), whole)
    return whole


def sources() -> Iterator[tuple[str, Program, Floats]]:
    """Yield name, skeleton and variables [rows, variables]."""
    for problem in itertools.chain(feynman(ROWS, SEED), strogatz(ROWS, SEED)):
        yield problem.name, lifted(parse(problem.formula, problem.names)), problem.X
    rng = np.random.default_rng(SEED)
    for name, text in nist.FORMULAS.items():
        columns = nist.load(name).dataset.variables
        X = rng.uniform(columns.min(axis=1), columns.max(axis=1), (ROWS, len(columns)))
        yield name, parse(text), X
    for law in OWN:
        low, high = np.array(law["ranges"], float).T
        yield law["name"], parse(law["formula"]), rng.uniform(low, high, (ROWS, len(low)))


def draw(program: Program, X: Floats, rng: np.random.Generator) -> Floats | None:
    """Draw constants that give finite values which differ; None if that fails."""
    for attempt in range(6 * DRAWS):
        # Few formulas have such values for numbers that large; these get smaller and smaller ones.
        constants = rng.uniform(-10, 10, program.parameters) / 10.0 ** (attempt // DRAWS)
        with np.errstate(all="ignore"):
            y = reference.evaluate_program(program, X.T, constants)
            spread, furthest = np.std(y), np.square(y - y.mean()).max()
            differs = np.isfinite(y).all() and spread > 1e-6 * np.abs(y).max()
        if differs and furthest < MOST_OF_ONE_ROW * len(y) * spread**2:
            return constants
    return None


def in_units(program: Program, X: Floats, constants: Floats, units: Floats) -> Program:
    """Return the skeleton for other units of the variables and the target."""
    variables = X.shape[1]
    first = program.parameters

    def leaf(code: int, value: float) -> Program:
        own = Program([code], [value])
        if code != VARIABLE:
            return own
        return Program.apply("mul", Program.parameter(first + int(value)), own)

    whole = program.fold(leaf, lambda row, parts: Program.apply(row, *parts))
    whole = Program.apply("mul", Program.parameter(first + variables), whole)
    vector = np.concatenate([constants, np.ones(variables + 1)])
    with np.errstate(all="ignore"):
        _, slopes = reference.differentiate(whole, X.T, vector)
    columns = np.where(np.isfinite(slopes), slopes, 0.0) * vector[:, None]
    basis: list[Floats] = []
    new: list[int] = []
    for index, column in enumerate(columns):
        rest = column.astype(float)
        for unit in basis:
            rest = rest - (unit @ rest) * unit
        length = np.linalg.norm(rest)
        if length > 1e-7 * max(np.linalg.norm(column), 1e-300):
            basis.append(rest / length)
            new += [index] if index >= first else []

    def number(code: int, value: float) -> Program:
        if code != PARAMETER or value < first:
            return Program([code], [value])
        if int(value) in new:
            return Program.parameter(first + new.index(int(value)))
        return Program.constant(1.0)

    return whole.fold(number, lambda row, parts: Program.apply(row, *parts))


def tasks(every: int, kind: str, noise: float, left_out: list[str]) -> Iterator[Task]:
    """Yield the tasks of one setting, and note the skeletons that no constants are found for."""
    for place, (name, program, X) in enumerate(sources()):
        if place % every:
            continue
        rng = np.random.default_rng([SEED, place])
        constants = draw(program, X, rng)
        if constants is None:
            left_out.append(name)
            continue
        clean = reference.evaluate_program(program, X.T, constants)
        if kind == "si":
            units = 10.0 ** rng.uniform(-UNITS, UNITS, X.shape[1] + 1)
            program = in_units(program, X, constants, units)
            X, clean = X * units[:-1], clean * units[-1]
        y = clean + noise * np.std(clean) * rng.normal(size=len(clean))
        yield Task(name, program, X, clean, y)


# -------------------------------------------------------------------------------------- methods


class Warpfit:
    """The service's driver with the CPU engine, two threads."""

    def __init__(self) -> None:
        self.engine = CpuEngine(2)
        line = np.arange(8.0)
        self(Task("line", parse("p1*x1"), line[:, None], line, line), 1, 0.0)  # loads all code

    def __call__(self, task: Task, count: int, goal: float) -> float:
        data = Dataset.of(task.X, task.y, dtype="float64")
        self.engine.load(data)
        batch = Batch.of([task.program], [np.ones(task.program.parameters)])
        evaluation = Evaluation(data.content_id, batch, loss=Loss.MSE, values=False)
        tight = {f"{what}_tolerance": 1e-12 for what in ("gradient", "step", "loss")}
        settings = FitSettings(restarts=count - 1, seed=SEED, max_iterations=200, **tight)
        passes = self.engine.linearise, self.engine.evaluate
        context = FitContext(*passes, data, np.zeros(1, np.uint8))
        found = run_to_end(optimize(FitRequest(evaluation, settings), context))
        self.engine.unload(data.content_id)
        return task.error(found.parameters)


def by_starts(fit: Callable[[Task, Floats], Floats]) -> Callable[..., float]:
    """Return a method that fits from one start after the other until the time is over."""

    def run(task: Task, count: int, goal: float) -> float:
        best, ends = np.inf, time.process_time() + SECONDS
        rng, parameters = np.random.default_rng(SEED), task.program.parameters
        drawn = (rng.uniform(-10, 10, parameters) for _ in range(count - 1))
        for start in itertools.chain([np.ones(parameters)], drawn):
            failures = ValueError, FloatingPointError, np.linalg.LinAlgError
            with contextlib.suppress(*failures), np.errstate(all="ignore"):
                best = min(best, task.error(fit(task, start)))
            if best <= goal or time.process_time() > ends:
                break
        return best

    return run


def least_squares(task: Task, start: Floats) -> Floats:
    """Fit by MINPACK's Levenberg-Marquardt."""
    scale = np.std(task.y)

    def residuals(p: Floats) -> Floats:
        return (reference.evaluate_program(task.program, task.X.T, p) - task.y) / scale

    def jacobian(p: Floats) -> Floats:
        return np.asarray(reference.differentiate(task.program, task.X.T, p)[1].T / scale)

    found = scipy_optimize.least_squares(
        residuals, start, jacobian, method="lm", x_scale="jac", max_nfev=200
    )
    return np.asarray(found.x)


def bfgs(task: Task, start: Floats) -> Floats:
    """Fit by SciPy's BFGS."""
    variance = np.var(task.y)

    def loss(p: Floats) -> tuple[float, Floats]:
        values, slopes = reference.differentiate(task.program, task.X.T, p)
        residuals = values - task.y
        return np.mean(residuals**2) / variance, 2 * slopes @ residuals / len(values) / variance

    found = scipy_optimize.minimize(loss, start, jac=True, method="BFGS", options={"maxiter": 200})
    return np.asarray(found.x)


def without_cubes(program: Program) -> Program:
    """Write cubes, which Operon has not, as products."""

    def operator(row: Any, parts: Any) -> Program:
        if row.name != "cube":
            return Program.apply(row, *parts)
        return Program.apply("mul", parts[0], Program.apply("square", parts[0]))

    return program.fold(lambda code, value: Program([code], [value]), operator)


def pyoperon(task: Task, start: Floats) -> Floats:
    """Fit by pyoperon's Levenberg-Marquardt; a parameter is the mean of its coefficients."""
    peer = Peer(Problem([without_cubes(task.program)], [start], Table(task.X, task.y)), 200)
    (values,), order = peer.fit(1), np.sort(peer.orders[0])
    return np.array([values[order == i].mean() if i in order else 1.0 for i in range(len(start))])


#: Methods by name; each is made once.
METHODS: dict[str, Callable[[], Callable[..., float]]] = {
    "warpfit": Warpfit,
    "least_squares": lambda: by_starts(least_squares),
    "bfgs": lambda: by_starts(bfgs),
    "pyoperon": lambda: by_starts(pyoperon),
}


#: Those of a process, which takes one skeleton after the other.
_made: dict[str, Callable[..., float]] = {}


def begin(places: Any, names: list[str]) -> None:
    """Process: take two of the cores, and make the methods there."""
    cores, first = sorted(os.sched_getaffinity(0)), 2 * places.get()
    os.sched_setaffinity(0, set(cores[first : first + 2]))
    _made.update((name, METHODS[name]()) for name in names)


def tried(task: Task, starts: int, goal: float) -> dict[str, tuple[str, float, float]]:
    """Fit a skeleton by each method; return its name, error and processor time by method."""
    found = {}
    for name, method in _made.items():
        began, error = time.process_time(), np.inf
        try:
            error = method(task, starts, goal)
        except (WarpfitError, KeyError, ValueError, RuntimeError) as problem:
            print(f"{name} cannot fit {task.name}: {problem}", flush=True)
        found[name] = task.name, error, time.process_time() - began
    return found


def outcome(runs: list[dict[str, tuple[str, float, float]]], goal: float) -> dict[str, Any]:
    counts: dict[str, Any] = {"skeletons": len(runs)}
    for name in runs[0] if runs else ():
        names, errors, spent = map(np.array, zip(*(run[name] for run in runs), strict=True))
        right = errors <= goal
        in_time = right & (spent <= SECONDS)
        counts[name] = {
            "recovered": round(float(in_time.mean()), 4),
            "recovered_without_limit": round(float(right.mean()), 4),
            "median_processor_seconds": round(float(np.median(spent)), 4),
            "missed": names[~in_time].tolist(),
        }
    return counts


def main() -> None:
    options = arguments(__doc__, "skeletons", starts=128, every=1, processes=1)
    pairs = max(1, len(os.sched_getaffinity(0)) // 2)
    if options.processes > pairs:
        raise SystemExit(f"--processes is more than {pairs}, the pairs of cores here")
    methods = [name for name in METHODS if name != "pyoperon" or find_spec(name)]
    content = {name: getattr(options, name) for name in ("starts", "every", "processes")}
    content |= {"seed": SEED, "sets": SETS, "rows": ROWS, "processor_seconds": SECONDS}
    precompile()
    with worker_pool(options.processes, 1, begin, methods) as pool:
        settings = []
        for kind, noise in itertools.product(("usual", "si"), (0.0, NOISE)):
            goal, without = EXACT if noise == 0.0 else NOISY, list[str]()
            runs = [
                pool.submit(tried, task, options.starts, goal)
                for task in tasks(options.every, kind, noise, without)
            ]
            settings.append((f"{kind}, noise {noise:g}", goal, runs, without))
        for name, goal, runs, without in settings:
            counts = {"of": len(runs) + len(without), "without_constants": without}
            content[name] = outcome([run.result() for run in runs], goal) | counts
            print(name, content[name], flush=True)
    save(options.name, content, options.folder)
