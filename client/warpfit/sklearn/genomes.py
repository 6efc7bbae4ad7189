"""Many formulas as two matrices, and what a search does to all of them at once.

A row holds the postfix tokens of one formula, as in a `Program`: wire codes, and the index of a
variable or the value of a constant. Rows shorter than the matrix end in code 0. Every operation
loops over the columns, which are few, and is vectorised over the formulas, which are many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from warpfit.expressions.reference import evaluate_program
from warpfit.ir import Batch, Population, Program
from warpfit.ops import BY_CODE, CONSTANT, OPERATORS, PARAMETER, VARIABLE
from warpfit.parse import MACROS

Floats: TypeAlias = NDArray[np.float64]
Codes: TypeAlias = NDArray[np.uint8]
Indices: TypeAlias = NDArray[np.int64]
Mask: TypeAlias = NDArray[np.bool_]
#: Called with codes [formulas] and the results of their first, second and third operands.
Join: TypeAlias = Callable[[Codes, Any, Any, Any], Any]

ADD, SUB, MUL, DIV, NEG = (OPERATORS[n].code for n in ("add", "sub", "mul", "div", "neg"))
_COMMUTATIVE: Final = np.isin(
    np.arange(256), [OPERATORS[n].code for n in ("add", "mul", "min", "max", "eq", "and", "or")]
)
#: Operands of each code, that of a macro too; 0 for leaves and behind the end.
OPERANDS: Final = MACROS.operands
#: Odd 64-bit numbers that mix hashes (from the fractional parts of square roots of primes).
_MIX: Final = np.array(
    [0x6A09E667F3BCC909, 0xBB67AE8584CAA73B, 0x3C6EF372FE94F82B, 0xA54FF53A5F1D36F1], np.uint64
)


@dataclass(frozen=True, slots=True, eq=False)
class Genomes:
    """Formulas without slope and intercept, which a search fits to each of them."""

    codes: Codes
    """Wire codes, 0 behind the end; [formulas, width]."""
    values: Floats
    """Index of a variable, value of a constant, else 0; [formulas, width]."""

    @classmethod
    def of(cls, programs: Sequence[Program], width: int) -> Self:
        """Lay out programs without parameters, of at most ``width`` tokens."""
        codes = np.zeros((len(programs), width), np.uint8)
        values = np.zeros(codes.shape)
        together = Population.of(programs)
        used = np.arange(width) < together.lengths[:, None]
        codes[used], values[used] = together.codes, together.values
        return cls(codes, values)

    def __len__(self) -> int:
        """Count the formulas."""
        return len(self.codes)

    def __getitem__(self, index: Any) -> Genomes:
        """Select formulas by a slice, a mask or indices."""
        return Genomes(self.codes[index], self.values[index])

    @property
    def width(self) -> int:
        """Most tokens of a formula."""
        return int(self.codes.shape[1])

    @property
    def sizes(self) -> Indices:
        """Tokens of each formula."""
        return np.asarray(np.count_nonzero(self.codes, axis=1))

    @property
    def constants(self) -> Indices:
        """Number of constants of each formula."""
        return np.asarray(np.count_nonzero(self.codes == CONSTANT, axis=1))

    def population(self) -> Population:
        """Return the formulas with their constants, and with macros written out."""
        used = self.codes > 0
        return Population(*MACROS.written_out(self.codes[used], self.values[used], self.sizes))

    def fit_batch(self, slopes: Floats, intercepts: Floats) -> Batch:
        """Return formulas a + b f whose constants, and b and a behind them, are parameters."""
        tail = np.array([PARAMETER, MUL, PARAMETER, ADD], np.uint8)
        constant, counts = self.codes == CONSTANT, self.constants
        codes = np.where(constant, np.uint8(PARAMETER), self.codes)
        values = np.where(constant, np.cumsum(constant, axis=1) - 1.0, self.values)
        wide = Genomes(
            np.hstack([codes, np.tile(tail, (len(self), 1))]),
            np.hstack([values, counts[:, None] + np.array([0.0, 0.0, 1.0, 0.0])]),
        )
        wide.values[:, [-3, -1]] = 0.0
        starts = np.hstack([constant, np.ones((len(self), 2), bool)])
        numbers = np.hstack([self.values, slopes[:, None], intercepts[:, None]])
        plain = wide.population()
        return Batch(
            plain.codes,
            plain.values,
            plain.lengths,
            parameter_counts=(counts + 2).astype(np.uint32),
            parameters=numbers[starts],
        )

    def with_constants(self, numbers: Floats) -> Genomes:
        """Return the formulas with other constants: those of all formulas in turn; flat."""
        values = self.values.copy()
        values[self.codes == CONSTANT] = numbers
        return Genomes(self.codes, values)

    def program(self, row: int) -> Program:
        """Return one formula."""
        return self[row : row + 1].population()[0]


def joined(parts: Sequence[Genomes]) -> Genomes:
    """Return the formulas of all parts, which are equally wide."""
    return Genomes(
        np.concatenate([part.codes for part in parts]),
        np.concatenate([part.values for part in parts]),
    )


def packed(blocks: Sequence[Genomes], width: int) -> Genomes:
    """Put the tokens of several matrices behind one another, row by row, without the gaps.

    Formulas of more than ``width`` tokens are left empty.
    """
    codes = np.hstack([block.codes for block in blocks])
    values = np.hstack([block.values for block in blocks])
    used = codes > 0
    order = np.argsort(~used, axis=1, kind="stable")[:, :width]
    fits = (np.count_nonzero(used, axis=1) <= width)[:, None]
    return Genomes(
        np.where(fits, np.take_along_axis(codes, order, axis=1), np.uint8(0)),
        np.where(fits, np.take_along_axis(values, order, axis=1), 0.0),
    )


def tokens(codes: Any, values: Any = 0.0) -> Genomes:
    """Return a matrix of one column, where code 0 stands for no token."""
    column = np.asarray(codes, np.uint8)[:, None]
    return Genomes(column, np.where(column > 0, np.broadcast_to(values, len(column))[:, None], 0.0))


def fold(codes: Codes, leaves: NDArray[Any], join: Join) -> NDArray[Any]:
    """Compute a result for every subtree of every formula, by a stack machine over the columns.

    Args:
        codes: [formulas, width].
        leaves: result at each leaf, [formulas, width]; unused elsewhere.
        join: makes an operator's result from its operands'.

    Returns:
        The result of the subtree that ends at each token, [formulas, width].

    """
    count, width = codes.shape
    arities = OPERANDS[codes.T]
    columns, found = np.ascontiguousarray(leaves.T), np.empty((width, count), leaves.dtype)
    stack = np.zeros((width + 3) * count, leaves.dtype)
    rows = np.arange(count)
    top = rows.copy()  # place of the next free slot: its height times the count, plus the row
    for column in range(width):
        arity = arities[column]
        top -= arity * count
        operands = (stack[top], stack[top + count], stack[top + 2 * count])
        found[column] = np.where(arity == 0, columns[column], join(codes[:, column], *operands))
        stack[top] = found[column]
        top += count
    return np.ascontiguousarray(found.T)


def subtree_starts(codes: Codes) -> Indices:
    """Return the first column of the subtree that ends at each token."""
    places = np.broadcast_to(np.arange(codes.shape[1]), codes.shape)
    return fold(codes, places, lambda code, a, b, c: a)


def hashes(genomes: Genomes) -> NDArray[np.uint64]:
    """Hash the structures: constants are equal, and operands of commutative operators may swap."""
    codes = genomes.codes
    leaves = np.where(codes == VARIABLE, genomes.values + 2.0, 1.0).astype(np.uint64) * _MIX[0]
    leaves ^= leaves >> np.uint64(29)

    def join(code: Codes, a: Any, b: Any, c: Any) -> Any:
        arity, swaps = OPERANDS[code], _COMMUTATIVE[code]
        second = np.where(arity > 1, b, np.uint64(0)) * np.where(swaps, np.uint64(1), _MIX[1])
        third = np.where(arity > 2, c, np.uint64(0)) * _MIX[2]
        mixed = (a + second + third + code) * _MIX[3]
        return mixed ^ (mixed >> np.uint64(31))

    trees = fold(codes, leaves, join)
    return trees[np.arange(len(codes)), genomes.sizes - 1]


def depths(genomes: Genomes) -> Indices:
    """Return the height of each formula's tree; 1 for a leaf."""

    def join(code: Codes, a: Any, b: Any, c: Any) -> Any:
        arity = OPERANDS[code]
        return 1 + np.maximum(np.where(arity > 1, np.maximum(a, b), a), np.where(arity > 2, c, 0))

    trees = fold(genomes.codes, np.ones(genomes.codes.shape, np.int64), join)
    return np.asarray(trees[np.arange(len(genomes)), genomes.sizes - 1])


def simplified(genomes: Genomes) -> Genomes:
    """Remove what a fit makes redundant: operators of constants alone, and what scales all of f.

    A subtree of constants becomes one constant. A sum, difference, product or quotient of f and a
    constant, or -f, becomes f, because slope and intercept are fitted anyway.
    """
    return _unscaled(_folded(genomes))


def _folded(genomes: Genomes) -> Genomes:
    """Compute subtrees of constants alone."""
    starts = subtree_starts(genomes.codes)
    variables = np.zeros((len(genomes), genomes.width + 1), np.int64)
    np.cumsum(genomes.codes == VARIABLE, axis=1, out=variables[:, 1:])
    inside = variables[:, 1:] - np.take_along_axis(variables, starts, axis=1)
    operator = (OPERANDS[genomes.codes] > 0) & (inside == 0)
    touched = np.flatnonzero(operator.any(axis=1))
    if not len(touched):
        return genomes
    codes, values = genomes.codes.copy(), genomes.values.copy()
    computed = fold(codes[touched], values[touched], _compute)
    place, column = np.nonzero(operator[touched])
    covered = np.zeros((len(touched), genomes.width + 1), np.int64)
    np.add.at(covered, (place, starts[touched][place, column]), 1)
    np.add.at(covered, (place, column), -1)
    kept = np.cumsum(covered, axis=1)[:, :-1] == 0
    new_codes = np.where(operator[touched], np.uint8(CONSTANT), codes[touched])
    new_values = np.where(operator[touched], computed, values[touched])
    short = packed([Genomes(np.where(kept, new_codes, np.uint8(0)), new_values)], genomes.width)
    codes[touched] = short.codes
    values[touched] = np.where(short.codes > 0, short.values, 0.0)
    return Genomes(codes, values)


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


def _unscaled(genomes: Genomes) -> Genomes:
    """Strip the outermost operators that slope and intercept absorb, one after the other."""
    codes, values = genomes.codes.copy(), genomes.values.copy()
    active = np.arange(len(codes))
    while len(active):
        part, sizes = codes[active], np.count_nonzero(codes[active], axis=1)
        rows = np.arange(len(active))
        root = part[rows, sizes - 1]
        scaling = np.isin(root, (ADD, SUB, MUL, DIV)) & (sizes > 2)
        last = scaling & (part[rows, sizes - 2] == CONSTANT)
        # The first operand is one token if the second fills everything between it and the root.
        first = scaling & ~last & (root != DIV) & (part[:, 0] == CONSTANT)
        first &= subtree_starts(part)[rows, sizes - 2] == 1
        cut = np.where(last, 2, np.where(first | (root == NEG), 1, 0))
        shifted = active[first]
        codes[shifted, :-1], values[shifted, :-1] = codes[shifted, 1:], values[shifted, 1:]
        ends = sizes - cut - first
        behind = np.arange(genomes.width) >= ends[:, None]
        codes[active] = np.where(behind, 0, codes[active])
        values[active] = np.where(behind, 0.0, values[active])
        active = active[cut > 0]
    return Genomes(codes, values)
