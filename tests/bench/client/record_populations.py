"""Record the populations of the benchmark's second suite: generations 0, 5 and 25 of two libraries.

    python tests/bench/run.py client/record_populations

DEAP and pyoperon each evolve 1,000 expressions of the random mix's operators, at most 50 nodes
long, on 1,000 rows of the benchmark's table. The ephemeral constants of DEAP and the coefficients
of Operon become parameters; a variable of Operon with a weight is three tokens. The result is
``client/warpfit/bench/populations.npz``, which `warpfit.bench.batches` reads.
"""

from __future__ import annotations

import functools
import operator
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyoperon
from deap import algorithms, base, creator, gp, tools
from pyoperon.sklearn import SymbolicRegressor

from warpfit import bench
from warpfit.bench.batches import GENERATIONS, VARIABLES, Batch, table
from warpfit.frontends.deap import from_deap
from warpfit.frontends.operon import from_operon

SEED, ROWS, SIZE, LONGEST = 20261123, 1_000, 1_000, 50
OPERON_SYMBOLS = "add,sub,mul,div,pow,abs,log,exp,sqrt,constant,variable"


def deap_populations() -> dict[int, Batch]:
    """Evolve by DEAP's simple algorithm: tournaments of 5, crossover 0.7, mutation 0.2."""
    pset, toolbox = _deap_toolbox()
    random.seed(SEED)
    population = toolbox.population(SIZE)
    found = {}
    for generation in range(max(GENERATIONS) + 1):
        for individual in population:
            if not individual.fitness.valid:
                individual.fitness.values = toolbox.evaluate(individual)
        if generation in GENERATIONS:
            lifted = [from_deap(tree, pset).lift_constants() for tree in population]
            found[generation] = [p for p, _ in lifted], [np.asarray(v) for _, v in lifted]
        population = algorithms.varAnd(toolbox.select(population, SIZE), toolbox, 0.7, 0.2)
    return found


def _deap_toolbox() -> tuple[Any, Any]:
    pset = gp.PrimitiveSet("main", VARIABLES)
    for function, name in ((np.add, "add"), (np.subtract, "sub"), (np.multiply, "mul")):
        pset.addPrimitive(function, 2, name)
    pset.addPrimitive(np.divide, 2, "div")
    pset.addPrimitive(np.power, 2, "pow")
    for function in (np.abs, np.log, np.exp, np.sqrt):
        pset.addPrimitive(function, 1, {"absolute": "abs"}.get(function.__name__))
    pset.addEphemeralConstant("constant", functools.partial(random.uniform, -5, 5))
    creator.create("Fitness", base.Fitness, weights=(-1.0,))
    creator.create("Individual", gp.PrimitiveTree, fitness=creator.Fitness)
    data = table(ROWS, SEED, "float64")
    columns = list(data.X.T)

    def evaluate(individual: Any) -> tuple[float]:
        with np.errstate(all="ignore"):
            error = np.mean(np.square(gp.compile(individual, pset)(*columns) - data.y))
        return (float(error) if np.isfinite(error) else np.inf,)

    toolbox = base.Toolbox()
    toolbox.register("expr", gp.genHalfAndHalf, pset=pset, min_=2, max_=5)
    toolbox.register("individual", tools.initIterate, creator.Individual, toolbox.expr)
    toolbox.register("population", tools.initRepeat, list, toolbox.individual)
    toolbox.register("evaluate", evaluate)
    toolbox.register("select", tools.selTournament, tournsize=5)
    toolbox.register("mate", gp.cxOnePoint)
    toolbox.register("mutation", gp.genFull, min_=0, max_=2)
    toolbox.register("mutate", gp.mutUniform, expr=toolbox.mutation, pset=pset)
    for name in ("mate", "mutate"):
        toolbox.decorate(name, gp.staticLimit(len, LONGEST))
        toolbox.decorate(name, gp.staticLimit(operator.attrgetter("height"), 17))
    return pset, toolbox


def operon_populations() -> dict[int, Batch]:
    """Run pyoperon's regressor for as many generations, each time from the same seed."""
    data = table(ROWS, SEED, "float64")
    variables = pyoperon.Dataset(np.asfortranarray(data.X)).Variables
    found = {}
    for generation in GENERATIONS:
        model = SymbolicRegressor(
            allowed_symbols=OPERON_SYMBOLS,
            population_size=SIZE,
            pool_size=SIZE,
            generations=generation,
            max_evaluations=10**9,
            max_length=LONGEST,
            optimizer_iterations=0,
            n_threads=1,
            random_state=SEED,
        )
        model.fit(data.X, data.y)
        trees = [individual.Genotype for individual in model.individuals_[:SIZE]]
        programs, parameters = zip(*(from_operon(tree, variables) for tree in trees), strict=True)
        found[generation] = list(programs), list(parameters)
    return found


def main() -> None:
    """Write the file, and say how long the expressions are."""
    arrays = {}
    for library, populations in (("DEAP", deap_populations()), ("pyoperon", operon_populations())):
        for generation, (programs, parameters) in populations.items():
            name = f"{library} generation {generation}"
            arrays[f"{name}/lengths"] = np.array([len(p) for p in programs], np.uint16)
            arrays[f"{name}/codes"] = np.concatenate([p.codes for p in programs])
            arrays[f"{name}/values"] = np.concatenate([p.values for p in programs], dtype="f4")
            arrays[f"{name}/parameters"] = np.concatenate(parameters, dtype="f4")
            print(f"{name}: {len(programs)}, mean length {np.mean([len(p) for p in programs]):.1f}")
    path = Path(bench.__file__).with_name("populations.npz")
    np.savez_compressed(path, **arrays)
    print(f"{path}: {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
