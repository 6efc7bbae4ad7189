"""The lowering with derivatives, which an engine loads before it compiles kernels."""

import pytest

from warpfit_server.engine.autodiff import differentiate_chunk
from warpfit_server.engine.native.numba_cache import load_chunk_function


@pytest.fixture(scope="session", autouse=True)
def lowering() -> None:
    """Load it: a first call would compile it anew, for half a minute."""
    load_chunk_function(differentiate_chunk)
