"""What a client asks first: of a server that it does not know, and of one that was silent."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import warpfit
from support.servers.loopback import fail_calls, serve
from support.servers.network import Proxy
from warpfit import codec, testing
from warpfit.transport import channel
from warpfit.v1 import evaluator_pb2 as pb

X = np.arange(1.0, 5.0)[:, None]


@pytest.fixture
def served():
    server = testing.InProcessServer()
    with serve(server) as (address, servicer), warpfit.connect(address) as client:
        yield server, servicer, client, client.upload(X, X[:, 0])


@pytest.fixture
def proxied(served):
    (address,) = served[2]._failover.connection.target.addresses
    with Proxy(address) as proxy, warpfit.connect(proxy.address) as client:
        yield proxy, client, client.upload(X, X[:, 0])


def answer_questions(monkeypatch, server, answer):
    """Have each question for what the server is go through ``answer``, which may raise."""
    usual = server.answer

    def answered(request):
        if request.method == "GetServerInfo":
            answer()
        return usual(request)

    monkeypatch.setattr(server, "answer", answered)


def evaluate(client, data, **options):
    return client.evaluate(data, ["p1*x1"], [[2.0]], **options)[:, 0]


def test_a_server_that_leaves_unknown_fields_out_is_refused(served, monkeypatch):
    _, _, client, data = served
    old = pb.ServerInfo(version="0.0.9", engine="cpu")
    monkeypatch.setattr(codec, "info_to_message", lambda info: old)
    monkeypatch.setattr(channel, "_SILENCE_SECONDS", 0.0)
    for call in (
        *(lambda: evaluate(client, data), lambda: evaluate(client, data, timeout=20)),
        lambda: client.upload(X + 1, X[:, 0]),
    ):
        with pytest.raises(warpfit.UnimplementedError, match=r"0\.0\.9") as caught:
            call()
        assert caught.value.reason == "SERVER_TOO_OLD"
    assert client.info().contract == 0, "whoever asks which version it is gets to know"


def test_a_server_is_asked_once_a_connection_and_again_after_a_failure(served, monkeypatch):
    server, _, _, _ = served
    asked = []
    answer_questions(monkeypatch, server, lambda: asked.append(1))
    (address,) = served[2]._failover.connection.target.addresses
    with warpfit.connect(address) as client:
        data = client.upload(X, X[:, 0])
        for _ in range(5):
            evaluate(client, data)
        assert len(asked) == 1
        fail_calls(server, "Evaluate", warpfit.UnavailableError("not now", "ENGINE_RESTARTING"))
        evaluate(client, data)
        assert len(asked) == 2, "it may be another version now"
        monkeypatch.setattr(channel, "_SILENCE_SECONDS", 0.05)
        time.sleep(0.1)
        evaluate(client, data)
        assert len(asked) == 3, "and after a silence"


@pytest.mark.parametrize("timeout", [None, 0.5])
def test_a_proxy_that_swallows_idle_connections_costs_a_moment(
    proxied, monkeypatch, caplog, timeout
):
    """It does so without a word, and gRPC's own pings would need half a minute."""
    proxy, client, data = proxied
    monkeypatch.setattr(channel, "_SILENCE_SECONDS", 0.05)
    monkeypatch.setattr(channel, "_GREETING_SECONDS", 0.3)
    for _ in range(2):
        proxy.swallow()
        before = proxy.connections
        time.sleep(0.1)
        np.testing.assert_array_equal(evaluate(client, data, timeout=timeout), 2 * X[:, 0])
        assert proxy.connections == before + 1 and "connecting anew" in caplog.text


def test_a_server_that_is_really_gone_is_named(proxied, monkeypatch):
    proxy, client, data = proxied
    monkeypatch.setattr(channel, "_SILENCE_SECONDS", 0.05)
    proxy.swallow(ever=True)
    time.sleep(0.1)
    with pytest.raises(warpfit.DeadlineExceededError, match="new connection"):
        evaluate(client, data, timeout=0.6)


def test_what_a_server_says_of_the_time_of_a_question_is_told(served, monkeypatch):
    """A deadline that the server itself has ended is no silence of the connection."""
    server, _, client, data = served
    monkeypatch.setattr(channel, "_SILENCE_SECONDS", 0.0)

    def be_late():
        raise warpfit.DeadlineExceededError("all engines compile", "ENGINE_BUSY", "Wait")

    answer_questions(monkeypatch, server, be_late)
    before = dict(client._failover.transport._open)
    for ask in (lambda: evaluate(client, data, timeout=5), client.info):
        with pytest.raises(warpfit.DeadlineExceededError, match="all engines compile"):
            ask()
    assert client._failover.transport._open == before


def test_calls_in_flight_keep_their_connection(served, monkeypatch):
    """An old connection is closed only when nobody waits there any more."""
    server, servicer, client, data = served
    with ThreadPoolExecutor(1) as pool:
        servicer.hang = True
        waiting = pool.submit(evaluate, client, data)
        assert servicer.hangs.wait(20)
        servicer.hang = False
        monkeypatch.setattr(channel, "_SILENCE_SECONDS", 0.0)
        monkeypatch.setattr(channel, "_GREETING_SECONDS", 0.1)
        pauses = [0.5]
        answer_questions(monkeypatch, server, lambda: time.sleep(pauses.pop() if pauses else 0))
        np.testing.assert_array_equal(evaluate(client, data), 2 * X[:, 0])
        assert len(client._failover.transport._retired) == 1
        servicer.cancelled.set()
        np.testing.assert_array_equal(waiting.result(20), 2 * X[:, 0])
        assert not client._failover.transport._retired


REQUESTS = [kind for name, kind in vars(pb).items() if name.endswith("Request")]
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
