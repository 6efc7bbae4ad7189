"""What a client keeps of its last batches, because a local search sends the same programs again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from warpfit.ir import Program, Tokens

#: How many batches are kept, and up to how many tokens each (9 bytes a token).
_BATCHES: Final = 8
_TOKENS: Final = 1 << 17


class RecentTokens:
    """The joined tokens of the last few batches; any number of threads may share it.

    Programs are immutable, so the tokens of the same ones are the same. Its state is one tuple that
    is replaced as a whole: of two threads that add at a time, one may lose its entry, nothing more.
    """

    def __init__(self) -> None:
        self._recent: tuple[tuple[list[Program], Tokens], ...] = ()

    def of(self, programs: Sequence[Program]) -> Tokens:
        """Join the tokens of programs, unless that has been done.

        Raises:
            InvalidArgumentError: if there are no programs.

        """
        for known, tokens in self._recent:
            # The first and the last one tell most batches apart before equality looks at tokens.
            if (
                len(known) == len(programs)
                and known[0] is programs[0]
                and known[-1] is programs[-1]
                and known == programs
            ):
                return tokens
        tokens = Tokens.of(programs)
        if len(tokens.codes) <= _TOKENS:
            self._recent = ((list(programs), tokens), *self._recent[: _BATCHES - 1])
        return tokens
