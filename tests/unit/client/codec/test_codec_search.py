"""Searches as messages: what goes in comes out, and what is left out has its default."""

import math
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.random_programs import random_program
from warpfit import parse, search_codec
from warpfit.codec import result_end
from warpfit.errors import InternalError, InvalidArgumentError
from warpfit.ir import Batch, Program
from warpfit.losses import Loss, LossFunction
from warpfit.ops import OPERATORS
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

KEY = bytes(range(32))
NAMES = st.sampled_from(list(OPERATORS))
COUNTS = st.integers(1, 2**32 - 1)
FLOATS = st.floats(allow_nan=False)


def arrays(*shape):
    size = math.prod(shape)
    numbers = st.lists(st.floats(-5, 5), min_size=size, max_size=size)
    return numbers.map(lambda n: np.array(n).reshape(shape))


@st.composite
def batches(draw, least=1):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    programs = [random_program(rng, int(rng.integers(1, 9)), variables=3) for _ in range(least + 2)]
    return Batch.of(programs, [rng.normal(size=program.parameters) for program in programs])


RULES = st.builds(
    Rules,
    max_size=COUNTS,
    max_depth=st.integers(0, 99),
    complexities=st.dictionaries(NAMES, COUNTS, max_size=3),
    counts=st.dictionaries(NAMES, st.integers(0, 9), max_size=3),
    nesting=st.dictionaries(st.tuples(NAMES, NAMES), st.integers(0, 9), max_size=3),
    arguments=st.dictionaries(NAMES, st.tuples(st.integers(-1, 9), st.integers(-1, 9))),
)
TEMPLATES = st.builds(
    Template,
    st.just(np.array([1, 128, 2, 10], np.uint8)),
    arrays(4),
    st.lists(st.integers(1, 3), max_size=3).map(tuple),
    st.integers(0, 2),
)
REQUESTS = st.builds(
    SearchRequest,
    dataset_id=st.just(KEY),
    rows=st.none() | st.tuples(st.integers(0, 9), st.integers(10, 2**64 - 1)),
    screening_rows=st.integers(1, 2**64 - 1),
    operators=st.dictionaries(NAMES, FLOATS, min_size=1),
    variables=st.none() | st.lists(st.integers(0, 9), min_size=1).map(tuple),
    rules=RULES,
    units=st.none() | st.builds(Units, arrays(3, BASE_UNITS), st.none() | arrays(BASE_UNITS)),
    loss=st.sampled_from(Loss),
    form=st.sampled_from(Form),
    template=st.none() | TEMPLATES,
    definitions=st.dictionaries(NAMES, st.just(parse("x1 + x2")), max_size=2),
    monotonic=st.dictionaries(st.integers(0, 9), st.sampled_from([1, -1]), max_size=3),
    group=st.none() | st.integers(0, 9),
    guesses=st.none() | batches(),
    islands=st.integers(0, 2**32 - 1),
    population=st.integers(0, 2**64 - 1),
    pairs=st.booleans(),
    fit_iterations=st.integers(0, 99),
    seed=st.integers(0, 2**64 - 1),
    max_seconds=st.floats(0, 1e9),
    max_generations=st.integers(0, 2**64 - 1),
    max_formulas=st.integers(0, 2**64 - 1),
    idle_generations=st.integers(0, 2**64 - 1),
    target_loss=FLOATS,
)


def plain(value):
    """Return nested values that ``==`` compares: dataclasses as dicts, arrays as lists."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Program):
        return value
    if hasattr(value, "__dataclass_fields__"):
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


def test_what_is_left_out_has_its_default():
    received = search_codec.search_from_message(pb.SearchRequest(content_id=KEY))
    assert plain(received) == plain(SearchRequest(KEY))


def test_operators_may_be_named_by_their_codes():
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


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("content_id", b"short"),
        ("loss", 77),
        ("form", 77),
        ("units", pb.SearchUnits(variables=b"123")),
        ("guesses", pb.Programs(values=b"123")),
    ],
)
def test_a_broken_request_is_refused(field, wrong):
    message = pb.SearchRequest(content_id=KEY)
    message.MergeFrom(pb.SearchRequest(**{field: wrong}))
    with pytest.raises(InvalidArgumentError) as caught:
        search_codec.search_from_message(message)
    assert caught.value.field.partition(".")[0] == field


@st.composite
def progresses(draw):
    batch = draw(batches())
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
    received = []
    messages = map(pb.SearchResponse.FromString, data)
    if ends:
        assert search_codec.read_search(3, messages, received.append).compute == 7
    else:
        with pytest.raises(InternalError, match="no end"):
            search_codec.read_search(3, messages, received.append)
    assert [plain(one) for one in received] == [plain(one) for one in sent]


STRANGE = search_codec.progress_to_bytes(
    SearchProgress(Front(Batch.of([parse("x9")]), np.array([1]), np.array([0.5])))
)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [pb.SearchResponse()],
        [pb.SearchResponse(end=pb.END_TIME)],
        [pb.SearchResponse(end=77)],
        [pb.SearchResponse(front=pb.Front(sizes=b"1234"))],
        [pb.SearchResponse(front=pb.Front(programs=pb.Programs(codes=b"\1", values=bytes(8))))],
        [pb.SearchResponse.FromString(STRANGE)],
        [pb.SearchResponse.FromString(result_end(Timings()))],
    ],
)
def test_a_broken_answer_is_an_internal_error(messages):
    with pytest.raises(InternalError):
        search_codec.read_search(3, iter(messages), lambda progress: None)
