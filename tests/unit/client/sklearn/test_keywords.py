"""Words of other programs, given to estimators: keywords, methods and attributes."""

import copy
import inspect
import io
import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
from sklearn.exceptions import NotFittedError

import warpfit
import warpfit.sklearn
from support.refusals import refused
from warpfit.sklearn import (
    ParameterOptimizer,
    SymbolicClassifier,
    SymbolicRegressor,
    SymbolicTransformer,
)
from warpfit.sklearn.equations import Equation, EquationTable
from warpfit.sklearn.keywords import (
    OF_OTHER_ESTIMATORS,
    OF_OTHER_FITS,
    OF_OTHER_OBJECTS,
    OF_OTHER_PREDICTIONS,
)

OWN = SymbolicRegressor().get_params()
#: Names of PySR 1.5's `PySRRegressor`, which tests do not install, from its documentation.
PYSR = json.loads((Path(__file__).parents[3] / "data" / "pysr.json").read_text())
ESTIMATORS = (ParameterOptimizer, SymbolicClassifier, SymbolicRegressor, SymbolicTransformer)


def mistaken(**keywords):
    return refused("no keyword", SymbolicRegressor, **keywords)


@pytest.mark.parametrize("value", [3, None, "mse", ["a", "b"]])
def test_a_keyword_of_another_program_is_answered_by_ours(value):
    others = {"sample_weight", "SymbolicClassifier(search", "DataFrame"}
    others.add("SymbolicTransformer(n_components")
    for name in OF_OTHER_ESTIMATORS:
        assert name not in OWN
        remedy = mistaken(**{name: value}).remedy
        words = set(remedy.replace("=", " ").replace(",", " ").split())
        assert remedy.startswith("Leave it out: ") or words & (OWN.keys() | others), remedy


def test_each_keyword_of_other_packages_is_known():
    gplearn = pytest.importorskip("gplearn.genetic")
    operon = pytest.importorskip("pyoperon.sklearn")
    kinds = (gplearn.SymbolicRegressor, gplearn.SymbolicClassifier, gplearn.SymbolicTransformer)
    for kind in (*kinds, operon.SymbolicRegressor):
        theirs = inspect.signature(kind).parameters.keys()
        assert not theirs - OWN.keys() - OF_OTHER_ESTIMATORS.keys()
    assert not set(PYSR["settings"]) - OWN.keys() - OF_OTHER_ESTIMATORS.keys()
    own = inspect.signature(SymbolicRegressor.fit).parameters
    assert not set(PYSR["fit"]) - own.keys() - OF_OTHER_FITS.keys()
    methods = {name for name in PYSR["methods"] if not hasattr(SymbolicRegressor, name)}
    assert not methods - OF_OTHER_OBJECTS.keys()


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ({"niterations": 40}, "Write generations=40"),
        ({"maxdepth": 5}, "Write constraints={'depth': 5}"),
        ({"nested_constraints": {"sin": {"sin": 0}}}, "constraints={'nesting': {'sin': {'sin'"),
        ({"unary_operators": ["cos", "inv(x) = 1/x"]}, "Write operators=['cos', 'inv']"),
        ({"function_set": ("add", "div")}, "Write operators=['add', 'div']"),
        ({"allowed_symbols": "add,mul,constant,variable"}, "Write operators=['add', 'mul']"),
        ({"elementwise_loss": "HuberLoss(2.0)"}, "loss=warpfit.losses.huber(2.0)"),
        ({"metric": "mean absolute error"}, "Write loss='mae'"),
        ({"objectives": ["r2", "length"]}, "Write loss='r2'"),
        ({"timeout_in_seconds": 60}, "Write max_seconds=60"),
        ({"batch_size": 50}, "Write sample_rows=50"),
        ({"max_samples": 0.9}, "sample_rows= with a number of rows"),
        ({"verbosity": 0}, "Write verbose=False"),
        ({"equation_file": "hall.csv"}, "Write output='hall.csv'"),
        ({"feature_names": ["r", "k"]}, "a DataFrame with columns ['r', 'k']"),
        ({"model_selection_criterion": "minimum_description_length"}, "'description_length'"),
        ({"tournament_size": 5}, "Leave it out: the engine varies"),
        ({"parsimony": 0.01}, "Write max_size="),
    ],
)
def test_the_value_is_translated(given, ours):
    assert ours in mistaken(**given).remedy


@pytest.mark.parametrize(
    "given",
    [
        {"maxdepth": 5}, {"nested_constraints": {"sin": {"sin": 0}}}, {"maxsize": 20},
        {"unary_operators": ["cos", "inv(x) = 1/x"]}, {"elementwise_loss": "HuberLoss(2.0)"},
        {"allowed_symbols": "add,sub,mul,div,constant,variable,aq"}, {"metric": "rmse"},
        {"model_selection_criterion": "bayesian_information_criterion"}, {"print_precision": 5},
    ],
)  # fmt: skip
def test_what_is_to_be_written_is_a_setting(given):
    written = mistaken(**given).remedy.removeprefix("Write ")
    model = eval(f"SymbolicRegressor({written})", {**globals()})
    with pytest.raises(ValueError, match="Found array with 0 sample"):
        model.fit(np.empty((0, 1)), np.empty(0))
    model.n_features_in_ = 1
    model._given = []
    model._check_settings()


def test_a_whole_call_is_translated_at_once():
    error = mistaken(
        binary_operators=["+", "*"], unary_operators=["cos"], niterations=5, alpha=1.0, progres=1
    )
    assert error.remedy.startswith("Write operators=['+', '*', 'cos'], generations=5. Leave out a")
    assert all(name in str(error) for name in ("'niterations'", "'alpha'", "'progres'"))
    assert "alpha: Leave it out: the engine" in error.__notes__[0]


@pytest.mark.parametrize("kind", [SymbolicClassifier, SymbolicTransformer])
@pytest.mark.parametrize("name", ["max_seconds", "operators", "niterations"])
def test_keywords_of_a_search_belong_into_it(kind, name):
    refused("search=SymbolicRegressor", kind, **{name: 3})


def test_a_keyword_of_another_fit_or_prediction_is_answered_by_ours():
    model = SymbolicRegressor()
    others = {model.fit: OF_OTHER_FITS, model.predict: OF_OTHER_PREDICTIONS}
    for method, name in [(method, name) for method, names in others.items() for name in names]:
        refused(
            f"no keyword '{name}'",
            method,
            [[1.0]],
            *[[1.0]] * (method == model.fit),
            **{name: None},
        )


def test_a_slip_is_answered_by_the_nearest_keyword():
    assert "Did you mean max_seconds=" in mistaken(max_second=3).remedy
    refused("Use search, random_state", SymbolicClassifier, wild=3)


# ------------------------------------------------------------------------------------- attributes


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_an_attribute_of_another_program_says_what_to_call(kind):
    model = kind("p1*x1") if kind is ParameterOptimizer else kind()
    for name, remedy in OF_OTHER_OBJECTS.items():
        assert not hasattr(model, name)
        with pytest.raises(AttributeError, match=f"no attribute '{name}'. Use ") as caught:
            getattr(model, name)
        assert remedy in str(caught.value)


def test_what_an_attribute_is_answered_with_is_there():
    known = {one for kind in ESTIMATORS for one in dir(kind) if one[0] != "_"} | OWN.keys()
    known |= {"program_", "expression_", "parameters_", "standard_errors_", "loss_", "n_iter_"}
    known |= {"pickle", "sklearn", "client", "programs_"}
    for text in OF_OTHER_OBJECTS.values():
        assert set(re.findall(r"\w+", text)) & known, text


def test_a_slip_in_an_attribute_is_answered_by_the_nearest():
    with pytest.raises(AttributeError, match=r"Did you mean plot_front\?"):
        SymbolicRegressor().plot_fronts  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'wild_and_far'$"):
        SymbolicRegressor().wild_and_far  # noqa: B018
    with pytest.raises(AttributeError, match="pickle or joblib"):
        SymbolicRegressor.from_file("hall_of_fame.csv")
    assert not hasattr(SymbolicRegressor, "from_file")


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_copies_pickles_and_questions_for_attributes_work(kind):
    model = kind("p1*x1") if kind is ParameterOptimizer else kind()
    for other in (pickle.loads(pickle.dumps(model)), copy.copy(model), copy.deepcopy(model)):
        assert type(other) is kind
        assert other.get_params().keys() == model.get_params().keys()
    assert not hasattr(model, "feature_names_in_")
    assert not hasattr(model, "__wrapped__")
    assert getattr(model, "nothing_of_it", 3) == 3
    assert repr(model).startswith(kind.__name__)


def test_what_is_there_after_a_fit_says_so():
    for name in ("equations_", "front_", "subformulas_", "constants_"):
        with pytest.raises(NotFittedError, match="not fitted yet"):
            getattr(SymbolicRegressor(), name)


# ------------------------------------------------------------------------------ table of equations


def table(count=3):
    rows = [
        Equation(
            complexity=size, loss=1.0 / size, excess=1.0 / size, score=0.5, description_length=2.0,
            r2=float("nan"), r2_held_out=0.5, program=warpfit.parse("x1*2"), equation='x1, "2"',
            latex=r"2 \cdot x_1",
        )
        for size in range(1, count + 1)
    ]  # fmt: skip
    return EquationTable(tuple(rows))


def test_what_a_frame_has_is_in_the_frame():
    for name in ("iloc", "loc", "columns", "sort_values", "head", "shape"):
        with pytest.raises(AttributeError, match=rf"to_pandas\(\).{name}"):
            getattr(table(), name)
        assert not hasattr(table(), name)


def test_rows_are_taken_as_of_a_sequence_and_columns_from_the_frame():
    assert table()[-1].complexity == 3
    assert [each.complexity for each in table()[1:]] == [2, 3]
    assert [each.complexity for each in table()] == [1, 2, 3]
    for columns in ("loss", ["loss", "score"]):
        with pytest.raises(warpfit.InvalidArgumentError, match="to_pandas"):
            table()[columns]
    with pytest.raises(IndexError):
        table()[3]
    assert str(pickle.loads(pickle.dumps(table()))) == str(copy.deepcopy(table())) == str(table())


def test_the_table_is_latex_and_csv_that_a_frame_reads():
    lines = table().latex_table().splitlines()
    assert lines[0] == r"\begin{tabular}{rrrrrl}"
    assert lines[2] == r"size & loss & held out & score & length & equation \\"
    assert lines[4].endswith(r"& $2 \cdot x_1$ \\")
    assert len(lines) == 3 + 5 + 1
    read = pytest.importorskip("pandas").read_csv(io.StringIO(table().to_csv()))
    assert read["complexity"].tolist() == [1, 2, 3]
    assert read["loss"].tolist() == [1.0, 0.5, 1.0 / 3.0]
    assert read["equation"].tolist() == ['x1, "2"'] * 3
    assert read["r2"].isna().all()
