"""`propose`: skeletons of formulas in, and for each an answer that a person or an agent can act on.

A skeleton is a formula whose constants are parameters p1, p2, .... Whoever invents them, a language
model or a grammar, makes mistakes: unknown names, units that do not fit, more parameters than rows.
Each skeleton gets its own answer, and none spoils those of the others.

`simplify` on a server is told at the end: its keywords, the batches of a call, and its result.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, Protocol, TypedDict

import numpy as np
from numpy.typing import NDArray

from warpfit.calls.arguments import (
    CommonOptions,
    FitOptions,
    Parameters,
    PopulationCache,
    build_batch,
    build_fit,
    common,
    deadline_of,
    is_single,
    number,
)
from warpfit.calls.dataset_handle import DatasetHandle, checked_handle
from warpfit.calls.results import Fit
from warpfit.dataset.canonical import ranges
from warpfit.display import ShownFormulas, TextTable, shortened
from warpfit.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    ProgramError,
    ResourceExhaustedError,
    UnavailableError,
    WarpfitError,
    bad_setting,
    no_attribute,
)
from warpfit.evidence import Floats, Term, description_lengths
from warpfit.expressions.language import DIGITS, to_latex, to_text
from warpfit.expressions.real_numbers import unwrapped
from warpfit.expressions.reference import evaluate_program
from warpfit.formulas.snapping import SnapSettings, Trials, finite_median, snap
from warpfit.formulas.units import check_units, dimension, dimensions
from warpfit.frontends import as_program
from warpfit.ir import Program
from warpfit.losses import Closing, Loss, LossFunction, as_function, as_loss
from warpfit.ops import PARAMETER, VARIABLE
from warpfit.parse import place_in
from warpfit.request import FitProgress, Missing, Precision, Reason, Tier
from warpfit.transport.call import CallingBack, Progress, silent

if TYPE_CHECKING:
    from warpfit.calls.results import Answer, Fit
    from warpfit.server_info import ServerInfo


#: Most skeletons of a call, characters of one, and parameters, of which servers take no more.
MOST_SKELETONS: Final = 10_000
_MOST_CHARACTERS: Final = 10_000
_MOST_PARAMETERS: Final = 500
#: Skeletons that are fitted by one call of `optimize`; progress is told between them, too.
_TOGETHER: Final = 256
#: Part of the time that is left which a fit may take; the rest is for judging what it finds.
_FITTED_TIME: Final = 0.8
#: Most skeletons that a client remembers.
_MOST_REMEMBERED: Final = 100_000


class Calling(Protocol):
    """The calls that proposals are made of; `warpfit.Client` has their arguments."""

    @property
    def info(self) -> Callable[..., ServerInfo]:
        """Return what the server is and allows."""

    @property
    def run(self) -> Callable[..., Answer]:
        """Evaluate programs."""

    @property
    def optimize(self) -> Callable[..., Fit]:
        """Fit programs."""


class ProposeOptions(TypedDict, total=False):
    """Keywords of `propose`."""

    loss: Loss | LossFunction | str
    """The loss to minimise, as in `optimize`; "mse" by default. Evidence is for losses of squared
    differences, and for data that were uploaded here, alone."""
    restarts: int
    """Starts that the server draws for each skeleton, beside ones; 8 by default."""
    seed: int
    """Seed of the drawn starts; 0 by default."""
    held_out: float
    """Part of the rows that no fit sees; 0.2 by default. They are the last ones, so shuffle rows
    whose order has a meaning before the upload."""
    missing: Missing | Literal["refuse", "drop"]
    """Treatment of rows in which a formula is not finite; see `Missing`."""
    units: Mapping[str, Any] | Sequence[Any] | None
    """Unit of each variable, as for `warpfit.sklearn.SymbolicRegressor`; None checks none."""
    target_unit: Any
    """Unit that formulas must have, such as "m/s"; None (default) for any."""
    precision: Precision | Literal["precise", "fast"]
    tier: Tier | Literal["auto", "interpreter", "compiled"]
    timeout: float | None
    """Seconds for all calls together, or None; answers that are there by then are kept."""
    progress: Callable[[int, int], None] | None
    """Called with the number of skeletons that have an answer, and of all."""


@dataclass(slots=True, eq=False)
class Proposal:
    """The answer to one skeleton. Without an error it was fitted; numbers may still be NaN."""

    skeleton: str
    """The skeleton as text."""
    error: WarpfitError | None = None
    """Why it was not fitted: its place and remedy are in ``str(error)``."""
    tried: int = 0
    """How often this client has fitted a skeleton of the same form to these data before."""
    warnings: tuple[str, ...] = ()
    """Warnings about the result, such as parameters that the data do not determine."""
    program: Program | None = None
    """The formula with its fitted constants."""
    names: tuple[str, ...] = ()
    """Names of the variables, or empty."""
    expression: str = ""
    """The formula as text, with six digits of each constant; ``program`` has all."""
    parameters: tuple[float, ...] = ()
    """Fitted p1, p2, ...."""
    standard_errors: tuple[float, ...] = ()
    """Standard errors of the parameters; NaN where the data do not determine one."""
    loss: float = math.nan
    """Loss on the rows that were fitted; NaN if the formula is not finite in them."""
    held_out_loss: float = math.nan
    """Loss on the rows held out; NaN if there are none, or if the formula was not fitted or has no
    value there."""
    r2: float = math.nan
    """Coefficient of determination on the rows that were fitted, for losses of squares."""
    held_out_r2: float = math.nan
    """The same on the rows held out."""
    converged: bool = False
    reason: str = ""
    """Why the best search ended, see `warpfit.Reason`."""
    log_likelihood: float = math.nan
    """This and the next ones are those of `warpfit.evidence.Evidence` on the rows that were
    fitted, but for ``description_length``."""
    aic: float = math.nan
    bic: float = math.nan
    description_length: float = math.nan
    """Length of a description of all rows, those held out included, see
    `warpfit.evidence.description_length`: the same number as that of a search's equation. NaN where
    the formula has no value in one of them."""
    bayes_factor: float = math.nan
    """Natural logarithm of the fractional Bayes factor, which may be negative."""
    terms: tuple[Term, ...] = ()
    """Terms of a formula that is a sum."""

    @property
    def simplified(self) -> str:
        """The formula as text after the exact rules of `warpfit.Program.simplify`, or empty."""
        if self.program is None:
            return ""
        with suppress(ResourceExhaustedError):  # it has too many tokens for the rules
            return to_text(self.program.simplify(), self.names, DIGITS)
        return self.expression

    def as_dict(self, digits: int | None = None) -> dict[str, Any]:
        """Return what is known as JSON has it: without what is empty, and None for NaN.

        With ``digits`` numbers have so many significant digits at most.
        """
        if self.error is not None:
            placed = getattr(self.error, "position", None)
            about = {"reason": self.error.reason, "message": str(self.error), "position": placed}
            known = {name: value for name, value in about.items() if value is not None}
            return {"skeleton": self.skeleton, "error": known, "tried": self.tried}
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        del found["program"], found["names"], found["error"]
        found["simplified"] = self.simplified
        told = ("text", "loss", "contribution")
        found["terms"] = [{name: getattr(term, name) for name in told} for term in self.terms]
        kept = {
            name: value
            for name, value in found.items()
            if value not in ((), [], "") and (value == value or name == "loss")
        }
        return for_json(kept, digits)


def for_json(record: Mapping[str, Any], digits: int | None = None) -> dict[str, Any]:
    """Return a record as JSON can say it: with lists, and None for numbers that are not finite.

    With ``digits`` numbers have so many significant digits at most.
    """

    def said(value: Any) -> Any:
        if isinstance(value, Mapping):
            return for_json(value, digits)
        if isinstance(value, np.generic | np.ndarray):
            value = value.tolist()
        if isinstance(value, list | tuple):
            return [said(each) for each in value]
        if isinstance(value, float):
            if not math.isfinite(value):
                return None
            return float(f"{value:.{digits}g}") if digits else value
        return value

    return {name: said(value) for name, value in record.items()}


#: What to use instead of attributes of a list of answers.
_OF_PROPOSALS: Final = {
    **dict.fromkeys(("errors", "error"), "[answer.error for answer in found]"),
    **dict.fromkeys(("losses", "loss"), "[answer.loss for answer in found]"),
    **dict.fromkeys(("front", "equations", "sorted"), "ranked()"),
    "to_pandas": "pandas.DataFrame([answer.as_dict() for answer in found])",
}


class Proposals(tuple[Proposal, ...]):
    """The answers to the skeletons of a call, in their order; they print as a small table."""

    is_score: bool
    """Whether a greater loss is better, as of "r2"."""

    if not TYPE_CHECKING:  # checkers are to refuse attributes that there are not

        def __getattr__(self, name: str) -> NoReturn:
            """Raise AttributeError with what is meant."""
            raise no_attribute(type(self).__name__, name, dir(type(self)), _OF_PROPOSALS)

    def __new__(cls, answers: Iterable[Proposal], is_score: bool = False) -> Proposals:
        found = super().__new__(cls, answers)
        found.is_score = is_score
        return found

    @property
    def best(self) -> Proposal | None:
        """The answer with the best loss on the rows held out, or on all if none are; else None."""
        first = next(iter(self.ranked()), None)
        return None if first is None or math.isnan(first.loss) else first

    def ranked(self) -> list[Proposal]:
        """Return the answers, best first: by the loss on the rows held out, or on all if none are.

        Those without a finite loss follow, and those with an error are the last ones.
        """
        sign = -1.0 if self.is_score else 1.0
        is_judged = any(math.isfinite(answer.held_out_loss) for answer in self)

        def key(answer: Proposal) -> tuple[bool, bool, float]:
            loss = sign * (answer.held_out_loss if is_judged else answer.loss)
            is_known = math.isfinite(loss)
            return answer.error is not None, not is_known, loss if is_known else 0.0

        return sorted(self, key=key)

    def __repr__(self) -> str:
        """Return the table, too: hundreds of answers in full would be too much to read."""
        return str(self)

    def __str__(self) -> str:
        """Return a small table with a row for each skeleton, best first."""
        rows = []
        for answer in self.ranked():
            shown = shortened(answer.expression or answer.skeleton)
            first = (
                str(answer.error).splitlines()[0] if answer.error else "; ".join(answer.warnings)
            )
            numbers = (answer.loss, answer.held_out_loss, answer.description_length)
            rows.append((shown, *(f"{value:.5g}" for value in numbers), shortened(first, 100)))
        header = ("formula", "loss", "held-out loss", "description length", "remarks")
        return TextTable(header, rows).text()


class TriedSkeletons:
    """Counts the skeletons that a client has proposed for each data set; threads may share it."""

    def __init__(self) -> None:
        self._counts: OrderedDict[bytes, int] = OrderedDict()
        self._lock = Lock()

    def add(self, content_id: bytes, program: Program) -> int:
        """Count a skeleton for a data set; return how often it was counted before.

        Skeletons are one if the exact rules make the same of them, whatever the numbers of their
        parameters are.
        """
        try:
            form = _renumbered(_renumbered(program).simplify())
        except ResourceExhaustedError:  # it has too many tokens for the rules
            form = _renumbered(program)
        key = hashlib.blake2b(content_id, digest_size=16)
        key.update(form.codes.tobytes() + form.values.tobytes())
        with self._lock:
            count = self._counts.pop(key.digest(), 0)
            self._counts[key.digest()] = count + 1
            if len(self._counts) > _MOST_REMEMBERED:
                self._counts.popitem(last=False)
        return count


def _renumbered(program: Program) -> Program:
    """Number the parameters in the order in which they occur."""
    is_parameter = program.codes == PARAMETER
    if not is_parameter.any():
        return program
    used = program.values[is_parameter]
    order = {value: float(place) for place, value in enumerate(dict.fromkeys(used.tolist()))}
    values = program.values.copy()
    values[is_parameter] = [order[value] for value in used.tolist()]
    return Program._unchecked(program.codes, values)


#: An answer that is not finished, and the program of its skeleton.
_Candidate = tuple[Proposal, Program]
#: Keywords that fits of skeletons have, too.
_OF_FITS: Final = ("loss", "restarts", "seed", "missing", "precision", "tier")
#: Criteria of the evidence that an answer has.
_CRITERIA: Final = ("log_likelihood", "aic", "bic", "description_length", "bayes_factor")
#: Errors that one program of a batch may cause.
_OF_ONE: Final = (ProgramError, ResourceExhaustedError, FailedPreconditionError, InternalError)
#: Errors that end a call of `propose`; answers that are there by then are kept.
_OF_SERVER: Final = (DeadlineExceededError, UnavailableError, ResourceExhaustedError)
#: Behind "the target", where not even a constant has a loss.
_NO_TARGET: Final = "holds NaN, infinity or numbers whose squares overflow, or no row has a weight"


class ProposeTask:
    """One call of `propose`: checks first, then the calls of a client, then the answers."""

    def __init__(self, client: Calling, data: DatasetHandle, options: ProposeOptions) -> None:
        """Check the arguments; errors as of `warpfit.Client.propose`."""
        self._client, self._data, self._options = client, checked_handle(data), options
        self._deadline = deadline_of(options.get("timeout"))
        given = {name: value for name, value in options.items() if name in _OF_FITS}
        fits: Any = {"restarts": 8, **given}
        self._fits = fits
        request = build_fit(data, Program.constant(0.0), None, fits)
        self._settings, self._loss = request.settings, request.loss
        wanted = "a part of the rows, from 0 to below 1"
        part = number(options.get("held_out", 0.2), "held_out", wanted)
        if not 0.0 <= part < 1.0:
            raise bad_setting("held_out", part, wanted)
        report = options.get("progress")
        if not (report is None or callable(report)):
            raise bad_setting("progress", report, "a function of two numbers, or None")
        layout, self._names = data.layout, data.names
        first = max(1, layout.rows - int(part * layout.rows))
        self._fitted_rows, self._held_out_rows = (0, first), (first, layout.rows)
        units, target_unit = options.get("units"), options.get("target_unit")
        self._has_units = units is not None or target_unit is not None
        self._dimensions = dimensions(units or {}, self._names, layout.variables)
        self._target_dimension = None if target_unit is None else dimension(target_unit)

    def run(self, skeletons: Any, tried: TriedSkeletons) -> Proposals:
        """Return the answers to skeletons; see `warpfit.Client.propose`."""
        if isinstance(skeletons, Mapping | Set):
            raise bad_setting("skeletons", type(skeletons).__name__, "a list of skeletons")
        limits = self._client.info(self._remaining()).limits
        if self._settings.restarts >= limits.vectors:
            most = f"at most {limits.vectors - 1}, of which the server takes no more"
            raise bad_setting("restarts", self._settings.restarts, most)
        answers: list[Proposal] = []
        ready: list[_Candidate] = []
        skeletons = unwrapped(skeletons)
        self._tried = tried
        for skeleton in [skeletons] if is_single(skeletons) else skeletons:
            text = skeleton if isinstance(skeleton, str) else type(skeleton).__name__
            answers.append(answer := Proposal(shortened(text, 200)))
            try:
                if len(answers) > MOST_SKELETONS:
                    raise ResourceExhaustedError(
                        f"a call takes {MOST_SKELETONS} skeletons",
                        "TOO_MANY_PROGRAMS",
                        "Propose the rest in another call",
                        "skeletons",
                    )
                program = self._checked(skeleton, limits.program_tokens)
            except WarpfitError as error:
                error.expression = None  # the answer has a place of its own
                answer.error = error
                continue
            is_text = isinstance(skeleton, str)
            answer.skeleton = skeleton if is_text else to_text(program, self._names)
            ready.append((answer, program))
        if ready and not self._look_at_data(ready):
            ready = []
        with CallingBack(self._options.get("progress") or silent) as report:
            # Until the time or the server is over.
            total = len(answers)
            for start in range(0, len(ready), _TOGETHER):
                done = total - len(ready) + start
                report(done, total)
                try:
                    self._fit(ready[start : start + _TOGETHER], done, total, report)
                except _OF_SERVER as error:
                    if all(answer.program is None for answer in answers):
                        raise
                    for answer, _ in ready[start:]:
                        if answer.program is None:
                            answer.error = answer.error or error
                    break
            report(total, total)
        return Proposals(answers, self._loss.is_score)

    def _remaining(self) -> float | None:
        remaining = self._deadline.remaining()
        return None if remaining is None else max(1e-3, remaining)

    def _ask(self, programs: list[Program], parameters: Any = None, **asked: Any) -> Answer:
        """Evaluate programs, as `warpfit.Client.run` does, in the time that is left."""
        kept = {name: v for name, v in self._fits.items() if name in ("precision", "tier")}
        asked |= {"timeout": self._remaining(), **kept}
        return self._client.run(self._data, programs, parameters, **asked)

    def _checked(self, skeleton: Any, most_tokens: int) -> Program:
        """Return the program of a skeleton; raise WarpfitError if it cannot be fitted."""

        def too_long(has: str, taken: str) -> ResourceExhaustedError:
            what = f"the skeleton has {has}, and {taken}"
            return ResourceExhaustedError(what, "TOO_MANY_TOKENS", "Propose shorter formulas")

        if isinstance(skeleton, str) and len(skeleton) > _MOST_CHARACTERS:
            raise too_long(f"{len(skeleton)} characters", f"at most {_MOST_CHARACTERS} are read")
        program = as_program(skeleton, self._names)
        if len(program) > most_tokens:
            raise too_long(f"{len(program)} tokens", f"the server takes {most_tokens}")
        rows, variables = self._fitted_rows[1], self._data.layout.variables
        most = min(rows, _MOST_PARAMETERS)
        if program.parameters > most:
            raise InvalidArgumentError(
                f"the skeleton has a parameter p{program.parameters}, and at most {most} can be "
                f"fitted to {rows} row{'s' if rows > 1 else ''}",
                "TOO_MANY_PARAMETERS",
                "Number the parameters p1, p2, ... without gaps, and use fewer than there are rows",
            )
        if program.variables > variables:
            raise ProgramError(
                f"the skeleton uses x{program.variables}, and the data have {variables} variables",
                "VARIABLE_OUT_OF_RANGE",
                f"Use {', '.join(self._names) or f'x1 to x{variables}'}"[:200],
            )
        if self._has_units:
            try:
                check_units(program, self._dimensions, self._target_dimension, self._names)
            except ProgramError as error:
                if isinstance(skeleton, str) and error.position is not None:
                    placed = place_in(skeleton, error.text, error.position)
                    error.text, error.position = placed
                raise
        return program

    def _look_at_data(self, candidates: list[_Candidate]) -> bool:
        """Warn about unusable targets and constant columns.

        Returns:
            Whether squares of the target have a mean over the rows that are fitted.
        """
        columns = [frozenset(p.values[p.codes == VARIABLE].astype(int)) for _, p in candidates]
        used = sorted(frozenset().union(*columns))
        zero, asked = Program.constant(0.0), {"loss": Loss.MSE, "reductions": True}
        variables = [Program.variable(int(index)) for index in used]
        found = self._ask([zero, *variables], rows=self._fitted_rows, **asked)
        assert found.losses is not None and found.reductions is not None
        if not math.isfinite(found.losses[0]):
            for answer, _ in candidates:
                answer.error = InvalidArgumentError(
                    f"the target {_NO_TARGET}",
                    "NOT_FINITE",
                    "Leave such rows out, give them weight 0, or choose other units",
                    "data",
                )
            return False
        general: tuple[str, ...] = ()
        self._is_judged = self._held_out_rows[0] < self._held_out_rows[1]
        if self._is_judged:
            judged = self._ask([zero], rows=self._held_out_rows, loss=Loss.MSE).losses
            self._is_judged = judged is not None and math.isfinite(judged[0])
            if not self._is_judged:
                general = (f"the rows held out judge nothing: their target {_NO_TARGET}",)
        shape, notes = found.reductions, {}
        for place, (index, variable) in enumerate(zip(used, variables, strict=True), 1):
            name, odd = to_text(variable, self._names), shape.non_finite[place]
            if odd:
                notes[index] = f"{name} is not finite in {odd} row{'s' if odd > 1 else ''}"
            elif shape.min[place] == shape.max[place]:
                notes[index] = f"{name} is constant, so that nothing can be learnt about it"
            if re.fullmatch(r"p[1-9]\d*", name):
                shadow = f"{name} is a variable here, no parameter: number parameters differently"
                notes[index] = "; ".join([shadow, *([notes[index]] if index in notes else [])])
        for (answer, _), own in zip(candidates, columns, strict=True):
            answer.warnings += general
            answer.warnings += tuple(notes[index] for index in sorted(own) if index in notes)
        return True

    def _fit(self, candidates: list[_Candidate], done: int, total: int, report: Progress) -> None:
        """Fit skeletons together; one that a server refuses is answered by that, without others."""
        is_told = self._options.get("progress") is not None
        pending, ended = [candidates], 0
        while pending:
            part = pending.pop()

            def tell(progress: FitProgress, begun: int = ended, own: int = len(part)) -> None:
                share = 1.0 - progress.active / progress.searches
                report(done + begun + int(0.9 * share * own), total)

            try:
                remaining = self._remaining()
                fit = self._client.optimize(
                    self._data,
                    [program for _, program in part],
                    rows=self._fitted_rows,
                    progress=tell if is_told else None,
                    partial=True,
                    timeout=None if remaining is None else _FITTED_TIME * remaining,
                    **self._fits,
                )
                self._answer(part, fit)
            except _OF_ONE as error:
                if error.retry_after is not None:
                    raise
                if len(part) > 1:
                    pending += [part[len(part) // 2 :], part[: len(part) // 2]]
                    continue
                error.expression = None
                part[0][0].error = error
            ended += len(part)

    def _answer(self, candidates: list[_Candidate], fit: Fit) -> None:
        """Fill in the answers to skeletons of one fit.

        They are kept where the time or the server ends before they are judged.
        """
        programs, unknown = [program for _, program in candidates], np.full(len(candidates), np.nan)
        judged: Fit | None = None
        late: WarpfitError | None = None
        lengths: Floats = unknown
        asked: dict[str, Any]
        # Rows of those fitted and those held out, [2, programs].
        left_out = np.zeros((2, len(candidates)), dtype=np.int64)
        try:
            if self._loss.is_squares and self._data.has_numbers:
                asked = {"evidence": True, "terms": True}
                fit = self._fit_again(programs, fit, self._fitted_rows, **asked)
            counts, parts = left_out.copy(), (self._fitted_rows, self._held_out_rows)
            for place, rows in enumerate(parts if self._settings.missing is Missing.DROP else ()):
                if rows[0] < rows[1]:
                    asked = {"reductions": True, "rows": rows}
                    shape = self._ask(programs, fit.parameters, **asked).reductions
                    assert shape is not None
                    counts[place] = shape.non_finite
            left_out = counts
            if self._is_judged:  # by a fit that moves nothing, which treats rows as the first does
                asked = {"fixed": True, "standard_errors": False}
                judged = self._fit_again(programs, fit, self._held_out_rows, **asked)
            if fit.evidence is not None and self._is_judged:  # those of all rows
                squares = self._ask(list(fit.batch), fit.parameters, loss=Loss.SSE).losses
                assert squares is not None
                formulas = [fit.formula(i) for i in range(len(squares))]
                found = description_lengths(formulas, squares, self._data.statistics())
                lengths = np.where(np.isinf(fit.evidence.description_length), np.inf, found)
            elif fit.evidence is not None:
                lengths = fit.evidence.description_length
        except (DeadlineExceededError, UnavailableError) as error:
            late = error
        out = unknown if judged is None else judged.loss
        r2 = unknown if fit.r2 is None else fit.r2
        out_r2 = unknown if judged is None or judged.r2 is None else judged.r2
        layout, is_judged = self._data.layout, judged is not None
        # Where a formula has no finite row at all, a loss would be that of the penalty alone.
        is_fitted = np.isfinite(fit.loss) & (left_out[0] < self._fitted_rows[1])
        first, stop = self._held_out_rows
        is_known = np.isfinite(out) & (left_out[1] < max(1, stop - first))
        for i, (answer, program) in enumerate(candidates):
            answer.tried = self._tried.add(self._data.content_id, program)
            answer.program, answer.names = fit.formula(i), self._names
            answer.expression = to_text(answer.program, self._names, DIGITS)
            answer.parameters = tuple(fit.parameters[i].tolist())
            answer.converged, answer.reason = fit.reason[i].converged, str(fit.reason[i])
            odd = int(left_out[:, i].sum())
            if odd:
                verb = "is" if odd == 1 else "are"
                answer.warnings += (f"{odd} of {layout.rows} rows {verb} left out: the formula is "
                                    "NaN or infinite there",)  # fmt: skip
            elif is_judged and not is_known[i]:
                answer.warnings += ("the formula is NaN or infinite in rows that are held out",)
            if late is not None:
                answer.warnings += (f"fitted, but not judged: {late}",)
            if not is_fitted[i]:
                which, remedy = "rows", ', or leave such rows out with missing="drop"'
                if self._settings.missing is Missing.DROP:
                    which, remedy = "all rows", ""
                answer.warnings += (f"the formula is NaN or infinite in {which} that are fitted, "
                                    "from every start: bound its arguments, as in sqrt(abs(x))"
                                    f"{remedy}",)  # fmt: skip
                continue
            answer.loss, answer.r2 = float(fit.loss[i]), float(r2[i])
            if is_known[i]:
                answer.held_out_loss, answer.held_out_r2 = float(out[i]), float(out_r2[i])
            if fit.reason[i] is Reason.NOT_FINITE:
                answer.warnings += (
                    "no search could begin: squares of the target or of derivatives are 0 or "
                    "infinite; choose other units",
                )
            if (known := fit.evidence) is not None:
                answer.warnings += tuple(known.warnings[i])
                answer.standard_errors = tuple(known.standard_errors[i].tolist())
                answer.terms = tuple(known.terms[i] if known.terms else ())
                for name in _CRITERIA:
                    setattr(answer, name, float(getattr(known, name)[i]))
                answer.description_length = float(lengths[i])

        if late is not None:
            raise late

    def _fit_again(
        self, programs: list[Program], fit: Fit, rows: tuple[int, int], **asked: Any
    ) -> Fit:
        """Return a fit that begins where one has ended."""
        asked |= {"rows": rows, "timeout": self._remaining(), **self._fits, "restarts": 0}
        return self._client.optimize(self._data, programs, fit.parameters, **asked)


# ----------------------------------------------------------------------------------------- simplify

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
class Simplification(ShownFormulas):
    """Result of `simplify`; it prints as a small table."""

    programs: list[Program]
    """The formulas, with numbers and without parameters."""
    loss: NDArray[np.float64]
    """Loss of each, as the server has measured it, [expressions]."""
    initial_loss: NDArray[np.float64]
    """Loss of each formula that was given, with its constants fitted, [expressions]."""
    names: tuple[str, ...] = ()
    """Names of the variables, or empty."""

    def _table(self, latex: bool = False) -> TextTable:
        rows = []
        each = zip(self.programs, self.initial_loss, self.loss, strict=True)
        for program, before, after in each:
            text = f"${to_latex(program, self.names)}$" if latex else to_text(program, self.names)
            rows.append((text, str(len(program)), f"{before:.6g}", f"{after:.6g}"))
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
