"""CUDA C++ of what is written once for host and device: Python functions, and operators.

What a device and the host must decide alike, such as when a fit has converged, is written once, in
Python that Numba takes, and every kernel that needs it has its translation (`translate`). The
translator knows the part of Python that such code needs, and raises for everything else:

* numbers, arrays of one dimension (``Line``) and of two (``Table``), views of them, named tuples;
* assignments, also to tuples of names; ``if``, ``while``, ``for`` over a range or over constants;
* arithmetic, comparisons, calls of such functions, and of a few functions of ``math``.

A name is declared where it is assigned first, and has the type of what is assigned there. So it
must be assigned in the block that it is used in, or around it, and a number that becomes a fraction
must begin as one. Whole numbers have 32 bits, but for elements of arrays, which have 64. They are
not negative where they are divided.

Parts of named tuples that a device does not have can be left out (``never``): they are false there,
and the compiler leaves out what depends on them.

Operators and derivatives are translated from the kernel language (`operator_source`), and every
generated kernel starts with the functions that they call (`prelude`). Precise arithmetic has
elementary functions of its own. Those of CUDA branch for special operands, and expressions with NaN
or infinities in some rows take those branches all the time. These have no branches, and give NaN,
infinities and signed zeros as NumPy does. Largest errors measured on one H200, over all float32
operands or at least 10^9 pairs, and over samples of float64:

============  ======================================  ===============================
function      float32                                 float64
============  ======================================  ===============================
quotient      the nearest, but for 7 pairs in 10^9    the nearest; 1 ulp if subnormal
root          the nearest; 1 ulp for tiny operands    the nearest
exponential   1.9 ulp (CUDA's)                        0.9 ulp
logarithm     1.2 ulp                                 0.8 ulp
power         3.6 ulp                                 1.1 ulp
============  ======================================  ===============================
"""

from __future__ import annotations

import ast
import inspect
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, localcontext
from functools import cache
from importlib import resources
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any, Final

import numpy as np

from warpfit.ops import SERIES, Operator
from warpfit_server.engine.interface import Arithmetic

#: What the translations are made of.
_WORDS: Final = r"""
// The number 0, or false, that is known to the compiler.
struct Never {
  __device__ __forceinline__ Never() {}
  __device__ __forceinline__ Never(bool) {}
  __device__ __forceinline__ constexpr operator bool() const { return false; }
  __device__ __forceinline__ constexpr bool operator[](int) const { return false; }
};
template <typename T>
struct Line {
  T* first;
  int count;
  __device__ __forceinline__ T& operator[](long long i) const { return first[i]; }
  __device__ __forceinline__ Line part(int begin, int end) const {
    return {first + begin, end - begin};
  }
};
template <typename T>
struct Table {
  T* first;
  int columns;
  __device__ __forceinline__ T& at(int row, int column) const {
    return first[row * columns + column];
  }
  __device__ __forceinline__ Line<T> operator[](int row) const {
    return {first + row * columns, columns};
  }
};
template <typename A, typename B>
struct Both {
  A first;
  B second;
};
template <typename A, typename B>
__device__ __forceinline__ Both<A, B> both(A first, B second) { return {first, second}; }
// As Python has them: the first one, unless the other one is greater or less.
template <typename A, typename B>
__device__ __forceinline__ auto greater_of(A a, B b) -> decltype(a + b) { return b > a ? b : a; }
template <typename A, typename B>
__device__ __forceinline__ auto lesser_of(A a, B b) -> decltype(a + b) { return b < a ? b : a; }
__device__ __forceinline__ double square_of(double a) { return a * a; }
__device__ __forceinline__ double cube_of(double a) { return a * (a * a); }
"""
#: Functions of Python by their names, or those of ``math`` and NumPy.
_CALLS: Final[MappingProxyType[object, str]] = MappingProxyType(
    {
        max: "greater_of",
        min: "lesser_of",
        abs: "fabs",
        bool: "(bool)",
        float: "(double)",
        int: "(long long)",
        np.float32: "(float)",
        math.sqrt: "sqrt",
        math.floor: "floor",
        math.sin: "sin",
        math.copysign: "copysign",
        math.isfinite: "isfinite",
    }
)
_OPERATORS: Final[MappingProxyType[type[ast.AST], str]] = MappingProxyType(
    {
        **{ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "/", ast.Mod: "%"},
        **{ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^", ast.LShift: "<<", ast.RShift: ">>"},
        **{ast.And: "&&", ast.Or: "||", ast.Not: "!", ast.USub: "-", ast.Invert: "~"},
        **{ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="},
    }
)
_POWERS: Final = MappingProxyType({2: "square_of", 3: "cube_of"})
#: Types of the parts of named tuples, and of results, by their annotations.
_TYPES: Final = MappingProxyType(
    {
        **{"float": "double", "int": "long long", "bool": "bool", "None": "void"},
        **{"Floats": "Line<double>", "Integers": "Line<long long>", "Any": "Line<double>"},
    }
)
#: Names that C++ takes for its own words.
_KEYWORDS: Final = frozenset(
    {
        *("auto", "bool", "case", "catch", "char", "const", "default", "delete", "do", "double"),
        *("enum", "explicit", "export", "extern", "float", "friend", "goto", "inline", "int"),
        *("long", "mutable", "namespace", "new", "operator", "private", "protected", "public"),
        *("register", "short", "signed", "sizeof", "static", "struct", "switch", "template"),
        *("this", "throw", "typedef", "typename", "union", "unsigned", "using", "virtual"),
        *("void", "volatile"),
    }
)


#: Compiler options. Contraction to multiply-add would change precise results.
NVRTC_PRECISE: Final = ("--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
NVRTC_FAST: Final = ("--fmad=true", "--ftz=true", "--prec-div=false", "--prec-sqrt=false")
#: Function of the kernel language -> function in precise32.cu and precise64.cu.
_FUNCTIONS: Final = MappingProxyType(
    {"exp": "exponential", "log": "logarithm", "sqrt": "root", "pow": "power"}
)
_CALL: Final = re.compile(rf"\b({'|'.join(_FUNCTIONS)})\(")
#: Short reciprocals of significands in steps of 2^-7 below 1 and 2^-6 above, which cover a little
#: more than 2^-1/2 to 2^1/2.
_RECIPROCALS: Final = tuple(
    [Decimal(n) / 128 for n in range(90, 128)] + [Decimal(n) / 64 for n in range(64, 93)]
)
#: High word of the first reciprocal, without its 14 lowest bits.
_FIRST: Final = 0x3FE68000 >> 14
#: Binary places of the high part of a logarithm.
_PLACES: Final = 42
_LITERAL: Final = re.compile(r"(?<![\w.])(\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)(?![\w.])")
#: Functions of fast arithmetic that the operator table calls; their errors are stated in
#: `client/OPERATORS.md`.
#: For a < 0 ``fast_pow`` has the right sign for every whole b in [-2^22, 2^22], and is NaN for
#: every other b in that range.
_FAST_HELPERS: Final = r"""
// Functions, because both values are computed: a branch would cost more.
__device__ __forceinline__ float select(bool condition, float x, float y) {
  return condition ? x : y;
}
__device__ __forceinline__ double select(bool condition, double x, double y) {
  return condition ? x : y;
}

__device__ __forceinline__ float fast_log2(float a) {
  float r;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a));
  return r;
}

__device__ __forceinline__ float fast_exp2(float a) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a));
  return r;
}

__device__ __forceinline__ float fast_sqrt(float a) {
  float r;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a));
  return r;
}

__device__ __forceinline__ float fast_tanh(float a) {
#if __CUDA_ARCH__ >= 750
  float r;
  asm("tanh.approx.f32 %0, %1;" : "=f"(r) : "f"(a));
  return r;
#else
  return tanhf(a);
#endif
}

__device__ __forceinline__ float fast_pow_positive(float a, float b) {
  float r = fast_exp2(b * fast_log2(a));
  return b == 0.0f ? 1.0f : r;
}

// Adding 1.5 * 2^23 rounds b to a whole number and leaves its parity in the lowest bit: cheaper
// than a conversion, which shares the special-function unit with the logarithm.
__device__ __forceinline__ float fast_pow(float a, float b) {
  float shifted = __fadd_rn(b, 12582912.0f);
  float whole = __fsub_rn(shifted, 12582912.0f);
  float magnitude = fast_pow_positive(fabsf(a), b);
  unsigned sign = (unsigned)__float_as_int(a) & ((unsigned)__float_as_int(shifted) << 31);
  float r = __int_as_float((int)((unsigned)__float_as_int(magnitude) | sign));
  return a < 0.0f && whole != b ? __int_as_float(0x7fffffff) : r;
}
"""

#: The product of the chain rule: 0 if a factor is 0, even if the other is not finite.
_PRODUCT: Final = r"""
__device__ __forceinline__ REAL product(REAL slope, REAL partial) {
  const REAL both = slope * partial;
  return slope != (REAL)0 && partial != (REAL)0 ? both : (REAL)0;
}
"""

#: The exact remainder, as `warpfit_server.engine.cpu.codegen.elementary_functions` has it: each
#: turn takes a multiple of b 2^k off |a|, and leaves less than b 2^k, for smaller and smaller k.
#: BITS are two less than those of the significand, so that the quotient is exact but for 1;
#: exponents differ by at most 276 (float32) or 2097 (float64), which makes 13 or 42 turns.
_MOD: Final = r"""
static __device__ __noinline__ REAL mod(REAL a, REAL b) {
  const REAL size = abs(a), divisor = abs(b), none = 0;
  REAL rest = size;
  if (!(size < divisor)) {
    if (!(size - size == none && divisor > none)) return none / none;
    int k = ilogb(size) - ilogb(divisor) - BITS;
    for (bool last = false; !last; k -= BITS) {
      last = k <= 0;
      const REAL step = last ? divisor : ldexp(divisor, k);
      rest = FUSED(-trunc(QUOTIENT(rest, step)), step, rest);
      rest = rest < none ? rest + step : rest;
    }
  }
  if (rest == none) return copysign(none, b);
  const REAL same = copysign(rest, a);
  return (a < none) == (b < none) ? same : same + b;
}
"""
_MOD_WORDS: Final = {
    "float": {"BITS": "22", "FUSED": "__fmaf_rn", "QUOTIENT": "__fdiv_rn"},
    "double": {"BITS": "51", "FUSED": "__fma_rn", "QUOTIENT": "__ddiv_rn"},
}

#: Long and rare functions: inlined, they would add half to the time of compiling the interpreters.
#: ``digamma`` is as in `warpfit.ops`; float32 would lose digits near its zeros.
_CALLED: Final = r"""
static __device__ __noinline__ REAL called_tgamma(REAL a) { return tgamma(a); }
static __device__ __noinline__ REAL called_erfc(REAL a) { return erfc(a); }
static __device__ __noinline__ REAL called_lgamma(REAL a) { return lgamma(a); }
static __device__ __noinline__ double digamma(double a) {
  if (a < 0.0 && floor(a) == a) return 0.0;
  double x = a < 0.5 ? 1.0 - a : a, z = x + 8.0, steps = 0.0;
  for (int k = 0; k < 8; ++k) steps += 1.0 / (x + k);
  double square = 1.0 / (z * z), series = 0.0;
  const double terms[] = {@SERIES@};
  for (double term : terms) series = (series + term) * square;
  double r = log(z) - 0.5 / z - series - steps;
  return a < 0.5 ? r - 3.141592653589793 / tan(3.141592653589793 * (a - floor(a + 0.5))) : r;
}
""".replace("@SERIES@", ", ".join(map(repr, reversed(SERIES))))


class UntranslatableError(Exception):
    """A function has something in it that the translator does not know."""


def translate(
    functions: Sequence[Callable[..., Any]],
    *,
    never: Mapping[str, Sequence[str]] = MappingProxyType({}),
    called: Sequence[Callable[..., Any]] = (),
) -> str:
    """Return CUDA C++ of functions, and of all that they call; their names are `name_of`.

    Args:
        functions: that Numba compiles for the host.
        never: parts of named tuples that are always false on a device, by the tuple's name.
        called: functions that are not to be inlined.

    Raises:
        UntranslatableError: naming the function and the line.
    """
    translation = _Translation(never, called)
    for function in functions:
        translation.add(function)
    return _WORDS + "".join(translation.texts)


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function's translation."""
    function = inspect.unwrap(getattr(function, "py_func", function))
    return f"{function.__module__.rpartition('.')[2]}_{function.__name__.lstrip('_')}"


class _Translation:
    """Functions and named tuples that have been translated, each behind those that it needs."""

    def __init__(
        self, never: Mapping[str, Sequence[str]], called: Sequence[Callable[..., Any]]
    ) -> None:
        self._never = never
        self._called = {name_of(function) for function in called}
        self._known: set[str] = set()
        self.texts: list[str] = []

    def add(self, function: Any) -> str:
        """Translate a function, unless that has been done; return its name."""
        function, name = getattr(function, "py_func", function), name_of(function)
        if name not in self._known:
            self._known.add(name)
            how = "__noinline__" if name in self._called else "__forceinline__"
            self.texts.append(_FunctionText(self, function).text(name, how))
        return name

    def add_tuple(self, kind: Any) -> str:
        """Declare a named tuple, unless that has been done; return its name."""
        name = str(kind.__name__)
        if name not in self._known:
            self._known.add(name)
            never, parts = self._never.get(name, ()), []
            for part, annotation in kind.__annotations__.items():
                text = getattr(annotation, "__forward_arg__", annotation)
                of_device = "Never" if part in never else _TYPES[text]
                parts.append(f"  {of_device} {_word(part)};\n")
            self.texts.append(f"struct {name} {{\n{''.join(parts)}}};\n")
        return name


class _FunctionText:
    """The translation of one function."""

    def __init__(self, translation: _Translation, function: FunctionType) -> None:
        self._translation = translation
        self._globals = function.__globals__
        source = textwrap.dedent(inspect.getsource(function))
        (tree,) = ast.parse(source).body
        assert isinstance(tree, ast.FunctionDef)
        self._function = tree
        self._scopes: list[set[str]] = [{one.arg for one in tree.args.args}]
        self._count = 0

    def text(self, name: str, how: str) -> str:
        """Return the definition, which is inlined or not."""
        kinds: list[str] = []
        parameters = []
        for one in self._function.args.args:
            annotation = ast.unparse(one.annotation) if one.annotation else ""
            of_device = _TYPES.get(annotation, "") if annotation in ("float", "bool") else ""
            if annotation in self._globals and hasattr(self._globals[annotation], "_fields"):
                of_device = f"const {self._translation.add_tuple(self._globals[annotation])}&"
            if not of_device:
                of_device = f"T{len(kinds)}"
                kinds.append(f"typename {of_device}")
            parameters.append(f"{of_device} {_word(one.arg)}")
        returned = ast.unparse(self._function.returns) if self._function.returns else ""
        result = _TYPES[returned] if returned in ("float", "bool", "None") else "auto"
        body = self._function.body
        if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            body = body[1:]
        lines = self._block(body, "  ")
        head = f"template <{', '.join(kinds)}>\n" if kinds else ""
        return (
            f"{head}static __device__ {how} {result} {name}({', '.join(parameters)}) {{\n"
            f"{lines}}}\n"
        )

    def _fail(self, node: ast.AST) -> UntranslatableError:
        line = getattr(node, "lineno", 0)
        return UntranslatableError(f"{self._function.name}, line {line}: {ast.unparse(node)}")

    # ---------------------------------------------------------------------------- statements

    def _block(self, statements: Sequence[ast.stmt], indent: str) -> str:
        self._scopes.append(set())
        lines, inner = list[str](), indent + "  "
        for node in statements:
            match node:
                case ast.Pass():
                    pass
                case ast.Break():
                    lines.append(f"{indent}break;\n")
                case ast.Continue():
                    lines.append(f"{indent}continue;\n")
                case ast.Expr(value=ast.Call() as call):
                    lines.append(f"{indent}{self._value(call)};\n")
                case ast.Return(value=None):
                    lines.append(f"{indent}return;\n")
                case ast.Return(value=ast.Tuple(elts=[first, second])):
                    both = f"both({self._value(first)}, {self._value(second)})"
                    lines.append(f"{indent}return {both};\n")
                case ast.Return(value=ast.expr() as value):
                    lines.append(f"{indent}return {self._value(value)};\n")
                case ast.AugAssign(target=target, op=op, value=value):
                    whole = self._value(ast.BinOp(target, op, value))
                    lines.append(f"{indent}{self._value(target)} = {whole};\n")
                case ast.AnnAssign(target=ast.Name() as target, value=ast.expr() as value):
                    lines.append(self._assignment([target], value, indent))
                case ast.Assign(targets=targets, value=value):
                    lines.append(self._assignment(targets, value, indent))
                case ast.If(test=test, body=body, orelse=other):
                    lines.append(f"{indent}if ({self._value(test)}) {{\n")
                    lines.append(f"{self._block(body, inner)}{indent}}}")
                    if other:
                        lines.append(f" else {{\n{self._block(other, inner)}{indent}}}")
                    lines.append("\n")
                case ast.While(test=test, body=body, orelse=[]):
                    inside = self._block(body, inner)
                    lines.append(f"{indent}while ({self._value(test)}) {{\n{inside}{indent}}}\n")
                case ast.For(target=ast.Name(id=name), iter=values, body=body, orelse=[]):
                    lines.append(self._loop(name, values, body, indent))
                case _:
                    raise self._fail(node)
        self._scopes.pop()
        return "".join(lines)

    def _loop(self, name: str, values: ast.expr, body: Sequence[ast.stmt], indent: str) -> str:
        self._count += 1
        end = f"end{self._count}"
        self._scopes.append({name})
        inside = self._block(body, indent + "  ")
        self._scopes.pop()
        match values:
            case ast.Call(func=ast.Name(id="range"), args=given):
                numbers = [self._value(one) for one in given]
                if len(numbers) == 1:
                    numbers.insert(0, "0")
                step = numbers[2] if len(numbers) > 2 else "1"
                name = _word(name)
                head = f"int {name} = {numbers[0]}, {end} = {numbers[1]}; {name} < {end}; "
                return f"{indent}for ({head}{name} += {step}) {{\n{inside}{indent}}}\n"
            case ast.Tuple(elts=elements):
                chosen = self._value(elements[-1])
                for place, one in reversed(list(enumerate(elements[:-1]))):
                    chosen = f"({end} == {place} ? {self._value(one)} : {chosen})"
                head = f"int {end} = 0; {end} < {len(elements)}; ++{end}"
                first = f"{indent}  const auto {_word(name)} = {chosen};\n"
                return f"{indent}for ({head}) {{\n{first}{inside}{indent}}}\n"
        raise self._fail(values)

    def _assignment(self, targets: Sequence[ast.expr], value: ast.expr, indent: str) -> str:
        if len(targets) == 1 and not isinstance(targets[0], ast.Tuple):
            return indent + self._assign(targets[0], self._value(value))
        self._count += 1
        name, lines = f"value{self._count}", []
        if len(targets) > 1:
            lines.append(f"const auto {name} = {self._value(value)};\n")
            lines += [self._assign(target, name) for target in targets]
            return "".join(indent + line for line in lines)
        assert isinstance(targets[0], ast.Tuple)
        elements = targets[0].elts
        if isinstance(value, ast.Tuple):
            parts = [f"{name}_{k}" for k in range(len(elements))]
            for part, one in zip(parts, value.elts, strict=True):
                lines.append(f"const auto {part} = {self._value(one)};\n")
        elif len(elements) == 2:
            lines.append(f"const auto {name} = {self._value(value)};\n")
            parts = [f"{name}.first", f"{name}.second"]
        else:
            raise self._fail(value)
        lines += [self._assign(one, part) for one, part in zip(elements, parts, strict=True)]
        return "".join(indent + line for line in lines)

    def _assign(self, target: ast.expr, text: str) -> str:
        if not isinstance(target, ast.Name):
            return f"{self._value(target)} = {text};\n"
        if self._is_local(target.id):
            return f"{_word(target.id)} = {text};\n"
        self._scopes[-1].add(target.id)
        return f"auto {_word(target.id)} = {text};\n"

    def _is_local(self, name: str) -> bool:
        return any(name in scope for scope in self._scopes)

    # --------------------------------------------------------------------------- expressions

    def _value(self, node: ast.expr) -> str:
        match node:
            case ast.Constant(value=bool() | int() | float() as number):
                return _literal(number)
            case ast.Name(id=name) if self._is_local(name):
                return _word(name)
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if self._is_local(name):
                return f"{_word(name)}.{_word(attribute)}"
            case ast.Name() | ast.Attribute():
                found = self._found(node)
                if isinstance(found, (bool, int, float)):
                    return _literal(found)
            case ast.Call():
                return self._call(node)
            case ast.UnaryOp(op=op, operand=operand):
                return f"({_OPERATORS[type(op)]}{self._value(operand)})"
            case ast.BoolOp(op=op, values=values):
                return f"({f' {_OPERATORS[type(op)]} '.join(map(self._value, values))})"
            case ast.IfExp(test=test, body=body, orelse=other):
                return f"({self._value(test)} ? {self._value(body)} : {self._value(other)})"
            case ast.BinOp(left=left, op=ast.Div(), right=right):
                return f"((double)({self._value(left)}) / (double)({self._value(right)}))"
            case ast.BinOp(left=left, op=ast.Pow(), right=right):
                base, power = self._value(left), self._value(right)
                exponent = right.value if isinstance(right, ast.Constant) else None
                product = _POWERS.get(exponent) if isinstance(exponent, int) else None
                if product:
                    return f"{product}({base})"
                return f"pow((double)({base}), (double)({power}))"
            case ast.BinOp(left=left, op=op, right=right):
                return f"({self._value(left)} {_OPERATORS[type(op)]} {self._value(right)})"
            case ast.Compare():
                return self._comparison(node)
            case ast.Subscript(
                value=ast.Attribute(value=owner, attr="shape"), slice=ast.Constant(value=1)
            ):
                return f"{self._value(owner)}.columns"
            case ast.Subscript(value=owner, slice=ast.Tuple(elts=[row, column])):
                return f"{self._value(owner)}.at({self._value(row)}, {self._value(column)})"
            case ast.Subscript(value=owner, slice=ast.Slice(lower=begin, upper=end, step=None)):
                whole = self._value(owner)
                first = self._value(begin) if begin else "0"
                last = self._value(end) if end else f"{whole}.count"
                return f"{whole}.part({first}, {last})"
            case ast.Subscript(value=owner, slice=index):
                return f"{self._value(owner)}[{self._value(index)}]"
        raise self._fail(node)

    def _found(self, node: ast.expr) -> Any:
        """Return the object that a global name stands for."""
        if isinstance(node, ast.Name):
            if node.id in self._globals:
                return self._globals[node.id]
            builtins = self._globals["__builtins__"]
            names = vars(builtins) if isinstance(builtins, ModuleType) else builtins
            if node.id in names:
                return names[node.id]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            return getattr(self._found(node.value), node.attr)
        raise self._fail(node)

    def _call(self, node: ast.Call) -> str:
        if node.keywords:
            raise self._fail(node)
        given = [self._value(one) for one in node.args]
        if isinstance(node.func, ast.Name) and node.func.id == "len":
            return f"{given[0]}.count"
        found = self._found(node.func)
        if hasattr(found, "_fields"):
            return f"{self._translation.add_tuple(found)}{{{', '.join(given)}}}"
        if isinstance(found, FunctionType) or hasattr(found, "py_func"):
            return f"{self._translation.add(found)}({', '.join(given)})"
        try:
            return f"({_CALLS[found]}({', '.join(given)}))"
        except (KeyError, TypeError):
            raise self._fail(node) from None

    def _comparison(self, node: ast.Compare) -> str:
        parts, left = [], node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            own = self._value(left)
            if isinstance(operator, ast.In) and isinstance(right, ast.Tuple):
                equal = [f"{own} == {self._value(one)}" for one in right.elts]
                parts.append(f"({' || '.join(equal)})")
            else:
                parts.append(f"({own} {_OPERATORS[type(operator)]} {self._value(right)})")
            left = right
        return parts[0] if len(parts) == 1 else f"({' && '.join(parts)})"


def _word(name: str) -> str:
    return f"{name}_" if name in _KEYWORDS else name


def _literal(number: bool | int | float) -> str:
    if isinstance(number, bool):
        return "true" if number else "false"
    if isinstance(number, int):
        return str(number) if abs(number) < 2**31 else f"{number}ll"
    if math.isinf(number):
        sign = "-" if number < 0 else ""
        return f"({sign}__longlong_as_double(0x7ff0000000000000))"
    return repr(number)


# --------------------------------------------------------------------------- the kernel language


def precise_calls(expression: str) -> str:
    """Replace calls in an expression of the kernel language by those of precise functions."""
    return _CALL.sub(lambda call: f"{_FUNCTIONS[call[1]]}(", expression)


@cache
def precise_source(real: str) -> str:
    """Return the functions for ``real`` (float or double), to follow the prelude."""
    text = _read("precise32.cu")
    if real != "double":
        return text
    with localcontext(prec=60):
        logarithms = [_split(-c.ln()) for c in _RECIPROCALS]
        natural = _split(Decimal(2).ln())
    columns = [", ".join(column) for column in zip(*logarithms, strict=True)]
    fields = {
        "FIRST_LOGARITHM": str(_FIRST),
        "COUNT": str(len(_RECIPROCALS)),
        "HIGH": columns[0],
        "LOW": columns[1],
        "LN2": ", ".join(natural),
    }
    return text + re.sub(r"@(\w+)@", lambda field: fields[field[1]], _read("precise64.cu"))


def _split(value: Decimal) -> tuple[str, str]:
    """Split into a number with `_PLACES` binary places and the remainder."""
    unit = Decimal(2) ** -_PLACES
    high = (value / unit).to_integral_value() * unit
    return repr(float(high)), repr(float(value - high))


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text()


def compiler_options(arithmetic: Arithmetic) -> tuple[str, ...]:
    """Return NVRTC's options for `operator_source`."""
    return NVRTC_FAST if arithmetic.is_fast else NVRTC_PRECISE


def prelude(arithmetic: Arithmetic) -> str:
    """Return the functions that operators and derivatives call in addition to CUDA's own."""
    functions = "" if arithmetic.is_fast else precise_source(arithmetic.real)
    remainder = re.sub(
        r"\b(BITS|FUSED|QUOTIENT)\b", lambda m: _MOD_WORDS[arithmetic.real][m[1]], _MOD
    )
    shared = (_PRODUCT + _CALLED + remainder).replace("REAL", arithmetic.real)
    return _FAST_HELPERS + shared + functions


def packs() -> str:
    """Return the functions by which the interpreters read rows; they follow the prelude.

    ``real``, ``REAL_BYTES`` and ``ROWS`` must be defined.
    """
    return sum_tree() + resources.files(__package__).joinpath("packs.cu").read_text()


def sum_tree() -> str:
    """Return the functions that add up sums over rows."""
    return resources.files(__package__).joinpath("sum_tree.cu").read_text()


def render(expression: str, real: str) -> str:
    """Give every literal of a kernel-language expression the type ``real`` (float or double)."""
    return _LITERAL.sub(rf"{real}(\1)", expression)


def operator_source(operator: Operator, arithmetic: Arithmetic) -> str:
    """Return the CUDA C++ expression over ``a``, ``b``, ``c`` for an operator.

    It must be compiled with the options of its arithmetic.
    """
    if arithmetic.is_fast:
        return render(operator.cuda_approximate, arithmetic.real)
    return render(precise_calls(operator.cuda_precise), arithmetic.real)
