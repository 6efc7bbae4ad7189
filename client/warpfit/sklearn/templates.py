"""Templates: the outer form of a formula is given, and functions in it are searched.

In ``"f(x1, x2) * exp(-g(x3))"`` the functions f and g are sub-formulas of their arguments, and p1,
p2, ... are numbers that are fitted. A function that is called twice is one sub-formula with other
arguments, and its constants are the same in both places.

An individual is one tree: the sub-formulas and its numbers side by side, held together by tokens
that compute nothing. It is what checkpoints have, and what a search goes on from. The engine gets
the template itself (`TemplateForm.contract`), and returns sub-formulas and numbers. Like every
formula of a search, a sub-formula is searched up to slope and intercept, a + b f, as far as the
template leaves them free: in the example the intercept of g would be one more factor of f. Those
that multiply the whole template, or are added to it, are the slope and intercept around it, which
have a closed form.

A form says how the formulas f of a search become the programs that are computed and fitted.
Without a template the program is a + b f, whose slope and intercept have a closed form. Within a
template f is a part of the program, and all numbers are fitted.
"""

from __future__ import annotations

import itertools
import math
import string
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit import searching
from warpfit.calls.dataset_handle import DatasetHandle
from warpfit.client import Client
from warpfit.errors import DeadlineExceededError, InvalidArgumentError
from warpfit.expressions.language import IDENTIFIER, INDEXED, TOKEN, WORDS, is_free, to_text
from warpfit.expressions.reference import evaluate_program
from warpfit.formulas.snapping import Outcomes, SnapSettings, Trials, lift
from warpfit.formulas.snapping import snap as snapped
from warpfit.ir import Program
from warpfit.losses import Closing, Loss, LossFunction, as_function
from warpfit.ops import CONSTANT, OPERATORS, PARAMETER, VARIABLE
from warpfit.parse import Macro, Parser, Placeholder, function, parse
from warpfit.sklearn.genomes import (
    ADD,
    DIV,
    GLUE,
    MUL,
    NEG,
    OPERANDS,
    SUB,
    Floats,
    Genomes,
    joined,
    packed,
    tokens,
)


def seconds_until(end: float) -> float | None:
    """Return the seconds until a time of `time.monotonic`; None for infinity.

    Raises:
        DeadlineExceededError: if it has passed.

    """
    if end == math.inf:
        return None
    left = end - time.monotonic()
    if left <= 0.0:
        raise DeadlineExceededError("the time of the search is over", "SEARCH_TIME_OVER")
    return left


class Shortening(NamedTuple):
    """How formulas are made shorter; see `warpfit.Client.simplify`."""

    client: Client
    data: DatasetHandle
    loss: Loss | LossFunction
    tolerance: float
    snap: Any
    ends: float
    """Time of `time.monotonic` at which it should have ended; infinite for any time."""
    allows: Callable[[Program], bool]
    """Tells whether a formula may be shown."""


class Form:
    """Formulas a + b f."""

    overhead: int = 0
    """Tokens of a formula of the search that are not counted in its complexity."""
    is_template: bool = False
    """Whether the outer form is given, so that no constant is one of the formulas."""

    def whole(self, genomes: Genomes) -> Genomes:
        """Return what is computed of f, but for slope and intercept."""
        return genomes

    def cores(self, genomes: Genomes) -> list[Genomes]:
        """Return the functions that are searched, each for all formulas."""
        return [genomes]

    def fits(self, genomes: Genomes) -> bool:
        """Tell whether formulas of another search may be those of this one."""
        return not (genomes.codes == GLUE).any()

    def parts_of(self, program: Program) -> tuple[Program, ...]:
        """Return what is counted of a program that the search has found: all of it."""
        return (program,)

    def knows(self, program: Program) -> bool:
        """Tell whether a program has this form."""
        return True

    def simplified(self, program: Program) -> Program:
        """Return an equal program in canonical order."""
        return program.simplify()

    def lifted(self, program: Program, free: bool = False) -> tuple[Program, Floats]:
        """Return a program with its constants, or those without a short form, as parameters."""
        return lift(program) if free else program.lift_constants()

    def bound(self, program: Program, numbers: Floats) -> Program:
        """Return a program with other constants, in the order of `lifted`."""
        return self.lifted(program)[0].bind(numbers)

    def shortened(self, program: Program, how: Shortening) -> Program:
        """Return a shorter form whose loss is hardly worse."""
        return how.client.simplify(
            how.data,
            [program],
            loss=how.loss,
            tolerance=how.tolerance,
            snap=how.snap,
            assume_defined=True,
            allows=how.allows,
            timeout=seconds_until(how.ends),
        ).programs[0]


# ---------------------------------------------------------------------------------------- templates

#: Code of the first function's calls; those of the others follow.
_FIRST_CALL: Final = 128
_SINE: Final = tokens([OPERATORS["sin"].code])
_MOST_FUNCTIONS: Final = 8
#: Rounding errors of a value, as part of it, and iterations of the fits of shorter formulas.
_ROUNDING: Final = 64.0 * float(np.finfo(np.float64).eps)
_SNAPPING: Final = 30
#: An intercept below this part of the spread of the values is 0, and a slope this near to 1 is 1.
_ROUNDED: Final = 1e-10
#: Rows on which it is found out which numbers a template determines.
_PROBED: Final = 256
#: Fewer rows with values say nothing about that.
_FEWEST_PROBED: Final = 20


def _bad_template(what: str, remedy: str) -> InvalidArgumentError:
    return InvalidArgumentError(what, "BAD_TEMPLATE", remedy, "template")


@dataclass(frozen=True)
class Template:
    """A text whose unknown functions are searched."""

    text: str
    names: tuple[str, ...]
    """Names of the columns, or empty."""
    functions: dict[str, int]
    """Number of arguments by function, in the order of their first calls."""
    program: tuple[tuple[int, float], ...]
    """Codes and values in postfix order; codes from `_FIRST_CALL` are calls of the functions."""
    parameters: int
    """Number of parameters p1, p2, ...."""

    @classmethod
    def of(cls, text: str, names: Sequence[str], columns: int) -> Template:
        """Read a template over the names of the columns, or x1, x2, ....

        Raises:
            ParseError: if the text is no expression, a name is unknown, or the calls of a function
                have different numbers of arguments.
            InvalidArgumentError: if no function is unknown, or there are too many.

        """
        if not isinstance(text, str):
            raise _bad_template(
                f"template is {text!r}", "Give a text such as 'f(x1, x2)*exp(-g(x3))', or None"
            )
        words = [*TOKEN.findall(text.rstrip()), ""]
        rows: dict[str, Macro | Placeholder] = {}
        functions: dict[str, int] = {}
        for place, (word, following) in enumerate(itertools.pairwise(words)):
            if following != "(" or not IDENTIFIER.fullmatch(word) or word in WORDS:
                continue
            known = function(word)
            if isinstance(known, Macro):
                rows[word] = Placeholder(known.name, known.arity, known.code)
            elif known is None and word not in functions:
                if word in names or INDEXED.fullmatch(word):
                    raise _bad_template(
                        f"{word!r} is a column or parameter, and a function of the template",
                        "Give the function another name",
                    )
                code = _FIRST_CALL + len(functions)
                functions[word] = _arguments(words[place + 2 :])
                rows[word] = Placeholder(word, functions[word], code)
        codes, values = Parser(names, rows).tokens(text)
        if not 0 < len(functions) <= _MOST_FUNCTIONS:
            raise _bad_template(
                f"the template {text!r} has {len(functions)} functions that are searched",
                f"Write 1 to {_MOST_FUNCTIONS}, such as f in 'f(x1, x2)*exp(-x3)'; where there is "
                "nothing to search, ParameterOptimizer fits p1, p2, ...",
            )
        program = tuple(zip(codes, values, strict=True))
        last = {code: max([-1.0, *(v for c, v in program if c == code)]) for code in codes}
        if last.get(VARIABLE, -1.0) >= columns:
            raise _bad_template(
                f"the template has x{last[VARIABLE] + 1:.0f}, and the data {columns} columns",
                "Write columns that the data have",
            )
        return cls(text, tuple(names), functions, program, int(last.get(PARAMETER, -1.0)) + 1)

    @property
    def arities(self) -> list[int]:
        """Number of arguments of each function."""
        return list(self.functions.values())

    def expanded(
        self,
        count: int,
        call: Callable[[int, list[Genomes]], Genomes],
        numbers: Sequence[Genomes],
    ) -> Genomes:
        """Write the template with something in the place of its calls and parameters.

        Args:
            count: number of formulas.
            call: returns what stands for a call, of the function's index and its arguments.
            numbers: what stands for each parameter.

        """
        stack: list[list[Genomes]] = []
        for code, value in self.program:
            is_call = _FIRST_CALL <= code < _FIRST_CALL + len(self.functions)
            index = code - _FIRST_CALL
            arity = self.arities[index] if is_call else int(OPERANDS[code])
            operands = stack[len(stack) - arity :]
            del stack[len(stack) - arity :]
            if is_call:
                stack.append([call(index, [packed(operand) for operand in operands])])
            elif code == PARAMETER:
                stack.append([numbers[int(value)]])
            else:
                own = tokens(np.full(count, code), value)
                stack.append([*itertools.chain(*operands), own])
        return packed(stack.pop())

    def filled(self, parts: Sequence[Genomes]) -> Genomes:
        """Put sub-formulas, and behind them numbers for the parameters, into the template."""

        def call(index: int, arguments: list[Genomes]) -> Genomes:
            return _substituted(parts[index], arguments)

        return self.expanded(len(parts[0]), call, parts[len(self.functions) :])

    def argument_names(self, index: int) -> tuple[str, ...]:
        """Return the columns that a function is called with, or letters if calls differ."""
        code, found = _FIRST_CALL + index, set()
        for place, (own, _) in enumerate(self.program):
            if own == code:
                before = self.program[place - self.arities[index] : place]
                found.add(before if all(c == VARIABLE for c, _ in before) else ())
        columns = found.pop()
        if found or not columns or len(set(columns)) < len(columns):
            return tuple(string.ascii_lowercase[: self.arities[index]])
        return tuple(to_text(Program.variable(int(value)), self.names) for _, value in columns)


def _arguments(words: Sequence[str]) -> int:
    """Count the arguments of a call, from the words behind its parenthesis."""
    count, depth = 1, 1
    for word in words:
        depth += (word == "(") - (word == ")")
        if depth == 0:
            break
        count += depth == 1 and word == ","
    return count


def _substituted(genomes: Genomes, arguments: Sequence[Genomes]) -> Genomes:
    """Put the arguments of each formula in the place of its variables."""
    total, count = len(genomes.codes), len(genomes)
    single = Genomes(genomes.codes, genomes.values, np.arange(total + 1))
    places = genomes.codes == VARIABLE
    formula = np.repeat(np.arange(count), genomes.sizes)
    which = np.where(places, genomes.values, 0.0).astype(np.int64) * count
    made = joined([single, *arguments])[np.where(places, total + which + formula, np.arange(total))]
    return Genomes(made.codes, made.values, made.starts[genomes.starts])


def _determined(template: Template, rows: Floats) -> tuple[tuple[int, int], ...]:
    """Return which slopes and intercepts of the sub-formulas a template determines.

    Those are taken in turn, slopes first, that move the formula in a direction of their own, at
    random values of everything: where the derivatives by all that is taken are independent.

    Returns:
        Pairs of the index of a function, and the code of the operator by which the number joins it.

    Raises:
        InvalidArgumentError: if the template does not depend on one of its functions.

    """
    rng = np.random.default_rng(0)
    count, names = len(template.functions), list(template.functions)
    calls = sum(code - _FIRST_CALL in range(count) for code, _ in template.program)
    drawn = rows[rng.integers(len(rows), size=_PROBED)].T
    table = np.concatenate([drawn, rng.uniform(0.5, 1.5, (calls, _PROBED))])
    places = itertools.count(len(drawn))

    def call(index: int, arguments: list[Genomes]) -> Genomes:
        """Return a + b (v + sin(u + ...)) with a random v, of the arguments u, ...."""
        blocks = [tokens([VARIABLE], next(places))]
        for argument in arguments:
            blocks += [argument, _SINE, tokens([ADD])]
        for number, code in ((index, MUL), (count + index, ADD)):
            blocks += [tokens([PARAMETER], number), tokens([code])]
        return packed(blocks)

    parameters = [tokens([PARAMETER], 2 * count + place) for place in range(template.parameters)]
    probe = template.expanded(1, call, parameters).program(0)
    plain = np.concatenate([np.ones(count), np.zeros(count), np.ones(template.parameters)])
    random = rng.uniform(0.5, 1.5, len(plain))

    def derivatives(chosen: list[int]) -> Floats:
        point = plain.copy()
        point[chosen] = random[chosen]
        steps = 1e-5 * np.eye(len(plain))[chosen]
        ahead, behind = (
            np.array([evaluate_program(probe, table, point + sign * step) for step in steps])
            for sign in (1.0, -1.0)
        )
        found = (ahead - behind) / 2e-5
        found = found[:, np.isfinite(found).all(axis=0)]
        return np.asarray(found / np.maximum(np.linalg.norm(found, axis=1)[:, None], 1e-300))

    taken = list(range(2 * count, len(plain)))
    for number in range(2 * count):
        found = derivatives([*taken, number])
        if found.shape[1] >= _FEWEST_PROBED and number < count and not found[-1].any():
            raise _bad_template(
                f"the template does not depend on {names[number]}", "Write it without it"
            )
        is_known = found.shape[1] >= _FEWEST_PROBED
        if not is_known or np.linalg.matrix_rank(found, tol=1e-6) == len(found):
            taken.append(number)
    return tuple(
        (number % count, MUL if number < count else ADD) for number in taken if number < 2 * count
    )


class _Outline(NamedTuple):
    """A template in which numbers are left out for a slope and an intercept around it."""

    tokens: list[tuple[int, float]]
    """Its codes and values; its parameters are the numbers that are kept."""
    kept: tuple[int, ...]
    """The numbers that are parameters."""
    fitted: int
    """2 for slope and intercept, 1 for a slope, 0 for none."""
    scaled: dict[int, int]
    """The numbers that a slope multiplies, with the power of it."""
    slope: int
    """The number that is left out for the slope."""
    shifted: int
    """The number that is left out for the intercept."""
    sign: int
    """The sign with which ``shifted`` is added."""


class _Operand(NamedTuple):
    """How an operand of a template depends on the numbers."""

    scaled: dict[int, int] | None
    """Numbers whose product with c, or quotient by it, multiplies the operand by c."""
    shift: tuple[int, int] | None
    """A number that is added to the operand, and its sign."""
    used: frozenset[int]
    """All numbers in it."""


def _joined_operands(code: int, operands: Sequence[_Operand]) -> _Operand:
    """Return how an operator's result depends on the numbers."""
    used = frozenset().union(*(operand.used for operand in operands))
    if code == NEG:
        (only,) = operands
        shift = None if only.shift is None else (only.shift[0], -only.shift[1])
        return _Operand(only.scaled, shift, used)
    if code not in (ADD, SUB, MUL, DIV):
        return _Operand(None, None, used)
    a, b = operands
    scaled: dict[int, int] | None = None
    shift = None
    if code in (MUL, DIV):
        if a.scaled and not {*a.scaled} & b.used:
            scaled = a.scaled
        elif b.scaled and not {*b.scaled} & a.used:
            sign = 1 if code == MUL else -1
            scaled = {number: sign * power for number, power in b.scaled.items()}
        return _Operand(scaled, None, used)
    if a.scaled and b.scaled:
        both = {**a.scaled, **b.scaled}
        is_same = all(a.scaled.get(n, p) == b.scaled.get(n, p) == p for n, p in both.items())
        outside = ({*a.scaled} & b.used) | ({*b.scaled} & a.used)
        if is_same and outside <= {*a.scaled} & {*b.scaled}:
            scaled = both
    if a.shift is not None and a.shift[0] not in b.used:
        shift = a.shift
    elif b.shift is not None and b.shift[0] not in a.used:
        shift = (b.shift[0], b.shift[1] if code == ADD else -b.shift[1])
    return _Operand(scaled, shift, used)


class TemplateForm(Form):
    """The form of a search within a template, whose individuals are sub-formulas and numbers.

    An individual is the tree of the sub-formulas f of a + b f, of those b and a that the template
    determines, and of its parameters, in this order.
    """

    is_template = True

    def __init__(self, template: Template, rows: Floats, grouped: bool = False) -> None:
        """Find out on some rows, [rows, variables], which numbers the template determines.

        ``grouped`` says whether numbers without a short form are those of a group of rows.

        Raises:
            InvalidArgumentError: if the template does not depend on one of its functions.

        """
        self.template, self.grouped = template, grouped
        self.functions = len(template.functions)
        step = -(-len(rows) // _PROBED)
        self._rows = np.ascontiguousarray(rows[::step].T)
        self.scales = _determined(template, rows)
        self.numbers = len(self.scales) + template.parameters
        self.overhead = self.functions - 1 + 2 * self.numbers
        self._parts: dict[Program, tuple[Program, ...]] = {}

    def individuals(self, cores: Sequence[Genomes], numbers: Floats) -> Genomes:
        """Make individuals of sub-formulas up to slope and intercept, and numbers [n, numbers]."""
        glue = tokens(np.full(len(cores[0]), GLUE))
        blocks = [cores[0], *itertools.chain(*((core, glue) for core in cores[1:]))]
        for column in numbers.T:
            blocks += [tokens(np.full(len(column), CONSTANT), column), glue]
        return packed(blocks)

    def cores(self, individuals: Genomes) -> list[Genomes]:
        """Return the sub-formulas up to slope and intercept."""
        spans, end = individuals.spans, individuals.starts[1:] - 1 - 2 * self.numbers
        found = []
        for index in range(self.functions)[::-1]:
            end = end - (index > 0)  # The token that joins it to those before.
            first = end + 1 - spans[end]
            found.append(individuals.assembled(first[:, None], spans[end][:, None]))
            end = first - 1
        return found[::-1]

    def numbers_of(self, individuals: Genomes) -> list[Genomes]:
        """Return slopes, intercepts and parameters as formulas of one token."""
        first = individuals.starts[1:, None] - 2 * self.numbers + 2 * np.arange(self.numbers)
        ones = np.ones((len(individuals), 1), np.int64)
        return [individuals.assembled(place[:, None], ones) for place in first.T]

    def parts(self, individuals: Genomes) -> list[Genomes]:
        """Return the sub-formulas with slope and intercept, and the parameters."""
        cores, numbers = self.cores(individuals), self.numbers_of(individuals)
        for (index, code), number in zip(self.scales, numbers, strict=False):
            cores[index] = packed([cores[index], number, tokens(np.full(len(number), code))])
        return [*cores, *numbers[len(self.scales) :]]

    def whole(self, genomes: Genomes) -> Genomes:
        """Write the whole formulas of individuals."""
        return self.template.filled(self.parts(genomes))

    # ---------------------------------------------------------------------------- in the engine

    @cached_property
    def _outline(self) -> _Outline:
        """The template with its numbers, as far as slope and intercept around it leave them."""
        written: list[tuple[int, float]] = []
        for code, value in self.template.program:
            if code == PARAMETER:
                value += len(self.scales)
            written.append((code, value))
            for number, (index, joint) in enumerate(self.scales):
                if code == _FIRST_CALL + index:
                    written += [(PARAMETER, float(number)), (joint, 0.0)]
        slopes = {number for number, (_, code) in enumerate(self.scales) if code == MUL}
        # Which of them multiply all of the template, and which one is added to it.
        arities = self.template.arities
        stack: list[_Operand] = []
        for code, value in written:
            is_call = _FIRST_CALL <= code < _FIRST_CALL + len(arities)
            arity = arities[code - _FIRST_CALL] if is_call else int(OPERANDS[code])
            operands = stack[len(stack) - arity :]
            del stack[len(stack) - arity :]
            if code == PARAMETER:
                stack.append(_Operand({int(value): 1}, (int(value), 1), frozenset([int(value)])))
            else:
                stack.append(_joined_operands(code, operands))
        root = stack.pop()
        scaled, shift = root.scaled or {}, root.shift
        others = [number for number in scaled if shift is None or number != shift[0]]
        chosen = [number for number in others if number in slopes] or others[: len(others) == 1]
        if not chosen:
            kept = tuple(range(self.numbers))
            return _Outline(written, kept, 0, {}, -1, -1, 1)
        slope = chosen[0]
        shifted, sign = (-1, 1) if shift is None else shift
        kept = tuple(number for number in range(self.numbers) if number not in (slope, shifted))
        left: list[tuple[int, float]] = []
        for place, (code, value) in enumerate(written):
            joins = {(PARAMETER, float(slope)): MUL, (PARAMETER, float(shifted)): ADD}
            if code == PARAMETER and int(value) in (slope, shifted):
                left.append((CONSTANT, 1.0 if int(value) == slope else 0.0))
            elif place and joins.get(written[place - 1]) == code:  # x * 1, or x + 0
                left.pop()
            else:
                left.append((code, float(kept.index(int(value))) if code == PARAMETER else value))
        return _Outline(left, kept, 1 + (shifted >= 0), scaled, slope, shifted, sign)

    @property
    def engine_parts(self) -> int:
        """Number of functions and numbers that the engine looks for."""
        return self.functions + len(self._outline.kept)

    def contract(self, codes: NDArray[np.uint8]) -> searching.Template:
        """Return the template as the engine takes it; ``codes`` recodes functions of one's own."""
        own, outline = np.arange(256, dtype=np.uint8), self._outline
        own[_FIRST_CALL + self.functions :] = codes[_FIRST_CALL + self.functions :]
        given, values = zip(*outline.tokens, strict=True)
        arities = tuple(self.template.arities)
        return searching.Template(
            own[np.array(given, np.uint8)], np.array(values), arities, outline.fitted
        )

    def found(self, parts: Sequence[Genomes], around: Floats) -> Genomes:
        """Make an individual of what the engine has found: its parts, slope and intercept."""
        outline, numbers = self._outline, np.ones(self.numbers)
        numbers[list(outline.kept)] = [part.values[0] for part in parts[self.functions :]]
        if outline.fitted == 2:
            numbers[outline.shifted] = 0.0
        for number, power in outline.scaled.items() if outline.fitted else ():
            numbers[number] *= around[0] ** power
        if outline.fitted == 2:
            numbers[outline.shifted] += outline.sign * around[1]
        return self.individuals(parts[: self.functions], numbers[None])

    def guesses(self, individuals: Genomes) -> list[list[Genomes]]:
        """Return the parts of individuals from which the engine can go on."""
        outline = self._outline
        cores, columns = self.cores(individuals), self.numbers_of(individuals)
        found = []
        for row in range(len(individuals)):
            numbers = np.array([column.values[row] for column in columns])
            if outline.fitted:
                with np.errstate(all="ignore"):
                    slope = numbers[outline.slope] ** float(outline.scaled[outline.slope])
                    for number, power in outline.scaled.items():
                        numbers[number] *= slope ** float(-power)
            if np.isfinite(numbers).all():
                own = [core[row : row + 1] for core in cores]
                own += [tokens([CONSTANT], number) for number in numbers[list(outline.kept)]]
                found.append(own)
        return found

    # ------------------------------------------------------------------------- what is kept of it

    def fits(self, genomes: Genomes) -> bool:
        """Tell whether formulas of another search have the same functions and numbers."""
        wanted = self.functions - 1 + self.numbers
        if not len(genomes) or (genomes.totals(genomes.codes == GLUE) != wanted).any():
            return not len(genomes)
        if any((number.codes != CONSTANT).any() for number in self.numbers_of(genomes)):
            return False
        return all(
            core.values[core.codes == VARIABLE].max(initial=-1.0) < arity
            for core, arity in zip(self.cores(genomes), self.template.arities, strict=True)
        )

    # ---------------------------------------------------------------- what follows the search

    def program(self, genomes: Genomes, row: int) -> Program:
        """Return the whole formula of an individual, whose parts are known from then on."""
        parts = [part.program(0) for part in self.parts(genomes[row : row + 1])]
        return self.of_parts([self._trimmed(parts, place) for place in range(len(parts))])

    def _trimmed(self, parts: Sequence[Program], place: int) -> Program:
        """Leave out an intercept or a slope that only rounding errors tell from 0 and 1."""
        part = parts[place]
        if [*part.codes[-2:]] == [CONSTANT, ADD]:
            inner = Program(part.codes[:-2], part.values[:-2])
            values = evaluate_program(inner, self._arguments(parts, place))
            values = values[np.isfinite(values)]
            if len(values) and abs(part.values[-2]) <= _ROUNDED * float(np.ptp(values)):
                part = inner
        if [*part.codes[-2:]] == [CONSTANT, MUL] and abs(part.values[-2] - 1.0) <= _ROUNDED:
            part = Program(part.codes[:-2], part.values[:-2])
        return part

    def lifted(self, program: Program, free: bool = False) -> tuple[Program, Floats]:
        """Return a whole formula with its numbers as parameters, but for those of the template."""
        if program not in self._parts:
            return super().lifted(program, free)
        parts, numbers = self._lifted(self._parts[program], free)
        lifted = self.template.filled(parts).program(0)
        return lifted, numbers[: lifted.parameters]

    def bound(self, program: Program, numbers: Floats) -> Program:
        """Return a whole formula with other numbers, in the order of `lifted`."""
        if program not in self._parts:
            return super().bound(program, numbers)
        parts = self._parts[program]
        made = Genomes.of(parts)
        rest = made.values[made.codes == CONSTANT][len(numbers) :]
        made = made.with_constants(np.concatenate([numbers, rest]))
        return self.of_parts([made.program(place) for place in range(len(parts))])

    def of_parts(self, parts: Sequence[Program]) -> Program:
        """Return the whole formula of sub-formulas and numbers, whose parts are known then."""
        whole = self.template.filled([Genomes.of([part]) for part in parts]).program(0)
        self._parts[whole] = tuple(parts)
        return whole

    def parts_of(self, program: Program) -> tuple[Program, ...]:
        """Return sub-formulas and numbers of a whole formula; another program is its own part."""
        return self._parts.get(program, (program,))

    def knows(self, program: Program) -> bool:
        """Tell whether a program has been made of sub-formulas."""
        return program in self._parts

    def simplified(self, program: Program) -> Program:
        """Return the whole formula of equal sub-formulas in canonical order."""
        if program not in self._parts:
            return program
        parts = self._parts[program]
        places = range(len(parts))
        return self.of_parts([self._trimmed(parts, place).simplify() for place in places])

    def texts(self, program: Program, digits: int | None) -> dict[str, str]:
        """Return each sub-formula and parameter of a whole formula as text, by name."""
        names = [*self.template.functions, *self._parameter_names]
        arguments = [self.template.argument_names(place) for place in range(self.functions)]
        arguments += [()] * self.template.parameters
        parts = self._parts.get(program, ())
        if self.grouped and parts:
            parts = tuple(part.program(0) for part in self._lifted(parts, free=True)[0])
        found = zip(names, parts, arguments, strict=False)
        return {name: to_text(part, known, digits) for name, part, known in found}

    @property
    def _parameter_names(self) -> list[str]:
        return [f"p{place + 1}" for place in range(self.template.parameters)]

    def guessed(self, guess: Any) -> Genomes:
        """Make an individual of texts by function, and of numbers by parameter, 1 without.

        Raises:
            ParseError: if a text is no expression.
            InvalidArgumentError: for anything but a dict with all functions of the template.

        """
        functions, numbers = self.template.functions, self._parameter_names
        if (
            not isinstance(guess, Mapping)
            or not {*functions} <= {*guess} <= {*functions, *numbers}
            or not all(isinstance(guess[name], str) for name in functions)
        ):
            example = dict.fromkeys(functions, "...") | dict.fromkeys(numbers, 1.0)
            raise InvalidArgumentError(
                f"the guess {guess!r} is not one for the template {self.template.text!r}",
                "BAD_SETTING",
                f"Give dicts such as {example}",
                "guesses",
            )
        cores = []
        for place, (name, arity) in enumerate(functions.items()):
            program = parse(guess[name], self.template.argument_names(place))
            program = program.bind(np.ones(program.parameters))
            if program.variables > arity:
                raise InvalidArgumentError(
                    f"the guess of {name} has x{program.variables}, and {name} {arity} arguments",
                    "BAD_SETTING",
                    f"Write it with {', '.join(self.template.argument_names(place))}",
                    "guesses",
                )
            cores.append(Genomes.of([program]))
        scales = [1.0 if code == MUL else 0.0 for _, code in self.scales]
        values = [float(guess.get(name, 1.0)) for name in numbers]
        return self.individuals(cores, np.array([[*scales, *values]]))

    def shortened(self, program: Program, how: Shortening) -> Program:
        """Shorten one sub-formula or number after the other, with all others fitted again."""
        parts = list(self.parts_of(program))
        how = how._replace(tolerance=how.tolerance / len(parts))
        for place in range(len(parts) if program in self._parts else 0):
            with suppress(DeadlineExceededError):  # What is shorter by then stays.
                parts = self._with_short_part(parts, place, how)
        return self.of_parts(parts) if program in self._parts else program

    def _with_short_part(self, parts: list[Program], place: int, how: Shortening) -> list[Program]:
        sample = self._arguments(parts, place)
        if not sample.size:
            return parts
        function = as_function(how.loss)
        squares = function.is_squares and function.closing is not Closing.ROOT
        settings = SnapSettings(
            tolerance=how.tolerance,
            rounding=_ROUNDING**2 if squares else _ROUNDING,
            assume_defined=True,
            sample=sample,
            low=sample.min(axis=1),
            high=sample.max(axis=1),
            middle=1.0,
            numbers=how.snap or "",
            allows=lambda part: how.allows(
                self.of_parts([*parts[:place], part, *parts[place + 1 :]])
            ),
        )
        search, outcome = snapped([parts[place]], settings), None
        known: dict[Program, Floats] = {}
        while True:
            try:
                trials = search.send(outcome)  # type: ignore[arg-type]  # None begins
            except StopIteration as stop:
                short: Program = stop.value[0].program
                break
            outcome = self._tried(parts, place, trials, how, known)
        rest = Genomes.of([*parts[:place], *parts[place + 1 :]]).with_constants(known[short])
        others = [rest.program(index) for index in range(len(rest))]
        return [*others[:place], short, *others[place:]]

    def _arguments(self, parts: Sequence[Program], place: int) -> Floats:
        """Return what a sub-formula is called with on some rows, [arguments, rows and calls]."""
        found: list[list[Genomes]] = []
        genomes = [Genomes.of([part]) for part in parts]

        def call(index: int, arguments: list[Genomes]) -> Genomes:
            if index == place:
                found.append(arguments)
            return _substituted(genomes[index], arguments)

        self.template.expanded(1, call, genomes[self.functions :])
        tables = [
            [evaluate_program(argument.program(0), self._rows) for argument in arguments]
            for arguments in found
        ]
        table = np.hstack(tables) if tables else self._rows  # Parameters have no arguments.
        return table[:, np.isfinite(table).all(axis=0)]

    def _tried(
        self,
        parts: Sequence[Program],
        place: int,
        trials: Trials,
        how: Shortening,
        known: dict[Program, Floats],
    ) -> Outcomes:
        """Fit the parameters of candidates of one part, with the numbers of all other parts.

        ``known`` takes the latter by candidate, for those that have no parameters of their own.
        """
        others, start = self._lifted([*parts[:place], *parts[place + 1 :]])
        # Free numbers of a group are never the same in all groups.
        own = [
            lift(candidate) if self.grouped and not len(numbers) else (candidate, numbers)
            for candidate, numbers in zip(*trials, strict=True)
        ]
        behind = np.array([len(numbers) for _, numbers in own])
        blocks = [Genomes.of([candidate for candidate, _ in own])]
        for index, block in enumerate(others):
            everywhere = block[np.zeros(len(behind), np.int64)]
            free = everywhere.codes == PARAMETER
            everywhere.values[free] += np.repeat(behind, everywhere.sizes)[free]
            blocks.insert(index + (index >= place), everywhere)
        programs = list(self.template.filled(blocks).population())
        starts = [np.concatenate([numbers, start]) for _, numbers in own]
        used = [each[: one.parameters] for each, one in zip(starts, programs, strict=True)]
        left = seconds_until(how.ends)
        fit = how.client.optimize(
            how.data, programs, used, loss=how.loss, max_iterations=_SNAPPING, timeout=left
        )
        fitted = []
        rows = zip(*trials, behind, fit.parameters, starts, strict=True)
        for candidate, given, count, vector, begun in rows:
            numbers = np.concatenate([vector, begun[len(vector) :]])
            fitted.append(numbers[: len(given)])
            if not len(given):
                known[candidate] = numbers[count:]
        return fit.loss, fitted

    def _lifted(self, parts: Sequence[Program], free: bool = False) -> tuple[list[Genomes], Floats]:
        """Return parts with their constants as parameters, numbered through, and the constants."""
        together = Genomes.of(parts)
        chosen = together.codes == CONSTANT
        if free:
            chosen[chosen] = [is_free(value) for value in together.values[chosen].tolist()]
        codes = np.where(chosen, np.uint8(PARAMETER), together.codes)
        values = np.where(chosen, np.cumsum(chosen) - 1.0, together.values)
        made = Genomes(codes, values, together.starts)
        return [made[place : place + 1] for place in range(len(parts))], together.values[chosen]


class GroupedForm(Form):
    """Formulas a + b f whose numbers are those of a group of rows, unless they are short."""

    def __init__(self, rows: Floats) -> None:
        """Take some rows, [rows, variables]."""
        leaves = tuple((VARIABLE, float(place)) for place in range(rows.shape[1]))
        everything = Template(
            "f", (), {"f": rows.shape[1]}, (*leaves, (_FIRST_CALL, 0.0)), parameters=0
        )
        self._whole = TemplateForm(everything, rows, grouped=True)

    def shortened(self, program: Program, how: Shortening) -> Program:
        """Shorten a formula as the one function of a template."""
        return self._whole.shortened(self._whole.of_parts([program]), how)
