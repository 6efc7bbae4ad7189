"""Size limits of requests."""

from __future__ import annotations

import pytest

from support.servers.requests import DATA, an_evaluation
from warpfit.errors import ResourceExhaustedError
from warpfit.server_info import Limits
from warpfit_server import limits as module

#: The batch has 7 programs with 196 tokens, the longest with 45; its answer has values and losses.
RESULT_BYTES = 7 * 10 * 4 + 7 * 8


def check_batch(limits):
    module.check_batch(an_evaluation().batch, limits)


def check_tokens(limits):
    module.check_tokens(len(an_evaluation().batch.codes), limits)


def check_result(limits):
    module.check_result(an_evaluation(), DATA.layout, limits)


def check_dataset(limits):
    module.check_dataset(DATA.layout, limits)


@pytest.mark.parametrize(
    ("check", "limit", "most", "reason"),
    [
        (check_batch, "programs", 7, "TOO_MANY_PROGRAMS"),
        (check_batch, "program_tokens", 45, "PROGRAM_TOO_LONG"),
        (check_tokens, "tokens", 196, "TOO_MANY_TOKENS"),
        (check_batch, "vectors", 1, "TOO_MANY_VECTORS"),
        (check_result, "result_bytes", RESULT_BYTES, "RESULT_TOO_LARGE"),
        (check_dataset, "dataset_bytes", 200, "DATASET_TOO_LARGE"),
        (check_dataset, "rows", 10, "TOO_MANY_ROWS"),
    ],
)
def test_a_request_over_a_limit_is_refused_and_the_flag_named(check, limit, most, reason):
    check(Limits(**{limit: most}))
    with pytest.raises(ResourceExhaustedError) as caught:
        check(Limits(**{limit: most - 1}))
    assert caught.value.reason == reason
    assert f"--max-{limit.replace('_', '-')}" in str(caught.value)
    assert (caught.value.needed, caught.value.available) == (most, most - 1)
