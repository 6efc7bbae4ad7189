"""The process that compiles kernels; `CompileQueue` runs it as ``python -m`` of this module."""

from __future__ import annotations

from warpfit_server.engine.cuda.jit import device_library, ptx
from warpfit_server.engine.cuda.jit.kernel_interface import Output
from warpfit_server.engine.cuda.jit.shapes import Shape
from warpfit_server.engine.cuda.math.modes import Mode
from warpfit_server.engine.cuda.runtime import nvjitlink
from warpfit_server.engine.cuda.runtime.compile_queue import serve

#: Architecture, arithmetic and outputs of a kernel, its name, and the expressions that it computes.
KernelJob = tuple[int, Mode, Output, str, tuple[Shape, ...]]


def compile_kernel(job: KernelJob) -> bytes:
    """Return the machine code of a kernel; the first one of a mode takes half a second more.

    Raises:
        InternalError: with the linker's log, if linking fails.
    """
    architecture, mode, output, name, shapes = job
    library = device_library.build(mode, architecture, derivatives=output.gradient)
    text = ptx.module(library, output, {name: shapes})
    return nvjitlink.link(text, architecture, library.functions)


if __name__ == "__main__":
    serve(compile_kernel)
