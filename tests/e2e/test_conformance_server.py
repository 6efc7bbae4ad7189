"""The bytes of the conformance vectors, sent as they are to a real server."""

import numpy as np
import pytest

from support.repository.conformance import DATASETS, VECTORS, array, assert_met
from warpfit.v1 import evaluator_pb2 as pb


@pytest.fixture
def call(caller):
    """Make the call of a case, its data sets resident."""
    for dataset in DATASETS.values():
        (info,) = caller.send("UploadVariables", map(bytes.fromhex, dataset["upload"]))
        assert pb.DatasetInfo.FromString(info).content_id.hex() == dataset["content_id"]
    return lambda method, case: caller.send(method, bytes.fromhex(case["request"]))


@pytest.mark.parametrize("case", VECTORS["evaluations"], ids=lambda case: case["name"])
def test_evaluations(call, case):
    answers = [pb.EvaluateResponse.FromString(data) for data in call("Evaluate", case)]
    dtype = "<f4" if DATASETS[case["dataset"]]["dtype"] == "float32" else "<f8"
    values = np.frombuffer(b"".join(answer.values for answer in answers), dtype)
    expected = case["expected"]
    if expected["values"] is None:
        assert not values.size
    else:
        wanted = array(expected["values"])
        assert_met(values.reshape(wanted.shape), expected["values"], case["tolerance"])
    if expected["losses"] is not None:
        losses = np.frombuffer(answers[-1].losses, "<f8")
        shape = (len(case["programs"]), case["vectors"])
        assert_met(losses.reshape(shape), expected["losses"], case["tolerance"])


@pytest.mark.parametrize("case", VECTORS["fits"], ids=lambda case: case["name"])
def test_fits(call, case):
    result = pb.OptimizeResponse.FromString(call("Optimize", case)[-1]).result
    parameters = np.frombuffer(result.parameters, "<f8").reshape(1, -1)
    assert_met(parameters, case["expected"]["parameters"], case["tolerance"])


@pytest.mark.parametrize("case", VECTORS["searches"], ids=lambda case: case["name"])
def test_searches(call, case):
    last = pb.SearchResponse.FromString(call("Search", case)[-1])
    assert pb.End.Name(last.end) == case["end"]
    assert np.frombuffer(last.front.losses, "<f8").min() <= case["loss"]


@pytest.mark.parametrize("case", VECTORS["failures"], ids=lambda case: case["name"])
def test_failures(call, caller, case):
    status, detail = caller.refusal("Evaluate", bytes.fromhex(case["request"]))
    assert (status, detail.reason) == (case["status"], case["reason"])
    for place in ("expression", "token"):
        found = getattr(detail, place) if detail.HasField(place) else None
        assert found == case[place]
