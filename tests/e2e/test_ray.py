"""Servers on the nodes of a Ray cluster: found, killed and brought back under load."""

import pytest

pytest.importorskip("ray")

import warpfit
import warpfit.ray
from support.load.load import Load
from support.load.ray_faults import RayCluster
from warpfit.errors import InvalidArgumentError, UnavailableError


@pytest.fixture(scope="module")
def cluster():
    with RayCluster(nodes=2) as made:
        yield made


def test_clients_find_the_servers_and_outlive_one_of_them(cluster, capsys):
    known = set(warpfit.ray.addresses(cluster.namespace))
    assert len(known) == 2
    with Load(cluster.address, clients=2) as load:
        load.wait_for_answers(10)
        first, second = cluster.servers()
        first.kill()
        load.wait_for_answers(10)
        cluster.wait_for_servers()
        assert len(known - set(warpfit.ray.addresses(cluster.namespace))) == 1
        assert second.is_running()
        # Started again, for nodes that may have come: those that have a server keep it.
        again = warpfit.ray.start(cluster.namespace, devices="cpu")
        assert again == warpfit.ray.addresses(cluster.namespace)
        load.wait_for_answers(10)
    assert (load.wrong, load.failures) == (0, [])
    assert load.right > 40


def test_what_is_not_there_is_named(cluster):
    nobody = warpfit.connect("ray://nobody")
    with nobody, pytest.raises(UnavailableError, match="no server at ray://nobody"):
        nobody.info()
    with pytest.raises(InvalidArgumentError, match="no node of the Ray cluster has a GPU"):
        warpfit.ray.start(cluster.namespace)
    with pytest.raises(InvalidArgumentError, match="devices cannot be '0,1'"):
        warpfit.ray.start(cluster.namespace, devices="0,1")
    with pytest.raises(InvalidArgumentError, match="is no namespace"):
        warpfit.connect("ray://localhost:10001")
    with pytest.raises(UnavailableError, match=r"did not start: .* ended with status 2"):
        warpfit.ray.start("broken", devices="cpu", flags=["--threads", "none"])
    warpfit.ray.down("broken")


def test_down_stops_the_servers_and_leaves_ray_alone(cluster):
    servers = cluster.servers()
    warpfit.ray.down(cluster.namespace)
    assert not any(server.is_running() and server.status() != "zombie" for server in servers)
    assert warpfit.ray.addresses(cluster.namespace) == []
