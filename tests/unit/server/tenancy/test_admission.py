"""Admission of calls by slots, bytes, rate and queue, and the estimates of engine time."""

from contextlib import ExitStack, nullcontext
from dataclasses import replace

import numpy as np
import pytest

from warpfit.dataset import Layout
from warpfit.errors import ResourceExhaustedError
from warpfit.fitting import FitRequest, FitSettings
from warpfit.ir import Batch
from warpfit.parse import parse
from warpfit.request import Evaluation, Loss
from warpfit_server.config import Config
from warpfit_server.tenancy.admission import Admission, CallCost, CallCostModel
from warpfit_server.tenancy.quotas import Amounts, QuotaTable
from warpfit_server.tenancy.tenants import TenantLimits

PROBLEM = Evaluation(bytes(32), Batch.of([parse("p1*x1")], [[0.5]]), loss=Loss.MSE, values=False)


def make_admission(*, shared=False, **settings):
    config = replace(Config(), **settings)
    tenants = TenantLimits(config.limits(), None, shared=shared)
    return Admission(config, tenants, QuotaTable.create(1))


def enter(admission, tenant):
    """Count a request whose message of one byte has arrived."""
    admission.enter(tenant, admission.limits(tenant), 1, 0)


def reserve(admission, rows=1, tenant="a"):
    layout = Layout(np.dtype("<f4"), 1, rows, has_target=True)
    cost = CallCost.of_evaluation(PROBLEM, layout)
    return admission.reserved(tenant, 1, nanoseconds=admission.costs.estimate(cost))


def count(take, admission, tenant):
    """Return how many a tenant can take before it is refused."""
    for number in range(1000):
        try:
            take(admission, tenant)
        except ResourceExhaustedError:
            return number
    raise AssertionError("nothing is refused")


class TestPlaces:
    def test_a_call_without_a_place_is_refused_until_another_leaves(self):
        admission = make_admission(max_requests=1)
        enter(admission, "a")
        with pytest.raises(ResourceExhaustedError) as caught:
            enter(admission, "b")
        assert caught.value.reason == "TOO_MANY_REQUESTS"
        assert caught.value.retry_after > 0
        assert "--max-requests" in caught.value.remedy
        assert (caught.value.needed, caught.value.available) == (1, 1)
        admission.leave("a", 1, 1)
        enter(admission, "b")
        assert admission.quotas.in_flight() == Amounts(1, 1)

    @pytest.mark.parametrize(
        "take", [enter, lambda admission, tenant: admission.await_message(tenant)]
    )
    def test_tenants_that_take_all_they_can_leave_some_to_others(self, take):
        """Calls in flight and messages that have not arrived, 64 each."""
        settings = {"max_requests": 64, "max_pending_bytes": 4 << 30}  # of 64 messages of 64 MiB
        admission = make_admission(shared=True, **settings)
        assert [count(take, admission, tenant) for tenant in "abcd"] == [32, 16, 8, 4]
        for _ in range(24):
            admission.leave("a", 1, admission.message_bytes)
        assert count(take, admission, "e") == 14, "half of what the others leave"
        assert count(take, make_admission(**settings), "a") == 64
        few = make_admission(shared=True, max_requests=2, max_pending_bytes=8 << 20)
        assert [count(take, few, tenant) for tenant in "ab"] == [1, 1], "one call in any case"

    def test_a_message_counts_as_the_longest_until_its_length_is_known(self):
        admission = make_admission(max_pending_bytes=12 << 20)
        for _ in range(3):
            admission.await_message("a")
        with pytest.raises(ResourceExhaustedError) as caught:
            admission.await_message("b")
        assert (caught.value.reason, caught.value.retry_after > 0) == ("QUEUE_FULL", True)
        assert "--max-pending-bytes" in caught.value.remedy
        admission.enter("a", admission.limits("a"), 100, admission.message_bytes)
        assert admission.quotas.in_flight("a") == Amounts(1, (8 << 20) + 100, 0)
        with pytest.raises(ResourceExhaustedError):
            admission.await_message("b")
        admission.leave("a", 1, 100)
        admission.await_message("b")

    def test_a_refusal_does_not_tell_what_other_tenants_have_in_flight(self):
        admission = make_admission(max_requests=7)
        for _ in range(7):
            enter(admission, "a")
        with pytest.raises(ResourceExhaustedError) as caught:
            admission.enter("b", replace(admission.limits("b"), requests=8), 1, 0)
        assert caught.value.needed == 1
        assert str(caught.value).count("7") == 1, "the limit alone"
        shared = make_admission(shared=True, max_requests=64)
        count(enter, shared, "a")
        for _ in range(16):
            enter(shared, "b")
        with pytest.raises(ResourceExhaustedError, match="the limit of the server is 64"):
            enter(shared, "b")

    def test_refused_calls_retry_at_different_moments(self):
        admission = make_admission(max_requests=2)
        with ExitStack() as held:
            for _ in range(2):
                enter(admission, "a")
                held.enter_context(reserve(admission, rows=10**8))  # 0.03 s each
            moments = []
            for _ in range(8):
                with pytest.raises(ResourceExhaustedError) as caught:
                    enter(admission, "b")
                moments.append(caught.value.retry_after)
        assert np.diff(sorted(moments)).min() > 0.02
        assert max(moments) < 2

    def test_calls_over_the_rate_are_refused(self):
        admission = make_admission()
        for _ in range(2):
            admission.check_rate("a", 2.0)
        with pytest.raises(ResourceExhaustedError) as caught:
            admission.check_rate("a", 2.0)
        assert caught.value.reason == "RATE_LIMITED"
        assert 0 < caught.value.retry_after <= 0.5


class TestQueue:
    def test_the_queue_of_one_tenant_keeps_no_other_out(self):
        admission = make_admission(max_queue_seconds=1.0)
        with ExitStack() as held:
            for _ in range(2):  # each takes hours, and counts as half of the queue
                held.enter_context(reserve(admission, rows=10**14))
            assert admission.quotas.in_flight("a").engine_ns == 10**9
            with pytest.raises(ResourceExhaustedError, match="of this tenant"):
                held.enter_context(reserve(admission, rows=10**6))
            for _ in range(2):
                held.enter_context(reserve(admission, rows=10**14, tenant="b"))

    @pytest.mark.parametrize("shared", [True, False])
    def test_a_call_may_fill_the_memory_only_where_nobody_else_wants_it(self, shared):
        admission = make_admission(shared=shared, max_pending_bytes=100)
        if shared:
            with (
                pytest.raises(ResourceExhaustedError) as caught,
                admission.reserved("a", 70, message=6),
            ):
                pass
            assert (caught.value.reason, caught.value.retry_after) == ("RESULT_TOO_LARGE", None)
            assert (caught.value.needed, caught.value.available) == (76, 50)
        too_many = pytest.raises(ResourceExhaustedError, match="too many")
        with (
            admission.reserved("a", 45 if shared else 200, message=5),
            nullcontext() if shared else too_many,
            admission.reserved("b", 20, message=5),
        ):
            pass

    def test_one_long_call_leaves_half_of_the_queue_to_its_tenant(self):
        admission = make_admission(max_queue_seconds=1.0)
        with reserve(admission, rows=10**14), reserve(admission, rows=10**9):
            assert 0.5e9 < admission.quotas.in_flight("a").engine_ns <= 1e9

    def test_a_call_that_fails_gives_its_reservation_back(self):
        admission = make_admission()
        with pytest.raises(ValueError, match="x"), admission.reserved("a", 1):
            assert admission.quotas.in_flight().nbytes == 1
            raise ValueError("x")
        assert admission.quotas.in_flight() == Amounts()

    def test_the_largest_fit_can_be_counted_in_64_bits(self):
        admission = make_admission(max_requests=2)
        fit = FitRequest(PROBLEM, FitSettings(max_iterations=2**32 - 1))
        layout = Layout(np.dtype("<f4"), 1, 2**60, has_target=True)
        nanoseconds = admission.costs.estimate(CallCost.of_fit(fit, layout))
        with admission.reserved("a", 1, nanoseconds=nanoseconds):
            assert admission.quotas.in_flight().engine_ns == 30 * 10**9
        assert admission.quotas.in_flight() == Amounts()
        assert CallCostModel().estimate(CallCost("fit", 1e30)) == 2**50


class TestCostModel:
    def test_each_kind_of_work_is_learned_from_observations(self):
        costs = CallCostModel()
        assert costs.estimate(CallCost("evaluate", 1e9)) == pytest.approx(3e8)
        for units in (1e9, 3e9, 5e9) * 20:
            costs.observe(CallCost("evaluate", units), 2e6 + 1.5 * units)
        assert costs.estimate(CallCost("evaluate", 2e9)) == pytest.approx(3e9, rel=0.1)
        assert costs.estimate(CallCost("fit", 1e9)) == pytest.approx(3e8)

    def test_one_size_tells_about_larger_ones_on_a_fast_device(self):
        costs = CallCostModel()
        for _ in range(20):
            costs.observe(CallCost("evaluate", 7.5e8), 1e6)
        assert costs.estimate(CallCost("evaluate", 7.5e8)) == pytest.approx(1e6, rel=0.01)
        assert 3e6 < costs.estimate(CallCost("evaluate", 3e9)) < 8e6
        assert costs.estimate(CallCost("evaluate", 1e3)) == pytest.approx(1e5, rel=0.1)

    def test_small_calls_do_not_decide_about_large_ones(self):
        costs = CallCostModel()
        for turn in range(5000):
            costs.observe(CallCost("evaluate", 1e5 * (1 + turn % 3)), 5e6 * (1 + turn % 2))
        assert 3e8 / 2 < costs.estimate(CallCost("evaluate", 1e9)) < 2 * 3e8
        assert costs.estimate(CallCost("evaluate", 1e5)) == pytest.approx(7.5e6, rel=0.2)
