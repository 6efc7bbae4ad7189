"""Run a benchmark: ``python tests/bench/run.py NAME [flags]``; without a name, list them all.

A name is that of a program here, with its folder, such as ``gpu/kernels``.
"""

import ast
import importlib
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def programs() -> dict[str, Path]:
    """Return the benchmarks by name: the files that have a main function, and measure something."""
    files = (path for path in sorted(HERE.rglob("*.py")) if "\ndef main(" in path.read_text())
    named = {path.relative_to(HERE).with_suffix("").as_posix(): path for path in files}
    return {name: path for name, path in named.items() if name not in ("run", "figures")}


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
    sys.exit(importlib.import_module(name.replace("/", ".")).main())


if __name__ == "__main__":
    main()
