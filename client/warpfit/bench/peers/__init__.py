"""Other libraries that evaluate expressions, each on the same work as warpfit.

A peer gets the programs, their parameters and the data, and turns them into whatever it evaluates
(``prepare``, timed apart). Its job is then one evaluation of all expressions on all rows. A peer
that leaves values in memory is not charged for reducing them to losses; warpfit is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, Final, Protocol

from numpy.typing import NDArray

from warpfit.bench.work import Table, Vectors
from warpfit.ir import Program


@dataclass(frozen=True, slots=True)
class Job:
    """One evaluation of a batch by a peer."""

    run: Callable[[], object]
    """Evaluate once and wait for the end."""
    values: Callable[[int], NDArray[Any]]
    """Evaluate, and return the values of the first rows as the peer computes them,
    [programs, rows]."""


class Peer(Protocol):
    """A library that evaluates batches on one table."""

    output: str
    """``"values"``: each row's values in memory; ``"losses"``: mean squared errors."""
    notes: str
    """How it is used."""

    def prepare(self, programs: list[Program], parameters: Vectors) -> Job:
        """Translate, compile, allocate: everything that comes before an evaluation."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a peer is, and what it needs."""

    engine: str
    """``"cpu"`` or ``"cuda"``: what it computes on, and whom it is compared with."""
    needs: str
    """Module that must be installed."""
    home: str
    """Module of this package and class, ``module:class``."""
    quick_expressions: int = 1_000_000
    """Most expressions in a quick profile: some peers take 0.1 s to compile each."""
    tier: str = "interpreter"
    """Tier of warpfit that it is compared with: one that compiles with one that compiles."""


PEERS: Final = MappingProxyType(
    {
        "NumPy": Entry("cpu", "numpy", "arrays:NumpyPeer"),
        "numexpr": Entry("cpu", "numexpr", "processors:NumexprPeer"),
        "pyoperon": Entry("cpu", "pyoperon", "processors:PyoperonPeer"),
        "gplearn": Entry("cpu", "gplearn", "processors:GplearnPeer"),
        "CuPy fused kernels": Entry("cuda", "cupy", "kernels:CupyKernelsPeer", 50, "compiled"),
        "CuPy arrays": Entry("cuda", "cupy", "arrays:CupyPeer"),
        "PyTorch": Entry("cuda", "torch", "arrays:TorchPeer"),
        "EvoGP": Entry("cuda", "evogp", "kernels:EvogpPeer"),
        "JAX": Entry("cuda", "jax", "arrays:JaxPeer", 30, "compiled"),
    }
)


def installed(engine: str) -> tuple[list[str], dict[str, str]]:
    """Peers of an engine that are installed, and why the others are left out."""
    names, missing = [], {}
    for name, entry in PEERS.items():
        if entry.engine != engine:
            continue
        if find_spec(entry.needs) is None:
            missing[name] = f"{entry.needs} is not installed"
        else:
            names.append(name)
    return names, missing


def offers(names: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Most expressions in a quick profile, and the tier to compare with, of some peers."""
    return {name: (PEERS[name].quick_expressions, PEERS[name].tier) for name in names}


def create(name: str, table: Table, threads: int) -> Peer:
    """Make a peer; whatever its library raises is passed on."""
    module, cls = PEERS[name].home.split(":")
    factory: Callable[[Table, int], Peer] = getattr(import_module(f"{__name__}.{module}"), cls)
    return factory(table, threads)
