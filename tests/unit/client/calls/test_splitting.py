"""Batches above a server's limits: split by the client, the results joined."""

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import warpfit
from warpfit import codec, testing
from warpfit.errors import ProgramError, ResourceExhaustedError
from warpfit.request import even_bounds
from warpfit.server_info import Limits
from warpfit_server.limits import check_batch, check_fit, check_limits, check_result

rng = np.random.default_rng(3)
X = rng.uniform(0.5, 2.0, size=(30, 2))
Y = 2.0 * X[:, 0] - 0.5 * X[:, 1]
TEXTS = ["p1*x1 + p2*x2", "x1", "p1 + sin(p2*x1) + p3", "x1*x2 - 3", "p1*x2", "exp(p1 - x2)", "x2"]
STARTS = [[1.0, 0.5], [], [0.1, 0.2, 0.3], [], [1.5], [0.2], []]
OUTPUTS = [
    {},
    {"loss": "mse", "gradient": True, "variable_gradient": True, "reductions": True},
    *({"jacobian": True, "correlation": True}, {"loss": "mse", "linear_scaling": True}),
]
THREE, FEW_TOKENS = Limits(programs=3), Limits(tokens=12)
LIMITS = [THREE, FEW_TOKENS, Limits(result_bytes=2_000), Limits(message_bytes=400)]


class LimitedServer(testing.InProcessServer):
    def __init__(self, limits: Limits) -> None:
        super().__init__()
        self.limits = limits

    def _evaluate(self, message):
        evaluation = codec.evaluation_from_bytes(message)
        self.check(evaluation.batch, len(message))
        check_result(evaluation, self._dataset(evaluation.dataset_id).layout, self.limits)
        return super()._evaluate(message)

    def _optimize(self, message):
        request = codec.fit_from_bytes(message)
        self.check(request.problem.batch, len(message))
        check_fit(request, self._dataset(request.problem.dataset_id).layout, self.limits)
        return super()._optimize(message)

    def check(self, batch, size):
        check_batch(batch, self.limits)
        check_limits(self.limits, tokens=len(batch.codes))
        if size > self.limits.message_bytes:
            sizes = {"needed": size, "available": self.limits.message_bytes}
            raise ResourceExhaustedError("one message is too large", "MESSAGE_TOO_LARGE", **sizes)


def assert_same(found, wanted):
    if isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    elif isinstance(wanted, np.ndarray):
        np.testing.assert_array_equal(found, wanted)
    else:
        for name in ("sum", "mean", "min", "max", "non_finite"):
            assert_same(getattr(found, name), getattr(wanted, name))


@pytest.mark.parametrize(("limits", "options", "vectors"), [*product(LIMITS, OUTPUTS, [1, 2])])
def test_split_evaluations_give_what_a_server_without_limits_gives(limits, options, vectors):
    starts = STARTS if vectors == 1 else [np.stack([s, s]) * [[1.0], [2.0]] for s in STARTS]
    server = LimitedServer(limits)
    with testing.client() as free, testing.client(server) as limited:
        data = free.upload(X, Y)
        wanted = free.evaluate(data, TEXTS, starts, **options)
        assert_same(limited.evaluate(data, TEXTS, starts, **options), wanted)
        refused = server.calls.count("Evaluate")
        assert_same(limited.evaluate(data, TEXTS, starts, **options), wanted)
    # What a limit has refused once is split before it is sent.
    assert server.calls.count("Evaluate") - refused <= refused


@pytest.mark.parametrize("limits", [THREE, FEW_TOKENS, Limits(result_bytes=3_000)])
def test_fits_above_a_limit_are_split_with_their_bounds_and_report_progress(limits):
    reports = []
    options = {"bounds": (-1.5, 1.5), "fixed": [None, None, [True, False, False], *[None] * 4]}
    with testing.client() as free, testing.client(LimitedServer(limits)) as limited:
        data = free.upload(X, Y)
        wanted = free.optimize(data, TEXTS, STARTS, **options)
        found = limited.optimize(
            *(data, TEXTS, STARTS), **options, progress=reports.append, partial=True, timeout=60
        )
    for name in ("parameters", "loss", "initial_loss", "iterations", "reason", "start"):
        assert_same(getattr(found, name), getattr(wanted, name))
    assert {report.searches for report in reports} == {len(TEXTS)}
    assert all(0 <= report.active <= len(TEXTS) for report in reports)


def test_errors_of_a_part_name_the_expression_and_one_above_a_limit_is_refused():
    with testing.client(LimitedServer(THREE)) as client:
        data = client.upload(X, Y)
        with pytest.raises(ProgramError) as caught:
            client.evaluate(data, ["x1"] * 5 + ["x1 + x9", "x1"], loss="mse")
    assert caught.value.expression == 5 and caught.value.text == "x1 + x9"
    with testing.client(LimitedServer(Limits(result_bytes=100))) as client:
        data = client.upload(X, Y)
        with pytest.raises(warpfit.ResourceExhaustedError, match="bytes of results"):
            client.evaluate(data, ["x1", "x2", "x1"])


@given(st.lists(st.integers(1, 20), min_size=1, max_size=40), st.integers(1, 9))
def test_even_bounds_make_parts_of_about_the_same_weight(weights, parts):
    bounds = even_bounds(np.array(weights, dtype=np.float64), parts)
    assert (bounds[0], bounds[-1]) == (0, len(weights)) and bounds == sorted(set(bounds))
    assert len(bounds) <= parts + 1
    sums = [sum(weights[a:b]) for a, b in pairwise(bounds)]
    assert max(sums) <= sum(weights) / parts + max(weights)
