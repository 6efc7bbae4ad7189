"""The page ``client/REFERENCE.md``: losses and keywords, from docstrings and signatures."""

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

from warpfit import client, losses, request, searching
from warpfit.sklearn import ParameterOptimizer, SymbolicRegressor

_INTRODUCTION: Final = """\
# Reference

Made by `python tests/bench/figures.py` from the docstrings of the client. `client/README.md` is the
tutorial, `client/OPERATORS.md` the table of operators, `client/LIMITS.md` says what to beware of.

## Losses

`loss=` takes a name of these two tables, a `warpfit.LossFunction`, or the text of a row loss, which
is averaged with the weights: `loss="abs(d)^1.5"`. In formulas f is the prediction, y the target, w
the weight (1 without weights) and d = f - y. A row of weight 0 counts in none.

| name | loss |
|---|---|
"""
_FUNCTIONS_TEXT: Final = """
These are functions of `warpfit.losses`, too, which take other settings: `loss=losses.huber(0.1)`.

| name | settings | loss |
|---|---|---|
"""
_CLOSINGS_TEXT: Final = """
A closing makes the loss of the sum S of the row losses, as in
`LossFunction.parse("abs(d)", closing="sum")`. W is the sum of the weights.

| closing | loss |
|---|---|
"""


def reference_page() -> str:
    parts = [_INTRODUCTION]
    parts += [_row(f"`{loss}`", _fields(losses.Loss)[loss.name][1]) for loss in losses.Loss]
    parts.append(_FUNCTIONS_TEXT)
    for name in losses.BY_NAME:
        function = getattr(losses, name)
        settings = (str(p).partition(":")[0] + _default(p) for p in _parameters(function).values())
        summary = inspect.getdoc(function).partition("\n\nArgs:")[0]
        text = re.sub(r"^Return (the )?", "", summary.replace("\n\n", " "))
        parts.append(_row(f"`{name}`", _code(", ".join(settings)), text[0].upper() + text[1:]))
    parts.append(_CLOSINGS_TEXT)
    closings = _fields(losses.Closing)
    parts += [_row(f"`{closing}`", closings[closing.name][1]) for closing in losses.Closing]
    parts += _method("upload", client.Client.upload)
    parts += _method("evaluate and run", client.Client.evaluate)
    for name in ("optimize", "search", "simplify", "open"):
        parts += _method(name, getattr(client.Client, name))
    for title, enum in (
        *(("Precisions", request.Precision), ("Tiers", request.Tier)),
        *(("Methods of fits", request.Method), ("Accuracies of fits", request.Accuracy)),
        *(("Reasons why a fit ended", request.Reason), ("Forms of a search", searching.Form)),
        ("Reasons why a search ended", searching.SearchReason),
    ):
        parts += _enumeration(title, enum)
    for estimator in (SymbolicRegressor, ParameterOptimizer):
        parts += _estimator(estimator)
    return "".join(parts)


def _method(title: str, method: Any) -> Iterator[str]:
    summary = _plain(inspect.getdoc(method).partition("\n\n")[0])
    yield f"\n## Keywords of {title}\n\n{summary}\n"
    yield "\n| keyword | type | meaning |\n|---|---|---|\n"
    kind = re.fullmatch(r"Unpack\[(\w+)\]", method.__annotations__["options"])[1]
    shown, classes = _parameters(method), [getattr(client, kind)]
    while isinstance(base := classes[0].__orig_bases__[0], type):  # the last one is TypedDict
        classes.insert(0, base)
    for kind in classes:
        for name, (annotation, text) in _fields(kind).items():
            yield _row(f"`{name}{_default(shown[name])}`", _code(annotation), text)


def _enumeration(title: str, enum: Any) -> Iterator[str]:
    yield f"\n## {title}\n\n{_plain(inspect.getdoc(enum))}\n\n| name | meaning |\n|---|---|\n"
    fields = _fields(enum)
    yield from (_row(f"`{member}`", fields[member.name][1]) for member in enum)


def _estimator(estimator: Any) -> Iterator[str]:
    """Write parameters and attributes of an estimator, whose docstring is numpydoc's."""
    text, parameters = inspect.getdoc(estimator), _parameters(estimator)
    summary, *sections = re.split(r"\n\n(\w+)\n-+\n", text)
    yield f"\n## {estimator.__name__}\n\n{_plain(summary)}\n"
    for section, entries in zip(sections[::2], sections[1::2], strict=True):
        yield f"\n| {section.lower()[:-1]} | type | meaning |\n|---|---|---|\n"
        found = re.findall(r"^(\S+) : (.*)\n((?:(?:    .*)?\n)*)", entries.strip() + "\n", re.M)
        assert section != "Parameters" or [name for name, *_ in found] == list(parameters), (
            f"the docstring of {estimator.__name__} lacks parameters, or has others"
        )
        for name, kind, meaning in found:
            default = _default(parameters[name]) if section == "Parameters" else ""
            yield _row(f"`{name}{default}`", kind, inspect.cleandoc(meaning))


@cache
def _fields(kind: Any) -> dict[str, tuple[str, str]]:
    """Return annotation and docstring of each field of a class, as its source has them."""
    tree = ast.parse(Path(inspect.getsourcefile(sys.modules[kind.__module__])).read_text())
    (body,) = (n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == kind.__name__)
    found, last = {}, ""
    for node in body:
        if isinstance(node, ast.AnnAssign):
            last = node.target.id
            found[last] = (ast.unparse(node.annotation), "")
        elif isinstance(node, ast.Assign):
            last = node.targets[0].id
            found[last] = ("", "")
        elif last and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found[last] = (found[last][0], inspect.cleandoc(node.value.value))
    return found


def _parameters(function: Any) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


def _default(parameter: inspect.Parameter) -> str:
    if parameter.default is inspect.Parameter.empty:
        return ""
    given = parameter.default
    return f"={given!s}" if type(given).__name__ == "tuple" else f"={given!r}"


def _plain(text: str) -> str:
    """Return a docstring as Markdown: one kind of quotes."""
    return text.replace("``", "`")


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _row(*cells: str) -> str:
    flat = (" ".join(_plain(cell).split()).replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(flat)} |\n"
