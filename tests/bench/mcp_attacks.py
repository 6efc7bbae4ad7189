"""How long an innocent caller's short calls of ``warpfit mcp --http`` take while others attack it.

`attacks.py` runs these. Callers have tokens of different tenants; requests are raw HTTP.
"""

from __future__ import annotations

import http.client
import json
import multiprocessing
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
from harness import ServerProcess

from support.servers.server import token_file

COMMAND: Final = ["-c", "import sys; from warpfit.cli.main import main; sys.exit(main())", "mcp"]
#: Calls of the innocent caller alone, and seconds of an attack.
ALONE, SECONDS = 30, 8.0


@dataclass(frozen=True)
class Page:
    """Where a server of tools listens, its process id, and the callers' tokens."""

    port: int
    process: int
    tokens: dict[str, str]

    def post(self, body: str, tenant: str | None) -> str:
        """Send a request in a connection of its own; return the answer's text."""
        head = {"content-type": "application/json", "mcp-protocol-version": "2025-06-18",
                "accept": "application/json, text/event-stream"}  # fmt: skip
        if tenant is not None:
            head["authorization"] = f"Bearer {self.tokens[tenant]}"
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("POST", "/mcp", body, head)
            return connection.getresponse().read().decode()
        finally:
            connection.close()


def _body(method: str, params: dict[str, Any]) -> str:
    return json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params})


def _call(tool: str, arguments: dict[str, Any]) -> str:
    """Return the request that calls a tool."""
    return _body("tools/call", {"name": tool, "arguments": arguments})


def _data(columns: int, rows: int) -> dict[str, Any]:
    table = np.random.default_rng(0).uniform(size=(columns + 1, rows)).round(3).tolist()
    names = [*(f"c{n}" for n in range(columns)), "y"]
    return {"columns": dict(zip(names, table, strict=True)), "target": "y"}


def searches() -> tuple[str, str | None]:
    """Eight searches at a time of one caller."""
    return _call("search", {"data": _data(3, 100), "max_seconds": 20.0}), "greedy"


def wide_tables() -> tuple[str, str | None]:
    """Tables of 20,000 columns."""
    return _call("describe_data", {"data": _data(20_000, 5)}), "greedy"


def sessions() -> tuple[str, str | None]:
    """Sessions of nobody."""
    client = {"name": "x", "version": "1"}
    given = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": client}
    return _body("initialize", given), None


#: What makes the request of an attack and its tenant, and how many are sent at a time.
ATTACKS: Final[dict[str, tuple[Callable[[], tuple[str, str | None]], int]]] = {
    "A7 eight searches of one caller": (searches, 8),
    "A8 tables of 20,000 columns": (wide_tables, 2),
    "A9 sessions without a token": (sessions, 4),
}


def _attack(name: str, page: Page, stop: Any, sent: Any) -> None:
    """Process: send the request of an attack from several threads until told to stop."""
    make, threads = ATTACKS[name]
    body, tenant = make()

    def work() -> None:
        while not stop.is_set():
            with suppress(OSError):
                page.post(body, tenant)
                with sent.get_lock():
                    sent.value += 1

    for _ in range(threads):
        threading.Thread(target=work, daemon=True).start()
    stop.wait(SECONDS + 60.0)


@contextmanager
def _served() -> Iterator[Page]:
    with tempfile.TemporaryDirectory() as folder:
        file, tokens = token_file(Path(folder), "innocent", "greedy")
        with ServerProcess("--token-file", file, "--threads", "1") as server:
            flags = ["--http", "--port", "0", "--address", server.address]
            command = [sys.executable, *COMMAND, *flags]
            with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
                try:
                    assert process.stderr is not None
                    port = int(process.stderr.readline().rpartition(":")[2].split("/")[0])
                    yield Page(port, process.pid, tokens)
                finally:
                    process.terminate()


def measured(name: str) -> dict[str, Any]:
    """Return milliseconds of the innocent caller's calls, alone and during an attack."""
    body = _call("describe_data", {"data": _data(3, 20)})

    def innocent() -> float:
        begun = time.perf_counter()
        answer = page.post(body, "innocent")
        assert "first_rows" in answer, answer[:500]
        return 1000.0 * (time.perf_counter() - begun)

    own = multiprocessing.get_context("spawn")
    stop, sent = own.Event(), own.Value("q", 0)
    with _served() as page:
        innocent()
        alone = [innocent() for _ in range(ALONE)]
        process = psutil.Process(page.process)
        before = process.memory_info().rss
        attacker = own.Process(target=_attack, args=(name, page, stop, sent), daemon=True)
        attacker.start()
        while not sent.value and attacker.is_alive():
            time.sleep(0.05)
        until, beside = time.monotonic() + SECONDS, []
        while time.monotonic() < until:
            beside.append(innocent())
            time.sleep(0.02)
        grown = process.memory_info().rss - before
        stop.set()
        attacker.join()
    return {
        "alone_ms": {"p50": float(np.median(alone)), "longest": max(alone)},
        "during_ms": {"p50": float(np.median(beside)), "longest": max(beside)},
        "innocent_calls": len(beside),
        "attacks": sent.value,
        "grown_mib": round(grown / 2**20, 1),
    }
