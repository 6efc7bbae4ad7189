"""Tenants do not see memory that others have used, and evict their own data sets first."""

import time

import numpy as np
import pytest

from support.servers.requests import DATA, an_evaluation
from warpfit.dataset import Dataset
from warpfit.errors import DatasetNotFoundError, ResourceExhaustedError
from warpfit.request import Loss
from warpfit.server_info import Limits
from warpfit_server.data.dataset_store import DatasetStore
from warpfit_server.engine.request import FrontEndConnection
from warpfit_server.ipc import messages
from warpfit_server.ipc.channel import Channel
from warpfit_server.ipc.engine_connection import EngineConnection
from warpfit_server.ipc.segments import SegmentPool
from warpfit_server.tenancy.tenants import key_of


class TestReusedMemory:
    @pytest.mark.parametrize("size", [100, 3 << 20])
    def test_a_segment_is_cleared_for_another_tenant(self, size):
        pool = SegmentPool(64 << 20)
        first = pool.acquire(size, "alice")
        first.array("u1", (first.size,))[...] = 0xAB
        pool.release(first)
        again = pool.acquire(size, "alice")
        assert again is first
        assert (again.array("u1", (again.size,)) == 0xAB).all(), "no needless wiping"
        pool.release(again)
        other = pool.acquire(size, "bob")
        assert other is first, "the memory is used again"
        assert not other.array("u1", (other.size,)).any()

    def test_the_segment_of_an_answer_is_cleared_for_another_tenant(self):
        layout = Dataset.of(np.zeros((10, 4), np.float32), np.zeros(10)).layout
        front = EngineConnection(SegmentPool(256 << 20))
        ours, theirs = Channel.pair()
        engine = FrontEndConnection(ours)
        front.open(theirs)
        segments = set()
        for tenant in ("alice", "bob"):
            run = front.start(an_evaluation(loss=Loss.MSE), layout, tenant)
            request = engine.receive(*ours.receive())
            segments.add(request.segment.identifier)
            values = run.array("values")
            if tenant == "bob":  # an engine that writes nothing
                assert not values.any()
                assert not request.losses.any()
            else:
                values[...] = 7.0
                request.losses[...] = 7.0
            engine.send(messages.RequestFinished(request.number))
            run.next_reply()
            run.close()
        assert len(segments) == 1, "the memory is used again"

    def test_an_upload_starts_with_zeros(self):
        pool = SegmentPool(64 << 20)
        used = pool.acquire(1 << 20, "alice")
        used.array("u1", (used.size,))[...] = 0xAB
        pool.release(used)
        store = DatasetStore(Limits(), pool, lambda key: None)
        upload = store.begin(DATA.layout, DATA.content_id, "alice")
        assert not upload.segment.array("u1", (upload.segment.size,)).any()


class TestEviction:
    SIZE = DATA.layout.nbytes

    def _store(self, sets):
        self.removed = []
        return DatasetStore(
            Limits(resident_bytes=sets * self.SIZE), SegmentPool(0), self.removed.append
        )

    def _put(self, store, number, tenant, own_sets=100):
        dataset = Dataset.of(np.full((10, 4), number), np.arange(10.0))
        limits = Limits(resident_bytes=own_sets * self.SIZE)
        upload = store.begin(dataset.layout, dataset.content_id, tenant, limits)
        for chunk in dataset.chunks(64):
            store.add(upload, chunk)
        store.commit(upload)
        return key_of(tenant, dataset.content_id)

    def test_a_tenant_evicts_its_own_data_sets(self):
        store = self._store(4)
        modest = self._put(store, 0, "modest")  # the one used least recently
        greedy = [self._put(store, number, "greedy") for number in range(8)]
        assert self.removed == greedy[:5]
        with store.lease(modest):
            pass

    def test_a_tenant_keeps_to_its_own_budget(self):
        store = self._store(10)
        others = self._put(store, 0, "other")
        own = [self._put(store, number, "a", own_sets=2) for number in range(3)]
        assert self.removed == own[:1]
        with store.lease(own[1]), store.lease(own[2]), pytest.raises(ResourceExhaustedError):
            self._put(store, 9, "a", own_sets=2)
        with store.lease(others):
            pass

    def test_refused_uploads_evict_nothing(self):
        store = self._store(2)
        used, idle = self._put(store, 0, "a"), self._put(store, 1, "a")
        with store.lease(used), pytest.raises(ResourceExhaustedError):
            store.begin(
                Dataset.of(np.zeros((20, 4)), np.zeros(20)).layout, bytes(32), "b", Limits()
            )
        assert self.removed == []
        with store.lease(idle):
            pass

    def test_the_number_of_data_sets_is_limited(self, monkeypatch):
        monkeypatch.setattr("warpfit_server.data.dataset_store._MOST_DATASETS", 3)
        store = self._store(100)
        keys = [self._put(store, number, "a") for number in range(5)]
        assert self.removed == keys[:2]

    def test_unused_data_sets_expire(self):
        store = self._store(10)
        old, used = self._put(store, 0, "a"), self._put(store, 1, "a")
        with store.lease(used):
            time.sleep(0.2)
            store.expire(0.1)
        assert self.removed == [old]
        store.expire(0.1)
        assert self.removed == [old], "a use renews the lease at its end"
        with pytest.raises(DatasetNotFoundError), store.lease(old):
            pass
