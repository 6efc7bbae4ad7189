"""Tests of the CUDA engine are skipped without its compilers; the lowering is loaded once."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from support.emulators.host_device import install
from warpfit_server.engine.autodiff import differentiate_chunk
from warpfit_server.engine.cuda.engine import CudaEngine
from warpfit_server.engine.native.numba_cache import load_chunk_function


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


if not all(map(_is_installed, ("cuda.bindings.nvrtc", "cuda.bindings.nvjitlink"))):
    collect_ignore = ["jit", "runtime/test_compile_queue.py", "test_sources.py"]


@pytest.fixture(scope="session", autouse=True)
def lowering() -> None:
    """Load it: a first call would compile it anew, for half a minute."""
    load_chunk_function(differentiate_chunk)


@pytest.fixture(scope="module")
def engine() -> Iterator[CudaEngine]:
    """An engine whose device is this machine's CPU."""
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        made = CudaEngine(threads=2)
        yield made
        made.close()
