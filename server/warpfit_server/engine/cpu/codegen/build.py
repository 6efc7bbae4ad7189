"""Object files of all kernels of the CPU engine, compiled by LLVM for this very CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import llvmlite.binding as llvm
from llvmlite import ir

from warpfit.ops import OPERATORS
from warpfit_server.engine.autodiff.rules import PartialKernel, partial_kernels
from warpfit_server.engine.cpu.codegen import kernels
from warpfit_server.engine.cpu.codegen.dot_products import DOT_SHAPES, dots_kernel
from warpfit_server.engine.cpu.codegen.vector import Trace, Vector

#: Name of the kernel that multiplies adjoint and partial derivative.
PRODUCT: Final = "product"


def build(flavour: kernels.Flavour) -> bytes:
    """Compile the kernels of operators and losses; return an object file."""
    module = ir.Module(flavour.name)
    for name, row in OPERATORS.items():
        kernels.operator_kernel(
            module, name, row.arity, flavour, kernels.compile_kernel(row.cpu or row.kernel, flavour)
        )
    kernels.operator_kernel(module, kernels.COPY, 1, flavour, kernels.compile_kernel("a", flavour))
    for name in kernels.LOSS_KERNELS:
        kernels.loss_kernel(module, name, flavour)
    return _compile(module)


def build_derivatives(flavour: kernels.Flavour) -> bytes:
    """Compile the kernels that derivatives take beside these; return an object file."""
    module = ir.Module(f"{flavour.name}-derivatives")
    kernels.operator_kernel(module, PRODUCT, 2, flavour, lambda _, operands: _product(*operands))
    for partial in partial_kernels():
        arity = partial.arity + partial.scaled
        kernels.operator_kernel(
            module, partial.name, arity, flavour, _partial_body(partial, flavour)
        )
    for shape in DOT_SHAPES:
        dots_kernel(module, shape, flavour)
    return _compile(module)


def _partial_body(partial: PartialKernel, flavour: kernels.Flavour) -> kernels.Body:
    """Return the code of a partial derivative, alone or times an adjoint.

    It computes in the data's type even where the operator itself takes more digits: errors of
    derivatives do not build up as those of values do.
    """
    compute = kernels.compile_kernel(partial.source, flavour, widens=False)
    if not partial.scaled:
        return compute

    def scaled(trace: Trace, operands: Sequence[Vector]) -> Vector:
        return _product(operands[0], compute(trace, operands[1:]))

    return scaled


def _product(adjoint: Vector, partial: Vector) -> Vector:
    """Multiply two factors of the chain rule: 0 if one of them is."""
    passes = (adjoint != 0) & (partial != 0)
    return adjoint.trace.select(passes, adjoint * partial, 0.0)


def _compile(module: ir.Module) -> bytes:
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
