"""Lowering on a device, program by program against the same source on the host."""

from __future__ import annotations

import numpy as np
import pytest

from support.emulators.device_lowering import (
    chains,
    check_order,
    lower_on_device,
    lower_on_host,
    spoilt,
)
from support.random_programs import random_program, thesis_mix
from warpfit.ir import Batch, Program
from warpfit.ops import OPERATORS
from warpfit_server.engine.cuda.interpreter.launches import ALL_VALID
from warpfit_server.engine.lowering import are_valid

X = Program.variable(0)


@pytest.fixture(scope="module")
def device(engine):
    return engine._device


def assert_same(device, batch, **how):
    found, expected = lower_on_device(device, batch, **how), lower_on_host(batch)
    assert (found.first_invalid == ALL_VALID).all()
    np.testing.assert_array_equal(found.needs(), expected.needs())
    for index in range(len(batch)):
        assert found.code(index) == expected.code(index), index


@pytest.mark.parametrize("count", [1, 31, 32, 33, 300, 3000, 40_000])
def test_populations(device, count):
    programs, parameters = thesis_mix(count, min(count, 3000))
    repeats = -(-count // len(programs))
    assert_same(device, Batch.of((programs * repeats)[:count], (parameters * repeats)[:count]))


@pytest.mark.parametrize("seed", range(4))
def test_random_programs_of_all_operators(device, seed):
    rng = np.random.default_rng(seed)
    drawn = [
        random_program(rng, int(rng.integers(1, 400)), variables=3, operators=tuple(OPERATORS))
        for _ in range(500)
    ]
    vectors = [rng.normal(size=(1 + seed, program.parameters)) for program in drawn]
    assert_same(device, Batch.of(drawn, vectors))


@pytest.mark.parametrize("name", ["add", "where"])
@pytest.mark.parametrize("length", [1000, 20_000])
def test_long_programs_beside_short_ones(device, name, length):
    arity = OPERATORS[name].arity
    short, parameters = thesis_mix(1, 50)
    programs = [*chains(name, length // arity), *short]
    assert_same(device, Batch.of(programs, [[]] * arity + parameters))


def test_bushy_programs(device):
    program = X
    for _ in range(14):
        program = Program.apply("add", program, program)
    assert_same(device, Batch.of([program, X]))


@pytest.mark.parametrize("seed", range(5))
def test_spoilt_tokens_are_found(device, seed):
    batch = spoilt(Batch.of(*thesis_mix(seed, 400)), seed, 60)
    found = lower_on_device(device, batch, 10)
    expected = [not are_valid(batch[np.array([index])], 10) for index in range(len(batch))]
    assert any(expected)
    np.testing.assert_array_equal(found.are_invalid(), expected)
    assert found.first_invalid.tolist() == [int(np.argmax(expected))]


@pytest.mark.parametrize(("group", "levels"), [(3000, 3), (3000, 1), (1000, 2), (1, 3)])
def test_order(device, group, levels):
    found = lower_on_device(device, Batch.of(*thesis_mix(5, 3000)), group=group, levels=levels)
    check_order(found, group, levels)
