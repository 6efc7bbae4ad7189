"""The engine's end of a lane: messages, descriptors, and ends of the other end."""

from __future__ import annotations

import os
import resource
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("numba")

from warpfit.errors import InternalError, ResourceExhaustedError, UnavailableError
from warpfit.request import Tier, Timings
from warpfit_server import channel as wire
from warpfit_server.channel import Channel, ChannelClosedError
from warpfit_server.engine.lane_end import LaneEnd
from warpfit_server.segments import Segment


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pair = Channel(ours), LaneEnd(theirs)
    yield pair
    for end in pair:
        end.close()


@pytest.mark.parametrize("awake", [False, True])
def test_answers_and_orders_take_turns(ends, awake):
    door, engine = ends
    timings = Timings(queue=3, compute=7, tier=Tier.COMPILED, cache_hits=9)
    answers = [None, wire.Finished(timings), wire.Finished(error=UnavailableError("no", "WHY"))]
    for number, answer in enumerate(answers):
        door.send(wire.Unload(bytes([number])))
        message, descriptors = engine.exchange(answer, awake=awake)
        assert (message, descriptors) == (wire.Unload(bytes([number])), [])
    first, _ = door.receive()
    second, _ = door.receive()
    assert first == answers[1]
    assert (second.error.message, second.error.reason) == ("no", "WHY")


@pytest.mark.parametrize("awake", [False, True])
def test_waits_for_what_comes_late(ends, awake):
    door, engine = ends
    timer = threading.Timer(0.05, door.send, [wire.Count()])
    timer.start()
    assert engine.exchange(None, awake=awake) == (wire.Count(), [])
    timer.join()


def test_descriptors_come_along_and_are_not_inherited(ends):
    door, engine = ends
    null = Path(os.devnull)
    with null.open() as one, null.open() as other:
        door.send(wire.Count(), [one.fileno(), other.fileno()])
    _, descriptors = engine.exchange(None, awake=False)
    assert len(descriptors) == 2
    for descriptor in descriptors:
        assert not os.get_inheritable(descriptor)
        os.close(descriptor)
    door.send(wire.Count())
    assert engine.exchange(None, awake=False)[1] == []


def test_the_other_end_has_closed(ends):
    door, engine = ends
    door.close()
    with pytest.raises(ChannelClosedError):
        engine.exchange(None, awake=True)
    with pytest.raises(ChannelClosedError):
        engine.exchange(wire.Finished(), awake=False)


def test_a_message_that_is_too_long_is_not_sent_and_the_next_one_is(ends):
    door, engine = ends
    with pytest.raises(InternalError) as caught:
        door.send(wire.Unload(bytes(200_000)))
    assert caught.value.reason == "MESSAGE_TOO_LONG"
    door.send(wire.Unload(b"next"))
    assert engine.exchange(None, awake=False)[0] == wire.Unload(b"next")


def test_an_answer_that_is_too_long_becomes_an_error_of_its_call(ends):
    door, engine = ends
    door.send(wire.Unload(b"next"))
    assert engine.exchange(wire.Missing(bytes(200_000), None), awake=False)[0]
    assert door.receive()[0].error.reason == "MESSAGE_TOO_LONG"


def test_a_descriptor_for_which_there_is_no_room_costs_the_descriptor_alone(ends):
    door, engine = ends
    with Path(os.devnull).open() as null:
        door.send(wire.Unload(b"with"), [null.fileno()])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(path.name) for path in Path("/proc/self/fd").iterdir()) + 1
    filled = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                filled.append(os.dup(0))
        with pytest.raises(ResourceExhaustedError) as caught:
            Segment.create(1, 4096)
        received = engine.exchange(None, awake=False)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in filled:
            os.close(descriptor)
    assert received == (wire.Unload(b"with"), [])
    assert caught.value.reason == "TOO_MANY_FILES"
    door.send(wire.Unload(b"next"))
    assert engine.exchange(None, awake=False) == (wire.Unload(b"next"), [])


def test_waiting_awake_ends(ends, monkeypatch):
    """A lane that nobody calls must not keep a core busy for ever."""
    _, engine = ends
    engine.line = engine.line._replace(awake=20_000_000)
    clock = []

    def wait():
        with pytest.raises(ChannelClosedError):
            engine.exchange(None, awake=True)
        clock.append(time.thread_time())

    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join(0.5)
    engine._socket.shutdown(socket.SHUT_RDWR)
    waiting.join(10)
    assert clock[0] < 0.25


def test_a_signal_does_not_end_the_lane(ends):
    """It interrupts the system call of the thread that it comes to."""
    door, engine = ends
    received = []
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        waiting = threading.Thread(
            target=lambda: received.append(engine.exchange(None, awake=False))
        )
        waiting.start()
        for _ in range(5):
            time.sleep(0.05)
            signal.pthread_kill(waiting.ident, signal.SIGUSR1)
        time.sleep(0.05)
        door.send(wire.Count())
        waiting.join(10)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert received == [(wire.Count(), [])]
