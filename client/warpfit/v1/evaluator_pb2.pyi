from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    DTYPE_FLOAT32: _ClassVar[DType]
    DTYPE_FLOAT64: _ClassVar[DType]

class Precision(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PRECISION_PRECISE: _ClassVar[Precision]
    PRECISION_FAST: _ClassVar[Precision]

class Loss(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOSS_NONE: _ClassVar[Loss]
    LOSS_SSE: _ClassVar[Loss]
    LOSS_MSE: _ClassVar[Loss]
    LOSS_RMSE: _ClassVar[Loss]
    LOSS_MAE: _ClassVar[Loss]
    LOSS_R2: _ClassVar[Loss]
    LOSS_NMSE: _ClassVar[Loss]

class Closing(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CLOSING_SUM: _ClassVar[Closing]
    CLOSING_MEAN: _ClassVar[Closing]
    CLOSING_ROOT: _ClassVar[Closing]
    CLOSING_RELATIVE: _ClassVar[Closing]
    CLOSING_SCORE: _ClassVar[Closing]

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_AUTO: _ClassVar[Tier]
    TIER_INTERPRETER: _ClassVar[Tier]
    TIER_COMPILED: _ClassVar[Tier]

class Method(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    METHOD_AUTO: _ClassVar[Method]
    METHOD_LM: _ClassVar[Method]
    METHOD_BFGS: _ClassVar[Method]

class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REASON_UNSPECIFIED: _ClassVar[Reason]
    REASON_GRADIENT: _ClassVar[Reason]
    REASON_STEP: _ClassVar[Reason]
    REASON_LOSS: _ClassVar[Reason]
    REASON_ITERATIONS: _ClassVar[Reason]
    REASON_DEADLINE: _ClassVar[Reason]
    REASON_NOT_FINITE: _ClassVar[Reason]
    REASON_STALLED: _ClassVar[Reason]

class Missing(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MISSING_REFUSE: _ClassVar[Missing]
    MISSING_DROP: _ClassVar[Missing]

class Form(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FORM_SCALED: _ClassVar[Form]
    FORM_PLAIN: _ClassVar[Form]

class End(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    END_NONE: _ClassVar[End]
    END_TIME: _ClassVar[End]
    END_GENERATIONS: _ClassVar[End]
    END_FORMULAS: _ClassVar[End]
    END_TARGET_LOSS: _ClassVar[End]
    END_IDLE: _ClassVar[End]
    END_CANCELLED: _ClassVar[End]

class Contract(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CONTRACT_UNSPECIFIED: _ClassVar[Contract]
    CONTRACT_VERSION: _ClassVar[Contract]
DTYPE_UNSPECIFIED: DType
DTYPE_FLOAT32: DType
DTYPE_FLOAT64: DType
PRECISION_PRECISE: Precision
PRECISION_FAST: Precision
LOSS_NONE: Loss
LOSS_SSE: Loss
LOSS_MSE: Loss
LOSS_RMSE: Loss
LOSS_MAE: Loss
LOSS_R2: Loss
LOSS_NMSE: Loss
CLOSING_SUM: Closing
CLOSING_MEAN: Closing
CLOSING_ROOT: Closing
CLOSING_RELATIVE: Closing
CLOSING_SCORE: Closing
TIER_AUTO: Tier
TIER_INTERPRETER: Tier
TIER_COMPILED: Tier
METHOD_AUTO: Method
METHOD_LM: Method
METHOD_BFGS: Method
REASON_UNSPECIFIED: Reason
REASON_GRADIENT: Reason
REASON_STEP: Reason
REASON_LOSS: Reason
REASON_ITERATIONS: Reason
REASON_DEADLINE: Reason
REASON_NOT_FINITE: Reason
REASON_STALLED: Reason
MISSING_REFUSE: Missing
MISSING_DROP: Missing
FORM_SCALED: Form
FORM_PLAIN: Form
END_NONE: End
END_TIME: End
END_GENERATIONS: End
END_FORMULAS: End
END_TARGET_LOSS: End
END_IDLE: End
END_CANCELLED: End
CONTRACT_UNSPECIFIED: Contract
CONTRACT_VERSION: Contract

class DatasetLayout(_message.Message):
    __slots__ = ("dtype", "variables", "rows", "has_target", "has_weights", "names")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    HAS_TARGET_FIELD_NUMBER: _ClassVar[int]
    HAS_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    dtype: DType
    variables: int
    rows: int
    has_target: bool
    has_weights: bool
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, dtype: _Optional[_Union[DType, str]] = ..., variables: _Optional[int] = ..., rows: _Optional[int] = ..., has_target: bool = ..., has_weights: bool = ..., names: _Optional[_Iterable[str]] = ...) -> None: ...

class UploadVariablesRequest(_message.Message):
    __slots__ = ("header", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: UploadHeader
    data: bytes
    def __init__(self, header: _Optional[_Union[UploadHeader, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class UploadHeader(_message.Message):
    __slots__ = ("layout", "content_id")
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    CONTENT_ID_FIELD_NUMBER: _ClassVar[int]
    layout: DatasetLayout
    content_id: bytes
    def __init__(self, layout: _Optional[_Union[DatasetLayout, _Mapping]] = ..., content_id: _Optional[bytes] = ...) -> None: ...

class OpenDatasetRequest(_message.Message):
    __slots__ = ("name", "x", "y", "weights", "dtype")
    NAME_FIELD_NUMBER: _ClassVar[int]
    X_FIELD_NUMBER: _ClassVar[int]
    Y_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    x: _containers.RepeatedScalarFieldContainer[str]
    y: str
    weights: str
    dtype: DType
    def __init__(self, name: _Optional[str] = ..., x: _Optional[_Iterable[str]] = ..., y: _Optional[str] = ..., weights: _Optional[str] = ..., dtype: _Optional[_Union[DType, str]] = ...) -> None: ...

class DatasetInfo(_message.Message):
    __slots__ = ("content_id", "layout", "lost_digits")
    CONTENT_ID_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    LOST_DIGITS_FIELD_NUMBER: _ClassVar[int]
    content_id: bytes
    layout: DatasetLayout
    lost_digits: str
    def __init__(self, content_id: _Optional[bytes] = ..., layout: _Optional[_Union[DatasetLayout, _Mapping]] = ..., lost_digits: _Optional[str] = ...) -> None: ...

class GetVariablesRequest(_message.Message):
    __slots__ = ("content_id",)
    CONTENT_ID_FIELD_NUMBER: _ClassVar[int]
    content_id: bytes
    def __init__(self, content_id: _Optional[bytes] = ...) -> None: ...

class ReleaseVariablesRequest(_message.Message):
    __slots__ = ("content_id", "everywhere")
    CONTENT_ID_FIELD_NUMBER: _ClassVar[int]
    EVERYWHERE_FIELD_NUMBER: _ClassVar[int]
    content_id: bytes
    everywhere: bool
    def __init__(self, content_id: _Optional[bytes] = ..., everywhere: bool = ...) -> None: ...

class ReleaseVariablesResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LossFunction(_message.Message):
    __slots__ = ("codes", "values", "closing")
    CODES_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    CLOSING_FIELD_NUMBER: _ClassVar[int]
    codes: bytes
    values: bytes
    closing: Closing
    def __init__(self, codes: _Optional[bytes] = ..., values: _Optional[bytes] = ..., closing: _Optional[_Union[Closing, str]] = ...) -> None: ...

class EvaluateRequest(_message.Message):
    __slots__ = ("content_id", "rows", "programs", "precision", "values", "loss", "tier", "loss_function", "gradient", "jacobian", "variable_gradient", "reductions", "linear_scaling", "correlation", "pieces")
    CONTENT_ID_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    PROGRAMS_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    LOSS_FUNCTION_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_FIELD_NUMBER: _ClassVar[int]
    JACOBIAN_FIELD_NUMBER: _ClassVar[int]
    VARIABLE_GRADIENT_FIELD_NUMBER: _ClassVar[int]
    REDUCTIONS_FIELD_NUMBER: _ClassVar[int]
    LINEAR_SCALING_FIELD_NUMBER: _ClassVar[int]
    CORRELATION_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    content_id: bytes
    rows: RowRange
    programs: Programs
    precision: Precision
    values: bool
    loss: Loss
    tier: Tier
    loss_function: LossFunction
    gradient: bool
    jacobian: bool
    variable_gradient: bool
    reductions: bool
    linear_scaling: bool
    correlation: bool
    pieces: bool
    def __init__(self, content_id: _Optional[bytes] = ..., rows: _Optional[_Union[RowRange, _Mapping]] = ..., programs: _Optional[_Union[Programs, _Mapping]] = ..., precision: _Optional[_Union[Precision, str]] = ..., values: bool = ..., loss: _Optional[_Union[Loss, str]] = ..., tier: _Optional[_Union[Tier, str]] = ..., loss_function: _Optional[_Union[LossFunction, _Mapping]] = ..., gradient: bool = ..., jacobian: bool = ..., variable_gradient: bool = ..., reductions: bool = ..., linear_scaling: bool = ..., correlation: bool = ..., pieces: bool = ...) -> None: ...

class RowRange(_message.Message):
    __slots__ = ("start", "stop")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    start: int
    stop: int
    def __init__(self, start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class Programs(_message.Message):
    __slots__ = ("codes", "values", "lengths", "parameter_counts", "parameters", "vectors")
    CODES_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_COUNTS_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    codes: bytes
    values: bytes
    lengths: bytes
    parameter_counts: bytes
    parameters: bytes
    vectors: int
    def __init__(self, codes: _Optional[bytes] = ..., values: _Optional[bytes] = ..., lengths: _Optional[bytes] = ..., parameter_counts: _Optional[bytes] = ..., parameters: _Optional[bytes] = ..., vectors: _Optional[int] = ...) -> None: ...

class EvaluateResponse(_message.Message):
    __slots__ = ("header", "losses", "values", "offset", "timings", "gradients", "jacobian", "variable_gradients", "reductions", "scaling", "correlations")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    GRADIENTS_FIELD_NUMBER: _ClassVar[int]
    JACOBIAN_FIELD_NUMBER: _ClassVar[int]
    VARIABLE_GRADIENTS_FIELD_NUMBER: _ClassVar[int]
    REDUCTIONS_FIELD_NUMBER: _ClassVar[int]
    SCALING_FIELD_NUMBER: _ClassVar[int]
    CORRELATIONS_FIELD_NUMBER: _ClassVar[int]
    header: ResultHeader
    losses: bytes
    values: bytes
    offset: int
    timings: Timings
    gradients: bytes
    jacobian: bytes
    variable_gradients: bytes
    reductions: bytes
    scaling: bytes
    correlations: bytes
    def __init__(self, header: _Optional[_Union[ResultHeader, _Mapping]] = ..., losses: _Optional[bytes] = ..., values: _Optional[bytes] = ..., offset: _Optional[int] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., gradients: _Optional[bytes] = ..., jacobian: _Optional[bytes] = ..., variable_gradients: _Optional[bytes] = ..., reductions: _Optional[bytes] = ..., scaling: _Optional[bytes] = ..., correlations: _Optional[bytes] = ...) -> None: ...

class ResultHeader(_message.Message):
    __slots__ = ("dtype", "programs", "vectors", "rows")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PROGRAMS_FIELD_NUMBER: _ClassVar[int]
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    dtype: DType
    programs: int
    vectors: int
    rows: int
    def __init__(self, dtype: _Optional[_Union[DType, str]] = ..., programs: _Optional[int] = ..., vectors: _Optional[int] = ..., rows: _Optional[int] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("decode", "queue", "copy_in", "compute", "copy_out", "tier", "cache_hits", "device")
    DECODE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    COPY_IN_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_FIELD_NUMBER: _ClassVar[int]
    COPY_OUT_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    CACHE_HITS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    decode: int
    queue: int
    copy_in: int
    compute: int
    copy_out: int
    tier: Tier
    cache_hits: int
    device: str
    def __init__(self, decode: _Optional[int] = ..., queue: _Optional[int] = ..., copy_in: _Optional[int] = ..., compute: _Optional[int] = ..., copy_out: _Optional[int] = ..., tier: _Optional[_Union[Tier, str]] = ..., cache_hits: _Optional[int] = ..., device: _Optional[str] = ...) -> None: ...

class OptimizeRequest(_message.Message):
    __slots__ = ("problem", "method", "max_iterations", "gradient_tolerance", "step_tolerance", "loss_tolerance", "lower", "upper", "fixed", "all_starts", "standard_errors", "covariance", "partial", "progress", "restarts", "seed", "missing", "curvature", "absolute_sigma")
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    MAX_ITERATIONS_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_TOLERANCE_FIELD_NUMBER: _ClassVar[int]
    STEP_TOLERANCE_FIELD_NUMBER: _ClassVar[int]
    LOSS_TOLERANCE_FIELD_NUMBER: _ClassVar[int]
    LOWER_FIELD_NUMBER: _ClassVar[int]
    UPPER_FIELD_NUMBER: _ClassVar[int]
    FIXED_FIELD_NUMBER: _ClassVar[int]
    ALL_STARTS_FIELD_NUMBER: _ClassVar[int]
    STANDARD_ERRORS_FIELD_NUMBER: _ClassVar[int]
    COVARIANCE_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    CURVATURE_FIELD_NUMBER: _ClassVar[int]
    ABSOLUTE_SIGMA_FIELD_NUMBER: _ClassVar[int]
    problem: EvaluateRequest
    method: Method
    max_iterations: int
    gradient_tolerance: float
    step_tolerance: float
    loss_tolerance: float
    lower: bytes
    upper: bytes
    fixed: bytes
    all_starts: bool
    standard_errors: bool
    covariance: bool
    partial: bool
    progress: bool
    restarts: int
    seed: int
    missing: Missing
    curvature: bool
    absolute_sigma: bool
    def __init__(self, problem: _Optional[_Union[EvaluateRequest, _Mapping]] = ..., method: _Optional[_Union[Method, str]] = ..., max_iterations: _Optional[int] = ..., gradient_tolerance: _Optional[float] = ..., step_tolerance: _Optional[float] = ..., loss_tolerance: _Optional[float] = ..., lower: _Optional[bytes] = ..., upper: _Optional[bytes] = ..., fixed: _Optional[bytes] = ..., all_starts: bool = ..., standard_errors: bool = ..., covariance: bool = ..., partial: bool = ..., progress: bool = ..., restarts: _Optional[int] = ..., seed: _Optional[int] = ..., missing: _Optional[_Union[Missing, str]] = ..., curvature: bool = ..., absolute_sigma: bool = ...) -> None: ...

class OptimizeResponse(_message.Message):
    __slots__ = ("progress", "result")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    progress: FitProgress
    result: FitResult
    def __init__(self, progress: _Optional[_Union[FitProgress, _Mapping]] = ..., result: _Optional[_Union[FitResult, _Mapping]] = ...) -> None: ...

class FitProgress(_message.Message):
    __slots__ = ("iterations", "active", "searches")
    ITERATIONS_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    SEARCHES_FIELD_NUMBER: _ClassVar[int]
    iterations: int
    active: int
    searches: int
    def __init__(self, iterations: _Optional[int] = ..., active: _Optional[int] = ..., searches: _Optional[int] = ...) -> None: ...

class FitResult(_message.Message):
    __slots__ = ("parameters", "losses", "initial_losses", "iterations", "evaluations", "reasons", "starts", "standard_errors", "covariances", "timings", "curvatures")
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    INITIAL_LOSSES_FIELD_NUMBER: _ClassVar[int]
    ITERATIONS_FIELD_NUMBER: _ClassVar[int]
    EVALUATIONS_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    STANDARD_ERRORS_FIELD_NUMBER: _ClassVar[int]
    COVARIANCES_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    CURVATURES_FIELD_NUMBER: _ClassVar[int]
    parameters: bytes
    losses: bytes
    initial_losses: bytes
    iterations: bytes
    evaluations: bytes
    reasons: bytes
    starts: bytes
    standard_errors: bytes
    covariances: bytes
    timings: Timings
    curvatures: bytes
    def __init__(self, parameters: _Optional[bytes] = ..., losses: _Optional[bytes] = ..., initial_losses: _Optional[bytes] = ..., iterations: _Optional[bytes] = ..., evaluations: _Optional[bytes] = ..., reasons: _Optional[bytes] = ..., starts: _Optional[bytes] = ..., standard_errors: _Optional[bytes] = ..., covariances: _Optional[bytes] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., curvatures: _Optional[bytes] = ...) -> None: ...

class SearchRequest(_message.Message):
    __slots__ = ("content_id", "rows", "screening_rows", "operators", "variables", "rules", "units", "loss", "loss_function", "form", "template", "group", "guesses", "islands", "population", "no_pairs", "fit_iterations", "seed", "max_seconds", "max_generations", "max_formulas", "idle_generations", "target_loss", "definitions", "increasing", "decreasing")
    class OperatorsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    CONTENT_ID_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SCREENING_ROWS_FIELD_NUMBER: _ClassVar[int]
    OPERATORS_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    RULES_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FUNCTION_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    GUESSES_FIELD_NUMBER: _ClassVar[int]
    ISLANDS_FIELD_NUMBER: _ClassVar[int]
    POPULATION_FIELD_NUMBER: _ClassVar[int]
    NO_PAIRS_FIELD_NUMBER: _ClassVar[int]
    FIT_ITERATIONS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MAX_GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_FORMULAS_FIELD_NUMBER: _ClassVar[int]
    IDLE_GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    TARGET_LOSS_FIELD_NUMBER: _ClassVar[int]
    DEFINITIONS_FIELD_NUMBER: _ClassVar[int]
    INCREASING_FIELD_NUMBER: _ClassVar[int]
    DECREASING_FIELD_NUMBER: _ClassVar[int]
    content_id: bytes
    rows: RowRange
    screening_rows: int
    operators: _containers.ScalarMap[str, float]
    variables: _containers.RepeatedScalarFieldContainer[int]
    rules: SearchRules
    units: SearchUnits
    loss: Loss
    loss_function: LossFunction
    form: Form
    template: SearchTemplate
    group: int
    guesses: Programs
    islands: int
    population: int
    no_pairs: bool
    fit_iterations: int
    seed: int
    max_seconds: float
    max_generations: int
    max_formulas: int
    idle_generations: int
    target_loss: float
    definitions: _containers.RepeatedCompositeFieldContainer[SearchDefinition]
    increasing: _containers.RepeatedScalarFieldContainer[int]
    decreasing: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, content_id: _Optional[bytes] = ..., rows: _Optional[_Union[RowRange, _Mapping]] = ..., screening_rows: _Optional[int] = ..., operators: _Optional[_Mapping[str, float]] = ..., variables: _Optional[_Iterable[int]] = ..., rules: _Optional[_Union[SearchRules, _Mapping]] = ..., units: _Optional[_Union[SearchUnits, _Mapping]] = ..., loss: _Optional[_Union[Loss, str]] = ..., loss_function: _Optional[_Union[LossFunction, _Mapping]] = ..., form: _Optional[_Union[Form, str]] = ..., template: _Optional[_Union[SearchTemplate, _Mapping]] = ..., group: _Optional[int] = ..., guesses: _Optional[_Union[Programs, _Mapping]] = ..., islands: _Optional[int] = ..., population: _Optional[int] = ..., no_pairs: bool = ..., fit_iterations: _Optional[int] = ..., seed: _Optional[int] = ..., max_seconds: _Optional[float] = ..., max_generations: _Optional[int] = ..., max_formulas: _Optional[int] = ..., idle_generations: _Optional[int] = ..., target_loss: _Optional[float] = ..., definitions: _Optional[_Iterable[_Union[SearchDefinition, _Mapping]]] = ..., increasing: _Optional[_Iterable[int]] = ..., decreasing: _Optional[_Iterable[int]] = ...) -> None: ...

class SearchRules(_message.Message):
    __slots__ = ("max_size", "max_depth", "complexities", "counts", "nesting", "arguments")
    class ComplexitiesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class CountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class ArgumentsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: SearchRules.ArgumentSizes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[SearchRules.ArgumentSizes, _Mapping]] = ...) -> None: ...
    class Nesting(_message.Message):
        __slots__ = ("outer", "inner", "most")
        OUTER_FIELD_NUMBER: _ClassVar[int]
        INNER_FIELD_NUMBER: _ClassVar[int]
        MOST_FIELD_NUMBER: _ClassVar[int]
        outer: str
        inner: str
        most: int
        def __init__(self, outer: _Optional[str] = ..., inner: _Optional[str] = ..., most: _Optional[int] = ...) -> None: ...
    class ArgumentSizes(_message.Message):
        __slots__ = ("sizes",)
        SIZES_FIELD_NUMBER: _ClassVar[int]
        sizes: _containers.RepeatedScalarFieldContainer[int]
        def __init__(self, sizes: _Optional[_Iterable[int]] = ...) -> None: ...
    MAX_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_DEPTH_FIELD_NUMBER: _ClassVar[int]
    COMPLEXITIES_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    NESTING_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    max_size: int
    max_depth: int
    complexities: _containers.ScalarMap[str, int]
    counts: _containers.ScalarMap[str, int]
    nesting: _containers.RepeatedCompositeFieldContainer[SearchRules.Nesting]
    arguments: _containers.MessageMap[str, SearchRules.ArgumentSizes]
    def __init__(self, max_size: _Optional[int] = ..., max_depth: _Optional[int] = ..., complexities: _Optional[_Mapping[str, int]] = ..., counts: _Optional[_Mapping[str, int]] = ..., nesting: _Optional[_Iterable[_Union[SearchRules.Nesting, _Mapping]]] = ..., arguments: _Optional[_Mapping[str, SearchRules.ArgumentSizes]] = ...) -> None: ...

class SearchUnits(_message.Message):
    __slots__ = ("variables", "target", "dimensionless_constants")
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONLESS_CONSTANTS_FIELD_NUMBER: _ClassVar[int]
    variables: bytes
    target: bytes
    dimensionless_constants: bool
    def __init__(self, variables: _Optional[bytes] = ..., target: _Optional[bytes] = ..., dimensionless_constants: bool = ...) -> None: ...

class SearchTemplate(_message.Message):
    __slots__ = ("codes", "values", "arities", "fitted")
    CODES_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    ARITIES_FIELD_NUMBER: _ClassVar[int]
    FITTED_FIELD_NUMBER: _ClassVar[int]
    codes: bytes
    values: bytes
    arities: _containers.RepeatedScalarFieldContainer[int]
    fitted: int
    def __init__(self, codes: _Optional[bytes] = ..., values: _Optional[bytes] = ..., arities: _Optional[_Iterable[int]] = ..., fitted: _Optional[int] = ...) -> None: ...

class SearchDefinition(_message.Message):
    __slots__ = ("name", "codes", "values")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CODES_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    name: str
    codes: bytes
    values: bytes
    def __init__(self, name: _Optional[str] = ..., codes: _Optional[bytes] = ..., values: _Optional[bytes] = ...) -> None: ...

class SearchResponse(_message.Message):
    __slots__ = ("front", "seconds", "generations", "formulas", "distinct", "fits", "pairs", "restarts", "end", "timings")
    FRONT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    FORMULAS_FIELD_NUMBER: _ClassVar[int]
    DISTINCT_FIELD_NUMBER: _ClassVar[int]
    FITS_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    front: Front
    seconds: float
    generations: int
    formulas: int
    distinct: int
    fits: int
    pairs: int
    restarts: int
    end: End
    timings: Timings
    def __init__(self, front: _Optional[_Union[Front, _Mapping]] = ..., seconds: _Optional[float] = ..., generations: _Optional[int] = ..., formulas: _Optional[int] = ..., distinct: _Optional[int] = ..., fits: _Optional[int] = ..., pairs: _Optional[int] = ..., restarts: _Optional[int] = ..., end: _Optional[_Union[End, str]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ...) -> None: ...

class Front(_message.Message):
    __slots__ = ("programs", "sizes", "losses", "parts")
    PROGRAMS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    programs: Programs
    sizes: bytes
    losses: bytes
    parts: Programs
    def __init__(self, programs: _Optional[_Union[Programs, _Mapping]] = ..., sizes: _Optional[bytes] = ..., losses: _Optional[bytes] = ..., parts: _Optional[_Union[Programs, _Mapping]] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServerInfo(_message.Message):
    __slots__ = ("version", "engine", "devices", "limits", "operators", "datasets", "contract")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    OPERATORS_FIELD_NUMBER: _ClassVar[int]
    DATASETS_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    version: str
    engine: str
    devices: _containers.RepeatedCompositeFieldContainer[Device]
    limits: Limits
    operators: _containers.RepeatedCompositeFieldContainer[OperatorInfo]
    datasets: int
    contract: int
    def __init__(self, version: _Optional[str] = ..., engine: _Optional[str] = ..., devices: _Optional[_Iterable[_Union[Device, _Mapping]]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., operators: _Optional[_Iterable[_Union[OperatorInfo, _Mapping]]] = ..., datasets: _Optional[int] = ..., contract: _Optional[int] = ...) -> None: ...

class Device(_message.Message):
    __slots__ = ("name", "threads", "memory", "compute_capability", "driver", "tiers", "label", "serving")
    NAME_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    DRIVER_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    name: str
    threads: int
    memory: int
    compute_capability: str
    driver: str
    tiers: _containers.RepeatedScalarFieldContainer[Tier]
    label: str
    serving: bool
    def __init__(self, name: _Optional[str] = ..., threads: _Optional[int] = ..., memory: _Optional[int] = ..., compute_capability: _Optional[str] = ..., driver: _Optional[str] = ..., tiers: _Optional[_Iterable[_Union[Tier, str]]] = ..., label: _Optional[str] = ..., serving: bool = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("message_bytes", "dataset_bytes", "resident_bytes", "programs", "tokens", "program_tokens", "vectors", "result_bytes", "requests", "rows", "rate", "loss_tokens", "names", "name_bytes", "searches")
    MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATASET_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROGRAMS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROGRAM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    RESULT_BYTES_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    RATE_FIELD_NUMBER: _ClassVar[int]
    LOSS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    NAME_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEARCHES_FIELD_NUMBER: _ClassVar[int]
    message_bytes: int
    dataset_bytes: int
    resident_bytes: int
    programs: int
    tokens: int
    program_tokens: int
    vectors: int
    result_bytes: int
    requests: int
    rows: int
    rate: float
    loss_tokens: int
    names: int
    name_bytes: int
    searches: int
    def __init__(self, message_bytes: _Optional[int] = ..., dataset_bytes: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., programs: _Optional[int] = ..., tokens: _Optional[int] = ..., program_tokens: _Optional[int] = ..., vectors: _Optional[int] = ..., result_bytes: _Optional[int] = ..., requests: _Optional[int] = ..., rows: _Optional[int] = ..., rate: _Optional[float] = ..., loss_tokens: _Optional[int] = ..., names: _Optional[int] = ..., name_bytes: _Optional[int] = ..., searches: _Optional[int] = ...) -> None: ...

class OperatorInfo(_message.Message):
    __slots__ = ("code", "name", "arity", "symbol", "notes")
    CODE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARITY_FIELD_NUMBER: _ClassVar[int]
    SYMBOL_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    code: int
    name: str
    arity: int
    symbol: str
    notes: str
    def __init__(self, code: _Optional[int] = ..., name: _Optional[str] = ..., arity: _Optional[int] = ..., symbol: _Optional[str] = ..., notes: _Optional[str] = ...) -> None: ...

class ErrorDetail(_message.Message):
    __slots__ = ("reason", "message", "remedy", "field", "expression", "token", "needed", "available", "retry_after_ms")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    EXPRESSION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    NEEDED_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    remedy: str
    field: str
    expression: int
    token: int
    needed: int
    available: int
    retry_after_ms: int
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ..., remedy: _Optional[str] = ..., field: _Optional[str] = ..., expression: _Optional[int] = ..., token: _Optional[int] = ..., needed: _Optional[int] = ..., available: _Optional[int] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class ErrorStatus(_message.Message):
    __slots__ = ("code", "message", "details")
    class Detail(_message.Message):
        __slots__ = ("type_url", "value")
        TYPE_URL_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        type_url: str
        value: bytes
        def __init__(self, type_url: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    details: _containers.RepeatedCompositeFieldContainer[ErrorStatus.Detail]
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., details: _Optional[_Iterable[_Union[ErrorStatus.Detail, _Mapping]]] = ...) -> None: ...
