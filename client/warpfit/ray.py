"""Servers on the nodes of a Ray cluster, started, restarted and found by Ray.

::

    import warpfit, warpfit.ray

    warpfit.ray.start("science")                        # once, from anywhere in the cluster
    with warpfit.connect("ray://science") as client:    # in any task, actor or driver
        ...

Each server belongs to a detached, named actor that reserves the GPUs of its node. Ray restarts the
actor where it can if the server or its node is lost. Calls do not pass through Ray: clients ask the
actors for the servers' addresses and call those by gRPC. Needs ``pip install 'warpfit[ray]'``.
"""

import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

from warpfit.child_processes import python_child
from warpfit.embedded import READY, START_SECONDS, require_server
from warpfit.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    UnavailableError,
    list_of_texts,
    require,
)
from warpfit.transport.connection import Target

#: Namespace of servers whose starter gave none.
NAMESPACE: Final = "warpfit"
_NAMESPACE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_PREFIX: Final = "warpfit-server-"
#: Seconds for which an actor is waited for that is asked for its server's address.
_ASK_SECONDS: Final = 3.0
#: Seconds after which those that have answered are enough: others are being restarted.
_PATIENCE_SECONDS: Final = 1.0
#: Pause in seconds before a server that does not start again is tried once more.
_AGAIN_SECONDS: Final = 5.0
#: Seconds that a server may take to drain and stop.
_STOP_SECONDS: Final = 60.0
#: Pause in seconds after a server is back until the next one is stopped: clients that have met no
#: failure ask for the addresses every ten seconds, and then know the new one.
_SETTLE_SECONDS: Final = 12.0
#: Runs a server that is killed with the process, or rather the thread, that has started it:
#: otherwise it would keep the GPU of an actor that Ray has killed. 1 is PR_SET_PDEATHSIG.
_LAUNCH: Final = """
import ctypes, os, runpy, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv.pop(1)):
    runpy.run_module("warpfit_server", run_name="__main__")
"""


class _ServerActor:
    """A server as a child process; the actor ends with it, so that Ray starts both again."""

    def __init__(self, flags: Sequence[str]) -> None:
        context = _ray().get_runtime_context()
        self._node = context.get_node_id()
        self._is_stopping = False
        host = _ray().util.get_node_ip_address()
        words = [str(os.getpid()), "--host", host, "--port", "0", *flags]
        child = python_child("-c", _LAUNCH, *words)
        self._process = subprocess.Popen(**child, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        found = READY.search(self._process.stdout.readline())
        if found is None:
            if context.was_current_actor_reconstructed:  # it did start before
                time.sleep(_AGAIN_SECONDS)
                os._exit(1)
            raise UnavailableError(
                f"the server on {host} ended with status {self._process.wait()}",
                "SERVER_NOT_STARTED",
                "Its log is in that of the actor: see `ray logs`",
            )
        self._address = found[1]
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        self._process.wait()
        if not self._is_stopping:
            os._exit(1)

    def describe(self) -> tuple[str, str]:
        """Return the server's address and the id of its node."""
        return self._address, self._node

    def stop(self) -> None:
        """Let the server finish its calls, and stop it."""
        self._is_stopping = True
        self._process.terminate()
        self._process.wait()


# -------------------------------------------------------------------------------------- commands


def start(
    namespace: str = NAMESPACE,
    *,
    devices: str = "all",
    flags: Sequence[str] = (),
    cpus: float = 1.0,
    timeout: float = START_SECONDS,
) -> list[str]:
    """Start a server on each node of the cluster that has a GPU and no server of the namespace.

    Args:
        namespace: Ray's, of the actors.
        devices: ``all`` GPUs of a node, which are reserved; or ``cpu`` or ``cpu:N``, for servers on
            all nodes.
        flags: further flags of ``warpfit serve``. Without ``--tls-cert`` the servers speak plain
            text, as Ray does: keep others off the cluster's network.
        cpus: Ray's logical CPUs that each server reserves.
        timeout: seconds that the servers may take together to start.

    Returns:
        The addresses of all servers of the namespace.

    Raises:
        InvalidArgumentError: if Ray or the server is not installed, or no node has a GPU.
        UnavailableError: if there is no Ray cluster, or a server does not start.
        DeadlineExceededError: if they do not start in time; they stay, and may do so later.
    """
    flags = list_of_texts(flags, "flags")
    ray, end = _connected(), time.monotonic() + timeout
    _check(namespace)
    require_server()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    on_cpu = re.fullmatch(r"cpu(:\d+)?", devices) is not None
    if not on_cpu and devices != "all":
        raise InvalidArgumentError(
            f"devices cannot be {devices!r} on a Ray cluster",
            "BAD_DEVICES",
            "Give all, whose GPUs Ray reserves, cpu or cpu:N",
            "devices",
        )
    nodes = {n["NodeID"]: n["Resources"].get("GPU", 0.0) for n in ray.nodes() if n["Alive"]}
    wanted = {node: 0.0 if on_cpu else gpus for node, gpus in nodes.items() if gpus or on_cpu}
    if not wanted:
        raise InvalidArgumentError(
            "no node of the Ray cluster has a GPU",
            "NO_GPU_NODES",
            "Give devices='cpu' (`--devices cpu`) for servers on all nodes",
        )
    used = {node for _, node in _described(namespace)}
    insecure = () if "--tls-cert" in " ".join(flags) else ("--insecure",)
    for node, gpus in wanted.items():
        if node not in used:
            # If the node is lost for ever, Ray restarts the actor elsewhere.
            ray.remote(_ServerActor).options(
                name=_PREFIX + node,
                namespace=namespace,
                get_if_exists=True,  # started by somebody else at the same time
                lifetime="detached",
                num_cpus=cpus,
                num_gpus=gpus,
                max_restarts=-1,
                max_concurrency=2,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True),
            ).remote(["--devices", devices, *insecure, *flags])
    for actor in _actors(namespace):
        _wait_for(actor, end)
    return addresses(namespace)


def addresses(namespace: str = NAMESPACE) -> list[str]:
    """Return the addresses of the servers of a namespace that there are now; errors as `start`."""
    return sorted(address for address, _ in _described(namespace))


def restart(namespace: str = NAMESPACE, timeout: float = START_SECONDS) -> None:
    """Restart the servers one after the other, each once it has finished its calls.

    Clients have found one that is back when the next one stops, which is why it takes its time.

    Raises:
        DeadlineExceededError: if one is not back within ``timeout`` seconds.
    """
    ray = _connected()
    for number, actor in enumerate(list(_actors(namespace))):
        if number:
            time.sleep(_SETTLE_SECONDS)
        _stop(ray, actor, no_restart=False)
        _wait_for(actor, time.monotonic() + timeout)


def down(namespace: str = NAMESPACE) -> None:
    """Stop all servers of a namespace, once they have finished their calls."""
    ray = _connected()
    threads = [
        threading.Thread(target=_stop, args=(ray, actor), kwargs={"no_restart": True})
        for actor in _actors(namespace)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def ray_target(address: str) -> Target:
    """Return the target of ``ray://NAMESPACE``: the servers that `start` has started there."""
    namespace = address.removeprefix("ray://")
    _check(namespace)
    _ray()
    return Target(lambda: addresses(namespace), text=address)


# ---------------------------------------------------------------------------------------- actors


def _actors(namespace: str) -> Iterator[Any]:
    ray = _connected()
    for entry in ray.util.list_named_actors(all_namespaces=True):
        if entry["namespace"] == namespace and entry["name"].startswith(_PREFIX):
            try:
                yield ray.get_actor(entry["name"], namespace)
            except ValueError:  # it has just ended
                continue


def _described(namespace: str) -> Iterator[tuple[str, str]]:
    """Ask all actors at once; those that are being restarted do not count."""
    ray = _connected()
    asked = [actor.describe.remote() for actor in _actors(namespace)]
    if not asked:
        return
    ready, others = ray.wait(asked, num_returns=len(asked), timeout=_PATIENCE_SECONDS)
    if not ready:
        ready, _ = ray.wait(others, timeout=_ASK_SECONDS)
    for answer in ready:
        try:
            yield ray.get(answer)
        except ray.exceptions.RayError:
            continue


def _wait_for(actor: Any, end: float) -> None:
    ray = _connected()
    while time.monotonic() < end:
        try:
            ray.get(actor.describe.remote(), timeout=_ASK_SECONDS)
            return
        except (ray.exceptions.ActorUnavailableError, ray.exceptions.GetTimeoutError):
            time.sleep(0.1)
        except ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[-1]  # below the traceback of the actor
            raise UnavailableError(
                f"a server did not start: {reason}", "SERVER_NOT_STARTED", "See `ray logs`"
            ) from error
    raise DeadlineExceededError(
        "a server was not ready in time",
        "TIMEOUT",
        "See `ray status` for what it waits for, and `ray logs`",
    )


def _stop(ray: Any, actor: Any, *, no_restart: bool) -> None:
    with suppress(ray.exceptions.RayError):  # it is gone or does not end: then it is killed
        ray.get(actor.stop.remote(), timeout=_STOP_SECONDS)
    ray.kill(actor, no_restart=no_restart)


def _check(namespace: str) -> None:
    if not _NAMESPACE.fullmatch(namespace):
        raise InvalidArgumentError(
            f"{namespace!r} is no namespace for servers",
            "BAD_ADDRESS",
            "Give letters, digits and . _ -, as in ray://science; RAY_ADDRESS says where Ray is",
            "address",
        )


def _ray() -> Any:
    require("ray", "warpfit[ray]")
    import ray

    return ray


def _connected() -> Any:
    """Return Ray, connected to the cluster that runs here or that RAY_ADDRESS names."""
    ray = _ray()
    if not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False, configure_logging=False)
        except ConnectionError as error:
            raise UnavailableError(
                f"there is no Ray cluster: {error}",
                "NO_RAY_CLUSTER",
                "Start one (ray start --head), or name it by RAY_ADDRESS",
            ) from error
    return ray
