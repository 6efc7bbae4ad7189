"""The committed stubs are what proto/generate.py writes."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGE = Path("warpfit", "v1")


def test_stubs_are_fresh(tmp_path):
    command = [sys.executable, ROOT / "proto" / "generate.py", tmp_path]
    subprocess.run(command, check=True)
    generated = {path.name: path.read_bytes() for path in (tmp_path / PACKAGE).iterdir()}
    committed = {
        path.name: path.read_bytes() for path in (ROOT / "client" / PACKAGE).glob("*_pb2*.py*")
    }
    assert set(generated) == set(committed)
    for name, content in generated.items():
        assert committed[name] == content, f"run python proto/generate.py: {name} is stale"
