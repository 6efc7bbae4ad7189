"""Which requests are merged."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("numba")

from warpfit.dataset import Dataset
from warpfit.expressions.workload import thesis_mix
from warpfit.ir import Batch
from warpfit.losses import Closing, LossFunction
from warpfit.parse import parse
from warpfit.request import Evaluation, Loss, Precision, Tier
from warpfit_server.engine import merging
from warpfit_server.engine.merging import Merger
from warpfit_server.engine.request import Request
from warpfit_server.ipc.in_flight_request import InFlightRequest
from warpfit_server.ipc.segments import SegmentPool

DATASET = Dataset.of(np.ones((8, 12)), np.ones(8))
BATCH = Batch.of(*thesis_mix(1, 400, variables=12))


class FakeEngine:
    """An engine that recognises certain batches."""

    step_size = 1 << 40

    def __init__(self):
        self.known = set()
        self.asked = 0
        self.loaded = {DATASET.content_id}

    def merges(self, dataset_id):
        return dataset_id in self.loaded

    def recognises(self, evaluation):
        self.asked += 1
        return evaluation.batch.codes.tobytes() in self.known


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def key(engine):
    """Return a function that tells the key of a request for some programs."""
    merger, pool = Merger(engine), SegmentPool(1 << 20)

    def key(batch=BATCH, *, alone=0.0, **options):
        options = {"loss": Loss.MSE, "values": False, **options}
        sent = InFlightRequest.of_evaluation(
            Evaluation(DATASET.content_id, batch, **options), DATASET.layout, "me"
        )
        sent.write(pool.acquire(sent.segment_layout.nbytes, "me"))
        sent.alone = alone
        return merger.key(Request(None, sent.message(), sent.segment))

    return key


def test_new_batches_for_the_same_losses_have_the_same_key(key, engine):
    assert key(BATCH[:300]) == key(BATCH[100:]) is not None
    assert engine.asked == 0


@pytest.mark.parametrize(
    "options",
    [
        {"loss": Loss.MAE},
        {"rows": (0, 7)},
        {"precision": Precision.FAST},
        {"tier": Tier.INTERPRETER},
    ],
)
def test_requests_that_differ_in_more_than_programs_are_not_merged(key, options):
    assert key(BATCH[:10], **options) not in (key(BATCH[10:20]), None)


def test_parameter_vectors_must_be_equally_many(key):
    programs, parameters = thesis_mix(1, 10, variables=12)
    twice = Batch.of(programs, [np.stack([one, one]) for one in parameters])
    assert key(twice) not in (key(BATCH[10:20]), None)


@pytest.mark.parametrize(
    "options",
    [
        {"values": True},
        {"loss": None, "values": True},
        {"gradient": True},
        {"linear_scaling": True},
        {"loss": None, "custom_loss": LossFunction(parse("x1 - x2"), Closing.SUM)},
        {"tier": Tier.COMPILED},
        {"alone": 1.0},
    ],
)
def test_requests_for_more_than_losses_and_suspects_run_by_themselves(key, options):
    assert key(**options) is None


def test_long_requests_run_by_themselves(key, engine):
    engine.step_size = 8 * BATCH[:20].token_count
    assert key(BATCH[:20]) is not None
    assert key(BATCH[:30]) is None


def test_nothing_is_merged_on_a_data_set_that_does_not_gain_from_it(key, engine):
    engine.loaded.clear()
    assert key() is None


def test_an_engine_is_asked_about_batches_that_look_as_if_they_had_come_before(
    key, engine, monkeypatch
):
    monkeypatch.setattr(merging, "_REMEMBERED", 3)
    assert key(BATCH[:10]) is not None
    engine.known.add(BATCH[:10].codes.tobytes())
    assert key(BATCH[:10]) is None
    other = replace(BATCH[:10], values=BATCH[:10].values + 1.0)
    assert key(other, tier=Tier.AUTO) is None  # only the engine can tell them apart
    for first in range(20, 29):  # sketches are forgotten, the oldest first
        key(BATCH[first : first + 5])
    asked = engine.asked
    assert key(BATCH[:10]) is not None
    assert engine.asked == asked
