"""Faults of one of several servers under load, and what clients that know all of them see."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from support.load.faults import figures, free_port, spread
from support.load.load import Load
from support.servers.server import ServerProcess


class Fleet:
    """Servers with one thread each, which keep their ports when they are replaced."""

    def __init__(self, count: int = 3) -> None:
        self._flags = [("--threads", "1", "--port", str(free_port())) for _ in range(count)]
        self.servers = [ServerProcess(*flags) for flags in self._flags]
        self.address = ",".join(server.address for server in self.servers)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *exception: object) -> None:
        with ExitStack() as stack:
            for server in self.servers:
                stack.callback(server.stop)

    def kill(self, index: int) -> None:
        """SIGKILL a server with all of its processes."""
        self.servers[index].kill()
        self.servers[index].stop()

    @contextmanager
    def frozen(self, index: int) -> Iterator[None]:
        """SIGSTOP all processes of a server for the time of the block."""
        family = self.servers[index].family().values()
        for process in family:
            process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for process in family:
                process.send_signal(signal.SIGCONT)

    def replace(self, index: int) -> None:
        """Stop a server in an orderly way, if it runs, and start another one at its port."""
        self.servers[index].stop()
        self.servers[index] = ServerProcess(*self._flags[index])


def lost_servers(kills: int, clients: int = 6) -> dict[str, Any]:
    """SIGKILL one server after the other, and start each again; the longest gap of each client."""
    gaps: list[float] = []
    with Fleet() as fleet, Load(fleet.address, clients) as load:
        for number in range(kills):
            index = number % len(fleet.servers)
            load.wait_for_answers(10)
            killed = time.monotonic()
            fleet.kill(index)
            load.wait_for_answers(10)
            gaps.append(max(load.gaps(killed, time.monotonic())))
            fleet.replace(index)
    return {
        "kills": kills,
        "clients": clients,
        **figures(load),
        **spread("client_gap_seconds", gaps),
    }


def frozen_servers(stops: int, clients: int = 6) -> dict[str, Any]:
    """SIGSTOP one server after the other, for longer than clients wait for a sign of life."""
    gaps: list[float] = []
    with Fleet() as fleet, Load(fleet.address, clients) as load:
        for number in range(stops):
            load.wait_for_answers(10)
            stopped = time.monotonic()
            with fleet.frozen(number % len(fleet.servers)):
                time.sleep(5.0)
                load.wait_for_answers(10)
                gaps.append(max(load.gaps(stopped, time.monotonic())))
            load.wait_for_answers(10)
    return {
        "stops": stops,
        "clients": clients,
        **figures(load),
        **spread("client_gap_seconds", gaps),
    }


def rolling_restart(rounds: int, clients: int = 6) -> dict[str, Any]:
    """Replace one server after the other under load."""
    with Fleet() as fleet, Load(fleet.address, clients) as load:
        for _ in range(rounds):
            for index in range(len(fleet.servers)):
                load.wait_for_answers(10)
                fleet.replace(index)
        load.wait_for_answers(10)
    return {"restarts": 3 * rounds, **figures(load)}
