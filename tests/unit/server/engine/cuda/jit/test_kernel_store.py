"""The store of compiled kernels and the loading of modules, with a fake driver."""

from __future__ import annotations

import ctypes
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cuda.bindings")

from warpfit_server.engine.cuda.jit import kernel_store
from warpfit_server.engine.cuda.runtime import command_list
from warpfit_server.engine.cuda.runtime.modules import load_modules


class Driver:
    """A slow fake driver that logs its calls."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.log: list[str] = []
        self.images: list[int] = []
        self.fails_at = fails_at
        self.loading = threading.Event()
        self.functions = np.zeros(command_list.LAUNCHES_HELD + 1, dtype=np.int64)
        i64, u32 = ctypes.c_int64, ctypes.c_uint32
        load = ctypes.CFUNCTYPE(ctypes.c_int, i64, i64)
        launch = ctypes.CFUNCTYPE(ctypes.c_int, i64, *[u32] * 7, i64, i64, i64)
        self._kept = [load(self._load), launch(self._launch), ctypes.CDLL(None).usleep]
        for place, function in zip(
            (command_list.LOAD_MODULE, command_list.LAUNCH, command_list.SLEEP),
            self._kept,
            strict=True,
        ):
            self.functions[place] = ctypes.cast(function, ctypes.c_void_p).value

    def _load(self, place: int, image: int) -> int:
        self.log.append("load")
        self.images.append(ctypes.c_int.from_address(image).value)
        self.loading.set()
        time.sleep(0.005)
        if len(self.images) == self.fails_at:
            return 2
        ctypes.c_int64.from_address(place).value = 1000 + len(self.images)
        return 0

    def _launch(self, *_: int) -> int:
        self.log.append("launch")
        return 0

    def launch(self) -> int:
        steps = np.zeros((1, command_list.COMMAND_WIDTH), dtype=np.int64)
        steps[0, 0] = command_list.LAUNCH
        return command_list.execute(self.functions, steps)

    def device(self, tmp_path=None) -> SimpleNamespace:
        class DriverError(Exception):
            def __init__(self, status: int) -> None:
                super().__init__(status)
                self.status = status

        cuda = SimpleNamespace(
            function=SimpleNamespace(Module=Module),
            driver=SimpleNamespace(CUDADriverError=DriverError),
        )
        return SimpleNamespace(
            use=lambda: None,
            cupy=SimpleNamespace(cuda=cuda),
            functions=self.functions,
            cache_directory=tmp_path,
        )


class Module:
    def __init__(self) -> None:
        self.ptr = 0

    def get_function(self, name: str) -> tuple[str, int]:
        return name, self.ptr


def images(count: int) -> list[bytes]:
    return [number.to_bytes(4, "little") for number in range(count)]


def test_launches_wait_until_all_modules_are_loaded():
    driver = Driver()
    driver.launch()
    loader = threading.Thread(target=load_modules, args=(driver.device(), images(5)))
    loader.start()
    assert driver.loading.wait(10)
    assert driver.launch() == 0
    loader.join()
    assert driver.launch() == 0
    assert driver.log == ["launch", *["load"] * 5, "launch", "launch"]
    assert driver.images == [0, 1, 2, 3, 4]


def test_modules_are_in_the_order_of_the_cubins():
    assert [module.ptr for module in load_modules(Driver().device(), images(3))] == [
        1001,
        1002,
        1003,
    ]
    assert load_modules(Driver().device(), []) == []


def test_launches_go_on_after_a_module_fails_to_load():
    driver = Driver(fails_at=2)
    device = driver.device()
    with pytest.raises(device.cupy.cuda.driver.CUDADriverError) as caught:
        load_modules(device, images(4))
    assert caught.value.status == 2
    assert driver.log == ["load", "load"]
    assert driver.launch() == 0


class TestKernelStore:
    """The text of a key is a number here, and the machine code is that number."""

    @pytest.fixture
    def driver(self):
        return Driver()

    @pytest.fixture
    def store(self, driver, tmp_path, monkeypatch):
        self.gates, self.begun = {}, threading.Event()

        def compile_key(_, key):
            self.begun.set()
            if key.text in self.gates:
                self.gates[key.text].wait(10)
            if key.text == "bad":
                raise ValueError("does not link")
            return int(key.text).to_bytes(4, "little")

        monkeypatch.setattr(kernel_store.KernelStore, "_compile", compile_key)
        store = kernel_store.KernelStore(driver.device(tmp_path), threads=4)
        yield store
        store.close()

    @staticmethod
    def keys(*texts):
        return [kernel_store.KernelKey(None, None, (), text) for text in texts]

    def test_kernels_are_loaded_when_the_last_is_compiled(self, store, driver):
        self.gates["3"] = threading.Event()
        wanted = self.keys("1", "2", "3", "2")
        loaded = store.request(wanted)
        time.sleep(0.1)
        assert driver.log == []
        assert store.lease(wanted) is None
        self.gates["3"].set()
        assert loaded.result(10) is None
        assert sorted(driver.images) == [1, 2, 3]
        assert [kernel.function[0] for kernel in store.lease(wanted)] == ["evaluate"] * 4
        store.release(wanted)
        assert store.request(wanted).result(10) is None
        assert len(driver.images) == 3

    def test_two_requests_share_a_compilation(self, store, driver):
        self.gates["2"] = threading.Event()
        first, second = store.request(self.keys("1", "2")), store.request(self.keys("2", "3"))
        self.gates["2"].set()
        assert first.result(10) is None
        assert second.result(10) is None
        assert sorted(driver.images) == [1, 2, 3]

    def test_a_failed_compilation_is_raised_and_logged(self, store, driver, caplog):
        with pytest.raises(ValueError, match="does not link"):
            store.request(self.keys("1", "bad")).result(10)
        assert "kernels were not loaded: does not link" in caplog.text
        assert driver.images == []
        assert store.request(self.keys("1")).result(10) is None  # from disk

    def test_closing_ends_pending_requests(self, store):
        self.gates["1"] = threading.Event()
        waiting = store.request(self.keys("1"))
        assert self.begun.wait(10)
        threading.Timer(0.1, self.gates["1"].set).start()
        store.close()
        assert waiting.result(0) is None
