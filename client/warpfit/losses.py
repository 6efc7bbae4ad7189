"""Loss functions: a row loss, which is summed over the rows, and a closing of the sum.

A *row loss* is a `Program` without parameters over three variables: 0 is the prediction f, 1 the
target y and 2 the weight w. If it does not use w, each row's loss is multiplied by w. A *closing*
turns the sum of the row losses into the loss, for example into their mean.

A custom loss is written in the language of the expressions::

    huber = LossFunction.parse("where(abs(d) < 1, d^2/2, abs(d) - 0.5)")

with ``f`` (or ``prediction``), ``y`` (or ``target``), ``w`` (or ``weight``), and ``d`` for f - y.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from numbers import Real
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from warpfit.errors import InvalidArgumentError, did_you_mean
from warpfit.ir import Program
from warpfit.ops import VARIABLE
from warpfit.parse import parse

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from warpfit.dataset import Dataset

Floats: TypeAlias = NDArray[np.float64]

#: Variables of a row loss, by index.
PREDICTION: Final = 0
TARGET: Final = 1
WEIGHT: Final = 2
_VARIABLES: Final = ("f", "y", "w")
#: Names in the text of a row loss; the last one is f - y, which is no variable.
_NAMES: Final = (*_VARIABLES, "prediction", "target", "weight", "d")


class Loss(StrEnum):
    """Loss of predictions f against the target y with weights w (1 without weights).

    Losses are computed in float64 from values rounded to the data's type. In fast mode a GPU may
    round f - y, and compiled kernels add up each block of rows, in float32; server/README.md has
    the errors. Sums of blocks of rows are added up in pairs, in float64. NaN in any used row makes
    the loss NaN, but a row of weight 0 is not used, whatever is there.
    """

    SSE = "sse"
    """Sum of w (f - y)^2."""
    MSE = "mse"
    """SSE divided by the sum of w."""
    RMSE = "rmse"
    """Square root of MSE."""
    MAE = "mae"
    """Sum of w |f - y| divided by the sum of w."""
    R2 = "r2"
    """1 - SSE / sum of w (y - m)^2, where m is the weighted mean of y; a score: 1 is best."""
    NMSE = "nmse"
    """SSE / sum of w (y - m)^2, that is 1 - R2."""


class Closing(StrEnum):
    """Makes a loss of the sum S of the row losses; W is the sum of the weights."""

    SUM = "sum"
    """S."""
    MEAN = "mean"
    """S / W."""
    ROOT = "root"
    """sqrt(S / W)."""
    RELATIVE = "relative"
    """S / sum of w (y - m)^2, where m is the weighted mean of y."""
    SCORE = "score"
    """1 minus `relative`; the highest score is the best."""


@dataclass(frozen=True, slots=True)
class LossFunction:
    """A loss: a row loss and its closing.

    Raises:
        InvalidArgumentError: if the row loss has parameters or more than three variables.
    """

    row: Program
    """Row loss over variables 0 (prediction), 1 (target) and 2 (weight)."""
    closing: Closing = Closing.MEAN

    def __post_init__(self) -> None:
        """Check that the row loss uses nothing but its three variables."""
        if not isinstance(self.row, Program):
            raise InvalidArgumentError(
                f"a row loss is a Program, not of type {type(self.row).__name__}",
                "BAD_LOSS",
                "Make one of a text with LossFunction.parse",
                "row",
            )
        if self.row.parameters or self.row.variables > len(_VARIABLES):
            raise _not_a_row_loss(str(self.row))

    @classmethod
    def parse(cls, text: str, closing: Closing | str = Closing.MEAN) -> LossFunction:
        """Parse a row loss such as ``"where(abs(d) < 1, d^2/2, abs(d) - 0.5)"``.

        Args:
            text: an expression over ``f``, ``y``, ``w`` and ``d`` = f - y.
            closing: ``"mean"`` (default; weighted), ``"sum"`` or another `Closing`.

        Raises:
            ParseError: if the text is no expression.
            InvalidArgumentError: if it has parameters, or the closing is not known.
        """
        numbered = [int(number) for number in re.findall(r"\bx([0-9]+)\b", text)]
        if any(number > len(_VARIABLES) for number in numbered):
            raise _not_a_row_loss(text)

        def leaf(code: int, value: float) -> Program:
            if code != VARIABLE:
                return Program([code], [value])
            index = int(value)
            if index == len(_NAMES) - 1:
                return DIFFERENCE
            return Program.variable(index % len(_VARIABLES))

        given = parse(text, _NAMES)
        row = given.fold(leaf, lambda row, operands: Program.apply(row, *operands))
        return cls(row, as_closing(closing))

    @property
    def mentions_weight(self) -> bool:
        """Whether the row loss uses w itself, so that it is not multiplied by w."""
        return mentions_weight(self.row)

    @property
    def is_squares(self) -> bool:
        """Whether the row loss is (f - y)^2, which Levenberg-Marquardt and linear scaling need."""
        return self.row in _FORMS_OF_SQUARES

    @property
    def is_score(self) -> bool:
        """Whether the highest value is the best."""
        return self.closing is Closing.SCORE


#: Rows of a block of `TargetStatistics`, for which a pass takes about a millisecond.
_BLOCK_ROWS: Final = 1 << 17
#: Property of `TargetStatistics` that a closing divides by.
_DIVISORS: Final = {
    **dict.fromkeys((Closing.MEAN, Closing.ROOT), "weight"),
    **dict.fromkeys((Closing.RELATIVE, Closing.SCORE), "variation"),
}


@dataclass(frozen=True, eq=False)
class TargetStatistics:
    """Statistics of target and weights over the rows of an evaluation, computed when needed.

    Each takes a pass over blocks of rows, which needs no memory for all rows. `steps` pauses
    between two blocks.
    """

    target: NDArray[Any]
    """[rows]."""
    weights: NDArray[Any] | None = None
    """[rows], or None for 1 everywhere."""

    @classmethod
    def of_rows(cls, dataset: Dataset, rows: slice) -> Self:
        """Return the statistics of some rows of a data set that has a target."""
        assert dataset.target is not None  # the request was checked
        weights = None if dataset.weights is None else dataset.weights[rows]
        return cls(dataset.target[rows], weights)

    def divisor(self, closing: Closing) -> float:
        """Return the divisor of a closing's sums; 1 if there is none."""
        return 1.0 if closing is Closing.SUM else float(getattr(self, _DIVISORS[closing]))

    def divisor_steps(self, closing: Closing) -> Generator[None, None, None]:
        """Compute `divisor` as `steps` does."""
        if closing is not Closing.SUM:
            yield from self.steps(_DIVISORS[closing])

    def steps(self, *names: str) -> Generator[None, None, None]:
        """Compute the statistics of these names, with a pause between blocks of rows."""
        for name in names:
            if name not in vars(self):
                vars(self)[name] = yield from self._computed(name)

    @cached_property
    def weight(self) -> float:
        """Sum of the weights, in float64; NaN if it overflows."""
        return _last(self._computed("weight"))

    @cached_property
    def rows(self) -> int:
        """Number of the rows that have a weight."""
        return round(_last(self._computed("rows")))

    @cached_property
    def squares(self) -> float:
        """Sum of w y^2 in float64, without what is NaN."""
        return _last(self._computed("squares"))

    @cached_property
    def largest(self) -> float:
        """Largest abs(y); NaN if any y is."""
        return _last(self._computed("largest"))

    @cached_property
    def mean(self) -> float:
        """Weighted mean of the finite y; 0 if there is none."""
        return _last(self._computed("mean"))

    @cached_property
    def variation(self) -> float:
        """Sum of w (y - m)^2 in float64, where m is the weighted mean of y.

        It is NaN if it overflows, because a quotient by infinity would say that nothing is left.
        """
        return _last(self._computed("variation"))

    def _computed(self, name: str) -> Generator[None, None, float]:
        """Compute one of the statistics above."""
        if name == "weight":
            if self.weights is None:
                return float(len(self.target))
            return _nan_if_overflown((yield from self._sum(lambda y, w: w)))
        if name == "rows":
            if self.weights is None:
                return len(self.target)
            return round((yield from self._sum(lambda y, w: np.ones(len(w)))))
        if name == "squares":
            return (yield from self._sum(lambda y, w: w * np.square(y), np.nansum))
        if name == "largest":
            return (yield from self._sum(lambda y, w: np.abs(y), np.max))
        if name == "mean":
            weight = yield from self._sum(lambda y, w: w[np.isfinite(y)])
            total = yield from self._sum(lambda y, w: (w * y)[np.isfinite(y)])
            return total / weight if weight else 0.0
        yield from self.steps("weight")
        # The first y is subtracted, so that a large mean costs no digits.
        origin: float | None = None

        def deviations(y: Floats) -> Floats:
            nonlocal origin
            origin = float(y[0]) if origin is None else origin
            return y - origin

        total = yield from self._sum(lambda y, w: w * deviations(y))
        with np.errstate(all="ignore"):
            mean = np.float64(total) / self.weight
        found = yield from self._sum(lambda y, w: w * np.square(deviations(y) - mean))
        return _nan_if_overflown(found)

    def _sum(
        self,
        term: Callable[[Floats, Floats], Floats],
        reduce: Callable[[Any], Any] = np.sum,
    ) -> Generator[None, None, float]:
        """Reduce a term of blocks of target and weights, in float64; 0 without rows.

        Rows of weight 0 may hold anything, and are left out before blocks are made of the others:
        so the result has the bits of data without these rows.
        """
        parts: list[Any] = []
        y, w = np.empty(0), np.empty(0)
        for start in range(0, len(self.target), _BLOCK_ROWS):
            rows = slice(start, start + _BLOCK_ROWS)
            more = self.target[rows].astype(np.float64)
            weights = np.ones(len(more))
            if self.weights is not None:
                weights = self.weights[rows].astype(np.float64)
                if not weights.all():
                    more, weights = more[weights > 0.0], weights[weights > 0.0]
            if len(y):
                more, weights = np.concatenate([y, more]), np.concatenate([w, weights])
            y, w = more, weights
            is_last = rows.stop >= len(self.target)
            with np.errstate(all="ignore"):
                while len(y) >= _BLOCK_ROWS or (is_last and len(y)):
                    parts.append(reduce(term(y[:_BLOCK_ROWS], w[:_BLOCK_ROWS])))
                    y, w = y[_BLOCK_ROWS:], w[_BLOCK_ROWS:]
            if not is_last:
                yield
        with np.errstate(all="ignore"):
            return float(reduce(parts)) if parts else 0.0


def _last(steps: Generator[None, None, float]) -> float:
    """Return the result of a generator."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: float = end.value
            return found


def _nan_if_overflown(total: float) -> float:
    return math.nan if total == math.inf else total


@lru_cache(64)
def mentions_weight(row_loss: Program) -> bool:
    """Return whether a row loss uses w itself, so that it is not multiplied by w."""
    return bool(np.any((row_loss.codes == VARIABLE) & (row_loss.values == WEIGHT)))


def close_losses(closing: Closing, sums: Floats, statistics: TargetStatistics) -> Floats:
    """Turn sums of row losses, of any shape, into losses."""
    if closing is Closing.SUM:
        return sums
    with np.errstate(all="ignore"):
        divided = np.asarray(sums / statistics.divisor(closing))
        if closing is Closing.ROOT:
            return np.asarray(np.sqrt(divided))
        return np.asarray(1.0 - divided) if closing is Closing.SCORE else divided


def coefficients_of_determination(
    closing: Closing, losses: Floats, statistics: TargetStatistics
) -> Floats:
    """Return R2 = 1 - SSE / SST (weighted) for losses of squared differences, of any shape.

    Where the target does not vary, it is not defined: NaN.
    """
    if not statistics.variation > 0.0:
        return np.full(np.shape(losses), np.nan)
    if closing is Closing.SCORE:
        return np.asarray(losses)
    with np.errstate(all="ignore"):
        sums = np.square(losses) if closing is Closing.ROOT else losses
        return np.asarray(1.0 - sums * statistics.divisor(closing) / statistics.variation)


def close_gradients(
    closing: Closing, gradients: Floats, losses: Floats, statistics: TargetStatistics
) -> Floats:
    """Turn derivatives of sums, of any shape, into derivatives of losses.

    ``losses`` are those that belong to them, broadcast, and read for ROOT only, which has
    derivative 0 at loss 0, a kink.
    """
    if closing is Closing.SUM:
        return gradients
    with np.errstate(all="ignore"):
        if closing is Closing.ROOT:
            slopes = gradients / (2.0 * statistics.weight * losses)
            return np.where(losses == 0.0, 0.0, slopes)
        divided = np.asarray(gradients / statistics.divisor(closing))
        return -divided if closing is Closing.SCORE else divided


#: Prediction minus target, and the row losses of the built-in losses.
DIFFERENCE: Final = Program.apply("sub", Program.variable(PREDICTION), Program.variable(TARGET))
SQUARES: Final = Program.apply("square", DIFFERENCE)
_FORMS_OF_SQUARES: Final = (
    SQUARES,
    Program.apply("pow", DIFFERENCE, Program.constant(2.0)),
    Program.apply("mul", DIFFERENCE, DIFFERENCE),
)
ABSOLUTE: Final = Program.apply("abs", DIFFERENCE)

#: Coefficients of log(cosh(d)) / d^2 as a polynomial in d^2 for |d| <= 1/2, interpolated at
#: Chebyshev's nodes, with a relative error of 1e-17.
_LOG_COSH: Final = (
    0.5, -0.08333333333333322, 0.02222222222220464, -0.0067460317449306514, 0.0021869488181796267,
    -0.0007386022938034345, 0.0002565727173183133, -9.092986784967451e-05, 3.2484115789495745e-05,
    -1.10330037424675e-05, 2.6907621419496424e-06,
)  # fmt: skip

#: Each `Loss` as a loss function.
BUILT_IN: Final[Mapping[Loss, LossFunction]] = {
    Loss.SSE: LossFunction(SQUARES, Closing.SUM),
    Loss.MSE: LossFunction(SQUARES, Closing.MEAN),
    Loss.RMSE: LossFunction(SQUARES, Closing.ROOT),
    Loss.MAE: LossFunction(ABSOLUTE, Closing.MEAN),
    Loss.R2: LossFunction(SQUARES, Closing.SCORE),
    Loss.NMSE: LossFunction(SQUARES, Closing.RELATIVE),
}


def huber(delta: float = 1.0) -> LossFunction:
    """Return the mean of d^2 / 2 where |d| <= delta, else delta (|d| - delta / 2) (Huber 1964)."""
    delta = _positive(delta, "delta")
    text = f"where(abs(d) <= {delta!r}, 0.5*square(d), {delta!r}*(abs(d) - {delta / 2!r}))"
    return LossFunction.parse(text)


def log_cosh() -> LossFunction:
    """Return the mean of log cosh d, which neither overflows nor loses digits by cancellation."""
    # |d| + log(1 + exp(-2 |d|)) - log 2 loses digits where its terms are larger than itself, so
    # where |d| < 1/2 it is a polynomial in d^2 times d^2.
    near = repr(_LOG_COSH[-1])
    for coefficient in _LOG_COSH[-2::-1]:
        near = f"fma(square(d), {near}, {coefficient!r})"
    far = f"abs(d) + log(1 + exp(-2*abs(d))) - {math.log(2.0)!r}"
    return LossFunction.parse(f"where(abs(d) < 0.5, square(d)*{near}, {far})")


def quantile(q: float = 0.5) -> LossFunction:
    """Return the mean of q (y - f) where y >= f, else (1 - q) (f - y), to fit the q-quantile."""
    if not (isinstance(q, Real) and 0.0 < q < 1.0):
        raise InvalidArgumentError(
            f"q is {q!r}", "BAD_LOSS", "Give a number between 0 and 1, both excluded", "q"
        )
    q = float(q)
    return LossFunction.parse(f"where(d <= 0, {-q!r}*d, {1.0 - q!r}*d)")


def poisson(*, log: bool = False) -> LossFunction:
    """Return the sum of f - y log f, Poisson's negative log likelihood of counts y.

    Where y and f are 0 it is its limit, 0; a negative f has none.

    Args:
        log: whether the prediction is the logarithm of the mean; the sum is then exp(f) - y f.
    """
    text = "f - where(y == 0 and f == 0, 0, y*log(f))"
    return LossFunction.parse("exp(f) - where(y == 0, 0, y*f)" if log else text, Closing.SUM)


def gaussian(sigma: float | None = None) -> LossFunction:
    """Return the sum of (d / s)^2 / 2 + log s + log(2 pi) / 2, Gauss's negative log likelihood.

    Args:
        sigma: standard deviation s of every row; None takes the weight as 1 / s^2.
    """
    constant = math.log(2.0 * math.pi) / 2.0
    if sigma is None:
        return LossFunction.parse(f"0.5*(w*square(d) - log(w)) + {constant!r}", Closing.SUM)
    sigma = _positive(sigma, "sigma")
    constant += math.log(sigma)
    return LossFunction.parse(f"0.5*square(d / {sigma!r}) + {constant!r}", Closing.SUM)


#: Further losses by name, with their default settings.
BY_NAME: Final[Mapping[str, Callable[[], LossFunction]]] = {
    loss.__name__: loss for loss in (huber, log_cosh, quantile, poisson, gaussian)
}


def as_function(loss: Loss | LossFunction) -> LossFunction:
    """Return any loss as a loss function."""
    return BUILT_IN[loss] if isinstance(loss, Loss) else loss


def as_loss(given: Loss | LossFunction | str) -> Loss | LossFunction:
    """Return the loss that a caller means.

    Args:
        given: a loss, its name, or the text of a row loss, which is then averaged.

    Raises:
        ParseError: for a text that is no expression.
        InvalidArgumentError: for an unknown name, and for what is no text, such as a callable.
    """
    if isinstance(given, LossFunction):
        return given
    if not isinstance(given, str):
        raise InvalidArgumentError(
            f"a loss cannot be of type {type(given).__name__}: servers run no code of callers",
            "BAD_LOSS",
            "Write it as a text over f, y, w and d = f - y, such as loss='abs(d)^1.5'",
            "loss",
        )
    if given in BUILT_IN:
        return Loss(given)
    if given in BY_NAME:
        return BY_NAME[given]()
    if not given.isidentifier():
        return LossFunction.parse(given)
    known = [*Loss, *BY_NAME]
    listed = f"Use one of {', '.join(known)}, a warpfit.LossFunction, or a text such as"
    raise InvalidArgumentError(
        f"loss {given!r} is not known",
        "BAD_ENUM",
        did_you_mean(given, known, f"{listed} 'abs(d)^1.5'"),
        "loss",
    )


def as_closing(given: Closing | str) -> Closing:
    """Return a closing by its name; raise InvalidArgumentError for an unknown name."""
    try:
        return Closing(given)
    except ValueError:
        raise InvalidArgumentError(
            f"closing {given!r} is not known",
            "BAD_ENUM",
            did_you_mean(given, Closing, f"Use one of: {', '.join(Closing)}"),
            "closing",
        ) from None


def _not_a_row_loss(text: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the row loss {text} uses more than prediction, target and weight",
        "BAD_LOSS",
        f"Use the names {', '.join(_NAMES)}, and numbers instead of parameters",
        "loss",
    )


def _positive(value: float, name: str) -> float:
    if not (isinstance(value, Real) and 0.0 < value < math.inf):
        raise InvalidArgumentError(
            f"{name} is {value!r}", "BAD_LOSS", "Give a positive, finite number", name
        )
    return float(value)
