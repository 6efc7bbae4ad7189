"""Programs and batches: structure, validation, hashing, and the errors for what is malformed."""

import pickle
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.engines.operators import programs
from support.refusals import refused
from warpfit.errors import ProgramError
from warpfit.ir import Batch, Population, Program, are_well_formed, check_indices, check_structure
from warpfit.ops import BY_CODE, CONSTANT, OPERATORS, PARAMETER, VARIABLE
from warpfit_server.engine.lowering import are_valid as compiled_are_valid

ADD, SIN, WHERE = (OPERATORS[name].code for name in ("add", "sin", "where"))
X1, P1, TWO = Program.variable(0), Program.parameter(0), Program.constant(2.0)


def test_malformed_programs_are_refused():
    for codes, values, reason, token in (
        *(([], [], "EMPTY_PROGRAM", None), ([VARIABLE, 15], [0, 0], "UNKNOWN_OPERATOR", 1)),
        *(([VARIABLE], [-1], "BAD_INDEX", 0), ([PARAMETER], [np.nan], "BAD_INDEX", 0)),
        *(([VARIABLE], [2.0**31], "BAD_INDEX", 0), ([ADD], [0], "STACK_UNDERFLOW", 0)),
        ([VARIABLE, VARIABLE, WHERE], [0] * 3, "STACK_UNDERFLOW", 2),
        ([VARIABLE, VARIABLE], [0, 0], "STACK_LEFTOVERS", 1),
    ):
        error = refused(reason, Program, codes, values)
        assert (error.expression, error.token) == (0, token)
    assert refused("", Program, "x1 + 2", ()).remedy == "Parse texts with warpfit.parse"


def applied(row, operands):
    return Program.apply(row, *operands)


@given(programs())
def test_programs_are_immutable_hashable_and_picklable(program):
    again = pickle.loads(pickle.dumps(program))
    assert again == program and hash(again) == hash(program)
    assert program.variables == max([*program.values[program.codes == VARIABLE] + 1, 0])
    assert program.parameters == max([*program.values[program.codes == PARAMETER] + 1, 0])
    assert weakref.ref(program)() is program
    assert program.fold(lambda code, value: Program([code], [value]), applied) == program
    for tokens in (program.codes, program.values):
        with pytest.raises(ValueError, match="read-only"):
            tokens[0] = 0


def test_programs_differ_in_bits_and_have_all_their_operands():
    assert X1 != "x1" and Program.constant(0.0) != Program.constant(-0.0)
    assert Program.constant(np.nan) == Program.constant(np.nan)
    for name, operands in (("sin", 2), ("sub", 3), ("add", 1), ("where", 2)):
        refused(f"WRONG_ARITY: .*{name}", Program.apply, name, *[X1] * operands)


@given(st.lists(programs(), max_size=6), st.data())
def test_a_population_is_a_sequence_of_its_programs(drawn, data):
    population = Population.of(drawn)
    assert list(population) == drawn == [population[index] for index in range(len(drawn))]
    start, stop = data.draw(st.integers(-7, 7)), data.draw(st.integers(-7, 7))
    step = data.draw(st.sampled_from([None, 1, 2, -1]))
    assert list(population[start:stop:step]) == drawn[start:stop:step]
    if drawn:
        chosen = data.draw(st.lists(st.integers(0, len(drawn) - 1), max_size=5))
        taken = [drawn[index] for index in chosen]
        assert list(population[np.array(chosen, dtype=np.int64)]) == taken
        assert population[-1] == drawn[-1]
    assert population[:2] + population[2:] == population == pickle.loads(pickle.dumps(population))
    assert population.texts() == list(map(str, drawn))
    assert (population == Population.of(drawn[1:])) == (not drawn)


@given(st.lists(programs(), min_size=1, max_size=6))
def test_constants_of_a_population_are_lifted_as_those_of_its_programs(drawn):
    lifted, starts = Population.of(drawn).lift_constants()
    for program, own, start in zip(drawn, lifted, starts, strict=True):
        wanted, constants = program.lift_constants()
        assert own == wanted
        np.testing.assert_array_equal(start, constants)


def test_parts_of_populations_and_batches_keep_what_is_theirs():
    population = Population.of([X1, P1, TWO])
    assert np.shares_memory(population[1:].codes, population.codes)
    with pytest.raises(IndexError):
        population[3]
    with pytest.raises(ProgramError):
        list(Population(np.array([ADD], np.uint8), np.zeros(1), np.array([1], np.uint32)))
    batch = Batch.of([P1, X1, Program.parameter(1)], [[1.0], [], [2.0, 3.0]])
    for part in (batch[1:], batch[[1, 2]], batch[[False, True, True]]):
        assert list(part) == list(batch)[1:]
        np.testing.assert_array_equal(part.program_parameters(1), [[2.0, 3.0]])


@pytest.mark.parametrize("odd", [["x1"], "x1", X1, np.array(X1, dtype=object), None, {"a": X1}])
def test_a_population_of_something_else_is_refused(odd):
    for kind in (Population, Batch):
        refused(r"Write a single one as \[program\].*as_population", kind.of, odd)


@given(st.lists(programs(), min_size=1, max_size=6), st.integers(1, 3))
def test_batch_holds_programs_and_parameters(drawn, vectors):
    rng = np.random.default_rng(len(drawn))
    parameters = [rng.normal(size=(vectors, program.parameters)) for program in drawn]
    parameters[0][:] = parameters[0][0]
    # A single vector is repeated, and programs may come one after the other.
    first = parameters[0][0] if len(drawn) > 1 else parameters[0]
    batch = Batch.of(iter(drawn), [first, *parameters[1:]])
    batch.check(variables=3)
    assert len(batch) == len(drawn)
    for index, program in enumerate(drawn):
        assert batch.program(index) == program
        np.testing.assert_array_equal(batch.program_parameters(index), parameters[index])


def test_batches_that_cannot_be_built():
    for given_programs, parameters, reason in (
        *(([], None, "EMPTY_BATCH"), ([X1], [[], []], "LENGTH_MISMATCH")),
        ([P1, P1], [[[1.0]], [[1.0], [2.0]]], "VECTOR_MISMATCH"),
        ([P1], [[[[1.0]]]], "VECTOR_MISMATCH"),
    ):
        refused(reason, Batch.of, given_programs, parameters)


def test_parameters_that_a_program_does_not_have_are_an_error():
    none = "TOO_MANY_PARAMETERS: 1 parameter was given, and none is used"
    assert refused(none, Batch.of([X1, P1], [[1.0], [2.0]]).check, variables=3).expression == 0
    two = "2 parameters were given, and p1 is the last that is used"
    assert refused(two, Batch.of([X1, P1], [[], [2.0, 3.0]]).check, variables=3).expression == 1


def test_operands_do_not_come_from_the_program_before():
    """Two malformed programs whose tokens would be well-formed together."""
    codes = np.array([VARIABLE, VARIABLE, SIN, ADD], dtype=np.uint8)
    two = np.full(2, 2, np.uint32)
    batch = Batch(codes, np.zeros(4), two, 0 * two, np.empty(0))
    error = refused("STACK_UNDERFLOW", batch.check, variables=1)
    assert (error.expression, error.token) == (1, 0)


VARIABLES = 3
SIGNALING_NAN = np.array([0x7FF0000000000001], dtype=np.uint64).view(np.float64)[0]
ODD = [0.5, -1.0, 2.0**31, 1e300, np.inf, -np.inf, np.nan, float(SIGNALING_NAN), 7.0]
CODES = [0, 15, 255, VARIABLE, PARAMETER, CONSTANT, *BY_CODE]


def exact(batch):
    try:
        check_structure(batch.codes, batch.values, batch.starts)
        counts = batch.parameter_counts
        check_indices(batch.codes, batch.values, batch.starts, VARIABLES, counts)
    except ProgramError:
        return False
    return True


def fast(batch):
    return are_well_formed(
        *(batch.codes, batch.values, batch.starts, batch.lengths), VARIABLES, batch.parameter_counts
    )


def damaged(batch, place, code, value, lengths):
    """The batch with another token at ``place``, or other lengths of the same sum."""
    codes, values = batch.codes.copy(), batch.values.copy()
    place %= len(codes)
    codes[place] = codes[place] if code is None else code
    values[place] = values[place] if value is None else value
    shifted = batch.lengths.copy()
    if lengths and len(shifted) > 1:
        moved = min(lengths, int(shifted[0]))
        shifted[0] -= moved
        shifted[1] += moved
    return Batch(codes, values, shifted, batch.parameter_counts, batch.parameters)


CHANGES = st.none() | st.sampled_from(CODES), st.none() | st.sampled_from(ODD)
DAMAGES = st.lists(st.tuples(st.integers(0, 100), *CHANGES, st.integers(0, 3)), min_size=3)
DRAWN = st.lists(programs(max_tokens=12, variables=VARIABLES + 1), min_size=1, max_size=5)


@given(DRAWN, DAMAGES, st.integers(0, 2))
def test_the_fast_test_agrees_with_the_exact_checks(drawn, damages, spare):
    parameters = [np.zeros(max(program.parameters - 1 + spare, 0)) for program in drawn]
    for damage in damages:
        batch = damaged(Batch.of(drawn, parameters), *damage)
        assert fast(batch) == compiled_are_valid(batch, VARIABLES) == exact(batch)


def test_an_unknown_code_is_found_at_every_height_and_a_negative_zero_is_an_index():
    for height in (*range(1, 300), 2**15 + 1, 2**16 + 1):
        codes = np.array([CONSTANT] * height + [0], np.uint8)
        starts = np.array([0, height + 1])
        assert not are_well_formed(codes, np.zeros(height + 1), starts, starts[1:]), height
        numbers = np.array([height + 1], np.uint32), np.zeros(1, np.uint32), np.empty(0)
        batch = Batch(codes, np.zeros(height + 1), *numbers)
        assert not compiled_are_valid(batch, VARIABLES), height
    one = np.ones(1, np.uint32)
    batch = Batch(np.array([VARIABLE], np.uint8), np.array([-0.0]), one, 0 * one, np.empty(0))
    assert not fast(batch) and compiled_are_valid(batch, VARIABLES)
    batch.check(VARIABLES)
