"""Batches of searches: each program of a request once for each of its starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warpfit.fitting import FitRequest
from warpfit.ir import Batch
from warpfit_server.engine.fit.searches import Floats, Integers, Searches


def one_vector_each(batch: Batch) -> Batch:
    """Repeat each program for each of its parameter vectors."""
    if batch.vectors == 1:
        return batch
    programs = np.repeat(np.arange(len(batch)), batch.vectors)
    lengths = batch.lengths[programs]
    tokens = _ranges(batch.starts[programs], lengths)
    return Batch(
        codes=batch.codes[tokens],
        values=batch.values[tokens],
        lengths=lengths,
        parameter_counts=batch.parameter_counts[programs],
        parameters=batch.parameters,
    )


def begin_searches(request: FitRequest, batch: Batch, dtype: np.dtype[Any]) -> Searches:
    """Set the searches of a request up; ``batch`` has one program for each.

    The range of ``dtype``, the data set's, bounds every parameter, because a program can have a
    finite loss where a parameter is infinite: a search that steps beyond the range ends inside it.
    """
    settings, problem = request.settings, request.problem.batch
    counts = batch.parameter_counts.astype(np.int64)
    start = np.array(batch.parameters, dtype=np.float64)
    programs = np.repeat(np.arange(len(problem)), problem.vectors)
    one_vector = replace(problem, vectors=1, parameters=np.empty(0))
    places = _ranges(one_vector.parameter_starts[programs], counts)

    def for_each_start(given: NDArray[np.float64] | None, default: float) -> Floats:
        return np.full(len(start), default) if given is None else given[places].astype(np.float64)

    largest = float(np.finfo(dtype).max)

    def bounds(given: NDArray[np.float64] | None, default: float) -> Floats:
        return np.clip(for_each_start(given, default), -largest, largest)

    fixed = None if settings.fixed is None else settings.fixed.astype(np.float64)
    return Searches.begin(
        counts,
        start,
        bounds(settings.lower, -np.inf),
        bounds(settings.upper, np.inf),
        for_each_start(fixed, 0.0) == 0.0,
    )


def _ranges(starts: Integers, lengths: NDArray[np.integer]) -> Integers:
    """Return the numbers of ranges, one range after the other."""
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    return np.asarray(np.arange(total) + np.repeat(starts - (ends - lengths), lengths))
