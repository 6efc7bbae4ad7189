"""What one small call costs the client's thread and the server's decoder, in CPU time.

``python tests/bench/call_cost.py`` writes results/call_cost.json: 300 programs of the thesis mix
with their parameters, losses as the answer, which another process on loopback gives without
computing anything. The floor is the same call by gRPC alone: the same bytes, nothing encoded or
decoded. Thread time is compared, because the clock depends on who else uses the machine.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from grpc.experimental import ChannelOptions

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import warpfit
from support.results import write_result
from warpfit import codec
from warpfit.arguments import build_evaluation
from warpfit.data import Answer, Data
from warpfit.dataset import Dataset
from warpfit.info import Limits
from warpfit.recent import RecentTokens
from warpfit.request import Evaluation, Timings
from warpfit.v1 import evaluator_pb2 as pb
from warpfit.workload import thesis_mix
from warpfit_server.limits import check_batch

SEED = 20261121
BATCHES = 40
ROUNDS = 15
OPTIONS = {"loss": "mse", "precision": "fast"}
METHOD = "/warpfit.v1.Evaluator/Evaluate"


def microseconds(action: Callable[[int], object], calls: int = BATCHES) -> float:
    """Thread time of one call, median of rounds of ``calls``."""
    rounds = []
    for _ in range(ROUNDS):
        started = time.thread_time_ns()
        for turn in range(calls):
            action(turn)
        rounds.append((time.thread_time_ns() - started) / calls / 1e3)
    return statistics.median(rounds)


def answer_bytes(data: Data) -> bytes:
    """An answer with 300 losses, in one message."""
    timings = Timings(decode=1_000_000, queue=10_000, compute=130_000, copy_out=10_000)
    losses = np.random.default_rng(SEED).uniform(size=(300, 1))
    return codec.result_start(data.layout, (300, 1, 100_000)) + codec.result_end(losses, timings)


def fresh_costs(data: Data, batches: list[Any], answer: bytes) -> dict[str, float]:
    """Stages of one call: programs that were never sent, and the same with new parameters."""
    built: dict[int, Evaluation] = {}
    recent = RecentTokens()

    def build(turn: int) -> None:
        programs, parameters = batches[turn]
        built[turn] = build_evaluation(data, programs, parameters, None, OPTIONS, recent)[0]

    def rebuild(turn: int) -> None:
        build_evaluation(data, batches[0][0], batches[0][1], None, OPTIONS, recent)

    def encode(turn: int) -> None:
        codec.evaluation_to_message(built[turn]).SerializeToString()

    def decode(turn: int) -> None:
        assembler = codec.ResultAssembler(built[turn])
        assembler.add(codec.answer_from_bytes(answer))
        Answer.of(assembler.result(), built[turn].batch, leading_axis=False)

    return {
        "build_fresh": microseconds(build),
        "build_repeated": microseconds(rebuild),
        "encode": microseconds(encode),
        "decode_answer": microseconds(decode),
    }


def server_costs(data: Data, messages: list[bytes]) -> dict[str, float]:
    """Stages of the server's decoder."""
    requests = [codec.parse_message(pb.EvaluateRequest, message) for message in messages]
    evaluations = [codec.evaluation_from_message(request) for request in requests]
    limits = Limits()

    def whole(turn: int) -> None:
        request = codec.parse_message(pb.EvaluateRequest, messages[turn])
        evaluation = codec.evaluation_from_message(request)
        check_batch(evaluation.batch, limits)
        evaluation.check(data.layout)

    return {
        "parse": microseconds(lambda turn: codec.parse_message(pb.EvaluateRequest, messages[turn])),
        "unpack": microseconds(lambda turn: codec.evaluation_from_message(requests[turn])),
        "limits": microseconds(lambda turn: check_batch(evaluations[turn].batch, limits)),
        "check": microseconds(lambda turn: evaluations[turn].check(data.layout)),
        "all": microseconds(whole),
    }


def call_costs(data: Data, batches: list[Any], messages: list[bytes]) -> dict[str, float]:
    """Whole calls of the blocking client, and gRPC's own."""
    with unary_server() as address:
        with warpfit.connect(address) as client:

            def fresh(turn: int) -> None:
                programs, parameters = batches[turn]
                client.run(data, programs, parameters, **OPTIONS)

            def repeated(turn: int) -> None:
                client.run(data, batches[0][0], batches[0][1], **OPTIONS)

            calls = {"fresh": microseconds(fresh), "repeated": microseconds(repeated)}
        reading = [(ChannelOptions.SingleThreadedUnaryStream, 1)]
        with grpc.insecure_channel(address, reading) as channel:
            method = channel.unary_stream(METHOD)

            def bare(turn: int) -> None:
                for _ in method(messages[turn]):
                    pass

            return {**calls, "grpc_alone": microseconds(bare)}


@contextmanager
def unary_server() -> Iterator[str]:
    """Another process that answers every Evaluate with the same bytes."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__)), "serve"],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield f"127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        process.communicate(timeout=30)


def serve() -> None:
    """Be that process until standard input ends."""
    answer = answer_bytes(Data(data_set()))
    server = grpc.server(ThreadPoolExecutor(2))
    handler = grpc.unary_stream_rpc_method_handler(lambda _request, _context: iter((answer,)))
    _, service, method = METHOD.split("/")
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()
    sys.stdin.read()
    server.stop(None)


def data_set() -> Dataset:
    """A data set of the right shape; only its layout matters."""
    return Dataset.of(np.ones((100_000, 10), dtype=np.float32), np.ones(100_000))


def main() -> None:
    data = Data(data_set())
    data.content_id  # noqa: B018 (hashed once, before anything is measured)
    batches = [thesis_mix(SEED + turn) for turn in range(BATCHES)]
    messages = [
        codec.evaluation_to_message(
            build_evaluation(data, *batch, None, OPTIONS, RecentTokens())[0]
        ).SerializeToString()
        for batch in batches
    ]
    content = {
        "seed": SEED,
        "request_bytes": statistics.mean(map(len, messages)),
        "client_us": {
            **call_costs(data, batches, messages),
            **fresh_costs(data, batches, answer_bytes(data)),
        },
        "server_us": server_costs(data, messages),
    }
    if sys.argv[1:] == ["print"]:
        print(json.dumps(content, indent=2))
    else:
        print(write_result("call_cost", content).read_text())


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["serve"] else main()
