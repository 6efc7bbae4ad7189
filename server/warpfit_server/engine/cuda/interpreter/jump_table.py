"""A pass over PTX text that replaces the interpreter's dispatch tree by a jump table.

NVVM compiles a switch to a binary tree of comparisons, eight deep for the interpreter's cases,
which costs more than most operators. This pass follows each case's path through the tree and
inserts a ``brx.idx`` that jumps to its end at once. Instructions on the path (copies that the
compiler put on an edge) are repeated before the jump, which keeps the meaning.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Final

from warpfit.errors import InternalError

_DISPATCH: Final = re.compile(r"mov\.b32 (%r\d+), %r\d+; // dispatch")
_COMPARE: Final = re.compile(r"setp\.(\w+)\.[su]32\s+(%p\d+), (%r\d+), (-?\d+);")
_BRANCH: Final = re.compile(r"(?:@(!?)(%p\d+) )?bra(?:\.uni)?\s+([$\w]+);")
_LABEL: Final = re.compile(r"([$\w]+):")
_COMPARISONS: Final[dict[str, Callable[[int, int], bool]]] = {
    name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
#: Longest path through the tree that is followed; real ones are far shorter.
_MOST_STEPS: Final = 200


def with_jump_table(ptx: str, cases: int) -> str:
    """Replace the dispatch tree over labels 0 to ``cases - 1`` by an indexed branch.

    Raises:
        InternalError: if the text does not have the expected form.
    """
    lines = ptx.splitlines()
    marks = [number for number, line in enumerate(lines) if _DISPATCH.search(line)]
    if len(marks) != 1:
        raise InternalError(f"expected one dispatch in the PTX, found {len(marks)}", "BAD_PTX")
    found = _DISPATCH.search(lines[marks[0]])
    register = found.group(1) if found else ""
    root = next(n for n in range(marks[0] + 1, len(lines)) if f", {register}, " in lines[n])
    walk = _Walk(lines, register)
    blocks = [walk.block(label, root) for label in range(cases)]
    targets = ", ".join(f"$case_{label}" for label in range(cases))
    table = [
        f"$cases: .branchtargets {targets};",
        f"\tbrx.idx.uni {register}, $cases;",
        *(line for block in blocks for line in block),
    ]
    for number in sorted(walk.entries, reverse=True):
        lines.insert(number, f"$entry_{number}:")
    shift = sum(number <= root for number in walk.entries)
    return "\n".join([*lines[: root + shift], *table, *lines[root + shift :]]) + "\n"


class _Walk:
    """Follows the path of a label through the tree."""

    def __init__(self, lines: list[str], register: str) -> None:
        self._lines = lines
        self._register = register
        self._labels = {
            match.group(1): number
            for number, line in enumerate(lines)
            if (match := _LABEL.fullmatch(line.strip()))
        }
        self.entries: set[int] = set()
        """Numbers of the lines that blocks jump to, which need a label before them."""

    def block(self, label: int, root: int) -> list[str]:
        """Return what a case does before it jumps to where the tree would have led it."""
        known: dict[str, bool] = {}
        block = [f"$case_{label}:"]
        at = root
        for _ in range(_MOST_STEPS):
            text = self._lines[at].strip()
            compare, branch = _COMPARE.fullmatch(text), _BRANCH.fullmatch(text)
            if compare and compare.group(3) == self._register:
                test = _COMPARISONS[compare.group(1)]
                known[compare.group(2)] = test(label, int(compare.group(4)))
                at += 1
            elif branch and (branch.group(2) is None or branch.group(2) in known):
                taken = branch.group(2) is None or known[branch.group(2)] != bool(branch.group(1))
                at = self._labels[branch.group(3)] if taken else at + 1
            elif not text or text.startswith("//") or _LABEL.fullmatch(text):
                at += 1
            elif self._is_in_tree(at, known):
                block.append(self._lines[at])
                at += 1
            else:
                self.entries.add(at)
                return [*block, f"\tbra.uni $entry_{at};"]
        raise InternalError(f"the dispatch tree has no end for label {label}", "BAD_PTX")

    def _is_in_tree(self, at: int, known: dict[str, bool]) -> bool:
        """Return whether the basic block of this line ends in a decision of the tree."""
        for line in self._lines[at:]:
            text = line.strip()
            compare, branch = _COMPARE.fullmatch(text), _BRANCH.fullmatch(text)
            if compare and compare.group(3) == self._register:
                return True
            if branch:
                return branch.group(2) in known
            if _LABEL.fullmatch(text):
                return False
        return False
