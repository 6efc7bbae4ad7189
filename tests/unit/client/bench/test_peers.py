"""Peers of `warpfit bench`: each evaluates what the float64 reference evaluates."""

import sys
import types

import numpy as np
import pytest

from warpfit.bench import peers
from warpfit.bench.batches import Expressions, table
from warpfit.bench.measure import AGREEMENT, agreement
from warpfit.expressions import reference
from warpfit.ir import Program
from warpfit.parse import parse


@pytest.fixture(scope="module")
def batch():
    return table(300, 1), *Expressions(1).draw(40)


@pytest.mark.parametrize("name", ["NumPy", "pyoperon", "gplearn"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_peer_agrees_with_the_reference(name, batch):
    given, programs, parameters = batch
    peer = peers.PEERS[name]
    pytest.importorskip(peer.needs)
    job = peer(given, 1).prepare(list(map(Program.bind, programs, parameters)))
    job.run()
    values = np.array(job.values(200))
    expected = reference.evaluate(programs, given.X[:200].T, parameters)
    assert values.shape == expected.shape
    assert agreement(values, expected) >= AGREEMENT


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_numpy_computes_the_losses_of_those_values(batch):
    given, programs, parameters = batch
    job = peers.NumpyPeer(given, 1).prepare(list(map(Program.bind, programs, parameters)))
    with np.errstate(all="ignore"):
        expected = np.mean(np.square(job.values(300).astype(np.float64) - given.y), axis=1)
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


def test_a_peer_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda name: None if name == "gplearn" else name)
    assert peers.installed("cpu") == (["NumPy", "pyoperon"], ["gplearn"])


def test_nodes_for_evogp_are_in_prefix_order(monkeypatch):
    names = {"ADD": 1, "SUB": 2, "MUL": 3, "EXP": 22}
    kinds = {"VAR": 0, "CONST": 1, "UFUNC": 2, "BFUNC": 3}
    utils = types.SimpleNamespace(
        Func=types.SimpleNamespace(**names), NType=types.SimpleNamespace(**kinds)
    )
    monkeypatch.setitem(sys.modules, "evogp", types.ModuleType("evogp"))
    monkeypatch.setitem(sys.modules, "evogp.tree", types.ModuleType("evogp.tree"))
    monkeypatch.setitem(sys.modules, "evogp.tree.utils", utils)
    found = peers.evogp_nodes(parse("exp(x2) - 0.5*4"))
    assert found == [(2.0, 3, 6), (22.0, 2, 2), (1.0, 0, 1), (3.0, 3, 3), (0.5, 1, 1), (4.0, 1, 1)]
