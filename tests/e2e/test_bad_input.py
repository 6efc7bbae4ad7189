"""Wrong requests get the right status, reason and place, and leave the server serving."""

import hashlib
import struct

import grpc
import numpy as np
import pytest

from warpfit import codec, ops
from warpfit.dataset import Dataset
from warpfit.v1 import evaluator_pb2 as pb

X = np.arange(12, dtype=np.float32).reshape(4, 3)
DATA = Dataset.of(X, X[:, 0])
BARE = Dataset.of(X)


@pytest.fixture(scope="module")
def channel(server):
    with grpc.insecure_channel(
        server.address, options=[("grpc.max_send_message_length", -1)]
    ) as opened:
        for dataset in (DATA, BARE):
            upload(opened, codec.upload_messages(dataset, 16))
        yield opened


@pytest.fixture(autouse=True)
def still_serving(channel):
    yield
    codes = bytes([ops.VARIABLE])
    assert evaluate(channel, request(codes=codes))[0].header.rows == 4


def upload(channel, messages):
    method = channel.stream_unary(
        "/warpfit.v1.Evaluator/UploadVariables",
        lambda m: m if isinstance(m, bytes) else m.SerializeToString(),
        pb.DatasetInfo.FromString,
    )
    return method(iter(messages), timeout=20)


def evaluate(channel, message):
    method = channel.unary_stream(
        "/warpfit.v1.Evaluator/Evaluate",
        lambda m: m if isinstance(m, bytes) else m.SerializeToString(),
        pb.EvaluateResponse.FromString,
    )
    return list(method(message, timeout=20))


def request(codes=b"\x01", values=None, lengths=None, counts=None, parameters=(), **fields):
    lengths = [len(codes)] if lengths is None else lengths
    counts = [0] * len(lengths) if counts is None else counts
    values = [0.0] * len(codes) if values is None else values
    vectors = fields.pop("vectors", 0)
    return pb.EvaluateRequest(
        content_id=fields.pop("content_id", DATA.content_id),
        programs=pb.Programs(
            codes=bytes(codes),
            values=np.array(values, "<f8").tobytes(),
            lengths=np.array(lengths, "<u4").tobytes(),
            parameter_counts=np.array(counts, "<u4").tobytes(),
            parameters=np.array(parameters, "<f8").tobytes(),
            vectors=vectors,
        ),
        values=fields.pop("wanted", True),
        **fields,
    )


def failure(call, *arguments):
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments)
    error = caught.value
    detail = None
    for key, value in error.trailing_metadata() or ():
        if key == codec.ERROR_METADATA_KEY:
            detail = pb.ErrorDetail.FromString(value)
    assert "Traceback" not in (error.details() or "")
    return error.code(), detail


ADD = ops.OPERATORS["add"].code
TOO_LONG = 1_000_000

EVALUATE_CASES = {
    "unknown operator": (request([1, 200]), "INVALID_ARGUMENT", "UNKNOWN_OPERATOR", (0, 1)),
    "code zero": (request([1, 0]), "INVALID_ARGUMENT", "UNKNOWN_OPERATOR", (0, 1)),
    "underflow": (
        request([1, 1, ADD, 1, ADD], lengths=[3, 2]),
        "INVALID_ARGUMENT",
        "STACK_UNDERFLOW",
        (1, 1),
    ),
    "leftovers": (request([1, 1]), "INVALID_ARGUMENT", "STACK_LEFTOVERS", (0, 1)),
    "variable": (request([1], [3.0]), "INVALID_ARGUMENT", "VARIABLE_OUT_OF_RANGE", (0, 0)),
    "negative index": (request([1], [-1.0]), "INVALID_ARGUMENT", "BAD_INDEX", (0, 0)),
    "fraction index": (request([1], [0.5]), "INVALID_ARGUMENT", "BAD_INDEX", (0, 0)),
    "nan index": (request([1], [float("nan")]), "INVALID_ARGUMENT", "BAD_INDEX", (0, 0)),
    "parameter": (
        request([1, 2], [0.0, 1.0], lengths=[1, 1], counts=[0, 1], parameters=[1.0]),
        "INVALID_ARGUMENT",
        "PARAMETER_OUT_OF_RANGE",
        (1, 0),
    ),
    "too few parameters": (
        request([2], counts=[2], parameters=[1.0]),
        "INVALID_ARGUMENT",
        "LENGTH_MISMATCH",
        None,
    ),
    "vectors lie": (
        request([2], counts=[1], parameters=[1.0], vectors=3),
        "INVALID_ARGUMENT",
        "LENGTH_MISMATCH",
        None,
    ),
    "lengths lie": (request([1], lengths=[2**31]), "RESOURCE_EXHAUSTED", "PROGRAM_TOO_LONG", None),
    "lengths differ": (request([1], lengths=[2]), "INVALID_ARGUMENT", "LENGTH_MISMATCH", None),
    "values lie": (request([1], [0.0, 0.0]), "INVALID_ARGUMENT", "LENGTH_MISMATCH", None),
    "empty batch": (request([], lengths=[]), "INVALID_ARGUMENT", "EMPTY_BATCH", None),
    "empty program": (request([1], lengths=[1, 0]), "INVALID_ARGUMENT", "EMPTY_PROGRAM", None),
    "long program": (
        request(bytes([1]) * TOO_LONG, np.zeros(TOO_LONG)),
        "RESOURCE_EXHAUSTED",
        "PROGRAM_TOO_LONG",
        None,
    ),
    "no data set": (
        request(content_id=hashlib.sha256(b"x").digest()),
        "NOT_FOUND",
        "DATASET_NOT_FOUND",
        None,
    ),
    "short id": (request(content_id=b"abc"), "INVALID_ARGUMENT", "BAD_DATASET_ID", None),
    "no target": (
        request(content_id=BARE.content_id, loss=pb.LOSS_MSE),
        "INVALID_ARGUMENT",
        "TARGET_MISSING",
        None,
    ),
    "rows outside": (
        request(rows=pb.RowRange(start=0, stop=5)),
        "INVALID_ARGUMENT",
        "ROWS_OUT_OF_RANGE",
        None,
    ),
    "rows huge": (
        request(rows=pb.RowRange(start=0, stop=2**64 - 1)),
        "INVALID_ARGUMENT",
        "ROWS_OUT_OF_RANGE",
        None,
    ),
    "no rows": (
        request(rows=pb.RowRange(start=2, stop=2)),
        "INVALID_ARGUMENT",
        "ROWS_OUT_OF_RANGE",
        None,
    ),
    "nothing wanted": (request(wanted=False), "INVALID_ARGUMENT", "NOTHING_WANTED", None),
    "bad loss": (request(loss=99), "INVALID_ARGUMENT", "BAD_ENUM", None),
    "many vectors": (
        request([1], vectors=4_000_000_000),
        "RESOURCE_EXHAUSTED",
        "TOO_MANY_VECTORS",
        None,
    ),
    "garbage": (b"\xff\xfe garbage \x00" * 10, "INVALID_ARGUMENT", "MALFORMED_MESSAGE", None),
}


@pytest.mark.parametrize("name", EVALUATE_CASES)
def test_evaluate(channel, name):
    message, status, reason, place = EVALUATE_CASES[name]
    code, detail = failure(evaluate, channel, message)
    assert (code.name, detail.reason) == (status, reason)
    assert detail.remedy
    if place is not None:
        assert (detail.expression, detail.token) == place
    if status == "RESOURCE_EXHAUSTED":
        assert "--max-" in detail.remedy
        assert detail.needed > detail.available


def test_message_over_the_transport_limit(channel):
    code, _ = failure(evaluate, channel, b"\x0a" + bytes(129 << 20))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("constant", [float("nan"), float("inf"), -float("inf")])
def test_special_constants_are_numbers(channel, constant):
    (answer,) = evaluate(channel, request([3], [constant]))
    np.testing.assert_array_equal(np.frombuffer(answer.values, "<f4"), np.float32(constant))


def _header(**changes):
    layout = codec.layout_to_message(BARE.layout)
    for name, value in changes.items():
        setattr(layout, name, value)
    identifier = hashlib.sha256(b"not resident" + repr(changes).encode()).digest()
    return pb.UploadVariablesRequest(header=pb.UploadHeader(layout=layout, content_id=identifier))


def _data(count):
    return pb.UploadVariablesRequest(data=bytes(count))


PAYLOAD = BARE.layout.nbytes
UPLOAD_CASES = {
    "no messages": ([], "INVALID_ARGUMENT", "BAD_HEADER"),
    "no header": ([_data(4)], "INVALID_ARGUMENT", "BAD_HEADER"),
    "two headers": ([_header(), _header()], "INVALID_ARGUMENT", "BAD_HEADER"),
    "truncated": ([_header(), _data(PAYLOAD - 1)], "INVALID_ARGUMENT", "TRUNCATED_UPLOAD"),
    "surplus": ([_header(), _data(PAYLOAD), _data(1)], "INVALID_ARGUMENT", "SURPLUS_UPLOAD"),
    "wrong digest": ([_header(), _data(PAYLOAD)], "INVALID_ARGUMENT", "BAD_DIGEST"),
    "bad dtype": ([_header(dtype=7)], "INVALID_ARGUMENT", "BAD_DTYPE"),
    "no rows": ([_header(rows=0)], "INVALID_ARGUMENT", "EMPTY_DATASET"),
    "no variables": ([_header(variables=0)], "INVALID_ARGUMENT", "EMPTY_DATASET"),
    "rows lie": ([_header(rows=5), _data(PAYLOAD)], "INVALID_ARGUMENT", "TRUNCATED_UPLOAD"),
    "too large": ([_header(rows=2**60)], "RESOURCE_EXHAUSTED", "DATASET_TOO_LARGE"),
    "overflow": ([_header(rows=2**63, variables=2**63)], "RESOURCE_EXHAUSTED", "DATASET_TOO_LARGE"),
    "garbage": ([b"\xff\xff\xff"], "INVALID_ARGUMENT", "MALFORMED_MESSAGE"),
    "garbage data": ([_header(), b"\xff\xff\xff"], "INVALID_ARGUMENT", "MALFORMED_MESSAGE"),
}


@pytest.mark.parametrize("name", UPLOAD_CASES)
def test_upload(channel, server, name):
    messages, status, reason = UPLOAD_CASES[name]
    growth = []
    for _ in range(3):  # the probe of readiness may take a segment of its own meanwhile, once
        before = server.shared_memory()
        code, detail = failure(upload, channel, messages)
        assert (code.name, detail.reason) == (status, reason)
        assert detail.remedy
        growth.append(server.shared_memory() - before)
    assert min(growth) <= 0


def test_unknown_data_set_for_get_and_release(channel):
    for name in ("GetVariables", "ReleaseVariables"):
        method = channel.unary_unary(f"/warpfit.v1.Evaluator/{name}")
        message = b"\x0a\x20" + bytes(32)
        code, detail = failure(method, message)
        assert (code.name, detail.reason) == ("NOT_FOUND", "DATASET_NOT_FOUND")


def test_content_id_as_the_contract_describes(channel):
    names = ["alpha", "beta", "gamma"]
    payload = np.ascontiguousarray(X.T, "<f4").tobytes()
    text = b"warpfit.dataset.v1\n" + struct.pack("<BBBQQI", 1, 0, 0, 3, 4, 3)
    for name in names:
        text += struct.pack("<I", len(name)) + name.encode()
    identifier = hashlib.sha256(text + payload).digest()
    layout = pb.DatasetLayout(dtype=pb.DTYPE_FLOAT32, variables=3, rows=4, names=names)
    header = pb.UploadHeader(layout=layout, content_id=identifier)
    messages = [pb.UploadVariablesRequest(header=header), pb.UploadVariablesRequest(data=payload)]
    assert upload(channel, messages).content_id == identifier
