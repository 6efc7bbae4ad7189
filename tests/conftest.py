"""What all tests share."""

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("support.derivative_suite")

# A busy machine is no failure: nothing here is timed.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
