"""What is kept of batches that come again."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from warpfit.expressions.workload import thesis_mix
from warpfit.ir import Batch
from warpfit.parse import parse
from warpfit_server.engine import lowering_cache
from warpfit_server.engine.lowering_cache import LoweringCache


@pytest.fixture
def made():
    """Batches of which something was made."""
    return []


@pytest.fixture
def make(made):
    def make(batch):
        made.append(batch)
        return batch.codes.sum(), batch.values.tobytes()

    return make


def of(*texts, parameters=None):
    programs = [parse(text) for text in texts]
    vectors = [np.full(p.parameters, 1.0) for p in programs] if parameters is None else parameters
    return Batch.of(programs, vectors)


def test_programs_are_kept_from_the_second_time_on(made, make):
    kept = LoweringCache()
    for number in range(5):
        batch = of("x1 + p1", parameters=[[float(number)]])
        assert kept.by_programs(batch, (), make) == make(batch)
    first, second = made[0], made[2]
    assert len(made) == 2 + 5
    assert len(first.parameters) == 1
    assert len(second.parameters) == 0, "in memory of its own"
    assert len(kept) == 1


def test_what_is_kept_does_not_live_in_the_lanes_memory(make):
    kept, memory = LoweringCache(), of("x1 * 2.0").copy()
    results = []
    for constant in (2.0, 2.0, 3.0, 2.0, 3.0, 2.0):
        memory.values[memory.values > 1] = constant
        results.append(kept.by_programs(memory, (), make)[1])
    assert [np.frombuffer(one).max() for one in results] == [2.0, 2.0, 3.0, 2.0, 3.0, 2.0]


@pytest.mark.parametrize(
    "other",
    [
        of("x1 * 3.0", "x2"),
        of("x2 * 2.0", "x2"),
        of("x1 + 2.0", "x2"),
        of("x1 * 2.0 + 1.0", "x2"),
        of("x1 * p1", "x2"),
        of("x1 * 2.0"),
        of("x1 * -0.0", "x2"),
    ],
)
def test_other_programs_are_told_apart_also_with_the_same_hash(monkeypatch, make, other):
    monkeypatch.setattr(lowering_cache, "hash", lambda _: 7, raising=False)
    kept, batch = LoweringCache(), of("x1 * 2.0", "x2")
    for _ in range(3):
        for one in (batch, other, of("x1 * 0.0", "x2")):
            assert kept.by_programs(one, (), make) == make(one)


def test_needs_tell_apart(made, make):
    kept, batch = LoweringCache(), of("x1")
    for need in ("a", "b") * 3:
        kept.by_programs(batch, (need,), make)
        kept.by_arrays(batch, (need,), make)
    assert len(made) == 4 + 2


def test_the_same_arrays_are_found_at_once(made, make):
    kept, batch = LoweringCache(), of("x1 + p1")
    for scale in (1.0, 2.0, 3.0):
        kept.by_arrays(replace(batch, parameters=scale * batch.parameters), (), make)
    assert len(made) == 1
    kept.by_arrays(of("x1 + p1"), (), make)
    assert len(made) == 2


def test_what_is_kept_is_limited_by_its_tokens(monkeypatch, made, make):
    monkeypatch.setattr(lowering_cache, "_MOST_TOKENS", 1000)
    monkeypatch.setattr(lowering_cache, "_LEAST_TOKENS", 1)
    kept = LoweringCache()
    batches = [Batch.of(*thesis_mix(seed, 10)) for seed in range(20)]
    for batch in batches:
        kept.by_arrays(batch, (), make)
    assert 0 < sum(tokens for tokens, _ in kept._kept.values()) <= 1000
    large = Batch.of(*thesis_mix(1, 100))
    for _ in range(3):
        assert kept.by_programs(large, (), make) == make(large)
    assert len(large.codes) not in [tokens for tokens, _ in kept._kept.values()]


def test_a_fit_of_any_size_is_prepared_once(monkeypatch, made, make):
    """Lowering a large batch anew for every pass takes longer than to run it."""
    monkeypatch.setattr(lowering_cache, "_MOST_TOKENS", 1000)
    monkeypatch.setattr(lowering_cache, "_LEAST_TOKENS", 1)
    kept, large = LoweringCache(), Batch.of(*thesis_mix(1, 100))
    assert len(large.codes) > 1000
    for scale in (1.0, 2.0, 3.0):
        kept.by_arrays(replace(large, parameters=scale * large.parameters), (), make)
    assert len(made) == 1
    kept.by_arrays(of("x1"), (), make)
    assert len(kept) == 1, "it takes all the room there is"


def test_small_batches_count_for_more_than_their_tokens(make):
    kept = LoweringCache()
    batches = [of("x1") for _ in range(300)]
    for batch in batches:
        kept.by_arrays(batch, (), make)
    assert len(kept) == 200


def test_what_was_made_of_arrays_goes_with_them():
    """A fit's batches never come again, and what an engine makes of them is large."""
    kept, batch = LoweringCache(), of("x1 + p1")
    for need in "ab":
        assert kept.by_arrays(batch, (need,), lambda one: len(one.codes)) == 3
    assert len(kept) == 2
    parameters = replace(batch, parameters=2.0 * batch.parameters)
    del batch
    assert len(kept) == 2, "its arrays live in another batch"
    del parameters
    gc.collect()
    assert len(kept) == 0


def test_threads(make):
    kept, batches = LoweringCache(), [Batch.of(*thesis_mix(seed, 5)) for seed in range(10)]

    def work(number):
        batch = batches[number % 10]
        return kept.by_programs(batch, (), make) == make(batch)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(500)))
