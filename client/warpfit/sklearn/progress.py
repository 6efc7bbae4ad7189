"""Progress line, callbacks and checkpoints of a search."""

from __future__ import annotations

import os
import sys
import time
import warnings
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from warpfit.dataset.checks import caller_level
from warpfit.errors import InvalidArgumentError
from warpfit.sklearn.estimator import SearchWarning
from warpfit.sklearn.genomes import Genomes
from warpfit.sklearn.pool import merged

if TYPE_CHECKING:
    from warpfit.sklearn.search import Search
    from warpfit.sklearn.target_search import TargetSearch

#: Seconds between lines of progress on a terminal, and elsewhere; and between checkpoints.
_LINE_SECONDS: Final = (0.3, 5.0)
_CHECKPOINT_SECONDS: Final = 20.0
#: Most characters of a line.
_LINE: Final = 160


@dataclass(slots=True)
class Progress:
    """Shows and saves a search from time to time."""

    checkpoint: Path | None
    started: float
    shown: float = 0.0
    saved: float = 0.0

    def report(self, target: TargetSearch, search: Search) -> bool:
        """Report a generation; return whether the callback ends the search."""
        now = time.monotonic()
        options = target.options
        terminal = sys.stderr is not None and sys.stderr.isatty()
        if options.verbose and now - self.shown >= _LINE_SECONDS[not terminal]:
            self.shown = now
            self._show(target, search, "\r" if terminal else "")
        if self.checkpoint is not None and now - self.saved >= _CHECKPOINT_SECONDS:
            self.saved = now
            self.save(formulas_of(search))
        if options.callback is None:
            return False
        return bool(options.callback(options, search.generation, target.preview(search)))

    def save(self, genomes: Genomes) -> None:
        """Write the checkpoint; a search does not end because its disk is full."""
        if self.checkpoint is None:
            return
        try:
            save(self.checkpoint, genomes)
        except OSError as error:
            warnings.warn(
                f"the checkpoint {self.checkpoint} cannot be written: {error.strerror}. Make room, "
                "or the folder writable, before the search ends",
                SearchWarning,
                stacklevel=caller_level(),
            )

    def _show(self, target: TargetSearch, search: Search, begin: str) -> None:
        best = min(target.preview(search), key=lambda equation: equation.loss)
        line = (
            f"generation {search.generation}  {time.monotonic() - self.started:.1f} s  "
            f"loss {best.loss:.4g}  {best.equation}"
        )[:_LINE]
        end = "" if begin else "\n"
        with suppress(OSError):  # a search does not end because its lines cannot be shown
            print(f"{begin}{line:<{_LINE if begin else 0}}", end=end, file=sys.stderr, flush=True)


def formulas_of(search: Search) -> Genomes:
    """Return all formulas of a search with their constants, best first."""
    pools = [*search.archive, *(island.population for island in search.islands)]
    everything = merged(pools).distinct()
    return everything.best(len(everything)).genomes


def save(path: Path, genomes: Genomes) -> None:
    """Write formulas to a file, which is replaced in one step."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with partial.open("wb") as file:
        np.savez_compressed(file, codes=genomes.codes, values=genomes.values, starts=genomes.starts)
    partial.replace(path)


def load(path: Path, width: int, variables: int) -> Genomes | None:
    """Read formulas that `save` has written; None if there is no such file.

    Raises:
        InvalidArgumentError: if the file is another or does not fit the data or ``max_size``.

    """
    if not path.exists():
        return None
    try:
        with np.load(path, allow_pickle=False) as content:
            genomes = Genomes(content["codes"], content["values"], content["starts"])
        programs = [genomes.program(row) for row in range(len(genomes))]
    except (OSError, LookupError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise _bad_checkpoint(path, str(error)) from error
    if max((program.variables for program in programs), default=0) > variables:
        raise _bad_checkpoint(path, "its formulas have more variables than the data")
    return Genomes.of([program for program in programs if len(program) <= width])


def _bad_checkpoint(path: Path, why: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{path} is no checkpoint of this search: {why}",
        "BAD_CHECKPOINT",
        "Name another file, or delete this one",
        "checkpoint",
    )
