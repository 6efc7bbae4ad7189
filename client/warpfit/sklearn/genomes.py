"""Many formulas as flat arrays, what a search does to all of them at once, and their variation.

As in a `Population` the postfix tokens of all formulas stand one after the other, but a macro is
one token. Operations are vectorised over the tokens; those over trees loop over their levels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from warpfit.expressions.reference import evaluate_program
from warpfit.ir import Population, Program, subtree_starts
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


def fold(genomes: Genomes, found: NDArray[Any], join: Join) -> NDArray[Any]:
    """Compute a result for every subtree of every formula, operands before their operator.

    Args:
        genomes: the formulas.
        found: result at each leaf, [tokens]; those of operators are written into it.
        join: makes operators' results from their operands'; those of operands that an operator
            does not have are of any token.

    Returns:
        The result of the subtree that ends at each token, [tokens].

    """
    spans = genomes.spans
    operators = np.flatnonzero(spans > 1)
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
    # The outermost operators that slope and intercept absorb are stripped, one after the other.
    first, last = genomes.starts[:-1].copy(), genomes.starts[1:] - 1
    active = np.flatnonzero(~constant[last])
    while len(active):
        end = last[active]
        root = genomes.codes[end]
        middle = trees[end - 1] - 1  # end of the first of two operands
        is_behind = _SCALING[root] & constant[end - 1]
        is_before = _SCALING[root] & ~is_behind & (root != DIV) & constant[middle]
        first[active] = np.where(is_before, middle + 1, first[active])
        last[active] = np.where(is_behind, middle, end - (is_before | (root == NEG)))
        active = active[last[active] < end]
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
