"""How long an innocent tenant's small calls take while others attack the server.

``python tests/bench/run.py attacks`` starts servers on loopback, on two cores if there are more,
and writes results/attacks.json; ``--only H1`` runs the attacks whose names begin so. Each attack
comes from a process of its own and lasts some seconds. Just before it the innocent tenant is
measured alone, so that other work on the machine meets both. Its answers are checked bit by bit.
Another process asks the server's port and the health port whether the server is ready.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np
import psutil
from harness import SEED, ServerProcess, save

import warpfit
from support.load.callers import on_cores
from support.load.processes import beside
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
#: Seconds between two questions whether the server is ready.
HEALTH_PACE: Final = 0.1
#: Names of a data set that has as many as a server allows.
MANY_NAMES: Final = 65_536
#: Programs of as many tokens as a server allows.
LONGEST: Final = 9_999


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

    def channel(self) -> grpc.Channel:
        """A connection of gRPC's own."""
        return grpc.insecure_channel(
            self.address, [*OWN_CONNECTION, ("grpc.max_receive_message_length", -1)]
        )


#: Attacks until the event is set.
Attack = Callable[[Scene, Any], None]


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run work in threads until all have ended."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def frames(kind: str) -> Attack:
    """Two connections without credentials that send frames without a pause."""

    def attack(scene: Scene, stop: Any) -> None:
        def work(_: int) -> None:
            while not stop.is_set():
                with contextlib.suppress(OSError), RawConnection(scene.address) as connection:
                    while not stop.is_set() and connection.is_open:
                        connection.flood(kind)

        in_threads(2, work)

    return attack


def bad_headers(scene: Scene, stop: Any) -> None:
    """Calls without credentials whose headers are no UTF-8."""
    while not stop.is_set():
        with contextlib.suppress(OSError), RawConnection(scene.address) as connection:
            while not stop.is_set() and connection.is_open:
                connection.begin_with_headers(SERVICE + "GetServerInfo", "x", b"\xff\xfe", 150)
                time.sleep(0.01)


def repeated(make: Callable[[Scene], Callable[[Any], object]], threads: int) -> Attack:
    """Calls of the greedy tenant, one after the other on each of some connections."""

    def attack(scene: Scene, stop: Any) -> None:
        call = make(scene)

        def work(_: int) -> None:
            with scene.channel() as channel:
                while not stop.is_set():
                    try:
                        call(channel)
                    except (grpc.RpcError, warpfit.WarpfitError):
                        time.sleep(0.01)

        in_threads(threads, work)

    return attack


def calls(message: bytes, scene: Scene, method: str = "Evaluate") -> Callable[[Any], object]:
    """Send a message, and read the answer."""
    metadata = bearer(scene.tokens["greedy"])
    return lambda channel: list(start(channel, message, method, metadata=metadata))


def uploaded(scene: Scene, rows: int, variables: int = 1, tenant: str = "greedy") -> Any:
    """Upload a table whose first variable is the target."""
    X = np.random.default_rng(SEED).random((rows, variables), dtype="f4")
    with scene.client(tenant) as client:
        return client.upload(X, X[:, 0])


def wide_gradients(scene: Scene) -> Callable[[Any], object]:
    """Gradients by 20,000 variables: 160 MB from a request of 43 kB."""
    data = uploaded(scene, 10, 20_000)
    return calls(request(data, ["x1"] * 1000, loss="mse", variable_gradient=True), scene)


def wide_fits(scene: Scene) -> Callable[[Any], object]:
    """Fits of 500 parameters."""
    data = uploaded(scene, 1000, 2)
    text = "+".join(f"p{k}*x{1 + k % 2}" for k in range(1, 501))
    fit = build_fit(data, [text] * 100, [[1.0] * 500] * 100, {"max_iterations": 20})
    return calls(codec.fit_to_message(fit).SerializeToString(), scene, "Optimize")


def long_programs(scene: Scene) -> Callable[[Any], object]:
    """Programs of 10,000 tokens with their gradients."""
    data = uploaded(scene, 1000, 2)
    program = warpfit.parse("+".join(f"x{1 + k % 2}" for k in range(LONGEST // 2)))
    return calls(request(data, [program] * 4, loss="mse", variable_gradient=True), scene)


def many_names(scene: Scene) -> Callable[[Any], object]:
    """Descriptions of a data set with 65,536 names."""
    names = [f"n{k}" for k in range(MANY_NAMES)]
    with scene.client() as client:
        data = client.upload(np.zeros((1, MANY_NAMES), "f4"), names=names)
    message = pb.GetVariablesRequest(content_id=data.content_id).SerializeToString()
    metadata = bearer(scene.tokens["greedy"])

    def call(channel: Any) -> None:
        channel.unary_unary(SERVICE + "GetVariables")(message, metadata=metadata, timeout=60)

    return call


def headers_only(scene: Scene) -> Callable[[Any], object]:
    """Uploads of a header with 65,536 names and nothing else."""
    names = [f"n{k}" for k in range(MANY_NAMES)]
    data = Dataset.of(np.zeros((1, MANY_NAMES), "f4"), names=names)
    header = next(iter(codec.upload_messages(data, 1 << 20)))
    metadata = bearer(scene.tokens["greedy"])

    def call(channel: Any) -> None:
        method = channel.stream_unary(SERVICE + "UploadVariables")
        method(iter([header]), metadata=metadata, timeout=60)

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
            data = uploaded(scene, 20_000, 2, tenant)
            message = request(data, ["x1"] * 20, values=True)
            token = scene.tokens[tenant]
            connection = stack.enter_context(RawConnection(scene.address, token, reads=False))
            framed = b"\0" + len(message).to_bytes(4) + message
            for _ in range(64):
                stream = connection.begin(SERVICE + "Evaluate")
                connection.send(stream, framed, 5)
                connection.finish(stream)
        stop.wait(60)


def idle_memory(scene: Scene) -> Callable[[Any], object]:
    """Answers of up to 64 MB, whose memory the server keeps."""
    return calls(request(uploaded(scene, 100_000), ["x1"] * 160, values=True), scene)


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
    client, data = scene.client(), uploaded(scene, 200_000)

    def work(_: int) -> None:
        while not stop.is_set():
            try:
                client.evaluate(data, ["sin(x1)"] * 50, loss="mse", timeout=20)
            except warpfit.WarpfitError:
                time.sleep(0.02)

    in_threads(60, work)


def long_losses(scene: Scene) -> Callable[[Any], object]:
    """200 programs of one token with a loss of 251 tokens, on 1,000,000 rows."""
    data = uploaded(scene, 1_000_000)
    loss = warpfit.LossFunction.parse("abs(d)" + "+abs(d)" * 49)
    return calls(request(data, ["x1"] * 200, loss=loss), scene)


def fits_of_many_variables(scene: Scene) -> Callable[[Any], object]:
    """Fits of one parameter on 20,000 variables and 1,024 rows."""
    return fits(scene, uploaded(scene, 1024, 20_000))


def fits_of_many_rows(scene: Scene) -> Callable[[Any], object]:
    """Fits that leave missing values out, on 30,000,000 rows."""
    return fits(scene, uploaded(scene, 30_000_000), missing="drop")


def fits(scene: Scene, data: Any, **options: Any) -> Callable[[Any], object]:
    """Fit one parameter in one iteration."""
    fit = build_fit(data, ["p1*x1"], [[1.0]], {"max_iterations": 1, **options})
    return calls(codec.fit_to_message(fit).SerializeToString(), scene, "Optimize")


def changing_rows(scene: Scene) -> Callable[[Any], object]:
    """Scores over row ranges that change from call to call."""
    data = uploaded(scene, 30_000_000)
    numbers, metadata = itertools.count(1), bearer(scene.tokens["greedy"])

    def call(channel: Any) -> None:
        number = next(numbers)
        rows = number, 30_000_000 - number
        message = request(data, ["x1"], loss="r2", linear_scaling=True, correlation=True, rows=rows)
        list(start(channel, message, "Evaluate", metadata=metadata))

    return call


ATTACKS: Final[dict[str, Attack]] = {
    **{f"H1 {kind} frames": frames(kind) for kind in FLOODS},
    "H2 headers that are no UTF-8": bad_headers,
    "H4 gradients by 20,000 variables": repeated(wide_gradients, 2),
    "H4 fits of 500 parameters": repeated(wide_fits, 2),
    "H5 GetVariables of 65,536 names": repeated(many_names, 4),
    "H5 uploads of headers": repeated(headers_only, 4),
    "H6 silent calls": silent_streams,
    "H6 unread answers": unread_answers,
    "H7 large answers": repeated(idle_memory, 6),
    "H8 programs of 10,000 tokens": repeated(long_programs, 2),
    "H13 idle connections of the health port": idle_connections,
    "A1 calls that are refused": refused_calls,
    "A2 long losses over 1,000,000 rows": repeated(long_losses, 2),
    "A3 fits on 20,000 variables": repeated(fits_of_many_variables, 2),
    "A4 fits of 30,000,000 rows": repeated(fits_of_many_rows, 2),
    "A5 row ranges that change": repeated(changing_rows, 2),
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
    while not stop.wait(HEALTH_PACE):
        for port, address in (("port", scene.address), ("health port", scene.health)):
            asked = time.perf_counter()
            status = check(address, timeout=5.0)
            of_port = seen.setdefault(port, {"longest_ms": 0.0})
            of_port[status] = of_port.get(status, 0) + 1
            taken = round(1e3 * (time.perf_counter() - asked), 1)
            of_port["longest_ms"] = max(of_port["longest_ms"], taken)
    return seen


class Innocent:
    """A tenant with small calls whose answers are known."""

    def __init__(self, scene: Scene) -> None:
        rng = np.random.default_rng(SEED)
        X = rng.uniform(0.5, 2, size=(ROWS, 10)).astype("f4")
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
        figures = {"p50_ms": p50, "p99_ms": p99, "max_ms": round(max(times), 1)}
        return {"calls": len(times), "failed": failed, "wrong": wrong, **figures}


def memory(server: ServerProcess) -> int:
    """MiB that all processes of a server have, each one's share of what they share."""
    total = 0
    for process in server.family().values():
        with contextlib.suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total >> 20


@contextmanager
def served(*flags: str) -> Iterator[tuple[ServerProcess, Scene, Path]]:
    """A server with tenants and a health port, and the file of its log."""
    with tempfile.TemporaryDirectory() as folder:
        path, tokens = token_file(Path(folder), *TENANTS)
        log = Path(folder) / "log"
        own = ("--token-file", path, "--health-port", "0")
        with ServerProcess(*own, *flags, log=log) as server:
            yield server, Scene(server.address, server.facts["health"], tokens), log


def attacked(name: str, seconds: float) -> dict[str, Any]:
    """Measure one attack on a fresh server."""
    with served() as (server, scene, log):
        innocent = Innocent(scene)
        innocent.measure(1)
        alone = innocent.measure(seconds / 2)
        before, written = memory(server), log.stat().st_size
        most = [before]
        done = threading.Event()

        def weigh() -> None:
            while not done.wait(0.5):
                most.append(memory(server))

        weighing = threading.Thread(target=weigh)
        with beside(_watch, scene) as health, beside(_attack, name, scene):
            time.sleep(4)  # it has begun, also one that uploads much
            weighing.start()
            under = innocent.measure(seconds)
            done.set()
            weighing.join()
        time.sleep(1)
        afterwards = innocent.measure(1)
        return {
            "alone": alone,
            "under_attack": under,
            "ratio_p50": round(under["p50_ms"] / alone["p50_ms"], 2),
            "ratio_p99": round(under["p99_ms"] / alone["p99_ms"], 2),
            "afterwards": afterwards,
            "health": health[0],
            "MiB_before_most_after": [before, max(most), memory(server)],
            "log_bytes": log.stat().st_size - written,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each attack")
    parser.add_argument("--only", default="", help="how the names of the attacks begin")
    parser.add_argument("--name", default="attacks", help="of the result")
    parser.add_argument("--folder", type=Path, help="of the result")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    with on_cores(set(sorted(os.sched_getaffinity(0))[:2])):
        for name in ATTACKS:
            if name.split()[0] == options.only or not options.only:
                found[name] = attacked(name, options.seconds)
                print(name, found[name], flush=True)
    load = round(os.getloadavg()[0], 1)
    save(options.name, {"seed": SEED, "load_average": load, "attacks": found}, options.folder)


if __name__ == "__main__":
    main()
