"""Tests of merged requests on any engine; a test module defines the fixtures of `derivatives`."""

from dataclasses import replace

import numpy as np
import pytest

from support.suites.derivatives import make_dataset, smooth_programs
from warpfit.dataset import Dataset
from warpfit.expressions.workload import thesis_mix
from warpfit.ir import Batch
from warpfit.request import Evaluation, Loss, Tier
from warpfit_server.engine.interface import run_to_end
from warpfit_server.engine.loaded_datasets import LoadedDatasets
from warpfit_server.engine.request import Request
from warpfit_server.engine.runner import RequestRunner
from warpfit_server.ipc.in_flight_request import InFlightRequest
from warpfit_server.ipc.segments import SegmentPool


@pytest.mark.parametrize("loss", [Loss.MAE, Loss.RMSE])
@pytest.mark.parametrize("gradient", [False, True])
def test_merged_requests_have_the_bits_that_they_have_alone(engine, flavour, gradient, loss):
    """Two batches come again and again with other parameters, and once new ones are between."""
    dtype, precision, _ = flavour
    data = make_dataset(5_003, dtype, weights=True)
    if loss is Loss.RMSE:  # rows without a weight are left out of sums
        data = Dataset.of(
            data.variables.T, data.target, np.where(data.weights > 0.3, data.weights, 0),
            dtype=dtype,
        )  # fmt: skip
    datasets, pool = LoadedDatasets(engine), SegmentPool(1 << 24)
    datasets.load(data)
    runner = RequestRunner(engine, datasets, 1 << 16)
    (smooth, own), (drawn, others) = smooth_programs(), thesis_mix(3, 30, variables=4)
    vectors = [np.stack([one, 1.1 * np.asarray(one)]) for one in (*own, *others)]
    whole = Batch.of([*smooth, *drawn], vectors)
    batches, fresh = [whole[:14], whole[14:23]], [whole[23:30], whole[30:]]
    random = np.random.default_rng(5)

    def request(batch):
        numbers = batch.parameters * random.uniform(0.8, 1.2, len(batch.parameters))
        asked = Evaluation(
            data.content_id, replace(batch, parameters=numbers), loss=loss, rows=(3, 4_990),
            values=False, gradient=gradient, precision=precision, tier=Tier.INTERPRETER,
        )  # fmt: skip
        sent = InFlightRequest.of_evaluation(asked, data.layout, "me")
        sent.write(pool.acquire(sent.segment_layout.nbytes, "me"))
        made = Request(None, sent.message(), sent.segment)
        runner.plan_merging(made)
        return made

    def results(requests):
        layouts = [(one.problem.segment_layout, one.segment) for one in requests]
        return [
            {n: a.copy() for n, a in layout.results(where).items()} for layout, where in layouts
        ]

    names = {"losses", "gradients"} if gradient else {"losses"}
    for turn in range(3):
        requests = [request(batch) for batch in (*batches, *fresh[turn : turn + 1])]
        assert len({one.merge_key for one in requests}) == 1
        assert requests[0].merge_key is not None
        run_to_end(runner.begin_merged(requests))
        merged = results(requests)
        for one in requests:
            run_to_end(runner.begin(one))
        for alone, found in zip(results(requests), merged, strict=True):
            assert alone.keys() == found.keys() == names
            for name in names:
                np.testing.assert_array_equal(found[name], alone[name])
    datasets.unload(data.content_id)
