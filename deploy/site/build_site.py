"""Build the documentation site of the Markdown that the repository has.

    pip install -e '.[site]'
    python deploy/site/build_site.py            # writes build/site
    python deploy/site/build_site.py --serve    # serves it on loopback, for writing

The documents stay where the repository needs them. They are copied, with links to files of the
repository made links to pages or to GitHub, and names of documents in backticks made links. MkDocs
builds them with a list of contents, search and the reference of the docstrings; its strict mode
refuses links to pages and headings that there are not. Examples are pages with their programs.
"""

from __future__ import annotations

import argparse
import os
import posixpath
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final

import yaml

ROOT: Final = Path(__file__).resolve().parents[2]
SITE: Final = Path(__file__).resolve().parent
PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCES: Final = f"{PROJECT['urls']['Repository']}/blob/main/"
#: The pages under their headings: title, and file of the repository.
CONTENTS: Final = {
    "Begin": {
        "warpfit": "README.md",
        "Tutorial": "client/README.md",
        "Limits and pitfalls": "client/LIMITS.md",
        "Gallery": "deploy/site/pages/gallery.md",
    },
    "Coming from": {
        "PySR": "deploy/site/pages/coming_from_pysr.md",
        "gplearn": "deploy/site/pages/coming_from_gplearn.md",
        "Operon and pyoperon": "deploy/site/pages/coming_from_operon.md",
        "DEAP": "deploy/site/pages/coming_from_deap.md",
        "curve_fit and lmfit": "deploy/site/pages/coming_from_curve_fit.md",
    },
    "Reference": {
        "Losses and keywords": "client/REFERENCE.md",
        "Operators": "client/OPERATORS.md",
        "Threads, processes, asyncio": "deploy/site/pages/writing_code.md",
        "The contract": "proto/README.md",
        "For agents": "client/examples/SKILL.md",
        "Changelog": "CHANGELOG.md",
    },
    "Examples": {
        "Kepler's law": "client/examples/kepler.py",
        "Three studies": "client/examples/gallery.py",
        "Genetic programming": "client/examples/diabetes_gp.py",
        "A loop of proposals": "client/examples/propose_loop.py",
        "A search that is logged": "client/examples/log_search.py",
        "Islands on Ray": "client/examples/islands_on_ray.py",
        "Workers on Dask": "client/examples/workers_on_dask.py",
        "A method of SRBench": "client/examples/srbench/regressor.py",
    },
    "Run a server": {
        "Deployment": "deploy/README.md",
        "Operation": "server/OPERATING.md",
        "Security": "server/SECURITY.md",
        "Capacity": "deploy/capacity.md",
    },
    "How it works": {
        "The server": "server/README.md",
        "A search": "server/SEARCH.md",
        "The client": "client/DEVELOPING.md",
        "Measurements": "tests/bench/README.md",
        "How to measure": "deploy/site/pages/benchmarking.md",
        "Contributing": ".github/CONTRIBUTING.md",
    },
}
#: Modules whose docstrings are pages of the reference.
MODULES: Final = (
    *("warpfit", "warpfit.client", "warpfit.aio", "warpfit.sklearn", "warpfit.losses"),
    *("warpfit.errors", "warpfit.ir", "warpfit.evidence", "warpfit.testing", "warpfit.ray"),
    *("warpfit.frontends", "warpfit.frontends.deap", "warpfit.frontends.gplearn"),
    *("warpfit.frontends.operon", "warpfit.frontends.pysr", "warpfit.frontends.sympy"),
)
_LINK: Final = re.compile(r"(!?\[[^\]\n]*\])\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")
_NAMED: Final = re.compile(r"(?<!\[)`([\w./-]+\.(?:md|py|ipynb|json|yaml|yml|sbatch))`(?!\])")


def page_of(path: str) -> str:
    """Return where a document of the repository is in the site."""
    if path == "README.md":
        return "index.md"
    page = path.removeprefix("deploy/site/").removeprefix(".").lower().replace("readme", "index")
    return page.removesuffix(".py") + ".md" if page.endswith(".py") else page


PAGES: Final = {path: page_of(path) for part in CONTENTS.values() for path in part.values()}


def linked(text: str, path: str, folder: Path) -> str:
    """Return a document whose links lead to pages, to pictures beside them, or to GitHub.

    Args:
        text: Markdown.
        path: where it is in the repository.
        folder: of the site's sources; pictures are copied there.

    Raises:
        SystemExit: for a link to a file that there is not.
    """
    here, own = posixpath.dirname(path), posixpath.dirname(PAGES[path])

    def target(name: str) -> str | None:
        """Return the address of a file of the repository; None if there is no such file."""
        found = [posixpath.normpath(posixpath.join(base, name)) for base in (here, "")]
        file = next((each for each in found if (ROOT / each).exists()), None)
        if file is None or file.startswith(".."):
            return None
        if file in PAGES:
            return posixpath.relpath(PAGES[file], own or ".")
        if file.endswith((".svg", ".png")):
            (folder / "pictures").mkdir(exist_ok=True)
            name = file.replace("/", "_")
            shutil.copy(ROOT / file, folder / "pictures" / name)
            return posixpath.relpath(f"pictures/{name}", own or ".")
        return SOURCES + file

    def link(match: re.Match[str]) -> str:
        found = target(match[2])
        if found is None:
            raise SystemExit(f"{path}: there is no {match[2]}")
        return f"{match[1]}({found}{match[3] or ''})"

    def named(match: re.Match[str]) -> str:
        found = target(match[1])
        return match[0] if found is None else f"[{match[0]}]({found})"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    plain = [_NAMED.sub(named, _LINK.sub(link, part)) for part in parts[::2]]
    parts[::2] = plain
    return "".join(parts)


def write_sources(folder: Path) -> None:
    """Write the pages of the site and its configuration below a folder."""
    docs = folder / "docs"
    shutil.rmtree(docs, ignore_errors=True)
    docs.mkdir(parents=True)
    for path, page in PAGES.items():
        place = docs / page
        place.parent.mkdir(parents=True, exist_ok=True)
        text = (ROOT / path).read_text()
        if path.endswith(".py"):  # a program, for those who have the site and the package alone
            text = f"# {Path(path).name}\n\n```python\n{text}```\n"
        place.write_text(linked(text, path, docs))
    (docs / "reference").mkdir()
    for module in MODULES:
        (docs / "reference" / f"{module}.md").write_text(f"# {module}\n\n::: {module}\n")
    contents = [
        {heading: [{title: PAGES[path]} for title, path in part.items()]}
        for heading, part in CONTENTS.items()
    ]
    contents.append({"Python": [{each: f"reference/{each}.md"} for each in MODULES]})
    settings = yaml.safe_load((SITE / "mkdocs.yml").read_text())
    settings |= {"docs_dir": str(docs), "nav": contents, "repo_url": PROJECT["urls"]["Repository"]}
    settings["plugins"][1]["mkdocstrings"]["handlers"]["python"]["paths"] = [str(ROOT / "client")]
    (folder / "mkdocs.yml").write_text(yaml.safe_dump(settings, sort_keys=False))


def main() -> int:
    """Build or serve the site; return the status of MkDocs."""
    parser = argparse.ArgumentParser(description="Build the documentation site.")
    parser.add_argument("--folder", type=Path, default=ROOT / "build", help="default: build")
    parser.add_argument("--serve", action="store_true", help="serve it on loopback")
    options = parser.parse_args()
    folder = options.folder.resolve()
    write_sources(folder)
    command = ["serve"] if options.serve else ["build", "--site-dir", str(folder / "site")]
    flags = ["--strict", "--config-file", str(folder / "mkdocs.yml")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    full = [sys.executable, "-m", "mkdocs", *command, *flags]
    return subprocess.run(full, env=environment, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
