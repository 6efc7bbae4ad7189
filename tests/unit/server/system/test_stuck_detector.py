"""Evaluations that are stuck, and directories that servers have left."""

from __future__ import annotations

import tempfile
from multiprocessing import get_context

import numpy as np

from warpfit_server.system.lifetime import ServerDirectory, StuckDetector


def test_only_an_evaluation_that_ignores_its_cancellation_is_stuck():
    flag, other = np.zeros(1, np.uint8), np.zeros(1, np.uint8)
    flags = {1: flag, 2: other}
    detector = StuckDetector(30.0, flags.items)
    assert not detector.is_stuck(1e9)
    flag[0] = 1
    assert not detector.is_stuck(1e9 + 1)
    assert not detector.is_stuck(1e9 + 31)
    assert detector.is_stuck(1e9 + 32)
    del flags[1]
    assert not detector.is_stuck(1e9 + 100)


def test_the_next_request_in_the_same_segment_has_its_own_time():
    flag = np.ones(1, np.uint8)  # of the segment, and so of both requests
    flags = {1: flag}
    detector = StuckDetector(30.0, flags.items)
    assert not detector.is_stuck(1e9)
    flags.clear()
    flags[2] = flag
    assert not detector.is_stuck(1e9 + 31)
    assert detector.is_stuck(1e9 + 62)


# -------------------------------------------------------------------------------------- directories


_CONTEXT = get_context("fork")


def hold(made):
    """Be a server that has a directory, until somebody ends it."""
    directory = ServerDirectory()
    made.send(directory.path)
    made.recv()


def test_the_next_server_removes_the_directory_of_one_that_was_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ends, processes = [], []
    for _ in range(2):
        ours, theirs = _CONTEXT.Pipe()
        ends.append(ours)
        processes.append(_CONTEXT.Process(target=hold, args=(theirs,)))
        processes[-1].start()
    killed, living = (end.recv() for end in ends)
    (tmp_path / "warpfit-server-of-nobody").mkdir()  # without a lock: it may be about to get one
    processes[0].kill()
    processes[0].join()
    own = ServerDirectory()
    assert not killed.exists()
    assert set(tmp_path.iterdir()) == {own.path, living, tmp_path / "warpfit-server-of-nobody"}
    assert own.path.stat().st_mode & 0o077 == 0
    own.remove()
    assert not own.path.exists()
    processes[1].kill()
    processes[1].join()
