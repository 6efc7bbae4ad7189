"""Fair sharing: the engine's gate, lanes, pieces of work."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from support.pieces import work_in_python
from warpfit.errors import CancelledError
from warpfit_server import fairness
from warpfit_server.engine.cpu_helpers import Helpers
from warpfit_server.engine.cpu_pieces import finish, take
from warpfit_server.fairness import FairGate, current_turn


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
        assert 1.05 <= gate._charges["a"] < 1.12

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
        assert 0.05 <= gate._charges["a"] < 1

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


class TestWork:
    def _work(self, log, name, pieces=30, seconds=0.002):
        def run_piece(number):
            time.sleep(seconds)
            log.append(name)

        return work_in_python(run_piece, pieces)

    def test_a_long_evaluation_makes_way_for_a_modest_tenant(self):
        gate, log = FairGate(2), []
        with gate.turn("modest"):
            pass
        helpers = Helpers(1)

        def greedy():
            with gate.turn("greedy") as turn:
                turn.charge(5.0)
                helpers.run(self._work(log, "greedy", 200))

        thread = threading.Thread(target=greedy)
        thread.start()
        time.sleep(0.05)
        begin = len(log)
        with gate.turn("modest"):
            helpers.run(self._work(log, "modest"))
        during = log[begin:]
        thread.join()
        helpers.close()
        assert log.count("greedy") == 200, "all of its pieces were run in the end"
        assert during.count("modest") == 30
        assert during.count("greedy") <= 10

    def test_threads_come_back_between_two_pieces_when_they_are_interrupted(self):
        work = self._work([], "x", 10, seconds=0.0)
        assert take(work.pieces) == 0
        work.interrupt()
        assert take(work.pieces) == -1
        assert work.remaining == 9
        work.run_some()
        assert work.remaining == 0

    def test_evaluations_of_one_tenant_take_turns(self):
        gate, helpers, log, begun = FairGate(16), Helpers(1), [], threading.Event()

        def huge():
            def run_piece(number):
                begun.set()
                time.sleep(0.001)
                log.append("huge")

            with gate.turn("one"):
                helpers.run(work_in_python(run_piece, 2000))

        thread = threading.Thread(target=huge)
        thread.start()
        assert begun.wait(10)
        with gate.turn("one"):
            helpers.run(self._work(log, "small", 1, seconds=0.0))
        before = log.index("small")
        thread.join()
        helpers.close()
        assert log.count("huge") == 2000
        assert before < 200, "it did not wait for the end of the other"

    def test_what_is_ready_is_told_in_order(self):
        told, done = [], []
        work = work_in_python(done.append, 10)
        helpers = Helpers(0)
        helpers.run(work, lambda programs: told.append((programs, len(done))))
        assert told[-1] == (10, 10)
        work = work_in_python(done.append, 10)
        for piece in (1, 0, 3):
            finish(work.pieces, piece)
        told.clear()
        work.report(told.append)
        finish(work.pieces, 2)
        work.report(told.append)
        work.report(told.append)
        assert told == [2, 4]

    def test_what_is_cancelled_takes_no_more_pieces(self):
        done = []
        work = work_in_python(lambda number: done.append(number) or number < 3, 10)
        told = []
        Helpers(0).run(work, told.append)
        assert done == [0, 1, 2, 3]
        assert work.remaining == 0
        assert told == []

    def test_many_threads_take_each_piece_once(self):
        helpers, taken = Helpers(7), []
        for _ in range(20):
            helpers.run(work_in_python(taken.append, 500))
        helpers.close()
        assert sorted(taken) == sorted(list(range(500)) * 20)

    def test_no_more_threads_compute_than_there_are_cores(self):
        gate, helpers, lock = FairGate(16), Helpers(3), threading.Lock()
        computing, most, done = 0, 0, []

        def run_piece(number):
            nonlocal computing, most
            with lock:
                computing += 1
                most = max(most, computing)
            time.sleep(0.0003 * (number % 3))
            with lock:
                computing -= 1
                done.append(number)

        def caller(number):
            rng = np.random.default_rng(number)
            for pieces in rng.integers(1, 40, 12):
                with gate.turn(f"tenant {number % 3}"):
                    helpers.run(work_in_python(run_piece, int(pieces)))

        with ThreadPoolExecutor(24) as pool:
            for future in [pool.submit(caller, number) for number in range(24)]:
                future.result(timeout=60)
        helpers.close()
        expected = sum(np.random.default_rng(n).integers(1, 40, 12).sum() for n in range(24))
        assert len(done) == expected
        assert most == 4
        assert (helpers._free, helpers._leads, helpers._works) == (4, [], [])

    def test_a_core_goes_to_the_least_charged_tenant_that_waits_for_one(self):
        gate, helpers, order, may_end = FairGate(16), Helpers(0), [], threading.Event()

        def call(name, charge, wait=False):
            def run_piece(number):
                order.append(name)
                if wait:
                    may_end.wait(10)

            with gate.turn(name) as turn:
                turn.charge(charge)
                helpers.run(work_in_python(run_piece, 1))

        threads = [threading.Thread(target=call, args=("first", 9.0, True))]
        threads += [
            threading.Thread(target=call, args=(f"charged {n}", float(n))) for n in (3, 1, 2)
        ]
        for count, thread in enumerate(threads):
            thread.start()
            while len(order) + len(helpers._leads) <= count:
                time.sleep(0.001)
        may_end.set()
        for thread in threads:
            thread.join(10)
        assert order == ["first", "charged 1", "charged 2", "charged 3"]

    def test_alone_all_threads_work(self):
        helpers, seen = Helpers(3), []

        def run_piece(number):
            seen.append(threading.get_ident())
            time.sleep(0.002)

        helpers.run(work_in_python(run_piece, 40))
        assert len(seen) == 40
        assert len(set(seen)) == 4
        assert current_turn().goes_behind() is False
        helpers.close()

    def test_who_comes_last_does_not_wait_for_everybody_s_help(self):
        """Help goes to the least charged, not to who asked first."""
        gate, log, helpers = FairGate(12), [], Helpers(2)
        with gate.turn("modest"):
            pass

        def greedy():
            with gate.turn("greedy") as turn:
                turn.charge(1.0)
                helpers.run(self._work(log, "greedy", 100))

        threads = [threading.Thread(target=greedy) for _ in range(10)]
        for thread in threads:
            thread.start()
        time.sleep(0.05)
        begin = len(log)
        with gate.turn("modest"):
            helpers.run(self._work(log, "modest"))
        during = log[begin:]
        for thread in threads:
            thread.join()
        helpers.close()
        assert log.count("greedy") == 1000
        # What each of the twelve threads was at when the modest one came, and what began meanwhile.
        assert during.count("greedy") <= 30

    def test_helping_threads_have_the_priority_of_who_first_wants_them(self):
        """An engine lowers its own when it is there: doors go first."""
        helpers, seen = Helpers(2), set()

        def run_piece(number):
            seen.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            time.sleep(0.002)

        def lower_and_run():
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 7)
            helpers.run(work_in_python(run_piece, 40))

        thread = threading.Thread(target=lower_and_run)
        thread.start()
        thread.join()
        helpers.close()
        assert seen == {7}

    def test_what_a_helping_thread_raises_ends_the_work(self):
        helpers, caller = Helpers(2), threading.get_ident()

        def run_piece(number):
            time.sleep(0.001)
            if threading.get_ident() != caller:
                raise ValueError("not here")

        work = work_in_python(run_piece, 1000)
        with pytest.raises(ValueError, match="not here"):
            helpers.run(work)
        log = []
        helpers.run(self._work(log, "y"))
        assert len(log) == 30, "the threads go on"
        helpers.close()

    def test_held_up_work_gets_its_help_back(self):
        gate, helpers, seen = FairGate(4), Helpers(1), set()

        def run_piece(number):
            seen.add(threading.get_ident())
            time.sleep(0.002)

        begun, end = threading.Event(), threading.Event()

        def modest():
            with gate.turn("modest"):
                begun.set()
                end.wait(10)

        thread = threading.Thread(target=modest)
        thread.start()
        assert begun.wait(10)
        threading.Timer(0.1, end.set).start()
        with gate.turn("greedy") as turn:
            turn.charge(1.0)
            helpers.run(work_in_python(run_piece, 60))
        thread.join()
        helpers.close()
        assert len(seen) == 2
