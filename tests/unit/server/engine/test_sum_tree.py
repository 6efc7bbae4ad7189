"""The bits of sums over rows: the tree says them, and nothing else has a say."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.engines.gradients import derive, linearise
from support.suites.derivatives import make_dataset, smooth_programs
from warpfit.losses import ABSOLUTE, SQUARES, huber
from warpfit.parse import parse
from warpfit_server.engine.cpu import interpreter
from warpfit_server.engine.cpu.engine import CpuEngine
from warpfit_server.engine.sum_tree import sum_nodes

ROWS = 41_000
DATA = {dtype: make_dataset(ROWS, dtype, weights=True) for dtype in ("float32", "float64")}
BLOCK = {"float32": 2048, "float64": 1024}
#: Programs whose parameters' derivatives are columns, and so sums over rows themselves.
LINEAR = [parse("p1*x1 + p2*x2*x3"), parse("exp(x1)*p1 - x4")], [[0.3, 0.7], [1.1]]


@pytest.fixture(scope="module")
def engine() -> Iterator[CpuEngine]:
    made = CpuEngine(threads=2)
    yield made
    made.close()


def tree_sum(blocks: dict[int, np.ndarray]) -> np.ndarray:
    """The sum of numbered blocks by the rule of `sum_tree`, written down a second time."""
    while set(blocks) != {0}:
        parents: dict[int, np.ndarray] = {}
        for number in sorted(blocks):
            known = parents.get(number // 2)
            parents[number // 2] = blocks[number] if known is None else known + blocks[number]
        blocks = parents
    return blocks[0]


def sums(engine, dtype, rows) -> np.ndarray:
    """Sums over rows of every kind, for each of two losses."""
    found = []
    for loss in (SQUARES, huber(0.5).row):
        derived = derive(engine, DATA[dtype], *LINEAR, row_loss=loss, statistics=True, rows=rows)
        passed = linearise(engine, DATA[dtype], *LINEAR, loss, rows=rows)
        np.testing.assert_array_equal(derived.losses, passed.losses)
        np.testing.assert_array_equal(derived.gradients, passed.gradients)
        values = derived.reductions[..., 0].ravel()
        found += [passed.losses.ravel(), passed.gradients, passed.curvatures, values]
    return np.concatenate(found)


@settings(max_examples=8, deadline=None)
@given(
    st.sampled_from(["float32", "float64"]),
    st.integers(0, ROWS - 1),
    st.one_of(st.just(ROWS), st.integers(1, ROWS)),
)
def test_the_whole_is_the_tree_of_its_blocks(engine, dtype, start, length):
    stop, block = min(ROWS, start + length), BLOCK[dtype]
    parts = {
        number: sums(engine, dtype, (max(start, number * block), min(stop, (number + 1) * block)))
        for number in range(start // block, -(-stop // block))
    }
    whole = sums(engine, dtype, (start, stop))
    np.testing.assert_array_equal(whole, tree_sum(parts))
    np.testing.assert_array_equal(whole, sum_nodes(np.stack(list(parts.values())), min(parts)))


@pytest.mark.parametrize("length", [2, 8])
def test_rows_cut_at_edges_of_nodes_add_up(engine, length):
    size = length * BLOCK["float32"]
    edges = [*range(0, ROWS, size), ROWS]
    parts = [sums(engine, "float32", rows) for rows in pairwise(edges)]
    np.testing.assert_array_equal(sum_nodes(np.stack(parts), 0), sums(engine, "float32", None))


def answers(engine, programs, parameters, rows):
    data = DATA["float32"]
    passed = linearise(engine, data, programs, parameters, SQUARES, rows=rows)
    derived = derive(
        engine, data, programs, parameters, row_loss=ABSOLUTE, statistics=True, rows=rows
    )
    first = len(parameters[0])
    return [
        *(
            passed.losses[0],
            passed.gradients[:first],
            passed.curvatures[: first * (first + 1) // 2],
        ),
        *(derived.losses[0], derived.gradients[:first], derived.variable_gradients[0]),
        *(derived.reductions[0], derived.moments[0]),
    ]


@pytest.mark.parametrize("rows", [None, (700, 39_000)])
def test_neither_threads_nor_cuts_nor_other_programs_change_a_bit(engine, rows, monkeypatch):
    programs, parameters = smooth_programs()
    expected = answers(engine, programs, parameters, rows)

    def check(engine, count):
        found = answers(engine, programs[:count], parameters[:count], rows)
        for got, want in zip(found, expected, strict=True):
            np.testing.assert_array_equal(got, want)

    check(engine, 1)
    for threads in (1, 3):
        other = CpuEngine(threads)
        check(other, len(programs))
        other.close()
    for most_blocks, most_sums in ((1, 2**25), (3, 2**25), (64, 1), (10**6, 2**25)):
        monkeypatch.setattr(interpreter, "MOST_BLOCKS", most_blocks)
        monkeypatch.setattr(interpreter, "MOST_SUMS", most_sums)
        other = CpuEngine(2)
        check(other, len(programs))
        other.close()


@given(st.data())
def test_moments_are_of_all_rows_wherever_these_begin(engine, data):
    """Around the ends of nodes of every level neighbours are far apart in the tree."""
    dtype = data.draw(st.sampled_from(list(DATA)))
    block = BLOCK[dtype]
    end = block << data.draw(st.integers(0, 4))
    start = max(end - data.draw(st.integers(1, 4 * block)), 0)
    stop = end + data.draw(st.integers(1, 4 * block))
    programs = [parse("x1 * x2 + x3")], [[]]
    found = derive(engine, DATA[dtype], *programs, statistics=True, rows=(start, stop))
    columns = DATA[dtype].matrix[:, start:stop].astype(np.float64)
    weights = columns[-1]
    value = columns[0] * columns[1] + columns[2]
    mean = np.average(value, weights=weights)
    expected = [weights.sum(), mean, weights @ np.square(value - mean)]
    np.testing.assert_allclose(found.moments[0, 0, [0, 1, 3]], expected, rtol=1e-5)
