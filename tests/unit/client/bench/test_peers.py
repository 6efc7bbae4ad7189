"""Peers of `warpfit bench`: each evaluates what the float64 reference evaluates."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest

from warpfit.bench import peers
from warpfit.bench.measure import AGREEMENT, agreement, expected_values
from warpfit.bench.peers import kernels
from warpfit.bench.work import Expressions, table
from warpfit.expressions.workload import THESIS_OPERATORS
from warpfit.parse import parse

#: What runs without a GPU; PyTorch and JAX fall back to the CPU.
HERE = ("NumPy", "numexpr", "pyoperon", "gplearn", "PyTorch", "JAX")


@pytest.fixture(scope="module")
def work():
    given = table(300, 1)
    programs, parameters = Expressions(1).fresh(40, (10, 50))
    return given, programs, parameters


@pytest.mark.parametrize("name", HERE)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_peer_agrees_with_the_reference(name, work):
    pytest.importorskip(peers.PEERS[name].needs)
    given, programs, parameters = work
    few = slice(0, 8) if name == "JAX" else slice(None)
    programs, parameters = programs[few], parameters[few]
    peer = peers.create(name, given, 1)
    job = peer.prepare(programs, parameters)
    values = np.asarray(job.values(200))
    expected = expected_values(programs, given, parameters)
    assert values.shape == expected.shape
    assert agreement(values, expected) >= AGREEMENT
    assert peer.output in ("losses", "values")
    job.run()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_numpy_computes_the_losses_of_those_values(work):
    given, programs, parameters = work
    job = peers.create("NumPy", given, 1).prepare(programs, parameters)
    with np.errstate(all="ignore"):
        values = job.values(300).astype(np.float64)
        expected = np.mean(np.square(values - given.y), axis=1)
        finite = np.isfinite(expected) & (expected < 1e6)
        assert finite.sum() > 8
        assert np.allclose(np.array(job.run())[finite], expected[finite], rtol=1e-3)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_agreement_counts_wrong_values():
    expected = np.array([[1.0, np.nan, np.inf, 1e300]])
    values = np.array([[1.005, np.nan, np.inf, np.inf]], np.float32)
    assert agreement(values, expected) == 1.0
    values[0, 0] = 1.02
    assert agreement(values, expected) == 0.75


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda name: None if name == "numexpr" else name)
    names, missing = peers.installed("cpu")
    assert missing == {"numexpr": "numexpr is not installed"}
    assert {"NumPy", "pyoperon", "gplearn"} == set(names)


def test_every_peer_can_be_found():
    for name, entry in peers.PEERS.items():
        module, cls = entry.home.split(":")
        assert hasattr(__import__(f"{peers.__name__}.{module}", fromlist=[cls]), cls), name


# -------------------------------------------------------------------------------------- kernels


def test_kernels_of_all_operators_compile():
    pytest.importorskip("cuda.bindings.nvrtc")
    from warpfit_server.engine.cuda.runtime import nvrtc

    programs, _ = Expressions(2).fresh(4, (40, 50))
    texts = [kernels.cuda_text(program, 1000) for program in programs]
    together = " ".join(texts)
    names = {"log", "exp", "sqrt", "abs", "pow"} & set(THESIS_OPERATORS)
    assert all(f"{kernels._FUNCTIONS[name]}(" in together for name in names)
    source = [kernels._KERNEL.format(number=i, expression=text) for i, text in enumerate(texts)]
    assert nvrtc.to_ptx("\n".join(source), 90, ["--use_fast_math"]).count(".entry f") == 4


def test_columns_and_parameters_are_addressed_in_the_kernel():
    assert kernels.cuda_text(parse("x3 - p2*2.5"), 1000) == "(x[2000LL + i] - (p[1] * (2.5f)))"


def test_nodes_for_evogp_are_in_prefix_order(monkeypatch):
    names = {"ADD": 1, "SUB": 2, "MUL": 3, "EXP": 22}
    kinds = {"VAR": 0, "CONST": 1, "UFUNC": 2, "BFUNC": 3}
    utils = types.SimpleNamespace(
        Func=types.SimpleNamespace(**names), NType=types.SimpleNamespace(**kinds)
    )
    monkeypatch.setitem(sys.modules, "evogp", types.ModuleType("evogp"))
    monkeypatch.setitem(sys.modules, "evogp.tree", types.ModuleType("evogp.tree"))
    monkeypatch.setitem(sys.modules, "evogp.tree.utils", utils)
    found = kernels.nodes(parse("exp(x2) - p1*4"), np.array([0.5]))
    assert found == [(2.0, 3, 6), (22.0, 2, 2), (1.0, 0, 1), (3.0, 3, 3), (0.5, 1, 1), (4.0, 1, 1)]
