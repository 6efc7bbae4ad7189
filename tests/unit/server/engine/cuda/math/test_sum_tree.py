"""Sums over rows, by the device's source compiled for this machine."""

from __future__ import annotations

import ctypes
import functools
from importlib import resources
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from support.emulators.cuda_on_host import compile_for_host, launch_on_host
from support.engines.reference_losses import moments_of
from warpfit_server.engine.cuda.derivatives.launch_plan import (
    LEAF_ROWS,
    NODE_STATISTICS,
    STATISTICS_ARGUMENTS,
)
from warpfit_server.engine.cuda.math.prelude import sum_tree
from warpfit_server.engine.cuda.runtime.resident_data import cut_rows
from warpfit_server.engine.sum_tree import parent_nodes, sum_nodes
from warpfit_server.row_blocks import levels_between, nodes_of

#: Statistics are measured by one warp a block here.
_ENTRIES = """
struct Nodes { double *sums, *parents; long long first, nodes, count, pitch, levels; };
extern "C" __global__ void add_nodes(const __grid_constant__ Nodes n) {
  sum_nodes(n.sums, n.first, n.nodes, n.count, n.pitch, n.levels);
  if (threadIdx.x) return;
  for (long long p = 0; p < parent_count(n.first, n.nodes, n.levels); ++p)
    for (long long k = 0; k < n.count; ++k)
      n.parents[p * n.count + k] = n.sums[parent_place(n.first, p, n.levels) * n.pitch + k];
}
struct Groups { const double* values; double* sums; long long groups; };
template <int N> static double sum_groups(const double* values) {
  double v[N];
  for (int g = 0; g < N; ++g) v[g] = values[32 * g + threadIdx.x];
  return group_sum(v, threadIdx.x);
}
extern "C" __global__ void add_groups(const __grid_constant__ Groups g) {
  const double sum = g.groups == 1 ? sum_groups<1>(g.values) : g.groups == 2 ?
      sum_groups<2>(g.values) : sum_groups<4>(g.values);
  g.sums[threadIdx.x] = sum;
}
"""


@functools.cache
def kernels() -> ctypes.CDLL:
    package = "warpfit_server.engine.cuda.derivatives"
    statistics = resources.files(package).joinpath("statistics.cu").read_text()
    narrow = statistics.replace("STATISTICS_THREADS 256", "STATISTICS_THREADS 32")
    assert narrow != statistics
    return compile_for_host("typedef float real;\n" + sum_tree() + narrow + _ENTRIES)


def run(kernel: str, *words: Any) -> None:
    arguments = np.array(
        [word.ctypes.data if isinstance(word, np.ndarray) else word for word in words],
        dtype=np.int64,
    )
    launch(kernel, 1, arguments)


def launch(kernel: str, blocks: int, arguments: np.ndarray) -> None:
    sizes = (blocks, 1, 1), (32, 1, 1)
    assert launch_on_host(kernels(), kernel, *sizes, [arguments.ctypes.data])


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**40), st.integers(1, 5000), st.integers(0, 14), st.integers(1, 3))
def test_nodes_are_added_up_as_on_the_cpu(first, nodes, levels, count):
    sums, pitch = np.random.default_rng(nodes).normal(size=(nodes, 3)), 3
    given_sums = sums[:, :count].copy()
    parents = parent_nodes(given_sums, first, levels)
    found = np.zeros_like(parents)
    run("add_nodes", sums, found, first, nodes, count, pitch, levels)
    np.testing.assert_array_equal(found, parents)
    whole = np.zeros((1, count))
    run("add_nodes", given_sums, whole, first, nodes, count, count, levels_between(1, None))
    np.testing.assert_array_equal(whole[0], sum_nodes(parents, first >> levels))


@pytest.mark.parametrize("groups", [2, 4])
def test_groups_of_a_tile_are_added_up_like_tiles_of_one_group(groups):
    values, sums = np.random.default_rng(1).normal(size=(groups, 32)), np.zeros(32)
    alone = np.zeros((groups, 32))
    for number in range(groups):
        run("add_groups", values[number], alone[number], 1)
    run("add_groups", values, sums, groups)
    np.testing.assert_array_equal(sums, sum_nodes(alone, 0))
    np.testing.assert_allclose(sums, values.sum())


def measure(arguments: np.ndarray) -> None:
    launch("measure", int(arguments["leaf_count"]), arguments)
    launch("merge_leaves", 1, arguments)


def statistics_of(f, y, w, rows, aligned: int) -> tuple[np.ndarray, NDArray[Any]]:
    """Arguments for rows of columns of which the device has those from a row on; and leaves."""
    start, stop = rows
    leaves = -(-stop // LEAF_ROWS) - start // LEAF_ROWS
    memory, arguments = np.zeros((leaves, NODE_STATISTICS)), np.zeros((), STATISTICS_ARGUMENTS)
    for name, column in (("values", f), ("target", y), ("weights", w)):
        arguments[name] = 0 if column is None else column[aligned:].ctypes.data
    arguments["leaves"], arguments["leaf_count"] = memory.ctypes.data, leaves
    arguments["first_leaf"], arguments["rows"] = start // LEAF_ROWS, stop - start
    arguments["first_row"], arguments["end_row"] = start - aligned, stop - aligned
    arguments["before"], arguments["leaf_pitch"] = aligned, NODE_STATISTICS
    arguments["node_levels"] = levels_between(1, None)
    return arguments, memory


def measured(f, y, w, rows, aligned: int) -> NDArray[np.float64]:
    arguments, _memory = statistics_of(f, y, w, rows, aligned)
    found = np.zeros(12)
    arguments["reductions"], arguments["moments"] = found.ctypes.data, found[5:].ctypes.data
    measure(arguments)
    return found


@pytest.mark.parametrize("each", [4096, 8192])
def test_statistics_of_nodes_are_merged_to_those_of_the_whole(each):
    """Each window has one node, or several."""
    rng = np.random.default_rng(4)
    f, y = (rng.normal(5, 1, size=9000).astype(np.float32) for _ in range(2))
    rows, length = (1500, 8700), 4096
    count, skipped = len(nodes_of(rows, length)), 3
    nodes, found = np.zeros((count, skipped + NODE_STATISTICS)), np.zeros(12)
    for span in cut_rows(rows, each):
        arguments, _memory = statistics_of(f, y, None, span, span[0] // 256 * 256)
        arguments["reductions"] = arguments["moments"] = found.ctypes.data
        arguments["nodes"], arguments["node_pitch"] = nodes[:, skipped:].ctypes.data, nodes.shape[1]
        arguments["node"] = span[0] // length - rows[0] // length
        arguments["node_levels"] = levels_between(LEAF_ROWS, length)
        measure(arguments)
    assert not found.any()
    arguments = np.zeros((), STATISTICS_ARGUMENTS)
    arguments["leaves"], arguments["leaf_count"] = nodes[:, skipped:].ctypes.data, count
    arguments["leaf_pitch"], arguments["node_levels"] = nodes.shape[1], levels_between(1, None)
    arguments["first_leaf"], arguments["rows"] = rows[0] // length, rows[1] - rows[0]
    arguments["reductions"], arguments["moments"] = found.ctypes.data, found[5:].ctypes.data
    launch("merge_leaves", 1, arguments)
    np.testing.assert_array_equal(found, measured(f, y, None, rows, 0))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rows", [(0, 1), (300, 5000), (1024, 2048), (2000, 2300)])
def test_statistics_are_those_of_numpy_wherever_the_memory_begins(rows, weighted):
    rng = np.random.default_rng(3)
    f = (1e4 + rng.normal(size=6000)).astype(np.float32)
    y = (0.5 * f + rng.normal(size=6000)).astype(np.float32)
    w = rng.uniform(0, 2, size=6000).astype(np.float32) if weighted else None
    found = measured(f, y, w, rows, 0)
    np.testing.assert_array_equal(measured(f, y, w, rows, rows[0] // 256 * 256), found)
    f, y = (column[slice(*rows)].astype(float) for column in (f, y))
    weights = np.ones(len(f)) if w is None else w[slice(*rows)].astype(float)
    expected = [f.sum(), f.mean(), f.min(), f.max(), 0, *moments_of(f, y, weights)]
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-9)


def test_values_that_are_not_numbers_are_counted():
    f = np.arange(3000, dtype=np.float32)
    f[5], f[2500] = np.inf, np.nan
    found = measured(f, None, None, (0, 2000), 0)
    assert found[2:5].tolist() == [0.0, np.inf, 1.0]
    found = measured(f, None, None, (2000, 3000), 0)
    assert np.isnan(found[:4]).all()
    assert found[4] == 1.0
