"""Credentials of the client: when a token may be sent, and where TLS settings come from."""

import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

import warpfit
from support.servers.network import Authority
from warpfit.errors import InvalidArgumentError
from warpfit.transport.connection import Security, TlsConfig, is_local, target_of


@pytest.mark.parametrize("local", [True, False])
def test_local_addresses(local):
    here = "127.0.0.1:1 localhost:1 [::1]:1 unix:/x ipv4:127.0.0.1:1 ipv6:[::1]:1 unix-abstract:x"
    there = "ipv4:10.1.2.3:1 example.org:1 127.0.0.1.example.org:1 10.1.2.3:1"
    for address in (f"{here} dns:///localhost:1" if local else there).split():
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


@pytest.fixture(scope="module")
def tls_servers(tmp_path_factory):
    """Addresses of servers with TLS, with TLS and client certificates, and with neither."""
    authority = Authority(tmp_path_factory.mktemp("certificates"))
    foreign = Authority(tmp_path_factory.mktemp("foreign"))
    own = authority.issue("server", file="server")
    pair = [(own.key.read_bytes(), own.certificate.read_bytes())]
    trusted = authority.file.read_bytes()
    kinds = {
        "tls": grpc.ssl_server_credentials(pair),
        "mutual": grpc.ssl_server_credentials(pair, trusted, require_client_auth=True),
        "plain": None,
    }
    servers, addresses = [], {}
    for name, credentials in kinds.items():
        server = grpc.server(ThreadPoolExecutor(1))
        if credentials is None:
            port = server.add_insecure_port("127.0.0.1:0")
        else:
            port = server.add_secure_port("127.0.0.1:0", credentials)
        server.start()
        servers.append(server)
        addresses[name] = f"127.0.0.1:{port}"
    yield addresses, authority.file, foreign, foreign.issue("eve")
    for server in servers:
        server.stop(None)


@pytest.mark.parametrize(
    ("server", "settings", "reason"),
    [
        ("tls", None, "TLS_WANTED"),
        ("mutual", None, "TLS_WANTED"),
        ("plain", {}, "NO_TLS"),
        ("tls", {"ca": "foreign"}, "UNTRUSTED_CERTIFICATE"),
        ("tls", {"server_name": "nobody.example"}, "WRONG_SERVER_NAME"),
        ("mutual", {}, "CLIENT_CERTIFICATE_WANTED"),
        ("mutual", {"certificate": "foreign"}, "CLIENT_CERTIFICATE_REFUSED"),
    ],
)
def test_what_the_sides_set_differently_is_named_at_once(tls_servers, server, settings, reason):
    addresses, ca, foreign, eve = tls_servers
    tls = False
    if settings is not None:
        given = {"ca": ca} | settings
        given["ca"] = foreign.file if given["ca"] == "foreign" else ca
        if "certificate" in given:
            given |= {"certificate": eve.certificate, "key": eve.key}
        tls = warpfit.TlsConfig(**given)
    started = time.monotonic()
    with (
        warpfit.connect(addresses[server], tls=tls) as client,
        pytest.raises(warpfit.UnavailableError) as caught,
    ):
        client.info()
    assert caught.value.reason == reason
    assert time.monotonic() - started < 10, "nothing is repeated"
    text = "".join(traceback.format_exception(caught.value))
    assert "grpc" not in text, "no cause or context of gRPC's"
