"""Words of other packages, given to our estimators, and what means the same here."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from inspect import Parameter, get_annotations, signature
from typing import Any, ClassVar, Final, NoReturn, ParamSpec, Self, TypeVar

from sklearn.utils.validation import check_is_fitted

from warpfit.errors import InvalidArgumentError, WarpfitError, did_you_mean, no_attribute
from warpfit.expressions.language import ALIASES, INFIX
from warpfit.frontends.pysr import FUNCTIONS
from warpfit.ops import OPERATORS
from warpfit.parse import function, parse

P = ParamSpec("P")
T = TypeVar("T")

#: What a keyword becomes: a text to follow "Write", or a function that makes it of the value.
Translation = str | Callable[[Any], str]

#: Operators by their names in gplearn, Operon and PySR, where they are called otherwise here.
_OPERATORS: Final = {
    **{"analytic_quotient": "aq", "fmin": "min", "fmax": "max", "powi": "pow", "mult": "mul"},
    **{"muladd": "fma", "abs2": "square", "sqrt_abs": "sqrtabs", "pow_abs": "powabs"},
    **{"log_abs": "logabs", "rem": "fmod"},
}
#: Leaves among Operon's symbols, which are no operators.
_LEAVES: Final = ("constant", "variable")
#: Our losses by their names in PySR, gplearn and Operon.
_LOSSES: Final = {
    "L2DistLoss()": "mse",
    "L1DistLoss()": "mae",
    "LogCoshLoss()": "log_cosh",
    "mean absolute error": "mae",
    "log loss": None,
}
#: Our losses by the patterns of PySR's that have a number.
_LOSSES_WITH_A_NUMBER: Final = {
    r"HuberLoss\((.*)\)": "warpfit.losses.huber({})",
    r"QuantileLoss\((.*)\)": "warpfit.losses.quantile({})",
    r"LPDistLoss\{(.*)\}\(\)": "'abs(d)^{}'",
    r"L1EpsilonInsLoss\((.*)\)": "'max(abs(d) - {}, 0)'",
    r"L2EpsilonInsLoss\((.*)\)": "'max(abs(d) - {}, 0)^2'",
}
#: What to write for another loss.
_LOSS_AS_TEXT: Final = "loss= as text over f, y, w and d = f - y, such as 'where(d > 0, d, -2*d)'"
#: Our criteria, as they are written, by their names in Operon.
_CRITERIA: Final = {
    "minimum_description_length": "'description_length'",
    "bayesian_information_criterion": "'evidence'",
    "mean_squared_error": "'accuracy'",
}


#: A function of Julia, such as loss(prediction, target) = (prediction - target)^2.
_JULIA_FUNCTION: Final = re.compile(
    r"\s*(\w+)\s*\(([^()]*)\)\s*(?:where\s*\{.*?\}\s*)?=(?!=)\s*(?:begin\b)?\s*(?:return\b)?"
    r"\s*(.*?)\s*;?\s*(?:\bend)?\s*",
    re.DOTALL,
)


class Without(str):
    """The reason why there is nothing like a keyword here, so that it is left out."""

    __slots__ = ()


def renamed(keyword: str) -> Callable[[Any], str]:
    """Return a translation to another keyword with the same value."""
    return lambda value: f"{keyword}={value!r}"


def _translated(julia: re.Match[str], names: str) -> str | None:
    """Translate the body of a function of Julia, whose operands get other names; None if not."""
    operands = [one.partition("::")[0].strip() for one in julia[2].split(",")]
    ours = dict(zip(operands, names, strict=False))
    body = re.sub(r"[^\W\d]\w*", lambda match: ours.get(match[0], match[0]), julia[3])
    body = _without_question(body.replace("&&", " and ").replace("||", " or "))
    try:
        parse(body, tuple(names))
    except WarpfitError:
        return None
    return body


def _without_question(text: str) -> str:
    """Write ``a ? b : c`` of Julia as where(a, b, c)."""
    condition, found, rest = text.partition("?")
    yes, _, no = map(str.strip, rest.partition(":"))
    condition = condition.strip()
    return f"where({condition}, {yes}, {_without_question(no)})" if found else condition


def _operators(value: Any) -> str:
    """Translate operators, one list here; those that are formulas of ours are defined before."""
    given = value.split(",") if isinstance(value, str) and "," in value else value
    several = [given] if isinstance(given, str) else given if isinstance(given, Iterable) else ()
    ours: list[str] = []
    defined: list[str] = []
    for one in several:
        text = str(getattr(one, "name", one)).strip()
        julia = _JULIA_FUNCTION.fullmatch(text)
        name = re.split(r"[(=]", text)[0].strip()
        name = _OPERATORS.get(name, name)
        body = FUNCTIONS.get(name)
        if name in (*INFIX, "-") or (function(name) and (body is None or name in OPERATORS)):
            ours.append(ALIASES.get(name, name))
        elif name not in _LEAVES:
            body = _translated(julia, "abc") if julia else body
            name += "_" * (name in ALIASES)
            ours.append(name)
            defined.append(f"warpfit.define({name!r}, {body or 'a formula of a, b and c'!r})")
    return f"operators={ours or 'a list'}" + " after " * bool(defined) + " and ".join(defined)


def _loss(value: Any) -> str:
    """Translate a loss by its name or from Julia, and leave others to be written as text."""
    names = [str(one) for one in (value if isinstance(value, list | tuple) else [value])]
    if julia := _JULIA_FUNCTION.fullmatch(names[0]):
        body = _translated(julia, "fyw")
        return f"loss={body!r}" if body else _LOSS_AS_TEXT
    if names[0] in ("pearson", "spearman"):
        return "loss='mse' or 'mae': correlations are no sums over rows, and a + b f is fitted"
    if "log loss" in names:
        return "SymbolicClassifier(search=SymbolicRegressor(...)), which minimises the log loss"
    for pattern, ours in _LOSSES_WITH_A_NUMBER.items():
        if found := re.fullmatch(pattern, names[0]):
            return f"loss={ours.format(found[1] or '1.0')}"
    known = [_LOSSES.get(name, name) for name in names]
    short = [name for name in known if name in ("mse", "mae", "rmse", "r2", "nmse", "log_cosh")]
    return f"loss={short[0]!r}" if short else _LOSS_AS_TEXT


def _template(value: Any) -> str:
    shown = getattr(value, "combine", None)
    return f"template={shown!r}" if isinstance(shown, str) else "template='f(x1) * exp(-g(x2))'"


def _names(value: Any) -> str:
    is_list = isinstance(value, Iterable) and not isinstance(value, str)
    given = list(value) if is_list else []
    return f"a DataFrame with columns {given}" if given else "a DataFrame, whose columns have names"


def _all(*words: str, to: Translation) -> dict[str, Translation]:
    return dict.fromkeys(words, to)


#: Where the number of processes or threads is chosen.
_CORES: Final = "engine=, or the address= of a server: an engine takes all cores by itself"
#: Our form of keywords of the ``fit`` of PySR and others.
OF_OTHER_FITS: Final[Mapping[str, Translation]] = {
    **_all("weights", "sigma", "Xresampled", to="sample_weight= of fit, such as 1 / sigma^2"),
    "X_units": "units= of the estimator",
    "y_units": "target_unit= of the estimator",
    "category": "group= of the estimator",
    **_all("variable_names", "feature_names", "names", "columns", to=_names),
    "complexity_of_variables": "complexity_of_operators= of the estimator: variables count as 1",
    "p0": "guesses= of the estimator: formulas with numbers to begin with",
}
#: Our form of keywords of the estimators of PySR, gplearn and pyoperon.
OF_OTHER_ESTIMATORS: Final[Mapping[str, Translation]] = {
    **OF_OTHER_FITS,
    **_all("niterations", "iterations", "max_iter", "n_generations", to=renamed("generations")),
    **_all("seed", "random_seed", to=renamed("random_state")),
    **_all(
        *("binary_operators", "unary_operators", "operators_binary", "operators_unary"),
        *("function_set", "allowed_symbols", "functions"),
        to=_operators,
    ),
    "population_size": renamed("population"),
    **_all("populations", "pool_size", to="population= for all formulas together"),
    **_all("maxsize", "max_length", "max_complexity", to=renamed("max_size")),
    **_all(
        *("maxdepth", "max_depth", "init_depth"),  # of first formulas the least and the greatest
        to=lambda value: (
            f"constraints={{'depth': {value[-1] if isinstance(value, tuple) else value!r}}}"
        ),
    ),
    "nested_constraints": lambda value: f"constraints={{'nesting': {value!r}}}",
    **_all("timeout_in_seconds", "max_time", "time_limit", "timeout", to=renamed("max_seconds")),
    **_all("device", "devices", to="engine='auto', which takes the GPUs if there are some"),
    **_all("elementwise_loss", "loss_function", "loss_function_expression", to=_loss),
    **_all("metric", "objectives", to=_loss),
    **_all(
        *("parsimony", "parsimony_coefficient", "adaptive_parsimony_scaling"),
        *("use_frequency", "use_frequency_in_tournament"),
        to="max_size= or model_selection=: equations_ has the best formula of each size",
    ),
    "model_selection_criterion": lambda value: f"model_selection={_CRITERIA.get(str(value), '')}",
    "dimensionless_constants_only": renamed("dimensionless_constants"),
    "dimensional_constraint_penalty": Without("a formula of wrong units is no candidate at all"),
    **_all(
        *("early_stop_condition", "stopping_criteria"),
        to="tolerance= as a part of the loss of the best constant, or callback=",
    ),
    **_all("max_evals", "max_evaluations", to="generations= or max_seconds="),
    "should_simplify": renamed("simplify"),
    **_all(
        *("batching", "batch_size", "max_samples"),  # gplearn's is a part of all rows
        to=lambda value: (
            f"sample_rows={value if type(value) is int and value > 1 else ' with a number of rows'}"
        ),
    ),
    "optimizer_iterations": renamed("fit_iterations"),
    "optimizer_likelihood": "loss=, such as 'poisson' or 'gaussian'",
    **_all("verbosity", "update_verbosity", "progress", to=lambda value: f"verbose={bool(value)}"),
    "print_precision": renamed("digits"),
    **_all("output_directory", "run_id", to="checkpoint= and output="),
    **_all(
        *("equation_file", "temp_equation_file"),
        to=lambda file: (
            f"output={file if isinstance(file, str) and file.endswith('.csv') else 'front.csv'!r}"
        ),
    ),
    "extra_sympy_mappings": "warpfit.define('name', 'formula'), and the name in operators=",
    "expression_spec": _template,
    "fraction_replaced_guesses": "guesses= alone",
    **_all(
        *("complexity_of_constants", "complexity_of_variables", "complexity_mapping"),
        to="complexity_of_operators= alone: constants and variables count as 1",
    ),
    "select_k_features": Without("sklearn.feature_selection in a Pipeline chooses columns"),
    "denoise": "loss= for noise, such as 'huber'",
    **_all("class_weight", "sample_weight", to="sample_weight= of fit"),
    "transformer": Without("SymbolicClassifier has the logistic function, and no other"),
    "hall_of_fame": Without("equations_ and programs_found() have the best formulas"),
    "n_components": Without("SymbolicTransformer makes several features"),
    "uncertainty": "sample_weight= of fit, 1 / sigma^2 of each row",
    **_all(
        *("add_model_scale_term", "add_model_intercept_term"),
        to="template='f(x1, x2)' for formulas without a slope and an intercept of their own",
    ),
    **_all("n_jobs", "n_threads", "procs", "parallelism", "multithreading", to=_CORES),
    **_all("cluster_manager", "addprocs_function", "worker_imports", to=_CORES),
    **_all("logger_spec", "logger", to="callback=, which is called with each front"),
    **_all(
        *("heap_size_hint_in_bytes", "worker_timeout", "julia_project", "julia_kwargs"),
        *("update", "fast_cycle", "turbo", "bumper", "autodiff_backend"),
        *("tempdir", "delete_tempfiles"),
        to=Without("there is no Julia, and nothing of it to set"),
    ),
    "low_memory": Without("no generation before the last one is kept"),
    "precision": Without("all numbers are float64"),
    "deterministic": "random_state=: a seed gives the same search",
    "input_stream": Without("Ctrl-C ends a search with what was found"),
    **_all(
        *("output_jax_format", "output_torch_format", "extra_jax_mappings"),
        *("extra_torch_mappings",),
        to=Without("model.code('jax') and model.code('torch') export a formula"),
    ),
    **_all(
        *("optimizer_algorithm", "optimizer_nrestarts", "optimize_probability", "optimizer"),
        *("optimizer_f_calls_limit", "should_optimize_constants", "perturbation_factor"),
        *("probability_negate_constant", "weight_optimize", "optimizer_batch_size"),
        *("local_search_probability", "lamarckian_probability", "sgd_update_rule"),
        *("sgd_learning_rate", "sgd_beta", "sgd_beta2", "sgd_epsilon", "sgd_debias"),
        *("const_range",),
        to="fit_iterations=: constants of promising formulas are always fitted",
    ),
    **_all(
        *("ncycles_per_iteration", "ncyclesperiteration", "tournament_selection_n"),
        *("tournament_selection_p", "tournament_size", "topn", "alpha", "annealing"),
        *("migration", "hof_migration", "fraction_replaced", "fraction_replaced_hof"),
        *("skip_mutation_failures", "crossover_probability", "mutation", "mutation_probability"),
        *("crossover_internal_probability", "offspring_generator", "reinserter", "brood_size"),
        *("female_selector", "male_selector", "max_selection_pressure", "comparison_factor"),
        *("irregularity_bias", "epsilon", "p_crossover", "p_subtree_mutation"),
        *("p_hoist_mutation", "p_point_mutation", "p_point_replace", "weight_add_node"),
        *("weight_insert_node", "weight_delete_node", "weight_do_nothing"),
        *("weight_mutate_constant", "weight_mutate_operator", "weight_mutate_feature"),
        *("weight_swap_operands", "weight_rotate_tree", "weight_randomize", "weight_simplify"),
        *("warmup_maxsize_by", "init_method", "initialization_method"),
        *("initialization_max_length", "initialization_max_depth", "symbolic_mode"),
        to=Without("the engine varies and chooses formulas in its own way"),
    ),
}
#: Our form of keywords of functions that fit parameters.
OF_OTHER_OPTIMIZERS: Final[Mapping[str, Translation]] = {
    "p0": renamed("start"),
    **_all("sigma", "weights", to="sample_weight= of fit, such as 1 / sigma^2"),
    **_all("maxfev", "max_nfev", "maxiter", to=renamed("max_iterations")),
    **_all("model", "func", "f", to="expression= as text, such as 'p1*exp(-p2*x1)'"),
    **_all("n_jobs", "n_threads", to=_CORES),
    "jac": Without("derivatives are exact"),
}
#: Our form of keywords of the ``predict`` of others.
OF_OTHER_PREDICTIONS: Final[Mapping[str, Translation]] = {
    "category": "the column of groups into X, as for fit",
}

#: Where the front is found.
_TABLE: Final = "equations_, a sequence that prints; equations_.to_pandas() is a DataFrame"
#: Attributes of the estimators of PySR, gplearn, pyoperon and lmfit, and what means the same.
OF_OTHER_OBJECTS: Final[Mapping[str, str]] = {
    "get_best": "expression_ and program_, or equations_[index]",
    **dict.fromkeys(
        ("best_", "formula_", "formula", "best_formula_", "equation_", "best_equation_"),
        "expression_, or program_",
    ),
    "nout_": "program_, a list for several targets",
    **dict.fromkeys(("save", "load"), "pickle or joblib, which save a fitted estimator"),
    **dict.fromkeys(("expressions_", "formulas_"), "expression_, or get_feature_names_out()"),
    "latex_table": "equations_.latex_table()",
    "refresh": "equations_, which is always up to date",
    "from_file": "pickle or joblib to save a fitted estimator; checkpoint= goes on with a search",
    "get_hof": _TABLE,
    "equations": _TABLE,
    "hall_of_fame_": _TABLE,
    "pareto_front_": "front_, a list of Equation with programs, or equations_, which prints",
    "equation_file_": "output='front.csv' of the estimator for a file of the front",
    "equation_file_contents_": _TABLE,
    "run_id_": "checkpoint= of the estimator",
    "output_directory_": "checkpoint= and output= of the estimator",
    "jax": "to_numpy(), or code(language)",
    "pytorch": "code('torch'), or to_numpy()",
    "torch": "code('torch'), or to_numpy()",
    "_program": "program_",
    "_programs": "programs_found()",
    "_best_programs": "the programs_ of the estimator, or equations_",
    "run_details_": "callback= of the estimator, which gets each front",
    "model_": "program_, which prints, or expression_",
    "get_model_string": "expression_, or code(language)",
    "evaluate_model": "predict(X, index)",
    "stats_": "n_iter_, reason_ and start_seconds_",
    "individuals_": "programs_found()",
    "feature_importances_": "sklearn.inspection.permutation_importance(model, X, y)",
    "coef_": "parameters_ of ParameterOptimizer, or expression_",
    "popt": "parameters_ of ParameterOptimizer",
    "best_values": "parameters_ of ParameterOptimizer",
    "params": "parameters_ of ParameterOptimizer",
    "pcov": "standard_errors_ of ParameterOptimizer, or client.optimize(..., covariance=True)",
    "stderr": "standard_errors_ of ParameterOptimizer",
    "best_fit": "predict(X)",
    "fit_report": "print(client.optimize(...)), or parameters_ and standard_errors_",
    "redchi": "loss_",
    "plot": "plot_fit(X, y) or plot_front() of SymbolicRegressor",
    "to_latex": "latex()",
    "to_sympy": "sympy()",
}


#: Attributes of rows of tables of other packages, and what means the same of an `Equation`.
OF_OTHER_EQUATIONS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("text", "formula", "expression"), "equation, or program"),
    **dict.fromkeys(("sympy", "sympy_format"), "program.sympy(names)"),
    **dict.fromkeys(("lambda_format", "to_numpy"), "program.to_numpy(names)"),
    "code": "program.code(language, names)",
    "predict": "predict(X, index) of the estimator, or program.to_numpy()",
    "size": "complexity",
    "length": "description_length, or choice_length",
    "held_out": "r2_held_out",
}


class _Elsewhere:
    """An attribute of a class that is answered by what to write instead."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> NoReturn:
        raise no_attribute(owner.__name__, self.name, (), OF_OTHER_OBJECTS)


class AnswersOtherWords:
    """An estimator that answers words of other packages by what to write instead.

    Missing attributes raise AttributeError, so that ``hasattr``, copies and pickles see none.
    """

    #: Our form of parameters of other estimators.
    _other_parameters: ClassVar[Mapping[str, Translation]] = OF_OTHER_ESTIMATORS

    # The others are called on instances.
    from_file = _Elsewhere("from_file")

    def set_params(self, **params: Any) -> Self:
        """Set parameters; one that there is not is answered as by the constructor."""
        known = signature(type(self)).parameters
        wrong = {name: value for name, value in params.items() if "__" not in name}
        wrong = {name: value for name, value in wrong.items() if name not in known}
        if wrong:
            raise _unknown_keywords(type(self).__name__, wrong, list(known), self._other_parameters)
        super().set_params(**params)  # type: ignore[misc]
        return self

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError with the remedy for an attribute that there is not."""
        if name.endswith("_") and any(name in get_annotations(one) for one in type(self).__mro__):
            check_is_fitted(self)
        if hasattr(type(self), name) or name in dir(type(self)):
            # A property has raised AttributeError, as those of an estimator that is not fitted.
            return object.__getattribute__(self, name)
        raise no_attribute(type(self).__name__, name, dir(type(self)), OF_OTHER_OBJECTS)


def check_loss(loss: Any) -> None:
    """Refuse losses of other packages; raise InvalidArgumentError with ours.

    Args:
        loss: what was given, which may be a loss of ours.
    """
    if not isinstance(loss, str):
        return
    is_other = loss in (*_LOSSES, "pearson", "spearman") or _JULIA_FUNCTION.fullmatch(loss)
    if is_other or re.match(r"\w*Loss[({]", loss):
        remedy = f"Write {_loss(loss)}"
        raise InvalidArgumentError(f"loss is {loss!r}", "BAD_SETTING", remedy, "loss")


def explains_keywords(
    others: Mapping[str, Translation],
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Have a method refuse keywords that it does not have with the ones that are meant.

    Args:
        others: what to write instead of keywords of other programs or classes, by their names.
    """

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        kinds = signature(method).parameters
        known = [name for name, one in kinds.items() if one.kind != Parameter.POSITIONAL_ONLY]
        known = [name for name in known if name != "self"]

        @wraps(method)
        def explained(*args: P.args, **kwargs: P.kwargs) -> T:
            wrong = {name: value for name, value in kwargs.items() if name not in known}
            if wrong:
                what = type(args[0]).__name__ if args else method.__qualname__
                meant = others
                if args and method.__name__ != "__init__":
                    # A method may be given settings, and what they are called elsewhere.
                    owner, where = type(args[0]), f"{what}(...)"
                    words = getattr(owner, "_other_parameters", ())
                    meant = {
                        **dict.fromkeys(words, f"it as a setting of {where}"),
                        **{name: f"{name}= into {where}" for name in signature(owner).parameters},
                        **others,
                    }
                raise _unknown_keywords(what, wrong, known, meant)
            return method(*args, **kwargs)

        return explained

    return decorate


def is_code(text: str) -> bool:
    """Tell arguments of a call from sentences."""
    try:
        return bool(ast.parse(f"f({text})"))
    except SyntaxError:
        return False


def _unknown_keywords(
    what: str, wrong: Mapping[str, Any], known: list[str], others: Mapping[str, Translation]
) -> InvalidArgumentError:
    """Return the error that says of each keyword what to write instead."""
    remedies = {}
    for name, value in wrong.items():
        other = others.get(name)
        if other is None:
            listed = f"Use {', '.join(known)}"
            # An error's remedy is short: a longer list would be cut off.
            listed = listed if len(listed) < 200 else f"help({what}) lists its keywords"
            remedies[name] = did_you_mean(name, known, listed, "=")
        elif isinstance(other, Without):
            remedies[name] = f"Leave it out: {other}"
        else:
            remedies[name] = f"Write {other if isinstance(other, str) else other(value)}"
    remedy = next(iter(remedies.values()))
    if len(remedies) > 1:  # in one, in which operators of several keywords are one list
        written = {name: text.removeprefix("Write ") for name, text in remedies.items()}
        found = (re.fullmatch(r"operators=\[(.*?)\](.*)", text) for text in written.values())
        lists = [match for match in found if match]
        first = [f"operators=[{', '.join(match[1] for match in lists)}]"] if lists else []
        first += [text for text in written.values() if is_code(text) and text[:9] != "operators"]
        left = [name for name, text in remedies.items() if text.startswith("Leave")]
        behind = "".join(match[2] for match in lists)
        sentences = [f"Write {', '.join(dict.fromkeys(first))}{behind}"] if first else []
        sentences += [f"Leave out {', '.join(left)}"] if left else []
        for name, text in remedies.items():
            if not (name in left or is_code(written[name]) or written[name][:11] == "operators=["):
                sentences.append(f"{name}: {text}")
        remedy = ". ".join(sentences)
    listed = ", ".join(map(repr, wrong))
    error = InvalidArgumentError(
        f"{what} has no keyword{'s' if len(wrong) > 1 else ''} {listed}",
        "UNKNOWN_KEYWORD",
        remedy,
        next(iter(wrong)),
    )
    # An error's remedy is short, because it may travel; a note is printed below it.
    if len(wrong) > 1:
        error.add_note("\n".join(f"{name}: {text}" for name, text in remedies.items()))
    return error
