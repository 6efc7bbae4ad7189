"""What a client keeps between calls: the tokens of its last batches, and parameter vectors."""

import threading

import numpy as np
import pytest

from warpfit import Program, parse
from warpfit.calls import token_cache
from warpfit.calls.token_cache import RecentTokens
from warpfit.errors import InvalidArgumentError
from warpfit.expressions.vectors import Vectors

TEXTS = ["x1 + p1", "sin(x2)", "x1*x2 - 3", "p1/p2"]


def batch(*texts):
    return [parse(text) for text in texts]


def assert_joined(tokens, programs):
    np.testing.assert_array_equal(tokens.codes, np.concatenate([p.codes for p in programs]))
    np.testing.assert_array_equal(tokens.values, np.concatenate([p.values for p in programs]))
    assert tokens.lengths.tolist() == [len(program) for program in programs]


def test_the_same_programs_are_joined_once():
    kept, programs = RecentTokens(), batch(*TEXTS)
    first = kept.of(programs)
    assert_joined(first, programs)
    assert kept.of(list(programs)) is first


@pytest.mark.parametrize("place", range(4))
def test_another_program_makes_another_batch(place):
    kept, programs = RecentTokens(), batch(*TEXTS)
    kept.of(programs)
    other = [*programs[:place], parse("exp(x1)"), *programs[place + 1 :]]
    assert_joined(kept.of(other), other)
    assert_joined(kept.of(programs[:3]), programs[:3])


def test_a_list_that_changes_later_is_not_what_was_kept():
    kept, programs = RecentTokens(), batch(*TEXTS)
    kept.of(programs)
    programs[1] = parse("exp(x1)")
    assert_joined(kept.of(programs), programs)


def test_only_the_last_batches_are_kept(monkeypatch):
    kept, first = RecentTokens(), batch(*TEXTS)
    tokens = kept.of(first)
    for index in range(token_cache._BATCHES - 1):
        kept.of(batch(f"x{index + 1}", "x2"))
    assert kept.of(first) is tokens
    kept.of(batch("x1", "x3"))
    assert kept.of(first) is not tokens
    monkeypatch.setattr(token_cache, "_TOKENS", 3)
    large = batch("x1 + x2 + x3")
    assert kept.of(large) is not kept.of(large)


def test_no_programs_are_no_batch():
    with pytest.raises(InvalidArgumentError) as caught:
        RecentTokens().of([])
    assert caught.value.reason == "EMPTY_BATCH"


def test_threads_share_it():
    kept, failures = RecentTokens(), []
    batches = [batch(f"x{index} + p1", "x1") for index in range(1, 13)]

    def work(mine):
        try:
            for _ in range(200):
                assert_joined(kept.of(mine), mine)
        except AssertionError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in batches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize(
    ("entries", "counts", "numbers", "count", "tables"),
    [
        (None, [0, 0], [], 1, False),
        ([[], [1, 2]], [0, 2], [1, 2], 1, False),
        ([np.array([1], np.float32), (2, 3)], [1, 2], [1, 2, 3], 1, False),
        ([np.array([], object), np.array([True])], [0, 1], [1], 1, False),
        ([[1.0], ["a"]], None, None, None, None),
        ([[1.0], [[1.0], [1.0, 2.0]]], None, None, None, None),
        (["", "1"], None, None, None, None),
        ([range(2), np.arange(3)], [2, 3], [0, 1, 0, 1, 2], 1, False),
        ([[[1], [2]], [[3], [4]]], [1, 1], [1, 2, 3, 4], 2, True),
        ([[[1], [2]], [3]], [1, 1], [1, 2, 3, 3], 2, True),
        ([np.ones((1, 2)), np.ones((1, 0))], [2, 0], [1, 1], 1, True),
        ([1.0, 2.0], None, None, None, None),
        ([[1], np.ones((1, 1, 1))], None, None, None, None),
    ],
)
def test_vectors_of_every_kind(entries, counts, numbers, count, tables):
    if counts is None:
        with pytest.raises(InvalidArgumentError):
            Vectors.of(2, entries)
        return
    vectors = Vectors.of(2, entries)
    assert vectors.counts.tolist() == counts
    assert vectors.counts.dtype == np.uint32
    assert vectors.numbers.tolist() == numbers
    assert vectors.numbers.dtype == np.float64
    assert (vectors.count, vectors.tables) == (count, tables)


def test_the_expression_whose_parameters_are_no_numbers_is_named():
    with pytest.raises(InvalidArgumentError) as caught:
        Vectors.of(2, [[1.0], ["a"]])
    assert (caught.value.reason, caught.value.expression) == ("NOT_NUMBERS", 1)


def test_programs_from_unaligned_and_strided_arrays():
    codes = np.array([1, 9, 2, 9, 16, 9], np.uint8)[::2]
    values = np.array([0.0, 5.0, 0.0, 5.0, 0.0, 5.0])[::2]
    assert Program(codes, values) == Program([1, 2, 16], [0, 0, 0])
