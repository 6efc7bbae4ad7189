"""Addresses in files, which servers with ``--address-file`` write and remove."""

import os

import pytest

from warpfit.errors import InvalidArgumentError, UnavailableError
from warpfit.transport.connection import target_of
from warpfit_server.system.sockets import address_file


def test_clients_find_the_servers_that_are_there_now(tmp_path):
    path = tmp_path / "the servers [1]"
    target = target_of(f"file://{path}")
    (tmp_path / "the servers 1.a-1").write_text("another's:1\n")  # no match of a pattern
    with pytest.raises(UnavailableError, match="there is no server"):
        target.find()
    with address_file(str(path), "node1", 50551), address_file(str(path), "[::1]", 7):
        assert set(target.find()) == {"node1:50551", "[::1]:7"}
        with address_file(str(path), "0.0.0.0", 8), address_file(str(path), "::1", 9):
            assert "[::1]:9" in target.find() and len(target.find()) == 4
        assert len(target.find()) == 2
    assert [file.name for file in tmp_path.iterdir()] == ["the servers 1.a-1"]


def test_a_file_of_another_user_is_not_overwritten_through_a_link(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("kept")
    (tmp_path / f".servers.node1-1.{os.getpid()}").symlink_to(precious)
    with address_file(str(tmp_path / "servers"), "node1", 1):
        assert (tmp_path / "servers.node1-1").read_text() == "node1:1\n"
    assert precious.read_text() == "kept"


def test_no_file_means_no_file(tmp_path):
    with address_file("", "node1", 1):
        assert not list(tmp_path.iterdir())


def test_what_is_no_path_or_no_address_is_named(tmp_path):
    for wrong in ("file://", f"file://{tmp_path}"):
        with pytest.raises(InvalidArgumentError, match="is not an address"):
            target_of(wrong)
    (tmp_path / "servers.x").write_text("x" * 1000)
    with pytest.raises(InvalidArgumentError, match="is not an address"):
        target_of(f"file://{tmp_path}/servers").find()
    with (
        pytest.raises(InvalidArgumentError, match="cannot be written"),
        address_file(str(tmp_path / "missing" / "servers"), "node1", 1),
    ):
        pass
