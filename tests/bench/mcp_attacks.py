"""How long an innocent caller's short calls of ``warpfit mcp --http`` take while others attack it.

`attacks.py` runs these. Callers have tokens of different tenants; requests are raw HTTP.
"""

from __future__ import annotations

import http.client
import json
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
    """Where a server of tools listens, its process, and the callers' tokens."""

    port: int
    process: psutil.Process
    tokens: dict[str, str]

    def post(self, method: str, params: dict[str, Any], tenant: str | None) -> str:
        """Send a request in a connection of its own; return the answer's text."""
        head = {"content-type": "application/json", "mcp-protocol-version": "2025-06-18",
                "accept": "application/json, text/event-stream"}  # fmt: skip
        if tenant is not None:
            head["authorization"] = f"Bearer {self.tokens[tenant]}"
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("POST", "/mcp", json.dumps(body), head)
            return connection.getresponse().read().decode()
        finally:
            connection.close()

    def call(self, tool: str, arguments: dict[str, Any], tenant: str) -> str:
        """Call a tool."""
        return self.post("tools/call", {"name": tool, "arguments": arguments}, tenant)


def _data(columns: int, rows: int) -> dict[str, Any]:
    table = np.random.default_rng(0).uniform(size=(columns + 1, rows)).round(3).tolist()
    names = [*(f"c{n}" for n in range(columns)), "y"]
    return {"columns": dict(zip(names, table, strict=True)), "target": "y"}


def searches(page: Page) -> None:
    """Eight searches at a time of one caller."""
    page.call("search", {"data": _data(3, 100), "max_seconds": 20.0}, "greedy")


def wide_tables(page: Page) -> None:
    """Tables of 20,000 columns."""
    page.call("describe_data", {"data": _data(20_000, 5)}, "greedy")


def sessions(page: Page) -> None:
    """Sessions of nobody."""
    client = {"name": "x", "version": "1"}
    given = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": client}
    page.post("initialize", given, None)


ATTACKS: Final[dict[str, tuple[Callable[[Page], None], int]]] = {
    "A7 eight searches of one caller": (searches, 8),
    "A8 tables of 20,000 columns": (wide_tables, 2),
    "A9 sessions without a token": (sessions, 4),
}


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
                    yield Page(port, psutil.Process(process.pid), tokens)
                finally:
                    process.terminate()


def measured(name: str) -> dict[str, Any]:
    """Return milliseconds of the innocent caller's calls, alone and during an attack."""
    attack, threads = ATTACKS[name]
    data = _data(3, 20)

    def innocent() -> float:
        begun = time.perf_counter()
        answer = page.call("describe_data", {"data": data}, "innocent")
        assert "first_rows" in answer, answer[:500]
        return 1000.0 * (time.perf_counter() - begun)

    stop, count = threading.Event(), [0] * threads

    def attacker(index: int) -> None:
        while not stop.is_set():
            with suppress(OSError):
                attack(page)
                count[index] += 1

    with _served() as page:
        innocent()
        alone = [innocent() for _ in range(ALONE)]
        before = page.process.memory_info().rss
        workers = [
            threading.Thread(target=attacker, args=(n,), daemon=True) for n in range(threads)
        ]
        for worker in workers:
            worker.start()
        until, beside = time.monotonic() + SECONDS, []
        while time.monotonic() < until:
            beside.append(innocent())
            time.sleep(0.02)
        grown = page.process.memory_info().rss - before
        stop.set()
    return {
        "alone_ms": {"p50": float(np.median(alone)), "longest": max(alone)},
        "during_ms": {"p50": float(np.median(beside)), "longest": max(beside)},
        "innocent_calls": len(beside),
        "attacks": sum(count),
        "grown_mib": round(grown / 2**20, 1),
    }
