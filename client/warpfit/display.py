"""Small tables of results, as text for a terminal and as HTML for a notebook."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final, NoReturn

from warpfit.errors import no_attribute

#: Number of rows that are shown of a long table.
MOST_ROWS: Final = 20


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table whose cells are text."""

    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""
    """A line below the table."""
    total: int = 0
    """Number of all rows, where not all that are not shown are given."""
    below: tuple[TextTable, ...] = ()
    """Tables below this one."""

    def text(self) -> str:
        """Return the table as right-aligned columns."""
        own = "\n".join([aligned([self.header, *self._shown()]), *self._notes()])
        own = own.encode(errors="backslashreplace").decode()  # half characters cannot be printed
        return "\n\n".join([own, *(table.text() for table in self.below)])

    def html(self) -> str:
        """Return the table as HTML."""
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in self.header)
        body = "".join(
            f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>"
            for row in self._shown()
        )
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self._notes())
        own = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{notes}"
        return "".join([own, *(table.html() for table in self.below)])

    def _shown(self) -> Sequence[tuple[str, ...]]:
        return self.rows[:MOST_ROWS]

    def _notes(self) -> list[str]:
        rest = max(len(self.rows), self.total) - MOST_ROWS
        more = [f"... and {rest} more row{'s' if rest > 1 else ''}"] if rest > 0 else []
        return [*more, *([self.note] if self.note else [])]


class Shown:
    """An object that a terminal and a notebook show as a small table, whatever it holds."""

    __slots__ = ()

    #: What to use instead of attributes of other packages, by their names.
    _others: ClassVar[Mapping[str, str]] = {}

    if not TYPE_CHECKING:  # checkers are to refuse attributes that there are not

        def __getattr__(self, name: str) -> NoReturn:
            """Raise AttributeError with what is meant."""
            raise no_attribute(type(self).__name__, name, dir(type(self)), self._others)

    def _table(self) -> TextTable:
        raise NotImplementedError

    def __repr__(self) -> str:
        """Return the table as text."""
        return self._table().text()

    def _repr_html_(self) -> str:
        return self._table().html()


class ShownFormulas(Shown):
    """An object with formulas, which a notebook shows as LaTeX."""

    __slots__ = ()

    def _table(self, latex: bool = False) -> TextTable:
        raise NotImplementedError

    def _repr_html_(self) -> str:
        return self._table(latex=True).html()


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of text as right-aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )


def numbers(values: Sequence[float], errors: Sequence[float] | None = None) -> str:
    """Return numbers to five digits with errors to two, of a long list the first six."""
    shown = [f"{value:.5g}" for value in values]
    if errors is not None:
        shown = [f"{one} ± {error:.2g}" for one, error in zip(shown, errors, strict=True)]
    return ", ".join([*shown[:6], *["..."] * (len(shown) > 6)])


def shortened(text: str, most: int = 60) -> str:
    """Return a text of at most so many characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."
