"""Why a server cannot listen, and addresses as people write them."""

import errno
import socket

import pytest

from warpfit.errors import UnavailableError
from warpfit_server.config import Config
from warpfit_server.system.sockets import cannot_listen, reserve_port, split_address


def test_a_port_of_another_program_is_in_use():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UnavailableError, match="another program listens there") as caught:
            reserve_port("127.0.0.1", port, "--port")
    assert caught.value.reason == "PORT_IN_USE"


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid", "a" * 300])
def test_a_host_that_is_not_this_machine_is_named_with_the_systems_words(host):
    with pytest.raises(UnavailableError) as caught:
        reserve_port(host, 0, "--host")
    assert caught.value.reason == "NO_SUCH_HOST"
    assert len(caught.value.message) > len(f"cannot listen on {host}:0: ")


def test_a_port_that_is_for_root_only():
    error = cannot_listen("127.0.0.1", 80, "--port", OSError(errno.EACCES, "Permission denied"))
    assert error.reason == "PORT_FORBIDDEN"
    assert "1024" in error.remedy


@pytest.mark.parametrize("host", ["no-such-host.invalid", ""])
def test_an_unknown_host_is_not_called_plain_text(host):
    with pytest.raises(UnavailableError) as caught:
        Config(host=host).check_exposure()
    assert caught.value.reason == "NO_SUCH_HOST"


@pytest.mark.parametrize("host", ["[::1]", "::1"])
def test_brackets_of_an_address_do_not_matter(host):
    flags = ["--host", host, "--health-port", "[::1]:7", "--metrics-port", "[::1]:0"]
    config = Config.from_arguments(flags, {})
    assert config.host == "::1"
    assert split_address(config.health_port) == ("::1", 7)
    assert split_address(config.metrics_port) == ("::1", 0)
    config.check_exposure()
