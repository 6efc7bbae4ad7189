"""The tables of ``client/OPERATORS.md``, from the operator table and the table of bounds."""

import sys
from collections.abc import Iterator
from pathlib import Path

from tables.layout import escaped, table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from support.engines.accuracy import BOUNDS, Bound
from warpfit.ops import OPERATORS, Operator


def operator_meanings() -> Iterator[str]:
    rows = (
        (row.name, f"`{text_form(row)}`", str(row.code), str(row.arity), row.notes)
        for row in OPERATORS.values()
    )
    return table("operator | text | code | operands | notes", map(escaped, rows))


def operator_bounds() -> Iterator[str]:
    head, rows = "operator | precise, CPU | precise, CUDA | fast, CPU | fast, CUDA", []
    for name in OPERATORS:
        own = BOUNDS[name]
        each = (own.precise_cpu, own.precise_cuda, own.fast_cpu, own.fast_cuda)
        rows.append(escaped([name, *map(_bound_text, each)]))
    return table(head, rows)


def operator_slopes() -> Iterator[str]:
    rows = (
        (row.name, ", ".join(f"`{text}`" for text in row.derivative), row.slope_notes)
        for row in OPERATORS.values()
    )
    return table("operator | derivative by each operand | conventions", map(escaped, rows))


def text_form(row: Operator) -> str:
    """Return an operator over its operands a, b, c in the text language."""
    if row.symbol is None:
        return f"{row.name}({', '.join(row.operands)})"
    if row.arity == 2:
        return f"a {row.symbol} b"
    return f"{row.symbol} a" if row.symbol.isalpha() else f"{row.symbol}a"


def _bound_text(bound: Bound) -> str:
    """Write one bound in words."""
    simple = bound.ulp.replace(".", "").isdigit()
    text = f"{bound.ulp} ulp" if simple else f"`{bound.ulp}` ulp"
    if bound.absolute != "0":
        text += f" or `{bound.absolute}`"
    return f"{text} where `{bound.where}`" if bound.where else text
