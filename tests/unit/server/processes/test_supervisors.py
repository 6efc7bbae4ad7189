"""The supervisors of front ends and engines, and what front ends are told, without processes."""

import math
import os
import signal
import subprocess
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from support.servers.examples import DATA
from support.servers.server import eventually
from warpfit import codec, errors
from warpfit.dataset import Dataset
from warpfit.server_info import Device, Limits
from warpfit.v1 import evaluator_pb2 as pb
from warpfit_server.config import Config
from warpfit_server.dataset_store import DatasetStore
from warpfit_server.ipc import messages
from warpfit_server.ipc.messages import Channel, ChannelClosedError
from warpfit_server.ipc.quarantine import Quarantine
from warpfit_server.ipc.router import Registry
from warpfit_server.ipc.segments import SegmentPool
from warpfit_server.logs import Recorder
from warpfit_server.machine import socket_pair
from warpfit_server.processes import engine_start
from warpfit_server.processes.engine_start import prepare
from warpfit_server.processes.engines import Engines, EngineSupervisor
from warpfit_server.processes.front_end import MainProcess
from warpfit_server.processes.front_ends import FrontEnds
from warpfit_server.processes.supervisor import State, Supervisor
from warpfit_server.processes.watchdog import Watchdog
from warpfit_server.tenants import QuotaTable

CONFIG = Config(devices="cpu:2", front_ends=2, hang_seconds=30.0)
FULL = errors.ResourceExhaustedError("no room", "MEMORY")


@pytest.fixture
def front_ends():
    engines, table = Engines(CONFIG, SegmentPool(0)), QuotaTable.create(2, 2)
    made = FrontEnds(CONFIG, engines, table, Recorder(), frozenset, 1, -1)
    told = made.unload_dataset, made.announce_dataset, made.withdraw_dataset
    made.datasets = DatasetStore(Limits(), table, *told)
    return made


@pytest.fixture
def watchdog(front_ends):
    made = Watchdog(CONFIG, front_ends.engines, [None, None], None, front_ends)
    for engine in made.engines:
        engine.answering_since = 0.0
    return made


@pytest.fixture
def front_end(front_ends):
    """A front end that serves; `killed` tells whether it was killed, `told` what it was told."""
    found, killed = front_ends.supervisors[0], []
    found.process = SimpleNamespace(pid=7, kill=lambda: killed.append(True))
    found.killed, found.told = killed, []
    found.state = State.SERVING
    found.channel = SimpleNamespace(send=lambda message, _=None: found.told.append(message))
    found.last_message = time.monotonic()
    for probe in found.probes:
        probe.answered = found.last_message
    return found


def ask(front_ends, front_end, function, *arguments, descriptor=None):
    front_end.told.clear()
    front_ends.answer(front_end, messages.Question(5, function, arguments), descriptor)
    (answer,) = [each for each in front_end.told if isinstance(each, messages.Answer)]
    assert answer.number == 5
    if answer.error is not None:
        raise answer.error
    return answer.result


class Sleeper(Supervisor):
    handle = lost = ended = Mock()

    def __init__(self, seconds, stop_seconds=5.0):
        super().__init__("a process that sleeps", stop_seconds)
        self.command, self.codes = ["sleep", str(seconds)], []
        self.ended = self.codes.append

    def spawn(self):
        ours, theirs = Channel.pair()
        with theirs:
            given = {"pass_fds": [theirs.fileno()], "process_group": 0}
            return subprocess.Popen(self.command, **given), ours


def test_a_process_that_ends_is_replaced_at_once_and_later_with_pauses():
    supervisor = Sleeper(0.0)
    supervisor.start()
    eventually(lambda: len(supervisor.codes) >= 2)
    assert supervisor.settled.is_set(), "nobody waits for one that cannot start"
    supervisor.stop()
    assert len(supervisor.codes) < 6


def test_processes_that_are_told_to_end_and_hang_are_killed_after_the_time_of_one():
    supervisors = [Sleeper(60.0, stop_seconds=1.0) for _ in range(4)]
    for supervisor in supervisors:
        supervisor.start()
        eventually(lambda own=supervisor: own.state is State.STARTING)
        supervisor.ready(SimpleNamespace(send=lambda *_: None))
    for supervisor in supervisors:
        supervisor.begin_stop()
    started = time.monotonic()
    for supervisor in supervisors:
        supervisor.stop()
        assert supervisor.codes == [-signal.SIGKILL]
    assert time.monotonic() - started < 3.5


def test_a_front_end_answers_while_its_last_right_probe_is_recent(watchdog, front_end):
    assert not watchdog.all_answered_by(1)
    probe = front_end.probes[1]
    probe.answers, probe.ended = True, time.monotonic()
    assert watchdog.all_answered_by(1)
    assert not watchdog.all_answered_by(0)
    probe.ended -= 6.0
    assert not watchdog.all_answered_by(1)
    watchdog.resumed = time.monotonic() - 1.0  # it was stopped itself meanwhile
    assert watchdog.all_answered_by(1)
    front_end.state = State.GONE
    assert not watchdog.all_answered_by(1), "there is none that answers"


LONG = 1e9


@pytest.mark.parametrize(
    ("silent", "unanswered", "engine_answers", "resumed", "cause"),
    [
        # A hung engine may have answered this process a moment earlier than the front end.
        *((0.0, 40.0, seconds, LONG, None) for seconds in (-math.inf, 0.0, 31.0)),
        (0.0, 40.0, 32.1, LONG, "no_answer"),
        # One that was stopped for a short time was due to send a message as it was stopped.
        (30.4, 31.9, LONG, LONG, None),
        (30.6, 31.9, LONG, LONG, "silent"),
        # Silence counts only while this process hears.
        (40.0, 40.0, LONG, 1.0, None),
        (40.0, 40.0, LONG, 31.0, "silent"),
    ],
)
def test_a_front_end_is_replaced_that_says_nothing_or_is_not_answered_like_others(
    watchdog, front_end, silent, unanswered, engine_answers, resumed, cause
):
    now = time.monotonic()
    front_end.last_message, front_end.probes[1].answered = now - silent, now - unanswered
    watchdog.engines[1].answering_since = now - engine_answers
    watchdog.resumed = now - resumed
    for _ in range(2):
        watchdog.look_at_front_ends(now)
    assert len(front_end.killed) == (cause is not None), "once, although it may take a while to end"
    assert cause is None or front_end.cause == cause


def test_a_new_front_end_ends_no_readiness(watchdog, front_end):
    for probe in front_end.probes:
        probe.answers = True
    assert not watchdog.all_answered_by(0)
    front_end.handle(front_end.channel, messages.FrontEndReady(), None)
    assert watchdog.all_answered_by(0)
    front_end.handle(None, messages.ProbeResult(0, False), None)
    assert not watchdog.all_answered_by(0)


def test_a_front_end_that_does_not_start_is_replaced(monkeypatch, front_ends, watchdog, front_end):
    monkeypatch.setattr(Config, "start_seconds", 0.3)
    front_end.state, front_end.since = State.STARTING, time.monotonic()
    watchdog.look_at_front_ends(time.monotonic())
    assert not front_end.killed
    with pytest.raises(errors.UnavailableError, match="did not start"):
        front_ends.open(lambda: False)
    front_end.since -= 0.4
    watchdog.look_at_front_ends(time.monotonic())
    assert front_end.killed


def test_a_front_end_that_cannot_serve_says_why(front_ends, front_end):
    front_end.handle(None, messages.FrontEndFailed(FULL), None)
    for supervisor in front_ends.supervisors:
        supervisor.settled.set()
    with pytest.raises(errors.ResourceExhaustedError, match="no room"):
        front_ends.open(lambda: False)
    front_end.ready(front_end.channel)
    assert front_ends.failure is None


@pytest.mark.parametrize("error", [FULL, ChannelClosedError("it is gone")])
def test_what_a_front_end_cannot_be_told_fails_nothing(front_ends, front_end, error):
    front_end.channel = Mock(**{"send.side_effect": error})
    front_ends.withdraw_dataset(b"data")
    assert not front_end.tell(messages.Stop())


def test_a_front_end_that_reads_nothing_stops_others_briefly(front_ends, front_end, monkeypatch):
    ours, theirs = Channel.pair()
    held = theirs.dup()
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: SimpleNamespace(pid=7))
    monkeypatch.setattr(Channel, "pair", lambda: (ours, theirs))
    front_end.process, front_end.channel = front_end.spawn()
    longest = 0.0
    for _ in range(20_000):
        began = time.monotonic()
        front_ends.withdraw_dataset(bytes(32))
        longest = max(longest, time.monotonic() - began)
    assert 0.5 < longest < 2.5, "the others' uploads wait meanwhile"
    for end in (ours, held):
        end.close()


@pytest.mark.parametrize("error", [FULL, BlockingIOError("no process"), KeyError("a bug")])
def test_a_process_that_cannot_be_started_is_tried_again(monkeypatch, caplog, error):
    monkeypatch.setattr("warpfit_server.processes.supervisor._SPAWN_PAUSE", 0.01)
    supervisor = Sleeper(0.0)
    supervisor.spawn = Mock(side_effect=chain([error, error], iter(supervisor.spawn, None)))
    supervisor.start()
    eventually(lambda: supervisor.codes)
    supervisor.stop()
    told = [record for record in caplog.records if "could not be run" in record.message]
    assert len(told) == 2 and str(error) in told[0].message
    assert ("Traceback" in caplog.text) == isinstance(error, KeyError), "only of a bug"


class TestQuestions:
    @pytest.fixture
    def begun(self, front_ends, front_end):
        return ask(front_ends, front_end, "begin", DATA.layout, b"", "tenant", 1 << 30)

    def upload(self, front_ends, front_end, dataset):
        layout = replace(dataset.layout, names=())
        own = layout, codec.encode_names(dataset.layout.names), "tenant", 1 << 30
        number = ask(front_ends, front_end, "begin", *own)
        segment = SegmentPool(0).create(dataset.layout.nbytes)
        segment.write(dataset.matrix.data.cast("B"), 0)
        ask(front_ends, front_end, "reserve", number, dataset.layout.nbytes)
        rest = number, dataset.content_id, layout, 0
        descriptor = os.dup(segment.descriptor)
        return ask(front_ends, front_end, "commit", *rest, descriptor=descriptor)

    def test_an_upload_becomes_a_data_set_that_all_are_told_of(self, front_ends, front_end):
        dataset = Dataset.of(np.arange(12.0).reshape(4, 3), names=("a", "b", "c"))
        found = self.upload(front_ends, front_end, dataset)
        assert found.is_fresh and found.names
        announced = [m for m in front_end.told if isinstance(m, messages.DatasetAnnounced)]
        assert announced[0].found == found._replace(names=b""), "they may be long"
        assert not front_end.uploads
        known = ask(front_ends, front_end, "find", found.key)
        told = codec.dataset_info(known.content_id, known.layout, known.names, "digits")
        description = pb.DatasetInfo.FromString(told)
        assert codec.layout_from_message(description.layout) == dataset.layout
        assert (description.content_id, description.lost_digits) == (found.content_id, "digits")
        with front_ends.datasets.pin(found.key) as stored:
            held = stored.segment.array(dataset.layout.dtype, (3, 4))
            np.testing.assert_array_equal(held, dataset.matrix)
        assert ask(front_ends, front_end, "describe", "tenant")[1] == 1
        ask(front_ends, front_end, "load", 1, found.key)
        assert messages.DatasetHeld(1, found.key) in front_end.told
        assert ask(front_ends, front_end, "find", found.key).engines == (1,)

    def test_uploads_of_a_front_end_that_dies_count_no_more(self, front_ends, front_end, begun):
        ask(front_ends, front_end, "reserve", begun, 100)
        assert front_ends.datasets.usage().nbytes == 100
        front_end.lost()
        assert front_ends.datasets.usage().nbytes == 0

    def test_a_commit_without_memory_leaves_nothing_open(self, front_ends, front_end, begun):
        commit = "commit", begun, b"id", DATA.layout, 0
        with pytest.raises(errors.ResourceExhaustedError, match="open no more files"):
            ask(front_ends, front_end, *commit)
        empty = os.memfd_create("empty")  # it cannot be mapped
        with pytest.raises(errors.InternalError):
            ask(front_ends, front_end, *commit, descriptor=empty)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(empty)
        ask(front_ends, front_end, "abandon", begun)

    def test_an_answer_that_cannot_be_sent_becomes_an_error(self, front_ends, front_end):
        def send(message, descriptor=None):
            if message.error is None:
                raise errors.InternalError("a message is too long", "MESSAGE_TOO_LONG")
            front_end.told.append(message)

        front_end.channel = SimpleNamespace(send=send)
        with pytest.raises(errors.InternalError, match="answer was not sent"):
            ask(front_ends, front_end, "describe", "tenant")

    def test_errors_are_answers(self, front_ends, front_end):
        for question in (("find",), ("give_back",), ("remove",), ("load", 0)):
            with pytest.raises(errors.DatasetNotFoundError):
                ask(front_ends, front_end, *question, b"no such key")
        with pytest.raises(errors.InternalError, match="main process"):
            ask(front_ends, front_end, "no such function")


def test_a_question_that_was_not_sent_is_not_waited_for():
    sent = []

    def send(question, descriptor):
        sent.append(question.function)
        if len(sent) == 1:
            raise FULL
        threading.Timer(0.01, main.answered, [messages.Answer(question.number, None)]).start()

    main = MainProcess(SimpleNamespace(send=send))
    with pytest.raises(errors.ResourceExhaustedError):
        main.give_back(b"data")
    main.give_back(b"data")
    assert not main._asked


class Known:
    def __init__(self, engines=()):
        self.asked, self.loads = [], []
        self.found = messages.FoundDataset(b"data", b"id", DATA.layout, 3, engines)
        self.table = QuotaTable.create(1, 2)
        self.registry = Registry(self.table, self._find, self._load)

    def _find(self, key):
        self.asked.append(key)
        if self.found is None:
            raise errors.DatasetNotFoundError
        return self.found

    def _load(self, engine, key):
        self.loads.append((engine, Future()))
        return self.loads[-1][1]


def test_a_data_set_is_asked_for_once_until_it_is_withdrawn_and_in_use_inside_the_block():
    known = Known(engines=(0, 1))
    for _ in range(2):
        with known.registry.use(b"data") as data:
            assert known.table.dataset_uses().calls[3] == 1
            assert data.layout == DATA.layout
    uses, last = (each[3] for each in known.table.dataset_uses())
    assert uses == 0
    assert time.monotonic() - last < 10
    assert known.asked == [b"data"]
    # The same content in another slot is another data set.
    known.registry.add(known.found._replace(slot=4, engines=()))
    with known.registry.use(b"data") as data:
        assert (data.slot, data.engines) == (4, frozenset())
    known.registry.forget(b"data")
    known.found = None
    with pytest.raises(errors.DatasetNotFoundError), known.registry.use(b"data"):
        pass


def test_an_engine_that_had_no_room_is_asked_again():
    known = Known()
    with known.registry.use(b"data") as data:
        for error in (FULL, FULL, None):
            load = data.load(1)
            assert data.load(1) is load, "one request at a time"
            assert 1 not in data.engines
            if error:
                load.set_exception(error)
            else:  # the main process tells all processes before it answers
                known.registry.held(b"data", 1)
                load.set_result(None)
        assert data.engines == {1}
    assert [engine for engine, _ in known.loads] == [1, 1, 1]


def test_what_engines_hold_follows_what_the_main_process_says():
    registry = (known := Known(engines=(0,))).registry
    data = registry.add(known.found)
    registry.held(b"data", 1)
    assert (data.engines, registry.loads(1)) == ({0, 1}, 1)
    registry.engine_started(0)
    assert data.engines == {1}
    registry.unloaded(b"data")
    assert data.engines == frozenset()


@pytest.fixture
def engine():
    supervisor = EngineSupervisor(Config(devices="cpu"), 0, SegmentPool(0), Quarantine(), count(1))
    supervisor.ours, theirs = Channel.pair()
    with theirs:
        yield supervisor
    supervisor.ours.close()


def test_an_engine_serves_when_it_has_its_data_sets_and_no_more_once_it_is_lost(engine):
    seen = []

    def resident():
        seen.append(engine.starting_since)
        with pytest.raises(errors.UnavailableError):  # front ends that have lost it ask on
            engine.connect()
        yield from ()

    engine.resident = resident
    engine.handle(engine.ours, messages.EngineReady(Device("a processor")), None)
    assert seen == [0.0]
    assert engine.starting_since is None
    engine.connect()[1].close()
    engine.state = State.GONE
    engine.lost()
    assert engine.starting_since is not None


@pytest.mark.parametrize("error", [None, FULL, "lost"])
def test_a_load_that_is_forgotten_and_asked_for_again_has_an_answer_of_its_own(engine, error):
    segment = SegmentPool(0).create(DATA.layout.nbytes)
    dataset = SimpleNamespace(key=b"data", layout=DATA.layout, segment=segment)
    engine.ready(engine.ours)
    first = engine.load(dataset)
    engine.unload(b"data")
    second = engine.load(dataset)
    if error == "lost":
        engine.lost()
        assert not first.done() and not second.done(), "the quarantine hears of it first"
        engine.ended(-signal.SIGKILL)
        assert first.done() and second.done()
        return
    engine.handle(None, messages.DatasetLoaded(b"data", error), None)
    assert first.exception(timeout=0) is error, "those that wait for it go on"
    assert not second.done()
    assert not engine.has(b"data")
    engine.handle(None, messages.DatasetLoaded(b"data", None), None)
    assert second.result(timeout=0) is None
    assert engine.has(b"data")


def test_a_process_that_a_signal_has_stopped_is_known_as_such():
    is_stopped, process = Supervisor.is_stopped.fget, subprocess.Popen(["sleep", "60"])
    supervisor = SimpleNamespace(process_id=process.pid)
    try:
        assert not is_stopped(supervisor)
        process.send_signal(signal.SIGSTOP)
        eventually(lambda: is_stopped(supervisor))
        process.send_signal(signal.SIGCONT)
        eventually(lambda: not is_stopped(supervisor))
    finally:
        process.kill()
        process.wait()
    assert not is_stopped(supervisor)
    assert not is_stopped(SimpleNamespace(process_id=None))


def test_engines_that_no_supervisor_takes_are_ended_with_all_that_was_made(tmp_path):
    config = Config(port=0, devices="cpu:2", threads=1, cache_dir=str(tmp_path))
    with prepare(config) as prepared:
        assert [device.label for device in prepared.config.engines] == ["cpu:0", "cpu:1"]
        assert sorted(prepared.engines) == [0, 1]
        assert Path(prepared.directory).is_dir()
        processes = [engine.process for engine in prepared.engines.values()]
        assert all(process.poll() is None for process in processes)
        taken = prepared.engines.pop(1)
    assert processes[0].returncode is not None
    assert not Path(prepared.directory).exists()
    assert taken.process.poll() is None
    taken.end.close()
    taken.process.kill()
    taken.process.wait()


def test_an_engine_that_cannot_be_started_leaves_nothing_open(monkeypatch, tmp_path):
    ends = socket_pair()
    monkeypatch.setattr(engine_start, "socket_pair", lambda: ends)
    monkeypatch.setattr(engine_start.subprocess, "Popen", Mock(side_effect=OSError("no memory")))
    with pytest.raises(OSError, match="no memory"):
        engine_start.start_engine(Config(devices="cpu", cache_dir=str(tmp_path)), 0)
    assert [end.fileno() for end in ends] == [-1, -1]


def test_settings_are_checked_before_an_engine_starts(monkeypatch, tmp_path):
    monkeypatch.setattr(engine_start, "start_engine", lambda *_: pytest.fail("it was started"))
    config = Config(devices="cpu", device_memory=1 << 30, cache_dir=str(tmp_path))
    with pytest.raises(errors.InvalidArgumentError, match="--device-memory"), prepare(config):
        pass


def test_readiness_is_repeated_before_front_ends_doubt_it(front_ends, front_end):
    config = replace(CONFIG, hang_seconds=3.0)
    watchdog = Watchdog(config, front_ends.engines, [None, None], None, front_ends)
    front_ends.announce_readiness()
    begun = time.monotonic()
    for seconds, told in ((0.1, 1), (0.2, 2)):
        watchdog.look_at_front_ends(begun + seconds)
        assert len(front_end.told) == told
