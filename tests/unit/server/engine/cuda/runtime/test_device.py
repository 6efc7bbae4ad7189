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


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (200, "has 100 bytes left where 200 are needed"),
        (50, "has 100 bytes left, but not 50 in one piece"),
        (None, "CUDA lacks memory: the device has 100 bytes left"),
    ],
)
def test_an_error_says_which_memory_is_short(monkeypatch, size, words):
    monkeypatch.setattr(CudaDevice, "available", lambda device: 100)
    error = CudaDevice.__new__(CudaDevice).no_room(size)
    assert words in error.message
    assert (error.needed, error.available) == (size, 100)
