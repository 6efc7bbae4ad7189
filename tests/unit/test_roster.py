"""Who is at work in the engine, and who may begin."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba")

from warpfit_server.engine.roster import (
    AT_WORK,
    MOST_PLACES,
    NEEDS,
    REVOKED,
    Roster,
    may_start,
    nobody_works,
)


def flag() -> np.ndarray:
    return np.zeros(1, np.uint8)


def test_what_python_runs_is_known_until_it_ends():
    roster, one, other = Roster(), flag(), flag()
    assert roster.is_idle
    roster.begin("lane 1", one)
    roster.begin("lane 2", other)
    assert not roster.is_idle
    assert not nobody_works(roster.board)
    assert [lane for lane, _ in roster.running()] == ["lane 1", "lane 2"]
    first, second = roster.flags()
    assert first[1] is one
    assert second[1] is other
    roster.end("lane 1")
    roster.end("lane 2")
    assert roster.is_idle
    assert nobody_works(roster.board)
    assert list(roster.flags()) == []


def test_evaluations_of_a_lane_are_told_apart():
    roster, one = Roster(), flag()
    roster.begin("lane", one)
    ((first, _),) = roster.flags()
    roster.end("lane")
    roster.begin("lane", one)
    ((second, _),) = roster.flags()
    assert first != second


def test_a_lane_that_compiled_code_serves_counts_while_it_is_at_work():
    roster, one = Roster(), flag()
    place = roster.reserve("tenant")
    place.occupy(one)
    assert roster.is_idle
    assert list(roster.flags()) == []
    place.words[AT_WORK] = 77
    assert not roster.is_idle
    assert not nobody_works(roster.board)
    ((evaluation, found),) = roster.flags()
    assert found is one
    place.words[AT_WORK] = 78
    assert next(roster.flags())[0] != evaluation
    place.words[AT_WORK] = 0
    place.leave()
    assert roster.is_idle


def test_places_run_out_and_come_back_clean():
    roster = Roster()
    places = [roster.reserve("tenant") for _ in range(MOST_PLACES)]
    assert len({place.number for place in places}) == MOST_PLACES
    assert roster.reserve("tenant") is None
    places[3].words[REVOKED] = 1
    places[3].leave()
    again = roster.reserve("tenant")
    assert again.number == places[3].number
    assert again.words[REVOKED] == 0


def at_work(needs: int = 1000, **tenants: int) -> tuple[Roster, dict[str, int]]:
    """A roster with so many at work, and another place for each tenant."""
    roster = Roster()
    for tenant, count in tenants.items():
        for _ in range(count):
            words = roster.reserve(tenant).words
            words[AT_WORK], words[NEEDS] = 1, needs
    return roster, {tenant: roster.reserve(tenant).number for tenant in tenants}


@pytest.mark.parametrize(
    ("tenants", "able"),
    [
        ({"a": 0}, {"a"}),
        ({"a": 15}, {"a"}),
        ({"a": 16}, set()),
        ({"a": 16, "b": 0}, {"b"}),
        ({"a": 16, "b": 10}, {"b"}),
        ({"a": 16, "b": 16}, set()),
        ({"a": 10, "b": 10, "c": 1}, {"a", "b", "c"}),
        ({"a": 12, "b": 12, "c": 8}, set()),
    ],
)
def test_a_tenant_that_floods_the_engine_does_not_keep_others_out(tenants, able):
    roster, places = at_work(**tenants)
    assert {tenant for tenant, number in places.items() if may_start(roster.board, number)} == able


@pytest.mark.parametrize(
    ("needs", "tenants", "able"),
    [
        (10_000_000, {"a": 0}, {"a"}),
        (10_000_000, {"a": 1, "b": 0}, {"b"}),
        (10_000_000, {"a": 1, "b": 1}, set()),
        (900_000, {"a": 2}, {"a"}),
        (900_000, {"a": 3}, set()),
        (150_000, {"a": 13}, {"a"}),
    ],
)
def test_little_work_waits_on_the_device(needs, tenants, able):
    roster, places = at_work(needs, **tenants)
    assert {tenant for tenant, number in places.items() if may_start(roster.board, number)} == able
