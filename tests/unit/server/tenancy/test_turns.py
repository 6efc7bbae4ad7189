"""The turns of tenants, under threads that switch as often as Python allows, and their rests."""

import sys
import threading
import time
from collections import Counter

import pytest

from warpfit.errors import CancelledError
from warpfit_server.tenancy import admission
from warpfit_server.tenancy.admission import TenantTurns

TENANTS = ("greedy", "greedy", "modest", "third")


@pytest.fixture
def many_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_every_thread_gets_in_and_never_too_many_at_once(many_switches):
    shared, inside, most = TenantTurns(), Counter(), Counter()
    counting = threading.Lock()

    def call(tenant):
        for _ in range(50):
            shared.acquire(tenant)
            with counting:
                inside[tenant] += 1
                most[tenant] = max(most[tenant], inside[tenant])
            time.sleep(0)
            with counting:
                inside[tenant] -= 1
            shared.release(tenant)

    threads = [threading.Thread(target=call, args=(TENANTS[n % 4],)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert most["greedy"] <= admission._MOST
    assert (shared._inside, shared._waiting) == (Counter(), {})


def test_threads_of_a_tenant_are_let_in_in_order_of_arrival():
    shared, order = TenantTurns(), []
    for _ in range(admission._MOST):
        shared.acquire("greedy")
    shared.acquire("modest")  # waits for nobody

    def call(number):
        shared.acquire("greedy")
        order.append(number)
        shared.release("greedy")

    threads = []
    for number in range(4):
        threads.append(threading.Thread(target=call, args=(number,)))
        threads[-1].start()
        while len(shared._waiting.get("greedy", ())) < number + 1:
            time.sleep(0.001)
    shared.release("greedy")
    for thread in threads:
        thread.join(10)
    assert order == [0, 1, 2, 3]


def test_a_thread_whose_call_has_ended_does_not_wait_for_its_turn(monkeypatch):
    monkeypatch.setattr(admission, "_CHECK_SECONDS", 0.001)
    shared, ended = TenantTurns(), threading.Event()

    def check():
        if ended.is_set():
            raise CancelledError("the call has ended", "CANCELLED")

    for _ in range(admission._MOST):
        shared.acquire("greedy", check)
    ended.set()
    with pytest.raises(CancelledError):
        shared.acquire("greedy", check)
    for _ in range(admission._MOST):
        shared.release("greedy")
    assert (shared._inside, shared._waiting) == (Counter(), {})


def test_a_tenant_that_has_used_more_than_its_share_rests_while_another_one_calls():
    shared = TenantTurns()

    def seconds(tenant):
        began = time.monotonic()
        shared.acquire(tenant)
        shared.release(tenant)
        return time.monotonic() - began

    shared.charge("greedy", 0.1)
    assert min(seconds("greedy") for _ in range(3)) < 0.1, "it is alone"
    assert min(seconds("modest") for _ in range(3)) < 0.1
    assert seconds("greedy") > 0.1
    with pytest.raises(CancelledError):
        shared.acquire("greedy", _end)
    assert (shared._inside, shared._waiting) == ({}, {})
    time.sleep(admission._CALLING_SECONDS)
    assert min(seconds("greedy") for _ in range(3)) < 0.1, "it is alone again"


def test_threads_that_rest_go_on_one_by_one():
    shared = TenantTurns()
    shared.charge("greedy", 0.03)
    shared.acquire("modest")
    began = time.monotonic()
    assert [shared.rest("greedy") for _ in range(2)] == [0.03, 0.03]
    assert time.monotonic() - began > 0.1, "what the first one will take is charged already"
    for _ in range(2):
        shared.charge("greedy", 0.0, 0.03)  # they have taken less
    assert shared.rest("greedy") == 0.0


def test_what_a_tenant_has_used_is_forgiven_in_time():
    shared = TenantTurns()
    for _ in range(3):
        shared.charge("greedy", 1000.0)
    shared.acquire("modest")
    assert shared._used_until["greedy"] <= time.monotonic() + admission._LONGEST_REST
    expected = shared.rest("greedy")
    assert expected / admission._SHARE <= admission._LONGEST_REST, "the next thread rests no longer"
    assert shared._used_until["greedy"] <= time.monotonic() + admission._LONGEST_REST


def _end():
    raise CancelledError("the call has ended", "CANCELLED")


def test_any_number_of_tenants_takes_little_memory(monkeypatch):
    monkeypatch.setattr(admission, "_MOST_CHARGED", 10)
    shared = TenantTurns()
    shared.charge("long", 100.0)
    for number in range(1000):
        shared.charge(f"tenant {number}", 1e-9)
        time.sleep(1e-6)  # which it has rested for then
    assert len(shared._used_until) <= 12
    assert len(shared._charged) <= 12
    assert "long" in shared._used_until
