"""Vectors of LLVM values with Python's operators: how kernels and functions are written.

A kernel such as ``"a * exp(b)"`` is evaluated by Python itself, with `Vector` objects for ``a`` and
``b``. Every operator that Python meets appends one LLVM instruction to the function that the
`Trace` is building, so a kernel written for one number becomes code for 64 bytes of them:

    trace = Trace(builder, ir.FloatType(), lanes=16)
    trace.vector(loaded) * 2.0 + 1.0        # one fmul and one fadd on <16 x float>

A Python number beside a vector takes the vector's type. Comparisons give masks for
`Trace.select`. Nothing here knows about operators or functions of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from llvmlite import ir

Number = int | float
Vectors = tuple["Vector", ...]
#: Bits of mantissa stored, and of the exponent's bias, by size of the type in bits.
MANTISSA: Final = {32: 23, 64: 52}
BIAS: Final = {32: 127, 64: 1023}
INTEGER: Final = {32: ir.IntType(32), 64: ir.IntType(64)}


class Trace:
    """The function being built, and the element type of the data in it."""

    def __init__(
        self, builder: ir.IRBuilder, real: ir.Type, lanes: int, *, contract: bool = False
    ) -> None:
        """Append to ``builder``; ``contract`` lets a product and a sum round once."""
        self.builder = builder
        self.real = real
        self.lanes = lanes
        self.flags = ("contract",) if contract else ()

    @property
    def is_single(self) -> bool:
        """Whether the data is float32."""
        return bool(self.real == ir.FloatType())

    def vector(self, value: Any) -> Vector:
        """Wrap an LLVM vector value."""
        return Vector(self, value)

    def constant(self, number: Number, element: ir.Type | None = None) -> Vector:
        """Make a vector with the same number in every lane, of the data's type by default."""
        kind = self.real if element is None else element
        cast = int if isinstance(kind, ir.IntType) else float
        vector = ir.VectorType(kind, self.lanes)
        return self.vector(ir.Constant(vector, [cast(number)] * self.lanes))

    def select(self, mask: Vector, x: Vector | Number, y: Vector | Number) -> Vector:
        """Take x where the mask holds, else y; two numbers give the mask's operands' type."""
        model = next((v for v in (x, y) if isinstance(v, Vector)), None)
        element = mask.compared if model is None else model.element
        first, second = (v if isinstance(v, Vector) else self.constant(v, element) for v in (x, y))
        return self.vector(self.builder.select(mask.value, first.value, second.value))

    def intrinsic(self, name: str, *operands: Vector) -> Vector:
        """Call the LLVM intrinsic ``llvm.name`` lane by lane."""
        kind = operands[0].value.type
        size = "f32" if operands[0].element == ir.FloatType() else "f64"
        function = self._declare(
            f"llvm.{name}.v{self.lanes}{size}", ir.FunctionType(kind, [kind] * len(operands))
        )
        return self.vector(self.builder.call(function, [v.value for v in operands]))

    def call(self, name: str, *operands: Vector) -> Vector:
        """Call a C library function on doubles for one lane after the other."""
        double = ir.DoubleType()
        function = self._declare(name, ir.FunctionType(double, [double] * len(operands)))
        kind = operands[0].value.type
        places = [self._stack(kind) for _ in (*operands, None)]
        for place, operand in zip(places, operands, strict=False):
            self.builder.store(operand.value, place)

        arrays = [self.builder.bitcast(place, double.as_pointer()) for place in places]

        def lane(index: Any) -> None:
            cells = [self.builder.gep(array, [index]) for array in arrays]
            scalars = [self.builder.load(cell) for cell in cells[:-1]]
            self.builder.store(self.builder.call(function, scalars), cells[-1])

        self._lanes(lane)
        return self.vector(self.builder.load(places[-1]))

    def each_lane(
        self, function: ir.Function, operand: Vector, kinds: Sequence[ir.Type]
    ) -> Vectors:
        """Call ``void (double, pointers to results)`` for one lane after the other.

        Args:
            function: of the module being built.
            operand: float64.
            kinds: element type of each result.

        """
        double, builder = ir.DoubleType(), self.builder
        source = self._stack(operand.value.type)
        builder.store(operand.value, source)
        places = [self._stack(ir.VectorType(kind, self.lanes)) for kind in kinds]
        arrays = [
            builder.bitcast(place, kind.as_pointer())
            for place, kind in zip((source, *places), (double, *kinds), strict=True)
        ]

        def lane(index: Any) -> None:
            cells = [builder.gep(array, [index]) for array in arrays]
            builder.call(function, [builder.load(cells[0]), *cells[1:]])

        self._lanes(lane)
        return tuple(self.vector(builder.load(place)) for place in places)

    def repair(self, results: Vectors, bad: Vector, correct: Callable[[], Vectors]) -> Vectors:
        """Replace results in bad lanes by the correct ones; a branch skips it if none is bad."""
        builder = self.builder
        places = [self._stack(result.value.type) for result in results]
        for place, result in zip(places, results, strict=True):
            builder.store(result.value, place)
        bits = builder.bitcast(bad.value, ir.IntType(self.lanes))
        with builder.if_then(builder.icmp_signed("!=", bits, ir.Constant(bits.type, 0)), False):
            for place, right, result in zip(places, correct(), results, strict=True):
                builder.store(self.select(bad, right, result).value, place)
        return tuple(self.vector(builder.load(place)) for place in places)

    def _declare(self, name: str, kind: ir.FunctionType) -> ir.Function:
        known = self.builder.module.globals.get(name)
        if known is not None:
            return known
        function = ir.Function(self.builder.module, kind, name)
        function.attributes.add("nounwind")
        return function

    def _stack(self, kind: ir.Type) -> Any:
        with self.builder.goto_entry_block():
            place = self.builder.alloca(kind)
        place.align = 64
        return place

    def _lanes(self, body: Callable[[Any], None]) -> None:
        builder = self.builder
        before, loop, after = builder.block, *(builder.append_basic_block() for _ in range(2))
        builder.branch(loop)
        builder.position_at_end(loop)
        index = builder.phi(INTEGER[64])
        index.add_incoming(_index(0), before)
        body(index)
        following = builder.add(index, _index(1))
        index.add_incoming(following, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, _index(self.lanes)), loop, after)
        builder.position_at_end(after)


class Vector:
    """One LLVM vector: floats, integers, or a mask."""

    __slots__ = ("compared", "trace", "value")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, trace: Trace, value: Any, compared: ir.Type | None = None) -> None:
        """Wrap ``value``; a mask remembers the element type that was ``compared``."""
        self.trace = trace
        self.value = value
        self.compared = compared

    @property
    def element(self) -> ir.Type:
        """Type of one lane."""
        return self.value.type.element

    @property
    def size(self) -> int:
        """Bits of one lane."""
        widths = {ir.FloatType(): 32, ir.DoubleType(): 64}
        return int(widths.get(self.element) or self.element.width)

    def _operand(self, other: Vector | Number) -> Any:
        if isinstance(other, Vector):
            return other.value
        return self.trace.constant(other, self.element).value

    def _combine(self, name: str, other: Vector | Number, *, swap: bool = False) -> Vector:
        pair = (self.value, self._operand(other))
        left, right = pair[::-1] if swap else pair
        builder = self.trace.builder
        if isinstance(self.element, ir.IntType):
            return self.trace.vector(getattr(builder, name)(left, right))
        return self.trace.vector(getattr(builder, "f" + name)(left, right, flags=self.trace.flags))

    def __add__(self, other: Vector | Number) -> Vector:
        return self._combine("add", other)

    __radd__ = __add__

    def __sub__(self, other: Vector | Number) -> Vector:
        return self._combine("sub", other)

    def __rsub__(self, other: Number) -> Vector:
        return self._combine("sub", other, swap=True)

    def __mul__(self, other: Vector | Number) -> Vector:
        return self._combine("mul", other)

    __rmul__ = __mul__

    def __truediv__(self, other: Vector | Number) -> Vector:
        return self._combine("div", other)

    def __rtruediv__(self, other: Number) -> Vector:
        return self._combine("div", other, swap=True)

    def __neg__(self) -> Vector:
        return self.trace.vector(self.trace.builder.fneg(self.value))

    def __lshift__(self, bits: int) -> Vector:
        return self._bitwise("shl", bits)

    def __rshift__(self, bits: int) -> Vector:
        return self._bitwise("ashr", bits)

    def __and__(self, other: Vector | int) -> Vector:
        return self._bitwise("and_", other)

    def __or__(self, other: Vector | int) -> Vector:
        return self._bitwise("or_", other)

    def __xor__(self, other: Vector | int) -> Vector:
        return self._bitwise("xor", other)

    def _bitwise(self, name: str, other: Vector | int) -> Vector:
        result = getattr(self.trace.builder, name)(self.value, self._operand(other))
        return Vector(self.trace, result, self.compared)

    def _compare(self, symbol: str, other: Vector | Number) -> Vector:
        builder, right = self.trace.builder, self._operand(other)
        if isinstance(self.element, ir.IntType):
            return Vector(self.trace, builder.icmp_signed(symbol, self.value, right), self.element)
        compare = builder.fcmp_unordered if symbol == "!=" else builder.fcmp_ordered
        return Vector(self.trace, compare(symbol, self.value, right), self.element)

    def __lt__(self, other: Vector | Number) -> Vector:
        return self._compare("<", other)

    def __le__(self, other: Vector | Number) -> Vector:
        return self._compare("<=", other)

    def __gt__(self, other: Vector | Number) -> Vector:
        return self._compare(">", other)

    def __ge__(self, other: Vector | Number) -> Vector:
        return self._compare(">=", other)

    def __eq__(self, other: object) -> Vector:  # type: ignore[override]
        return self._compare("==", other)  # type: ignore[arg-type]

    def __ne__(self, other: object) -> Vector:  # type: ignore[override]
        return self._compare("!=", other)  # type: ignore[arg-type]

    def fma(self, factor: Vector | Number, addend: Vector | Number) -> Vector:
        """``self * factor + addend``, rounded once."""
        operands = [
            v if isinstance(v, Vector) else self.trace.constant(v, self.element)
            for v in (factor, addend)
        ]
        return self.trace.intrinsic("fma", self, *operands)

    def bits(self) -> Vector:
        """The same bits as integers."""
        return self._cast(INTEGER[self.size])

    def real(self) -> Vector:
        """The bits of integers as floats of the same size."""
        return self._cast(ir.FloatType() if self.size == 32 else ir.DoubleType())

    def _cast(self, element: ir.Type) -> Vector:
        kind = ir.VectorType(element, self.trace.lanes)
        return self.trace.vector(self.trace.builder.bitcast(self.value, kind))

    def to_real(self) -> Vector:
        """Convert integers to floats of the same size."""
        element = ir.FloatType() if self.size == 32 else ir.DoubleType()
        kind = ir.VectorType(element, self.trace.lanes)
        return self.trace.vector(self.trace.builder.sitofp(self.value, kind))

    def widen(self) -> Vector:
        """Convert float32 to float64; float64 stays."""
        if self.size == 64:
            return self
        kind = ir.VectorType(ir.DoubleType(), self.trace.lanes)
        return self.trace.vector(self.trace.builder.fpext(self.value, kind))

    def narrow(self) -> Vector:
        """Round float64 to the data's type."""
        if self.element == self.trace.real:
            return self
        kind = ir.VectorType(self.trace.real, self.trace.lanes)
        return self.trace.vector(self.trace.builder.fptrunc(self.value, kind))


def absolute(x: Vector) -> Vector:
    """Clear the sign bit."""
    return x.trace.intrinsic("fabs", x)


def nearest(x: Vector) -> tuple[Vector, Vector]:
    """Round a small number to the nearest integer, as float and as integer.

    Adding 1.5 * 2^mantissa leaves the integer in the low bits of the sum; NaN needs no care.
    """
    shift = 1.5 * 2.0 ** MANTISSA[x.size]
    shifted = x + shift
    return shifted - shift, shifted.bits() - x.trace.constant(shift, x.element).bits()


def polynomial(x: Vector, coefficients: Sequence[float]) -> Vector:
    """Evaluate ``c0 + c1 x + c2 x^2 + ...`` by Horner's rule with fused multiply-add."""
    result: Vector | float = coefficients[-1]
    for coefficient in reversed(coefficients[:-1]):
        result = x.fma(result, coefficient)
    if not isinstance(result, Vector):
        raise ValueError("a polynomial needs two coefficients")
    return result


def _index(value: int) -> ir.Constant:
    return ir.Constant(INTEGER[64], value)
