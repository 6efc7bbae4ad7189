"""The state of all searches of a fit, as a few flat arrays that compiled code reads and writes.

A search is one program with one start vector. The constants below name the rows and columns of its
numbers, counters and vectors; there are few arrays, because each one costs compile time. Compiled
code may be spread over a few threads (`spread`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit.ir import Batch, Population, pieces
from warpfit.request import REASONS, FitRequest, Reason, even_bounds
from warpfit_server.engine.native.intrinsics import inlined
from warpfit_server.engine.native.numba_cache import NICE
from warpfit_server.machine import available_cores

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

#: Values of the counter REASON: 0 while a search runs, then the wire code of the reason.
RUNNING: Final = 0
GRADIENT: Final = REASONS.index(Reason.GRADIENT) + 1
STEP: Final = REASONS.index(Reason.STEP) + 1
LOSS_CHANGE: Final = REASONS.index(Reason.LOSS) + 1
ITERATIONS_USED: Final = REASONS.index(Reason.ITERATIONS) + 1
DEADLINE: Final = REASONS.index(Reason.DEADLINE) + 1
NOT_FINITE: Final = REASONS.index(Reason.NOT_FINITE) + 1
STALLED: Final = REASONS.index(Reason.STALLED) + 1
#: In fast mode: float32 does not hold the squares at its start, and it has not been advanced.
LEAVES_FLOAT32: Final = -1

# Rows of ``Searches.vectors``.
X: Final = 0  # best parameters so far
TRIAL: Final = 1  # parameters that are evaluated next
LOWER: Final = 2
UPPER: Final = 3
FREE: Final = 4  # 1 where a parameter may move, else 0
SLOPE: Final = 5  # gradient of the sum of row losses at X
SCALE: Final = 6  # Levenberg-Marquardt: scale of each parameter's damping
DIRECTION: Final = 6  # BFGS: direction of the line search
LINEAR: Final = 7  # Levenberg-Marquardt: 1 where the program is linear in the parameter, else 0
BEST: Final = 7  # BFGS: best parameters along the direction with a sufficient decrease
RIGHT: Final = 8  # residuals in the columns' orthogonal basis, see `inverse`
BEST_SLOPE: Final = 8  # BFGS: gradient there
WIDTH: Final = 9  # BFGS: length of a column of the Jacobian when last known, 0 if never or fixed
NATURAL: Final = 10  # scale of the parameter, by the data; see `starts`
VECTORS: Final = 11

# Columns of ``Searches.numbers``.
LOSS: Final = 0  # sum of row losses at X
INITIAL: Final = 1  # sum of row losses at the start
DAMPING: Final = 2  # Levenberg-Marquardt: damping factor
GROWTH: Final = 3  # Levenberg-Marquardt: factor on DAMPING at the next rejected step
BEFORE: Final = 4  # Levenberg-Marquardt: LOSS before the step under judgement
LENGTH: Final = 2  # BFGS: length of the trial step in units of the direction
LOW: Final = 3  # BFGS: longest length known to be too short
HIGH: Final = 4  # BFGS: shortest length known to be too long
BEST_LOSS: Final = 5  # BFGS: sum of row losses at BEST, or infinity
PREDICTED: Final = 6  # Levenberg-Marquardt: predicted decrease by the step
PULL: Final = 6  # BFGS: sum of w (dl/df)^2 of the row loss l when last known, 0 if never
RESTARTED: Final = 7  # Levenberg-Marquardt: LOSS when the damping was last forgotten
STIFFNESS: Final = 7  # BFGS: estimated second derivative of the row loss by its residual
RESTART_LOSS: Final = 8  # BFGS: sum of row losses where the search restarted
PIVOT: Final = 9  # least pivot of the model where a test of convergence last asked for it
PROMISE: Final = 10  # Levenberg-Marquardt: greatest of the steps refused since RESTARTED
NUMBERS: Final = 11

# Columns of ``Searches.counters``.
REASON: Final = 0
ITERATIONS: Final = 1
EVALUATIONS: Final = 2
CORRECTING: Final = 3  # Levenberg-Marquardt: whether the trial corrects the previous one, and how
TRIALS: Final = 3  # BFGS: evaluations along this direction
UPDATES: Final = 4  # BFGS: updates of the inverse since it was set up
ENDING: Final = 5  # BFGS: 0, or why the search waits for being inspected: BEGINS or a reason
RESTARTS: Final = 6  # BFGS: how often the search has restarted
REFUSED: Final = 4  # Levenberg-Marquardt: steps refused in a row
FIRED: Final = 5  # Levenberg-Marquardt: reason that the search would have ended with, without it
ASKED: Final = 6  # Levenberg-Marquardt: 1 if there has been a factor
FACTOR: Final = 7  # state of the orthogonal factor
PROBES: Final = 8  # perturbations of the search, see `starts`
PROBING: Final = 9  # 1 if the trial is a perturbed point, 2, 3, ... if a step from it, else 0
PLATEAU: Final = 10  # what a perturbation has shown of parameters without effect, see `starts`
COUNTERS: Final = 11
#: Value of ENDING of a search that has not been inspected yet.
BEGINS: Final = -1

# Values of the counter FACTOR. Levenberg-Marquardt goes on with a factor where the curvature is
# ill-conditioned; BFGS takes one only to know whether it has converged.
NO_FACTOR: Final = 0
WANTED: Final = 1
READY: Final = 2
USELESS: Final = 3

# Values of the counter PLATEAU.
NO_PLATEAU: Final = 0
LEAVING: Final = 1  # the perturbed point is not evaluated yet
SEEN: Final = 2  # parameters without effect have one at the perturbed point

# Columns of ``Searches.edges``.
PARAMETERS: Final = 0
PAIRS: Final = 1
SQUARES: Final = 2


class SearchLimits(NamedTuple):
    """Tolerances and iterations that end a search, see `FitSettings`."""

    gradient: float
    step: float
    loss: float
    iterations: int
    single: bool
    """Whether the engine rounds parameters to float32."""
    flat: float
    """Largest cosine between the residuals and their projection on the columns of their Jacobian at
    which a search may say that it has converged."""
    target: float
    """Sum of w y^2; 0 for row losses other than squares."""
    variation: float
    """Sum of w (y - m)^2, where m is the weighted mean of y; 0 for row losses other than squares.
    """
    squares: bool
    """Whether the row loss is the squared difference."""
    kinks: bool
    """Whether the row loss may have kinks."""


@dataclass(slots=True, eq=False)
class Searches:
    """S searches with P parameters in total, T pairs of parameters and Q squares of counts."""

    edges: Integers
    """[S + 1, 3]: first parameter, pair and square of each search, and P, T, Q."""
    vectors: Floats
    """[VECTORS, P]."""
    numbers: Floats
    """[S, NUMBERS]."""
    counters: Integers
    """[S, COUNTERS]."""
    curvature: Floats
    """Sum of w (df/dp_i) (df/dp_j) at X, lower triangles row by row; [T]."""
    inverse: Floats
    """BFGS: estimate of the inverse of the second derivatives. Of a search that wants it, the
    factor R of W^1/2 J = Q R at X, above zeros, where row RIGHT of ``vectors`` has Q^T W^1/2 times
    the residuals; [Q], or empty."""

    @classmethod
    def begin(
        cls, request: FitRequest, batch: Batch, natural: Floats, dtype: np.dtype[Any]
    ) -> Searches:
        """Set the searches of a request up at their starts; ``batch`` has one program for each.

        ``natural`` are the scales of the parameters of the request's programs.
        Starts are moved into the bounds. The range of ``dtype``, the data set's, bounds every
        parameter, because a program can have a finite loss where a parameter is infinite: a search
        that steps beyond the range ends inside it.
        """
        settings, problem = request.settings, request.problem.batch
        places: Any = slice(None)
        if problem.vectors > 1:
            programs = np.repeat(np.arange(len(problem)), problem.vectors)
            places = pieces(problem.parameter_starts // problem.vectors, programs)

        def for_each_start(given: NDArray[Any] | None, default: float) -> Floats:
            of_all = np.full(len(batch.parameters), default)
            return of_all if given is None else given[places].astype(np.float64)

        largest = float(np.finfo(dtype).max)
        lower = for_each_start(settings.lower, -np.inf).clip(-largest, largest)
        upper = for_each_start(settings.upper, np.inf).clip(-largest, largest)
        free = for_each_start(settings.fixed, 0.0) == 0.0
        start = batch.parameters.astype(np.float64)
        edges = _edges(batch.parameter_counts.astype(np.int64))
        vectors = np.zeros((VECTORS, len(start)))
        vectors[X] = vectors[TRIAL] = np.where(free, np.clip(start, lower, upper), start)
        vectors[LOWER], vectors[UPPER], vectors[FREE] = lower, upper, free
        vectors[NATURAL] = for_each_start(natural, 1.0)
        numbers = np.zeros((len(batch), NUMBERS))
        numbers[:, (LOSS, INITIAL)] = np.nan
        numbers[:, BEST_LOSS] = np.inf
        return cls(
            edges=edges,
            vectors=vectors,
            numbers=numbers,
            counters=np.zeros((len(batch), COUNTERS), dtype=np.int64),
            curvature=np.zeros(int(edges[-1, PAIRS])),
            inverse=np.empty(0),
        )

    def __len__(self) -> int:
        """Count the searches."""
        return len(self.numbers)

    @property
    def counts(self) -> Integers:
        """Number of parameters of each search, [S]."""
        return np.diff(self.edges[:, PARAMETERS])

    @property
    def running(self) -> NDArray[np.bool_]:
        """Which searches have not ended, [S]."""
        return np.asarray(self.counters[:, REASON] == RUNNING)

    def interrupt(self) -> None:
        """End the running searches; keep a better point that a line search has found."""
        running = self.running
        better = running & (self.numbers[:, BEST_LOSS] < self.numbers[:, LOSS])
        columns = np.repeat(better, self.counts)
        self.vectors[X, columns] = self.vectors[BEST, columns]
        self.numbers[better, LOSS] = self.numbers[better, BEST_LOSS]
        self.counters[running, REASON] = DEADLINE

    def make_room_for_inverse(self) -> None:
        """Allocate the inverse or factor."""
        self.inverse = np.zeros(int(self.edges[-1, SQUARES]))

    def only(self, mask: NDArray[np.bool_]) -> Searches:
        """Copy the state of the searches where ``mask`` [S] is true."""
        counts = self.counts
        squares = np.repeat(mask, counts * counts) if len(self.inverse) else slice(0)
        return Searches(
            edges=_edges(counts[mask]),
            vectors=np.ascontiguousarray(self.vectors[:, np.repeat(mask, counts)]),
            numbers=self.numbers[mask],
            counters=self.counters[mask],
            curvature=self.curvature[np.repeat(mask, pairs(counts))],
            inverse=self.inverse[squares],
        )

    def store(self, places: Integers, searches: Searches) -> None:
        """Overwrite the state of the searches at ``places``, ascending, but for the inverse."""
        mask = np.zeros(len(self), dtype=bool)
        mask[places] = True
        self.vectors[:, np.repeat(mask, self.counts)] = searches.vectors
        self.numbers[mask] = searches.numbers
        self.counters[mask] = searches.counters
        self.curvature[np.repeat(mask, pairs(self.counts))] = searches.curvature


def one_vector_each(batch: Batch) -> Batch:
    """Repeat each program for each of its parameter vectors."""
    if batch.vectors == 1:
        return batch
    programs = np.repeat(np.arange(len(batch)), batch.vectors)
    repeated = Population(batch.codes, batch.values, batch.lengths)[programs]
    tokens = repeated.codes, repeated.values, repeated.lengths
    return Batch(*tokens, batch.parameter_counts[programs], batch.parameters)


def pairs(counts: Integers) -> Integers:
    """Return the sizes of the lower triangles of matrices with so many columns."""
    return counts * (counts + 1) // 2


def diagonals(counts: Integers) -> Integers:
    """Return the places of the diagonals in consecutive lower triangles, [sum(counts)]."""
    first = np.cumsum(pairs(counts)) - pairs(counts)
    starts = np.cumsum(counts) - counts
    index = np.arange(int(counts.sum())) - np.repeat(starts, counts)
    return np.asarray(np.repeat(first, counts) + index * (index + 3) // 2)


def _edges(counts: Integers) -> Integers:
    edges = np.zeros((len(counts) + 1, 3), dtype=np.int64)
    np.cumsum(np.stack([counts, pairs(counts), counts * counts], axis=1), axis=0, out=edges[1:])
    return edges


@inlined
def parts_of(
    s: int,
    edges: Integers,
    vectors: Floats,
    numbers: Floats,
    counters: Integers,
    gradients: Floats,
) -> Any:
    """Return views of the vectors, numbers, counters and new gradient of search ``s``."""
    begin, end = edges[s, PARAMETERS], edges[s + 1, PARAMETERS]
    # A step makes the type of the gradient that of a row of the vectors. So functions that take
    # either are compiled once.
    return vectors[:, begin:end], numbers[s], counters[s], gradients[begin:end:1]


@inlined
def find_moving(vector: Floats, point: int, slope: Floats, moving: Any) -> None:
    """Find the parameters that take part in the next step: free, and not pushed out of a bound.

    Args:
        vector: `Searches.vectors` of one search, [:, n].
        point: row of ``vector`` with the parameters that the step begins at.
        slope: gradient there, [n].
        moving: receives the answer, bool [n].
    """
    for i in range(vector.shape[1]):
        x = vector[point, i]
        below = x <= vector[LOWER, i] and slope[i] > 0.0
        above = x >= vector[UPPER, i] and slope[i] < 0.0
        moving[i] = vector[FREE, i] != 0.0 and not below and not above


@inlined
def within(vector: Floats, i: int, value: float, limits: SearchLimits) -> float:
    """Round a value of parameter ``i`` as the engine does, and move it into the bounds."""
    if limits.single:
        value = float(np.float32(value))
    inside: float = min(max(value, vector[LOWER, i]), vector[UPPER, i])
    return inside


@inlined
def ends(counter: Integers, steepest: float, tolerance: float, limits: SearchLimits) -> bool:
    """End a search at a point where the loss is flat, or whose iterations are used up."""
    if steepest <= tolerance:
        counter[REASON] = GRADIENT
    elif counter[ITERATIONS] >= limits.iterations:
        counter[REASON] = ITERATIONS_USED
    return bool(counter[REASON] != RUNNING)


# -------------------------------------------------------------------------- work of several threads

_THREADS: Final = ThreadPoolExecutor(available_cores(), "spread", os.nice, (NICE,))
#: Least microseconds of work for each thread: until one has woken up and has been waited for, some
#: 200 have passed.
_LEAST: Final = 500.0
#: Tokens of programs on which compiled code works in a microsecond.
TOKENS: Final = 40.0


def spread(work: NDArray[np.float64], threads: int, do: Callable[[slice], None]) -> None:
    """Call a function for consecutive programs or searches, on a few threads at the same time.

    Args:
        work: estimated microseconds of each.
        threads: most threads that gain from it.
        do: is called with ranges that make up all; compiled code for the most part.
    """
    threads = min(threads, int(work.sum() / _LEAST))
    if threads < 2:
        do(slice(0, len(work)))
        return
    bounds = even_bounds(work, threads)
    for done in [_THREADS.submit(do, slice(*edge)) for edge in pairwise(bounds)]:
        done.result()
