"""The packages that installing a distribution brings along."""

from importlib.metadata import packages_distributions, requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def required_packages(requirement: str) -> set[str]:
    """Names of all packages that one, such as ``warpfit[server]``, needs here beside itself."""
    found: set[tuple[str, str]] = set()
    waiting = [Requirement(requirement)]
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        for extra in {"", *wanted.extras} - {extra for known, extra in found if known == name}:
            found.add((name, extra))
            markers = [(each, each.marker) for each in map(Requirement, requires(name) or ())]
            waiting += [
                each for each, own in markers if own is None or own.evaluate({"extra": extra})
            ]
    return {name for name, _ in found} - {canonicalize_name(Requirement(requirement).name)}


def absent_modules(requirement: str) -> set[str]:
    """Modules that are installed here, and not by an installation of this alone."""
    present = {canonicalize_name(Requirement(requirement).name), *required_packages(requirement)}
    owners = packages_distributions().items()
    return {name for name, own in owners if present.isdisjoint(map(canonicalize_name, own))}
