"""Hides packages from a process: PYTHONPATH names this folder, TEST_WARPFIT_ABSENT the modules."""

import os
import sys

_ABSENT = frozenset(os.environ["TEST_WARPFIT_ABSENT"].split())


class _Finder:
    """Finds nothing where a machine has nothing."""

    @staticmethod
    def find_spec(name, path, target=None):
        if name in _ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, _Finder)
