"""Credentials of the client: when a token may be sent, and where TLS settings come from."""

import pytest

from warpfit.errors import InvalidArgumentError
from warpfit.transport.connection import Security, TlsConfig, is_local, target_of


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1:1", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("unix:/x", True),
        ("ipv4:127.0.0.1:1", True),
        ("ipv6:[::1]:1", True),
        ("unix-abstract:x", True),
        ("ipv4:10.1.2.3:1", False),
        ("dns:///localhost:1", True),
        ("example.org:1", False),
        ("127.0.0.1.example.org:1", False),
        ("10.1.2.3:1", False),
    ],
)
def test_local_addresses(address, local):
    assert is_local(address) is local


def test_the_servers_of_a_name_are_known_by_it():
    target = target_of("dns:///servers:1")
    assert Security.of(target, None, tls=True, environment={}).tls.server_name == "servers"
    given = TlsConfig(server_name="other")
    assert Security.of(target, None, tls=given, environment={}).tls == given
    with pytest.raises(InvalidArgumentError, match="dns:///servers:1 in plain text"):
        Security.of(target, "secret", None, {})


def test_a_token_leaves_the_machine_only_over_tls_or_on_demand():
    with pytest.raises(InvalidArgumentError) as caught:
        Security.of(target_of("example.org:1"), "secret", None, {})
    assert caught.value.reason == "PLAIN_TOKEN"
    assert "secret" not in str(caught.value)
    assert (
        Security.of(target_of("example.org:1"), "secret", tls=True, environment={}).tls
        == TlsConfig()
    )
    assert Security.of(target_of("example.org:1"), "secret", tls=False, environment={}).tls is None
    assert Security.of(target_of("127.0.0.1:1"), "secret", None, {}).token == "secret"


def test_settings_from_the_environment():
    environment = {"WARPFIT_TOKEN": "t\n", "WARPFIT_CA": "ca", "WARPFIT_SERVER_NAME": "n"}
    security = Security.of(target_of("example.org:1"), None, None, environment)
    assert security == Security("t", TlsConfig(ca="ca", server_name="n"))
    assert Security.of(target_of("h:1"), None, None, {"WARPFIT_TLS": "1"}).tls == TlsConfig()
    assert Security.of(target_of("h:1"), None, None, {"WARPFIT_TLS": "0"}) == Security()
    assert (
        Security.of(target_of("127.0.0.1:1"), "u", tls=False, environment=environment).tls is None
    )


def test_certificate_files_that_are_missing(tmp_path):
    with pytest.raises(InvalidArgumentError, match="only one"):
        TlsConfig(certificate=tmp_path / "x").credentials()
    with pytest.raises(InvalidArgumentError, match="cannot read"):
        TlsConfig(ca=tmp_path / "x").credentials()
