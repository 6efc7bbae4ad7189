"""Windows of workers in other languages, right and wrong ones."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack

import grpc
import numpy as np
import pytest

from support.rpcs import OWN_CONNECTION, Caller, evaluate_request, explained
from support.shared_memory import (
    CLIENTS,
    X,
    eventually,
    into,
    refused,
)
from support.windows import RawWindow
from warpfit import codec
from warpfit.dataset import Dataset
from warpfit.v1 import evaluator_pb2 as pb

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
