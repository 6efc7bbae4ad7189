"""Calls that must be refused."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from warpfit.errors import InvalidArgumentError


def refused(why: str, call: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
    """Make a call that is an `InvalidArgumentError` with a remedy; return the error.

    Args:
        why: its reason, or a pattern of ``REASON: text``.
        call: what is called with the arguments and options.

    """
    with pytest.raises(InvalidArgumentError) as caught:
        call(*arguments, **options)
    error = caught.value
    found = f"{error.reason}: {error}"
    is_reason = re.fullmatch("[A-Z_]+", why) is not None
    assert error.reason == why if is_reason else re.search(why, found, re.DOTALL), found
    assert error.reason and error.remedy
    return error
