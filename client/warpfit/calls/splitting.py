"""Splitting evaluations and fits by programs into parts, and joining the results of the parts.

A batch is split where a server refuses it as too large. Each part is an evaluation or a fit of its
own, one is sent after the other, and the results come back in the order of the programs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Layout
from warpfit.errors import ResourceExhaustedError, WarpfitError
from warpfit.request import FURTHER_OUTPUTS, STAGES, Evaluation, FitRequest, FitResult, Result

R = TypeVar("R", Evaluation, FitRequest)
S = TypeVar("S", Result, FitResult)


def split(request: R, bounds: Sequence[int]) -> list[R]:
    """Split by programs; ``bounds`` are those of the parts, 0 and the number of programs too."""
    return [_part(request, start, stop) for start, stop in pairwise(bounds)]


def _part(request: R, start: int, stop: int) -> R:
    if isinstance(request, Evaluation):
        return replace(request, batch=request.batch[start:stop])
    problem, settings = request.problem, request.settings
    ends = np.concatenate([[0], np.cumsum(problem.batch.parameter_counts, dtype=np.int64)])
    own = slice(int(ends[start]), int(ends[stop]))
    arrays: dict[str, Any] = {
        name: None if (array := getattr(settings, name)) is None else array[own]
        for name in ("lower", "upper", "fixed")
    }
    return replace(
        request, problem=_part(problem, start, stop), settings=replace(settings, **arrays)
    )


def join(results: Sequence[S]) -> S:
    """Join the results of the parts of one request, in their order.

    Every array of a result has the programs, or numbers in the order of the programs, on its first
    axis. The durations of the stages are added.
    """
    first = results[0]
    if len(results) == 1:
        return first
    joined: dict[str, Any] = {}
    for field in fields(first):
        parts = [getattr(result, field.name) for result in results]
        if isinstance(parts[0], np.ndarray):
            joined[field.name] = np.concatenate(parts)
    sums = {
        name: sum(getattr(result.timings, name) for result in results)
        for name in (*STAGES, "cache_hits")
    }
    return replace(first, timings=replace(first.timings, **sums), **joined)


def even_bounds(weights: NDArray[np.float64], parts: int) -> list[int]:
    """Return the bounds of at most ``parts`` parts of about the same weight, none of them empty."""
    ends = np.cumsum(weights)
    targets = ends[-1] * np.arange(1, parts) / parts
    cuts = np.searchsorted(ends - weights / 2, targets)
    return sorted({0, *cuts.tolist(), len(weights)})


def searches(request: FitRequest) -> int:
    """Return the number of searches of a fit."""
    return len(request.problem.batch) * request.starts


class KnownLimits:
    """The most work of each kind of request that a server takes; shared by one client's calls.

    A refused batch is split by how far it is above the limit, and a part that is refused again;
    later batches of the kind are split before they are sent.
    """

    def __init__(self) -> None:
        self._most: dict[tuple[Any, ...], float] = {}

    def call_in_parts(self, request: R, layout: Layout, call: Callable[[R], S]) -> S:
        """Return the result of a request, or of its parts where the server refuses it as too large.

        Args:
            request: an evaluation or a fit.
            layout: of its data set.
            call: sends a request and returns its result.

        Raises:
            WarpfitError: what ``call`` raises, with the index of the expression in the whole batch.
        """
        bounds = self._bounds(request, layout)
        if len(bounds) == 2:
            try:
                return call(request)
            except ResourceExhaustedError as error:
                programs = len(problem_of(request).batch)
                needed, limit = error.needed, error.available
                cannot_help = error.reason not in _REASONS or error.retry_after is not None
                if cannot_help or not needed or not limit or programs == 1:
                    raise
                # Programs of the same weight may differ a little in what the server counts.
                most = 0.95 * min(limit / needed, 1.0) * _weights(request).sum()
                kind = _kind(request, layout)
                self._most[kind] = min(most, self._most.get(kind, math.inf))
                bounds = self._bounds(request, layout)
                bounds = bounds if len(bounds) > 2 else [0, programs // 2, programs]
        results = []
        for start, part in zip(bounds, split(request, bounds), strict=False):
            try:
                results.append(self.call_in_parts(part, layout, call))
            except WarpfitError as error:
                error.expression = None if error.expression is None else error.expression + start
                raise
        return join(results)

    def _bounds(self, request: Evaluation | FitRequest, layout: Layout) -> list[int]:
        """Return the bounds of the parts of a request that a server has not refused yet."""
        most = self._most.get(_kind(request, layout)) if self._most else None
        if most is None:
            return [0, len(problem_of(request).batch.lengths)]
        weights = _weights(request)
        return even_bounds(weights, math.ceil(min(weights.sum() / most, len(weights))))


_REASONS: Final = frozenset(
    {"TOO_MANY_PROGRAMS", "TOO_MANY_TOKENS", "RESULT_TOO_LARGE", "MESSAGE_TOO_LARGE"}
)


def problem_of(request: Evaluation | FitRequest) -> Evaluation:
    """Return the evaluation of a request."""
    return request if isinstance(request, Evaluation) else request.problem


def _weights(request: Evaluation | FitRequest) -> NDArray[np.float64]:
    """Return the weight of each program in work and messages: its tokens and parameters."""
    batch = problem_of(request).batch
    return np.add(batch.lengths, batch.parameter_counts, dtype=np.float64) + 1.0


def _kind(request: Evaluation | FitRequest, layout: Layout) -> tuple[Any, ...]:
    """Return the options of a request that decide, beside its programs, how much work it is."""
    problem = problem_of(request)
    outputs = (getattr(problem, name) for name in ("values", *FURTHER_OUTPUTS))
    _, vectors, rows = problem.shape(layout)
    starts = request.starts if isinstance(request, FitRequest) else vectors
    return type(request), starts, rows, layout.variables, *outputs
