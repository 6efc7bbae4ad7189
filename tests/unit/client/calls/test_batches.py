"""Batches from programs and parameters, and the cache of a client's last batches."""

import math

import numpy as np
import pytest

from warpfit import parse
from warpfit.calls import arguments
from warpfit.calls.arguments import PopulationCache
from warpfit.errors import InvalidArgumentError
from warpfit.expressions.real_numbers import ParameterVectors

TEXTS = ["x1 + p1", "sin(x2)", "x1*x2 - 3", "p1/p2"]


def parsed(*texts):
    return [parse(text) for text in texts]


@pytest.mark.parametrize("place", range(4))
def test_the_same_programs_are_joined_once_and_others_are_another_batch(place):
    cache, programs = PopulationCache(), parsed(*TEXTS)
    first = cache.of(programs)
    assert list(first) == programs
    assert cache.of(list(programs)) is first
    other = [*programs[:place], parse("exp(x1)"), *programs[place + 1 :]]
    assert list(cache.of(other)) == other
    assert list(cache.of(programs[:3])) == programs[:3]
    programs[place] = parse("exp(x1)")  # in the list that was cached
    assert list(cache.of(programs)) == programs


def test_only_the_last_small_batches_are_kept(monkeypatch):
    cache, first = PopulationCache(), parsed(*TEXTS)
    batch = cache.of(first)
    for index in range(arguments._MOST_BATCHES - 1):
        cache.of(parsed(f"x{index + 1}", "x2"))
    assert cache.of(first) is batch
    cache.of(parsed("x1", "x3"))
    assert cache.of(first) is not batch
    monkeypatch.setattr(arguments, "_MOST_TOKENS", 3)
    large = parsed("x1 + x2 + x3")
    assert cache.of(large) is not cache.of(large)


@pytest.mark.parametrize(
    ("entries", "counts", "numbers", "count", "leading_axis"),
    [
        (None, [0, 0], [], 1, False),
        ([[], [1, 2]], [0, 2], [1, 2], 1, False),
        ([np.array([1], np.float32), (2, 3)], [1, 2], [1, 2, 3], 1, False),
        ([np.array([], object), np.array([True])], [0, 1], [1], 1, False),
        ([[1.0], ["a"]], None, None, None, None),
        ([[1.0], [[1.0], [1.0, 2.0]]], None, None, None, None),
        (["", "1"], None, None, None, None),
        ([[1.0], "2"], None, None, None, None),
        ([[1.5], [2, math.nan]], [1, 2], [1.5, 2, math.nan], 1, False),
        ([[1.5], [2, None]], None, None, None, None),
        ([range(2), np.arange(3)], [2, 3], [0, 1, 0, 1, 2], 1, False),
        ([[[1], [2]], [[3], [4]]], [1, 1], [1, 2, 3, 4], 2, True),
        ([[[1], [2]], [3]], [1, 1], [1, 2, 3, 3], 2, True),
        ([np.ones((1, 2)), np.ones((1, 0))], [2, 0], [1, 1], 1, True),
        ([1.0, 2.0], None, None, None, None),
        ([[1], np.ones((1, 1, 1))], None, None, None, None),
        ([[np.array([1]), np.array([2])], [[3], [4]]], [1, 1], [1, 2, 3, 4], 2, True),
        ([[1, np.float64(2)], [10**30]], [2, 1], [1, 2, 1e30], 1, False),
        ([[1], [10**400]], None, None, None, None),
        ([], [], [], 1, False),
    ],
)
def test_parameter_vectors_of_every_kind(entries, counts, numbers, count, leading_axis):
    if counts is None:
        with pytest.raises(InvalidArgumentError) as caught:
            ParameterVectors.of(2, entries)
        if entries == [[1.0], ["a"]]:
            assert (caught.value.reason, caught.value.expression) == ("NOT_NUMBERS", 1)
        return
    vectors = ParameterVectors.of(2 if entries is None else len(entries), entries)
    assert vectors.counts.tolist() == counts
    assert vectors.counts.dtype == np.uint32
    np.testing.assert_array_equal(vectors.numbers, numbers)
    assert vectors.numbers.dtype == np.float64
    assert (vectors.count, vectors.leading_axis) == (count, leading_axis)
