"""What the service costs around the engine: latency, throughput, start-up.

``python tests/bench/service.py`` starts servers on loopback and writes results/service.json.
Bulk transfers are compared with one unary gRPC call that carries the same bytes in one protobuf
message, in the same run, because absolute figures depend on the machine.
"""

from __future__ import annotations

import statistics
import sys
import time

import grpc
import numpy as np
from harness import SEED, ServerProcess, median_seconds, save, start_up_seconds

import warpfit
from support.servers.bare_grpc import NO_LIMIT, bare_server, serve
from warpfit.expressions.workload import thesis_mix
from warpfit.v1 import evaluator_pb2 as pb


def overhead(client: warpfit.Client, rounds: int = 200) -> dict[str, float]:
    """Milliseconds beyond the engine's own time: 300 fresh expressions, 1,000 rows, loss only."""
    rng = np.random.default_rng(SEED)
    X = rng.uniform(0.5, 2, size=(1000, 10)).astype(np.float32)
    data = client.upload(X, X[:, 0])
    walls, engines = [], []
    for programs, parameters in [thesis_mix(SEED + turn) for turn in range(rounds)]:
        started = time.perf_counter_ns()
        answer = client.run(data, programs, parameters, loss="mse")
        walls.append(time.perf_counter_ns() - started)
        engines.append(answer.timings.compute)
    extra = sorted((w - e) / 1e6 for w, e in zip(walls, engines, strict=True))
    return {
        "engine_p50_ms": statistics.median(engines) / 1e6,
        "total_p50_ms": statistics.median(walls) / 1e6,
        "overhead_p50_ms": extra[len(extra) // 2],
        "overhead_p99_ms": extra[int(len(extra) * 0.99)],
    }


def transfers(client: warpfit.Client) -> dict[str, float]:
    """GB/s of a 120 MB answer and a 400 MB upload, and of unary calls with the same bytes."""
    rng = np.random.default_rng(SEED)
    small = client.upload(rng.normal(size=(100_000, 10)).astype(np.float32))
    expressions = [f"x{i % 10 + 1}" for i in range(300)]
    matrix = rng.normal(size=(1_000_000, 100)).astype(np.float32)
    answer_bytes, upload_bytes = 300 * 100_000 * 4, matrix.nbytes
    engine = client.run(small, expressions).timings.compute / 1e9
    answer = median_seconds(lambda: client.evaluate(small, expressions), 5)
    uploads = []
    for turn in range(3):
        matrix[0, 0] = turn  # fresh content
        started = time.perf_counter()
        client.release(client.upload(matrix))
        uploads.append(time.perf_counter() - started)
    with bare_server(__file__, "unary") as address:
        unary_answer = unary(address, "Fetch", answer_bytes)
        unary_upload = unary(address, "Store", upload_bytes)
    upload = statistics.median(uploads)
    return {
        "answer_gb_s": answer_bytes / answer / 1e9,
        "answer_engine_seconds": engine,
        "answer_unary_gb_s": answer_bytes / unary_answer / 1e9,
        "answer_speed_up": unary_answer / answer,
        "upload_gb_s": upload_bytes / upload / 1e9,
        "upload_unary_gb_s": upload_bytes / unary_upload / 1e9,
        "upload_speed_up": unary_upload / upload,
    }


def unary(address: str, method: str, size: int) -> float:
    """Seconds of one unary call that moves ``size`` bytes in one message, median."""
    payload = np.random.default_rng(SEED).bytes(size)
    with grpc.insecure_channel(address, NO_LIMIT) as channel:
        call = channel.unary_unary(
            f"/bench/{method}",
            pb.UploadVariablesRequest.SerializeToString,
            pb.UploadVariablesRequest.FromString,
        )

        def move() -> None:
            if method == "Store":
                call(pb.UploadVariablesRequest(data=payload))
            else:
                np.frombuffer(call(pb.UploadVariablesRequest()).data, np.float32).copy()

        return median_seconds(move, 3)


def serve_unary() -> None:
    """Be the plain unary service until standard input ends."""
    answer = np.random.default_rng(SEED).bytes(300 * 100_000 * 4)
    stored = bytearray(1_000_000 * 100 * 4)

    def store(request: pb.UploadVariablesRequest, _: object) -> pb.UploadVariablesRequest:
        stored[:] = request.data
        return pb.UploadVariablesRequest()

    def fetch(request: pb.UploadVariablesRequest, _: object) -> pb.UploadVariablesRequest:
        return pb.UploadVariablesRequest(data=answer)

    methods = {
        name: grpc.unary_unary_rpc_method_handler(
            handler,
            pb.UploadVariablesRequest.FromString,
            pb.UploadVariablesRequest.SerializeToString,
        )
        for name, handler in (("Store", store), ("Fetch", fetch))
    }
    serve("bench", methods, NO_LIMIT)


def main() -> None:
    # The first server also fills the compile cache, which the start-up time presumes.
    with ServerProcess() as server, warpfit.connect(server.address) as client:
        content = {
            "seed": SEED,
            "evaluate_300_fresh_1000_rows_loss": overhead(client),
            "transfers": transfers(client),
        }
    content["start_up_seconds"] = start_up_seconds()
    save("service", content)


if __name__ == "__main__":
    serve_unary() if sys.argv[1:] == ["unary"] else main()
