"""Uploads of tables to a real server, and the memory that they take."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from support.servers.server import ServerProcess

ROWS, COLUMNS = 3_500_000, 10
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
    np.save(folder / "columns.npy", np.asfortranarray(X))
    table = pa.table({f"c{column}": X[:, column] for column in range(COLUMNS)})
    parquet.write_table(table, folder / "table.parquet", use_dictionary=False)
    parquet.write_table(table[:1000], folder / "small.parquet")
    return folder


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("rows.npy", "float32"), ("columns.npy", "float32"), ("table.parquet", "float64")],
)
def test_an_upload_takes_memory_for_one_block(
    name: str, dtype: str, files: Path, server: ServerProcess
):
    command = [sys.executable, "-c", PROGRAM, server.address, str(files / name), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    grown, rows = json.loads(done.stdout)
    assert rows == ROWS
    assert grown < (INPUT if name.endswith("npy") else 0) + MOST
