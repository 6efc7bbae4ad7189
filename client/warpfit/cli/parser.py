"""The parser of the commands, whose errors say which flag or word was meant."""

from __future__ import annotations

import argparse
import re
from typing import Any, Final, NoReturn

from warpfit.errors import did_you_mean

_FLAG: Final = re.compile(r"--[a-z][a-z0-9-]*")
_CHOICE: Final = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")


class CommandParser(argparse.ArgumentParser):
    """The parser of a command; its errors show how that command is used."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse words that are left over, which often are parts of an expression."""
        options, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return options, rest

    def error(self, message: str) -> NoReturn:
        """End with a message that says what was meant."""
        super().error(self.with_remedy(message))

    def with_remedy(self, message: str) -> str:
        """Say what was meant by a slip, and how an expression that looks like a flag is written."""
        if message.startswith("unrecognized arguments"):
            given = _FLAG.findall(message)[:1]
            known = dict.fromkeys(_FLAG.findall(self.format_help()))
            usual = "Quote an expression that has spaces or *"
            message += f". {did_you_mean(given[0], known, usual) if given else usual}"
        elif choice := _CHOICE.search(message):
            meant = did_you_mean(choice[1], re.findall(r"[\w-]+", choice[2]), "")
            message += f". {meant}" if meant else ""
        elif "required: expression" in message:
            message += ". One that begins with a minus stands behind --, such as -- -T"
        return message
