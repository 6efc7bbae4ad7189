"""Compiled kernels of fast mode in NumPy: straight-line PTX, run on all rows at once."""

import functools
import re
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_COMPARISONS: Final = MappingProxyType(
    {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
    | {"eq": np.equal, "ne": np.not_equal}
)
_BITS: Final = MappingProxyType(
    {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert}
    | {"shl": np.left_shift, "shr": np.right_shift, "add": np.add, "sub": np.subtract}
)
_FLOATS: Final = MappingProxyType(
    {
        **{"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide},
        **{"neg": np.negative, "abs": np.abs, "sqrt": np.sqrt, "sin": np.sin, "cos": np.cos},
        **{"lg2": np.log2, "ex2": np.exp2, "tanh": np.tanh, "min": np.minimum, "max": np.maximum},
        "rcp": np.reciprocal,
        "copysign": lambda sign, size: np.copysign(size, sign),
        "rsqrt": lambda a: 1 / np.sqrt(a),
        "fma": lambda a, b, c: (a.astype(float) * b + c).astype(np.float32),
    }
)
#: Register of a value, of which the first predicate guards the rows in the range.
_VALUE: Final = re.compile(r"(?!%pa0$)%[rp][ai]\d+")


def run_kernel(text, inputs, columns):
    """Run a kernel of fast mode that takes one row a thread.

    Args:
        text: of the module; no function is called.
        inputs: of one parameter vector.
        columns: rows of the variables that the kernel reads, in ascending order, then of the
            target and of the weights if it reads them.

    Returns:
        The sums over the rows, and the stored values.
    """
    registers: dict[str, Any] = {}
    sums: list[float] = []
    values: list[NDArray[np.float32]] = []
    left, rows = iter(columns), len(columns[0])
    text = re.sub(r"^\w+:\n", "", text[text.index("{\n") :], flags=re.MULTILINE)
    for line in text[: text.index("mov.u32 %lane")].split(";\n"):
        opcode, _, rest = line.strip().partition(" ")
        target, *operands = rest.split(", ")
        if opcode.startswith("@%pa"):
            name, *operands = rest.split(" ", 1)[1].split(", ")
            if rest.startswith("st.global"):
                values.append(_floats(registers[operands[0]]))
            else:  # an accumulator is the first and the last operand of a sum
                terms = [_floats(registers[one]).astype(float) for one in operands if one != name]
                sums.append(np.broadcast_to(functools.reduce(np.multiply, terms), rows).sum())
        elif opcode.startswith("ld.global.nc.b32"):
            slot = re.fullmatch(r"\[%slots\+(\d+)\]", operands[0])
            registers[target] = inputs[int(slot[1]) // 4] if slot else next(left)
        elif _VALUE.fullmatch(target) and not opcode.startswith("ld.") and "%flag" not in rest:
            found = [_operand(one, registers) for one in operands]
            with np.errstate(all="ignore"):
                registers[target] = _function(opcode)(*found)
    return sums, values


def _operand(text: str, registers: dict[str, Any]) -> Any:
    if text in registers:
        return registers[text]
    if text.startswith("0f"):
        return np.uint32(int(text[2:], 16)).view(np.float32)
    return np.uint32(int(text, 0) & 0xFFFFFFFF)


def _function(opcode: str) -> Callable[..., Any]:
    """Return what an instruction computes of its operands."""
    name, *parts = opcode.split(".")
    kind = parts[-1]
    if name == "mov":
        return np.asarray
    if name == "selp":
        return lambda a, b, where: np.where(where, _words(a), _words(b)).view(np.float32)
    if name == "setp":
        view = _floats if kind == "f32" else _words
        comparison = _COMPARISONS[parts[0][:2]]
        if len(parts[0]) == 3:  # true if an operand is NaN
            return lambda a, b: comparison(view(a), view(b)) | np.isnan(view(a) + view(b))
        return lambda a, b: comparison(view(a), view(b))
    if kind == "pred":
        return _BITS[name]
    if kind == "f32":
        return lambda *operands: _FLOATS[name](*map(_floats, operands)).astype(np.float32)
    return lambda *operands: _BITS[name](*map(_words, operands)).astype(np.uint32)


def _floats(value: Any) -> Any:
    value = np.asarray(value)
    return value.view(np.float32) if value.dtype != np.float32 else value


def _words(value: Any) -> Any:
    value = np.asarray(value)
    return value.view(np.uint32) if value.dtype != np.uint32 else value
