"""The supervisors of front-end processes and engine, without processes."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from support.servers.requests import DATA
from warpfit.errors import ResourceExhaustedError
from warpfit_server.config import Config
from warpfit_server.engine.hang_detector import EXIT_STUCK
from warpfit_server.ipc import messages
from warpfit_server.ipc.quarantine import Quarantine
from warpfit_server.ipc.segments import SegmentPool
from warpfit_server.processes.engine_deaths import cause_of_death
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


def test_leases_end_one_by_one(front_end):
    ended = []
    for number in (1, 2):
        lease = ExitStack()
        lease.callback(ended.append, number)
        front_end.leases.setdefault(b"data", []).append((lease, None))
    for count in (1, 2):
        front_end.end_lease(b"data")
        assert len(ended) == count
    assert not front_end.leases


@pytest.mark.parametrize(
    ("code", "cause"),
    [(-9, "SIGKILL"), (-11, "SIGSEGV"), (EXIT_STUCK, "stuck"), (4, "broken"), (1, "exit 1")],
)
def test_the_cause_of_an_engines_end(code, cause):
    assert cause_of_death(code) == cause


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
    engines.place(SimpleNamespace(key=b"data"))
    assert asked == [1]
