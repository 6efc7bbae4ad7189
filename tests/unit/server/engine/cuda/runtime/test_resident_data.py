"""Ranges of rows that are computed one after the other."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warpfit_server.engine.cuda.runtime.resident_data import copy_aside, cut_rows


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


def test_the_calling_thread_does_other_things_while_many_bytes_are_copied():
    go, copied = threading.Event(), []

    def copy():
        assert go.wait(20)
        copied.append(threading.get_ident())

    steps = copy_aside(1 << 30, copy)
    work = next(steps)
    assert not work.done()
    go.set()
    work.result()
    assert work.done()
    with pytest.raises(StopIteration):
        next(steps)
    assert copied != [threading.get_ident()]
    assert list(copy_aside(1000, copy)) == []  # few are copied at once
    assert copied[1:] == [threading.get_ident()]
