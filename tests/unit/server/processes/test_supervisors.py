"""The supervisors of front-end processes and engine, without processes."""

import signal
import subprocess
import threading
import time
from concurrent.futures import Future
from itertools import count
from types import SimpleNamespace

import pytest

from support.servers.requests import DATA
from warpfit.errors import ResourceExhaustedError, UnavailableError
from warpfit.server_info import Device
from warpfit_server.config import Config
from warpfit_server.ipc import messages
from warpfit_server.ipc.channel import Channel, ChannelClosedError
from warpfit_server.ipc.quarantine import Quarantine
from warpfit_server.ipc.segments import SegmentPool
from warpfit_server.processes import engine_supervisor
from warpfit_server.processes.engine_supervisor import EngineSupervisor
from warpfit_server.processes.engines import Engines
from warpfit_server.processes.front_end import BorrowedLeases
from warpfit_server.processes.front_end_supervisor import FrontEndSupervisor, _FrontEnd
from warpfit_server.tenancy.quotas import QuotaTable


@pytest.fixture
def killed():
    return []


@pytest.fixture
def front_end(killed):
    return _FrontEnd(SimpleNamespace(pid=7, kill=lambda: killed.append(True)), None)


@pytest.fixture
def supervisor(front_end):
    config = Config(probe_seconds=2.0, probe_timeout=3.0, hang_seconds=10.0)
    made = FrontEndSupervisor(config, SimpleNamespace(quarantine=Quarantine()), None, None, None)
    front_end.serving.set()
    made._front_ends.append(front_end)
    return made


def test_a_front_end_answers_while_its_last_right_probe_is_recent(supervisor, front_end):
    assert not supervisor.all_answered_by(1)
    probe = front_end.probes[1]
    probe.answers, probe.ended = True, time.monotonic()
    assert supervisor.all_answered_by(1)
    assert not supervisor.all_answered_by(0)
    probe.ended -= 6.0
    assert not supervisor.all_answered_by(1)


def test_a_front_end_is_replaced_if_the_engine_answers_only_others(supervisor, front_end, killed):
    front_end.probes[1].answered -= 11.0
    supervisor.kill_silent([0])
    assert not killed
    supervisor.kill_silent([0, 1])
    assert killed


@pytest.mark.parametrize(
    "error", [ResourceExhaustedError("no room", "MEMORY"), ChannelClosedError("it is gone")]
)
def test_a_release_does_not_fail_because_a_front_end_cannot_be_told(supervisor, front_end, error):
    def send(*_):
        raise error

    front_end.control = SimpleNamespace(send=send)
    began = time.monotonic()
    supervisor.announce_release(b"data")
    assert time.monotonic() - began < 1, "no answer can come"


def test_a_lease_is_asked_for_again_where_a_message_had_no_room():
    """Calls would wait for ever for an answer to what was never sent."""
    sent = []

    def send(message):
        sent.append(type(message))
        if len(sent) in (1, 3):
            raise ResourceExhaustedError("the system has no room", "MEMORY")
        if isinstance(message, messages.LeaseDataset):
            threading.Timer(0.01, leases.answered, [answer]).start()

    leases, answer = BorrowedLeases(send), messages.DatasetLease(b"data", DATA.layout)
    with pytest.raises(ResourceExhaustedError), leases.lease(b"data"):
        pass
    with leases.lease(b"data") as leased:
        with pytest.raises(ResourceExhaustedError):
            leased.load(0)
        leased.load(0)
    assert sent == [messages.LeaseDataset] * 2 + [messages.RequestLoad] * 2


def test_an_engine_that_had_no_room_is_asked_again():
    """However long calls keep the lease."""
    sent = []
    leases, answer = BorrowedLeases(sent.append), messages.DatasetLease(b"data", DATA.layout)
    threading.Timer(0.01, leases.answered, [answer]).start()
    full = ResourceExhaustedError("no room", "MEMORY")
    with leases.lease(b"data") as data:
        for error in (full, full, None):
            load = data.load(1)
            assert data.load(1) is load, "one request at a time"
            assert not data.has(1)
            leases.load_ended(messages.LoadEnded(1, b"data", error))
            assert load.exception() is error
        assert data.has(1)
    assert sent == [messages.LeaseDataset(b"data"), *[messages.RequestLoad(1, b"data")] * 3]


def test_a_new_engine_process_is_asked_whether_it_has_a_data_set():
    sent = []
    leases, answer = BorrowedLeases(sent.append), messages.DatasetLease(b"data", DATA.layout, (0,))
    threading.Timer(0.01, leases.answered, [answer]).start()
    with leases.lease(b"data") as data:
        assert data.has(0)
        leases.engine_started(0)
        assert not data.has(0)
        load = data.load(0)
        leases.load_ended(messages.LoadEnded(0, b"data", None))
        assert load.done() and data.has(0)
    assert sent == [messages.LeaseDataset(b"data"), messages.RequestLoad(0, b"data")]


def test_a_new_data_set_does_not_wait_for_an_engine_that_hangs(monkeypatch):
    engines = Engines(Config(devices="cpu:2"), SegmentPool(0), QuotaTable.create(1, 2))
    engines.router.serving = frozenset(["cpu:1"])
    asked = []

    def load(supervisor, dataset):
        asked.append(supervisor.number)
        loaded = Future()
        loaded.set_result(None)
        return loaded

    monkeypatch.setattr(EngineSupervisor, "load", load)
    engines.place(SimpleNamespace(key=b"data", layout=DATA.layout))
    assert asked == [1]


def test_a_data_set_goes_to_the_next_engine_where_one_has_no_room(monkeypatch):
    asked = []

    def load(supervisor, dataset):
        asked.append(supervisor.number)
        loaded = Future()
        loaded.set_exception(ResourceExhaustedError("no room", "MEMORY"))
        if supervisor.number == has_room:
            loaded = Future()
            loaded.set_result(None)
        return loaded

    monkeypatch.setattr(EngineSupervisor, "load", load)
    engines = Engines(Config(devices="cpu:2"), SegmentPool(0), QuotaTable.create(1, 2))
    dataset, has_room = SimpleNamespace(key=b"data", layout=DATA.layout), 1
    engines.place(dataset)
    assert asked == [0, 1]
    has_room = None
    with pytest.raises(ResourceExhaustedError):
        engines.place(dataset)


def test_an_engine_serves_when_it_has_its_data_sets_and_no_more_once_it_is_lost():
    supervisor = EngineSupervisor(Config(devices="cpu"), 0, SegmentPool(0), Quarantine(), count(1))
    channel, theirs = Channel.pair()
    seen = []

    def resident():
        seen.append(supervisor.starting_since)
        return iter(())

    supervisor._resident = resident
    supervisor._serve(channel, messages.EngineReady(Device("a processor")))
    assert seen == [0.0]
    assert supervisor.starting_since is None
    supervisor._lose_engine()
    assert time.monotonic() - supervisor.starting_since < 10, "not since it was started"
    channel.close()
    theirs.close()


def test_nobody_is_connected_to_an_engine_that_lacks_data_sets():
    """It would say that they are not resident; front ends that have lost it ask again and again."""
    supervisor = EngineSupervisor(Config(devices="cpu"), 0, SegmentPool(0), Quarantine(), count(1))
    channel, theirs = Channel.pair()

    def resident():
        with pytest.raises(UnavailableError):
            supervisor.connect()
        yield from ()

    supervisor._resident = resident
    supervisor._serve(channel, messages.EngineReady(Device("a processor")))
    supervisor.connect()[1].close()
    supervisor._lose_engine()
    channel.close()
    theirs.close()


def test_a_front_end_that_hangs_does_not_outlive_the_server(supervisor, front_end, killed):
    front_end.control = SimpleNamespace(send=lambda *_: None)
    supervisor.stop()
    assert killed


def test_an_engine_that_hangs_does_not_outlive_the_server(monkeypatch):
    monkeypatch.setattr(engine_supervisor, "_STOP_SECONDS", 0.1)
    supervisor = EngineSupervisor(Config(devices="cpu"), 0, SegmentPool(0), Quarantine(), count(1))
    channel, theirs = Channel.pair()
    with subprocess.Popen(["sleep", "60"], process_group=0) as process, theirs:
        supervisor._process, supervisor._channel = process, channel
        supervisor._thread = threading.Thread(target=process.wait)
        supervisor._thread.start()
        supervisor.stop()
        assert process.poll() == -signal.SIGKILL
    channel.close()


class TestLoads:
    """Loads of an engine that is asked to forget a data set while it loads that."""

    ROOM = ResourceExhaustedError("no room", "MEMORY")

    @pytest.fixture
    def dataset(self):
        segment = SegmentPool(0).create(DATA.layout.nbytes)
        return SimpleNamespace(key=b"data", layout=DATA.layout, segment=segment)

    @pytest.fixture
    def supervisor(self):
        config = Config(devices="cpu")
        supervisor = EngineSupervisor(config, 0, SegmentPool(0), Quarantine(), count(1))
        channel, theirs = Channel.pair()
        supervisor._channel = channel
        with theirs:
            yield supervisor
        channel.close()

    @pytest.mark.parametrize("error", [None, ROOM])
    def test_an_answer_is_that_of_its_own_load(self, supervisor, dataset, error):
        first = supervisor.load(dataset)
        supervisor.unload(b"data")
        second = supervisor.load(dataset)
        supervisor._settle_load(messages.DatasetLoaded(b"data", error))
        assert first.exception(timeout=0) is error, "those that wait for it go on"
        assert not second.done()
        assert not supervisor.has(b"data")
        supervisor._settle_load(messages.DatasetLoaded(b"data", None))
        assert second.result(timeout=0) is None
        assert supervisor.has(b"data")

    def test_all_that_wait_go_on_when_the_engine_is_lost(self, supervisor, dataset):
        loads = [supervisor.load(dataset)]
        supervisor.unload(b"data")
        loads.append(supervisor.load(dataset))
        assert supervisor._lose_engine() == [(b"data", load) for load in loads]
