"""Modules of machine code, brought to the device together.

The driver loads a module once the device has nothing to do, and lets launches wait meanwhile. One
module after the other would each wait for what was launched since the last one, and all others for
them. So launches are held back, in `submission.carry_out` and `CudaDevice.await_modules`, until all
are there: beside others' work that is one wait, and some 0.1 ms a module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warpfit_server.engine.cuda.runtime.device import CudaDevice
from warpfit_server.engine.cuda.runtime.submission import HELD, LOAD_MODULE
from warpfit_server.engine.native import numba_cache
from warpfit_server.engine.native.calls import call_c


def load_together(device: CudaDevice, images: Sequence[bytes]) -> list[Any]:
    """Load machine code; one thread of a device at a time.

    Args:
        device: to load on.
        images: cubins.

    Returns:
        CuPy modules, unloaded when they are dropped.

    Raises:
        CUDADriverError: if one cannot be loaded, as for want of device memory; none stays then.

    """
    device.use()
    places = np.array([np.frombuffer(image, np.uint8).ctypes.data for image in images], np.int64)
    handles = np.zeros(len(images), dtype=np.uint64)
    status = _load(device.functions, places, handles)
    cuda = device.cupy.cuda
    modules = [cuda.function.Module() for _ in images]
    for module, handle in zip(modules, handles.tolist(), strict=True):
        module.ptr = handle
    if status:
        raise cuda.driver.CUDADriverError(status)
    return modules


@numba_cache.njit(nogil=True)  # type: ignore[untyped-decorator]
def _load(
    functions: NDArray[np.int64], images: NDArray[np.int64], handles: NDArray[np.uint64]
) -> int:
    """Fill in handles, which stay 0 from the first module that fails; return the driver's status.

    Without Python, for the lock of which it would wait while all launches wait for it.
    """
    status = 0
    functions[HELD] = 1
    for number in range(len(images)):
        place = np.int64(handles.ctypes.data) + 8 * number
        status = call_c(functions[LOAD_MODULE], (place, images[number]))
        if status != 0:
            break
    functions[HELD] = 0
    return int(status)
