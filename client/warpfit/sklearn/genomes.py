"""Many formulas as flat arrays, what a search does to all of them at once, and their variation.

As in a `Population` the postfix tokens of all formulas stand one after the other, but a macro is
one token. Operations are vectorised over the tokens; those over trees loop over their levels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Final, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from warpfit.expressions.reference import evaluate_program
from warpfit.ir import Batch, Population, Program, subtree_starts
from warpfit.ops import BY_CODE, CONSTANT, OPERATORS, PARAMETER, VARIABLE
from warpfit.parse import MACROS

Floats: TypeAlias = NDArray[np.float64]
Codes: TypeAlias = NDArray[np.uint8]
Indices: TypeAlias = NDArray[np.int64]
Mask: TypeAlias = NDArray[np.bool_]
#: Called with codes [operators] and the results of their first, second and third operands.
Join: TypeAlias = Callable[[Codes, Any, Any, Any], Any]

ADD, SUB, MUL, DIV, NEG = (OPERATORS[n].code for n in ("add", "sub", "mul", "div", "neg"))
_COMMUTATIVE: Final = np.isin(
    np.arange(256), [OPERATORS[n].code for n in ("add", "mul", "min", "max", "eq", "and", "or")]
)
_SCALING: Final = np.isin(np.arange(256), [ADD, SUB, MUL, DIV])
#: Operands of each code, that of a macro too; 0 for leaves and behind the end.
OPERANDS: Final = MACROS.operands
#: Code that makes one tree of two, for formulas that have several; no program has it.
GLUE: Final = 15
OPERANDS[GLUE] = 2
#: Odd 64-bit numbers that mix hashes (from the fractional parts of square roots of primes).
_MIX: Final = np.array(
    [0x6A09E667F3BCC909, 0xBB67AE8584CAA73B, 0x3C6EF372FE94F82B, 0xA54FF53A5F1D36F1], np.uint64
)


@dataclass(slots=True, eq=False)
class Genomes:
    """Formulas without slope and intercept, which a search fits to each of them."""

    codes: Codes
    """Wire codes of all formulas, one after the other; [tokens]."""
    values: Floats
    """Index of a variable, value of a constant, else 0; [tokens]."""
    starts: Indices
    """Index of each formula's first token, and the total at the end; [formulas + 1]."""
    known: tuple[NDArray[Any], ...] = ()
    """`spans` and hash (or 0) of each subtree, once found; what is made of formulas keeps them."""

    @classmethod
    def of(cls, programs: Sequence[Program]) -> Self:
        """Lay out programs without parameters."""
        together = Population.of(programs)
        return cls(together.codes, together.values, together.starts)

    def __len__(self) -> int:
        """Count the formulas."""
        return len(self.starts) - 1

    def __getitem__(self, index: Any) -> Genomes:
        """Select formulas by a slice, a mask or indices."""
        return self.assembled(self.starts[:-1][index][:, None], self.sizes[index][:, None])

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """Codes, values, and what is known of the tokens."""
        return self.codes, self.values, *self.known

    def made(self, make: Callable[[NDArray[Any]], NDArray[Any]], starts: Indices) -> Genomes:
        """Return formulas whose tokens are made of these in the same way for each of the arrays."""
        codes, values, *known = map(make, self.arrays)
        return Genomes(codes, values, starts, tuple(known))

    @property
    def sizes(self) -> Indices:
        """Tokens of each formula."""
        return np.diff(self.starts)

    @property
    def spans(self) -> Indices:
        """Tokens of the subtree that ends at each token; [tokens]."""
        if not self.known:
            spans = np.arange(1, len(self.codes) + 1) - subtree_starts(OPERANDS.take(self.codes))
            self.known = spans, np.zeros(len(spans), np.uint64)
        return self.known[0]

    @property
    def constants(self) -> Indices:
        """Number of constants of each formula."""
        return self.totals(self.codes == CONSTANT)

    def totals(self, numbers: NDArray[Any]) -> Indices:
        """Add up whole numbers of the tokens, or count those that are True, by formula."""
        return np.diff(_bounds(numbers)[self.starts])

    def assembled(self, firsts: Indices, lengths: Indices) -> Genomes:
        """Return formulas that are made of pieces of the tokens, which keep what is known of them.

        Args:
            firsts: index of the first token of each piece, [formulas, pieces].
            lengths: tokens of each piece; of the same shape.

        """
        index, bounds = ranges(firsts.ravel(), lengths.ravel())
        return self.made(lambda array: array.take(index), bounds[:: lengths.shape[1]])

    def population(self) -> Population:
        """Return the formulas with their constants, and with macros written out."""
        return Population(*MACROS.written_out(self.codes, self.values, self.sizes))

    def fit_batch(self, slopes: Floats, intercepts: Floats) -> Batch:
        """Return formulas a + b f whose constants, and b and a behind them, are parameters."""
        counts, inner = self.constants, self.lifted()
        parameters = [tokens(np.full(len(self), PARAMETER), counts + place) for place in (0, 1)]
        ends = [tokens(np.full(len(self), code)) for code in (MUL, ADD)]
        plain = packed([inner, parameters[0], ends[0], parameters[1], ends[1]]).population()
        numbers = [tokens(np.full(len(self), CONSTANT), part) for part in (slopes, intercepts)]
        constant = self.codes == CONSTANT
        inner = self.made(lambda array: array[constant], _bounds(counts))
        return Batch(
            plain.codes,
            plain.values,
            plain.lengths,
            parameter_counts=(counts + 2).astype(np.uint32),
            parameters=packed([inner, *numbers]).values,
        )

    def lifted(self) -> Genomes:
        """Return the formulas with their constants, in their order, as parameters."""
        constant = self.codes == CONSTANT
        before = np.repeat(_bounds(self.constants)[:-1], self.sizes)
        codes = np.where(constant, np.uint8(PARAMETER), self.codes)
        values = np.where(constant, np.cumsum(constant) - 1.0 - before, self.values)
        return Genomes(codes, values, self.starts, self.known)

    def with_constants(self, numbers: Floats) -> Genomes:
        """Return the formulas with other constants: those of all formulas in turn; flat."""
        values = self.values.copy()
        values[self.codes == CONSTANT] = numbers
        return Genomes(self.codes, values, self.starts, self.known)

    def program(self, row: int) -> Program:
        """Return one formula."""
        return self[row : row + 1].population()[0]


def _bounds(lengths: NDArray[Any]) -> Indices:
    bounds = np.zeros(lengths.size + 1, np.int64)
    np.cumsum(lengths, out=bounds[1:])
    return bounds


def ranges(firsts: Indices, lengths: Indices) -> tuple[Indices, Indices]:
    """Return the numbers of ranges one after the other, and where each begins, and the total."""
    bounds = _bounds(lengths)
    numbers = np.repeat(firsts - bounds[:-1], lengths)
    numbers += np.arange(len(numbers))
    return numbers, bounds


def macros_of(genomes: Genomes) -> dict[int, str]:
    """Return the names of the macros of formulas by their codes, which other processes lack."""
    codes = set(genomes.codes.tolist())
    found = {code: MACROS.with_code(code) for code in codes}
    return {code: macro.name for code, macro in found.items() if macro is not None}


def recoded(genomes: Genomes, macros: Mapping[int, str]) -> Genomes:
    """Return formulas of another process, whose macros these were, with the codes of this one.

    Raises:
        LookupError: if a macro is not known here.

    """
    table = np.arange(256, dtype=np.uint8)
    for code, name in macros.items():
        macro = MACROS.find(name)
        if macro is None:
            raise LookupError(f"the function {name} is not defined")
        table[code] = macro.code
    return Genomes(table[genomes.codes], genomes.values, genomes.starts)


def joined(parts: Sequence[Genomes]) -> Genomes:
    """Return the formulas of all parts."""
    arrays = zip(*(part.arrays for part in parts), strict=False)  # What is known of all of them.
    codes, values, *known = map(np.concatenate, arrays)
    starts = _bounds(np.concatenate([part.sizes for part in parts]))
    return Genomes(codes, values, starts, tuple(known))


@dataclass(frozen=True, slots=True, eq=False)
class FormulaTable:
    """Formulas, and arrays with one entry for each of them, which are the fields of subclasses."""

    genomes: Genomes

    def __len__(self) -> int:
        """Count the formulas."""
        return len(self.genomes)

    def __getitem__(self, index: Any) -> Self:
        """Select formulas by a slice, a mask or indices."""
        return type(self)(*(getattr(self, entry.name)[index] for entry in fields(self)))

    @classmethod
    def merged(cls, tables: Sequence[Self]) -> Self:
        """Return the formulas of several tables, one table after the other."""
        columns = (
            np.concatenate([getattr(table, entry.name) for table in tables])
            for entry in fields(cls)[1:]
        )
        return cls(joined([table.genomes for table in tables]), *columns)


def packed(blocks: Sequence[Genomes]) -> Genomes:
    """Put the tokens of each block's first formulas behind one another, those of the second, ..."""
    together = joined(blocks)
    together.known = ()
    shape = (len(blocks), -1)
    firsts, lengths = together.starts[:-1].reshape(shape), together.sizes.reshape(shape)
    return together.assembled(firsts.T, lengths.T)


def tokens(codes: Any, values: Any = 0.0) -> Genomes:
    """Return formulas of one token each, or none where the code is 0."""
    codes = np.asarray(codes, np.uint8)
    used = codes > 0
    return Genomes(codes[used], np.broadcast_to(values, codes.shape)[used] * 1.0, _bounds(used))


def fold(
    genomes: Genomes, found: NDArray[Any], join: Join, unknown: Indices | None = None
) -> NDArray[Any]:
    """Compute a result for every subtree of every formula, operands before their operator.

    Args:
        genomes: the formulas.
        found: result at each leaf, [tokens]; those of operators are written into it.
        join: makes operators' results from their operands'; those of operands that an operator
            does not have are of any token.
        unknown: the operators without a result if not all of them are, in ascending order.

    Returns:
        The result of the subtree that ends at each token, [tokens].

    """
    spans = genomes.spans
    operators = np.flatnonzero(spans > 1) if unknown is None else unknown
    begun = np.cumsum(np.bincount(operators + 1 - spans.take(operators), minlength=len(spans)))
    above = begun.take(operators) - np.arange(len(operators))
    levels = above.max(initial=0) - above
    # NumPy sorts 16-bit integers by radix.
    operators = operators.take(np.argsort(levels.astype(np.uint16), kind="stable"))
    own, last = genomes.codes.take(operators), operators - 1
    arity = OPERANDS.take(own)
    second = np.where(arity > 2, last - spans.take(last), last) if (arity > 2).any() else last
    first = np.where(arity > 1, second - spans.take(second), last)
    ends = (first, last) if second is last else (first, second, last)
    stop = 0
    for size in np.bincount(levels).tolist():
        level = slice(stop, stop := stop + size)
        operands = [found.take(places[level]) for places in ends]
        found[operators[level]] = join(own[level], operands[0], operands[1], operands[-1])
    return found


def hashes(genomes: Genomes) -> NDArray[np.uint64]:
    """Hash the structures: constants are equal, and operands of commutative operators may swap."""
    spans, found = genomes.spans, genomes.known[1]
    unknown = np.flatnonzero(found == 0)
    codes, values = genomes.codes.take(unknown), genomes.values.take(unknown)
    leaves = np.where(codes == VARIABLE, values + 2.0, 1.0).astype(np.uint64) * _MIX[0]
    found[unknown] = leaves ^ (leaves >> np.uint64(29))
    second = (OPERANDS > 1) * np.where(_COMMUTATIVE, np.uint64(1), _MIX[1])
    third = (OPERANDS > 2) * _MIX[2]

    def join(code: Codes, a: Any, b: Any, c: Any) -> Any:
        mixed = a + b * second.take(code) + code
        mixed = (mixed if c is b else mixed + c * third.take(code)) * _MIX[3]
        return mixed ^ (mixed >> np.uint64(31))

    fold(genomes, found, join, unknown[spans.take(unknown) > 1])
    return found.take(genomes.starts[1:] - 1)


def depths(genomes: Genomes) -> Indices:
    """Return the height of each formula's tree; 1 for a leaf."""
    behind = np.arange(1, len(genomes.codes) + 1)
    above = np.cumsum(np.bincount(behind - genomes.spans, minlength=len(behind))) - behind
    return np.asarray(np.maximum.reduceat(above, genomes.starts[:-1]) + 1)


def simplified(genomes: Genomes) -> Genomes:
    """Remove what a fit makes redundant: operators of constants alone, and what scales all of f.

    A subtree of constants becomes one constant. A sum, difference, product or quotient of f and a
    constant, or -f, becomes f, because slope and intercept are fitted anyway.
    """
    constant, spans, end = genomes.codes == CONSTANT, genomes.spans, genomes.starts[1:] - 1
    root, middle = genomes.codes[end], end - 1 - spans[end - 1]
    first = constant.take(middle, mode="clip")  # Leaves have no operands.
    concerned = (root == NEG) | _SCALING[root] & (constant[end - 1] | first & (root != DIV))
    # Operators behind two constants, or of one; with three operands there may be a variable.
    behind = np.flatnonzero(constant[:-1]) + 1
    span = spans[behind]
    folds = behind[(span == 2) | (span > 2) & constant[behind - 2]]
    concerned[np.searchsorted(genomes.starts, folds, "right") - 1] = True
    rows, sizes, kept = np.flatnonzero(concerned), genomes.sizes, np.ones(len(constant), bool)
    short = _simplified(genomes[rows])
    left_out, _ = ranges(genomes.starts[rows] + short.sizes, sizes[rows] - short.sizes)
    kept[left_out], sizes[rows] = False, short.sizes
    made = genomes.made(lambda array: array[kept], _bounds(sizes))
    places, _ = ranges(made.starts[rows], short.sizes)
    for target, source in zip(made.arrays, short.arrays, strict=True):
        target[places] = source
    return made


def _simplified(genomes: Genomes) -> Genomes:
    trees = np.arange(1, len(genomes.codes) + 1) - genomes.spans  # First token of each subtree.
    variables = _bounds(genomes.codes == VARIABLE)
    constant = variables[1:] == variables.take(trees)
    first, last = _unscaled(genomes, trees, constant)
    # Largest subtrees of constants: there is none behind that starts at the same token or before.
    ends = np.flatnonzero(constant & (genomes.spans > 1))
    earliest = np.minimum.accumulate(np.append(len(trees), trees[ends[::-1]]))[-2::-1]
    ends = ends[earliest > trees[ends]]
    starts, made = trees[ends], genomes.made(np.copy, genomes.starts)
    parts = genomes.assembled(starts[:, None], genomes.spans[ends, None])
    made.codes[ends] = CONSTANT
    with np.errstate(all="ignore"):
        made.values[ends] = fold(parts, parts.values, _compute)[parts.starts[1:] - 1]
    kept = np.zeros(len(trees), bool)
    kept[ranges(first, last + 1 - first)[0]] = True
    kept[ranges(starts, ends - starts)[0]] = False
    before = _bounds(kept)
    made = made.made(lambda array: array[kept], before.take(genomes.starts))
    spans = np.arange(1, len(made.codes) + 1) - before.take(trees[kept])
    made.known = spans, made.known[1] * (spans == made.spans)
    return made


def _unscaled(genomes: Genomes, trees: Indices, constant: Mask) -> tuple[Indices, Indices]:
    """Return first and last token of what is left of each formula.

    The outermost operators that slope and intercept absorb are stripped, one after the other;
    ``constant`` says whether the subtree that ends at each token has no variable.
    """
    first, last = genomes.starts[:-1].copy(), genomes.starts[1:] - 1
    active = np.flatnonzero(~constant[last])
    while len(active):
        end = last[active]
        root = genomes.codes[end]
        middle = trees[end - 1] - 1  # end of the first of two operands
        after = _SCALING[root] & constant[end - 1]
        before = _SCALING[root] & ~after & (root != DIV) & constant[middle]
        first[active] = np.where(before, middle + 1, first[active])
        last[active] = np.where(after, middle, end - (before | (root == NEG)))
        active = active[last[active] < end]
    return first, last


def _compute(codes: Codes, a: Floats, b: Floats, c: Floats) -> Floats:
    found = np.zeros(len(codes))
    for code in set(codes.tolist()):
        rows, macro = codes == code, MACROS.with_code(code)
        operands = [operand[rows] for operand in (a, b, c)[: OPERANDS[code]]]
        if code in BY_CODE:
            found[rows] = BY_CODE[code].numpy(*operands)
        elif macro is not None:
            found[rows] = evaluate_program(Program(macro.codes, macro.values), np.stack(operands))
    return found


#: Chance that a drawn leaf is a constant, and that this constant is 1.
_CONSTANT_CHANCE: Final = 0.2
_ONE_CHANCE: Final = 0.5
#: Chance that a drawn operator has one operand, if there are others.
_UNARY_CHANCE: Final = 0.3
#: Chance that a formula is joined as a whole, not one of its parts.
_WHOLE_CHANCE: Final = 0.5
#: Rounds of growth of a drawn formula, each taken with a chance.
_ROUNDS: Final = 5
_GROWTH_CHANCE: Final = 0.6
#: Small formulas that are drawn at a time.
_STOCK: Final = 1 << 12
#: Chances of the kinds of offspring.
_KINDS: Final = {
    "replace by a part of the other parent": 0.3,
    "join with a part of the other parent": 0.2,
    "replace by a drawn part": 0.1,
    "join with a drawn part": 0.12,
    "hoist": 0.1,
    "substitute": 0.18,
}
_CROSS, _JOIN, _GRAFT, _EXTEND, _HOIST, _SUBSTITUTE = range(len(_KINDS))


@dataclass
class Breeder:
    """Draws formulas and varies them."""

    rng: np.random.Generator
    operators: tuple[int, ...]
    """Wire codes to draw from."""
    variables: int
    width: int
    """Most tokens of a formula."""

    def __post_init__(self) -> None:
        """Begin with an empty stock of small formulas, of which many are drawn at a time."""
        self._stock, self._used = tokens([]), 0
        np.empty(1 << 21)  # Once it is freed, the C library keeps the memory of smaller arrays.

    @cached_property
    def _codes(self) -> Codes:
        return np.array(self.operators, np.uint8)

    @cached_property
    def _operator_weights(self) -> Floats:
        """Chance of each operator: those of one operand share a fixed part."""
        unary = OPERANDS[self._codes] == 1
        if unary.all() or not unary.any():
            return np.full(len(unary), 1.0 / len(unary))
        others = np.count_nonzero(~unary)
        chances = (_UNARY_CHANCE / (len(unary) - others), (1 - _UNARY_CHANCE) / others)
        return np.where(unary, *chances)

    def first(self, count: int) -> Genomes:
        """Draw formulas for a first generation, or immigrants; simplified."""
        return simplified(self._grown(count))

    def offspring(self, genomes: Genomes, mothers: Indices, fathers: Indices) -> Genomes:
        """Cross each pair of parents, or mutate the mother, also where a child would be too long.

        Args:
            genomes: the population.
            mothers: rows of the first parents, [pairs].
            fathers: rows of the second ones.

        """
        count = len(mothers)
        kind = self.rng.choice(len(_KINDS), count, p=list(_KINDS.values()))
        joins, grafts = (kind == _JOIN) | (kind == _EXTEND), (kind == _GRAFT) | (kind == _EXTEND)
        donors = np.where(kind == _HOIST, mothers, fathers)
        donors[grafts] = len(genomes) + self._drawn(int(grafts.sum()))
        source = joined([genomes, self._stock])
        whole = joins & (self.rng.random(count) < _WHOLE_CHANCE)
        hole = np.where(whole, source.starts[mothers + 1] - 1, self._positions(source, mothers))
        inner = hole - (self.rng.random(count) * source.spans.take(hole)).astype(np.int64)
        part = np.where(kind == _HOIST, inner, self._positions(source, donors))
        part = np.where(kind == _GRAFT, source.starts[donors + 1] - 1, part)
        tails = np.where(joins, self._operator(count), 0)
        children, places = self._spliced(source, mothers, hole, part, tails, kind != _SUBSTITUTE)
        self._substitute(children, places)
        return simplified(children)

    def _drawn(self, count: int) -> Indices:
        """Return rows of the stock that have not been used."""
        self._used += count
        if self._used > len(self._stock):
            self._stock, self._used = self._grown(max(count, _STOCK), rounds=2), count
        return np.arange(self._used - count, self._used)

    def _grown(self, count: int, rounds: int = _ROUNDS) -> Genomes:
        """Draw leaves, and join random parts of them with further leaves, round by round."""
        grown, everybody = self._leaves(count), np.arange(count)
        for _ in range(rounds):
            source, hole = joined([grown, self._leaves(count)]), self._positions(grown, everybody)
            grows = self.rng.random(count) < _GROWTH_CHANCE
            leaf, tails = source.starts[count:-1], self._operator(count)
            grown, _ = self._spliced(source, everybody, hole, leaf, tails, grows)
        return grown

    def _spliced(
        self,
        source: Genomes,
        base: Indices,
        hole: Indices,
        part: Indices,
        tails: Codes,
        wanted: Mask,
    ) -> tuple[Genomes, Indices]:
        """Replace a subtree of formulas by a part of others, or join the two by an operator.

        Args:
            source: the formulas, and those that the parts come from.
            base: rows of the formulas to change, [formulas].
            hole: last token of each formula's subtree.
            part: last token of each part.
            tails: operator that joins subtree and part, in either order, whose further operands are
                all the part; or 0, and the part replaces the subtree.
            wanted: formulas that are changed.

        Returns:
            The formulas, and a drawn token of each that is not changed: not wanted, or too long.

        """
        old, length, joins = source.spans[hole], source.spans[part], tails > 0
        first, behind = source.starts[base], source.starts[base + 1]
        copies = np.where(joins, OPERANDS[tails] - 1, 1)
        new = copies * length + joins * (old + 1)
        made = wanted & (behind - first + new - old <= self.width)
        hole = np.where(made, hole, self._positions(source, base))
        ahead = joins & (self.rng.random(len(base)) < 0.5)
        start, donor = hole + 1 - old, part + 1 - length
        # An operator takes the place of the last token before the rest, which comes once more.
        rest = hole + 1 - joins
        before = np.where(made, np.where(ahead | ~joins, start, hole + 1), behind) - first
        sizes = (length * (copies > 0), length * (copies > 1), old * ahead, behind - rest)
        firsts = np.stack([first, donor, donor, start, rest], axis=1)
        lengths = np.stack([before, *(made * size for size in sizes)], axis=1)
        children = source.assembled(firsts, lengths)
        end = children.starts[1:] + hole - behind
        _widen(children, end, made * (new - old))
        top, joins = end[made & joins], made & joins
        children.codes[top], children.values[top] = tails[joins], 0.0
        children.spans[top] = new[joins]
        return children, end[~made]

    def _leaves(self, count: int) -> Genomes:
        known = np.ones(count, np.int64), np.zeros(count, np.uint64)
        return Genomes(*self._leaf(count), np.arange(count + 1), known)

    def _leaf(self, count: int) -> tuple[Codes, Floats]:
        """Draw variables and constants."""
        constant = self.rng.random(count) < _CONSTANT_CHANCE
        ones = self.rng.random(count) < _ONE_CHANCE
        number = np.where(ones, 1.0, self.rng.normal(size=count))
        variable = self.rng.integers(self.variables, size=count)
        codes = np.where(constant, np.uint8(CONSTANT), np.uint8(VARIABLE))
        return codes, np.where(constant, number, variable)

    def _operator(self, count: int) -> Codes:
        return self.rng.choice(self._codes, count, p=self._operator_weights)

    def _positions(self, genomes: Genomes, rows: Indices) -> Indices:
        """Draw one token of each of some formulas."""
        first, behind = genomes.starts[rows], genomes.starts[rows + 1]
        return first + (self.rng.random(len(rows)) * (behind - first)).astype(np.int64)

    def _substitute(self, genomes: Genomes, place: Indices) -> None:
        """Put other tokens with as many operands in the place of some, in place."""
        old = genomes.codes[place]
        fresh, values = self._leaf(len(place))
        # A constant is as often moved as replaced.
        moved = (old == CONSTANT) & (self.rng.random(len(place)) < 0.5)
        nudged = genomes.values[place] * self.rng.normal(1.0, 0.5, len(place))
        fresh[moved], values[moved] = CONSTANT, nudged[moved]
        for arity in {*OPERANDS[old].tolist()} - {0}:
            same = OPERANDS[old] == arity
            peers = self._codes[OPERANDS[self._codes] == arity]
            # Guesses and pairs have operators to which none that is drawn is a peer: they stay.
            peers = peers if len(peers) else old[same]
            fresh[same], values[same] = self.rng.choice(peers, int(same.sum())), 0.0
        genomes.codes[place], genomes.values[place] = fresh, values


def _widen(genomes: Genomes, ends: Indices, change: Indices) -> None:
    """Correct what is known of all that contains one subtree of each formula, which has grown."""
    spans, hashes = genomes.known
    behind = genomes.starts[1:] - 1 - ends
    index, rows = ranges(ends + 1, behind)[0], np.repeat(np.arange(len(ends)), behind)
    above = spans.take(index) > index - ends.take(rows)
    index, rows = index[above], rows[above]
    spans[index] += change.take(rows)
    hashes[index] = hashes[ends] = 0
