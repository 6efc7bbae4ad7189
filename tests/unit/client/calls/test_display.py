"""Results in a terminal and a notebook, and errors that point into programs."""

import dataclasses
import html
import pickle
import re

import numpy as np
import pytest

import warpfit.testing
from support.refusals import refused
from warpfit import Reason
from warpfit.display import TextTable, numbers
from warpfit.request import Tier, Timings

X = np.arange(1.0, 21.0).reshape(10, 2)


@pytest.fixture
def client():
    with warpfit.testing.client() as connected:
        yield connected


def test_fits_show_formulas_r2_and_standard_errors(client):
    data = client.upload(X, 2 * X[:, 0] + 1 + 0.1 * (-1) ** np.arange(10), dtype="float64")
    fit = client.optimize(data, ["p1*x1 + p2", "p1", "x1"], [[1.0, 0.0], [0.0], []])
    lines = str(fit).splitlines()
    assert len(lines) == 4
    header = "expression formula parameters R2 initial loss loss iterations reason"
    assert " ".join(lines[0].split()) == header
    _, covariance = np.polyfit(X[:, 0], data.dataset.target, 1, cov=True)
    slope, intercept = (f"± {error:.2g}" for error in np.sqrt(np.diag(covariance)))
    formula = r" +0 +(\S+) \* x1 \+ (\S+) +"
    numbers = rf"\1 {re.escape(slope)}, \2 {re.escape(intercept)} +0\.9999\d+ +\S+ +\S+ +1 +\w+$"
    assert re.match(formula + numbers, lines[1])
    assert len({len(line) for line in lines}) == 1
    residuals = data.dataset.target - client.evaluate(data, fit.formula(0))[:, 0]
    np.testing.assert_allclose(fit.r2[0], 1 - residuals.var() / data.dataset.target.var())
    page = fit._repr_html_()
    assert page.count("<tr>") == 4
    assert re.search(r"<td>\$\S+ \\cdot x_\{1\} \+ \S+\$</td>", page)


def test_a_fit_without_one_of_its_parameters_says_so(client):
    data = client.upload(X, 2 * X[:, 0])
    fit = client.optimize(data, ["p1*x1", "p1*x1 + p3"])
    assert str(fit).endswith("expression 1 has no p2: number parameters without gaps")
    assert client.optimize(data, ["p2*x1 + p1"]).hint == ""


@pytest.mark.parametrize(
    ("dtype", "remedy", "stalled", "what"),
    [
        ("float32", 'upload with dtype="float64"', 1, "1 search has"),
        ("float64", "other starts", 3, "3 searches have"),
        ("float64", "", 0, ""),
    ],
)
def test_fits_that_stalled_say_what_helps(client, dtype, remedy, stalled, what):
    data = client.upload(X, 2 * X[:, 0], dtype=dtype)
    fit = client.optimize(data, ["p1*x1"] * 4, [[1.0]] * 4)
    reasons = np.array([Reason.STALLED] * stalled + [Reason.STEP] * (4 - stalled), object)
    fit = dataclasses.replace(fit, reason=reasons)
    assert fit.hint == "" if not stalled else what in fit.hint and remedy in fit.hint
    assert fit.success.tolist() == [False] * stalled + [True] * (4 - stalled)
    assert str(fit).endswith(fit.hint)
    assert len(str(fit).splitlines()) == 5 + bool(stalled)
    assert not stalled or f"<p>{html.escape(fit.hint)}</p>" in fit._repr_html_()


def test_fits_of_all_starts_show_each_start(client):
    data = client.upload(X, 2 * X[:, 0], dtype="float64", names=("a", "b"))
    starts = [[[1.0], [3.0]], [[0.0], [5.0]]]
    fit = client.optimize(data, ["p1*a", "p1"], starts, all_starts=True, standard_errors=False)
    cells = [line.split()[:6] for line in str(fit).splitlines()[1:]]
    mean = f"{2 * X[:, 0].mean():.5g}"
    assert cells[0] == ["0", "0", "2", "*", "a", "2"]
    assert [row[:4] for row in cells[1:]] == [
        *(["1", "0", mean, mean], ["0", "1", "2", "*"], ["1", "1", mean, mean])
    ]
    assert fit.formula(1, 1).values[0] == fit.parameters[1][1][0]


@pytest.mark.parametrize("loss", ["sse", "mse", "rmse", "r2", "nmse"])
def test_r2_follows_from_every_loss_of_squares(client, loss):
    weights = np.arange(1.0, 11.0)
    data = client.upload(X, np.sqrt(X[:, 0]), weights, dtype="float64")
    fit = client.optimize(data, ["p1*x1"], [[1.0]], loss=loss, rows=(2, 9))
    np.testing.assert_allclose(fit.r2, client.evaluate(data, fit.formula(), loss="r2", rows=(2, 9)))
    assert client.optimize(data, ["p1*x1"], [[1.0]], loss="huber").r2 is None


def test_many_expressions_come_without_standard_errors_unless_asked_for(client):
    data = client.upload(X, X[:, 0], dtype="float64")
    assert client.optimize(data, ["p1"] * 21, [[1.0]] * 21).standard_errors is None
    fit = client.optimize(data, ["p1"] * 21, [[1.0]] * 21, standard_errors=True)
    assert len(fit.standard_errors) == 21
    assert str(fit).endswith("... and 1 more row")


def test_long_tables_are_cut_and_cells_are_escaped():
    table = TextTable(("a",), [("<b>",)] * 25)
    assert table.text().splitlines()[-1] == "... and 5 more rows"
    assert table.html().count("&lt;b&gt;") == 20
    assert "<b>" not in table.html()
    assert numbers([1.0, 2.123456789]) == "1, 2.1235"
    assert numbers(range(9)) == "0, 1, 2, 3, 4, 5, ..."


@pytest.mark.parametrize("call", ["evaluate", "optimize"])
def test_errors_of_the_server_point_into_the_expression(client, call):
    data = client.upload(X, X[:, 0], names=("age", "dose"))
    error = refused(
        "PARAMETER_OUT_OF_RANGE",
        lambda: getattr(client, call)(data, ["age", "sin(age) + 2*p2"], [[], [1.0]], loss="mse"),
    )
    *_, text, caret = str(error).splitlines()
    assert text.strip() == "sin(age) + 2*p2"
    assert text.index("p2") == caret.index("^")
    error = refused(r"x3\n +\^", lambda: getattr(client, call)(data, "age * x3", [], loss="mse"))
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)


def test_whatever_calls_return_prints_as_a_small_table(client):
    data = client.upload(np.tile(X, (50, 1)), np.tile(X[:, 0], 50))
    outputs = dict.fromkeys(("values", "gradient", "jacobian", "reductions", "correlation"), True)
    answer = client.run(data, ["p1*x1", "x2"] * 40, [[1.0], []] * 40, loss="mse", **outputs)
    fit = client.optimize(data, ["p1*x1", "x2"] * 40, [[1.0], []] * 40)
    for shown in (answer, answer.reductions, fit, client.info(), answer.timings):
        assert repr(shown) == str(shown)
        assert len(repr(shown)) < 4_000
        assert repr(shown).count("\n") <= 23
        assert shown._repr_html_().startswith("<table>")
    assert re.search(r"losses +80 +float64 +0, 1, ", repr(answer))
    assert "80 of 500 x 1" in repr(answer)
    assert "NumPy reference" in repr(client.info())
    timings = Timings(decode=1500, compute=2_000_000, tier=Tier.COMPILED, cache_hits=3)
    assert re.search(r"\n *compute +2000\.0\n[\s\S]*tier compiled, cache hits 3$", str(timings))


def test_clients_show_their_address_and_no_token():
    with warpfit.connect("127.0.0.1:1", token="secret", tls=True) as client:
        assert repr(client) == "<Client of 127.0.0.1:1 with TLS>"
    client = warpfit.AsyncClient(warpfit.connect(["a:1", "b:2"], token="secret", tls=False))
    assert repr(client) == "<AsyncClient of a:1, b:2>"


@pytest.mark.parametrize("kind", [warpfit.Client, warpfit.AsyncClient])
@pytest.mark.parametrize("given", ["127.0.0.1:50871", ["a:1", "b:2"], None])
def test_a_client_is_not_made_of_an_address(kind, given):
    error = refused(r"Use warpfit\.connect", kind, given)
    assert ("_async" in error.remedy) == (kind is warpfit.AsyncClient)
    assert not isinstance(given, str) or given in error.remedy
