"""Precise arithmetic and sums over rows, by the device's source compiled for this machine."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.emulators.cuda_on_host import compile_for_host, launch_on_host
from support.engines.accuracy import BOUNDS as BOUNDS_TABLE
from support.engines.accuracy import excess, ulps
from support.engines.hard_cases import exact_values, hard_operands
from support.engines.operators import operand_rows
from warpfit import ops
from warpfit.ops import OPERATORS
from warpfit_server.engine.cuda.runtime.translation import prelude, sum_tree
from warpfit_server.engine.interface import Arithmetic
from warpfit_server.engine.sum_tree import levels_between, sum_nodes

#: Bounds in ulp, reference errors included.
BOUNDS = {
    Arithmetic.PRECISE: {
        "div": 1.0,
        "inv": 1.0,
        "sqrt": 1.5,
        "log": 2.0,
        "pow": 4.0,
        "fma": np.inf,
    },
    Arithmetic.DOUBLE: {"div": 1.0, "inv": 1.0, "sqrt": 0.6, "log": 1.5, "exp": 1.5, "pow": 2.5}
    | {"fma": np.inf},
}
#: What operators call; its operands are a, b and c.
CALLS = {
    **{"div": "quotient(a, b)", "inv": "quotient(1, a)", "sqrt": "root(a)", "log": "logarithm(a)"},
    **{"exp": "exponential(a)", "pow": "power(a, b)", "fma": "product_sum(a, b, c)"},
    "digamma": "digamma(a)",
}


@functools.cache
def functions(arithmetic: Arithmetic) -> ctypes.CDLL:
    """Compile the device's source for this machine, with a loop over arrays for each function."""
    loops = "".join(
        f'extern "C" void run_{name}(const real* x, real* out, long n) {{'
        "for (long i = 0; i < n; ++i) { const real a = x[i], b = x[n + i], c = x[2 * n + i]; "
        f"out[i] = {call}; }} }}\n"
        for name, call in CALLS.items()
    )
    return compile_for_host(
        f"typedef {arithmetic.real} real;\n{prelude(arithmetic)}{loops}", wraps=True
    )


def run(arithmetic: Arithmetic, name: str, operands: Sequence[np.ndarray]) -> np.ndarray:
    given = np.zeros((3, len(operands[0])), arithmetic.dtype)
    given[: len(operands)] = operands
    found = np.empty_like(given[0])
    addresses = (ctypes.c_void_p(array.ctypes.data) for array in (given, found))
    getattr(functions(arithmetic), f"run_{name}")(*addresses, ctypes.c_long(len(found)))
    return found


@pytest.mark.parametrize(
    ("arithmetic", "name"), [(each, name) for each, bounds in BOUNDS.items() for name in bounds]
)
def test_bounds_hold_at_edges_and_hard_operands(arithmetic: Arithmetic, name: str) -> None:
    """The published ones, and tighter ones; zeros have NumPy's signs."""
    operator = OPERATORS[name]
    edges = operand_rows(operator.arity, arithmetic.dtype.type)[: operator.arity]
    operands = np.concatenate([edges, hard_operands(operator, arithmetic.dtype)], axis=1)
    got, exact = run(arithmetic, name, operands), exact_values(operator, operands)
    share = excess(BOUNDS_TABLE[name].precise_cuda, list(operands), got, exact)
    distance = ulps(got, exact)
    for errors, most in ((share, 1.0), (distance, BOUNDS[arithmetic][name])):
        worst = int(errors.argmax())
        assert errors[worst] <= most, (operands[:, worst], got[worst])
    with np.errstate(all="ignore"):
        rounded = exact.astype(got.dtype)
    numbers = ~np.isnan(rounded)
    np.testing.assert_array_equal(np.signbit(got[numbers]), np.signbit(rounded[numbers]))


@pytest.mark.parametrize("arithmetic", [Arithmetic.PRECISE, Arithmetic.DOUBLE])
def test_digamma_is_the_reference(arithmetic: Arithmetic) -> None:
    rng = np.random.default_rng(4)
    special_values = [0.0, -0.0, -1.0, -7.0, np.inf, -np.inf, np.nan, 1e-30, 1e30, -1e30]
    near_poles = rng.integers(-9, 1, 5_000) + rng.choice([-1, 1], 5_000) * 1e-3
    others = rng.uniform(-30, 30, 20_000), 10 ** rng.uniform(-30, 30, 999)
    operands = np.concatenate([special_values, near_poles, *others]).astype(arithmetic.dtype)
    with np.errstate(all="ignore"):
        wanted = ops.digamma(operands.astype(np.float64))
        got = run(arithmetic, "digamma", [operands])
        error = np.abs(got - wanted) / np.maximum(np.abs(wanted), 0.1)
    same = (got == wanted) | (np.isnan(got) & np.isnan(wanted))
    assert np.where(same, 0.0, error).max() < (1e-6 if arithmetic is Arithmetic.PRECISE else 1e-13)


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


def run_kernel(kernel: str, *words: Any) -> None:
    given = [word.ctypes.data if isinstance(word, np.ndarray) else word for word in words]
    sizes, arguments = ((1, 1, 1), (32, 1, 1)), np.array(given, dtype=np.int64)
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
    run_kernel("add_nodes", sums, found, first, nodes, count, pitch, levels)
    np.testing.assert_array_equal(found, parents)
    whole = np.zeros((1, count))
    run_kernel("add_nodes", given_sums, whole, first, nodes, count, count, levels_between(1, None))
    np.testing.assert_array_equal(whole[0], sum_nodes(parents, first >> levels))


@pytest.mark.parametrize("groups", [2, 4])
def test_groups_of_a_tile_are_added_up_like_tiles_of_one_group(groups):
    values, sums = np.random.default_rng(1).normal(size=(groups, 32)), np.zeros(32)
    alone = np.zeros((groups, 32))
    for number in range(groups):
        run_kernel("add_groups", values[number], alone[number], 1)
    run_kernel("add_groups", values, sums, groups)
    np.testing.assert_array_equal(sums, sum_nodes(alone, 0))
    np.testing.assert_allclose(sums, values.sum())
