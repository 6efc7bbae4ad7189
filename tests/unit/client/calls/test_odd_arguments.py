"""Arguments of every kind: without axes, order or whole characters; and batches made of them."""

import math

import numpy as np
import pandas as pd
import pytest

import warpfit
import warpfit.testing
from warpfit import parse
from warpfit.calls import arguments
from warpfit.calls.arguments import PopulationCache, build_fit
from warpfit.calls.proposals import Proposal, Proposals
from warpfit.errors import InvalidArgumentError
from warpfit.expressions.real_numbers import ParameterVectors

X = np.random.default_rng(0).uniform(1.0, 2.0, (30, 2))
HALF = "a\ud800b"


@pytest.fixture(scope="module")
def client():
    return warpfit.testing.client()


@pytest.fixture(scope="module")
def data(client):
    return client.upload(X, X[:, 0])


def test_an_array_without_axes_is_its_element(client, data):
    wanted = client.evaluate(data, "x1")
    for text in (np.array("x1"), np.array("x1", dtype=object)):
        np.testing.assert_array_equal(client.evaluate(data, text), wanted)
    found = client.evaluate(data, ["p1*x1"], [np.array(2.0)])
    np.testing.assert_array_equal(found, 2.0 * wanted.reshape(-1, 1))
    for number in (2.0, np.array(2.0)):
        with pytest.raises(warpfit.InvalidArgumentError, match=r"no vector of numbers: 2\.0"):
            client.evaluate(data, ["p1*x1"], number)
    settings = {"bounds": (np.array(0.0), np.array(3.0)), "fixed": np.array(True)}
    fit = build_fit(data, ["p1*x1 + p2"], None, settings).settings
    assert fit.lower.tolist() == [0.0, 0.0]
    assert fit.upper.tolist() == [3.0, 3.0]
    assert fit.fixed.tolist() == [True, True]
    named = client.upload(pd.DataFrame(X, columns=["a", "b"]), np.array("b"))
    assert named.names == ("a",)
    assert client.upload(X, X[:, 0], names=None).content_id == data.content_id


@pytest.mark.parametrize(
    ("fixed", "kept"),
    [
        *((fixed, [False, True]) for fixed in ([False, True], [0, 1], [[None, True]])),
        *((True, [True, True]), ([True], [True, True]), ([None], [False, False])),
        *((fixed, None) for fixed in ([1], [0], 1, [2], ["p2"], "p2", [0.5, 0])),
    ],
)
def test_parameters_are_fixed_by_truth_values_and_not_by_indices_or_names(fixed, kept):
    with warpfit.testing.client() as client:
        data = client.upload(X, X[:, 0])
        if kept is not None:
            settings = build_fit(data, ["p1*x1 + p2"], None, {"fixed": fixed}).settings
            assert settings.fixed.tolist() == kept
            return
        with pytest.raises(InvalidArgumentError, match="Give a truth value for each parameter"):
            client.optimize(data, ["p1*x1 + p2"], fixed=fixed)


@pytest.mark.parametrize("odd", [np.array(1.0), np.array(None), np.array(2)])
def test_an_element_that_is_no_expression_is_refused(client, data, odd):
    for call in (client.evaluate, client.optimize, client.simplify):
        with pytest.raises(warpfit.InvalidArgumentError):
            call(data, odd)
    (answer,) = client.propose(data, odd)
    assert answer.error is not None


def test_names_are_texts_with_an_order(client):
    texts = np.array(["a", "b"])
    for names in (["a", "b"], texts, iter("ab"), {"a": 1, "b": 2}.keys(), texts.astype(object)):
        assert client.upload(X, X[:, 0], names=names).names == ("a", "b")
    for names in (
        *({"a": 1, "b": 2}, {"a", "b"}, {"a": 1, "b": 2}.values(), np.array("a"), 3, [1, 2]),
        *([b"a", b"b"], [None, "b"], np.array([["a", "b"]]), "ab"),
    ):
        for take in (
            lambda names: client.upload(X, X[:, 0], names=names),
            lambda names: warpfit.parse("a", names),
            warpfit.parse("x1 + x2").latex,
            warpfit.parse("x1 + x2").to_numpy,
        ):
            with pytest.raises(warpfit.InvalidArgumentError, match="names is"):
                take(names)


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.upload(X, names=["a", HALF]),
        lambda client: client.upload(pd.DataFrame(X, columns=pd.Index(["a", HALF], dtype=object))),
        lambda client: client.upload(pd.DataFrame(X, columns=["a", "b"]), HALF),
        lambda client: client.upload(pd.DataFrame(X, columns=["a", "b"]), x=[HALF]),
        lambda client: client.upload(f"/tmp/{HALF}.parquet"),
        lambda client: client.open(HALF),
        lambda client: client.open("a.parquet", y=HALF),
        lambda client: client.evaluate(client.upload(X, X[:, 0]), HALF),
        lambda client: client.evaluate(client.upload(X, X[:, 0]), "x1", loss=HALF),
        lambda client: warpfit.parse("x1", [HALF]) and warpfit.parse(HALF),
        lambda client: warpfit.parse("q", [HALF]),
        lambda client: warpfit.connect(HALF),
        lambda client: warpfit.connect("127.0.0.1:1", token=HALF),
    ],
)
def test_half_a_character_is_refused_with_its_place(client, call):
    with pytest.raises((warpfit.InvalidArgumentError, warpfit.ParseError)) as caught:
        call(client)
    assert caught.value.remedy
    str(caught.value).encode()  # it can be printed
    assert r"a\ud800b" in str(Proposals([Proposal(HALF)]))


# ----------------------------------------------------------------------------------------- batches


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
        ([[1.0], "2"], None, None, None, None),
        ([[1.5], [2, math.nan]], [1, 2], [1.5, 2, math.nan], 1, False),
        ([[[1], [2]], [3]], [1, 1], [1, 2, 3, 3], 2, True),
        ([np.ones((1, 2)), np.ones((1, 0))], [2, 0], [1, 1], 1, True),
        ([1.0, 2.0], None, None, None, None),
        ([[1], np.ones((1, 1, 1))], None, None, None, None),
        ([[np.array([1]), np.array([2])], [[3], [4]]], [1, 1], [1, 2, 3, 4], 2, True),
        ([[1, np.float64(2)], [10**30]], [2, 1], [1, 2, 1e30], 1, False),
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
