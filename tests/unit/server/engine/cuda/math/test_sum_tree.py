"""Sums over rows, by the device's source compiled for this machine."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.emulators.cuda_on_host import compile_for_host, launch_on_host
from warpfit_server.engine.cuda.math.prelude import sum_tree
from warpfit_server.engine.sum_tree import levels_between, sum_nodes

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
    return compile_for_host("typedef float real;\n" + sum_tree() + _ENTRIES)


def run(kernel: str, *words: Any) -> None:
    arguments = np.array(
        [word.ctypes.data if isinstance(word, np.ndarray) else word for word in words],
        dtype=np.int64,
    )
    sizes = (1, 1, 1), (32, 1, 1)
    assert launch_on_host(kernels(), kernel, *sizes, [arguments.ctypes.data])


def parent_nodes(nodes, first, levels):
    """Add up sums of nodes to those of the nodes so many levels above."""
    numbers = first + np.arange(len(nodes))
    edges = np.flatnonzero(np.diff(numbers >> levels)) + 1
    groups = zip(np.split(nodes, edges), numbers[[0, *edges]], strict=True)
    return np.stack([sum_nodes(group, int(number)) for group, number in groups])


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
