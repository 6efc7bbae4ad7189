"""Faults of a Ray cluster of several nodes in this machine, and what clients of its servers see."""

import os
import signal
import sys
import threading
import time
from argparse import Namespace
from contextlib import suppress
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Self

import psutil

# Ray's nodes on loopback, as all servers of tests; read when it is imported.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
import ray
from ray.cluster_utils import Cluster

import warpfit.ray
from support.load.faults import under_load
from support.servers.server import eventually

EXAMPLE = Path(__file__).resolve().parents[3] / "client" / "examples" / "islands_on_ray.py"
_NODE = {"num_cpus": 2, "object_store_memory": 80_000_000}


class RayCluster:
    """Nodes with a server each, which has one thread; a context manager."""

    namespace = "tests"
    address = f"ray://{namespace}"

    def __init__(self, nodes: int = 3) -> None:
        head = {**_NODE, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._nodes = [self._cluster.add_node(wait=False, **_NODE) for _ in range(nodes - 1)]
        self.size = nodes
        try:
            self._cluster.wait_for_nodes()
            ray.init(address=self._cluster.address, log_to_driver=False)
            flags = ("--threads", "1", "--front-ends", "1")
            warpfit.ray.start(self.namespace, devices="cpu", flags=flags, cpus=0.1)
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        ray.shutdown()
        self._cluster.shutdown()

    def servers(self) -> list[psutil.Process]:
        return [server for actor in self.workers("_ServerActor") for server in actor.children()]

    def workers(self, task: str) -> list[psutil.Process]:
        """The processes that run a task or are an actor."""
        title = f"ray::{task}"
        found = []
        for process in _descendants(os.getpid()):
            with suppress(psutil.Error):
                found += [process] if " ".join(process.cmdline()).startswith(title) else []
        return found

    def lose_node(self) -> None:
        """SIGKILL everything that runs on the node that was added last."""
        node = self._nodes.pop()
        raylet = node.all_processes["raylet"][0].process.pid
        for process in [psutil.Process(raylet), *_descendants(raylet)]:
            _kill(process)
        self._cluster.remove_node(node, allow_graceful=False)

    def add_node(self) -> None:
        self._nodes.append(self._cluster.add_node(wait=False, **_NODE))

    def wait_for_servers(self, count: int | None = None, timeout: float = 90.0) -> None:
        """Wait until Ray has brought back the servers."""
        wanted = count or self.size
        eventually(lambda: len(warpfit.ray.addresses(self.namespace)) >= wanted, timeout)


def lost_servers(kills: int) -> dict[str, Any]:
    """SIGKILL a server's main process; Ray starts it again."""
    with RayCluster() as cluster:
        end, wait = lambda _: _kill(cluster.servers()[0]), lambda _: cluster.wait_for_servers()
        return under_load(cluster, "faults", kills, end, wait)


def lost_nodes(kills: int) -> dict[str, Any]:
    """SIGKILL a node with all that is on it, then add another one."""
    with RayCluster() as cluster:

        def repair(index: int) -> None:
            cluster.add_node()
            cluster.wait_for_servers()

        return under_load(cluster, "faults", kills, lambda _: cluster.lose_node(), repair)


def rolling_restart(rounds: int) -> dict[str, Any]:
    with RayCluster() as cluster:
        namespace = cluster.namespace
        return under_load(cluster, "faults", rounds, lambda _: warpfit.ray.restart(namespace))


def lost_while_searching() -> dict[str, Any]:
    """Kill a worker, a server and a node during a search; compare with an undisturbed search."""
    with RayCluster() as cluster:
        example = _example()
        started = time.monotonic()
        undisturbed = example.search(cluster.namespace, SMALL)
        calm = time.monotonic() - started
        killed: list[str] = []
        disturber = threading.Thread(target=_disturb, args=(cluster, killed))
        disturber.start()
        disturbed = example.search(cluster.namespace, SMALL)
        seen = list(killed)
        disturber.join()
    found = {"epochs": SMALL.epochs, "killed_before_the_end": seen, "loss": disturbed.losses[0]}
    found |= {"same_formulas": disturbed == undisturbed, "seconds_undisturbed": round(calm, 1)}
    return found | {"seconds": round(time.monotonic() - started - calm, 1)}


#: A search of a few seconds.
SMALL = Namespace(islands=4, population=400, epochs=6, generations=5, rows=5_000, seed=1)


def _disturb(cluster: RayCluster, killed: list[str]) -> None:
    """Kill a process that runs an epoch, then a server, then a node."""
    end = time.monotonic() + 30
    for what in ("worker", "server", "node"):
        while not (workers := cluster.workers("evolve")) and time.monotonic() < end:
            time.sleep(0.005)
        if what == "node":
            cluster.lose_node()
        else:
            _kill((workers if what == "worker" else cluster.servers())[0])
        killed.append(what)
        time.sleep(0.5)


def _example() -> Any:
    spec = spec_from_file_location("islands_on_ray", EXAMPLE)
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    ray.cloudpickle.register_pickle_by_value(module)  # the nodes do not have it
    return module


def _descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def _kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGKILL)
