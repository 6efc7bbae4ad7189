"""Starting the first engine processes before a server is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from warpfit.errors import InvalidArgumentError
from warpfit_server.config import Config
from warpfit_server.processes import engine_start
from warpfit_server.processes.engine_start import prepare


def test_engines_that_no_supervisor_takes_are_ended_with_all_that_was_made(tmp_path):
    config = Config(port=0, devices="cpu:2", threads=1, cache_dir=str(tmp_path))
    with prepare(config) as prepared:
        assert [device.label for device in prepared.config.engines] == ["cpu:0", "cpu:1"]
        assert sorted(prepared.engines) == [0, 1]
        assert Path(prepared.directory).is_dir()
        processes = [engine.process for engine in prepared.engines.values()]
        assert all(process.poll() is None for process in processes)
        taken = prepared.engines.pop(1)
    assert processes[0].returncode is not None
    assert not Path(prepared.directory).exists()
    assert taken.process.poll() is None
    taken.end.close()
    taken.process.kill()
    taken.process.wait()


def test_an_engine_that_cannot_be_started_leaves_nothing_open(monkeypatch, tmp_path):
    ends = []
    pair = engine_start.socket_pair

    def socket_pair():
        ends.extend(pair())
        return tuple(ends)

    def popen(*_, **__):
        raise OSError("no memory")

    monkeypatch.setattr(engine_start, "socket_pair", socket_pair)
    monkeypatch.setattr(engine_start.subprocess, "Popen", popen)
    with pytest.raises(OSError, match="no memory"):
        engine_start.start_engine(Config(devices="cpu", cache_dir=str(tmp_path)), 0)
    assert [end.fileno() for end in ends] == [-1, -1]


def test_a_process_that_cannot_be_started_is_left_to_its_supervisor(monkeypatch, tmp_path):
    start = engine_start.start_engine

    def fails_once(config, number):
        if number == 0:
            raise BlockingIOError("no process is left")
        return start(config, number)

    monkeypatch.setattr(engine_start, "start_engine", fails_once)
    config = Config(port=0, devices="cpu:2", threads=1, cache_dir=str(tmp_path))
    with prepare(config) as prepared:
        assert list(prepared.engines) == [1]


def test_settings_are_checked_before_an_engine_starts(monkeypatch, tmp_path):
    monkeypatch.setattr(engine_start, "start_engine", lambda *_: pytest.fail("it was started"))
    config = Config(devices="cpu", device_memory=1 << 30, cache_dir=str(tmp_path))
    with pytest.raises(InvalidArgumentError, match="--device-memory"), prepare(config):
        pass
