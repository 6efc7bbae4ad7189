"""The parser of the text language: ``parse("5 - abs(x1)*sqrt(p1)/10 + 2^x2")``.

Operators from the lowest precedence to the highest (`warpfit.ops` has the numbers):

====================  =========================================================================
``or``, ``and``       left-associative
``not``               prefix
``< <= > >= == !=``   do not chain: write ``a < b and b < c``
``+ -``, ``* /``      left-associative
``-``                 prefix; before a number it makes a negative constant
``^`` or ``**``       right-associative; ``-x^2`` is ``-(x^2)``, ``2^-x`` is ``2^(-x)``
====================  =========================================================================

Operands are

* numbers: ``2``, ``.5``, ``1e-3``; ``#`` and 16 hexadecimal digits is the float64 with these bits;
* variables: ``x1``, ``x2``, ... by position, or the names of the data set;
* parameters ``p1``, ``p2``, ..., and the constants ``pi``, ``e``, ``inf`` and ``nan``;
* calls of any operator by its name or an alias. ``add``, ``mul``, ``min``, ``max``, ``and`` and
  ``or`` take two or more operands;
* any expression in parentheses.

A name of the data set takes precedence over everything but a call. Where it hides ``x1`` or ``p1``,
``x01`` and ``p01`` still mean the first variable and parameter. A name that is no identifier is
written in backticks, and a backtick in it is doubled.

The method is Dijkstra's shunting yard with explicit stacks, so that only memory limits the length
and the nesting of a text.
"""

from __future__ import annotations

import difflib
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Generic, NoReturn, TypeVar

import numpy as np

from warpfit.errors import ParseError
from warpfit.expressions.grammar import (
    ALIASES,
    CHAINED,
    COMPARISONS,
    CONSTANTS,
    INDEXED,
    INFIX,
    PREFIX,
    RIGHT_ASSOCIATIVE,
    TOKEN,
)
from warpfit.ir import Program
from warpfit.ops import CONSTANT, OPERATORS, PARAMETER, VARIABLE, Operator

T = TypeVar("T")

_SPACE: Final = re.compile(r"\s*")
_PARENTHESES: Final = re.compile(r"[()]|`(?:[^`]|``)*`")

#: Longest text, and longest call or group in parentheses, that a parser caches, in characters.
_LONGEST_TEXT: Final = 4096
_LONGEST_GROUP: Final = 256
#: Numbers of texts and of groups that a parser caches.
_MOST_TEXTS: Final = 4096
_MOST_GROUPS: Final = 16384


def parse(text: str, names: Sequence[str] = ()) -> Program:
    """Parse one expression.

    Args:
        text: the expression.
        names: names of the data set's variables in order, or empty.

    Raises:
        ParseError: if the text is no expression; it names the place and a remedy.

    """
    return parser(tuple(names)).parse(text)


@lru_cache(maxsize=32)
def parser(names: tuple[str, ...] = ()) -> Parser:
    """Return the parser for a data set with these variable names, which all callers share."""
    return Parser(names)


class _Cache(Generic[T]):
    """Cache by text in two halves; when the younger is full, the older is dropped.

    Each step is one atomic operation on a dict, so threads can share it; a race costs a miss.
    """

    def __init__(self, capacity: int) -> None:
        self._half = capacity // 2
        self._young: dict[str, T] = {}
        self._old: dict[str, T] = {}

    def get(self, text: str) -> T | None:
        found = self._young.get(text)
        if found is None:
            found = self._old.get(text)
            if found is not None:
                self.put(text, found)
        return found

    def put(self, text: str, value: T) -> None:
        if len(self._young) >= self._half:
            self._old, self._young = self._young, {}
        self._young[text] = value


class Parser:
    """Parser for one list of variable names, with bounded caches; threads can share it.

    The tokens of each text, call and group in parentheses are cached, because successive
    generations of genetic programming repeat most of their subtrees.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        """Take the names of the data set's variables in order, all different, or none."""
        self.names = tuple(names)
        self.variables = {name: float(index) for index, name in enumerate(self.names)}
        self.groups: _Cache[tuple[list[int], list[float]]] = _Cache(_MOST_GROUPS)
        self._texts: _Cache[Program] = _Cache(_MOST_TEXTS)

    def parse(self, text: str) -> Program:
        """Parse one expression, as `warpfit.parse.parse`."""
        program = self._texts.get(text)
        if program is None:
            codes, values = _Reader(self, text).read()
            program = Program._unchecked(np.array(codes, dtype=np.uint8), np.array(values))
            if len(text) <= _LONGEST_TEXT:
                self._texts.put(text, program)
        return program


@dataclass(slots=True)
class _Pending:
    """A prefix or infix operator whose last operand is still being read."""

    row: Operator
    start: int
    """Number of tokens written before the operator was read."""
    before_number: bool = False
    """Whether the operand begins with a number."""


@dataclass(slots=True)
class _Group:
    """An open call or group in parentheses."""

    row: Operator | None
    """Operator that is called; None for a group."""
    position: int
    """Index of its first character."""
    first_pending: int
    """Index of the first pending operator inside it."""
    start: int
    """Number of tokens written before it."""
    operands: int = 1


class _Reader:
    """Reads one text from left to right and writes its tokens in postfix order."""

    def __init__(self, parser: Parser, text: str) -> None:
        self.parser = parser
        self.text = text
        self.at = 0
        self.codes: list[int] = []
        self.values: list[float] = []
        self.pending: list[_Pending] = []
        self.group = _Group(None, 0, 0, 0)
        self.outer: list[_Group] = []
        self.closing = _closing(text)
        self.wants_operand = True

    def read(self) -> tuple[list[int], list[float]]:
        """Return the token codes and values of the text."""
        while True:
            match = TOKEN.match(self.text, self.at)
            if match is None:
                self._bad_character()
            kind = str(match.lastgroup)
            token, position = match[kind], match.start(kind)
            self.at = match.end()
            if self.wants_operand:
                self._operand(kind, token, position)
            elif kind == "end":
                break
            else:
                self._operator(token, position)
        if self.outer:
            self._fail("'(' is never closed", "UNBALANCED", "Add ')'", self.group.position)
        self._reduce(-1)
        return self.codes, self.values

    def _operand(self, kind: str, token: str, position: int) -> None:
        if kind == "number":
            self._constant(_number(token))
        elif kind == "quoted":
            self._quoted(token, position)
        elif token == "(":
            self._open(None, position, self.at)
        elif kind == "name" and (called := self._call(token, position)) is not None:
            self._open(called, position, self.at)
        elif token in PREFIX:
            self.pending.append(_Pending(PREFIX[token], len(self.codes)))
        elif kind == "name" and token not in INFIX:
            self._name(token, position)
        elif token != "+":
            found = f"before {token!r}" if token else "at the end"
            self._fail(
                f"an operand is missing {found}",
                "EXPECTED_OPERAND",
                "Write a number, a variable, a parameter, a call or a group in parentheses",
                position,
            )

    def _operator(self, token: str, position: int) -> None:
        row = INFIX.get(token)
        if row is not None:
            self._infix(row, position)
        elif token == ")":
            self._close(position)
        elif token == ",":
            self._comma(position)
        else:
            self._fail(
                f"an operator is missing before {token!r}",
                "EXPECTED_OPERATOR",
                "Write an operator between the operands; * is never left out",
                position,
            )

    def _emit(self, code: int, value: float) -> None:
        self.codes.append(code)
        self.values.append(value)
        self.wants_operand = False

    def _constant(self, value: float) -> None:
        if len(self.pending) > self.group.first_pending and self.pending[-1].start == len(
            self.codes
        ):
            self.pending[-1].before_number = True
        self._emit(CONSTANT, value)

    def _quoted(self, token: str, position: int) -> None:
        name = token[1:-1].replace("``", "`")
        if name not in self.parser.variables:
            self._unknown(name, "variable", self.parser.names, position)
        self._emit(VARIABLE, self.parser.variables[name])

    def _name(self, name: str, position: int) -> None:
        indexed = INDEXED.fullmatch(name)
        if name in self.parser.variables:
            self._emit(VARIABLE, self.parser.variables[name])
        elif indexed and int(indexed[2]) < 2**31:
            self._emit(VARIABLE if indexed[1] == "x" else PARAMETER, float(indexed[2]) - 1)
        elif name in CONSTANTS:
            self._constant(CONSTANTS[name])
        else:
            known = (*self.parser.names, *CONSTANTS, *OPERATORS)
            self._unknown(name, "name", known, position)

    def _call(self, name: str, position: int) -> Operator | None:
        """Return the operator if ``name`` is called, and advance behind the parenthesis."""
        opening = _SPACE.match(self.text, self.at)
        after = self.at if opening is None else opening.end()
        if not self.text.startswith("(", after) or name in PREFIX:
            return None
        row = OPERATORS.get(ALIASES.get(name, name))
        if row is None:
            self._unknown(name, "function", (*OPERATORS, *ALIASES), position)
        self.at = after + 1
        return row

    def _open(self, row: Operator | None, position: int, inside: int) -> None:
        end = self.closing.get(inside - 1, len(self.text)) + 1
        if end - position <= _LONGEST_GROUP:
            known = self.parser.groups.get(self.text[position:end])
            if known is not None:
                self.codes += known[0]
                self.values += known[1]
                self.at, self.wants_operand = end, False
                return
        self.outer.append(self.group)
        self.group = _Group(row, position, len(self.pending), len(self.codes))

    def _comma(self, position: int) -> None:
        group = self.group
        if group.row is None:
            remedy = "Only calls have commas; decimals are written with a point"
            self._fail("',' stands outside a call", "UNEXPECTED_COMMA", remedy, position)
        self._reduce(-1)
        if group.operands > 1 and group.row.name in CHAINED:
            self._emit(group.row.code, 0.0)
        group.operands += 1
        self.wants_operand = True

    def _close(self, position: int) -> None:
        if not self.outer:
            self._fail("')' was never opened", "UNBALANCED", "Remove it, or add '('", position)
        self._reduce(-1)
        group = self.group
        if group.row is not None:
            self._check_arity(group.row)
            self._emit(group.row.code, 0.0)
        self.group = self.outer.pop()
        if self.at - group.position <= _LONGEST_GROUP:
            tokens = self.codes[group.start :], self.values[group.start :]
            self.parser.groups.put(self.text[group.position : self.at], tokens)

    def _check_arity(self, row: Operator) -> None:
        chained = row.name in CHAINED
        operands = self.group.operands
        if operands != row.arity and not (chained and operands > row.arity):
            wanted = f"{row.arity} or more" if chained else str(row.arity)
            plural = "s" if row.arity > 1 else ""
            self._fail(
                f"{row.name} takes {wanted} operand{plural}, got {operands}",
                "WRONG_ARITY",
                f"Write {row.name}({', '.join(row.operands)})",
                self.group.position,
            )

    def _infix(self, row: Operator, position: int) -> None:
        right = row.name in RIGHT_ASSOCIATIVE
        self._reduce(row.precedence if right or row.name in COMPARISONS else row.precedence - 1)
        waiting = self.pending[-1].row if len(self.pending) > self.group.first_pending else None
        if row.name in COMPARISONS and waiting is not None and waiting.name in COMPARISONS:
            remedy = "Write 'a < b and b < c', or put one comparison in parentheses"
            self._fail("comparisons do not chain", "CHAINED_COMPARISON", remedy, position)
        self.pending.append(_Pending(row, len(self.codes)))
        self.wants_operand = True

    def _reduce(self, precedence: int) -> None:
        """Write the pending operators of this group with a higher precedence."""
        while len(self.pending) > self.group.first_pending:
            if self.pending[-1].row.precedence <= precedence:
                return
            last = self.pending.pop()
            if last.before_number and last.row.name == "neg" and len(self.codes) == last.start + 1:
                self.values[-1] = -self.values[-1]
            else:
                self._emit(last.row.code, 0.0)

    def _unknown(self, name: str, what: str, known: Iterable[str], position: int) -> NoReturn:
        close = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.6)
        remedy = f"Did you mean {' or '.join(close)}?" if close else self._known(what)
        self._fail(f"unknown {what} {name!r}", f"UNKNOWN_{what.upper()}", remedy, position)

    def _known(self, what: str) -> str:
        if what == "function":
            return f"Functions are {', '.join(OPERATORS)}"
        names = self.parser.names or ("x1", "x2", "...")
        listed = ", ".join([*names[:8], *["..."] * (len(names) > 8)])
        return f"Variables are {listed}; parameters are p1, p2, ..."

    def _bad_character(self) -> NoReturn:
        space = _SPACE.match(self.text, self.at)
        position = self.at if space is None else space.end()
        character = self.text[position]
        remedy = {
            "=": "Write == to compare",
            "`": "Close the quoted name with another backtick",
            "[": "Use parentheses; variables are x1, x2, ...",
        }.get(character, "Remove it, or put a variable's name in backticks")
        self._fail(f"{character!r} has no meaning", "UNEXPECTED_CHARACTER", remedy, position)

    def _fail(self, message: str, reason: str, remedy: str, position: int) -> NoReturn:
        raise ParseError(message, reason, remedy, text=self.text, position=position)


def _number(token: str) -> float:
    if token.startswith("#"):
        (value,) = struct.unpack(">d", bytes.fromhex(token[1:]))
        return float(value)
    return float(token)


def _closing(text: str) -> dict[int, int]:
    """Return the index of the closing parenthesis by that of the opening one."""
    closing: dict[int, int] = {}
    opened: list[int] = []
    for match in _PARENTHESES.finditer(text):
        if match[0] == "(":
            opened.append(match.start())
        elif match[0] == ")" and opened:
            closing[opened.pop()] = match.start()
    return closing
