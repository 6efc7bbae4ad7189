"""What all tests share."""

import os

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("support.derivative_suite")

# A busy machine is no failure: nothing here is timed.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

#: Each process of the tests loads libraries and keeps a server: about a gigabyte.
_MOST_PROCESSES = 4


@pytest.hookimpl(
    optionalhook=True
)  # there is none without pytest-xdist, which GPU tests do not need
def pytest_xdist_auto_num_workers() -> int:
    """Processes of ``pytest -n auto``: the cores that there are, also where two share one core."""
    return min(_MOST_PROCESSES, len(os.sched_getaffinity(0)))
