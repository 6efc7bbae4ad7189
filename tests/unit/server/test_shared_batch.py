"""Batches in segments, and what front ends say of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from support.random_programs import thesis_mix
from warpfit.dataset import Dataset
from warpfit.ir import Batch, Program
from warpfit.ops import BY_CODE, FIRST_OPERATOR
from warpfit.request import Evaluation, Loss
from warpfit_server.ipc.engine_connection import InFlightRequest
from warpfit_server.ipc.segments import SegmentPool
from warpfit_server.shared_batch import BatchSummary, SharedBatch, contents

DATASET = Dataset.of(np.ones((8, 12)), np.ones(8))
ARRAYS = ("codes", "values", "lengths", "parameter_counts", "parameters")
SUM = """
from support.random_programs import thesis_mix
from warpfit.ir import Batch
from warpfit_server.shared_batch import BatchSummary
print(BatchSummary.of(Batch.of(*thesis_mix(1, 50))).identity)
"""


def written(batch):
    """Write a request for the losses of a batch into a segment full of other things."""
    asked = Evaluation(DATASET.content_id, batch, loss=Loss.MSE, values=False)
    request = InFlightRequest.of_evaluation(asked, DATASET.layout)
    segment = SegmentPool(1 << 20).acquire(request.segment_layout.nbytes)
    segment.view()[:] = np.random.default_rng(1).bytes(segment.size)
    request.write(segment)
    return request


def whole_batch(vectors=1):
    programs, parameters = thesis_mix(3, 60, variables=12)
    return Batch.of(programs, [np.outer(np.arange(1.0, vectors + 1), one) for one in parameters])


@pytest.mark.parametrize("identify", [lambda batch: BatchSummary.of(batch).identity, contents])
def test_batches_are_known_by_their_tokens_and_not_by_parameters(identify):
    programs, parameters = thesis_mix(1, 50)
    seen = {identify(Batch.of(*thesis_mix(seed, 50))) for seed in range(12)}
    assert len(seen) == 12
    batch = Batch.of(programs, parameters)
    moved = Batch.of(programs, [vector + 1.0 for vector in parameters])
    assert identify(batch) == identify(moved)
    x, c = Program.variable(0), Program.constant
    close = [Program.apply("add", x, c(0.0)), Program.apply("add", x, c(-0.0))]
    close += [Program.apply("sub", x, c(0.0)), Program.apply("add", c(0.0), x)]
    assert len({identify(Batch.of([program])) for program in close}) == 4
    assert identify(Batch.of([x, close[0]])) != identify(Batch.of([close[0], x]))


def test_all_processes_have_the_same_hash():
    command = [sys.executable, "-c", SUM]
    tests = Path(__file__).parents[2]  # where it finds `support`
    found = subprocess.run(command, cwd=tests, capture_output=True, check=True, text=True)
    assert int(found.stdout) == BatchSummary.of(Batch.of(*thesis_mix(1, 50))).identity


@pytest.mark.parametrize("vectors", [1, 3])
def test_a_batch_lies_in_a_segment_as_it_was_sent(vectors):
    batch = whole_batch(vectors)
    request = written(batch)
    layout = request.segment_layout
    found = layout.batch(request.segment)
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(found, name), getattr(batch, name), strict=True)
    assert found.summary == BatchSummary.of(batch) == layout.summary
    assert (len(found), found.token_count) == (60, batch.token_count)
    assert not found.is_apart
    codes = {code for code in batch.codes.tolist() if code >= FIRST_OPERATOR}
    assert {code for code in BY_CODE if layout.operators >> code & 1} == codes
    assert layout.longest == batch.lengths.max()
    lengths = batch.lengths.astype(int)
    assert layout.typical == (lengths**2).sum() // lengths.sum()
    parts = request.split([0, 7, 8, 60])
    assert [part.segment_layout.batch(request.segment).is_apart for part in parts] == [0, 1, 1]
    for part, (first, stop) in zip(parts, ((0, 7), (7, 8), (8, 60)), strict=True):
        own = part.segment_layout.batch(request.segment)
        for name in ARRAYS:
            np.testing.assert_array_equal(getattr(own, name), getattr(batch[first:stop], name))
        assert own.summary == BatchSummary.of(batch[first:stop])


def test_several_batches_are_joined_in_turn():
    batch = whole_batch(2)
    parts = [batch[first:stop] for first, stop in ((0, 7), (7, 8), (8, 60))]
    shared = SharedBatch([SharedBatch.viewing(part).parts[0] for part in parts], 2)
    assert (len(shared), shared.token_count) == (60, batch.token_count)
    assert shared.parameter_total == len(batch.parameters)
    assert shared.is_apart
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(shared, name), getattr(batch, name), strict=True)
    known, whole = shared.summary, BatchSummary.of(batch)
    assert (known.longest, known.operators) == (whole.longest, whole.operators)
    assert abs(known.typical - whole.typical) <= 1
