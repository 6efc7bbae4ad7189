"""Servers whose cache of compiled code is damaged, unsafe, read-only, or on a full disk."""

import os
import shutil
import subprocess
import time
from contextlib import contextmanager

import numpy as np
import psutil
import pytest

import warpfit
from support.load.faults import injected
from support.servers.server import ServerProcess, eventually, runs
from warpfit_server.engine.cpu.codegen import parts
from warpfit_server.engine.native.numba_cache import host_tag
from warpfit_server.system.compile_cache import default_cache_directory, numba_directory, read
from warpfit_server.system.machine import available_cores

X = np.arange(6.0).reshape(3, 2)
#: Functions that compile in a second.
SMALL = ("lowering.tokens_are_valid", "parallel_loop.close")


@contextmanager
def mounted(place, options):
    """A small disk at a place; skips where this user may not mount one."""
    ran = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], check=False)
    if ran.returncode:
        pytest.skip("needs the right to mount")
    try:
        yield
    finally:
        subprocess.run(["umount", place], check=True)


@pytest.fixture
def cache(tmp_path):
    """A copy of what engines have kept of exactly these sources."""
    place, warm = tmp_path / "cache", default_cache_directory()
    parts.precompile(available_cores())
    place.mkdir(mode=0o700)
    shutil.copytree(numba_directory(warm), place / numba_directory(warm).name)
    return place


def answers(server) -> bool:
    with warpfit.connect(server.address) as client:
        got = client.evaluate(client.upload(X), ["x1 + x2"])
    return got[:, 0].tolist() == [1.0, 5.0, 9.0]


def serve(cache, log):
    started = time.monotonic()
    with ServerProcess("--cache-dir", str(cache), log=log) as server:
        assert answers(server)
    return log.read_text(), time.monotonic() - started


def test_files_that_are_not_whole_are_made_again(cache, tmp_path):
    """Of each kind, empty ones and halves: Numba's index and data, an object file."""
    damaged = [
        *(path for name in SMALL for path in cache.glob(f"numba-*/*/{name}-*.nbi")),
        *(path for name in SMALL for path in cache.glob(f"numba-*/*/{name}-*.1.nbc")),
        *cache.glob(f"numba-*/float64-{host_tag()}.o"),
    ]
    assert {path.suffix for path in damaged} == {".nbi", ".nbc", ".o"}
    for number, path in enumerate(damaged):
        os.truncate(path, path.stat().st_size // 2 if number % 2 else 0)
    log, _ = serve(cache, tmp_path / "log")
    assert log.count("code is compiled again") >= 3
    assert "Traceback" not in log
    assert all(read(path) for path in damaged), "they are whole again"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("fault", "said"), [("full", "No space left"), ("read-only", "Read-only file system")]
)
def test_a_disk_that_cannot_be_written(cache, tmp_path, fault, said):
    disk = tmp_path / "disk"
    disk.mkdir()
    with mounted(disk, f"size={12 if fault == 'full' else 64}m,mode=0700"):
        shutil.copytree(cache, disk / "cache")
        if fault == "full":
            with (disk / "filler").open("wb", buffering=0) as file, pytest.raises(OSError):
                while True:
                    file.write(bytes(1 << 16))
        else:
            subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        log, seconds = serve(disk / "cache", tmp_path / "log")
    assert log.count("compiled code is kept in a temporary directory") == 1
    assert said in log
    assert seconds < 30  # nothing was compiled again


@pytest.mark.thorough
def test_a_server_that_stops_soon_after_a_first_start_leaves_no_compilers(cache, tmp_path):
    for marker in cache.glob("numba-*/derivatives-*.complete"):
        marker.unlink()
    compiling = tmp_path / "compiling"
    compiling.touch()  # so long do they take
    with ServerProcess("--cache-dir", str(cache), **injected(f"compiling={compiling}")) as server:
        engine = server.engine()
        eventually(lambda: engine.children(recursive=True))
        compilers = engine.children(recursive=True)
        assert server.stop() == 0
    _, alive = psutil.wait_procs(compilers, 5)
    assert not [process for process in alive if runs(process, "-m")]
