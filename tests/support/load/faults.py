"""Faults of running servers and their network under load, and what clients see of them.

Small numbers make a test of a few seconds, large ones the table of `tests/bench/service/faults.py`.
"""

import itertools
import multiprocessing
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil

import warpfit
from support.load.load import Load, OwnConnection
from support.servers import health
from support.servers.network import Proxy, Spoil
from support.servers.rpcs import OWN_CONNECTION, SERVICE
from support.servers.server import ServerProcess, eventually, private_bytes
from warpfit import codec
from warpfit.dataset import Dataset
from warpfit.errors import DeadlineExceededError

#: Faster than the defaults, so that a test does not wait.
EAGER = ("--hang-seconds", "3", "--health-port", "0", "--metrics-port", "0")
#: A constant that an engine with the fault ``harm`` dies of; the next number loses a connection.
FATAL = 666.0


def figures(load: Load) -> dict[str, Any]:
    """What the clients of a scenario have seen."""
    seen = {"right_answers": load.right, "wrong_answers": load.wrong}
    seen |= {"failures_after_retry": len(load.failures)}
    seen |= {"first_failures": load.failures[:3]} if load.failures else {}
    return seen | {"longest_call_seconds": round(load.longest_call, 3)}


def engine_sigkill(kills: int, clients: int = 8, front_ends: int = 1) -> dict[str, Any]:
    """Kill the engine again and again; how long no client has an answer."""
    with ServerProcess("--front-ends", str(front_ends)) as server:
        with Load(server.address, clients) as load:
            gaps = load.gaps_after(server.kill_engine, kills)
        return {"kills": kills, **figures(load), **spread("seconds_without_answers", gaps)}


def engine_sigstop(stops: int, clients: int = 4) -> dict[str, Any]:
    """Stop the engine; when readiness turns false, and when it is true again."""
    unready, replaced = [], []
    with ServerProcess(*EAGER) as server:
        port = server.facts["health"]
        with Load(server.address, clients) as load:
            for _ in range(stops):
                load.wait_for_answers(3)
                health.wait_for(port, "SERVING")
                engine = server.engine()
                engine.send_signal(signal.SIGSTOP)
                stopped = last_ready = time.monotonic()
                is_ready = True
                while engine.is_running():
                    assert time.monotonic() < stopped + 20, "the engine is not replaced"
                    status = health.check(port)
                    assert health.check(port, "liveness") == "SERVING"
                    if engine.is_running():  # the status is one of the stopped engine
                        is_ready = status == "SERVING"
                        last_ready = time.monotonic() if is_ready else last_ready
                assert not is_ready, "the server was ready until its engine was replaced"
                health.wait_for(port, "SERVING")
                unready.append(last_ready - stopped)
                replaced.append(time.monotonic() - stopped)
                load.wait_for_answers(1)
        seen = {"stops": stops, "settings": " ".join(EAGER[:8]), **figures(load)}
        seen |= spread("seconds_until_unready", unready)
        return seen | spread("seconds_until_replaced", replaced)


def endless_work(kind: str) -> dict[str, Any]:
    """Give the engine work that does not stop: ``deaf`` to its cancellation, or ``frozen``."""
    with tempfile.TemporaryDirectory() as directory:
        switch = Path(directory) / "endless"
        switch.touch()
        flags, environment = ("--threads", "1", "--front-ends", "1"), injected(f"{kind}={switch}")
        server = ServerProcess(*EAGER, *flags, **environment)
        patient = warpfit.RetryPolicy(total_seconds=120)  # also if the machine is busy
        with server, warpfit.connect(server.address, retry=patient) as client:
            old = server.engine()
            data = client.upload(np.ones((10, 2)))
            started = time.monotonic()
            try:
                client.evaluate(data, ["x1"] * 20, timeout=0.5)
            except DeadlineExceededError:
                given_up = time.monotonic() - started
            old.wait(20)
            replaced = time.monotonic() - started
            switch.unlink()
            client.evaluate(data, ["x1"] * 20, timeout=120)
            answered = time.monotonic() - started
    moments = {"client_gave_up": given_up, "engine_gone": replaced, "answered_again": answered}
    return {"kind": kind, **{f"{x}_after_seconds": round(moments[x], 3) for x in moments}}


def supervisor_sigkill(kills: int, clients: int = 4) -> dict[str, Any]:
    """Kill the server, start another one on the port: the clients upload by themselves."""
    with Fleet(1, "--front-ends", "1") as fleet, Load(fleet.address, clients) as load:

        def fault() -> None:
            fleet.kill(0)
            fleet.replace(0)

        gaps = load.gaps_after(fault, kills)
    return {"kills": kills, **figures(load), **spread("seconds_without_answers", gaps)}


def sigterm(stops: int, clients: int = 8, front_ends: int = 1) -> dict[str, Any]:
    """Stop the server in an orderly way under load, start another: no call fails."""
    flags = f"--front-ends {front_ends} --health-port 0 --notice 0.3".split()
    seconds, unready_first = [], True
    with Fleet(1, *flags) as fleet, Load(fleet.address, clients) as load:
        for _ in range(stops):
            load.wait_for_answers(3)
            (server,) = fleet.servers
            health.wait_for(server.facts["health"], "SERVING")
            started = time.monotonic()
            server.process.terminate()
            health.wait_for(server.facts["health"], "NOT_SERVING")
            before = load.right
            time.sleep(0.1)
            unready_first &= load.right > before  # not ready, and still answering
            assert server.stop() == 0
            seconds.append(time.monotonic() - started)
            fleet.replace(0)
            load.wait_for_answers(3)
    seen = {"stops": stops, "answers_while_unready": unready_first, **figures(load)}
    return seen | spread("seconds_to_stop", seconds)


def bad_network(rounds: int) -> dict[str, Any]:
    """Slow, cut and dribbling connections beside a client that has a good one."""
    with ServerProcess("--metrics-port", "0") as server, Load(server.address, 2) as load:
        load.wait_for_answers(20)
        baseline = _connections(server)
        outcomes = {
            "one_byte_a_write": _dribble(server.address),
            "slow": [_slow(server.address) for _ in range(rounds)],
            "cut_answers": [_cut(server.address, 2_000 * (n + 1)) for n in range(rounds)],
            "cut_uploads": [_cut_upload(server.address, n) for n in range(rounds)],
        }
        load.wait_for_answers(20)
        eventually(lambda: _connections(server) <= baseline, 10)
    return {**outcomes, "others": figures(load), "connections_left_over": 0}


def injected(fault: str) -> dict[str, str]:
    """Environment of a server with a planted fault; see `support/load/inject`."""
    folder = str(Path(__file__).parent / "inject")
    path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "TEST_WARPFIT_FAULT": fault}


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _connections(server: ServerProcess) -> int:
    """Open connections of the main process, on any port."""
    connections = server.family()["main"].net_connections("tcp")
    return sum(connection.status == psutil.CONN_ESTABLISHED for connection in connections)


@contextmanager
def _through(address: str, **spoiled: Spoil) -> Iterator[tuple[Proxy, warpfit.Client]]:
    """Connect a client to a server over a bad network."""
    proxy = Proxy(address, **spoiled)
    with proxy, warpfit.connect(proxy.address, transport=OwnConnection()) as client:
        yield proxy, client


def _dribble(address: str) -> float:
    """A call whose bytes arrive one by one in both directions is answered."""
    X, one = np.arange(6.0).reshape(3, 2), Spoil(piece=1)
    with _through(address, up=one, down=one) as (_, client):
        started = time.monotonic()
        got = client.evaluate(client.upload(X), ["x1 + x2"], timeout=30)
        np.testing.assert_array_equal(got[:, 0], X.sum(axis=1))
        return round(time.monotonic() - started, 3)


def _slow(address: str) -> float:
    """An answer that would take minutes ends at the caller's deadline."""
    X = np.ones((100_000, 2))
    with warpfit.connect(address) as direct:
        data = direct.upload(X)
    with _through(address, down=Spoil(piece=4096, pause=0.05)) as (_, client):
        started = time.monotonic()
        try:
            client.evaluate(data, ["x1"] * 20, timeout=1.0)
        except DeadlineExceededError:
            return round(time.monotonic() - started, 3)
    raise AssertionError("a slow network was not noticed")


def _cut(address: str, after: int) -> bool:
    """An answer that is cut off comes whole at the next attempt."""
    X = np.random.default_rng(after).normal(size=(5_000, 2))
    with warpfit.connect(address) as direct:
        data = direct.upload(X, dtype="float64")
    with _through(address, down=Spoil(cut_after=after)) as (proxy, client):
        threading.Timer(0.3, lambda: setattr(proxy, "down", Spoil())).start()
        got = client.evaluate(data, ["x1 - x2"], timeout=20)
        return bool(np.array_equal(got[:, 0], X[:, 0] - X[:, 1])) and proxy.connections > 1


def _cut_upload(address: str, number: int) -> bool:
    """An upload that is cut off is sent again."""
    X = np.random.default_rng(1000 + number).normal(size=(100_000, 2))
    with _through(address, up=Spoil(cut_after=300_000 + 100_000 * number)) as (proxy, client):
        threading.Timer(0.3, lambda: setattr(proxy, "up", Spoil())).start()
        data = client.upload(X, dtype="float64")
        got = client.evaluate(data, ["x1"], rows=slice(0, 5), timeout=20)
        client.release(data, everywhere=True)
        return bool(np.array_equal(got[:, 0], X[:5, 0])) and proxy.connections > 1


def spread(name: str, seconds: list[float]) -> dict[str, float]:
    """Median and maximum of some times."""
    ordered = sorted(seconds)
    median = ordered[len(ordered) // 2]
    return {f"{name}_median": round(median, 3), f"{name}_max": round(ordered[-1], 3)}


# ---------------------------------------------------------------------------------- several servers
class Fleet:
    """Servers, by default with one thread each, which keep their ports when they are replaced."""

    def __init__(self, count: int = 3, *flags: str) -> None:
        own = flags or ("--threads", "1")
        self._flags = [(*own, "--port", str(free_port())) for _ in range(count)]
        self.servers = [ServerProcess(*flags) for flags in self._flags]
        self.address = ",".join(server.address for server in self.servers)
        self.size = count

    def __enter__(self):
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
    cluster: Any, counted: str, times: int, fault: Any, repair: Any = lambda index: None
):
    """Provoke a fault of one server after the other under load, and repair it; return the gaps."""
    gaps, clients = [], 6
    with Load(cluster.address, clients) as load:
        for index in (number % cluster.size for number in range(times)):
            load.wait_for_answers(10)
            began = time.monotonic()
            fault(index)
            load.wait_for_answers(10)
            gaps.append(max(load.gaps(began, time.monotonic())))
            repair(index)
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


# ------------------------------------------------------- clients that are killed while they upload

#: What must be as it was, and how much larger private memory may be: the allocator keeps some.
_COUNTS, GROWTH_BYTES = ("shared_bytes", "descriptors"), 8 << 20


def killed_uploads(kills: int, *, together: int = 50) -> dict[str, Any]:
    """SIGKILL clients that upload, some ``together``; what the server held before and after."""
    flags = ("--front-ends", "1", "--threads", "1")
    with ServerProcess(*flags) as server, warpfit.connect(server.address) as client:
        client.evaluate(client.upload(np.ones((10, 2))), ["x1"])
        start = held(server)
        for _ in range(max(1, kills // together // 2)):  # until allocators keep what they will keep
            _kill(server, together)
        before = _settled(server, start)
        seen = [_kill(server, together) for _ in range(kills // together)]
        after = _settled(server, before)
        works = client.evaluate(client.upload(np.ones((20, 2))), ["x1 + x2"])
    least = min(one["shared_bytes"] for one in seen)
    found = {
        "killed": together * len(seen),
        "processes": len(seen),
        "before": before,
        "after": after,
    }
    found["least_shared_bytes_when_they_were_killed"] = least
    return found | {"answers_afterwards": bool((works == 2).all())}


def is_clean(seen: dict[str, Any]) -> bool:
    """Tell whether everything went back to where it was, and whether there was something to go."""
    before, after = seen["before"], seen["after"]
    grown = after["private_bytes"] - before["private_bytes"]
    is_back = all(after[name] <= before[name] for name in _COUNTS) and grown < GROWTH_BYTES
    had_some = seen["least_shared_bytes_when_they_were_killed"] > before["shared_bytes"]
    return is_back and had_some and seen["answers_afterwards"]


def held(server: ServerProcess) -> dict[str, int]:
    """Shared memory, descriptors and private memory of the main process and the front ends."""
    private = sum(private_bytes(one.pid) for one in server.front_ends())
    counts = server.shared_memory(), server.descriptors()
    return {**dict(zip(_COUNTS, counts, strict=True)), "private_bytes": private}


def _settled(server: ServerProcess, before: dict[str, int]) -> dict[str, int]:
    """Memory and descriptors of the server once they are no more than before, or after a time."""
    deadline = time.monotonic() + 20
    now = held(server)
    while any(now[x] > before[x] for x in _COUNTS) and time.monotonic() < deadline:
        time.sleep(0.1)
        now = held(server)
    return now


def _kill(server: ServerProcess, count: int) -> dict[str, int]:
    """Let a process upload as so many clients, kill it; what the server held at that moment."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_upload, args=(server.address, count, theirs))
    process.start()
    ours.recv()
    seen = held(server)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    return seen


def _upload(address: str, count: int, under_way: Any) -> None:
    """Process: begin uploads, say that all of them are under way, and wait to be killed."""
    begun = threading.Semaphore(0)
    calls = []
    for number in range(count):
        channel = grpc.insecure_channel(address, OWN_CONNECTION)
        method = channel.stream_unary(SERVICE + "UploadVariables")
        table = np.full((50_000, 4), number, np.float32)
        calls.append(method.future(_half_of_an_upload(Dataset.of(table), begun)))
    assert all(begun.acquire(timeout=60) for _ in range(count))
    time.sleep(0.3)  # until what was sent has arrived
    assert not any(call.done() for call in calls)
    under_way.send(None)
    signal.pause()


def _half_of_an_upload(ones: Dataset, begun: threading.Semaphore) -> Iterator[bytes]:
    """Send a half, say that all of it was taken, and wait; nobody checks the id before the end."""
    dataset = Dataset.resident(ones.layout, ones.matrix, os.urandom(32))
    yield from itertools.islice(codec.upload_messages(dataset, dataset.layout.nbytes // 4), 3)
    begun.release()  # it is asked for more
    threading.Event().wait()
