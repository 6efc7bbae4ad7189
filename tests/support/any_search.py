"""Random searches: data, settings and budgets that a property test tries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

#: Operators by how formulas of them behave: single kinds are where searches lack something.
OPERATORS = (
    *(("add", "mul"), ("+", "-", "*", "/"), ("exp", "log"), ("square",), ("max", "min"), ("add",)),
    ("div", "sinc"),
    ("add", "sub", "mul", "div", "square", "sqrt", "exp", "log", "sin", "cos"),
    ("where", "lt", "mul"),
)
LOSSES = ("mse", "mae", "rmse", "huber", "r2", "poisson", "log_cosh", "abs(f - y)^1.5")
TEMPLATES = ("f(x1)*exp(-g(x1))", "p1*f(x1) + 2", "f(x1) + f(x1 + 1)")


@dataclass(frozen=True)
class AnySearch:
    """What one search is given."""

    settings: dict[str, Any]
    X: Any
    y: Any
    weights: Any


def targets_of(X: Any, rng: np.random.Generator) -> dict[str, Callable[[], Any]]:
    """Return what draws a target, by kinds."""
    rows, column = len(X), X[:, 0].astype(float)
    return {
        **{"noise": lambda: rng.normal(size=rows), "t": lambda: rng.standard_t(2, size=rows)},
        **{"constant": lambda: np.full(rows, 3.0), "zero": lambda: np.zeros(rows)},
        **{"integers": lambda: rng.integers(0, 4, rows) + 0.0, "sum": lambda: 2.0 * column + 1.0},
        "pole": lambda: np.sinc(column),
        "huge": lambda: 1e155 * (1.0 + column / np.abs(column).max(initial=1.0)),
        "tiny": lambda: 1e-170 * (column + 1.0),
        "outlier": lambda: np.where(np.arange(rows) == 0, 1e12, column),
        "lognormal": lambda: np.exp(2.0 * rng.normal(size=rows)),
    }


def tables_of(rows: int, columns: int, rng: np.random.Generator) -> dict[str, Callable[[], Any]]:
    """Return what draws the variables, by kinds."""
    return {
        "uniform": lambda: rng.uniform(size=(rows, columns)),
        "normal": lambda: rng.normal(size=(rows, columns)),
        "integers": lambda: rng.integers(-2, 3, (rows, columns)) + 0.0,
        "constant": lambda: np.ones((rows, columns)),
        "equal": lambda: np.tile(rng.normal(size=(rows, 1)), (1, columns)),
        "far": lambda: 1e6 + rng.uniform(size=(rows, columns)),
        "huge": lambda: 1e155 * rng.normal(size=(rows, columns)),
        "line": lambda: np.tile(np.linspace(-5, 5, rows)[:, None], (1, columns)),
    }


@st.composite
def searches(draw: st.DrawFn, longest: float) -> AnySearch:
    """Draw a search whose budget of time, if it has one, is at most ``longest`` seconds."""
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    rows = draw(st.sampled_from([1, 2, 3, 5, 10, 30, 45, 60]))
    columns = draw(st.integers(1, 4))
    X = draw(st.sampled_from([*tables_of(rows, columns, rng).values()]))()
    y = draw(st.sampled_from([*targets_of(X, rng).values()]))()
    settings: dict[str, Any] = {
        "operators": draw(st.sampled_from(OPERATORS)),
        "population": draw(st.sampled_from([2, 3, 10])),
        "generations": draw(st.sampled_from([0, 1, 2])),
        "loss": draw(st.sampled_from(("mse", "mse", "mse", *LOSSES))),
        "random_state": draw(st.integers(0, 1000)),
        "max_size": draw(st.sampled_from([None, None, 1, 3, 7, 12])),
        "simplify": draw(st.booleans()),
        "model_selection": draw(st.sampled_from(["prediction", "best", "score", "accuracy"])),
        "max_seconds": draw(st.sampled_from([None, 0.01, 0.1, longest])),
        "held_out": draw(st.sampled_from([0.1, 0.0, 0.5])),
    }
    rules = {
        **{"count": {"sin": 1, "*": 1}, "depth": 3, "nesting": {"exp": {"exp": 0}, "*": {"+": 0}}},
        "monotonic": {"x1": "increasing"},
    }
    kind = draw(st.sampled_from([None, None, *rules]))
    if kind is not None:
        settings["constraints"] = {kind: rules[kind]}
    outer = draw(st.sampled_from(["a + b f"] * 4 + ["template", "group", "units", "units"]))
    if outer == "template":
        settings["template"] = draw(st.sampled_from(TEMPLATES))
    elif outer == "group":
        settings |= {"group": columns, "loss": draw(st.sampled_from(["mse", "mae"]))}
        X = np.column_stack([X, np.arange(rows) % 2])
    elif outer == "units":
        settings |= {"units": ["m", "s", "1/m", "1"][:columns]}
        settings |= {"target_unit": "m", "dimensionless_constants": draw(st.booleans())}
    if outer in ("a + b f", "group", "units") and draw(st.integers(0, 3)) == 0:
        settings["guesses"] = draw(st.sampled_from([["x1"], ["exp(-0.3*x1) + 2", "sin(p1*x1)"]]))
    targets = draw(st.sampled_from([1, 1, 1, 1, 2]))
    if targets == 2:
        y = np.column_stack([y, X[:, 0]])
    weights = draw(st.sampled_from([None, None, "some", "far"]))
    if weights is not None:
        drawn = rng.integers(0, 3, rows) + 0.0
        drawn[0] = 1.0
        weights = drawn if weights == "some" else 10.0 ** rng.uniform(-12, 12, rows)
    return AnySearch(settings, X, y, weights)
