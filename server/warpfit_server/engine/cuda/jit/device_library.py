"""The device library: every operator as PTX, which NVRTC compiles from the operator table."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from warpfit.ops import OPERATORS
from warpfit_server.engine.autodiff.rules import PRODUCT_CODE, partial_kernels
from warpfit_server.engine.cuda.derivatives.source import partial_source
from warpfit_server.engine.cuda.jit.instructions import (
    NotInlinableError,
    Template,
    call,
    functions,
    inline,
)
from warpfit_server.engine.cuda.jit.shapes import EXPONENT_BIAS, POWER_DERIVATIVES, POWERS
from warpfit_server.engine.cuda.math.modes import Mode
from warpfit_server.engine.cuda.math.prelude import operator_source, prelude, render
from warpfit_server.engine.cuda.runtime import nvrtc

#: Functions of fast mode that only compiled kernels use.
#:
#: ``pow_by_masks`` has the bounds of the prelude's ``fast_pow``. Everything but two bitwise
#: instructions, the logarithm, the product and the exponential depends on the exponent alone.
#: For a whole exponent the sign of ``a`` is masked out of the logarithm and, if it is odd, into the
#: result; for another one it stays, and the logarithm of a negative number is NaN. A zero exponent
#: takes the logarithm of 1.
#:
#: ``exp2_polynomial`` needs no special-function unit (16 results a clock and multiprocessor; other
#: arithmetic has 128): a kernel that computes some exponentials by the polynomial and the others by
#: the unit is faster than one that uses either alone (an idea of FlashAttention-4). It rounds to a
#: whole number plus a remainder in [-1/2, 1/2], for which it has a minimax polynomial; the relative
#: error is below 1.7e-7, and 0, inf and NaN are as the unit gives them.
_HELPERS: Final = r"""
__device__ __forceinline__ float pow_by_masks(float a, float b) {
  float shifted = __fadd_rn(b, 12582912.0f);
  bool whole = __fsub_rn(shifted, 12582912.0f) == b;
  unsigned keep = b == 0.0f ? 0u : whole ? 0x7fffffffu : 0xffffffffu;
  unsigned one = b == 0.0f ? 0x3f800000u : 0u;
  unsigned sign = whole ? (unsigned)__float_as_int(shifted) << 31 : 0u;
  unsigned bits = (unsigned)__float_as_int(a);
  float magnitude = fast_exp2(b * fast_log2(__int_as_float((int)((bits & keep) | one))));
  return __int_as_float((int)((unsigned)__float_as_int(magnitude) | (bits & sign)));
}

#if __CUDA_ARCH__ >= 800
extern "C" __device__ __noinline__ float wf_exp2_polynomial(float a) {
  float x;
  asm("max.NaN.ftz.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(-127.0f));
  asm("min.NaN.ftz.f32 %0, %1, %2;" : "=f"(x) : "f"(x), "f"(128.0f));
  float shifted = __fadd_rn(x, 12582912.0f);
  float rest = __fsub_rn(x, __fsub_rn(shifted, 12582912.0f));
  float p = __fmaf_rn(0.00132647f, rest, 0.00967151f);
  p = __fmaf_rn(p, rest, 0.05550734f);
  p = __fmaf_rn(p, rest, 0.24022242f);
  p = __fmaf_rn(p, rest, 0.69314698f);
  p = __fmaf_rn(p, rest, 1.0f);
  return p * __int_as_float((__float_as_int(shifted) << 23) + 0x3f800000);
}
#endif
"""
#: Most registers of a called function, by type: those of a thread in the largest blocks, of 1024
#: threads in float32 and 512 in float64.
_REGISTERS: Final = MappingProxyType({"f32": 64, "f64": 128})
#: Code of the templates of derivatives of powers with literal exponents.
POWER_DERIVATIVE: Final = -1
_EXP2_POLYNOMIAL: Final = "wf_exp2_polynomial"
_DATA: Final = re.compile(
    r"^(?:\.visible )?(\.(?:const|global) \.align \d+ \.b8 (wf_\w+)\[\d+\] = \{[^}]*\};)",
    re.MULTILINE,
)
_VERSION: Final = re.compile(r"^\.version .*$", re.MULTILINE)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceLibrary:
    """Operators as PTX for one mode and architecture, for the transpiler and the linker."""

    mode: Mode
    architecture: int
    """Compute capability, 90 for 9.0."""
    version_line: str
    """PTX ``.version`` directive of the compiler that made the templates."""
    templates: Mapping[tuple[int, int], Template]
    """Templates by operator code and token operand: 0, or an exponent plus `EXPONENT_BIAS`."""
    exp2_polynomial: Template | None
    """2^x without the special-function unit, for fast mode where the architecture allows it."""
    data: Mapping[str, str]
    """Declarations of the constants and tables that templates read, by name."""
    functions: bytes
    """Relocatable machine code of the functions that templates call; empty if none does."""
    key: bytes
    """Hash of the above, part of the key of every kernel."""


#: Name, operands and body of a function, in CUDA C++.
_Function = tuple[str, str, str]


@functools.cache
def build(mode: Mode, architecture: int, *, derivatives: bool) -> DeviceLibrary:
    """Compile the operator table, optionally with the derivatives of operators; takes 0.3 s.

    It is compiled once, or once by each of several threads that begin at the same time.
    """
    options = ("-rdc=true", *mode.compiler_options)
    names = _operator_functions(mode) | (_rule_functions(mode) if derivatives else {})
    sources = {function[0]: _source(mode, *function) for function in names.values()}
    start = prelude(mode)
    helpers = _HELPERS if mode is Mode.FAST else ""
    ptx = nvrtc.to_ptx("\n".join([start, helpers, *sources.values()]), architecture, options)
    found = functions(ptx)
    templates, called = {}, []
    for key, (name, _, _) in names.items():
        arity, body = found[name]
        try:
            templates[key] = inline(arity, body)
        except NotInlinableError:
            templates[key] = call(arity, name, mode.kind)
            called.append(sources[name])
    version = _VERSION.search(ptx)
    bound = f"--maxrregcount={_REGISTERS[mode.type_name]}"
    return DeviceLibrary(
        mode=mode,
        architecture=architecture,
        version_line=version[0] if version else "",
        templates=templates,
        exp2_polynomial=(inline(*found[_EXP2_POLYNOMIAL]) if _EXP2_POLYNOMIAL in found else None),
        data={name: text for text, name in _DATA.findall(ptx)},
        functions=(
            nvrtc.to_cubin("\n".join([start, *called]), architecture, (*options, bound))
            if called
            else b""
        ),
        key=hashlib.blake2b(f"{mode} {architecture}\n{ptx}".encode(), digest_size=16).digest(),
    )


def _operator_functions(mode: Mode) -> dict[tuple[int, int], _Function]:
    """Return the function of each operator, and of powers with literal exponents, by template."""
    found = {}
    for op in OPERATORS.values():
        body = operator_source(op, mode)
        if mode is Mode.FAST and op.cuda_fast_compiled:
            body = render(op.cuda_fast_compiled, "float")
        found[op.code, 0] = (f"wf_{op.name}", op.operands, body)
    pow_code = OPERATORS["pow"].code
    for power, text in POWERS.items():
        operand = power + EXPONENT_BIAS
        found[pow_code, operand] = (f"wf_power_{operand}", "a", render(text, mode.real))
    return found


def _rule_functions(mode: Mode) -> dict[tuple[int, int], _Function]:
    """Return the function of each derivative, and of the chain rule's product, by template."""
    found = {(PRODUCT_CODE, 0): ("wf_product", "ab", "product(a, b)")}
    for power, text in POWER_DERIVATIVES.items():
        operand = power + EXPONENT_BIAS
        body = partial_source(text, mode)
        found[POWER_DERIVATIVE, operand] = (f"wf_power_slope_{operand}", "a", body)
    for kernel in partial_kernels():
        body, operands = partial_source(kernel.source, mode), "abc"[: kernel.arity]
        if kernel.scaled:
            body, operands = f"product(s, {body})", "s" + operands
        found[kernel.code, 0] = (f"wf_{kernel.name}", operands, body)
    return found


def _source(mode: Mode, name: str, operands: str, body: str) -> str:
    parameters = ", ".join(f"{mode.real} {operand}" for operand in operands)
    return (
        f'extern "C" __device__ __noinline__ {mode.real} {name}({parameters}) {{ return {body}; }}'
    )
