"""A pool in shared memory for the row-invariant (uniform) values of a kernel.

A group of ten expressions has about sixty row-invariant values. Kept in registers through the row
loop, they would halve the threads of a multiprocessor; from shared memory each expression loads its
own at its beginning, 16 bytes at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

_WORDS: Final = {"p": 4, "h": 2, "r": 4, "d": 8}
_WIDTHS: Final = {2: "b16", 4: "b32", 8: "b64"}
_VECTOR_BYTES: Final = 16


class InvariantPool:
    """Allocates row-invariant values in shared memory and writes their loads and stores."""

    def __init__(self) -> None:
        self.size = 0
        """Bytes in use."""
        self.flags: list[str] = []
        """Registers of class "r" through which predicates are loaded."""
        self._stores: list[str] = []

    def loads(self, names: Iterable[str]) -> list[str]:
        """Allocate the values of one expression; return the code that loads them."""
        by_size: dict[int, list[str]] = {}
        for name in names:
            by_size.setdefault(_WORDS[name[1]], []).append(name)
        lines: list[str] = []
        for word, members in sorted(by_size.items()):
            lanes = min(4, _VECTOR_BYTES // word)
            for start in range(0, len(members), lanes):
                lines += self._vector(members[start : start + lanes], word)
        return lines

    def filled(self, computation: list[str]) -> list[str]:
        """Return the code that computes all values and stores those of the pool.

        With a pool, one warp computes the values while the others wait.
        """
        if not self._stores:
            return computation
        return [
            "setp.ge.u32 %first, %thread, 32;",
            "@%first bra.uni FILLED;",
            "setp.eq.u32 %first, %thread, 0;",
            *computation,
            *self._stores,
            "FILLED:",
            "bar.sync 0;",
        ]

    def _vector(self, names: list[str], word: int) -> list[str]:
        place, self.size = self.size, self.size + _VECTOR_BYTES
        width = _WIDTHS[word]
        plain = [self._plain(name, place + index * word) for index, name in enumerate(names)]
        tests = [
            f"setp.ne.b32 {name}, {cell}, 0;"
            for name, cell in zip(names, plain, strict=True)
            if name[1] == "p"
        ]
        padded = plain + ["_"] * (min(4, _VECTOR_BYTES // word) - len(plain))
        if len(plain) == 1:
            return [f"ld.volatile.shared.{width} {plain[0]}, [uniforms+{place}];", *tests]
        vector = ", ".join(padded)
        return [
            f"ld.volatile.shared.v{len(padded)}.{width} {{{vector}}}, [uniforms+{place}];",
            *tests,
        ]

    def _plain(self, name: str, place: int) -> str:
        """Write the store of one value; return the register into which it is loaded."""
        if name[1] == "p":
            cell = f"%flag{place}"
            self.flags.append(cell)
            self._stores.append(f"selp.b32 %other, 1, 0, {name};")
            self._stores.append(f"@%first st.shared.b32 [uniforms+{place}], %other;")
            return cell
        width = _WIDTHS[_WORDS[name[1]]]
        self._stores.append(f"@%first st.shared.{width} [uniforms+{place}], {name};")
        return name
