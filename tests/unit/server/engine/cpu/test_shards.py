"""Evaluations of which several engines have some rows each: the bits are those of one engine."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.engines.derivative_suite import make_dataset, smooth_programs
from support.engines.derivatives import outputs_for
from warpfit.ir import Batch
from warpfit.losses import SQUARES, LossFunction, huber
from warpfit.request import Evaluation, Loss
from warpfit_server.engine.cpu.engine import CpuEngine
from warpfit_server.engine.interface import run_to_end
from warpfit_server.row_blocks import LEAST_LEVEL, Shards, node_rows

ROWS = 41_000
DATA = {
    (dtype, weights): make_dataset(ROWS, dtype, weights=weights)
    for dtype in ("float32", "float64")
    for weights in (False, True)
}
BATCH = Batch.of(*smooth_programs())


class Shard:
    """Keeps the nodes of a part, or adds them to those of the other parts."""

    def __init__(self, shards, rows, parts=None):
        self.rows, self.level = rows, shards.level
        self.leads = parts is not None
        self.parts = parts
        self.width = None
        self.nodes = None

    def begin(self, width):
        assert self.width is None
        self.width = width

    def join(self, nodes):
        assert nodes.shape[1] == self.width
        self.nodes = nodes
        yield None
        return np.concatenate([nodes, *self.parts]) if self.leads else None


@pytest.fixture(scope="module")
def engines():
    made = [CpuEngine(threads=threads) for threads in (1, 2, 1)]
    yield made
    for engine in made:
        engine.close()


def joined(engines, dataset, shards, rows, run):
    """Have each engine run its part with a shard, the one that leads last; return its result."""
    parts = [(number, part) for number, part in shards.parts(rows).items()]
    nodes = []
    for number, part in reversed(parts):
        engines[number].load(dataset, part)
        shard = Shard(shards, rows, nodes if number == parts[0][0] else None)
        result = run(engines[number], part, shard)
        nodes.insert(0, shard.nodes)
    return result, parts


EVALUATIONS = {
    "values": {"values": True},
    "loss": {"loss": Loss.MAE, "values": True},
    "all": {
        **{"custom_loss": LossFunction(huber(0.5).row, "sum"), "gradient": True, "values": True},
        **{"variable_gradient": True, "reductions": True, "jacobian": True, "correlation": True},
    },
}


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_all_outputs_have_the_bits_of_one_engine(engines, data):
    dataset = DATA[data.draw(st.sampled_from(list(DATA)))]
    start = data.draw(st.integers(0, ROWS - 1))
    rows = start, data.draw(st.integers(start + 1, ROWS) | st.just(ROWS))
    shards = Shards.of(dataset.layout, tuple(range(data.draw(st.integers(2, 3)))))
    wanted = EVALUATIONS[data.draw(st.sampled_from(list(EVALUATIONS)))]
    evaluation = Evaluation(dataset.content_id, BATCH, rows=rows, **{"values": False} | wanted)
    engines[0].load(dataset)
    whole = outputs_for(evaluation, dataset.layout)
    run_to_end(engines[0].evaluate(evaluation, whole))
    dense = {}

    def run(engine, part, shard):
        own = replace(evaluation, rows=part)
        outputs = replace(outputs_for(own, dataset.layout), shard=shard)
        run_to_end(engine.evaluate(own, outputs))
        dense[part] = outputs
        return outputs

    found, parts = joined(engines, dataset, shards, rows, run)
    for field in fields(whole):
        expected = getattr(whole, field.name)
        if field.name in ("values", "jacobian") and expected is not None:
            pieces = [getattr(dense[part], field.name) for _, part in parts]
            np.testing.assert_array_equal(np.concatenate(pieces, axis=-1), expected)
        elif isinstance(expected, np.ndarray):
            np.testing.assert_array_equal(getattr(found, field.name), expected)


@pytest.mark.parametrize("key", DATA, ids=str)
def test_a_pass_of_a_fit_has_the_bits_of_one_engine(engines, key):
    dataset, rows, flag = DATA[key], (700, ROWS), np.zeros(1, np.uint8)
    evaluation = Evaluation(dataset.content_id, BATCH, rows=rows)

    def run(engine, part, shard):
        own = replace(evaluation, rows=part)
        steps = engine.linearise(own, SQUARES, curvature=True, cancelled=flag, shard=shard)
        return run_to_end(steps)

    engines[0].load(dataset)
    whole = run(engines[0], rows, None)
    found, _ = joined(engines, dataset, Shards.of(dataset.layout, (0, 1, 2)), rows, run)
    for field in fields(whole):
        np.testing.assert_array_equal(getattr(found, field.name), getattr(whole, field.name))


@given(st.integers(1, 10**12), st.integers(1, 64), st.sampled_from(list(DATA)))
def test_shards_are_whole_nodes_of_about_the_same_size(rows, count, key):
    layout = replace(DATA[key].layout, rows=rows)
    shards = Shards.of(layout, tuple(range(count)))
    nodes = -(-rows // node_rows(layout, LEAST_LEVEL))
    if shards is None:
        assert min(nodes, count) == 1
        return
    assert len(shards.engines) == min(count, nodes)
    sizes = np.diff(shards.bounds)
    assert (shards.bounds[0], shards.bounds[-1]) == (0, rows)
    size = node_rows(layout, shards.level)
    assert all(bound % size == 0 for bound in shards.bounds[:-1])
    assert min(sizes) > 0
    assert max(sizes) - min(sizes) <= 2 * size
    assert shards.nodes((0, rows), layout) < 64 * count + 1
    if nodes >= 16 * count:
        assert max(sizes) <= rows / count * (1 + 1 / 16)
    middle = rows // 3, rows // 3 + rows // 2 + 1
    parts = list(shards.parts(middle).values())
    assert [parts[0][0], parts[-1][1]] == list(middle)
    assert all(one[1] == other[0] for one, other in pairwise(parts))
