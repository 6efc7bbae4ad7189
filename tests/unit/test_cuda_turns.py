"""Large work of Python takes turns on a device."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import pytest

pytest.importorskip("numba")

from warpfit.dataset import Dataset
from warpfit.errors import CancelledError
from warpfit.request import Precision
from warpfit_server.engine.cuda.turns import (
    COMPILED,
    DIFFERENTIATED,
    INTERPRETED,
    MATRICES,
    DeviceTurns,
)
from warpfit_server.fairness import FairGate

LARGE = 10**12
DATA = Dataset.of(np.ones((1, 1)))


@dataclass(frozen=True)
class Sized:
    """An evaluation of so many token-rows."""

    size: int
    precision = Precision.PRECISE

    def token_rows(self, layout):
        return self.size


class Callers:
    """Threads with evaluations of some tenants, each on the device until it is told to go."""

    def __init__(self, turns):
        self._turns = turns
        self.gate = FairGate(100)
        self.there = []
        self.behind, self.waited = {}, {}
        self.cancelled = []
        self._flags, self._leave, self._threads = {}, {}, []

    def come(self, name, tenant, token_rows=LARGE, cost=COMPILED):
        flag = self._flags[name] = np.zeros(1, np.uint8)
        leave = self._leave[name] = threading.Event()

        def work():
            try:
                with (
                    self.gate.turn(tenant),
                    self._turns.turn(Sized(token_rows), DATA.layout, cost, flag) as admitted,
                ):
                    self.there.append(name)
                    self.behind[name], self.waited[name] = admitted
                    leave.wait(10)
            except CancelledError:
                self.cancelled.append(name)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        self._threads.append(thread)
        time.sleep(0.05)

    def go(self, *names):
        for name in names:
            self._leave[name].set()
        time.sleep(0.05)

    def cancel(self, name):
        self._flags[name][0] = 1

    def end(self):
        self.go(*self._leave)
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()


@pytest.fixture
def callers():
    with ExitStack() as stack:
        group = Callers(DeviceTurns(132))
        stack.callback(group.end)
        yield group


def test_two_large_ones_at_a_time_and_small_ones_beside_them(callers):
    for name in ("one", "two", "three"):
        callers.come(name, "greedy")
    callers.come("small", "greedy", token_rows=10**8)
    assert callers.there == ["one", "two", "small"]
    callers.go("one")
    assert callers.there == ["one", "two", "small", "three"]
    assert callers.waited["small"] == 0
    assert callers.waited["one"] < 20e6
    assert 50e6 < callers.waited["three"] < 10e9


def test_large_work_of_who_is_ahead_goes_behind_that_of_others(callers):
    callers.gate.account({"greedy": 2.0, "modest": 0.1}, 1.0)
    callers.come("greedy", "greedy")
    callers.come("greedy, small", "greedy", token_rows=10**8)
    callers.come("modest", "modest")
    assert callers.behind == {"greedy": True, "greedy, small": False, "modest": False}


def test_a_tenant_is_charged_for_each_time_on_the_device(callers):
    callers.come("one", "greedy")
    callers.go("one")
    assert 0.05 < callers.gate.charged("greedy") < 1


def test_what_brings_matrices_along_takes_no_turn(callers):
    for name in ("one", "two", "three"):
        callers.come(name, "greedy", cost=MATRICES)
    assert callers.there == ["one", "two", "three"]


def test_a_tenant_with_nothing_there_need_not_wait(callers):
    for name in ("one", "two", "three"):
        callers.come(name, "greedy")
    callers.come("modest", "modest")
    assert callers.there == ["one", "two", "modest"]


def test_what_is_cancelled_while_it_waits_never_goes_there(callers):
    for name in ("one", "two", "three"):
        callers.come(name, "greedy")
    callers.cancel("three")
    callers.go("one")
    assert (callers.there, callers.cancelled) == (["one", "two"], ["three"])


@pytest.mark.parametrize(
    ("cost", "large"),
    [(COMPILED, 2_970_000_000), (INTERPRETED, 1_485_000_000), (DIFFERENTIATED, 495_000_000)],
)
def test_what_is_large_depends_on_the_cost(callers, cost, large):
    for name in ("one", "two"):
        callers.come(name, "greedy")
    callers.come("smaller", "greedy", large - 1, cost)
    callers.come("larger", "greedy", large, cost)
    assert callers.there == ["one", "two", "smaller"]
