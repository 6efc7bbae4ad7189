"""Evaluations of which several engines have some rows each: the bits are those of one engine."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.engines.shards import REQUESTS, check_evaluation, check_pass
from support.suites.derivatives import make_dataset, smooth_programs
from warpfit.expressions.workload import thesis_mix
from warpfit.ir import Batch
from warpfit.parse import parse
from warpfit.request import Evaluation
from warpfit_server.engine.cpu.engine import CpuEngine
from warpfit_server.row_blocks import LEAST_LEVEL, Shards, node_rows

ROWS = 41_000
DATA = {
    (dtype, weights): make_dataset(ROWS, dtype, weights=weights)
    for dtype in ("float32", "float64")
    for weights in (False, True)
}
#: NaNs and zeros of both signs, in rows that differ.
SIGNS = ["where(sin(9*x1) < 0, sqrt(-1 - x1*x1), log(-1 - x1*x1))", "0*sin(9*x1)"]
#: Values and sums of the last two are not all numbers.
BATCHES = [
    Batch.of(*smooth_programs()),
    Batch.of(*thesis_mix(3, 20, variables=4)),
    Batch.of([parse(text) for text in SIGNS]),
]


@pytest.fixture(scope="module")
def engines():
    made = [CpuEngine(threads=threads) for threads in (1, 2, 1)]
    yield made
    for engine in made:
        engine.close()


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_all_outputs_have_the_bits_of_one_engine(engines, data):
    dataset = DATA[data.draw(st.sampled_from(list(DATA)))]
    start = data.draw(st.integers(0, ROWS - 1))
    rows = start, data.draw(st.integers(start + 1, ROWS) | st.just(ROWS))
    shards = Shards.of(dataset.layout, tuple(range(data.draw(st.integers(2, 3)))))
    wanted = {"values": False} | REQUESTS[data.draw(st.sampled_from(list(REQUESTS)))]
    batch = data.draw(st.sampled_from(BATCHES))
    evaluation = Evaluation(dataset.content_id, batch, rows=rows, **wanted)
    check_evaluation(engines, dataset, shards, evaluation)


@pytest.mark.parametrize("key", DATA, ids=str)
@pytest.mark.parametrize("batch", BATCHES[1:], ids=["workload", "signs"])
def test_sums_that_are_not_numbers_have_the_bits_of_one_engine(engines, key, batch):
    """Which of two NaNs a sum keeps may differ between the code of a block and that of shards."""
    dataset, rows = DATA[key], (5_000, 30_000)
    wanted = {"values": False} | REQUESTS["sums"]
    evaluation = Evaluation(dataset.content_id, batch, rows=rows, **wanted)
    check_evaluation(engines, dataset, Shards.of(dataset.layout, (0, 1)), evaluation)


@pytest.mark.parametrize("key", DATA, ids=str)
def test_a_pass_of_a_fit_has_the_bits_of_one_engine(engines, key):
    dataset = DATA[key]
    for batch in BATCHES:
        evaluation = Evaluation(dataset.content_id, batch, rows=(700, ROWS))
        check_pass(engines, dataset, Shards.of(dataset.layout, (0, 1, 2)), evaluation)


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
