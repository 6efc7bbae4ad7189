"""Run a benchmark: ``python tests/bench/run.py NAME [flags]``; without a name, list them all.

A name is that of a program here, with its folder, such as ``gpu/kernels``.
"""

import ast
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDERS = (".", "cpu", "gpu", "search", "service")
#: They measure nothing.
OTHERS = ("run", "figures")


def programs() -> dict[str, Path]:
    """Return the benchmarks by name: the files that have a main function."""
    files = (path for folder in FOLDERS for path in sorted((HERE / folder).glob("*.py")))
    return {
        str(path.relative_to(HERE).with_suffix("")): path
        for path in files
        if path.stem not in OTHERS and "\ndef main(" in path.read_text()
    }


def main() -> None:
    """Run the program that the first word names, or print what each one measures."""
    known = programs()
    name = sys.argv[1] if sys.argv[1:] else ""
    if name not in known:
        for each, path in known.items():
            summary = ast.get_docstring(ast.parse(path.read_text())) or ""
            print(f"{each:28}{summary.splitlines()[0]}")
        sys.exit(f"there is no benchmark {name!r}" if name else 0)
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    del sys.argv[0]
    runpy.run_path(str(known[name]), run_name="__main__")


if __name__ == "__main__":
    main()
