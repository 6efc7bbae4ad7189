"""The CPU engine as a whole: batches, rows, losses, threads, cancellation, code on disk."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.engines.evaluations import POISON, Evaluate
from support.engines.reference_losses import reference_loss
from warpfit.dataset import Dataset
from warpfit.errors import (
    CancelledError,
    DatasetNotFoundError,
    ProgramError,
    ResourceExhaustedError,
)
from warpfit.expressions import reference
from warpfit.expressions.workload import random_program, thesis_mix
from warpfit.ir import Batch, Program
from warpfit.losses import DIFFERENCE
from warpfit.ops import CONSTANT, OPERATORS, VARIABLE
from warpfit.request import Evaluation, Loss, Precision
from warpfit_server.engine.autodiff.backward_pass import (
    BY_PARAMETERS,
    BY_VARIABLES,
    LOSS,
    LOSS_DERIVATIVE,
)
from warpfit_server.engine.autodiff.differentiate import row_loss_tokens
from warpfit_server.engine.cpu import chunked_work
from warpfit_server.engine.cpu.codegen import kernel_cache, parts
from warpfit_server.engine.cpu.engine import CpuEngine
from warpfit_server.engine.cpu.threads import ParallelLoop
from warpfit_server.engine.interface import Outputs, run_to_end
from warpfit_server.engine.lowering.lowered import Lowered
from warpfit_server.system.compile_cache import default_cache_directory

X1, X2, P1 = Program.variable(0), Program.variable(1), Program.parameter(0)
RNG_SEED = 5


@pytest.fixture(scope="module")
def evaluate() -> Iterator[Evaluate]:
    engine = CpuEngine(threads=2)
    runner = Evaluate(engine)
    yield runner
    runner.unload()
    engine.close()


def make_dataset(rows: int, dtype: str = "float64", *, weights: bool = False) -> Dataset:
    rng = np.random.default_rng(RNG_SEED)
    columns = rng.uniform(0.1, 3, size=(rows, 10))
    y = rng.normal(size=rows)
    return Dataset.of(columns, y, rng.uniform(size=rows) if weights else None, dtype=dtype)


def lowered(*programs: Program):
    return lowered_batch(Batch.of(programs, [[1.0] * 9] * len(programs)), 1)


@cache
def compiled() -> kernel_cache.CompiledCode:
    return kernel_cache.load(default_cache_directory())


@cache
def derivatives() -> kernel_cache.CompiledDerivatives:
    return kernel_cache.load_derivatives(default_cache_directory(), compiled())


def lowered_batch(batch: Batch, cores: int):
    return done(*chunked_work.lowering_work(compiled().lower, batch, np.zeros(1, np.uint8)), cores)


def done(work: chunked_work.ChunkedWork, result, cores: int):
    loop = ParallelLoop(cores, compiled().parallel)
    loop.run(work, 0, work.chunks)
    loop.close()
    return result


@pytest.mark.parametrize("rows", [1, 7, 8, 15, 16, 17, 31, 511, 512, 513, 1023, 1024, 1025, 20011])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_number_of_rows(evaluate, rows, dtype):
    data = make_dataset(rows, dtype)
    programs, parameters = thesis_mix(3, 4, operators=("add", "mul", "sub"))
    got = evaluate(data, programs, parameters)
    expected = reference.evaluate(programs, data.variables, parameters)
    np.testing.assert_allclose(got.values[:, 0], expected, rtol=1e-4, atol=1e-3)


@settings(max_examples=40, deadline=None)
@given(st.tuples(st.integers(0, 2999), st.integers(1, 3000)), st.booleans())
def test_row_ranges_equal_slices(evaluate, bounds, wants_values):
    start, stop = bounds[0], min(3000, bounds[0] + bounds[1])
    data = make_dataset(3000, "float32", weights=True)
    programs, parameters = thesis_mix(4, 3)
    full = evaluate(data, programs, parameters).values
    part = evaluate(
        data, programs, parameters, rows=(start, stop), values=wants_values, loss=Loss.MAE
    )
    if wants_values:
        np.testing.assert_array_equal(part.values, full[:, :, start:stop])
    used = slice(start, stop)
    expected = reference_loss(Loss.MAE, full[:, :, used], data.target[used], data.weights[used])
    np.testing.assert_allclose(part.losses, expected, rtol=1e-12)


@pytest.mark.parametrize("loss", Loss)
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rows", [1, 100, 40_000])
def test_losses(evaluate, loss, weights, dtype, rows):
    data = make_dataset(rows, dtype, weights=weights)
    programs, parameters = thesis_mix(6, 5)
    programs.append(X1)
    parameters.append(np.empty(0))
    got = evaluate(data, programs, parameters, loss=loss)
    expected = reference_loss(loss, got.values, data.target, data.weights)
    np.testing.assert_allclose(got.losses, expected, rtol=1e-10)
    alone = evaluate(data, programs, parameters, loss=loss, values=False)
    np.testing.assert_array_equal(alone.losses, got.losses)


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


def test_threads_do_not_change_anything(monkeypatch):
    monkeypatch.setattr(chunked_work, "_LARGEST_CHUNK", 200_000)
    data = make_dataset(50_000, "float32")
    programs, parameters = thesis_mix(8, 40)
    answers = []
    for threads in (1, 2, 3, 16):
        engine = CpuEngine(threads=threads)
        answers.append(Evaluate(engine)(data, programs, parameters, loss=Loss.R2))
        engine.close()
    for other in answers[1:]:
        np.testing.assert_array_equal(answers[0].values, other.values)
        np.testing.assert_array_equal(answers[0].losses, other.losses)


def test_evaluations_at_the_same_time(evaluate):
    data = make_dataset(3000, "float32")
    programs, parameters = thesis_mix(9, 60)
    expected = evaluate(data, programs, parameters, loss=Loss.MSE)
    engine = evaluate.engine

    def again(_: int):
        return Evaluate(engine)(data, programs, parameters, loss=Loss.MSE)

    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(again, range(12)):
            np.testing.assert_array_equal(got.values, expected.values)
            np.testing.assert_array_equal(got.losses, expected.losses)


@pytest.mark.parametrize("derivatives", [False, True])
def test_programs_that_are_known_are_checked_against_other_data_sets(derivatives):
    """Programs that were valid for one data set may not be for another one."""
    wide = make_dataset(100)
    narrow = Dataset.of(np.ones((100, 1)), np.ones(100))
    engine, batch = CpuEngine(threads=1), Batch.of([Program.apply("mul", X2, P1)], [[2.0]])

    def losses(dataset: Dataset) -> float:
        asked = Evaluation(dataset.content_id, batch, loss=Loss.MSE, values=False)
        outputs = Outputs(None, np.empty((1, 1)), np.zeros(1, np.uint8), lambda _: None)
        if derivatives:
            asked = replace(asked, gradient=True)
            outputs = replace(outputs, gradients=np.empty(1))
        run_to_end(engine.evaluate(asked, outputs))
        return float(outputs.losses[0, 0])

    for dataset in (wide, narrow):
        engine.load(dataset)
    assert len({losses(wide) for _ in range(4)}) == 1
    for _ in range(4):
        with pytest.raises(ProgramError):
            losses(narrow)
    engine.close()


def test_programs_that_come_again_are_cut_for_what_is_asked(evaluate):
    """With as many parameter vectors, over as many rows and in blocks as wide as this time."""
    programs, _ = thesis_mix(12, 20)
    rng = np.random.default_rng(1)
    for number in range(12):
        vectors, dtype = 1 + number % 3, ("float32", "float64")[number // 3 % 2]
        data = make_dataset((30_000, 700)[number // 6 % 2], dtype)
        parameters = [rng.uniform(0.5, 2, size=(vectors, p.parameters)) for p in programs]
        got = evaluate(data, programs, parameters, loss=Loss.MAE)
        fresh = Evaluate(CpuEngine(threads=1))
        expected = fresh(data, programs, parameters, loss=Loss.MAE)
        fresh.engine.close()
        np.testing.assert_array_equal(got.values, expected.values)
        np.testing.assert_array_equal(got.losses, expected.losses)


def test_ready_is_announced_in_order_and_completely():
    data = make_dataset(100_000, "float32")
    programs, parameters = thesis_mix(10, 100)
    engine = CpuEngine(threads=1)
    evaluate = Evaluate(engine)
    evaluate(data, programs, parameters)
    engine.close()
    assert evaluate.announced[-1] == 100
    assert evaluate.announced == sorted(set(evaluate.announced))
    assert len(evaluate.announced) > 3


def test_values_are_final_when_announced(evaluate):
    data = make_dataset(20_000, "float32")
    programs, parameters = thesis_mix(11, 100)
    expected = evaluate(data, programs, parameters).values
    values = np.full_like(expected, POISON)

    def check(ready: int) -> None:
        np.testing.assert_array_equal(values[:ready], expected[:ready])

    outputs = Outputs(values, None, np.zeros(1, np.uint8), check)
    evaluation = Evaluation(data.content_id, Batch.of(programs, parameters))
    run_to_end(evaluate.engine.evaluate(evaluation, outputs))


def test_cancelled_before_and_in_the_middle(evaluate):
    data = make_dataset(100_000, "float32")
    programs, parameters = thesis_mix(12, 200)
    with pytest.raises(CancelledError):
        evaluate(data, programs, parameters, cancelled=True)
    cancelled = np.zeros(1, np.uint8)
    announced: list[int] = []

    def cancel(ready: int) -> None:
        announced.append(ready)
        cancelled[0] = 1

    evaluation = Evaluation(data.content_id, Batch.of(programs, parameters))
    values = np.empty(evaluation.shape(data.layout), np.float32)
    with pytest.raises(CancelledError):
        run_to_end(evaluate.engine.evaluate(evaluation, Outputs(values, None, cancelled, cancel)))
    assert len(announced) == 1
    assert announced[0] < 200
    assert np.isfinite(evaluate(data, [X1]).values).all()


def test_an_error_of_the_receiver_stops_the_threads(evaluate):
    data = make_dataset(100_000, "float32")
    programs, parameters = thesis_mix(12, 100)

    def fail(ready: int) -> None:
        raise ConnectionError("the receiver is gone")

    evaluate.engine.load(data)
    evaluation = Evaluation(data.content_id, Batch.of(programs, parameters))
    values = np.empty(evaluation.shape(data.layout), np.float32)
    outputs = Outputs(values, None, np.zeros(1, np.uint8), lambda _: None)
    run_to_end(
        evaluate.engine.evaluate(evaluation, outputs)
    )  # with as many threads as it will ever have
    threads = threading.active_count()
    with pytest.raises(ConnectionError):
        run_to_end(evaluate.engine.evaluate(evaluation, replace(outputs, ready=fail)))
    assert threading.active_count() <= threads


def test_unknown_dataset(evaluate):
    evaluation = Evaluation(b"?" * 32, Batch.of([X1]))
    outputs = Outputs(np.empty((1, 1, 1)), None, np.zeros(1, np.uint8), lambda ready: None)
    with pytest.raises(DatasetNotFoundError):
        run_to_end(evaluate.engine.evaluate(evaluation, outputs))


@pytest.mark.parametrize("leaning", ["left", "right"])
@pytest.mark.parametrize("tokens", [10_001, 1_000_001])
def test_long_chains(evaluate, leaning, tokens):
    count = tokens // 2
    leaf, add = 1, OPERATORS["add"].code
    codes = (
        [leaf, *[leaf, add] * count] if leaning == "left" else [leaf] * (count + 1) + [add] * count
    )
    values = np.where(np.array(codes) == leaf, np.arange(len(codes)) % 2, 0)
    program = Program(codes, values)
    data = Dataset.of(np.array([[1.0, 1.0], [0.5, 2.0]]), dtype="float64")
    got = evaluate(data, [program]).values[0, 0]
    np.testing.assert_allclose(got, reference.evaluate_program(program, data.variables))


def test_deep_balanced_program(evaluate):
    program = Program.apply("sub", X1, X2)
    for _ in range(12):
        program = Program.apply("sub", program, Program.apply("abs", program))
    data = make_dataset(100)
    expected = reference.evaluate_program(program, data.variables)
    np.testing.assert_allclose(evaluate(data, [program]).values[0, 0], expected)


def test_programs_without_variables(evaluate):
    data = make_dataset(1500, "float32")
    programs = [P1, Program.constant(0.1), Program.apply("exp", P1), X2]
    got = evaluate(data, programs, [[0.3], [], [0.3], []]).values[:, 0]
    for row, expected in enumerate(np.array([0.3, 0.1, np.exp(np.float32(0.3))], np.float32)):
        assert np.unique(got[row]).tolist() == [expected]
    np.testing.assert_array_equal(got[3], data.variables[1])


def test_special_constants(evaluate):
    data = make_dataset(20)
    programs = [Program.constant(v) for v in (np.nan, np.inf, -np.inf, -0.0, 0.0)]
    got = evaluate(data, programs).values[:, 0, 0]
    np.testing.assert_array_equal(got, [np.nan, np.inf, -np.inf, -0.0, 0.0])
    assert np.signbit(got).tolist()[3:] == [True, False]


def test_common_subexpressions_and_scalars_are_computed_once():
    shared = Program.apply("exp", Program.apply("mul", X1, X2))
    scalar = Program.apply("sqrt", Program.apply("add", P1, Program.constant(2.0)))
    program = Program.apply("add", Program.apply("mul", shared, scalar), shared)
    header = lowered(program).headers[0]
    assert header["prologue_end"] == 2
    assert header["end"] - header["prologue_end"] == 4


def test_the_deeper_operand_goes_first():
    deep = Program.apply("exp", X1)
    for _ in range(30):
        deep = Program.apply("mul", Program.apply("exp", X2), Program.apply("log", deep))
    assert lowered(deep).headers["slots"][0] <= 2


def test_fast_and_precise_differ_only_slightly(evaluate):
    data = make_dataset(1000, "float32")
    program = Program.apply("pow", X1, X2)
    fast = evaluate(data, [program], precision=Precision.FAST).values
    precise = evaluate(data, [program]).values
    np.testing.assert_allclose(fast, precise, rtol=1e-5)


def test_read_only_data_is_used_in_place(evaluate):
    data = make_dataset(64)
    data.matrix.setflags(write=False)
    np.testing.assert_array_equal(evaluate(data, [X1]).values[0, 0], data.variables[0])


@pytest.fixture
def copied(tmp_path):
    """A copy of all that the engine has compiled."""
    derivatives()
    kept = parts.directory_of(default_cache_directory())
    shutil.copytree(kept, tmp_path / kept.name)
    return tmp_path


def test_compiled_code_survives_damage_and_is_stored(copied):
    objects = sorted(copied.glob("cpu-*/*.o"))
    assert len(objects) == 3 + 3  # of values and of derivatives
    whole = [path.read_bytes() for path in objects[:2]]
    for path in objects[:2]:
        path.write_bytes(path.read_bytes()[:-7] + b"garbage")
    damaged = CpuEngine(1, copied)
    data = make_dataset(10)
    assert np.isfinite(Evaluate(damaged)(data, [X1]).values).all()
    damaged._derivatives.result()
    damaged.close()
    assert [path.read_bytes() for path in objects[:2]] == whole
    assert sorted(copied.glob("cpu-*/*.o")) == objects


def test_only_derivatives_wait_for_their_code(copied, monkeypatch):
    """At a first start it is compiled when the engine serves already."""
    compiled_at_last = threading.Event()

    def compile_group(place, group, processes, *, urgent=True):
        assert group == "values" or compiled_at_last.wait(60)

    monkeypatch.setattr(parts, "compile_group", compile_group)
    engine = CpuEngine(1, copied)
    data = make_dataset(100)
    engine.load(data)
    batch = Batch.of([Program.apply("mul", X1, P1)], [np.array([2.0])])
    evaluation = Evaluation(data.content_id, batch, loss=Loss.MSE, values=False, gradient=True)
    losses, gradients = np.empty((1, 1)), np.empty(1)
    flag = np.zeros(1, np.uint8)
    with_gradients = Outputs(None, losses, flag, lambda _: None, gradients=gradients)
    steps = engine.evaluate(evaluation, with_gradients)
    waits_for = next(steps)
    assert not waits_for.done()
    alone = np.empty((1, 1))
    plain = replace(evaluation, gradient=False)
    run_to_end(engine.evaluate(plain, Outputs(None, alone, flag, lambda _: None)))
    compiled_at_last.set()
    waits_for.result(60)
    run_to_end(steps)
    x, y = data.variables[0], data.target
    np.testing.assert_allclose(losses, alone, rtol=1e-12)
    np.testing.assert_allclose(gradients, [np.sum(2 * (2 * x - y) * x)], rtol=1e-12)
    engine.close()


def test_code_of_derivatives_that_failed_to_load_is_loaded_again(copied, monkeypatch):
    """A lack of memory that passes does not end all gradients of the engine."""
    load, failures = kernel_cache.load_derivatives, [MemoryError()]
    somebody_waits = threading.Event()

    def fails_once(*arguments):
        if failures:
            assert somebody_waits.wait(30)
            raise failures.pop()
        return load(*arguments)

    monkeypatch.setattr(kernel_cache, "load_derivatives", fails_once)
    engine = CpuEngine(1, copied)
    waiting = engine._derivative_code()
    next(waiting)
    somebody_waits.set()
    with pytest.raises(MemoryError):
        run_to_end(waiting)
    assert run_to_end(engine._derivative_code()).kernels
    engine.close()


def test_directory_that_cannot_be_written(tmp_path, caplog, monkeypatch):
    CpuEngine(1).close()  # its compiled code is copied, which takes less than to compile again

    def copy(place, group, processes, *, urgent=True):
        shutil.copytree(default_cache_directory() / place.name, place, dirs_exist_ok=True)

    monkeypatch.setattr(parts, "compile_group", copy)
    occupied = tmp_path / "file"
    occupied.write_text("not a directory")
    engine = CpuEngine(2, occupied / "cache")
    assert "compiled code is kept in a temporary directory" in caplog.text
    data = make_dataset(10)
    assert np.isfinite(Evaluate(engine)(data, [X1]).values).all()
    engine.close()


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


def test_what_compiled_code_finds_no_memory_for_is_refused(monkeypatch):
    engine = CpuEngine(threads=2)
    data = make_dataset(1000, "float64")
    programs, parameters = thesis_mix(10, 3)
    monkeypatch.setattr(chunked_work, "_BLOCK_BYTES", 2**60)
    with pytest.raises(ResourceExhaustedError, match="out of memory"):
        Evaluate(engine)(data, programs, parameters)
    monkeypatch.undo()
    Evaluate(engine)(data, programs, parameters)
    engine.close()


def differentiated_batch(batch: Batch, cores: int) -> Lowered:
    requested = BY_PARAMETERS | BY_VARIABLES | LOSS | LOSS_DERIVATIVE
    row_loss = row_loss_tokens(DIFFERENCE, 10, weighted=False)
    given = (derivatives().differentiate, batch, row_loss, requested, np.zeros(1, np.uint8))
    return done(*chunked_work.differentiation_work(*given), cores)


def part_of(found: Lowered, program: int, *, derivatives: bool) -> list[object]:
    """Return what was made of one program, as if there were no others."""
    header = found.headers[program]
    ranges = [(found.loads, "first_load", "loads")]
    names = ["scalars", "slots", "loads"]
    if derivatives:
        ranges.append((found.columns, "first_column", "columns"))
        ranges.append((found.entries, "first_entry", "entries"))
        names += ["columns", "entries", "loss", "loss_derivative"]
    parts = [array[header[first] :][: header[count]] for array, first, count in ranges]
    instructions = found.instructions[header["start"] : header["end"]]
    prologue = header["prologue_end"] - header["start"]
    return [instructions, prologue, *parts, *(header[name] for name in names)]


@pytest.mark.parametrize("derivatives", [False, True])
def test_threads_lower_ranges_of_programs(derivatives):
    lower = differentiated_batch if derivatives else lowered_batch
    programs, parameters = thesis_mix(RNG_SEED, 400)
    together = lower(Batch.of(programs, parameters), 4)
    for number, (program, vector) in enumerate(zip(programs, parameters, strict=True)):
        alone = lower(Batch.of([program], [vector]), 1)
        ours, own = (
            part_of(found, index, derivatives=derivatives)
            for found, index in ((together, number), (alone, 0))
        )
        for one, other in zip(ours, own, strict=True):
            np.testing.assert_array_equal(one, other)
    if derivatives:
        used = np.sort(together.headers[["start", "end"]])
        assert used["start"].tolist() == [0, *used["end"][:-1]], "nothing lies between them"
