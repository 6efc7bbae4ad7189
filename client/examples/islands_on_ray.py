"""Evolve formulas on all nodes of a Ray cluster; servers on some of them compute the losses.

    ray start --head                                # and `ray start --address=...` on other nodes
    python client/examples/islands_on_ray.py        # on any of them

Each island is a population of DEAP trees. An epoch, some generations of one island, is a Ray task,
which runs wherever a CPU is free and calls the servers that ``warpfit.ray.start`` has placed, by
gRPC. Between epochs the best trees of each island move on to the next one (islands as in
Cantú-Paz 2000, "Efficient and Accurate Parallel Genetic Algorithms").

Any node but the one where the driver and Ray's head run may be lost at any time: Ray repeats the
epochs that were running there, clients turn to other servers, and Ray starts the lost server again
where it can. An epoch depends on nothing but its arguments, among them a seed, and a loss has the
same bits on whichever server it is computed, so that the formulas found are the same as without
the loss. Needs ``pip install -e '.[ray,examples]'`` on all nodes.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from deap import algorithms, base, creator, gp, tools
from numpy.typing import NDArray

import warpfit
import warpfit.ops
import warpfit.ray
from warpfit.frontends.deap import Evaluator

OPERATORS = ("add", "sub", "mul", "div", "exp", "square")
NAMES = ("x", "y", "z")
MAX_TOKENS = 30
MIGRANTS = 5


@dataclass(frozen=True)
class Epoch:
    """State at the beginning of an epoch: everything that its result depends on."""

    trees: tuple[str, ...]
    """Texts of the trees, because DEAP's classes are made anew in each process; empty at first."""
    seed: int
    size: int
    generations: int


@dataclass(frozen=True)
class Outcome:
    """The trees of an island after an epoch, the best ones first, and their losses."""

    trees: tuple[str, ...]
    losses: tuple[float, ...]


def problem(rows: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Draw points of a law to be found, z * exp(-x^2) / y, with a little noise."""
    rng = np.random.default_rng(0)
    X = rng.uniform(0.5, 2.0, (rows, len(NAMES)))
    x, y, z = X.T
    return X, z * np.exp(-(x**2)) / y + rng.normal(0, 1e-3, rows)


def toolbox() -> tuple[base.Toolbox, gp.PrimitiveSet]:
    """Set up DEAP; primitives have names but no functions, because the servers compute them."""
    if not hasattr(creator, "Tree"):
        creator.create("Error", base.Fitness, weights=(-1.0,))
        creator.create("Tree", gp.PrimitiveTree, fitness=creator.Error)
    primitives = gp.PrimitiveSet("f", len(NAMES))
    primitives.renameArguments(**{f"ARG{i}": name for i, name in enumerate(NAMES)})
    for name in OPERATORS:
        primitives.addPrimitive(None, warpfit.ops.OPERATORS[name].arity, name=name)
    for number in (-1.0, 0.5, 2.0):
        primitives.addTerminal(number)
    tools_ = base.Toolbox()
    tools_.register("grow", gp.genHalfAndHalf, pset=primitives, min_=1, max_=4)
    tools_.register("individual", tools.initIterate, creator.Tree, tools_.grow)
    tools_.register("select", tools.selTournament, tournsize=5)
    tools_.register("mate", gp.cxOnePoint)
    tools_.register("branch", gp.genFull, min_=0, max_=2)
    tools_.register("mutate", gp.mutUniform, expr=tools_.branch, pset=primitives)
    limit = gp.staticLimit(key=len, max_value=MAX_TOKENS)
    tools_.decorate("mate", limit)
    tools_.decorate("mutate", limit)
    return tools_, primitives


# An epoch is repeated as often as its node is lost; an error of its own ends the search.
@ray.remote(max_retries=-1, scheduling_strategy="SPREAD")
def evolve(epoch: Epoch, namespace: str, X: NDArray[Any], y: NDArray[Any]) -> Outcome:
    """Run an epoch."""
    random.seed(epoch.seed)
    tools_, primitives = toolbox()
    population = [creator.Tree.from_string(text, primitives) for text in epoch.trees]
    population += [tools_.individual() for _ in range(epoch.size - len(population))]
    with warpfit.connect(f"ray://{namespace}", wait=60.0) as client:
        score = Evaluator(client, client.upload(X, y, names=NAMES)).score
        for generation in range(epoch.generations + 1):
            if generation:
                chosen = tools_.select(population, epoch.size - 1)
                best = tools.selBest(population, 1)
                population = [*best, *algorithms.varAnd(chosen, tools_, cxpb=0.7, mutpb=0.25)]
            fresh = [tree for tree in population if not tree.fitness.valid]
            for tree, fitness in zip(fresh, score(fresh), strict=True):
                tree.fitness.values = fitness
    ranked = tools.selBest(population, epoch.size)
    losses = tuple(tree.fitness.values[0] for tree in ranked)
    return Outcome(tuple(map(str, ranked)), losses)


def search(namespace: str, options: argparse.Namespace) -> Outcome:
    """Run all epochs of all islands; return those of the best one."""
    X, y = map(ray.put, problem(options.rows))
    size = options.population // options.islands
    islands: list[tuple[str, ...]] = [()] * options.islands
    for number in range(options.epochs):
        seeds = (options.seed + options.islands * number + i for i in range(options.islands))
        epochs = [
            Epoch(trees, seed, size, options.generations)
            for trees, seed in zip(islands, seeds, strict=True)
        ]
        outcomes = ray.get([evolve.remote(epoch, namespace, X, y) for epoch in epochs])
        best = min(outcomes, key=lambda outcome: outcome.losses[0])
        print(f"epoch {number + 1:3}: loss {best.losses[0]:.3g}  {best.trees[0]}", flush=True)
        islands = [
            (*own.trees[: size - MIGRANTS], *other.trees[:MIGRANTS])
            for own, other in zip(outcomes, [outcomes[-1], *outcomes[:-1]], strict=True)
        ]
    return best


def main() -> None:
    """Run the whole example."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--namespace", default=warpfit.ray.NAMESPACE, help="of the servers")
    parser.add_argument("--islands", type=int, default=8)
    parser.add_argument("--population", type=int, default=2000, help="trees on all islands")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--generations", type=int, default=5, help="in an epoch")
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    ray.init(address="auto", log_to_driver=False)
    devices = "all" if ray.cluster_resources().get("GPU") else "cpu"
    servers = warpfit.ray.start(options.namespace, devices=devices)
    print(f"{len(ray.nodes())} nodes, servers at {', '.join(servers)}")
    search(options.namespace, options)
    print("the servers stay; `warpfit ray down` stops them")


if __name__ == "__main__":
    main()
