"""The page ``client/OPERATORS.md``, from the operator table and the table of bounds."""

import sys
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from support.engines.accuracy import BOUNDS, Bound
from warpfit.ops import OPERATORS, Operator

_INTRODUCTION: Final = """\
# Operators

Made by `python tests/bench/figures.py` from the operator table (`warpfit/ops.py`) and the table of
bounds (`tests/support/engines/accuracy.py`); the tests of every engine read the same two, and
fail where a bound is not kept.

## Meaning

Every operator means what NumPy computes in float64, but for the threshold 0.001 of `pdiv`, `plog`
and `pinv`, which is rounded to the data's type. In the text language `**` is `^`.

| operator | text | code | operands | notes |
|---|---|---|---|---|
"""
_BOUNDS_TEXT: Final = """
## Bounds of errors

The error of a result is its distance from the exact value for the operands as they are (for `fma`,
from NumPy's float64 `a * b + c`), rounded to the data's type. It is counted in ulp (units in the
last place of that value), so that 0 ulp is the nearest number; "or" names an absolute distance that
is allowed where it is more. `r` is the exact value. Where a condition fails, nothing is promised.

* **Precise mode** (float32 and float64) gives NaN, infinities and subnormal numbers where NumPy
  gives them.
* **Fast mode on a CPU** (float32) does so, too.
* **Fast mode on a GPU** (float32) takes subnormal operands and results for 0, and promises nothing
  for infinite operands and results.
* In fast mode a product may go into a sum without being rounded first. float64 is always precise.

The bounds of fast mode on a GPU are what NVIDIA documents for the functions and instructions used,
or follow from it.

| operator | precise, CPU | precise, CUDA | fast, CPU | fast, CUDA |
|---|---|---|---|---|
"""
_SLOPES_TEXT: Final = """
## Derivatives

The same texts serve the reference (`warpfit.expressions.reference`), the CPU engine and the
CUDA engine. `r` is the operator's value, `digamma` the derivative of `lgamma`. Three rules hold for
all operators:

* A derivative is 0 where it does not exist or is not unique. So every function of `abs(a)` has
  derivative 0 at `a = 0`: `logabs(p1)` and `log(abs(p1))` have the same derivatives. Infinite and
  one-sided limits stay: the derivative of `sqrt(p1)` at 0 is inf.
* In the chain rule 0 times anything is 0, NaN and infinities included: what is not used, such as
  the other branch of `where`, has no influence.
* A power with a literal exponent -2, -1, 1, 2, 3 or 4 may be differentiated as a product, which
  gives the same numbers but where `r` overflows or underflows and the derivative does not.

| operator | derivative by each operand | conventions |
|---|---|---|
"""


def operator_page() -> str:
    meanings, bounds, slopes = _INTRODUCTION, _BOUNDS_TEXT, _SLOPES_TEXT
    for row in OPERATORS.values():
        numbers = str(row.code), str(row.arity)
        meanings += _line(row.name, f"`{text_form(row)}`", *numbers, row.notes)
        own = BOUNDS[row.name]
        each = (own.precise_cpu, own.precise_cuda, own.fast_cpu, own.fast_cuda)
        bounds += _line(row.name, *map(_bound_text, each))
        texts = ", ".join(f"`{text}`" for text in row.derivative)
        slopes += _line(row.name, texts, row.slope_notes)
    return meanings + bounds + slopes


def text_form(row: Operator) -> str:
    """Return an operator over its operands a, b, c in the text language."""
    if row.symbol is None:
        return f"{row.name}({', '.join(row.operands)})"
    if row.arity == 2:
        return f"a {row.symbol} b"
    return f"{row.symbol} a" if row.symbol.isalpha() else f"{row.symbol}a"


def _line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _bound_text(bound: Bound) -> str:
    """Write one bound in words."""
    simple = bound.ulp.replace(".", "").isdigit()
    text = f"{bound.ulp} ulp" if simple else f"`{bound.ulp}` ulp"
    if bound.absolute != "0":
        text += f" or `{bound.absolute}`"
    return f"{text} where `{bound.where}`" if bound.where else text
