"""Encoding followed by decoding changes nothing; malformed bytes raise WarpfitErrors alone."""

import hashlib
import math
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.engines.operators import numbers, programs
from support.random_programs import random_program
from support.refusals import refused
from warpfit import codec, errors, parse, search_codec, searching
from warpfit import request as requests
from warpfit import server_info as info
from warpfit.dataset import DTYPES, Dataset, Layout
from warpfit.errors import InternalError
from warpfit.ir import Batch, Program
from warpfit.losses import BY_NAME, Closing, LossFunction
from warpfit.ops import OPERATORS
from warpfit.request import REASONS, Evaluation, FitRequest, FitResult, FitSettings, Loss, Timings
from warpfit.searching import Front, Rules, SearchProgress, SearchReason, SearchRequest
from warpfit.v1 import evaluator_pb2 as pb

NAMES = st.lists(st.text("aZ_ ß温😀`", min_size=1, max_size=5), min_size=1, max_size=3, unique=True)
LAYOUT = Layout(np.dtype("<f4"), variables=3, rows=100, has_target=True)
HUBER = BY_NAME["huber"]()
TWO = [Program.parameter(0), Program.variable(1)]


@st.composite
def batches(draw):
    drawn = draw(st.lists(programs(max_tokens=12), min_size=1, max_size=5))
    vectors = draw(st.integers(1, 3))
    sizes = [vectors * program.parameters for program in drawn]
    entries = [draw(st.lists(numbers(), min_size=size, max_size=size)) for size in sizes]
    return Batch.of(drawn, [np.reshape(entry, (vectors, -1)) for entry in entries])


@st.composite
def evaluations(draw):
    loss = draw(st.sampled_from([None, *Loss]))
    closing = None if loss else draw(st.sampled_from([None, *Closing]))
    outputs = ["jacobian", "reductions", "correlation"]
    outputs += ["gradient", "variable_gradient"] if loss or closing else []
    return Evaluation(
        dataset_id=draw(st.binary(min_size=32, max_size=32)),
        batch=draw(batches()),
        rows=draw(st.none() | st.tuples(st.integers(0, 50), st.integers(51, 100))),
        precision=draw(st.sampled_from(requests.Precision)),
        loss=loss,
        values=draw(st.booleans()) or loss is None,
        tier=draw(st.sampled_from(requests.Tier)),
        custom_loss=None if closing is None else LossFunction(HUBER.row, closing),
        **{output: draw(st.booleans()) for output in outputs},
    )


def reparsed(message):
    return type(message).FromString(message.SerializeToString())


@given(evaluations())
def test_evaluations_survive_bit_for_bit(evaluation):
    back = codec.evaluation_from_message(reparsed(codec.evaluation_to_message(evaluation)))
    for field in fields(Batch):
        before = np.asarray(getattr(evaluation.batch, field.name))
        after = np.asarray(getattr(back.batch, field.name))
        assert before.tobytes() == after.tobytes(), field.name
        assert field.name == "vectors" or before.dtype == after.dtype
    for field in fields(Evaluation):
        if field.name != "batch":
            assert getattr(back, field.name) == getattr(evaluation, field.name)
    back.check(LAYOUT)


def test_server_infos_survive():
    full = info.Device("cpu: 3", 64, 2**40, "9.0", "560.1", tuple(requests.Tier))
    devices = full, info.Device("", 0, 1, "", "", ())
    limits = info.Limits(*range(1, 11))
    server = info.ServerInfo("1.2", "cpu", devices, limits, codec.operator_infos())
    assert codec.info_from_message(reparsed(codec.info_to_message(server))) == server


@pytest.mark.parametrize("kind", [*errors.BY_STATUS.values(), errors.ProgramError])
@pytest.mark.parametrize(
    "place", [{}, {"expression": 0, "token": 0, "needed": 0, "available": 0, "retry_after": 1.25}]
)
def test_errors_survive(kind, place):
    error = kind("what", "REASON", "remedy", "field", **place)
    detail = [("other", "x"), (codec.ERROR_METADATA_KEY, codec.error_to_status(error))]
    back = codec.error_from_status(error.status, "status text", detail)
    local = {"text": "", "position": None}  # of a ProgramError, and added by the client
    assert {**local, **vars(back)} == {**local, **vars(error)}
    # What is wrong in an expression is a ProgramError.
    with_place = errors.ProgramError if place else errors.InvalidArgumentError
    assert type(back) is (with_place if issubclass(kind, errors.InvalidArgumentError) else kind)


@given(st.integers(64, 9000), st.sampled_from(list(DTYPES.values())), st.integers(0, 1600))
def test_answers_survive_in_pieces_of_any_size(chunk_bytes, dtype, ready):
    """Also where a part is ready, and sent, before the rest; short arrays come whole at the end."""
    batch = Batch.of(TWO, [[[1.0], [2.0]], [[], []]])
    requested = dict.fromkeys(requests.FURTHER_OUTPUTS, True) | {"linear_scaling": False}
    evaluation = Evaluation(bytes(32), batch, loss=Loss.MSE, **requested, values=True)
    layout, rng = replace(LAYOUT, dtype=dtype), np.random.default_rng(1)
    shapes = {"losses": (2, 2), "gradients": (2,), "variable_gradients": (2, 2, LAYOUT.variables)}
    shapes |= {"reductions": (2, 2, 5), "correlations": (2, 2)}
    arrays = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    arrays["losses"][0] = np.nan, np.inf
    short = {name: array for name, array in arrays.items() if array.nbytes <= chunk_bytes}
    arrays["values"] = rng.normal(size=(2, 2, 100)).astype(dtype)
    arrays["jacobian"] = rng.normal(size=(2, 100)).astype(dtype)
    sent = [codec.result_start(layout, arrays["values"].shape)]
    for name in sorted(arrays.keys() - short.keys()):
        data, first = arrays[name].reshape(-1).data.cast("B"), ready if name == "values" else 0
        sent += codec.array_pieces(name, data[:first], 0, chunk_bytes)
        sent += codec.array_pieces(name, data[first:], first, chunk_bytes)
    timings = Timings(1, 2, 3, 4, 5, requests.Tier.COMPILED, 6, "cuda:0")
    sent.append(codec.result_end(timings, short))
    messages = [pb.EvaluateResponse.FromString(message) for message in sent]
    assert all(len(message.values) <= chunk_bytes for message in messages)
    result = codec.read_result(evaluation, layout, messages)
    for name, array in arrays.items():
        found = getattr(result, name)
        assert (found.dtype, found.tobytes()) == (array.dtype, array.tobytes()), name
    assert result.timings == timings
    for missing in range(1, len(messages) - 1, 1 + len(messages) // 9):
        with pytest.raises(errors.InternalError, match="server's answer"):
            codec.read_result(evaluation, layout, messages[:missing] + messages[missing + 1 :])


@given(
    *(st.integers(1, 5000), st.integers(1, 60), st.sampled_from(["float32", "float64"])),
    *(NAMES, st.booleans(), st.booleans()),
)
def test_uploads_survive_in_pieces_of_any_size(chunk_bytes, rows, dtype, names, target, weights):
    X, column = np.arange(len(names) * rows).reshape(rows, -1), np.arange(rows)
    columns = (column if target else None, column if weights else None)
    dataset = Dataset.of(X, *columns, names=names, dtype=dtype)
    first, *rest = codec.upload_messages(dataset, chunk_bytes)
    assert codec.upload_start(first) == (dataset.layout, dataset.content_id)
    message = codec.layout_to_message(dataset.layout)
    assert codec.layout_from_message(reparsed(message)) == dataset.layout
    parsed = [pb.UploadVariablesRequest.FromString(message) for message in rest]
    assert [message.SerializeToString() for message in parsed] == rest
    assert all(0 < len(message.data) <= chunk_bytes for message in parsed)
    assert b"".join(message.data for message in parsed) == dataset.matrix.tobytes()
    assert b"".join(map(codec.upload_data, rest)) == dataset.matrix.tobytes()


FOUR_ROWS = replace(LAYOUT, dtype=np.dtype("<f4"), rows=4)


def _header(**changes):
    fields = {"dtype": pb.DTYPE_FLOAT32, "programs": 2, "vectors": 1, "rows": 4} | changes
    return pb.EvaluateResponse(header=pb.ResultHeader(**fields))


def _end(tier=pb.TIER_INTERPRETER, losses=16, gradients=8):
    arrays = {"losses": bytes(losses), "gradients": bytes(gradients)}
    return pb.EvaluateResponse(**arrays, timings=pb.Timings(tier=tier))


_END = _end()
_ALL = pb.EvaluateResponse(values=bytes(32))


def test_a_broken_answer_is_an_internal_error():
    for messages in (
        *([], [_END], [_header(), _END], [_header(), _ALL], [_ALL, _END]),
        [_header(dtype=9), _ALL, _END],
        [_header(dtype=pb.DTYPE_FLOAT64), pb.EvaluateResponse(values=bytes(64)), _END],
        [_header(rows=5), pb.EvaluateResponse(values=bytes(40)), _END],
        *([_header(), _ALL, _end(tier=77)], [_header(programs=3), _ALL, _END]),
        *([_header(vectors=2), _ALL, _END], [_header(), _ALL, _ALL, _END]),
        [_header(), pb.EvaluateResponse(values=bytes(33)), _END],
        [_header(), pb.EvaluateResponse(values=bytes(16), offset=16), _END],
        *([_header(), _ALL, _end(losses=8)], [_header(), _ALL, _end(gradients=24)]),
    ):
        evaluation = Evaluation(bytes(32), Batch.of(TWO, [[1.0], []]), loss=Loss.MSE, gradient=True)
        assert codec.read_result(evaluation, FOUR_ROWS, [_header(), _ALL, _END]).gradients == [0.0]
        with pytest.raises(errors.InternalError, match="the server's answer"):
            codec.read_result(evaluation, FOUR_ROWS, messages)


def test_an_answer_that_is_too_large_for_the_memory():
    evaluation = Evaluation(bytes(32), Batch.of(TWO, [[1.0], []]))
    huge = replace(FOUR_ROWS, rows=2**60)
    with pytest.raises(errors.ResourceExhaustedError) as caught:
        codec.read_result(evaluation, huge, [_header(rows=2**60)])
    assert caught.value.needed == 2**63


GONE = codec.error_to_status(errors.DatasetNotFoundError())


def test_without_a_right_detail_the_status_counts():
    for status, kind, detail in (
        *(("UNKNOWN", errors.InternalError, None), ("UNAVAILABLE", errors.UnavailableError, None)),
        ("DEADLINE_EXCEEDED", errors.DeadlineExceededError, None),
        ("NOT_FOUND", errors.DatasetNotFoundError, b"\xff\xff\xff"),
        # A call whose time ends as its answer arrives has the details of another status.
        ("DEADLINE_EXCEEDED", errors.DeadlineExceededError, GONE),
    ):
        metadata = detail and [(codec.ERROR_METADATA_KEY, detail)]
        error = codec.error_from_status(status, "said", metadata)
        assert type(error) is kind
        is_late = status == "DEADLINE_EXCEEDED"
        assert error.message == ("the call did not end in its time" if is_late else "said")
        assert error.reason == status or status == "NOT_FOUND"


@given(evaluation=evaluations(), long=st.sampled_from([0, 1 << 16]))
def test_values_of_operators_need_not_be_sent(evaluation, long):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "_LONG", long)
        data = codec.evaluation_to_bytes(evaluation)
    batch = evaluation.batch
    sent = pb.EvaluateRequest.FromString(data).programs.values
    operators = np.count_nonzero(batch.codes >= 16)
    assert len(sent) == 8 * (len(batch.codes) - (0 if long else operators))
    assert codec.evaluation_from_bytes(data).batch.values.tobytes() == batch.values.tobytes()


@pytest.mark.parametrize(
    "fields",
    [
        *(b"\x1a\x00", b"\xf8\x01\x00", b"\xfb\x01\xfc\x01", b"\xff", b"\x00"),
        *(b"\x09" + bytes(8), b"\xfd\x01" + bytes(4)),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_many_short_fields_are_refused_before_protobuf_sees_them(fields, nested):
    data = fields * (1 + (1 << 18))
    kind = pb.OptimizeRequest if nested else pb.EvaluateRequest
    if nested:
        data = codec.bytes_tag(1) + codec.varint(len(data)) + data
    assert "256 fields" in refused("MALFORMED_MESSAGE", codec.parse_message, kind, data).message


def test_neither_all_values_nor_those_of_the_leaves():
    arrays = {"codes": bytes([1, 1, 16, 1, 16]), "values": bytes(8 * 4)}
    programs = pb.Programs(**arrays, lengths=b"\5\0\0\0", parameter_counts=bytes(4))
    message = pb.EvaluateRequest(content_id=bytes(32), values=True, programs=programs)
    evaluation = codec.evaluation_from_message(message)
    assert refused("LENGTH_MISMATCH", evaluation.check, LAYOUT).field == "values"


#: SHA-256 of the fields, values and methods of each version of the contract.
VERSIONS = {1: "4dbcb560291e5db23e4fbb6b54f850d79fdd53882d20b51e38122a2958cf7eed"}


def contract_fingerprint():
    """Hash all that a message can say, whatever the order in evaluator.proto."""
    words = []

    def add(message):
        for field in message.fields:
            kind = field.message_type or field.enum_type
            of = f"{kind.full_name if kind else field.type} {field.is_repeated}"
            words.append(f"{message.full_name}.{field.name}={field.number} {of}")
        for nested in message.nested_types:
            add(nested)

    for message in pb.DESCRIPTOR.message_types_by_name.values():
        add(message)
    for enum in pb.DESCRIPTOR.enum_types_by_name.values():
        named = [] if enum.name == "Contract" else enum.values
        words += [f"{enum.name}.{value.name}={value.number}" for value in named]
    for method in pb.DESCRIPTOR.services_by_name["Evaluator"].methods:
        words.append(f"{method.name} {method.client_streaming} {method.server_streaming}")
    return hashlib.sha256("\n".join(sorted(words)).encode()).hexdigest()


def test_the_version_grows_with_the_contract():
    """After a release a change takes the next version; until then, write the new hash here."""
    assert max(VERSIONS) == codec.CONTRACT
    assert VERSIONS[codec.CONTRACT] == contract_fingerprint(), (
        "the contract has changed: if its version has been released, raise CONTRACT_VERSION in "
        "evaluator.proto, run proto/generate.py and add a line to VERSIONS; else change its hash"
    )


@st.composite
def fits(draw):
    batch = draw(batches())
    total = int(batch.parameter_counts.sum())
    custom = draw(st.sampled_from([None, *(make() for make in BY_NAME.values())]))
    loss = None if custom else draw(st.sampled_from(Loss))
    rows = draw(st.none() | st.just((3, 9)))
    problem = Evaluation(bytes(32), batch, rows, loss=loss, custom_loss=custom, values=False)
    bounded = draw(st.booleans()) and total > 0
    limits = ("gradient_tolerance", "step_tolerance", "loss_tolerance")
    drawn = dict.fromkeys(limits, st.none() | st.floats(0, 1))
    drawn |= dict.fromkeys(("all_starts", "partial", "progress"), st.booleans())
    drawn |= {"method": st.sampled_from([requests.Method.AUTO, requests.Method.BFGS])}
    drawn |= {"max_iterations": st.integers(0, 2**32 - 1), "seed": st.integers(0, 2**64 - 1)}
    drawn |= {"restarts": st.sampled_from([0, 3]), "missing": st.sampled_from(requests.Missing)}
    bounds = {"lower": np.full(total, -np.inf), "upper": np.arange(total, dtype=float)}
    bounds |= {"fixed": np.arange(total) % 2 == 0}
    given = {name: draw(strategy) for name, strategy in drawn.items()}
    settings = FitSettings(**given | (bounds if bounded else {}))
    return FitRequest(problem, settings)


@given(fits())
def test_fits_survive(request):
    back = codec.fit_from_message(reparsed(codec.fit_to_message(request)))
    for field in fields(FitSettings):
        before, after = (getattr(r.settings, field.name) for r in (request, back))
        assert np.array_equal(before, after), field.name
    for name in ("custom_loss", "loss", "rows"):
        assert getattr(back.problem, name) == getattr(request.problem, name)
    assert back.problem.batch.parameters.tobytes() == request.problem.batch.parameters.tobytes()
    assert back.method == request.method
    back.check(LAYOUT)


@given(fits(), st.randoms(use_true_random=False))
def test_results_of_fits_survive(request, random):
    counts = request.problem.batch.parameter_counts.astype(int)
    cells = len(counts), request.vectors
    total = request.vectors * int(counts.sum())
    result = FitResult(
        np.arange(float(total)),
        *(np.full(cells, number) for number in (np.nan, np.inf)),
        *(np.full(cells, number, np.uint32) for number in (7, 8)),
        np.full(cells, random.randint(1, len(REASONS)), np.uint8),
        np.zeros(cells, np.uint32),
        timings=Timings(compute=5),
    )
    seen, progress = [], requests.FitProgress(3, 4, 5)
    sent = (codec.progress_to_bytes(progress), codec.fit_to_bytes(result))
    back = codec.read_fit(request, map(codec.fit_answer_from_bytes, sent), seen.append)
    assert seen == [progress]
    for field in fields(FitResult):
        before, after = getattr(result, field.name), getattr(back, field.name)
        if isinstance(before, np.ndarray):
            assert before.tobytes() == after.tobytes()
        else:
            assert before == after


def test_reasons_and_wire_codes_agree():
    codes = {name: code for name, code in pb.Reason.items() if code}
    assert codes == {f"REASON_{reason.name}": code for code, reason in enumerate(REASONS, start=1)}
    assert list(requests.Reason) == list(REASONS)


@pytest.mark.parametrize(
    "changes",
    [
        *({}, {"losses": b""}, {"reasons": b"\x09"}, {"starts": b"\xff" * 4}),
        *({"parameters": bytes(80)}, None),
    ],
)
def test_a_broken_result_is_an_internal_error(changes):
    problem = Evaluation(bytes(32), Batch.of([Program.parameter(0)], [[1.0]]), loss=Loss.MSE)
    eight = dict.fromkeys(("parameters", "losses", "initial_losses"), bytes(8))
    four = dict.fromkeys(("iterations", "evaluations", "starts"), bytes(4))
    whole = {**eight, **four, "reasons": b"\1"} | (changes or {})
    sent = [] if changes is None else [pb.OptimizeResponse(result=pb.FitResult(**whole))]
    if changes == {}:
        assert codec.read_fit(FitRequest(problem), sent).losses == 0.0
        return
    with pytest.raises(errors.InternalError, match=r"the server's answer|has no result"):
        codec.read_fit(FitRequest(problem), sent)


KEY = bytes(range(32))
OPERATOR_NAMES = st.sampled_from(list(OPERATORS))
PAIRS = st.tuples(OPERATOR_NAMES, OPERATOR_NAMES)
COUNTS = st.integers(1, 2**32 - 1)
FLOATS = st.floats(allow_nan=False)


def arrays(*shape):
    size = math.prod(shape)
    numbers = st.lists(st.floats(-5, 5), min_size=size, max_size=size)
    return numbers.map(lambda n: np.array(n).reshape(shape))


@st.composite
def guesses(draw, least=1):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    programs = [random_program(rng, int(rng.integers(1, 9)), variables=3) for _ in range(least + 2)]
    return Batch.of(programs, [rng.normal(size=program.parameters) for program in programs])


def maps(keys, values):
    return st.dictionaries(keys, values, max_size=3)


LARGE, FEW = st.integers(0, 2**64 - 1), st.integers(0, 9)
SIZES = st.tuples(st.integers(-1, 9), st.integers(-1, 9))
RULES = st.builds(
    *(Rules, COUNTS, st.integers(0, 99), maps(OPERATOR_NAMES, COUNTS), maps(OPERATOR_NAMES, FEW)),
    *(maps(PAIRS, FEW), maps(OPERATOR_NAMES, SIZES)),
)
ARITIES = st.lists(st.integers(1, 3), max_size=3).map(tuple)
TOKENS = np.array([1, 128, 2, 10], np.uint8)
TEMPLATES = st.builds(searching.Template, st.just(TOKENS), arrays(4), ARITIES, st.integers(0, 2))
BASES = searching.BASE_UNITS
UNITS = st.builds(searching.Units, arrays(3, BASES), st.none() | arrays(BASES))
WHOLE = ("population", "seed", "max_generations", "max_formulas", "idle_generations")
REQUESTS = st.builds(
    SearchRequest,
    dataset_id=st.just(KEY),
    rows=st.none() | st.tuples(FEW, st.integers(10, 2**64 - 1)),
    screening_rows=st.integers(1, 2**64 - 1),
    operators=st.dictionaries(OPERATOR_NAMES, FLOATS, min_size=1),
    variables=st.none() | st.lists(FEW, min_size=1).map(tuple),
    **{"rules": RULES, "units": st.none() | UNITS, "template": st.none() | TEMPLATES},
    **{"loss": st.sampled_from(Loss), "form": st.sampled_from(searching.Form)},
    definitions=maps(OPERATOR_NAMES, st.just(parse("x1 + x2"))),
    monotonic=maps(FEW, st.sampled_from([1, -1])),
    **{"group": st.none() | FEW, "guesses": st.none() | guesses(), "pairs": st.booleans()},
    **{"islands": st.integers(0, 2**32 - 1), "fit_iterations": st.integers(0, 99)},
    **dict.fromkeys(WHOLE, LARGE) | {"max_seconds": st.floats(0, 1e9), "target_loss": FLOATS},
)


def plain(value):
    """Return nested values that ``==`` compares: dataclasses as dicts, arrays as lists."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, Program):
        return {one.name: plain(getattr(value, one.name)) for one in fields(value)}
    return value


@given(REQUESTS, st.booleans())
def test_a_search_comes_out_as_it_went_in(request, is_custom):
    if is_custom:
        request = replace(request, loss=None, custom_loss=LossFunction.parse("abs(d)^1.5"))
    message = search_codec.search_to_message(request).SerializeToString()
    received = search_codec.search_from_message(search_codec.search_from_bytes(message))
    assert plain(received) == plain(request)
    assert received.loss_function == request.loss_function


def test_what_is_left_out_has_its_default_and_operators_may_be_codes():
    received = search_codec.search_from_message(pb.SearchRequest(content_id=KEY))
    assert plain(received) == plain(SearchRequest(KEY))
    add, power = (str(OPERATORS[name].code) for name in ("add", "pow"))
    named = pb.SearchRequest(content_id=KEY, operators={"cos": 1.0, "add": 2.0, "exp": 3.0})
    # A message does not keep their order, which would change the search of a seed.
    assert list(search_codec.search_from_message(named).operators) == ["add", "exp", "cos"]
    message = pb.SearchRequest(content_id=KEY, operators={add: 2.0, "7": 1.0})
    message.rules.arguments[power].sizes.extend([-1, 1])
    message.rules.nesting.add(outer=add, inner=add, most=1)
    received = search_codec.search_from_message(message)
    assert received.operators == {"add": 2.0, "7": 1.0}  # which the check refuses
    assert received.rules.arguments == {"pow": (-1, 1)}
    assert received.rules.nesting == {("add", "add"): 1}


def test_a_broken_request_is_refused():
    for field, wrong in (
        *(("content_id", b"short"), ("loss", 77), ("form", 77)),
        *(("units", pb.SearchUnits(variables=b"123")), ("guesses", pb.Programs(values=b"123"))),
    ):
        message = pb.SearchRequest(content_id=KEY)
        message.MergeFrom(pb.SearchRequest(**{field: wrong}))
        error = refused("", search_codec.search_from_message, message)
        assert error.field.partition(".")[0] == field


@st.composite
def progresses(draw):
    batch = draw(guesses())
    count = len(batch)
    counters = {name: draw(st.integers(0, 2**64 - 1)) for name in ("formulas", "pairs", "restarts")}
    front = Front(batch, np.arange(1, count + 1), draw(arrays(count)))
    return SearchProgress(front, seconds=draw(st.floats(0, 1e9)), **counters)


@given(progresses(), st.lists(st.sampled_from(SearchReason), max_size=1))
def test_progress_comes_out_as_it_went_in(progress, ends):
    sent = [progress, *(replace(progress, reason=reason) for reason in ends)]
    data = [search_codec.progress_to_bytes(one) for one in sent]
    end = search_codec.search_end(Timings(compute=7))
    data = [*data[:-1], data[-1] + end] if ends else data
    received, messages = [], map(pb.SearchResponse.FromString, data)
    if ends:
        assert search_codec.read_search(3, messages, received.append).compute == 7
    else:
        with pytest.raises(InternalError, match="no end"):
            search_codec.read_search(3, messages, received.append)
    assert [plain(one) for one in received] == [plain(one) for one in sent]


STRANGE = search_codec.progress_to_bytes(
    SearchProgress(Front(Batch.of([parse("x9")]), np.array([1]), np.array([0.5])))
)


def test_a_broken_answer_of_a_search_is_an_internal_error():
    for messages in (
        *([], [pb.SearchResponse()], [pb.SearchResponse(end=pb.END_TIME)]),
        *([pb.SearchResponse(end=77)], [pb.SearchResponse(front=pb.Front(sizes=b"1234"))]),
        [pb.SearchResponse(front=pb.Front(programs=pb.Programs(codes=b"\1", values=bytes(8))))],
        [pb.SearchResponse.FromString(STRANGE)],
        [pb.SearchResponse.FromString(codec.result_end(Timings()))],
    ):
        with pytest.raises(InternalError):
            search_codec.read_search(3, iter(messages), lambda progress: None)
