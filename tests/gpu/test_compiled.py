"""Compiled kernels on a device against the NumPy reference."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from support.engines.references import Evaluate
from support.random_programs import thesis_mix
from warpfit.dataset import Dataset
from warpfit.errors import ResourceExhaustedError
from warpfit.ir import Program
from warpfit.request import Loss, Precision, Tier


@pytest.fixture
def compiled(evaluate: Evaluate):
    """Evaluate on the compiled tier, waiting for the compiler where it must."""
    return partial(evaluate, tier=Tier.COMPILED)


@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("precision", list(Precision))
def test_a_repeated_batch_with_new_parameters(compiled, precision, values):
    """The graph is used again; equal parameters give equal bits, others what they should."""
    rng = np.random.default_rng(0)
    dataset = Dataset.of(rng.uniform(0.5, 2, (30_011, 10)), rng.normal(size=30_011))
    programs, vectors = thesis_mix(5, 60)
    call = partial(compiled, dataset, programs, precision=precision, loss=Loss.MSE, values=values)
    first, again = call(vectors), call(vectors)
    if values:
        assert first.values.tobytes() == again.values.tobytes()
    assert first.losses.tobytes() == again.losses.tobytes()
    assert again.timings.cache_hits == 60
    moved = call([vector + 0.25 for vector in vectors])
    fresh = call([[*(vector + 0.25)] for vector in vectors])
    assert moved.losses.tobytes() == fresh.losses.tobytes()
    assert moved.losses.tobytes() != first.losses.tobytes()


def test_what_cannot_be_compiled_is_refused_with_a_remedy(compiled):
    x = program = Program.variable(0)
    for _ in range(1500):
        program = Program.apply("add", program, x)
    with pytest.raises(ResourceExhaustedError, match="interpreter"):
        compiled(Dataset.of(np.ones((3, 1))), [program])
