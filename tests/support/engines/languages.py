"""Runs programs that were written in another language, all of them in one process."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from warpfit.formulas.code import Code

Floats = NDArray[np.float64]

#: The commands that a language needs, the first of which is looked for.
COMMANDS = {
    **{"c": "gcc", "c++": "g++", "cuda": "g++", "fortran": "gfortran", "rust": "rustc"},
    **{"javascript": "node", "r": "Rscript", "octave": "octave"},
}
_LIBRARY = {
    "c": ["gcc", "-x", "c", "-O0", "-shared", "-fPIC", "-Wall", "-Wno-unused", "-lm"],
    "c++": ["g++", "-x", "c++", "-O0", "-shared", "-fPIC", "-Wall"],
    # Text of CUDA is C++ but for these words.
    "cuda": [
        *("g++", "-x", "c++", "-O0", "-shared", "-fPIC", "-D__host__=", "-D__device__="),
        *("-include", "cmath"),
    ],
    "fortran": ["gfortran", "-x", "f95", "-O0", "-shared", "-fPIC"],
    "rust": ["rustc", "--crate-type", "cdylib", "--edition", "2021", "-A", "warnings"],
}


def run(
    language: str,
    codes: Sequence[Code],
    parameters: Sequence[Sequence[float]],
    columns: Floats,
    folder: Path,
) -> Floats:
    """Return the values of functions of x1, x2, ... on columns [variables, rows]; [codes, rows]."""
    texts, calls = [], []
    for index, (code, vector) in enumerate(zip(codes, parameters, strict=True)):
        texts.append(re.sub(r"\bformula(?=\b|_)", f"f{index}", code))
        indices = [int(name[1:]) - 1 for name in code.names]
        calls.append((f"f{index}", indices, list(vector)))
    if language in ("numpy", "jax", "torch", "python"):
        return _in_python(language, texts, calls, columns)
    values = np.empty((len(codes), columns.shape[1]))
    if language in _LIBRARY:
        source, library = folder / f"source_{language}", folder / f"lib_{language}.so"
        source.write_text("\n".join(texts) + _driver(language, calls))
        command = [*_LIBRARY[language], "-o", str(library), str(source)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:3000]
        rows = ctypes.c_long(columns.shape[1])
        given = np.ascontiguousarray(columns)
        ctypes.CDLL(str(library)).run(given.ctypes, rows, values.ctypes)
        return values
    np.ascontiguousarray(columns).tofile(folder / "in.bin")
    script = folder / f"script_{language}"
    script.write_text(_script(language, texts, calls, columns.shape))
    arguments = ["--norc", "--quiet"] if language == "octave" else []
    command = [COMMANDS[language], *arguments, str(script)]
    settings = {**os.environ, "R_ENABLE_JIT": "0"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=settings)
    assert done.returncode == 0, (done.stderr + done.stdout)[-3000:]
    return np.fromfile(folder / "out.bin").reshape(values.shape)


def _in_python(language, texts, calls, columns):
    values = []
    for text, (name, indices, vector) in zip(texts, calls, strict=True):
        namespace: dict = {}
        exec(compile(text, language, "exec"), namespace)
        function = namespace[name]
        if language == "python":
            rows = (columns[index].tolist() for index in indices)
            each = zip(*rows, strict=True) if indices else [()] * columns.shape[1]
            found = [function(*row, *vector) for row in each]
            assert all(type(number) is float for number in found), text
        else:
            table = columns.T
            if language == "torch":
                table = importlib.import_module("torch").from_numpy(table.copy())
            found = np.asarray(function(table, vector) if vector else function(table))
            assert (found.dtype, found.shape) == (np.float64, columns[0].shape), text
        values.append(found)
    return np.array(values)


def _number(value: float, language: str) -> str:
    return repr(value).replace("e", "d") if language == "fortran" else repr(value)


def _driver(language: str, calls) -> str:
    lines = []
    for position, (name, indices, vector) in enumerate(calls):
        numbers = [
            f"{_number(v, language)}{'d0' * (language == 'fortran' and 'e' not in repr(v))}"
            for v in vector
        ]
        if language == "fortran":
            arguments = ", &\n".join([*(f"x(:, {i + 1})" for i in indices), *numbers])
            lines.append(f"  out(:, {position + 1}) = {name}({arguments})")
        else:
            cell = "*x.add({} * rows + r)" if language == "rust" else "x[{} * rows + r]"
            arguments = ", ".join([*(cell.format(i) for i in indices), *numbers])
            target = cell.format(position).replace("x", "out", 1)
            lines.append(f"{target} = {name}({arguments});")
    body = "\n".join(lines)
    if language == "rust":
        head = 'pub unsafe extern "C" fn run(x: *const f64, rows: usize, out: *mut f64) {'
        return f"\n#[no_mangle]\n{head}\nfor r in 0..rows {{\n{body}\n}}\n}}\n"
    if language == "fortran":
        uses = "\n".join(f"  use {name}_module" for name, _, _ in calls)
        return (
            f"\nsubroutine run(x, rows, out) bind(c)\n  use, intrinsic :: iso_c_binding\n{uses}\n"
            "  integer(c_long), value :: rows\n  real(c_double) :: x(rows, *)\n"
            f"  real(c_double) :: out(rows, {len(calls)})\n{body}\nend subroutine\n"
        )
    linkage = 'extern "C" ' if language != "c" else ""
    head = f"\n{linkage}void run(const double *x, long rows, double *out) {{"
    return f"{head}\nfor (long r = 0; r < rows; r++) {{\n{body}\n}}\n}}\n"


def _script(language: str, texts, calls, shape) -> str:
    variables, rows = shape
    begin = {"javascript": 0, "r": 1, "octave": 1}[language]
    column = {"javascript": "x[{}][r]", "r": "x[, {}]", "octave": "x(:, {})"}[language]
    lines = []
    for name, indices, vector in calls:
        arguments = ", ".join([*(column.format(i + begin) for i in indices), *map(repr, vector)])
        lines.append(
            {
                "javascript": f"for (let r = 0; r < {rows}; r++) out.push({name}({arguments}));",
                "r": f"out[[{len(lines) + 1}]] <- rep_len({name}({arguments}), {rows})",
                "octave": f"out = [out; zeros({rows}, 1) + {name}({arguments})];",
            }[language]
        )
    whole, body = "\n".join(texts), "\n".join(lines)
    if language == "javascript":
        return (
            "'use strict';\nconst fs = require('fs');\nconst bytes = fs.readFileSync('in.bin');\n"
            "const all = new Float64Array(bytes.buffer, bytes.byteOffset, bytes.length / 8);\n"
            f"const x = [...Array({variables}).keys()]"
            f".map(i => all.subarray(i * {rows}, (i + 1) * {rows}));\n"
            f"const out = [];\n{whole}\n{body}\n"
            "fs.writeFileSync('out.bin', Buffer.from(new Float64Array(out).buffer));\n"
        )
    if language == "r":
        return (
            f"options(warn = -1)\n{whole}\n"
            f"x <- matrix(readBin('in.bin', 'double', {variables * rows}), ncol = {variables})\n"
            f"out <- list()\n{body}\nwriteBin(as.double(unlist(out)), 'out.bin')\n"
        )
    return (
        f"1;\n{whole}\nfile = fopen('in.bin');\n"
        f"x = reshape(fread(file, {variables * rows}, 'double'), {rows}, {variables});\n"
        f"out = [];\n{body}\n"
        "file = fopen('out.bin', 'w');\nfwrite(file, out, 'double');\nfclose(file);\n"
    )


def available(language: str) -> bool:
    """Tell whether the text of a language can be run here."""
    if language in ("jax", "torch"):
        return importlib.util.find_spec(language) is not None
    return language in ("numpy", "python") or shutil.which(COMMANDS[language]) is not None
