"""TLS and mutual TLS: each RPC, each kind of wrong certificate, and certificates renewed."""

import socket
import ssl
import time

import grpc
import numpy as np
import pytest

import warpfit
from support.servers.network import Authority
from support.servers.rpcs import METHODS, OWN_CONNECTION, Caller, X, async_rows
from support.servers.server import ServerProcess
from warpfit.cli import main as cli

NO_RETRY = warpfit.RetryPolicy(total_seconds=0)
CONNECTIONS = 4
#: Seconds after which a file that has changed is no longer taken for one that is being written.
SETTLED_SECONDS = 0.6


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def server(authority):
    pair = authority.issue("server", file="server")
    authority.issue("server", file="spare")
    clients = authority.file.with_name("clients.pem")
    clients.write_bytes(authority.file.read_bytes())
    flags = ("--tls-cert", str(pair.certificate), "--tls-key", str(pair.key))
    flags += ("--tls-client-ca", str(clients), "--front-ends", "2")
    with ServerProcess("--threads", "2", *flags) as process:
        yield process


def connect(server, authority, pair, **options):
    files = {"ca": authority.file, "certificate": pair.certificate, "key": pair.key}
    tls = warpfit.TlsConfig(**{**files, **options})
    return warpfit.connect(server.address, tls=tls, retry=NO_RETRY)


@pytest.mark.parametrize("case", ["missing", "foreign", "expired"])
def test_without_a_valid_client_certificate(server, authority, tmp_path, case):
    own = {"missing": None, "expired": authority.issue("alice", (-2, -1), file="expired")}
    pair = own.get(case, Authority(tmp_path, "stranger").issue("alice"))
    own = (pair.key.read_bytes(), pair.certificate.read_bytes()) if pair else ()
    credentials = grpc.ssl_channel_credentials(authority.file.read_bytes(), *own)
    with grpc.secure_channel(server.address, credentials, OWN_CONNECTION) as channel:
        for method in METHODS if case == "missing" else ("Evaluate",):
            assert Caller(channel).refused(method)[0] == "UNAVAILABLE"


def test_plain_text(caller):
    assert caller.refused("Evaluate")[0] == "UNAVAILABLE"


def test_a_certificate_without_a_name(server, authority):
    nameless = connect(server, authority, authority.issue(""))
    with nameless, pytest.raises(warpfit.UnauthenticatedError) as caught:
        nameless.info()
    assert caught.value.reason == "CERTIFICATE_WITHOUT_NAME"


def test_the_common_name_is_the_tenant(server, authority):
    alice, bob = (connect(server, authority, authority.issue(name)) for name in ("alice", "bob"))
    with alice, bob:
        data = alice.upload(X, dtype="float64")
        bob.release(data)  # which bob does not have
        np.testing.assert_array_equal(alice.evaluate(data, ["x1"])[:, 0], X[:, 0])


def test_a_client_refuses_another_server(server, authority, tmp_path):
    pair = authority.issue("alice")
    stranger = Authority(tmp_path, "stranger")
    for options in ({"ca": stranger.file}, {"server_name": "elsewhere.example"}):
        client = connect(server, authority, pair, **options)
        with client, pytest.raises(warpfit.UnavailableError):
            client.info(timeout=10)
    with connect(server, authority, pair, server_name="localhost") as client:
        assert client.info().engine == "cpu"


def test_the_async_client_and_the_command(server, authority, capsys):
    pair = authority.issue("alice")
    tls = warpfit.TlsConfig(ca=authority.file, certificate=pair.certificate, key=pair.key)
    assert async_rows(server.address, tls=tls) == 50
    flags = ["--ca", authority.file, "--cert", pair.certificate, "--key", pair.key]
    assert cli.main(["info", server.address, *map(str, flags)]) == 0
    assert cli.main(["health", server.address, *map(str, flags)]) == 0
    assert "readiness: SERVING" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["health", server.address])
    said = capsys.readouterr()
    assert said.out == "readiness: UNAVAILABLE\n"
    assert "speaks TLS, and this client does not" in said.err


def test_renewed_certificates_serve_new_connections(server, authority):
    files, pair = authority.file.parent, authority.issue("alice")
    with connect(server, authority, pair) as old:
        old.info()
        before = _serial(server, authority, pair)
        (files / "server.key").write_bytes((files / "spare.key").read_bytes())
        time.sleep(SETTLED_SECONDS)
        assert _serial(server, authority, pair) == before, "half a pair was used"
        (files / "server.crt").write_bytes((files / "spare.crt").read_bytes())
        time.sleep(SETTLED_SECONDS)
        for _ in range(2 * CONNECTIONS):  # whichever front end takes them
            renewed = _serial(server, authority, pair)
        assert renewed not in (before, None)
        old.info()  # connections live on


def test_renewed_authorities_decide_about_new_connections(server, authority):
    clients = authority.file.with_name("clients.pem")
    before, successor = clients.read_bytes(), Authority(clients.parent, "successor")
    try:
        clients.write_bytes(successor.file.read_bytes())
        time.sleep(SETTLED_SECONDS)
        for _ in range(CONNECTIONS):
            assert _serial(server, authority, authority.issue("alice")) is None
            assert _serial(server, authority, successor.issue("alice")) is not None
    finally:
        clients.write_bytes(before)
        time.sleep(SETTLED_SECONDS)


def _serial(server, authority, pair) -> str | None:
    """Serial number of the certificate that a new connection sees; None if it is refused."""
    context = ssl.create_default_context(cafile=str(authority.file))
    context.load_cert_chain(pair.certificate, pair.key)
    context.set_alpn_protocols(["h2"])
    host, port = server.address.rsplit(":", 1)
    plain = socket.create_connection((host, int(port)), 5)
    try:
        with context.wrap_socket(plain, server_hostname=host) as connection:
            connection.settimeout(5)
            serial = str(connection.getpeercert()["serialNumber"])
            # In TLS 1.3 a refusal comes after the handshake, instead of the server's settings.
            return serial if connection.recv(1) else None
    except (ssl.SSLError, ConnectionError):
        return None
