"""Several engines behind one server against one: throughput, split calls, loss of an engine.

``--devices 0 0,1`` starts a server for each setting, and measures them in turns, so that other load
on the machine meets all alike. The first one is what the others are compared with. ``--parts``
names some of what is measured, ``--programs`` those of a call of many workers. On a machine without
a GPU: ``--devices cpu cpu:2 --threads 1 --workers 2 4 --scale 0.05``.

* ``sustained``: token-rows a second of many workers, which are processes on the server's own cores
  with clients of their own; batches never come again;
* ``one client``: losses of 5,000 programs on 1,000,000 rows, which are split over the devices;
* ``fits``: one call of 3,000 searches, split likewise;
* ``loss of an engine``: one engine is killed while 16 workers repeat a batch, and while one client
  repeats a large batch, its fits, and a search of some seconds.

``--scale`` multiplies the numbers of rows, but not below 1,000. ``--encoded`` has the many workers
send messages that were encoded beforehand, and ``--worker-cores 10`` gives workers the last ten
cores and the servers the others: what the server can do where workers are on other hosts.
"""

import itertools
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import psutil
from harness import SEED, ServerProcess, arguments, percentiles, save

import warpfit
from support.load.worker_processes import ENCODED, Pool, Workers, table, throughput
from warpfit.calls.results import Fit

#: Programs and rows of the calls of many workers.
SHAPES = ((300, 100_000), (5_000, 10_000))
LARGE = (5_000, 1_000_000)
SEARCHES = (3_000, 10_000)
#: Of each server in turn: rounds of calls of many workers, and calls of one client of each kind.
ROUNDS, CALLS = 2, 7
#: Seconds that the loss of an engine is watched.
LOSS_SECONDS = 8.0
LOSS_WORKERS = 16


def sustained(workers: Workers, servers: dict[str, ServerProcess], options: Any) -> list[Any]:
    """Throughput of each number of workers and each shape, the servers in turns."""
    found = []
    for (programs, rows), count in itertools.product(options.shapes, options.workers):
        rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in servers}
        for name, server in [*servers.items()] * ROUNDS:
            sent = ENCODED if options.encoded else None
            order = (server.address, programs, rows, options.seconds, sent)
            results, busy = watched(workers, server, count, order)
            walls = [wall for each in results for wall in each["walls"]] or [0.0]
            told = {**throughput(results, rows), **percentiles(walls), "busy_cores": busy}
            rounds[name].append(told)
        rates = {
            name: statistics.median(each["token_rows_per_second"] for each in several)
            for name, several in rounds.items()
        }
        shape = {"programs": programs, "rows": rows, "workers": count}
        found.append({**shape, "servers": rounds, "times_the_first": ratios(rates)})
        print(shape, found[-1]["times_the_first"], flush=True)
    return found


def watched(
    workers: Workers, server: ServerProcess, count: int, order: tuple[Any, ...]
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Return what workers have found, and how many cores each kind of process kept busy."""

    def cpu_seconds() -> dict[str, float]:
        """Processor time that has been used, and the clock."""
        of_machine, found = psutil.cpu_times(), {"clock": time.perf_counter()}
        found["machine"] = sum(of_machine) - of_machine.idle - getattr(of_machine, "iowait", 0.0)
        for who, processes in (
            ("workers", workers.processes()),
            ("front ends", server.front_ends()),
            ("engines", server.engines().values()),
        ):
            found[who] = sum(sum(process.cpu_times()[:2]) for process in processes)
        return found

    begun: dict[str, float] = {}
    results = workers.run(count, order, lambda: begun.update(cpu_seconds()))
    ended = cpu_seconds()
    taken = ended.pop("clock") - begun["clock"]
    return results, {who: round((ended[who] - begun[who]) / taken, 2) for who in ended}


def ratios(values: dict[str, float]) -> dict[str, float]:
    """Return how many times as much as the first setting each one has."""
    first = next(iter(values.values()))
    return {name: round(value / first, 3) for name, value in values.items()}


def in_turns(
    servers: dict[str, ServerProcess], shape: tuple[int, int], **asked: Any
) -> dict[str, Any]:
    """Time calls with the same batches on all servers; compare the bits of the answers."""
    programs, rows = shape
    pool, walls = Pool(SEED), {name: list[float]() for name in servers}
    devices: dict[str, set[str]] = {name: set() for name in servers}
    differing = 0
    with ExitStack() as held:
        run = {}
        for name, server in servers.items():
            client = held.enter_context(warpfit.connect(server.address))
            data = client.upload(*table(rows))
            method: Callable[..., Any] = client.run if "loss" in asked else client.optimize
            run[name] = partial(method, held.enter_context(data), **asked)
            for _ in range(3):  # the server learns what calls take
                run[name](pool.draw(programs))
        for _ in range(CALLS):
            batch, answers = pool.draw(programs), set()
            for name in servers:
                before = time.perf_counter()
                answer = run[name](batch)
                walls[name].append(time.perf_counter() - before)
                devices[name].add(answer.timings.device)
                answers.add(bits(answer))
            differing += len(answers) > 1
    medians = {name: statistics.median(series) for name, series in walls.items()}
    found = {
        **{"programs": programs, "rows": rows, "calls": CALLS},
        "milliseconds": {name: round(1e3 * median, 3) for name, median in medians.items()},
        "times_the_first": ratios({name: 1 / median for name, median in medians.items()}),
        "devices": {name: sorted(each) for name, each in devices.items()},
        "calls_whose_answers_differ_in_bits": differing,
    }
    print(found, flush=True)
    return found


def bits(answer: Any) -> bytes:
    """The losses of an evaluation; the parameters and losses of a fit."""
    arrays = [*answer.parameters, answer.loss] if isinstance(answer, Fit) else [answer.losses]
    return np.concatenate([np.ravel(array) for array in arrays]).tobytes()


@contextmanager
def killed(server: ServerProcess) -> Iterator[None]:
    """Kill an engine after a third of the time that its loss is watched."""
    timer = threading.Timer(LOSS_SECONDS / 3, server.kill_engine, [1])
    timer.start()
    yield
    timer.join()


def loss_beside_one_client(server: ServerProcess, options: Any) -> dict[str, Any]:
    """Kill an engine while one client repeats the same calls, and what became of them."""
    pool, found = Pool(SEED), {}
    with warpfit.connect(server.address) as client:
        calls: dict[str, Callable[..., Any]] = {
            "large batches": partial(client.run, loss="mse", precision="fast"),
            "fits": partial(client.optimize, max_iterations=20),
        }
        for kind, (programs, rows) in zip(calls, (options.large, options.searches), strict=True):
            batch = pool.draw(programs)
            with client.upload(*table(rows)) as data:
                usual, walls, differing, failed = bits(calls[kind](data, batch)), [], 0, 0
                with killed(server):
                    end = time.perf_counter() + LOSS_SECONDS
                    while (begun := time.perf_counter()) < end:
                        try:
                            differing += bits(calls[kind](data, batch)) != usual
                        except warpfit.WarpfitError as error:
                            print(kind, error, flush=True)
                            failed += 1
                        walls.append(time.perf_counter() - begun)
            found[kind] = {
                **{"calls": len(walls), "failed": failed, "answers_that_differ": differing},
                "longest_call_seconds": round(max(walls), 4),
            }
        with client.upload(*table(1_000)) as data:
            client.search(data, seconds=0.5)  # which loads the code of searches
            with killed(server):
                begun = time.perf_counter()
                result = client.search(data, seconds=LOSS_SECONDS)
                taken = round(time.perf_counter() - begun, 3)
        found["search"] = {
            **{"reason": str(result.reason), "wall_seconds": taken},
            **{"interruptions": result.interruptions, "formulas": result.tried},
            "sizes of the front": len(result),
        }
    return found


def loss_of_an_engine(workers: Workers, server: ServerProcess, options: Any) -> dict[str, Any]:
    """Kill an engine under load: failures, wrong answers, and for how long nobody had an answer."""
    programs, rows = options.shapes[0]
    killed_at: list[float] = []
    others = {number: one.pid for number, one in server.engines().items() if number != 1}

    def kill() -> None:
        server.kill_engine(1)
        killed_at.append(time.time())

    order = (server.address, programs, rows, LOSS_SECONDS, 0)
    count = min(LOSS_WORKERS, max(options.workers))
    results = workers.run(count, order, threading.Timer(LOSS_SECONDS / 3, kill).start)
    calls = np.array([pair for r in results for pair in zip(r["ended"], r["walls"], strict=True)])
    calls = calls[np.argsort(calls[:, 0])]
    moments, since = calls[:, 0], calls[:, 0] - killed_at[0]
    return {
        "workers": count,
        "calls": len(calls),
        "failed": sum(each["failed"] for each in results),
        "answers_that_differ": len(set[bytes]().union(*(r["losses"] for r in results))) - 1,
        "longest_gap_seconds": round(float(np.diff(moments).max()), 4),
        "longest_call_seconds": round(float(calls[since > 0, 1].max()), 4),
        "calls_per_second_before": round(int((since < 0).sum()) / (LOSS_SECONDS / 3), 1),
        "calls_in_the_second_after": int(((since >= 0) & (since < 1)).sum()),
        "others_lived": all(server.engine(number).pid == pid for number, pid in others.items()),
    }


#: Parts of the result by name, in the order in which they are measured.
PARTS: dict[str, Callable[..., Any]] = {
    "one client": lambda _, servers, given: in_turns(
        servers, given.large, loss="mse", precision="fast"
    ),
    "fits": lambda _, servers, options: in_turns(servers, options.searches, max_iterations=20),
    "sustained": sustained,
    "loss of an engine": lambda workers, servers, options: {
        name: {
            **loss_of_an_engine(workers, server, options),
            "one client": loss_beside_one_client(server, options),
        }
        for name, server in servers.items()
        if len(server.engines()) > 1
    },
}


def started(devices: str, options: Any) -> ServerProcess:
    flags = ["--max-requests", "1024"]
    if options.threads:
        count = int(devices.partition(":")[2] or 1) if devices.startswith("cpu") else 1
        flags += ["--threads", str(options.threads * count)]
    return ServerProcess(*flags, devices=devices)


def main() -> None:
    flags: dict[str, Any] = {
        **{"parts": tuple(PARTS), "devices": ("0", "all"), "workers": (16, 64, 128)},
        **{"seconds": 2.0, "scale": 1.0, "threads": int, "programs": int},
    }
    options = arguments(__doc__, "devices", encoded=False, worker_cores=0, **flags)

    def scaled(shape: tuple[int, int]) -> tuple[int, int]:
        return shape[0], max(1_000, int(options.scale * shape[1]))

    options.shapes = [scaled(s) for s in SHAPES if options.programs in (None, s[0])]
    options.large, options.searches = scaled(LARGE), scaled(SEARCHES)
    begun = time.perf_counter()
    content: dict[str, Any] = {"seed": SEED, "load_average_before": os.getloadavg()[0]}
    content |= {"encoded": options.encoded, "worker_cores": options.worker_cores}
    cores = sorted(os.sched_getaffinity(0))
    split = len(cores) - options.worker_cores
    with ExitStack() as held:  # processes begin on the cores of this one
        os.sched_setaffinity(0, cores[:split])
        servers = {d: held.enter_context(started(d, options)) for d in options.devices}
        os.sched_setaffinity(0, cores[split:] or cores)
        workers = held.enter_context(Workers(max(options.workers)))
        for part in options.parts:
            content[part] = PARTS[part](workers, servers, options)
            save(options.name, content, options.folder, show=False)
    content["seconds"] = round(time.perf_counter() - begun, 1)
    save(options.name, content, options.folder)
