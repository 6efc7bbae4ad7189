"""Genomes: formulas as postfix tuples, and the operations of genetic programming on them.

A gene is an operator's wire code, a variable (its index plus `VARIABLES`), or a float: a constant
with the value that it was last fitted to. Operands stand before their operator, as in a `Program`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, TypeAlias

import numpy as np

from warpfit.ir import Program
from warpfit.ops import BY_CODE, CONSTANT, OPERATORS, PARAMETER, VARIABLE

Gene: TypeAlias = int | float
Genome: TypeAlias = tuple[Gene, ...]

#: Gene of variable 0, above every wire code.
VARIABLES: Final = 256
#: Wire codes of the operators that slope and intercept absorb.
_SCALING: Final = frozenset(OPERATORS[name].code for name in ("add", "sub", "mul", "div"))
#: Chance that a drawn leaf is a constant.
_CONSTANT_CHANCE: Final = 0.2
#: Chance that a drawn operator has one operand, if there are others.
_UNARY_CHANCE: Final = 0.3
#: Chance that a formula is joined as a whole, not one of its parts.
_WHOLE_CHANCE: Final = 0.5
#: Chance that a drawn tree ends before its depth is used up.
_STOP_CHANCE: Final = 0.25


def arity(gene: Gene) -> int:
    """Return the number of operands of a gene."""
    return 0 if isinstance(gene, float) or gene >= VARIABLES else BY_CODE[gene].arity


def start_of(genome: Genome, end: int) -> int:
    """Return the index of the first gene of the subtree whose root is the gene at ``end``."""
    missing = 1
    while True:
        missing += arity(genome[end]) - 1
        if not missing:
            return end
        end -= 1


def structure(genome: Genome) -> Genome:
    """Return the genome with all constants 0, to compare formulas that differ only in them."""
    return tuple(0.0 if isinstance(gene, float) else gene for gene in genome)


def constants(genome: Genome) -> list[float]:
    """Return the values of the constants, in order."""
    return [gene for gene in genome if isinstance(gene, float)]


def with_constants(genome: Genome, values: Sequence[float]) -> Genome:
    """Return the genome with other values of its constants."""
    fresh = iter(values)
    return tuple(float(next(fresh)) if isinstance(gene, float) else gene for gene in genome)


def simplified(genome: Genome) -> Genome:
    """Remove what a fit makes redundant: operators of constants alone, and what scales all of f.

    A subtree of constants becomes one constant. A sum, difference, product or quotient of f and a
    constant becomes f, because slope and intercept are fitted anyway.
    """
    return _unscaled(_folded(genome))


def _folded(genome: Genome) -> Genome:
    """Compute subtrees of constants alone."""
    stack: list[Genome] = []
    for gene in genome:
        count = arity(gene)
        operands = stack[len(stack) - count :]
        del stack[len(stack) - count :]
        if count and all(_is_constant(part) for part in operands):
            stack.append((_computed(int(gene), [float(part[0]) for part in operands]),))
        else:
            stack.append((*itertools.chain.from_iterable(operands), gene))
    return stack.pop()


def _is_constant(part: Genome) -> bool:
    return len(part) == 1 and isinstance(part[0], float)


def _computed(code: int, operands: Sequence[float]) -> float:
    with np.errstate(all="ignore"):
        return float(BY_CODE[code].numpy(*map(np.float64, operands)))


def _unscaled(genome: Genome) -> Genome:
    """Strip the outermost operators that slope and intercept absorb."""
    while genome[-1] in _SCALING:
        middle = start_of(genome, len(genome) - 2)
        first, second = genome[:middle], genome[middle:-1]
        if _is_constant(second):
            genome = first
        elif _is_constant(first) and genome[-1] != OPERATORS["div"].code:
            genome = second
        else:
            break
    return genome


def to_program(genome: Genome, *, scaled: bool = False, fitted: bool = False) -> Program:
    """Build the program.

    Args:
        genome: the formula f.
        scaled: whether to build ``p * f + q`` with two more parameters behind those of f.
        fitted: whether constants keep their values; otherwise they become parameters.

    """
    codes: list[int] = []
    values: list[float] = []
    count = 0
    for gene in genome:
        if isinstance(gene, float):
            codes.append(CONSTANT if fitted else PARAMETER)
            values.append(gene if fitted else count)
            count += 1
        elif gene >= VARIABLES:
            codes.append(VARIABLE)
            values.append(gene - VARIABLES)
        else:
            codes.append(gene)
            values.append(0.0)
    if scaled:
        codes += [PARAMETER, OPERATORS["mul"].code, PARAMETER, OPERATORS["add"].code]
        values += [count, 0.0, count + 1, 0.0]
    # Genomes are well-formed by the way they are made; checking each costs more than scoring it.
    return Program._unchecked(np.array(codes, dtype=np.uint8), np.array(values, dtype=np.float64))


@dataclass(frozen=True)
class Breeder:
    """Draws formulas and varies them."""

    rng: random.Random
    operators: tuple[int, ...]
    """Wire codes to draw from."""
    variables: int
    max_size: int
    """Most genes of a formula."""

    @cached_property
    def _by_arity(self) -> dict[int, list[int]]:
        table: dict[int, list[int]] = {}
        for code in self.operators:
            table.setdefault(BY_CODE[code].arity, []).append(code)
        return table

    def _operator(self) -> int:
        """Draw an operator, of one operand with a fixed chance."""
        unary = self._by_arity.get(1, [])
        joining = [code for code in self.operators if code not in unary]
        if not joining or (unary and self.rng.random() < _UNARY_CHANCE):
            return self.rng.choice(unary)
        return self.rng.choice(joining)

    def leaf(self) -> Gene:
        """Draw a variable or a constant."""
        if self.rng.random() < _CONSTANT_CHANCE:
            return self.rng.gauss(0.0, 1.0)
        return VARIABLES + self.rng.randrange(self.variables)

    def grow(self, depth: int) -> Genome:
        """Draw a formula of at most this depth (Koza 1992, the "grow" method)."""
        if depth == 0 or self.rng.random() < _STOP_CHANCE:
            return (self.leaf(),)
        code = self._operator()
        parts = [self.grow(depth - 1) for _ in range(BY_CODE[code].arity)]
        return (*(gene for part in parts for gene in part), code)

    def first(self) -> Genome:
        """Draw a formula for the first generation, or an immigrant."""
        while len(drawn := simplified(self.grow(self.rng.randint(1, 4)))) > self.max_size:
            continue
        return drawn

    def child(self, mother: Genome, father: Genome) -> Genome:
        """Cross two formulas or mutate one; the mother herself if the child would be too long."""
        chance = self.rng.random()
        if chance < 0.35:
            made = self._replace(mother, self._part(father))
        elif chance < 0.55:
            made = self._join(mother, self._part(father))
        elif chance < 0.65:
            made = self._replace(mother, self.grow(2))
        elif chance < 0.8:
            made = self._substitute(mother)
        elif chance < 0.9:
            made = self._join(mother, (self.leaf(),))
        else:
            made = self._shorten(mother)
        made = simplified(made)
        return made if len(made) <= self.max_size else mother

    def neighbours(self, genome: Genome) -> list[Genome]:
        """Return all formulas that differ in one place: another gene, or one more operator.

        A new operator of one operand stands over any part; one of two stands over the whole, with a
        leaf beside it.
        """
        unary, binary = self._by_arity.get(1, []), self._by_arity.get(2, [])
        leaves: list[Gene] = [VARIABLES + index for index in range(self.variables)]
        found: list[Genome] = []
        for end, gene in enumerate(genome):
            found += [(*genome[: end + 1], code, *genome[end + 1 :]) for code in unary]
            others = self._by_arity[arity(gene)] if arity(gene) else leaves
            found += [(*genome[:end], other, *genome[end + 1 :]) for other in others]
        for code in binary:
            for leaf in (*leaves, 1.0):
                found += [(*genome, leaf, code), (leaf, *genome, code)]
        return [made for made in map(simplified, found) if len(made) <= self.max_size]

    def _span(self, genome: Genome) -> tuple[int, int]:
        """Return the half-open range of a random subtree."""
        end = self.rng.randrange(len(genome))
        return start_of(genome, end), end + 1

    def _replace(self, genome: Genome, part: Genome) -> Genome:
        start, stop = self._span(genome)
        return genome[:start] + part + genome[stop:]

    def _part(self, genome: Genome) -> Genome:
        start, stop = self._span(genome)
        return genome[start:stop]

    def _substitute(self, genome: Genome) -> Genome:
        """Put another gene with as many operands in the place of one."""
        index = self.rng.randrange(len(genome))
        count = arity(genome[index])
        gene = self.rng.choice(self._by_arity[count]) if count else self.leaf()
        return (*genome[:index], gene, *genome[index + 1 :])

    def _join(self, genome: Genome, part: Genome) -> Genome:
        """Make the formula or a part of it an operand of a new operator, with ``part`` beside it.

        A constant beside it starts as 1, which changes nothing under ``*``, ``/`` and ``^``, so
        that its fit starts where the parent's ended.
        """
        whole = self.rng.random() < _WHOLE_CHANCE
        start, stop = (0, len(genome)) if whole else self._span(genome)
        code = self._operator()
        beside = (1.0,) if _is_constant(part) else part
        operands = [genome[start:stop], *[beside] * (BY_CODE[code].arity - 1)]
        self.rng.shuffle(operands)
        return (*genome[:start], *itertools.chain.from_iterable(operands), code, *genome[stop:])

    def _shorten(self, genome: Genome) -> Genome:
        """Put an operand in the place of its operator."""
        start, stop = self._span(genome)
        if stop - start == 1:
            return genome
        inner_stop = stop - 1
        for _ in range(self.rng.randrange(arity(genome[stop - 1]))):
            inner_stop = start_of(genome, inner_stop - 1)
        operand = genome[start_of(genome, inner_stop - 1) : inner_stop]
        return genome[:start] + operand + genome[stop:]
