"""Sends a million seeded requests, most of them wrong, and watches the server.

The result says what came back, by status and reason; how often a process of the server ended; how
its memory and descriptors grew. Some calls of Evaluate stay open for several requests, each of
which must bring what it brings alone. It ends with status 1 if a request got an answer that it must
not get, a process ended, memory or descriptors grew, or something remains in flight.
"""

import json
import multiprocessing
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import psutil
from harness import SEED, ServerProcess, arguments, precompile, save

from support.load.fuzz import FLAGS, LAST_MOVES, LIMITS, Fuzzer, OpenCall, is_fine, outcomes
from support.load.processes import in_threads
from support.servers.rpcs import OWN_CONNECTION, Caller
from support.servers.server import eventually, tenants_file
from warpfit_server.tenants import Amounts

#: Memory may grow by this much in the second half of the requests.
GROWTH_BYTES = 32 << 20
#: So may the descriptors, of which data sets and idle segments have some hundreds by then.
GROWTH_DESCRIPTORS = 128
PROCESSES, THREADS = 2, 4
_CONTEXT = multiprocessing.get_context("spawn")


def work(address: str, seed: int, count: int, done: Any, out: Any) -> None:
    """Process: send ``count`` requests from several threads."""
    seen, opened, lock = Counter[tuple[str, str, str]](), Counter[str](), threading.Lock()
    wrong: list[str] = []

    def send(own_seed: int) -> None:
        sent, counts = 0, Counter[str]()
        with grpc.insecure_channel(address, OWN_CONNECTION) as channel:
            for turn, request in enumerate(Fuzzer(own_seed).requests()):
                if sent >= count // THREADS:
                    break
                sent += request.size
                with done.get_lock():
                    done.value += request.size
                for found in outcomes(Caller(channel), request, counts):
                    with lock:
                        seen[request.method, *found] += 1
                        if not is_fine(found) and len(wrong) < 20:
                            wrong.append(f"seed {own_seed}, request {turn}: {found}")
        with lock:
            opened.update(counts)

    with in_threads(send, range(seed * 1000, seed * 1000 + THREADS)):
        pass
    out.put((dict(seen), wrong, dict(opened)))


def watch(family: dict[str, psutil.Process]) -> dict[str, Any]:
    """Memory of the processes' own, shared memory, and open descriptors."""
    sample = {}
    for name, process in family.items():
        private = shared = descriptors = 0
        with suppress(psutil.NoSuchProcess):  # it crashed, which the result says
            memory, descriptors = process.memory_info(), process.num_fds()
            private, shared = memory.rss - memory.shared, memory.shared
        sizes = {"private_mib": round(private / 2**20, 1), "shared_mib": round(shared / 2**20, 1)}
        sample[name] = {**sizes, "descriptors": descriptors}
    return sample


def run(requests: int, seed: int) -> dict[str, Any]:
    limits = tenants_file(Path(tempfile.mkdtemp()), LIMITS)
    flags = ("--threads", "2", "--front-ends", "1", "--tenants-file", limits, *FLAGS)
    with ServerProcess(*flags, PYTHONFAULTHANDLER="1") as server:
        family = {"main": psutil.Process(server.process.pid), "engine": server.engine()}
        done, out, workers = _CONTEXT.Value("q", 0), _CONTEXT.Queue(), []
        for number in range(PROCESSES):
            given = (server.address, seed + number, requests // PROCESSES, done, out)
            workers.append(_CONTEXT.Process(target=work, args=given))
            workers[-1].start()
        samples = [{"requests": 0, **watch(family)}]
        while any(worker.is_alive() for worker in workers) and out.qsize() < PROCESSES:
            if done.value - samples[-1]["requests"] >= requests / 20:
                samples.append({"requests": done.value, **watch(family)})
                print(json.dumps(samples[-1]), flush=True)
            time.sleep(0.2)
        results = [out.get(timeout=60) for _ in workers]
        for worker in workers:
            worker.join()
        time.sleep(2)
        with suppress(AssertionError):  # which the result says
            eventually(lambda: server.in_flight() == Amounts())
        remaining = server.in_flight()
        alive = server.process.poll() is None and server.engine().pid == family["engine"].pid
        samples.append({"requests": done.value, **watch(family)})
    return {"seed": seed, **summary(results, samples, remaining), "crashes": int(not alive)}


def summary(
    results: list[Any], samples: list[dict[str, Any]], remaining: Amounts
) -> dict[str, Any]:
    opened = sum((Counter(counted) for _, _, counted in results), Counter[str]())
    methods, statuses, reasons, open_ends = (Counter[str]() for _ in range(4))
    for (method, status, reason), count in (each for seen, *_ in results for each in seen.items()):
        told = f"{status} {reason}".strip()
        for counter, name in ((methods, method), (statuses, status), (reasons, told)):
            counter[name] += count
        open_ends[told] += count if method == OpenCall.NAME else 0
    warm, last = samples[len(samples) // 2], samples[-1]
    return {
        **{"requests": samples[-1]["requests"], "by_method": dict(methods)},
        **{"by_status": dict(statuses.most_common()), "by_reason": dict(reasons.most_common())},
        "open_calls": {
            **{name: opened[name] for name in ("calls", "requests", "answers", "answers_compared")},
            "by_last_move": {name: opened[name] for name in LAST_MOVES},
            "by_reason": dict((+open_ends).most_common()),
        },
        "in_flight_at_the_end": remaining._asdict(),
        "not_allowed": [each for _, found, _ in results for each in found],
        "internal": statuses["INTERNAL"] + statuses["UNKNOWN"],
        "growth_after_half": {
            name: {key: round(last[name][key] - warm[name][key], 1) for key in last[name]}
            for name in ("main", "engine")
        },
        "samples": samples,
    }


def main() -> int:
    options = arguments(__doc__, "fuzz", requests=1_000_000, seed=SEED)
    precompile()
    result = run(options.requests, options.seed)
    save(options.name, result, options.folder)
    grown = result["growth_after_half"].values()
    bad = [each["private_mib"] * 2**20 >= GROWTH_BYTES for each in grown]
    bad += [each["descriptors"] >= GROWTH_DESCRIPTORS for each in grown]
    bad += [result["not_allowed"], result["crashes"], result["internal"]]
    return int(any([*bad, *result["in_flight_at_the_end"].values()]))
