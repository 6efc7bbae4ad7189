"""The bytes of the conformance vectors, sent as they are to a real server."""

from collections.abc import Iterator

import grpc
import numpy as np
import pytest

from support.repository.conformance import DATASETS, VECTORS, array, assert_met
from support.servers.rpcs import detail_of
from support.servers.server import ServerProcess
from warpfit.v1 import evaluator_pb2 as pb

SERVICE = "/warpfit.v1.Evaluator/"


@pytest.fixture(scope="module")
def channel(server: ServerProcess) -> Iterator[grpc.Channel]:
    """A channel that knows no messages, with all data sets resident."""
    with grpc.insecure_channel(server.address) as channel:
        upload = channel.stream_unary(f"{SERVICE}UploadVariables")
        for dataset in DATASETS.values():
            info = pb.DatasetInfo.FromString(upload(map(bytes.fromhex, dataset["upload"])))
            assert info.content_id.hex() == dataset["content_id"]
        yield channel


def call(channel: grpc.Channel, method: str, case: dict) -> list[bytes]:
    return list(channel.unary_stream(f"{SERVICE}{method}")(bytes.fromhex(case["request"])))


@pytest.mark.parametrize("case", VECTORS["evaluations"], ids=lambda case: case["name"])
def test_evaluations(channel: grpc.Channel, case):
    answers = [pb.EvaluateResponse.FromString(data) for data in call(channel, "Evaluate", case)]
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
def test_fits(channel: grpc.Channel, case):
    result = pb.OptimizeResponse.FromString(call(channel, "Optimize", case)[-1]).result
    parameters = np.frombuffer(result.parameters, "<f8").reshape(1, -1)
    assert_met(parameters, case["expected"]["parameters"], case["tolerance"])


@pytest.mark.parametrize("case", VECTORS["searches"], ids=lambda case: case["name"])
def test_searches(channel: grpc.Channel, case):
    last = pb.SearchResponse.FromString(call(channel, "Search", case)[-1])
    assert pb.End.Name(last.end) == case["end"]
    assert np.frombuffer(last.front.losses, "<f8").min() <= case["loss"]


@pytest.mark.parametrize("case", VECTORS["failures"], ids=lambda case: case["name"])
def test_failures(channel: grpc.Channel, case):
    with pytest.raises(grpc.RpcError) as caught:
        call(channel, "Evaluate", case)
    assert caught.value.code().name == case["status"]
    detail = detail_of(caught.value)
    assert detail.reason == case["reason"]
    for place in ("expression", "token"):
        found = getattr(detail, place) if detail.HasField(place) else None
        assert found == case[place]
