"""Lowering of programs with derivatives for the GPU's interpreter, on several threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.engines.strategies import programs
from support.machines.reference_derivative_code import parts_of, reference_parts
from warpfit.expressions.workload import thesis_mix
from warpfit.ir import Batch
from warpfit.losses import ABSOLUTE, DIFFERENCE, huber
from warpfit.ops import OPERATORS
from warpfit_server.engine.autodiff import differentiate
from warpfit_server.engine.autodiff.backward_pass import (
    BY_PARAMETERS,
    BY_VARIABLES,
    LOSS,
    LOSS_DERIVATIVE,
    SQUARES,
)
from warpfit_server.engine.cpu.codegen import parts
from warpfit_server.engine.cuda.derivatives.encoding import DerivativeCode
from warpfit_server.engine.cuda.derivatives.lowering import DerivativeLowering
from warpfit_server.engine.native.arguments import FINISHED, RANGE, argument_block
from warpfit_server.system.compile_cache import default_cache_directory

VARIABLES = 10
NOTHING = differentiate.no_row_loss()
HUBER = differentiate.row_loss_tokens(huber(0.5).row, VARIABLES, weighted=True)
DEVIATION = differentiate.row_loss_tokens(DIFFERENCE, VARIABLES, weighted=False)
SIZE = differentiate.row_loss_tokens(ABSOLUTE, VARIABLES, weighted=False)
#: Row loss and requested bits of fits, gradients, Jacobians and losses of one's own.
WORK = {
    "fit": (DEVIATION, BY_PARAMETERS | LOSS_DERIVATIVE | SQUARES),
    "gradient": (SIZE, BY_PARAMETERS | LOSS_DERIVATIVE),
    "own loss": (HUBER, BY_PARAMETERS | BY_VARIABLES | LOSS | LOSS_DERIVATIVE),
    "loss": (HUBER, LOSS),
    "jacobian": (NOTHING, BY_PARAMETERS | BY_VARIABLES),
}


@pytest.fixture(scope="module")
def compiled():
    """Return the function that lowers for the CPU engine."""
    return parts.load_differentiate(parts.directory_of(default_cache_directory()))


@pytest.fixture(scope="module")
def alone():
    return DerivativeLowering(default_cache_directory(), threads=1)


@pytest.fixture(scope="module")
def shared():
    return DerivativeLowering(default_cache_directory(), threads=4)


def lower(lowering: DerivativeLowering, batch: Batch, work: str) -> DerivativeCode:
    row_loss, requested = WORK[work]
    return lowering.lower(batch, row_loss, requested, keeps_values=work != "loss", products=False)


def check(compiled, lowering: DerivativeLowering, batch: Batch, work: str) -> None:
    """Compare with the plain encoder program by program."""
    row_loss, requested = WORK[work]
    lowered = differentiate.allocate_differentiated(batch, row_loss)
    ranges = [np.array([(0, stop)], dtype=RANGE) for stop in (len(batch), 1)]
    source = differentiate.source_arrays(batch, row_loss, requested)
    arrays = (*ranges, np.zeros(1, np.uint8), *source, *lowered)
    assert compiled(argument_block(arrays).ctypes.data, 0) == FINISHED
    code = lower(lowering, batch, work)
    for program in range(len(batch)):
        expected = reference_parts(lowered, program, keeps_values=work != "loss")
        assert parts_of(code, program) == expected


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("seed", range(2))
def test_code_agrees_with_the_plain_encoder(compiled, alone, seed, work):
    check(compiled, alone, Batch.of(*thesis_mix(seed, 60, operators=tuple(OPERATORS))), work)


@settings(max_examples=60, deadline=None)
@given(program=programs(40, variables=VARIABLES, parameters=3), work=st.sampled_from(list(WORK)))
def test_code_of_any_program(compiled, alone, program, work):
    check(compiled, alone, Batch.of([program], [np.ones(3)]), work)


def test_code_does_not_depend_on_the_number_of_threads(alone, shared):
    """Four callers share four helpers."""
    works = list(WORK) * 2
    batches = [Batch.of(*thesis_mix(seed, 100)) for seed in range(len(works))]
    with ThreadPoolExecutor(4) as callers:
        found = list(callers.map(lower, [shared] * len(works), batches, works))
    for batch, work, code in zip(batches, works, found, strict=True):
        expected = lower(alone, batch, work)
        for program in range(0, len(batch), 7):
            assert parts_of(code, program) == parts_of(expected, program)
        for name in ("scalar", "parameter", "parameters", "sum", "triangle"):
            np.testing.assert_array_equal(code.programs[name], expected.programs[name])
        check_no_gaps(code)


def check_no_gaps(code: DerivativeCode) -> None:
    """Check that the programs' ranges of each array neither overlap nor leave gaps."""
    records = code.programs
    counts = records["prologue_count"] + records["count"]
    np.testing.assert_array_equal(records["prologue"] + records["prologue_count"], records["first"])
    for firsts, sizes, total in (
        (records["prologue"], counts, len(code.instructions) - 1),
        (records["column"], records["columns"], len(code.columns)),
        (records["entry"], records["entries"], len(code.entries)),
        (records["load"], records["loads"], len(code.loads)),
    ):
        order = np.lexsort((sizes, firsts))
        ends = np.cumsum(sizes[order], dtype=np.int64)
        np.testing.assert_array_equal(firsts[order], ends - sizes[order])
        assert int(ends[-1]) == total
    assert not code.instructions[-1].any()
