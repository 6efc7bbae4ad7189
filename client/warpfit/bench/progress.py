"""How far a run is: a bar of rich's on a terminal, plain lines elsewhere or without rich."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, Protocol


class Progress(Protocol):
    """Told of every scenario."""

    def expect(self, more: int) -> None:
        """More scenarios are to come."""

    def start(self, title: str) -> None:
        """A scenario begins."""

    def done(self, outcome: str) -> None:
        """It has ended; ``outcome`` is a few words, empty if there is nothing to tell."""

    def say(self, text: str) -> None:
        """Tell anything else."""


class Pace:
    """Estimates the time left from the time that scenarios took so far."""

    def __init__(self) -> None:
        self.total = 0
        self.finished = 0
        self._busy = 0.0
        self._since = time.monotonic()

    def begin(self) -> None:
        """Note that a scenario begins."""
        self._since = time.monotonic()

    def end(self) -> None:
        """Note that it has ended."""
        self.finished += 1
        self._busy += time.monotonic() - self._since

    @property
    def seconds_left(self) -> float | None:
        """None before the first scenario has ended."""
        if not self.finished:
            return None
        return (self.total - self.finished) * self._busy / self.finished


class PlainProgress:
    """One line for each scenario."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._pace = Pace()
        self._title = ""

    def expect(self, more: int) -> None:
        """More scenarios are to come."""
        self._pace.total += more

    def start(self, title: str) -> None:
        """Remember the title."""
        self._title = title
        self._pace.begin()

    def done(self, outcome: str) -> None:
        """Print the line."""
        self._pace.end()
        pace = self._pace
        left = f"about {pace.seconds_left:.0f} s left"
        self.say(f"[{pace.finished}/{pace.total}, {left}] {self._title}: {outcome}")

    def say(self, text: str) -> None:
        """Print a line."""
        print(text, file=self._stream, flush=True)


class RichProgress:
    """A bar with the scenario's name, and the estimate of the time left."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._task = bar.add_task("starting", total=0, left="")
        self._pace = Pace()
        self._title = ""

    def expect(self, more: int) -> None:
        """More scenarios are to come."""
        self._pace.total += more
        self._bar.update(self._task, total=self._pace.total)

    def start(self, title: str) -> None:
        """Show the title."""
        self._title = title
        self._pace.begin()
        self._bar.update(self._task, description=title)

    def done(self, outcome: str) -> None:
        """Print the outcome above the bar and move on."""
        self._pace.end()
        left = f"about {self._pace.seconds_left:.0f} s left"
        self._bar.update(self._task, advance=1, left=left)
        self.say(f"{self._title}: {outcome}")

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._bar.console.print(text, highlight=False, markup=False)


@contextmanager
def progress(stream: IO[str] | None = None) -> Iterator[Progress]:
    """Show progress on a stream, by default standard error, for as long as the block runs."""
    where = stream or sys.stderr
    bar = _bar() if where.isatty() else None
    if bar is None:
        yield PlainProgress(where)
        return
    with bar:
        yield RichProgress(bar)


def _bar() -> Any:
    """Make rich's bar; None if rich is not installed."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    except ImportError:
        return None
    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}"),
        TextColumn("{task.description}", markup=False),
        console=Console(stderr=True),
        refresh_per_second=2,  # each time takes the interpreter from what is measured
    )
