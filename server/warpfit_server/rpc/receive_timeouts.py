"""Time limits for the next message of a call."""

import logging
import threading
import time
from collections.abc import Callable, Hashable
from typing import Final

_LOG: Final = logging.getLogger("warpfit.workers")
#: Seconds between two looks for calls whose time is up.
_LOOK_SECONDS: Final = 0.25


class ReceiveTimeouts:
    """Ends calls whose next message does not arrive in time, from a thread of its own.

    gRPC waits for a message as long as the client likes; meanwhile the call holds a thread. The
    waiting thread and the one that ends calls both remove the call from a dictionary when they are
    done with it, which only one of them succeeds in.
    """

    def __init__(self) -> None:
        self._waiting: dict[Hashable, tuple[float, Callable[[], None]]] = {}
        self._lock = threading.Lock()
        self._runs = False

    def begin(self, call: Hashable, seconds: float, end: Callable[[], None]) -> None:
        """Call ``end`` after some seconds, unless `stop` comes first.

        ``end`` must not block, and must let the waiting thread go on.
        """
        self._waiting[call] = time.monotonic() + seconds, end
        if not self._runs:
            self._start()

    def stop(self, call: Hashable) -> bool:
        """Stop waiting for a call; return False if its time was up and it has been ended."""
        return self._waiting.pop(call, None) is not None

    def _start(self) -> None:
        with self._lock:
            if self._runs:
                return
            self._runs = True
        threading.Thread(target=self._watch, name="receive-timeouts", daemon=True).start()

    def _watch(self) -> None:
        """End late calls; the thread ends when no call waits, and the next call starts it again."""
        while True:
            time.sleep(_LOOK_SECONDS)
            now = time.monotonic()
            for call, (limit, end) in self._waiting.copy().items():
                if limit <= now and self.stop(call):
                    try:
                        end()
                    except Exception:
                        _LOG.exception("a call could not be ended")
            with self._lock:
                if not self._waiting:
                    self._runs = False
                    return
