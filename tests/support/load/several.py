"""Faults of one of several servers under load, and what clients that know all of them see."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
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
        self.size = count

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


def under_load(
    cluster: Any,
    counted: str,
    times: int,
    fault: Callable[[int], object],
    repair: Callable[[int], object] = lambda number: None,
) -> dict[str, Any]:
    """Provoke a fault of some servers under load, and repair it; each client's longest gap.

    ``counted`` is the name of the number of times; fault and repair get which of the servers it is.
    """
    gaps, clients = [], 6
    with Load(cluster.address, clients) as load:
        for number in range(times):
            load.wait_for_answers(10)
            began = time.monotonic()
            fault(number % cluster.size)
            load.wait_for_answers(10)
            gaps.append(max(load.gaps(began, time.monotonic())))
            repair(number % cluster.size)
        load.wait_for_answers(10)
    seen = {**figures(load), **spread("client_gap_seconds", gaps)}
    return {counted: times, "clients": clients, **seen}


def lost_servers(kills: int) -> dict[str, Any]:
    """SIGKILL one server after the other, and start each again."""
    with Fleet() as fleet:
        return under_load(fleet, "kills", kills, fleet.kill, fleet.replace)


def frozen_servers(stops: int) -> dict[str, Any]:
    """SIGSTOP one server after the other, for longer than clients wait for a sign of life."""
    with Fleet() as fleet, ExitStack() as held:

        def stop(index: int) -> None:
            held.enter_context(fleet.frozen(index))
            time.sleep(5.0)

        return under_load(fleet, "stops", stops, stop, lambda index: held.close())


def rolling_restart(rounds: int) -> dict[str, Any]:
    with Fleet() as fleet:
        return under_load(fleet, "restarts", 3 * rounds, fleet.replace)
