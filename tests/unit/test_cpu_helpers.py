"""Threads of the CPU engine, and the board on which they find what to do."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from support.pieces import helpers_on, run, work_in_python
from warpfit_server.engine import cpu_board as board
from warpfit_server.engine import cpu_helpers
from warpfit_server.fairness import FairGate, current_turn


def waiting(helpers):
    """Evaluations on the board; none leaves before its last piece has been taken."""
    places = range(board.HEAD_WORDS, len(helpers._board), board.PLACE_WORDS)
    return [place for place in places if helpers._board[place + board.OPEN]]


def untaken(helpers):
    """How many pieces nobody has taken yet."""
    words = helpers._board
    left = [words[place + board.PIECES] - words[place + board.NEXT] for place in waiting(helpers)]
    return int(sum(np.maximum(left, 0)))


def resting(cores):
    """Threads that sleep, so that who comes first finds nobody at work."""
    helpers = helpers_on(cores)
    run(helpers, work_in_python(lambda number: time.sleep(0.001), 2 * cores))
    while helpers._board[board._ASLEEP] < cores or not all(map(sleeps, helpers._threads)):
        time.sleep(0.001)
    return helpers


def sleeps(thread):
    """Whether the system says so: one about to sleep may have to wait for a core before."""
    _, _, status = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")
    return status.split()[0] == "S"


def slow_work(log, name, pieces=30, seconds=0.002):
    def run_piece(number):
        time.sleep(seconds)
        log.append(name)

    return work_in_python(run_piece, pieces)


def test_a_long_evaluation_makes_way_for_a_modest_tenant():
    gate, log = FairGate(2), []
    with gate.turn("modest"):
        pass
    helpers = helpers_on(2)

    def greedy():
        with gate.turn("greedy") as turn:
            turn.charge(5.0)
            run(helpers, slow_work(log, "greedy", 200))

    thread = threading.Thread(target=greedy)
    thread.start()
    time.sleep(0.05)
    begin = len(log)
    with gate.turn("modest"):
        run(helpers, slow_work(log, "modest"))
    during = log[begin:]
    thread.join()
    helpers.close()
    assert log.count("greedy") == 200, "all of its pieces were run in the end"
    assert during.count("modest") == 30
    assert during.count("greedy") <= 10


def test_evaluations_of_one_tenant_take_turns():
    gate, helpers, log, begun = FairGate(16), helpers_on(2), [], threading.Event()

    def huge():
        def run_piece(number):
            begun.set()
            time.sleep(0.001)
            log.append("huge")

        with gate.turn("one"):
            run(helpers, work_in_python(run_piece, 2000))

    thread = threading.Thread(target=huge)
    thread.start()
    assert begun.wait(10)
    with gate.turn("one"):
        run(helpers, slow_work(log, "small", 1, seconds=0.0))
    before = log.index("small")
    thread.join()
    helpers.close()
    assert log.count("huge") == 2000
    assert before < 200, "it did not wait for the end of the other"


def test_evaluations_of_one_tenant_share_the_threads():
    gate, helpers, begun, lock = FairGate(16), helpers_on(4), threading.Event(), threading.Lock()
    running, beside = 0, []

    def huge(number):
        begun.set()
        time.sleep(0.002)

    def later(number):
        nonlocal running
        with lock:
            running += 1
            beside.append(running)
        time.sleep(0.002)
        with lock:
            running -= 1

    def lead():
        with gate.turn("one"):
            run(helpers, work_in_python(huge, 2000))

    thread = threading.Thread(target=lead)
    thread.start()
    assert begun.wait(10)
    with gate.turn("one"):
        run(helpers, work_in_python(later, 100))
    assert untaken(helpers) > 0, "the other one takes longer"
    thread.join()
    helpers.close()
    assert len(beside) == 100
    assert 1.4 < np.mean(beside) < 2.6, "each has half of the four"


def test_what_is_ready_is_told_in_order():
    told, done = [], []
    work = work_in_python(done.append, 10)
    helpers = helpers_on(1)
    run(helpers, work, lambda programs: told.append((programs, len(done))))
    helpers.close()
    assert told[-1] == (10, 10)
    work = work_in_python(done.append, 10)
    work.done[[1, 0, 3]] = 1
    told.clear()
    work.report(told.append)
    work.done[2] = 1
    work.report(told.append)
    work.report(told.append)
    assert told == [2, 4]


def test_who_tells_what_is_ready_keeps_its_core():
    helpers, seen, told = resting(1), set(), []

    def run_piece(number):
        seen.add(threading.get_ident())
        time.sleep(0.001)

    run(helpers, work_in_python(run_piece, 30), told.append)
    helpers.close()
    assert seen == {threading.get_ident()}
    assert len(told) > 3


def test_what_is_cancelled_takes_no_more_pieces():
    done = []
    work = work_in_python(lambda number: done.append(number) or number < 3, 10)
    told, helpers = [], helpers_on(1)
    run(helpers, work, told.append)
    helpers.close()
    assert done == [0, 1, 2, 3]
    assert told == []


def test_many_threads_take_each_piece_once():
    helpers, taken = helpers_on(8), []
    for _ in range(20):
        run(helpers, work_in_python(taken.append, 500))
    helpers.close()
    assert sorted(taken) == sorted(list(range(500)) * 20)


def test_no_more_threads_compute_than_there_are_cores():
    """But for one that was alone when others came: it ends its piece."""
    gate, helpers, lock = FairGate(16), helpers_on(4), threading.Lock()
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
                run(helpers, work_in_python(run_piece, int(pieces)))

    with ThreadPoolExecutor(24) as pool:
        for future in [pool.submit(caller, number) for number in range(24)]:
            future.result(timeout=60)
    helpers.close()
    expected = sum(np.random.default_rng(n).integers(1, 40, 12).sum() for n in range(24))
    assert len(done) == expected
    assert most in (4, 5)
    assert len(helpers._places) == cpu_helpers._PLACES
    assert not waiting(helpers)


def test_a_core_goes_to_the_least_charged_tenant_that_waits_for_one():
    gate, helpers, order, may_end = FairGate(16), resting(1), [], threading.Event()

    def call(name, charge):
        def run_piece(number):
            order.append(name)
            if name in ("leads", "first"):
                may_end.wait(10)

        with gate.turn(name) as turn:
            turn.charge(charge)
            run(helpers, work_in_python(run_piece, 1))

    charges = {"leads": 9.0, "first": 9.0, "charged 3": 3.0, "charged 1": 1.0, "charged 2": 2.0}
    threads = [threading.Thread(target=call, args=entry) for entry in charges.items()]
    for count, thread in enumerate(threads):
        thread.start()
        while len(order) < min(2, count + 1) or untaken(helpers) < count - 1:
            time.sleep(0.001)
    may_end.set()
    for thread in threads:
        thread.join(10)
    helpers.close()
    assert order == ["leads", "first", "charged 1", "charged 2", "charged 3"]


def test_alone_all_threads_work():
    helpers, seen = helpers_on(4), []

    def run_piece(number):
        seen.append(threading.get_ident())
        time.sleep(0.002)

    run(helpers, work_in_python(run_piece, 40))
    assert len(seen) == 40
    assert len(set(seen)) == 4
    assert current_turn().goes_behind() is False
    helpers.close()


def test_who_comes_last_does_not_wait_for_everybody_s_help():
    """Help goes to the least charged, not to who asked first."""
    gate, log, helpers = FairGate(12), [], helpers_on(3)
    with gate.turn("modest"):
        pass

    def greedy():
        with gate.turn("greedy") as turn:
            turn.charge(1.0)
            run(helpers, slow_work(log, "greedy", 100))

    threads = [threading.Thread(target=greedy) for _ in range(10)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    begin = len(log)
    with gate.turn("modest"):
        run(helpers, slow_work(log, "modest"))
    during = log[begin:]
    for thread in threads:
        thread.join()
    helpers.close()
    assert log.count("greedy") == 1000
    # What each of the twelve threads was at when the modest one came, and what began meanwhile.
    assert during.count("greedy") <= 30


def test_threads_that_compute_go_behind_those_that_answer():
    helpers, seen = resting(3), {}

    def run_piece(number):
        priority = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        seen[threading.get_ident()] = priority
        time.sleep(0.002)

    before = os.getpriority(os.PRIO_PROCESS, 0)
    run(helpers, work_in_python(run_piece, 40))
    helpers.close()
    assert seen.pop(threading.get_ident()) == before, "who is alone begins at once"
    assert len(seen) == 2
    assert min(seen.values()) >= min(before + 5, 19)
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_who_is_alone_makes_way_for_what_comes():
    """It would take a core from threads that go behind it."""
    helpers, begun, leads = resting(2), threading.Event(), []

    def slow(number):
        leads.append(threading.current_thread() is thread)
        begun.set()
        time.sleep(0.002)

    thread = threading.Thread(target=run, args=(helpers, work_in_python(slow, 200)))
    thread.start()
    assert begun.wait(10)
    time.sleep(0.02)
    assert any(leads)
    before = len(leads)
    run(helpers, work_in_python(lambda number: time.sleep(0.01), 2))
    thread.join()
    helpers.close()
    assert sum(leads[before:]) <= 1, "the piece that it was at"
    assert len(leads) == 200


def test_a_piece_that_finds_no_memory_ends_the_work():
    helpers, caller = helpers_on(3), threading.get_ident()

    def run_piece(number):
        time.sleep(0.001)
        if threading.get_ident() != caller:
            raise MemoryError

    work = work_in_python(run_piece, 1000)
    with pytest.raises(MemoryError):
        run(helpers, work)
    assert not work.done.all()
    log = []
    run(helpers, slow_work(log, "y"))
    assert len(log) == 30, "the threads go on"
    helpers.close()


def test_what_is_cancelled_waits_for_no_core():
    helpers, begun, may_end = resting(1), threading.Semaphore(0), threading.Event()

    def hold(number):
        begun.release()
        may_end.wait(10)

    threads = [
        threading.Thread(target=run, args=(helpers, work_in_python(hold, 1))) for _ in range(2)
    ]
    for thread in threads:  # the first is alone, the other one has the core
        thread.start()
        assert begun.acquire(timeout=10)
    done = []
    work = work_in_python(done.append, 5)
    threading.Timer(0.05, work.cancelled.fill, (1,)).start()
    run(helpers, work)
    assert all(thread.is_alive() for thread in threads)
    may_end.set()
    for thread in threads:
        thread.join()
    helpers.close()
    assert done == []


def test_more_evaluations_than_places_are_done(monkeypatch):
    monkeypatch.setattr(cpu_helpers, "_PLACES", 2)
    helpers, done = helpers_on(2), []

    def run_piece(number):
        time.sleep(0.001)
        done.append(number)

    with ThreadPoolExecutor(12) as pool:
        works = [work_in_python(run_piece, 10) for _ in range(48)]
        for future in [pool.submit(run, helpers, work) for work in works]:
            future.result(timeout=60)
    helpers.close()
    assert sorted(done) == sorted(list(range(10)) * 48)


def test_threads_charge_the_tenant_they_work_for():
    gate, helpers = FairGate(4), helpers_on(3)
    with gate.turn("one"):
        run(helpers, slow_work([], "x", 30, seconds=0.005))
        at_work = gate.charged("one")
    helpers.close()
    assert 0.15 <= at_work < 1.5
    assert gate.charged("one") < at_work + 0.1, "and nobody charges it twice"


def test_held_up_work_gets_its_help_back():
    gate, helpers, seen = FairGate(4), helpers_on(2), set()

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
        run(helpers, work_in_python(run_piece, 60))
    thread.join()
    helpers.close()
    assert len(seen) == 2
