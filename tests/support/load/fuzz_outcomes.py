"""Send random requests, alone or in a call that stays open, and judge how they end."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import grpc

from support.load.fuzz import PATIENCE, OpenCall, Request
from support.servers.rpcs import METHODS, SERVICE, Caller, explained
from warpfit.v1 import evaluator_pb2 as pb

#: What may come back. UNAVAILABLE would be a crash, INTERNAL and UNKNOWN a bug.
ALLOWED = {
    *("OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED"),
    *("DEADLINE_EXCEEDED", "CANCELLED"),
}
#: What a request may get although it gets something else alone: it depends on other requests.
PASSING = {"DATASET_NOT_FOUND", "TOO_MANY_REQUESTS", "QUEUE_FULL", "MEMORY"}


def outcomes(caller: Caller, request: Request, counts: Counter[str]) -> list[tuple[str, str]]:
    """Send a request; return status and reason of each call, which is empty for gRPC's own errors.

    What open calls have brought is added to ``counts``. One that went wrong has the status WRONG.
    """
    if isinstance(request, OpenCall):
        return _keep_open(caller, request, counts)
    messages: Any = request.messages if METHODS[request.method][0] else request.messages[0]
    try:
        caller.send(request.method, messages, request.timeout)
    except grpc.RpcError as error:
        return [explained(error)[:2]]
    return [("OK", "")]


class _Kept:
    """One call that stays open, and the answers that it has brought."""

    def __init__(self, caller: Caller, timeout: float) -> None:
        self.sent: SimpleQueue[bytes | None] = SimpleQueue()
        method = caller.channel.stream_stream(
            SERVICE + "Evaluate", None, pb.EvaluateResponse.FromString
        )
        self.rpc = method(iter(self.sent.get, None), timeout=timeout)
        self.answers: list[bytes] = []
        """Content of each."""
        self.pieces: list[pb.EvaluateResponse] = []
        """Messages of an answer that is not complete."""

    def read(self) -> bool:
        """Read an answer; return False if the call has ended instead."""
        try:
            for piece in self.rpc:
                self.pieces.append(piece)
                if piece.HasField("timings"):
                    self.answers.append(_content(self.pieces))
                    self.pieces = []
                    return True
        except grpc.RpcError:
            pass
        return False

    def move(self, move: str | float, messages: Iterator[bytes]) -> None:
        """Do what a move says."""
        if move == "send":
            self.sent.put(next(messages))
        elif move == "read":
            self.read()
        elif move == "cancel":
            self.rpc.cancel()
        elif move == "half_close":
            self.sent.put(None)


def _keep_open(caller: Caller, request: OpenCall, counts: Counter[str]) -> list[tuple[str, str]]:
    """Make open calls, and compare what they bring with what their requests bring alone."""
    with suppress(grpc.RpcError):  # if there is no room for it now
        caller.call("UploadVariables", request.dataset)
    alone = [_alone(caller, message) for message in request.messages]
    calls = [_Kept(caller, request.timeout) for _ in range(request.width)]
    messages = [iter(request.messages) for _ in calls]
    try:
        for move in request.moves:
            if isinstance(move, float):
                time.sleep(move)
            for call, rest in zip(calls, messages, strict=True):
                call.move(move, rest)
        for call in calls:
            while call.read():
                pass
    finally:
        for call in calls:
            call.rpc.cancel()
            call.sent.put(None)
    counts["calls"] += len(calls)
    counts[str(request.moves[-1])] += len(calls)
    counts["requests"] += request.size
    found = []
    for call in calls:
        end = explained(call.rpc)[:2]
        known = [one for one, _ in zip(alone, call.answers, strict=False) if one[0] == "OK"]
        counts["answers"] += len(call.answers)
        counts["answers_compared"] += len(known)
        fault = _fault(request, alone, call, end)
        found.append(("WRONG", fault) if fault else end)
    return found


def _alone(caller: Caller, message: bytes) -> tuple[str, str, bytes]:
    """Send a request in a call of its own; return status, reason and content of the answer."""
    try:
        answer = caller.send("Evaluate", message)
    except grpc.RpcError as error:
        return (*explained(error)[:2], b"")
    return "OK", "", _content([pb.EvaluateResponse.FromString(piece) for piece in answer])


def _content(pieces: list[pb.EvaluateResponse]) -> bytes:
    """Return what the messages of an answer say, but for what differs from call to call."""
    whole = pb.EvaluateResponse()
    for piece in pieces:
        whole.MergeFrom(piece)
    whole.values = b"".join(piece.values for piece in pieces)
    whole.jacobian = b"".join(piece.jacobian for piece in pieces)
    for name in ("timings", "offset"):
        whole.ClearField(name)
    return whole.SerializeToString(deterministic=True)


def _fault(
    request: OpenCall, alone: list[tuple[str, str, bytes]], call: _Kept, end: tuple[str, str]
) -> str:
    """Say what is wrong with what a call has brought; nothing is if this is empty."""
    status, reason = end
    answered = len(call.answers)
    if answered > len(alone):
        return "there are more answers than requests"
    for number, content in enumerate(call.answers):
        if alone[number][0] == "OK" and content != alone[number][2]:
            return f"request {number} has another answer than alone"
        if alone[number][0] != "OK" and alone[number][1] not in PASSING:
            return f"request {number} has an answer, but alone it gets {alone[number][:2]}"
    if status == "OK" and (call.pieces or not answered):
        return "the call ends with OK before an answer is complete"
    pauses = [move for move in request.moves if isinstance(move, float)]
    waited = max(pauses, default=0.0) > 0.2 or request.moves[-1] == "silence"
    if status == "CANCELLED" and "cancel" not in request.moves and not waited:
        return "the call is cancelled by nobody"
    if status == "DEADLINE_EXCEEDED" and request.timeout == PATIENCE:
        return "the call does not end"
    if status in ("OK", "CANCELLED", "DEADLINE_EXCEEDED") or reason in PASSING:
        return ""
    if alone and answered == len(alone):
        return f"the call ends with {end} after all answers"
    expected = alone[answered][:2] if alone else ("INVALID_ARGUMENT", "NO_MESSAGE")
    if end != expected and expected[1] not in PASSING:
        return f"request {answered} ends the call with {end}, but alone it gets {expected}"
    return ""


def is_fine(found: tuple[str, str]) -> bool:
    """Tell whether an answer is one that a request may get: errors say why."""
    status, reason = found
    explains_itself = status in ("OK", "DEADLINE_EXCEEDED", "CANCELLED") or reason != ""
    return status in ALLOWED and explains_itself
