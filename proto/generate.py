"""Generate the Python messages from the proto file; run it after every change of the contract.

``python proto/generate.py`` writes ``client/warpfit/v1/evaluator_pb2*.py*``. A test fails when the
committed stubs are not what this program writes.
"""

from __future__ import annotations

import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent


def generate(out: Path) -> None:
    """Write the stubs below ``out``, which must exist."""
    options = [
        f"-I{ROOT}",
        f"--python_out={out}",
        f"--pyi_out={out}",
        str(ROOT / "warpfit" / "v1" / "evaluator.proto"),
    ]
    if protoc.main(["protoc", *options]) != 0:
        raise SystemExit("protoc failed")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT.parent / "client")
