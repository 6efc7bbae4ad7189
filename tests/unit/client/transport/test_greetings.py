"""What a client asks first: of a server that it does not know, and of one that was silent."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import warpfit
from support.servers.loopback import serve
from support.servers.network import Proxy
from warpfit import codec, testing
from warpfit.transport import channel
from warpfit.v1 import evaluator_pb2 as pb

X = np.arange(1.0, 5.0)[:, None]


@pytest.fixture
def served():
    server = testing.InProcessServer()
    with serve(server) as (address, servicer):
        yield server, servicer, address


def count_greetings(monkeypatch, server):
    asked, answer = [], server.answer

    def counting(request):
        asked.extend([request.method] * (request.method == "GetServerInfo"))
        return answer(request)

    monkeypatch.setattr(server, "answer", counting)
    return asked


def evaluate(client, data, **options):
    return client.evaluate(data, ["p1*x1"], [[2.0]], **options)[:, 0]


@pytest.mark.parametrize(
    "call",
    [
        lambda client, data: evaluate(client, data),
        lambda client, data: evaluate(client, data, timeout=20),
        lambda client, data: client.upload(X + 1, X[:, 0]),
    ],
    ids=["evaluate", "timeout", "upload"],
)
def test_a_server_that_leaves_unknown_fields_out_is_refused(served, monkeypatch, call):
    _, _, address = served
    with warpfit.connect(address) as client:
        data = client.upload(X, X[:, 0])
        old = pb.ServerInfo(version="0.0.9", engine="cpu")
        monkeypatch.setattr(codec, "info_to_message", lambda info: old)
        monkeypatch.setattr(channel, "_SILENCE_SECONDS", 0.0)
        with pytest.raises(warpfit.UnimplementedError, match=r"0\.0\.9") as caught:
            call(client, data)
        assert caught.value.reason == "SERVER_TOO_OLD"
        assert client.info().contract == 0, "whoever asks which version it is gets to know"


def test_a_server_is_asked_once_a_connection_and_again_after_a_failure(served, monkeypatch):
    server, _, address = served
    asked = count_greetings(monkeypatch, server)
    with warpfit.connect(address) as client:
        data = client.upload(X, X[:, 0])
        for _ in range(5):
            evaluate(client, data)
        assert len(asked) == 1
        failing = [warpfit.UnavailableError("not now", "ENGINE_RESTARTING")]
        answer = server.answer
        monkeypatch.setattr(
            server, "answer", lambda request: _raise(failing.pop()) if failing else answer(request)
        )
        evaluate(client, data)
        assert len(asked) == 2, "it may be another version now"
        monkeypatch.setattr(channel, "_SILENCE_SECONDS", 0.05)
        time.sleep(0.1)
        evaluate(client, data)
        assert len(asked) == 3, "and after a silence"


def _raise(error):
    raise error


@pytest.mark.parametrize("timeout", [None, 0.5])
def test_a_proxy_that_swallows_idle_connections_costs_a_moment(
    served, monkeypatch, caplog, timeout
):
    """It does so without a word, and gRPC's own pings would need half a minute."""
    _, _, address = served
    with Proxy(address) as proxy, warpfit.connect(proxy.address) as client:
        data = client.upload(X, X[:, 0])
        monkeypatch.setattr(channel, "_SILENCE_SECONDS", 0.05)
        monkeypatch.setattr(channel, "_GREETING_SECONDS", 0.5)
        for _ in range(2):
            proxy.swallow()
            before = proxy.connections
            time.sleep(0.1)
            np.testing.assert_array_equal(evaluate(client, data, timeout=timeout), 2 * X[:, 0])
            assert proxy.connections == before + 1
            assert "connecting anew" in caplog.text


def test_a_server_that_is_really_gone_is_named(served, monkeypatch):
    _, _, address = served
    with Proxy(address) as proxy, warpfit.connect(proxy.address) as client:
        data = client.upload(X, X[:, 0])
        monkeypatch.setattr(channel, "_SILENCE_SECONDS", 0.05)
        proxy.swallow(ever=True)
        time.sleep(0.1)
        with pytest.raises(warpfit.DeadlineExceededError, match="new connection"):
            evaluate(client, data, timeout=0.6)


def test_what_a_server_says_of_the_time_of_a_question_is_told(served, monkeypatch):
    """A deadline that the server itself has ended is no silence of the connection."""
    server, _, address = served
    with warpfit.connect(address) as client:
        data = client.upload(X, X[:, 0])
        monkeypatch.setattr(channel, "_SILENCE_SECONDS", 0.0)
        answer = server.answer
        late = warpfit.DeadlineExceededError("all engines compile", "ENGINE_BUSY", "Wait")

        def late_greetings(request):
            return _raise(late) if request.method == "GetServerInfo" else answer(request)

        monkeypatch.setattr(server, "answer", late_greetings)
        transport = client._failover.transport
        before = transport._open[address]
        for ask in (lambda: evaluate(client, data, timeout=5), client.info):
            with pytest.raises(warpfit.DeadlineExceededError, match="all engines compile"):
                ask()
        assert transport._open[address] is before


def test_calls_in_flight_keep_their_connection(served, monkeypatch):
    """An old connection is closed only when nobody waits there any more."""
    server, servicer, address = served
    with warpfit.connect(address) as client, ThreadPoolExecutor(1) as pool:
        data = client.upload(X, X[:, 0])
        servicer.hang = True
        waiting = pool.submit(evaluate, client, data)
        assert servicer.hangs.wait(20)
        servicer.hang = False
        monkeypatch.setattr(channel, "_SILENCE_SECONDS", 0.0)
        monkeypatch.setattr(channel, "_GREETING_SECONDS", 0.1)
        pauses, answer = [0.5], server.answer

        def slow(request):
            if request.method == "GetServerInfo" and pauses:
                time.sleep(pauses.pop())
            return answer(request)

        monkeypatch.setattr(server, "answer", slow)
        transport = client._failover.transport
        np.testing.assert_array_equal(evaluate(client, data), 2 * X[:, 0])
        assert len(transport._retired) == 1
        servicer.cancelled.set()
        np.testing.assert_array_equal(waiting.result(20), 2 * X[:, 0])
        assert not transport._retired


# ------------------------------------------------------------------------------- unknown fields

REQUESTS = (
    *(pb.EvaluateRequest, pb.OptimizeRequest, pb.UploadVariablesRequest, pb.OpenDatasetRequest),
    *(
        pb.GetVariablesRequest,
        pb.ReleaseVariablesRequest,
        pb.GetServerInfoRequest,
        pb.SearchRequest,
    ),
)
UNKNOWN = b"\xf8\xff\x7f\x01"  # field 262,143 as a number


def messages_within(kind, way=()):
    """Yield the path to each message of a request, itself first."""
    if not kind.GetOptions().map_entry:  # which protobuf itself takes for a field that is not known
        yield way
    for field in kind.fields:
        if field.message_type is not None:
            yield from messages_within(field.message_type, (*way, field))


def with_unknown(way):
    """Serialize a request whose message at the end of a path has a field that nobody knows."""
    data = UNKNOWN
    for field in reversed(way):
        data = codec.bytes_tag(field.number) + codec.varint(len(data)) + data
    return data


@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: kind.DESCRIPTOR.name)
def test_a_field_that_is_not_known_is_refused_wherever_it_stands(kind):
    for way in messages_within(kind.DESCRIPTOR):
        name = (way[-1].message_type if way else kind.DESCRIPTOR).full_name
        with pytest.raises(warpfit.UnimplementedError) as caught:
            codec.parse_message(kind, with_unknown(way))
        assert caught.value.reason == "UNKNOWN_FIELD"
        assert f"field 262143 of {name};" in str(caught.value)


def test_data_of_an_upload_with_a_field_that_is_not_known_are_refused():
    data = pb.UploadVariablesRequest(data=b"12345678").SerializeToString()
    assert bytes(codec.upload_data(data)) == b"12345678"
    with pytest.raises(warpfit.UnimplementedError):
        codec.upload_data(data + UNKNOWN)
