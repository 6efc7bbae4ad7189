"""Calls with long batches: the values of operators sent, as in short batches, or left out.

``python tests/bench/long_batches.py`` writes results/long_batches.json: for each number of programs
and either form the bytes of the message and the time of a call on loopback whose server, another
process, decodes the batch and computes nothing. Calls of the two forms take turns.
"""

from __future__ import annotations

import statistics
import sys

import grpc
from harness import SEED, save, seconds_of

from support.servers.bare_grpc import NO_LIMIT, bare_server, serve
from warpfit import codec
from warpfit.codec import requests
from warpfit.expressions.workload import thesis_mix
from warpfit.ir import Batch
from warpfit.request import Evaluation, Loss

SIZES = {300: 200, 5_000: 40, 50_000: 15}
"""Rounds by number of programs."""
FORMS = {"all values": sys.maxsize, "without those of operators": 0}
"""Number of tokens from which on operators have no values in the message."""
SERVICE, METHOD = "bench", "Decode"


def measure(programs: int, rounds: int, channel: grpc.Channel) -> dict[str, dict[str, float]]:
    """Return bytes and milliseconds of either form."""
    batch = Batch.of(*thesis_mix(SEED, programs))
    evaluation = Evaluation(bytes(32), batch, loss=Loss.MSE, values=False)
    method = channel.unary_unary(f"/{SERVICE}/{METHOD}")
    times: dict[str, list[float]] = {form: [] for form in FORMS}
    sizes = {}
    for turn in range(rounds + 2):
        for form, requests._LONG in FORMS.items():
            sizes[form] = len(codec.evaluation_to_bytes(evaluation))
            (seconds,) = seconds_of(lambda: method(codec.evaluation_to_bytes(evaluation)), 1)
            if turn > 1:
                times[form].append(1e3 * seconds)
    return {
        form: {
            "bytes": sizes[form],
            "median_ms": round(statistics.median(times[form]), 3),
            "least_ms": round(min(times[form]), 3),
        }
        for form in FORMS
    }


def serve_decoder() -> None:
    """Decode every batch and answer a number for each program until standard input ends."""

    def decode(message: bytes, _context: grpc.ServicerContext) -> bytes:
        return bytes(8 * len(codec.evaluation_from_bytes(message).batch))

    serve(SERVICE, {METHOD: grpc.unary_unary_rpc_method_handler(decode)}, NO_LIMIT)


def main() -> None:
    with (
        bare_server(__file__, "serve") as address,
        grpc.insecure_channel(address, NO_LIMIT) as channel,
    ):
        cases = {str(n): measure(n, rounds, channel) for n, rounds in SIZES.items()}
    save("long_batches", {"seed": SEED, "programs": cases})


if __name__ == "__main__":
    serve_decoder() if sys.argv[1:] == ["serve"] else main()
