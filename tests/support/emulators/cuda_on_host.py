"""CUDA C++ compiled for this machine; a test is skipped if it has no C++ compiler."""

import ctypes
import hashlib
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from warpfit_server.compile_cache import default_cache_directory, find_or_make

_OPTIONS = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-fno-exceptions", "-fno-rtti"]
_WRAPS = ["-fwrapv", "-ffp-contract=off"]
_TRAPS = ["-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"]
_SHARED = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?(\w[\w ]*?) (\w+)\[\];")
_PTX = re.compile(r'asm(?: volatile)?\(\s*"([^" ]*) [^"]*"([^;]*)\);')
_OPERAND = re.compile(r'"=?[frdl]"\(((?:[^()]|\([^()]*\))*)\)')
_KERNEL = re.compile(
    r'extern "C" __global__ void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\((.*?)\)\s*\{', re.DOTALL
)


def compile_for_host(source: str, *, wraps: bool = False) -> ctypes.CDLL:
    """Compile CUDA C++ for this machine, once for all processes that share a cache directory.

    `launch_on_host` runs its kernels. Undefined behaviour ends the process, unless integers are to
    wrap as on a device.
    """
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        pytest.skip("no C++ compiler")
    words = Path(__file__).with_name("cuda_on_host.h").read_text()
    source = _SHARED.sub(r"\1* const \2 = (\1*)dynamic_shared;", source)
    text = words + _PTX.sub(_statement, source) + _entries(source)
    command = [compiler, *_OPTIONS, *(_WRAPS if wraps else _TRAPS), "-Wl,-Bsymbolic"]
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True)
    key = hashlib.sha256("\0".join([version.stdout, *command, text]).encode()).hexdigest()
    with tempfile.TemporaryDirectory() as folder:
        path, library = Path(folder, "kernels.cpp"), Path(folder, "kernels.so")

        def compiled() -> bytes:
            path.write_text(text)
            subprocess.run([*command, "-o", library, path], check=True)
            return library.read_bytes()

        place = default_cache_directory() / "cuda-on-host" / f"{key}.so"
        library.write_bytes(find_or_make(place, compiled))
        return ctypes.CDLL(str(library))


def launch_on_host(library, kernel, grid, threads, arguments, shared=0):
    """Run a kernel with arguments at these addresses; return False for what no device launches."""
    sizes = ((ctypes.c_uint * 3)(*size) for size in (grid, threads))
    given = (ctypes.c_void_p * len(arguments))(*arguments)
    entry = getattr(library, f"enter_{kernel}")
    return not library.launch_kernel(entry, *sizes, shared, given)


def _statement(ptx: re.Match[str]) -> str:
    """Translate an instruction."""
    instruction, operands = ptx[1], _OPERAND.findall(ptx[2])
    if instruction == "mov.b32":
        return "{} = {};".format(*operands)
    name, *modifiers = instruction.split(".")
    if "approx" in modifiers:
        target, operand = operands
        return f"{target} = approx(host_{name}, {operand});"
    kind = "float" if instruction.endswith("f32") else "double"
    assert name in ("ld", "st"), f"{instruction} is not known here"
    place = operands.pop(-1 if name == "ld" else 0)
    start = "dynamic_shared + " if "shared" in instruction else ""
    cells = [f"(({kind}*)({start}({place})))[{k}]" for k in range(len(operands))]
    pairs = zip(operands, cells, strict=True) if name == "ld" else zip(cells, operands, strict=True)
    return " ".join(f"{target} = {value};" for target, value in pairs)


def kernels_of(source: str) -> dict[str, list[str]]:
    """Return the types of each kernel's parameters, by its name."""
    found = {}
    for name, declared in _KERNEL.findall(source):
        parameters = declared.replace("const __grid_constant__ ", "").split(",")
        found[name] = [parameter.strip().rpartition(" ")[0] for parameter in parameters]
    return found


def _entries(source: str) -> str:
    """Write a function for each kernel that takes the addresses of its arguments."""
    text = ""
    for name, kinds in kernels_of(source).items():
        arguments = ", ".join(f"*({kind}*)given[{k}]" for k, kind in enumerate(kinds))
        text += f'\nextern "C" void enter_{name}(void** given) {{ {name}({arguments}); }}'
    return text
