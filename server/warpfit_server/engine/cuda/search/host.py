"""Searches of a GPU's engine that its colony does not know, on the threads of its host.

The device's colony scores genomes that are whole formulas. Where they call functions (templates,
functions of the caller), or have to rise and fall with variables, the CPU's engine searches.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Dataset
from warpfit.searching import SearchProgress, SearchRequest
from warpfit_server.engine.evaluation import LoadedDatasets
from warpfit_server.engine.interface import Passes, Steps
from warpfit_server.engine.native.compile_processes import WANTED

if TYPE_CHECKING:
    from warpfit_server.engine.cpu.engine import CpuEngine


class HostSearches:
    """The CPU's engine beside a GPU's, which begins with the first search that needs it.

    Args:
        threads: threads that it may use.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._engine: Future[CpuEngine] | None = None

    @staticmethod
    def are_needed(request: SearchRequest) -> bool:
        """Return whether a search is one that the device does not know."""
        is_composed = request.template is not None or bool(request.definitions)
        return is_composed or bool(request.monotonic)

    def search(
        self,
        request: SearchRequest,
        datasets: Passes,
        *,
        cancelled: NDArray[np.uint8],
        report: Callable[[SearchProgress], None],
    ) -> Steps[SearchProgress]:
        """Search for formulas; see `warpfit_server.engine.interface.Engine.search`."""
        if self._engine is None:
            self._engine = WANTED.submit(self._begin)
        yield self._engine
        engine, given = self._engine.result(), datasets.whole(request.dataset_id)
        # Another search may have the same data.
        own = Dataset.resident(given.layout, given.matrix, os.urandom(32))
        loaded = LoadedDatasets(engine)
        loaded.load(own)
        try:
            asked = replace(request, dataset_id=own.content_id)
            return (yield from engine.search(asked, loaded, cancelled=cancelled, report=report))
        finally:
            loaded.unload(own.content_id)

    def close(self) -> None:
        """Stop the threads."""
        engine = self._engine
        if engine is not None and not engine.cancel() and engine.exception() is None:
            engine.result().close()

    def _begin(self) -> CpuEngine:
        # Imported on first use, because importing it delays the start of the server.
        from warpfit_server.engine.cpu.engine import CpuEngine

        return CpuEngine(self._threads)
