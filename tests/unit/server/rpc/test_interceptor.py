"""The interceptor: what it admits, refuses, counts and observes, without gRPC."""

import gc
import threading
import time
import weakref
from dataclasses import replace

import grpc
import numpy as np
import pytest

from support.servers.calls import SILENT, Call, tenants_file, token_file
from warpfit import codec
from warpfit.errors import UnavailableError
from warpfit.request import Timings
from warpfit_server.config import Config
from warpfit_server.observability import calls
from warpfit_server.observability.calls import Observer
from warpfit_server.observability.measurements import Recorder
from warpfit_server.rpc.interceptor import Interceptor
from warpfit_server.tenancy.quotas import Amounts, QuotaTable
from warpfit_server.tenancy.tenants import tenant_of

METHODS = ("Evaluate", "GetServerInfo", "UploadVariables")


class FrontEnd:
    """An interceptor before one method, and what it has counted."""

    def __init__(self, behaviour, *, forwards=False, name="Evaluate", **settings):
        config = replace(Config(), **settings)
        self.quotas = QuotaTable.create(1)
        self.recorder = Recorder()
        self.interceptor = Interceptor(config, self.quotas)
        kinds = {
            "Evaluate": grpc.unary_stream_rpc_method_handler,
            "UploadVariables": grpc.stream_unary_rpc_method_handler,
        }
        handler = kinds.get(name, grpc.unary_unary_rpc_method_handler)(behaviour)
        handlers = self.interceptor.intercept(
            {name: handler}, Observer(self.recorder), forwards=forwards
        )
        self.method = handlers[name].stream_stream

    def take(self, call):
        """Let a call arrive on this thread."""
        self.method.take(call)
        return call

    def ended(self):
        """Return method, status and tenant of the calls that were counted."""
        counts = self.recorder.totals().counts
        return {labels: n for (name, labels), n in counts.items() if name == "requests"}


class Gate:
    """A streaming method that echoes each message, but only once `open` is set."""

    def __init__(self):
        self.open, self.begun = threading.Event(), []

    def __call__(self, message, context):
        self.begun.append(message)
        self.open.wait(10)
        yield message


def echo(message, context):
    yield message
    yield tenant_of(context).encode()


def echo_of(name):
    """Return an echoing method of the kind that the method of this name has."""
    if name == "Evaluate":
        return echo
    return lambda sent, context: sent if isinstance(sent, bytes) else b"".join(sent)


def until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class TestAdmission:
    def test_a_refusal_needs_no_thread_and_no_message(self, tmp_path):
        path, _ = token_file(tmp_path, "alice")
        front_end = FrontEnd(echo, token_file=path)
        call = front_end.take(Call(None))  # fails if it is asked for a message
        assert call.answer(wait=False) == ("UNAUTHENTICATED", [])
        assert call.detail().reason == "TOKEN_MISSING"
        assert front_end.interceptor.workers._threads == 0
        assert front_end.ended() == {("Evaluate", "UNAUTHENTICATED", "default"): 1}

    def test_threads_of_cancelled_calls_count_for_their_tenant(self, tmp_path):
        path, tokens = token_file(tmp_path, "greedy", "modest")
        go = threading.Event()

        def behaviour(message, context):
            go.wait(10)
            return message

        front_end = FrontEnd(behaviour, name="GetServerInfo", token_file=path, max_requests=4)
        running = []
        for _ in range(6):  # three quarters of the threads, which are twice the slots
            running.append(front_end.take(Call([b"x"], tokens["greedy"])))
            running[-1].cancel()
        crowded = front_end.take(Call(None, tokens["greedy"]))
        assert crowded.answer(wait=False)[0] == "RESOURCE_EXHAUSTED"
        modest = front_end.take(Call([b"x"], tokens["modest"]))
        go.set()
        assert modest.answer()[0] == "OK"
        for call in running:
            call.wait()
        until(lambda: not front_end.interceptor.workers._busy)
        assert front_end.take(Call([b"x"], tokens["greedy"])).answer()[0] == "OK"
        assert front_end.quotas.in_flight() == Amounts()

    def test_a_cancelled_call_leaves_its_slot_at_once_and_its_memory_at_its_end(self):
        gate = Gate()
        front_end = FrontEnd(gate)
        call = front_end.take(Call([bytes(1000)]))
        until(lambda: gate.begun)
        assert front_end.quotas.in_flight() == Amounts(1, 1000)
        call.cancel()
        assert front_end.quotas.in_flight() == Amounts(0, 1000)
        gate.open.set()
        call.wait()
        assert front_end.quotas.in_flight() == Amounts()
        assert front_end.ended() == {("Evaluate", "CANCELLED", "default"): 1}


class TestMessages:
    @pytest.mark.parametrize(
        ("name", "sent"),
        [*((name, ()) for name in METHODS), ("UploadVariables", (b"1", b"2"))],
    )
    def test_each_message_must_arrive_in_time(self, name, sent):
        front_end = FrontEnd(echo_of(name), name=name, message_seconds=0.3)
        began = time.monotonic()
        call = front_end.take(Call([*sent, *SILENT]))
        assert front_end.quotas.in_flight() == Amounts(
            1, front_end.interceptor.admission.message_bytes
        )
        assert call.answer()[0] == "DEADLINE_EXCEEDED"
        assert 0.3 <= time.monotonic() - began < 3
        assert call.detail().reason == "MESSAGE_TIMEOUT"
        until(lambda: front_end.quotas.in_flight() == Amounts())
        until(lambda: front_end.ended() == {(name, "DEADLINE_EXCEEDED", "default"): 1})
        assert front_end.take(Call([b"x"])).answer()[0] == "OK"

    @pytest.mark.parametrize(
        ("name", "most"),
        [("GetVariables", 64 << 10), ("Evaluate", 1 << 20), ("UploadVariables", 1 << 20)],
    )
    def test_batches_and_uploads_may_be_as_long_as_the_tenant_may_send(self, name, most, tmp_path):
        tenants = tenants_file(tmp_path, "[default]\nmessage_bytes = 1048576\n")
        front_end = FrontEnd(echo_of(name), name=name, tenants_file=tenants)
        assert front_end.take(Call([bytes(most)])).answer()[0] == "OK"
        call = front_end.take(Call([bytes(most + 1)]))
        assert call.answer()[0] == "RESOURCE_EXHAUSTED"
        detail = call.detail()
        assert (detail.reason, detail.needed, detail.available) == (
            *("MESSAGE_TOO_LARGE", most + 1),
            most,
        )

    def test_a_call_without_a_message_is_refused(self):
        call = FrontEnd(echo).take(Call([]))
        assert call.answer()[0] == "INVALID_ARGUMENT"
        assert call.detail().reason == "NO_MESSAGE"


class TestAnswers:
    def test_a_client_that_has_gone_is_sent_no_more(self):
        made, closed = [], []

        def behaviour(message, context):
            try:
                for number in range(100):
                    made.append(number)
                    yield bytes([number])
            finally:
                closed.append(True)

        call = Call([b"x"], cancel_after=3)
        FrontEnd(behaviour).take(call).wait()
        assert (len(made), closed) == (3, [True])

    def test_an_unexpected_error_tells_clients_nothing(self):
        def behaviour(message, context):
            raise RuntimeError("secret")
            yield b""

        front_end = FrontEnd(behaviour)
        call = front_end.take(Call([b"x"]))
        assert call.answer() == ("INTERNAL", [])
        assert "secret" not in str(call.detail()) + call.details
        assert front_end.quotas.in_flight() == Amounts()

    def test_a_failed_call_keeps_no_memory(self):
        """Though its error is, like gRPC's, held by a frame of its own traceback."""
        payloads = []

        def raise_in_a_cycle():
            error = grpc.RpcError()
            raise error

        def behaviour(message, context):
            payload = np.zeros(10)
            payloads.append(weakref.ref(payload))
            yield bytes(payload)
            try:
                raise_in_a_cycle()
            except grpc.RpcError as error:
                raise UnavailableError("the client has gone", "GONE") from error

        gc.disable()
        try:
            assert FrontEnd(behaviour).take(Call([b""])).answer()[0] == "UNAVAILABLE"
            until(lambda: payloads[0]() is None)
        finally:
            gc.enable()


class TestDecoding:
    """At most two calls of a tenant are decoded at a time."""

    @staticmethod
    def waiting(front_end, tenant):
        return len(front_end.interceptor.decoding._waiting.get(tenant, ()))

    def test_a_call_that_waits_for_the_engine_is_not_decoding(self):
        go, decoded = threading.Event(), threading.Semaphore(0)

        def behaviour(message, context):
            calls.end_decoding()
            decoded.release()
            go.wait(10)
            yield message

        front_end = FrontEnd(behaviour)
        running = [front_end.take(Call([b"x"])) for _ in range(6)]
        for _ in running:
            assert decoded.acquire(timeout=10)
        go.set()
        assert {call.answer()[0] for call in running} == {"OK"}

    def test_a_call_that_ended_while_it_waited_is_not_decoded(self):
        gate = Gate()
        front_end = FrontEnd(gate)
        running = [front_end.take(Call([bytes([number])])) for number in range(3)]
        until(lambda: len(gate.begun) == 2 and self.waiting(front_end, "default") == 1)
        (late,) = {b"\0", b"\1", b"\2"} - set(gate.begun)
        running[late[0]].cancel()
        gate.open.set()
        for call in running:
            call.wait()
        assert late not in gate.begun
        until(lambda: not front_end.interceptor.decoding._inside)


class TestObservation:
    @pytest.mark.parametrize(
        ("options", "fails", "status"),
        [
            ({}, False, "OK"),
            ({}, True, "INTERNAL"),
            ({"code": grpc.StatusCode.NOT_FOUND}, True, "NOT_FOUND"),
            ({"active": False}, False, "CANCELLED"),
            ({"active": False, "remaining": 0.0}, False, "DEADLINE_EXCEEDED"),
            ({"code": grpc.StatusCode.CANCELLED, "remaining": 9.0}, True, "CANCELLED"),
        ],
    )
    def test_calls_are_counted_by_status(self, options, fails, status):
        def behaviour(message, context):
            yield b"1"
            if fails:
                raise RuntimeError

        front_end = FrontEnd(behaviour)
        front_end.take(Call([b"x"], **options)).wait()
        assert front_end.ended() == {("Evaluate", status, "default"): 1}
        assert front_end.recorder.totals().in_flight == 0

    def test_waiting_for_the_network_does_not_count_as_encoding(self):
        def behaviour(message, context):
            calls.record_answer(Timings(decode=1, queue=2, copy_in=3, compute=4, copy_out=5))
            yield b"1"
            yield b"2"

        front_end = FrontEnd(behaviour)
        front_end.take(Call([b"x"], pause=0.05)).wait()
        buckets = front_end.recorder.totals().buckets
        assert buckets["stage_seconds", ("encode",)][-1] < 0.04
        assert buckets["request_seconds", ("Evaluate",)][-1] > 0.1
        assert buckets["stage_seconds", ("copy",)][-1] == pytest.approx(8e-9)
        assert buckets["stage_seconds", ("kernel",)][-1] == pytest.approx(4e-9)

    def test_a_call_keeps_a_valid_id_of_its_client_and_else_gets_a_new_one(self):
        given = ("run-7/call.3", "no good!", "", "x" * 200)
        made = [Call([b"x"], metadata=(("x-request-id", name),)) for name in given]
        used = []
        for call in (*made, Call([b"x"])):
            FrontEnd(echo).take(call).wait()
            used.append(dict(call.trailing)[codec.REQUEST_ID_KEY])
        assert used[0] == given[0]
        assert len(set(used)) == len(used)
        assert not set(used[1:]) & set(given)

    def test_forwarded_metadata_are_id_and_trace_but_no_credentials(self):
        metadata = (("x-request-id", "7"), ("traceparent", "00-1-2-3"), ("authorization", "secret"))
        forwarded = calls.forwarded_metadata(Call([], metadata=metadata))
        assert forwarded == (("x-request-id", "7"), ("traceparent", "00-1-2-3"))
