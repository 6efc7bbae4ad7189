"""Runs the transpiler's templates in NumPy: straight-line PTX on arrays of bits.

Multiply-adds are rounded once; approximate functions are off by as much as the hardware may be.
"""

import operator
import re
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warpfit_server.engine.cuda.jit.device_library import DeviceLibrary
from warpfit_server.engine.cuda.jit.instructions import Template

Array = NDArray[Any]
_TYPES = {
    "f32": np.float32, "f64": np.float64, "s32": np.int32, "u32": np.uint32, "b32": np.uint32,
    "s64": np.int64, "u64": np.uint64, "b64": np.uint64, "pred": np.bool_,
}  # fmt: skip
_BITS = {4: np.uint32, 8: np.uint64, 1: np.bool_}
_COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "eq": operator.eq, "ne": operator.ne, "neu": operator.ne,
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "geu": lambda a, b: ~(a < b), "ltu": lambda a, b: ~(a >= b),
    "gtu": lambda a, b: ~(a <= b), "leu": lambda a, b: ~(a > b),
}  # fmt: skip
_BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "and": operator.and_,
    "or": operator.or_, "xor": operator.xor, "shr": operator.rshift, "shl": operator.lshift,
    "min": np.fmin,
}  # fmt: skip


class TemplateMachine:
    """Evaluates templates of one library on arrays of operands."""

    def __init__(self, library: DeviceLibrary) -> None:
        self._library = library
        self._data = {name: _table(text) for name, text in library.data.items()}

    def run(self, code: int, *operands: Array) -> Array:
        """Result of an operator for arrays of the library's data type."""
        template: Template = self._library.templates[code, 0]
        values = [_bits(operand) for operand in operands]
        with np.errstate(all="ignore"):
            for instruction in template.instructions:
                sources = [values[index] for index in instruction.sources]
                values.append(self._step(instruction.text, sources, len(operands[0])))
        return values[template.result].view(operands[0].dtype)

    def _step(self, text: str, sources: list[Array], count: int) -> Array:
        names: dict[str, Array] = {}
        for index, source in enumerate(sources):
            names[f"%{index}"] = source
        numbers = iter(range(-1, len(sources)))
        text = re.sub(r"%s", lambda _: f"%{next(numbers)}", text)
        for statement in text.strip("{} ").split(";"):
            opcode, _, rest = statement.strip().partition(" ")
            if opcode and opcode != ".reg":
                target = self._execute(opcode, rest, names, count)
        return names[target]

    def _execute(self, opcode: str, rest: str, names: dict[str, Array], count: int) -> str:
        if opcode == "mov.b64" and "{" in rest:
            return _move_pair(rest, names, count)
        target, *operands = rest.split(", ")
        kind = opcode.rsplit(".", 1)[1]
        if opcode.startswith("ld.const"):
            name, _, offset = operands[0].strip("[]").partition("+")
            names[target] = np.full(count, self._data[name][int(offset or 0) // 8])
        elif opcode.startswith("ld.global"):
            register, _, offset = operands[0].strip("[]").partition("+")
            places = (names[register].view(np.int64) + int(offset)) // 8
            names[target] = self._data["wf_logarithms"][places]
        elif operands[0] in self._data:
            names[target] = np.zeros(count, dtype=np.uint64)
        else:
            kinds = ["pred" if x in names and names[x].dtype == bool else kind for x in operands]
            if opcode.startswith("cvt"):
                kinds = [kind]
            if opcode.split(".")[0] in ("shl", "shr"):
                kinds[1] = "u32"
            values = [_operand(x, k, names, count) for x, k in zip(operands, kinds, strict=True)]
            names[target] = _bits(_compute(opcode, values))
        return target


def _table(declaration: str) -> NDArray[np.uint64]:
    numbers = declaration[declaration.index("{") + 1 : declaration.index("}")]
    return np.frombuffer(bytes(int(n) for n in numbers.split(", ")), dtype=np.uint64)


def _bits(values: Array) -> Array:
    return np.ascontiguousarray(values).view(_BITS[values.dtype.itemsize])


def _operand(text: str, kind: str, names: Mapping[str, Array], count: int) -> Array:
    dtype = _TYPES[kind]
    if text in names:
        return names[text].view(dtype)
    if text.startswith("0f"):
        return np.full(count, struct.unpack(">f", bytes.fromhex(text[2:]))[0], dtype=np.float32)
    if text.startswith("0d"):
        wide = struct.unpack(">d", bytes.fromhex(text[2:]))[0]
        return np.full(count, wide, dtype=np.float64).view(dtype)
    width = 8 * np.dtype(dtype).itemsize
    return np.full(count, int(text, 0) % 2**width, dtype=f"u{width // 8}").view(dtype)


def _move_pair(rest: str, names: dict[str, Array], count: int) -> str:
    if rest.startswith("{"):
        pair, source = rest[1:].split("}, ")
        halves = names[source].view(np.uint32).reshape(count, 2)
        place, target = next((i, n) for i, n in enumerate(pair.split(", ")) if n != "_")
        names[target] = np.ascontiguousarray(halves[:, place])
        return target
    target, pair = rest.rstrip("}").split(", {")
    parts = [_operand(part, "b32", names, count) for part in pair.split(", ")]
    names[target] = np.stack(parts, axis=1).view(np.uint64).ravel()
    return target


def _compute(opcode: str, values: list[Array]) -> Array:
    name, *modifiers = opcode.split(".")
    kind = _TYPES[modifiers[-1]]
    if name == "setp":
        return _COMPARE[modifiers[0]](values[0], values[1])
    if name == "selp":
        return np.where(values[2], values[0], values[1])
    if opcode == "mul.wide.s32":
        return values[0].astype(np.int64) * values[1]
    if name in ("mul", "fma") and issubclass(kind, np.floating):
        return _rounded(values, modifiers[0])
    if name in _BINARY:
        return _BINARY[name](values[0], values[1]).astype(kind)
    return _unary(opcode, values[0])


def _unary(opcode: str, value: Array) -> Array:
    name, *modifiers = opcode.split(".")
    if name == "abs":
        return np.abs(value)
    if name in ("neg", "not"):
        return -value if name == "neg" else ~value
    if opcode.startswith("cvt.sat"):
        return np.where(np.isnan(value), 0, np.clip(value, 0, 1)).astype(value.dtype)
    if opcode.startswith("cvt.rni"):
        return np.rint(value)
    if opcode == "cvt.rzi.s32.f32":  # saturates; NaN becomes 0
        whole = np.clip(np.trunc(value.astype(np.float64)), -(2**31), 2**31 - 1)
        return np.nan_to_num(whole).astype(np.int32)
    if opcode.startswith("cvt.rn."):
        return value.astype(_TYPES[modifiers[1]])
    if "approx" in modifiers:
        return _approximate(name, value)
    raise ValueError(f"the machine knows no {opcode}")


def _approximate(name: str, value: Array) -> Array:
    """Hardware's function of float32, 1 ulp off; of float64, right to 20 bits; no subnormals."""
    exact = {
        "rcp": lambda x: 1 / x,
        "rsqrt": lambda x: 1 / np.sqrt(x),
        "sqrt": np.sqrt,
        "lg2": np.log2,
        "ex2": np.exp2,
    }[name]
    limit = np.finfo(value.dtype).tiny
    value = np.where(np.abs(value) < limit, np.copysign(0, value), value)
    result = exact(value.astype(np.longdouble)).astype(value.dtype)
    if value.dtype == np.float64:
        result = (result.view(np.uint64) & np.uint64(0xFFFFFFFF00000000)).view(np.float64)
    else:
        off = np.nextafter(result, np.where(value.view(np.uint32) & 1, np.inf, 0), dtype=np.float32)
        exactly = (np.frexp(value)[0] == 0.5) | (np.rint(value) == value) | ~np.isfinite(result)
        result = np.where(exactly, result, off)
    return np.where(np.abs(result) < limit, np.copysign(0, result), result)


def _rounded(values: list[Array], rounding: str) -> Array:
    """Product, or product plus addend, rounded once (but for what is lost beyond 64 bits)."""
    dtype = values[0].dtype
    a, b, *addend = (value.astype(np.longdouble) for value in values)
    total = a * b
    rest = np.zeros_like(total) if dtype == np.float32 else _product_error(a, b, total)
    for c in addend:
        product, total = total, total + c
        part = total - product
        rest = rest + ((product - (total - part)) + (c - part))
    exact = np.where(np.isfinite(rest) & (rest != 0), total + rest, total)
    nearest = exact.astype(dtype)
    if rounding == "rn":
        return nearest
    beyond = nearest > exact if rounding == "rm" else np.abs(nearest) > np.abs(exact)
    towards = dtype.type(-np.inf) if rounding == "rm" else dtype.type(0)
    return np.where(beyond, np.nextafter(nearest, towards, dtype=dtype), nearest)


def _product_error(a: Array, b: Array, product: Array) -> Array:
    """What a product in extended precision lost (Dekker)."""

    def split(x: Array) -> tuple[Array, Array]:
        big = np.longdouble(2**32 + 1) * x
        high = big - (big - x)
        return high, x - high

    (ah, al), (bh, bl) = split(a), split(b)
    return ((ah * bh - product) + ah * bl + al * bh) + al * bl
