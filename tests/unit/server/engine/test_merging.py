"""Which requests are merged."""

from __future__ import annotations

import os

import numpy as np
import pytest

pytest.importorskip("numba")

from support.random_programs import thesis_mix
from warpfit.dataset import Dataset
from warpfit.errors import InternalError
from warpfit.ir import Batch
from warpfit.losses import Closing, LossFunction
from warpfit.parse import parse
from warpfit.request import Evaluation, Loss, Precision, Tier
from warpfit_server.engine import request as requests
from warpfit_server.engine.request import FrontEndConnection, Merger, Request
from warpfit_server.ipc.engine_connection import InFlightRequest
from warpfit_server.ipc.messages import Channel
from warpfit_server.ipc.segments import Segment, SegmentPool

DATASET = Dataset.of(np.ones((8, 12)), np.ones(8))
BATCH = Batch.of(*thesis_mix(1, 400, variables=12))


class FakeEngine:
    """An engine that has loaded a data set."""

    step_size = 1 << 40

    def __init__(self):
        self.loaded = {DATASET.content_id}
        self.least = 3

    def should_merge(self, dataset_id):
        return dataset_id in self.loaded

    def merge_from(self, dataset_id, precision, *, tokens, token_rows, gradient):
        return self.least


def test_a_segment_that_is_too_small_for_its_layout_is_refused():
    sent = InFlightRequest.of_evaluation(
        Evaluation(DATASET.content_id, BATCH, loss=Loss.MSE, values=False), DATASET.layout, "me"
    )
    sent.write(SegmentPool(1 << 20).acquire(sent.segment_layout.nbytes, "me"))
    small = Segment.create(sent.segment.identifier, sent.segment_layout.nbytes - 1)
    ours, theirs = Channel.pair()
    connection = FrontEndConnection(ours)
    with theirs, pytest.raises(InternalError, match="too small"):
        connection.receive(sent.message()._replace(size=small.size), os.dup(small.descriptor))
    assert not connection.requests
    ours.close()


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def plan(engine):
    """Return a function that makes a request for some programs, and plans its merging."""
    merger, pool, random = Merger(engine), SegmentPool(1 << 20), np.random.default_rng(1)

    def plan(batch=BATCH, *, alone=0.0, **options):
        options = {"loss": Loss.MSE, "values": False, **options}
        sent = InFlightRequest.of_evaluation(
            Evaluation(DATASET.content_id, batch, **options), DATASET.layout, "me"
        )
        segment = pool.acquire(sent.segment_layout.nbytes, "me")
        segment.view()[:] = random.bytes(segment.size)  # as earlier requests have left it
        sent.write(segment)
        sent.alone = alone
        request = Request(None, sent.message(), sent.segment)
        merger.plan(request)
        return request

    return plan


@pytest.fixture
def key(plan):
    """Return a function that tells the key of a request for some programs."""
    return lambda *given, **options: plan(*given, **options).merge_key


@pytest.mark.parametrize("gradient", [False, True])
def test_requests_that_differ_in_nothing_but_programs_have_the_same_key(key, gradient):
    one, other = key(BATCH[:300], gradient=gradient), key(BATCH[100:], gradient=gradient)
    assert one == other is not None
    assert key(BATCH[:300], gradient=gradient, tier=Tier.INTERPRETER) == one


@pytest.mark.parametrize(
    "options",
    [{"loss": Loss.MAE}, {"rows": (0, 7)}, {"precision": Precision.FAST}, {"gradient": True}],
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
        {"gradient": True, "values": True},
        {"gradient": True, "variable_gradient": True},
        {"linear_scaling": True},
        {"loss": None, "custom_loss": LossFunction(parse("x1 - x2"), Closing.SUM)},
        {"tier": Tier.COMPILED},
        {"alone": 1.0},
    ],
)
def test_requests_for_more_than_losses_and_suspects_run_by_themselves(key, options):
    assert key(**options) is None


def test_long_requests_run_by_themselves(key, engine, monkeypatch):
    engine.step_size = 8 * BATCH[:20].token_count
    assert key(BATCH[:20]) is not None
    assert key(BATCH[:30]) is None
    monkeypatch.setattr(requests, "_MOST_NUMBERS", BATCH[40:50].token_count + 10)
    assert key(BATCH[40:50]) is not None
    assert key(BATCH[60:80], rows=(0, 1)) is None
    few = Batch.of([parse("x1")], [np.empty((BATCH[40:50].token_count, 0))])
    assert key(few, rows=(0, 1)) is not None
    many = Batch.of([parse("x1")], [np.empty((2 * BATCH[40:50].token_count, 0))])
    assert key(many, rows=(0, 1)) is None


def test_nothing_is_merged_on_a_data_set_that_does_not_gain_from_it(key, engine):
    engine.loaded.clear()
    assert key() is None


def test_a_gradient_counts_as_the_work_of_three_losses(plan, engine):
    batch = BATCH[:20]
    engine.step_size = 8 * 3 * batch.token_count
    assert plan(batch).size == 8 * batch.token_count
    assert plan(batch, gradient=True).size == 8 * 3 * batch.token_count
    engine.step_size -= 1
    assert plan(batch, gradient=True).merge_key is None
    assert plan(batch).merge_key is not None


@pytest.mark.parametrize("gradient", [False, True])
def test_merged_requests_on_few_rows_have_not_too_many_numbers(plan, engine, gradient):
    engine.step_size = 1 << 40
    request = plan(BATCH[:300], rows=(0, 1), gradient=gradient)
    numbers = BATCH[:300].token_count + 300 + gradient * len(BATCH[:300].parameters)
    most = requests._MOST_WITH_GRADIENTS if gradient else requests._MOST_OF_A_STEP
    assert engine.step_size // request.size == most // numbers


@pytest.mark.parametrize("programs", [1, 10, 300])
def test_batches_that_come_again_are_merged_if_enough_wait(plan, engine, monkeypatch, programs):
    monkeypatch.setattr(requests, "_REMEMBERED", 3)
    assert plan(BATCH[:programs]).merge_from == 1
    again = plan(BATCH[:programs])
    assert (again.merge_from, again.merge_key) == (3, plan(BATCH[100:103]).merge_key)
    assert plan(BATCH[:programs], precision=Precision.FAST).merge_from == 1
    engine.least = 0  # compiled kernels are worth more than merging
    assert plan(BATCH[:programs]).merge_key is None
    for first in range(20, 29):  # the oldest are forgotten
        plan(BATCH[first : first + 5])
    assert plan(BATCH[:programs]).merge_from == 1


@pytest.mark.parametrize("options", [{}, {"values": True}, {"gradient": True}, {"rows": (0, 1)}])
def test_engines_look_for_kernels_of_batches_that_have_come_before_alone(plan, options):
    batch = BATCH if options else BATCH[:10]
    tiers = [plan(batch, **options).evaluation.tier for _ in range(3)]
    assert tiers == [Tier.INTERPRETER, Tier.AUTO, Tier.AUTO]
    assert plan(batch, tier=Tier.COMPILED, **options).evaluation.tier is Tier.COMPILED


def test_what_is_to_be_interpreted_is_merged_however_often_it_comes(plan):
    plans = [plan(BATCH[:10], tier=Tier.INTERPRETER) for _ in range(3)]
    assert {(one.merge_key is not None, one.merge_from) for one in plans} == {(True, 1)}
