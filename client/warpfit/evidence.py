"""The evidence for fitted formulas: how sure one may be of a formula, its constants and its terms.

Everything but `gather` is NumPy on what a fit returns, for losses of squared differences: residuals
are taken for independent and normal, with the variance s^2 / w_i in row i of weight w_i. Notation:

    n    rows whose weight is not 0
    p    parameters of the formula that are not fixed
    S    weighted sum of squares at the fitted parameters
    A    J^T W J there, where J are the derivatives of the values by the parameters
    r    rank of A, scaled to a unit diagonal

`warpfit.Client.optimize` with ``evidence=True`` has `Evidence.of` compute what takes no further
fit; ``intervals`` and ``terms`` ask for the rest. `warpfit.calls.results.Fit.band` has bands for
predictions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.display import TextTable
from warpfit.errors import InvalidArgumentError, bad_setting
from warpfit.ir import Program, subtree_starts
from warpfit.losses import Closing, TargetStatistics
from warpfit.ops import ARITIES, CONSTANT, FIRST_OPERATOR, OPERATORS, PARAMETER

if TYPE_CHECKING:
    from warpfit.calls.arguments import FitOptions
    from warpfit.calls.dataset_handle import DatasetHandle
    from warpfit.calls.results import Fit
    from warpfit.fitting import FitRequest, FitResult

Floats = NDArray[np.float64]

#: Eigenvalue of A, scaled to a unit diagonal, below which a direction is undetermined; for float32
#: data, whose columns are rounded.
_RANK_TOLERANCE: Final = 1e-12
_RANK_TOLERANCE_FLOAT32: Final = 1e-11
#: Rounds of a search for profile likelihoods, and the relative error of its roots.
_ROUNDS: Final = 24
_ROOT_ERROR: Final = 1e-4
#: Most standard errors, or multiples of a parameter without one, that an interval is looked for.
_FARTHEST: Final = 1e4


# -------------------------------------------------------------------------------- distributions


def log_likelihood(squares: Floats, rows: int, log_weights: float = 0.0) -> Floats:
    """Return the logarithm of the likelihood at its maximum, where s^2 = S / n.

    It is -n/2 (log(2 pi S / n) + 1) + sum log(w_i) / 2 (Seber and Wild, "Nonlinear Regression",
    1989, section 2.2.1). S = 0 gives infinity.

    Args:
        squares: S, of any shape.
        rows: n.
        log_weights: sum of the logarithms of the weights that are not 0.
    """
    with np.errstate(divide="ignore"):
        variance = np.asarray(squares) / rows
        return np.asarray(0.5 * log_weights - 0.5 * rows * (np.log(2.0 * math.pi * variance) + 1.0))


def student_t(level: float, freedom: float) -> float:
    """Return t with P(|T| < t) = level for Student's distribution; NaN without any freedom.

    Up to 100 degrees of freedom the finite series of Abramowitz and Stegun (1964), 26.7.3 and
    26.7.4, is inverted by bisection; above that the expansion 26.7.5 has seven digits.
    """
    z = NormalDist().inv_cdf((1.0 + level) / 2.0)
    if freedom < 1:
        return math.nan
    if freedom > 100:
        first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
        third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
        return float(z + first / freedom + second / freedom**2 + third / freedom**3)

    def probability(t: float) -> float:
        angle = math.atan(t / math.sqrt(freedom))
        cosine, is_odd = math.cos(angle), freedom % 2 == 1
        term = total = cosine if is_odd else 1.0
        for k in range(2 if is_odd else 1, int(freedom) - 2, 2):
            term *= k / (k + 1) * cosine**2
            total += term
        if not is_odd:
            return math.sin(angle) * total
        return 2 / math.pi * (angle + (math.sin(angle) * total if freedom > 1 else 0.0))

    low, high = 0.0, 1.0
    while probability(high) < level and high < 1e300:
        high *= 2.0
    for _ in range(200):
        middle = (low + high) / 2.0
        low, high = (middle, high) if probability(middle) < level else (low, middle)
    return high


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


def description_length(
    program: Program, parameters: Floats, fisher: Floats, likelihood: float
) -> float:
    """Return the description length of data by a formula in nats.

    L = -log(likelihood) + `code_length` + sum (log |t_i| + log(I_ii) / 2 - log(3) / 2), where t_i
    are the parameters and I their Fisher information A / s^2 with s^2 = S / n (Bartlett, Desmond
    and Ferreira 2023, equation 8; Kronberger, de França, Bartlett, Desmond and Ferreira, "Guiding
    multi-objective genetic programming with description length improves symbolic regression
    solutions", arXiv:2605.22374, 2026). A parameter that is less than its precision sqrt(12 / I_ii)
    away from 0 may as well be 0, and costs nothing.

    Args:
        program: the formula.
        parameters: those that are not fixed, [p].
        fisher: diagonal of I, [p].
        likelihood: its logarithm.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        size = np.abs(parameters)
        counts = size * np.sqrt(fisher) >= math.sqrt(12.0)
        each = np.log(size) + 0.5 * np.log(fisher) - 0.5 * math.log(3.0)
    return code_length(program) - likelihood + float(each[counts].sum())


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


def covariance_of(curvature: Floats, squares: float, rows: int, tolerance: float) -> Any:
    """Return the covariance of parameters, [p, p], and which of them the data do not determine.

    It is S / (n - r) times the pseudo-inverse of A (Seber and Wild 1989, section 2.1.2). A
    parameter that a direction without information moves has NaN, and so has every one if n <= r.

    Args:
        curvature: A, [p, p].
        squares: S.
        rows: n.
        tolerance: eigenvalue of the scaled A below which a direction has no information.
    """
    count = len(curvature)
    scale = np.sqrt(np.maximum(np.diagonal(curvature), 0.0))
    scale = np.where(np.isfinite(scale) & (scale > 0.0), scale, 1.0)
    scaled = curvature / np.outer(scale, scale)
    if not np.isfinite(scaled).all():
        return np.full((count, count), np.nan), np.ones(count, dtype=bool)
    values, vectors = np.linalg.eigh(scaled)
    kept = values > tolerance * max(1, count)
    lost = np.square(vectors[:, ~kept]).sum(axis=1) > 1e-8
    inverse = (vectors[:, kept] / values[kept]) @ vectors[:, kept].T / np.outer(scale, scale)
    inverse[lost] = np.nan
    inverse[:, lost] = np.nan
    freedom = rows - int(kept.sum())
    variance = squares / freedom if freedom > 0 else math.nan
    return inverse * variance, lost | (freedom <= 0)


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """The evidence for each formula of a fit; arrays are [expressions], logarithms natural.

    The best formula has the least `aic`, `bic` or `description_length`, or the largest
    `bayes_factor`. Rows that a fit has left out (``missing="drop"``) count with their penalty.
    """

    rows: int
    """n, the rows whose weight is not 0."""
    parameters: NDArray[np.int64]
    """p, the parameters that are not fixed."""
    log_likelihood: Floats
    """See the function of this name."""
    aic: Floats
    """2 (p + 1) - 2 log(likelihood); the variance counts as a parameter (Akaike, IEEE Trans. Autom.
    Control 19, 1974)."""
    bic: Floats
    """(p + 1) log(n) - 2 log(likelihood) (Schwarz, Ann. Stat. 6, 1978)."""
    description_length: Floats
    """See the function of this name."""
    bayes_factor: Floats
    """See `fractional_bayes_factor`."""
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
    """Profile-likelihood intervals of each formula, [parameters, 2]; see `ProfileSearch`. None if
    not requested."""
    terms: list[list[Term]] | None = None
    """Terms of each formula with their contributions; None if not requested."""

    @classmethod
    def of(
        cls,
        programs: Sequence[Program],
        parameters: Sequence[Floats],
        curvatures: Sequence[Floats],
        squares: Floats,
        statistics: TargetStatistics,
        fixed: Sequence[NDArray[np.bool_]] | None = None,
    ) -> Evidence:
        """Compute the evidence for fitted programs.

        Args:
            programs: the formulas.
            parameters: for each its fitted parameters.
            curvatures: for each A over all of its parameters.
            squares: S of each, [programs].
            statistics: of target and weights.
            fixed: for each which parameters were not fitted; None for none.
        """
        weights = statistics.weights
        used = np.ones(0) if weights is None else weights[weights > 0.0].astype(np.float64)
        rows = len(statistics.target) if weights is None else len(used)
        single = statistics.target.dtype.itemsize == 4
        tolerance = _RANK_TOLERANCE_FLOAT32 if single else _RANK_TOLERANCE
        likelihood = log_likelihood(squares, rows, float(np.log(used).sum()))
        free = [
            np.ones(len(p), dtype=bool) if fixed is None else ~np.asarray(fixed[i], dtype=bool)
            for i, p in enumerate(parameters)
        ]
        counts = np.array([int(mask.sum()) for mask in free], dtype=np.int64)
        lengths, factors, covariances, undetermined, variance, freedom = [], [], [], [], [], []
        for i, program in enumerate(programs):
            own, mask = curvatures[i][np.ix_(free[i], free[i])], free[i]
            whole = np.zeros(curvatures[i].shape)
            covariance, lost = covariance_of(own, float(squares[i]), rows, tolerance)
            whole[np.ix_(mask, mask)] = covariance
            covariances.append(whole)
            undetermined.append(np.zeros(len(mask), dtype=bool))
            undetermined[-1][mask] = lost
            scale = np.sqrt(np.where(np.diagonal(own) > 0.0, np.diagonal(own), 1.0))
            usable = np.isfinite(own).all()
            spectrum = np.linalg.eigvalsh(own / np.outer(scale, scale)) if usable else np.zeros(0)
            freedom.append(rows - int((spectrum > tolerance * max(1, len(own))).sum()))
            variance.append(squares[i] / freedom[-1] if freedom[-1] > 0 else math.nan)
            with np.errstate(divide="ignore", invalid="ignore"):
                fisher = np.diagonal(own) * (rows / squares[i])
            value = float(likelihood[i])
            lengths.append(description_length(program, parameters[i][mask], fisher, value))
            factors.append(fractional_bayes_factor(program, int(counts[i]), rows, value))
        errors = [np.sqrt(np.diagonal(matrix)) for matrix in covariances]
        found = zip(parameters, errors, undetermined, counts, strict=True)
        return cls(
            rows=rows,
            parameters=counts,
            log_likelihood=likelihood,
            aic=2.0 * (counts + 1) - 2.0 * likelihood,
            bic=(counts + 1) * math.log(rows) - 2.0 * likelihood,
            description_length=np.array(lengths),
            bayes_factor=np.array(factors),
            variance=np.array(variance),
            freedom=np.array(freedom, dtype=np.int64),
            covariances=covariances,
            standard_errors=errors,
            undetermined=undetermined,
            warnings=[_warnings(*each, rows) for each in found],
        )

    def __str__(self) -> str:
        """Return a small table with a row for each formula."""
        columns = ("log_likelihood", "aic", "bic", "description_length", "bayes_factor")
        rows = [
            (str(i), *(f"{getattr(self, name)[i]:.6g}" for name in columns), "; ".join(warnings))
            for i, warnings in enumerate(self.warnings)
        ]
        return TextTable(("expression", *columns, "warnings"), rows).text()


def _warnings(
    parameters: Floats, errors: Floats, lost: NDArray[np.bool_], count: int, rows: int
) -> list[str]:
    """Return what is to be known of the constants of a formula."""
    if count >= rows:
        return [f"{count} parameters are fitted to {rows} rows"]
    found = []
    open_ones = [f"p{i + 1}" for i in np.flatnonzero(lost).tolist()]
    if open_ones:
        verb = "is" if len(open_ones) == 1 else "are"
        found.append(f"{', '.join(open_ones)} {verb} not determined by the data")
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


class ProfileSearch:
    """Finds profile-likelihood intervals of the parameters of all formulas together.

    With t_i fixed at a value and the others fitted, let S(t_i) be the sum of squares. The interval
    of a level are the t_i around the fitted one with S(t_i) <= S (1 + q^2 / (n - r)), where q is
    the quantile of Student's t with n - r degrees of freedom (Bates and Watts, "Nonlinear
    Regression Analysis and Its Applications", 1988, section 6.1.1). On each side the root of
    sqrt((S(t_i) / S - 1) (n - r)) - q is bracketed and found by the Illinois method, because this
    is nearly a straight line. An interval that is open at a side has an infinite end there.

    ::

        search = ProfileSearch(evidence, parameters, squares, 0.95)
        while (asked := search.ask()) is not None:
            search.tell(sums of squares and parameters of fits from these starts, with fixed ones)

    Args:
        evidence: of the formulas.
        parameters: for each its fitted parameters.
        squares: S of each, [programs].
        level: such as 0.95.
    """

    def __init__(
        self, evidence: Evidence, parameters: Sequence[Floats], squares: Floats, level: float
    ) -> None:
        if not 0.0 < level < 1.0:
            raise bad_setting("intervals", level, "a level between 0 and 1, such as 0.95")
        self._parameters, self._squares = parameters, squares
        self.intervals = [np.stack([p - np.inf, p + np.inf], axis=1) for p in parameters]
        #: Program, parameter and side of each end, and the goal for the root of S(t_i) / S - 1.
        self._ends: list[_End] = []
        for i, vector in enumerate(parameters):
            freedom = int(evidence.freedom[i])
            errors = evidence.standard_errors[i]
            if freedom <= 0 or not squares[i] > 0.0:
                self.intervals[i][:] = np.nan if freedom <= 0 else vector[:, None]
                continue
            quantile = student_t(level, freedom)
            for k in range(len(vector)):
                if errors[k] == 0.0:
                    self.intervals[i][k] = vector[k]  # a fixed one
                    continue
                error = errors[k] if np.isfinite(errors[k]) else max(abs(vector[k]), 1e-3)
                for side in (-1.0, 1.0):
                    step = quantile * error
                    self._ends.append(
                        _End(i, k, side, quantile / math.sqrt(freedom), step, vector.copy())
                    )

    def ask(self) -> list[tuple[int, int, Floats]] | None:
        """Return fits to make: program, fixed parameter and start [parameters]; None at the end."""
        self._open = [end for end in self._ends if not end.is_done]
        if not self._open:
            return None
        asked = []
        for end in self._open:
            start = end.vector.copy()
            start[end.parameter] = self._parameters[end.program][end.parameter] + end.offset
            asked.append((end.program, end.parameter, start))
        return asked

    def tell(self, squares: Floats, parameters: Sequence[Floats]) -> None:
        """Take S and the parameters of the fits that `ask` returned."""
        for end, value, vector in zip(self._open, squares.tolist(), parameters, strict=True):
            ratio = value / self._squares[end.program] - 1.0
            end.take(math.sqrt(max(ratio, 0.0)) if math.isfinite(value) else math.inf, vector)
            if end.is_done:
                side = 0 if end.side < 0.0 else 1
                fitted = self._parameters[end.program][end.parameter]
                self.intervals[end.program][end.parameter, side] = fitted + end.result


@dataclass(slots=True, eq=False)
class _End:
    """The search for one end of an interval, as distances from the fitted parameter."""

    program: int
    parameter: int
    side: float
    goal: float
    """Root of S(t_i) / S - 1 at the end."""
    step: float
    vector: Floats
    """Parameters to begin the next fit at."""
    low: float = 0.0
    high: float = math.inf
    below: float = 0.0
    """Root at ``low``, minus the goal, weighed by the Illinois method."""
    above: float = math.inf
    rounds: int = 0
    last: int = 0
    is_done: bool = False

    @property
    def result(self) -> float:
        """Distance of the end from the fitted parameter."""
        return self.side * self.high

    @property
    def offset(self) -> float:
        """Distance at which to fit next."""
        if self.high == math.inf:
            return self.side * (self.step if self.low == 0.0 else 2.0 * self.low)
        if not math.isfinite(self.above):
            return self.side * 0.5 * (self.low + self.high)
        share = self.below / (self.below - self.above)
        return self.side * (self.low + (self.high - self.low) * min(max(share, 0.02), 0.98))

    def take(self, root: float, vector: Floats) -> None:
        """Judge the root of S(t_i) / S - 1 at the offset."""
        place = abs(self.offset)
        if self.rounds == 0:
            self.below = -self.goal
        self.rounds += 1
        difference = root - self.goal
        if difference < 0.0:
            self.low, self.below, self.vector = place, difference, vector
            self.above = 0.5 * self.above if self.last < 0 else self.above
            self.last = -1
        else:
            self.high, self.above = place, difference
            self.below = 0.5 * self.below if self.last > 0 else self.below
            self.last = 1
        is_found = abs(difference) <= _ROOT_ERROR * self.goal
        is_narrow = self.high < math.inf and self.high - self.low <= _ROOT_ERROR * self.high
        if is_found:
            self.high = place
        is_far = self.high == math.inf and self.low > _FARTHEST * self.step
        self.is_done = is_found or is_narrow or is_far or self.rounds >= _ROUNDS


# ---------------------------------------------------------------------------------------- terms


@dataclass(frozen=True, slots=True)
class Term:
    """One of the terms that a formula is a sum of."""

    program: Program
    """The term; its parameters are numbered as in the formula."""
    rest: Program
    """The formula without it; likewise."""
    kept: tuple[int, ...]
    """Indices of the parameters of ``rest``."""
    loss: float = math.nan
    """Loss of the formula without the term, its other parameters fitted again."""
    contribution: float = math.nan
    """Share of the rest's sum of squares that the term takes off: 1 - S / S without it."""


def terms_of(program: Program) -> list[Term]:
    """Return the terms that a formula is a sum of at its root; none if it is a single one."""
    codes, values = program.codes, program.values
    starts = subtree_starts(ARITIES[codes].astype(np.int64), len(program))
    add, sub, neg = (OPERATORS[name].code for name in ("add", "sub", "neg"))
    leaves: list[tuple[int, int, bool]] = []
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
            leaves.append((int(starts[place]), place + 1, negative))
    if len(leaves) < 2:
        return []
    parts = []
    for start, stop, negative in leaves:
        part = Program(codes[start:stop], values[start:stop])
        parts.append(Program.apply("neg", part) if negative else part)
    found = []
    for left, part in enumerate(parts):
        rest: Program | None = None
        for other, each in enumerate(parts):
            if other != left:
                rest = each if rest is None else Program.apply("add", rest, each)
        assert rest is not None
        kept = np.unique(rest.values[rest.codes == PARAMETER].astype(np.int64))
        found.append(Term(part, rest, tuple(kept.tolist())))
    return found


def gather(
    optimize: Callable[..., Fit],
    data: DatasetHandle,
    request: FitRequest,
    result: FitResult,
    options: FitOptions,
) -> Evidence:
    """Return the evidence for the formulas of a fit, making further fits where they are asked for.

    Each of these is one call with the programs of all formulas.

    Args:
        optimize: `warpfit.Client.optimize`.
        data: that was fitted.
        request: which was fitted, with one outcome for each program.
        result: with curvatures.
        options: of the call.
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
    edges = np.cumsum(counts)[:-1]
    programs, statistics = list(batch), data.statistics(request.problem.rows)
    vectors = np.split(result.parameters, edges)
    assert result.curvatures is not None  # it was asked for
    flat = np.split(result.curvatures, np.cumsum(counts * counts)[:-1])
    curvatures = [each.reshape(n, n) for each, n in zip(flat, counts.tolist(), strict=True)]
    given = np.zeros(int(counts.sum()), bool) if settings.fixed is None else settings.fixed
    fixed = np.split(given, edges)
    lower, upper = (
        np.split(np.full(int(counts.sum()), open_end) if bound is None else bound, edges)
        for bound, open_end in ((settings.lower, -np.inf), (settings.upper, np.inf))
    )
    closing, losses = request.loss.closing, result.losses[:, 0]
    squares = sum_of_squares(closing, losses, statistics)
    found = Evidence.of(programs, vectors, curvatures, squares, statistics, fixed)
    again: Any = {name: options[name] for name in _SAME if name in options}

    def fit(places: list[int], some: list[Program], starts: Any, held: Any, kept: Any) -> Fit:
        bounds = tuple(
            [bound[i][k] for i, k in zip(places, kept, strict=True)] for bound in (lower, upper)
        )
        return optimize(data, some, starts, fixed=held, bounds=bounds, **again)

    level = options.get("intervals")
    if level is not None:
        search = ProfileSearch(found, vectors, squares, level)
        while (asked := search.ask()) is not None:
            places = [i for i, _, _ in asked]
            held = [fixed[i] | (np.arange(counts[i]) == k) for i, k, _ in asked]
            some, starts = [programs[i] for i in places], [start for _, _, start in asked]
            refit = fit(places, some, starts, held, [slice(None)] * len(places))
            search.tell(sum_of_squares(closing, refit.loss, statistics), refit.parameters)
        found = replace(found, intervals=search.intervals)
    if options.get("terms"):
        terms = [terms_of(program) for program in programs]
        places = [i for i, own in enumerate(terms) for _ in own]
        flat_terms = [term for own in terms for term in own]
        rest: list[Term] = []
        if flat_terms:
            kept = [list(term.kept) for term in flat_terms]
            refit = fit(
                places,
                [_renumbered(term) for term in flat_terms],
                [vectors[i][k] for i, k in zip(places, kept, strict=True)],
                [fixed[i][k] for i, k in zip(places, kept, strict=True)],
                kept,
            )
            without = sum_of_squares(closing, refit.loss, statistics)
            for term, i, loss, value in zip(flat_terms, places, refit.loss, without, strict=True):
                share = 1.0 - squares[i] / value if value > 0.0 else 0.0
                rest.append(replace(term, loss=float(loss), contribution=float(share)))
        ends = np.cumsum([len(own) for own in terms])
        own_terms = [rest[end - len(own) : end] for end, own in zip(ends, terms, strict=True)]
        found = replace(found, terms=own_terms)
    return found


#: Keywords of a fit that those for its evidence have, too.
_SAME: Final = (
    *("loss", "method", "accuracy", "max_iterations", "missing", "rows", "precision", "tier"),
    *("gradient_tolerance", "step_tolerance", "loss_tolerance", "timeout"),
)


def _renumbered(term: Term) -> Program:
    """Return the rest of a term's formula with parameters 0, 1, ... in place of the kept ones."""
    codes, values = term.rest.codes, term.rest.values.copy()
    is_parameter = codes == PARAMETER
    values[is_parameter] = np.searchsorted(term.kept, values[is_parameter])
    return Program(codes, values)
