"""The time within which a call's next message must have arrived."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable
from typing import Final

_LOG: Final = logging.getLogger("warpfit.workers")
#: Seconds between two looks for calls whose time is up.
_LOOK_SECONDS: Final = 0.25


class ReceiveTimeouts:
    """Ends calls that a thread waits for in vain, from a thread of its own.

    gRPC waits for a message as long as the client likes; meanwhile the call holds a thread. That
    nobody waits any more is one removal from a dictionary, which the waiting thread and the one
    that ends calls compete for: exactly one of them finds the entry.
    """

    def __init__(self) -> None:
        self._waiting: dict[Hashable, tuple[float, Callable[[], None]]] = {}
        self._lock = threading.Lock()
        self._runs = False

    def begin(self, call: Hashable, seconds: float, end: Callable[[], None]) -> None:
        """Let a call be ended unless `stop` comes first.

        Args:
            call: that waits.
            seconds: that it may take.
            end: ends the call, so that the thread that waits goes on; it must not block.

        """
        self._waiting[call] = time.monotonic() + seconds, end
        if not self._runs:
            self._start()

    def stop(self, call: Hashable) -> bool:
        """End the waiting of a call; False if it was ended because its time was up."""
        return self._waiting.pop(call, None) is not None

    def _start(self) -> None:
        with self._lock:
            if self._runs:
                return
            self._runs = True
        threading.Thread(target=self._watch, name="receive-timeouts", daemon=True).start()

    def _watch(self) -> None:
        """End what is late; the thread goes when no call waits, the next one starts it again."""
        while True:
            time.sleep(_LOOK_SECONDS)
            now = time.monotonic()
            late = [call for call, (at, _) in self._waiting.copy().items() if at <= now]
            for call in late:
                self._end(call)
            with self._lock:
                if not self._waiting:
                    self._runs = False
                    return

    def _end(self, call: Hashable) -> None:
        found = self._waiting.pop(call, None)
        if found is None:  # its message has come after all
            return
        try:
            found[1]()
        except Exception:
            _LOG.exception("a call was not ended")
