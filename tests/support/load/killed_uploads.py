"""Clients that are killed in the middle of an upload, and what the server keeps of them."""

import itertools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np

import warpfit
from support.servers.rpcs import OWN_CONNECTION, SERVICE
from support.servers.server import ServerProcess, private_bytes
from warpfit import codec
from warpfit.dataset import Dataset

ROWS = 50_000
#: The server's private memory may be that much larger afterwards: its allocator keeps some.
GROWTH_BYTES = 8 << 20
#: What must be as it was.
_COUNTS = ("shared_bytes", "descriptors")
_CONTEXT = multiprocessing.get_context("spawn")
_FLAGS = ("--front-ends", "1", "--threads", "1")


def killed_uploads(kills: int, *, together: int = 50) -> dict[str, Any]:
    """Kill clients with SIGKILL while they upload; return what the server held before and after.

    Of ``kills`` clients, each with a connection, those ``together`` in a process end at once.
    """
    with ServerProcess(*_FLAGS) as server, warpfit.connect(server.address) as client:
        client.evaluate(client.upload(np.ones((10, 2))), ["x1"])
        start = held(server)
        for _ in range(max(1, kills // together // 2)):  # until allocators keep what they will keep
            _kill(server, together)
        before = _settled(server, start)
        seen = [_kill(server, together) for _ in range(kills // together)]
        after = _settled(server, before)
        works = client.evaluate(client.upload(np.ones((20, 2))), ["x1 + x2"])
    return {
        "killed": together * len(seen),
        "processes": len(seen),
        "least_shared_bytes_when_they_were_killed": min(one["shared_bytes"] for one in seen),
        "before": before,
        "after": after,
        "answers_afterwards": bool((works == 2).all()),
    }


def is_clean(seen: dict[str, Any]) -> bool:
    """Tell whether everything went back to where it was, and whether there was something to go."""
    before, after = seen["before"], seen["after"]
    grown = after["private_bytes"] - before["private_bytes"]
    return (
        all(after[name] <= before[name] for name in _COUNTS)
        and grown < GROWTH_BYTES
        and seen["least_shared_bytes_when_they_were_killed"] > before["shared_bytes"]
        and seen["answers_afterwards"]
    )


def held(server: ServerProcess) -> dict[str, int]:
    """What main process and front ends hold: shared memory, descriptors, private memory."""
    return {
        "shared_bytes": server.shared_memory(),
        "descriptors": server.descriptors(),
        "private_bytes": sum(private_bytes(one.pid) for one in server.front_ends()),
    }


def _settled(server: ServerProcess, before: dict[str, int], seconds: float = 20) -> dict[str, int]:
    """What the server holds once it has no more than before, or after some time."""
    deadline = time.monotonic() + seconds
    now = held(server)
    while any(now[x] > before[x] for x in _COUNTS) and time.monotonic() < deadline:
        time.sleep(0.1)
        now = held(server)
    return now


def _kill(server: ServerProcess, count: int) -> dict[str, int]:
    """Let a process upload as so many clients, kill it; what the server held at that moment."""
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_upload, args=(server.address, count, theirs))
    process.start()
    ours.recv()
    seen = held(server)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    return seen


def _upload(address: str, count: int, under_way: Any) -> None:
    """Process: begin uploads, say that all of them are under way, and wait to be killed."""
    begun = threading.Semaphore(0)
    calls = []
    for number in range(count):
        channel = grpc.insecure_channel(address, OWN_CONNECTION)
        method = channel.stream_unary(SERVICE + "UploadVariables")
        table = np.full((ROWS, 4), number, np.float32)
        calls.append(method.future(_half_of_an_upload(Dataset.of(table), begun)))
    for _ in range(count):
        assert begun.acquire(timeout=60)
    time.sleep(0.3)  # until what was sent has arrived
    assert not any(call.done() for call in calls)
    under_way.send(None)
    signal.pause()


def _half_of_an_upload(ones: Dataset, begun: threading.Semaphore) -> Iterator[bytes]:
    """Send a half, say that all of it was taken, and wait; nobody checks the id before the end."""
    dataset = Dataset.resident(ones.layout, ones.matrix, os.urandom(32))
    yield from itertools.islice(codec.upload_messages(dataset, dataset.layout.nbytes // 4), 3)
    begun.release()  # it is asked for more
    threading.Event().wait()
