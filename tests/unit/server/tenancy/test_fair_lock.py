"""Those who wait for a turn, with threads in hundreds of orders."""

from __future__ import annotations

from collections import Counter

import pytest

from support.load.schedules import Primitives, Schedule
from warpfit_server.tenancy import fair_lock
from warpfit_server.tenancy.fair_lock import Turnstile

TENANTS = ("greedy", "greedy", "modest", "third")


def turnstile_run(monkeypatch, seed, turnstile_class=Turnstile):
    schedule = Schedule(seed, changes=4, steps=150)
    monkeypatch.setattr(fair_lock, "threading", Primitives(schedule, seed))
    stile, inside, most = turnstile_class(), Counter(), Counter()

    def caller(number):
        tenant = TENANTS[number % len(TENANTS)]

        def call():
            for _ in range(3):
                stile.enter(tenant)
                inside[tenant] += 1
                most[tenant] = max(most[tenant], inside[tenant])
                schedule.step()
                inside[tenant] -= 1
                stile.leave(tenant)

        return call

    schedule.run(*(caller(number) for number in range(7)))
    assert (stile._inside, stile._waiting) == (Counter(), {})
    assert max(most.values()) <= fair_lock._TOGETHER
    return most


def test_the_turnstile_lets_all_in_and_never_too_many(monkeypatch):
    most = Counter()
    for seed in range(700):
        most |= turnstile_run(monkeypatch, seed)
    assert most["greedy"] == fair_lock._TOGETHER


class _LetsNobodyFollow(Turnstile):
    def leave(self, tenant):
        if len(self._waiting.get(tenant, ())) == 1:
            del self._waiting[tenant]
        super().leave(tenant)


def test_a_planted_mistake_of_the_turnstile_is_found(monkeypatch):
    with pytest.raises(AssertionError):
        for seed in range(700):
            turnstile_run(monkeypatch, seed, _LetsNobodyFollow)
