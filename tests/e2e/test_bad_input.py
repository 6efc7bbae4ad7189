"""Wrong requests get the right status, reason and place, and leave the server serving."""

import hashlib
import itertools
import struct
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest

from support.load.fuzz import FLAGS, LIMITS, Fuzzer, is_fine, outcomes
from support.servers.rpcs import OWN_CONNECTION, Caller, detail_of
from support.servers.server import ServerProcess, eventually, private_bytes
from warpfit import codec, ops
from warpfit.dataset import Dataset
from warpfit.v1 import evaluator_pb2 as pb
from warpfit_server.tenancy.quotas import Amounts

X = np.arange(12, dtype=np.float32).reshape(4, 3)
DATA = Dataset.of(X, X[:, 0])
BARE = Dataset.of(X)


@pytest.fixture(scope="module")
def caller(server):
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(server.address, options) as channel:
        caller = Caller(channel)
        for dataset in (DATA, BARE):
            caller.call("UploadVariables", dataset)
        yield caller


@pytest.fixture(autouse=True)
def still_serving(caller):
    yield
    assert evaluate(caller, request()).header.rows == 4


def evaluate(caller, message):
    (answer,) = caller.send("Evaluate", message)
    return pb.EvaluateResponse.FromString(answer)


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


def refused(caller, reason, method, message):
    """Send what must be refused for a reason; return what the answer says."""
    with pytest.raises(grpc.RpcError) as caught:
        caller.send(method, message)
    detail = detail_of(caught.value)
    assert (caught.value.code().name, detail.reason) == (STATUS.get(reason, USUAL), reason)
    assert detail.remedy
    assert "Traceback" not in caught.value.details()
    if reason in TOO_MUCH:
        assert "--tenants-file" in detail.remedy or "--max-" in detail.remedy
        assert detail.needed > detail.available
    return detail


TOO_MUCH = ("PROGRAM_TOO_LONG", "TOO_MANY_VECTORS", "DATASET_TOO_LARGE", "NAMES_TOO_LONG")
USUAL = "INVALID_ARGUMENT"
STATUS = {"DATASET_NOT_FOUND": "NOT_FOUND", **dict.fromkeys(TOO_MUCH, "RESOURCE_EXHAUSTED")}
ADD = ops.OPERATORS["add"].code
TOO_LONG = 1_000_000
#: Reason, place if there is one, and request.
EVALUATE_CASES = {
    "unknown operator": ("UNKNOWN_OPERATOR", (0, 1), request([1, 200])),
    "code zero": ("UNKNOWN_OPERATOR", (0, 1), request([1, 0])),
    "underflow": ("STACK_UNDERFLOW", (1, 1), request([1, 1, ADD, 1, ADD], lengths=[3, 2])),
    "leftovers": ("STACK_LEFTOVERS", (0, 1), request([1, 1])),
    "variable": ("VARIABLE_OUT_OF_RANGE", (0, 0), request([1], [3.0])),
    "negative index": ("BAD_INDEX", (0, 0), request([1], [-1.0])),
    "fraction index": ("BAD_INDEX", (0, 0), request([1], [0.5])),
    "nan index": ("BAD_INDEX", (0, 0), request([1], [float("nan")])),
    "parameter": (
        *("PARAMETER_OUT_OF_RANGE", (1, 0)),
        request([1, 2], [0.0, 1.0], lengths=[1, 1], counts=[0, 1], parameters=[1.0]),
    ),
    "too few parameters": ("LENGTH_MISMATCH", None, request([2], counts=[2], parameters=[1.0])),
    "vectors lie": ("LENGTH_MISMATCH", None, request([2], counts=[1], parameters=[1.0], vectors=3)),
    "lengths lie": ("PROGRAM_TOO_LONG", None, request([1], lengths=[2**31])),
    "lengths differ": ("LENGTH_MISMATCH", None, request([1], lengths=[2])),
    "values lie": ("LENGTH_MISMATCH", None, request([1], [0.0, 0.0])),
    "empty batch": ("EMPTY_BATCH", None, request([], lengths=[])),
    "empty program": ("EMPTY_PROGRAM", None, request([1], lengths=[1, 0])),
    "long": ("PROGRAM_TOO_LONG", None, request(bytes([1]) * TOO_LONG, np.zeros(TOO_LONG))),
    "no data set": ("DATASET_NOT_FOUND", None, request(content_id=bytes(32))),
    "short id": ("BAD_DATASET_ID", None, request(content_id=b"abc")),
    "no target": ("TARGET_MISSING", None, request(content_id=BARE.content_id, loss=pb.LOSS_MSE)),
    "rows outside": ("ROWS_OUT_OF_RANGE", None, request(rows=pb.RowRange(start=0, stop=5))),
    "rows huge": ("ROWS_OUT_OF_RANGE", None, request(rows=pb.RowRange(stop=2**64 - 1))),
    "no rows": ("ROWS_OUT_OF_RANGE", None, request(rows=pb.RowRange(start=2, stop=2))),
    "nothing wanted": ("NO_OUTPUT_REQUESTED", None, request(wanted=False)),
    "bad loss": ("BAD_ENUM", None, request(loss=99)),
    "many vectors": ("TOO_MANY_VECTORS", None, request([1], vectors=4_000_000_000)),
    "garbage": ("MALFORMED_MESSAGE", None, b"\xff\xfe garbage \x00" * 10),
}


@pytest.mark.parametrize("name", EVALUATE_CASES)
def test_evaluate(caller, name):
    reason, place, message = EVALUATE_CASES[name]
    detail = refused(caller, reason, "Evaluate", message)
    assert place is None or (detail.expression, detail.token) == place


def test_message_over_the_transport_limit(caller):
    with pytest.raises(grpc.RpcError) as caught:
        caller.send("Evaluate", b"\x0a" + bytes(129 << 20))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("constant", [float("nan"), float("inf"), -float("inf")])
def test_special_constants_are_numbers(caller, constant):
    values = np.frombuffer(evaluate(caller, request([3], [constant])).values, "<f4")
    np.testing.assert_array_equal(values, np.float32(constant))


def _header(**changes):
    layout = codec.layout_to_message(BARE.layout)
    for name, value in changes.items():
        setattr(layout, name, value)
    identifier = hashlib.sha256(b"not resident" + repr(changes).encode()).digest()
    return pb.UploadVariablesRequest(header=pb.UploadHeader(layout=layout, content_id=identifier))


def _data(count):
    return pb.UploadVariablesRequest(data=bytes(count))


PAYLOAD = BARE.layout.nbytes
EMPTY_NAMES = pb.UploadHeader(layout=pb.DatasetLayout(names=[""] * 1_000_000))
UPLOAD_CASES = {
    "no messages": ("NO_MESSAGE", []),
    "no header": ("BAD_HEADER", [_data(4)]),
    "two headers": ("BAD_HEADER", [_header(), _header()]),
    "truncated": ("TRUNCATED_UPLOAD", [_header(), _data(PAYLOAD - 1)]),
    "surplus": ("SURPLUS_UPLOAD", [_header(), _data(PAYLOAD), _data(1)]),
    "wrong digest": ("BAD_DIGEST", [_header(), _data(PAYLOAD)]),
    "bad dtype": ("BAD_DTYPE", [_header(dtype=7)]),
    "no rows": ("EMPTY_DATASET", [_header(rows=0)]),
    "no variables": ("EMPTY_DATASET", [_header(variables=0)]),
    "rows lie": ("TRUNCATED_UPLOAD", [_header(rows=5), _data(PAYLOAD)]),
    "too large": ("DATASET_TOO_LARGE", [_header(rows=2**60)]),
    "empty names": ("NAMES_TOO_LONG", [pb.UploadVariablesRequest(header=EMPTY_NAMES)]),
    "overflow": ("DATASET_TOO_LARGE", [_header(rows=2**63, variables=2**63)]),
    "garbage": ("MALFORMED_MESSAGE", [b"\xff\xff\xff"]),
    "garbage data": ("MALFORMED_MESSAGE", [_header(), b"\xff\xff\xff"]),
}


@pytest.mark.parametrize("name", UPLOAD_CASES)
def test_upload(caller, server, name):
    reason, messages = UPLOAD_CASES[name]
    growth = []
    for _ in range(3):  # the probe of readiness may take a segment of its own meanwhile, once
        before = server.shared_memory()
        refused(caller, reason, "UploadVariables", messages)
        growth.append(server.shared_memory() - before)
    assert min(growth) <= 0


@pytest.mark.parametrize("method", ["GetVariables", "ReleaseVariables"])
def test_unknown_data_set_for_get_and_release(caller, method):
    refused(caller, "DATASET_NOT_FOUND", method, b"\x0a\x20" + bytes(32))


def test_content_id_as_the_contract_describes(caller):
    names = ["alpha", "beta", "gamma"]
    payload = np.ascontiguousarray(X.T, "<f4").tobytes()
    text = b"warpfit.dataset.v1\n" + struct.pack("<BBBQQI", 1, 0, 0, 3, 4, 3)
    for name in names:
        text += struct.pack("<I", len(name)) + name.encode()
    identifier = hashlib.sha256(text + payload).digest()
    layout = pb.DatasetLayout(dtype=pb.DTYPE_FLOAT32, variables=3, rows=4, names=names)
    header = pb.UploadHeader(layout=layout, content_id=identifier)
    messages = [pb.UploadVariablesRequest(header=header), pb.UploadVariablesRequest(data=payload)]
    (answer,) = caller.send("UploadVariables", messages)
    assert pb.DatasetInfo.FromString(answer).content_id == identifier


# ---------------------------------------------------------------------------------- seeded requests


REQUESTS = 200
THREADS = 4
GROWTH_BYTES = 32 << 20


def test_wrong_requests_get_answers_that_say_why(tmp_path):
    limits = tmp_path / "tenants.toml"
    limits.write_text(LIMITS)
    flags = ("--threads", "2", "--front-ends", "1", "--tenants-file", str(limits), *FLAGS)
    with ServerProcess(*flags) as server:
        family = [server.process.pid, server.engine().pid]

        def send(seed, count):
            counts = Counter()
            requests = itertools.islice(Fuzzer(seed).requests(), count)
            with grpc.insecure_channel(server.address, OWN_CONNECTION) as channel:
                found = [
                    (request, one)
                    for request in requests
                    for one in outcomes(Caller(channel), request, counts)
                ]
            return found, counts

        send(0, 40)  # imports and compiles what is used later
        before = sum(map(private_bytes, family))
        with ThreadPoolExecutor(THREADS) as pool:
            parts = pool.map(send, range(1, THREADS + 1), [REQUESTS // THREADS] * THREADS)
            parts, counts = zip(*parts, strict=True)
        seen = [one for part in parts for one in part]
        wrong = [(request, found) for request, found in seen if not is_fine(found)]
        assert not wrong[:3]
        statuses = Counter(status for _, (status, _) in seen)
        assert statuses["OK"] > REQUESTS / 10, "some of them are right"
        assert statuses["INVALID_ARGUMENT"] > REQUESTS / 4, "many are not"
        counts = sum(counts, Counter())
        assert counts["answers_compared"] > REQUESTS / 10, "some of them share a call"
        eventually(lambda: server.in_flight() == Amounts())
        assert server.process.poll() is None
        assert server.engine().pid == family[1]
        assert sum(map(private_bytes, family)) - before < GROWTH_BYTES
