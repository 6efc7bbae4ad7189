"""What all tests share."""

import pytest

pytest.register_assert_rewrite("support.derivative_suite")
