"""Generations of genetic programming through the wire, and EvoGP's on the same GPU.

``python tests/bench/generations.py`` starts a server on loopback and writes
results/generations.json:

- a DEAP run of 1,000 trees on 100,000 rows: time of a generation's evaluation, conversion included,
  as the worker sees it;
- where EvoGP is installed, generations of 1,000 and 5,000 of its formulas on 10,000 rows:
  evaluation, selection, crossover and mutation on the device.

``--devices cpu --scale 0.01`` tries the program without a GPU.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from harness import SEED, ServerProcess, percentiles, save

import warpfit
from warpfit.frontends.deap import Evaluator
from warpfit.ops import OPERATORS

VARIABLES = 10
OPERATOR_NAMES = ("add", "sub", "mul", "div", "exp", "sqrt", "sin", "cos")
#: Most tokens of EvoGP's formulas.
WIDTH = 64
GENERATIONS = 30
WARM_UP = 3


def table(rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(SEED)
    X = rng.uniform(0.5, 2.0, size=(rows, VARIABLES)).astype(np.float32)
    return X, X[:, 0] * np.exp(-X[:, 1]) + X[:, 2] / X[:, 3]


def deap_run(client: warpfit.Client, trees: int, rows: int) -> dict[str, Any]:
    """Breed trees with DEAP's own operators, and time what scores them."""
    from deap import algorithms, base, creator, gp, tools

    random.seed(SEED)
    creator.create("Error", base.Fitness, weights=(-1.0,))
    creator.create("Tree", gp.PrimitiveTree, fitness=creator.Error)
    primitives = gp.PrimitiveSet("f", VARIABLES)
    for name in OPERATOR_NAMES:
        primitives.addPrimitive(None, OPERATORS[name].arity, name=name)
    primitives.addEphemeralConstant("number", random.random)
    toolbox = base.Toolbox()
    toolbox.register("mate", gp.cxOnePoint)
    toolbox.register("branch", gp.genFull, min_=0, max_=2)
    toolbox.register("mutate", gp.mutUniform, expr=toolbox.branch, pset=primitives)
    for name in ("mate", "mutate"):
        toolbox.decorate(name, gp.staticLimit(len, 50))
    evaluator = Evaluator(client, client.upload(*table(rows)), primitives)
    population = [creator.Tree(gp.genHalfAndHalf(primitives, 3, 5)) for _ in range(trees)]
    walls, lengths = [], []
    for _ in range(GENERATIONS):
        started = time.perf_counter()
        losses = evaluator.score(population)
        walls.append(time.perf_counter() - started)
        lengths.append(float(np.mean([len(tree) for tree in population])))
        for tree, loss in zip(population, losses, strict=True):
            tree.fitness.values = loss
        chosen = tools.selTournament(population, trees, 5)
        population = algorithms.varAnd(chosen, toolbox, cxpb=0.7, mutpb=0.25)
    return {
        "trees": trees,
        "rows": rows,
        "nodes_of_a_tree": [min(lengths), max(lengths)],
        "evaluation": percentiles(walls[WARM_UP:]),
    }


def evogp_run(count: int, rows: int) -> dict[str, Any]:
    """Time generations of EvoGP as its own pipeline runs them, without messages."""
    import torch
    from evogp.algorithm import (
        DefaultCrossover,
        DefaultMutation,
        DefaultSelection,
        GeneticProgramming,
    )
    from evogp.tree import Forest, GenerateDescriptor

    torch.manual_seed(SEED)
    X, y = table(rows)
    inputs, labels = torch.from_numpy(X).cuda(), torch.from_numpy(y[:, None].copy()).cuda()
    drawn = GenerateDescriptor(
        max_tree_len=WIDTH,
        input_len=VARIABLES,
        output_len=1,
        using_funcs=["+", "-", "*", "/", "exp", "sqrt", "sin", "cos"],
        max_layer_cnt=5,
        const_range=(-1.0, 1.0),
        sample_cnt=100,
    )
    algorithm = GeneticProgramming(
        initial_forest=Forest.random_generate(pop_size=count, descriptor=drawn),
        crossover=DefaultCrossover(),
        mutation=DefaultMutation(mutation_rate=0.2, descriptor=drawn.update(max_layer_cnt=3)),
        selection=DefaultSelection(survival_rate=0.3, elite_rate=0.01),
    )
    walls, answers, tokens = [], [], 0.0
    for _ in range(GENERATIONS):
        tokens = float(algorithm.forest.batch_subtree_size[:, 0].float().mean())
        torch.cuda.synchronize()
        started = time.perf_counter()
        fitness = -algorithm.forest.SR_fitness(inputs, labels)
        fitness[torch.isnan(fitness)] = -torch.inf
        fitness.cpu()
        answered = time.perf_counter()
        algorithm.step(fitness)
        torch.cuda.synchronize()
        walls.append(time.perf_counter() - started)
        answers.append(answered - started)
    return {
        "formulas": count,
        "rows": rows,
        "tokens_of_a_formula": tokens,
        "generation": percentiles(walls[WARM_UP:]),
        "evaluation": percentiles(answers[WARM_UP:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, nargs="?", help="where the result is written")
    parser.add_argument("--devices", default="0")
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of rows")
    options = parser.parse_args()

    def run(action: Callable[..., dict[str, Any]], *cases: tuple[Any, ...]) -> list[dict[str, Any]]:
        return [action(*given, int(rows * options.scale)) for *given, rows in cases]

    sizes = ((1_000, 10_000), (5_000, 10_000))
    with (
        ServerProcess(devices=options.devices) as server,
        warpfit.connect(server.address) as client,
    ):
        content = {
            "seed": SEED,
            "deap": run(deap_run, (client, 1_000, 100_000)),
        }
    if find_spec("evogp"):
        content["EvoGP"] = run(evogp_run, *sizes)
    save("generations", content, options.directory)


if __name__ == "__main__":
    main()
