"""Those who wait for a turn, a place or a lane, with threads in thousands of orders."""

from __future__ import annotations

import random
import socket
from collections import Counter, deque
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from warpfit_server.fairness import FairGate
from warpfit_server.lanes import Lane, Lanes, Use

from support.schedules import Primitives, Schedule
from warpfit.errors import CancelledError, UnavailableError
from warpfit_server import fairness, lanes, turnstile
from warpfit_server.turnstile import Turnstile

TENANTS = ("greedy", "greedy", "modest", "third")


class Run:
    """Threads that run in one order, and what they draw lots with."""

    def __init__(self, monkeypatch, module, seed, steps=400):
        self.random = random.Random(seed)
        self.schedule = Schedule(seed, changes=4, steps=steps)
        self.primitives = Primitives(self.schedule, seed)
        self.ticks = 0
        monkeypatch.setattr(module, "threading", self.primitives)
        if hasattr(module, "time"):
            clock = dict.fromkeys(("monotonic", "perf_counter", "thread_time"), self.now)
            monkeypatch.setattr(module, "time", SimpleNamespace(**clock))

    def now(self):
        self.ticks += 1
        return 0.001 * self.ticks

    @property
    def is_between(self):
        """Whether no thread is about to change what locks guard."""
        return not any(lock.held for lock in self.primitives.locks)


# ------------------------------------------------------------------------------ the engine's gate


def gate_run(monkeypatch, seed, gate_class=FairGate):
    run = Run(monkeypatch, fairness, seed)
    gate = gate_class(run.random.choice([1, 2, 4]))
    at_work, ended = Counter(), Counter()

    def check():
        if run.is_between:
            able = [tenant for tenant in gate._waiting if gate._may_run(tenant)]
            assert not able, "somebody waits beside a free place"
        assert len(+at_work) <= gate._places + fairness._EXTRA

    def visitor(number):
        rng = random.Random(1000 * seed + number)
        flag = np.zeros(1, np.uint8)

        def visit():
            for _ in range(3):
                tenant, places = rng.choice(TENANTS), rng.choice([1, 1, 2])
                flag[0] = rng.random() < 0.5
                try:
                    with gate.turn(tenant, places, flag) as turn:
                        at_work[tenant] += 1
                        check()
                        run.schedule.step()
                        turn.charge(rng.choice([0.0, 0.01, 1.0]))
                        at_work[tenant] -= 1
                    ended["done"] += 1
                except CancelledError:
                    ended["cancelled"] += 1
                check()

        return visit

    run.schedule.run(*(visitor(number) for number in range(5)))
    assert ended.total() == 15
    assert (gate._taken, +gate._running, gate._waiting) == (0, Counter(), {})
    return ended


def test_the_gate_leaves_nobody_waiting_beside_a_free_place(monkeypatch):
    ended = Counter()
    for seed in range(1500):
        ended += gate_run(monkeypatch, seed)
    assert ended["cancelled"] > 100, "or nobody who waited was cancelled"


class _ForgetsWhoWaits(FairGate):
    def leave(self, tenant, seconds, places):
        if len(self._waiting) < 2:
            super().leave(tenant, seconds, places)
            return
        waiting, self._waiting = self._waiting, {}
        super().leave(tenant, seconds, places)
        self._waiting = waiting


class _LooksBeforeItLocks(FairGate):
    def _enter(self, tenant, places):
        if self._may_run(tenant) or self._waiting:
            return super()._enter(tenant, places)
        ticket = fairness.threading.Event()
        with self._lock:
            self._welcome(tenant)
            self._waiting.setdefault(tenant, deque()).append((ticket, places))
        return ticket


class _WithdrawsWithAPlace(FairGate):
    def _withdraw(self, tenant, ticket):
        super()._withdraw(tenant, ticket)
        return True


@pytest.mark.parametrize("gate", [_ForgetsWhoWaits, _LooksBeforeItLocks, _WithdrawsWithAPlace])
def test_a_planted_mistake_of_the_gate_is_found(monkeypatch, gate):
    with pytest.raises(AssertionError):
        for seed in range(1500):
            gate_run(monkeypatch, seed, gate)


# ------------------------------------------------------------------------------ a door's turnstile


def turnstile_run(monkeypatch, seed, turnstile_class=Turnstile):
    run = Run(monkeypatch, turnstile, seed, steps=150)
    stile, inside, most = turnstile_class(), Counter(), Counter()

    def caller(number):
        tenant = TENANTS[number % len(TENANTS)]

        def call():
            for _ in range(3):
                stile.enter(tenant)
                inside[tenant] += 1
                most[tenant] = max(most[tenant], inside[tenant])
                run.schedule.step()
                inside[tenant] -= 1
                stile.leave(tenant)

        return call

    run.schedule.run(*(caller(number) for number in range(7)))
    assert (stile._inside, stile._waiting) == (Counter(), {})
    assert max(most.values()) <= turnstile._TOGETHER
    return most


def test_the_turnstile_lets_all_in_and_never_too_many(monkeypatch):
    most = Counter()
    for seed in range(700):
        most |= turnstile_run(monkeypatch, seed)
    assert most["greedy"] == turnstile._TOGETHER


class _LetsNobodyFollow(Turnstile):
    def leave(self, tenant):
        if len(self._waiting.get(tenant, ())) == 1:
            del self._waiting[tenant]
        super().leave(tenant)


def test_a_planted_mistake_of_the_turnstile_is_found(monkeypatch):
    with pytest.raises(AssertionError):
        for seed in range(700):
            turnstile_run(monkeypatch, seed, _LetsNobodyFollow)


# ------------------------------------------------------------------------------ lanes


def lanes_run(monkeypatch, seed, lanes_class=Lanes):
    """Calls take lanes while the engine ends and starts."""
    run = Run(monkeypatch, lanes, seed, steps=300)
    # A dataclass has taken the events of the module as it was.
    monkeypatch.setattr(lanes, "_Waiter", _waiter_of(run.primitives))
    count, ends = run.random.choice([1, 2, 4]), []
    table = lanes_class(SimpleNamespace(release=lambda segment: None))
    held, fits, ended = Counter(), Counter(), Counter()
    hand_out = table._hand_out

    def open_lanes():
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(count)]
        ends.extend(theirs for _, theirs in pairs)
        table.open([ours for ours, _ in pairs])

    def hand_out_checked(use):
        lane = hand_out(use)
        others = sum(fits[lane.generation, tenant] for tenant in set(TENANTS))
        if use.fit and fits[lane.generation, use.tenant]:
            assert others < count - lanes._FOR_EVALUATIONS, "a fit too many"
        fits[lane.generation, use.tenant] += use.fit
        return lane

    def check():
        if run.is_between and table._open:
            able = [waiter for waiter in table._waiters if table._may_have(waiter.use)]
            assert not able, "somebody waits beside a lane"

    def caller(number):
        rng = random.Random(1000 * seed + number)

        def call():
            for _ in range(3):
                tenant = rng.choice(TENANTS)
                looks = iter([True] * rng.choice([0, 0, 50]))
                try:
                    use = Use(tenant, fit=rng.random() < 0.4)
                    lane = table._take(partial(next, looks, False), use)
                except (CancelledError, UnavailableError) as error:
                    ended[type(error).__name__] += 1
                    run.schedule.step()
                    continue
                assert isinstance(lane, Lane)
                held[lane] += 1
                assert held[lane] == 1, "two calls have one lane"
                for _ in range(20):
                    run.schedule.step()
                held[lane] -= 1
                fits[lane.generation, tenant] -= use.fit
                table.put_back(lane)
                check()
                ended["done"] += 1

        return call

    def engine():
        for _ in range(2):
            run.schedule.step()
            table.shut()
            run.schedule.step()
            open_lanes()

    table._hand_out = hand_out_checked
    open_lanes()
    run.schedule.run(*(caller(number) for number in range(4)), engine)
    assert ended.total() == 12
    assert not table._waiters
    assert len(table._idle) == count
    assert (+table._used, +table._fits) == (Counter(), Counter())
    table.shut()
    for end in ends:
        end.close()
    return ended


def _waiter_of(primitives):
    class Waiter:
        def __init__(self, use):
            self.use, self.lane, self.served = use, None, primitives.Event()

    return Waiter


def test_lanes_go_to_one_call_each_and_nobody_waits_for_an_engine_that_is_gone(monkeypatch):
    ended = Counter()
    for seed in range(1000):
        ended += lanes_run(monkeypatch, seed)
    assert min(ended.values()) > 50
    assert set(ended) == {"done", "CancelledError", "UnavailableError"}


class _ForgetsToServe(Lanes):
    def put_back(self, lane):
        with self._changed:
            if self._open and lane.generation == self._generation:
                self._used[lane.use.tenant] -= 1
                self._idle.append(lane)
                return
        self._drop(lane)


class _GivesFitsAllLanes(Lanes):
    def _may_have(self, use):
        return super()._may_have(use._replace(fit=False))


class _CountsNoFits(Lanes):
    def put_back(self, lane):
        lane.use = lane.use._replace(fit=False)
        super().put_back(lane)


class _KeepsOldLanes(Lanes):
    def put_back(self, lane):
        lane.generation = self._generation
        super().put_back(lane)


@pytest.mark.parametrize(
    "mistaken", [_ForgetsToServe, _GivesFitsAllLanes, _CountsNoFits, _KeepsOldLanes]
)
def test_a_planted_mistake_of_the_lanes_is_found(monkeypatch, mistaken):
    with pytest.raises(AssertionError):
        for seed in range(1000):
            lanes_run(monkeypatch, seed, mistaken)
