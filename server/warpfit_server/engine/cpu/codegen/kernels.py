"""Kernels of the CPU engine: a loop over rows for each operator, generated from its row.

The simple form of a kernel, for ``n`` rows, is

    for i in range(n):
        r[i] = kernel(a[i], b[i], c[i])

Here it runs over 64 bytes at a time. A kernel is a C function

    void kernel(void *r, const void *a, const void *b, const void *c, int64 broadcast, int64 n)

Bit k of ``broadcast`` says that operand k is an invariant, stored 64 bytes wide, whose pointer
does not advance. So one loop serves every mixture of rows and invariants. ``r`` may be one of the
operands. No byte outside the n rows is read or written.

A loss kernel returns the sum of its term over n rows as a double:

    double loss(const void *f, const void *y, const void *w, int64 n)

A kernel of products adds up products of columns in float64, a small tile of a matrix product. The
simple form of one of shape (h, v) is

    for i in range(h):
        for j in range(v):
            sums[i * pitch + j] += sum(w[:n] * left[i][:n] * right[j][:n])

It is a C function

    void dots(double *sums, int64 pitch, void **left, void **right, const void *w, int64 n)

in which ``left`` and ``right`` are arrays of addresses of columns, and ``w`` is not read by the
form without weights. Each lane adds its own rows and the lanes are added pairwise, so that a block
of n rows has rounding errors of about n / lanes additions.

`build` compiles all kernels of an `Arithmetic` for this very CPU; `parts` keeps them on disk.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from warpfit.ops import OPERATORS
from warpfit_server.engine.autodiff import PartialKernel, partial_kernels
from warpfit_server.engine.cpu.codegen.elementary_functions import functions, lifted, wide_functions
from warpfit_server.engine.cpu.codegen.vector import Trace, Vector, absolute
from warpfit_server.engine.interface import Arithmetic

#: Bytes that a kernel handles in one step, and the width of a stored invariant.
WIDTH: Final = 64
I64: Final = ir.IntType(64)
POINTER: Final = ir.PointerType()
DOUBLE: Final = ir.DoubleType()
_Step = Callable[[list[Vector], Any], Vector | None]
#: What a kernel computes of its operands.
Body = Callable[[Trace, Sequence[Vector]], Vector]
#: Name of the kernel that copies its operand.
COPY: Final = "copy"
#: Terms that loss kernels add up, times w in the weighted form. The last one is for row losses that
#: have been computed before.
_TERMS: Final[dict[str, Callable[[Vector, Vector], Vector]]] = {
    "squared": lambda f, y: (f - y) * (f - y),
    "absolute": lambda f, y: absolute(f - y),
    "given": lambda f, y: f,
}
LOSS_KERNELS: Final = tuple(f"{kind}{w}" for kind in _TERMS for w in ("", "_weighted"))


def symbol(name: str) -> str:
    """Name of a kernel in the object file."""
    return f"warpfit_{name}"


class RowLoop:
    """A loop over n rows in steps of WIDTH bytes; what is left goes through padded copies."""

    def __init__(
        self, function: ir.Function, arithmetic: Arithmetic, operands: int, *, has_result: bool
    ) -> None:
        self.builder = ir.IRBuilder(function.append_basic_block("entry"))
        real = ir.FloatType() if arithmetic.is_single else DOUBLE
        self._itemsize = 4 if arithmetic.is_single else 8
        self.lanes = WIDTH // self._itemsize
        self._kind = ir.VectorType(real, self.lanes)
        self.trace = Trace(self.builder, real, self.lanes, contract=arithmetic.is_fast)
        self._operands = operands
        self._has_result = has_result

    def run(self, pointers: Sequence[Any], steps: Sequence[Any], rows: Any, body: _Step) -> None:
        """Emit the loop.

        ``pointers`` are to the operands and, last, to the result if there is one; ``steps`` are the
        bytes by which each advances. ``body`` returns the result, of the operands and the rows that
        are left.
        """
        b = self.builder
        cursors = [self._variable(pointer) for pointer in pointers]
        left = self._variable(rows)
        copies = [self._variable(ir.Constant(self._kind, None)) for _ in pointers]
        step, after_whole_steps, pad, finish = (b.append_basic_block() for _ in range(4))
        tail = b.and_(rows, integer(self.lanes - 1))
        whole = b.sub(rows, tail)
        tail_bytes = b.mul(tail, integer(self._itemsize))
        remaining = self._variable(whole)
        end = self._variable(pointers[-1])
        is_padded = self._variable(ir.Constant(ir.IntType(1), 0))
        b.cbranch(b.icmp_signed(">", whole, integer(0)), step, after_whole_steps)

        b.position_at_end(step)
        operands = [
            self.trace.vector(b.load(b.load(cursor), align=self._itemsize, typ=self._kind))
            for cursor in cursors[: self._operands]
        ]
        result = body(operands, b.load(left))
        if result is not None:
            b.store(result.value, b.load(cursors[-1]), align=self._itemsize)
        for cursor, advance in zip(cursors, steps, strict=True):
            b.store(b.gep(b.load(cursor), [advance], source_etype=ir.IntType(8)), cursor)
        b.store(b.sub(b.load(left), integer(self.lanes)), left)
        following = b.sub(b.load(remaining), integer(self.lanes))
        b.store(following, remaining)
        b.cbranch(b.icmp_signed(">", following, integer(0)), step, after_whole_steps)

        b.position_at_end(after_whole_steps)
        is_last = b.or_(b.load(is_padded), b.icmp_signed("==", tail, integer(0)))
        b.cbranch(is_last, finish, pad)

        b.position_at_end(pad)  # one more step runs on copies, which are WIDTH bytes long
        b.store(b.load(cursors[-1]), end)
        for copy, cursor in zip(copies[: self._operands], cursors, strict=False):
            self._copy(copy, b.load(cursor), tail_bytes)
        for copy, cursor in zip(copies, cursors, strict=True):
            b.store(copy, cursor)
        b.store(ir.Constant(ir.IntType(1), 1), is_padded)
        b.branch(step)

        b.position_at_end(finish)
        if self._has_result:
            with b.if_then(b.load(is_padded)):
                self._copy(b.load(end), copies[-1], tail_bytes)

    def _variable(self, initial: Any) -> Any:
        place = self.builder.alloca(initial.type)
        self.builder.store(initial, place)
        return place

    def _copy(self, target: Any, source: Any, size: Any) -> None:
        memcpy = self.builder.module.declare_intrinsic(
            "llvm.memcpy",
            [POINTER, POINTER, I64],
            ir.FunctionType(ir.VoidType(), [POINTER, POINTER, I64, ir.IntType(1)]),
        )
        pointers = [self.builder.bitcast(p, POINTER) for p in (target, source)]
        self.builder.call(memcpy, [*pointers, size, ir.Constant(ir.IntType(1), 0)])


def operator_kernel(
    module: ir.Module, name: str, arity: int, arithmetic: Arithmetic, body: Body
) -> None:
    """Add the kernel of one instruction with ``arity`` operands."""
    kind = ir.FunctionType(ir.VoidType(), [POINTER] * 4 + [I64] * 2)
    function = ir.Function(module, kind, symbol(name))
    result, *operands, broadcast, rows = function.args
    loop = RowLoop(function, arithmetic, arity, has_result=True)
    builder = loop.builder
    is_invariant = (builder.lshr(broadcast, integer(k)) for k in range(arity))
    steps = [
        builder.select(builder.trunc(bit, ir.IntType(1)), integer(0), integer(WIDTH))
        for bit in is_invariant
    ]
    pointers = [*operands[:arity], result]
    loop.run(pointers, [*steps, integer(WIDTH)], rows, lambda vectors, _: body(loop.trace, vectors))
    builder.ret_void()


def loss_kernel(module: ir.Module, name: str, arithmetic: Arithmetic) -> None:
    """Add one loss kernel: a sum in double over rows."""
    term, _, weighted = name.partition("_")
    kind = ir.FunctionType(DOUBLE, [POINTER] * 3 + [I64])
    function = ir.Function(module, kind, symbol(name))
    arity = 3 if weighted else 2
    loop = RowLoop(function, arithmetic, arity, has_result=False)
    builder = loop.builder
    wide = ir.VectorType(DOUBLE, loop.lanes)
    total = builder.alloca(wide)
    builder.store(ir.Constant(wide, None), total)
    order = ir.Constant(ir.VectorType(I64, loop.lanes), list(range(loop.lanes)))

    def body(vectors: list[Vector], left: Any) -> None:
        f, y, *w = (vector.widen() for vector in vectors)
        value = _TERMS[term](f, y)
        value = value * w[0] if w else value
        undefined = ir.Constant(ir.VectorType(left.type, loop.lanes), ir.Undefined)
        one = builder.insert_element(undefined, left, integer(0))
        lefts = _shuffle(builder, one, [0] * loop.lanes)
        used = builder.icmp_signed("<", order, lefts)
        value = loop.trace.select(loop.trace.vector(used), value, 0.0)
        builder.store((loop.trace.vector(builder.load(total)) + value).value, total)

    loop.run(function.args[:arity], [integer(WIDTH)] * arity, function.args[-1], body)
    builder.ret(sum_lanes(builder, builder.load(total), loop.lanes))


def sum_lanes(builder: ir.IRBuilder, vector: Any, lanes: int) -> Any:
    """Add the lanes pairwise, half of the vector at a time."""
    while lanes > 1:
        lanes //= 2
        halves = (range(lanes), range(lanes, 2 * lanes))
        vector = builder.fadd(*(_shuffle(builder, vector, half) for half in halves))
    return builder.extract_element(vector, integer(0))


def _shuffle(builder: ir.IRBuilder, vector: Any, order: Sequence[int]) -> Any:
    kind = ir.VectorType(ir.IntType(32), len(order))
    return builder.shuffle_vector(vector, vector, ir.Constant(kind, list(order)))


def compile_kernel(source: str, arithmetic: Arithmetic, *, widens: bool = True) -> Body:
    """Make a row's kernel text callable on vectors.

    Float32 kernels of more than one step that rounds compute in float64 when they must be precise,
    so that the steps' errors do not add up, unless ``widens`` is false; literals take the data's
    type first.
    """
    tree = ast.parse(source, mode="eval")
    if arithmetic.is_single:
        tree = ast.fix_missing_locations(_SingleLiterals().visit(tree))
    code = compile(tree, "<kernel>", "eval")
    steps = sum(
        isinstance(node, ast.BinOp)
        or (isinstance(node, ast.Call) and getattr(node.func, "id", "") not in ("select", "abs"))
        for node in ast.walk(tree)
    )
    wide = widens and arithmetic.is_single and not arithmetic.is_fast and steps > 1

    def compute(trace: Trace, vectors: Sequence[Vector]) -> Vector:
        known = lifted(wide_functions() if wide else functions(trace, fast=arithmetic.is_fast))
        operands = [vector.widen() if wide else vector for vector in vectors]
        names: dict[str, Any] = dict(zip("abc", operands, strict=False))
        names |= known | {"select": trace.select}
        value: Vector = eval(code, {"__builtins__": {}}, names)
        return value.narrow()

    return compute


class _SingleLiterals(ast.NodeTransformer):
    """Round literals to float32."""

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        return ast.copy_location(ast.Constant(float(np.float32(ast.literal_eval(node)))), node)


def integer(value: int) -> ir.Constant:
    """Return a constant of 64 bits."""
    return ir.Constant(I64, value)


#: Columns of a tile, at most: 9 sums and 6 columns of 16 float64 lanes fit AVX-512's registers.
LARGEST_TILE: Final = 3


@dataclass(frozen=True, slots=True)
class DotShape:
    """Shape of the tile of products that a kernel sums up."""

    height: int
    width: int
    weighted: bool

    @property
    def name(self) -> str:
        """Name in the object file."""
        return f"dots_{self.height}_{self.width}" + ("_weighted" if self.weighted else "")


_SIDES: Final = range(1, LARGEST_TILE + 1)
#: Without weights first, then by height, then by width; compiled code counts on it.
DOT_SHAPES: Final = tuple(DotShape(h, v, w) for w in (False, True) for h in _SIDES for v in _SIDES)


def dots_kernel(module: ir.Module, shape: DotShape, arithmetic: Arithmetic) -> None:
    """Add one kernel."""
    kind = ir.FunctionType(ir.VoidType(), [POINTER, I64, POINTER, POINTER, POINTER, I64])
    function = ir.Function(module, kind, symbol(shape.name))
    sums, pitch, left, right, weight, rows = function.args
    operands = shape.height + shape.width + shape.weighted
    loop = RowLoop(function, arithmetic, operands, has_result=False)
    builder = loop.builder
    wide = ir.VectorType(DOUBLE, loop.lanes)
    totals = [builder.alloca(wide) for _ in range(shape.height * shape.width)]
    for total in totals:
        builder.store(ir.Constant(wide, None), total)

    def body(vectors: list[Vector], _: Any) -> None:
        columns = [vector.widen() for vector in vectors]
        firsts, seconds = columns[: shape.height], columns[shape.height :][: shape.width]
        if shape.weighted:
            firsts = [first * columns[-1] for first in firsts]
        for index, total in enumerate(totals):
            first, second = firsts[index // shape.width], seconds[index % shape.width]
            added = first.fma(second, loop.trace.vector(builder.load(total, typ=wide)))
            builder.store(added.value, total)

    columns = [_column(builder, left, i) for i in range(shape.height)]
    columns += [_column(builder, right, j) for j in range(shape.width)]
    columns += [weight] if shape.weighted else []
    loop.run(columns, [integer(WIDTH)] * operands, rows, body)
    for index, total in enumerate(totals):
        offset = builder.add(
            builder.mul(pitch, integer(index // shape.width)), integer(index % shape.width)
        )
        place = builder.gep(sums, [offset], source_etype=DOUBLE)
        value = sum_lanes(builder, builder.load(total, typ=wide), loop.lanes)
        builder.store(builder.fadd(builder.load(place, typ=DOUBLE), value), place)
    builder.ret_void()


def _column(builder: ir.IRBuilder, array: Any, index: int) -> Any:
    place = builder.gep(array, [integer(index)], source_etype=POINTER)
    return builder.load(place, typ=POINTER)


#: Name of the kernel that multiplies adjoint and partial derivative.
PRODUCT: Final = "product"


def build(arithmetic: Arithmetic) -> bytes:
    """Compile the kernels of operators and losses; return an object file."""
    module = ir.Module(arithmetic.label)
    for name, row in OPERATORS.items():
        operator_kernel(
            module, name, row.arity, arithmetic, compile_kernel(row.cpu or row.kernel, arithmetic)
        )
    operator_kernel(module, COPY, 1, arithmetic, compile_kernel("a", arithmetic))
    for name in LOSS_KERNELS:
        loss_kernel(module, name, arithmetic)
    return _compile(module)


def build_derivatives(arithmetic: Arithmetic) -> bytes:
    """Compile the kernels that derivatives take beside these; return an object file."""
    module = ir.Module(f"{arithmetic.label}-derivatives")
    operator_kernel(module, PRODUCT, 2, arithmetic, lambda _, operands: _product(*operands))
    for partial in partial_kernels():
        arity = partial.arity + partial.scaled
        operator_kernel(module, partial.name, arity, arithmetic, _partial_body(partial, arithmetic))
    for shape in DOT_SHAPES:
        dots_kernel(module, shape, arithmetic)
    return _compile(module)


def _partial_body(partial: PartialKernel, arithmetic: Arithmetic) -> Body:
    """Return the code of a partial derivative, alone or times an adjoint.

    It computes in the data's type even where the operator itself takes more digits: errors of
    derivatives do not build up as those of values do.
    """
    compute = compile_kernel(partial.source, arithmetic, widens=False)
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


@dataclass(frozen=True, eq=False)
class KernelSet:
    """Loaded kernels of one arithmetic; the addresses are valid while the object lives."""

    addresses: NDArray[np.int64]
    """Addresses by code of the instruction, int64 [CODE_COUNT]; 0 where there is no kernel."""
    losses: dict[str, int]
    """Addresses by name of the loss kernel."""
    dots: NDArray[np.int64]
    """Addresses in the order of `DOT_SHAPES`; empty without derivatives."""
    owners: tuple[Any, ...]
    """LLVM execution engines that own the code."""


#: Kernels by arithmetic. The functions that call them are loaded with them.
Kernels = dict[Arithmetic, KernelSet]
