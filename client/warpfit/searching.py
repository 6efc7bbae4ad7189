"""The request and the result of Search."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.errors import InvalidArgumentError, bad_setting, did_you_mean
from warpfit.ir import INDEX_LIMIT, Batch, Program
from warpfit.losses import BUILT_IN, Loss, LossFunction
from warpfit.ops import ARITIES, OPERATORS, PARAMETER, VARIABLE
from warpfit.request import check_rows, check_target

if TYPE_CHECKING:
    from warpfit.dataset import Layout

#: Operators of a search that names none.
DEFAULT_OPERATORS: Final = (
    *("add", "sub", "mul", "div", "square", "sqrt", "exp", "log", "sin", "cos"),
)
#: Base units by whose exponents a unit is written, see `warpfit.formulas.units`.
BASE_UNITS: Final = 7
#: Greatest size of a formula, and of the complexity of an operator.
MOST_SIZE: Final = 1_000
#: Most rules of nesting.
MOST_NESTINGS: Final = 64
#: Codes of calls: of a template's functions and numbers, of defined functions, and behind both.
FIRST_CALL: Final = 128
FIRST_DEFINITION: Final = 192
_BEHIND_CALLS: Final = 256
#: Most functions of a template, and most of its tokens and of a defined function's.
MOST_FUNCTIONS: Final = 8
_MOST_TOKENS: Final = 1_000
#: Most operands of a defined function.
_MOST_OPERANDS: Final = 3
#: Most parameters of a template.
_MOST_PARAMETERS: Final = FIRST_DEFINITION - FIRST_CALL - MOST_FUNCTIONS
#: Most islands, and most iterations of a fit.
_MOST_ISLANDS: Final = 1 << 16
_MOST_ITERATIONS: Final = 10_000
_UINT64: Final = 2**64 - 1
#: Combinations of dimensions that are looked at for an operator, rounds of operators, and relative
#: difference of dimensions that are taken for the same.
_MOST_COMBINED: Final = 3_000
_MOST_ROUNDS: Final = 16
_SAME_UNIT: Final = 1e-6
#: Part of a unit that rounding may leave where the others have none.
_ROUNDING: Final = 1e-9


#: Operands of the operators by name.
_ARITIES: Final = {name: row.arity for name, row in OPERATORS.items()}


class Form(StrEnum):
    """How the formula f that is searched for predicts the target."""

    SCALED = "scaled"
    """The prediction is a + b f with the best intercept and slope (Keijzer 2003)."""
    PLAIN = "plain"
    """The prediction is f."""


class SearchReason(StrEnum):
    """Why a search ended."""

    TIME = "time"
    """The seconds are over."""
    GENERATIONS = "generations"
    """As many generations as were asked for have run."""
    FORMULAS = "formulas"
    """As many formulas as were asked for have been tried."""
    TARGET_LOSS = "target_loss"
    """A formula of the returned front has at most the loss that was asked for."""
    IDLE = "idle"
    """No formula became better for as many generations as were allowed."""
    CANCELLED = "cancelled"
    """The caller has ended the search."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules for a formula f. Operators are given by their names."""

    max_size: int = 25
    """Greatest size: the sum of the complexities of the tokens of f."""
    max_depth: int = 0
    """Greatest height of the tree, a leaf having 1; 0 for any."""
    complexities: Mapping[str, int] = field(default_factory=dict)
    """Complexity of operators that do not count as 1."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Most uses of an operator."""
    nesting: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """For (outer, inner) the most uses of ``inner`` on any path below a use of ``outer``."""
    arguments: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Greatest size of each operand of an operator; -1 for any."""

    def check(self, arities: Mapping[str, int] = _ARITIES) -> None:
        """Check all rules.

        Args:
            arities: number of operands of each operator that there is, by its name.

        Raises:
            InvalidArgumentError: for an unknown operator, or a number that makes no sense.
        """
        _check_number("max_size", self.max_size, 1, MOST_SIZE)
        _check_number("max_depth", self.max_depth, 0, MOST_SIZE)
        for name, numbers, least in (
            ("complexities", self.complexities, 1),
            ("counts", self.counts, 0),
        ):
            check_operators(numbers, name, arities)
            for operator, number in numbers.items():
                _check_number(f"{name} of {operator}", number, least, MOST_SIZE)
        _check_number("rules of nesting", len(self.nesting), 0, MOST_NESTINGS)
        for pair, number in self.nesting.items():
            check_operators(pair, "nesting", arities)
            _check_number(f"nesting of {pair[1]} in {pair[0]}", number, 0, MOST_SIZE)
        check_operators(self.arguments, "arguments", arities)
        for operator, sizes in self.arguments.items():
            arity = arities[operator]
            if len(sizes) != arity or not all(s == -1 or 1 <= s <= MOST_SIZE for s in sizes):
                wanted = f"a size from 1, or -1 for any, for each of its {arity} operands"
                raise bad_setting(f"arguments of {operator}", sizes, wanted)


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """Dimensions of the variables and of the target, as exponents of the base units."""

    variables: NDArray[np.float64]
    """[variables, BASE_UNITS]."""
    target: NDArray[np.float64] | None = None
    """[BASE_UNITS], for dimensionless constants; None if the formula may have any dimension."""
    dimensionless_constants: bool = False
    """Whether constants are plain numbers; otherwise a constant may have any dimension."""

    def check(self, variables: int, used: Iterable[int]) -> None:
        """Check the number of exponents against the variables of the data set.

        Raises:
            InvalidArgumentError: if they do not fit the variables, or are no finite numbers; or if
                no formula of the variables can have the dimension of the target.
        """
        for name, array, shape in (
            ("variables", self.variables, (variables, BASE_UNITS)),
            ("target", self.target, (BASE_UNITS,)),
        ):
            if array is None:
                continue
            is_finite = bool(np.isfinite(array).all())
            if array.shape != shape or not is_finite:
                given = f"{_times(array.shape)} numbers{'' if is_finite else ', some not finite'}"
                raise InvalidArgumentError(
                    f"the units' {name} are {given}, not {_times(shape)} finite numbers",
                    "BAD_UNITS",
                    f"Give the exponents of {BASE_UNITS} base units",
                    "units",
                )
        if self.target is None or not self.dimensionless_constants:
            return
        # Every operator's result has a dimension in the span of those of its operands.
        basis = self.variables[sorted(used)].T
        powers = np.linalg.lstsq(basis, self.target, rcond=None)[0]
        if np.abs(basis @ powers - self.target).max() > _ROUNDING * (1 + np.abs(self.target).max()):
            raise InvalidArgumentError(
                "no formula of the variables has the unit of the target",
                "UNSATISFIABLE",
                "Check the units, add a variable, or let constants have units",
                "units",
            )

    def check_operators(self, operators: Sequence[str], used: Sequence[int]) -> None:
        """Check that operators take some of the variables that are used to the target's dimension.

        All dimensions that formulas may have are made, operator by operator, until there are no
        more, or too many to look at: then a formula may exist.

        Raises:
            InvalidArgumentError: if no formula has the dimension of the target.
        """
        # Imported on first use, because it is not needed without units.
        from warpfit.formulas.units import joined

        if self.target is None or not self.dimensionless_constants:
            return
        roots = np.sqrt([2, 3, 5, 7, 11, 13, 17])  # dimensions as in `warpfit.formulas.units`
        target = self.target @ roots
        found, known = np.append(self.variables[list(used)] @ roots, 0.0), np.empty(0)
        for _ in range(_MOST_ROUNDS):
            found = found[np.unique(np.round(found, 6), return_index=True)[1]]
            if np.abs(found - target).min() < _SAME_UNIT * (1 + abs(target)):
                return
            if len(found) == len(known):
                raise InvalidArgumentError(
                    "no formula of the operators and variables has the unit of the target",
                    "UNSATISFIABLE",
                    "Check the units, add an operator such as mul, or let constants have units",
                    "units",
                )
            known = found
            for operator in map(OPERATORS.__getitem__, operators):
                if len(known) ** operator.arity > _MOST_COMBINED:
                    return
                operands = [part.ravel() for part in np.meshgrid(*[known] * operator.arity)]
                a, b, c = (*operands, *operands[:1] * 2)[:3]
                made = joined(np.full(len(a), operator.code, np.uint8), a, b, c)
                found = np.append(found, made[np.isfinite(made)])


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """Outer form of the formula, over variables, fitted parameters and searched functions."""

    codes: NDArray[np.uint8]
    """Tokens of the form in postfix. Code ``FIRST_CALL + i`` calls function i: its arguments are
    the operands before it. Parameters are fitted."""
    values: NDArray[np.float64]
    arities: tuple[int, ...]
    """Number of arguments of each function, which sees nothing else. They are its variables."""
    fitted: int = 0
    """Numbers around the form that are fitted: 2 for slope and intercept, 1 for a slope."""

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return int(self.values[self.codes == PARAMETER].max(initial=-1.0)) + 1

    def check(self, variables: int, definitions: Mapping[str, Program]) -> None:
        """Check the template on data of so many variables.

        Raises:
            InvalidArgumentError: if its tokens are no expression, or it has no function or too
                many, or does not call one.
        """
        if what := self._mistake(variables, definitions):
            raise InvalidArgumentError(
                what,
                "BAD_TEMPLATE",
                f"Have 1 to {MOST_FUNCTIONS} functions of at least one argument, and call each; "
                f"at most {_MOST_PARAMETERS} parameters and {_MOST_TOKENS} tokens in postfix",
                "template",
            )

    def _mistake(self, variables: int, definitions: Mapping[str, Program]) -> str:
        """Return what is wrong with the template, or an empty text."""
        count, codes, values = len(self.arities), self.codes, self.values
        if not 1 <= count <= MOST_FUNCTIONS or not all(0 < a < 256 for a in self.arities):
            return f"the template has {count} functions, with {list(self.arities)[:20]} arguments"
        if not 0 < len(codes) == len(values) <= _MOST_TOKENS:
            return f"the template has {len(codes)} tokens and {len(values)} values"
        places = values[(codes == VARIABLE) | (codes == PARAMETER)]
        if not ((places >= 0) & (places == np.floor(places)) & (places < INDEX_LIMIT)).all():
            return "the template has a variable or parameter whose index is no whole number"
        if values[codes == VARIABLE].max(initial=-1.0) >= variables:
            return f"the template has a variable beyond the {variables} of the data"
        if self.parameters > _MOST_PARAMETERS:
            return f"the template has {self.parameters} parameters"
        arities = arities_of(self, definitions)
        # Parameters are numbered as functions are, behind them, and called by no code of their own.
        arities[FIRST_CALL + count : FIRST_DEFINITION] = -1
        if (arities[codes] < 0).any() or not _is_expression(arities[codes]):
            return "the template's tokens are no expression"
        called = {
            *(codes[(codes >= FIRST_CALL) & (codes < FIRST_DEFINITION)] - FIRST_CALL).tolist()
        }
        if missing := {*range(count)} - called:
            return f"the template does not call function {min(missing)}"
        return "" if self.fitted in (0, 1, 2) else f"{self.fitted} numbers are around the template"


def _is_expression(arities: NDArray[np.int64]) -> bool:
    """Return whether each operator has its operands, and one value is left."""
    heights = np.cumsum(1 - arities)
    before = heights - (1 - arities)
    return bool((before >= arities).all() and heights[-1] == 1)


def arities_of(template: Template | None, definitions: Mapping[str, Program]) -> NDArray[np.int64]:
    """Return the operands of each code, those of calls too, -1 for none that there is; [256]."""
    arities = ARITIES.astype(np.int64)
    if template is not None:
        functions = [*template.arities, *[0] * template.parameters][: FIRST_DEFINITION - FIRST_CALL]
        arities[FIRST_CALL : FIRST_CALL + len(functions)] = functions
    for place, program in enumerate(definitions.values()):
        arities[FIRST_DEFINITION + place] = program.variables
    return arities


@dataclass(frozen=True, slots=True, eq=False)
class SearchRequest:
    """One call of Search: what to look for, on which data, and for how long."""

    dataset_id: bytes
    """As `warpfit.request.Evaluation.dataset_id`."""
    rows: tuple[int, int] | None = None
    """Half-open row range that the search sees; None for all rows."""
    screening_rows: int = 512
    """Most of these rows on which new formulas are scored; they are drawn by the seed."""
    operators: Mapping[str, float] = field(
        default_factory=lambda: dict.fromkeys(DEFAULT_OPERATORS, 1.0)
    )
    """Operators that formulas are made of, with the weight by which each is drawn. Names of
    ``definitions`` may be among them."""
    definitions: Mapping[str, Program] = field(default_factory=dict)
    """Functions of the caller by name, over their operands as variables."""
    variables: tuple[int, ...] | None = None
    """Columns that formulas may use; None for all."""
    rules: Rules = field(default_factory=Rules)
    units: Units | None = None
    loss: Loss | None = Loss.MSE
    custom_loss: LossFunction | None = None
    """Loss function of the caller, instead of ``loss``."""
    form: Form = Form.SCALED
    template: Template | None = None
    """Instead of ``form``."""
    monotonic: Mapping[int, int] = field(default_factory=dict)
    """For columns 1 if no formula may fall where they grow, -1 if none may rise."""
    group: int | None = None
    """Column whose value is a row's group, by which constants differ; formulas do not use it."""
    guesses: Batch | None = None
    """Formulas that the search begins with; their parameters are starts of a fit."""
    islands: int = 0
    """Populations that evolve side by side; 0 for as many as suit the engine."""
    population: int = 0
    """Formulas of all islands together; 0 for as many as suit the engine."""
    pairs: bool = True
    """Whether pairs and sums of short formulas are searched."""
    fit_iterations: int = 15
    """Most iterations of a fit of a promising formula's constants; 0 for no fits."""
    seed: int = 0
    max_seconds: float = 0.0
    """Seconds of the search on the engine; 0 for no limit."""
    max_generations: int = 0
    """Most generations; 0 for no limit."""
    max_formulas: int = 0
    """Most formulas to score; 0 for no limit."""
    idle_generations: int = 0
    """Generations without progress after which the search ends; 0 for no limit."""
    target_loss: float = -math.inf
    """Loss at which the search ends."""

    @property
    def loss_function(self) -> LossFunction:
        """The loss that formulas are compared by."""
        if self.custom_loss is not None:
            return self.custom_loss
        return BUILT_IN[Loss.MSE if self.loss is None else self.loss]

    def row_range(self, layout: Layout) -> tuple[int, int]:
        """Return the half-open range of the rows that the search sees."""
        return (0, layout.rows) if self.rows is None else self.rows

    def columns(self, layout: Layout) -> tuple[int, ...]:
        """Return the columns that formulas may use, ascending."""
        if self.variables is not None:
            return tuple(sorted(self.variables))
        return tuple(column for column in range(layout.variables) if column != self.group)

    def check(self, layout: Layout) -> None:
        """Check the whole request on a data set of a layout.

        Raises:
            InvalidArgumentError: for a setting that makes no sense, or does not fit the data or
                another one; if there is no budget; or if nothing fulfils the units.
            ProgramError: for a bad token of a guess.
        """
        check_rows(self.row_range(layout), layout)
        check_target(layout, "the search")
        if not 0.0 <= self.max_seconds < math.inf:
            raise bad_setting("max_seconds", self.max_seconds, "a finite number of seconds")
        for name in ("max_generations", "max_formulas", "idle_generations"):
            _check_number(name, getattr(self, name), 0, _UINT64)
        if not (self.max_seconds or self.max_generations or self.max_formulas):
            raise InvalidArgumentError(
                "the search has no budget, so it would never end",
                "BUDGET_MISSING",
                "Give seconds, generations or formulas, more than 0 of them",
                "max_seconds",
            )
        if math.isnan(self.target_loss):
            raise bad_setting("target_loss", self.target_loss, "a number")
        for name, least, most in (
            ("screening_rows", 1, _UINT64),
            ("islands", 0, _MOST_ISLANDS),
            ("population", 0, _UINT64),
            ("fit_iterations", 0, _MOST_ITERATIONS),
            ("seed", 0, _UINT64),
        ):
            _check_number(name, getattr(self, name), least, most)
        if 0 < self.population < self.islands:
            wanted = f"at least a formula for each of the {self.islands} islands"
            raise bad_setting("population", self.population, wanted)
        self._check_definitions()
        own = {name: program.variables for name, program in self.definitions.items()}
        arities = _ARITIES | own
        check_operators(self.operators, "operators", arities)
        if not self.operators:
            wanted = "at least one operator, or none at all for the usual ones"
            raise bad_setting("operators", self.operators, wanted)
        for operator, weight in self.operators.items():
            if not 0.0 < weight < math.inf:
                raise bad_setting(f"the weight of {operator}", weight, "a positive, finite number")
        self._check_variables(layout)
        self.rules.check(arities)
        if self.template is not None:
            self.template.check(layout.variables, self.definitions)
        for column, sign in self.monotonic.items():
            if not 0 <= column < layout.variables or sign not in (1, -1):
                wanted = "a column of the data, and 1 or -1"
                raise bad_setting("monotonic", {column: sign}, wanted)
        if self.units is not None:
            columns = self.columns(layout)
            self.units.check(layout.variables, columns)
            if self.template is None and not self.definitions:
                used = [name for name in self.operators if self.rules.counts.get(name) != 0]
                self.units.check_operators(used, columns)
        if self.guesses is not None:
            self._check_guesses(self.guesses, layout)

    def _check_definitions(self) -> None:
        if len(self.definitions) > _BEHIND_CALLS - FIRST_DEFINITION:
            wanted = f"at most {_BEHIND_CALLS - FIRST_DEFINITION} functions"
            raise bad_setting("definitions", len(self.definitions), wanted)
        for name, program in self.definitions.items():
            arity, used = program.variables, {*program.values[program.codes == VARIABLE].tolist()}
            if (
                name in OPERATORS
                or program.parameters
                or len(program) > _MOST_TOKENS
                or not 1 <= arity == len(used) <= _MOST_OPERANDS
            ):
                wanted = f"a name of no operator, and at most {_MOST_TOKENS} tokens over each of "
                wanted += f"1 to {_MOST_OPERANDS} operands, without parameters"
                raise bad_setting(f"the definition of {name}", str(program)[:200], wanted)

    def _check_variables(self, layout: Layout) -> None:
        if self.group is not None and not 0 <= self.group < layout.variables:
            raise InvalidArgumentError(
                f"the group is column {self.group}, and the data have {layout.variables} variables",
                "BAD_GROUP",
                f"Give a column from 0 to {layout.variables - 1}",
                "group",
            )
        columns = self.columns(layout)
        if not columns:
            raise InvalidArgumentError(
                "formulas may use no variable",
                "NO_VARIABLES",
                "Name at least one column",
                "variables",
            )
        for column in columns:
            if not 0 <= column < layout.variables:
                raise InvalidArgumentError(
                    f"column {column} is out of range: "
                    f"the data set has {layout.variables} variables",
                    "VARIABLE_OUT_OF_RANGE",
                    f"Use columns from 0 to {layout.variables - 1}",
                    "variables",
                )
        if len(set(columns)) != len(columns):
            raise bad_setting("variables", columns, "each column once")
        if self.group in columns:
            raise InvalidArgumentError(
                f"column {self.group} is the group, which formulas do not use",
                "CONFLICTING_SETTINGS",
                "Leave it out of the variables, or leave the group out",
                "variables",
            )

    def _check_guesses(self, guesses: Batch, layout: Layout) -> None:
        if self.template is None and not self.definitions:
            guesses.check(layout.variables)
            if guesses.vectors != 1:
                raise bad_setting(
                    "vectors of guesses", guesses.vectors, "one vector for each guess"
                )
            is_variable = guesses.codes == VARIABLE
            allowed = np.isin(guesses.values, self.columns(layout))
            if (is_variable & ~allowed).any():
                column = int(guesses.values[is_variable & ~allowed][0])
                raise InvalidArgumentError(
                    f"a guess uses column {column}, which formulas may not use",
                    "CONFLICTING_SETTINGS",
                    "Add it to the variables, or leave the guess out",
                    "guesses",
                )
            return
        # These guesses are parts of formulas, as those of a `Front`.
        guesses.check_shapes()
        arities = arities_of(self.template, self.definitions)
        columns, functions, what = self.columns(layout), [0], ""
        if self.template is not None:
            functions = [*self.template.arities, *[0] * self.template.parameters]
        if len(guesses) % len(functions):
            what = f"{len(guesses)} parts of formulas, not some of each of {len(functions)} parts"
        for place, (start, stop) in enumerate(() if what else pairwise(guesses.starts.tolist())):
            codes, values = guesses.codes[start:stop], guesses.values[start:stop]
            operands, used = arities[codes], values[codes == VARIABLE]
            own = columns if self.template is None else range(functions[place % len(functions)])
            if (
                not len(codes)
                or (operands < 0).any()
                or (codes == PARAMETER).any()
                or not _is_expression(operands)
                or not np.isin(used, [*own]).all()
            ):
                what = f"part {place} of a formula that is no expression over its own variables"
                break
        if what:
            wanted = "each function and number of each formula in turn, without parameters"
            raise bad_setting("guesses", what, wanted)


@dataclass(frozen=True, slots=True, eq=False)
class Front:
    """The best formula of each size, simplest first, as far as larger ones are better."""

    batch: Batch
    """Whole formulas, slope and intercept included, with all fitted numbers as parameters; one
    vector for each."""
    sizes: NDArray[np.int64]
    """Size of f by the rules' complexities, without slope and intercept; [formulas]."""
    losses: NDArray[np.float64]
    """Loss on the rows of the request, [formulas]."""
    parts: Batch | None = None
    """For a template or definitions: each function of each formula in turn, then its parameters,
    all without parameters, as they are searched. Slope and intercept are not among them."""


@dataclass(frozen=True, slots=True, eq=False)
class SearchProgress:
    """Progress of a search and its front; the last message has a reason."""

    front: Front
    seconds: float = 0.0
    """Seconds since the engine began the search."""
    generations: int = 0
    formulas: int = 0
    """New formulas that were scored."""
    distinct: int = 0
    """Different structures among them, constants not counted; an estimate."""
    fits: int = 0
    pairs: int = 0
    """Pairs of short formulas that were weighed."""
    restarts: int = 0
    """Islands that were given up without progress and begun anew."""
    reason: SearchReason | None = None
    """Why the search ended; None while it goes on."""


# --------------------------------------------------------------------------------- checks of values


def structure_length(sizes: Sequence[int], symbols: int) -> float:
    """Return the length, in nats, of a description of a sum's structure.

    A token is one of so many symbols, and the order of the terms says nothing. What makes a sum of
    them, signs and factors, says nothing either: a fit finds it.

    Args:
        sizes: tokens of each term.
        symbols: number of operators and variables, and one for numbers.
    """
    return sum(sizes) * math.log(symbols) - math.lgamma(len(sizes) + 1)


def check_operators(names: Iterable[str], field: str, known: Mapping[str, int] = _ARITIES) -> None:
    """Check the names of operators; raise InvalidArgumentError for one that is not known."""
    for name in names:
        if name not in known:
            raise InvalidArgumentError(
                f"there is no operator {name!r}",
                "UNKNOWN_OPERATOR",
                did_you_mean(name, known, "Use the names of GetServerInfo"),
                field,
            )


def _check_number(name: str, value: float, least: int, most: int) -> None:
    if not least <= value <= most:
        raise bad_setting(name, value, f"a whole number from {least} to {most}")


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
