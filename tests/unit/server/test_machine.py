"""Processors and memory that a process may use, stuck evaluations, directories of servers."""

import os
import subprocess
import sys
import tempfile
from multiprocessing import get_context

import numpy as np
import pytest

from warpfit_server import machine
from warpfit_server.machine import ControlGroups, available_cores, available_memory

GIB = 1 << 30


@pytest.fixture(autouse=True)
def sixteen_cores_and_64_gib(monkeypatch):
    figures = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 64 * GIB // 4096}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(os, "sysconf", figures.__getitem__)


@pytest.fixture
def groups(tmp_path):
    def made(names, **files):
        (tmp_path / "cgroup").write_text(names)
        for name, content in files.items():
            path = tmp_path / "mount" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        return ControlGroups(tmp_path / "cgroup", tmp_path / "mount")

    return made


def test_the_narrowest_group_counts(tmp_path, groups):
    nothing = ControlGroups(tmp_path / "none", tmp_path / "nowhere")
    assert available_cores(nothing) == 16
    assert available_memory(nothing) == 64 * GIB
    files = {
        "system.slice/cpu.max": "200000 100000\n",
        "system.slice/warpfit.service/cpu.max": "600000 100000\n",
        "system.slice/memory.max": f"{16 * GIB}\n",
        "system.slice/warpfit.service/memory.max": f"{4 * GIB}\n",
        "elsewhere/cpu.max": "100000 100000\n",
    }
    found = groups("0::/system.slice/warpfit.service\n", **files)
    assert available_cores(found) == 2
    assert available_memory(found) == 4 * GIB


@pytest.mark.parametrize(
    ("limit", "cores"), [("max", 16), ("400000", 4), ("250000", 3), ("10000", 1), ("9900000", 16)]
)
def test_cores_of_a_container(groups, limit, cores):
    assert available_cores(groups("0::/\n", **{"cpu.max": f"{limit} 100000\n"})) == cores


@pytest.mark.parametrize(
    ("quota", "bytes_", "cores", "gib"), [("-1", 1 << 63, 16, 64), ("300000", 2 * GIB, 3, 2)]
)
def test_groups_of_version_1(groups, quota, bytes_, cores, gib):
    files = {
        "cpu/cpu.cfs_quota_us": f"{quota}\n",
        "cpu/cpu.cfs_period_us": "100000\n",
        "memory/memory.limit_in_bytes": f"{bytes_}\n",
    }
    names = "5:memory:/docker/f00\n4:cpu,cpuacct:/docker/f00\n1:name=systemd:/docker/f00\n"
    assert available_cores(groups(names, **files)) == cores
    assert available_memory(groups(names, **files)) == gib * GIB


_FAULTS = """
import ctypes
import resource
import threading
import numpy as np
from warpfit_server.machine import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

keep_freed_memory()
before = faults()
for _ in range(100):
    batch = [np.ones(1 << 17) for _ in range(4)]
    del batch
print(faults() - before)
together = threading.Barrier(12)

def allocate():
    together.wait()
    np.ones(1 << 12)
    together.wait()

threads = [threading.Thread(target=allocate) for _ in range(together.parties)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
ctypes.CDLL(None).malloc_stats()  # to stderr
"""


def test_freed_blocks_are_used_again_without_page_faults_and_kept_in_few_heaps():
    command = (sys.executable, "-c", _FAULTS)
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    heaps = ended.stderr.count("Arena ")
    assert int(ended.stdout) < 3_000, "the first ones have 1,024 pages; all have 102,400"
    assert 0 < heaps <= 4, "which there are for twelve threads"


def test_only_an_evaluation_that_ignores_its_cancellation_is_stuck():
    flag, now = np.zeros(1, np.uint8), 1e9
    flags = {1: flag, 2: np.zeros(1, np.uint8)}
    detector = machine.StuckDetector(30.0, flags.items)
    assert not detector.is_stuck(now)
    flag[0] = 1
    assert [detector.is_stuck(now + seconds) for seconds in (1, 31, 32)] == [False, False, True]
    # The next request in the same segment, and so with the same flag, has its own time.
    flags[3] = flags.pop(1)
    assert [detector.is_stuck(now + seconds) for seconds in (33, 62, 64)] == [False, False, True]
    flags.clear()
    assert not detector.is_stuck(now + 100)


_CONTEXT = get_context("fork")


def test_the_next_server_removes_the_directory_of_one_that_was_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def hold(made):
        directory = machine.ServerDirectory()
        made.send(directory.path)
        made.recv()

    pipes = [_CONTEXT.Pipe() for _ in range(2)]
    processes = [_CONTEXT.Process(target=hold, args=(theirs,)) for _, theirs in pipes]
    for process in processes:
        process.start()
    killed, living = (ours.recv() for ours, _ in pipes)
    (tmp_path / "warpfit-server-of-nobody").mkdir()  # without a lock: it may be about to get one
    processes[0].kill()
    processes[0].join()
    own = machine.ServerDirectory()
    assert not killed.exists()
    assert set(tmp_path.iterdir()) == {own.path, living, tmp_path / "warpfit-server-of-nobody"}
    assert own.path.stat().st_mode & 0o077 == 0
    own.remove()
    assert not own.path.exists()
    processes[1].kill()
    processes[1].join()
