"""Which batches and data sets are suspect, and which are in quarantine."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.servers.examples import DATA, an_evaluation
from warpfit.errors import FailedPreconditionError
from warpfit.losses import huber
from warpfit.request import FitSettings, Loss
from warpfit.searching import Form, SearchRequest
from warpfit_server.ipc.engine_connection import InFlightRequest
from warpfit_server.ipc.quarantine import BatchOutcome, Quarantine, Suspects, digest
from warpfit_server.ipc.segments import ALONE, BEGUN, PROVEN

D, E = b"data set", b"another one"


class Engines:
    def __init__(self):
        self.now = 0.0
        self.quarantine = Quarantine(lambda: self.now)
        self.number = 0

    def die(self, *batches, alone=(), proven=(), blamed=True, loading=None, dataset=D):
        """Die while some batches run, those in ``alone`` with nothing beside them.

        Those in ``proven`` had run alone before for as long as suspects do.
        """
        self.number += 1
        for batch in batches:
            state = ALONE if batch in alone else PROVEN if batch in proven else BEGUN
            self.quarantine.report(BatchOutcome(dataset, batch, self.number, state))
        if blamed:
            self.quarantine.engine_died(self.number, loading)

    def seconds(self, batch, dataset=E):
        return self.quarantine.suspects.check(dataset, batch)

    def refuses(self, batch, dataset=E):
        try:
            self.seconds(batch, dataset)
        except FailedPreconditionError as error:
            return error.reason


@pytest.fixture
def engines():
    return Engines()


class TestQuarantine:
    def test_a_long_search_is_not_blamed_for_what_others_do_beside_it(self, engines):
        engines.die(b"search", b"culprit")
        for number in range(3):
            culprit = b"culprit %d" % number
            engines.die(b"search", culprit, proven=[b"search"])
            assert engines.seconds(culprit) == 2.0
        assert engines.refuses(b"search") is None
        others = Engines()
        for _ in range(2):  # with nothing beside it that could be to blame
            assert others.refuses(b"search") is None
            others.die(b"search", proven=[b"search"])
        assert others.refuses(b"search") == "BATCH_QUARANTINED"

    def test_a_batch_that_crashes_two_engines_is_refused_and_one_beside_it_is_not(self, engines):
        engines.die(b"culprit", b"innocent")
        assert engines.seconds(b"culprit") == engines.seconds(b"innocent") == 2.0
        engines.die(b"culprit", b"innocent", alone=[b"culprit"])
        assert engines.refuses(b"culprit") == "BATCH_QUARANTINED"
        assert engines.refuses(b"innocent") is None
        engines.quarantine.report(BatchOutcome(D, b"innocent"))
        assert engines.seconds(b"innocent") == 0.0

    def test_a_slow_batch_that_engines_died_of_beside_others_is_refused(self, engines):
        engines.die(b"slow", b"one")
        engines.die(b"slow", b"another")
        assert engines.refuses(b"slow") == "BATCH_QUARANTINED"
        assert engines.refuses(b"one") is engines.refuses(b"another") is None

    @given(st.data())
    def test_who_is_beside_different_culprits_and_ends_alone_is_never_refused(self, data):
        """Any batches run together, and reports come before or after the death is known."""
        engines = Engines()
        innocents, crashes = [b"a", b"b", b"c", b"d"], [0] * 3
        for _ in range(data.draw(st.integers(1, 12))):
            culprit = data.draw(st.integers(0, 2))
            name = b"culprit %d" % culprit
            if engines.refuses(name, D):
                continue
            crashes[culprit] += 1
            suspect = engines.seconds(name, D)
            beside = [] if suspect else data.draw(st.lists(st.sampled_from(innocents)))
            engines.number += 1
            reports = [
                BatchOutcome(D, batch, engines.number, ALONE if suspect else BEGUN)
                for batch in data.draw(st.permutations([name, *beside]))
            ]
            early = data.draw(st.integers(0, len(reports)))
            for report in reports[:early]:
                engines.quarantine.report(report)
            engines.quarantine.engine_died(engines.number, None)
            for report in reports[early:]:
                engines.quarantine.report(report)
            for innocent in {*beside}:  # their clients repeat them, and they end
                if engines.refuses(innocent, D) != "DATASET_QUARANTINED":
                    assert engines.seconds(innocent, D) == 2.0
                    engines.quarantine.report(BatchOutcome(D, innocent))
        assert max(crashes) <= 2
        assert not any(engines.refuses(innocent) for innocent in innocents)

    def test_a_data_set_that_crashes_engines_while_it_is_loaded_is_refused(self, engines):
        engines.die(b"beside it", loading=D, dataset=E)
        assert engines.refuses(b"x", D) is None
        engines.die(loading=D)
        assert engines.refuses(b"x", D) == "DATASET_QUARANTINED"
        with pytest.raises(FailedPreconditionError):
            engines.quarantine.suspects.check(D)

    def test_a_data_set_on_which_two_batches_crash_engines_is_refused(self, engines):
        engines.die(b"one", b"innocent")
        assert engines.seconds(b"fresh", D) == 2.0  # batches on it run alone, too
        for name, reason in ((b"two", None), (b"three", "DATASET_QUARANTINED")):
            engines.die(name, alone=[name])
            assert engines.refuses(b"fresh", D) == reason

    def test_one_batch_does_not_quarantine_its_data_set(self, engines):
        for _ in range(3):  # of which it is not blamed
            engines.die(b"culprit", alone=[b"culprit"], blamed=False)
        assert engines.seconds(b"culprit", D) == 0.0
        engines.die(b"culprit", alone=[b"culprit"])
        assert engines.refuses(b"culprit") is None, "one crash is not enough"
        for _ in range(3):
            engines.die(b"culprit", alone=[b"culprit"])
        assert engines.refuses(b"fresh", D) is None
        assert engines.refuses(b"culprit", D) == "BATCH_QUARANTINED"

    def test_suspects_and_quarantine_expire(self, engines):
        engines.die(b"culprit", b"suspect")
        engines.die(b"culprit", alone=[b"culprit"])
        engines.now += 601.0
        engines.quarantine.count()
        assert engines.seconds(b"suspect") == 0.0
        assert engines.refuses(b"culprit") == "BATCH_QUARANTINED"
        engines.now += 3000.0
        engines.quarantine.count()
        assert engines.refuses(b"culprit") is None

    def test_changes_are_published_and_older_lists_are_ignored(self, engines):
        published = []
        engines.quarantine.on_change = published.append
        engines.die(b"culprit")
        engines.die(b"culprit", alone=[b"culprit"])
        engines.quarantine.count()
        assert [known.version for known in published] == [1, 2]
        other = Suspects()
        for known in reversed(published):
            other.update(known)
        with pytest.raises(FailedPreconditionError, match="died of this batch"):
            other.check(E, b"culprit")


def test_the_digest_covers_the_whole_request():
    asked = an_evaluation(loss=Loss.MSE)
    batch = asked.batch
    changes = [
        *({}, {"rows": (0, 5)}, {"loss": Loss.MAE}, {"loss": None, "custom_loss": huber()}),
        *({"gradient": True}, {"dataset_id": bytes(32)}),
        {"batch": replace(batch, parameters=batch.parameters + 1)},
        {"batch": replace(batch, values=batch.values + 1)},
    ]
    names = {digest(replace(asked, **change)) for change in changes}
    names |= {digest(asked, FitSettings(**{one: np.zeros(3)})) for one in ("lower", "upper")}
    assert len(names) == len(changes) + 2
    assert digest(asked) == digest(an_evaluation(loss=Loss.MSE))


def test_a_search_that_goes_on_has_the_digest_that_it_had():
    search = SearchRequest(D, max_seconds=10.0)
    guesses = an_evaluation().batch
    later = replace(search, guesses=guesses, max_seconds=3.0, seed=1, max_generations=7)

    def name(request):
        return InFlightRequest.of_search(request, DATA.layout, request.max_seconds).digest()

    assert name(later) == name(search)
    for change in ({"dataset_id": E}, {"form": Form.PLAIN}, {"operators": {"add": 1.0}}):
        assert name(replace(search, **change)) != name(search)


def test_the_digest_sees_every_number_of_arrays_in_tuples_and_mappings():
    one, other = np.zeros(5000), np.zeros(5000)
    other[2500] = 1.0
    for wrap in (lambda a: (a,), lambda a: [a], lambda a: {"a": (a,)}):
        assert digest(wrap(one)) != digest(wrap(other))
        assert digest(wrap(one)) == digest(wrap(one.copy()))
