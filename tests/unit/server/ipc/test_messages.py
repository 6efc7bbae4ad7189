"""Channels: messages of any length, and file descriptors."""

import os
import resource
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from warpfit.errors import InternalError, ResourceExhaustedError, UnavailableError
from warpfit.request import Tier, Timings
from warpfit_server.ipc import messages
from warpfit_server.ipc.messages import Channel, ChannelClosedError
from warpfit_server.ipc.segments import Segment, SegmentLayout
from warpfit_server.system.sockets import socket_pair


@pytest.fixture
def ends():
    ours, socket = Channel.pair()
    theirs = Channel(socket)
    yield ours, theirs
    ours.close()
    theirs.close()


def note(size):
    return messages.DatasetLoaded(b"x" * size, UnavailableError("why", "REASON"))


def test_messages_arrive_whole_and_in_order(ends):
    ours, theirs = ends
    sizes = [0, 1, 4_096, 200_000, 3_000_000, 5]

    def send():
        for size in sizes:
            ours.send(note(size))

    thread = threading.Thread(target=send)
    thread.start()
    for size in sizes:
        message, descriptor = theirs.receive()
        assert (len(message.key), message.error.reason) == (size, "REASON")
        assert descriptor is None
    thread.join()


def test_the_messages_of_every_call_arrive_as_they_were(ends):
    ours, theirs = ends
    layout = SegmentLayout(
        1, 3, 1, 8, 32, 1 << 62, 3, 3, 1 << 75, {"losses": ("<f8", (1, 1), 64)}, 128
    )
    rows = {"rows": (0, 8), "precision": "FAST", "loss": None, "tier": "AUTO"}
    submitted = messages.SubmitEvaluation(7, 1, 1 << 33, layout, bytes(32), **rows, submitted=2**60)
    timings = Timings(1, *np.arange(4), tier=Tier.COMPILED, cache_hits=np.int64(5))
    finished = messages.RequestFinished.of(7, timings, 9)
    failed = messages.RequestFinished(7, UnavailableError("why", "REASON"))
    for message in (submitted, finished):
        ours.send(message)
        assert repr(theirs.receive()[0]) == repr(message)
    assert finished.timings == replace(timings, queue=9)
    ours.send(failed)
    assert theirs.receive()[0].error.reason == "REASON"


def test_descriptors_belong_to_their_messages(ends, tmp_path):
    ours, theirs = ends
    files = [(tmp_path / str(number)).open("w+") for number in range(6)]
    for number, file in enumerate(files):
        file.write(str(number))
        file.flush()
        ours.send(note(number))
        ours.send(note(100 + number), file.fileno())
    for number in range(6):
        assert theirs.receive()[1] is None
        message, descriptor = theirs.receive()
        assert len(message.key) == 100 + number
        assert os.pread(descriptor, 10, 0) == str(number).encode()
        os.close(descriptor)
    for file in files:
        file.close()


def test_a_message_that_is_too_long_fails_alone(ends):
    ours, theirs = ends
    with pytest.raises(InternalError, match="too long") as caught:
        ours.send(note(messages.MOST_BYTES + 1))
    assert caught.value.reason == "MESSAGE_TOO_LONG"
    ours.send(note(2))
    assert len(theirs.receive()[0].key) == 2


def test_messages_that_have_arrived_are_received_without_waiting(ends):
    ours, theirs = ends
    assert theirs.receive_waiting() == []
    for size in range(5):
        ours.send(note(size), 0 if size % 2 else None)
    found = theirs.receive_waiting()
    assert [(len(m.key), fd is not None) for m, fd in found] == [(n, n % 2) for n in range(5)]
    for _, descriptor in found:
        if descriptor is not None:
            os.close(descriptor)
    assert theirs.receive_waiting() == []


@contextmanager
def full():
    """Let this process open no more files, even where another thread closes some."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # 0, 1 and 2 are open
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_descriptors_are_left_out_while_no_more_files_can_be_opened(ends):
    ours, theirs = ends
    with Path(os.devnull).open() as null:
        ours.send(note(0))
        ours.send(note(1), null.fileno())
        ours.send(note(2))
        with full():
            lost = [theirs.receive() for _ in range(3)]
            for function in (socket_pair, lambda: Segment.create(1, 4096)):
                with pytest.raises(ResourceExhaustedError) as caught:
                    function()
                assert caught.value.reason == "TOO_MANY_FILES"
        assert [(len(m.key), found) for m, found in lost] == [(0, None), (1, None), (2, None)]
        ours.send(note(3), null.fileno())
    message, found = theirs.receive()
    assert len(message.key) == 3
    os.close(found)


def test_sending_fails_when_the_other_end_does_not_read(ends):
    ours, theirs = ends
    ours.give_up_after(0.2)
    with pytest.raises(ChannelClosedError):
        for _ in range(100):
            ours.send(note(1 << 20))
    with pytest.raises(ChannelClosedError):  # a message was cut off: nothing follows it
        while True:
            theirs.receive()


def test_sending_and_receiving_fail_when_the_other_end_is_gone(ends):
    ours, theirs = ends
    theirs.close()
    with pytest.raises(ChannelClosedError):
        ours.receive()
    with pytest.raises(ChannelClosedError):
        for _ in range(10):
            ours.send(note(100_000))
