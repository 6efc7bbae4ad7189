"""Keywords that an estimator does not have, and what means the same here."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import Parameter, signature
from typing import Final, ParamSpec, TypeVar

from warpfit.errors import InvalidArgumentError

P = ParamSpec("P")
T = TypeVar("T")

#: Our form of keywords of PySR's and gplearn's estimators.
OF_OTHER_ESTIMATORS: Final = {
    "niterations": "generations=",
    **dict.fromkeys(("binary_operators", "unary_operators", "function_set"),
                    "operators= with all operators in one list"),
    **dict.fromkeys(("populations", "population_size"), "population="),
    "maxsize": "max_size=",
    "maxdepth": 'constraints={"depth": ...}',
    "nested_constraints": 'constraints={"nesting": ...}',
    "timeout_in_seconds": "max_seconds=",
    **dict.fromkeys(("elementwise_loss", "loss_function", "metric"), "loss="),
    **dict.fromkeys(("parsimony", "parsimony_coefficient"), "model_selection= or max_size="),
    "dimensionless_constants_only": "dimensionless_constants=",
    **dict.fromkeys(("early_stop_condition", "stopping_criteria"), "tolerance="),
    "should_simplify": "simplify=",
    **dict.fromkeys(("batching", "batch_size", "max_samples"), "sample_rows="),
    "optimizer_iterations": "fit_iterations=",
    **dict.fromkeys(("verbosity", "progress"), "verbose="),
    "print_precision": "digits=",
    **dict.fromkeys(("output_directory", "run_id", "temp_equation_file"), "checkpoint="),
    "expression_spec": "template=",
    **dict.fromkeys(("procs", "parallelism", "n_jobs"), "engine=, or the address= of a server: "
                    "an engine takes all cores by itself"),
}  # fmt: skip
#: Our form of keywords of PySR's ``fit``.
OF_OTHER_FITS: Final = {
    "weights": "sample_weight=",
    "X_units": "units= of the estimator",
    "y_units": "target_unit= of the estimator",
    "category": "group= of the estimator",
    "variable_names": "a DataFrame, whose columns have names",
}


def explains_keywords(others: Mapping[str, str]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Have a method refuse keywords that it does not have with the one that is meant.

    Args:
        others: what to write instead of keywords of other programs or classes, by their names.
    """

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        kinds = signature(method).parameters
        known = [name for name, one in kinds.items() if one.kind != Parameter.POSITIONAL_ONLY]
        known = [name for name in known if name != "self"]

        @wraps(method)
        def explained(*args: P.args, **kwargs: P.kwargs) -> T:
            for name in kwargs:
                if name in known:
                    continue
                close = difflib.get_close_matches(name, known, n=1)
                remedy = f"Did you mean {close[0]}=?" if close else f"Use {', '.join(known)}"
                if name in others:
                    remedy = f"Write {others[name]}"
                what = type(args[0]).__name__ if args else method.__qualname__
                raise InvalidArgumentError(
                    f"{what} has no keyword {name!r}", "UNKNOWN_KEYWORD", remedy, name
                )
            return method(*args, **kwargs)

        return explained

    return decorate
