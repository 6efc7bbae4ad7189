"""What moving matrices costs: the network on loopback against shared memory, and their bounds.

``python tests/bench/transport.py`` starts a server on loopback and writes results/transport.json.
A value matrix of 120 MB (with an engine that computes nothing, then with the CPU engine, which
takes the same processors) and an upload of 400 MB cross both ways in turn, in one run. Beside them
stand the bounds of the machine in the same run: copying memory, writing it to a memory file,
SHA-256, and a gRPC stream of the same messages between two processes that do nothing else. The best
round says what the machine can do, the median what other programs on it have left.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import warpfit  # before gRPC, whose poller it chooses

# isort: split
import grpc
import numpy as np
import psutil

from support.bare import NO_LIMIT, bare_server, serve
from support.faults import injected
from support.results import write_result
from support.server import ServerProcess
from warpfit.core import Deadline
from warpfit.dataset import Dataset
from warpfit.progress import silent

SEED = 20261121
ROUNDS = 9
ROWS, PROGRAMS = 100_000, 300
UPLOAD_ROWS, UPLOAD_VARIABLES = 1_000_000, 100
#: Size of the messages of a stream, as the client's and the server's.
PIECE = 1 << 20


def seconds_of(action: Callable[[], object], rounds: int = ROUNDS) -> list[float]:
    """Wall time of each round."""
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return times


def rates(size: int, seconds: list[float]) -> dict[str, float]:
    """GB/s of the median and of the best round."""
    median, best = statistics.median(seconds), min(seconds)
    return {"gb_s": size / median / 1e9, "best_gb_s": size / best / 1e9}


# ------------------------------------------------------------------------------------- bounds


def memory_bounds(size: int) -> dict[str, Any]:
    """Copying memory that is in use already, writing it to a memory file, and hashing it."""
    source = np.random.default_rng(SEED).bytes(size)
    target = np.zeros(size, np.uint8)
    view = np.frombuffer(source, np.uint8)
    file = os.memfd_create("bench")

    def write(descriptor: int = file) -> None:
        for start in range(0, size, PIECE):
            os.pwrite(descriptor, memoryview(source)[start : start + PIECE], start)

    def write_fresh() -> None:
        fresh = os.memfd_create("bench")
        write(fresh)
        os.close(fresh)

    write()
    found = {
        "memory_copy": rates(size, seconds_of(lambda: np.copyto(target, view))),
        "memory_file_write": rates(size, seconds_of(write)),
        "memory_file_write_fresh": rates(size, seconds_of(write_fresh)),
        "sha256": rates(size, seconds_of(lambda: hashlib.sha256(source).digest(), 3)),
    }
    os.close(file)
    return found


def pieces(size: int) -> list[bytes]:
    """Messages of a stream, all of them different memory, as those of a matrix are."""
    payload = np.random.default_rng(SEED).bytes(size)
    return [payload[start : start + PIECE] for start in range(0, size, PIECE)]


def stream_bounds(answer: int, upload: int) -> dict[str, Any]:
    """A gRPC stream each way that carries bytes and does nothing with them."""
    messages = pieces(upload)
    with (
        bare_server(__file__, str(answer)) as address,
        grpc.insecure_channel(address, NO_LIMIT) as channel,
    ):
        send = channel.stream_unary("/bench/Send")
        fetch = channel.unary_stream("/bench/Fetch")

        def take() -> None:
            for _ in fetch(b""):
                continue

        take()
        return {
            "bare_stream_answer": rates(answer, seconds_of(take)),
            "bare_stream_upload": rates(upload, seconds_of(lambda: send(iter(messages)), 5)),
        }


def serve_bare(answer: int) -> None:
    """Be that process until standard input ends."""
    messages = pieces(answer)

    def send(messages: Iterator[bytes], _: object) -> bytes:
        return str(sum(map(len, messages))).encode()

    def fetch(_: bytes, __: object) -> Iterator[bytes]:
        return iter(messages)

    methods = {
        "Send": grpc.stream_unary_rpc_method_handler(send),
        "Fetch": grpc.unary_stream_rpc_method_handler(fetch),
    }
    serve("bench", methods, NO_LIMIT)


# ------------------------------------------------------------------------------------- warpfit


@contextmanager
def clients_of(**environment: str) -> Iterator[tuple[dict[str, warpfit.Client], psutil.Process]]:
    """Clients of a server with one door, by transport, and the door's process."""
    flags = ("--front-doors", "1", "--local-socket", "auto")
    with (
        ServerProcess(*flags, **environment) as server,
        warpfit.connect(server.address) as network,
        warpfit.connect(server.address, shared_memory=True) as memory,
    ):
        yield {"network": network, "shared_memory": memory}, server.family()["front door"]


def answers(
    clients: dict[str, warpfit.Client], door: psutil.Process, *, idle: bool
) -> dict[str, Any]:
    """The same value matrix by each client in turn; it must have the same bits.

    Args:
        clients: by transport.
        door: the server's front door.
        idle: whether the engine computes nothing, so that moving is all that there is to do.

    """
    X = np.random.default_rng(SEED).normal(size=(ROWS, 10)).astype(np.float32)
    expressions = [warpfit.parse(f"x{n % 10 + 1}") for n in range(PROGRAMS)]
    data = next(iter(clients.values())).upload(X)
    seconds: dict[str, list[float]] = {name: [] for name in clients}
    work: dict[str, list[float]] = {name: [] for name in clients}
    engine = []
    expected = np.tile(X, PROGRAMS // 10)
    for turn in range(ROUNDS + 1):
        for name, client in clients.items():
            cpu, started = cpu_seconds(door), time.perf_counter()
            answer = client.run(data, expressions)
            if turn:  # the first makes windows and segments
                seconds[name].append(time.perf_counter() - started)
                work[name].append(cpu_seconds(door) - cpu)
                engine.append(answer.timings.compute / 1e9)
            elif not (idle or np.array_equal(answer.values, expected)):
                raise SystemExit(f"wrong values over {name}")
            del answer
    size = expected.nbytes
    return {
        "bytes": size,
        **({} if idle else {"engine_seconds": statistics.median(engine)}),
        **{name: described(size, seconds[name], work[name]) for name in clients},
    }


def uploads(clients: dict[str, warpfit.Client], door: psutil.Process) -> dict[str, Any]:
    """Fresh content by each client in turn: making it ready (transposed, hashed), and sending."""
    X = np.random.default_rng(SEED).normal(size=(UPLOAD_ROWS, UPLOAD_VARIABLES)).astype(np.float32)
    ready: list[float] = []
    seconds: dict[str, list[float]] = {name: [] for name in clients}
    work: dict[str, list[float]] = {name: [] for name in clients}
    for turn in range(5):
        for number, (name, client) in enumerate(clients.items()):
            X[0, 0] = 10 * turn + number
            started = time.perf_counter()
            dataset = Dataset.of(X)
            ready.append(time.perf_counter() - started)
            cpu, started = cpu_seconds(door), time.perf_counter()
            client._drive(client._operations._send(dataset, Deadline(None), silent))
            seconds[name].append(time.perf_counter() - started)
            work[name].append(cpu_seconds(door) - cpu)
            client.release(warpfit.data.Data(dataset))
    size = X.nbytes
    found: dict[str, Any] = {"bytes": size, "ready": rates(size, ready)}
    for name in clients:
        found[name] = described(size, seconds[name], work[name])
        for figure, choose in (("gb_s", statistics.median), ("best_gb_s", min)):
            total = choose(ready) + choose(seconds[name])
            found[name][f"with_ready_{figure}"] = size / total / 1e9
    return found


def described(size: int, seconds: list[float], work: list[float]) -> dict[str, float]:
    """Rates, and processor time of client and front door for each GB."""
    return {**rates(size, seconds), "cpu_seconds_a_gb": statistics.median(work) / size * 1e9}


def cpu_seconds(door: psutil.Process) -> float:
    """Processor time of this process and the server's front door."""
    times = door.cpu_times()
    return time.process_time() + times.user + times.system


def main() -> None:
    bounds = memory_bounds(ROWS * PROGRAMS * 4)
    bounds |= stream_bounds(ROWS * PROGRAMS * 4, UPLOAD_ROWS * UPLOAD_VARIABLES * 4)
    with clients_of(**injected("idle=1")) as (clients, door):
        moved = answers(clients, door, idle=True)
    with clients_of() as (clients, door):
        found = {
            "answer": moved,
            "answer_with_cpu_engine": answers(clients, door, idle=False),
            "upload": uploads(clients, door),
        }
    for part in found.values():
        for figure in ("gb_s", "best_gb_s"):
            speed_up = part["shared_memory"][figure] / part["network"][figure]
            part[f"speed_up_{figure}"] = speed_up
    print(write_result("transport", {"seed": SEED, "bounds": bounds, **found}).read_text())


if __name__ == "__main__":
    serve_bare(int(sys.argv[1])) if sys.argv[1:] else main()
