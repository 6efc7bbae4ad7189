"""Large evaluations and passes of fits are computed in parts, with the same bits."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba")

from support.engines.requests import EngineRequest
from support.random_programs import thesis_mix
from warpfit.dataset import Dataset
from warpfit.errors import ProgramError
from warpfit.fitting import FitSettings, Method
from warpfit.ir import Batch
from warpfit.parse import parse
from warpfit.request import FURTHER_OUTPUTS as OUTPUTS
from warpfit.request import Evaluation, Loss
from warpfit_server.engine import runner as module
from warpfit_server.engine.cpu.engine import CpuEngine
from warpfit_server.engine.interface import edges_of
from warpfit_server.engine.runner import parts_of
from warpfit_server.ipc import messages
from warpfit_server.limits import spans_of_long_programs

X = np.random.default_rng(3).uniform(0.5, 2.0, size=(300, 4))
DATA = Dataset.of(X, X[:, 0] * X[:, 1])
PROGRAMS, STARTS = thesis_mix(3, 12, variables=4)


@pytest.fixture(scope="module")
def engine():
    engine = CpuEngine(2)
    engine.load(DATA)
    yield engine
    engine.close()


def an_evaluation(vectors, loss, outputs, *, values=True):
    starts = [np.tile(start, (vectors, 1)) for start in STARTS]
    for number, start in enumerate(starts):
        start *= 1.0 + 0.01 * (np.arange(vectors)[:, None] + number)
    batch = Batch.of(PROGRAMS, starts)
    options = dict.fromkeys(outputs, True)
    return Evaluation(DATA.content_id, batch, loss=loss, values=values, **options)


@pytest.mark.parametrize("most", [1, 300])
@pytest.mark.parametrize("vectors", [1, 5])
@pytest.mark.parametrize(
    ("loss", "outputs"),
    [
        (Loss.MSE, ()),
        (Loss.RMSE, tuple({*OUTPUTS} - {"linear_scaling"})),
        (Loss.R2, ("linear_scaling", "correlation", "reductions")),
    ],
)
def test_parts_have_the_bits_of_the_whole(engine, monkeypatch, most, vectors, loss, outputs):
    evaluation = an_evaluation(vectors, loss, outputs)
    assert len(parts_of(evaluation, DATA.layout)) == 1
    whole = EngineRequest(engine, DATA, evaluation).results()
    monkeypatch.setattr(module, "MOST_NUMBERS", most)
    assert len(parts_of(evaluation, DATA.layout)) > 1
    call = EngineRequest(engine, DATA, evaluation)
    assert call.results() == whole
    announced = [m.programs for m in call.sent if isinstance(m, messages.ValuesReady)]
    assert announced == sorted(announced)
    assert announced[-1] == len(PROGRAMS)


def test_a_bad_token_is_named_in_the_whole_batch(engine, monkeypatch):
    batch = Batch.of([parse("x1")] * 9 + [parse("x9")])
    monkeypatch.setattr(module, "MOST_NUMBERS", 30)
    evaluation = Evaluation(DATA.content_id, batch, loss=Loss.MSE, values=False)
    with pytest.raises(ProgramError) as caught:
        EngineRequest(engine, DATA, evaluation).results()
    assert caught.value.expression == 9


@pytest.mark.parametrize("method", ["lm", "bfgs"])
def test_a_fit_has_the_same_bits_if_its_passes_have_parts(engine, monkeypatch, method):
    settings = FitSettings(method=Method(method), max_iterations=20, covariance=True)
    evaluation = an_evaluation(2, Loss.MSE, (), values=False)
    whole = EngineRequest(engine, DATA, evaluation, settings).results()
    monkeypatch.setattr(module, "MOST_FIT_SUMS", 100)
    assert EngineRequest(engine, DATA, evaluation, settings).results() == whole


def test_no_part_is_large():
    layout = Dataset.of(np.ones((1, 20_000), "f4"), np.ones(1)).layout

    def largest(count, vectors, text, **options):
        """Return the most cells of a part."""
        batch = Batch.of([parse(text)] * count, [np.empty((vectors, 0))] * count)
        evaluation = Evaluation(b"", batch, loss=Loss.MSE, values=False, **options)
        cells = np.arange(count * vectors).reshape(count, vectors)
        own = [part.of("losses", cells) for part in parts_of(evaluation, layout)]
        assert (np.concatenate([part.ravel() for part in own]) == cells.ravel()).all()
        return max(part.size for part in own)

    assert largest(1000, 1, "x1", variable_gradient=True) * 20_000 <= module.MOST_NUMBERS
    assert largest(2, 1000, "x1", variable_gradient=True) * 20_000 <= module.MOST_NUMBERS
    assert largest(20, 10_000, "x1") <= module.MOST_NUMBERS // 16
    assert largest(300, 1, "+".join(["x1"] * 4000)) * 7999 <= module.MOST_NUMBERS
    assert largest(3, 1, "x1") == 3  # small ones have one part


def test_long_programs_over_many_rows_have_more_blocks():
    assert spans_of_long_programs(50, 20_000) == 1
    assert spans_of_long_programs(10_000, 1_000_000) == 10_000
    assert edges_of(np.array([3, 3, 9, 1, 1, 1]), 6) == [0, 2, 3, 6]
