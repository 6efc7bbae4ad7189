"""Faults in small; `tests/bench/service/faults.py` has many of each."""

import os
import resource
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

import warpfit
from support.load import faults
from support.load.faults import FATAL, Fleet, injected
from support.load.load import Load
from support.load.soak import soak
from support.servers import health
from support.servers.server import ServerProcess, eventually, runs
from warpfit.cli.top import scrape
from warpfit_server.compile_cache import default_cache_directory, numba_directory, read
from warpfit_server.engine.cpu.codegen import parts
from warpfit_server.engine.native.numba_cache import host_tag
from warpfit_server.machine import available_cores

FEW = np.random.default_rng(0).normal(size=(100, 2))
CUT = FATAL + 1
NO_RETRY = warpfit.RetryPolicy(total_seconds=0)


def test_work_that_does_not_stop():
    seen = faults.endless_work("deaf")
    assert seen["client_gave_up_after_seconds"] < seen["engine_gone_after_seconds"]


@pytest.mark.thorough
def test_a_server_does_not_grow():
    seen = soak(1.5, clients=2, front_ends=1)
    assert seen["passed"], seen
    assert seen["in_flight_at_the_end"] == seen["engine_restarts"] == seen["internal_errors"] == 0


# --------------------------------------- work that engines die of, lost connections, no more files
@pytest.fixture(scope="module")
def harmed():
    """A server of two front ends with planted faults."""
    flags = ("--threads", "1", "--front-ends", "2", "--health-port", "0", "--metrics-port", "0")
    with ServerProcess(*flags, **injected(f"harm={FATAL}")) as process:
        yield process


#: Clients wait for the next engine as long as it takes to start, also on a busy machine.
PATIENT = 120.0


def test_a_batch_is_refused_after_its_second_crash_and_others_are_answered(harmed):
    def crashes():
        page = scrape(harmed.facts["metrics"])
        return page.total("warpfit_engine_restarts_total", cause="SIGSEGV")

    patient = warpfit.connect(harmed.address, retry=warpfit.RetryPolicy(total_seconds=PATIENT))
    with Load(harmed.address, 3, PATIENT) as load, patient as client:
        load.wait_for_answers(3)
        data = client.upload(FEW, FEW[:, 0])
        before = crashes()
        for _ in range(2):  # the second time it is known
            with pytest.raises(warpfit.FailedPreconditionError) as caught:
                client.evaluate(data, [f"x1 + {FATAL}", "x1 * 2"], loss="mse")
            assert caught.value.reason == "BATCH_QUARANTINED"
            assert client.evaluate(data, ["x1"], loss="mse")[0] == 0.0  # the data set is fine
            load.wait_for_answers(3)
            assert crashes() - before == 2
    assert (load.wrong, load.failures) == (0, [])
    health.wait_for(harmed.facts["health"], "SERVING")


def test_a_connection_lost_to_a_live_engine_comes_back(harmed):
    with warpfit.connect(harmed.address, retry=NO_RETRY) as client:
        data = client.upload(FEW, FEW[:, 0])
        engine = harmed.engine().pid
        for _ in range(2):
            with pytest.raises(warpfit.UnavailableError):
                client.evaluate(data, [f"x1 + {CUT}"], loss="mse")

            def is_back():
                with suppress(warpfit.UnavailableError):
                    return client.evaluate(data, ["x1"], loss="mse")[0] == 0.0

            eventually(is_back, 5)
        assert harmed.engine().pid == engine
    health.wait_for(harmed.facts["health"], "SERVING")


@pytest.mark.thorough
def test_a_new_engine_gets_any_number_of_data_sets(harmed):
    """The kernel passes no more than 253 descriptors with a message."""
    with warpfit.connect(harmed.address) as client:
        sets = [client.upload(np.full((1, 1), float(n)), np.ones(1)) for n in range(300)]
        harmed.kill_engine()
        assert client.evaluate(sets[3], ["x1"], loss="mse", timeout=20)[0] == 4.0
        health.wait_for(harmed.facts["health"], "SERVING")


@contextmanager
def full(pid):
    """Let a process open no more files."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = {int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()}
    lowest_free = min(set(range(len(used) + 1)) - used)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


def test_a_process_that_can_open_no_more_files_says_so_and_recovers(harmed):
    wide = np.random.default_rng(1).normal(size=(100_000, 2))
    with warpfit.connect(harmed.address, retry=NO_RETRY) as client:
        data = client.upload(wide, wide[:, 0])
        client.evaluate(data, ["x1"], loss="mse")
        engine = harmed.engine().pid
        for pid, count in ((harmed.process.pid, 40), (engine, 100)):
            with full(pid):
                with pytest.raises(warpfit.ResourceExhaustedError) as caught:
                    for number in range(30):  # the first ones get the files of idle memory
                        client.upload(wide[:, :1] + number, dtype="float64")
                assert (caught.value.reason, caught.value.retry_after) == ("TOO_MANY_FILES", 1.0)
                if pid == engine:
                    with pytest.raises(warpfit.ResourceExhaustedError) as caught:
                        client.evaluate(data, ["x1"] * count)  # its answer needs a segment
                    assert caught.value.reason == "TOO_MANY_FILES"
                assert client.info().engine == "cpu"
            found = client.evaluate(data, ["x1"] * count)[:, 7]
            np.testing.assert_array_equal(found, wide[:, 0].astype(np.float32))
        assert harmed.engine().pid == engine
        health.wait_for(harmed.facts["health"], "SERVING")


# ---------------------------------------------------------------------------------- several servers
@pytest.mark.thorough
def test_sigstop_and_sigkill_of_one_and_a_rolling_restart():
    with Fleet(2) as fleet, Load(fleet.address, clients=2) as load:
        load.wait_for_answers(10)
        with fleet.frozen(1):
            load.wait_for_answers(10)
        fleet.kill(0)
        load.wait_for_answers(10)
        for index in range(2):  # the one that was killed, and one that runs
            fleet.replace(index)
            load.wait_for_answers(10)
    assert (load.wrong, load.failures) == (0, [])


# ----------------------------------- a cache of compiled code that is damaged or cannot be written
#: Functions that compile in a second.
SMALL = ("lowering.tokens_are_valid", "parallel_loop.close")


@pytest.fixture
def cache(tmp_path):
    """A copy of what engines have kept of exactly these sources."""
    place, warm = tmp_path / "cache", default_cache_directory()
    parts.precompile(available_cores())
    place.mkdir(mode=0o700)
    shutil.copytree(numba_directory(warm), place / numba_directory(warm).name)
    return place


def serve(cache, log):
    """Serve from a cache; return what a server writes."""
    server = ServerProcess("--cache-dir", str(cache), log=log)
    with server, warpfit.connect(server.address) as client:
        data = client.upload(np.arange(6.0).reshape(3, 2))
        assert client.evaluate(data, ["x1 + x2"])[:, 0].tolist() == [1.0, 5.0, 9.0]
    return log.read_text()


def test_files_that_are_not_whole_are_made_again(cache, tmp_path):
    """Numba's index and data and an object file are empty, or cut in half."""
    own = f"py3{sys.version_info.minor}"  # another Python may have filled the cache, too
    damaged = [
        *(path for name in SMALL for path in cache.glob(f"numba-*/*/{name}-*.{own}.nbi")),
        *(path for name in SMALL for path in cache.glob(f"numba-*/*/{name}-*.{own}.1.nbc")),
        *cache.glob(f"numba-*/float64-kernels-{host_tag()}.o"),
    ]
    assert {path.suffix for path in damaged} == {".nbi", ".nbc", ".o"}
    for number, path in enumerate(damaged):
        os.truncate(path, path.stat().st_size // 2 if number % 2 else 0)
    log = serve(cache, tmp_path / "log")
    assert log.count("code is compiled again") >= 3
    assert "Traceback" not in log
    assert all(read(path) for path in damaged), "they are whole again"


@pytest.mark.thorough
def test_a_disk_that_is_full(cache, tmp_path):
    (disk := tmp_path / "disk").mkdir()
    size = "size=12m,mode=0700"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", disk], check=False).returncode:
        pytest.skip("needs the right to mount")
    try:
        shutil.copytree(cache, disk / "cache")
        with (disk / "filler").open("wb", buffering=0) as file, pytest.raises(OSError):
            while True:
                file.write(bytes(1 << 16))
        began = time.monotonic()
        log = serve(disk / "cache", tmp_path / "log")
        assert time.monotonic() - began < 30  # nothing was compiled again
    finally:
        subprocess.run(["umount", disk], check=True)
    assert log.count("compiled code is kept in a temporary directory") == 1
    assert "No space left" in log


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
