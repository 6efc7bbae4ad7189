"""What compiled code does for tenants on their lanes, until they are charged for it."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from warpfit_server.engine.base import Standing
from warpfit_server.fairness import FairGate


@dataclass(slots=True, eq=False)
class Account:
    """Of one lane that compiled code serves."""

    tenant: str
    standing: Standing
    seconds: float = 0.0
    """That have been written down."""


class Accounts:
    """All accounts; safe to use from several threads.

    Args:
        gate: that charges the tenants.

    """

    def __init__(self, gate: FairGate) -> None:
        self._gate = gate
        self._open: set[Account] = set()
        self._used: dict[str, float] = defaultdict(float)  # seconds that nobody is charged for yet
        self._lock = threading.Lock()

    @contextmanager
    def account(self, tenant: str, standing: Standing) -> Iterator[Account]:
        """Keep account of what ``standing`` does for a tenant in the ``with`` block."""
        account = Account(tenant, standing)
        with self._lock:
            self._open.add(account)
        try:
            yield account
        finally:
            with self._lock:
                self._note(account)
                self._open.remove(account)

    def charge(self, elapsed: float) -> None:
        """Charge tenants for what was done in the last ``elapsed`` seconds."""
        with self._lock:
            for account in self._open:
                self._note(account)
            used = {tenant: seconds for tenant, seconds in self._used.items() if seconds > 0}
            self._used.clear()
        self._gate.account(used, elapsed)

    def _note(self, account: Account) -> None:
        seconds = account.standing.seconds()
        self._used[account.tenant] += seconds - account.seconds
        account.seconds = seconds
