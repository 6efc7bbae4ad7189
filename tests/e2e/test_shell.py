"""The commands where standard output or other descriptors are closed, full or read by nobody."""

import os
import signal
import subprocess
import sys
import time

import pytest

import warpfit

WARPFIT = f"exec {sys.executable} -c 'import sys, warpfit.cli.main as m; sys.exit(m.main())'"
SERVE = f"{WARPFIT} serve --port 0 --devices cpu --threads 1"


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,y\n" + "".join(f"{i},{2 * i + 1}\n" for i in range(20)))
    return path


COMMANDS = {
    "info": "info $ADDRESS",
    "health": "health $ADDRESS",
    "top": "top $METRICS_ADDRESS --once --interval 0.1",
    "eval": "eval $TABLE 'a*2 + 1' --target y --address $ADDRESS",
    "fit": "fit $TABLE 'p1*a + p2' --target y --address $ADDRESS",
    "token": "token alice",
    "help": "--help",
    "help of serve": "serve --help",
    "version": "--version",
}


def run(text, server, table, *redirections):
    """Run a command in a shell; return its status and standard error."""
    line = f"{WARPFIT} {text} {' '.join(redirections)}"
    addresses = {"ADDRESS": server.address, "METRICS_ADDRESS": server.facts["metrics"]}
    environment = {**os.environ, **addresses, "TABLE": str(table)}
    done = subprocess.run(
        ["sh", "-c", line], env=environment, capture_output=True, text=True, timeout=200
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("name", "output", "unbuffered"),
    [
        *[("info", ">/dev/full", ""), ("eval", ">&-", ""), ("token", ">&-", "1")],
        *(
            pytest.param(name, (">/dev/full", ">&-")[number % 2], "", marks=pytest.mark.thorough)
            for number, name in enumerate(COMMANDS)
            if name != "info"
        ),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                *[("info", ">&-", ""), ("info", "<&- >&-", ""), ("token", "<&- >&-", "")],
                ("info", ">/dev/full", "1"),
            )
        ),
    ],
)
def test_a_command_that_cannot_print_says_so(server, table, name, output, unbuffered, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    status, err = run(COMMANDS[name], server, table, output)
    assert status == 2
    lines = err.strip().splitlines()
    assert lines[-1].startswith("warpfit: error: standard output cannot be written: "), err
    assert len(lines) == (3 if name == "token" else 1), err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("name", "errors"),
    [
        *[("info", "2>/dev/full"), ("fit", "<&- 2>&-")],
        pytest.param("token", "2>&-", marks=pytest.mark.thorough),
        pytest.param("info", "<&- 2>&-", marks=pytest.mark.thorough),
    ],
)
def test_a_command_that_cannot_complain_does_its_work(server, table, name, errors):
    assert run(COMMANDS[name], server, table, errors)[0] == 0


@pytest.mark.parametrize(
    "errors", [pytest.param("2>/dev/full", marks=pytest.mark.thorough), ">&- 2>&-"]
)
def test_the_status_tells_of_an_error_that_cannot_be_shown(server, table, errors):
    assert run("eval $TABLE 'a +' --address $ADDRESS", server, table, errors)[0] == 2


@pytest.mark.thorough
@pytest.mark.parametrize("redirections", ["> /dev/full 2>&1", "<&- >&- 2>&-"])
def test_a_server_serves_whatever_its_descriptors_are(tmp_path, redirections):
    file = tmp_path / "address"
    line = f"{SERVE} --front-ends 1 --address-file {file} {redirections}"
    with subprocess.Popen(["sh", "-c", line], stderr=subprocess.DEVNULL) as process:
        try:
            address = f"file://{file}"
            with warpfit.connect(address, wait=60, tls=False) as client:
                data = client.upload([[1.0], [2.0]])
                for _ in range(20):
                    assert client.evaluate(data, ["2*x1"]).tolist() == [[2.0], [4.0]]
            time.sleep(0.2)
            assert process.poll() is None
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
