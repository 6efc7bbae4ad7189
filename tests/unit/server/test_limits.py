"""Size limits of requests, and when a partial fit stops."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from support.random_programs import thesis_mix
from support.servers.examples import DATA, an_evaluation
from warpfit.errors import ResourceExhaustedError
from warpfit.ir import Batch
from warpfit.parse import parse
from warpfit.request import Evaluation, FitRequest, FitSettings, Loss, Method
from warpfit.server_info import Limits
from warpfit_server import limits as module
from warpfit_server.rpc import servicer

#: The batch has 7 programs with 196 tokens, the longest with 45; its answer has values.
RESULT_BYTES = 7 * 10 * 4


def refusal(function, *arguments, **options):
    with pytest.raises(ResourceExhaustedError) as caught:
        function(*arguments, **options)
    return caught.value


def check_batch(limits):
    module.check_batch(an_evaluation().batch, limits)


def check_result(limits):
    module.check_result(an_evaluation(), DATA.layout, limits)


@pytest.mark.parametrize(
    ("check", "limit", "most", "reason"),
    [
        (check_batch, "programs", 7, "TOO_MANY_PROGRAMS"),
        (check_batch, "program_tokens", 45, "PROGRAM_TOO_LONG"),
        (check_batch, "vectors", 1, "TOO_MANY_VECTORS"),
        (check_result, "result_bytes", RESULT_BYTES, "RESULT_TOO_LARGE"),
        *(
            (partial(module.check_limits, **{name: 9}), name, 9, reason)
            for name, (reason, *_) in module._REFUSALS.items()
        ),
    ],
)
def test_a_request_over_a_limit_is_refused_and_the_flag_named(check, limit, most, reason):
    check(limits=Limits(**{limit: most}))
    error = refusal(check, limits=Limits(**{limit: most - 1}))
    assert module._FLAGS.get(limit, f"--tenants-file ({limit})") in str(error)
    assert (error.reason, error.needed, error.available) == (reason, most, most - 1)


PROGRAMS, PARAMETERS = thesis_mix(3, 7, variables=DATA.layout.variables)
BATCH = Batch.of(PROGRAMS, [np.stack([p, p]) for p in PARAMETERS])
TOTAL = sum(map(len, PARAMETERS))


_evaluation = partial(Evaluation, DATA.content_id, BATCH, loss=Loss.MSE, values=False)


def _fit(**settings):
    return FitRequest(_evaluation(), FitSettings(**settings))


def test_the_size_of_a_result_counts_every_output():
    needed = {
        "gradient": 8 * 2 * TOTAL,
        "jacobian": 4 * 2 * TOTAL * DATA.layout.rows,
        "variable_gradient": 8 * 14 * DATA.layout.variables,
        "reductions": 8 * 14 * 5,
    }
    for output, size in needed.items():
        wanted = _evaluation(**{output: True}), DATA.layout
        module.check_result(*wanted, Limits(result_bytes=8 * 14 + size))
        refusal(module.check_result, *wanted, Limits(result_bytes=8 * 14 + size - 1))


def test_the_memory_of_searches_is_limited():
    size = module.fit_memory(_fit(), DATA.layout)
    assert size > 2 * (9 * len(BATCH.codes) + 8 * sum(len(p) ** 2 for p in PARAMETERS) + 80 * TOTAL)
    module.check_fit(_fit(), DATA.layout, Limits(result_bytes=size))
    with pytest.raises(ResourceExhaustedError, match="bytes of searches"):
        module.check_fit(_fit(), DATA.layout, Limits(result_bytes=size - 1))


def test_drawn_starts_count_like_given_ones():
    drawn = _fit(restarts=30)
    given = Batch.of(PROGRAMS, [np.tile(p, (32, 1)) for p in PARAMETERS])
    same = FitRequest(replace(_evaluation(), batch=given))
    assert module.fit_memory(drawn, DATA.layout) == module.fit_memory(same, DATA.layout)
    module.check_fit(drawn, DATA.layout, Limits(vectors=32))
    error = refusal(module.check_fit, _fit(restarts=31), DATA.layout, Limits(vectors=32))
    assert error.reason == "TOO_MANY_VECTORS" and "33 starts of a program" in str(error)


@pytest.mark.parametrize(("method", "factors"), [(Method.LM, 1), (Method.BFGS, 0)])
def test_searches_of_float64_data_may_want_orthogonal_factors(method, factors):
    """BFGS has them in place of the inverse."""
    layout = replace(DATA.layout, dtype=np.dtype("float64"))
    single, double = (module.fit_memory(_fit(method=method), of) for of in (DATA.layout, layout))
    squares = BATCH.vectors * int(np.square(BATCH.parameter_counts.astype(int)).sum())
    numbers = (BATCH.vectors * len(BATCH) + len(BATCH.parameters)) * layout.rows
    assert double - single == 8 * (factors * squares + numbers)


def fit(parameters, rows=DATA.layout.rows):
    text = "+".join(f"p{i + 1}" for i in range(parameters))
    batch = Batch.of([parse(text)], [np.ones(parameters)])
    problem = Evaluation(DATA.content_id, batch, loss=Loss.MSE, values=False)
    module.check_fit(FitRequest(problem), replace(DATA.layout, rows=rows), Limits())


def derivatives(variables):
    layout = replace(DATA.layout, variables=variables)
    module.check_result(_evaluation(variable_gradient=True), layout, Limits())


def terms(count):
    module.check_batch(Batch.of([parse("+".join(["x1"] * count))]), Limits())


@pytest.mark.parametrize(
    ("check", "most", "reason", "available"),
    [
        *((fit, 500, "TOO_MANY_PARAMETERS", 500), (terms, 5_000, "PROGRAM_TOO_LONG", 10_000)),
        (partial(fit, 500), 544_768, "TOO_MANY_PARAMETERS", 544_768),
        (partial(fit, 100), 332_100_000, "TOO_MANY_PARAMETERS", 332_100_000),
        (derivatives, 1 << 20, "TOO_MANY_VARIABLES", 1 << 20),
    ],
)
def test_what_no_flag_raises_is_limited(check, most, reason, available):
    check(most)
    error = refusal(check, most + 1)
    assert (error.reason, error.available) == (reason, available)


def test_a_partial_fit_stops_in_time_for_its_answer(monkeypatch):
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    for remaining, seconds in ((10.0, 9.0), (0.2, 0.15), (0.01, 0.0), (None, None), (1e9, None)):
        stop = servicer._stop_in_time(remaining, 0.1)
        assert stop == (None if seconds is None else 100.0 + seconds)
