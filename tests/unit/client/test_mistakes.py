"""Mistakes of new users: each is told by an error that names the place, none is passed over."""

import numpy as np
import pytest

import warpfit
from warpfit import Batch, LossFunction, Population, Program, WarpfitError, testing
from warpfit.transport.call import Deadline

X = np.random.default_rng(2).normal(size=(20, 2))
U1, F8, U4 = np.uint8, np.float64, np.uint32
BOTH = Program.parameter(0), Program.parameter(1)


@pytest.fixture(scope="module")
def bound():
    with testing.client() as client:
        yield client, client.upload(X, X[:, 0])


def fit(**options):
    return lambda c, d: c.optimize(d, ["p1*x1 + p2"], [[1.0, 0.0]], **options)


def evaluate(*arguments, **options):
    return lambda c, d: c.evaluate(d, *(arguments or (["x1"],)), **options)


CASES = {
    "no keyword 'los'. Did you mean loss": evaluate(los="mse"),
    "Did you mean max_iterations": fit(max_iter=5),
    "Did you mean tolerance": lambda c, d: c.simplify(d, ["x1"], tolerence=0.1),
    "Did you mean names": lambda c, d: c.upload(X, name=("a", "b")),
    "no keyword 'columns'": lambda c, d: c.open("a.parquet", columns=["a"]),
    "rows is 5": evaluate(rows=5),
    "rows is '0:5'": evaluate(rows="0:5"),
    "rows is array": evaluate(rows=np.arange(5)),
    r"rows is \(0.0, 5": evaluate(rows=(0.0, 5.5)),
    "rows is slice": evaluate(rows=slice(0, 9, 2)),
    "timeout is '5'": evaluate(timeout="5"),
    "no vector of numbers: 1.0": evaluate(list(BOTH), [1.0, 2.0]),
    "no vector of numbers: 2.0": evaluate("p1", 2.0),
    "codes .* of dtype int64": evaluate(Population(np.array([1]), np.zeros(1), np.ones(1, U4))),
    "lengths .* of dtype int64": evaluate(Population(np.ones(1, U1), np.zeros(1), np.array([1]))),
    "codes .* of dtype None": evaluate(Population([1], np.zeros(1), np.ones(1, U4))),
    "values .* of dtype float32": evaluate(
        Batch(*(np.ones(1, kind) for kind in (U1, "f4", U4)), np.zeros(1, U4), np.empty(0))
    ),
    "max_iterations is 5.5": fit(max_iterations=5.5),
    "step_tolerance is 'small'": fit(step_tolerance="small"),
    r"bounds is \[\(0, 2\), \(0, 3\)\]. Give a tuple": fit(bounds=[(0, 2), (0, 3)]),
    r"bounds is \(0,\)": fit(bounds=(0,)),
    "bounds is 'a'": fit(bounds=("a", 1)),
    "progress is True": fit(progress=True),
    "tolerance is 'a'": lambda c, d: c.simplify(d, ["x1"], tolerance="a"),
    "data is of type int": lambda c, d: c.release(5),
    "names is 'ab'": lambda c, d: c.upload(X, names="ab"),
    r"names is \(1, 2\)": lambda c, d: c.upload(X, names=(1, 2)),
    "no numbers": lambda c, d: Program(["a"], [0.0]),
    "no whole number from 0 to 255": lambda c, d: Program([1.5], [0.0]),
    "whole number from 0": lambda c, d: Program([300], [0.0]),
    "'plus1' is no operator": lambda c, d: Program.apply("plus1", *BOTH),
    "an operand is no Program": lambda c, d: Program.apply("sin", "x1"),
    "cannot be of type NoneType": lambda c, d: warpfit.parse(None),
    "there is text in it": lambda c, d: BOTH[0].bind(["a"]),
    "defined by two texts": lambda c, d: warpfit.define("mine", 3),
    "a row loss is a Program": lambda c, d: LossFunction("d"),
    "tls is 'ca.pem'": lambda c, d: warpfit.connect("a:1", tls="ca.pem"),
    "visible ASCII": lambda c, d: warpfit.connect("localhost:1", token="a\nb"),
    "retry is 3": lambda c, d: warpfit.connect("a:1", retry=3),
    "transport is {}": lambda c, d: warpfit.connect("a:1", transport={}),
    "chunk_bytes is 0": lambda c, d: warpfit.TransportConfig(chunk_bytes=0),
    "total_seconds is -1": lambda c, d: warpfit.RetryPolicy(total_seconds=-1),
}


@pytest.mark.parametrize("message", CASES)
def test_a_mistake_is_told(bound, message):
    with pytest.raises(WarpfitError, match=message) as raised:
        CASES[message](*bound)
    assert raised.value.reason


def test_numbers_of_numpy_are_numbers(bound):
    client, data = bound
    rows = np.int64(0), np.int64(5)
    assert client.evaluate(data, ["x1"], rows=rows, timeout=np.float32(5)).shape == (5, 1)
    assert client.evaluate(data, ["x1"], timeout=np.inf).shape == (20, 1)
    assert Deadline(1e10).remaining() is None
    one = np.int64(1)
    assert client.optimize(data, ["p1*x1"], [[one]], max_iterations=one).iterations[0] <= 1
    warpfit.connect("127.0.0.1:1", replicas=np.int64(2), wait=np.float32(1.0)).close()
