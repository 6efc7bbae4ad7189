"""`Client.search`: its arguments and their checks, its result, and a search that is interrupted."""

from dataclasses import replace

import numpy as np
import pytest

import warpfit
from support.refusals import refused
from warpfit import parse, search_codec, searching, testing
from warpfit.calls.search import merged, unscaled
from warpfit.dataset import Dataset
from warpfit.errors import FailedPreconditionError, ResourceExhaustedError, UnavailableError
from warpfit.ir import Batch
from warpfit.ops import OPERATORS
from warpfit.request import Timings
from warpfit.searching import Front, Rules, SearchProgress, SearchReason, SearchRequest, Units
from warpfit.v1 import evaluator_pb2 as pb

X = np.random.default_rng(0).normal(size=(50, 3))
Y = 2.0 * X[:, 1] + 1.0
DIMENSIONLESS = {"dimensionless_constants": True}


@pytest.fixture
def data(client):
    return client.upload(X, Y, names=["a", "b", "c"], dtype="float64")


def test_the_result_is_a_front_with_texts_and_a_callback_may_end_it(client, data):
    seen = []
    found = client.search(data, generations=3, progress=seen.append)
    assert found.reason == SearchReason.GENERATIONS
    assert found.texts[1] == str(found.best).replace("x2", "b")
    assert found.losses[1] < 1e-20 < found.losses[0] and found.sizes.tolist() == [1, 2]
    assert len(found) == 2
    values = client.evaluate(data, [found.best])[:, 0]
    np.testing.assert_allclose(values, Y)
    assert [one.reason for one in seen] == [None, SearchReason.GENERATIONS]
    assert "b" in repr(found) and "ended by generations" in found._repr_html_()
    found = client.search(data, seconds=1e6, progress=lambda found: found.losses.min() < 1e-20)
    assert (found.reason, found.generations) == (SearchReason.CANCELLED, 0)
    assert client.search(data, formulas=5).reason == SearchReason.FORMULAS


def test_a_mistake_in_a_call_is_named():
    for reason, field, options in (
        ("BUDGET_MISSING", "max_seconds", {}),
        ("BAD_SETTING", "definitions", {"definitions": ["a*b"]}),
        ("UNSATISFIABLE", "units", {"units": {"a": "m"}, "target_unit": "kg", **DIMENSIONLESS}),
        ("BAD_SETTING", "seconds", {"seconds": 0}),
        ("BAD_SETTING", "generations", {"generations": 0}),
        ("BAD_SETTING", "population", {"population": 0}),
        ("BAD_SETTING", "weight of add", {"operators": {"add": "often"}}),
        ("BAD_SETTING", "variables", {"variables": ["d"]}),
        *(("BAD_SETTING", "group", {"group": "d"}), ("BAD_SETTING", "counts", {"counts": ["exp"]})),
        ("BAD_SETTING", "nesting", {"nesting": {"exp": 1}}),
        ("BAD_SETTING", "definitions", {"definitions": {"bump": 3}}),
        ("BAD_SETTING", "definitions", {"definitions": {7: "a*b"}}),
        ("BAD_SETTING", "monotonic", {"monotonic": {"x1": ["increasing"]}}),
        ("BAD_SETTING", "monotonic", {"monotonic": {"x1": "up"}}),
        ("BAD_SETTING", "arguments", {"arguments": [1]}),
        ("BAD_SETTING", "arguments of pow", {"arguments": {"pow": 1}}),
        ("BAD_SETTING", "units", {"target_unit": "m"}),
        ("UNKNOWN_UNIT", "units of a", {"units": {"a": "parsnips/day?"}}),
        *(("BAD_ENUM", "form", {"form": "round"}), ("BAD_SETTING", "progress", {"progress": 3})),
    ):
        with testing.client() as client:
            data = client.upload(X, Y, names=["a", "b", "c"])
            budget = {} if reason == "BUDGET_MISSING" else {"formulas": 9}
            assert refused(reason, client.search, data, **budget | options).field == field


def progress(text, loss, size, **given):
    """Return a progress with the constant and one formula, all of whose parameters are 2."""
    program = warpfit.parse(text)
    batch = Batch.of([warpfit.parse("p1"), program], [[0.5], [2.0] * program.parameters])
    front = Front(batch, np.array([1, size]), np.array([9.0, loss]))
    return SearchProgress(front, **given)


class Interrupted(testing.InProcessServer):
    """Answers a search by a script: each attempt has progress, and a failure if it is not last."""

    def __init__(self, *attempts):
        super().__init__()
        self.attempts, self.requests = list(attempts), []

    def _search(self, message):
        self.requests.append(search_codec.search_from_message(message))
        *answers, failure = self.attempts.pop(0)
        for answer in answers:
            data = search_codec.progress_to_bytes(answer)
            if answer.reason is not None:
                data += search_codec.search_end(Timings())
            yield pb.SearchResponse.FromString(data)
        if failure is not None:
            raise failure


def texts_of(programs):
    return [str(program).replace(" ", "") for program in programs]


LOST = UnavailableError("the engine is restarting", "ENGINE_RESTARTING")
BUSY = ResourceExhaustedError("busy", "TOO_MANY_SEARCHES", retry_after=0.001)
FIRST = progress("sin(p3*x1)*p1 + p2", 3.0, 4, seconds=6.0, generations=60, formulas=600, fits=7)
WORSE = progress("x2*p1 + p2", 5.0, 2, seconds=1.0, generations=10, formulas=100)
ENDED = {"seconds": 3.0, "generations": 30, "formulas": 300, "reason": SearchReason.TIME}
LAST = progress("x3^2*p1 + p2", 1.0, 3, **ENDED)


def search(*attempts, **options):
    server = Interrupted(*attempts)
    with testing.client(server) as client:
        data = client.upload(X, Y)
        return server, client.search(data, **({"seconds": 10.0} | options))


def test_a_search_goes_on_from_its_front_with_what_is_left_of_the_budget():
    attempts = (LOST,), (FIRST, LOST), (LOST,), (BUSY,), (WORSE, LOST), (LAST, None)
    server, found = search(*attempts, generations=500, formulas=10_000)
    budgets = [(r.max_seconds, r.max_generations, r.max_formulas) for r in server.requests]
    assert budgets == [(10, 500, 10_000)] * 2 + [(4, 440, 9_400)] * 3 + [(3, 430, 9_300)]
    texts = [r.guesses and texts_of(r.guesses) for r in server.requests]
    first = ["sin(p1*x1)"]
    assert texts == [None, None, first, first, first, [*first, "x2"][::-1]]
    assert server.requests[2].guesses.parameters.tolist() == [2.0]
    assert found.interruptions == 2 and found.reason == SearchReason.TIME
    assert (found.seconds, found.generations, found.tried, found.fits) == (10.0, 100, 1_000, 7)
    assert found.losses.tolist() == [9.0, 5.0, 1.0]  # of size 4 there was nothing better
    assert found.sizes.tolist() == [1, 2, 3] and "interrupted 2 times" in repr(found)


def test_guesses_of_the_caller_stay_and_formulas_of_a_plain_search_are_whole():
    server, _ = search((FIRST, LOST), (LAST, None), guesses=["2.5*x1 + p1"])
    guesses = server.requests[1].guesses
    assert texts_of(guesses) == ["p2*x1+p1", "sin(p1*x1)"]
    assert guesses.parameters.tolist() == [1.0, 2.5, 2.0]
    server, _ = search((FIRST, LOST), (LAST, None), form=searching.Form.PLAIN)
    assert "sin(p3*x1)*p1+p2" in texts_of(server.requests[1].guesses)


def test_a_data_set_that_is_removed_meanwhile_is_sent_again():
    gone = warpfit.DatasetNotFoundError()
    server, found = search((FIRST, gone), (LAST, None))
    assert server.calls.count("UploadVariables") == 2 and found.interruptions == 1
    assert server.requests[1].max_seconds == 4.0


def test_an_interrupted_search_ends_with_its_budget_or_is_given_up():
    server, found = search((FIRST, LOST), seconds=6.0)
    assert len(server.requests) == 1
    assert (found.reason, found.losses.min()) == (SearchReason.TIME, 3.0)
    with pytest.raises(FailedPreconditionError) as caught:
        search(*([(WORSE, LOST)] * 9), seconds=100)
    assert caught.value.reason == "SEARCH_INTERRUPTED"


def test_what_was_found_can_be_had_if_the_server_is_lost_for_good():
    def run(**options):
        server = Interrupted((FIRST, LOST), *[(LOST,)] * 999)
        retry = warpfit.RetryPolicy(total_seconds=0.05, initial_backoff=0.01)
        with testing.client(server, retry=retry) as client:
            return client.search(client.upload(X, Y), seconds=10, **options)

    with pytest.raises(UnavailableError):
        run()
    found = run(partial=True)
    assert (found.reason, found.losses.min(), found.interruptions) == (None, 3.0, 1)


def test_the_best_of_scores_is_the_highest():
    first, second = (progress("x1", loss, size).front for loss, size in ((0.5, 2), (0.25, 3)))
    first.losses[0] = second.losses[0] = 0.0
    assert merged(first, second, is_score=True).losses.tolist() == [0.0, 0.5]
    assert merged(first, second).losses.tolist() == [0.0]


def test_slope_and_intercept_are_no_part_of_a_guess():
    for text, wanted in (
        *(("p1 + p2*sin(x1)", "sin(x1)"), ("p2*sin(x1) + p1", "sin(x1)")),
        *(("sin(x1)*p1 + p2", "sin(x1)"), ("p1*x1*p2 + p3", "p1*x1"), ("p1 - x1", "p1 - x1")),
        ("p1", "p1"),
        *(("sin(x1) + p1", "sin(x1)"), ("x1 + x2", "x1 + x2")),
    ):
        assert texts_of([unscaled(warpfit.parse(text))]) == [wanted.replace(" ", "")]


def test_another_server_goes_on_where_one_was_lost():
    script = [(FIRST, LOST), (LAST, None)]
    servers = {"a:1": Interrupted(), "b:1": Interrupted()}
    for server in servers.values():
        server.attempts = script
    with testing.client(servers) as client:
        found = client.search(client.upload(X, Y), seconds=10.0)
    assert [len(server.requests) for server in servers.values()] == [1, 1]
    assert (found.interruptions, found.reason) == (1, SearchReason.TIME)


ROWS = np.random.default_rng(0).normal(size=(20, 3))
LAYOUT = Dataset.of(ROWS, ROWS[:, 0]).layout
USUAL = SearchRequest(bytes(32), max_generations=1)
EXPONENTS = np.eye(3, searching.BASE_UNITS)
LENGTH, MASS_AND_CURRENT = (
    EXPONENTS[0],
    np.eye(searching.BASE_UNITS)[1] + np.eye(searching.BASE_UNITS)[3],
)
ONE = Batch.of([parse("x1")])
MANY = {(outer, inner): 0 for outer in [*OPERATORS][:13] for inner in [*OPERATORS][:5]}
#: f(x1, x2)*p1 + exp(g(x3)); numbers are those of `warpfit.ops`.
ADD, MUL, EXP = (OPERATORS[name].code for name in ("add", "mul", "exp"))
FORM = np.array([1, 1, 128, 2, MUL, 1, 129, EXP, ADD], np.uint8)
NUMBERS = np.array([0.0, 1.0, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0])
TWICE = {"twice": parse("2*x1")}


def template(arities=(2, 1), codes=FORM, numbers=NUMBERS, **given):
    return {"template": searching.Template(codes, numbers, arities, **given)}


def parts(*texts):
    return {"guesses": Batch.of([parse(text) for text in texts])}


def rules(**given):
    return {"rules": Rules(**given)}


def test_what_is_right_passes():
    for given in (
        *({}, {"max_generations": 0, "max_seconds": 0.5}),
        {"rows": (3, 4), "variables": (2, 0), "group": 1},
        {"guesses": ONE, "units": Units(EXPONENTS)},
        {"units": Units(EXPONENTS, LENGTH, dimensionless_constants=True)},
        template(),
        template(fitted=2) | parts("x1 + x2", "x1", "2") | {"monotonic": {0: 1, 2: -1}},
        {"definitions": TWICE, "operators": {"twice": 2.0}, **rules(counts={"twice": 1})},
        rules(arguments={"pow": (-1, 1)}, nesting={("exp", "exp"): 0}, counts={"sin": 0}),
        {"max_generations": 2**64 - 1, "seed": 2**64 - 1},
    ):
        replace(USUAL, **given).check(LAYOUT)


FEW = {"add": 1.0, "exp": 1.0}
ALONE = {
    **{"max_seconds": -1.0, "max_generations": 2**64, "max_formulas": -1, "idle_generations": -1},
    **{"target_loss": np.nan, "screening_rows": 0, "islands": 2**20, "fit_iterations": -1},
    **{"seed": 2**64, "operators": {}, "variables": (1, 1)},
}
CODES = {"codes": FORM[:-1], "numbers": NUMBERS[:-1]}, {"codes": FORM[:0], "numbers": NUMBERS[:0]}
DEFINITIONS = ("x2", "p1*x1", "x1 + x2 + x3 + x4")
#: By reason and field: what is wrong.
WRONG = {
    ("BUDGET_MISSING", "max_seconds"): [{}, {"target_loss": 0.1}],
    **{("BAD_SETTING", name): [{name: value}] for name, value in ALONE.items()},
    ("BAD_SETTING", "population"): [{"population": 3, "islands": 4}],
    ("BAD_SETTING", "monotonic"): [{"monotonic": {3: 1}}, {"monotonic": {0: 2}}],
    ("ROWS_OUT_OF_RANGE", "rows"): [{"rows": (5, 5)}, {"rows": (0, 21)}],
    ("UNKNOWN_OPERATOR", "operators"): [{"operators": {"plus": 1.0}}],
    ("BAD_SETTING", "the weight of add"): [{"operators": {"add": 0.0}}],
    ("NO_VARIABLES", "variables"): [{"variables": ()}],
    ("VARIABLE_OUT_OF_RANGE", "variables"): [{"variables": (0, 3)}, {"variables": (-1,)}],
    ("CONFLICTING_SETTINGS", "variables"): [{"variables": (1, 2), "group": 1}],
    ("BAD_GROUP", "group"): [{"group": 3}],
    ("BAD_SETTING", "max_size"): [rules(max_size=0), rules(max_size=1_001)],
    ("BAD_SETTING", "max_depth"): [rules(max_depth=-1)],
    ("BAD_SETTING", "complexities of exp"): [rules(complexities={"exp": 0})],
    ("BAD_SETTING", "counts of exp"): [rules(counts={"exp": -1})],
    ("UNKNOWN_OPERATOR", "nesting"): [rules(nesting={("exp", "plus"): 1})],
    ("BAD_SETTING", "rules of nesting"): [rules(nesting=MANY)],
    ("BAD_SETTING", "nesting of sin in exp"): [rules(nesting={("exp", "sin"): -1})],
    ("UNKNOWN_OPERATOR", "arguments"): [rules(arguments={"plus": (1, 1)})],
    ("BAD_SETTING", "arguments of pow"): [rules(arguments={"pow": (1, 0)})],
    ("BAD_UNITS", "units"): [
        {"units": Units(*given)}
        for given in ([EXPONENTS[:2]], [EXPONENTS * np.nan], [EXPONENTS, LENGTH[:3]])
    ],
    ("UNSATISFIABLE", "units"): [
        {"units": Units(EXPONENTS, MASS_AND_CURRENT, True)},
        {"units": Units(EXPONENTS, LENGTH, True), "variables": (1, 2)},
        {"units": Units(EXPONENTS, 3 * LENGTH, True), "operators": FEW},
    ],
    ("BAD_TEMPLATE", "template"): [
        *map(template, ((), (1,) * 9, (2, 2), (2, 1, 1))),
        *(template(numbers=numbers) for numbers in (NUMBERS[:-1], NUMBERS + 0.5, NUMBERS + 2.0)),
        *(template(**given) for given in (*CODES, {"fitted": 3})),
    ],
    ("BAD_SETTING", "guesses"): [
        *(template() | {"guesses": ONE}, template() | parts("x1", "x2", "1")),
        {"definitions": TWICE} | parts("x4"),
    ],
    ("BAD_SETTING", "the definition of add"): [{"definitions": {"add": parse("x1")}}],
    ("BAD_SETTING", "the definition of f"): [
        {"definitions": {"f": parse(text)}} for text in DEFINITIONS
    ],
    ("CONFLICTING_SETTINGS", "guesses"): [{"guesses": ONE, "variables": (1,)}],
    ("VARIABLE_OUT_OF_RANGE", "programs"): [parts("x4")],
    ("BAD_SETTING", "vectors of guesses"): [{"guesses": Batch.of([parse("p1")], [[[1], [2]]])}],
}


@pytest.mark.parametrize(("reason", "field"), WRONG)
def test_a_mistake_is_named(reason, field):
    usual = replace(USUAL, max_generations=0) if reason == "BUDGET_MISSING" else USUAL
    for given in WRONG[reason, field]:
        wrong = replace(usual, **given)
        assert refused(reason, wrong.check, LAYOUT).field == field, given


def test_data_without_a_target_are_refused_and_the_operator_that_was_meant_is_named():
    refused("TARGET_MISSING", lambda: USUAL.check(Dataset.of(ROWS).layout))
    refused("Did you mean square", lambda: replace(USUAL, operators={"squared": 1.0}).check(LAYOUT))
