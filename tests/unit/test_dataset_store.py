"""The store of data sets, without processes."""

from __future__ import annotations

import numpy as np
import pytest

from support.lanes import DATA
from warpfit.dataset import Dataset
from warpfit.errors import (
    DatasetNotFoundError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from warpfit.info import Limits
from warpfit_server.datasets import DatasetStore
from warpfit_server.segments import SegmentPool
from warpfit_server.tenants import ANONYMOUS, key_of


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
            store.add(upload, chunk)
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

    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    @pytest.mark.parametrize("weight", [-1.0, np.nan, np.inf])
    def test_bad_weights_from_any_client_are_refused(self, dtype, weight):
        good = Dataset.of(np.zeros((9, 2)), np.zeros(9), np.ones(9), dtype=dtype)
        matrix = good.matrix.copy()
        matrix[-1, 5] = weight
        bad = Dataset(good.layout, matrix)
        store, _ = self._store(1 << 20)
        upload = store.begin(bad.layout, bad.content_id)
        upload.add(next(bad.chunks(1 << 20)))
        with pytest.raises(InvalidArgumentError, match="row 5") as caught:
            store.commit(upload)
        assert caught.value.reason == "BAD_WEIGHT"
        store.abandon(upload)
        assert store.usage().datasets == store.usage().nbytes == 0
        self._put(store, good)

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
                store.add(upload, memoryview(bytes(size)))
            store.commit(upload)
        assert caught.value.reason == reason
