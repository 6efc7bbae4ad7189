"""Wrong requests get the right status, reason and place, and leave the server serving."""

import hashlib
import itertools
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest

import warpfit
from support.load.fuzz import FLAGS, LIMITS, Fuzzer, is_fine, outcomes
from support.servers.rpcs import OWN_CONNECTION, SERVICE, Caller, detail_of
from support.servers.server import ServerProcess, eventually, private_bytes, tenants_file
from warpfit import codec, ops
from warpfit.calls.arguments import build_evaluation
from warpfit.dataset import Dataset
from warpfit.losses import LossFunction
from warpfit.v1 import evaluator_pb2 as pb
from warpfit_server.tenants import Amounts

X = np.arange(12, dtype=np.float32).reshape(4, 3)
DATA = Dataset.of(X, X[:, 0])
BARE = Dataset.of(X)


@pytest.fixture(autouse=True)
def still_serving(caller):
    for dataset in (DATA, BARE):
        caller.call("UploadVariables", dataset)
    yield
    (answer,) = caller.send("Evaluate", request())
    assert pb.EvaluateResponse.FromString(answer).header.rows == 4


def request(codes=b"\x01", lengths=None, vectors=0, **fields):
    lengths = lengths or [len(codes)]
    programs = pb.Programs(codes=bytes(codes), vectors=vectors)
    programs.values = bytes(8 * len(codes))
    programs.lengths = np.array(lengths, "<u4").tobytes()
    programs.parameter_counts = bytes(4 * len(lengths))
    given = {"content_id": DATA.content_id, "values": True, **fields}
    return pb.EvaluateRequest(programs=programs, **given)


def refused(caller, reason, method, message):
    """Send what must be refused for a reason; return what the answer says."""
    status, detail = caller.refusal(method, message)
    assert (status, detail.reason) == (STATUS.get(reason, "INVALID_ARGUMENT"), reason)
    assert detail.remedy
    assert "Traceback" not in detail.message
    if reason in TOO_MUCH:
        assert "--tenants-file" in detail.remedy or "--max-" in detail.remedy
        assert detail.needed > detail.available
    return detail


TOO_MUCH = ("PROGRAM_TOO_LONG", "TOO_MANY_VECTORS", "DATASET_TOO_LARGE", "NAMES_TOO_LONG")
STATUS = {"DATASET_NOT_FOUND": "NOT_FOUND", **dict.fromkeys(TOO_MUCH, "RESOURCE_EXHAUSTED")}
ADD = ops.OPERATORS["add"].code
#: Reason, place if there is one, and request.
EVALUATE_CASES = {
    "underflow": ("STACK_UNDERFLOW", (1, 1), request([1, 1, ADD, 1, ADD], lengths=[3, 2])),
    "lengths lie": ("PROGRAM_TOO_LONG", None, request([1], lengths=[2**31])),
    "no data set": ("DATASET_NOT_FOUND", None, request(content_id=bytes(32))),
    "short id": ("BAD_DATASET_ID", None, request(content_id=b"abc")),
    "no target": ("TARGET_MISSING", None, request(content_id=BARE.content_id, loss=pb.LOSS_MSE)),
    "rows outside": ("ROWS_OUT_OF_RANGE", None, request(rows=pb.RowRange(start=0, stop=5))),
    "nothing wanted": ("NO_OUTPUT_REQUESTED", None, request(values=False)),
    "many vectors": ("TOO_MANY_VECTORS", None, request([1], vectors=4_000_000_000)),
    "garbage": ("MALFORMED_MESSAGE", None, b"\xff\xfe garbage \x00" * 10),
}


@pytest.mark.parametrize("name", EVALUATE_CASES)
def test_evaluate(caller, name):
    reason, place, message = EVALUATE_CASES[name]
    detail = refused(caller, reason, "Evaluate", message)
    assert place is None or (detail.expression, detail.token) == place


def test_message_over_the_transport_limit(caller):
    assert caller.refused("Evaluate", b"\x0a" + bytes(129 << 20))[0] == "RESOURCE_EXHAUSTED"


def header(**changes):
    layout = codec.layout_to_message(BARE.layout)
    for name, value in changes.items():
        setattr(layout, name, value)
    identifier = hashlib.sha256(b"not resident" + repr(changes).encode()).digest()
    return pb.UploadVariablesRequest(header=pb.UploadHeader(layout=layout, content_id=identifier))


def payload(count=BARE.layout.nbytes):
    return pb.UploadVariablesRequest(data=bytes(count))


UPLOAD_CASES = {
    "no header": ("BAD_HEADER", [payload(4)]),
    "two headers": ("BAD_HEADER", [header(), header()]),
    "truncated": ("TRUNCATED_UPLOAD", [header(), payload(BARE.layout.nbytes - 1)]),
    "surplus": ("SURPLUS_UPLOAD", [header(), payload(), payload(1)]),
    "wrong digest": ("BAD_DIGEST", [header(), payload()]),
    "overflow": ("DATASET_TOO_LARGE", [header(rows=2**63, variables=2**63)]),
    "garbage data": ("MALFORMED_MESSAGE", [header(), b"\xff\xff\xff"]),
}


@pytest.mark.parametrize("name", UPLOAD_CASES)
def test_upload(caller, server, name):
    reason, messages = UPLOAD_CASES[name]
    growth = []
    for _ in range(2):  # the probe of readiness may take a segment of its own meanwhile, once
        before = server.shared_memory()
        refused(caller, reason, "UploadVariables", messages)
        growth.append(server.shared_memory() - before)
    assert min(growth) <= 0


EVALUATE = SERVICE + "Evaluate"
TALL = np.random.default_rng(0).normal(size=(1000, 2))


def test_names_and_losses_have_limits(client):
    data = client.upload(TALL, TALL[:, 0])
    names = [f"x{n}" for n in range(70_000)]
    long = LossFunction.parse("+".join(["f"] * client.info().limits.loss_tokens))
    for reason, call in {
        "TOO_MANY_NAMES": lambda: client.upload(np.ones((1, 70_000)), names=names),
        "NAMES_TOO_LONG": lambda: client.upload(np.ones((1, 1)), names=["x" * 2_000_000]),
        "LOSS_TOO_LONG": lambda: client.evaluate(data, ["x1"], loss=long),
    }.items():
        with pytest.raises(warpfit.ResourceExhaustedError) as caught:
            call()
        assert caught.value.reason == reason
        assert caught.value.needed > caught.value.available
    assert client.evaluate(data, ["x1"], loss="mse")[0] == 0.0


@pytest.mark.parametrize(
    ("programs", "values", "options"),
    [
        (100, True, {"jacobian": True}),
        (4000, None, {"loss": "mse", "reductions": True, "linear_scaling": True}),
    ],
)
def test_an_answer_below_4_mb_is_one_message(client, caller, programs, values, options):
    """So a unary call, which reads one message and hangs after another one, has the whole of it."""
    data = client.upload(TALL, TALL[:, 0])
    texts, parameters = [f"p1*x1 + {n}" for n in range(programs)], [[2.0]] * programs
    evaluation, _ = build_evaluation(data, texts, parameters, values, options)
    unary = caller.channel.unary_unary(EVALUATE)
    message = unary(codec.evaluation_to_bytes(evaluation), timeout=20)
    found = codec.read_result(evaluation, data.layout, [codec.answer_from_bytes(message)])
    parts = caller.send("Evaluate", codec.evaluation_to_bytes(evaluation, pieces=True))
    wanted = codec.read_result(evaluation, data.layout, map(codec.answer_from_bytes, parts))
    for name in ("values", "jacobian", "losses", "gradients", "reductions", "scaling"):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))


def test_a_longer_answer_is_refused_at_once_unless_its_caller_reads_pieces(client, caller):
    data = client.upload(TALL, TALL[:, 0])
    asked, _ = build_evaluation(data, ["x1"] * 1001, None, True, {})
    message = codec.evaluation_to_bytes(asked)
    for way in (caller.channel.unary_unary, caller.channel.unary_stream):
        with pytest.raises(grpc.RpcError) as caught:
            list(way(EVALUATE)(message, timeout=20))
        detail = detail_of(caught.value)
        assert caught.value.code().name == "INVALID_ARGUMENT"
        assert (detail.reason, detail.field) == ("ANSWER_TOO_LONG", "pieces")
        assert (detail.needed, detail.available) == (1001 * 1000 * 4, 4_000_000)
        assert "as a stream" in detail.remedy
    parts = caller.send("Evaluate", codec.evaluation_to_bytes(asked, pieces=True))
    assert len(parts) > 1
    values = codec.read_result(asked, data.layout, map(codec.answer_from_bytes, parts)).values
    np.testing.assert_array_equal(values[:, 0, :], np.tile(TALL[:, 0], (1001, 1)).astype("f4"))


REQUESTS, THREADS = 120, 4


def test_wrong_requests_get_answers_that_say_why(tmp_path):
    limits = tenants_file(tmp_path, LIMITS)
    flags = ("--threads", "2", "--front-ends", "1", "--tenants-file", limits, *FLAGS)
    with ServerProcess(*flags) as server:
        family = [server.process.pid, server.engine().pid]

        def send(seed, count):
            counts, found = Counter(), []
            with grpc.insecure_channel(server.address, OWN_CONNECTION) as channel:
                for request in itertools.islice(Fuzzer(seed).requests(), count):
                    ends = outcomes(Caller(channel), request, counts)
                    found += [(request, end) for end in ends]
            return found, counts

        send(0, 20)  # imports and compiles what is used later
        before = sum(map(private_bytes, family))
        with ThreadPoolExecutor(THREADS) as pool:
            parts = pool.map(send, range(1, THREADS + 1), [REQUESTS // THREADS] * THREADS)
            parts, counts = zip(*parts, strict=True)
        seen = [one for part in parts for one in part]
        assert not [one for one in seen if not is_fine(one[1])][:3]
        statuses = Counter(status for _, (status, _) in seen)
        assert statuses["OK"] > REQUESTS / 10, "some of them are right"
        assert statuses["INVALID_ARGUMENT"] > REQUESTS / 4, "many are not"
        counts = sum(counts, Counter())
        assert counts["answers_compared"] > REQUESTS / 10, "some of them share a call"
        eventually(lambda: server.in_flight() == Amounts())
        assert server.process.poll() is None
        assert server.engine().pid == family[1]
        assert sum(map(private_bytes, family)) - before < 32 << 20
