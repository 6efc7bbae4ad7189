"""The fair queue, simulated with arrivals of many tenants, and suspects, which run alone."""

import heapq
import random
from collections import defaultdict
from dataclasses import dataclass

import pytest

from warpfit_server.engine import scheduler as module
from warpfit_server.engine.scheduler import ScheduledRequest, Scheduler
from warpfit_server.ipc.segments import ALONE, BEGUN, PROVEN, QUEUED
from warpfit_server.tenants import PROBE

STEP = 0.004


@dataclass(eq=False)
class Call(ScheduledRequest):
    arrived: float = 0.0
    work: float = 0.0
    began: float = -1.0
    ended: float = -1.0


def call(tenant, arrived, work):
    return Call(tenant, arrived=arrived, work=work)


class Simulation:
    """An engine that runs the scheduler's steps on some threads, with a clock of its own."""

    def __init__(self, threads=2):
        self.threads, self.scheduler = threads, Scheduler(100)
        self.used, self.steps, self.now = defaultdict(float), 0, 0.0

    def run(self, calls, until):
        waiting = sorted(calls, key=lambda c: c.arrived)
        running = []
        while self.now < until:
            while waiting and waiting[0].arrived <= self.now:
                self.scheduler.add(waiting.pop(0))
            while len(running) < self.threads and (step := self.scheduler.next()):
                length = min(STEP, sum(c.work - c.used for c in step))
                for one in step:
                    one.began = self.now if one.began < 0 else one.began
                self.steps += 1
                heapq.heappush(running, (self.now + length, self.steps, length, step))
            assert len(running) == self.threads or not len(self.scheduler), "work waits beside idle"
            nexts = [running[0][0]] if running else []
            nexts += [waiting[0].arrived] if waiting else []
            if not nexts:
                return
            self.now = min(nexts)
            while running and running[0][0] <= self.now:
                _, _, length, step = heapq.heappop(running)
                self.scheduler.ran(step, length)
                for one in step:
                    self.used[one.tenant] += length / len(step)
                    if len(step) == 1 and one.used < one.work - 1e-12:
                        self.scheduler.add(one)
                    else:
                        one.ended = self.now


@pytest.mark.parametrize("seed", range(3))
def test_backlogged_tenants_get_equal_shares(seed):
    rng = random.Random(seed)
    calls = []
    for name in ("few large", "many small", "mixed"):
        total = 0.0
        while total < 4.0:
            work = {"few large": 0.5, "many small": 0.001}.get(name) or rng.choice((0.002, 0.2))
            calls.append(call(name, rng.uniform(0, 0.01), work))
            total += work
    simulation = Simulation()
    simulation.run(calls, until=2.0)
    shares = [used / sum(simulation.used.values()) for used in simulation.used.values()]
    assert len(shares) == 3
    assert max(shares) - min(shares) < 0.05


@pytest.mark.parametrize("seed", range(3))
def test_a_modest_tenant_waits_for_running_steps_only_beside_greedy_ones(seed):
    rng = random.Random(seed)
    greedy = [
        call(f"greedy {number % 5}", rng.uniform(0, 1), rng.choice((0.001, 0.05, 5.0)))
        for number in range(500)
    ]
    modest = [call("modest", 0.02 * number, 0.002) for number in range(150)]
    Simulation().run([*greedy, *modest], until=3.0)
    waits = [one.began - one.arrived for one in modest if one.began >= 0]
    assert len(waits) > 140
    assert max(waits) <= 2 * STEP


@pytest.mark.parametrize("seed", range(3))
def test_neither_fits_nor_small_calls_of_a_tenant_starve(seed):
    rng = random.Random(seed)
    fits = [call("one", 0.0, 0.3) for _ in range(4)]
    flood = [call("one", rng.uniform(0, 8), 0.002) for _ in range(8_000)]  # all that two threads do
    Simulation(threads=2).run([*fits, *flood], until=8.0)
    assert all(0 < fit.ended < 8.0 for fit in fits)
    small = sorted(one.ended - one.arrived for one in flood if one.ended >= 0)
    assert len(small) > 6_000
    assert small[len(small) // 2] < 3.0


def test_small_calls_do_not_wait_for_long_ones_of_their_tenant():
    long = [call("one", 0.0, 10.0) for _ in range(20)]
    small = [call("one", 0.5 + 0.05 * number, 0.002) for number in range(40)]
    Simulation().run([*long, *small], until=3.0)
    assert all(one.ended >= 0 for one in small)
    assert max(one.ended - one.arrived for one in small) <= 2 * STEP + 0.002 + 1e-9


def test_steps_that_share_cores_run_one_at_a_time_while_several_tenants_are_active():
    scheduler = Scheduler(merged_size=1, shares_cores=True)
    greedy, modest = [call("greedy", 0.0, 1.0) for _ in range(20)], call("modest", 0.0, 1.0)
    for one in greedy:
        scheduler.add(one)
    first, second = scheduler.next(), scheduler.next()  # steps of one tenant run together
    assert (first, second) == ([greedy[0]], [greedy[1]])
    scheduler.add(modest)
    scheduler.ran(first, 0.1)
    assert scheduler.next() == []
    scheduler.ran(second, 0.1)
    assert [scheduler.next(), scheduler.next()] == [[modest], []]
    scheduler.ran([modest], 0.004)
    both = [scheduler.next(), scheduler.next()]
    assert both == [[greedy[2]], []], "the modest tenant was active a moment ago"
    scheduler.ran([greedy[2]], 2.0)
    three = [scheduler.next() for _ in range(3)]
    assert three == [[one] for one in greedy[3:6]], "the modest tenant has not come back for long"


def test_a_step_that_is_overdue_runs_beside_one_of_another_tenant():
    now = [0.0]
    scheduler = Scheduler(100, shares_cores=True, clock=lambda: now[0])
    long = [call("greedy", 0.0, 1.0) for _ in range(2)]
    for one in long:
        scheduler.add(one)
    assert scheduler.next() == long[:1]
    small = call("modest", 0.0, 0.001)
    scheduler.add(small)
    assert scheduler.next() == []
    assert scheduler.timeout is not None, "somebody looks again"
    now[0] += 2 * scheduler.timeout
    both = [scheduler.next(), scheduler.next()]
    assert both == [[small], []], "not the other one of the greedy tenant"
    scheduler.ran([small], 0.001)
    scheduler.ended([small], [])
    assert scheduler.next() == []
    scheduler.ran(long[:1], 1.0)
    scheduler.ended(long[:1], [])
    assert scheduler.next() == long[1:]


def test_a_health_probe_is_no_second_tenant():
    scheduler = Scheduler(merged_size=1, shares_cores=True)
    probe, calls = call(PROBE, 0.0, 1.0), [call("lone", 0.0, 1.0) for _ in range(2)]
    scheduler.add(probe)
    scheduler.ran(scheduler.next(), 0.001)
    for one in calls:
        scheduler.add(one)
    assert [scheduler.next(), scheduler.next()] == [[one] for one in calls]


def test_only_equal_keys_are_merged_up_to_the_size_of_a_step():
    scheduler = Scheduler(merged_size=100)
    sizes = (("a", "x", 60), ("a", "other", 10), ("a", "x", 50), ("b", "x", 40))
    first, other, too_large, fits = (ScheduledRequest(*each) for each in sizes)
    alone = ScheduledRequest("b")
    for request in (first, other, too_large, fits, alone):
        scheduler.add(request)
    assert scheduler.next() == [first, fits]
    assert {scheduler.next()[0] for _ in range(3)} == {other, too_large, alone}
    assert len(scheduler) == 0


def test_requests_that_have_begun_are_not_merged():
    scheduler = Scheduler(merged_size=100)
    first, second, third = (ScheduledRequest(tenant, "key", 10) for tenant in "aab")
    for later in (second, third):
        scheduler.add(first)
        assert scheduler.next() == [first]
        scheduler.ran([first], 0.001)
        scheduler.add(later)
    scheduler.add(first)
    assert scheduler.next() == [third, second]


def test_a_request_runs_alone_while_too_few_wait_to_be_merged_with_it():
    scheduler = Scheduler(merged_size=100)
    requests = [ScheduledRequest("ab"[n % 2], "x", 10, merge_from=3) for n in range(5)]
    for request in requests[:2]:
        scheduler.add(request)
    for request in requests[:2]:  # the second waits beside the first, which runs
        assert scheduler.next() == [request]
        assert request.merge_key is None
    for request in requests[2:4]:
        scheduler.add(request)
    assert scheduler.next() == requests[2:4]
    scheduler.add(requests[4])
    assert scheduler.next() == requests[4:]
    assert requests[4].merge_key == "x", "others run, and more will come"
    scheduler.ended(requests, [])
    scheduler.add(lone := ScheduledRequest("a", "x", 10, merge_from=2))
    assert scheduler.next() == [lone]
    assert lone.merge_key is None


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
            if request.state == QUEUED and not request.alone:
                request.state = BEGUN
        return requests[0] if requests else None

    def end(self, request, *, finished=True):
        self.scheduler.ran([request], 0.001)
        self.scheduler.ended([request], [] if finished else [request])


@pytest.fixture
def steps():
    return Steps()


def test_a_suspect_waits_for_running_steps_and_runs_all_its_own_alone(steps):
    before = steps.add("before")
    assert steps.next() is before
    suspect, after = steps.add("suspect", 5.0), steps.add("after")
    assert steps.next() is None
    assert suspect.state == QUEUED
    steps.end(before)
    for finished in (False, False, True):
        assert steps.next() is suspect
        assert suspect.state == ALONE
        assert steps.next() is None
        steps.end(suspect, finished=finished)
    assert steps.next() is after
    assert steps.scheduler.timeout is None


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


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_suspect_waits_for_a_long_step_for_a_while_and_not_if_cancelled(steps, is_cancelled):
    long = steps.add("long")
    steps.next()
    suspect = steps.add("suspect", 2.0)
    assert steps.next() is None
    suspect.is_cancelled, steps.now = is_cancelled, 0.0 if is_cancelled else 2.1
    assert steps.next() is suspect
    if is_cancelled:
        steps.end(suspect)
    else:
        assert suspect.state == BEGUN
    after = steps.add("after")
    assert steps.next() is after
    steps.end(long)


def test_probes_run_beside_a_suspect(steps):
    suspect = steps.add("suspect", 2.0)
    assert steps.next() is suspect
    probe = steps.add("probe", tenant=PROBE)
    assert steps.next() is probe
    assert suspect.state == ALONE
    steps.end(probe)
    steps.end(suspect)
    other = steps.add("other suspect", 2.0)
    assert steps.next() is other
    assert other.state == ALONE


def test_a_tenant_that_was_idle_has_priority_for_a_bounded_time():
    busy = [call("busy", 0.0, 0.004) for _ in range(2_000)]
    back = [call("back", 0.0, 0.004), *[call("back", 4.0, 0.004) for _ in range(500)]]
    Simulation(threads=1).run([*busy, *back], until=4.5)
    assert any(4.0 <= one.began < 4.1 for one in busy)


def test_few_tenants_are_remembered():
    scheduler = Scheduler(1)
    for number in range(2 * module._REMEMBERED):
        scheduler.add(ScheduledRequest(f"tenant {number}"))
        scheduler.ran(scheduler.next(), 0.001)
    assert len(scheduler._tenants) <= module._REMEMBERED
