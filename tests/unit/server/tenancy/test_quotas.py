"""What all doors count together, and whether a call is taken, without servers."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing import get_context

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from warpfit.dataset import Layout
from warpfit.errors import (
    ResourceExhaustedError,
)
from warpfit.fitting import FitRequest, FitSettings
from warpfit.ir import Batch
from warpfit.parse import parse
from warpfit.request import Evaluation, Loss
from warpfit_server.config import Config
from warpfit_server.tenancy import quotas as ledgers
from warpfit_server.tenancy.admission import Admission, Pace
from warpfit_server.tenancy.quotas import Ledger, Usage
from warpfit_server.tenancy.tenants import (
    TenantBook,
)

ENOUGH = Usage(100, 1 << 40, 1 << 60)


class TestLedger:
    @pytest.fixture
    def pair(self):
        """Two doors' access to one table."""
        first = Ledger.create(2)
        second = Ledger(os.dup(first.descriptor), 2, 1)
        yield first, second
        first.close()
        second.close()

    def test_both_doors_count_together(self, pair):
        most = Usage(calls=3)
        for door in (*pair, pair[0]):
            assert door.take("a", Usage(1), most, ENOUGH) is None
        shortage = pair[1].take("a", Usage(1), most, ENOUGH)
        assert (shortage.measure, shortage.of_tenant, shortage.used) == ("calls", True, 3)
        assert pair[1].take("b", Usage(1), most, ENOUGH) is None
        pair[1].give("a", Usage(1))
        assert pair[0].take("a", Usage(1), most, ENOUGH) is None
        assert (pair[0].used("a").calls, pair[1].used().calls) == (3, 4)

    def test_the_server_has_limits_too(self, pair):
        assert pair[0].take("a", Usage(1), ENOUGH, Usage(1)) is None
        shortage = pair[1].take("b", Usage(1), ENOUGH, Usage(1))
        assert (shortage.measure, shortage.of_tenant) == ("calls", False)

    def test_a_call_that_exceeds_size_or_work_alone_runs_alone(self, pair):
        large = Usage(size=100, work=100)
        least = Usage(0, 10, 10)
        assert pair[0].take("a", large, least, ENOUGH) is None
        assert pair[1].take("a", Usage(size=1), least, ENOUGH).measure == "size"
        assert pair[1].take("a", Usage(work=1), least, ENOUGH).measure == "work"
        pair[0].give("a", large)
        assert pair[0].used("a") == Usage()

    def test_what_a_call_has_counted_before_does_not_keep_it_from_being_alone(self, pair):
        most = Usage(1, 10, 0)
        assert pair[0].take("a", Usage(size=5), most, ENOUGH) is None
        assert pair[0].take("a", Usage(size=100), most, ENOUGH).measure == "size"
        assert pair[0].take("a", Usage(size=100), most, ENOUGH, held=5) is None

    def test_what_a_dead_door_held_comes_back(self, pair):
        pair[0].take("a", Usage(1, 10, 100), ENOUGH, ENOUGH)
        pair[1].take("a", Usage(2, 20, 200), ENOUGH, ENOUGH)
        pair[1].take("b", Usage(4, 40, 400), ENOUGH, ENOUGH)
        pair[0].bury(1)
        assert pair[0].used("a") == pair[0].used() == Usage(1, 10, 100)
        assert pair[0].used("b") == Usage()

    def test_more_tenants_than_entries_share_some(self, monkeypatch):
        monkeypatch.setattr(ledgers, "_SLOTS", 4)
        ledger = Ledger.create(1)
        for index in range(50):
            assert ledger.take(f"t{index}", Usage(1), ENOUGH, ENOUGH) is None
        assert ledger.used().calls == 50
        for index in range(50):
            ledger.give(f"t{index}", Usage(1))
        assert ledger.used() == Usage()
        assert {ledger.used(f"t{index}") for index in range(50)} == {Usage()}
        ledger.close()

    def test_doors_agree_on_entries(self, pair):
        """Whichever door meets a tenant first, and however many there are."""
        for index in range(90):
            tenant = f"t{index}"
            assert pair[index % 2].take(tenant, Usage(1), ENOUGH, ENOUGH) is None
            assert pair[1 - index % 2].used(tenant) == Usage(1)

    def test_what_is_refused_leaves_nothing_behind(self, pair):
        little = Usage(1, 10, 10)
        pair[0].take("a", little, ENOUGH, ENOUGH)
        shortage = pair[1].take("a", Usage(1, 1, 1), (5, 5, 5), ENOUGH)
        assert (shortage.measure, shortage.used, shortage.limit) == ("size", 10, 5)
        assert pair[0].used("a") == pair[0].used() == little

    def test_rate_of_all_doors_together(self, pair):
        now = 1000.0
        delays = [pair[turn % 2].wait("a", now, 10.0, 0.0) for turn in range(11)]
        assert delays[:10] == [0.0] * 10
        assert delays[10] == pytest.approx(0.1)
        assert pair[0].wait("a", now + 0.05, 10.0, 0.0) == pytest.approx(0.15), "after the first"
        assert pair[1].wait("a", now + 0.1, 10.0, 0.0) == 0.0
        assert pair[1].wait("b", now, 10.0, 0.0) == 0.0

    def test_rate_of_the_server_and_slow_rates(self, pair):
        assert pair[0].wait("a", 5.0, 0.0, 1.0) == 0.0
        assert pair[1].wait("b", 5.0, 0.0, 1.0) == pytest.approx(1.0)
        assert pair[0].wait("c", 50.0, 0.25, 0.0) == 0.0
        assert pair[0].wait("c", 50.0, 0.25, 0.0) == pytest.approx(4.0)

    def test_refused_calls_are_asked_back_one_after_the_other(self, pair):
        now = 1000.0
        for _ in range(10):
            assert pair[0].wait("a", now, 10.0, 0.0) == 0
        delays = [pair[turn % 2].wait("a", now, 10.0, 0.0) for turn in range(30)]
        assert delays[:10] == pytest.approx([0.1 * turn for turn in range(1, 11)])
        assert max(delays) < 1.2, "nobody is sent away for long"
        rounded = [round(delay, 6) for delay in delays]
        assert max(map(rounded.count, rounded)) <= 3, "and not all for the same moment"
        assert pair[0].wait("b", now, 10.0, 0.0) == 0

    def test_turns(self, pair):
        turns = [pair[turn % 2].turn(50.0, 0.2, 0.3) for turn in range(6)]
        assert turns == pytest.approx([0.2, 0.5, 0.8, 1.1, 0.2, 0.5])
        assert pair[0].turn(60.0, 0.2, 0.3) == pytest.approx(0.2)

    @given(st.floats(0.1, 1e4), st.lists(st.floats(0, 2), min_size=1, max_size=60))
    def test_no_more_calls_than_the_rate_allows(self, rate, gaps):
        ledger = Ledger.create(1)
        now, taken = 100.0, []
        for gap in gaps:
            now += gap
            if ledger.wait("a", now, rate, 0.0) == 0:
                taken.append(now)
        ledger.close()
        assert taken, "the first call is always in time"
        for first in range(len(taken)):
            span = taken[-1] - taken[first]
            assert len(taken) - first <= rate * span + max(1.0, rate) + 1

    def test_processes_and_threads_lose_no_count(self):
        ledger = Ledger.create(3)
        context = get_context("fork")
        children = [context.Process(target=_count, args=(ledger, door)) for door in (1, 2)]
        for child in children:
            child.start()
        _count(ledger, 0)
        for child in children:
            child.join(30)
            assert child.exitcode == 0
        assert ledger.used("a") == ledger.used() == Usage(3 * 4 * 50, 0, 0)
        ledger.close()


def _count(parent: Ledger, door: int) -> None:
    ledger = Ledger(parent.descriptor, 3, door)

    def work():
        for _ in range(100):
            ledger.take("a", Usage(1), Usage(10_000), Usage(10_000))
        for _ in range(50):
            ledger.give("a", Usage(1))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class TestAdmission:
    def _admission(self, **settings):
        config = replace(Config(), **settings)
        book = TenantBook(config.limits(), None, shared=False)
        return Admission(config, book, Ledger.create(1))

    def test_places(self):
        admission = self._admission(max_requests=1)
        admission.enter("a", admission.limits("a"))
        with pytest.raises(ResourceExhaustedError) as caught:
            admission.enter("b", admission.limits("b"))
        assert caught.value.reason == "TOO_MANY_REQUESTS"
        assert caught.value.retry_after > 0
        assert "--max-requests" in caught.value.remedy
        assert (caught.value.needed, caught.value.available) == (1, 1)
        admission.leave("a")
        admission.arrived("a", 0, admission.message_bytes)
        admission.enter("b", admission.limits("b"))
        admission.leave("b")
        admission.arrived("b", 0, admission.message_bytes)
        assert admission.ledger.used() == Usage()

    def test_a_message_counts_as_the_longest_until_its_length_is_known(self):
        admission = self._admission(max_message_bytes=4 << 20, max_pending_bytes=12 << 20)
        for _ in range(3):
            admission.enter("a", admission.limits("a"))
        with pytest.raises(ResourceExhaustedError) as caught:
            admission.enter("b", admission.limits("b"))
        assert (caught.value.reason, caught.value.retry_after > 0) == ("QUEUE_FULL", True)
        assert "--max-pending-bytes" in caught.value.remedy
        admission.arrived("a", 100, admission.message_bytes)
        assert admission.ledger.used("a") == Usage(3, (8 << 20) + 100, 0)
        with pytest.raises(ResourceExhaustedError):
            admission.enter("b", admission.limits("b"))
        admission.arrived("a", 0, 100)
        admission.enter("b", admission.limits("b"))

    def test_a_refusal_does_not_tell_what_others_have_in_flight(self):
        admission = self._admission(max_requests=7)
        for _ in range(7):
            admission.enter("a", admission.limits("a"))
        with pytest.raises(ResourceExhaustedError) as caught:
            admission.enter("b", replace(admission.limits("b"), requests=8))
        assert caught.value.needed == 1
        assert str(caught.value).count("7") == 1, "the limit alone"

    def test_what_one_tenant_has_queued_keeps_no_other_out(self):
        admission = self._admission(max_queue_seconds=1.0)
        with ExitStack() as held:
            for _ in range(2):  # each takes hours, and counts as half of the queue
                held.enter_context(_charge(admission, rows=10**14))
            assert admission.ledger.used("a").work == 10**9
            with pytest.raises(ResourceExhaustedError) as caught:
                held.enter_context(_charge(admission, rows=10**6))
            assert "of this tenant" in str(caught.value)
            for _ in range(2):
                held.enter_context(_charge(admission, rows=10**14, tenant="b"))

    def test_one_long_call_leaves_its_own_tenant_half_of_the_queue(self):
        admission = self._admission(max_queue_seconds=1.0)
        with _charge(admission, rows=10**14), _charge(admission, rows=10**9):
            assert 0.5e9 < admission.ledger.used("a").work <= 1e9

    def test_calls_without_a_place_come_back_at_different_moments(self):
        admission = self._admission(max_requests=2)
        with ExitStack() as held:
            for _ in range(2):
                admission.enter("a", admission.limits("a"))
                held.enter_context(_charge(admission, rows=10**8))  # 0.03 s each
            moments = []
            for _ in range(8):
                with pytest.raises(ResourceExhaustedError) as caught:
                    admission.enter("b", admission.limits("b"))
                moments.append(caught.value.retry_after)
        gaps = np.diff(sorted(moments))
        assert gaps.min() > 0.02
        assert max(moments) < 2

    def test_a_call_that_fails_gives_back_what_it_took(self):
        admission = self._admission()
        with pytest.raises(ValueError, match="x"), _charge(admission):
            assert admission.ledger.used().size == 1
            raise ValueError("x")
        assert admission.ledger.used() == Usage()

    def test_rate(self):
        admission = self._admission(max_rate=2.0)
        for _ in range(2):
            admission.check_rate("a", 0.0)
        with pytest.raises(ResourceExhaustedError) as caught:
            admission.check_rate("a", 0.0)
        assert caught.value.reason == "RATE_LIMITED"
        assert 0 < caught.value.retry_after <= 0.5

    def test_the_pace_is_learned(self):
        pace = Pace()
        assert pace.estimate("evaluate", 1e9) == pytest.approx(3e8)
        for units in (1e9, 3e9, 5e9) * 20:
            pace.observe("evaluate", units, 2e6 + 1.5 * units)
        assert pace.estimate("evaluate", 2e9) == pytest.approx(3e9, rel=0.1)
        assert pace.estimate("fit", 1e9) == pytest.approx(3e8), "each kind has its own"

    def test_the_largest_work_can_be_counted(self):
        admission = self._admission(max_requests=2)
        fit = FitRequest(_problem(), FitSettings(max_iterations=2**32 - 1))
        layout = Layout(np.dtype("<f4"), 1, 2**60, has_target=True)
        with admission.fit("a", fit, layout, 1, 0):
            assert admission.ledger.used().work == 30 * 10**9
        assert Pace().estimate("fit", 1e30) == 2**50
        assert admission.ledger.used() == Usage()

    def test_small_calls_say_nothing_of_large_ones(self):
        pace = Pace()
        for turn in range(5000):
            pace.observe("evaluate", 1e5 * (1 + turn % 3), 5e6 * (1 + turn % 2))
        assert 3e8 / 2 < pace.estimate("evaluate", 1e9) < 2 * 3e8
        assert pace.estimate("evaluate", 1e5) == pytest.approx(7.5e6, rel=0.2)


def _problem():
    batch = Batch.of([parse("p1*x1")], [[0.5]])
    return Evaluation(bytes(32), batch, loss=Loss.MSE, values=False)


def _charge(admission, rows=1, tenant="a"):
    layout = Layout(np.dtype("<f4"), 1, rows, has_target=True)
    return admission.evaluation(tenant, _problem(), layout, 1, 0)
