"""Matrices in shared memory: as over the network, and nothing of it is left over."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from contextlib import ExitStack

import grpc
import numpy as np
import pytest

import warpfit
from support.rpcs import OWN_CONNECTION, Caller, bearer, evaluate_request, explained
from support.server import ServerProcess
from support.windows import RawWindow, client_windows, memory_file, open_windows
from warpfit import codec
from warpfit.arguments import build_evaluation
from warpfit.dataset import Dataset
from warpfit.security import new_token
from warpfit.v1 import evaluator_pb2 as pb

#: Everything in windows, and each client at a door of its own.
X = np.random.default_rng(5).normal(size=(20_000, 3))
EXPRESSIONS = ["x1", "p1*x2 + x3", "exp(x1) - p1", "p1*sin(p2*x3)"]
STARTS = [[], [2.0], [0.5], [1.5, -0.5]]
DOORS = (1, 2)
CLIENTS = 6


class EverythingInWindows(warpfit.TransportConfig):
    """Small matrices, too; and each client has a connection of its own, to one of the doors."""

    def __init__(self) -> None:
        super().__init__(window_bytes=1)

    def channel_options(self) -> list[tuple[str, int]]:
        return [*super().channel_options(), *OWN_CONNECTION]


@pytest.fixture(scope="module", params=DOORS)
def server(request):
    flags = ("--threads", "2", "--front-doors", str(request.param), "--local-socket", "auto")
    with ServerProcess(*flags) as process:
        yield process


@pytest.fixture
def path(server):
    return server.facts["local"]


@pytest.fixture
def network(server):
    with warpfit.connect(server.address) as client:
        yield client


@pytest.fixture
def clients(server):
    """Enough clients that each door has some."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                warpfit.connect(server.address, transport=EverythingInWindows(), shared_memory=True)
            )
            for _ in range(CLIENTS)
        ]


@pytest.fixture
def local(network):
    return network.info().local


@pytest.fixture
def baseline(server):
    """Check that the server has the windows that it had."""
    before = served_windows(server)
    yield
    eventually(lambda: served_windows(server) <= before)


def served_windows(server) -> int:
    """Descriptors of windows in all processes of the server."""
    return sum(open_windows(process.pid) for process in server.family().values())


def eventually(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def assert_same(one: warpfit.data.Answer, other: warpfit.data.Answer) -> None:
    for name in ("values", "losses"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    if one.jacobians is None:
        assert other.jacobians is None
    else:
        for ours, theirs in zip(one.jacobians, other.jacobians, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_answers_are_those_of_the_network(baseline, network, clients, dtype):
    data = network.upload(X, X[:, 0], dtype=dtype)
    vectors = [np.array([start, start]) * [[1.0], [3.0]] for start in STARTS]
    for parameters, options in (
        (STARTS, {}),
        (vectors, {}),
        (STARTS, {"rows": slice(7, 5_008)}),
        (STARTS, {"loss": "mse", "values": True, "jacobian": True}),
        (vectors, {"jacobian": True}),
    ):
        expected = network.run(data, EXPRESSIONS, parameters, **options)
        for client in clients:
            assert_same(client.run(data, EXPRESSIONS, parameters, **options), expected)
    assert client_windows() >= CLIENTS, "they did cross in windows"


def test_uploads_are_those_of_the_network(baseline, network, clients):
    for number, client in enumerate(clients[:3]):
        fresh = np.random.default_rng(number).normal(size=(300_000, 4))
        steps: list[tuple[int, int]] = []
        report = steps.append
        data = client.upload(fresh, fresh[:, 1], progress=lambda *at, report=report: report(at))
        assert steps == sorted(steps)
        assert steps[-1] == (data.layout.nbytes, data.layout.nbytes)
        assert client_windows() >= 1
        got = network.evaluate(data, ["x1 + x4"])
        np.testing.assert_array_equal(got[:, 0], np.float32(fresh[:, 0]) + np.float32(fresh[:, 3]))
        network.release(data)


def test_an_answer_is_the_callers_own(network, clients):
    data = network.upload(X, dtype="float64")
    first = clients[0].evaluate(data, ["x1"])
    kept = first.copy()
    first[0] = 5.0
    clients[0].evaluate(data, ["x2"])
    clients[0].close()
    assert first[0] == 5.0
    np.testing.assert_array_equal(first[1:], kept[1:])


def test_threads_share_a_client(network, clients):
    data = network.upload(X, dtype="float64")
    client, failures = clients[0], []

    def work(factor: float) -> None:
        for turn in range(10):
            got = client.evaluate(data, ["p1*x1"], [[factor + turn]])
            if not np.array_equal(got[:, 0], (factor + turn) * X[:, 0]):
                failures.append(factor)

    threads = [threading.Thread(target=work, args=(100.0 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_the_asyncio_client(server, network):
    async def work() -> list[np.ndarray]:
        transport = EverythingInWindows()
        async with warpfit.connect_async(
            server.address, transport=transport, shared_memory=True
        ) as client:
            data = await client.upload(X + 3, dtype="float64")
            calls = [client.evaluate(data, ["p1*x1"], [[float(n)]]) for n in range(4)]
            answers = await asyncio.gather(*calls)
            assert client_windows() >= 2
            await client.release(data)
            return answers

    for factor, got in enumerate(asyncio.run(work())):
        np.testing.assert_array_equal(got[:, 0], factor * (X[:, 0] + 3))
    eventually(lambda: not client_windows())


def test_a_new_engine(server, network, clients):
    data = network.upload(X, dtype="float64")
    server.kill_engine()
    for client in clients[:2]:
        np.testing.assert_array_equal(client.evaluate(data, ["x3"])[:, 0], X[:, 2])


def test_data_that_were_lost_are_uploaded_again(network, clients):
    data = clients[0].upload(X + 1, dtype="float64")
    for client in clients:
        network.release(data)
        np.testing.assert_array_equal(client.evaluate(data, ["x1"])[:, 0], X[:, 0] + 1)


def test_a_call_that_is_cut_off_gives_its_window_up(baseline, network, clients):
    data = network.upload(np.random.default_rng(6).normal(size=(200_000, 2)))
    long = "+".join(f"sin(x1*{k})" for k in range(1, 200))
    client = clients[0]
    for _ in range(3):
        with pytest.raises(warpfit.errors.DeadlineExceededError):
            client.evaluate(data, ["x2"] * 10 + [long] * 60, timeout=0.2)
        eventually(lambda: not client_windows())
    got = client.evaluate(data, ["x2"], timeout=30)
    np.testing.assert_array_equal(got[:, 0], data.dataset.variables[1])


# ------------------------------------------------------------------ requests made by hand

SIZE = 400  # of the value matrix of `evaluate_request` on 50 rows of float64


@pytest.fixture
def callers(server):
    with ExitStack() as stack:
        yield [
            Caller(stack.enter_context(grpc.insecure_channel(server.address, OWN_CONNECTION)))
            for _ in range(CLIENTS)
        ]


@pytest.fixture(scope="module")
def small():
    return Dataset.of(X[:50, :2], X[:50, 0], dtype="float64")


def into(request: pb.EvaluateRequest, piece: codec.Piece) -> bytes:
    """Ask for the matrices in a piece of a window."""
    return codec.evaluation_into(request.SerializeToString(), piece)


def refused(caller: Caller, method: str, request) -> tuple[str, str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        caller.send(method, request)
    return explained(caught.value)


@pytest.mark.parametrize(
    ("offset", "size", "reason"),
    [
        (0, SIZE - 1, "WINDOW_TOO_SMALL"),
        (0, 0, "WINDOW_TOO_SMALL"),
        (4096 - SIZE + 1, SIZE, "WINDOW_RANGE"),
        (2**63, 2**63, "WINDOW_RANGE"),
        (2**64 - 8, SIZE, "WINDOW_RANGE"),
        (0, 2**64 - 1, "WINDOW_RANGE"),
    ],
)
def test_pieces_that_do_not_fit(baseline, callers, local, small, offset, size, reason):
    callers[0].call("UploadVariables", small)
    request = evaluate_request(small.content_id)
    with RawWindow.of(local, 4096) as window:
        piece = codec.Piece(window.identifier, offset, size)
        for caller in callers:
            status, found, _ = refused(caller, "Evaluate", into(request, piece))
            assert (status, found) == ("INVALID_ARGUMENT", reason)
        other = Dataset.of(X[:50, :1] + offset % 7 + size % 5, dtype="float64")
        header = codec.upload_from(other, piece)
        status, found, _ = refused(callers[0], "UploadVariables", [header])
        assert (status, found) == ("INVALID_ARGUMENT", reason)
        assert not any(os.pread(window.descriptors[0], 4096, 0))


def test_the_right_piece_and_no_other_byte(baseline, callers, local, small):
    callers[0].call("UploadVariables", small)
    with RawWindow.of(local, 3 * SIZE) as window:
        piece = codec.Piece(window.identifier, SIZE - 3, SIZE)
        for caller in callers:
            os.pwrite(window.descriptors[0], b"\7" * 3 * SIZE, 0)
            request = into(evaluate_request(small.content_id), piece)
            (message,) = map(pb.EvaluateResponse.FromString, caller.send("Evaluate", request))
            assert not message.values
            content = os.pread(window.descriptors[0], 3 * SIZE, 0)
            np.testing.assert_array_equal(
                np.frombuffer(content[SIZE - 3 : 2 * SIZE - 3]), 0.5 * X[:50, 0]
            )
            assert set(content[: SIZE - 3] + content[2 * SIZE - 3 :]) == {7}


def test_windows_that_are_not_there(baseline, callers, local, small):
    callers[0].call("UploadVariables", small)
    request = evaluate_request(small.content_id)
    with RawWindow.of(local, 4096) as window:
        gone = window.identifier
    seen = set()
    for name in (gone, b"", bytes(16), os.urandom(16), os.urandom(1 << 20)):
        piece = codec.Piece(name, 0, 4096)
        request_into = into(request, piece)
        eventually(lambda r=request_into: "WINDOW_UNKNOWN" in _outcome(callers[0], r))
        for caller in callers:
            seen.add(refused(caller, "Evaluate", request_into))
        seen.add(refused(callers[0], "UploadVariables", [codec.upload_from(Dataset.of(X), piece)]))
    assert {found[:2] for found in seen} == {("INVALID_ARGUMENT", "WINDOW_UNKNOWN")}
    assert len(seen) == 1


def _outcome(caller: Caller, request) -> str:
    try:
        caller.send("Evaluate", request)
    except grpc.RpcError as error:
        return explained(error)[1]
    return ""


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (lambda d: [], "TRUNCATED_UPLOAD"),
        (lambda d: [codec.filled_to_bytes(10)], "TRUNCATED_UPLOAD"),
        (lambda d: [codec.filled_to_bytes(SIZE)], "BAD_DIGEST"),
        (lambda d: [codec.filled_to_bytes(SIZE + 8)], "SURPLUS_UPLOAD"),
        (lambda d: [codec.filled_to_bytes(4096)], "SURPLUS_UPLOAD"),
        (lambda d: [codec.filled_to_bytes(4097)], "WINDOW_RANGE"),
        (lambda d: [codec.filled_to_bytes(2**64 - 1)], "WINDOW_RANGE"),
        (lambda d: [*codec.upload_messages(d, 64)][1:], "BAD_HEADER"),
        (lambda d: [b"\xff"], "MALFORMED_MESSAGE"),
    ],
)
def test_uploads_that_are_wrong(baseline, callers, local, messages, reason):
    dataset = Dataset.of(X[:50, :1] - 9, dtype="float64")
    with RawWindow.of(local, 4096) as window:
        header = codec.upload_from(dataset, codec.Piece(window.identifier, 0, 4096))
        for caller in callers[:2]:
            found = refused(caller, "UploadVariables", [header, *messages(dataset)])
            assert found[:2] == ("INVALID_ARGUMENT", reason)


def test_the_server_hashes_what_it_has_copied(callers, local, network):
    """A client that changes the window all the time gets BAD_DIGEST, or what its id says."""
    dataset = Dataset.of(np.random.default_rng(8).normal(size=(200_000, 2)), dtype="float64")
    payload = dataset.matrix.tobytes()
    stop = threading.Event()
    with RawWindow.of(local, len(payload)) as window:
        descriptor = window.descriptors[0]
        os.pwrite(descriptor, payload, 0)

        def spoil() -> None:
            while not stop.is_set():
                os.pwrite(descriptor, b"spoilt!!", 1 << 20)
                os.pwrite(descriptor, payload[1 << 20 : (1 << 20) + 8], 1 << 20)

        thread = threading.Thread(target=spoil)
        thread.start()
        piece = codec.Piece(window.identifier, 0, len(payload))
        messages = [codec.upload_from(dataset, piece), codec.filled_to_bytes(len(payload))]
        outcomes = set()
        for _ in range(15):
            try:
                callers[0].send("UploadVariables", messages)
            except grpc.RpcError as error:
                outcomes.add(explained(error)[1])
            else:
                request = evaluate_request(dataset.content_id)
                values = b"".join(
                    pb.EvaluateResponse.FromString(message).values
                    for message in callers[0].send("Evaluate", request)
                )
                assert values == (0.5 * dataset.variables[0]).tobytes()
                callers[0].call("ReleaseVariables", dataset)
        stop.set()
        thread.join()
    assert outcomes <= {"BAD_DIGEST"}


def test_a_file_that_is_sealed_against_writing_in_time(callers, local, small):
    import fcntl

    callers[0].call("UploadVariables", small)
    with RawWindow.of(local, 4096) as window:
        fcntl.fcntl(window.descriptors[0], fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        piece = codec.Piece(window.identifier, 0, 4096)
        request = into(evaluate_request(small.content_id), piece)
        for caller in callers:
            assert refused(caller, "Evaluate", request)[:2] == (
                "INVALID_ARGUMENT",
                "WINDOW_UNUSABLE",
            )


def test_a_file_without_memory_gets_it_as_it_is_written(callers, local, network):
    dataset = Dataset.of(X, dtype="float64")
    callers[0].call("UploadVariables", dataset)
    with RawWindow.of(local, 1 << 30) as window:
        piece = codec.Piece(window.identifier, 1 << 29, X[:, 0].nbytes)
        request = into(evaluate_request(dataset.content_id), piece)
        callers[0].send("Evaluate", request)
        got = os.pread(window.descriptors[0], piece.size, piece.offset)
        np.testing.assert_array_equal(np.frombuffer(got), 0.5 * X[:, 0])
        assert os.fstat(window.descriptors[0]).st_blocks * 512 <= piece.size + 2 * 4096


# ------------------------------------------------------------------------------ ends


def _die_in_mid_call(address: str, method: str) -> None:
    """Process: be killed while a call with a window runs."""
    with warpfit.connect(address, transport=EverythingInWindows(), shared_memory=True) as client:
        rng = np.random.default_rng(os.getpid())
        data = client.upload(rng.normal(size=(200_000, 2)), dtype="float64")
        assert client_windows()
        if method == "upload":

            def progress(done: int, total: int) -> None:
                if done > 0:
                    os.kill(os.getpid(), signal.SIGKILL)

            client.upload(rng.normal(size=(1_000_000, 2)), dtype="float64", progress=progress)
        long = "+".join(f"sin(x1*{k})" for k in range(1, 100))
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
        client.evaluate(data, ["x2"] * 20 + [long] * 300)


@pytest.mark.parametrize("method", ["evaluate", "upload"])
def test_clients_that_die_leave_nothing(baseline, server, network, method):
    network.run(network.upload(X), ["x1"])
    before = server.descriptors()
    context = multiprocessing.get_context("spawn")
    dying = [
        context.Process(target=_die_in_mid_call, args=(server.address, method)) for _ in range(2)
    ]
    for process in dying:
        process.start()
    for process in dying:
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
    eventually(lambda: served_windows(server) == 0)
    # Two descriptors of each data set that the dead have uploaded stay, the front door's one.
    eventually(lambda: server.descriptors() <= before + 2 * len(dying), 20)


def test_windows_of_a_tenant(tmp_path):
    made = {name: new_token(name) for name in ("alice", "bob")}
    path = tmp_path / "tokens"
    path.write_text("".join(f"{line}\n" for _, line in made.values()))
    flags = ("--front-doors", "2", "--local-socket", "auto", "--token-file", str(path))
    with ServerProcess(*flags) as server, ExitStack() as stack:
        tokens = {name: token for name, (token, _) in made.items()}
        locals_ = {}
        for name, token in tokens.items():
            client = stack.enter_context(warpfit.connect(server.address, token=token))
            locals_[name] = client.info().local
        assert locals_["alice"].ticket != locals_["bob"].ticket
        dataset = Dataset.of(X[:50, :2], dtype="float64")
        window = stack.enter_context(RawWindow.of(locals_["alice"], 4096))
        request = evaluate_request(dataset.content_id)
        theirs = into(request, codec.Piece(window.identifier, 0, 4096))
        unknown = into(request, codec.Piece(bytes(16), 0, 4096))
        for _ in range(CLIENTS):
            for name, token in tokens.items():
                with grpc.insecure_channel(server.address, OWN_CONNECTION) as channel:
                    caller = Caller(channel, bearer(token))
                    caller.call("UploadVariables", dataset)
                    if name == "alice":
                        assert caller.send("Evaluate", theirs)
                    else:
                        found = refused(caller, "Evaluate", theirs)
                        assert found == refused(caller, "Evaluate", unknown)
                        assert found[1] == "WINDOW_UNKNOWN"
        # Windows of the same client work; a ticket of an end that is no tenant's does not.
        with warpfit.connect(
            server.address, token=tokens["bob"], transport=EverythingInWindows(), shared_memory=True
        ) as bob:
            bob.evaluate(bob.upload(X), ["x1"])
            assert client_windows() >= 2
        with RawWindow(locals_["bob"].socket, b"bob", [memory_file(4096)]) as forged:
            assert forged.reason == "TICKET_UNKNOWN"


def test_another_servers_windows(tmp_path):
    """A server that was killed leaves its socket; the next one replaces it, and no third one."""
    path = tmp_path / "socket"
    server = ServerProcess("--local-socket", str(path))
    port = server.address.rpartition(":")[2]
    with warpfit.connect(
        server.address, transport=EverythingInWindows(), shared_memory=True
    ) as client:
        data = client.upload(X, dtype="float64")
        client.evaluate(data, ["x1"])
        server.kill()
        server.stop()
        assert path.is_socket()
        with ServerProcess("--local-socket", str(path), "--port", port):
            for _ in range(3):
                np.testing.assert_array_equal(client.evaluate(data, ["x2"])[:, 0], X[:, 1])
            assert client_windows(), "after one call the windows are those of the new server"
            with pytest.raises(RuntimeError, match="did not start"):
                ServerProcess("--local-socket", str(path))
    assert not path.exists()


def assert_the_network_is_used(address: str, shared_memory: bool | str) -> None:
    with warpfit.connect(
        address, transport=EverythingInWindows(), shared_memory=shared_memory
    ) as client:
        data = client.upload(X, dtype="float64")
        np.testing.assert_array_equal(client.evaluate(data, ["x1"])[:, 0], X[:, 0])
        assert not client_windows()


def test_without_a_server_at_the_path(server, caplog):
    assert_the_network_is_used(server.address, "/nowhere/socket")
    assert "the network is used" in caplog.text


def test_without_a_socket_of_the_server(caplog):
    with ServerProcess() as server:
        assert_the_network_is_used(server.address, shared_memory=True)
    assert "--local-socket" in caplog.text


def test_what_does_not_move_matrices_needs_no_window(server):
    with warpfit.connect(server.address, shared_memory=True) as client:
        data = client.upload(X[:100], X[:100, 0])
        client.evaluate(data, ["x1"], loss="mse")
        assert not client_windows()
        request, _ = build_evaluation(data, ["x1"], None, None, {"loss": "mse"})
        assert request.matrix_bytes(data.layout) == 0
