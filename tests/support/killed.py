"""Clients that are killed in the middle of an upload, and what the server keeps of them."""

from __future__ import annotations

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
import psutil

import warpfit
from support.rpcs import OWN_CONNECTION, SERVICE
from support.server import ServerProcess
from support.windows import RawWindow, open_windows
from warpfit import codec
from warpfit.dataset import Dataset

ROWS = 50_000
#: The server's private memory may be that much larger afterwards: its allocator keeps some.
GROWTH_BYTES = 8 << 20
#: What must be as it was.
_COUNTS = ("window_descriptors", "shared_bytes", "descriptors")
_CONTEXT = multiprocessing.get_context("spawn")
_FLAGS = ("--front-doors", "1", "--threads", "1", "--local-socket", "auto")


def killed_uploads(kills: int, *, shared_memory: bool, together: int = 50) -> dict[str, Any]:
    """Kill clients with SIGKILL while their uploads run; what the server held before and after.

    Args:
        kills: clients to be killed, each with a connection of its own, and a window if it uses
            shared memory.
        shared_memory: whether the data come through windows.
        together: clients of one process, which are killed at once.

    """
    with ServerProcess(*_FLAGS) as server, warpfit.connect(server.address) as client:
        client.evaluate(client.upload(np.ones((10, 2))), ["x1"])
        start = held(server)
        for _ in range(max(1, kills // together // 2)):  # until allocators keep what they will keep
            _kill(server, together, shared_memory)
        before = _settled(server, start)
        seen = [_kill(server, together, shared_memory) for _ in range(kills // together)]
        after = _settled(server, before)
        works = client.evaluate(client.upload(np.ones((20, 2))), ["x1 + x2"])
    return {
        "transport": "shared memory" if shared_memory else "network",
        "killed": together * len(seen),
        "processes": len(seen),
        "least_held_when_they_were_killed": {
            name: min(sample[name] for sample in seen)
            for name in ("window_descriptors", "shared_bytes")
        },
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
        and seen["least_held_when_they_were_killed"]["shared_bytes"] > before["shared_bytes"]
        and seen["answers_afterwards"]
    )


def held(server: ServerProcess) -> dict[str, int]:
    """What the front door holds: windows, shared memory, descriptors, memory of its own."""
    memory = psutil.Process(server.process.pid).memory_info()
    return {
        "window_descriptors": open_windows(server.process.pid),
        "shared_bytes": server.shared_memory(),
        "descriptors": server.descriptors(),
        "private_bytes": memory.rss - memory.shared,
    }


def _settled(server: ServerProcess, before: dict[str, int], seconds: float = 20) -> dict[str, int]:
    """What the server holds once it has no more than before, or after some time."""
    deadline = time.monotonic() + seconds
    now = held(server)
    while any(now[x] > before[x] for x in _COUNTS) and time.monotonic() < deadline:
        time.sleep(0.1)
        now = held(server)
    return now


def _kill(server: ServerProcess, count: int, shared_memory: bool) -> dict[str, int]:
    """Let a process upload as so many clients, kill it; what the server held at that moment."""
    ours, theirs = _CONTEXT.Pipe()
    arguments = (server.address, count, shared_memory, theirs)
    process = _CONTEXT.Process(target=_upload, args=arguments)
    process.start()
    ours.recv()
    seen = held(server)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    return seen


def _upload(address: str, count: int, shared_memory: bool, under_way: Any) -> None:
    """Process: begin uploads, say that all of them are under way, and wait to be killed."""
    with warpfit.connect(address) as client:
        local = client.info().local
    begun = threading.Semaphore(0)
    calls, windows = [], []
    for number in range(count):
        dataset = _dataset(number)
        if shared_memory:
            windows.append(RawWindow.of(local, dataset.layout.nbytes))
            start = _by_window(dataset, windows[-1])
        else:
            start = _by_network(dataset)
        channel = grpc.insecure_channel(address, OWN_CONNECTION)
        method = channel.stream_unary(SERVICE + "UploadVariables")
        calls.append(method.future(_stalled(start, begun)))
    for _ in range(count):
        assert begun.acquire(timeout=60)
    time.sleep(0.3)  # until what was sent has arrived
    assert not any(call.done() for call in calls)
    under_way.send(None)
    signal.pause()


def _dataset(number: int) -> Dataset:
    """One of many with an id of its own, which nobody checks before the last byte."""
    ones = Dataset.of(np.full((ROWS, 4), number, np.float32))
    return Dataset.resident(ones.layout, ones.matrix, os.urandom(32))


def _by_network(dataset: Dataset) -> list[bytes]:
    """The first messages of an upload, with a half of the data."""
    return list(itertools.islice(codec.upload_messages(dataset, dataset.layout.nbytes // 4), 3))


def _by_window(dataset: Dataset, window: RawWindow) -> list[bytes]:
    """The first messages of an upload through a window, which has half of the data."""
    size = dataset.layout.nbytes
    os.pwrite(window.descriptors[0], dataset.matrix.data.cast("B")[: size // 2], 0)
    piece = codec.Piece(window.identifier, 0, size)
    return [codec.upload_from(dataset, piece), codec.filled_to_bytes(size // 2)]


def _stalled(messages: list[bytes], begun: threading.Semaphore) -> Iterator[bytes]:
    yield from messages
    begun.release()  # it is asked for more
    threading.Event().wait()
