"""Cost in the client of turning expressions of other libraries into a batch.

    python tests/bench/run.py service/conversion [--trees 1000] [--rounds 15]

Each kind of expression is converted as `Client.evaluate` does it, the kinds in turns. Every round
has new objects, as every generation of genetic programming has; texts differ in each round, so that
no cache knows them.
"""

from __future__ import annotations

import functools
import gc
import operator
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from harness import arguments, save, seconds_of

from warpfit.calls.arguments import build_evaluation
from warpfit.calls.dataset_handle import DatasetHandle
from warpfit.dataset import Dataset
from warpfit.frontends import as_program

SEED = 20261123
NODES = 20


def deap_trees(count: int) -> list[Any]:
    """Trees of `NODES` nodes or one more, of DEAP's usual primitives and ephemeral constants."""
    from deap import gp

    pset = gp.PrimitiveSet("MAIN", 5)
    for function, arity in (
        *((operator.add, 2), (operator.sub, 2), (operator.mul, 2), (operator.neg, 1)),
        *((np.sin, 1), (np.exp, 1), (np.maximum, 2)),
    ):
        pset.addPrimitive(function, arity, name=function.__name__)
    pset.addEphemeralConstant("number", functools.partial(random.uniform, -1, 1))
    trees: list[Any] = []
    while len(trees) < count:
        tree = gp.PrimitiveTree(gp.genGrow(pset, 3, 7))
        if NODES <= len(tree) <= NODES + 1:
            trees.append(tree)
    return trees


def texts(count: int) -> list[str]:
    """Return the texts of `deap_trees`."""
    return [str(as_program(tree)) for tree in deap_trees(count)]


KINDS: dict[str, Callable[[int], list[Any]]] = {"deap": deap_trees, "text": texts}


def microseconds(handle: DatasetHandle, kind: str, seed: int, count: int) -> float:
    """Processor time of one conversion, in microseconds an expression."""
    random.seed(seed)
    expressions = KINDS[kind](count)
    gc.collect()
    build = functools.partial(build_evaluation, handle, expressions, None, None, {})
    return seconds_of(build, 1, clock=time.process_time)[0] / len(expressions) * 1e6


def main() -> None:
    options = arguments(__doc__, "conversion", trees=1000, rounds=15)
    handle = DatasetHandle(Dataset.of(np.ones((2, 5)), np.ones(2)))
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(options.rounds + 1):
        for kind, series in times.items():
            series.append(microseconds(handle, kind, SEED + number, options.trees))
    medians = {kind: round(statistics.median(series[1:]), 2) for kind, series in times.items()}
    content = {
        "trees": options.trees,
        "nodes": [NODES, NODES + 1],
        "rounds": options.rounds,
        "median_microseconds_an_expression": {kind: {"this": m} for kind, m in medians.items()},
    }
    save(options.name, content, options.folder)


if __name__ == "__main__":
    main()
