"""Loading several modules of machine code at once.

The driver loads a module only when the device is idle, and delays launches meanwhile. Modules
loaded one by one would each wait for the launches since the last one, and delay further launches
in turn. So launches are held back in `driver_calls` until all modules are loaded: one wait for the
device, and then some 0.1 ms a module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warpfit_server.engine.cuda.runtime.device import CudaDevice
from warpfit_server.engine.cuda.runtime.driver_calls import LAUNCHES_HELD, LOAD_MODULE
from warpfit_server.engine.native import numba_cache
from warpfit_server.engine.native.intrinsics import call_c


def load_modules(device: CudaDevice, cubins: Sequence[bytes]) -> list[Any]:
    """Load machine code; only one thread of a device at a time may call this.

    Returns:
        CuPy modules in the order of ``cubins``, unloaded when they are dropped.

    Raises:
        CUDADriverError: if one cannot be loaded, for example for want of device memory; the
            others are unloaded then.
    """
    device.use()
    images = np.array([np.frombuffer(cubin, np.uint8).ctypes.data for cubin in cubins], np.int64)
    handles = np.zeros(len(cubins), dtype=np.uint64)
    status = _load(device.functions, images, handles)
    cuda = device.cupy.cuda
    modules = [cuda.function.Module() for _ in cubins]
    for module, handle in zip(modules, handles.tolist(), strict=True):
        module.ptr = handle
    if status:
        raise cuda.driver.CUDADriverError(status)
    return modules


@numba_cache.njit(nogil=True)  # type: ignore[untyped-decorator]
def _load(
    functions: NDArray[np.int64], images: NDArray[np.int64], handles: NDArray[np.uint64]
) -> int:
    """Fill in handles, which stay 0 from the first failure on; return the driver's status.

    Compiled, because Python code would wait for Python's lock while all launches are held back.
    """
    status = 0
    functions[LAUNCHES_HELD] = 1
    for number in range(len(images)):
        handle = np.int64(handles.ctypes.data) + 8 * number
        status = call_c(functions[LOAD_MODULE], (handle, images[number]))
        if status != 0:
            break
    functions[LAUNCHES_HELD] = 0
    return int(status)
