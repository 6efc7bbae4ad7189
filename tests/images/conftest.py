"""The images, built by buildah on a base that debootstrap makes: no daemon, no registry."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from images.containers import Builder


def pytest_collection_modifyitems(items):
    needed = [name for name in ("buildah", "debootstrap", "ip") if shutil.which(name) is None]
    reason = f"needs {' and '.join(needed)}" if needed else "needs root"
    if needed or os.geteuid() != 0:
        for item in items:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def builder():
    with tempfile.TemporaryDirectory(prefix="warpfit-images-") as work:
        made = Builder(Path(work))
        try:
            made.make_base()
            yield made
        finally:
            made.remove()


@pytest.fixture(scope="session")
def cpu_image(builder):
    return builder.build("server")


@pytest.fixture(scope="session")
def cuda_image(builder):
    return builder.build("cuda13")
