"""Tokens and tenants: wrong tokens, what is of another tenant, and limits over all front ends."""

import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack, contextmanager

import grpc
import numpy as np
import pytest

import warpfit
from support.servers import rpcs
from support.servers.rpcs import DATA, METHODS, WIDE, Caller, X, bearer, detail_of, request, start
from support.servers.server import ServerProcess, eventually, tenants_file, write_secret
from warpfit import codec
from warpfit.cli import main as cli
from warpfit.cli.top import scrape
from warpfit.dataset import Dataset
from warpfit.transport.connection import new_token

UNKNOWN = Dataset.of(X + 1, X[:, 0], dtype="float64")
#: A search that lasts until something else ends it.
ENDLESS = rpcs.search_request(DATA.content_id, max_seconds=600.0)
RATE = 5
TENANTS = f"""
tenants.mallory.suspended = true
tenants.carol = {{programs = 1, rate = 5, searches = 0, rows = 1000}}
tenants.bob.searches = 1
tenants.slow.rate = {RATE}
tenants.few.requests = 2
"""


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokens") / "tokens"
    names = ("alice", "bob", "carol", "mallory", "slow", "few")
    made = {name: new_token(name) for name in names}
    token, line = new_token("alice", days=1)
    made["late"] = token, f"{line.rpartition(' ')[0]} 2020-01-01T00:00:00Z"
    write_secret(path, "# tenants\n\n" + "".join(f"{line}\n" for _, line in made.values()))
    return path, {name: token for name, (token, _) in made.items()}


@pytest.fixture(scope="module")
def server(tokens):
    path, _ = tokens
    flags = ("--token-file", str(path), "--tenants-file", tenants_file(path.parent, TENANTS))
    flags += ("--front-ends", "2", "--max-searches", "4", "--metrics-port", "0")
    with ServerProcess("--threads", "1", *flags) as process:
        yield process


@pytest.fixture
def connect(server, tokens):
    return lambda name: warpfit.connect(server.address, token=tokens[1][name])


@pytest.fixture
def as_tenant(server, tokens):
    @contextmanager
    def connected(name=None, metadata=None):
        if metadata is None:
            metadata = bearer(tokens[1][name]) if name else ()
        with grpc.insecure_channel(server.address, rpcs.OWN_CONNECTION) as channel:
            yield Caller(channel, metadata)

    return connected


#: Whose token, or which metadata, a call comes with, and why it is refused.
REFUSED = {
    "missing": ((), "TOKEN_MISSING"),
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
    with as_tenant(case, metadata) as caller:
        assert caller.refused(method)[:2] == (status, reason)


def test_data_of_another_tenant_are_not_there(as_tenant):
    with as_tenant("alice") as alice:
        alice.call("UploadVariables")
        for _ in range(4):
            with as_tenant("bob") as bob:
                for method in set(METHODS) - {"UploadVariables", "OpenDataset", "GetServerInfo"}:
                    others = bob.refused(method, DATA)
                    assert others == bob.refused(method, UNKNOWN)
                    assert others[:2] == ("NOT_FOUND", "DATASET_NOT_FOUND")
        for name in sorted(set(METHODS) - {"OpenDataset"}):
            assert alice.call(name), "the owner still has them"


def test_an_upload_does_not_tell_what_another_tenant_has(as_tenant):
    header, *_ = codec.upload_messages(DATA, 1 << 20)
    with as_tenant("alice") as alice, as_tenant("bob") as bob:
        alice.call("UploadVariables")
        assert bob.refused("UploadVariables", [header])[1] == "TRUNCATED_UPLOAD"
        assert bob.refused("Evaluate")[0] == "NOT_FOUND"


def test_the_clients_carry_tokens(server, tokens, monkeypatch, tmp_path, capsys):
    token = tokens[1]["alice"]
    stranger = warpfit.connect(server.address)
    with stranger, pytest.raises(warpfit.UnauthenticatedError, match="no token"):
        stranger.info()
    assert rpcs.async_rows(server.address, token=token) == 50
    file = write_secret(tmp_path / "token", f"{token}\n")
    assert cli.main(["info", server.address, "--token-file", str(file)]) == 0
    assert cli.main(["info", server.address]) == 2
    assert "no token" in capsys.readouterr().err
    monkeypatch.setenv("WARPFIT_TOKEN", token)
    with warpfit.connect(server.address) as client:
        assert client.evaluate(client.upload(X), ["x1"]).shape == (50, 1)


# ------------------------------------------------------------------------------------------ limits
def test_programs_and_rows_of_a_tenant(connect, as_tenant):
    with connect("carol") as carol:
        data = carol.upload(X, X[:, 0])
        assert carol.evaluate(data, ["x1", "x2"]).shape == (len(X), 2), "the client sends two calls"
        with pytest.raises(warpfit.ResourceExhaustedError) as caught:
            carol.upload(np.zeros((1001, 1)))
        assert (caught.value.needed, caught.value.available) == (1001, 1000)
        assert "--tenants-file (rows)" in caught.value.remedy
    time.sleep(1.1)  # her five calls a second are used up
    with as_tenant("carol") as raw:
        assert raw.refused("Evaluate", request(data, ["x1", "x2"]))[1] == "TOO_MANY_PROGRAMS"
        asked = rpcs.search_request(data.content_id)
        assert raw.refused("Search", asked)[:2] == ("RESOURCE_EXHAUSTED", "TOO_MANY_SEARCHES")


def test_the_rate_holds_for_all_front_ends_and_every_call_is_counted_once(server, as_tenant):
    before = scrape(server.facts["metrics"])
    statuses, refused = Counter(), []
    started = time.monotonic()
    for _ in range(6 * RATE):
        with as_tenant("slow") as caller:
            try:
                caller.call("GetServerInfo")
                statuses["OK"] += 1
            except grpc.RpcError as error:
                refused.append(error)
                statuses[error.code().name] += 1
    seconds = time.monotonic() - started
    assert RATE <= statuses["OK"] <= RATE * (1 + seconds) + 1
    assert statuses.keys() == {"OK", "RESOURCE_EXHAUSTED"}
    detail = detail_of(refused[0])
    assert detail.reason == "RATE_LIMITED"
    assert 0 < detail.retry_after_ms <= 1100

    def counted(page):
        labels = {"method": "GetServerInfo", "tenant": "slow"}
        totals = {s: page.total("warpfit_requests_total", **labels, status=s) for s in statuses}
        return Counter({status: int(total) for status, total in totals.items()})

    # Once the further front end has sent what it has counted.
    eventually(lambda: counted(scrape(server.facts["metrics"])) == counted(before) + statuses)


@pytest.fixture
def wide(connect):
    """Data of the tenant that may have two calls in flight."""
    with connect("few") as client:
        yield client.upload(WIDE, WIDE[:, 0])


def test_calls_in_flight_are_counted_over_all_front_ends(server, as_tenant, wide):
    message = rpcs.long_request(wide)
    with ExitStack() as stack:
        connected = [stack.enter_context(as_tenant("few")) for _ in range(8)]
        for _ in range(2):
            running = occupied(server, connected[:2], message)
            for caller in connected[2:]:  # whichever front end has it
                status, reason, _ = caller.refused("Evaluate", wide.dataset)
                assert (status, reason) == ("RESOURCE_EXHAUSTED", "TOO_MANY_REQUESTS")
            for call in running:
                call.cancel()
            eventually(lambda: not is_full(connected[3], "Evaluate", wide.dataset))


def occupied(server, connected, message):
    """Start a call on each connection, again where it is refused; return them once they run."""
    running = [start(one.channel, message, metadata=one.metadata) for one in connected]

    def all_run():
        for index, one in enumerate(connected):
            if running[index].done():  # refused
                running[index] = start(one.channel, message, metadata=one.metadata)
        return server.in_flight().calls == len(running)

    eventually(all_run)
    return running


def is_full(caller, method, dataset, seconds=1.0):
    """Tell whether a small call is refused; one that is taken may wait behind others."""
    try:
        caller.call(method, dataset, seconds)
    except grpc.RpcError as error:
        return error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
    return False


# ---------------------------------------------------------------------------------------- searches
def test_a_tenant_has_its_share_of_the_searches_and_leaves_the_others_theirs(as_tenant):
    with as_tenant("alice") as alice, as_tenant("bob") as bob:
        for tenant in (alice, bob):
            tenant.call("UploadVariables")
        calls = [tenant.begin("Search", ENDLESS) for tenant in (alice, alice, bob)]
        for tenant, limit in ((alice, 2), (bob, 1)):
            _, detail = tenant.refusal("Search")
            assert (detail.reason, detail.available) == ("TOO_MANY_SEARCHES", limit)
            assert detail.retry_after_ms > 0
        assert bob.call("Evaluate")  # calls have turns beside searches
        for call in (calls[0], calls[2]):
            call.cancel()
        eventually(lambda: not is_full(alice, "Search", DATA, 60.0), 60.0)
        calls[1].cancel()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--token-file open-to-all", "chmod 600"),
        ("--tls-cert no-such.crt --tls-key no-such.key", "cannot be used for TLS"),
        ("--tenants-file no-such-file", "cannot be used"),
        ("--cache-dir .", "can be written by its group or by others"),
    ],
)
def test_a_server_with_wrong_settings_does_not_start(tmp_path, flags, message):
    tmp_path.chmod(0o777)
    (tmp_path / "open-to-all").touch()
    (tmp_path / "open-to-all").chmod(0o644)
    command = [sys.executable, "-m", "warpfit_server", "--port", "0", *flags.split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
