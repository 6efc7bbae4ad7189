"""The semaphore of tenants, with threads interleaved in hundreds of orders."""

from __future__ import annotations

from collections import Counter

from support.load.schedules import Primitives, Schedule
from warpfit_server.tenancy import tenant_semaphore
from warpfit_server.tenancy.tenant_semaphore import TenantSemaphore

TENANTS = ("greedy", "greedy", "modest", "third")


def run_threads(monkeypatch, seed):
    """Run threads that acquire and release; return the most that each tenant had inside."""
    schedule = Schedule(seed, changes=4, steps=150)
    monkeypatch.setattr(tenant_semaphore, "threading", Primitives(schedule, seed))
    semaphore, inside, most = TenantSemaphore(), Counter(), Counter()

    def caller(number):
        tenant = TENANTS[number % len(TENANTS)]

        def call():
            for _ in range(3):
                semaphore.acquire(tenant)
                inside[tenant] += 1
                most[tenant] = max(most[tenant], inside[tenant])
                schedule.step()
                inside[tenant] -= 1
                semaphore.release(tenant)

        return call

    schedule.run(*(caller(number) for number in range(7)))
    assert (semaphore._inside, semaphore._waiting) == (Counter(), {})
    assert max(most.values()) <= tenant_semaphore._MOST
    return most


def test_every_thread_gets_in_and_never_too_many_at_once(monkeypatch):
    most = Counter()
    for seed in range(700):
        most |= run_threads(monkeypatch, seed)
    assert most["greedy"] == tenant_semaphore._MOST
