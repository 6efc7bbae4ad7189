"""Fits per second of the CPU engine beside pyoperon's Levenberg-Marquardt, in the same run.

Both fit the same random trees of the thesis mix (10 to 50 tokens over 10 variables, with at least
one parameter and finite values at the start), from the same starts, on the same float32 data, with
the same number of iterations and of threads. pyoperon's trees optimise the same numbers: every
other coefficient of theirs is switched off. Each side uses its own tests of convergence. Final
losses are those of the float64 reference. pyoperon's binding fits under Python's lock, so the ratio
to go by is that of one thread. Repetitions are interleaved, medians are reported.
"""

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyoperon
from harness import arguments, medians_in_turn, outputs_of, save
from numpy.typing import NDArray
from peers import Table

from support.engines.references import reference_loss
from support.random_programs import random_program, thesis_mix
from warpfit.dataset import Dataset
from warpfit.expressions import reference
from warpfit.frontends.operon import to_operon_infix
from warpfit.ir import Batch, Program
from warpfit.losses import SQUARES
from warpfit.request import Evaluation, FitRequest, FitSettings, Loss, Method, Precision
from warpfit_server.engine.cpu.engine import CpuEngine
from warpfit_server.engine.fit.driver import FitContext, optimize
from warpfit_server.engine.interface import run_to_end

VARIABLES = 10
MIX = 1
"""Seed of trees and data."""
#: Relative difference below which two final losses count as equal.
EQUAL = 1e-4
Floats = NDArray[np.float64]


class Problem(NamedTuple):
    """Trees with starts, and the data that they are fitted to."""

    programs: list[Program]
    starts: list[Floats]
    table: Table

    def losses(self, vectors: list[Floats]) -> Floats:
        """Mean squared errors by the float64 reference."""
        columns = self.table.X.T.astype(np.float64)
        values = reference.evaluate_programs(self.programs, columns, vectors)
        return reference_loss(Loss.MSE, values, self.table.y)


def problem(rows: int, trees: int) -> Problem:
    """Draw trees with parameters whose loss at the start is finite, also in float32."""
    rng = np.random.default_rng(MIX)
    matrix = rng.uniform(0.1, 5, (rows, VARIABLES)).astype(np.float32)
    x = matrix.T.astype(np.float64)
    law = 2.0 * x[0] * np.exp(-0.5 * x[1]) + 1.5 * np.sqrt(x[2]) - x[3] / (0.7 + x[4])
    target = (law + rng.normal(0, 0.1, rows)).astype(np.float32)
    drawn = Problem([], [], Table(matrix, target))
    while len(drawn.programs) < trees:
        program = random_program(rng, int(rng.integers(10, 51)), variables=VARIABLES)
        start = rng.uniform(0.5, 2.0, size=program.parameters)
        values = reference.evaluate_program(program, x, start)
        if len(start) and np.isfinite(values).all() and np.abs(values).max() < 1e6:
            drawn.programs.append(program)
            drawn.starts.append(start)
    return drawn


class Peer:
    """pyoperon's Levenberg-Marquardt on a problem; keeps alive what pyoperon does not."""

    def __init__(self, given: Problem, iterations: int) -> None:
        array = np.asfortranarray(np.column_stack(given.table), dtype=np.float32)
        dataset = pyoperon.Dataset(array)
        problem = pyoperon.Problem(dataset)
        problem.TrainingRange = pyoperon.Range(0, len(array))
        target = f"X{array.shape[1]}"
        problem.Target = next(v for v in dataset.Variables if v.Name == target)
        dispatch = pyoperon.DispatchTable()
        self._optimizer = pyoperon.LMOptimizer(dispatch, problem, max_iter=iterations)
        self._names = {v.Name: v.Hash for v in dataset.Variables}
        self._kept = array, dataset, problem, dispatch
        made = map(self._tree, given.programs, given.starts)
        self._trees, self.orders = zip(*made, strict=True)

    def _tree(self, program: Program, start: Floats) -> tuple[Any, list[int]]:
        """Return a tree that starts there, and the parameter that each of its coefficients is.

        Every other coefficient is switched off; a parameter that stands twice is two of them.
        """
        marks = 1000.0 + np.arange(len(start))  # numbers that the tree has nowhere else
        text = to_operon_infix(program, list(self._names), marks)
        nodes, order = pyoperon.InfixParser.Parse(text, self._names).Nodes, []
        for node in nodes:
            place = round(node.Value - 1000.0)
            is_own = node.Type == pyoperon.NodeType.Constant and 0 <= place < len(start)
            node.Optimize = bool(is_own and abs(node.Value - marks[place]) < 1e-3)
            if node.Optimize:
                node.Value = float(start[place])
                order.append(place)
        return pyoperon.Tree(nodes).UpdateNodes(), order

    def fit(self, threads: int) -> list[Floats]:
        """Fit all trees, parts of them in threads; coefficients are by the parameters they are."""

        def fitted(trees: list[Any]) -> list[Floats]:
            search = pyoperon.CoefficientOptimizer(self._optimizer)
            random = pyoperon.RandomGenerator(1)
            return [np.array(search(random, tree)[0].GetCoefficients(), float) for tree in trees]

        share = -(-len(self._trees) // (8 * threads)) if threads > 1 else len(self._trees)
        parts = [self._trees[i : i + share] for i in range(0, len(self._trees), share)]
        with ThreadPoolExecutor(threads) as pool:
            found = itertools.chain(*pool.map(fitted, parts))
        return [each[np.argsort(order)] for each, order in zip(found, self.orders, strict=True)]


def compare(given: Problem, threads: int, iterations: int) -> dict[str, Any]:
    peer, engine = Peer(given, iterations), CpuEngine(threads)
    if any(sorted(order) != [*range(len(order))] for order in peer.orders):
        raise SystemExit("a tree of pyoperon has other parameters")
    data, batch = Dataset.of(*given.table), Batch.of(given.programs, given.starts)
    engine.load(data)

    def ours(precision: Precision) -> list[Floats]:
        asked = {"precision": precision, "loss": Loss.MSE, "values": False}
        settings = FitSettings(method=Method.LM, max_iterations=iterations)
        request = FitRequest(Evaluation(data.content_id, batch, **asked), settings)
        context = FitContext(engine.linearise, engine.evaluate, data, np.zeros(1, np.uint8))
        found = run_to_end(optimize(request, context)).parameters
        return [found[a:b] for a, b in itertools.pairwise(batch.parameter_starts)]

    cases: dict[str, Callable[[], list[Floats]]] = {"pyoperon": lambda: peer.fit(threads)}
    cases |= {f"warpfit {precision.value}": partial(ours, precision) for precision in Precision}
    losses = {name: given.losses(run()) for name, run in cases.items()}
    seconds = medians_in_turn(cases)
    engine.close()
    rates = {name: len(given.programs) / each for name, each in seconds.items()}
    found = {
        "threads": threads,
        "iterations": iterations,
        "fits_per_second": {name: round(rate, 1) for name, rate in rates.items()},
        "times_pyoperon": {n: round(r / rates["pyoperon"], 2) for n, r in rates.items()},
        "final_loss": {name: _judge(found, losses["pyoperon"]) for name, found in losses.items()},
    }
    print(found, flush=True)
    return found


def _judge(found: Floats, peer: Floats) -> dict[str, float]:
    """Median of the final losses, and how they compare with the peer's, tree by tree."""
    a, b = (np.where(np.isfinite(x), x, np.inf) for x in (found, peer))
    with np.errstate(invalid="ignore"):
        equal = (np.abs(a - b) <= EQUAL * np.minimum(a, b)) | (a == b)
    return {
        "median": round(float(np.median(a)), 6),
        "mean_of_logarithms": round(float(np.mean(np.log(np.minimum(a, 1e30)))), 4),
        "better": int((~equal & (a < b)).sum()),
        "equal": int(equal.sum()),
        "worse": int((~equal & (a > b)).sum()),
    }


def costs(rows: int) -> dict[str, Any]:
    """Time of loss with gradient, and with normal matrices, relative to that of the loss alone."""
    programs, starts = thesis_mix(MIX, variables=VARIABLES)
    rng = np.random.default_rng(MIX)
    matrix = rng.uniform(0.1, 5, (rows, VARIABLES)).astype(np.float32)
    data = Dataset.of(matrix, rng.normal(size=rows))
    engine = CpuEngine(1)
    engine.load(data)
    found: dict[str, Any] = {"rows": rows, "expressions": len(programs)}
    batch = Batch.of(programs, starts)
    for precision in Precision:
        evaluation = Evaluation(data.content_id, batch, precision=precision, loss=Loss.SSE)
        outputs = outputs_of(evaluation)
        linearise = partial(engine.linearise, evaluation, SQUARES, cancelled=outputs.cancelled)
        begins: dict[str, Callable[[], Any]] = {
            "loss": partial(engine.evaluate, evaluation, outputs),
            "loss and gradient": partial(linearise, curvature=False),
            "loss, gradient, normal matrix": partial(linearise, curvature=True),
        }
        cases = {name: lambda begin=begin: run_to_end(begin()) for name, begin in begins.items()}
        medians = medians_in_turn(cases)
        ratios = {name: round(value / medians["loss"], 2) for name, value in medians.items()}
        found[precision.value] = {"loss_ms": round(medians["loss"] * 1e3, 2), "times_loss": ratios}
    engine.close()
    return found


def main() -> None:
    options = arguments(__doc__, "fit", rows=10_000, trees=200, threads=(1, 2), iterations=(10, 50))
    given = problem(options.rows, options.trees)
    settings = itertools.product(options.threads, options.iterations)
    cases = [compare(given, threads, iterations) for threads, iterations in settings]
    content = {
        **{"workload": f"thesis mix with parameters, seed {MIX}, float32", "rows": options.rows},
        "trees": options.trees,
        "mean_tokens": round(float(np.mean([len(p) for p in given.programs])), 1),
        "mean_parameters": round(float(np.mean([len(s) for s in given.starts])), 2),
        **{"cases": cases, "cost_of_derivatives": [costs(100_000)]},
    }
    save(options.name, content, options.folder)
