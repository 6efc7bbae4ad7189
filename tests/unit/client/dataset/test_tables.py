"""Tables of every kind give the same data set, copied or read by blocks where they are."""

from __future__ import annotations

import sys
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

from support.refusals import refused
from warpfit.dataset import Dataset, canonical, client_dataset, open_table, tables
from warpfit.errors import InvalidArgumentError

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


def batches_of(table, size):
    return table.to_batches(max_chunksize=size)


def frames(columns, tmp_path):
    """The same table in every form that can be read twice."""
    table = pa.table(columns)
    path = tmp_path / "table.parquet"
    parquet.write_table(table, path, row_group_size=13)
    return {
        "pandas": pd.DataFrame(columns),
        "pandas, one block": pd.DataFrame(np.stack(list(columns.values()), axis=1), columns=NAMES),
        "pandas, nullable": pd.DataFrame(columns).convert_dtypes(),
        "polars": pl.DataFrame(columns),
        "arrow": table,
        "arrow, chunks": pa.Table.from_batches(batches_of(table, 5)),
        "record batch": table.combine_chunks().to_batches()[0],
        "path": path,
        "text path": str(path),
    }


def streams(columns):
    """The same table in every form that can be read once."""
    table = pa.table(columns)
    batches = batches_of(table, 5)
    return {
        "reader": pa.RecordBatchReader.from_batches(table.schema, batches),
        "batches": iter(batches),
        "frames": (pl.from_arrow(batch) for batch in batches),
        "pandas chunks": (batch.to_pandas() for batch in batches),
    }


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [(1, "float32"), (6, "float64"), (16, "float32"), (17, "float64"), (100, "float32")],
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
    assert dataset.content_id == Dataset.of(array, array[:, 0]).content_id


def test_all_other_columns_are_variables():
    frame = pl.DataFrame(columns_of(9))
    assert client_dataset(open_table(frame, "y", "w")).layout.names == NAMES[:3]
    assert client_dataset(open_table(frame, "y", x="w")).layout.names == ("w",)
    assert client_dataset(open_table(frame), names=list("bcdef")).layout.names == tuple("bcdef")
    assert client_dataset(open_table(frame, frame["a"] > 3)).layout.variables == 5


@pytest.mark.parametrize("make", [pd.Series, pl.Series, pa.array, lambda a: pa.chunked_array([a])])
def test_series_are_columns(make):
    x, y = np.arange(5.0), np.arange(5, 10)
    expected = Dataset.of(x, y).content_id
    for numbers in (x, [Decimal(int(number)) for number in x]):
        assert client_dataset(open_table(make(numbers), make(y))).content_id == expected


def test_a_canonical_array_is_sent_without_a_copy(small_blocks):
    X = np.asfortranarray(np.arange(60, dtype=np.float32).reshape(20, 3))
    dataset = client_dataset(open_table(X))
    for chunk in dataset.chunks(16):
        assert np.shares_memory(np.frombuffer(chunk, np.float32), X)


DATES = pd.date_range("2020-01-01", periods=3)
THREE = [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("make", "arguments", "reason", "words"),
    [
        (pd.DataFrame, {"b": THREE, "a": ["x", "y", "z"]}, "NOT_NUMBERS", "column 'a'"),
        (pd.DataFrame, {"a": DATES}, "NOT_NUMBERS", "column 'a'"),
        (pa.table, {"a": DATES.to_numpy()}, "NOT_NUMBERS", "timestamp"),
        (pl.DataFrame, {"a": [1, None]}, "MISSING_VALUE", "column 'a' has no value in row 1"),
        (pa.table, {"a": [1, 2, None]}, "MISSING_VALUE", "row 2"),
        (pd.DataFrame, {"a": pd.array([1, 2, None], "Int64")}, "MISSING_VALUE", "row 2"),
        (pl.DataFrame, {}, "EMPTY_DATASET", "0 rows"),
        (lambda _: iter([]), {}, "EMPTY_DATASET", "0 rows"),
        (lambda _: iter([1, 2]), {}, "NOT_NUMBERS", "X "),
        (pl.DataFrame, {"a": [1e300] * 3}, "OVERFLOW", "row 0"),
        (lambda _: pl.DataFrame({"a": [1]}, {"a": pl.Int128}), {}, "NOT_NUMBERS", "to Float64 or"),
        (lambda _: np.zeros(3, [("a", "f8"), ("b", "i4")]), {}, "NOT_NUMBERS", "fields a, b"),
        (lambda _: 3.0, {}, "BAD_SHAPE", r"X has 0 dimensions. Give \[rows, variables\]"),
        (lambda _: [[1.0], [Decimal("sNaN")]], {}, "NOT_NUMBERS", "row 1 of X .*'sNaN'. in p"),
        (lambda _: [[1.0], [1.0, 2.0]], {}, "NOT_NUMBERS", r"[^.]\. Convert"),
    ],
)
def test_what_is_no_table_of_numbers_is_refused(make, arguments, reason, words):
    assert refused(words, lambda: client_dataset(open_table(make(arguments)))).reason == reason


@pytest.mark.parametrize("chunks", [False, True])
def test_a_missing_value_is_named_by_its_row(chunks, tmp_path, small_blocks):
    table = pa.table({"b": range(100), "a": [*range(57), None, *range(42)]})
    parquet.write_table(table, tmp_path / "t.parquet", row_group_size=20)
    source = pa.Table.from_batches(batches_of(table, 9)) if chunks else tmp_path / "t.parquet"
    refused("column 'a' has no value in row 57", lambda: client_dataset(open_table(source)))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((pl.DataFrame({"a": THREE}), "b"), "UNKNOWN_COLUMN"),
        ((pl.DataFrame({"a": THREE}), None, "b"), "UNKNOWN_COLUMN"),
        ((pd.DataFrame({0: THREE}), "a"), "UNKNOWN_COLUMN"),
        ((np.ones((3, 2)), None, None, ["a"]), "UNKNOWN_COLUMN"),
        ((pa.table([THREE, THREE], ["a", "a"]), None, None, ["a"]), "UNKNOWN_COLUMN"),
        ((pa.table([THREE, THREE], ["a", "a"]),), "NAME_MISMATCH"),
        ((pl.DataFrame({"a": THREE}), [1.0, 2.0]), "BAD_SHAPE"),
        (("data.csv",), "BAD_FILE"),
        ((pl.DataFrame({"a": THREE}), None, pl.Series([1.0, -1.0, 0.0])), "BAD_WEIGHT"),
    ],
)
def test_columns_that_are_not_there_or_do_not_fit_are_refused(arguments, reason):
    refused(reason, lambda: client_dataset(open_table(*arguments)))


def test_files_that_are_broken_or_change_are_refused(tmp_path, small_blocks):
    path = tmp_path / "t.parquet"
    write = partial(parquet.write_table, where=path, row_group_size=20)
    write(pa.table({"a": range(100)}))
    dataset = client_dataset(open_table(path))
    for other in ({"a": range(99)}, {"a": range(101)}, {"b": range(100)}):
        write(pa.table(other))
        with pytest.raises(InvalidArgumentError) as caught:
            list(dataset.chunks(50))
        assert caught.value.reason == "DATA_CHANGED"
    content = bytearray(path.read_bytes())
    for broken in (b"", b"PAR1", bytes(content[:-20]), content.replace(b"PAR1", b"PAR2")):
        path.write_bytes(broken)
        refused("BAD_FILE", open_table, path)


def test_without_pyarrow_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "'warpfit[arrow]'" in refused("MISSING_PACKAGE", open_table, "data.parquet").remedy
    pandas = client_dataset(open_table(pd.DataFrame({"a": THREE})))
    assert pandas.layout.names == ("a",)


@pytest.mark.parametrize("labels", [(0, "a"), ("a", 1.5), ("a", ("b", 1)), ("a", None)])
def test_labels_of_frames_are_texts_or_none_is(labels):
    """Names would else be lost in silence, and expressions with them."""
    frame = pd.DataFrame([[1.0, 2.0]], columns=pd.Index(labels, dtype=object))
    assert refused("which is no text", open_table, frame).reason == "BAD_NAMES"
    assert open_table(pd.DataFrame([[1.0, 2.0]])).variables.names == ()
