"""`search`: its keywords, the attempts of one search at several servers or engines, its result."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, TypedDict

import numpy as np
from numpy.typing import NDArray

from warpfit import search_codec
from warpfit.calls.arguments import (
    Rows,
    is_single,
    member,
    number,
    row_range,
    whole_number,
)
from warpfit.calls.dataset_handle import DatasetHandle, checked_handle
from warpfit.display import MOST_ROWS, ShownFormulas, TextTable, shortened
from warpfit.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    WarpfitError,
    bad_setting,
    did_you_mean,
    nearest_first,
)
from warpfit.expressions.language import to_latex, to_text
from warpfit.formulas.units import exponents, exponents_of
from warpfit.frontends import as_population
from warpfit.ir import Batch, Program, subtree_starts
from warpfit.losses import Loss, LossFunction, as_loss
from warpfit.ops import ARITIES, OPERATORS, PARAMETER
from warpfit.parse import MACROS, parse
from warpfit.request import Timings
from warpfit.searching import (
    DEFAULT_OPERATORS,
    Form,
    Front,
    Rules,
    SearchProgress,
    SearchReason,
    SearchRequest,
    Template,
    Units,
    check_operators,
)
from warpfit.v1 import evaluator_pb2 as pb

_LOG: Final = logging.getLogger("warpfit")
#: Interruptions in a row, each soon after the last one, after which a search is given up: it may be
#: what the engines die of.
_MOST_INTERRUPTIONS: Final = 5
#: Seconds of a search on an engine after which an interruption counts as the first one.
_LONG_SECONDS: Final = 60.0

# ---------------------------------------------------------------------------------------- keywords


class SearchOptions(TypedDict, total=False):
    """Keywords of `search`."""

    seconds: float | None
    """Budget in seconds of the engine, its turns beside other calls included; None for no limit."""
    generations: int | None
    """Budget in generations; None for no limit."""
    formulas: int | None
    """Budget in new formulas that are scored; None for no limit."""
    target_loss: float | None
    """Loss with which the search ends."""
    idle_generations: int | None
    """Generations without progress after which the search ends; None for no limit."""
    operators: Sequence[str] | Mapping[str, float] | None
    """Names of the operators that formulas are made of, or a mapping to the weight by which each is
    drawn; None for add, sub, mul, div, square, sqrt, exp, log, sin and cos."""
    variables: Sequence[str | int] | None
    """Names or indices (from 0) of the variables that formulas may use; None for all."""
    max_size: int
    """Greatest size of a formula, without slope and intercept: the sum of the complexities of its
    operators, variables and constants; 25 by default."""
    max_depth: int | None
    """Greatest height of a formula's tree, a variable having 1; None for any."""
    complexities: Mapping[str, int] | None
    """Complexities of operators that do not count as 1."""
    counts: Mapping[str, int] | None
    """Most uses of an operator: ``{"exp": 1}``."""
    nesting: Mapping[str, Mapping[str, int]] | None
    """Most uses of an operator inside of another: ``{"sin": {"sin": 0, "cos": 0}}``."""
    arguments: Mapping[str, int | Sequence[int]] | None
    """Greatest size of each operand of an operator, -1 for any: ``{"pow": (-1, 1)}``."""
    units: Mapping[str, Any] | Sequence[Any] | None
    """Unit of each variable, such as ``{"m": "kg", "v": "m/s"}``: formulas then add and compare
    only what has one dimension. None for no units."""
    target_unit: Any
    """Unit of the target; None for any."""
    dimensionless_constants: bool
    """Whether constants are plain numbers; otherwise a constant may have any unit."""
    loss: Loss | LossFunction | str
    """Loss that formulas are compared by, as in `evaluate`; "mse" by default."""
    form: Form | str
    """``"scaled"`` (default) for a + b f with the best slope and intercept, ``"plain"`` for f."""
    template: Template | None
    """Outer form of the formula instead of ``form``, a `warpfit.searching.Template`."""
    definitions: Mapping[str, Any] | None
    """Functions that may be among the operators, by name: expressions over their operands a, b and
    c. Functions of `warpfit.define` are known without."""
    monotonic: Mapping[str | int, str] | None
    """For variables, by name or index, ``"increasing"`` or ``"decreasing"``: no formula falls, or
    rises, where they grow on the screening rows."""
    group: str | int | None
    """Name or index of the variable that numbers the groups of rows: all constants differ by group,
    and formulas do not use it. Engines do not know it yet, and refuse it."""
    guesses: Any
    """Expressions that the search begins with, as for `evaluate`; their numbers and parameters are
    starts of a fit. A `warpfit.Batch` has the starts of its parameters."""
    islands: int | None
    """Populations that evolve side by side; None for as many as suit the engine."""
    population: int | None
    """Formulas of all islands together; None for as many as suit the engine."""
    pairs: bool
    """Whether pairs and sums of short formulas are searched; True by default."""
    fit_iterations: int
    """Most iterations of a fit of a promising formula's constants; 15 by default, 0 for no fits."""
    screening_rows: int
    """Most rows on which new formulas are scored, drawn by the seed; 512 by default."""
    rows: Rows
    """slice or (start, stop) of consecutive rows; None for all."""
    seed: int
    """The same seed gives the same search on one kind of engine, with a budget in generations;
    0 by default."""
    timeout: float | None
    """Seconds for the whole call, retries and a repeated upload included; None for no limit. The
    search ends in time with what it has found."""
    partial: bool
    """Return what was found, with the reason None, if the server is lost for good meanwhile,
    instead of failing."""
    progress: Callable[[SearchResult], object] | None
    """Called about once a second with what there is; a result that is true ends the search."""


def build_search(data: DatasetHandle, options: SearchOptions) -> SearchRequest:
    """Turn the arguments of `warpfit.Client.search` into a checked request."""
    data = checked_handle(data)
    layout, names = data.layout, data.names
    loss = as_loss(options.get("loss", Loss.MSE))
    given = options.get("operators")
    operators: Mapping[str, float] = dict.fromkeys(DEFAULT_OPERATORS, 1.0)
    if isinstance(given, Mapping):
        operators = {name: number(weight, f"weight of {name}") for name, weight in given.items()}
    elif given is not None:
        operators = dict.fromkeys([given] if isinstance(given, str) else given, 1.0)
    definitions = _definitions(options, operators)
    columns, group = options.get("variables"), options.get("group")
    budget = {}
    for name, keyword in (
        ("max_generations", "generations"),
        ("max_formulas", "formulas"),
        ("idle_generations", "idle_generations"),
        ("islands", "islands"),
        ("population", "population"),
    ):
        value: Any = options.get(keyword)
        wanted = "a whole number above 0, or None"
        if value is not None and not whole_number(value, keyword, wanted) > 0:
            raise bad_setting(keyword, value, wanted)
        budget[name] = 0 if value is None else whole_number(value, keyword, wanted)
    ways: Any = options.get("monotonic")
    ways, signs = {} if ways is None else ways, {"increasing": 1, "decreasing": -1}
    if not isinstance(ways, Mapping) or any(way not in [*signs] for way in ways.values()):
        raise bad_setting("monotonic", ways, 'a mapping such as {"x1": "increasing"}')
    directions = {_column(name, names, "monotonic"): signs[way] for name, way in ways.items()}
    units, given_units, unit = None, options.get("units"), options.get("target_unit")
    has_plain_constants = bool(options.get("dimensionless_constants"))
    if given_units is not None:
        units = Units(
            exponents_of(given_units, names, layout.variables),
            None if unit is None else exponents(unit, "target_unit"),
            has_plain_constants,
        )
    elif unit is not None or has_plain_constants:
        raise bad_setting("units", None, "the units of the variables, too")
    guesses: Any = options.get("guesses")
    if guesses is not None and not isinstance(guesses, Batch):
        programs = as_population([guesses] if is_single(guesses) else guesses, names)
        # Numbers in their texts become starts of parameters.
        lifted, constants = programs.lift_constants()
        ones = [np.ones(program.parameters) for program in programs]
        guesses = Batch.of(lifted, [*map(np.concatenate, zip(ones, constants, strict=True))])
    seconds, target = options.get("seconds"), options.get("target_loss")
    if seconds is not None and not number(seconds, "seconds") > 0.0:
        raise bad_setting("seconds", seconds, "a number of seconds above 0, or None for no limit")
    whole: Any = {
        name: whole_number(options[name], name)
        for name in ("fit_iterations", "screening_rows", "seed")
        if name in options
    }
    if target is not None:
        whole["target_loss"] = number(target, "target_loss")
    request = SearchRequest(
        dataset_id=data.content_id,
        rows=row_range(options.get("rows"), layout.rows),
        operators=operators,
        variables=None
        if columns is None
        else tuple(_column(c, names, "variables") for c in columns),
        rules=_rules(options),
        units=units,
        loss=loss if isinstance(loss, Loss) else None,
        custom_loss=loss if isinstance(loss, LossFunction) else None,
        form=member(Form, options.get("form", Form.SCALED), "form"),
        template=options.get("template"),
        definitions=definitions,
        monotonic=directions,
        group=None if group is None else _column(group, names, "group"),
        guesses=guesses,
        pairs=bool(options.get("pairs", True)),
        max_seconds=0.0 if seconds is None else number(seconds, "seconds"),
        **budget,
        **whole,
    )
    progress = options.get("progress")
    if not (progress is None or callable(progress)):
        raise bad_setting("progress", progress, "a function of one SearchResult, or None")
    request.check(layout)
    return request


def _definitions(options: SearchOptions, operators: Iterable[str]) -> dict[str, Program]:
    """Return the functions that are given, and those of `warpfit.define` that are named."""
    given: Any = options.get("definitions") or {}
    if not isinstance(given, Mapping):
        raise bad_setting("definitions", given, 'a mapping such as {"sinc": "sin(a)/a"}')
    if not all(isinstance(name, str) for name in given) or not all(
        isinstance(text, str | Program) for text in given.values()
    ):
        raise bad_setting("definitions", given, "names with texts or programs")
    found = {
        name: text if isinstance(text, Program) else parse(text, ("a", "b", "c"))
        for name, text in given.items()
    }
    nesting = _nesting(options)
    for name in [*operators, *nesting, *(name for inside in nesting.values() for name in inside)]:
        macro = None if name in found or name in OPERATORS else MACROS.find(name)
        if macro is not None:
            found[name] = Program(macro.codes, macro.values)
    check_operators(operators, "operators", dict.fromkeys([*OPERATORS, *found], 0))
    return found


def _column(given: str | int, names: Sequence[str], field: str) -> int:
    """Return the index of a variable that is given by name or index."""
    known = list(names) or None
    if isinstance(given, str):
        if known is None and given[:1] == "x" and given[1:].isdecimal():
            return int(given[1:]) - 1
        if known is None or given not in known:
            wanted = f"Give one of {nearest_first(given, names) or 'x1, x2, ...'}"
            what = f"{field} is {given!r}"
            raise InvalidArgumentError(
                what, "BAD_SETTING", did_you_mean(given, names, wanted), field
            )
        return known.index(given)
    return whole_number(given, field)


def _nesting(options: SearchOptions) -> Mapping[str, Mapping[str, Any]]:
    nesting: Any = options.get("nesting") or {}
    if not isinstance(nesting, Mapping) or not all(
        isinstance(inside, Mapping) for inside in nesting.values()
    ):
        raise bad_setting("nesting", nesting, 'a mapping such as {"sin": {"sin": 0}}')
    return nesting


def _rules(options: SearchOptions) -> Rules:
    def limits(name: str) -> dict[str, int]:
        given: Any = options.get(name) or {}
        if not isinstance(given, Mapping):
            raise bad_setting(name, given, "a mapping of operators to numbers")
        return {one: whole_number(value, f"{name} of {one}") for one, value in given.items()}

    arguments: Any = options.get("arguments") or {}
    if not isinstance(arguments, Mapping):
        raise bad_setting("arguments", arguments, 'a mapping such as {"pow": (-1, 1)}')
    sizes = {
        operator: tuple(given) if isinstance(given, Iterable) else (given,)
        for operator, given in arguments.items()
    }
    depth = options.get("max_depth")
    return Rules(
        max_size=whole_number(options.get("max_size", Rules().max_size), "max_size"),
        max_depth=0 if depth is None else whole_number(depth, "max_depth"),
        complexities=limits("complexities"),
        counts=limits("counts"),
        nesting={
            (outer, inner): whole_number(most, f"nesting of {inner} in {outer}")
            for outer, inside in _nesting(options).items()
            for inner, most in inside.items()
        },
        arguments={
            operator: tuple(whole_number(size, f"arguments of {operator}") for size in given)
            for operator, given in sizes.items()
        },
    )


# --------------------------------------------------------------------------------------- the result


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SearchResult(ShownFormulas):
    """Formulas that a search has found: of each size the best, as far as larger ones are better.

    It prints as a table, simplest formula first.
    """

    batch: Batch
    """The formulas, slope and intercept included, with all fitted numbers as parameters."""
    sizes: NDArray[np.int64]
    """Size of each, without slope and intercept; [formulas]."""
    losses: NDArray[np.float64]
    """Loss of each on the rows of the call, [formulas]."""
    reason: SearchReason | None
    """Why the search ended; None while it goes on, and if it was lost, with ``partial``."""
    seconds: float
    """Seconds of the search on the engine."""
    generations: int
    tried: int
    """New formulas that were scored."""
    distinct: int
    """Different structures among them, constants not counted; an estimate."""
    fits: int
    pairs: int
    """Pairs of short formulas that were weighed."""
    restarts: int
    """Islands that were given up without progress and begun anew."""
    interruptions: int
    """How often an engine or a server was lost, and the search went on from its last front. Each
    costs the time since the last progress, and the populations."""
    timings: Timings | None
    """Durations of the stages of the last attempt on its server; None before the end."""
    names: tuple[str, ...]
    """Names of the variables, or empty."""
    parts: Batch | None = None
    """For a template or functions of one's own: each function of each formula in turn, and then the
    template's parameters, with their numbers; see `warpfit.searching.Front`."""

    _others: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("front", "front_", "equations", "equations_"), "texts, sizes and losses"),
        **dict.fromkeys(("expression_", "program_", "get_best"), "best"),
        **dict.fromkeys(("predict", "to_numpy"), "best.to_numpy()(X)"),
        "to_pandas": "pandas.DataFrame({'size': found.sizes, 'loss': found.losses, "
        "'formula': found.texts})",
    }

    @classmethod
    def of(
        cls,
        progress: SearchProgress,
        interruptions: int = 0,
        timings: Timings | None = None,
        names: tuple[str, ...] = (),
    ) -> SearchResult:
        """Return a progress as users see it."""
        front = progress.front
        counters: Any = (progress.generations, progress.formulas, progress.distinct, progress.fits)
        found = cls(
            *(front.batch, front.sizes, front.losses, progress.reason, progress.seconds),
            *(*counters, progress.pairs, progress.restarts, interruptions, timings, names),
        )
        return replace(found, parts=front.parts)

    def __len__(self) -> int:
        """Count the formulas."""
        return len(self.sizes)

    def __getitem__(self, index: int) -> Program:
        """Return a formula as `formula` does; an index below 0 counts from the last one."""
        return self.formula(range(len(self))[index])

    def formula(self, index: int | None = None) -> Program:
        """Return a formula with its fitted numbers as constants, by its index from 0, or `best`."""
        if index is None:
            return self.best
        return self.batch.program(index).bind(self.batch.program_parameters(index)[0])

    @property
    def best(self) -> Program:
        """The largest formula, which has the best loss, with its fitted numbers as constants.

        Raises:
            InvalidArgumentError: if nothing was found.
        """
        if not len(self):
            raise InvalidArgumentError(
                "the search has found no formula",
                "NOTHING_FOUND",
                "Give it more time, fewer rules, or rows without NaN and infinities",
            )
        return self.formula(len(self) - 1)

    @property
    def texts(self) -> list[str]:
        """The text of each formula, over the names of the variables."""
        return [to_text(self.formula(index), self.names) for index in range(len(self))]

    def _table(self, latex: bool = False) -> TextTable:
        rows = []
        for index in range(min(len(self), MOST_ROWS)):
            numbers = self.batch.program_parameters(index)[0].tolist()
            rounded = [float(f"{value:.5g}") for value in numbers]
            program = self.batch.program(index).bind(rounded)
            plain = shortened(to_text(program, self.names))
            text = f"${to_latex(program, self.names)}$" if latex else plain
            rows.append((str(self.sizes[index]), f"{self.losses[index]:.6g}", text))
        counted = f"{self.tried:,} formulas in {self.generations:,} generations, "
        note = f"{counted}{self.seconds:.1f} s, ended by {self.reason or 'nothing yet'}"
        if self.interruptions:
            times = "once" if self.interruptions == 1 else f"{self.interruptions} times"
            note += f", interrupted {times}"
        return TextTable(("size", "loss", "formula"), rows, note, total=len(self))


# ------------------------------------------------------------------------------------- the attempts


class SearchEndedError(Exception):
    """Ends the attempts of a search, which has a reason of its own."""

    def __init__(self, reason: SearchReason) -> None:
        super().__init__(reason)
        self.reason = reason


class SearchRun:
    """One search of a client in one attempt or, if engines or servers are lost, in several.

    An attempt begins with the formulas that the attempts before it have found, and has what is left
    of the budget. The front is that of all attempts together, and counters are added up.

    Args:
        request: the whole search.
        data: its data.
        progress: the caller's function, or None.
    """

    def __init__(
        self,
        request: SearchRequest,
        data: DatasetHandle,
        progress: Callable[[SearchResult], object] | None,
    ) -> None:
        self._request = request
        self._data = data
        self._progress = progress
        empty = np.empty(0)
        tokens = np.empty(0, np.uint8), empty, np.empty(0, np.uint32)
        batch = Batch(*tokens, np.empty(0, np.uint32), empty)
        self._before = SearchProgress(Front(batch, np.empty(0, np.int64), empty))
        """Sum of the attempts that have ended."""
        self._now: SearchProgress | None = None
        """The last progress of the present attempt."""
        self._interruptions = self._in_a_row = 0
        self._timings: Timings | None = None

    @property
    def has_found(self) -> bool:
        """Whether there is any formula."""
        return len(self._so_far().front.sizes) > 0

    def message(self) -> pb.SearchRequest:
        """Return the message of the next attempt."""
        request, before = self._request, self._before
        if self._interruptions:
            limits = {
                "max_seconds": (request.max_seconds, before.seconds, SearchReason.TIME),
                "max_generations": (
                    *(request.max_generations, before.generations, SearchReason.GENERATIONS),
                ),
                "max_formulas": (request.max_formulas, before.formulas, SearchReason.FORMULAS),
            }
            left: dict[str, Any] = {}
            for name, (most, used, reason) in limits.items():
                if most and most <= used:
                    raise SearchEndedError(reason)
                left[name] = most - used if most else most
            request = replace(request, **left)
            request = replace(request, guesses=_with_guesses(request, before.front))
        return search_codec.search_to_message(request)

    def read(self, messages: Iterable[pb.SearchResponse]) -> None:
        """Read the answer of an attempt."""
        layout = self._data.layout
        self._timings = search_codec.read_search(layout.variables, messages, self._report)

    def go_on(self, error: WarpfitError) -> pb.SearchRequest | None:
        """Return the message of another attempt; None if the last one has found nothing.

        Raises:
            SearchEndedError: if the budget is spent.
            FailedPreconditionError: if the search is interrupted again and again.
        """
        if self._now is None:
            return None
        self._interruptions += 1
        self._in_a_row = 1 if self._now.seconds > _LONG_SECONDS else self._in_a_row + 1
        self._before, self._now = self._so_far(), None
        _LOG.warning("a search was interrupted (%s), and goes on from its front", error.message)
        if self._in_a_row > _MOST_INTERRUPTIONS:
            raise FailedPreconditionError(
                f"the search was interrupted {self._interruptions} times: {error.message}",
                "SEARCH_INTERRUPTED",
                "Look at the server's log: the engine may die of this search",
            ) from error
        return self.message()

    def result(self, reason: SearchReason | None = None) -> SearchResult:
        """Return the front found so far; ``reason`` counts if no server has given one."""
        found = self._so_far()
        found = replace(found, reason=found.reason or reason)
        return SearchResult.of(found, self._interruptions, self._timings, self._data.names)

    def _report(self, progress: SearchProgress) -> None:
        self._now = progress
        wants_end = self._progress is not None and self._progress(self.result())
        if wants_end and progress.reason is None:
            raise SearchEndedError(SearchReason.CANCELLED)

    def _so_far(self) -> SearchProgress:
        """Return the sum of all attempts."""
        before, now = self._before, self._now
        if now is None:
            return before
        if not self._interruptions:
            return now
        counters = ("seconds", "generations", "formulas", "distinct", "fits", "pairs", "restarts")
        sums: Any = {name: getattr(before, name) + getattr(now, name) for name in counters}
        is_score = self._request.loss_function.is_score
        return replace(now, front=merged(before.front, now.front, is_score=is_score), **sums)


def merged(first: Front, second: Front, *, is_score: bool = False) -> Front:
    """Return the front of two fronts; of equal formulas that of the first one.

    ``is_score`` tells whether the highest loss is the best.
    """
    sizes = np.concatenate([first.sizes, second.sizes])
    losses = np.concatenate([first.losses, second.losses])
    keys = np.where(np.isnan(losses), np.inf, -losses if is_score else losses)
    order = np.lexsort((keys, sizes))
    best = np.minimum.accumulate(np.concatenate([[np.inf], keys[order][:-1]]))
    kept = order[keys[order] < best]
    batch, parts = _joined([first.batch, second.batch])[kept], second.parts
    known = [front for front in (first, second) if front.parts is not None and len(front.sizes)]
    if known:
        parts = _joined([front.parts for front in known if front.parts is not None])
        functions = len(known[0].parts or ()) // len(known[0].sizes)
        parts = parts[(kept[:, None] * functions + np.arange(functions)).reshape(-1)]
    return Front(batch, sizes[kept], losses[kept], parts)


def _joined(batches: Sequence[Batch]) -> Batch:
    names = ("codes", "values", "lengths", "parameter_counts", "parameters")
    arrays: Any = {
        name: np.concatenate([getattr(each, name) for each in batches]) for name in names
    }
    return Batch(**arrays)


def _with_guesses(request: SearchRequest, front: Front) -> Batch | None:
    """Return the guesses of a search with the formulas of a front."""
    if (parts := front.parts) is not None:
        known = [batch for batch in (request.guesses, parts) if batch is not None and len(batch)]
        return _joined(known) if known else None
    given, programs, starts = request.guesses, [], []
    for index in range(0 if given is None else len(given)):
        assert given is not None
        programs.append(given.program(index))
        starts.append(given.program_parameters(index)[0])
    for index in range(len(front.sizes)):
        program, vector = front.batch.program(index), front.batch.program_parameters(index)[0]
        inner = unscaled(program) if request.form is Form.SCALED else program
        used = np.unique(inner.values[inner.codes == PARAMETER]).astype(np.int64)
        if len(inner) == 1 and len(used):  # the constant, which is no guess
            continue
        values = inner.values.copy()
        is_parameter = inner.codes == PARAMETER
        values[is_parameter] = np.searchsorted(used, values[is_parameter])
        programs.append(Program(inner.codes, values))
        starts.append(vector[used])
    return Batch.of(programs, starts) if programs else None


def unscaled(program: Program) -> Program:
    """Return f of a + b f, where a and b are parameters; another program as it is."""
    for operator in ("add", "mul"):
        if program.codes[-1] != OPERATORS[operator].code:
            break
        arities = np.maximum(ARITIES[program.codes].astype(np.int64), 0)
        start = int(subtree_starts(arities)[-2])
        codes, values = program.codes, program.values
        left, right = (
            Program(codes[:start], values[:start]),
            Program(codes[start:-1], values[start:-1]),
        )
        if len(left) == 1 and left.codes[0] == PARAMETER:
            program = right
        elif len(right) == 1 and right.codes[0] == PARAMETER:
            program = left
        else:
            break
    return program
