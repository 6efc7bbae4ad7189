"""Where compiled code is kept from one start of an engine to the next.

Numba, asked to keep what it compiles, puts it beside the sources, where a service must not write,
and takes it for current as long as the function's own file has not changed, whatever became of the
functions that it calls. So it gets a directory of its own for exactly these sources.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import warpfit

_SETTING: Final = "NUMBA_CACHE_DIR"
_DIGITS: Final = 32


def default_cache_directory() -> Path:
    """``$WARPFIT_CACHE_DIR``, else ``warpfit`` in the user's cache directory."""
    named = os.environ.get("WARPFIT_CACHE_DIR")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "warpfit"


def engine_environment(cache_directory: Path | None) -> dict[str, str]:
    """Environment of an engine process: this one's, and where Numba keeps code.

    Args:
        cache_directory: None for `default_cache_directory`.

    Returns:
        The environment as it is if it names a place already, or none can be made.

    """
    environment = dict(os.environ)
    if _SETTING in environment:
        return environment
    place = (cache_directory or default_cache_directory()) / f"numba-{fingerprint(_sources())}"
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError:  # then Numba looks for a place itself
        return environment
    if os.access(place, os.W_OK):
        environment[_SETTING] = str(place)
    return environment


def fingerprint(sources: Iterable[Path]) -> str:
    """Hash of Python files, and of all below directories, by name and content."""
    found = hashlib.sha256()
    for source in sources:
        for path in sorted(source.rglob("*.py")) if source.is_dir() else [source]:
            content = path.read_bytes()
            found.update(f"{path.relative_to(source.parent)} {len(content)} ".encode())
            found.update(content)
    return found.hexdigest()[:_DIGITS]


def _sources() -> Iterator[Path]:
    """Everything that compiled code takes functions, constants or types from."""
    server, client = Path(__file__).parent, Path(warpfit.__file__).parent
    yield server / "engine"
    yield server / "fit"
    yield from (server / name for name in ("channel.py", "messages.py"))
    yield from (client / name for name in ("ir.py", "ops.py", "tokens.py"))
