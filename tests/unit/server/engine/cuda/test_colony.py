"""The colony of a GPU, with its kernels on this machine's CPU."""

import pytest

from support.suites.searches import *  # noqa: F403
from warpfit_server.engine.cuda import colony

pytestmark = pytest.mark.thorough  # its kernels take minutes to be compiled for the CPU


@pytest.fixture(scope="module", autouse=True)
def few_marks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(colony, "_TRIED", 1 << 16)
        yield
