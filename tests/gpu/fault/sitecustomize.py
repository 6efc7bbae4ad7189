"""Fault injection for one test: PYTHONPATH names this folder, TEST_WARPFIT_FAULT a file.

While that file exists, the next evaluation of a CUDA engine removes it and writes through an
address that no allocation owns, so that the process gets a real illegal memory access.
"""

import os
import sys
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from pathlib import Path

_ENGINE = "warpfit_server.engine.cuda.engine"
_CODE = 'extern "C" __global__ void fault(int* address) { *address = 1; }'


def _inject(engine: type) -> None:
    evaluate = engine.evaluate
    trigger = Path(os.environ["TEST_WARPFIT_FAULT"])

    def faulty(self, evaluation, outputs):
        if trigger.exists():
            import cupy

            trigger.unlink()
            self._device.use()
            cupy.RawKernel(_CODE, "fault")((1,), (1,), (cupy.uint64(8),))
        return evaluate(self, evaluation, outputs)

    engine.evaluate = faulty


class _Finder(MetaPathFinder):
    """Patches the engine as it is imported."""

    def find_spec(self, name, path, target=None):
        if name != _ENGINE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        run = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (run(module), _inject(module.CudaEngine))
        return spec


if "TEST_WARPFIT_FAULT" in os.environ:
    sys.meta_path.insert(0, _Finder())
