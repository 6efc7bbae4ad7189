"""The interpreter without a device: lowered programs, generated source, machine code."""

from __future__ import annotations

import numpy as np
import pytest

from support.emulators.device_lowering import lower_on_host
from warpfit.errors import InternalError
from warpfit.expressions.workload import thesis_mix
from warpfit.ir import Batch, Program
from warpfit.ops import OPERATORS
from warpfit_server.engine.cuda.interpreter import bytecode
from warpfit_server.engine.cuda.interpreter.jump_table import with_jump_table
from warpfit_server.engine.cuda.interpreter.source import Variant, costly_codes, interpreter_source
from warpfit_server.engine.cuda.math.modes import Mode
from warpfit_server.engine.cuda.math.prelude import render

VARIANTS = [
    Variant(Mode.FAST, 8),
    Variant(Mode.PRECISE, 4),
    Variant(Mode.DOUBLE, 2),
]


def test_row_invariant_subtrees_are_hoisted():
    x, p = Program.variable(0), Program.parameter(0)
    hoisted = Program.apply("exp", Program.apply("mul", p, Program.constant(2.0)))
    lowered = lower_on_host(Batch.of([Program.apply("add", x, hoisted)], [[1.0]]))
    assert lowered.programs[0, 1] == 1
    assert lowered.slot_counts().tolist() == [1]
    assert lowered.slots[0].tolist() == [1, 5, 0, 1]


def test_slots_find_their_parameters_with_several_vectors():
    x, p, q = Program.variable(0), Program.parameter(0), Program.parameter(1)
    drawn = [Program.apply("add", x, Program.apply("mul", p, q)), Program.apply("add", x, p)]
    batch = Batch.of(drawn, [np.ones((3, 2)), np.ones((3, 1))])
    lowered = lower_on_host(batch)
    firsts = lowered.programs[:, 2]
    assert lowered.slots[firsts, 2:].tolist() == [[0, 2], [6, 1]]


def test_thesis_mix_needs_few_instructions():
    drawn, vectors = thesis_mix(1)
    batch = Batch.of(drawn, vectors)
    written = lower_on_host(batch).programs[:, 1].sum() + len(batch)
    assert written < 0.6 * len(batch.codes)


def test_literals_are_rendered_with_the_type():
    assert render("select(a > 0, 1.5e-3, log1p(b) * 2)", "float") == (
        "select(a > float(0), float(1.5e-3), log1p(b) * float(2))"
    )
    assert render("__fdividef(1.0f, a)", "float") == "__fdividef(1.0f, a)"


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_source_has_every_operator(variant):
    source = interpreter_source(variant)
    assert "@" not in source
    for row in OPERATORS.values():
        assert f"real op_{row.name}(" in source
        assert f"(op_{row.name}, {bytecode.labels()[row.code]})" in source
        assert f"case {row.code}: stack[" in source


def test_frequent_operators_need_no_scratch_levels():
    costly = costly_codes(VARIANTS[0])
    for name in ("add", "mul", "div", "pow", "log", "exp", "sqrt", "abs"):
        assert not costly[OPERATORS[name].code]


def test_the_jump_table_leads_where_the_tree_does():
    ptx = """
\tmov.b32 %r1, %r9; // dispatch
\tsetp.gt.s32 %p1, %r1, 1;
\t@%p1 bra $high;
\tsetp.eq.s32 %p2, %r1, 0;
\tmov.f32 %f1, %f2;
\t@%p2 bra $zero;
\tbra.uni $one;
$high:
\tadd.f32 %f1, %f1, %f3;
\tbra.uni $end;
$zero:
\tneg.f32 %f1, %f1;
\tbra.uni $end;
$one:
\tabs.f32 %f1, %f1;
$end:
\tret;
"""
    text = with_jump_table(ptx, 3)
    assert "brx.idx.uni %r1, $cases;" in text
    blocks = {
        head: body.split("$")[0].split()
        for head, body in (part.split(":", 1) for part in text.split("$case_")[4:7])
    }
    moved = {label: "mov.f32" in body for label, body in blocks.items()}
    assert moved == {"0": True, "1": True, "2": False}
    for label, operation in enumerate(("neg.f32", "abs.f32", "add.f32")):
        entry = text.split(f"$case_{label}:\n")[1].split("bra.uni ")[1].split(";")[0]
        assert text.split(f"{entry}:\n")[1].split()[0] == operation


def test_text_without_a_dispatch_is_refused():
    with pytest.raises(InternalError, match="dispatch"):
        with_jump_table("ret;", 3)
