"""Standard streams, some of which may be closed or full, files, and the parser of commands."""

from __future__ import annotations

import argparse
import io
import os
import re
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NoReturn, TextIO

from warpfit.errors import InvalidArgumentError, did_you_mean

# ----------------------------------------------------------------------- standard streams and files


def open_standard_streams() -> None:
    """Open the null device where a standard descriptor is closed.

    Otherwise the next file or socket would get its number, and what is printed would go there.
    Standard output is then one that cannot be written: what a command prints is missed, as on a
    full disk.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_WRONLY if name == "stderr" else os.O_RDONLY)
            if opened != number:  # a lower one was closed in the meantime
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            options: dict[str, Any] = {"errors": "backslashreplace", "closefd": False}
            made = os.fdopen(number, mode, encoding="utf-8", **options)
            setattr(sys, name, made)
            setattr(sys, f"__{name}__", made)  # as Python would have


class WatchedOutput(io.TextIOWrapper):
    """Standard output that remembers that it could not be written, until `discard_output`.

    What was printed may be lost then: an unbuffered stream keeps nothing that a later flush would
    try again, and argparse passes over such errors.
    """

    failure: OSError | None = None

    def write(self, text: str, /) -> int:
        """Write as any stream, and remember a failure."""
        try:
            return super().write(text)
        except OSError as error:
            self.failure = error
            raise

    def flush(self) -> None:
        """Write buffered output; raise the OSError of an earlier failure again."""
        if self.failure is not None:
            raise self.failure
        try:
            super().flush()
        except OSError as error:
            self.failure = error
            raise


def watch_output() -> None:
    """Put a `WatchedOutput` in the place of Python's own standard output.

    It escapes the characters that the output's encoding lacks, such as those of a column's name on
    a terminal with code page 1252, as standard error does.
    """
    own = sys.stdout
    if own is sys.__stdout__ and isinstance(own, io.TextIOWrapper):
        options = {name: getattr(own, name) for name in ("line_buffering", "write_through")}
        errors = own.errors
        # Python takes surrogateescape in the locale C, which gives bytes of arguments back.
        if errors == "strict" or (errors == "surrogateescape" and own.encoding != "utf-8"):
            errors = "backslashreplace"
        sys.stdout = WatchedOutput(own.buffer, own.encoding, errors, **options)


def discard_output() -> None:
    """Drop buffered output that cannot be written, so that Python does not try it again."""
    _write_nowhere(sys.stdout)
    if isinstance(sys.stdout, WatchedOutput):
        sys.stdout.failure = None


def _write_nowhere(stream: TextIO) -> None:
    """Have a stream, and what it holds already, written to the null device."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def discard_errors() -> None:
    """Drop what cannot be written to standard error: Python would end with the status 120."""
    try:
        sys.stderr.flush()
    except OSError:
        _write_nowhere(sys.stderr)


def tell(text: str) -> None:
    """Print a line to standard error, if that can be written."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def output_failure() -> OSError | None:
    """Return why standard output cannot be written, None if it can."""
    try:
        sys.stdout.flush()
    except OSError as error:
        return error
    return None


def reader_is_gone() -> bool:
    """Return whether the reading end of standard output is closed."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


@contextmanager
def writing_file(path: Path | str) -> Iterator[None]:
    """Turn errors of the file system into the error of a file that cannot be written."""
    try:
        yield
    except (OSError, ValueError) as error:  # a path may hold a zero byte
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidArgumentError(
            f"{path} cannot be written: {reason}",
            "BAD_FILE",
            "Name a file in a folder that exists and can be written, on a disk with room",
        ) from error


# --------------------------------------------------------------------------------------- the parser

_FLAG: Final = re.compile(r"--[a-z][a-z0-9-]*")
#: Flags by the names of other programs; those that the command has are meant.
_OTHER_FLAGS: Final = {
    **{"--time": "--max-seconds", "--seed": "--random-state", "--output": "--json"},
    **dict.fromkeys(("--p0", "--start", "--parameters"), "--params"),
    **{"--y": "--target", "--x": "--columns", "--maxsize": "--max-size"},
    **{"--niterations": "--generations", "--iterations": "--max-iterations"},
}
#: What is not in the shell, by flags of these names.
_IN_PYTHON: Final = {
    **{
        f"--{word}": f"SymbolicRegressor({word}=...)"
        for word in ("units", "constraints", "guesses")
    },
    **{
        f"--{word}": f"client.optimize(..., {word}=...)" for word in ("bounds", "fixed", "restarts")
    },
    **{"--latex": "program.latex(names)", "--code": "program.code(language, names)"},
}
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
            given, *_ = [*_FLAG.findall(message), ""]
            known = dict.fromkeys(_FLAG.findall(self.format_help()))
            remedy = "" if given else "Quote an expression that has spaces or *"
            if _OTHER_FLAGS.get(given) in known:
                remedy = f"Write {_OTHER_FLAGS[given]}"
            elif given in _IN_PYTHON:
                remedy = f"That is only in Python: {_IN_PYTHON[given]}"
            elif given:  # the dashes, which all have, say nothing of likeness
                remedy = did_you_mean(given[2:], [flag[2:] for flag in known], "")
                remedy = remedy.replace("mean ", "mean --")
            message += f". {remedy}" if remedy else ""
        elif choice := _CHOICE.search(message):
            meant = did_you_mean(choice[1], re.findall(r"[\w-]+", choice[2]), "")
            message += f". {meant}" if meant else ""
        elif "required: expression" in message:
            message += ". One that begins with a minus stands behind --, such as -- -T"
        return message
