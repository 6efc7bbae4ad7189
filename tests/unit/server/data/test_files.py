"""Files that a server reads itself, in a folder where others write."""

import os
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from warpfit.dataset import Dataset, ServerFile
from warpfit.errors import InvalidArgumentError, ResourceExhaustedError
from warpfit.server_info import Limits
from warpfit_server.data import uploads
from warpfit_server.data.dataset_store import DatasetStore
from warpfit_server.data.uploads import DataFolder
from warpfit_server.ipc.segments import SegmentPool
from warpfit_server.tenancy.quotas import QuotaTable

NUMBERS = np.arange(1000.0)
EXPECTED = Dataset.of(NUMBERS, names=("a",)).content_id


def write(path: Path, numbers=NUMBERS):
    parquet.write_table(pa.table({"a": numbers}), path)


@pytest.fixture
def folder(tmp_path: Path) -> DataFolder:
    (tmp_path / "root").mkdir()
    store = DatasetStore(Limits(), QuotaTable.create(1))
    return DataFolder(str(tmp_path / "root"), store, SegmentPool(0))


def read(folder, name="a.parquet", x=(), check=lambda: None, reserve=lambda size: nullcontext()):
    file = ServerFile(name, tuple(x), "", "", np.dtype("<f4"))
    return folder.read(file, "tenant", Limits(), check, reserve)[0]


def reason_of(call, *arguments, **named) -> str:
    with pytest.raises(InvalidArgumentError) as caught:
        call(*arguments, **named)
    return caught.value.reason


def test_a_file_is_read_that_was_found_although_its_name_now_leads_elsewhere(
    folder: DataFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path, secret = tmp_path / "root" / "a.parquet", tmp_path / "secret.parquet"
    write(path)
    write(secret, NUMBERS + 1)
    opened = uploads.open_table

    def swap(*arguments):
        path.unlink()
        path.symlink_to(secret)
        return opened(*arguments)

    monkeypatch.setattr(uploads, "open_table", swap)
    assert read(folder).content_id == EXPECTED


def test_a_file_that_changes_while_it_is_read_is_refused(folder: DataFolder, tmp_path: Path):
    path = tmp_path / "root" / "a.parquet"
    write(path)
    assert reason_of(read, folder, check=lambda: os.utime(path)) == "DATA_CHANGED"
    assert folder._store.usage().datasets == 0
    assert read(folder).content_id == EXPECTED


def test_what_is_no_regular_file_is_not_opened(folder: DataFolder, tmp_path: Path):
    os.mkfifo(tmp_path / "root" / "fifo.parquet")
    (tmp_path / "root" / "device.parquet").symlink_to("/dev/zero")
    for name in ("fifo.parquet", "device.parquet", "/dev/zero"):
        assert reason_of(read, folder, name) == "NO_SUCH_FILE"


def test_names_that_are_no_text_are_refused(folder: DataFolder, tmp_path: Path):
    path = tmp_path / "root" / "a.parquet"
    parquet.write_table(pa.table({"columnname": NUMBERS}), path, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"columnname", b"\xff\xfeolumnname"[:10]))
    assert reason_of(read, folder) == "NO_SUCH_FILE"


def test_columns_without_numbers_are_refused_before_they_are_decoded(
    folder: DataFolder, tmp_path: Path
):
    path = tmp_path / "root" / "a.parquet"
    ends = pa.array(range(0, 2_000_001, 20_000), pa.int32())
    lists = pa.ListArray.from_arrays(ends, pa.array(np.zeros(2_000_000)))
    parquet.write_table(pa.table({"a": lists}), path)
    assert path.stat().st_size < 10_000
    usual = pa.default_memory_pool()
    decoding = pa.proxy_memory_pool(usual)
    pa.set_memory_pool(decoding)
    try:
        assert reason_of(read, folder) == "NOT_NUMBERS"
        assert decoding.max_memory() < 1 << 20
    finally:
        pa.set_memory_pool(usual)


def test_decompressed_bytes_are_counted_before_they_are_there(folder: DataFolder, tmp_path: Path):
    path = tmp_path / "root" / "a.parquet"
    parquet.write_table(pa.table({"a": np.zeros(1_000_000)}), path, use_dictionary=False)
    counted = []

    @contextmanager
    def refuse(size):
        counted.append(size)
        raise ResourceExhaustedError("no room", "QUEUE_FULL")
        yield

    with pytest.raises(ResourceExhaustedError):
        read(folder, reserve=refuse)
    assert path.stat().st_size < 1 << 20
    assert 8_000_000 <= counted[0] < 9_000_000


def test_a_file_that_claims_less_than_nothing_frees_no_memory(
    folder: DataFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Claims(uploads.ParquetColumns):
        def __init__(self, path):
            super().__init__(path)
            self.group_bytes = -(1 << 40)

    write(tmp_path / "root" / "a.parquet")
    monkeypatch.setattr(uploads, "ParquetColumns", Claims)
    counted = []

    def reserve(size):
        counted.append(size)
        return nullcontext()

    read(folder, reserve=reserve)
    assert counted == [0]


def test_a_footer_that_claims_much_is_not_parsed(folder: DataFolder, tmp_path: Path, monkeypatch):
    write(tmp_path / "root" / "a.parquet")
    monkeypatch.setattr(uploads, "_MOST_FOOTER_BYTES", 100)
    assert reason_of(read, folder) == "NO_SUCH_FILE"


@pytest.mark.parametrize("way", ["existing", "missing", "process", "absolute", "inside"])
def test_names_that_lead_out_and_in_again_tell_nothing(
    folder: DataFolder, tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
):
    root = tmp_path / "root"
    write(root / "a.parquet")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(root)
    name = {
        "existing": "../other/../root/a.parquet",
        "missing": "../none/../root/a.parquet",
        "process": f"{'../' * 20}proc/{os.getpid()}/cwd/a.parquet",
        "absolute": f"{root}/a.parquet",
        "inside": "b/../a.parquet",
    }[way]
    with pytest.raises(InvalidArgumentError) as caught:
        read(folder, name)
    assert caught.value.reason == "NO_SUCH_FILE"
    with pytest.raises(InvalidArgumentError) as other:
        read(folder, "none")
    assert str(caught.value).replace(name, "none") == str(other.value), "one answer for all"
