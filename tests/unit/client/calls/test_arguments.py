"""Arguments of every kind: those that are taken, mistakes, which are told, and joined batches."""

import math
import re
from decimal import Decimal
from fractions import Fraction
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import scipy.sparse

import warpfit
import warpfit.testing
from support.refusals import refused
from warpfit import Batch, LossFunction, Population, Program, WarpfitError, losses, parse, sklearn
from warpfit.calls import arguments
from warpfit.calls.arguments import PopulationCache, build_fit
from warpfit.calls.proposals import Proposal, Proposals
from warpfit.expressions.real_numbers import ParameterVectors, real_numbers
from warpfit.transport.call import Deadline
from warpfit.transport.connection import RetryPolicy, TransportConfig

X = np.random.default_rng(0).uniform(1.0, 2.0, (20, 2))
FRAME = pd.DataFrame(X, columns=["a", "b"])
HALF = "a\ud800b"


SERVER = warpfit.testing.InProcessServer()


@pytest.fixture(scope="module")
def client():
    return warpfit.testing.client(SERVER)


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
    assert fit.lower.tolist() == [0.0, 0.0] and fit.upper.tolist() == [3.0, 3.0]
    assert fit.fixed.tolist() == [True, True]
    assert client.upload(FRAME, np.array("b")).names == ("a",)
    assert client.upload(X, X[:, 0], names=None).content_id == data.content_id
    for odd in (np.array(1.0), np.array(None), np.array(2)):
        for call in (client.evaluate, client.optimize, client.simplify):
            refused("UNKNOWN_EXPRESSION_TYPE", call, data, odd)
        (answer,) = client.propose(data, odd)
        assert answer.error is not None


def test_parameters_are_fixed_by_truth_values_and_not_by_indices_or_names(data):
    for fixed, kept in (
        *((fixed, [False, True]) for fixed in ([False, True], [0, 1], [[None, True]])),
        *((True, [True, True]), ([True], [True, True]), ([None], [False, False])),
        *((fixed, None) for fixed in ([1], [0], 1, [2], ["p2"], "p2", [0.5, 0])),
    ):
        if kept is None:
            why = "Give a truth value for each parameter"
            refused(why, build_fit, data, ["p1*x1 + p2"], None, {"fixed": fixed})
        else:
            settings = build_fit(data, ["p1*x1 + p2"], None, {"fixed": fixed}).settings
            assert settings.fixed.tolist() == kept


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
            *(lambda names: warpfit.parse("a", names), warpfit.parse("x1 + x2").latex),
            warpfit.parse("x1 + x2").to_numpy,
        ):
            refused("names is", take, names)


def test_half_a_character_is_refused_in_a_text_that_can_be_printed(client):
    for call in (
        lambda client: client.upload(X, names=["a", HALF]),
        lambda client: client.upload(pd.DataFrame(X, columns=pd.Index(["a", HALF], dtype=object))),
        *(lambda client: client.upload(FRAME, HALF), lambda client: client.upload(FRAME, x=[HALF])),
        *(lambda client: client.upload(f"/tmp/{HALF}.parquet"), lambda client: client.open(HALF)),
        lambda client: client.open("a.parquet", y=HALF),
        lambda client: client.evaluate(client.upload(X, X[:, 0]), HALF),
        lambda client: client.evaluate(client.upload(X, X[:, 0]), "x1", loss=HALF),
        *(lambda client: parse("x1", [HALF]) and parse(HALF), lambda client: parse("q", [HALF])),
        lambda client: warpfit.connect(HALF),
        lambda client: warpfit.connect("127.0.0.1:1", token=HALF),
    ):
        str(refused("", call, client)).encode()
        assert r"a\ud800b" in str(Proposals([Proposal(HALF)]))


U1, U4 = np.uint8, np.uint32
BOTH = Program.parameter(0), Program.parameter(1)


def fit(**options):
    return lambda c, d: c.optimize(d, ["p1*x1 + p2"], [[1.0, 0.0]], **options)


def evaluate(*arguments, **options):
    return lambda c, d: c.evaluate(d, *(arguments or (["x1"],)), **options)


#: By a pattern of reason and message: a call with a mistake.
CASES = {
    "needs a target": lambda c, d: c.evaluate(c.upload(X), "x1", loss="mse"),
    **{"'sloppy'": evaluate(precision="sloppy"), "rows is slice": evaluate(rows=slice(0, 10, 2))},
    "row range 0:61 does not fit": evaluate(rows=(0, 61)),
    "timeout 0.0 is not positive": evaluate(timeout=0),
    "numbers stand where .* client.upload": evaluate(X),
    "double precision is not supported.*auto": lambda c, d: c.upload(X, dtype="double precision"),
    **{"client.upload": lambda c, d: c.evaluate(X, ["x1"]), "loss='abs": evaluate(loss=np.mean)},
    "no keyword 'los'. Did you mean loss": evaluate(los="mse"),
    "Did you mean max_iterations": fit(max_iter=5),
    "Did you mean tolerance": lambda c, d: c.simplify(d, ["x1"], tolerence=0.1),
    "no keyword 'columns'": lambda c, d: c.open("a.parquet", columns=["a"]),
    r"rows is array\(\[ True[^\n]{,60}\.\.\. Give": evaluate(rows=np.ones(60, bool)),
    **{r"rows is \(0.0, 5": evaluate(rows=(0.0, 5.5)), "timeout is '5'": evaluate(timeout="5")},
    "no vector of numbers: 1.0": evaluate(list(BOTH), [1.0, 2.0]),
    "codes .* of dtype int64": evaluate(Population(np.array([1]), np.zeros(1), np.ones(1, U4))),
    "values .* of dtype float32": evaluate(
        Batch(*(np.ones(1, kind) for kind in (U1, "f4", U4)), np.zeros(1, U4), np.empty(0))
    ),
    r"bounds is \[\(0, 2\), \(0, 3\)\]. Give a tuple": fit(bounds=[(0, 2), (0, 3)]),
    r"bounds is \(0,\)": fit(bounds=(0,)),
    "expressions is a set. Give a list": evaluate({"x1"}),
    "weights has 0 dimensions. Give one number": lambda c, d: c.upload(X, X[:, 0], 2.0),
    "progress is True": fit(progress=True),
    r"p2 has a bound that is not a number": fit(bounds=([[0.0, np.nan]], np.inf)),
    "p1 has bounds between which no number": fit(bounds=(np.inf, np.inf)),
    "p1 has a lower bound above its upper": fit(bounds=(1.0, 0.0)),
    "data is of type int": lambda c, d: c.release(5),
    "no numbers": lambda c, d: Program(["a"], [0.0]),
    "no whole number from 0 to 255": lambda c, d: Program([1.5], [0.0]),
    "an operand of sin is no Program": lambda c, d: Program.apply("sin", "x1"),
    "cannot be of type NoneType": lambda c, d: parse(None),
    "defined by two texts": lambda c, d: warpfit.define("mine", 3),
    "a row loss is a Program": lambda c, d: LossFunction("d"),
    "tls is 'ca.pem'": lambda c, d: warpfit.connect("a:1", tls="ca.pem"),
    "visible ASCII": lambda c, d: warpfit.connect("localhost:1", token="a\nb"),
    "retry is 3": lambda c, d: warpfit.connect("a:1", retry=3),
    "transport is {}": lambda c, d: warpfit.connect("a:1", transport={}),
    **{"LOSS_MISSING": evaluate(gradient=True), "LOSS_MISSING ": evaluate(linear_scaling=True)},
    "SCALING_UNDEFINED": evaluate(loss="huber", linear_scaling=True),
    "CONFLICTING_OUTPUTS": evaluate(loss="mse", linear_scaling=True, gradient=True),
    "UNKNOWN_NAME": evaluate(loss="abs(z)"),
    "BAD_LOSS.*p1": lambda c, d: LossFunction.parse("p1*d"),
    "BAD_LOSS.*x4": lambda c, d: LossFunction.parse("x4*d"),
    "p1 is used": lambda c, d: c.simplify(d, ["x1 + p1"]),
    "2 parameter vectors": lambda c, d: c.simplify(d, "x1 + p1", [[1.0], [2.0]]),
    "x9.* out of range": lambda c, d: c.simplify(d, ["x9"]),
    "snap is 'pi'": lambda c, d: c.simplify(d, "x1", snap="pi"),
    "allows is 'never'": lambda c, d: c.simplify(d, "x1", allows="never"),
    "squared differences": fit(loss="mae", evidence=True),
    "all are asked for": fit(restarts=2, all_starts=True, evidence=True),
    "intervals is '95'.*a level between 0 and 1": fit(intervals="95"),
    "UNKNOWN_UNIT": lambda c, d: c.propose(d, ["p1*x1"], target_unit="florin"),
    "'nosuch'": lambda c, d: c.propose(d, ["p1*x1"], loss="nosuch"),
    "restarts is 1000000000": lambda c, d: c.propose(d, ["p1*x1"], restarts=10**9),
    "Give a unit for each": lambda c, d: c.propose(d, ["p1*x1"], units=3),
    "progress is 5": lambda c, d: c.propose(d, ["p1*x1"], progress=5),
    "needs a target  ": lambda c, d: c.propose(c.upload(X), ["p1*x1"]),
    "a list of skeletons": lambda c, d: c.propose(d, {"p1*x1", "p1*x2"}),
    # Names that other packages have for it, and slips.
    **{"Write parameters=": fit(p0=[1]), "Write seed=": lambda c, d: c.search(d, random_state=1)},
    "Write counts=, nesting=": lambda c, d: c.search(d, constraints={}),
    "Use held_out, loss, ": lambda c, d: c.propose(d, ["x1"], p0=1),
    "Write weights=": lambda c, d: c.upload(X, yerr=[1]),
    'the address as "HOST:PORT"': lambda c, d: warpfit.connect(host="h", port=1),
    "timeout= to each call": lambda c, d: warpfit.connect_async(timeout=1),
    "Did you mean address=": lambda c, d: warpfit.connect(adress="h:1"),
    r'local\("--devices", "cpu"\)': lambda c, d: warpfit.local(devices="cpu"),
    **{"weights= to upload": fit(sigma=[1]), "from_deap": evaluate(operators={"a": "b"})},
    "seconds=": lambda c, d: c.search(d, max_seconds=3),
    "without np, such as exp": evaluate(["np.exp(x1)"]),
    "Use it as it is": lambda c, d: warpfit.define("logistic", "1/(1+exp(-a))"),
    "begins with a letter": lambda c, d: warpfit.define("2nd", "a*a"),
    "Did you mean .*nmse": evaluate(loss="NMSE"),
    "Did you mean .*compiled": evaluate(tier="compile"),
    "Did you mean .*max_depth": lambda c, d: c.search(d, generations=1, max_dept=3),
    "Did you mean .*drop": fit(missing="drops"),
    "Did you mean .*relative": lambda c, d: LossFunction.parse("d^2", "relativ"),
    "Did you mean .*square": lambda c, d: Program.apply("sqare", BOTH[0]),
}


def told(call, *arguments, **options):
    with pytest.raises(WarpfitError) as caught:
        call(*arguments, **options)
    return f"{caught.value.reason}: {caught.value}"


@pytest.mark.parametrize("message", CASES)
def test_a_mistake_is_told_before_anything_is_sent(client, data, message):
    before = [SERVER.calls.count(method) for method in ("Evaluate", "Optimize", "Search")]
    assert re.search(message.strip(), told(CASES[message], client, data), re.DOTALL)
    assert before == [SERVER.calls.count(method) for method in ("Evaluate", "Optimize", "Search")]


def fits(c, d, **number):
    c.optimize(d, ["p1*x1"], **number)


def proposes(c, d, **number):
    c.propose(d, ["p1*x1"], **number)


def made(kind):
    return lambda c, d, **number: kind(**number)


#: By the name of a number: a call that has it, and values that it does not take.
NUMBERS = {
    **dict.fromkeys(("max_iterations", "restarts", "seed"), (fits, np.inf, 5.5)),
    **dict.fromkeys(("gradient_tolerance", "loss_tolerance", "step_tolerance"), (fits, np.inf)),
    **{"intervals": (fits, 1.0), "held_out": (proposes, 1.0), "restarts ": (proposes, np.inf, 1.5)},
    "tolerance": (lambda c, d, **number: c.simplify(d, ["x1"], **number),),
    "level": (lambda c, d, level: c.optimize(d, "p1*x1", covariance=True).band(X, level=level),),
    **{"sigma": (made(losses.gaussian), 0), "delta": (made(losses.huber), 0)},
    **{"q": (made(losses.quantile), 1.0), "wait": (made(partial(warpfit.connect, "a:1")),)},
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


TEXTS = ["x1 + p1", "sin(x2)", "x1*x2 - 3", "p1/p2"]


def parsed(*texts):
    return [parse(text) for text in texts]


@pytest.mark.parametrize("place", range(4))
def test_the_same_programs_are_joined_once_and_others_are_another_batch(place):
    cache, programs = PopulationCache(), parsed(*TEXTS)
    first = cache.of(programs)
    assert list(first) == programs and cache.of(list(programs)) is first
    other = [*programs[:place], parse("exp(x1)"), *programs[place + 1 :]]
    assert list(cache.of(other)) == other and list(cache.of(programs[:3])) == programs[:3]
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


def test_parameter_vectors_of_every_kind():
    for entries, counts, numbers, count, leading_axis in (
        *((None, [0, 0], [], 1, False), ([[], [1, 2]], [0, 2], [1, 2], 1, False)),
        ([np.array([1], np.float32), (2, 3)], [1, 2], [1, 2, 3], 1, False),
        ([[[1], [2]], [3]], [1, 1], [1, 2, 3, 3], 2, True),
        ([np.ones((1, 2)), np.ones((1, 0))], [2, 0], [1, 1], 1, True),
        ([[np.array([1]), np.array([2])], [[3], [4]]], [1, 1], [1, 2, 3, 4], 2, True),
        ([[1, np.float64(2)], [10**30]], [2, 1], [1, 2, 1e30], 1, False),
        ([], [], [], 1, False),
    ):
        vectors = ParameterVectors.of(2 if entries is None else len(entries), entries)
        assert vectors.counts.tolist() == counts and vectors.counts.dtype == np.uint32
        np.testing.assert_array_equal(vectors.numbers, numbers)
        assert vectors.numbers.dtype == np.float64
        assert (vectors.count, vectors.leading_axis) == (count, leading_axis)


def test_what_is_no_vector_of_parameters_is_refused():
    assert refused("NOT_NUMBERS", ParameterVectors.of, 2, [[1.0], ["a"]]).expression == 1
    for entries in ([[1.0], "2"], [[1], np.ones((1, 1, 1))]):
        refused("", ParameterVectors.of, 2, entries)


def giving(array, **members):
    """An object that NumPy makes an array of."""
    return SimpleNamespace(__array__=lambda *_, **__: array, **members)


def on_device(copy):
    """An array of a GPU as CuPy (get) and Numba (copy_to_host) have them: NumPy cannot read it."""
    own = {"shape": (2,), "typestr": "<f8", "data": (1, False), "version": 3}
    unread = Mock(side_effect=TypeError("implicit conversion is not allowed"))
    members = {"__array__": unread, copy: lambda: np.array([1.0, 2.0])}
    return SimpleNamespace(__cuda_array_interface__=own, **members)


def of_dlpack(device, **answer):
    """An array that has DLPack alone."""
    return SimpleNamespace(__dlpack__=Mock(**answer), __dlpack_device__=lambda: (device, 0))


ELSEWHERE = of_dlpack(2, side_effect=BufferError("on the device alone"))
#: A tensor of PyTorch that is differentiated, of a type that NumPy has not.
TENSOR = SimpleNamespace(dtype="torch.bfloat16", float=lambda: np.array([1.0, 2.0], np.float32))
TENSOR.detach = TENSOR.cpu = lambda: TENSOR
DECIMALS = pd.ArrowDtype(pa.decimal128(30, 2))
TAKEN = {
    **{"CuPy": (on_device("get"), [1, 2]), "Numba's device": (on_device("copy_to_host"), [1, 2])},
    "DLPack": (of_dlpack(1, side_effect=np.array([1.0, 2.0]).__dlpack__), [1, 2]),
    "PyTorch": (TENSOR, [1, 2]),
    "booleans": ([True, False], [1, 0]),
    "wide": (np.array([1.5, np.inf], np.longdouble), [1.5, math.inf]),
    "NaN and infinity": ([math.nan, -math.inf], [math.nan, -math.inf]),
    "decimals and fractions": ([Decimal("1.5"), Fraction(1, 4)], [1.5, 0.25]),
    "infinite decimal": ([Decimal("-Infinity"), Decimal("NaN")], [-math.inf, math.nan]),
    "large integers": ([2**70, 1], [2.0**70, 1]),
    "nothing masked": (np.ma.array([1.0, 2.0]), [1, 2]),
    "nullable": (pd.Series([1, 2], dtype="Int64"), [1, 2]),
    "decimals of Arrow in pandas": (pd.Series([1, 2], dtype=DECIMALS), [1, 2]),
}
MISSING = {
    "masked": np.ma.array([1.0, 2.0], mask=[False, True]),
    **{"masked constant": [1.0, np.ma.masked], "None": [1.0, None], "NA": [1.0, pd.NA]},
    # As variables of NetCDF files, and as data of astronomers.
    "lazily masked": giving(np.ma.array([1.0, 2.0], mask=[False, True])),
    "mask beside": giving(np.array([1.0, 2.0]), mask=np.array([False, True])),
    **{"NaT": [1.0, pd.NaT], "nullable": pd.Series([1, None], dtype="Int64")},
    "decimals of Arrow in pandas": pd.Series([1, None], dtype=DECIMALS),
}
NO_NUMBERS = {
    **{"text": ["1", "2"], "bytes": np.array([1.0, b"2"], dtype=object), "complex": [1.0, 2j]},
    "dates": np.array(["2020", "2021"], "datetime64[Y]"),
    "durations": np.array([np.timedelta64(1, "s"), 1.0], dtype=object),
    **{"categories": pd.Series([1, 2]).astype("category"), "ragged": [[1.0], [1.0, 2.0]]},
    **{"records": np.zeros(2, dtype=[("a", "f8")]), "a dict": {"a": 1.0}},
}
BEYOND = {
    **{"huge decimal": [Decimal("1e400"), 1], "huge integer": [1, 10**400]},
    **{"tiny decimal": [Decimal("1e-400")], "wide float": np.array([1, np.longdouble("1e400")])},
}
REFUSED = {
    **{name: (data, "MISSING_VALUE") for name, data in MISSING.items()},
    **{f"{name} as number": (data, "NOT_NUMBERS") for name, data in NO_NUMBERS.items()},
    **{name: (data, "OVERFLOW") for name, data in BEYOND.items()},
    "on a device alone": (ELSEWHERE, "NOT_NUMBERS"),
    "lazy": (SimpleNamespace(lazy=None, collect=None), "LAZY_FRAME"),
    "sparse": (SimpleNamespace(nnz=None, toarray=None), "SPARSE_MATRIX"),
    "sparse dict": (scipy.sparse.dok_array((2, 2)), "SPARSE_MATRIX"),
}


@pytest.mark.parametrize("name", TAKEN)
def test_numbers_are_taken(name):
    given, wanted = TAKEN[name]
    np.testing.assert_array_equal(real_numbers(given, "X").astype(np.float64), wanted)


@pytest.mark.parametrize("name", REFUSED)
def test_everything_else_is_refused(name):
    given, reason = REFUSED[name]
    assert refused(reason, real_numbers, given, "X").field == "X"


def test_the_row_is_named():
    for given, row in (
        (np.ma.array(np.ones((3, 2)), mask=[[0, 0], [0, 0], [0, 1]]), 2),
        ([[1.0, 2.0], [1.0, None], [1.0, 2.0]], 1),
        ([[1.0, 2.0], np.ma.array([1.0, 2.0], mask=[0, 1])], 1),
        (pd.DataFrame({"a": [1.0, 2.0], "b": pd.array([1, None])}), 1),
    ):
        refused(f"MISSING_VALUE: .*in row {row} ", real_numbers, given, "X")


#: What has no order, or can be read only once: NumPy takes it for one object.
UNORDERED = {
    **{"generator": lambda: (value for value in (1.0, 2.0)), "set": lambda: {1.0, 2.0}},
    "dict": lambda: {"p1": 1.0, "p2": 2.0},
    "dict_values": lambda: {"a": 1.0, "b": 2.0}.values(),
}


@pytest.mark.parametrize(
    "name", [*MISSING, *(f"{name} as number" for name in NO_NUMBERS), *UNORDERED]
)
def test_every_argument_goes_through_the_door(client, name):
    def given():
        return UNORDERED[name]() if name in UNORDERED else REFUSED[name][0]

    data, line = client.upload([[1.0], [2.0]], [1.0, 2.0], dtype="float64"), "p1*x1 + p2"
    ones = [[1.0, 1.0]]
    places = {
        "X": lambda: client.upload(given()),
        "y": lambda: client.upload([[1.0], [2.0]], given()),
        "weights": lambda: client.upload([[1.0], [2.0]], [1.0, 2.0], given()),
        "parameters": lambda: client.evaluate(data, [line], [given()], loss="mse"),
        " parameters": lambda: client.optimize(data, line, given()),
        "  parameters": lambda: client.evaluate(data, line, given()),
        "bounds": lambda: client.optimize(data, [line], ones, bounds=([given()], np.inf)),
        " bounds": lambda: client.optimize(data, line, ones[0], bounds=(given(), np.inf)),
        "fixed": lambda: client.optimize(data, [line], ones, fixed=[given()]),
    }
    if name not in UNORDERED:
        places = {place: call for place, call in places.items() if place[0] not in " f"}
        places["bound"] = lambda: warpfit.parse(line).bind(given())
    if name == "None":  # which is no bound
        del places["bounds"]
    reasons = {REFUSED.get(name, (None, "NOT_NUMBERS"))[1]}
    reasons |= {"BAD_SHAPE", "VECTOR_MISMATCH"} if name.startswith("a dict") else set()
    for place, call in places.items():
        error = refused("", call)
        assert error.reason in reasons, place
        if name in UNORDERED:
            assert f"{place.strip()} is a {name}" in str(error)
            assert any(word in error.remedy for word in ("array", "vector"))


def test_names_of_columns_are_taken_from_anything_that_lists_them(client):
    frame = pd.DataFrame({"a": [1.0, 2.0], "p1": [3.0, 4.0], "y": [1.0, 2.0]})
    for x in (frame.columns[:-1], frame.columns[:-1].to_numpy(), ("a", "p1"), iter(["a", "p1"])):
        data = client.upload(frame, x=x, y="y", dtype="float64")
        assert data.names == ("a", "p1")
    # A column named as a parameter is the column; the parameter is p01.
    assert client.evaluate(data, ["p1 - p01"], [[3.0]], loss="sse")[0] == 2.0
    for x in (5, [1], [None]):
        refused("UNKNOWN_COLUMN", client.upload, frame, x=x)


def test_estimators_say_it_too(client):
    kinds = sklearn.SymbolicRegressor, sklearn.SymbolicClassifier, sklearn.SymbolicTransformer
    for estimator in (sklearn.ParameterOptimizer(), *(kind() for kind in kinds)):
        refused("X is a generator", estimator.fit, UNORDERED["generator"](), [1.0, 2.0])
        refused(
            r"y is a generator.*list\(y\)", estimator.fit, [[1.0], [2.0]], UNORDERED["generator"]()
        )
    model = sklearn.ParameterOptimizer(start=[1.0, math.nan])
    model.connected_client = client
    refused(r"start is \[1.0, nan\]", model.fit, [[1.0], [2.0], [3.0]], [1.0, 2.0, 3.0])
