"""The front of the equations of a search."""

import math

import numpy as np
import pytest

from support.refusals import refused
from warpfit import parse
from warpfit.expressions.language import to_latex
from warpfit.expressions.reference import evaluate_program
from warpfit.losses import LossFunction, as_function, as_loss, poisson
from warpfit.searching import structure_length
from warpfit.sklearn import SymbolicRegressor, selection
from warpfit.sklearn.equations import SELECTIONS, build_front, reason_against, selected
from warpfit.sklearn.estimator import TrainingData
from warpfit.sklearn.selection import Selection, deviance, floor, least_row_losses, terms_of
from warpfit.sklearn.target_search import TargetSearch
from warpfit.sklearn.templates import Form


def length(program, loss):
    return 50.0 * math.log(loss) + len(program)


def texts(program):
    return str(program), to_latex(program)


def front_of(programs, losses, r2s=None, **options):
    found = zip(programs, losses, r2s or [0.5] * len(losses), strict=True)
    return build_front(list(found), len, texts, length, 2.0, **options)


def judge_of(X, y, held_out=0, scale=1.0):
    """Return the selection of formulas by MSE on rows, the last ones of which are held out."""
    training = TrainingData(X, y, np.ones(len(y)))
    rows, loss = np.arange(len(y) - held_out, len(y)), as_function(as_loss("mse"))
    return Selection(training, loss, Form(), len, 13, scale=scale, held_out=rows)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
def test_equations_without_a_loss_are_left_out(order):
    given = ["x1", "sqrt(x1)", "x1 + 1", "log(x1) + 1"]
    losses = [2.0, float("nan"), 1.0, float("inf")]
    found = [(parse(given[place]), losses[place], 0.5) for place in order]
    front = build_front(found, len, texts, length, 2.0)
    assert [equation.equation for equation in front] == ["x1", "x1 + 1"]
    alone = [each for each in found if not math.isfinite(each[1])][:1]
    assert len(build_front(alone, len, texts, length, 2.0)) == 1, "a search returns what it found"


@pytest.mark.parametrize("r2", [-0.1, -math.inf])
@pytest.mark.parametrize("criterion", SELECTIONS)
def test_rows_held_out_refuse_formulas(criterion, r2):
    programs = [*map(parse, ("1", "x1 + 1", "log(x1) + 1"))]
    given = programs, [2.0, 1.0, 1e-9], [-0.01, 0.5, r2]
    front = front_of(*given)
    assert [equation.is_supported for equation in front] == [True, True, False]
    assert front[selected(front, criterion)].program != programs[2]
    assert front_of(*given, predicts_mean=False)[2].is_supported == (r2 > -math.inf)
    assert selected(front_of(*(each[2:] for each in given)), criterion) == 0


def test_what_predicts_best_stays_and_is_chosen_though_others_fit_better():
    programs = [parse(text) for text in ("x1", "exp(x1)", "sin(9*exp(x1))", "x1 + 3*x2")]
    losses = [2.0, 1.9, 1.0, 1.5]
    assert len(front_of(programs, losses)) == 3
    lengths = dict(zip(programs, [40.0, 39.0, 50.0, 31.0], strict=True))
    front = front_of(programs, losses, predictive=lengths)
    assert len(front) == 4 and front[selected(front, "prediction")].program == programs[3]
    assert front[selected(front, "accuracy")].program == programs[2]
    # What predicts hardly worse and is shorter is chosen, too.
    front = front_of(programs, losses, predictive=lengths | {programs[2]: 32.5})
    assert front[selected(front, "prediction")].program == programs[2]
    assert all(equation.score >= 0.0 for equation in front)

    # One with a surprise is chosen only where it predicts better.
    def surprise(program, _):
        return 15.0 * (program == programs[2])

    for predicted, chosen in ((32.5, 3), (28.0, 2)):
        own = lengths | {programs[2]: predicted}
        front = front_of(programs, losses, predictive=own, surprise=surprise)
        assert front[selected(front, "prediction")].program == programs[chosen]


Y = np.array([0.0, 1.0, 3.0, 40.0])


def test_losses_are_counted_from_the_least_that_they_can_be():
    for loss, least in (
        *(("mse", 0 * Y), ("huber", 0 * Y), ("poisson", Y - Y * np.log(np.maximum(Y, 1.0)))),
        (poisson(log=True), Y - Y * np.log(np.maximum(Y, 1.0))),
        *(("gaussian", 0 * Y + np.log(2 * np.pi) / 2), ("(f - 3*y)^2 - 7", 0 * Y - 7)),
    ):
        function, ones = as_function(as_loss(loss)), np.ones(4)
        found = least_row_losses(function, Y, ones)
        np.testing.assert_allclose(found, least, atol=1e-9)
        mean = function.closing != "sum"
        assert floor(function, found, Y, ones) == pytest.approx(least.sum() / (4 if mean else 1))


@pytest.mark.parametrize("text", ["log(abs(d))", "-f", "d", "-y*f", "-(d^2)"])
def test_losses_without_a_least_value_are_refused(text):
    refused("no least value", lambda: least_row_losses(LossFunction.parse(text), Y[1:], np.ones(3)))
    poisson, y = as_function(as_loss("poisson")), np.array([3.0, -2.0])
    error = refused("no least value for a target of -2", least_row_losses, poisson, y, np.ones(2))
    assert error.remedy.startswith("Give targets that the loss is for, such as counts")


@pytest.mark.parametrize("loss", ["mse", "rmse", "mae", "poisson", "gaussian"])
def test_the_deviance_does_not_depend_on_the_scale_of_weights(loss):
    function = as_function(as_loss(loss))
    factor = 10.0 if loss == "poisson" else 1.0  # whose sum is one of the weights, too
    for excess in (0.5, 4.0):
        one, ten = deviance(function, 20, 20.0)(excess), deviance(function, 20, 200.0)
        assert ten(excess * factor) == pytest.approx(one)
    squares = deviance(as_function(as_loss("rmse")), 20, 20.0)
    assert squares(2.0) == pytest.approx(20 * math.log(4.0))


def test_the_least_losses_of_many_rows_are_looked_for_once_or_between(monkeypatch):
    """A million rows must not cost a golden section each."""
    looked_at, find = [], selection._least

    def counted(loss, target, weights):
        looked_at.append(len(target))
        return find(loss, target, weights)

    monkeypatch.setattr(selection, "_least", counted)
    y = np.random.default_rng(0).uniform(0.1, 9.0, 60_000)
    for loss, most in (("log_cosh", 1), ("gaussian", 1), ("poisson", 20_000)):
        looked_at.clear()
        found = least_row_losses(as_function(as_loss(loss)), y, np.ones(len(y)))
        assert sum(looked_at) <= most, loss
    np.testing.assert_allclose(found, y - y * np.log(y), atol=1e-5)


def test_values_that_no_row_makes_expect_speak_against_a_formula():
    for text, surprises in (
        ("0.9*x1 + 1e-7/(x1 - 0.5012)", True),  # a narrow one, between those made up, too
        ("0.9*x1 + 1e-7/(0.2 + sin(1/(x1 + 0.1))^2)", False),
        ("0.9*x1 + 1e-10*exp(20*x1)", True),  # explodes behind the last one
        ("0.9*x1 + 0.01*exp(20*(x1 - x2))", True),  # and where variables differ that never have
        ("0.5*x1 + 0.4*x2", False),  # leaves the range of the target as a line does
        ("0.9*x1 + 0.01*log(x2)", False),  # lengths stay positive
    ):
        x = np.linspace(0.05, 1.0, 21)
        y = x + 0.1 * np.random.default_rng(0).normal(size=21)
        judge, line = judge_of(np.stack([x, x], axis=1), y), parse("0.9*x1")
        for level, most in ((0.02, 15.0), (0.005, 0.0)):  # a law may have poles
            difference = judge.surprise(parse(text), level) - judge.surprise(line, level)
            assert difference == (most if surprises else 0.0)
            parts = (judge.description_length, judge.taken_by_constants, judge.surprise)
            whole = sum(part(parse(text), level) for part in parts)
            assert judge.choice_length(parse(text), level) == pytest.approx(whole)


def test_no_formula_is_shown_that_hangs_on_the_rounding_of_the_data():
    for text, low, high, hangs in (
        *(("sin(1e50*exp(x1))", 0, 3, True), ("sin(1e4*x1)", 0, 1, False)),
        ("(x1 - 1e6)^4", 1e6, 1e6 + 1, False),
        *((text, 0, 1, False) for text in ("1/x1", "log(x1)")),
        *(("cos(1e15*x1)", 0, 1e-14, False), ("tan(1e12*x1)", 0, 3, True)),
    ):
        X, program = np.random.default_rng(0).uniform(low, high, size=(300, 2)), parse(text)
        if text in ("1/x1", "log(x1)"):  # a pole among the rows
            X[:, 0] = np.logspace(-12, 3, 300)
        judge = judge_of(X, evaluate_program(program, X.T))
        assert judge.hangs_on_rounding(program) == hangs


def test_a_logarithm_is_no_surprise_where_a_positive_variable_comes_close_to_0():
    x = np.repeat([0.02, 0.06, 0.11, 0.22, 0.56, 1.1], 4)
    y = 30 * np.log(x) + 184 + np.random.default_rng(0).normal(0.0, 15.0, len(x))
    judge = judge_of(x[:, None], y)
    assert not judge.strays(parse("30*log(x1) + 184"))
    assert judge.strays(parse("1/(x1 - 0.4)")) and judge.strays(parse("exp(4*x1)"))


@pytest.mark.parametrize("rows", [6, 8, 12])
def test_constants_take_a_row_each_from_what_few_rows_say(rows):
    """A law of two constants is chosen before a formula that has one for nearly each row."""
    x = np.geomspace(0.4, 30.0, rows)[:, None]
    y = 365.0 * x[:, 0] ** 1.5 * (1.0 + 1e-3 * np.random.default_rng(rows).normal(size=rows))
    law = parse("365*x1^1.5")
    others = np.polynomial.Polynomial.fit(x[:, 0], y, rows - 2).convert().coef.tolist()
    exact = parse(" + ".join(f"{c!r}*x1^{k}" for k, c in enumerate(others)))
    judge = judge_of(x, y, scale=float(np.var(y)))

    def lengths(program):
        loss = float(np.mean(np.square(evaluate_program(program, x.T) - y)))
        return loss, judge.choice_length(program, loss)

    (own, length), (least, other) = lengths(law), lengths(exact)
    assert least < own and length < other
    assert judge.taken_by_constants(parse("5"), 1.0) == 0.0


def test_a_warning_says_why_a_formula_is_not_chosen():
    for held_out, is_few, word in (
        *((math.nan, True, "which 10 rows do not pay for"), (0.02, False, "farthest targets")),
        (-0.3, False, "an R2 of -0.3 on the rows held out"),
        (math.nan, False, "farthest targets"),
    ):
        found = [(parse("5"), 1.0, held_out), (parse("x1 + x2"), 0.5, held_out)]
        chosen, favourite = build_front(found, len, texts, length, 1.0)
        reason = reason_against(favourite, chosen, 10, is_few=is_few)
        assert word in reason and f"{chosen.equation} is chosen" in reason
        assert "no other one" in reason_against(favourite, favourite, 10, is_few=is_few)


@pytest.mark.parametrize("rows", [60, 1000])
def test_a_pole_beside_a_row_far_out_explains_no_noise(rows):
    rng = np.random.default_rng(rows)
    X = rng.normal(size=(rows, 2))
    y = rng.standard_t(2, size=rows) if rows == 60 else rng.lognormal(size=rows)
    farthest = int(np.argmax(np.abs(y - np.median(y))[: -(rows // 5)]))
    middle = y.mean()
    height = y[farthest] - middle
    pole = parse(f"{middle:.9g} + {1e-6 * height:.9g}/((x1 - {X[farthest, 0]:.9g})^2 + 1e-6)")
    judge = judge_of(X, y, rows // 5, float(np.var(y)))
    fitted = np.mean(np.square(evaluate_program(pole, X.T) - y))
    assert fitted < 0.995 * np.var(y), "it has found the one row"
    assert judge.is_unpaid(pole, fitted) and not judge.is_unpaid(parse("1.5"), np.var(y))


@pytest.mark.parametrize(
    ("law", "freedom"),
    # Of the last one few rows make the step, and those held out confirm it.
    [("x1*x2 + x2", 2), ("3/(x1^2 + 0.01)", math.inf), ("(x1 > 2)*50", math.inf)],
)
def test_a_law_is_no_matter_of_few_rows(law, freedom):
    rng = np.random.default_rng(5)
    X, program, noise = rng.normal(size=(1000, 2)), parse(law), rng.standard_t(freedom, size=1000)
    y = evaluate_program(program, X.T) + noise
    judge = judge_of(X, y, 250, float(np.var(y)))
    assert not judge.is_unpaid(program, float(np.var(noise)))


@pytest.mark.parametrize(
    ("rows", "columns", "most", "takes_part"),
    [(80, 6, 21, True), (80, 6, 20, False), (39, 6, math.inf, False), (60, 30, math.inf, False)],
)
def test_linear_regression_is_the_null_model(rows, columns, most, takes_part):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(rows, columns)) * 10.0 ** np.linspace(6, 0, columns) + 5.0
    X[:, -1] = 3.0  # without variation: no term
    y = X[:, 0] / 1e6 + rng.normal(size=rows)
    weights, held_out = rng.uniform(0.5, 2.0, rows), np.arange(8)
    training, loss = TrainingData(X, y, weights), as_function(as_loss("mse"))
    judge = Selection(training, loss, Form(), len, 13, False, most, 1.0, held_out)
    assert (judge.null is not None) == takes_part
    programs = [parse("x1"), parse("1")]
    judge.validate(programs, [programs] * len(judge.folds))
    assert [*judge.lengths] == [*programs, *[judge.null] * takes_part]
    if not takes_part:
        return

    def predicted(fitted, left):
        design = np.column_stack([np.ones(rows), X[:, :-1]])
        roots = np.sqrt(weights[fitted])
        slopes = np.linalg.lstsq(design[fitted] * roots[:, None], y[fitted] * roots, rcond=1e-14)
        return design[left] @ slopes[0]

    everything = np.arange(rows)
    np.testing.assert_allclose(judge.values(judge.null), predicted(everything, everything))
    errors = [
        weights[left] @ np.square(predicted(fitted, left) - y[left])
        for fitted, left in [(np.arange(8, rows), held_out), *judge.folds]
    ]
    expected = rows / 2 * math.log(sum(errors) / weights.sum())
    assert judge.lengths[judge.null] == pytest.approx(expected)
    # Without time for fits a constant counts a nat, but not one of linear regression.
    other = Selection(training, loss, Form(), len, 13, False, most, 1.0, held_out)
    other.validate(programs)
    mean = np.average(np.square(1.0 - y), weights=weights)
    assert other.lengths[programs[1]] == pytest.approx(rows / 2 * math.log(mean) + 1.0)
    assert other.lengths[judge.null] == pytest.approx(expected)


@pytest.mark.parametrize(("own", "chosen"), [(33.1, 2), (32.9, 4), (31.0, 4)])
def test_a_formula_is_chosen_that_predicts_better_than_linear_regression(own, chosen):
    texts_of = ("x1", "exp(x1)", "x1 + 3*x2", "sin(9*exp(x1))", "x1 + 2*x2 + 3*x3 + 4*x4")
    programs, losses = [parse(text) for text in texts_of], [2.0, 1.9, 1.5, 1.0, 1.2]
    lengths = dict(zip(programs, [40.0, 39.0, 31.0, 50.0, own], strict=True))
    front = front_of(programs, losses, predictive=lengths, null=programs[4])
    assert all(each.is_linear_regression == (each.program == programs[4]) for each in front)
    assert front[selected(front, "prediction")].program == programs[chosen]
    # Of laws no predictive length is known, and the shortest description is chosen.
    front = front_of(programs, losses, null=programs[4])
    assert front[selected(front, "prediction")] == min(front, key=lambda e: e.description_length)


def test_what_only_decorates_is_not_among_the_equations():
    texts_of = ("x1", "exp(x1)", "x1 + exp(x2)", "x1 + exp(sin(x2))", "x1 + exp(sin(x2)) - cos(x1)")
    programs = [parse(text) for text in texts_of]
    found = [(program, 2.0 / (1 + n), 0.5) for n, program in enumerate(programs)]
    given = found, len, texts, lambda program, _: float(len(program)), 2.0

    def kept(**options):
        return [e.program for e in build_front(*given, **options)]

    assert kept() == programs
    # The rows are too few; the formula of the shortest description stays, whatever they pay for.
    assert kept(is_unpaid=lambda program, _: len(program) > 2) == programs[:2]
    assert kept(is_unpaid=lambda *_: True) == programs[:1]
    # Of new rows a simpler one tells as much, where structures count nothing.
    lengths = dict(zip(programs, [40.0, 30.0, 29.0, 32.0, 33.0], strict=True))
    counted = dict(zip(programs, [0.0, 1.0, 2.0, 3.0, 7.0], strict=True))
    options = {"predictive": lengths, "structure": counted.__getitem__}
    assert kept(**options) == [*programs[:3], programs[4]]
    assert kept(**options | {"predictive": lengths | {programs[4]: 34.5}}) == programs[:3]


def test_linear_regression_is_not_chosen_where_a_formula_predicts_all_rows_better():
    for r2, structure, surprise, chosen in (
        (0.51, 3.5, 0.0, 0),  # better on rows that no fit has seen, and in the cross-validation
        *((0.49, 3.5, 0.0, 1), (0.51, 1.5, 0.0, 1), (math.nan, 3.5, 0.0, 1)),
        (0.51, 3.5, 15.0, 1),  # its pole is not among these rows
    ):
        programs = [parse("exp(x1)"), parse("x1 + 2*x2 + 3*x3 + 4*x4")]
        lengths = dict(zip(programs, [33.0, 31.0], strict=True))
        counted = dict(zip(programs, [structure, 0.0], strict=True))
        options = {"predictive": lengths, "null": programs[1], "structure": counted.__getitem__}
        surprises = {programs[0]: surprise, programs[1]: 0.0}
        options["surprise"] = lambda program, _, known=surprises: known[program]
        front = front_of(programs, [1.5, 1.2], [r2, 0.5], **options)
        assert front[selected(front, "prediction")].program == programs[chosen]


@pytest.mark.parametrize(
    ("losses", "wanted"),
    [
        # On rows that the search did not compare they may have no value.
        ({"sqrt(x1 - 0.2)": math.nan, "x1": 0.1, "log(x1)": math.inf, "1": 1.0}, ["x1", "1"]),
        # What is longer than an exact formula, and is none, could not be among the equations.
        ({"x1/1": 0.0, "2*x1 - x1": 0.0, "exp(x1)*x1": 0.1}, ["x1/1", "2*x1 - x1"]),
    ],
)
def test_formulas_are_shortened_that_may_be_among_the_equations(monkeypatch, losses, wanted):
    shortened = []

    class Shortened(Form):
        def shortened(self, program, how):
            assert 0.0 <= how.tolerance < 1.0
            shortened.append(str(program))
            return program

    x = np.linspace(0.0, 1.0, 21)[:, None]
    training = TrainingData(x, x[:, 0], np.ones(21))
    own = SymbolicRegressor(), None, training, None, None, (), 0.0, math.inf, Shortened()
    task = TargetSearch(*own)
    task.selection.scale = 1.0
    monkeypatch.setattr(task, "_measured", lambda programs: {})
    task._shorten(None, {parse(text): [loss, 0.5] for text, loss in losses.items()})
    assert {parse(text) for text in shortened} == {parse(text) for text in wanted}


def test_a_sum_is_as_long_as_its_terms():
    for text, sizes in (
        ("3*x1 - x2/2 + 7", (1, 1)),
        ("0.5*x1*square(x2) - x1*(3*x2)/4", (4, 3)),  # factors within a product are of the term
        *(("sin(2*x1)*3 + 2/x1", (4, 3)), ("sqrt(2) + 1", ())),
        ("exp(x1) + 4*sqrt(x2 + 1)", (2, 4)),
    ):
        assert terms_of(parse(text)) == sizes
        wanted = sum(sizes) * math.log(15) - math.log(math.factorial(len(sizes)))
        assert structure_length(sizes, 15) == pytest.approx(wanted)
