"""Checks the arguments of calls, and builds batches, data sets, evaluations and fits of them.

Keywords of each method first, then the checks of single values, then what is built of them. A new
keyword begins here; `warpfit.request` and `warpfit.request` say what the server knows of it.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from enum import StrEnum
from inspect import Parameter, formatannotation, signature
from typing import Any, Final, Literal, Required, TypeAlias, TypedDict, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from warpfit.calls.dataset_handle import DatasetHandle, checked_handle
from warpfit.dataset import ClientDataset, ServerFile, client_dataset, open_table
from warpfit.dataset.tables import ColumnNames, canonical_dtype
from warpfit.display import MOST_ROWS, shortened
from warpfit.errors import (
    InvalidArgumentError,
    bad_setting,
    check_encodable,
    did_you_mean,
    require,
    unknown_keyword,
)
from warpfit.expressions.real_numbers import (
    ParameterVectors,
    join_vectors,
    real_numbers,
    require_order,
    unwrapped,
)
from warpfit.frontends import as_population, expression_list
from warpfit.ir import Batch, Population, Program
from warpfit.losses import LossFunction, as_loss
from warpfit.request import (
    FURTHER_OUTPUTS,
    Accuracy,
    Evaluation,
    FitProgress,
    FitRequest,
    FitSettings,
    Loss,
    Method,
    Missing,
    Precision,
    Tier,
    Tolerances,
)
from warpfit.transport.call import CallingBack, Deadline, Progress, silent

E = TypeVar("E", bound=StrEnum)
F = TypeVar("F", bound=Callable[..., Any])

Rows: TypeAlias = slice | tuple[int, int] | None
#: One vector [n] or K vectors [K, n] for each expression; for a single expression its own alone.
Parameters: TypeAlias = Sequence[ArrayLike] | ArrayLike | None
#: One value for all parameters, or an entry (a value, one for each parameter, or None) for each
#: expression; a single expression's entry may stand alone.
EachParameter: TypeAlias = float | Sequence[ArrayLike | None] | ArrayLike | None

#: Number of batches that a client keeps, and the most tokens of one of them (9 bytes a token).
_MOST_BATCHES: Final = 8
#: Characters of a keyword's type that help shows.
_MOST_SHOWN: Final = 150
_MOST_TOKENS: Final = 1 << 17
#: What says which parameters are fixed.
_TRUTHS: Final = "a truth value for each parameter, such as [True, False], and no indices or names"

# ---------------------------------------------------------------------------------------- keywords


class UploadOptions(TypedDict, total=False):
    """Keywords of `upload`."""

    x: Sequence[str] | str | None
    """Columns of a table that are variables; by default all but ``y`` and ``weights``."""
    names: Sequence[str] | None
    """One name for each variable; by default the column names of a table, or none."""
    dtype: Literal["auto", "float32", "float64"] | np.dtype[Any] | type[np.floating[Any] | float]
    """Type of the data on the server: "float32", "float64", or "auto" (default). "auto" is float64
    where float32 loses digits that matter, or where numbers above 1e9 or below 1e-9 may have powers
    beyond its range, and float32 elsewhere."""
    progress: Progress | bool | None
    """Callable(bytes_done, bytes_total), or True for a tqdm bar. It runs in another thread and must
    not fork."""
    timeout: float | None
    """Seconds for the whole call, retries included; None for no limit."""


class CommonOptions(TypedDict, total=False):
    """Keywords of every call that computes."""

    rows: Rows
    """slice or (start, stop) of consecutive rows; None for all."""
    precision: Precision | Literal["precise", "fast"]
    """``"precise"`` (default) or ``"fast"``."""
    tier: Tier | Literal["auto", "interpreter", "compiled"]
    """Evaluator of a CUDA engine: ``"auto"`` (default), ``"interpreter"`` or ``"compiled"``."""
    timeout: float | None
    """Seconds for the whole call, retries and a repeated upload included; None for no limit."""


class OpenOptions(TypedDict, total=False):
    """Keywords of `open`."""

    x: Sequence[str] | str | None
    """Columns that are variables; by default all but ``y`` and ``weights``."""
    y: str | None
    """Column that is the target."""
    weights: str | None
    """Column of the rows' weights."""
    dtype: Literal["auto", "float32", "float64"] | np.dtype[Any] | type[np.floating[Any] | float]
    """As for `upload`: "float32", "float64", or "auto" (default), by which the server chooses."""
    timeout: float | None
    """Seconds for the whole call, retries included; None for no limit."""


class SharedOptions(CommonOptions, total=False):
    """Keywords of `evaluate` and `run` that do not ask for further outputs."""

    loss: Loss | LossFunction | str | None
    """Ask for this loss of each expression; None for none. A name, a `warpfit.LossFunction`, or
    the text of a loss over ``f``, ``y``, ``w`` and ``d`` = f - y, which is averaged."""


class LossOptions(CommonOptions, total=False):
    """Keywords of an evaluation that returns losses alone, for type checkers."""

    loss: Required[Loss | LossFunction | str]


class GradientOptions(SharedOptions, total=False):
    """Keywords of an evaluation that returns losses and their gradients, for type checkers."""

    gradient: Required[Literal[True]]


class ScalingOptions(SharedOptions, total=False):
    """Keywords of an evaluation that returns losses, slopes and intercepts, for type checkers."""

    linear_scaling: Required[Literal[True]]


class EvaluateOptions(SharedOptions, total=False):
    """Keywords of `evaluate` and `run`."""

    gradient: bool
    """Ask for the derivatives of each loss by the parameters."""
    jacobian: bool
    """Ask for the derivatives of all values by the parameters."""
    variable_gradient: bool
    """Ask for the derivatives of each loss by a shift of each variable."""
    reductions: bool
    """Ask for sum, mean, least, greatest and count of non-finite values."""
    linear_scaling: bool
    """Score the best a + b f instead of f (Keijzer 2003), and ask for b and a."""
    correlation: bool
    """Ask for Pearson's correlation of values and target."""


class FitOptions(CommonOptions, total=False):
    """Keywords of `optimize`."""

    loss: Loss | LossFunction | str
    """The loss to minimise (r2 is maximised), as in `evaluate`; "mse" by default."""
    method: Method | Literal["auto", "lm", "bfgs"]
    """``"auto"`` (default), ``"lm"`` or ``"bfgs"``; see `warpfit.Method`."""
    accuracy: Accuracy | Literal["screening", "final"]
    """``"screening"`` (default), to compare expressions: 50 iterations, tolerances of 1e-6 (float32
    data) or 1e-8 (float64). ``"final"``, to report parameters: 2,000 iterations, tolerances near
    the rounding errors; upload as float64 for it. The next four keywords override it."""
    max_iterations: int | None
    """Most iterations of each search; None (default) as ``accuracy`` says."""
    gradient_tolerance: float | None
    """Limit of the gradient, by which a search ends; see `warpfit.request.Tolerances`. 0 switches
    the test off, None (default) means what ``accuracy`` says."""
    step_tolerance: float | None
    """The same of the length of a step, relative to that of the parameters."""
    loss_tolerance: float | None
    """The same of the change of the loss in a step, relative to the loss."""
    bounds: tuple[EachParameter, EachParameter] | None
    """Least and greatest value: each a number for all parameters, or an entry for each
    expression (a number, one number for each of its parameters, or None)."""
    fixed: EachParameter
    """Parameters that keep their start: for each expression one truth value for each parameter,
    as ``[[False, True]]`` for p2 of a single one; True for all."""
    restarts: int
    """Starts that the server draws for each expression (0 by default) and searches together with
    the given ones, which come first: log-uniform around the scale that the data give a parameter,
    with random signs. Without ``parameters`` the given start is 1 for each. The best outcome is
    returned, and with ``all_starts`` every one."""
    seed: int
    """Seed of the drawn starts; 0 by default. The same seed gives the same bits."""
    missing: Missing | Literal["refuse", "drop"]
    """Rows in which an expression is NaN or infinite: ``"refuse"`` (default) them, so that the loss
    is NaN; or ``"drop"`` them with a penalty, as if the expression had the target's mean there."""
    all_starts: bool
    """Return the outcome of every start vector, on a leading axis, instead of the best."""
    standard_errors: bool | None
    """Ask for standard errors; None (default) does for up to 20 expressions, as many as a result
    prints, if Levenberg-Marquardt fits them, which has them at no cost. A parameter that ends at a
    bound has the one that it would have without bounds; fix it to have the errors of the others
    given its value."""
    covariance: bool
    """Ask for the covariance of each expression's parameters; bounds are ignored, as above."""
    absolute_sigma: bool
    """Whether the weights are inverse variances of the target, 1/sigma^2, in its own units. Then
    covariance and standard errors follow from them alone; otherwise (default) weights are relative,
    and the residuals say how large the variances are."""
    evidence: bool
    """Ask for the evidence for each expression: `warpfit.evidence.Evidence`, by which expressions
    are compared, and what the data say of their parameters. For losses of squared differences."""
    intervals: float | None
    """Ask for profile-likelihood intervals of a level such as 0.95, in the evidence. They take some
    twenty further fits for each parameter."""
    terms: bool
    """Ask for the terms that each expression is a sum of, in the evidence, with the loss without
    each, the other parameters fitted again."""
    partial: bool
    """Return the best parameters so far when ``timeout`` is about to pass, instead of failing."""
    progress: Callable[[FitProgress], None] | None
    """Called a few times a second while the searches run."""


def shows_keywords(options: Any, **defaults: Any) -> Callable[[F], F]:
    """Have `help` and editors show the keywords of a method instead of ``**options``.

    Args:
        options: TypedDict with the keywords.
        defaults: of keywords that are not False (of truth values) or None.
    """

    def decorate(method: F) -> F:
        own = signature(method)
        keywords = []
        for name, kind in options.__annotations__.items():
            kind = getattr(kind, "__forward_arg__", kind)
            usual = defaults.get(name, False if kind in (bool, "bool") else None)
            # NumPy's ArrayLike fills a page, which nobody reads before the first sentence.
            shown = kind if len(formatannotation(kind)) <= _MOST_SHOWN else Any
            one = Parameter(name, Parameter.KEYWORD_ONLY, default=usual, annotation=shown)
            keywords.append(one)
        positional = [one for one in own.parameters.values() if one.kind != Parameter.VAR_KEYWORD]
        method.__signature__ = own.replace(parameters=[*positional, *keywords])  # type: ignore[attr-defined]
        return method

    return decorate


# ------------------------------------------------------------------------------- single values


#: Keywords of clients by the names of other packages.
_BY_OTHER_NAMES: Final = {
    **dict.fromkeys(("p0", "x0", "start", "starts", "params"), "parameters"),
    **dict.fromkeys(("maxfev", "max_nfev", "maxiter"), "max_iterations"),
    **{"ftol": "loss_tolerance", "xtol": "step_tolerance", "gtol": "gradient_tolerance"},
    **dict.fromkeys(("min", "max", "lower", "upper"), "bounds"),
    **{"absolute": "absolute_sigma", "vary": "fixed", "nan_policy": "missing"},
    **dict.fromkeys(("sigma", "yerr", "sample_weight"), "weights"),
    **{"random_state": "seed", "n_starts": "restarts", "callback": "progress"},
    **dict.fromkeys(("max_seconds", "timeout_in_seconds"), "seconds"),
    **{"niterations": "generations", "early_stop_condition": "target_loss"},
    **dict.fromkeys(("binary_operators", "unary_operators", "function_set"), "operators"),
    **{"population_size": "population", "nested_constraints": "nesting"},
}
#: What to do instead of giving a keyword to a call that has none of its meaning.
_INSTEAD: Final = {
    "weights": "Give weights= to upload, such as 1/sigma^2",
    "names": "Give names= to upload",
    **dict.fromkeys(("jac", "n_jobs"), "Leave it out: derivatives and cores need no setting"),
    "operators": "Convert first: warpfit.frontends.deap.from_deap(tree, operators=...)",
    "seconds": "Write seconds= of search, or timeout=",
    "constraints": "Write counts=, nesting=, arguments=, complexities=, max_depth= or monotonic=",
}


def check_keywords(given: Mapping[str, Any], known: Any, *others: str) -> None:
    """Check that all keywords of a call are those of a TypedDict; ``others`` are its parameters."""
    names = {*known.__optional_keys__, *others}
    for name in given:
        if name not in names:
            ours = _BY_OTHER_NAMES.get(name, name)
            remedy = f"Write {ours}=" if ours in names else _INSTEAD.get(ours)
            raise unknown_keyword(name, sorted(names), remedy)


def number(value: Any, field: str, wanted: str = "a number") -> float:
    """Return a number that a caller gave; raise InvalidArgumentError for text and other things."""
    try:
        array = real_numbers(value, field)
    except InvalidArgumentError:
        raise bad_setting(field, value, wanted) from None
    if array.size != 1:
        raise bad_setting(field, value, wanted)
    return float(array.item())


def whole_number(value: Any, field: str, wanted: str = "a whole number") -> int:
    """Return an integer that a caller gave, NumPy's included; raise InvalidArgumentError if not."""
    try:
        return operator.index(value)
    except TypeError:
        raise bad_setting(field, value, wanted) from None


def member(kind: type[E], value: Any, field: str) -> E:
    """Return the member of an enumeration; raise InvalidArgumentError for an unknown value."""
    try:
        return kind(value)
    except ValueError:
        known = did_you_mean(value, kind, f"Use one of: {', '.join(kind)}")
        what = f"{field} {value!r} is not known"
        raise InvalidArgumentError(what, "BAD_ENUM", known, field) from None


def deadline_of(timeout: Any) -> Deadline:
    """Return the deadline that begins now; raise InvalidArgumentError for what is no time."""
    wanted = "seconds, or None to wait for ever"
    seconds = None if timeout is None else number(timeout, "timeout", wanted)
    if seconds is not None and not seconds > 0:
        raise InvalidArgumentError(
            f"timeout {seconds} is not positive", "BAD_TIMEOUT", f"Give {wanted}", "timeout"
        )
    return Deadline(seconds)


def reporter(progress: Progress | bool | None) -> AbstractContextManager[Progress]:
    """Return a block with the callable for what the caller passed; True opens a tqdm bar for it."""
    if callable(progress) or not progress:
        return CallingBack(progress if callable(progress) else silent)
    require("tqdm", "tqdm", "progress")
    return _bar()


@contextmanager
def _bar() -> Iterator[Progress]:
    from tqdm.auto import tqdm

    with tqdm(desc="upload", unit="B", unit_scale=True, unit_divisor=1024) as bar:

        def report(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield report


# ------------------------------------------------------------------------------------- batches


class PopulationCache:
    """The last few lists of programs of a client as populations; threads may share it.

    A local search sends the same programs again and again, and joining their tokens takes longer
    than finding them here. The state is one tuple that is replaced as a whole: if two threads add
    a batch at the same time, one of the two may be lost, which does no harm.
    """

    def __init__(self) -> None:
        self._recent: tuple[tuple[list[Program], Population], ...] = ()

    def of(self, programs: list[Program]) -> Population:
        """Return a population of these programs, in a list that nobody changes any more."""
        for known, batch in self._recent:
            # The first and the last one tell most batches apart before equality looks at tokens.
            if (
                len(known) == len(programs)
                and known[0] is programs[0]
                and known[-1] is programs[-1]
                and known == programs
            ):
                return batch
        batch = Population.joining(programs)
        if len(batch.codes) <= _MOST_TOKENS:
            self._recent = ((programs, batch), *self._recent[: _MOST_BATCHES - 1])
        return batch


def build_batch(
    expressions: Any, parameters: Parameters, names: tuple[str, ...], cache: PopulationCache
) -> tuple[Batch, bool]:
    """Turn expressions and parameters, as `warpfit.Client.evaluate` takes them, into a batch.

    Also returned is whether answers have a leading axis for parameter vectors.
    """
    if isinstance(expressions, Batch):
        if parameters is not None:
            raise InvalidArgumentError(
                "a Batch contains its parameters",
                "BAD_PARAMETERS",
                "Leave parameters= out, or give a list of Programs",
                "parameters",
            )
        expressions.check_dtypes()
        expressions.check_shapes()
        return expressions, expressions.vectors > 1
    expressions, parameters = unwrapped(expressions), unwrapped(parameters)
    single = is_single(expressions)
    programs = [expressions] if single else expressions
    if isinstance(programs, Population):
        programs.check_dtypes()
    else:
        programs = list(programs) if isinstance(programs, list) else expression_list(programs)
        is_converted = set(map(type, programs)) == {Program}
        programs = cache.of(programs) if is_converted else as_population(programs, names)
    entries: Any = None
    if parameters is not None:
        if isinstance(parameters, Set | Mapping):
            require_order(parameters, "parameters")
        entries = list(parameters) if isinstance(parameters, Iterable) else [parameters]
        is_one_vector = len(programs.lengths) == 1 and all(
            getattr(entry, "ndim", 1) == 0
            or not (hasattr(entry, "__len__") or isinstance(entry, Iterator))
            for entry in entries
        )
        if single or is_one_vector:  # a single expression's vector may stand alone
            entries = [parameters]
    vectors = ParameterVectors.of(len(programs.lengths), entries)
    return Batch.joined(programs, vectors), vectors.leading_axis


def is_single(expressions: Any) -> bool:
    """Tell one expression from several; a DEAP tree is a subclass of list."""
    if isinstance(expressions, str) or not hasattr(expressions, "__iter__"):
        return True
    if getattr(expressions, "ndim", 1) == 0:  # an array without axes stands for its element
        return True
    return isinstance(expressions, list) and type(expressions) is not list


# ---------------------------------------------------------------------- data sets, evaluations


def build_dataset(X: Any, y: Any, weights: Any, options: UploadOptions) -> ClientDataset:
    """Turn a table into a data set; arguments and errors as for `warpfit.Client.upload`."""
    return client_dataset(
        open_table(X, y, weights, options.get("x")),
        names=options.get("names"),
        dtype=options.get("dtype", "auto"),
    )


def build_file(name: str, options: OpenOptions) -> ServerFile:
    """Turn the arguments of `open` into a file of a server; errors as there."""
    dtype = options.get("dtype", "auto")
    for field, text in (
        ("name", name),
        ("y", options.get("y")),
        ("weights", options.get("weights")),
    ):
        check_encodable(str(text or ""), field, field)
    return ServerFile(
        name=str(name),
        x=tuple(ColumnNames.of(options.get("x")).x or ()),
        y=options.get("y") or "",
        weights=options.get("weights") or "",
        dtype=None if isinstance(dtype, str) and dtype == "auto" else canonical_dtype(dtype),
    )


def build_evaluation(
    data: DatasetHandle,
    expressions: Any,
    parameters: Parameters,
    values: bool | None,
    options: EvaluateOptions,
    cache: PopulationCache | None = None,
) -> tuple[Evaluation, bool]:
    """Turn the arguments of `warpfit.Client.run` into an evaluation; the server checks its tokens.

    ``values=None`` asks for values if nothing else is asked for. Also returned is whether the
    answer has a leading axis for parameter vectors.
    """
    dataset = checked_handle(data).dataset
    layout = dataset.layout
    batch, leading_axis = build_batch(
        expressions, parameters, layout.names, cache or PopulationCache()
    )
    given = options.get("loss")
    loss = None if given is None else as_loss(given)
    outputs = {name: bool(options.get(name)) for name in FURTHER_OUTPUTS}
    if values is None:
        values = loss is None and not any(outputs.values())
    evaluation = Evaluation(
        dataset_id=dataset.content_id,
        batch=batch,
        rows=row_range(options.get("rows"), layout.rows),
        precision=member(Precision, options.get("precision", Precision.PRECISE), "precision"),
        loss=loss if isinstance(loss, Loss) else None,
        values=values,
        tier=member(Tier, options.get("tier", Tier.AUTO), "tier"),
        custom_loss=loss if isinstance(loss, LossFunction) else None,
        **outputs,
    )
    evaluation.check_options(layout)
    return evaluation, leading_axis


def row_range(rows: Any, count: int) -> tuple[int, int] | None:
    """Return the half-open row range of a slice or pair; None for all rows."""
    if rows is None:
        return None
    try:
        start, stop, step = rows.indices(count) if isinstance(rows, slice) else (*rows, 1)
        if step == 1:
            return operator.index(start), operator.index(stop)
    except (TypeError, ValueError):
        pass
    raise InvalidArgumentError(
        f"rows is {shortened(repr(rows))}",
        "BAD_ROWS",
        "Give a slice of consecutive rows or (start, stop), or upload the rows as a data set",
        "rows",
    )


# ---------------------------------------------------------------------------------------- fits


def common(options: CommonOptions) -> Any:
    """Return the common keywords for a call inside of another; it has a timeout of its own."""
    return {name: value for name, value in options.items() if name in ("rows", "precision", "tier")}


def build_fit(
    data: DatasetHandle,
    expressions: Any,
    parameters: Parameters,
    options: FitOptions,
    cache: PopulationCache | None = None,
) -> FitRequest:
    """Turn the arguments of `warpfit.Client.optimize` into a fit; the server checks its tokens."""
    shared: Any = {"loss": options.get("loss", Loss.MSE), **common(options)}
    if shared["loss"] is None:
        what = "a fit needs a loss"
        raise InvalidArgumentError(what, "LOSS_MISSING", "Give one, such as mse", "loss")
    problem, _ = build_evaluation(data, expressions, parameters, False, shared, cache)
    if parameters is None and not isinstance(expressions, Batch):
        counts = problem.batch.needed_parameters()
        if counts.sum() <= problem.batch.token_count:  # otherwise the server names the index
            vectors = ParameterVectors(counts.astype(np.uint32), np.ones(int(counts.sum())))
            problem = replace(problem, batch=Batch.joined(problem.batch, vectors))
    settings = _settings(
        problem.batch.parameter_counts, is_single(expressions), options, data.layout.dtype
    )
    if parameters is None and not isinstance(expressions, Batch):
        inside = np.ones(len(problem.batch.parameters))
        for limit, bound in ((np.maximum, settings.lower), (np.minimum, settings.upper)):
            inside = inside if bound is None else limit(inside, bound)
        problem = replace(problem, batch=replace(problem.batch, parameters=inside))
    request = FitRequest(problem, settings)
    request.check_options(data.layout)
    if options.get("standard_errors") is None:
        is_free = len(problem.batch) <= MOST_ROWS and request.method == Method.LM
        request = replace(request, settings=replace(settings, standard_errors=is_free))
    return request


def wants_evidence(options: FitOptions) -> bool:
    """Return whether a fit is asked for evidence, of the best outcome of each expression."""
    level, wanted = options.get("intervals"), "a level between 0 and 1, such as 0.95"
    if level is not None and not 0.0 < number(level, "intervals", wanted) < 1.0:
        raise bad_setting("intervals", level, wanted)
    wants = level is not None or any(options.get(name) for name in ("evidence", "terms"))
    if wants and options.get("all_starts"):
        raise InvalidArgumentError(
            "evidence is that of the best start of each expression, and all are asked for",
            "CONFLICTING_OUTPUTS",
            "Leave all_starts out, or ask for evidence in a second call",
            "evidence",
        )
    return wants


def _settings(
    counts: NDArray[np.uint32], single: bool, options: FitOptions, dtype: np.dtype[Any]
) -> FitSettings:
    bounds: Any = (None, None) if options.get("bounds") is None else options.get("bounds")
    if not isinstance(bounds, tuple) or len(bounds) != 2:  # such as SciPy's list of pairs
        wanted = "a tuple (lower, upper), each a number or an entry for each expression"
        raise bad_setting("bounds", bounds, wanted)
    lower, upper = bounds
    fixed = options.get("fixed")
    names: Any = fixed if isinstance(fixed, list | tuple) else [fixed]
    has_names = any(isinstance(name, str) for name in names)
    held = None if has_names else _flat(fixed, counts, single, "fixed", False)
    # Another number may be meant for the index of a parameter, as text for its name.
    if has_names or not (held is None or np.isin(held, (0.0, 1.0)).all()):
        raise bad_setting("fixed", fixed, _TRUTHS)
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
        fixed=None if held is None else held != 0.0,
        restarts=whole_number(options.get("restarts", 0), "restarts"),
        seed=whole_number(options.get("seed", 0), "seed"),
        missing=member(Missing, options.get("missing", Missing.REFUSE), "missing"),
        all_starts=bool(options.get("all_starts")),
        standard_errors=bool(options.get("standard_errors")),
        covariance=bool(options.get("covariance")),
        absolute_sigma=bool(options.get("absolute_sigma")),
        curvature=wants_evidence(options),
        partial=bool(options.get("partial")),
        progress=progress is not None,
    )


def _flat(
    given: Any, counts: NDArray[np.uint32], single: bool, name: str, otherwise: float
) -> NDArray[np.float64] | None:
    """Return one number for each parameter of each program, [sum(counts)]; None if none is given.

    Parameters without an entry have ``otherwise``; ``single`` tells a lone expression.
    """
    given = unwrapped(given)
    if given is None:
        return None
    # A number, other than a truth value, that stands for several may be the index of one.
    needs_truth = name == "fixed"
    if np.isscalar(given):
        if needs_truth and not isinstance(given, bool | np.bool_) and (counts > 1).any():
            raise bad_setting(name, given, _TRUTHS)
        return np.full(int(counts.sum()), number(given, name))
    if isinstance(given, Set | Mapping):
        require_order(given, name)
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
    pieces = []
    for entry, count in zip(entries, counts.tolist(), strict=True):
        if entry is None:
            entry = otherwise
        elif isinstance(entry, list | tuple):
            entry = [otherwise if value is None else value for value in entry]
        read = real_numbers(entry, name, place="position")
        if needs_truth and read.size == 1 < count and read.dtype != np.bool_:
            raise bad_setting(name, given, _TRUTHS)
        values = read.astype(np.float64).ravel()
        if len(values) not in (1, count):
            raise InvalidArgumentError(
                f"{name} has {len(values)} numbers for an expression with {count} parameters",
                "LENGTH_MISMATCH",
                "Give one number for each parameter of the expression, or one for all",
                name,
            )
        pieces.append(np.broadcast_to(values, (count,)))
    return np.concatenate(pieces)
