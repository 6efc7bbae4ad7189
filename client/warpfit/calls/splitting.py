"""Splitting evaluations and fits by programs into parts, and joining the results of the parts.

A batch is split where a server refuses it as too large, or where several servers share it. Each
part is an evaluation or a fit of its own; results come back in the order of the programs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Layout
from warpfit.errors import ResourceExhaustedError
from warpfit.fitting import FitProgress, FitRequest, FitResult
from warpfit.request import STAGES, Evaluation, Result

R = TypeVar("R", Evaluation, FitRequest)
S = TypeVar("S", Result, FitResult)

#: Bytes of a token, and of a program beside its tokens and parameters, in a message.
_TOKEN_BYTES: Final = 9
_PROGRAM_BYTES: Final = 8
#: Bytes of a fit for each token and search; they only have to be right in proportion.
_FIT_BYTES: Final = 64, 600


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


def bounds_below(weights: NDArray[np.float64], most: float) -> list[int]:
    """Return the bounds of the fewest parts whose weights add up to at most ``most`` each.

    A program that is heavier by itself is a part of its own; ``weights`` are [programs].
    """
    ends = np.cumsum(weights)
    bounds = [0]
    while bounds[-1] < len(weights):
        start = bounds[-1]
        before = ends[start - 1] if start else 0.0
        stop = int(np.searchsorted(ends, before + most, side="right"))
        bounds.append(max(start + 1, stop))
    return bounds


def even_bounds(weights: NDArray[np.float64], parts: int) -> list[int]:
    """Return the bounds of at most ``parts`` parts of about the same weight, none of them empty."""
    ends = np.cumsum(weights)
    targets = ends[-1] * np.arange(1, parts) / parts
    cuts = np.searchsorted(ends - weights / 2, targets)
    return sorted({0, *cuts.tolist(), len(weights)})


def token_weights(request: Evaluation | FitRequest) -> NDArray[np.float64]:
    """Return the weight of each program as work: its tokens, [programs]."""
    return problem_of(request).batch.lengths.astype(np.float64)


class SearchProgress:
    """Adds up the progress of the parts of a fit, some of which may run at the same time.

    Args:
        request: the whole fit.
        report: the caller's callback, or None.
    """

    def __init__(self, request: FitRequest, report: Callable[[FitProgress], None] | None) -> None:
        self._total, self._report = searches(request), report
        self._latest: dict[FitRequest, FitProgress] = {}
        self._lock = threading.Lock()

    def of_part(self, part: FitRequest) -> Callable[[FitProgress], None] | None:
        """Return what takes the progress of a part; None if nobody asks for it."""
        report = self._report
        if report is None:
            return None

        def take(progress: FitProgress) -> None:
            with self._lock:
                self._latest[part] = progress
                known = self._latest.values()
                ended = sum(one.searches - one.active for one in known)
                running = (one.iterations for one in known if one.active)
                iterations = max(running, default=progress.iterations)
                report(FitProgress(iterations, self._total - ended, self._total))

        return take

    def finish(self, part: FitRequest) -> None:
        """Note that a part has ended."""
        with self._lock:
            self._latest[part] = FitProgress(0, 0, searches(part))


def searches(request: FitRequest) -> int:
    """Return the number of searches of a fit."""
    return len(request.problem.batch) * request.problem.batch.vectors


class KnownLimits:
    """The limits by which a server has refused batches; shared by the calls of one client.

    A refused batch is split by the limit that it names; later batches are split before they are
    sent.
    """

    def __init__(self) -> None:
        self._limits: dict[str, int] = {}

    def bounds(self, request: Evaluation | FitRequest, layout: Layout) -> list[int]:
        """Return the bounds of the parts of a request that are below the known limits."""
        bounds = {0, len(problem_of(request).batch)}
        for reason, limit in self._limits.items():
            weights = _weights(request, layout, reason)
            if weights.sum() > limit:
                bounds.update(bounds_below(weights, limit))
        return sorted(bounds)

    def learn(
        self, error: ResourceExhaustedError, request: Evaluation | FitRequest, layout: Layout
    ) -> list[int]:
        """Return the bounds of the parts of a refused request; raise ``error`` if none can help."""
        programs = len(problem_of(request).batch)
        needed, limit = error.needed, error.available
        is_busy = error.retry_after is not None
        if error.reason not in _REASONS or is_busy or not needed or not limit or programs == 1:
            raise error
        self._limits[error.reason] = limit
        weights = _weights(request, layout, error.reason)
        # What the server counts may be a little more than what is known here.
        bounds = bounds_below(weights * (needed / weights.sum()), 0.95 * limit)
        return bounds if len(bounds) > 2 else [0, programs // 2, programs]


_REASONS: Final = frozenset(
    {"TOO_MANY_PROGRAMS", "TOO_MANY_TOKENS", "RESULT_TOO_LARGE", "MESSAGE_TOO_LARGE"}
)


def problem_of(request: Evaluation | FitRequest) -> Evaluation:
    """Return the evaluation of a request."""
    return request if isinstance(request, Evaluation) else request.problem


def _weights(request: Evaluation | FitRequest, layout: Layout, reason: str) -> NDArray[np.float64]:
    """Return what each program adds to what a limit counts, [programs]."""
    batch = problem_of(request).batch
    counts = batch.parameter_counts.astype(np.float64)
    if reason == "TOO_MANY_PROGRAMS":
        return np.ones(len(batch))
    if reason == "TOO_MANY_TOKENS":
        return token_weights(request)
    if reason == "MESSAGE_TOO_LARGE":
        numbers = 8 * batch.vectors * counts
        if isinstance(request, FitRequest):
            numbers += 17 * counts  # bounds and fixed parameters
        return _TOKEN_BYTES * batch.lengths + _PROGRAM_BYTES + numbers
    if isinstance(request, FitRequest):
        token, search = _FIT_BYTES
        return batch.vectors * (token * batch.lengths + search + 200 * counts + 24 * counts**2)
    return _result_bytes(request, layout, counts)


def _result_bytes(
    evaluation: Evaluation, layout: Layout, counts: NDArray[np.float64]
) -> NDArray[np.float64]:
    _, vectors, rows = evaluation.shape(layout)
    large = evaluation.values + evaluation.jacobian * counts
    variables = layout.variables * evaluation.variable_gradient
    small = 1 + 5 * evaluation.reductions + variables + evaluation.gradient * counts
    return vectors * (8 * small + large * rows * layout.dtype.itemsize)
