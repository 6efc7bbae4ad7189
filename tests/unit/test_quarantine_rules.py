"""Who is to blame for the end of an engine, and how suspects are run alone."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from support.lanes import DATA, an_evaluation, engine_ends
from warpfit.errors import FailedPreconditionError, UnavailableError
from warpfit.losses import huber
from warpfit.request import Loss
from warpfit_server import channel as wire
from warpfit_server.engine.isolation import Isolation
from warpfit_server.lanes import Lanes
from warpfit_server.quarantine import Casualty, Quarantine, Survivor, digest
from warpfit_server.segments import SegmentPool

D, E = b"data set", b"another one"


class Engines:
    """Engines that die one after the other, and the quarantine that hears of it."""

    def __init__(self):
        self.now = 0.0
        self.quarantine = Quarantine(lambda: self.now)
        self.number = 0

    def die(self, *batches, alone=(), blamed=True, loading=None, at_start=False, dataset=D):
        """End with some batches under way, those in ``alone`` as all that ran."""
        self.number += 1
        for batch in batches:
            self.quarantine.report(Casualty(self.number, dataset, batch, batch in alone))
        self.quarantine.engine_died(
            self.number, is_blamed=blamed, loading=loading, at_start=at_start
        )

    def seconds(self, batch, dataset=E):
        return self.quarantine.suspects.check(dataset, lambda: batch)

    def refuses(self, batch, dataset=E):
        try:
            self.seconds(batch, dataset)
        except FailedPreconditionError as error:
            return error.reason
        return None


@pytest.fixture
def engines():
    return Engines()


class TestVerdicts:
    def test_without_crashes_nothing_is_looked_at(self, engines):
        assert engines.quarantine.suspects.check(D, lambda: pytest.fail("computed")) == 0.0

    def test_a_batch_that_kills_twice_is_refused_and_one_beside_it_never(self, engines):
        engines.die(b"killer", b"innocent")
        assert engines.seconds(b"killer") == engines.seconds(b"innocent") == 2.0
        engines.die(b"killer", alone=[b"killer"])
        assert engines.refuses(b"killer") == "BATCH_QUARANTINED"
        assert engines.refuses(b"innocent") is None
        engines.quarantine.report(Survivor(D, b"innocent"))
        assert engines.seconds(b"innocent") == 0.0

    def test_an_innocent_batch_beside_one_killer_after_the_other(self, engines):
        for number in range(20):
            engines.die(b"innocent", b"killer %d" % number)
            assert engines.refuses(b"innocent") is None

    def test_one_crash_is_not_enough(self, engines):
        engines.die(b"killer", alone=[b"killer"])
        assert engines.refuses(b"killer") is None

    def test_slow_killers_run_alone_for_longer_each_time(self, engines):
        seconds = []
        for _ in range(5):
            engines.die(b"slow")
            seconds.append(engines.seconds(b"slow"))
        assert seconds == [2.0, 8.0, 32.0, 120.0, 120.0]

    def test_an_end_that_is_not_the_works_doing_accuses_nobody(self, engines):
        for _ in range(3):
            engines.die(b"innocent", alone=[b"innocent"], blamed=False)
        assert engines.seconds(b"innocent", D) == 0.0

    def test_reports_that_come_after_the_end_count_and_old_ones_do_not(self, engines):
        engines.die()
        engines.quarantine.report(Casualty(1, D, b"late", alone=False))
        assert engines.seconds(b"late") == 2.0
        engines.quarantine.report(Casualty(2, D, b"lost long before", alone=False))
        engines.now += 6.0
        engines.quarantine.engine_died(2, is_blamed=True, loading=None, at_start=False)
        assert engines.seconds(b"lost long before") == 0.0

    def test_a_data_set_that_kills_as_it_is_loaded(self, engines):
        engines.die(b"innocent", loading=D, dataset=E)
        assert engines.refuses(b"x", D) is None
        engines.die(b"on its way", loading=D, at_start=True, dataset=E)
        assert engines.refuses(b"x", D) == "DATASET_QUARANTINED"
        assert engines.seconds(b"on its way") == 2.0  # of the first crash, its data set
        with pytest.raises(FailedPreconditionError):
            engines.quarantine.suspects.check_dataset(D)

    def test_a_data_set_of_which_all_batches_kill(self, engines):
        engines.die(b"one", b"innocent")
        assert engines.seconds(b"fresh", D) == 2.0  # batches on it run alone, too
        engines.die(b"two", alone=[b"two"])
        assert engines.refuses(b"fresh", D) is None
        engines.die(b"three", alone=[b"three"])
        assert engines.refuses(b"fresh", D) == "DATASET_QUARANTINED"

    def test_one_batch_that_kills_does_not_take_its_data_set_along(self, engines):
        for _ in range(4):
            engines.die(b"killer", alone=[b"killer"])
        assert engines.refuses(b"fresh", D) is None
        engines.quarantine.report(Survivor(D, b"fresh"))
        assert engines.seconds(b"fresh", D) == 0.0
        assert engines.refuses(b"killer", D) == "BATCH_QUARANTINED"

    def test_it_forgets(self, engines):
        engines.die(b"killer", b"suspect")
        engines.die(b"killer", alone=[b"killer"])
        engines.now += 601.0
        engines.quarantine.expire()
        assert engines.seconds(b"suspect") == 0.0
        assert engines.refuses(b"killer") == "BATCH_QUARANTINED"
        engines.now += 3000.0
        engines.quarantine.expire()
        assert engines.refuses(b"killer") is None

    def test_its_memory_is_bounded(self, engines):
        for number in range(1000):
            engines.die(b"%d" % number)
            engines.quarantine.report(Casualty(9999, D, b"%d" % number, alone=False))
        known = engines.quarantine.current
        assert len(known.suspects) <= 256
        assert len(engines.quarantine._waiting) <= 256
        assert len(wire.packed(known)) < wire.PACKET_BYTES // 4

    def test_other_processes_hear_of_changes_in_their_order(self, engines):
        told = []
        engines.quarantine.on_change = told.append
        engines.die(b"killer")
        engines.die(b"killer", alone=[b"killer"])
        engines.quarantine.expire()
        assert [known.version for known in told] == [1, 2]
        other = Quarantine().suspects
        for known in reversed(told):
            other.update(known)
        with pytest.raises(FailedPreconditionError, match="died of this batch"):
            other.check(E, lambda: b"killer")


def test_all_that_is_asked_for_is_in_the_digest():
    asked = an_evaluation(loss=Loss.MSE)
    batch = asked.batch
    others = [
        replace(asked, rows=(0, 5)),
        replace(asked, loss=Loss.MAE),
        replace(asked, loss=None, custom_loss=huber()),
        replace(asked, gradient=True),
        replace(asked, dataset_id=bytes(32)),
        replace(asked, batch=replace(batch, parameters=batch.parameters + 1)),
        replace(asked, batch=replace(batch, values=batch.values + 1)),
    ]
    names = {digest(one) for one in (asked, *others)}
    names.add(digest(asked, {"lower": np.zeros(3)}))
    names.add(digest(asked, {"upper": np.zeros(3)}))
    assert len(names) == len(others) + 3
    assert digest(asked) == digest(an_evaluation(loss=Loss.MSE))


class TestConnections:
    def test_a_lost_one_is_renewed_and_names_what_was_under_way(self):
        lanes, reports, lost = Lanes(SegmentPool(1 << 20)), [], []
        lanes.report, lanes.on_lost = reports.append, lambda: lost.append(True)
        evaluation = an_evaluation()
        for alone in (False, True):
            end, _other = engine_ends(lanes, 2)[::-1]
            run = lanes.start(evaluation, DATA.layout, lambda: True)
            end.receive()
            end.send(wire.Alone(alone))
            end.close()
            with pytest.raises(UnavailableError):
                run.next_event()
            run.close()
        assert reports == [
            Casualty(0, DATA.content_id, digest(evaluation), alone) for alone in (False, True)
        ]
        assert len(lost) == 2
        lanes.renew()
        assert len(lost) == 3

    def test_a_suspect_is_sent_to_run_alone_and_cleared_when_it_has_ended(self, engines):
        evaluation = an_evaluation(loss=Loss.MSE, values=False)
        engines.die(digest(evaluation), dataset=DATA.content_id)
        lanes = Lanes(SegmentPool(1 << 20), engines.quarantine.suspects)
        lanes.report = engines.quarantine.report
        (end,) = engine_ends(lanes)
        for alone in (2.0, 0.0):
            run = lanes.start(evaluation, DATA.layout, lambda: True)
            message, _ = end.receive()
            assert message.alone == alone
            end.send(wire.Finished())
            run.next_event()
            run.close()

    def test_a_suspect_that_was_cancelled_stays_one(self, engines):
        evaluation = an_evaluation(loss=Loss.MSE, values=False)
        engines.die(digest(evaluation), dataset=DATA.content_id)
        lanes = Lanes(SegmentPool(1 << 20), engines.quarantine.suspects)
        lanes.report = engines.quarantine.report
        (end,) = engine_ends(lanes)
        run = lanes.start(evaluation, DATA.layout, lambda: True)
        run.cancel()
        end.send(wire.Finished())
        run.close()
        assert engines.seconds(digest(evaluation)) == 2.0

    def test_what_is_in_quarantine_never_reaches_the_engine(self, engines):
        evaluation = an_evaluation(loss=Loss.MSE, values=False)
        name = digest(evaluation)
        for alone in ([], [name]):
            engines.die(name, alone=alone, dataset=DATA.content_id)
        lanes = Lanes(SegmentPool(1 << 20), engines.quarantine.suspects)
        (end,) = engine_ends(lanes)
        with pytest.raises(FailedPreconditionError) as caught:
            lanes.start(evaluation, DATA.layout, lambda: True)
        assert caught.value.reason == "BATCH_QUARANTINED"
        lanes.start(an_evaluation(loss=Loss.MAE), DATA.layout, lambda: True)
        assert end.receive()[0].loss is Loss.MAE


class TestIsolation:
    def make(self, compiled=lambda: False):
        return Isolation(compiled), np.zeros(1, np.uint8), []

    def start(self, isolation, flag, order, name, seconds=None, work=0.1):
        def run():
            how = (
                isolation.beside_others(flag)
                if seconds is None
                else isolation.alone(seconds, flag, lambda alone: order.append((name, alone)))
            )
            with how:
                order.append(f"{name} begins")
                time.sleep(work)
                order.append(f"{name} ends")

        thread = threading.Thread(target=run)
        thread.start()
        time.sleep(0.02)
        return thread

    def finish(self, *threads):
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()

    def test_a_suspect_waits_for_others_and_they_for_it(self):
        isolation, flag, order = self.make()
        before = self.start(isolation, flag, order, "before")
        suspect = self.start(isolation, flag, order, "suspect", 5.0)
        after = self.start(isolation, flag, order, "after")
        self.finish(before, suspect, after)
        assert order == [
            *("before begins", "before ends", ("suspect", True)),
            *("suspect begins", "suspect ends", "after begins", "after ends"),
        ]

    def test_suspects_run_one_at_a_time(self):
        isolation, flag, order = self.make()
        self.finish(*[self.start(isolation, flag, order, n, 5.0) for n in ("a", "b", "c")])
        runs = [order[start : start + 3] for start in range(0, 9, 3)]
        assert all(run == [(run[0][0], True), *run[1:]] for run in runs)
        assert all(run[1:] == [f"{run[0][0]} begins", f"{run[0][0]} ends"] for run in runs)

    def test_one_that_takes_long_lets_others_in_and_says_so(self):
        isolation, flag, order = self.make()
        suspect = self.start(isolation, flag, order, "suspect", 0.2, work=0.6)
        other = self.start(isolation, flag, order, "other")
        self.finish(suspect, other)
        assert order == [
            *(("suspect", True), "suspect begins", ("suspect", False)),
            *("other begins", "other ends", "suspect ends"),
        ]

    def test_work_that_takes_long_does_not_keep_it_waiting_for_ever(self):
        isolation, flag, order = self.make()
        long = self.start(isolation, flag, order, "long", work=0.6)
        suspect = self.start(isolation, flag, order, "suspect", 0.1)
        self.finish(long, suspect)
        assert order == ["long begins", "suspect begins", "suspect ends", "long ends"]

    def test_compiled_code_is_called_back_and_kept_out(self):
        working = [True]
        isolation, flag, order = self.make(lambda: working[0])
        standing = SimpleNamespace(revoke=lambda: order.append("revoked"))
        standing = type("Standing", (), {"revoke": lambda self: order.append("revoked")})()
        assert isolation.enter(standing)
        suspect = self.start(isolation, flag, order, "suspect", 5.0, work=0.2)
        assert order == ["revoked"]
        working[0] = False
        time.sleep(0.1)
        assert order == ["revoked", ("suspect", True), "suspect begins"]
        assert not isolation.enter(standing)
        self.finish(suspect)
        assert isolation.enter(standing)
        isolation.leave(standing)

    def test_a_call_that_has_ended_does_not_wait(self):
        isolation, flag, order = self.make()
        flag[0] = 1
        with ExitStack() as held:
            held.enter_context(isolation.alone(60.0, np.zeros(1, np.uint8), lambda alone: None))
            self.finish(self.start(isolation, flag, order, "ended"))
