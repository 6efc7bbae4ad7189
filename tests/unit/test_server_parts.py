"""Segments, frames, channel, data-set store, limits and configuration, without processes."""

from __future__ import annotations

import os
import socket
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from warpfit.dataset import Dataset
from warpfit.errors import (
    CancelledError,
    DatasetNotFoundError,
    InvalidArgumentError,
    ProgramError,
    ResourceExhaustedError,
    UnavailableError,
)
from warpfit.info import Limits
from warpfit.ir import Batch
from warpfit.request import Evaluation, Loss, Precision, Tier, Timings
from warpfit.workload import thesis_mix
from warpfit_server import channel as wire
from warpfit_server.channel import Channel, ChannelClosedError
from warpfit_server.config import Config, parse_bytes
from warpfit_server.datasets import DatasetStore
from warpfit_server.door import BorrowedLeases
from warpfit_server.frame import Frame
from warpfit_server.lanes import Lanes
from warpfit_server.limits import check_batch, check_dataset, check_result
from warpfit_server.orders import Evaluate
from warpfit_server.segments import Segment, SegmentPool
from warpfit_server.tenants import ANONYMOUS, key_of

DATA = Dataset.of(np.arange(40.0).reshape(10, 4), np.arange(10.0))


def _evaluation(**changes):
    programs, parameters = thesis_mix(3, 7, variables=4)
    fields = {"dataset_id": DATA.content_id, "batch": Batch.of(programs, parameters)}
    return Evaluation(**{**fields, **changes})


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
        evaluation = _evaluation(loss=loss, values=values)
        frame = Frame.of(evaluation, DATA.layout)
        segment = Segment.create(1, frame.nbytes)
        frame.write(segment, evaluation.batch)
        if values:
            frame.values_view(segment)[...] = np.nan
        if loss:
            frame.losses_view(segment)[...] = np.nan
        frame.flag(segment)[0] = 255
        copy = frame.batch(segment)
        for name in ("codes", "values", "lengths", "parameter_counts", "parameters"):
            np.testing.assert_array_equal(getattr(copy, name), getattr(evaluation.batch, name))

    def test_write_clears_the_cancellation_of_an_earlier_use(self):
        frame = Frame.of(_evaluation(), DATA.layout)
        segment = Segment.create(1, frame.nbytes)
        frame.flag(segment)[0] = 1
        frame.write(segment, _evaluation().batch)
        assert frame.flag(segment)[0] == 0


class TestLanes:
    def _engine(self, lanes, count=1):
        """Open lanes; return the engine's ends."""
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(count)]
        lanes.open([ours for ours, _ in pairs])
        return [Channel(theirs) for _, theirs in pairs]

    def test_an_evaluation_crosses_and_its_segment_serves_the_next_one(self):
        lanes = Lanes(SegmentPool(1 << 20))
        (engine,) = self._engine(lanes)
        evaluation = _evaluation(loss=Loss.MSE, values=False)
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

    def test_a_segment_that_was_never_sent_is_sent_with_the_next_evaluation(self):
        lanes = Lanes(SegmentPool(1 << 20))
        (engine,) = self._engine(lanes)
        evaluation = _evaluation(loss=Loss.MSE, values=False)
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
        (engine,) = self._engine(lanes)
        first = lanes.start(_evaluation(), DATA.layout, lambda: True)
        os.close(engine.receive()[1][0])
        engine.send(wire.Finished())
        first.next_event()
        second = lanes.start(_evaluation(), DATA.layout, lambda: True)  # the lane is free
        assert second.segment is not first.segment
        kept = first.segment
        first.close()
        assert (kept.descriptor >= 0) == (idle_bytes > 0)  # kept for the next, or gone
        os.close(engine.receive()[1][0])
        engine.send(wire.Finished())
        second.close()
        third = lanes.start(_evaluation(), DATA.layout, lambda: True)
        if idle_bytes:  # the lane's mapping serves again
            assert third.segment is second.segment
            assert engine.receive()[1] == []
        else:
            assert isinstance(engine.receive()[0], wire.Unmap)
            os.close(engine.receive()[1][0])

    def test_cancelling_a_run_that_has_ended_touches_nobody_else(self):
        lanes = Lanes(SegmentPool(1 << 20))
        (engine,) = self._engine(lanes)
        evaluation = _evaluation(loss=Loss.MSE, values=False)
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
        _engine = self._engine(lanes)
        lanes.start(_evaluation(), DATA.layout, lambda: True)
        with pytest.raises(CancelledError):
            lanes.start(_evaluation(), DATA.layout, lambda: False)

    def test_the_end_of_the_engine_fails_runs_until_the_next_one(self):
        lanes = Lanes(SegmentPool(1 << 20))
        first, second = self._engine(lanes, 2)
        run = lanes.start(_evaluation(), DATA.layout, lambda: True)
        first.close()
        second.close()
        with pytest.raises(UnavailableError):
            run.next_event()
        run.close()
        with pytest.raises(UnavailableError):
            lanes.start(_evaluation(), DATA.layout, lambda: True)
        _next = self._engine(lanes)
        lanes.start(_evaluation(), DATA.layout, lambda: True)


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
        evaluation = _evaluation()
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


def key(dataset, tenant=ANONYMOUS):
    return key_of(tenant, dataset.content_id)


class TestDatasetStore:
    def _store(self, resident_bytes):
        removed = []
        limits = Limits(resident_bytes=resident_bytes)
        return DatasetStore(limits, SegmentPool(0), removed.append), removed

    def _put(self, store, dataset, size=64):
        upload = store.begin(dataset.layout, dataset.content_id)
        for chunk in dataset.chunks(size):
            upload.add(chunk)
        return store.commit(upload)

    def test_round_trip(self):
        store, _ = self._store(1 << 20)
        self._put(store, DATA)
        with store.lease(key(DATA)) as resident:
            shape = (DATA.layout.columns, DATA.layout.rows)
            np.testing.assert_array_equal(resident.segment.array("<f4", shape), DATA.matrix)

    def test_budget_counts_reservations_and_eviction_skips_what_is_in_use(self):
        size = DATA.layout.nbytes
        store, removed = self._store(2 * size)
        others = [Dataset.of(np.full((10, 4), k), np.arange(10.0)) for k in range(2)]
        self._put(store, DATA)
        self._put(store, others[0])
        with store.lease(key(DATA)):
            self._put(store, others[1])
            assert removed == [key(others[0])]
            with store.lease(key(others[1])), pytest.raises(ResourceExhaustedError) as caught:
                store.begin(others[0].layout, others[0].content_id)
        assert (caught.value.needed, caught.value.available) == (size, 0)

    def test_abandoned_upload_gives_its_bytes_back(self):
        store, _ = self._store(DATA.layout.nbytes)
        for _ in range(3):
            store.abandon(store.begin(DATA.layout, DATA.content_id))
        self._put(store, DATA)

    def test_same_content_twice_is_held_once(self):
        store, _ = self._store(2 * DATA.layout.nbytes)
        first = self._put(store, DATA)
        assert self._put(store, DATA) is first
        other = Dataset.of(np.ones((10, 4)), np.arange(10.0))
        self._put(store, other)
        with store.lease(key(DATA)), store.lease(key(other)):
            pass

    def test_release_waits_for_the_last_use(self):
        store, removed = self._store(1 << 20)
        self._put(store, DATA)
        with store.lease(key(DATA)):
            store.release(key(DATA))
            assert removed == []
            with pytest.raises(DatasetNotFoundError), store.lease(key(DATA)):
                pass
        assert removed == [key(DATA)]
        with pytest.raises(DatasetNotFoundError):
            store.release(key(DATA))

    @pytest.mark.parametrize(
        ("pieces", "reason"),
        [([16], "TRUNCATED_UPLOAD"), ([200, 1], "SURPLUS_UPLOAD"), ([200], "BAD_DIGEST")],
    )
    def test_wrong_content(self, pieces, reason):
        store, _ = self._store(1 << 20)
        upload = store.begin(DATA.layout, DATA.content_id)
        with pytest.raises(InvalidArgumentError) as caught:
            for size in pieces:
                upload.add(memoryview(bytes(size)))
            store.commit(upload)
        assert caught.value.reason == reason


class TestLimits:
    @pytest.mark.parametrize(
        ("limits", "reason", "flag"),
        [
            (Limits(programs=6), "TOO_MANY_PROGRAMS", "--max-programs"),
            (Limits(tokens=50), "TOO_MANY_TOKENS", "--max-tokens"),
            (Limits(program_tokens=9), "PROGRAM_TOO_LONG", "--max-program-tokens"),
            (Limits(vectors=0), "TOO_MANY_VECTORS", "--max-vectors"),
        ],
    )
    def test_batch(self, limits, reason, flag):
        with pytest.raises(ResourceExhaustedError) as caught:
            check_batch(_evaluation().batch, limits)
        assert caught.value.reason == reason
        assert flag in str(caught.value)
        check_batch(_evaluation().batch, Limits())

    def test_result(self):
        size = 7 * 10 * 4 + 7 * 8
        check_result(_evaluation(), DATA.layout, Limits(result_bytes=size))
        with pytest.raises(ResourceExhaustedError, match="--max-result-bytes"):
            check_result(_evaluation(), DATA.layout, Limits(result_bytes=size - 1))

    def test_dataset(self):
        check_dataset(DATA.layout, Limits(dataset_bytes=200))
        with pytest.raises(ResourceExhaustedError, match="--max-dataset-bytes"):
            check_dataset(DATA.layout, Limits(dataset_bytes=199))


class TestConfig:
    def test_flags_win_over_variables_over_defaults(self):
        environment = {"WARPFIT_PORT": "1", "WARPFIT_HOST": "::1", "WARPFIT_MAX_TOKENS": "17"}
        config = Config.from_arguments(["--port", "2"], environment)
        assert (config.port, config.host, config.max_tokens) == (2, "::1", 17)
        assert config.limits().tokens == 17
        assert Config.from_arguments([], {}) == Config()

    def test_crosses_to_the_engine_process(self):
        config = Config.from_arguments(["--threads", "3", "--cache-dir", "somewhere"], {})
        assert Config.from_json(config.to_json()) == config

    @pytest.mark.parametrize(
        ("arguments", "environment"),
        [
            (["--engine", "tpu"], {}),
            ([], {"WARPFIT_ENGINE": "tpu"}),
            ([], {"WARPFIT_PORT": "many"}),
            (["--chunk-bytes", "1 furlong"], {}),
            (["--log-level", "loud"], {}),
        ],
    )
    def test_wrong_settings_are_refused(self, arguments, environment, capsys):
        with pytest.raises(SystemExit) as caught:
            Config.from_arguments(arguments, environment)
        assert caught.value.code == 2
        assert "error:" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("text", "size"), [("4096", 4096), ("1KiB", 1024), ("2 GB", 2 * 10**9), ("3mib", 3 << 20)]
    )
    def test_sizes(self, text, size):
        assert parse_bytes(text) == size

    def test_help_names_every_flag(self, capsys):
        with pytest.raises(SystemExit):
            Config.from_arguments(["--help"], {})
        text = capsys.readouterr().out
        for flag in ("--host", "--port", "--max-resident-bytes", "--log-format", "--grace"):
            assert flag in text


def test_a_fit_keeps_nothing_in_the_memory_of_its_lane():
    """Engines remember arrays of tokens between passes; the segment is used again."""
    from warpfit.ir import Batch
    from warpfit.parse import parse

    batch = Batch.of([parse("p1*x1 + p2"), parse("x1^2")], [[1.0, 2.0], []])
    copy = batch.copy()
    for name in ("codes", "values", "lengths", "parameter_counts", "parameters"):
        one, other = getattr(copy, name), getattr(batch, name)
        np.testing.assert_array_equal(one, other)
        assert not np.shares_memory(one, other)
