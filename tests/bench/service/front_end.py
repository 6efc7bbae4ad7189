"""Measure the processor time of a front end for each call, beside a plain gRPC stream.

``run.py service/front_end`` writes results/front_end.json. Six callers, each with a client of its
own, ask for the losses of 300 programs that never come again: a server with one front end, and a
gRPC server that decodes the same requests with the same codec and answers with fixed bytes. Both
take turns, and only the front end's own process is counted.
"""

from __future__ import annotations

import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import warpfit  # before gRPC, whose poller it chooses

# isort: split
import grpc
import numpy as np
import psutil
from harness import SEED, ServerProcess, save

from support.random_programs import thesis_mix
from support.servers.bare_grpc import NO_LIMIT, bare_server, serve
from warpfit import codec
from warpfit.dataset import Dataset
from warpfit.ir import Batch
from warpfit.ops import CONSTANT
from warpfit.request import Timings
from warpfit.server_info import Limits
from warpfit.v1 import evaluator_pb2 as pb
from warpfit_server.limits import check_batch

CALLERS, PROGRAMS, ROWS = 6, 300, 100
ROUNDS, SECONDS = 5, 2.0
BATCHES = 12


RNG = np.random.default_rng(SEED)
#: So few rows that the engine has little to do.
X, Y = RNG.uniform(0.5, 2, (ROWS, 10)), RNG.normal(size=ROWS)


def serve_decoded() -> None:
    """Decode and check every request, and answer with fixed bytes, until standard input ends."""
    data, limits, losses = Dataset.of(X, Y), Limits(), np.zeros((PROGRAMS, 1))
    answer = codec.result_start(data.layout, (PROGRAMS, 1, ROWS))
    answer += codec.result_end(Timings(compute=100_000), {"losses": losses})

    def evaluate(messages: Any, context: Any) -> Any:
        for message in messages:
            request = codec.parse_message(pb.EvaluateRequest, message)
            evaluation = codec.evaluation_from_message(request)
            check_batch(evaluation.batch, limits)
            evaluation.check_options(data.layout)
            evaluation.batch.check_shapes()
            yield answer

    def find(message: bytes, context: Any) -> bytes:
        return codec.dataset_info(data.content_id, data.layout)

    methods = {
        "Evaluate": grpc.stream_stream_rpc_method_handler(evaluate),
        "GetVariables": grpc.unary_unary_rpc_method_handler(find),
    }
    serve("warpfit.v1.Evaluator", methods, NO_LIMIT)


class Load:
    """Callers of one address, and the process whose time counts."""

    def __init__(
        self, address: str, process: psutil.Process, batches: list[Batch], stack: ExitStack
    ) -> None:
        self._process = process
        self._batches = batches
        self._pool = stack.enter_context(ThreadPoolExecutor(CALLERS))
        self._clients = [stack.enter_context(warpfit.connect(address)) for _ in range(CALLERS)]
        self._data = [client.upload(X, Y) for client in self._clients]

    def milliseconds(self) -> tuple[float, float]:
        """Call for some seconds; return the process's time for each call, and calls a second."""
        until, before = time.monotonic() + SECONDS, sum(self._process.cpu_times()[:2])
        calls = sum(self._pool.map(lambda caller: self._call(caller, until), range(CALLERS)))
        spent = sum(self._process.cpu_times()[:2]) - before
        return 1e3 * spent / calls, calls / SECONDS

    def _call(self, caller: int, until: float) -> int:
        """Send batches until a moment, each with another constant, so that none comes again."""
        client, data, calls = self._clients[caller], self._data[caller], 0
        while time.monotonic() < until:
            batch = self._batches[(caller + CALLERS * calls) % BATCHES]
            calls += 1
            shift = 1e-9 * calls * (batch.codes == CONSTANT)
            client.evaluate(data, replace(batch, values=batch.values + shift), loss="mse")
        return calls


def main() -> None:
    with ExitStack() as stack:
        server = stack.enter_context(ServerProcess("--front-ends", "1"))
        plain = stack.enter_context(bare_server(__file__, "serve"))
        (child,) = (
            process
            for process in psutil.Process().children()
            if "serve" in process.cmdline()[-1] and process.pid != server.process.pid
        )
        batches = [Batch.of(*thesis_mix(SEED + turn)) for turn in range(BATCHES)]
        (own,) = server.front_ends()
        loads = {
            "front_end": Load(server.address, own, batches, stack),
            "plain_stream": Load(plain, child, batches, stack),
        }
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in loads}
        for turn in range(1 + ROUNDS):
            for name, load in loads.items():
                measured = load.milliseconds()
                if turn:  # the first one warms up
                    found[name].append(measured)
    times = {name: [ms for ms, _ in rounds] for name, rounds in found.items()}
    ratios = [a / b for a, b in zip(*times.values(), strict=True)]
    content: dict[str, Any] = {"seed": SEED, "callers": CALLERS, "programs": PROGRAMS}
    for name, rounds in found.items():
        rates = [rate for _, rate in rounds]
        content[name] = {
            "ms_a_call": round(statistics.median(times[name]), 3),
            "range_ms": [round(min(times[name]), 3), round(max(times[name]), 3)],
            "calls_a_second": round(statistics.median(rates)),
        }
    content["ratio"] = round(statistics.median(ratios), 2)
    content["ratio_range"] = [round(min(ratios), 2), round(max(ratios), 2)]
    save("front_end", content)


if __name__ == "__main__":
    serve_decoded() if sys.argv[1:] == ["serve"] else main()
