"""How the server treats too much work: ten times overload, and a greedy tenant beside a modest one.

``python tests/bench/guard.py`` starts servers on loopback and writes results/guard.json. Load comes
from processes of their own; on a machine with few cores they take some of the engine's time, which
is part of every figure. All ratios compare figures of one run.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import warpfit
from support.results import write_result
from support.server import ServerProcess
from warpfit import codec
from warpfit.arguments import build_evaluation
from warpfit.security import new_token
from warpfit.v1 import evaluator_pb2 as pb
from warpfit.workload import thesis_mix

SEED = 20261121
VARIABLES = 10
#: Calls a second that each tenant may make: doors, engine and generator share two cores.
RATE = 200
#: The generator's threads take turns of this many seconds: its own Python is not what is measured.
TURN_SECONDS = 0.0005
#: Times that what is compared is measured in turn, so that a neighbour's work is in all of it.
ROUNDS = 4
#: Pause of the client that watches how long refusals take.
WATCH_SECONDS = 0.02
EVALUATE = "/warpfit.v1.Evaluator/Evaluate"
_CONTEXT = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Job:
    """Calls that are all alike."""

    programs: int
    rows: int


#: About 40 ms of two cores; small messages, so that sending them costs little.
OVERLOAD = Job(programs=200, rows=100_000)
VICTIM = Job(programs=100, rows=50_000)
GREEDY = {
    "the same batches": (16, VICTIM),
    "batches ten times larger": (8, Job(programs=1000, rows=50_000)),
    "very small batches": (16, Job(programs=1, rows=1000)),
}


def prepared(client: warpfit.Client, job: Job) -> bytes:
    """Upload the job's data; return its serialized request."""
    rng = np.random.default_rng(SEED)
    X = rng.uniform(0.5, 2, size=(job.rows, VARIABLES)).astype(np.float32)
    data = client.upload(X, X[:, 0])
    programs, parameters = thesis_mix(SEED, job.programs)
    evaluation, _ = build_evaluation(data, programs, parameters, None, {"loss": "mse"})
    return codec.evaluation_to_message(evaluation).SerializeToString()


class Caller:
    """Sends one request again and again over a connection of its own."""

    def __init__(self, address: str, token: str, request: bytes) -> None:
        self._channel = grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
        self._method = self._channel.unary_stream(EVALUATE)
        self._metadata = (("authorization", f"Bearer {token}"),)
        self._request = request
        grpc.channel_ready_future(self._channel).result(30)  # connecting is not measured

    def call(self) -> tuple[str, float, float]:
        """Call once; return the status, the seconds it took, and those to wait before the next."""
        started = time.perf_counter()
        try:
            for _ in self._method(self._request, timeout=60, metadata=self._metadata):
                continue
        except grpc.RpcError as error:
            return error.code().name, time.perf_counter() - started, _retry_after(error)
        return "OK", time.perf_counter() - started, 0.0


def _retry_after(error: Any) -> float:
    for key, value in error.trailing_metadata() or ():
        if key == codec.ERROR_METADATA_KEY:
            return pb.ErrorDetail.FromString(value).retry_after_ms / 1000
    return 0.0


def closed_loop(caller: Caller, seconds: float) -> list[tuple[str, float]]:
    """Call again as soon as there is an answer, or as soon as a refusal allows it."""
    outcomes = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        status, took, wait = caller.call()
        outcomes.append((status, took))
        time.sleep(min(wait, max(0.0, end - time.perf_counter())))
    return outcomes


def open_loop(
    callers: list[Caller], rate: float, seconds: float, stop: Callable[[], bool]
) -> list[tuple[str, float]]:
    """Call at a fixed rate whatever the answers are; refusals are not repeated."""
    outcomes: list[tuple[str, float]] = []
    started = time.perf_counter()
    turns = iter(range(int(rate * seconds)))
    lock = threading.Lock()

    def work(caller: Caller) -> None:
        while True:
            with lock:
                turn = next(turns, None)
            if turn is None or stop():
                return
            time.sleep(max(0.0, started + turn / rate - time.perf_counter()))
            outcomes.append(caller.call()[:2])

    threads = [threading.Thread(target=work, args=(caller,)) for caller in callers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def _flood(address: str, token: str, request: bytes, count: int, go: Any, stop: Any) -> None:
    """Process: closed loops of ``count`` threads while they may, until told to stop."""

    def work() -> None:
        caller = Caller(address, token, request)
        while not stop.is_set():
            if go.wait(0.2):
                time.sleep(caller.call()[2])

    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextmanager
def flood(address: str, token: str, request: bytes, count: int) -> Iterator[Any]:
    """A process that sends as much as it can while the event is set that this yields."""
    go, stop = _CONTEXT.Event(), _CONTEXT.Event()
    process = _CONTEXT.Process(target=_flood, args=(address, token, request, count, go, stop))
    process.start()
    time.sleep(3)
    try:
        yield go
    finally:
        stop.set()
        process.join(90)


def milliseconds(seconds: list[float]) -> dict[str, float]:
    return {
        "calls": len(seconds),
        **{
            f"p{quantile}_ms": round(1e3 * float(np.percentile(seconds, quantile)), 2)
            for quantile in (50, 90, 99)
        },
        "max_ms": round(1e3 * max(seconds, default=0.0), 2),
    }


def greedy(address: str, tokens: dict[str, str], seconds: float) -> dict[str, Any]:
    """A victim's latencies alone and beside each kind of greedy tenant."""
    with warpfit.connect(address, token=tokens["victim"]) as client:
        caller = Caller(address, tokens["victim"], prepared(client, VICTIM))
    closed_loop(caller, 2)
    result: dict[str, Any] = {}
    for name, (threads, job) in GREEDY.items():
        with warpfit.connect(address, token=tokens["greedy"]) as client:
            request = prepared(client, job)
        alone, beside = [], []
        with flood(address, tokens["greedy"], request, threads) as go:
            for _ in range(ROUNDS):
                go.clear()
                time.sleep(1)  # what it has begun ends
                alone += closed_loop(caller, seconds / ROUNDS)
                go.set()
                time.sleep(0.5)
                beside += closed_loop(caller, 2 * seconds / ROUNDS)
        assert all(status == "OK" for status, _ in beside)
        p99 = [float(np.percentile(x, 99)) for x in (_times(alone), _times(beside))]
        result[f"{threads} greedy clients, {name}"] = {
            "alone": milliseconds(_times(alone)),
            "beside": milliseconds(_times(beside)),
            "p99_ratio": round(p99[1] / p99[0], 2),
        }
    return result


def _times(outcomes: list[tuple[str, float]]) -> list[float]:
    return [took for _, took in outcomes]


def throughput(callers: list[Caller], seconds: float) -> float:
    """Answered calls a second of closed loops."""
    outcomes: list[tuple[str, float]] = []
    threads = [
        threading.Thread(target=lambda c=caller: outcomes.extend(closed_loop(c, seconds)))
        for caller in callers
    ]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(status == "OK" for status, _ in outcomes) / (time.perf_counter() - started)


def _watch(address: str, token: str, request: bytes, go: Any, stop: Any, seen: Any) -> None:
    """Process: one client that does nothing else calls now and then, and times the refusals."""
    caller = Caller(address, token, request)
    refused = []
    while not stop.wait(WATCH_SECONDS):
        if not go.wait(0.2):
            continue
        status, took, _ = caller.call()
        if status == "RESOURCE_EXHAUSTED":
            refused.append(took)
    seen.put(refused)


@contextmanager
def watched(address: str, token: str, request: bytes) -> Iterator[tuple[Any, list[float]]]:
    """A client of its own, while the event is set; the list has what it saw of refusals then."""
    go, stop, seen = _CONTEXT.Event(), _CONTEXT.Event(), _CONTEXT.Queue()
    process = _CONTEXT.Process(target=_watch, args=(address, token, request, go, stop, seen))
    process.start()
    time.sleep(3)
    took: list[float] = []
    try:
        yield go, took
    finally:
        stop.set()
        took += seen.get(timeout=90)
        process.join(90)


def overload(address: str, token: str, seconds: float) -> dict[str, Any]:
    """Peak of closed loops, and ten times that rate from callers that take no advice, in turn."""
    with warpfit.connect(address, token=token) as client:
        request = prepared(client, OVERLOAD)
    callers = [Caller(address, token, request) for _ in range(64)]
    best = max((2, 4, 8), key=lambda clients: throughput(callers[:clients], seconds / 3))
    peaks, outcomes, wall, generator = [], [], 0.0, 0.0
    with watched(address, token, request) as (go, seen):
        for _ in range(ROUNDS):
            peaks.append(throughput(callers[:best], seconds / 2))
            started, before = time.perf_counter(), time.process_time()
            rate = 10 * float(np.mean(peaks))
            go.set()
            outcomes += open_loop(callers, rate, seconds / 2, lambda: False)
            go.clear()
            wall += time.perf_counter() - started
            generator += time.process_time() - before
    peak = float(np.mean(peaks))
    answered = [took for status, took in outcomes if status == "OK"]
    refused = [took for status, took in outcomes if status == "RESOURCE_EXHAUSTED"]
    goodput = len(answered) / wall
    return {
        "rounds": ROUNDS,
        "peak_calls_per_second": round(peak, 1),
        "offered_calls_per_second": round(len(outcomes) / wall, 1),
        "goodput_calls_per_second": round(goodput, 1),
        "goodput_of_peak": round(goodput / peak, 3),
        "refused": milliseconds(refused),
        "refused_as_one_client_saw_it": milliseconds(seen),
        "answered": milliseconds(answered),
        "other": len(outcomes) - len(answered) - len(refused),
        "cores_that_the_generator_took": round(generator / wall, 2),
    }


def noise(seconds: float = 3.0) -> dict[str, float]:
    """By how much this machine, with whatever else it does, oversleeps a millisecond."""
    late = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.perf_counter()
        time.sleep(1e-3)
        late.append(time.perf_counter() - started - 1e-3)
    return milliseconds(late)


@contextmanager
def server(*flags: str) -> Iterator[tuple[str, dict[str, str]]]:
    made = {name: new_token(name) for name in ("victim", "greedy")}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "tokens"
        path.write_text("\n".join(line for _, line in made.values()))
        limits = path.with_name("tenants.toml")
        limits.write_text(f"[default]\nrate = {RATE}\n")
        files = ("--token-file", str(path), "--tenants-file", str(limits))
        with ServerProcess(*files, *flags) as process:
            yield process.address, {name: token for name, (token, _) in made.items()}


def main(seconds: float = 15.0) -> None:
    sys.setswitchinterval(TURN_SECONDS)
    busy = round(os.getloadavg()[0], 1)  # other programs of the machine slow everything down
    quiet = noise()
    with server() as (address, tokens):
        fairness = greedy(address, tokens, seconds)
    with server("--max-requests", "16") as (address, tokens):
        too_much = overload(address, tokens["victim"], seconds)
    content = {
        "seed": SEED,
        "calls_a_second_of_each_tenant": RATE,
        "load_average_before": busy,
        "oversleeping_before": quiet,
        "oversleeping_afterwards": noise(),
        "greedy_tenant": fairness,
        "ten_times_overload": too_much,
    }
    print(write_result("guard", content).read_text())


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
