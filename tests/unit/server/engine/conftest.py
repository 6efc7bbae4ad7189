"""Engines of one process share the compiled code, which takes a second to load."""

import pytest

from warpfit_server.engine.cpu.codegen import parts


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
