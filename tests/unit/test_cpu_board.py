"""The board's own functions, uncompiled, with threads in thousands of orders.

Each access to a word of the board is a step after which any thread may go on. Memory is one for
all threads here: that fences are where they must be is not shown.
"""

from __future__ import annotations

import random
from collections import Counter
from types import FunctionType, SimpleNamespace

import numpy as np
import pytest

from support.schedules import Schedule, StuckError
from warpfit_server.engine import cpu_board
from warpfit_server.engine.cpu_pieces import CANCELLED, FAILED, FINISHED

PLACES = [cpu_board.HEAD_WORDS + cpu_board.PLACE_WORDS * number for number in range(3)]
#: Where words of tenants' charges and bytes of finished pieces begin; the board begins at 0.
CHARGES, DONE = 1 << 20, 1 << 24
FOR_EVER = 1 << 60
#: On which pieces sleep that last until others have ended.
PATIENCE = -1


class Words:
    """The board's words; each access is a step."""

    ctypes = SimpleNamespace(data=0)

    def __init__(self, schedule):
        self.schedule = schedule
        self.values = [0] * (cpu_board.HEAD_WORDS + cpu_board.PLACE_WORDS * len(PLACES))

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        self.schedule.step()
        return self.values[index]

    def __setitem__(self, index, value):
        self.schedule.step()
        self.values[index] = int(value)


class Board:
    """Evaluations, and the threads that work on them, in one order.

    Args:
        seed: decides on the order.
        threads: that compute.
        ends: what pieces return, by number of the evaluation and of the piece.
        patient: evaluations whose pieces last until the others have ended.
        replaced: functions of the board's module to replace, by name.
        steps: accesses within which the order changes.

    """

    def __init__(self, seed, threads, ends=None, patient=(), replaced=None, steps=1500):
        self.random = random.Random(seed)
        self.schedule = Schedule(seed, changes=4, steps=steps)
        self.words = Words(self.schedule)
        self.threads = threads
        self.ends = ends or {}
        self.patient = set(patient)
        self.charges = [0] * 32
        self.done: dict[int, list[int]] = {}
        self.at_work: Counter[int] = Counter()
        self.most = 0
        self.closed: set[int] = set()
        self.taken: Counter[tuple[int, int]] = Counter()
        self.clock = 0
        self.functions = dict(vars(cpu_board))
        for name, value in vars(cpu_board).items():
            function = getattr(value, "py_func", value)
            if isinstance(function, FunctionType) and function.__module__ == cpu_board.__name__:
                self.functions[name] = FunctionType(
                    function.__code__, self.functions, name, function.__defaults__
                )
        own = ("add_atomically", "call_4", "call_5", "carray", "nanoseconds", "run_piece")
        self.functions |= {name: getattr(self, name) for name in own}
        self.functions |= dict.fromkeys(("pointer_to_words", "pointer_to_bytes"), lambda at: at)
        self.functions["fence"] = lambda: None
        for name, replacement in (replaced or {}).items():
            self.functions[name] = replacement(self.functions)

    # -------------------------------------------------------- what compiled code is linked with

    def add_atomically(self, address, number):
        self.schedule.step()
        values, index = self.words.values, int(address) // 8
        if address >= CHARGES:
            values, index = self.charges, (int(address) - CHARGES) // 8
        before = values[index]
        values[index] += int(number)
        return before

    def call_4(self, function, given):
        _, address, operation, count = given
        assert operation == cpu_board._WAKE_PRIVATE
        self.schedule.step()
        self.schedule.wake(address // 8, count)

    def call_5(self, function, given):
        _, address, operation, seen, _ = given
        assert operation == cpu_board._WAIT_PRIVATE
        self.schedule.step()
        if self.words.values[address // 8] == seen:
            self.schedule.sleep(address // 8)

    def carray(self, address, size):
        if address >= DONE:
            return self.done[address - DONE]
        begin = (address - CHARGES) // 8
        self.schedule.step()
        return self.charges[begin : begin + size]

    def nanoseconds(self, clock):
        self.clock += 1_000_000
        return self.clock

    def run_piece(self, function, evaluation, piece):
        assert evaluation not in self.closed, "who brought it has gone on"
        self.taken[evaluation, piece] += 1
        self.at_work[evaluation] += 1
        self.most = max(self.most, sum(self.at_work.values()))
        self.schedule.step()
        while evaluation in self.patient and not self.done.keys() <= self.closed | self.patient:
            self.schedule.sleep(PATIENCE)
        self.at_work[evaluation] -= 1
        return self.ends.get((evaluation, piece), FINISHED)

    # ------------------------------------------------------------------------------ threads

    def evaluate(self, place, evaluation, pieces, wanted, tenant=0, limit=FOR_EVER):
        """Bring an evaluation, as `cpu_helpers.Helpers` does; return how it ended."""
        words, lead = self.words, self.functions["lead"]
        self.done[evaluation] = [0] * pieces
        entries = [0] * (cpu_board.NEXT + 1)
        entries[cpu_board.RECORD] = evaluation
        entries[cpu_board.PIECES] = pieces
        entries[cpu_board.CHARGE] = CHARGES + 16 * tenant
        entries[cpu_board.DONE] = DONE + evaluation
        for offset in self.random.sample(range(len(entries)), len(entries)):  # as memcpy may
            words[place + offset] = entries[offset]
        words[place + cpu_board.WANTED] = min(self.threads, pieces, wanted)
        lead(words, place, limit)
        if words[place + cpu_board.OPEN]:
            self.functions["withdraw"](words, place)
        assert self.at_work[evaluation] == 0
        self.closed.add(evaluation)
        self.schedule.wake(PATIENCE, 100)
        return words[place + cpu_board.ENDED]

    def run(self, *leaders):
        """Run who brings evaluations, and threads that compute until they all have gone."""
        left = len(leaders)

        def lead(leader):
            nonlocal left
            leader()
            left -= 1
            if not left:
                self.functions["close"](self.words)

        def compute():
            self.functions["compute"](self.words)

        self.schedule.run(
            *((lambda leader=leader: lead(leader)) for leader in leaders),
            *[compute] * self.threads,
        )
        values = self.words.values
        assert self.most <= self.threads + len(leaders)
        assert not any(values[place + cpu_board.OPEN] for place in PLACES)
        assert not any(values[place + cpu_board.INSIDE] for place in PLACES)
        assert values[cpu_board._ASLEEP] == 0


def random_run(seed, replaced=None):
    """Two or three who bring evaluations to places of their own, one after the other."""
    rng = random.Random(seed)
    board = Board(seed, rng.choice([1, 2, 3]), replaced=replaced)
    expected = {}

    def bring(place, orders):
        for order in orders:
            assert board.evaluate(place, *order) == FINISHED

    leaders = []
    for place in PLACES[: rng.choice([1, 2, 3])]:
        orders = []
        for _ in range(rng.choice([1, 2, 3])):
            number, pieces = len(expected), rng.choice([1, 2, 5])
            expected[number] = pieces
            orders.append((number, pieces, rng.choice([1, 2, 3]), rng.randrange(2)))
        leaders.append(lambda place=place, orders=orders: bring(place, orders))
    board.run(*leaders)
    assert board.taken == {(n, k): 1 for n, pieces in expected.items() for k in range(pieces)}
    assert all(all(flags) for flags in board.done.values())


def late_run(seed, replaced=None):
    """A place is used again while a thread that has chosen it before may still come."""
    board = Board(seed, 1, replaced=replaced, steps=150)
    board.run(lambda: [board.evaluate(PLACES[0], number, 2, 1) for number in range(2)])
    assert board.taken == dict.fromkeys([(0, 0), (0, 1), (1, 0), (1, 1)], 1)


@pytest.mark.parametrize("part", range(5))
def test_each_piece_is_run_once_and_nobody_sleeps_too_long(part):
    for seed in range(400 * part, 400 * (part + 1)):
        random_run(seed)
        late_run(seed)


def test_nothing_waits_while_a_thread_sleeps_that_could_do_it():
    """Pieces that last for ever keep all threads but one, and that one does everything else."""
    for seed in range(1000):
        threads = random.Random(seed).choice([2, 3])
        board = Board(seed, threads, patient=[0], steps=600)
        board.run(
            lambda board=board, wanted=threads - 1: board.evaluate(PLACES[0], 0, 3, wanted),
            lambda board=board: [board.evaluate(PLACES[1], n, 3, n, 1) for n in (1, 2, 3)],
        )
        assert board.taken == {(n, piece): 1 for n in range(4) for piece in range(3)}


@pytest.mark.parametrize("end", [CANCELLED, FAILED])
def test_what_ends_early_ends_once_and_for_all(end):
    for seed in range(200):
        rng = random.Random(seed)
        board = Board(seed, rng.choice([1, 2, 3]), ends={(0, 1): end})
        found = []
        board.run(
            lambda board=board, found=found: found.append(board.evaluate(PLACES[0], 0, 5, 3)),
            lambda board=board: board.evaluate(PLACES[1], 1, 3, 3),
        )
        assert found == [end]
        assert all(board.taken[1, piece] == 1 for piece in range(3)), "the other one goes on"
        assert all(times == 1 for times in board.taken.values())


def test_nothing_begins_after_a_withdrawal():
    withdrawn = 0
    for seed in range(300):
        rng = random.Random(seed)
        board = Board(seed, rng.choice([1, 2, 3]))
        limit = rng.choice([0, 3, 10]) * 1_000_000
        board.run(
            lambda board=board, limit=limit: [
                board.evaluate(PLACES[0], number, 5, 2, limit=limit) for number in (0, 1)
            ],
            lambda board=board: board.evaluate(PLACES[1], 2, 5, 2),
        )
        assert all(times == 1 for times in board.taken.values())
        withdrawn += sum(board.taken.values()) < 15
    assert withdrawn > 10, "or nothing was withdrawn"


def _without_waking_in_its_stead(functions):
    wake = functions["_wake"]

    def replaced(board, count):
        return wake(board, 0 if count == 1 else count)

    return replaced


def _looks_after_it_worked(functions):
    def compute(board):
        while board[cpu_board._CLOSED] == 0:
            functions["_work"](board)
            seen = board[cpu_board._CHANGES]
            functions["_add"](board, cpu_board._ASLEEP, 1)
            functions["_sleep"](board, cpu_board._CHANGES, seen, 0)
            functions["_add"](board, cpu_board._ASLEEP, -1)

    return compute


def _leaves_before_it_is_done(functions):
    def close(board, place):
        board[place + cpu_board.OPEN] = 0

    return close


def _leaves_without_a_word(functions):
    def leave(board, place):
        if place != cpu_board._NOWHERE:
            functions["_add"](board, place + cpu_board.INSIDE, -1)

    return leave


def _adds_in_two_steps(functions):
    def add(board, word, number):
        before = board[word]
        board[word] = before + number
        return before

    return add


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("_wake", _without_waking_in_its_stead),
        ("compute", _looks_after_it_worked),
        ("_close", _leaves_before_it_is_done),
        ("_leave", _leaves_without_a_word),
        ("_add", _adds_in_two_steps),
    ],
)
def test_a_planted_mistake_is_found(name, mistake):
    with pytest.raises(AssertionError):
        for seed in range(3000):
            random_run(seed, {name: mistake})


def test_a_schedule_tells_who_is_stuck():
    schedule = Schedule(1, changes=1)
    with pytest.raises(StuckError, match="everybody sleeps"):
        schedule.run(lambda: schedule.sleep(1), lambda: schedule.sleep(2))

    def for_ever():
        while True:
            schedule.step()

    schedule = Schedule(1, changes=1)
    schedule.LIMIT = 1000
    with pytest.raises(StuckError, match="no end"):
        schedule.run(for_ever, for_ever)


def test_the_board_of_this_test_is_laid_out_like_the_real_one():
    assert len(cpu_board.new_board(len(PLACES))) == len(Words(None).values)
    assert np.all(np.diff(PLACES) == cpu_board.PLACE_WORDS)
