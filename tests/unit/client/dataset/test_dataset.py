"""Data sets of every kind of table, their content ids, and what float32 cannot hold of them."""

import hashlib
import re
import sys
import threading
import warnings
from decimal import Decimal
from functools import partial

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

import warpfit
import warpfit.testing
from support.refusals import refused
from warpfit.calls.dataset_handle import warn_of_range
from warpfit.dataset import Dataset, canonical, client_dataset, open_table, tables
from warpfit.request import Result

NAMES = ("a", "größe", "c c", "y", "w")


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 16 numbers, and no data set so small that it is copied."""
    monkeypatch.setattr(tables, "BLOCK_NUMBERS", 16)
    monkeypatch.setattr(tables, "_BATCH_ROWS", 7)
    monkeypatch.setattr(canonical, "_COPIED_BYTES", 0)


def columns_of(rows, dtypes=("f8",) * 5):
    """Named columns that float32 holds exactly; the last one may be weights."""
    rng = np.random.default_rng(rows)
    drawn = rng.integers(0, 100, size=(len(NAMES), rows))
    return dict(zip(NAMES, map(np.ndarray.astype, drawn, dtypes), strict=True))


def frames(columns, tmp_path):
    table, path = pa.table(columns), tmp_path / "table.parquet"
    parquet.write_table(table, path, row_group_size=13)
    return {
        "pandas": pd.DataFrame(columns),
        "pandas, one block": pd.DataFrame(np.stack(list(columns.values()), axis=1), columns=NAMES),
        "pandas, nullable": pd.DataFrame(columns).convert_dtypes(),
        **{"polars": pl.DataFrame(columns), "arrow": table},
        "arrow, chunks": pa.Table.from_batches(table.to_batches(5)),
        **{"record batch": table.combine_chunks().to_batches()[0], "path": path},
        "text path": str(path),
    }


def streams(columns):
    table = pa.table(columns)
    batches = table.to_batches(5)
    return {
        "reader": pa.RecordBatchReader.from_batches(table.schema, batches),
        **{"batches": iter(batches), "frames": (pl.from_arrow(batch) for batch in batches)},
        "pandas chunks": (batch.to_pandas() for batch in batches),
    }


@pytest.mark.parametrize(
    ("rows", "dtype"), [(1, "float32"), (16, "float32"), (17, "float64"), (100, "float32")]
)
def test_every_kind_of_table_is_the_same_data_set(rows, dtype, tmp_path, small_blocks):
    columns = columns_of(rows, ("f4", "i4", "?", "f8", "u2"))
    X = np.stack([columns[name] for name in ("größe", "a")], axis=1)
    expected = Dataset.of(X, columns["y"], columns["w"], names=("größe", "a"), dtype=dtype)
    for kind, data in {**frames(columns, tmp_path), **streams(columns)}.items():
        table = open_table(data, "y", "w", x=["größe", "a"])
        dataset = client_dataset(table, dtype=dtype)
        assert dataset.layout == expected.layout, kind
        assert dataset.content_id == expected.content_id, kind
        for _ in range(2):
            assert b"".join(dataset.chunks(24)) == expected.matrix.tobytes(), kind
            assert {len(chunk) for chunk in list(dataset.chunks(24))[:-1]} <= {24}
        for step in (1, 3, 16, 200):
            np.testing.assert_array_equal(dataset.every(step), expected.every(step), kind)
        np.testing.assert_array_equal(dataset.target, expected.target, kind)
        np.testing.assert_array_equal(dataset.weights, expected.weights, kind)


@given(st.data())
def test_blocks_of_an_array_are_its_payload(data):
    shape = data.draw(st.tuples(st.integers(1, 40), st.integers(1, 40)))
    dtype = data.draw(st.sampled_from(["<f4", ">f4", "<f8", "i2", "u8", "?"]))
    array = np.random.default_rng(0).integers(0, 2**20, shape).astype(dtype)
    array = np.asarray(array, order=data.draw(st.sampled_from("CF")))[:: data.draw(st.just(-1))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "BLOCK_NUMBERS", data.draw(st.integers(1, 200)))
        patch.setattr(canonical, "_COPIED_BYTES", 0)
        dataset = client_dataset(open_table(array, array[:, 0]))
        chunks = b"".join(dataset.chunks(data.draw(st.integers(1, 999))))
    expected = np.vstack([array.T, array[:, 0]]).astype("<f4")
    assert chunks == expected.tobytes()
    whole = Dataset.of(array, array[:, 0])
    assert (dataset.content_id, whole.matrix.tobytes()) == (whole.content_id, expected.tobytes())


def test_all_other_columns_are_variables_and_arrays_are_sent_without_a_copy(small_blocks):
    frame = pl.DataFrame(columns_of(9))
    assert client_dataset(open_table(frame, "y", "w")).layout.names == NAMES[:3]
    assert client_dataset(open_table(frame, "y", x="w")).layout.names == ("w",)
    assert client_dataset(open_table(frame), names=list("bcdef")).layout.names == tuple("bcdef")
    assert client_dataset(open_table(frame, frame["a"] > 3)).layout.variables == 5
    X = np.asfortranarray(np.arange(60, dtype=np.float32).reshape(20, 3))
    dataset = client_dataset(open_table(X))
    for chunk in dataset.chunks(16):
        assert np.shares_memory(np.frombuffer(chunk, np.float32), X)


@pytest.mark.parametrize("make", [pd.Series, pl.Series, pa.array, lambda a: pa.chunked_array([a])])
def test_series_are_columns(make):
    x, y = np.arange(5.0), np.arange(5, 10)
    expected = Dataset.of(x, y).content_id
    for numbers in (x, [Decimal(int(number)) for number in x]):
        assert client_dataset(open_table(make(numbers), make(y))).content_id == expected


DATES = pd.date_range("2020-01-01", periods=3)
THREE = [1.0, 2.0, 3.0]


def test_what_is_no_table_of_numbers_is_refused():
    for why, arguments in (
        ("NOT_NUMBERS: .*column 'a'", [pd.DataFrame({"b": THREE, "a": ["x", "y", "z"]})]),
        ("NOT_NUMBERS: .*timestamp", [pa.table({"a": DATES.to_numpy()})]),
        ("NOT_NUMBERS: X ", [iter([1, 2])]),
        ("NOT_NUMBERS: .*to Float64 or", [pl.DataFrame({"a": [1]}, {"a": pl.Int128})]),
        ("NOT_NUMBERS: row 1 of X .*'sNaN'. in p", [[[1.0], [Decimal("sNaN")]]]),
        ("MISSING_VALUE: .*column 'a' has no value in row 1", [pl.DataFrame({"a": [1, None]})]),
        ("MISSING_VALUE: .*row 2", [pa.table({"a": [1, 2, None]})]),
        *(("EMPTY_DATASET: .*0 rows", [pl.DataFrame({})]), ("EMPTY_DATASET: .*0 rows", [iter([])])),
        ("OVERFLOW: .*row 0", [pl.DataFrame({"a": [1e300] * 3})]),
        ("BAD_SHAPE", [pl.DataFrame({"a": THREE}), [1.0, 2.0]]),
        ("UNKNOWN_COLUMN", [pl.DataFrame({"a": THREE}), "b"]),
        ("UNKNOWN_COLUMN", [pd.DataFrame({0: THREE}), "a"]),
        ("UNKNOWN_COLUMN", [np.ones((3, 2)), None, None, ["a"]]),
        ("UNKNOWN_COLUMN", [pa.table([THREE, THREE], ["a", "a"]), None, None, ["a"]]),
        *(("NAME_MISMATCH", [pa.table([THREE, THREE], ["a", "a"])]), ("BAD_FILE", ["data.csv"])),
    ):
        refused(why, lambda given=arguments: client_dataset(open_table(*given)))


@pytest.mark.parametrize("chunks", [False, True])
def test_a_missing_value_is_named_by_its_row(chunks, tmp_path, small_blocks):
    table = pa.table({"b": range(100), "a": [*range(57), None, *range(42)]})
    parquet.write_table(table, tmp_path / "t.parquet", row_group_size=20)
    source = pa.Table.from_batches(table.to_batches(9)) if chunks else tmp_path / "t.parquet"
    refused("column 'a' has no value in row 57", lambda: client_dataset(open_table(source)))


def test_files_that_are_broken_or_change_are_refused(tmp_path, small_blocks):
    path = tmp_path / "t.parquet"
    write = partial(parquet.write_table, where=path, row_group_size=20)
    write(pa.table({"a": range(100)}))
    dataset = client_dataset(open_table(path))
    for other in ({"a": range(99)}, {"a": range(101)}, {"b": range(100)}):
        write(pa.table(other))
        refused("DATA_CHANGED", lambda: [*dataset.chunks(50)])
    content = path.read_bytes()
    for broken in (b"", b"PAR1", content[:-20], content.replace(b"PAR1", b"PAR2")):
        path.write_bytes(broken)
        refused("BAD_FILE", open_table, path)


def test_without_pyarrow_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "'warpfit[arrow]'" in refused("MISSING_PACKAGE", open_table, "data.parquet").remedy
    pandas = client_dataset(open_table(pd.DataFrame({"a": THREE})))
    assert pandas.layout.names == ("a",)


def test_labels_of_frames_are_texts_or_none_is():
    for labels in ((0, "a"), ("a", None)):
        frame = pd.DataFrame([[1.0, 2.0]], columns=pd.Index(labels, dtype=object))
        refused("BAD_NAMES: .*which is no text", open_table, frame)
    assert open_table(pd.DataFrame([[1.0, 2.0]])).variables.names == ()


X = np.arange(12.0).reshape(6, 2)
Y = np.arange(6.0)


@pytest.mark.parametrize(
    ("dtype", "rows", "variables", "order"),
    [("float32", 70_001, 37, "C"), ("float64", 130_000, 17, "F")],
)
def test_large_data_sets_are_hashed_in_a_thread(dtype, rows, variables, order):
    X = np.asarray(np.random.default_rng(3).normal(size=(rows, variables)), order=order)
    y, weights = X[:, 0] + 1, np.abs(X[:, 0])
    threads = threading.active_count()
    dataset = Dataset.of(X, y, weights, dtype=dtype)
    assert dataset.layout.nbytes > 8 << 20, "large"
    np.testing.assert_array_equal(dataset.variables, X.T.astype(dtype))
    digest = hashlib.sha256(dataset.layout.header())
    for column in (*X.T, y, weights):
        digest.update(column.astype(dtype).tobytes())
    assert dataset.content_id == digest.digest()
    digest = canonical.PayloadDigest(dataset.layout, most_behind=1)
    digest.update(memoryview(bytes(1 << 20)))
    digest.close()
    assert threading.active_count() <= threads


ROWS = 150_000


@pytest.mark.parametrize(
    ("row", "number", "place", "name"),
    [(ROWS - 1, -1e300, 18, "x19"), (ROWS - 1, -1e300, 19, "y"), (7, 1e39, 20, "weights")],
)
def test_numbers_too_large_for_float32_are_refused(row, number, place, name):
    columns = np.zeros((ROWS, 21))
    columns[row, place] = number
    columns[(row + 1) % ROWS, : 20 if place == 20 else place + 1] = np.nan
    X, y, w = columns[:, :19], columns[:, 19], columns[:, 20]
    error = refused(f"OVERFLOW: .*row {row} ", Dataset.of, X, y, w)
    assert error.field == name and "float64" in error.remedy
    Dataset.of(X, y, w, dtype="float64")


def warned_of(call, *arguments, **options):
    """Return the warnings of a call; they stand at the line that makes it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(*arguments, **options)
    assert {(each.category, each.filename) for each in caught} <= {
        (warpfit.PrecisionWarning, __file__)
    }
    return [str(each.message) for each in caught]


def digits_lost(*arguments, **options):
    return " ".join(warned_of(Dataset.of, *arguments, **options))


SPREAD = np.linspace(0, 1, 1000)
TIMES = 1.7e9 + 1000 * SPREAD


def test_columns_that_lose_digits_in_float32_are_warned_of():
    for column, loses in (
        *((TIMES, True), (np.where(SPREAD < 0.5, np.nan, TIMES), True), (1e-47 * SPREAD, True)),
        *((1e-33 * SPREAD, False), (np.arange(16_000_000, 16_001_000), False)),
        *((1.7e9 + 1e6 * SPREAD, False), (np.full(1000, np.nan), False)),
        (TIMES.astype(np.float32), False),
    ):
        for order in "CF":
            X = np.asarray(np.stack([SPREAD, column, SPREAD + 1], axis=1), order=order)
            X = X.astype(column.dtype) if column.dtype == np.float32 else X
            found = digits_lost(X, names=["a", "time", "b"])
            assert ("time" in found) == ("float64" in found) == loses, found
            assert "a (" not in found and "b (" not in found
        assert digits_lost(X, names=["a", "time", "b"], dtype="float64") == ""
        assert digits_lost(np.arange(1000), column).startswith("float32 loses digits of y") == loses
        # Weights are compared with their size, not with their spread.
        assert digits_lost(SPREAD, SPREAD, 1e6 + 1e-3 * SPREAD) == ""
        assert "weights" in digits_lost(SPREAD, SPREAD, np.full(1000, 1e-46))


@pytest.mark.parametrize(
    ("weight", "row", "dtype"),
    [(-1e-30, 0, "float64"), (np.nan, 4, "float64"), (np.inf, 5, "float32")],
)
def test_weights_must_be_finite_and_not_negative(weight, row, dtype, monkeypatch):
    weights = np.arange(6.0)
    weights[row] = weight
    monkeypatch.setattr(np, "empty", None)  # no memory is taken before
    error = refused(f"BAD_WEIGHT: .*row {row} ", Dataset.of, X, Y, weights, dtype=dtype)
    assert error.field == "weights"


def test_shapes_names_and_dtypes_are_checked():
    for arguments in ([np.zeros((2, 2, 2))], [np.float64(3)], [X, Y[:-1]], [X, Y, np.ones((6, 2))]):
        refused("BAD_SHAPE", Dataset.of, *arguments)
    for empty in (np.zeros((0, 3)), np.zeros((3, 0))):
        refused("EMPTY_DATASET", Dataset.of, empty)
    for names in (["a"], ["a", "a"]):
        refused("NAME_MISMATCH", Dataset.of, X, names=names)
    for dtype in ("float16", "int32"):
        refused("BAD_DTYPE", Dataset.of, X, dtype=dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rows", [1, 7, 300_000])
def test_ranges_are_those_of_the_rows_that_count(rows, dtype, monkeypatch):
    rng = np.random.default_rng(rows)
    X, weights = rng.normal(size=(rows, 3)).astype(dtype), rng.uniform(1, 2, rows)
    y = rng.normal(size=rows)
    if rows > 1:
        X[1], weights[1] = [-1e20, 1e20, np.nan], 0.0
        X[2, 0], X[3, 1] = np.inf, np.nan
    chosen = X[weights > 0].astype(float)
    finite = np.where(np.isfinite(chosen), chosen, np.nan)
    expected = np.nanmin(finite, axis=0), np.nanmax(finite, axis=0)
    for copied in (canonical._COPIED_BYTES, 0):
        monkeypatch.setattr(canonical, "_COPIED_BYTES", copied)
        dataset = client_dataset(open_table(X, y, weights), dtype=dtype)
        np.testing.assert_array_equal(canonical.ranges(dataset), expected)
    nothing = client_dataset(open_table([[np.nan], [np.inf]]))
    np.testing.assert_array_equal(canonical.ranges(nothing), [[0.0], [0.0]])


SPAN = np.linspace(1.0, 3.0, 50)[:, None]
#: In SI units, at 1e14 Hz for a row of 1.
PLANCK = "2*6.62607015e-34*(1e14*x1)^3/299792458^2/(exp(6.62607015e-20*x1/(1.380649e-23*p1)) - 1)"


@pytest.fixture(scope="module")
def client():
    return warpfit.testing.client()


def test_expressions_are_warned_of_by_name(client):
    for text, parameters, named in (
        *(("1e39*x1/1e39", [], r"1e\+39"), ("x1 + 1e-50*(x1/1e-50)", [], "1e-50")),
        ("x1*1.380649e-23^4/1e-91", [], r"1\.380649e-23 \^ 4"),
        ("(1e30*x1)^2/1e60", [], r"of expression 0, which reaches 1e\+60"),
        *(("p1*x1/p2", [1e40, 1e40], "p1"), (PLANCK, [4000.0], r"e-34|\^ 3")),
    ):
        for dtype in ("float32", "float64"):
            data = client.upload(SPAN, SPAN[:, 0], dtype=dtype)
            found = warned_of(client.evaluate, data, [text], [parameters], loss="mse")
            assert [bool(re.search(named, each)) for each in found] == [True] * (dtype == "float32")


def test_what_float32_computes_right_is_not_warned_of_but_suspects_are(client):
    data = client.upload(SPAN, SPAN[:, 0], dtype="float32")
    texts = ["x1 + 1e-30", "x1*1e20 - 1e15", "exp(-x1*1e12)", "1/x1", "1000*x1"]
    assert warned_of(client.evaluate, data, texts, loss="mse") == []
    data = client.upload(1e8 * SPAN, SPAN[:, 0], dtype="float32")
    batch = warpfit.Batch.of([warpfit.parse(t) for t in ("x1", "p1*x1^5/x1^4")], [[], [1.0]])
    (found,) = warned_of(warn_of_range, batch, data.dataset, [0, 1])
    assert "x1 ^ 5 of expression 1" in found


@pytest.mark.parametrize("kind", ["losses", "values"])
@pytest.mark.parametrize(
    "text", ["exp(100*x1)/exp(99*x1)", "inv(exp(-60*x1)*exp(-60*x1))", "log(exp(p1*x1))"]
)
def test_results_that_only_float32_makes_infinite_are_warned_of_once(client, text, kind):
    """The answers of an engine of float32; the engine of these tests computes in float64."""
    texts = ["log(-x1)", "x1", text]
    batch = warpfit.Batch.of([*map(warpfit.parse, texts)], [[], [], [100.0] * ("p1" in text)])
    odd = np.array([[np.nan], [1.0], [np.inf]])

    def answer(rows):
        own = odd[rows] if kind == "losses" else np.repeat(odd[rows], 50, axis=1)[:, None]
        return Result(**{kind: own})

    data = client.upload(SPAN, SPAN[:, 0], dtype="float32")
    few = texts[:2], batch[:2], answer(slice(0, 2))
    for _ in range(20):  # what float64 cannot compute either is no reason
        assert warned_of(data.warn_of_range, *few) == []
    whole = texts, batch, answer(slice(0, 3))
    for population in (list(batch), batch, texts * 4):  # nobody has written these
        assert warned_of(data.warn_of_range, population, *whole[1:]) == []
    (found,) = warned_of(data.warn_of_range, *whole)
    assert "of expression 2, which reaches" in found and 'dtype="float64"' in found
    assert warned_of(data.warn_of_range, *whole) == []
    double = client.upload(SPAN, SPAN[:, 0], dtype="float64")
    assert warned_of(double.warn_of_range, *whole) == []


def test_only_what_a_person_wrote_is_looked_at_and_not_for_ever(client, monkeypatch):
    looked = []
    monkeypatch.setattr(
        "warpfit.calls.dataset_handle.warn_of_range", lambda *given: looked.append(len(given[2]))
    )
    data = client.upload(SPAN, SPAN[:, 0], dtype="float32")
    odd = warpfit.parse("log(-1e30*x1)")
    batch = warpfit.Batch.of([odd], [[]])
    for population in (["log(-x1)"] * 11, [odd], odd, warpfit.Population.of([odd]), batch):
        client.evaluate(data, population, loss="mse")
        client.evaluate(data, population)
        client.optimize(data, population)
    assert looked == []
    for _ in range(11):
        client.evaluate(data, ("log(-x1)",) * 3, loss="mse")
    assert looked == [3] * 10  # thirty expressions
    other = client.upload(SPAN + 1.0, SPAN[:, 0], dtype="float32")
    for _ in range(110):
        client.evaluate(other, "x1", loss="mse")
    assert looked[10:] == [0] * 100


def test_the_default_type_is_chosen_by_the_numbers(client):
    for x, y, wanted in (
        *((SPAN, SPAN[:, 0], "float32"), (1e14 * SPAN, SPAN[:, 0], "float64")),
        *(
            (np.zeros((50, 1)), SPAN[:, 0], "float32"),
            (np.full((50, 1), 1e-50), SPAN[:, 0], "float64"),
        ),
        ((1e14 * SPAN).astype(np.float32), SPAN[:, 0], "float64"),
        (1.7e9 + SPAN, SPAN[:, 0], "float64"),
    ):
        for weights in (None, np.full(50, 1e-12)):
            assert client.upload(x, y, weights).layout.dtype == wanted
            assert warned_of(client.upload, x, y, weights) == []


def test_integers_that_float64_rounds_are_warned_of(client):
    # Three that are one number in float64, and three beyond int64.
    for large in (2**60 + np.arange(3), np.uint64(2**64 - 1) - np.arange(3, dtype=np.uint64)):
        (found,) = warned_of(client.upload, large[:, None])
        assert re.search(r"float64 loses digits of x1.*spans 2\)", found)
    assert warned_of(client.upload, (2**60 + 1024 * np.arange(100))[:, None]) == []
    (found,) = warned_of(client.upload, np.full((3, 1), 1e-50), dtype="float32")
    assert "float32 loses digits of x1" in found
