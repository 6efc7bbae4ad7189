"""The snippets of the READMEs."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
_PAGES = ("gallery", "benchmarking", "writing_code")
_PAGES += (*("coming_from_" + name for name in ("pysr", "gplearn", "operon", "deap", "curve_fit")),)
READMES = (
    *("README.md", *(f"client/{name}.md" for name in ("README", "REFERENCE", "LIMITS"))),
    *("client/DEVELOPING.md", "client/OPERATORS.md", "server/README.md"),
    *("server/OPERATING.md", "server/SECURITY.md", "tests/bench/README.md"),
    *("proto/README.md", "deploy/README.md", *(f"deploy/site/pages/{name}.md" for name in _PAGES)),
)
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Snippet:
    """One fenced block; ``py`` goes on where the ``python`` block before it ended."""

    path: str
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


def snippets(path: str) -> list[Snippet]:
    """All blocks of one README that name a language."""
    text = (ROOT / path).read_text()
    return [
        Snippet(path, text.count("\n", 0, match.start()) + 1, match[1], match[2])
        for match in _FENCE.finditer(text)
        if match[1]
    ]


def programs(path: str) -> list[list[Snippet]]:
    """Python blocks of one README, each with those that go on from it."""
    found: list[list[Snippet]] = []
    for snippet in snippets(path):
        if snippet.language == "python":
            found.append([snippet])
        elif snippet.language == "py":
            found[-1].append(snippet)
    return found


def commands(snippet: Snippet) -> list[str]:
    """Lines of a shell block, continued ones joined."""
    joined = snippet.code.replace("\\\n", " ")
    return [line.strip() for line in joined.splitlines() if line.strip()]
