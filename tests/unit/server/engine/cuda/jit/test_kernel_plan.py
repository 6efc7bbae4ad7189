"""Layout of compiled work."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

pytest.importorskip("cuda.bindings")

from warpfit.ops import OPERATORS
from warpfit_server.engine.cuda.jit.kernel_plan import KernelPlan, best_layout
from warpfit_server.engine.interface import Arithmetic


def test_kernels_get_blocks_by_their_work():
    plan = KernelPlan(**dict.fromkeys([one.name for one in fields(KernelPlan)]))
    plan = replace(plan, shares=np.array([0.001, 0.4, 0.599]))
    assert plan.blocks(vectors=1, most=1000, total=100) == (1, 40, 60)
    assert plan.blocks(vectors=10, most=5, total=100) == (1, 4, 5)
    assert plan.blocks(vectors=1000, most=5, total=100) == (1, 1, 1)


@pytest.mark.parametrize("arithmetic", Arithmetic)
def test_layouts_fit_a_multiprocessor(arithmetic):
    for names in (("add", "mul"), ("add", "exp")):
        codes = np.array([OPERATORS[name].code for name in names], dtype=np.uint8)
        layout = best_layout(arithmetic, codes)
        assert layout.threads % 32 == 0
        assert layout.threads <= 1024
        assert layout.threads >= layout.group_size  # a thread stores at most one sum
