"""What a search does to one formula: draw, vary, simplify, check and hash it; for every engine.

A *genome* is a formula in postfix: a code and a value for each token, as `warpfit.ir.Program` has
them, without parameters: the numbers of a formula are constants. It lies in flat arrays, from some
place on, and has at most ``width`` tokens. A template has several functions; their formulas follow
one another in one genome. A *grammar* is an array of whole numbers that says what
formulas are made of.

The functions are `kernel_language.portable`: Numba compiles them for the CPU, and NVRTC what
`kernel_language.cuda_source` makes of them. They return the length of what they have written, 0 if
there is no such formula. ``tests/support/engines/plain_search.py`` says what they do in plain
Python.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any, Final

import numpy as np
from numba import types
from numba.extending import register_jitable
from numpy.typing import NDArray

from warpfit.errors import InvalidArgumentError
from warpfit.ops import CONSTANT, KERNEL_FUNCTIONS, OPERATORS, VARIABLE
from warpfit.searching import (
    BASE_UNITS,
    FIRST_DEFINITION,
    MOST_NESTINGS,
    Form,
    SearchRequest,
    arities_of,
)
from warpfit_server.engine.native import numba_cache
from warpfit_server.engine.search.kernel_language import (
    Bool,
    Bytes,
    Int,
    Integers,
    Real,
    Reals,
    Word,
    Words,
    portable,
)

#: Most tokens of a genome, functions and numbers of a template, and columns of formulas.
MOST_TOKENS: Final = 256
MOST_FUNCTIONS: Final = 64
MOST_COLUMNS: Final = 1024
#: Entries of a table from which operators are drawn, each as often as its weight says.
_DRAWS: Final = 256
_CODES: Final = 256

ADD, SUB, MUL, DIV = (OPERATORS[name].code for name in ("add", "sub", "mul", "div"))
NEG, INV, EXP, LOG = (OPERATORS[name].code for name in ("neg", "inv", "exp", "log"))

#: Fields of a grammar, int32, and how many numbers each has; the constants say where they begin.
_FIELDS: Final = {
    "arity": _CODES,  # operands of each code
    "complexity": _CODES,
    "allowed": _CODES,  # 1 for operators that formulas are made of
    "unary": _DRAWS,  # operators to draw from, by their number of operands
    "binary": _DRAWS,
    "ternary": _DRAWS,
    "any_operator": _DRAWS,
    "has_arity": 4,  # 1 if there are operators with so many operands
    "uses_most": _CODES,  # most uses of a code in a formula, or -1
    "limits_arguments": 1,
    "argument_most": 3 * _CODES,  # greatest size of each operand, or -1
    "nest_outer": MOST_NESTINGS,
    "nest_inner": MOST_NESTINGS,
    "nest_most": MOST_NESTINGS,
    "nestings": 1,  # number of rules of nesting
    "width": 1,  # most tokens of a genome
    "max_size": 1,
    "max_depth": 1,  # 0 for any
    "scaled": 1,  # 2 if slope and intercept are fitted, 1 if a slope is, so that f needs none
    "functions": 1,
    "has_units": 1,  # 1 if constants have any dimension, 2 if they are plain numbers; and 2 more
    # if units are those of the whole formula, which is composed
    "unit_kind": _CODES,  # what an operator does to dimensions: one of the numbers below
    "unit_power": _CODES,  # exponent of a power, as a residue
    "first_column": MOST_FUNCTIONS,  # of a function among ``columns``
    "column_count": MOST_FUNCTIONS,  # 0 for a function that is one constant
    "columns": MOST_COLUMNS,
}
(
    ARITY,
    COMPLEXITY,
    ALLOWED,
    UNARY,
    BINARY,
    TERNARY,
    ANY_OPERATOR,
    HAS_ARITY,
    USES_MOST,
    LIMITS_ARGUMENTS,
    ARGUMENT_MOST,
    NEST_OUTER,
    NEST_INNER,
    NEST_MOST,
    NESTINGS,
    WIDTH,
    MAX_SIZE,
    MAX_DEPTH,
    SCALED,
    FUNCTIONS,
    HAS_UNITS,
    UNIT_KIND,
    UNIT_POWER,
    FIRST_COLUMN,
    COLUMN_COUNT,
    COLUMNS,
) = accumulate([0, *_FIELDS.values()][:-1])
_PLACES: Final = {
    name: slice(first, first + count)
    for (name, count), first in zip(
        _FIELDS.items(), accumulate([0, *_FIELDS.values()]), strict=False
    )
}
#: Numbers of a grammar.
GRAMMAR_SIZE: Final = sum(_FIELDS.values())

#: What operators do to the dimensions of their operands. Those that are not listed take numbers,
#: and return one; those of kind 1 and 2 take operands of one dimension, which is that of the result
#: of kind 1. A power of a number is one.
_ALIKE, _COMPARED, _A_POWER, _PRODUCT, _QUOTIENT, _EXPONENT, _CHOICE, _FUSED = range(1, 9)
_UNIT_KINDS: Final = {
    _ALIKE: ("add", "sub", "min", "max", "neg", "abs", "floor", "ceil", "round", "relu", "mod"),
    _COMPARED: ("lt", "le", "gt", "ge", "eq", "ne", "atan2", "sign"),
    _PRODUCT: ("mul",),
    _QUOTIENT: ("div", "pdiv", "zdiv"),
    _EXPONENT: ("pow", "powabs"),
    _CHOICE: ("where",),
    _FUSED: ("fma",),
}
_POWERS: Final = {
    "square": 2.0, "cube": 3.0, "sqrt": 0.5, "sqrtabs": 0.5, "cbrt": 1 / 3, "inv": -1.0,
    "pinv": -1.0,
}  # fmt: skip
#: Dimension of a constant that may have any, and of what is not consistent. All others are residues
#: of a prime, whose arithmetic is exact also for roots, and has no overflow.
FREE, _WRONG = -1, -2
_PRIME: Final = 2**31 - 1
_RESIDUES: Final = np.uint64(_PRIME)
#: Dimensions of the base units; 7 generates all residues but 0.
_BASES: Final = tuple(pow(7, 10**6 * (base + 1), _PRIME) for base in range(BASE_UNITS))
#: Exponents of base units are fractions with at most this denominator.
_DENOMINATOR: Final = 10**6

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX2: Final = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S32 = (np.uint64(bits) for bits in (27, 30, 31, 32))
_S20, _S44 = np.uint64(20), np.uint64(44)
_LAST20, _LAST44 = np.uint64((1 << 20) - 1), np.uint64((1 << 44) - 1)
_ONE: Final = np.uint64(1)
_FULL_TURN: Final = 1 << 24
#: Tokens of which a random formula is made at most where one is put into another.
_GRAFT: Final = 6
#: Children that are made until one has not been tried, and one of so many fathers comes from
#: another island.
_ATTEMPTS: Final = 4
_MIGRANTS: Final = 400
#: Random formulas that are tried for a place.
_TRIALS: Final = 20
#: Greatest magnitude of a constant: its square is a number of float32.
LARGEST: Final = 1e15


# ------------------------------------------------------------------------------------ the grammar


def new_grammar(request: SearchRequest, columns: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """Return the grammar of a checked request, int32 [GRAMMAR_SIZE].

    Args:
        request: says operators, rules and form.
        columns: for each function that is searched for the columns that it may use.

    Raises:
        InvalidArgumentError: if sizes are beyond what a genome holds.
    """
    grammar, rules = np.zeros(GRAMMAR_SIZE, np.int32), request.rules
    one = {name: grammar[place] for name, place in _PLACES.items()}
    arities = arities_of(request.template, request.definitions)
    one["arity"][:] = arities
    one["complexity"][:] = 1
    one["uses_most"][:] = -1
    one["argument_most"][:] = -1
    known = {name: row.code for name, row in OPERATORS.items()}
    known |= {name: FIRST_DEFINITION + place for place, name in enumerate(request.definitions)}
    weights = {known[name]: weight for name, weight in request.operators.items()}
    codes = [code for code, weight in weights.items() if weight > 0]
    one["allowed"][codes] = 1
    names = {1: "unary", 2: "binary", 3: "ternary"}
    for arity, name in names.items():
        drawn = {code: weights[code] for code in codes if arities[code] == arity}
        one["has_arity"][arity] = bool(drawn)
        one[name][:] = _draws(drawn)
    one["any_operator"][:] = _draws({code: weights[code] for code in codes})
    for name, complexity in rules.complexities.items():
        one["complexity"][known[name]] = complexity
    for name, most in rules.counts.items():
        one["uses_most"][known[name]] = most
    one["limits_arguments"][:] = bool(rules.arguments)
    for name, sizes in rules.arguments.items():
        first = 3 * known[name]
        one["argument_most"][first : first + len(sizes)] = sizes
    for place, ((outer, inner), most) in enumerate(rules.nesting.items()):
        one["nest_outer"][place] = known[outer]
        one["nest_inner"][place] = known[inner]
        one["nest_most"][place] = most
    one["nestings"][:] = len(rules.nesting)
    # Numbers of a template are functions without arguments, and have no part in the size.
    most = rules.max_size + sum(not own for own in columns)
    if most > MOST_TOKENS:
        raise InvalidArgumentError(
            f"formulas of size {rules.max_size} may have more tokens than {MOST_TOKENS}, the most "
            "that a search holds",
            "FORMULAS_TOO_LARGE",
            f"Give a max_size of at most {MOST_TOKENS}",
            "max_size",
        )
    one["width"][:] = -(-max(most, 8) // 8) * 8
    one["max_size"][:], one["max_depth"][:] = most, rules.max_depth
    # Slope and intercept are around the template, not around one of its functions.
    one["scaled"][:] = 0 if request.template is not None else fitted_numbers(request)
    if request.units is not None:
        is_composed = request.template is not None or bool(request.definitions)
        one["has_units"][:] = 1 + request.units.dimensionless_constants + 2 * is_composed
        for kind, operators in _UNIT_KINDS.items():
            one["unit_kind"][[OPERATORS[name].code for name in operators]] = kind
        for name, power in _POWERS.items():
            one["unit_kind"][OPERATORS[name].code] = _A_POWER
            one["unit_power"][OPERATORS[name].code] = _residue(power)
    one["functions"][:] = len(columns)
    place = 0
    for function, own in enumerate(columns):
        one["first_column"][function], one["column_count"][function] = place, len(own)
        one["columns"][place : place + len(own)] = own
        place += len(own)
    return grammar


def fitted_numbers(request: SearchRequest) -> int:
    """Return how many numbers around f have a closed form: slope and intercept, a slope, or none.

    Of a target with a unit there is no intercept if constants are plain numbers.
    """
    if request.template is not None:
        return request.template.fitted
    if request.form is not Form.SCALED:
        return 0
    units = request.units
    if units is None or not units.dimensionless_constants or units.target is None:
        return 2
    return 1 if np.any(units.target) else 2


def new_units(request: SearchRequest, variables: int) -> NDArray[np.int32]:
    """Return the dimensions of the target and of each variable, int32 [1 + variables].

    A dimension is the sum of the exponents of the base units, each times another number, as in
    `warpfit.formulas.units`, but of residues of a prime. Two that differ are equal by chance once
    in some 10^9 cases. `FREE` is any.
    """
    found, units = np.full(1 + variables, FREE, np.int32), request.units
    if units is None:
        return found

    def dimension(exponents: NDArray[np.float64]) -> int:
        return sum(_residue(e) * base for e, base in zip(exponents, _BASES, strict=True)) % _PRIME

    different, places = np.unique(units.variables, axis=0, return_inverse=True)
    found[1:] = np.array([*map(dimension, different)])[places.reshape(-1)]
    # A slope that has any dimension takes f to that of the target.
    is_plain = request.form is Form.PLAIN and request.template is None
    if units.target is not None and (units.dimensionless_constants or is_plain):
        found[0] = dimension(units.target)
    return found


def _residue(number: float) -> int:
    """Return a fraction as a residue."""
    fraction = Fraction(number).limit_denominator(_DENOMINATOR)
    return fraction.numerator * pow(fraction.denominator, -1, _PRIME) % _PRIME


def _draws(weights: dict[int, float]) -> NDArray[np.int32]:
    """Return a table in which each code stands as often as its weight says, and at least once."""
    if not weights:
        return np.zeros(_DRAWS, np.int32)
    shares = np.array([*weights.values()]) / max(weights.values())
    wanted = shares / shares.sum() * _DRAWS
    counts = np.maximum(1, np.floor(wanted)).astype(np.int64)
    while missing := _DRAWS - counts.sum():
        step = 1 if missing > 0 else -1
        errors = np.where(counts + step > 0, step * (wanted - counts), -np.inf)
        counts[np.argmax(errors)] += step
    return np.repeat([*weights], counts).astype(np.int32)


# ---------------------------------------------------------------------------------- random numbers


@portable
def start_random(random: Words, seed: Word, generation: Word, formula: Word) -> None:
    """Begin the random numbers of a formula in a generation; none depend on threads or blocks.

    The generator is SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number
    generators").
    """
    random[0] = seed
    random[0] = mixed(random) ^ generation
    random[0] = mixed(random) ^ formula
    random[0] = mixed(random)


@portable
def mixed(random: Words) -> Word:
    """Return the next number of 64 random bits."""
    random[0] = random[0] + _GOLDEN
    word: Word = random[0]
    word = (word ^ (word >> _S30)) * _MIX1
    word = (word ^ (word >> _S27)) * _MIX2
    return word ^ (word >> _S31)


@portable
def draw(random: Words, below: Int) -> Int:
    """Draw a whole number from 0 to ``below`` - 1."""
    word: Word = mixed(random) >> _S32
    return np.int64((word * np.uint64(below)) >> _S32)


@portable
def uniform(random: Words) -> Real:
    """Draw a number from [0, 1)."""
    return draw(random, _FULL_TURN) * 5.9604644775390625e-08


@portable
def normal(random: Words) -> Real:
    """Draw a number from about a standard normal distribution: a sum of four uniform ones."""
    total: Real = uniform(random) + uniform(random)
    total = total + uniform(random) + uniform(random)
    return (total - 2.0) * 1.7320508075688772


# ---------------------------------------------------------------------------------- random formulas


@portable
def write_leaf(
    grammar: Integers, random: Words, codes: Bytes, values: Reals, place: Int, function: Int
) -> None:
    """Write a random variable of a function, or a constant: one of five."""
    count: Int = grammar[COLUMN_COUNT + function]
    if count == 0 or draw(random, 5) == 0:
        codes[place] = CONSTANT
        values[place] = 2.0 * normal(random)
    else:
        codes[place] = VARIABLE
        values[place] = grammar[COLUMNS + grammar[FIRST_COLUMN + function] + draw(random, count)]


@portable
def grow(
    grammar: Integers,
    random: Words,
    codes: Bytes,
    values: Reals,
    place: Int,
    target: Int,
    function: Int,
) -> Int:
    """Write a random formula of ``target`` tokens, or of somewhat fewer; return its length.

    It is written root first, and turned round.
    """
    length: Int = 0
    open_operands: Int = 1
    while open_operands > 0:
        room: Int = target - length - open_operands
        code: Int = 0
        if room > 0 and (open_operands == 1 or draw(random, 2) == 0):
            code = grammar[ANY_OPERATOR + draw(random, _DRAWS)]
            if code > 0 and grammar[ARITY + code] > room:
                code = grammar[UNARY + draw(random, _DRAWS)]
        if code > 0 and grammar[COLUMN_COUNT + function] > 0:
            codes[place + length] = code
            values[place + length] = 0.0
            open_operands += grammar[ARITY + code]
        else:
            write_leaf(grammar, random, codes, values, place + length, function)
        length += 1
        open_operands -= 1
    for first in range(length // 2):
        a: Int = place + first
        b: Int = place + length - 1 - first
        other: Int = codes[a]
        value: Real = values[a]
        codes[a] = codes[b]
        values[a] = values[b]
        codes[b] = other
        values[b] = value
    return length


@portable
def draw_formula(grammar: Integers, random: Words, codes: Bytes, values: Reals, place: Int) -> Int:
    """Write a random formula for each function; return the length of the genome."""
    functions: Int = grammar[FUNCTIONS]
    most: Int = min(grammar[WIDTH], grammar[MAX_SIZE]) // functions
    length: Int = 0
    for function in range(functions):
        target: Int = 1 + draw(random, max(1, min(16, most)))
        length += grow(grammar, random, codes, values, place + length, target, function)
    return length


# --------------------------------------------------------------------------------------- variation


def part_lengths(grammar: NDArray[np.int32], codes: NDArray[np.uint8]) -> list[int]:
    """Return the number of tokens of each function's formula in a genome."""
    lengths, missing, end = list[int](), 1, len(codes)
    for place in range(len(codes))[::-1]:
        missing += int(grammar[ARITY + codes[place]]) - 1
        if missing == 0:
            lengths.insert(0, end - place)
            end, missing = place, 1
    return lengths


@portable
def subtree_start(grammar: Integers, codes: Bytes, end: Int) -> Int:
    """Return the place of the first token of the subtree whose last token is at ``end``."""
    missing: Int = 1
    place: Int = end
    while True:
        missing += grammar[ARITY + codes[place]] - 1
        if missing == 0:
            return place
        place -= 1


@portable
def function_end(grammar: Integers, codes: Bytes, place: Int, length: Int, function: Int) -> Int:
    """Return the place of the root of a function's formula in a genome."""
    end: Int = place + length - 1
    for _ in range(grammar[FUNCTIONS] - 1 - function):
        end = subtree_start(grammar, codes, end) - 1
    return end


@portable
def copy_tokens(
    codes: Bytes, values: Reals, start: Int, stop: Int, to_codes: Bytes, to_values: Reals, to: Int
) -> Int:
    """Copy tokens; return the place behind the last one."""
    for token in range(start, stop):
        to_codes[to + token - start] = codes[token]
        to_values[to + token - start] = values[token]
    return to + stop - start


@portable
def vary(
    grammar: Integers,
    random: Words,
    codes: Bytes,
    values: Reals,
    mother: Int,
    mother_length: Int,
    father: Int,
    father_length: Int,
    child_codes: Bytes,
    child_values: Reals,
    child: Int,
) -> Int:
    """Write a child of two formulas; return its length, or 0 if it has no room.

    A subtree of the mother is replaced (by a subtree of the father, a random formula, or one of its
    own subtrees), joined with another formula by an operator, or put below one; or some of the
    constants change, or one token.
    """
    function: Int = draw(random, grammar[FUNCTIONS])
    if grammar[COLUMN_COUNT + function] == 0:  # fits change numbers, too
        function = draw(random, grammar[FUNCTIONS])
    last: Int = function_end(grammar, codes, mother, mother_length, function)
    first: Int = subtree_start(grammar, codes, last)
    end: Int = first + draw(random, last - first + 1)
    kind: Int = draw(random, 100)
    if grammar[COLUMN_COUNT + function] == 0:
        kind = 99
    if kind >= 82:
        copy_tokens(codes, values, mother, mother + mother_length, child_codes, child_values, child)
        change_tokens(
            grammar,
            random,
            child_codes,
            child_values,
            child + first - mother,
            child + last - mother,
            child + end - mother,
            function,
        )
        return mother_length
    joint: Int = 0  # which joins the subtree with what is put behind it, or is put above it
    if kind >= 52 and kind < 70 and grammar[HAS_ARITY + 2] == 1:
        joint = grammar[BINARY + draw(random, _DRAWS)]
        if draw(random, 2) == 0:
            end = last
    elif kind >= 70 and kind < 76 and grammar[HAS_ARITY + 1] == 1:
        joint = grammar[UNARY + draw(random, _DRAWS)]
    start: Int = subtree_start(grammar, codes, end)
    stop: Int = mother + mother_length
    room: Int = grammar[WIDTH] - mother_length + (end - start + 1)
    at: Int = copy_tokens(codes, values, mother, start, child_codes, child_values, child)
    if joint > 0:
        room = grammar[WIDTH] - mother_length - 1
        if room < 0:
            return 0
        at = copy_tokens(codes, values, start, end + 1, child_codes, child_values, at)
    if joint == 0 or grammar[ARITY + joint] == 2:
        is_grown: Int = draw(random, 2)
        if joint == 0:
            is_grown = np.int64(kind >= 40 and kind < 52)
        if kind >= 76:
            inner: Int = start + draw(random, end - start + 1)
            at = copy_tokens(
                codes,
                values,
                subtree_start(grammar, codes, inner),
                inner + 1,
                child_codes,
                child_values,
                at,
            )
        elif is_grown == 1:
            if room < 1:
                return 0
            target: Int = 1 + draw(random, min(room, _GRAFT))
            at += grow(grammar, random, child_codes, child_values, at, target, function)
        else:
            other: Int = function_end(grammar, codes, father, father_length, function)
            begin: Int = subtree_start(grammar, codes, other)
            other = begin + draw(random, other - begin + 1)
            begin = subtree_start(grammar, codes, other)
            if other + 1 - begin > room:
                return 0
            at = copy_tokens(codes, values, begin, other + 1, child_codes, child_values, at)
    if joint > 0:
        child_codes[at] = joint
        child_values[at] = 0.0
        at += 1
    return copy_tokens(codes, values, end + 1, stop, child_codes, child_values, at) - child


@portable
def change_tokens(
    grammar: Integers,
    random: Words,
    codes: Bytes,
    values: Reals,
    first: Int,
    last: Int,
    place: Int,
    function: Int,
) -> None:
    """Change one or all of the constants of a function's formula, or exchange one token."""
    constants: Int = 0
    for token in range(first, last + 1):
        if codes[token] == CONSTANT:
            constants += 1
    if constants > 0 and draw(random, 2) == 0:
        chosen: Int = draw(random, constants)
        is_alone: Int = draw(random, 3)
        # Steps of all sizes: their logarithms are spread evenly from 1 down to 1e-3.
        step: Real = 1.0
        for _ in range(draw(random, 11)):
            step = step * 0.5
        seen: Int = 0
        for token in range(first, last + 1):
            if codes[token] == CONSTANT:
                if is_alone > 0 and seen != chosen:
                    seen += 1
                    continue
                seen += 1
                value: Real = values[token] * (1.0 + step * normal(random))
                if draw(random, 4) == 0:
                    value = value + step * normal(random)
                values[token] = max(-LARGEST, min(LARGEST, value))
        return
    arity: Int = grammar[ARITY + codes[place]]
    code: Int = 0
    if arity == 1:
        code = grammar[UNARY + draw(random, _DRAWS)]
    elif arity == 2:
        code = grammar[BINARY + draw(random, _DRAWS)]
    elif arity == 3:
        code = grammar[TERNARY + draw(random, _DRAWS)]
    if arity == 0:
        write_leaf(grammar, random, codes, values, place, function)
    elif code > 0:
        codes[place] = code


# ---------------------------------------------------------------------------------- simplification


@register_jitable  # type: ignore[untyped-decorator]
def _select(condition: Any, x: Any, y: Any) -> Any:
    return float(x) if condition else float(y)


_PLAIN: Final = KERNEL_FUNCTIONS - {"abs", "mod", "tgamma", "digamma"}
_KNOWN: Final[dict[str, Any]] = {
    **{name: getattr(np, name, None) or getattr(math, name) for name in _PLAIN},
    **{"abs": abs, "mod": np.mod, "tgamma": math.gamma, "nan": math.nan, "select": _select},
}
_LINES: Final = [f"    if code == {row.code}: return {row.kernel}" for row in OPERATORS.values()]
exec("\n".join(["def apply_operator(code, a, b, c):", *_LINES, "    return nan"]), _KNOWN)
#: Computes the operator of a code. CUDA C++ has a function of the same name, a switch that
#: `engine/cuda/colony.py` writes.
apply_operator: Final = register_jitable(error_model="numpy")(_KNOWN["apply_operator"])


@portable
def are_equal(codes: Bytes, values: Reals, a: Int, b: Int, count: Int) -> Bool:
    """Return whether so many tokens from two places on are the same."""
    for token in range(count):
        if codes[a + token] != codes[b + token] or values[a + token] != values[b + token]:
            return False
    return True


@portable
def all_constants(codes: Bytes, start: Int, stop: Int) -> Bool:
    """Return whether all tokens of a range are constants."""
    for token in range(start, stop):
        if codes[token] != CONSTANT:
            return False
    return True


@portable
def simplify(
    grammar: Integers, codes: Bytes, values: Reals, place: Int, length: Int, work: Integers
) -> Int:
    """Simplify a genome in place; return its length, or 0 if a constant is no number.

    What has no variable becomes one constant; a constant operand of a sum or a product comes last,
    and two of them become one; x - x, x / x, x + 0, 1 x, 0 x and pairs of inverse functions go.
    Values may change in the last bits, and where a subexpression has none. If slope and intercept
    are fitted, f loses its own.

    Args:
        grammar: from `new_grammar`.
        codes: of the genome, from ``place`` on.
        values: likewise.
        place: of the first token.
        length: number of tokens.
        work: memory for as many numbers as there are tokens.
    """
    at: Int = place  # where the next token is written
    height: Int = 0  # operands that wait for their operator; ``work`` has their starts
    for read in range(place, place + length):
        code: Int = codes[read]
        value: Real = values[read]
        arity: Int = grammar[ARITY + code]
        start: Int = at
        if arity > 0:
            start = work[height - arity]
        is_written: Bool = True
        if arity > 0 and at - start == arity and all_constants(codes, start, at):
            b: Real = 0.0
            c: Real = 0.0
            if arity > 1:
                b = values[start + 1]
            if arity > 2:
                c = values[start + 2]
            value = apply_operator(code, values[start], b, c)
            code = CONSTANT
            at = start
        elif arity == 2:
            middle: Int = work[height - 1]
            commutes: Bool = code == ADD or code == MUL
            if commutes and middle == start + 1 and codes[start] == CONSTANT:
                moved: Real = values[start]
                for token in range(start, at - 1):
                    codes[token] = codes[token + 1]
                    values[token] = values[token + 1]
                middle = at - 1
                codes[middle] = CONSTANT
                values[middle] = moved
            if middle == at - 1 and codes[middle] == CONSTANT:
                number: Real = values[middle]
                if code == SUB and grammar[ALLOWED + ADD] == 1:
                    code = ADD
                    number = -number
                elif code == DIV and grammar[ALLOWED + MUL] == 1 and abs(number) > 1.0 / LARGEST:
                    code = MUL
                    number = 1.0 / number
                commutes = code == ADD or code == MUL
                if commutes and middle - start > 2 and codes[middle - 1] == code:
                    if codes[middle - 2] == CONSTANT:  # (x + a) + b is x + (a + b)
                        if code == ADD:
                            number = values[middle - 2] + number
                        else:
                            number = values[middle - 2] * number
                        at -= 2
                        middle -= 2
                if not (abs(number) <= LARGEST):
                    return 0
                values[middle] = number
                if (code == ADD and number == 0.0) or (code == MUL and number == 1.0):
                    at = middle
                    is_written = False
                elif code == MUL and number == 0.0:
                    code = CONSTANT
                    value = 0.0
                    at = start
            elif (code == SUB or code == DIV) and at - middle == middle - start:
                if are_equal(codes, values, start, middle, at - middle):
                    value = 0.0
                    if code == DIV:
                        value = 1.0
                    code = CONSTANT
                    at = start
        elif arity == 1:
            inner: Int = codes[at - 1]
            if ((code == NEG or code == INV) and inner == code) or (code == LOG and inner == EXP):
                at -= 1
                is_written = False
        if code == CONSTANT and not (abs(value) <= LARGEST):
            return 0
        height += 1 - arity
        work[height - 1] = start
        if is_written:
            codes[at] = code
            values[at] = value
            at += 1
    length = at - place
    if grammar[SCALED] > 0:
        length = without_scale(grammar, codes, values, place, length)
    return length


@portable
def without_scale(grammar: Integers, codes: Bytes, values: Reals, place: Int, length: Int) -> Int:
    """Take slope and intercept off a formula that has been simplified; return its length."""
    has_intercept: Bool = grammar[SCALED] == 2
    while length > 1:
        last: Int = place + length - 1
        code: Int = codes[last]
        is_sum: Bool = has_intercept and (code == ADD or code == SUB)
        if code == NEG:
            length -= 1
        elif (is_sum or code == MUL or code == DIV) and codes[last - 1] == CONSTANT:
            length -= 2
        elif has_intercept and code == SUB and codes[place] == CONSTANT and length > 2:
            if subtree_start(grammar, codes, last - 1) != place + 1:
                return length
            copy_tokens(codes, values, place + 1, last, codes, values, place)
            length -= 2
        else:
            return length
    return length


# ------------------------------------------------------------------------------- rules and hashes


@portable
def size_of(grammar: Integers, codes: Bytes, start: Int, stop: Int) -> Int:
    """Return the sum of the complexities of tokens."""
    size: Int = 0
    for token in range(start, stop):
        size += grammar[COMPLEXITY + codes[token]]
    return size


@portable
def keeps_rules(grammar: Integers, codes: Bytes, place: Int, length: Int, work: Integers) -> Bool:
    """Return whether a genome keeps to size, depth, counts, sizes of operands and nesting.

    ``work`` is memory for as many numbers as there are tokens.
    """
    if (
        length > grammar[WIDTH]
        or size_of(grammar, codes, place, place + length) > grammar[MAX_SIZE]
    ):
        return False
    # First and last token of the function's formula that ``token`` is in.
    first: Int = place + length
    last: Int = place + length - 1
    for back in range(length):
        token: Int = place + length - 1 - back
        code: Int = codes[token]
        if token < first:
            last = token
            first = subtree_start(grammar, codes, token)
        if grammar[USES_MOST + code] >= 0:
            uses: Int = 0
            for other in range(first, last + 1):
                if codes[other] == code:
                    uses += 1
            if uses > grammar[USES_MOST + code]:
                return False
        stop: Int = token
        for operand in range(grammar[ARITY + code] * grammar[LIMITS_ARGUMENTS]):
            most: Int = grammar[ARGUMENT_MOST + 3 * code + grammar[ARITY + code] - 1 - operand]
            start: Int = subtree_start(grammar, codes, stop - 1)
            if most >= 0 and size_of(grammar, codes, start, stop) > most:
                return False
            stop = start
    if grammar[MAX_DEPTH] > 0 and deepest(grammar, codes, place, length, 0, 0, work) < 0:
        return False
    for rule in range(grammar[NESTINGS]):
        if deepest(grammar, codes, place, length, 1, rule, work) < 0:
            return False
    return True


@portable
def deepest(
    grammar: Integers, codes: Bytes, place: Int, length: Int, kind: Int, rule: Int, work: Integers
) -> Int:
    """Return the most tokens that count on a path from a leaf to the root; -1 if too many do.

    Of kind 0 all tokens count, at most ``max_depth``; of kind 1 the inner operator of a rule of
    nesting, whose most hold below each use of the outer one.
    """
    height: Int = 0
    for token in range(place, place + length):
        code: Int = codes[token]
        most: Int = 0
        for operand in range(grammar[ARITY + code]):
            most = max(most, work[height - 1 - operand])
        if kind == 1 and code == grammar[NEST_OUTER + rule] and most > grammar[NEST_MOST + rule]:
            return -1
        if kind == 0 or code == grammar[NEST_INNER + rule]:
            most += 1
        if kind == 0 and most > grammar[MAX_DEPTH]:
            return -1
        height += 1 - grammar[ARITY + code]
        work[height - 1] = most
    return work[height - 1]


@portable
def common_unit(a: Int, b: Int) -> Int:
    """Return the dimension of both, `_WRONG` if they differ."""
    if a == FREE:
        return b
    if b == FREE or a == b:
        return a
    return _WRONG


@portable
def is_number(a: Int) -> Bool:
    """Return whether a dimension may be that of a plain number."""
    return a == FREE or a == 0


@portable
def unit_sum(a: Int, b: Int, factor: Int) -> Int:
    """Return a dimension plus another one times a factor, all residues."""
    return np.int64((np.uint64(a) + np.uint64(b) * np.uint64(factor)) % _RESIDUES)


@portable
def joined_units(grammar: Integers, code: Int, a: Int, b: Int, c: Int) -> Int:
    """Return the dimension of an operator's result from those of its operands.

    Operands that an operator does not have are `FREE`. `warpfit.formulas.units` has the same rules.
    """
    if a == _WRONG or b == _WRONG or c == _WRONG:
        return _WRONG
    kind: Int = grammar[UNIT_KIND + code]
    if kind == _ALIKE:
        return common_unit(a, b)
    if kind == _COMPARED:
        if common_unit(a, b) == _WRONG:
            return _WRONG
        return 0
    if kind == _A_POWER:
        if a == FREE:
            return FREE
        return unit_sum(0, a, grammar[UNIT_POWER + code])
    if kind == _PRODUCT or kind == _QUOTIENT or kind == _FUSED:
        found: Int = FREE
        if a != FREE and b != FREE:
            factor: Int = 1
            if kind == _QUOTIENT:
                factor = _PRIME - 1
            found = unit_sum(a, b, factor)
        if kind == _FUSED:
            return common_unit(found, c)
        return found
    if kind == _EXPONENT:
        if is_number(a) and is_number(b):
            return 0
        if b == FREE:
            return FREE
        return _WRONG
    if kind == _CHOICE:
        if is_number(a):
            return common_unit(b, c)
        return _WRONG
    if is_number(a) and is_number(b) and is_number(c):
        return 0
    return _WRONG


@portable
def keeps_units(
    grammar: Integers,
    units: Integers,
    codes: Bytes,
    values: Reals,
    place: Int,
    length: Int,
    work: Integers,
) -> Bool:
    """Return whether a formula has consistent units, and that of the target if it has one.

    ``units`` are from `new_units`, ``work`` is memory for as many numbers as there are tokens.
    """
    height: Int = 0
    constant: Int = FREE
    if grammar[HAS_UNITS] == 2 or grammar[HAS_UNITS] == 4:
        constant = 0
    for token in range(place, place + length):
        code: Int = codes[token]
        arity: Int = grammar[ARITY + code]
        found: Int = constant
        if code == VARIABLE:
            found = units[1 + np.int64(values[token])]
        elif arity > 0:
            b: Int = FREE
            c: Int = FREE
            if arity > 1:
                b = work[height - arity + 1]
            if arity > 2:
                c = work[height - arity + 2]
            found = joined_units(grammar, code, work[height - arity], b, c)
        if found == _WRONG:
            return False
        height += 1 - arity
        work[height - 1] = found
    return units[0] == FREE or common_unit(work[0], units[0]) != _WRONG


@portable
def structure_hash(
    grammar: Integers, codes: Bytes, values: Reals, place: Int, length: Int, work: Words
) -> Word:
    """Hash a genome; the numbers of its constants and the order of sums and products do not count.

    ``work`` is memory for as many words as there are tokens.
    """
    height: Int = 0
    for token in range(place, place + length):
        code: Int = codes[token]
        arity: Int = grammar[ARITY + code]
        word: Word = np.uint64(code) * _GOLDEN
        if code == VARIABLE:
            word = word + (np.uint64(np.int64(values[token])) + _ONE) * _MIX1
        for operand in range(arity):
            own: Word = work[height - arity + operand]
            if code != ADD and code != MUL:
                own = own * (np.uint64(operand + operand) + _ONE)
            word = word + own
        word = (word ^ (word >> _S30)) * _MIX1
        word = (word ^ (word >> _S27)) * _MIX2
        height += 1 - arity
        work[height - 1] = word ^ (word >> _S31)
    found: Word = work[0]
    for function in range(1, height):
        found = (found ^ (found >> _S31)) * _MIX2 + work[function]
    return found


@portable
def has_constants(codes: Bytes, place: Int, length: Int) -> Bool:
    """Return whether a genome has a constant."""
    for token in range(place, place + length):
        if codes[token] == CONSTANT:
            return True
    return False


# ----------------------------------------------------------------------------------- a generation


@portable
def is_allowed(
    grammar: Integers,
    units: Integers,
    codes: Bytes,
    values: Reals,
    place: Int,
    length: Int,
    work: Integers,
) -> Bool:
    """Return whether a genome keeps to the rules, and to its units if there are some."""
    if not keeps_rules(grammar, codes, place, length, work):
        return False
    if grammar[HAS_UNITS] == 0 or grammar[HAS_UNITS] > 2:
        return True
    return keeps_units(grammar, units, codes, values, place, length, work)


@portable
def first_formula(
    grammar: Integers,
    units: Integers,
    random: Words,
    codes: Bytes,
    values: Reals,
    place: Int,
    work: Integers,
) -> Int:
    """Write a random formula that is allowed; return 0 if none is found."""
    for _ in range(_TRIALS):
        length: Int = draw_formula(grammar, random, codes, values, place)
        length = simplify(grammar, codes, values, place, length, work)
        if length > 0 and is_allowed(grammar, units, codes, values, place, length, work):
            return length
    return 0


@portable
def tried_mark(word: Word, generation: Word) -> Word:
    """Return the mark of a hash in the table of tried structures.

    Of several structures for one place the one of the latest generation stays, so that the table
    does not depend on the order in which children are noted. There is room for 2^20 generations;
    those that follow count as the last one.
    """
    return (min(generation, _LAST20) << _S44) | (word >> _S20)


@portable
def tournament(random: Words, scores: Reals, first: Int, count: Int) -> Int:
    """Return the best of one to four formulas that are drawn from ``count`` ones."""
    best: Int = first + draw(random, count)
    for _ in range(draw(random, 4)):
        other: Int = first + draw(random, count)
        if scores[other] < scores[best]:
            best = other
    return best


@portable
def breed(
    grammar: Integers,
    units: Integers,
    random: Words,
    codes: Bytes,
    values: Reals,
    lengths: Integers,
    scores: Reals,
    formulas: Int,
    island: Int,
    formula: Int,
    child_codes: Bytes,
    child_values: Reals,
    hashes: Words,
    tried: Words,
    mask: Word,
    tries: Int,
    work: Integers,
    words: Words,
) -> Int:
    """Write the child that will compete for the place of a formula; return its length, or 0.

    A child whose structure has been tried lately is given up, and another one is made. With several
    ``tries`` one that has constants is given up once in so many times, and comes again with other
    numbers otherwise; with one its numbers are left to the fits.

    Args:
        grammar: from `new_grammar`.
        units: from `new_units`.
        random: state of the random numbers of this formula and generation.
        codes: of the population, ``width`` for each formula.
        values: likewise.
        lengths: of the population's genomes.
        scores: of the population; less is better.
        formulas: number of formulas of the population.
        island: number of formulas of an island.
        formula: whose place it is.
        child_codes: of all children, laid out as ``codes``.
        child_values: likewise.
        hashes: of the children's structures; that of this one is written.
        tried: hashes of structures, each in the place that its last bits say.
        mask: number of places of ``tried`` - 1.
        tries: of a structure with constants.
        work: memory for as many numbers as a genome has tokens.
        words: memory for as many words.
    """
    width: Int = grammar[WIDTH]
    first: Int = formula - formula % island
    place: Int = formula * width
    for _ in range(_ATTEMPTS):
        mother: Int = tournament(random, scores, first, island)
        father: Int = tournament(random, scores, first, island)
        if draw(random, _MIGRANTS) == 0:
            father = draw(random, formulas)
        if draw(random, 3) == 0:
            mother = formula
        length: Int = 0
        if lengths[mother] == 0 or lengths[father] == 0:  # no formula has been found for a place
            length = first_formula(
                grammar, units, random, child_codes, child_values, place, work
            )  # fmt: skip
        else:
            length = vary(
                grammar, random, codes, values, mother * width, lengths[mother], father * width,
                lengths[father], child_codes, child_values, place,
            )  # fmt: skip
            if length > 0:
                length = simplify(grammar, child_codes, child_values, place, length, work)
        if length == 0:
            continue
        if not is_allowed(grammar, units, child_codes, child_values, place, length, work):
            continue
        word: Word = structure_hash(grammar, child_codes, child_values, place, length, words)
        hashes[formula] = word
        if tries > 1 and has_constants(child_codes, place, length):
            word = word + np.uint64(draw(random, tries)) * _GOLDEN
        if (tried[np.int64(word & mask)] & _LAST44) != word >> _S20:
            return length
    return 0


@numba_cache.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def are_allowed(
    grammar: Integers,
    units: Integers,
    codes: Bytes,
    values: Reals,
    lengths: Integers,
    allowed: Bytes,
) -> None:
    """Note which of the formulas in rows of equal width keep to the rules and units."""
    width = codes.size // max(1, lengths.size)
    work = np.zeros(width, np.int32)
    for row in range(lengths.size):
        allowed[row] = is_allowed(
            grammar, units, codes, values, row * width, np.int64(lengths[row]), work
        )


def load() -> None:
    """Load the compiled function, or compile it."""
    numbers, octets = types.int32[::1], types.uint8[::1]
    given = numbers, numbers, octets, types.float32[::1], numbers, octets
    numba_cache.load(are_allowed, types.void(*given))
