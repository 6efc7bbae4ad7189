"""Cost in the client of turning expressions of other libraries into a batch.

    python tests/bench/conversion.py [--against CHECKOUT] [--trees 1000] [--rounds 15]

Each kind of expression is converted as `Client.evaluate` does it, in a process for each checkout,
in turns, so that other load on the machine meets both alike. Every round has new objects, as every
generation of genetic programming has; texts differ in each round, so that no cache knows them.
"""

from __future__ import annotations

import argparse
import functools
import gc
import operator
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from harness import save

ROOT = Path(__file__).resolve().parents[2]
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


def gplearn_programs(count: int) -> list[Any]:
    """Programs of `NODES` nodes or one more."""
    from gplearn._program import _Program
    from gplearn.functions import _function_map

    names = ("add", "sub", "mul", "div", "neg", "sin", "log")
    functions = [_function_map[name] for name in names]
    arities: dict[int, list[Any]] = {1: functions[4:], 2: functions[:4]}
    state = np.random.RandomState(random.randrange(2**31))
    programs: list[Any] = []
    while len(programs) < count:
        program = _Program(
            *(functions, arities, (3, 6), "grow", 5, (-1.0, 1.0), None, 0.05, 0.001, state)
        )
        if NODES <= len(program.program) <= NODES + 1:
            programs.append(program)
    return programs


def texts(count: int) -> list[str]:
    """Return the texts of `deap_trees`."""
    from warpfit.frontends import as_program

    return [str(as_program(tree)) for tree in deap_trees(count)]


KINDS: dict[str, Callable[[int], list[Any]]] = {
    "deap": deap_trees,
    "gplearn": gplearn_programs,
    "text": texts,
}


def serve() -> None:
    """Print the processor time, in microseconds an expression, of what each line asks for."""
    from warpfit.calls.arguments import build_evaluation
    from warpfit.calls.dataset_handle import DatasetHandle
    from warpfit.dataset import Dataset

    handle = DatasetHandle(Dataset.of(np.ones((2, 5)), np.ones(2)))
    for line in sys.stdin:
        kind, seed, count = line.split()
        random.seed(int(seed))
        expressions = KINDS[kind](int(count))
        gc.collect()
        started = time.process_time()
        build_evaluation(handle, expressions, None, None, {})
        print((time.process_time() - started) / len(expressions) * 1e6, flush=True)


@contextmanager
def worker(checkout: Path) -> Iterator[Callable[[str, int, int], float]]:
    """Yield the function that measures one round with a checkout's client."""
    environment = {**os.environ, "PYTHONPATH": str(checkout / "client")}
    command = [sys.executable, __file__, "--serve"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def measure(kind: str, seed: int, count: int) -> float:
            process.stdin.write(f"{kind} {seed} {count}\n")
            process.stdin.flush()
            return float(process.stdout.readline())

        yield measure
        process.stdin.close()


def measured(checkouts: dict[str, Path], trees: int, rounds: int) -> dict[str, Any]:
    """Return the median microseconds an expression by kind and checkout."""
    times: dict[str, dict[str, list[float]]] = {
        kind: {name: [] for name in checkouts} for kind in KINDS
    }
    with ExitStack() as stack:
        workers = {name: stack.enter_context(worker(path)) for name, path in checkouts.items()}
        for round_number in range(rounds + 1):
            for kind in KINDS:
                for name, measure in workers.items():
                    found = measure(kind, SEED + round_number, trees)
                    if round_number:
                        times[kind][name].append(found)
    return {
        kind: {name: round(statistics.median(series), 2) for name, series in by_name.items()}
        for kind, by_name in times.items()
    }


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, help="another checkout to compare with")
    parser.add_argument("--trees", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    checkouts = {"this": ROOT} | ({"before": options.against} if options.against else {})
    found = measured(checkouts, options.trees, options.rounds)
    if options.against:
        for by_name in found.values():
            by_name["ratio"] = round(by_name["before"] / by_name["this"], 2)
    content = {
        "trees": options.trees,
        "nodes": [NODES, NODES + 1],
        "rounds": options.rounds,
        "median_microseconds_an_expression": found,
    }
    save("conversion", content)


if __name__ == "__main__":
    main()
