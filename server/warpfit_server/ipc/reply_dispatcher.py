"""Reads the engine's replies on the threads that wait for them.

A thread that waits for a reply reads from the connection itself and hands the replies of other
requests to their threads, so that a lone call does not wait for a second thread to wake up (the
leader/follower pattern). One thread leads at a time, which means that it reads; when it has its own
reply it passes the lead on to another one that waits.
"""

import os
import select
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final

from warpfit_server.ipc.channel import Channel, ChannelClosedError
from warpfit_server.ipc.messages import Message

#: Seconds that a lone leader polls before it sleeps, longer than most steps: an idle core of a
#: virtual machine takes some 50 to 100 microseconds to wake up.
_POLL_SECONDS: Final = 0.003
#: What a thread finds in its queue when it becomes the leader.
_LEAD: Final = object()


class ReplyDispatcher:
    """Reads the replies that come over a channel.

    ``deliver`` puts a message into the queue of the request that it is for; `watch` closes the
    channel. ``may_poll`` tells whether a core may be spent on waiting.
    """

    def __init__(
        self,
        channel: Channel,
        deliver: Callable[[Message], None],
        may_poll: Callable[[], bool] = lambda: False,
    ) -> None:
        self._channel = channel
        self._deliver = deliver
        self._may_poll = may_poll
        self._lock = threading.Lock()
        """Guards what follows."""
        self._leader: SimpleQueue[Any] | None = None
        self._followers: dict[SimpleQueue[Any], None] = {}
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closed = False
        self._reading = threading.Lock()
        """Held while the channel is polled or read."""
        self._poll = select.poll()
        self._poll.register(channel.fileno(), select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)

    def next_reply(self, queue: SimpleQueue[Any]) -> Any:
        """Wait for the next entry of a request's queue; lead if no other thread does."""
        with self._lock:
            if self._leader is None:
                self._leader = queue
            else:
                self._followers[queue] = None
        try:
            while True:
                if self._leader is queue:
                    self._lead(queue)
                reply = queue.get()
                if reply is not _LEAD:
                    return reply
        finally:
            self._leave(queue)

    def wake(self, queue: SimpleQueue[Any]) -> None:
        """Let a thread notice an entry that did not come over the channel."""
        with self._lock:
            if self._leader is queue and not self._is_closed:
                os.eventfd_write(self._wake, 1)

    def receive_now(self) -> None:
        """Deliver what has arrived, unless another thread does; any thread may call this."""
        if self._reading.acquire(blocking=False):
            try:
                if not self._is_closed:
                    self._read(0)
            finally:
                self._reading.release()

    def watch(self) -> None:
        """Wait until the engine is gone, deliver its last replies, and close the channel."""
        hang_up = select.poll()
        hang_up.register(self._channel.fileno(), 0)  # poll always reports hang-ups
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
        """Close the channel while no thread reads from it."""
        with self._lock:
            self._is_closed = True
            os.close(self._wake)
        self._channel.close()

    def _lead(self, queue: SimpleQueue[Any]) -> None:
        """Read until this queue has an entry or the channel is closed."""
        with self._reading:
            end = time.perf_counter() + _POLL_SECONDS if self._may_poll() else 0.0
            while queue.empty() and not self._is_closed:
                keeps_polling = not self._followers and time.perf_counter() < end
                if not self._read(0 if keeps_polling else None):
                    return

    def _read(self, timeout: int | None) -> bool:
        """Deliver what arrives within a timeout; return whether there may be more."""
        for descriptor, _ in self._poll.poll(timeout):
            if descriptor == self._wake:
                os.eventfd_read(self._wake)
                continue
            try:
                for message, _ in self._channel.receive_waiting():
                    self._deliver(message)
            except ChannelClosedError:  # `watch` has all requests fail
                return False
        return True

    def _leave(self, queue: SimpleQueue[Any]) -> None:
        """Pass the lead on."""
        with self._lock:
            self._followers.pop(queue, None)
            if self._leader is not queue:
                return
            self._leader = next(iter(self._followers), None)
            if self._leader is not None:
                del self._followers[self._leader]
                self._leader.put(_LEAD)
