"""Tenants: on whose behalf a call comes, what is theirs, and what each may use.

A tenants file narrows the server's limits, for all tenants or for some::

    [default]
    requests = 16
    rate = 200

    [tenants.alice]
    resident_bytes = "8GiB"
    requests = 32

    [tenants.mallory]
    suspended = true

The keys are the names of `warpfit.server_info.Limits`. A tenant with a section of its own has that
section's limits, and the default's where it names none. The file is read again when it changes.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from warpfit.errors import InvalidArgumentError, PermissionDeniedError
from warpfit.server_info import Limits
from warpfit_server.config import parse_bytes
from warpfit_server.system.file_watcher import Watch

_LOG: Final = logging.getLogger("warpfit.tenants")
#: The tenant of all calls where the server asks for no credentials.
ANONYMOUS: Final = "default"
#: To whom the probe belongs: no caller's tenant has this name.
PROBE: Final = ""
#: Share of the server's places, bytes in flight, threads and resident data sets that one of
#: several tenants may take.
_SHARE: Final = 0.75
_ATTRIBUTE: Final = "_warpfit_tenant"
_NAMES: Final = frozenset(limit.name for limit in fields(Limits))


def tenant_of(context: Any) -> str:
    """Return the tenant of a call; `ANONYMOUS` for one that was refused before it had one."""
    return str(getattr(context, _ATTRIBUTE, ANONYMOUS))


def assign_tenant(context: Any, tenant: str) -> None:
    """Note the tenant of a call, for `tenant_of`."""
    setattr(context, _ATTRIBUTE, tenant)


def key_of(tenant: str, content_id: bytes) -> bytes:
    """Return the name under which the server keeps a tenant's data set.

    Two tenants with the same content have two data sets: nothing that one does, and no time that
    it takes, tells whether another has it.
    """
    name = tenant.encode()
    return hashlib.sha256(len(name).to_bytes(8, "little") + name + content_id).digest()


@dataclass(frozen=True, slots=True)
class Section:
    """What a section of the tenants file says."""

    limits: Mapping[str, float] = field(default_factory=dict)
    suspended: bool = False


class TenantBook:
    """The limits of each tenant.

    Args:
        server: the server's own limits, which no tenant exceeds.
        path: the tenants file, if there is one.
        shared: whether there are several tenants, so that none may take all places.

    """

    def __init__(self, server: Limits, path: str | Path | None, *, shared: bool) -> None:
        self.server = server
        self._share = _SHARE if shared else 1.0
        self._path = Path(path) if path else None
        self._watch = Watch([self._path] if self._path else [])
        self._lock = threading.Lock()
        self._default = Section()
        self._sections: dict[str, Section] = {}
        self._cache: dict[str, Limits] = {}
        if self._path:
            self._default, self._sections = _read(self._path)

    def limits(self, tenant: str) -> Limits:
        """Return a tenant's limits.

        Raises:
            PermissionDeniedError: if the tenant is suspended.

        """
        if self._path is not None and self._watch.changed():
            self._read_again(self._path)
        cache = self._cache  # what is computed late goes with the old one
        limits = cache.get(tenant)
        if limits is None:
            if len(cache) > len(self._sections) + 1000:
                cache.clear()
            limits = cache[tenant] = self._compute(tenant)
        return limits

    def share(self, amount: float) -> float:
        """Return what one tenant may take of something that all share."""
        return amount * self._share

    def _compute(self, tenant: str) -> Limits:
        section = self._sections.get(tenant, self._default)
        if section.suspended:
            raise PermissionDeniedError(
                f"tenant {tenant} is suspended", "TENANT_SUSPENDED", "Ask the server's operator"
            )
        asked = {**self._default.limits, **section.limits}
        limits = replace(
            self.server,
            requests=max(1, int(self.share(self.server.requests))),
            resident_bytes=int(self.share(self.server.resident_bytes)),
        )
        for name, value in asked.items():
            limits = replace(limits, **{name: _narrower(name, value, self.server)})
        return limits

    def _read_again(self, path: Path) -> None:
        with self._lock:
            try:
                self._default, self._sections = _read(path)
            except InvalidArgumentError as error:
                _LOG.error("the old limits stay in force: %s", error)
            else:
                self._cache = {}
                _LOG.info("the limits of %d tenants were read again", len(self._sections))


def _narrower(name: str, value: float, server: Limits) -> Any:
    most = getattr(server, name)
    if name == "rate":  # 0 is no limit
        return min(value or most, most or value)
    return min(int(value), most)


def _read(path: Path) -> tuple[Section, dict[str, Section]]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        default = _section(content.pop("default", {}))
        tenants = {name: _section(table) for name, table in content.pop("tenants", {}).items()}
        if content:
            raise ValueError(f"unknown section {next(iter(content))}")
    except (OSError, ValueError, AttributeError) as error:
        raise InvalidArgumentError(
            f"the tenants file {path} cannot be used: {error}",
            "BAD_TENANTS_FILE",
            "Write [default] and [tenants.NAME] with names of the server's limits",
        ) from error
    return default, tenants


def _section(table: dict[str, Any]) -> Section:
    rest = dict(table)
    suspended = rest.pop("suspended", False)
    if not isinstance(suspended, bool):
        raise ValueError("suspended is true or false")
    return Section({key: _limit(key, rest[key]) for key in rest}, suspended)


def _limit(name: str, value: Any) -> float:
    if name not in _NAMES:
        raise ValueError(f"{name} is no limit; there are {', '.join(sorted(_NAMES))}")
    number = parse_bytes(value) if isinstance(value, str) else value
    if isinstance(number, bool) or not isinstance(number, int | float) or number < 0:
        raise ValueError(f"{name} is {value!r}, not a number from 0")
    return number
