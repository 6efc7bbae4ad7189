"""Many formulas as flat arrays, and what a search does to all of them at once.

As in a `Population` the postfix tokens of all formulas stand one after the other, but a macro is
one token. Operations are vectorised over the tokens; those over trees loop over their levels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from warpfit.expressions.reference import evaluate_program
from warpfit.expressions.subtrees import subtree_starts
from warpfit.ir import Batch, Population, Program
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
#: Tokens that are worked on at a time, about: what is made of them for a short time stays in the
#: caches, and in memory that the allocator does not give back to the system.
_BLOCK: Final = 1 << 16
#: Odd 64-bit numbers that mix hashes (from the fractional parts of square roots of primes).
_MIX: Final = np.array(
    [0x6A09E667F3BCC909, 0xBB67AE8584CAA73B, 0x3C6EF372FE94F82B, 0xA54FF53A5F1D36F1], np.uint64
)


@dataclass(frozen=True, slots=True, eq=False)
class Genomes:
    """Formulas without slope and intercept, which a search fits to each of them."""

    codes: Codes
    """Wire codes of all formulas, one after the other; [tokens]."""
    values: Floats
    """Index of a variable, value of a constant, else 0; [tokens]."""
    starts: Indices
    """Index of each formula's first token, and the total at the end; [formulas + 1]."""

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
    def sizes(self) -> Indices:
        """Tokens of each formula."""
        return np.diff(self.starts)

    @property
    def trees(self) -> Indices:
        """First token of the subtree that ends at each token; [tokens]."""
        parts = [subtree_starts(OPERANDS.take(block.codes)) for block in self.blocks()]
        starts = itertools.accumulate(map(len, parts), initial=0)
        return np.concatenate([part + start for part, start in zip(parts, starts, strict=False)])

    @property
    def constants(self) -> Indices:
        """Number of constants of each formula."""
        return self.totals(self.codes == CONSTANT)

    def totals(self, numbers: NDArray[Any]) -> Indices:
        """Add up whole numbers of the tokens, or count those that are True, by formula."""
        return np.diff(_bounds(numbers)[self.starts])

    def assembled(self, firsts: Indices, lengths: Indices) -> Genomes:
        """Return formulas that are made of pieces of the tokens.

        Args:
            firsts: index of the first token of each piece, [formulas, pieces].
            lengths: tokens of each piece; of the same shape.

        """
        starts = _bounds(lengths.sum(axis=1))
        parts = [self._gathered(firsts[part], lengths[part]) for part in _blocks(starts)]
        codes, values = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return Genomes(codes, values, starts)

    def _gathered(self, firsts: Indices, lengths: Indices) -> tuple[Codes, Floats]:
        bounds = _bounds(lengths)
        index = np.arange(bounds[-1])
        index += np.repeat(firsts.ravel() - bounds[:-1], lengths.ravel())
        return self.codes.take(index), self.values.take(index)

    def blocks(self) -> Iterator[Genomes]:
        """Yield views of a part of the formulas each."""
        for part in _blocks(self.starts):
            starts = self.starts[part.start : part.stop + 1]
            tokens = slice(starts[0], starts[-1])
            yield Genomes(self.codes[tokens], self.values[tokens], starts - starts[0])

    def reduced(self, kept: Mask) -> Genomes:
        """Return the formulas without some of their tokens; ``kept`` is [tokens]."""
        index = np.flatnonzero(kept)
        starts = np.searchsorted(index, self.starts)
        return Genomes(self.codes.take(index), self.values.take(index), starts)

    def population(self) -> Population:
        """Return the formulas with their constants, and with macros written out."""
        return Population(*MACROS.written_out(self.codes, self.values, self.sizes))

    def fit_batch(self, slopes: Floats, intercepts: Floats) -> Batch:
        """Return formulas a + b f whose constants, and b and a behind them, are parameters."""
        constant, counts = self.codes == CONSTANT, self.constants
        before = np.repeat(_bounds(counts)[:-1], self.sizes)
        codes = np.where(constant, np.uint8(PARAMETER), self.codes)
        values = np.where(constant, np.cumsum(constant) - 1.0 - before, self.values)
        parameters = [tokens(np.full(len(self), PARAMETER), counts + place) for place in (0, 1)]
        ends = [tokens(np.full(len(self), code)) for code in (MUL, ADD)]
        inner = Genomes(codes, values, self.starts)
        plain = packed([inner, parameters[0], ends[0], parameters[1], ends[1]]).population()
        numbers = [tokens(np.full(len(self), CONSTANT), part) for part in (slopes, intercepts)]
        return Batch(
            plain.codes,
            plain.values,
            plain.lengths,
            parameter_counts=(counts + 2).astype(np.uint32),
            parameters=packed([self.reduced(constant), *numbers]).values,
        )

    def with_constants(self, numbers: Floats) -> Genomes:
        """Return the formulas with other constants: those of all formulas in turn; flat."""
        values = self.values.copy()
        values[self.codes == CONSTANT] = numbers
        return Genomes(self.codes, values, self.starts)

    def program(self, row: int) -> Program:
        """Return one formula."""
        return self[row : row + 1].population()[0]


def _bounds(lengths: NDArray[Any]) -> Indices:
    bounds = np.zeros(lengths.size + 1, np.int64)
    np.cumsum(lengths, out=bounds[1:])
    return bounds


def _blocks(starts: Indices) -> list[slice]:
    """Divide formulas, given as in `Genomes`, into slices of about `_BLOCK` tokens."""
    ends = np.unique(np.searchsorted(starts, np.arange(_BLOCK, starts[-1], _BLOCK)))
    return [slice(*pair) for pair in itertools.pairwise([0, *ends.tolist(), len(starts) - 1])]


def joined(parts: Sequence[Genomes]) -> Genomes:
    """Return the formulas of all parts."""
    return Genomes(
        np.concatenate([part.codes for part in parts]),
        np.concatenate([part.values for part in parts]),
        _bounds(np.concatenate([part.sizes for part in parts])),
    )


def packed(blocks: Sequence[Genomes]) -> Genomes:
    """Put the tokens of each block's first formulas behind one another, those of the second, ..."""
    together = joined(blocks)
    shape = (len(blocks), -1)
    firsts, lengths = together.starts[:-1].reshape(shape), together.sizes.reshape(shape)
    return together.assembled(firsts.T, lengths.T)


def tokens(codes: Any, values: Any = 0.0) -> Genomes:
    """Return formulas of one token each, or none where the code is 0."""
    codes = np.asarray(codes, np.uint8)
    used = codes > 0
    return Genomes(codes[used], np.broadcast_to(values, codes.shape)[used] * 1.0, _bounds(used))


def fold(codes: Codes, leaves: NDArray[Any], join: Join) -> NDArray[Any]:
    """Compute a result for every subtree of every formula, the deepest level first.

    Args:
        codes: [tokens].
        leaves: result at each leaf, [tokens]; unused elsewhere.
        join: makes operators' results from their operands'; those of operands that an operator
            does not have are of any token.

    Returns:
        The result of the subtree that ends at each token, [tokens].

    """
    arities, found = OPERANDS.take(codes), leaves.copy()
    starts = subtree_starts(arities)
    operators = np.flatnonzero(arities > 0)
    levels = _ancestors(starts).take(operators).astype(np.uint16)
    operators = operators.take(np.argsort(levels, kind="stable")[::-1])
    last, own = operators - 1, codes.take(operators)
    middle, arity = starts.take(last) - 1, arities.take(operators)
    first = np.where(arity == 1, last, np.where(arity == 2, middle, starts[middle] - 1))
    second = np.where(arity == 2, last, middle)
    stop = 0
    for size in np.bincount(levels)[::-1].tolist():
        level = slice(stop, stop := stop + size)
        operands = (found.take(places[level]) for places in (first, second, last))
        found[operators[level]] = join(own[level], *operands)
    return found


def _ancestors(starts: Indices) -> Indices:
    """Count the tokens above each token in its tree."""
    places = np.arange(len(starts))
    return np.cumsum(np.bincount(starts, minlength=len(starts))) - places - 1


def hashes(genomes: Genomes) -> NDArray[np.uint64]:
    """Hash the structures: constants are equal, and operands of commutative operators may swap."""
    return np.concatenate([_hashed(block) for block in genomes.blocks()])


def _hashed(genomes: Genomes) -> NDArray[np.uint64]:
    codes = genomes.codes
    leaves = np.where(codes == VARIABLE, genomes.values + 2.0, 1.0).astype(np.uint64) * _MIX[0]
    leaves ^= leaves >> np.uint64(29)
    second = (OPERANDS > 1) * np.where(_COMMUTATIVE, np.uint64(1), _MIX[1])
    third = (OPERANDS > 2) * _MIX[2]

    def join(code: Codes, a: Any, b: Any, c: Any) -> Any:
        mixed = (a + b * second[code] + c * third[code] + code) * _MIX[3]
        return mixed ^ (mixed >> np.uint64(31))

    return fold(codes, leaves, join)[genomes.starts[1:] - 1]


def depths(genomes: Genomes) -> Indices:
    """Return the height of each formula's tree; 1 for a leaf."""
    above = _ancestors(genomes.trees)
    return np.asarray(np.maximum.reduceat(above, genomes.starts[:-1]) + 1)


def simplified(genomes: Genomes) -> Genomes:
    """Remove what a fit makes redundant: operators of constants alone, and what scales all of f.

    A subtree of constants becomes one constant. A sum, difference, product or quotient of f and a
    constant, or -f, becomes f, because slope and intercept are fitted anyway.
    """
    return joined([_simplified(block) for block in genomes.blocks()])


def _simplified(genomes: Genomes) -> Genomes:
    trees, variables = genomes.trees, _bounds(genomes.codes == VARIABLE)
    constant = variables[1:] == variables.take(trees)
    first, last = _unscaled(genomes, trees, constant)
    # Largest subtrees of constants: there is none behind that starts at the same token or before.
    ends = np.flatnonzero(constant & (OPERANDS.take(genomes.codes) > 0))
    earliest = np.minimum.accumulate(np.append(len(trees), trees[ends[::-1]]))[-2::-1]
    ends = ends[earliest > trees[ends]]
    starts, codes, values = trees[ends], genomes.codes.copy(), genomes.values.copy()
    parts = genomes.assembled(starts[:, None], (ends + 1 - starts)[:, None])
    codes[ends] = CONSTANT
    values[ends] = fold(parts.codes, parts.values, _compute)[parts.starts[1:] - 1]
    kept = np.zeros(len(codes) + 1, np.int8)  # differences
    for places, change in ((first, 1), (last + 1, -1), (starts, -1), (ends, 1)):
        kept[places] += change
    return Genomes(codes, values, genomes.starts).reduced(np.cumsum(kept[:-1], dtype=np.int8) > 0)


def _unscaled(genomes: Genomes, trees: Indices, constant: Mask) -> tuple[Indices, Indices]:
    """Return first and last token of what is left of each formula.

    The outermost operators that slope and intercept absorb are stripped, one after the other.

    Args:
        genomes: the formulas.
        trees: first token of the subtree that ends at each token.
        constant: whether that subtree has no variable.

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
    with np.errstate(all="ignore"):
        for code in np.unique(codes).tolist():
            rows, macro = codes == code, MACROS.with_code(code)
            operands = (a[rows], b[rows], c[rows])[: OPERANDS[code]]
            if code in BY_CODE:
                found[rows] = BY_CODE[code].numpy(*operands)
            elif macro is not None:
                program = Program(macro.codes, macro.values)
                found[rows] = evaluate_program(program, np.stack(operands))
    return found
