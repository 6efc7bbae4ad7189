"""NVRTC without a GPU, and the pass over its PTX."""

from __future__ import annotations

import pytest

pytest.importorskip("cuda.bindings.nvrtc")

from warpfit.errors import InternalError
from warpfit_server.engine.cuda.runtime import compiler
from warpfit_server.engine.cuda.runtime.compiler import with_jump_table

KERNEL = 'extern "C" __global__ void fill(int *place) { *place = 1; }'


@pytest.fixture
def destroyed(monkeypatch):
    """Programs that were destroyed."""
    found, destroy = [], compiler.nvrtc.nvrtcDestroyProgram

    def note(program):
        found.append(program)
        return destroy(program)

    monkeypatch.setattr(compiler.nvrtc, "nvrtcDestroyProgram", note)
    return found


def test_a_program_is_destroyed_once_it_is_compiled(destroyed):
    assert ".entry fill" in compiler.to_ptx(KERNEL, 90)
    assert compiler.to_cubin(KERNEL, 90).startswith(b"\x7fELF")
    assert len(destroyed) == 2


@pytest.mark.parametrize("compile_source", [compiler.to_ptx, compiler.to_cubin])
def test_a_program_that_does_not_compile_is_destroyed_and_its_log_is_told(
    destroyed, compile_source
):
    with pytest.raises(InternalError, match="nonsense"):
        compile_source("nonsense", 90)
    assert len(destroyed) == 1


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
