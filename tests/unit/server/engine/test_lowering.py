"""Lowering of programs, alone and with derivatives, and the cache of what was lowered."""

import gc
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import xxhash

from support.random_programs import thesis_mix
from warpfit.ir import Batch, Program
from warpfit.losses import DIFFERENCE
from warpfit.ops import OPERATORS
from warpfit.parse import parse
from warpfit_server.engine import autodiff, lowering
from warpfit_server.engine.cpu.derivatives import differentiation_work
from warpfit_server.engine.cpu.interpreter import lowering_work
from warpfit_server.engine.interface import run_to_end
from warpfit_server.engine.lowering import Lowered, LoweringCache, lower_chunk
from warpfit_server.engine.native.intrinsics import ParallelLoop
from warpfit_server.engine.native.numba_cache import address_of, load_chunk_function

X1, X2, P1 = Program.variable(0), Program.variable(1), Program.parameter(0)


@pytest.fixture(scope="module")
def lower():
    for function in (lower_chunk, autodiff.differentiate_chunk):
        load_chunk_function(function)
    row_loss = autodiff.row_loss_tokens(DIFFERENCE, 10, weighted=False)
    requested = (
        autodiff.BY_PARAMETERS | autodiff.BY_VARIABLES | autodiff.LOSS | autodiff.LOSS_DERIVATIVE
    )

    def run(batch: Batch, *, differentiated: bool = False, threads: int = 1) -> Lowered:
        flag = np.zeros(1, np.uint8)
        if differentiated:
            given = (address_of(autodiff.differentiate_chunk), batch, row_loss, requested, flag)
            work, lowered = differentiation_work(*given)
        else:
            work, lowered = lowering_work(address_of(lower_chunk), batch, flag)
        loop = ParallelLoop(threads)
        helpers = work.helpers(0, work.chunks)
        loop.begin(work.function, work.block, 0, work.chunks, helpers).result()
        loop.close()
        return lowered

    return run


def test_common_subexpressions_and_invariants_are_computed_once(lower):
    shared = Program.apply("exp", Program.apply("mul", X1, X2))
    invariant = Program.apply("sqrt", Program.apply("add", P1, Program.constant(2.0)))
    program = Program.apply("add", Program.apply("mul", shared, invariant), shared)
    header = lower(Batch.of([program], [[1.0]])).headers[0]
    assert header["prologue_end"] == 2
    assert header["end"] - header["prologue_end"] == 4


def test_the_operand_that_needs_more_slots_is_computed_first(lower):
    deep = Program.apply("exp", X1)
    for _ in range(30):
        deep = Program.apply("mul", Program.apply("exp", X2), Program.apply("log", deep))
    assert lower(Batch.of([deep])).headers["slots"][0] <= 2


def part_of(found: Lowered, program: int, *, differentiated: bool) -> list[object]:
    header = found.headers[program]
    ranges = [(found.loads, "first_load", "loads")]
    names = ["invariants", "slots", "loads"]
    if differentiated:
        ranges.append((found.columns, "first_column", "columns"))
        ranges.append((found.entries, "first_entry", "entries"))
        names += ["columns", "entries", "loss", "loss_derivative"]
    parts = [array[header[first] :][: header[count]] for array, first, count in ranges]
    instructions = found.instructions[header["start"] : header["end"]]
    prologue = header["prologue_end"] - header["start"]
    return [instructions, prologue, *parts, *(header[name] for name in names)]


@pytest.mark.parametrize("differentiated", [False, True])
def test_threads_lower_each_program_as_if_it_were_alone(lower, differentiated):
    programs, parameters = thesis_mix(5, 400)
    together = lower(Batch.of(programs, parameters), differentiated=differentiated, threads=4)
    for number, (program, vector) in enumerate(zip(programs, parameters, strict=True)):
        alone = lower(Batch.of([program], [vector]), differentiated=differentiated)
        ours, own = (
            part_of(found, index, differentiated=differentiated)
            for found, index in ((together, number), (alone, 0))
        )
        for one, other in zip(ours, own, strict=True):
            np.testing.assert_array_equal(one, other)
    if differentiated:
        used = np.sort(together.headers[["start", "end"]])
        assert used["start"].tolist() == [0, *used["end"][:-1]], "nothing lies between them"


def of(*texts):
    programs = [parse(text) for text in texts]
    return Batch.of(programs, [np.ones(program.parameters) for program in programs])


def content(batch):
    return batch.codes.sum(), batch.values.tobytes()


class Cache(LoweringCache):
    def __init__(self):
        super().__init__()
        self.made = []

    def make(self, batch):
        self.made.append(batch)
        yield None
        return content(batch)

    def ask(self, batch, needs=(), *, whole=False):
        """Return what there is of a batch, by its programs, or by itself as of a fit."""
        found = (self.by_batch if whole else self.by_programs)(batch, needs, self.make)
        return run_to_end(found)


def test_programs_are_cached_from_the_second_time_on():
    cache, batch = Cache(), of("x1 + p1")
    for number in range(5):
        again = replace(batch, parameters=np.array([float(number)]))
        assert cache.ask(again) == content(batch)
    first, second = cache.made
    assert len(first.parameters) == 1
    assert len(second.parameters) == 0, "a copy without parameters"
    assert len(cache) == 1


def test_cached_programs_do_not_change_with_the_memory_that_they_arrived_in():
    cache, memory = Cache(), of("x1 * 2.0").copy()
    for constant in (2.0, 2.0, 3.0, 2.0, 3.0, 2.0):
        memory.values[memory.values > 1] = constant
        assert np.frombuffer(cache.ask(replace(memory))[1]).max() == constant


@pytest.mark.parametrize(
    "other",
    [of("x1*2.0"), *(of(text, "x2") for text in ("x1*3.0", "x1 + 2.0", "x1*p1", "x1*-0.0"))],
)
def test_programs_with_the_same_hash_are_not_mixed_up(monkeypatch, other):
    same = SimpleNamespace(update=lambda _: None, intdigest=lambda: 14)
    monkeypatch.setattr(xxhash, "xxh3_64", lambda *_, **__: same)
    cache = Cache()
    for one in (of("x1 * 2.0", "x2"), other, of("x1 * 0.0", "x2")) * 3:
        assert cache.ask(one) == content(one)


def test_a_batch_is_cached_from_the_first_time_on_for_each_need_and_forgotten_with_it():
    """A fit's batches never come again, and what an engine makes of them is large."""
    cache, batch = Cache(), of("x1 + p1")
    for need in ("a", "b") * 3:
        cache.ask(batch, (need,), whole=True)
    assert len(cache.made) == len(cache) == 2
    cache.ask(of("x1 + p1"), ("a",), whole=True)
    assert len(cache.made) == 3
    cache.made.clear()
    del batch
    gc.collect()
    assert len(cache) == 0
    kept = of("x1")
    for need in ("a", "b") * 3:
        cache.ask(kept, (need,))
    assert len(cache.made) == 4


def test_the_cache_is_limited_by_the_tokens_of_its_batches(monkeypatch):
    monkeypatch.setattr(lowering, "_MOST_TOKENS", 1000)
    monkeypatch.setattr(lowering, "_LEAST_TOKENS", 1)
    cache, large = Cache(), Batch.of(*thesis_mix(1, 100))
    batches = [Batch.of(*thesis_mix(seed, 10)) for seed in range(20)]
    for batch in batches:
        cache.ask(batch, whole=True)
    assert 0 < sum(tokens for tokens, *_ in cache._kept.values()) <= 1000
    for _ in range(3):
        assert cache.ask(large) == content(large)
    assert len(large.codes) not in [tokens for tokens, *_ in cache._kept.values()]


@pytest.mark.parametrize(
    ("exponent", "names"),
    [
        *((-2.0, "inv square"), (-1.0, "inv"), (1.0, ""), (2.0, "square"), (3.0, "cube")),
        *((4.0, "square square"), (5.0, "pow"), (0.5, "pow")),
    ],
)
def test_powers_with_small_whole_exponents_are_products(lower, exponent, names):
    found = lower(Batch.of([parse(f"exp(x1) ^ {exponent}")]))
    codes = found.instructions["code"][: found.headers[0]["end"]].tolist()
    assert codes == [OPERATORS[name].code for name in ["exp", *names.split()]]
