"""Uploads to a real server: the memory that they take, files of its own, data that are shared."""

import json
import pickle
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

import warpfit
from support.load.processes import in_threads
from support.servers.rpcs import OWN_CONNECTION, Caller
from support.servers.server import ServerProcess, eventually, tenants_file

ROWS, COLUMNS = 2_000_000, 10
INPUT = 4 * ROWS * COLUMNS
#: Memory that an upload may take beside its input; a second copy would be more than twice as much.
MOST = 64 << 20
PROGRAM = """
import json, sys
from pathlib import Path
import numpy as np
import warpfit

def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])

with warpfit.connect(sys.argv[1]) as client:
    X = sys.argv[2]
    client.upload(np.ones((100_000, 4)))
    client.upload(Path(X).with_name("small.parquet"))  # loads libraries
    X = np.load(X, mmap_mode="r") if X.endswith("npy") else X
    Path("/proc/self/clear_refs").write_text("5")  # the highest resident memory starts again
    before = memory("VmRSS")
    with client.upload(X, dtype=sys.argv[3]) as data:
        print(json.dumps([memory("VmHWM") - before, data.layout.rows]))
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    X = np.random.default_rng(0).random((ROWS, COLUMNS), dtype=np.float32)
    np.save(folder / "rows.npy", X)
    table = pa.table({f"c{column}": X[:, column] for column in range(COLUMNS)})
    parquet.write_table(table, folder / "table.parquet", use_dictionary=False)
    parquet.write_table(table[:1000], folder / "small.parquet")
    return folder


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("rows.npy", "float32"), pytest.param("table.parquet", "float64", marks=pytest.mark.thorough)],
)
def test_an_upload_takes_memory_for_one_block_and_for_its_data(name, dtype, files, server):
    """A block here, the data there."""
    folder = Path(f"/proc/{server.process.pid}")
    (folder / "clear_refs").write_text("5")
    before = peak(folder)
    command = [sys.executable, "-c", PROGRAM, server.address, str(files / name), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    grown, rows = json.loads(done.stdout)
    assert rows == ROWS
    assert grown < (INPUT if name.endswith("npy") else 0) + MOST
    assert peak(folder) - before < INPUT * (2 if dtype == "float64" else 1) + MOST


def peak(folder: Path) -> int:
    """High-water mark of a process's resident memory, shared memory included."""
    return int(re.search(r"VmHWM:\s+(\d+)", (folder / "status").read_text())[1]) * 1024


COLUMNS_OF_FILE = {"a": np.arange(5000.0), "b": np.arange(5000) % 7, "t": np.full(5000, 2.5)}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    outside = tmp_path_factory.mktemp("outside")
    root = outside / "data"
    (root / "deep").mkdir(parents=True)
    table = pa.table(COLUMNS_OF_FILE)
    for path in (root / "deep" / "table.parquet", outside / "secret.parquet"):
        parquet.write_table(table, path)
    parquet.write_table(pa.table({"a": np.arange(20_000)}), root / "long.parquet")
    parquet.write_table(pa.table({"a": [1.0, None], "s": ["x", "y"]}), root / "bad.parquet")
    (root / "cut.parquet").write_bytes((root / "deep" / "table.parquet").read_bytes()[:-9])
    (root / "link.parquet").symlink_to(outside / "secret.parquet")
    return root


@pytest.fixture(scope="module")
def reader(root: Path) -> Iterator[ServerProcess]:
    limits = tenants_file(root.parent, "[default]\nrows = 10000\n")
    flags = ("--threads", "1", "--data-root", str(root), "--tenants-file", limits)
    with ServerProcess(*flags, "--lease-seconds", "2") as made:
        yield made


@pytest.fixture
def reading(reader: ServerProcess) -> Iterator[warpfit.Client]:
    with warpfit.connect(reader.address) as client:
        yield client


def test_a_server_opens_a_file_of_its_own(reading: warpfit.Client, root: Path):
    X, file = np.stack([COLUMNS_OF_FILE["a"], COLUMNS_OF_FILE["b"]], axis=1), "deep/table.parquet"
    uploaded = reading.upload(X, COLUMNS_OF_FILE["t"], names=["a", "b"])
    data = reading.open(file, x=["a", "b"], y="t")
    assert (data.content_id, data.layout) == (uploaded.content_id, uploaded.layout)
    assert reading.open(file, y="t").content_id == data.content_id
    reading.release(data, everywhere=True)  # the next call has the server read the file again
    assert reading.evaluate(data, "a - a + b - b", loss="mse") == 2.5**2
    with ThreadPoolExecutor(8) as pool:
        opened = pool.map(lambda _: reading.open(file, y="b"), range(8))
    assert len({each.content_id for each in opened}) == 1
    reading.release(data, everywhere=True)
    (root / file).unlink()
    parquet.write_table(pa.table({**COLUMNS_OF_FILE, "a": np.ones(5000)}), root / file)
    with pytest.raises(warpfit.InvalidArgumentError) as caught:
        reading.evaluate(data, "a")
    assert caught.value.reason == "DATA_CHANGED"


def test_a_lease_runs_out_without_use_and_use_renews_it(reader: ServerProcess, reading):
    wide = np.random.default_rng(2).normal(size=(10_000, 100))
    base = reader.shared_memory()
    unused = reading.upload(wide)
    used = pickle.loads(pickle.dumps(reading.upload(wide[:, :2])))  # it cannot be sent again

    def is_gone():
        time.sleep(0.2)
        reading.evaluate(used, ["x1"], rows=slice(0, 5))
        return reader.shared_memory() - base < wide.nbytes // 4

    eventually(is_gone)
    with grpc.insecure_channel(reader.address, OWN_CONNECTION) as channel:
        assert Caller(channel).refused("GetVariables", unused.dataset)[0] == "NOT_FOUND"
    assert reading.evaluate(unused, ["x1"]).shape == (10_000, 1)


@pytest.mark.parametrize(
    ("numbers", "dtype"),
    [
        (1.7e9 + np.arange(100.0), "float64"),
        (1e300 * np.linspace(1, 2, 100), "float64"),
    ],
    ids=["digits", "overflow"],
)
@pytest.mark.filterwarnings("error")
def test_a_file_has_the_type_that_an_upload_of_it_has(reading, root, numbers, dtype):
    name = f"auto-{numbers[-1]:g}.parquet"
    parquet.write_table(pa.table({"a": numbers}), root / name)
    opened, uploaded = reading.open(name), reading.upload(root / name)
    assert opened.layout.dtype == dtype
    assert opened.content_id == uploaded.content_id
    assert reading.open(name).content_id == opened.content_id
    reading.release(opened, everywhere=True)
    assert reading.evaluate(opened, "a").ravel().tolist() == numbers.tolist()
    assert reading.open(name, dtype="float64").layout.dtype == "float64"


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("../secret.parquet", {}, "NO_SUCH_FILE"),
        ("link.parquet", {}, "NO_SUCH_FILE"),
        ("cut.parquet", {}, "NO_SUCH_FILE"),
        ("bad.parquet", {"x": "a"}, "MISSING_VALUE"),
        ("bad.parquet", {"x": ["s"]}, "NOT_NUMBERS"),
        ("long.parquet", {}, "TOO_MANY_ROWS"),
    ],
)
def test_files_that_cannot_be_opened(reading: warpfit.Client, root: Path, name, options, reason):
    with pytest.raises(warpfit.WarpfitError) as caught:
        reading.open(name, **options)
    assert caught.value.reason == reason
    assert str(root) not in str(caught.value)


def test_without_a_folder_a_server_opens_nothing(client: warpfit.Client):
    with pytest.raises(warpfit.UnimplementedError) as caught:
        client.open("table.parquet")
    assert caught.value.reason == "NO_DATA_ROOT"


# ------------------------------------------------ workers that upload the same content share it
WORKERS = 16
RETRY = warpfit.RetryPolicy(total_seconds=200)
CONTENTS = np.random.default_rng(0).normal(size=(2, 400, 3))


def blocks(seed: int, address: str, count: int, contents: int, rude: bool) -> Counter:
    """Upload, evaluate and release at random; count how the blocks end."""
    draw, seen = random.Random(seed), Counter()
    with warpfit.connect(address, retry=RETRY) as client:
        for _ in range(count):
            number = draw.randrange(contents)
            X = CONTENTS[number]
            try:
                with client.upload(X, X[:, 0], dtype="float64") as data:
                    for _ in range(draw.randrange(4)):
                        offset, asked = draw.random(), {"loss": "mse", "timeout": 200}
                        loss = client.evaluate(data, ["x1 + p1"], [[offset]], **asked)
                        assert loss[0] == pytest.approx(offset**2), number
                        if draw.random() < 0.1:
                            client.release(data, everywhere=rude)
                seen["ok"] += 1
            except warpfit.WarpfitError as error:
                seen[f"{type(error).__name__} {error.reason}: {error}"] += 1
    return seen


@pytest.mark.parametrize("rude", [False, True])
def test_blocks_of_workers_with_the_same_content_do_not_end_each_others(server, rude):
    """A data set that one of them removes for all is uploaded again by all."""
    count, contents = (6, 2) if rude else (10, 1)
    with ThreadPoolExecutor(WORKERS) as pool:
        given = server.address, count, contents, rude
        parts = [pool.submit(blocks, seed, *given) for seed in range(WORKERS)]
        assert sum((part.result() for part in parts), Counter()) == {"ok": count * WORKERS}


def test_threads_that_share_a_handle_may_end_its_block_in_any_order(client):
    data, losses = client.upload(CONTENTS[0], CONTENTS[0, :, 0], dtype="float64"), []

    def work(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(20):
            with data:
                losses.append(client.evaluate(data, ["x1 + p1"], [[2.0]], loss="mse")[0])
                time.sleep(0.002 * draw.random())

    with in_threads(work, range(8)):
        pass
    np.testing.assert_allclose(losses, [4.0] * 160)
