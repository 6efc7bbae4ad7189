"""NVRTC: CUDA C++ to PTX or machine code, without a GPU."""

from __future__ import annotations

from collections.abc import Sequence

from cuda.bindings import nvrtc

from warpfit.errors import InternalError


def version() -> str:
    """Return the version of the compiler, such as ``"13.0"``."""
    status, major, minor = nvrtc.nvrtcVersion()
    _check(status)
    return f"{major}.{minor}"


def to_ptx(source: str, architecture: int, options: Sequence[str] = ()) -> str:
    """Compile to PTX text for compute capability ``architecture`` (90 for 9.0)."""
    reading = nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX
    text = _built(source, f"compute_{architecture}", options, *reading)
    return text.rstrip(b"\0").decode()


def to_cubin(source: str, architecture: int, options: Sequence[str] = ()) -> bytes:
    """Compile to machine code for compute capability ``architecture`` (90 for 9.0)."""
    reading = nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN
    return _built(source, f"sm_{architecture}", options, *reading)


def _built(
    source: str, target: str, options: Sequence[str], size_of: object, read: object
) -> bytes:
    """Compile for a target, and return the output of which functions give the size and bytes."""
    status, program = nvrtc.nvrtcCreateProgram(source.encode(), b"warpfit.cu", 0, [], [])
    _check(status)
    try:
        encoded = [option.encode() for option in (f"--gpu-architecture={target}", *options)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        _check(status, program)
        return _output(program, size_of, read)
    finally:
        _check(nvrtc.nvrtcDestroyProgram(program)[0])


def _output(program: nvrtc.nvrtcProgram, size_of: object, read: object) -> bytes:
    status, size = size_of(program)  # type: ignore[operator]
    _check(status)
    buffer = bytes(size)
    (status,) = read(program, buffer)  # type: ignore[operator]
    _check(status)
    return buffer


def _check(status: nvrtc.nvrtcResult, program: nvrtc.nvrtcProgram | None = None) -> None:
    if status == nvrtc.nvrtcResult.NVRTC_SUCCESS:
        return
    log = b""
    if program is not None:
        log = _output(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
    raise InternalError(
        f"NVRTC failed with {status.name}: {log.rstrip(bytes(1)).decode(errors='replace')}",
        "NVRTC_FAILED",
        "Check that the CUDA packages belong to one CUDA release",
    )
