"""The temporary directory of a server, also of one that was killed."""

import tempfile
from multiprocessing import get_context

from warpfit_server.system.lifetime import ServerDirectory

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
