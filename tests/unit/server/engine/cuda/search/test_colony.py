"""The colony of a GPU, with its kernels on this machine's CPU."""

import pytest

from support.suites.searches import (  # noqa: F401
    host,
    test_a_colony_is_that_of_the_cpu,
    test_a_formula_that_is_better_takes_a_place,
    test_a_search_has_the_same_front_again,
    test_formulas_of_a_colony_keep_to_units,
    test_near_misses_are_fitted,
    test_sizes_on_a_device,
    test_small_colonies_on_a_device,
)
from warpfit_server.engine.cuda.search import colony

pytestmark = pytest.mark.thorough  # its kernels take minutes to be compiled for the CPU


@pytest.fixture(scope="module", autouse=True)
def few_marks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(colony, "_TRIED", 1 << 16)
        yield
