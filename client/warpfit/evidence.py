"""The evidence for fitted formulas: how sure one may be of a formula, its constants and its terms.

Everything but `gather` is NumPy on what a fit returns, for losses of squared differences: residuals
are taken for independent and normal, with the variance s^2 / w_i in row i of weight w_i. Notation:

    n    rows whose weight is not 0
    p    parameters that occur in the formula and are not fixed
    S    weighted sum of squares at the fitted parameters
    A    J^T W J there, where J are the derivatives of the values by the parameters
    r    rank of A, scaled to a unit diagonal

`warpfit.Client.optimize` with ``evidence=True`` has `Evidence.of` compute what takes no further
fit; ``intervals`` and ``terms`` ask for the rest. `warpfit.calls.results.Fit.band` has bands for
predictions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from warpfit.display import TextTable
from warpfit.errors import DeadlineExceededError, InvalidArgumentError
from warpfit.expressions.language import DIGITS, FREE, cost, to_text
from warpfit.ir import Program, subtree_starts
from warpfit.losses import Closing, TargetStatistics
from warpfit.ops import ARITIES, CONSTANT, FIRST_OPERATOR, OPERATORS, PARAMETER

if TYPE_CHECKING:
    from warpfit.calls.arguments import FitOptions
    from warpfit.calls.dataset_handle import DatasetHandle
    from warpfit.request import FitRequest, FitResult
    from warpfit.transport.call import Deadline

Floats = NDArray[np.float64]

#: Eigenvalue of A, scaled to a unit diagonal, below which a direction is undetermined; for float32
#: data, whose columns are rounded.
_RANK_TOLERANCE: Final = 1e-12
_RANK_TOLERANCE_FLOAT32: Final = 1e-11
#: Part of the loss of the best constant below which losses count as equal: rounding.
ROUNDING: Final = 1e-18
#: Rounds of a search for profile likelihoods, and the relative error of its roots.
_ROUNDS: Final = 24
_ROOT_ERROR: Final = 1e-4
#: Most standard errors, or multiples of a parameter without one, that an interval is looked for.
_FARTHEST: Final = 1e4


# -------------------------------------------------------------------------------- distributions


def log_likelihood(squares: Floats, rows: int, log_weights: float = 0.0) -> Floats:
    """Return the logarithm of the likelihood at its maximum, where s^2 = S / n.

    It is -n/2 (log(2 pi S / n) + 1) + sum log(w_i) / 2 (Seber and Wild, "Nonlinear Regression",
    1989, section 2.2.1). S, of any shape, gives infinity where it is 0. ``log_weights`` is the sum
    of the logarithms of the weights that are not 0.
    """
    with np.errstate(divide="ignore"):
        variance = np.asarray(squares) / rows
        return np.asarray(0.5 * log_weights - 0.5 * rows * (np.log(2.0 * math.pi * variance) + 1.0))


def student_t(level: float, freedom: float) -> float:
    """Return t with P(|T| < t) = level for Student's distribution; NaN without any freedom.

    Up to 1,000 degrees of freedom the finite series of Abramowitz and Stegun (1964), 26.7.3 and
    26.7.4, is inverted by bisection; above that the expansion 26.7.5 has seven digits.
    """
    z = NormalDist().inv_cdf((1.0 + level) / 2.0)
    if freedom < 1:
        return math.nan
    if freedom > 1000:
        first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
        third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
        fourth = (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160
        terms = first, second, third, fourth
        return float(z + sum(term / freedom**k for k, term in enumerate(terms, 1)))
    n = int(freedom)
    k = np.arange(1 + n % 2, n - 2, 2)
    low, high = 0.0, math.pi / 2.0
    for _ in range(60):
        angle = (low + high) / 2.0  # t = sqrt(n) tan(angle)
        sine, cosine = math.sin(angle), math.cos(angle)
        series = sine * (1.0 + float(np.cumprod(k / (k + 1) * cosine**2).sum()))
        odd = 2.0 / math.pi * (angle + (cosine * series if n > 1 else 0.0))
        low, high = (angle, high) if (odd if n % 2 else series) < level else (low, angle)
    return math.sqrt(n) * math.tan(high)


# ------------------------------------------------------------------------------------ criteria


def code_length(program: Program) -> float:
    """Return the length of a program's structure in nats: k log m + sum log |c_j|.

    k are its tokens and m the different symbols among them: operators, variables, and one for
    parameters and constants. c_j are its whole constants; one that is not whole counts as its
    significant decimal digits (Bartlett, Desmond and Ferreira, "Exhaustive symbolic regression",
    IEEE Trans. Evol. Comput. 28, 2023, equation 4).
    """
    codes, values = program.codes, program.values
    is_number = (codes == PARAMETER) | (codes == CONSTANT)
    symbols = {
        (int(code), float(value) if code < FIRST_OPERATOR else 0.0)
        for code, value in zip(codes[~is_number], values[~is_number], strict=True)
    }
    length = len(program) * math.log(max(1, len(symbols) + bool(is_number.any())))
    for constant in values[codes == CONSTANT].tolist():
        if not math.isfinite(constant):
            continue
        digits = f"{abs(constant):.15e}".split("e")[0].replace(".", "").rstrip("0")
        whole = constant == round(constant)
        length += math.log(max(1.0, abs(constant))) if whole else len(digits) * math.log(10.0)
    return length


def price_of(program: Program) -> float:
    """Return the description length of a formula's constants.

    Each occurrence of a constant counts 1, or less if it has a short form, such as 2 or 1/3.
    """
    return sum(map(cost, program.values[program.codes == CONSTANT].tolist())) / FREE


def description_length(deviance: float, size: float, price: float, rows: float) -> float:
    """Return the description length of data by a formula in nats: -log L + k log(rows) / 2.

    k is the size of the formula and the price of its constants (Rissanen, "Modeling by shortest
    data description", Automatica 14, 1978, with each token as a parameter of the structure, which
    was searched for, too). It compares formulas for the same rows, whoever has found them: the
    tables of searches, `Evidence` and `warpfit.Client.propose` call this function.

    Args:
        deviance: -2 log L. For losses of squares L is normal, see `log_likelihood`; a sum of
            squares below `ROUNDING` of that of the best constant is rounding, and counts as that.
        size: tokens of the formula, or the complexity that a search was given.
        price: of its constants, see `price_of`.
        rows: number of rows.
    """
    return 0.5 * (deviance + (size + price) * math.log(max(rows, 2.0)))


def description_lengths(
    formulas: Sequence[Program], squares: Floats, statistics: TargetStatistics
) -> Floats:
    """Return the description lengths of rows by formulas without parameters, [formulas].

    Args:
        formulas: with their constants.
        squares: S of each, [formulas]; NaN gives NaN.
        statistics: of the target and the weights of these rows.
    """
    rows, log_weights = _count(statistics)
    with np.errstate(invalid="ignore"):
        least = max(ROUNDING * statistics.variation, math.ulp(0.0))
        deviances = -2.0 * log_likelihood(np.maximum(squares, least), max(1, rows), log_weights)
    each = zip(deviances.tolist(), formulas, strict=True)
    return np.array([description_length(d, len(f), price_of(f), rows) for d, f in each])


def _count(statistics: TargetStatistics) -> tuple[int, float]:
    """Return the number of rows whose weight is not 0, and the sum of their weights' logarithms."""
    weights = statistics.weights
    if weights is None:
        return len(statistics.target), 0.0
    used = weights[weights > 0.0].astype(np.float64)
    return len(used), float(np.log(used).sum())


def fractional_bayes_factor(
    program: Program, parameters: int, rows: int, likelihood: float
) -> float:
    """Return the logarithm of the fractional Bayes factor of a formula, with a prior for it.

    It is (1 - b) log(likelihood) + p log(b) / 2 with b = 1 / sqrt(n), by Laplace's method (O'Hagan,
    "Fractional Bayes factors for model comparison", J. R. Stat. Soc. B 57, 1995), and the prior of
    the formula is exp(-`code_length`) (Bartlett, Desmond and Ferreira, "Priors for symbolic
    regression", GECCO 2023). The difference of two formulas' is the logarithm of their odds.
    """
    share = 1.0 / math.sqrt(rows)
    whole = (1.0 - share) * likelihood + 0.5 * parameters * math.log(share)
    return whole - code_length(program)


@np.errstate(all="ignore")
def covariance_of(
    curvatures: Floats,
    free: NDArray[np.bool_],
    squares: Floats,
    rows: int | None,
    tolerance: float = _RANK_TOLERANCE,
) -> tuple[Floats, NDArray[np.int64]]:
    """Return the covariances of the parameters of some fits, [fits, p, p], and their r, [fits].

    A covariance is S / (n - r) times the pseudo-inverse of A over the free parameters (Seber and
    Wild 1989, section 2.1.2). A direction has no information if its eigenvalue of A, scaled to a
    unit diagonal, is below ``tolerance`` times p. A parameter that such a direction moves has NaN,
    and so has every one if n <= r, or if A is not finite. Fixed parameters have 0.

    Args:
        curvatures: A of each fit, [fits, p, p].
        free: parameters that are not fixed, [fits, p].
        squares: S of each fit, [fits].
        rows: n; None if weights are inverse variances, so that the variance is 1.
        tolerance: see above.
    """
    both = free[:, :, None] & free[:, None, :]
    matrices = np.where(both, curvatures, 0.0)
    usable = np.isfinite(matrices).all(axis=(1, 2))
    matrices[~usable] = 0.0
    scale = np.sqrt(np.maximum(np.diagonal(matrices, axis1=1, axis2=2), 0.0))
    scale = np.where(scale > 0.0, scale, 1.0)
    values, vectors = np.linalg.eigh(matrices / (scale[:, :, None] * scale[:, None, :]))
    kept = values > tolerance * matrices.shape[1]
    ranks = kept.sum(axis=1)
    inverse = vectors * np.where(kept, 1.0 / values, 0.0)[:, None, :] @ vectors.swapaxes(1, 2)
    inverse /= scale[:, :, None] * scale[:, None, :]
    known = usable if rows is None else usable & (rows > ranks)
    variance = 1.0 if rows is None else squares / (rows - ranks)
    variance = np.where(known, variance, np.nan)
    lost = np.einsum("sik,sk->si", np.square(vectors), (~kept).astype(np.float64)) > 1e-8
    lost &= free
    inverse[lost[:, :, None] | lost[:, None, :]] = np.nan
    return np.where(both, inverse * variance[:, None, None], 0.0), ranks


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """The evidence for each formula of a fit; arrays are [expressions], logarithms natural.

    The best formula has the least `aic`, `bic` or `description_length`, or the largest
    `bayes_factor`. One with as many parameters as rows has the worst that there are, because its
    likelihood says nothing; NaN stands for a loss that is not finite. Rows that a fit has left out
    (``missing="drop"``) count with their penalty, also in variances and standard errors: give such
    rows the weight 0 for those of the others. Weights are relative, also with
    ``absolute_sigma``, which standard errors and bands of the fit follow.
    """

    rows: int
    """n, the rows whose weight is not 0."""
    parameters: NDArray[np.int64]
    """p, the parameters that occur in the formula and are not fixed."""
    log_likelihood: Floats
    """See the function of this name."""
    aic: Floats
    """2 (p + 1) - 2 log(likelihood); the variance counts as a parameter (Akaike, IEEE Trans. Autom.
    Control 19, 1974)."""
    bic: Floats
    """(p + 1) log(n) - 2 log(likelihood) (Schwarz, Ann. Stat. 6, 1978)."""
    description_length: Floats
    """See the function of this name; that of the formulas with their fitted constants."""
    bayes_factor: Floats
    """Natural logarithm of the Bayes factor, see `fractional_bayes_factor`; it may be negative."""
    variance: Floats
    """S / (n - r), the variance of the residuals."""
    freedom: NDArray[np.int64]
    """n - r."""
    covariances: list[Floats]
    """Covariance matrix of each formula, [parameters, parameters]; see `covariance_of`. Fixed
    parameters have 0."""
    standard_errors: list[Floats]
    """Standard errors of each formula, [parameters]; NaN where the data determine no value."""
    undetermined: list[NDArray[np.bool_]]
    """Whether the data determine no value, for each formula, [parameters]."""
    warnings: list[list[str]]
    """Warnings about the constants of each formula."""
    intervals: list[Floats] | None = None
    """Profile-likelihood intervals of each formula, [parameters, 2]; see `profile_intervals`. None
    if not requested, NaN where there was no time for them (``partial``)."""
    terms: list[list[Term]] | None = None
    """Terms of each formula with their contributions; None if not requested. Their losses are NaN
    where there was no time for them (``partial``)."""

    @classmethod
    def of(
        cls,
        programs: Sequence[Program],
        parameters: Sequence[Floats],
        curvatures: Sequence[Floats],
        squares: Floats,
        statistics: TargetStatistics,
        fixed: Sequence[NDArray[np.bool_]],
        occurring: Sequence[NDArray[np.bool_]],
    ) -> Evidence:
        """Compute the evidence for fitted programs.

        Each has its fitted parameters, A over all of them, S in ``squares`` [programs], which of
        its parameters were not fitted, and which occur in it.
        """
        count, log_weights = _count(statistics)
        rows = max(1, count)
        single = statistics.target.dtype.itemsize == 4
        tolerance = _RANK_TOLERANCE_FLOAT32 if single else _RANK_TOLERANCE
        likelihood = log_likelihood(squares, rows, log_weights)
        formulas = [p.bind(own) for p, own in zip(programs, parameters, strict=True)]
        lengths = description_lengths(formulas, squares, statistics)
        masks = [own & ~kept for own, kept in zip(occurring, fixed, strict=True)]
        counts = np.array([int(mask.sum()) for mask in masks], dtype=np.int64)
        factors, covariances, ranks = [], [], []
        for i, program in enumerate(programs):
            found, rank = covariance_of(
                curvatures[i][None], ~fixed[i][None], squares[i : i + 1], rows, tolerance
            )
            covariances.append(found[0])
            ranks.append(int(rank[0]))
            value = float(likelihood[i])
            factors.append(fractional_bayes_factor(program, int(counts[i]), rows, value))
        errors = [np.sqrt(np.diagonal(matrix)) for matrix in covariances]
        undetermined = [np.isnan(each) for each in errors]
        freedom = count - np.array(ranks, dtype=np.int64)
        with np.errstate(divide="ignore", invalid="ignore"):
            variance = np.where(freedom > 0, squares / freedom, np.nan)
        worst = np.where(np.isnan(squares), np.nan, np.inf)
        is_worst = (counts >= count) & (counts > 0)
        of_each = (parameters, errors, undetermined, occurring, counts, squares)
        return cls(
            rows=count,
            parameters=counts,
            log_likelihood=likelihood,
            aic=np.where(is_worst, worst, 2.0 * (counts + 1) - 2.0 * likelihood),
            bic=np.where(is_worst, worst, (counts + 1) * math.log(rows) - 2.0 * likelihood),
            description_length=np.where(is_worst, worst, lengths),
            bayes_factor=np.where(is_worst, -worst, factors),
            variance=variance,
            freedom=freedom,
            covariances=covariances,
            standard_errors=errors,
            undetermined=undetermined,
            warnings=[
                _warnings(*each) for each in zip(*of_each, [count] * len(counts), strict=True)
            ],
        )

    def __str__(self) -> str:
        """Return a small table with a row for each formula."""
        columns = ("log_likelihood", "aic", "bic", "description_length", "bayes_factor")
        rows = [
            (str(i), *(f"{getattr(self, name)[i]:.6g}" for name in columns), "; ".join(warnings))
            for i, warnings in enumerate(self.warnings)
        ]
        header = (*columns[:-1], "log_bayes_factor", "warnings")
        return TextTable(("expression", *header), rows).text()


def _warnings(
    parameters: Floats,
    errors: Floats,
    lost: NDArray[np.bool_],
    occurs: NDArray[np.bool_],
    count: int,
    squares: float,
    rows: int,
) -> list[str]:
    """Return warnings about the constants of a formula."""
    if math.isnan(squares):
        return ["the loss is not finite"]
    if count >= rows and count:
        what = "1 parameter is" if count == 1 else f"{count} parameters are"
        return [f"{what} fitted to {rows} row{'s' if rows > 1 else ''}"]
    found = []
    for those, verbs, what in (
        (lost & ~occurs, ("does", "do"), "not occur: number parameters without gaps"),
        (lost & occurs, ("is", "are"), "not determined by the data"),
    ):
        if open_ones := [f"p{i + 1}" for i in np.flatnonzero(those).tolist()]:
            found.append(f"{', '.join(open_ones)} {verbs[len(open_ones) > 1]} {what}")
    found += [
        f"p{i + 1} = {parameters[i]:.3g} ± {errors[i]:.2g} may as well be 0"
        for i in np.flatnonzero(errors > np.abs(parameters)).tolist()
    ]
    return found


def sum_of_squares(closing: Closing, losses: Floats, statistics: TargetStatistics) -> Floats:
    """Return S of losses of squared differences, of any shape."""
    with np.errstate(all="ignore"):
        if closing is Closing.ROOT:
            return np.asarray(np.square(losses) * statistics.divisor(closing))
        shares = 1.0 - losses if closing is Closing.SCORE else losses
        return np.asarray(shares * statistics.divisor(closing))


# ---------------------------------------------------------------------------- profile likelihood


def profile_intervals(
    evidence: Evidence,
    parameters: Sequence[Floats],
    squares: Floats,
    level: float,
    fit: Callable[[list[int], list[int], list[Floats]], tuple[Floats, Sequence[Floats]]],
    bounds: tuple[Sequence[Floats], Sequence[Floats]],
) -> list[Floats]:
    """Return profile-likelihood intervals of the parameters of all formulas, [parameters, 2] each.

    With t_i fixed at a value and the others fitted, let S(t_i) be the sum of squares. The interval
    of a level are the t_i around the fitted one with S(t_i) <= S (1 + q^2 / (n - r)), where q is
    the quantile of Student's t with n - r degrees of freedom (Bates and Watts, "Nonlinear
    Regression Analysis and Its Applications", 1988, section 6.1.1). On each side the root of
    sqrt((S(t_i) / S - 1) (n - r)) - q is bracketed and found by the Illinois method, because this
    is nearly a straight line. An interval that is open at a side has an infinite end there, or the
    bound of its parameter.

    Args:
        evidence: of the formulas, which have ``parameters`` and S in ``squares`` [programs].
        parameters: see above.
        squares: see above.
        level: such as 0.95.
        fit: makes fits, given formula, fixed parameter and start [parameters] of each; returns S
            and the parameters of each.
        bounds: least and greatest parameters of each formula.
    """
    intervals = [np.stack([p - np.inf, p + np.inf], axis=1) for p in parameters]
    found = []
    for i, vector in enumerate(parameters):
        freedom, errors = int(evidence.freedom[i]), evidence.standard_errors[i]
        if freedom <= 0 or not squares[i] > 0.0:
            is_known = freedom > 0 and squares[i] == 0.0
            intervals[i][:] = vector[:, None] if is_known else np.nan
            continue
        quantile = student_t(level, freedom)
        for k, error in enumerate(errors.tolist()):
            if error == 0.0:  # of a fixed one
                intervals[i][k] = vector[k]
                continue
            step = quantile * (error if math.isfinite(error) else max(abs(vector[k]), 1e-3))
            for side, bound in enumerate(bounds):
                most = abs(float(bound[i][k]) - vector[k])
                found.append((i, k, side, quantile / math.sqrt(freedom), step, most))
    if not found:
        return intervals
    programs, places, sides = np.array([end[:3] for end in found], dtype=np.int64).T
    goal, step, most = np.array([end[3:] for end in found]).T
    vectors = [parameters[i] for i in programs]
    # Distances from the fitted parameter between which an end is, and the roots there, minus goals.
    low, high, below, above = np.zeros(len(goal)), np.full(len(goal), np.inf), -goal, goal * np.inf
    last, is_done = np.zeros(len(goal)), most == 0.0
    high[is_done] = 0.0
    for _ in range(_ROUNDS):
        if not len(ends := np.flatnonzero(~is_done)):
            break
        with np.errstate(invalid="ignore"):
            share = np.where(np.isinf(above), 0.5, np.clip(below / (below - above), 0.02, 0.98))
            between = low + (high - low) * share
        offset = np.where(np.isinf(high), np.where(low == 0.0, step, 2.0 * low), between)
        offset = np.minimum(offset, most)
        starts = [vectors[end].copy() for end in ends]
        for end, start in zip(ends.tolist(), starts, strict=True):
            fitted = parameters[programs[end]][places[end]]
            start[places[end]] = fitted + (1.0 if sides[end] else -1.0) * offset[end]
        values, refitted = fit(programs[ends].tolist(), places[ends].tolist(), starts)
        ratio = np.full(len(goal), np.inf)
        with np.errstate(over="ignore", invalid="ignore"):
            ratio[ends] = values / squares[programs[ends]] - 1.0
        ratio = np.where(np.isnan(ratio), np.inf, ratio)
        difference = np.sqrt(np.maximum(ratio, 0.0)) - goal
        inside, outside = ~is_done & (difference < 0.0), ~is_done & ~(difference < 0.0)
        above = np.where(inside & (last < 0.0), 0.5 * above, np.where(outside, difference, above))
        below = np.where(outside & (last > 0.0), 0.5 * below, np.where(inside, difference, below))
        is_found = ~is_done & (np.abs(difference) <= _ROOT_ERROR * goal)
        is_found |= inside & (offset >= most)
        low, high = np.where(inside, offset, low), np.where(outside | is_found, offset, high)
        last = np.where(inside, -1.0, np.where(outside, 1.0, last))
        for end, vector in zip(ends.tolist(), refitted, strict=True):
            vectors[end] = vector if inside[end] else vectors[end]
        is_narrow = np.isfinite(high) & (high - np.minimum(low, high) <= _ROOT_ERROR * high)
        is_done |= is_found | is_narrow | (np.isinf(high) & (low > _FARTHEST * step))
    for i, k, side, distance in zip(programs, places, sides, high, strict=True):
        intervals[i][k, side] = parameters[i][k] + (1.0 if side else -1.0) * distance
    return intervals


# ---------------------------------------------------------------------------------------- terms


@dataclass(frozen=True, slots=True)
class Term:
    """One of the terms that a formula is a sum of."""

    program: Program
    """The term; its parameters are numbered as in the formula."""
    rest: Program
    """The formula without it; its parameters are numbered from 0 on."""
    kept: tuple[int, ...]
    """Indices of the parameters of ``rest`` in the formula."""
    text: str = ""
    """The term with its fitted constants."""
    loss: float = math.nan
    """Loss of the formula without the term, its other parameters fitted again."""
    contribution: float = math.nan
    """Share of the rest's sum of squares that the term takes off: 1 - S / S without it."""


def terms_of(program: Program) -> list[Term]:
    """Return the terms that a formula is a sum of at its root; none if it is a single one."""
    codes, values = program.codes, program.values
    starts = subtree_starts(ARITIES[codes].astype(np.int64), len(program))
    add, sub, neg = (OPERATORS[name].code for name in ("add", "sub", "neg"))
    parts: list[Program] = []
    pending = [(len(program) - 1, False)]
    while pending:
        place, negative = pending.pop()
        if codes[place] in (add, sub):
            second = place - 1
            first = int(starts[second]) - 1
            pending += [(second, negative ^ (codes[place] == sub)), (first, negative)]
        elif codes[place] == neg and codes[place - 1] in (add, sub, neg):
            pending.append((place - 1, not negative))
        else:
            own = slice(int(starts[place]), place + 1)
            part = Program._unchecked(codes[own], values[own])
            parts.append(Program.apply("neg", part) if negative else part)
    found = []
    for left, part in enumerate(parts if len(parts) > 1 else ()):
        others = [each for place, each in enumerate(parts) if place != left]
        rest = reduce(lambda a, b: Program.apply("add", a, b), others)
        numbers, is_parameter = rest.values.copy(), rest.codes == PARAMETER
        kept, numbers[is_parameter] = np.unique(numbers[is_parameter], return_inverse=True)
        without = Program._unchecked(rest.codes, numbers)
        found.append(Term(part, without, tuple(kept.astype(int).tolist())))
    return found


#: Keywords of a fit that those for its evidence have, too.
_SAME: Final = (
    *("loss", "method", "accuracy", "max_iterations", "missing", "rows", "precision", "tier"),
    *("gradient_tolerance", "step_tolerance", "loss_tolerance"),
)


@contextmanager
def _in_time(what: str, warnings: list[list[str]], options: FitOptions) -> Iterator[None]:
    """Turn the end of the time into a warning if the caller takes a partial answer."""
    try:
        yield
    except DeadlineExceededError:
        if not options.get("partial"):
            raise
        for own in warnings:
            own.append(f"there was no time for {what}")


class Refit(Protocol):
    """Parameters and losses of a further fit; a `warpfit.calls.results.Fit` is one."""

    @property
    def loss(self) -> Floats:
        """Losses, [expressions]."""

    @property
    def parameters(self) -> list[Floats]:
        """Parameters of each expression."""


def gather(
    optimize: Callable[..., Refit],
    data: DatasetHandle,
    request: FitRequest,
    result: FitResult,
    options: FitOptions,
    deadline: Deadline,
) -> Evidence:
    """Return the evidence for the formulas of a fit, making further fits where they are asked for.

    Each of these is one call of `warpfit.Client.optimize` with the programs of all formulas, in
    what is left of the time. The result has one outcome for each program, and curvatures. Where the
    time ends, intervals and terms are NaN, and a warning says so, if ``partial`` allows it.

    Raises:
        DeadlineExceededError: if the time ends and ``partial`` is not set.
    """
    if not data.has_numbers:
        raise InvalidArgumentError(
            "evidence needs the target and the weights, which are in another process",
            "BAD_DATA",
            "Upload the data here: client.upload(X, y) sends nothing to servers that have them",
            "data",
        )
    batch, settings = request.problem.batch, request.settings
    counts = batch.parameter_counts.astype(np.int64)
    programs, statistics = list(batch), data.statistics(request.problem.rows)

    def split(given: Any, default: Any) -> list[Any]:
        of_all = np.full(int(counts.sum()), default) if given is None else given
        return np.split(of_all, np.cumsum(counts)[:-1])

    vectors, fixed = split(result.parameters, 0.0), split(settings.fixed, False)
    bounds = split(settings.lower, -np.inf), split(settings.upper, np.inf)
    assert result.curvatures is not None  # it was asked for
    flat = np.split(result.curvatures, np.cumsum(counts * counts)[:-1])
    curvatures = [each.reshape(n, n) for each, n in zip(flat, counts.tolist(), strict=True)]
    closing = request.loss.closing
    squares = sum_of_squares(closing, result.losses[:, 0], statistics)
    occurring = split(batch.occurring, False)
    evidence = Evidence.of(programs, vectors, curvatures, squares, statistics, fixed, occurring)
    for own, vector, fitted, *ends in zip(evidence.warnings, vectors, fixed, *bounds, strict=True):
        at_bound = np.any([vector == end for end in ends], axis=0) & ~fitted
        own += [f"p{k + 1} = {vector[k]:.6g} is at its bound" for k in np.flatnonzero(at_bound)]
    again: Any = {name: options[name] for name in _SAME if name in options}

    def fit(places: list[int], some: list[Program], starts: Any, held: Any, kept: Any) -> Any:
        """Fit programs that have some parameters of the formulas at ``places``."""
        own = tuple([of[i][k] for i, k in zip(places, kept, strict=True)] for of in bounds)
        left = deadline.remaining()
        again["timeout"] = None if left is None else max(1e-3, left)
        found = optimize(data, some, starts, fixed=held, bounds=own, **again)
        return sum_of_squares(closing, found.loss, statistics), found

    def profile(places: list[int], parameters: list[int], starts: list[Floats]) -> Any:
        held = [
            fixed[i] | (np.arange(counts[i]) == k) for i, k in zip(places, parameters, strict=True)
        ]
        kept = [slice(None)] * len(places)
        found, refit = fit(places, [programs[i] for i in places], starts, held, kept)
        return found, refit.parameters

    level = options.get("intervals")
    if level is not None:
        intervals = [np.full((len(vector), 2), np.nan) for vector in vectors]
        with _in_time("intervals", evidence.warnings, options):
            intervals = profile_intervals(evidence, vectors, squares, level, profile, bounds)
        evidence = replace(evidence, intervals=intervals)
    if options.get("terms"):
        terms = [terms_of(program) for program in programs]
        places = [i for i, own in enumerate(terms) for _ in own]
        flat_terms = [term for own in terms for term in own]
        kept = [list(term.kept) for term in flat_terms]
        judged: list[list[Term]] = [[] for _ in programs]
        if flat_terms:
            starts, held = ([of[i][k] for i, k in zip(places, kept, strict=True)]
                            for of in (vectors, fixed))  # fmt: skip
            without, losses = np.full((2, len(flat_terms)), np.nan)
            with _in_time("terms", evidence.warnings, options):
                without, refit = fit(places, [term.rest for term in flat_terms], starts, held, kept)
                losses = refit.loss
            with np.errstate(all="ignore"):
                shares = np.where(without <= 0.0, 0.0, 1.0 - squares[places] / without)
            each = zip(flat_terms, places, losses.tolist(), shares.tolist(), strict=True)
            for term, i, loss, share in each:
                text = to_text(term.program.bind(vectors[i]), data.names, DIGITS)
                judged[i].append(replace(term, text=text, loss=loss, contribution=share))
        evidence = replace(evidence, terms=judged)
    return evidence
