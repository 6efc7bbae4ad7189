"""Layout of compiled work, and hashes of batches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cuda.bindings")

from warpfit.expressions.workload import thesis_mix
from warpfit.ir import Batch, Program
from warpfit.ops import OPERATORS
from warpfit_server.engine.cuda.jit.kernel_plan import best_layout, fingerprint, split_in_proportion
from warpfit_server.engine.cuda.math.modes import Mode


@given(st.integers(1, 5000), st.lists(st.floats(0.01, 100), min_size=1, max_size=300))
def test_parts_add_up_and_are_off_by_less_than_one(total, weights):
    shares = np.array(weights) / np.sum(weights)
    parts = split_in_proportion(total, shares)
    assert parts.sum() == total
    assert np.all(np.abs(parts - total * shares) < 1 + 1e-9)


@pytest.mark.parametrize("mode", Mode)
def test_layouts_fit_a_multiprocessor(mode):
    for names in (("add", "mul"), ("add", "exp")):
        codes = np.array([OPERATORS[name].code for name in names], dtype=np.uint8)
        layout = best_layout(mode, codes)
        assert layout.threads % 32 == 0
        assert layout.threads <= 1024
        assert layout.threads >= layout.group_size  # a thread stores at most one sum


def test_fingerprints_depend_on_tokens_and_not_on_parameters():
    programs, parameters = thesis_mix(1, 50)
    seen = {fingerprint(Batch.of(*thesis_mix(seed, 50))) for seed in range(12)}
    assert len(seen) == 12
    batch = Batch.of(programs, parameters)
    moved = Batch.of(programs, [vector + 1.0 for vector in parameters])
    assert fingerprint(batch) == fingerprint(moved)
    x, c = Program.variable(0), Program.constant
    close = [Program.apply("add", x, c(0.0)), Program.apply("add", x, c(-0.0))]
    close += [Program.apply("sub", x, c(0.0)), Program.apply("add", c(0.0), x)]
    assert len({fingerprint(Batch.of([program])) for program in close}) == 4
