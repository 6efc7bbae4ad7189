"""Formulas as matrices: what breeding and simplification make of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("sklearn")

from warpfit import Program, parse
from warpfit.errors import InvalidArgumentError
from warpfit.expressions import reference
from warpfit.ops import OPERATORS
from warpfit.sklearn import constraints as limits
from warpfit.sklearn import genomes as gp
from warpfit.sklearn.forms import Form
from warpfit.sklearn.genomes import Breeder

NAMES = ("add", "sub", "mul", "div", "square", "exp", "sin", "where")
CODES = tuple(OPERATORS[name].code for name in NAMES)
COLUMNS = np.random.default_rng(0).uniform(0.5, 2.0, (3, 12))


def breeder(seed, width=20):
    return Breeder(np.random.default_rng(seed), CODES, 3, width)


def genomes_of(*texts):
    return gp.Genomes.of([parse(text) for text in texts])


def values(genomes):
    return [reference.evaluate_program(p, COLUMNS) for p in genomes.population()]


def height(program):
    return program.fold(lambda code, value: 1, lambda row, operands: 1 + max(operands))


@given(seed=st.integers(0, 2**31))
def test_everything_that_is_bred_is_well_formed_and_short(seed):
    nursery = breeder(seed)
    parents = nursery.first(60)
    for _ in range(4):
        mothers, fathers = nursery.rng.integers(len(parents), size=(2, 60))
        parents = nursery.offspring(parents, mothers, fathers)
        assert parents.sizes.max() <= 20
        assert len(parents) > 30
        programs = list(parents.population())  # which checks their structure
        assert {int(code) for p in programs for code in p.codes} <= {1, 3, *CODES}
        assert max(p.variables for p in programs) <= 3
        assert gp.depths(parents).tolist() == [height(p) for p in programs]
        # Spans and hashes, which offspring take over from their parents, are what is found anew.
        again = gp.Genomes(parents.codes, parents.values, parents.starts)
        np.testing.assert_array_equal(parents.spans, again.spans)
        np.testing.assert_array_equal(gp.hashes(parents), gp.hashes(again))
        parents = gp.joined([parents[::2], parents[1::2]])


@given(seed=st.integers(0, 2**31))
def test_simplified_formulas_differ_by_scale_and_shift_alone(seed):
    original = breeder(seed, 40)._grown(40, rounds=9)
    short = gp.simplified(original)
    assert (short.sizes <= original.sizes).all()
    np.testing.assert_array_equal(gp.simplified(short).codes, short.codes)
    for before, after in zip(values(original), values(short), strict=True):
        both = np.concatenate([before, after])
        if np.isfinite(both).all() and np.abs(both).max() < 1e4 and np.ptp(after) > 1e-3:
            table = np.column_stack([after, np.ones_like(after)])
            _, residual, rank, _ = np.linalg.lstsq(table, before, rcond=None)
            assert rank == 2
            assert residual.sum() <= 1e-8 * (1 + np.var(before)) * len(before)


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("2*x1 + 3", "x1"),
        ("3 - x1/2", "x1"),
        ("-(x1*x2)", "x1*x2"),
        ("2/x1 + 1", "2/x1"),
        ("sin(exp(0.0))*x2", "x2"),
        ("square(x1 + (2 + 3))", "(x1 + 5) ^ 2"),
        ("(x1 + 1)*x2", "(x1 + 1)*x2"),
        ("1 + 2", "3"),
        ("2", "2"),
    ],
)
def test_what_is_simplified(text, short):
    assert gp.simplified(genomes_of(text)).program(0) == parse(short)


def test_hashes_tell_structures_apart_but_not_constants_and_swapped_operands():
    same = genomes_of("x1*x2 + 2", "2 + x1*x2", "7 + x2*x1")
    assert len(set(gp.hashes(same).tolist())) == 1
    other = genomes_of("x1 - x2", "x2 - x1", "x1 + x2", "x1/x2", "x1*x3", "exp(x1)", "x1 + 2")
    assert len({*gp.hashes(other).tolist(), *gp.hashes(same).tolist()}) == 8


def test_constants_become_parameters_with_slope_and_intercept_behind_them():
    batch = genomes_of("exp(0.5*x2) + 3", "x1").fit_batch(
        np.array([2.0, 4.0]), np.array([1.0, 5.0])
    )
    assert [str(p) for p in batch] == ["(exp(p1 * x2) + p2) * p3 + p4", "x1 * p1 + p2"]
    assert batch.parameters.tolist() == [0.5, 3.0, 2.0, 1.0, 4.0, 5.0]
    moved = genomes_of("exp(0.5*x2) + 3", "x1", "x1 + 1").with_constants(np.array([1.5, 2.5, 9.0]))
    assert moved.program(0) == parse("exp(1.5*x2) + 2.5")
    assert moved.program(2) == parse("x1 + 9")


def rules_of(given, most=24, operators=("add", "mul", "exp", "sin")):
    limits.check_constraints(given)
    return limits.FormulaRules(
        Form(), operators, given or {}, limits.complexity_measure(None), most, most, COLUMNS.T, {}
    )


def admitted(given, *texts, most=24):
    return rules_of(given, most).admissible(genomes_of(*texts)).tolist()


def test_constraints_bound_depth_counts_and_nesting():
    texts = ("x1 + x2", "sin(exp(x1))", "exp(x1)*exp(x2)", "sin(x1 + sin(x2))", "2")
    assert admitted(None, *texts) == [True, True, True, True, False]
    assert admitted({"depth": 2}, *texts) == [True, False, False, False, False]
    assert admitted({"count": {"exp": 1}}, *texts) == [True, True, False, True, False]
    assert admitted({"nesting": {"sin": {"sin": 0}}}, *texts) == [True, True, True, False, False]
    assert admitted({"nesting": {"sin": {"exp": 0}}}, *texts) == [True, False, True, True, False]
    assert admitted(None, *texts, most=4) == [True, True, False, False, False]


@pytest.mark.parametrize(
    ("operators", "text", "is_written"),
    [
        (("mul",), "x1^2*x1^4 - x1^2", False),
        (("add", "mul"), "x1^2*x1^4 - x1^2/3", True),
        (("mul",), "x1^-2", False),
        (("div",), "x1^-2*x2", True),
        (("mul",), "x1^1.5", False),
        (("mul", "sqrt"), "x1^1.5", True),
        (("pow",), "x1^1.37", True),
        (("exp",), "exp(2*x1)", False),
        (("exp", "mul"), "exp(x1/2)", True),
        (("exp", "mul"), "exp(1/x1)", False),
        (("sqrt", "mul"), "abs(x1)", False),
        (("sinc",), "sinc(x1)", True),
    ],
)
def test_formulas_are_written_with_operators_that_were_named(operators, text, is_written):
    assert limits.writing(operators)(genomes_of(text)).tolist() == [is_written]


def test_whole_formulas_are_weighed_with_slope_and_intercept():
    rules = rules_of({"count": {"mul": 1}}, most=7)
    allowed = ["2*(x1*x2) + 3", "2", "x1*x2 + sin(x1)", "(x1*x2)/3"]
    refused = ["2*(x1*x2) + 3 + 1", "2*x1*x2*x3", "log(x1)", "2*(x1*x2) + sin(x1)"]
    assert [rules.allows(parse(text)) for text in allowed] == [True] * 4
    assert [rules.allows(parse(text)) for text in refused] == [False] * 4


def test_complexity_counts_tokens_by_weight_and_operators_have_symbols():
    measure = limits.complexity_measure({"exp": 3, "+": 2})
    assert measure(genomes_of("x1 + exp(x2)", "x1*x2")).tolist() == [1 + 2 + 3 + 1, 3]
    assert limits.operator_names(["+", "-", "**", "sin", "add"]) == ("add", "sub", "pow", "sin")


@pytest.mark.parametrize(
    "given",
    [{"width": 3}, {"depth": 0}, {"count": {"nonsense": 1}}, {"nesting": {"sin": {"sin": -1}}}],
)
def test_constraints_that_make_no_sense(given):
    with pytest.raises(InvalidArgumentError):
        admitted(given, "x1")


def test_parts_are_packed_row_by_row():
    left, right = genomes_of("x1 + x2", "x1"), genomes_of("sin(x1)", "x2 * x3")
    made = gp.packed([left, right, gp.tokens([0, OPERATORS["mul"].code])])
    assert made.sizes.tolist() == [5, 5]
    assert made.program(1) == Program.apply("mul", parse("x1"), parse("x2 * x3"))


def test_functions_that_are_written_with_operators_are_bred_as_one_token():
    codes = tuple(limits.operator_code(name) for name in ("+", "mod", "sinc"))
    nursery = Breeder(np.random.default_rng(1), codes, 3, 12)
    bred = nursery.first(200)
    assert np.isin(bred.codes, codes[1:]).any()
    assert bred.sizes.max() <= 12
    population = bred.population()
    for row, program in enumerate(population):
        assert bred.program(row) == program == Program(program.codes, program.values)
    batch = bred.fit_batch(np.ones(len(bred)), np.zeros(len(bred)))
    batch.check(variables=3)
    folded = gp.simplified(
        gp.Genomes(np.array([3, codes[2]], np.uint8), np.array([np.pi / 2, 0.0]), np.array([0, 2]))
    )
    assert folded.values[0] == pytest.approx(2 / np.pi)
