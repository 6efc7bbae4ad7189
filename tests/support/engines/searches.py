"""Searches by an engine without a server, and what has to hold of every front."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.engines.plain_search import Tree, keeps_rules, keeps_units, tokens, trees_of
from support.engines.references import reference_loss
from warpfit.dataset import Dataset
from warpfit.expressions.reference import evaluate_program
from warpfit.ir import Batch, Program
from warpfit.losses import Loss
from warpfit.ops import CONSTANT, OPERATORS, PARAMETER, VARIABLE
from warpfit.searching import Front, Rules, SearchProgress, SearchRequest
from warpfit_server.engine.evaluation import LoadedDatasets
from warpfit_server.engine.interface import run_to_end
from warpfit_server.engine.search.genome import fitted_numbers

Floats = NDArray[np.float64]
#: A small search that finds simple laws. Pairs of short formulas take longer than all else.
SMALL = {"population": 96, "islands": 3, "max_generations": 12, "fit_iterations": 5, "pairs": False}
SIMPLE = ("add", "sub", "mul", "div", "square")


class Searches:
    """Runs searches on an engine, and checks that they leave nothing behind."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.datasets = engine, LoadedDatasets(engine)

    def request(self, data: Dataset, operators=SIMPLE, rules=None, **options) -> SearchRequest:
        """Return a checked request of `SMALL`, as far as the options say nothing else."""
        given = {"operators": dict.fromkeys(operators, 1.0), "rules": Rules(**(rules or {}))}
        asked = SearchRequest(data.content_id, **given, **(SMALL | options))
        asked.check(data.layout)
        return asked

    def begin(self, asked, report=lambda progress: None, cancelled=None):
        """Begin a search of data that are loaded."""
        flag = np.zeros(1, np.uint8) if cancelled is None else cancelled
        return self.engine.search(asked, self.datasets, cancelled=flag, report=report)

    def __call__(self, data: Dataset, operators=SIMPLE, rules=None, **options) -> SearchProgress:
        """Search, and check the front."""
        asked = self.request(data, operators, rules, **options)
        self.datasets.load(data)
        try:
            found = run_to_end(self.begin(asked))
            assert [*self.datasets._whole] == [data.content_id]
        finally:
            self.datasets.unload(data.content_id)
        check_front(found, asked, data)
        return found


def front_of(found: SearchProgress) -> list[tuple[Any, ...]]:
    """Return what a front has, to be compared with another one."""
    front, names = found.front, ("codes", "values", "parameters")
    parts = [front.batch[k : k + 1] for k in range(len(front.batch))]
    return [
        (int(size), float(loss), *(getattr(part, name).tobytes() for name in names))
        for size, loss, part in zip(front.sizes, front.losses, parts, strict=True)
    ]


def programs_of(batch: Batch) -> list[tuple[Program, Floats]]:
    """Return the formulas of a front with their parameters."""
    return [(batch.program(k), batch.program_parameters(k)[0]) for k in range(len(batch))]


def inner_trees(found: SearchProgress, fitted: int) -> list[Tree]:
    """Return f of each formula of a front, with constants for its parameters."""
    trees = []
    for program, parameters in programs_of(found.front.batch):
        codes, values = program.codes.copy(), program.values.copy()
        is_parameter = codes == PARAMETER
        values[is_parameter] = parameters[values[is_parameter].astype(int)]
        codes[is_parameter] = CONSTANT
        (tree,) = trees_of(codes.tolist(), values.tolist())
        for name in ("mul", "add")[:fitted][::-1] if tree.operands else ():
            assert tree.code == OPERATORS[name].code
            assert tree.operands[1].is_constant
            tree = tree.operands[0]
        trees.append(tree)
    return trees


def check_front(found: SearchProgress, asked: SearchRequest, data: Dataset) -> None:
    """Check that a front is one, and that its losses are true and its formulas allowed."""
    front = found.front
    losses = front.losses if not asked.loss_function.is_score else -front.losses
    assert len(front.batch) == len(front.sizes) == len(losses)
    assert (np.diff(front.sizes) > 0).all()
    assert (np.diff(losses) < 0).all()
    check_losses(front, asked, data)
    if front.parts is not None:  # the tokens of formulas are not those that are searched
        return
    complexities = asked.rules.complexities
    for tree, size in zip(inner_trees(found, fitted_numbers(asked)), front.sizes, strict=True):
        nodes = list(tokens(tree))
        assert sum(complexities.get(node.name, 1) for node in nodes) == size
        used = {int(node.value) for node in nodes if node.code == VARIABLE}
        assert used <= set(asked.columns(data.layout))
        if asked.guesses is None:
            assert {node.name for node in nodes} - {""} <= set(asked.operators)
            assert keeps_rules(tree, asked)
            assert keeps_units(tree, asked)


def check_losses(front: Front, asked: SearchRequest, data: Dataset) -> None:
    """Check the losses of a front against those of its formulas in NumPy's float64.

    Rounding of the formulas' numbers, and of a device's functions, is allowed for.
    """
    if asked.custom_loss is not None:
        return
    start, stop = asked.row_range(data.layout)
    rows = np.arange(start, stop)
    if data.weights is not None:
        rows = rows[data.weights[start:stop] > 0]
    target, X = data.target[rows].astype(np.float64), data.variables[:, rows].astype(np.float64)
    if asked.loss in (Loss.NMSE, Loss.R2) and np.ptp(target) == 0.0:
        return  # which has none: NumPy's variance of equal numbers may be a rounding error
    weights = np.ones(len(rows)) if data.weights is None else data.weights[rows].astype(np.float64)
    kind = asked.loss or Loss.MSE
    rounding = 1e-15 if data.layout.dtype == np.float64 else 1e-6
    for (program, parameters), loss in zip(programs_of(front.batch), front.losses, strict=True):
        # Numbers that cancel are rounded to different sides.
        turns = rounding * (-1.0) ** np.arange(len(parameters))
        expected, *nearby = (
            reference_loss(kind, evaluate_program(program, X, parameters * factor), target, weights)
            for factor in (1.0, 1.0 + rounding, 1.0 - rounding, 1.0 + turns, 1.0 - turns)
        )
        allowed = 1e3 * np.abs(np.subtract(nearby, expected)).max() + 1e-18 * target.var()
        # What R^2 leaves to 1 is a quotient, whose digits rounding takes.
        left = np.subtract(1.0, [loss, expected]) if asked.loss is Loss.R2 else [loss, expected]
        np.testing.assert_allclose(*left, rtol=max(1e-9, 10 * rounding), atol=allowed)
