"""The interpreter without a device: lowered programs, generated source, machine code."""

from __future__ import annotations

import numpy as np
import pytest

from support.emulators.device_lowering import lower_on_host
from warpfit.errors import InternalError
from warpfit.ir import Batch, Program
from warpfit_server.engine.cuda.interpreter.jump_table import with_jump_table
from warpfit_server.engine.cuda.math.prelude import render


def test_slots_find_their_parameters_with_several_vectors():
    x, p, q = Program.variable(0), Program.parameter(0), Program.parameter(1)
    drawn = [Program.apply("add", x, Program.apply("mul", p, q)), Program.apply("add", x, p)]
    batch = Batch.of(drawn, [np.ones((3, 2)), np.ones((3, 1))])
    lowered = lower_on_host(batch)
    firsts = lowered.programs[:, 2]
    assert lowered.slots[firsts, 2:].tolist() == [[0, 2], [6, 1]]


def test_literals_are_rendered_with_the_type():
    assert render("select(a > 0, 1.5e-3, log1p(b) * 2)", "float") == (
        "select(a > float(0), float(1.5e-3), log1p(b) * float(2))"
    )
    assert render("__fdividef(1.0f, a)", "float") == "__fdividef(1.0f, a)"


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
