"""Messages between the engines that share the rows of a data set."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace

from support.servers.requests import DATA, an_evaluation
from warpfit_server.engine.peers import _Gathering
from warpfit_server.row_blocks import Shards


def test_a_part_that_fails_as_the_last_one_ends_wakes_the_request_once():
    """The second one would end the thread that reads what the engine sends."""
    evaluation = an_evaluation()
    request = SimpleNamespace(problem=SimpleNamespace(dataset_id=DATA.content_id))
    peers = SimpleNamespace(number=0, shards={DATA.content_id: Shards((0, 1, 2), (0, 1, 2, 3), 2)})
    gathering = _Gathering(peers, request, evaluation, DATA.layout, None)
    woken = []

    class Done(Future):
        def set_result(self, result):
            woken.append(True)
            if len(woken) == 1:  # meanwhile, on the thread of another connection
                gathering._ended(SimpleNamespace(has_failed=False), None)
            super().set_result(result)

    gathering._done = Done()
    gathering._ended(SimpleNamespace(has_failed=True), None)
    assert woken == [True]
