"""NVRTC without a GPU: what it compiles, and what it cannot compile."""

from __future__ import annotations

import pytest

pytest.importorskip("cuda.bindings.nvrtc")

from warpfit.errors import InternalError
from warpfit_server.engine.cuda.runtime import nvrtc

KERNEL = 'extern "C" __global__ void fill(int *place) { *place = 1; }'


@pytest.fixture
def destroyed(monkeypatch):
    """Programs that were destroyed."""
    found, destroy = [], nvrtc.nvrtc.nvrtcDestroyProgram

    def note(program):
        found.append(program)
        return destroy(program)

    monkeypatch.setattr(nvrtc.nvrtc, "nvrtcDestroyProgram", note)
    return found


def test_a_program_is_destroyed_once_it_is_compiled(destroyed):
    assert ".entry fill" in nvrtc.to_ptx(KERNEL, 90)
    assert nvrtc.to_cubin(KERNEL, 90).startswith(b"\x7fELF")
    assert len(destroyed) == 2


@pytest.mark.parametrize("compile_source", [nvrtc.to_ptx, nvrtc.to_cubin])
def test_a_program_that_does_not_compile_is_destroyed_and_its_log_is_told(
    destroyed, compile_source
):
    with pytest.raises(InternalError, match="nonsense"):
        compile_source("nonsense", 90)
    assert len(destroyed) == 1
