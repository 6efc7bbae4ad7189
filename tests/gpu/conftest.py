"""Everything here needs a CUDA device and CuPy, and is skipped without them."""

from __future__ import annotations

import pytest

from support.engines.evaluations import Evaluate
from warpfit.errors import UnavailableError


@pytest.fixture(scope="session")
def engine():
    from warpfit_server.engine.cuda.engine import CudaEngine

    try:
        engine = CudaEngine()
    except UnavailableError as error:
        pytest.skip(str(error))
    yield engine
    engine.close()


@pytest.fixture
def evaluate(engine):
    """Evaluate programs on a data set that is loaded for this test alone."""
    helper = Evaluate(engine)
    yield helper
    helper.unload()
