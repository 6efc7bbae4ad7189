"""nvJitLink: PTX text to machine code, without a GPU."""

from __future__ import annotations

from cuda.bindings import nvjitlink

from warpfit.errors import InternalError


def version() -> str:
    """Return the version of the linker, such as ``"13.0"``."""
    major, minor = nvjitlink.version()
    return f"{major}.{minor}"


def link(ptx: str, architecture: int, functions: bytes = b"") -> bytes:
    """Assemble PTX and link it with the relocatable machine code of library functions.

    It works without Python's lock.

    Raises:
        InternalError: with the linker's log, if linking fails.
    """
    options = [f"-arch=sm_{architecture}", "-O3"]
    handle = nvjitlink.create(len(options), options)
    try:
        source = ptx.encode() + b"\0"
        nvjitlink.add_data(handle, nvjitlink.InputType.PTX, source, len(source), "warpfit")
        if functions:
            nvjitlink.add_data(
                handle, nvjitlink.InputType.CUBIN, functions, len(functions), "functions"
            )
        nvjitlink.complete(handle)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, cubin)
    except nvjitlink.nvJitLinkError as error:
        raise InternalError(
            f"the generated code does not link: {_log(handle)}", "LINK_FAILED"
        ) from error
    finally:
        nvjitlink.destroy(handle)
    return bytes(cubin)


def _log(handle: int) -> str:
    log = bytearray(nvjitlink.get_error_log_size(handle))
    if log:
        nvjitlink.get_error_log(handle, log)
    return log.rstrip(b"\0").decode(errors="replace")
