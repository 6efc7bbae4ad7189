"""Calls of one method: what is admitted, refused, counted and observed."""

import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import grpc
import numpy as np
import pytest

from support.servers.examples import DATA
from support.servers.rpcs import OWN_CONNECTION, bearer, detail_of, evaluate_request
from support.servers.server import eventually, tenants_file, token_file
from warpfit.errors import REQUEST_ID_KEY, UnavailableError
from warpfit_server import admission
from warpfit_server.config import Config
from warpfit_server.ipc.quarantine import Suspects
from warpfit_server.ipc.segments import SegmentPool
from warpfit_server.logs import Observer, Recorder
from warpfit_server.rpc import calls
from warpfit_server.rpc.calls import CallHandlers, Method
from warpfit_server.rpc.servicer import Servicer, make_server
from warpfit_server.tenants import Amounts, QuotaTable, TenantLimits

KINDS = {"Evaluate": {"streams": True}, "UploadVariables": {"uploads": True}, "GetVariables": {}}


class FrontEnd:
    def __init__(self, behaviour, *, name="Evaluate", **settings):
        config = replace(Config(), **settings)
        self.quotas, self.recorder = QuotaTable.create(1), Recorder()
        self.calls = CallHandlers(config, self.quotas)
        methods = {name: Method(behaviour, **KINDS[name])}
        handlers = self.calls.handlers(methods, Observer(self.recorder))
        self.server = make_server(config, "service", handlers)
        port = self.server.add_insecure_port("127.0.0.1:0")
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}", OWN_CONNECTION)
        self.server.start()
        self.method = self.channel.stream_stream(f"/service/{name}")
        self.silence = threading.Event()

    def call(self, *messages, token="", metadata=(), silent=False, timeout=20.0):
        """Begin a call; a silent one goes on as if more messages were to come."""

        def sent():
            yield from messages
            if silent:
                self.silence.wait()

        credentials = bearer(token) if token else ()
        return self.method(sent(), metadata=(*metadata, *credentials), timeout=timeout)

    def ok(self, *messages, **options):
        assert outcome(self.call(*messages, **options))[0] == "OK"

    def refused(self, *messages, **options):
        call = self.call(*messages, **options)
        assert outcome(call)[0] == "RESOURCE_EXHAUSTED"
        return detail_of(call)

    def ended(self):
        counts = self.recorder.totals().counts
        return {labels: n for (name, labels), n in counts.items() if name == "requests"}

    def await_counts(self, *amounts):
        eventually(lambda: self.quotas.in_flight() == Amounts(*amounts))

    def await_end(self, status, count=1, name="Evaluate"):
        eventually(lambda: self.ended() == {(name, status, "default"): count})

    def close(self):
        self.silence.set()
        self.channel.close()
        self.server.stop(None).wait()


@pytest.fixture
def start():
    made = []

    def start(*arguments, **settings):
        made.append(FrontEnd(*arguments, **settings))
        return made[-1]

    yield start
    for front_end in made:
        front_end.close()


def outcome(call):
    answer = []
    with suppress(grpc.RpcError):
        answer.extend(call)
    return call.code().name, answer


class Gate:
    """A streaming method that echoes each message, but only once `open` is set."""

    def __init__(self):
        self.open, self.begun = threading.Event(), []

    def __call__(self, message, context):
        self.begun.append(message)
        context.end_turn()
        self.open.wait(60)
        return message
        yield


def echo(message, context):
    return message
    yield


def echo_of(name):
    if name == "Evaluate":
        return echo
    return lambda sent, context: sent if isinstance(sent, bytes) else b"".join(sent)


class TestAdmission:
    def test_a_refusal_needs_no_message(self, start, tmp_path):
        front_end = start(echo, token_file=token_file(tmp_path, "alice")[0])
        call = front_end.call(silent=True)
        assert outcome(call) == ("UNAUTHENTICATED", [])
        assert detail_of(call).reason == "TOKEN_MISSING"
        assert front_end.ended() == {("Evaluate", "UNAUTHENTICATED", "default"): 1}

    def test_open_calls_count_for_their_tenant_until_their_thread_is_free(self, start, tmp_path):
        path, tokens = token_file(tmp_path, "greedy", "modest")
        gate = Gate()
        front_end = start(gate, token_file=path, max_requests=4)
        for number in range(4):  # half of the threads, which are twice the slots
            running = front_end.call(b"x", token=tokens["greedy"])
            eventually(lambda number=number: len(gate.begun) > number)
            running.cancel()
            eventually(lambda: front_end.quotas.in_flight().calls == 0)
        crowded = front_end.refused(silent=True, token=tokens["greedy"])
        assert crowded.reason == "TOO_MANY_REQUESTS"
        modest = front_end.call(b"x", token=tokens["modest"])
        gate.open.set()
        assert outcome(modest)[0] == "OK"
        eventually(lambda: not front_end.calls.open_calls._counts)
        front_end.ok(b"x", token=tokens["greedy"])
        assert front_end.quotas.in_flight() == Amounts()

    def test_a_cancelled_call_leaves_its_slot_at_once_and_its_memory_at_its_end(self, start):
        gate = Gate()
        front_end = start(gate)
        call = front_end.call(bytes(1000))
        eventually(lambda: gate.begun)
        assert front_end.quotas.in_flight() == Amounts(1, 1000)
        call.cancel()
        front_end.await_counts(0, 1000)
        gate.open.set()
        front_end.await_counts()
        front_end.await_end("CANCELLED")


class TestPlaces:
    """A request is a call in flight from the arrival of its message to the end of the work."""

    def test_an_upload_has_one_from_its_first_message(self, start):
        front_end = start(echo_of("UploadVariables"), name="UploadVariables", max_requests=1)
        running = front_end.call(b"x", silent=True)
        eventually(lambda: front_end.quotas.in_flight().calls == 1)
        assert front_end.refused(b"x").reason == "TOO_MANY_REQUESTS"
        assert not running.done()

    @pytest.mark.parametrize("pieces", [0, 100])
    def test_an_answer_that_is_not_read_has_none_but_its_bytes(self, start, pieces):
        piece, nbytes, unread = bytes(8 << 20), 100 << 20, []

        def behaviour(message, context):
            context.reserve(nbytes, 0)
            for _ in range(pieces):
                yield piece
            return piece

        front_end = start(behaviour, max_requests=1)
        for number in (1, 2):
            unread.append(front_end.call(b"x"))
            front_end.await_counts(0, number * (nbytes + 1))
        assert not any(call.done() for call in unread)


class TestSilentCalls:
    """A call without a message makes way for another one of its tenant."""

    @staticmethod
    def begin(front_end, *tokens):
        silent = []
        for token in tokens:
            silent.append(front_end.call(silent=True, token=token))
            eventually(lambda: len(front_end.calls.silent) == len(silent))
        return silent

    @pytest.mark.parametrize("name", KINDS)
    @pytest.mark.parametrize(
        ("settings", "count"), [({"max_requests": 2}, 4), ({"max_pending_bytes": 32 << 20}, 8)]
    )
    def test_any_number_of_them_keeps_no_call_out(self, start, monkeypatch, name, settings, count):
        monkeypatch.setattr(calls, "_SILENT_SECONDS", 0.05)
        front_end = start(echo_of(name), name=name, **settings)
        silent = self.begin(front_end, *[""] * count)
        time.sleep(0.1)
        for _ in range(2):
            front_end.ok(b"x")
        ended = [number for number, call in enumerate(silent) if call.done()]
        assert ended in ([0], [0, 1]), "those that have been silent for longest"
        assert outcome(silent[0])[0] == "CANCELLED"

    def test_a_call_makes_way_for_no_other_tenant(self, start, monkeypatch, tmp_path):
        monkeypatch.setattr(calls, "_SILENT_SECONDS", 0.0)
        path, tokens = token_file(tmp_path, "greedy", "modest", "third")
        front_end = start(echo, token_file=path, max_requests=2)
        greedy, modest, third = tokens.values()
        silent = self.begin(front_end, greedy, greedy, modest)
        front_end.ok(b"x", token=third)
        silent.append(front_end.call(silent=True, token=third))
        eventually(lambda: len(front_end.calls.silent) == 4)
        front_end.ok(b"x", token=third)
        assert [call.done() for call in silent] == [False, False, False, True]

    def test_a_call_that_has_just_begun_does_not_make_way(self, start):
        front_end = start(echo, max_pending_bytes=32 << 20)
        silent = self.begin(front_end, *[""] * 8)
        refused = front_end.refused(b"x")
        assert refused.reason == "QUEUE_FULL"
        assert "kept for messages to come" in refused.message
        assert not any(call.done() for call in silent)


class TestTurns:
    @pytest.mark.parametrize("is_long", [True, False])
    def test_long_calls_leave_time_to_other_tenants(self, start, tmp_path, monkeypatch, is_long):
        """Not one whose calls are short, however many they are."""
        if not is_long:  # on a slow machine gRPC's part of a call may take 2 ms, too
            monkeypatch.setattr(calls, "_FREE_SECONDS", 0.03)
        used, ended = [], threading.Event()

        def behaviour(message, context):
            if message == b"greedy":
                began = time.thread_time()
                while time.thread_time() < began + (0.03 if is_long else 0.001):
                    pass
                used.append(time.thread_time() - began)
            return b""
            yield

        path, tokens = token_file(tmp_path, "greedy", "modest")
        front_end = start(behaviour, token_file=path)
        front_end.ok(b"", token=tokens["modest"])

        def send(_):
            while not ended.is_set():
                front_end.ok(b"greedy", token=tokens["greedy"])

        began = time.monotonic()
        with ThreadPoolExecutor(4) as pool:
            sending = pool.map(send, range(4))
            while time.monotonic() < began + 1:
                front_end.ok(b"", token=tokens["modest"])
            ended.set()
        assert [*sending] == [None] * 4
        seconds = time.monotonic() - began
        if is_long:
            assert 0.1 < sum(used) < 0.45 * seconds + 4 * 0.03
        else:
            assert front_end.calls.turns._used_until.get("greedy", 0.0) < began

    def test_further_refusals_of_a_second_are_held_back(self, start, tmp_path, monkeypatch):
        path, tokens = token_file(tmp_path, "greedy", "modest")
        front_end = start(echo_of("Evaluate"), max_requests=1, token_file=path)
        now, held = [100.0], []

        def sleep(seconds):
            watches = threading.current_thread().name == "call-timeouts"
            time.sleep(seconds) if watches else held.append(seconds)

        # Moments of retries are told by the same clock. On a slow machine they would not be far
        # apart, and no refusal would be held back for a large part of a call's deadline.
        clock = SimpleNamespace(**{**vars(time), "monotonic": lambda: now[0], "sleep": sleep})
        for module in (calls, admission):
            monkeypatch.setattr(module, "time", clock)
        full = Amounts(9, 0, 0), Amounts(9, 0, 0)
        for tenant in tokens:
            front_end.quotas.acquire(tenant, Amounts(calls=1), *full)

        def wait(who, passed=0.0):
            now[0] += passed
            return front_end.refused(b"x", token=tokens[who]).retry_after_ms / 1000

        told = [wait("greedy", 0.01 * (number < 20)) for number in range(36)]
        assert len(held) == 16
        assert held[0] < 0.2 < held[-1] == 0.25
        asked = [first + each for first, each in zip(told[20:], held, strict=True)]
        assert held == pytest.approx([min(0.25, 0.9 * each) for each in asked], abs=0.002)
        with monkeypatch.context() as patch:  # less than twice what it would be held back for
            patch.setattr(calls.Call, "time_remaining", lambda call: 0.4)
            wait("greedy")
        wait("modest")
        now[0] += 2.0
        assert [wait("greedy") > 0.0 for _ in range(3)] == [True] * 3
        assert len(held) == 16, "only those of a tenant that has had many in this second"
        wait("greedy")
        assert len(held) == 17, "half of those in the last one count"
        for tenant in tokens:
            front_end.quotas.release(tenant, Amounts(calls=1))
        front_end.ok(b"x", token=tokens["greedy"])
        assert [front_end.calls.held.acquire(blocking=False) for _ in range(65)].count(True) == 64

    @pytest.mark.parametrize("name", KINDS)
    def test_a_refused_call_is_not_charged_for_the_calls_before_it(self, start, name, monkeypatch):
        """A thread that has computed for a long time serves it."""
        clock = SimpleNamespace(**{**vars(time), "thread_time": lambda: 1000.0})
        monkeypatch.setattr(calls, "time", clock)
        front_end = start(echo_of(name), name=name, max_requests=1)
        quotas, turns = front_end.quotas, front_end.calls.turns
        quotas.acquire("default", Amounts(calls=1), Amounts(9, 0, 0), Amounts(9, 0, 0))
        assert front_end.refused(b"x").reason == "TOO_MANY_REQUESTS"
        eventually(lambda: front_end.ended())
        assert not turns._used_until
        quotas.release("default", Amounts(calls=1))
        front_end.ok(b"x")
        assert not turns._used_until


class TestMessages:
    @pytest.mark.parametrize(
        ("name", "sent"), [*((name, ()) for name in KINDS), ("UploadVariables", (b"1", b"2"))]
    )
    def test_each_message_must_arrive_in_time(self, start, name, sent):
        front_end = start(echo_of(name), name=name, message_seconds=0.3)
        began = time.monotonic()
        assert outcome(front_end.call(*sent, silent=True))[0] == "CANCELLED"
        assert 0.3 <= time.monotonic() - began < 20
        front_end.await_counts()
        front_end.await_end("DEADLINE_EXCEEDED", name=name)
        front_end.ok(b"x")

    @pytest.mark.parametrize("name", KINDS)
    def test_messages_may_be_as_long_as_the_tenant_may_send(self, start, name, tmp_path):
        most = 64 << 10 if name == "GetVariables" else 1 << 20
        tenants = tenants_file(tmp_path, "[default]\nmessage_bytes = 1048576\n")
        front_end = start(echo_of(name), name=name, tenants_file=tenants)
        front_end.ok(bytes(most))
        told = front_end.refused(bytes(most + 1))
        assert (told.reason, told.needed - 1, told.available) == ("MESSAGE_TOO_LARGE", most, most)

    def test_each_message_of_an_answer_must_be_taken_in_time(self, start):
        def behaviour(message, context):
            for _ in range(100):
                yield bytes(1 << 20)  # more than gRPC keeps for a client that does not read
            return b""

        front_end = start(behaviour, message_seconds=0.3)
        call = front_end.call(b"x")
        front_end.await_end("CANCELLED")
        assert outcome(call)[0] == "CANCELLED"
        assert front_end.quotas.in_flight() == Amounts()

    def test_a_call_without_a_message_is_refused(self, start):
        call = start(echo).call()
        assert outcome(call)[0] == "INVALID_ARGUMENT"
        assert detail_of(call).reason == "NO_MESSAGE"


class TestAnswers:
    def test_an_unexpected_error_tells_clients_nothing(self, start):
        def behaviour(message, context):
            raise RuntimeError("secret")
            yield

        front_end = start(behaviour)
        call = front_end.call(b"x")
        assert outcome(call) == ("INTERNAL", [])
        assert "secret" not in str(detail_of(call)) + call.details()
        front_end.await_end("INTERNAL")
        front_end.await_counts()

    def test_a_failed_call_keeps_no_memory(self, start):
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
            assert outcome(start(behaviour).call(b""))[0] == "UNAVAILABLE"
            eventually(lambda: payloads[0]() is None)
        finally:
            gc.enable()


class TestDecoding:
    """At most two calls of a tenant are decoded at a time."""

    MESSAGE = evaluate_request(DATA.content_id).SerializeToString()

    @pytest.fixture
    def decode(self, start):
        """Start a front end whose calls pass a gate while they are decoded, and then begin."""

        def decode(gate, begin):
            @contextmanager
            def use(key):
                gate.begun.append(key)
                gate.open.wait(10)
                yield SimpleNamespace(layout=DATA.layout)

            config = Config(devices="cpu")
            tenants = TenantLimits(config.limits(), None, shared=False)
            admitting = admission.Admission(config, tenants, QuotaTable.create(1))
            registry, router = SimpleNamespace(use=use), SimpleNamespace(start=begin)
            own = registry, router, Suspects(), admitting, SegmentPool(0), config
            return start(partial(Servicer(None, *own)._serve, fits=False))

        return decode

    def test_a_call_that_waits_for_the_engine_is_not_decoding(self, decode):
        go, decoded, gate = threading.Event(), threading.Semaphore(0), Gate()

        def begin(*_):
            decoded.release()
            go.wait(10)
            raise UnavailableError("there is no engine")

        gate.open.set()
        front_end = decode(gate, begin)
        running = [front_end.call(self.MESSAGE) for _ in range(6)]
        for _ in running:
            assert decoded.acquire(timeout=10)
        go.set()
        assert {outcome(call)[0] for call in running} == {"UNAVAILABLE"}
        assert not front_end.calls.turns._inside

    def test_a_call_that_ends_while_it_is_decoded_is_not_started(self, decode):
        gate, started = Gate(), []
        front_end = decode(gate, lambda *given: started.append(given))
        call = front_end.call(self.MESSAGE)
        eventually(lambda: gate.begun)
        call.cancel()
        eventually(lambda: front_end.quotas.in_flight().calls == 0)
        gate.open.set()
        front_end.await_counts()
        assert not started

    def test_a_call_that_ended_while_it_waited_is_not_decoded(self, decode):
        gate = Gate()
        front_end = decode(gate, None)
        running = [front_end.call(self.MESSAGE) for _ in range(2)]
        eventually(lambda: len(gate.begun) == 2)
        late = front_end.call(self.MESSAGE)
        eventually(lambda: front_end.calls.turns._waiting)
        late.cancel()
        front_end.await_end("CANCELLED")
        gate.open.set()
        for call in running:
            outcome(call)
        eventually(lambda: not front_end.calls.turns._inside)
        assert len(gate.begun) == 2


class TestSeveralRequests:
    def test_each_request_of_a_call_is_counted_and_nothing_stays(self, start):
        front_end = start(echo)
        answers = [b"1", b"2", b"3"]
        assert outcome(front_end.call(*answers)) == ("OK", answers)
        front_end.await_end("OK", 3)
        front_end.await_counts()
        assert not front_end.calls.waiting

    def test_a_request_that_is_refused_ends_the_call_after_its_answers(self, start, tmp_path):
        limits = tenants_file(tmp_path, "[default]\nrate = 1.0\n")
        front_end = start(echo, tenants_file=limits)
        assert outcome(front_end.call(b"1", b"2", b"3")) == ("RESOURCE_EXHAUSTED", [b"1"])
        front_end.await_counts()

    def test_a_call_waits_for_some_time_only(self, start):
        front_end, began = start(echo), time.monotonic()
        assert outcome(front_end.call(b"1", silent=True)) == ("CANCELLED", [b"1"])
        assert 0.4 < time.monotonic() - began < 20
        assert front_end.ended() == {("Evaluate", "OK", "default"): 1}
        front_end.await_counts()

    def test_no_call_waits_where_few_more_may_be_open(self, start):
        front_end = start(echo, max_requests=1)
        first = front_end.call(b"1", silent=True)
        assert next(first) == b"1"
        eventually(lambda: front_end.calls.waiting)
        assert outcome(front_end.call(b"2", silent=True)) == ("OK", [b"2"])
        assert outcome(first) == ("CANCELLED", [])


class TestObservation:
    def test_a_call_whose_deadline_has_passed_is_counted_as_such(self, start):
        gate, contexts = Gate(), []

        def behaviour(message, context):
            contexts.append(context)
            return (yield from gate(message, context))

        front_end = start(behaviour)
        assert outcome(front_end.call(b"x", timeout=2.0))[0] == "DEADLINE_EXCEEDED"
        # The client knows of it first.
        eventually(lambda: not contexts[0].is_active() and contexts[0].time_remaining() <= 0)
        assert front_end.recorder.totals().in_flight == 1
        gate.open.set()
        front_end.await_end("DEADLINE_EXCEEDED")
        assert front_end.recorder.totals().in_flight == 0

    def test_a_call_keeps_a_valid_id_of_its_client_and_else_gets_a_new_one(self, start):
        given = ("run-7/call.3", "no good!", "", "x" * 200)
        front_end, used = start(echo), []
        for metadata in (*((("x-request-id", name),) for name in given), ()):
            call = front_end.call(b"x", metadata=metadata)
            assert outcome(call)[0] == "OK"
            used.append(dict(call.trailing_metadata())[REQUEST_ID_KEY])
        assert used[0] == given[0]
        assert len(set(used)) == len(used)
        assert not set(used[1:]) & set(given)
