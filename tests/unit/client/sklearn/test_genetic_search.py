"""The parts of the symbolic regressor that need no server."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("sklearn")

from warpfit import parse
from warpfit.expressions import reference
from warpfit.ir import Program
from warpfit.ops import OPERATORS
from warpfit.sklearn import genome as gp
from warpfit.sklearn.search import Formula, pareto_layers

NAMES = ("add", "sub", "mul", "div", "square", "exp", "sin", "where")
CODES = tuple(OPERATORS[name].code for name in NAMES)
COLUMNS = np.random.default_rng(0).uniform(0.5, 2.0, (3, 12))


def breeder(seed, max_size=20):
    return gp.Breeder(random.Random(seed), CODES, 3, max_size)


def values(genome):
    return reference.evaluate_program(gp.to_program(genome, fitted=True), COLUMNS)


def checked(genome):
    """The genome as a program whose tokens have been checked."""
    program = gp.to_program(genome)
    return Program(program.codes, program.values)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_everything_that_is_bred_is_well_formed_and_short(seed):
    nursery = breeder(seed)
    parents = [nursery.first() for _ in range(4)]
    for _ in range(40):
        child = nursery.child(*nursery.rng.sample(parents, 2))
        assert len(checked(child)) == len(child) <= nursery.max_size
        assert {gene for gene in child if isinstance(gene, int) and gene < gp.VARIABLES} <= {*CODES}
        parents[nursery.rng.randrange(4)] = child


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_simplified_formulas_differ_by_scale_and_shift_alone(seed):
    original = breeder(seed, 60).grow(5)
    short = gp.simplified(original)
    assert len(short) <= len(original)
    assert gp.simplified(short) == short
    before, after = values(original), values(short)
    both = np.concatenate([before, after])
    if np.isfinite(both).all() and np.abs(both).max() < 1e4 and np.ptp(after) > 1e-3:
        table = np.column_stack([after, np.ones_like(after)])
        _, residual, rank, _ = np.linalg.lstsq(table, before, rcond=None)
        assert rank == 2
        assert residual.sum() <= 1e-8 * (1 + np.var(before)) * len(before)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_neighbours_are_well_formed_and_differ_in_one_place(seed):
    nursery = breeder(seed)
    genome = nursery.first()
    neighbours = nursery.neighbours(genome)
    assert all(len(checked(made)) <= nursery.max_size for made in neighbours)
    assert max(map(len, neighbours)) <= len(genome) + 2
    known = set(map(repr, neighbours))  # NaN, which constants may become, is not equal to itself
    for code in (OPERATORS["sin"].code, OPERATORS["exp"].code):
        wider = gp.simplified((*genome, code))
        assert (repr(wider) in known) == (len(wider) <= nursery.max_size)


def genome_of(text):
    """Genes of a text; numbers are constants."""
    program = parse(text)
    pairs = zip(program.codes.tolist(), program.values.tolist(), strict=True)
    return tuple({1: gp.VARIABLES + int(value), 3: value}.get(code, code) for code, value in pairs)


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("2*x1 + 3", "x1"),
        ("3 - x1/2", "x1"),
        ("2/x1 + 1", "2/x1"),
        ("sin(exp(0.0))*x2", "x2"),
        ("square(x1 + (2 + 3))", "square(x1 + 5)"),
        ("(x1 + 1)*x2", "(x1 + 1)*x2"),
        ("1 + 2", "3"),
    ],
)
def test_what_is_simplified(text, short):
    assert gp.simplified(genome_of(text)) == genome_of(short)


def test_constants_become_parameters_in_order():
    genome = genome_of("exp(0.5*x2) + 3")
    assert str(gp.to_program(genome)) == "exp(p1 * x2) + p2"
    assert str(gp.to_program(genome, scaled=True)) == "(exp(p1 * x2) + p2) * p3 + p4"
    assert str(gp.to_program(genome, fitted=True)) == "exp(0.5 * x2) + 3"
    assert gp.constants(genome) == [0.5, 3.0]
    assert gp.with_constants(genome, [1.5, 2.5]) == genome_of("exp(1.5*x2) + 2.5")
    assert gp.structure(genome) == gp.structure(genome_of("exp(7*x2) + 9"))
    assert gp.structure(genome) != gp.structure(genome_of("exp(7*x1) + 9"))


@settings(deadline=None)
@given(
    pairs=st.lists(
        st.tuples(st.integers(1, 6), st.sampled_from([0.0, 0.5, 1.0, 2.0, 7.5])), max_size=30
    )
)
def test_layers_are_those_of_repeated_peeling(pairs):
    formulas = [Formula((gp.VARIABLES,) * size, loss, 1.0, 0.0) for size, loss in pairs]
    wanted = [-1] * len(pairs)
    layer, left = 0, set(range(len(pairs)))

    def dominates(one, other):
        """As good in both and better in one; of equals the first."""
        (size, loss), (other_size, other_loss) = pairs[one], pairs[other]
        if (size, loss) == (other_size, other_loss):
            return one < other
        return size <= other_size and loss <= other_loss

    while left:
        free = {one for one in left if not any(dominates(other, one) for other in left - {one})}
        for one in free:
            wanted[one] = layer
        layer, left = layer + 1, left - free
    assert pareto_layers(formulas) == wanted
