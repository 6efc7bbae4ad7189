"""Several lowered batches in one copy compute what each computes alone."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba")

from support.bytecode import Machine
from warpfit.ir import Batch
from warpfit.ops import OPERATORS
from warpfit.workload import random_program
from warpfit_server.engine.cuda.lower import Lowered, lower
from warpfit_server.engine.cuda.staging import stage

COLUMNS = np.random.default_rng(0).normal(size=(3, 7))


class HostContext:
    """A stream context whose device is an array of the host."""

    def pinned(self, _, size):
        return np.zeros(size, dtype=np.uint8)

    def buffer(self, _, size):
        return 1 << 20

    def upload(self, address, source):
        self.address, self.memory = address, source.copy()


def parts(context, addresses, name, dtype, count):
    start = addresses[name] - context.address
    return context.memory[start:].view(np.uint8)[: count * np.dtype(dtype).itemsize].view(dtype)


def batches(vectors):
    rng = np.random.default_rng(1)
    for programs in (5, 1, 9):
        drawn = [
            random_program(rng, int(rng.integers(1, 60)), variables=3, operators=tuple(OPERATORS))
            for _ in range(programs)
        ]
        yield Batch.of(drawn, [rng.normal(size=(vectors, p.parameters)) for p in drawn])


@pytest.mark.parametrize("vectors", [1, 3])
def test_batches_staged_together_compute_the_same(vectors):
    drawn = list(batches(vectors))
    context = HostContext()
    lowered = [lower(batch) for batch in drawn]
    programs = sum(len(batch) for batch in drawn)
    addresses = stage(context, drawn, lowered, programs * vectors)

    def part(name, dtype, count):
        return parts(context, addresses, name, dtype, count)

    whole = Batch(
        codes=part("slot_codes", np.uint8, sum(len(b.codes) for b in drawn)),
        values=part("slot_values", np.float64, sum(len(b.values) for b in drawn)),
        lengths=np.concatenate([b.lengths for b in drawn]),
        parameter_counts=np.concatenate([b.parameter_counts for b in drawn]),
        parameters=part("slot_parameters", np.float64, sum(len(b.parameters) for b in drawn)),
        vectors=vectors,
    )
    count = sum(len(one.instructions) for one in lowered)
    slots = sum(len(one.slots) for one in lowered)
    together = Lowered(
        part("instructions", np.uint32, 2 * count).reshape(-1, 2),
        part("programs", np.uint32, 4 * programs).reshape(-1, 4),
        part("slot_slots", np.uint32, 4 * slots).reshape(-1, 4),
        max(one.levels for one in lowered),
    )
    machine = Machine(whole, together, COLUMNS)
    first = 0
    with np.errstate(all="ignore"):
        for batch, one in zip(drawn, lowered, strict=True):
            alone = Machine(batch, one, COLUMNS)
            for index in range(len(batch)):
                np.testing.assert_array_equal(machine.run(first + index), alone.run(index))
            first += len(batch)
    order = part("order", np.uint32, programs * vectors)
    assert sorted(order.tolist()) == list(range(programs * vectors))
    assert np.all(np.diff(together.programs[order // vectors, 1].astype(int)) <= 0)


def test_jobs_stay_in_the_launch_that_takes_them():
    (batch, *_) = batches(2)
    context = HostContext()
    addresses = stage(context, [batch], [lower(batch)], 4)
    order = parts(context, addresses, "order", np.uint32, 2 * len(batch))
    for first in range(0, len(order), 4):
        chunk = sorted(order[first : first + 4].tolist())
        assert chunk == list(range(first, first + len(chunk)))
