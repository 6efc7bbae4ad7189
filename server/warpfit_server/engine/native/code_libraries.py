"""Libraries of LLVM code: a function is optimised once, together with all that it calls.

Numba optimises each callee with its own callees, makes machine code of it, and copies it into each
caller, which is optimised again: a function below ten others is compiled ten times. But most
functions here are called from compiled code only. So such a callee remains instructions, and the
function that is called from outside is compiled with all of them at once. The results are the
same, and it takes a third to a half of the time. The passes of Numba and LLVM are the usual ones.

Numba's libraries are no public interface. So this is for the versions that it was tested with, and
with others functions are compiled as usual.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import llvmlite.binding as llvm
import numba
from numba.core import codegen, compiler

#: Versions whose libraries are known.
KNOWN_VERSIONS: Final = ((0, 68),)


class _WithParts(codegen.JITCodeLibrary):  # type: ignore[misc]
    """Code of a function, and the libraries of all that it calls, callees first."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.parts: dict[Any, None] = {}

    def add_linking_library(self, library: Any) -> None:
        """Remember a library that is linked with this one, and what that calls."""
        if isinstance(library, _Callee):
            self.parts.update(library.parts)
        self.parts[library] = None


class _Callee(_WithParts):
    """Instructions of a function that is called by others alone."""

    def finalize(self) -> None:
        """Leave the instructions as they are."""
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """Return no address, because there is no machine code."""
        return 0

    @property
    def codegen(self) -> Any:
        """Return what tells machine code where Python's objects are; there is no machine code."""
        return _NoMachineCode()

    def own_module(self) -> Any:
        """Return the instructions of this function alone, to be linked."""
        return super()._get_module_for_linking()

    def _get_module_for_linking(self) -> Any:
        """Return those of all that it calls, too, for libraries that know nothing of parts."""
        whole = self.own_module().clone()
        for part in reversed(self.parts):
            whole.link_in(_module(part), preserve=True)
        return whole


class Whole(_WithParts):
    """Machine code of a function with all that it calls."""

    instructions = ""
    """All instructions as text, before LLVM optimises them for a processor."""

    def finalize(self) -> None:
        """Link all parts, and compile them."""
        for part in reversed(self.parts):  # LLVM takes a callee only if there is a caller
            self._final_module.link_in(_module(part), preserve=True)
        self.instructions = str(self._final_module)
        super().finalize()


class _NoMachineCode:
    """Stands for Numba's code generator."""

    def set_env(self, name: str, environment: Any) -> None:
        """Do nothing: it is for functions that Python calls."""


def _module(part: Any) -> Any:
    return part.own_module() if isinstance(part, _Callee) else part._get_module_for_linking()


def machine_code(generator: Any, name: str, instructions: str) -> Any:
    """Compile the instructions of a `Whole`; return what Numba's cache keeps of a library.

    The passes of LLVM, and so the machine code, are those of `Whole.finalize`.
    """
    library = Whole(generator, name)
    library._final_module = llvm.parse_assembly(instructions)
    library._optimize_final_module()
    library._final_module.verify()
    library._finalized = True
    shared = library._get_module_for_linking().as_bitcode()
    return name, "object", (generator._tm.emit_object(library._final_module), shared)


class WholeCompiler(compiler.Compiler):  # type: ignore[misc]
    """Compiles a function that is called from Python, or at an address, with all that it calls."""

    def compile_extra(self, func: Any) -> Any:
        """Compile a function; what is compiled meanwhile are its callees."""
        generator = self.state.targetctx.codegen()
        create = generator.create_library
        generator.create_library = partial(_Callee, generator)
        try:
            return super().compile_extra(func)
        finally:
            generator.create_library = create

    def define_pipelines(self) -> Any:
        """Return the usual passes, which fill a library of this function."""
        state = self.state
        state.library = Whole(state.targetctx.codegen(), state.func_id.func_qualname)
        state.library.enable_object_caching()
        return super().define_pipelines()


def compiler_options() -> dict[str, Any]:
    """Return the options of ``numba.njit`` for functions that are called from outside."""
    is_known = numba.version_info.short in KNOWN_VERSIONS
    return {"pipeline_class": WholeCompiler} if is_known else {}
