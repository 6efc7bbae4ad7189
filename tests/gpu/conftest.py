"""Everything here needs a CUDA device and CuPy, and is skipped without them.

With ``--on-host`` the kernels of CUDA C++ run on this machine's CPU, slowly; what needs the
compiled tier fails then.
"""

from __future__ import annotations

import pytest

from support.engines.references import Evaluate
from warpfit.errors import UnavailableError


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--on-host", action="store_true", help="run CUDA kernels on the CPU")


@pytest.fixture(scope="session", autouse=True)
def _device(request):
    with pytest.MonkeyPatch.context() as patch:
        if request.config.getoption("--on-host", default=False):
            from support.emulators.host_device import install

            install(patch)
        yield


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
