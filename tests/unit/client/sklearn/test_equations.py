"""The front of the equations of a search."""

from __future__ import annotations

import pytest

pytest.importorskip("sklearn")

from warpfit import parse
from warpfit.sklearn.equations import build_front


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2), (1, 0, 3, 2)])
def test_equations_without_a_loss_are_left_out(order):
    texts = ["x1", "sqrt(x1)", "x1 + 1", "log(x1) + 1"]
    losses = [2.0, float("nan"), 1.0, float("inf")]
    found = [(parse(texts[place]), losses[place], 0.5) for place in order]
    front = build_front(found, len, str, 10.0, 2.0)
    assert [equation.equation for equation in front] == ["x1", "x1 + 1"]


def test_a_search_that_found_no_loss_returns_what_it_found():
    found = [(parse("sqrt(x1)"), float("nan"), 0.5)]
    assert len(build_front(found, len, str, 10.0, 2.0)) == 1
