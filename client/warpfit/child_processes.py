"""Python in child processes, which import nothing but the installation.

Python looks for modules in the working directory, too, if it is started with ``-m`` or ``-c``, or
if ``PYTHONPATH`` has an empty entry, as ``$PYTHONPATH:/more`` has where there was none. Whoever can
write to that folder could run programs as the user who starts a server there. So a child's
environment says otherwise, to its own children as well.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypedDict

#: Variables that are lists of folders from which programs load code.
_FOLDERS: Final = ("PYTHONPATH", "LD_LIBRARY_PATH")


class PythonChild(TypedDict):
    """Arguments of ``subprocess.run`` and ``subprocess.Popen``."""

    args: list[str]
    env: dict[str, str]


def python_child(*arguments: str, environment: Mapping[str, str] | None = None) -> PythonChild:
    """Return the arguments of `subprocess` that start Python in a clean environment.

    Args:
        arguments: those of Python, such as ``"-m", "warpfit_server"``.
        environment: the variables to clean; by default those of this process.
    """
    variables = os.environ if environment is None else environment
    return {"args": [sys.executable, *arguments], "env": clean_environment(variables)}


def clean_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables with which Python and the linker load nothing from the working directory.

    Other folders of ``PYTHONPATH`` stay, because a program may have its packages there; they are
    made absolute. If this process ignores variables of Python or the user's own packages (``-I``,
    ``-E``, ``-s``), so does the child.
    """
    cleaned = dict(variables)
    if sys.flags.ignore_environment:
        cleaned = {name: text for name, text in cleaned.items() if not name.startswith("PYTHON")}
    if sys.flags.no_user_site:
        cleaned["PYTHONNOUSERSITE"] = "1"
    for name in set(_FOLDERS) & set(cleaned):
        # `Path` makes "" and "./." the working directory ".". Written in full, that may stay.
        folders = [Path(entry) for entry in cleaned.pop(name).split(os.pathsep)]
        kept = [str(folder.absolute()) for folder in folders if folder != Path()]
        if kept:
            cleaned[name] = os.pathsep.join(kept)
    cleaned["PYTHONSAFEPATH"] = "1"
    return cleaned
