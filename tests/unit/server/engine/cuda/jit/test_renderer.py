"""The renderer without a GPU: what it writes, and that it assembles for every architecture."""

from __future__ import annotations

import re
import weakref
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.emulators.ptx_on_host import run_kernel
from support.random_programs import random_program
from support.suites.derivatives import make_dataset, smooth_programs
from warpfit.expressions.reference import differentiate
from warpfit.ir import Batch, Program
from warpfit.ops import OPERATORS, VARIABLE, Operator

pytest.importorskip("cuda.bindings.nvrtc")
pytest.importorskip("cuda.bindings.nvjitlink")

from warpfit_server.engine import autodiff as differentiating
from warpfit_server.engine.autodiff import (
    BY_PARAMETERS,
    differentiate_chunk,
    lower_batch,
)
from warpfit_server.engine.cuda.jit import renderer, templates
from warpfit_server.engine.cuda.jit.kernel_plan import KernelInputs
from warpfit_server.engine.cuda.jit.renderer import Output
from warpfit_server.engine.cuda.jit.templates import DeviceLibrary
from warpfit_server.engine.cuda.runtime import compiler
from warpfit_server.engine.interface import Arithmetic
from warpfit_server.engine.lowering import Lowered
from warpfit_server.engine.native.arguments import argument_block

ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)
OUTPUTS = (
    Output(loss="squares", rows=4),
    Output(values=True, rows=2, threads=512),
    Output(values=True, loss="absolute", weighted=True, rows=1, threads=1024),
)


def build(arithmetic: Arithmetic, architecture: int, *, derivatives: bool = False) -> DeviceLibrary:
    return templates.build(arithmetic, architecture, derivatives=derivatives)


def fitting(output: Output, arithmetic: Arithmetic) -> Output:
    """Output as far as the arithmetic allows: wide values take more registers."""
    word = arithmetic.dtype.itemsize
    return replace(
        output, rows=min(output.rows, 16 // word), threads=min(output.threads, 4096 // word)
    )


def lowered(*programs: Program, gradient: bool = False) -> Lowered:
    counts = [np.ones(program.parameters) for program in programs]
    found = lower_batch(Batch.of(programs, counts), BY_PARAMETERS * gradient)
    return found.part(0, len(programs))


def operator_program(operator: Operator) -> Program:
    """Apply an operator to variables, and once more to a variable and parameters."""
    over_rows = Program.apply(operator, *(Program.variable(i) for i in range(operator.arity)))
    leaves = [Program.variable(0), Program.parameter(0), Program.parameter(1)]
    return Program.apply("add", over_rows, Program.apply(operator, *leaves[: operator.arity]))


def text_of(
    arithmetic: Arithmetic, output: Output, *programs: Program, architecture: int = 90
) -> str:
    kernels = {"evaluate": lowered(*programs)}
    return renderer.module(build(arithmetic, architecture), fitting(output, arithmetic), kernels)


def loop_of(text: str) -> str:
    """Text of the row loop."""
    return text.split("LOOP:")[1].split("bra.uni LOOP")[0]


def shifted(operator: Operator) -> Program:
    """Operator over variables shifted by parameters of their own, and a power of the result."""
    variables, parameters = (
        [leaf(i) for i in range(operator.arity)] for leaf in (Program.variable, Program.parameter)
    )
    operands = map(partial(Program.apply, "add"), variables, parameters)
    square = Program.apply("pow", Program.apply(operator, *operands), Program.constant(2.0))
    return Program.apply("add", square, Program.apply(operator, *parameters[:1] * operator.arity))


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(
            number, marks=() if number == 5 else pytest.mark.thorough, id=str(architecture)
        )
        for number, architecture in enumerate(ARCHITECTURES)
    ],
)
def test_every_operator_assembles(number: int) -> None:
    """Values and losses for each architecture, gradients of all arithmetics for every other one."""
    architecture, arithmetic = ARCHITECTURES[number], list(Arithmetic)[number % 3]
    works = [(fitting(OUTPUTS[number % 3], arithmetic), operator_program)]
    if number % 2:
        loss = ("squares", "absolute")[number // 2 % 2]
        works.append(
            (Output(loss=loss, gradient=True, weighted=True, rows=1, threads=256), shifted)
        )
    device_library = build(arithmetic, architecture, derivatives=len(works) > 1)
    for output, program_of in works:
        programs = [program_of(operator) for operator in OPERATORS.values()]
        kernels = {
            f"group_{start}": lowered(*programs[start : start + 5], gradient=output.gradient)
            for start in range(0, len(programs), 5)
        }
        text = renderer.module(device_library, output, kernels)
        cubin = compiler.link(text, architecture, device_library.functions)
        assert all(name.encode() in cubin for name in kernels)


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    arithmetic=st.sampled_from(Arithmetic),
    output=st.sampled_from(OUTPUTS),
    group=st.integers(1, 6),
)
def test_random_programs_assemble(
    seed: int, arithmetic: Arithmetic, output: Output, group: int
) -> None:
    rng = np.random.default_rng(seed)
    programs = [
        random_program(rng, int(rng.integers(1, 30)), operators=tuple(OPERATORS))
        for _ in range(group)
    ]
    text = text_of(arithmetic, output, *programs)
    assert compiler.link(text, 90, build(arithmetic, 90).functions)


def test_a_linker_error_contains_its_log() -> None:
    with pytest.raises(Exception, match="does not link"):
        compiler.link(".version 8.0\n.target sm_90\n.address_size 64\nnonsense", 90)


def test_common_subexpressions_are_computed_once() -> None:
    part = Program.apply("exp", Program.apply("mul", Program.variable(0), Program.variable(1)))
    first = Program.apply("add", part, Program.variable(0))
    second = Program.apply("sub", Program.apply("mul", part, part), Program.variable(1))
    text = text_of(Arithmetic.PRECISE, Output(values=True, rows=1), first, second)
    assert text.count("ex2.approx") == 1


def test_addresses_are_those_of_memory_that_lives(monkeypatch) -> None:
    """Compiled code reads where its arguments lie; other threads would take memory that is free."""
    blocks = []

    def remembered(arrays):
        block = argument_block(arrays)
        blocks.append(weakref.ref(block))
        return block

    def looked_at(address, index):
        assert blocks[-1]() is not None
        return differentiate_chunk(address, index)

    monkeypatch.setattr(differentiating, "argument_block", remembered)
    monkeypatch.setattr(differentiating, "differentiate_chunk", looked_at)
    assert (
        lower_batch(
            Batch.of([Program.apply("add", Program.variable(0), Program.constant(1.0))]), 0
        ).headers["end"]
        > 0
    )


def test_row_invariant_work_is_outside_the_row_loop() -> None:
    invariant = Program.apply("log", Program.parameter(0))
    text = text_of(
        Arithmetic.FAST, OUTPUTS[0], Program.apply("mul", Program.variable(0), invariant)
    )
    assert "lg2.approx" in text
    assert "lg2.approx" not in loop_of(text)


@pytest.mark.parametrize("arithmetic", [Arithmetic.PRECISE, Arithmetic.DOUBLE])
def test_precise_arithmetic_is_never_contracted(arithmetic: Arithmetic) -> None:
    a, b, c = (Program.variable(i) for i in range(3))
    total = Program.apply("add", Program.apply("mul", a, b), c)
    text = text_of(arithmetic, Output(values=True, rows=1), total)
    assert f"mul.rn.{arithmetic.type_name}" in text
    assert f"add.rn.{arithmetic.type_name}" in text
    assert f"fma.rn.{arithmetic.type_name}" not in text


@pytest.mark.parametrize("exponent", [-2, -1, 1, 2, 3, 4])
@pytest.mark.parametrize("arithmetic", Arithmetic)
def test_small_whole_exponents_need_no_power_function(
    arithmetic: Arithmetic, exponent: int
) -> None:
    program = Program.apply("pow", Program.variable(0), Program.constant(exponent))
    text = text_of(arithmetic, Output(values=True, rows=1), program)
    assert not re.search(r"lg2|ex2|wf_pow", text)


@pytest.mark.parametrize(
    ("first", "second", "alike"),
    [
        ("constant", "parameter", True),
        ("constant", "other constant", True),
        ("two parameters", "one parameter twice", False),
        ("square", "constant power", False),
    ],
)
def test_kernels_do_not_depend_on_numbers(first: str, second: str, alike: bool) -> None:
    x = Program.variable(0)
    examples = {
        "constant": Program.apply("add", x, Program.constant(2.5)),
        "other constant": Program.apply("add", x, Program.constant(-7.0)),
        "parameter": Program.apply("add", x, Program.parameter(3)),
        "two parameters": Program.apply("add", Program.parameter(0), Program.parameter(1)),
        "one parameter twice": Program.apply("add", Program.parameter(0), Program.parameter(0)),
        "square": Program.apply("pow", x, Program.constant(2.0)),
        "constant power": Program.apply("pow", x, Program.constant(2.5)),
    }
    left, right = (
        b"".join(array.tobytes() for array in lowered(x, examples[name]))
        for name in (first, second)
    )
    assert (left == right) is alike


def test_inputs_are_the_numbers_of_the_batch() -> None:
    x, p, c = Program.variable(0), Program.parameter, Program.constant
    sums = [Program.apply("add", p(1), Program.apply("mul", x, c(-7.0))), x]
    sums.append(Program.apply("add", Program.apply("sub", c(2.5), p(0)), p(0)))
    parameters = [[[10.0, 11.0], [20.0, 21.0]], [[], []], [[30.0], [40.0]]]
    batch = Batch.of(sums, parameters)
    inputs = KernelInputs.of(lower_batch(batch, 0), batch)
    numbers = np.zeros((2, inputs.starts[-1]))
    inputs.fill(batch, numbers)
    first, second, third, end = inputs.starts
    for vector, (own, other) in enumerate([(11.0, 30.0), (21.0, 40.0)]):
        assert numbers[vector, first:second].tolist()[:2] == [own, -7.0]
        assert numbers[vector, third:end].tolist()[:2] == [2.5, other]


@pytest.mark.parametrize("loss", ["squares", "absolute"])
def test_kernels_compute_values_losses_and_gradients(loss: str) -> None:
    """Against float64 derivatives, in the fast arithmetic of an emulated device."""
    programs, vectors = smooth_programs()
    data = make_dataset(50, weights=True)
    columns, target, weights = data.matrix.astype(float), data.target, data.weights
    output = Output(values=True, loss=loss, gradient=True, weighted=True, rows=1)
    for program, vector in zip(programs, vectors, strict=True):
        batch = Batch.of([program], [vector])
        found = lower_batch(batch, BY_PARAMETERS)
        inputs = KernelInputs.of(found, batch)
        numbers = np.zeros((1, inputs.starts[-1]), np.float32)
        inputs.fill(batch, numbers)
        text = renderer.module(
            build(Arithmetic.FAST, 90, derivatives=True), output, {"evaluate": found.part(0, 1)}
        )
        read = np.unique(program.values[program.codes == VARIABLE]).astype(int)
        given = [columns[index].astype(np.float32) for index in read]
        given += [target.astype(np.float32), weights.astype(np.float32)]
        sums, (stored,) = run_kernel(text, numbers[0], given)
        values, slopes = differentiate(program, columns, vector)
        np.testing.assert_allclose(stored, values, rtol=1e-5, atol=1e-5)
        deviation = values - target
        factor = deviation if loss == "squares" else np.sign(deviation)
        want = [(weights * deviation * factor).sum(), *(slopes * factor * weights).sum(axis=-1)]
        present = [0, *(1 + np.unique(found.entries["leaf"]))]
        np.testing.assert_allclose(sums, np.array(want)[present], rtol=1e-4, atol=1e-4)
        assert not np.delete(want, present).any()
