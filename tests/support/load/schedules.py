"""Runs threads one at a time, and decides at each access to shared words which one goes on.

Orders are drawn as Burckhardt et al., "A Randomized Scheduler with Probabilistic Guarantees of
Finding Bugs" (ASPLOS 2010) propose: threads have random priorities, and the one that runs loses
its own at a few random moments. A bug that needs k threads at certain places in a certain order is
found with a probability that falls with the number of accesses to the power of k - 1 only.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable


class StuckError(AssertionError):
    """All threads sleep that have not ended, or they go round in circles."""


class _EndedError(BaseException):
    """The run is over, and this thread must not go on."""


class _Thread:
    def __init__(self, run: Callable[[], object], priority: float) -> None:
        self.run = run
        self.priority = priority
        self.word: int | None = None
        """On which it sleeps."""
        self.ended = False
        self.baton = threading.Semaphore(0)


class Schedule:
    """One run of some threads in one order.

    Args:
        seed: decides on the order.
        changes: how often a thread loses its priority.
        steps: accesses among which these moments are drawn.

    """

    #: Accesses after which a run is taken for endless.
    LIMIT = 200_000

    def __init__(self, seed: int, changes: int, steps: int = 3000) -> None:
        self._random = random.Random(seed)
        self._moments = {self._random.randrange(steps): -index for index in range(changes)}
        self._threads: list[_Thread] = []
        self._running: _Thread | None = None
        self._over = threading.Event()
        self._failure: BaseException | None = None
        self.steps = 0

    def run(self, *functions: Callable[[], object]) -> None:
        """Run functions in threads of their own until all have ended.

        Raises:
            StuckError: if they do not.
            BaseException: what one of them raised.

        """
        self._threads = [_Thread(run, self._random.random() + 1) for run in functions]
        threads = [threading.Thread(target=self._live, args=(one,)) for one in self._threads]
        for thread in threads:
            thread.start()
        self._hand_over(None)
        self._over.wait()
        for one in self._threads:
            one.baton.release()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure

    def step(self) -> None:
        """Let another thread go on, perhaps; called before each access to shared words."""
        if self._running is None:  # before the run, or after it
            return
        self.steps += 1
        if self.steps > self.LIMIT:
            raise StuckError(f"no end after {self.LIMIT} accesses")
        running = self._running
        lowered = self._moments.get(self.steps)
        if lowered is not None:
            running.priority = lowered
            self._hand_over(running)

    def sleep(self, word: int) -> None:
        """Let the thread that runs sleep until somebody wakes who sleeps on the word."""
        running = self._running
        assert running is not None
        running.word = word
        self._hand_over(running)

    def wake(self, word: int, count: int) -> None:
        """Wake so many of those that sleep on the word, in any order."""
        running = self._running
        if running is None:
            return
        sleeping = [one for one in self._threads if one.word == word]
        for one in self._random.sample(sleeping, min(count, len(sleeping))):
            one.word = None
        self._hand_over(running)

    def _live(self, one: _Thread) -> None:
        one.baton.acquire()
        try:
            if not self._over.is_set():
                one.run()
                one.ended = True
                self._hand_over(None)
        except _EndedError:
            pass
        except BaseException as failure:
            self._fail(failure)

    def _hand_over(self, running: _Thread | None) -> None:
        """Let the thread go on that has the highest priority."""
        awake = [one for one in self._threads if not one.ended and one.word is None]
        if not awake:
            if all(one.ended for one in self._threads):
                self._over.set()
            else:
                self._fail(StuckError("everybody sleeps"))
            chosen = None
        else:
            chosen = max(awake, key=lambda one: one.priority)
        if chosen is running and chosen is not None:
            return
        self._running = chosen
        if chosen is not None:
            chosen.baton.release()
        if running is not None:
            running.baton.acquire()
            if self._over.is_set():
                raise _EndedError

    def _fail(self, failure: BaseException) -> None:
        if self._failure is None:
            self._failure = failure
        self._over.set()


class Primitives:
    """What takes the place of the module `threading` in code that runs in drawn orders.

    A wait with a timeout may end at any time: so no order hangs on how long it was.

    Args:
        schedule: of the run.
        seed: decides which waits end without being woken.

    """

    #: How often such a wait ends at once.
    IMPATIENCE = 0.3

    def __init__(self, schedule: Schedule, seed: int) -> None:
        self.schedule = schedule
        self.random = random.Random(seed)
        self.locks: list[Lock] = []
        self._words = itertools.count(1)
        self.get_ident = threading.get_ident

    def Lock(self) -> Lock:  # noqa: N802 - named as in `threading`
        lock = Lock(self.schedule, next(self._words))
        self.locks.append(lock)
        return lock

    def Event(self) -> Event:  # noqa: N802
        return Event(self, next(self._words))


class Lock:
    """A lock; to take it is a step."""

    def __init__(self, schedule: Schedule, word: int) -> None:
        self._schedule = schedule
        self._word = word
        self.held = False

    def __enter__(self) -> None:
        self._schedule.step()
        while self.held:
            self._schedule.sleep(self._word)
        self.held = True

    def __exit__(self, *_: object) -> None:
        self.held = False
        self._schedule.wake(self._word, 1)
        self._schedule.step()


class Event:
    """An event; whatever is done with it is a step."""

    def __init__(self, primitives: Primitives, word: int) -> None:
        self._primitives = primitives
        self._schedule = primitives.schedule
        self._word = word
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._schedule.wake(self._word, 1 << 20)
        self._schedule.step()

    def clear(self) -> None:
        self._set = False
        self._schedule.step()

    def wait(self, timeout: float | None = None) -> bool:
        self._schedule.step()
        if self._set:
            return True
        primitives = self._primitives
        if timeout is None or primitives.random.random() >= primitives.IMPATIENCE:
            self._schedule.sleep(self._word)
        return self._set
