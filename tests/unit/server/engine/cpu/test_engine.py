"""The CPU engine as a whole: batches, rows, losses, threads, cancellation, memory."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.engines.references import POISON, Evaluate, outputs_for, reference_loss
from support.random_programs import random_program, thesis_mix
from warpfit import errors
from warpfit.dataset import Dataset, Layout
from warpfit.errors import ResourceExhaustedError
from warpfit.expressions import reference
from warpfit.ir import Batch, Program
from warpfit.ops import CONSTANT, OPERATORS, VARIABLE
from warpfit.request import Evaluation, Loss
from warpfit_server.engine import sum_tree
from warpfit_server.engine.cpu import interpreter
from warpfit_server.engine.cpu.codegen import parts
from warpfit_server.engine.cpu.engine import CpuEngine
from warpfit_server.engine.interface import Outputs, run_to_end

X1, X2, P1 = Program.variable(0), Program.variable(1), Program.parameter(0)


def make_dataset(rows: int, dtype: str = "float64", *, weights: bool = False) -> Dataset:
    rng = np.random.default_rng(5)
    columns = rng.uniform(0.1, 3, size=(rows, 10))
    y = rng.normal(size=rows)
    return Dataset.of(columns, y, rng.uniform(size=rows) if weights else None, dtype=dtype)


@pytest.mark.parametrize("rows", [1, 7, 8, 15, 17, 1023, 1024, 2047, 2049, 20011])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_number_of_rows(evaluate, rows, dtype):
    data = make_dataset(rows, dtype)
    programs, parameters = thesis_mix(3, 4, operators=("add", "mul", "sub"))
    got = evaluate(data, programs, parameters)
    expected = reference.evaluate_programs(programs, data.variables, parameters)
    np.testing.assert_allclose(got.values[:, 0], expected, rtol=1e-4, atol=1e-3)


@given(st.tuples(st.integers(0, 2999), st.integers(1, 3000)), st.booleans())
def test_row_ranges_equal_slices(evaluate, bounds, wants_values):
    start, stop = bounds[0], min(3000, bounds[0] + bounds[1])
    data = make_dataset(3000, "float32", weights=True)
    programs, parameters = thesis_mix(4, 3)
    full = evaluate(data, programs, parameters).values
    options = {"rows": (start, stop), "values": wants_values, "loss": Loss.MAE}
    part = evaluate(data, programs, parameters, **options)
    if wants_values:
        np.testing.assert_array_equal(part.values, full[:, :, start:stop])
    used = slice(start, stop)
    expected = reference_loss(Loss.MAE, full[:, :, used], data.target[used], data.weights[used])
    np.testing.assert_allclose(part.losses, expected, rtol=1e-12)


def test_nan_makes_the_loss_nan_whatever_its_weight(evaluate):
    data = Dataset.of(np.array([[1.0], [-1.0]]), np.ones(2), np.array([1.0, 0.0]))
    got = evaluate(data, [Program.apply("log", X1), X1], loss=Loss.SSE)
    assert np.isnan(got.losses[0, 0])
    assert got.losses[1, 0] == 0


@pytest.mark.parametrize("rows", [10, 5000])
def test_parameter_vectors(evaluate, rows):
    data = make_dataset(rows)
    rng = np.random.default_rng(0)
    programs = [random_program(rng, n) for n in (1, 9, 30, 30)]
    parameters = [rng.uniform(0.5, 2, size=(7, p.parameters)) for p in programs]
    got = evaluate(data, programs, parameters, loss=Loss.MSE)
    for index, (program, block) in enumerate(zip(programs, parameters, strict=True)):
        for k, vector in enumerate(block):
            one = evaluate(data, [program], [vector], loss=Loss.MSE)
            np.testing.assert_array_equal(got.values[index, k], one.values[0, 0])
            assert np.array_equal(got.losses[index, k], one.losses[0, 0], equal_nan=True)


def assert_same(got, expected):
    np.testing.assert_array_equal(got.values, expected.values)
    np.testing.assert_array_equal(got.losses, expected.losses)


def test_neither_threads_nor_other_evaluations_change_anything(evaluate, monkeypatch):
    monkeypatch.setattr(interpreter, "_LARGEST_CHUNK", 200_000)
    given = make_dataset(50_000, "float32"), *thesis_mix(8, 40)
    expected = evaluate(*given, loss=Loss.R2)
    for threads in (1, 3, 16):
        engine = CpuEngine(threads=threads)
        assert_same(Evaluate(engine)(*given, loss=Loss.R2), expected)
        engine.close()
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda _: Evaluate(evaluate.engine)(*given, loss=Loss.R2), range(6)):
            assert_same(got, expected)


@pytest.mark.parametrize("derivatives", [False, True])
def test_programs_that_are_kept_lowered_are_checked_for_each_data_set(engine, derivatives):
    wide, narrow = make_dataset(100), Dataset.of(np.ones((100, 1)), np.ones(100))
    batch = Batch.of([Program.apply("mul", X2, P1)], [[2.0]])
    engine.load(narrow)

    def loss(data: Dataset) -> float:
        asked = Evaluation(data.content_id, batch, loss=Loss.MSE, gradient=derivatives)
        outputs = outputs_for(asked, wide.layout)
        run_to_end(engine.evaluate(asked, outputs))
        return float(outputs.losses[0, 0])

    engine.load(wide)
    assert len({loss(wide) for _ in range(4)}) == 1
    for _ in range(4):
        with pytest.raises(errors.ProgramError):
            loss(narrow)


def test_programs_that_are_kept_lowered_are_cut_anew(evaluate):
    programs, _ = thesis_mix(12, 20)
    rng = np.random.default_rng(1)
    for rows, dtype, vectors in product((30_000, 700), ("float32", "float64"), (1, 2, 3)):
        parameters = [rng.uniform(0.5, 2, size=(vectors, p.parameters)) for p in programs]
        given = make_dataset(rows, dtype), programs, parameters
        fresh = Evaluate(CpuEngine(threads=1))
        got, expected = (run(*given, loss=Loss.MAE) for run in (evaluate, fresh))
        fresh.engine.close()
        assert_same(got, expected)


def test_values_are_announced_in_order_and_final(evaluate):
    data = make_dataset(200_000, "float32")  # many steps on any machine
    programs, parameters = thesis_mix(11, 100)
    expected = evaluate(data, programs, parameters).values
    values, announced = np.full_like(expected, POISON), [0]

    def check(ready: int) -> None:
        new = slice(announced[-1], ready)
        np.testing.assert_array_equal(values[new], expected[new])
        announced.append(ready)

    outputs = Outputs(values, None, np.zeros(1, np.uint8), check)
    evaluation = Evaluation(data.content_id, Batch.of(programs, parameters))
    run_to_end(evaluate.engine.evaluate(evaluation, outputs))
    np.testing.assert_array_equal(values, expected)
    assert announced[-1] == 100
    assert announced == sorted(set(announced))
    assert len(announced) > 4


def test_cancelled_before_and_in_the_middle(evaluate):
    data = make_dataset(100_000, "float32")
    programs, parameters = thesis_mix(12, 200)
    with pytest.raises(errors.CancelledError):
        evaluate(data, programs, parameters, cancelled=True)
    evaluation, announced = Evaluation(data.content_id, Batch.of(programs, parameters)), []
    outputs = outputs_for(evaluation, data.layout, ready=announced.append)
    with pytest.raises(errors.CancelledError):
        for _ in evaluate.engine.evaluate(evaluation, outputs):
            outputs.cancelled[0] = len(announced) > 0
    assert 0 < announced[-1] < 200
    assert np.isfinite(evaluate(data, [X1]).values).all()


@pytest.mark.parametrize("leaning", ["left", "right"])
@pytest.mark.parametrize("tokens", [10_001, 300_001])
def test_long_chains(evaluate, leaning, tokens):
    count, leaf, add = tokens // 2, [VARIABLE], [OPERATORS["add"].code]
    codes = leaf + (leaf + add) * count if leaning == "left" else leaf * (count + 1) + add * count
    values = np.where(np.array(codes) == VARIABLE, np.arange(len(codes)) % 2, 0)
    program = Program(codes, values)
    data = Dataset.of(np.array([[1.0, 1.0], [0.5, 2.0]]), dtype="float64")
    got = evaluate(data, [program]).values[0, 0]
    np.testing.assert_allclose(got, reference.evaluate_program(program, data.variables))


def test_columns_may_be_longer_than_4_gib(evaluate, tmp_path):
    rows = 600_000_000
    matrix = np.memmap(tmp_path / "sparse", np.float64, "w+", shape=(3, rows))  # takes no space
    matrix[:, -1000:] = [[1], [2], [5]]
    data = Dataset.resident(Layout(matrix.dtype, 2, rows, has_target=True), matrix, bytes(32))
    got = evaluate(data, [X1, X2], rows=(rows - 1000, rows), loss=Loss.SSE)
    np.testing.assert_array_equal(got.values[:, 0], [[1.0] * 1000, [2.0] * 1000])
    np.testing.assert_array_equal(got.losses[:, 0], [16_000, 9_000])


def test_working_memory_lives_as_long_as_it_is_used(evaluate):
    """So much of it that the allocator maps it alone: used after its release, it would be gone."""
    constants = np.random.default_rng(3).normal(size=600_000)
    codes = np.tile(np.array([CONSTANT, OPERATORS["add"].code], dtype=np.uint8), len(constants))
    values = np.stack([constants, np.zeros_like(constants)], axis=1).ravel()
    program = Program(np.r_[np.uint8(VARIABLE), codes], np.r_[0.0, values])
    data = make_dataset(3, "float64")
    got = evaluate(data, [program]).values[0, 0]
    expected = [np.add.accumulate(np.r_[x, constants])[-1] for x in data.variables[0]]
    np.testing.assert_array_equal(got, expected)


def test_what_compiled_code_finds_no_memory_for_is_refused(engine, monkeypatch):
    given = make_dataset(1000, "float64"), *thesis_mix(10, 3)
    monkeypatch.setattr(sum_tree, "BLOCK_BYTES", 2**60)
    with pytest.raises(errors.ResourceExhaustedError, match="out of memory"):
        Evaluate(engine)(*given)
    monkeypatch.undo()
    Evaluate(engine)(*given)


@pytest.mark.parametrize("derivatives", [False, True])
@pytest.mark.parametrize("empty", [[0], [7], range(8)])
def test_programs_without_tokens_are_found(engine, monkeypatch, empty, derivatives):
    monkeypatch.setattr("warpfit_server.engine.cpu.engine._CHECKED_AT_ONCE", 3)
    data = make_dataset(10)
    engine.load(data)
    lengths, none = np.ones(8, np.uint32), np.zeros(8, np.uint32)
    lengths[list(empty)] = 0
    codes = np.full(int(lengths.sum()), VARIABLE, np.uint8)
    batch = Batch(codes, np.zeros(len(codes)), lengths, none, np.empty(0))
    asked = Evaluation(data.content_id, batch, loss=Loss.MSE, gradient=derivatives)
    with pytest.raises(errors.ProgramError):
        run_to_end(engine.evaluate(asked, outputs_for(asked, data.layout)))


DATA = Dataset.of(np.linspace(0.1, 3, 100)[:, None], np.ones(100), dtype="float64")
BATCH = Batch.of([Program.apply("mul", X1, P1)], [np.array([2.0])])
LOSS_ALONE = Evaluation(DATA.content_id, BATCH, loss=Loss.MSE, values=False)
EVALUATION = replace(LOSS_ALONE, gradient=True)


@pytest.mark.parametrize("fails", [False, True])
def test_values_do_not_wait_for_the_code_of_derivatives(monkeypatch, fails):
    """At a first start it is compiled when the engine serves already.

    A short lack of memory does not end all gradients and fits of the engine.
    """
    load, is_compiled, failures = parts.load_derivatives, threading.Event(), [MemoryError()] * fails

    def load_later(*arguments):
        assert is_compiled.wait(60)
        if failures:
            raise failures.pop()
        return load(*arguments)

    monkeypatch.setattr(parts, "load_derivatives", load_later)
    engine = CpuEngine(1)
    engine.load(DATA)
    derived, plain = outputs_for(EVALUATION, DATA.layout), outputs_for(LOSS_ALONE, DATA.layout)
    steps = engine.evaluate(EVALUATION, derived)
    waits_for = next(steps)
    assert not waits_for.done()
    run_to_end(engine.evaluate(LOSS_ALONE, plain))
    is_compiled.set()
    if fails:
        with pytest.raises(ResourceExhaustedError):
            run_to_end(steps)
        steps = engine.evaluate(EVALUATION, derived)
    run_to_end(steps)
    np.testing.assert_allclose(derived.losses, plain.losses, rtol=1e-12)
    x = DATA.variables[0]
    np.testing.assert_allclose(derived.gradients, [np.sum(2 * (2 * x - 1) * x)], rtol=1e-12)
    engine.close()
