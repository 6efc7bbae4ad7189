"""The fair queue, simulated: drawn arrivals of many tenants on an engine of several threads."""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from dataclasses import dataclass, field

import pytest

from warpfit_server.engine.scheduler import Scheduler, Task

STEP = 0.004


@dataclass(eq=False)
class Call:
    tenant: str
    arrived: float
    work: float
    """Seconds of the engine."""
    began: float = -1.0
    ended: float = -1.0


@dataclass
class Simulation:
    """An engine that runs the scheduler's steps on some threads, with a clock of its own."""

    threads: int = 2
    merged_size: int = 100
    scheduler: Scheduler[Call] = field(init=False)
    now: float = 0.0
    idle_with_work: float = 0.0
    used: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    steps: int = 0

    def __post_init__(self):
        self.scheduler = Scheduler(self.merged_size)

    def run(self, calls, until, keys=None):
        """Run calls that arrive in time; return those that have ended by ``until``."""
        waiting = sorted(calls, key=lambda call: call.arrived)
        running = []
        number = 0
        while self.now < until:
            while waiting and waiting[0].arrived <= self.now:
                call = waiting.pop(0)
                key, size = keys(call) if keys else (None, 0)
                self.scheduler.add(Task(call, call.tenant, key, size))
            while len(running) < self.threads and (tasks := self.scheduler.next()):
                length = min(STEP, sum(t.item.work - t.used for t in tasks))
                for task in tasks:
                    task.item.began = self.now if task.item.began < 0 else task.item.began
                number += 1
                heapq.heappush(running, (self.now + length, number, length, tasks))
                self.steps += 1
            assert len(running) == self.threads or not len(self.scheduler), "work waits beside idle"
            nexts = [running[0][0]] if running else []
            nexts += [waiting[0].arrived] if waiting else []
            if not nexts:
                break
            self.now = min(nexts)
            while running and running[0][0] <= self.now:
                _, _, length, tasks = heapq.heappop(running)
                self.scheduler.ran(tasks, length)
                for task in tasks:
                    self.used[task.tenant] += length / len(tasks)
                    if len(tasks) == 1 and task.used < task.item.work - 1e-12:
                        self.scheduler.add(task)
                    else:
                        task.item.ended = self.now
        return [call for call in calls if call.ended >= 0]


@pytest.mark.parametrize("seed", range(8))
def test_backlogged_tenants_get_equal_shares(seed):
    rng = random.Random(seed)
    calls = []
    for name in ("few large", "many small", "mixed"):
        total = 0.0
        while total < 4.0:
            work = {"few large": 0.5, "many small": 0.001}.get(name) or rng.choice((0.002, 0.2))
            calls.append(Call(name, rng.uniform(0, 0.01), work))
            total += work
    simulation = Simulation()
    simulation.run(calls, until=2.0)
    shares = [simulation.used[name] / sum(simulation.used.values()) for name in simulation.used]
    assert len(shares) == 3
    assert max(shares) - min(shares) < 0.05


@pytest.mark.parametrize("seed", range(8))
def test_a_modest_tenant_waits_for_little_beside_greedy_ones(seed):
    """At most for the steps that are running, whatever the others have queued."""
    rng = random.Random(seed)
    greedy = [
        Call(f"greedy {number % 5}", rng.uniform(0, 1), rng.choice((0.001, 0.05, 5.0)))
        for number in range(500)
    ]
    modest = [Call("modest", 0.02 * number, 0.002) for number in range(150)]
    Simulation().run([*greedy, *modest], until=3.0)
    waits = [call.began - call.arrived for call in modest if call.began >= 0]
    assert len(waits) > 140
    assert max(waits) <= 2 * STEP


@pytest.mark.parametrize("seed", range(8))
def test_nothing_starves(seed):
    """A fit ends beside a flood of small calls of its own tenant, and small calls beside fits."""
    rng = random.Random(seed)
    fits = [Call("one", 0.0, 0.3) for _ in range(4)]
    flood = [Call("one", rng.uniform(0, 8), 0.002) for _ in range(8_000)]  # as much as there is
    simulation = Simulation(threads=2)
    simulation.run([*fits, *flood], until=8.0)
    assert all(0 < call.ended < 8.0 for call in fits)
    small = [call.ended - call.arrived for call in flood if call.ended >= 0]
    assert len(small) > 6_000
    long_wait = sorted(small)[len(small) // 2]
    assert long_wait < 3.0


def test_small_calls_do_not_wait_for_long_ones_of_their_tenant():
    long = [Call("one", 0.0, 10.0) for _ in range(20)]
    small = [Call("one", 0.5 + 0.05 * number, 0.002) for number in range(40)]
    Simulation().run([*long, *small], until=3.0)
    assert all(call.ended >= 0 for call in small)
    assert max(call.ended - call.arrived for call in small) <= 2 * STEP + 0.002 + 1e-9


def test_equal_calls_of_a_tenant_end_one_after_the_other():
    """To take turns among them would only make all of them late."""
    calls = [Call("one", 0.0, 0.008) for _ in range(10)]
    Simulation(threads=1).run(calls, until=1.0)
    ended = sorted(call.ended for call in calls)
    assert ended == pytest.approx([0.008 * (number + 1) for number in range(10)])


def test_a_tenant_that_was_away_goes_first_for_a_bounded_time():
    busy = [Call("busy", 0.0, 0.004) for _ in range(2_000)]
    back = [Call("back", 0.0, 0.004), *[Call("back", 4.0, 0.004) for _ in range(500)]]
    Simulation(threads=1).run([*busy, *back], until=4.5)
    first = [call for call in busy if 4.0 <= call.began < 4.1]
    assert first, "after its credit is used up the others have their share again"


def test_what_waits_is_merged_and_shared_out():
    simulation = Simulation(threads=1, merged_size=100)
    calls = [Call(tenant, 0.0, 0.001) for tenant in "abcd" for _ in range(25)]
    ended = simulation.run(calls, until=1.0, keys=lambda call: ("same", 10))
    assert len(ended) == 100
    assert simulation.steps == 10, "ten of them fill a step"
    assert max(simulation.used.values()) == pytest.approx(min(simulation.used.values()))


def test_only_equal_keys_are_merged_up_to_the_size_of_a_step():
    scheduler = Scheduler(merged_size=100)
    tasks = [
        Task("first", "a", "key", 60), Task("other", "a", "other key", 10),
        Task("too large", "a", "key", 50), Task("fits", "b", "key", 40), Task("alone", "b"),
    ]  # fmt: skip
    for task in tasks:
        scheduler.add(task)
    found = [task.item for task in scheduler.next()]
    assert found == ["first", "fits"]
    rest = []
    while step := scheduler.next():
        rest.append([task.item for task in step])
    assert sorted(rest) == [["alone"], ["other"], ["too large"]]
    assert len(scheduler) == 0


def test_tasks_that_have_begun_are_not_merged():
    scheduler = Scheduler(merged_size=100)
    first, second = Task("first", "a", "key", 10), Task("second", "a", "key", 10)
    scheduler.add(first)
    assert scheduler.next() == [first]
    scheduler.ran([first], 0.001)
    scheduler.add(second)
    scheduler.add(first)
    assert [task.item for task in scheduler.next()] == ["first"]
    scheduler.ran([first], 0.001)
    scheduler.add(first)
    third = Task("third", "b", "key", 10)
    scheduler.add(third)
    assert [task.item for task in scheduler.next()] == ["third", "second"]


def test_very_many_tenants_are_forgotten_when_they_are_idle():
    scheduler = Scheduler(merged_size=1)
    for number in range(5_000):
        task = Task(number, f"tenant {number}")
        scheduler.add(task)
        assert scheduler.next() == [task]
        scheduler.ran([task], 0.001)
    assert len(scheduler._tenants) <= 1_000


class _Unfair(Scheduler):
    """A planted mistake: the newest tenant goes first."""

    def next(self):
        if not self._waiting:
            return []
        tenant = [t for t in self._tenants.values() if t.is_waiting][-1]
        return [self._take(tenant, tenant.pop())]


def test_the_simulation_finds_a_planted_mistake():
    simulation = Simulation()
    simulation.scheduler = _Unfair(100)
    calls = [Call(name, 0.0, 0.5) for name in ("a", "b") for _ in range(8)]
    simulation.run(calls, until=2.0)
    assert simulation.used["a"] < 0.1 * simulation.used["b"]
