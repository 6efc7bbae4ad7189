"""Tests of merged requests on any engine; a test module defines the fixtures of `derivatives`."""

from dataclasses import replace

import numpy as np
import pytest

from support.random_programs import thesis_mix
from support.suites.derivatives import make_dataset, smooth_programs
from warpfit.dataset import Dataset
from warpfit.ir import Batch
from warpfit.request import Evaluation, Loss, Tier
from warpfit_server.engine.evaluation import LoadedDatasets
from warpfit_server.engine.interface import run_to_end
from warpfit_server.engine.runner import RequestRunner
from warpfit_server.engine.scheduler import Request
from warpfit_server.ipc.engine_connection import InFlightRequest
from warpfit_server.ipc.segments import SegmentPool


@pytest.mark.parametrize(("loss", "gradient"), [(Loss.MAE, False), (Loss.RMSE, True)])
def test_merged_requests_have_the_bits_that_they_have_alone(engine, flavour, loss, gradient):
    """Two batches come again with other parameters, with a new one beside them or without."""
    dtype, precision, _ = flavour
    data = make_dataset(2_200, dtype, weights=True)
    if loss is Loss.RMSE:  # rows without a weight are left out of sums
        data = Dataset.of(
            data.variables.T, data.target, np.where(data.weights > 0.3, data.weights, 0),
            dtype=dtype,
        )  # fmt: skip
    datasets, pool = LoadedDatasets(engine), SegmentPool(1 << 24)
    datasets.load(data)
    runner = RequestRunner(engine, datasets, 1 << 16)
    (smooth, own), (drawn, others) = smooth_programs(), thesis_mix(3, 12, variables=4)
    vectors = [np.stack([one, 1.1 * np.asarray(one)]) for one in (*own[:6], *others)]
    whole = Batch.of([*smooth[:6], *drawn], vectors)
    batches, fresh = [whole[:6], whole[6:12]], whole[12:]
    random = np.random.default_rng(5)

    def request(batch):
        numbers = batch.parameters * random.uniform(0.8, 1.2, len(batch.parameters))
        asked = Evaluation(
            data.content_id, replace(batch, parameters=numbers), loss=loss, rows=(3, 2_190),
            values=False, gradient=gradient, precision=precision, tier=Tier.INTERPRETER,
        )  # fmt: skip
        sent = InFlightRequest.of_evaluation(asked, data.layout, "me")
        sent.write(pool.acquire(sent.segment_layout.nbytes, "me"))
        made = Request(None, sent.message(), sent.segment)
        runner.merger.plan(made)
        return made

    def results(requests):
        layouts = [(one.problem.segment_layout, one.segment) for one in requests]
        return [
            {n: a.copy() for n, a in layout.results(where).items()} for layout, where in layouts
        ]

    names = {"losses", "gradients"} if gradient else {"losses"}
    for turn in ([*batches, fresh], batches, [fresh, *batches]):
        requests = [request(batch) for batch in turn]
        assert len({one.merge_key for one in requests}) == 1
        assert requests[0].merge_key is not None
        run_to_end(runner.merger.begin(requests))
        merged = results(requests)
        for one in requests:
            run_to_end(runner.begin(one))
        for alone, found in zip(results(requests), merged, strict=True):
            assert alone.keys() == found.keys() == names
            for name in names:
                np.testing.assert_array_equal(found[name], alone[name])
    datasets.unload(data.content_id)
