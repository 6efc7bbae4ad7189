"""The folders of the product: their duties, and that imports point down.

A folder imports those that stand before it in its list. A module at the top of a package, such as
`warpfit_server.server`, assembles what is below and may import everything.
"""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = {"warpfit": ROOT / "client/warpfit", "warpfit_server": ROOT / "server/warpfit_server"}
#: Each folder imports folders that stand before it; a file stands for itself.
ORDERS = {
    "warpfit_server": "shared_batch limits machine compile_cache logs config tenants admission ipc "
    "dataset_store engine rpc processes",
    "warpfit_server.engine": "native interface sum_tree lowering evaluation "
    "autodiff fit search cpu cuda scheduler runner loop",
    "warpfit_server.engine.cuda": "runtime interpreter derivatives jit colony",
    "warpfit": "errors expressions frontends formulas codec transport calls sklearn cli",
}


#: All modules by name, without the generated ones.
MODULES: dict[str, Path] = {}
for package, folder in PACKAGES.items():
    for path in folder.rglob("*.py"):
        parts = package, *path.relative_to(folder).with_suffix("").parts
        MODULES[".".join(parts).removesuffix(".__init__")] = path
MODULES = {name: path for name, path in MODULES.items() if ".v1" not in name}


@cache
def nodes(module: str) -> list[ast.AST]:
    """Return the imports and conditions of a module; other expressions are not looked at."""
    found, left = [], [ast.parse(MODULES[module].read_text())]
    while left:
        node = left.pop()
        if isinstance(node, ast.Import | ast.ImportFrom | ast.If):
            found.append(node)
        for name in ("body", "orelse", "handlers", "finalbody", "cases"):
            left += getattr(node, name, []) if not isinstance(node, ast.expr) else []
    return found


@cache
def imports(module: str, with_types: bool = False) -> set[str]:
    """Modules that one imports, wherever in it; those for type checkers only if asked for."""
    found, for_types = set(), set()
    for node in () if with_types else nodes(module):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for_types |= {*ast.walk(node)}
    for node in nodes(module):
        if node in for_types:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & set(MODULES) - {module}


def test_no_module_imports_itself_by_way_of_others():
    """Not even for its types. Package folders are not followed: importing a module loads those
    above it first."""
    done, circles = set(), []

    def follow(name, way):
        if name in way:
            circles.append([*way[way.index(name) :], name])
        elif name not in done:
            for imported in sorted(imports(name, with_types=True)):
                follow(imported, [*way, name])
            done.add(name)

    for name in sorted(MODULES):
        follow(name, [])
    assert circles == []


def test_the_client_imports_nothing_of_the_server():
    """Not even for types, or inside of functions: the server is built on the client."""
    own = [name for name in MODULES if name.split(".")[0] == "warpfit"]
    nodes = [(n, node) for n in own for node in ast.walk(ast.parse(MODULES[n].read_text()))]
    froms = [(name, node.module or "") for name, node in nodes if isinstance(node, ast.ImportFrom)]
    assert [each for each in froms if each[1].startswith("warpfit_server")] == []


@pytest.mark.parametrize("package", ORDERS)
def test_imports_point_down(package):
    order = ORDERS[package].split()

    def place(name):
        part = name.removeprefix(f"{package}.").split(".")[0]
        return order.index(part) if name.startswith(f"{package}.") and part in order else None

    pairs = [(name, imported) for name in MODULES for imported in imports(name)]
    known = [pair for pair in pairs if None not in map(place, pair)]
    assert [(name, imported) for name, imported in known if place(imported) > place(name)] == []


def test_the_main_process_does_not_load_grpc():
    """It answers no calls, and starts in half the time without it."""
    code = "import sys, warpfit_server.server; print({'grpc', 'google.protobuf'} & {*sys.modules})"
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, check=True).stdout == b"set()\n"


def test_folders_say_what_they_are_for():
    for folder in {path.parent for path in MODULES.values()}:
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), folder
