"""The equations that a search returns: their table, the choice among them, and plots."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final

import numpy as np

from warpfit.display import TextTable
from warpfit.errors import InvalidArgumentError, require
from warpfit.expressions.language import FREE, cost
from warpfit.ir import Program
from warpfit.ops import CONSTANT

#: Losses below this part of that of the best constant count as equal: rounding.
ROUNDING: Final = 1e-18
#: An equation is in the running for "best" if its loss is at most this multiple of the least.
_NEAR_BEST: Final = 1.5
COLUMNS: Final = ("complexity", "loss", "score", "bic", "r2", "equation")


@dataclass(frozen=True, slots=True)
class Equation:
    """An equation that no simpler one equals in accuracy."""

    complexity: int
    """Sum of the weights of its tokens, 1 each unless others were given."""
    loss: float
    """Loss of this formula on all training data, rows held out included."""
    score: float
    """Decrease of the logarithm of the loss, above the least that any prediction could have, for
    each unit of complexity since the equation before (PySR's score); 0 for the first one."""
    bic: float
    """A Bayesian information criterion, -2 log L + k log(rows) (Schwarz 1978). Its k is no number
    of parameters but ``complexity``, as the structure was searched for, too, plus 1 for each
    constant, or a part of 1 for one in a short form. Comparable on the same data only."""
    r2: float
    """R^2 of this formula on the rows held out, which no fit has seen; minus infinity if it has no
    value on one of them, and NaN if none were held out."""
    program: Program
    equation: str
    """The program as text."""
    is_supported: bool = True
    """Whether the rows held out do not speak against it: it has a value there and, if squares are
    minimised, an R^2 that is not negative. Constants always are, and all if none are held out."""


def build_front(
    found: Sequence[tuple[Program, float, float]],
    complexity: Callable[[Program], int],
    text: Callable[[Program], str],
    rows: float,
    scale: float,
    floor: float = 0.0,
    deviance: Callable[[float], float] | None = None,
    predicts_mean: bool = True,
) -> list[Equation]:
    """Rank formulas by complexity, and leave out those that a simpler one equals in loss.

    The formula of the least BIC stays, whatever others of its complexity gain by more constants.

    Args:
        found: program, loss above ``floor``, and R^2 on rows held out, of each formula.
        complexity: measures a program.
        text: writes a program.
        rows: amount of data for the BIC.
        scale: loss of the best constant above ``floor``.
        floor: least loss that any prediction could have.
        deviance: returns -2 log L of a loss above ``floor``; by default rows log(loss).
        predicts_mean: whether predictions are means of the target, so that R^2 judges them.

    """
    minus_2_log_l = deviance or (lambda excess: rows * math.log(excess))
    least = max(ROUNDING * scale, math.ulp(0.0))
    # A formula may have no value on rows that the search did not compare.
    found = [entry for entry in found if math.isfinite(entry[1])] or list(found)[:1]
    measured = [
        (complexity(program), max(loss, least), program, max(loss, 0.0), r2)
        for program, loss, r2 in found
    ]
    best = min(
        measured, key=lambda item: information(item[0], minus_2_log_l(item[1]), item[2], rows)
    )
    ranked = [item for item in measured if item is best or item[0] > best[0] or item[1] > best[1]]
    front: list[Equation] = []
    last = math.inf
    for size, level, program, loss, r2 in sorted(ranked, key=lambda item: item[:2]):
        if front and level >= last:
            continue
        score = 0.0
        if front:
            drop = math.log(last / level)
            score = drop / (size - front[-1].complexity)
        bic = information(size, minus_2_log_l(level), program, rows)
        is_refuted = r2 < 0.0 if predicts_mean else r2 == -math.inf
        is_supported = program.variables == 0 or not is_refuted
        front.append(
            Equation(size, loss + floor, score, bic, r2, program, text(program), is_supported)
        )
        last = level
    return front


def information(size: int, deviance: float, program: Program, rows: float) -> float:
    """Return the BIC of a formula, as `Equation.bic` describes it."""
    constants = program.values[program.codes == CONSTANT].tolist()
    return deviance + (size + sum(map(cost, constants)) / FREE) * math.log(max(rows, 2.0))


def _best(front: Sequence[Equation]) -> Equation:
    least = min(equation.loss for equation in front)
    limit = _NEAR_BEST * least if least > 0.0 else least
    return max((e for e in front if e.loss <= limit), key=lambda equation: equation.score)


#: Criteria that choose an equation of a front.
SELECTIONS: Final[dict[str, Callable[[Sequence[Equation]], Equation]]] = {
    "best": _best,
    # The last of several: where losses overflow or vanish, the more complex are the more accurate.
    "accuracy": lambda front: min(reversed(front), key=lambda equation: equation.loss),
    "score": lambda front: max(front, key=lambda equation: equation.score),
    "bic": lambda front: min(front, key=lambda equation: equation.bic),
}


def check_selection(name: str) -> None:
    """Raise InvalidArgumentError for a criterion that is not known."""
    if name not in SELECTIONS:
        raise InvalidArgumentError(
            f"model_selection is {name!r}",
            "BAD_SETTING",
            f"Choose from {', '.join(SELECTIONS)}",
            "model_selection",
        )


def selected(front: Sequence[Equation], name: str) -> int:
    """Return the index of the equation that a criterion chooses.

    Equations that the rows held out do not support are chosen only where there are no others, and
    then the one that predicts these rows best: noise with heavy tails lets formulas fit single
    rows, which their loss cannot tell from a law.
    """
    eligible = [equation for equation in front if equation.is_supported]
    if not eligible:
        return max(range(len(front)), key=lambda place: front[place].r2)
    return list(front).index(SELECTIONS[name](eligible))


def as_table(front: Sequence[Equation]) -> Any:
    """Return a pandas DataFrame of `COLUMNS`, or a table that prints if there is no pandas."""
    if find_spec("pandas") is not None:
        import pandas

        return pandas.DataFrame(
            {name: [getattr(equation, name) for equation in front] for name in COLUMNS}
        )
    return EquationTable(tuple(front))


@dataclass(frozen=True)
class EquationTable:
    """The equations as a table in text and HTML; a sequence of `Equation`."""

    front: tuple[Equation, ...]

    def __len__(self) -> int:
        """Count the equations."""
        return len(self.front)

    def __getitem__(self, index: int) -> Equation:
        """Return one equation."""
        return self.front[index]

    def __str__(self) -> str:
        """Return the table as right-aligned columns."""
        return self._table().text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self._table().html()

    def _table(self) -> TextTable:
        cells = [[getattr(equation, name) for name in COLUMNS] for equation in self.front]
        return TextTable(
            COLUMNS,
            [tuple(f"{c:.5g}" if isinstance(c, float) else str(c) for c in row) for row in cells],
        )


def axes_or_new(ax: Any) -> Any:
    """Return the axes, or those of a new figure.

    Raises:
        InvalidArgumentError: if matplotlib is not installed.

    """
    if ax is not None:
        return ax
    require("matplotlib", "matplotlib", "ax")
    from matplotlib import pyplot

    return pyplot.subplots()[1]


def plot_front(front: Sequence[Equation], chosen: Equation, ax: Any) -> Any:
    """Draw loss over complexity, with the chosen equation marked; return the axes."""
    ax = axes_or_new(ax)
    steps = [equation.complexity for equation in front]
    losses = [max(equation.loss, 1e-300) for equation in front]
    ax.step(steps, losses, where="post", marker="o")
    ax.plot([chosen.complexity], [max(chosen.loss, 1e-300)], "s", label=_plain(chosen.equation))
    ax.set(xlabel="complexity", ylabel="loss", yscale="log")
    ax.legend()
    return ax


def _plain(text: str) -> str:
    """Return a text that matplotlib shows as it is: dollars enclose formulas there."""
    return text.replace("$", r"\$")


def plot_fit(target: np.ndarray[Any, Any], predicted: np.ndarray[Any, Any], ax: Any) -> Any:
    """Draw predictions over the target, with the diagonal; return the axes."""
    ax = axes_or_new(ax)
    ends = [float(np.min(target)), float(np.max(target))]
    ax.plot(target, predicted, ".", alpha=0.5)
    ax.plot(ends, ends, "-")
    ax.set(xlabel="target", ylabel="prediction")
    return ax
