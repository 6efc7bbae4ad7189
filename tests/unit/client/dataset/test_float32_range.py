"""Expressions and data that float32 cannot hold: taken in float64 by default, warned of by name."""

import warnings
from functools import partial

import numpy as np
import pytest

import warpfit
import warpfit.testing
from warpfit.calls.dataset_handle import warn_of_range
from warpfit.request import Result

X = np.linspace(1.0, 3.0, 50)[:, None]
#: In SI units, at 1e14 Hz for a row of 1.
PLANCK = "2*6.62607015e-34*(1e14*x1)^3/299792458^2/(exp(6.62607015e-20*x1/(1.380649e-23*p1)) - 1)"


@pytest.fixture(scope="module")
def client():
    return warpfit.testing.client()


@pytest.mark.parametrize(
    ("text", "parameters", "named"),
    [
        ("1e39*x1/1e39", [], r"1e\+39"),
        ("x1 + 1e-50*(x1/1e-50)", [], "1e-50"),
        ("x1*1.380649e-23^4/1e-91", [], r"1\.380649e-23 \^ 4"),
        ("(1e30*x1)^2/1e60", [], r"of expression 0, which reaches 1e\+60"),
        ("p1*x1/p2", [1e40, 1e40], "p1"),
        (PLANCK, [4000.0], r"e-34|\^ 3"),
    ],
)
def test_expressions_are_warned_of_by_name(client, text, parameters, named):
    single = client.upload(X, X[:, 0], dtype="float32")
    with pytest.warns(warpfit.PrecisionWarning, match=named):
        client.evaluate(single, [text], [parameters], loss="mse")
    double = client.upload(X, X[:, 0], dtype="float64")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        client.evaluate(double, [text], [parameters], loss="mse")


def test_what_float32_computes_right_is_not_warned_of(client):
    data = client.upload(X, X[:, 0], dtype="float32")
    texts = ["x1 + 1e-30", "x1*1e20 - 1e15", "exp(-x1*1e12)", "1/x1", "1000*x1"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        client.evaluate(data, texts, loss="mse")


def warned_of(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("kind", ["losses", "values"])
@pytest.mark.parametrize(
    "text", ["exp(100*x1)/exp(99*x1)", "inv(exp(-60*x1)*exp(-60*x1))", "log(exp(p1*x1))"]
)
def test_results_that_only_float32_makes_infinite_are_warned_of_once(client, text, kind):
    """What an engine of float32 answers; the one of these tests computes in float64."""
    texts = ["log(-x1)", "x1", text]
    batch = warpfit.Batch.of([*map(warpfit.parse, texts)], [[], [], [100.0] * ("p1" in text)])
    odd = np.array([[np.nan], [1.0], [np.inf]])

    def answer(rows):
        own = odd[rows] if kind == "losses" else np.repeat(odd[rows], 50, axis=1)[:, None]
        return Result(**{kind: own})

    data = client.upload(X, X[:, 0], dtype="float32")
    few = texts[:2], batch[:2], answer(slice(0, 2))
    for _ in range(20):  # what float64 cannot compute either is no reason
        assert warned_of(lambda: data.warn_of_range(*few)) == []
    whole = texts, batch, answer(slice(0, 3))
    for population in (list(batch), batch, texts * 4):  # nobody has written these
        given = (population, *whole[1:])
        assert warned_of(partial(data.warn_of_range, *given)) == []
    (found,) = warned_of(lambda: data.warn_of_range(*whole))
    assert "of expression 2, which reaches" in found
    assert 'dtype="float64"' in found
    assert warned_of(lambda: data.warn_of_range(*whole)) == []
    double = client.upload(X, X[:, 0], dtype="float64")
    assert warned_of(lambda: double.warn_of_range(*whole)) == []


def test_only_what_a_person_wrote_is_looked_at_and_not_for_ever(client, monkeypatch):
    looked = []
    monkeypatch.setattr(
        "warpfit.calls.dataset_handle.warn_of_range", lambda *given: looked.append(len(given[2]))
    )
    data = client.upload(X, X[:, 0], dtype="float32")
    odd = warpfit.parse("log(-1e30*x1)")
    batch = warpfit.Batch.of([odd], [[]])
    for population in (["log(-x1)"] * 11, [odd], odd, warpfit.Population.of([odd]), batch):
        client.evaluate(data, population, loss="mse")
        client.evaluate(data, population)
        client.optimize(data, population)
    assert looked == []
    for _ in range(11):
        client.evaluate(data, ("log(-x1)",) * 3, loss="mse")
    assert looked == [3] * 10  # thirty expressions
    other = client.upload(X + 1.0, X[:, 0], dtype="float32")
    for _ in range(110):
        client.evaluate(other, "x1", loss="mse")
    assert looked[10:] == [0] * 100


def test_suspects_are_looked_at_whatever_their_numbers_are(client):
    data = client.upload(1e8 * X, X[:, 0], dtype="float32")
    batch = warpfit.Batch.of([warpfit.parse(t) for t in ("x1", "p1*x1^5/x1^4")], [[], [1.0]])
    with pytest.warns(warpfit.PrecisionWarning, match=r"x1 \^ 5 of expression 1"):
        warn_of_range(batch, data.dataset, [0, 1])


@pytest.mark.parametrize(
    ("x", "y", "wanted"),
    [
        (X, X[:, 0], "float32"),
        (1e14 * X, X[:, 0], "float64"),
        ((1e14 * X).astype(np.float32), X[:, 0], "float64"),
        (np.full((50, 1), 1e-50), X[:, 0], "float64"),
        (1.7e9 + X, X[:, 0], "float64"),
        (np.zeros((50, 1)), X[:, 0], "float32"),
    ],
)
def test_the_default_type_is_chosen_by_the_numbers(client, x, y, wanted):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert client.upload(x, y).layout.dtype == wanted
        assert client.upload(x, y, np.full(50, 1e-12)).layout.dtype == wanted


def test_integers_that_float64_rounds_are_warned_of(client):
    for large in (
        2**60 + np.arange(0, 300, 3),
        2**60 + np.arange(3),  # one number in float64
        np.uint64(2**64 - 1) - np.arange(3, dtype=np.uint64),
    ):
        with pytest.warns(
            warpfit.PrecisionWarning, match=r"float64 loses digits of x1.*spans (2|3e\+02)\)"
        ):
            client.upload(large[:, None])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        client.upload((2**60 + 1024 * np.arange(100))[:, None])
    with pytest.warns(warpfit.PrecisionWarning, match="float32 loses digits of x1"):
        client.upload(np.full((3, 1), 1e-50), dtype="float32")
