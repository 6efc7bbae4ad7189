"""Progress reports of an upload."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from warpfit.errors import require

#: Called with the bytes done and the bytes in total, from 0 again when an upload is repeated.
Progress: TypeAlias = Callable[[int, int], None]


def silent(done: int, total: int) -> None:
    """Report nothing."""


@contextmanager
def reporter(progress: Progress | bool | None) -> Iterator[Progress]:
    """Yield the callable for what the caller passed; True opens a tqdm bar for the block."""
    if callable(progress) or not progress:
        yield progress if callable(progress) else silent
        return
    require("tqdm", "tqdm", "progress")
    from tqdm.auto import tqdm

    with tqdm(desc="upload", unit="B", unit_scale=True, unit_divisor=1024) as bar:

        def report(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield report
