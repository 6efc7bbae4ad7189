"""Worker processes that prepare by themselves and then begin together."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, Protocol

from warpfit.errors import InternalError

#: Between the signal and the common start: every process has heard it by then.
_HEAD_START: Final = 0.02
_PATIENCE_SECONDS: Final = 120.0


class Task(Protocol):
    """Work of one process; is pickled."""

    def perform(self, begin: Callable[[], float]) -> Any:
        """Prepare, call ``begin``, which returns the common start (`time.monotonic`), and work."""


class Processes:
    """Processes that are started when first needed; use `processes`."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._connections: list[Any] = []
        self._processes: list[Any] = []

    def perform(self, tasks: Sequence[Task], seconds: float) -> list[Any]:
        """Perform up to ``count`` tasks at the same time; they should take about ``seconds``.

        Raises:
            InternalError: if a task raised, or its process ended.

        """
        if not self._processes:
            self._start()
        used = self._connections[: len(tasks)]
        for connection, task in zip(used, tasks, strict=True):
            connection.send(task)
        for connection in used:
            _receive(connection, "ready", _PATIENCE_SECONDS)
        start = time.monotonic() + _HEAD_START
        for connection in used:
            connection.send(start)
        return [_receive(connection, "result", seconds + _PATIENCE_SECONDS) for connection in used]

    def close(self) -> None:
        """End the processes."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.terminate()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        for _ in range(self.count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            self._connections.append(ours)
            self._processes.append(process)
            process.start()
            theirs.close()
        for connection in self._connections:
            _receive(connection, "ready", _PATIENCE_SECONDS)


@contextmanager
def processes(count: int) -> Iterator[Processes]:
    """Keep ``count`` processes for as long as the block runs."""
    made = Processes(count)
    try:
        yield made
    finally:
        made.close()


def _receive(connection: Any, wanted: str, seconds: float) -> Any:
    try:
        if connection.poll(seconds):
            kind, content = connection.recv()
            if kind == wanted:
                return content
            raise InternalError(f"a worker failed: {content}", "WORKER_FAILED")
    except EOFError:
        pass
    raise InternalError("a worker process ended or does not answer", "WORKER_FAILED")


def _serve(connection: Any) -> None:
    """Perform tasks until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    with suppress(EOFError, BrokenPipeError):
        connection.send(("ready", None))
        while True:
            task = connection.recv()
            connection.send(_outcome(task, connection))


def _outcome(task: Task, connection: Any) -> tuple[str, Any]:
    def begin() -> float:
        connection.send(("ready", None))
        return float(connection.recv())

    try:
        return "result", task.perform(begin)
    except EOFError:
        raise
    except Exception as error:  # told to the parent, which raises it
        return "failure", f"{type(error).__name__}: {error}"
