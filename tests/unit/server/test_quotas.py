"""Quotas and limits of tenants, their turns, and the admission of their calls."""

import os
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import fields, replace
from multiprocessing import get_context
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.refusals import refused
from support.servers.server import eventually
from warpfit import errors
from warpfit.dataset import Layout
from warpfit.ir import Batch
from warpfit.parse import parse
from warpfit.request import Evaluation, FitRequest, FitSettings, Loss
from warpfit.server_info import Limits
from warpfit_server import admission as module
from warpfit_server import tenants as tenants_module
from warpfit_server.admission import Admission, CallCost, CallCostModel, TenantTurns
from warpfit_server.config import Config
from warpfit_server.tenants import ANONYMOUS, BOUNDED, Amounts, QuotaTable, TenantLimits, key_of

ENOUGH = Amounts(100, 1 << 40, 1 << 60)
ONE = Amounts(calls=1)


@pytest.fixture
def pair():
    first = QuotaTable.create(2)
    second = QuotaTable(os.dup(first.descriptor), 2, 1)
    yield first, second
    first.close()
    second.close()


class TestAmounts:
    def test_processes_count_together(self, pair):
        most = Amounts(calls=3)
        for table in (*pair, pair[0]):
            assert table.acquire("a", ONE, most, ENOUGH) is None
        exceeded = pair[1].acquire("a", ONE, most, ENOUGH)
        assert (exceeded.quantity, exceeded.of_tenant, exceeded.used) == ("calls", True, 3)
        assert pair[1].acquire("b", ONE, most, ENOUGH) is None
        pair[1].release("a", ONE)
        assert pair[0].acquire("a", ONE, most, ENOUGH) is None
        assert (pair[0].in_flight("a").calls, pair[1].in_flight().calls) == (3, 4)
        exceeded = pair[1].acquire("c", ONE, ENOUGH, Amounts(calls=4))
        assert (exceeded.quantity, exceeded.of_tenant) == ("calls", False), "that of the server"

    def test_a_call_that_alone_exceeds_bytes_or_time_may_run_alone(self, pair):
        large, least = Amounts(nbytes=100, engine_ns=100), Amounts(0, 10, 10)
        assert pair[0].acquire("a", large, least, ENOUGH) is None
        assert pair[1].acquire("a", Amounts(nbytes=1), least, ENOUGH).quantity == "nbytes"
        assert pair[1].acquire("a", Amounts(engine_ns=1), least, ENOUGH).quantity == "engine_ns"
        pair[0].release("a", large)
        assert pair[0].in_flight("a") == Amounts()
        # Bytes that it holds already do not count as another call.
        assert pair[0].acquire("a", Amounts(nbytes=5), least, ENOUGH) is None
        assert pair[0].acquire("a", Amounts(nbytes=100), least, ENOUGH).quantity == "nbytes"
        assert pair[0].acquire("a", Amounts(nbytes=100), least, ENOUGH, held=5) is None

    def test_the_amounts_of_a_process_that_ended_are_subtracted(self, pair):
        for table, tenant, factor in ((0, "a", 1), (1, "a", 2), (1, "b", 4)):
            pair[table].acquire(tenant, Amounts(factor, 10 * factor, 100), ENOUGH, ENOUGH)
        pair[0].clear_process(1)
        assert pair[0].in_flight("a") == pair[0].in_flight() == Amounts(1, 10, 100)
        assert pair[0].in_flight("b") == Amounts()

    def test_tenants_without_an_entry_of_their_own_share_one(self, monkeypatch):
        monkeypatch.setattr("warpfit_server.tenants._ENTRIES", 4)
        table, tenants = QuotaTable.create(1), [f"t{index}" for index in range(50)]
        for tenant in tenants:
            assert table.acquire(tenant, ONE, ENOUGH, ENOUGH) is None
        assert table.in_flight().calls == 50
        for tenant in tenants:
            table.release(tenant, ONE)
        assert {table.in_flight(tenant) for tenant in (None, *tenants)} == {Amounts()}
        table.close()

    def test_processes_and_threads_lose_no_count(self):
        table = QuotaTable.create(3)

        def count(process: int) -> None:
            own = QuotaTable(table.descriptor, 3, process)

            def work(_):
                for turn in range(150):
                    if turn % 3 == 2:
                        own.release("a", ONE)
                    else:
                        own.acquire("a", ONE, Amounts(10_000), Amounts(10_000))

            with ThreadPoolExecutor(4) as pool:
                list(pool.map(work, range(4)))

        context = get_context("fork")
        children = [context.Process(target=count, args=(number,)) for number in (1, 2)]
        for child in children:
            child.start()
        count(0)
        for child in children:
            child.join(30)
            assert child.exitcode == 0
        assert table.in_flight("a") == table.in_flight() == Amounts(3 * 4 * 50, 0, 0)
        table.close()


class TestRates:
    def test_processes_count_together_and_ask_refused_calls_back_one_after_the_other(self, pair):
        now = 1000.0
        delays = [pair[turn % 2].count_call("a", now, 10.0) for turn in range(40)]
        assert delays[:10] == [0.0] * 10
        assert delays[10:20] == pytest.approx([0.1 * turn for turn in range(1, 11)])
        assert max(delays) < 1.2, "no call has to wait for long"
        rounded = [round(delay, 6) for delay in delays[10:]]
        assert max(map(rounded.count, rounded)) <= 3, "not all retry at the same moment"
        assert pair[1].count_call("b", now, 10.0) == 0.0
        for _ in range(11):
            pair[0].count_call("c", now, 10.0)
        assert pair[1].count_call("c", now + 0.05, 10.0) == pytest.approx(0.15)
        assert pair[0].count_call("c", now + 0.1, 10.0) == 0.0

    @given(st.floats(0.1, 1e4), st.lists(st.floats(0, 2), min_size=1, max_size=60))
    def test_no_more_calls_than_the_rate_allows(self, rate, gaps):
        table = QuotaTable.create(1)
        now, taken = 100.0, []
        for gap in gaps:
            now += gap
            if table.count_call("a", now, rate) == 0:
                taken.append(now)
        table.close()
        assert taken, "the first call is always in time"
        for first in range(len(taken)):
            span = taken[-1] - taken[first]
            assert len(taken) - first <= rate * span + max(1.0, rate) + 1


@pytest.fixture
def tenants(tmp_path):
    def make(text, server=None):
        path = tmp_path / "tenants.toml"
        path.write_text(text)
        return TenantLimits(server or Limits(), path, shared=True)

    return make


def test_sections_narrow_the_default_which_narrows_the_server(tenants):
    book = tenants(
        '[default]\nrows = 10\nrate = 3.5\n[tenants.a]\nresident_bytes = "1MiB"\nrows = 20\n'
        "requests = 1000\n[tenants.b]\nsuspended = true\n"
    )
    a, other = book.limits("a"), book.limits("c")
    assert (a.rows, a.resident_bytes, a.rate, a.requests) == (20, 1 << 20, 3.5, 32)
    assert (other.rows, other.rate, other.requests) == (10, 3.5, 32)
    with pytest.raises(errors.PermissionDeniedError):
        book.limits("b")
    # A single tenant may use the whole server.
    assert TenantLimits(Limits(), None, shared=False).limits(ANONYMOUS) == Limits()


@pytest.mark.parametrize("name", [limit.name for limit in fields(Limits)])
def test_the_file_narrows_what_the_server_bounds_and_sets_the_rest(tenants, name):
    server = tenants("").limits("a")  # its shares of the whole
    for value in (1, 2**61):
        found = getattr(tenants(f"[default]\n{name} = {value}\n").limits("a"), name)
        most = Limits().resident_bytes if name == "resident_bytes" else getattr(server, name)
        assert found == (min(value, most) if name in BOUNDED else value)


@pytest.mark.parametrize(
    "text",
    [
        *(f"[default]\nrows = {value}\n" for value in ("-1", "true", '"many"', 2**63)),
        *(f"[default]\n{line}\n" for line in ("speed = 3", "rate = nan", "rate = inf")),
        *("[default]\nrequests = inf\n", "[default]\nrequests = 0.5\n"),
        *("[tenants.a]\nsuspended = 1\n", "[tenant.a]\nrows = 3\n", "[tenants]\na = 3\n"),
        *("tenants = 3\n", "default = 3\n", f"a = {'[' * 5_000}", "nonsense"),
    ],
)
def test_wrong_files_are_refused(tenants, text):
    refused("BAD_TENANTS_FILE", tenants, text)


def test_a_changed_file_is_read_again_unless_it_is_wrong(tenants, tmp_path, monkeypatch):
    monkeypatch.setattr(tenants_module, "_SETTLE_SECONDS", 0.0)  # it is complete at once
    book = tenants("[default]\nrows = 1\n")
    for text, rows in (("broken", 1), ("[default]\nrows = 2\n", 2)):
        (tmp_path / "tenants.toml").write_text(text)
        book._sections._next = 0.0  # it looks again
        assert book.limits("a").rows == rows


@given(st.text(min_size=1), st.text(min_size=1), st.binary(min_size=32, max_size=32))
def test_keys_of_tenants_differ(one, other, content_id):
    assert (key_of(one, content_id) == key_of(other, content_id)) == (one == other)
    assert len(key_of(one, content_id)) == 32


def test_every_thread_gets_in_and_never_too_many_at_once():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    shared, inside, most = TenantTurns(), Counter(), Counter()
    counting = threading.Lock()

    def call(tenant):
        for _ in range(50):
            shared.acquire(tenant)
            for step in (1, -1):
                with counting:
                    inside[tenant] += step
                    most[tenant] = max(most[tenant], inside[tenant])
                time.sleep(0)
            shared.release(tenant)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(call, ("greedy", "greedy", "modest", "third") * 3, timeout=30))
    sys.setswitchinterval(before)
    assert most["greedy"] <= module._MOST
    assert (shared._inside, shared._waiting) == (Counter(), {})


def test_threads_of_a_tenant_are_let_in_in_order_of_arrival():
    shared, order = TenantTurns(), []
    for _ in range(module._MOST):
        shared.acquire("greedy")
    shared.acquire("modest")  # waits for nobody

    def call(number):
        shared.acquire("greedy")
        order.append(number)
        shared.release("greedy")

    with ThreadPoolExecutor(4) as pool:
        for number in range(4):
            pool.submit(call, number)
            eventually(lambda: len(shared._waiting.get("greedy", ())) == number + 1)  # noqa: B023
        shared.release("greedy")
    assert order == [0, 1, 2, 3]


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
    with pytest.raises(errors.CancelledError):
        shared.acquire("greedy", Mock(side_effect=errors.CancelledError("it has ended")))
    assert (shared._inside, shared._waiting) == ({}, {})
    time.sleep(module._CALLING_SECONDS)
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
    assert shared._used_until["greedy"] <= time.monotonic() + module._LONGEST_REST
    expected = shared.rest("greedy")
    assert expected / module._SHARE <= module._LONGEST_REST, "the next thread rests no longer"
    assert shared._used_until["greedy"] <= time.monotonic() + module._LONGEST_REST


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


def refusal(function, *arguments):
    with pytest.raises(errors.ResourceExhaustedError) as caught:
        function(*arguments)
    return caught.value


def count(take, admission, tenant):
    """Return how many a tenant can take before it is refused."""
    for number in range(1000):
        try:
            take(admission, tenant)
        except errors.ResourceExhaustedError:
            return number
    raise AssertionError("nothing is refused")


class TestPlaces:
    def test_a_call_without_a_place_is_refused_until_another_leaves(self):
        admission = make_admission(max_requests=1)
        enter(admission, "a")
        error = refusal(enter, admission, "b")
        assert error.reason == "TOO_MANY_REQUESTS" and "--max-requests" in error.remedy
        assert (error.needed, error.available, error.retry_after > 0) == (1, 1, True)
        admission.leave("a", (1, 1))
        enter(admission, "b")
        assert admission.quotas.in_flight() == Amounts(1, 1)

    @pytest.mark.parametrize("take", [enter, Admission.await_message])
    def test_tenants_that_take_all_they_can_leave_some_to_others(self, take):
        settings = {"max_requests": 64, "max_pending_bytes": 4 << 30}  # of 64 messages of 64 MiB
        admission = make_admission(shared=True, **settings)
        assert [count(take, admission, tenant) for tenant in "abcd"] == [32, 16, 8, 4]
        for _ in range(24):
            admission.leave("a", (1, admission.message_bytes))
        assert count(take, admission, "e") == 14, "half of what the others leave"
        assert count(take, make_admission(**settings), "a") == 64
        few = make_admission(shared=True, max_requests=2, max_pending_bytes=8 << 20)
        assert [count(take, few, tenant) for tenant in "ab"] == [1, 1], "one call in any case"

    def test_a_message_counts_as_the_longest_until_its_length_is_known(self):
        admission = make_admission(max_pending_bytes=12 << 20)
        for _ in range(3):
            admission.await_message("a")
        error = refusal(admission.await_message, "b")
        assert (error.reason, error.retry_after > 0) == ("QUEUE_FULL", True)
        assert "--max-pending-bytes" in error.remedy
        admission.enter("a", admission.limits("a"), 100, admission.message_bytes)
        assert admission.quotas.in_flight("a") == Amounts(1, (8 << 20) + 100, 0)
        refusal(admission.await_message, "b")
        admission.leave("a", (1, 100))
        admission.await_message("b")

    def test_a_refusal_does_not_tell_what_other_tenants_have_in_flight(self):
        admission = make_admission(max_requests=7)
        for _ in range(7):
            enter(admission, "a")
        error = refusal(admission.enter, "b", replace(admission.limits("b"), requests=8), 1, 0)
        assert (error.needed, str(error).count("7")) == (1, 1), "the limit alone"
        shared = make_admission(shared=True, max_requests=64)
        count(enter, shared, "a")
        for _ in range(16):
            enter(shared, "b")
        assert "the limit of the server is 64" in str(refusal(enter, shared, "b"))

    def test_refused_calls_retry_at_different_moments(self):
        admission = make_admission(max_requests=2)
        with ExitStack() as held:
            for _ in range(2):
                enter(admission, "a")
                held.enter_context(reserve(admission, rows=10**8))  # 0.03 s each
            moments = [refusal(enter, admission, "b").retry_after for _ in range(8)]
        assert np.diff(sorted(moments)).min() > 0.02
        assert max(moments) < 2


class TestQueue:
    def test_the_queue_of_one_tenant_keeps_no_other_out(self):
        admission = make_admission(max_queue_seconds=1.0)
        with ExitStack() as held:
            for _ in range(2):  # each takes hours, and counts as half of the queue
                held.enter_context(reserve(admission, rows=10**14))
            assert admission.quotas.in_flight("a").engine_ns == 10**9
            with pytest.raises(errors.ResourceExhaustedError, match="of this tenant"):
                held.enter_context(reserve(admission, rows=10**6))
            for _ in range(2):
                held.enter_context(reserve(admission, rows=10**14, tenant="b"))

    @pytest.mark.parametrize("shared", [True, False])
    def test_a_call_may_fill_the_memory_only_where_nobody_else_wants_it(self, shared):
        admission = make_admission(shared=shared, max_pending_bytes=100)
        if shared:
            error = refusal(admission.reserve, "a", 70, 6)
            assert (error.reason, error.retry_after) == ("RESULT_TOO_LARGE", None)
            assert (error.needed, error.available) == (76, 50)
        too_many = pytest.raises(errors.ResourceExhaustedError, match="too many")
        with (
            admission.reserved("a", 45 if shared else 200, message=5),
            nullcontext() if shared else too_many,
            admission.reserved("b", 20, message=5),
        ):
            pass

    def test_the_largest_fit_can_be_counted_in_64_bits_and_given_back(self):
        admission = make_admission(max_requests=2)
        fit = FitRequest(PROBLEM, FitSettings(max_iterations=2**32 - 1))
        layout = Layout(np.dtype("<f4"), 1, 2**60, has_target=True)
        nanoseconds = admission.costs.estimate(CallCost.of_fit(fit, layout))
        with suppress(ValueError), admission.reserved("a", 1, nanoseconds=nanoseconds):
            assert admission.quotas.in_flight() == Amounts(0, 1, 30 * 10**9)
            raise ValueError("it fails")
        assert admission.quotas.in_flight() == Amounts()
        assert CallCostModel().estimate(CallCost("fit", 1e30)) == 2**50


class TestCostModel:
    def test_cost_is_tokens_times_rows_of_all_vectors_starts_and_passes(self):
        layout = Layout(np.dtype("<f4"), 1, 100, has_target=True)
        assert CallCost.of_evaluation(PROBLEM, layout) == ("evaluate", 300)
        assert CallCost.of_evaluation(replace(PROBLEM, gradient=True), layout) == ("derive", 300)
        twice = replace(PROBLEM, batch=Batch.of([parse("p1*x1")], [[[0.5], [1.0]]]))
        for restarts, iterations, units in ((0, 4, 3000), (2, 4, 6000), (0, 999, 12_000)):
            settings = FitSettings(restarts=restarts, max_iterations=iterations)
            assert CallCost.of_fit(FitRequest(twice, settings), layout) == ("fit", units)

    def test_each_kind_of_work_is_learned_from_observations(self):
        costs = CallCostModel()
        assert costs.estimate(CallCost("evaluate", 1e9)) == pytest.approx(3e8)
        for units in (1e9, 3e9, 5e9) * 20:
            costs.observe(CallCost("evaluate", units), 2e6 + 1.5 * units)
        assert costs.estimate(CallCost("evaluate", 2e9)) == pytest.approx(3e9, rel=0.1)
        assert costs.estimate(CallCost("fit", 1e9)) == pytest.approx(3e8)
        costs.observe(CallCost("evaluate", 3e9), 1.35e10)
        found = costs.estimate(CallCost("evaluate", 3e9))
        assert found == pytest.approx(4.5e9, rel=0.2), "one slow call counts little"

    def test_one_size_tells_about_larger_ones_on_a_fast_device(self):
        costs = CallCostModel()
        for _ in range(20):
            costs.observe(CallCost("evaluate", 7.5e8), 1e6)
        assert costs.estimate(CallCost("evaluate", 7.5e8)) == pytest.approx(1e6, rel=0.01)
        assert 3e6 < costs.estimate(CallCost("evaluate", 3e9)) < 8e6
        assert costs.estimate(CallCost("evaluate", 1e3)) == pytest.approx(1e5, rel=0.1)
