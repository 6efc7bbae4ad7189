"""Quotas, and the limits of tenants."""

import os
import threading
from dataclasses import fields
from multiprocessing import get_context

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warpfit.errors import InvalidArgumentError, PermissionDeniedError
from warpfit.server_info import Limits
from warpfit_server.system import file_watcher
from warpfit_server.tenancy import quotas
from warpfit_server.tenancy.quotas import Amounts, QuotaTable
from warpfit_server.tenancy.tenants import ANONYMOUS, BOUNDED, TenantLimits, key_of

ENOUGH = Amounts(100, 1 << 40, 1 << 60)
ONE = Amounts(calls=1)


@pytest.fixture
def pair():
    """Two processes' access to one table."""
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

    def test_the_limits_of_the_server_bound_all_tenants(self, pair):
        assert pair[0].acquire("a", ONE, ENOUGH, ONE) is None
        exceeded = pair[1].acquire("b", ONE, ENOUGH, ONE)
        assert (exceeded.quantity, exceeded.of_tenant) == ("calls", False)

    def test_a_call_that_alone_exceeds_bytes_or_time_may_run_alone(self, pair):
        large, least = Amounts(nbytes=100, engine_ns=100), Amounts(0, 10, 10)
        assert pair[0].acquire("a", large, least, ENOUGH) is None
        assert pair[1].acquire("a", Amounts(nbytes=1), least, ENOUGH).quantity == "nbytes"
        assert pair[1].acquire("a", Amounts(engine_ns=1), least, ENOUGH).quantity == "engine_ns"
        pair[0].release("a", large)
        assert pair[0].in_flight("a") == Amounts()

    def test_bytes_that_a_call_holds_already_do_not_count_as_another_call(self, pair):
        most, more = Amounts(1, 10, 0), Amounts(nbytes=100)
        assert pair[0].acquire("a", Amounts(nbytes=5), most, ENOUGH) is None
        assert pair[0].acquire("a", more, most, ENOUGH).quantity == "nbytes"
        assert pair[0].acquire("a", more, most, ENOUGH, held=5) is None

    def test_the_amounts_of_a_process_that_ended_are_subtracted(self, pair):
        pair[0].acquire("a", Amounts(1, 10, 100), ENOUGH, ENOUGH)
        pair[1].acquire("a", Amounts(2, 20, 200), ENOUGH, ENOUGH)
        pair[1].acquire("b", Amounts(4, 40, 400), ENOUGH, ENOUGH)
        pair[0].clear_process(1)
        assert pair[0].in_flight("a") == pair[0].in_flight() == Amounts(1, 10, 100)
        assert pair[0].in_flight("b") == Amounts()

    def test_tenants_without_an_entry_of_their_own_share_one(self, monkeypatch):
        monkeypatch.setattr(quotas, "_ENTRIES", 4)
        table, tenants = QuotaTable.create(1), [f"t{index}" for index in range(50)]
        for tenant in tenants:
            assert table.acquire(tenant, ONE, ENOUGH, ENOUGH) is None
        assert table.in_flight().calls == 50
        for tenant in tenants:
            table.release(tenant, ONE)
        assert {table.in_flight(tenant) for tenant in (None, *tenants)} == {Amounts()}
        table.close()

    def test_a_refused_amount_is_subtracted_again(self, pair):
        little = Amounts(1, 10, 10)
        pair[0].acquire("a", little, ENOUGH, ENOUGH)
        exceeded = pair[1].acquire("a", Amounts(1, 1, 1), Amounts(5, 5, 5), ENOUGH)
        assert (exceeded.quantity, exceeded.used, exceeded.limit) == ("nbytes", 10, 5)
        assert pair[0].in_flight("a") == pair[0].in_flight() == little

    def test_processes_and_threads_lose_no_count(self):
        table = QuotaTable.create(3)
        context = get_context("fork")
        children = [context.Process(target=_count, args=(table, number)) for number in (1, 2)]
        for child in children:
            child.start()
        _count(table, 0)
        for child in children:
            child.join(30)
            assert child.exitcode == 0
        assert table.in_flight("a") == table.in_flight() == Amounts(3 * 4 * 50, 0, 0)
        table.close()


def _count(parent: QuotaTable, process: int) -> None:
    table = QuotaTable(parent.descriptor, 3, process)

    def work():
        for _ in range(100):
            table.acquire("a", ONE, Amounts(10_000), Amounts(10_000))
        for _ in range(50):
            table.release("a", ONE)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class TestRates:
    def test_processes_count_together(self, pair):
        now = 1000.0
        delays = [pair[turn % 2].count_call("a", now, 10.0) for turn in range(11)]
        assert delays[:10] == [0.0] * 10
        assert delays[10] == pytest.approx(0.1)
        later = pair[0].count_call("a", now + 0.05, 10.0)
        assert later == pytest.approx(0.15), "after the one that was refused first"
        assert pair[1].count_call("a", now + 0.1, 10.0) == 0.0
        assert pair[1].count_call("b", now, 10.0) == 0.0

    def test_a_rate_below_one_a_second_allows_no_burst(self, pair):
        assert pair[0].count_call("c", 50.0, 0.25) == 0.0
        assert pair[0].count_call("c", 50.0, 0.25) == pytest.approx(4.0)

    def test_refused_calls_are_asked_back_one_after_the_other(self, pair):
        now = 1000.0
        delays = [pair[turn % 2].count_call("a", now, 10.0) for turn in range(40)][10:]
        assert delays[:10] == pytest.approx([0.1 * turn for turn in range(1, 11)])
        assert max(delays) < 1.2, "no call has to wait for long"
        rounded = [round(delay, 6) for delay in delays]
        assert max(map(rounded.count, rounded)) <= 3, "not all retry at the same moment"
        assert pair[0].count_call("b", now, 10.0) == 0

    def test_retry_delays_begin_anew_after_a_second(self, pair):
        delays = [pair[turn % 2].retry_delay(50.0, 0.2, 0.3) for turn in range(6)]
        assert delays == pytest.approx([0.2, 0.5, 0.8, 1.1, 0.2, 0.5])
        assert pair[0].retry_delay(60.0, 0.2, 0.3) == pytest.approx(0.2)

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


# ------------------------------------------------------------------------------------------ tenants


@pytest.fixture
def tenants(tmp_path):
    """Make the limits that a tenants file with some text gives to several tenants."""

    def make(text, server=None):
        path = tmp_path / "tenants.toml"
        path.write_text(text)
        return TenantLimits(server or Limits(), path, shared=True)

    return make


def test_sections_narrow_the_default_which_narrows_the_server(tenants):
    book = tenants(
        '[default]\nrows = 10\nrate = 3.5\n[tenants.a]\nresident_bytes = "1MiB"\nrows = 20\n'
        "requests = 1000\n[tenants.b]\nsuspended = true\n",
    )
    a, other = book.limits("a"), book.limits("c")
    assert (a.rows, a.resident_bytes, a.rate, a.requests) == (20, 1 << 20, 3.5, 32)
    assert (other.rows, other.rate, other.requests) == (10, 3.5, 32)
    with pytest.raises(PermissionDeniedError):
        book.limits("b")


@pytest.mark.parametrize("name", [limit.name for limit in fields(Limits)])
def test_the_file_narrows_what_the_server_bounds_and_sets_the_rest(tenants, name):
    server = tenants("").limits("a")  # its shares of the whole
    for value in (1, 2**61):
        found = getattr(tenants(f"[default]\n{name} = {value}\n").limits("a"), name)
        most = Limits().resident_bytes if name == "resident_bytes" else getattr(server, name)
        assert found == (min(value, most) if name in BOUNDED else value)


def test_a_single_tenant_may_use_the_whole_server():
    assert TenantLimits(Limits(), None, shared=False).limits(ANONYMOUS) == Limits()


@pytest.mark.parametrize(
    "text",
    [
        "[default]\nspeed = 3\n",
        "[default]\nrows = -1\n",
        "[default]\nrows = true\n",
        '[default]\nrows = "many"\n',
        "[tenants.a]\nsuspended = 1\n",
        "[tenant.a]\nrows = 3\n",
        "tenants = 3\n",
        "default = 3\n",
        "[tenants]\na = 3\n",
        "[default]\nrate = nan\n",
        "[default]\nrate = inf\n",
        "[default]\nrequests = inf\n",
        f"[default]\nrows = {2**63}\n",
        "[default]\nrequests = 0.5\n",
        f"a = {'[' * 5_000}",
        "nonsense",
    ],
)
def test_wrong_files_are_refused(tenants, text):
    with pytest.raises(InvalidArgumentError) as caught:
        tenants(text)
    assert caught.value.reason == "BAD_TENANTS_FILE"


def test_a_changed_file_is_read_again_unless_it_is_wrong(tenants, tmp_path, monkeypatch):
    monkeypatch.setattr(file_watcher, "_SETTLE_SECONDS", 0.0)  # it is complete at once
    book = tenants("[default]\nrows = 1\n")
    for text, rows in (("broken", 1), ("[default]\nrows = 2\n", 2)):
        (tmp_path / "tenants.toml").write_text(text)
        book._sections._next = 0.0  # it looks again
        assert book.limits("a").rows == rows


@given(st.text(min_size=1), st.text(min_size=1), st.binary(min_size=32, max_size=32))
def test_keys_of_tenants_differ(one, other, content_id):
    assert (key_of(one, content_id) == key_of(other, content_id)) == (one == other)
    assert len(key_of(one, content_id)) == 32
