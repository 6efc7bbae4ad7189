"""A name that is chosen and is not known is answered by the one that was meant."""

from functools import partial

import numpy as np
import pytest

import warpfit
from warpfit.cli.main import main
from warpfit.errors import did_you_mean
from warpfit.losses import as_loss
from warpfit.ops import OPERATORS
from warpfit.sklearn import SymbolicRegressor
from warpfit.sklearn.constraints import operator_name
from warpfit_server.config import Config

ROWS = np.arange(12.0).reshape(6, 2)


def model(**settings):
    return SymbolicRegressor(**settings).fit(ROWS, ROWS[:, 0])


def frame(**settings):
    table = pytest.importorskip("pandas").DataFrame(ROWS, columns=["mass", "length"])
    return SymbolicRegressor(**settings).fit(table, ROWS[:, 0])


def call(method, *arguments, **options):
    with warpfit.testing.client() as client:
        data = client.upload(ROWS, ROWS[:, 0])
        getattr(client, method)(data, *arguments, **options)


evaluate, fit = partial(call, "evaluate", ["x1"]), partial(call, "optimize", ["p1*x1"])
search = partial(call, "search", generations=1)


@pytest.mark.parametrize(
    ("meant", "call"),
    {
        "square": lambda: model(operators=["sqare"]),
        "count": lambda: model(constraints={"counts": {"sin": 1}}),
        "exp": lambda: model(constraints={"count": {"expp": 1}}),
        "increasing": lambda: model(constraints={"monotonic": {"x1": "increase"}}),
        "mass": lambda: frame(constraints={"monotonic": {"mas": "increasing"}}),
        "prediction": lambda: model(model_selection="predictions"),
        "numbers": lambda: model(snap="number"),
        "cpu": lambda: model(engine="cpus"),
        "length": lambda: frame(units={"lenght": "m", "mass": "kg"}),
        "mass ": lambda: frame(group="Mass"),
        "javascript": lambda: warpfit.parse("x1").code("JS"),
        "cos": lambda: warpfit.parse("coss(x1)"),
        "huber": lambda: as_loss("hubber"),
        "mae": lambda: model(loss="maee"),
        "relative": lambda: warpfit.LossFunction.parse("d^2", "relativ"),
        "square ": lambda: warpfit.Program.apply("sqare", warpfit.Program.variable(0)),
        "nmse": lambda: evaluate(loss="NMSE"),
        "compiled": lambda: evaluate(tier="compile"),
        "max_depth": lambda: search(max_dept=3),
        "sub": lambda: search(operators=["subb", "add"]),
        "standard_errors": lambda: fit(standard_error=True),
        "drop": lambda: fit(missing="drops"),
    }.items(),
)
def test_the_name_that_was_meant_is_said(meant, call):
    with pytest.raises(warpfit.WarpfitError, match=rf"Did you mean .*{meant.strip()}"):
        call()


def test_a_slip_in_an_operator_is_told_from_another_operator():
    for name in OPERATORS:
        if len(name) > 2:
            with pytest.raises(warpfit.InvalidArgumentError, match=r"Did you mean \w+\?"):
                operator_name(name + "q")


def test_what_is_like_no_name_gets_the_list():
    assert did_you_mean("zzzz", ["abc"], "Use abc") == "Use abc"
    assert did_you_mean("zzzz", [], "Use nothing") == "Use nothing"
    assert did_you_mean(3, [1, 2], "Use 1 or 2") == "Use 1 or 2"
    assert did_you_mean(None, ["none"], "") == "Did you mean none?"


def test_a_long_list_of_names_takes_no_time():
    asked = []
    names = (asked.append(place) or f"name{place}" for place in range(10**9))
    assert did_you_mean("name7", names, "") == "Did you mean name7?"
    assert len(asked) < 10_000


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["search", "t.csv", "--target", "y", "--max-secnds", "3"], "--max-seconds"),
        (["serach", "t.csv"], "search"),
        (["search", "t.csv", "--target", "y", "--model-selection", "acuracy"], "accuracy"),
        (["eval", "t.csv", "x1", "--los", "mse", "--wieghts", "w"], "--weights"),
        (["mcp", "--rot", "."], "--root"),
    ],
)
def test_a_slip_in_a_command_is_answered(words, meant, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["warpfit", *words])
    with pytest.raises(SystemExit):
        main()
    assert f"Did you mean {meant}?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        Config.from_arguments(["--max-requsts", "3"], {})
    assert "Did you mean --max-requests?" in capsys.readouterr().err
