"""Ranges of rows, and data sets that pass through a device.

The device is memory of this process, and slow at will.
"""

from __future__ import annotations

import random
from collections import deque
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warpfit.dataset import Dataset, Layout
from warpfit.errors import CancelledError, ResourceExhaustedError
from warpfit_server.engine.cuda.runtime import datasets
from warpfit_server.engine.interface import run_to_end
from warpfit_server.engine.sum_tree import sum_nodes

MEMORY = 10 << 20
ROWS = 200_001
DATA = Dataset.of(
    np.random.default_rng(0).normal(size=(ROWS, 5)), np.arange(ROWS), np.ones(ROWS), dtype="f4"
)


class Stream:
    """Does nothing of what it is asked for before the device gets round to it."""

    def __init__(self, device: FakeDevice) -> None:
        self.device, self.asked, self.events = device, deque(), {}
        self.pace = 10 ** device.random.uniform(-3, 0)

    def launch(self, work) -> None:
        self.asked.append((lambda: True, work))

    def upload(self, address, source) -> None:
        self.launch(lambda: self.device.copy(address, source))

    def mark(self, name) -> None:
        passed = self.events[name] = []
        self.launch(lambda: passed.append(True))

    def wait_for(self, other, name) -> None:
        passed = other.events[name]
        self.asked.append((lambda: bool(passed), lambda: None))

    def wait(self, name) -> None:
        while not self.events[name]:
            self.device.work()

    def nanoseconds(self, start, end) -> int:
        assert self.events[start] and self.events[end]
        return 7

    def reach(self, name):
        self.wait(name)
        yield from ()

    def settle(self) -> None:
        while self.asked:
            self.device.work()


class FakeDevice:
    """Memory of this process in place of a device's, and streams that go on in any order."""

    memory_limit = MEMORY

    def __init__(self, seed: int = 0) -> None:
        self.random, self.streams, self.buffers = random.Random(seed), [], []
        self.used = self.copied = 0
        self.use, self.unlock, self.done = Mock(), Mock(), Future()
        self.done.set_result(None)
        self.cupy = SimpleNamespace(ndarray=self.array)

    @staticmethod
    def array(shape, dtype, memptr):
        """An array of the device, as CuPy describes it."""
        array = memptr[: np.prod(shape) * 4].view(dtype).reshape(shape)
        return SimpleNamespace(array=array, shape=shape, data=Mock(ptr=array.ctypes.data))

    def allocate(self, size):
        self.buffers.append(np.full(size, 255, np.uint8))
        return self.buffers[-1]

    def work(self) -> None:
        ready = [each for each in self.streams if each.asked and each.asked[0][0]()]
        (one,) = self.random.choices(ready, [stream.pace for stream in ready])
        one.asked.popleft()[1]()

    def copy(self, address, source) -> None:
        buffer = next(b for b in self.buffers if 0 <= address - b.ctypes.data < b.nbytes)
        buffer[address - buffer.ctypes.data :][: source.nbytes] = source.view(np.uint8)
        self.copied += source.nbytes

    def lock_pages(self, array):
        return self.unlock

    def new_stream(self, *, urgent: bool) -> Stream:
        self.streams.append(Stream(self))
        return self.streams[-1]

    @contextmanager
    def stream(self):
        self.used += 1
        context = self.new_stream(urgent=True)
        try:
            yield context
        finally:
            context.settle()
            self.used -= 1


def streamed_on(device: FakeDevice) -> datasets.StreamedDataset:
    return datasets.StreamedDataset(device, DATA, datasets.WindowBuffers(device))


def column_of(window, column, span):
    first = window.address(column, span[0]) - window.columns.data.ptr
    flat = window.columns.array.reshape(-1)
    assert 0 <= first <= first + 4 * (span[1] - span[0]) <= flat.nbytes
    return flat[first // 4 :][: span[1] - span[0]]


def sums_of(device, streamed, rows, cancelled=None, size=0):
    """Steps that sum up x1 * w of the rows in pairs, once for each of two chunks."""
    cancelled = np.zeros(1, np.uint8) if cancelled is None else cancelled
    spans, buffers = datasets.cut_rows(rows, streamed.window_rows), [None, None]
    sums = np.zeros((len(spans), 2))

    def launch(window, node, chunk, side):
        def kernel() -> None:
            terms = column_of(window, 0, spans[node]) * column_of(window, 6, spans[node])
            buffers[side] = sum_nodes(terms.astype(np.float64)[:, np.newaxis], spans[node][0])

        def copy() -> None:
            sums[node, chunk] = buffers[side][0]

        context.mark(f"begun {side}")
        context.launch(kernel)
        context.mark(f"computed {side}")
        return copy

    with device.stream() as context:
        work = streamed, spans, range(2), cancelled, launch, size
        assert (yield from datasets.run_chunks(device, context, *work)) == 7 * sums.size
    found = sum_nodes(sums, rows[0] // streamed.window_rows)
    assert found[0] == found[1]
    return found[0]


def whole_sum(rows):
    columns = DATA.matrix[:, slice(*rows)]
    terms = (columns[0] * columns[6]).astype(np.float64)
    return sum_nodes(terms[:, np.newaxis], rows[0])[0]


@settings(max_examples=12, deadline=None)
@given(st.integers(0, ROWS - 1), st.integers(1, ROWS), st.integers(0, 99))
def test_windows_give_the_bits_of_the_whole(start, count, seed):
    rows, device = (start, min(start + count, ROWS)), FakeDevice(seed)
    result_bytes = (seed % 2) << 40  # many are copied by another thread
    steps = sums_of(device, streamed_on(device), rows, size=result_bytes)
    assert run_to_end(steps) == whole_sum(rows)
    size = DATA.matrix[:, slice(*rows)].nbytes
    extra = DATA.matrix.itemsize * len(DATA.matrix) * datasets.ALIGNED_ROWS
    assert size <= device.copied <= size + extra


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 999))
def test_evaluations_at_the_same_time_do_not_disturb_each_other(seed):
    """One of them is cancelled at times, wherever it is."""
    device, found, waiting = FakeDevice(seed), {}, {}
    streamed = streamed_on(device)
    flags = [np.zeros(1, np.uint8) for _ in range(3)]
    work = [sums_of(device, streamed, (0, ROWS), flag) for flag in flags]
    while len(found) < len(work):
        number = device.random.choice([n for n in range(len(work)) if n not in found])
        flags[0][0] |= device.random.random() < 0.01
        if number in waiting and not waiting[number].done() and not flags[number][0]:
            continue
        try:
            waiting[number] = next(work[number]) or device.done
        except StopIteration as end:
            found[number] = end.value
        except CancelledError:
            found[number] = None
    assert {found[1], found[2]} == {whole_sum((0, ROWS))}
    assert found[0] in (None, found[1])
    assert device.used == 0


@pytest.mark.parametrize("seed", range(7, 14))
def test_the_pages_are_unlocked_when_the_last_user_is_gone(seed):
    device = FakeDevice(seed)
    streamed = streamed_on(device)
    steps = sums_of(device, streamed, (0, ROWS))
    next(steps)
    del streamed
    device.unlock.assert_not_called()
    steps.close()
    device.unlock.assert_called_once()
    copied = device.copied
    for stream in device.streams:
        stream.settle()
    assert device.copied == copied  # nobody has read the pages since


def test_a_data_set_is_streamed_if_most_of_the_memory_is_too_little():
    for rows, streams in ((1000, False), (600_000, False), (700_000, True)):
        layout = Layout(np.dtype(np.float32), variables=3, rows=rows)
        assert datasets.must_stream(layout, MEMORY) == streams
    # Columns that do not fit in two windows are refused.
    layout = Layout(np.dtype(np.float64), variables=200, rows=10**6)
    with pytest.raises(ResourceExhaustedError, match="stream 200 columns") as refused:
        datasets.window_rows(layout, MEMORY)
    assert datasets.window_rows(layout, refused.value.needed + 200 * 8) >= 16384


@given(st.integers(0, 2**40), st.integers(1, 2**24), st.integers(18, 30))
def test_rows_are_cut_where_nodes_of_the_tree_of_sums_end(start, count, level):
    spans = datasets.cut_rows((start, start + count), 1 << level)
    assert spans[0][0] == start
    assert spans[-1][1] == start + count
    assert all(before[1] == after[0] for before, after in pairwise(spans))
    if count > 1 << level:
        assert all(first >> level == (last - 1) >> level for first, last in spans)
    else:
        assert len(spans) == 1
