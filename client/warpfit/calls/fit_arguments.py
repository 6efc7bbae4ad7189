"""Fit requests from the arguments of `optimize`."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from warpfit.calls.arguments import CommonOptions, build_evaluation, common
from warpfit.calls.batches import Parameters, PopulationCache, is_single
from warpfit.calls.checks import member, number, whole_number
from warpfit.calls.dataset_handle import DatasetHandle
from warpfit.calls.display import MOST_ROWS
from warpfit.errors import InvalidArgumentError, bad_setting
from warpfit.expressions.parameter_vectors import join_vectors
from warpfit.expressions.real_numbers import real_numbers
from warpfit.fitting import Accuracy, FitProgress, FitRequest, FitSettings, Method, Tolerances
from warpfit.losses import Loss, LossFunction

#: One value for all parameters, or an entry (a value, one for each parameter, or None) for each
#: expression; a single expression's entry may stand alone.
EachParameter: TypeAlias = float | Sequence[ArrayLike | None] | ArrayLike | None


class FitOptions(CommonOptions, total=False):
    """Keywords of `optimize`."""

    loss: Loss | LossFunction | str
    """The loss to minimise (r2 is maximised), as in `evaluate`; "mse" by default."""
    method: Method | str
    """``"auto"`` (default), ``"lm"`` or ``"bfgs"``; see `warpfit.Method`."""
    accuracy: Accuracy | str
    """``"screening"`` (default), to compare expressions: 50 iterations, tolerances of 1e-6 (float32
    data) or 1e-8 (float64). ``"final"``, to report parameters: 2,000 iterations, tolerances near
    the rounding errors; upload as float64 for it. The next four keywords override it."""
    max_iterations: int | None
    """Most iterations of each search; None (default) as ``accuracy`` says."""
    gradient_tolerance: float | None
    """See `warpfit.fitting.Tolerances`, as the next two; 0 switches a test off, None (default)
    means what ``accuracy`` says."""
    step_tolerance: float | None
    loss_tolerance: float | None
    bounds: tuple[EachParameter, EachParameter] | None
    """Least and greatest value: each a number for all parameters, or an entry for each
    expression (a number, one number for each of its parameters, or None)."""
    fixed: EachParameter
    """Parameters that keep their start: for each expression one truth value for each parameter."""
    all_starts: bool
    """Return the outcome of every start vector, on a leading axis, instead of the best."""
    standard_errors: bool | None
    """Ask for standard errors; None (default) does for up to 20 expressions, as many as a result
    prints, if Levenberg-Marquardt fits them, which has them at no cost. A parameter that ends at a
    bound has the one that it would have without bounds; fix it to have the errors of the others
    given its value."""
    covariance: bool
    """Ask for the covariance of each expression's parameters; bounds are ignored, as above."""
    partial: bool
    """Return the best parameters so far when ``timeout`` is about to pass, instead of failing."""
    progress: Callable[[FitProgress], None] | None
    """Called a few times a second while the searches run."""


def build_fit(
    data: DatasetHandle,
    expressions: Any,
    parameters: Parameters,
    options: FitOptions,
    cache: PopulationCache | None = None,
) -> FitRequest:
    """Turn the arguments of `warpfit.Client.optimize` into a fit; the server checks its tokens."""
    shared: Any = {"loss": options.get("loss", Loss.MSE), **common(options)}
    problem, _ = build_evaluation(data, expressions, parameters, False, shared, cache)
    settings = _settings(
        problem.batch.parameter_counts, is_single(expressions), options, data.layout.dtype
    )
    request = FitRequest(problem, settings)
    request.check_options(data.layout)
    if options.get("standard_errors") is None:
        is_free = len(problem.batch) <= MOST_ROWS and request.method == Method.LM
        request = replace(request, settings=replace(settings, standard_errors=is_free))
    return request


def _settings(
    counts: NDArray[np.uint32], single: bool, options: FitOptions, dtype: np.dtype[Any]
) -> FitSettings:
    lower, upper = _bounds(options.get("bounds"))
    fixed = _flat(options.get("fixed"), counts, single, "fixed", 0.0)
    if fixed is not None and np.isnan(fixed).any():
        raise bad_setting("fixed", options.get("fixed"), "a truth value for each parameter")
    accuracy = member(Accuracy, options.get("accuracy", Accuracy.SCREENING), "accuracy")
    iterations, usual = options.get("max_iterations"), Tolerances.of(dtype, accuracy)
    tolerances = {
        f"{name}_tolerance": getattr(usual, name) for name in ("gradient", "step", "loss")
    }
    given = {
        name: number(value, name) for name in tolerances if (value := options.get(name)) is not None
    }
    progress = options.get("progress")
    if not (progress is None or callable(progress)):
        raise bad_setting("progress", progress, "a function of one FitProgress, or None")
    return FitSettings(
        method=member(Method, options.get("method", Method.AUTO), "method"),
        max_iterations=(
            accuracy.max_iterations
            if iterations is None
            else whole_number(iterations, "max_iterations")
        ),
        **(tolerances | given),
        lower=_flat(lower, counts, single, "bounds", -np.inf),
        upper=_flat(upper, counts, single, "bounds", np.inf),
        fixed=None if fixed is None else fixed != 0.0,
        all_starts=bool(options.get("all_starts")),
        standard_errors=bool(options.get("standard_errors")),
        covariance=bool(options.get("covariance")),
        partial=bool(options.get("partial")),
        progress=progress is not None,
    )


def _bounds(given: Any) -> tuple[Any, Any]:
    """Return lower and upper bounds; a list, SciPy's pairs of a lower and an upper one, is none."""
    if given is None:
        return None, None
    if not isinstance(given, tuple) or len(given) != 2:
        wanted = "a tuple (lower, upper), each a number or an entry for each expression"
        raise bad_setting("bounds", given, wanted)
    return given


def _flat(
    given: Any, counts: NDArray[np.uint32], single: bool, name: str, otherwise: float
) -> NDArray[np.float64] | None:
    """Return one number for each parameter of each program, [sum(counts)]; None if none is given.

    Parameters without an entry have ``otherwise``; ``single`` tells a lone expression.
    """
    if given is None:
        return None
    if np.isscalar(given):
        return np.full(int(counts.sum()), number(given, name))
    entries = list(given) if isinstance(given, Iterable) else [given]
    if len(counts) == 1 and (single or all(e is None or np.isscalar(e) for e in entries)):
        entries = [given]
    if len(entries) != len(counts):
        raise InvalidArgumentError(
            f"{name} has {len(entries)} entries for {len(counts)} expressions",
            "LENGTH_MISMATCH",
            "Give one number for all parameters, or an entry for each expression",
            name,
        )
    joined = join_vectors(entries)
    if joined is not None and np.array_equal(joined.counts, counts):
        return joined.numbers
    pieces = [
        _entry_numbers(entry, int(count), name, otherwise)
        for entry, count in zip(entries, counts.tolist(), strict=True)
    ]
    return np.concatenate(pieces)


def _entry_numbers(entry: Any, count: int, name: str, otherwise: float) -> NDArray[np.float64]:
    if entry is None:
        return np.full(count, otherwise)
    if isinstance(entry, list | tuple):
        entry = [otherwise if value is None else value for value in entry]
    values = real_numbers(entry, name, place="position").astype(np.float64).ravel()
    if len(values) not in (1, count):
        raise InvalidArgumentError(
            f"{name} has {len(values)} numbers for an expression with {count} parameters",
            "LENGTH_MISMATCH",
            "Give one number for each parameter of the expression, or one for all",
            name,
        )
    return np.broadcast_to(values, (count,)).copy()
