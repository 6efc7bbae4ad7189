"""Encoding and decoding of fits, further outputs and custom losses."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.engines.operators import programs
from warpfit import codec, errors
from warpfit.dataset import Layout
from warpfit.fitting import (
    REASONS,
    FitProgress,
    FitRequest,
    FitResult,
    FitSettings,
    Method,
    Missing,
    Reason,
)
from warpfit.ir import Batch, Program
from warpfit.losses import BY_NAME
from warpfit.request import Evaluation, Loss, Timings
from warpfit.v1 import evaluator_pb2 as pb

LAYOUT = Layout(np.dtype("<f4"), variables=3, rows=100, has_target=True)
TOLERANCES = st.none() | st.floats(0, 1)


def reparsed(message):
    return type(message).FromString(message.SerializeToString())


@st.composite
def batches(draw):
    drawn = draw(st.lists(programs(max_tokens=12), min_size=1, max_size=5))
    vectors = draw(st.integers(1, 3))
    return Batch.of(drawn, [np.ones((vectors, p.parameters)) for p in drawn])


@st.composite
def fits(draw):
    batch = draw(batches())
    total = int(batch.parameter_counts.sum())
    custom = draw(st.sampled_from([None, *(make() for make in BY_NAME.values())]))
    problem = Evaluation(
        bytes(32),
        batch,
        rows=draw(st.none() | st.just((3, 9))),
        loss=None if custom else draw(st.sampled_from(Loss)),
        custom_loss=custom,
        values=False,
    )
    bounded = draw(st.booleans()) and total > 0
    settings = FitSettings(
        method=draw(st.sampled_from([Method.AUTO, Method.BFGS])),
        max_iterations=draw(st.integers(0, 2**32 - 1)),
        gradient_tolerance=draw(TOLERANCES),
        step_tolerance=draw(TOLERANCES),
        loss_tolerance=draw(TOLERANCES),
        lower=np.full(total, -np.inf) if bounded else None,
        upper=np.arange(total, dtype=float) if bounded else None,
        fixed=np.arange(total) % 2 == 0 if bounded else None,
        all_starts=draw(st.booleans()),
        restarts=draw(st.sampled_from([0, 3])),
        seed=draw(st.integers(0, 2**64 - 1)),
        missing=draw(st.sampled_from(Missing)),
        partial=draw(st.booleans()),
        progress=draw(st.booleans()),
    )
    return FitRequest(problem, settings)


@given(fits())
def test_fits_survive(request):
    back = codec.fit_from_message(reparsed(codec.fit_to_message(request)))
    for field in dataclasses.fields(FitSettings):
        before, after = (getattr(r.settings, field.name) for r in (request, back))
        assert np.array_equal(before, after), field.name
    assert back.problem.custom_loss == request.problem.custom_loss
    assert back.problem.loss == request.problem.loss
    assert back.problem.rows == request.problem.rows
    assert back.problem.batch.parameters.tobytes() == request.problem.batch.parameters.tobytes()
    assert back.method == request.method
    back.check(LAYOUT)


@given(fits(), st.randoms(use_true_random=False))
def test_results_survive(request, random):
    counts = request.problem.batch.parameter_counts.astype(int)
    cells = len(counts), request.vectors
    total = request.vectors * int(counts.sum())
    result = FitResult(
        parameters=np.arange(float(total)),
        losses=np.full(cells, np.nan),
        initial_losses=np.full(cells, np.inf),
        iterations=np.full(cells, 7, dtype=np.uint32),
        evaluations=np.full(cells, 8, dtype=np.uint32),
        reasons=np.full(cells, random.randint(1, len(REASONS)), dtype=np.uint8),
        starts=np.zeros(cells, dtype=np.uint32),
        timings=Timings(compute=5),
    )
    seen = []
    progress = FitProgress(3, 4, 5)
    sent = (codec.progress_to_bytes(progress), codec.fit_to_bytes(result))
    back = codec.read_fit(request, map(codec.fit_answer_from_bytes, sent), seen.append)
    assert seen == [progress]
    for field in dataclasses.fields(FitResult):
        before, after = getattr(result, field.name), getattr(back, field.name)
        if isinstance(before, np.ndarray):
            assert before.tobytes() == after.tobytes()
        else:
            assert before == after


def test_reasons_and_wire_codes_agree():
    codes = {name: code for name, code in pb.Reason.items() if code}
    assert codes == {f"REASON_{reason.name}": code for code, reason in enumerate(REASONS, start=1)}
    assert list(Reason) == list(REASONS)


@pytest.mark.parametrize("changes", [{}, {"losses": b""}, {"reasons": b"\x09"}, None])
def test_a_broken_result_is_an_internal_error(changes):
    problem = Evaluation(bytes(32), Batch.of([Program.parameter(0)], [[1.0]]), loss=Loss.MSE)
    eight = dict.fromkeys(("parameters", "losses", "initial_losses"), bytes(8))
    four = dict.fromkeys(("iterations", "evaluations", "starts"), bytes(4))
    whole = {**eight, **four, "reasons": b"\1"} | (changes or {})
    sent = [] if changes is None else [pb.OptimizeResponse(result=pb.FitResult(**whole))]
    if changes == {}:
        assert codec.read_fit(FitRequest(problem), sent).losses == 0.0
        return
    with pytest.raises(errors.InternalError, match=r"the server's answer|has no result"):
        codec.read_fit(FitRequest(problem), sent)
