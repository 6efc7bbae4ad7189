"""Engines of one process share the compiled code, which takes a second to load."""

from collections.abc import Iterator

import pytest

from support.engines.references import Evaluate
from warpfit_server.engine.cpu.codegen import parts
from warpfit_server.engine.cpu.engine import CpuEngine


@pytest.fixture(scope="session", autouse=True)
def loaded_once():
    with pytest.MonkeyPatch.context() as patch:
        for name in ("load", "load_derivatives", "load_single_derivatives"):
            patch.setattr(parts, name, _once(getattr(parts, name)))
        yield


def _once(load):
    found = []

    def load_once(*arguments):
        if not found:
            found.append(load(*arguments))
        return found[0]

    return load_once


@pytest.fixture(scope="module")
def engine() -> Iterator[CpuEngine]:
    made = CpuEngine(threads=2)
    yield made
    made.close()


@pytest.fixture(scope="module")
def evaluate(engine) -> Iterator[Evaluate]:
    runner = Evaluate(engine)
    yield runner
    runner.unload()
