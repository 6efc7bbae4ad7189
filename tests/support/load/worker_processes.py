"""Worker processes that call a server as fast as they can, all of them at the same time."""

import gc
import itertools
import time
from collections import Counter
from collections.abc import Callable
from functools import lru_cache, partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Final, NamedTuple

import grpc
import numpy as np
import psutil

import warpfit
from support.load.processes import Processes
from support.random_programs import thesis_mix
from support.servers.rpcs import OWN_CONNECTION, SERVICE
from warpfit import codec
from warpfit.calls.arguments import EvaluateOptions, build_evaluation
from warpfit.errors import WarpfitError
from warpfit.ir import Batch, Program

SEED: Final = 20261121
VARIABLES: Final = 10
#: Programs that fresh batches are drawn from.
POOL: Final = 6_000
#: Most programs of a call that are sent as lists, and programs that are drawn for each second of a
#: worker before the time is taken.
LISTED, PROGRAMS_A_SECOND = 300, 240_000
#: An order for messages that were encoded before the time is taken.
ENCODED: Final = "encoded"


@lru_cache(maxsize=1)
def table(rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(SEED)
    X = rng.uniform(0.5, 2.0, size=(rows, VARIABLES)).astype(np.float32)
    y = 1.5 * X[:, 0] * np.exp(-0.5 * X[:, 1]) + np.log(X[:, 2])
    return X, y.astype(np.float32)


class Pool:
    """Programs as flat arrays, to draw batches from; each time others in another order."""

    def __init__(self, seed: int, size: int = POOL) -> None:
        self.programs, self.parameters = thesis_mix(seed, size, variables=VARIABLES)
        self.batch = Batch.of(self.programs, self.parameters)
        self.random = np.random.default_rng(seed)

    def draw(self, count: int) -> Batch:
        return self.batch[self._choose(count)]

    def draw_lists(self, count: int) -> tuple[list[Program], list[np.ndarray]]:
        """Draw programs and their parameters as lists, as most searches have them."""
        chosen = self._choose(count).tolist()
        return [self.programs[index] for index in chosen], [self.parameters[i] for i in chosen]

    def _choose(self, count: int) -> np.ndarray:
        return self.random.choice(len(self.batch), count, replace=count > len(self.batch))


def work(number: int, orders: Connection) -> None:
    """Connect as an order says, then call until the time is up, order after order.

    An order has address, programs a call, rows, seconds, and what is sent: other batches each time
    (None), as messages that were encoded before (`ENCODED`), or one batch again and again (0).
    """
    pool = Pool(SEED + 1 + number % 16, 2_000)
    pool.random = np.random.default_rng(SEED + number)
    orders.send(None)
    while (order := orders.recv()) is not None:
        address, programs, rows, seconds, fresh = order
        with warpfit.connect(address) as client:
            data, calls = client.upload(*table(rows)), int(seconds * PROGRAMS_A_SECOND / programs)
            if fresh == ENCODED:
                send = encoded(address, data, pool, programs, calls)
            elif fresh is None:
                send = drawn(client, data, pool, programs, calls)
            else:
                send = partial(repeat, client, data, Pool(SEED, programs).batch)
            send()
            orders.send(None)
            orders.recv()  # all workers are ready
            orders.send(call(send, seconds))


class Answer(NamedTuple):
    """Part of an answer that a worker keeps."""

    tokens: int
    devices: str
    losses: bytes


def drawn(client: warpfit.Client, data: Any, pool: Pool, count: int, calls: int) -> Any:
    """Return what sends a batch that was not sent before; drawing now spares the server cores.

    Few programs are lists, as most searches have them; many are flat arrays, as of vectorised ones.
    """

    def draw() -> tuple[int, tuple[Any, ...]]:
        if count > LISTED:
            batch = pool.draw(count)
            return batch.token_count, (batch,)
        programs, parameters = pool.draw_lists(count)
        return sum(map(len, programs)), (programs, parameters)

    early = [draw() for _ in range(calls)]
    gc.freeze()
    batches = itertools.chain(early, iter(draw, None))

    def send() -> Answer:
        tokens, given = next(batches)
        answer = client.run(data, *given, loss="mse", precision="fast")
        return Answer(tokens, answer.timings.device, b"")

    return send


def encoded(address: str, data: Any, pool: Pool, count: int, calls: int) -> Callable[[], Answer]:
    """Return what sends messages that were encoded before, in turns, and decodes no answer.

    So workers on the server's host leave it the cores.
    """
    batches = [pool.draw(count) for _ in range(calls)]
    asked: EvaluateOptions = {"loss": "mse", "precision": "fast"}
    asks = [build_evaluation(data, batch, None, None, asked)[0] for batch in batches]
    messages = [codec.evaluation_to_bytes(each) for each in asks]
    turns = itertools.cycle(zip([len(batch.codes) for batch in batches], messages, strict=True))
    channel = grpc.insecure_channel(address, OWN_CONNECTION)
    method = channel.stream_stream(SERVICE + "Evaluate")
    calls_of: list[tuple[SimpleQueue[bytes], Any]] = []

    def send() -> Answer:
        """Send a message in a call in which one follows the other, as clients do."""
        tokens, message = next(turns)
        for is_first in (True, False):  # the server keeps an idle call for half a second
            if not calls_of:
                waiting: SimpleQueue[bytes] = SimpleQueue()
                calls_of.append((waiting, method(iter(waiting.get, None), timeout=600.0)))
            requests, answers = calls_of[0]
            requests.put(message)
            try:
                next(answers)
                break
            except (StopIteration, grpc.RpcError) as error:
                calls_of.clear()
                if not is_first:
                    raise WarpfitError("the call has ended", "CANCELLED") from error
        return Answer(tokens, "", b"")

    return send


def repeat(client: warpfit.Client, data: Any, batch: Batch) -> Answer:
    """Evaluate a batch that was evaluated before."""
    answer = client.run(data, batch, loss="mse", precision="fast", tier="interpreter")
    return Answer(len(batch.codes), answer.timings.device, answer.losses.tobytes())


def call(send: Callable[[], Answer], seconds: float) -> dict[str, Any]:
    """Call until the time is up: moments and durations of all calls, and what went wrong."""
    tokens, failed, ended, walls = 0, 0, [], []
    losses, devices = set[bytes](), Counter[str]()
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        before = time.perf_counter()
        try:
            answer = send()
        except (WarpfitError, grpc.RpcError):
            failed += 1
            continue
        ended.append(time.time())
        walls.append(time.perf_counter() - before)
        tokens += answer.tokens
        devices.update(answer.devices.split(","))
        losses.add(answer.losses)
    taken = time.perf_counter() - started
    found = {"tokens": tokens, "failed": failed, "ended": ended, "walls": walls, "taken": taken}
    return {**found, "devices": devices, "losses": losses}


def throughput(results: list[dict[str, Any]], rows: int) -> dict[str, Any]:
    """Put together what workers have found that called at the same time."""
    devices: Counter[str] = sum((each["devices"] for each in results), Counter())
    return {
        "token_rows": sum(rows * each["tokens"] for each in results),
        "token_rows_per_second": sum(rows * each["tokens"] / each["taken"] for each in results),
        "calls_per_second": sum(len(each["walls"]) / each["taken"] for each in results),
        "failed": sum(each["failed"] for each in results),
        "calls_by_device": dict(sorted(devices.items())),
    }


class Workers(Processes):
    """Worker processes that wait for orders."""

    def __init__(self, count: int) -> None:
        super().__init__(work, [(number,) for number in range(count)])

    def run(self, count: int, order: tuple[Any, ...], meanwhile: Any = lambda: None) -> list[Any]:
        """Have some workers call at the same time; return what each has found."""
        self.ask([order] * count)  # all are ready then
        for end in self.ends[:count]:
            end.send(None)
        meanwhile()
        return [end.recv() for end in self.ends[:count]]

    def processes(self) -> list[psutil.Process]:
        return [psutil.Process(process.pid) for process in self.running]
