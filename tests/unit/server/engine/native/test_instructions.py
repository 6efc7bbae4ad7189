"""The instructions that come with the sources: of these sources, and of no other ones."""

import lzma
import pickle
import re
import subprocess
import sys

import pytest

pytest.importorskip("numba")

from warpfit_server.compile_cache import engine_environment, source_fingerprint
from warpfit_server.engine.native import numba_cache

LOADS = """
from warpfit_server.engine.cpu.codegen import parts
from warpfit_server.engine.native import numba_cache

def fail(*_):
    raise AssertionError("Numba compiles")

numba_cache.WholeCompiler.compile_extra = fail
for part in ("parallel", "check", "rules", "lower"):
    parts.PARTS[part].load()
"""


def test_they_were_written_from_these_sources():
    written, _, _ = lzma.decompress(numba_cache.INSTRUCTIONS.read_bytes()).partition(b" ")
    wanted = "python -m warpfit_server.write_instructions writes them again"
    assert written.decode() == source_fingerprint(), wanted


@pytest.mark.skipif("x86_64" not in numba_cache.stamp(), reason="they are for x86-64")
def test_numba_compiles_nothing_where_they_are(tmp_path):
    tmp_path.chmod(0o700)
    command = [sys.executable, "-c", LOADS]
    subprocess.run(command, env=engine_environment(tmp_path), check=True, timeout=300)
    assert list(tmp_path.rglob("*.nbc")), "what LLVM has made of them is kept"


def test_functions_are_compiled_where_there_are_none(monkeypatch, tmp_path):
    path, kept = tmp_path / "instructions.xz", numba_cache.INSTRUCTIONS.read_bytes()
    monkeypatch.setattr(numba_cache, "INSTRUCTIONS", path)
    assert numba_cache._read_instructions.__wrapped__() == {}
    others = lzma.compress(b"other sources\n" + pickle.dumps({"name": b"code"}))
    for content in (b"", b"no xz", kept[:-1000], others):
        path.write_bytes(content)
        assert numba_cache._read_instructions.__wrapped__() == {}


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_the_same_are_written_again(tmp_path):
    writer = pytest.importorskip("warpfit_server.write_instructions")
    path = tmp_path / "instructions.xz"
    writer.write(path)
    again, kept = (functions(file) for file in (path, numba_cache.INSTRUCTIONS))
    assert again == kept


def functions(path):
    """Return what a file says of each function, without addresses of memory.

    Numba names functions of array expressions by an address, which may have fewer digits.
    """
    own, content = lzma.decompress(path.read_bytes()).split(b"\n", 1)
    found = {name: pickle.loads(each) for name, each in pickle.loads(content).items()}
    return own, {
        name: [re.sub("array_expr_0x[0-9a-f]+", "", text) for text in each[:3]]
        for name, each in found.items()
    }
