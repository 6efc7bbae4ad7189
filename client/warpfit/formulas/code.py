"""Programs as functions of NumPy, and as source text in other languages.

The text is rendered from the operator table (`warpfit.ops`) and the table of each language
(`warpfit.formulas.languages`). Operands beyond a length become statements of their own, equal ones
one statement, so that no nesting is too deep for a compiler.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from string import Formatter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from warpfit.errors import InvalidArgumentError, did_you_mean, list_of_texts
from warpfit.expressions.language import free_name, to_text
from warpfit.formulas.languages import HELPERS, LANGUAGES, Language
from warpfit.formulas.rules import check_length
from warpfit.ops import CONSTANT, KERNEL_FUNCTIONS, OPERATORS, VARIABLE, Operator

if TYPE_CHECKING:
    from warpfit.ir import Program

#: Most tokens of a program.
_MOST_TOKENS: Final = 10_000
#: Languages by other names.
_ALIASES: Final = {"py": "python", "cpp": "c++", "js": "javascript", "pytorch": "torch"}
_ALIASES.update({"np": "numpy", "matlab": "octave", "f90": "fortran", "rs": "rust"})
#: Longest operand, in characters, that is not given a name of its own.
_LONGEST: Final = 100
#: Most characters of a comment that come from the formula or from a name.
_LONGEST_COMMENT: Final = 80
#: Names of columns that are kept, unless a language uses them.
_IDENTIFIER: Final = re.compile(r"(?!.*__)[A-Za-z][A-Za-z0-9_]{0,59}")
#: A variable or parameter, or the name of a statement.
_NAME: Final = re.compile(r"\w+(\[\d+\])?")
_ATOM: Final = 100
_SUM: Final = OPERATORS["add"].precedence
_PRODUCT: Final = OPERATORS["mul"].precedence
_COMPARISON: Final = OPERATORS["lt"].precedence
_INFIX: Final = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_COMPARISONS: Final = {
    **{ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}
}


class Code(str):
    """Source text, and what the columns are called in it."""

    __slots__ = ("names",)

    names: dict[str, str]
    """Identifier of each column that the formula uses, by the column's name, in their order."""


class _Text(NamedTuple):
    """An expression in a language."""

    text: str
    precedence: int = _ATOM
    value: float | None = None
    """The number that it is; None for anything else."""


def to_code(program: Program, language: str, names: Sequence[str] = ()) -> Code:
    """Return a program as source text; see `warpfit.Program.code`."""
    if language not in LANGUAGES:
        raise InvalidArgumentError(
            f"there is no code in {language!r}",
            "BAD_ENUM",
            did_you_mean(
                _ALIASES.get(str(language).lower(), language),
                LANGUAGES,
                f"Use one of {', '.join(LANGUAGES)}; SymPy has printers for more languages, such "
                "as sympy.julia_code(program.sympy())",
            ),
            "language",
        )
    check_length(program, _MOST_TOKENS, "code")
    return _Writer(LANGUAGES[language]).written(program, list_of_texts(names))


def to_numpy(program: Program, names: Sequence[str] = ()) -> Callable[..., Any]:
    """Return a program as a function; see `warpfit.Program.to_numpy`."""
    source = to_code(program, "numpy", names)
    namespace: dict[str, Any] = {}
    # The text consists of the tables of operators and languages, and of identifiers made here.
    exec(compile(source, "<formula>", "exec"), namespace)
    function: Callable[..., Any] = namespace["formula"]
    function.source = source  # type: ignore[attr-defined]
    function.names = source.names  # type: ignore[attr-defined]
    return function


class _Writer:
    """Renders one program, and collects the functions that its text calls."""

    def __init__(self, language: Language) -> None:
        self.language = language
        self.functions: dict[str, str] = {}
        """Texts by the name after ``formula_``; a function follows those that it calls."""

    def written(self, program: Program, names: Sequence[str]) -> Code:
        language = self.language
        columns = _identifiers(program, names, language)
        variables = sorted(set(program.values[program.codes == VARIABLE].astype(int).tolist()))
        used = [columns[index] for index in variables]
        known = [*names, *(free_name("x", i, names) for i in range(len(names), len(columns)))]
        taken = {language.folded(name) for name in columns}
        parameters = [free_name("p", i, taken) for i in range(program.parameters)]
        # Statements by the text whose value they name, so that equal operands are computed once.
        lets: dict[str, str] = {}

        def leaf(code: int, value: float) -> _Text:
            if code == CONSTANT:
                return self.constant(value)
            if code == VARIABLE:
                return _Text(columns[int(value)])
            return _Text(f"p[{int(value)}]" if language.vector else parameters[int(value)])

        def operator(row: Operator, operands: list[_Text]) -> _Text:
            values = [operand.value for operand in operands]
            if None not in values:
                # Compilers and interpreters refuse some operations on constants.
                with np.errstate(all="ignore"):
                    return self.constant(float(row.numpy(*map(np.float64, values))))
            return self.operator(row, [short(operand) for operand in operands])

        def short(operand: _Text) -> _Text:
            if len(operand.text) <= _LONGEST or operand.value is not None:
                return operand
            if operand.text not in lets:
                lets[operand.text] = free_name("t", len(lets), taken)
            return _Text(lets[operand.text])

        value = program.fold(leaf, operator).text
        statements = [language.let.format(name=name, value=text) for text, name in lets.items()]
        if language.columns:
            arguments = ["X", "p"] if program.parameters else ["X"]
            if program.parameters:
                statements.insert(0, language.vector)
            if used:
                is_named = variables[-1] < len(names)
                places = {known[index]: index for index in variables} if is_named else variables
                read = language.columns.format(
                    names=f"[{', '.join(used)}]", columns=places, indices=variables
                )
                self.require_all(read)
                statements.insert(0, read)
            else:
                value = language.rows.format(value=value)
            self.require_all("\n".join(statements))
        else:
            arguments = [*used, *parameters]
            statements[:0] = [
                language.let.format(name=name, value=language.as_float.format(name=name))
                for name in arguments
                if language.as_float
            ]
        comments = [f"{to_text(program, names)}"]
        comments += [
            f"{columns[i]} is the column {known[i]}" for i in variables if columns[i] != known[i]
        ]
        function = self.function("", arguments, statements, value, tuple(lets.values()))
        formula = "\n".join([*map(self.comment, comments), function])
        others = list(self.functions.values())
        parts = [formula, *others] if language.formula_first else [*others, formula]
        body = "\n\n".join(parts) + "\n"
        first = language.first
        if "math." not in body:
            first = first.removeprefix("import math\n")
        blank = "\n\n" if first else ""
        code = Code(f"{first}{blank}{body}{language.last}{chr(10) * bool(language.last)}")
        code.names = {known[index]: columns[index] for index in variables}
        return code

    def comment(self, text: str) -> str:
        # Nothing in a name ends the comment, continues it or turns the direction of the text.
        text = re.sub(r"[^\w .,+\-*/^<>=!()#`]", "_", text)
        if len(text) > _LONGEST_COMMENT:
            text = f"{text[: _LONGEST_COMMENT - 4]} ..."
        return self.language.comment.format(text)

    def function(
        self,
        name: str,
        arguments: Sequence[str],
        statements: Sequence[str],
        value: str,
        lets: Sequence[str] = (),
    ) -> str:
        """Return a function; the formula for no name."""
        language = self.language
        full_name = f"formula_{name}" if name else "formula"
        listed = ", ".join(map(language.argument.format, arguments)) or language.no_argument
        lines = [
            (language.private if name else language.public)
            + language.head.format(name=full_name, arguments=listed),
            *(language.declared.format(listed) for _ in arguments[:1] if language.declared),
            *(
                language.declared_lets.format(", ".join(lets))
                for _ in lets[:1]
                if language.declared_lets
            ),
            *statements,
            language.tail.format(name=full_name, value=value),
        ]
        return "\n".join(self.broken(line) for line in "\n".join(lines).split("\n"))

    def broken(self, line: str) -> str:
        """Break a line that is too long for the language at its spaces."""
        parts = []
        while len(line) > self.language.line:
            space = line.rindex(" ", 0, self.language.line)
            parts.append(line[:space])
            line = line[space + 1 :]
        return self.language.continuation.join([*parts, line])

    def constant(self, value: float) -> _Text:
        size = abs(value)
        if math.isnan(value):
            return _Text(self.language.nan, _ATOM, value)
        text = self.language.infinity if math.isinf(size) else self.language.number(size)
        is_negative = math.copysign(1.0, value) < 0.0
        return _Text(f"-{text}" if is_negative else text, _SUM if is_negative else _ATOM, value)

    def operator(self, row: Operator, operands: Sequence[_Text]) -> _Text:
        if row.name in self.language.templates:
            return self.fill(self.language.templates[row.name], operands)
        node = _parsed(row.kernel)
        words = [part.id for part in ast.walk(node) if isinstance(part, ast.Name)]
        is_plain = "select" not in words and all(
            words.count(name) == 1 or operand.value is not None or _NAME.fullmatch(operand.text)
            for name, operand in zip(row.operands, operands, strict=True)
        )
        if is_plain:
            return self.kernel(node, dict(zip(row.operands, operands, strict=True)))
        return self.call(row.name, operands)

    def kernel(self, node: ast.expr, operands: Mapping[str, _Text]) -> _Text:
        """Render an expression of the kernel language."""
        templates = self.language.templates
        if isinstance(node, ast.Name):
            if node.id in operands:
                return operands[node.id]
            return self.constant(math.inf if node.id == "inf" else math.nan)
        if isinstance(node, ast.Constant):
            return self.constant(float(node.value))  # type: ignore[arg-type]
        if isinstance(node, ast.UnaryOp):
            operand = self.kernel(node.operand, operands)
            if operand.value is not None:
                return self.constant(-operand.value)
            return _Text(f"-{_enclosed(operand, _PRODUCT + 1)}", _SUM)
        if isinstance(node, ast.BinOp):
            symbol = _INFIX[type(node.op)]
            precedence = _SUM if symbol in "+-" else _PRODUCT
            usual = f"{{a:{precedence}}} {symbol} {{b:{precedence + 1}}}"
            parts = [self.kernel(node.left, operands), self.kernel(node.right, operands)]
            return self.fill(templates.get(symbol, usual), parts)
        if isinstance(node, ast.Compare):
            symbol = _COMPARISONS[type(node.ops[0])]
            usual = f"{{a:{_COMPARISON + 1}}} {symbol} {{b:{_COMPARISON + 1}}}"
            parts = [self.kernel(node.left, operands), self.kernel(node.comparators[0], operands)]
            return self.fill(templates.get(symbol, usual), parts)
        assert isinstance(node, ast.Call)
        assert isinstance(node.func, ast.Name)
        arguments = [self.kernel(argument, operands) for argument in node.args]
        name = node.func.id
        if name in templates:
            return self.fill(templates[name], arguments)
        language = self.language
        is_written = name in language.missing or name in language.helpers or name in language.texts
        if not is_written and name in {*KERNEL_FUNCTIONS, "fmod"}:
            slots = ", ".join(f"{{{letter}}}" for letter in "abc"[: len(arguments)])
            return self.fill(f"{language.call.format(name=name)}({slots})", arguments)
        return self.call(name, arguments)

    def call(self, name: str, operands: Sequence[_Text]) -> _Text:
        """Call a function that stands beside the formula."""
        slots = ", ".join(f"{{{letter}}}" for letter in "abc"[: len(operands)])
        return self.fill(f"formula_{name}({slots})", operands)

    def fill(self, template: str, operands: Sequence[_Text]) -> _Text:
        """Fill in a template, and see to the functions that it calls."""
        pieces = []
        first = None
        for literal, letter, wanted, _ in Formatter().parse(template):
            pieces.append(literal)
            if letter is None:
                continue
            operand = operands["abc".index(letter)]
            if wanted:
                pieces.append(_enclosed(operand, int(wanted)))
            elif operand.value is not None:
                pieces.append(self.language.operand.format(operand.text))
            else:
                pieces.append(operand.text)
            if first is None:
                first = int(wanted) if wanted and not literal else _ATOM
        self.require_all(template)
        return _Text("".join(pieces), _ATOM if first is None else first // 10 * 10)

    def require_all(self, text: str) -> None:
        for name in re.findall(r"\bformula_(\w+)\(", text):
            self.require(name)

    def require(self, name: str) -> None:
        """Add a helper function to the output, after the functions that it calls."""
        language = self.language
        if name in self.functions:
            return
        if name in language.texts:
            text = language.texts[name].strip("\n")
            for other in re.findall(r"\bformula_(\w+)\(", text):
                if other != name:
                    self.require(other)
        else:
            body = language.helpers.get(name) or HELPERS.get(name) or OPERATORS[name].kernel
            node = _parsed(body)
            words = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
            operands = [letter for letter in "abc" if letter in words]
            value = self.kernel(node, {letter: _Text(letter) for letter in operands})
            text = self.function(name, operands, [], value.text)
        self.functions[name] = text


@lru_cache(maxsize=512)
def _parsed(kernel: str) -> ast.expr:
    return ast.parse(kernel, mode="eval").body


def _enclosed(operand: _Text, wanted: int) -> str:
    return f"({operand.text})" if operand.precedence < wanted else operand.text


def _identifiers(program: Program, names: Sequence[str], language: Language) -> list[str]:
    """Return names for the columns that a language takes, all different.

    Those that it does not take, or uses itself, become x1, x2, ... by their position.
    """
    words = _words(language)
    count = max(len(names), program.variables)
    kept: dict[int, str] = {}
    taken: set[str] = set()
    for index, name in enumerate(names):
        folded = language.folded(name)
        if _IDENTIFIER.fullmatch(name) and folded not in words and folded not in taken:
            kept[index] = name
            taken.add(folded)
    for index in range(count):
        if index not in kept:
            kept[index] = free_name("x", index, taken)
            taken.add(kept[index])
    return [kept[index] for index in range(count)]


@lru_cache(maxsize=len(LANGUAGES))
def _words(language: Language) -> frozenset[str]:
    """Return the names that a language uses, or that its text may use."""
    first = re.sub("#include <.*>", "", language.first)  # a header is no name
    texts = (language.words, *language.templates.values(), first, language.infinity)
    words = {word for text in texts for word in re.findall(r"\w+", re.sub(r"\{[^}]*\}", " ", text))}
    words |= {*KERNEL_FUNCTIONS, "formula", "formula_module", "formula_value"}
    words |= {f"formula_{name}" for name in (*language.texts, *HELPERS, *OPERATORS)}
    return frozenset(map(language.folded, words))
