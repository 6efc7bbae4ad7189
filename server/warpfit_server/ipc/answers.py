"""Answers of the engine on their way to the calls that wait for them.

A call that waits reads from the connection itself and hands the answers of other calls to them, so
that a lone call waits for no second thread. One call *leads* at a time, which means that it reads;
when its own answer is there, it passes the lead on to another one that waits.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final

from warpfit_server.ipc.channel import Channel, ChannelClosedError
from warpfit_server.ipc.messages import Message
from warpfit_server.system.resources import available_cores

#: Seconds that a lone call looks for its answer before it sleeps: an idle core of a virtual machine
#: takes some 50 to 100 microseconds to wake up.
_AWAKE_SECONDS: Final = 0.001
#: Cores from which on one of them is spared for that.
_MANY_CORES: Final = 8
#: What a call that waits finds among its events when it has to read.
_LEAD: Final = object()


class Answers:
    """Reads the answers that come over a channel, on the threads that wait for them.

    Args:
        channel: of the engine; it is closed by `watch`.
        deliver: puts a message into the queue of the call that it is for.

    """

    def __init__(self, channel: Channel, deliver: Callable[[Message], None]) -> None:
        self._channel = channel
        self._deliver = deliver
        self._lock = threading.Lock()
        """Guards what follows."""
        self._leader: SimpleQueue[Any] | None = None
        self._followers: dict[SimpleQueue[Any], None] = {}
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closed = False
        self._reading = threading.Lock()
        """Held while the channel is waited for or read."""
        self._poll = select.poll()
        self._poll.register(channel.fileno(), select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)
        self._has_many_cores = available_cores() >= _MANY_CORES

    def next_event(self, events: SimpleQueue[Any]) -> Any:
        """Wait for the next event of a call; read for all calls if no other one does."""
        with self._lock:
            if self._leader is None:
                self._leader = events
            else:
                self._followers[events] = None
        try:
            while True:
                if self._leader is events:
                    self._lead(events)
                event = events.get()
                if event is not _LEAD:
                    return event
        finally:
            self._leave(events)

    def wake(self, events: SimpleQueue[Any]) -> None:
        """Let a call notice an event that did not come over the channel."""
        with self._lock:
            if self._leader is events and not self._is_closed:
                os.eventfd_write(self._wake, 1)

    def watch(self) -> None:
        """Wait until the engine is gone, deliver its last answers, and close the channel."""
        hang_up = select.poll()
        hang_up.register(self._channel.fileno(), 0)  # hang-ups are always told
        hang_up.poll()
        with self._reading:
            try:
                while True:
                    self._deliver(self._channel.receive()[0])
            except ChannelClosedError:
                pass
            finally:
                self.close()

    def close(self) -> None:
        """Close the channel while nobody reads from it."""
        with self._lock:
            self._is_closed = True
            os.close(self._wake)
        self._channel.close()

    def _lead(self, events: SimpleQueue[Any]) -> None:
        """Read until there is an event for this call, or nothing to read from any more."""
        with self._reading:
            end = time.perf_counter() + _AWAKE_SECONDS
            while events.empty() and not self._is_closed:
                stays_awake = self._has_many_cores and not self._followers
                if not self._read(0 if stays_awake and time.perf_counter() < end else None):
                    return

    def _read(self, timeout: int | None) -> bool:
        """Deliver what arrives within a timeout; tell whether there may be more."""
        for descriptor, _ in self._poll.poll(timeout):
            if descriptor == self._wake:
                os.eventfd_read(self._wake)
                continue
            try:
                for message, _ in self._channel.receive_waiting():
                    self._deliver(message)
            except ChannelClosedError:  # `watch` tells everybody
                return False
        return True

    def _leave(self, events: SimpleQueue[Any]) -> None:
        """Pass the lead on."""
        with self._lock:
            self._followers.pop(events, None)
            if self._leader is not events:
                return
            self._leader = next(iter(self._followers), None)
            if self._leader is not None:
                del self._followers[self._leader]
                self._leader.put(_LEAD)
