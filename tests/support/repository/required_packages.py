"""The packages that installing a distribution brings along."""

from __future__ import annotations

import re
from importlib.metadata import requires


def required_packages(name: str) -> set[str]:
    """Names of all packages that an installation without extras needs, beside the package itself.

    Environment markers other than extras are taken to hold.
    """
    found: set[str] = set()
    waiting = [name]
    while waiting:
        for requirement in requires(waiting.pop()) or ():
            specification, _, marker = requirement.partition(";")
            needed = re.split(r"[\s<>=!~\[(]", specification.strip(), maxsplit=1)[0].lower()
            if "extra" not in marker and needed not in found:
                found.add(needed)
                waiting.append(needed)
    return found
