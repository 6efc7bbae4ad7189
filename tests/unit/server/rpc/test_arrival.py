"""Calls where they arrive: what is decided there, what is refused, what is counted and when."""

from __future__ import annotations

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
from warpfit.dataset import Layout
from warpfit.errors import ProgramError, UnavailableError
from warpfit.ir import Batch
from warpfit.parse import parse
from warpfit.request import Evaluation, Loss, Timings
from warpfit_server.config import Config
from warpfit_server.observability import calls as requests
from warpfit_server.observability.calls import Observer
from warpfit_server.observability.measurements import Recorder
from warpfit_server.rpc.interceptor import make_guard
from warpfit_server.system.worker_threads import Workers
from warpfit_server.tenancy.quotas import Ledger, Usage
from warpfit_server.tenancy.tenants import tenant_of

EVALUATION = Evaluation(bytes(32), Batch.of([parse("x1")]), loss=Loss.MSE, values=False)
LAYOUT = Layout(np.dtype("<f4"), 1, 10, has_target=True)


class Door:
    """A guard before one method, and what it has counted."""

    def __init__(self, behaviour, *, passes_on=False, name="Evaluate", **settings):
        config = replace(Config(), **settings)
        self.ledger = Ledger.create(1)
        self.recorder = Recorder()
        self.admission, self.guard = make_guard(config, self.ledger)
        streams = {
            "Evaluate": grpc.unary_stream_rpc_method_handler,
            "UploadVariables": grpc.stream_unary_rpc_method_handler,
        }
        handler = streams.get(name, grpc.unary_unary_rpc_method_handler)(behaviour)
        observer = Observer(self.recorder)
        protected = self.guard.protect({name: handler}, observer, passes_on=passes_on)
        self.method = protected[name].stream_stream

    def take(self, call):
        """Let a call arrive on this thread."""
        self.method(call.messages(), call, call.send)
        return call

    def ended(self):
        """Method, status and tenant of the calls that were counted."""
        counts = self.recorder.totals().counts
        return {labels: n for (name, labels), n in counts.items() if name == "requests"}


def echo(message, context):
    yield message
    yield tenant_of(context).encode()


def answer_of(name):
    """A method that answers with what it is sent, in the form of the method of this name."""
    if name == "Evaluate":
        return echo
    return lambda sent, context: sent if isinstance(sent, bytes) else b"".join(sent)


class TestArrival:
    def test_a_call_is_answered_on_another_thread(self):
        threads = []

        def behaviour(message, context):
            threads.append(threading.current_thread())
            yield message

        call = Door(behaviour).take(Call([b"question"]))
        assert call.answer() == ("OK", [b"question"])
        assert threads != [threading.current_thread()]

    def test_a_call_that_is_cut_off_keeps_nothing(self):
        """Though the error is, as gRPC's, held by the function that raises it."""
        seen = []

        def cut_off():
            error = grpc.RpcError()
            raise error

        def behaviour(message, context):
            payload = np.zeros(10)
            seen.append(weakref.ref(payload))
            yield bytes(payload)
            try:
                cut_off()
            except grpc.RpcError as error:
                raise UnavailableError("the client has gone", "GONE") from error

        gc.disable()
        try:
            assert Door(behaviour).take(Call([b""])).answer()[0] == "UNAVAILABLE"
            deadline = time.monotonic() + 10
            while seen[0]() is not None:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            gc.enable()

    def test_a_refusal_needs_no_thread_and_no_message(self, tmp_path):
        path, _ = token_file(tmp_path, "alice")
        door = Door(echo, token_file=path)
        call = Call(None)  # fails if it is asked for a message
        door.take(call)
        assert call.answer(wait=False) == ("UNAUTHENTICATED", [])
        assert call.detail().reason == "TOKEN_MISSING"
        assert door.guard.workers._threads == 0
        assert door.ended() == {("Evaluate", "UNAUTHENTICATED", "default"): 1}

    @pytest.mark.parametrize(
        ("settings", "reason"),
        [({"max_requests": 1}, "TOO_MANY_REQUESTS"), ({"max_rate": 1.0}, "RATE_LIMITED")],
    )
    def test_what_is_too_much_is_refused_where_it_arrives(self, settings, reason):
        go = threading.Event()

        def behaviour(message, context):
            go.wait(10)
            yield message

        door = Door(behaviour, **settings)
        first = door.take(Call([b"1"]))
        second = door.take(Call(None))
        assert second.answer(wait=False)[0] == "RESOURCE_EXHAUSTED"
        assert second.detail().reason == reason
        assert second.detail().retry_after_ms > 0
        go.set()
        assert first.answer() == ("OK", [b"1"])
        assert door.ledger.used() == Usage()
        assert door.recorder.totals().in_flight == 0

    def test_suspended_tenants(self, tmp_path):
        path, tokens = token_file(tmp_path, "alice", "mallory")
        tenants = tenants_file(tmp_path, "[tenants.mallory]\nsuspended = true\n")
        door = Door(echo, token_file=path, tenants_file=tenants)
        assert door.take(Call([b"x"], tokens["alice"])).answer() == ("OK", [b"x", b"alice"])
        refused = door.take(Call(None, tokens["mallory"]))
        assert refused.answer(wait=False)[0] == "PERMISSION_DENIED"
        assert door.ended() == {
            ("Evaluate", "OK", "alice"): 1,
            ("Evaluate", "PERMISSION_DENIED", "mallory"): 1,
        }

    def test_threads_of_cancelled_calls_are_counted_by_tenant(self, tmp_path):
        path, tokens = token_file(tmp_path, "greedy", "modest")
        go = threading.Event()

        def behaviour(message, context):
            go.wait(10)
            return message

        door = Door(behaviour, name="GetServerInfo", token_file=path, max_requests=4)
        running = []
        for _ in range(6):  # three quarters of twice the places
            running.append(door.take(Call([b"x"], tokens["greedy"])))
            running[-1].cancel()
        crowded = door.take(Call(None, tokens["greedy"]))
        assert crowded.answer(wait=False)[0] == "RESOURCE_EXHAUSTED"
        modest = door.take(Call([b"x"], tokens["modest"]))
        go.set()
        assert modest.answer()[0] == "OK"
        for call in running:
            call.wait()
        until(lambda: not door.guard.workers._busy)
        assert door.take(Call([b"x"], tokens["greedy"])).answer()[0] == "OK"
        assert door.ledger.used() == Usage()

    @pytest.mark.parametrize("name", ["Evaluate", "GetServerInfo", "UploadVariables"])
    def test_every_method_needs_a_place(self, name, tmp_path):
        """Also while its message has not come: one tenant never has all of them."""
        path, tokens = token_file(tmp_path, "greedy", "modest")
        door = Door(answer_of(name), name=name, token_file=path, max_requests=4)
        silent = [door.take(Call(SILENT, tokens["greedy"])) for _ in range(4)]
        assert silent[3].answer(wait=False)[0] == "RESOURCE_EXHAUSTED"
        assert silent[3].detail().reason == "TOO_MANY_REQUESTS"
        assert door.take(Call([b"x"], tokens["modest"])).answer()[0] == "OK"
        for call in silent[:3]:
            call.cancel()
            call.wait()
        assert door.ledger.used() == Usage()

    @pytest.mark.parametrize("name", ["Evaluate", "GetServerInfo", "UploadVariables"])
    def test_a_message_must_come_in_time(self, name):
        door = Door(answer_of(name), name=name, message_seconds=0.3)
        began = time.monotonic()
        call = door.take(Call(SILENT))
        assert door.ledger.used() == Usage(1, door.admission.message_bytes, 0)
        assert call.answer()[0] == "DEADLINE_EXCEEDED"
        assert 0.3 <= time.monotonic() - began < 3
        assert call.detail().reason == "MESSAGE_TIMEOUT"
        until(lambda: door.ledger.used() == Usage())
        until(lambda: door.ended() == {(name, "DEADLINE_EXCEEDED", "default"): 1})
        assert door.take(Call([b"x"])).answer()[0] == "OK"

    def test_an_upload_that_stops_in_the_middle_is_ended(self):
        door = Door(answer_of("UploadVariables"), name="UploadVariables", message_seconds=0.3)
        call = door.take(Call([b"1", b"2", *SILENT]))
        assert call.answer()[0] == "DEADLINE_EXCEEDED"
        until(lambda: door.ledger.used() == Usage())

    def test_a_message_that_came_is_not_timed_any_more(self):
        def behaviour(message, context):
            time.sleep(0.8)
            yield message

        assert Door(behaviour, message_seconds=0.1).take(Call([b"x"])).answer()[0] == "OK"

    def test_only_methods_that_bring_much_may_send_much(self):
        message = bytes((64 << 10) + 1)
        call = Door(answer_of("GetVariables"), name="GetVariables").take(Call([message]))
        assert call.answer()[0] == "RESOURCE_EXHAUSTED"
        assert (call.detail().reason, call.detail().available) == ("MESSAGE_TOO_LARGE", 64 << 10)
        assert Door(echo).take(Call([message])).answer()[0] == "OK"

    def test_a_message_counts_while_its_call_lasts(self):
        begun, go = threading.Event(), threading.Event()

        def behaviour(message, context):
            begun.set()
            go.wait(10)
            yield message

        door = Door(behaviour)
        call = door.take(Call([bytes(1000)]))
        begun.wait(10)
        assert door.ledger.used() == Usage(1, 1000, 0)
        call.cancel()
        assert door.ledger.used() == Usage(0, 1000, 0), "the message is still there"
        go.set()
        call.wait()
        assert door.ledger.used() == Usage()

    def test_a_call_that_has_ended_leaves_its_place_before_its_work_has(self):
        begun, go = threading.Event(), threading.Event()

        def behaviour(message, context):
            begun.set()
            go.wait(10)
            yield message

        door = Door(behaviour)
        call = door.take(Call([b"x"]))
        begun.wait(10)
        assert door.ledger.used() == Usage(1, 1)
        call.cancel()
        assert door.ledger.used() == Usage(0, 1), "given back, but for its message"
        go.set()
        call.wait()
        assert door.ledger.used() == Usage(), "and not twice"
        assert door.ended() == {("Evaluate", "CANCELLED", "default"): 1}

    def test_a_call_without_a_message(self):
        call = Door(echo).take(Call([]))
        assert call.answer()[0] == "INVALID_ARGUMENT"
        assert call.detail().reason == "NO_MESSAGE"

    def test_a_message_over_the_tenants_limit(self, tmp_path):
        tenants = tenants_file(tmp_path, "[default]\nmessage_bytes = 10\n")
        call = Door(echo, tenants_file=tenants).take(Call([bytes(11)]))
        assert call.answer()[0] == "RESOURCE_EXHAUSTED"
        assert (call.detail().needed, call.detail().available) == (11, 10)

    def test_a_client_that_is_gone_gets_no_more(self):
        made, closed = [], []

        def behaviour(message, context):
            try:
                for number in range(100):
                    made.append(number)
                    yield bytes([number])
            finally:
                closed.append(True)

        call = Call([b"x"], cancel_after=3)
        Door(behaviour).take(call).wait()
        assert (len(made), closed) == (3, [True])

    def test_bugs_are_told_as_such_and_no_more(self):
        def behaviour(message, context):
            raise RuntimeError("secret")
            yield b""

        door = Door(behaviour)
        call = door.take(Call([b"x"]))
        assert call.answer() == ("INTERNAL", [])
        assert "secret" not in str(call.detail()) + call.details
        assert door.ledger.used() == Usage()


def until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def _waiting(door, tenant):
    return len(door.guard.turnstile._waiting.get(tenant, ()))


class TestTurnstile:
    """A tenant's calls are taken in two at a time, whatever the others do."""

    def test_order_of_service(self, tmp_path):
        path, tokens = token_file(tmp_path, "greedy", "modest")
        taken, go = [], {}

        def behaviour(message, context):
            taken.append(message)
            go[message].wait(10)
            yield message

        door = Door(behaviour, token_file=path)
        greedy, calls = [b"g0", b"g1", b"g2", b"g3", b"g4"], {}
        go.update({name: threading.Event() for name in (*greedy, b"m")})
        for name in greedy:
            calls[name] = door.take(Call([name], tokens["greedy"]))
            until(lambda: len(calls) == len(taken) + _waiting(door, "greedy"))
        go[b"m"].set()
        assert door.take(Call([b"m"], tokens["modest"])).answer()[0] == "OK", "it goes ahead"
        for name in greedy[1:]:  # the first one stays
            go[name].set()
            assert calls[name].answer()[0] == "OK"
        assert taken == [b"g0", b"g1", b"m", b"g2", b"g3", b"g4"]
        go[b"g0"].set()
        calls[b"g0"].wait()
        until(lambda: not door.guard.turnstile._inside)

    def test_a_call_that_waits_for_the_engine_is_in_nobodys_way(self):
        go = threading.Event()
        asked = threading.Semaphore(0)

        def behaviour(message, context):
            requests.asks_for(EVALUATION, LAYOUT)
            asked.release()
            go.wait(10)
            yield message

        door = Door(behaviour)
        calls = [door.take(Call([b"x"])) for _ in range(6)]
        for _ in calls:
            assert asked.acquire(timeout=10)
        go.set()
        assert {call.answer()[0] for call in calls} == {"OK"}

    def test_a_call_that_ended_while_it_waited_is_not_taken_in(self):
        taken, go = [], threading.Event()

        def behaviour(message, context):
            taken.append(message)
            go.wait(10)
            yield message

        door = Door(behaviour)
        calls = [door.take(Call([bytes([number])])) for number in range(3)]
        until(lambda: len(taken) == 2 and _waiting(door, "default") == 1)
        (late,) = {b"\0", b"\1", b"\2"} - set(taken)
        calls[late[0]].cancel()
        go.set()
        for call in calls:
            call.wait()
        assert late not in taken
        until(lambda: not door.guard.turnstile._inside)


class TestPassedOn:
    """Methods that another process answers, which counts them too."""

    def test_only_what_is_refused_here_is_counted_here(self, tmp_path):
        path, tokens = token_file(tmp_path, "alice")
        door = Door(echo, passes_on=True, token_file=path, max_requests=2)
        silent = door.take(Call(SILENT, tokens["alice"]))
        full = door.take(Call(None, tokens["alice"]))
        assert full.answer(wait=False)[0] == "RESOURCE_EXHAUSTED", "it needs a place here"
        silent.cancel()
        silent.wait()
        refused = {("Evaluate", "RESOURCE_EXHAUSTED", "alice"): 1}
        assert door.ended() == refused
        assert door.take(Call([b"x"], tokens["alice"])).answer()[0] == "OK"
        assert door.ended() == refused
        door.take(Call(None))
        assert door.ended() == {**refused, ("Evaluate", "UNAUTHENTICATED", "default"): 1}
        assert door.ledger.used() == Usage()


class TestObserved:
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
    def test_status(self, options, fails, status):
        def behaviour(message, context):
            yield b"1"
            if fails:
                raise RuntimeError

        door = Door(behaviour)
        door.take(Call([b"x"], **options)).wait()
        assert door.ended() == {("Evaluate", status, "default"): 1}
        assert door.recorder.totals().in_flight == 0

    def test_waiting_for_the_network_is_no_encoding(self):
        def behaviour(message, context):
            requests.answered(Timings(decode=1, queue=2, copy_in=3, compute=4, copy_out=5))
            yield b"1"
            yield b"2"

        door = Door(behaviour)
        door.take(Call([b"x"], pause=0.05)).wait()
        buckets = door.recorder.totals().buckets
        assert buckets["stage_seconds", ("encode",)][-1] < 0.04
        assert buckets["request_seconds", ("Evaluate",)][-1] > 0.1
        assert buckets["stage_seconds", ("copy",)][-1] == pytest.approx(8e-9)
        assert buckets["stage_seconds", ("kernel",)][-1] == pytest.approx(4e-9)

    def test_what_the_engine_did_not_answer_was_not_evaluated(self):
        def behaviour(message, context):
            requests.asks_for(EVALUATION, LAYOUT)
            if message == b"wrong":
                raise ProgramError("what", "UNKNOWN_OPERATOR")
            requests.answered(Timings())
            yield b"answer"

        door = Door(behaviour)
        for message in (b"wrong", b"right", b"wrong"):
            door.take(Call([message])).wait()
        counts = door.recorder.totals().counts
        assert counts["programs", ("default",)] == 1
        assert counts["tokens", ("default",)] == 1
        assert counts["token_rows", ("default",)] == LAYOUT.rows
        assert len(door.ended()) == 2

    def test_ids(self):
        """The client's own if it is one, else one that no other call has."""
        given = ("run-7/call.3", "no good!", "", "x" * 200)
        calls = [Call([b"x"], metadata=(("x-request-id", name),)) for name in given]
        used = []
        for call in (*calls, Call([b"x"])):
            Door(echo).take(call).wait()
            used.append(dict(call.trailing)[codec.REQUEST_ID_KEY])
        assert used[0] == given[0]
        assert len(set(used)) == len(used)
        assert not set(used[1:]) & set(given)

    def test_what_is_passed_on(self):
        metadata = (("x-request-id", "7"), ("traceparent", "00-1-2-3"), ("authorization", "secret"))
        passed = requests.passed_on(Call([], metadata=metadata))
        assert passed == (("x-request-id", "7"), ("traceparent", "00-1-2-3"))


class TestWorkers:
    def test_threads_are_used_again_and_bounded(self):
        workers, threads, go = Workers(3), set(), threading.Event()
        done = threading.Semaphore(0)

        def task(wait):
            threads.add(threading.current_thread())
            if wait:
                go.wait(10)
            done.release()

        for _ in range(5):
            workers.start("a", task, False)
            assert done.acquire(timeout=10)
            time.sleep(0.01)
        assert len(threads) == 1
        for _ in range(7):
            workers.start("a", task, True)
        assert not workers.has_room("a")
        go.set()
        for _ in range(7):
            assert done.acquire(timeout=10)
        assert len(threads) <= 3

    def test_a_task_that_fails_does_not_take_its_thread_along(self, caplog):
        workers, done = Workers(1), threading.Event()
        workers.start("a", lambda: 1 / 0)
        workers.start("a", done.set)
        assert done.wait(10)
        assert "not brought to its end" in caplog.text

    def test_threads_end(self):
        workers, found = Workers(2), []
        done = threading.Event()
        workers.start("a", lambda: (found.append(threading.current_thread()), done.set()))
        assert done.wait(10)
        workers.close()
        found[0].join(10)
        assert not found[0].is_alive()


def test_details_of_a_refusal():
    call = Door(echo, max_requests=0).take(Call(None))
    detail = call.detail()
    assert (detail.reason, detail.needed, detail.available) == ("TOO_MANY_REQUESTS", 1, 0)
    assert call.details.startswith(detail.message)
