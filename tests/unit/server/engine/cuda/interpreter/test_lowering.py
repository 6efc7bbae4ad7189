"""The lowering kernels, compiled for the host: what they write, and what they refuse.

What their code computes is compared with NumPy where the engine runs on the host, too.
"""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.emulators.device_lowering import Lowered, chains, check_order, lower_on_host
from support.engines.operators import programs
from support.random_programs import random_program, thesis_mix
from warpfit.errors import ProgramError, ResourceExhaustedError
from warpfit.ir import Batch, Program
from warpfit.ops import BY_CODE, CONSTANT, OPERATORS, PARAMETER, VARIABLE
from warpfit.parse import parse
from warpfit_server.engine.cuda.interpreter import launches
from warpfit_server.engine.cuda.runtime.device import as_record
from warpfit_server.engine.interface import Arithmetic
from warpfit_server.engine.lowering import are_valid
from warpfit_server.shared_batch import BatchSummary

LEAVES = {VARIABLE, PARAMETER, CONSTANT}
#: Stack levels that a case label takes values from.
POPS = {
    int(launches.labels()[row.code]) + form: row.arity - 1
    for row in OPERATORS.values()
    for form in {1: (), 2: range(launches.FROM_STACK, launches.FROM_STACK + 2), 3: (0,)}[row.arity]
}
X = Program.variable(0)
#: Variables of the batches with invalid tokens.
FEW = 3


def check(batch, **how):
    """Check that the code depends on the program alone, and what it takes; return most levels."""
    found, usual = lower_on_host(batch, **how), lower_on_host(batch)
    assert not found.are_invalid().any()
    assert (found.first_invalid == launches.ALL_VALID).all()
    has_ternary = any(BY_CODE[code].arity == 3 for code in set(batch.codes.tolist()) - LEAVES)
    for index in range(len(batch)):
        check_program(found, index)
        assert found.code(index) == usual.code(index)
        assert found.needs()[index] <= launches.max_levels(int(batch.lengths[index]), has_ternary)
    return int(found.needs().max())


def check_program(found: Lowered, index: int) -> None:
    """Check the stack levels and the slots that the code says it needs."""
    first, count, *_ = found.programs[index].tolist()
    level, highest = 0, 0
    for head in found.instructions[first : first + count, 0].tolist():
        level += bool(head & launches.PUSH)
        highest = max(highest, level)
        level -= POPS.get(head & launches.LABEL_MASK, 0)
    assert (level, highest) == (0, found.needs()[index])
    slots = {leaf for _, *leaves in found.code(index) for leaf in leaves if type(leaf) is tuple}
    assert found.slot_counts()[index] == len(slots)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(programs(max_tokens=50), min_size=1, max_size=4), st.integers(1, 3), st.integers(1, 8)
)
def test_drawn_programs(drawn, vectors, share):
    blocks = [[[0.5, -1.25][: program.parameters]] * vectors for program in drawn]
    check(Batch.of(drawn, blocks), share=share)


@pytest.mark.parametrize(("share", "room"), [(1, 0), (7, 60), (32, 2500)])
def test_programs_of_many_sizes_in_shared_memory_and_beyond(share, room):
    rng = np.random.default_rng(share)
    sizes = rng.integers(1, 150, size=40).tolist()
    drawn = [random_program(rng, n, variables=3, operators=tuple(OPERATORS)) for n in sizes]
    vectors = [rng.normal(size=(1, program.parameters)) for program in drawn]
    mixed, parameters = thesis_mix(2, 60)
    batch = Batch.of([*drawn, *mixed], [*vectors, *(p[None] for p in parameters)])
    check(batch, share=share, room=room)


@pytest.mark.parametrize("name", [name for name, row in OPERATORS.items() if row.arity > 1])
def test_the_stack_stays_flat_on_long_chains(name):
    long = chains(name, 300)
    assert check(Batch.of([*long, X, *long]), share=2) <= 2


def test_a_negative_zero_is_an_index():
    batch = Batch.of([Program.apply("add", X, Program.variable(1))])
    check(replace(batch, values=np.array([-0.0, 1.0, 0.0])))


TOKENS = st.tuples(
    st.sampled_from([VARIABLE, PARAMETER, CONSTANT, *range(14, 20), 40, 255]),
    st.sampled_from([0.0, 1.0, 2.0, 3.0]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(TOKENS, max_size=7), min_size=1, max_size=8))
def test_any_tokens(drawn):
    """Device and host find the same invalid programs, with the same errors."""
    codes, values = np.array([token for program in drawn for token in program]).reshape(-1, 2).T
    lengths, counts = np.array([*map(len, drawn)], np.uint32), np.full(len(drawn), 2, np.uint32)
    parameters = np.zeros(2 * len(drawn))
    batch = Batch(codes.astype(np.uint8), values.copy(), lengths, counts, parameters)
    found = lower_on_host(batch, FEW, share=3)
    expected = []
    for index in range(len(batch)):
        one = batch[np.array([index])]
        expected.append(not are_valid(one, FEW))
        if not expected[-1]:
            check_program(found, index)
            continue
        with pytest.raises(ProgramError) as told:
            one.check(FEW)
        with pytest.raises(ProgramError) as refused:
            launches.raise_invalid_program(batch, index, FEW)
        for name, value in (("message", told.value.message), ("token", told.value.token)):
            assert getattr(refused.value, name) == value
        assert refused.value.expression == index
        first, count, _, traits = found.programs[index].tolist()
        assert (count, traits) == (0, launches.INVALID)
        assert found.instructions[first].tolist() == [launches.END_LABEL, 0]
    np.testing.assert_array_equal(found.are_invalid(), expected)
    first = int(np.argmax(expected)) if any(expected) else launches.ALL_VALID
    assert found.first_invalid.tolist() == [first]


@pytest.mark.parametrize(
    ("counts", "invalid", "reason"),
    [([1, 3], 0, "PARAMETER_OUT_OF_RANGE"), ([2, 3], 1, "TOO_MANY_PARAMETERS")],
)
def test_parameters_beyond_the_program_s_are_invalid(counts, invalid, reason):
    batch = Batch.of([Program.parameter(1)] * 2, [[1.0, 2.0]] * 2)
    numbers = np.zeros(sum(counts))
    batch = replace(batch, parameter_counts=np.array(counts, np.uint32), parameters=numbers)
    assert lower_on_host(batch).first_invalid.tolist() == [invalid]
    with pytest.raises(ProgramError) as refused:
        launches.raise_invalid_program(batch, invalid, 1)
    assert refused.value.reason == reason


def test_variables_that_cannot_be_encoded_are_refused():
    batch = Batch.of([X, Program.variable(launches.INDEX_LIMIT)])
    assert lower_on_host(batch, launches.INDEX_LIMIT + 1).first_invalid.tolist() == [1]
    with pytest.raises(ResourceExhaustedError, match="index"):
        launches.raise_invalid_program(batch, 1, launches.INDEX_LIMIT + 1)


@pytest.mark.parametrize(("group", "levels"), [(90, 3), (90, 1), (7, 2), (1, 3), (89, 0)])
def test_programs_are_sorted_in_each_group(group, levels):
    """Deep programs first, marked; then by falling number of instructions; in each group."""
    batch = Batch.of(*thesis_mix(5, 90))
    check_order(lower_on_host(batch, group=group, levels=levels), group, levels)


def test_slots_find_their_parameters_with_several_vectors():
    batch = Batch.of([parse("x1 + p1*p2"), parse("x1 + p1")], [np.ones((3, 2)), np.ones((3, 1))])
    lowered = lower_on_host(batch)
    firsts = lowered.programs[:, 2]
    assert lowered.slots[firsts, 2:].tolist() == [[0, 2], [6, 1]]


def test_programs_with_the_most_slots_fit():
    program = X
    for number in range(20):
        leaves = [Program.constant(float(number)), Program.constant(1.0)]
        program = Program.apply("fma", program, *leaves)
    lowered = lower_on_host(Batch.of([program] * 7))
    assert lowered.slot_counts().tolist() == [40] * 7
    ends = lowered.programs[:, 2] + lowered.slot_counts()
    assert (ends[:-1] <= lowered.programs[1:, 2]).all()
    assert ends[-1] <= launches.max_slots(len(lowered.batch.codes), 7)


FAST = launches.Variant(Arithmetic.FAST, 16)
LIMITS = launches.LaunchLimits(*[0] * 6, level_bytes=2048, max_warps=2, resident_warps=32 * 132)


@pytest.mark.parametrize("costly", [False, True])
def test_one_warp_has_room_for_any_program(costly):
    for warps, levels, usual in product([1, 2, 3, 8], [0, 1, 4, 7, 21], [0, 2, 4]):
        bounds = launches.BatchBounds(levels, typical_levels=min(usual, levels), costly=costly)
        limits = LIMITS._replace(max_warps=warps)
        record = launches.new_batch((9, 300, 0, 1), 1, 0, 0, 0)
        launches.configure_launch(record, as_record(limits), 9, *bounds, 300)
        config = record.view(np.recarray)[0]
        assert config.scratch_levels == 2 * costly
        assert 1 <= config.warps <= warps
        assert config.warps * config.levels >= levels + config.scratch_levels
        assert config.levels >= bounds.typical_levels + config.scratch_levels
        assert config.warps * config.levels * limits.level_bytes <= 48 * 1024 - 16
        assert config.group == 300


@pytest.mark.parametrize(
    ("names", "costly"), [("add mul", False), ("add sin", True), ("where", True)]
)
def test_bounds_follow_from_lengths_and_operators(names, costly):
    rng = np.random.default_rng(1)
    operators = tuple(names.split())
    batch = Batch.of([random_program(rng, n, operators=operators) for n in (3, 3, 3, 40, 90)])
    bounds = launches.BatchBounds.of(BatchSummary.of(batch), launches.costly_operators(FAST))
    lengths = batch.lengths.astype(int)
    sizes = int(max(lengths)), int(sum(lengths**2) // sum(lengths))
    most, typical = (launches.max_levels(n, "where" in names) for n in sizes)
    assert bounds.costly is costly
    assert (bounds.levels, bounds.typical_levels) == (most, typical)
    assert typical <= most


def test_programs_that_are_too_long_are_refused():
    launches.BatchBounds.of(BatchSummary(0, launches.MAX_PROGRAM_TOKENS, 30, 0), 0)
    with pytest.raises(ResourceExhaustedError) as refused:
        launches.BatchBounds.of(BatchSummary(0, launches.MAX_PROGRAM_TOKENS + 1, 30, 0), 0)
    assert (refused.value.reason, refused.value.available) == ("PROGRAM_TOO_LONG", 1 << 18)
