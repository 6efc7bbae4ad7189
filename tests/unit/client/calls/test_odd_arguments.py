"""Arrays without axes, half characters, and names without an order, wherever they are given."""

import numpy as np
import pandas as pd
import pytest

import warpfit
import warpfit.testing
from warpfit.calls.arguments import build_fit
from warpfit.calls.proposals import Proposal, Proposals

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
