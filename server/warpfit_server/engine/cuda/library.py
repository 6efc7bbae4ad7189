"""The device library: every operator as PTX, generated from the operator table by NVRTC."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

import numpy as np

from warpfit.ops import OPERATORS
from warpfit.request import Precision
from warpfit_server.engine.cuda import nvrtc
from warpfit_server.engine.cuda.instructions import (
    NotInlinableError,
    Template,
    call,
    functions,
    inline,
)
from warpfit_server.engine.cuda.prelude import PRELUDE, compiler_options, operator_source, render
from warpfit_server.engine.cuda.shapes import EXPONENT_BIAS, POWERS

_VERSION: Final = re.compile(r"^\.version .*$", re.MULTILINE)


class Mode(Enum):
    """How a kernel computes: data type and precision."""

    PRECISE = ("f32", Precision.PRECISE, np.dtype(np.float32))
    FAST = ("f32", Precision.FAST, np.dtype(np.float32))
    DOUBLE = ("f64", Precision.PRECISE, np.dtype(np.float64))

    def __init__(self, type_name: str, precision: Precision, dtype: np.dtype[np.floating]) -> None:
        self.type_name = type_name
        """PTX type of the values."""
        self.precision = precision
        self.dtype = dtype

    @classmethod
    def of(cls, dtype: np.dtype[np.floating], precision: Precision) -> Mode:
        """Mode for data of ``dtype``; float64 is always precise."""
        if dtype == np.float64:
            return cls.DOUBLE
        return cls.FAST if precision is Precision.FAST else cls.PRECISE

    @property
    def kind(self) -> str:
        """Register class of a value."""
        return "d" if self is Mode.DOUBLE else "r"


@dataclass(frozen=True, slots=True, eq=False)
class DeviceLibrary:
    """Everything that PTX generation and linking need for one mode and architecture."""

    mode: Mode
    architecture: int
    """Compute capability, 90 for 9.0."""
    version_line: str
    """PTX ``.version`` directive of the compiler that made the templates."""
    templates: Mapping[tuple[int, int], Template]
    """By operator code and token operand (0, or a literal exponent plus `EXPONENT_BIAS`)."""
    functions: bytes
    """Relocatable machine code of the functions that templates call; empty if none does."""
    key: bytes
    """Hash of the above, part of the key of every kernel."""


def build(mode: Mode, architecture: int) -> DeviceLibrary:
    """Compile the operator table; about 0.3 s."""
    options = ("-rdc=true", *compiler_options(mode.dtype, mode.precision))
    ptx = nvrtc.to_ptx(PRELUDE + "\n".join(_sources(mode).values()), architecture, options)
    found = functions(ptx)
    templates, called = {}, []
    for (code, operand), name in _names().items():
        arity, body = found[name]
        try:
            templates[code, operand] = inline(arity, body)
        except NotInlinableError:
            templates[code, operand] = call(arity, name, mode.kind)
            called.append(name)
    version = _VERSION.search(ptx)
    return DeviceLibrary(
        mode=mode,
        architecture=architecture,
        version_line=version[0] if version else "",
        templates=templates,
        functions=_functions_cubin(mode, architecture, called, options),
        key=hashlib.blake2b(f"{mode} {architecture}\n{ptx}".encode(), digest_size=16).digest(),
    )


def _functions_cubin(
    mode: Mode, architecture: int, called: list[str], options: tuple[str, ...]
) -> bytes:
    if not called:
        return b""
    sources = _sources(mode)
    source = PRELUDE + "\n".join(sources[name] for name in called)
    return nvrtc.to_cubin(source, architecture, options)


def _names() -> dict[tuple[int, int], str]:
    """Name of the function behind each template."""
    names = {(op.code, 0): f"wf_{op.name}" for op in OPERATORS.values()}
    pow_code = OPERATORS["pow"].code
    names |= {
        (pow_code, power + EXPONENT_BIAS): f"wf_power_{power + EXPONENT_BIAS}" for power in POWERS
    }
    return names


def _sources(mode: Mode) -> dict[str, str]:
    """CUDA C++ function for each name."""
    real = "double" if mode is Mode.DOUBLE else "float"
    bodies = {
        f"wf_{op.name}": (op.operands, operator_source(op, mode.dtype, mode.precision))
        for op in OPERATORS.values()
    }
    bodies |= {
        f"wf_power_{power + EXPONENT_BIAS}": ("a", render(text, real))
        for power, text in POWERS.items()
    }
    return {
        name: (
            f'extern "C" __device__ __noinline__ {real} {name}('
            f"{', '.join(f'{real} {operand}' for operand in operands)}) {{ return {body}; }}"
        )
        for name, (operands, body) in bodies.items()
    }
