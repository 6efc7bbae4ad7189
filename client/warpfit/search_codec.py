"""The conversion between a search and the protobuf messages of Search."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeVar

import numpy as np

from warpfit.codec import (
    F64,
    LOSSES,
    U8,
    U32,
    WireEnum,
    batch_from_message,
    broken_answer,
    check_content_id,
    custom_loss_of,
    decodes_answer,
    pack,
    parse_message,
    received_array,
    set_custom_loss,
    set_timings,
    timings_from_message,
    unpack,
)
from warpfit.ir import Batch, Program
from warpfit.losses import Loss
from warpfit.ops import BY_CODE, OPERATORS
from warpfit.request import Timings
from warpfit.searching import (
    BASE_UNITS,
    Form,
    Front,
    Rules,
    SearchProgress,
    SearchReason,
    SearchRequest,
    Template,
    Units,
)
from warpfit.v1 import evaluator_pb2 as pb

T = TypeVar("T")

_FORMS: Final = WireEnum(Form, pb.Form)
_ENDS: Final = WireEnum((None, *SearchReason), pb.End)
#: Most fields of a message above 256 KiB, which only long guesses make so long: each operator has
#: three in each of four maps.
_MOST_FIELDS: Final = 4096
#: Numbers of a request that have their default where they are 0, or that are 0 by default.
_NUMBERS: Final = (
    *("screening_rows", "islands", "population", "seed", "max_seconds"),
    *("max_generations", "max_formulas", "idle_generations"),
)
#: Counters of a progress.
_COUNTERS: Final = ("generations", "formulas", "distinct", "fits", "pairs", "restarts")
_USUAL: Final = SearchRequest(bytes(32))

# --------------------------------------------------------------------------------------- requests


def search_to_message(request: SearchRequest) -> pb.SearchRequest:
    """Encode a search."""
    message = pb.SearchRequest(
        content_id=request.dataset_id,
        operators=request.operators,
        variables=request.variables or (),
        loss=LOSSES.codes[request.loss],
        form=_FORMS.codes[request.form],
        group=request.group,
        no_pairs=not request.pairs,
        increasing=[column for column, sign in request.monotonic.items() if sign > 0],
        decreasing=[column for column, sign in request.monotonic.items() if sign < 0],
        fit_iterations=request.fit_iterations,
        target_loss=None if request.target_loss == -math.inf else request.target_loss,
        **{name: getattr(request, name) for name in _NUMBERS},
    )
    if request.rows is not None:
        message.rows.start, message.rows.stop = request.rows
    if request.custom_loss is not None:
        set_custom_loss(message.loss_function, request.custom_loss)
    rules, set_rules = request.rules, message.rules
    set_rules.max_size, set_rules.max_depth = rules.max_size, rules.max_depth
    set_rules.complexities.update(rules.complexities)
    set_rules.counts.update(rules.counts)
    for (outer, inner), most in rules.nesting.items():
        set_rules.nesting.add(outer=outer, inner=inner, most=most)
    for operator, sizes in rules.arguments.items():
        set_rules.arguments[operator].sizes.extend(sizes)
    if (units := request.units) is not None:
        message.units.variables = pack(units.variables, F64)
        message.units.target = b"" if units.target is None else pack(units.target, F64)
        message.units.dimensionless_constants = units.dimensionless_constants
    if (template := request.template) is not None:
        message.template.codes = pack(template.codes, U8)
        message.template.values = pack(template.values, F64)
        message.template.arities.extend(template.arities)
        message.template.fitted = template.fitted
    for name, program in request.definitions.items():
        codes, values = pack(program.codes, U8), pack(program.values, F64)
        message.definitions.add(name=name, codes=codes, values=values)
    if request.guesses is not None:
        _set_batch(message.guesses, request.guesses)
    return message


def _set_batch(message: pb.Programs, batch: Batch) -> None:
    message.codes, message.values = pack(batch.codes, U8), pack(batch.values, F64)
    message.lengths = pack(batch.lengths, U32)
    message.parameter_counts = pack(batch.parameter_counts, U32)
    message.parameters, message.vectors = pack(batch.parameters, F64), batch.vectors


def search_from_message(
    message: pb.SearchRequest, dataset_id: bytes | None = None
) -> SearchRequest:
    """Decode a search; `SearchRequest.check` must follow.

    ``dataset_id`` is the name of the data set if it is not the content id. What is left out has its
    default. Operators are in the order of their codes, in which a message does not keep them.
    """
    given: dict[str, Any] = {
        name: value
        for name in _NUMBERS
        if (value := getattr(message, name)) or name != "screening_rows"
    }
    for name in ("group", "fit_iterations", "target_loss"):
        if message.HasField(name):
            given[name] = getattr(message, name)
    if message.operators:
        given["operators"] = _by_operator(message.operators)
    loss, custom = LOSSES.member(message.loss, "loss"), custom_loss_of(message)
    if message.HasField("units"):
        variables = unpack(message.units.variables, F64, "units.variables")
        if len(variables) % BASE_UNITS == 0:  # otherwise the check says what does not fit
            variables = variables.reshape(-1, BASE_UNITS)
        own = message.units.target
        target = unpack(own, F64, "units.target") if own else None
        given["units"] = Units(variables, target, message.units.dimensionless_constants)
    if message.HasField("template"):
        outer = message.template
        codes = unpack(outer.codes, U8, "template.codes")
        values = unpack(outer.values, F64, "template.values")
        given["template"] = Template(codes, values, tuple(outer.arities), outer.fitted)
    if message.HasField("guesses"):
        given["guesses"] = batch_from_message(message.guesses, "guesses")
    rules = message.rules
    return SearchRequest(
        dataset_id=dataset_id or check_content_id(message.content_id),
        rows=(message.rows.start, message.rows.stop) if message.HasField("rows") else None,
        variables=tuple(message.variables) or None,
        rules=Rules(
            max_size=rules.max_size or _USUAL.rules.max_size,
            max_depth=rules.max_depth,
            complexities=_by_operator(rules.complexities),
            counts=_by_operator(rules.counts),
            nesting={(_name(n.outer), _name(n.inner)): n.most for n in rules.nesting},
            arguments=_by_operator({name: tuple(of.sizes) for name, of in rules.arguments.items()}),
        ),
        loss=loss if loss or custom else Loss.MSE,
        custom_loss=custom,
        form=_FORMS.member(message.form, "form"),
        pairs=not message.no_pairs,
        definitions={
            each.name: Program(
                unpack(each.codes, U8, "definitions.codes"),
                unpack(each.values, F64, "definitions.values"),
            )
            for each in message.definitions
        },
        monotonic=dict.fromkeys(message.increasing, 1) | dict.fromkeys(message.decreasing, -1),
        **given,
    )


def search_from_bytes(data: bytes) -> pb.SearchRequest:
    """Parse a search."""
    return parse_message(pb.SearchRequest, data, most_fields=_MOST_FIELDS)


def _by_operator(given: Mapping[str, T]) -> dict[str, T]:
    """Name operators that are given by code, and put them into the order of their codes."""
    named = {_name(operator): value for operator, value in given.items()}
    known = {name: named[name] for name in OPERATORS if name in named}
    return known | named


def _name(operator: str) -> str:
    """Return the name of an operator that is given by name, or by code as a decimal number."""
    code = int(operator) if operator.isdecimal() and len(operator) < 4 else -1
    return BY_CODE[code].name if code in BY_CODE else operator


# ---------------------------------------------------------------------------------------- answers


def progress_to_bytes(progress: SearchProgress) -> bytes:
    """Serialize a message of the answer, of which the last one lacks the timings.

    Serialized messages may be concatenated: with `search_end` it is the whole last one.
    """
    counters: Any = {name: int(getattr(progress, name)) for name in _COUNTERS}
    message = pb.SearchResponse(
        seconds=progress.seconds, end=_ENDS.codes[progress.reason], **counters
    )
    message.front.sizes = pack(progress.front.sizes, U32)
    message.front.losses = pack(progress.front.losses, F64)
    _set_batch(message.front.programs, progress.front.batch)
    if progress.front.parts is not None:
        _set_batch(message.front.parts, progress.front.parts)
    return message.SerializeToString()


def search_end(timings: Timings) -> bytes:
    """Serialize the timings, which the last message of the answer ends with."""
    message = pb.SearchResponse()
    set_timings(message.timings, timings)
    return message.SerializeToString()


def formulas_of(answer: bytes) -> int:
    """Return how many formulas had been scored, as a message of an answer says."""
    return int(pb.SearchResponse.FromString(answer).formulas)


@decodes_answer
def progress_from_message(message: pb.SearchResponse, variables: int) -> SearchProgress:
    """Decode and check a message of an answer on data of so many variables.

    Raises:
        InternalError: if the server breaks the contract.
    """
    front = message.front
    batch = batch_from_message(front.programs, "front.programs")
    count = len(batch)
    if count:
        batch.check(variables)
    elif len(batch.codes) or len(batch.parameters):
        raise broken_answer("has tokens of no formula")
    if batch.vectors != 1:
        raise broken_answer("has several vectors for a formula")
    parts = None
    if front.HasField("parts"):
        parts = batch_from_message(front.parts, "front.parts")
        if len(parts):
            parts.check_shapes()
    return SearchProgress(
        front=Front(
            batch,
            received_array(front.sizes, U32, (count,), "sizes").astype(np.int64),
            received_array(front.losses, F64, (count,), "losses"),
            parts,
        ),
        seconds=message.seconds,
        reason=_ENDS.member(message.end, "end"),
        **{name: getattr(message, name) for name in _COUNTERS},
    )


def read_search(
    variables: int,
    messages: Iterable[pb.SearchResponse],
    report: Callable[[SearchProgress], None],
) -> Timings:
    """Read the answer to a search; call ``report`` with each progress, the last one too.

    Raises:
        InternalError: if the server breaks the contract.
    """
    timings = None
    for message in messages:
        progress = progress_from_message(message, variables)
        if message.HasField("timings"):
            timings = timings_from_message(message.timings)
        if (timings is None) is not (progress.reason is None):
            raise broken_answer("has an end without timings, or the other way round")
        report(progress)
    if timings is None:
        raise broken_answer("has no end")
    return timings
