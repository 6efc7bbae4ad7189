"""Measure the cost of a call around the engine: CPU time of client and decoder, latency, start-up.

Calls ask for the losses of 300 programs of the random mix with their parameters, in ``--rounds``.

* call_cost.json: processor time of the process, gRPC's threads included, because the clock depends
  on who else uses the machine; the answers come from another process on loopback that computes
  nothing. ``grpc_alone`` is a call of its own by gRPC alone: the same bytes, nothing encoded or
  decoded; ``open_call_alone`` is the same in a call that stays open.
* service.json: with a real server, what passes beyond the engine's own time, and its start-up.
* conversion.json: processor time of the client for an expression of DEAP, and for a text. Every
  round has new objects, as every generation of genetic programming has.
"""

import functools
import gc
import itertools
import operator
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import grpc
import harness
import numpy as np
from harness import SEED, arguments, connected, medians_in_turn, percentiles, save

import warpfit
from support.load.faults import free_port
from support.load.processes import beside
from support.random_programs import thesis_mix
from warpfit import codec
from warpfit.calls.arguments import build_evaluation
from warpfit.calls.dataset_handle import DatasetHandle
from warpfit.dataset import Dataset
from warpfit.frontends import as_program
from warpfit.request import Evaluation, Timings
from warpfit.server_info import Limits
from warpfit.testing import InProcessServer
from warpfit.transport.call import Request
from warpfit.v1 import evaluator_pb2 as pb
from warpfit_server.engine.lowering import are_valid
from warpfit_server.limits import check_batch

BATCHES = 40
#: Trees that are converted in a round, and nodes of each, or one more.
TREES, NODES = 1000, 20
OPTIONS = {"loss": "mse", "precision": "fast"}
METHOD = "/warpfit.v1.Evaluator/Evaluate"


def microseconds(rounds: int, actions: dict[str, Callable[[int], object]]) -> dict[str, float]:
    """Processor time of one call of each action, median of rounds in which they take turns."""
    cases = {name: lambda a=action: [*map(a, range(BATCHES))] for name, action in actions.items()}
    medians = medians_in_turn(cases, rounds=rounds, clock=time.process_time)
    return {name: round(1e6 * median / BATCHES, 1) for name, median in medians.items()}


def server_costs(rounds: int, data: DatasetHandle, messages: list[bytes]) -> dict[str, float]:
    """Return the time of a front end's decoder, ``decode``, and of the check of the tokens."""
    limits, variables = Limits(), data.layout.variables

    def decode(turn: int) -> Evaluation:
        request = codec.parse_message(pb.EvaluateRequest, messages[turn])
        evaluation = codec.evaluation_from_message(request)
        check_batch(evaluation.batch, limits)
        evaluation.check_options(data.layout)
        evaluation.batch.check_shapes()
        return evaluation

    batches = [decode(turn).batch for turn in range(BATCHES)]
    checks = {"tokens_compiled": lambda turn: are_valid(batches[turn], variables)}
    return microseconds(rounds, {"decode": decode, **checks})


def call_costs(rounds: int, data: Any, batches: list[Any], messages: list[bytes]) -> Any:
    """Whole calls of the blocking client, and gRPC's own."""
    port = free_port()
    address = f"127.0.0.1:{port}"
    with beside(serve_answer, port), grpc.insecure_channel(address) as channel:
        grpc.channel_ready_future(channel).result(60)
        client = warpfit.connect(address)
        method, asked = channel.unary_unary(METHOD), SimpleQueue[bytes | None]()
        answers = channel.stream_stream(METHOD)(iter(asked.get, None))

        def ask(turn: int) -> None:
            asked.put(messages[turn])
            next(answers)

        actions: dict[str, Callable[[int], object]] = {
            "fresh": lambda turn: client.run(data, *batches[turn], **OPTIONS),
            "repeated": lambda turn: client.run(data, *batches[0], **OPTIONS),
            "grpc_alone": lambda turn: method(messages[turn]),
            "open_call_alone": ask,
        }
        found = microseconds(rounds, actions)
        asked.put(None)
        return found


def serve_answer(port: int, stop: Any) -> None:
    """Process: answer every request with the same bytes; calls may go on."""
    timings = Timings(decode=1_000_000, queue=10_000, compute=130_000, copy_out=10_000)
    losses = {"losses": np.random.default_rng(SEED).uniform(size=(300, 1))}
    start = codec.result_start(data_set().layout, (300, 1, 100_000))
    answer = start + codec.result_end(timings, losses)
    handler = grpc.stream_stream_rpc_method_handler(lambda asked, _: (answer for _ in asked))
    (info,) = InProcessServer().answer(Request("GetServerInfo", None, list))
    greeting = grpc.unary_unary_rpc_method_handler(lambda *_: info.SerializeToString())
    _, service, method = METHOD.split("/")
    handlers = {method: handler, "GetServerInfo": greeting}
    server = grpc.server(ThreadPoolExecutor(8))  # some for calls that stay open
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    stop.wait()
    server.stop(None)


def data_set() -> Dataset:
    """A data set of the right shape; only its layout matters."""
    return Dataset.of(np.ones((100_000, 10), dtype=np.float32), np.ones(100_000))


def overhead(rounds: int) -> dict[str, float]:
    """Milliseconds beyond the engine's own time: 300 fresh expressions, 1,000 rows, loss only."""
    X = np.random.default_rng(SEED).uniform(0.5, 2, size=(1000, 10)).astype(np.float32)
    extra = []
    with connected() as (_, client):
        data = client.upload(X, X[:, 0])
        for programs, parameters in [thesis_mix(SEED + turn) for turn in range(rounds)]:
            started = time.perf_counter_ns()
            answer = client.run(data, programs, parameters, loss="mse")
            extra.append((time.perf_counter_ns() - started - answer.timings.compute) / 1e9)
    return {f"overhead_{name}": value for name, value in percentiles(extra).items()}


def deap_trees() -> list[Any]:
    """Trees of DEAP's usual primitives and ephemeral constants."""
    from deap import gp

    pset = gp.PrimitiveSet("MAIN", 5)
    for function, arity in (
        *((operator.add, 2), (operator.sub, 2), (operator.mul, 2), (operator.neg, 1)),
        *((np.sin, 1), (np.exp, 1), (np.maximum, 2)),
    ):
        pset.addPrimitive(function, arity, name=function.__name__)
    pset.addEphemeralConstant("number", functools.partial(random.uniform, -1, 1))
    drawn = (gp.PrimitiveTree(gp.genGrow(pset, 3, 7)) for _ in itertools.count())
    sized = (tree for tree in drawn if NODES <= len(tree) <= NODES + 1)
    return list(itertools.islice(sized, TREES))


def conversion(rounds: int) -> dict[str, Any]:
    """Median microseconds in which the client makes an expression a part of a batch."""
    handle, times = DatasetHandle(Dataset.of(np.ones((2, 5)), np.ones(2))), {"deap": [], "text": []}
    for seed in range(rounds + 1):
        for kind, series in times.items():
            random.seed(SEED + seed)
            given = deap_trees()
            given = given if kind == "deap" else [str(as_program(tree)) for tree in given]
            gc.collect()
            build = functools.partial(build_evaluation, handle, given, None, None, {})
            series += harness.seconds_of(build, 1, clock=time.process_time)
    medians = {kind: statistics.median(series[1:]) for kind, series in times.items()}
    return {kind: {"this": round(median / TREES * 1e6, 2)} for kind, median in medians.items()}


def main() -> None:
    options = arguments(__doc__, "", rounds=25)
    rounds = options.rounds
    data = DatasetHandle(data_set())
    data.content_id  # noqa: B018 (hashed once, before anything is measured)
    batches = [thesis_mix(SEED + turn) for turn in range(BATCHES)]
    messages = [
        codec.evaluation_to_bytes(build_evaluation(data, *batch, None, OPTIONS)[0])
        for batch in batches
    ]
    content = {
        "seed": SEED,
        "request_bytes": round(statistics.mean(map(len, messages))),
        "client_us": call_costs(rounds, data, batches, messages),
        "server_us": server_costs(rounds, data, messages),
    }
    save("call_cost", content, options.folder)
    content = {"trees": TREES, "nodes": [NODES, NODES + 1], "rounds": rounds}
    content["median_microseconds_an_expression"] = conversion(rounds)
    save("conversion", content, options.folder)
    content = {"seed": SEED, "evaluate_300_fresh_1000_rows_loss": overhead(8 * rounds)}
    # The server above has filled the compile cache, which the start-up time presumes.
    save("service", {**content, "start_up_seconds": harness.start_up_seconds()}, options.folder)
