"""Which requests are merged, and batches in segments."""

import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from support.engines.requests import written
from support.random_programs import thesis_mix
from warpfit.dataset import Dataset
from warpfit.ir import Batch, Program
from warpfit.losses import Closing, LossFunction
from warpfit.ops import BY_CODE, FIRST_OPERATOR
from warpfit.parse import parse
from warpfit.request import Evaluation, Loss, Precision, Tier
from warpfit_server.engine import scheduler as requests
from warpfit_server.engine.scheduler import Merger, Request
from warpfit_server.shared_batch import BatchSummary, SharedBatch, contents

DATASET = Dataset.of(np.ones((8, 12)), np.ones(8))
BATCH = Batch.of(*thesis_mix(1, 400, variables=12))


@pytest.fixture
def engine():
    return Mock(**{"step_size": 1 << 40, "merge_from.return_value": 3})


@pytest.fixture
def plan(engine):
    """Return a function that makes a request for some programs, and plans its merging."""
    merger = Merger(engine, None, None)

    def plan(batch=BATCH, *, alone=0.0, **options):
        options = {"loss": Loss.MSE, "values": False, **options}
        sent = written(Evaluation(DATASET.content_id, batch, **options), DATASET.layout)
        sent.alone = alone
        request = Request(None, sent.message(), sent.segment)
        merger.plan(request)
        return request

    return plan


@pytest.fixture
def key(plan):
    return lambda *given, **options: plan(*given, **options).merge_key


@pytest.mark.parametrize("gradient", [False, True])
def test_requests_that_differ_in_nothing_but_programs_have_the_same_key(key, gradient):
    one, other = key(BATCH[:300], gradient=gradient), key(BATCH[100:], gradient=gradient)
    assert one == other is not None
    assert key(BATCH[:300], gradient=gradient, tier=Tier.INTERPRETER) == one


@pytest.mark.parametrize(
    ("options", "runs_alone"),
    [
        *(({"loss": Loss.MAE}, False), ({"rows": (0, 7)}, False), ({"gradient": True}, False)),
        ({"precision": Precision.FAST}, False),
        # A request that wants more than losses, or is a suspect.
        *(({"values": True}, True), ({"loss": None, "values": True}, True)),
        *(({"gradient": True, name: True}, True) for name in ("values", "variable_gradient")),
        ({"linear_scaling": True}, True),
        ({"loss": None, "custom_loss": LossFunction(parse("x1 - x2"), Closing.SUM)}, True),
        *(({"tier": Tier.COMPILED}, True), ({"alone": 1.0}, True)),
    ],
)
def test_requests_that_differ_in_more_than_programs_are_not_merged(key, options, runs_alone):
    found = key(BATCH[:10], **options)
    assert found != key(BATCH[10:20])
    assert (found is None) == runs_alone


def test_parameter_vectors_must_be_equally_many(key):
    programs, parameters = thesis_mix(1, 10, variables=12)
    twice = Batch.of(programs, [np.stack([one, one]) for one in parameters])
    assert key(twice) not in (key(BATCH[10:20]), None)


def test_long_requests_run_by_themselves(key, engine, monkeypatch):
    engine.step_size = 8 * BATCH[:20].token_count
    assert key(BATCH[:20]) is not None
    assert key(BATCH[:20], gradient=True) is key(BATCH[:30]) is None
    tokens = BATCH[40:50].token_count
    monkeypatch.setattr(requests, "_MOST_NUMBERS", tokens + 10)
    assert key(BATCH[40:50]) is not None
    assert key(BATCH[60:80], rows=(0, 1)) is None
    for vectors, is_long in ((tokens, False), (2 * tokens, True)):
        batch = Batch.of([parse("x1")], [np.empty((vectors, 0))])
        assert (key(batch, rows=(0, 1)) is None) == is_long
    engine.should_merge.return_value = False
    assert key(BATCH[:20]) is None, "a data set that gains nothing from it"


@pytest.mark.parametrize("programs", [1, 10, 300])
def test_batches_that_come_again_are_merged_if_enough_wait(plan, engine, monkeypatch, programs):
    monkeypatch.setattr(requests, "_REMEMBERED_BATCHES", 3)
    assert plan(BATCH[:programs]).merge_from == 1
    again = plan(BATCH[:programs])
    assert (again.merge_from, again.merge_key) == (3, plan(BATCH[100:103]).merge_key)
    assert plan(BATCH[:programs], precision=Precision.FAST).merge_from == 1
    engine.merge_from.return_value = 0  # compiled kernels are worth more than merging
    assert plan(BATCH[:programs]).merge_key is None
    engine.merge_from.return_value = 3
    for others, least in ((range(20, 22), 3), (range(22, 29), 1)):  # the oldest are forgotten
        for first in others:
            plan(BATCH[first : first + 5])
        assert plan(BATCH[:programs]).merge_from == least


@pytest.mark.parametrize("options", [{}, {"values": True}, {"gradient": True}, {"rows": (0, 1)}])
def test_engines_look_for_kernels_of_batches_that_have_come_before_alone(plan, options):
    batch = BATCH if options else BATCH[:10]
    tiers = [plan(batch, **options).evaluation.tier for _ in range(3)]
    assert tiers == [Tier.INTERPRETER, Tier.AUTO, Tier.AUTO]
    assert plan(batch, tier=Tier.COMPILED, **options).evaluation.tier is Tier.COMPILED


ARRAYS = ("codes", "values", "lengths", "parameter_counts", "parameters")
PARTS = ((0, 7), (7, 8), (8, 60))


def assert_same(found, expected, *, strict=True):
    for name in ARRAYS:
        one, other = getattr(found, name), getattr(expected, name)
        np.testing.assert_array_equal(one, other, strict=strict)


def whole_batch(vectors=1):
    programs, parameters = thesis_mix(3, 60, variables=12)
    return Batch.of(programs, [np.outer(np.arange(1.0, vectors + 1), one) for one in parameters])


@pytest.mark.parametrize("identify", [lambda batch: BatchSummary.of(batch).identity, contents])
def test_batches_are_known_by_their_tokens_and_not_by_parameters(identify):
    programs, parameters = thesis_mix(1, 50)
    assert len({identify(Batch.of(*thesis_mix(seed, 50))) for seed in range(12)}) == 12
    moved = Batch.of(programs, [vector + 1.0 for vector in parameters])
    assert identify(Batch.of(programs, parameters)) == identify(moved)
    x, c = Program.variable(0), Program.constant
    close = [Program.apply("add", x, c(0.0)), Program.apply("add", x, c(-0.0))]
    close += [Program.apply("sub", x, c(0.0)), Program.apply("add", c(0.0), x)]
    assert len({identify(Batch.of([program])) for program in close}) == 4
    assert identify(Batch.of([x, close[0]])) != identify(Batch.of([close[0], x]))


def test_all_processes_have_the_same_hash():
    code = (
        "from support.random_programs import thesis_mix; from warpfit.ir import Batch; "
        "from warpfit_server.shared_batch import BatchSummary; "
        "print(BatchSummary.of(Batch.of(*thesis_mix(1, 50))).identity)"
    )
    tests = Path(__file__).parents[3]  # where it finds `support`
    found = subprocess.check_output([sys.executable, "-c", code], cwd=tests)
    assert int(found) == BatchSummary.of(Batch.of(*thesis_mix(1, 50))).identity


@pytest.mark.parametrize("vectors", [1, 3])
def test_a_batch_lies_in_a_segment_as_it_was_sent(vectors):
    batch = whole_batch(vectors)
    asked = Evaluation(DATASET.content_id, batch, loss=Loss.MSE, values=False)
    request = written(asked, DATASET.layout)
    layout = request.segment_layout
    found = layout.batch(request.segment)
    assert_same(found, batch)
    assert found.summary == BatchSummary.of(batch) == layout.summary
    assert (len(found), found.token_count) == (60, batch.token_count)
    assert not found.is_apart
    codes = {code for code in batch.codes.tolist() if code >= FIRST_OPERATOR}
    assert {code for code in BY_CODE if layout.operators >> code & 1} == codes
    assert layout.longest == batch.lengths.max()
    lengths = batch.lengths.astype(int)
    assert layout.typical == (lengths**2).sum() // lengths.sum()
    parts = request.split([0, 7, 8, 60])
    for part, (first, stop) in zip(parts, PARTS, strict=True):
        own = part.segment_layout.batch(request.segment)
        assert own.is_apart == (first > 0)
        assert_same(own, batch[first:stop], strict=False)
        assert own.summary == BatchSummary.of(batch[first:stop])


def test_several_batches_are_joined_in_turn():
    batch = whole_batch(2)
    parts = [batch[first:stop] for first, stop in PARTS]
    shared = SharedBatch([SharedBatch.viewing(part).parts[0] for part in parts], 2)
    assert (len(shared), shared.token_count) == (60, batch.token_count)
    assert shared.parameter_total == len(batch.parameters)
    assert shared.is_apart
    assert_same(shared, batch)
    known, whole = shared.summary, BatchSummary.of(batch)
    assert (known.longest, known.operators) == (whole.longest, whole.operators)
    assert abs(known.typical - whole.typical) <= 1
