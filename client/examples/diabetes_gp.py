"""Predict the progress of diabetes with genetic programming: several workers, one warpfit server.

    python client/examples/diabetes_gp.py                      # starts a server by itself
    python client/examples/diabetes_gp.py --address HOST:PORT
    python client/examples/diabetes_gp.py --optimize           # the server fits all constants

Each worker process evolves an island with DEAP (Koza 1992, "Genetic Programming"; islands as in
Cantú-Paz 2000) and sends the new trees of a generation to the server in one call; back comes one
loss for each. With ``--optimize`` the server also fits the constants of every new tree, and the
tree keeps them (Kommenda et al. 2020, "Parameter identification for symbolic regression using
nonlinear least squares"). Every few generations the best trees of an island move on to the next
one. The data are scikit-learn's diabetes set: 442 patients, 10 variables, standardised.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import random
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from typing import Any

import numpy as np
from deap import algorithms, base, creator, gp, tools
from numpy.typing import NDArray
from tqdm import tqdm

import warpfit
import warpfit.ops
from warpfit.embedded import server_at
from warpfit.expressions.language import to_latex, to_text
from warpfit.frontends import as_program
from warpfit.frontends.deap import Evaluator

MIGRATE_EVERY = 5
MIGRANTS = 5
MAX_TOKENS = 30
OPERATORS = ("add", "sub", "mul", "aq", "tanh", "square")

creator.create("Error", base.Fitness, weights=(-1.0,))
creator.create("Tree", gp.PrimitiveTree, fitness=creator.Error)


@dataclass(frozen=True)
class Problem:
    """Standardised data, training rows first."""

    X: NDArray[np.float64]
    y: NDArray[np.float64]
    names: tuple[str, ...]
    train: int
    mean: float
    scale: float

    @classmethod
    def load(cls, seed: int) -> Problem:
        """Shuffle the diabetes data; three quarters are for training."""
        from sklearn.datasets import load_diabetes

        data = load_diabetes()
        order = np.random.default_rng(seed).permutation(len(data.target))
        train = 3 * len(order) // 4
        X, y = data.data[order], data.target[order]
        mean, scale = y[:train].mean(), y[:train].std()
        X = (X - X[:train].mean(axis=0)) / X[:train].std(axis=0)
        return cls(X, (y - mean) / scale, tuple(data.feature_names), train, mean, scale)


@dataclass(frozen=True)
class Report:
    """One generation of one island."""

    island: int
    generation: int
    train_rmse: float
    test_rmse: float
    best: warpfit.Program


# ------------------------------------------------------------------------------------- evolution


def number() -> float:
    """Draw an ephemeral random constant."""
    return round(random.uniform(-2, 2), 3)


def toolbox_for(names: tuple[str, ...]) -> base.Toolbox:
    """Set up DEAP; primitives have names but no functions, because the server computes them."""
    primitives = gp.PrimitiveSet("f", len(names))
    primitives.renameArguments(**{f"ARG{i}": name for i, name in enumerate(names)})
    for name in OPERATORS:
        primitives.addPrimitive(None, warpfit.ops.OPERATORS[name].arity, name=name)
    primitives.addEphemeralConstant("number", number)
    toolbox = base.Toolbox()
    toolbox.register("grow", gp.genHalfAndHalf, pset=primitives, min_=1, max_=4)
    toolbox.register("individual", tools.initIterate, creator.Tree, toolbox.grow)
    toolbox.register("population", tools.initRepeat, list, toolbox.individual)
    toolbox.register("select", tools.selTournament, tournsize=5)
    toolbox.register("mate", gp.cxOnePoint)
    toolbox.register("branch", gp.genFull, min_=0, max_=2)
    toolbox.register("mutate", gp.mutUniform, expr=toolbox.branch, pset=primitives)
    limit = gp.staticLimit(key=len, max_value=MAX_TOKENS)
    toolbox.decorate("mate", limit)
    toolbox.decorate("mutate", limit)
    return toolbox


class Island:
    """A population, and a client of its own to score it."""

    def __init__(
        self, client: warpfit.Client, problem: Problem, seed: int, size: int, fit_iterations: int
    ) -> None:
        # DEAP draws from the module's generator; each island is a process of its own.
        random.seed(seed)
        self.client = client
        self.problem = problem
        self.data = client.upload(problem.X, problem.y, names=problem.names)
        self.evaluate = Evaluator(
            client, self.data, rows=slice(0, problem.train), fit_iterations=fit_iterations
        )
        self.toolbox = toolbox_for(problem.names)
        self.population = self.toolbox.population(n=size)
        self.score()

    def score(self) -> None:
        """Score the new trees of a whole generation in one call."""
        fresh = [tree for tree in self.population if not tree.fitness.valid]
        for tree, fitness in zip(fresh, self.evaluate.score(fresh), strict=True):
            tree.fitness.values = fitness

    def step(self) -> None:
        """Evolve one generation; the best tree survives."""
        chosen = self.toolbox.select(self.population, len(self.population) - 1)
        children = algorithms.varAnd(chosen, self.toolbox, cxpb=0.7, mutpb=0.25)
        self.population = [*tools.selBest(self.population, 1), *children]
        self.score()

    def replace_worst(self, migrants: list[Any]) -> None:
        """Accept trees of another island."""
        self.population = tools.selBest(self.population, len(self.population) - len(migrants))
        self.population += migrants

    def report(self, island: int, generation: int) -> Report:
        """Describe the best tree, in the units of the data."""
        best = tools.selBest(self.population, 1)[0]
        rows = slice(self.problem.train, None)
        test = self.client.evaluate(self.data, best, loss="rmse", rows=rows)[0]
        scale = self.problem.scale
        return Report(
            island,
            generation,
            scale * best.fitness.values[0] ** 0.5,
            scale * float(test),
            as_program(best, self.problem.names),
        )


def work(island: int, address: str, options: argparse.Namespace, pipes: dict[str, Any]) -> None:
    """Run one worker process: an island that reports each generation and exchanges trees."""
    problem = Problem.load(options.seed)
    size = options.population // options.workers
    with warpfit.connect(address) as client:
        iterations = options.fit_iterations if options.optimize else 0
        evolved = Island(client, problem, 1000 * options.seed + island, size, iterations)
        for generation in range(1, options.generations + 1):
            evolved.step()
            pipes["reports"].put(evolved.report(island, generation))
            if options.workers > 1 and generation % MIGRATE_EVERY == 0:
                pipes["out"].put(tools.selBest(evolved.population, MIGRANTS))
                evolved.replace_worst(pipes["in"].get(timeout=60))


# --------------------------------------------------------------------------------- main process


def evolve(address: str, options: argparse.Namespace) -> list[Report]:
    """Start the workers, show their progress, and collect a report of each generation."""
    context = mp.get_context("spawn")
    reports: Any = context.Queue()
    ring = [context.Queue() for _ in range(options.workers)]
    workers = [
        context.Process(
            target=work,
            args=(
                index,
                address,
                options,
                {"reports": reports, "in": ring[index - 1], "out": ring[index]},
            ),
            daemon=True,
        )
        for index in range(options.workers)
    ]
    for worker in workers:
        worker.start()
    found: list[Report] = []
    try:
        with tqdm(total=options.workers * options.generations, desc="generations") as bar:
            while bar.n < bar.total:
                if any(worker.exitcode not in (None, 0) for worker in workers):
                    raise SystemExit("a worker ended with an error; its message is above")
                try:
                    found.append(reports.get(timeout=1))
                except Empty:
                    continue
                bar.set_postfix(train_rmse=f"{min(one.train_rmse for one in found):.2f}")
                bar.update()
        return found
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()


def plot(reports: list[Report], path: Path) -> None:
    """Draw the error of each generation's best tree."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    islands = sorted({report.island for report in reports})
    for island in islands:
        own = sorted((r for r in reports if r.island == island), key=lambda r: r.generation)
        generations = [report.generation for report in own]
        (line,) = axes.plot(
            generations, [report.train_rmse for report in own], label=f"island {island + 1}, train"
        )
        axes.plot(
            generations,
            [report.test_rmse for report in own],
            color=line.get_color(),
            linestyle=":",
            label=f"island {island + 1}, test",
        )
    axes.set(xlabel="generation", ylabel="RMSE of the best tree", title="Diabetes progression")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def summarise(best: Report, address: str, options: argparse.Namespace) -> None:
    """Print the best formula and how well it does on the patients that no tree has seen."""
    problem = Problem.load(options.seed)
    with warpfit.connect(address) as client:
        data = client.upload(problem.X, problem.y, names=problem.names)
        rows = slice(problem.train, None)
        r2 = client.evaluate(data, best.best, loss="r2", rows=rows)[0]
    print(f"\nbest formula (all variables standardised; {len(best.best)} tokens)")
    text = to_text(best.best, problem.names)
    print(f"  progression = {problem.mean:.1f} + {problem.scale:.1f} * ({text})")
    print(f"  LaTeX: {to_latex(best.best, problem.names)}")
    print(f"train RMSE {best.train_rmse:.2f}, test RMSE {best.test_rmse:.2f}, test R2 {r2:.3f}")


def main() -> None:
    """Run the whole example."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    described = "HOST:PORT of a server (default: WARPFIT_ADDRESS, or start one)"
    parser.add_argument("--address", default=os.environ.get("WARPFIT_ADDRESS"), help=described)
    parser.add_argument("--generations", type=int, default=60)
    parser.add_argument("--population", type=int, default=1000, help="trees on all islands")
    parser.add_argument("--workers", type=int, default=2, help="processes, one island each")
    parser.add_argument(
        "--optimize", action="store_true", help="let the server fit the constants of new trees"
    )
    parser.add_argument("--fit-iterations", type=int, default=10, help="with --optimize")
    parser.add_argument("--plot", type=Path, default=Path("diabetes_gp.png"))
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if not options.address:
        print("starting a server")
    with server_at(options.address) as address:
        reports = evolve(address, options)
        plot(reports, options.plot)
        best = min(reports, key=lambda report: (report.train_rmse, report.island))
        summarise(best, address, options)
    print(f"plot: {options.plot}")


if __name__ == "__main__":
    main()
