"""A server that answers anything: each call ends in a WarpfitError whose text is printable."""

from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest

import warpfit
from warpfit import codec
from warpfit.cli.main import main
from warpfit.dataset import Dataset
from warpfit.transport.channel import health
from warpfit.v1 import evaluator_pb2 as pb

ESCAPES = "a\x1b]0;owned\x07\x1b[2J\r\n\u202eb\x9b"
DATA = Dataset.of(np.arange(4.0)[:, None], np.arange(4.0))
OTHER = Dataset.of(np.arange(4.0)[:, None], np.arange(1.0, 5.0))
LONGER = Dataset.of(np.arange(5.0)[:, None], np.arange(5.0))
INFO = codec.dataset_info(DATA.content_id, DATA.layout)
SERVER = pb.ServerInfo(contract=codec.CONTRACT).SerializeToString()


class Liar(grpc.GenericRpcHandler):
    """Answers each method with given messages, and ends with a given status."""

    def __init__(self):
        self.answers, self.status, self.details, self.metadata = {}, None, "", ()
        self.usual = {"GetVariables": [INFO], "UploadVariables": [INFO], "GetServerInfo": [SERVER]}

    def service(self, call):
        method = call.method.rpartition("/")[2]

        def answer(requests, context):
            next(requests, None)
            context.set_trailing_metadata(self.metadata)
            yield from self.answers.get(method, self.usual.get(method, []))
            if self.status is not None and method not in self.usual:
                context.set_code(self.status)
                context.set_details(self.details)

        return grpc.stream_stream_rpc_method_handler(answer)


@pytest.fixture(scope="module")
def place():
    handler = Liar()
    server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.max_send_message_length", -1)])
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield handler, f"127.0.0.1:{port}"
    server.stop(None)


@pytest.fixture
def liar(place):
    handler, address = place
    retry = warpfit.RetryPolicy(total_seconds=0)
    small = warpfit.TransportConfig(message_bytes=1 << 16)
    with warpfit.connect(address, retry=retry, transport=small) as client:
        yield handler, client
    handler.__init__()


def upload(client):
    return client.upload(np.arange(4.0)[:, None], np.arange(4.0))


def one(client, method, **options):
    data = upload(client)
    return getattr(client, method)(data, ["p1*x1"], [[1.0]], loss="mse", **options)


#: Calls whose answer is read as a stream. A server that sends others several messages is one that
#: never ends its answer: only a deadline ends that.
STREAMED = {"evaluate", "values", "gradients", "optimize with progress"}
GRADIENTS = dict.fromkeys(("gradient", "variable_gradient", "reductions"), True)
#: Calls by the method whose answer is a lie.
CALLS = {
    "evaluate": ("Evaluate", lambda client: one(client, "evaluate")),
    "evaluate with a deadline": ("Evaluate", lambda client: one(client, "run", timeout=9)),
    "values": ("Evaluate", lambda client: one(client, "run", values=True, jacobian=True)),
    "gradients": ("Evaluate", lambda client: one(client, "run", **GRADIENTS)),
    "optimize": ("Optimize", lambda client: one(client, "optimize", covariance=True)),
    "optimize with progress": ("Optimize", lambda client: one(client, "optimize", progress=print)),
    **{"upload": ("UploadVariables", upload), "find": ("GetVariables", upload)},
    "open": ("OpenDataset", lambda client: client.open("a.parquet", x=["a"], y="b")),
    "open all": ("OpenDataset", lambda client: client.open("a.parquet")),
}


def fit(**changes):
    """A result of the right shape but for the changes."""
    given = dict.fromkeys(("parameters", "losses", "initial_losses", "covariances"), bytes(8))
    given |= dict.fromkeys(("iterations", "evaluations", "starts"), bytes(4)) | {"reasons": b"\1"}
    result = pb.FitResult(**(given | changes), timings=pb.Timings())
    return pb.OptimizeResponse(result=result).SerializeToString()


LIES = {
    "an empty message": [b""],
    **{"nothing": [], "no message at all": [b"\xff" * 100]},
    "a truncated message": [INFO[: len(INFO) // 2]],
    "no UTF-8": [b"\x0a\x04\xff\xfe\xfd\xfc" + b"\x12\x02\xc3\x28"],
    "wrong wire types": [b"\x08\x01\x10\x02\x18\x03\x20\x04\x28\x05\x30\x06"],
    "a message over the limit": [bytes(1 << 17)],
    "another data set": [codec.dataset_info(OTHER.content_id, OTHER.layout)],
    "another layout": [codec.dataset_info(DATA.content_id, LONGER.layout)],
    "no layout": [pb.DatasetInfo(content_id=DATA.content_id).SerializeToString()],
    "twice the right message": [INFO, INFO],
    "losses of a wrong length": [
        pb.EvaluateResponse(losses=bytes(7), timings=pb.Timings()).SerializeToString()
    ],
    "an unknown reason": [fit(reasons=b"\xff")],
    "progress alone": [pb.OptimizeResponse(progress=pb.FitProgress()).SerializeToString()] * 9,
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("name", CALLS)
def test_a_lie_is_an_error_of_this_package(liar, name, lie, recwarn):
    handler, client = liar
    method, call = CALLS[name]
    whole = [b"".join(LIES[lie])] if LIES[lie] else []
    handler.answers = {method: LIES[lie] if name in STREAMED else whole}
    if method == "UploadVariables":
        handler.answers["GetVariables"] = []
        handler.status, handler.usual = grpc.StatusCode.NOT_FOUND, {"UploadVariables": []}
    try:
        call(client)
    except warpfit.WarpfitError as error:
        assert not isinstance(error, warpfit.InvalidArgumentError), error
        assert str(error).isprintable()
    else:
        assert lie == "twice the right message", "the answer is taken"


@pytest.mark.parametrize("kind", [warpfit.InternalError, warpfit.ProgramError])
def test_texts_of_a_server_do_not_control_the_terminal(liar, capsys, kind):
    handler, client = liar
    address = client._failover.connection.target.addresses[0]
    texts = dict.fromkeys(("message", "reason", "remedy", "field"), ESCAPES)
    error = kind(**texts, expression=7, token=2**60)
    handler.status, handler.details = grpc.StatusCode[error.status], "plain"
    handler.metadata = ((codec.ERROR_METADATA_KEY, codec.error_to_status(error)),)
    with pytest.raises(warpfit.WarpfitError) as caught:
        one(client, "evaluate")
    assert str(caught.value).isprintable() and "\\x1b]0;owned" in str(caught.value)
    handler.status = handler.details = None
    server = pb.ServerInfo(version=ESCAPES, engine=ESCAPES)
    server.devices.add(name=ESCAPES, driver=ESCAPES, compute_capability=ESCAPES)
    server.operators.add(name=ESCAPES, symbol=ESCAPES, notes=ESCAPES)
    handler.metadata, handler.answers = (), {"GetServerInfo": [server.SerializeToString()]}
    main(["info", address])
    printed = "".join(capsys.readouterr())
    assert "owned" in printed and not set(printed) & set("\x1b\x07\x9b\u202e\r")


@pytest.mark.parametrize("said", [b"", b"\x08", b"\x08\xff", b"\xff" * 1000, b"\x0a\x01a"])
def test_any_answer_about_health_is_a_status(liar, said):
    handler, client = liar
    handler.answers = {"Check": [said]}
    address = client._failover.connection.target.addresses[0]
    assert health(address, "", 5) == ("UNKNOWN", "")
