"""The semaphore of tenants, under threads that switch as often as Python allows."""

import sys
import threading
import time
from collections import Counter

import pytest

from warpfit.errors import CancelledError
from warpfit_server.tenancy import tenant_semaphore
from warpfit_server.tenancy.tenant_semaphore import TenantSemaphore

TENANTS = ("greedy", "greedy", "modest", "third")


@pytest.fixture
def many_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_every_thread_gets_in_and_never_too_many_at_once(many_switches):
    semaphore, inside, most = TenantSemaphore(), Counter(), Counter()
    counting = threading.Lock()

    def call(tenant):
        for _ in range(50):
            semaphore.acquire(tenant)
            with counting:
                inside[tenant] += 1
                most[tenant] = max(most[tenant], inside[tenant])
            time.sleep(0)
            with counting:
                inside[tenant] -= 1
            semaphore.release(tenant)

    threads = [threading.Thread(target=call, args=(TENANTS[n % 4],)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert most["greedy"] <= tenant_semaphore._MOST
    assert (semaphore._inside, semaphore._waiting) == (Counter(), {})


def test_threads_of_a_tenant_are_let_in_in_order_of_arrival():
    semaphore, order = TenantSemaphore(), []
    for _ in range(tenant_semaphore._MOST):
        semaphore.acquire("greedy")
    semaphore.acquire("modest")  # waits for nobody

    def call(number):
        semaphore.acquire("greedy")
        order.append(number)
        semaphore.release("greedy")

    threads = []
    for number in range(4):
        threads.append(threading.Thread(target=call, args=(number,)))
        threads[-1].start()
        while len(semaphore._waiting.get("greedy", ())) < number + 1:
            time.sleep(0.001)
    semaphore.release("greedy")
    for thread in threads:
        thread.join(10)
    assert order == [0, 1, 2, 3]


def test_a_thread_whose_call_has_ended_does_not_wait_for_its_turn(monkeypatch):
    monkeypatch.setattr(tenant_semaphore, "_CHECK_SECONDS", 0.001)
    semaphore, ended = TenantSemaphore(), threading.Event()

    def check():
        if ended.is_set():
            raise CancelledError("the call has ended", "CANCELLED")

    for _ in range(tenant_semaphore._MOST):
        semaphore.acquire("greedy", check)
    ended.set()
    with pytest.raises(CancelledError):
        semaphore.acquire("greedy", check)
    for _ in range(tenant_semaphore._MOST):
        semaphore.release("greedy")
    assert (semaphore._inside, semaphore._waiting) == (Counter(), {})
