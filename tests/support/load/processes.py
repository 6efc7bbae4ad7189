"""Threads and processes that call at the same time."""

import multiprocessing
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Self

_CONTEXT = multiprocessing.get_context("spawn")


@contextmanager
def in_threads(work: Callable[[Any], object], given: Iterable[Any]):
    """Run a function of each thing that is given in a thread; the block waits for their end."""
    threads = [threading.Thread(target=work, args=(each,)) for each in given]
    for thread in threads:
        thread.start()
    try:
        yield threads
    finally:
        for thread in threads:
            thread.join()


class Processes:
    """Processes that obey orders until they get None; a context manager.

    Each runs a function of what it is given and of its end of a pipe, into which it sends None once
    it is ready, as all are when the constructor returns: what starts would take cores.
    """

    def __init__(self, function: Callable[..., None], given: Sequence[tuple[Any, ...]]) -> None:
        self.ends, self.running = [], []
        for arguments in given:
            ours, theirs = _CONTEXT.Pipe()
            self.ends.append(ours)
            self.running.append(_CONTEXT.Process(target=function, args=(*arguments, theirs)))
            self.running[-1].start()
        for end in self.ends:
            end.recv()

    def ask(self, orders: Sequence[Any]) -> list[Any]:
        """Give orders to the first processes; return an answer of each."""
        ends = self.ends[: len(orders)]
        for end, order in zip(ends, orders, strict=True):
            end.send(order)
        return [end.recv() for end in ends]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for end in self.ends:
            end.send(None)
        for process in self.running:
            process.join(90)


@contextmanager
def beside(function: Callable[..., Any], *given: Any) -> Iterator[list[Any]]:
    """Run a function of an event that ends it in a process; its result is in the list then."""
    stop, (ours, theirs) = _CONTEXT.Event(), _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_return, args=(theirs, function, *given, stop))
    process.start()
    theirs.close()
    found: list[Any] = []
    try:
        yield found
    finally:
        stop.set()
        with suppress(EOFError):  # a process that has ended in another way
            found += [ours.recv()] if ours.poll(90) else []
        process.join(30)
        process.kill()


def _return(end: Any, function: Callable[..., Any], *given: Any) -> None:
    end.send(function(*given))
