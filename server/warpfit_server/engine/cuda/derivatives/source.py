"""CUDA C++ source of the interpreter of derivatives, generated from the operator table."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit.ops import OPERATORS
from warpfit_server.engine.autodiff import CODE_COUNT, PRODUCT_CODE, partial_kernels
from warpfit_server.engine.cuda.interpreter.source import (
    Variant,
    device_function,
    is_costly,
    is_direct,
    operator_functions,
    source_of,
)
from warpfit_server.engine.cuda.math.prelude import operator_source, precise_calls, render
from warpfit_server.engine.cuda.runtime.compiler import CudaSource
from warpfit_server.engine.cuda.runtime.translation import translate
from warpfit_server.engine.fit import (
    levenberg_marquardt,
    linear_model,
    probes,
    searches,
    triangles,
)
from warpfit_server.engine.interface import Arithmetic

#: Warps of a block, and the least blocks of a multiprocessor.
WARPS: Final = 8
BLOCKS: Final = 2
#: Bytes of a column in a block of rows, whose sums are partial sums.
_BLOCK_BYTES: Final = 16384
#: Bytes of an invariant on the device, as many as a pack has.
INVARIANT_BYTES: Final = 16
#: Threads of a block that combines the partial sums of a job.
COMBINE_THREADS: Final = 128
#: Labels of an instruction with two operands.
_FORMS: Final = 6
_OPERANDS: Final = ("t", "u", "v")
#: Constants of the searches that fit.cu mentions.
_NAMES_IN_FIT: Final = (
    "RUNNING",
    "REASON",
    "LEAVES_FLOAT32",
    "ITERATIONS",
    "EVALUATIONS",
    "FACTOR",
    "WANTED",
    "TRIAL",
)


class _Case(NamedTuple):
    """The case, or cases, of the switch for one device function."""

    function: str
    arity: int
    macro: str
    """Kind of the macro in derivatives.cu that writes them."""

    @classmethod
    def of(cls, function: str, arity: int, expression: str, variant: Variant) -> _Case:
        """Return the case of a function that returns an expression."""
        if is_costly(expression, variant):
            return cls(function, arity, "COSTLY")
        return cls(function, arity, "DIRECT" if arity == 2 and is_direct(expression) else "CHEAP")


def derivative_source(variant: Variant, *, spills: bool = False) -> CudaSource:
    """Return the kernels of one variant.

    If it ``spills``, intermediate results are in global memory, for programs that need more than
    shared memory has.
    """
    arithmetic, table = variant.arithmetic, labels()
    functions, found = operator_functions(arithmetic), {}
    for row in OPERATORS.values():
        expression = operator_source(row, arithmetic)
        found[int(table[row.code])] = _Case.of(f"op_{row.name}", row.arity, expression, variant)
    for kernel in partial_kernels():
        label, arity = int(table[kernel.code]), kernel.arity + kernel.scaled
        if label in found:
            continue
        operands = list("abc"[: kernel.arity])
        expression = partial_source(kernel.source, arithmetic)
        found[label] = _Case.of(kernel.name, arity, expression, variant)
        if kernel.scaled:
            operands, expression = ["slope", *operands], f"product(slope, {expression})"
        functions.append(device_function(kernel.name, operands, expression))
    found[int(table[PRODUCT_CODE])] = _Case("product", 2, "DIRECT")
    cases = sorted(found.items())
    parts = {
        "OPERATORS": functions,
        "CASES": [
            f"      {case.macro}_{case.arity}({label}, {case.function})" for label, case in cases
        ],
        "INVARIANT_CASES": [
            f"      case {label}: t = {case.function}({', '.join(_OPERANDS[: case.arity])}); break;"
            for label, case in cases
        ],
    }
    definitions: dict[str, int | str] = {"FAR": int(spills), "WARPS": WARPS}
    definitions |= {"BLOCK_TILES": block_tiles(variant), "COMBINE_THREADS": COMBINE_THREADS}
    definitions |= {"BLOCKS_AT_LEAST": BLOCKS, "INVARIANT_BYTES": INVARIANT_BYTES}
    text = template("derivatives.cu") + template("linearise.cu")
    text = source_of(variant, definitions, text, parts) + template("statistics.cu")
    if not spills:
        text += fit_source()
    last, case = cases[-1]
    return CudaSource(text, variant.options, last + (_FORMS if case.arity == 2 else 1))


@cache
def fit_source() -> str:
    """Return the kernel that runs small searches, with the translation of what judges a trial.

    It follows linearise.cu.
    """
    numbers = {"FIT_VECTORS": searches.VECTORS, "FIT_NUMBERS": searches.NUMBERS}
    numbers |= {"FIT_COUNTERS": searches.COUNTERS}
    numbers |= {name: getattr(searches, name) for name in _NAMES_IN_FIT}
    defines = [f"#define {name} {number}\n" for name, number in numbers.items()]
    advance = translate(
        [levenberg_marquardt.advance_one],
        # A search with an orthogonal factor leaves the device, and one that is cancelled, too.
        never={"Model": ("factored",), "Workspace": ("cancelled",)},
        # In each place where they stand they would take longer to be compiled.
        called=[
            levenberg_marquardt.advance_one,
            *(linear_model.solve_step, linear_model.is_minimum, linear_model.is_exact),
            *(linear_model.find_roles, linear_model.promised_decrease, probes.begin_probe),
            *(linear_model.steepest_cosine, triangles.factorise, linear_model.are_usable),
        ],
    )
    return advance + "".join(defines) + template("fit.cu")


def block_tiles(variant: Variant) -> int:
    """Return the number of tiles of a block of rows, a power of two."""
    return _BLOCK_BYTES // (variant.tile * variant.dtype.itemsize)


def template(name: str) -> str:
    """Return the text of a file of CUDA C++ of this package."""
    return resources.files(__package__).joinpath(name).read_text()


@cache
def labels() -> NDArray[np.int64]:
    """Return the case label of each instruction by code, int64 [CODE_COUNT]; 0 if it does nothing.

    Derivatives with the same text share a label. An instruction with two operands has `_FORMS`
    labels: two for each kind of place of the second one, of which the latter has the operands the
    other way round.
    """
    table = np.zeros(CODE_COUNT, dtype=np.int64)
    known: dict[object, int] = {}
    end = 1
    instructions: list[tuple[int, object, int]] = [
        *((row.code, row.name, row.arity) for row in OPERATORS.values()),
        *(
            (one.code, (one.source, one.scaled), one.arity + one.scaled)
            for one in partial_kernels()
        ),
        (PRODUCT_CODE, "product", 2),
    ]
    for code, identity, arity in instructions:
        if identity not in known:
            known[identity] = end
            end += _FORMS if arity == 2 else 1
        table[code] = known[identity]
    return table


#: The approximate functions that replace others in the operator table, by these.
_FAST: Final = {
    exact[1]: fast[1]
    for row in OPERATORS.values()
    if (exact := re.fullmatch(r"(\w+)\(a(?:, b)?\)", row.kernel))
    and (fast := re.fullmatch(r"(\w+)\(a(?:, b)?\)", row.cuda_fast or ""))
}


def partial_source(source: str, arithmetic: Arithmetic) -> str:
    """Translate a derivative to CUDA C++, with approximate functions in fast arithmetic."""
    if not arithmetic.is_fast:
        return render(precise_calls(source), arithmetic.real)
    source = re.sub(r"\b(\w+)\(", lambda call: f"{_FAST.get(call[1], call[1])}(", source)
    return render(source, arithmetic.real)
