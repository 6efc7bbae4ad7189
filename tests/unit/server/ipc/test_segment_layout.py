"""Segment layouts and messages of fits and derivatives."""

import numpy as np
import pytest

from warpfit.dataset import Dataset
from warpfit.expressions.workload import thesis_mix
from warpfit.fitting import FitProgress, FitRequest, FitSettings, Method
from warpfit.ir import Batch
from warpfit.losses import Closing, huber
from warpfit.request import Evaluation, Loss
from warpfit_server.ipc import messages
from warpfit_server.ipc.channel import Channel
from warpfit_server.ipc.messages import SubmitEvaluation, SubmitFit
from warpfit_server.ipc.segment_layout import FIT_RESULT_ARRAYS, SegmentLayout
from warpfit_server.ipc.segments import Segment

rng = np.random.default_rng(0)
DATA = Dataset.of(rng.normal(size=(40, 4)), rng.normal(size=40), rng.uniform(0.1, 1, size=40))
PROGRAMS, PARAMETERS = thesis_mix(3, 7, variables=4)
BATCH = Batch.of(PROGRAMS, [np.stack([p, p]) for p in PARAMETERS])
TOTAL = sum(map(len, PARAMETERS))
WISHES = ("gradient", "jacobian", "variable_gradient", "reductions", "correlation")


def evaluation(**changes):
    return Evaluation(**{"dataset_id": DATA.content_id, "batch": BATCH, **changes})


def fit(**settings_):
    return FitRequest(evaluation(loss=Loss.MSE, values=False), FitSettings(**settings_))


def test_the_arrays_of_a_request_do_not_overlap():
    custom = huber()
    wanted = evaluation(custom_loss=custom, **dict.fromkeys(WISHES, True))
    layout = SegmentLayout.of(wanted, DATA.layout)
    segment = Segment.create(1, layout.nbytes)
    layout.write(segment, wanted)
    views = layout.results(segment)
    assert views["losses"].shape == (7, 2)
    assert views["values"].shape == (7, 2, 40)
    assert len(layout.view("values", segment)) == views["values"].nbytes
    assert views["gradients"].shape == (2 * TOTAL,)
    assert views["jacobian"].shape == (2 * TOTAL, 40)
    assert views["variable_gradients"].shape == (7, 2, 4)
    for number, view in enumerate(views.values(), start=1):
        view[...] = number
    for number, (name, view) in enumerate(views.items(), start=1):
        assert (view == number).all(), name
    np.testing.assert_array_equal(layout.batch(segment).parameters, BATCH.parameters)
    assert layout.custom_loss(segment, Closing.MEAN) == custom
    assert layout.array("scaling", segment) is None
    assert not layout.view("scaling", segment)


@pytest.mark.parametrize(("all_starts", "vectors"), [(False, 1), (True, 2)])
def test_the_segment_of_a_fit_holds_bounds_and_result(all_starts, vectors):
    request = fit(
        lower=np.zeros(TOTAL), fixed=np.ones(TOTAL, bool), all_starts=all_starts, covariance=True
    )
    layout = SegmentLayout.of_fit(request, DATA.layout)
    segment = Segment.create(1, layout.nbytes)
    assert layout.require("lower", segment).shape == (TOTAL,)
    assert layout.array("upper", segment) is None
    assert layout.require("parameters", segment).shape == (vectors * TOTAL,)
    assert layout.require("reasons", segment).shape == (7, vectors)
    squares = sum(len(p) ** 2 for p in PARAMETERS)
    assert layout.require("covariances", segment).shape == (vectors * squares,)
    assert set(layout.results(segment)) == {
        *FIT_RESULT_ARRAYS,
        *("parameters", "covariances"),
    }
    with pytest.raises(KeyError):
        layout.require("upper", segment)


def test_requests_and_progress_of_fits_cross_the_channel():
    ours, socket = Channel.pair()
    theirs = Channel(socket)
    request = fit(method=Method.LM, partial=True)
    problem = SubmitEvaluation(
        request=3,
        segment=7,
        size=4096,
        segment_layout=SegmentLayout.of_fit(request, DATA.layout),
        dataset_id=DATA.content_id,
        rows=(0, 10),
        precision=request.problem.precision.name,
        loss=None,
        tier=request.problem.tier.name,
        submitted=123,
        closing=Closing.SUM.name,
        outputs=("gradient",),
        alone=2.0,
    )
    ours.send(SubmitFit(problem, request.settings, 17.5))
    received, _ = theirs.receive()
    assert (received.problem, received.deadline) == (problem, 17.5)
    assert received.settings.method is Method.LM
    progressed = messages.FitProgressed(3, FitProgress(2, 3, 4))
    theirs.send(progressed)
    assert ours.receive()[0] == progressed
