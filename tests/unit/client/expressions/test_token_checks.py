"""The fast tests of programs agree with the exact checks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("numba")

from support.engines.operators import programs
from warpfit.errors import ProgramError
from warpfit.ir import Batch, are_well_formed, check_indices, check_structure
from warpfit.ops import BY_CODE, CONSTANT, PARAMETER, VARIABLE
from warpfit_server.engine.lowering import are_valid as compiled_are_valid

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


def compiled(batch):
    return compiled_are_valid(batch, VARIABLES)


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


DAMAGES = st.tuples(
    st.integers(0, 100),
    st.none() | st.sampled_from(CODES),
    st.none() | st.sampled_from(ODD),
    st.integers(0, 3),
)


@given(
    st.lists(programs(max_tokens=12, variables=VARIABLES + 1), min_size=1, max_size=5),
    st.lists(DAMAGES, min_size=3, max_size=12),
    st.integers(0, 2),
)
def test_the_fast_test_agrees_with_the_exact_checks(drawn, damages, spare):
    parameters = [np.zeros(max(program.parameters - 1 + spare, 0)) for program in drawn]
    for damage in damages:
        batch = damaged(Batch.of(drawn, parameters), *damage)
        assert fast(batch) == compiled(batch) == exact(batch)


def test_an_unknown_code_is_found_at_every_height_of_the_stack():
    for height in (*range(1, 300), 2**15 + 1, 2**16 + 1):
        codes = np.array([CONSTANT] * height + [0], np.uint8)
        starts = np.array([0, height + 1])
        assert not are_well_formed(codes, np.zeros(height + 1), starts, starts[1:]), height
        numbers = np.array([height + 1], np.uint32), np.zeros(1, np.uint32), np.empty(0)
        assert not compiled(Batch(codes, np.zeros(height + 1), *numbers)), height


def test_a_negative_zero_is_an_index():
    one = np.ones(1, np.uint32)
    batch = Batch(np.array([VARIABLE], np.uint8), np.array([-0.0]), one, 0 * one, np.empty(0))
    assert not fast(batch)
    assert compiled(batch)
    batch.check(VARIABLES)
