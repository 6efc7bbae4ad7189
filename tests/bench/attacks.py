"""How long an innocent tenant's small calls take while others attack the server.

Starts servers on loopback, on two cores if there are more; ``--only H1`` runs the attacks whose
names begin so. Each attack comes from a process of its own and lasts some seconds. Just before it
the innocent tenant is measured alone, so that other work on the machine meets both. Its answers are
checked bit by bit. Another process asks the server's port and the health port whether it is ready.
"""

import contextlib
import itertools
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np
import psutil
from harness import SEED, ServerProcess, arguments, save

import warpfit
from support.load.callers import on_cores
from support.load.processes import beside, in_threads
from support.random_programs import thesis_mix
from support.servers.health import check
from support.servers.network import FLOODS, RawConnection
from support.servers.rpcs import OWN_CONNECTION, SERVICE, bearer, request, start
from support.servers.server import token_file
from warpfit import codec
from warpfit.calls.arguments import build_fit
from warpfit.dataset import Dataset
from warpfit.v1 import evaluator_pb2 as pb

TENANTS: Final = ("innocent", "greedy", "second")
#: Of the innocent tenant: programs and rows of a call, and the pause between two calls.
PROGRAMS, ROWS, PACE = 100, 2000, 0.02
#: As many names of a data set as a server allows.
NAMES: Final = [f"n{k}" for k in range(65_536)]
MANY_ROWS: Final = 30_000_000


@dataclass(frozen=True)
class Scene:
    """What an attacker knows of a server."""

    address: str
    health: str
    tokens: dict[str, str]

    def client(self, tenant: str = "greedy") -> warpfit.Client:
        """A client that repeats nothing."""
        retry = warpfit.RetryPolicy(total_seconds=0)
        return warpfit.connect(self.address, token=self.tokens[tenant], retry=retry)

    def upload(self, rows: int, variables: int = 1, tenant: str = "greedy") -> Any:
        """Upload a table whose first variable is the target."""
        X = np.random.default_rng(SEED).random((rows, variables), dtype="f4")
        with self.client(tenant) as client:
            return client.upload(X, X[:, 0])


#: Attacks until the event is set.
Attack = Callable[[Scene, Any], None]


def connections(count: int, send: Callable[[RawConnection], object]) -> Attack:
    """Connections without credentials that send something without a pause."""

    def attack(scene: Scene, stop: Any) -> None:
        def work(_: int) -> None:
            while not stop.is_set():
                with contextlib.suppress(OSError), RawConnection(scene.address) as connection:
                    while not stop.is_set() and connection.is_open:
                        send(connection)

        with in_threads(work, range(count)):
            pass

    return attack


def bad_headers(connection: RawConnection) -> None:
    connection.begin_with_headers(SERVICE + "GetServerInfo", "x", b"\xff\xfe", 150)
    time.sleep(0.01)


def repeated(threads: int, make: Callable[[Scene], Callable[[Any], object]]) -> Attack:
    """Calls of the greedy tenant, one after the other on each of some connections."""
    options = [*OWN_CONNECTION, ("grpc.max_receive_message_length", -1)]

    def attack(scene: Scene, stop: Any) -> None:
        call = make(scene)

        def work(_: int) -> None:
            with grpc.insecure_channel(scene.address, options) as channel:
                while not stop.is_set():
                    try:
                        call(channel)
                    except (grpc.RpcError, warpfit.WarpfitError):
                        time.sleep(0.01)

        with in_threads(work, range(threads)):
            pass

    return attack


def calls(message: bytes, scene: Scene, method: str = "Evaluate") -> Callable[[Any], object]:
    """Send a message, and read the answer."""
    metadata = bearer(scene.tokens["greedy"])
    return lambda channel: list(start(channel, message, method, metadata=metadata))


def evaluations(threads: int, shape: tuple[int, int], texts: list[str], **options: Any) -> Attack:
    """Evaluations of programs on a table of some rows and variables."""
    return repeated(
        threads, lambda scene: calls(request(scene.upload(*shape), texts, **options), scene)
    )


def fits(shape: tuple[int, int], text: str = "p1*x1", count: int = 1, **options: Any) -> Attack:
    """Fits of one program, so many times in a call."""

    def make(scene: Scene) -> Callable[[Any], object]:
        start = [1.0] * warpfit.parse(text).parameters
        fit = build_fit(scene.upload(*shape), [text] * count, [start] * count, options)
        return calls(codec.fit_to_message(fit).SerializeToString(), scene, "Optimize")

    return repeated(2, make)


def many_names(scene: Scene) -> Callable[[Any], object]:
    """Descriptions of a data set with 65,536 names."""
    with scene.client() as client:
        data = client.upload(np.zeros((1, len(NAMES)), "f4"), names=NAMES)
    message = pb.GetVariablesRequest(content_id=data.content_id).SerializeToString()
    given = {"metadata": bearer(scene.tokens["greedy"]), "timeout": 60}
    return lambda channel: channel.unary_unary(SERVICE + "GetVariables")(message, **given)


def headers_only(scene: Scene) -> Callable[[Any], object]:
    """Uploads of a header with 65,536 names and nothing else."""
    data = Dataset.of(np.zeros((1, len(NAMES)), "f4"), names=NAMES)
    header = [next(iter(codec.upload_messages(data, 1 << 20)))]
    given = {"metadata": bearer(scene.tokens["greedy"]), "timeout": 60}
    method = SERVICE + "UploadVariables"
    return lambda channel: channel.stream_unary(method)(iter(header), **given)


def changing_rows(scene: Scene) -> Callable[[Any], object]:
    """Scores over row ranges that change from call to call."""
    data, numbers = scene.upload(MANY_ROWS), itertools.count(1)
    scores = {"loss": "r2", "linear_scaling": True, "correlation": True}

    def call(channel: Any) -> None:
        number = next(numbers)
        message = request(data, ["x1"], rows=(number, MANY_ROWS - number), **scores)
        calls(message, scene)(channel)

    return call


def silent_streams(scene: Scene, stop: Any) -> None:
    """Two tenants with 64 calls each that never send their message."""
    while not stop.is_set():
        with ExitStack() as stack:
            for tenant in ("greedy", "second"):
                token = scene.tokens[tenant]
                connection = stack.enter_context(RawConnection(scene.address, token))
                for _ in range(64):
                    connection.begin(SERVICE + "Evaluate")
            stop.wait(5)


def unread_answers(scene: Scene, stop: Any) -> None:
    """Two tenants with 64 calls each whose answers nobody reads."""
    with ExitStack() as stack:
        for tenant in ("greedy", "second"):
            message = request(scene.upload(20_000, 2, tenant), ["x1"] * 20, values=True)
            raw = RawConnection(scene.address, scene.tokens[tenant], reads=False)
            connection = stack.enter_context(raw)
            for _ in range(64):
                stream = connection.begin(SERVICE + "Evaluate")
                connection.send(stream, b"\0" + len(message).to_bytes(4) + message, 5)
                connection.finish(stream)
        stop.wait(60)


def idle_connections(scene: Scene, stop: Any) -> None:
    """300 connections to the health port that say nothing more after they have begun."""
    while not stop.is_set():
        with ExitStack() as stack:
            for _ in range(300):
                with contextlib.suppress(OSError):
                    stack.enter_context(RawConnection(scene.health))
            stop.wait(20)


def refused_calls(scene: Scene, stop: Any) -> None:
    """60 threads that repeat their calls 20 ms after each refusal."""
    client, data = scene.client(), scene.upload(200_000)

    def work(_: int) -> None:
        while not stop.is_set():
            try:
                client.evaluate(data, ["sin(x1)"] * 50, loss="mse", timeout=20)
            except warpfit.WarpfitError:
                time.sleep(0.02)

    with in_threads(work, range(60)):
        pass


#: Sums of as many tokens as a server allows, and of 500 parameters.
LONGEST: Final = "+".join(f"x{1 + k % 2}" for k in range(9_999 // 2))
WIDEST_FIT: Final = "+".join(f"p{k}*x{1 + k % 2}" for k in range(1, 501))
#: A loss of 251 tokens.
LONG_LOSS: Final = warpfit.LossFunction.parse("abs(d)" + "+abs(d)" * 49)
SLOPES: Final = {"loss": "mse", "variable_gradient": True}
ATTACKS: Final[dict[str, Attack]] = {
    **{f"H1 {kind} frames": connections(2, methodcaller("flood", kind)) for kind in FLOODS},
    "H2 headers that are no UTF-8": connections(1, bad_headers),
    # 160 MB from a request of 43 kB.
    "H4 gradients by 20,000 variables": evaluations(2, (10, 20_000), ["x1"] * 1000, **SLOPES),
    "H4 fits of 500 parameters": fits((1000, 2), WIDEST_FIT, 100, max_iterations=20),
    "H5 GetVariables of 65,536 names": repeated(4, many_names),
    "H5 uploads of headers": repeated(4, headers_only),
    "H6 silent calls": silent_streams,
    "H6 unread answers": unread_answers,
    # Of up to 64 MB, whose memory the server keeps.
    "H7 large answers": evaluations(6, (100_000, 1), ["x1"] * 160, values=True),
    "H8 programs of 10,000 tokens": evaluations(2, (1000, 2), [LONGEST] * 4, **SLOPES),
    "H13 idle connections of the health port": idle_connections,
    "A1 calls that are refused": refused_calls,
    "A2 long losses over 1,000,000 rows": evaluations(
        2, (1_000_000, 1), ["x1"] * 200, loss=LONG_LOSS
    ),
    "A3 fits on 20,000 variables": fits((1024, 20_000), max_iterations=1),
    "A4 fits of 30,000,000 rows": fits((MANY_ROWS, 1), max_iterations=1, missing="drop"),
    "A5 row ranges that change": repeated(2, changing_rows),
}


def _attack(name: str, scene: Scene, stop: Any) -> None:
    """Process: attack until told to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def end() -> None:
        stop.wait(90)
        time.sleep(5)  # for what ends by itself
        os._exit(0)

    threading.Thread(target=end, daemon=True).start()
    ATTACKS[name](scene, stop)
    os._exit(0)  # whatever its threads still wait for


def _watch(scene: Scene, stop: Any) -> dict[str, Any]:
    """Process: ask whether the server is ready; tell how often it said what, and the slowest."""
    seen: dict[str, Any] = {}
    while not stop.wait(0.1):
        for port, address in (("port", scene.address), ("health port", scene.health)):
            asked = time.perf_counter()
            status = check(address, timeout=5.0)
            taken = round(1e3 * (time.perf_counter() - asked), 1)
            own = seen.setdefault(port, {"longest_ms": 0.0})
            own |= {status: own.get(status, 0) + 1, "longest_ms": max(own["longest_ms"], taken)}
    return seen


class Innocent:
    """A tenant with small calls whose answers are known."""

    def __init__(self, scene: Scene) -> None:
        X = np.random.default_rng(SEED).uniform(0.5, 2, size=(ROWS, 10)).astype("f4")
        self.client = warpfit.connect(scene.address, token=scene.tokens["innocent"])
        self.data = self.client.upload(X, X[:, 0])
        self.batch = thesis_mix(SEED, PROGRAMS)
        self.expected = self._call()

    def _call(self) -> Any:
        return self.client.evaluate(self.data, *self.batch, loss="mse", timeout=30)

    def measure(self, seconds: float) -> dict[str, Any]:
        """Call for some seconds; return milliseconds, and failed and wrong calls."""
        times, failed, wrong = [], 0, 0
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            began = time.perf_counter()
            try:
                answer = self._call()
                wrong += answer.tobytes() != self.expected.tobytes()
            except warpfit.WarpfitError:
                failed += 1
            times.append(1e3 * (time.perf_counter() - began))
            time.sleep(PACE)
        p50, p99 = np.percentile(times, (50, 99)).round(2).tolist()
        found = {"p50_ms": p50, "p99_ms": p99, "max_ms": round(max(times), 1)}
        return {"calls": len(times), "failed": failed, "wrong": wrong, **found}


def memory(server: ServerProcess) -> int:
    """MiB that all processes of a server have, each one's share of what they share."""
    total = 0
    for process in server.family().values():
        with contextlib.suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total >> 20


def attacked(name: str, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as held:
        path, tokens = token_file(Path(folder), *TENANTS)
        log = Path(folder) / "log"
        flags = ("--token-file", path, "--health-port", "0")
        server = held.enter_context(ServerProcess(*flags, log=log))
        scene = Scene(server.address, server.facts["health"], tokens)
        innocent = Innocent(scene)
        innocent.measure(1)
        alone = innocent.measure(seconds / 2)
        most, written, done = [memory(server)], log.stat().st_size, threading.Event()

        def weigh(_: int) -> None:
            while not done.wait(0.5):
                most.append(memory(server))

        with beside(_watch, scene) as health, beside(_attack, name, scene):
            time.sleep(4)  # it has begun, also one that uploads much
            with in_threads(weigh, [0]):
                under = innocent.measure(seconds)
                done.set()
        time.sleep(1)
        return {
            "alone": alone,
            "under_attack": under,
            "ratio_p50": round(under["p50_ms"] / alone["p50_ms"], 2),
            "ratio_p99": round(under["p99_ms"] / alone["p99_ms"], 2),
            "afterwards": innocent.measure(1),
            "health": health[0],
            "MiB_before_most_after": [most[0], max(most), memory(server)],
            "log_bytes": log.stat().st_size - written,
        }


def main() -> None:
    options = arguments(__doc__, "attacks", seconds=8.0, only="")
    found: dict[str, Any] = {}
    with on_cores(set(sorted(os.sched_getaffinity(0))[:2])):
        for name in ATTACKS:
            if options.only in ("", name.split()[0]):
                found[name] = attacked(name, options.seconds)
                print(name, found[name], flush=True)
    load = round(os.getloadavg()[0], 1)
    save(options.name, {"seed": SEED, "load_average": load, "attacks": found}, options.folder)
