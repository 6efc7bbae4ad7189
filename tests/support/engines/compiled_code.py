"""The functions that Numba has compiled for this process, or loaded."""

import sys

from numba.core.dispatcher import Dispatcher


def compiled() -> set[tuple[str, str]]:
    """Names of the server's functions that have machine code, each with types of arguments."""
    return {
        (function.__qualname__, str(types))
        for name, module in list(sys.modules.items())
        if name.startswith("warpfit_server")
        for function in vars(module).values()
        if isinstance(function, Dispatcher)
        for types in function.overloads
    }
