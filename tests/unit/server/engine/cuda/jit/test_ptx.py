"""The transpiler without a GPU: what it generates, and that it assembles for every architecture."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warpfit.expressions.workload import random_program
from warpfit.ir import Batch, Program
from warpfit.ops import CONSTANT, FIRST_OPERATOR, OPERATORS, PARAMETER, VARIABLE, Operator

pytest.importorskip("cuda.bindings.nvrtc")
pytest.importorskip("cuda.bindings.nvjitlink")

from warpfit_server.engine.cuda.jit import device_library as library
from warpfit_server.engine.cuda.jit import ptx
from warpfit_server.engine.cuda.jit.device_library import DeviceLibrary
from warpfit_server.engine.cuda.jit.kernel_interface import Output
from warpfit_server.engine.cuda.jit.shapes import POWERS, Shape, shapes_of_batch
from warpfit_server.engine.cuda.math.modes import Mode
from warpfit_server.engine.cuda.runtime import nvjitlink as linker

POW = OPERATORS["pow"].code
ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)
OUTPUTS = (
    Output(loss="squares", rows=4),
    Output(values=True, rows=2, threads=512),
    Output(values=True, loss="absolute", weighted=True, rows=1, threads=1024),
)


def build(mode: Mode, architecture: int, *, derivatives: bool = False) -> DeviceLibrary:
    return library.build(mode, architecture, derivatives=derivatives)


def fitting(output: Output, mode: Mode) -> Output:
    """Output as far as the mode allows: wide values take more registers."""
    word = mode.dtype.itemsize
    return replace(
        output, rows=min(output.rows, 16 // word), threads=min(output.threads, 4096 // word)
    )


def shapes_of(*programs: Program, gradient: bool = False) -> tuple[Shape, ...]:
    counts = [np.ones(program.parameters) for program in programs]
    shapes = shapes_of_batch(Batch.of(programs, counts))
    return (shapes.with_derivatives() if gradient else shapes).shapes


def operator_program(operator: Operator) -> Program:
    """Apply an operator to variables, and once more to a variable and parameters."""
    over_rows = Program.apply(operator, *(Program.variable(i) for i in range(operator.arity)))
    leaves = [Program.variable(0), Program.parameter(0), Program.parameter(1)]
    return Program.apply("add", over_rows, Program.apply(operator, *leaves[: operator.arity]))


def text_of(mode: Mode, output: Output, *programs: Program, architecture: int = 90) -> str:
    kernels = {"evaluate": shapes_of(*programs)}
    return ptx.module(build(mode, architecture), fitting(output, mode), kernels)


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


@pytest.mark.parametrize("number", range(len(ARCHITECTURES)), ids=ARCHITECTURES)
def test_every_operator_assembles(number: int) -> None:
    """Values and losses for each architecture, gradients for every other one; in each mode."""
    architecture, mode = ARCHITECTURES[number], list(Mode)[number % 3]
    works = [(fitting(OUTPUTS[number % 3], mode), operator_program)]
    if number % 2:
        loss = ("squares", "absolute")[number // 2 % 2]
        works.append(
            (Output(loss=loss, gradient=True, weighted=True, rows=1, threads=256), shifted)
        )
    device_library = build(mode, architecture, derivatives=len(works) > 1)
    for output, program_of in works:
        programs = map(program_of, OPERATORS.values())
        shapes = shapes_of(*programs, gradient=output.gradient)
        starts = range(0, len(shapes), 5)
        kernels = {f"group_{start}": shapes[start : start + 5] for start in starts}
        text = ptx.module(device_library, output, kernels)
        cubin = linker.link(text, architecture, device_library.functions)
        assert all(name.encode() in cubin for name in kernels)


@pytest.mark.parametrize("mode", Mode)
def test_derivatives_of_literal_powers_assemble(mode: Mode) -> None:
    """That of the first power is a constant."""
    inner = Program.apply("mul", Program.variable(0), Program.parameter(0))
    powers = [Program.apply("pow", inner, Program.constant(exponent)) for exponent in POWERS]
    output = Output(loss="squares", gradient=True, rows=1)
    device_library = build(mode, 90, derivatives=True)
    text = ptx.module(device_library, output, {"evaluate": shapes_of(*powers, gradient=True)})
    assert linker.link(text, 90, device_library.functions)


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    mode=st.sampled_from(Mode),
    output=st.sampled_from(OUTPUTS),
    group=st.integers(1, 6),
)
def test_random_programs_assemble(seed: int, mode: Mode, output: Output, group: int) -> None:
    rng = np.random.default_rng(seed)
    programs = [
        random_program(rng, int(rng.integers(1, 30)), operators=tuple(OPERATORS))
        for _ in range(group)
    ]
    text = text_of(mode, output, *programs)
    assert linker.link(text, 90, build(mode, 90).functions)


def test_a_linker_error_contains_its_log() -> None:
    with pytest.raises(Exception, match="does not link"):
        linker.link(".version 8.0\n.target sm_90\n.address_size 64\nnonsense", 90)


def test_common_subexpressions_are_computed_once() -> None:
    part = Program.apply("exp", Program.apply("mul", Program.variable(0), Program.variable(1)))
    first = Program.apply("add", part, Program.variable(0))
    second = Program.apply("sub", Program.apply("mul", part, part), Program.variable(1))
    text = text_of(Mode.PRECISE, Output(values=True, rows=1), first, second)
    assert text.count("ex2.approx") == 1


def test_row_invariant_work_is_outside_the_row_loop() -> None:
    invariant = Program.apply("log", Program.parameter(0))
    text = text_of(Mode.FAST, OUTPUTS[0], Program.apply("mul", Program.variable(0), invariant))
    assert "lg2.approx" in text
    assert "lg2.approx" not in loop_of(text)


@pytest.mark.parametrize("mode", [Mode.PRECISE, Mode.DOUBLE])
def test_precise_arithmetic_is_never_contracted(mode: Mode) -> None:
    a, b, c = (Program.variable(i) for i in range(3))
    total = Program.apply("add", Program.apply("mul", a, b), c)
    text = text_of(mode, Output(values=True, rows=1), total)
    assert f"mul.rn.{mode.type_name}" in text
    assert f"add.rn.{mode.type_name}" in text
    assert f"fma.rn.{mode.type_name}" not in text


@pytest.mark.parametrize("exponent", [-2, -1, 1, 2, 3, 4])
@pytest.mark.parametrize("mode", Mode)
def test_small_whole_exponents_need_no_power_function(mode: Mode, exponent: int) -> None:
    program = Program.apply("pow", Program.variable(0), Program.constant(exponent))
    text = text_of(mode, Output(values=True, rows=1), program)
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
def test_shapes_do_not_depend_on_numbers(first: str, second: str, alike: bool) -> None:
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
    (left,), (right,) = shapes_of(examples[first]), shapes_of(examples[second])
    assert (left == right) is alike


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), vectors=st.integers(1, 3))
def test_inputs_are_the_numbers_of_the_batch(seed: int, vectors: int) -> None:
    """A shape with its inputs has the leaves of the program, except literal exponents."""
    rng = np.random.default_rng(seed)
    programs = [random_program(rng, int(rng.integers(1, 20))) for _ in range(4)]
    parameters = [rng.normal(size=(vectors, program.parameters)) for program in programs]
    batch = Batch.of(programs, parameters)
    shapes = shapes_of_batch(batch)
    inputs = np.empty((batch.vectors, shapes.input_starts[-1]))
    shapes.fill(batch, inputs)
    for index, (program, shape) in enumerate(zip(programs, shapes.shapes, strict=True)):
        own = inputs[:, shapes.input_starts[index] : shapes.input_starts[index + 1]]
        tokens = list(zip(program.codes.tolist(), program.values.tolist(), strict=True))
        literal = {
            at
            for at, (code, value) in enumerate(tokens[:-1])
            if code == CONSTANT and value in POWERS and tokens[at + 1][0] == POW
        }
        for vector in range(vectors):
            given = [
                parameters[index][vector][int(value)] if code == PARAMETER else value
                for at, (code, value) in enumerate(tokens)
                if code < FIRST_OPERATOR and at not in literal
            ]
            found = [
                operand if code == VARIABLE else own[vector][operand]
                for code, operand in zip(shape.codes, shape.operands, strict=True)
                if code < FIRST_OPERATOR
            ]
            assert found == given


def test_only_parameters_have_derivatives() -> None:
    x, p = Program.variable(0), Program.parameter(1)
    program = Program.apply("add", Program.apply("mul", p, x), Program.constant(2.5))
    (shape,) = shapes_of(program, gradient=True)
    (plain,) = shapes_of(program)
    assert len(shape.wanted) == 1
    assert plain.wanted == ()
    assert shape != plain
