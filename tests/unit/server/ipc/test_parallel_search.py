"""Searches of several engines as one: fronts, ends, lost engines."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from warpfit.errors import FailedPreconditionError, UnavailableError
from warpfit.ir import Batch
from warpfit.ops import VARIABLE
from warpfit.parse import parse
from warpfit.request import Timings
from warpfit.searching import (
    Form,
    Front,
    SearchProgress,
    SearchReason,
    SearchRequest,
    Template,
)
from warpfit_server.ipc import messages
from warpfit_server.ipc.router import ParallelSearch, merged, seeded

#: Formulas with their numbers of parameters.
FORMULAS = (("p1*x1+p2", 2), ("p1*sin(p2*x1)+p3", 3), ("p1*x1*exp(x2)+p2", 2))


def front(losses: dict[int, float]) -> Front:
    """Return a front of formulas of these sizes, all parameters of which are their size."""
    chosen = FORMULAS[: len(losses)]
    programs = [parse(text, ("x1", "x2")) for text, _ in chosen]
    vectors = [np.full(count, float(size)) for (_, count), size in zip(chosen, losses, strict=True)]
    sizes, numbers = np.array([*losses], np.int64), np.array([*losses.values()])
    return Front(Batch.of(programs, vectors), sizes, numbers)


class Part:
    """A request whose replies are known; None stands for one that has not come yet."""

    def __init__(self, *replies: object) -> None:
        self.waiting, self.number, self.device = deque(replies), 7, f"cpu:{id(self)}"
        self.replies = SimpleNamespace(receive_now=lambda: None)
        self.queue = SimpleNamespace(empty=lambda: not self.waiting or self.waiting[0] is None)
        self.timings = None
        self.is_cancelled = self.is_closed = False

    def next_reply(self):
        while (reply := self.waiting.popleft()) is None:
            pass
        if isinstance(reply, Exception):
            raise reply
        if isinstance(reply, messages.RequestFinished):
            self.timings = Timings(compute=5)
        return reply

    def cancel(self) -> None:
        self.is_cancelled = True

    def close(self) -> None:
        self.is_closed = True


def told(losses: dict[int, float], formulas: int, reason=None):
    progress = SearchProgress(front(losses), seconds=formulas / 100, formulas=formulas)
    return messages.SearchProgressed(7, replace(progress, reason=reason))


END = messages.RequestFinished(7)
LOST = UnavailableError("the engine is restarting", "ENGINE_RESTARTING", "Wait")


def test_the_best_formula_of_each_size_is_kept():
    both = merged(
        [front({1: 5.0, 3: 2.0, 9: 1.0}), front({1: 4.0, 3: 3.0, 7: 1.0})], is_score=False
    )
    assert both.sizes.tolist() == [1, 3, 7]
    assert both.losses.tolist() == [4.0, 2.0, 1.0]
    for place, size in enumerate(both.sizes.tolist()):
        assert both.batch.program_parameters(place)[0][0] == size
        assert both.batch.program(place).variables > 0
    scores = merged([front({1: 0.2, 3: 0.8}), front({1: 0.5, 5: 0.9})], is_score=True)
    assert scores.losses.tolist() == [0.5, 0.8, 0.9]
    unknown = merged([front({1: np.nan, 3: 2.0}), front({1: np.nan})], is_score=False)
    np.testing.assert_array_equal(unknown.losses, [np.nan, 2.0])
    alone, empty = front({1: 5.0}), Front(Batch.of([parse("x1", ("x1",))])[:0], *np.empty((2, 0)))
    assert merged([empty, alone], is_score=False) is alone
    assert len(merged([empty, empty], is_score=False).sizes) == 0


def test_progress_is_that_of_all_and_the_search_ends_when_all_have():
    parts = (
        Part(told({1: 5.0}, 10), None, told({1: 4.0}, 20, SearchReason.TIME), END),
        Part(told({3: 1.0}, 7), told({3: 0.5}, 9, SearchReason.TIME), END),
    )
    search = ParallelSearch(parts, is_score=False)
    one = search.next_reply().progress
    assert (one.formulas, one.reason, one.front.sizes.tolist()) == (19, None, [1, 3])
    last = search.next_reply().progress
    while last.reason is None:
        last = search.next_reply().progress
    assert (last.formulas, last.reason) == (29, SearchReason.TIME)
    assert last.front.losses.tolist() == [4.0, 0.5]
    assert isinstance(search.next_reply(), messages.RequestFinished)
    assert search.timings.compute == 5
    search.close()
    assert all(part.is_closed for part in parts)


def test_one_that_meets_the_target_ends_all():
    slow = Part(told({1: 5.0}, 10), *[told({1: 5.0}, 10 + n) for n in range(50)])
    quick = Part(told({3: 1e-9}, 7, SearchReason.TARGET_LOSS), END)
    search = ParallelSearch([slow, quick], is_score=False)
    seen = []
    while not isinstance(reply := search.next_reply(), messages.RequestFinished):
        seen.append(reply.progress)
    assert seen[-1].reason is SearchReason.TARGET_LOSS
    assert seen[-1].front.losses.tolist() == [5.0, 1e-9]
    assert slow.is_cancelled
    assert not quick.is_cancelled
    assert len(slow.waiting) > 40


@pytest.mark.parametrize("has_reported", [True, False])
def test_one_that_has_begun_late_is_not_waited_for(has_reported):
    late = Part(*[told({1: 5.0 - n}, 10 + n) for n in range(4) if has_reported or n])
    late.waiting.extend([None, told({1: 0.1}, 800, SearchReason.TIME), END])
    own = Part(told({3: 1.0}, 700), told({3: 0.5}, 800, SearchReason.TIME), END)
    search = ParallelSearch([own, late] if not has_reported else [late, own], is_score=False)
    if not has_reported:
        late.waiting.appendleft(None)
    while (last := search.next_reply()).progress.reason is None:
        pass
    assert last.progress.reason is SearchReason.TIME
    assert 0.1 not in last.progress.front.losses
    assert 0.5 in last.progress.front.losses
    assert (late.is_cancelled, own.is_cancelled) == (True, False)


@pytest.mark.parametrize("is_first", [True, False])
def test_the_others_go_on_without_an_engine_that_is_lost(is_first):
    lost = Part(told({1: 2.0}, 10), LOST)
    other = Part(told({3: 1.0}, 7), told({3: 0.5}, 9, SearchReason.TIME), END)
    search = ParallelSearch([lost, other] if is_first else [other, lost], is_score=False)
    while (last := search.next_reply()).progress.reason is None:
        pass
    assert last.progress.front.losses.tolist() == [2.0, 0.5]
    assert last.progress.formulas == 19


def test_all_lost_and_wrong_requests_are_errors():
    with pytest.raises(UnavailableError):
        ParallelSearch([Part(LOST), Part(LOST)], is_score=False).next_reply()
    half = ParallelSearch([Part(told({1: 2.0}, 1), LOST), Part(LOST)], is_score=False)
    with pytest.raises(UnavailableError):
        while True:
            half.next_reply()
    wrong = FailedPreconditionError("no", "NO", "no")
    with pytest.raises(FailedPreconditionError):
        ParallelSearch([Part(told({1: 2.0}, 1)), Part(wrong)], is_score=False).next_reply()


def test_each_engine_has_a_seed_of_its_own_where_no_seed_has_to_repeat():
    request = SearchRequest(b"0" * 32, max_seconds=1.0, seed=2**64 - 1)
    several = seeded(request, 4)
    assert several[0].seed == request.seed
    assert len({one.seed for one in several}) == 4
    assert all(0 <= one.seed < 2**64 for one in several)
    template = Template(np.array([VARIABLE], np.uint8), np.zeros(1), (1,), 0)
    for alone in (
        {"max_generations": 9}, {"max_formulas": 9}, {"idle_generations": 9},
        {"template": template}, {"definitions": {"f": parse("a", ("a",))}},
    ):  # fmt: skip
        assert len(seeded(replace(request, form=Form.PLAIN, **alone), 4)) == 1
