"""Which step the engine runs next: one fair queue among tenants.

The simple form:

    take the tenant that has used least of the engine, of its tasks the one whose turn it is
    run one step of it, charge the tenant with the time
    put the task back, unless it is over

Start-time fair queueing (Goyal, Vin and Cheng 1996), with measured instead of announced costs. The
same rule is used twice: among tenants, and within a tenant between *short* tasks, which have had
little of the engine so far, and *long* ones, such as fits and large batches, so that neither a long
task delays every small call of its tenant nor small calls starve a long task.

The scheduler has no thread, no clock and no socket: it is told what came and what things cost.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

#: Seconds of the engine after which a task is a long one.
_SHORT: Final = 0.008
#: Share of a tenant's time that its short tasks get while there are long ones, to 1.
_SHORT_WEIGHT: Final = 4.0
#: Longest time in seconds that a tenant, or a class of its tasks, keeps of what it did not use
#: while it had nothing to do. It bounds how long others wait when it comes back.
_CREDIT: Final = 0.05
#: Tenants without tasks whose charges are remembered.
_REMEMBERED: Final = 1000
#: Waiting tasks of one tenant that are looked at to find some that can be merged.
_LOOKED_AT: Final = 64

Item = TypeVar("Item")


@dataclass(slots=True, eq=False)
class Task(Generic[Item]):
    """Something that the engine works on, step by step."""

    item: Item
    tenant: str
    merge_key: Hashable = None
    """Tasks with the same key, not begun, can be run as one step; None: never merged."""
    size: int = 0
    """Estimated work of a task that can be merged, in token-rows."""
    used: float = 0.0
    """Seconds of the engine so far."""

    @property
    def is_long(self) -> bool:
        """Whether it has had more of the engine than a small call needs."""
        return self.used > _SHORT


@dataclass(slots=True, eq=False)
class _Share(Generic[Item]):
    """Tasks of one class of a tenant, in the order of their turns, and what they have used."""

    weight: float
    tasks: OrderedDict[Task[Item], None] = field(default_factory=OrderedDict)
    charge: float = 0.0


class _Tenant(Generic[Item]):
    """Waiting tasks of a tenant, and what it has used of the engine."""

    def __init__(self, charge: float) -> None:
        self.charge = charge
        self.running = 0
        self.short: _Share[Item] = _Share(_SHORT_WEIGHT)
        self.long: _Share[Item] = _Share(1.0)

    def add(self, task: Task[Item]) -> None:
        """Put a task at the end of its class; a short one that has begun goes on first."""
        share, other = (self.long, self.short) if task.is_long else (self.short, self.long)
        if not share.tasks and other.tasks:
            share.charge = max(share.charge, other.charge - _CREDIT)
        share.tasks[task] = None
        if task.used and not task.is_long:
            share.tasks.move_to_end(task, last=False)

    def pop(self) -> Task[Item]:
        """Take the task whose turn it is."""
        share = min((s for s in (self.short, self.long) if s.tasks), key=lambda s: s.charge)
        task, _ = share.tasks.popitem(last=False)
        return task

    def remove(self, task: Task[Item]) -> bool:
        """Take a certain task; tell whether it has waited."""
        for share in (self.short, self.long):
            if task in share.tasks:
                del share.tasks[task]
                return True
        return False

    def charged(self, task: Task[Item], seconds: float) -> None:
        """Charge a step of a task."""
        share = self.long if task.is_long else self.short
        share.charge += seconds / share.weight
        self.charge += seconds

    @property
    def is_waiting(self) -> bool:
        """Whether any task waits."""
        return bool(self.short.tasks or self.long.tasks)


class Scheduler(Generic[Item]):
    """The fair queue. Calls must not overlap; the caller holds a lock.

    Args:
        merged_size: most token-rows of the tasks that are merged into one step.

    """

    def __init__(self, merged_size: int) -> None:
        self._merged_size = merged_size
        self._tenants: OrderedDict[str, _Tenant[Item]] = OrderedDict()
        self._level = 0.0
        """Charge of the tenant that was served last when it was chosen, which never falls."""
        self._waiting = 0

    def __len__(self) -> int:
        """Count the tasks that wait."""
        return self._waiting

    def add(self, task: Task[Item]) -> None:
        """Queue a task, new or after one of its steps."""
        tenant = self._tenants.get(task.tenant)
        if tenant is None:
            self._forget_idle()
            tenant = self._tenants[task.tenant] = _Tenant(self._level)
        elif not (tenant.is_waiting or tenant.running):
            tenant.charge = max(tenant.charge, self._level - _CREDIT)
        tenant.add(task)
        self._waiting += 1

    def next(self, only: str | None = None) -> list[Task[Item]]:
        """Take the tasks of the next step: none, one, or several that are merged.

        Each must come back through `ran`.

        Args:
            only: the tenant whose turn it is; None for the one that has been served least.

        """
        if not self._waiting:
            return []
        tenants = self._tenants.values() if only is None else self._named(only)
        waiting = [tenant for tenant in tenants if tenant.is_waiting]
        if not waiting:
            return []
        tenant = min(waiting, key=lambda t: t.charge)
        self._level = max(self._level, tenant.charge)
        first = self._take(tenant, tenant.pop())
        return [first, *self._companions(first)]

    def take(self, task: Task[Item]) -> list[Task[Item]]:
        """Take a certain task for the next step, if it waits."""
        tenant = self._tenants.get(task.tenant)
        if tenant is None or not tenant.remove(task):
            return []
        return [self._take(tenant, task)]

    def put_back(self, task: Task[Item]) -> None:
        """Let a task wait that `next` has returned."""
        self.ran([task], 0.0)
        self.add(task)

    def ran(self, tasks: list[Task[Item]], seconds: float) -> None:
        """Charge the tenants of a step; unfinished tasks have to be added again.

        Args:
            tasks: what `next` returned.
            seconds: that the step took, shared among the tasks by their sizes.

        """
        total = sum(task.size for task in tasks)
        for task in tasks:
            share = seconds * task.size / total if total else seconds / len(tasks)
            tenant = self._tenants[task.tenant]
            tenant.charged(task, share)
            tenant.running -= 1
            task.used += share

    def _named(self, name: str) -> list[_Tenant[Item]]:
        return [self._tenants[name]] if name in self._tenants else []

    def _take(self, tenant: _Tenant[Item], task: Task[Item]) -> Task[Item]:
        tenant.running += 1
        self._waiting -= 1
        return task

    def _companions(self, first: Task[Item]) -> Iterator[Task[Item]]:
        """Take tasks that can be merged with the first, tenant by tenant in turn."""
        if first.merge_key is None or first.used:
            return
        room = self._merged_size - first.size
        able = sorted((t for t in self._tenants.values() if t.short.tasks), key=lambda t: t.charge)
        queues = [(tenant, self._mergeable(tenant, first.merge_key)) for tenant in able]
        while queues:
            left = []
            for tenant, queue in queues:
                task = next(queue, None)
                if task is None or task.size > room:
                    continue
                room -= task.size
                del tenant.short.tasks[task]
                yield self._take(tenant, task)
                left.append((tenant, queue))
            queues = left

    @staticmethod
    def _mergeable(tenant: _Tenant[Item], key: Hashable) -> Iterator[Task[Item]]:
        looked_at = list(tenant.short.tasks)[:_LOOKED_AT]
        return iter([task for task in looked_at if task.merge_key == key and not task.used])

    def _forget_idle(self) -> None:
        """Forget tenants that have been idle for longest, if there are very many."""
        if len(self._tenants) < _REMEMBERED:
            return
        idle = [n for n, t in self._tenants.items() if not (t.is_waiting or t.running)]
        for name in idle[: len(idle) // 2 + 1]:
            del self._tenants[name]
