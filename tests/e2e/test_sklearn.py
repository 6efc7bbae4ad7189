"""The scikit-learn estimators against a real server: laws, templates, groups and odd data."""

import csv
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

import warpfit
from support.servers.server import ServerProcess
from warpfit.cli.main import main
from warpfit.errors import InvalidArgumentError, UnavailableError
from warpfit.expressions.language import to_text

sklearn = pytest.importorskip("sklearn", minversion="1.6")

from sklearn.base import clone  # noqa: E402
from sklearn.exceptions import NotFittedError  # noqa: E402
from sklearn.model_selection import GridSearchCV, cross_val_score  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import StandardScaler  # noqa: E402
from sklearn.utils.estimator_checks import check_estimator  # noqa: E402

from warpfit.sklearn import (  # noqa: E402
    ParameterOptimizer,
    SearchWarning,
    SymbolicClassifier,
    SymbolicRegressor,
    SymbolicTransformer,
)
from warpfit.sklearn.equations import COLUMNS, selected  # noqa: E402
from warpfit.sklearn.target_search import Progress  # noqa: E402

#: Operators that are enough for the law; searching with all of them takes three times as long.
FEW = ("+", "*", "/")
#: Of searches that are short; to simplify takes longer than they do.
SHORT = {"population": 30, "generations": 1, "operators": FEW, "simplify": False}
#: Of searches with all operators, that simplify.
USUAL = {"population": 50, "generations": 1}
#: Of searches that find a law.
LONG = {"operators": (*FEW, "square", "sqrt"), "generations": 40, "simplify": False}
reference = warpfit.expressions.reference.evaluate_program


@pytest.fixture
def search(server: ServerProcess):
    """Make estimators that search for a short time, unless other settings are given."""
    seeded = {"address": server.address, "random_state": 0}
    return lambda base=SHORT, **changes: SymbolicRegressor(**{**seeded, **base, **changes})


def noisy(X, deviation=0.1):
    return law(X) + np.random.default_rng(5).normal(0, deviation, len(X))


def law(X):
    return 1.5 * X[:, 0] ** 2 / X[:, 1] + 0.25


def points(rows=300, seed=0):
    return np.random.default_rng(seed).uniform(1, 4, (rows, 3))


def table_of(X):
    return pytest.importorskip("pandas").DataFrame(X, columns=["a", "b", "c"])


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(k, marks=pytest.mark.thorough)
        for k in ("regressor", "classifier", "transformer")
    ]
    + ["optimizer"],
)
def test_scikit_learns_own_checks(search, server: ServerProcess, kind):
    """Those of `check_estimator`; none is expected to fail."""
    small = search(population=4, operators=("mul",), random_state=None)
    estimator = {"classifier": SymbolicClassifier(small), "transformer": SymbolicTransformer(small)}
    estimator |= {"optimizer": ParameterOptimizer(address=server.address), "regressor": small}
    results = Counter(each["status"] for each in check_estimator(estimator[kind], on_skip=None))
    assert results.keys() <= {"passed", "skipped"}
    assert results["passed"] > 40


def test_formulas_tell_classes_and_are_features(search):
    X = table_of(points(200))
    odds = 3.0 * (X.a * X.b - 5.0)
    chance = 1.0 / (1.0 + np.exp(-odds))
    y = np.where(np.random.default_rng(0).uniform(size=200) < chance, "yes", "no")
    model = SymbolicClassifier(search(population=60)).fit(X, y)
    assert model.classes_.tolist() == ["no", "yes"]
    assert np.corrcoef(model.predict_proba(X)[:, 1], chance)[0, 1] > 0.98
    assert model.score(X, y) > 0.85
    assert "a" in model.expression_
    maker = SymbolicTransformer(search(), n_components=3).set_output(transform="pandas")
    features = maker.fit_transform(X, odds)
    assert features.columns.tolist() == maker.get_feature_names_out().tolist()
    assert np.abs(np.corrcoef(features.T) - np.eye(3)).max() < 0.99
    assert abs(np.corrcoef(features.iloc[:, 0], odds)[0, 1]) > 0.999999
    with pytest.raises(InvalidArgumentError, match="n_components"):
        SymbolicTransformer(search(), n_components=0).fit(X, odds)


def test_a_law_is_found_and_written_in_the_names_of_the_columns(server: ServerProcess):
    X, fresh = points(), points(seed=1)
    model = SymbolicRegressor(address=server.address, random_state=3).fit(table_of(X), law(X))
    np.testing.assert_allclose(model.predict(table_of(fresh)), law(fresh), rtol=1e-6)
    assert "a" in model.expression_
    assert "c" not in model.expression_
    program = warpfit.parse(model.expression_, ("a", "b", "c"))
    np.testing.assert_allclose(reference(program, fresh.T), law(fresh), rtol=1e-6)
    assert model.latex()


def test_equations_are_chosen_by_criterion_or_index_and_leave_as_other_forms(search):
    sympy = pytest.importorskip("sympy")
    X, y = table_of(points(100)), noisy(points(100))
    model = search().fit(X, y)
    table, front = model.equations_, model.front_
    assert list(table) == front
    frame = table.to_pandas()
    assert frame.equation.tolist() == [equation.equation for equation in front]
    assert frame.r2_held_out.max() > 0.95
    for equation in front:
        error = model.predict(X, front.index(equation)) - y
        assert equation.r2 == pytest.approx(1 - np.mean(error**2) / np.var(y))
    assert "held out" in str(table)
    assert f"${front[-1].latex}$" in table._repr_html_().replace("&lt;", "<")
    for criterion, chosen in {
        "accuracy": front[-1],
        "description_length": min(front, key=lambda equation: equation.choice_length),
        "score": max(front, key=lambda equation: equation.score),
    }.items():
        assert model.set_params(model_selection=criterion).program() == chosen.program
    assert model.program(-1) == front[-1].program
    formula = model.sympy(-1)
    assert formula.free_symbols <= set(sympy.symbols("a b c"))
    row = dict(zip("abc", X.iloc[0], strict=True))
    assert float(formula.evalf(subs=row)) == pytest.approx(model.predict(X[:1], index=-1)[0])
    axes = model.plot_front()
    assert (axes.get_yscale(), axes.get_legend()) == ("log", None)  # which would cover points
    assert to_text(model.program(), list("abc"), 4)[:9] in axes.get_title()
    assert model.plot_fit(X, y).lines
    with pytest.raises(InvalidArgumentError, match="equation 99"):
        model.predict(X, index=99)
    with pytest.raises(InvalidArgumentError, match="Give an index from 0"):
        model.sympy(1.0)


@pytest.mark.parametrize(("loss", "unit"), [("nmse", 1e-9), ("rmse", 1e160)])
def test_a_search_and_a_proposal_have_the_same_description_length(search, client, loss, unit):
    """Whatever the loss, weights and the unit of the target are."""
    random = np.random.default_rng(4)
    X, w = random.uniform(1, 3, (120, 2)), random.uniform(0.5, 2.0, 120)
    y = (X[:, 0] * 2.5 + X[:, 1] + random.normal(0, 0.1, 120)) * unit
    model = search(loss=loss).fit(X, y, w)
    data = client.upload(X, y, w, dtype="float64")
    formulas = [equation.program for equation in model.front_]
    found = client.propose(data, formulas, held_out=0.25)
    for equation, proposal in zip(model.front_, found, strict=True):
        if np.isfinite(proposal.description_length):  # squares may overflow
            length = pytest.approx(proposal.description_length, rel=1e-6, abs=1e-6)
            assert equation.description_length == length
    assert unit == 1e160 or np.isfinite([each.description_length for each in found]).all()


def test_monotonicity_holds_in_every_row(search):
    X = points(100)
    y = np.sin(3.0 * X[:, 0]) - X[:, 1] ** 2 + 0.5 * X[:, 0]
    signs = {"x1": "increasing", "x2": "decreasing"}
    model = search(constraints={"monotonic": signs}, population=None, generations=8).fit(X, y)
    assert len(model.front_) > 1
    for index in range(len(model.front_)):
        for column, sign in ((0, 1.0), (1, -1.0)):
            moved = X + 1e-6 * np.eye(3)[column]
            assert (sign * (model.predict(moved, index) - model.predict(X, index)) > -1e-12).all()


def test_a_fit_that_fails_leaves_an_estimator_as_it_was(search):
    def use_too_early(model, generation, front):
        model.predict(X)

    X = points(60)
    model = search(callback=use_too_early)
    for call in (lambda: model.fit(X, noisy(X)), lambda: model.predict(X)):
        with pytest.raises(NotFittedError):
            call()
        assert not hasattr(model, "equations_")
    before = model.set_params(callback=None).fit(X, noisy(X)).predict(X)
    model.set_params(callback=Mock(side_effect=LookupError("mine")))
    with pytest.raises(LookupError, match="mine"):
        model.fit(X[:, ::-1][:, :2], noisy(X))
    np.testing.assert_array_equal(model.predict(X), before)


def test_searches_go_on_from_the_last_one_or_from_a_file(search, tmp_path):
    X, heard, file = points(100), [], tmp_path / "search.npz"
    y = 2 * X[:, 0] + np.sin(3.1 * X[:, 1] * X[:, 2] + 0.7) / (1 + X[:, 0])
    y += np.random.default_rng(5).normal(0, 0.01, 100)

    def listen(model, generation, front):
        heard.append((generation, front[-1].loss))
        return len(heard) == 2

    # Searches without this guess do not find the law.
    told = {"guesses": ["2*x1 + sin(3*x2*x3 + p1)/(1 + x1)"], "callback": listen}
    with_sin = {**SHORT, "operators": (*FEW, "sin")}
    model = search(with_sin, generations=10**6, checkpoint=file, **told).fit(X, y)
    assert (model.reason_, model.n_iter_) == ("callback", heard[-1][0])
    assert len(heard) == 2 and heard[0][1] >= heard[1][1]
    assert search(with_sin, generations=0).fit(X, y).front_[-1].r2 < 0.999 < model.front_[-1].r2
    assert search(with_sin, generations=0, checkpoint=file).fit(X, y).front_[-1].r2 > 0.999
    model.set_params(warm_start=True, generations=0, checkpoint=None, guesses=())
    assert model.fit(X, y).front_[-1].r2 > 0.999
    with pytest.warns(SearchWarning, match="which operators= has not"):
        other = search(with_sin, checkpoint=file, generations=0, operators=("+", "*")).fit(X, y)
    assert not re.search("sin|/", " ".join(str(each.program) for each in other.front_))
    file.write_bytes(b"no archive")
    with pytest.raises(InvalidArgumentError, match=r"search: no search has written it\."):
        search(checkpoint=file).fit(X, y)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda X, y: (X * [1.0, 1e12, 1e-12], y), ""),
        (lambda X, y: (X, np.where(np.arange(60) < 2, -1e36, y)), r"the target is up to 1e\+36"),
        (lambda X, y: (X, y > np.median(y)), "SymbolicClassifier finds"),
    ],
)
def test_odd_data_are_warned_of(search, change, says):
    X, y = change(points(60), law(points(60)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        search(generations=0).fit(X, y)
    told = [text for each in caught if "up to" in (text := str(each.message)) or "Class" in text]
    assert [bool(re.search(says, text)) for text in told] == [True] * bool(says)


def test_what_are_no_numbers_is_refused_as_by_upload():
    record = np.array([(1.0, 2.0)] * 2, [("a", float), ("b", float)])
    for X in (np.array([["a", 1.0], ["b", 2.0]], object), record):
        with pytest.raises(InvalidArgumentError, match=r"real number|structured array"):
            SymbolicRegressor(address="127.0.0.1:1").fit(X, [1.0, 2.0])


def test_many_fits_share_the_server_of_a_client(client):
    X, law_of = points(60), ParameterOptimizer("p1*x1^2/x2 + p2", address=client)
    grid = GridSearchCV(law_of, {"expression": ["p1*x1", "p1*x1^2/x2 + p2"]}, cv=2)
    assert grid.fit(X, law(X)).best_params_["expression"] == "p1*x1^2/x2 + p2"
    assert repr(client) in repr(law_of)


def test_what_there_was_no_time_for_is_said(search, capsys):
    X = np.random.default_rng(0).normal(size=(200, 5))
    model = search(max_seconds=0.01, generations=10**6, verbose=True, population=500)
    with pytest.warns(SearchWarning, match="left no time for a generation"):
        model.fit(X, X[:, 0] * X[:, -1])
    said = capsys.readouterr().err
    assert said.index("connection to a server") < said.index("upload of 200 rows")
    assert (model.n_iter_, model.reason_) == (0, "max_seconds")
    assert "no generation has run" in model.undone_
    assert model.start_seconds_ > 0.0


def test_linear_regression_is_chosen_where_nothing_predicts_better(search):
    """Though it is longer than a formula may be."""
    columns, rng = 12, np.random.default_rng(1)
    sizes = np.array([1e3, *[1.0] * (columns - 2), 1e-3])
    X = rng.normal(size=(120, columns)) * sizes
    signs = np.where(np.arange(columns) % 2, 1.0, -1.0)
    y = (X / sizes) @ signs + rng.normal(0.0, 2.0, 120)
    design = np.column_stack([np.ones(120), X])
    linear = design @ np.linalg.lstsq(design, y, rcond=1e-15)[0]
    model = search(generations=0, population=100).fit(X, y)
    np.testing.assert_allclose(model.predict(X), linear, rtol=1e-9)
    chosen = model.front_[selected(model.front_, "prediction")]
    assert chosen.is_linear_regression
    assert chosen.complexity == len(model.program_) == 4 * columns + 1
    place = model.front_.index(chosen)
    assert f"equation {place} is the linear regression of all" in str(model.equations_)
    # Limits that are given hold for it, too.
    other = search(generations=0, population=100, max_size=25).fit(X, y)
    assert not any(equation.is_linear_regression for equation in other.front_)


def command(folder, X, y):
    """Words of a search of a file with these rows, of few operators."""
    rows = np.column_stack([X, y])
    np.savetxt(folder / "t.csv", rows, delimiter=",", header="a,b,c,y", comments="")
    return ["search", str(folder / "t.csv"), "--target", "y", "--operators", "+", "*"]


@pytest.mark.parametrize("how", [pytest.param("interrupt", marks=pytest.mark.thorough), "server"])
def test_what_was_found_is_kept(search, monkeypatch, tmp_path, capsys, how):
    X = points(100)
    y = np.column_stack([noisy(X), X[:, 0]])

    def end(*_):
        if how == "server":
            raise UnavailableError("nobody is there")
        os.kill(os.getpid(), signal.SIGINT)

    # The engine reports once a second, and where it ends.
    monkeypatch.setattr(Progress, "report", end)
    with pytest.warns(SearchWarning, match="were found until then"):
        model = search(generations=10**6, max_size=9).fit(X, y)
    assert model.reason_ == how
    assert len(model.front_[0]) > 1
    assert [len(e.program) for e in model.front_[1]] == [1]  # a target that nobody has looked at
    for equation in model.front_[0]:
        error = reference(equation.program, X.T) - y[:, 0]
        assert np.mean(error**2) == pytest.approx(equation.loss, rel=1e-9)
    words = [*command(tmp_path, X, y[:, 0]), "--json", str(tmp_path / "t.json")]
    words += ["--address", model.address, "--template", "f(a, b) + c"]
    assert main(words) == {"interrupt": 130, "server": 2}[how]
    assert json.loads((tmp_path / "t.json").read_text())["reason"] == how
    assert "y = " in capsys.readouterr().out


def test_an_interrupt_before_anything_is_found_is_raised(search, monkeypatch):
    def end(*_, **options):
        if "seed" in options:  # the other one shows that a server is ready
            raise KeyboardInterrupt

    monkeypatch.setattr(warpfit.Client, "search", end)
    with pytest.raises(KeyboardInterrupt):
        search().fit(points(50), law(points(50)))


def test_the_front_is_in_a_file_while_the_search_runs(search, tmp_path):
    file, seen = tmp_path / "front.csv", []

    def look(*_):
        seen.append(list(csv.DictReader(file.open())))

    X = points(60)
    model = search(output=file, callback=look, generations=2).fit(X, noisy(X))
    assert seen
    assert all(list(row) == list(COLUMNS) for rows in seen for row in rows)
    assert file.read_text() == model.equations_.to_csv()
    assert [path.name for path in tmp_path.iterdir()] == ["front.csv"]
    with pytest.raises(InvalidArgumentError, match="output is"):
        search(output=tmp_path / "none" / "front.csv").fit(X, X[:, 0])


@pytest.mark.parametrize("setting", ["output", "checkpoint"])
def test_a_file_that_cannot_be_written_is_a_warning(search, tmp_path, monkeypatch, setting):
    fail = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(Path, "write_text", fail)
    monkeypatch.setattr("warpfit.sklearn.target_search.save", fail)
    with pytest.warns(SearchWarning, match="No space left"):
        model = search(**{setting: tmp_path / "file"}).fit(points(50), law(points(50)))
    assert model.front_


def test_several_targets_have_a_front_each(search):
    X = points(100)
    y = np.column_stack([X[:, 0] * X[:, 1], X[:, 2] - 2.0])
    model = search(simplify=True)
    np.testing.assert_allclose(model.fit(X, y).predict(X), y, rtol=1e-8)
    assert len(model.equations_) == len(model.program_) == 2
    assert model.latex(output=1) == "x_{3} - 2"
    with pytest.raises(InvalidArgumentError, match="an output from 0 to 1"):
        model.latex(output=2)


def test_models_work_in_scikit_learn_and_travel_without_a_server(search):
    X = points(120)
    model = search(simplify=False)
    scores = cross_val_score(make_pipeline(StandardScaler(), model), X, law(X), cv=2)
    assert scores.min() > 0.8
    fitted = clone(model).fit(X, law(X))
    copy = pickle.loads(pickle.dumps(fitted))
    copy.address = "127.0.0.1:1"
    np.testing.assert_array_equal(copy.predict(X), fitted.predict(X))


def test_parameters_of_a_known_law(server: ServerProcess):
    X, own = points(), {"address": server.address}
    model = ParameterOptimizer("p1*x1^p2/x2 + p3", **own).fit(X, law(X))
    np.testing.assert_allclose(model.parameters_, [1.5, 2.0, 0.25], rtol=1e-6)
    assert model.score(X, law(X)) == pytest.approx(1.0)
    assert model.standard_errors_.shape == (3,)
    assert "p1" not in model.expression_
    y = np.sin(4.0 * X[:, 0])
    several = ParameterOptimizer("sin(3*p1*x1)", starts=30, random_state=0, **own)
    assert several.fit(X, y).loss_ < 1e-10
    bounded = ParameterOptimizer("p1*x1", bounds=(0.0, 0.1), **own).fit(X, y)
    assert 0.0 <= bounded.parameters_[0] <= 0.1


@pytest.mark.parametrize(
    ("reason", "settings"),
    [
        ("BAD_SETTING: .*population", {"population": 1}),
        ("BAD_SETTING: .*population", {"population": 100_000, "max_size": 1000}),
        ("BAD_SETTING: .*max_seconds", {"max_seconds": -1.0}),
        ("BAD_SETTING: .*dimensionless", {"dimensionless_constants": True}),
        ("BAD_SETTING: .*checkpoint", {"checkpoint": "/no/such/folder/file"}),
        ("BAD_SETTING", {"constraints": {"nesting": {"sin": 1}}}),
        ("BAD_SETTING: .*engine", {"engine": "gpu"}),
        ("BAD_SETTING: .*random_state", {"random_state": "a"}),
        ("UNKNOWN_OPERATOR", {"operators": ["add", "nonsense"]}),
        ("BAD_SETTING: .*guesses", {"guesses": ["x9"]}),
        ("UNKNOWN_UNIT", {"units": ["m", "florin", "s"]}),
        ("BAD_ENUM", {"loss": "nonsense"}),
        ("BAD_TEMPLATE: .*0 functions", {"template": "x1 + p1"}),
        ("BAD_TEMPLATE: .*does not depend on g", {"template": "f(x1) + 0*g(x2)"}),
        ("UNKNOWN_NAME: .*height", {"template": "f(x1) + height"}),
    ],
)
def test_settings_that_make_no_sense(reason, settings):
    with pytest.raises(warpfit.WarpfitError) as caught:
        SymbolicRegressor(**settings).fit(points(), law(points()))
    assert re.match(reason, f"{caught.value.reason}: {caught.value}", re.DOTALL)


def test_the_shell_prints_the_front_and_writes_files(server, tmp_path, capsys, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("there may be no pandas")

    monkeypatch.setattr("pandas.DataFrame.__init__", refuse)
    X = points(80)
    files = ["--json", str(tmp_path / "t.json"), "--plot", str(tmp_path / "t.png")]
    words = [*command(tmp_path, X, X[:, 0] * X[:, 1]), "--quiet", *files]
    assert main([*words, "--address", server.address]) == 0
    assert "y = a * b" in capsys.readouterr().out
    document = json.loads((tmp_path / "t.json").read_text())
    assert document["front"][document["chosen"]]["equation"] == "a * b"
    assert (tmp_path / "t.png").stat().st_size > 1000
    assert main([*words, "--loss", "nonsense"]) == 2


def test_rows_of_weight_0_are_left_out_and_masked_data_refused(search):
    X = points(60)
    y, w = 2 * X[:, 0] + 3 * X[:, 1], np.ones(60)
    X[:3], y[:3], w[:3] = np.nan, np.inf, 0.0
    model = search(generations=2, population=100, random_state=0).fit(X, y, sample_weight=w)
    np.testing.assert_allclose(model.predict(X[3:]), y[3:], rtol=1e-9)
    assert model.score(X, y, w) > 1 - 1e-12
    masked = np.ma.array(X[3:], mask=np.arange(X[3:].size).reshape(X[3:].shape) == 7)
    for call in (lambda: model.fit(masked, y[3:]), lambda: model.predict(masked)):
        with pytest.raises(warpfit.WarpfitError, match="no value in row 2"):
            call()


@pytest.mark.thorough
def test_chance_tells_a_law_from_noise(search):
    """The rank of a true target among shuffled ones; noise has any rank."""
    X = points(120)
    noise = np.random.default_rng(1).normal(size=len(X))
    model = search(max_size=7, generations=1).fit(X, np.column_stack([law(X) + noise, noise]))
    found, nothing = (model.chance(n=19, output=output) for output in (0, 1))
    assert (found.probability, found.share) == (0.05, 0.0)
    assert nothing.probability == pytest.approx((1 + 19 * nothing.share) / 20)
    again = model.chance(n=19, output=1)
    assert again.shuffled_losses.tolist() == nothing.shuffled_losses.tolist()
    with pytest.raises(InvalidArgumentError) as caught:
        pickle.loads(pickle.dumps(model)).chance(n=9)
    assert caught.value.reason == "NO_DATA"
    for wrong in ({"n": 0}, {"seed": -1}):
        with pytest.raises(InvalidArgumentError, match=f"{next(iter(wrong))} is"):
            model.chance(**wrong)


def test_evidence_chooses_an_equation(search):
    X = points(120)
    model = search(model_selection="evidence").fit(X, noisy(X))
    evidence = [equation.evidence for equation in model.front_]
    assert model.program_ == model.front_[int(np.argmax(evidence))].program
    assert int(np.argmax(evidence)) > 0
    with pytest.raises(InvalidArgumentError, match="one of squares"):
        search(model_selection="evidence", loss="mae").fit(X, noisy(X))


@pytest.mark.parametrize("column", [["1", "2", "3"] * 4, np.array(["2020-01-01"] * 12, "M8[D]")])
def test_columns_of_text_or_dates_are_named(column):
    """Before any server is asked."""
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"a": np.arange(12.0), "when": column})
    for make in (SymbolicRegressor, ParameterOptimizer):
        with pytest.raises(InvalidArgumentError, match="'when'"):
            make(address="127.0.0.1:1").fit(frame, frame.a)


# ------------------------------------------------------------------------------- odd data and rules
def test_a_rule_against_the_shortest_form_leaves_no_terms_of_rounding_errors(search):
    x = np.random.default_rng(3).uniform(0, 10, 200)[:, None]
    guess = "0.9999999999999996*cos(sin(x1) + 4.71238898038459) - 4.6e-14*sin(x1)^2 + 9.9e-14"
    rule = {"nesting": {"sin": {"sin": 0}}}
    model = search(USUAL, constraints=rule, guesses=[guess]).fit(x, np.sin(np.sin(x[:, 0])))
    assert min(equation.loss for equation in model.front_) < 1e-25
    assert "e-" not in " ".join(equation.equation for equation in model.front_ if equation.r2 == 1)
    assert all("sin(sin(" not in equation.equation for equation in model.front_)


def test_a_formula_without_a_value_on_a_row_held_out_ends_no_search(search):
    x = np.linspace(-5, 5, 101)
    x[50] = 0.0
    settings = {"generations": 2, "random_state": 2, "guesses": ["sin(x1)/x1"]}
    with pytest.warns(SearchWarning, match=r"sin\(x1\) / x1 fits .* such as x1 = 0"):
        model = search(USUAL, **settings).fit(x[:, None], np.sinc(x / np.pi))
    assert (model.reason_, model.n_iter_) == ("generations", 2)
    assert all(np.isfinite(equation.loss) for equation in model.front_)


def test_a_guess_is_never_lost_and_never_gets_worse(search):
    g = np.random.default_rng(0)
    x = g.uniform(0.0, 6.0, 200)
    y = 3.0 * np.exp(-0.4 * x) + 0.5 + 0.02 * g.normal(size=200)
    y[::17] += 20.0 * g.normal(size=12)
    guess = "3*exp(-0.4*x1) + 0.5"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SearchWarning)
        model = search(loss="mae", guesses=[guess], population=20, generations=0)
        model.fit(x[:, None], y)
    best = min(e.loss for e in model.front_ if e.complexity <= len(warpfit.parse(guess)))
    assert best <= np.mean(np.abs(3.0 * np.exp(-0.4 * x) + 0.5 - y)) * (1.0 + 1e-12)


UNITS = {"units": ["m", "1/m"], "target_unit": "m", "dimensionless_constants": True}


def test_units_of_numbers_are_those_of_the_target(search):
    g = np.random.default_rng(1)
    X = np.column_stack([g.uniform(1, 3, 200), g.uniform(0.5, 2, 200)])
    model = search(USUAL, **UNITS).fit(X, 2.5 * X[:, 0] * np.exp(-0.7 * X[:, 1] * X[:, 0]))
    assert model.expression_ == "2.5 * x1 * exp(-0.7 * x1 * x2)"
    assert all(equation.program.variables for equation in model.front_)  # a number is no length
    with pytest.raises(InvalidArgumentError, match="no product of powers") as caught:
        search(USUAL, **{**UNITS, "units": ["kg", "m/s"], "target_unit": "K"}).fit(X, X[:, 0])
    assert (caught.value.reason, caught.value.field) == ("UNITS_DIFFER", "target_unit")


@pytest.mark.thorough
def test_functions_of_ones_own_travel_with_an_estimator(search, tmp_path):
    warpfit.define("halved_", "exp(-a)")
    warpfit.define("bump_", "halved_(square(a))")
    X = np.random.default_rng(0).normal(size=(60, 2))
    y = 2.0 * np.exp(-(X[:, 0] ** 2)) + 1.0
    settings = {"operators": ["mul", "bump_"], "generations": 0, "simplify": False}
    model = search(USUAL, checkpoint=tmp_path / "s.npz", **settings).fit(X, y)
    (tmp_path / "m").write_bytes(pickle.dumps(model.set_params(checkpoint=None)))
    code = """
import pickle; from warpfit.parse import MACROS; from pathlib import Path
from warpfit.sklearn.target_search import load
from warpfit.sklearn.templates import Form
MACROS.find("sinc"), MACROS.find("sech")  # which take the codes of the others
model = pickle.loads(Path("m").read_bytes())
model._check_settings()  # which know the operators
print(model.programs_found()[0], load(Path("s.npz"), Form(), 99, 2).program(0), sep="\\n")
"""
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, cwd=tmp_path, env=paths, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    own, loaded = found.stdout.splitlines()
    assert own == str(model.programs_found()[0])
    assert "exp(-" in loaded


def test_few_rows_pay_for_no_long_formula(search):
    g = np.random.default_rng(0)
    X, y = g.normal(size=(10, 4)), g.normal(size=10)
    model = search(USUAL, generations=2, model_selection="accuracy", simplify=False)
    with pytest.warns(SearchWarning, match="tokens, which 10 rows do not pay for"):
        model.fit(X, y)
    assert model.front_[-1].r2 > 0.9
    assert model.program_.variables == 0


# ---------------------------------------------------------------------- outer forms, groups of rows
def positive(rows=100):
    return np.random.default_rng(0).uniform(0.5, 3.0, (rows, 3))


def test_the_functions_of_a_template_are_found(search, tmp_path):
    X = table_of(positive())
    y = 1.7 * X.a * X.b * np.exp(-0.4 * X.c**2)
    file = tmp_path / "state.npz"
    model = search(LONG, template="f(a, b)*exp(-g(c))", simplify=True, checkpoint=file).fit(X, y)
    assert model.subformulas_ == {"f": "1.7 * a * b", "g": "0.4 * c ^ 2"}
    assert model.expression_ == "1.7 * a * b * exp(-0.4 * c ^ 2)"
    assert {"f", "g", "equation", "latex"} <= {*model.equations_.to_pandas().columns}
    # Nothing but the functions is searched: no intercept, and g does not see the other columns.
    assert all("exp(" in e.equation for e in model.front_)
    assert not any("a" in e.subformulas["g"] or "b" in e.subformulas["g"] for e in model.front_)
    copy = pickle.loads(pickle.dumps(model))
    np.testing.assert_allclose(copy.predict(X), y, rtol=1e-9)
    # The search goes on from the last one or a file, which another template refuses.
    with pytest.raises(warpfit.InvalidArgumentError, match="template"):
        search(LONG, template=None, checkpoint=file).fit(X, y)
    copy.set_params(warm_start=True, generations=0, population=2, simplify=False)
    assert copy.fit(X, y).score(X, y) > 0.999999


@pytest.mark.parametrize(
    ("template", "law"),
    [
        # An operator that is written with others, a number that is not fitted, a nested function.
        ("sech(f(x1/x2)) + 0.3*x3", lambda a, b, c: 1 / np.cosh(1.2 * a / b) + 0.3 * c),
        ("g(x3, h(x1))", lambda a, b, c: c / (1 + a**2)),
    ],
)
def test_templates_substitute_and_have_parameters(search, template, law):
    X = positive()
    model = search(LONG, template=template).fit(X, law(*X.T))
    np.testing.assert_allclose(model.predict(X), law(*X.T), rtol=1e-6)


@pytest.mark.parametrize(
    ("template", "meant"), [("f(x1) + logg(x2)", ["log"]), ("f(x1) + g1(x2)*fun(x3)", [])]
)
def test_a_function_of_a_template_like_a_known_one_is_warned_of(template, meant):
    with warnings.catch_warnings(record=True) as caught, pytest.raises(UnavailableError):
        warnings.simplefilter("always")
        SymbolicRegressor(template=template, address="127.0.0.1:1").fit(points(), law(points()))
    told = [re.search(r"Write (\w+) if that is meant", str(each.message)) for each in caught]
    assert [match[1] for match in told] == meant


#: Constants of the law of `grouped`, by group.
CONSTANTS = {"Bern": (2.0, 0.7, 5.1), "Chur": (-3.3, 1.9, 0.4), "Thun": (0.8, 0.2, -2.0)}


def grouped(rows=120, noise=0.0):
    """Return columns a and b and a station, and the target p1*a/(b + p2) + p3."""
    rng = np.random.default_rng(0)
    X = positive(rows)
    station = np.array(list(CONSTANTS))[rng.permutation(rows) % len(CONSTANTS)]
    p = np.array([CONSTANTS[name] for name in station]).T
    y = p[0] * X[:, 0] / (X[:, 1] + p[1]) + p[2] + rng.normal(0.0, noise, rows)
    return table_of(X)[["a", "b"]].assign(station=station)[["a", "station", "b"]], y


def test_groups_have_one_formula_and_constants_of_their_own(search):
    optimize = pytest.importorskip("scipy.optimize")
    X, y = grouped(noise=0.01)
    told = {"generations": 0, "guesses": ["a / (b + 1.5)"]}
    model = search(LONG, group="station", held_out=0.0, **told).fit(X, y)
    assert model.groups_.tolist() == list(CONSTANTS)
    assert model.expression_.count("p") == 3
    assert model.score(X, y) > 0.999
    # The predictions of each group are those of a fit of the law to its rows alone.
    for name, start in CONSTANTS.items():
        own = (X.station == name).to_numpy()
        rows = X[own][["a", "b"]].to_numpy().T
        law = lambda x, p, q, r: p * x[0] / (x[1] + q) + r  # noqa: E731
        fit, _ = optimize.curve_fit(law, rows, y[own], start)
        np.testing.assert_allclose(model.predict(X[own]), law(rows, *fit), rtol=1e-4, atol=1e-4)
        program = model.program(group=name)
        np.testing.assert_allclose(reference(program, rows), model.predict(X[own]))
        np.testing.assert_allclose(model.to_numpy(group=name)(rows.T), model.predict(X[own]))
        assert "p1" not in model.code("python", group=name) + model.latex(group=name)
        assert {str(each) for each in model.sympy(group=name).free_symbols} == {"a", "b"}
        assert list(model.constants_[name]) == ["p1", "p2", "p3"]
    assert "Chur" in str(model.equations_)
    assert model.constants_.to_pandas().shape == (3, 3)
    # Each group pays for its constants.
    chosen = next(e for e in model.front_ if e.program == model.program_)
    level = 0.5 * len(y) * (np.log(2 * np.pi * chosen.excess) + 1)
    count = chosen.complexity + 3 * 3
    assert chosen.description_length == pytest.approx(level + 0.5 * count * np.log(len(y)), rel=0.1)
    copy = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(copy.predict(X), model.predict(X))
    with pytest.raises(warpfit.InvalidArgumentError, match="no group Genf in fit") as failure:
        copy.predict(X.assign(station="Genf"))
    assert failure.value.reason == "BAD_GROUPS"


@pytest.mark.parametrize(
    ("settings", "change", "says"),
    [
        ({"group": "town"}, {}, "a, station, b"),
        ({"group": "station"}, {"station": "Bern"}, "there are 1 groups"),
        ({"group": "station"}, {"station": np.arange(120) // 3 % 39}, "fewer than 5"),
        ({"group": "station"}, {"station": ["Bern"] * 60 + [np.nan] * 60}, "row 60 has no group"),
        ({"group": "station", "loss": "rmse"}, {}, "mean or sum"),
        ({"group": "station", "model_selection": "evidence"}, {}, "evidence"),
    ],
)
def test_groups_that_make_no_sense(settings, change, says):
    X, y = grouped()
    with pytest.raises(warpfit.InvalidArgumentError, match=says):
        SymbolicRegressor(**settings).fit(X.assign(**change), y)
