"""The watchdog, with a clock and probes of the test's own."""

import math
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from warpfit.errors import DatasetNotFoundError, ResourceExhaustedError, UnavailableError
from warpfit_server.config import Config
from warpfit_server.processes.engine_start import UNRELATED_CAUSES
from warpfit_server.processes.watchdog import EngineWatch, Readiness, Watchdog


class Watched:
    """A watchdog, the readiness that it publishes and the replacements that it asks for."""

    def __init__(self, starting_since=None, is_stopped=False):
        self.replaced, self.loads = set(), []
        self.others_answer = True
        self.health = Readiness()
        self.health.set_device("cpu:0", True)
        supervisor = SimpleNamespace(
            starting_since=starting_since,
            replace=self.replaced.add,
            device=SimpleNamespace(label="cpu:0"),
            ask_counters=lambda: self.watchdog.stop(),
            is_stopped=is_stopped,
        )
        config = Config(hang_seconds=30.0)
        others, load = lambda: self.others_answer, lambda: self.loads.append("probe")
        self.watchdog = EngineWatch(config, supervisor, None, self.health, others, load)
        self.watchdog.answering_since = 0.0

    def probe(self, outcome):
        ask = Mock(side_effect=[outcome])
        self.watchdog._probe = SimpleNamespace(ask=ask)
        self.watchdog._stopping.clear()
        self.watchdog._probe_forever()  # once, because counters are asked for


@pytest.mark.parametrize(("is_stopped", "cause"), [(False, "hung"), (True, "stopped")])
def test_a_probe_without_an_answer_ends_readiness_and_then_the_engine(is_stopped, cause):
    """What an engine that was stopped from outside has run is not to blame."""
    watched = Watched(is_stopped=is_stopped)
    watched.watchdog._asked = 100.0
    watched.watchdog.look(102.9)
    assert watched.health.serving
    watched.watchdog.look(103.1)
    assert not watched.health.serving
    assert not watched.replaced
    watched.watchdog.look(130.1)
    assert watched.replaced == {cause}
    assert (cause in UNRELATED_CAUSES) == is_stopped


def test_the_server_is_ready_only_when_every_process_answers_in_time():
    watched = Watched()
    watched.others_answer = False
    watched.probe(True)
    assert not watched.health.serving
    watched.others_answer = True
    watched.watchdog.look(0.0)
    assert watched.health.serving
    watched.watchdog._asked, watched.others_answer = 100.0, False
    watched.watchdog.look(102.0)
    assert not watched.health.serving
    watched.watchdog.look(103.1)
    watched.others_answer = True  # a front end's last answer came late
    watched.watchdog.look(103.2)
    assert not watched.health.serving


@pytest.mark.parametrize("kind", ["asked", "failing", "starting"])
def test_time_in_which_this_process_was_stopped_does_not_count(kind):
    watched = Watched(starting_since=100.0 if kind == "starting" else None)
    watchdog, seconds = watched.watchdog, 600.0 if kind == "starting" else 30.0
    if kind != "starting":
        setattr(watchdog, f"_{kind}", 100.0)
    watchdog.look(202.9, awake=2.9)
    assert watched.health.serving and not watched.replaced
    watchdog.look(200.1 + seconds, awake=seconds + 0.1)
    assert len(watched.replaced) == 1


@pytest.mark.parametrize(
    ("outcome", "replaced"),
    [
        (False, {"wrong_answer"}),
        (ResourceExhaustedError("no files"), set()),  # of this process, not of the engine
        (OSError("no files"), {"no_answer"}),
        (DatasetNotFoundError(), {"no_answer"}),  # there was no room for it as the engine started
    ],
)
def test_wrong_answers_and_errors_replace_the_engine(outcome, replaced):
    watched = Watched()
    watched.probe(outcome)
    assert watched.loads == ["probe"] * isinstance(outcome, DatasetNotFoundError)
    watched.watchdog.look(1e12)
    assert not watched.health.serving
    assert watched.replaced == replaced


def test_an_engine_answers_from_its_first_answer_after_one_that_was_late_or_failed():
    watched = Watched()
    watched.probe(True)
    assert watched.watchdog.answering_since == 0.0
    watched.watchdog._asked = 100.0
    watched.watchdog.look(103.1)
    assert watched.watchdog.answering_since == math.inf
    began = time.monotonic()
    watched.probe(True)
    assert began <= watched.watchdog.answering_since <= time.monotonic()
    watched.probe(UnavailableError("the engine is restarting"))
    assert watched.watchdog.answering_since == math.inf


def test_an_engine_on_which_all_probes_fail_for_long_is_replaced():
    watched = Watched()
    for _ in range(2):
        watched.probe(UnavailableError("the connection was lost"))
    failing = watched.watchdog._failing
    watched.watchdog.look(failing + 29.0)
    assert not watched.replaced
    watched.watchdog.look(failing + 30.1)
    assert watched.replaced == {"no_answer"}
    assert not watched.health.serving
    watched.watchdog.engine_ready()
    assert watched.watchdog._failing is None


def test_an_engine_that_took_long_to_start_is_not_replaced_as_it_begins_to_serve():
    watched = Watched(starting_since=100.0)
    watched.probe(UnavailableError("the engine is restarting"))
    watched.watchdog._failing = 100.0
    for now, since in ((159.0, 100.0), (159.1, None)):
        watched.watchdog._supervisor.starting_since = since
        watched.watchdog.look(now)
    assert not watched.replaced


class Watching(Watchdog):
    def __init__(self, looks, hang_seconds=30.0, seconds=()):
        config, self.looks, self.clock = Config(hang_seconds=hang_seconds), looks, 100.0
        nobody = SimpleNamespace(supervisors=[], announce_readiness=lambda: None, told_at=math.inf)
        super().__init__(config, nobody, [], None, nobody, [lambda: looks.append("chores")])
        self.engines = [SimpleNamespace(look=self.look)]
        self._stopped = SimpleNamespace(wait=self.wait)
        self.seconds = [*seconds]

    def wait(self, _):
        self.clock += self.seconds.pop(0) if self.seconds else 0.0
        return not self.seconds

    def look(self, now, awake):
        self.looks.append(now - awake)


def test_an_error_in_one_look_ends_neither_the_others_nor_the_next_one(caplog):
    looks = []
    watchdog = Watching(looks, seconds=[0.1] * 3)
    watchdog.engines = [failing := Mock(**{"look.side_effect": OSError("whatever it is")})]
    watchdog.look_forever()
    assert looks == ["chores"] * failing.look.call_count == ["chores"] * 2
    assert "could not look after" in caplog.text


@pytest.mark.parametrize(("hang_seconds", "seconds"), [(30.0, 7.0), (6.0, 0.7)])
def test_time_in_which_the_main_process_was_stopped_is_nobodys(monkeypatch, hang_seconds, seconds):
    looks = []
    watchdog = Watching(looks, hang_seconds, seconds=[0.1, seconds, 0.1, 0.1])
    monkeypatch.setattr("warpfit_server.processes.watchdog.time.monotonic", lambda: watchdog.clock)
    watchdog.look_forever()
    resumed = [each for each in looks if each != "chores"]
    assert resumed == [0.0, *[pytest.approx(100.1 + seconds)] * 2]


def test_changes_of_readiness_are_reported_once_and_draining_is_final():
    reported = []
    readiness = Readiness(lambda: reported.append(sorted(readiness.serving)))
    for serves in (False, True, True, False, True):
        readiness.set_device("cpu:0", serves)
    readiness.set_device("cpu:1", True)
    assert reported == [["cpu:0"], [], ["cpu:0"], ["cpu:0", "cpu:1"]]
    readiness.drain()
    readiness.set_device("cpu:1", True)
    assert reported[4:] == [[]]
