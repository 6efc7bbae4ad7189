"""Arguments of every kind: those that are taken, mistakes, which are told, and joined batches."""

import math
import re
from functools import partial

import numpy as np
import pandas as pd
import pytest

import warpfit
import warpfit.testing
from support.refusals import refused
from warpfit import Batch, LossFunction, Population, Program, WarpfitError, losses, parse
from warpfit.calls import arguments
from warpfit.calls.arguments import PopulationCache, build_fit
from warpfit.calls.proposals import Proposal, Proposals
from warpfit.expressions.real_numbers import ParameterVectors
from warpfit.transport.call import Deadline
from warpfit.transport.connection import RetryPolicy, TransportConfig

X = np.random.default_rng(0).uniform(1.0, 2.0, (20, 2))
FRAME = pd.DataFrame(X, columns=["a", "b"])
HALF = "a\ud800b"


@pytest.fixture(scope="module")
def server():
    return warpfit.testing.InProcessServer()


@pytest.fixture(scope="module")
def client(server):
    return warpfit.testing.client(server)


@pytest.fixture(scope="module")
def data(client):
    return client.upload(X, X[:, 0])


def test_an_array_without_axes_is_its_element(client, data):
    wanted = client.evaluate(data, "x1")
    for text in (np.array("x1"), np.array("x1", dtype=object)):
        np.testing.assert_array_equal(client.evaluate(data, text), wanted)
    found = client.evaluate(data, ["p1*x1"], [np.array(2.0)])
    np.testing.assert_array_equal(found, 2.0 * wanted.reshape(-1, 1))
    settings = {"bounds": (np.array(0.0), np.array(3.0)), "fixed": np.array(True)}
    fit = build_fit(data, ["p1*x1 + p2"], None, settings).settings
    assert fit.lower.tolist() == [0.0, 0.0]
    assert fit.upper.tolist() == [3.0, 3.0]
    assert fit.fixed.tolist() == [True, True]
    assert client.upload(FRAME, np.array("b")).names == ("a",)
    assert client.upload(X, X[:, 0], names=None).content_id == data.content_id
    for odd in (np.array(1.0), np.array(None), np.array(2)):
        for call in (client.evaluate, client.optimize, client.simplify):
            refused("UNKNOWN_EXPRESSION_TYPE", call, data, odd)
        (answer,) = client.propose(data, odd)
        assert answer.error is not None


def test_numbers_of_numpy_are_numbers(client, data):
    rows, one = (np.int64(0), np.int64(5)), np.int64(1)
    assert client.evaluate(data, ["x1"], rows=rows, timeout=np.float32(5)).shape == (5, 1)
    assert client.evaluate(data, ["x1"], timeout=np.inf).shape == (20, 1)
    assert Deadline(1e10).remaining() is None
    assert client.optimize(data, ["p1*x1"], [[one]], max_iterations=one).iterations[0] <= 1
    warpfit.connect("127.0.0.1:1", replicas=np.int64(2), wait=np.float32(1.0)).close()


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
            refused("names is", take, names)


HALVES = [
    lambda client: client.upload(X, names=["a", HALF]),
    lambda client: client.upload(pd.DataFrame(X, columns=pd.Index(["a", HALF], dtype=object))),
    lambda client: client.upload(FRAME, HALF),
    lambda client: client.upload(FRAME, x=[HALF]),
    lambda client: client.upload(f"/tmp/{HALF}.parquet"),
    lambda client: client.open(HALF),
    lambda client: client.open("a.parquet", y=HALF),
    lambda client: client.evaluate(client.upload(X, X[:, 0]), HALF),
    lambda client: client.evaluate(client.upload(X, X[:, 0]), "x1", loss=HALF),
    lambda client: parse("x1", [HALF]) and parse(HALF),
    lambda client: parse("q", [HALF]),
    lambda client: warpfit.connect(HALF),
    lambda client: warpfit.connect("127.0.0.1:1", token=HALF),
]


@pytest.mark.parametrize("call", HALVES)
def test_half_a_character_is_refused_in_a_text_that_can_be_printed(client, call):
    str(refused("", call, client)).encode()
    assert r"a\ud800b" in str(Proposals([Proposal(HALF)]))


# ---------------------------------------------------------------------------------------- mistakes


U1, U4 = np.uint8, np.uint32
BOTH = Program.parameter(0), Program.parameter(1)


def fit(**options):
    return lambda c, d: c.optimize(d, ["p1*x1 + p2"], [[1.0, 0.0]], **options)


def evaluate(*arguments, **options):
    return lambda c, d: c.evaluate(d, *(arguments or (["x1"],)), **options)


#: By a pattern of reason and message: a call with a mistake.
CASES = {
    "'mape'": evaluate(loss="mape"),
    "needs a target": lambda c, d: c.evaluate(c.upload(X), "x1", loss="mse"),
    "needs a target ": lambda c, d: c.evaluate(c.upload(X), "x1", correlation=True),
    "'sloppy'": evaluate(precision="sloppy"),
    "rows is slice": evaluate(rows=slice(0, 10, 2)),
    "row range 0:61 does not fit": evaluate(rows=(0, 61)),
    "timeout 0.0 is not positive": evaluate(timeout=0),
    "numbers stand where .* client.upload": evaluate(X),
    "double precision is not supported.*auto": lambda c, d: c.upload(X, dtype="double precision"),
    "client.upload": lambda c, d: c.evaluate(X, ["x1"]),
    "client.upload ": lambda c, d: c.optimize(X, ["p1"], [[1.0]]),
    "loss='abs": evaluate(loss=np.mean),
    "Convert text": lambda c, d: c.upload(X, ["a"] * len(X)),
    "Give one number for each row of X": lambda c, d: c.upload(X, X[1:, 0]),
    "no keyword 'los'. Did you mean loss": evaluate(los="mse"),
    "Did you mean max_iterations": fit(max_iter=5),
    "Did you mean tolerance": lambda c, d: c.simplify(d, ["x1"], tolerence=0.1),
    "Did you mean names": lambda c, d: c.upload(X, name=("a", "b")),
    "no keyword 'columns'": lambda c, d: c.open("a.parquet", columns=["a"]),
    "rows is '0:5'": evaluate(rows="0:5"),
    "rows is array": evaluate(rows=np.arange(5)),
    r"rows is array\(\[ True[^\n]{,60}\.\.\. Give": evaluate(rows=np.ones(60, bool)),
    r"rows is \(0.0, 5": evaluate(rows=(0.0, 5.5)),
    "timeout is '5'": evaluate(timeout="5"),
    "no vector of numbers: 1.0": evaluate(list(BOTH), [1.0, 2.0]),
    "no vector of numbers: 2.0": evaluate("p1", 2.0),
    "codes .* of dtype int64": evaluate(Population(np.array([1]), np.zeros(1), np.ones(1, U4))),
    "values .* of dtype float32": evaluate(
        Batch(*(np.ones(1, kind) for kind in (U1, "f4", U4)), np.zeros(1, U4), np.empty(0))
    ),
    r"bounds is \[\(0, 2\), \(0, 3\)\]. Give a tuple": fit(bounds=[(0, 2), (0, 3)]),
    r"bounds is \(0,\)": fit(bounds=(0,)),
    r"fixed is \[\[2\]\]. Give a truth value": fit(fixed=[[2]]),
    "fixed is 'p1'. Give a truth value": fit(fixed="p1"),
    "expressions is a set. Give a list": evaluate({"x1"}),
    "y has 0 dimensions. Give one number for each row": lambda c, d: c.upload(X, 1.0),
    "weights has 0 dimensions. Give one number": lambda c, d: c.upload(X, X[:, 0], 2.0),
    r"name 'e1'.*Did you mean e\?": lambda c, d: parse("e1", ("e", "b")),
    "progress is True": fit(progress=True),
    r"p2 has a bound that is not a number": fit(bounds=([[0.0, np.nan]], np.inf)),
    "p1 has bounds between which no number": fit(bounds=(np.inf, np.inf)),
    "p1 has a lower bound above its upper": fit(bounds=(1.0, 0.0)),
    "data is of type int": lambda c, d: c.release(5),
    "names is 'ab'": lambda c, d: c.upload(X, names="ab"),
    r"names is \(1, 2\)": lambda c, d: c.upload(X, names=(1, 2)),
    "no numbers": lambda c, d: Program(["a"], [0.0]),
    "no whole number from 0 to 255": lambda c, d: Program([1.5], [0.0]),
    "whole number from 0": lambda c, d: Program([300], [0.0]),
    "'plus1' is no operator": lambda c, d: Program.apply("plus1", *BOTH),
    "an operand of sin is no Program": lambda c, d: Program.apply("sin", "x1"),
    "cannot be of type NoneType": lambda c, d: parse(None),
    "there is text in it": lambda c, d: BOTH[0].bind(["a"]),
    "defined by two texts": lambda c, d: warpfit.define("mine", 3),
    "a row loss is a Program": lambda c, d: LossFunction("d"),
    "tls is 'ca.pem'": lambda c, d: warpfit.connect("a:1", tls="ca.pem"),
    "visible ASCII": lambda c, d: warpfit.connect("localhost:1", token="a\nb"),
    "retry is 3": lambda c, d: warpfit.connect("a:1", retry=3),
    "transport is {}": lambda c, d: warpfit.connect("a:1", transport={}),
    "LOSS_MISSING": evaluate(gradient=True),
    "LOSS_MISSING ": evaluate(linear_scaling=True),
    "SCALING_UNDEFINED": evaluate(loss="huber", linear_scaling=True),
    "CONFLICTING_OUTPUTS": evaluate(loss="mse", linear_scaling=True, gradient=True),
    "EXPECTED_OPERAND": evaluate(loss="abs("),
    "UNKNOWN_NAME": evaluate(loss="abs(z)"),
    "BAD_LOSS.*p1": lambda c, d: LossFunction.parse("p1*d"),
    "BAD_LOSS.*x4": lambda c, d: LossFunction.parse("x4*d"),
    "BAD_LOSS": lambda c, d: LossFunction(Program.variable(3)),
    "BAD_ENUM.*median": lambda c, d: LossFunction.parse("d", "median"),
    "p1 is used": lambda c, d: c.simplify(d, ["x1 + p1"]),
    "2 parameter vectors": lambda c, d: c.simplify(d, "x1 + p1", [[1.0], [2.0]]),
    "x9.* out of range": lambda c, d: c.simplify(d, ["x9"]),
    "not positive": lambda c, d: c.simplify(d, ["x1"], timeout=0.0),
    "snap is 'pi'": lambda c, d: c.simplify(d, "x1", snap="pi"),
    "allows is 'never'": lambda c, d: c.simplify(d, "x1", allows="never"),
    "squared differences": fit(loss="mae", evidence=True),
    "all are asked for": fit(restarts=2, all_starts=True, evidence=True),
    "a level between 0 and 1": fit(intervals=95),
    "intervals is '95'.*a level between 0 and 1": fit(intervals="95"),
    "BAD_SETTING.*nosuch": lambda c, d: c.propose(d, ["p1*x1"], units={"nosuch": "m"}),
    "UNKNOWN_UNIT": lambda c, d: c.propose(d, ["p1*x1"], target_unit="florin"),
    "'nosuch'": lambda c, d: c.propose(d, ["p1*x1"], loss="nosuch"),
    "restarts is 1000000000": lambda c, d: c.propose(d, ["p1*x1"], restarts=10**9),
    "Give a unit for each": lambda c, d: c.propose(d, ["p1*x1"], units=3),
    "progress is 5": lambda c, d: c.propose(d, ["p1*x1"], progress=5),
    "needs a target  ": lambda c, d: c.propose(c.upload(X), ["p1*x1"]),
    "a list of skeletons": lambda c, d: c.propose(d, {"p1*x1", "p1*x2"}),
    # What other packages, or slips, call it.
    "Give starts behind the expressions": fit(p0=[1]),
    "weights= to upload": fit(sigma=[1]),
    "max_iterations=": fit(maxfev=9),
    "from_deap": evaluate(operators={"a": "b"}),
    "seconds=": lambda c, d: c.search(d, max_seconds=3),
    "without np, such as exp": evaluate(["np.exp(x1)"]),
    "Use it as it is": lambda c, d: warpfit.define("logistic", "1/(1+exp(-a))"),
    "begins with a letter": lambda c, d: warpfit.define("2nd", "a*a"),
    "Did you mean .*nmse": evaluate(loss="NMSE"),
    "Did you mean .*compiled": evaluate(tier="compile"),
    "Did you mean .*max_depth": lambda c, d: c.search(d, generations=1, max_dept=3),
    "Did you mean .*drop": fit(missing="drops"),
    "Did you mean .*huber": lambda c, d: losses.as_loss("hubber"),
    "Did you mean .*relative": lambda c, d: LossFunction.parse("d^2", "relativ"),
    "Did you mean .*square": lambda c, d: Program.apply("sqare", BOTH[0]),
    "Did you mean .*javascript": lambda c, d: parse("x1").code("JS"),
    "Did you mean .*cos": lambda c, d: parse("coss(x1)"),
}


def told(call, *arguments, **options):
    """Make a call with a mistake; return its reason and message."""
    with pytest.raises(WarpfitError) as caught:
        call(*arguments, **options)
    return f"{caught.value.reason}: {caught.value}"


@pytest.mark.parametrize("message", CASES)
def test_a_mistake_is_told_before_anything_is_sent(client, data, server, message):
    before = [server.calls.count(method) for method in ("Evaluate", "Optimize", "Search")]
    assert re.search(message.strip(), told(CASES[message], client, data), re.DOTALL)
    assert before == [server.calls.count(method) for method in ("Evaluate", "Optimize", "Search")]


def fitted(c, d, **number):
    return fit(**number)(c, d)


def made(kind):
    return lambda c, d, **number: kind(**number)


#: By the name of a number: a call that has it, and values that it does not take.
NUMBERS = {
    **dict.fromkeys(("max_iterations", "restarts", "seed"), (fitted, np.inf, 5.5)),
    **dict.fromkeys(("gradient_tolerance", "loss_tolerance", "step_tolerance"), (fitted, np.inf)),
    "intervals": (fitted, 1.0),
    "held_out": (lambda c, d, **number: c.propose(d, ["p1*x1"], **number), 1.0),
    "restarts ": (lambda c, d, **number: c.propose(d, ["p1*x1"], **number), np.inf, 1.5),
    "tolerance": (lambda c, d, **number: c.simplify(d, ["x1"], **number),),
    "level": (lambda c, d, level: c.optimize(d, "p1*x1", covariance=True).band(X, level=level),),
    "sigma": (made(losses.gaussian), 0),
    "delta": (made(losses.huber), 0),
    "q": (made(losses.quantile), 1.0),
    "wait": (made(partial(warpfit.connect, "a:1")),),
    "replicas": (made(partial(warpfit.connect, "a:1")), 0, 1.5),
    **dict.fromkeys(("jitter", "total_seconds"), (made(RetryPolicy),)),
    "keepalive_seconds": (made(TransportConfig), np.inf),
    **dict.fromkeys(("message_bytes", "chunk_bytes"), (made(TransportConfig), 0, 1000.5)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_what_is_no_number_in_its_range_is_told(client, data, name):
    call, *further = NUMBERS[name]
    for value in (np.nan, -1, "a", *further):
        number = {name.strip(): value}
        assert f"{name.strip()} is {value!r}" in told(call, client, data, **number)


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
        ([[1.5], [2, math.nan]], [1, 2], [1.5, 2, math.nan], 1, False),
        ([[[1], [2]], [3]], [1, 1], [1, 2, 3, 3], 2, True),
        ([np.ones((1, 2)), np.ones((1, 0))], [2, 0], [1, 1], 1, True),
        ([[np.array([1]), np.array([2])], [[3], [4]]], [1, 1], [1, 2, 3, 4], 2, True),
        ([[1, np.float64(2)], [10**30]], [2, 1], [1, 2, 1e30], 1, False),
        ([], [], [], 1, False),
    ],
)
def test_parameter_vectors_of_every_kind(entries, counts, numbers, count, leading_axis):
    vectors = ParameterVectors.of(2 if entries is None else len(entries), entries)
    assert vectors.counts.tolist() == counts
    assert vectors.counts.dtype == np.uint32
    np.testing.assert_array_equal(vectors.numbers, numbers)
    assert vectors.numbers.dtype == np.float64
    assert (vectors.count, vectors.leading_axis) == (count, leading_axis)


def test_what_is_no_vector_of_parameters_is_refused():
    assert refused("NOT_NUMBERS", ParameterVectors.of, 2, [[1.0], ["a"]]).expression == 1
    for entries in ([[1.0], "2"], [1.0, 2.0], [[1], np.ones((1, 1, 1))]):
        refused("", ParameterVectors.of, 2, entries)
