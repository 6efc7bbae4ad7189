"""Rows that are divided among engines on one GPU, of which one may stream its own.

The bits are those of one engine that has all rows.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from support.engines.derivatives import outputs_for
from support.engines.shards import REQUESTS, check_evaluation, check_pass
from support.suites.derivatives import make_dataset, smooth_programs
from warpfit.expressions.workload import thesis_mix
from warpfit.ir import Batch
from warpfit.request import Evaluation, Loss, Precision, Tier
from warpfit_server.engine.cuda.derivatives import launch_plan
from warpfit_server.engine.cuda.interpreter import tier as interpreter
from warpfit_server.engine.interface import run_to_end
from warpfit_server.row_blocks import LEAST_LEVEL, Shards, node_rows

#: Of an engine that streams a shard of many rows, in windows of half a node of level 7.
MEMORY = 32 << 20
#: Rows of float32, level of the shards' nodes, and nodes of the first shard.
SIZES = {"resident": (70_001, LEAST_LEVEL, 8), "streamed": (1_400_003, 7, 1)}
MIX = Batch.of(*thesis_mix(3, 60, variables=4))
MODES = [
    ("float32", Precision.FAST),
    ("float32", Precision.PRECISE),
    ("float64", Precision.PRECISE),
]


@pytest.fixture(scope="module")
def engines(engine):
    from warpfit_server.engine.cuda.engine import CudaEngine

    small = CudaEngine(memory_limit=MEMORY)
    yield engine, small
    small.close()


@pytest.fixture(scope="module", params=SIZES)
def size(request):
    return SIZES[request.param]


@pytest.fixture(scope="module", params=MODES, ids=str)
def case(request, size):
    """A data set, its shards and a precision."""
    (dtype, precision), (rows, level, nodes) = request.param, size
    data = make_dataset(rows * 4 // np.dtype(dtype).itemsize, dtype, weights=True)
    bounds = 0, nodes * node_rows(data.layout, level), data.layout.rows
    return data, Shards((0, 1), bounds, level), precision


def evaluation(data, batch, precision, **wanted) -> Evaluation:
    fixed = {"tier": Tier.INTERPRETER, "precision": precision}
    return Evaluation(data.content_id, batch, **fixed, **{"values": False} | wanted)


@pytest.mark.parametrize("wanted", REQUESTS)
def test_all_outputs_have_the_bits_of_one_engine(engines, case, wanted):
    data, shards, precision = case
    batch, middle = Batch.of(*smooth_programs()), shards.bounds[1]
    for rows in (None, (middle - 3000, middle + 15_000)):
        asked = evaluation(data, batch, precision, rows=rows, **REQUESTS[wanted])
        check_evaluation(engines, data, shards, asked)


@pytest.mark.parametrize("chunk_bytes", [32 << 20, 100_000])
@pytest.mark.parametrize("wanted", ["loss", "gradient", "sums"])
def test_many_programs_in_one_launch_and_in_several(
    engines, case, monkeypatch, wanted, chunk_bytes
):
    """Many of them are not numbers, and infinite sums make others that are none."""
    data, shards, precision = case
    monkeypatch.setattr(launch_plan, "_CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(interpreter, "_CHUNK_BYTES", chunk_bytes)
    asked = evaluation(data, MIX, precision, **REQUESTS[wanted])
    check_evaluation(engines, data, shards, asked)


def test_passes_of_fits(engines, case):
    data, shards, precision = case
    for batch in (Batch.of(*smooth_programs()), MIX):
        for rows in (None, (700, data.layout.rows - 5)):
            check_pass(engines, data, shards, evaluation(data, batch, precision, rows=rows))


@pytest.mark.parametrize("tier", [Tier.INTERPRETER, Tier.COMPILED])
def test_rows_of_one_shard_need_no_other_engine(engines, case, tier):
    data, shards, precision = case
    _, middle, last = shards.bounds
    asked = evaluation(
        data, MIX, precision, loss=Loss.MSE, gradient=True, rows=(middle + 700, last - 3)
    )
    found = []
    for rows in (None, (middle, last)):
        engines[0].load(data, rows)
        found.append(outputs_for(replace(asked, tier=tier), data.layout))
        run_to_end(engines[0].evaluate(replace(asked, tier=tier), found[-1]))
        engines[0].unload(data.content_id)
    np.testing.assert_array_equal(found[1].losses, found[0].losses)
    np.testing.assert_array_equal(found[1].gradients, found[0].gradients)
