"""Data sets that are larger than the device's memory have the bits of resident ones."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from support.engines.fits import fit
from support.engines.gradients import ask, derive, linearise
from support.engines.references import Evaluate
from support.random_programs import thesis_mix
from support.suites.derivatives import make_dataset, smooth_programs
from warpfit.ir import Batch
from warpfit.losses import ABSOLUTE, SQUARES
from warpfit.request import Evaluation, Loss, Precision, Tier
from warpfit_server.engine.cuda.engine import CudaEngine
from warpfit_server.engine.cuda.runtime.datasets import StreamedDataset

MEMORY = 32 << 20
ROWS = {"float32": 1_100_003, "float64": 550_003}
MODES = [("float32", each) for each in Precision] + [("float64", Precision.PRECISE)]


@pytest.fixture(scope="module")
def small():
    """An engine with so little memory that it streams."""
    pytest.importorskip("cupy")
    engine = CudaEngine(memory_limit=MEMORY)
    yield engine
    engine.close()


@pytest.fixture(scope="module", params=MODES, ids=str)
def case(request, engine, small):
    """A data set that one engine streams and the other does not, with the precision."""
    dtype, precision = request.param
    data = make_dataset(ROWS[dtype], dtype, weights=True)
    for each in (engine, small):
        each.load(data)
    assert isinstance(small._resident(data.content_id), StreamedDataset)
    assert not isinstance(engine._resident(data.content_id), StreamedDataset)
    yield data, precision
    for each in (engine, small):
        each.unload(data.content_id)


def assert_same(one, other) -> None:
    names = "values losses gradients jacobian curvatures variable_gradients reductions moments"
    for name in names.split():
        if getattr(one, name, None) is not None:
            np.testing.assert_array_equal(getattr(other, name), getattr(one, name), err_msg=name)


@pytest.mark.parametrize("rows", [None, (5000, 300_001), (70, 90)])
def test_passes_of_fits(engine, small, case, rows):
    data, precision = case
    given = data, *smooth_programs(), SQUARES
    options = {"rows": rows, "precision": precision}
    assert_same(*(linearise(each, *given, **options) for each in (engine, small)))


@pytest.mark.parametrize("rows", [(0, 140_000), (131_000, 300_001)])
def test_derivatives_and_statistics(engine, small, case, rows):
    data, precision = case
    options = {"row_loss": ABSOLUTE, "statistics": True, "rows": rows, "precision": precision}
    assert_same(*(derive(each, data, *smooth_programs(), **options) for each in (engine, small)))


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("tier", [Tier.INTERPRETER, Tier.COMPILED])
def test_losses_and_values(engine, small, case, tier, values):
    data, precision = case
    batch, rows = thesis_mix(3, 40, variables=4), (300, ROWS["float64"])
    options = {"tier": tier, "precision": precision, "values": values, "loss": Loss.MSE}
    assert_same(*(Evaluate(each)(data, *batch, rows=rows, **options) for each in (engine, small)))


def test_compiled_gradients(engine, small, case):
    data, precision = case
    batch, options = Batch.of(*thesis_mix(3, 20, variables=4)), {"loss": Loss.MSE, "values": False}
    options |= {"gradient": True, "tier": Tier.COMPILED, "precision": precision}
    evaluation = Evaluation(data.content_id, batch, **options)
    assert_same(*(ask(each, data, evaluation) for each in (engine, small)))


def test_several_evaluations_at_the_same_time(small, case):
    data, precision = case
    mixes = [thesis_mix(seed, 10, variables=4) for seed in range(4)]

    def losses(mix) -> bytes:
        options = {"precision": precision, "loss": Loss.MSE, "values": False}
        return Evaluate(small)(data, *mix, tier=Tier.INTERPRETER, **options).losses.tobytes()

    alone = [losses(mix) for mix in mixes]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(losses, mixes)) == alone


def test_fits(engine, small, case):
    data, _ = case
    texts, starts = ["p1 * exp(-p2 * x1) + p3 * x2"], [[1.0, 0.5, 0.1]]
    one, other = (fit(data, texts, starts, engine=each) for each in (engine, small))
    np.testing.assert_array_equal(np.concatenate(other.parameters), np.concatenate(one.parameters))
    np.testing.assert_array_equal(other.loss, one.loss)


def test_a_data_set_that_is_loaded_again_is_page_locked_again(small, caplog):
    others = [make_dataset(ROWS["float32"] + extra, "float32", weights=True) for extra in (1, 2)]
    for _ in range(2):
        for data in others:
            small.load(data)
            small.load(data)
        for data in others:
            small.unload(data.content_id)
    assert "pageable" not in caplog.text
