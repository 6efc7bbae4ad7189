"""Parts of the engine's code are compiled by several processes."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from warpfit_server.engine import cpu_code


@pytest.mark.parametrize("count", [1, 2, 4])
def test_parts_are_shared_out_evenly(count):
    shares = cpu_code.shares(count)
    assert sorted(itertools.chain(*shares)) == sorted(cpu_code.PARTS)
    seconds = [sum(cpu_code.PARTS[name][0] for name in names) for names in shares]
    longest = max(seconds for seconds, _ in cpu_code.PARTS.values())
    assert max(seconds) <= max(longest, 1.1 * sum(seconds) / count)


def test_another_process_compiles_into_the_directory(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(cpu_code, "shares", lambda count: [["parallel"]][:count])
    cpu_code.compile_all(tmp_path, 2)
    names = {path.name.split("-")[0] for path in tmp_path.rglob("*.nbi")}
    functions = ("run", "help_others", "close")
    assert names == {f"cpu_parallel.{name}" for name in functions}
    assert caplog.text == ""
    begun = time.time()
    cpu_code.parallel(tmp_path)
    assert max(path.stat().st_mtime for path in tmp_path.rglob("*.nb?")) < begun, "only loaded"


def test_a_process_that_fails_is_told_and_does_no_harm(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(cpu_code, "shares", lambda count: [["no such part"]])
    cpu_code.compile_all(tmp_path, 2)
    assert "no such part" in caplog.text
    assert (tmp_path / "complete").exists()


def test_one_at_a_time_compiles_and_the_others_wait(monkeypatch, tmp_path):
    calls, ended = [], []

    class Slow:
        def __init__(self, place, names):
            calls.append(names)

        def wait(self):
            time.sleep(0.2)
            ended.append(0)
            return 0

    def compile_all(number):
        cpu_code.compile_all(tmp_path, 1)
        return len(ended)

    monkeypatch.setattr(cpu_code, "_start", Slow)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(compile_all, range(4)))
    assert found == [1] * 4
    assert len(calls) == 1
