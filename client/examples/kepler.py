"""Rediscover Kepler's third law: genetic programming over structure, fitting on the server.

    python client/examples/kepler.py                      # starts a server by itself
    python client/examples/kepler.py --address HOST:PORT

The data are the eight planets and Pluto from NASA's planetary fact sheet: distance from the Sun,
mass and eccentricity of each, and, to be explained, the period of its orbit. The program invents
formulas with free parameters, and the server fits the parameters of a whole generation in one call,
several starts for each. What is left of the search is structure: the law is found when
``p1 * distance^p2`` (or an equal) turns up, and the fit says that p2 is 1.5.

Formulas are compared by the Bayesian information criterion (Schwarz 1978), which sets the error
against the length, because nine planets would be fitted exactly by a formula that is long enough.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

import warpfit
from warpfit.embedded import server_at

NAMES = ("distance", "mass", "eccentricity")
#: 10^6 km, 10^24 kg, 1, and days (NASA Space Science Data Coordinated Archive, planetary fact
#: sheet, metric).
PLANETS = {
    "Mercury": (57.9, 0.330, 0.206, 88.0),
    "Venus": (108.2, 4.87, 0.007, 224.7),
    "Earth": (149.6, 5.97, 0.017, 365.2),
    "Mars": (228.0, 0.642, 0.094, 687.0),
    "Jupiter": (778.5, 1898.0, 0.049, 4331.0),
    "Saturn": (1432.0, 568.0, 0.052, 10747.0),
    "Uranus": (2867.0, 86.8, 0.047, 30589.0),
    "Neptune": (4515.0, 102.0, 0.010, 59800.0),
    "Pluto": (5906.4, 0.0130, 0.244, 90560.0),
}
BINARY = ("add", "sub", "mul", "div", "pow")
UNARY = ("sqrt", "square", "log", "exp")
#: Name of a variable, "p" for a parameter, or an operator with its operands.
Tree: TypeAlias = "str | tuple[Any, ...]"
MOST_NODES = 11
STARTS = 3


@dataclass(frozen=True)
class Scored:
    """A formula whose parameters have been fitted."""

    criterion: float
    nodes: int
    tree: Tree
    parameters: tuple[float, ...]
    error: float
    """Root mean square of the relative errors."""
    standard_errors: tuple[float, ...]


# -------------------------------------------------------------------------------------- formulas


def grow(rng: random.Random, depth: int) -> Tree:
    """Draw a formula."""
    if depth == 0 or rng.random() < 0.25:
        return rng.choice((*NAMES, "p", "p"))
    if rng.random() < 0.25:
        return (rng.choice(UNARY), grow(rng, depth - 1))
    return (rng.choice(BINARY), grow(rng, depth - 1), grow(rng, depth - 1))


def size(tree: Tree) -> int:
    """Count the nodes."""
    return 1 if isinstance(tree, str) else 1 + sum(map(size, tree[1:]))


def places(tree: Tree, path: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Return the paths to all nodes."""
    yield path
    if not isinstance(tree, str):
        for index, part in enumerate(tree[1:], start=1):
            yield from places(part, (*path, index))


def at(tree: Tree, path: tuple[int, ...]) -> Tree:
    """Return the node at a path."""
    for index in path:
        tree = tree[index]
    return tree


def replaced(tree: Tree, path: tuple[int, ...], part: Tree) -> Tree:
    """Return a copy of a formula with another node at a path."""
    if not path:
        return part
    first, *rest = path
    return (*tree[:first], replaced(tree[first], tuple(rest), part), *tree[first + 1 :])


def child(rng: random.Random, mother: Tree, father: Tree) -> Tree:
    """Put a part of the father, or a new one, into the mother."""
    part = at(father, rng.choice(list(places(father)))) if rng.random() < 0.6 else grow(rng, 2)
    made = replaced(mother, rng.choice(list(places(mother))), part)
    return made if size(made) <= MOST_NODES else mother


def to_program(tree: Tree) -> warpfit.Program:
    """Number the parameters and build what the server understands."""
    count = 0

    def build(node: Tree) -> warpfit.Program:
        nonlocal count
        if node == "p":
            count += 1
            return warpfit.Program.parameter(count - 1)
        if isinstance(node, str):
            return warpfit.Program.variable(NAMES.index(node))
        return warpfit.Program.apply(node[0], *map(build, node[1:]))

    return build(tree)


def to_text(found: Scored) -> str:
    """Write a formula with its fitted parameters."""
    from warpfit.expressions.printing import to_text as program_text

    text = program_text(to_program(found.tree), NAMES)
    for index, value in reversed(list(enumerate(found.parameters, start=1))):
        text = text.replace(f"p{index}", f"{value:.5g}")
    return text


# -------------------------------------------------------------------------------------- evolution


def score(client: warpfit.Client, data: Any, trees: list[Tree], rng: random.Random) -> list[Scored]:
    """Fit a whole generation in one call."""
    programs = [to_program(tree) for tree in trees]
    starts = [
        [[rng.uniform(0.1, 2.0) for _ in range(program.parameters)] for _ in range(STARTS)]
        for program in programs
    ]
    fit = client.optimize(
        data,
        programs,
        [np.reshape(start, (STARTS, -1)) for start in starts],
        loss="sse",
        max_iterations=60,
        standard_errors=True,
    )
    rows = len(PLANETS)
    scored = []
    for index, tree in enumerate(trees):
        # The weights are 1 / period^2, so this is the mean square of the relative errors. Published
        # figures have about four digits: nothing is gained below 1e-8.
        square = max(float(fit.loss[index]) / rows, 1e-8)
        nodes = size(tree)
        criterion = rows * math.log(square) + nodes * math.log(rows)
        scored.append(
            Scored(
                criterion if math.isfinite(square) else math.inf,
                nodes,
                tree,
                tuple(fit.parameters[index].tolist()),
                math.sqrt(square),
                tuple(fit.standard_errors[index].tolist()),
            )
        )
    return scored


def evolve(client: warpfit.Client, options: argparse.Namespace) -> Scored:
    """Evolve formulas; the best ones of all generations are kept."""
    rng = random.Random(options.seed)
    table = np.array(list(PLANETS.values()))
    data = client.upload(
        table[:, :3], table[:, 3], 1.0 / np.square(table[:, 3]), names=NAMES, dtype="float64"
    )
    known: dict[Tree, Scored] = {}
    trees = [grow(rng, 3) for _ in range(options.population)]
    for generation in range(1, options.generations + 1):
        fresh = [tree for tree in dict.fromkeys(trees) if tree not in known]
        if fresh:
            known |= zip(fresh, score(client, data, fresh, rng), strict=True)
        ranked = sorted(known.values(), key=lambda s: (s.criterion, s.nodes, str(s.tree)))
        best = ranked[0]
        print(
            f"generation {generation:3}: {len(known):6} formulas, "
            f"best error {100 * best.error:8.4f} %  {to_text(best)}"
        )
        elite = [s.tree for s in ranked[: options.population // 4]]
        trees = [child(rng, rng.choice(elite), rng.choice(elite)) for _ in trees]
        trees[: len(trees) // 5] = [grow(rng, 3) for _ in range(len(trees) // 5)]
    return best


def main() -> None:
    """Run the whole example."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    described = "HOST:PORT of a server (default: WARPFIT_ADDRESS, or start one)"
    parser.add_argument("--address", default=os.environ.get("WARPFIT_ADDRESS"), help=described)
    parser.add_argument("--generations", type=int, default=15)
    parser.add_argument("--population", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    started = time.perf_counter()
    if not options.address:
        print("starting a server (the very first start compiles for some seconds)")
    with (
        server_at(options.address, ["--devices", "cpu"]) as address,
        warpfit.connect(address) as client,
    ):
        best = evolve(client, options)
    print(f"\n{time.perf_counter() - started:.1f} s; the law:")
    print(f"  period = {to_text(best)}")
    for index, (value, error) in enumerate(
        zip(best.parameters, best.standard_errors, strict=True), start=1
    ):
        print(f"  p{index} = {value:.5f} +- {error:.5f}")
    print(f"  relative error {100 * best.error:.3f} % over {len(PLANETS)} planets")


if __name__ == "__main__":
    main()
