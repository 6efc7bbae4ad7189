"""The equations that a search returns: their table, the choice among them, and plots."""

from __future__ import annotations

import csv
import io
import math
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, TypeAlias

import numpy as np

from warpfit.display import TextTable
from warpfit.errors import InvalidArgumentError, did_you_mean, no_attribute, require
from warpfit.evidence import ROUNDING
from warpfit.ir import Program
from warpfit.sklearn.keywords import OF_OTHER_EQUATIONS

#: An equation is in the running for "best" if its loss is at most this multiple of the least.
_NEAR_BEST: Final = 1.5
#: Predictive lengths that differ by less are alike: the null model or the shortest description is
#: chosen, of a formula with a surprise only where all have one. It is two units of support
#: (Edwards, "Likelihood", 1972).
_ALIKE: Final = 2.0
#: Columns of the table, with the names that fit above them.
COLUMNS: Final = {
    "complexity": "size",
    "loss": "loss",
    "r2": "r2",
    "r2_held_out": "held out",
    "score": "score",
    "description_length": "length",
    "choice_length": "choice",
    "predictive_length": "new rows",
    "evidence": "evidence",
    "equation": "equation",
}
#: Characters of a line of a plot's title.
_TITLE: Final = 60
#: Least width of the column of formulas, which are broken at spaces.
_LEAST_WIDTH: Final = 20


@dataclass(frozen=True, slots=True)
class Equation:
    """An equation that no simpler one equals in accuracy."""

    complexity: int
    """Sum of the weights of its tokens, 1 each unless others were given."""
    loss: float
    """Loss of this formula on all training data, rows held out included."""
    excess: float
    """The same above the least that any prediction could have; not negative."""
    score: float
    """Decrease of the logarithm of ``excess`` for each unit of complexity since the equation before
    (PySR's score); 0 for the first one."""
    description_length: float
    """Length of a description of the data in nats, see `warpfit.evidence.description_length`: the
    same number as `warpfit.Client.propose` has for the formula, with ``complexity`` for its size.
    Comparable on the same data only. For losses that are no squares a constant is left out."""
    r2: float
    """R^2 of this formula on all training data; NaN in the previews of a callback, unless squares
    are minimised."""
    r2_held_out: float
    """R^2 on the rows held out, which no fit has seen; minus infinity if it has no value on one of
    them, and NaN if none were held out."""
    program: Program
    equation: str
    """The program as text, with as many digits as the estimator's ``digits``."""
    latex: str
    """The same as LaTeX."""
    is_supported: bool = True
    """Whether the rows held out do not speak against it: it has a value there and, if squares are
    minimised, an R^2 that is not negative, and neither do the others: without the 3% of the rows
    with the farthest targets it gains as much as its structure takes, or half of what it gains with
    them, or its R^2 on the rows held out is above 0.25. Of fewer than 40 rows none are held out,
    and a formula is supported if it shortens the description of the rows by more than its own
    takes. Constants always are."""
    evidence: float = math.nan
    """Logarithm of the fractional Bayes factor on all training data, with a prior for the formula,
    see `warpfit.evidence.fractional_bayes_factor`; NaN unless ``model_selection`` is "evidence"."""
    predictive_length: float = math.nan
    """Length of a description of rows that no fit has seen, in nats, but for a constant: half their
    number times the logarithm of their mean squared error, in a cross-validation of five parts, the
    length of the structure (`warpfit.searching.structure_length`), and ``surprise``
    whatever a formula leaves. NaN where a formula leaves less than a
    hundredth of the variance of these rows, and for losses that are no squares."""
    structure_length: float = 0.0
    """Part of ``predictive_length`` that the structure counts; 0 for the linear regression."""
    surprise: float = 0.0
    """Nats that a choice adds to ``description_length``. A formula of squares that leaves more
    than a hundredth of the variance has 15 if it is a surprise on rows unlike all others, whose
    variables come from different rows and are up to half as far out again: if it leaves the range
    of the target there, with a quarter of that for room, and that of a linear model, as at a
    pole."""
    taken_by_constants: float = 0.0
    """Nats that a choice adds to ``description_length`` where there are fewer than 40 rows: each
    constant takes a row's worth of what they say. Otherwise 0."""
    is_linear_regression: bool = False
    """Whether this is the linear regression of all variables, the null model: nothing has chosen
    its structure, which counts nothing in its ``predictive_length``. It is fitted to all rows, and
    ``r2_held_out`` is that of a fit to those that are not held out."""
    subformulas: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Text of each function and parameter of a template, by name; empty without one."""
    constants: tuple[tuple[float, ...], ...] = ()
    """Parameters of the program for each group of rows; empty without groups."""

    @property
    def choice_length(self) -> float:
        """``description_length``, ``surprise`` and ``taken_by_constants``, by which one chooses."""
        return self.description_length + self.surprise + self.taken_by_constants

    if not TYPE_CHECKING:  # checkers are to refuse attributes that there are not

        def __getattr__(self, name: str) -> NoReturn:
            """Raise AttributeError with what is meant."""
            raise no_attribute("Equation", name, dir(type(self)), OF_OTHER_EQUATIONS)


def build_front(
    found: Sequence[tuple[Program, float, float]],
    complexity: Callable[[Program], int],
    texts: Callable[[Program], tuple[str, str]],
    length: Callable[[Program, float], float],
    scale: float,
    floor: float = 0.0,
    predicts_mean: bool = True,
    r2: Callable[[float], float] = lambda _: math.nan,
    predictive: Mapping[Program, float] | None = None,
    null: Program | None = None,
    surprise: Callable[[Program, float], float] = lambda _program, _excess: 0.0,
    is_unpaid: Callable[[Program, float], bool] = lambda _program, _excess: False,
    structure: Callable[[Program], float] = lambda _program: 0.0,
    taken: Callable[[Program, float], float] = lambda _program, _excess: 0.0,
) -> list[Equation]:
    """Rank formulas by complexity, and leave out those that a simpler one equals in loss.

    The formula of the least description length stays, whatever others of its complexity gain by
    more constants, and so do that of the least among those that predict best, and the null model.
    A longer formula than that only decorates, and is left out, where a simpler one predicts new
    rows as well, or where the rows are too few for it.

    Args:
        found: program, loss above ``floor``, and R^2 on rows held out, of each formula.
        complexity: measures a program.
        texts: writes a program as text and as LaTeX.
        length: returns the description length of a program and its loss above ``floor``.
        scale: loss of the best constant above ``floor``.
        floor: least loss that any prediction could have.
        predicts_mean: whether predictions are means of the target, so that R^2 judges them.
        r2: returns the R^2 of a loss.
        predictive: predictive lengths, as far as they are known.
        null: the linear regression, if it takes part.
        surprise: returns `Equation.surprise` of a program and its loss above ``floor``.
        is_unpaid: tells of a program and its loss above ``floor`` whether the rows are too few for
            so long a formula, or few of many rows make it.
        structure: returns `Equation.structure_length` of a program.
        taken: returns `Equation.taken_by_constants` of a program and its loss above ``floor``.

    """
    predictive = predictive or {}
    least = max(ROUNDING * scale, math.ulp(0.0))

    def measured(program: Program, loss: float, held_out: float) -> Equation:
        is_refuted = held_out < 0.0 if predicts_mean else held_out == -math.inf
        excess = math.inf if math.isnan(loss) else max(loss, 0.0)
        return Equation(
            complexity=complexity(program),
            loss=excess + floor,
            excess=excess,
            score=0.0,
            description_length=length(program, excess),
            surprise=surprise(program, excess),
            taken_by_constants=taken(program, excess),
            r2=r2(excess + floor),
            r2_held_out=held_out,
            program=program,
            equation="",
            latex="",
            is_supported=program.variables == 0 or not (is_refuted or is_unpaid(program, excess)),
            predictive_length=predictive.get(program, math.nan),
            structure_length=structure(program),
            is_linear_regression=program == null,
        )

    # A formula may have no value on rows that the search did not compare.
    finite = [entry for entry in found if math.isfinite(entry[1])] or list(found)[:1]
    equations = [measured(*entry) for entry in finite]
    # Few rows do not pay for a long formula, which is shown, and said not to be supported.
    best = min(equations, key=lambda equation: equation.description_length + equation.surprise)
    stay = [best, min(equations, key=lambda equation: equation.choice_length)]
    if predictive:
        stay += [e for e in equations if e.is_linear_regression]
        stay += [_by_prediction([e for e in equations if e.is_supported] or equations)]
    front: list[Equation] = []
    last = last_error = math.inf
    for equation in sorted(equations, key=lambda e: (e.complexity, max(e.excess, least))):
        size, level = equation.complexity, max(equation.excess, least)
        is_longer_or_worse = size > best.complexity or level > max(best.excess, least)
        # NaN, of an error that is not known, is no worse than another.
        error = equation.predictive_length - equation.structure_length
        decorates = size > best.complexity and (
            error >= last_error or is_unpaid(equation.program, equation.excess)
        )
        is_better = not front or (level < last and is_longer_or_worse and not decorates)
        if not (is_better or any(equation is each for each in stay)):
            continue
        last_error = last_error if math.isnan(error) else min(last_error, error)
        score = 0.0
        if front and size > front[-1].complexity:
            score = max(math.log(last / level), 0.0) / (size - front[-1].complexity)
        text, latex = texts(equation.program)
        front.append(replace(equation, score=score, equation=text, latex=latex))
        last = min(last, level)
    return front


def _best(front: Sequence[Equation]) -> Equation:
    limit = _NEAR_BEST * min(equation.excess for equation in front)
    return max((e for e in front if e.excess <= limit), key=lambda equation: equation.score)


def _by_prediction(front: Sequence[Equation]) -> Equation:
    known = [e for e in front if not math.isnan(e.predictive_length)]
    if not known:
        return SELECTIONS["description_length"](front)
    null = next((equation for equation in known if equation.is_linear_regression), None)
    if null is not None:
        # Chosen before the linear regression is what has a predictive length that is less by two
        # nats, or predicts better both in the cross-validation, where its structure does not count,
        # and on the rows that no fit has seen. Of few rows that is chance, if it has a pole.
        least = null.predictive_length - _ALIKE
        error = null.predictive_length - null.structure_length
        known = [
            each
            for each in known
            if each.predictive_length < least
            or (
                each.predictive_length - each.structure_length < error
                and each.r2_held_out > null.r2_held_out
                and each.surprise == 0.0
            )
        ] or [null]
    least = min(equation.predictive_length for equation in known)
    near = [e for e in known if not e.predictive_length > least + _ALIKE]
    return min(near, key=lambda equation: (equation.surprise > 0.0, equation.choice_length))


#: Names of criteria.
ModelSelection: TypeAlias = Literal[
    "prediction", "description_length", "evidence", "best", "score", "accuracy"
]
#: Criteria that choose an equation of a front.
SELECTIONS: Final[dict[str, Callable[[Sequence[Equation]], Equation]]] = {
    "best": _best,
    # The last of several: where losses overflow or vanish, the more complex are the more accurate.
    "accuracy": lambda front: min(reversed(front), key=lambda equation: equation.loss),
    "score": lambda front: max(front, key=lambda equation: equation.score),
    "description_length": lambda front: min(front, key=lambda e: e.choice_length),
    # Where none is known, the description length decides.
    "evidence": lambda front: max(
        front,
        key=lambda e: (False, -e.choice_length) if math.isnan(e.evidence) else (True, e.evidence),
    ),
    "prediction": _by_prediction,
}


def check_selection(name: str) -> None:
    """Raise InvalidArgumentError for a criterion that is not known."""
    if name not in SELECTIONS:
        raise InvalidArgumentError(
            f"model_selection is {name!r}",
            "BAD_SETTING",
            did_you_mean(name, SELECTIONS, f"Choose from {', '.join(SELECTIONS)}"),
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
        return max(range(len(front)), key=lambda place: front[place].r2_held_out)
    return list(front).index(SELECTIONS[name](eligible))


def reason_against(favourite: Equation, chosen: Equation, rows: int, *, is_few: bool) -> str:
    """Return why a criterion's favourite is not supported, and what was chosen, for a warning.

    Args:
        favourite: the equation that the criterion prefers.
        chosen: the one that was chosen in its place.
        rows: number of rows.
        is_few: whether they are too few to hold some out.
    """
    is_same = chosen.equation == favourite.equation
    instead = "It is chosen all the same, because no other one is supported better"
    if not is_same:
        instead = f"{chosen.equation[:200]} is chosen"
    if is_few:
        return (
            f"has {favourite.complexity} tokens, which {rows} rows do not pay for: a search finds "
            f"one as good by chance. {instead}. Give more rows, or a smaller max_size"
        )
    robust = "a loss such as 'mae' or 'huber' is less disturbed by them"
    if favourite.r2_held_out < 0.0:
        if not is_same:
            instead += f", which has {chosen.r2_held_out:.3g}"
        return (
            f"has an R2 of {favourite.r2_held_out:.3g} on the rows held out. {instead}. "
            f"The data may hold little but noise, or outliers: {robust}. "
            "held_out=0 chooses without such rows"
        )
    return (
        "explains the rows with the farthest targets, and hardly anything of the others: a search "
        f"finds one as good for noise. {instead}. The rows may be outliers: {robust}"
    )


@dataclass(frozen=True)
class EquationTable:
    """The equations of a search: a sequence of `Equation` that prints as a table."""

    front: tuple[Equation, ...]
    digits: int = 4
    """Significant digits of the numbers."""
    below: str = ""
    """Text below the table."""
    chosen: int | None = None
    """Row that is chosen, which the printed table marks with a star."""
    criterion: str = ""
    """The criterion that has chosen the row, as ``model_selection`` names it."""

    def __len__(self) -> int:
        """Count the equations."""
        return len(self.front)

    def __getitem__(self, index: Any) -> Any:
        """Return one equation, or a tuple of them for a slice."""
        if isinstance(index, str | list | tuple):
            raise InvalidArgumentError(
                f"equations_ has no columns: {index!r}"[:200],
                "BAD_INDEX",
                f"Write equations_.to_pandas()[{index!r}], or [e.loss for e in equations_]",
                "index",
            )
        return self.front[index]

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError, for what a DataFrame has with the remedy."""
        message = f"{type(self).__name__!r} object has no attribute {name!r}"
        if not name.startswith("_"):
            known = [one for one in dir(type(self)) if not one.startswith("_")]
            usual = (
                f"It is a sequence of Equation, such as equations_[0]; equations_.to_pandas() is "
                f"a DataFrame: equations_.to_pandas().{name}"
            )
            message += f". {did_you_mean(name, known, usual)}"
        raise AttributeError(message)

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame with a column for each field; one of them is LaTeX.

        Functions and parameters of a template have columns of their own.

        Raises:
            InvalidArgumentError: if pandas is not installed.

        """
        require("pandas", "pandas", "equations_")
        import pandas

        names = [*COLUMNS, "latex"]
        columns = {name: [getattr(e, name) for e in self.front] for name in names}
        own = list(dict.fromkeys(name for e in self.front for name in e.subformulas))
        parts = {name: [e.subformulas.get(name, "") for e in self.front] for name in own}
        return pandas.DataFrame({**parts, **columns})

    def to_csv(self, path: str | Path | None = None) -> str:
        """Return the table as CSV, numbers with all digits; what is not known is empty.

        Args:
            path: file to which it is written, too.

        """
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(COLUMNS)
        for equation in self.front:
            values = [getattr(equation, name) for name in COLUMNS]
            known = ["" if isinstance(v, float) and math.isnan(v) else v for v in values]
            rows.writerow(known)
        if path is not None:
            Path(path).write_text(text.getvalue(), "utf-8", newline="")
        return text.getvalue()

    def latex_table(
        self,
        indices: Sequence[int] | None = None,
        precision: int | None = None,
        columns: Sequence[str] | None = None,
    ) -> str:
        """Return the table as LaTeX; it needs the package booktabs.

        Args:
            indices: rows, by default all.
            precision: significant digits of the numbers beside the formulas, by default `digits`.
            columns: keys of `COLUMNS` such as "loss", by default those of the printed table; the
                formulas are always there.

        Raises:
            InvalidArgumentError: for a column that there is not.

        """
        for name in {*(columns or ())} - {*COLUMNS}:
            known = did_you_mean(name, COLUMNS, f"Choose from {', '.join(COLUMNS)}")
            raise InvalidArgumentError(
                f"there is no column {name!r}", "BAD_INDEX", known, "columns"
            )
        front = self.front if indices is None else tuple(self.front[place] for place in indices)
        table = replace(self, front=front, digits=precision or self.digits)
        header, *rows = table._cells([f"${equation.latex}$" for equation in front], columns)
        lines = [
            rf"\begin{{tabular}}{{{'r' * (len(header) - 1)}l}}",
            r"\toprule",
            *(" & ".join(row) + r" \\" for row in [header]),
            r"\midrule",
            *(" & ".join(row) + r" \\" for row in rows),
            r"\bottomrule",
            r"\end{tabular}",
        ]
        return "\n".join(lines)

    def __str__(self) -> str:
        """Return the table as columns that fit a terminal: long formulas take several lines.

        A star marks the chosen row, and a question mark those that the rows do not support, which
        are chosen only where there are no others.
        """
        (header, *rows), note = self._marked([equation.equation for equation in self.front])
        widths = [max(len(row[place]) for row in [header, *rows]) for place in range(len(header))]
        before = sum(widths[:-1]) + 2 * (len(header) - 1)
        width = max(_LEAST_WIDTH, shutil.get_terminal_size().columns - before)
        lines = []
        for row in [header, *rows]:
            numbers = [cell.rjust(size) for cell, size in zip(row, widths[:-1], strict=False)]
            formula = textwrap.wrap(row[-1], width, break_on_hyphens=False) or [""]
            lines.append("  ".join([*numbers, formula[0]]))
            lines += [" " * before + line for line in formula[1:]]
        notes = [text for text in (note, self.below) if text]
        return "\n".join([*lines, *(["", *notes] if notes else [])])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        (header, *rows), note = self._marked([f"${equation.latex}$" for equation in self.front])
        return TextTable(tuple(header), [tuple(row) for row in rows], note=note).html()

    def _marked(self, formulas: Sequence[str]) -> tuple[list[list[str]], str]:
        """Return header and rows, with the marks of rows before them, and what these mean."""
        cells = self._cells(formulas)
        if self.chosen is None:
            return cells, ""
        marks = ["", *("" if each.is_supported else "?" for each in self.front)]
        marks[self.chosen + 1] = "*"
        note = f"* chosen by {self.criterion!r}" + ", ? not supported by the rows" * ("?" in marks)
        return [[mark, *row] for mark, row in zip(marks, cells, strict=True)], note

    def _cells(
        self, formulas: Sequence[str], columns: Sequence[str] | None = None
    ) -> list[list[str]]:
        """Return header and rows as text; what nothing is known of has no column.

        Neither has the length by which one chooses, where it is the description length.
        """

        def is_shown(name: str) -> bool:
            values = [getattr(equation, name) for equation in self.front]
            if name == "choice_length":
                return values != [equation.description_length for equation in self.front]
            return not all(map(math.isnan, values))

        known = [name for name in list(COLUMNS)[:-1] if is_shown(name)]
        known = known if columns is None else [name for name in columns if name != "equation"]

        def cell(name: str, value: float) -> str:
            # Numbers of about 1 have as many digits behind the point as others have in all.
            is_part = name in ("r2", "r2_held_out") and abs(value) < 10.0
            return f"{value:.{self.digits}{'f' if is_part else 'g'}}"

        rows = [
            [*(cell(name, getattr(equation, name)) for name in known), formula]
            for equation, formula in zip(self.front, formulas, strict=True)
        ]
        return [[*(COLUMNS[name] for name in known), COLUMNS["equation"]], *rows]


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
    # Losses may be negative; what is above the least possible is not.
    losses = [max(equation.excess, 1e-300) for equation in front]
    ax.step(steps, losses, where="post", marker="o")
    ax.plot([chosen.complexity], [max(chosen.excess, 1e-300)], "s")
    least = min(equation.loss - equation.excess for equation in front)
    label = f"loss above {least:.4g}" if abs(least) > 0.0 else "loss"
    ax.set(xlabel="complexity", ylabel=label, yscale="log")
    # Above the axes a formula covers no points; dollars would enclose one of matplotlib's own.
    text = chosen.equation.replace("$", r"\$")
    ax.set_title("\n".join(textwrap.wrap(text, _TITLE)), fontsize="small")
    return ax


def plot_fit(target: np.ndarray[Any, Any], predicted: np.ndarray[Any, Any], ax: Any) -> Any:
    """Draw predictions over the target, with the diagonal; return the axes."""
    ax = axes_or_new(ax)
    ends = [float(np.min(target)), float(np.max(target))]
    ax.plot(target, predicted, ".", alpha=0.5)
    ax.plot(ends, ends, "-")
    ax.set(xlabel="target", ylabel="prediction")
    return ax
