"""The store of compiled kernels; compiling and loading are the test's own."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest

from warpfit.errors import UnavailableError
from warpfit.ir import Batch
from warpfit.parse import parse
from warpfit_server.engine.autodiff import lower_batch
from warpfit_server.engine.cuda.jit import kernel_store
from warpfit_server.engine.cuda.jit.renderer import Output
from warpfit_server.engine.interface import COUNTERS, Arithmetic

pytest.importorskip("cuda.bindings")


@pytest.fixture
def images(monkeypatch):
    """Numbers of the modules that were loaded."""
    found = []

    def load_modules(_, cubins):
        found.extend(int.from_bytes(cubin, "little") for cubin in cubins)
        return [SimpleNamespace(get_function=lambda name: (name,)) for _ in cubins]

    monkeypatch.setattr(kernel_store, "load_modules", load_modules)
    return found


def test_another_process_compiles_what_this_one_would(tmp_path):
    device = SimpleNamespace(cache_directory=tmp_path, architecture=90)
    batch = Batch.of([parse("p1*x1 + exp(x2)"), parse("x1 / 3")], [[1.0], []])
    output, programs = Output(loss="squares"), lower_batch(batch, 0).part(0, 2)
    store = kernel_store.KernelStore(device, cores=4)
    try:
        key = store.key(Arithmetic.FAST, output, programs)
        job = store.compile_queue.submit(key, partial(store._cubin, key), urgent=True)
        assert job.result(120) == kernel_store.compile_kernel(
            (90, Arithmetic.FAST, output, programs)
        )
        assert store.disk.get(key.text) == job.result()
    finally:
        store.close()


class TestKernelStore:
    """The programs and the text of a key are a number here, and so is the machine code."""

    @pytest.fixture
    def store(self, images, tmp_path, monkeypatch):
        self.gates, self.begun = {}, threading.Event()

        def run(_, job):
            *_, text = job
            self.begun.set()
            if text in self.gates:
                self.gates[text].wait(10)
            if text == "bad":
                raise ValueError("does not link")
            return int(text).to_bytes(4, "little")

        monkeypatch.setattr(kernel_store.CompileProcess, "run", run)
        device = SimpleNamespace(cache_directory=tmp_path, architecture=90)
        store = kernel_store.KernelStore(device, cores=16)
        yield store
        store.close()

    @staticmethod
    def keys(*texts):
        return [kernel_store.KernelKey(None, None, text, text) for text in texts]

    def test_kernels_are_loaded_when_the_last_is_compiled(self, store, images):
        self.gates["3"] = threading.Event()
        wanted = self.keys("1", "2", "3", "2")
        loaded = store.request(wanted)
        time.sleep(0.1)
        assert images == []
        assert store.find(wanted) is None
        self.gates["3"].set()
        assert loaded.result(10).keys() == set(wanted)
        assert sorted(images) == [1, 2, 3]
        assert [kernel.function[0] for kernel in store.find(wanted)] == ["evaluate"] * 4
        assert store.request(wanted).result(10) == loaded.result()
        assert len(images) == 3

    def test_two_requests_share_a_compilation(self, store, images):
        self.gates["2"] = threading.Event()
        first, second = store.request(self.keys("1", "2")), store.request(self.keys("2", "3"))
        self.gates["2"].set()
        assert first.result(10).keys() == set(self.keys("1", "2"))
        assert second.result(10).keys() == set(self.keys("2", "3"))
        assert sorted(images) == [1, 2, 3]

    def test_a_failed_compilation_is_raised_and_logged(self, store, images, caplog):
        with pytest.raises(ValueError, match="does not link"):
            store.request(self.keys("1", "bad")).result(10)
        assert "kernels were not loaded: does not link" in caplog.text
        assert images == []
        assert store.request(self.keys("1")).result(10)  # from disk

    def test_kernels_that_are_evicted_stay_with_their_users(self, store, images, monkeypatch):
        monkeypatch.setattr(kernel_store, "MOST_KERNELS", 4)
        wanted = self.keys(*map(str, range(1, 9)))
        loaded = store.request(wanted, urgent=True).result(10)
        assert len(loaded) == 8
        assert store.counters()["module_cache_entries"] == 4
        assert store.counters()["module_cache_evictions"] == 4
        assert store.find(wanted[4:]) is not None
        assert store.find(wanted[:4]) is None

    def test_a_library_that_is_being_built_delays_nobody_else(self, store, monkeypatch):
        built = threading.Event()

        def build(*_, **__):
            self.begun.set()
            built.wait(10)
            return SimpleNamespace(key=b"")

        monkeypatch.setattr(kernel_store.templates, "build", build)
        with ThreadPoolExecutor() as threads:
            key = threads.submit(store.key, Arithmetic.FAST, Output(), ())
            assert self.begun.wait(10)
            looking = threads.submit(store.are_loaded, self.keys("1"))
            try:
                assert looking.result(5) is False
                assert not key.done()
            finally:
                built.set()

    def test_closing_ends_pending_requests(self, store):
        self.gates["1"] = threading.Event()
        waiting = store.request(self.keys("1"))
        assert self.begun.wait(10)
        threading.Timer(0.1, self.gates["1"].set).start()
        store.close()
        with pytest.raises(UnavailableError):
            waiting.result(0)


def test_the_kernel_store_counts_hits_and_misses(tmp_path):
    kernels = pytest.importorskip("warpfit_server.engine.cuda.jit.kernel_store")
    store = kernels.KernelStore(SimpleNamespace(cache_directory=tmp_path), cores=1)
    try:
        assert store.find([object()]) is None
        assert store.disk.get("00ff") is None
        counters = store.counters()
    finally:
        store.close()
    assert set(counters) <= set(COUNTERS)
    assert counters["module_cache_misses"] == counters["disk_cache_misses"] == 1
