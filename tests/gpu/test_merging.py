"""Merged requests on a device, and batches in memory that is page-locked or not."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from support.engines.references import outputs_for
from support.random_programs import thesis_mix
from support.suites.derivatives import make_dataset
from support.suites.merging import (  # noqa: F401
    test_merged_requests_have_the_bits_that_they_have_alone,
)
from warpfit.ir import Batch
from warpfit.request import Evaluation, Loss, Precision, Tier
from warpfit_server.engine.interface import run_to_end
from warpfit_server.ipc.engine_connection import InFlightRequest
from warpfit_server.ipc.segments import SegmentPool
from warpfit_server.shared_batch import SharedBatch


@pytest.fixture(params=[("float32", Precision.FAST, 1e-3), ("float64", Precision.PRECISE, 1e-9)])
def flavour(request):
    return request.param


@pytest.mark.parametrize("parts", [1, 7])
def test_batches_are_copied_from_memory_that_is_page_locked_or_not(engine, parts):
    """Also while another thread locks it; 1 MB of tokens, of which the driver stages some."""
    data, pool = make_dataset(1_000, "float32"), SegmentPool(1 << 26)
    engine.load(data)
    whole = Batch.of(*thesis_mix(5, 4_000, variables=4))
    edges = np.linspace(0, len(whole), parts + 1).astype(int).tolist()
    sent = []
    for first, stop in pairwise(edges):
        asked = Evaluation(
            data.content_id, whole[first:stop], loss=Loss.MSE, values=False, tier=Tier.INTERPRETER
        )
        sent.append(InFlightRequest.of_evaluation(asked, data.layout))
        sent[-1].write(pool.acquire(sent[-1].segment_layout.nbytes))

    def losses():
        shared = SharedBatch([s.segment_layout.batch_part(s.segment) for s in sent], 1)
        asked = Evaluation(
            data.content_id, shared, loss=Loss.MSE, values=False, tier=Tier.INTERPRETER
        )
        outputs = outputs_for(asked, data.layout)
        run_to_end(engine.evaluate(asked, outputs))
        return outputs.losses

    pageable = losses()
    engine.map_segment(sent[0].segment)
    while_locking = losses()
    unlocks = [
        engine._device.lock_pages(s.segment.array("u1", (s.segment.size,))) for s in sent[1:]
    ]
    locked = losses()
    for unlock in unlocks:
        unlock()
    np.testing.assert_array_equal(while_locking, pageable)
    np.testing.assert_array_equal(locked, pageable)
    np.testing.assert_array_equal(losses(), pageable)
    engine.unload(data.content_id)
