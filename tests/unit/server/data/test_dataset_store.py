"""The store of resident data sets, without processes."""

import numpy as np
import pytest

from support.servers.requests import DATA
from warpfit.dataset import Dataset
from warpfit.errors import (
    DatasetNotFoundError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from warpfit.server_info import Limits
from warpfit_server.data.dataset_store import DatasetStore
from warpfit_server.ipc.segments import SegmentPool
from warpfit_server.tenancy.tenants import ANONYMOUS, key_of

OTHERS = [Dataset.of(np.full((10, 4), k), np.arange(10.0)) for k in range(2)]


def key(dataset, tenant=ANONYMOUS):
    return key_of(tenant, dataset.content_id)


def make_store(resident_bytes):
    removed = []
    limits = Limits(resident_bytes=resident_bytes)
    return DatasetStore(limits, SegmentPool(0), removed.append), removed


def put(store, dataset, size=64, tenant=ANONYMOUS):
    upload = store.begin(dataset.layout, dataset.content_id, tenant)
    for chunk in dataset.chunks(size):
        store.add(upload, chunk)
    return store.commit(upload)


def test_round_trip():
    store, _ = make_store(1 << 20)
    put(store, DATA)
    with store.lease(key(DATA)) as resident:
        shape = (DATA.layout.columns, DATA.layout.rows)
        np.testing.assert_array_equal(resident.segment.array("<f4", shape), DATA.matrix)


def test_eviction_makes_room_but_not_for_data_sets_in_use():
    size = DATA.layout.nbytes
    store, removed = make_store(2 * size)
    put(store, DATA)
    put(store, OTHERS[0])
    with store.lease(key(DATA)):
        put(store, OTHERS[1])
        assert removed == [key(OTHERS[0])]
        with store.lease(key(OTHERS[1])), pytest.raises(ResourceExhaustedError) as caught:
            store.begin(OTHERS[0].layout, OTHERS[0].content_id)
    assert (caught.value.needed, caught.value.available) == (size, 0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("weight", [-1.0, np.nan, np.inf])
def test_bad_weights_are_refused(dtype, weight):
    good = Dataset.of(np.zeros((9, 2)), np.zeros(9), np.ones(9), dtype=dtype)
    matrix = good.matrix.copy()
    matrix[-1, 5] = weight
    bad = Dataset(good.layout, matrix)
    store, _ = make_store(1 << 20)
    upload = store.begin(bad.layout, bad.content_id)
    store.add(upload, next(bad.chunks(1 << 20)))
    with pytest.raises(InvalidArgumentError, match="row 5") as caught:
        store.commit(upload)
    assert caught.value.reason == "BAD_WEIGHT"
    store.abandon(upload)
    assert store.usage().datasets == store.usage().nbytes == 0
    put(store, good)


def test_announced_bytes_evict_nothing():
    size = DATA.layout.nbytes
    store, removed = make_store(2 * size)
    put(store, DATA, tenant="a")
    put(store, OTHERS[0], tenant="a")
    upload = store.begin(OTHERS[1].layout, OTHERS[1].content_id, "b")
    assert (removed, store.usage().nbytes) == ([], 2 * size)
    for chunk in OTHERS[1].chunks(80):
        store.add(upload, chunk)
        assert removed == [key(DATA, "a")]
        assert store.usage().nbytes <= 2 * size
    store.commit(upload)
    assert removed == [key(DATA, "a")]


def test_announced_bytes_count_against_their_own_tenant_only():
    size = DATA.layout.nbytes
    store, _ = make_store(2 * size)
    announced = [store.begin(DATA.layout, DATA.content_id, "a") for _ in range(2)]
    with pytest.raises(ResourceExhaustedError):
        store.begin(OTHERS[0].layout, OTHERS[0].content_id, "a")
    put(store, OTHERS[0], tenant="b")
    put(store, OTHERS[1], tenant="b")
    for upload in announced:
        store.abandon(upload)
    put(store, DATA, tenant="a")


def test_an_upload_that_runs_out_of_room_gives_its_bytes_back():
    size = DATA.layout.nbytes
    store, _ = make_store(2 * size)
    upload = store.begin(DATA.layout, DATA.content_id, "a")
    chunks = list(DATA.chunks(size // 2))
    store.add(upload, chunks[0])
    other = store.begin(OTHERS[1].layout, OTHERS[1].content_id, "c")
    store.add(other, next(OTHERS[1].chunks(size // 2)))
    put(store, OTHERS[0], tenant="b")
    with store.lease(key(OTHERS[0], "b")), pytest.raises(ResourceExhaustedError):
        store.add(upload, chunks[1])
    store.abandon(upload)
    store.abandon(other)
    assert store.usage().nbytes == size


def test_a_tenant_over_its_share_evicts_no_tenant_below():
    size = DATA.layout.nbytes
    store, removed = make_store(4 * size)
    put(store, OTHERS[0], tenant="modest")
    for tenant, dataset in (("b", DATA), ("b", OTHERS[1])):
        put(store, dataset, tenant=tenant)
    with store.lease(key(DATA, "b")), store.lease(key(OTHERS[1], "b")):
        put(store, DATA, tenant="greedy")
        upload = store.begin(OTHERS[0].layout, OTHERS[0].content_id, "greedy")
        store.add(upload, OTHERS[0].matrix.data.cast("B"))
    assert removed == [key(DATA, "greedy")], "its own"


def test_abandoned_upload_gives_its_bytes_back():
    store, _ = make_store(DATA.layout.nbytes)
    for _ in range(3):
        store.abandon(store.begin(DATA.layout, DATA.content_id))
    put(store, DATA)


def test_same_content_twice_is_held_once():
    store, _ = make_store(2 * DATA.layout.nbytes)
    first = put(store, DATA)
    assert put(store, DATA) is first
    other = Dataset.of(np.ones((10, 4)), np.arange(10.0))
    put(store, other)
    with store.lease(key(DATA)), store.lease(key(other)):
        pass


def test_release_waits_for_the_last_use():
    store, removed = make_store(1 << 20)
    put(store, DATA)
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
def test_uploads_with_wrong_content_are_refused(pieces, reason):
    store, _ = make_store(1 << 20)
    upload = store.begin(DATA.layout, DATA.content_id)
    with pytest.raises(InvalidArgumentError) as caught:
        for size in pieces:
            store.add(upload, memoryview(bytes(size)))
        store.commit(upload)
    assert caught.value.reason == reason
