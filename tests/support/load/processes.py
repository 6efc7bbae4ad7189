"""Processes of callers, each with a pipe for its orders."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from typing import Any, Self


class Processes:
    """Processes that obey orders until they get None; a context manager.

    Each runs a function of what it is given and of its end of a pipe, into which it sends None once
    it is ready. All are when the constructor returns: what starts would take cores from what is
    measured.
    """

    def __init__(self, function: Callable[..., None], given: Sequence[tuple[Any, ...]]) -> None:
        context = multiprocessing.get_context("spawn")
        self.ends, self.running = [], []
        for arguments in given:
            ours, theirs = context.Pipe()
            self.ends.append(ours)
            self.running.append(context.Process(target=function, args=(*arguments, theirs)))
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
