"""Graphs that wait for their next launch keep a bounded amount of code loaded."""

from types import SimpleNamespace

from warpfit_server.engine.cuda.jit.kernel_plan import MAX_GRAPHS
from warpfit_server.engine.cuda.jit.kernel_store import MOST_BYTES
from warpfit_server.engine.cuda.jit.tier import IdleGraphs


def graph(key, size=1):
    return SimpleNamespace(key=key, code_bytes=size)


def test_each_graph_is_lent_once():
    idle, first, second = IdleGraphs(), graph("a"), graph("a")
    idle.keep(first)
    idle.keep(second)
    assert {id(idle.take("a")), id(idle.take("a"))} == {id(first), id(second)}
    assert idle.take("a") is None


def test_the_code_of_all_graphs_is_bounded():
    idle = IdleGraphs()
    for number in range(10):
        idle.keep(graph(number, MOST_BYTES // 4))
    assert list(idle) == [6, 7, 8, 9]
    idle.keep(graph("large", MOST_BYTES + 1))
    assert "large" not in idle
    for number in range(2 * MAX_GRAPHS):
        idle.keep(graph(f"small {number}"))
    assert len(idle) == MAX_GRAPHS
