"""`simplify` on a server: keywords, the batches of a call, and its result."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from warpfit.calls.arguments import (
    CommonOptions,
    FitOptions,
    Parameters,
    PopulationCache,
    build_batch,
    common,
    deadline_of,
    number,
)
from warpfit.calls.dataset_handle import DatasetHandle
from warpfit.calls.results import Fit
from warpfit.dataset.canonical import ranges
from warpfit.display import Shown, TextTable
from warpfit.errors import InvalidArgumentError, bad_setting
from warpfit.expressions.language import to_latex, to_text
from warpfit.expressions.reference import evaluate_program
from warpfit.formulas.snapping import SnapSettings, Trials, finite_median, snap
from warpfit.ir import Program
from warpfit.losses import Closing, Loss, LossFunction, as_function, as_loss

#: Default of ``tolerance``.
_TOLERANCE: Final = 0.01
#: Rows of the data from which medians of subexpressions are computed here.
_SAMPLE: Final = 512
#: Rounding errors of a value, in units of the data's last place.
_ROUNDING: Final = 64.0
#: Iterations of the fit of each candidate; it starts where the last one ended.
_ITERATIONS: Final = 30


class SimplifyOptions(CommonOptions, total=False):
    """Keywords of `simplify`."""

    tolerance: float
    """Part of its loss by which a formula may become worse; 0.01 by default."""
    loss: Loss | LossFunction | str
    """The loss that is compared, as in `optimize`; "mse" by default."""
    snap: Literal["constants", "numbers", False]
    """Forms that constants are rounded to where the loss allows it: ``"constants"`` (default),
    short numbers, fractions, and multiples of pi and e where no number of four digits does;
    ``"numbers"``, the same without pi and e; False, none: constants keep their fitted digits."""
    assume_defined: bool
    """Also apply rules such as x/x = 1; see `warpfit.Program.simplify`."""
    allows: Callable[[Program], bool] | None
    """A function of a `warpfit.Program` that tells whether a formula may become it, for rules of
    your own; None for any. A shorter form that it refuses is passed over; the given formula is not
    asked about.
    """


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Simplification(Shown):
    """Result of `simplify`; it prints as a small table."""

    programs: list[Program]
    """The formulas, with numbers and without parameters."""
    loss: NDArray[np.float64]
    """Loss of each, as the server has measured it, [expressions]."""
    initial_loss: NDArray[np.float64]
    """Loss of each formula that was given, with its constants fitted, [expressions]."""
    names: tuple[str, ...] = ()
    """Names of the variables, or empty."""

    def _repr_html_(self) -> str:
        shown = [f"${to_latex(program, self.names)}$" for program in self.programs]
        return self._table(shown).html()

    def _table(self, formulas: Sequence[str] | None = None) -> TextTable:
        """Return a row for each formula."""
        formulas = formulas or [to_text(program, self.names) for program in self.programs]
        rows = [
            (formula, str(len(program)), f"{before:.6g}", f"{after:.6g}")
            for formula, program, before, after in zip(
                formulas, self.programs, self.initial_loss, self.loss, strict=True
            )
        ]
        return TextTable(("formula", "tokens", "initial loss", "loss"), rows)


class SimplifyTask:
    """One call of `simplify`: what it wants to have fitted next, and how, until it has a result."""

    def __init__(
        self,
        data: DatasetHandle,
        expressions: Any,
        parameters: Parameters,
        options: SimplifyOptions,
    ) -> None:
        """Take the arguments of `warpfit.Client.simplify`; errors as there."""
        self._data, self._options = data, options
        self._deadline = deadline_of(options.get("timeout"))
        loss = as_function(as_loss(options.get("loss", Loss.MSE)))
        self._is_score = loss.is_score
        # Lower is better in a search.
        self._loss = replace(loss, closing=Closing.RELATIVE) if self._is_score else loss
        batch, _ = build_batch(expressions, parameters, data.names, PopulationCache())
        if batch.vectors > 1:
            raise InvalidArgumentError(
                f"{batch.vectors} parameter vectors for each expression",
                "BAD_PARAMETERS",
                "Give one vector for each expression",
                "parameters",
            )
        batch.check(data.layout.variables)
        programs = [
            program.bind(batch.program_parameters(index)[0]) for index, program in enumerate(batch)
        ]
        wanted = "a part of the loss, such as 0.01, or 0"
        tolerance = number(options.get("tolerance", _TOLERANCE), "tolerance", wanted)
        if not 0.0 <= tolerance < math.inf:
            raise bad_setting("tolerance", tolerance, wanted)
        kind = options.get("snap", "constants")
        if kind not in ("constants", "numbers", False):
            raise bad_setting("snap", kind, "constants, numbers or False")
        allows = options.get("allows")
        if not (allows is None or callable(allows)):
            raise bad_setting("allows", allows, "a function of a Program that returns a bool")
        layout = data.layout
        rounding = _ROUNDING * float(np.finfo(layout.dtype).eps)
        if self._loss.closing is not Closing.ROOT:
            # Prediction, target and weight; the residuals are small, and exact at these places. A
            # smooth loss grows with their squares.
            rows = np.array([[1.0, 1.0 + 2.0**-16, 1.0 + 2.0**-15], [1.0] * 3, [1.0] * 3])
            least, near, far = evaluate_program(self._loss.row, rows)
            with np.errstate(all="ignore"):
                rounding **= 2 if (far - least) / (near - least) > 3.0 else 1
        sample = data.dataset.every(max(1, layout.rows // _SAMPLE)).astype(np.float64)
        if layout.has_weights and (sample[-1] > 0.0).any():
            sample = sample[:, sample[-1] > 0.0]
        low, high = ranges(data.dataset)
        settings = SnapSettings(
            tolerance=tolerance,
            rounding=rounding,
            assume_defined=bool(options.get("assume_defined")),
            numbers=kind or "",
            sample=sample[: layout.variables],
            low=low,
            high=high,
            middle=finite_median(sample[layout.variables]) if layout.has_target else 0.0,
            allows=allows or (lambda _: True),
        )
        self._search = snap(programs, settings)

    def proceed(self, fit: Fit | None = None) -> Trials | Simplification:
        """Take the last fit, and return the programs and starts of the next one, or the result."""
        try:
            outcome = None if fit is None else (fit.loss, fit.parameters)
            return self._search.send(outcome)  # type: ignore[arg-type]  # None begins
        except StopIteration as stop:
            losses = np.array([[each.loss, each.initial_loss] for each in stop.value])
            after, before = (1.0 - losses if self._is_score else losses).T
            programs = [each.program for each in stop.value]
            return Simplification(programs, after, before, self._data.names)

    def fit_options(self) -> FitOptions:
        """Return the keywords of the next fit."""
        remaining = self._deadline.remaining()
        timeout = None if remaining is None else max(1e-3, remaining)
        own: FitOptions = {"loss": self._loss, "max_iterations": _ITERATIONS, "timeout": timeout}
        return own | common(self._options)  # type: ignore[no-any-return]
