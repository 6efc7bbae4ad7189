"""Ranges of rows that are computed one after the other."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from warpfit_server.engine.cuda.runtime.resident_data import cut_rows


@given(st.integers(0, 2**40), st.integers(1, 2**24), st.integers(18, 30))
def test_rows_are_cut_where_nodes_of_the_tree_of_sums_end(start, count, level):
    spans = cut_rows((start, start + count), 1 << level)
    assert spans[0][0] == start
    assert spans[-1][1] == start + count
    assert all(before[1] == after[0] for before, after in pairwise(spans))
    if count > 1 << level:
        assert all(first >> level == (last - 1) >> level for first, last in spans)
    else:
        assert len(spans) == 1
