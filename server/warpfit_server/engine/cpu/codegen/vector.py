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
REAL: Final = {32: ir.FloatType(), 64: ir.DoubleType()}


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
        return bool(self.real == REAL[32])

    def vector(self, value: Any) -> Vector:
        """Wrap an LLVM vector value."""
        return Vector(self, value)

    def constant(self, number: Number, element: ir.Type) -> Vector:
        """Make a vector with the same number in every lane."""
        cast = int if isinstance(element, ir.IntType) else float
        kind = ir.VectorType(element, self.lanes)
        return self.vector(ir.Constant(kind, [cast(number)] * self.lanes))

    def select(self, mask: Vector, x: Vector | Number, y: Vector | Number) -> Vector:
        """Take x where the mask holds, else y; two numbers give the mask's operands' type."""
        model = next((v for v in (x, y) if isinstance(v, Vector)), None)
        element = mask.compared if model is None else model.element
        first, second = (v if isinstance(v, Vector) else self.constant(v, element) for v in (x, y))
        return self.vector(self.builder.select(mask.value, first.value, second.value))

    def intrinsic(self, name: str, *operands: Vector) -> Vector:
        """Call the LLVM intrinsic ``llvm.name`` lane by lane."""
        kind, size = operands[0].value.type, operands[0].size
        function = self._declare(
            f"llvm.{name}.v{self.lanes}f{size}", ir.FunctionType(kind, [kind] * len(operands))
        )
        return self.vector(self.builder.call(function, [v.value for v in operands]))

    def call(self, name: str, *operands: Vector) -> Vector:
        """Call a C library function on doubles for one lane after the other."""
        double, builder = REAL[64], self.builder
        function = self._declare(name, ir.FunctionType(double, [double] * len(operands)))

        def lane(sources: Sequence[Any], results: Sequence[Any]) -> None:
            builder.store(builder.call(function, [builder.load(s) for s in sources]), results[0])

        return self._each_lane(lane, operands, [double])[0]

    def call_for_results(
        self, function: ir.Function, operand: Vector, kinds: Sequence[ir.Type]
    ) -> Vectors:
        """Call ``void (double, pointers to results)`` for one lane of float64 after the other.

        ``kinds`` are the element types of the results.
        """

        def lane(sources: Sequence[Any], results: Sequence[Any]) -> None:
            self.builder.call(function, [self.builder.load(sources[0]), *results])

        return self._each_lane(lane, [operand], kinds)

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

    def repeat(self, turn: Callable[[Vectors], Vectors], state: Vectors, *, most: int) -> Vectors:
        """Emit a loop that turns a state of vectors into another one, at most so many times.

        It ends early after a turn that makes the last vector, of integers, 0 in every lane.
        """
        builder = self.builder
        before, loop, after = builder.block, *(builder.append_basic_block() for _ in range(2))
        builder.branch(loop)
        builder.position_at_end(loop)
        phis = [builder.phi(vector.value.type) for vector in state]
        count = builder.phi(INTEGER[64])
        results = turn(tuple(self.vector(phi) for phi in phis))
        following = builder.add(count, INTEGER[64](1))
        for phi, first, result in zip(phis, state, results, strict=True):
            phi.add_incoming(first.value, before)
            phi.add_incoming(result.value, builder.block)
        count.add_incoming(INTEGER[64](0), before)
        count.add_incoming(following, builder.block)
        mask = builder.icmp_signed(
            "!=", results[-1].value, ir.Constant(results[-1].value.type, None)
        )
        bits = builder.bitcast(mask, ir.IntType(self.lanes))
        again = builder.icmp_signed("!=", bits, ir.Constant(bits.type, 0))
        again = builder.and_(again, builder.icmp_signed("<", following, INTEGER[64](most)))
        builder.cbranch(again, loop, after)
        builder.position_at_end(after)
        return tuple(self.vector(result.value) for result in results)

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

    def _each_lane(
        self,
        body: Callable[[Sequence[Any], Sequence[Any]], None],
        operands: Sequence[Vector],
        kinds: Sequence[ir.Type],
    ) -> Vectors:
        """Emit a loop over lanes, whose body gets pointers to its operands and results."""
        builder, count = self.builder, len(operands)
        elements = [*(operand.element for operand in operands), *kinds]
        places = [self._stack(ir.VectorType(element, self.lanes)) for element in elements]
        for place, operand in zip(places, operands, strict=False):
            builder.store(operand.value, place)
        arrays = [
            builder.bitcast(place, element.as_pointer())
            for place, element in zip(places, elements, strict=True)
        ]
        before, loop, after = builder.block, *(builder.append_basic_block() for _ in range(2))
        builder.branch(loop)
        builder.position_at_end(loop)
        index = builder.phi(INTEGER[64])
        index.add_incoming(INTEGER[64](0), before)
        pointers = [builder.gep(array, [index]) for array in arrays]
        body(pointers[:count], pointers[count:])
        following = builder.add(index, INTEGER[64](1))
        index.add_incoming(following, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, INTEGER[64](self.lanes)), loop, after)
        builder.position_at_end(after)
        return tuple(self.vector(builder.load(place)) for place in places[count:])


Operator = Callable[["Vector", "Vector | Number"], "Vector"]


def _arithmetic(name: str, *, swapped: bool = False) -> Operator:
    def operate(vector: Vector, other: Vector | Number) -> Vector:
        trace, pair = vector.trace, (vector.value, vector.like(other).value)
        left, right = pair[::-1] if swapped else pair
        if isinstance(vector.element, ir.IntType):
            return trace.vector(getattr(trace.builder, name)(left, right))
        return trace.vector(getattr(trace.builder, "f" + name)(left, right, flags=trace.flags))

    return operate


def _bitwise(name: str) -> Operator:
    def operate(vector: Vector, other: Vector | Number) -> Vector:
        emit = getattr(vector.trace.builder, name)
        return Vector(vector.trace, emit(vector.value, vector.like(other).value), vector.compared)

    return operate


def _comparison(symbol: str) -> Operator:
    def compare(vector: Vector, other: Vector | Number) -> Vector:
        builder = vector.trace.builder
        if isinstance(vector.element, ir.IntType):
            emit = builder.icmp_signed
        else:
            emit = builder.fcmp_unordered if symbol == "!=" else builder.fcmp_ordered
        mask = emit(symbol, vector.value, vector.like(other).value)
        return Vector(vector.trace, mask, vector.element)

    return compare


class Vector:
    """One LLVM vector: floats, integers, or a mask."""

    __slots__ = ("compared", "trace", "value")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, trace: Trace, value: Any, compared: ir.Type | None = None) -> None:
        """Wrap ``value``; a mask remembers the element type that was ``compared``."""
        self.trace = trace
        self.value = value
        self.compared = compared

    __add__ = __radd__ = _arithmetic("add")
    __sub__, __rsub__ = _arithmetic("sub"), _arithmetic("sub", swapped=True)
    __mul__ = __rmul__ = _arithmetic("mul")
    __truediv__, __rtruediv__ = _arithmetic("div"), _arithmetic("div", swapped=True)
    __lshift__, __rshift__ = _bitwise("shl"), _bitwise("ashr")
    __and__, __or__, __xor__ = _bitwise("and_"), _bitwise("or_"), _bitwise("xor")
    __lt__, __le__ = _comparison("<"), _comparison("<=")
    __gt__, __ge__ = _comparison(">"), _comparison(">=")
    __eq__ = _comparison("==")  # type: ignore[assignment]
    __ne__ = _comparison("!=")  # type: ignore[assignment]

    def __neg__(self) -> Vector:
        return self.trace.vector(self.trace.builder.fneg(self.value))

    @property
    def element(self) -> ir.Type:
        """Type of one lane."""
        return self.value.type.element

    @property
    def size(self) -> int:
        """Bits of one lane."""
        widths = {REAL[32]: 32, REAL[64]: 64}
        return int(widths.get(self.element) or self.element.width)

    def like(self, other: Vector | Number) -> Vector:
        """Return a vector as it is, and a number as a vector of this one's type."""
        return other if isinstance(other, Vector) else self.trace.constant(other, self.element)

    def fma(self, factor: Vector | Number, addend: Vector | Number) -> Vector:
        """``self * factor + addend``, rounded once."""
        return self.trace.intrinsic("fma", self, self.like(factor), self.like(addend))

    def bits(self) -> Vector:
        """The same bits as integers."""
        return self._convert("bitcast", INTEGER[self.size])

    def real(self) -> Vector:
        """The bits of integers as floats of the same size."""
        return self._convert("bitcast", REAL[self.size])

    def to_real(self) -> Vector:
        """Convert integers to floats of the same size."""
        return self._convert("sitofp", REAL[self.size])

    def widen(self) -> Vector:
        """Convert float32 to float64; float64 stays."""
        return self if self.size == 64 else self._convert("fpext", REAL[64])

    def narrow(self) -> Vector:
        """Round float64 to the data's type."""
        real = self.trace.real
        return self if self.element == real else self._convert("fptrunc", real)

    def _convert(self, instruction: str, element: ir.Type) -> Vector:
        kind = ir.VectorType(element, self.trace.lanes)
        return self.trace.vector(getattr(self.trace.builder, instruction)(self.value, kind))


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
    *rest, last = coefficients
    result = x.like(last)
    for coefficient in reversed(rest):
        result = x.fma(result, coefficient)
    return result
