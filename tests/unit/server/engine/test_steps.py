"""The time of steps, which admission learns from, and the parts of large requests."""

import threading
import time

import numpy as np
import pytest

from support.engines.fits import prepared
from support.engines.references import outputs_for
from support.engines.requests import EngineRequest, run_steps
from support.random_programs import thesis_mix
from warpfit.dataset import Dataset
from warpfit.errors import ProgramError
from warpfit.ir import Batch
from warpfit.losses import LossFunction
from warpfit.parse import parse
from warpfit.request import FURTHER_OUTPUTS as OUTPUTS
from warpfit.request import Evaluation, FitSettings, Loss, Method, Missing
from warpfit_server.engine import runner as module
from warpfit_server.engine.cpu.engine import CpuEngine
from warpfit_server.engine.evaluation import LoadedDatasets
from warpfit_server.engine.fit.driver import optimize
from warpfit_server.engine.interface import offload
from warpfit_server.engine.runner import RequestRunner, parts_of
from warpfit_server.ipc import messages

X = np.random.default_rng(2).uniform(0.5, 2.0, size=(40_000, 2))
DATA = Dataset.of(X, X[:, 0] * X[:, 1])
PAUSE = 0.004


def run_with_pauses(steps):
    """Run steps as a busy engine would; return the result and the seconds in between."""
    paused = []

    def rest(_):
        began = time.perf_counter()
        time.sleep(PAUSE)
        paused.append(time.perf_counter() - began)

    return run_steps(steps, rest), sum(paused)


def assert_counts_no_pause(steps):
    began = time.perf_counter()
    result, paused = run_with_pauses(steps)
    assert paused > 3 * PAUSE
    assert (
        0
        < getattr(result, "timings", result).compute
        < (time.perf_counter() - began - paused) * 1e9
    )


def test_an_evaluation_does_not_count_the_time_between_its_steps(monkeypatch):
    engine = CpuEngine(1)
    monkeypatch.setattr(engine, "_step_seconds", 0.0)
    engine.load(DATA)
    batch = Batch.of(*thesis_mix(1, 20, variables=2))
    evaluation = Evaluation(DATA.content_id, batch, loss=Loss.MSE, values=False)
    assert_counts_no_pause(engine.evaluate(evaluation, outputs_for(evaluation, DATA.layout)))
    engine.close()


@pytest.mark.parametrize("method", ["lm", "bfgs"])
def test_a_fit_does_not_count_the_time_between_its_steps(method):
    made = prepared(DATA, ["p1*exp(p2*x1) + p3*x2"], [[1.0, 0.1, 0.2]], method=method)
    assert_counts_no_pause(optimize(*made))


MANY_ROWS = 400_000
SUMS = {"values": False}
LOSS = {"loss": Loss.MSE, "values": False}


@pytest.fixture(scope="module")
def many_rows():
    """Data whose every pass takes several steps, and an engine that cuts wherever it can."""
    engine = CpuEngine(2)
    x = np.random.default_rng(3).random((MANY_ROWS, 1), dtype="f4") + 0.5
    weights = np.where(np.arange(MANY_ROWS) % 3, 1.0, 0.0)
    found = {w is not None: Dataset.of(x, 2 * x[:, 0], w, dtype="f4") for w in (None, weights)}
    datasets = LoadedDatasets(engine)
    for data in found.values():
        datasets.load(data)
    engine._step_seconds = 1e-9
    engine.others_wait(True)
    yield found, engine, RequestRunner(engine, datasets, 1 << 20)
    engine.close()


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize(
    ("asked", "fit"),
    [
        *(({}, None), (LOSS, None), ({**SUMS, "loss": Loss.R2}, None)),
        *(({**LOSS, n: True}, None) for n in ("gradient", "variable_gradient", "linear_scaling")),
        *(({**SUMS, name: True}, None) for name in ("jacobian", "reductions", "correlation")),
        ({**SUMS, "custom_loss": LossFunction.parse("abs(d)^1.5")}, None),
        *((LOSS, {}), (LOSS, {"method": Method.BFGS}), (LOSS, {"missing": Missing.DROP})),
        (LOSS, {"restarts": 3, "all_starts": True}),
        (LOSS, {"covariance": True, "standard_errors": True, "curvature": True}),
    ],
)
def test_the_engine_looks_at_its_queue_during_every_pass(many_rows, asked, fit, is_weighted):
    found, engine, runner = many_rows
    data, looks = found[is_weighted], []
    batch = Batch.of([parse("p1*x1")] * 8, [[1.0]] * 8)
    settings = None if fit is None else FitSettings(max_iterations=1, **fit)
    for number in range(2):
        rows = number, MANY_ROWS - number
        problem = Evaluation(data.content_id, batch, rows=rows, **asked)
        EngineRequest(engine, data, problem, settings, runner).run(looks.append)
        assert len(looks) > 12
        looks.clear()


def test_the_calling_thread_does_other_things_while_many_bytes_are_copied():
    go, copied = threading.Event(), []

    def copy():
        assert go.wait(20)
        copied.append(threading.get_ident())

    steps = offload(1 << 30, copy)
    work = next(steps)
    assert not work.done()
    go.set()
    work.result()
    assert work.done()
    with pytest.raises(StopIteration):
        next(steps)
    assert copied != [threading.get_ident()]
    assert list(offload(1000, copy)) == []  # few are copied at once
    assert copied[1:] == [threading.get_ident()]


FEW_X = np.random.default_rng(3).uniform(0.5, 2.0, size=(300, 4))
FEW_ROWS = Dataset.of(FEW_X, FEW_X[:, 0] * FEW_X[:, 1])
PROGRAMS, STARTS = thesis_mix(3, 12, variables=4)


@pytest.fixture
def request_of(engine):
    engine.load(FEW_ROWS)
    return lambda *given: EngineRequest(engine, FEW_ROWS, *given)


def an_evaluation(vectors, loss, outputs, *, values=True):
    factors = 1.0 + 0.01 * np.arange(vectors)[:, None]
    starts = [start * (factors + 0.01 * number) for number, start in enumerate(STARTS)]
    batch = Batch.of(PROGRAMS, starts)
    options = dict.fromkeys(outputs, True)
    return Evaluation(FEW_ROWS.content_id, batch, loss=loss, values=values, **options)


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
def test_parts_have_the_bits_of_the_whole(request_of, monkeypatch, most, vectors, loss, outputs):
    evaluation = an_evaluation(vectors, loss, outputs)
    assert len(parts_of(evaluation, FEW_ROWS.layout)) == 1
    whole = request_of(evaluation).results()
    monkeypatch.setattr(module, "MOST_NUMBERS", most)
    assert len(parts_of(evaluation, FEW_ROWS.layout)) > 1
    call = request_of(evaluation)
    assert call.results() == whole
    announced = [m.programs for m in call.sent if isinstance(m, messages.ValuesReady)]
    assert announced == sorted(announced)
    assert announced[-1] == len(PROGRAMS)


def test_a_bad_token_is_named_in_the_whole_batch(request_of, monkeypatch):
    batch = Batch.of([parse("x1")] * 9 + [parse("x9")])
    monkeypatch.setattr(module, "MOST_NUMBERS", 30)
    evaluation = Evaluation(FEW_ROWS.content_id, batch, loss=Loss.MSE, values=False)
    with pytest.raises(ProgramError) as caught:
        request_of(evaluation).results()
    assert caught.value.expression == 9


@pytest.mark.parametrize("method", ["lm", "bfgs"])
def test_a_fit_has_the_same_bits_if_its_passes_have_parts(request_of, monkeypatch, method):
    settings = FitSettings(method=Method(method), max_iterations=20, covariance=True)
    evaluation = an_evaluation(2, Loss.MSE, (), values=False)
    whole = request_of(evaluation, settings).results()
    monkeypatch.setattr(module, "MOST_FIT_SUMS", 100)
    assert request_of(evaluation, settings).results() == whole


def test_no_part_is_large():
    layout = Dataset.of(np.ones((1, 20_000), "f4"), np.ones(1)).layout

    def largest(count, vectors, text, **options):
        batch = Batch.of([parse(text)] * count, [np.empty((vectors, 0))] * count)
        evaluation = Evaluation(b"", batch, loss=Loss.MSE, values=False, **options)
        cells = np.arange(count * vectors).reshape(count, vectors)
        own = [part.of("losses", cells) for part in parts_of(evaluation, layout)]
        assert (np.concatenate([part.ravel() for part in own]) == cells.ravel()).all()
        return max(part.size for part in own)

    assert largest(2, 1000, "x1", variable_gradient=True) * 20_000 <= module.MOST_NUMBERS
    assert largest(20, 10_000, "x1") <= module.MOST_NUMBERS // 16
    assert largest(300, 1, "+".join(["x1"] * 4000)) * 7999 <= module.MOST_NUMBERS
    assert largest(3, 1, "x1") == 3  # small ones have one part
