"""The text language: its words, the short forms of numbers, and programs as text and as LaTeX.

`warpfit.parse` reads it. The printers are driven by the operator table.

The short form of a number is an integer, a short decimal, a fraction or a multiple of pi or e. Of
each number there is a cost, by which formulas are compared: that of a token is 1, so a number of
one digit costs 1.25 with its token and one of many digits `FREE` + 1.
"""

from __future__ import annotations

import math
import re
import struct
from array import array
from collections import deque
from collections.abc import Container, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from string import Formatter
from typing import TYPE_CHECKING, Final

from warpfit.errors import list_of_texts
from warpfit.ops import BY_CODE, CONSTANT, OPERATORS, VARIABLE, Operator

if TYPE_CHECKING:
    from warpfit.ir import Program


# ------------------------------------------------------------------------- symbols, words and names

#: Operators by infix symbol.
INFIX: Final[Mapping[str, Operator]] = {
    row.symbol: row for row in OPERATORS.values() if row.symbol and row.arity == 2
} | {"**": OPERATORS["pow"]}
#: Operators by prefix symbol.
PREFIX: Final[Mapping[str, Operator]] = {
    row.symbol: row for row in OPERATORS.values() if row.symbol and row.arity == 1
}
#: Symbols that are words; a variable with such a name needs backticks.
WORDS: Final = frozenset(symbol for symbol in (*INFIX, *PREFIX) if symbol.isalpha())

#: Operators that are written as a power with this exponent.
WHOLE_POWERS: Final[Mapping[str, str]] = {"square": "2", "cube": "3"}

RIGHT_ASSOCIATIVE: Final = frozenset({"pow"})
#: Operators that do not chain: an operand that is a comparison needs parentheses.
COMPARISONS: Final = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})
#: Operators that can be called with two or more operands, which are combined from the left.
CHAINED: Final = frozenset({"add", "mul", "min", "max", "and", "or"})

#: Named constants; a variable of the same name takes precedence.
CONSTANTS: Final[Mapping[str, float]] = {
    **dict.fromkeys(("inf", "Inf", "infinity", "oo"), math.inf),
    **dict.fromkeys(("nan", "NaN"), math.nan),
    **dict.fromkeys(("e", "E"), math.e),
    **dict.fromkeys(("pi", "\u03c0"), math.pi),
}

#: Names of operators and standard macros in other languages and libraries.
ALIASES: Final[Mapping[str, str]] = {
    **{"plus": "add", "Add": "add", "subtract": "sub", "minus": "sub"},
    **{"multiply": "mul", "times": "mul", "Mul": "mul", "divide": "div", "truediv": "div"},
    **{"power": "pow", "Pow": "pow", "negative": "neg", "reciprocal": "inv"},
    **{"Abs": "abs", "fabs": "abs", "absolute": "abs", "sgn": "sign"},
    **{"ln": "log", "sqr": "square", "ceiling": "ceil"},
    **{"minimum": "min", "Min": "min", "maximum": "max", "Max": "max"},
    **{"arcsin": "asin", "arccos": "acos", "arctan": "atan", "arctan2": "atan2"},
    **{"less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge"},
    **{"equal": "eq", "not_equal": "ne"},
    **{"logical_and": "and", "logical_or": "or", "logical_not": "not"},
    **{"ifelse": "where", "ite": "where", "cond": "where", "select": "where"},
    **{"sigmoid": "logistic", "sig": "logistic", "expit": "logistic"},
    **{"arcsinh": "asinh", "arccosh": "acosh", "arctanh": "atanh"},
    **{"Mod": "mod", "remainder": "mod", "rint": "round"},
    **{"around": "round", "fix": "trunc", "degrees": "rad2deg", "radians": "deg2rad"},
    **{"Heaviside": "heaviside", "silu": "swish", "gauss": "gaussian", "clamp": "clip"},
    **{"loggamma": "lgamma", "gammaln": "lgamma"},
    **{"AQ": "aq", "analytic_quotient": "aq", "protectedDiv": "zdiv"},
}

#: Names of variables that need no backticks, unless they are among `WORDS`.
IDENTIFIER: Final = re.compile(r"[^\W\d]\w*")
#: Names of divisions that return 1 where the divisor is 0 in some programs, and 0 or the dividend
#: in others.
AMBIGUOUS_DIVISIONS: Final = frozenset(
    {"protected_div", "protected_division", "safe_div", "safeDiv"}
)
#: A variable or parameter by its position, counted from 1.
INDEXED: Final = re.compile(r"([xp])0*([1-9][0-9]{0,9})")

_SYMBOLS: Final = sorted(
    {symbol for symbol in (*INFIX, *PREFIX, "(", ")", ",") if not symbol.isalpha()},
    key=len,
    reverse=True,
)
#: The next token of a text, behind white space; a character that has no meaning is one, too.
TOKEN: Final = re.compile(
    r"\s*((?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|\#[0-9a-fA-F]{16}"
    rf"|{IDENTIFIER.pattern}"
    r"|`(?:[^`]|``)*`"
    rf"|{'|'.join(re.escape(symbol) for symbol in _SYMBOLS)}"
    r"|\S)"
)


# ------------------------------------------------------------- numbers as a publication prints them

#: Cost of a number that has no short form; a fit may change it.
FREE: Final = 2.0
#: Significant digits of fitted constants in texts to read.
DIGITS: Final = 6
#: Cost of a digit.
_DIGIT: Final = 0.25
#: Most significant digits of a short decimal.
_MOST_DIGITS: Final = 4
_LARGEST_DENOMINATOR: Final = 12
#: Numerators and integer factors of pi and e.
_LARGEST_NUMERATOR: Final = 99
#: Units and the denominators that occur with them.
_UNITS: Final = (("pi", math.pi, (1, 2, 3, 4, 6, 8)), ("e", math.e, (1, 2)))
#: Digits that a unit counts as, one more than the longest short decimal: it is for numbers that are
#: known so well that no decimal does. Others are close to a multiple of pi or e by chance.
_UNIT_DIGITS: Final = _MOST_DIGITS + 1
#: Part by which a number may differ from its short form, integers excepted.
_NEAR: Final = 0.1


@dataclass(frozen=True, slots=True)
class ShortForm:
    """A number that is written as it is, or as numerator / denominator times a unit."""

    value: float
    cost: float
    numerator: int = 0
    """0 for a number that is written as it is."""
    denominator: int = 1
    unit: str = ""
    """``"pi"``, ``"e"`` or nothing."""


def is_free(value: float) -> bool:
    """Tell whether a number is one that a fit may change, because it has no short form."""
    return short_form(value) is None


def cost(value: float) -> float:
    """Return the cost of a number's digits, in addition to its token."""
    form = short_form(value)
    return FREE if form is None else form.cost


@lru_cache(maxsize=4096)
def short_form(value: float) -> ShortForm | None:
    """Return the cheapest short form that is this number to the last bit; None without one."""
    if not math.isfinite(value):
        return ShortForm(value, _DIGIT)
    forms = [form for form in _forms_near(value) if form.value == value]
    return min(forms, key=lambda form: form.cost, default=None)


def shorter_numbers(value: float, *, units: bool = True) -> list[float]:
    """Return numbers near this one that cost less, the cheapest first; 0 is none of them.

    Args:
        value: the number.
        units: whether multiples of pi and e are among them.
    """
    own = cost(value)
    found = sorted(_forms_near(value), key=lambda form: (form.cost, abs(form.value - value)))
    found = [form for form in found if units or not form.unit]
    cheaper = [form.value for form in found if form.cost < own and form.value != 0.0]
    return list(dict.fromkeys(cheaper))


def rounded(value: float, digits: int) -> float:
    """Return a number to so many significant digits; one in short form as it is."""
    return float(f"{value:.{digits}g}") if is_free(value) else value


def _forms_near(value: float) -> Iterator[ShortForm]:
    for digits in range(1, _MOST_DIGITS + 1):
        yield ShortForm(float(f"{value:.{digits}g}"), _DIGIT * digits)
    if not 1e-3 < abs(value) < 1e6:
        return
    integer = round(value)
    if integer:
        yield ShortForm(float(integer), _DIGIT * len(str(abs(integer)).rstrip("0")))
    for largest in (2, 3, 4, 6, 9, _LARGEST_DENOMINATOR):
        fraction = Fraction(value).limit_denominator(largest)
        yield from _fraction(value, fraction.numerator, fraction.denominator, "", 1.0)
    for name, unit, denominators in _UNITS:
        for denominator in denominators:
            numerator = round(value / unit * denominator)
            if math.gcd(numerator, denominator) == 1:
                yield from _fraction(value, numerator, denominator, name, unit)


def _fraction(
    value: float, numerator: int, denominator: int, name: str, unit: float
) -> Iterator[ShortForm]:
    number = numerator * unit / denominator
    is_near = abs(number - value) <= _NEAR * abs(value)
    if not numerator or abs(numerator) > _LARGEST_NUMERATOR or not is_near:
        return
    digits = len(str(denominator)) if denominator > 1 else 0
    digits += len(str(abs(numerator))) if abs(numerator) > 1 or not name else 0
    digits += _UNIT_DIGITS if name else 0
    yield ShortForm(number, _DIGIT * digits, numerator, denominator, name)


# -------------------------------------------------------------------- programs as text and as LaTeX

#: Text in pieces, so that joining costs no copies, and the precedence of its outermost operator.
_Pieces = deque[str]
_Rendered = tuple[_Pieces, int]
#: Indices of the minus signs before a term, as a linked list.
_Signs = tuple[int, "_Signs"] | None

_ATOM: Final = 100
_NUMBER: Final = 99
_PRODUCT: Final = OPERATORS["mul"].precedence
_NEGATIVE: Final = OPERATORS["neg"].latex_precedence or _PRODUCT
_QUOTIENT: Final = OPERATORS["div"].latex_precedence or _PRODUCT
_NEGATION: Final = OPERATORS["neg"]
_POWER: Final = OPERATORS["pow"]
#: Codes of sum and difference by each other.
_OPPOSITE: Final = {
    OPERATORS[name].code: OPERATORS[other].code for name, other in (("add", "sub"), ("sub", "add"))
}

#: Functions whose argument may have either sign, and that of their results follows it, or does not.
_ODD: Final = frozenset(
    {
        *("sin", "tan", "asin", "atan", "sinh", "asinh", "tanh", "erf", "cbrt", "cube", "sign"),
        "round",
    }
)
_EVEN: Final = frozenset({"cos", "cosh", "abs", "square", "logabs", "sqrtabs"})
_EXP: Final = OPERATORS["exp"].code
#: Most tokens of a program that is rewritten to be read.
_MOST_READ: Final = 1_000

#: Mark before the token that `locate` looks for: a character that no name should contain.
_MARK: Final = "\ue000"

#: Names of letters that LaTeX has a command for; pi is a number.
_GREEK: Final = re.compile(
    "alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|rho|sigma|tau"
    "|upsilon|phi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Upsilon|Phi|Psi|Omega"
)

_LATEX_ESCAPES: Final = str.maketrans(
    {character: f"\\{character}" for character in "#$%&_{}"}
    | {"\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}"}
    | {"<": r"\textless{}", ">": r"\textgreater{}"}
)


def to_text(program: Program, names: Sequence[str] = (), digits: int | None = None) -> str:
    """Return the text of a program, with as few parentheses as possible.

    ``parse(to_text(program, names), names) == program``, to the last bit of each constant, but that
    a sum with a negative term is written, and read, as the difference of equal value: ``x1 - 2`` is
    the text of ``add(x1, -2)``, too. Variables beyond the names of the data set are written x1, x2,
    ....

    With ``digits`` the text is one to read: constants have so many significant digits at most, but
    for numbers in short form, fractions and multiples of pi and e are written as ``2/3`` and
    ``3*pi/2``, and the program is that of `readable`.
    """
    return _marked_text(program, list_of_texts(names), -1, digits)


def locate(program: Program, token: int, names: Sequence[str] = ()) -> tuple[str, int]:
    """Return the text of a program, as `to_text`, and the index of one of its tokens in it."""
    text = _marked_text(program, names, token)
    return text.replace(_MARK, ""), text.index(_MARK)


def _marked_text(
    program: Program, names: Sequence[str], token: int, digits: int | None = None
) -> str:
    """Return the text with `_MARK` before a token; without it for token -1."""
    taken = frozenset(names)
    program, places = _with_differences(readable(program) if digits else program)
    marked = -1 if token < 0 else places[token]
    tokens = iter(range(len(program)))

    def mark() -> str:
        return _MARK if next(tokens) == marked else ""

    def leaf(code: int, value: float) -> _Rendered:
        before = mark()
        if code == CONSTANT:
            form = short_form(value) if digits else None
            if digits and form is not None and form.numerator and form.unit not in taken:
                size = abs(form.numerator)
                text = form.unit if form.unit and size == 1 else f"{size}*{form.unit}".rstrip("*")
                text += f"/{form.denominator}" if form.denominator > 1 else ""
                text = f"-{text}" if form.numerator < 0 else text
            else:
                text = _constant(rounded(value, digits) if digits else value, taken)
            precedence = _PRODUCT if "/" in text or "*" in text else _NUMBER
            precedence = _NEGATION.precedence if text.startswith("-") else precedence
            return deque([before + text]), precedence
        if code == VARIABLE and value < len(names):
            name = names[int(value)]
            if not IDENTIFIER.fullmatch(name) or name in WORDS:
                name = f"`{name.replace('`', '``')}`"
        else:
            name = free_name("x" if code == VARIABLE else "p", int(value), taken)
        return deque([before + name]), _ATOM

    return "".join(program.fold(leaf, lambda row, operands: _text(row, operands, mark()))[0])


def _with_differences(program: Program) -> tuple[Program, Sequence[int]]:
    """Write sums with negative terms as differences, and differences with them as sums.

    A term is negative if it begins with a negation or a negative constant, as ``-(a*b)*c`` does, or
    if another factor or divisor does, as in ``a*-2``.

    Returns:
        The program, of equal value, and the index in it of each token of the given one. For a
        negation that is gone it is that of the sum whose sign has changed.
    """
    codes, values = program.codes.tolist(), program.values.tolist()
    places: Sequence[int] = range(len(codes))
    if _NEGATION.code not in codes and not any(
        code == CONSTANT and math.copysign(1.0, value) < 0.0
        for code, value in zip(codes, values, strict=True)
    ):
        return program, places
    # Indices of the minus signs with which each result on the stack begins, the first one first.
    stack: list[_Signs] = []
    gone: dict[int, int] = {}
    for place, (code, value) in enumerate(zip(codes, values, strict=True)):
        row = BY_CODE.get(code)
        if row is None:
            is_negative = code == CONSTANT and math.copysign(1.0, value) < 0.0
            stack.append((place, None) if is_negative else None)
            continue
        signs, sign = stack[-row.arity], stack[-1]
        if row.name in ("add", "sub"):
            while sign is not None:
                first, sign = sign
                if codes[first] == CONSTANT:
                    values[first] = -values[first]
                else:
                    gone[first] = place
                codes[place] = _OPPOSITE[codes[place]]
        del stack[-row.arity :]
        if row is _NEGATION:
            stack.append((place, signs))
        else:
            while row.name in ("mul", "div") and sign is not None:
                first, sign = sign
                signs = (first, signs)
            stack.append(signs if row.name in ("mul", "div") else None)
    kept = [place for place in range(len(codes)) if place not in gone]
    position = {place: index for index, place in enumerate(kept)}
    places = [position[gone.get(place, place)] for place in range(len(codes))]
    written = array("d", [values[place] for place in kept]).tobytes()
    return program._unchecked(bytes([codes[place] for place in kept]), written), places


@dataclass(slots=True)
class _Factors:
    """A product as it is read: a sign, the first factor, and what follows it."""

    negative: bool
    first: Program
    rest: list[tuple[str, Program]] = field(default_factory=list)
    """Further factors and divisors, each after "mul" or "div"."""

    @property
    def number(self) -> float | None:
        """Size of the number that this is; None if it is none."""
        is_number = not self.rest and len(self.first) == 1 and self.first.codes[0] == CONSTANT
        return float(self.first.values[0]) if is_number else None

    def program(self) -> Program:
        """Return the product as a program, the sign before its first factor."""
        whole = self.first
        if self.negative and len(whole) == 1 and whole.codes[0] == CONSTANT:
            whole = whole.constant(0.0 - float(whole.values[0]))
        elif self.negative:
            whole = whole.apply("neg", whole)
        for name, factor in self.rest:
            whole = whole.apply(name, whole, factor)
        return whole


def readable(program: Program) -> Program:
    """Return a program of equal values that is easier to read, and may be a little longer.

    Signs stand before products and odd functions, ``1/x`` in place of ``inv(x)``, and ``exp(-x/2)``
    in place of ``1/sqrt(exp(x))``, which has a value where ``exp(x)`` overflows, too. The sign of a
    zero is not kept. A program of more than `_MOST_READ` tokens stays as it is.
    """
    return program if len(program) > _MOST_READ else _factors(program).program()


def _factors(program: Program) -> _Factors:
    def leaf(code: int, value: float) -> _Factors:
        negative = code == CONSTANT and value == value and math.copysign(1.0, value) < 0.0
        return _Factors(negative, program._leaf(code, abs(value) if negative else value))

    return program.fold(leaf, _written)


def _written(row: Operator, operands: list[_Factors]) -> _Factors:
    """Return an operator over products as a product."""
    name, a, b = row.name, operands[0], operands[-1]
    if name == "neg":
        return replace(a, negative=not a.negative)
    if name == "inv":
        name, a = "div", _Factors(False, a.first.constant(1.0))
    if name in ("mul", "div"):
        factor = replace(b, negative=False).program()
        negative = a.negative != b.negative
        if name == "div" and factor.codes[-1] == _EXP:
            factor, name = factor.apply("exp", _divided(factor, -1.0)), "mul"
        if name == "mul" and a.number == 1.0:
            return replace(b if row.name == "mul" else _Factors(False, factor), negative=negative)
        if name == "mul" and b.negative and b.number not in (None, 1.0) and not a.rest:
            return _Factors(negative, factor, [("mul", a.first)])  # the number goes first
        rest = a.rest if b.number == 1.0 else [*a.rest, (name, factor)]
        return _Factors(negative, a.first, rest)
    if name == "exp" and a.number == 0.0:
        return _Factors(False, a.first.constant(1.0))
    if name in _ODD or name in _EVEN:
        inner = replace(a, negative=False).program()
        return _Factors(a.negative and name in _ODD, inner.apply(row, inner))
    inner = a.program()
    if name == "sqrt" and inner.codes[-1] == _EXP:
        return _Factors(False, inner.apply("exp", _divided(inner, 2.0)))
    return _Factors(False, inner.apply(row, *[operand.program() for operand in operands]))


def _divided(exponential: Program, divisor: float) -> Program:
    """Return the exponent of an exponential, divided by a number."""
    found = _factors(exponential._unchecked(exponential._codes[:-1], exponential._values[:-8]))
    number = found.first.constant(abs(divisor))
    rest = [("div", number)] if abs(divisor) != 1.0 else []
    return replace(
        found, negative=found.negative != (divisor < 0.0), rest=[*found.rest, *rest]
    ).program()


def _text(row: Operator, operands: list[_Rendered], mark: str) -> _Rendered:
    if row.name in WHOLE_POWERS:
        base = _enclosed(operands[0], _POWER.precedence + 1, "(", ")")
        return _joined([base, f" {mark}^ {WHOLE_POWERS[row.name]}"]), _POWER.precedence
    exponent = operands[-1][0]
    if row is _POWER and len(exponent) == 1:
        # Without a point it would read as square or cube.
        is_whole = exponent[0].removeprefix(_MARK) in WHOLE_POWERS.values()
        exponent[0] += ".0" if is_whole else ""
    if row.symbol is None:
        pieces: list[str | _Pieces] = [f"{mark}{row.name}("]
        for position, (operand, _) in enumerate(operands):
            pieces += [", ", operand] if position else [operand]
        return _joined([*pieces, ")"]), _ATOM
    # The least precedences that stand without parentheses.
    own = row.precedence
    needed = [own] if row.arity == 1 else [own, own + 1]
    if row.name in COMPARISONS:
        needed = [own + 1, own + 1]
    elif row.name in RIGHT_ASSOCIATIVE:
        needed = [own + 1, own]
    inner = [
        _enclosed(operand, wanted, "(", ")")
        for operand, wanted in zip(operands, needed, strict=True)
    ]
    if row.arity == 2:
        return _joined([inner[0], f" {mark}{row.symbol} ", inner[1]]), row.precedence
    # A minus right before a number would read as a negative constant.
    if row is _NEGATION and operands[0][1] == _NUMBER:
        inner = [_joined(["(", *inner, ")"])]
    symbol = f"{row.symbol} " if row.symbol.isalpha() else row.symbol
    return _joined([mark + symbol, *inner]), row.precedence


def _enclosed(operand: _Rendered, wanted: int, opening: str, closing: str) -> _Pieces:
    pieces, precedence = operand
    if precedence < wanted:
        pieces.appendleft(opening)
        pieces.append(closing)
    return pieces


def _joined(parts: Sequence[str | _Pieces]) -> _Pieces:
    """Join parts into the longest of them, so that deep programs take O(n log n) steps."""
    pieces = [deque([part]) if isinstance(part, str) else part for part in parts]
    longest = max(range(len(pieces)), key=lambda index: len(pieces[index]))
    whole = pieces[longest]
    for piece in reversed(pieces[:longest]):
        whole.extendleft(reversed(piece))
    for piece in pieces[longest + 1 :]:
        whole.extend(piece)
    return whole


def free_name(letter: str, index: int, taken: Container[str]) -> str:
    """Return x1, p1, ... by an index from 0; x01, x001, ... where columns have taken the name."""
    digits = str(index + 1)
    while letter + digits in taken:
        digits = "0" + digits
    return letter + digits


def _constant(value: float, taken: Set[str]) -> str:
    for name in ("pi", "e"):
        if abs(value) == CONSTANTS[name] and name not in taken:
            return name if value > 0.0 else f"-{name}"
    if math.isfinite(value):
        return repr(value).removesuffix(".0")
    bits = struct.pack(">d", value)
    for name in ("inf", "nan"):
        for sign, number in (("", CONSTANTS[name]), ("-", -CONSTANTS[name])):
            if bits == struct.pack(">d", number) and name not in taken:
                return sign + name
    return f"#{bits.hex()}"


def to_latex(program: Program, names: Sequence[str] = (), digits: int | None = None) -> str:
    """Return a program as LaTeX for mathematical mode; variables without names are x_{1}, ....

    With ``digits`` constants have so many significant digits at most, as in `to_text`.

    No two variables or parameters look the same: a column called p1 is p_{1}, and the first
    parameter p_{01} then.
    """
    columns: dict[str, None] = {}
    for name in list_of_texts(names):
        usual = _latex_text(name)
        parts = re.fullmatch(r"([A-Za-z]+?)(?:_?([0-9]+)|_([A-Za-z]+))?", name)
        if parts is not None and (len(parts[1]) == 1 or _GREEK.fullmatch(parts[1])):
            usual = parts[1] if len(parts[1]) == 1 else f"\\{parts[1]}"
            below = parts[2] or (rf"\text{{{parts[3]}}}" if parts[3] else "")
            usual += f"_{{{below}}}" if below else ""
        columns[usual if usual not in columns and usual != "e" else _latex_text(name)] = None
    known = list(columns)

    def leaf(code: int, value: float) -> _Rendered:
        if code == VARIABLE and value < len(known):
            return deque([known[int(value)]]), _ATOM
        if code != CONSTANT:
            letter, number = "x" if code == VARIABLE else "p", str(int(value) + 1)
            while f"{letter}_{{{number}}}" in columns:
                number = f"0{number}"
            return deque([f"{letter}_{{{number}}}"]), _ATOM
        value = rounded(value, digits) if digits else value
        if not math.isfinite(value):
            text = r"\mathrm{NaN}" if math.isnan(value) else r"\infty" if value > 0 else r"-\infty"
            return deque([text]), _NEGATIVE if value < 0 else _ATOM
        form = short_form(value)
        if form is None or not form.numerator:
            mantissa, _, exponent = repr(value).removesuffix(".0").partition("e")
            text = rf"{mantissa} \times 10^{{{int(exponent)}}}" if exponent else mantissa
            precedence = _NEGATIVE if text.startswith("-") else _PRODUCT if exponent else _ATOM
            return deque([text]), precedence
        size, unit = abs(form.numerator), form.unit.replace("pi", r"\pi")
        text = unit if unit and size == 1 else f"{size} {unit}".rstrip()
        precedence = _PRODUCT if text.endswith(unit) and size > 1 else _ATOM
        if form.denominator > 1:
            text, precedence = rf"\frac{{{text}}}{{{form.denominator}}}", _QUOTIENT
        if form.numerator < 0:
            text, precedence = f"-{text}", _NEGATIVE
        return deque([text]), precedence

    return "".join((readable(program) if digits else program).fold(leaf, _latex)[0])


def _latex(row: Operator, operands: list[_Rendered]) -> _Rendered:
    by_name = dict(zip(row.operands, operands, strict=True))
    parts: list[str | _Pieces] = []
    precedence = row.precedence if row.latex_precedence is None else row.latex_precedence
    for literal, name, wanted, _ in Formatter().parse(row.latex):
        pieces, own = by_name[name] if name else (_Pieces(), _ATOM)
        if own == _NEGATIVE and pieces[0].startswith("-"):
            # The minus of a term changes the sign before it, that of a first factor the product's.
            if literal.endswith(("+ ", "- ")):
                literal = literal[:-2] + ("- " if literal.endswith("+ ") else "+ ")
                pieces[0], own = pieces[0][1:], _PRODUCT
            elif not parts and row.name == "mul":
                own, precedence = _PRODUCT, _NEGATIVE
            elif name == "a" and row.name == "div":
                pieces[0], parts[0], precedence = pieces[0][1:], f"-{parts[0]}", _NEGATIVE
        parts += [literal] if literal else []
        parts += [_enclosed((pieces, own), int(wanted or 0), r"\left(", r"\right)")] if name else []
    return _joined(parts), precedence


def _latex_text(name: str) -> str:
    # Line ends, and characters that cannot be seen or turn the text around, are told by number.
    visible = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in name)
    return rf"\text{{{visible.translate(_LATEX_ESCAPES)}}}"
