"""The one door for numbers of callers, at every place that has one."""

import math
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import scipy.sparse

import warpfit
import warpfit.testing
from support.refusals import refused
from warpfit import sklearn
from warpfit.expressions.real_numbers import real_numbers


class Lazy:
    """What gives a masked array when it is asked for one, as variables of NetCDF files do."""

    def __array__(self, dtype=None, copy=None):
        return np.ma.array([1.0, 2.0], mask=[False, True])


class Annotated:
    """Data with a mask beside it, as those of astronomers."""

    mask = np.array([False, True])

    def __array__(self, dtype=None, copy=None):
        return np.array([1.0, 2.0])


class OnDevice:
    """An array of a GPU as CuPy (get) and Numba (copy_to_host) have them: NumPy cannot read it."""

    def __init__(self, copy):
        own = {"shape": (2,), "typestr": "<f8", "data": (1, False), "version": 3}
        self.__cuda_array_interface__ = own
        setattr(self, copy, lambda: np.array([1.0, 2.0]))

    def __array__(self, dtype=None, copy=None):
        raise TypeError("implicit conversion is not allowed")


class OnHost:
    """What has DLPack alone."""

    def __dlpack__(self, **options):
        return np.array([1.0, 2.0]).__dlpack__(**options)

    def __dlpack_device__(self):
        return 1, 0


class Elsewhere(OnHost):
    """What DLPack cannot copy to the host."""

    def __dlpack__(self, **options):
        raise BufferError("on the device alone")

    def __dlpack_device__(self):
        return 2, 0


class Tensor:
    """A tensor of PyTorch that is differentiated, of a type that NumPy has not."""

    dtype = "torch.bfloat16"

    def detach(self):
        return self

    cpu = detach

    def float(self):
        return np.array([1.0, 2.0], np.float32)


DECIMALS = pd.ArrowDtype(pa.decimal128(30, 2))
TAKEN = {
    "CuPy": (OnDevice("get"), [1, 2]),
    "Numba's device": (OnDevice("copy_to_host"), [1, 2]),
    "DLPack": (OnHost(), [1, 2]),
    "PyTorch": (Tensor(), [1, 2]),
    "integers": ([1, 2], [1, 2]),
    "booleans": ([True, False], [1, 0]),
    "wide": (np.array([1.5, np.inf], np.longdouble), [1.5, math.inf]),
    "NaN and infinity": ([math.nan, -math.inf], [math.nan, -math.inf]),
    "decimals and fractions": ([Decimal("1.5"), Fraction(1, 4)], [1.5, 0.25]),
    "infinite decimal": ([Decimal("-Infinity"), Decimal("NaN")], [-math.inf, math.nan]),
    "objects": (np.array([1, 2.5], object), [1, 2.5]),
    "large integers": ([2**70, 1], [2.0**70, 1]),
    "nothing masked": (np.ma.array([1.0, 2.0]), [1, 2]),
    "nullable": (pd.Series([1, 2], dtype="Int64"), [1, 2]),
    "decimals of Arrow in pandas": (pd.Series([1, 2], dtype=DECIMALS), [1, 2]),
    "subnormal": ([5e-324, 1e-310], [5e-324, 1e-310]),
}
MASK = np.ma.array([1.0, 2.0], mask=[False, True])
MISSING = {
    "masked": MASK,
    "masked constant": [1.0, np.ma.masked],
    "lazily masked": Lazy(),
    "mask beside": Annotated(),
    "None": [1.0, None],
    "NA": [1.0, pd.NA],
    "NaT": [1.0, pd.NaT],
    "nullable": pd.Series([1, None], dtype="Int64"),
    "decimals of Arrow in pandas": pd.Series([1, None], dtype=DECIMALS),
}
NO_NUMBERS = {
    "text": ["1", "2"],
    "text among numbers": [1.0, "2"],
    "bytes": np.array([1.0, b"2"], dtype=object),
    "complex": [1.0, 2j],
    "dates": np.array(["2020", "2021"], "datetime64[Y]"),
    "durations": np.array([np.timedelta64(1, "s"), 1.0], dtype=object),
    "categories": pd.Series([1, 2]).astype("category"),
    "ragged": [[1.0], [1.0, 2.0]],
    "records": np.zeros(2, dtype=[("a", "f8")]),
    "a dict": {"a": 1.0},
}
BEYOND = {
    "huge decimal": [Decimal("1e400"), 1],
    "huge integer": [1, 10**400],
    "tiny decimal": [Decimal("1e-400")],
    "wide float": np.array([1, np.longdouble("1e400")]),
}
REFUSED = {
    **{name: (data, "MISSING_VALUE") for name, data in MISSING.items()},
    **{f"{name} as number": (data, "NOT_NUMBERS") for name, data in NO_NUMBERS.items()},
    **{name: (data, "OVERFLOW") for name, data in BEYOND.items()},
    "on a device alone": (Elsewhere(), "NOT_NUMBERS"),
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


@pytest.mark.parametrize(
    ("given", "row"),
    [
        (np.ma.array(np.ones((3, 2)), mask=[[0, 0], [0, 0], [0, 1]]), 2),
        ([[1.0, 2.0], [1.0, None], [1.0, 2.0]], 1),
        ([[1.0, 2.0], np.ma.array([1.0, 2.0], mask=[0, 1])], 1),
        (pd.DataFrame({"a": [1.0, 2.0], "b": pd.array([1, None])}), 1),
    ],
)
def test_the_row_is_named(given, row):
    refused(f"MISSING_VALUE: .*in row {row} ", real_numbers, given, "X")


# ------------------------------------------------------------------------- every place has it


@pytest.fixture(scope="module")
def client():
    return warpfit.testing.client()


#: What has no order, or can be read only once: NumPy takes it for one object.
UNORDERED = {
    "generator": lambda: (value for value in (1.0, 2.0)),
    "map": lambda: map(float, (1, 2)),
    "list_iterator": lambda: iter([1.0, 2.0]),
    "set": lambda: {1.0, 2.0},
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
    assert client.upload(frame, names=pd.Index(["u", "v", "w"])).names == ("u", "v", "w")
    for x in (5, [1], [None]):
        refused("UNKNOWN_COLUMN", client.upload, frame, x=x)


def test_estimators_say_it_too(client):
    kinds = sklearn.SymbolicRegressor, sklearn.SymbolicClassifier, sklearn.SymbolicTransformer
    for estimator in (sklearn.ParameterOptimizer(), *(kind() for kind in kinds)):
        refused("X is a generator", estimator.fit, UNORDERED["generator"](), [1.0, 2.0])
        refused(r"y is a map.*list\(y\)", estimator.fit, [[1.0], [2.0]], UNORDERED["map"]())
    for given, message in (
        ({"starts": math.nan}, "starts is nan"),
        ({"starts": "3"}, "starts is '3'"),
        ({"start": [1.0, math.nan]}, r"start is \[1.0, nan\]"),
        ({"max_iterations": math.nan}, "max_iterations is nan"),
    ):
        model = sklearn.ParameterOptimizer(**given)
        model.connected_client = client
        refused(message, model.fit, [[1.0], [2.0], [3.0]], [1.0, 2.0, 3.0])
