"""Engines of one process share the compiled code, which takes a second to load."""

from functools import cache

import pytest

from warpfit_server.engine.cpu.codegen import loader


@pytest.fixture(scope="session", autouse=True)
def loaded_once():
    with pytest.MonkeyPatch.context() as patch:
        for name in ("load", "load_derivatives"):
            patch.setattr(loader, name, cache(getattr(loader, name)))
        yield
