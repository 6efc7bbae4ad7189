"""Segments, frames, channels, lanes and leases: the way to an engine, without processes."""

from __future__ import annotations

import os
import select
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from support.lanes import DATA, an_evaluation, engine_ends
from warpfit.errors import (
    CancelledError,
    DatasetNotFoundError,
    ProgramError,
    ResourceExhaustedError,
    UnavailableError,
)
from warpfit.ir import Batch
from warpfit.parse import parse
from warpfit.request import Loss, Precision, Tier, Timings
from warpfit_server import channel as wire
from warpfit_server.channel import Channel, ChannelClosedError
from warpfit_server.door import BorrowedLeases
from warpfit_server.frame import Frame
from warpfit_server.lanes import Lanes, Use
from warpfit_server.orders import Evaluate
from warpfit_server.segments import Segment, SegmentPool


class TestSegments:
    def test_two_mappings_share_bytes(self):
        ours = Segment.create(1, 4096)
        theirs = Segment(1, os.dup(ours.descriptor), 4096)
        ours.array("<f4", (3,), 64)[...] = [1, 2, 3]
        assert theirs.array("<f4", (3,), 64).tolist() == [1, 2, 3]

    def test_arrays_outlive_the_descriptor(self):
        segment = Segment.create(1, 4096)
        array = segment.array("u1", (4096,))
        view = segment.array("<f4", (3, 2), 64)[1]
        segment.close()
        view[...] = 1.0
        del segment
        array[...] = 7
        assert array.sum() == 7 * 4096

    def test_pool_reuses_and_caps(self):
        pool = SegmentPool(idle_bytes=128 << 10)
        first = pool.acquire(100)
        assert first.size == 64 << 10
        assert pool.release(first)
        assert pool.acquire(65536) is first
        large = pool.acquire(1 << 20)
        assert not pool.release(large)
        assert large.descriptor == -1

    def test_impossible_size(self):
        with pytest.raises(ResourceExhaustedError) as caught:
            SegmentPool(0).create(1 << 62)
        assert caught.value.needed == 1 << 62


class TestFrame:
    @pytest.mark.parametrize("loss", [None, Loss.MSE])
    @pytest.mark.parametrize("values", [True, False])
    def test_batch_survives_and_views_do_not_overlap(self, loss, values):
        evaluation = an_evaluation(loss=loss, values=values)
        frame = Frame.of(evaluation, DATA.layout)
        segment = Segment.create(1, frame.nbytes)
        frame.write(segment, evaluation)
        if values:
            frame.values_view(segment)[...] = np.nan
        if loss:
            frame.losses_view(segment)[...] = np.nan
        frame.flag(segment)[0] = 255
        copy = frame.batch(segment)
        for name in ("codes", "values", "lengths", "parameter_counts", "parameters"):
            np.testing.assert_array_equal(getattr(copy, name), getattr(evaluation.batch, name))

    def test_write_clears_the_cancellation_of_an_earlier_use(self):
        frame = Frame.of(an_evaluation(), DATA.layout)
        segment = Segment.create(1, frame.nbytes)
        frame.flag(segment)[0] = 1
        frame.write(segment, an_evaluation())
        assert frame.flag(segment)[0] == 0


class TestLanes:
    def test_an_evaluation_crosses_and_its_segment_serves_the_next_one(self):
        lanes = Lanes(SegmentPool(1 << 20))
        (engine,) = engine_ends(lanes)
        evaluation = an_evaluation(loss=Loss.MSE, values=False)
        run = lanes.start(evaluation, DATA.layout, lambda: True)
        message, (descriptor,) = engine.receive()
        theirs = Segment(0, descriptor, message.size)
        message.frame.losses_view(theirs)[...] = 7.0
        engine.send(wire.Finished())
        assert isinstance(run.next_event(), wire.Finished)
        assert run.losses.tolist() == [[7.0]] * 7
        run.close()
        again = lanes.start(evaluation, DATA.layout, lambda: True)
        message, descriptors = engine.receive()
        assert (message.size, descriptors) == (0, [])
        engine.send(wire.Finished())
        again.close()

    def test_a_segment_that_was_never_sent_is_sent_with_the_nextevaluation(self):
        lanes = Lanes(SegmentPool(1 << 20))
        (engine,) = engine_ends(lanes)
        evaluation = an_evaluation(loss=Loss.MSE, values=False)
        broken = replace(evaluation, batch=replace(evaluation.batch, codes=np.zeros((2, 2))))
        with pytest.raises(ValueError, match="broadcast"):
            lanes.start(broken, DATA.layout, lambda: True)
        lanes.start(evaluation, DATA.layout, lambda: True)
        message, descriptors = engine.receive()
        assert message.size > 0
        assert len(descriptors) == 1
        os.close(descriptors[0])

    @pytest.mark.parametrize("idle_bytes", [1 << 20, 0])
    def test_values_keep_their_segment_but_no_lane(self, idle_bytes):
        pool = SegmentPool(idle_bytes)
        lanes = Lanes(pool)
        (engine,) = engine_ends(lanes)
        first = lanes.start(an_evaluation(), DATA.layout, lambda: True)
        os.close(engine.receive()[1][0])
        engine.send(wire.Finished())
        first.next_event()
        second = lanes.start(an_evaluation(), DATA.layout, lambda: True)  # the lane is free
        assert second.segment is not first.segment
        kept = first.segment
        first.close()
        assert (kept.descriptor >= 0) == (idle_bytes > 0)  # kept for the next, or gone
        os.close(engine.receive()[1][0])
        engine.send(wire.Finished())
        second.close()
        third = lanes.start(an_evaluation(), DATA.layout, lambda: True)
        if idle_bytes:  # the lane's mapping serves again
            assert third.segment is second.segment
            assert engine.receive()[1] == []
        else:
            assert isinstance(engine.receive()[0], wire.Unmap)
            os.close(engine.receive()[1][0])

    def test_cancelling_a_run_that_has_ended_touches_nobody_else(self):
        lanes = Lanes(SegmentPool(1 << 20))
        (engine,) = engine_ends(lanes)
        evaluation = an_evaluation(loss=Loss.MSE, values=False)
        run = lanes.start(evaluation, DATA.layout, lambda: True)
        run.cancel()
        assert run.frame.flag(run.segment)[0] == 1
        engine.receive()
        engine.send(wire.Finished())
        run.next_event()
        other = lanes.start(evaluation, DATA.layout, lambda: True)
        run.cancel()
        assert other.frame.flag(other.segment)[0] == 0

    def test_a_call_that_waits_for_a_lane_can_end(self):
        lanes = Lanes(SegmentPool(1 << 20))
        _engine = engine_ends(lanes)
        lanes.start(an_evaluation(), DATA.layout, lambda: True)
        with pytest.raises(CancelledError):
            lanes.start(an_evaluation(), DATA.layout, lambda: False)

    @pytest.mark.parametrize(
        "other",
        [
            {"precision": Precision.FAST},
            {"loss": Loss.R2},
            {"tier": Tier.COMPILED},
            {"tenant": "b"},
        ],
        ids=lambda change: next(iter(change)),
    )
    def test_what_alternates_has_lanes_of_its_own(self, other):
        lanes = Lanes(SegmentPool(1 << 20))
        ends = engine_ends(lanes, 3)
        uses = [{"tenant": "a"}, {"tenant": "a", **other}]
        took = []
        for turn in range(6):
            changes = dict(uses[turn % 2])
            tenant = changes.pop("tenant")
            evaluation = an_evaluation(**{"loss": Loss.MSE, "values": False, **changes})
            run = lanes.start(evaluation, DATA.layout, lambda: True, tenant)
            (end,) = [end for end in ends if select.select([end._socket], [], [], 0)[0]]
            took.append(ends.index(end))
            _, descriptors = end.receive()
            for descriptor in descriptors:
                os.close(descriptor)
            end.send(wire.Finished())
            run.next_event()
            run.close()
        assert took[0] != took[1]
        assert took == took[:2] * 3

    def test_the_end_of_the_engine_fails_runs_until_the_next_one(self):
        lanes = Lanes(SegmentPool(1 << 20))
        first, second = engine_ends(lanes, 2)
        run = lanes.start(an_evaluation(), DATA.layout, lambda: True)
        first.close()
        second.close()
        with pytest.raises(UnavailableError):
            run.next_event()
        run.close()
        with pytest.raises(UnavailableError):
            lanes.start(an_evaluation(), DATA.layout, lambda: True)
        _next = engine_ends(lanes)
        lanes.start(an_evaluation(), DATA.layout, lambda: True)


class TestBorrowedLeases:
    def _leases(self):
        sent = []
        return BorrowedLeases(sent.append), sent

    def _found(self, leases, content_id=b"x"):
        """Answer the look-up that the next lease makes."""
        thread = threading.Timer(0.05, leases.found, [wire.Found(content_id, DATA.layout)])
        thread.start()

    def test_one_question_serves_many_calls_and_an_idle_lease_goes_back(self):
        leases, sent = self._leases()
        self._found(leases)
        for _ in range(3):
            with leases.lease(b"x") as layout:
                assert layout == DATA.layout
        assert sent == [wire.Lookup(b"x")]
        leases.give_idle_back()
        assert sent == [wire.Lookup(b"x")]  # not idle for long
        time.sleep(1.1)
        leases.give_idle_back()
        assert sent == [wire.Lookup(b"x"), wire.Unused(b"x")]

    def test_what_is_missing_is_asked_for_again(self):
        leases, sent = self._leases()
        error = DatasetNotFoundError("no", "DATASET_NOT_FOUND")
        for _ in range(2):
            threading.Timer(0.05, leases.missing, [wire.Missing(b"x", error)]).start()
            with pytest.raises(DatasetNotFoundError), leases.lease(b"x"):
                pass
        assert sent == [wire.Lookup(b"x")] * 2

    def test_a_released_data_set_serves_no_new_call(self):
        leases, sent = self._leases()
        self._found(leases)
        with leases.lease(b"x"):
            leases.forget(b"x")
            assert sent[1:] == [wire.Forgotten(b"x")]
            self._found(leases)
            with leases.lease(b"x"):
                assert sent[2:] == [wire.Lookup(b"x")]
        assert sent[3:] == [wire.Unused(b"x")]  # of the lease that was forgotten


class TestChannel:
    def test_messages_and_descriptors_cross(self):
        ours, socket = Channel.pair()
        theirs = Channel(socket)
        segment = Segment.create(5, 4096)
        evaluation = an_evaluation()
        message = Evaluate(
            size=4096,
            keep=True,
            frame=Frame.of(evaluation, DATA.layout),
            dataset_id=DATA.content_id,
            rows=(0, 10),
            precision=Precision.FAST,
            loss=Loss.R2,
            tier=Tier.AUTO,
            submitted=123,
        )
        ours.send(message, [segment.descriptor])
        received, descriptors = theirs.receive()
        assert received == message
        assert os.fstat(descriptors[0]).st_ino == os.fstat(segment.descriptor).st_ino
        os.close(descriptors[0])

    def test_errors_cross_whole(self):
        ours, socket = Channel.pair()
        error = ProgramError("bad", "REASON", "mend it", "programs", 3, 4)
        ours.send(wire.Finished(Timings(queue=5), error))
        received, _ = Channel(socket).receive()
        assert received.error.__dict__ == error.__dict__
        assert str(received.error) == "bad (expression 3, token 4). mend it"

    def test_closing_wakes_the_reader(self):
        ours, socket = Channel.pair()
        theirs = Channel(socket)
        outcome = []

        def read():
            try:
                theirs.receive()
            except ChannelClosedError:
                outcome.append("closed")

        thread = threading.Thread(target=read)
        thread.start()
        ours.close()
        thread.join(5)
        assert outcome == ["closed"]
        with pytest.raises(ChannelClosedError):
            theirs.send(wire.Stop())


def test_a_fit_keeps_nothing_in_the_memory_of_its_lane():
    """Engines remember arrays of tokens between passes; the segment is used again."""
    batch = Batch.of([parse("p1*x1 + p2"), parse("x1^2")], [[1.0, 2.0], []])
    copy = batch.copy()
    for name in ("codes", "values", "lengths", "parameter_counts", "parameters"):
        one, other = getattr(copy, name), getattr(batch, name)
        np.testing.assert_array_equal(one, other)
        assert not np.shares_memory(one, other)


class TestTenants:
    def test_the_last_lane_is_kept_for_a_tenant_that_has_none(self):
        lanes = Lanes(SegmentPool(1 << 20))
        _ends = engine_ends(lanes, 3)
        runs = [_start(lanes, "greedy") for _ in range(2)]
        with pytest.raises(CancelledError):  # it waits, until its call has ended
            _start(lanes, "greedy", is_wanted=lambda: False)
        runs.append(_start(lanes, "modest"))

    def test_fits_leave_lanes_to_evaluations_and_to_those_who_have_no_fit(self):
        lanes = Lanes(SegmentPool(1 << 20))
        _ends = engine_ends(lanes, 6)

        def take(tenant, *, fit):
            return lanes._take(lambda: False, Use(tenant, fit=fit))

        fits = [take("greedy", fit=True) for _ in range(4)]
        with pytest.raises(CancelledError):
            take("greedy", fit=True)
        take("greedy", fit=False)
        lanes.put_back(fits.pop())
        take("modest", fit=True)
        for tenant in ("greedy", "modest"):
            with pytest.raises(CancelledError):
                take(tenant, fit=True)
        lanes.put_back(fits.pop())
        take("modest", fit=True)

    def test_a_lane_goes_to_the_tenant_with_fewest(self):
        lanes = Lanes(SegmentPool(1 << 20))
        ends = engine_ends(lanes, 2)
        runs = [_start(lanes, "greedy"), _start(lanes, "other")]
        served = []

        def wait(tenant):
            runs.append(_start(lanes, tenant))
            served.append(tenant)

        for tenant in ("other", "modest"):
            threading.Thread(target=wait, args=(tenant,), daemon=True).start()
            time.sleep(0.05)
        end = ends[1]  # lanes are taken from the end
        end.receive()
        end.send(wire.Finished())
        runs[0].next_event()
        deadline = time.monotonic() + 10
        while not served and time.monotonic() < deadline:
            time.sleep(0.01)
        assert served == ["modest"]

    def test_all_lanes_serve_one_tenant_in_turn(self):
        lanes = Lanes(SegmentPool(1 << 20))
        ends = engine_ends(lanes, 3)
        stop = threading.Event()

        def answer(end):
            end.wake_every(10_000)
            while not stop.is_set():
                try:
                    for _ in end.receive()[1]:
                        pass
                except BlockingIOError:
                    continue
                end.send(wire.Finished())

        threads = [threading.Thread(target=answer, args=(end,)) for end in ends]
        for thread in threads:
            thread.start()

        def call(number):
            run = lanes.start(
                an_evaluation(loss=Loss.MSE), DATA.layout, lambda: True, f"t{number % 3}"
            )
            run.next_event()
            run.close()

        with ThreadPoolExecutor(12) as pool:
            list(pool.map(call, range(200)))
        stop.set()
        for thread in threads:
            thread.join()
        assert len(lanes._idle) == 3
        assert not +lanes._used


def _start(lanes, tenant, is_wanted=lambda: True):
    return lanes.start(an_evaluation(loss=Loss.MSE), DATA.layout, is_wanted, tenant)
