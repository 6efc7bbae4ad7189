"""Tokens and tenants: each RPC, each kind of wrong token, and what is of another tenant."""

import asyncio
import hashlib
import json
import pickle
import subprocess
import sys
import time
from contextlib import contextmanager

import grpc
import pytest

import warpfit
from support.servers.rpcs import (
    DATA,
    METHODS,
    OWN_CONNECTION,
    Caller,
    X,
    bearer,
    explained,
    request,
)
from support.servers.server import ServerProcess, write_secret
from warpfit import codec
from warpfit.cli import main as cli
from warpfit.dataset import Dataset
from warpfit.transport.connection import new_token
from warpfit.v1 import evaluator_pb2 as pb

NO_RETRY = warpfit.RetryPolicy(total_seconds=0)
UNKNOWN = Dataset.of(X + 1, X[:, 0], dtype="float64")
CONNECTIONS = 4


def test_every_method_is_tried():
    service = pb.DESCRIPTOR.services_by_name["Evaluator"]
    assert set(METHODS) == {method.name for method in service.methods}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokens") / "tokens"
    made = {name: new_token(name) for name in ("alice", "bob", "carol", "mallory")}
    token, line = new_token("alice", days=1)
    made["late"] = token, f"{line.rpartition(' ')[0]} 2020-01-01T00:00:00Z"
    write_secret(path, "# tenants\n\n" + "".join(f"{line}\n" for _, line in made.values()))
    path.with_name("tenants.toml").write_text(
        "[tenants.mallory]\nsuspended = true\n[tenants.carol]\nprograms = 1\nrate = 5\n"
    )
    return path, {name: token for name, (token, _) in made.items()}


@pytest.fixture(scope="module")
def server(tokens):
    path, _ = tokens
    tenants = str(path.with_name("tenants.toml"))
    flags = ("--token-file", str(path), "--tenants-file", tenants, "--front-ends", "2")
    with ServerProcess("--threads", "2", *flags) as process:
        yield process


@pytest.fixture
def as_tenant(server, tokens):
    @contextmanager
    def connected(name=None, metadata=None):
        if metadata is None:
            metadata = bearer(tokens[1][name]) if name else ()
        with grpc.insecure_channel(server.address, OWN_CONNECTION) as channel:
            yield Caller(channel, metadata)

    return connected


#: Whose token, or which metadata, a call comes with, and why it is refused.
REFUSED = {
    "missing": ((), "TOKEN_MISSING"),
    "other scheme": ((("authorization", "Basic YWxpY2U6cHc="),), "TOKEN_MISSING"),
    "empty": (bearer(""), "TOKEN_UNKNOWN"),
    "wrong": (bearer("x" * 43), "TOKEN_UNKNOWN"),
    "forged forwarding": ((("warpfit-tenant-bin", b"alice"),), "TOKEN_MISSING"),
    "late": (None, "TOKEN_EXPIRED"),
    "mallory": (None, "TENANT_SUSPENDED"),
}


@pytest.mark.parametrize(
    ("case", "method"),
    [*(("missing", method) for method in METHODS), *((case, "Evaluate") for case in REFUSED)],
)
def test_without_a_valid_token(as_tenant, method, case):
    metadata, reason = REFUSED[case]
    status = "PERMISSION_DENIED" if case == "mallory" else "UNAUTHENTICATED"
    for _ in range(CONNECTIONS):
        with as_tenant(case, metadata) as caller:
            assert caller.refused(method)[:2] == (status, reason)


def test_a_hash_is_no_token(as_tenant, tokens):
    digest = hashlib.sha256(tokens[1]["alice"].encode()).hexdigest()
    with as_tenant(metadata=bearer(digest)) as caller:
        assert caller.refused("GetServerInfo")[1] == "TOKEN_UNKNOWN"


@pytest.mark.parametrize("method", ["GetVariables", "Evaluate", "Optimize", "ReleaseVariables"])
def test_data_of_another_tenant_are_not_there(as_tenant, method):
    with as_tenant("alice") as alice:
        alice.call("UploadVariables")
    for _ in range(CONNECTIONS):
        with as_tenant("bob") as bob:
            others = bob.refused(method, DATA)
            assert others == bob.refused(method, UNKNOWN)
            assert others[:2] == ("NOT_FOUND", "DATASET_NOT_FOUND")
    with as_tenant("alice") as alice:
        for name in sorted(set(METHODS) - {"OpenDataset"}):
            assert alice.call(name), "the owner still has them"


def test_tenants_do_not_give_each_others_back(server, tokens):
    alice, bob = (
        warpfit.connect(server.address, token=tokens[1][name]) for name in ("alice", "bob")
    )
    with alice, bob:
        data = alice.upload(3 * X, X[:, 0], dtype="float64")
        copy = pickle.loads(pickle.dumps(data))
        before = alice.info().datasets, bob.info().datasets
        for everywhere in (False, True):
            bob.release(data, everywhere=everywhere)  # as if it were not there
            assert (alice.info().datasets, bob.info().datasets) == before
        with bob.upload(3 * X, X[:, 0], dtype="float64") as own:
            bob.release(own, everywhere=True)
        alice.evaluate(copy, ["x1"], loss="mse")


def test_an_upload_does_not_tell_what_another_tenant_has(as_tenant):
    messages = list(codec.upload_messages(DATA, 1 << 20))
    with as_tenant("alice") as alice, as_tenant("bob") as bob:
        alice.call("UploadVariables")
        for pieces, reason in (
            (messages[:1], "TRUNCATED_UPLOAD"),
            ([messages[0], _flipped(messages[1])], "BAD_DIGEST"),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                bob.send("UploadVariables", pieces)
            assert explained(caught.value)[1] == reason
        assert bob.refused("Evaluate")[0] == "NOT_FOUND"


def test_the_same_content_belongs_to_each_that_uploaded_it(as_tenant):
    with as_tenant("alice") as alice, as_tenant("bob") as bob:
        alice.call("UploadVariables")
        bob.call("UploadVariables")
        bob.send("ReleaseVariables", codec.release_message(DATA, everywhere=True))
        assert bob.refused("Evaluate")[0] == "NOT_FOUND"
        assert alice.call("Evaluate")


def test_server_info_tells_the_tenant_its_own_limits(as_tenant):
    with as_tenant("carol") as carol, as_tenant("alice") as alice:
        limits = pb.ServerInfo.FromString(carol.call("GetServerInfo")[0]).limits
        assert (limits.programs, limits.rate) == (1, 5)
        limits = pb.ServerInfo.FromString(alice.call("GetServerInfo")[0]).limits
        assert (limits.programs, limits.rate, limits.requests) == (100_000, 0, 32)


def test_limits_of_a_tenant(server, tokens, as_tenant):
    with warpfit.connect(server.address, token=tokens[1]["carol"]) as carol:
        data = carol.upload(X)
        assert carol.evaluate(data, ["x1", "x2"]).shape == (len(X), 2), "the client sends two calls"
    time.sleep(1.1)  # her five calls a second are used up
    with as_tenant("carol") as raw, pytest.raises(grpc.RpcError) as caught:
        raw.send("Evaluate", request(data, ["x1", "x2"]))
    assert explained(caught.value)[:2] == ("RESOURCE_EXHAUSTED", "TOO_MANY_PROGRAMS")


def test_the_clients_carry_tokens(server, tokens, monkeypatch, tmp_path, capsys):
    token = tokens[1]["alice"]
    with (
        warpfit.connect(server.address) as client,
        pytest.raises(warpfit.UnauthenticatedError, match="no token"),
    ):
        client.info()
    assert asyncio.run(_async_values(server.address, token=token)) == 50
    file = tmp_path / "token"
    write_secret(file, f"{token}\n")
    assert cli.main(["info", server.address, "--token-file", str(file)]) == 0
    assert cli.main(["info", server.address]) == 2
    assert "no token" in capsys.readouterr().err
    monkeypatch.setenv("WARPFIT_TOKEN", token)
    with warpfit.connect(server.address) as client:
        assert client.evaluate(client.upload(X), ["x1"]).shape == (50, 1)


def test_there_is_no_reflection(as_tenant):
    for version in ("v1", "v1alpha"):
        with as_tenant("alice") as alice:
            name = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
            method = alice.channel.stream_stream(name)
            with pytest.raises(grpc.RpcError) as caught:
                list(method(iter([b"\x3a\x00"]), timeout=10, metadata=alice.metadata))
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


#: Flags of servers that do not start, and what they say.
WRONG_SETTINGS = [
    (["--host", "0.0.0.0"], "plain text on 0.0.0.0"),
    (["--host", "127.0.0.1", "--tls-cert", "x.crt"], "half configured"),
    (["--port", "70000"], "0 to 65535"),
    (["--token-file", "open-to-all"], "chmod 600"),
    (["--token-file", "x", "--metrics-port", "0.0.0.0:0"], "--expose-tenants"),
    (["--tls-cert", "no-such.crt", "--tls-key", "no-such.key"], "cannot be used for TLS"),
    (["--token-file", "no-such-file"], "cannot be read"),
    (["--tenants-file", "no-such-file"], "cannot be used"),
    (["--cache-dir", "open-to-all-too"], "can be written by its group or by others"),
]
#: Tries to start one server after the other.
START_ALL = """
import json, sys
from warpfit_server.__main__ import main
for flags in json.loads(sys.argv[1]):
    try:
        status = main(["--port", "0", *flags])
    except SystemExit as end:
        status = end.code
    print("status", status, file=sys.stderr)
"""


def test_servers_with_wrong_settings_do_not_start(tmp_path):
    (tmp_path / "open-to-all").touch()
    (tmp_path / "open-to-all").chmod(0o644)
    (tmp_path / "open-to-all-too").mkdir()
    (tmp_path / "open-to-all-too").chmod(0o777)
    flags = json.dumps([flags for flags, _ in WRONG_SETTINGS])
    command = [sys.executable, "-c", START_ALL, flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert "Traceback" not in done.stderr
    *said, rest = done.stderr.split("status 2\n")
    assert not rest
    for (flags, message), words in zip(WRONG_SETTINGS, said, strict=True):
        assert message in words, flags


def _flipped(message: bytes) -> bytes:
    return message[:-1] + bytes([message[-1] ^ 1])


async def _async_values(address: str, **options) -> int:
    async with warpfit.connect_async(address, **options) as client:
        data = await client.upload(X)
        return len(await client.evaluate(data, ["x1"]))
