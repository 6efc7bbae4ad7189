"""The engine's end of a lane: messages, descriptors, and ends of the other end."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("numba")

from warpfit.errors import UnavailableError
from warpfit.request import Tier, Timings
from warpfit_server import channel as wire
from warpfit_server.channel import Channel, ChannelClosedError
from warpfit_server.engine.lane_end import LaneEnd


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


def test_a_message_longer_than_a_packet_is_none(ends):
    door, engine = ends
    door.send(wire.Unload(bytes(200_000)))
    with pytest.raises(ChannelClosedError):
        engine.exchange(None, awake=False)


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
