"""A real server process for end-to-end tests."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psutil

from warpfit.transport.connection import new_token
from warpfit_server.tenants import Amounts, QuotaTable


class ServerProcess:
    """``python -m warpfit_server`` on a free loopback port; a context manager."""

    def __init__(
        self,
        *flags: str,
        devices: str = "cpu",
        log: Path | None = None,
        files: int | None = None,
        **environment: str,
    ) -> None:
        self._log = log.open("w") if log else None
        limit = ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh"] if files else []
        command = [*limit, sys.executable, "-m", "warpfit_server", "--port", "0"]
        pipes = {"stdout": subprocess.PIPE, "stderr": self._log, "text": True}
        words, environment = [*command, "--devices", devices, *flags], {**os.environ, **environment}
        self.process = subprocess.Popen(words, env=environment, **pipes)
        assert self.process.stdout is not None
        self.banner = self.process.stdout.readline()
        if "listening on" not in self.banner:
            raise RuntimeError(f"the server did not start: {self.banner!r}")
        if self.banner.startswith("{"):  # --log-format json
            self.banner = json.loads(self.banner)["message"]
        self.address = self.banner.split()[3]
        named = (word.partition("=") for word in self.banner.split())
        #: What the start-up line says: health and metrics ports among others.
        self.facts = {name: value for name, _, value in named if value}

    def __enter__(self):
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _children(self, module: str, place: int) -> dict[int, psutil.Process]:
        """Children that run a module, by their numbers, which stand among their arguments."""
        children = psutil.Process(self.process.pid).children()
        found = [child for child in children if runs(child, module)]
        return {int(child.cmdline()[place]): child for child in found}

    def engines(self) -> dict[int, psutil.Process]:
        """The engine processes that run now, by their numbers."""
        return self._children("warpfit_server.engine.loop", 4)

    def engine(self, number: int = 0, timeout: float = 30.0) -> psutil.Process:
        """The process of an engine that runs now."""
        found: dict[int, psutil.Process] = {}
        eventually(lambda: found.update(self.engines()) or number in found, timeout)
        return found[number]

    def front_ends(self) -> list[psutil.Process]:
        """The front-end processes, in the order of their numbers."""
        found = self._children("warpfit_server.processes.front_end", 5)
        return [found[number] for number in sorted(found)]

    def connections(self, process: psutil.Process) -> int:
        """Open connections of a front end to the server's port."""
        port = int(self.address.rpartition(":")[2])
        found = process.net_connections("tcp")
        return sum(c.laddr.port == port and c.status == psutil.CONN_ESTABLISHED for c in found)

    def kill_engine(self, number: int = 0) -> None:
        self.engine(number).send_signal(signal.SIGKILL)

    def family(self) -> dict[str, psutil.Process]:
        further = {f"front end {number}": one for number, one in enumerate(self.front_ends(), 1)}
        main = psutil.Process(self.process.pid)
        engines = {f"engine {number}": one for number, one in self.engines().items()}
        return {"main": main, **further, **engines}

    def kill(self) -> None:
        """SIGKILL the main process, and wait until the others have ended by themselves."""
        others = psutil.Process(self.process.pid).children()
        self.process.kill()
        self.process.wait()
        _, alive = psutil.wait_procs(others, 60)
        assert not alive, "processes outlive the main one"

    def shared_memory(self) -> int:
        """Bytes of memory files that the main process and the front ends have mapped."""
        inodes = {}
        for process in (psutil.Process(self.process.pid), *self.front_ends()):
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                if "memfd:warpfit" in line:
                    start, end = (int(text, 16) for text in line.split()[0].split("-"))
                    inodes[process.pid, start] = end - start
        return sum(inodes.values())

    def in_flight(self) -> Amounts:
        """Return the calls, bytes and engine time in flight, from the server's shared table."""
        for entry in Path(f"/proc/{self.process.pid}/fd").iterdir():
            try:
                target = str(entry.readlink())
            except OSError:  # closed since
                continue
            if "memfd:warpfit-quotas" in target:
                processes, engines = len(self.front_ends()), len(self.engines())
                descriptor = os.open(entry, os.O_RDWR | os.O_CLOEXEC)
                with closing(QuotaTable(descriptor, processes, 0, engines)) as table:
                    return table.in_flight()
        raise FileNotFoundError("the server has no table of quotas")

    def descriptors(self) -> int:
        """Open file descriptors of the main process and the front ends."""
        return sum(one.num_fds() for one in (psutil.Process(self.process.pid), *self.front_ends()))

    def stop(self) -> int:
        """SIGTERM, wait, return the exit status."""
        if self.process.poll() is None:
            self.process.terminate()
        status = self.process.wait(timeout=100)
        if self.process.stdout:
            self.process.stdout.close()
        if self._log:
            self._log.close()
        return status


def private_bytes(pid: int) -> int:
    """Memory of a process that it shares with no other."""
    memory = psutil.Process(pid).memory_info()
    return int(memory.rss - memory.shared)


def eventually(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait until a condition holds; fail if it does not in so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition does not come true"
        time.sleep(0.02)


def runs(process: psutil.Process, module: str) -> bool:
    """Tell whether a process is alive and runs a module."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE and module in process.cmdline()
    except psutil.NoSuchProcess:
        return False


def write_secret(path: Path, content: str | bytes) -> Path:
    """Write a file that nobody else may read, as servers and clients demand of keys and tokens."""
    path.touch(mode=0o600)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def token_file(folder: Path, *tenants: str) -> tuple[str, dict[str, str]]:
    """Write a token file; return its path and each tenant's token."""
    made = {tenant: new_token(tenant) for tenant in tenants}
    path = folder / "tokens"
    path.write_text("".join(f"{line}\n" for _, line in made.values()))
    path.chmod(0o600)
    return str(path), {tenant: token for tenant, (token, _) in made.items()}


def tenants_file(folder: Path, text: str) -> str:
    """Write a tenants file; return its path."""
    path = folder / "tenants.toml"
    path.write_text(text)
    return str(path)
