"""The store of resident data sets (what is evicted for whom), and files that a server reads."""

import os
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from support.refusals import refused
from support.servers.examples import DATA, an_evaluation
from warpfit.dataset import Dataset, ServerFile
from warpfit.errors import DatasetNotFoundError, ResourceExhaustedError
from warpfit.request import Loss
from warpfit.server_info import Limits
from warpfit_server import dataset_store
from warpfit_server.dataset_store import DataFolder, DatasetStore, Upload
from warpfit_server.engine.scheduler import FrontEndConnection
from warpfit_server.ipc import messages
from warpfit_server.ipc.engine_connection import EngineConnection
from warpfit_server.ipc.messages import Channel
from warpfit_server.ipc.segments import SegmentPool
from warpfit_server.tenants import ANONYMOUS, QuotaTable, key_of

SIZE = DATA.layout.nbytes


def key(dataset, tenant=ANONYMOUS):
    return key_of(tenant, dataset.content_id)


class Store(DatasetStore):
    def __init__(self, sets):
        self.table, self.removed = QuotaTable.create(1), []
        limits = Limits(resident_bytes=int(sets * SIZE))
        super().__init__(limits, self.table, self.removed.append)

    @contextmanager
    def use(self, key):
        slot = self.find(key).slot
        self.table.use_dataset(slot, 1)
        try:
            yield
        finally:
            self.table.use_dataset(slot, -1)


def upload(store, dataset, tenant=ANONYMOUS, sets=1000):
    own = dataset.layout, dataset.content_id, tenant, int(sets * SIZE)
    return Upload(store, SegmentPool(0), *own)


def numbered(number):
    return Dataset.of(np.full((10, 4), number), np.arange(10.0))


OTHERS = [numbered(0), numbered(1)]


def put(store, dataset, tenant=ANONYMOUS, own_sets=1000):
    with upload(store, dataset, tenant, own_sets) as arriving:
        for chunk in dataset.chunks(64):
            arriving.add(chunk)
        return arriving.commit()


def refusal(function, *arguments):
    with pytest.raises(ResourceExhaustedError) as caught:
        function(*arguments)
    return caught.value


def test_eviction_makes_room_but_not_for_data_sets_in_use():
    store = Store(2)
    put(store, DATA)
    put(store, OTHERS[0])
    with store.use(key(DATA)):
        put(store, OTHERS[1])
        assert store.removed == [key(OTHERS[0])]
        with store.use(key(OTHERS[1])):
            error = refusal(upload, store, OTHERS[0])
    assert (error.needed, error.available) == (SIZE, 0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("weight", [-1.0, np.nan, np.inf])
def test_bad_weights_are_refused(dtype, weight):
    good = Dataset.of(np.zeros((9, 2)), np.zeros(9), np.ones(9), dtype=dtype)
    matrix = good.matrix.copy()
    matrix[-1, 5] = weight
    store = Store(5000)
    refused("BAD_WEIGHT.*row 5", put, store, Dataset(good.layout, matrix))
    assert store.usage().datasets == store.usage().nbytes == 0
    put(store, good)


def test_rows_that_engines_copy_count_twice():
    weights = np.ones(10)
    whole = Dataset.of(DATA.variables.T, np.arange(10.0), weights)
    weights = np.where(np.arange(10) < 5, 0.0, weights)
    half = Dataset.of(DATA.variables.T, np.arange(10.0), weights)
    store = Store(10)
    put(store, whole)
    before = store.usage().nbytes
    put(store, half)
    assert store.usage().nbytes - before == 1.5 * before
    store.remove(key(half))
    assert store.usage().nbytes == before
    small = Store(1.4 * before / SIZE)
    assert "are needed" in str(refusal(put, small, half))


def test_announced_bytes_evict_nothing():
    store = Store(2)
    put(store, DATA, tenant="a")
    put(store, OTHERS[0], tenant="a")
    arriving = upload(store, OTHERS[1], "b")
    assert (store.removed, store.usage().nbytes) == ([], 2 * SIZE)
    for chunk in OTHERS[1].chunks(80):
        arriving.add(chunk)
        assert store.removed == [key(DATA, "a")]
        assert store.usage().nbytes <= 2 * SIZE
    arriving.commit()
    assert store.removed == [key(DATA, "a")]


def test_an_upload_that_runs_out_of_room_gives_its_bytes_back():
    store = Store(2)
    arriving = upload(store, DATA, "a")
    chunks = list(DATA.chunks(SIZE // 2))
    arriving.add(chunks[0])
    other = upload(store, OTHERS[1], "c")
    other.add(next(OTHERS[1].chunks(SIZE // 2)))
    put(store, OTHERS[0], tenant="b")
    with store.use(key(OTHERS[0], "b")), pytest.raises(ResourceExhaustedError):
        arriving.add(chunks[1])
    arriving.__exit__()
    other.__exit__()
    assert store.usage().nbytes == SIZE


def test_what_is_full_for_a_moment_only_is_tried_again():
    store = Store(2)
    put(store, DATA)
    put(store, OTHERS[0])
    with store.use(key(DATA)), store.use(key(OTHERS[0])):
        assert refusal(put, store, OTHERS[1]).retry_after > 0
    with upload(store, OTHERS[1]), upload(store, numbered(2)):  # which are announced
        assert refusal(upload, store, numbered(3)).retry_after > 0
    large = Dataset.of(np.zeros((30, 4)), np.zeros(30))
    assert refusal(upload, store, large).retry_after is None, "it never fits"
    assert refusal(put, store, OTHERS[0], "a", 0.5).retry_after is None, "nor into its budget"


def test_what_was_given_back_stays_and_is_evicted_first():
    store = Store(3)
    keys = [put(store, numbered(number)).key for number in range(3)]
    store.give_back(keys[1])
    store.give_back(keys[2])
    assert store.removed == []
    with store.use(keys[2]):  # another caller has the same content
        pass
    assert store.count(ANONYMOUS) == 2
    put(store, numbered(3))
    assert store.removed == [keys[1]]
    put(store, numbered(4))
    assert store.removed == keys[1::-1], "then the one that was used least recently"
    with pytest.raises(DatasetNotFoundError):
        store.give_back(keys[1])


def test_what_another_tenant_gave_back_makes_room_and_else_a_tenant_evicts_its_own():
    store = Store(4)
    back, kept = (put(store, numbered(number), "modest").key for number in range(2))
    store.give_back(back)
    greedy = [put(store, numbered(number), "greedy").key for number in range(8)]
    assert store.removed == [back, *greedy[:5]], "though what is kept was used least recently"
    with store.use(kept):
        pass


def test_what_was_given_back_leaves_the_devices_and_is_found_again(monkeypatch):
    store = Store(3)
    back, used = (put(store, numbered(number)).key for number in range(2))
    store.give_back(back)
    store.expire(1000)
    assert store.removed == []
    monkeypatch.setattr("warpfit_server.dataset_store._DEVICE_SECONDS", 0.0)
    for _ in range(3):
        store.expire(1000)
    assert store.removed == [back], "once"
    with store.use(back), store.use(used):
        store.expire(1000)
    store.expire(1000)
    assert store.removed == [back]
    assert store.usage().datasets == 2


def test_a_device_without_room_evicts_in_the_same_order_and_nothing_in_use():
    store = Store(8)
    first, second, third = (put(store, numbered(number)).key for number in range(3))
    store.give_back(second)
    with store.use(third):
        assert [store.evict_for_device(ANONYMOUS) for _ in range(3)] == [SIZE, SIZE, 0]
    assert store.removed == [second, first]


def test_the_same_content_again_keeps_the_older_copy():
    store = Store(5000)
    first, second = put(store, DATA), put(store, DATA)
    assert (first.is_fresh, second.is_fresh) == (True, False)
    assert first.slot == second.slot
    assert store.usage().datasets == 1
    store.remove(key(DATA))
    assert store.usage().nbytes == 0


def test_removal_waits_for_the_last_use_and_a_new_upload_takes_it_back():
    store = Store(5000)
    put(store, DATA)
    with store.use(key(DATA)):
        store.remove(key(DATA))
        for function in (store.find, store.remove):
            with pytest.raises(DatasetNotFoundError):
                function(key(DATA))
        store.expire(1000)
        put(store, DATA)
        store.find(key(DATA))
        store.remove(key(DATA))
        assert store.removed == []
    store.expire(1000)
    assert store.removed == [key(DATA)]
    assert store.usage().datasets == store.usage().nbytes == 0


def test_front_ends_are_told_what_comes_and_goes_in_that_order():
    told = []
    store = DatasetStore(
        Limits(resident_bytes=SIZE),
        QuotaTable.create(1),
        announce=lambda found: told.append(("announced", found.key)),
        withdraw=lambda key: told.append(("withdrawn", key)),
    )
    for dataset in (DATA, OTHERS[0]):
        put(store, dataset)
    store.remove(key(OTHERS[0]))
    first, second = key(DATA), key(OTHERS[0])
    assert told == [(what, key) for key in (first, second) for what in ("announced", "withdrawn")]


def test_a_tenant_keeps_to_its_own_budget():
    store = Store(10)
    others = put(store, numbered(0), "other").key
    own = [put(store, numbered(number), "a", own_sets=2).key for number in range(3)]
    assert store.removed == own[:1]
    with store.use(own[1]), store.use(own[2]), pytest.raises(ResourceExhaustedError):
        put(store, numbered(9), "a", own_sets=2)
    with store.use(others):
        pass


@pytest.mark.parametrize(("most", "files"), [(3, 1000), (1000, 24)])
def test_the_number_of_data_sets_is_limited(monkeypatch, most, files):
    monkeypatch.setattr("warpfit_server.dataset_store._MOST_DATASETS", most)
    monkeypatch.setattr("resource.getrlimit", lambda _: (files, files))
    store = Store(100)
    keys = [put(store, numbered(number), "a").key for number in range(5)]
    assert store.removed == keys[:2]


def test_the_segment_of_an_answer_is_cleared_for_another_tenant():
    front, places = EngineConnection(SegmentPool(256 << 20)), set()
    ours, theirs = Channel.pair()
    engine = FrontEndConnection(ours)
    front.open(theirs)
    for tenant in ("alice", "bob"):
        run = front.start(an_evaluation(loss=Loss.MSE), DATA.layout, tenant)
        request = engine.receive(*ours.receive())
        places.add(request.segment.identifier)
        values, losses = run.array("values"), run.array("losses")
        if tenant == "bob":  # an engine that writes nothing
            assert not (values.any() or losses.any())
        values[...] = losses[...] = 7.0
        engine.send(messages.RequestFinished(request.number))
        run.next_reply()
        run.close()
    assert len(places) == 1, "the memory is used again"
    front.pool.trim()
    engine.receive(*ours.receive())
    assert not engine.segments


NUMBERS = np.arange(1000.0)
EXPECTED = Dataset.of(NUMBERS, names=("a",)).content_id


def write(path: Path, numbers=NUMBERS):
    parquet.write_table(pa.table({"a": numbers}), path)


@pytest.fixture
def folder(tmp_path: Path) -> DataFolder:
    (tmp_path / "root").mkdir()
    store = DatasetStore(Limits(), QuotaTable.create(1))
    return DataFolder(str(tmp_path / "root"), store, SegmentPool(0))


def read(folder, name="a.parquet", x=(), check=lambda: None, reserve=lambda size: nullcontext()):
    file = ServerFile(name, tuple(x), "", "", np.dtype("<f4"))
    return folder.read(file, "tenant", Limits(), check, reserve)[0]


def test_a_file_is_read_that_was_found_although_its_name_has_changed(folder, tmp_path, monkeypatch):
    path, secret = tmp_path / "root" / "a.parquet", tmp_path / "secret.parquet"
    write(path)
    write(secret, NUMBERS + 1)
    opened = dataset_store.open_table

    def swap(*arguments):
        path.unlink()
        path.symlink_to(secret)
        return opened(*arguments)

    monkeypatch.setattr(dataset_store, "open_table", swap)
    assert read(folder).content_id == EXPECTED


def test_a_file_that_changes_while_it_is_read_is_refused(folder, tmp_path):
    path = tmp_path / "root" / "a.parquet"
    write(path)
    refused("DATA_CHANGED", read, folder, check=lambda: os.utime(path))
    assert folder._store.usage().datasets == 0
    assert read(folder).content_id == EXPECTED


def test_what_is_no_regular_file_is_not_opened(folder, tmp_path):
    os.mkfifo(tmp_path / "root" / "fifo.parquet")
    (tmp_path / "root" / "device.parquet").symlink_to("/dev/zero")
    for name in ("fifo.parquet", "device.parquet", "/dev/zero"):
        refused("NO_SUCH_FILE", read, folder, name)


def test_decompressed_bytes_are_counted_before_they_are_there(folder: DataFolder, tmp_path: Path):
    path = tmp_path / "root" / "a.parquet"
    parquet.write_table(pa.table({"a": np.zeros(1_000_000)}), path, use_dictionary=False)
    counted = []

    @contextmanager
    def refuse(size):
        counted.append(size)
        raise ResourceExhaustedError("no room", "QUEUE_FULL")
        yield

    with pytest.raises(ResourceExhaustedError):
        read(folder, reserve=refuse)
    assert path.stat().st_size < 1 << 20
    assert 8_000_000 <= counted[0] < 9_000_000


NAMES = "../other/../root/ ../none/../root/ b/../ {root}/ " + "../" * 20 + "proc/self/cwd/"


@pytest.mark.parametrize("place", NAMES.split())
def test_names_that_lead_out_and_in_again_tell_nothing(folder, tmp_path, place, monkeypatch):
    root, told = tmp_path / "root", []
    write(root / "a.parquet")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(root)
    for each in (f"{place.format(root=root)}a.parquet", "none"):
        error = refused("NO_SUCH_FILE", read, folder, each)
        told.append(str(error).replace(each, "none"))
    assert told[0] == told[1], "one answer for all"
