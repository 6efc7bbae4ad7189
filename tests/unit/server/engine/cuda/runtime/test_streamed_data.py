"""Data sets that pass through the device, which is memory of this process here."""

from __future__ import annotations

from contextlib import closing, contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warpfit.dataset import Dataset, Layout
from warpfit.errors import CancelledError, ResourceExhaustedError
from warpfit.ir import Batch, Program
from warpfit.request import Evaluation, Loss, Timings
from warpfit_server.engine.cuda.runtime import streamed_data
from warpfit_server.engine.cuda.runtime.resident_data import ResidentDataset, cut_rows
from warpfit_server.engine.cuda.runtime.streamed_data import (
    StreamedDataset,
    WindowBuffers,
    must_stream,
)
from warpfit_server.engine.cuda.streaming import evaluate_on
from warpfit_server.engine.interface import Outputs, run_to_end
from warpfit_server.engine.sum_tree import sum_nodes

MEMORY = 5 << 20
ROWS = 200_001
VALUES = 64 << 20
DATA = Dataset.of(
    np.random.default_rng(0).normal(size=(ROWS, 5)), np.arange(ROWS), np.ones(ROWS), dtype="f4"
)


class Memory:
    """An array of the device, as CuPy describes it."""

    def __init__(self, shape, dtype, memptr) -> None:
        self.array = np.full(shape, np.nan, dtype)
        self.shape, self.data = shape, SimpleNamespace(ptr=self.array.ctypes.data)


class Stream:
    """Copies only when somebody waits, as a slow device would."""

    def __init__(self, device: FakeDevice) -> None:
        self.device, self.pending, self.marked = device, [], {}

    def upload(self, address, source) -> None:
        self.pending.append((address, source))

    def mark(self, name) -> None:
        self.marked[name] = len(self.pending)

    def wait(self, name) -> None:
        while self.marked[name] and self.pending:
            self._copy(*self.pending.pop(0))
            self.marked = {key: count - 1 for key, count in self.marked.items()}

    def _copy(self, address, source) -> None:
        memory = max(
            (m for m in self.device.memories if m.data.ptr <= address), key=lambda m: m.data.ptr
        )
        flat, first = memory.array.reshape(-1), (address - memory.data.ptr) // 4
        flat[first:][: len(source)] = source
        self.device.copied += source.nbytes


class FakeDevice:
    """Memory of this process in place of a device's."""

    memory_limit = MEMORY

    def __init__(self) -> None:
        self.memories, self.streams, self.unlocked, self.copied = [], 0, 0, 0
        self.cupy = SimpleNamespace(ndarray=self._ndarray)

    def _ndarray(self, shape, dtype, memptr) -> Memory:
        self.memories.append(Memory(shape, dtype, memptr))
        return self.memories[-1]

    def allocate(self, size):
        return None

    def use(self) -> None:
        pass

    def lock_pages(self, array):
        def unlock() -> None:
            self.unlocked += 1

        return unlock

    @contextmanager
    def stream(self):
        self.streams += 1
        yield Stream(self)
        self.streams -= 1


def streamed_on(device: FakeDevice) -> StreamedDataset:
    return StreamedDataset(device, DATA, WindowBuffers(device))


class Tier:
    """Sums up x1 * w of the rows in pairs, and returns x2 as values."""

    def __init__(self) -> None:
        self.windows = 0

    def evaluate(self, window, evaluation, outputs):
        start, stop = evaluation.rows
        columns = [self._column(window, column, start, stop) for column in (0, 1, 6)]
        terms = (columns[0] * columns[2]).astype(np.float64)
        if outputs.losses is not None:
            outputs.losses[...] = sum_nodes(terms[:, np.newaxis], start)
            outputs.gradients[...] = 2 * outputs.losses.ravel()
        if outputs.values is not None:
            outputs.values[...] = columns[1]
        self.windows += 1
        yield None
        return Timings(compute=7)

    def _column(self, window, column, start, stop):
        count, address = stop - start, window.address(column, start)
        last = window.columns.data.ptr + window.columns.array.nbytes
        assert window.columns.data.ptr <= address < address + 4 * count <= last
        first = (address - window.columns.data.ptr) // 4
        return window.columns.array.reshape(-1)[first : first + count].copy()


def evaluation_of(rows, *, values: bool, cancelled: bool = False):
    batch = Batch.of([Program.parameter(0)], [[1.0]])
    evaluation = Evaluation(bytes(32), batch, loss=Loss.SSE, values=values, rows=rows)
    outputs = Outputs(
        np.empty((1, 1, rows[1] - rows[0]), np.float32) if values else None,
        np.empty((1, 1)),
        np.full(1, cancelled, dtype=np.uint8),
        lambda _: None,
        gradients=np.empty(1),
    )
    return evaluation, outputs


@settings(max_examples=25, deadline=None)
@given(st.integers(0, ROWS - 1), st.integers(1, ROWS), st.booleans())
def test_windows_give_the_bits_of_the_whole(start, count, values):
    rows, device, tier = (start, min(start + count, ROWS)), FakeDevice(), Tier()
    streamed = streamed_on(device)
    evaluation, outputs = evaluation_of(rows, values=values)
    timings = run_to_end(evaluate_on(tier, streamed, evaluation, outputs, VALUES))
    columns = DATA.matrix[:, slice(*rows)]
    terms = (columns[0] * columns[6]).astype(np.float64)
    assert outputs.losses[0, 0] == sum_nodes(terms[:, np.newaxis], rows[0])[0]
    assert outputs.gradients[0] == 2 * outputs.losses[0, 0]
    if values:
        np.testing.assert_array_equal(outputs.values[0, 0], columns[1])
    spans = len(cut_rows(rows, streamed.window_rows))
    assert (tier.windows, timings.compute) == (spans, 7 * spans)
    assert device.streams == 0
    extra = DATA.matrix.itemsize * len(DATA.matrix) * streamed_data.ALIGNED_ROWS
    assert columns.nbytes <= device.copied <= columns.nbytes + extra


@pytest.mark.parametrize("streams", [True, False])
def test_many_values_take_smaller_windows(streams):
    tier, device = Tier(), FakeDevice()
    resident = streamed_on(device)
    if not streams:
        memory = device.cupy.ndarray(DATA.matrix.shape, DATA.matrix.dtype, None)
        memory.array[:] = DATA.matrix
        resident = ResidentDataset(DATA, memory)
    evaluation, outputs = evaluation_of((0, ROWS), values=True)
    run_to_end(evaluate_on(tier, resident, evaluation, outputs, 4 * 5000))
    assert tier.windows == -(-ROWS // streamed_data.ALIGNED_ROWS)
    np.testing.assert_array_equal(outputs.values[0, 0], DATA.matrix[1])
    _, other = evaluation_of((0, ROWS), values=True)
    run_to_end(evaluate_on(tier, resident, evaluation, other, VALUES))
    np.testing.assert_array_equal(other.losses, outputs.losses)


def test_a_cancelled_evaluation_ends_its_turn():
    streamed = streamed_on(FakeDevice())
    evaluation, outputs = evaluation_of((0, ROWS), values=False, cancelled=True)
    with pytest.raises(CancelledError):
        run_to_end(evaluate_on(Tier(), streamed, evaluation, outputs, VALUES))
    _, outputs = evaluation_of((0, ROWS), values=False)
    run_to_end(evaluate_on(Tier(), streamed, evaluation, outputs, VALUES))


def test_evaluations_wait_for_each_other_without_a_thread():
    streamed = streamed_on(FakeDevice())
    work = [evaluation_of((0, ROWS), values=False) for _ in range(3)]
    first, second, third = (evaluate_on(Tier(), streamed, *each, VALUES) for each in work)
    assert next(first) is None
    waits = next(second), next(third)
    work[1][1].cancelled[0] = 1
    with pytest.raises(CancelledError):
        next(second)
    assert not any(turn.done() for turn in waits)
    first.close()
    assert all(turn.done() for turn in waits)
    run_to_end(third)


def test_the_pages_are_unlocked_when_the_last_user_is_gone():
    device = FakeDevice()
    streamed = streamed_on(device)
    with closing(streamed.windows([(0, 10)])) as windows:
        next(windows)
        assert device.unlocked == 0
    del streamed, windows
    assert device.unlocked == 1


@pytest.mark.parametrize(("rows", "streams"), [(1000, False), (300_000, False), (400_000, True)])
def test_a_data_set_is_streamed_if_most_of_the_memory_is_too_little(rows, streams):
    layout = Layout(np.dtype(np.float32), variables=3, rows=rows)
    assert must_stream(layout, MEMORY) == streams


def test_columns_that_do_not_fit_in_two_windows_are_refused():
    layout = Layout(np.dtype(np.float64), variables=200, rows=10**6)
    with pytest.raises(ResourceExhaustedError, match="stream 200 columns") as refused:
        streamed_data.window_rows(layout, MEMORY)
    assert streamed_data.window_rows(layout, refused.value.needed + 200 * 8) >= 16384
