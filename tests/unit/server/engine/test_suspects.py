"""Suspects run alone, for a bounded time."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from warpfit_server.engine.scheduler import ScheduledRequest, Scheduler
from warpfit_server.ipc.segments import ALONE, BEGUN, PROVEN, QUEUED
from warpfit_server.tenancy.tenants import PROBE


@dataclass(eq=False)
class FakeRequest(ScheduledRequest):
    name: str = ""
    state: int = QUEUED
    is_cancelled: bool = False

    def note_state(self, state):
        self.state = state


class Steps:
    """A scheduler with a clock, and an engine that runs its steps."""

    def __init__(self):
        self.now = 0.0
        self.scheduler = Scheduler(1 << 20, clock=lambda: self.now)

    def add(self, name, alone=0.0, tenant="me"):
        request = FakeRequest(tenant, name=name, alone=alone)
        self.scheduler.add(request)
        return request

    def next(self):
        """Begin the next step; return its request, or None if nothing may run now."""
        requests = self.scheduler.next()
        for request in requests:
            if not (request.alone or request.used):
                request.state = BEGUN
        return requests[0] if requests else None

    def end(self, request, *, finished=True):
        self.scheduler.ran([request], 0.001)
        self.scheduler.ended([request], [] if finished else [request])


@pytest.fixture
def steps():
    return Steps()


def test_a_suspect_waits_for_running_steps_and_others_wait_for_the_suspect(steps):
    before = steps.add("before")
    assert steps.next() is before
    suspect, after = steps.add("suspect", 5.0), steps.add("after")
    assert steps.next() is None
    assert suspect.state == QUEUED
    steps.end(before)
    assert steps.next() is suspect
    assert suspect.state == ALONE
    assert steps.next() is None
    steps.end(suspect)
    assert steps.next() is after
    assert steps.scheduler.timeout is None


def test_a_suspect_runs_all_its_steps_alone(steps):
    suspect, after = steps.add("suspect", 5.0), steps.add("after")
    for finished in (False, False, True):
        assert steps.next() is suspect
        assert steps.next() is None
        steps.end(suspect, finished=finished)
    assert steps.next() is after


def test_suspects_run_one_at_a_time(steps):
    suspects = [steps.add(name, 5.0) for name in ("a", "b", "c")]
    for suspect in suspects:
        assert steps.next() is suspect
        assert suspect.state == ALONE
        assert steps.next() is None
        steps.end(suspect)
    assert len(steps.scheduler) == 0


def test_a_suspect_that_takes_too_long_runs_beside_others_and_its_state_says_so(steps):
    suspect, after = steps.add("suspect", 2.0), steps.add("after")
    assert steps.next() is suspect
    steps.now += 1.9
    assert steps.next() is None
    steps.now += 0.2
    assert steps.next() is after
    assert suspect.state == PROVEN
    steps.end(suspect, finished=False)
    assert steps.next() is suspect  # beside the other
    assert suspect.state == PROVEN


def test_a_long_step_does_not_keep_a_suspect_waiting_for_ever(steps):
    long = steps.add("long")
    steps.next()
    suspect, after = steps.add("suspect", 2.0), steps.add("after")
    assert steps.next() is None
    steps.now += 2.1
    assert steps.next() is suspect
    assert suspect.state == BEGUN
    assert steps.next() is after
    steps.end(long)


def test_a_suspect_that_waits_for_a_future_keeps_its_turn(steps):
    suspect, after = steps.add("suspect", 2.0), steps.add("after")
    steps.next()
    steps.scheduler.ran([suspect], 0.001)  # it waits for a future
    assert steps.next() is None
    steps.scheduler.ended([suspect], [suspect])
    assert steps.next() is suspect
    steps.end(suspect)
    assert steps.next() is after


def test_probes_run_beside_a_suspect(steps):
    suspect = steps.add("suspect", 2.0)
    assert steps.next() is suspect
    probe = steps.add("probe", tenant=PROBE)
    assert steps.next() is probe
    assert suspect.state == ALONE
    steps.end(suspect)
    other = steps.add("other suspect", 2.0)
    assert steps.next() is other
    assert other.state == ALONE


def test_a_cancelled_suspect_does_not_wait(steps):
    long = steps.add("long")
    steps.next()
    suspect = steps.add("suspect", 60.0)
    assert steps.next() is None
    suspect.is_cancelled = True
    assert steps.next() is suspect
    steps.end(suspect)
    after = steps.add("after")
    assert steps.next() is after
    steps.end(long)
