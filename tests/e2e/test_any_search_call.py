"""Searches by `client.search` of any data and any settings: what they promise of their front."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import warpfit
from support.any_search import tables_of, targets_of
from support.engines.searches import check_front
from warpfit.calls.search import build_search
from warpfit.errors import WarpfitError
from warpfit.searching import DEFAULT_OPERATORS, Front, SearchProgress, SearchReason

pytestmark = pytest.mark.thorough  # its time, and whether it holds, are not measured yet

#: 60 draws, 2,000 with `--hypothesis-profile=many`.
_DRAWS = 2000 if settings.default.max_examples >= 1000 else 60
_OPERATORS = (
    *((), ("add", "mul"), ("exp", "log"), ("square",), ("max", "min"), ("div",), ("where", "lt")),
    *(("add", "sub", "mul", "div", "exp", "sin"), DEFAULT_OPERATORS, ("fma", "pow", "abs")),
)


@st.composite
def rules(draw, operators):
    """Draw rules for some of the operators, often contradicting ones."""
    names = st.sampled_from(operators or DEFAULT_OPERATORS)
    return {
        "max_size": draw(st.sampled_from([1, 2, 3, 7, 12, 25, 60])),
        "max_depth": draw(st.none() | st.integers(1, 5)),
        "complexities": draw(st.dictionaries(names, st.integers(1, 9), max_size=2)),
        "counts": draw(st.dictionaries(names, st.integers(0, 2), max_size=2)),
        "nesting": {
            outer: {inner: draw(st.integers(0, 1))}
            for outer, inner in draw(st.lists(st.tuples(names, names), max_size=2))
        },
    }


@st.composite
def calls(draw):
    """Draw columns, a target, weights or None, a type, and keywords."""
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    rows, columns = draw(st.sampled_from([1, 2, 5, 30, 200])), draw(st.integers(1, 4))
    kinds = ("uniform", "normal", "integers", "constant", "equal", "far", "line")
    X = tables_of(rows, columns, rng)[draw(st.sampled_from(kinds))]()
    if draw(st.integers(0, 4)) == 0:
        X[rng.integers(rows), rng.integers(columns)] = np.nan
    y = draw(st.sampled_from([*targets_of(np.nan_to_num(X), rng).values()]))()
    weights = draw(st.sampled_from([None, None, rng.integers(0, 3, rows) / 2.0]))
    operators = draw(st.sampled_from(_OPERATORS))
    options = {
        **draw(rules(operators)),
        "operators": operators or None,
        "loss": draw(st.sampled_from(["mse", "mse", "mae", "rmse", "nmse", "r2"])),
        "form": draw(st.sampled_from(["scaled", "plain"])),
        "generations": draw(st.integers(1, 6)),
        "population": draw(st.sampled_from([1, 3, 40])),
        "islands": 1,
        "pairs": False,
        "fit_iterations": draw(st.sampled_from([0, 1, 8])),
        "screening_rows": draw(st.sampled_from([1, 10, 1000])),
        "target_loss": draw(st.sampled_from([None, 0.0, -1.0, 0.5, 1e-3])),
        "idle_generations": draw(st.sampled_from([None, 1])),
        "seed": draw(st.integers(0, 2**64 - 1)),
    }
    if draw(st.integers(0, 3)) == 0:
        units = ["m", "s", "m/s", "1"][:columns]
        options |= {"units": units, "target_unit": draw(st.sampled_from(["m", "m/s", "kg", "1"]))}
        options["dimensionless_constants"] = draw(st.booleans())
    if rows > 5 and draw(st.booleans()):
        options["rows"] = slice(draw(st.integers(0, 3)), rows - 1)
    return X, y, weights, draw(st.sampled_from(["float32", "float64"])), options


@pytest.fixture(scope="module")
def connected(server):
    with warpfit.connect(server.address) as client:
        yield client


@settings(max_examples=_DRAWS)
@given(drawn=calls())
def test_a_front_keeps_to_its_rules_and_tells_true_losses_or_there_is_an_error(connected, drawn):
    X, y, weights, dtype, options = drawn
    try:
        data = connected.upload(X, y, weights=weights, dtype=dtype)
        found = connected.search(data, **options)
    except WarpfitError as error:
        assert error.reason.isupper()
        assert error.remedy
        return
    asked = build_search(data, options)
    front = Front(found.batch, found.sizes, found.losses)
    check_front(SearchProgress(front), asked, data.dataset)
    best = max(found.losses, default=-math.inf) if asked.loss_function.is_score else None
    is_met = options["target_loss"] is not None and len(found) > 0 and (
        min(found.losses) <= options["target_loss"] if best is None
        else best >= options["target_loss"]
    )  # fmt: skip
    assert is_met or found.reason is not SearchReason.TARGET_LOSS
