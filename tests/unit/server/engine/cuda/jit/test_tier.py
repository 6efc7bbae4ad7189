"""The compiled tier without a GPU: launches, the store of kernels, the chooser, the renderer."""

import ctypes
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from support.emulators.host_device import install
from support.emulators.ptx_on_host import run_kernel
from support.engines.references import outputs_for
from support.servers.server import eventually
from support.suites.derivatives import make_dataset, smooth_programs
from warpfit.dataset import Dataset
from warpfit.errors import ProgramError, UnavailableError
from warpfit.expressions.reference import differentiate
from warpfit.ir import Batch, Program
from warpfit.ops import OPERATORS, VARIABLE, Operator
from warpfit.parse import parse
from warpfit.request import Evaluation, Loss, Tier
from warpfit_server.engine import autodiff as differentiating
from warpfit_server.engine.autodiff import BY_PARAMETERS, differentiate_chunk, lower_batch
from warpfit_server.engine.cuda.engine import Decision, TierChooser, TierCost, WorkKind
from warpfit_server.engine.cuda.jit import kernel_store, renderer, templates, tier
from warpfit_server.engine.cuda.jit.renderer import Output
from warpfit_server.engine.cuda.jit.tier import IdleGraphs
from warpfit_server.engine.cuda.runtime import compiler
from warpfit_server.engine.cuda.runtime.datasets import upload
from warpfit_server.engine.cuda.runtime.device import CudaDevice
from warpfit_server.engine.interface import Arithmetic, run_to_end
from warpfit_server.engine.lowering import Lowered
from warpfit_server.engine.native.intrinsics import argument_block


def test_kernels_are_planned_by_another_thread_than_the_loops(monkeypatch):
    dataset, threads = Dataset.of(np.ones((10, 1)), np.ones(10)), []
    evaluation = Evaluation(dataset.content_id, Batch.of([parse("x1 + x1")]), tier=Tier.COMPILED)

    def make_plan(*_):
        threads.append(threading.current_thread().name)
        raise ProgramError("a bad token", "BAD_TOKEN")

    monkeypatch.setattr(tier, "make_plan", make_plan)
    monkeypatch.setattr(tier, "GraphCapturer", Mock())
    with ThreadPoolExecutor(1, "plan") as planner:
        compiled = tier.CompiledTier(Mock(), None, planner)
        outputs = outputs_for(evaluation, dataset.layout)
        steps = compiled.evaluate(Mock(dataset=dataset), evaluation, outputs)
        waits_for = next(steps)
        for wait in (lambda: waits_for.result(10), lambda: next(steps)):
            with pytest.raises(ProgramError, match="a bad token"):
                wait()
    assert threads == ["plan_0"]


@pytest.mark.parametrize(
    ("values", "span", "launches"), [(False, None, 18), (True, None, 18), (True, (517, 66_001), 17)]
)
def test_rows_are_cut_into_launches_of_one_graph(monkeypatch, values, span, launches):
    """In place of a captured graph: the values of two programs are x and 2 x."""
    install(monkeypatch)
    x, y = np.random.default_rng(0).normal(size=(2, 70_001))
    dataset, device = Dataset.of(x, y, dtype="float64"), CudaDevice()
    given, sums, launched = {}, np.zeros(2), []

    def launch(_):
        count = given["stop"] - given["head"]

        def rows(name, skipped):
            place = given[name] + 8 * skipped
            return np.ctypeslib.as_array((ctypes.c_double * count).from_address(place))

        x, y = (rows(name, given["head"]) for name in ("variables", "target"))
        for factor in (1, 2):
            sums[factor - 1] = np.sum((factor * x - y) ** 2)
            if "values" in given:
                rows("values", (factor - 1) * given["pitch"] // 8)[:] = factor * x
        launched.append(count)

    graph = Mock(sums=sums, set_arguments=given.update, launch=launch)
    batch = Batch.of([parse("x1"), parse("x1 + x1")])
    asked = Evaluation(dataset.content_id, batch, rows=span, loss=Loss.SSE, values=values)
    start, stop = asked.row_range(dataset.layout)
    plan = Mock(arithmetic=Arithmetic.DOUBLE, sum_starts=np.arange(3))
    work = tier.CompiledWork(plan, upload(device, dataset), asked, start, stop, 4096, 512, None)
    outputs = outputs_for(asked, dataset.layout)
    with monkeypatch.context() as patch:
        patch.setattr(tier, "GraphCapturer", Mock())
        compiled = tier.CompiledTier(device, None, None)
    run_to_end(compiled._run_chunks(work, graph, outputs, 0))
    x, y = x[start:stop], y[start:stop]
    expected = [np.sum((factor * x - y) ** 2) for factor in (1, 2)]
    np.testing.assert_allclose(outputs.losses[:, 0], expected, rtol=1e-12)
    if values:
        np.testing.assert_array_equal(outputs.values[:, 0], [x, 2 * x])
    assert len(launched) == launches


@pytest.mark.parametrize("arithmetic", Arithmetic)
def test_layouts_fit_a_multiprocessor(arithmetic):
    for names in (("add", "mul"), ("add", "exp")):
        codes = np.array([OPERATORS[name].code for name in names], dtype=np.uint8)
        layout = kernel_store.best_layout(arithmetic, codes)
        assert layout.threads in range(32, 1025, 32)
        assert layout.threads >= layout.group_size  # a thread stores at most one sum


def test_each_graph_is_lent_once_and_the_code_of_all_is_bounded():
    def graph(key, size=1):
        return SimpleNamespace(key=key, code_bytes=size)

    idle, first, second = IdleGraphs(), graph("a"), graph("a")
    for one in (first, second):
        idle.keep(one)
    assert {id(idle.take("a")), id(idle.take("a"))} == {id(first), id(second)}
    assert idle.take("a") is None
    for number in range(10):
        idle.keep(graph(number, kernel_store.MOST_BYTES // 4))
    assert list(idle) == [6, 7, 8, 9]
    idle.keep(graph("large", kernel_store.MOST_BYTES + 1))
    assert "large" not in idle
    for number in range(2 * kernel_store.MAX_GRAPHS):
        idle.keep(graph(f"small {number}"))
    assert len(idle) == kernel_store.MAX_GRAPHS


@pytest.fixture
def images(monkeypatch):
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
    with closing(kernel_store.KernelStore(device, cores=4)) as store:
        key = store.key(Arithmetic.FAST, output, programs)
        job = store.compile_queue.submit(key, partial(store._cubin, key), urgent=True)
        own = kernel_store.compile_kernel((90, Arithmetic.FAST, output, programs))
        assert job.result(120) == store.disk.get(key.text) == own


@pytest.fixture
def gate():
    return threading.Event()


@pytest.fixture
def store(images, gate, tmp_path, monkeypatch):
    """The programs and the text of a key are a number here, and so is the machine code."""

    def run(_, job):
        *_, text = job
        if text == "bad":
            raise ValueError("does not link")
        if text == "late":
            assert gate.wait(10)
        return int(3 if text == "late" else text).to_bytes(4, "little")

    monkeypatch.setattr(kernel_store.CompileProcess, "run", run)
    device = SimpleNamespace(cache_directory=tmp_path, architecture=90)
    store = kernel_store.KernelStore(device, cores=16)
    yield store
    store.close()


def keys(texts):
    return [kernel_store.KernelKey(None, None, text, text) for text in texts.split()]


def test_kernels_are_loaded_when_the_last_is_compiled(store, images, gate):
    wanted = keys("1 2 late 2")
    loaded = store.request(wanted)
    time.sleep(0.1)
    assert images == []
    assert store.find(wanted) is None
    gate.set()
    assert loaded.result(10).keys() == set(wanted)
    assert sorted(images) == [1, 2, 3]
    assert [kernel.function[0] for kernel in store.find(wanted)] == ["evaluate"] * 4
    assert store.request(wanted).result(10) == loaded.result()
    assert len(images) == 3


def test_a_failed_compilation_is_raised_and_logged(store, images, caplog):
    with pytest.raises(ValueError, match="does not link"):
        store.request(keys("1 bad")).result(10)
    assert "kernels were not loaded: does not link" in caplog.text
    assert images == []
    assert store.request(keys("1")).result(10)  # from disk


def test_kernels_that_are_evicted_stay_with_their_users(store, monkeypatch):
    monkeypatch.setattr(kernel_store, "MOST_KERNELS", 4)
    wanted = keys("1 2 3 4 5 6 7 8")
    assert len(store.request(wanted, urgent=True).result(10)) == 8
    counters = store.counters()
    assert counters["module_cache_entries"] == counters["module_cache_evictions"] == 4
    assert store.find(wanted[4:]) is not None
    assert store.find(wanted[:4]) is None


def test_closing_ends_pending_requests(store, gate):
    waiting = store.request(keys("late"))
    eventually(lambda: store.compile_queue._running)
    threading.Timer(0.1, gate.set).start()
    store.close()
    with pytest.raises(UnavailableError):
        waiting.result(0)


FAST = WorkKind(Arithmetic.FAST)
LARGE = 300 * 30 * 1_000_000


@pytest.fixture
def chooser():
    """A tier chooser for which compiled kernels launch more slowly and then run faster."""
    costs = {Tier.INTERPRETER: TierCost(20e-6, 6e12), Tier.COMPILED: TierCost(60e-6, 12e12)}
    return TierChooser(16, {(tier, Arithmetic.FAST): cost for tier, cost in costs.items()})


def test_compiles_once_when_the_savings_forgone_reach_the_price(chooser):
    saving = chooser.costs[Tier.INTERPRETER, FAST].seconds(LARGE)
    saving -= chooser.costs[Tier.COMPILED, FAST].seconds(LARGE)
    price = 300 * 0.012 / 16
    count = int(price / saving) + 5
    decisions = [chooser.choose("a", FAST, LARGE, 300, loaded=False) for _ in range(count)]
    turn = decisions.index(Decision.INTERPRET_AND_COMPILE)
    assert turn == pytest.approx(price / saving, abs=1.5)
    assert set(decisions[:turn]) == set(decisions[turn + 1 :]) == {Decision.INTERPRET}
    assert chooser.choose("a", FAST, LARGE, 300, loaded=True) is Decision.COMPILED


def test_costs_follow_observation(chooser):
    truth = TierCost(launch=1e-3, rate=5e12)
    for work in (LARGE, LARGE // 10_000) * 200:
        chooser.observe(Tier.COMPILED, FAST, work, truth.seconds(work))
    learnt = chooser.costs[Tier.COMPILED, FAST]
    assert (learnt.launch, learnt.rate) == pytest.approx((truth.launch, truth.rate), rel=0.02)


def test_a_tier_that_looked_slow_is_tried_again_after_a_while(chooser):
    usual, choices = chooser.costs[Tier.INTERPRETER, FAST].seconds(LARGE), []
    for _ in range(60):
        chooser.observe(Tier.COMPILED, FAST, LARGE, 20 * usual)
    for _ in range(3_000):
        chooser.observe(Tier.INTERPRETER, FAST, LARGE, usual)
        choices.append(chooser.choose("a", FAST, LARGE, 300, loaded=True))
    assert set(choices[:300]) == {Decision.INTERPRET}
    assert choices[-1] is Decision.COMPILED


ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)
OUTPUTS = (
    Output(loss="squares", rows=4),
    Output(values=True, rows=2, threads=512),
    Output(values=True, loss="absolute", weighted=True, rows=1, threads=1024),
)


def fitting(output: Output, arithmetic: Arithmetic) -> Output:
    """Output as far as the arithmetic allows: wide values take more registers."""
    word = arithmetic.dtype.itemsize
    most = {"rows": min(output.rows, 16 // word), "threads": min(output.threads, 4096 // word)}
    return replace(output, **most)


def lowered(*programs: Program, gradient: bool = False) -> Lowered:
    batch = Batch.of(programs, [np.ones(program.parameters) for program in programs])
    return lower_batch(batch, BY_PARAMETERS * gradient).part(0, len(programs))


def operator_program(operator: Operator) -> Program:
    """Apply an operator to variables, and once more to a variable and parameters."""
    over_rows = Program.apply(operator, *(Program.variable(i) for i in range(operator.arity)))
    leaves = [Program.variable(0), Program.parameter(0), Program.parameter(1)]
    return Program.apply("add", over_rows, Program.apply(operator, *leaves[: operator.arity]))


def shifted(operator: Operator) -> Program:
    """Operator over variables shifted by parameters of their own, and a power of the result."""
    variables, parameters = (
        [leaf(i) for i in range(operator.arity)] for leaf in (Program.variable, Program.parameter)
    )
    operands = map(partial(Program.apply, "add"), variables, parameters)
    square = Program.apply("pow", Program.apply(operator, *operands), Program.constant(2.0))
    return Program.apply("add", square, Program.apply(operator, *parameters[:1] * operator.arity))


@pytest.mark.parametrize(
    "number",
    [pytest.param(k, marks=[pytest.mark.thorough] * (k != 5)) for k in range(len(ARCHITECTURES))],
)
def test_every_operator_assembles(number: int) -> None:
    """Values and losses for each architecture, gradients of all arithmetics for every other one."""
    architecture, arithmetic = ARCHITECTURES[number], list(Arithmetic)[number % 3]
    works = [(fitting(OUTPUTS[number % 3], arithmetic), operator_program)]
    if number % 2:
        loss = ("squares", "absolute")[number // 2 % 2]
        output = Output(loss=loss, gradient=True, weighted=True, rows=1, threads=256)
        works.append((output, shifted))
    device_library = templates.build(arithmetic, architecture, derivatives=len(works) > 1)
    for output, program_of in works:
        programs = [program_of(operator) for operator in OPERATORS.values()]
        kernels = {
            f"group_{start}": lowered(*programs[start : start + 5], gradient=output.gradient)
            for start in range(0, len(programs), 5)
        }
        text = renderer.module(device_library, output, kernels)
        cubin = compiler.link(text, architecture, device_library.functions)
        assert all(name.encode() in cubin for name in kernels)


@pytest.mark.parametrize("arithmetic", [Arithmetic.PRECISE, Arithmetic.DOUBLE])
def test_precise_arithmetic_is_never_contracted(arithmetic: Arithmetic) -> None:
    library = templates.build(arithmetic, 90, derivatives=False)
    kernels, output = {"evaluate": lowered(parse("x1*x2 + x3"))}, Output(values=True, rows=1)
    text = renderer.module(library, fitting(output, arithmetic), kernels)
    found = {name for name in ("mul", "add", "fma") if f"{name}.rn.{arithmetic.type_name}" in text}
    assert found == {"mul", "add"}


@pytest.mark.parametrize(
    ("first", "second", "alike"),
    [("x1 + 2.5", "x1 + p4", True), ("p1 + p2", "p1 + p1", False), ("x1 ^ 2", "x1 ^ 2.5", False)],
)
def test_kernels_do_not_depend_on_numbers(first: str, second: str, alike: bool) -> None:
    left, right = (
        b"".join(array.tobytes() for array in lowered(parse("x1"), parse(text)))
        for text in (first, second)
    )
    assert (left == right) is alike


@pytest.mark.parametrize("loss", ["squares", "absolute"])
def test_kernels_compute_values_losses_and_gradients(loss: str) -> None:
    """Against float64 derivatives, in the fast arithmetic of an emulated device."""
    programs, vectors = smooth_programs()
    data = make_dataset(50, weights=True)
    columns, target, weights = data.matrix.astype(float), data.target, data.weights
    output = Output(values=True, loss=loss, gradient=True, weighted=True, rows=1)
    library = templates.build(Arithmetic.FAST, 90, derivatives=True)
    for program, vector in zip(programs, vectors, strict=True):
        batch = Batch.of([program], [vector])
        found = lower_batch(batch, BY_PARAMETERS)
        inputs = kernel_store.KernelInputs.of(found, batch)
        numbers = np.zeros((1, inputs.starts[-1]), np.float32)
        inputs.fill(batch, numbers)
        text = renderer.module(library, output, {"evaluate": found.part(0, 1)})
        assert compiler.link(text, 90, library.functions)
        read = np.unique(program.values[program.codes == VARIABLE]).astype(int)
        given = [columns[index].astype(np.float32) for index in read]
        given += [target.astype(np.float32), weights.astype(np.float32)]
        sums, (stored,) = run_kernel(text, numbers[0], given)
        values, slopes = differentiate(program, columns, vector)
        np.testing.assert_allclose(stored, values, rtol=1e-5, atol=1e-5)
        deviation = values - target
        factor = deviation if loss == "squares" else np.sign(deviation)
        want = [(weights * deviation * factor).sum(), *(slopes * factor * weights).sum(axis=-1)]
        present = [0, *(1 + np.unique(found.entries["leaf"]))]
        np.testing.assert_allclose(sums, np.array(want)[present], rtol=1e-4, atol=1e-4)
        assert not np.delete(want, present).any()


def test_addresses_are_those_of_memory_that_lives(monkeypatch) -> None:
    """Compiled code reads where its arguments lie; other threads would take memory that is free."""
    blocks = []

    def remembered(arrays):
        block = argument_block(arrays)
        blocks.append(weakref.ref(block))
        return block

    def looked_at(address, index):
        assert blocks[-1]() is not None
        return differentiate_chunk(address, index)

    monkeypatch.setattr(differentiating, "argument_block", remembered)
    monkeypatch.setattr(differentiating, "differentiate_chunk", looked_at)
    assert lower_batch(Batch.of([parse("x1 + 1")]), 0).headers["end"] > 0


def test_kernels_get_blocks_by_their_work():
    plan = SimpleNamespace(shares=np.array([0.001, 0.4, 0.599]))
    blocks = partial(kernel_store.KernelPlan.blocks, plan, total=100)
    assert blocks(vectors=1, most=1000) == (1, 40, 60)
    assert blocks(vectors=10, most=5) == (1, 4, 5)
    assert blocks(vectors=1000, most=5) == (1, 1, 1)
