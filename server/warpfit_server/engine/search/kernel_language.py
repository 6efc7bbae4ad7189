"""Functions that are written once, in Python, for the CPU's compiler and for that of CUDA.

What variation, simplification, rules and hashing do to a formula must be the same on every engine.
So these functions are written in a small part of Python that Numba compiles for the CPU, and
`cuda_source` writes as CUDA C++. That part has whole numbers, real numbers and flat arrays; ``if``,
``while``, ``for ... in range(...)``; assignments, calls of other such functions, and constants of
their modules. A local variable is declared by an annotation in the block that uses it::

    @portable
    def total(numbers: Integers, count: Int) -> Int:
        found: Int = 0
        for place in range(count):
            found += numbers[place]
        return found

A call of a function that is not `portable` is written as it is: both compilers have to know a
function of that name. Divisions and remainders of whole numbers take numbers that are not negative,
for which Python and C++ agree. A whole number has 64 bits on the CPU and 32 on a GPU.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import numba
import numpy as np

#: Types of arguments, variables and results, as annotations name them. They are those of compiled
#: code, in which a number of an array is not one of Python.
Int: TypeAlias = Any
Bool: TypeAlias = Any
Real: TypeAlias = Any
#: An unsigned number of 64 bits, which is combined with others of its kind alone.
Word: TypeAlias = Any
Bytes: TypeAlias = Any
Integers: TypeAlias = Any
Reals: TypeAlias = Any
Words: TypeAlias = Any

_TYPES: Final = {
    "Int": "int",
    "Bool": "bool",
    "Real": "float",
    "Word": "unsigned long long",
    "Bytes": "unsigned char*",
    "Integers": "int*",
    "Reals": "float*",
    "Words": "unsigned long long*",
    "None": "void",
}
_CASTS: Final = {"int64": "int", "uint64": "unsigned long long", "float32": "float"}
_OPERATORS: Final[dict[type[ast.AST], str]] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "/", ast.Mod: "%",
    ast.LShift: "<<", ast.RShift: ">>", ast.BitXor: "^", ast.BitAnd: "&", ast.BitOr: "|",
    ast.And: "&&", ast.Or: "||", ast.Not: "!", ast.USub: "-",
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
}  # fmt: skip


def portable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function callable from code that Numba compiles, and known to `cuda_source`."""
    # Without counting references to arrays, which takes longer than most of these functions.
    compiled: Callable[..., Any] = numba.njit(
        function, error_model="numpy", _nrt=False, no_cfunc_wrapper=True, no_cpython_wrapper=True
    )
    compiled.is_portable = True  # type: ignore[attr-defined]
    return compiled


def cuda_source(*functions: Callable[..., Any]) -> str:
    """Return CUDA C++ of portable functions and of all that they call, callees first."""
    written: dict[str, str] = {}
    for function in functions:
        _write(function, written)
    return "\n".join(written.values())


def _write(function: Callable[..., Any], written: dict[str, str]) -> None:
    if function.__name__ in written:
        return
    plain = function.py_func  # type: ignore[attr-defined]
    tree = ast.parse(textwrap.dedent(inspect.getsource(plain))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    names = plain.__globals__
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called = names.get(node.func.id)
            if getattr(called, "is_portable", False):
                _write(called, written)
    written[function.__name__] = _Writer(names).function(tree)


class _Writer:
    """Writes the statements and expressions of one function."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names
        self._local: set[str] = set()

    def function(self, tree: ast.FunctionDef) -> str:
        parameters = []
        for argument in tree.args.args:
            self._local.add(argument.arg)
            parameters.append(f"{self._type(argument.annotation)} {argument.arg}")
        head = f"__device__ {self._type(tree.returns)} {tree.name}({', '.join(parameters)})"
        return "\n".join([f"{head} {{", *self._block(tree.body), "}", ""])

    @staticmethod
    def _type(annotation: ast.expr | None) -> str:
        return _TYPES[ast.unparse(annotation)] if annotation is not None else "void"

    def _block(self, statements: list[ast.stmt]) -> Iterator[str]:
        for statement in statements:
            for line in self._statement(statement):
                yield f"  {line}"

    def _statement(self, node: ast.stmt) -> Iterator[str]:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                self._local.add(name)
                yield f"{self._type(node.annotation)} {name} = {self._value(value)};"
            case ast.Assign(targets=[target]):
                yield f"{self._value(target)} = {self._value(node.value)};"
            case ast.AugAssign():
                operator = _OPERATORS[type(node.op)]
                yield f"{self._value(node.target)} {operator}= {self._value(node.value)};"
            case ast.If():
                yield f"if ({self._value(node.test)}) {{"
                yield from self._block(node.body)
                if node.orelse:
                    yield "} else {"
                    yield from self._block(node.orelse)
                yield "}"
            case ast.While():
                yield f"while ({self._value(node.test)}) {{"
                yield from self._block(node.body)
                yield "}"
            case ast.For(target=ast.Name(id=name), iter=ast.Call(args=limits)):
                self._local.add(name)
                values = [self._value(limit) for limit in limits]
                lower, upper = ("0", values[0]) if len(values) == 1 else values
                # Python computes the limit once, which may draw a random number.
                end = f"{name}_end"
                head = f"int {name} = {lower}, {end} = {upper}; {name} < {end}; ++{name}"
                yield f"for ({head}) {{"
                yield from self._block(node.body)
                yield "}"
            case ast.Return(value=None):
                yield "return;"
            case ast.Return(value=ast.expr() as value):
                yield f"return {self._value(value)};"
            case ast.Break():
                yield "break;"
            case ast.Continue():
                yield "continue;"
            case ast.Expr(value=ast.Constant()):  # the docstring
                return
            case ast.Expr():
                yield f"{self._value(node.value)};"
            case _:
                raise SyntaxError(f"not in the kernel language: {ast.unparse(node)}")

    def _value(self, node: ast.expr) -> str:
        match node:
            case ast.Constant(value=bool(value)):
                return "true" if value else "false"
            case ast.Constant(value=value):
                return self._literal(value)
            case ast.Name(id=name):
                return name if name in self._local else self._literal(self._names[name])
            case ast.BinOp():
                left, right = self._value(node.left), self._value(node.right)
                return f"({left} {_OPERATORS[type(node.op)]} {right})"
            case ast.BoolOp():
                operator = f" {_OPERATORS[type(node.op)]} "
                return f"({operator.join(map(self._value, node.values))})"
            case ast.UnaryOp():
                return f"({_OPERATORS[type(node.op)]}{self._value(node.operand)})"
            case ast.Compare(ops=[operator], comparators=[other]):
                left, right = self._value(node.left), self._value(other)
                return f"({left} {_OPERATORS[type(operator)]} {right})"
            case ast.IfExp():
                parts = map(self._value, (node.test, node.body, node.orelse))
                return "({} ? {} : {})".format(*parts)
            case ast.Subscript():
                return f"{self._value(node.value)}[{self._value(node.slice)}]"
            case ast.Call(func=ast.Attribute(attr=kind), args=[value]) if kind in _CASTS:
                return f"({_CASTS[kind]})({self._value(value)})"
            case ast.Call(func=ast.Name(id=name)):
                given = ", ".join(map(self._value, node.args))
                return f"{'fabsf' if name == 'abs' else name}({given})"
        raise SyntaxError(f"not in the kernel language: {ast.unparse(node)}")

    @staticmethod
    def _literal(value: Any) -> str:
        if isinstance(value, np.uint64):
            return f"{int(value)}ull"
        if isinstance(value, int):
            return str(value)
        if isinstance(value, float):
            return f"{value!r}f"
        raise SyntaxError(f"not a number: {value!r}")
