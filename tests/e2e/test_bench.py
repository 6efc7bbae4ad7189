"""`warpfit bench` as a user runs it, on the CPU engine."""

import json
import signal
import subprocess
import sys
import time

import pytest

from support.servers.server import ServerProcess

#: Each run starts a server, which may have to compile.
pytestmark = pytest.mark.timeout(400)


def bench(*words, **options):
    command = [
        sys.executable,
        "-c",
        "import sys; from warpfit.cli.main import main; sys.exit(main())",
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*command, "bench", *map(str, words)], **pipes, **options)


def finish(process, timeout=180):
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


TINY = ("--profile", "tiny", "--engine", "cpu", "--seed", "3")


def test_an_interrupt_keeps_what_is_done(tmp_path):
    path = tmp_path / "tiny.json"
    process = bench(*TINY, "--out", path, start_new_session=True)
    deadline = time.monotonic() + 180
    while not path.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    status, out, err = finish(process)
    kept = json.loads(path.read_text())
    assert status == 130
    assert f"{len(kept['cells'])} measurements in {path}" in out
    assert "Traceback" not in err
    assert not kept["complete"]
    assert kept["cells"]


def test_every_kind_is_measured(tmp_path):
    path = tmp_path / "tiny.json"
    status, out, err = finish(bench(*TINY, "--out", path, "--note", "a test"))
    assert status == 0, err
    assert "measurements in" in out
    document = json.loads(path.read_text())
    assert document["complete"]
    assert document["notes"] == ["a test"]
    kinds = {cell["scenario"]["kind"] for cell in document["cells"]}
    assert {"evaluate", "optimize", "workers", "peer"} <= kinds
    assert {c["scenario"]["precision"] for c in document["cells"]} == {"fast", "precise", "float64"}
    assert document["machine"]["cores"]
    assert document["versions"]["warpfit"]
    assert document["servers"]["cpu"]["start_seconds"] > 0
    assert document["peaks"]["cpu"]["bytes_per_second"] > 0
    for cell in document["cells"]:
        if cell["scenario"]["kind"] == "evaluate":
            assert 0 < cell["kernel"]["median"] <= cell["wall"]["median"]
    (numpy,) = [cell for cell in document["cells"] if cell.get("peer") == "NumPy"]
    assert min(numpy["agreement"].values()) > 0.85


def test_load_on_a_running_server(server: ServerProcess, tmp_path):
    words = ["--rate", "60", "--seconds", "1", "--ramp", "0.2", "--rows", "50"]
    out = tmp_path / "load.json"
    status, _, err = finish(
        bench("load", server.address, *words, "--expressions", "5", "--out", out)
    )
    assert status == 0, err
    found = json.loads(out.read_text())
    assert found["failed"] == {}
    assert found["calls"] > 20
    assert found["latency"]["mean"] >= found["service"]["mean"] > 0
