"""Fair sharing: the engine's gate."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from warpfit.errors import CancelledError
from warpfit_server import fairness
from warpfit_server.fairness import FairGate


class Visitors:
    """Threads that hold turns of a gate until they are told to leave."""

    def __init__(self, gate):
        self._gate = gate
        self.order = []
        self._leave = {}
        self._threads = []

    def come(self, name, tenant, charge=0.0, places=1, cancelled=None):
        leave = self._leave[name] = threading.Event()

        def visit():
            try:
                with self._gate.turn(tenant, places, cancelled) as turn:
                    self.order.append(name)
                    turn.charge(charge)
                    leave.wait(10)
            except CancelledError:
                self.order.append(f"{name} is gone")

        thread = threading.Thread(target=visit, daemon=True)
        thread.start()
        self._threads.append(thread)
        time.sleep(0.05)

    def go(self, name):
        self._leave[name].set()

    def see(self, *order):
        """Wait until exactly these have had their turn."""
        deadline = time.monotonic() + 10
        while tuple(self.order) != order:
            assert time.monotonic() < deadline, self.order
            time.sleep(0.01)

    def end(self):
        for leave in self._leave.values():
            leave.set()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()


@pytest.fixture
def gate(monkeypatch):
    monkeypatch.setattr(fairness, "_EXTRA", 0)
    return FairGate(1)


@pytest.fixture
def visitors(gate):
    group = Visitors(gate)
    yield group
    group.end()


class TestGate:
    def test_the_least_charged_tenant_goes_first(self, gate, visitors):
        with gate.turn("modest"):
            pass
        visitors.come("running", "greedy", charge=5.0)
        for name in ("second", "third"):
            visitors.come(name, "greedy")
        visitors.come("modest", "modest")
        visitors.see("running")
        visitors.go("running")
        visitors.see("running", "modest")
        visitors.go("modest")
        visitors.see("running", "modest", "second")
        visitors.go("second")
        visitors.see("running", "modest", "second", "third")

    def test_a_tenant_without_a_turn_does_not_wait_behind_another(self):
        gate = FairGate(1)
        visitors = Visitors(gate)
        visitors.come("one", "greedy")
        visitors.come("two", "greedy")
        visitors.come("modest", "modest")
        visitors.see("one", "modest")
        visitors.end()

    def test_who_is_cancelled_waits_no_more(self, gate, visitors):
        flag = np.zeros(1, np.uint8)
        visitors.come("running", "a")
        visitors.come("second", "a", cancelled=flag)
        visitors.come("third", "a", cancelled=np.zeros(1, np.uint8))
        flag[0] = 1
        visitors.see("running", "second is gone")
        visitors.go("running")
        visitors.see("running", "second is gone", "third")
        visitors.go("third")
        visitors.end()
        assert (gate._taken, gate._waiting) == (0, {})

    def test_who_has_a_place_does_not_withdraw(self, gate):
        with gate.turn("a"):
            ticket = gate._enter("a", 1)
        assert ticket.is_set()
        assert not gate._withdraw("a", ticket)
        gate.leave("a", 0.0, 1)

    def test_work_that_the_engine_does_not_report_is_charged_too(self):
        gate = FairGate(1)
        with gate.turn("a") as turn:
            helper = threading.Thread(target=turn.charge, args=(1.0,))
            helper.start()
            helper.join()
            end = time.thread_time() + 0.05
            while time.thread_time() < end:
                continue
            turn.charge(0.04)
            time.sleep(0.1)  # is no work
        assert 1.05 <= gate.charged("a") < 1.12

    def test_large_ones_take_several_places(self):
        gate = FairGate(4)
        visitors = Visitors(gate)
        for name in ("one", "two", "three"):
            visitors.come(name, "greedy", places=2)
        visitors.come("small", "greedy")
        visitors.come("modest", "modest", places=2)
        visitors.see("one", "two", "modest")
        visitors.go("modest")
        visitors.go("one")
        visitors.see("one", "two", "modest", "three")
        visitors.go("two")
        visitors.see("one", "two", "modest", "three", "small")
        visitors.go("three")
        visitors.go("small")
        visitors.end()
        assert gate._taken == 0

    def test_who_was_away_gets_credit_but_not_for_ever(self, monkeypatch):
        gate = FairGate(2)
        with gate.turn("modest"):
            pass
        with gate.turn("greedy") as greedy:
            greedy.charge(1000.0)
            with gate.turn("modest") as modest:
                modest.charge(0.5 * fairness._CREDIT)
                assert greedy.goes_behind()
                modest.charge(fairness._CREDIT)
                assert modest.goes_behind()

    def test_a_newcomer_does_not_stop_who_was_there_before(self):
        gate = FairGate(2)
        with gate.turn("first") as first:
            first.charge(1000.0)  # alone, while nobody else wanted it
        with gate.turn("newcomer") as newcomer, gate.turn("first") as first:
            newcomer.charge(0.0)
            assert not first.goes_behind()
            first.charge(1.0)
            assert first.goes_behind()
            newcomer.charge(2.0)
            assert newcomer.goes_behind()
            assert not first.goes_behind()

    def test_who_has_used_more_goes_behind_whoever_was_here_lately(self, monkeypatch):
        gate = FairGate(2)
        with gate.turn("modest") as modest:
            modest.charge(1.0)
        with gate.turn("greedy") as greedy:
            assert not greedy.goes_behind()
            greedy.charge(2 * fairness._AHEAD)  # it begins with no less than the others
            assert greedy.goes_behind()
            assert not modest.goes_behind()
            modest.charge(3 * fairness._AHEAD)
            assert not greedy.goes_behind()
            modest.charge(0.5)
            assert modest.goes_behind()
            monkeypatch.setattr(fairness, "_LATELY", 0.0)
            assert not modest.goes_behind(), "nobody else was here lately"

    def test_who_never_was_there_is_ahead_of_nobody(self):
        gate = FairGate(2)
        gate.account({"modest": 1.0}, 1.0)
        assert not gate.goes_behind("newcomer")

    def test_what_runs_without_a_place_counts(self):
        gate = FairGate(2)
        for _ in range(5):
            gate.account({"greedy": 1.6, "modest": 0.1}, 0.2)
        assert gate.goes_behind("greedy")
        assert not gate.goes_behind("modest")

    def test_who_is_away_at_times_falls_back_by_no_more_than_the_credit(self):
        gate = FairGate(2)
        for _ in range(100):
            gate.account({"greedy": 1.6, "modest": 0.1}, 0.2)
        lag = gate.charged("greedy") - gate.charged("modest")
        assert lag < 1.6 + fairness._CREDIT
        for _ in range(20):  # which it has used up soon
            gate.account({"greedy": 1.6, "modest": 1.8}, 0.2)
        assert gate.goes_behind("modest")

    def test_two_that_are_always_there_are_compared_by_what_they_use(self):
        gate = FairGate(2)
        for _ in range(100):
            gate.account({"a": 0.4, "b": 0.3}, 0.2)
        assert gate.charged("a") - gate.charged("b") == pytest.approx(10.0)

    def test_work_that_engines_do_not_report_is_charged_by_the_clock(self):
        gate = FairGate(1)
        with gate.turn("a"):
            time.sleep(0.05)
        assert 0.05 <= gate.charged("a") < 1

    def test_nothing_is_left_behind(self):
        gate = FairGate(3)

        def work(number):
            with gate.turn(f"t{number % 7}") as turn:
                turn.charge(0.001)

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(work, range(500)))
        assert (gate._taken, dict(gate._running), gate._waiting) == (0, {}, {})

    def test_tenants_of_the_past_are_forgotten(self, monkeypatch):
        monkeypatch.setattr(fairness, "_REMEMBERED", 5)
        gate = FairGate(1)
        for number in range(100):
            with gate.turn(f"t{number}"):
                pass
        assert len(gate._charges) <= 6
        gate.account({f"t{number}": 1.0 for number in range(100)}, 0.2)
        assert len(gate._charges) <= 6
        assert not gate.goes_behind("t0")
