"""Addresses of servers, files that hold them, servers on Ray, and credentials."""

import os
import socket
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

import warpfit
import warpfit.ray
from support.refusals import refused
from support.servers.network import Authority
from warpfit.cli.main import main
from warpfit.errors import UnavailableError
from warpfit.transport.connection import DEFAULT_ADDRESS, Security, TlsConfig, is_local, target_of
from warpfit_server.machine import address_file


@pytest.mark.parametrize(
    ("address", "found"),
    [
        *(("a:1", ("a:1",)), ("a:1, b:2,a:1", ("a:1", "b:2"))),
        *(("ipv4:127.0.0.1:1", ("ipv4:127.0.0.1:1",)), ("unix:///run/x", ("unix:///run/x",))),
        (["[::1]:1", "unix:/run/warpfit"], ("[::1]:1", "unix:/run/warpfit")),
        ("ipv6:[::1]:1", ("ipv6:[::1]:1",)),
        ("unix:a b.sock,unix-abstract:x", ("unix:a b.sock", "unix-abstract:x")),
        ("my_host-2.cluster.local.:1", ("my_host-2.cluster.local.:1",)),
        ("[fe80::1%eth0]:65535", ("[fe80::1%eth0]:65535",)),
    ],
)
def test_fixed_addresses(address, found):
    target = target_of(address)
    assert target.addresses == target.find() == found
    assert target_of(None, {"WARPFIT_ADDRESS": address}).addresses == found or type(address) is list
    assert target_of(None, {}).addresses == (DEFAULT_ADDRESS,)


def test_what_is_no_address_is_refused_with_a_remedy():
    for address in (
        *(50551, b"a:1", 1.5, {"a": 1}, [50551], ["a:1", None], True, []),
        *("", ",", "a", "a:", ":1", "a:0", "a:65536", "a:\u0661", "a:1,,b:2", "a:1 b:2,c"),
        *("a b:1", "a\n:1", "a\x00:1", "m\u00fcnchen:1", "a..b:1", ".:1", "a" * 64 + ":1"),
        *("::1:1", "fe80::1:1", "[::1:1", "[127.0.0.1]:1", "[]:1", "[a]:1", "300.1.1.1:1", "7:1"),
        *("1.2.3:1", "a:" + "1" * 5000, "a:-1", "a:+1", "a:1.0", "a/b:1", "a/127.0.0.1:1", "a@b:1"),
        *("http://a:1", "tcp://a:1", "grpc://a:1", "vsock:1:2", "dns:a:1", "ipv4:a:1"),
        *("ipv4:[::1]:1", "ipv6:127.0.0.1:1", "ipv6:::1:1", "ipv4:127.0.0.1", "unix:a\x00b"),
        *("unix:", "unix://", "unix:///", "unix://a", "unix-abstract:", "unix:" + "a" * 108),
        *("UNIX:x", "dns:///", "dns:///a", "dns://8.8.8.8/a:1", "dns:///a:1,b:2"),
    ):
        for connect in (warpfit.connect, warpfit.connect_async):
            assert "PORT" in refused("BAD_ADDRESS", connect, address).remedy


def test_a_name_stands_for_all_of_its_addresses(monkeypatch):
    def lookup(host, port, **kind):
        assert (host, port) == ("servers", 7)
        hosts = ("10.0.0.2", "10.0.0.1")
        four = [(socket.AF_INET, *kind.values(), 6, "", (host, port)) for host in hosts]
        return [(socket.AF_INET6, *kind.values(), 6, "", ("fd00::1", port, 0, 0)), *four]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    target = target_of("dns:///servers:7")
    assert target.addresses == () and target.find() == ("10.0.0.1:7", "10.0.0.2:7")
    assert target.server_name == "servers"
    monkeypatch.undo()
    with pytest.raises(UnavailableError, match="cannot be resolved"):
        target_of("dns:///nosuch.invalid:7").find()


def test_what_a_resolver_returns_is_checked():
    assert target_of(lambda: ["a:1"]).find() == ("a:1",)
    assert target_of(lambda: "a:1").find() == ("a:1",)
    with pytest.raises(UnavailableError, match="no server"):
        target_of(list).find()
    refused("'a' is not an address", lambda: target_of(lambda: ["a"]).find())


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
    with address_file("", "node1", 1):
        assert [*tmp_path.iterdir()] == [precious], "no path means no file"
    (tmp_path / f".servers.node1-1.{os.getpid()}").symlink_to(precious)
    with address_file(str(tmp_path / "servers"), "node1", 1):
        assert (tmp_path / "servers.node1-1").read_text() == "node1:1\n"
    assert precious.read_text() == "kept"


def test_what_is_no_path_or_no_address_is_named(tmp_path):
    for wrong in ("file://", f"file://{tmp_path}"):
        refused("is not an address", target_of, wrong)
    (tmp_path / "servers.x").write_text("x" * 1000)
    refused("is not an address", lambda: target_of(f"file://{tmp_path}/servers").find())
    missing = address_file(str(tmp_path / "missing" / "servers"), "node1", 1)
    refused("cannot be written", missing.__enter__)


def test_the_extra_is_named_where_ray_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    refused(r"pip install 'warpfit\[ray\]'", warpfit.connect, "ray://science")
    assert main(["ray", "list"]) == 2 and "'warpfit[ray]'" in capsys.readouterr().err


def test_the_command_hands_over_what_it_is_told(monkeypatch, capsys):
    told = []
    monkeypatch.setattr(warpfit.ray, "start", lambda *args, **more: told.append((args, more)) or [])
    words = ["up", "science", "--devices", "cpu", "--cpus", "0.5", "--", "--threads", "2"]
    assert main(["ray", *words]) == 0
    flags = ["--threads", "2"]
    assert told == [(("science",), {"devices": "cpu", "cpus": 0.5, "flags": flags})]
    assert main(["ray", "up"]) == 0
    assert told[1] == (("warpfit",), {"devices": "all", "cpus": 1.0, "flags": []})


@pytest.mark.parametrize("name", ["", "a/b", "localhost:10001", "x" * 64])
def test_what_is_no_namespace_is_refused(name):
    refused("is no namespace", warpfit.connect, f"ray://{name}")


def test_local_addresses():
    here = "127.0.0.1:1 localhost:1 [::1]:1 unix:/x ipv4:127.0.0.1:1 ipv6:[::1]:1 unix-abstract:x"
    there = "ipv4:10.1.2.3:1 example.org:1 127.0.0.1.example.org:1 10.1.2.3:1"
    assert all(map(is_local, f"{here} dns:///localhost:1".split()))
    assert not any(map(is_local, there.split()))


def security(address, token=None, tls=None, **environment):
    return Security.of(target_of(address), token, tls=tls, environment=environment)


def test_credentials_leave_the_machine_only_over_tls_or_on_demand(tmp_path):
    assert "secret" not in str(refused("PLAIN_TOKEN", security, "example.org:1", "secret"))
    assert security("example.org:1", "secret", tls=True).tls == TlsConfig()
    assert security("example.org:1", "secret", tls=False).tls is None
    assert security("127.0.0.1:1", "secret").token == "secret"
    assert security("dns:///servers:1", tls=True).tls.server_name == "servers"
    given = TlsConfig(server_name="other")
    assert security("dns:///servers:1", tls=given).tls == given
    refused("dns:///servers:1 in plain text", security, "dns:///servers:1", "secret")
    environment = {"WARPFIT_TOKEN": "t\n", "WARPFIT_CA": "ca", "WARPFIT_SERVER_NAME": "n"}
    wanted = Security("t", TlsConfig(ca="ca", server_name="n"))
    assert security("example.org:1", **environment) == wanted
    assert security("h:1", WARPFIT_TLS="1").tls == TlsConfig()
    assert security("h:1", WARPFIT_TLS="0") == Security()
    assert security("127.0.0.1:1", "u", tls=False, **environment).tls is None
    refused("only one", lambda: TlsConfig(certificate=tmp_path / "x").credentials())
    refused("cannot read", lambda: TlsConfig(ca=tmp_path / "x").credentials())


@pytest.fixture(scope="module")
def tls_servers(tmp_path_factory):
    """Addresses of servers with TLS, with TLS and client certificates, and with neither."""
    authority = Authority(tmp_path_factory.mktemp("certificates"))
    foreign = Authority(tmp_path_factory.mktemp("foreign"))
    own = authority.issue("server", file="server")
    pair = [(own.key.read_bytes(), own.certificate.read_bytes())]
    trusted, secure = authority.file.read_bytes(), grpc.ssl_server_credentials
    server, mutual = grpc.server(ThreadPoolExecutor(1)), secure(pair, trusted, True)
    ports = {"tls": server.add_secure_port("127.0.0.1:0", secure(pair))}
    ports |= {"mutual": server.add_secure_port("127.0.0.1:0", mutual)}
    ports |= {"plain": server.add_insecure_port("127.0.0.1:0")}
    server.start()
    addresses = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
    yield addresses, authority.file, foreign, foreign.issue("eve")
    server.stop(None)


def test_what_the_sides_set_differently_is_named_at_once(tls_servers):
    addresses, ca, foreign, eve = tls_servers
    own = {"certificate": eve.certificate, "key": eve.key}
    files = {"foreign": {"ca": foreign.file}, "eve": own}
    for server, settings, reason in (
        *(("tls", None, "TLS_WANTED"), ("mutual", None, "TLS_WANTED"), ("plain", {}, "NO_TLS")),
        ("tls", "foreign", "UNTRUSTED_CERTIFICATE"),
        ("tls", {"server_name": "nobody.example"}, "WRONG_SERVER_NAME"),
        ("mutual", {}, "CLIENT_CERTIFICATE_WANTED"),
        ("mutual", "eve", "CLIENT_CERTIFICATE_REFUSED"),
    ):
        given = {"ca": ca} | (files[settings] if isinstance(settings, str) else settings or {})
        tls = settings is not None and warpfit.TlsConfig(**given)
        started, client = time.monotonic(), warpfit.connect(addresses[server], tls=tls)
        with client, pytest.raises(warpfit.UnavailableError) as caught:
            client.info()
        assert caught.value.reason == reason
        assert time.monotonic() - started < 10, "nothing is repeated"
        text = "".join(traceback.format_exception(caught.value))
        assert "grpc" not in text, "no cause or context of gRPC's"
