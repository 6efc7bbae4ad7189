"""The tables of ``client/REFERENCE.md``, from docstrings and signatures."""

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from functools import cache
from itertools import repeat
from pathlib import Path
from typing import Any

from tables.layout import escaped, table

from warpfit import client, losses, request, searching
from warpfit.sklearn import ParameterOptimizer, SymbolicRegressor


def loss_names() -> Iterator[str]:
    return _members("name | loss", losses.Loss)


def loss_functions() -> Iterator[str]:
    rows = []
    for name in losses.BY_NAME:
        function = getattr(losses, name)
        settings = (str(p).partition(":")[0] + _default(p) for p in _parameters(function).values())
        summary = inspect.getdoc(function).partition("\n\nArgs:")[0]
        text = re.sub(r"^Return (the )?", "", summary.replace("\n\n", " "))
        rows.append(_row(f"`{name}`", _code(", ".join(settings)), text[0].upper() + text[1:]))
    return table("name | settings | loss", rows)


def loss_closings() -> Iterator[str]:
    return _members("closing | loss", losses.Closing)


def keywords() -> Iterator[str]:
    """Keywords of methods, values of those that have few, and parameters of estimators."""
    yield from _method("upload", client.Client.upload)
    yield from _method("evaluate and run", client.Client.evaluate)
    for name in ("optimize", "search", "simplify", "open"):
        yield from _method(name, getattr(client.Client, name))
    for title, enum in (
        *(("Precisions", request.Precision), ("Tiers", request.Tier)),
        *(("Methods of fits", request.Method), ("Accuracies of fits", request.Accuracy)),
        *(("Reasons why a fit ended", request.Reason), ("Forms of a search", searching.Form)),
        ("Reasons why a search ended", searching.SearchReason),
    ):
        yield f"\n## {title}\n\n{_plain(inspect.getdoc(enum))}\n"
        yield from _members("name | meaning", enum)
    for estimator in (SymbolicRegressor, ParameterOptimizer):
        yield from _estimator(estimator)


def _members(head: str, enum: Any) -> Iterator[str]:
    return table(head, [_row(f"`{one}`", _fields(enum)[one.name][1]) for one in enum])


def _method(title: str, method: Any) -> Iterator[str]:
    summary = _plain(inspect.getdoc(method).partition("\n\n")[0])
    yield f"\n## Keywords of {title}\n\n{summary}\n"
    kind = re.fullmatch(r"Unpack\[(\w+)\]", method.__annotations__["options"])[1]
    shown, classes = _parameters(method), [getattr(client, kind)]
    while isinstance(base := classes[0].__orig_bases__[0], type):  # the last one is TypedDict
        classes.insert(0, base)
    given = [(name, *field) for kind in classes for name, field in _fields(kind).items()]
    rows = [_row(f"`{n}{_default(shown[n])}`", _code(kind), text) for n, kind, text in given]
    yield from table("keyword | type | meaning", rows)


def _estimator(estimator: Any) -> Iterator[str]:
    """Write parameters and attributes of an estimator, whose docstring is numpydoc's."""
    text, parameters = inspect.getdoc(estimator), _parameters(estimator)
    summary, *sections = re.split(r"\n\n(\w+)\n-+\n", text)
    yield f"\n## {estimator.__name__}\n\n{_plain(summary)}"
    for section, entries in zip(sections[::2], sections[1::2], strict=True):
        found = re.findall(r"^(\S+) : (.*)\n((?:(?:    .*)?\n)*)", entries.strip() + "\n", re.M)
        assert section != "Parameters" or [name for name, *_ in found] == list(parameters), (
            f"the docstring of {estimator.__name__} lacks parameters, or has others"
        )
        defaults = map(_default, parameters.values()) if section == "Parameters" else repeat("")
        rows = [
            _row(f"`{name}{default}`", kind, inspect.cleandoc(meaning))
            for (name, kind, meaning), default in zip(found, defaults, strict=False)
        ]
        yield ""
        yield from table(f"{section.lower()[:-1]} | type | meaning", rows)


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
    return escaped(" ".join(_plain(cell).split()) for cell in cells)
