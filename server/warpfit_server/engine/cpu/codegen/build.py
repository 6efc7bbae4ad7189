"""Compilation of all kernels of the CPU engine, by LLVM, for this very CPU."""

from __future__ import annotations

import llvmlite.binding as llvm
from llvmlite import ir

from warpfit.ops import OPERATORS
from warpfit_server.engine.autodiff.rules import partial_kernels
from warpfit_server.engine.cpu.codegen.dot_products import DOT_SHAPES, dots_kernel
from warpfit_server.engine.cpu.codegen.kernels import (
    COPY,
    LOSS_KERNELS,
    Flavour,
    compile_kernel,
    loss_kernel,
    operator_kernel,
)
from warpfit_server.engine.cpu.codegen.partials import PRODUCT, partial_body, product


def build(flavour: Flavour) -> bytes:
    """Compile the kernels of operators and losses; return an object file for this CPU."""
    module = ir.Module(flavour.name)
    for name, row in OPERATORS.items():
        operator_kernel(module, name, row.arity, flavour, compile_kernel(row.kernel, flavour))
    operator_kernel(module, COPY, 1, flavour, compile_kernel("a", flavour))
    for name in LOSS_KERNELS:
        loss_kernel(module, name, flavour)
    return _compiled(module)


def build_derivatives(flavour: Flavour) -> bytes:
    """Compile the kernels that derivatives take beside these; return an object file."""
    module = ir.Module(f"{flavour.name}-derivatives")
    operator_kernel(module, PRODUCT, 2, flavour, lambda _, operands: product(*operands))
    for partial in partial_kernels():
        arity = partial.arity + partial.scaled
        operator_kernel(module, partial.name, arity, flavour, partial_body(partial, flavour))
    for shape in DOT_SHAPES:
        dots_kernel(module, shape, flavour)
    return _compiled(module)


def _compiled(module: ir.Module) -> bytes:
    machine = target_machine()
    module.triple = machine.triple
    compiled = llvm.parse_assembly(str(module))
    compiled.verify()
    tuning = llvm.create_pipeline_tuning_options(speed_level=2)
    tuning.loop_vectorization = tuning.slp_vectorization = False
    passes = llvm.create_pass_builder(machine, tuning)
    passes.getModulePassManager().run(compiled, passes)
    return bytes(machine.emit_object(compiled))


def target_machine() -> llvm.TargetMachine:
    """Describe this CPU to LLVM."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=2,
        reloc="default",
        codemodel="jitdefault",
        jit=True,
    )
