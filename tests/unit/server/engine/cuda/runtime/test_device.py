"""Machines on which CuPy cannot be imported."""

from __future__ import annotations

import builtins

import pytest

pytest.importorskip("numba")

from warpfit.errors import UnavailableError
from warpfit_server.engine.cuda.runtime.device import CudaDevice
from warpfit_server.engine.process import create_engine


@pytest.fixture
def no_cupy(monkeypatch, request):
    """Make ``import cupy`` raise the parameter."""
    original = builtins.__import__

    def failing(name, *arguments, **named):
        if name == "cupy":
            raise request.param
        return original(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", failing)


@pytest.mark.parametrize(
    ("no_cupy", "remedy"),
    [
        (ImportError("No module named 'cupy'"), "pip install"),
        (PermissionError(13, "Permission denied", "/.cupy"), "--cache-dir"),
    ],
    indirect=["no_cupy"],
    ids=["missing", "no cache"],
)
def test_cuda_without_cupy_is_an_error_that_names_the_remedy(no_cupy, remedy):
    with pytest.raises(UnavailableError, match=remedy) as caught:
        CudaDevice()
    assert caught.value.reason == "NO_CUPY"
    with pytest.raises(UnavailableError):
        create_engine("cuda")
